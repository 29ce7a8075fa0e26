"""BART-style attention: `q_proj`, `k_proj`, `v_proj`, `out_proj`.

BART, Marian, Pegasus, Whisper and others with cross-attention; CLIP, Wav2Vec2, OPT, GPT-J, GPT-Neo.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout, separate_projections
from headprune.core.mixin import original_class
from headprune.layouts._empty import without_heads
from headprune.layouts._tiny import (
    SIZES,
    SPEECH_SIZES,
    decoder,
    encoder_decoder,
    images_and_text,
    speech,
    speech_to_text,
)

if TYPE_CHECKING:
    from headprune.core.heads import Kind


def _kind(module: Any, name: str) -> Kind:
    attribute = name.rpartition(".")[2]
    if "cross" in attribute or attribute.startswith("encoder_attn"):
        return "cross"
    causal = getattr(module, "is_causal", None)
    decodes = getattr(module, "is_decoder", False)
    if causal:
        return "causal"
    # Some decoders are causal by the mask alone.
    if decodes and (causal is None or "self" in attribute):
        return "causal"
    return "cross" if decodes else "self"


def _head_dim(module: Any) -> int:
    """Return the width of a head; refuse code that needs the uncut width (LED, TrOCR, DETR)."""
    # Older code reshapes the heads' outputs to the width of its input. No attribute shows that
    # (GroupViT has the same ones as CLIP), but a local variable of this name does.
    code = inspect.unwrap(original_class(module).forward).__code__  # type: ignore[attr-defined]
    if "embed_dim" in code.co_varnames and "embed_dim" not in code.co_names:
        must = "attention that sizes its output by its own head count"
        raise UnsupportedModel(
            type(module).__name__, must, "code that takes the width from its input"
        )
    width: int = module.head_dim
    return width


# Of an encoder and a decoder.
_PAIR_SIZES: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
_TEXT: dict[str, Any] = {**_PAIR_SIZES, "max_position_embeddings": 64, "init_std": 0.3}

_CLIP_TEXT: dict[str, Any] = {"max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES = (
    # Encoder-decoders.
    ("bart", encoder_decoder("BartForConditionalGeneration", **_TEXT)),
    ("mbart", encoder_decoder("MBartForConditionalGeneration", **_TEXT)),
    ("marian", encoder_decoder("MarianMTModel", **_TEXT)),
    ("pegasus", encoder_decoder("PegasusForConditionalGeneration", **_TEXT)),
    ("m2m_100", encoder_decoder("M2M100ForConditionalGeneration", **_TEXT)),
    ("blenderbot", encoder_decoder("BlenderbotForConditionalGeneration", **_TEXT)),
    (
        "whisper",
        speech_to_text("WhisperForConditionalGeneration", max_target_positions=64, **_PAIR_SIZES),
    ),
    # Two towers.
    (
        "clip",
        images_and_text(
            "CLIPModel", SIZES | {"patch_size": 4}, SIZES | _CLIP_TEXT, projection_dim=12
        ),
    ),
    ("siglip", images_and_text("SiglipModel", SIZES | {"patch_size": 4}, SIZES | _CLIP_TEXT)),
    # Encoders of sound.
    ("wav2vec2", speech("Wav2Vec2ForSequenceClassification", **SPEECH_SIZES)),
    ("hubert", speech("HubertForSequenceClassification", **SPEECH_SIZES)),
    # Decoders.
    (
        "opt",
        decoder(
            "OPTForCausalLM", **SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16, "init_std": 0.3}
        ),
    ),
    (
        "gptj",
        decoder("GPTJForCausalLM", n_embd=16, n_layer=3, n_head=4, rotary_dim=2, n_positions=64),
    ),
    (
        "gpt_neo",
        decoder(
            "GPTNeoForCausalLM",
            hidden_size=16,
            num_layers=3,
            num_heads=4,
            attention_types=[[["global", "local", "global"], 1]],
            window_size=3,
            max_position_embeddings=64,
        ),
    ),
)

LAYOUT = AttentionLayout(
    name="bart",
    gate="out_proj",
    slabs=separate_projections("q_proj", "k_proj", "v_proj", "out_proj"),
    head_dim=_head_dim,
    kind=_kind,
    requires=("head_dim",),
    absent=(
        # Autoformer averages over its heads before they choose their delays.
        "autocorrelation_factor",
        # FSMT takes its input sequence first.
        "cache_key",
        # Pegasus-X joins global and local tokens at the model's width.
        "block_size",
    ),
    counts=(
        ("num_heads", "n_query_heads"),
        ("num_attention_heads", "n_query_heads"),
        ("embed_dim", "query_width"),
    ),
    empty=without_heads("out_proj"),
    families=FAMILIES,
)
