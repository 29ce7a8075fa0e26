"""A run that ended early goes on where it was: what is taken, what is made anew, and who may be in
its folder."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from torch.utils.data import DataLoader

import headprune as hp
from headprune.core.errors import CheckpointError, InvalidValue, NotWritten
from headprune.recovery import Finetune
from headprune.run import Recipe, gradual, identity, prune_gradually_, runner, stages, subject
from headprune.run.identity import made_of
from headprune.run.journal import WORK, Journal
from headprune.run.progress import keys_of
from tests.killing import same_runs
from tests.laws.support import subject_of
from tests.tiny_recipe import TINY, interrupt_after

TUNE = {"method": "finetune", "batch_size": 64, "settings": {"steps": 5}}
RECOVER = [{"method": "mean_fold"}, TUNE]
SHORT = {"score": {"scorer": "taylor", "random_draws": 1}, "recover": RECOVER, "report": False}
SHORT["data"] = {**TINY["data"], "test_holdout": 1150}  # eight steps a pass


def recipe(out: Path, **changes: Any) -> Recipe:
    return Recipe.model_validate({**TINY, **SHORT, "out": str(out), **changes})


def go(chosen: Recipe, **options: Any) -> list[str]:
    lines: list[str] = []
    runner.run_recipe(chosen, say=lines.append, progress=False, **options)
    return lines


def taken(lines: list[str]) -> list[str]:
    return [line[1 : line.index("]")] for line in lines if line.endswith("was done before")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    go(recipe(out))
    return out


@pytest.fixture(scope="module")
def at_the_benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("failed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "bench", Mock(side_effect=RuntimeError("power is gone")))
        with pytest.raises(RuntimeError, match="power is gone"):
            go(recipe(out))
    assert hp.RunRecord.load(out / "record.json").status == "failed"
    return out


@pytest.fixture
def failed(at_the_benchmark: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(at_the_benchmark, tmp_path / "out"))


ALL = ["train", "base quality", "score", "select", "compare", "recover 0", "recover 1", "answers"]


@pytest.mark.parametrize("status", ["failed", "running"])
def test_what_is_finished_is_not_done_again(failed, whole, monkeypatch, status):
    record = hp.RunRecord.load(failed / "record.json")
    dataclasses.replace(record, status=status).save(failed / "record.json")
    (failed / "attention.json").write_text("{}")
    (failed / ".plan.json.abc.part").write_text("half a pl")
    (failed / "mine.txt").write_text("mine")
    for name in ("compare_plans", "recover_once"):
        monkeypatch.setattr(stages, name, Mock(side_effect=AssertionError(f"{name} again")))
    monkeypatch.setattr(subject, "recover_", Mock(side_effect=AssertionError("trained again")))
    lines = go(recipe(failed))
    word = "killed" if status == "running" else status  # for it holds no lock
    assert lines[0] == f"resuming the {word} run in {failed}"
    assert taken(lines) == ALL
    numbered = ["[data] 1", "[model] 3", "[prune] 8", "[recover] 9", "[bench] 11", "[save] 12"]
    assert [line for line in lines if " of 12" in line] == [f"{line} of 12" for line in numbered]
    (failed / "mine.txt").unlink()
    same_runs(failed, whole)  # what no stage vouches for is removed
    assert not (failed / WORK).exists()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"recover": [RECOVER[0], {**RECOVER[1], "batch_size": 32}]}, ALL[:6]),
        ({"select": {"keep_heads": 0.25}}, ALL[:3]),
        ({"train": {**TINY["train"], "learning_rate": 1e-3}}, []),
        ({"data": {**SHORT["data"], "calibration": 30}}, ALL[:2]),
        ({"description": "in other words", "bench": {"batch_sizes": [1], "seconds": 0.01}}, ALL),
    ],
)
def test_what_depends_on_a_change_is_made_anew(failed, tmp_path, changes, kept):
    assert taken(go(recipe(failed, **changes))) == kept
    if kept not in ([], ALL):
        go(recipe(tmp_path / "other", **changes))
        same_runs(failed, tmp_path / "other")


@pytest.mark.parametrize("changed", [{"processor": "another"}, {"threads": 3}, {"gpu": "one"}])
def test_times_of_another_machine_are_not_reused(tmp_path, changed):
    def keys(hardware: dict[str, Any]) -> dict[str, str]:
        return keys_of(recipe(tmp_path), {"calibration": {}}, "start", hardware, {})

    here = {"processor": "this one", "threads": 2, "memory_gib": 3.5}
    before, after = keys(here), keys({**here, "memory_gib": 4.0, **changed})
    assert {stage for stage in before if before[stage] != after[stage]} == {"latency", "bench"}


def test_stages_after_a_choice_depend_on_it(tmp_path):
    """A speed is met by a clock: the same recipe may choose otherwise when it is started again."""

    def keys(plan: str) -> dict[str, str]:
        return keys_of(recipe(tmp_path), {"calibration": {}}, "start", {}, {"select": plan})

    before, after = keys("one plan"), keys("another")
    same = {stage for stage in before if before[stage] == after[stage]}
    assert same == {"train", "latency", "base quality", "attention", "score", "select"}


@pytest.mark.parametrize("scorer", ["taylor", "auto"])
def test_scores_of_auto_depend_on_what_it_judges_by(tmp_path, scorer):
    """`auto` takes a scorer by the budget and by the recoveries that do not train."""

    def key(**changes: Any) -> str:
        chosen = recipe(tmp_path, score={"scorer": scorer, "random_draws": 1}, **changes)
        return keys_of(chosen, {"calibration": {}}, "start", {}, {})["score"]

    in_stages = {"stages": 2, "settings": {"steps": 2}}
    for changes in (
        {"select": {"keep_heads": 0.25}},
        {"recover": RECOVER[1:]},
        {"recover": [], "gradual": in_stages},
    ):
        assert (key(**changes) != key()) == (scorer == "auto"), changes
    assert key(recover=[RECOVER[0], {**TUNE, "batch_size": 32}]) == key(), "a training"


@pytest.mark.parametrize(
    ("name", "lost"),
    [("base/model.safetensors", "train"), ("scores.samples.safetensors", "score")],
)
def test_a_damaged_piece_is_made_anew(failed, whole, name, lost):
    data = bytearray((failed / name).read_bytes())
    data[len(data) // 2] ^= 1
    (failed / name).write_bytes(data)
    assert taken(go(recipe(failed))) == [stage for stage in ALL if stage != lost]
    same_runs(failed, whole)


def test_damaged_work_is_made_anew(failed, whole):
    (failed / WORK / "recover-0.json").write_text("{")
    (failed / WORK / "model-after-recover-1" / "config.json").unlink()
    assert taken(go(recipe(failed))) == ALL[:5]
    same_runs(failed, whole)


def test_overwrite_begins_anew_and_keeps_the_history(failed, whole):
    (failed / "mine.txt").write_text("mine")
    before = (failed / "history.jsonl").read_text()
    assert taken(go(recipe(failed), overwrite=True)) == []
    text = (failed / "history.jsonl").read_text()
    assert text.startswith(before)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["status"] for line in lines] == ["running", "failed", "running", "done"]
    assert (lines[1]["stage"], lines[1]["error"]) == ("bench", "RuntimeError: power is gone")
    assert "score" in lines[1]["timings"]
    assert (failed / "mine.txt").read_text() == "mine"
    (failed / "mine.txt").unlink()
    same_runs(failed, whole)


def test_a_training_goes_on_from_its_last_pass(tmp_path, whole, monkeypatch):
    chosen = recipe(tmp_path / "out", train={**TINY["train"], "epochs": 2})
    with monkeypatch.context() as patch:
        seen = interrupt_after(11, patch)
        with pytest.raises(KeyboardInterrupt):
            go(chosen)
        assert hp.RunRecord.load(tmp_path / "out" / "record.json").status == "interrupted"
        go(chosen)
    assert seen[10:14] == [11, 9, 10, 11]
    go(chosen.model_copy(update={"out": str(tmp_path / "other")}))
    same_runs(tmp_path / "out", tmp_path / "other")


def test_a_training_that_came_to_its_end_is_not_repeated(tmp_path, whole, monkeypatch):
    """The run ends after the last step, before the model is saved, and again before the recovered
    one is judged."""
    from headprune.recovery import _steps

    chosen, seen = recipe(tmp_path / "out"), [0]
    plain, judged = _steps.Steps.on_step_end, subject.Subject.report

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        seen[0] += 1
        plain(self, *args, **kwargs)

    def unjudged(self: Any, model: Any, name: str, *more: Any) -> Any:
        if "finetune" in name:
            raise KeyboardInterrupt
        return judged(self, model, name, *more)

    monkeypatch.setattr(_steps.Steps, "on_step_end", counted)
    for owner, name, error in (
        (subject, "save_base", Mock(side_effect=KeyboardInterrupt())),
        (subject.Subject, "report", unjudged),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, error)
            with pytest.raises(KeyboardInterrupt):
                go(chosen)
    assert list((tmp_path / "out" / WORK).glob("recover-1-*/finetune.pt"))
    assert not list((tmp_path / "out" / WORK).glob("train-*")), "what was saved needs no checkpoint"
    go(chosen)
    assert seen[0] == 8 + 5
    same_runs(tmp_path / "out", whole)


def test_all_after_other_weights_is_made_anew(failed, monkeypatch):
    """As a GPU may train them, when the base model was lost."""
    plain = subject.recover_

    def otherwise(model: Any, *args: Any, **kwargs: Any) -> Any:
        done = plain(model, *args, **kwargs)
        with torch.no_grad():
            model.classifier.bias.add_(1e-6)
        return done

    shutil.rmtree(failed / "base")
    monkeypatch.setattr(subject, "recover_", otherwise)
    assert taken(go(recipe(failed))) == []


def test_every_file_of_a_models_folder_counts(tmp_path):
    name = "source.spm"
    chosen = Recipe.model_validate({**TINY, "model": {"path": str(tmp_path)}, "train": None})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".git").write_text("a")
    found = []
    for path, text in ((name, "a"), (name, "b"), (".git", "b"), (name, "a")):
        (tmp_path / path).write_text(text)
        found.append(made_of(chosen, {}))
    assert found[0] != found[1] == found[2]
    assert found[3] == found[0]


def test_a_model_of_the_hub_is_told_by_its_commit(monkeypatch):
    chosen = Recipe.model_validate({**TINY, "model": {"path": "someone/something"}, "train": None})
    found = [made_of(chosen, {})]  # it cannot be reached, which is said when it is loaded
    for commit in ("a", "b", "a"):
        config = SimpleNamespace(_commit_hash=commit)
        monkeypatch.setattr(identity, "model_config", lambda path, config=config: config)
        found.append(made_of(chosen, {}))
    assert len(set(found)) == 3
    assert found[1] == found[3]


def test_one_process_a_folder(failed):
    before = {p: p.read_bytes() for p in failed.rglob("*") if p.is_file()}
    words = "must be free, got a run that is running there"
    with FileLock(failed / ".lock"), pytest.raises(InvalidValue, match=words):
        go(recipe(failed), overwrite=True)
    assert {p: p.read_bytes() for p in failed.rglob("*") if p.is_file()} == before


def test_a_finished_run_is_kept_but_for_its_work(whole):
    """A kill may come between its last record and the removal."""
    (whole / WORK / "train-abc").mkdir(parents=True)
    with pytest.raises(InvalidValue, match=r"unfinished run's, got a finished run\..*--overwrite"):
        go(recipe(whole))
    assert not (whole / WORK).exists()


def test_files_of_no_run_are_kept(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InvalidValue, match=r"plan.json and no readable record.json.*--overwrite"):
        go(recipe(tmp_path))
    assert (tmp_path / "plan.json").read_text() == "{}"
    with pytest.raises(InvalidValue, match="must be a folder, got a file"):
        go(recipe(tmp_path / "plan.json"))


def batches() -> DataLoader[Any]:
    case = subject_of("bert")
    rows = [{k: v[i % len(v)] for k, v in case.batch.items()} for i in range(10)]
    order = torch.Generator().manual_seed(3)
    return DataLoader(rows, batch_size=3, shuffle=True, generator=order)  # type: ignore[arg-type]


def _loss(model: Any, batch: Any) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    found: torch.Tensor = model(**inputs).logits.square().flatten(1).mean(1)
    return found


def in_stages(keep: float = 0.5, **options: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(subject_of("bert").model)
    settings = {"stages": 3, "finetune": Finetune(steps=7, learning_rate=1e-2), "loss": _loss}
    budget = hp.Budget(keep_heads=keep)
    options = {"scorer": "magnitude", **settings, **options}
    return model, prune_gradually_(model, batches(), budget, **options)


def interrupted(stage: int, folder: Path) -> None:
    plain, calls = gradual.carry_out, [0]

    def stop(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == stage:
            raise KeyboardInterrupt
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradual, "carry_out", stop)
        with pytest.raises(KeyboardInterrupt):
            in_stages(folder=folder)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Any, Any]:
    return in_stages()


@pytest.mark.parametrize("stage", [1, 3])
def test_gradual_pruning_goes_on_after_its_last_stage(undisturbed, tmp_path, stage):
    model, whole = undisturbed
    interrupted(stage, tmp_path)
    torch.rand(3)  # other random states outside change nothing
    again, done = in_stages(folder=tmp_path)
    assert [s.plan for s in done.stages] == [s.plan for s in whole.stages]
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == []


def test_gradual_pruning_that_came_to_its_end_is_not_repeated(tmp_path, monkeypatch):
    model, whole = in_stages(folder=tmp_path, leave_checkpoint=True)
    monkeypatch.setattr(gradual, "carry_out", Mock(side_effect=AssertionError("trained again")))
    again, done = in_stages(folder=tmp_path, leave_checkpoint=True)
    assert done == whole
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(InvalidValue, match=r"leave_checkpoint=\): must be given with folder"):
        in_stages(leave_checkpoint=True)


def test_gradual_pruning_refuses_the_checkpoint_of_another_call(tmp_path):
    interrupted(2, tmp_path)
    with pytest.raises(CheckpointError, match="differs in what was asked"):
        in_stages(keep=0.25, folder=tmp_path)


def test_the_record_of_a_run_that_failed_for_lack_of_room_says_how_far_it_came(failed, monkeypatch):
    """Not even the failure can be written then; the error is the first one, and what was written is
    whole."""
    chosen = recipe(failed)
    plain, full = os.fsync, [False]

    def no_room(handle: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(handle)

    with monkeypatch.context() as patch:
        patch.setattr(stages, "bench", lambda *_: full.__setitem__(0, True))
        patch.setattr(os, "fsync", no_room)
        with pytest.raises(NotWritten, match="No space left on device"):
            go(chosen)
    record = json.loads((failed / "record.json").read_text())
    assert (record["status"], record["stage"]) == ("running", "bench")
    assert go(chosen)[0].startswith("resuming the killed run in")


def test_warnings_of_stages_that_were_done_before_are_noted_again_and_once():
    first, again = (Journal("x", {}, None, lambda line: None, False) for _ in range(2))
    with first.collected() as found:
        first.note(warnings=("slow", "slow"))
    again.note(warnings=("other",))
    for _ in range(2):
        again.repeat(found())
    assert first.record.warnings == ("slow",)
    assert again.record.warnings == ("other", "slow")
