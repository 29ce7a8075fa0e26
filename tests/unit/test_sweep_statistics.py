"""What a sweep says: drops and their direction, paired bootstrap, fixed-sequence tests, Pareto
curve, pictures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue, UnknownName
from headprune.core.metrics import drop, drop_words
from headprune.core.paired import (
    Answers,
    Drop,
    drop_of_means,
    paired_drops,
    resampled_drops,
    upper_bounds,
)
from headprune.core.record import SpeedRow
from headprune.core.sweeps import SweepTable, check_size, pareto
from headprune.report.html import render_sweep_html
from headprune.report.inputs import SweepInputs
from headprune.report.tradeoff import draw_tradeoff, render_tradeoff, sweep_view
from headprune.report.write import write_tradeoff
from headprune.sweep.fixed_sequence import CandidateSetting, fixed_sequence
from headprune.sweep.pick import Pick, SettingVerdict
from tests.report_records import sweep_table


def answers(amounts: Any, metric: str = "accuracy", counts: Any = None) -> Answers:
    found = np.asarray(amounts, dtype=float)
    number = np.ones(len(found)) if counts is None else np.asarray(counts, dtype=float)
    return Answers(metric, found, number)


def test_worse_is_a_drop_above_zero_whichever_way_the_metric_goes():
    for metric, base, worse, expected in (
        ("accuracy", 0.9, 0.87, 0.03),
        ("spearman", 0.8, 0.7, 0.1),
        ("perplexity", 4.0, 5.0, 0.25),
        ("mse", 0.2, 0.3, 0.5),
        ("loss", 0.0, 0.3, 0.3),
    ):
        assert drop(metric, base, worse) == pytest.approx(expected)
        assert drop(metric, worse, base) <= 0
        assert drop(metric, base, base) == 0


def test_drops_that_are_not_defined():
    with pytest.raises(InvalidValue, match=r"metric: must be one of accuracy"):
        drop("wobble", 1, 2)
    assert math.isnan(drop("perplexity", 0.0, 1.0)), "a loss of nothing has no ratio"
    assert [drop_words(m, 0.125) for m in ("mse", "loss")] == ["12.50 %", "0.1250"]


@pytest.mark.parametrize("metric", ["accuracy", "perplexity", "mse"])
def test_resamples_are_those_of_a_loop_over_examples(metric):
    rng = np.random.default_rng(0)
    counts = np.ones(30) if metric == "mse" else rng.integers(1, 5, 30).astype(float)
    base, *others = (answers(rng.random(30) * counts, metric, counts) for _ in range(3))
    found = resampled_drops(base, others, 50, seed=3)
    draws = np.random.default_rng(3)

    def value(model: Answers, chosen: np.ndarray) -> float:
        amount = sum(float(model.amounts[i]) for i in chosen)
        mean = amount / sum(float(model.counts[i]) for i in chosen)
        return math.exp(mean) if metric == "perplexity" else mean

    for row in range(50):
        chosen = draws.integers(30, size=30)
        wanted = [drop(metric, value(base, chosen), value(other, chosen)) for other in others]
        np.testing.assert_allclose(found[row], wanted, atol=1e-12)


def test_intervals_are_paired():
    right = (np.random.default_rng(0).random(400) < 0.7).astype(float)
    worse = right.copy()
    worse[:8] = 0
    same, some = paired_drops(answers(right), [answers(right), answers(worse)])
    assert (same.value, same.low, same.high) == (0, 0, 0)
    assert some.value == pytest.approx((right[:8] == 1).sum() / 400)
    assert some.low >= 0
    assert 0 < some.high < 0.04


def test_resamples_do_not_depend_on_the_other_models_or_on_memory(monkeypatch):
    rng = np.random.default_rng(0)
    base, *others = (answers(rng.random(50) < 0.7) for _ in range(4))
    whole = resampled_drops(base, others, 100, 0)
    alone = resampled_drops(base, others[1:2], 100, 0)
    np.testing.assert_allclose(alone[:, 0], whole[:, 1], rtol=0, atol=1e-15)
    monkeypatch.setattr("headprune.core.paired._STEP", 350)
    np.testing.assert_allclose(resampled_drops(base, others, 100, 0), whole, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("lost", "won"), [(0.002, 0.0), (0.2, 0.1)])
def test_the_upper_bound_covers_as_often_as_it_says(lost, won):
    rng, n, covered, plain = np.random.default_rng(1), 300, 0, 0
    for _ in range(200):
        u = rng.random(n)
        base, other = np.full(n, 0.5), np.full(n, 0.5)
        base[u < lost], other[u < lost] = 1, 0
        base[u > 1 - won], other[u > 1 - won] = 0, 1
        (bound,) = upper_bounds(answers(base), [answers(other)], 0.95, draws=300)
        covered += bound >= lost - won - 1e-12
        plain += np.any(base > other)
    assert covered / 200 >= 0.92
    if lost == 0.002:
        # This is what the added example is for: most samples show no difference at all.
        assert plain / 200 < 0.7


def test_the_bound_of_a_loss_repeats_the_worst_example_of_each_model():
    base = answers([1.0, 2, 3, 4], "mse")
    others = [answers([1.0, 2, 3, 9], "mse"), answers([4.0, 2, 3, 4], "mse")]
    found = upper_bounds(base, others, 0.9, draws=200)
    for other, worst, bound in zip(others, (3, 0), found, strict=True):
        again = [answers(np.append(a.amounts, a.amounts[worst]), "mse") for a in (base, other)]
        drops = resampled_drops(again[0], again[1:], 200, 0)
        assert bound == pytest.approx(np.quantile(drops, 0.9, method="inverted_cdf"))


def test_models_that_cannot_be_paired_are_refused():
    base = answers([1, 0, 1])
    for other in (answers([1, 0]), answers([1, 0, 1], "mse"), answers([1, 0, 1], counts=[1, 2, 1])):
        with pytest.raises(InvalidValue, match="the same examples"):
            paired_drops(base, [other])
    with pytest.raises(InvalidValue, match="two or more examples"):
        paired_drops(answers([1]), [answers([1])])
    assert paired_drops(base, []) == upper_bounds(base, [], 0.95) == ()


def losing(points: float, n: int = 1000) -> Answers:
    right = np.ones(n)
    right[: round(points * n / 100)] = 0
    return answers(right)


def candidate(size: float, *points: float, method: str = "a") -> CandidateSetting:
    return CandidateSetting(method, size, tuple(losing(p) for p in points))


BASE = losing(0)


def test_a_chain_ends_at_its_first_failure():
    chain = [candidate(8, 3.0), candidate(32, 0.1), candidate(16, 5.0), candidate(24, 0.2)]
    found = fixed_sequence(BASE, chain, 0.02)
    assert [v.passed for v in found] == [False, True, False, True]
    assert [v.tested for v in found] == [False, True, True, True], "8 is smaller than 16"
    lucky = fixed_sequence(BASE, [candidate(16, 5.0), candidate(8, 0.0)], 0.02)
    assert [v.tested for v in lucky] == [True, False]


def test_every_draw_has_to_pass():
    (found,) = fixed_sequence(BASE, [candidate(8, 0.1, 4.0)], 0.02)
    assert not found.passed
    assert found.bound == pytest.approx(upper_bounds(BASE, [losing(4.0)], 0.95)[0])


def test_methods_share_the_error():
    (alone,) = fixed_sequence(BASE, [candidate(8, 1.0)], 0.02)
    many = fixed_sequence(BASE, [candidate(8, 1.0, method=f"{i}") for i in range(10)], 0.02)
    assert alone.bound == pytest.approx(upper_bounds(BASE, [losing(1.0)], 0.95)[0])
    assert many[0].bound == pytest.approx(upper_bounds(BASE, [losing(1.0)], 0.995)[0])


def test_bad_levels():
    for settings, words in (({"confidence": 95}, "between 0 and 1"), ({"draws": 100}, "least 200")):
        with pytest.raises(InvalidValue, match=words):
            fixed_sequence(BASE, [candidate(8, 1.0)], 0.02, **settings)
    assert fixed_sequence(BASE, [], 0.02) == ()


def test_no_more_wrong_picks_than_the_confidence_allows():
    """Two chains of four models, all truly worse than allowed by a hair: any pick is an error."""
    rng, n, wrong = np.random.default_rng(0), 200, 0
    for _ in range(200):
        draws = [answers(rng.random(n) >= 0.052) for _ in range(8)]
        chains = [CandidateSetting("ab"[i % 2], 8 - i // 2, (d,)) for i, d in enumerate(draws)]
        wrong += any(v.passed for v in fixed_sequence(losing(0, n), chains, 0.05, draws=500))
    assert wrong / 200 <= 0.08


def test_the_pareto_curve_on_points():
    rng = np.random.default_rng(0)

    def beaten(points: list[tuple[int, int]], i: int) -> bool:
        """Whether another point is as small and as good; of equal ones the first is kept."""
        return any(
            p[0] <= points[i][0] and p[1] <= points[i][1] and (p != points[i] or j < i)
            for j, p in enumerate(points)
        )

    for _ in range(50):
        sizes, drops = rng.integers(1, 6, 12).tolist(), rng.integers(0, 6, 12).tolist()
        points = list(zip(sizes, drops, strict=True))
        wanted = [i for i in range(12) if not beaten(points, i)]
        assert sorted(pareto(sizes, drops)) == wanted


def test_settings_are_pooled_and_ranked_by_validation_rows():
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
    with pytest.raises(UnknownName, match="Did you mean 'heads'"):
        found.front("head")
    with pytest.raises(InvalidValue, match="without a KV cache"):
        check_size(found.base, "kv", "here")


def test_a_table_that_no_sweep_wrote_is_refused(tmp_path):
    def without(row: FrozenDict, lacks: str) -> FrozenDict:
        return FrozenDict({key: value for key, value in row.items() if key != lacks})

    table = sweep_table()
    for changes, words in (
        (
            {"base": without(table.base, "kv")},
            r"base: must be complete \(with kv\), got one without",
        ),
        (
            {"base": without(table.base, "test_rows")},
            r"base\.test_rows: must be a number, got None",
        ),
        ({"rows": (without(table.rows[0], "keep"),)}, r"rows\[0\]: must be complete \(with keep\)"),
        ({"failed": (without(table.failed[0], "error"),)}, r"failed\[0\]: .*\(with error\)"),
    ):
        with pytest.raises(InvalidValue, match=words):
            SweepTable.load(replace(table, **changes).save(tmp_path / "table.json"))


def test_the_picture_is_drawn_and_the_same_each_time(tmp_path):
    paths = [draw_tradeoff(sweep_table("loss"), tmp_path / name) for name in ("a.svg", "b.svg")]
    one, two = (path.read_bytes() for path in paths)
    assert one == two
    assert len(one) > 10_000


def test_page_and_summary_say_the_same_and_escape_it():
    failed = (FrozenDict({"keep": 1, "error": "<script>x"}),)
    page = render_sweep_html(replace(sweep_table(), failed=failed))
    assert 'data-label="validation drop, points" class="nowrap" data-key="0.02"' in page
    assert "<span>2.00 ± 1.41</span>" in page
    assert "keep 1: &lt;script&gt;x" in page
    text = render_tradeoff(sweep_table())
    drops = "2.00 ± 1.41 | 3.00 ± 1.41"
    assert f"| keep 0.5 | scorer taylor | 16 | 16,000 | 160 | {drops} |" in text
    assert "scorer fisher, keep 0.5, seed 0: no \\| labels" in text


def test_the_files_of_a_sweep_do_not_name_where_they_lie(tmp_path):
    names = [path.name for path in write_tradeoff(sweep_table(), tmp_path)]
    assert names == ["tradeoff.svg", "tradeoff.png", "report.html", "summary.md"]
    page = (tmp_path / "report.html").read_text()
    assert "headprune pick" not in page, "it is not known to find a model"
    assert str(tmp_path) not in page
    inputs = SweepInputs(pick="none", max_drop=0.02, folder="my sweeps/a")
    write_tradeoff(sweep_table(), tmp_path / "pages", inputs)
    page = (tmp_path / "pages" / "report.html").read_text()
    assert "headprune pick &#39;my sweeps/a&#39; --max-drop 0.02" in page
    empty = replace(sweep_table(), rows=())
    names = [path.name for path in write_tradeoff(empty, tmp_path)]
    assert names == ["report.html", "summary.md"]


def test_a_sweep_has_every_setting_with_speed_and_random_heads():
    row = SpeedRow(32, 128, 0.1, 0.1, 0.1, 0.1, 1.01, 0.99, 1.03, 50)
    against = (Drop(-0.13, -0.2, -0.05), Drop(0.03, -0.01, 0.05), None, None)
    view = sweep_view(sweep_table(), SweepInputs({"plans/abcdefgh.json": row}, against))
    cells = [[cell.text for cell in row.cells[-2:]] for row in view.rows]
    assert cells == [
        ["better, 13.00", "≈ 1.01×"],
        ["ties, −3.00", "≈ 1.01×"],
        ["random", "≈ 1.01×"],
        ["random", "≈ 1.01×"],
    ]
    assert view.verdict == (
        "1 of 2 settings are shown to lose less than random heads of the same budget."
    )
    unfinished = sweep_view(replace(sweep_table(), rows=()), SweepInputs())
    assert unfinished.verdict == "No run of this sweep is finished."
    picked = sweep_view(sweep_table(), SweepInputs(pick="no model is good enough\n  nearest: none"))
    assert (picked.verdict, picked.details) == ("No model is good enough.", "Nearest: none.")


def test_the_mean_of_random_draws_is_compared_on_the_same_rows():
    """The interval covers the true difference about as often as it says."""
    rng, n, n_draws, trials = np.random.default_rng(0), 200, 5, 200
    covered = 0
    for trial in range(trials):
        hard = rng.random(n)
        shares = rng.normal(0.8, 0.03, n_draws)
        chosen = Answers("accuracy", (hard < 0.85).astype(float), np.ones(n))
        random = [Answers("accuracy", (hard < p).astype(float), np.ones(n)) for p in shares]
        drop = drop_of_means(random, [chosen], draws=300, seed=trial)
        covered += drop.low <= -0.05 <= drop.high
    assert 0.85 <= covered / trials <= 1.0


def test_few_changed_answers_are_no_proof_of_a_loss():

    def low(n_lost: int) -> float:
        worse = answers([0.0] * n_lost + [1.0] * (400 - n_lost))
        return drop_of_means([answers([1.0] * 400)], [worse]).low

    # Two-sided sign tests: p = 0.125 for 4 of 4, and 0.031 for 6 of 6.
    assert low(4) < 0 < low(6)


def test_a_pick_of_nothing_says_how_many_rows_it_lacks():
    for bound, drop_found, rows, words in (
        (0.03, 0.005, 2500, "about 2,500 validation rows would be needed to show it"),
        (0.03, 0.012, None, "more rows would not help, because the drop itself is too large"),
        (0.01004, 0.005, 110, "lose at most 1.000 points"),
    ):
        look = SettingVerdict("taylor", 16.0, bound, False, drop_found)
        nothing = (None, "", None, None, None, None, None)
        found = Pick(0.01, 0.95, "heads", "accuracy", *nothing, (look,), rows=100)
        assert found.needed_rows == rows
        text = str(found)
        assert words in text
        assert "on the 100 validation rows its drop is" in text
        assert f"--max-drop {found.allowable:g}" in text
        assert found.allowable >= bound
