"""``sweep``: a recipe over a grid; every combination once, in any number of processes, from where
it stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from headprune.core.errors import InvalidValue
from headprune.core.files import append_line, remove_parts
from headprune.core.locking import locked
from headprune.core.plan import PruningPlan
from headprune.core.sweeps import SweepTable
from headprune.recipes.schema import Recipe
from headprune.report.formats import duration
from headprune.report.write import write_tradeoff
from headprune.run.journal import WORK, to_stderr
from headprune.run.subject import quiet
from headprune.sweep.base import Base, ready_base
from headprune.sweep.grid import Design, Grid, lay_out
from headprune.sweep.outcome import Outcome
from headprune.sweep.runs import Run, SweepRun, outcome_key, runs_of
from headprune.sweep.tables import TIMINGS, table_of, write_surroundings, write_table, write_timings
from headprune.sweep.tasks import (
    SCORING,
    Done,
    Kind,
    Task,
    close,
    file_of,
    load_plan,
    outcome_of,
    work,
)


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep: its folder and its table."""

    folder: Path
    table: SweepTable

    def __str__(self) -> str:
        return f"{self.table}\n  {self.folder}"


def sweep(
    recipe: str | Path | Recipe,
    grid: Grid,
    *,
    settings: Iterable[str] = (),
    seeds: int = 1,
    out: str | Path | None = None,
    jobs: int = 1,
    backend: str = "loky",
    say: Callable[[str], None] = to_stderr,
) -> SweepResult:
    """Runs every combination of a grid on one base model.

    The base model is loaded or trained once. A combination scores its heads, selects, cuts a copy,
    recovers it, and is judged on every validation and test row. Scores are shared by all budgets,
    selectors and recoveries, and combinations that come to the same model are judged once.

    Everything lies in one folder, each piece in a file that is named by a digest of all that it
    depends on and written whole or not at all; so a sweep that was stopped, killed too, goes on
    where it was when it is called again, and a sweep with a larger grid uses what an earlier one
    left. The table is the same whatever was interrupted.

    Args:
        recipe: A path, the name of a shipped recipe, or a Recipe.
        grid: ``{"scorer": ["taylor", "random"], "keep": [0.5, 0.25]}``, or
            ``["scorer=taylor,random", ...]``; see ``headprune.sweep.grid.lay_out``.
        settings: ``dotted.key=value`` overrides.
        seeds: Draws of calibration rows. Draw ``i`` has the recipe's seed plus ``i``: it decides
            the calibration rows and what scorers and recoveries draw, not the base model, nor
            validation and test rows. Draw 0 has those of ``headprune run``.
        out: The folder; default that of the recipe and ``-sweep``.
        jobs: Processes; -1 is one a core.
        backend: Of joblib: ``loky``, or ``dask`` for a cluster that sees the folder.
        say: Takes a line a run.

    Returns:
        The table and the folder, which has it as ``table.json``, ``.csv`` and ``.parquet``,
        ``timings.csv``, ``surroundings.json`` (versions and hardware), the trade-off as a picture
        and ``summary.md``. Runs that ended in an error are in ``table.failed``; the next call tries
        them again.

    Raises:
        HeadPruneError: every error of the grid at once, another sweep in the folder, or a base
            model that cannot be had.
    """
    design = lay_out(recipe, settings, grid)
    for name, value, fits in (
        ("seeds", seeds, seeds >= 1),
        ("jobs", jobs, jobs >= 1 or jobs == -1),
    ):
        if not fits or not isinstance(value, int):
            raise InvalidValue(
                f"sweep({name}=)", "a count >= 1" + (", or -1" if name == "jobs" else ""), value
            )
    folder = Path(out) if out is not None else Path(f"{design.recipe.folder}-sweep")
    with locked(folder, "a sweep"):
        quiet()
        for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            remove_parts(place)
        base = ready_base(design.recipe, folder, say)
        going = _Going(folder.resolve(), base, runs_of(design, base, seeds), jobs, backend, say)
        try:
            outcome = going.all()
        except KeyboardInterrupt:
            say(
                f"stopped: {len(going.files)} of {len(going.runs)} runs are done; the same command"
                " goes on from here"
            )
            raise
        finally:
            close()
        return SweepResult(folder, _written(design, going, outcome))


def _written(design: Design, going: _Going, outcome: Outcome) -> SweepTable:
    """The table, which with all that is made from it is in the folder then."""
    table = table_of(design, going.runs, going.files, outcome, going.folder)
    write_table(table, going.folder)
    write_timings(going.runs, going.files, going.folder)
    write_surroundings(design.recipe, going.folder)
    for path in write_tradeoff(table, going.folder):
        going.say(f"wrote {path}")
    return table


class _Going:
    """A sweep on its way: what is finished, what failed, and the lines about it."""

    def __init__(
        self,
        folder: Path,
        base: Base,
        runs: Sequence[Run],
        jobs: int,
        backend: str,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.base, self.runs, self.jobs, self.backend, self.say = (
            folder,
            base,
            runs,
            jobs,
            backend,
            say,
        )
        self.files: dict[str, SweepRun] = {}
        self.start = perf_counter()
        self.first: tuple[float, int] | None = None
        self.threads = _threads(runs[0].recipe, jobs)

    def all(self) -> Outcome:
        """Does what is not done; returns the outcome of the base model."""
        found = {run.key: run.finished(self.folder, self.base) for run in self.runs}
        self.files = {key: file for key, file in found.items() if file is not None}
        if self.files:
            self.say(f"{len(self.files)} of {len(self.runs)} runs are done already")
        base = self._base_task()
        for done in self._each([base]):
            if done.error is not None:
                raise InvalidValue("the base model", "one that can be judged", done.error)
        left = {run.key: run for run in self.runs if run.key not in self.files}
        for kind in ("scores", "plans"):
            left = self._pieces(kind, left)
        self._judge(left)
        return outcome_of(self.folder, base.key)

    def _base_task(self) -> Task:
        key = outcome_key(self.runs[0], None)
        return Task(
            "outcomes", key, self.folder, self.base, self.runs[0].recipe, threads=self.threads
        )

    def _pieces(self, kind: Kind, left: dict[str, Run]) -> dict[str, Run]:
        """Makes the scores, or the plans, of all runs that are left; returns the runs that have
        theirs."""
        key_of = {run.key: run.scores if kind == "scores" else run.plan for run in left.values()}
        users: dict[str, list[Run]] = {}
        for run in left.values():
            users.setdefault(key_of[run.key], []).append(run)
        tasks = [
            r[0].task(kind, key, self.folder, self.base, self.threads) for key, r in users.items()
        ]
        for done in self._each(tasks):
            if done.error is None and (kind == "scores" or done.seconds > 1):
                self.say(f"[{kind}] {_of(done.task)}: {duration(done.seconds)}")
            if done.error is not None:
                for run in users[done.task.key]:
                    self._fail(run, done.error)
                    left.pop(run.key)
        for folder in (self.folder / WORK).glob(
            f"{SCORING}*"
        ):  # of killed tasks, whose key is another one now
            shutil.rmtree(folder, ignore_errors=True)
        return left

    def _judge(self, left: dict[str, Run]) -> None:
        """Cuts, recovers and judges; runs that come to the same model are done together."""
        users: dict[str, list[tuple[Run, PruningPlan]]] = {}
        for run in left.values():
            plan = load_plan(file_of(self.folder, "plans", run.plan))
            assert plan is not None
            users.setdefault(outcome_key(run, plan), []).append((run, plan))
        tasks = [
            r[0][0].task("outcomes", key, self.folder, self.base, self.threads)
            for key, r in users.items()
        ]
        for task in [t for t in tasks if t.done()]:  # judged before its run's file was written
            self._finish(task, users[task.key])
        for done in self._each(tasks):
            if done.error is None:
                self._finish(done.task, users[done.task.key])
                continue
            for run, _ in users[done.task.key]:
                self._fail(run, done.error)

    def _finish(self, task: Task, users: list[tuple[Run, PruningPlan]]) -> None:
        outcome = outcome_of(self.folder, task.key)
        for run, plan in users:
            self._keep(run, run.file(self.base, status="done", plan=plan.digest, outcome=task.key))
            answers = outcome.answers("validation")
            self._line(
                run,
                f"validation {answers.metric} {answers.value:.4f}, {outcome.sizes['heads']} heads",
            )

    def _fail(self, run: Run, error: str) -> None:
        self._keep(run, run.file(self.base, status="failed", error=error))
        self._line(run, f"failed: {error}")

    def _keep(self, run: Run, file: SweepRun) -> None:
        file.save(run.path(self.folder))
        self.files[run.key] = file

    def _line(self, run: Run, text: str) -> None:
        now, n_done = perf_counter(), len(self.files)
        self.first = self.first or (
            now,
            n_done,
        )  # what comes before, such as starting processes, comes once
        since, n_since = now - self.first[0], n_done - self.first[1]
        times = f"{duration(now - self.start)} gone"
        if n_since and n_done < len(self.runs):
            times += f", about {duration(since / n_since * (len(self.runs) - n_done))} left"
        self.say(f"[{n_done}/{len(self.runs)}] {run.what}: {text} ({times})")

    def _each(self, tasks: Sequence[Task]) -> Iterator[Done]:
        """Does the tasks whose file is not there yet, and notes how long each took."""
        for done in _parallel([task for task in tasks if not task.done()], self.jobs, self.backend):
            if done.error is None:
                line = {
                    "kind": done.task.kind,
                    "key": done.task.key,
                    "seconds": round(done.seconds, 3),
                }
                append_line(self.folder / TIMINGS, json.dumps(line))
            yield done


def _of(task: Task) -> str:
    """What a shared piece is of."""
    if task.kind == "scores":
        return f"{task.recipe.score.scorer}, draw {task.draw}"
    return task.what


def _parallel(tasks: Sequence[Task], jobs: int, backend: str) -> Iterator[Done]:
    """Answers in the order in which they come."""
    if not tasks:
        return
    import joblib

    _join_cluster(backend)
    try:  # Parallel itself knows no backends from outside joblib
        with joblib.parallel_config(backend=backend, n_jobs=jobs):
            parallel = joblib.Parallel(return_as="generator_unordered")
            answers = parallel(joblib.delayed(work)(task) for task in tasks)
    except ValueError as error:
        raise InvalidValue(
            "backend", "one of joblib's", repr(backend), " ".join(str(error).split())
        ) from None
    yield from answers


def _join_cluster(backend: str) -> None:
    """What Dask wants before joblib may use it. (Ray's backend for joblib gives no answers before
    it has them all.)"""
    if backend != "dask":
        return
    try:
        from distributed import Client, default_client
    except ImportError as error:
        raise InvalidValue(
            "backend", "one whose package is installed: pip install distributed", backend
        ) from error
    try:
        default_client()
    except ValueError:
        Client(
            threads_per_worker=1
        )  # the scheduler of DASK_SCHEDULER_ADDRESS, or a cluster on this machine


def _threads(recipe: Recipe, jobs: int) -> int | None:
    """CPU threads of every process: the recipe's, or all cores shared by the processes."""
    if recipe.threads is not None or jobs == 1:
        return recipe.threads
    import joblib

    return max(1, (os.cpu_count() or 1) // int(joblib.effective_n_jobs(jobs)))
