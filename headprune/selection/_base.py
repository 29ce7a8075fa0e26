"""The problem that a selector solves (Problem), and the base class of selectors (Selector)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask, SiteKeep
from headprune.core.plan import Budget
from headprune.core.scores import HeadScores

#: Kinds of budget that count neurons as well as heads.
COUNT_NEURONS = ("keep_params", "keep_macs", "speedup")

#: One prune unit: indices of its site in ``HeadScores.sites`` and of itself in ``site.units``.
Position = tuple[int, int]

#: The rise of the loss of each example under each of several masks: ``[masks, examples]``.
Loss = Callable[[Sequence[HeadMask]], Any]

#: Scores of the heads once only those of a mask are kept; values of removed units mean nothing.
Rescore = Callable[[HeadMask], HeadScores]


@dataclass(frozen=True)
class Problem:
    """A budget over scores, in whole numbers of one currency, with the rules of every answer.

    The currency is heads, parameters, MACs, KV bytes per token, or nanoseconds.

    Args:
        scores: The scored units.
        budget: The user's budget.
        costs: Per site, the cost of each of its units; zeros where `costs_by_count` is given.
        fixed: The cost of the part of the model that no selector can remove.
        limit: The most that the kept units may cost, without `fixed`; it may be negative.
        costs_by_count: Per site, its cost with 0, 1, 2... heads, where costs of units do not add
            up (latency); None at a number that it cannot have.
        must_keep: Units that every answer keeps.
        must_remove: Units that every answer removes.
        min_heads: The fewest heads of a site, unless it may keep fewer; 1 if it cannot run without.
        multiple_of: An attention keeps a multiple of this, or all that are present.
        loss: Measures masks, for selectors that need it.
        rescore: Scores the heads of a mask anew, likewise.
        kept_elsewhere: Kept heads of the whole model, where this problem is about some sites only.
        notes: What a selector adds to the plan's notes.
        caveat: Why costs may be wrong, or empty.
    """

    scores: HeadScores
    budget: Budget
    costs: tuple[tuple[int, ...], ...]
    fixed: int
    limit: int
    costs_by_count: tuple[tuple[int | None, ...], ...] | None = None
    must_keep: frozenset[Position] = frozenset()
    must_remove: frozenset[Position] = frozenset()
    min_heads: int = 1
    multiple_of: int = 1
    # What some selectors need besides scores.
    loss: Loss | None = None
    rescore: Rescore | None = None
    kept_elsewhere: HeadMask | None = None
    notes: list[str] = field(default_factory=list, compare=False)
    caveat: str = ""

    def cost(self, keep: Iterable[Position]) -> int:
        """The cost of these units together."""
        return sum(self.site_cost(site, units) for site, units in enumerate(self.by_site(keep)))

    def fits(self, keep: Iterable[Position]) -> bool:
        """Whether the budget allows these units."""
        return self.cost(keep) <= self.limit

    def lawful(self, keep: Iterable[Position]) -> bool:
        """Whether an answer keeps all rules but the budget: named heads, minimum and multiples."""
        return not self.broken(keep)

    def broken(self, keep: Iterable[Position]) -> str:
        """The first rule that an answer breaks, as text; empty where it is lawful."""
        must_keep = self.by_site(self.must_keep)
        must_remove = self.by_site(self.must_remove)
        for place, units in enumerate(self.by_site(keep)):
            site = self.scores.sites[place]
            missing = must_keep[place] - units
            if missing:
                return f"{site.name} without {members_of(site, min(missing))}, which must be kept"
            unwanted = must_remove[place] & units
            if unwanted:
                return f"{site.name} with {members_of(site, min(unwanted))}, which must be removed"
            count = self.heads(place, units)
            if count not in self.counts[place]:
                plural = "" if count == 1 else "s"
                allowed = _alternatives(self.counts[place])
                return f"{count} {site.noun}{plural} at {site.name}, which may have {allowed}"
        return ""

    def by_site(self, keep: Iterable[Position]) -> list[set[int]]:
        """The kept units of every site."""
        rows: list[set[int]] = [set() for _ in self.scores.sites]
        for site, unit in keep:
            rows[site].add(unit)
        return rows

    def heads(self, site: int, units: Iterable[int]) -> int:
        """The number of heads in some units of one site."""
        sizes = self._sizes[site]
        return sum(sizes[u] for u in units)

    @cached_property
    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        """Per site, the number of heads in each of its units."""
        return tuple(tuple(map(len, site.units)) for site in self.scores.sites)

    def site_cost(self, site: int, units: Iterable[int]) -> int:
        """The cost of one site with these units."""
        if self.costs_by_count is None:
            return sum(self.costs[site][u] for u in units)
        cost = self.costs_by_count[site][self.heads(site, units)]
        if cost is None:
            # A number of heads that the site cannot have never fits, whatever the budget.
            return max(self.whole, self.limit) + 1
        return cost

    @cached_property
    def counts(self) -> tuple[frozenset[int], ...]:
        """Per site, the numbers of heads that the rules allow."""
        return tuple(frozenset(states) for states in self.states(tuple(self.positions())))

    def states(self, ranking: Sequence[Position]) -> tuple[dict[int, tuple[int, ...]], ...]:
        """Per site, one lawful set of units for each number of heads, fewest heads first.

        Units that must be kept come first, then the others in the order of ``ranking``. Where the
        units of a site have equally many heads, each state is a part of the next. So it is for
        neurons, whose units keep their own order.
        """
        ranked: list[list[int]] = [[] for _ in self.costs]
        for site, unit in ranking:
            ranked[site].append(unit)
        return tuple(self._site_states(site, units) for site, units in enumerate(ranked))

    def _site_states(self, site: int, ranked: list[int]) -> dict[int, tuple[int, ...]]:
        reached = self._reached(site, ranked)
        present = self.heads(site, ranked)
        most = max(reached)
        least = max(min(self.min_heads, most), self.scores.sites[site].least)
        is_feed_forward = self.scores.sites[site].is_feed_forward
        # Levels of neurons are multiples by themselves.
        multiple = 1 if is_feed_forward else self.multiple_of
        states = {}
        for count in sorted(reached):
            is_multiple = count % multiple == 0 or count == present
            fits_gpus = count % self._multiples_of_gpus[site] == 0
            # A latency table may lack a number of heads that the layout cannot have.
            possible = self.costs_by_count is None or self.costs_by_count[site][count] is not None
            if count >= least and is_multiple and fits_gpus and possible:
                states[count] = reached[count]
        if is_feed_forward and self.budget.kind not in COUNT_NEURONS and states:
            # A budget of heads or of their cache does not count neurons: all are kept.
            fullest = max(states)
            return {fullest: states[fullest]}
        return states

    @cached_property
    def _multiples_of_gpus(self) -> tuple[int, ...]:
        """Per site, what its number of heads must divide by to be shared by the budget's GPUs."""
        gpus = self.budget.tensor_parallel or 1
        return tuple(step_of_gpus(site, gpus) for site in self.scores.sites)

    def _reached(self, site: int, ranked: list[int]) -> dict[int, tuple[int, ...]]:
        """The first set of units that holds so many heads, whatever `min_heads` and the like."""
        forced = tuple(u for u in ranked if (site, u) in self.must_keep)
        reached = {self.heads(site, forced): forced}
        settled = self.must_keep | self.must_remove
        free = [unit for unit in ranked if (site, unit) not in settled]
        if self.has_neuron_bundles(site):
            # The best neurons come first. Bundles may differ in size, and a set without a better
            # bundle would keep worse neurons in place of better ones.
            units = forced
            for unit in sorted(free):
                units = (*units, unit)
                reached[self.heads(site, units)] = units
            return reached
        for unit in free:
            size = self._sizes[site][unit]
            # A copy of the items: units that hold unlike numbers of heads add entries.
            for count, units in list(reached.items()):
                if count + size not in reached:
                    reached[count + size] = (*units, unit)
        return reached

    def has_neuron_bundles(self, site: int) -> bool:
        """Whether the units of a site are bundles of neurons, the best neurons first."""
        one = self.scores.sites[site]
        return one.is_feed_forward and one.bundles is not None

    def positions(self) -> Iterator[Position]:
        """Every unit, in model order."""
        return ((unit.site, unit.unit) for unit in self.scores.units())

    def mask(self, keep: Iterable[Position]) -> HeadMask:
        """These units as a mask of the model, with the heads that are `kept_elsewhere`."""
        here = mask_of(self.scores.sites, keep)
        # `loss` and `rescore` take masks of the whole model.
        if self.kept_elsewhere is None:
            return here
        rows = {row.site: row for row in here.rows}
        return HeadMask(tuple(rows.get(row.site, row) for row in self.kept_elsewhere.rows))

    @property
    def whole(self) -> int:
        """The cost of the model as it is now; fractions in a budget are fractions of this."""
        if self.costs_by_count is None:
            return self.fixed + sum(map(sum, self.costs))
        total = self.fixed
        for site, row in zip(self.scores.sites, self.costs_by_count, strict=True):
            total += row[len(site.heads)] or 0
        return total


def step_of_gpus(site: AttentionSite, n_gpus: int) -> int:
    """What the number of heads must divide by, so that GPUs get equally many key/value heads.

    Raises:
        InvalidValue: no number of heads at this site guarantees equal shares.
    """
    if n_gpus == 1 or site.is_feed_forward or site.group_size == 1:
        return n_gpus
    sizes = set(map(len, site.groups))
    where = f"Budget.tensor_parallel at {site.name}"
    if site.policy == "free" or len(sizes) > 1:
        must = "used where query heads share key/value heads evenly"
        raise InvalidValue(where, must, f"policy {site.policy!r}", "Use the policy 'group'.")
    if site.policy == "group":
        return n_gpus * max(sizes, default=1)
    if len(site.groups) % n_gpus:  # balanced: every key/value head is kept
        must = f"a divisor of the {len(site.groups)} key/value heads, which 'balanced' keeps"
        raise InvalidValue(where, must, n_gpus, "Use the policy 'group'.")
    return 1


def words_of(scores: HeadScores, position: Position) -> str:
    """A unit by the name of its site and its heads, or the number of its neurons."""
    place, unit = position
    site = scores.sites[place]
    return site.words(site.units[unit])


def positions_of(rows: Iterable[Iterable[int]]) -> frozenset[Position]:
    """Units by site as positions; the reverse of `Problem.by_site`."""
    positions: set[Position] = set()
    for site, units in enumerate(rows):
        positions.update((site, unit) for unit in units)
    return frozenset(positions)


def mask_of(sites: Sequence[AttentionSite], keep: Iterable[Position]) -> HeadMask:
    """Kept units as a mask of these sites."""
    kept: list[list[int]] = [[] for _ in sites]
    for place, unit in keep:
        kept[place].extend(sites[place].units[unit])
    rows = zip(sites, kept, strict=True)
    return HeadMask(tuple(SiteKeep.of(site, heads) for site, heads in rows))


def _alternatives(counts: frozenset[int]) -> str:
    """``1, 2 or 3``."""
    if not counts:
        return "no number"
    *others, last = map(str, sorted(counts))
    if not others:
        return last
    return f"{', '.join(others)} or {last}"


@dataclass(frozen=True, kw_only=True)
class Selector(abc.ABC):
    """Choose the units that are kept; a subclass is a frozen dataclass of JSON settings.

    Args:
        min_heads: No site keeps fewer heads than this, rounded up to whole units; one that has
            fewer keeps those. With 0 a layer may lose its attention, if its module runs without:
            docs/pipelines.md has what that risks. By default 1, or 0 where one budget weighs heads
            against neurons at measured prices (``ladder``), so that whole sub-layers may go.
            Selectors that read no prices take 1.
        multiple_of: Every attention keeps a multiple of this many heads, or all it has, or none
            where ``min_heads`` is 0. Neurons have levels of their own.
    """

    #: Its inputs besides the scores' values: ``loss`` or ``rescore`` (arguments of `hp.select`), or
    #: the ``curvature`` of the scores.
    needs: ClassVar[frozenset[str]] = frozenset()
    #: Whether units of different sites compete with each other.
    across: ClassVar[bool] = True
    #: Whether measured prices of levels, where scores have them, decide in place of the scores.
    reads_prices: ClassVar[bool] = False

    min_heads: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        for name, least in (("min_heads", 0), ("multiple_of", 1)):
            value = getattr(self, name)
            if value is None and name == "min_heads":
                continue
            if type(value) is not int or value < least:
                where = f"{type(self).__name__}.{name}"
                raise InvalidValue(where, f"a count of heads >= {least}", repr(value))

    def with_minimum(
        self,
        sites: Iterable[AttentionSite],
        budget: Budget | Mapping[str, Budget] | None,
        priced: bool,
    ) -> Selector:
        """This selector with ``min_heads`` given: its own, or else the default.

        Args:
            sites: Those to select from.
            budget: For all of them, or by group.
            priced: Whether it reads measured prices of levels. Without them, only sums of scores
                could empty a layer. They do not measure that, so every layer keeps one.
        """
        if self.min_heads is not None:
            return self
        weighs = isinstance(budget, Budget) and budget.kind in COUNT_NEURONS
        least = 0 if priced and weighs and any(site.is_feed_forward for site in sites) else 1
        return dataclasses.replace(self, min_heads=least)

    @abc.abstractmethod
    def keep(self, problem: Problem) -> frozenset[Position]:
        """The kept units, for which `Problem.fits` and `Problem.lawful` hold.

        Raises:
            InfeasibleBudget: no choice that the settings allow fits.
        """

    def scale(self, row: Sequence[float]) -> tuple[float, float]:
        """Shift and divisor of one site's scores before sites are compared.

        A score counts as ``(score - shift) / divisor``.
        """
        return 0.0, 1.0

    @property
    def settings(self) -> FrozenDict:
        """The settings, as a plan records them."""
        return FrozenDict({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})


def members_of(site: AttentionSite, unit: int) -> str:
    """The heads of a unit; of neurons, which may be hundreds, their number."""
    members = site.units[unit]
    if site.is_feed_forward:
        return f"{len(members):,} neuron{'' if len(members) == 1 else 's'}"
    return f"heads {list(members)}"
