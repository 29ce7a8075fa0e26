"""``run_recipe``: the whole line, from data to report; the only place where all the verbs are composed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.files import write_atomic
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.run import stages
from headprune.run.choosing import choose_heads, measure_speed, measure_table
from headprune.run.journal import ATTENTION, MAGNITUDE, PLAN, RECIPE, SCORES, Journal, take_folder, to_stderr
from headprune.run.launched import Launch
from headprune.run.pictures import draw_attention
from headprune.run.recipe import Recipe
from headprune.run.subject import Subject, prepare_subject, quiet
from headprune.run.validate import load_recipe, recipe_yaml


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

    The folder gets ``record.json`` (written again after every stage), ``recipe.yaml`` (the whole recipe, which runs
    again as it is), ``rows.json``, ``scores.json`` with its samples beside it (``scores.samples.safetensors``),
    ``scores-magnitude.json`` where the plan is compared with magnitude, ``plan.json``, the cut model in ``model/`` with
    its tokenizer or image processor, ``attention.json`` (what heads attend to in some test rows), ``report.html`` and
    ``report.md``, and, where the run trained it, the uncut model in ``base/``.
    ``rows.json`` says which rows were used: for every purpose the split they come from and their numbers there, under
    the same ``digest`` as in the record's ``rows``.

    Args:
        recipe: A path, the name of a shipped recipe, or a Recipe.
        settings: ``dotted.key=value`` overrides.
        out: The folder; default that of the recipe, ``runs/<name>``.
        overwrite: Replace a run that is there and finished, or is marked as running.
        say: Takes lines of progress.
        progress: Show progress bars, with the time that is left; None shows them on a terminal.
        launch: The first of several processes, of which the others are in ``share_scoring``.

    Returns:
        The finished record.

    Raises:
        HeadPruneError: bad input, or a proof that failed; the record then says so, and how far the run came.
    """
    chosen = resolved(recipe, settings, out)
    folder = Path(chosen.folder)
    take_folder(folder, overwrite, say)
    quiet()
    journal = Journal(chosen.name, chosen.model_dump(), folder, say, progress)
    with _ending(journal):
        write_atomic(folder / RECIPE, recipe_yaml(chosen).encode())
        _line(chosen, journal, folder, launch)
        if chosen.report:
            _report(journal, folder)
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
    """What a process other than the first does in a run: its share of the scoring; it says and writes nothing.

    Raises:
        HeadPruneError: what the first process meets, too.
        ProcessFailed: another process failed, or is gone.
    """
    chosen = resolved(recipe, settings, None)
    quiet()
    journal = Journal(chosen.name, chosen.model_dump(), None, lambda line: None, False)
    stages.chosen_scores(replace(prepare_subject(chosen, journal, train=False), launch=launch))


def resolved(recipe: str | Path | Recipe, settings: Iterable[str], out: str | Path | None) -> Recipe:
    """The checked recipe, with ``out`` in place of its own folder.

    Raises:
        HeadPruneError: it is not there, or not valid.
    """
    settings = list(settings)
    if isinstance(recipe, Recipe):
        if settings:
            raise InvalidValue("settings", "left out for a Recipe, which is checked already", settings)
        chosen = recipe
    else:
        chosen = load_recipe(recipe, settings)
    return chosen if out is None else chosen.model_copy(update={"out": str(out)})


def _line(recipe: Recipe, journal: Journal, folder: Path, launch: Launch | None) -> None:
    subject = replace(prepare_subject(recipe, journal), launch=launch)
    if recipe.select.timed:
        with journal.stage("latency"):
            measure_table(subject)
    with journal.stage("base quality"):
        subject.report(subject.model, "base", stages.count_heads(subject, subject.model))
    if recipe.report:
        with journal.stage("attention"):
            _attention(subject, folder)
    with journal.stage("score"):
        scored = stages.score_heads(subject)
        scored.chosen.save(folder / SCORES)
        if scored.magnitude is not None:
            scored.magnitude.save(folder / MAGNITUDE)
    with journal.stage("select"):
        plan = choose_heads(subject, scored.chosen)
        plan.save(folder / PLAN)
        journal.note(plan=plan)
        for line in (plan.title, *plan.notes):
            journal.tell(line)
    with journal.stage("compare"):
        stages.compare_plans(subject, scored, plan)
    with journal.stage("prune"):
        pruned = stages.cut(subject, plan) if recipe.gradual is None else stages.cut_gradually(subject, folder)
    if recipe.recover:
        with journal.stage("recover"):
            stages.recover(subject, pruned)
    with journal.stage("bench"):
        measure_speed(subject, pruned)
        stages.bench(subject, pruned, scored.chosen.costs.length if scored.chosen.costs else 1)
    with journal.stage("save"):
        stages.keep(subject, pruned, folder)


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
    except KeyboardInterrupt:
        journal.close("interrupted", "interrupted by the user")
        raise
    except BaseException as error:
        text = str(error) if isinstance(error, HeadPruneError) else f"{type(error).__name__}: {error}"
        journal.close("failed", text)
        raise
    journal.close("done")


def _report(journal: Journal, folder: Path) -> None:
    from headprune.run.reporting import report_run

    journal.note(stage="report")
    journal.write()
    journal.say("[report]")
    # The report shows the finished run, so it is not timed as a stage: drawn again from the record it is the same.
    for path in report_run(replace(journal.record, status="done"), folder):
        journal.tell(f"wrote {path}")
