"""What a training minimizes: the task loss and the distances from the teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.judging import Judge
from headprune.model.losses import check_finite, shaped_losses
from headprune.model.running import batch_size, device_of, to_device
from headprune.model.transfers import in_main_memory
from headprune.recovery._distillation import Comparison

HINT = "Lower learning_rate, or look for NaN in the batches."
#: The most steps whose numbers are read together.
_MAX_UNREAD = 4096
#: The names of the distances in error texts.
_DISTANCES = {
    "distillation": "the distillation loss",
    "hidden_states": "the distance of hidden states",
}


@dataclass
class _StepNumbers:
    """The numbers of one step.

    Args:
        number: Number of steps before it.
        losses: ``[examples]``.
        mean: Their mean, ``[]``.
        distances: The distances from the teacher by name, ``[]`` each.
        totals: By name what is minimized, up to and with that distance, ``[]`` each.
    """

    number: int
    losses: Tensor
    mean: Tensor
    distances: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Return all numbers, in the order of the fields."""
        return [self.losses, self.mean, *self.distances.values(), *self.totals.values()]


class Objective(nn.Module):
    """The model with its losses: takes a batch, returns the number to minimize.

    The Trainer sees only this. To read a number waits for an accelerator, so the numbers of steps
    are read after the first one, before an evaluation or a checkpoint, and at the end.

    Args:
        model: The model.
        loss: Its per-example loss.
        comparison: The comparison with its teacher.
        weights: The weights of the distances by name.
        before: Number of steps before this training, for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Judge,
        comparison: Comparison | None,
        weights: Mapping[str, float],
        before: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.weights = dict(weights)
        # In a tuple, because a module would otherwise become a part of what is trained.
        self.outside = (loss, comparison)
        self.examples = 0
        self.history: dict[str, list[float]] = {"loss": []}
        self.before = before
        self._unread: list[_StepNumbers] = []

    @property
    def steps(self) -> int:
        """Number of batches so far."""
        return len(self.history["loss"]) + len(self._unread)

    def metrics(self, length: int) -> dict[str, Any]:
        """Return the number of steps, and means over the last pass of ``length`` batches."""
        self.read()
        last = min(length, self.steps)
        means = {name: sum(values[-last:]) / last for name, values in self.history.items()}
        return {"steps": self.steps, **means}

    def forward(self, batch: Any) -> Tensor:
        number = self.before + self.steps
        batch = to_device(batch, device_of(self.model))
        loss, comparison = self.outside

        # 1. The task loss; the comparison records the model's call. The first look at the loss
        # runs the model, too, which must not be recorded.
        loss.look(self.model, batch)
        recording: AbstractContextManager[None] = nullcontext()
        if comparison is not None:
            recording = comparison.listening()
        try:
            with recording:
                losses = shaped_losses(loss, self.model, batch, number)
        except InvalidValue as error:
            raise _at_step(number + 1, error) from None
        total = losses.mean()
        step = _StepNumbers(number, losses.detach(), total.detach())
        self.examples += batch_size(batch)

        # 2. The distances from the teacher.
        if comparison is not None:
            for name, distance in comparison.gaps().items():
                total = total + self.weights[name] * distance.to(total)
                step.distances[name] = distance.detach()
                step.totals[name] = total.detach()

        # 3. The first step is read at once, because most mistakes show there.
        self._unread.append(step)
        if number == self.before or len(self._unread) == _MAX_UNREAD:
            self.read()
        return total

    def read(self) -> None:
        """Read the numbers of all steps since the last call into the history.

        Waits for an accelerator, once for all of them.

        Raises:
            InvalidValue: a number that is not finite; the first such step is named.
        """
        unread, self._unread = self._unread, []
        tensors: list[Tensor] = []
        for step in unread:
            tensors += step.tensors()
        numbers = iter(in_main_memory(tensors))
        for step in unread:
            read = _StepNumbers(step.number, next(numbers), next(numbers))
            read.distances = {name: next(numbers) for name in step.distances}
            read.totals = {name: next(numbers) for name in step.totals}
            self._record(read)

    def _record(self, step: _StepNumbers) -> None:
        """Check the numbers of a step, which are in main memory, and add them to the history."""
        try:
            check_finite([(step.number, step.losses)])
        except InvalidValue as error:
            raise _at_step(step.number + 1, error) from None
        self.history["loss"].append(float(step.mean))
        for name, distance in step.distances.items():
            self.history.setdefault(name, []).append(float(distance))
            if not math.isfinite(float(step.totals[name])):
                where = f"step {step.number + 1}: {_DISTANCES[name]}"
                raise InvalidValue(where, "finite", float(distance), HINT)


def _at_step(step: int, error: InvalidValue) -> InvalidValue:
    hint = f"{error.hint} {HINT}"
    return InvalidValue(f"step {step}: {error.where}", error.must, error.got, hint)
