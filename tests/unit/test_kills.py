"""Runs and sweeps that are killed (SIGKILL) at random moments come to the result of those that
nothing happened to."""

from __future__ import annotations

import functools
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.core.record import RunRecord
from tests import killing

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")

Whole = tuple[Path, tuple[float, int]]
#: Of a saved model.
FILES = {"model.safetensors", "headprune.json", "config.json", "README.md"}
#: What is done, how results are compared, and the seed of the moments.
WORK: dict[str, Any] = {
    "a run": (killing.the_run, killing.same_runs, 0),
    "a run in stages": (killing.the_gradual_run, killing.same_runs, 2),
    "a sweep": (killing.the_sweep, killing.same_sweeps, 3),
}
#: Even numbers are moments in time, odd ones calls that change files; number 2 is killed twice.
MOMENTS = [(1, "a run"), (2, "a run")]
MANY = [
    *((number, "a run") for number in (0, *range(3, 20))),
    *((number, "a run in stages") for number in range(6)),
    *((number, "a sweep") for number in range(5)),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    killing.undisturbed(killing.the_scores, tmp_path_factory.mktemp("server") / "out")  # starts it

    @functools.cache
    def find(what: str) -> Whole:
        folder = tmp_path_factory.mktemp("undisturbed") / "out"
        return folder, killing.undisturbed(WORK[what][0], folder)

    return find


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "what"),
    [*MOMENTS, *(pytest.param(*moment, marks=pytest.mark.long) for moment in MANY)],
)
def test_work_that_is_killed_and_called_again_leaves_what_it_leaves_undisturbed(
    undisturbed, tmp_path, number, what
):
    folder, whole = undisturbed(what)
    work, same, seed = WORK[what]
    print(*killing.killed_and_finished(work, tmp_path / "out", number, seed, whole), sep="\n")
    same(tmp_path / "out", folder)


def _old_run(folder: Path) -> dict[str, bytes]:
    RunRecord("old", "done", "report", "2020").save(folder / "record.json")
    new = ("plan.json", "recipe.yaml", "base/config.json", "model/headprune.json")
    for name in (*new, "mine.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old")
    return _contents(folder)


def _contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    found = [p for p in files if p.name != ".lock" and not p.name.endswith(".part")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True], ids=["new", "overwritten"])
def test_a_run_killed_at_every_file_call_around_its_stages(tmp_path, anew):
    work = killing.the_frame_anew if anew else killing.the_frame
    whole = tmp_path / "whole"
    if anew:
        whole.mkdir()
        _old_run(whole)
    _, calls = killing.undisturbed(work, whole)
    assert calls > 15
    ends = set()
    for call in range(1, calls + 1):
        out = tmp_path / f"{call}"
        before: dict[str, bytes] = {}
        if anew:
            out.mkdir()
            before = _old_run(out)
        first = killing.begun(work, out, call)
        first.join()
        assert first.exitcode == -signal.SIGKILL
        if anew and _contents(out) == before:
            ends.add("as it was")
            continue
        record = out / "record.json"
        done = record.is_file() and RunRecord.load(record).status == "done"
        again = killing.begun(killing.the_frame, out)
        again.join()
        assert again.exitcode == (1 if done else 0), f"call {call} of {calls}"
        ends.add("finished" if done else "gone on with")
        assert _contents(out).keys() == _contents(whole).keys(), f"call {call} of {calls}"
        assert not list(out.glob(".*.part"))
        assert (out / "plan.json").read_text() == "new"
        assert RunRecord.load(record).status == "done"
    assert ends == {"finished", "gone on with", *(["as it was"] if anew else [])}


def _killed_over(work: Callable[[str], None], old: Path) -> Iterator[Path]:
    """Copies of a folder over which the work was killed at its first file call, its second, and so
    on."""
    _, calls = killing.undisturbed(work, Path(shutil.copytree(old, old.with_name("whole"))))
    for call in range(1, calls + 1):
        folder = Path(shutil.copytree(old, old.with_name(str(call))))
        process = killing.begun(work, folder, call)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        yield folder


def test_a_save_over_an_earlier_one_killed_at_every_file_call_is_one_of_both(tmp_path):
    old, new = killing.cut_model(0), killing.cut_model(1)
    hp.save_pretrained(old, tmp_path / "old", max_shard_size="20KB")
    seen = []
    for folder in _killed_over(killing.the_save, tmp_path / "old"):
        state = hp.from_pretrained(folder).state_dict()
        is_old, is_new = (
            all(k in state and torch.equal(state[k], t) for k, t in model.state_dict().items())
            for model in (old, new)
        )
        assert is_old != is_new, "neither the one nor the other"
        seen.append("old" if is_old else "new")
        hp.save_pretrained(new, folder)
        assert {p.name for p in folder.iterdir()} == FILES
    assert seen == sorted(seen, reverse=True), "first the old one, then the new one"
    assert set(seen) == {"old", "new"}


def test_scores_saved_over_earlier_ones_and_killed_have_their_own_numbers(tmp_path):
    (tmp_path / "old").mkdir()
    whole = [killing.sampled_scores(seed) for seed in (0, 1)]
    whole[0].save(tmp_path / "old" / "scores.json")
    seen = []
    for folder in _killed_over(killing.the_scores, tmp_path / "old"):
        found = hp.HeadScores.load(folder / "scores.json")
        seen.append(whole.index(found))
        assert (found.samples.matrix == whole[seen[-1]].samples.matrix).all()  # type: ignore[union-attr]
        assert (found.curvature.matrix == whole[seen[-1]].curvature.matrix).all()  # type: ignore[union-attr]
    assert seen == sorted(seen), "first the old ones, then the new ones"
    assert set(seen) == {0, 1}
