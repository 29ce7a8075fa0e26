"""Begins with another selector's choice and swaps heads as long as the model's measured loss
falls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.selection._base import Position, Problem, Selector
from headprune.selection._inner import frozen, inner_selector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

#: Losses that differ by less, relative to the largest, differ by rounding.
_SAME = 1e-6


@dataclass(frozen=True)
class LocalSearch(Selector):
    """Begins with another selector's choice and swaps heads as long as the model's measured loss
    falls.

    A swap lets a head go and another one back in, anywhere in the model, within the budget and the
    rules (which leave swaps inside one layer, mostly, under ``multiple_of``). Swaps are measured
    (``loss`` of ``hp.select``) some at a time, the lowest kept scores against the highest removed
    ones first. Of each lot the one of the lowest mean loss is made if it is below the present
    plan's by ``margin`` standard errors of the differences of single examples; then the order
    starts again. It ends when no swap is left that was not measured, or after ``max_losses``
    measurements.

    The plan's notes say the loss before and after on the examples that decided: the latter is too
    low for others, by more the smaller ``margin`` and the more swaps were measured.

    When: the loss itself is to decide, and there are labelled examples enough to tell small
    differences.
    Cost: up to ``max_losses`` measurements, each a part of a pass over the data.

    Args:
        max_losses: Plans that are measured at most; each is a part of a pass over the data, see
            ``mask_losses``.
        at_once: Swaps that are measured together, of which one is made at most.
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
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidValue(f"LocalSearch.{name}", f"a count >= {least}", repr(value))
        if (
            isinstance(self.margin, bool)
            or not isinstance(self.margin, (int, float))
            or not self.margin >= 0
        ):
            raise InvalidValue(
                "LocalSearch.margin", "a number of standard errors >= 0", repr(self.margin)
            )
        object.__setattr__(self, "inner_settings", frozen(self.inner_settings, self))
        inner_selector(self, self.inner, self.inner_settings)

    def keep(self, problem: Problem) -> frozenset[Position]:
        keep = inner_selector(self, self.inner, self.inner_settings).keep(problem)
        seen, measured, swaps = {keep}, 0, 0
        before: float | None = None
        now = 0.0
        while (room := self.max_losses - measured - 1) > 0:
            swapped = (swap for swap in _swaps(problem, keep) if swap not in seen)
            candidates = list(islice(swapped, min(self.at_once, room)))
            if not candidates and before is not None:
                break
            losses = _measured(problem, [keep, *candidates])
            measured += len(losses)
            seen.update(candidates)
            now = float(losses[0].mean())
            before = now if before is None else before
            best = self._lower(losses)
            if best is not None:
                keep, now, swaps = candidates[best], float(losses[1 + best].mean()), swaps + 1
        said = (
            f"Loss above the uncut model's on the examples that decided: {before:.4g} by"
            f" {self.inner}, {now:.4g} "
        )
        problem.notes.append(f"{said}after {swaps} swaps; {measured} plans measured.")
        return keep

    def _lower(self, losses: Floats) -> int | None:
        """The swap of the lowest loss among those that are surely below the first row, the present
        plan."""
        differences = losses[1:] - losses[0]
        means = differences.mean(1)
        errors = differences.std(1, ddof=1) / differences.shape[1] ** 0.5
        sure = means < -np.maximum(self.margin * errors, _SAME * np.abs(losses).max())
        return int(np.argmin(np.where(sure, means, np.inf))) if sure.any() else None


def _swaps(problem: Problem, keep: frozenset[Position]) -> Iterator[frozenset[Position]]:
    """Plans that a swap makes, the lowest kept score against the highest removed one first."""
    values = {(unit.site, unit.unit): unit.value for unit in problem.scores.units()}
    out = keep - problem.must_keep
    back = values.keys() - keep - problem.must_remove
    pairs = sorted((values[a] - values[b], a, b) for a in out for b in back)
    for _, a, b in pairs:
        swapped = keep - {a} | {b}
        if problem.lawful(swapped) and problem.fits(swapped):
            yield swapped


def _measured(problem: Problem, plans: list[frozenset[Position]]) -> Floats:
    """``[plans, examples]``: by how much each example's loss rises under each plan.

    Raises:
        InvalidValue: the callable returns something else, or knows a single example.
    """
    assert problem.loss is not None
    found = np.asarray(problem.loss([problem.mask(plan) for plan in plans]), dtype=np.float64)
    where, must = (
        "what select(loss=) returns",
        f"[masks, examples], {len(plans)} masks and at least 2 examples",
    )
    if found.ndim != 2 or len(found) != len(plans) or found.shape[1] < 2:
        raise InvalidValue(where, must, f"the shape {list(found.shape)}")
    if not np.isfinite(found).all():
        raise InvalidValue(where, "finite", "NaN or infinite numbers")
    return found
