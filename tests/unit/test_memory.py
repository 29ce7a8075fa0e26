"""Memory of scoring and recovery, whatever the number of batches; and that of bf16 models no sum is
in bf16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core import samples as samples_module
from headprune.recovery import Lstsq
from headprune.scoring import Fisher, Ggn, IntegratedGradients, Surgeon, Taylor, Taylor2
from headprune.scoring._rows import SummarizedRows, collected
from tests.laws.support import subject_of
from tests.scripts import benchmark

CPU = torch.device("cpu")


def peak(run: Callable[[], Any]) -> int:
    found: int = benchmark("scoring_cost").peak(run, CPU)
    return found


class Made:
    """Batches that are made when they are asked for, the same ones every time."""

    def __init__(self, count: int, rows: int = 32) -> None:
        self.count, self.rows = count, rows

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for seed in range(self.count):
            yield torch.randn(self.rows, 3, 32, generator=torch.Generator().manual_seed(seed))


def model_of(heads: int = 8) -> nn.Module:
    return nn.Sequential(
        hp.MultiHeadAttention(32, heads), nn.Tanh(), hp.MultiHeadAttention(32, heads)
    )


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean((1, 2))


SCORERS: list[Any] = [
    Taylor(),
    Taylor2(),
    Fisher(),
    Fisher(block=5),
    IntegratedGradients(points=1),
    Surgeon(blocks=2),
]


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
def test_scoring_takes_no_more_for_more_batches(
    scorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "LIMIT", 8 * 16 * 64)  # 64 rows of 16 units
    model = model_of()
    few, many = (
        peak(lambda n=n: hp.score(model, Made(n), scorer, loss=loss, progress=False))
        for n in (8, 40)
    )
    assert many < few + 8 * 16 * 32 * 4, "more than four batches of rows"


def test_lstsq_takes_no_more_for_more_batches() -> None:
    teacher = model_of()
    small = copy.deepcopy(teacher)
    hp.prune_(small, hp.HeadMask.from_keep({"0": [0, 1], "2": [3]}, {"0": 8, "2": 8}))

    def recover(n: int, max_bytes: int) -> None:
        hp.recover_(copy.deepcopy(small), Made(n), Lstsq(max_bytes=max_bytes), teacher)

    few, many, kept = (
        peak(lambda n=n, b=b: recover(n, b)) for n, b in ((4, 0), (20, 0), (20, 2**30))
    )
    assert many < 1.05 * few
    assert kept > few + 16 * 32 * 3 * 32 * 4, "the streams of 16 batches"


def test_what_lstsq_keeps_changes_no_number() -> None:
    teacher = model_of()
    found = []
    for max_bytes in (0, 2**30):
        small = copy.deepcopy(teacher)
        hp.prune_(small, hp.HeadMask.from_keep({"0": [0, 1], "2": [3]}, {"0": 8, "2": 8}))
        hp.recover_(small, Made(3), Lstsq(max_bytes=max_bytes), teacher)
        found.append(small.state_dict())
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


def test_no_rows_change_nothing() -> None:
    rows, x = SummarizedRows(), torch.randn(3, 2, dtype=torch.float64)
    for part in (x[:0], x[:2], x[:0], x[2:]):
        rows.add(part)
    mean, error = rows.mean_and_error
    assert rows.count == 3
    torch.testing.assert_close(rows.samples, x)
    torch.testing.assert_close((mean, error), (x.mean(0), x.std(0) / 3**0.5))


GRADIENTS: list[Any] = [
    Taylor(),
    Taylor(reduce="batch", block=7),
    Taylor(reduce="signed", normalize="l2"),
    Taylor(reduce="token"),
    Taylor2(),
    Fisher(),
    Fisher(block=5),
    IntegratedGradients(points=1),
    hp.scoring.AttributionPatching(base="zero"),
]


def test_scores_without_room_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, errors and the curvature are those of all examples; several scorers share the
    pass."""
    model, batches = model_of(), list(Made(20, 9))
    expected = hp.score(model, batches, GRADIENTS, loss=loss, progress=False)
    monkeypatch.setattr(samples_module, "LIMIT", 8 * 16 * 16)
    together = hp.score(model, batches, GRADIENTS, loss=loss, progress=False)
    alone = [hp.score(model, iter(batches), s, loss=loss, progress=False) for s in GRADIENTS]
    for a, b, c in zip(expected, together, alone, strict=True):
        for found in (b, c):
            assert_close(found.values, a.values, rtol=1e-12, atol=1e-15)
            assert_close(found.standard_errors, a.standard_errors, rtol=1e-9, atol=1e-15)
            assert found.n_examples == a.n_examples == 180
            assert found.samples is not None
            assert found.samples.matrix.nbytes <= 8 * 16 * 16


def test_curvature_without_room_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("bert")
    labels = torch.arange(len(subject.batch["input_ids"])) % 2
    batches = [{**subject.batch, "labels": labels}] * 12
    scorers: list[Any] = [Fisher(), Fisher(block=5), Ggn()]
    expected = hp.score(subject.model, batches, scorers, progress=False)
    n_units = sum(map(len, expected[0].values))
    monkeypatch.setattr(samples_module, "LIMIT", 8 * n_units**2)
    for a, b in zip(
        expected, hp.score(subject.model, batches, scorers, progress=False), strict=True
    ):
        assert b.samples.matrix.nbytes <= 8 * n_units**2
        assert a.samples.rows > b.samples.rows or a.scorer == "fisher"
        assert_close(b.values, a.values, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(b.curvature.matrix, a.curvature.matrix, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("sizes", [[1] * 37, [5, 1, 16, 9, 6], [37]])
def test_rows_keep_means_of_neighbours(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "LIMIT", 8 * 2 * 4)  # 8 rows of 2 whole
    data = torch.randn(37, 2, dtype=torch.float64) + 100
    rows = collected(iter(data.split(sizes)))
    assert isinstance(rows, SummarizedRows)
    block = 37 // len(rows.samples)
    block = 1 << (block.bit_length() - 1)
    assert_close(
        rows.samples,
        data[: 37 // block * block].unflatten(0, (-1, block)).mean(1)[: len(rows.samples)],
    )
    mean, error = rows.mean_and_error
    assert rows.count == 37
    assert_close(mean, data.mean(0))
    assert_close(error, data.std(0) / 37**0.5)


# --- bf16 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_scores_of_bf16_models_are_those_of_fp64_up_to_its_rounding(name: str) -> None:
    subject = subject_of(name)
    if name == "bert":
        subject.batch["labels"] = torch.arange(len(subject.batch["input_ids"])) % 2
    subject.model.bfloat16()  # the fp64 model has the rounded weights
    exact = copy.deepcopy(subject.model).double()
    scorers: list[Any] = ["taylor", "fisher", "ggn", "surgeon", "leave_one_out", "wanda", "obs"]
    expected = hp.score(exact, [subject.batch], scorers, progress=False)
    found = hp.score(subject.model, [subject.batch], scorers, progress=False)
    for a, b in zip(expected, found, strict=True):
        x, y = (torch.tensor(sum(s.values, ())) for s in (a, b))
        assert float((x - y).abs().max() / x.abs().max()) < 0.15, a.scorer


def test_sums_of_bf16_models_lose_nothing() -> None:
    """The same batch 300 times: a sum in bf16 would stand still after 256 of them."""
    subject = subject_of("bert")
    subject.model.bfloat16()
    batch = {**subject.batch, "labels": torch.arange(len(subject.batch["input_ids"])) % 2}
    scorers: list[Any] = ["taylor", "fisher", "wanda"]
    once = hp.score(subject.model, [batch], scorers, progress=False)
    often = hp.score(subject.model, [batch] * 300, scorers, progress=False)
    for a, b in zip(once, often, strict=True):
        assert_close(b.values, a.values, rtol=1e-9, atol=0)
    np.testing.assert_allclose(
        often[1].curvature.matrix, once[1].curvature.matrix, rtol=1e-9, atol=1e-30
    )
