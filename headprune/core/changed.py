"""ChangedAnswers: the test rows to which the cut model gives another class, with their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headprune.core.codec import Value


@dataclass(frozen=True)
class ChangedAnswer:
    """One row.

    Args:
        row: Its number among the test rows.
        text: What the model reads; empty for images and sound.
        label: Its class.
        before: The class by the uncut model.
        after: The class by the final model.
    """

    row: int
    text: str
    label: str
    before: str
    after: str

    @property
    def lost(self) -> bool:
        """Whether the answer was right and is wrong now."""
        return self.before == self.label

    @property
    def gained(self) -> bool:
        """Whether the answer was wrong and is right now."""
        return self.after == self.label


@dataclass(frozen=True)
class ChangedAnswers(Value):
    """The rows whose answer changed.

    Args:
        n_examples: Test rows.
        n_lost: Answers that were right and are wrong now.
        n_gained: Answers that were wrong and are right now.
        n_other: Answers that changed from one wrong class to another.
        rows: The first of them: lost ones, then gained ones, then the others.
    """

    n_examples: int
    n_lost: int
    n_gained: int
    n_other: int
    rows: tuple[ChangedAnswer, ...] = ()

    @classmethod
    def of(cls, changed: Sequence[ChangedAnswer], n_examples: int, most: int) -> ChangedAnswers:
        """Count all changed rows, and keep the first ``most`` of them."""
        lost = [one for one in changed if one.lost]
        gained = [one for one in changed if one.gained]
        other = [one for one in changed if not one.lost and not one.gained]
        rows = (*lost, *gained, *other)[:most]
        return cls(n_examples, len(lost), len(gained), len(other), rows)

    @property
    def n_changed(self) -> int:
        """All rows whose answer changed."""
        return self.n_lost + self.n_gained + self.n_other

    @property
    def title(self) -> str:
        if not self.n_changed:
            return f"None of {self.n_examples:,} test rows changed its answer."
        return (
            f"{self.n_changed:,} of {self.n_examples:,} test rows changed their answer: right"
            f" before and wrong now {self.n_lost:,}, wrong before and right now {self.n_gained:,},"
            f" wrong both times {self.n_other:,}."
        )
