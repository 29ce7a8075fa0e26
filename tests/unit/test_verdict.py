"""Every clause that the verdict on a run can take, from built records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headprune.core.choice import Candidate, Choice
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.record import Comparison, QualityRow, RunRecord, SpeedRow
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
    """A record with both comparisons."""
    return record_of(comparisons=(cost, random), **{"recipe": TASK, **changes})


def test_the_sentence_has_all_clauses_in_order() -> None:
    said = verdict(built())
    assert said.sentence == (
        "Removing 16 of 32 heads cost 0.23 points of accuracy on 872 test rows, which chance can"
        " explain (95 % interval −0.31 to 0.77), made it 1.12× as fast at batch 32 × 128 tokens"
        " (95 % interval 1.10 to 1.14; no measurable difference at 1 of 3 shapes), and beat random"
        " heads by 5.66 points of accuracy before recovery (95 % interval of the difference 4.00"
        " to 7.00 points); next, keep 8 heads."
    )
    assert str(said).endswith("--set select.keep_heads=8 --out runs/sst2-bert-taylor-8"), (
        "the terminal has the command too"
    )


def quality(metric: str, before: float, after: float) -> tuple[QualityRow, ...]:
    rows = (("base", 32, before), ("recovered (finetune)", 16, after))
    return tuple(QualityRow(name, n, metric, value, "test", 872, 1.0) for name, n, value in rows)


@pytest.mark.parametrize(
    ("record", "clause"),
    [
        (
            built(compared("recovered (finetune)", "base", 0.02, 0.01, 0.031)),
            "cost 2.00 points of accuracy on 872 test rows (95 % interval 1.00 to 3.10)",
        ),
        (
            built(compared("recovered (finetune)", "base", -0.02, -0.03, -0.01)),
            "gained 2.00 points of accuracy on 872 test rows (95 % interval 1.00 to 3.00)",
        ),
        (
            built(compared("recovered (finetune)", "base", 0.0, -0.005, 0.005)),
            "did not change the accuracy on 872 test rows (95 % interval −0.50 to 0.50)",
        ),
        (
            built(compared("recovered (finetune)", "base", 0.0, 0.0, 0.0)),
            "changed the result of none of 872 test rows",
        ),
        (
            record_of(),
            "cost 0.23 points of accuracy on 872 test rows (the record has no interval)",
        ),
        (
            built(
                compared("recovered (finetune)", "base", 0.031, 0.02, 0.04, "perplexity"),
                quality=quality("perplexity", 20.0, 20.62),
            ),
            "raised perplexity by 3.10 % on 872 test rows (95 % interval 2.00 to 4.00)",
        ),
        (
            built(
                compared("recovered (finetune)", "base", -0.1, -0.2, -0.01, "loss"),
                quality=quality("loss", 0.5, 0.4),
            ),
            "lowered loss by 0.1000 on 872 test rows (95 % interval 0.0100 to 0.2000)",
        ),
        (
            built(quality=quality("wonder", 0.5, 0.4)),
            "changed wonder from 0.500 to 0.400 on 872 test rows",
        ),
        (
            built(quality=record_of().quality[1:]),
            "gives accuracy 0.974, which nothing is compared with",
        ),
        (built(quality=()), "has no measured cost"),
    ],
)
def test_cost(record: RunRecord, clause: str) -> None:
    assert verdict(record).cost == clause


def timed(ratio: float, low: float, high: float) -> SpeedRow:
    return SpeedRow(8, 64, 1.0, 1.0, 1.0, 1.0, ratio, low, high, 50)


@pytest.mark.parametrize(
    ("speed", "clause"),
    [
        ((timed(1.2, 1.1, 1.3),), "made it 1.20× as fast at batch 8 × 64 tokens"),
        ((timed(0.8, 0.7, 0.9),), "made it slower, 0.80× as fast, at batch 8 × 64 tokens"),
        ((timed(1.01, 0.9, 1.1),), "gained no measurable speed at batch 8 × 64 tokens"),
        ((timed(float("nan"), 1, 1),), "has no usable timing at batch 8 × 64 tokens"),
        ((), "was not timed"),
        (
            (timed(1.2, 1.1, 1.3), replace(timed(0.8, 0.7, 0.9), batch=1)),
            "made it 1.20× as fast at batch 8 × 64 tokens (95 % interval 1.10 to 1.30; slower at"
            " 1 of 2 shapes)",
        ),
    ],
)
def test_gain(speed: tuple[SpeedRow, ...], clause: str) -> None:
    assert verdict(built(speed=speed)).gain.startswith(clause)


def chosen_by_auto(low: float) -> RunRecord:
    """The record of `auto`, whose random candidate loses more by at least ``low``."""
    taylor = Candidate("taylor", EMPTY, False, 0.3, 0.0, 0.0, 0.0)
    random = Candidate("random", EMPTY, False, 0.4, 0.1, low, 0.2)
    choice = Choice((taylor, random), "taylor", "keep 50 %", "lstsq", 512, 0.2)
    scores = record_of().scores
    assert scores is not None
    return built(scores=replace(scores, choice=choice))


def with_random(**changes: Any) -> RunRecord:
    """A record without comparisons whose row of random heads is another."""
    rows = list(record_of().quality)
    rows[2] = replace(rows[2], **changes)
    return record_of(quality=tuple(rows))


def by_random() -> RunRecord:
    scores = record_of().scores
    assert scores is not None
    return built(scores=replace(scores, scorer="random"))


@pytest.mark.parametrize(
    ("record", "clause"),
    [
        (built(), "beat random heads by 5.66 points of accuracy before recovery"),
        (
            built(random=compared("taylor", "random", 0.001, -0.01, 0.012)),
            "is no better than random heads before recovery"
            " (95 % interval of the difference −1.20 to 1.00 points)",
        ),
        (
            built(random=compared("taylor", "random", 0.02, 0.01, 0.03)),
            "is worse than random heads by 2.00 points of accuracy before recovery",
        ),
        (
            built(quality=record_of().quality[:3]),
            "beat random heads by 5.66 points of accuracy (95 %",
        ),
        (with_random(value=0.95), "is no better than random heads before recovery"),
        (
            with_random(spread=None, draws=1),
            "is 5.66 points of accuracy above the only draw of random heads before recovery",
        ),
        (with_random(kept_heads=20), "was not compared with random heads"),
        (built(quality=record_of().quality[:2]), "was not compared with random heads"),
        (by_random(), "took its heads at random"),
        (
            chosen_by_auto(0.05),
            "beat random heads that were treated alike, on 512 held-out calibration rows",
        ),
        (
            chosen_by_auto(-0.01),
            "is not shown to beat random heads that were treated alike, on 512 held-out",
        ),
    ],
)
def test_random(record: RunRecord, clause: str) -> None:
    assert verdict(record).random.startswith(clause)


WORSE = compared("recovered (finetune)", "base", 0.02, 0.01, 0.03)
TIES = compared("taylor", "random", 0.0, -0.01, 0.01)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (built(), "keep 8 heads"),
        (built(recipe=EMPTY), "remove more heads"),
        (
            built(random=TIES),
            "keep 8 heads: with so many kept, any choice of heads does as well",
        ),
        (
            built(speed=(timed(1.01, 0.9, 1.1),)),
            "keep 8 heads, or time longer inputs and larger batches",
        ),
        (
            built(compared("recovered (finetune)", "base", 0.01, -0.01, 0.03)),
            "measure on about 3,500 rows: 872 leave more than a point open",
        ),
        (built(WORSE), "keep more heads"),
        (
            built(WORSE, TIES),
            "keep more heads, or score on more calibration rows: the choice adds nothing yet",
        ),
        (
            built(compared("taylor", "base", 0.02, 0.01, 0.03), quality=record_of().quality[:3]),
            "recover it (`recover: lstsq` needs no training), or keep more heads",
        ),
        (
            built(
                WORSE,
                quality=(
                    *record_of().quality[:4],
                    replace(record_of().quality[4], trained=False),
                ),
            ),
            "train it (`recover: finetune`), or keep more heads",
        ),
        (record_of(), "run it again: this version of headprune gives the cost an interval"),
        (built(quality=()), "measure it on rows with labels before you use it"),
        (
            built(proofs=(replace(record_of().proofs[0], max_difference=float("nan")),)),
            "do not use it: the cut model does not equal the gated one",
        ),
    ],
)
def test_next(record: RunRecord, words: str) -> None:
    said = verdict(record)
    assert said.next == words
    assert said.sentence.endswith(f"; next, {words}.")


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": FrozenDict({**TASK, "select": {"keep_macs": 0.5}})},
        {"recipe": FrozenDict({**TASK, "select": {"keep_heads": 0.5, "must_keep": {"a": [1]}}})},
        {"plan": replace(record_of().plan, settings=FrozenDict({"min_heads": 3}))},
        {"plan": replace(record_of().plan, settings=FrozenDict({"multiple_of": 3}))},
        {"recipe": EMPTY},
    ],
)
def test_no_command_that_may_fail(changes: dict[str, Any]) -> None:
    assert verdict(built()).command
    assert not verdict(built(**changes)).command
    grouped = record_of(n_kv=4, recipe=TASK, comparisons=(COST, BETTER))
    assert not verdict(grouped).command, "half as many may be no whole groups"


def test_the_command_names_the_folder_where_the_recipe_lies() -> None:
    assert verdict(built(), "my runs/a").command == (
        "headprune run 'my runs/a/recipe.yaml' --set select.keep_heads=8 --out 'my runs/a-8'"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"status": "failed", "stage": "bench"}, "The run failed in stage bench. Until then: Rem"),
        (
            {"plan": None, "quality": record_of().quality[:1]},
            "32 heads scored, none removed; accuracy 0.976 before the cut.",
        ),
    ],
)
def test_unfinished_and_uncut(changes: dict[str, Any], sentence: str) -> None:
    said = verdict(built(**changes))
    assert said.sentence.startswith(sentence)
    assert not said.next


def test_the_card_has_the_verdict_and_every_speed() -> None:
    lines = card_lines(built())
    assert lines[0].startswith("Verdict: removing 16 of 32 heads cost 0.23 points of accuracy")
    assert "After: accuracy 0.9740 (95 % interval 0.9612 to 0.9827) on 872 test rows" in lines
    assert sum(line.startswith("Speed: ") for line in lines) == 3
