"""Memory of scoring and recovery, whatever the number of batches; and that of bf16 models no sum is
in bf16."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core import samples as samples_module
from headprune.recovery import Lstsq
from headprune.scoring import Fisher, IntegratedGradients, Surgeon, Taylor, Taylor2
from headprune.scoring._rows import SummarizedRows, collected
from tests.laws.support import labelled_subject
from tests.scripts import benchmark

CPU = torch.device("cpu")


SCORING_COST = benchmark("scoring_cost")


def peak(run):
    return SCORING_COST.peak(run, CPU)


class Made:
    """Batches that are made when they are asked for, the same ones every time."""

    def __init__(self, count, rows=32):
        self.count, self.rows = count, rows

    def __len__(self):
        return self.count

    def __iter__(self):
        for seed in range(self.count):
            yield torch.randn(self.rows, 3, 32, generator=torch.Generator().manual_seed(seed))


def model_of(heads=8):
    return nn.Sequential(
        hp.MultiHeadAttention(32, heads), nn.Tanh(), hp.MultiHeadAttention(32, heads)
    )


def loss(model, x):
    return model(x).square().mean((1, 2))


@pytest.mark.parametrize("scorer", [Taylor(), Surgeon(blocks=2)], ids=repr)
def test_scoring_takes_no_more_for_more_batches(scorer, monkeypatch):
    monkeypatch.setattr(samples_module, "LIMIT", 8 * 16 * 64)  # 64 rows of 16 units
    model = model_of()

    def scored(n):
        return peak(lambda: hp.score(model, Made(n), scorer, loss=loss, progress=False))

    assert scored(16) < scored(6) + 8 * 16 * 32 * 4, "more than four batches of rows"


def test_lstsq_takes_no_more_for_more_batches():
    teacher = model_of()
    small = copy.deepcopy(teacher)
    hp.prune_(small, hp.HeadMask.from_keep({"0": [0, 1], "2": [3]}, {"0": 8, "2": 8}))

    def recovered(n, room):
        model = copy.deepcopy(small)
        return peak(lambda: hp.recover_(model, Made(n), Lstsq(max_bytes=room), teacher))

    few, many, kept = recovered(3, 0), recovered(12, 0), recovered(12, 2**30)
    assert many < 1.05 * few
    assert kept > few + 9 * 32 * 3 * 32 * 4, "the streams of 9 batches"


GRADIENTS = [
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


def test_scores_without_room_for_all_rows(monkeypatch):
    model, batches = model_of(), list(Made(20, 9))
    expected = hp.score(model, batches, GRADIENTS, loss=loss, progress=False)
    monkeypatch.setattr(samples_module, "LIMIT", 8 * 16 * 16)
    together = hp.score(model, batches, GRADIENTS, loss=loss, progress=False)
    alone = hp.score(model, iter(batches), GRADIENTS[1], loss=loss, progress=False)
    for a, found in [*zip(expected, together, strict=True), (expected[1], alone)]:
        assert_close(found.values, a.values, rtol=1e-12, atol=1e-15)
        assert_close(found.standard_errors, a.standard_errors, rtol=1e-9, atol=1e-15)
        assert found.n_examples == a.n_examples == 180
        assert found.samples is not None
        assert found.samples.matrix.nbytes <= 8 * 16 * 16
        if a.curvature is not None:
            matrices = (found.curvature.matrix, a.curvature.matrix)
            np.testing.assert_allclose(*matrices, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("sizes", [[1] * 37, [5, 0, 1, 16, 9, 6], [37]])
def test_rows_keep_means_of_neighbours(sizes, monkeypatch):
    monkeypatch.setattr(samples_module, "LIMIT", 8 * 2 * 4)  # 8 rows of 2 whole
    data = torch.randn(37, 2, dtype=torch.float64) + 100
    rows = collected(iter(data.split(sizes)))
    assert isinstance(rows, SummarizedRows)
    block = 37 // len(rows.samples)
    block = 1 << (block.bit_length() - 1)
    means = data[: 37 // block * block].unflatten(0, (-1, block)).mean(1)
    assert_close(rows.samples, means[: len(rows.samples)])
    mean, error = rows.mean_and_error
    assert rows.count == 37
    assert_close(mean, data.mean(0))
    assert_close(error, data.std(0) / 37**0.5)


# --- bf16


def test_scores_of_bf16_models_are_those_of_fp64_up_to_its_rounding():
    subject = labelled_subject("bert")
    model, batch = subject.model, subject.batch
    model.bfloat16()  # the fp64 model has the rounded weights
    exact = copy.deepcopy(model).double()
    scorers = ["taylor", "fisher", "ggn", "surgeon", "leave_one_out", "wanda", "obs"]
    expected = hp.score(exact, [batch], scorers, progress=False)
    found = hp.score(model, [batch], scorers, progress=False)
    for a, b in zip(expected, found, strict=True):
        x, y = (torch.tensor(sum(s.values, ())) for s in (a, b))
        assert float((x - y).abs().max() / x.abs().max()) < 0.15, a.scorer


def test_sums_of_bf16_models_lose_nothing():
    """The same batch 300 times: a sum in bf16 would stand still after 256 of them."""
    model, batch = model_of(2).bfloat16(), torch.randn(2, 3, 32).bfloat16()
    once, often = (
        hp.score(model, [batch] * n, ["taylor", "fisher", "wanda"], loss=loss, progress=False)
        for n in (1, 300)
    )
    for a, b in zip(once, often, strict=True):
        assert_close(b.values, a.values, rtol=1e-9, atol=0)
    matrices = [scores[1].curvature.matrix for scores in (often, once)]
    np.testing.assert_allclose(*matrices, rtol=1e-9, atol=1e-30)
