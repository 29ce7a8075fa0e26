"""x-transformers: interleaved groups, options of a head, and what passes between heads and is
refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from tests.laws.support import CLOSE, picture, ragged, shaken

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    x_transformers = pytest.importorskip("x_transformers")

SIZES: dict[str, Any] = {"dim": 16, "depth": 2, "ff_mult": 1}
SIZES |= {"heads": 6, "attn_kv_heads": 3, "attn_dim_head": 4}
ROTARY: dict[str, Any] = {"rotary_pos_emb": True, "rotary_emb_dim": 4}
EXACT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "qk_norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "qk_rmsnorm": {"attn_qk_rmsnorm": True},
    "value heads gated": {"attn_gate_value_heads": True},
    "head_scale": {"attn_head_scale": True},
    "memory": {"attn_num_mem_kv": 2},
    "sinks": {"attn_head_learned_sink": True},
    "wider values": {"attn_value_dim_head": 5},
    "one key/value head a query head": {"attn_kv_heads": None},
    "rotary": ROTARY,
    "sparse": {"attn_sparse_topk": 3},
}
REFUSED: dict[str, dict[str, Any]] = {
    "talking heads": {"attn_pre_talking_heads": True, "attn_kv_heads": None},
    "gated values": {"attn_gate_values": True},
    "attention on attention": {"attn_on_attn": True},
    "latent": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 8},
    "selective": {"attn_selective": True},
    "some heads rotated": {**ROTARY, "rotate_num_heads": 3, "attn_kv_heads": None},
}
REFUSED_BY_A_CUT: dict[str, dict[str, Any]] = {
    "alibi": {"alibi_pos_bias": True},
    "relative positions": {"rel_pos_bias": True},
    "value residual": {"add_value_residual": True},
    "residual attention": {"residual_attn": True},
}


def built(options: dict[str, Any], kind: str = "Decoder") -> nn.Module:
    options = {k: v for k, v in {**SIZES, **options}.items() if v is not None}
    return shaken(getattr(x_transformers, kind)(**options), norms=False).double().eval()


@pytest.mark.parametrize("options", EXACT_OPTIONS.values(), ids=EXACT_OPTIONS)
def test_gated_is_pruned(options: dict[str, Any]) -> None:
    model = built(options)
    small, sites, x = copy.deepcopy(model), hp.find_sites(model), torch.randn(2, 7, 16).double()
    assert [s.kind for s in sites] == ["causal"] * 2
    mask = ragged(sites)
    with hp.gated(model, mask):
        expected = model(x)
    hp.prune_(small, mask)
    assert_close(small(x), expected, **CLOSE)
    assert (model(x) - expected).abs().max() > 1e-6


def test_padding() -> None:
    model, x = built({}, "Encoder"), torch.randn(2, 7, 16).double()
    small, sites = copy.deepcopy(model), hp.find_sites(model)
    mask = torch.arange(7) < torch.tensor([[7], [3]])
    assert [s.kind for s in sites] == ["self"] * 2
    with hp.gated(model, ragged(sites)):
        expected = model(x, mask=mask)
    hp.prune_(small, ragged(sites))
    assert_close(small(x, mask=mask), expected, **CLOSE)


def test_every_third_head_shares() -> None:
    site = hp.find_sites(built({}))[0]
    assert site.units == ((0, 3), (1, 4), (2, 5))


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_what_spans_heads_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        hp.find_sites(built(options))


@pytest.mark.parametrize("options", REFUSED_BY_A_CUT.values(), ids=REFUSED_BY_A_CUT)
def test_what_passes_between_layers_is_refused_by_a_cut(options: dict[str, Any]) -> None:
    model = built(options, "Encoder" if "rel_pos_bias" in options else "Decoder")
    mask, before = ragged(hp.find_sites(model)), picture(model)
    with pytest.raises(UnsupportedModel, match="share nothing between heads"):
        hp.prune_(model, mask)
    assert picture(model) == before


def test_generation_with_a_cache() -> None:
    torch.manual_seed(0)
    network = x_transformers.TransformerWrapper(
        num_tokens=20, max_seq_len=16, attn_layers=built({})
    )
    model = x_transformers.AutoregressiveWrapper(network).double().eval()
    mask, small = ragged(hp.find_sites(model)), copy.deepcopy(model)
    prompt = torch.randint(0, 20, (2, 4))
    hp.prune_(small, mask)
    with hp.gated(model, mask):
        expected = model.generate(prompt, 8, temperature=0.0, cache_kv=True)
    assert torch.equal(small.generate(prompt, 8, temperature=0.0, cache_kv=True), expected)
    assert torch.equal(small.generate(prompt, 8, temperature=0.0, cache_kv=False), expected)
