"""Checkpoints that Transformers loads by itself: the head counts stand in the configuration.

Which families can is decided by trying: a configuration with the new counts is built, the class is
built from it without memory, and every tensor must have the cut model's shape. Whether the code
does the same with them is proven by loading what was written.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from headprune.attention.kept_heads import weights_of
from headprune.checkpoints.building import fresh, is_known
from headprune.core.errors import UnsupportedModel
from headprune.model.sites import BoundSite

_QUERY = (
    "num_attention_heads",
    "num_heads",
    "n_head",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_KEY_VALUE = ("num_key_value_heads", "num_kv_heads")
_WHERE = "format 'transformers'"


def config_of_cut(model: nn.Module, bound: list[BoundSite]) -> Any:
    """A configuration from which the model's class has exactly the tensors of the cut model.

    Raises:
        UnsupportedModel: there is none; the message says why.
    """
    if not is_known(model):
        raise UnsupportedModel(_WHERE, "for a class of Transformers", type(model).__name__)
    for b in bound:
        if not b.site.heads:
            raise UnsupportedModel(
                _WHERE, "for a model with a head in every layer", f"none left in {b.site.name}"
            )
        if b.site.geometry.kv_of is not None:
            must = "for query heads that share key/value heads evenly"
            raise UnsupportedModel(
                _WHERE, must, f"{b.site.name} with key/value heads {b.site.geometry.kv_of}"
            )
    reasons = []
    for with_width in (False, True):
        config: Any = copy.deepcopy(model.config)
        try:
            for section, sites in _sections(model, config, bound):
                _set_counts(section, sites, with_width)
            config = type(config).from_dict(config.to_dict())  # what a reader of the file gets
            differs = differing_shapes(fresh(model, config), model)
        except UnsupportedModel:
            raise
        except (
            Exception
        ) as error:  # a configuration's validators, and constructors, raise what they like
            reasons.append(f"{type(config).__name__} refuses them: {' '.join(str(error).split())}")
            continue
        if not differs:
            return config
        reasons.append(f"with these counts {type(model).__name__} would have {differs[0]}")
    raise UnsupportedModel(_WHERE, "for head counts that the configuration can say", reasons[0])


def differing_shapes(built: nn.Module | None, model: nn.Module) -> list[str]:
    """What is not as in the cut model among the tensors of a freshly built one, in words."""
    assert built is not None
    theirs, ours = ({n: list(t.shape) for n, t in weights_of(m).items()} for m in (built, model))
    names = [n for n in {**ours, **theirs} if theirs.get(n) != ours.get(n)]
    return [f"{n} {theirs.get(n, 'missing')}, not {ours.get(n, 'at all')}" for n in names]


def _sections(
    model: Any, config: Any, bound: list[BoundSite]
) -> Iterator[tuple[Any, list[BoundSite]]]:
    """The parts of ``config``, a copy of the model's, that speak of some sites each: text and
    vision have their own."""
    places = {id(section): path for path, section in _parts(model.config)}
    found: dict[tuple[str, ...], list[BoundSite]] = {}
    for b in bound:
        owned = (getattr(m, "config", None) for m in b.module.modules())
        path = next((places[id(c)] for c in owned if id(c) in places), ())
        found.setdefault(path, []).append(b)
    for path, sites in found.items():
        section = config
        for step in path:
            section = getattr(section, step)
        yield section, sites


def _parts(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            yield from _parts(part, (*path, name))


def _set_counts(section: Any, sites: list[BoundSite], with_width: bool) -> None:
    """Sets the head counts that a part of a configuration has, and a head's width where it follows
    from them else."""
    counts = {(b.site.geometry.n_query_heads, b.site.geometry.n_kv_heads) for b in sites}
    if len(counts) > 1:
        said = ", ".join(str(len(b.site.heads)) for b in sites)
        raise UnsupportedModel(
            _WHERE, "for the same number of heads in every layer", f"layers with {said} heads"
        )
    ((n_query_heads, n_kv_heads),) = counts
    site = sites[0].site
    values = {n: n_query_heads for n in _QUERY if getattr(section, n, None) == site.n_query_heads}
    values |= {n: n_kv_heads for n in _KEY_VALUE if getattr(section, n, None) == site.n_kv_heads}
    if with_width:
        values["head_dim"] = site.head_dim
    for name, value in values.items():
        setattr(section, name, value)
