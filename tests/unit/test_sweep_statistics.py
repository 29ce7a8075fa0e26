"""What a sweep says: drops and their direction, paired bootstrap, fixed-sequence tests, Pareto
curve, pictures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue, UnknownName
from headprune.core.metrics import drop, drop_words
from headprune.core.sweeps import SweepTable, check_size, pareto
from headprune.report.html import render_sweep_html
from headprune.report.tradeoff import draw_tradeoff, render_tradeoff
from headprune.report.write import write_tradeoff
from headprune.sweep.fixed_sequence import CandidateSetting, fixed_sequence
from headprune.sweep.paired import Answers, paired_drops, resampled_drops, upper_bounds
from tests.report_records import sweep_table


def answers(amounts: object, metric: str = "accuracy", counts: object = None) -> Answers:
    amounts = np.asarray(amounts, dtype=float)
    return Answers(
        metric,
        amounts,
        np.ones(len(amounts)) if counts is None else np.asarray(counts, dtype=float),
    )


# --- drops
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "base", "worse", "expected"),
    [
        ("accuracy", 0.9, 0.87, 0.03),
        ("spearman", 0.8, 0.7, 0.1),
        ("perplexity", 4.0, 5.0, 0.25),
        ("mse", 0.2, 0.3, 0.5),
        ("loss", 0.0, 0.3, 0.3),
    ],
)
def test_worse_is_a_drop_above_zero_whichever_way_the_metric_goes(
    metric: str, base: float, worse: float, expected: float
) -> None:
    assert drop(metric, base, worse) == pytest.approx(expected)
    assert drop(metric, worse, base) <= 0
    assert drop(metric, base, base) == pytest.approx(0, nan_ok=False)


def test_a_metric_without_a_direction_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"metric: must be one of accuracy"):
        drop("wobble", 1, 2)
    assert drop_words("mse", 0.125) == "12.50 %"


# --- the paired bootstrap
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["accuracy", "perplexity", "mse", "loss"])
def test_resamples_are_those_of_a_loop_over_examples(metric: str) -> None:
    rng = np.random.default_rng(0)
    counts = (
        rng.integers(1, 5, 30).astype(float)
        if metric in ("accuracy", "perplexity")
        else np.ones(30)
    )
    base = answers(rng.random(30) * counts, metric, counts)
    others = [answers(rng.random(30) * counts, metric, counts) for _ in range(2)]
    found = resampled_drops(base, others, 50, seed=3)
    draws = np.random.default_rng(3)
    for row in range(50):
        chosen = draws.integers(30, size=30)

        def value(model: Answers, chosen: np.ndarray = chosen) -> float:
            amount = sum(float(model.amounts[i]) for i in chosen)
            mean = amount / sum(float(model.counts[i]) for i in chosen)
            return math.exp(mean) if metric == "perplexity" else mean

        for column, other in enumerate(others):
            assert found[row, column] == pytest.approx(
                drop(metric, value(base), value(other)), abs=1e-12
            )


def test_intervals_are_paired() -> None:
    rng = np.random.default_rng(0)
    right = (rng.random(400) < 0.7).astype(float)
    worse = right.copy()
    worse[:8] = 0
    (same,) = paired_drops(answers(right), [answers(right)])
    assert (same.value, same.low, same.high) == (
        0,
        0,
        0,
    )  # two samples of their own would differ by points
    (some,) = paired_drops(answers(right), [answers(worse)])
    assert some.value == pytest.approx((right[:8] == 1).sum() / 400)
    assert some.low >= 0
    assert 0 < some.high < 0.04


def test_resamples_do_not_depend_on_the_other_models_or_on_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    base, *others = (answers(rng.random(50) < 0.7) for _ in range(4))
    whole = resampled_drops(base, others, 100, 0)
    np.testing.assert_allclose(
        resampled_drops(base, others[1:2], 100, 0)[:, 0], whole[:, 1], rtol=0, atol=1e-15
    )
    monkeypatch.setattr("headprune.sweep.paired._STEP", 350)
    np.testing.assert_allclose(resampled_drops(base, others, 100, 0), whole, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("lost", "won"), [(0.01, 0.0), (0.002, 0.0), (0.06, 0.04), (0.2, 0.1)])
def test_the_upper_bound_covers_as_often_as_it_says(lost: float, won: float) -> None:
    rng, n, covered, plain = np.random.default_rng(1), 300, 0, 0
    for _ in range(200):
        u = rng.random(n)
        base, other = np.full(n, 0.5), np.full(n, 0.5)
        base[u < lost], other[u < lost] = 1, 0
        base[u > 1 - won], other[u > 1 - won] = 0, 1
        (bound,) = upper_bounds(answers(base), [answers(other)], 0.95, draws=400)
        covered += bound >= lost - won - 1e-12
        found = resampled_drops(answers(base), [answers(other)], 400, 0)
        plain += np.quantile(found, 0.95) >= lost - won - 1e-12
    assert covered / 200 >= 0.92
    if lost == 0.002:
        assert (
            plain / 200 < 0.7
        )  # what the added example is for: most samples show no difference at all


@pytest.mark.parametrize(("n", "least", "plain_at_most"), [(150, 0.84, 0.82), (500, 0.92, 0.89)])
def test_the_upper_bound_of_a_loss_that_few_examples_bring(
    n: int, least: float, plain_at_most: float
) -> None:
    """Three examples in a hundred lose 3 on average, the others nothing."""
    rng, covered, plain, tries = np.random.default_rng(4), 0, 0, 300
    for _ in range(tries):
        base = answers(2 + 0.5 * rng.standard_normal(n), "loss")
        other = answers(base.amounts + 3 * rng.exponential(size=n) * (rng.random(n) < 0.03), "loss")
        covered += upper_bounds(base, [other], 0.95, draws=200)[0] >= 0.09
        plain += float(np.quantile(resampled_drops(base, [other], 200, 0), 0.95)) >= 0.09
    assert covered / tries >= least
    assert plain / tries <= plain_at_most  # what the repeated example is for


def test_the_bound_of_a_loss_repeats_the_worst_example_of_each_model() -> None:
    base = answers([1.0, 2, 3, 4], "mse")
    others = [answers([1.0, 2, 3, 9], "mse"), answers([4.0, 2, 3, 4], "mse")]
    found = upper_bounds(base, others, 0.9, draws=200)
    for other, worst, bound in zip(others, (3, 0), found, strict=True):
        again = [answers(np.append(a.amounts, a.amounts[worst]), "mse") for a in (base, other)]
        drops = resampled_drops(again[0], again[1:], 200, 0)
        assert bound == pytest.approx(np.quantile(drops, 0.9, method="inverted_cdf"))


def test_without_models_there_is_nothing_to_say() -> None:
    base = Answers("accuracy", np.ones(3), np.ones(3))
    assert paired_drops(base, []) == upper_bounds(base, [], 0.95) == ()


def test_a_loss_of_nothing_has_no_ratio() -> None:
    assert math.isnan(drop("perplexity", 0.0, 1.0))
    assert drop("loss", 0.0, 1.0) == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": {"kv": None}}, r"base: must be complete \(with kv\), got one without"),
        ({"base": {"test_rows": None}}, r"base\.test_rows: must be a number, got None"),
        ({"row": {"keep": None}}, r"rows\[0\]: must be complete \(with keep\), got a row without"),
        ({"failed": {"error": None}}, r"failed\[0\]: must be complete \(with error\)"),
    ],
)
def test_a_table_that_no_sweep_has_left(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    def changed(row: FrozenDict, changes: dict[str, None]) -> FrozenDict:
        return FrozenDict({key: value for key, value in row.items() if key not in changes})

    table = sweep_table()
    rows = (changed(table.rows[0], changes.get("row", {})), *table.rows[1:])
    failed = (changed(table.failed[0], changes.get("failed", {})),)
    wrong = replace(
        table, base=changed(table.base, changes.get("base", {})), rows=rows, failed=failed
    )
    with pytest.raises(InvalidValue, match=words):
        SweepTable.load(wrong.save(tmp_path / "table.json"))


def test_models_that_cannot_be_paired_are_refused() -> None:
    base = answers([1, 0, 1])
    for other in (answers([1, 0]), answers([1, 0, 1], "mse"), answers([1, 0, 1], counts=[1, 2, 1])):
        with pytest.raises(InvalidValue, match="the same examples"):
            paired_drops(base, [other])
    with pytest.raises(InvalidValue, match="two or more examples"):
        paired_drops(answers([1]), [answers([1])])


# --- picking
# -----------------------------------------------------------------------------------------------------


def losing(points: float, n: int = 1000) -> Answers:
    """A model that is wrong on ``points`` per cent of rows on which the base is right."""
    right = np.ones(n)
    right[: round(points * n / 100)] = 0
    return answers(right)


BASE = losing(0)


def test_a_chain_ends_at_its_first_failure() -> None:
    chain = [
        CandidateSetting("a", size, (losing(p),))
        for size, p in ((8, 3.0), (32, 0.1), (16, 5.0), (24, 0.2))
    ]
    found = fixed_sequence(BASE, chain, 0.02)
    assert [v.passed for v in found] == [False, True, False, True]
    assert [v.tested for v in found] == [
        False,
        True,
        True,
        True,
    ]  # 8 is not looked at: 16 failed
    lucky = [CandidateSetting("a", size, (losing(p),)) for size, p in ((16, 5.0), (8, 0.0))]
    assert [v.tested for v in fixed_sequence(BASE, lucky, 0.02)] == [True, False]


def test_every_draw_has_to_pass() -> None:
    two = [CandidateSetting("a", 8, (losing(0.1), losing(4.0)))]
    (found,) = fixed_sequence(BASE, two, 0.02)
    assert not found.passed
    assert found.bound == pytest.approx(upper_bounds(BASE, [losing(4.0)], 0.95)[0])


def test_methods_share_the_error() -> None:
    (alone,) = fixed_sequence(BASE, [CandidateSetting("a", 8, (losing(1.0),))], 0.02)
    many = fixed_sequence(
        BASE, [CandidateSetting(f"{i}", 8, (losing(1.0),)) for i in range(10)], 0.02
    )
    assert alone.bound is not None
    assert many[0].bound is not None
    assert many[0].bound > alone.bound
    assert many[0].bound == pytest.approx(upper_bounds(BASE, [losing(1.0)], 0.995)[0])


def test_bad_levels() -> None:
    one = [CandidateSetting("a", 8, (losing(1.0),))]
    with pytest.raises(InvalidValue, match="between 0 and 1"):
        fixed_sequence(BASE, one, 0.02, confidence=95)
    with pytest.raises(InvalidValue, match="draws: must be at least 200"):
        fixed_sequence(BASE, one, 0.02, draws=100)
    assert fixed_sequence(BASE, [], 0.02) == ()


def test_no_more_wrong_picks_than_the_confidence_allows() -> None:
    """Two chains of four models, all truly worse than allowed by a hair: any pick is an error."""
    rng, n, wrong = np.random.default_rng(0), 200, 0
    for _ in range(200):
        draws = [answers(rng.random(n) >= 0.052) for _ in range(8)]
        chains = [CandidateSetting("ab"[i % 2], 8 - i // 2, (d,)) for i, d in enumerate(draws)]
        wrong += any(v.passed for v in fixed_sequence(losing(0, n), chains, 0.05, draws=500))
    assert wrong / 200 <= 0.08


# --- tables
# ------------------------------------------------------------------------------------------------------


def test_the_pareto_curve_on_points() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes, drops = rng.integers(1, 6, 12).tolist(), rng.integers(0, 6, 12).tolist()
        beaten = {
            i
            for i in range(12)
            for j in range(12)
            if sizes[j] <= sizes[i]
            and drops[j] <= drops[i]
            and ((sizes[j], drops[j]) != (sizes[i], drops[i]) or j < i)
        }
        assert sorted(pareto(sizes, drops)) == sorted(set(range(12)) - beaten)


def test_settings_are_pooled_and_ranked_by_validation_rows() -> None:
    found = sweep_table()
    first = found.settings()[0]
    assert (first.method, first.budget, len(first.rows)) == ("scorer taylor", "keep 0.5", 2)
    assert first.validation.mean == pytest.approx(0.02)
    assert first.validation.sd == pytest.approx(math.sqrt(2) / 100)
    assert first.best["seed"] == 0
    assert [s.method for s in found.best()] == ["scorer taylor", "scorer random"]
    assert [(s.method, s.size("heads")) for s in found.front()] == [("scorer random", 8.0)]
    assert SweepTable.from_json(found.to_json()) == found
    assert "failed: scorer fisher, keep 0.5, seed 0: no | labels" in str(found)


def test_sizes_that_are_none() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'heads'"):
        sweep_table().front("head")
    with pytest.raises(InvalidValue, match="without a KV cache"):
        check_size(sweep_table().base, "kv", "here")


@pytest.mark.parametrize("metric", ["accuracy", "perplexity", "loss"])
def test_the_picture_is_drawn_and_the_same_each_time(metric: str, tmp_path: Path) -> None:
    one, two = (
        draw_tradeoff(sweep_table(metric), tmp_path / name).read_bytes()
        for name in ("a.svg", "b.svg")
    )
    assert one == two
    assert len(one) > 10_000


def test_the_page_says_what_the_summary_says_and_escapes_it() -> None:
    page = render_sweep_html(
        replace(sweep_table(), failed=(FrozenDict({"keep": 1, "error": "<script>x"}),))
    )
    assert "demo: 8 runs of 4 settings" in page
    assert "Trade-off on validation rows" in page
    assert '<td role="cell" data-label="validation drop">2.00 ± 1.41 points</td>' in page
    assert 'href="plans/abcdefgh.json"' in page
    assert "keep 1: &lt;script&gt;x" in page


def test_the_summary(tmp_path: Path) -> None:
    assert [p.name for p in write_tradeoff(sweep_table(), tmp_path)] == [
        *("tradeoff.svg", "tradeoff.png", "report.html", "summary.md")
    ]
    page = (tmp_path / "report.html").read_text()
    assert "in the folder of this page" in page
    assert "headprune pick . --max-drop 0.01" in page
    assert str(tmp_path) not in page  # the same sweep elsewhere has the same page
    write_tradeoff(sweep_table(), tmp_path / "pages", sweep="my sweeps/a")
    assert (
        "headprune pick &#39;my sweeps/a&#39; --max-drop"
        in (tmp_path / "pages" / "report.html").read_text()
    )
    text = render_tradeoff(sweep_table())
    assert "accuracy 0.9000 on 300 validation rows, 0.9100 on 420 test rows" in text
    assert (
        "| keep 0.5 | scorer taylor | 16 | 16,000 | 160 | 2.00 ± 1.41 points | 3.00 ± 1.41 points |"
        in text
    )
    assert "scorer fisher, keep 0.5, seed 0: no \\| labels" in text
    empty = SweepTable(
        "demo", "accuracy", ("keep",), ("keep",), sweep_table().base, (), sweep_table().failed
    )
    assert [p.name for p in write_tradeoff(empty, tmp_path)] == ["report.html", "summary.md"]
