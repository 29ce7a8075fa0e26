"""The finished stages of a run: a file per stage, with digests of inputs and outputs.

A stage counts as done if its key matches the current recipe, data and versions, and if its
files are complete. So a run that was killed resumes where it was, and a file of another run or
another recipe is never used.
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
    """A finished stage.

    Args:
        key: Digest of everything that the stage depends on.
        files: SHA-256 of every file that it wrote, by its path in the run's folder.
        noted: What it noted in the record.
    """

    key: str
    files: FrozenDict
    noted: RunRecord

    def __post_init__(self) -> None:
        check_inside("Finished.files", self.files)


class Progress:
    """Runs each stage of a run once, however often the run is started.

    Args:
        journal: The run's. Without a folder, every stage is run and no file is written.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal, self.folder = journal, journal.folder
        self._outputs: dict[str, str] = {}  # by stage, the digest of the files that it wrote
        self._inputs: tuple[Recipe, Mapping[str, Any], Any, Mapping[str, Any]] | None = None

    def begin(
        self,
        recipe: Recipe,
        rows: Mapping[str, Any],
        device: str,
        hardware: Mapping[str, Any],
        versions: Mapping[str, str],
    ) -> None:
        """Set what stages depend on: recipe, facts about the rows, device, hardware, versions."""
        if self.folder is not None:
            start = [made_of(recipe, rows), device, dict(versions)]
            self._inputs = recipe, rows, start, hardware

    def key(self, stage: str) -> str:
        """Return the digest of everything that a stage depends on, after the stages before it."""
        assert self._inputs is not None
        return keys_of(*self._inputs, self._outputs)[stage]

    def done(self, stage: str) -> bool:
        """Whether an earlier run finished a stage; if so, note again what it noted."""
        if self.folder is None:
            return False
        finished = _load_finished(_file(self.folder, stage))
        if finished is None or finished.key != self.key(stage):
            return False
        if hashes(self.folder, tuple(finished.files)) != dict(finished.files):
            return False
        self._outputs[stage] = digest(dict(finished.files))
        self.journal.repeat(finished.noted)
        self.journal.skip(stage)
        return True

    def once(
        self,
        stage: str,
        make: Callable[[], _T],
        load: Callable[[], _T],
        files: Sequence[str] = (),
        named: bool = True,
    ) -> _T:
        """Run a stage, unless an earlier run finished it.

        Args:
            stage: Its name.
            make: Runs it.
            load: Returns the result of ``make``, if an earlier run finished the stage.
            files: The files or folders that it writes, by their paths in the run's folder.
            named: Whether the record lists it as a stage of its own.
        """
        if self.done(stage):
            return load()
        self._remove_files(files)
        with self.journal.collected() as noted:
            if named:
                with self.journal.stage(stage):
                    made = make()
            else:
                made = make()
        if self.folder is not None:
            written = FrozenDict(hashes(self.folder, tuple(files)))
            Finished(self.key(stage), written, noted()).save(_file(self.folder, stage))
            self._outputs[stage] = digest(dict(written))
            shutil.rmtree(self._work(stage), ignore_errors=True)  # of no more use
        return made

    def add_output(self, stage: str, output: Any) -> None:
        """Let later stages depend on what a stage returned, beside its files."""
        self._outputs[stage] = digest([self._outputs.get(stage), output])

    def _remove_files(self, files: Sequence[str]) -> None:
        """Remove files that another recipe's stage left: this one may write fewer of them."""
        if self.folder is None:
            return
        for name in files:
            if (self.folder / name).is_file():
                (self.folder / name).unlink()

    def work(self, stage: str) -> Path | None:
        """Return a folder for a stage's unfinished work, which has the stage's key."""
        return None if self.folder is None else self._work(stage)

    def _work(self, stage: str) -> Path:
        assert self.folder is not None
        return self.folder / WORK / f"{_file_stem(stage)}-{self.key(stage)[:16]}"


def keys_of(
    recipe: Recipe,
    rows: Mapping[str, Any],
    start: Any,
    hardware: Mapping[str, Any],
    outputs: Mapping[str, str],
) -> dict[str, str]:
    """Return every stage's key: a digest of its sections and of the earlier stages.

    Args:
        recipe: The recipe.
        rows: Facts about the data's rows.
        start: What all stages depend on.
        hardware: Facts about the machine.
        outputs: Digests of the files that earlier stages wrote. They belong to the key because a
            stage that is run again may write other files: on a GPU, or by a clock.
    """
    part = recipe.model_dump()
    everything = [start, recipe.seed, part["decode"], part["threads"], facts_of(rows)]
    train = digest([everything, part["train"]])
    base = digest([train, outputs.get("train")])
    # Neurons are counted in the quality's row, and scored.
    sites = [True] if recipe.select.feed_forward else []

    # Scores depend on the calibration rows, those of `auto` also on how it judges plans.
    scored = [base, part["score"], part["select"]["policy"], rows["calibration"], *sites]
    if recipe.score.scorer == "auto":
        judged = [step.model_dump() for step in judged_after(recipe)]
        # Its plans of a speed are made by the latency table.
        scored += [part["select"], judged, recipe.gradual is None, outputs.get("latency")]
    score = digest(scored)

    # From here on every stage depends on the one before it.
    select = digest([score, outputs.get("score"), part["select"], outputs.get("latency")])
    # A speed is met by measurements, so a choice that is made again may be another one.
    chosen = digest([select, outputs.get("select")])
    prune = digest([chosen, part["gradual"]])
    before = digest([prune, outputs.get("prune")])
    # Times of one processor say nothing of another.
    timed_on = [hardware.get(name) for name in ("processor", "threads", "gpu")]
    recoveries = {}
    for i, step in enumerate(part["recover"]):
        name = f"recover {i}"
        recoveries[name] = digest([before, step])
        before = digest([recoveries[name], outputs.get(name)])
    return {
        "train": train,
        "latency": digest([base, part["select"], timed_on]),
        "base quality": digest([base, *sites]) if sites else base,
        "attention": base,
        "score": score,
        "select": select,
        "compare": chosen,
        "prune": prune,
        **recoveries,
        "random": before,
        "answers": before,
        "bench": digest([before, part["bench"], timed_on]),
    }


def take_folder(folder: Path, overwrite: bool, journal: Journal) -> None:
    """Prepare the folder of a run, which this process has locked.

    Finished stages of an unfinished run are kept, everything else of a run is removed. The new
    record is written first: if the process is killed at any moment from then on, the run can be
    resumed.

    Raises:
        InvalidValue: a finished run, or files of no run, are there and ``overwrite`` is False.
    """
    present = [name for name in (*FILES, *FOLDERS) if (folder / name).exists()]
    kept: set[str] = set()
    if present and not overwrite:
        _resume_or_refuse(folder, present, journal)
        kept = {WORK, *_finished_files(folder)}
    journal.begin()
    for name in FILES:
        if name not in (RECORD, *kept):
            (folder / name).unlink(missing_ok=True)
    for name, mark in FOLDERS.items():
        ours = not mark or (folder / name / mark).is_file()
        if name not in kept and ours:
            shutil.rmtree(folder / name, ignore_errors=True)
    remove_parts(folder)


def _resume_or_refuse(folder: Path, present: Sequence[str], journal: Journal) -> None:
    """Say that a killed run resumes; refuse a finished one, and files that belong to no run."""
    hint = "Give another folder with --out, or --overwrite."
    try:
        status = RunRecord.load(folder / RECORD).status
    except HeadPruneError:
        must, got = "free for the files of a run", f"{', '.join(present)} and no readable {RECORD}"
        raise InvalidValue(str(folder), must, got, hint) from None
    if status == "done":
        shutil.rmtree(folder / WORK, ignore_errors=True)  # the run was killed before it did this
        raise InvalidValue(str(folder), "free, or an unfinished run's", "a finished run", hint)
    # This process has the lock, so a run whose record says "running" was killed.
    word = "killed" if status == "running" else status
    journal.say(f"resuming the {word} run in {folder}")


def _finished_files(folder: Path) -> set[str]:
    """The files and folders that finished stages wrote, by their names in the run's folder."""
    names: set[str] = set()
    for path in (folder / WORK).glob("*.json"):
        finished = _load_finished(path)
        if finished is not None:
            names.update(Path(name).parts[0] for name in finished.files)
    return names


def _load_finished(path: Path) -> Finished | None:
    try:
        return Finished.load(path)
    except HeadPruneError:
        return None


def _file(folder: Path, stage: str) -> Path:
    return folder / WORK / f"{_file_stem(stage)}.json"


def _file_stem(stage: str) -> str:
    return stage.replace(" ", "-")
