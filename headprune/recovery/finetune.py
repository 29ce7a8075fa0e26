"""Trains the model on the task loss and, if wanted, on the teacher's logits, with the Transformers Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, ClassVar

from headprune.core.errors import InvalidValue
from headprune.recovery._base import Job, Outcome, Recovery

SCHEDULES = ("linear", "cosine", "constant")


@dataclass(frozen=True)
class Finetune(Recovery):
    """Trains the model on the task loss and, if wanted, on the teacher's logits, with the Transformers Trainer.

    The loss of a batch is the mean of the per-example losses plus
    ``distill · T² · mean KL(softmax(teacher / T) || softmax(model / T))``, Hinton et al. 2015, section 2, over tokens
    that are no padding. AdamW; parameters that need no gradient stay as they are, biases and norms do not decay.
    Without a teacher this is ordinary training, of any model.

    The loader decides the order: give a ``DataLoader(shuffle=True)``. Unless it has a generator of its own, it
    shuffles by ``seed``. Random states outside, the training flags and the teacher are left as they were; an error
    half-way leaves the model half trained.

    Args:
        epochs: Passes over the batches; a part of one is possible.
        learning_rate: At its highest.
        weight_decay: Of AdamW.
        warmup_ratio: Share of the steps in which the learning rate rises from 0.
        schedule: How it falls to 0 afterwards, ``linear`` or ``cosine``; or ``constant``.
        distill: Weight of the distillation; above 0 a teacher is needed.
        temperature: T.
        max_grad_norm: Gradients longer than this are cut to it; None leaves them.
        seed: Of dropout and of the order.
        steps: Stop after so many batches, in place of ``epochs``.

    >>> Finetune(distill=0.5).needs_teacher, Finetune().needs_teacher
    (True, False)
    """

    trains: ClassVar[bool] = True

    epochs: float = 1
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    warmup_ratio: float = 0.0
    schedule: str = "linear"
    distill: float = 0.0
    temperature: float = 1.0
    max_grad_norm: float | None = 1.0
    seed: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate", "temperature", "max_grad_norm"):
            value = getattr(self, name)
            if not (value is None and name == "max_grad_norm"):
                _number(f"Finetune.{name}", value, value_ok=_is_real(value) and value > 0, must="a number above 0")
        for name in ("weight_decay", "distill"):
            value = getattr(self, name)
            _number(f"Finetune.{name}", value, value_ok=_is_real(value) and value >= 0, must="a number >= 0")
        ratio = self.warmup_ratio
        _number("Finetune.warmup_ratio", ratio, _is_real(ratio) and 0 <= ratio < 1, "a share, 0 <= ratio < 1")
        _number("Finetune.seed", self.seed, _is_count(self.seed) and self.seed < 2**32, "a whole number, 0 to 2^32 - 1")
        if self.schedule not in SCHEDULES:
            raise InvalidValue("Finetune.schedule", f"one of {', '.join(SCHEDULES)}", repr(self.schedule))
        if self.steps is not None:
            _number("Finetune.steps", self.steps, _is_count(self.steps) and self.steps > 0, "a count of batches >= 1")
            if self.epochs != 1:
                raise InvalidValue("Finetune", "given epochs or steps", f"epochs {self.epochs}, steps {self.steps}")

    @property
    def needs_teacher(self) -> bool:
        return self.distill > 0

    def n_steps(self, n_batches: int) -> int:
        """Batches it trains on, of a loader with ``n_batches``."""
        return self.steps or math.ceil(self.epochs * n_batches)

    def recover_(self, job: Job) -> Outcome:
        """Raises:
        InvalidValue: no batches, batches that can be read only once, nothing to train, or a loss that is not
            finite (the message names the step).
        """
        steps = self.n_steps(_length(job.batches))
        changed = tuple(n for n, p in job.model.named_parameters() if p.requires_grad)
        if not changed:
            raise InvalidValue("model", "one with a parameter that requires a gradient", "none", "All are frozen.")
        from headprune.recovery._training import train_  # imports the Trainer

        return train_(self, job, steps, changed)


def _length(batches: Any) -> int:
    hint = "Pass a DataLoader or a list of batches: list(batches), for example."
    if isinstance(batches, Iterator) or not isinstance(batches, Sized) or not hasattr(batches, "__iter__"):
        raise InvalidValue("batches", "sized and readable more than once", type(batches).__name__, hint)
    try:
        length = len(batches)
    except TypeError as error:  # a DataLoader over an iterable dataset
        raise InvalidValue("batches", "sized and readable more than once", str(error), hint) from None
    if not length:
        raise InvalidValue("batches", "at least one batch", "none")
    return length


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(where: str, value: object, value_ok: bool, must: str) -> None:
    if not value_ok:
        raise InvalidValue(where, must, repr(value))
