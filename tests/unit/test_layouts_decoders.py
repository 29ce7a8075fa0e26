"""What is particular to one decoder's layout; the laws of all of them are in tests/laws."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import CohereConfig, MoonshineConfig, MoonshineForConditionalGeneration
from transformers.models.cohere.modeling_cohere import CohereAttention

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.plan import PruningPlan
from headprune.layouts import registry
from headprune.model.costs import measure_costs
from headprune.model.double import Doubled
from headprune.model.sites import bind, reason_against
from tests.laws.support import CLOSE, Subject, family_subject


def run(model: nn.Module, batch: Any) -> torch.Tensor:
    with Doubled():
        out: torch.Tensor = model(**batch).logits
    return out


def assert_exact(subject: Subject, mask: hp.HeadMask, small: Any = None) -> Any:
    """The model, or one that was cut before, is cut to what the mask keeps."""
    small = small or subject.copy()
    hp.prune_(small, PruningPlan(mask, policy="free"))
    with hp.gated(subject.model, mask):
        assert_close(run(small, subject.batch), run(subject.model, subject.batch), **CLOSE)
    return small


def bytes_held(model: Any, batch: Any) -> int:
    """By the keys and values of a cache."""
    layers = model(**batch, use_cache=True).past_key_values.layers
    return sum(t.numel() * t.element_size() for x in layers for t in (x.keys, x.values))


def kv_bytes(model: nn.Module, batch: Any) -> int:
    """A token of one of the batch's 3 sequences of 7 tokens."""
    return measure_costs(model, bind(model), batch).total.kv_bytes


def test_towers_are_told_apart() -> None:
    subject = family_subject("llama", "llava")
    towers = {s.name.split(".")[1]: (s.layout, s.kind) for s in subject.sites}
    assert towers == {"vision_tower": ("bart", "self"), "language_model": ("llama", "causal")}
    text = [s for s in subject.sites if s.kind == "causal"]
    batch = {**subject.batch, "labels": subject.batch["input_ids"]}
    plan = hp.select(hp.score(subject.model, [batch], sites=text), hp.Budget(keep_heads=0.5))
    hp.prune_(subject.model, plan, subject.batch, sites=text)
    kept = {s.name: len(s.heads) for s in hp.find_sites(subject.model)}
    assert all(kept[s.name] == 4 for s in subject.sites if s.kind == "self")
    assert sum(kept[s.name] for s in text) <= 9


def test_linear_attention_is_no_site() -> None:
    subject = family_subject("qwen3_next", "qwen3_next")
    names = [s.name for s in subject.sites]
    assert names == ["model.layers.0.self_attn", "model.layers.2.self_attn"]
    assert hasattr(subject.model.model.layers[1], "linear_attn")
    small = assert_exact(subject, subject.mask({names[0]: [1, 2, 3]}))
    assert small.model.layers[0].self_attn.q_proj.weight.shape[0] == 3 * 2 * 8


def test_sinks_are_removed_with_their_heads() -> None:
    subject = family_subject("llama", "gpt_oss")
    sinks = subject.model.model.layers[0].self_attn.sinks
    small = assert_exact(subject, subject.mask({subject.sites[0].name: [0, 3, 4]}))
    assert_close(small.model.layers[0].self_attn.sinks, sinks[[0, 3, 4]])


def test_heads_are_taken_after_a_norm_over_all_of_them() -> None:
    subject = family_subject("olmo2", "olmo2")
    first, second, *_ = (s.name for s in subject.sites)
    small = assert_exact(subject, subject.mask({first: [1, 4, 5], second: [2, 3]}))
    attention = small.model.layers[0].self_attn
    names = ("q_proj", "q_norm", "k_proj", "k_norm", "v_proj")
    assert [attention.get_submodule(n).weight.shape[0] for n in names] == [24, 24, 12, 12, 8]
    assert attention.o_proj.in_features == 12
    assert_exact(subject, subject.mask({first: [5], second: [3]}), small)


def test_norms_of_one_head_are_not_taken_for_norms_of_all() -> None:
    attention = family_subject("llama", "qwen3").model.model.layers[0].self_attn
    config = CohereConfig(hidden_size=16, num_attention_heads=4, use_qk_norm=True)
    for module in (attention, CohereAttention(config, 0)):  # Cohere's are [heads, width]
        assert "over all heads together" in str(reason_against(registry.get("olmo2"), module))
    attention = family_subject("olmo2", "olmo2").model.model.layers[0].self_attn
    assert "not one head's width" in str(reason_against(registry.get("llama"), attention))


def test_a_layer_of_phi3_has_a_configuration_of_its_own() -> None:
    subject = family_subject("phi3", "phi3")
    name = subject.sites[1].name
    small = assert_exact(subject, subject.mask({name: [2, 3, 4]}))
    assert small.config.num_attention_heads == 6
    assert [layer.self_attn.config.num_attention_heads for layer in small.model.layers] == [6, 3, 6]
    cut = small.model.layers[1].self_attn
    for implementation in ("eager", "sdpa"):
        small.set_attn_implementation(implementation)
        assert cut.config._attn_implementation == implementation
    again = subject.mask({name: [2, 3]})
    hp.prune_(small, again, sites=hp.find_sites(small, policy="free"))
    assert not hasattr(cut.config.shared, "shared")
    twin = copy.deepcopy(small)
    assert twin.model.layers[1].self_attn.config.shared is twin.config


def test_a_latent_cache_does_not_shrink() -> None:
    subject = family_subject("deepseek_v3", "deepseek_v3")
    scores = hp.score(subject.model, [{**subject.batch, "labels": subject.batch["input_ids"]}])
    with pytest.raises(InvalidValue, match=r"Budget\.keep_kv: .*no KV cache that shrinks"):
        hp.select(scores, hp.Budget(keep_kv=0.5))
    assert {cost.kv_bytes for row in scores.costs.units for cost in row} == {0}
    small = assert_exact(subject, subject.ragged())
    for model in (small, subject.model):
        held = bytes_held(model, subject.batch)
        assert kv_bytes(model, subject.batch) * 3 * 7 == held == bytes_held(small, subject.batch)
    hp.prune_(small, subject.mask({subject.sites[0].name: []}) & subject.ragged())
    assert kv_bytes(small, subject.batch) * 2 == scores.costs.total.kv_bytes


@pytest.mark.parametrize("family", ["falcon", "falcon-mqa"])
def test_falcon_caches_what_its_costs_say(family: str) -> None:
    """The new architecture repeats keys before it caches them: one a query head."""
    subject = family_subject("falcon", family)
    for model in (subject.model, assert_exact(subject, subject.ragged(1))):
        held = bytes_held(model, subject.batch)
        assert kv_bytes(model, subject.batch) * 3 * 7 == held


def test_falcon_splits_groups_of_unlike_size() -> None:
    subject = family_subject("falcon", "falcon")
    keep = {subject.sites[0].name: [0, 2, 3], subject.sites[1].name: [0, 1, 2, 4]}
    small = assert_exact(subject, subject.mask(keep))
    assert small.transformer.h[0].self_attention.headprune_repeats == (1, 2)
    small.generate(input_ids=subject.batch["input_ids"][:1], max_new_tokens=3)


def test_uneven_groups_are_refused_where_one_module_attends_to_two_sequences() -> None:
    side = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    sides = {f"{name}_{key}": n for name in ("encoder", "decoder") for key, n in side.items()}
    config = MoonshineConfig(vocab_size=50, hidden_size=16, intermediate_size=24, **sides)
    model = MoonshineForConditionalGeneration(config)
    sites = hp.find_sites(model, policy="free")
    mask = hp.HeadMask.from_keep({sites[0].name: [0, 1, 2]}, {s.name: 4 for s in sites})
    with pytest.raises(UnsupportedModel, match="cut to groups of one size"):
        hp.prune_(model, mask, sites=sites)
    assert hp.find_sites(model, policy="free") == sites
