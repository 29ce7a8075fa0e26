"""One call of ``select``: scores in units that stay or go together, what is asked of them, and
problems out of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headprune.core.codec import EMPTY
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask, SiteKeep
from headprune.core.latency import LatencyTable
from headprune.core.plan import Budget
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.selection._base import Loss, Position, Problem, Rescore, Selector
from headprune.selection._budget import best_first, minimum, pose
from headprune.selection._groups import divided, part
from headprune.selection._required import Heads, as_units, named
from headprune.selection._units import bundled


@dataclass(frozen=True)
class Task:
    """What a call of ``select`` is about, before a budget is laid over it; the fields are those of
    `Problem`."""

    scores: HeadScores
    stay: frozenset[Position]
    go: frozenset[Position]
    loss: Loss | None
    rescore: Rescore | None
    latency: LatencyTable | None
    notes: list[str] = field(default_factory=list, compare=False)

    @classmethod
    def of(
        cls,
        scores: HeadScores,
        must_keep: Heads | None,
        must_remove: Heads | None,
        loss: Loss | None,
        rescore: Rescore | None,
        latency: LatencyTable | None,
    ) -> Task:
        """Checks the heads that are named and brings everything into units.

        Raises:
            UnknownName: a site or a head that is not scored, or a site that the latency table
                lacks.
            InvalidValue: heads that must both stay and go, or a latency table that is not for these
                sites.
        """
        keep = named(scores.sites, must_keep, "select(must_keep=)")
        remove = named(scores.sites, must_remove, "select(must_remove=)")
        if latency is not None:
            latency.check(scores.sites)
        units = bundled(scores, keep, remove)
        stay, go = as_units(units.sites, keep, remove)
        return cls(
            units,
            stay,
            go,
            loss,
            None if rescore is None else _in_units(rescore, scores, units),
            latency,
        )

    @property
    def positions(self) -> frozenset[Position]:
        """Every unit."""
        return frozenset((unit.site, unit.unit) for unit in self.scores.units())

    def posed(self, budget: Budget, selector: Selector) -> Problem:
        """The problem of all sites under one budget.

        Raises:
            InvalidValue: a site is left no lawful number of heads; or see `pose`.
        """
        problem = replace(
            pose(self.scores, budget, self.latency if budget.kind == "speedup" else None),
            stay=self.stay,
            go=self.go,
            min_heads=selector.min_heads,
            multiple_of=selector.multiple_of,
            loss=self.loss,
            rescore=self.rescore,
            notes=self.notes,
        )
        for place, (site, counts) in enumerate(zip(self.scores.sites, problem.counts, strict=True)):
            if not counts:
                least = sum(len(site.units[u]) for s, u in self.stay if s == place)
                most = len(site.heads) - sum(len(site.units[u]) for s, u in self.go if s == place)
                must = (
                    f"lawful with min_heads={selector.min_heads} and"
                    f" multiple_of={selector.multiple_of}"
                )
                got = f"{least} to {most} heads that may stay there, and no such number among them"
                hint = "Change must_keep, must_remove or these settings"
                hint += "; the latency table may lack the number." if problem.steps else "."
                raise InvalidValue(f"what stays of {site.name}", must, got, hint)
        return problem

    def posed_there(
        self, budget: Budget, places: Sequence[int], selector: Selector, keep: Iterable[Position]
    ) -> Problem:
        """The problem of some sites under their own budget, where ``keep`` is what stays of the
        others."""
        back = {place: i for i, place in enumerate(places)}
        there = Task(
            part(self.scores, places),
            frozenset((back[s], u) for s, u in self.stay if s in back),
            frozenset((back[s], u) for s, u in self.go if s in back),
            self.loss,
            _of_places(self.rescore, places) if self.rescore else None,
            self.latency.alone(self.scores.sites[p].name for p in places) if self.latency else None,
            self.notes,
        )
        return replace(there.posed(budget, selector), beside=self.mask(keep))

    def mask(self, keep: Iterable[Position]) -> HeadMask:
        """Kept units as a mask of all sites."""
        kept: list[list[int]] = [[] for _ in self.scores.sites]
        for site, unit in keep:
            kept[site].extend(self.scores.sites[site].units[unit])
        rows = zip(self.scores.sites, kept, strict=True)
        return HeadMask(
            tuple(
                SiteKeep(site.name, site.n_query_heads, tuple(sorted(heads)))
                for site, heads in rows
            )
        )

    def unnamed(self, taken: Iterable[int]) -> tuple[int, ...]:
        """Sites that no budget is for and that lose heads all the same."""
        return tuple(sorted({site for site, _ in self.go} - set(taken)))


def check_possible(
    sites: Sequence[AttentionSite],
    selector: Selector,
    must_keep: Heads | None = None,
    must_remove: Heads | None = None,
    budgets: Budget | Mapping[str, Budget] | None = None,
    latency: LatencyTable | None = None,
) -> None:
    """Refuses what ``select`` would refuse whatever the scores are, before there are any.

    Budgets are checked as far as the sites tell, of heads and of speed; others need the costs that
    scores carry.

    Raises:
        InvalidValue, UnknownName, InfeasibleBudget: as ``select`` does.
    """
    values = tuple((0.0,) * len(site.units) for site in sites)
    scores = HeadScores(tuple(sites), values, None, "none", EMPTY, 0, ModelFingerprint("", ""))
    task = Task.of(scores, must_keep, must_remove, None, None, latency)
    task.posed(Budget(keep_heads=1.0), selector)
    known = ("keep_heads", "speedup")
    if isinstance(budgets, Budget) and budgets.kind in known:
        problem = task.posed(budgets, selector)
        minimum(problem, best_first(problem.scores))
    elif isinstance(budgets, Mapping):
        for group, there in divided(sites, budgets):
            if group.budget.kind in known:
                problem = task.posed_there(group.budget, there, selector, task.positions)
                minimum(problem, best_first(problem.scores))


def _in_units(rescore: Rescore, scores: HeadScores, units: HeadScores) -> Rescore:
    def rescored(mask: HeadMask) -> HeadScores:
        found = rescore(mask)
        if not isinstance(found, HeadScores) or found.sites != scores.sites:
            got = "those of other sites" if isinstance(found, HeadScores) else type(found).__name__
            raise InvalidValue(
                "what select(rescore=) returns", "HeadScores of the same sites and heads", got
            )
        return bundled(found, like=units.sites)

    return rescored


def _of_places(rescore: Rescore, places: Sequence[int]) -> Callable[[HeadMask], HeadScores]:
    return lambda mask: part(rescore(mask), places)
