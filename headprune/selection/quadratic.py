"""Keeps the heads whose absence together raises the loss least, by its curvature: it sees which
heads can stand in."""

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
    """Keeps what makes ``1/2 (1-m)' I (1-m)`` least, m 1 for heads that stay and 0 for others,
    within the budget.

    ``I`` is the curvature of the scores, of ``fisher`` or ``ggn``. Half its diagonal are the
    scores; the rest knows that two heads which do the same are not missed as long as one of them
    stays, or that two which cancel each other had better leave together. Terms of heads that must
    go count as well; between groups of sites with budgets of their own there are none.

    Source: Kwon et al. 2022, "A Fast Post-Training Pruning Framework for Transformers", their mask
    search, which takes the diagonal, and mask rearrangement, which swaps greedily inside each
    layer. Here the starts are ``global_topk``, their rearrangement of it, wearing down one by one,
    the fewest heads allowed, and a knapsack over layers with the curvature inside each. Each is
    lowered as long as one of these moves does it: the best subset of a layer with the rest of the
    model held (all subsets are tried where a layer has at most 12 units), a head that goes, comes
    back or changes places with another anywhere, and a knapsack over all layers around the plan so
    far; the best also by chains of such moves. So the plan is never worse than any of the starts by
    this objective; it need not be the best there is.

    The plan may keep less than the budget allows where that lowers the objective.

    When: scores of ``fisher`` or ``ggn``, and many heads go: some stand in for each other, which
    single scores miss.
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
        first = search.gone(greedy.keep(problem))
        if self.search == "kwon":
            return search.kept(search.rearranged(first))
        fewest = search.gone(minimum(problem, best_first(problem.scores)))
        starts = [first, search.rearranged(first), fewest, search.backward_elimination()]
        starts += [search.allotted(first, share) for share in (0.0, 0.5)]
        return search.kept(search.filled(search.lowest(starts)))


def _matrix(scores: HeadScores) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The curvature of scores.

    Raises:
        InvalidValue: they carry none, or its file is gone.
    """
    if scores.curvature is None:
        why = [note for note in scores.notes if "curvature" in note]
        hint = (
            why[-1]
            if why
            else "hp.score(model, batches, 'fisher') gives it, or 'ggn', which needs no labels."
        )
        must = "scores that carry their curvature, for the selector 'quadratic'"
        raise InvalidValue("select(scores=)", must, f"those of {scores.scorer!r} without", hint)
    return scores.curvature.matrix
