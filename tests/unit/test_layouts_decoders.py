"""What is particular to one decoder's layout; the laws of all of them are in tests/laws."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    GPTNeoXJapaneseConfig,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
)
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import (
    GPTNeoXJapaneseAttention,
)

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.plan import PruningPlan
from headprune.layouts import registry
from headprune.model.costs import measure_costs
from headprune.model.double import Doubled
from headprune.model.sites import bind, reason_against
from tests.laws.support import CLOSE, Subject, family_subject

DECODERS = [
    (layout, family)
    for layout in (
        [
            "bloom",
            "cohere",
            "deepseek_v3",
            "falcon",
            "gpt2",
            "gpt_neox",
            "llama",
            "olmo2",
            "phi",
            "phi3",
            "qwen3_next",
        ]
    )
    for family, _ in registry.get(layout).families
] + [("bart", "opt"), ("bart", "gptj"), ("bart", "gpt_neo")]


def run(model: nn.Module, batch: Any) -> torch.Tensor:
    with Doubled():
        out: torch.Tensor = model(**batch).logits
    return out


def assert_exact(subject: Subject, mask: hp.HeadMask) -> nn.Module:
    small = subject.copy()
    hp.prune_(small, PruningPlan(mask, policy="free"))
    with hp.gated(subject.model, mask):
        assert_close(run(small, subject.batch), run(subject.model, subject.batch), **CLOSE)
    return small


@pytest.mark.parametrize(("layout", "family"), DECODERS)
def test_one_layout_fits_a_module_also_when_it_is_cut_and_empty(layout: str, family: str) -> None:
    subject = family_subject(layout, family)
    emptied = subject.mask({subject.sites[-1].name: []})
    for mask in (None, subject.ragged(), emptied):
        model = subject.copy()
        if mask is not None:
            hp.prune_(model, mask)
        for b in bind(model):
            fitting = [
                n for n in registry.names() if reason_against(registry.get(n), b.module) is None
            ]
            assert fitting == [b.site.layout], b.site.name


def test_towers_are_told_apart() -> None:
    subject = family_subject("llama", "llava")
    towers = {s.name.split(".")[1]: (s.layout, s.kind) for s in subject.sites}
    assert towers == {"vision_tower": ("bart", "self"), "language_model": ("llama", "causal")}
    text = [s for s in subject.sites if s.kind == "causal"]
    scores = hp.score(subject.model, None, "magnitude", sites=hp.find_sites(subject.model))
    assert {u.name for u in scores.units()} == {s.name for s in subject.sites}
    batch = {**subject.batch, "labels": subject.batch["input_ids"]}
    plan = hp.select(hp.score(subject.model, [batch], sites=text), hp.Budget(keep_heads=0.5))
    hp.prune_(subject.model, plan, subject.batch, sites=text)
    left = {s.name: len(s.heads) for s in hp.find_sites(subject.model)}
    assert all(left[s.name] == 4 for s in subject.sites if s.kind == "self")
    assert sum(left[s.name] for s in text) <= 9


def test_linear_attention_is_no_site() -> None:
    subject = family_subject("qwen3_next", "qwen3_next")
    assert [s.name for s in subject.sites] == [
        "model.layers.0.self_attn",
        "model.layers.2.self_attn",
    ]
    assert hasattr(subject.model.model.layers[1], "linear_attn")
    small = assert_exact(subject, subject.mask({subject.sites[0].name: [1, 2, 3]}))
    assert small.model.layers[0].self_attn.q_proj.weight.shape[0] == 3 * 2 * 8


def test_sinks_leave_with_their_heads() -> None:
    subject = family_subject("llama", "gpt_oss")
    sinks = subject.model.model.layers[0].self_attn.sinks
    small = assert_exact(subject, subject.mask({subject.sites[0].name: [0, 3, 4]}))
    assert_close(small.model.layers[0].self_attn.sinks, sinks[[0, 3, 4]])


@pytest.mark.parametrize("family", ["olmo2", "olmoe"])
def test_heads_are_taken_after_a_norm_over_all_of_them(family: str) -> None:
    subject = family_subject("olmo2", family)
    small = assert_exact(
        subject, subject.mask({subject.sites[0].name: [1, 4, 5], subject.sites[1].name: [2, 3]})
    )
    attention = small.model.layers[0].self_attn
    widths = [
        getattr(attention, n).weight.shape[0]
        for n in ("q_proj", "q_norm", "k_proj", "k_norm", "v_proj")
    ]
    assert widths == [24, 24, 12, 12, 8]
    assert attention.o_proj.in_features == 12
    again = subject.mask({subject.sites[0].name: [5], subject.sites[1].name: [3]})
    hp.prune_(small, PruningPlan(again, policy="free"))
    with hp.gated(subject.model, again):
        assert_close(run(small, subject.batch), run(subject.model, subject.batch), **CLOSE)


def test_norms_of_one_head_are_not_taken_for_norms_of_all() -> None:
    attention = family_subject("llama", "qwen3").model.model.layers[0].self_attn
    assert "over all heads together" in str(reason_against(registry.get("olmo2"), attention))
    cohere = CohereAttention(
        CohereConfig(hidden_size=16, num_attention_heads=4, use_qk_norm=True), 0
    )  # [heads, width]
    assert "over all heads together" in str(reason_against(registry.get("olmo2"), cohere))
    attention = family_subject("olmo2", "olmo2").model.model.layers[0].self_attn
    assert "not one head's width" in str(reason_against(registry.get("llama"), attention))


def test_a_layer_of_phi3_has_a_configuration_of_its_own() -> None:
    subject = family_subject("phi3", "phi3")
    small = assert_exact(subject, subject.mask({subject.sites[1].name: [2, 3, 4]}))
    assert small.config.num_attention_heads == 6
    assert [layer.self_attn.config.num_attention_heads for layer in small.model.layers] == [6, 3, 6]
    for implementation in ("eager", "sdpa"):
        small.set_attn_implementation(implementation)
        assert small.model.layers[1].self_attn.config._attn_implementation == implementation
    hp.prune_(
        small,
        subject.mask({subject.sites[1].name: [2, 3]}),
        sites=hp.find_sites(small, policy="free"),
    )
    assert not hasattr(small.model.layers[1].self_attn.config.shared, "shared")
    twin = copy.deepcopy(small)
    assert twin.model.layers[1].self_attn.config.shared is twin.config


def test_a_latent_cache_does_not_shrink() -> None:
    subject = family_subject("deepseek_v3", "deepseek_v3")
    scores = hp.score(subject.model, [{**subject.batch, "labels": subject.batch["input_ids"]}])
    with pytest.raises(
        InvalidValue, match=r"Budget\.keep_kv: .*no KV cache that shrinks with its heads"
    ):
        hp.select(scores, hp.Budget(keep_kv=0.5))
    assert {cost.kv_bytes for row in scores.costs.units for cost in row} == {0}

    def held(model: nn.Module) -> int:
        cache = model(**subject.batch, use_cache=True).past_key_values
        return sum(
            t.numel() * t.element_size()
            for layer in cache.layers
            for t in (layer.keys, layer.values)
        )

    small = assert_exact(subject, subject.ragged())
    assert held(small) == held(subject.model)
    for model in (small, subject.model):
        assert (
            measure_costs(model, bind(model), subject.batch).total.kv_bytes * 3 * 7
            == held(model)
            > 0
        )
    hp.prune_(small, subject.mask({subject.sites[0].name: []}) & subject.ragged())
    assert (
        measure_costs(small, bind(small), subject.batch).total.kv_bytes * 2
        == scores.costs.total.kv_bytes
    )


@pytest.mark.parametrize("family", ["falcon", "falcon-mqa", "falcon-alibi"])
def test_falcon_caches_what_its_costs_say(family: str) -> None:
    """The new architecture repeats keys before it caches them: one a query head."""
    subject = family_subject("falcon", family)
    for model in (subject.model, assert_exact(subject, subject.ragged(1))):
        cache = model(**subject.batch, use_cache=True).past_key_values
        held = sum(
            t.numel() * t.element_size()
            for layer in cache.layers
            for t in (layer.keys, layer.values)
        )
        assert measure_costs(model, bind(model), subject.batch).total.kv_bytes * 3 * 7 == held


def test_falcon_splits_groups_of_unlike_size() -> None:
    subject = family_subject("falcon", "falcon")
    keep = {subject.sites[0].name: [0, 2, 3], subject.sites[1].name: [0, 1, 2, 4]}
    small = assert_exact(subject, subject.mask(keep))
    assert small.transformer.h[0].self_attention.headprune_repeats == (1, 2)
    small.generate(input_ids=subject.batch["input_ids"][:1], max_new_tokens=3)


def test_bloom_that_passes_by_its_output_projection_is_refused() -> None:
    model = BloomForCausalLM(
        BloomConfig(hidden_size=16, n_layer=1, n_head=4, pretraining_tp=2, slow_but_exact=True)
    )
    with pytest.raises(UnsupportedModel, match="slow_but_exact"):
        hp.find_sites(model)


def test_gpt_neox_japanese_is_refused() -> None:
    config = GPTNeoXJapaneseConfig(hidden_size=16, num_attention_heads=4)
    attention = GPTNeoXJapaneseAttention(config, layer_idx=0)
    assert reason_against(registry.get("gpt_neox"), attention) == "it has 'norm_factor'"


def test_uneven_groups_are_refused_where_one_module_attends_to_two_sequences() -> None:
    config = MoonshineConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        encoder_num_key_value_heads=2,
        decoder_num_key_value_heads=2,
    )
    model = MoonshineForConditionalGeneration(config)
    sites = hp.find_sites(model, policy="free")
    mask = hp.HeadMask.from_keep({sites[0].name: [0, 1, 2]}, {s.name: 4 for s in sites})
    with pytest.raises(UnsupportedModel, match="cut to groups of one size"):
        hp.prune_(model, mask, sites=sites)
    assert hp.find_sites(model, policy="free") == sites
