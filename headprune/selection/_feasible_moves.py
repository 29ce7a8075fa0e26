"""Feasible moves: which units may be removed or restored, for many moves at once in arrays.

They say the same as ``Problem.cost`` and ``Problem.lawful``. Units are counted over all sites in
model order; a plan is an array ``removed``, [units], True where a unit is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from headprune.selection._base import Position, Problem

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]

#: A site with at most this many free units has all their subsets tried: 4096.
ENUMERATED = 12


@dataclass(frozen=True)
class SiteChoices:
    """Sets of units that one site may lose.

    Args:
        rows: ``[choices, units of the site]``, 1 where a unit is removed.
        costs: The cost of the site after each choice.
        own: ``1/2 r' I r`` within the site, of each choice r.
    """

    rows: Floats
    costs: Counts
    own: Floats


class FeasibleMoves:
    """The rules and the budget of a problem, for moves between plans.

    Attributes:
        positions: All units.
        site: The number of every unit's site, [units].
        spans: Per site, the numbers of its units.
        must_remove: Units that every plan removes, [units].
        free: Units that a plan may keep or remove, [units].
    """

    def __init__(self, problem: Problem) -> None:
        sites = problem.scores.sites
        self.problem = problem
        self.positions: list[Position] = list(problem.positions())
        must_keep = np.array([p in problem.must_keep for p in self.positions], dtype=bool)
        self.must_remove = np.array([p in problem.must_remove for p in self.positions], dtype=bool)
        self.free = ~must_keep & ~self.must_remove
        # Site, number of heads and cost of every unit: three arrays, [units] each.
        rows = [(s, len(sites[s].units[u]), problem.costs[s][u]) for s, u in self.positions]
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
        self.site, self._heads, self._price = np.ascontiguousarray(columns)
        self.spans = [np.flatnonzero(self.site == site) for site in range(len(sites))]
        # [sites, heads + 1]: lawful numbers of heads, and the cost of a site by their number.
        most = max((len(site.heads) for site in sites), default=0)
        self._lawful = np.zeros((len(sites), most + 1), dtype=bool)
        self._step = np.zeros((len(sites), most + 1), dtype=np.int64)
        for place, counts in enumerate(problem.counts):
            for count in counts:
                self._lawful[place, count] = True
                if problem.costs_by_count is not None:
                    self._step[place, count] = problem.costs_by_count[place][count] or 0

    def costs(self, removed: Flags) -> Counts:
        """The cost of every site."""
        units = np.bincount(self.site, np.where(removed, 0, self._price), len(self.spans))
        steps = self._step[np.arange(len(self.spans)), self._kept_heads(removed)]
        costs: Counts = units.astype(np.int64) + steps
        return costs

    def single(self, units: Counts, removed: Flags, sign: int) -> tuple[Flags, Counts]:
        """Whether each unit may be removed or restored alone, and what that adds to the cost.

        Args:
            units: Their numbers.
            removed: The plan.
            sign: -1 to remove units, 1 to restore them.
        """
        site = self.site[units]
        before = self._kept_heads(removed)[site]
        after = before + sign * self._heads[units]
        price = sign * self._price[units] + self._step[site, after] - self._step[site, before]
        return self._lawful[site, after], price

    def pairs(self, out: Counts, back: Counts, removed: Flags) -> Flags:
        """Whether one unit may be removed while another is restored, ``[out + 1, back + 1]``.

        The last row and column stand for no unit: moves of a single unit.

        Args:
            out: Units to remove.
            back: Units to restore.
            removed: The plan.
        """
        # 1. Units of two sites: both rules hold, and costs add up.
        lawful_out, price_out = self.single(out, removed, -1)
        lawful_back, price_back = self.single(back, removed, 1)
        lawful = np.logical_and.outer(np.append(lawful_out, True), np.append(lawful_back, True))
        price = np.add.outer(np.append(price_out, 0), np.append(price_back, 0))
        # 2. Units of one site: the rule is about both changes together.
        site = self.site[out][:, None]
        same = site == self.site[back]
        before = self._kept_heads(removed)[site]
        after = before - self._heads[out][:, None] + self._heads[back]
        after = np.clip(after, 0, self._lawful.shape[1] - 1)  # entries of other sites mean nothing
        of_units = self._price[back] - self._price[out][:, None]
        together = of_units + self._step[site, after] - self._step[site, before]
        lawful[:-1, :-1] = np.where(same, self._lawful[site, after], lawful[:-1, :-1])
        price[:-1, :-1] = np.where(same, together, price[:-1, :-1])
        # 3. The budget.
        room = self.problem.limit - int(self.costs(removed).sum())
        feasible: Flags = lawful & (price <= room)
        return feasible

    def _kept_heads(self, removed: Flags) -> Counts:
        """The number of heads that each site keeps."""
        heads = np.bincount(self.site, np.where(removed, 0, self._heads), len(self.spans))
        return heads.astype(np.int64)

    def choices(self, site: int, block: Floats) -> SiteChoices:
        """What a site may lose.

        All lawful subsets where it has at most 12 free units; else one set for each number of
        heads, by the order in which the site misses units least.

        Args:
            site: Its number.
            block: The curvature of its units, [units of the site, units of the site].
        """
        span = self.spans[site]
        free = np.flatnonzero(self.free[span])
        forced = self.must_remove[span].astype(np.float64)
        if len(free) <= ENUMERATED:
            subsets = list(product((0.0, 1.0), repeat=len(free)))
            rows = np.tile(forced, (len(subsets), 1))
            # The shape is given because without free units there is one subset: the empty one.
            rows[:, free] = np.array(subsets).reshape(len(subsets), len(free))
        else:
            rows = self._by_elimination(site, block, forced)
        heads = ((1 - rows) @ self._heads[span]).astype(np.int64)
        lawful = self._lawful[site, heads]
        rows = rows[lawful]
        costs = ((1 - rows) @ self._price[span]).astype(np.int64)
        costs += self._step[site, heads[lawful]]
        return SiteChoices(rows, costs, np.einsum("ij,jk,ik->i", rows, block, rows) / 2)

    def _by_elimination(self, site: int, block: Floats, forced: Floats) -> Floats:
        """One choice for each number of heads: always the unit that is missed least is removed."""
        span = self.spans[site]
        removed = forced > 0
        half = np.diag(block) / 2
        order: list[int] = []
        candidates = np.flatnonzero(self.free[span])
        while len(candidates):
            rise = block @ removed + half
            unit = int(candidates[np.argmin(rise[candidates])])
            order.append(unit)
            removed[unit] = True
            candidates = candidates[candidates != unit]
        # What is removed last ranks first, after the units that no move touches.
        settled = np.flatnonzero(~self.free[span]).tolist()
        ranking = [(site, unit) for unit in settled + order[::-1]]
        states = self.problem.states(ranking)[site]
        rows = np.ones((len(states), len(span)))
        for row, kept in zip(rows, states.values(), strict=True):
            row[list(kept)] = 0
        return rows


def undominated_points(costs: Counts, values: Floats) -> Counts:
    """Indices of points that none beats in both cost and value, by rising cost.

    Of equal points the first.
    """
    order = np.lexsort((values, costs))
    values = values[order]
    lowest_before = np.append(np.inf, np.minimum.accumulate(values)[:-1])
    return order[values < lowest_before]
