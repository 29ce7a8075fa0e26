"""Losses of which one depends on other examples of the batch: found on the first batch by two sums
of them.

Scorers give every example gates of its own, and take the slopes of the summed losses in them: those
of each loss in its own example's gates, as long as no loss depends on another example. A
contrastive loss does, and so does one with statistics of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.model.transfers import sent
from headprune.scoring._base import Estimate, ScoringProblem
from headprune.scoring._flat import rounding, types_of

#: ``weights [examples] -> [[examples, ...]]``: slopes of the weighted sum of the losses, of each
#: site by example.
Slopes: TypeAlias = Callable[[Tensor], list[Tensor]]

NOTE = (
    "The loss of an example depends on the others of its batch: the slopes of each example had a"
    " backward pass of their own, and the scores are those for batches as they were given."
)
_HINT = (
    "Take taylor, fisher, integrated_gradients or leave_one_out, which are right for such losses."
)
#: Where a problem keeps whether its losses, and its model's outputs, are coupled.
LOSSES, OUTPUTS = "coupled losses", "coupled outputs"
#: By those, where it keeps how many batches there were, and the last one.
BATCHES = {LOSSES: "batches of losses", OUTPUTS: "batches of outputs"}
#: Batches that are looked at after the first.
_LOOKS = tuple(2 * 4**n for n in range(12))
#: Dependence on other examples that makes a smaller share of the slopes is rounding.
_SHARE = 1e-2
#: The largest power of two that losses are multiplied with, and in fp16, which would overflow.
_POWER, _POWER_FP16 = 63, 3


def coupled(
    problem: ScoringProblem,
    of: Tensor,
    slopes: Slopes,
    together: list[Tensor] | None = None,
    key: str = LOSSES,
) -> bool:
    """Whether a number of one example depends on another example of its batch.

    That is found out on the first batch. A loss may couple examples in some batches alone, as one
    does that looks for pairs of a class: so batches 2, 8, 32 and so on are looked at again, where a
    look does not wait for an accelerator.

    Numbers that depend on their own example alone have slopes that follow their weights in a sum:
    all weights are powers of two, up or down, so that this is exact but for sums that an
    accelerator adds up in any order. Where slopes do not follow, every number is asked alone: does
    it have a slope in the gates of another example?

    Args:
        problem: The problem.
        of: ``[examples]``, the numbers: losses, or outputs.
        slopes: Their slopes; asked once more for as many examples as there are where something is
            found.
        together: The slopes of their plain sum, if they are known.
        key: What the numbers are.

    Raises:
        InvalidValue: numbers of a later batch are coupled, and those before were not.
    """
    known = problem.shared.get(key)
    if known or not asks(problem, len(of), of.device, key):
        return bool(known)
    with torch.no_grad():
        share = min(_SHARE, rounding(problem) ** 0.5)
        together = slopes(torch.ones_like(of)) if together is None else together
        found = any(
            bool(_follows_not(weights, slopes(weights), together, share))
            for weights in _weights(problem, of)
        )
        found = found and any(
            bool(_beyond(row, slopes(one), share)) for row, one in enumerate(_each(of))
        )
    if found and known is False:
        what = "the loss" if key == LOSSES else "the model's output"
        must = "one whose examples depend on each other in the first batch, too, or in none"
        got = "examples that depend on others of their batch in a later batch alone"
        hint = "Put a batch first in which they do, or larger batches; or take leave_one_out."
        raise InvalidValue(what, must, got, hint)
    if known is None:
        problem.shared |= {key: found, BATCHES[key]: (1, problem.given)}
    return found


def asks(problem: ScoringProblem, n_examples: int, device: torch.device, key: str = LOSSES) -> bool:
    """Whether ``coupled`` will ask for slopes of other sums in the batch that runs, which then
    needs its graph."""
    known = problem.shared.get(key)
    if known or n_examples < 2:
        return bool(known)
    return known is None or (device.type == "cpu" and _place(problem, key) in _LOOKS)


def _place(problem: ScoringProblem, key: str) -> int:
    """The number of the batch that runs, from 1, among those that were asked for."""
    count, last = problem.shared[BATCHES[key]]
    if problem.given is not last:
        count += 1
        problem.shared[BATCHES[key]] = count, problem.given
    place: int = count
    return place


def alone(of: Tensor, slopes: Slopes) -> list[Tensor]:
    """``[examples, ...]`` of each site: the slope of each number in gates that all examples
    share."""
    rows = [[site.sum(0) for site in slopes(one)] for one in _each(of)]
    return [torch.stack(of_site) for of_site in zip(*rows, strict=True)]


def refuse_coupled(problem: ScoringProblem, scorer: str, key: str = LOSSES) -> None:
    """Refuses numbers that were found to be coupled, for a scorer that has no use for them.

    Raises:
        InvalidValue: always.
    """
    what = "the loss" if key == LOSSES else "the model's output"
    must = f"of each example one that depends on that example alone, for {scorer}"
    hint = (
        _HINT if key == LOSSES else "Take leave_one_out, or a scorer without a loss, such as wanda."
    )
    raise InvalidValue(
        what, must, "of some examples one that depends on others of their batch", hint
    )


def noted(problem: ScoringProblem, estimate: Estimate) -> Estimate:
    """The estimate with a note where losses were found to be coupled, in any of the processes; all
    of them must ask."""
    notes = problem.workers.united((NOTE,) if problem.shared.get(LOSSES) else ())
    return replace(estimate, notes=(*estimate.notes, *notes))


def _each(of: Tensor) -> list[Tensor]:
    """``[examples]`` for every example: 1 for itself."""
    return list(torch.eye(len(of), dtype=of.dtype, device=of.device))


def _weights(problem: ScoringProblem, of: Tensor) -> list[Tensor]:
    """``[examples]`` once or more, so that any two examples have unlike weights in one of them."""
    power = _POWER_FP16 if torch.float16 in {of.dtype, *types_of(problem)} else _POWER
    powers = sorted(range(-power, power + 1), key=abs)
    levels = [sign * 2.0**exponent for exponent in powers for sign in (1, -1)]
    n_levels, step, found = len(levels), 1, []
    while step < len(of):  # a digit of the example's number after the other
        digits = [example // step % n_levels for example in range(len(of))]
        found.append(sent([levels[digit] for digit in digits], of.device, of.dtype))
        step *= n_levels
    return found


def _follows_not(
    weights: Tensor, found: Sequence[Tensor], together: Sequence[Tensor], share: float
) -> Tensor:
    """Whether slopes of a weighted sum are others than weighted slopes of the plain sum, at any
    example."""
    apart, size = weights.new_zeros(len(weights)), weights.new_zeros(len(weights))
    for weighted, plain in zip(found, together, strict=True):
        expected = plain.flatten(1)
        by = weights.to(expected.device, expected.dtype).unsqueeze(1)
        got = weighted.flatten(1) / by
        apart = torch.maximum(apart, _largest(got - expected, apart))
        size = torch.maximum(size, torch.maximum(_largest(got, size), _largest(expected, size)))
    return ((apart > share * size) | ~apart.isfinite()).any()


def _beyond(row: int, found: Sequence[Tensor], share: float) -> Tensor:
    """Whether the slopes of one example's number reach beyond the example."""
    size = torch.zeros(0)
    for site in found:
        here = _largest(site.flatten(1), site)
        size = here if not len(size) else torch.maximum(size, here.to(size))
    others = torch.cat([size[:row], size[row + 1 :]]).max()
    return others > share * size.max()


def _largest(x: Tensor, like: Tensor) -> Tensor:
    """``[examples]``, the largest absolute value of each row."""
    return (x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))).to(like.device, like.dtype)
