"""Trains the model on the task loss and, if wanted, on what its teacher says and thinks, with
Transformers' Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, ClassVar

from headprune.core.errors import InvalidValue
from headprune.recovery._base import Job, Outcome, Recovery

SCHEDULES = ("linear", "cosine", "constant")
PRECISIONS = ("bf16", "fp16")
LAYERS = ("all", "last")


@dataclass(frozen=True)
class Finetune(Recovery):
    """Trains the model on the task loss and, if wanted, on what its teacher says and thinks, with
    the Trainer.

    The loss of a batch is the mean of the per-example losses plus

    - ``distill · T² · mean KL(softmax(teacher / T) || softmax(model / T))``, Hinton et al. 2015,
      section 2;
    - ``distill_hidden · mean over layers of mean (h - h_teacher)² / var(h_teacher)``, h being what
      the layers of the model return (the residual stream), the variance over the batch's tokens and
      features. TinyBERT (Jiao et al. 2020, section 3.1) takes the bare squared error; divided by
      the variance it is the share of what the teacher's layer says that is missed, so that one
      weight means the same for every model and layer.

    Both over tokens that are no padding. AdamW; parameters that need no gradient stay as they are,
    biases and norms do not decay. Without a teacher this is ordinary training, of any model.

    The loader decides the order: give a ``DataLoader(shuffle=True)``. Unless it has a generator of
    its own, it shuffles by ``seed``. Random states outside, the training flags and the teacher are
    left as they were, and so is the model after an error: the weights as they were are kept for
    that, on their GPU where it has room for five such copies, else in main memory.

    With ``patience`` or ``eval_every``, ``recover_(validation=)`` is needed: the mean loss of its
    examples (the task loss alone) is taken before the first step, every ``eval_every`` steps and
    after the last one, and the model ends with the weights of the lowest; of equals, the earliest.
    With ``recover_(folder=)`` the training leaves a checkpoint there every ``checkpoint_every``
    steps; the same call with the model as it was before continues from it after the training was
    killed, to the same weights bit for bit where the device computes the same. A training that
    comes to its end takes its checkpoint away, unless ``recover_(leave_checkpoint=True)`` has it
    leave one of its end.

    With ``lora_rank`` only low-rank adapters are trained (LoRA, Hu et al. 2021; needs the package
    ``peft``): ``W + lora_alpha / lora_rank · B A``, and merged into the weights at the end.

    Args:
        epochs: Passes over the batches; a part of one is possible.
        learning_rate: At its highest.
        weight_decay: Of AdamW.
        warmup_ratio: Share of the steps in which the learning rate rises from 0.
        schedule: How it falls to 0 afterwards, ``linear`` or ``cosine``; or ``constant``.
        distill: Weight of the teacher's logits; above 0 a teacher is needed.
        temperature: T.
        max_grad_norm: Gradients longer than this are cut to it; None leaves them.
        seed: Of dropout, of the order and of adapters.
        steps: Stop after so many batches, in place of ``epochs``.
        distill_hidden: Weight of the teacher's hidden states; above 0 a teacher is needed.
        hidden_layers: ``all`` layers, or the ``last`` one that runs.
        precision: ``bf16`` or, on a GPU, ``fp16``: computes in it with float32 weights (autocast),
            validation aside. None computes in the weights' own type.
        lora_rank: Rank of the adapters; None trains the weights themselves.
        lora_alpha: Their scale; ``lora_rank`` where it is left out, a factor of 1.
        lora_targets: Names, or ends of names, of the projections that get one; where they are left
            out, every projection in a layer with attention: those of attention and those of the
            feed-forward.
        patience: Stop after so many evaluations without a lower loss; None trains to the end.
        eval_every: Steps between evaluations; a pass over the batches where only ``patience`` is
            given.
        checkpoint_every: Steps between checkpoints; a pass over the batches where only a folder is
            given.

    >>> (
    ...     Finetune(distill=0.5).needs_teacher,
    ...     Finetune().needs_teacher,
    ...     Finetune(patience=3).needs_validation,
    ... )
    (True, False, True)
    """

    trains: ClassVar[bool] = True
    resumes: ClassVar[bool] = True

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
    distill_hidden: float = 0.0
    hidden_layers: str = "all"
    precision: str | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] | None = None
    patience: int | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate", "temperature", "max_grad_norm", "lora_alpha"):
            value = getattr(self, name)
            if not (value is None and name in ("max_grad_norm", "lora_alpha")):
                _number(
                    f"Finetune.{name}",
                    value,
                    value_ok=_is_real(value) and value > 0,
                    must="a number above 0",
                )
        for name in ("weight_decay", "distill", "distill_hidden"):
            value = getattr(self, name)
            _number(
                f"Finetune.{name}",
                value,
                value_ok=_is_real(value) and value >= 0,
                must="a number >= 0",
            )
        ratio = self.warmup_ratio
        _number(
            "Finetune.warmup_ratio",
            ratio,
            _is_real(ratio) and 0 <= ratio < 1,
            "a share, 0 <= ratio < 1",
        )
        _number(
            "Finetune.seed",
            self.seed,
            _is_count(self.seed) and self.seed < 2**32,
            "a whole number, 0 to 2^32 - 1",
        )
        for name in ("steps", "lora_rank", "patience", "eval_every", "checkpoint_every"):
            value, what = (
                getattr(self, name),
                {"lora_rank": "dimensions", "patience": "evaluations"},
            )
            if value is not None:
                must = f"a count of {what.get(name, 'batches')} >= 1"
                _number(f"Finetune.{name}", value, _is_count(value) and value > 0, must)
        for name, words in (
            ("schedule", SCHEDULES),
            ("hidden_layers", LAYERS),
            ("precision", PRECISIONS),
        ):
            value = getattr(self, name)
            if value not in words and not (value is None and name == "precision"):
                raise InvalidValue(f"Finetune.{name}", f"one of {', '.join(words)}", repr(value))
        self._check_together()

    def _check_together(self) -> None:
        if self.steps is not None and self.epochs != 1:
            raise InvalidValue(
                "Finetune", "given epochs or steps", f"epochs {self.epochs}, steps {self.steps}"
            )
        targets = self.lora_targets
        if targets is not None and not (
            isinstance(targets, tuple) and targets and all(map(_is_name, targets))
        ):
            raise InvalidValue(
                "Finetune.lora_targets", "names of projections in a tuple", repr(targets)
            )
        useless = {
            "hidden_layers": (
                self.hidden_layers != "all" and not self.distill_hidden and "distill_hidden"
            ),
            "temperature": self.temperature != 1 and not self.distill and "distill",
            "lora_alpha": self.lora_alpha is not None and self.lora_rank is None and "lora_rank",
            "lora_targets": targets is not None and self.lora_rank is None and "lora_rank",
        }
        for name, other in useless.items():
            if other:
                raise InvalidValue(
                    f"Finetune.{name}", f"used with {other}", f"{getattr(self, name)!r} without"
                )

    @property
    def needs_teacher(self) -> bool:
        return self.distill > 0 or self.distill_hidden > 0

    @property
    def needs_validation(self) -> bool:
        return self.patience is not None or self.eval_every is not None

    def n_steps(self, n_batches: int) -> int:
        """Batches it trains on, of a loader with ``n_batches``."""
        return self.steps or math.ceil(self.epochs * n_batches)

    def recover_(self, job: Job) -> Outcome:
        """Raises:
        InvalidValue: no batches, batches that can be read only once, nothing to train, or a loss
            that is not finite (the message names the step).
        CheckpointError: ``job.folder`` holds the checkpoint of another training.
        UnsupportedModel: a model without layers to compare hidden states at, or without projections
            to adapt.
        """
        if self.checkpoint_every is not None and job.folder is None:
            raise InvalidValue(
                "Finetune.checkpoint_every", "used with recover_(folder=)", "no folder"
            )
        steps = self.n_steps(sized(job.batches))
        if not any(p.requires_grad for p in job.model.parameters()) and self.lora_rank is None:
            raise InvalidValue(
                "model", "one with a parameter that requires a gradient", "none", "All are frozen."
            )
        from headprune.recovery._training import train_  # imports the Trainer

        return train_(self, job, steps)


def sized(batches: Any) -> int:
    """How many batches there are, for what is read several times."""
    from headprune.model.batches import Batches  # imports torch

    hint = "Pass a DataLoader or a list of batches: list(batches), for example."
    batches = batches.source if isinstance(batches, Batches) else batches
    if (
        isinstance(batches, Iterator)
        or not isinstance(batches, Sized)
        or not hasattr(batches, "__iter__")
    ):
        raise InvalidValue(
            "batches", "sized and readable more than once", type(batches).__name__, hint
        )
    try:
        length = len(batches)
    except TypeError as error:  # a DataLoader over an iterable dataset
        raise InvalidValue(
            "batches", "sized and readable more than once", str(error), hint
        ) from None
    if not length:
        raise InvalidValue("batches", "at least one batch", "none")
    return length


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(where: str, value: object, value_ok: bool, must: str) -> None:
    if not value_ok:
        raise InvalidValue(where, must, repr(value))
