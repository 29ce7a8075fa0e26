"""What slabs, sites and plans refuse, word for word, and the corners that no refusal is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from headprune.core.codec import EMPTY
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.heads import AttentionSite, HeadId, HeadMask
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.plan import Budget, PruningPlan, SiteBudget, allowance
from headprune.core.samples import Samples
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.core.slabs import (
    MOST_HEADS,
    HeadGeometry,
    check_slab,
    freed_groups,
    infer_geometry,
    kept_rows,
    rows_of,
    used_groups,
)
from headprune.report.difference import plan_difference
from headprune.report.explanation import explain

SITE = AttentionSite("a", "llama", "causal", 6, 2, 8, 8, (0, 1, 2, 3, 4, 5))
PAIRS = AttentionSite("a", "llama", "causal", 4, 2, 8, 8, (0, 1, 2, 3))
MASK = HeadMask.full([SITE])
HINT = "Or find the sites with policy='balanced' or 'free', where the layout allows it."
BOTH = (SiteBudget("self", Budget(keep_heads=1)),)


def scores_of(site: AttentionSite) -> HeadScores:
    """Scores without standard errors."""
    return HeadScores((site,), ((1.0, 2.0),), None, "taylor", EMPTY, 3, ModelFingerprint("s", "w"))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "more heads than any model has": (
        lambda: HeadGeometry(MOST_HEADS + 1, 1, 8, 8),
        f"n_query_heads: must be at most {MOST_HEADS:,}, got {MOST_HEADS + 1}",
    ),
    "no policies": (
        lambda: AttentionLayout("mine", "o", (HeadSlab("o", "in", "context"),), 8, policies=()),
        "layout 'mine'.policies: must be some of group, balanced, free, got ()",
    ),
    "a policy that there is not": (
        lambda: AttentionLayout(
            "mine", "o", (HeadSlab("o", "in", "context"),), 8, policies=("any",)
        ),  # type: ignore[arg-type]
        "layout 'mine'.policies: must be some of group, balanced, free, got ('any',)",
    ),
    "plans for other sites": (
        lambda: plan_difference(PruningPlan(MASK), PruningPlan(HeadMask.full([PAIRS])), ("x", "y")),
        "plans: must be about the same sites with the same head counts, got two that differ at 'a'",
    ),
    "scores of other sites": (
        lambda: explain(PruningPlan(MASK), scores_of(replace(SITE, name="b"))),
        "scores: must be of sites that the plan is for, got 'b', which it lacks",
    ),
    "an interval of scores without errors": (
        lambda: replace(scores_of(SITE), samples=Samples.of(np.ones((3, 2)))).interval(
            HeadId("a", 0)
        ),
        "HeadScores.interval: must be called on scores with standard errors, got 'taylor' without",
    ),
    "counts": (
        lambda: HeadGeometry(-1, 1, 8, 8),
        (
            "HeadGeometry: must be made of counts >= 0 and widths >= 1, got"
            " HeadGeometry(n_query_heads=-1, n_kv_heads=1, head_dim=8, value_dim=8, key_dim=None,"
            " kv_of=None)"
        ),
    ),
    "widths of keys": (
        lambda: HeadGeometry(1, 1, 8, 8, -1),
        (
            "HeadGeometry: must be made of counts >= 0 and widths >= 1, got"
            " HeadGeometry(n_query_heads=1, n_kv_heads=1, head_dim=8, value_dim=8, key_dim=-1,"
            " kv_of=None)"
        ),
    ),
    "kv_of": (
        lambda: HeadGeometry(3, 2, 8, 8, kv_of=(0, 0, 2)),
        (
            "kv_of: must be a key/value head below 2 for each query head, every one in use, got (0,"
            " 0, 2)"
        ),
    ),
    "one axis": (
        lambda: infer_geometry([(("context",), 17)], 8, 8),
        "the context axis: must be a multiple of the head width 8, got 17",
    ),
    "no axis of heads": (
        lambda: infer_geometry([(("query", "key"), 16)], 8, 8),
        "layout.slabs: must be with one slab of unit 'context' or 'query', got [('query', 'key')]",
    ),
    "too short for its queries": (
        lambda: infer_geometry([(("context",), 32), (("query", "key"), 24)], 8, 8),
        "the query+key axis: must be a multiple of the head width 8, got 24",
    ),
    "half a key": (
        lambda: infer_geometry([(("context",), 32), (("query", "key"), 44)], 8, 8),
        "the query+key axis: must be a multiple of the head width 8, got 44",
    ),
    "two lengths": (
        lambda: infer_geometry(
            [(("context",), 16), (("key", "value"), 32), (("key", "head"), 17)], 8, 8
        ),
        (
            "the key+head axis: must be 18 for HeadGeometry(n_query_heads=2, n_kv_heads=2,"
            " head_dim=8, value_dim=8, key_dim=None, kv_of=None), got 17"
        ),
    ),
    "kind": (
        lambda: replace(SITE, kind="sideways"),  # type: ignore[arg-type]
        "AttentionSite.kind: must be 'self', 'causal' or 'cross', got 'sideways'",
    ),
    "policy": (
        lambda: replace(SITE, policy="any"),  # type: ignore[arg-type]
        "AttentionSite.policy: must be one of group, balanced, free, got 'any'",
    ),
    "width of a key": (
        lambda: replace(SITE, key_dim=-8),
        (
            "HeadGeometry: must be made of counts >= 0 and widths >= 1, got"
            " HeadGeometry(n_query_heads=6, n_kv_heads=2, head_dim=8, value_dim=8, key_dim=-8,"
            " kv_of=None)"
        ),
    ),
    "heads": (
        lambda: replace(SITE, heads=(0, 7)),
        "AttentionSite.heads: must be sorted indices below 6, got (0, 7)",
    ),
    "least": (
        lambda: replace(SITE, least=7),
        "AttentionSite.least: must be a count of heads, 0 to 6, got 7",
    ),
    "bundles": (
        lambda: replace(PAIRS, bundles=((0, 1), (2,))),
        "AttentionSite.bundles: must be a partition of the heads [0, 1, 2, 3], got ((0, 1), (2,))",
    ),
    "a part of a group": (
        lambda: PAIRS.check([0]),
        (
            "keep for a: must be whole groups of 2 query heads that share a key/value head, got 1"
            f" of heads [0, 1]. {HINT}"
        ),
    ),
    "unlike groups": (
        lambda: replace(SITE, policy="balanced").check([0, 1, 3]),
        (
            "keep for a: must be the same number of query heads in every group that is kept, got [2,"
            f" 1] of the groups [[0, 1, 2], [3, 4, 5]]. {HINT}"
        ),
    ),
    "no budget": (
        lambda: Budget(),
        (
            "Budget: must be given by exactly one of keep_heads, keep_params, keep_macs, keep_kv,"
            " speedup, got none"
        ),
    ),
    "no speed-up": (
        lambda: Budget(speedup=1),
        "Budget.speedup: must be a number above 1, got 1. 1.3 is 30 % more calls per second.",
    ),
    "a plan's policy": (
        lambda: PruningPlan(MASK, policy="any"),  # type: ignore[arg-type]
        "PruningPlan.policy: must be one of group, balanced, free, got 'any'",
    ),
    "budget and budgets": (
        lambda: PruningPlan(MASK, Budget(keep_heads=1), budgets=BOTH),
        "PruningPlan: must be given one of budget and budgets, got both",
    ),
    "a mask of a site that is not there": (
        lambda: HeadMask.from_keep({"b": [0]}, {"a": 6}),
        "site 'b': must be a known attention site, got 'b'. Known: a.",
    ),
    "masks of other sites": (
        lambda: MASK | HeadMask.full([replace(SITE, name="b")]),
        "HeadMask: must be over the same sites and head counts ({'a': 6}), got {'b': 6}",
    ),
    "two structures": (
        lambda: PruningPlan(MASK, model=ModelFingerprint("a", "w")).then(
            PruningPlan(MASK, model=ModelFingerprint("b", "w"))
        ),
        "plan: must be for a model of the same structure, got plans for two different structures",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_where_what_and_what_to_try(case: str) -> None:
    attempt, message = REFUSED[case]
    with pytest.raises(HeadPruneError) as caught:
        attempt()
    assert str(caught.value) == message


@pytest.mark.parametrize("speedup", [True, "fast", float("inf"), float("nan"), 0.5, 1.0])
def test_only_a_finite_number_above_1_is_a_speed_up(speedup: object) -> None:
    with pytest.raises(InvalidValue, match="a number above 1"):
        Budget(speedup=speedup)  # type: ignore[arg-type]
    assert Budget(speedup=1.01).amount == 1.01


def test_corners_that_are_allowed() -> None:
    assert replace(SITE, least=6).least == 6
    assert Budget(keep_macs=0.5, length=1).length == 1
    assert PruningPlan(MASK, budgets=BOTH).wanted == "self: keep 1 heads"
    assert str(HeadMask(())) == "HeadMask: 0 of 0 heads kept"
    assert str(Budget(keep_params=0.5)) == "keep 50 % of the parameters"
    assert str(Budget(speedup=1.5)) == "at least 1.5 times as fast"
    check_slab(("query",), "grouped")


def test_a_site_says_its_policy_unless_it_is_the_usual_one() -> None:
    assert str(SITE) == "a: 6 heads in 2 KV groups of width 8 (llama, causal)"
    assert (
        str(replace(SITE, policy="free"))
        == "a: 6 heads in 2 KV groups of width 8 (llama, causal, free)"
    )


@pytest.mark.parametrize(
    ("policies", "wider"),
    [(("group", "balanced"), "balanced"), (("free", "group"), "free"), (("balanced",) * 2,) * 2],
)
def test_two_plans_together_have_the_policy_that_allows_more(policies, wider) -> None:
    """The names' own order, balanced, free, group, would give another one."""
    first, second = (PruningPlan(MASK, policy=policy) for policy in policies)
    wider = wider if isinstance(wider, str) else wider[0]
    assert first.then(second).policy == second.then(first).policy == wider


def test_a_cut_geometry_keeps_the_width_of_its_keys() -> None:
    assert HeadGeometry(4, 2, 8, 8, key_dim=4).keep([0]).key_dim == 4


def test_sharing_that_is_not_in_order_is_asked_for_both_counts() -> None:
    asked = []

    def share(n_query: int, n_kv: int) -> tuple[int, ...]:
        asked.append((n_query, n_kv))
        return tuple(h % n_kv for h in range(n_query))

    found = infer_geometry([(("context",), 32), (("key",), 16)], 8, 8, share=share)
    assert asked == [(4, 2)]
    assert found.kv_of == (0, 1, 0, 1)
    assert kept_rows(found, ("key",), "sequential", [1, 3], [1]) == list(range(8, 16))


def test_without_an_axis_of_keys_every_head_has_its_own() -> None:
    assert infer_geometry([(("context",), 24)], 8, 8) == HeadGeometry(3, 3, 8, 8)


def test_rows_of_one_unit_are_its_own_and_nothing_else() -> None:
    """Grouped queries, unlike widths: [q0 q1 q2 q3 | k0 k1 | v0 v1] of widths 2, 2 and 3, and group
    by group."""
    geometry, units = HeadGeometry(4, 2, 2, 3), ("query", "key", "value")
    assert rows_of(geometry, units, "sequential", "query", [1, 3]) == [2, 3, 6, 7]
    assert rows_of(geometry, units, "sequential", "key", [1]) == [10, 11]
    assert rows_of(geometry, units, "sequential", "value", [0, 1]) == [12, 13, 14, 15, 16, 17]
    assert rows_of(geometry, units, "grouped", "query", [2]) == [9, 10]  # behind q0 q1 k0 v0
    assert rows_of(geometry, units, "grouped", "value", [1]) == [15, 16, 17]
    assert rows_of(geometry, units, "grouped", "value", []) == []


def test_key_heads_go_with_the_last_query_head_that_reads_them() -> None:
    geometry = HeadGeometry(6, 3, 8, 8)
    assert (used_groups(geometry, [0, 4, 5]), freed_groups(geometry, [0, 4, 5])) == ([0, 2], [2])
    with pytest.raises(
        InvalidValue, match=r"heads: must be positions of the 6 present heads, got \[5, 6\]"
    ):
        used_groups(geometry, [5, 6])
    with pytest.raises(InvalidValue, match="heads: "):
        freed_groups(geometry, [6])


def test_an_allowance_is_rounded_down_and_forgives_a_float() -> None:
    assert [allowance(0.29, 100), allowance(0.5, 7), allowance(4, 7), allowance(9, 7)] == [
        29,
        3,
        4,
        9,
    ]
    assert [allowance(0.999, 10), allowance(1.0, 10), allowance(0.1, 10**12)] == [9, 10, 10**11]
    assert allowance(1 / 3, 3 * 10**9) == 10**9
