"""Latency tables: the value, and what is measured with a clock of our own."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune import layouts
from headprune.bench import latency_tables
from headprune.bench.latency_tables import _factor, _fitted, _smoothed, latency_table
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.core.heads import HeadMask
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.model.sites import bind

ROWS = SiteLatency("a", (None, 0.1, 0.3)), SiteLatency("b", (0.0, 0.2, 0.2, 0.5))
TABLE = LatencyTable(1.0, ROWS, 8, 128, "cpu", "float32")


def test_a_table_survives_json_and_predicts():
    assert LatencyTable.from_json(TABLE.to_json()) == TABLE
    assert TABLE.predict({"a": 2, "b": 3}) == 1.0
    mask = HeadMask.from_keep({"a": [1], "b": []}, {"a": 2, "b": 3})
    assert TABLE.predict(mask) == pytest.approx(1.0 - 0.2 - 0.5)
    assert TABLE.alone(["b"]).whole == 0.5
    with pytest.raises(
        InvalidValue, match=r"row a: must be a measured number of heads, one of \[1, 2\]"
    ):
        TABLE.predict({"a": 0})
    with pytest.raises(UnknownName, match="measured at this site, got 'c'"):
        TABLE.predict({"c": 0})


def test_a_table_of_many_neurons_is_small_and_older_files_are_read():
    seconds = (0.0, *[None] * 4095, 0.1, *[None] * 4095, 0.3)
    table = replace(TABLE, sites=(SiteLatency("f", seconds, neurons=True),))
    assert len(table.to_json()) < 1000
    assert LatencyTable.from_json(table.to_json()) == table
    data = table.to_dict()
    assert data["sites"][0]["seconds"]["found"] == {"0": 0.0, "4096": 0.1, "8192": 0.3}
    data["sites"][0]["seconds"] = list(seconds)
    assert LatencyTable.from_dict(data) == table


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"length": 3}, "must be a row, or its length"),
        ({"length": 10**9, "found": {}}, "must be a row, or its length up to 65,536"),
        ({"length": 2, "found": {"2": 0.1}}, "got place '2' of 2"),
        ({"length": 2, "found": {"1": "x"}}, r"seconds\[1\]: must be of type float"),
        (3, "must be a JSON list"),
    ],
)
def test_a_wrong_row_of_a_stored_table_is_refused(seconds, words):
    data = TABLE.to_dict()
    data["sites"][0]["seconds"] = seconds
    with pytest.raises(InvalidValue, match=words):
        LatencyTable.from_dict(data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"whole": float("nan")}, "LatencyTable.whole: must be a time in seconds"),
        ({"batch_size": 0}, "batch_size: must be a count >= 1"),
        ({"length": 1.5}, "length: must be a count >= 1"),
        ({"sites": (SiteLatency("a", (1.0,)),) * 2}, "one row per site"),
        ({"sites": (SiteLatency("a", (1.0, None)),)}, "row a: must be measured with all heads"),
        ({"sites": (SiteLatency("a", (-1.0, 1.0)),)}, "row a, 0 heads: must be a time in seconds"),
    ],
)
def test_a_table_is_checked(changes, words):
    with pytest.raises(InvalidValue, match=words):
        replace(TABLE, **changes)


# --- measuring
# ------------------------------------------------------------------------------------------------------


class Clock:
    """Time passes only in attention, by its number of heads, and in ``Rest``."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def __deepcopy__(self, memo):
        return self  # the time of copies is the time of all


class Rest(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, x):
        self.clock.now += 7.0
        return x


def timed(monkeypatch, seconds):
    """A clock on which an attention takes ``seconds(module, inputs)``."""
    clock, forward = Clock(), hp.MultiHeadAttention.forward

    def run(self, *args, **kwargs):
        clock.now += seconds(self, args[0])
        clock.calls.append(self.n_heads)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(hp.MultiHeadAttention, "forward", run)
    monkeypatch.setattr(latency_tables, "perf_counter", clock)
    return clock


@pytest.fixture(autouse=True)
def _short_bursts(monkeypatch):
    """Calls of tiny models would be timed twenty at a time."""
    monkeypatch.setattr(latency_tables, "_MAX_BURST", 2)


@pytest.fixture
def clock(monkeypatch):
    return timed(monkeypatch, lambda module, x: 0.5 + module.n_heads * len(x))


def noted_calls(model):
    """A list that is not empty for as long as the whole model runs."""
    whole = []
    model.register_forward_pre_hook(lambda *_: whole.append(True))
    model.register_forward_hook(lambda *_: whole.clear())
    return whole


def test_every_number_of_heads_is_measured_on_a_module_that_has_them(clock):
    shared = hp.MultiHeadAttention(8, 4)
    others = hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 2)
    model = nn.Sequential(shared, Rest(clock), *others, shared)
    before, batch = {k: v.clone() for k, v in model.state_dict().items()}, torch.randn(3, 5, 8)
    table = latency_table(model, batch, seconds=0)
    row = (0.5, 3.5, 6.5, 9.5, 12.5)
    assert table.row("2") == row
    assert table.row("3") == (0.5, 3.5, 6.5)
    assert table.row("0") == tuple(2 * s for s in row), "the module runs twice in a pass"
    assert table.whole == 7 + 3 * 12.5 + 6.5
    assert (table.batch_size, table.length, table.dtype, table.notes) == (3, 5, "float32", ())
    # The three of 4 heads share a measurement: 1 pass to record, 4 of the model, and for each cut
    # copy 1 to try it and 2 + 5 rounds. All four calls have one head in the model that is cut as
    # far as possible, which is not tried by itself.
    assert clock.calls.count(1) == 2 * (1 + 2 + 5) + 4 * (2 + 5)
    assert clock.calls.count(3) == 1 + 2 + 5
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_predicted_is_measured_where_time_adds_up(clock):
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


def test_a_table_of_a_deeper_model_is_refused(clock):
    """It has all sites of the model, with as many heads."""
    layers = [hp.MultiHeadAttention(8, 4) for _ in range(2)]
    batch = torch.randn(2, 5, 8)
    table = latency_table(nn.Sequential(*layers), batch, seconds=0)
    scores = hp.score(nn.Sequential(layers[0]), [batch], "magnitude", progress=False)
    message = "measured on a model of about 288 parameters, got 576.*Measure the model as it is now"
    with pytest.raises(InvalidValue, match=message):
        hp.select(scores, hp.Budget(speedup=1.5), "knapsack", latency=table)
    # Older tables have no number of parameters. Another output layer changes few of them.
    for known in (None, 287):
        older = replace(table, n_parameters=known, whole=100.0, sites=table.sites[:1])
        assert hp.select(scores, hp.Budget(speedup=1.001), "knapsack", latency=older)


def test_budgets_of_speed_for_groups_of_sites(clock):
    """The costs of a group are those of its sites, and say nothing of the model's size."""
    model = nn.Sequential(hp.MultiHeadAttention(8, 4), Rest(clock), hp.MultiHeadAttention(8, 4))
    batch = torch.randn(2, 5, 8)
    table = latency_table(model, batch, seconds=0)
    scores = hp.score(model, [batch], "magnitude", progress=False)
    assert scores.costs is not None
    plan = hp.select(scores, {"2": hp.Budget(speedup=1.3)}, "knapsack", latency=table)
    counts = {row.site: len(row.kept) for row in plan.mask.rows}
    assert counts == {"0": 4, "2": 3}


def test_what_sites_save_in_the_model_counts(monkeypatch):
    """Alone a head takes 2 s, in the model 3 s."""
    whole = []
    clock = timed(monkeypatch, lambda module, _: module.n_heads * (3.0 if whole else 2.0))
    attention = hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 4)
    model, batch = nn.Sequential(*attention, Rest(clock)), torch.randn(2, 5, 8)
    whole = noted_calls(model)
    table = latency_table(model, batch, seconds=0)
    assert table.whole == 7 + 2 * 4 * 3
    assert table.row("0") == pytest.approx((0, 3, 6, 9, 12))
    assert table.predict({"0": 1, "1": 2}) == pytest.approx(7 + 3 + 6)


def test_heads_and_neurons_share_what_they_save_together(monkeypatch):
    model, batch = layouts.registry.get("bert").tiny(0)
    sites = hp.find_sites(model, feed_forward=True)
    clock = latency_tables._Clock(torch.device("cpu"), 0.0, 1)
    # Seconds with the fewest heads, with the fewest neurons, and with both.
    seconds = iter([8.0, 6.0, 5.5, 8.0])
    monkeypatch.setattr(clock, "_rounds", lambda *_: np.array([[10.0, next(seconds)]] * 5))
    saved = clock.time_savings(model, bind(model, sites), batch)
    assert saved == pytest.approx({"head": 0.15, "neuron": 0.3}), "0.2 and 0.4, with 0.45"
    assert clock.time_savings(model, bind(model), batch) == pytest.approx({"head": 0.2})
    assert hp.find_sites(model, feed_forward=True) == sites, "the cuts are undone"


@pytest.mark.parametrize(
    ("saved", "factor"),
    [(0.3, 1.5), (0.11, 0.55), (0.41, 2.0), (0.09, 0.5), (0.0, 0.5)],
    ids=["more", "less", "too much", "too little", "nothing"],
)
def test_a_factor_is_at_most_a_likely_one(saved, factor):
    rows = [SiteLatency("a", (0.1, 0.2, 0.4)), SiteLatency("b", (0.0,))]
    assert _factor(rows, saved) == pytest.approx(factor)
    assert _factor(rows[1:], saved) == 1.0, "nothing to cut"


def test_a_model_that_cannot_be_copied_is_not_scaled(clock):
    class Single(Rest):
        def __deepcopy__(self, memo):
            raise TypeError("one of its kind")

    model = nn.Sequential(hp.MultiHeadAttention(8, 4), Single(clock))
    table = latency_table(model, torch.randn(3, 5, 8), seconds=0)
    assert table.row("0") == (0.5, 3.5, 6.5, 9.5, 12.5)
    assert len(hp.find_sites(model)[0].heads) == 4, "the cut is undone"


def test_what_no_cut_saves_goes_first():
    rows = [SiteLatency("a", (0.1, 0.2, 0.5)), SiteLatency("b", (0.3, 0.4, None, 0.5))]
    assert _fitted(rows, 1.0) == rows
    less = [row.seconds for row in _fitted(rows, 0.8)]  # 0.2 of the 0.4 that are always paid
    assert less[0] == pytest.approx((0.05, 0.15, 0.45))
    assert less[1][-1] == pytest.approx(0.35)
    least = [row.seconds for row in _fitted(rows, 0.3)]  # all of them, and half of the rest
    assert least[0] == pytest.approx((0, 0.05, 0.2))
    assert least[1][-1] == pytest.approx(0.1)


def test_a_layer_without_heads_is_measured():
    model = nn.Sequential(hp.MultiHeadAttention(8, 2), hp.MultiHeadAttention(8, 2))
    sites, batch = hp.find_sites(model), torch.randn(2, 3, 8)
    hp.prune_(model, hp.HeadMask.from_keep({"0": [], "1": [0]}, {"0": 2, "1": 2}), sites=sites)
    table = latency_table(model, batch, seconds=0)
    assert [len(row.seconds) for row in table.sites] == [1, 2]


@pytest.mark.parametrize(
    ("policy", "counts"),
    [("group", (0, 2, 4, 6, 8)), ("balanced", (0, 1, 2, 3, 4, 8)), ("free", tuple(range(9)))],
)
def test_counts_are_those_that_the_policy_can_leave(policy, counts):
    config = hf.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, head_dim=2,
    )  # fmt: skip
    model, ids = hf.LlamaForCausalLM(config).eval(), torch.randint(0, 17, (2, 6))
    sites = hp.find_sites(model, policy=policy)
    batch = {"input_ids": ids, "labels": ids}
    table = latency_table(model, batch, batch_size=3, length=4, sites=sites, seconds=0)
    assert (table.batch_size, table.length) == (3, 4)
    one, other = (table.row(s.name) for s in sites)
    assert tuple(n for n, seconds in enumerate(one) if seconds is not None) == counts
    assert one == other, "built alike, so measured once"
    table.check(sites)


def test_a_layer_that_must_keep_a_head_is_not_measured_without():
    model, batch = layouts.registry.get("diffusers").tiny(0, "diffusers-style")
    table = latency_table(model, batch, seconds=0)
    for site in hp.find_sites(model):
        measured = [seconds is not None for seconds in table.row(site.name)]
        assert measured == [False] + [True] * len(site.heads)


def test_a_batch_is_run_as_it_is_unless_a_size_is_given():
    """Also with a cache, which does not grow from call to call."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = hf.T5Config(vocab_size=17, decoder_start_token_id=0, pad_token_id=0, **sizes)
    model, ids = hf.T5ForConditionalGeneration(config).eval(), torch.randint(1, 17, (2, 6))
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    seen = set()
    lengths = set()

    def shapes(module, args, kwargs):
        padding = kwargs["encoder_attention_mask"]
        seen.add((*kwargs["input_ids"].shape, None if padding is None else int(padding.sum())))

    def cached(module, args, kwargs):
        lengths.add(kwargs["past_key_values"].get_seq_length())

    model.decoder.register_forward_pre_hook(shapes, with_kwargs=True)
    attention = model.decoder.block[0].layer[0].SelfAttention
    attention.register_forward_pre_hook(cached, with_kwargs=True)
    given = {"input_ids": ids, "attention_mask": mask}
    latency_table(model, {**given, "labels": ids[:, :4].contiguous()}, seconds=0)
    assert seen == {(2, 4, 9)}, "decoder inputs are made of the labels"
    seen.clear()
    decoder = {**given, "decoder_input_ids": ids[:, :4]}
    table = latency_table(model, decoder, batch_size=3, seconds=0)
    assert (table.batch_size, table.length) == (3, 6)
    assert seen == {(3, 4, 18)}
    assert lengths == {0}


def test_a_length_is_refused_where_nothing_has_one():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.ViTConfig(**sizes, intermediate_size=8, image_size=4, patch_size=2)
    model, batch = hf.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 4, 4)}
    with pytest.raises(InvalidValue, match=r"latency_table\(length=\): must be left out.*got 77"):
        latency_table(model, batch, length=77, seconds=0)
    assert latency_table(model, batch, batch_size=3, seconds=0).length == 5


def test_attention_that_comes_out_slower_than_the_model_is_scaled_to_it(monkeypatch):
    """Noise does that to models of little else; the table must still be one that `select` takes."""
    whole = []
    timed(monkeypatch, lambda *_: 1.0 if whole else 2.0)
    model, batch = nn.Sequential(hp.MultiHeadAttention(8, 2)), torch.randn(2, 5, 8)
    whole = noted_calls(model)
    table = latency_table(model, batch, seconds=0)
    assert table.whole == 1.0
    assert table.row("0")[-1] == pytest.approx(1.0)
    (note,) = table.notes
    assert "took 100 % longer than the model; times are scaled" in note
    table.check(hp.find_sites(model))
    assert _smoothed([None, 1.0, 3.0, 2.0, 4.0]) == [None, 1.0, 2.5, 2.5, 4.0], "what falls is mean"


def test_times_of_a_busy_machine_are_noted(monkeypatch):
    whole, took = [], iter([1.0, 3.0] * 1000)
    timed(monkeypatch, lambda *_: next(took) if whole else 0.5)
    model, batch = nn.Sequential(hp.MultiHeadAttention(8, 2)), torch.randn(2, 5, 8)
    whole = noted_calls(model)
    (note,) = latency_table(model, batch, seconds=0).notes
    assert re.search(
        r"busy: the middle half of the model.s times spans \d+% of the median. Measure again", note
    )


def test_a_copy_that_does_not_run_is_refused(monkeypatch):
    """Code that uses heads by number may run whole and not cut."""
    forward = hp.MultiHeadAttention.forward

    def with_a_head(self, x):
        return forward(self, x) + torch.zeros(2)[2 - self.n_heads]

    monkeypatch.setattr(hp.MultiHeadAttention, "forward", with_a_head)
    model, batch = nn.Sequential(hp.MultiHeadAttention(8, 2)), torch.randn(2, 3, 8)
    must = r"site 0: must be one that runs with 0 of its 2 heads, got index 2 .* without it"
    with pytest.raises(UnsupportedModel, match=must):
        latency_table(model, batch, seconds=0)


def test_what_cannot_be_measured_is_refused():
    model, batch = nn.Sequential(hp.MultiHeadAttention(8, 2)), torch.randn(2, 3, 8)
    with pytest.raises(InvalidValue, match=r"seconds=\): must be a number >= 0"):
        latency_table(model, batch, seconds=-1)
    with pytest.raises(InvalidValue, match=r"batch=\): must be a mapping, .*, got Tensor"):
        latency_table(model, batch, batch_size=4, seconds=0)
    model[0].idle = hp.MultiHeadAttention(8, 2)
    with pytest.raises(UnsupportedModel, match=r"0\.idle: must be run by the batch.*leave it out"):
        latency_table(model, batch, seconds=0)
