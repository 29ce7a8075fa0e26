"""Tokenizers in GGUF files: what llama.cpp needs to split text as the checkpoint's tokenizer does.

Read from ``tokenizer.json``: byte-level BPE, whose way to split text llama.cpp must know by name,
and BPE with byte fallback, as SentencePiece trains it. Any other is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headprune.core.errors import UnsupportedModel, reason_of
from headprune.core.opening import read_bytes

_WHERE = "format 'gguf', tokenizer"
_HINT = (
    "Leave the tokenizer out, by processor=None or prune --no-tokenizer; llama.cpp then takes token"
    " ids."
)
#: The regular expression that splits text before BPE, by llama.cpp's name for it.
SPLITS = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
#: Normalizers that llama.cpp's own splitting allows for.
_NORMALIZERS = {"NFC", "Prepend", "Replace"}


def add(writer: Any, folder: Path, n_rows: int) -> None:
    """Add the tokenizer of a folder to a GGUF file; without one, say that there is none.

    Args:
        writer: The file's ``gguf.GGUFWriter``.
        folder: With ``tokenizer.json`` and ``tokenizer_config.json``.
        n_rows: Rows of the embedding. Those without a token get a name that no text has.

    Raises:
        UnsupportedModel: llama.cpp has no tokenizer like this one.
    """
    import gguf

    content = check(folder, n_rows)
    if content is None:
        writer.add_tokenizer_model("none")
        return
    kind = _kind(content)
    writer.add_tokenizer_model("llama" if kind == "spm" else "gpt2")
    writer.add_tokenizer_pre("default" if kind == "spm" else kind)
    tokens = _tokens(content, n_rows)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([of_type for _, of_type in tokens])
    if kind == "spm":
        writer.add_token_scores(_scores(content, [text for text, _ in tokens]))
        writer.add_add_space_prefix(_adds_space(content))
    special = gguf.SpecialVocab(folder, load_merges=kind != "spm", n_vocab=n_rows)
    # What is not stated, llama.cpp decides by the kind of the tokenizer.
    for name, (number, is_added) in _at_the_ends(folder).items():
        special.add_special_token[name] = is_added
        if number is not None:
            special.special_token_ids[name] = number
    special.add_to_gguf(writer, quiet=True)


def check(folder: Path, n_rows: int) -> dict[str, Any] | None:
    """Read a folder's tokenizer; None where it has none.

    Args:
        folder: With ``tokenizer.json`` and ``tokenizer_config.json``.
        n_rows: Rows of the embedding.

    Raises:
        UnsupportedModel: llama.cpp has no tokenizer like this one.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
        if any((folder / name).is_file() for name in others):
            raise UnsupportedModel(_WHERE, "one with a tokenizer.json", "none", _HINT)
        return None
    content: dict[str, Any] = json.loads(read_bytes(path))
    _kind(content)
    _tokens(content, n_rows)
    _at_the_ends(folder)
    return content


def _at_the_ends(folder: Path) -> dict[str, tuple[int | None, bool]]:
    """The ids of ``bos`` and ``eos``, and whether the tokenizer puts them around a text.

    Raises:
        UnsupportedModel: it adds other tokens, or needs code of its own.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (folder / "tokenizer_config.json").is_file():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # odd files fail in many ways
            raise UnsupportedModel(
                _WHERE, "one that Transformers opens", reason_of(error), _HINT
            ) from error
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    # What a text gets around it is seen on one letter.
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    adds_bos = bos is not None and whole[:1] == [bos]
    adds_eos = eos is not None and whole[-1:] == [eos]
    if whole != [bos] * adds_bos + plain + [eos] * adds_eos:
        got = tokenizer.convert_ids_to_tokens(whole)
        must = "one that adds nothing but bos and eos to a text"
        raise UnsupportedModel(_WHERE, must, f"{got} for 'a'", _HINT)
    return {"bos": (bos, adds_bos), "eos": (eos, adds_eos)}


def _kind(content: dict[str, Any]) -> str:
    """``spm``, or llama.cpp's name for how byte-level BPE splits text.

    Raises:
        UnsupportedModel: neither.
    """
    model = content["model"]
    if model["type"] != "BPE":
        raise UnsupportedModel(_WHERE, "one of BPE", model["type"], _HINT)
    unknown = {part["type"] for part in _parts(content, "normalizer")} - _NORMALIZERS
    if unknown:
        must = f"one with normalizers among {', '.join(sorted(_NORMALIZERS))}"
        raise UnsupportedModel(_WHERE, must, ", ".join(sorted(unknown)), _HINT)
    # Only SentencePiece models fall back on bytes.
    if model.get("byte_fallback"):
        return "spm"
    name = _split_of(_parts(content, "pre_tokenizer"))
    if name is None:
        must = "one that splits text as GPT-2, Llama 3 or Qwen 2 do"
        raise UnsupportedModel(_WHERE, must, json.dumps(content["pre_tokenizer"]), _HINT)
    return name


def _split_of(parts: list[dict[str, Any]]) -> str | None:
    """llama.cpp's name for how these parts split text; None where it has none."""
    types = [part["type"] for part in parts]
    if types == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if types == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        pattern = parts[0]["pattern"].get("Regex")
        for name, known in SPLITS.items():
            if pattern == known:
                return name
    return None


def _parts(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    whole = content.get(name)
    if whole is None:
        return []
    parts: list[dict[str, Any]] = whole.get("normalizers") or whole.get("pretokenizers") or [whole]
    return parts


def _tokens(content: dict[str, Any], n_rows: int) -> list[tuple[str, int]]:
    """Text and type of every row of the embedding."""
    from gguf import TokenType

    model = content["model"]
    # 1. Tokens of the vocabulary, then those of single bytes.
    known = {number: (text, TokenType.NORMAL) for text, number in model["vocab"].items()}
    if model.get("byte_fallback"):
        for byte in range(256):
            text = f"<0x{byte:02X}>"
            if text in model["vocab"]:
                known[model["vocab"][text]] = (text, TokenType.BYTE)
    # 2. Added tokens, which may take the place of others.
    for token in content["added_tokens"]:
        of_type = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        if token["content"] == model.get("unk_token"):
            of_type = TokenType.UNKNOWN
        known[token["id"]] = (token["content"], of_type)
    if max(known) >= n_rows:
        must = f"one with token ids below the {n_rows} rows of the embedding"
        raise UnsupportedModel(_WHERE, must, max(known), _HINT)
    # 3. Embeddings are often padded: rows without a token get a name that no text has.
    unused = TokenType.UNUSED
    return [known.get(number, (f"[PAD{number}]", unused)) for number in range(n_rows)]


def _scores(content: dict[str, Any], texts: list[str]) -> list[float]:
    """How early BPE makes each token: llama.cpp merges the pair of the highest score first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(content["model"]["merges"]):
        # Older files write a merge as "a b", newer ones as a pair.
        text = "".join(merge.split(" ", 1) if isinstance(merge, str) else merge)
        ranks.setdefault(text, rank)
    last = len(ranks)
    return [-float(ranks.get(text, last)) for text in texts]


def _adds_space(content: dict[str, Any]) -> bool:
    """Whether a space is put in front of a text."""
    steps = _parts(content, "normalizer") + _parts(content, "pre_tokenizer")
    for step in steps:
        if step["type"] == "Prepend":
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False
