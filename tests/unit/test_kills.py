"""Runs and sweeps that are killed (SIGKILL) at random moments come to the result of those that
nothing happened to."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import headprune as hp
from headprune.core.record import RunRecord
from tests import killing

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")

Whole = tuple[Path, tuple[float, int]]


def _whole(factory: pytest.TempPathFactory, work: Callable[[str], None]) -> Whole:
    folder = factory.mktemp("undisturbed") / "out"
    killing.undisturbed(work, folder)  # its time has the start of the fork server in it
    again = folder.with_name("again")
    whole = killing.undisturbed(work, again)
    return folder, whole


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return _whole(tmp_path_factory, killing.the_run)


@pytest.fixture(scope="module")
def gradual_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return _whole(tmp_path_factory, killing.the_gradual_run)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return _whole(tmp_path_factory, killing.the_sweep)


def _old_run(folder: Path) -> dict[str, bytes]:
    """A finished run, with what a run may leave."""
    RunRecord("old", "done", "report", "2020").save(folder / "record.json")
    for name in (
        "plan.json",
        "recipe.yaml",
        "base/config.json",
        "model/headprune.json",
        "mine.txt",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old")
    return _contents(folder)


def _contents(folder: Path) -> dict[str, bytes]:
    found = {
        p
        for p in folder.rglob("*")
        if p.is_file() and p.name != ".lock" and not p.name.endswith(".part")
    }
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True], ids=["new", "overwritten"])
def test_a_run_killed_at_every_file_call_around_its_stages(tmp_path: Path, anew: bool) -> None:
    """It is gone on with, or finished, or the old one is as it was; and nothing is left over."""
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
        done = (out / "record.json").is_file() and RunRecord.load(
            out / "record.json"
        ).status == "done"
        again = killing.begun(killing.the_frame, out)
        again.join()
        assert again.exitcode == (1 if done else 0), f"call {call} of {calls}"
        ends.add("finished" if done else "gone on with")
        assert _contents(out).keys() == _contents(whole).keys(), f"call {call} of {calls}"
        assert not list(out.glob(".*.part"))
        assert (out / "plan.json").read_text() == "new"
        assert RunRecord.load(out / "record.json").status == "done"
    assert ends == {"finished", "gone on with", *(["as it was"] if anew else [])}


def _killed(
    work: Callable[[str], None],
    undisturbed: Whole,
    out: Path,
    number: int,
    seed: int,
    same: Callable[[Path, Path], None],
) -> None:
    """Work killed at a moment of its own, and called again, leaves what it leaves undisturbed."""
    folder, whole = undisturbed
    print(*killing.killed_and_finished(work, out, number, seed, whole), sep="\n")
    same(out, folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_killed_run(run: Whole, tmp_path: Path, number: int) -> None:
    _killed(killing.the_run, run, tmp_path / "out", number, 0, killing.same_runs)


@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_a_run_killed_at_twenty_moments(run: Whole, tmp_path: Path, number: int) -> None:
    _killed(killing.the_run, run, tmp_path / "out", number, 1, killing.same_runs)


@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
def test_a_run_in_stages_killed_at_six_moments(
    gradual_run: Whole, tmp_path: Path, number: int
) -> None:
    _killed(killing.the_gradual_run, gradual_run, tmp_path / "out", number, 2, killing.same_runs)


@pytest.mark.long
@pytest.mark.parametrize("number", range(5))
def test_a_sweep_killed_at_five_moments(sweep: Whole, tmp_path: Path, number: int) -> None:
    _killed(killing.the_sweep, sweep, tmp_path / "out", number, 3, killing.same_sweeps)


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


def test_a_save_over_an_earlier_one_killed_at_every_file_call_leaves_the_one_or_the_other(
    tmp_path: Path,
) -> None:
    whole = {name: killing.cut_model(seed).state_dict() for name, seed in (("old", 0), ("new", 1))}
    hp.save_pretrained(killing.cut_model(0), tmp_path / "old", max_shard_size="20KB")
    seen = []
    for call, folder in enumerate(_killed_over(killing.the_save, tmp_path / "old"), start=1):
        state = hp.from_pretrained(folder).state_dict()
        seen += [
            n
            for n, own in whole.items()
            if all(k in state and torch.equal(state[k], t) for k, t in own.items())
        ]
        assert len(seen) == call, "neither the one nor the other"
        hp.save_pretrained(killing.cut_model(1), folder)
        assert {p.name for p in folder.iterdir()} == {
            p.name for p in (tmp_path / "whole").iterdir()
        }
    assert seen == sorted(seen, reverse=True), "first the old one, then the new one"
    assert set(seen) == {"old", "new"}
    names = {"model.safetensors", "headprune.json", "config.json", "README.md"}
    assert {p.name for p in (tmp_path / "whole").iterdir()} == names


def test_scores_saved_over_earlier_ones_killed_at_every_file_call_have_their_own_numbers(
    tmp_path: Path,
) -> None:
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
