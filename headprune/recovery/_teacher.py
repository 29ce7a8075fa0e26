"""Pairs the sites of a pruned model with its teacher's, and averages the teacher's head outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.bars import bar
from headprune.core.errors import HeadPruneError, InvalidValue, PlanMismatch, UnsupportedModel
from headprune.core.heads import AttentionSite, HeadCounts
from headprune.model.batches import EMPTY
from headprune.model.contexts import ContextSums, not_finite, only_padding, reading
from headprune.model.fingerprint import fingerprint
from headprune.model.running import batch_size, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, all_cut_sites, bind, sites_for
from headprune.model.transfers import in_main_memory

_MUST = "the model that the pruned one was cut from"


def paired(
    model: nn.Module, teacher: nn.Module, sites: Iterable[AttentionSite] | None
) -> list[tuple[BoundSite, BoundSite]]:
    """Return every site of the model with the same site of the teacher.

    Raises:
        PlanMismatch: the teacher has another structure, or lacks heads that the model has.
    """
    ours = bind(model, all_cut_sites(model) if sites is None else sites)
    # The same sites, so that a layout that the user gave holds for both.
    try:
        if sites is None:
            sites = sites_for(teacher, [b.site.name for b in ours])
        theirs = bind(teacher, sites)
    except HeadPruneError as error:
        raise PlanMismatch("teacher", _MUST, f"a {type(teacher).__name__} ({error})") from error
    if _structure(model, ours) != _structure(teacher, theirs):
        described = f"{_described(teacher, theirs)} against {_described(model, ours)}"
        raise PlanMismatch("teacher", _MUST, f"one of another structure: {described}")
    # A cut only removes heads, and those that are kept keep their numbers.
    pairs = list(zip(ours, theirs, strict=True))
    for our, their in pairs:
        lacking = sorted(set(our.site.heads) - set(their.site.heads))
        if lacking:
            which = f"heads {lacking}"
            if our.site.is_feed_forward:
                which = f"{len(lacking):,} neurons"
            got = f"one without {which} of {our.site.name}"
            raise PlanMismatch("teacher", _MUST, got, "Are teacher and model swapped?")
    return pairs


def _structure(model: nn.Module, bound: Sequence[BoundSite]) -> str:
    return fingerprint(model, [b.site for b in bound]).structure


def _described(model: nn.Module, bound: Sequence[BoundSite]) -> str:
    counts = HeadCounts.sum((b.site.n_query_heads, b.site.is_feed_forward) for b in bound)
    return f"{type(model).__name__} with {counts} at {len(bound)} sites"


def mean_contexts(
    teacher: nn.Module,
    wanted: Sequence[tuple[BoundSite, Sequence[int]]],
    batches: Iterable[Any],
    run: Callable[[nn.Module, Any], Any],
    progress: bool,
) -> tuple[list[Tensor], int]:
    """Average columns of the output projections' inputs over all tokens that are no padding.

    A module that runs several times in a forward pass is averaged over all its runs.

    Args:
        teacher: The model; run in evaluation mode and not changed.
        wanted: Sites of it, each with columns of its output projection's input.
        batches: The data.
        run: Runs a model on a batch.
        progress: Show a progress bar.

    Returns:
        One mean ``[columns]`` in fp64 per site, and the number of examples.

    Raises:
        InvalidValue: no batches, nothing but padding, or means that are not finite.
    """
    bound = [b for b, _ in wanted]
    sums = ContextSums([columns for _, columns in wanted])
    device = device_of(teacher)
    examples = 0
    with undisturbed(teacher), torch.no_grad(), reading(teacher, bound, sums.take) as begin:
        for number, batch in enumerate(bar(batches, "teacher", progress)):
            examples += batch_size(batch, f"batch {number}")
            batch = to_device(batch, device)
            begin(batch)
            run(teacher, batch)
    if not examples:
        raise InvalidValue(*EMPTY)
    means, counts = [], []
    for number, b in enumerate(bound):
        if number not in sums.of_site:
            where = f"{b.site.name}.{b.layout.gate}"
            must = f"a module that runs when {type(b.module).__name__} does"
            raise UnsupportedModel(where, must, "one that no batch reached")
        total = sums.of_site[number]
        means.append(total[:-1] / total[-1])
        counts.append(total[-1])
    _check_means(bound, means, counts)
    return means, examples


def _check_means(
    bound: Sequence[BoundSite], means: Sequence[Tensor], counts: Sequence[Tensor]
) -> None:
    """Refuse batches of padding alone, and means that are not finite."""
    reached = in_main_memory(count > 0 for count in counts)
    finite = in_main_memory(torch.isfinite(mean).all() for mean in means)
    for b, has_tokens, is_finite in zip(bound, reached, finite, strict=True):
        name = b.site.name
        if not bool(has_tokens):
            raise only_padding(name)
        if not bool(is_finite):
            raise not_finite(f"the teacher's mean head output at {name}")
