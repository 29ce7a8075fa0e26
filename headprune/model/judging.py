"""Checks the loss of a call on its first batch: is it the model's own, in the right mode?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headprune.model.losses import Loss, has_labels, inputs_of, reads_next
from headprune.model.modes import difference_in_training
from headprune.model.own_loss import Reading, is_default, reading_of, shift_of
from headprune.model.running import call, outputs


@dataclass(frozen=True)
class Judged:
    """A loss after its check on a batch.

    Args:
        loss: The user's, or the default one with the model's reading of labels.
        notes: What the user should know.
    """

    loss: Loss
    notes: tuple[str, ...]


def judged(model: nn.Module, loss: Loss | None, batch: Any, asked: bool = True) -> Judged:
    """Check a loss on the first batch of a call; the model and random states are restored.

    Args:
        model: The model, without gates and hooks of a measurement.
        loss: The user's; None is the default one.
        batch: The first batch, on the model's device.
        asked: Whether the loss will be called, and not only the model.
    """
    if loss is not None and not is_default(loss):
        note = difference_in_training(model, lambda: _outputs(model, loss, batch), "output")
        return _with_note(loss, (), note)
    # To compare with the model's own loss costs a pass.
    reading = reading_of(model, batch) if asked else Reading(reads_next(model))
    if reading.refusal is None and has_labels(batch):
        note = difference_in_training(model, lambda: [reading(model, batch)], "loss")
    else:
        note = difference_in_training(model, lambda: _outputs(model, None, batch), "output")
    return _with_note(reading, reading.notes, note)


def _with_note(loss: Loss, notes: tuple[str, ...], note: str) -> Judged:
    if note:
        notes = (*notes, note)
    return Judged(loss, notes)


def _outputs(model: nn.Module, loss: Loss | None, batch: Any) -> list[Tensor]:
    """The model's output, or the user's loss if the model itself cannot take the batch.

    The user's loss may keep count of its calls, so it is called only if there is no other way.
    """
    try:
        tensors = outputs(call(model, inputs_of(model, batch)))
    except Exception:  # only the user's loss can take such a batch apart
        tensors = []
    if loss is None or tensors:
        return tensors
    return [loss(model, batch)]


class Judge:
    """A loss that is checked on the first batch that it is called with.

    Args:
        loss: The user's; None is the default one.
    """

    def __init__(self, loss: Loss | None) -> None:
        self._given = loss
        self._judged: Judged | None = None  # until the check

    def look(self, model: nn.Module, batch: Any) -> None:
        """Check it on a batch, unless it was checked before.

        Call it outside of hooks that watch the model's passes.

        Raises:
            InvalidValue: the default loss is not the model's own.
        """
        if self._judged is None:
            self._judged = judged(model, self._given, batch)
            # The default loss refuses here, before any work is done.
            if isinstance(self._judged.loss, Reading):
                self._judged.loss.check()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.look(model, batch)
        assert self._judged is not None
        return self._judged.loss(model, batch)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        return () if self._judged is None else self._judged.notes

    def state(self) -> bool | None:
        """How labels are read, for ``continue_from``; None before the check."""
        return None if self._judged is None else shift_of(self._judged.loss)

    def continue_from(self, shifted: bool | None) -> None:
        """Read labels as an earlier, interrupted call did, which this one continues."""
        if shifted is not None:
            self._judged = Judged(Reading(shifted), ())
