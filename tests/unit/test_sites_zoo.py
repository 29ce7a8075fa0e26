"""Transformers architectures that are not under law: exact when cut, or refused in words; never
silently wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.model.sites import reason_against
from tests.laws.support import ragged, shaken

#: One model for every spelling that the configurations have.
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "embedding_size": 32,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 1,
}
#: The rotary tables and norms of these compute in float32, whatever the model's dtype, and round
#: 1e-16 up to 1e-7.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}

SPEECH = {
    "conv_dim": (8, 8),
    "conv_kernel": (10, 4),
    "conv_stride": (10, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}

EXACT = [
    # model class, layout, kinds, kernels, further settings
    ("RobertaForMaskedLM", "bert", {"self"}, "eager sdpa", {}),
    ("ElectraForMaskedLM", "bert", {"self"}, "eager sdpa", {}),
    ("CamembertModel", "bert", {"self"}, "sdpa", {}),
    ("MegatronBertModel", "bert", {"self"}, "sdpa", {}),
    ("XLMRobertaXLModel", "bert", {"self"}, "sdpa", {}),
    ("RemBertModel", "bert", {"self"}, "sdpa", {}),
    ("RoFormerModel", "bert", {"self"}, "eager", {}),
    ("SEWDModel", "deberta_v2", {"self"}, "eager", SPEECH),
    ("UniSpeechSatModel", "bart", {"self"}, "sdpa", SPEECH),
    ("NomicBertModel", "vit", {"self"}, "sdpa", {}),
    ("PixtralVisionModel", "vit", {"self"}, "sdpa", {}),
    ("Aimv2VisionModel", "bart", {"self"}, "sdpa", {}),
    ("MaskFormerSwinModel", "swin_v2", {"self"}, "eager", {"depths": [1, 1, 1, 1]}),
    ("BertGenerationDecoder", "bert", {"causal"}, "sdpa", {"is_decoder": True}),
    (
        "BertLMHeadModel",
        "bert",
        {"causal", "cross"},
        "eager sdpa",
        {"is_decoder": True, "add_cross_attention": True},
    ),
    (
        "RobertaForCausalLM",
        "bert",
        {"causal", "cross"},
        "sdpa",
        {"is_decoder": True, "add_cross_attention": True},
    ),
    ("MistralForCausalLM", "llama", {"causal"}, "eager sdpa", {"sliding_window": 4}),
    ("Qwen2ForCausalLM", "llama", {"causal"}, "eager sdpa", {}),
    ("Qwen3ForCausalLM", "llama", {"causal"}, "eager sdpa", {"attention_bias": True}),
    ("Gemma2ForCausalLM", "llama", {"causal"}, "eager", {"attn_logit_softcapping": 2.0}),
    ("Gemma3ForCausalLM", "llama", {"causal"}, "sdpa", {}),
    ("GraniteForCausalLM", "llama", {"causal"}, "sdpa", {"attention_multiplier": 0.4}),
    ("CohereForCausalLM", "llama", {"causal"}, "sdpa", {}),
    ("CohereForCausalLM", "cohere", {"causal"}, "eager sdpa", {"use_qk_norm": True}),
    ("Cohere2ForCausalLM", "llama", {"causal"}, "sdpa", {}),
    ("OlmoForCausalLM", "llama", {"causal"}, "sdpa", {"clip_qkv": 0.5}),
    ("SmolLM3ForCausalLM", "llama", {"causal"}, "sdpa", {}),
    (
        "GptOssForCausalLM",
        "llama",
        {"causal"},
        "eager",
        {"num_local_experts": 2, "experts_implementation": "eager"},
    ),
    ("Olmo2ForCausalLM", "olmo2", {"causal"}, "eager sdpa", {}),
    ("Olmo3ForCausalLM", "olmo2", {"causal"}, "eager sdpa", {}),
    ("PhiForCausalLM", "phi", {"causal"}, "eager sdpa", {}),
    ("Starcoder2ForCausalLM", "llama", {"causal"}, "sdpa", {}),
    ("StableLmForCausalLM", "llama", {"causal"}, "sdpa", {}),
    ("NemotronForCausalLM", "llama", {"causal"}, "sdpa", {}),
    ("EuroBertModel", "llama", {"self"}, "sdpa", {}),
    ("DeiTForImageClassification", "vit", {"self"}, "eager sdpa", {}),
    ("Dinov2Model", "vit", {"self"}, "eager sdpa", {}),
    ("ViTMSNModel", "vit", {"self"}, "sdpa", {}),
    ("ImageGPTModel", "gpt2", {"causal"}, "eager sdpa", {}),
]

REFUSED = [
    # model class, words of the refusal, further settings
    ("BitNetForCausalLM", "its parameter 'attn_sub_norm.weight' is not accounted for", {}),
    ("DiffLlamaForCausalLM", "its parameter 'lambda_q1' is not accounted for", {}),
    (
        "StableLmForCausalLM",
        "its parameter 'q_layernorm.norms.0.weight' is not",
        {"qk_layernorm": True},
    ),
    ("GPTBigCodeForCausalLM", "it has 'kv_dim'", {"multi_query": False}),
    ("EsmModel", "its parameter 'LayerNorm.weight' is not accounted for", {}),
    (
        "Gemma4ForCausalLM",
        "it has 'store_full_length_kv'",
        {
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": 50,
        },
    ),
]


def build(name: str, settings: dict[str, Any]) -> nn.Module:
    kind = getattr(transformers, name)
    known = kind.config_class().to_dict()
    sizes = {k: v for k, v in SIZES.items() if k in known}
    if "n_embd" in known:
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    sizes |= {"num_experts_per_tok": 1} if "num_experts_per_tok" in known else {}
    if isinstance(known.get("layer_types"), list):
        sizes["layer_types"] = known["layer_types"][:2]
    return shaken(kind(kind.config_class(**{**sizes, **settings}))).double().eval()


def batch_for(model: nn.Module) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {
            "pixel_values": torch.randn(2, model.config.num_channels, 16, 16, dtype=torch.float64)
        }
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 400, dtype=torch.float64)}
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    batch = {"input_ids": torch.randint(3, 50, (2, 7)) * mask, "attention_mask": mask}
    if getattr(model.config, "add_cross_attention", False):
        batch["encoder_hidden_states"] = torch.randn(2, 5, 32, dtype=torch.float64)
    return batch


def main(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out = model(**batch, **({"use_cache": False} if "input_ids" in batch else {}))
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.parametrize(
    ("name", "layout", "kinds", "kernels", "settings"), EXACT, ids=[row[0] for row in EXACT]
)
def test_exact(
    name: str, layout: str, kinds: set[str], kernels: str, settings: dict[str, Any]
) -> None:
    model = build(name, settings)
    sites, batch = hp.find_sites(model), batch_for(model)
    assert {s.layout for s in sites} == {layout}
    assert {s.kind for s in sites} == kinds
    counts = {s.name: s.n_query_heads for s in sites}
    masks = [ragged(sites), hp.HeadMask.from_keep({sites[-1].name: []}, counts)]
    for kernel in kernels.split():
        model.set_attn_implementation(kernel)
        with torch.no_grad():
            base = main(model, batch)
            for mask in masks:
                small = copy.deepcopy(model)
                with hp.gated(model, mask):
                    expected = main(model, batch)
                hp.prune_(small, mask)
                assert (expected - base).abs().max() > 1e-4
                assert_close(main(small, batch), expected, **CLOSE)


@pytest.mark.parametrize(("name", "words", "settings"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused(name: str, words: str, settings: dict[str, Any]) -> None:
    model = build(name, settings)
    with pytest.raises(
        UnsupportedModel, match="a model with attention that headprune knows"
    ) as caught:
        hp.find_sites(model)
    assert words in str(caught.value)


def test_cross_attention_of_gpt2_is_left_alone_and_the_rest_is_exact() -> None:
    config = {"add_cross_attention": True}
    model = build("GPT2LMHeadModel", config)
    batch = batch_for(model)
    sites = hp.find_sites(model)
    assert [s.name for s in sites] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert (
        reason_against(sites.layouts["gpt2"], model.transformer.h[0].crossattention)
        == "it has 'q_attn'"
    )
    for mask in (
        ragged(sites),
        hp.HeadMask.from_keep({sites[0].name: []}, {s.name: 4 for s in sites}),
    ):
        small = copy.deepcopy(model)
        with hp.gated(model, mask):
            expected = main(model, batch)
        hp.prune_(small, mask, batch)
        assert_close(main(small, batch), expected, **CLOSE)


@pytest.mark.parametrize("keep", [[0, 3], []])
@pytest.mark.parametrize("which", ["attention", "crossattention"])
def test_an_encoder_decoder_with_its_pair_of_caches_generates(which: str, keep: list[int]) -> None:
    """Self- and cross-attention keep their keys in different caches; also a layer without heads
    must not mix them."""
    config = transformers.BertConfig(
        **{k: v for k, v in SIZES.items() if k in transformers.BertConfig().to_dict()}
    )
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        config, copy.deepcopy(config)
    )
    both.decoder_start_token_id, both.pad_token_id, both.eos_token_id = 1, 0, 2
    model = shaken(transformers.EncoderDecoderModel(config=both)).double().eval()
    sites = hp.find_sites(model)
    assert [s.kind for s in sites] == ["self", "self", "causal", "cross", "causal", "cross"]
    (site,) = [s for s in sites if s.name == f"decoder.bert.encoder.layer.0.{which}"]
    mask = hp.HeadMask.from_keep({site.name: keep}, {s.name: 4 for s in sites})
    ids = torch.randint(3, 50, (2, 7))
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
    }
    options |= {"return_dict_in_generate": True, "output_logits": True}
    small = copy.deepcopy(model)
    hp.prune_(small, mask)
    with hp.gated(model, mask):
        expected = model.generate(ids, **options)
    got = small.generate(ids, **options)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), **CLOSE)
    assert got.past_key_values.get_seq_length() == 5
    assert_close(
        torch.stack(small.generate(ids, use_cache=False, **options).logits),
        torch.stack(got.logits),
        **CLOSE,
    )


def test_a_layer_that_attends_to_an_encoder_and_shares_its_cache_keeps_a_head() -> None:
    sizes = {k: v for k, v in SIZES.items() if k in transformers.T5GemmaModuleConfig().to_dict()}
    side = transformers.T5GemmaModuleConfig(**sizes)
    model = transformers.T5GemmaModel(
        transformers.T5GemmaConfig(encoder=side, decoder=copy.deepcopy(side))
    ).eval()
    sites = hp.find_sites(model)
    cross = [s for s in sites if s.kind == "cross"]
    assert cross
    mask = hp.HeadMask.from_keep({cross[0].name: []}, {s.name: 4 for s in sites})
    before = {n: (type(m), dict(m.__dict__)) for n, m in model.named_modules()}
    with pytest.raises(UnsupportedModel, match="cut so that it keeps a head"):
        hp.prune_(model, mask)
    assert {n: (type(m), dict(m.__dict__)) for n, m in model.named_modules()} == before
