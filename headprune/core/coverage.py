"""Attention and feed-forwards that no layout matches, and the notes about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Beginnings of the notes; a plan finds the notes among those of its scores by them.
_ATTENTION = "Attention that no layout matches: "
_FEED_FORWARDS = "Feed-forwards that no layout matches: "
#: Of notes that earlier versions stored.
_EARLIER = "Not every attention is taken: "
#: Classes that a note names.
_SHOWN = 4


@dataclass(frozen=True)
class NotTaken:
    """Attention or feed-forwards of one class that no layout matches, for one reason.

    Args:
        modules: Their qualified names; an empty name is the model itself.
        kind: Their class.
        reason: What they lack for the nearest layout.
        is_feed_forward: Whether they are feed-forwards.
    """

    modules: tuple[str, ...]
    kind: str
    reason: str
    is_feed_forward: bool = False

    def __str__(self) -> str:
        name = self.modules[0] or "the model itself"
        if len(self.modules) > 1:
            name += f" and {len(self.modules) - 1} more"
        return f"{name} ({self.kind}; {self.reason})"


def coverage_note(missed: tuple[NotTaken, ...]) -> tuple[str, ...]:
    """Make the notes about a model that is supported in part; none where all of it is.

    >>> coverage_note((NotTaken(("vision.0", "vision.1"), "Odd", "it has no 'q_proj'"),))[
    ...     0
    ... ].partition(". ")[0]
    "Attention that no layout matches: vision.0 and 1 more (Odd; it has no 'q_proj')"
    """
    attention = [group for group in missed if not group.is_feed_forward]
    feed_forwards = [group for group in missed if group.is_feed_forward]
    notes = []
    if attention:
        notes.append(
            f"{_ATTENTION}{_listed(attention)}. The heads there are neither scored nor cut."
        )
    if feed_forwards:
        listed = _listed(feed_forwards)
        notes.append(f"{_FEED_FORWARDS}{listed}. The neurons there are neither scored nor cut.")
    return tuple(notes)


def _listed(groups: list[NotTaken]) -> str:
    shown = "; ".join(map(str, groups[:_SHOWN]))
    if len(groups) > _SHOWN:
        shown += f"; and {len(groups) - _SHOWN} more kinds"
    return shown


def coverage_notes(notes: Iterable[str]) -> tuple[str, ...]:
    """Select the notes about attention and feed-forwards that are not supported."""
    beginnings = (_ATTENTION, _FEED_FORWARDS, _EARLIER)
    return tuple(note for note in notes if note.startswith(beginnings))
