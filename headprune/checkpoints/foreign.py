"""A model's folder looked at before Transformers reads it: no file outside of it, no code, no
absurd sizes.

Transformers takes a folder at its word: an index may name any file of the machine, and a
configuration that asks for a billion layers is obeyed until the memory is full.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from headprune.checkpoints.building import no_memory
from headprune.core.errors import CheckpointError
from headprune.core.opening import NotAFile, check_file, read_text

#: Bytes of a configuration or an index: far above those of the largest models.
_LONGEST = 64 << 20
#: What is built one by one, and the most that a model may have of it: no model known has a quarter
#: of this.
_LAYERS = re.compile(r"(layers?|depths?|blocks|stages|stacks)$")
_MOST_LAYERS = 1024
#: How many of it a list asks for in all; other lists of layers say which ones.
_COUNTED = re.compile(r"(^|_)depths?$|^(n|num)_.*(layers|blocks|stages|stacks)$")
#: Any other whole number, for it may be a count of something too; no expert, head, group or label
#: needs more.
_MOST = 1 << 16
#: What is a size in a tensor: of words, of positions, of a width. Six times the length that any
#: model reads.
_SIZE = re.compile(
    r"vocab|(size|sizes|dim|length|len|positions?|position_embeddings|ctx|window|rate|floor|pixels)$"
)
_LARGEST = 1 << 26
#: Modules of a model: half as many again as 60 layers of 384 experts have.
_MODULES = 200_000
#: Parameters that a byte of a file may hold (weights of two bits), and those that may lack beside
#: it: a small head.
_DENSEST, _LACKING = 4, 10_000_000
_CONFIGURATION = "a model's configuration"
#: How the names of files end that are read out of a model's folder.
_READ = (
    ".json",
    ".txt",
    ".jinja",
    ".model",
    ".spm",
    ".bpe",
    ".codes",
    ".bin",
    ".safetensors",
    ".gguf",
    ".pt",
    ".md",
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
#: What a key's number is no size of, and what numbers lie under that nothing is built by.
_FREE = re.compile(
    r"(^|_)(theta|ids?|index|tokens|seed|version|value|freq|factors?|offset)$|(^|_)(rope|size|emb)_base$|^base$"
)
_FREE_INSIDE = ("id2label", "label2id", "task_specific_params")
#: Where a configuration can name a kernel, which is code that is downloaded and run.
_KERNELS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")


def check_folder(folder: Path) -> None:
    """Refuses a folder whose index names files outside of it, or whose configuration no model can
    have.

    Raises:
        CheckpointError: such a folder, or an index that is none. What is no JSON at all is left to
            the reader, which says so of the model that it was asked for.
    """
    check_files(folder)
    for index in sorted(folder.glob("*.index.json")):
        files_of(index)
    config = folder / "config.json"
    if config.is_file() and _parsed(config, _CONFIGURATION) is not None:
        check_config(config)


def check_files(folder: Path) -> None:
    """Refuses a folder with anything but regular files where Transformers, tokenizers and PEFT read
    by name.

    Raises:
        CheckpointError: a FIFO, a device, a socket or a folder, or a link to one, under the name of
            such a file.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        passed_by = path.suffix != ".json" and path.is_dir()
        if path.suffix in _READ and path.exists() and not passed_by:
            try:
                check_file(path)
            except NotAFile as error:
                raise CheckpointError(error.where, error.must, error.got, error.hint) from None


def files_of(index: Path) -> list[str]:
    """The files that an index of shards names, each once.

    Raises:
        CheckpointError: no index, or one of files that are not in its own folder.
    """
    must = "an index of weights files"
    data = read_object(index, must)
    names = data.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(str(index), must, "one without a weight_map from tensors to files")
    found = sorted(set(names.values()))
    for name in found:
        if name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
            raise CheckpointError(str(index), "an index of files in its folder", repr(name))
    return found


def check_config(path: Path) -> None:
    """Refuses a configuration that is no JSON object, names a kernel on the hub, or has numbers of
    no model.

    Raises:
        CheckpointError: such a configuration.
    """
    for keys, value in _values(path, read_object(path, _CONFIGURATION), (), 0):
        kernel = next((key for key in keys if _KERNELS.search(key)), None)
        if kernel is not None and isinstance(value, str) and "/" in value:
            must = "the name of an implementation that is installed"
            hint = "Kernels of the hub are code that would be run."
            raise CheckpointError(f"{path}: {kernel}", must, repr(value), hint)
        most = _most(keys[-1])
        if type(value) is int and abs(value) > most and not _is_free(keys):
            raise CheckpointError(
                f"{path}: {keys[-1]}", f"a number that a model can have, at most {most:,}", value
            )


def _most(key: str) -> int:
    if _LAYERS.search(key):
        return _MOST_LAYERS
    return _LARGEST if _SIZE.search(key) else _MOST


def _is_free(keys: tuple[str, ...]) -> bool:
    return bool(_FREE.search(keys[-1])) or any(key in _FREE_INSIDE for key in keys)


@contextmanager
def few_modules(path: Path) -> Iterator[None]:
    """Building a model by the configuration at ``path`` ends where it has more modules than any
    model.

    Numbers that are small enough each may be multiplied.

    Raises:
        CheckpointError: it had.
    """
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > _MODULES:
            raise CheckpointError(
                str(path), f"that of a model of at most {_MODULES:,} modules", "more"
            )

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def check_weights(kind: Any, folder: Path) -> None:
    """Refuses weights that are a small part of what the configuration asks for: Transformers would
    make up the rest.

    Args:
        kind: A model class, or an Auto class.
        folder: With a configuration and weights; without, nothing is said.

    Raises:
        CheckpointError: such weights, or far more modules than any model has.
    """
    import transformers

    if not (folder / "config.json").is_file() or not (
        hasattr(kind, "_model_mapping") or hasattr(kind, "post_init")
    ):
        return
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        found: Any = kind._model_mapping[type(config)] if hasattr(kind, "_model_mapping") else kind
        with no_memory(buffers=True), few_modules(folder / "config.json"):
            model: nn.Module = (found[0] if isinstance(found, (list, tuple)) else found)(config)
    except CheckpointError:
        raise
    except Exception:  # what cannot be built cannot be loaded, and then Transformers says why
        return
    wanted = sum(p.numel() for p in model.parameters())
    held = sum(path.stat().st_size for pattern in _WEIGHTS for path in folder.glob(pattern))
    if wanted > _DENSEST * held + _LACKING:
        must = f"one of the {held:,} bytes of weights beside it"
        raise CheckpointError(
            str(folder / "config.json"), must, f"one of a model of {wanted:,} parameters"
        )


def read_object(path: Path, must: str) -> dict[str, Any]:
    """The JSON object in a file of a length that a sound one has.

    Raises:
        CheckpointError: a longer file, or another one; it must be ``must``.
    """
    data = _parsed(path, must)
    if not isinstance(data, dict):
        what = "no JSON" if data is None else f"a JSON {type(data).__name__}"
        raise CheckpointError(str(path), must, what)
    return data


def _parsed(path: Path, must: str) -> Any:
    """What a file says in JSON; None where it says nothing in it.

    Raises:
        CheckpointError: a file that is too long to be read.
    """
    try:
        return json.loads(read_text(path, _LONGEST))
    except NotAFile as error:
        raise CheckpointError(
            str(path), f"{must}, in {error.must}", error.got, error.hint
        ) from None
    except (OSError, ValueError, RecursionError):
        return None


def _values(
    path: Path, value: Any, keys: tuple[str, ...], depth: int
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value under the keys above it, and what the numbers of a list come to where they are
    counts of layers."""
    if depth > 40:
        raise CheckpointError(str(path), _CONFIGURATION, "one that is nested more than 40 deep")
    if isinstance(value, dict):
        for name, inside in value.items():
            yield from _values(path, inside, (*keys, name), depth + 1)
    elif isinstance(value, list):
        for inside in value:
            yield from _values(path, inside, keys, depth + 1)
        if keys and _COUNTED.search(keys[-1]):
            yield keys, _total(value)
    else:
        yield keys, value


def _total(value: Any) -> int:
    """The sum of the whole numbers in nested lists."""
    return (
        sum(map(_total, value)) if isinstance(value, list) else value if type(value) is int else 0
    )
