"""Transformers architectures that are not under law: exact when cut, or refused with an error; never
silently wrong."""

import copy

import pytest
import torch
import transformers
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from tests.laws.support import ragged, shaken

#: One model for every spelling that the configurations have.
SIZES = {"vocab_size": 50, "pad_token_id": 0, "max_position_embeddings": 64}
SIZES |= {"hidden_size": 32, "embedding_size": 32, "intermediate_size": 32, "head_dim": 8}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"image_size": 16, "patch_size": 8, "num_channels": 1, "initializer_range": 0.3}
#: The rotary tables and norms of these compute in float32, whatever the model's dtype, and round
#: 1e-16 up to 1e-7.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}

SPEECH = {"conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (10, 4)}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
CROSS = {"is_decoder": True, "add_cross_attention": True}
SHARED_KV = {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "vocab_size_per_layer_input": 50}
SHARED_KV["layer_types"] = ["sliding_attention", "full_attention"] * 2

#: A model class, its layout, kinds, a kernel, and further settings.
EXACT = [
    ("MegatronBertModel", "bert", {"self"}, "sdpa", {}),
    ("XLMRobertaXLModel", "bert", {"self"}, "eager", {}),
    ("RemBertModel", "bert", {"self"}, "sdpa", {}),
    ("RoFormerModel", "bert", {"self"}, "eager", {}),
    ("SEWDModel", "deberta_v2", {"self"}, "eager", SPEECH),
    ("UniSpeechSatModel", "bart", {"self"}, "sdpa", SPEECH),
    ("NomicBertModel", "vit", {"self"}, "sdpa", {}),
    ("PixtralVisionModel", "vit", {"self"}, "sdpa", {}),
    ("Aimv2VisionModel", "bart", {"self"}, "sdpa", {}),
    ("MaskFormerSwinModel", "swin_v2", {"self"}, "eager", {"depths": [1, 1, 1, 1]}),
    ("BertGenerationDecoder", "bert", {"causal"}, "sdpa", {"is_decoder": True}),
    ("BertLMHeadModel", "bert", {"causal", "cross"}, "sdpa", CROSS),
    ("Qwen3ForCausalLM", "llama", {"causal"}, "eager", {"attention_bias": True}),
    ("CohereForCausalLM", "llama", {"causal"}, "sdpa", {}),
    ("OlmoForCausalLM", "llama", {"causal"}, "sdpa", {"clip_qkv": 0.5}),
    ("Olmo3ForCausalLM", "olmo2", {"causal"}, "eager", {}),
    ("StableLmForCausalLM", "llama", {"causal"}, "sdpa", {}),
    ("NemotronForCausalLM", "llama", {"causal"}, "eager", {}),
    ("EuroBertModel", "llama", {"self"}, "sdpa", {}),
    ("ViTMSNModel", "vit", {"self"}, "eager", {}),
    ("ImageGPTModel", "gpt2", {"causal"}, "sdpa", {}),
]

#: A model class, words of the refusal, and further settings.
REFUSED = [
    ("BitNetForCausalLM", "its parameter 'attn_sub_norm.weight' is not accounted for", {}),
    ("DiffLlamaForCausalLM", "its parameter 'lambda_q1' is not accounted for", {}),
    ("StableLmForCausalLM", "'q_layernorm.norms.0.weight' is not", {"qk_layernorm": True}),
    ("GPTBigCodeForCausalLM", "it has 'kv_dim'", {"multi_query": False}),
    ("EsmModel", "its parameter 'LayerNorm.weight' is not accounted for", {}),
    ("Gemma4ForCausalLM", "it has 'store_full_length_kv'", SHARED_KV),
    ("GPTNeoXJapaneseForCausalLM", "it has 'norm_factor'", {}),
    # It counts its width by another name.
    ("LxmertModel", "it has no 'self.all_head_size'", {"l_layers": 1, "x_layers": 1}),
    # It may make its attention anew.
    ("BigBirdModel", "it has 'attention_type'", {"attention_type": "block_sparse"}),
    ("BigBirdModel", "it has 'attention_type'", {"attention_type": "original_full"}),
    # It passes by its output projection.
    ("BloomForCausalLM", "slow_but_exact", {"pretraining_tp": 2, "slow_but_exact": True}),
]


def build(name, settings):
    kind = getattr(transformers, name)
    known = kind.config_class().to_dict()
    sizes = {k: v for k, v in SIZES.items() if k in known}
    if "n_embd" in known:
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    sizes |= {"num_experts_per_tok": 1} if "num_experts_per_tok" in known else {}
    if isinstance(known.get("layer_types"), list):
        sizes["layer_types"] = known["layer_types"][:2]
    return shaken(kind(kind.config_class(**{**sizes, **settings}))).double().eval()


def batch_for(model):
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


def main(model, batch):
    out = model(**batch, **({"use_cache": False} if "input_ids" in batch else {}))
    return out.logits if "logits" in out else out.last_hidden_state


def assert_cuts_are_exact(model, sites):
    """Ragged, and without any head in the last layer."""
    batch, counts = batch_for(model), {s.name: s.n_query_heads for s in sites}
    with torch.no_grad():
        for mask in (ragged(sites), hp.HeadMask.from_keep({sites[-1].name: []}, counts)):
            small = copy.deepcopy(model)
            with hp.gated(model, mask):
                expected = main(model, batch)
            hp.prune_(small, mask)
            assert (expected - main(model, batch)).abs().max() > 1e-4
            assert_close(main(small, batch), expected, **CLOSE)


@pytest.mark.parametrize(("name", "layout", "kinds", "kernel", "settings"), EXACT)
def test_exact(name, layout, kinds, kernel, settings):
    model = build(name, settings)
    sites = hp.find_sites(model)
    assert {s.layout for s in sites} == {layout}
    assert {s.kind for s in sites} == kinds
    model.set_attn_implementation(kernel)
    assert_cuts_are_exact(model, sites)


@pytest.mark.parametrize(("name", "words", "settings"), REFUSED)
def test_refused(name, words, settings):
    with pytest.raises(UnsupportedModel, match="with attention that headprune knows") as caught:
        hp.find_sites(build(name, settings))
    assert words in str(caught.value)


def test_cross_attention_of_gpt2_is_kept_whole_and_the_rest_is_exact():
    model = build("GPT2LMHeadModel", {"add_cross_attention": True})
    sites = hp.find_sites(model)
    assert [s.name for s in sites] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert_cuts_are_exact(model, sites)
