"""``prune_on_data``: a run with a recipe that is guessed from model and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from torch import nn

from headprune.checkpoints.checkpoint import from_pretrained
from headprune.core.codec import FrozenDict
from headprune.core.record import RunRecord
from headprune.data.guess import Guess, guess
from headprune.recipes.schema import Recipe
from headprune.run.journal import MODEL, RECORD, to_stderr
from headprune.run.runner import run_recipe


def prune_on_data(
    model: str,
    data: str,
    folder: Path,
    *,
    task: str | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    settings: Iterable[str] = (),
    check: Callable[[Recipe], None] = lambda recipe: None,
    say: Callable[[str], None] = to_stderr,
    progress: bool | None = None,
) -> tuple[nn.Module, RunRecord]:
    """Score, cut, refit and measure a model, by the recipe that ``headprune init`` would write.

    Args:
        model: A model folder, hub name or ``package:NAME/FOLDER``.
        data: A file, a folder with train/validation/test files, or a hub name.
        folder: The run's folder: record, report, plan, scores and the cut model. A run that was
            killed there is resumed; a finished run by the same recipe is reused.
        task: The task, if the model's class and the columns do not determine it.
        text: The column of text, if the columns do not determine it.
        text_pair: The column of the second text of a pair.
        label: The column of labels.
        settings: ``dotted.key=value`` overrides of that recipe.
        check: Takes the guessed recipe before anything is written; may raise.
        say: Takes lines of progress.
        progress: Show progress bars; None shows them on a terminal.

    Returns:
        The cut model, loaded from the folder, and the run's record.

    Raises:
        HeadPruneError: bad input, or a proof that failed.
    """
    guessed = guess(model, data, task=task, text=text, text_pair=text_pair, label=label)
    recipe = checked_recipe(guessed, settings, check, say)
    recipe = recipe.model_copy(update={"out": str(folder)})
    # Killed after the run but before its model was saved elsewhere: it need not run again.
    record = _finished(recipe, folder) or run_recipe(recipe, say=say, progress=progress)
    return from_pretrained(folder / MODEL), record


def checked_recipe(
    guessed: Guess,
    settings: Iterable[str],
    check: Callable[[Recipe], None],
    say: Callable[[str], None],
) -> Recipe:
    """Return a guessed recipe with the user's settings, once it is checked; say why it is so."""
    recipe = guessed.recipe(settings)
    check(recipe)
    for line in guessed.why:
        say(line)
    return recipe


def _finished(recipe: Recipe, folder: Path) -> RunRecord | None:
    """Return the record of a finished run by this recipe that still has its model."""
    if not (folder / MODEL).is_dir() or not (folder / RECORD).is_file():
        return None
    record = RunRecord.load(folder / RECORD)
    # The digest covers the whole record, so it differs if the recipe does.
    expected = replace(record, recipe=FrozenDict(recipe.model_dump()))
    if record.status != "done" or record.digest != expected.digest:
        return None
    return record
