"""The verb: scores and a budget in, a plan out."""

from __future__ import annotations

from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadMask, Policy, SiteKeep
from headprune.core.plan import Budget, PruningPlan
from headprune.core.scores import HeadScores
from headprune.selection import registry
from headprune.selection._base import Position, Problem, Selector
from headprune.selection._budget import pose
from headprune.selection._units import bundled


def select(scores: HeadScores, budget: Budget, selector: str | Selector = "global_topk") -> PruningPlan:
    """Decides which heads stay: as many as the budget allows, the most important ones.

    A budget is an upper bound: a plan may keep less where whole KV groups, or heads of unlike cost, do not add up to
    it. Equal scores are decided by place: the later site and the later head go first.

    Args:
        scores: From `hp.score`; with costs, unless the budget counts heads.
        budget: What may stay.
        selector: A registered name, see ``hp.selection.registry.names()``, or a configured selector.

    Raises:
        InfeasibleBudget: no choice that the selector may make meets the budget; the message names the nearest budget
            that can be met.
        InvalidValue: an argument of another type, or a budget in a currency that the scores carry no costs in.
        UnknownName: no selector of this name.

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
    if not isinstance(budget, Budget):
        raise InvalidValue("select(budget=)", "a Budget", repr(budget), "Write hp.Budget(keep_heads=0.5), for example.")
    name, chosen = registry.resolve(selector, Selector, "select(selector=)")
    policy: Policy = next((s.policy for s in scores.sites if s.policy != "group" and s.n_kv_heads > 1), "group")
    scored, scores = scores, bundled(scores)
    problem = pose(scores, budget)
    keep = _checked(chosen.keep(problem), problem, name)
    removed = sum(len(site.units) for site in scores.sites) - len(keep)
    return PruningPlan(
        mask=_mask(scores, keep),
        budget=budget,
        selector=name,
        settings=chosen.settings,
        scorer=scores.scorer,
        scores=scored.digest,
        model=scores.model,
        notes=() if removed else ("Nothing is removed: the budget allows every head that is present.",),
        policy=policy,
    )


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
    return HeadMask(tuple(SiteKeep(site.name, site.n_query_heads, tuple(heads)) for site, heads in rows))
