"""The rows that two models answer in another way, for every kind of answer, from built results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headprune.bench.quality import Quality
from headprune.core.changed import ChangedAnswer, ChangedAnswers
from headprune.run.changes import JudgedRows

ROWS = JudgedRows([12, 3, 7], "train", ["long", "short", "mid"], ["one", "two", "three"], {0: "O"})


def changed(metric: str, before: list[Any], after: list[Any], **more: Any) -> ChangedAnswers:
    base = Quality(metric, 0.0, 0.0, 3, (0.0,) * 3, tuple(before), (1.0,) * 3)
    first, second = ({name: pair[i] for name, pair in more.items()} for i in (0, 1))
    return ROWS.changed(replace(base, **first), replace(base, amounts=tuple(after), **second))


def test_a_class_per_row_is_right_or_wrong():
    classes = (((0, 0), (1, 1), (1, 2)), ((0, 1), (1, 1), (1, 0)))
    found = changed("accuracy", [1, 1, 0], [0, 1, 0], classes=classes)
    assert found.rows == (
        ChangedAnswer(12, "long", "O", "O", "1"),
        ChangedAnswer(7, "mid", "1", "2", "O"),
    )
    assert [row.fate for row in found.rows] == ["lost", "wrong both times"]
    assert "right before and wrong now 1" in found.title
    assert found.caption.startswith("Rows are numbered from 1 as in split 'train' of the data;")


TOKENS = (((0, 0), (1, 1)), ((1, 1),), ((0, 1), (1, 1)))
OTHER_TOKENS = (((0, 1), (1, 0)), ((1, 1),), ((0, 0), (1, 1)))
NUMBERS = ((1.0, 1.5), (2.0, 3.0), (0.0, 0.0))
OTHER_NUMBERS = ((1.0, 3.0), (2.0, 1.5), (0.0, 0.0))
GOOD = (3.0, 2.0, 1.0, 0.0, 4.0, 3.0, 2.0, 1.0)
BAD = (1.0, 0.0, 0.0, 0.0, 4.0, 3.0, 2.0, 1.0)


def test_other_answers_are_better_or_worse():
    for found, rows in (
        (
            changed("accuracy", [2, 1, 1], [0, 1, 2], outputs=(TOKENS, OTHER_TOKENS)),
            [(12, "O, 1", "O, 1", "1, O", 2.0), (7, "O", "1", "O", -1.0)],
        ),
        (
            changed("mse", [0.25, 1, 0], [4.0, 0.25, 0], outputs=(NUMBERS, OTHER_NUMBERS)),
            [(12, "1", "1.5", "3", 3.75), (3, "2", "3", "1.5", -0.75)],
        ),
        (
            changed("f1", [1.0, 0.0, 0.5], [0.5, 0.0, 0.5], outputs=("aab", "bcb")),
            [(12, "one", "a", "b", 0.5), (3, "two", "a", "c", 0.0)],
        ),
        (
            changed("bleu", [GOOD] * 3, [BAD] * 3, outputs=("aaa", "baa")),
            [(12, "one", "a", "b", 5.0)],
        ),
        (
            changed("perplexity", [2.0, 1.0, 3.0], [2.5, 1.0, 2.0]),
            [
                (7, "", "loss 3.0000", "loss 2.0000", -1.0),
                (12, "", "loss 2.0000", "loss 2.5000", 0.5),
            ],
        ),
    ):
        shown = [(row.row, row.label, row.before, row.after, row.worse) for row in found.rows]
        assert shown == rows
        worse = sum(row[-1] > 0 for row in rows)
        better = sum(row[-1] < 0 for row in rows)
        assert f"{len(rows)} of 3 test rows changed their answer: worse now {worse}" in found.title
        assert (found.n_lost, found.n_gained) == (worse, better)
