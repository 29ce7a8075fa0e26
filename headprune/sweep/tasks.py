"""The tasks of a sweep: each makes scores, a plan or an outcome, in one file."""

from __future__ import annotations

import copy
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from headprune.core.errors import HeadPruneError, InvalidValue, error_text
from headprune.core.plan import PruningPlan
from headprune.core.scores import HeadScores
from headprune.recipes.schema import Recipe
from headprune.run.choosing import choose_heads
from headprune.run.journal import WORK
from headprune.run.recovering import recover_once
from headprune.run.stages import score_calibration
from headprune.run.subject import EVALUATION_BATCH, Subject, quiet
from headprune.surgery.prune import prune_
from headprune.sweep.base import Base, open_base
from headprune.sweep.outcome import SPLITS, ModelOutcome, judge

Kind = Literal["scores", "plans", "outcomes"]
#: Prefix of the folders in which unfinished scores keep the results of their batches.
SCORING = "score-"
_ENDINGS = {"scores": ".json", "plans": ".json", "outcomes": ".safetensors"}


@dataclass(frozen=True)
class SweepTask:
    """One piece of work.

    Args:
        kind: What it makes.
        key: Digest of everything that its result depends on; names the file.
        sweep: The sweep's folder.
        base: The base model.
        recipe: The recipe with the grid's values.
        draw: Number of the draw of calibration rows.
        needs: Key of the scores that a plan is made from, or of the plan that a model is cut by;
            empty for the uncut model.
        threads: CPU threads; None does not set them.
        what: In words, for progress.
    """

    kind: Kind
    key: str
    sweep: Path
    base: Base
    recipe: Recipe
    draw: int = 0
    needs: str = ""
    threads: int | None = None
    what: str = ""

    @property
    def path(self) -> Path:
        """The file that it writes."""
        return file_of(self.sweep, self.kind, self.key)

    def done(self) -> bool:
        """Whether its file is there, complete, and of this base model."""
        if self.kind == "outcomes":
            return ModelOutcome.find(self.path, self.key) is not None
        made = load_scores(self.path) if self.kind == "scores" else load_plan(self.path)
        return made is not None and self.base.is_model(made.model)


@dataclass(frozen=True)
class TaskResult:
    """How long a task took, and its error if it failed."""

    task: SweepTask
    seconds: float
    error: str | None = None


# ----------------------------------------------------------------------------- the files of tasks


def file_of(sweep: Path, kind: Kind, key: str) -> Path:
    """Return the path of a task's file."""
    return sweep / kind / f"{key[:24]}{_ENDINGS[kind]}"


def load_scores(path: Path) -> HeadScores | None:
    """Load scores with samples and curvature; None if a file is not complete."""
    try:
        scores = HeadScores.load(path)
        for companion in (scores.samples, scores.curvature):
            if companion is not None:
                companion.matrix  # noqa: B018, raises where the numbers are missing or damaged
    except HeadPruneError:
        return None
    return scores


def load_plan(path: Path) -> PruningPlan | None:
    """Load a plan; None if the file is not complete."""
    try:
        return PruningPlan.load(path)
    except HeadPruneError:
        return None


def outcome_of(sweep: Path, key: str) -> ModelOutcome:
    """Load the outcome of a finished run.

    Raises:
        InvalidValue: its file is missing or damaged.
    """
    path = file_of(sweep, "outcomes", key)
    outcome = ModelOutcome.find(path, key)
    if outcome is None:
        got, hint = "none, or a damaged file", "Call the sweep again."
        raise InvalidValue(str(path), "an outcome of this sweep", got, hint)
    return outcome


# ---------------------------------------------------------------------------------- work of tasks


#: Tasks of one process share its base model, and each sets gates and hooks of its own: only one
#: thread works at a time.
_one_task = threading.Lock()

#: The base model that this process has open, with the batches of every split: at most one.
_open: dict[tuple[object, ...], tuple[Subject, dict[str, list[Any]]]] = {}


def work(task: SweepTask) -> TaskResult:
    """Run a task; return its error, if any, so that other tasks continue."""
    start = perf_counter()
    try:
        with _one_task:
            if task.threads is not None:
                torch.set_num_threads(task.threads)
            if not task.done():  # another process may have done it in the meantime
                _MAKERS[task.kind](task)
    except Exception as error:
        return TaskResult(task, perf_counter() - start, error_text(error))
    return TaskResult(task, perf_counter() - start)


def opened(task: SweepTask) -> tuple[Subject, dict[str, list[Any]]]:
    """Open the base model for a task, if this process has not opened it yet.

    Returns:
        The subject, with the task's own seed and calibration rows; the batches of every split.
    """
    # 1. Open the model, in place of another one or of one with other sites.
    select = task.recipe.select
    place = (task.base.identity, task.sweep, select.policy, select.feed_forward)
    if place not in _open:
        close()
        quiet()
        subject = open_base(task.base, task.sweep, task.recipe)
        batches = {split: subject.data.evaluation(split, EVALUATION_BATCH) for split in SPLITS}
        _open[place] = (subject, batches)
    subject, batches = _open[place]
    # 2. Draw the task's calibration rows.
    seed = task.recipe.seed + task.draw
    recipe = task.recipe.model_copy(update={"seed": seed})
    data = subject.data.redrawn(recipe.data.calibration, seed)
    return replace(subject, recipe=recipe, data=data), batches


def close() -> None:
    """Release the base model."""
    _open.clear()


def _make_scores(task: SweepTask) -> None:
    subject, _ = opened(task)
    folder = task.sweep / WORK / f"{SCORING}{task.key[:16]}"
    scores = score_calibration(subject, None, folder)
    scores.save(task.path)
    shutil.rmtree(folder, ignore_errors=True)


def _make_plan(task: SweepTask) -> None:
    subject, _ = opened(task)
    scores = HeadScores.load(file_of(task.sweep, "scores", task.needs))
    choose_heads(subject, scores).save(task.path)


def _make_outcome(task: SweepTask) -> None:
    subject, batches = opened(task)
    if not task.needs:  # the uncut model
        judge(subject, subject.model, batches).save(task.path, task.key)
        return
    plan = PruningPlan.load(file_of(task.sweep, "plans", task.needs))
    model, notes = cut_and_recovered(subject, plan)
    judge(subject, model, batches, notes).save(task.path, task.key)


def cut_and_recovered(subject: Subject, plan: PruningPlan) -> tuple[Any, tuple[str, ...]]:
    """Cut a copy of the base model and run all recoveries on it.

    Returns:
        The model, and the notes of the recoveries.
    """
    model = copy.deepcopy(subject.model)
    prune_(model, plan, example=subject.example, sites=subject.sites)
    notes: tuple[str, ...] = ()
    for step in subject.recipe.recover:
        _, _, report = recover_once(subject, model, step)
        notes += report.notes
    return model, notes


_MAKERS = {"scores": _make_scores, "plans": _make_plan, "outcomes": _make_outcome}
