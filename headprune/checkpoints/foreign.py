"""Check a model's folder before Transformers reads it: no outside files, no code, possible sizes.

Transformers checks none of these. An index may name any file of the machine, and a configuration
that asks for a billion layers is built until the memory is full.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from headprune.core.errors import CheckpointError
from headprune.core.opening import NotAFile, check_file, read_text
from headprune.model.building import no_memory

#: Most bytes of a configuration or an index: far above those of the largest models.
_LONGEST = 64 << 20

# Limits for the numbers of a configuration. The first pattern that a key matches counts.
#: Keys of parts that are built one by one. No known model has a quarter of this many.
_LAYERS = re.compile(r"(layers?|depths?|blocks|stages|stacks)$")
_MOST_LAYERS = 1024
#: Keys whose list adds up to a number of layers; other lists of layers name some of them.
_COUNTED = re.compile(r"(^|_)depths?$|^(n|num)_.*(layers|blocks|stages|stacks)$")
#: Keys of tensor sizes: words, positions, widths. Six times the longest input of any known model.
_SIZE = re.compile(
    r"vocab|(size|sizes|dim|length|len|positions?|position_embeddings|ctx|window|rate|floor|pixels)$"
)
_LARGEST = 1 << 26
#: Any other whole number may be a count of experts, heads, groups or labels.
_MOST = 1 << 16
#: Keys whose numbers are not sizes, and keys with no sizes below them.
_FREE = re.compile(
    r"(^|_)(theta|ids?|index|tokens|seed|version|value|freq|factors?|offset)$|(^|_)(rope|size|emb)_base$|^base$"
)
_FREE_INSIDE = ("id2label", "label2id", "task_specific_params")
#: Keys that can name a kernel, which is code that is downloaded and run.
_KERNELS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")
#: Most levels of nested objects and lists.
_DEEPEST = 40

#: Most modules of a model: half as many again as 60 layers of 384 experts have.
_MODULES = 200_000
#: Parameters that a byte of a file may hold: weights of two bits.
_DENSEST = 4
#: Parameters that a file may lack, such as a small head.
_LACKING = 10_000_000
_CONFIGURATION = "a model's configuration"

#: Suffixes of the files that are read from a model's folder.
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


def check_folder(folder: Path) -> None:
    """Refuse a folder whose index names files outside, or with an impossible configuration.

    Raises:
        CheckpointError: such a folder, or an index that is none. A configuration that is no JSON
            passes: its reader raises a better error.
    """
    check_files(folder)
    for index in sorted(folder.glob("*.index.json")):
        files_of(index)
    config = folder / "config.json"
    if config.is_file() and _parsed(config, _CONFIGURATION) is not None:
        check_config(config)


def check_files(folder: Path) -> None:
    """Refuse a folder with anything but regular files where libraries read files by name.

    Raises:
        CheckpointError: a FIFO, a device, a socket or a folder, or a link to one, under the name of
            such a file.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        # Other suffixes than .json are searched for by patterns, which pass by folders.
        is_passed_by = path.suffix != ".json" and path.is_dir()
        if path.suffix not in _READ or not path.exists() or is_passed_by:
            continue
        try:
            check_file(path)
        except NotAFile as error:
            raise CheckpointError(error.where, error.must, error.got, error.hint) from None


def files_of(index: Path) -> list[str]:
    """Names of the files that an index of shards lists, each once.

    Raises:
        CheckpointError: no index, or one of files that are not in its own folder.
    """
    must = "an index of weights files"
    data = read_object(index, must)
    names = data.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(str(index), must, "one without a weight_map from tensors to files")
    files = sorted(set(names.values()))
    for name in files:
        # No path, and no name that a terminal would hide.
        if name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
            raise CheckpointError(str(index), "an index of files in its folder", repr(name))
    return files


def check_config(path: Path) -> None:
    """Refuse a configuration with code of the hub or impossible numbers.

    Raises:
        CheckpointError: such a configuration, or one that is no JSON object.
    """
    check_settings(str(path), read_object(path, _CONFIGURATION))


def check_settings(where: str, settings: Mapping[str, Any], hint: str = "") -> None:
    """Refuse settings that ``check_config`` would refuse in a file.

    Args:
        where: For the error.
        settings: All of a configuration.
        hint: What to do about an impossible number.

    Raises:
        CheckpointError: such settings.
    """
    for keys, value in _values(where, settings, (), 0):
        if isinstance(value, str) and "/" in value:
            for key in keys:
                if _KERNELS.search(key):
                    must = "the name of an implementation that is installed"
                    why = "headprune runs no kernels from the hub."
                    raise CheckpointError(f"{where}: {key}", must, repr(value), why)
        most = _most(keys[-1])
        if type(value) is int and abs(value) > most and not _is_free(keys):
            must = f"a number that a model can have, at most {most:,}"
            raise CheckpointError(f"{where}: {keys[-1]}", must, value, hint)


def _most(key: str) -> int:
    """Largest number that a key may have."""
    if _LAYERS.search(key):
        return _MOST_LAYERS
    return _LARGEST if _SIZE.search(key) else _MOST


def _is_free(keys: tuple[str, ...]) -> bool:
    """Whether nothing is built by the number under these keys."""
    return bool(_FREE.search(keys[-1])) or any(key in _FREE_INSIDE for key in keys)


@contextmanager
def few_modules(path: Path) -> Iterator[None]:
    """Limit the number of modules that are built inside the block.

    Numbers that are small enough each may be multiplied.

    Args:
        path: The configuration, for the error.

    Raises:
        CheckpointError: the model has too many.
    """
    count = 0

    def count_module(*_: object) -> None:
        nonlocal count
        count += 1
        if count > _MODULES:
            must = f"that of a model of at most {_MODULES:,} modules"
            raise CheckpointError(str(path), must, "more")

    handle = register_module_module_registration_hook(count_module)
    try:
        yield
    finally:
        handle.remove()


def check_weights(kind: Any, folder: Path, config: Any = None) -> None:
    """Refuse weights far smaller than the configuration asks for.

    Transformers would fill the rest with random numbers.

    Args:
        kind: A model class, or an Auto class.
        folder: With a configuration and weights; a folder without a configuration passes.
        config: The configuration; default the folder's.

    Raises:
        CheckpointError: such weights, or far more modules than any model has.
    """
    import transformers

    path = folder / "config.json"
    is_auto = hasattr(kind, "_model_mapping")
    if not path.is_file() or not (is_auto or hasattr(kind, "post_init")):
        return
    try:
        if config is None:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        classes: Any = kind._model_mapping[type(config)] if is_auto else kind
        model_class = classes[0] if isinstance(classes, (list, tuple)) else classes
        # Only its parameters are counted: nothing needs memory.
        with no_memory(buffers=True), few_modules(path):
            model: nn.Module = model_class(config)
    except CheckpointError:
        raise
    except Exception:  # a model that cannot be built: Transformers says why
        return
    n_parameters = sum(p.numel() for p in model.parameters())
    n_bytes = 0
    for pattern in _WEIGHTS:
        n_bytes += sum(file.stat().st_size for file in folder.glob(pattern))
    if n_parameters > _DENSEST * n_bytes + _LACKING:
        must = f"of a model that fits the {n_bytes:,} bytes of weights beside it"
        raise CheckpointError(str(path), must, f"that of one with {n_parameters:,} parameters")


def read_object(path: Path, must: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: The file.
        must: What it must be, for the error.

    Raises:
        CheckpointError: a file that is too long, or that holds no JSON object.
    """
    data = _parsed(path, must)
    if not isinstance(data, dict):
        what = "no JSON" if data is None else f"a JSON {type(data).__name__}"
        raise CheckpointError(str(path), must, what)
    return data


def _parsed(path: Path, must: str) -> Any:
    """The JSON value in a file; None where it holds none.

    Raises:
        CheckpointError: a file that is too long to be read.
    """
    try:
        return json.loads(read_text(path, _LONGEST))
    except NotAFile as error:
        must = f"{must}, in {error.must}"
        raise CheckpointError(str(path), must, error.got, error.hint) from None
    except (OSError, ValueError, RecursionError):
        return None


def _values(
    where: str, value: Any, keys: tuple[str, ...], depth: int
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with the keys above it, and sums of lists of layers."""
    if depth > _DEEPEST:
        got = f"one that is nested more than {_DEEPEST} deep"
        raise CheckpointError(where, _CONFIGURATION, got)
    if isinstance(value, dict):
        for name, inside in value.items():
            yield from _values(where, inside, (*keys, name), depth + 1)
    elif isinstance(value, list):
        for inside in value:
            yield from _values(where, inside, keys, depth + 1)
        # [2, 2, 18, 2] may be the layers of four stages.
        if keys and _COUNTED.search(keys[-1]):
            yield keys, _total(value)
    else:
        yield keys, value


def _total(value: Any) -> int:
    """The sum of the whole numbers in nested lists."""
    if isinstance(value, list):
        return sum(map(_total, value))
    return value if type(value) is int else 0
