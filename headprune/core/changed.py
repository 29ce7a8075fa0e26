"""ChangedAnswers: the test rows that the cut model answers in another way, with their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headprune.core.codec import LATER, Value


@dataclass(frozen=True)
class ChangedAnswer:
    """One row.

    Args:
        row: Its number among the rows that ``ChangedAnswers.split`` names, from 1.
        text: What the model reads; empty for images and sound.
        label: Its class, or another true answer; empty where there is none.
        before: The answer by the uncut model.
        after: The answer by the final model.
        worse: How much worse its result is now, below 0 where it is better; None where an answer is
            right or wrong.
    """

    row: int
    text: str
    label: str
    before: str
    after: str
    worse: float | None = field(default=None, metadata=LATER)

    @property
    def lost(self) -> bool:
        """Whether the answer was right and is wrong now, or is worse now."""
        return self.before == self.label if self.worse is None else self.worse > 0

    @property
    def gained(self) -> bool:
        """Whether the answer was wrong and is right now, or is better now."""
        return self.after == self.label if self.worse is None else self.worse < 0

    @property
    def fate(self) -> str:
        """What became of it, in a word or two."""
        if self.worse is None:
            return "lost" if self.lost else "gained" if self.gained else "wrong both times"
        return "worse" if self.lost else "better" if self.gained else "as good"


@dataclass(frozen=True)
class ChangedAnswers(Value):
    """The rows whose answer changed.

    Args:
        n_examples: Test rows.
        n_lost: Answers that were right and are wrong now, or that are worse now.
        n_gained: Answers that were wrong and are right now, or that are better now.
        n_other: Answers that changed and are as good as before.
        rows: The first of them: lost ones, then gained ones, then the others; where answers are not
            just right or wrong, the largest changes.
        split: The split whose rows ``row`` counts; empty in older files, where it counts test rows
            from 0.
        graded: Whether answers are better or worse, and not just right or wrong.
    """

    n_examples: int
    n_lost: int
    n_gained: int
    n_other: int
    rows: tuple[ChangedAnswer, ...] = ()
    split: str = field(default="", metadata=LATER)
    graded: bool = field(default=False, metadata=LATER)

    @classmethod
    def of(
        cls, changed: Sequence[ChangedAnswer], n_examples: int, most: int, split: str = ""
    ) -> ChangedAnswers:
        """Count all changed rows, and keep the first ``most`` of them."""
        lost = [one for one in changed if one.lost]
        gained = [one for one in changed if one.gained]
        other = [one for one in changed if not one.lost and not one.gained]
        rows = [*lost, *gained, *other]
        graded = any(one.worse is not None for one in rows)
        if graded:
            rows.sort(key=lambda one: -abs(one.worse or 0.0))
        counts = (len(lost), len(gained), len(other))
        return cls(n_examples, *counts, tuple(rows[:most]), split, graded)

    @property
    def n_changed(self) -> int:
        """All rows whose answer changed."""
        return self.n_lost + self.n_gained + self.n_other

    @property
    def title(self) -> str:
        if not self.n_changed:
            return f"None of {self.n_examples:,} test rows changed its answer."
        start = f"{self.n_changed:,} of {self.n_examples:,} test rows changed their answer"
        if self.graded:
            return (
                f"{start}: worse now {self.n_lost:,}, better now {self.n_gained:,}, as good"
                f" {self.n_other:,}."
            )
        return (
            f"{start}: right before and wrong now {self.n_lost:,}, wrong before and right now"
            f" {self.n_gained:,}, wrong both times {self.n_other:,}."
        )

    @property
    def caption(self) -> str:
        """Which rows are shown, and what their numbers count."""
        words = []
        if len(self.rows) < self.n_changed:
            which = "largest changes" if self.graded else "first"
            words.append(f"The {len(self.rows):,} {which}.")
        if self.split and self.rows:
            words.append(
                f"Rows are numbered from 1 as in split {self.split!r} of the data; a header line"
                " does not count."
            )
        return " ".join(words)
