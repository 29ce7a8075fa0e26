"""Sets a pruned model and its teacher side by side, and averages the teacher's head outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from headprune.core.errors import HeadPruneError, InvalidValue, PlanMismatch, UnsupportedModel
from headprune.core.heads import AttentionSite
from headprune.model.batches import EMPTY
from headprune.model.contexts import reading, wide
from headprune.model.fingerprint import fingerprint
from headprune.model.running import batch_size, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, bind
from headprune.model.transfers import in_main_memory, sent

_MUST = "the model that the pruned one was cut from"


def paired(
    model: nn.Module, teacher: nn.Module, sites: Iterable[AttentionSite] | None
) -> list[tuple[BoundSite, BoundSite]]:
    """Every site of the model with the same site of the teacher.

    Raises:
        PlanMismatch: the teacher has another structure, or lacks heads that the model has.
    """
    ours = bind(model, sites)
    try:
        theirs = bind(teacher, sites)
    except HeadPruneError as error:
        raise PlanMismatch("teacher", _MUST, f"a {type(teacher).__name__} ({error})") from error
    structure = [
        fingerprint(m, [b.site for b in bound]).structure
        for m, bound in ((model, ours), (teacher, theirs))
    ]
    if structure[0] != structure[1]:
        got = f"one of another structure: {_words(teacher, theirs)} against {_words(model, ours)}"
        raise PlanMismatch("teacher", _MUST, got)
    pairs = list(zip(ours, theirs, strict=True))
    for our, their in pairs:
        lacking = sorted(set(our.site.heads) - set(their.site.heads))
        if lacking:
            hint = "Are teacher and model swapped?"
            raise PlanMismatch(
                "teacher", _MUST, f"one without heads {lacking} of {our.site.name}", hint
            )
    return pairs


def _words(model: nn.Module, bound: Sequence[BoundSite]) -> str:
    return (
        f"{type(model).__name__} with {sum(b.site.n_query_heads for b in bound)} heads at"
        f" {len(bound)} sites"
    )


def mean_contexts(
    teacher: nn.Module,
    wanted: Sequence[tuple[BoundSite, Sequence[int]]],
    batches: Iterable[Any],
    run: Callable[[nn.Module, Any], Any],
    progress: bool,
) -> tuple[list[Tensor], int]:
    """Means of columns of the output projections' inputs, over every token that is no padding.

    A module that runs several times in a forward pass is averaged over all its runs.

    Args:
        teacher: The model; run in evaluation mode and left as it was.
        wanted: Sites of it, each with columns of its output projection's input.
        batches: The data.
        run: Runs a model on a batch.
        progress: Show a progress bar.

    Returns:
        One mean ``[columns]`` in fp64 a site, and the number of examples.

    Raises:
        InvalidValue: no batches, nothing but padding, or means that are not finite.
    """
    totals: list[Tensor | None] = [None] * len(wanted)
    counts: list[int | Tensor] = [0] * len(wanted)

    def take(number: int, x: Tensor, counted: Tensor | None) -> None:
        columns = sent(wanted[number][1], x.device, torch.long)
        tokens = x.flatten(0, 1).index_select(1, columns).to(wide(x))
        if counted is not None:  # chosen, not multiplied by 0: attention may leave NaN at padding
            tokens = torch.where(
                counted.to(x.device).flatten()[:, None], tokens, torch.zeros_like(tokens)
            )
        total = tokens.sum(0)
        before = totals[number]
        totals[number] = total if before is None else before + total
        counts[number] = counts[number] + (len(tokens) if counted is None else counted.sum())

    device = device_of(teacher)
    examples = 0
    bound = [b for b, _ in wanted]
    with undisturbed(teacher), torch.no_grad(), reading(teacher, bound, take) as begin:
        for number, batch in enumerate(
            tqdm(batches, desc="teacher", disable=not progress, leave=False)
        ):
            examples += batch_size(batch, f"batch {number}")
            batch = to_device(batch, device)
            begin(batch)
            run(teacher, batch)
    if not examples:
        raise InvalidValue(*EMPTY)
    means = [_mean(*of_site) for of_site in zip(bound, totals, counts, strict=True)]
    reached = in_main_memory(count > 0 for _, count in means)
    finite = in_main_memory(torch.isfinite(mean).all() for mean, _ in means)
    for b, some, fine in zip(bound, reached, finite, strict=True):
        name = b.site.name
        if not bool(some):
            raise InvalidValue(
                "batches", "with a token that is no padding", f"only padding at {name}"
            )
        if not bool(fine):
            hint = "Look for NaN or infinite values in the batches."
            raise InvalidValue(
                f"the teacher's mean head output at {name}", "finite", "NaN or infinite", hint
            )
    return [mean for mean, _ in means], examples


def _mean(bound: BoundSite, total: Tensor | None, count: int | Tensor) -> tuple[Tensor, Tensor]:
    """The mean, which nobody has looked at, and of how many tokens."""
    name = bound.site.name
    if total is None:
        must = f"a module that runs when {type(bound.module).__name__} does"
        raise UnsupportedModel(f"{name}.{bound.layout.gate}", must, "one that no batch reached")
    n_tokens = (
        torch.full((), count, device=total.device)
        if isinstance(count, int)
        else count.to(total.device)
    )
    return total / n_tokens, n_tokens
