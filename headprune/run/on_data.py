"""A model and data in, a cut and refitted model out: a run whose recipe nobody had to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from torch import nn

from headprune.checkpoints.checkpoint import from_pretrained
from headprune.core.codec import FrozenDict
from headprune.core.record import RunRecord
from headprune.data.guess import guess
from headprune.recipes.schema import Recipe
from headprune.run.journal import MODEL, RECORD, to_stderr
from headprune.run.runner import run_recipe


def prune_on_data(
    model: str,
    data: str,
    folder: Path,
    *,
    task: str | None = None,
    settings: Iterable[str] = (),
    say: Callable[[str], None] = to_stderr,
    progress: bool | None = None,
) -> tuple[nn.Module, RunRecord]:
    """Scores, cuts, refits and measures a model by the recipe that ``headprune init`` would write
    for it.

    Args:
        model: A model folder, hub name or ``package:NAME/FOLDER``.
        data: A file, a folder with train/validation/test files, or a hub name.
        folder: Of the run: record, report, plan, scores and the cut model. One that was killed
            there is gone on with; one by the same recipe that came to its end is taken as it is.
        task: Where the model's class and the columns do not say it.
        settings: ``dotted.key=value`` overrides of that recipe.
        say: Takes lines of progress.
        progress: Show progress bars; None shows them on a terminal.

    Returns:
        The cut model, as it was saved and loaded again, and the run's record.

    Raises:
        HeadPruneError: bad input, or a proof that failed.
    """
    found = guess(model, data, task=task)
    recipe = found.recipe(settings).model_copy(update={"out": str(folder)})
    for line in found.why:
        say(line)
    record = _finished(recipe, folder) or run_recipe(recipe, say=say, progress=progress)
    return from_pretrained(folder / MODEL), record


def _finished(recipe: Recipe, folder: Path) -> RunRecord | None:
    """The record of such a run that came to its end, and whose model has not been taken from it
    yet."""
    if not (folder / MODEL).is_dir() or not (folder / RECORD).is_file():
        return None
    record = RunRecord.load(folder / RECORD)
    again = replace(record, recipe=FrozenDict(recipe.model_dump()))
    return record if record.status == "done" and record.digest == again.digest else None
