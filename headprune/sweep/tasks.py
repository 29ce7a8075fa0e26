"""The pieces of work of a sweep: scores, a plan, a judged model. Each is done in any process and
leaves one file."""

from __future__ import annotations

import copy
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.plan import PruningPlan
from headprune.core.scores import HeadScores
from headprune.recipes.schema import Recipe
from headprune.run.auto import scorer_of
from headprune.run.choosing import choose_heads
from headprune.run.journal import WORK
from headprune.run.recovering import recover_once
from headprune.run.subject import EVALUATION_BATCH, Subject, quiet
from headprune.scoring._api import score
from headprune.surgery.prune import prune_
from headprune.sweep.base import Base, open_base
from headprune.sweep.outcome import SPLITS, Outcome, judge

Kind = Literal["scores", "plans", "outcomes"]
#: How folders begin in which unfinished scores keep what their batches gave.
SCORING = "score-"
_ENDINGS = {"scores": ".json", "plans": ".json", "outcomes": ".safetensors"}


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Args:
        kind: What it makes.
        key: Digest of everything that its result depends on; names the file.
        sweep: The sweep's folder.
        base: The base model.
        recipe: The recipe with the grid's values.
        draw: Number of the draw of calibration rows.
        needs: Key of the scores that a plan is made from, or of the plan that an outcome is of;
            empty for the uncut model.
        threads: CPU threads; None leaves them.
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
        """The file that it leaves."""
        return file_of(self.sweep, self.kind, self.key)

    def done(self) -> bool:
        """Whether its file is there, whole, and of this base model."""
        if self.kind == "outcomes":
            return Outcome.find(self.path, self.key) is not None
        found = load_scores(self.path) if self.kind == "scores" else load_plan(self.path)
        return found is not None and found.model == self.base.model


@dataclass(frozen=True)
class Done:
    """What became of a task."""

    task: Task
    seconds: float
    error: str | None = None


def file_of(sweep: Path, kind: Kind, key: str) -> Path:
    """Where a piece of work lies."""
    return sweep / kind / f"{key[:24]}{_ENDINGS[kind]}"


def load_scores(path: Path) -> HeadScores | None:
    """Scores, where the file is there and whole, its samples and curvature included."""
    try:
        found = HeadScores.load(path)
        for companion in (found.samples, found.curvature):
            if companion is not None:
                companion.matrix  # noqa: B018, raises where the numbers are missing or damaged
    except HeadPruneError:
        return None
    return found


def load_plan(path: Path) -> PruningPlan | None:
    """A plan, where the file is there and whole."""
    try:
        return PruningPlan.load(path)
    except HeadPruneError:
        return None


def outcome_of(sweep: Path, key: str) -> Outcome:
    """The outcome of a finished run.

    Raises:
        InvalidValue: its file is missing or damaged.
    """
    path = file_of(sweep, "outcomes", key)
    found = Outcome.find(path, key)
    if found is None:
        raise InvalidValue(
            str(path),
            "an outcome of this sweep",
            "none, or a damaged file",
            "Call the sweep again.",
        )
    return found


def work(task: Task) -> Done:
    """Does a task; an error is an answer, so that it stops no other task."""
    start = perf_counter()
    try:
        with _alone:
            if task.threads is not None:
                torch.set_num_threads(task.threads)
            if not task.done():
                _MAKERS[task.kind](task)
    except Exception as error:
        text = (
            str(error) if isinstance(error, HeadPruneError) else f"{type(error).__name__}: {error}"
        )
        return Done(task, perf_counter() - start, text)
    return Done(task, perf_counter() - start)


#: Tasks of one process share its base model, whose gates and hooks are those of one task: no two
#: threads at a time.
_alone = threading.Lock()

#: The base model that this process has open, with the batches of every split: it works on one at a
#: time.
_held: dict[tuple[str, Path], tuple[Subject, dict[str, list[Any]]]] = {}


def opened(task: Task) -> tuple[Subject, dict[str, list[Any]]]:
    """The subject of a task, with its own draw of calibration rows and its own seed, and the
    batches to judge on."""
    place = (task.base.identity, task.sweep)
    if place not in _held:
        close()
        quiet()
        subject = open_base(task.base, task.sweep, task.recipe)
        _held[place] = (
            subject,
            {split: subject.data.evaluation(split, EVALUATION_BATCH) for split in SPLITS},
        )
    subject, batches = _held[place]
    seed = task.recipe.seed + task.draw
    recipe = task.recipe.model_copy(update={"seed": seed})
    return replace(
        subject, recipe=recipe, data=subject.data.redrawn(recipe.data.calibration, seed)
    ), batches


def close() -> None:
    """Lets go of the base model."""
    _held.clear()


def _make_scores(task: Task) -> None:
    subject, _ = opened(task)
    wanted = subject.recipe.score
    batches = subject.data.batches("calibration", wanted.batch_size)
    work = task.sweep / WORK / f"{SCORING}{task.key[:16]}"
    found = score(
        subject.model,
        batches,
        scorer_of(subject),
        sites=subject.sites,
        until=wanted.stopping,
        folder=work,
        progress=False,
    )
    found.save(task.path)
    shutil.rmtree(work, ignore_errors=True)


def _make_plan(task: Task) -> None:
    subject, _ = opened(task)
    scores = HeadScores.load(file_of(task.sweep, "scores", task.needs))
    choose_heads(subject, scores).save(task.path)


def _make_outcome(task: Task) -> None:
    subject, batches = opened(task)
    if not task.needs:
        judge(subject, subject.model, batches).save(task.path, task.key)
        return
    model, notes = cut_and_recovered(
        subject, PruningPlan.load(file_of(task.sweep, "plans", task.needs))
    )
    judge(subject, model, batches, notes).save(task.path, task.key)


def cut_and_recovered(subject: Subject, plan: PruningPlan) -> tuple[Any, tuple[str, ...]]:
    """A cut copy of the base model after every recovery of the recipe, and what these had to
    say."""
    model = copy.deepcopy(subject.model)
    prune_(model, plan, example=subject.example, sites=subject.sites)
    notes: tuple[str, ...] = ()
    for step in subject.recipe.recover:
        _, _, report = recover_once(subject, model, step)
        notes += report.notes
    return model, notes


_MAKERS = {"scores": _make_scores, "plans": _make_plan, "outcomes": _make_outcome}
