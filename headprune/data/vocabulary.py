"""Train tokenizers on the train rows, for models that are trained from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, START, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"


def train_tokenizer(
    kind: str,
    texts: Sequence[str],
    size: int | None = None,
) -> Any:
    """Train a Transformers tokenizer; the same texts give the same one.

    ``bpe`` merges bytes (Sennrich et al. 2016, on bytes as in GPT-2): nothing is unknown, decoding
    gives every text back, and ``</s>`` ends it. ``characters`` has one token for each character of
    the texts; others are unknown.

    Args:
        kind: ``bpe`` or ``characters``.
        texts: The texts to learn from.
        size: Tokens of ``bpe`` at most, special ones included.

    >>> tokenizer = train_tokenizer("characters", ["abba"])
    >>> tokenizer("bac")["input_ids"], tokenizer.decode([2, 1])
    ([2, 1, 0], 'ba')
    """
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": UNKNOWN}
    if kind == "bpe":
        special = {"pad_token": PAD, "bos_token": START, "eos_token": END}
    return PreTrainedTokenizerFast(
        tokenizer_object=_bpe(texts, size) if kind == "bpe" else _characters(texts),
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # `<s>` in a text is text
        **special,
    )


def _bpe(texts: Sequence[str], size: int | None) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, START, END]
    settings: dict[str, Any] = {
        "special_tokens": special,
        # Every byte is a token, so nothing is unknown; sorted, so that runs agree.
        "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()),
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
    numbers = dict(zip(known, range(len(known)), strict=True))
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
    # `.` alone would not match the ends of lines.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
