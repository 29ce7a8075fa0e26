"""Every clause that the verdict on a run can take, from built records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headprune.core.choice import Candidate, Choice
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.heads import HeadMask
from headprune.core.record import ClassRow, Comparison, QualityRow, RunRecord, SpeedRow
from headprune.report.verdict import card_lines, verdict
from tests.report_records import record_of

TASK = FrozenDict({"task": "sequence_classification", "select": {"keep_heads": 0.5}})


def compared(
    name: str, against: str, drop: float, low: float, high: float, metric: str = "accuracy"
) -> Comparison:
    return Comparison(name, against, metric, "test", 872, drop, low, high)


#: The final model loses 0.23 points, within the noise; the choice beats random heads.
COST = compared("recovered (finetune)", "base", 0.0023, -0.0031, 0.0077)
BETTER = compared("taylor", "random", -0.0566, -0.07, -0.04)


def built(cost: Comparison = COST, random: Comparison = BETTER, **changes: Any) -> RunRecord:
    return record_of(comparisons=(cost, random), **{"recipe": TASK, **changes})


def test_the_sentence_is_short_and_the_figures_follow():
    said = verdict(built())
    assert said.sentence == (
        "Removing 16 of 32 heads cost 0.23 points of accuracy, which chance can explain, and made"
        " the model 1.12× as fast; the choice beat random heads before recovery. Next: keep 8 heads."
    )
    assert said.details == (
        "Accuracy 0.976 before, 0.974 after, on 872 test rows: cost 0.23 points of accuracy, 95 %"
        " interval −0.31 to 0.77. Speed at batch 32 × 128 tokens: 1.12×, 95 % interval 1.10 to"
        " 1.14; no measurable difference at 1 of 3 shapes. 10 draws of random heads before"
        " recovery: the choice is better by 5.66 points of accuracy, 95 % interval 4.00 to 7.00."
    )
    assert str(said).endswith("--set select.keep_heads=8 --out runs/sst2-bert-taylor-8"), (
        "the terminal has the command too"
    )


def test_a_gradual_cut_is_judged_by_its_trained_model():
    rows = (
        QualityRow("base", 32, "accuracy", 0.9, "test", 872, 1.0),
        QualityRow("taylor", 16, "accuracy", 0.6, "test", 872, 1.0),
        QualityRow("gradual", 16, "accuracy", 0.89, "test", 872, 1.0, trained=True),
    )
    record = record_of(quality=rows, comparisons=(), recipe=TASK)
    assert "cost 1.00 points of accuracy" in verdict(record).sentence
    assert any("After: accuracy 0.8900" in line for line in card_lines(record))


def final(drop: float, low: float, high: float, metric: str = "accuracy") -> Comparison:
    return compared("recovered (finetune)", "base", drop, low, high, metric)


def quality(metric: str, before: float, after: float) -> tuple[QualityRow, ...]:
    rows = (("base", 32, before), ("recovered (finetune)", 16, after))
    return tuple(QualityRow(name, n, metric, value, "test", 872, 1.0) for name, n, value in rows)


PERPLEXITY = built(final(0.031, 0.02, 0.04, "perplexity"), quality=quality("perplexity", 20, 20.62))
LOSS = built(final(-0.1, -0.2, -0.01, "loss"), quality=quality("loss", 0.5, 0.4))


TINY = built(final(8e-6, 2e-6, 2e-5, "perplexity"), quality=quality("perplexity", 20, 20.00016))
NOT_COMPARED = "has accuracy 0.974, without a comparison"


@pytest.mark.parametrize(
    ("record", "clause", "detail"),
    [
        (built(final(0.02, 0.01, 0.031)), "cost 2.00 points of accuracy", "1.00 to 3.10"),
        (built(final(-0.02, -0.03, -0.01)), "gained 2.00 points of accuracy", "1.00 to 3.00"),
        (built(final(0, -0.005, 0.005)), "did not change the accuracy", "cost 0.00 points"),
        (built(final(0, 0, 0)), "changed no result", "Accuracy 0.976 before, 0.974 after"),
        (record_of(), "cost 0.23 points of accuracy", "; the record has no interval."),
        (PERPLEXITY, "raised perplexity by 3.10 %", "95 % interval 2.00 to 4.00"),
        (TINY, "raised perplexity by less than 0.01 %", "95 % interval 0.00 to 0.00"),
        (LOSS, "lowered loss by 0.1000", "95 % interval 0.0100 to 0.2000"),
        (built(quality=quality("wonder", 0.5, 0.4)), "changed wonder", "Wonder 0.500 before"),
        (built(quality=record_of().quality[1:]), NOT_COMPARED, ""),
        (built(quality=()), "has no measured cost", ""),
    ],
)
def test_cost(record, clause, detail):
    said = verdict(record)
    assert said.cost == clause
    assert f" {clause}" in said.sentence
    assert detail in said.details


def timed(ratio: float, low: float, high: float) -> SpeedRow:
    return SpeedRow(8, 64, 1.0, 1.0, 1.0, 1.0, ratio, low, high, 50)


FAST, SLOW = timed(1.2, 1.1, 1.3), timed(0.8, 0.7, 0.9)


def test_gain():
    for speed, clause, detail in (
        (
            (FAST,),
            "made the model 1.20× as fast",
            "× 64 tokens: 1.20×, 95 % interval 1.10 to 1.30.",
        ),
        ((SLOW,), "made the model slower (0.80× as fast)", "0.80×, 95 % interval"),
        ((timed(1.01, 0.9, 1.1),), "gained no measurable speed", "1.01×, 95 % interval"),
        ((timed(float("nan"), 1, 1),), "has no usable timing", "8 × 64 tokens: no usable timing."),
        ((), "was not timed", ""),
        (
            (FAST, replace(SLOW, batch=1)),
            "made the model 1.20× as fast",
            "slower at 1 of 2 shapes.",
        ),
    ):
        said = verdict(built(speed=speed))
        assert said.gain == clause
        assert f" and {clause}; " in said.sentence
        assert detail in said.details


def test_the_speed_is_that_at_the_shape_of_the_budget():
    """A larger shape gains more, and is not what was asked for."""
    rows = (replace(FAST, batch=64, ratio=1.5, high=1.6), FAST)
    for asked, clause in ((1.25, ""), (1.4, ", not 1.40×"), (None, "")):
        noted = {"speedup": {"asked": asked, "measured": 1.2, "batch_size": 8, "length": 64}}
        said = verdict(built(speed=rows, metrics=noted))
        assert said.gain == f"made the model 1.20× as fast{clause}"
        assert "speed at batch 8 × 64 tokens" in said.details.lower()
    assert verdict(built(speed=rows)).gain == "made the model 1.50× as fast"


def by_auto(low: float, high: float = 0.2, refit: str = "lstsq", **changes: Any) -> RunRecord:
    """The record of `auto`, whose random candidate loses more by ``low`` to ``high``."""
    taylor = Candidate("taylor", EMPTY, False, 0.3, 0.0, 0.0, 0.0)
    difference = (low + high) / 2
    random = Candidate("random", EMPTY, False, 0.3 + difference, difference, low, high)
    choice = Choice((taylor, random), "taylor", "keep 50 %", refit, 512, 0.2)
    scores = record_of().scores
    return built(scores=replace(scores, choice=choice), **changes)


def with_random(**changes: Any) -> RunRecord:
    rows = list(record_of().quality)
    rows[2] = replace(rows[2], **changes)
    return record_of(quality=tuple(rows))


def unequal() -> RunRecord:
    """Compared with random removal by the same budget, which keeps other numbers of heads."""
    rows = list(record_of().quality)
    rows[2] = replace(rows[2], kept_heads=20)
    return built(quality=tuple(rows))


def by_random() -> RunRecord:
    scores = record_of().scores
    return built(scores=replace(scores, scorer="random"))


def in_metric(metric: str, drop: float, low: float, high: float) -> RunRecord:
    rows = [
        QualityRow(name, n, metric, 2.0, "test", 872, 1.0)
        for name, n in (("base", 32), ("taylor", 16), ("random", 16))
    ]
    cost = compared("taylor", "base", 0.0, -0.001, 0.001, metric)
    return built(cost, compared("taylor", "random", drop, low, high, metric), quality=tuple(rows))


def refitted_alike(drop: float, low: float, high: float) -> RunRecord:
    rows = [
        QualityRow(name, n, "accuracy", 0.9, "test", 872, 1.0, draws=draws)
        for name, n, draws in (
            ("base", 32, 1),
            ("taylor", 16, 1),
            ("random", 16, 10),
            ("recovered (lstsq)", 16, 1),
            ("random, recovered (lstsq)", 16, 2),
        )
    ]
    alike = compared("recovered (lstsq)", "random", drop, low, high)
    cost = compared("recovered (lstsq)", "base", 0.0, -0.001, 0.001)
    return built(cost, alike, quality=tuple(rows))


def chance(drop: float, low: float, high: float) -> Comparison:
    return compared("taylor", "random", drop, low, high)


TIED = "random heads are not shown to be worse at this size"
BEAT = "the choice beat random heads"
ONE_DRAW = "it is better than the only draw of random heads before recovery"
REFITTED = f"{BEAT} before recovery, but after a refit, random heads are not shown to be worse"
ALIKE = "cut and refitted alike, and their loss compared on 512 held-out calibration rows"
TIES, WINS = chance(0.001, -0.01, 0.012), chance(0.02, 0.01, 0.03)
UNREFITTED = by_auto(-0.01, refit="", quality=record_of().quality[:3])


@pytest.mark.parametrize(
    ("record", "clause", "detail"),
    [
        (built(random=TIES), f"{TIED} before recovery", "worse by 0.10 points of accuracy"),
        (built(random=WINS), "random heads did better before recovery", "worse by 2.00 points"),
        (built(quality=record_of().quality[:3]), BEAT, "10 draws of random heads: the choice is"),
        (in_metric("perplexity", -0.05, -0.08, -0.02), BEAT, "better by 5.00 % of perplexity"),
        (in_metric("loss", 0.2, -0.1, 0.5), TIED, "worse by 0.2000 loss, 95 % interval −0.1000"),
        (with_random(value=0.95), f"{TIED} before recovery", "10 draws"),
        (with_random(spread=None, draws=1), ONE_DRAW, "the difference is 5.66 points of accuracy"),
        (with_random(kept_heads=20), "it was not compared with random heads", ""),
        (unequal(), f"{BEAT} before recovery", "better by 5.66 points"),
        (by_random(), "its heads were chosen at random", ""),
        (refitted_alike(-0.03, -0.05, -0.01), BEAT, "2 draws of random heads, cut and recovered"),
        (refitted_alike(0.03, -0.05, 0.08), TIED, "the choice is worse by 3.00 points"),
        (by_auto(0.05), "its held-out loss is lower than that of random heads", ALIKE),
        (by_auto(-0.01), REFITTED, "10 draws of random heads before recovery: the choice is"),
        (
            UNREFITTED,
            f"{BEAT}, but their held-out loss is not shown to be higher",
            "cut alike, and",
        ),
        (by_auto(-0.01, random=TIES), TIED, "on 512 held-out calibration rows"),
        (by_auto(-0.3, -0.1), "random heads did better", "on 512 held-out calibration rows"),
    ],
)
def test_random(record, clause, detail):
    said = verdict(record)
    assert said.random == clause
    assert f"; {clause}. Next: " in said.sentence
    assert detail in said.details


WORSE, WIDE = final(0.02, 0.01, 0.03), final(0.01, -0.01, 0.03)
ROWS = record_of().quality
UNTRAINED = (*ROWS[:4], replace(ROWS[4], trained=False))
WRONG = replace(record_of().proofs[0], max_difference=float("nan"))
UNSURE = "with 872 the cost is uncertain by more than a point"
UNRECOVERED = built(compared("taylor", "base", 0.02, 0.01, 0.03), quality=ROWS[:3])
SLOWER = built(speed=(timed(1.01, 0.9, 1.1),))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (built(recipe=EMPTY), "remove more heads"),
        (built(random=TIES), "keep 8 heads"),
        (SLOWER, "keep 8 heads, or time longer inputs and larger batches"),
        (built(WIDE), f"measure on about 3,500 test rows; {UNSURE}"),
        (built(WORSE), "keep more heads"),
        (TINY, "keep 8 heads"),
        (built(WORSE, TIES), "keep more heads, or score on more calibration rows"),
        (UNRECOVERED, "recover it (`recover: lstsq` needs no training), or keep more heads"),
        (built(WORSE, quality=UNTRAINED), "train it (`recover: finetune`), or keep more heads"),
        (record_of(), "run it again to get an interval for the cost"),
        (built(quality=()), "measure it on rows with labels before you use it"),
        (built(proofs=(WRONG,)), "do not use it: the cut model does not equal the gated one"),
    ],
)
def test_next(record, words):
    said = verdict(record)
    assert said.next == words
    assert said.sentence.endswith(f". Next: {words}.")


def test_no_command_that_may_fail():
    assert verdict(built()).command
    must_keep = {"keep_heads": 0.5, "must_keep": {"a": [1]}}
    plan = record_of().plan
    for changes in (
        {"recipe": FrozenDict({**TASK, "select": {"keep_macs": 0.5}})},
        {"recipe": FrozenDict({**TASK, "select": must_keep})},
        {"plan": replace(plan, settings=FrozenDict({"min_heads": 3}))},
        {"plan": replace(plan, settings=FrozenDict({"multiple_of": 3}))},
        {"recipe": EMPTY},
    ):
        assert not verdict(built(**changes)).command, changes
    grouped = record_of(n_kv=4, recipe=TASK, comparisons=(COST, BETTER))
    assert not verdict(grouped).command, "half as many may be no whole groups"


def test_the_command_names_the_folder_where_the_recipe_lies():
    assert verdict(built(), "my runs/a").command == (
        "headprune run 'my runs/a/recipe.yaml' --set select.keep_heads=8 --out 'my runs/a-8'"
    )


def of_rows(n: int, source: str = "train") -> FrozenDict:
    counts = {"train": (0.7, "train"), "validation": (0.1, "train"), "test": (0.2, source)}
    facts = {
        name: FrozenDict({"rows": round(share * n), "from": of})
        for name, (share, of) in counts.items()
    }
    return FrozenDict(facts)


COLLECT = "collect labelled rows until about 3,500 of them are test rows"


def test_more_rows_are_asked_for_where_they_are():
    for rows, words, setting in (
        (
            of_rows(10_000),
            "measure on about 3,500 of the 10,000 rows",
            " --set data.test_holdout=0.35 --out runs/sst2-bert-taylor-test",
        ),
        (of_rows(4_360), COLLECT, ""),
        (of_rows(10_000, "test"), COLLECT, ""),
    ):
        said = verdict(built(WIDE, rows=rows))
        assert said.next == f"{words}; {UNSURE}"
        assert said.command.endswith(setting)
        assert bool(said.command) == bool(setting)


def test_a_command_for_more_test_rows_keeps_those_for_validation_and_calibration():
    for holdout, fits in ((6_200, True), (6_600, False)):
        data = FrozenDict({"holdout": holdout, "calibration": 256})
        recipe = FrozenDict({**TASK, "data": data})
        said = verdict(built(WIDE, rows=of_rows(10_000), recipe=recipe))
        assert bool(said.command) == fits, "3,500 of 10,000 rows are for tests"


UNCUT = replace(record_of().plan, mask=HeadMask.from_keep({"a": [0, 1]}, {"a": 2}))
UNPRICED = replace(UNCUT, budget=None)
NOTHING: dict[str, Any] = {"plan": None, "quality": (), "scores": None}
FAILED = (
    "The run failed in stage bench. Until then: removing 16 of 32 heads cost 0.23 points of"
    " accuracy, which chance can explain, and made the model 1.12× as fast; the choice beat random"
    " heads before recovery."
)
SCORED = "The run was interrupted in stage score. Until then: 32 heads scored, none removed."
BEGUN = "The run is in stage data, before anything was measured."
UNPLANNED = "32 heads scored, none removed; accuracy 0.976 before the cut."


def test_unfinished_and_uncut():
    for changes, sentence in (
        ({"status": "failed", "stage": "bench"}, FAILED),
        ({"status": "interrupted", "stage": "score", "plan": None, "quality": ()}, SCORED),
        ({"status": "running", "stage": "data", **NOTHING}, BEGUN),
        ({"plan": None, "quality": record_of().quality[:1]}, UNPLANNED),
        ({"plan": UNCUT, "scores": None}, "Nothing was removed: the budget allows all 2 heads."),
        ({"plan": UNPRICED, "scores": None}, "Nothing was removed: the plan keeps all 2 heads."),
        (NOTHING, "The run is done; its record holds no results."),
    ):
        said = verdict(built(**changes))
        assert said.sentence == sentence
        assert not said.next
        assert not said.command


@pytest.mark.parametrize("right", [25, 45])
def test_a_model_at_chance_is_named_before_its_cut(right):
    classes = tuple(ClassRow(name, 50, right, right) for name in ("bills", "refunds"))
    said = verdict(built(classes=classes))
    words = (
        "The whole model is not shown to do better than always answering 'bills'. So its results"
        " say little about the cut. Next: check that labels and model belong together, or train"
        " the model first."
    )
    assert (said.sentence == words) == (right == 25)
    assert ("Removing 16 of 32 heads" in said.details) == (right == 25)


def test_the_card_has_the_verdict_and_every_speed():
    lines = card_lines(built())
    assert lines[0].startswith("Verdict: Removing 16 of 32 heads cost 0.23 points of accuracy")
    assert "95 % interval −0.31 to 0.77" in lines[1]
    assert not any("Next" in line for line in lines)
    assert "After: accuracy 0.9740 (95 % interval 0.9612 to 0.9827) on 872 test rows" in lines
    assert sum(line.startswith("Speed: ") for line in lines) == 3
