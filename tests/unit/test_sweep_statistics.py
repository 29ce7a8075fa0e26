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
from headprune.report import plot
from headprune.report.curve import curve
from headprune.report.html import render_sweep_html
from headprune.report.inputs import SweepInputs
from headprune.report.series import TradeoffPoint
from headprune.report.tradeoff import draw_tradeoff, render_tradeoff, sweep_view
from headprune.report.write import write_tradeoff
from headprune.sweep.fixed_sequence import CandidateSetting, fixed_sequence
from headprune.sweep.pick import Pick, SettingVerdict
from tests.report_records import sweep_table


def answers(amounts: Any, metric: str = "accuracy", counts: Any = None) -> Answers:
    found = np.asarray(amounts, dtype=float)
    number = np.ones(len(found)) if counts is None else np.asarray(counts, dtype=float)
    return Answers(metric, found, number)


# ----------------------------------------------------------------------------------------------
# drops


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
    assert drop(metric, base, base) == 0


def test_drops_that_are_not_defined() -> None:
    with pytest.raises(InvalidValue, match=r"metric: must be one of accuracy"):
        drop("wobble", 1, 2)
    assert math.isnan(drop("perplexity", 0.0, 1.0)), "a loss of nothing has no ratio"
    assert [drop_words(m, 0.125) for m in ("mse", "loss")] == ["12.50 %", "0.1250"]


# ----------------------------------------------------------------------------------------------
# the paired bootstrap


@pytest.mark.parametrize("metric", ["accuracy", "perplexity", "mse"])
def test_resamples_are_those_of_a_loop_over_examples(metric: str) -> None:
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


def test_intervals_are_paired() -> None:
    """Two samples of their own would differ by points."""
    right = (np.random.default_rng(0).random(400) < 0.7).astype(float)
    worse = right.copy()
    worse[:8] = 0
    same, some = paired_drops(answers(right), [answers(right), answers(worse)])
    assert (same.value, same.low, same.high) == (0, 0, 0)
    assert some.value == pytest.approx((right[:8] == 1).sum() / 400)
    assert some.low >= 0
    assert 0 < some.high < 0.04


def test_resamples_do_not_depend_on_the_other_models_or_on_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    base, *others = (answers(rng.random(50) < 0.7) for _ in range(4))
    whole = resampled_drops(base, others, 100, 0)
    alone = resampled_drops(base, others[1:2], 100, 0)
    np.testing.assert_allclose(alone[:, 0], whole[:, 1], rtol=0, atol=1e-15)
    monkeypatch.setattr("headprune.core.paired._STEP", 350)
    np.testing.assert_allclose(resampled_drops(base, others, 100, 0), whole, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("lost", "won"), [(0.002, 0.0), (0.2, 0.1)])
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
        # This is what the added example is for: most samples show no difference at all.
        assert plain / 200 < 0.7


def test_the_upper_bound_of_a_loss_that_few_examples_bring() -> None:
    """Three examples in a hundred lose 3 on average, the others nothing."""
    rng, n, covered, plain, tries = np.random.default_rng(4), 500, 0, 0, 300
    for _ in range(tries):
        base = answers(2 + 0.5 * rng.standard_normal(n), "loss")
        other = answers(base.amounts + 3 * rng.exponential(size=n) * (rng.random(n) < 0.03), "loss")
        covered += upper_bounds(base, [other], 0.95, draws=200)[0] >= 0.09
        plain += float(np.quantile(resampled_drops(base, [other], 200, 0), 0.95)) >= 0.09
    assert covered / tries >= 0.92
    assert plain / tries <= 0.89  # what the repeated example is for


def test_the_bound_of_a_loss_repeats_the_worst_example_of_each_model() -> None:
    base = answers([1.0, 2, 3, 4], "mse")
    others = [answers([1.0, 2, 3, 9], "mse"), answers([4.0, 2, 3, 4], "mse")]
    found = upper_bounds(base, others, 0.9, draws=200)
    for other, worst, bound in zip(others, (3, 0), found, strict=True):
        again = [answers(np.append(a.amounts, a.amounts[worst]), "mse") for a in (base, other)]
        drops = resampled_drops(again[0], again[1:], 200, 0)
        assert bound == pytest.approx(np.quantile(drops, 0.9, method="inverted_cdf"))


def test_models_that_cannot_be_paired_are_refused() -> None:
    base = answers([1, 0, 1])
    for other in (answers([1, 0]), answers([1, 0, 1], "mse"), answers([1, 0, 1], counts=[1, 2, 1])):
        with pytest.raises(InvalidValue, match="the same examples"):
            paired_drops(base, [other])
    with pytest.raises(InvalidValue, match="two or more examples"):
        paired_drops(answers([1]), [answers([1])])
    assert paired_drops(base, []) == upper_bounds(base, [], 0.95) == ()


# ----------------------------------------------------------------------------------------------
# picking


def losing(points: float, n: int = 1000) -> Answers:
    """A model that is wrong on ``points`` per cent of rows on which the base is right."""
    right = np.ones(n)
    right[: round(points * n / 100)] = 0
    return answers(right)


def candidate(size: float, *points: float, method: str = "a") -> CandidateSetting:
    return CandidateSetting(method, size, tuple(losing(p) for p in points))


BASE = losing(0)


def test_a_chain_ends_at_its_first_failure() -> None:
    chain = [candidate(8, 3.0), candidate(32, 0.1), candidate(16, 5.0), candidate(24, 0.2)]
    found = fixed_sequence(BASE, chain, 0.02)
    assert [v.passed for v in found] == [False, True, False, True]
    assert [v.tested for v in found] == [False, True, True, True], "8 is smaller than 16"
    lucky = fixed_sequence(BASE, [candidate(16, 5.0), candidate(8, 0.0)], 0.02)
    assert [v.tested for v in lucky] == [True, False]


def test_every_draw_has_to_pass() -> None:
    (found,) = fixed_sequence(BASE, [candidate(8, 0.1, 4.0)], 0.02)
    assert not found.passed
    assert found.bound == pytest.approx(upper_bounds(BASE, [losing(4.0)], 0.95)[0])


def test_methods_share_the_error() -> None:
    (alone,) = fixed_sequence(BASE, [candidate(8, 1.0)], 0.02)
    many = fixed_sequence(BASE, [candidate(8, 1.0, method=f"{i}") for i in range(10)], 0.02)
    assert alone.bound == pytest.approx(upper_bounds(BASE, [losing(1.0)], 0.95)[0])
    assert many[0].bound == pytest.approx(upper_bounds(BASE, [losing(1.0)], 0.995)[0])


def test_bad_levels() -> None:
    for settings, words in (
        ({"confidence": 95}, "between 0 and 1"),
        ({"draws": 100}, "draws: must be at least 200"),
    ):
        with pytest.raises(InvalidValue, match=words):
            fixed_sequence(BASE, [candidate(8, 1.0)], 0.02, **settings)
    assert fixed_sequence(BASE, [], 0.02) == ()


def test_no_more_wrong_picks_than_the_confidence_allows() -> None:
    """Two chains of four models, all truly worse than allowed by a hair: any pick is an error."""
    rng, n, wrong = np.random.default_rng(0), 200, 0
    for _ in range(200):
        draws = [answers(rng.random(n) >= 0.052) for _ in range(8)]
        chains = [CandidateSetting("ab"[i % 2], 8 - i // 2, (d,)) for i, d in enumerate(draws)]
        wrong += any(v.passed for v in fixed_sequence(losing(0, n), chains, 0.05, draws=500))
    assert wrong / 200 <= 0.08


# ----------------------------------------------------------------------------------------------
# tables


def test_the_pareto_curve_on_points() -> None:
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
    with pytest.raises(UnknownName, match="Did you mean 'heads'"):
        found.front("head")
    with pytest.raises(InvalidValue, match="without a KV cache"):
        check_size(found.base, "kv", "here")


@pytest.mark.parametrize(
    ("part", "lacks", "words"),
    [
        ("base", "kv", r"base: must be complete \(with kv\), got one without"),
        ("base", "test_rows", r"base\.test_rows: must be a number, got None"),
        ("rows", "keep", r"rows\[0\]: must be complete \(with keep\), got a row without"),
        ("failed", "error", r"failed\[0\]: must be complete \(with error\)"),
    ],
)
def test_a_table_that_no_sweep_wrote_is_refused(
    part: str, lacks: str, words: str, tmp_path: Path
) -> None:
    def without(row: FrozenDict) -> FrozenDict:
        return FrozenDict({key: value for key, value in row.items() if key != lacks})

    found = getattr(sweep_table(), part)
    changed = without(found) if part == "base" else (without(found[0]), *found[1:])
    wrong = replace(sweep_table(), **{part: changed})
    with pytest.raises(InvalidValue, match=words):
        SweepTable.load(wrong.save(tmp_path / "table.json"))


@pytest.mark.parametrize("metric", ["perplexity", "loss"])
def test_the_picture_is_drawn_and_the_same_each_time(metric: str, tmp_path: Path) -> None:
    paths = [draw_tradeoff(sweep_table(metric), tmp_path / name) for name in ("a.svg", "b.svg")]
    one, two = (path.read_bytes() for path in paths)
    assert one == two
    assert len(one) > 10_000


def test_page_and_summary_say_the_same_and_escape_it(tmp_path: Path) -> None:
    failed = (FrozenDict({"keep": 1, "error": "<script>x"}),)
    page = render_sweep_html(replace(sweep_table(), failed=failed))
    assert "demo: 8 runs of 4 settings" in page
    assert 'data-label="validation drop, points" class="nowrap" data-key="0.02"' in page
    assert "<span>2.00 ± 1.41</span>" in page
    assert 'href="plans/abcdefgh.json"' in page
    assert "keep 1: &lt;script&gt;x" in page
    text = render_tradeoff(sweep_table())
    assert "accuracy 0.9000 on 300 validation rows, 0.9100 on 420 test rows" in text
    drops = "2.00 ± 1.41 | 3.00 ± 1.41"
    assert f"| keep 0.5 | scorer taylor | 16 | 16,000 | 160 | {drops} |" in text
    assert "scorer fisher, keep 0.5, seed 0: no \\| labels" in text


def test_the_files_of_a_sweep_do_not_name_where_they_lie(tmp_path: Path) -> None:
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


def test_a_sweep_has_every_setting_with_speed_and_random_heads() -> None:
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


def test_series_differ_in_colour_or_mark() -> None:
    points = []
    for i in range(20):
        for n in (8, 16):
            points.append(TradeoffPoint("accuracy", f"m{i}", n, 0.5 + i / 100, 0.0))
            chance = f"scorer random, recover r{i}"
            points.append(TradeoffPoint("accuracy", chance, n, 0.4 + i / 100, 0.0))
    drawn = curve(points, "test")
    assert drawn is not None
    looks = {role: set() for role in ("method", "random")}
    for line in drawn.lines:
        looks[line.role].add((line.colour if line.role == "method" else line.dash, line.mark))
    assert [len(found) for found in looks.values()] == [20, 20]


def test_random_heads_of_several_recoveries_differ_in_pictures() -> None:
    rows = []
    for recover in ("none", "lstsq"):
        rows += [FrozenDict({**row, "recover": recover}) for row in sweep_table().rows]
    table = replace(sweep_table(), keys=("scorer", "keep", "recover"), rows=tuple(rows))
    lines = plot.tradeoff(table).get_lines()
    random = [line for line in lines if "random" in str(line.get_label())]
    assert len(random) == 2
    first, second = ((line.get_marker(), str(line.get_linestyle())) for line in random)
    assert first != second


# ----------------------------------------------------------------------------------------------
# one model against random draws, and what a sweep lacks


def test_the_mean_of_random_draws_is_compared_on_the_same_rows() -> None:
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


def test_few_changed_answers_are_no_proof_of_a_loss() -> None:
    """Where the exact test of the changed rows does not see a loss, the interval does not either."""

    def low(n_lost: int) -> float:
        worse = answers([0.0] * n_lost + [1.0] * (400 - n_lost))
        return drop_of_means([answers([1.0] * 400)], [worse]).low

    # Two-sided sign tests: p = 0.125 for 4 of 4, and 0.031 for 6 of 6.
    assert low(4) < 0 < low(6)


@pytest.mark.parametrize(
    ("look", "rows", "words"),
    [
        (
            SettingVerdict("taylor", 16.0, 0.03, False, 0.005),
            2500,
            "about 2,500 validation rows would be needed to show it",
        ),
        (
            SettingVerdict("taylor", 16.0, 0.03, False, 0.012),
            None,
            "more rows would not help while the drop itself is not below what is allowed",
        ),
        (
            SettingVerdict("taylor", 16.0, 0.01004, False, 0.005),
            110,
            "lose at most 1.000 points",
        ),
    ],
)
def test_a_pick_of_nothing_says_how_many_rows_it_lacks(
    look: SettingVerdict, rows: int | None, words: str
) -> None:
    nothing = (None, "", None, None, None, None, None)
    found = Pick(0.01, 0.95, "heads", "accuracy", *nothing, (look,), rows=100)
    assert found.needed_rows == rows
    text = str(found)
    assert words in text
    assert "on the 100 validation rows its drop is" in text
    assert f"--max-drop {found.allowable:g}" in text
    assert found.allowable >= (look.bound or 0)
