"""The tiny recipe of the tests of sweeps: a ViT that learns the digits a little, in a second or
two."""

from __future__ import annotations

from typing import Any

import pytest

from headprune.recovery._steps import Steps
from tests.tiny_models import SIZES

TINY: dict[str, Any] = {
    "name": "tiny",
    "description": "for tests",
    "task": "image_classification",
    "device": "cpu",
    "threads": 1,
    "model": {
        "class_name": "ViTForImageClassification",
        "config": {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1},
    },
    "data": {"path": "sklearn:digits", "holdout": 150, "test_holdout": 200, "calibration": 40},
    "train": {"epochs": 1, "batch_size": 64, "learning_rate": 3e-3},
    "score": {"scorer": "taylor"},
    "select": {"keep_heads": 0.5},
}


def interrupt_after(count: int, patch: pytest.MonkeyPatch) -> list[int]:
    """Lets the user interrupt after so many steps of training; returns the numbers of the steps
    that ran."""
    plain, seen = Steps.on_step_end, list[int]()

    def stop(self: Any, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        plain(self, args, state, *more, **kwargs)
        seen.append(state.global_step)
        if len(seen) == count:
            raise KeyboardInterrupt

    patch.setattr(Steps, "on_step_end", stop)
    return seen
