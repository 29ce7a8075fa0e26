"""The verb: scores and a budget in, a plan out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headprune.core.coverage import coverage_notes
from headprune.core.errors import HeadPruneError, InfeasibleBudget, InvalidValue
from headprune.core.heads import HeadMask
from headprune.core.latency import LatencyTable
from headprune.core.plan import Budget, PruningPlan, SiteBudget
from headprune.core.scores import HeadScores
from headprune.selection import registry
from headprune.selection._base import Loss, Position, Problem, Rescore, Selector
from headprune.selection._close import close_calls
from headprune.selection._groups import WHERE, by_kind, divided
from headprune.selection._policies import cache_notes
from headprune.selection._required import Heads
from headprune.selection._task import Task
from headprune.selection.global_topk import GlobalTopk

_NOT_BY_KIND = (
    "auto chose a budget per kind of attention; this one cannot be met so, and holds for all kinds"
    " together."
)
_NOTHING = "Nothing is removed: the budget allows every head that is present."


def select(
    scores: HeadScores,
    budget: Budget | Mapping[str, Budget],
    selector: str | Selector | None = None,
    *,
    must_keep: Heads | None = None,
    must_remove: Heads | None = None,
    loss: Loss | None = None,
    rescore: Rescore | None = None,
    latency: LatencyTable | None = None,
) -> PruningPlan:
    """Decides which heads stay: as many as the budget allows, the most important ones.

    A budget is an upper bound: a plan may keep less where whole KV groups, or heads of unlike cost,
    do not add up to it. Equal scores are decided by place: the later site and the later head go
    first. Heads on either side of the cut that could change places, and whose scores differ by no
    more than the standard error of the difference, are close
    calls: the plan's notes name them. With ``min_heads=0`` a layer,
    or a group with a budget of its own, may lose its last head, which the plan's notes say; the
    model keeps one, unless all must go.

    Args:
        scores: From `hp.score`; with costs, unless the budget counts heads.
        budget: What may stay. Or a mapping to budgets from kinds of attention (``self``,
            ``causal``, ``cross``) or patterns over sites' names (``"*decoder*"``): each group of
            sites meets its budget by itself, a fraction being one of what its own heads cost, and
            sites that no key names keep every head that may stay. Scores of ``auto`` that chose so
            (``scores.choice.by_kind``) turn one budget of heads into one per kind.
        selector: A registered name, see ``hp.selection.registry.names()``, or a configured
            selector. Default ``global_topk``, and ``knapsack`` where a budget is one of speed:
            there the price of a head depends on how many stay beside it, and it is exact all the
            same.
        must_keep: Heads that must stay: a site's name to their original indices. Heads that go
            together stay together.
        must_remove: Heads that must go.
        loss: For selectors that measure what they choose: how much the loss of each example rises
            under each of some masks, ``[masks, examples]``.
        rescore: For selectors that go in steps: the scores of the heads of a mask once only those
            are left.
        latency: For ``Budget(speedup=)``: what the model takes by the heads of each site, from
            `headprune.bench.latency_table`.

    Raises:
        InfeasibleBudget: no choice that the selector may make meets the budget; the message names
            the nearest budget that can be met.
        InvalidValue: an argument of another type, or a budget in a currency that the scores carry
            no costs in. Or keys that name one site twice. Or heads that must both stay and go, or
            that leave a site no number of heads that the selector allows. Or policy ``balanced``
            where groups are of unlike size. Or one of ``loss``, ``rescore`` and ``latency`` that is
            missing, or that neither selector nor budget needs. Or a selector that keeps not one
            head.
        UnknownName: no selector of this name, a key of a mapping that names no site, or no such
            head.

    >>> from headprune.core.codec import EMPTY
    >>> from headprune.core.heads import AttentionSite
    >>> from headprune.core.scores import ModelFingerprint
    >>> sites = tuple(
    ...     AttentionSite(name, "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3))
    ...     for name in ("lower", "upper")
    ... )
    >>> values = ((0.1, 0.9, 0.8, 0.2), (0.3, 0.7, 0.4, 0.6))
    >>> scores = HeadScores(sites, values, None, "taylor", EMPTY, 32, ModelFingerprint("s", "w"))
    >>> print(select(scores, Budget(keep_heads=0.5)))
    PruningPlan: 4 of 8 heads stay (global_topk, by taylor, keep 50 % of the heads)
      lower  · ■ ■ ·
      upper  · ■ · ■
    """
    if not isinstance(scores, HeadScores):
        raise InvalidValue(
            "select(scores=)", "HeadScores, such as hp.score returns", type(scores).__name__
        )
    if not isinstance(budget, (Budget, Mapping)):
        hint = "Write hp.Budget(keep_heads=0.5), for example."
        raise InvalidValue(WHERE, "a Budget, or a mapping to Budgets", repr(budget), hint)
    if isinstance(budget, Budget) and scores.choice is not None and scores.choice.by_kind:
        given: dict[str, Any] = {
            "must_keep": must_keep,
            "must_remove": must_remove,
            "loss": loss,
            "rescore": rescore,
        }
        return _in_every_kind(
            scores, budget, partial(select, selector=selector, latency=latency, **given)
        )
    timed = _timed([budget] if isinstance(budget, Budget) else budget.values())
    usual = "knapsack" if timed else "global_topk"
    name, chosen = registry.resolve(
        usual if selector is None else selector, Selector, "select(selector=)"
    )
    _check_given(chosen, name, loss=loss, rescore=rescore)
    _check_latency(latency, timed)
    task = Task.of(scores, must_keep, must_remove, loss, rescore, latency)
    keep = task.positions
    groups: tuple[SiteBudget, ...] = ()
    if isinstance(budget, Budget):
        keep = _kept(task.posed(budget, chosen), chosen, name)
    else:
        found = divided(scores.sites, budget)
        groups = tuple(group for group, _ in found)
        rules = GlobalTopk(min_heads=chosen.min_heads, multiple_of=chosen.multiple_of)
        if left := task.unnamed(p for _, places in found for p in places):
            rest = SiteBudget("other sites", Budget(keep_heads=1.0))
            keep = _kept_there(task, rest, left, keep, rules, "global_topk")
        for group, places in found:
            keep = _kept_there(task, group, places, keep, chosen, name)
    if not keep and task.positions - task.go:
        hint = "Raise the budget, or let every layer keep one: min_heads=1."
        raise InvalidValue(f"what selector {name!r} keeps", "a head at least", "none", hint)
    mask = task.mask(keep)
    return PruningPlan(
        mask=mask,
        budget=budget if isinstance(budget, Budget) else None,
        budgets=groups,
        selector=name,
        settings=chosen.settings,
        scorer=scores.scorer,
        scores=scores.digest,
        model=scores.model,
        notes=(*_notes(task, scores, mask), *_chosen_for(scores, budget)),
        policy=next(
            (s.policy for s in scores.sites if s.policy != "group" and s.n_kv_heads > 1), "group"
        ),
    )


def _in_every_kind(
    scores: HeadScores, budget: Budget, plan_of: Callable[..., PruningPlan]
) -> PruningPlan:
    """The plan that meets a budget in each kind of attention; over all kinds, with a note, where
    that cannot be.

    Args:
        scores: Of ``auto``, which chose so.
        budget: For the whole model.
        plan_of: From scores and a budget, or budgets, to a plan.
    """
    groups = by_kind(scores.sites, budget)
    if groups is not None:
        try:
            return plan_of(scores, groups)
        except InfeasibleBudget:
            pass  # a layer of one kind may need more heads than its kind's share
    plan = plan_of(replace(scores, choice=None), budget)
    return replace(
        plan, scores=scores.digest, notes=(*plan.notes, _NOT_BY_KIND, *_chosen_for(scores, budget))
    )


def _chosen_for(scores: HeadScores, asked: Budget | Mapping[str, Budget]) -> tuple[str, ...]:
    """A note where ``auto`` chose the scorer for another budget than the one that the plan
    meets."""
    if scores.choice is None:
        return ()
    if (
        scores.choice.by_kind
        and isinstance(asked, Mapping)
        and set(asked) == {site.kind for site in scores.sites}
    ):
        return ()
    groups = (
        [asked]
        if isinstance(asked, Budget)
        else [SiteBudget(key, one) for key, one in asked.items()]
    )
    if scores.choice.budget == ", ".join(map(str, groups)):
        return ()
    note = f"auto chose {scores.choice.chosen} for another budget: {scores.choice.budget}."
    return (f"{note} hp.scoring.Auto(keep=...) chooses for yours.",)


def _check_given(selector: Selector, name: str, **given: object) -> None:
    """Refuses a callable that the selector lacks, and one that it would ignore."""
    for argument, value in given.items():
        where = f"select({argument}=)"
        if argument in selector.needs and value is None:
            hint = "A recipe supplies it by itself."
            raise InvalidValue(where, f"given, because selector {name!r} asks it", "none", hint)
        if argument not in selector.needs and value is not None:
            raise InvalidValue(
                where, f"left out: selector {name!r} does not use it", type(value).__name__
            )
        if value is not None and not callable(value):
            raise InvalidValue(where, "callable", type(value).__name__)


def _timed(budgets: Iterable[object]) -> bool:
    """Whether a budget is one of speed."""
    return any(isinstance(b, Budget) and b.kind == "speedup" for b in budgets)


def _check_latency(latency: LatencyTable | None, timed: bool) -> None:
    if latency is None:
        return
    if not isinstance(latency, LatencyTable):
        raise InvalidValue("select(latency=)", "a LatencyTable", type(latency).__name__)
    if not timed:
        raise InvalidValue("select(latency=)", "given with Budget(speedup=) only", "another budget")


def _kept(problem: Problem, selector: Selector, name: str) -> frozenset[Position]:
    """What a selector keeps, if it is an answer, so that no faulty selector can end in a wrong
    plan."""
    keep, where = selector.keep(problem), f"what selector {name!r} keeps"
    known = frozenset(problem.positions())
    if not keep <= known:
        raise InvalidValue(where, "units of the problem", sorted(keep - known))
    if broken := problem.broken(keep):
        raise InvalidValue(where, "lawful", broken)
    if not problem.fits(keep):
        must = f"within the budget's limit of {problem.limit}"
        raise InvalidValue(where, must, f"a cost of {problem.cost(keep)}")
    problem.notes.extend(close_calls(problem, selector, keep))
    return keep


def _kept_there(
    task: Task,
    group: SiteBudget,
    places: tuple[int, ...],
    keep: frozenset[Position],
    selector: Selector,
    name: str,
) -> frozenset[Position]:
    """``keep`` with another choice at the sites of a group."""
    try:
        there = _kept(task.posed_there(group.budget, places, selector, keep), selector, name)
    except HeadPruneError as error:
        where = error.where.replace("Budget", f"{WHERE}[{group.sites!r}]", 1)
        raise type(error)(where, error.must, error.got, error.hint) from None
    return frozenset(p for p in keep if p[0] not in places) | {
        (places[site], unit) for site, unit in there
    }


def _notes(task: Task, scores: HeadScores, mask: HeadMask) -> tuple[str, ...]:
    removed = sum(len(site.heads) for site in scores.sites) - mask.n_kept
    notes = cache_notes(scores.sites, mask) if removed else (_NOTHING,)
    emptied = [site.name for site in scores.sites if site.heads and not mask.kept(site.name)]
    if emptied:
        notes += (f"Without a head: {', '.join(emptied)}.",)
    for verb, positions in (("stay", task.stay), ("go", task.go)):
        if positions:
            named = ((task.scores.sites[s], u) for s, u in sorted(positions))
            notes += (
                (
                    f"Told to {verb}:"
                    f" {', '.join(f'{site.name}{list(site.units[u])}' for site, u in named)}."
                ),
            )
    if (table := task.latency) is not None:
        after = table.predict(mask)
        note = f"Predicted: {1000 * after:.4g} ms in place of {1000 * table.whole:.4g} ms, "
        note += (
            f"{table.whole / max(after, 1e-9):.3f} times as fast, at batch {table.batch_size} of"
            f" {table.length} "
        )
        notes += (f"{note}tokens ({table.dtype}, {table.device}).",)
    return (*notes, *task.notes, *coverage_notes(scores.notes))
