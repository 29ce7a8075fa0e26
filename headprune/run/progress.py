"""What of a run is done: a file a stage, which says by digests what the stage depends on and what
it left.

So a run that ended early, killed too, goes on where it was, and no file is taken for another's: a
stage counts where its key is that of the recipe, the data and the versions of now, and its files
are whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headprune.core.codec import FrozenDict, Value
from headprune.core.errors import HeadPruneError, InvalidValue
from headprune.core.files import remove_parts
from headprune.core.record import RunRecord
from headprune.recipes.judged import judged_after
from headprune.recipes.schema import Recipe
from headprune.run.identity import check_inside, digest, facts_of, hashes, made_of
from headprune.run.journal import FILES, FOLDERS, RECORD, WORK, Journal

_T = TypeVar("_T")


@dataclass(frozen=True)
class Finished(Value):
    """A stage that is through.

    Args:
        key: Digest of everything that it depends on.
        files: SHA-256 of every file that it left, by its path in the run's folder.
        noted: What it noted in the record.
    """

    key: str
    files: FrozenDict
    noted: RunRecord

    def __post_init__(self) -> None:
        check_inside("Finished.files", self.files)


class Progress:
    """Does the stages of a run, each once, however often the run is begun.

    Args:
        journal: Of the run; one without a folder does everything anew and leaves nothing.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal, self.folder = journal, journal.folder
        self._left: dict[str, str] = {}
        self._parts: tuple[Recipe, Mapping[str, Any], Any] | None = None

    def begin(
        self, recipe: Recipe, rows: Mapping[str, Any], device: str, versions: Mapping[str, str]
    ) -> None:
        """Says what all stages depend on: the recipe, facts about the rows, the device, and
        versions."""
        if self.folder is not None:
            self._parts = recipe, rows, [made_of(recipe, rows), device, dict(versions)]

    def key(self, stage: str) -> str:
        """Digest of everything that a stage depends on, once the stages before it are through."""
        assert self._parts is not None
        return keys_of(*self._parts, self._left)[stage]

    def done(self, stage: str) -> bool:
        """Whether a stage was finished before; what it noted then is noted again."""
        if self.folder is None:
            return False
        found = _finished(_file(self.folder, stage))
        if (
            found is None
            or found.key != self.key(stage)
            or hashes(self.folder, tuple(found.files)) != dict(found.files)
        ):
            return False
        self._left[stage] = digest(dict(found.files))
        self.journal.repeat(found.noted)
        self.journal.say(f"[{stage}] was done before")
        return True

    def once(
        self,
        stage: str,
        make: Callable[[], _T],
        take: Callable[[], _T],
        files: Sequence[str] = (),
        named: bool = True,
    ) -> _T:
        """Does a stage, unless it was finished before.

        Args:
            stage: Its name.
            make: Does it.
            take: Gives what ``make`` gave, where it was finished before.
            files: What it leaves, files or folders, by their paths in the run's folder.
            named: Whether it is a stage of the record, and not a part of one.
        """
        if self.done(stage):
            return take()
        if self.folder is not None:
            for path in (self.folder / name for name in files):
                if path.is_file():  # another recipe left it here, and this one may not make it
                    path.unlink()
        with self.journal.collected() as noted:
            if named:
                with self.journal.stage(stage):
                    made = make()
            else:
                made = make()
        if self.folder is not None:
            left = FrozenDict(hashes(self.folder, tuple(files)))
            Finished(self.key(stage), left, noted()).save(_file(self.folder, stage))
            self._left[stage] = digest(dict(left))
            shutil.rmtree(
                self._work(stage), ignore_errors=True
            )  # nobody goes on from there any more
        return made

    def work(self, stage: str) -> Path | None:
        """A folder for what a stage keeps on its way; no other than this very stage finds it."""
        return None if self.folder is None else self._work(stage)

    def _work(self, stage: str) -> Path:
        assert self.folder is not None
        return self.folder / WORK / f"{_plain(stage)}-{self.key(stage)[:16]}"


def keys_of(
    recipe: Recipe, rows: Mapping[str, Any], start: Any, left: Mapping[str, str]
) -> dict[str, str]:
    """The key of every stage: a digest of the sections of the recipe that it depends on, and of the
    stages before it.

    Args:
        recipe: The recipe.
        rows: Facts about the data's rows.
        start: What everything depends on.
        left: Digests of the files that the stages before left: made again, by a GPU or a clock,
            they may be others.
    """
    part = recipe.model_dump()
    everything = [start, recipe.seed, part["decode"], part["threads"], facts_of(rows)]
    train = digest([everything, part["train"]])
    base = digest([train, left.get("train")])
    scored = [base, part["score"], part["select"]["policy"], rows["calibration"]]
    if recipe.score.scorer == "auto":  # it chooses by what comes after the scores
        judged = [step.model_dump() for step in judged_after(recipe)]
        scored += [part["select"], judged, recipe.gradual is None]
    score = digest(scored)
    select = digest([score, left.get("score"), part["select"], left.get("latency")])
    prune = digest([select, part["gradual"]])
    cut, steps = digest([prune, left.get("prune")]), {}
    for i, step in enumerate(part["recover"]):
        steps[f"recover {i}"] = digest([cut, step])
        cut = digest([steps[f"recover {i}"], left.get(f"recover {i}")])
    return {
        "train": train,
        "latency": digest([base, part["select"]]),
        "base quality": base,
        "attention": base,
        "score": score,
        "select": select,
        "compare": select,
        "prune": prune,
        **steps,
        "bench": digest([cut, part["bench"]]),
    }


def take_folder(folder: Path, overwrite: bool, journal: Journal) -> None:
    """Makes the folder of a run ready, which this process has locked: what an unfinished run
    finished there stays.

    The run's own record comes first: killed at any moment from then on, it can be gone on with.

    Raises:
        InvalidValue: a finished run, or files that are not a run's, are there and ``overwrite`` was
            not given.
    """
    hint = "Give another folder with --out, or --overwrite."
    present = [name for name in (*FILES, *FOLDERS) if (folder / name).exists()]
    kept: set[str] = set()
    if present and not overwrite:
        try:
            status = RunRecord.load(folder / RECORD).status
        except HeadPruneError:
            must = "free for the files of a run"
            raise InvalidValue(
                str(folder), must, f"{', '.join(present)} and no readable {RECORD}", hint
            ) from None
        if status == "done":
            shutil.rmtree(folder / WORK, ignore_errors=True)  # where a kill came just before that
            raise InvalidValue(str(folder), "free, or an unfinished run's", "a finished run", hint)
        # It holds no lock, so one that says that it is running was killed.
        journal.say(
            f"going on with the {'killed' if status == 'running' else status} run in {folder}"
        )
        kept = {WORK, *_vouched(folder)}
    journal.begin()
    for name in FILES:
        if name not in (RECORD, *kept):
            (folder / name).unlink(missing_ok=True)
    for name, mark in FOLDERS.items():
        if name not in kept and (not mark or (folder / name / mark).is_file()):
            shutil.rmtree(folder / name, ignore_errors=True)
    remove_parts(folder)


def _vouched(folder: Path) -> set[str]:
    """The files and folders of which a finished stage says that it left them."""
    finished = map(_finished, (folder / WORK).glob("*.json"))
    return {Path(name).parts[0] for found in finished if found is not None for name in found.files}


def _finished(path: Path) -> Finished | None:
    try:
        return Finished.load(path)
    except HeadPruneError:
        return None


def _file(folder: Path, stage: str) -> Path:
    return folder / WORK / f"{_plain(stage)}.json"


def _plain(stage: str) -> str:
    return stage.replace(" ", "-")
