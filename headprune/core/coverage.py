"""Attention modules that no layout matches, and the note about them in scores and plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Beginning of the note; a plan finds the note among those of its scores by it.
_BEGINS = "Attention that no layout matches: "
#: Of notes that earlier versions stored.
_EARLIER = "Not every attention is taken: "
#: Classes that a note names.
_SHOWN = 4


@dataclass(frozen=True)
class NotTaken:
    """Attention modules of one class that no layout matches, for one reason.

    Args:
        modules: Their qualified names; an empty name is the model itself.
        kind: Their class.
        reason: What they lack for the nearest layout.
    """

    modules: tuple[str, ...]
    kind: str
    reason: str

    def __str__(self) -> str:
        name = self.modules[0] or "the model itself"
        if len(self.modules) > 1:
            name += f" and {len(self.modules) - 1} more"
        return f"{name} ({self.kind}; {self.reason})"


def coverage_note(missed: tuple[NotTaken, ...]) -> tuple[str, ...]:
    """Make the note about a model that is supported in part; none where all of it is.

    >>> coverage_note((NotTaken(("vision.0", "vision.1"), "Odd", "it has no 'q_proj'"),))[
    ...     0
    ... ].partition(". ")[0]
    "Attention that no layout matches: vision.0 and 1 more (Odd; it has no 'q_proj')"
    """
    if not missed:
        return ()
    shown = "; ".join(map(str, missed[:_SHOWN]))
    if len(missed) > _SHOWN:
        shown += f"; and {len(missed) - _SHOWN} more kinds"
    return (f"{_BEGINS}{shown}. The heads there are neither scored nor cut.",)


def coverage_notes(notes: Iterable[str]) -> tuple[str, ...]:
    """Select the notes about attention that is not supported."""
    return tuple(note for note in notes if note.startswith((_BEGINS, _EARLIER)))
