"""Tokenizers that are trained on the train rows, for models that are trained from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, START, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"


def train_tokenizer(kind: str, texts: Sequence[str], size: int | None = None) -> Any:
    """A Transformers tokenizer, trained on texts; the same texts give the same one.

    ``bpe`` merges bytes (Sennrich et al. 2016, on bytes as in GPT-2): nothing is unknown, decoding
    gives every text back, and ``</s>`` ends it. ``characters`` has one token for each character of
    the texts; others are unknown.

    Args:
        kind: ``bpe`` or ``characters``.
        texts: What it learns from.
        size: Tokens of ``bpe`` at most, special ones included.

    >>> tokenizer = train_tokenizer("characters", ["abba"])
    >>> tokenizer("bac")["input_ids"], tokenizer.decode([2, 1])
    ([2, 1, 0], 'ba')
    """
    from transformers import PreTrainedTokenizerFast

    inner = _bpe(texts, size) if kind == "bpe" else _characters(texts)
    special = (
        {"pad_token": PAD, "bos_token": START, "eos_token": END}
        if kind == "bpe"
        else {"unk_token": UNKNOWN}
    )
    plain: dict[str, Any] = {
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }  # `<s>` is text, too
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, model_input_names=names, **plain, **special
    )


def _bpe(texts: Sequence[str], size: int | None) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, START, END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings: dict[str, Any] = {
        "special_tokens": special,
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    if size is not None:
        settings["vocab_size"] = size
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**settings))
    tokenizer.post_processor = processors.TemplateProcessing(
        f"$A {END}", special_tokens=[(END, special.index(END))]
    )
    return tokenizer


def _characters(texts: Sequence[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    known = [UNKNOWN, *sorted(set().union(*texts))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(known)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
