"""One call of ``select``: its scores in prune units, its rules, and problems made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headprune.core.codec import EMPTY
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.latency import LatencyTable
from headprune.core.plan import Budget
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.core.units import CostTable
from headprune.selection._base import Loss, Position, Problem, Rescore, Selector, mask_of
from headprune.selection._budget import best_first, minimum, problem_of
from headprune.selection._groups import scores_of_sites, sites_by_budget
from headprune.selection._required import Heads, as_units, head_ids
from headprune.selection._units import bundled


@dataclass(frozen=True)
class SelectionTask:
    """A call of ``select`` before a budget is laid over it; its fields are those of `Problem`."""

    scores: HeadScores
    must_keep: frozenset[Position]
    must_remove: frozenset[Position]
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
    ) -> SelectionTask:
        """Check the named heads and bring everything into prune units.

        Raises:
            UnknownName: a site or a head that is not scored, or a site that the latency table
                lacks.
            InvalidValue: heads that must be both kept and removed, or a latency table that is not
                for these sites.
        """
        keep = head_ids(scores.sites, must_keep, "select(must_keep=)")
        remove = head_ids(scores.sites, must_remove, "select(must_remove=)")
        if latency is not None:
            # Here the costs are the whole model's; those of a part are its sites' alone.
            size = None if scores.costs is None else scores.costs.total.params
            latency.check(scores.sites, size)
        # Heads of a policy such as ``balanced`` are removed together: from here on, a unit is the
        # smallest thing that a selector decides on.
        units = bundled(scores, keep, remove)
        kept_units, removed_units = as_units(units.sites, keep, remove)
        if rescore is not None:
            rescore = _in_units(rescore, scores, units)
        return cls(units, kept_units, removed_units, loss, rescore, latency)

    @property
    def positions(self) -> frozenset[Position]:
        """Every unit."""
        return frozenset((unit.site, unit.unit) for unit in self.scores.units())

    def problem(self, budget: Budget, selector: Selector) -> Problem:
        """The problem of all sites under one budget.

        Raises:
            InvalidValue: no number of heads at a site is lawful; or see `pose`.
        """
        latency = self.latency if budget.kind == "speedup" else None
        problem = replace(
            problem_of(self.scores, budget, latency),
            must_keep=self.must_keep,
            must_remove=self.must_remove,
            min_heads=1 if selector.min_heads is None else selector.min_heads,
            multiple_of=selector.multiple_of,
            loss=self.loss,
            rescore=self.rescore,
            notes=self.notes,
        )
        for place, counts in enumerate(problem.counts):
            # 0 heads suit any number of GPUs, but nobody asked to remove all of them for that.
            emptied = counts == {0} and budget.tensor_parallel and _may_keep(problem, place)
            if not counts or emptied:
                raise _no_lawful_count(problem, place)
        return problem

    def problem_of_sites(
        self, budget: Budget, places: Sequence[int], selector: Selector, keep: Iterable[Position]
    ) -> Problem:
        """The problem of some sites under their own budget.

        Args:
            budget: For these sites together.
            places: Their indices, in the order in which the problem counts them.
            selector: Whose rules hold.
            keep: The kept units of all sites; those of the other sites stay fixed.
        """
        # The sites of the part are counted from 0.
        numbers = {place: number for number, place in enumerate(places)}
        latency = self.latency
        if latency is not None:
            latency = latency.alone(self.scores.sites[place].name for place in places)
        task = SelectionTask(
            scores=scores_of_sites(self.scores, places),
            must_keep=_renumbered(self.must_keep, numbers),
            must_remove=_renumbered(self.must_remove, numbers),
            loss=self.loss,
            rescore=_of_places(self.rescore, places) if self.rescore else None,
            latency=latency,
            notes=self.notes,
        )
        return replace(task.problem(budget, selector), kept_elsewhere=self.mask(keep))

    def mask(self, keep: Iterable[Position]) -> HeadMask:
        """Kept units as a mask of all sites."""
        return mask_of(self.scores.sites, keep)

    def sites_without_budget(self, budgeted: Iterable[int]) -> tuple[int, ...]:
        """Sites that no budget is for but that lose heads by ``must_remove``."""
        losing = {site for site, _ in self.must_remove}
        return tuple(sorted(losing - set(budgeted)))


def _renumbered(positions: frozenset[Position], numbers: Mapping[int, int]) -> frozenset[Position]:
    """The positions at the sites of a part, with the site's number there."""
    return frozenset((numbers[site], unit) for site, unit in positions if site in numbers)


def _may_keep(problem: Problem, place: int) -> int:
    """How many heads of a site need not be removed."""
    removed = problem.by_site(problem.must_remove)[place]
    return len(problem.scores.sites[place].heads) - problem.heads(place, removed)


def _no_lawful_count(problem: Problem, place: int) -> InvalidValue:
    """The error of a site where no number of heads, or none but 0, keeps the rules."""
    site = problem.scores.sites[place]
    least = problem.heads(place, problem.by_site(problem.must_keep)[place])
    most = _may_keep(problem, place)
    must = f"possible with min_heads={problem.min_heads} and multiple_of={problem.multiple_of}"
    if problem.budget.tensor_parallel:
        must += f" and tensor_parallel={problem.budget.tensor_parallel}"
    lawful = "only 0" if problem.counts[place] else "no number"
    got = f"{least} to {most} {site.noun}s, and {lawful} among them keeps these rules"
    hint = "Change must_keep, must_remove or these settings"
    hint += "; the latency table may lack the number." if problem.costs_by_count else "."
    return InvalidValue(f"the kept heads of {site.name}", must, got, hint)


def check_possible(
    sites: Sequence[AttentionSite],
    selector: Selector,
    must_keep: Heads | None = None,
    must_remove: Heads | None = None,
    budgets: Budget | Mapping[str, Budget] | None = None,
    latency: LatencyTable | None = None,
    costs: CostTable | None = None,
) -> None:
    """Refuse, before there are scores, what ``select`` would refuse whatever they are.

    Args:
        sites: Those to select from.
        selector: With its ``min_heads``.
        must_keep: As of ``select``.
        must_remove: The same.
        budgets: For all sites, or by group.
        latency: For budgets of speed.
        costs: For budgets of parameters, multiply-adds and cache; without them, those are not
            checked.

    Raises:
        InvalidValue, UnknownName, InfeasibleBudget: as ``select`` does.
    """
    # Scores of zero stand for the scores that are not there yet.
    values = tuple((0.0,) * len(site.units) for site in sites)
    model = ModelFingerprint("", "")
    scores = HeadScores(tuple(sites), values, None, "none", EMPTY, 0, model, costs=costs)
    task = SelectionTask.of(scores, must_keep, must_remove, None, None, latency)
    # Refuses sites without a lawful number.
    n_gpus = budgets.tensor_parallel if isinstance(budgets, Budget) else None
    task.problem(Budget(keep_heads=1.0, tensor_parallel=n_gpus), selector)
    known = {"keep_heads", "speedup"}
    if costs is not None:
        known.update(("keep_params", "keep_macs", "keep_kv"))
    if isinstance(budgets, Budget) and budgets.kind in known:
        problem = task.problem(budgets, selector)
        minimum(problem, best_first(problem.scores))
    elif isinstance(budgets, Mapping):
        for group, places in sites_by_budget(sites, budgets):
            if group.budget.kind in known:
                problem = task.problem_of_sites(group.budget, places, selector, task.positions)
                minimum(problem, best_first(problem.scores))


def _in_units(rescore: Rescore, scores: HeadScores, units: HeadScores) -> Rescore:
    """``rescore`` with its scores checked and brought into the units of the call."""

    def rescored(mask: HeadMask) -> HeadScores:
        # What the user's callable returns is checked before a selector relies on it.
        new = rescore(mask)
        if not isinstance(new, HeadScores) or new.sites != scores.sites:
            got = "those of other sites" if isinstance(new, HeadScores) else type(new).__name__
            raise InvalidValue(
                "what select(rescore=) returns", "HeadScores of the same sites and heads", got
            )
        return bundled(new, like=units.sites)

    return rescored


def _of_places(rescore: Rescore, places: Sequence[int]) -> Callable[[HeadMask], HeadScores]:
    """``rescore`` with the scores of some sites alone."""

    def rescored(mask: HeadMask) -> HeadScores:
        return scores_of_sites(rescore(mask), places)

    return rescored
