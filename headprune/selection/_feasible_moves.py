"""Which sets of units may go, in arrays: what ``Problem.cost`` and ``Problem.lawful`` say, for many
sets at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from headprune.selection._base import Position, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]
    Counts = NDArray[np.int64]

#: Sites with at most so many units to decide on have all their subsets tried: 4096.
ENUMERATED = 12


@dataclass(frozen=True)
class Choices:
    """What one site may lose.

    Args:
        rows: ``[choices, units of the site]``, 1 where a unit goes.
        costs: What the site costs after each.
        own: ``1/2 r' I r`` within the site.
    """

    rows: Floats
    costs: Counts
    own: Floats


class FeasibleMoves:
    """The rules of a problem over sets of units that go, given as flags over all units in model
    order.

    Attributes:
        places: The units.
        spans: For every site, where its units are among them.
        free: Units that may both stay and go.
        choices: For every site, what it may lose: all lawful subsets where it has at most 12 free
            units; else one for every number of heads, the units in the order in which the site
            misses them least.
    """

    def __init__(self, problem: Problem, matrix: Floats) -> None:
        sites = problem.scores.sites
        self.problem = problem
        self.places: list[Position] = list(problem.positions())
        self.free = np.array(
            [p not in problem.must_keep and p not in problem.must_remove for p in self.places],
            dtype=bool,
        )
        self._site = np.array([site for site, _ in self.places], dtype=np.int64)
        self._heads = np.array([len(sites[s].units[u]) for s, u in self.places], dtype=np.int64)
        self._price = np.array([problem.costs[s][u] for s, u in self.places], dtype=np.int64)
        self.spans = [np.flatnonzero(self._site == site) for site in range(len(sites))]
        most = max((len(site.heads) for site in sites), default=0)
        self._lawful = np.zeros((len(sites), most + 1), dtype=bool)
        self._step = np.zeros(
            (len(sites), most + 1), dtype=np.int64
        )  # what a site costs by its number of heads
        for site, counts in enumerate(problem.counts):
            self._lawful[site, list(counts)] = True
            if problem.steps is not None:
                self._step[site, list(counts)] = [problem.steps[site][n] or 0 for n in counts]
        self.choices = [
            self._choices(site, matrix[np.ix_(span, span)]) for site, span in enumerate(self.spans)
        ]

    def costs(self, gone: Flags) -> Counts:
        """What every site costs."""
        units = np.bincount(self._site, np.where(gone, 0, self._price), len(self.spans)).astype(
            np.int64
        )
        found: Counts = units + self._step[np.arange(len(self.spans)), self._held(gone)]
        return found

    def toggled(self, units: Counts, gone: Flags, sign: int) -> tuple[Flags, Counts]:
        """Whether each unit may go (``sign`` -1) or come back (1) alone, and by how much that
        raises the cost."""
        site, held = self._site[units], self._held(gone)
        after = held[site] + sign * self._heads[units]
        price = sign * self._price[units] + self._step[site, after] - self._step[site, held[site]]
        return self._lawful[site, after], price

    def moves(self, out: Counts, back: Counts, gone: Flags) -> Flags:
        """``[out + 1, back + 1]``: where one unit may go while another comes back; the last ones
        stand for nobody."""
        (ok_out, price_out), (ok_back, price_back) = (
            self.toggled(out, gone, -1),
            self.toggled(back, gone, 1),
        )
        ok = np.logical_and.outer(np.append(ok_out, True), np.append(ok_back, True))
        price = np.add.outer(np.append(price_out, 0), np.append(price_back, 0))
        site, held = self._site[out][:, None], self._held(gone)
        same = site == self._site[back]  # there the two changes are one
        after = held[site] - self._heads[out][:, None] + self._heads[back]
        after = np.clip(after, 0, self._lawful.shape[1] - 1)
        together = (
            self._price[back]
            - self._price[out][:, None]
            + self._step[site, after]
            - self._step[site, held[site]]
        )
        ok[:-1, :-1] = np.where(same, self._lawful[site, after], ok[:-1, :-1])
        price[:-1, :-1] = np.where(same, together, price[:-1, :-1])
        found: Flags = ok & (price <= self.problem.limit - int(self.costs(gone).sum()))
        return found

    def _held(self, gone: Flags) -> Counts:
        """Heads that each site keeps."""
        return np.bincount(self._site, np.where(gone, 0, self._heads), len(self.spans)).astype(
            np.int64
        )

    def _choices(self, site: int, block: Floats) -> Choices:
        span = self.spans[site]
        free = np.flatnonzero(self.free[span])
        forced = np.array(
            [self.places[i] in self.problem.must_remove for i in span], dtype=np.float64
        )
        if len(free) <= ENUMERATED:
            rows = np.tile(forced, (2 ** len(free), 1))
            rows[:, free] = np.array(list(product((0.0, 1.0), repeat=len(free)))).reshape(
                len(rows), len(free)
            )
        else:
            rows = self._nested(site, block, forced)
        held = (1 - rows) @ self._heads[span]
        lawful = self._lawful[site, held.astype(np.int64)]
        rows, held = rows[lawful], held[lawful].astype(np.int64)
        costs = ((1 - rows) @ self._price[span]).astype(np.int64) + self._step[site, held]
        return Choices(rows, costs, np.einsum("ij,jk,ik->i", rows, block, rows) / 2)

    def _nested(self, site: int, block: Floats, forced: Floats) -> Floats:
        """One choice for every number of heads: unit after unit goes, always the one that is missed
        least."""
        span, gone, order = self.spans[site], forced > 0, []
        while len(left := np.flatnonzero(self.free[span] & ~gone)):
            order.append(int(left[np.argmin((block @ gone + np.diag(block) / 2)[left])]))
            gone[order[-1]] = True
        ranking = [
            (site, unit)
            for unit in [*(u for u in range(len(span)) if u not in order), *order[::-1]]
        ]
        states = self.problem.states([*ranking, *(p for p in self.places if p[0] != site)])[site]
        return np.array(
            [[float(unit not in kept) for unit in range(len(span))] for kept in states.values()]
        )


def cheapest(costs: Counts, values: Floats) -> Counts:
    """Points that nothing beats in both cost and value, in rising cost; of equals the first."""
    order = np.lexsort((values, costs))
    values = values[order]
    before = np.append(np.inf, np.minimum.accumulate(values)[:-1])
    return order[values < before]
