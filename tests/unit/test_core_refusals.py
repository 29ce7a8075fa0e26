"""What slabs, sites, masks, budgets and plans refuse, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headprune.core.codec import EMPTY
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.heads import AttentionSite, HeadId, HeadMask, SiteKeep
from headprune.core.layout import AttentionLayout, HeadSlab
from headprune.core.plan import Budget, PruningPlan, SiteBudget
from headprune.core.samples import Samples
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.core.slabs import MOST_HEADS, HeadGeometry, check_slab, infer_geometry
from headprune.report.difference import plan_difference
from headprune.report.explanation import explain

SITE = AttentionSite("a", "llama", "causal", 6, 2, 8, 8, (0, 1, 2, 3, 4, 5))
PAIRS = AttentionSite("a", "llama", "causal", 4, 2, 8, 8, (0, 1, 2, 3))
OTHER = replace(SITE, name="b")
MASK = HeadMask.full([SITE])
OUT = HeadSlab("o", "in", "context")
HALF = Budget(keep_heads=0.5)
HINT = "Or find the sites with policy='balanced' or 'free', where the layout allows it."


def layout_of(*slabs: HeadSlab, **more: Any) -> AttentionLayout:
    return AttentionLayout("mine", "o", slabs, 8, **more)


def scores_of(site: AttentionSite) -> HeadScores:
    """Scores without standard errors."""
    return HeadScores((site,), ((1.0, 2.0),), None, "taylor", EMPTY, 3, ModelFingerprint("s", "w"))


#: A call that is refused, and the whole message.
REFUSED: list[tuple[Callable[[], object], str]] = [
    # slabs and layouts
    (
        lambda: HeadGeometry(MOST_HEADS + 1, 1, 8, 8),
        f"n_query_heads: must be at most {MOST_HEADS:,}, got {MOST_HEADS + 1}",
    ),
    (
        lambda: HeadGeometry(-1, 1, 8, 8),
        "HeadGeometry: must be made of counts >= 0 and widths >= 1, got HeadGeometry("
        "n_query_heads=-1, n_kv_heads=1, head_dim=8, value_dim=8, key_dim=None, kv_of=None)",
    ),
    (lambda: HeadGeometry(4, 3, 8, 8), "n_kv_heads: must be a divisor of the 4 query heads, got 3"),
    (
        lambda: HeadGeometry(3, 2, 8, 8, kv_of=(0, 0, 2)),
        "kv_of: must be a key/value head below 2 for each query head, every one in use,"
        " got (0, 0, 2)",
    ),
    (
        lambda: infer_geometry([(("context",), 17)], 8, 8),
        "the context axis: must be a multiple of the head width 8, got 17",
    ),
    (
        lambda: infer_geometry([(("query", "key"), 16)], 8, 8),
        "layout.slabs: must be with one slab of unit 'context' or 'query', got [('query', 'key')]",
    ),
    (
        lambda: infer_geometry([(("context",), 32), (("query", "key"), 24)], 8, 8),
        "the query+key axis: must be a multiple of the head width 8, got 24",
    ),
    (
        lambda: infer_geometry([(("context",), 32), (("query", "key"), 44)], 8, 8),
        "the query+key axis: must be a multiple of the head width 8, got 44",
    ),
    (
        lambda: infer_geometry(
            [(("context",), 16), (("key", "value"), 32), (("key", "head"), 17)], 8, 8
        ),
        f"the key+head axis: must be 18 for {HeadGeometry(2, 2, 8, 8)}, got 17",
    ),
    (
        lambda: HeadSlab("q_proj", "out", "queries"),
        "HeadSlab.unit: must be one of query, gated_query, key, value, context, head, kv_head,"
        " got 'queries'",
    ),
    (
        lambda: check_slab(("query",), "interleaved"),
        "HeadSlab.packing: must be 'sequential' or 'grouped', got 'interleaved'",
    ),
    (
        lambda: HeadSlab("q_proj", True, "query"),
        "HeadSlab('q_proj').axis: must be 'in', 'out', 'list' or a dimension, got True",
    ),
    (
        lambda: layout_of(OUT, policies=()),
        "layout 'mine'.policies: must be some of group, balanced, free, got ()",
    ),
    (
        lambda: layout_of(OUT, policies=("any",)),
        "layout 'mine'.policies: must be some of group, balanced, free, got ('any',)",
    ),
    # heads, sites and masks
    (lambda: HeadId("a", -1), "HeadId.head: must be an index >= 0, got -1"),
    (
        lambda: replace(SITE, kind="sideways"),
        "AttentionSite.kind: must be one of self, causal, cross, feed_forward, got 'sideways'",
    ),
    (
        lambda: replace(SITE, policy="any"),
        "AttentionSite.policy: must be one of group, balanced, free, got 'any'",
    ),
    (
        lambda: replace(SITE, heads=(0, 7)),
        "AttentionSite.heads: must be sorted indices below 6, got (0, 7)",
    ),
    (
        lambda: replace(SITE, least=7),
        "AttentionSite.least: must be a count of heads, 0 to 6, got 7",
    ),
    (
        lambda: replace(PAIRS, bundles=((0, 1), (2,))),
        "AttentionSite.bundles: must be a partition of the heads [0, 1, 2, 3], got ((0, 1), (2,))",
    ),
    (
        lambda: PAIRS.check([0, 4]),
        "head 4 of a: must be one of the present heads [0, 1, 2, 3], got 4",
    ),
    (
        lambda: PAIRS.check([0]),
        "keep for a: must be whole groups of 2 query heads that share a key/value head,"
        f" got 1 of heads [0, 1]. {HINT}",
    ),
    (
        lambda: replace(SITE, policy="balanced").check([0, 1, 3]),
        "keep for a: must be the same number of query heads in every group that is kept,"
        f" got [2, 1] of the groups [[0, 1, 2], [3, 4, 5]]. {HINT}",
    ),
    (
        lambda: HeadMask.from_keep({"encoder.1": [0]}, {"encoder.0": 2}),
        "site 'encoder.1': must be a known attention site, got 'encoder.1'."
        " Did you mean 'encoder.0'?",
    ),
    (
        lambda: HeadMask.from_keep({"b": [0]}, {"a": 6}),
        "site 'b': must be a known attention site, got 'b'. Known: a.",
    ),
    (
        lambda: HeadMask.from_keep({"a": [1, 6]}, {"a": 6}),
        "head 6 of a: must be an index below 6, got 6",
    ),
    (lambda: MASK.kept("b"), "site 'b': must be a site of this mask, got 'b'. Known: a."),
    (
        lambda: MASK | HeadMask.full([OTHER]),
        "HeadMask: must be over the same sites and head counts ({'a': 6}), got {'b': 6}",
    ),
    (
        lambda: HeadMask((SiteKeep("x", 2, (0,)), SiteKeep("x", 2, (1,)))),
        "HeadMask.rows: must be one row per site, got x twice",
    ),
    (
        lambda: HeadMask((SiteKeep("x", 2, (1, 0)),)),
        "HeadMask row x: must be sorted indices without repeats, got (1, 0)",
    ),
    # budgets and plans
    (
        lambda: Budget(),
        "Budget: must be given by exactly one of keep_heads, keep_params, keep_macs, keep_kv,"
        " speedup, got none",
    ),
    (
        lambda: Budget(keep_heads=3, keep_kv=0.5),
        "Budget: must be given by exactly one of keep_heads, keep_params, keep_macs, keep_kv,"
        " speedup, got keep_heads, keep_kv",
    ),
    (
        lambda: Budget(keep_heads=0),
        "Budget.keep_heads: must be a count >= 1 or a fraction above 0 and up to 1.0, got 0",
    ),
    (
        lambda: Budget(keep_params=2),
        "Budget.keep_params: must be a fraction above 0 and up to 1.0, got 2",
    ),
    (
        lambda: Budget(speedup=1),
        "Budget.speedup: must be a number above 1, got 1. 1.3 is 30 % more calls per second.",
    ),
    (
        lambda: Budget(keep_macs=0.5, length=0),
        "Budget.length: must be a count of tokens >= 1, with keep_macs only, got 0",
    ),
    (
        lambda: PruningPlan(MASK, policy="any"),
        "PruningPlan.policy: must be one of group, balanced, free, got 'any'",
    ),
    (
        lambda: PruningPlan(MASK, HALF, budgets=(SiteBudget("self", HALF),)),
        "PruningPlan: must be given one of budget and budgets, got both",
    ),
    (
        lambda: PruningPlan(MASK, model=ModelFingerprint("a", "w")).then(
            PruningPlan(MASK, model=ModelFingerprint("b", "w"))
        ),
        "plan: must be for a model of the same structure, got plans for two different structures",
    ),
    # what compares and explains them
    (
        lambda: plan_difference(PruningPlan(MASK), PruningPlan(HeadMask.full([PAIRS])), ("x", "y")),
        "plans: must be about the same sites with the same head counts, got two that differ at 'a'",
    ),
    (
        lambda: explain(PruningPlan(MASK), scores_of(OTHER)),
        "scores: must be of sites that the plan is for, got 'b', which it lacks",
    ),
    (
        lambda: replace(scores_of(SITE), samples=Samples.of(np.ones((3, 2)))).interval(
            HeadId("a", 0)
        ),
        "HeadScores.interval: must be called on scores with standard errors, got 'taylor' without",
    ),
]


@pytest.mark.parametrize(
    ("attempt", "message"), REFUSED, ids=[m.partition(", got")[0] for _, m in REFUSED]
)
def test_a_refusal_says_where_what_and_what_to_try(
    attempt: Callable[[], object], message: str
) -> None:
    with pytest.raises(HeadPruneError) as caught:
        attempt()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "bad", [(2, 1, 0, 1), (2, 1, 1, 0), (0, 1, 1, 1), (2, 0, 1, 1), (1, 1, 8, 8, -1)]
)
def test_a_geometry_that_cannot_be_is_refused(bad: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValue, match=r"HeadGeometry|n_kv_heads"):
        HeadGeometry(*bad)


@pytest.mark.parametrize("heads", [(1, 0), (0, 0), (0, 6), (-1, 0)])
def test_heads_of_a_site_are_sorted_indices(heads: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValue, match="sorted indices below 6"):
        replace(SITE, heads=heads)


@pytest.mark.parametrize(
    "slabs",
    [
        [HeadSlab("q", "out", "query")],
        [HeadSlab("q", "out", "query"), HeadSlab("o", "out", "context")],
        [HeadSlab("q", "out", "query"), HeadSlab("p", "in", "context")],
    ],
)
def test_a_layout_cuts_the_input_of_its_output_projection(slabs: list[HeadSlab]) -> None:
    assert layout_of(slabs[0], OUT).slabs == (slabs[0], OUT)
    with pytest.raises(InvalidValue, match=r"layout 'mine'.*HeadSlab\('o', 'in', 'context'\)"):
        layout_of(*slabs)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "given",
    [
        *({"keep_heads": amount} for amount in (-3, 1.5, True, "half", NAN)),
        {"keep_params": 0.0},
        *({"speedup": amount} for amount in (True, "2", INF, NAN, 0.5, 1.0)),
        *({"keep_macs": 0.5, "length": length} for length in (12.5, True, "128")),
        {"keep_heads": 3, "length": 128},
        {"speedup": 2, "length": 3},
        {"speedup": 2, "keep_heads": 3},
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=r"^Budget"):
        Budget(**given)
