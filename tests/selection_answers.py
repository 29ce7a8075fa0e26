"""Calls of ``select`` whose answers are written down: plans and refusals, word for word, in
``selection_answers.json``.

python -m tests.selection_answers

writes that file anew. A selector that answers otherwise for equal input, or refuses in other words,
is a change that users see: CONTRIBUTING.md, "Versions", says what it asks for, and the file's own
difference says what it was. Scores, costs and losses are whole numbers or halves of them, so that
no processor rounds them otherwise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headprune.core.errors import HeadPruneError
from headprune.core.heads import HeadMask
from headprune.core.latency import BUSY, LatencyTable, SiteLatency
from headprune.core.plan import Budget, PruningPlan
from headprune.core.samples import Curvature
from headprune.core.scores import Cost, HeadScores
from headprune.selection import Problem, Selector, registry
from headprune.selection._api import select
from headprune.selection._base import Position
from headprune.selection._task import check_possible
from tests.selection_problems import (
    CURRENCIES,
    asked,
    configured,
    make,
    random_scores,
    random_table,
    site,
    unit_cost,
)

FILE = Path(__file__).with_suffix(".json")

#: Every selector with every one of its settings at a value that is not the usual one.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "global_topk": [
        *({}, {"normalise": "l2"}, {"normalise": "zscore"}, {"min_heads": 0}),
        {"min_heads": 2, "multiple_of": 2},
    ],
    "uniform": [{}, {"min_heads": 0}, {"multiple_of": 2}],
    "knapsack": [{}, {"min_heads": 0}, {"min_heads": 2}, {"multiple_of": 2}],
    "quadratic": [{}, {"search": "kwon"}, {"min_heads": 0}, {"multiple_of": 2}],
    "local_search": [
        {},
        {"max_losses": 6, "at_once": 2},
        {"margin": 0.5, "inner": "uniform"},
        {"min_heads": 0},
    ],
    "repriced": [{}, {"rounds": 1, "reach": 1}, {"margin": 0.0}, {"min_heads": 0}],
    "iterative": [
        {},
        {"steps": 3, "schedule": "geometric"},
        {"steps": 2, "inner": "knapsack"},
        {"steps": 1},
    ],
}

Case = Callable[[], object]


def answers(group: str) -> dict[str, str]:
    """The cases of a group by name, with what is answered."""
    return {name: answer(case) for name, case in GROUPS[group]()}


def answer(case: Case) -> str:
    """What stays and what the plan says of it; or the refusal, in its words."""
    try:
        plan = case()
    except HeadPruneError as error:
        return f"{type(error).__name__}: {error}"
    if not isinstance(plan, PruningPlan):
        return str(plan)
    kept = "; ".join(f"{row.site} {' '.join(map(str, row.kept)) or '-'}" for row in plan.mask.rows)
    return " | ".join([kept, *plan.notes])


# ---------------------------------------------------------------- every selector under every budget


def drawn(name: str, seed: int) -> tuple[HeadScores, dict[str, Any]]:
    """Ragged scores, on every other seed with standard errors, and what else this selector asks
    for."""
    rng = np.random.default_rng(seed)
    scores = random_scores(seed, dear=seed % 2 == 1, highest=9, lowest=-2 if seed % 3 == 0 else 0)
    if seed % 4 >= 2:
        errors = tuple(
            tuple(float(e) / 2 for e in rng.integers(0, 4, len(row))) for row in scores.values
        )
        scores = replace(scores, standard_errors=errors)
    units = list(scores.units())
    ties = rng.integers(-2, 3, (len(units), len(units)))
    if "curvature" in registry.get(name).needs:
        scores = replace(
            scores,
            curvature=Curvature.of(
                (ties @ ties.T + np.diag([u.value + 3 for u in units])).astype(float)
            ),
        )
    loss_of_each = rng.integers(0, 8, (len(units), 12)) / 2

    def loss(masks: Any) -> Any:
        gone = np.array(
            [[not set(u.heads) <= set(m.kept(u.name)) for u in units] for m in masks], float
        )
        return (
            gone @ loss_of_each
            + np.einsum("ij,jk,ik->i", gone, np.triu(ties, 1).astype(float), gone)[:, None]
        )

    def rescore(mask: HeadMask) -> HeadScores:
        left = sum(row.kept[0] for row in mask.rows if row.kept) + mask.n_kept
        return replace(
            scores,
            values=tuple(
                tuple((v * 7 + left + i) % 11 for i, v in enumerate(r)) for r in scores.values
            ),
        )

    known: dict[str, Any] = {"loss": loss, "rescore": rescore}
    return scores, {key: value for key, value in known.items() if key in registry.get(name).needs}


def rules(scores: HeadScores, seed: int) -> dict[str, Any]:
    """On some seeds heads that must stay and heads that must go."""
    if seed % 4 != 3:
        return {}
    rng = random.Random(seed)
    stay, go = {}, {}
    for s in scores.sites:
        chosen = rng.sample(list(s.units), min(2, len(s.units)))
        stay[s.name] = [chosen[0][0]]
        if len(chosen) > 1 and len(s.units) > 2:
            go[s.name] = [chosen[1][-1]]
    return {"must_keep": stay, "must_remove": go}


def of_selector(name: str) -> Iterator[tuple[str, Case]]:
    for settings in SETTINGS[name]:
        for kind in CURRENCIES:
            for seed in range(8 if name in ("global_topk", "uniform", "knapsack") else 4):
                said = " ".join(f"{k}={v}" for k, v in settings.items())
                yield f"{said} {kind} {seed}".strip(), partial(one, name, settings, kind, seed)


def one(name: str, settings: dict[str, Any], kind: str, seed: int) -> PruningPlan:
    scores, extra = drawn(name, seed)
    table = random_table(scores, seed, noise=seed % 3) if kind == "speedup" else None
    budget = asked(kind, (0.5, 0.8, 0.65, 0.9)[seed % 4] if kind != "keep_params" else 0.85)
    selector = configured(name, **settings)
    return select(scores, budget, selector, latency=table, **rules(scores, seed), **extra)


# ---------------------------------------------------------------- what is refused, and what a plan
# says


@dataclass(frozen=True)
class Told(Selector):
    """Keeps what it is told to, lawful or not."""

    answer: tuple[Position, ...] = ()

    def keep(self, problem: Problem) -> frozenset[Position]:
        return frozenset(self.answer)


PLAIN = make([site("a", 4), site("g", 4, 2)], [[1, 2, 3, 4], [1, 2]])
TABLE = LatencyTable(2.0, (SiteLatency("a", (0.1, 0.3, 0.5, 0.7, 0.9)),), 1, 8, "cpu", "float32")
ALONE = make([site("a", 4)], [[1, 2, 3, 4]])
SHARED = [site(f"{p}{n}", 8, n, policy=p) for p in ("balanced", "free") for n in (1, 2)]
SHARED.append(site("uneven", 6, 3, heads=(0, 1, 2, 4), policy="free"))
HALF = Budget(keep_heads=0.5)


def shared(**more: Any) -> HeadScores:
    values = [[(5 * u + 3 * s) % 7 for u in range(len(one.units))] for s, one in enumerate(SHARED)]
    return replace(make(SHARED, values), **more)


def refusals() -> Iterator[tuple[str, Case]]:
    """Arguments that cannot be."""
    free = shared(standard_errors=None)
    costs = [[unit_cost(1, 0)] * 4]
    bare = make([site("e", 4, kind="self")], [[1] * 4], costs, Cost(9, 0, 0, 0, 0))
    uneven = make([site("b", 6, 3, heads=(0, 1, 2, 4), policy="balanced")], [[1, 2, 3, 4]])
    calls: dict[str, dict[str, Any]] = {
        "no scores": {"scores": 3},
        "no budget": {"budget": 0.5},
        "no budgets": {"budget": {}},
        "a budget by number": {"budget": {"a": 0.5}},
        "a budget for a number": {"budget": {3: HALF}},
        "a budget for nothing": {"budget": {"q*": HALF}},
        "a budget for an encoder": {"budget": {"encoder": HALF}},
        "a budget for a name near one": {"budget": {"ga": HALF}},
        "two budgets for one": {"budget": {"causal": HALF, "a": HALF}},
        "a group that cannot": {"budget": {"a": Budget(keep_heads=1), "g": Budget(keep_heads=1)}},
        "no such selector": {"selector": "global_topq"},
        "another thing for a selector": {"selector": 3},
        "a site that is not there": {"must_keep": {"b": [0]}},
        "a head that is not there": {"must_keep": {"a": [4]}},
        "a head that is no number": {"must_keep": {"a": ["0"]}},
        "a head alone": {"must_remove": {"a": 1}},
        "heads as text": {"must_remove": {"a": "1"}},
        "pairs": {"must_remove": [("a", 1)]},
        "one head twice": {"must_keep": {"a": [0]}, "must_remove": {"a": [0]}},
        "one unit twice": {"must_keep": {"g": [0]}, "must_remove": {"g": [1]}},
        "a loss for nobody": {"loss": len},
        "scores for nobody": {"rescore": len},
        "no loss": {"selector": "local_search"},
        "a loss that is none": {"selector": "local_search", "loss": 3},
        "no scores anew": {"selector": "iterative"},
        "a number for a table": {"latency": 3},
        "a table for nobody": {"latency": TABLE},
        "no table": {"budget": Budget(speedup=1.2)},
        "a table of other sites": {"budget": Budget(speedup=1.2), "latency": TABLE},
        "none that is lawful": {
            "selector": configured("global_topk", multiple_of=3),
            "must_remove": {"a": [0, 1]},
        },
        "none that is lawful in a group": {
            "budget": {"a": HALF},
            "selector": configured("global_topk", multiple_of=3),
            "must_remove": {"a": [0, 1]},
        },
        "too little": {"budget": Budget(keep_heads=1)},
        "too little beside what must stay": {
            "budget": Budget(keep_heads=2),
            "must_keep": {"a": [0, 1], "g": [0]},
        },
        "not one head": {
            "budget": Budget(keep_heads=0.05),
            "selector": configured("uniform", min_heads=0),
        },
        "too few parameters": {"budget": Budget(keep_params=0.01)},
        "too little in blocks": {
            "budget": Budget(keep_heads=0.3),
            "selector": configured("knapsack", multiple_of=2),
        },
        "no curvature": {"selector": "quadratic"},
        "units that are none": {"selector": Told(answer=((0, 9), (5, 0)))},
        "without what must stay": {
            "selector": Told(answer=((0, 1), (1, 0))),
            "must_keep": {"a": [0]},
        },
        "with what must go": {"selector": Told(answer=((0, 1), (1, 0))), "must_remove": {"a": [1]}},
        "a head too few": {"selector": Told(answer=((0, 1),), min_heads=2)},
        "beyond the budget": {"selector": Told(answer=((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)))},
        "nothing": {"selector": Told(answer=(), min_heads=0)},
        "nothing in a group": {"budget": {"a": HALF}, "selector": Told(answer=(), min_heads=0)},
        "least as text": {"selector": ("uniform", {"min_heads": "1"})},
        "less than none": {"selector": ("uniform", {"min_heads": -1})},
        "multiples of none": {"selector": ("uniform", {"multiple_of": 0})},
        "another norm": {"selector": ("global_topk", {"normalise": "l1"})},
        "another search": {"selector": ("quadratic", {"search": "fast"})},
        "no steps": {"selector": ("iterative", {"steps": 0})},
        "another schedule": {"selector": ("iterative", {"schedule": "cubic"})},
        "one measurement": {"selector": ("local_search", {"max_losses": 1})},
        "none at once": {"selector": ("local_search", {"at_once": 0})},
        "a margin below zero": {"selector": ("local_search", {"margin": -0.5})},
        "a margin as text": {"selector": ("local_search", {"margin": "2"})},
        "a loss that is no number": {
            "selector": "local_search",
            "loss": lambda masks: np.full((len(masks), 4), np.nan),
        },
        "a loss of one example": {
            "selector": "local_search",
            "loss": lambda masks: np.zeros((len(masks), 1)),
        },
        "a loss of two examples": {
            "selector": "local_search",
            "loss": lambda masks: np.zeros((len(masks), 2)),
        },
        "no inner selector": {"selector": ("iterative", {"inner": "topk"})},
        "an inner selector that asks": {"selector": ("iterative", {"inner": "local_search"})},
        "an inner selector by number": {"selector": ("iterative", {"inner": 3})},
        "another's setting": {"selector": ("iterative", {"inner_settings": {"normalize": "l2"}})},
        "the outer one's setting": {
            "selector": ("iterative", {"inner_settings": {"min_heads": 0}})
        },
        "settings that are none": {"selector": ("iterative", {"inner_settings": ["l2"]})},
        "a cache of single heads": {"scores": free, "budget": Budget(keep_kv=0.5)},
        "no cache": {"scores": bare, "budget": Budget(keep_kv=0.5)},
        "no costs": {"scores": replace(PLAIN, costs=None), "budget": Budget(keep_macs=0.5)},
        "groups of unlike size": {"scores": uneven},
        "no heads left": {"scores": make([site("a", 4, heads=())], [[]])},
        "a table with another number": {
            "scores": make([site("a", 4, heads=(0, 1, 2))], [[1] * 3]),
            "budget": Budget(speedup=1.1),
            "latency": TABLE,
        },
        "a table that lacks numbers": {
            "scores": ALONE,
            "budget": Budget(speedup=1.1),
            "latency": replace(TABLE, sites=(SiteLatency("a", (None, None, None, None, 0.9)),)),
            "must_remove": {"a": [0]},
        },
        "no cut is faster": {
            "scores": ALONE,
            "budget": Budget(speedup=1.1),
            "latency": replace(TABLE, sites=(SiteLatency("a", (0.9,) * 5),)),
        },
        "too fast": {"scores": ALONE, "budget": Budget(speedup=9), "latency": TABLE},
        "too fast by a busy machine's table": {
            "scores": ALONE,
            "budget": Budget(speedup=9),
            "latency": replace(TABLE, notes=("The rows were scaled.", f"{BUSY}: by 40%.")),
        },
        "too fast without a minimum": {
            "scores": ALONE,
            "budget": Budget(speedup=9),
            "selector": ("knapsack", {"min_heads": 0}),
            "latency": TABLE,
        },
        "loss that answers otherwise": {
            "scores": random_scores(3),
            "selector": "local_search",
            "loss": lambda *_: 3,
        },
        "rescore that answers otherwise": {
            "scores": random_scores(3),
            "selector": "iterative",
            "rescore": lambda *_: 3,
        },
        "scores anew of other sites": {
            "scores": random_scores(3),
            "selector": "iterative",
            "rescore": lambda mask: PLAIN,
        },
    }
    for name, call in calls.items():
        yield name, partial(selected, **call)


def selected(scores: Any = PLAIN, budget: Any = HALF, selector: Any = None, **call: Any) -> object:
    if isinstance(selector, tuple):  # its name and settings, which may be refused, too
        selector = configured(selector[0], **selector[1])
    return select(scores, budget, selector, **call)


def before_scores() -> Iterator[tuple[str, Case]]:
    """What is refused before anything is scored."""
    sites, selector = PLAIN.sites, configured("global_topk")
    calls: dict[str, dict[str, Any]] = {
        "nothing asked": {},
        "half": {"budgets": HALF},
        "half of each": {"budgets": {"a": HALF, "g": HALF}},
        "too little": {"budgets": Budget(keep_heads=1)},
        "too little of one": {"budgets": {"a": HALF, "g": Budget(keep_heads=1)}},
        "costs are not known yet": {"budgets": Budget(keep_params=0.001)},
        "nor those of a group": {"budgets": {"a": Budget(keep_params=0.001)}},
        "for nothing": {"budgets": {"b": HALF}},
        "a site that is not there": {"must_keep": {"b": [0]}},
        "a head twice": {"must_keep": {"a": [0]}, "must_remove": {"a": [0]}},
        "what must stay is too much": {
            "must_keep": {"a": [0, 1], "g": [0]},
            "budgets": Budget(keep_heads=3),
        },
        "no speed without a table": {"budgets": Budget(speedup=1.1)},
        "no speed of a group without a table": {"budgets": {"a": Budget(speedup=1.1)}},
        "too fast for a group": {
            "sites": ALONE.sites,
            "budgets": {"a": Budget(speedup=30)},
            "latency": TABLE,
        },
        "too fast": {"sites": ALONE.sites, "budgets": Budget(speedup=30), "latency": TABLE},
        "fast": {"sites": ALONE.sites, "budgets": Budget(speedup=1.1), "latency": TABLE},
        "a table of other sites": {"latency": TABLE},
        "none is lawful": {
            "selector": configured("uniform", multiple_of=3),
            "must_remove": {"a": [0, 1]},
        },
        "none is lawful in a group": {
            "selector": configured("uniform", multiple_of=4, min_heads=3),
            "must_remove": {"g": [0]},
            "budgets": {"a": HALF},
        },
        "not one head": {
            "selector": configured("uniform", min_heads=0),
            "budgets": Budget(keep_heads=0.01),
        },
    }
    for name, call in calls.items():
        yield name, partial(check_possible, **{"sites": sites, "selector": selector, **call})


def policies() -> Iterator[tuple[str, Case]]:
    """Key and value heads that several heads share, and what plans say of a cache."""
    rng = np.random.default_rng(7)
    scores = shared()
    errors = tuple(tuple(float(e) / 4 for e in rng.integers(0, 9, len(r))) for r in scores.values)
    ties = rng.integers(-1, 2, (sum(map(len, scores.values)),) * 2)
    curved = replace(
        scores, curvature=Curvature.of((ties @ ties.T).astype(float)), standard_errors=errors
    )
    for share in (0.2, 0.4, 0.6, 0.9, 1.0):
        for name in ("global_topk", "uniform", "knapsack", "quadratic"):
            yield f"{name} {share}", partial(select, curved, Budget(keep_heads=share), name)
    yield "parameters", partial(select, curved, Budget(keep_params=0.8))
    rules = {"must_keep": {"balanced2": [3, 7]}, "must_remove": {"balanced2": [0, 4]}}
    yield "told", partial(select, curved, HALF, **rules)
    places = {"balanced*": HALF, "uneven": Budget(keep_heads=2)}
    yield "by place", partial(select, curved, places)
    somewhere = {"free*": HALF}
    gone = {"uneven": [0]}
    yield "must go where no budget is", partial(select, curved, somewhere, must_remove=gone)
    to_none = configured("global_topk", min_heads=0)
    yield "emptied", partial(select, curved, Budget(keep_heads=3), to_none)

    def rescore(mask: HeadMask) -> HeadScores:
        return replace(
            curved,
            values=tuple(tuple((v * 5 + mask.n_kept) % 9 for v in row) for row in curved.values),
        )

    for steps, inner in ((2, "quadratic"), (4, "global_topk")):
        selector = configured("iterative", steps=steps, inner=inner)
        yield f"in {steps} steps", partial(select, curved, HALF, selector, rescore=rescore)
    selector = configured("iterative", steps=2)
    yield "in steps, by place", partial(select, curved, somewhere, selector, rescore=rescore)


def wide() -> Iterator[tuple[str, Case]]:
    """Layers of more heads than all choices of which could be tried, whose heads stand in for each
    other."""
    sites = [site("a", 14), site("b", 28, 14, kind="self"), site("c", 4)]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        values = [list(map(int, rng.integers(0, 9, len(s.units)))) for s in sites]
        ties = rng.integers(-2, 3, (32, 8))
        scores = replace(
            make(sites, values), curvature=Curvature.of((ties @ ties.T + np.eye(32)).astype(float))
        )
        told = {"must_keep": {"a": [3], "b": [5]}, "must_remove": {"a": [0, 9]}} if seed % 2 else {}
        for share in (0.3, 0.5, 0.7):
            for settings in ({}, {"min_heads": 0, "multiple_of": 2}):
                said = f"{seed} {share} {'by twos' if settings else ''}".strip()
                selector = configured("quadratic", **settings)
                yield said, partial(select, scores, Budget(keep_heads=share), selector, **told)


def close() -> Iterator[tuple[str, Case]]:
    """Close calls and ties."""
    for seed in range(12):
        rng = random.Random(seed)
        sites = [site("a", 6), site("b", 8, 4), site("c", 3, kind="self")]
        values = [[rng.randint(0, 12) / 2 for _ in s.units] for s in sites]
        errors = tuple(tuple(rng.choice([0.0, 0.5, 1.0]) for _ in row) for row in values)
        scores = replace(make(sites, values), standard_errors=errors if seed % 3 else None)
        for name, settings in (
            ("global_topk", {}),
            ("global_topk", {"normalise": "l2"}),
            ("uniform", {}),
            ("knapsack", {}),
        ):
            for budget in (Budget(keep_heads=0.6), Budget(keep_params=0.9), Budget(speedup=1.2)):
                table = random_table(scores, seed) if budget.kind == "speedup" else None
                said = f"{seed} {name} {settings.get('normalise', '')} {budget.kind}"
                selector = configured(name, **settings)
                yield said, partial(select, scores, budget, selector, latency=table)


GROUPS: dict[str, Callable[[], Iterator[tuple[str, Case]]]] = {
    **{name: partial(of_selector, name) for name in SETTINGS},
    "refusals": refusals,
    "before scores": before_scores,
    "policies": policies,
    "wide layers": wide,
    "close calls": close,
}


if __name__ == "__main__":
    # So that classes of this file are not called __main__'s.
    from tests import selection_answers as named

    found = {group: named.answers(group) for group in GROUPS}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(FILE, sum(map(len, found.values())))
