"""What a training minimises: the task loss and the distances from the teacher."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.judging import Judge
from headprune.model.losses import check_finite, shaped_losses
from headprune.model.running import batch_size, device_of, to_device
from headprune.model.transfers import in_main_memory
from headprune.recovery._distillation import Comparison
from headprune.recovery.finetune import Finetune

HINT = "Lower learning_rate, or look for NaN in the batches."
#: Steps whose numbers are read together at the latest.
_LOOK = 4096


class Objective(nn.Module):
    """The model with its losses: a batch in, one number to minimise out. The Trainer sees only
    this.

    What the steps come to is read after the first one, before the training is judged or kept, and
    at its end: to read a number waits for an accelerator.

    Args:
        model: The model.
        loss: Its per-example loss.
        comparison: With its teacher.
        settings: The weights of that.
        before: Steps that were done before it, for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Judge,
        comparison: Comparison | None,
        settings: Finetune,
        before: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.weights = {"distillation": settings.distill, "hidden_states": settings.distill_hidden}
        self.outside = (
            loss,
            comparison,
        )  # in a tuple: modules, maybe, but no part of what is trained
        self.examples = 0
        self.told: dict[str, list[float]] = {"loss": []}
        self.before = before
        self._unread: list[_Step] = []

    @property
    def steps(self) -> int:
        """Batches that it has seen."""
        return len(self.told["loss"]) + len(self._unread)

    def metrics(self, length: int) -> dict[str, Any]:
        """Steps, and means over the last pass of ``length`` batches."""
        self.read()
        last = min(length, self.steps)
        return {
            "steps": self.steps,
            **{name: sum(values[-last:]) / last for name, values in self.told.items()},
        }

    def forward(self, batch: Any) -> Tensor:
        number = self.before + self.steps
        batch = to_device(batch, device_of(self.model))
        loss, comparison = self.outside
        loss.look(self.model, batch)
        try:
            with comparison.listening() if comparison is not None else nullcontext():
                losses = shaped_losses(loss, self.model, batch, number)
        except InvalidValue as error:
            raise _at_step(number + 1, error) from None
        total = losses.mean()
        step = _Step(number, losses.detach(), total.detach())
        self.examples += batch_size(batch)
        for name, gap in (comparison.gaps() if comparison is not None else {}).items():
            total = total + self.weights[name] * gap.to(total)
            step.gaps[name] = gap.detach()
            step.totals[name] = total.detach()
        self._unread.append(step)
        if number == self.before or len(self._unread) == _LOOK:
            self.read()
        return total

    def read(self) -> None:
        """Reads what the steps since the last call have come to; waits for an accelerator, once for
        all of them.

        Raises:
            InvalidValue: a number that is not finite; the first such step is named.
        """
        unread, self._unread = self._unread, []
        numbers = iter(in_main_memory(number for step in unread for number in step.numbers()))
        for step in unread:
            found = _Step(step.number, next(numbers), next(numbers))
            found.gaps = {name: next(numbers) for name in step.gaps}
            found.totals = {name: next(numbers) for name in step.totals}
            self._tell(found)

    def _tell(self, step: _Step) -> None:
        """Notes the numbers of a step, which are in main memory."""
        try:
            check_finite([(step.number, step.losses)])
        except InvalidValue as error:
            raise _at_step(step.number + 1, error) from None
        self.told["loss"].append(float(step.mean))
        for name, gap in step.gaps.items():
            self.told.setdefault(name, []).append(float(gap))
            if not math.isfinite(float(step.totals[name])):
                what = {
                    "distillation": "the distillation loss",
                    "hidden_states": "the distance of hidden states",
                }[name]
                raise InvalidValue(f"step {step.number + 1}: {what}", "finite", float(gap), HINT)


@dataclass
class _Step:
    """The numbers of one step.

    Args:
        number: Steps before it.
        losses: ``[examples]``.
        mean: ``[]``, their mean.
        gaps: By name the distances from the teacher, ``[]``.
        totals: By name what is minimised, ``[]``, with the distances up to this one.
    """

    number: int
    losses: Tensor
    mean: Tensor
    gaps: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)

    def numbers(self) -> list[Tensor]:
        """All of them, in this order."""
        return [self.losses, self.mean, *self.gaps.values(), *self.totals.values()]


def _at_step(step: int, error: InvalidValue) -> InvalidValue:
    return InvalidValue(
        f"step {step}: {error.where}", error.must, error.got, f"{error.hint} {HINT}"
    )
