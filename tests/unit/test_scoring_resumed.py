"""Scoring that was cut off goes on after the batches that were done, to the same scores bit for
bit."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.core.locking import locked
from headprune.gating import candidates
from headprune.scoring import Auto, LeaveOneOut, Shapley, _resume_cache
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
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
    monkeypatch.setattr(_resume_cache, "EVERY", 0.0)
    monkeypatch.setattr(_resume_cache, "_TIMES", 0)


@pytest.fixture(scope="module")
def bert() -> Subject:
    return subject_of("bert")


def score(
    subject: Subject, scorer: Any, batches: Any, folder: Path | None = None, **more: Any
) -> Any:
    return hp.score(
        subject.model, batches, scorer, loss=loss_of(subject), folder=folder, progress=False, **more
    )


def told(scores: hp.HeadScores) -> tuple[Any, ...]:
    """All that scores hold, to the last bit."""
    matrices = [
        None if m is None else m.matrix.tobytes() for m in (scores.samples, scores.curvature)
    ]
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


@pytest.mark.parametrize(
    "scorer", SCORERS, ids=lambda s: f"{type(s).__name__}-{getattr(s, 'reduce', '')}"
)
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
        assert again <= runs + 1, "once to know the call"
        if left == n_batches - 1 and type(scorer).needs_data and type(scorer).__name__ != "Ggn":
            assert again < runs / 2 + 4, "almost all had been done"


@pytest.mark.parametrize("left", [3, 8, 12])
def test_auto_that_was_cut_off(bert: Subject, tmp_path: Path, left: int) -> None:
    """Candidates go on where they were; plans are judged anew."""
    batches, scorer = split(data(bert, 7), 1), Auto(candidates=("taylor", "obs"), random_draws=1)
    whole = told(score(bert, scorer, batches))
    with pytest.raises(CutOff):
        score(bert, scorer, Batches(batches, left), tmp_path / "work")
    found = score(bert, scorer, batches, tmp_path / "work")
    assert found.choice is not None
    assert told(found) == whole


def test_several_scorers_that_were_cut_off_twice(bert: Subject, tmp_path: Path) -> None:
    batches, scorers = (
        split(data(bert, 6), 2),
        ["taylor", "fisher", "surgeon", "wanda", "leave_one_out"],
    )
    seen = Calls(bert)
    whole = [told(s) for s in score(bert, scorers, batches)]
    runs = seen.since()
    for left in (5, 10):
        with pytest.raises(CutOff):
            score(bert, scorers, Batches(batches, left), tmp_path / "work")
    assert [told(s) for s in score(bert, scorers, batches, tmp_path / "work")] == whole
    seen = Calls(bert)  # and the folder that stays gives them again
    assert [told(s) for s in score(bert, scorers, batches, tmp_path / "work")] == whole
    assert seen.since() < runs / 2


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
    (folder / "0-of-1" / "call.json").write_text("[]")
    with pytest.raises(InvalidValue, match=r"call.json: must be what score\(folder=\) left there"):
        score(bert, "taylor", batches, folder)


def test_a_call_is_known_by_what_the_model_makes_of_its_first_examples(
    bert: Subject, tmp_path: Path
) -> None:
    batches, folder = split(data(bert, 4), 2), tmp_path / "work"
    with hp.gated(bert.model, {bert.sites[0].name: torch.tensor([0.0, 1.0, 1.0, 1.0])}):
        score(bert, "wanda", batches, folder)
    with pytest.raises(InvalidValue, match="differs in what the model makes of the first batch"):
        score(bert, "wanda", batches, folder)

    def loss(factor: float, model: Any, batch: Any) -> Any:
        return factor * loss_of(bert)(model, batch)

    given: dict[str, Any] = {"folder": tmp_path / "other", "progress": False}
    hp.score(bert.model, batches, "taylor", loss=partial(loss, 1.0), **given)
    hp.score(bert.model, batches, "taylor", loss=partial(loss, 1.0), **given)
    with pytest.raises(
        InvalidValue, match="differs in the loss, what the model makes of the first batch"
    ):
        hp.score(bert.model, batches, "taylor", loss=partial(loss, 3.0), **given)
    with torch.autocast("cpu"), pytest.raises(InvalidValue, match="differs in device"):
        hp.score(bert.model, batches, "taylor", loss=partial(loss, 1.0), **given)


@pytest.mark.parametrize("scorer", ["taylor", "surgeon", "wanda", LeaveOneOut(replacement="mean")])
def test_other_batches_are_refused_and_fewer_or_more_are_counted(
    scorer: Any, bert: Subject, tmp_path: Path
) -> None:
    batches = split(data(bert, 8), 2)
    for given in (batches[:1] * 4, [batches[0], *batches[2:]]):
        folder = tmp_path / str(len(given))
        score(bert, scorer, batches, folder)
        with pytest.raises(
            InvalidValue, match=r"what these batches gave, in this order.*up to batch"
        ):
            score(bert, scorer, given, folder)
    with contextlib.suppress(InvalidValue):  # sums hold what rows do not
        fewer = told(score(bert, scorer, batches[:2], tmp_path / "4"))
        assert fewer == told(score(bert, scorer, batches[:2]))
    score(bert, scorer, batches[:2], tmp_path / "more")
    with contextlib.suppress(InvalidValue):
        assert told(score(bert, scorer, batches, tmp_path / "more")) == told(
            score(bert, scorer, batches)
        )


def test_sums_of_more_batches_are_refused(bert: Subject, tmp_path: Path) -> None:
    batches = split(data(bert, 8), 2)
    score(bert, "wanda", batches, tmp_path / "work")
    with pytest.raises(InvalidValue, match="what others gave, up to batch 2"):
        score(bert, "wanda", batches[:2], tmp_path / "work")
    mean = LeaveOneOut(replacement="mean")  # whose second pass stands on the whole first one
    score(bert, mean, batches[:2], tmp_path / "mean")
    with pytest.raises(InvalidValue, match="what others gave, up to batch 0"):
        score(bert, mean, batches, tmp_path / "mean")


@pytest.mark.parametrize("folder", [3, True, ""])
def test_a_folder_is_a_path(folder: Any, bert: Subject) -> None:
    with pytest.raises(InvalidValue, match=r"score\(folder=\): must be a folder's path"):
        score(bert, "taylor", split(data(bert, 2), 1), folder)


def test_one_call_at_a_time_has_a_folder(bert: Subject, tmp_path: Path) -> None:
    batches = split(data(bert, 4), 2)
    with (
        locked(tmp_path / "work" / "0-of-1", "another"),
        pytest.raises(InvalidValue, match=r"a call of score\(\) that is running there"),
    ):
        score(bert, "taylor", batches, tmp_path / "work")


def test_passes_that_are_short_are_kept_as_well(
    bert: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock on which every run of the model takes a second, and a minute goes by between two
    writes."""
    now, batches = [0.0], split(data(bert, 6), 2)
    monkeypatch.setattr(_resume_cache, "EVERY", 60.0)
    monkeypatch.setattr(_resume_cache, "monotonic", lambda: now[0])
    whole = told(score(bert, Shapley(orders=1), batches))

    def ticking(*_: Any) -> None:
        now[0] += 1
        if now[0] > 600:
            raise CutOff

    handle = bert.model.register_forward_pre_hook(ticking)
    try:
        with pytest.raises(CutOff):
            score(bert, Shapley(orders=40), batches, tmp_path / "many")
    finally:
        handle.remove()
    kept = [
        len(_resume_cache._metadata_of(path) or ()) for path in tmp_path.rglob("rows-*.safetensors")
    ]
    assert len(kept) > 3
    assert sum(kept) > 3 * len(batches), "of many passes"
    now[0] = 0.0
    assert told(score(bert, Shapley(orders=1), batches, tmp_path / "one")) == whole


@pytest.mark.parametrize("fails", [False, True])
def test_how_ablations_are_run_is_remembered(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, where other chunks and other ways to run give other roundings."""
    subject = subject_of("bert")
    subject.model.float()
    scorer = LeaveOneOut(max_bytes=20_000)
    lengths = [7, 3, 5, 6]
    batches = [
        {k: v[:, :n] if v.ndim == 2 else v for k, v in data(subject, 3).items()} for n in lengths
    ]
    prove = candidates._Pass.prove
    if fails:

        def failing(self: Any) -> None:
            prove(self)
            if self.number == 0:
                raise candidates.CannotReplay("the proof", "exact", "1e-2 off")

        monkeypatch.setattr(candidates._Pass, "prove", failing)
    whole = told(score(subject, scorer, batches))
    for left in (1, 2, 3):
        with pytest.raises(CutOff):
            score(subject, scorer, Batches(batches, left), tmp_path / str(left))
        assert told(score(subject, scorer, batches, tmp_path / str(left))) == whole


class Cached(Scorer):
    """Gives one tensor for every batch, by an own scorer's right."""

    def estimate(self, problem: ScoringProblem) -> Estimate:
        row = torch.arange(
            float(sum(len(b.site.units) for b in problem.bound)), dtype=torch.float64
        ).expand(1, -1)
        rows = problem.rows("cached", lambda number, batch: row)
        return Estimate(rows.mean(0), n_examples=len(rows), samples=rows)


def test_rows_may_be_one_tensor_and_what_a_kill_left_goes(bert: Subject, tmp_path: Path) -> None:
    batches = split(data(bert, 3), 1)
    (tmp_path / "0-of-1").mkdir()
    (tmp_path / "0-of-1" / ".rows-000001.safetensors.00000000.part").write_bytes(b"half")
    own = dataclass(frozen=True)(Cached)()
    assert score(bert, own, batches, tmp_path) == score(bert, own, batches)
    assert score(bert, own, batches, tmp_path) == score(bert, own, batches)
    assert not list(tmp_path.rglob("*.part"))


def _other(subject: Subject) -> Subject:
    """The subject with other weights."""
    model = copy.deepcopy(subject.model)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    return replace(subject, model=model)


@pytest.mark.parametrize("scorer", ["taylor", "surgeon"])
@pytest.mark.parametrize("damage", [b"", b"\0" * 9, b"flipped"])
def test_damaged_files_are_made_again(
    scorer: str, damage: bytes, bert: Subject, tmp_path: Path
) -> None:
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


def test_no_more_is_kept_than_there_is_room_for(
    bert: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, folder = split(data(bert, 4), 1), tmp_path / "work"
    one = score(bert, "taylor", batches)
    monkeypatch.setattr(_resume_cache, "LIMIT", 100)
    assert told(score(bert, "taylor", batches, folder)) == told(one)
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 1000
    assert not list(folder.rglob("*.part"))


def test_a_call_without_data_or_labels_has_a_folder_too(bert: Subject, tmp_path: Path) -> None:
    hp.score(bert.model, None, "magnitude", folder=tmp_path / "magnitude")
    bare = [{k: v for k, v in batch.items() if k != "labels"} for batch in split(data(bert, 3), 1)]
    whole = hp.score(bert.model, bare, "surgeon", progress=False)
    for _ in range(2):
        again = hp.score(bert.model, bare, "surgeon", folder=tmp_path / "surgeon", progress=False)
        assert told(again) == told(whole)
    for name in ("magnitude", "surgeon"):
        said = json.loads((tmp_path / name / "0-of-1" / "call.json").read_text())
        assert said["what the model makes of the first batch"] == []


class Total:
    """The simplest sums."""

    def __init__(self) -> None:
        self.total = torch.zeros(1)

    def parts(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def join(self, parts: Any) -> None:
        (found,) = parts
        self.total = found["total"]


def passes(added: _resume_cache.ResumableSums, *marks: list[str], sums: Total) -> None:
    """Passes over batches that are told by these marks, each the digest of all batches up to it."""
    for of_pass in marks:
        added.begin_pass()
        for number, mark in enumerate(of_pass):
            if not added.holds(number, mark):
                sums.total = sums.total + 1
                added.batch_added(mark, lambda: None)
        added.end_pass(of_pass[-1], lambda: None)


def test_sums_over_several_passes_go_on_in_the_same_data_alone(tmp_path: Path) -> None:
    sums = Total()
    passes(
        _resume_cache.ResumeCache(tmp_path).sums({"own": sums}), ["a", "ab"], ["a", "ab"], sums=sums
    )
    assert sums.total == 4
    again = Total()
    passes(
        _resume_cache.ResumeCache(tmp_path).sums({"own": again}),
        ["a", "ab"],
        ["a", "ab"],
        sums=again,
    )
    assert again.total == 4, "nothing was added twice"
    for first, second in (
        (["x", "xy"], ["a", "ab"]),
        (["a"], ["a", "ab"]),
        (["a", "ab"], ["a", "ax"]),
    ):
        other = Total()
        with pytest.raises(
            InvalidValue, match=r"a folder with what these batches gave, in this order.*up to batch"
        ):
            passes(
                _resume_cache.ResumeCache(tmp_path).sums({"own": other}), first, second, sums=other
            )


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"pass": "one", "batches": 1, "mark": "a", "whole": ""},
        {"pass": 1, "batches": 2, "mark": "ab", "whole": ""},
    ],
)
def test_sums_of_another_kind_are_refused(said: dict[str, Any], tmp_path: Path) -> None:
    _resume_cache.ResumeCache(tmp_path).write(
        tmp_path / "sums-1.safetensors", {"other/total": torch.zeros(1)}, said
    )
    with pytest.raises(
        InvalidValue,
        match=r"sums-1\.safetensors: must be sums of this call, got a file without them",
    ):
        _resume_cache.ResumeCache(tmp_path).sums({"own": Total()})


def test_rows_of_which_nothing_is_said_are_made_again(tmp_path: Path) -> None:
    said = {"1/0": [], "1/1": "ab", "1/2": ["abc"]}
    rows = {name: torch.ones(1, 2) for name in said}
    _resume_cache.ResumeCache(tmp_path).write(tmp_path / "rows-000001.safetensors", rows, said)
    asked: list[int] = []
    kept = _resume_cache.ResumeCache(tmp_path).rows(
        lambda number, batch: (asked.append(number), torch.zeros(1, 2))[1]
    )
    found = [
        kept(number, None, mark, lambda: None) for number, mark in enumerate(["a", "ab", "abc"])
    ]
    assert asked == [0, 1]
    assert [float(rows.sum()) for rows in found] == [0, 0, 2]


def test_a_loss_that_is_not_finite_is_not_kept(bert: Subject, tmp_path: Path) -> None:
    batches = split(data(bert, 4), 1)
    wrong = dict(batches[2], pixels=torch.zeros(1))

    def loss(model: Any, batch: Any) -> Any:
        ids = {k: v for k, v in batch.items() if k != "pixels"}
        found = loss_of(bert)(model, ids)
        return found * float("nan") if "pixels" in batch else found

    for _ in range(2):
        with pytest.raises(InvalidValue, match="batch 2"):
            hp.score(
                bert.model,
                [*batches[:2], wrong],
                "taylor",
                loss=loss,
                folder=tmp_path / "work",
                progress=False,
            )


def test_what_is_kept_says_of_what_call(bert: Subject, tmp_path: Path) -> None:
    score(bert, "taylor", split(data(bert, 2), 1), tmp_path)
    said = json.loads((tmp_path / "0-of-1" / "call.json").read_text())
    known = {"scorers", "until", "the loss", "the model", "sites", "device", "versions"}
    assert said.keys() == {*known, "what the model makes of the first batch"}
    assert "taylor" in said["scorers"]
