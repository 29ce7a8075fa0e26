"""What every selector is asked (Problem) and what it is (Selector)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadMask, SiteKeep
from headprune.core.plan import Budget
from headprune.core.scores import HeadScores

#: One prune unit: its site's place in ``HeadScores.sites`` and its own in ``AttentionSite.units``.
Position = tuple[int, int]

#: How much the loss of each example rises under each of some masks: ``[masks, examples]``.
Loss = Callable[[Sequence[HeadMask]], Any]

#: The scores that heads have once only those of a mask are left; values of units that are gone say
#: nothing.
Rescore = Callable[[HeadMask], HeadScores]


@dataclass(frozen=True)
class Problem:
    """A budget laid over scores, in whole numbers of one currency, and the rules that every answer
    keeps.

    The currency is heads, parameters, MACs, KV bytes a token, or nanoseconds. `cost`, `fits` and
    `lawful` are all that a selector needs to know of it.

    Args:
        scores: The scored units.
        budget: What the user asked for.
        costs: For every site, what each of its units costs; zeros where `steps` are given.
        fixed: What the part of the model that no selector can remove costs.
        limit: The most that the kept units may cost, `fixed` taken off; negative where nothing can
            be kept.
        steps: For every site, what it costs with 0, 1, 2... heads, where cost does not add up unit
            by unit (latency); None at a number of heads that it cannot have.
        stay: Units that must stay.
        go: Units that must go.
        min_heads: A site keeps at least this many heads, or all that it may keep; one if it cannot
            run without.
        multiple_of: A site keeps a multiple of this many heads, or all that are present.
        loss: Measures masks, for selectors that need it.
        rescore: Scores the heads of a mask anew, in the units of `scores`, for selectors that need
            it.
        beside: What is kept at sites that this problem is not about; a `mask` has their rows too.
        notes: What the selector wants the plan to say is added here.
    """

    scores: HeadScores
    budget: Budget
    costs: tuple[tuple[int, ...], ...]
    fixed: int
    limit: int
    steps: tuple[tuple[int | None, ...], ...] | None = None
    stay: frozenset[Position] = frozenset()
    go: frozenset[Position] = frozenset()
    min_heads: int = 1
    multiple_of: int = 1
    loss: Loss | None = None
    rescore: Rescore | None = None
    beside: HeadMask | None = None
    notes: list[str] = field(default_factory=list, compare=False)

    def cost(self, keep: Iterable[Position]) -> int:
        """What these units cost together."""
        return sum(self.site_cost(site, units) for site, units in enumerate(self.by_site(keep)))

    def fits(self, keep: Iterable[Position]) -> bool:
        """Whether these units may all stay, as far as the budget goes."""
        return self.cost(keep) <= self.limit

    def lawful(self, keep: Iterable[Position]) -> bool:
        """Whether an answer respects what must stay and go, ``min_heads`` and ``multiple_of``,
        whatever it costs."""
        return not self.broken(keep)

    def broken(self, keep: Iterable[Position]) -> str:
        """The first rule that an answer breaks, in words; empty where it is lawful."""
        rows, stay, go = self.by_site(keep), self.by_site(self.stay), self.by_site(self.go)
        for site, units in enumerate(rows):
            here = self.scores.sites[site]
            if lost := stay[site] - units:
                return f"{here.name} without heads {list(here.units[min(lost)])}, which must stay"
            if wrong := go[site] & units:
                return f"{here.name} with heads {list(here.units[min(wrong)])}, which must go"
            if (count := self.heads(site, units)) not in self.counts[site]:
                heads = f"{count} head{'' if count == 1 else 's'}"
                return f"{heads} at {here.name}, which may have {_words(self.counts[site])}"
        return ""

    def by_site(self, keep: Iterable[Position]) -> list[set[int]]:
        """The kept units of every site."""
        rows: list[set[int]] = [set() for _ in self.scores.sites]
        for site, unit in keep:
            rows[site].add(unit)
        return rows

    def heads(self, site: int, units: Iterable[int]) -> int:
        """How many heads some units of one site hold."""
        sizes = self._sizes[site]
        return sum(sizes[u] for u in units)

    @cached_property
    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        """For every site, how many heads each of its units holds."""
        return tuple(tuple(map(len, site.units)) for site in self.scores.sites)

    def site_cost(self, site: int, units: Iterable[int]) -> int:
        """What one site costs with these units."""
        if self.steps is None:
            return sum(self.costs[site][u] for u in units)
        cost = self.steps[site][self.heads(site, units)]
        return (
            max(self.whole, self.limit) + 1 if cost is None else cost
        )  # what cannot be never fits

    @cached_property
    def counts(self) -> tuple[frozenset[int], ...]:
        """For every site, the numbers of heads that the rules allow."""
        return tuple(frozenset(states) for states in self.states(tuple(self.positions())))

    def states(self, ranking: Sequence[Position]) -> tuple[dict[int, tuple[int, ...]], ...]:
        """For every site, by number of heads, units that hold so many and break no rule; fewest
        heads first.

        What must stay comes first, then the units in the order of ``ranking``. Where the units of a
        site hold equally many heads, these are the first ones of the ranking, so each state is a
        part of the next.
        """
        ranked: list[list[int]] = [[] for _ in self.costs]
        for site, unit in ranking:
            ranked[site].append(unit)
        return tuple(self._states(site, units) for site, units in enumerate(ranked))

    def _states(self, site: int, ranked: list[int]) -> dict[int, tuple[int, ...]]:
        forced = tuple(u for u in ranked if (site, u) in self.stay)
        found = {self.heads(site, forced): forced}
        for unit in ranked:
            if (site, unit) not in self.stay and (site, unit) not in self.go:
                size = self.heads(site, [unit])
                for held, units in list(found.items()):
                    if held + size not in found:
                        found[held + size] = (*units, unit)
        present, most = self.heads(site, ranked), max(found)
        least = max(min(self.min_heads, most), self.scores.sites[site].least)
        return {
            n: found[n]
            for n in sorted(found)
            if n >= least
            and (n % self.multiple_of == 0 or n == present)
            and (self.steps is None or self.steps[site][n] is not None)
        }

    def positions(self) -> Iterator[Position]:
        """Every unit, in model order."""
        return ((unit.site, unit.unit) for unit in self.scores.units())

    def mask(self, keep: Iterable[Position]) -> HeadMask:
        """These units as a mask of the model, with what is kept `beside` them."""
        mine = {}
        for site, units in zip(self.scores.sites, self.by_site(keep), strict=True):
            kept = tuple(sorted(h for u in units for h in site.units[u]))
            mine[site.name] = SiteKeep(site.name, site.n_query_heads, kept)
        if self.beside is None:
            return HeadMask(tuple(mine.values()))
        return HeadMask(tuple(mine.get(row.site, row) for row in self.beside.rows))

    @property
    def whole(self) -> int:
        """What the model costs now; fractions in a budget are fractions of this."""
        if self.steps is None:
            return self.fixed + sum(map(sum, self.costs))
        return self.fixed + sum(
            row[len(s.heads)] or 0 for s, row in zip(self.scores.sites, self.steps, strict=True)
        )


def _words(counts: frozenset[int]) -> str:
    numbers = [str(n) for n in sorted(counts)]
    return (
        " or ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers)
        or "no number"
    )


@dataclass(frozen=True, kw_only=True)
class Selector(abc.ABC):
    """Chooses the units that stay. A concrete selector is a frozen dataclass of its settings, which
    are JSON data.

    Args:
        min_heads: No site goes below this many heads, rounded up to whole units; one that has fewer
            keeps those. With 0 a layer may lose its attention, if its module runs without:
            docs/pipelines.md has what that risks.
        multiple_of: Every site keeps a multiple of this many heads, or all it has, or none where
            ``min_heads`` is 0.
    """

    #: What the selector goes by beside the scores' values: ``loss``, ``rescore``, an argument of
    #: `hp.select` each, or the ``curvature`` of the scores.
    needs: ClassVar[frozenset[str]] = frozenset()
    #: Whether units of different sites compete for their places.
    across: ClassVar[bool] = True

    min_heads: int = 1
    multiple_of: int = 1

    def __post_init__(self) -> None:
        for name, least in (("min_heads", 0), ("multiple_of", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                where = f"{type(self).__name__}.{name}"
                raise InvalidValue(where, f"a count of heads >= {least}", repr(value))

    @abc.abstractmethod
    def keep(self, problem: Problem) -> frozenset[Position]:
        """The units that stay; `Problem.fits` and `Problem.lawful` hold for them.

        Raises:
            InfeasibleBudget: none of the choices that the settings allow fits.
        """

    def scale(self, row: Sequence[float]) -> tuple[float, float]:
        """What is taken off the scores of one site, and what divides them then, before sites are
        compared."""
        return 0.0, 1.0

    @property
    def settings(self) -> FrozenDict:
        """The settings as they are written into the plan."""
        return FrozenDict({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
