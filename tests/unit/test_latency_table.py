"""Latency tables: the value, and what is measured with a clock of our own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from headprune import layouts
from headprune.bench import latency_tables
from headprune.bench.latency_tables import _smoothed, latency_table
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.core.heads import HeadMask
from headprune.core.latency import LatencyTable, SiteLatency

TABLE = LatencyTable(
    1.0,
    (SiteLatency("a", (None, 0.1, 0.3)), SiteLatency("b", (0.0, 0.2, 0.2, 0.5))),
    8,
    128,
    "cpu",
    "float32",
)


def test_a_table_survives_json_and_predicts() -> None:
    assert LatencyTable.from_json(TABLE.to_json()) == TABLE
    assert TABLE.predict({"a": 2, "b": 3}) == 1.0
    mask = HeadMask.from_keep({"a": [1], "b": []}, {"a": 2, "b": 3})
    assert TABLE.predict(mask) == pytest.approx(1.0 - 0.2 - 0.5)
    assert TABLE.alone(["b"]).whole == 0.5
    with pytest.raises(
        InvalidValue, match=r"row a: must be asked for one of \[1, 2\] heads, got 0"
    ):
        TABLE.predict({"a": 0})
    with pytest.raises(UnknownName, match="measured at this site, got 'c'"):
        TABLE.predict({"c": 0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"whole": 0.0}, "LatencyTable.whole: must be a time in seconds"),
        ({"whole": float("nan")}, "LatencyTable.whole: must be a time in seconds"),
        ({"batch_size": 0}, "batch_size: must be a count >= 1"),
        ({"length": 1.5}, "length: must be a count >= 1"),
        ({"sites": ()}, "one row per site, at least one"),
        ({"sites": (SiteLatency("a", (1.0,)),) * 2}, "one row per site"),
        ({"sites": (SiteLatency("a", (1.0, None)),)}, "row a: must be measured with all heads"),
        ({"sites": (SiteLatency("a", (-1.0, 1.0)),)}, "row a, 0 heads: must be a time in seconds"),
    ],
)
def test_a_table_is_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        replace(TABLE, **changes)


# --- measuring
# ------------------------------------------------------------------------------------------------------


class Clock:
    """Time passes only in attention, by the work that the weights of its output projection are, and
    in ``Rest``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[int] = []

    def __call__(self) -> float:
        return self.now


class Rest(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 7.0
        return x


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    forward = hp.MultiHeadAttention.forward

    def timed(self: hp.MultiHeadAttention, *args: Any, **kwargs: Any) -> Any:
        clock.now += 0.5 + self.n_heads * len(args[0])
        clock.calls.append(self.n_heads)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(hp.MultiHeadAttention, "forward", timed)
    monkeypatch.setattr(latency_tables, "perf_counter", clock)
    return clock


def test_every_number_of_heads_is_measured_on_a_module_that_has_them(clock: Clock) -> None:
    torch.manual_seed(0)
    shared = hp.MultiHeadAttention(8, 4)
    model = nn.Sequential(
        shared, Rest(clock), hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 2), shared
    )
    before, batch = {k: v.clone() for k, v in model.state_dict().items()}, torch.randn(3, 5, 8)
    table = latency_table(model, batch, seconds=0)
    row = (0.5, 3.5, 6.5, 9.5, 12.5)
    assert table.row("2") == row
    assert table.row("3") == (0.5, 3.5, 6.5)
    assert table.row("0") == tuple(2 * s for s in row), "the module runs twice in a pass"
    assert table.whole == 7 + 3 * 12.5 + 6.5
    assert (table.batch_size, table.length, table.dtype, table.notes) == (3, 5, "float32", ())
    # The three of 4 heads share a measurement: 1 pass to record, 4 of the model and 2 + 5 rounds in
    # all each
    assert clock.calls.count(1) == 2 * (2 + 5)
    assert clock.calls.count(3) == 2 + 5
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_predicted_is_measured_where_time_adds_up(clock: Clock) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(hp.MultiHeadAttention(8, 4), Rest(clock), hp.MultiHeadAttention(8, 4))
    batch = torch.randn(2, 5, 8)
    table = latency_table(model, batch, seconds=0)
    scores = hp.score(model, [batch], "magnitude", progress=False)
    plan = hp.select(scores, hp.Budget(speedup=1.5), "knapsack", latency=table)
    hp.prune_(model, plan, batch)
    start = clock.now
    model(batch)
    assert clock.now - start == pytest.approx(table.predict(plan.mask))
    assert table.whole / (clock.now - start) >= 1.5


@pytest.mark.parametrize(
    ("policy", "counts"),
    [("group", (0, 2, 4, 6, 8)), ("balanced", (0, 1, 2, 3, 4, 8)), ("free", tuple(range(9)))],
)
def test_counts_are_those_that_the_policy_can_leave(policy: Any, counts: tuple[int, ...]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=2, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    batch = {
        "input_ids": torch.randint(0, 17, (2, 6)),
        "labels": torch.zeros(2, 6, dtype=torch.long),
    }
    sites = hp.find_sites(model, policy=policy)
    table = latency_table(model, batch, batch_size=3, length=4, sites=sites, seconds=0)
    assert (table.batch_size, table.length) == (3, 4)
    for s in sites:
        assert (
            tuple(n for n, seconds in enumerate(table.row(s.name)) if seconds is not None) == counts
        )
    assert table.row(sites[0].name) == table.row(sites[1].name), "built alike, so measured once"
    table.check(sites)


def test_a_layer_that_must_keep_a_head_is_not_measured_without() -> None:
    model, batch = layouts.registry.get("diffusers").tiny(0, "diffusers-style")
    table = latency_table(model, batch, seconds=0)
    for site in hp.find_sites(model):
        assert site.least == 1
        assert [seconds is None for seconds in table.row(site.name)] == [True] + [False] * len(
            site.heads
        )


def test_a_cache_does_not_grow_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_embd=8, n_layer=2, n_head=2, n_positions=64)
    ).eval()
    lengths: list[int] = []
    forward = GPT2Attention.forward

    def seen(self: Any, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        found = forward(self, hidden_states, past_key_values=past_key_values, **kwargs)
        if past_key_values is not None:
            lengths.append(past_key_values.get_seq_length(self.layer_idx))
        return found

    monkeypatch.setattr(GPT2Attention, "forward", seen)
    latency_table(model, {"input_ids": torch.randint(0, 17, (2, 6))}, seconds=0)
    assert len(lengths) > 20
    assert set(lengths) == {6}


def test_a_batch_is_run_as_it_is_unless_a_size_is_given() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=17,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.randint(1, 17, (2, 6))
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    seen: set[tuple[Any, ...]] = set()

    def shapes(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        padding = kwargs["encoder_attention_mask"]
        seen.add((*kwargs["input_ids"].shape, None if padding is None else int(padding.sum())))

    model.decoder.register_forward_pre_hook(shapes, with_kwargs=True)
    labels = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :4].contiguous()}
    latency_table(model, labels, seconds=0)  # decoder inputs are made of the labels
    assert seen == {(2, 4, 9)}
    seen.clear()
    decoder = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :4]}
    table = latency_table(model, decoder, batch_size=3, seconds=0)
    assert (table.batch_size, table.length) == (3, 6)
    assert seen == {(3, 4, 18)}


def test_a_length_is_refused_where_nothing_has_one() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=4,
        patch_size=2,
    )
    batch = {"pixel_values": torch.randn(2, 3, 4, 4)}
    with pytest.raises(InvalidValue, match=r"latency_table\(length=\): must be left out.*got 77"):
        latency_table(ViTForImageClassification(config), batch, length=77, seconds=0)
    assert (
        latency_table(ViTForImageClassification(config), batch, batch_size=3, seconds=0).length == 5
    )


def test_attention_that_comes_out_slower_than_the_model_is_scaled_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise does that to models of little else; the table must still be one that `select` takes."""

    clock = Clock()
    forward = hp.MultiHeadAttention.forward
    whole: list[bool] = []

    def timed(self: hp.MultiHeadAttention, *args: Any, **kwargs: Any) -> Any:
        clock.now += 1.0 if whole else 2.0  # alone it takes twice as long
        return forward(self, *args, **kwargs)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = hp.MultiHeadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            whole.append(True)
            try:
                return self.attention(x)
            finally:
                whole.clear()

    monkeypatch.setattr(hp.MultiHeadAttention, "forward", timed)
    monkeypatch.setattr(latency_tables, "perf_counter", clock)
    model, batch = Model(), torch.randn(2, 5, 8)
    table = latency_table(model, batch, seconds=0)
    assert table.whole == 1.0
    assert table.row("attention")[-1] == pytest.approx(1.0)
    assert any(
        "took 100 % longer than the model: their times are scaled" in note for note in table.notes
    )
    table.check(hp.find_sites(model))


def test_smoothing_pools_what_falls_and_leaves_the_rest() -> None:
    assert _smoothed([None, 1.0, 3.0, 2.0, 4.0]) == [None, 1.0, 2.5, 2.5, 4.0]
    assert _smoothed([0.0, 1.0]) == [0.0, 1.0]
    rng = np.random.default_rng(0)
    noisy = (np.arange(9) + rng.normal(0, 2, 9) + 5).tolist()
    smooth = _smoothed(noisy)
    assert np.all(np.diff(smooth) >= 0)
    assert sum(smooth) == pytest.approx(sum(noisy))


def test_what_cannot_be_measured_is_refused() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = hp.MultiHeadAttention(8, 2), hp.MultiHeadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(
        UnsupportedModel, match=r"idle: must be run by the batch.*leave it out of sites="
    ):
        latency_table(Idle(), torch.randn(2, 3, 8), seconds=0)
    with pytest.raises(InvalidValue, match=r"seconds=\): must be a number >= 0"):
        latency_table(Idle(), torch.randn(2, 3, 8), seconds=-1)
    with pytest.raises(
        InvalidValue, match=r"batch=\): must be a mapping, to be given another size, got Tensor"
    ):
        latency_table(Idle(), torch.randn(2, 3, 8), batch_size=4, seconds=0)
