"""What a training minimises: the task loss and the distances from the teacher."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.losses import Loss, checked_losses
from headprune.model.running import batch_size, device_of, to_device
from headprune.recovery._distillation import Comparison
from headprune.recovery.finetune import Finetune

HINT = "Lower learning_rate, or look for NaN in the batches."


class Objective(nn.Module):
    """The model with its losses: a batch in, one number to minimise out. The Trainer sees only this.

    Args:
        model: The model.
        loss: Its per-example loss.
        comparison: With its teacher.
        settings: The weights of that.
        before: Steps that were done before it, for messages.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, comparison: Comparison | None, settings: Finetune, before: int
    ) -> None:
        super().__init__()
        self.model = model
        self.weights = {"distillation": settings.distill, "hidden_states": settings.distill_hidden}
        self.outside = (loss, comparison)  # in a tuple: modules, maybe, but no part of what is trained
        self.examples = 0
        self.told: dict[str, list[float]] = {"loss": []}
        self.before = before

    @property
    def steps(self) -> int:
        """Batches that it has seen."""
        return len(self.told["loss"])

    def metrics(self, length: int) -> dict[str, Any]:
        """Steps, and means over the last pass of ``length`` batches."""
        last = min(length, self.steps)
        return {"steps": self.steps, **{name: sum(values[-last:]) / last for name, values in self.told.items()}}

    def forward(self, batch: Any) -> Tensor:
        step = self.before + self.steps + 1
        batch = to_device(batch, device_of(self.model))
        loss, comparison = self.outside
        try:
            with comparison.listening() if comparison is not None else nullcontext():
                losses = checked_losses(loss, self.model, batch, step - 1)
        except InvalidValue as error:
            raise InvalidValue(f"step {step}: {error.where}", error.must, error.got, f"{error.hint} {HINT}") from None
        total = losses.mean()
        self.told["loss"].append(total.item())
        self.examples += batch_size(batch)
        for name, gap in (comparison.gaps() if comparison is not None else {}).items():
            self.told.setdefault(name, []).append(gap.item())
            total = total + self.weights[name] * gap.to(total)
            if not math.isfinite(total.item()):
                what = {"distillation": "the distillation loss", "hidden_states": "the distance of hidden states"}[name]
                raise InvalidValue(f"step {step}: {what}", "finite", gap.item(), HINT)
        return total
