"""Attention of a model that is not taken: what it is, why, and the note that scores and plans of
the rest carry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: How the note begins, by which a plan finds it among the notes of its scores.
_BEGINS = "Not every attention is taken: "
_SHOWN = 4


@dataclass(frozen=True)
class NotTaken:
    """Attention modules of one class that no layout takes, for one reason.

    Args:
        modules: Their qualified names; empty is the model itself.
        kind: Their class.
        reason: What they lack for the layout that is nearest.
    """

    modules: tuple[str, ...]
    kind: str
    reason: str

    def __str__(self) -> str:
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return f"{self.modules[0] or 'the model itself'}{more} ({self.kind}; {self.reason})"


def coverage_note(missed: tuple[NotTaken, ...]) -> tuple[str, ...]:
    """The note of what is said about a model that is taken in part; none where all of it is.

    >>> coverage_note((NotTaken(("vision.0", "vision.1"), "Odd", "it has no 'q_proj'"),))[
    ...     0
    ... ].partition(". ")[0]
    "Not every attention is taken: vision.0 and 1 more (Odd; it has no 'q_proj')"
    """
    if not missed:
        return ()
    more = f"; and {len(missed) - _SHOWN} more kinds" if len(missed) > _SHOWN else ""
    shown = "; ".join(map(str, missed[:_SHOWN]))
    return (f"{_BEGINS}{shown}{more}. The heads there are neither scored nor cut.",)


def coverage_notes(notes: Iterable[str]) -> tuple[str, ...]:
    """Those of some notes that say what is not taken."""
    return tuple(note for note in notes if note.startswith(_BEGINS))
