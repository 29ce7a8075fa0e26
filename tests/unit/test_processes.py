"""Processes that share the batches of ``hp.score``: the scores of one process in all of them, or an
error in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from safetensors.torch import load_file
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.scores import HeadScores
from headprune.model.processes import Workers
from headprune.scoring import registry
from headprune.scoring._api import _check_alike
from headprune.scoring._base import Scorer
from tests import processes_work
from tests.processes import forked, together
from tests.scripts import benchmark

#: Sums over tokens and over outer products are added up in another order.
CLOSE = 1e-12


ALIKE = ("scorer", "settings", "n_examples", "data", "model", "seed", "notes", "costs", "choice")


def equal(found: HeadScores, expected: HeadScores) -> None:
    """Everything that one process says: rows to the last bit, sums to rounding."""
    title = f"{expected.scorer} {expected.settings}"
    for name in ALIKE:
        assert getattr(found, name) == getattr(expected, name), f"{title}: {name}"
    for name in ("values", "standard_errors", "samples", "curvature"):
        ours, theirs = (_matrix(getattr(scores, name)) for scores in (found, expected))
        assert (ours is None) == (theirs is None), f"{title}: {name}"
        if ours is not None and theirs is not None:
            assert ours.shape == theirs.shape, f"{title}: {name}"
            assert abs(ours - theirs).max() <= CLOSE * abs(theirs).max(), f"{title}: {name}"


def _matrix(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return np.concatenate([np.asarray(row) for row in value])
    return np.asarray(value.matrix)


def told(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.slow
def test_scores_of_several_processes_are_those_of_one(tmp_path):
    counts = (4, 2)
    together(3, "score_all", tmp_path, *map(str, counts))
    expected: dict[str, tuple[HeadScores, ...]] = {
        **{f"{count}": processes_work.scored(count) for count in counts},
        "until": (processes_work.until(),),
        "bounded": processes_work.bounded(),
        "offloaded": (processes_work.offloaded(),),
        "resumed": processes_work.resumed(),
    }
    assert expected["until"][0].n_examples < 79, "it must stop before the end"
    for scores in expected["bounded"]:
        assert scores.samples.rows < scores.n_examples == 39, "there must be no room"
        assert (scores.curvature is not None) == (scores.scorer in ("fisher", "ggn"))
    for name, many in expected.items():
        for number, scores in enumerate(many):
            for rank in range(3):
                equal(HeadScores.load(tmp_path / f"{name}-{number}-{rank}.json"), scores)


def test_every_scorer_is_among_them():
    tried = {registry.resolve(s, Scorer, "scorer")[0] for s in processes_work.SCORERS}
    assert tried == set(registry.names())


def test_one_process_without_a_group_shares_with_nobody():
    own = processes_work.subject().model
    data, more = processes_work.batches(2), {"loss": processes_work.loss, "progress": False}
    found = hp.score(own, data, "taylor", processes=hp.Processes(), **more)
    equal(found, hp.score(own, data, "taylor", **more))


@pytest.mark.parametrize(
    ("how", "timeout", "words"),
    [
        ("kill", 600, "the other processes: must be reachable"),
        ("stop", 2, "Timed out waiting 2000ms"),
    ],
)
def test_a_process_that_is_gone_stops_the_others(how, timeout, words, tmp_path):
    """SIGKILL is noticed by the closed connection, SIGSTOP by the timeout."""
    with forked(2, "fail", tmp_path, how, str(timeout)) as running:
        running[0].join(300)
    found = told(tmp_path, "told-0")
    assert found["kind"] == "ProcessFailed"
    assert words in found["words"]
    assert found["seconds"] < 300


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusals")
    together(2, "differ", folder, "loss", "data", "weights", "scorer", "auto")
    return folder


def test_processes_that_differ_are_refused_and_what_one_raises_is_told(refusals):
    for what, where in (("data", "batches"), ("weights", "the model"), ("scorer", "score()")):
        for rank in range(2):
            found = told(refusals, f"{what}-{rank}")
            assert found["kind"] == "InvalidValue"
            assert found["words"].startswith(f"{where}: must be")
            assert f"different ones in processes {1 - rank} and {rank}" in found["words"]
    first, second = (told(refusals, f"loss-{rank}") for rank in range(2))
    assert (first["kind"], second["kind"]) == ("ProcessFailed", "InvalidValue")
    assert second["words"].startswith("the loss of batch 1, example 0: must be finite")
    assert first["words"].endswith(f"got InvalidValue: {second['words']}")


def test_auto_goes_by_the_same_plans_in_every_process(refusals):
    for rank in range(2):
        found = told(refusals, f"plans-{rank}")
        assert found["kind"] == "InvalidValue"
        assert found["words"].startswith("the plans of auto: must be the same in every process")
    # One plan and two processes: both learn that the refit was refused.
    first, second = (HeadScores.load(refusals / f"alone-{rank}.json") for rank in range(2))
    equal(first, second)
    assert first.choice.refit == ""
    assert any("Judged without a refit" in note for note in first.notes)


def test_loaders_that_deal_out_the_data_are_refused():
    rows = TensorDataset(torch.zeros(5, 1))
    sampler = DistributedSampler(rows, num_replicas=2, rank=0)
    dealt = DataLoader(rows, batch_size=2, sampler=sampler)
    assert len(sampler) == 3
    plain = DataLoader(rows, batch_size=2)
    prepared = prepare_data_loader(plain, num_processes=2, process_index=0)
    assert isinstance(prepared.batch_sampler, BatchSamplerShard)
    for loader in (dealt, prepared):
        with pytest.raises(InvalidValue, match="gives each process a part"):
            _check_alike(Workers(), "a model", loader)


def test_several_processes_without_a_group_are_refused(monkeypatch):
    model: Any = processes_work.subject().model
    with pytest.raises(InvalidValue, match=r"score\(processes=\)"):
        hp.score(model, None, "magnitude", processes=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidValue, match="init_process_group"):
        hp.score(model, None, "magnitude", processes=hp.Processes())
    model._tp_size = 2  # what Transformers has split
    with pytest.raises(UnsupportedModel, match="over 2 processes"):
        hp.find_sites(model)


@pytest.mark.slow
def test_a_sharded_model_is_scored_and_cut_once_it_is_gathered_and_a_split_one_is_refused(tmp_path):
    together(2, "shard", tmp_path)
    own = processes_work.subject()
    data, names = processes_work.batches(3), processes_work.SHARDED
    for number, expected in enumerate(hp.score(own.model, data, names, loss=processes_work.loss)):
        for rank in range(2):
            equal(HeadScores.load(tmp_path / f"{number}-{rank}.json"), expected)
    for name in ("prune", "save", "recover", "copy", "share"):
        for rank in range(2):
            found = told(tmp_path, f"{name}-{rank}")
            assert found["kind"] == "UnsupportedModel", name
            assert "sharded over several processes" in found["words"]
            assert "get_model_state_dict" in found["words"]
    logits = load_file(tmp_path / "cut.safetensors")["logits"]
    with hp.gated(own.model, own.ragged()):
        torch.testing.assert_close(logits, own.run(), rtol=1e-10, atol=1e-10)
    # Under tensor parallelism each process would gate its own part of the heads with the gates of
    # all.
    for name in ("find", "gate", "both"):
        found = told(tmp_path, f"{name}-1")
        assert found["kind"] == "UnsupportedModel", name
        assert found["words"].startswith("layers.1.attention.W_q.weight: must be run whole by")


def test_a_timeout_is_a_time():
    for timeout in (0, -1, True, "ten"):
        with pytest.raises(InvalidValue, match=r"Processes\.timeout"):
            hp.Processes(timeout)


@pytest.mark.slow
def test_the_benchmark_compares_groups_in_turn(tmp_path):
    small = "--rounds 1 --batches 3 --batch 1 --tokens 4 --layers 1 --width 16 --scorers taylor"
    where = tmp_path / "processes.json"
    out = benchmark("processes").main([*small.split(), "--out", str(where)])
    one, two = json.loads(out.read_text())["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["difference"] < 1e-6, "the workers score what one process scores"
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    assert one["examples_per_second"] == pytest.approx(3 / np.median(one["seconds"]))
    assert "| `taylor` | 2 |" in benchmark("scale").shared(tmp_path)
