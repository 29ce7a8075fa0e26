"""Reports of runs, with the pictures, answers and other scores in a record's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headprune.core.agreement import Agreement
from headprune.core.changed import ChangedAnswers
from headprune.core.errors import InvalidValue
from headprune.core.latency import LatencyTable, corrected
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.maps.pictures import AttentionPictures
from headprune.report.comparison import Compared
from headprune.report.inputs import ReportInputs
from headprune.report.write import write_comparison, write_report
from headprune.run.journal import ANSWERS, ATTENTION, LATENCY, RECIPE, record_path

#: Other scores of the run's model, by the run itself or by ``headprune score --out``.
_SCORES = "scores-*.json"


def report_run(record: RunRecord, folder: Path, out: Path | None = None) -> tuple[Path, Path]:
    """Write the reports of a record, with what its folder has; return their paths.

    Args:
        record: The record.
        folder: The folder with attention pictures and other scores.
        out: Folder for the reports; default ``folder``.

    Raises:
        InvalidValue: a file of pictures, scores or latencies that cannot be read.
    """
    inputs = inputs_in(record, folder)
    if (folder / LATENCY).is_file():
        table = LatencyTable.load(folder / LATENCY)
        inputs = replace(inputs, latency=corrected(table, record.metrics))
    return write_report(record, out or folder, inputs)


def compare_runs(paths: Sequence[Path], out: Path) -> tuple[Path, Path]:
    """Write one page about several records.

    Returns:
        The paths of ``comparison.html`` and ``comparison.md``.

    Raises:
        InvalidValue: a record that cannot be read, or the same one twice.
    """
    paths = list(map(record_path, paths))
    check_different("records", paths)
    records = list(map(RunRecord.load, paths))
    names = _names(records, paths)
    # One column of the page per record.
    columns = [Compared(name, record) for name, record in zip(names, records, strict=True)]
    return write_comparison(columns, out, agreement_of(records, names))


def check_different(where: str, paths: Sequence[Path]) -> None:
    """Refuse a list of files that has the same file twice."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise InvalidValue(where, "different from one another", f"{path} twice")
        seen.add(path.resolve())


def inputs_in(record: RunRecord, folder: Path) -> ReportInputs:
    """Load from a folder what belongs to the record: pictures, answers, and other scores."""
    # A run without a report has no pictures, and a killed one may have no scores.
    pictures, changed = None, None
    if (folder / ATTENTION).is_file():
        pictures = AttentionPictures.load(folder / ATTENTION)
    if (folder / ANSWERS).is_file():
        changed = ChangedAnswers.load(folder / ANSWERS)
    # Commands name the recipe where it lies.
    place = str(folder) if (folder / RECIPE).is_file() else None
    found = ReportInputs(pictures, changed=changed, folder=place)
    if record.scores is None:
        return found
    loaded = [HeadScores.load(path) for path in sorted(folder.glob(_SCORES))]
    others = tuple(scores for scores in loaded if _comparable(scores, record.scores))
    return replace(found, scores=others, agreement=_agreement([record.scores, *others], None))


def agreement_of(records: Sequence[RunRecord], names: Sequence[str]) -> Agreement | None:
    """Measure how alike the scores of several records order the heads.

    Only scores that are comparable with the first ones take part.

    Returns:
        None if fewer than two do.
    """
    scores: list[HeadScores] = []
    scored: list[str] = []
    for name, record in zip(names, records, strict=True):
        if record.scores is None:
            continue
        if not scores or _comparable(record.scores, scores[0]):
            scores.append(record.scores)
            scored.append(name)
    return _agreement(scores, scored)


def _agreement(scores: Sequence[HeadScores], names: Sequence[str] | None) -> Agreement | None:
    # Of heads alone: thousands of neurons would decide.
    scores = [one.without_neurons() for one in scores]
    # Nothing to compare, or a single head.
    if len(scores) < 2 or sum(len(row) for row in scores[0].values) < 2:
        return None
    from headprune.scoring._agreement import agreement

    return agreement(*scores, names=names)


def _comparable(a: HeadScores, b: HeadScores) -> bool:
    """Whether two scores are of the same units of models with the same structure."""
    units_a = [(site.name, site.units) for site in a.sites]
    units_b = [(site.name, site.units) for site in b.sites]
    return a.model.structure == b.model.structure and units_a == units_b


def _names(records: Sequence[RunRecord], paths: Sequence[Path]) -> list[str]:
    """Names of the columns, all different: the runs' names, else their folders, else paths."""
    run_names = [record.name for record in records]
    folder_names = [path.resolve().parent.name for path in paths]
    for names in (run_names, folder_names):
        if len(set(names)) == len(names):
            return names
    return list(map(str, paths))
