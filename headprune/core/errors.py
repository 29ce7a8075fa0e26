"""All errors of headprune, in one template: where, what must be, what it got, what to try."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

#: How a warning begins, among lines of progress.
WARNING = "warning: "
#: Characters of the wrong value that a message shows.
_LONGEST = 2000


class HeadPruneError(Exception):
    """Base of all errors of this library; each subclass also derives from the fitting built-in.

    Args:
        where: The argument, file or key at fault.
        must: What it must be.
        got: The wrong value.
        hint: What to try; left out of the message when empty.
    """

    def __init__(self, where: str, must: str, got: object, hint: str = "") -> None:
        self.where, self.must, self.got, self.hint = where, must, got, hint
        super().__init__(where, must, got, hint)

    def __str__(self) -> str:
        got = str(self.got)
        if len(got) > _LONGEST:
            got = f"{got[:_LONGEST]} ..."
        text = f"{self.where}: must be {self.must}, got {got}"
        if self.hint:
            text += f". {self.hint}"
        return text


class InvalidValue(HeadPruneError, ValueError):
    """An argument, a key or a stored value is not what it must be."""


class UnknownName(HeadPruneError, LookupError):
    """A registered name, a site or a head that does not exist."""


class NameClash(HeadPruneError, ValueError):
    """Two entries of a registry claim one name."""


class UnsupportedModel(HeadPruneError, TypeError):
    """The model has no attention that can be gated or cut, or one that would be cut wrongly."""


class PlanMismatch(HeadPruneError, ValueError):
    """A plan or a set of scores was made for a model of another structure."""


class InfeasibleBudget(HeadPruneError, ValueError):
    """No choice of heads meets the budget; the message names the nearest one that can be met."""


class VerificationFailed(HeadPruneError, ArithmeticError):
    """The pruned model does not equal the gated one; the model has been put back as it was."""


class ProcessFailed(HeadPruneError, RuntimeError):
    """Another process that shares the work failed, ended, or did not answer in time."""


class CheckpointError(HeadPruneError, ValueError):
    """A checkpoint folder is damaged, incomplete, or not one of ours."""


class NotWritten(HeadPruneError, OSError):
    """A file could not be written: no disk space, no permission, or no such folder.

    The old file, if there was one, has not changed.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError's own keeps only two of the arguments.
        return type(self), (self.where, self.must, self.got, self.hint)


def error_text(error: BaseException) -> str:
    """The text of an error for a record; those of other packages need their class's name.

    >>> error_text(KeyError("a"))
    "KeyError: 'a'"
    """
    if isinstance(error, HeadPruneError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def reason_of(error: BaseException) -> str:
    """The text of another package's error on one line, cut short; its class where it has none.

    >>> reason_of(ValueError("two\\nlines")), reason_of(KeyboardInterrupt())
    ('two lines', 'KeyboardInterrupt')
    """
    return " ".join(str(error).split())[:300] or type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Make a hint that names the closest known names, or lists them all.

    >>> did_you_mean("tailor", ["taylor", "random"])
    "Did you mean 'taylor'?"
    >>> did_you_mean("xyz", ["taylor", "random"])
    'Known: random, taylor.'
    """
    known = sorted(known)
    close = get_close_matches(name, known, n=2, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    if not known:
        return "None are known."
    return f"Known: {', '.join(known)}."


def check_count(where: str, value: object, least: int = 1) -> None:
    """Refuse everything but a whole number >= ``least``; a bool is none."""
    if type(value) is not int or value < least:
        raise InvalidValue(where, f"a count >= {least}", repr(value))


def check_one_of(where: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not one of the allowed ones."""
    if value not in allowed:
        raise InvalidValue(where, f"one of {', '.join(allowed)}", repr(value))
