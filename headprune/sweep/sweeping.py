"""``sweep``: run a recipe over a grid, every combination once, in any number of processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from headprune.core.errors import InvalidValue, check_count
from headprune.core.files import append_line, remove_parts
from headprune.core.heads import HeadCounts
from headprune.core.locking import locked
from headprune.core.plan import PruningPlan
from headprune.core.sweeps import SweepTable
from headprune.recipes.schema import Recipe
from headprune.report.formats import duration
from headprune.run.journal import WORK, to_stderr
from headprune.run.subject import Subject, quiet
from headprune.run.surroundings import usable_cores
from headprune.sweep.base import Base, ready_base
from headprune.sweep.grid import Design, Grid, lay_out
from headprune.sweep.outcome import ModelOutcome
from headprune.sweep.reporting import report_sweep
from headprune.sweep.runs import PlannedRun, SweepRun, outcome_key, runs_of
from headprune.sweep.speeds import measure_speeds
from headprune.sweep.tables import (
    TIMINGS,
    SweepResult,
    table_of,
    write_surroundings,
    write_table,
    write_timings,
)
from headprune.sweep.tasks import (
    SCORING,
    Kind,
    SweepTask,
    TaskResult,
    close,
    file_of,
    load_plan,
    opened,
    outcome_of,
    work,
)


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
    """Run every combination of a grid on one base model, and tabulate the results.

    The base model is loaded or trained once. Each combination scores, selects, cuts a copy,
    recovers it, and is measured on all validation and test rows. Scores are shared by budgets,
    selectors and recoveries; combinations that lead to the same model share its measurement.

    Every piece of work is a file, named by a digest of what it depends on. The same call resumes a
    stopped sweep, and a larger grid reuses a smaller one's pieces.

    Args:
        recipe: A path, the name of a shipped recipe, or a Recipe.
        grid: ``{"scorer": ["taylor", "random"], "keep": [0.5, 0.25]}``, or
            ``["scorer=taylor,random", ...]``.
        settings: ``dotted.key=value`` overrides.
        seeds: Draws of calibration rows. Draw ``i`` adds ``i`` to the recipe's seed, for
            calibration rows, scorers and recoveries.
        out: The folder; default that of the recipe and ``-sweep``.
        jobs: Processes; -1 is one per core.
        backend: joblib backend: ``loky``, or ``dask`` for a cluster.
        say: Takes a line per run.

    Returns:
        The table and the folder. The next call repeats the runs in ``table.failed``.

    Raises:
        HeadPruneError: all errors of the grid, another sweep in the folder, or no base model.
    """
    # 1. Check the grid and the other arguments.
    design = lay_out(recipe, settings, grid)
    check_count("sweep(seeds=)", seeds)
    if type(jobs) is not int or (jobs < 1 and jobs != -1):
        raise InvalidValue("sweep(jobs=)", "a count >= 1, or -1", repr(jobs))
    folder = Path(out) if out is not None else Path(f"{design.recipe.folder}-sweep")
    with locked(folder, "a sweep"):
        quiet()
        # Files that a killed process did not finish.
        remove_parts(folder)
        for path in list(folder.iterdir()):
            if path.is_dir():
                remove_parts(path)

        # 2. Get the base model.
        base = ready_base(design.recipe, folder, say)

        # 3. Run what is not done yet.
        runs = runs_of(design, base, seeds)
        running = _RunningSweep(folder.resolve(), base, runs, jobs, backend, say)
        try:
            base_outcome = running.run_all()
            # 4. Write the table and what is drawn from it.
            return SweepResult(folder, _write_results(design, running, base_outcome, folder))
        except KeyboardInterrupt:
            done = f"{len(running.files)} of {len(runs)} runs are done"
            say(f"stopped: {done}; the same command resumes here")
            raise
        finally:
            close()


def _write_results(
    design: Design, running: _RunningSweep, base: ModelOutcome, given: Path
) -> SweepTable:
    """Write the table, times, versions and pictures to the folder; return the table.

    ``given`` is the folder as the user named it, for a command on the page.
    """
    folder, runs, files = running.folder, running.runs, running.files
    table = table_of(design, runs, files, base, folder)
    write_table(table, folder)
    write_timings(runs, files, folder)
    write_surroundings(design.recipe, folder)
    if table.rows and design.recipe.bench is not None:
        measure_speeds(table, folder, design.recipe, running.open_base, running.say)
    for path in report_sweep(given):
        running.say(f"wrote {path}")
    return table


@dataclass(eq=False, repr=False)
class _RunningSweep:
    """A sweep while it runs.

    Args:
        folder: The sweep's folder.
        base: The base model.
        runs: All runs, in the order of the table.
        jobs: Processes.
        backend: joblib backend.
        say: Takes a line per run.

    Attributes:
        files: By run, the file that says that it is done or failed.
    """

    folder: Path
    base: Base
    runs: Sequence[PlannedRun]
    jobs: int
    backend: str
    say: Callable[[str], None]
    files: dict[str, SweepRun] = field(default_factory=dict, init=False)
    start: float = field(default_factory=perf_counter, init=False)
    # Time and number of runs at the first line.
    first: tuple[float, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.threads = _threads(self.runs[0].recipe, self.jobs)

    def run_all(self) -> ModelOutcome:
        """Run everything that is not done yet; return the outcome of the base model."""
        # 1. Runs that an earlier call finished.
        for run in self.runs:
            file = run.finished(self.folder, self.base)
            if file is not None:
                self.files[run.key] = file
        if self.files:
            self.say(f"{len(self.files)} of {len(self.runs)} runs are done already")

        # 2. The base model, which all others are compared with.
        base_task = self._base_task()
        for done in self._run_tasks([base_task]):
            if done.error is not None:
                raise InvalidValue("the base model", "one that can be evaluated", done.error)

        # 3. Scores, then plans, then models.
        # Combinations of the same settings are one run.
        by_key = {run.key: run for run in self.runs if run.key not in self.files}
        remaining = self._make_scores(list(by_key.values()))
        remaining = self._make_plans(remaining)
        self._make_models(remaining)
        return outcome_of(self.folder, base_task.key)

    def open_base(self) -> Subject:
        """Open the base model in this process, as the last one did."""
        return opened(self._base_task())[0]

    def _base_task(self) -> SweepTask:
        key = outcome_key(self.runs[0], None)
        recipe = self.runs[0].recipe
        return SweepTask("outcomes", key, self.folder, self.base, recipe, threads=self.threads)

    def _tasks(self, kind: Kind, users: dict[str, list[PlannedRun]]) -> list[SweepTask]:
        """Return one task per key, for all runs that share its result."""
        place = (self.folder, self.base, self.threads)
        return [runs[0].task(kind, key, *place) for key, runs in users.items()]

    def _make_scores(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Make the scores of runs, shared ones once; return the runs that did not fail."""
        users = _by_key(runs, [run.scores for run in runs])
        tasks = self._tasks("scores", users)
        for done in self._run_tasks(tasks):
            if done.error is not None:
                self._fail(users[done.task.key], done.error)
            else:
                recipe, draw = done.task.recipe, done.task.draw
                took = duration(done.seconds)
                self.say(f"[scores] {recipe.score.scorer}, draw {draw}: {took}")
        # Unfinished scores of killed processes, if their key has changed since.
        for folder in (self.folder / WORK).glob(f"{SCORING}*"):
            shutil.rmtree(folder, ignore_errors=True)
        return [run for run in runs if run.key not in self.files]

    def _make_plans(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Make the plans of runs, shared ones once; return the runs that did not fail."""
        users = _by_key(runs, [run.plan for run in runs])
        tasks = self._tasks("plans", users)
        for done in self._run_tasks(tasks):
            if done.error is not None:
                self._fail(users[done.task.key], done.error)
            elif done.seconds > 1:  # most selectors take no time
                self.say(f"[plans] {done.task.what}: {duration(done.seconds)}")
        return [run for run in runs if run.key not in self.files]

    def _make_models(self, runs: Sequence[PlannedRun]) -> None:
        """Cut, recover and measure; runs that lead to the same model share its outcome."""
        # 1. Group the runs by the model that their plan and recoveries lead to.
        plans: dict[str, PruningPlan] = {}
        for run in runs:
            plan = load_plan(file_of(self.folder, "plans", run.plan))
            assert plan is not None
            plans[run.key] = plan
        users = _by_key(runs, [outcome_key(run, plans[run.key]) for run in runs])
        tasks = self._tasks("outcomes", users)
        # 2. Outcomes that are there although the file of a run is not: a kill came between the two.
        for task in [task for task in tasks if task.done()]:
            self._finish(task, users[task.key], plans)
        # 3. All others.
        for done in self._run_tasks(tasks):
            if done.error is None:
                self._finish(done.task, users[done.task.key], plans)
            else:
                self._fail(users[done.task.key], done.error)

    def _finish(
        self, task: SweepTask, runs: Sequence[PlannedRun], plans: dict[str, PruningPlan]
    ) -> None:
        """Write the files of runs whose outcome is there."""
        outcome = outcome_of(self.folder, task.key)
        answers = outcome.answers("validation")
        quality = f"validation {answers.metric} {answers.value:.4f}"
        for run in runs:
            plan = plans[run.key].digest
            self._save(run, run.file(self.base, status="done", plan=plan, outcome=task.key))
            sizes = outcome.sizes
            kept = HeadCounts(sizes["heads"], sizes.get("neurons"))
            self._print(run, f"{quality}, {kept}")

    def _fail(self, runs: Sequence[PlannedRun], error: str) -> None:
        """Write the files of runs that failed."""
        for run in runs:
            self._save(run, run.file(self.base, status="failed", error=error))
            self._print(run, f"failed: {error}")

    def _save(self, run: PlannedRun, file: SweepRun) -> None:
        file.save(run.path(self.folder))
        self.files[run.key] = file

    def _print(self, run: PlannedRun, text: str) -> None:
        """Print a line about a finished run, with the time that all others will take."""
        now, n_done = perf_counter(), len(self.files)
        if self.first is None:
            # Rates count from here: starting processes and the like happens only once.
            self.first = (now, n_done)
        seconds, n_since = now - self.first[0], n_done - self.first[1]
        times = f"{duration(now - self.start)} elapsed"
        if n_since and n_done < len(self.runs):
            rest = seconds / n_since * (len(self.runs) - n_done)
            times += f", about {duration(rest)} left"
        self.say(f"[{n_done}/{len(self.runs)}] {run.what}: {text} ({times})")

    def _run_tasks(self, tasks: Sequence[SweepTask]) -> Iterator[TaskResult]:
        """Run the tasks whose file is not there yet, and note how long each took."""
        todo = [task for task in tasks if not task.done()]
        for done in _parallel(todo, self.jobs, self.backend):
            if done.error is None:
                seconds = round(done.seconds, 3)
                line = {"kind": done.task.kind, "key": done.task.key, "seconds": seconds}
                append_line(self.folder / TIMINGS, json.dumps(line))
            yield done


def _parallel(tasks: Sequence[SweepTask], jobs: int, backend: str) -> Iterator[TaskResult]:
    """Run tasks in processes; yield results in the order in which they come."""
    if not tasks:
        return
    import joblib

    _join_cluster(backend)
    # Not `Parallel(backend=...)`: that knows no backends from outside joblib.
    try:
        with joblib.parallel_config(backend=backend, n_jobs=jobs):
            parallel = joblib.Parallel(return_as="generator_unordered")
            results = parallel(joblib.delayed(work)(task) for task in tasks)
    except ValueError as error:
        hint = " ".join(str(error).split())
        raise InvalidValue("backend", "one of joblib's", repr(backend), hint) from None
    yield from results


def _join_cluster(backend: str) -> None:
    """Connect to a Dask cluster, which joblib needs before it can use the backend.

    Ray is not supported: its backend for joblib yields no result before it has all of them.
    """
    if backend != "dask":
        return
    try:
        from distributed import Client, default_client
    except ImportError as error:
        must = "one whose package is installed: pip install distributed"
        raise InvalidValue("backend", must, backend) from error
    try:
        default_client()
    except ValueError:
        # Connects to the scheduler of DASK_SCHEDULER_ADDRESS, or starts a cluster on this machine.
        Client(threads_per_worker=1)


def _by_key(runs: Sequence[PlannedRun], keys: Sequence[str]) -> dict[str, list[PlannedRun]]:
    """Group runs by the key of the result that they share."""
    groups: dict[str, list[PlannedRun]] = {}
    for run, key in zip(runs, keys, strict=True):
        groups.setdefault(key, []).append(run)
    return groups


def _threads(recipe: Recipe, jobs: int) -> int | None:
    """CPU threads per process: the recipe's, or all cores shared by the processes."""
    if recipe.threads is not None or jobs == 1:
        return recipe.threads
    import joblib

    return max(1, (usable_cores() or 1) // int(joblib.effective_n_jobs(jobs)))
