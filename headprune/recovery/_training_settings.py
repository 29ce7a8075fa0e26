"""The settings of a training, and the checks of their values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from headprune.core.errors import InvalidValue
from headprune.recovery._base import Recovery

SCHEDULES = ("linear", "cosine", "constant")
PRECISIONS = ("bf16", "fp16")
LAYERS = ("all", "last")

# Settings that may be None are in ``_OPTIONAL``, too.
_ABOVE_ZERO = ("epochs", "learning_rate", "temperature", "max_grad_norm", "lora_alpha")
_NOT_NEGATIVE = ("weight_decay", "distill", "distill_hidden")
_COUNTS = {
    "steps": "batches",
    "lora_rank": "dimensions",
    "patience": "evaluations",
    "eval_every": "batches",
    "checkpoint_every": "batches",
}
_WORDS = {"schedule": SCHEDULES, "hidden_layers": LAYERS, "precision": PRECISIONS}
_OPTIONAL = {"max_grad_norm", "lora_alpha", "precision", *_COUNTS}


@dataclass(frozen=True)
class TrainingSettings(Recovery):
    """The settings of `Finetune`, which describes them.

    They are a class of their own, so that the engine can import them without the method.
    """

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
    # Low-rank adapters.
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] | None = None
    # Validation and checkpoints.
    patience: int | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_words()
        self._check_together()

    def n_steps(self, n_batches: int) -> int:
        """Return the number of batches to train on, for a loader of ``n_batches``."""
        return self.steps or math.ceil(self.epochs * n_batches)

    def _require(self, name: str, valid: bool, must: str) -> None:
        """Refuse the value of a setting; None is valid where the setting is optional."""
        value = getattr(self, name)
        if not valid and not (value is None and name in _OPTIONAL):
            raise InvalidValue(f"Finetune.{name}", must, repr(value))

    def _check_numbers(self) -> None:
        """Refuse numbers out of range; True and False are no numbers."""
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            self._require(name, _is_real(value) and value > 0, "a number above 0")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            self._require(name, _is_real(value) and value >= 0, "a number >= 0")
        ratio, seed = self.warmup_ratio, self.seed
        self._require("warmup_ratio", _is_real(ratio) and 0 <= ratio < 1, "a share, 0 <= ratio < 1")
        self._require("seed", _is_count(seed) and seed < 2**32, "a whole number, 0 to 2^32 - 1")
        for name, unit in _COUNTS.items():
            value = getattr(self, name)
            self._require(name, _is_count(value) and value > 0, f"a count of {unit} >= 1")

    def _check_words(self) -> None:
        """Refuse unknown words and names."""
        for name, words in _WORDS.items():
            self._require(name, getattr(self, name) in words, f"one of {', '.join(words)}")
        targets = self.lora_targets
        if targets is not None and not _are_names(targets):
            must = "names of projections in a tuple"
            raise InvalidValue("Finetune.lora_targets", must, repr(targets))

    def _check_together(self) -> None:
        """Refuse settings that have no effect without another one."""
        if self.steps is not None and self.epochs != 1:
            got = f"epochs {self.epochs}, steps {self.steps}"
            raise InvalidValue("Finetune", "given epochs or steps, not both", got)
        without_lora = self.lora_rank is None
        # Each: a setting, whether it is given without what it needs, and what it needs.
        useless = (
            (
                "hidden_layers",
                self.hidden_layers != "all" and not self.distill_hidden,
                "distill_hidden",
            ),
            ("temperature", self.temperature != 1 and not self.distill, "distill"),
            ("lora_alpha", self.lora_alpha is not None and without_lora, "lora_rank"),
            ("lora_targets", self.lora_targets is not None and without_lora, "lora_rank"),
        )
        for name, is_useless, needed in useless:
            if is_useless:
                got = f"{getattr(self, name)!r} without {needed}"
                raise InvalidValue(f"Finetune.{name}", f"used with {needed}", got)


def _is_real(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_names(value: Any) -> bool:
    if not isinstance(value, tuple) or not value:
        return False
    return all(isinstance(name, str) and name for name in value)
