"""compare_latency with a clock of our own: order, pairing, statistics, limits, clean-up; and
shaped_batch."""

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from headprune.bench import compare_latency, latency, shaped_batch
from headprune.core.errors import InvalidValue
from headprune.core.record import SpeedRow


class Clock:
    """Time passes only when a model or the accelerator works."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now


class Timed(nn.Module):
    """A model that takes the given seconds, one entry a call, the last for ever."""

    def __init__(self, clock, name, *seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout()
        self.clock, self.name, self.seconds, self.calls = clock, name, seconds, 0
        self.seen, self.shapes = set(), []

    def forward(self, x):
        modes = self.training, self.dropout.training
        self.seen.add((*modes, torch.is_inference_mode_enabled(), gc.isenabled()))
        self.shapes.append(tuple(x.shape))
        self.clock.log.append(self.name)
        self.clock.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1
        return x * self.weight


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(latency, "perf_counter", clock)
    return clock


@pytest.fixture
def pair(clock):
    """An original and a pruned model that take a second each."""
    return Timed(clock, "o", 1.0), Timed(clock, "p", 1.0)


#: Two rounds, each of which is timed.
SHORT = {"warmup": 0, "seconds": 0, "min_rounds": 2}


def make(batch, length):
    return torch.zeros(batch, length)


def compare(original, pruned, batch_sizes=(1,), lengths=(4,), **options):
    return compare_latency(original, pruned, make, batch_sizes, lengths, **options)


def rounds(clock, times, **options):
    """The row of one cell whose rounds take ``times`` [rounds, 2], in whatever order the two go."""
    original = Timed(clock, "original", *(t[0] for t in times))
    pruned = Timed(clock, "pruned", *(t[1] for t in times))
    n = len(times)
    clock.now = 0.0  # rounding depends on how late it is
    (row,) = compare(original, pruned, warmup=0, seconds=0, min_rounds=n, max_rounds=n, **options)
    assert row.rounds == n
    return row


def test_rounds_are_interleaved_and_the_order_alternates(clock, pair):
    compare(*pair, warmup=2, seconds=0, min_rounds=4)
    assert "".join(clock.log[:4]) in ("opop", "oopp")  # warm-up, not timed
    assert "".join(clock.log[4:]) == "oppooppo"


def test_the_row_holds_percentiles_of_each_and_the_median_of_paired_ratios(clock):
    row = rounds(clock, [(2.0, 1.0), (4.0, 1.0), (6.0, 2.0), (8.0, 8.0), (30.0, 3.0)])
    assert isinstance(row, SpeedRow)
    assert (row.original_p50, row.pruned_p50) == pytest.approx((6.0, 2.0))
    assert row.original_p90 == pytest.approx(8.0 + 0.6 * 22.0)
    assert row.pruned_p90 == pytest.approx(3.0 + 0.6 * 5.0)
    assert row.ratio == pytest.approx(3.0)  # of 2, 4, 3, 1, 10
    # The ratio is that of original to pruned, not of the medians by chance:
    assert rounds(clock, [(1.0, 4.0), (1.0, 4.0)]).ratio == pytest.approx(0.25)
    late = Timed(clock, "o", 100.0, 100.0, 2.0), Timed(clock, "p", 100.0, 1.0)
    (row,) = compare(*late, warmup=2, seconds=0, min_rounds=2)  # warm-up is not timed
    assert (row.original_p50, row.original_p90, row.pruned_p90) == pytest.approx((2.0, 2.0, 1.0))


def test_pairing_takes_out_what_slows_both(clock):
    """The machine gets ten times slower half-way: the ratio does not notice, unpaired medians
    would."""
    drift = [(1.5 * speed, 1.0 * speed) for speed in (1.0, 1.1, 1.2, 1.3, 10.0, 11.0, 12.0, 13.0)]
    row = rounds(clock, drift)
    assert (row.low, row.ratio, row.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_is_a_percentile_bootstrap_of_the_median_over_rounds(clock):
    # Skewed: a mean would lie elsewhere.
    ratios = 0.5 + np.random.default_rng(1).exponential(1.0, 40)
    times = [(r, 1.0) for r in ratios]
    row, again, other = (rounds(clock, times, seed=seed) for seed in (0, 0, 1))
    draw = np.random.default_rng(2)
    wanted = scipy.stats.bootstrap(
        (ratios,), np.median, n_resamples=20_000, method="percentile", rng=draw
    ).confidence_interval
    # Both are estimates by resampling: a fifth of the width is far more than their own noise.
    width = wanted.high - wanted.low
    assert row.low == pytest.approx(wanted.low, abs=width / 5)
    assert row.high == pytest.approx(wanted.high, abs=width / 5)
    assert row.low < row.ratio < row.high
    assert (row.low, row.high) == (again.low, again.high)
    assert (row.low, row.high) != (other.low, other.high)


@pytest.mark.parametrize(
    ("options", "n_rounds"),
    [
        # A round takes 3 seconds; 5 would do for 13, but the order must balance.
        ({"seconds": 10.0, "min_rounds": 2, "max_rounds": 100}, 4),
        ({"seconds": 13.0, "min_rounds": 2, "max_rounds": 100}, 6),
        ({"seconds": 0.0, "min_rounds": 7, "max_rounds": 100}, 8),
        ({"seconds": 1e9, "min_rounds": 2, "max_rounds": 5}, 5),
        ({"seconds": 0.0, "min_rounds": 1, "max_rounds": 1}, 1),
    ],
)
def test_a_cell_ends_when_it_has_enough(clock, options, n_rounds):
    original, pruned = Timed(clock, "o", 2.0), Timed(clock, "p", 1.0)
    (row,) = compare(original, pruned, warmup=1, **options)
    assert row.rounds == n_rounds
    assert original.calls == pruned.calls == n_rounds + 1


def test_every_batch_size_and_length_is_a_row(pair):
    rows = compare(*pair, [1, 3], [5, 7], **SHORT)
    wanted = [(1, 5), (3, 5), (1, 7), (3, 7)]
    assert [(row.batch, row.length) for row in rows] == wanted
    for model in pair:
        assert model.shapes == [shape for shape in wanted for _ in range(2)]


@pytest.mark.parametrize("fails", [False, True])
def test_both_run_in_inference_mode_without_garbage_collector_and_are_put_back(pair, fails):
    original, pruned = pair
    original.train().dropout.eval()
    pruned.train()
    grad = original.weight.grad = torch.ones(1)
    state = torch.get_rng_state()
    if fails:
        pruned.seconds = ()  # has no time for a call
    with pytest.raises(IndexError) if fails else nullcontext():
        compare(*pair, **SHORT)
    for model in pair:
        assert model.seen == {(False, False, True, False)}
        assert model.weight.requires_grad
    assert (original.training, original.dropout.training) == (True, False)
    assert (pruned.training, pruned.dropout.training) == (True, True)
    assert original.weight.grad is grad
    assert gc.isenabled()
    assert not torch.is_inference_mode_enabled()
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


def test_a_garbage_collector_that_was_off_is_off_again(pair):
    gc.disable()
    try:
        compare(*pair, **SHORT)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_on_cuda_the_clock_stops_only_when_the_work_is_done(clock, monkeypatch):
    """Kernels run on when the call returns; the work of one model must not be counted for the
    next."""
    device, pending = torch.device("cuda", 0), []

    class Launching(Timed):
        def forward(self, x):
            pending.append(self.seconds[0])
            self.clock.log.append(self.name)
            return x

    def synchronize(of):
        assert of == device
        clock.log.append("|")
        clock.now += sum(pending)
        pending.clear()

    monkeypatch.setattr(latency, "device_of", lambda model: device)
    monkeypatch.setattr(latency, "to_device", lambda batch, to: batch)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    (row,) = compare(Launching(clock, "o", 3.0), Launching(clock, "p", 2.0), **SHORT)
    assert (row.original_p50, row.pruned_p50, row.ratio) == pytest.approx((3.0, 2.0, 1.5))
    assert "".join(clock.log) == "|o||p||p||o|"


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "cpu"])
def test_every_accelerator_is_waited_for(monkeypatch, kind):
    waited = []
    for name in ("cuda", "mps", "xpu"):
        module = getattr(torch, name)
        monkeypatch.setattr(module, "synchronize", lambda *_, name=name: waited.append(name))
    latency.synchronize(torch.device(kind))
    assert waited == ([] if kind == "cpu" else [kind])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": []}, "batch_sizes: must be a list of counts"),
        ({"batch_sizes": 4}, "batch_sizes: must be a list of counts"),
        ({"lengths": [8, 0]}, "lengths: must be a whole number >= 1, got 0"),
        ({"lengths": [True]}, "lengths: must be a whole number >= 1, got True"),
        ({"seconds": float("nan")}, "seconds: must be a number >= 0"),
        ({"warmup": -1}, "warmup: must be a whole number >= 0"),
        ({"min_rounds": 0}, "min_rounds: must be a whole number >= 1"),
        ({"min_rounds": 9, "max_rounds": 8}, "max_rounds: must be at least min_rounds, 9"),
    ],
)
def test_what_cannot_be_measured_is_refused(clock, pair, options, message):
    with pytest.raises(InvalidValue, match=message):
        compare(*pair, **options)
    with pytest.raises(InvalidValue, match="pruned: must be on cpu, where the original is, got me"):
        compare(pair[0], pair[1].to("meta"))
    assert clock.log == []


EXAMPLE = {
    "input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]),
    "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    "token_type_ids": torch.tensor([[0, 0, 1], [0, 1, 1]]),
    "position_ids": torch.tensor([[0, 1, 2], [0, 1, 2]]),
    "labels": torch.tensor([1, 0]),
}


SHAPED = {
    (3, 5): {
        "input_ids": [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5], [1, 2, 3, 1, 2]],
        "attention_mask": [[1] * 5] * 3,
        "token_type_ids": [[0, 0, 1, 0, 0], [0, 1, 1, 0, 1], [0, 0, 1, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4]] * 3,
    },
    (1, 2): {
        "input_ids": [[1, 2]],
        "attention_mask": [[1, 1]],
        "token_type_ids": [[0, 0]],
        "position_ids": [[0, 1]],
    },
}


@pytest.mark.parametrize(("shape", "wanted"), SHAPED.items())
def test_shaped_batch_repeats_or_cuts_rows_and_tokens(shape, wanted):
    before = {k: v.clone() for k, v in EXAMPLE.items()}
    made = shaped_batch(EXAMPLE, *shape)
    assert {name: tensor.tolist() for name, tensor in made.items()} == wanted
    for tensor in made.values():
        assert tensor.is_contiguous()
        tensor.zero_()
    torch.testing.assert_close(EXAMPLE, before)  # the example is left alone


def test_shaped_batch_gives_images_rows_only_also_beside_text():
    image = torch.arange(2.0 * 3 * 4 * 4).reshape(2, 3, 4, 4)
    alone = shaped_batch({"pixel_values": image, "labels": torch.tensor([0, 1])}, 3, 99)
    assert list(alone) == ["pixel_values"]
    # Three colours are no three tokens.
    for made in (alone, shaped_batch({**EXAMPLE, "pixel_values": image}, 3, 5)):
        torch.testing.assert_close(made["pixel_values"], image[[0, 1, 0]])


def test_shaped_batch_stretches_embeddings_and_passes_other_values():
    embeds = torch.randn(1, 2, 4)
    example = {"inputs_embeds": embeds, "attention_mask": torch.ones(1, 2), "use_cache": False}
    made = shaped_batch(example, 2, 3)
    torch.testing.assert_close(made["inputs_embeds"], embeds[[0, 0]][:, [0, 1, 0]])
    torch.testing.assert_close(made["attention_mask"], torch.ones(2, 3))
    assert made["use_cache"] is False


def test_shaped_batch_keeps_encoder_and_decoder_lengths_apart():
    ids, mask = torch.ones(1, 4, dtype=torch.long), torch.tensor([[1, 0]])
    example = {"input_ids": ids, "decoder_input_ids": ids[:, :2], "decoder_attention_mask": mask}
    made = shaped_batch(example, 1, 3)
    assert {k: tuple(v.shape) for k, v in made.items()} == dict.fromkeys(example, (1, 3))
    assert made["decoder_attention_mask"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((EXAMPLE, 0, 3), "batch: must be a whole number >= 1"),
        ((EXAMPLE, 2, 0), "length: must be a whole number >= 1"),
        ((torch.zeros(2, 3), 1, 1), "example: must be a mapping of tensors"),
        (({"labels": torch.zeros(2)}, 1, 1), "example: must be a mapping of tensors"),
    ],
)
def test_shaped_batch_refuses_what_is_no_example(arguments, message):
    with pytest.raises(InvalidValue, match=message):
        shaped_batch(*arguments)
