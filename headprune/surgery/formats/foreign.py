"""A model's folder looked at before Transformers reads it: no file outside of it, no code, no absurd sizes.

Transformers takes a folder at its word: an index may name any file of the machine, and a configuration that asks for
a billion layers is obeyed until the memory is full.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from headprune.core.errors import CheckpointError
from headprune.surgery.formats.building import no_memory

#: Bytes of a configuration or an index: far above those of the largest models.
_LONGEST = 64 << 20
#: What is built one by one, and the most that a model may have of it: no model known has a quarter of this.
_MANY = (
    (re.compile(r"(layers?|depths?|blocks|stages|stacks)$"), 1024),
    (re.compile(r"(experts|heads|codebooks)$"), 1 << 16),
)
#: Any other whole number: of positions, of words, of a width. Six times the length that any model reads.
_LARGEST = 1 << 26
#: Parameters that a byte of a file may hold (weights of two bits), and those that may lack beside it: a small head.
_DENSEST, _LACKING = 4, 10_000_000
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
#: What a key's number is no size of.
_FREE = re.compile(r"theta|base|token_id|_id$|^id2label|seed|version|value|eps|freq|factor|period|original_max")
#: Where a configuration can name a kernel, which is code that is downloaded and run.
_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


def check_folder(folder: Path) -> None:
    """Refuses a folder whose index names files outside of it, or whose configuration no model can have.

    Raises:
        CheckpointError: such a folder, or an index that is none. What is no JSON at all is left to the reader, which
            says so of the model that it was asked for.
    """
    for index in sorted(folder.glob("*.index.json")):
        files_of(index)
    if (folder / "config.json").is_file() and _is_json(folder / "config.json"):
        check_config(folder / "config.json")


def files_of(index: Path) -> list[str]:
    """The files that an index of shards names, each once.

    Raises:
        CheckpointError: no index, or one of files that are not in its own folder.
    """
    must = "an index of weights files"
    data = _read(index, must)
    names = data.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(str(index), must, "one without a weight_map from tensors to files")
    found = sorted(set(names.values()))
    for name in found:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CheckpointError(str(index), "an index of files in its folder", repr(name))
    return found


def check_config(path: Path) -> None:
    """Refuses a configuration that is no JSON object, names a kernel on the hub, or has numbers of no model.

    Raises:
        CheckpointError: such a configuration.
    """
    for key, value in _numbers(path, _read(path, "a model's configuration"), "", 0):
        if key in _KERNELS and isinstance(value, str) and "/" in value:
            must = "the name of an implementation that is installed"
            raise CheckpointError(f"{path}: {key}", must, repr(value), "Kernels of the hub are code that would be run.")
        most = next((most for words, most in _MANY if words.search(key)), _LARGEST)
        if type(value) is int and abs(value) > most and not _FREE.search(key):
            raise CheckpointError(f"{path}: {key}", f"a number that a model can have, at most {most:,}", value)


def check_weights(kind: Any, folder: Path) -> None:
    """Refuses weights that are a small part of what the configuration asks for: Transformers would make up the rest.

    Args:
        kind: A model class, or an Auto class.
        folder: With a configuration and weights; without, nothing is said.

    Raises:
        CheckpointError: such weights.
    """
    import transformers

    if not (folder / "config.json").is_file() or not (hasattr(kind, "_model_mapping") or hasattr(kind, "post_init")):
        return
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        found: Any = kind._model_mapping[type(config)] if hasattr(kind, "_model_mapping") else kind
        with no_memory(buffers=True):
            model: nn.Module = (found[0] if isinstance(found, (list, tuple)) else found)(config)
    except Exception:  # what cannot be built cannot be loaded, and then Transformers says why
        return
    wanted = sum(p.numel() for p in model.parameters())
    held = sum(path.stat().st_size for pattern in _WEIGHTS for path in folder.glob(pattern))
    if wanted > _DENSEST * held + _LACKING:
        must = f"one of the {held:,} bytes of weights beside it"
        raise CheckpointError(str(folder / "config.json"), must, f"one of a model of {wanted:,} parameters")


def _read(path: Path, must: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise ValueError(f"more than {_LONGEST:,} characters")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(str(path), must, str(error)) from error
    if not isinstance(data, dict):
        raise CheckpointError(str(path), must, f"a JSON {type(data).__name__}")
    return data


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _numbers(path: Path, value: Any, key: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Every value under the innermost key above it."""
    if depth > 40:
        raise CheckpointError(str(path), "a configuration", "one that is nested more than 40 deep")
    if isinstance(value, dict):
        for name, inside in value.items():
            yield from _numbers(path, inside, name, depth + 1)
    elif isinstance(value, list):
        for inside in value:
            yield from _numbers(path, inside, key, depth + 1)
    else:
        yield key, value
