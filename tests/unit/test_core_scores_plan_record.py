"""HeadScores, costs, Budget, PruningPlan and RunRecord: what they refuse, how they combine, what
they say."""

import math
import re
from dataclasses import replace

import pytest

from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.errors import InvalidValue, PlanMismatch, UnknownName
from headprune.core.heads import AttentionSite, HeadId, HeadMask
from headprune.core.plan import Budget, PruningPlan, SiteBudget, allowance, read_keep
from headprune.core.record import Proof, QualityRow, RunRecord, SpeedRow
from headprune.core.scores import Cost, CostTable, HeadScores, ModelFingerprint
from headprune.report.difference import record_difference
from headprune.report.explanation import explain

PLAIN = AttentionSite("plain", "bert", "self", 3, 3, 8, 8, (0, 1, 2))
GROUPS = AttentionSite("groups", "llama", "causal", 6, 3, 8, 8, (0, 1, 4, 5))
UNIT = Cost(1, 2, 3, 4, 5)
SCORES = HeadScores(
    (PLAIN, GROUPS),
    ((0.3, 0.1, 0.3), (0.1, 0.3)),
    ((0.01, 0.02, 0.03), (0.04, 0.05)),
    "taylor",
    EMPTY,
    8,
    ModelFingerprint("s", "w"),
    costs=CostTable(Cost(9, 9, 9, 9, 9), ((UNIT,) * 3, (UNIT, replace(UNIT, params=7))), 16),
)


# --- HeadScores


def test_units_come_in_model_order_with_everything_that_is_known():
    units = list(SCORES.units())
    assert [(u.site, u.unit, u.name, u.heads) for u in units] == [
        (0, 0, "plain", (0,)),
        (0, 1, "plain", (1,)),
        (0, 2, "plain", (2,)),
        (1, 0, "groups", (0, 1)),
        (1, 1, "groups", (4, 5)),
    ]
    assert [u.value for u in units] == [0.3, 0.1, 0.3, 0.1, 0.3]
    assert [u.standard_error for u in units] == [0.01, 0.02, 0.03, 0.04, 0.05]
    assert [u.cost.params for u in units] == [1, 1, 1, 1, 7]
    bare = replace(SCORES, standard_errors=None, costs=None)
    assert {(u.standard_error, u.cost) for u in bare.units()} == {(None, None)}
    assert SCORES.n_heads == 7
    assert "7 heads in 5 groups" in SCORES.title


def test_a_table_has_a_row_for_every_head():
    table = SCORES.to_frame()
    assert list(zip(table.site, table["head"], table.kv_head, table.unit, strict=True)) == [
        *[("plain", h, h, h) for h in range(3)],
        *[("groups", 0, 0, 0), ("groups", 1, 0, 0), ("groups", 4, 2, 1), ("groups", 5, 2, 1)],
    ]
    assert table.score.tolist() == [0.3, 0.1, 0.3, 0.1, 0.1, 0.3, 0.3]
    assert table.standard_error.tolist() == [0.01, 0.02, 0.03, 0.04, 0.04, 0.05, 0.05]
    assert [table["rank"][table["head"].tolist().index(4)], table["rank"][3]] == [3, 5]
    assert table.params.tolist() == [1, 1, 1, 1, 1, 7, 7]
    assert table.macs.tolist() == [UNIT.macs(16)] * 7
    bare = replace(SCORES, standard_errors=None, costs=None).to_frame()
    assert bare.standard_error.isna().all()
    assert bare.params.isna().all()


def test_ranked_breaks_ties_by_the_later_site_and_head():
    assert [(u.site, u.unit) for u in SCORES.ranked()] == [(1, 0), (0, 1), (1, 1), (0, 2), (0, 0)]


def test_a_head_has_the_score_of_its_unit():
    for site, head, value in (
        *(("plain", 1, 0.1), ("groups", 0, 0.1)),
        *(("groups", 1, 0.1), ("groups", 5, 0.3)),
    ):
        assert SCORES[HeadId(site, head)] == value
    assert SCORES.standard_error(HeadId("groups", 4)) == 0.05
    assert replace(SCORES, standard_errors=None).standard_error(HeadId("plain", 0)) is None
    with pytest.raises(UnknownName, match=r"one of the scored heads, got groups\[2\]"):
        SCORES[HeadId("groups", 2)]
    with pytest.raises(UnknownName, match=r"got plane\[0\]\. Did you mean 'plain'"):
        SCORES.standard_error(HeadId("plane", 0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_are_finite(value):
    with pytest.raises(
        InvalidValue, match=r"score of groups\[4, 5\]: must be finite, got .*NaN or infinite"
    ):
        replace(SCORES, values=((0, 1, 2), (0, value)))


@pytest.mark.parametrize(
    ("changes", "where", "got"),
    [
        ({"values": ((1, 2, 3),)}, "values", "3"),
        ({"values": ((1, 2, 3), (1, 2, 3, 4))}, "values", "3, 4"),
        ({"standard_errors": ((1, 2), (1, 2))}, "standard_errors", "2, 2"),
        ({"costs": CostTable(UNIT, ((UNIT,) * 3, (UNIT,) * 4), 1)}, "costs.units", "3, 4"),
    ],
)
def test_one_number_a_unit(changes, where, got):
    message = f"HeadScores.{where}: must be one entry per unit, [3, 2], got [{got}]"
    with pytest.raises(InvalidValue, match=re.escape(message)):
        replace(SCORES, **changes)


def test_macs_are_a_polynomial_of_the_length():
    cost = Cost(params=1, macs_fixed=1000, macs_per_token=100, macs_per_pair=1, kv_bytes=0)
    assert [cost.macs(n) for n in (0, 1, 10)] == [1000, 1101, 2100]


# --- Budget


def test_a_whole_number_is_a_count_of_heads_and_a_fraction_elsewhere():
    assert (Budget(keep_heads=1).amount, Budget(keep_heads=1.0).amount) == (1, 1.0)
    assert isinstance(Budget(keep_heads=1).amount, int)
    assert isinstance(Budget(keep_heads=1.0).amount, float)
    assert isinstance(Budget(keep_params=1).amount, float)
    for kind in ("keep_heads", "keep_kv"):
        assert Budget(**{kind: 0.5}).kind == kind
    assert Budget(keep_macs=0.5, length=1).length == 1
    assert Budget(speedup=1.01).amount == 1.01
    assert Budget(speedup=2) == Budget(speedup=2.0)


def test_a_budget_in_words():
    assert str(Budget(keep_heads=12)) == "keep 12 heads"
    assert str(Budget(keep_heads=0.29)) == "keep 29 % of the heads"
    assert str(Budget(keep_macs=0.6, length=128)) == "keep 60 % of the MACs at 128 tokens"
    assert str(Budget(keep_kv=0.125)) == "keep 12.5 % of the KV cache"
    assert str(Budget(keep_params=0.5)) == "keep 50 % of the parameters"
    assert str(Budget(speedup=1.5)) == "at least 1.5 times as fast"
    assert str(Budget(speedup=2)) == "at least 2 times as fast"
    assert str(Budget(keep_heads=12, tensor_parallel=2)) == "keep 12 heads, for 2 GPUs"
    assert str(Budget(speedup=2, tensor_parallel=2)) == "at least 2 times as fast, for 2 GPUs"


@pytest.mark.parametrize(("text", "amount"), [("1", 1), ("36", 36), ("0.5", 0.5), ("0.01", 0.01)])
def test_a_count_or_a_fraction_is_read(text, amount):
    assert read_keep(text, "--keep") == amount
    assert isinstance(read_keep(text, "--keep"), type(amount))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0", "For example 0.5, or 36."),
        ("-1", "For example 0.5, or 36."),
        ("half", "For example 0.5, or 36."),
        ("1.0", "All heads would be kept. For one head write 1."),
        ("1%", "For 1 % of the heads, write 0.01."),
        ("50%", "For 50 % of the heads, write 0.5."),
        ("50 %", "For 50 % of the heads, write 0.5."),
        ("2.5", "For 2.5 % of the heads, write 0.025."),
        ("0.5%", "For example 0.5, or 36."),
    ],
)
def test_what_is_no_amount_is_refused_with_what_to_write(text, hint):
    with pytest.raises(InvalidValue) as caught:
        read_keep(text, "--keep")
    assert str(caught.value) == (
        "--keep: must be a count of heads, or a fraction of them above 0 and below 1.0, got"
        f" {text!r}. {hint}"
    )


def test_everything_may_be_kept_where_heads_are_named_elsewhere():
    assert read_keep("1.0", "--keep", whole=True) == 1.0
    with pytest.raises(InvalidValue):
        read_keep("1.5", "--keep", whole=True)
    with pytest.raises(InvalidValue):
        read_keep("0.0", "--keep", whole=True)


def test_an_allowance_is_rounded_down_and_forgives_a_float():
    assert [allowance(amount, 7) for amount in (0.5, 4, 9)] == [3, 4, 9]
    assert [allowance(0.999, 10), allowance(1.0, 10), allowance(0.1, 10**12)] == [9, 10, 10**11]
    assert allowance(0.29, 100) == 29
    assert allowance(1 / 3, 3 * 10**9) == 10**9


def test_a_ratio_that_a_plan_has_can_be_asked_for_again():
    """The share of a kept set, computed in floating point at the size of a large model, must not
    lose one head."""
    for kept in range(1, 97):
        whole, unit = 13_000_000_000_037, 13_000_000_000_037 // 96
        assert allowance(kept * unit / whole, whole) // unit == kept
        assert allowance(kept / 96, 96) == kept


# --- PruningPlan

COUNTS = {"a": 4, "b": 2}
FIRST = PruningPlan(
    HeadMask.from_keep({"a": [0, 1, 3]}, COUNTS),
    scores="1",
    model=ModelFingerprint("s", "full"),
    notes=("first",),
)
SECOND = PruningPlan(
    HeadMask.from_keep({"a": [1, 3], "b": [1]}, COUNTS),
    Budget(keep_heads=3),
    "uniform",
    FrozenDict({"min_heads": 1}),
    "taylor",
    "2",
    ModelFingerprint("s", "cut"),
    ("second",),
)


def test_then_keeps_what_both_keep_and_says_what_the_later_one_says():
    both = FIRST.then(SECOND)
    assert both.mask == HeadMask.from_keep({"a": [1, 3], "b": [1]}, COUNTS)
    for name in ("budget", "selector", "settings", "scorer", "scores"):
        assert getattr(both, name) == getattr(SECOND, name)
    assert both.notes == ("first", "second")
    assert SECOND.then(FIRST).mask == both.mask
    assert PruningPlan.from_json(both.to_json()) == both


def test_then_is_a_plan_for_the_model_that_the_first_one_is_for():
    assert FIRST.then(SECOND).model == ModelFingerprint("s", "full")
    by_hand = PruningPlan(SECOND.mask)
    assert FIRST.then(by_hand).model == FIRST.model
    assert by_hand.then(FIRST).model == FIRST.model
    assert by_hand.then(by_hand).model is None


def test_then_refuses_plans_for_different_models():
    """Of another structure too: ``test_core_refusals.py``."""
    with pytest.raises(PlanMismatch, match="the same sites and head counts"):
        PruningPlan(FIRST.mask).then(PruningPlan(HeadMask.from_keep({}, {"a": 4})))


@pytest.mark.parametrize(
    ("first", "second", "wider"),
    [
        ("group", "balanced", "balanced"),
        ("free", "group", "free"),
        ("balanced", "balanced", "balanced"),
    ],
)
def test_two_plans_together_have_the_policy_that_allows_more(first, second, wider):
    """The names' own order, balanced, free, group, would give another one."""
    one, two = (PruningPlan(FIRST.mask, policy=policy) for policy in (first, second))
    assert one.then(two).policy == two.then(one).policy == wider


def test_a_plan_says_its_budgets():
    budgets = (SiteBudget("self", Budget(keep_heads=1)),)
    assert PruningPlan(FIRST.mask, budgets=budgets).wanted == "self: keep 1 heads"


# --- RunRecord

DONE = RunRecord("demo", "done", "save", "2024-01-01")


def test_a_record_tells_its_story():
    record = RunRecord(
        "demo",
        "failed",
        "bench",
        "2024-01-01",
        quality=(
            QualityRow("base", 144, "accuracy", 0.925, "test", 100, 0.2),
            QualityRow("random", 72, "accuracy", 0.5, "test", 100, 0.7, draws=5, spread=0.0125),
        ),
        speed=(SpeedRow(8, 128, 2.0, 2.1, 1.0, 1.1, 2.0, 1.85, 2.2, 30),),
        proofs=(Proof("logits", 1.5e-7, 3.0, 1e-5, "float32", 4),),
        error="OSError: disk full",
    )
    assert str(record).splitlines() == [
        "RunRecord demo: failed at bench, 2024-01-01",
        "  base                          144 heads  test accuracy 0.9250",
        "  random                         72 heads  test accuracy 0.5000 ± 0.0125 (5 draws)",
        "  batch    8 x  128 tokens: 2.00x [1.85, 2.20]",
        "  logits: |gated - pruned| <= 1.50e-07 (allowed 1.00e-05)",
        "  error: OSError: disk full",
    ]


def test_a_record_without_figures_is_its_title():
    plain = RunRecord("demo", "running", "data", "2024-01-01")
    assert [str(part) for part in plain.__rich__().renderables] == [plain.title] == [str(plain)]


def test_records_are_set_side_by_side_with_plans_for_the_same_sites_alone():
    masks = [HeadMask.from_keep({}, {name: 4}) for name in ("a", "b")]
    first, other = (replace(DONE, plan=PruningPlan(mask)) for mask in masks)
    assert record_difference(first, first, ("x", "y")).plans is not None
    for second in (other, DONE):
        beside = record_difference(first, second, ("x", "y"))
        assert beside.plans is None
        assert str(beside).splitlines() == ["x -> y", "figures", "  status: done -> done"]


def test_figures_of_any_kind_are_set_side_by_side():
    odd = FrozenDict({"a": math.nan, "b": math.inf, "c": "soon", "d": (1, 2), "e": 20.0})
    first, second = (replace(DONE, timings=timings) for timings in (odd, FrozenDict({"a": 1.5})))
    assert str(record_difference(first, second, ("x", "y"))).splitlines()[3:] == [
        "  seconds of a: nan -> 1.5 (+nan)",
        "  seconds of b: inf -> none",
        "  seconds of c: soon -> none",
        "  seconds of d: (1, 2) -> none",
        "  seconds of e: 20 -> none",
    ]


def test_a_share_of_importance_is_told_where_no_score_is_below_zero():
    site = AttentionSite("a", "bert", "self", 3, 3, 4, 4, (0, 1, 2))
    plan = PruningPlan(HeadMask.from_keep({"a": [1, 2]}, {"a": 3}))
    scores = replace(
        SCORES, sites=(site,), values=((1.0, 2.0, 5.0),), standard_errors=None, costs=None
    )
    assert any(
        line.startswith("12.5 % of all importance is removed")
        for line in explain(plan, scores).expected()
    )
    negative = replace(scores, values=((-1.0, 2.0, 5.0),))
    assert "importance" not in " ".join(explain(plan, negative).expected())
