"""How far a projection is refitted, chosen by the error on examples that a fit has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from headprune.recovery._least_squares import Normal, pooled

#: Parts of the examples; each is held out once.
FOLDS = 4
#: Ridges that are compared, the most cautious first.
RIDGES = (30.0, 3.0, 0.3, 0.03)
NO_CHANGE = "no change"
BIAS_ALONE = "bias alone"

#: A ridge, or what takes the place of an infinite one.
Choice: TypeAlias = float | str


def choices(intercept: bool, width: int) -> list[Choice]:
    """What is compared for a projection that reads so many channels, the most cautious first."""
    return [NO_CHANGE, *[BIAS_ALONE] * intercept, *(RIDGES if width else ())]


def held_out_errors(
    parts: Sequence[Normal], right: Callable[[Normal, float], Tensor], intercept: bool
) -> Tensor:
    """``[choices]``: the squared error of all parts, each of a fit to the other parts, by moments
    alone.

    Four choices of a ridge and four parts are sixteen factors. They are made in fp32, which is
    enough to compare: with a ridge of 0.03 a matrix of 1,536 channels has a condition number of at
    most 51,200.

    Args:
        parts: Sums of at least two parts of the data.
        right: The right side of the normal equations of a fit with a ridge, ``[in, out]``.
        intercept: Whether the bias is fitted, too.
    """
    totals = []
    parts = [part.to(torch.float32) for part in parts]
    for number, part in enumerate(parts):
        rest = pooled([other for n, other in enumerate(parts) if n != number])
        unchanged, no_bias = torch.zeros_like(rest.xe), torch.zeros_like(rest.e_mean)
        errors = [part.left(unchanged, no_bias)]
        if intercept:
            errors.append(part.left(unchanged, rest.e_mean))
        fitted = rest if intercept else rest.uncentred()
        for ridge in RIDGES if len(rest.xx) else ():
            weight, failed = _solution(fitted.xx, right(fitted, ridge), ridge)
            bias = rest.e_mean - rest.x_mean @ weight if intercept else no_bias
            error = part.left(weight, bias)
            errors.append(torch.where(failed == 0, error, torch.full_like(error, math.inf)))
        totals.append(torch.stack(errors))
    return torch.stack(totals).sum(0)


def best(errors: Sequence[float], of: Sequence[Choice]) -> Choice:
    """The choice with the least error; the more cautious of two that are equal."""
    return min(
        zip(errors, of, strict=True),
        key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf,
    )[1]


def _solution(matrix: Tensor, right: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """See ``solved``; without a look at whether it failed, for which Python would wait."""
    regular = matrix.clone()
    regular.diagonal().add_(ridge * matrix.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(regular)
    return torch.cholesky_solve(right, factor), failed


def notes(
    chosen: dict[str, Choice], tokens: dict[str, tuple[int, int]], examples: int
) -> list[str]:
    """What a user should know of choices.

    Args:
        chosen: By projection.
        tokens: By projection how many tokens it was fitted to, and how many channels it reads.
        examples: How many the tokens are of.
    """
    found = []
    given_up = [name for name, choice in chosen.items() if choice == NO_CHANGE]
    if given_up:
        found.append(
            "Not refitted, for no refit lowered the error on held-out examples:"
            f" {', '.join(given_up)}."
        )
    few = {name: (n, width) for name, (n, width) in tokens.items() if n < 2 * width}
    if few:
        name, (n, width) = min(few.items(), key=lambda item: item[1][0] / item[1][1])
        enough = math.ceil(2 * width * examples / max(n, 1))
        found.append(
            f"Few examples for {len(few)} of {len(tokens)} projections: {name} reads {width}"
            f" channels, and there are {n} tokens to fit it to. {enough} examples in place of"
            f" {examples} would be twice as many tokens as channels."
        )
    return found
