"""The verb: scores and a budget in, a plan out."""

from __future__ import annotations

from collections.abc import Mapping

from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.heads import HeadMask, Policy, SiteKeep
from headprune.core.plan import Budget, PruningPlan, SiteBudget
from headprune.core.scores import HeadScores
from headprune.selection import registry
from headprune.selection._base import Position, Problem, Selector
from headprune.selection._budget import pose
from headprune.selection._groups import WHERE, divided, part
from headprune.selection._policies import cache_notes
from headprune.selection._units import bundled

_NOTHING = "Nothing is removed: the budget allows every head that is present."


def select(
    scores: HeadScores, budget: Budget | Mapping[str, Budget], selector: str | Selector = "global_topk"
) -> PruningPlan:
    """Decides which heads stay: as many as the budget allows, the most important ones.

    A budget is an upper bound: a plan may keep less where whole KV groups, or heads of unlike cost, do not add up to
    it. Equal scores are decided by place: the later site and the later head go first.

    Args:
        scores: From `hp.score`; with costs, unless the budget counts heads.
        budget: What may stay. Or a mapping to budgets from kinds of attention (``self``, ``causal``, ``cross``) or
            patterns over sites' names (``"*decoder*"``): each group of sites meets its budget by itself, a fraction
            being one of what its own heads cost, and sites that no key names keep every head.
        selector: A registered name, see ``hp.selection.registry.names()``, or a configured selector.

    Raises:
        InfeasibleBudget: no choice that the selector may make meets the budget; the message names the nearest budget
            that can be met.
        InvalidValue: an argument of another type, or a budget in a currency that the scores carry no costs in.
            Or keys that name one site twice.
        UnknownName: no selector of this name, or a key of a mapping that names no site.

    >>> from headprune.core.codec import EMPTY
    >>> from headprune.core.heads import AttentionSite
    >>> from headprune.core.scores import ModelFingerprint
    >>> sites = tuple(AttentionSite(name, "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3)) for name in ("lower", "upper"))
    >>> values = ((0.1, 0.9, 0.8, 0.2), (0.3, 0.7, 0.4, 0.6))
    >>> scores = HeadScores(sites, values, None, "taylor", EMPTY, 32, ModelFingerprint("s", "w"))
    >>> print(select(scores, Budget(keep_heads=0.5)))
    PruningPlan: 4 of 8 heads stay (global_topk, by taylor, keep 50 % of the heads)
      lower  · ■ ■ ·
      upper  · ■ · ■
    """
    if not isinstance(scores, HeadScores):
        raise InvalidValue("select(scores=)", "HeadScores, such as hp.score returns", type(scores).__name__)
    if not isinstance(budget, (Budget, Mapping)):
        hint = "Write hp.Budget(keep_heads=0.5), for example."
        raise InvalidValue(WHERE, "a Budget, or a mapping to Budgets", repr(budget), hint)
    name, chosen = registry.resolve(selector, Selector, "select(selector=)")
    policy: Policy = next((s.policy for s in scores.sites if s.policy != "group" and s.n_kv_heads > 1), "group")
    scored, scores = scores, bundled(scores)
    groups: tuple[SiteBudget, ...] = ()
    if isinstance(budget, Budget):
        keep = _kept(scores, budget, chosen, name)
    else:
        keep = frozenset((unit.site, unit.unit) for unit in scores.units())
        groups = tuple(group for group, _ in divided(scores.sites, budget))
        for group, places in divided(scores.sites, budget):
            keep = frozenset(p for p in keep if p[0] not in places) | _kept_there(scores, group, places, chosen, name)
    removed = sum(len(site.units) for site in scores.sites) - len(keep)
    mask = _mask(scores, keep)
    return PruningPlan(
        mask=mask,
        budget=budget if isinstance(budget, Budget) else None,
        budgets=groups,
        selector=name,
        settings=chosen.settings,
        scorer=scores.scorer,
        scores=scored.digest,
        model=scores.model,
        notes=cache_notes(scored.sites, mask) if removed else (_NOTHING,),
        policy=policy,
    )


def _kept(scores: HeadScores, budget: Budget, selector: Selector, name: str) -> frozenset[Position]:
    problem = pose(scores, budget)
    return _checked(selector.keep(problem), problem, name)


def _kept_there(
    scores: HeadScores, group: SiteBudget, places: tuple[int, ...], selector: Selector, name: str
) -> frozenset[Position]:
    """What stays of some sites under their own budget, with places among all sites."""
    try:
        keep = _kept(part(scores, places), group.budget, selector, name)
    except HeadPruneError as error:
        where = error.where.replace("Budget", f"{WHERE}[{group.sites!r}]", 1)
        raise type(error)(where, error.must, error.got, error.hint) from None
    return frozenset((places[site], unit) for site, unit in keep)


def _checked(keep: frozenset[Position], problem: Problem, name: str) -> frozenset[Position]:
    """Refuses an answer that is none, so that no faulty selector can end in a wrong plan."""
    known = {(unit.site, unit.unit) for unit in problem.scores.units()}
    if not keep <= known:
        raise InvalidValue(f"what selector {name!r} keeps", "units of the problem", sorted(keep - known))
    if not problem.fits(keep):
        must = f"within the budget's limit of {problem.limit}"
        raise InvalidValue(f"what selector {name!r} keeps", must, f"a cost of {problem.cost(keep)}")
    return keep


def _mask(scores: HeadScores, keep: frozenset[Position]) -> HeadMask:
    kept: list[list[int]] = [[] for _ in scores.sites]
    for unit in scores.units():
        if (unit.site, unit.unit) in keep:
            kept[unit.site].extend(unit.heads)
    rows = zip(scores.sites, kept, strict=True)
    return HeadMask(tuple(SiteKeep(site.name, site.n_query_heads, tuple(sorted(heads))) for site, heads in rows))
