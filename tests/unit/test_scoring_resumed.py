"""Scoring that was cut off goes on after the batches that were done, to the same scores bit for
bit."""

import contextlib
import copy
import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.core.locking import locked
from headprune.gating import candidates
from headprune.model.losses import default_loss
from headprune.scoring import Auto, LeaveOneOut, Shapley, Taylor, _resume_cache
from headprune.scoring._base import Estimate, Scorer
from headprune.scoring._coupling import NOTE
from tests.laws.support import examples_of as data
from tests.laws.support import subject_of
from tests.scoring_help import counted_runs, score, split

OTHERS = r"results of these batches, in this order.*up to batch"
MEAN = LeaveOneOut(replacement="mean")
#: Rows and sums, of one pass and of several.
SCORERS = [
    Taylor(reduce="batch", block=2),
    "fisher",
    "ggn",
    "leave_one_out",
    MEAN,
    Shapley(orders=2),
    "surgeon",
    "entropy",
    "magnitude",
]


class CutOff(BaseException):
    """Nothing catches it, like a SIGKILL."""


class Batches(list[Any]):
    """Batches of which only so many are handed out, over all passes."""

    def __init__(self, batches, left=1e9):
        super().__init__(batches)
        self.left = left

    def __iter__(self):
        for batch in super().__iter__():
            self.left -= 1
            if self.left < 0:
                raise CutOff
            yield batch


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """What a batch gave is written at once."""
    monkeypatch.setattr(_resume_cache, "EVERY", 0.0)
    monkeypatch.setattr(_resume_cache, "_TIMES", 0)


@pytest.fixture(scope="module")
def bert():
    return subject_of("bert")


@pytest.fixture(scope="module")
def four(bert):
    """Four batches of two examples."""
    return split(data(bert, 8), 2)


def told(scores):
    """All that scores hold, to the last bit."""
    matrices = [m for m in (scores.samples, scores.curvature) if m is not None]
    return scores.to_json(), *(m.matrix.tobytes() for m in matrices)


def cut_off(subject, scorer, batches, left, **options):
    with pytest.raises(CutOff):
        score(subject, scorer, Batches(batches, left), **options)


# ---------------------------------------------------------------- the same scores


@pytest.mark.parametrize("scorer", SCORERS, ids=str)
def test_scores_that_were_cut_off(scorer, bert, tmp_path):
    batches = split(data(bert, 5), 1)
    counted = Batches(batches)
    with counted_runs(bert.model) as runs:
        whole = told(score(bert, scorer, counted))
    n_runs, n_batches = len(runs), int(1e9 - counted.left)
    for left in sorted({2, n_batches // 2, n_batches - 1} - {0}):
        folder = tmp_path / str(left)
        if scorer != "magnitude":
            cut_off(bert, scorer, batches, left, folder=folder)
        with counted_runs(bert.model) as runs:
            assert told(score(bert, scorer, batches, folder=folder)) == whole
        assert len(runs) <= n_runs + 1, "once to know the call"
        if left == n_batches - 1 and scorer not in ("magnitude", "ggn"):
            assert len(runs) < n_runs / 2 + 4, "almost all had been done"


def test_auto_that_was_cut_off(bert, tmp_path):
    batches, scorer = split(data(bert, 5), 1), Auto(candidates=("taylor", "obs"), random_draws=1)
    whole = told(score(bert, scorer, batches))
    for left in (3, 8):
        folder = tmp_path / str(left)
        cut_off(bert, scorer, batches, left, folder=folder)
        assert told(score(bert, scorer, batches, folder=folder)) == whole


@pytest.mark.parametrize("refits_before", [1, 5])
def test_auto_does_not_refit_again(bert, tmp_path, refits_before, monkeypatch):
    batches, scorer = split(data(bert, 8), 2), Auto(candidates=("taylor", "obs"), random_draws=1)
    whole = told(score(bert, scorer, batches))
    refit = Auto.refit_
    runs = 0

    def counted(self, *args):
        nonlocal runs
        if runs == most:
            raise CutOff
        runs += 1
        return refit(self, *args)

    monkeypatch.setattr(Auto, "refit_", counted)
    most = refits_before
    with pytest.raises(CutOff):
        score(bert, scorer, batches, folder=tmp_path)
    runs, most = 0, 6 - refits_before  # three plans in two folds
    assert told(score(bert, scorer, batches, folder=tmp_path)) == whole
    assert runs == most


def test_scores_until_they_are_settled(bert, tmp_path):
    batches, until = split(data(bert, 24), 2), hp.Stable(k=4, first=4)
    whole = told(score(bert, "taylor", batches, until=until))
    cut_off(bert, "taylor", batches, 7, folder=tmp_path, until=until)
    assert told(score(bert, "taylor", batches, folder=tmp_path, until=until)) == whole


@pytest.mark.parametrize("fails", [False, True])
def test_how_ablations_are_run_is_remembered(fails, tmp_path, monkeypatch):
    """In fp32, where other chunks and other ways to run give other roundings."""
    subject, scorer = subject_of("bert"), LeaveOneOut(max_bytes=20_000)
    subject.model.float()
    batches = [
        {k: v[:, :n] if v.ndim == 2 else v for k, v in data(subject, 3).items()}
        for n in (7, 3, 5, 6)
    ]
    prove = candidates._Pass.prove

    def failing(self):
        prove(self)
        if self.number == 0:
            raise candidates.CannotReplay("the proof", "exact", "1e-2 off")

    if fails:
        monkeypatch.setattr(candidates._Pass, "prove", failing)
    whole = told(score(subject, scorer, batches))
    for left in (1, 3):
        folder = tmp_path / str(left)
        cut_off(subject, scorer, batches, left, folder=folder)
        assert told(score(subject, scorer, batches, folder=folder)) == whole


class Cached(Scorer):
    """Gives one tensor for every batch, by an own scorer's right."""

    def estimate(self, problem):
        row = torch.arange(12, dtype=torch.float64).expand(1, -1)
        rows = problem.rows("cached", lambda number, batch: row)
        return Estimate(rows.mean(0), n_examples=len(rows), samples=rows)


def test_rows_may_be_one_tensor_and_parts_of_a_killed_call_are_removed(bert, tmp_path):
    batches, own = split(data(bert, 3), 1), dataclass(frozen=True)(Cached)()
    (tmp_path / "0-of-1").mkdir()
    (tmp_path / "0-of-1" / ".rows-000001.safetensors.00000000.part").write_bytes(b"half")
    for _ in range(2):
        assert score(bert, own, batches, folder=tmp_path) == score(bert, own, batches)
    assert not list(tmp_path.rglob("*.part"))


def test_a_call_without_data_or_labels_has_a_folder_too(bert, tmp_path):
    hp.score(bert.model, None, "magnitude", folder=tmp_path / "magnitude")
    bare = [{k: v for k, v in batch.items() if k != "labels"} for batch in split(data(bert, 3), 1)]
    whole = hp.score(bert.model, bare, "surgeon", progress=False)
    for _ in range(2):
        again = hp.score(bert.model, bare, "surgeon", folder=tmp_path / "surgeon", progress=False)
        assert told(again) == told(whole)
    for name in ("magnitude", "surgeon"):
        said = json.loads((tmp_path / name / "0-of-1" / "call.json").read_text())
        assert said["what the model makes of the first batch"] == []


# ---------------------------------------------------------------- what is kept


def test_passes_that_are_short_are_kept_as_well(bert, tmp_path, monkeypatch):
    """With a clock on which every run of the model takes a second, and a minute goes by between two
    writes."""
    now, batches = [0.0], split(data(bert, 6), 2)
    monkeypatch.setattr(_resume_cache, "EVERY", 60.0)
    monkeypatch.setattr(_resume_cache, "monotonic", lambda: now[0])

    def ticking(*_):
        now[0] += 1
        if now[0] > 600:
            raise CutOff

    handle = bert.model.register_forward_pre_hook(ticking)
    try:
        with pytest.raises(CutOff):
            score(bert, Shapley(orders=40), batches, folder=tmp_path)
    finally:
        handle.remove()
    files = tmp_path.rglob("rows-*.safetensors")
    kept = [len(_resume_cache._metadata_of(path) or ()) for path in files]
    assert len(kept) > 3
    assert sum(kept) > 3 * len(batches), "of many passes"


@pytest.mark.parametrize("scorer", ["taylor", "surgeon"])
def test_damaged_files_are_made_again(scorer, four, bert, tmp_path):
    whole = told(score(bert, scorer, four, folder=tmp_path))
    for damage in (
        lambda content: b"",
        lambda content: b"\0" * 9,
        lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    ):
        files = sorted(tmp_path.rglob("*.safetensors"))
        assert files
        for file in files:
            file.write_bytes(damage(file.read_bytes()))
        assert told(score(bert, scorer, four, folder=tmp_path)) == whole


def test_no_more_is_kept_than_there_is_room_for(bert, four, tmp_path, monkeypatch):
    whole = told(score(bert, "taylor", four))
    monkeypatch.setattr(_resume_cache, "LIMIT", 100)
    assert told(score(bert, "taylor", four, folder=tmp_path)) == whole
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 1000


def test_a_loss_that_is_not_finite_is_not_kept(bert, four, tmp_path):
    def loss(model, batch):
        wrong = torch.equal(batch["input_ids"], four[2]["input_ids"])
        return default_loss(model, batch) * (float("nan") if wrong else 1)

    for _ in range(2):
        with pytest.raises(InvalidValue, match="batch 2"):
            score(bert, "taylor", four, loss=loss, folder=tmp_path)


# ---------------------------------------------------------------- what is refused


def test_a_folder_of_another_call_is_refused(bert, four, tmp_path):
    score(bert, "taylor", four, folder=tmp_path)
    with pytest.raises(InvalidValue, match=r"which differs in scorers.*another folder"):
        score(bert, "fisher", four, folder=tmp_path)
    other = replace(bert, model=copy.deepcopy(bert.model))
    with torch.no_grad():
        next(other.model.parameters()).add_(1.0)
    with pytest.raises(InvalidValue, match="which differs in the model"):
        score(other, "taylor", four, folder=tmp_path)
    (tmp_path / "0-of-1" / "call.json").write_text("[]")
    with pytest.raises(
        InvalidValue, match=r"call.json: must be a file that score\(folder=\) wrote"
    ):
        score(bert, "taylor", four, folder=tmp_path)


def test_a_call_is_known_by_what_the_model_makes_of_its_first_examples(bert, four, tmp_path):
    with hp.gated(bert.model, {bert.sites[0].name: torch.tensor([0.0, 1.0, 1.0, 1.0])}):
        score(bert, "wanda", four, folder=tmp_path / "gated")
    with pytest.raises(InvalidValue, match="differs in what the model makes of the first batch"):
        score(bert, "wanda", four, folder=tmp_path / "gated")

    def times(factor, model, batch):
        return factor * default_loss(model, batch)

    def scored(factor):
        score(bert, "taylor", four, loss=partial(times, factor), folder=tmp_path / "other")

    scored(1.0)
    scored(1.0)
    with pytest.raises(
        InvalidValue, match="differs in the loss, what the model makes of the first"
    ):
        scored(3.0)
    with torch.autocast("cpu"), pytest.raises(InvalidValue, match="differs in device"):
        scored(1.0)


@pytest.mark.parametrize("scorer", ["taylor", "surgeon", "wanda", MEAN], ids=str)
def test_other_batches_are_refused_and_fewer_or_more_are_counted(scorer, bert, four, tmp_path):
    for number, given in enumerate((four[:1] * 4, [four[0], *four[2:]])):
        score(bert, scorer, four, folder=tmp_path / str(number))
        with pytest.raises(InvalidValue, match=OTHERS):
            score(bert, scorer, given, folder=tmp_path / str(number))
    for first, second in ((four, four[:2]), (four[:2], four)):
        folder = tmp_path / f"{len(first)} first"
        score(bert, scorer, first, folder=folder)
        with contextlib.suppress(InvalidValue):  # sums hold what rows do not
            found = told(score(bert, scorer, second, folder=folder))
            assert found == told(score(bert, scorer, second))


def test_sums_of_another_kind_are_refused(bert, four, tmp_path):
    score(bert, "wanda", four, folder=tmp_path)
    (path,) = tmp_path.rglob("sums-*.safetensors")
    cache, sums = _resume_cache.ResumeCache(path.parent), {"other/total": torch.zeros(1)}
    for said in (
        {},
        {"pass": "one", "batches": 1, "mark": "a", "whole": ""},
        {"pass": 1, "batches": 2, "mark": "ab", "whole": ""},
    ):
        cache.write(path, sums, said)
        with pytest.raises(
            InvalidValue, match="must be a file with this call's sums, got one without"
        ):
            score(bert, "wanda", four, folder=tmp_path)


def test_a_folder_is_a_path_that_no_other_call_uses(bert, four, tmp_path):
    for folder in (3, True, ""):
        with pytest.raises(InvalidValue, match=r"score\(folder=\): must be a folder's path"):
            score(bert, "taylor", four, folder=folder)
    with (
        locked(tmp_path / "0-of-1", "another"),
        pytest.raises(InvalidValue, match=r"a call of score\(\) that is running there"),
    ):
        score(bert, "taylor", four, folder=tmp_path)


@pytest.mark.parametrize("scorer", ["taylor", "surgeon"])
def test_that_losses_are_coupled_is_remembered(scorer, bert, four, tmp_path):
    def coupled(model, batch):
        losses = default_loss(model, batch)
        return losses + losses.mean()

    whole = score(bert, scorer, four, loss=coupled)
    assert NOTE in whole.notes
    cut_off(bert, scorer, four, 3, folder=tmp_path, loss=coupled)
    for _ in range(2):  # the second time all is in the folder
        assert told(score(bert, scorer, four, folder=tmp_path, loss=coupled)) == told(whole)
