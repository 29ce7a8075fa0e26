"""Write and read tensors in one or several safetensors files, each with its hash."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from headprune.checkpoints.manifest import MANIFEST, Alias, Manifest, Shard
from headprune.core.errors import CheckpointError
from headprune.core.files import atomic_path, sha256_file
from headprune.core.opening import check_file, reason

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"

_AGAIN = "Copy the folder again."


def distinct(
    state: Mapping[str, Any], elsewhere: Container[str] = ()
) -> tuple[dict[str, Tensor], tuple[Alias, ...]]:
    """The tensors of a state dict with every shared one once.

    Args:
        state: With the parameters themselves, so that shared ones are recognised.
        elsewhere: Names of those that may be on the meta device, because their data are elsewhere.

    Returns:
        The tensors by name, and the other names of those that are shared.

    Raises:
        CheckpointError: a value that is no tensor, or a tensor without data.
    """
    first: dict[tuple[Any, ...], str] = {}
    stored: dict[str, Tensor] = {}
    memory: set[int] = set()
    aliases: list[Alias] = []
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            hint = "Extra state cannot be stored."
            raise CheckpointError(name, "a tensor", type(tensor).__name__, hint)
        if tensor.is_meta and name not in elsewhere:
            raise CheckpointError(name, "a tensor with data", "one on the meta device")
        key = _identity(tensor)
        if key in first:
            aliases.append(Alias(name, first[key]))
            continue
        first[key] = name
        stored[name] = tensor.detach().contiguous()
        if tensor.is_meta:
            continue
        # safetensors refuses views that overlap.
        storage = stored[name].untyped_storage().data_ptr()
        if storage in memory:
            stored[name] = stored[name].clone()
        memory.add(storage)
    return stored, tuple(aliases)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """A key that tensors with the same values in the same memory share."""
    if tensor.is_meta or not tensor.numel():  # without an address
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def check_shard_size(size: int | str, where: str = "max_shard_size") -> None:
    """Check a size before anything is written.

    Raises:
        CheckpointError: neither a positive number nor text such as ``"5GB"``.
    """
    # As huggingface_hub reads it.
    number = re.fullmatch(r"([0-9.]+)[KMGT]B", size.upper()) if isinstance(size, str) else None
    try:
        known = float(number[1]) if number else size
    except ValueError:  # "1.2.3GB"
        known = size
    if not isinstance(known, (int, float)) or isinstance(known, bool) or known <= 0:
        raise CheckpointError(where, "bytes, or text such as '5GB'", repr(size))


@contextmanager
def written(
    tensors: dict[str, Tensor],
    folder: Path,
    max_shard_size: int | str,
    save: Callable[[dict[str, Tensor], Path], None] | None = None,
) -> Iterator[tuple[str, list[Shard]]]:
    """Write tensors to temporary files, which take their places when the block ends well.

    One file is ``model.safetensors``; several have an index that other tools read too.

    Args:
        tensors: By name.
        folder: Where they go.
        max_shard_size: Bytes, or text such as ``"5GB"``.
        save: Writes one file; default that of safetensors, which needs all tensors in memory.

    Yields:
        The hash of the file, or of the index; and the shards, empty where there is one file.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    with ExitStack() as places:
        shards = []
        # Each file is written to a temporary one; all take their places together.
        for file, names in split.filename_to_tensors.items():
            temporary = places.enter_context(atomic_path(folder / file))
            in_file = {name: tensors[name] for name in names}
            if save is None:
                save_file(in_file, temporary, metadata={"format": "pt"})
            else:
                save(in_file, temporary)
            shards.append(Shard(file, sha256_file(temporary)))
        if not split.is_sharded:
            yield shards[0].sha256, []
            return
        temporary = places.enter_context(atomic_path(folder / INDEX))
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        yield sha256_file(temporary), shards


def read(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read all tensors of a folder.

    Raises:
        CheckpointError: a file is missing, damaged or not the one that was saved.
    """
    tensors: dict[str, Tensor] = {}
    for path, sha256 in _files(folder, manifest):
        tensors.update(_read_file(path, sha256))
    return tensors


def check(folder: Path, manifest: Manifest) -> None:
    """Compare the hashes of the weights files, which are read piece by piece.

    Raises:
        CheckpointError: a file is missing, or not the one that was saved.
    """
    for path, sha256 in _files(folder, manifest):
        _check(path, sha256)


def _files(folder: Path, manifest: Manifest) -> list[tuple[Path, str]]:
    """The weights files with their hashes."""
    if not manifest.shards:
        return [(folder / WEIGHTS, manifest.weights_sha256)]
    _check(folder / INDEX, manifest.weights_sha256)
    for shard in manifest.shards:
        # A manifest must not name a file outside of its folder.
        if Path(shard.file).name != shard.file:
            must = "a manifest of files in its folder"
            raise CheckpointError(str(folder / MANIFEST), must, shard.file)
    return [(folder / shard.file, shard.sha256) for shard in manifest.shards]


def _read_file(path: Path, sha256: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        check_file(path)
        # A file's tensors are at any address, and kernels round otherwise where memory is not
        # aligned: copy them.
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    except FileNotFoundError:
        raise CheckpointError(str(path), "the model's weights", "no such file") from None
    except (SafetensorError, OSError, ValueError) as error:
        must = "a valid safetensors file"
        raise CheckpointError(str(path), must, reason(error), _AGAIN) from error
    # After reading: a damaged file has the better error of safetensors.
    _check(path, sha256)
    return tensors


def _check(path: Path, sha256: str) -> None:
    if not path.is_file():
        what = "the index of the model's weights" if path.name == INDEX else "the model's weights"
        raise CheckpointError(str(path), what, "no such file", _AGAIN)
    if sha256_file(path) != sha256:
        must = f"the file that {MANIFEST} describes (SHA-256 {sha256[:12]}...)"
        raise CheckpointError(str(path), must, "a file with other contents", _AGAIN)
