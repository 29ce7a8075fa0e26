"""Trains the model on the task loss and, if wanted, towards its teacher's outputs, with
Transformers' Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, ClassVar

from headprune.core.errors import InvalidValue
from headprune.recovery._base import Job, Outcome
from headprune.recovery._training_settings import TrainingSettings

# How a training runs:
#
# - Both distances from the teacher are over tokens that are no padding. TinyBERT (section 3.1)
#   takes the bare squared error. Divided by the variance over the batch's tokens and features, it
#   is the share of the teacher's hidden state that is missed: one weight means the same for every
#   model and layer.
# - Frozen parameters do not change; biases and norms have no weight decay. Without a teacher this
#   is ordinary training, of any model.
# - A loader without a generator shuffles by ``seed``. Random states outside, training flags and the
#   teacher are restored. After an error so is the model: a copy of its weights is kept on their GPU
#   if it has room for five such copies, else in main memory.
# - Validation uses the task loss alone, before the first step, every ``eval_every`` steps and after
#   the last one. The model ends with the weights of the lowest; of equals, the earliest.
# - With ``recover_(folder=)`` there is a checkpoint every ``checkpoint_every`` steps. After a kill
#   the same call with the model as before continues, to the same weights bit for bit where the
#   device is deterministic. At the end it is deleted, unless ``recover_(leave_checkpoint=True)``.
# - LoRA adapters ``W + lora_alpha / lora_rank · B A`` are merged into the weights at the end.


@dataclass(frozen=True)
class Finetune(TrainingSettings):
    """Trains the model on the task loss and, if wanted, towards its teacher's outputs.

    The loss of a batch is the mean of the per-example losses plus

    - ``distill · T² · mean KL(softmax(teacher / T) || softmax(model / T))`` (Hinton et al. 2015);
    - ``distill_hidden · mean over layers of mean (h - h_teacher)² / var(h_teacher)``, with h the
      layers' outputs (TinyBERT, Jiao et al. 2020).

    The loader decides the order.

    Args:
        epochs: Passes over the batches.
        learning_rate: Maximum.
        weight_decay: Of AdamW.
        warmup_ratio: Share of the steps with a rising rate.
        schedule: ``linear``, ``cosine`` or ``constant``.
        distill: Weight of the teacher's logits.
        temperature: T.
        max_grad_norm: Maximum norm of gradients.
        seed: Of dropout, order and adapters.
        steps: In place of ``epochs``.
        distill_hidden: Weight of the teacher's hidden states.
        hidden_layers: ``all`` or ``last``.
        precision: Autocast in ``bf16`` or, on a GPU, ``fp16``.
        lora_rank: Rank of LoRA adapters; needs ``peft``.
        lora_alpha: Scale; by default the rank.
        lora_targets: Names or name endings of projections; by default all in layers with
            attention.
        patience: Stop after this many evaluations without a lower loss.
        eval_every: Steps between evaluations; by default a pass.
        checkpoint_every: Steps between checkpoints; by default a pass.

    >>> Finetune(distill=0.5).needs_teacher, Finetune(patience=3).needs_validation
    (True, True)
    """

    trains: ClassVar[bool] = True
    resumes: ClassVar[bool] = True

    @property
    def needs_teacher(self) -> bool:
        return self.distill > 0 or self.distill_hidden > 0

    @property
    def needs_validation(self) -> bool:
        return self.patience is not None or self.eval_every is not None

    def recover_(self, job: Job) -> Outcome:
        """Train the model.

        Raises:
            InvalidValue: no batches, batches that can be read only once, nothing to train, or a
                loss that is not finite (the message names the step).
            CheckpointError: ``job.folder`` holds the checkpoint of another training.
            UnsupportedModel: a model without layers to compare hidden states at, or without
                projections to adapt.
        """
        if self.checkpoint_every is not None and job.folder is None:
            must = "used with recover_(folder=)"
            raise InvalidValue("Finetune.checkpoint_every", must, "no folder")
        steps = self.n_steps(sized(job.batches))
        trainable = any(p.requires_grad for p in job.model.parameters())
        if not trainable and self.lora_rank is None:
            must = "one with a parameter that requires a gradient"
            raise InvalidValue("model", must, "none", "Unfreeze some, or set lora_rank.")
        # Imported here because the Trainer takes seconds to import, and settings do without.
        from headprune.recovery._training import train_

        return train_(self, job, steps)


def sized(batches: Any) -> int:
    """Return the number of batches of data that can be read several times.

    Raises:
        InvalidValue: they can be read only once, have no length, or there are none.
    """
    from headprune.model.batches import Batches  # imports torch

    must = "sized and readable more than once"
    hint = "Pass a DataLoader or a list of batches: list(batches), for example."
    if isinstance(batches, Batches):
        batches = batches.source
    iterable = hasattr(batches, "__iter__")
    if isinstance(batches, Iterator) or not isinstance(batches, Sized) or not iterable:
        raise InvalidValue("batches", must, type(batches).__name__, hint)
    try:
        length = len(batches)
    except TypeError as error:
        # A DataLoader over an iterable dataset.
        raise InvalidValue("batches", must, str(error), hint) from None
    if not length:
        raise InvalidValue("batches", "at least one batch", "none")
    return length
