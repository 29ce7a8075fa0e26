"""Remove the heads that together raise the loss least, by its curvature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from headprune.core.errors import InvalidValue
from headprune.core.scores import HeadScores
from headprune.selection._base import Position, Problem, Selector
from headprune.selection._budget import best_first, minimum
from headprune.selection._quadratic_search import QuadraticSearch
from headprune.selection.global_topk import GlobalTopk


@dataclass(frozen=True)
class Quadratic(Selector):
    """Remove the heads that together raise the loss least, by its curvature.

    Minimises ``1/2 (1-m)' I (1-m)`` within the budget; m is 1 for kept and 0 for removed heads.
    ``I`` is the curvature of the scores of ``fisher`` or ``ggn``. Half its diagonal are the scores.
    The other terms show which heads can replace each other, and which cancel each other and are
    better removed together.

    Source: Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers": their mask
    search, which takes the diagonal, and mask rearrangement, which swaps greedily inside each
    layer. Here a local search starts from these plans and from others, so the plan is never worse
    than theirs by this objective. It may keep less than the budget allows where that lowers the
    objective.

    When: scores of ``fisher`` or ``ggn``, and many heads are removed: some replace each other,
    which single scores miss.
    Cost: no pass beyond the scorer's; about a second for 144 heads, some seconds for a thousand.

    Args:
        search: ``full``, all of the above, or ``kwon``: their rearrangement of ``global_topk`` and
            nothing after it.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"curvature"})

    search: Literal["full", "kwon"] = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search not in ("full", "kwon"):
            raise InvalidValue("Quadratic.search", "'full' or 'kwon'", repr(self.search))

    def keep(self, problem: Problem) -> frozenset[Position]:
        search = QuadraticSearch(problem, _matrix(problem.scores))
        greedy = GlobalTopk(min_heads=self.min_heads, multiple_of=self.multiple_of)
        top = search.removed(greedy.keep(problem))
        if self.search == "kwon":
            return search.kept(search.rearranged(top))
        fewest = search.removed(minimum(problem, best_first(problem.scores)))
        starts = [
            top,
            search.rearranged(top),
            fewest,
            search.backward_elimination(),
            search.knapsack_over_sites(top, 0.0),  # terms between sites left out
            search.knapsack_over_sites(top, 0.5),  # and at half their size
        ]
        return search.kept(search.restored_for_free(search.best_from(starts)))


def _matrix(scores: HeadScores) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The curvature of scores, ``[units, units]``.

    Raises:
        InvalidValue: they carry none, or its file is gone.
    """
    if scores.curvature is None:
        hint = "hp.score(model, batches, 'fisher') gives it, or 'ggn', which needs no labels."
        for note in scores.notes:
            if "curvature" in note:
                hint = note  # why it is not there
        must = "scores that carry their curvature, for the selector 'quadratic'"
        raise InvalidValue("select(scores=)", must, f"those of {scores.scorer!r} without", hint)
    return scores.curvature.matrix
