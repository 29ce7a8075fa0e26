"""Swap heads of another selector's plan as long as the measured loss falls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, ClassVar

import numpy as np

from headprune.core.codec import FrozenDict
from headprune.core.errors import check_count
from headprune.selection._base import Position, Problem, Selector
from headprune.selection._inner import frozen, inner_selector
from headprune.selection._measured import Floats, are_lower, check_margin, measured_losses


@dataclass(frozen=True)
class LocalSearch(Selector):
    """Swap heads of another selector's plan as long as the measured loss falls.

    A swap removes one head and restores another, within the budget and the rules. Swaps are
    measured (``loss`` of ``hp.select``) some at a time, the lowest kept scores with the highest
    removed ones first. Of each lot, the swap of the lowest mean loss is made if it is below the
    present plan's by ``margin`` standard errors of the differences of single examples; then the
    order starts again.
    It ends when every swap was measured, or after ``max_losses`` measurements.

    The plan's notes give the loss before and after on the examples that decided; for other examples
    the latter is too low.

    When: the loss itself is to decide, and labelled examples are many.
    Cost: up to ``max_losses`` measurements, each a part of a pass over the data.

    Args:
        max_losses: The most plans that are measured, see ``mask_losses``.
        at_once: Swaps per lot.
        margin: How far below zero a swap's mean difference must be, in its standard errors.
        inner: The selector that makes the first plan, by name; one that needs scores alone.
        inner_settings: Its settings, without ``min_heads`` and ``multiple_of``, which are those
            given here.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    max_losses: int = 512
    at_once: int = 16
    margin: float = 2.0
    inner: str = "global_topk"
    inner_settings: Mapping[str, Any] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("max_losses", 2), ("at_once", 1)):
            check_count(f"LocalSearch.{name}", getattr(self, name), least)
        check_margin("LocalSearch.margin", self.margin)
        object.__setattr__(self, "inner_settings", frozen(self.inner_settings, self))
        inner_selector(self, self.inner, self.inner_settings)

    def keep(self, problem: Problem) -> frozenset[Position]:
        keep = inner_selector(self, self.inner, self.inner_settings).keep(problem)
        seen = {keep}
        measured = swaps = 0
        first: float | None = None  # the loss of the inner selector's plan
        now = 0.0
        while measured + 1 < self.max_losses:
            # 1. Measure the present plan together with the next swaps.
            room = self.max_losses - measured - 1
            new = (swap for swap in _swaps(problem, keep) if swap not in seen)
            candidates = list(islice(new, min(self.at_once, room)))
            if not candidates and first is not None:
                break
            losses = measured_losses(problem, [keep, *candidates])
            measured += len(losses)
            seen.update(candidates)
            # 2. Make the best of them, if it is better.
            now = float(losses[0].mean())
            if first is None:
                first = now
            best = self._better(losses)
            if best is not None:
                keep = candidates[best]
                now = float(losses[1 + best].mean())
                swaps += 1
        problem.notes.append(
            f"Loss above the uncut model's on the examples that decided: {first:.4g} by"
            f" {self.inner}, {now:.4g} after {swaps} swaps; {measured} plans measured."
        )
        return keep

    def _better(self, losses: Floats) -> int | None:
        """The swap of the lowest loss among those that are reliably better than the present plan.

        Args:
            losses: ``[1 + swaps, examples]``, the present plan first.
        """
        lower = are_lower(losses, self.margin)
        if not lower.any():
            return None
        means = (losses[1:] - losses[0]).mean(1)
        return int(np.argmin(np.where(lower, means, np.inf)))


def _swaps(problem: Problem, keep: frozenset[Position]) -> Iterator[frozenset[Position]]:
    """Plans after one swap, the lowest kept score with the highest removed one first."""
    values = {(unit.site, unit.unit): unit.value for unit in problem.scores.units()}
    removable = keep - problem.must_keep
    restorable = values.keys() - keep - problem.must_remove
    pairs = sorted((values[a] - values[b], a, b) for a, b in product(removable, restorable))
    for _, kept, removed in pairs:
        swapped = keep - {kept} | {removed}
        if problem.lawful(swapped) and problem.fits(swapped):
            yield swapped
