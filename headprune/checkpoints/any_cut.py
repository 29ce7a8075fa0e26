"""Whether a format can hold any cut of a model, before there is a cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn

from headprune.checkpoints import gguf_file, remote_code
from headprune.checkpoints.described import add_biases_
from headprune.core.errors import UnsupportedModel
from headprune.core.heads import without
from headprune.core.layout import AttentionLayout
from headprune.model.cut import cut_
from headprune.model.plain_config import config_of_cut
from headprune.model.sites import BoundSite, bind, find_sites

_DESCRIBE: dict[str, Callable[[Any, list[BoundSite]], Any]] = {
    "transformers": config_of_cut,
    "remote-code": remote_code.description_of_cut,
    "gguf": gguf_file.description_of_cut,
}


def check_any_cut(
    model: nn.Module,
    format: str,
    where: str,
    neurons: bool,
    layouts: Sequence[AttentionLayout] = (),
    biased: Collection[str] = (),
) -> None:
    """Refuse a format that cannot hold any cut with equally many heads in each layer.

    Args:
        model: The whole model, perhaps on the meta device; it is cut.
        format: The format; one that holds every cut passes.
        where: For the error.
        neurons: Whether the cut may remove neurons alone. Then, as for ``gguf``, it is enough that
            the format holds the whole model.
        layouts: The user's own layouts.
        biased: What gets biases by a recovery after the cut: ``attention``, ``feed_forward``.

    Raises:
        UnsupportedModel: it cannot; the message has the reason.
    """
    describe = _DESCRIBE.get(format)
    if describe is None:
        return
    with_biases = copy.deepcopy(model) if biased else None
    _check(describe, model, format, where, neurons, layouts)
    if with_biases is not None:
        add_biases_(with_biases, _biases(with_biases, layouts, biased))
        hint = (
            "A recovery without biases needs none, such as lstsq with"
            " --set recover.0.settings.intercept=false."
        )
        _check(describe, with_biases, format, where, neurons, layouts, hint)


def _check(
    describe: Callable[[Any, list[BoundSite]], Any],
    model: nn.Module,
    format: str,
    where: str,
    neurons: bool,
    layouts: Sequence[AttentionLayout],
    hint: str = "",
) -> None:
    """Refuse a format as ``check_any_cut`` does, for a model with the biases that it has."""
    reason = _reason(describe, model, layouts, neurons)
    if format != "gguf" and not neurons:
        # A configuration may hold some counts only.
        while _cut_one_unit_(model, layouts):
            reason = _reason(describe, model, layouts, neurons)
            if reason is None:
                return
    if reason is not None:
        got = f"{format!r}, which is {reason.must} (this model: {reason.got})"
        raise UnsupportedModel(where, "one that can hold a cut of this model", got, hint)


def _reason(
    describe: Callable[[Any, list[BoundSite]], Any],
    model: nn.Module,
    layouts: Sequence[AttentionLayout],
    neurons: bool,
) -> UnsupportedModel | None:
    bound = bind(model, find_sites(model, layouts, feed_forward=neurons))
    try:
        describe(model, bound)
    except UnsupportedModel as error:
        return error
    return None


def _biases(
    model: nn.Module, layouts: Sequence[AttentionLayout], biased: Collection[str]
) -> Iterator[str]:
    """Names of the biases of the output projections of attention or feed-forwards."""
    for b in bind(model, find_sites(model, layouts, feed_forward="feed_forward" in biased)):
        kind = "feed_forward" if b.layout.is_feed_forward else "attention"
        if kind in biased and b.layout.gate:
            yield f"{b.site.name}.{b.layout.gate}.bias".lstrip(".")


def _cut_one_unit_(model: nn.Module, layouts: Sequence[AttentionLayout]) -> bool:
    """Remove one unit of heads from each layer with several; return whether any had several."""
    sites = find_sites(model, layouts)
    removed = {site.name: site.units[0] for site in sites if len(site.units) > 1}
    cut_(model, bind(model, sites), without(sites, removed))
    return bool(removed)
