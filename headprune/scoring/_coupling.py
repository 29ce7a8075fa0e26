"""Losses of an example that depend on other examples of the batch, found by two weighted sums.

Scorers give every example gates of its own, and take the slopes of the summed losses in them. These
are the slopes of each loss in its own example's gates, as long as no loss depends on another
example. A contrastive loss does, and so does one with statistics of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.model.transfers import sent
from headprune.scoring._base import Estimate, ScoringProblem
from headprune.scoring._flat import rounding, types_of
from headprune.scoring._gates import Slopes

NOTE = (
    "The loss of an example depends on the others of its batch: each example took a backward pass"
    " of its own, and the scores hold for these batches only."
)
_HINT = (
    "Take taylor, fisher, integrated_gradients or leave_one_out, which are right for such losses."
)
#: The numbers of an example that may depend on other examples.
Numbers: TypeAlias = Literal["losses", "outputs"]
LOSSES: Literal["losses"] = "losses"
OUTPUTS: Literal["outputs"] = "outputs"
#: How errors call these numbers.
_WORDS = {LOSSES: "the loss", OUTPUTS: "the model's output"}

#: Batches that are tested after the first.
_TESTED = tuple(2 * 4**n for n in range(12))
#: A dependence on other examples that makes a smaller share of the slopes is rounding.
_SHARE = 1e-2
#: The largest power of two that losses are multiplied with, and in fp16, which would overflow.
_POWER, _POWER_FP16 = 63, 3


@dataclass
class Coupling:
    """What is known about one kind of numbers.

    Args:
        is_coupled: Whether they depend on other examples of their batch; None until a batch of
            several examples was tested.
        n_batches: Batches of several examples so far.
        last: The last of them, as the user gave it.
    """

    is_coupled: bool | None = None
    n_batches: int = 0
    last: Any = None


@dataclass
class Couplings:
    """What is known about the losses and the model's outputs of a call."""

    losses: Coupling = field(default_factory=Coupling)
    outputs: Coupling = field(default_factory=Coupling)

    def of(self, numbers: Numbers) -> Coupling:
        """What is known about these numbers."""
        return self.losses if numbers == LOSSES else self.outputs

    def copy(self) -> Couplings:
        """The same, to be changed apart."""
        return Couplings(replace(self.losses), replace(self.outputs))


def losses_are_coupled(problem: ScoringProblem) -> bool:
    """Whether losses that depend on other examples of their batch were found."""
    return bool(problem.shared.of(Couplings).losses.is_coupled)


def remember_coupled_losses(problem: ScoringProblem) -> None:
    """Take the losses for coupled, without a test."""
    problem.shared.of(Couplings).losses.is_coupled = True


def coupled(
    problem: ScoringProblem,
    of: Tensor,
    slopes: Slopes,
    together: list[Tensor] | None = None,
    numbers: Numbers = LOSSES,
) -> bool:
    """Test whether a number of one example depends on another example of its batch.

    The first batch is tested. A loss may couple examples in some batches alone, as one does that
    looks for pairs of a class: so batches 2, 8, 32 and so on are tested too, where that does not
    wait for an accelerator.

    Args:
        problem: The problem.
        of: ``[examples]``, the losses or outputs.
        slopes: Their slopes. For coupled numbers they are asked once per example.
        together: The slopes of their plain sum, if they are known.
        numbers: What the numbers are.

    Raises:
        InvalidValue: numbers of a later batch are coupled, and those before were not.
    """
    state = problem.shared.of(Couplings).of(numbers)
    before = state.is_coupled
    # Coupled numbers remain coupled, and most batches are not tested.
    if before or not asks(problem, len(of), of.device, numbers):
        return bool(before)
    with torch.no_grad():
        depend = _depends_on_others(problem, of, slopes, together)
    if depend and before is False:
        must = "dependent on other examples of its batch from the first batch on, or never"
        got = "a dependence that first appears in a later batch"
        hint = "Put such a batch first, use larger batches, or take leave_one_out."
        raise InvalidValue(_WORDS[numbers], must, got, hint)
    if before is None:
        state.is_coupled = depend
        state.n_batches, state.last = 1, problem.given
    return depend


def asks(
    problem: ScoringProblem, n_examples: int, device: torch.device, numbers: Numbers = LOSSES
) -> bool:
    """Whether ``coupled`` will ask for slopes of other sums in the batch that runs.

    The graph of the batch must then be kept.
    """
    state = problem.shared.of(Couplings).of(numbers)
    # A single example has no others to depend on.
    if state.is_coupled or n_examples < 2:
        return bool(state.is_coupled)
    if state.is_coupled is None:
        return True
    return device.type == "cpu" and _place(problem, state) in _TESTED


def _place(problem: ScoringProblem, state: Coupling) -> int:
    """The number of the batch that runs, from 1, among those of several examples."""
    # Scorers may ask several times about one batch.
    if problem.given is not state.last:
        state.n_batches += 1
        state.last = problem.given
    return state.n_batches


def alone(of: Tensor, slopes: Slopes) -> list[Tensor]:
    """``[examples, ...]`` per site: the slope of each number in gates that all examples share."""

    def shared_slopes(one: Tensor) -> list[Tensor]:
        # Summed here, because the slopes of all examples would take examples ** 2 rows.
        return [of_site.sum(0) for of_site in slopes(one)]

    rows = [shared_slopes(one) for one in _each(of)]
    return [torch.stack(of_site) for of_site in zip(*rows, strict=True)]


def refuse_coupled(problem: ScoringProblem, scorer: str, numbers: Numbers = LOSSES) -> None:
    """Refuse coupled numbers, for a scorer that has no use for them.

    Raises:
        InvalidValue: always.
    """
    must = f"independent of the other examples of its batch, for {scorer}"
    got = "one that depends on them"
    hint = "Take leave_one_out, or a scorer without a loss, such as wanda."
    if numbers == LOSSES:
        hint = _HINT
    raise InvalidValue(_WORDS[numbers], must, got, hint)


def noted(problem: ScoringProblem, estimate: Estimate) -> Estimate:
    """The estimate with a note where any process found coupled losses; all processes must ask."""
    own = (NOTE,) if losses_are_coupled(problem) else ()
    notes = problem.workers.united(own)
    return replace(estimate, notes=(*estimate.notes, *notes))


def _depends_on_others(
    problem: ScoringProblem, of: Tensor, slopes: Slopes, together: list[Tensor] | None
) -> bool:
    """Whether a number depends on another example.

    Numbers that depend on their own example alone have slopes that follow their weights in a sum.
    All weights are powers of two, so that this is exact but for sums that an accelerator adds up in
    any order.
    """
    share = min(_SHARE, rounding(problem) ** 0.5)
    if together is None:
        together = slopes(torch.ones_like(of))
    # 1. Do the slopes follow the weights?
    follow = True
    for weights in _weights(problem, of):
        if bool(_differs(weights, slopes(weights), together, share)):
            follow = False
            break
    if follow:
        return False
    # 2. If not: does a number alone have a slope in the gates of another example?
    return any(bool(_beyond(row, slopes(one), share)) for row, one in enumerate(_each(of)))


def _each(of: Tensor) -> list[Tensor]:
    """Weights ``[examples]`` for every example: 1 for itself."""
    return list(torch.eye(len(of), dtype=of.dtype, device=of.device))


def _weights(problem: ScoringProblem, of: Tensor) -> list[Tensor]:
    """Weights ``[examples]``, once or more: any two examples differ in one of them."""
    is_fp16 = torch.float16 in {of.dtype, *types_of(problem)}
    power = _POWER_FP16 if is_fp16 else _POWER
    levels = []
    for exponent in sorted(range(-power, power + 1), key=abs):
        levels += [2.0**exponent, -(2.0**exponent)]
    # Write the number of each example in base len(levels): one digit per tensor of weights. With
    # the levels 1, -1 and 2, examples 0 to 3 get [1, -1, 2, 1] and [1, 1, 1, -1].
    weights = []
    step = 1
    while step < len(of):
        digits = [example // step % len(levels) for example in range(len(of))]
        weights.append(sent([levels[digit] for digit in digits], of.device, of.dtype))
        step *= len(levels)
    return weights


def _differs(
    weights: Tensor, slopes: Sequence[Tensor], together: Sequence[Tensor], share: float
) -> Tensor:
    """Whether slopes of a weighted sum differ from weighted slopes of the plain sum, at any
    example."""
    difference = weights.new_zeros(len(weights))  # [examples], the largest of all sites
    size = weights.new_zeros(len(weights))
    for weighted, plain in zip(slopes, together, strict=True):
        expected = plain.flatten(1)  # [examples, numbers]
        by = weights.to(expected.device, expected.dtype).unsqueeze(1)
        got = weighted.flatten(1) / by
        difference = torch.maximum(difference, _largest(got - expected, difference))
        size = torch.maximum(size, torch.maximum(_largest(got, size), _largest(expected, size)))
    return ((difference > share * size) | ~difference.isfinite()).any()


def _beyond(row: int, slopes: Sequence[Tensor], share: float) -> Tensor:
    """Whether the slopes of one example's number reach beyond the example."""
    size = torch.zeros(0)  # [examples], the largest of all sites
    for site in slopes:
        here = _largest(site.flatten(1), site)
        size = torch.maximum(size, here.to(size)) if len(size) else here
    others = torch.cat([size[:row], size[row + 1 :]])
    return others.max() > share * size.max()


def _largest(x: Tensor, like: Tensor) -> Tensor:
    """``[examples]``, the largest absolute value of each row."""
    largest = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))
    return largest.to(like.device, like.dtype)
