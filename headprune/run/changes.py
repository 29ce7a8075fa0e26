"""The test rows that the final model answers differently from the uncut one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headprune.bench.quality import Quality
from headprune.core.bleu import ORDER
from headprune.core.changed import ChangedAnswer, ChangedAnswers
from headprune.core.metrics import POINTS, is_one_of
from headprune.run.judging import class_name

#: Changed rows with their text in the report, and the longest text of one.
_MOST_ROWS = 200
_LONGEST = 400
#: Changed words of one row that are listed.
_MOST_WORDS = 8


@dataclass(frozen=True)
class JudgedRows:
    """The rows that two models answered, in the order of their results.

    Args:
        numbers: Their numbers in the data, from 1.
        split: The split of the data that they are from.
        texts: What the models read; none where they read no text.
        truths: True texts of tasks whose answer is a text; none in others.
        names: Names of the classes.
    """

    numbers: Sequence[int]
    split: str
    texts: Sequence[str]
    truths: Sequence[str]
    names: Mapping[int, str]

    def changed(self, base: Quality, final: Quality) -> ChangedAnswers:
        """List the rows to which the models give different answers, in the order of the data.

        Answers are a class or a text per row, a class per word, or a number. Language models give
        none: there, rows are compared by their loss.
        """
        one = self._class if base.classes else self._graded
        found = []
        for i in sorted(range(len(self.numbers)), key=self.numbers.__getitem__):
            answer = one(base, final, i)
            if answer is not None:
                found.append(answer)
        return ChangedAnswers.of(found, len(self.numbers), _MOST_ROWS, self.split)

    def _class(self, base: Quality, final: Quality, i: int) -> ChangedAnswer | None:
        """Row ``i`` of a task with one class per row; None where its answer is the same."""
        (label, before), (_, after) = base.classes[i], final.classes[i]
        if before == after:
            return None
        return self._answer(i, [self._name(each) for each in (label, before, after)])

    def _graded(self, base: Quality, final: Quality, i: int) -> ChangedAnswer | None:
        """Row ``i`` of another task; None where its answer is the same."""
        if not base.outputs:
            values = [quality.amounts[i] / (quality.counts[i] or 1) for quality in (base, final)]
            texts = ["", *(f"loss {value:.4f}" for value in values)]
            if texts[1] == texts[2]:  # differences that do not show are rounding
                return None
            return self._answer(i, texts, values[1] - values[0])
        first, second = base.outputs[i], final.outputs[i]
        if first == second:
            return None
        worse = _result(base, i) - _result(final, i)
        if isinstance(first, str):
            return self._answer(i, [self.truths[i], first, second], worse)
        if isinstance(first[0], float):
            texts = [f"{number:.4g}" for number in (*first, second[1])]
            if texts[1] == texts[2]:
                return None
            return self._answer(i, texts, worse)
        return self._answer(i, self._changed_words(first, second), worse)

    def _changed_words(self, first: Any, second: Any) -> list[str]:
        """The classes of words whose class changed: the labels, those before, those after."""
        changed = []
        for (label, before), (_, after) in zip(first, second, strict=True):
            if before != after:
                changed.append((label, before, after))
        columns = zip(*changed, strict=True)
        return [", ".join(map(self._name, classes[:_MOST_WORDS])) for classes in columns]

    def _answer(self, i: int, texts: Sequence[str], worse: float | None = None) -> ChangedAnswer:
        """Row ``i`` with its label, and the answers before and after."""
        text = _short(self.texts[i]) if self.texts else ""
        label, before, after = map(_short, texts)
        return ChangedAnswer(self.numbers[i], text, label, before, after, worse)

    def _name(self, label: int) -> str:
        return class_name(label, self.names)


def _result(quality: Quality, i: int) -> float:
    """Result of row ``i``, more is better: right words, F1, matched n-grams, minus an error."""
    amount: Any = quality.amounts[i]
    if quality.metric == "bleu":
        return float(sum(amount[:ORDER]))
    # Of Matthews correlation the first number counts right words.
    value = float(amount[0] if isinstance(amount, tuple) else amount)
    return value if is_one_of(quality.metric, POINTS) else -value


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
