"""``run_recipe``: the whole line, from data to report; the only place where all the verbs are
composed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.files import write_atomic
from headprune.core.locking import locked
from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import load_recipe, recipe_yaml
from headprune.run import stages
from headprune.run.choosing import choose_heads, measure_speed, measure_table, take_table
from headprune.run.journal import (
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

_SCORES = (SCORES, *COMPANIONS, MAGNITUDE)


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
    """Runs a recipe and leaves everything in one folder.

    The folder gets ``record.json`` (written again after every stage), ``recipe.yaml`` (the whole
    recipe, which runs again as it is), ``rows.json``, ``scores.json`` with its samples beside it
    (``scores.samples.safetensors``), ``scores-magnitude.json`` where the plan is compared with
    magnitude, ``plan.json``, the cut model in ``model/`` with its tokenizer or image processor,
    ``attention.json`` (what heads attend to in some test rows), ``report.html`` and ``report.md``,
    and, where the run trained it, the uncut model in ``base/``. ``rows.json`` says which rows were
    used: for every purpose the split they come from and their numbers there, under the same
        ``digest`` as in the record's ``rows``.

    A folder is one process's at a time. A run that failed, was interrupted or killed there is gone
    on with: what it finished is taken where it depends on nothing that has changed since (recipe,
    data, model, versions), trainings continue from their last checkpoint, and the result is that of
    a run that nothing happened to.

    Args:
        recipe: A path, the name of a shipped recipe, or a Recipe.
        settings: ``dotted.key=value`` overrides.
        out: The folder; default that of the recipe, ``runs/<name>``.
        overwrite: Begin anew, whatever run is there.
        say: Takes lines of progress.
        progress: Show progress bars, with the time that is left; None shows them on a terminal.
        launch: The first of several processes, of which the others are in ``share_scoring``.

    Returns:
        The finished record.

    Raises:
        HeadPruneError: bad input, a finished run or another process in the folder, or a proof that
            failed; the record then says so, and how far the run came.
    """
    chosen = resolved(recipe, settings, out)
    folder = Path(chosen.folder)
    with locked(folder, "a run"):
        journal = Journal(chosen.name, chosen.model_dump(), folder, say, progress)
        take_folder(folder, overwrite, journal)
        quiet()
        with _ending(journal):
            write_atomic(folder / RECIPE, recipe_yaml(chosen).encode())
            _line(chosen, journal, folder, launch)
            if chosen.report:
                _report(journal, folder)
        shutil.rmtree(folder / WORK, ignore_errors=True)
    return journal.record


def prepared(
    recipe: str | Path | Recipe,
    settings: Iterable[str] = (),
    *,
    say: Callable[[str], None] = to_stderr,
    progress: bool | None = None,
) -> Subject:
    """The line as far as a trained model and its data (``.model``, ``.data``); writes nothing."""
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
    """The line as far as the scores; writes nothing."""
    subject = prepared(recipe, settings, say=say, progress=progress)
    with subject.journal.stage("score"):
        return stages.score_heads(subject).chosen


def share_scoring(recipe: str | Path | Recipe, settings: Iterable[str], launch: Launch) -> None:
    """What a process other than the first does in a run: its share of the scoring; it says and
    writes nothing.

    Raises:
        HeadPruneError: what the first process meets, too.
        ProcessFailed: another process failed, or is gone.
    """
    chosen = resolved(recipe, settings, None)
    quiet()
    journal = Journal(chosen.name, chosen.model_dump(), None, lambda line: None, False)
    subject = prepare_subject(chosen, journal, train=False)
    with launch.met(subject.model) as processes:
        if processes is not None:
            stages.chosen_scores(subject, processes)


def resolved(
    recipe: str | Path | Recipe, settings: Iterable[str], out: str | Path | None
) -> Recipe:
    """The checked recipe, with ``out`` in place of its own folder.

    Raises:
        HeadPruneError: it is not there, or not valid.
    """
    settings = list(settings)
    if isinstance(recipe, Recipe):
        if settings:
            raise InvalidValue(
                "settings", "left out for a Recipe, which is checked already", settings
            )
        chosen = recipe
    else:
        chosen = load_recipe(recipe, settings)
    return chosen if out is None else chosen.model_copy(update={"out": str(out)})


def _line(recipe: Recipe, journal: Journal, folder: Path, launch: Launch | None) -> None:
    progress = Progress(journal)
    once = progress.once
    subject = replace(prepare_subject(recipe, journal, progress=progress), launch=launch)
    if recipe.select.timed:
        once("latency", lambda: measure_table(subject), lambda: take_table(subject), (LATENCY,))
        assert subject.latency is not None
    whole = stages.count_heads(subject, subject.model)
    once("base quality", lambda: subject.report(subject.model, "base", whole), _nothing)
    if recipe.report:
        once("attention", lambda: _attention(subject, folder), _nothing, (ATTENTION,))
    scored = once(
        "score",
        lambda: _score(subject, folder, progress.work("score")),
        lambda: _scores(subject, folder),
        _SCORES,
    )
    plan = once("select", lambda: _select(subject, scored.chosen), lambda: _plan(journal))
    plan.save(folder / PLAN)
    once("compare", lambda: stages.compare_plans(subject, scored, plan), _nothing)
    if recipe.gradual is None:
        with journal.stage("prune"):
            pruned = stages.cut(subject, plan)
    else:
        place = stages.kept_place("prune")
        work = progress.work("prune")
        pruned = once(
            "prune",
            lambda: _gradual(subject, scored.chosen, work, place),
            lambda: stages.reopened(subject, place),
            (place,),
        )
        _plan(journal).save(folder / PLAN)
    if recipe.recover:
        with journal.stage("recover"):
            pruned = stages.recover(subject, pruned, progress)
    length = scored.chosen.costs.length if scored.chosen.costs else 1
    once("bench", lambda: _bench(subject, pruned, length), _nothing)
    with journal.stage("save"):
        stages.keep(subject, pruned, folder)


def _nothing() -> None:
    """For stages that leave nothing but notes."""


def _score(subject: Subject, folder: Path, work: Path | None) -> stages.Scored:
    scored = stages.score_heads(subject, work=work)
    scored.chosen.save(folder / SCORES)
    if scored.magnitude is not None:
        scored.magnitude.save(folder / MAGNITUDE)
    return scored


def _scores(subject: Subject, folder: Path) -> stages.Scored:
    """Those that lie in the folder; the baselines need no data and are taken again."""
    return stages.score_heads(subject, HeadScores.load(folder / SCORES))


def _select(subject: Subject, scores: HeadScores) -> PruningPlan:
    plan = choose_heads(subject, scores)
    subject.journal.note(plan=plan)
    for line in (plan.title, *plan.notes):
        subject.journal.tell(line)
    return plan


def _plan(journal: Journal) -> PruningPlan:
    assert journal.record.plan is not None
    return journal.record.plan


def _gradual(subject: Subject, scores: HeadScores, work: Path | None, place: str) -> nn.Module:
    pruned = stages.cut_gradually(subject, scores, work)
    stages.put_by(subject, pruned, place)
    return pruned


def _bench(subject: Subject, pruned: nn.Module, length: int) -> None:
    measure_speed(subject, pruned)
    stages.bench(subject, pruned, length)


def _attention(subject: Subject, folder: Path) -> None:
    pictures = draw_attention(subject)
    if pictures is not None:
        pictures.save(folder / ATTENTION)
        subject.journal.tell(str(pictures))


@contextmanager
def _ending(journal: Journal) -> Iterator[None]:
    """Closes the journal however the run ends; what went wrong goes on to the caller."""
    try:
        yield
        journal.close("done")
    except BaseException as error:
        text = (
            str(error) if isinstance(error, HeadPruneError) else f"{type(error).__name__}: {error}"
        )
        stopped = isinstance(error, KeyboardInterrupt)
        with suppress(
            OSError
        ):  # no room for that either: then the record says how far it came, as after a kill
            journal.close(
                *("interrupted", "interrupted by the user") if stopped else ("failed", text)
            )
        raise


def _report(journal: Journal, folder: Path) -> None:
    from headprune.run.reporting import report_run

    journal.note(stage="report")
    journal.write()
    journal.say("[report]")
    # The report shows the finished run, so it is not timed as a stage: drawn again from the record
    # it is the same.
    for path in report_run(replace(journal.record, status="done"), folder):
        journal.tell(f"wrote {path}")
