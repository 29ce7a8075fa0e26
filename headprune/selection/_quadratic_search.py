"""Minimises ``1/2 r' I r`` over the units r that go, under a budget: starts and moves of the
selector ``quadratic``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from headprune.selection._base import Position, Problem
from headprune.selection._choice import Option, best_choice
from headprune.selection._feasible_moves import FeasibleMoves, cheapest

if TYPE_CHECKING:
    from headprune.selection._feasible_moves import Flags, Floats

#: The objective in whole numbers of 2^-50 of its range, for the knapsack.
_BITS = 50

#: Moves of a chain, at most.
_CHAIN = 200

#: Units of each side that a move is first looked for among.
_SHORT = 64


class QuadraticSearch:
    """The objective, where to start, and the moves that lower it.

    A set of units that go is an array of flags over all units in model order.

    Args:
        problem: The budget and the rules.
        matrix: ``I``, ``[units, units]``.
    """

    def __init__(self, problem: Problem, matrix: Floats) -> None:
        self.problem, self.matrix = problem, matrix
        self.on = FeasibleMoves(problem, matrix)
        self.tolerance = 1e-12 * float(np.abs(matrix).max(initial=0)) * max(1, len(matrix))

    def gone(self, keep: Iterable[Position]) -> Flags:
        """The flags of everything that is not kept."""
        keep = set(keep)
        return np.array([place not in keep for place in self.on.places], dtype=bool)

    def kept(self, gone: Flags) -> frozenset[Position]:
        """The units that stay."""
        return frozenset(place for place, out in zip(self.on.places, gone, strict=True) if not out)

    def value(self, gone: Flags) -> float:
        """The objective."""
        r = gone.astype(np.float64)
        return float(r @ self.matrix @ r / 2)

    def allowed(self, gone: Flags) -> bool:
        """Whether such a plan is lawful and within the budget."""
        keep = self.kept(gone)
        return self.problem.lawful(keep) and self.problem.fits(keep)

    # ------------------------------------------------------------- starts

    def rearranged(self, gone: Flags) -> Flags:
        """The greedy rearrangement of Kwon et al. (2022), site after site, with the curvature
        inside each site alone.

        Every unit that stays is put to those that go, and whichever of them is then missed least is
        let back in.
        """
        found: Flags = gone.copy()
        for span in self.on.spans:
            block, free = self.matrix[np.ix_(span, span)], self.on.free[span]
            out = found[span] & free
            order = [
                int(u) for u in np.argsort(np.diag(block), kind="stable") if free[u] and not out[u]
            ]
            for unit in order if out.any() else []:
                out[unit] = True
                without = np.where(out, np.diag(block) - 2 * block @ out, np.inf)
                out[int(np.argmin(without))] = False
            new: Flags = found.copy()
            new[span] = np.where(free, out, found[span])
            if self.allowed(new):
                found = new
        return found

    def backward_elimination(self) -> Flags | None:
        """From all heads on, out goes what raises the objective least for its cost, until the
        budget is met."""
        gone = np.array([place in self.problem.must_remove for place in self.on.places], dtype=bool)
        while not self.allowed(gone):
            slope = self.matrix @ gone
            out = np.flatnonzero(self.on.free & ~gone)
            lawful, price = self.on.toggled(out, gone, -1)
            rise = slope[out] + np.diag(self.matrix)[out] / 2
            rise = np.where(lawful & (price < 0), rise / np.maximum(-price, 1), np.inf)
            if not np.isfinite(rise).any():
                return None
            gone[out[int(np.argmin(rise))]] = True
        return gone

    def allotted(self, around: Flags, share: float) -> Flags | None:
        """The best choice of every site under the budget, all sites at once: a multiple-choice
        knapsack.

        Terms between sites are taken at ``around``, times ``share``; with 0 this is exact for a
        block-diagonal matrix, up to 2^-50 of the objective.
        """
        own = [
            c.own + share * c.rows @ self._outside(site, around)
            for site, c in enumerate(self.on.choices)
        ]
        best = [cheapest(c.costs, values) for c, values in zip(self.on.choices, own, strict=True)]
        scale = 2.0**_BITS / (sum(float(np.ptp(values)) for values in own) or 1.0)
        chosen = best_choice(
            [
                [Option(int(c.costs[i]), round((values.max() - values[i]) * scale)) for i in some]
                for c, values, some in zip(self.on.choices, own, best, strict=True)
            ],
            self.problem.limit,
        )
        if chosen is None:
            return None
        gone = np.zeros(len(self.on.places), dtype=bool)
        for span, choices, some, at in zip(
            self.on.spans, self.on.choices, best, chosen, strict=True
        ):
            gone[span] = choices.rows[some[at]] > 0
        return gone

    # ------------------------------------------------------------- moves

    def descend(self, gone: Flags) -> Flags:
        """Lowers the objective until no move does: a site anew, two units changing places, all
        sites anew."""
        while True:
            new = self._exchanged(self._by_site(gone))
            other = self.allotted(new, 1.0)
            if other is not None:
                other = self._exchanged(self._by_site(other))
                new = other if self._lower(other, new) else new
            if not self._lower(new, gone):
                return gone
            gone = new

    def lowest(self, starts: Iterable[Flags | None]) -> Flags:
        """The best of what the allowed starts lead to; chains and moves go on from there as long as
        they help."""
        different = {
            start.tobytes(): start for start in starts if start is not None and self.allowed(start)
        }
        ends = {end.tobytes(): end for end in map(self.descend, different.values())}
        best, *others = ends.values()
        for end in others:
            best = end if self._lower(end, best) else best
        while self._lower(new := self._chained(best), best):
            best = self.descend(new)
        return best

    def filled(self, gone: Flags) -> Flags:
        """Lets back in what costs the objective nothing and has room, earlier units first."""
        gone = gone.copy()
        for unit in np.flatnonzero(gone & self.on.free):
            new = gone.copy()
            new[unit] = False
            if not self._lower(gone, new) and self.allowed(new):
                gone = new
        return gone

    def _lower(self, one: Flags, other: Flags) -> bool:
        """Whether the objective is lower by more than rounding."""
        return self.value(one) < self.value(other) - self.tolerance

    def _outside(self, site: int, gone: Flags) -> Floats:
        """What each unit of a site adds to the objective through the units that go elsewhere."""
        span = self.on.spans[site]
        found: Floats = self.matrix[span] @ gone - self.matrix[np.ix_(span, span)] @ gone[span]
        return found

    def _by_site(self, gone: Flags) -> Flags:
        """The best choice of every site in turn, the rest of the model held."""
        gone = gone.copy()
        for site, (span, choices) in enumerate(zip(self.on.spans, self.on.choices, strict=True)):
            costs = self.on.costs(gone)
            room = self.problem.limit - int(costs.sum() - costs[site])
            outside, now = self._outside(site, gone), gone[span].astype(np.float64)
            values = np.where(choices.costs <= room, choices.own + choices.rows @ outside, np.inf)
            here = now @ self.matrix[np.ix_(span, span)] @ now / 2 + now @ outside
            best = int(np.argmin(values))
            if values[best] < here - self.tolerance:
                gone[span] = choices.rows[best] > 0
        return gone

    def _exchanged(self, gone: Flags) -> Flags:
        """Moves of one or two units, the best first, as long as they lower the objective."""
        while True:
            rise, out, back = self._best_move(gone, self.on.free, _SHORT)
            if rise >= -self.tolerance:  # none among those that look best one by one: look at all
                rise, out, back = self._best_move(gone, self.on.free, len(gone))
            if rise >= -self.tolerance:
                return gone
            gone = (gone | out) & ~back

    def _chained(self, gone: Flags) -> Flags:
        """The best point of a chain of moves that may also raise the objective, each unit moved
        once at most.

        It leaves optima that no single move leaves (Kernighan and Lin 1970).
        """
        best, free = gone, self.on.free.copy()
        for _ in range(min(int(free.sum()), _CHAIN)):
            rise, out, back = self._best_move(gone, free, _SHORT)
            if not np.isfinite(rise):
                break
            gone, free = (gone | out) & ~back, free & ~out & ~back
            best = gone if self._lower(gone, best) else best
        return best

    def _best_move(self, gone: Flags, free: Flags, most: int) -> tuple[float, Flags, Flags]:
        """The unit that goes and the one that comes back, one of them perhaps nobody, that lower
        the objective most.

        Of each side the ``most`` units are looked at that lower it most, or raise it least, by
        themselves.
        """
        slope, half = self.matrix @ gone, np.diag(self.matrix) / 2
        out, back = np.flatnonzero(free & ~gone), np.flatnonzero(free & gone)
        out = np.sort(out[np.argsort((slope + half)[out], kind="stable")[:most]])
        back = np.sort(back[np.argsort((half - slope)[back], kind="stable")[:most]])
        # The last row and the last column stand for nobody: moves of a single unit.
        rise = np.add.outer(np.append((slope + half)[out], 0), np.append((half - slope)[back], 0))
        rise[:-1, :-1] -= self.matrix[np.ix_(out, back)]
        rise[~self.on.moves(out, back, gone)] = np.inf
        rise[-1, -1] = np.inf
        a, b = np.unravel_index(int(np.argmin(rise)), rise.shape)
        goes, comes = np.zeros_like(gone), np.zeros_like(gone)
        goes[out[a : a + 1]] = comes[back[b : b + 1]] = True
        return float(rise[a, b]), goes, comes
