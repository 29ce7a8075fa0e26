"""Read and write slices of tensors in safetensors files, piece by piece.

safetensors checks every file before it is read. Then a tensor is copied in pieces, as bytes, so
that neither it nor its file is ever in memory whole. The written file equals byte for byte the one
that safetensors writes from memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune.checkpoints.foreign import files_of
from headprune.core.errors import CheckpointError
from headprune.core.opening import check_file, opened, reason
from headprune.model.offloaded import OffloadedTensor

#: Most bytes of a tensor that are in memory at a time.
PIECE = 16 << 20
#: Types by their name in safetensors, in the order of its files: the widest first.
_TYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Args:
        path: The file.
        dtype, shape: Of the tensor.
        start: Position of its first byte in the file.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Slice:
    """The kept part of a stored tensor.

    Args:
        stored: The whole tensor.
        dimension: The axis that is shorter.
        rows: Ascending kept positions along that axis; None for the whole tensor.
    """

    stored: Stored
    dimension: int = 0
    rows: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rows is None:
            return self.stored.shape
        sizes = list(self.stored.shape)
        sizes[self.dimension] = len(self.rows)
        return tuple(sizes)

    def pieces(self) -> Iterator[bytes]:
        """The bytes, row-major, in pieces of about ``PIECE``."""
        stored = self.stored
        with opened(stored.path) as file:
            if self.rows is None:
                yield from _ranges(file, [(stored.start, stored.n_bytes)])
                return
            # The tensor as [outer, size, inner bytes], where ``size`` is the length of the axis.
            size = stored.shape[self.dimension]
            outer = math.prod(stored.shape[: self.dimension])
            inner = math.prod(stored.shape[self.dimension + 1 :]) * stored.dtype.itemsize
            if outer == 1:  # kept positions are runs of bytes: the others need not be read
                runs = [(stored.start + a * inner, (b - a) * inner) for a, b in _runs(self.rows)]
                yield from _ranges(file, runs)
                return
            line = size * inner
            kept = np.asarray(self.rows, dtype=np.int64)
            step = max(1, PIECE // max(line, 1))
            # Whole lines are read, and the kept positions taken from them.
            for begin in range(0, outer, step):
                n_lines = min(step, outer - begin)
                data = _read(file, stored.start + begin * line, n_lines * line)
                block = np.frombuffer(data, np.uint8).reshape(n_lines, size, inner)
                yield block[:, kept].tobytes()


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder, by name; only headers of files are read.

    Raises:
        CheckpointError: no safetensors files, shards besides ``model.safetensors``, a damaged file,
            an unknown type of number, or a name in two files.
    """
    tensors: dict[str, Stored] = {}
    for file in _weights_files(folder):
        for name, stored in _header(file).items():
            if name in tensors:
                got = f"{tensors[name].path.name} has it too"
                raise CheckpointError(str(file), f"the only file with {name}", got)
            tensors[name] = stored
    return tensors


def _weights_files(folder: Path) -> list[Path]:
    """A folder's ``model.safetensors``, or its shards."""
    whole = folder / _WEIGHTS
    if not (folder / _INDEX).is_file():
        if whole.is_file():
            return [whole]
        must = f"a folder with {_WEIGHTS}, or its shards and {_INDEX}"
        hint = "Other forms of weights are loaded and cut in memory, without --streaming."
        raise CheckpointError(str(folder), must, "neither", hint)
    # An index counts only with its shards, for another save may have left it.
    shards = [folder / name for name in files_of(folder / _INDEX)]
    if not whole.is_file():
        return shards
    if any(shard.is_file() for shard in shards):
        hint = "One of the two is of an earlier save: remove it."
        raise CheckpointError(str(folder), f"a folder with {_WEIGHTS} or shards", "both", hint)
    return [whole]


def sampled(stored: Stored, positions: Sequence[int]) -> bytes:
    """The bytes of single values of a tensor, by their positions in it."""
    item = stored.dtype.itemsize
    with opened(stored.path) as file:
        return b"".join(_read(file, stored.start + at * item, item) for at in positions)


def read(stored: Stored) -> Tensor:
    """Read a whole tensor, which should be small."""
    # A bytearray, because a tensor of bytes would be read-only.
    data = bytearray(b"".join(Slice(stored).pieces()))
    if not data:  # frombuffer refuses it
        return torch.empty(stored.shape, dtype=stored.dtype)
    return torch.frombuffer(data, dtype=stored.dtype).reshape(stored.shape)


def save(tensors: Mapping[str, Slice | OffloadedTensor | Tensor], path: Path) -> None:
    """Write a safetensors file.

    Args:
        tensors: Slices of other files, offloaded tensors, or tensors in memory, by name.
        path: The file.
    """
    # 1. The header: tensors in order of type and name, and the range of bytes of each.
    # As safetensors orders them, so that the files are equal.
    order = {dtype: place for place, dtype in enumerate(_TYPES.values())}
    names = sorted(tensors, key=lambda name: (order[_dtype(tensors[name])], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape = tuple(tensors[name].shape)
        dtype = _dtype(tensors[name])
        begin = end
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes

    # 2. The bytes.
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensors[name]
            if isinstance(tensor, Slice):
                file.writelines(tensor.pieces())
                continue
            if isinstance(tensor, OffloadedTensor):
                tensor = tensor.read()
            # numpy has no bfloat16: write bytes.
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().tobytes())


def _dtype(tensor: Slice | OffloadedTensor | Tensor) -> torch.dtype:
    return tensor.stored.dtype if isinstance(tensor, Slice) else tensor.dtype


def _header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, as its header describes them."""
    from safetensors import SafetensorError, safe_open

    try:
        check_file(path)
        with safe_open(path, "np"):  # checks every offset, reads no tensor
            pass
    except (SafetensorError, OSError) as error:
        must = "a valid safetensors file"
        raise CheckpointError(str(path), must, reason(error), "Copy the folder again.") from error
    with opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))  # safe_open checked it
    header.pop("__metadata__", None)
    tensors = {}
    for name, facts in header.items():
        if facts["dtype"] not in _TYPES:
            raise CheckpointError(f"{path}: {name}", f"one of {', '.join(_TYPES)}", facts["dtype"])
        start = 8 + length + int(facts["data_offsets"][0])
        tensors[name] = Stored(path, _TYPES[facts["dtype"]], tuple(facts["shape"]), start)
    return tensors


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending positions as half-open ranges.

    >>> list(_runs([0, 1, 4, 5, 6]))
    [(0, 2), (4, 7)]
    """
    start = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield rows[start], rows[place - 1] + 1
            start = place


def _ranges(file: Any, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of ranges ``(start, length)`` of a file, in pieces."""
    for start, length in ranges:
        for begin in range(0, length, PIECE):
            yield _read(file, start + begin, min(PIECE, length - begin))


def _read(file: Any, start: int, length: int) -> bytes:
    file.seek(start)
    data: bytes = file.read(length)
    if len(data) != length:
        raise CheckpointError(file.name, "unchanged while it is read", "a file that ended early")
    return data
