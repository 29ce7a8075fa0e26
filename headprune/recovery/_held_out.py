"""Chooses how far a projection is refitted, by the error on examples that a fit has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from headprune.recovery._least_squares import Normal

#: Of so many examples one is held out.
EVERY = 4
#: Ridges that are compared, the most cautious first.
RIDGES = (30.0, 3.0, 0.3, 0.03, 0.01)
#: The ridge where no example can be held out.
FALLBACK = 0.3
NO_CHANGE = "no change"
BIAS_ALONE = "bias alone"

#: A ridge, or ``NO_CHANGE`` or ``BIAS_ALONE`` in place of an infinite ridge.
Choice: TypeAlias = float | str


def choices(intercept: bool, width: int) -> list[Choice]:
    """Return what is compared for a projection of this input width, the most cautious first."""
    compared: list[Choice] = [NO_CHANGE]
    if intercept:
        compared.append(BIAS_ALONE)
    if width:
        compared += RIDGES
    return compared


def is_held_out(examples: Tensor) -> Tensor:
    """Return whether each example is held out, by its number; a fit sees the others.

    It is one of every four, at a place that looks random, so that both parts have examples of each
    class where classes alternate. Of two examples it is the first one.

    >>> is_held_out(torch.arange(12)).nonzero().flatten().tolist()
    [0, 7, 8]
    """
    # A hash of the group's number, in 32 bits: two rounds mix all bits into the lowest ones.
    mixed = examples // EVERY
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    place = (mixed ^ (mixed >> 16)) % EVERY
    return examples % EVERY == place


def held_out_errors(
    rest: Normal, held: Normal, right: Callable[[Normal, float], Tensor], intercept: bool
) -> Tensor:
    """Compute the squared error of held-out data under fits to the rest.

    Args:
        rest: Sums that are fitted.
        held: Sums of the others.
        right: Returns the right side of the normal equations for a ridge, ``[in, out]``.
        intercept: Whether the bias is fitted, too.

    Returns:
        ``[choices]``, in the order of ``choices``.
    """
    # fp32 is precise enough to compare: with a ridge of 0.01 a matrix of 1,536 channels has a
    # condition number of at most 153,600.
    rest, held = rest.to(torch.float32), held.to(torch.float32)
    no_weight, no_bias = torch.zeros_like(rest.xe), torch.zeros_like(rest.e_mean)
    errors = [held.remaining_error(no_weight, no_bias)]
    if intercept:
        errors.append(held.remaining_error(no_weight, rest.e_mean))
    if len(rest.xx):
        errors += _ridge_errors(held, rest, right, intercept)
    return torch.stack(errors)


def _ridge_errors(
    held: Normal, rest: Normal, right: Callable[[Normal, float], Tensor], intercept: bool
) -> list[Tensor]:
    """Return the errors of held-out data under the fits of all ridges to the rest, ``[]`` each."""
    fitted = rest if intercept else rest.uncentred()
    errors = []
    for ridge in RIDGES:
        weight, failed = _solution(fitted.xx, right(fitted, ridge), ridge)
        bias = torch.zeros_like(rest.e_mean)
        if intercept:
            bias = rest.e_mean - rest.x_mean @ weight
        error = held.remaining_error(weight, bias)
        errors.append(torch.where(failed == 0, error, torch.full_like(error, math.inf)))
    return errors


def best(errors: Sequence[float], compared: Sequence[Choice]) -> Choice:
    """Return the choice with the least error; the more cautious of two that are equal."""
    lowest, chosen = math.inf, compared[0]
    for error, choice in zip(errors, compared, strict=True):
        if math.isfinite(error) and error < lowest:
            lowest, chosen = error, choice
    return chosen


def _solution(matrix: Tensor, right: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Solve as ``solved`` does, but return a flag that Python need not wait for."""
    regularized = matrix.clone()
    regularized.diagonal().add_(ridge * matrix.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(regularized)
    return torch.cholesky_solve(right, factor), failed


def notes(
    chosen: dict[str, Choice],
    tokens: dict[str, tuple[int, int]],
    examples: int,
    undivided: Sequence[str] = (),
) -> list[str]:
    """Return notes for the user about the choices and about too few examples.

    Args:
        chosen: The choices by projection; empty where the ridge was given.
        tokens: By projection how many tokens it was fitted to, and how many numbers were fitted
            per output channel.
        examples: The number of examples that the tokens belong to.
        undivided: Projections that have no tokens in one of the two parts.
    """
    lines = []
    if undivided:
        lines.append(
            f"No examples could be held out to choose a ridge, so {FALLBACK} was used:"
            f" {', '.join(undivided)}."
        )
    unchanged = [name for name, choice in chosen.items() if choice == NO_CHANGE]
    if unchanged:
        lines.append(
            "Not refitted, because no refit lowered the error on held-out examples:"
            f" {', '.join(unchanged)}."
        )
    # A choice by held-out error wants two tokens per number; a fit with a given ridge wants one.
    least = 2 if chosen else 1
    few = {name: pair for name, pair in tokens.items() if pair[0] < least * pair[1]}
    if few:
        name = min(few, key=lambda name: few[name][0] / few[name][1])
        n_tokens, n_fitted = few[name]
        enough = math.ceil(2 * n_fitted * examples / max(n_tokens, 1))
        lines.append(
            f"Few examples for {len(few)} of {len(tokens)} projections: {name} fits {n_fitted}"
            f" numbers per output channel to {n_tokens} tokens. Use about {enough} examples, not"
            f" {examples}, for two tokens per number."
        )
    return lines
