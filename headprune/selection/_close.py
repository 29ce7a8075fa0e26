"""Close calls: units on either side of the cut whose scores do not decide which to keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headprune.selection._base import Position, Problem, Selector, words_of
from headprune.selection._feasible_moves import FeasibleMoves, Flags, Floats

#: The most units that are named on each side.
_NAMED = 1
#: Kept units that are compared at once with all removed ones: memory then grows with the units, not
#: with their pairs.
_AT_ONCE = 32


def close_calls(problem: Problem, selector: Selector, keep: frozenset[Position]) -> tuple[str, ...]:
    """A note on units that other examples might have ordered otherwise; empty without any.

    A kept and a removed unit are a close call if they could change sides (the budget and every rule
    hold afterwards, too) and their scores differ by at most the standard error of the difference,
    the root of the sum of both squares. Without standard errors only equal scores are a close call:
    their place decided. A selector that needs more than scores has none; nor has one that reads
    measured prices of levels.
    """
    if selector.needs or (selector.reads_prices and problem.scores.ladders is not None):
        return ()
    moves = FeasibleMoves(problem)
    numbers = {position: number for number, position in enumerate(moves.positions)}
    levels, errors = _levels(problem, selector)
    removed = np.array([position not in keep for position in moves.positions], dtype=bool)
    is_close = _are_close(moves, removed, levels, errors, selector.across)
    if not is_close.any():
        return ()

    # Units of equal level stay in the order of their scores.
    close = []
    for unit in problem.scores.ranked():
        position = (unit.site, unit.unit)
        if is_close[numbers[position]]:
            close.append(position)
    close.sort(key=lambda position: levels[numbers[position]])
    return (_note(problem, close, keep, bool(errors[is_close].any())),)


def _note(
    problem: Problem, close: Sequence[Position], keep: frozenset[Position], have_errors: bool
) -> str:
    """The note as text.

    Args:
        problem: With the units.
        close: Close calls, from the lowest level to the highest.
        keep: The kept units.
        have_errors: Whether any of them has a standard error.
    """
    # Those that nearly changed sides come first: the lowest kept ones, the highest removed ones.
    kept = [position for position in close if position in keep]
    removed = [position for position in reversed(close) if position not in keep]
    verb = "are" if len(kept) > 1 else "is"
    why = "their scores are equal, so place decides"
    if have_errors:
        why = "their scores differ by no more than their standard error"
    return (
        f"Close call: {_names(problem, kept)} {verb} kept, {_names(problem, removed)} removed;"
        f" {why}."
    )


def _levels(problem: Problem, selector: Selector) -> tuple[Floats, Floats]:
    """Scores of all units as the selector compares them, and standard errors: ``[units]`` each."""
    scales = list(map(selector.scale, problem.scores.values))
    levels, errors = [], []
    for unit in problem.scores.units():  # in model order, as the moves number them
        shift, divisor = scales[unit.site]
        levels.append((unit.value - shift) / divisor)
        errors.append((unit.standard_error or 0.0) / divisor)
    return np.array(levels), np.array(errors)


def _are_close(
    moves: FeasibleMoves, removed: Flags, levels: Floats, errors: Floats, across: bool
) -> Flags:
    """Units that are a close call with one of the other side, ``[units]``.

    Args:
        moves: The rules and the budget.
        removed: The plan, ``[units]``.
        levels: Scores as the selector compares them, ``[units]``.
        errors: Their standard errors, ``[units]``.
        across: Whether units of different sites compete.
    """
    all_out, all_back = np.flatnonzero(moves.free & ~removed), np.flatnonzero(moves.free & removed)
    is_close: Flags = np.zeros(len(removed), dtype=bool)
    for start in range(0, len(all_out), _AT_ONCE):
        out, back = all_out[start : start + _AT_ONCE], all_back
        # 1. Compare scores, [out, back]. Few pairs are near.
        apart = np.abs(levels[out][:, None] - levels[back])
        near = apart <= np.hypot(errors[out][:, None], errors[back])
        if not across:
            near &= moves.site[out][:, None] == moves.site[back]
        rows, columns = near.any(1), near.any(0)
        out, back = out[rows], back[columns]
        # 2. Ask the rules and the budget. The last row and column stand for moves of one unit.
        close = near[rows][:, columns] & moves.pairs(out, back, removed)[:-1, :-1]
        is_close[out] |= close.any(1)
        is_close[back] |= close.any(0)
    return is_close


def _names(problem: Problem, positions: Sequence[Position]) -> str:
    """The first few by name, the rest by number."""
    text = ", ".join(words_of(problem.scores, position) for position in positions[:_NAMED])
    more = len(positions) - _NAMED
    if more > 0:
        text += f" and {more} more"
    return text
