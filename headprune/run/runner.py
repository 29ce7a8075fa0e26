"""``run_recipe``: a whole run from data to report; ``_run_stages`` lists its stages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from headprune.bench.quality import Quality
from headprune.core.errors import InvalidValue, error_text
from headprune.core.files import write_atomic
from headprune.core.latency import SAVINGS_FACTOR, corrected
from headprune.core.locking import locked
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import load_recipe, recipe_yaml
from headprune.run import stages
from headprune.run.choosing import (
    choose_by_measured_speed,
    load_table,
    measure_speed,
    measure_table,
    use_table,
)
from headprune.run.journal import (
    ANSWERS,
    ATTENTION,
    COMPANIONS,
    LATENCY,
    MAGNITUDE,
    PLAN,
    RECIPE,
    SCORES,
    WORK,
    Journal,
    to_stderr,
)
from headprune.run.launched import Launch
from headprune.run.pictures import draw_attention
from headprune.run.progress import Progress, take_folder
from headprune.run.subject import Subject, prepare_subject, quiet

_SCORE_FILES = (SCORES, *COMPANIONS, MAGNITUDE)


def run_recipe(
    recipe: str | Path | Recipe,
    settings: Iterable[str] = (),
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = to_stderr,
    progress: bool | None = None,
    launch: Launch | None = None,
) -> RunRecord:
    """Run a recipe from data to report, and write everything to one folder.

    The folder gets ``record.json`` (rewritten after every stage), ``recipe.yaml`` (the whole
    recipe), ``rows.json`` (which rows of which split served which purpose),
    ``scores.json`` with its samples, ``scores-magnitude.json``, ``plan.json``, the cut model in
    ``model/``, ``attention.json``, ``report.html`` and ``report.md``. If the run trained the uncut
    model, that is in ``base/``.

    Only one process at a time can use a folder. A run that failed or was interrupted there is
    resumed: stages are reused if their recipe, data, model and versions are unchanged, and
    trainings resume from their last checkpoint. The result is that of an uninterrupted run.

    Args:
        recipe: A path, the name of a shipped recipe, or a Recipe.
        settings: ``dotted.key=value`` overrides.
        out: The folder; default that of the recipe, ``runs/<name>``.
        overwrite: Start anew, whatever run is in the folder.
        say: Takes lines of progress.
        progress: Show progress bars; None shows them on a terminal.
        launch: The first of several processes; the others run ``share_scoring``.

    Returns:
        The finished record.

    Raises:
        HeadPruneError: bad input, a finished run or another process in the folder, or a proof that
            failed. The record then has the error and the stage.
    """
    chosen = resolved(recipe, settings, out)
    folder = Path(chosen.folder)
    with locked(folder, "a run"):
        journal = Journal(chosen.name, chosen.model_dump(), folder, say, progress)
        take_folder(folder, overwrite, journal)  # keeps what an earlier run finished
        quiet()
        with _closing(journal):
            write_atomic(folder / RECIPE, recipe_yaml(chosen).encode())
            _run_stages(chosen, journal, folder, launch)
            if chosen.report:
                _report(journal, folder)
        shutil.rmtree(folder / WORK, ignore_errors=True)
    return journal.record


def _run_stages(recipe: Recipe, journal: Journal, folder: Path, launch: Launch | None) -> None:
    """Run all stages of a recipe; ``progress.once`` reuses what an earlier run finished."""
    progress = Progress(journal)
    journal.expect(_count_stages(recipe, random=stages.expects_random(recipe)))

    # 1. Load the data and the model, and train the model if the recipe says so.
    subject = prepare_subject(recipe, journal, progress=progress)
    subject = replace(subject, launch=launch)

    # 2. Time every layer at the sizes that it can be cut to, if a budget is one of speed.
    if recipe.select.timed:
        measure, load = partial(measure_table, subject), partial(load_table, subject)
        progress.once("latency", measure, load, (LATENCY,))

    # 3. Measure the uncut model.
    n_heads = stages.count_heads(subject, subject.model)
    progress.once("base quality", partial(stages.judge_base, subject, n_heads), _nothing)

    # 4. Draw what the heads attend to in some test rows.
    if recipe.report:
        draw = partial(_draw_attention, subject, folder)
        progress.once("attention", draw, _nothing, (ATTENTION,))

    # 5. Score every head on the calibration rows.
    work = progress.work("score")
    scores = progress.once(
        "score",
        partial(_score, subject, folder, work),
        partial(_load_scores, subject, folder),
        _SCORE_FILES,
    )
    random = stages.refits_random(recipe, scores)
    journal.expect(_count_stages(recipe, random))

    # 6. Choose the heads to keep.
    select, load_plan = partial(_select, subject, scores.chosen), partial(_load_plan, subject)
    plan = progress.once("select", select, load_plan)
    plan.save(folder / PLAN)
    progress.add_output("select", [plan.mask.digest, journal.record.metrics.get(SAVINGS_FACTOR)])

    # 7. Compare the plan with plans by magnitude and by random scores, at the same budget.
    compare = partial(stages.compare_plans, subject, scores, plan)
    quality = progress.once("compare", compare, _nothing)

    # 8. Cut the heads out of a copy of the model: all at once, or in stages with training.
    if recipe.gradual is None:
        with journal.stage("prune"):
            pruned = stages.cut(subject, plan)
    else:
        pruned, quality = _cut_gradually(subject, scores.chosen, folder, progress)

    # 9. Recover accuracy, by every recovery of the recipe in turn.
    if recipe.recover:
        with journal.stage("recover"):
            pruned, quality = stages.recover(subject, pruned, progress)

    # 10. Compare the final model with random heads that were recovered alike, and its answers with
    # those of the uncut model. If an earlier run measured it, it is measured again.
    @cache
    def final() -> Quality:
        return quality or subject.judge(pruned, "test")

    if random:
        progress.once("random", lambda: stages.compare_refitted(subject, scores, final()), _nothing)
    progress.once(
        "answers",
        lambda: stages.compare_answers(subject, final()).save(folder / ANSWERS),
        _nothing,
        (ANSWERS,),
    )

    # 11. Measure sizes and speed.
    length = scores.chosen.costs.length if scores.chosen.costs else 1
    progress.once("bench", partial(_bench, subject, pruned, length), _nothing)

    # 12. Save the cut model and prove that it loads again unchanged.
    with journal.stage("save"):
        stages.save_model(subject, pruned, folder)


def _count_stages(recipe: Recipe, random: bool) -> int:
    """Count the stages of ``_run_stages``; ``random`` is whether random heads are recovered."""
    always = (
        "data",
        "model",
        "base quality",
        "score",
        "select",
        "compare",
        "prune",
        "answers",
        "bench",
        "save",
    )
    sometimes = (
        recipe.train is not None,
        recipe.select.timed,
        recipe.report,
        bool(recipe.recover),
        random,
    )
    return len(always) + sum(sometimes)


# ---------------------------------------------------------- stages with their files in the folder


def _nothing() -> Any:
    """Load nothing, for stages that leave only notes in the record."""


def _draw_attention(subject: Subject, folder: Path) -> None:
    pictures = draw_attention(subject)
    if pictures is not None:
        pictures.save(folder / ATTENTION)
        subject.journal.tell(str(pictures))


def _score(subject: Subject, folder: Path, work: Path | None) -> stages.RunScores:
    scores = stages.score_heads(subject, work=work)
    scores.chosen.save(folder / SCORES)
    if scores.magnitude is not None:
        scores.magnitude.save(folder / MAGNITUDE)
    return scores


def _load_scores(subject: Subject, folder: Path) -> stages.RunScores:
    """Load the chosen scores; the baselines need no data and are made again."""
    return stages.score_heads(subject, HeadScores.load(folder / SCORES))


def _select(subject: Subject, scores: HeadScores) -> PruningPlan:
    plan = choose_by_measured_speed(subject, scores)
    subject.journal.note(plan=plan)
    for line in (plan.title, *plan.notes):
        subject.journal.tell(line)
    return plan


def _load_plan(subject: Subject) -> PruningPlan:
    """Return the plan of an earlier run, and correct the latency table as that run did."""
    if subject.recipe.select.timed:
        assert subject.latency is not None
        use_table(subject, corrected(subject.latency, subject.journal.record.metrics))
    return _plan_of(subject.journal)


def _plan_of(journal: Journal) -> PruningPlan:
    """Return the plan that is in the record."""
    assert journal.record.plan is not None
    return journal.record.plan


def _cut_gradually(
    subject: Subject, scores: HeadScores, folder: Path, progress: Progress
) -> stages.Judged:
    """Cut in stages with training, or load the model that an earlier run cut."""
    place = stages.stage_folder("prune")
    work = progress.work("prune")

    def make() -> stages.Judged:
        pruned, quality = stages.cut_gradually(subject, scores, work)
        stages.save_cut_model(subject, pruned, place)
        return pruned, quality

    load = partial(stages.load_cut_model, subject, place)
    judged = progress.once("prune", make, load, (place,))
    _plan_of(subject.journal).save(folder / PLAN)  # the heads that the last stage kept
    return judged


def _bench(subject: Subject, pruned: nn.Module, length: int) -> None:
    measure_speed(subject, pruned)
    # A speed that was asked for is of examples with this length.
    if subject.latency is not None:
        length = subject.latency.length
    stages.bench(subject, pruned, length)


def _report(journal: Journal, folder: Path) -> None:
    """Draw the report of the finished run.

    It is not timed as a stage, so that a report drawn later from the record is the same.
    """
    from headprune.run.reporting import report_run

    journal.note(stage="report")
    journal.write()
    journal.say("[report]")
    # The report says "done", although the run is done only after it.
    for path in report_run(replace(journal.record, status="done"), folder):
        journal.tell(f"wrote {path}")


@contextmanager
def _closing(journal: Journal) -> Iterator[None]:
    """Close the journal however the run ends; an error is noted and raised again."""
    try:
        yield
        journal.close("done")
    except BaseException as error:
        status, text = "failed", error_text(error)
        if isinstance(error, KeyboardInterrupt):
            status, text = "interrupted", "interrupted by the user"
            journal.say("interrupted: the same command resumes after the last finished stage")
        # On a full disk the record cannot be written either. Then it stays at "running", as after
        # a kill, and says how far the run came.
        with suppress(OSError):
            journal.close(status, text)
        raise


# ---------------------------------------------------------------------------------- parts of a run


def prepared(
    recipe: str | Path | Recipe,
    settings: Iterable[str] = (),
    *,
    say: Callable[[str], None] = to_stderr,
    progress: bool | None = None,
) -> Subject:
    """Run a recipe as far as the trained model and its data (``.model``, ``.data``).

    Writes nothing.
    """
    chosen = resolved(recipe, settings, None)
    quiet()
    return prepare_subject(chosen, Journal(chosen.name, chosen.model_dump(), None, say, progress))


def score_recipe(
    recipe: str | Path | Recipe,
    settings: Iterable[str] = (),
    *,
    say: Callable[[str], None] = to_stderr,
    progress: bool | None = None,
) -> HeadScores:
    """Run a recipe as far as the scores; writes nothing."""
    subject = prepared(recipe, settings, say=say, progress=progress)
    with subject.journal.stage("score"):
        return stages.score_heads(subject).chosen


def share_scoring(recipe: str | Path | Recipe, settings: Iterable[str], launch: Launch) -> None:
    """Do this process's share of the scoring; the first process does the run.

    Prints and writes nothing.

    Raises:
        HeadPruneError: the same as in the first process.
        ProcessFailed: another process failed or ended.
    """
    chosen = resolved(recipe, settings, None)
    quiet()
    journal = Journal(chosen.name, chosen.model_dump(), None, lambda line: None, False)
    subject = prepare_subject(chosen, journal, train=False)
    with launch.met(subject.model) as processes:
        if processes is not None:
            stages.score_calibration(subject, processes)


def resolved(
    recipe: str | Path | Recipe, settings: Iterable[str], out: str | Path | None
) -> Recipe:
    """Return the checked recipe, with ``out`` in place of its own folder.

    Raises:
        HeadPruneError: it does not exist, or it is not valid.
    """
    settings = list(settings)
    if isinstance(recipe, Recipe):
        if settings:
            must = "left out for a Recipe, which is checked already"
            raise InvalidValue("settings", must, settings)
        chosen = recipe
    else:
        chosen = load_recipe(recipe, settings)
    if out is None:
        return chosen
    return chosen.model_copy(update={"out": str(out)})
