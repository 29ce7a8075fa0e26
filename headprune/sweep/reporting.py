"""The page of a sweep: its table, with speed, random heads and what `pick` answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headprune.core.codec import FrozenDict
from headprune.core.errors import HeadPruneError
from headprune.core.paired import Answers, Drop, drop_of_means
from headprune.core.sweeps import Setting, SweepTable
from headprune.report.inputs import SweepInputs
from headprune.report.write import write_tradeoff
from headprune.run.journal import RECORD, TABLE
from headprune.sweep.base import BASES, MARK, Base
from headprune.sweep.pick import pick
from headprune.sweep.runs import RUNS, SweepRun
from headprune.sweep.speeds import load_speeds
from headprune.sweep.tasks import outcome_of

#: The drop that the page asks `pick` about, and the largest that it suggests.
_ONE_POINT, _LARGEST = 0.01, 0.1


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's, with a table and no record."""
    return (folder / TABLE).is_file() and not (folder / RECORD).exists()


def report_sweep(folder: Path, out: Path | None = None) -> list[Path]:
    """Draw the pages and pictures of a sweep's table again; return their paths.

    Args:
        folder: The sweep's folder.
        out: Folder for the pages; default ``folder``.

    Raises:
        InvalidValue: a table that cannot be read.
    """
    table = SweepTable.load(folder / TABLE)
    picked, max_drop = _pick(folder)
    inputs = SweepInputs(
        speeds=load_speeds(folder),
        against_random=_against_random(table, folder),
        pick=picked,
        max_drop=max_drop if _can_be_made_again(table, folder) else None,
        folder=str(folder),
    )
    return write_tradeoff(table, out or folder, inputs)


def _pick(folder: Path) -> tuple[str, float | None]:
    """What `pick` answers at one point, and a drop at which it finds a model."""
    # A table can be elsewhere than the results that it was made from.
    try:
        found = pick(folder, max_drop=_ONE_POINT)
    except HeadPruneError:
        return "", None
    if found.run is not None:
        return str(found), _ONE_POINT
    allowable = found.allowable
    return str(found), allowable if 0 < allowable <= _LARGEST else None


def _can_be_made_again(table: SweepTable, folder: Path) -> bool:
    """Whether local data of the sweep is found from this working directory, as ``pick`` needs."""
    if not table.rows:
        return False
    try:
        run = SweepRun.load(folder / RUNS / f"{table.rows[0]['run']}.json")
        source = Base.load(folder / BASES / run.base[:16] / MARK).rows["source"]
    except HeadPruneError:
        return False
    # Only local files have hashes.
    return "sha256" not in source or Path(source["path"]).expanduser().exists()


def _against_random(table: SweepTable, folder: Path) -> tuple[Drop | None, ...]:
    """Compare every setting with random heads of the same budget, on test rows."""
    settings = table.settings()
    chance = {_but_scorer(one): one for one in settings if one.is_random}
    found: list[Drop | None] = []
    for setting in settings:
        random = chance.get(_but_scorer(setting))
        if random is None or setting.is_random:
            found.append(None)
            continue
        try:
            own, others = _answers(setting.rows, folder), _answers(random.rows, folder)
            found.append(drop_of_means(others, own))
        except HeadPruneError:
            found.append(None)
    return tuple(found)


def _but_scorer(setting: Setting) -> tuple[tuple[str, str], ...]:
    """Return a key that is equal for settings that differ only in the scorer."""
    values = setting.values.items()
    return tuple((key, str(value)) for key, value in values if not key.startswith("score"))


def _answers(rows: Sequence[FrozenDict], folder: Path) -> list[Answers]:
    answers = []
    for row in rows:
        run = SweepRun.load(folder / RUNS / f"{row['run']}.json")
        answers.append(outcome_of(folder, str(run.outcome)).answers("test"))
    return answers
