"""Early stopping: the mean validation loss, the weights of the lowest, and when to give up."""

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


class Watch:
    """Judges a training by its validation loss.

    Args:
        model: The model.
        loss: Per-example loss.
        batches: Validation data, read at every evaluation.
        patience: Evaluations without a lower loss until it says stop; None never does.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, batches: Iterable[Any], patience: int | None
    ) -> None:
        self.model, self.loss, self.batches, self.patience = (
            model,
            loss,
            Batches.of(batches),
            patience,
        )
        self.losses: list[tuple[int, float]] = []
        self.best_step = 0
        self.best: dict[str, Tensor] = {}

    def look(self, step: int) -> bool:
        """Evaluates; whether the training should stop."""
        value = mean_loss(self.model, self.batches, self.loss, f"validation after step {step}")
        if not self.losses or value < self.lowest:
            self.best_step = step
            best = weights(self.model)
            self.best = dict(zip(best, copies(best.values()), strict=True))
        self.losses.append((step, value))
        since = sum(at > self.best_step for at, _ in self.losses)
        return self.patience is not None and since >= self.patience

    @property
    def lowest(self) -> float:
        return min(value for _, value in self.losses)

    def restore_(self) -> dict[str, Any]:
        """Gives the model its best weights and says which."""
        load_weights_(self.model, self.best)
        return {
            "best_step": self.best_step,
            "validation_loss": self.lowest,
            "validation_loss_before": self.losses[0][1],
            "evaluations": len(self.losses),
        }

    def state(self) -> dict[str, Any]:
        """What ``continue_from`` needs."""
        return {"losses": list(self.losses), "best_step": self.best_step, "best": self.best}

    def continue_from(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.losses, self.best_step = list(state["losses"]), state["best_step"]
        self.best = state["best"]


def mean_loss(model: nn.Module, batches: Iterable[Any], loss: Loss, where: str) -> float:
    """The mean loss of the examples, in evaluation mode; no random state changes.

    Raises:
        InvalidValue: no batches, or a loss that is not finite; ``where`` is named.
    """
    device, found, batches = device_of(model), [], Batches.of(batches)
    before = random_states()
    try:
        with without_fused_attention(), undisturbed(model), torch.no_grad():
            with explained(model, batches):
                for number, batch in enumerate(batches):
                    found.append(shaped_losses(loss, model, to_device(batch, device), number))
            found = in_main_memory(found)  # read once, at the end: to read waits for an accelerator
            check_finite(enumerate(found))
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error.where}", error.must, error.got, error.hint) from None
    finally:
        set_random_states(before)
    if not found:
        raise InvalidValue(
            "validation",
            "batches that can be read several times",
            "none",
            "list(batches), for example",
        )
    return sum(float(losses.double().sum()) for losses in found) / sum(map(len, found))
