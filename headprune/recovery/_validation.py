"""Early stopping by the mean validation loss, with the weights of the lowest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.batches import Batches
from headprune.model.losses import Loss, check_finite, shaped_losses
from headprune.model.mistakes import explained
from headprune.model.running import device_of, to_device, undisturbed, without_fused_attention
from headprune.model.transfers import copies, in_main_memory
from headprune.recovery._checkpoint import load_weights_, weights
from headprune.recovery._traces import random_states, set_random_states


class EarlyStopping:
    """Judges a training by its validation loss.

    Args:
        model: The model.
        loss: Per-example loss.
        batches: Validation data, read at every evaluation.
        patience: Stop after this many evaluations without a lower loss; None never stops.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, batches: Iterable[Any], patience: int | None
    ) -> None:
        self.model = model
        self.loss = loss
        self.batches = Batches.of(batches)
        self.patience = patience
        self.losses: list[tuple[int, float]] = []  # step, loss
        self.best_step = 0
        self.best: dict[str, Tensor] = {}

    def evaluate(self, step: int) -> bool:
        """Evaluate after a step; return whether the training should stop."""
        value = mean_loss(self.model, self.batches, self.loss, f"validation after step {step}")
        if not self.losses or value < self.lowest:
            self.best_step = step
            # Copies, because the training goes on to change the weights in place.
            best = weights(self.model)
            self.best = dict(zip(best, copies(best.values()), strict=True))
        self.losses.append((step, value))
        n_since_best = sum(at > self.best_step for at, _ in self.losses)
        return self.patience is not None and n_since_best >= self.patience

    @property
    def lowest(self) -> float:
        """The lowest validation loss so far."""
        return min(value for _, value in self.losses)

    def restore_(self) -> dict[str, Any]:
        """Give the model its best weights; return the metrics of the validation."""
        load_weights_(self.model, self.best)
        return {
            "best_step": self.best_step,
            "validation_loss": self.lowest,
            "validation_loss_before": self.losses[0][1],
            "evaluations": len(self.losses),
        }

    def state(self) -> dict[str, Any]:
        """Return what ``continue_from`` needs."""
        return {"losses": list(self.losses), "best_step": self.best_step, "best": self.best}

    def continue_from(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        self.losses = list(state["losses"])
        self.best_step = state["best_step"]
        self.best = state["best"]


def mean_loss(model: nn.Module, batches: Iterable[Any], loss: Loss, where: str) -> float:
    """Compute the mean loss of the examples in evaluation mode; no random state changes.

    Args:
        model: The model.
        batches: The data.
        loss: Per-example loss.
        where: Put in front of error texts.

    Raises:
        InvalidValue: no batches, or a loss that is not finite.
    """
    batches, device = Batches.of(batches), device_of(model)
    losses: list[Tensor] = []  # by batch, [examples]
    # A loader may shuffle, and a training must not depend on how often it is evaluated.
    before = random_states()
    try:
        with without_fused_attention(), undisturbed(model), torch.no_grad():
            with explained(model, batches):
                for number, batch in enumerate(batches):
                    losses.append(shaped_losses(loss, model, to_device(batch, device), number))
            # Read once, at the end, because each read waits for an accelerator.
            losses = in_main_memory(losses)
            check_finite(enumerate(losses))
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error.where}", error.must, error.got, error.hint) from None
    finally:
        set_random_states(before)
    if not losses:
        must, hint = "at least one batch, at every reading", "Pass list(batches), for example."
        raise InvalidValue("validation", must, "none", hint)
    # The mean over examples, not over batches, which may differ in size.
    total = sum(float(of_batch.double().sum()) for of_batch in losses)
    return total / sum(map(len, losses))
