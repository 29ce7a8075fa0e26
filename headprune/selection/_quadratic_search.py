"""Local search of the selector ``quadratic``: minimise ``1/2 r' I r`` over the removed units r.

Starts are plans of simple rules. Each is lowered as long as one of these moves does it:

- the best subset of a site, the other sites fixed (all subsets where it has at most 12 units);
- a unit that is removed, restored, or exchanged with another one anywhere in the model;
- a knapsack over all sites, around the plan so far.

The best plan is also improved by chains of moves, some of which may raise the objective.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from headprune.selection._base import Position, Problem
from headprune.selection._choice import Option, best_choice
from headprune.selection._feasible_moves import FeasibleMoves, SiteChoices, undominated_points

if TYPE_CHECKING:
    from headprune.selection._feasible_moves import Counts, Flags, Floats

#: The knapsack takes the objective in whole numbers of 2^-50 of its range.
_BITS = 50

#: The most moves of a chain.
_CHAIN = 200

#: Of each side, a move is first looked for among this many units.
_SHORT = 64


class QuadraticSearch:
    """The objective, plans to start from, and moves that lower it.

    A plan is an array ``removed``, [units], True where a unit is removed, in model order.

    Args:
        problem: The budget and the rules.
        matrix: ``I``, ``[units, units]``.
    """

    def __init__(self, problem: Problem, matrix: Floats) -> None:
        self.problem, self.matrix = problem, matrix
        self.moves = FeasibleMoves(problem)
        # Per site, what it may lose.
        self.choices: list[SiteChoices] = []
        for site, span in enumerate(self.moves.spans):
            self.choices.append(self.moves.choices(site, matrix[np.ix_(span, span)]))
        self._half = np.diag(matrix) / 2
        # Differences below this are rounding.
        self.tolerance = 1e-12 * float(np.abs(matrix).max(initial=0)) * max(1, len(matrix))

    def removed(self, keep: Iterable[Position]) -> Flags:
        """The plan of these kept units."""
        keep = set(keep)
        return np.array([position not in keep for position in self.moves.positions], dtype=bool)

    def kept(self, removed: Flags) -> frozenset[Position]:
        """The kept units of a plan."""
        positions = zip(self.moves.positions, removed, strict=True)
        return frozenset(position for position, out in positions if not out)

    def value(self, removed: Flags) -> float:
        """The objective."""
        r = removed.astype(np.float64)
        return float(r @ self.matrix @ r / 2)

    def allowed(self, removed: Flags) -> bool:
        """Whether a plan is lawful and within the budget."""
        keep = self.kept(removed)
        return self.problem.lawful(keep) and self.problem.fits(keep)

    # ------------------------------------------------------------- starts

    def rearranged(self, removed: Flags) -> Flags:
        """The greedy rearrangement of Kwon et al. (2022), site after site.

        Every kept unit is removed in turn; of the removed units of its site, the one that then
        lowers the objective most is restored. Only the curvature inside a site counts.
        """
        best: Flags = removed.copy()
        for span in self.moves.spans:
            new: Flags = best.copy()
            free = self.moves.free[span]
            new[span] = self._rearranged_site(span, best[span] & free) | best[span] & ~free
            if self.allowed(new):
                best = new
        return best

    def _rearranged_site(self, span: Counts, removed: Flags) -> Flags:
        """The rearrangement of the free units of one site."""
        if not removed.any():
            return removed
        block = self.matrix[np.ix_(span, span)]
        diagonal = np.diag(block)
        candidates = self.moves.free[span] & ~removed
        for unit in np.argsort(diagonal, kind="stable"):
            if candidates[unit]:
                removed[unit] = True
                # Twice the change of the objective when a removed unit is restored.
                change = np.where(removed, diagonal - 2 * block @ removed, np.inf)
                removed[int(np.argmin(change))] = False
        return removed

    def backward_elimination(self) -> Flags | None:
        """Remove unit after unit, the least rise of the objective per cost first.

        None where no unit can be removed before the budget is met.
        """
        removed: Flags = self.moves.must_remove.copy()
        while not self.allowed(removed):
            out = np.flatnonzero(self.moves.free & ~removed)
            lawful, price = self.moves.single(out, removed, -1)
            rise = (self.matrix @ removed + self._half)[out]
            # The price is negative where a removal saves something.
            rate = np.where(lawful & (price < 0), rise / np.maximum(-price, 1), np.inf)
            if not np.isfinite(rate).any():
                return None
            removed[out[int(np.argmin(rate))]] = True
        return removed

    def knapsack_over_sites(self, around: Flags, share: float) -> Flags | None:
        """The best choice of every site, all sites at once: a multiple-choice knapsack.

        Args:
            around: The plan at which terms between sites are taken.
            share: The factor of these terms. With 0 the answer is exact for a block-diagonal
                matrix, up to 2^-50 of the objective.
        """
        # 1. The objective of every choice of every site, and the choices that none beats.
        values: list[Floats] = []
        points = []
        for site, choices in enumerate(self.choices):
            own = choices.own + share * choices.rows @ self._outside(site, around)
            values.append(own)
            points.append(undominated_points(choices.costs, own))
        # 2. The knapsack maximises whole numbers: how far a choice is below the worst one.
        scale = 2.0**_BITS / (sum(float(np.ptp(own)) for own in values) or 1.0)
        classes = []
        for choices, own, some in zip(self.choices, values, points, strict=True):
            worst = own.max()
            options = [Option(int(choices.costs[i]), round((worst - own[i]) * scale)) for i in some]
            classes.append(options)
        chosen = best_choice(classes, self.problem.limit)
        if chosen is None:
            return None
        # 3. The plan.
        removed = np.zeros(len(self.moves.positions), dtype=bool)
        for site, (span, choices) in enumerate(zip(self.moves.spans, self.choices, strict=True)):
            removed[span] = choices.rows[points[site][chosen[site]]] > 0
        return removed

    # ------------------------------------------------------------- moves

    def best_from(self, starts: Iterable[Flags | None]) -> Flags:
        """The best plan that the search reaches from the allowed starts."""
        # 1. A local optimum from each different start.
        plans: dict[bytes, Flags] = {}
        for start in starts:
            if start is not None and self.allowed(start):
                plans[start.tobytes()] = start
        best, *others = [self.local_optimum(start) for start in plans.values()]
        for plan in others:
            if self._is_lower(plan, best):
                best = plan
        # 2. Chains of moves from the best one, as long as they help.
        new = self._best_of_chain(best)
        while self._is_lower(new, best):
            best = self.local_optimum(new)
            new = self._best_of_chain(best)
        return best

    def local_optimum(self, removed: Flags) -> Flags:
        """Lower the objective until no move does."""
        while True:
            new = self._best_exchanges(self._best_by_site(removed))
            other = self.knapsack_over_sites(new, 1.0)
            if other is not None:
                other = self._best_exchanges(self._best_by_site(other))
                if self._is_lower(other, new):
                    new = other
            if not self._is_lower(new, removed):
                return removed
            removed = new

    def restored_for_free(self, removed: Flags) -> Flags:
        """Restore what has room and does not raise the objective, earlier units first."""
        removed = removed.copy()
        for unit in np.flatnonzero(removed & self.moves.free):
            new = removed.copy()
            new[unit] = False
            if not self._is_lower(removed, new) and self.allowed(new):
                removed = new
        return removed

    def _is_lower(self, one: Flags, other: Flags) -> bool:
        """Whether the objective is lower by more than rounding."""
        return self.value(one) < self.value(other) - self.tolerance

    def _outside(self, site: int, removed: Flags) -> Floats:
        """What each unit of a site adds to the objective through removed units of other sites."""
        span = self.moves.spans[site]
        everywhere: Floats = self.matrix[span] @ removed
        inside: Floats = self.matrix[np.ix_(span, span)] @ removed[span]
        return everywhere - inside

    def _best_by_site(self, removed: Flags) -> Flags:
        """The best choice of every site in turn, the rest of the model held."""
        removed = removed.copy()  # earlier plans are still compared with it
        for site, (span, choices) in enumerate(zip(self.moves.spans, self.choices, strict=True)):
            # The budget without the other sites, and the objective of each choice, [choices].
            costs = self.moves.costs(removed)
            room = self.problem.limit - int(costs.sum() - costs[site])
            outside = self._outside(site, removed)
            values = np.where(choices.costs <= room, choices.own + choices.rows @ outside, np.inf)
            # Ties keep the present choice, so the search ends.
            now = removed[span].astype(np.float64)
            value_now = now @ self.matrix[np.ix_(span, span)] @ now / 2 + now @ outside
            best = int(np.argmin(values))
            if values[best] < value_now - self.tolerance:
                removed[span] = choices.rows[best] > 0
        return removed

    def _best_exchanges(self, removed: Flags) -> Flags:
        """Moves of one or two units, the best first, as long as they lower the objective."""
        while True:
            rise, out, back = self._best_move(removed, self.moves.free, _SHORT)
            if rise >= -self.tolerance:
                # No move among units that look best one by one: look at all units.
                rise, out, back = self._best_move(removed, self.moves.free, len(removed))
            if rise >= -self.tolerance:
                return removed
            removed = (removed | out) & ~back

    def _best_of_chain(self, removed: Flags) -> Flags:
        """The best plan of a chain of moves that may also raise the objective.

        Each unit moves at most once. A chain leaves optima that no single move leaves (Kernighan
        and Lin 1970).
        """
        best = removed
        free = self.moves.free.copy()  # units that have not moved yet
        for _ in range(min(int(free.sum()), _CHAIN)):
            rise, out, back = self._best_move(removed, free, _SHORT)
            if not np.isfinite(rise):
                break
            removed = (removed | out) & ~back
            free = free & ~out & ~back
            if self._is_lower(removed, best):
                best = removed
        return best

    def _best_move(self, removed: Flags, free: Flags, most: int) -> tuple[float, Flags, Flags]:
        """The move of one or two units that lowers the objective most.

        Args:
            removed: The plan.
            free: Units that may move.
            most: Of each side, only this many units are looked at: those which alone lower the
                objective most, or raise it least.

        Returns:
            The rise of the objective (infinite without a feasible move), the unit to remove and the
            unit to restore, as flags over all units; one of the two may be empty.
        """
        slope = self.matrix @ removed
        # The rise by each unit alone: [units].
        rise_out, rise_back = slope + self._half, self._half - slope
        out, back = np.flatnonzero(free & ~removed), np.flatnonzero(free & removed)
        out = np.sort(out[np.argsort(rise_out[out], kind="stable")[:most]])
        back = np.sort(back[np.argsort(rise_back[back], kind="stable")[:most]])
        # [out + 1, back + 1]: the last row and the last column stand for no unit.
        rise = np.add.outer(np.append(rise_out[out], 0), np.append(rise_back[back], 0))
        rise[:-1, :-1] -= self.matrix[np.ix_(out, back)]
        rise[~self.moves.pairs(out, back, removed)] = np.inf
        rise[-1, -1] = np.inf  # no unit at all is no move
        a, b = np.unravel_index(int(np.argmin(rise)), rise.shape)
        remove, restore = np.zeros_like(removed), np.zeros_like(removed)
        # Slices, because the last index has no unit.
        remove[out[a : a + 1]] = True
        restore[back[b : b + 1]] = True
        return float(rise[a, b]), remove, restore
