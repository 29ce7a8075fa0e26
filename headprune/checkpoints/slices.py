"""Tensors in safetensors files, read and written by slices: memory does not grow with the model.

The library checks every file that is read, and reads every file that is written; between the two a
tensor passes in pieces, as bytes, so that neither it nor its file is ever in memory whole. What is
written equals byte for byte what the library writes from memory.
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

#: Bytes that are in memory at a time.
PIECE = 16 << 20
#: In the order in which safetensors lays types out in a file, the widest first.
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
        start: Where its bytes begin.
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
    """What is kept of a stored tensor: positions along one dimension, or all of it where ``rows``
    is None."""

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
        shape, item = self.stored.shape, self.stored.dtype.itemsize
        with opened(self.stored.path) as file:
            if self.rows is None:
                yield from _ranges(file, [(self.stored.start, self.stored.n_bytes)])
                return
            outer, inner = (
                math.prod(shape[: self.dimension]),
                math.prod(shape[self.dimension + 1 :]) * item,
            )
            if outer == 1:
                runs = _runs(self.rows)
                yield from _ranges(
                    file, [(self.stored.start + a * inner, (b - a) * inner) for a, b in runs]
                )
                return
            line, kept = shape[self.dimension] * inner, np.asarray(self.rows, dtype=np.int64)
            step = max(1, PIECE // max(line, 1))
            for begin in range(0, outer, step):
                count = min(step, outer - begin)
                block = np.frombuffer(
                    _read(file, self.stored.start + begin * line, count * line), np.uint8
                )
                yield block.reshape(count, shape[self.dimension], inner)[:, kept].tobytes()


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's ``model.safetensors`` or of its shards; only their headers are
    read.

    Raises:
        CheckpointError: no such files, both kinds, a damaged one, a type of number that we do not
            know, or a name in two files.
    """
    files = [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        shards = [folder / name for name in files_of(folder / _INDEX)]
        if not files[0].is_file():
            files = shards
        elif any(shard.is_file() for shard in shards):
            hint = "One of the two is left from an earlier save: take it away."
            raise CheckpointError(str(folder), f"a folder with {_WEIGHTS} or shards", "both", hint)
    elif not files[0].is_file():
        hint = "Other forms of weights are loaded and cut in memory, without --streaming."
        raise CheckpointError(
            str(folder), f"a folder with {_WEIGHTS}, or its shards and {_INDEX}", "neither", hint
        )
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(file).items():
            if name in found:
                raise CheckpointError(
                    str(file), f"the only file with {name}", f"{found[name].path.name} has it too"
                )
            found[name] = stored
    return found


def sampled(stored: Stored, positions: Sequence[int]) -> bytes:
    """Single values of a tensor, by their places in it."""
    item = stored.dtype.itemsize
    with opened(stored.path) as file:
        return b"".join(_read(file, stored.start + at * item, item) for at in positions)


def read(stored: Stored) -> Tensor:
    """A whole tensor, for small ones."""
    data = bytearray(b"".join(Slice(stored).pieces()))
    if not data:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return torch.frombuffer(data, dtype=stored.dtype).reshape(stored.shape)


def save(tensors: Mapping[str, Slice | OffloadedTensor | Tensor], path: Path) -> None:
    """Writes a safetensors file; tensors that are in memory, or offloaded, may be among the
    slices."""
    order = {dtype: place for place, dtype in enumerate(_TYPES.values())}
    names = sorted(tensors, key=lambda name: (order[_dtype(tensors[name])], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape, dtype = tuple(tensors[name].shape), _dtype(tensors[name])
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensors[name]
            tensor = tensor.read() if isinstance(tensor, OffloadedTensor) else tensor
            if isinstance(tensor, Slice):
                file.writelines(tensor.pieces())
            else:
                file.write(
                    tensor.detach()
                    .cpu()
                    .contiguous()
                    .reshape(-1)
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )


def _dtype(tensor: Slice | OffloadedTensor | Tensor) -> torch.dtype:
    return tensor.stored.dtype if isinstance(tensor, Slice) else tensor.dtype


def _header(path: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        check_file(path)
        with safe_open(path, "np"):  # every offset is checked here, and nothing is read
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            str(path), "a valid safetensors file", reason(error), "Copy the folder again."
        ) from error
    with opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))  # what safe_open took is sound
    header.pop("__metadata__", None)
    found = {}
    for name, facts in header.items():
        if facts["dtype"] not in _TYPES:
            raise CheckpointError(f"{path}: {name}", f"one of {', '.join(_TYPES)}", facts["dtype"])
        place = 8 + length + int(facts["data_offsets"][0])
        found[name] = Stored(path, _TYPES[facts["dtype"]], tuple(facts["shape"]), place)
    return found


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
    for start, length in ranges:
        for begin in range(0, length, PIECE):
            yield _read(file, start + begin, min(PIECE, length - begin))


def _read(file: Any, start: int, length: int) -> bytes:
    file.seek(start)
    data: bytes = file.read(length)
    if len(data) != length:
        raise CheckpointError(file.name, "left alone while it is read", "a file that ended early")
    return data
