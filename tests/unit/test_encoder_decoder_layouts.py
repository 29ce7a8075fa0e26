"""Encoder-decoders: kinds of attention, T5's position bias, cross-attention's cache, and relatives
that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

import headprune as hp
from headprune.layouts import registry
from headprune.model.sites import reason_against
from tests.laws.support import family_subject

SIZES: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "max_position_embeddings": 64}
for _side in ("encoder", "decoder"):
    SIZES |= {f"{_side}_layers": 1, f"{_side}_attention_heads": 4, f"{_side}_ffn_dim": 24}
T5_SIZES: dict[str, Any] = {"vocab_size": 50, "num_layers": 1, "num_heads": 4}
T5_SIZES |= {"d_model": 16, "d_kv": 4, "d_ff": 24}


def built(name: str, **settings: Any) -> nn.Module:
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**settings))
    return model


def first(model: nn.Module, ending: str) -> nn.Module:
    return next(m for n, m in model.named_modules() if n.endswith(ending))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BartModel", {}),
        ("NllbMoeModel", {"num_experts": 2}),  # its decoder's attention says nothing of causality
    ],
)
def test_kinds_are_told_apart(name: str, settings: dict[str, Any]) -> None:
    sites = hp.find_sites(built(name, **SIZES, **settings))
    kinds = {(s.name.partition(".")[0], s.name.endswith("self_attn")): s.kind for s in sites}
    expected = {("encoder", True): "self", ("decoder", True): "causal", ("decoder", False): "cross"}
    assert kinds == expected


@pytest.mark.parametrize(
    ("name", "settings", "where", "words"),
    [
        ("LEDModel", {"attention_window": 4}, "decoder.layers.0.self_attn", "width from its input"),
        (
            "FSMTModel",
            {"langs": ["a", "b"], "src_vocab_size": 50, "tgt_vocab_size": 50},
            *("self_attn", "'cache_key'"),
        ),
        ("PegasusXModel", {"block_size": 4}, "encoder.layers.0.self_attn", "'block_size'"),
        ("AutoformerModel", {"prediction_length": 2}, "self_attn", "'autocorrelation_factor'"),
    ],
)
def test_relatives_of_bart_that_are_refused(
    name: str, settings: dict[str, Any], where: str, words: str
) -> None:
    module = first(built(name, **SIZES, **settings), where)
    assert words in str(reason_against(registry.get("bart"), module))


def test_relatives_of_t5_match_their_own_layout_or_none() -> None:
    longt5, umt5 = built("LongT5Model", **T5_SIZES), built("UMT5Model", **T5_SIZES)
    local, cross = first(longt5, "LocalSelfAttention"), first(longt5, "EncDecAttention")
    assert "'local_radius'" in str(reason_against(registry.get("t5"), local))
    assert reason_against(registry.get("t5"), cross) is None
    assert reason_against(registry.get("umt5"), cross) is not None
    for module in (first(umt5, "SelfAttention"), first(umt5, "EncDecAttention")):
        assert reason_against(registry.get("umt5"), module) is None
        assert reason_against(registry.get("t5"), module) is not None


@pytest.mark.parametrize("keep", [[2], []])
def test_the_first_layer_of_t5_makes_the_bias_of_all_heads_after_a_cut(keep: list[int]) -> None:
    t5 = family_subject("t5", "t5")
    attention: Any = t5.model.get_submodule(t5.sites[0].name)
    table = attention.relative_attention_bias.weight
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = attention(hidden)[1]
    hp.prune_(t5.model, t5.mask({t5.sites[0].name: keep}))
    assert attention.relative_attention_bias.weight is table
    output, bias, _ = attention(hidden)
    assert torch.equal(bias, expected)
    assert output.shape == hidden.shape
    assert attention(hidden, position_bias=bias)[0].equal(output)
    assert attention.n_heads == len(keep)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_cross_attention_without_heads_fills_its_part_of_the_cache_once(family: str) -> None:
    subject = family_subject(family, family)
    first_cross = next(s.name for s in subject.sites if s.kind == "cross")
    hp.prune_(subject.model, subject.mask({first_cross: []}))
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    encoded = subject.model.get_encoder()(subject.batch["input_ids"])  # type: ignore[operator, union-attr]
    given = {"encoder_outputs": encoded, "past_key_values": cache, "use_cache": True}
    for step in range(2):
        token = subject.batch["decoder_input_ids"][:, step : step + 1]
        subject.model(decoder_input_ids=token, **given)
        assert cache.get_seq_length() == step + 1
    shapes = [tuple(layer.keys.shape[1:]) for layer in cache.cross_attention_cache.layers]
    assert shapes == [(1, 7, 1), (4, 7, 4)]
    assert cache.is_updated == {0: True, 1: True}
