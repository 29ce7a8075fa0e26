"""Scoring that was cut off goes on after the batches that were done, to the same scores bit for bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.scoring import _shelf
from tests.laws.support import Subject, subject_of
from tests.laws.support import examples_of as data
from tests.laws.test_law_6_scores import SCORERS, loss_of, split


class CutOff(BaseException):
    """Nothing catches it, like a SIGKILL."""


class Batches(list[Any]):
    """Batches of which only so many are handed out, over all passes."""

    def __init__(self, batches: list[Any], left: float = float("inf")) -> None:
        super().__init__(batches)
        self.left = left

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.left -= 1
            if self.left < 0:
                raise CutOff
            yield batch


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch gave is written at once."""
    monkeypatch.setattr(_shelf, "EVERY", 0.0)
    monkeypatch.setattr(_shelf, "_TIMES", 0)


@pytest.fixture(scope="module")
def bert() -> Subject:
    return subject_of("bert")


def score(subject: Subject, scorer: Any, batches: Any, folder: Path | None = None, **more: Any) -> Any:
    return hp.score(subject.model, batches, scorer, loss=loss_of(subject), folder=folder, progress=False, **more)


def told(scores: hp.HeadScores) -> tuple[Any, ...]:
    """All that scores hold, to the last bit."""
    matrices = [None if m is None else m.matrix.tobytes() for m in (scores.samples, scores.curvature)]
    return scores.to_json(), *matrices


class Calls:
    """Counts how often the model runs."""

    def __init__(self, subject: Subject) -> None:
        self.count = 0
        self._handle = subject.model.register_forward_pre_hook(self._seen)

    def _seen(self, *_: Any) -> None:
        self.count += 1

    def since(self) -> int:
        self._handle.remove()
        return self.count


@pytest.mark.parametrize("scorer", SCORERS, ids=lambda s: f"{type(s).__name__}-{getattr(s, 'reduce', '')}")
def test_scores_that_were_cut_off(scorer: Any, bert: Subject, tmp_path: Path) -> None:
    batches = split(data(bert, 7), 1)
    counted, seen = Batches(batches, 1e9), Calls(bert)
    whole = told(score(bert, scorer, counted))
    runs, n_batches = seen.since(), int(1e9 - counted.left)
    for number, left in enumerate(sorted({2, n_batches // 2, n_batches - 1} - {0})):
        folder = tmp_path / str(number)
        if type(scorer).needs_data:
            with pytest.raises(CutOff):
                score(bert, scorer, Batches(batches, left), folder)
        seen = Calls(bert)
        assert told(score(bert, scorer, batches, folder)) == whole
        again = seen.since()
        assert again <= runs
        if left == n_batches - 1 and type(scorer).needs_data and type(scorer).__name__ != "Ggn":
            assert again < runs / 2 + 3, "almost all had been done"


def test_several_scorers_that_were_cut_off_twice(bert: Subject, tmp_path: Path) -> None:
    batches, scorers = split(data(bert, 6), 2), ["taylor", "fisher", "surgeon", "wanda", "leave_one_out"]
    whole = [told(s) for s in score(bert, scorers, batches)]
    for left in (4, 9):
        with pytest.raises(CutOff):
            score(bert, scorers, Batches(batches, left), tmp_path / "work")
    assert [told(s) for s in score(bert, scorers, batches, tmp_path / "work")] == whole
    seen = Calls(bert)  # and the folder that stays gives them again
    assert [told(s) for s in score(bert, scorers, batches, tmp_path / "work")] == whole
    assert seen.since() <= 2 * len(batches) + 2


def test_scores_until_they_are_settled(bert: Subject, tmp_path: Path) -> None:
    batches, until = split(data(bert, 24), 2), hp.Stable(k=4, first=4)
    whole = told(score(bert, "taylor", batches, until=until))
    with pytest.raises(CutOff):
        score(bert, "taylor", Batches(batches, 7), tmp_path / "work", until=until)
    assert told(score(bert, "taylor", batches, tmp_path / "work", until=until)) == whole


def test_a_folder_of_another_call_is_refused(bert: Subject, tmp_path: Path) -> None:
    batches, folder = split(data(bert, 4), 2), tmp_path / "work"
    score(bert, "taylor", batches, folder)
    with pytest.raises(InvalidValue, match=r"which differs in scorers.*another folder"):
        score(bert, "fisher", batches, folder)
    with pytest.raises(InvalidValue, match="which differs in the model"):
        score(_other(bert), "taylor", batches, folder)
    with pytest.raises(InvalidValue, match="others, up to batch 1"):
        score(bert, "taylor", [batches[0], batches[0]], folder)
    (folder / "0-of-1" / "call.json").write_text("[]")
    with pytest.raises(InvalidValue, match=r"call.json: must be what score\(folder=\) left there"):
        score(bert, "taylor", batches, folder)


def test_other_batches_are_refused_by_sums_as_well(bert: Subject, tmp_path: Path) -> None:
    batches = split(data(bert, 4), 2)
    score(bert, "surgeon", batches, tmp_path / "work")
    with pytest.raises(InvalidValue, match="others, up to batch 1"):
        score(bert, "surgeon", [batches[0], batches[0]], tmp_path / "work")


def _other(subject: Subject) -> Subject:
    """The subject with other weights."""
    model = copy.deepcopy(subject.model)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    return replace(subject, model=model)


@pytest.mark.parametrize("scorer", ["taylor", "surgeon"])
@pytest.mark.parametrize("damage", [b"", b"\0" * 9, b"flipped"])
def test_damaged_files_are_made_again(scorer: str, damage: bytes, bert: Subject, tmp_path: Path) -> None:
    batches, folder = split(data(bert, 4), 1), tmp_path / "work"
    whole = told(score(bert, scorer, batches, folder))
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        if damage == b"flipped":
            content[-3] ^= 1
        file.write_bytes(content if damage == b"flipped" else damage)
    assert told(score(bert, scorer, batches, folder)) == whole


def test_no_more_is_kept_than_there_is_room_for(bert: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, folder = split(data(bert, 4), 1), tmp_path / "work"
    one = score(bert, "taylor", batches)
    monkeypatch.setattr(_shelf, "LIMIT", 100)
    assert told(score(bert, "taylor", batches, folder)) == told(one)
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 1000
    assert not list(folder.rglob("*.part"))


def test_a_loss_that_is_not_finite_is_not_kept(bert: Subject, tmp_path: Path) -> None:
    batches = split(data(bert, 4), 1)
    wrong = dict(batches[2], pixels=torch.zeros(1))

    def loss(model: Any, batch: Any) -> Any:
        ids = {k: v for k, v in batch.items() if k != "pixels"}
        found = loss_of(bert)(model, ids)
        return found * float("nan") if "pixels" in batch else found

    for _ in range(2):
        with pytest.raises(InvalidValue, match="batch 2"):
            hp.score(bert.model, [*batches[:2], wrong], "taylor", loss=loss, folder=tmp_path / "work", progress=False)


def test_what_is_kept_says_of_what_call(bert: Subject, tmp_path: Path) -> None:
    score(bert, "taylor", split(data(bert, 2), 1), tmp_path)
    said = json.loads((tmp_path / "0-of-1" / "call.json").read_text())
    assert said.keys() == {"scorers", "until", "loss", "the model", "sites", "device", "torch"}
    assert "taylor" in said["scorers"]
