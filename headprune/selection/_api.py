"""``select``: a plan of the heads to keep, from scores and a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from headprune.core.choice import Choice
from headprune.core.coverage import coverage_notes
from headprune.core.errors import HeadPruneError, InfeasibleBudget, InvalidValue
from headprune.core.heads import AttentionSite, HeadCounts, HeadMask, Policy
from headprune.core.latency import LatencyTable
from headprune.core.plan import Budget, PruningPlan, SiteBudget, allowance, share_hint
from headprune.core.scores import HeadScores
from headprune.selection import registry
from headprune.selection._base import (
    COUNT_NEURONS,
    Loss,
    Position,
    Problem,
    Rescore,
    Selector,
    words_of,
)
from headprune.selection._close import close_calls
from headprune.selection._groups import WHERE, by_kind, heads_by_kind, sites_by_budget
from headprune.selection._policies import cache_notes
from headprune.selection._required import Heads
from headprune.selection._task import SelectionTask
from headprune.selection.global_topk import GlobalTopk

_BY_LEVELS = "Neurons are kept or removed by level: a named neuron takes its whole bundle with it."
_NOT_BY_KIND = (
    "auto chose one budget per kind of attention. This budget cannot be met kind by kind, so it"
    " holds for all kinds together."
)
#: Scorers whose scores of neurons are too large beside those of heads: parts of a neuron's score
#: cannot cancel, those of a head's can. Measured in docs/pipelines.md.
_INCOMPARABLE = ("magnitude", "taylor", "wanda")
#: A kind of attention gets a note where it keeps at most this part of its share of the heads.
_UNEVEN = 0.5


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
    """Choose the heads to keep: the most important that the budget allows.

    Of equal scores, the later head is removed first.

    Args:
        scores: With costs, unless the budget counts heads.
        budget: An upper bound. Or budgets by kind of attention or by pattern over sites' names
            (``"*decoder*"``); other sites keep every head.
        selector: Its name, or a configured one. Default ``global_topk``; ``knapsack``
            for speed and ladders; ``repriced`` for ladders with a loss.
        must_keep: Original indices by site.
        must_remove: The same.
        loss: The rise of each example's loss, ``[masks, examples]``, the same in every call.
        rescore: For selectors in steps: scores of a mask's heads alone.
        latency: For speed, from `headprune.bench.latency_table`.

    Raises:
        InfeasibleBudget: names the nearest possible budget.
        InvalidValue, UnknownName: an argument that does not fit the others.

    >>> from headprune.core.codec import EMPTY
    >>> from headprune.core.heads import AttentionSite
    >>> from headprune.core.scores import ModelFingerprint
    >>> site = AttentionSite("layer", "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3))
    >>> values, model = ((0.1, 0.9, 0.8, 0.2),), ModelFingerprint("s", "w")
    >>> scores = HeadScores((site,), values, None, "taylor", EMPTY, 32, model)
    >>> print(select(scores, Budget(keep_heads=0.5)))
    PruningPlan: 2 of 4 heads kept (global_topk, by taylor, keep 50 % of the heads)
      layer  · ■ ■ ·
    """
    # 1. Check the arguments against each other.
    if not isinstance(scores, HeadScores):
        raise InvalidValue(
            "select(scores=)", "HeadScores, such as hp.score returns", type(scores).__name__
        )
    if not isinstance(budget, (Budget, Mapping)):
        hint = "Write hp.Budget(keep_heads=0.5), for example."
        raise InvalidValue(WHERE, "a Budget, or a mapping to Budgets", repr(budget), hint)
    if isinstance(budget, Budget) and scores.choice is not None and scores.choice.by_kind:
        # Scores of ``auto`` that chose so turn one budget of heads into one per kind.
        again = partial(
            select,
            selector=selector,
            must_keep=must_keep,
            must_remove=must_remove,
            loss=loss,
            rescore=rescore,
            latency=latency,
        )
        return _in_every_kind(scores, budget, again)
    timed = _asks_for_speed(budget)
    selector = selector or default_selector(scores, budget, loss)
    name, chosen = registry.resolve(selector, Selector, "select(selector=)")
    priced = scores.ladders is not None and reads_prices(chosen)
    chosen = chosen.with_minimum(scores.sites, budget, priced)
    _check_given(chosen, name, loss=loss, rescore=rescore)
    _check_latency(latency, timed)
    # 2. Choose the units to keep.
    task = SelectionTask.of(scores, must_keep, must_remove, loss, rescore, latency)
    # A budget per group of sites is met group by group.
    groups: tuple[SiteBudget, ...] = ()
    if isinstance(budget, Budget):
        keep = _kept(task.problem(budget, chosen), chosen, name)
    else:
        keep, groups = _kept_by_group(task, budget, chosen, name)
    if not keep and task.positions - task.must_remove:
        hint = "Raise the budget, or let every layer keep one: min_heads=1."
        must = "at least one head or neuron"
        raise InvalidValue(f"what selector {name!r} keeps", must, "none", hint)
    # 3. Write the plan.
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
        notes=(
            *_notes(task, scores, mask, budget),
            *_unread_prices(scores, chosen, name),
            *incomparable(scores.scorer, scores.sites, budget, chosen),
            *_chosen_for(scores, budget, name),
        ),
        policy=_policy(scores),
    )


def reads_prices(selector: Selector) -> bool:
    """Whether a selector, or the one that it calls, reads the prices of levels."""
    inner = getattr(selector, "inner", None)
    return selector.reads_prices or (inner is not None and registry.get(inner).reads_prices)


def incomparable(
    scorer: str,
    sites: Iterable[AttentionSite],
    budget: Budget | Mapping[str, Budget],
    selector: Selector,
) -> tuple[str, ...]:
    """A note where heads and neurons compete by scores that do not compare them."""
    kinds = {site.is_feed_forward for site in sites}
    compete = isinstance(budget, Budget) and budget.kind in COUNT_NEURONS and len(kinds) == 2
    if not compete or not selector.across or scorer not in _INCOMPARABLE:
        return ()
    return (
        f"{scorer} does not compare heads with neurons: under one budget it keeps too few heads,"
        " and on SST-2 it did worse than random (docs/pipelines.md). Take surgeon or ladder.",
    )


def _unread_prices(scores: HeadScores, selector: Selector, name: str) -> tuple[str, ...]:
    if scores.ladders is None or reads_prices(selector):
        return ()
    return (f"{name} does not read the prices of levels; knapsack and repriced do.",)


def default_selector(
    scores: HeadScores, budget: Budget | Mapping[str, Budget], loss: Loss | None = None
) -> str:
    """The selector of a call that names none."""
    if scores.ladders is not None and loss is not None:
        return "repriced"  # measures what the sites cost together
    # The cost in time depends on how many heads the site keeps, and so do measured prices; knapsack
    # is exact for both.
    if _asks_for_speed(budget) or scores.ladders is not None:
        return "knapsack"
    return "global_topk"


def _policy(scores: HeadScores) -> Policy:
    """The policy of the sites: that of the first which shares key/value heads and has another."""
    for site in scores.sites:
        if site.policy != "group" and site.n_kv_heads > 1:
            return site.policy
    return "group"


def _in_every_kind(
    scores: HeadScores, budget: Budget, plan_of: Callable[..., PruningPlan]
) -> PruningPlan:
    """The plan that meets a budget in each kind of attention.

    Where that cannot be, the plan over all kinds, with a note.

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
    notes = (*plan.notes, _NOT_BY_KIND, *_chosen_for(scores, budget, plan.selector))
    return replace(plan, scores=scores.digest, notes=notes)


def _chosen_for(
    scores: HeadScores, asked: Budget | Mapping[str, Budget], selector: str
) -> tuple[str, ...]:
    """Notes where ``auto`` chose the scorer for another budget or selector than these."""
    choice = scores.choice
    if choice is None:
        return ()
    notes = _of_another_budget(scores, choice, asked)
    if choice.selector in ("", selector):
        return notes
    return (
        *notes,
        f"auto compared plans of selector {choice.selector!r}; {selector!r} may keep other heads."
        " In a recipe, auto compares those of select.selector.",
    )


def _of_another_budget(
    scores: HeadScores, choice: Choice, asked: Budget | Mapping[str, Budget]
) -> tuple[str, ...]:
    """A note where ``auto`` chose the scorer for another budget."""
    if isinstance(asked, Budget):
        wanted = str(asked)
        if asked.kind == "keep_heads" and choice.budget in _same_heads(scores, asked):
            return ()
    else:
        if choice.by_kind and set(asked) == set(heads_by_kind(scores.sites)):
            return ()  # `_in_every_kind` made these budgets of the one that `auto` chose for
        wanted = ", ".join(str(SiteBudget(key, budget)) for key, budget in asked.items())
    if choice.budget == wanted:
        return ()
    budgets = [asked] if isinstance(asked, Budget) else asked.values()
    heads = all(budget.kind == "keep_heads" for budget in budgets)
    way = "hp.scoring.Auto(keep=...)" if heads else "A recipe with score.scorer: auto"
    return (
        f"auto chose {choice.chosen} for another budget: {choice.budget}. {way} chooses for yours.",
    )


def _same_heads(scores: HeadScores, budget: Budget) -> tuple[str, ...]:
    """The words of a budget of heads as a count and as a share of the present ones."""
    present = HeadCounts.present(scores.sites).heads
    count = allowance(budget.amount, present)
    if not 0 < count <= present:
        return ()
    return str(replace(budget, keep_heads=count)), str(replace(budget, keep_heads=count / present))


def _check_given(selector: Selector, name: str, **given: object) -> None:
    """Refuse a callable that the selector lacks, and one that it would ignore."""
    for argument, value in given.items():
        where = f"select({argument}=)"
        if argument in selector.needs and value is None:
            hint = "A recipe supplies it by itself."
            raise InvalidValue(where, f"given, because selector {name!r} needs it", "none", hint)
        if argument not in selector.needs and value is not None:
            raise InvalidValue(
                where, f"left out: selector {name!r} does not use it", type(value).__name__
            )
        if value is not None and not callable(value):
            raise InvalidValue(where, "callable", type(value).__name__)


def _asks_for_speed(budget: Budget | Mapping[str, Budget]) -> bool:
    """Whether a budget is one of speed."""
    return "speedup" in _kinds_of(budget)


def _kinds_of(budget: Budget | Mapping[str, Budget]) -> set[str]:
    """What a budget, or those of a mapping, are of: ``keep_heads``, ``speedup`` and so on."""
    budgets = [budget] if isinstance(budget, Budget) else budget.values()
    # Values of a mapping that are no budgets are refused later, by `sites_by_budget`.
    return {one.kind for one in budgets if isinstance(one, Budget)}


def _check_latency(latency: LatencyTable | None, timed: bool) -> None:
    if latency is None:
        return
    if not isinstance(latency, LatencyTable):
        raise InvalidValue("select(latency=)", "a LatencyTable", type(latency).__name__)
    if not timed:
        raise InvalidValue("select(latency=)", "given with Budget(speedup=) only", "another budget")


def _kept(problem: Problem, selector: Selector, name: str) -> frozenset[Position]:
    """A selector's answer, checked, so that no faulty selector can end in a wrong plan."""
    keep = selector.keep(problem)
    where = f"what selector {name!r} keeps"
    known = frozenset(problem.positions())
    if not keep <= known:
        raise InvalidValue(where, "units of the problem", sorted(keep - known))
    # The rules before the budget: the error of a plan that breaks both names the rule.
    broken = problem.broken(keep)
    if broken:
        raise InvalidValue(where, "within the rules (must_keep, min_heads and so on)", broken)
    if not problem.fits(keep):
        must = f"within the budget's limit of {problem.limit}"
        raise InvalidValue(where, must, f"a cost of {problem.cost(keep)}")
    problem.notes.extend(close_calls(problem, selector, keep))
    return keep


def _kept_by_group(
    task: SelectionTask, budgets: Mapping[str, Budget], selector: Selector, name: str
) -> tuple[frozenset[Position], tuple[SiteBudget, ...]]:
    """The kept units where groups of sites have budgets of their own, and these groups."""
    groups = sites_by_budget(task.scores.sites, budgets)
    budgeted = chain.from_iterable(places for _, places in groups)
    keep = task.positions
    # Sites without a budget keep every head that the rules allow.
    others = task.sites_without_budget(budgeted)
    if others:
        rules = GlobalTopk(min_heads=selector.min_heads, multiple_of=selector.multiple_of)
        everything = SiteBudget("other sites", Budget(keep_heads=1.0))
        keep = _kept_there(task, everything, others, keep, rules, "global_topk")
    for group, places in groups:
        keep = _kept_there(task, group, places, keep, selector, name)
    return keep, tuple(group for group, _ in groups)


def _kept_there(
    task: SelectionTask,
    group: SiteBudget,
    places: tuple[int, ...],
    keep: frozenset[Position],
    selector: Selector,
    name: str,
) -> frozenset[Position]:
    """``keep`` with another choice at the sites of a group."""
    try:
        problem = task.problem_of_sites(group.budget, places, selector, keep)
        there = _kept(problem, selector, name)
    except HeadPruneError as error:
        # The same error, with the key of the group.
        where = error.where.replace("Budget", f"{WHERE}[{group.sites!r}]", 1)
        raise type(error)(where, error.must, error.got, error.hint) from None
    # The problem counts the sites of the group from 0.
    elsewhere = frozenset(position for position in keep if position[0] not in places)
    return elsewhere | {(places[site], unit) for site, unit in there}


def _notes(
    task: SelectionTask,
    scores: HeadScores,
    mask: HeadMask,
    budget: Budget | Mapping[str, Budget],
) -> tuple[str, ...]:
    """What a plan says of its mask, of the selection, and of the scores."""
    notes: list[str] = []
    present = sum(len(site.heads) for site in scores.sites)
    if mask.n_kept < present:
        notes.extend(cache_notes(scores.sites, mask))
    else:
        notes.append(_nothing_removed(scores.sites, budget))
    notes.extend(_emptied_notes(scores.sites, mask))
    notes.extend(_cross_cache_notes(scores.sites, budget))
    # Where kinds have budgets, or `auto` compared both ways, the split is deliberate.
    if isinstance(budget, Budget) and scores.choice is None and scores.scorer != "random":
        notes.extend(_uneven_notes(scores.sites, mask))
    for verb, positions in (("Kept", task.must_keep), ("Removed", task.must_remove)):
        if positions:
            named = ", ".join(words_of(task.scores, position) for position in sorted(positions))
            notes.append(f"{verb} on request: {named}.")
            if any(_is_neuron_bundle(task.scores.sites[site], unit) for site, unit in positions):
                notes.append(_BY_LEVELS)
    if task.latency is not None:
        notes.append(_predicted(task.latency, mask))
    return (*notes, *task.notes, *coverage_notes(scores.notes))


def _is_neuron_bundle(site: AttentionSite, unit: int) -> bool:
    """Whether a unit is a bundle of several neurons."""
    return site.is_feed_forward and len(site.units[unit]) > 1


def _emptied_notes(sites: Iterable[AttentionSite], mask: HeadMask) -> Iterator[str]:
    """Name the layers that keep no head, then those that keep no neuron."""
    emptied = [site for site in sites if site.heads and not mask.kept(site.name)]
    for noun, neurons in (("head", False), ("neuron", True)):
        names = [site.name for site in emptied if site.is_feed_forward is neurons]
        if names:
            yield f"Without a {noun}: {', '.join(names)}."


def _uneven_notes(sites: Sequence[AttentionSite], mask: HeadMask) -> Iterator[str]:
    """A note on the kinds of attention that keep far fewer of their heads than the model does."""
    present, kept = heads_by_kind(sites), heads_by_kind(sites, mask)
    share = sum(kept.values()) / max(1, sum(present.values()))
    if not share:
        return
    few = []
    for kind, count in kept.items():
        if count <= _UNEVEN * share * present[kind]:
            few.append(f"{count} of {present[kind]} heads of kind {kind}")
    if few:
        yield (
            f"Kept are {', '.join(few)}, and {share:.0%} of all heads. Scores of different kinds"
            " of attention may not compare. The scorer auto compares this with a budget for each"
            " kind."
        )


def _nothing_removed(sites: Sequence[AttentionSite], budget: Budget | Mapping[str, Budget]) -> str:
    """The note of a plan that keeps everything."""
    counts = HeadCounts.present(sites)
    units = "head" if counts.neurons is None else "head and neuron"
    note = f"Nothing is removed: the budget allows every {units} that is present."
    return note + count_hint(budget, counts.heads)


def count_hint(budget: Budget | Mapping[str, Budget], present: int) -> str:
    """What to write in place of a count above the heads that are present, if it is one."""
    count = budget.keep_heads if isinstance(budget, Budget) else None
    if not isinstance(count, int) or count <= present:
        return ""
    return f" It keeps {count} heads, and {present} are present. {share_hint(count)}".rstrip()


def _cross_cache_notes(
    sites: Sequence[AttentionSite], budget: Budget | Mapping[str, Budget]
) -> tuple[str, ...]:
    """The note of a budget of the KV cache in a model with cross-attention."""
    if "keep_kv" not in _kinds_of(budget) or "cross" not in heads_by_kind(sites):
        return ()
    return ("keep_kv does not count the cache of cross-attention, which keeps its size.",)


def _predicted(table: LatencyTable, mask: HeadMask) -> str:
    """The latency that a table predicts for a mask."""
    after = table.predict(mask)
    return (
        f"Predicted: {1000 * after:.4g} ms in place of {1000 * table.whole:.4g} ms,"
        f" {table.speedup(mask):.3f} times as fast, at batch {table.batch_size} of {table.length}"
        f" tokens ({table.dtype}, {table.device})."
    )
