"""One recovery of a run, by a section of the recipe, on the run's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from headprune import recovery
from headprune.core.registry import Registry
from headprune.recipes.schema import Recipe, RecoverStep
from headprune.recipes.validate import configured
from headprune.recovery._api import recover_
from headprune.recovery._base import Recovery, RecoveryReport
from headprune.run.subject import EVALUATION_BATCH, Subject


def recover_once(
    subject: Subject, pruned: nn.Module, step: RecoverStep, work: Path | None = None
) -> tuple[Recovery, str, RecoveryReport]:
    """Recover the cut model once, in place.

    Args:
        subject: The run's model, data and recipe.
        pruned: The cut model.
        step: The recovery's section of the recipe.
        work: A folder for checkpoints of a training, including the last, to resume from.

    Returns:
        The method, the purpose of the rows that it read ("train", "calibration", ...), its report.
    """
    method: Recovery = seeded(recovery.registry, step.method, step.settings, subject.recipe.seed)
    purpose = step.rows_of(method.trains)
    # Only some methods need these: to stop early, or to resume.
    validation = None
    if method.needs_validation:
        validation = subject.data.evaluation("validation", EVALUATION_BATCH)
    folder = work if method.resumes else None
    # Only a training needs another order of rows in every pass.
    data = subject.data.some(purpose, step.examples)
    loader = data.loader if method.trains else data.same_batches
    report = recover_(
        pruned,
        loader(purpose, step.batch_size),
        method,
        subject.model if method.needs_teacher else None,
        sites=subject.sites,
        progress=subject.journal.progress,
        validation=validation,
        folder=folder,
        leave_checkpoint=folder is not None,
    )
    return method, purpose, report


def biased(recipe: Recipe) -> frozenset[str]:
    """What may get new biases by a recipe's recoveries: ``attention``, ``feed_forward``."""
    kinds: set[str] = set()
    for step in recipe.recover:
        method: Recovery = configured(recovery.registry, step.method, step.settings)
        if not method.adds_biases:
            continue
        kinds.add("attention")
        if recipe.select.feed_forward or getattr(method, "feed_forward", False):
            kinds.add("feed_forward")
    return frozenset(kinds)


def recoverer(
    subject: Subject, steps: Sequence[RecoverStep]
) -> Callable[[nn.Module], object] | None:
    """Return a function that runs all steps on a cut model; None without steps."""

    def recover(small: nn.Module) -> None:
        for step in steps:
            recover_once(subject, small, step)

    return recover if steps else None


def seeded(registry: Registry, name: str, settings: Mapping[str, Any], seed: int) -> Any:
    """Configure a method, with the run's seed unless ``settings`` have another."""
    # Only methods that draw random numbers have a seed.
    fields = getattr(registry.get(name), "__dataclass_fields__", {})
    defaults = {"seed": seed} if "seed" in fields else {}
    return configured(registry, name, {**defaults, **settings})
