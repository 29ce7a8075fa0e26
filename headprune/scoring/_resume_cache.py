"""Cache batch results in a folder so that ``score`` can resume.

A call makes the same passes over the same batches in the same order. So a batch is known by the
number of its pass and its own number; a digest of all batches up to it shows whether the data are
still the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.core.files import atomic_path, remove_parts, write_atomic
from headprune.core.locking import locked
from headprune.core.opening import check_file, read_bytes
from headprune.model.transfers import in_main_memory

#: Seconds between two writes. A write that took long is followed by a pause of so many times as
#: long.
EVERY, _TIMES = 30.0, 20
#: Sums at the end of a pass are written after this share of ``EVERY``: later batches do not change
#: them.
_AT_END = 1 / 30
#: Bytes of rows that wait to be written.
_PIECE = 64 << 20
#: Bytes that a call keeps in the folder; what comes after that is computed again.
LIMIT = 4 << 30

#: The file that describes the call.
_CALL = "call.json"
#: Keys of a file's metadata, with what is known of its tensors and a checksum.
_METADATA, _CHECKSUM = "said", "sha256"
_HINT = "Give another folder, or delete that one to start over."


class Sums(Protocol):
    """Sums over batches, which are all that a pass computes."""

    def parts(self) -> dict[str, Tensor]:
        """All sums, by name."""

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Replace the own sums by the sum of several ``parts``."""


@runtime_checkable
class StatefulRows(Protocol):
    """A function from batches to rows that also learns something from a batch for later ones."""

    def __call__(self, number: int, batch: Any) -> Tensor:
        """The rows of a batch."""

    def findings(self, batch: Any) -> list[str]:
        """What a finished batch tells about later ones."""

    def catch_up(self, number: int, batch: Any, findings: Sequence[str]) -> None:
        """Learn what an earlier call learned from the batch, whose rows are not computed again."""


#: From the number of a batch and the batch to its rows ``[examples, ...]``.
MakeRows: TypeAlias = Callable[[int, Any], Tensor] | StatefulRows
#: Raises for losses that are not finite; called before anything is written.
Check: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class _BatchRows:
    """The rows of a batch.

    Args:
        mark: Digest of all batches up to it.
        rows: ``[examples, ...]``.
        findings: What the batch tells about later ones.
    """

    mark: str
    rows: Tensor
    findings: tuple[str, ...]


class ResumeCache:
    """What the batches of a call gave, in a folder.

    Args:
        folder: For this call alone; None keeps nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        #: Digest of the data of the last whole pass, on which later passes may depend.
        self.last_pass = ""
        #: When the last write ended.
        self.written = monotonic()
        self._due = self.written + EVERY
        self._n_passes = 0
        self._n_files = 0
        self._n_bytes = 0
        self._full = False
        # Batches by name: in files that are not read yet, read but not asked for, and not written.
        self._files: dict[str, Path] = {}
        self._loaded: dict[str, _BatchRows] = {}
        self._waiting: dict[str, _BatchRows] = {}
        self._n_waiting_bytes = 0
        if folder is not None:
            self._list_files(folder)

    def _list_files(self, folder: Path) -> None:
        """Find out which batches are in which file, without reading tensors."""
        remove_parts(folder)
        for path in sorted(folder.glob("*.safetensors")):
            self._n_bytes += path.stat().st_size
            if path.name.startswith("rows-"):
                self._n_files += 1
                for name in _metadata_of(path) or ():
                    self._files[name] = path

    def rows(self, of_batch: MakeRows) -> CachedRows:
        """For one pass: call ``of_batch`` only for batches whose rows are not in the cache."""
        return CachedRows(self, self._next_pass(), of_batch)

    def sums(self, sums: Mapping[str, Sums]) -> ResumableSums:
        """For one pass, or several in turn: let ``sums`` begin with what they held when last
        written."""
        return ResumableSums(self, self._next_pass(), sums)

    def _next_pass(self) -> int:
        self._n_passes += 1
        return self._n_passes

    def write_is_due(self) -> bool:
        """Whether it is time to write: not often, and never for more than a small share of the
        time."""
        return monotonic() >= self._due

    def take(self, name: str) -> _BatchRows | None:
        """Remove a batch from the cache and return it; None where it is not there."""
        if name in self._files:
            # Read the whole file: its other batches come next.
            path = self._files[name]
            self._loaded |= dict(_rows_in(path))
            self._files = {key: other for key, other in self._files.items() if other != path}
        return self._loaded.pop(name, None)

    def keep(self, name: str, batch: _BatchRows, check: Check) -> None:
        """Have a batch's rows written when a write is due."""
        # What does not fit is computed again by a call that resumes.
        if self._full:
            return
        self._waiting[name] = batch
        self._n_waiting_bytes += batch.rows.nbytes
        if self.write_is_due() or self._n_waiting_bytes > _PIECE:
            check()
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait for it."""
        waiting, self._waiting = self._waiting, {}
        self._n_waiting_bytes = 0
        if not waiting or self.folder is None:
            return
        self._n_files += 1
        tensors = {name: batch.rows for name, batch in waiting.items()}
        metadata = {name: [batch.mark, *batch.findings] for name, batch in waiting.items()}
        self.write(self.folder / f"rows-{self._n_files:06}.safetensors", tensors, metadata)

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Any) -> None:
        """Write tensors and metadata, if there is room for them."""
        start = monotonic()
        n_bytes = sum(tensor.nbytes for tensor in tensors.values())
        # Sums replace those that were written before.
        if path.is_file():
            n_bytes -= path.stat().st_size
        if self._n_bytes + n_bytes > LIMIT:
            self._full = True
        if not self._full:
            _write(path, tensors, json.dumps(metadata))
            self._n_bytes += n_bytes
        self.written = monotonic()
        self._due = self.written + max(EVERY, _TIMES * (self.written - start))


class CachedRows:
    """The rows of one pass; see ``ResumeCache.rows``."""

    def __init__(self, cache: ResumeCache, pass_number: int, of_batch: MakeRows) -> None:
        self._cache = cache
        self._pass = pass_number
        self._of_batch = of_batch

    def __call__(self, number: int, batch: Any, mark: str, check: Check) -> Tensor:
        """The rows of a batch.

        Args:
            number: Of the batch.
            batch: The batch.
            mark: Digest of all batches up to it.
            check: Called before anything is written.

        Raises:
            InvalidValue: the cache has rows of this number, of other batches.
        """
        of_batch = self._of_batch
        # 1. Without a folder there is nothing to look up.
        if self._cache.folder is None:
            return of_batch(number, batch)
        # 2. Take the rows from the cache.
        name = f"{self._pass}/{number}"
        cached = self._cache.take(name)
        if cached is not None:
            _check_same(cached.mark, mark, number)
            if isinstance(of_batch, StatefulRows):
                of_batch.catch_up(number, batch, cached.findings)
            return cached.rows
        # 3. Else compute them, and have them written.
        rows = of_batch(number, batch)
        findings: tuple[str, ...] = ()
        if isinstance(of_batch, StatefulRows):
            findings = tuple(of_batch.findings(batch))
        self._cache.keep(name, _BatchRows(mark, rows.detach(), findings), check)
        return rows


class ResumableSums:
    """Sums, and how many batches they hold; see ``ResumeCache.sums``.

    A place is the number of a pass and the number of its batches that were read.
    """

    def __init__(self, cache: ResumeCache, number: int, sums: Mapping[str, Sums]) -> None:
        self._cache = cache
        self._sums = sums
        self._begun = monotonic()
        self._here = (0, 0)
        # The place that the file's sums had reached.
        self._cached = (0, 0)
        # Digests of the batches so far and of the last whole pass: first those of the file.
        self._mark, self._last_pass = "", ""
        self._is_written = True
        self._path: Path | None = None
        if cache.folder is not None:
            self._path = cache.folder / f"sums-{number}.safetensors"
            self._load(self._path)

    @classmethod
    def of_nothing(cls) -> ResumableSums:
        """For a pass without sums, of which every batch is read."""
        return cls(ResumeCache(), 0, {})

    def _load(self, path: Path) -> None:
        """Put the sums of the file, if there is one, in place of the own ones."""
        content = _read(path)
        if content is None:
            return
        tensors, metadata = content
        try:
            self._cached = int(metadata["pass"]), int(metadata["batches"])
            self._mark, self._last_pass = str(metadata["mark"]), str(metadata["whole"])
            for name, own in self._sums.items():
                own.join([_with_prefix(tensors, f"{name}/")])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            got = "one without them"
            raise InvalidValue(str(path), "a file with this call's sums", got, _HINT) from error

    @property
    def behind(self) -> bool:
        """Whether the pass has not reached the place of the cached sums."""
        return self._here < self._cached

    def begin_pass(self) -> None:
        """Count a pass."""
        self._here = self._here[0] + 1, 0

    def holds(self, number: int, mark: str) -> bool:
        """Count a batch; return whether the sums hold it already.

        Raises:
            InvalidValue: the sums hold other batches than those that were read.
        """
        self._here = self._here[0], self._here[1] + 1
        if self._here == self._cached:
            _check_same(self._mark, mark, number)
        return self._here <= self._cached

    def batch_added(self, mark: str, check: Check) -> None:
        """Write the sums, which hold one batch more, if a write is due."""
        self._mark, self._is_written = mark, False
        if self._cache.write_is_due():
            self._write(check)

    def end_pass(self, mark: str, check: Check) -> None:
        """Check the pass against the cached sums, and write the own ones.

        Raises:
            InvalidValue: the cached sums hold more batches than the pass had, or others.
        """
        n_passes, n_batches = self._here
        # The cached sums ended in this pass, or after it.
        if n_passes == self._cached[0] and self.behind:
            _check_same("more", mark, n_batches)
        if n_passes < self._cached[0]:
            _check_same(self._last_pass, mark, n_batches)
        self._last_pass = mark
        # Short passes are worth a write, too, but not each of them.
        since = max(self._begun, self._cache.written)
        if not self._is_written and monotonic() - since >= EVERY * _AT_END:
            self._write(check)

    def _write(self, check: Check) -> None:
        if self._path is None:
            return
        check()
        # Rows of earlier passes first: sums say that those passes are complete.
        self._cache.flush()
        tensors = {}
        for name, own in self._sums.items():
            for part, tensor in own.parts().items():
                tensors[f"{name}/{part}"] = tensor
        metadata = {
            "pass": self._here[0],
            "batches": self._here[1],
            "mark": self._mark,
            "whole": self._last_pass,
        }
        self._cache.write(self._path, tensors, metadata)
        self._is_written = True


@contextmanager
def opened(
    folder: Path | None, call: Mapping[str, str], first_losses: Sequence[float], tolerance: float
) -> Iterator[ResumeCache]:
    """The cache of a call, locked against other processes as long as the block lasts.

    Args:
        folder: Where; None keeps nothing.
        call: What must be equal for a call to go on where another one was cut off.
        first_losses: Losses of the first batch: other gates, another precision or another loss
            show there.
        tolerance: Largest relative difference between such losses of the same call.

    Raises:
        InvalidValue: the folder holds results of another call, or another process has it.
    """
    if folder is None:
        yield ResumeCache()
        return
    with locked(folder, "a call of score()", "Wait for it, or give another folder."):
        path = folder / _CALL
        own = {**call, "what the model makes of the first batch": list(first_losses)}
        differing = _differing(path, own, tolerance)
        if differing:
            got = f"that of another, which differs in {', '.join(differing)[:500]}"
            where = f"score(folder={str(folder.parent)!r})"
            raise InvalidValue(where, "empty, or the folder of this call", got, _HINT)
        if not path.exists():
            write_atomic(path, json.dumps(own, indent=1, sort_keys=True).encode())
        yield ResumeCache(folder)


def _differing(path: Path, own: Mapping[str, Any], tolerance: float) -> list[str]:
    """The keys in which the call of a file differs from the own one; none without a file."""
    try:
        theirs = json.loads(read_bytes(path)) if path.exists() else own
        names = sorted({*theirs, *own})
        return [n for n in names if not _alike(theirs.get(n), own.get(n), tolerance)]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        must = "a file that score(folder=) wrote"
        raise InvalidValue(str(path), must, "an unreadable file", _HINT) from error


def _alike(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two values are equal, lists of numbers up to rounding."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_near, a, b, [tolerance] * len(a)))
    return bool(a == b)


def _near(a: Any, b: Any, tolerance: float) -> bool:
    if a == b or (a != a and b != b):  # both may be NaN
        return True
    return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)


def _check_same(theirs: str, mark: str, number: int) -> None:
    """Refuse a folder whose digest of the batches is another one."""
    if theirs != mark:
        must = "a folder with results of these batches, in this order"
        got = f"results of others, up to batch {number}"
        raise InvalidValue("score(folder=)", must, got, _HINT)


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}


def _rows_in(path: Path) -> Iterator[tuple[str, _BatchRows]]:
    """Every batch in a file by its name; none where the file is damaged."""
    tensors, metadata = _read(path) or ({}, {})
    for name, rows in tensors.items():
        of_batch = metadata.get(name)
        if isinstance(of_batch, list) and of_batch:
            mark, *findings = map(str, of_batch)
            yield name, _BatchRows(mark, rows, tuple(findings))


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: str) -> None:
    from safetensors.torch import save_file

    whole = {}
    copies = in_main_memory(tensor.detach() for tensor in tensors.values())
    for name, tensor in zip(tensors, copies, strict=True):
        # safetensors refuses tensors that share memory.
        whole[name] = tensor.contiguous().clone()
    with atomic_path(path) as place:
        save_file(whole, place, {_METADATA: metadata, _CHECKSUM: _sha256(whole, metadata)})


def _metadata_of(path: Path) -> dict[str, Any] | None:
    """The metadata of a file, without reading its tensors; None where it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        check_file(path)
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})[_METADATA])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError):
        return None
    return metadata if isinstance(metadata, dict) else None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and metadata of a file; None where it is missing or damaged, to compute them
    again."""
    from safetensors import SafetensorError, safe_open

    metadata = _metadata_of(path)
    if metadata is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except (OSError, SafetensorError, ValueError, TypeError, RuntimeError):
        return None
    if texts.get(_CHECKSUM) != _sha256(tensors, texts[_METADATA]):
        return None
    return tensors, metadata


def _sha256(tensors: Mapping[str, Tensor], metadata: str) -> str:
    digest = hashlib.sha256(metadata.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
