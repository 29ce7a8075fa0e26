"""Neurons in corners: whole sub-layers, nested tensors, padding, token order, NaN, large sites."""

import copy
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    EsmConfig,
    EsmForMaskedLM,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import headprune as hp
from headprune.attention.transformer import TransformerConfig, TransformerForTranslation
from headprune.checkpoints.any_cut import check_any_cut
from headprune.choice._meter import divergence
from headprune.choice.ladder import _check_finite
from headprune.core.errors import InvalidValue, UnsupportedModel, VerificationFailed
from headprune.core.ladders import SiteLadder
from headprune.model.running import call
from headprune.recovery._blocks import blocks_of
from headprune.run.auto import AutoOfRun, half_of_heads
from headprune.run.choosing import choose_heads
from headprune.run.recovering import biased
from headprune.scoring._distributions import Distributions
from tests.selection_problems import make, site
from tests.small_recipes import llama_with_neurons, quiet_run, quietly_prepared

WIDTH = 96


def bert():
    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": WIDTH, "num_labels": 3}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    return BertForSequenceClassification(BertConfig(**sizes, initializer_range=0.3)).eval()


def texts():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (6, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


# ---------------------------------------------------------------- feed-forwards alone


def test_an_own_layout_of_feed_forwards_that_fits_nothing_says_why():
    """Also where nothing but the layout says that feed-forwards are meant."""
    slabs = (hp.HeadSlab("fc1", "out", "head"), hp.HeadSlab("fc2", "in", "context"))
    layout = hp.AttentionLayout("own", gate="fc2", slabs=slabs, head_dim=1, kind="feed_forward")
    # A parameter that the layout does not name.
    model = nn.Sequential(Scaled())
    model[0].more = nn.Parameter(torch.rand(WIDTH))
    for settings in ({}, {"feed_forward": True}):
        with pytest.raises(UnsupportedModel, match=r"nearest layout 'own': its parameter 'more'"):
            hp.find_sites(model, layouts=[layout], **settings)


def test_feed_forwards_are_cut_and_saved_where_attention_fits_no_layout(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": WIDTH, "pad_token_id": 1}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "mask_token_id": 32}
    model = EsmForMaskedLM(EsmConfig(**sizes, position_embedding_type="rotary")).eval()
    batch = {"input_ids": torch.randint(4, 30, (4, 9))}
    with pytest.raises(UnsupportedModel, match="attention-like modules that fit no layout"):
        hp.find_sites(model)
    sites = hp.find_sites(model, feed_forward=True)
    assert [site.is_feed_forward for site in sites] == [True, True]
    check_any_cut(model, "transformers", "a format", neurons=True)
    scores = hp.score(model, [batch], "wanda", sites=sites, progress=False)
    plan = hp.select(scores, hp.Budget(keep_params=0.8))

    with hp.gated(model, plan), torch.no_grad():
        expected = model(**batch).logits
    hp.prune_(model, plan, example=batch)
    hp.save_pretrained(model, tmp_path / "small")
    small = hp.from_pretrained(tmp_path / "small")
    with torch.no_grad():
        cut = model(**batch).logits
        assert_close(cut, expected)
        assert torch.equal(small(**batch).logits, cut)
    # Names of another model are still refused by what this model lacks.
    other = hp.HeadMask.from_keep({"elsewhere": [0]}, {"elsewhere": 4})
    with pytest.raises(UnsupportedModel, match="attention-like modules that fit no layout"):
        hp.prune_(model, other)


class Centred(nn.Module):
    """A feed-forward that subtracts the mean of its neurons."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8), nn.GELU()

    def forward(self, x):
        x = self.act(self.fc1(x))
        return self.fc2(x - x.mean(-1, keepdim=True))


@pytest.mark.parametrize("format", ["transformers", "gguf"])
def test_a_format_without_the_biases_of_a_recovery_is_refused_before_the_run(format, tmp_path):
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": WIDTH, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    for neurons in (False, True):
        check_any_cut(model, format, "a format", neurons)
        both = ("attention", "feed_forward")
        with pytest.raises(UnsupportedModel, match=r"bias.*recover\.0\.settings\.intercept=false"):
            check_any_cut(copy.deepcopy(model), format, "a format", neurons, biased=both)
    # What a recipe's recoveries do.
    for feed_forward in (False, True):
        for settings, kinds in (({}, {"attention"}), ({"intercept": False}, set())):
            step = {"method": "lstsq", "settings": settings}
            select = {"keep_params": 0.9, "feed_forward": feed_forward}
            recipe = llama_with_neurons(tmp_path, select, [[1, 2]], recover=[step])
            neurons = {"feed_forward"} if feed_forward and kinds else set()
            assert biased(recipe) == kinds | neurons


def test_own_code_that_treats_neurons_together_is_named():
    model, x = nn.Sequential(hp.MultiHeadAttention(8, 2), Centred()).eval(), torch.randn(2, 3, 8)
    sites = hp.find_sites(model, feed_forward=True)
    mask = hp.HeadMask.from_keep(
        {"0": [0, 1], "1": range(8)}, {site.name: site.n_query_heads for site in sites}
    )
    with pytest.raises(
        VerificationFailed, match=r"several heads or neurons together: Centred\.forward"
    ):
        hp.prune_(model, mask, example=x, sites=sites)


class Scaled(nn.Module):
    """A feed-forward with a buffer of its width, which no layout cuts."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8), nn.GELU()
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)) * self.scale)


def test_code_that_fails_after_the_cut_is_refused_and_nothing_changes():
    model, x = nn.Sequential(hp.MultiHeadAttention(8, 2), Scaled()).eval(), torch.randn(2, 3, 8)
    sites = hp.find_sites(model, feed_forward=True)
    mask = hp.HeadMask.from_keep(
        {"0": [0, 1], "1": range(8)}, {site.name: site.n_query_heads for site in sites}
    )
    with torch.no_grad():
        before = model(x)
        with pytest.raises(VerificationFailed, match=r"must be able to run.* got RuntimeError"):
            hp.prune_(model, mask, example=x, sites=sites)
        assert torch.equal(model(x), before)


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        (
            FalconForCausalLM,
            {"num_hidden_layers": 2, "ffn_hidden_size": 40, "multi_query": False},
            {"ffn_hidden_size": 24},
        ),
        (
            BartForConditionalGeneration,
            {"encoder_ffn_dim": 40, "decoder_ffn_dim": 48, "max_position_embeddings": 32},
            {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
        ),
        (
            BartForConditionalGeneration,
            {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 32},
            {"encoder_ffn_dim": 32, "decoder_ffn_dim": 16},
        ),
    ],
)
def test_a_configuration_states_even_widths(kind, settings, names, tmp_path):
    """Falcon's name of the width; an encoder's and a decoder's, different before or after."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4}
    if kind is BartForConditionalGeneration:
        sides = ("encoder", "decoder")
        sizes = {"vocab_size": 50, "d_model": 16}
        sizes |= {f"{side}_layers": 1 for side in sides}
        sizes |= {f"{side}_attention_heads": 4 for side in sides}
    model = kind(kind.config_class(**sizes, **settings)).eval()
    sites = hp.find_sites(model, feed_forward=True)
    keep = {one.name: one.heads for one in sites}
    for one in sites:
        if one.is_feed_forward:
            # Of the one setting, or of the encoder's and the decoder's the one of this site.
            (count,) = {n for name, n in names.items() if len(names) == 1 or name[:7] in one.name}
            keep[one.name] = range(count)
    mask = hp.HeadMask.from_keep(keep, {one.name: one.n_query_heads for one in sites})
    batch = {"input_ids": torch.randint(3, 50, (2, 7))}
    hp.prune_(model, mask, example=batch)
    hp.save_pretrained(model, tmp_path / "small", format="transformers", example=batch)
    small = kind.from_pretrained(tmp_path / "small")
    assert {name: getattr(small.config, name) for name in names} == names
    with torch.no_grad():
        assert torch.equal(small(**batch).logits, model(**batch).logits)


# ---------------------------------------------------------------- whole sub-layers


def two_layers():
    """Scores with prices by which one layer is worth nothing."""
    sites = [site("a", 4), site("f", 8, kind="feed_forward")]
    sites += [site("b", 4), site("g", 8, kind="feed_forward")]
    ladders = []
    for one in sites:
        worth = 0.001 if one.name in "bg" else 1.0
        n = len(one.heads)
        ladders.append(
            SiteLadder(one.name, tuple(range(n + 1)), tuple(worth * (n - k) for k in range(n + 1)))
        )
    values = [[1.0] * len(one.heads) for one in sites]
    return replace(make(sites, values), ladders=tuple(ladders))


def test_one_budget_may_take_whole_sublayers():
    scores = two_layers()
    plan = hp.select(scores, hp.Budget(keep_params=0.5))
    assert plan.mask.kept("b") == plan.mask.kept("g") == ()
    assert plan.settings["min_heads"] == 0
    assert any(note == "Without a neuron: g." for note in plan.notes)
    one_each = hp.select(scores, hp.Budget(keep_params=0.5), hp.selection.Knapsack(min_heads=1))
    assert len(one_each.mask.kept("b")) == 1
    # Without prices, a sum of scores would decide.
    summed = hp.select(replace(scores, ladders=None), hp.Budget(keep_params=0.7))
    assert summed.settings["min_heads"] == 1


@pytest.mark.parametrize("selector", ["global_topk", "local_search", "uniform", "iterative"])
def test_without_reading_prices_every_layer_keeps_a_head(selector):
    given = {
        "local_search": {"loss": lambda masks: np.zeros((len(masks), 4))},
        "iterative": {"rescore": lambda mask: two_layers()},
    }
    budget = hp.Budget(keep_params=0.4)
    plan = hp.select(two_layers(), budget, selector, **given.get(selector, {}))
    assert plan.settings["min_heads"] == 1
    assert all(row.kept for row in plan.mask.rows)


@pytest.mark.parametrize(
    ("scorer", "budget", "selector", "is_named"),
    [
        ("taylor", hp.Budget(keep_params=0.5), "global_topk", True),
        ("magnitude", hp.Budget(keep_params=0.5), "knapsack", True),
        ("surgeon", hp.Budget(keep_params=0.5), "global_topk", False),
        ("taylor", hp.Budget(keep_params=0.5), "uniform", False),
        ("taylor", hp.Budget(keep_heads=0.5), "global_topk", False),
        ("taylor", {"feed_forward": hp.Budget(keep_params=0.5)}, "global_topk", False),
    ],
)
def test_scores_that_do_not_compare_heads_with_neurons_are_named(
    scorer, budget, selector, is_named
):
    scores = replace(two_layers(), ladders=None, scorer=scorer)
    notes = hp.select(scores, budget, selector).notes
    words = f"{scorer} does not compare heads with neurons"
    assert any(words in note for note in notes) is is_named


def test_gpus_that_no_number_of_heads_suits_empty_no_layer():
    with pytest.raises(InvalidValue, match="tensor_parallel=8, got 0 to 4 heads, and only 0 among"):
        hp.select(two_layers(), hp.Budget(keep_params=0.9, tensor_parallel=8))


def test_a_plan_without_any_head_is_not_taken():
    """Even where a loss prefers it."""
    sites = [site("a", 2), site("f", 2, kind="feed_forward")]
    ladders = tuple(SiteLadder(one.name, (0, 1, 2), (1.0, 0.1, 0.0)) for one in sites)
    scores = replace(make(sites, [[1.0, 1.0]] * 2), ladders=ladders)

    def loss(masks):
        kept = np.array([[len(row.kept) for row in mask.rows] for mask in masks])
        return kept.sum(1)[:, None] + np.arange(4) * 1e-3

    plan = hp.select(scores, hp.Budget(keep_params=0.7), "repriced", loss=loss)
    assert plan.mask.n_kept == 1


@pytest.mark.parametrize(("scorer", "candidate"), [("auto", "taylor"), ("auto", "ladder")])
def test_auto_cuts_a_plan_that_it_judged(scorer, candidate, tmp_path, monkeypatch):
    judged, selected = [], AutoOfRun.selected

    def noted(self, scores, groups):
        plan = selected(self, scores, groups)
        judged.append(plan.mask)
        return plan

    monkeypatch.setattr(AutoOfRun, "selected", noted)
    draw = random.Random(0)
    rows = [draw.choices(range(17), k=8) for _ in range(40)]
    wanted = llama_with_neurons(
        tmp_path,
        {"keep_macs": 0.35, "selector": "knapsack"},
        rows,
        score={"scorer": scorer, "settings": {"candidates": [candidate]}},
    )
    record = quiet_run(wanted)
    assert record.plan.scorer == candidate
    assert record.plan.mask in judged


def test_budgets_that_count_no_neurons_leave_a_head_in_every_layer():
    scores = two_layers()
    plan = hp.select(scores, hp.Budget(keep_heads=0.25))
    assert plan.settings["min_heads"] == 1
    assert [len(plan.mask.kept(name)) for name in "afbg"] == [1, 8, 1, 8]
    heads = replace(scores.without_neurons(), ladders=None)
    assert hp.select(heads, hp.Budget(keep_params=0.9)).settings["min_heads"] == 1
    by_kind = {"causal": hp.Budget(keep_heads=0.5), "feed_forward": hp.Budget(keep_params=0.5)}
    assert hp.select(scores, by_kind).settings["min_heads"] == 1


@pytest.mark.parametrize("selector", ["knapsack", "repriced", "local_search", "uniform"])
def test_all_neurons_are_kept_where_the_budget_counts_heads(selector):
    """Even where the measured loss falls without some."""

    def loss(masks):
        return np.array([[mask.n_kept] for mask in masks]) + np.arange(4) * 1e-3

    measures = selector in ("repriced", "local_search")
    plan = hp.select(
        two_layers(), hp.Budget(keep_heads=0.5), selector, loss=loss if measures else None
    )
    assert [len(plan.mask.kept(name)) for name in "fg"] == [8, 8]
    assert sum(len(plan.mask.kept(name)) for name in "ab") <= 4
    without_some = hp.select(two_layers(), hp.Budget(keep_heads=0.5), must_remove={"f": [0, 3]})
    assert [len(without_some.mask.kept(name)) for name in "fg"] == [6, 8]


@pytest.mark.parametrize("selector", ["global_topk", "knapsack", "uniform"])
def test_gpus_get_as_many_neurons_as_they_can_share_where_the_budget_counts_heads(selector):
    sites = [site("a", 4), site("f", 9, kind="feed_forward")]
    scores = make(sites, [[1.0, 2.0, 3.0, 4.0], [float(n) for n in range(9)]])
    plan = hp.select(scores, hp.Budget(keep_heads=0.5, tensor_parallel=2), selector)
    assert plan.mask.kept("a") == (2, 3)
    assert plan.mask.kept("f") == tuple(range(1, 9))


def test_uniform_keeps_all_neurons_where_the_budget_counts_heads():
    plan = hp.select(two_layers(), hp.Budget(keep_heads=0.5), "uniform")
    assert [len(plan.mask.kept(name)) for name in "afbg"] == [2, 8, 2, 8]
    both = hp.select(two_layers(), hp.Budget(keep_params=0.5), "uniform")
    assert [len(both.mask.kept(name)) for name in "afbg"] == [1, 3, 1, 3]


def test_prices_leave_no_close_calls_of_scores():
    scores = two_layers()
    priced = hp.select(scores, hp.Budget(keep_params=0.5), "knapsack")
    assert not any("Close call" in note for note in priced.notes)
    plain = hp.select(replace(scores, ladders=None), hp.Budget(keep_params=0.5), "knapsack")
    assert any("Close call" in note for note in plain.notes)


def test_a_plan_says_that_neurons_go_by_levels():
    scores = make([site("a", 2), site("f", 64, kind="feed_forward")], [[1.0] * 2, [1.0] * 64])
    plan = hp.select(scores, hp.Budget(keep_heads=1.0), must_remove={"f": [0]})
    assert len(plan.mask.kept("f")) < 63
    assert any(note.startswith("Neurons are kept or removed by level") for note in plan.notes)
    few = make([site("a", 2), site("f", 8, kind="feed_forward")], [[1.0] * 2, [1.0] * 8])
    single = hp.select(few, hp.Budget(keep_heads=1.0), must_remove={"f": [0]})
    assert single.mask.kept("f") == tuple(range(1, 8))
    assert not any(note.startswith("Neurons are kept or removed by level") for note in single.notes)


# ---------------------------------------------------------------- models


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kept", [12, 0])
def test_gates_of_neurons_fit_nested_tensors(kept):
    """PyTorch's encoder packs padded batches into nested tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = padding[2, 1:] = True
    sites = hp.find_sites(model, feed_forward=True)
    keep = {s.name: range(kept if s.is_feed_forward else 4) for s in sites}
    counts = {s.name: s.n_query_heads for s in sites}
    gates = {}
    for s in sites:
        gates[s.name] = torch.tensor([float(head in keep[s.name]) for head in s.heads])
    small = copy.deepcopy(model)
    hp.prune_(small, hp.HeadMask.from_keep(keep, counts), sites=sites)
    with torch.inference_mode():
        with hp.gated(model, gates, sites=sites):
            gated = model(x, src_key_padding_mask=padding)
        packed = small(x, src_key_padding_mask=padding)
    assert_close(gated[~padding], packed[~padding])
    # With gradients nothing is packed.
    unpacked = small(x, src_key_padding_mask=padding).detach()
    assert_close(packed[~padding], unpacked[~padding])


class _ClipBlock(nn.Module):
    """A residual block as in OpenAI's CLIP."""

    def __init__(self, batch_first):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, batch_first=batch_first)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(16, 24))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(24, 16))


def test_a_feed_forward_beside_attention_with_tokens_first_is_refused():
    assert len(hp.find_sites(nn.Sequential(_ClipBlock(True)), feed_forward=True)) == 2
    with pytest.raises(UnsupportedModel, match="has no batch_first=True"):
        hp.find_sites(nn.Sequential(_ClipBlock(False)), feed_forward=True)


def test_the_own_translation_model_has_feed_forwards():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 16, "ffn_dim": 32, "num_attention_heads": 4}
    config = TransformerConfig(**sizes, encoder_layers=1, decoder_layers=1)
    model = TransformerForTranslation(config).eval()
    batch = {**texts(), "labels": torch.randint(3, 50, (6, 5))}
    sites = hp.find_sites(model, feed_forward=True)
    assert [s.layout for s in sites if s.is_feed_forward] == ["feed_forward_transformer"] * 2
    scores = hp.score(model, [batch], "ladder", sites=sites, progress=False)
    report = hp.prune_(model, hp.select(scores, hp.Budget(keep_macs=0.5)), example=batch)
    assert report.proof is not None
    assert not hp.find_sites(nn.Sequential(nn.Linear(8, 8), hp.MultiHeadAttention(8, 2))).not_taken


def test_layers_of_an_encoder_stay_an_encoders_with_neurons():
    sizes = {"vocab_size": 50, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartForConditionalGeneration(BartConfig(**sizes, max_position_embeddings=32))
    kinds = []
    for neurons in (False, True):
        sites = hp.find_sites(model, feed_forward=neurons)
        kinds.append([(block.name, block.kind) for block in blocks_of(model, sites)])
    assert kinds[0] == kinds[1]
    assert dict(kinds[1])["model.encoder.layers.0"] == "self"


def test_padding_does_not_count_where_feed_forwards_are_scored_alone():
    """Without a mask in the batch, attention shows what it hides."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, batch):
            x, padding = batch
            out = self.encoder(x, src_key_padding_mask=padding)
            return out.masked_fill(padding[..., None], 0).sum(1)

    torch.manual_seed(0)
    model = Encoder().eval()
    x, padding = torch.randn(4, 6, 16), torch.zeros(4, 6, dtype=torch.bool)
    padding[::2, 4:] = True
    other = x.masked_fill(padding[..., None], 3.0)
    neurons = [s for s in hp.find_sites(model, feed_forward=True) if s.is_feed_forward]

    def values(x):
        scores = hp.score(
            model, [(x, padding)], "wanda", sites=neurons, loss=lambda m, b: m(b).sum(1)
        )
        return torch.tensor(scores.values)

    assert_close(values(x), values(other))


# ---------------------------------------------------------------- numbers


def test_a_level_that_overflows_has_no_price():
    logits = torch.tensor([[[1.0, 2.0]], [[0.0, 1.0]]])
    counted = torch.ones(2, 1, dtype=torch.bool)
    whole = Distributions("single_label_classification", logits, counted)
    changed = replace(whole, logits=torch.tensor([[[math.nan, 0.0]], [[0.0, 1.0]]]))
    rises = divergence(whole, changed, 1.0)
    assert rises[0].isnan()
    assert rises[1] == 0
    # Padded ends of answers are -inf in both.
    ends = replace(whole, logits=torch.tensor([[[1.0, -math.inf]], [[0.0, -math.inf]]]))
    assert divergence(ends, ends, 1.0).tolist() == [0.0, 0.0]
    with pytest.raises(InvalidValue, match=r"with 0 of 2 heads of a: must be finite, got nan"):
        _check_finite(site("a", 2), (0, 1, 2), (math.nan, 0.2, 0.0))


class WithUnused(nn.Module):
    """Attention that runs, and one that does not."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = hp.MultiHeadAttention(8, 2), hp.MultiHeadAttention(8, 2)

    def forward(self, x):
        return self.used(x)


def squares(model, batch):
    return model(batch).square().mean((1, 2))


def test_a_site_that_no_batch_reaches_has_no_price():
    ladder = hp.scoring.Ladder(order="magnitude")
    batches = [torch.randn(4, 5, 8)]
    words = r"unused: must be a module that runs .* sites="
    with pytest.raises(UnsupportedModel, match=words):
        hp.score(WithUnused(), batches, ladder, loss=squares, progress=False)
    with pytest.raises(UnsupportedModel, match=words):
        hp.scoring.refitted_loss_of(WithUnused(), batches, loss=squares)


@pytest.mark.parametrize(("rows", "are_few"), [(8, True), (40, False)])
def test_prices_count_their_rows_where_the_order_needs_none(rows, are_few):
    model = nn.Sequential(hp.MultiHeadAttention(8, 2))
    ladder = hp.scoring.Ladder(order="magnitude")
    batches = [torch.randn(rows, 5, 8)]
    scores = hp.score(model, batches, ladder, loss=squares, progress=False)
    assert scores.n_examples == rows
    assert any(f"few rows ({rows})" in note for note in scores.notes) is are_few


def test_new_scores_of_a_cut_are_moved_to_the_units_of_the_whole_model():
    model, batch = bert(), texts()
    sites = hp.find_sites(model, feed_forward=True)
    rescore = hp.scoring.rescorer(model, [batch], "wanda", sites=sites, progress=False)
    keep = {s.name: s.heads[1:3] if not s.is_feed_forward else s.heads[8:40] for s in sites}
    counts = {s.name: s.n_query_heads for s in sites}
    moved = rescore(hp.HeadMask.from_keep(keep, counts))
    small = copy.deepcopy(model)
    hp.prune_(small, hp.HeadMask.from_keep(keep, counts), sites=sites)
    present = hp.find_sites(small, feed_forward=True)
    expected = hp.score(small, [batch], "wanda", sites=present, progress=False)
    for s, row, own in zip(sites, moved.values, expected.values, strict=True):
        by_head = dict(zip(keep[s.name], own, strict=True))
        assert list(row) == [by_head.get(head, 0.0) for head in s.heads]


def test_head_rescale_of_neurons_is_least_squares():
    """A factor per neuron is a column scaled: the best diagonal before the projection."""
    model, batch = bert(), texts()
    teacher = copy.deepcopy(model)
    sites = hp.find_sites(model, feed_forward=True)
    last = [s for s in sites if s.is_feed_forward][-1]
    keep = {s.name: s.heads for s in sites} | {last.name: last.heads[:8]}
    counts = {s.name: s.n_query_heads for s in sites}
    hp.prune_(model, hp.HeadMask.from_keep(keep, counts), sites=sites)
    cut = copy.deepcopy(model)
    recovery = hp.recovery.HeadRescale(intercept="none", ridge=1e-9)
    hp.recover_(model, [batch], recovery, teacher, progress=False)
    seen = {}

    def read(name, x):
        seen.setdefault(name, []).append(x)

    for name, one in (("whole", teacher), ("cut", cut)):
        down = one.get_submodule(last.name).output.dense
        with down.register_forward_hook(lambda m, args, out, n=name: read(n, (args[0], out))):
            call(one, batch)
    counted = batch["attention_mask"].bool()
    context, _ = seen["cut"][0]
    target = seen["whole"][0][1] - cut.get_submodule(last.name).output.dense.bias
    weight = cut.get_submodule(last.name).output.dense.weight.detach()  # [out, in]
    x = context[counted].detach().double()  # [tokens, 8]
    parts = (x[:, None, :] * weight.double()).flatten(0, 1)  # [tokens * out, 8]
    factors = torch.linalg.lstsq(
        parts, target[counted].detach().double().flatten()[:, None]
    ).solution
    found = model.get_submodule(last.name).output.dense.weight.detach().double()
    assert_close(found, weight.double() * factors.T, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- runs


def run_of(folder, select):
    rows = ([token % 17 for token in range(n, n + 8)] for n in range(40))
    score = {"scorer": "fisher", "random_draws": 1}
    chosen = {"keep_params": 0.8, **select}
    return quietly_prepared(llama_with_neurons(folder, chosen, rows, score=score))


def test_a_curvature_too_large_to_keep_is_refused_before_scoring(tmp_path, monkeypatch):
    from headprune.core import samples

    assert run_of(tmp_path, {"selector": "quadratic"}) is not None
    monkeypatch.setattr(samples, "LIMIT", 8 * 50**2)
    with pytest.raises(InvalidValue, match=r"select\.selector: must be .*, for so many units"):
        run_of(tmp_path, {"selector": "quadratic"})


def test_estimates_cut_half_of_the_neurons_too(tmp_path):
    subject = run_of(tmp_path, {})
    kept = [len(row.kept) for row in half_of_heads(subject).rows]
    assert kept == [2, 24, 2, 24]


def test_estimates_keep_the_neurons_of_models_whose_attention_fits_no_layout(tmp_path):
    rows = ([token % 17 for token in range(n, n + 8)] for n in range(40))
    wanted = llama_with_neurons(tmp_path, {"keep_params": 0.8}, rows)
    model = wanted.model.model_copy(update={"class_name": "PersimmonForCausalLM"})
    subject = quietly_prepared(wanted.model_copy(update={"model": model}))
    assert [len(row.kept) for row in half_of_heads(subject).rows] == [24, 24]


def test_a_search_around_a_knapsack_may_take_whole_sublayers_too():
    budget = hp.Budget(keep_params=0.5)
    selector = hp.selection.LocalSearch(inner="knapsack")
    plan = hp.select(two_layers(), budget, selector, loss=lambda masks: np.zeros((len(masks), 4)))
    assert plan.settings["min_heads"] == 0
    assert plan.mask == hp.select(two_layers(), budget, "knapsack").mask


def test_multiples_of_heads_are_no_multiples_of_neurons():
    selector = hp.selection.Knapsack(multiple_of=7)
    kept = hp.select(two_layers(), hp.Budget(keep_params=0.9), selector).mask
    # Of 24 units, 21: all heads or none of a layer, and any number of neurons.
    assert [len(row.kept) for row in kept.rows] == [4, 8, 4, 5]


def test_magnitude_does_not_depend_on_how_a_gate_is_packed():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 20}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    torch.manual_seed(0)
    apart = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    fused = Phi3ForCausalLM(Phi3Config(**sizes)).eval()
    mlp = apart.model.layers[0].mlp
    with torch.no_grad():
        packed = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        fused.model.layers[0].mlp.gate_up_proj.weight.copy_(packed)
        fused.model.layers[0].mlp.down_proj.weight.copy_(mlp.down_proj.weight)
    rows = []
    for model in (apart, fused):
        sites = hp.find_sites(model, feed_forward=True)
        scores = hp.score(model, None, "magnitude", sites=sites)
        rows.append(scores.values[-1])
    assert rows[0] == pytest.approx(rows[1])


def test_fisher_of_neurons_is_the_mean_square_of_their_slopes():
    model, batch = bert(), {**texts(), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    sites = hp.find_sites(model, feed_forward=True)
    neurons = [s for s in sites if s.is_feed_forward]
    gates = {s.name: torch.ones(6, WIDTH, requires_grad=True) for s in neurons}
    with hp.gated(model, gates):
        logits = call(model, {**batch, "labels": None}).logits
        losses = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
    slopes = torch.autograd.grad(losses.sum(), list(gates.values()))
    squares = [slope.square() for slope in slopes]  # [examples, neurons]
    fisher = hp.score(model, [batch], "fisher", sites=sites, progress=False)
    taylor = hp.score(model, [batch], "taylor", sites=sites, progress=False)
    places = [number for number, s in enumerate(sites) if s.is_feed_forward]
    for place, slope, square in zip(places, slopes, squares, strict=True):
        # Half the second-order rise of the loss, where a neuron is removed.
        ratio = torch.tensor(fisher.values[place]) / square.mean(0)
        assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-3, atol=0)
        errors = slope.abs().std(0) / 6**0.5
        assert_close(torch.tensor(taylor.standard_errors[place]), errors, rtol=1e-3, atol=1e-7)
        errors = square.std(0) / 6**0.5 * ratio[0]
        assert_close(torch.tensor(fisher.standard_errors[place]), errors, rtol=1e-3, atol=1e-9)


def test_baselines_keep_a_head_per_layer_where_the_budget_allows():
    sites = [site("a", 4), site("f", 8, kind="feed_forward")]
    sites += [site("b", 4), site("g", 8, kind="feed_forward")]
    # By these sums, all heads go first.
    scores = make(sites, [[0.1] * 4, [1.0] * 8, [0.1] * 4, [1.0] * 8])

    def kept(amount, **settings):
        recipe = SimpleNamespace(
            score=SimpleNamespace(scorer="ladder"),
            select=SimpleNamespace(
                selector="repriced",
                settings=settings,
                budgets=None,
                budget=hp.Budget(keep_params=amount),
                must_keep=None,
                must_remove=None,
            ),
        )
        run = SimpleNamespace(recipe=recipe, latency=None)
        mask = choose_heads(run, scores, baseline=True).mask
        return [len(mask.kept(name)) for name in "abfg"]

    assert min(kept(0.6)) == 1
    assert sum(kept(0.6, min_heads=0)[:2]) == 0
    # Too little for a head and a neuron everywhere.
    assert 0 in kept(0.3)


def test_an_empty_feed_forward_of_conv1d_travels_with_its_model(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    sites = hp.find_sites(model, feed_forward=True)
    keep = {site.name: list(site.heads) for site in sites}
    keep[next(site.name for site in sites if site.is_feed_forward)] = []
    counts = {site.name: site.n_query_heads for site in sites}
    hp.prune_(model, hp.HeadMask.from_keep(keep, counts), sites=sites)
    hp.save_pretrained(model, tmp_path, sites, format="remote-code")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    ids = torch.arange(10)[None]
    assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
