"""The loss of one call, looked at on its first batch: is it the model's own, and is the model
judged as meant."""

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
    """A loss that was looked at.

    Args:
        loss: The user's own, or the default one as the model reads its labels.
        notes: What the user should know.
    """

    loss: Loss
    notes: tuple[str, ...]


def judged(model: nn.Module, loss: Loss | None, batch: Any, asked: bool = True) -> Judged:
    """Looks at a loss on the first batch of a call; the model and random states are left as they
    were.

    Args:
        model: The model, without gates and hooks of a measurement.
        loss: The user's; None is the default one.
        batch: The first batch, on the model's device.
        asked: Whether the loss is asked at all, and not just the model run.
    """
    if loss is not None and not is_default(loss):
        note = difference_in_training(model, lambda: _outputs(model, loss, batch), "output")
        return Judged(loss, (note,) if note else ())
    found = reading_of(model, batch) if asked else Reading(reads_next(model))
    if found.refusal is None and has_labels(batch):
        note = difference_in_training(model, lambda: [found(model, batch)], "loss")
    else:
        note = difference_in_training(model, lambda: _outputs(model, None, batch), "output")
    return Judged(found, (*found.notes, note) if note else found.notes)


def _outputs(model: nn.Module, loss: Loss | None, batch: Any) -> list[Tensor]:
    """What the model puts out; the user's loss, which may keep count, is asked only for a batch of
    its own form."""
    try:
        found = outputs(call(model, inputs_of(model, batch)))
    except Exception:  # such a batch is for the loss to take apart
        found = []
    if loss is None or found:
        return found
    return [loss(model, batch)]


class Judge:
    """A loss that is looked at when it is first asked.

    Args:
        loss: The user's; None is the default one.
    """

    def __init__(self, loss: Loss | None) -> None:
        self._given = loss
        self._found: Judged | None = None

    def look(self, model: nn.Module, batch: Any) -> None:
        """Looks at it on a batch, unless it did so before: outside of whatever listens to the
        model's passes.

        Raises:
            InvalidValue: the default loss is not the model's own.
        """
        if self._found is None:
            self._found = judged(model, self._given, batch)
            if isinstance(self._found.loss, Reading):
                self._found.loss.check()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.look(model, batch)
        assert self._found is not None
        return self._found.loss(model, batch)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        return () if self._found is None else self._found.notes

    def state(self) -> bool | None:
        """What ``continue_from`` needs: how labels are read, where it was looked at."""
        return None if self._found is None else shift_of(self._found.loss)

    def continue_from(self, shifted: bool | None) -> None:
        """Reads labels as the call before did, of which this one is the rest."""
        if shifted is not None:
            self._found = Judged(Reading(shifted), ())
