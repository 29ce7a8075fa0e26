"""Reports of runs and sweeps: finds what lies beside a record and hands it to the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headprune.core.agreement import Agreement
from headprune.core.errors import InvalidValue
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.core.sweeps import SweepTable
from headprune.maps.pictures import AttentionPictures
from headprune.report.comparison import Compared
from headprune.report.inputs import ReportInputs
from headprune.report.write import write_comparison, write_report, write_tradeoff
from headprune.run.journal import ATTENTION, RECORD, TABLE, record_path

#: Other scores of the run's model: ``scores-magnitude.json``, or what ``headprune score --out``
#: wrote there.
_SCORES = "scores-*.json"


def report_run(record: RunRecord, folder: Path, out: Path | None = None) -> tuple[Path, Path]:
    """Writes the reports of a record with everything that lies in its folder; returns their paths.

    Args:
        record: The record.
        folder: Where attention pictures and other scores are looked for.
        out: Where the reports go; default ``folder``.

    Raises:
        InvalidValue: a file of pictures or scores that cannot be read.
    """
    return write_report(record, out or folder, beside(record, folder))


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep, which has a table and no record."""
    return (folder / TABLE).is_file() and not (folder / RECORD).exists()


def report_sweep(folder: Path, out: Path | None = None) -> list[Path]:
    """Draws the pages and pictures of a sweep's table anew; returns their paths.

    Args:
        folder: Of the sweep.
        out: Where they go; default ``folder``.

    Raises:
        InvalidValue: a table that cannot be read.
    """
    return write_tradeoff(
        SweepTable.load(folder / TABLE), out or folder, sweep=folder if out else None
    )


def compare_runs(paths: Sequence[Path], out: Path) -> tuple[Path, Path]:
    """Writes one page over several records; returns the paths of ``comparison.html`` and
    ``comparison.md``.

    Raises:
        InvalidValue: a record that cannot be read, or the same one twice.
    """
    paths = [record_path(path) for path in paths]
    twice = next(
        (p for i, p in enumerate(paths) if p.resolve() in {q.resolve() for q in paths[:i]}), None
    )
    if twice is not None:
        raise InvalidValue("records", "different from one another", f"{twice} twice")
    records = [RunRecord.load(path) for path in paths]
    names = _names(records, paths)
    found = [Compared(name, record) for name, record in zip(names, records, strict=True)]
    return write_comparison(found, out, agreement_of(records, names))


def beside(record: RunRecord, folder: Path) -> ReportInputs:
    """What lies in a folder and belongs to the record's model."""
    pictures = (
        AttentionPictures.load(folder / ATTENTION) if (folder / ATTENTION).is_file() else None
    )
    if record.scores is None:
        return ReportInputs(pictures)
    found = [HeadScores.load(path) for path in sorted(folder.glob(_SCORES))]
    others = tuple(scores for scores in found if _alike(scores, record.scores))
    return ReportInputs(pictures, others, _agreement([record.scores, *others], None))


def agreement_of(records: Sequence[RunRecord], names: Sequence[str]) -> Agreement | None:
    """How alike the scores of several records order the heads, where two or more scored the same
    sites of one structure."""
    scored = [
        (name, r.scores) for name, r in zip(names, records, strict=True) if r.scores is not None
    ]
    alike = [(name, scores) for name, scores in scored if _alike(scores, scored[0][1])]
    return _agreement([scores for _, scores in alike], [name for name, _ in alike])


def _agreement(scores: Sequence[HeadScores], names: Sequence[str] | None) -> Agreement | None:
    if len(scores) < 2 or sum(len(row) for row in scores[0].values) < 2:
        return None
    from headprune.scoring._agreement import agreement

    return agreement(*scores, names=names)


def _alike(a: HeadScores, b: HeadScores) -> bool:
    """Whether two scores are of the same units of models of one structure."""
    units = [[(site.name, site.units) for site in scores.sites] for scores in (a, b)]
    return a.model.structure == b.model.structure and units[0] == units[1]


def _names(records: Sequence[RunRecord], paths: Sequence[Path]) -> list[str]:
    """What tells the columns apart: the runs' names, else their folders, else their paths."""
    for names in ([r.name for r in records], [p.resolve().parent.name for p in paths]):
        if len(set(names)) == len(names):
            return names
    return [str(p) for p in paths]
