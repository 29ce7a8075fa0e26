"""Tiny random models in folders, as a user has them from the hub: weights, configuration, and what
prepares inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = [f"w{i}" for i in range(30)]
#: An encoder's, unless a test asks for others.
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 16,
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def word_tokenizer(folder: Path, *, pairs: bool = True) -> int:
    """Writes a tokenizer with a token for every one of ``WORDS``; tells how many tokens it has.

    Args:
        folder: The model's folder.
        pairs: Texts stand between [CLS] and [SEP], as for BERT; else they only end with [SEP].
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    one, two = (
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
        if pairs
        else ("$A [SEP]", "$A $B:1 [SEP]:1")
    )
    tokenizer.post_processor = processors.TemplateProcessing(one, two, [("[CLS]", 2), ("[SEP]", 3)])
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return len(vocabulary)


def bert(
    folder: Path, kind: str = "BertForSequenceClassification", heads: int = 4, **config: Any
) -> Path:
    """A tiny BERT with a tokenizer; ``kind`` is its class."""
    import transformers

    sizes = {**SIZES, "hidden_size": 2 * heads, "num_attention_heads": heads}
    words = {"vocab_size": word_tokenizer(folder), "max_position_embeddings": 64}
    settings = {**sizes, **words, **config}
    getattr(transformers, kind)(transformers.BertConfig(**settings)).save_pretrained(folder)
    return folder


def encoder_decoder(folder: Path, family: str = "Marian") -> Path:
    """A tiny T5, BART or Marian with a tokenizer."""
    import transformers

    size = word_tokenizer(folder, pairs=False)
    tokens = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0, "vocab_size": size}
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _SIDE.items()}
    sizes = {"d_model": 16, **sides, "max_position_embeddings": 64}
    if family == "T5":
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4}
    name = {
        "T5": "T5ForConditionalGeneration",
        "Bart": "BartForConditionalGeneration",
        "Marian": "MarianMTModel",
    }
    config = getattr(transformers, f"{family}Config")(
        **sizes, **tokens, bos_token_id=2, forced_eos_token_id=3
    )
    getattr(transformers, name[family])(config).save_pretrained(folder)
    return folder


_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 16}


def wav2vec2(folder: Path, **config: Any) -> Path:
    """A tiny Wav2Vec2 that classifies sound of 100 samples a second, with its feature extractor."""
    import transformers

    ears = {
        "conv_dim": (8, 8),
        "conv_kernel": (10, 4),
        "conv_stride": (5, 2),
        "num_conv_pos_embeddings": 4,
    }
    rest = {"num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "mask_time_length": 2}
    settings = {**SIZES, **ears, **rest, **config}
    model = transformers.Wav2Vec2ForSequenceClassification(transformers.Wav2Vec2Config(**settings))
    model.save_pretrained(folder)
    extractor = transformers.Wav2Vec2FeatureExtractor(
        sampling_rate=100, return_attention_mask=False
    )
    extractor.save_pretrained(folder)
    return folder


def write_wav(path: Path, samples: Any, rate: int) -> None:
    """Samples of -1 to 1, as whole numbers of two bytes."""
    import wave

    import numpy as np

    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((np.asarray(samples) * 32767).astype("<i2").tobytes())


def llama(folder: Path, **config: Any) -> Path:
    """A tiny Llama with grouped queries and a tokenizer."""
    import transformers

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32}
    special = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": None}
    words = {"vocab_size": word_tokenizer(folder, pairs=False), "max_position_embeddings": 64}
    settings = {**SIZES, **heads, **special, **words, **config}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).save_pretrained(folder)
    return folder


def vit(folder: Path, **config: Any) -> Path:
    """A tiny ViT of colour pictures, with its image processor."""
    import transformers

    settings = {**SIZES, "image_size": 8, "patch_size": 4, **config}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**settings))
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder
