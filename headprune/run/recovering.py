"""One recovery of a run, as the recipe's sections say it, on the run's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from headprune import recovery
from headprune.core.registry import Registry
from headprune.recipes.schema import RecoverStep
from headprune.recipes.validate import configured
from headprune.recovery._api import recover_
from headprune.recovery._base import Recovery, RecoveryReport
from headprune.run.subject import EVALUATION_BATCH, Subject


def recover_once(
    subject: Subject, pruned: nn.Module, step: RecoverStep, work: Path | None = None
) -> tuple[Recovery, str, RecoveryReport]:
    """One recovery: the method, the purpose of the rows that it saw, and what it did.

    Args:
        subject: The run's.
        pruned: The cut model.
        step: What to do.
        work: Where a training leaves checkpoints, that of its end too, and goes on from them.
    """
    method: Recovery = seeded(recovery.registry, step.method, step.settings, subject.recipe.seed)
    purpose = step.rows or ("train" if method.trains else "calibration")
    teacher = subject.model if method.needs_teacher else None
    held = (
        subject.data.evaluation("validation", EVALUATION_BATCH) if method.needs_validation else None
    )
    loader, bars = subject.data.loader(purpose, step.batch_size), subject.journal.progress
    home = work if method.resumes else None
    given: dict[str, Any] = {
        "validation": held,
        "folder": home,
        "leave_checkpoint": home is not None,
    }
    done = recover_(pruned, loader, method, teacher, sites=subject.sites, progress=bars, **given)
    return method, purpose, done


def recoverer(
    subject: Subject, steps: Sequence[RecoverStep]
) -> Callable[[nn.Module], object] | None:
    """What recovers a cut copy of the model in place by all of these steps; None where there are
    none."""

    def recover(small: nn.Module) -> None:
        for step in steps:
            recover_once(subject, small, step)

    return recover if steps else None


def seeded(registry: Registry, name: str, settings: Mapping[str, Any], seed: int) -> Any:
    """The configured method; one that draws does so from the run's seed unless the recipe gives it
    another."""
    fields = getattr(registry.get(name), "__dataclass_fields__", {})
    return configured(registry, name, {**({"seed": seed} if "seed" in fields else {}), **settings})
