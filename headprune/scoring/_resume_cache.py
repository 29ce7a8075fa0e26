"""What batches have given so far, in a folder: a call that was cut off and is made again goes on
after them.

A call makes the same passes over the same batches in the same order, so what a batch gave is found
by the number of its pass and its own; a digest of all batches up to it says whether the data are
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
from typing import Any, Protocol

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.core.files import atomic_path, remove_parts, write_atomic
from headprune.core.locking import locked
from headprune.core.opening import check_file, read_bytes
from headprune.model.transfers import in_main_memory

#: Seconds between two writes, and how many times as long as a write took is waited for the next.
EVERY, _TIMES = 30.0, 20
#: Of sums at the end of a pass, which nobody asks for again: so many seconds for each of ``EVERY``.
_AT_END = 1 / 30
#: Bytes of rows that wait to be written, and of all that a call keeps; what comes after that is
#: made again.
_PIECE, LIMIT = 64 << 20, 4 << 30
_CALL = "call.json"
_HINT = "Give another folder, or take that one away to begin anew."


class Sums(Protocol):
    """What batches are added to, so that it is all that is left of them."""

    def parts(self) -> dict[str, Tensor]:
        """All of it."""

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Takes the sum of several ``parts`` in place of its own."""


class Rows(Protocol):
    """What makes rows of batches, and remembers of a batch more than these."""

    def __call__(self, number: int, batch: Any) -> Tensor:
        """The rows of a batch."""

    def told(self, batch: Any) -> list[str]:
        """What a batch that is through leaves for later ones."""

    def catch_up(self, number: int, batch: Any, told: Sequence[str]) -> None:
        """Takes a batch for one that is through."""


class Shelf:
    """Where a call keeps what its batches gave.

    Args:
        folder: For this call alone; None keeps nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self._n_passes, self._bytes, self._full = folder, 0, 0, False
        # Digest of the data of the last whole pass: what later passes make may depend on all of it.
        self.whole = ""
        self._due = self.written = monotonic()
        self._due += EVERY
        self._places: dict[str, Path] = {}
        self._held: dict[str, _Batch] = {}
        self._new: dict[str, _Batch] = {}
        if folder is None:
            return
        remove_parts(folder)
        for path in sorted(folder.glob("*.safetensors")):
            self._bytes += path.stat().st_size
            if path.name.startswith("rows-"):
                self._places |= dict.fromkeys(_said(path) or (), path)
        self._n_files = len(list(folder.glob("rows-*.safetensors")))

    def rows(self, of_batch: Callable[[int, Any], Tensor] | Rows) -> Kept:
        """For one pass: ``of_batch``, asked only for batches whose rows were not kept."""
        return Kept(self, self._next(), of_batch)

    def added(self, sums: Mapping[str, Sums]) -> Added:
        """For a pass, or several in turn, whose batches are added to ``sums``: what they held when
        they were kept."""
        return Added(self, self._next(), sums)

    def _next(self) -> int:
        self._n_passes += 1
        return self._n_passes

    def write_is_due(self) -> bool:
        """Whether it is time to write: not often, and never for more than a small share of the
        time."""
        return monotonic() >= self._due

    def find(self, name: str) -> _Batch | None:
        """What was kept of a batch."""
        if name in self._places:
            self._held |= dict(_rows_in(self._places[name]))
            found = self._places[name]
            self._places = {key: path for key, path in self._places.items() if path != found}
        return self._held.pop(name, None)

    def keep(self, name: str, batch: _Batch, check: Callable[[], None]) -> None:
        """Has a batch's rows written, sooner or later."""
        if self._full:
            return
        self._new[name] = batch
        if self.write_is_due() or sum(b.rows.nbytes for b in self._new.values()) > _PIECE:
            check()
            self.flush()

    def flush(self) -> None:
        """Writes the rows that wait for it."""
        new, self._new = self._new, {}
        if new and self.folder is not None:
            self._n_files += 1
            tensors = {name: batch.rows for name, batch in new.items()}
            said = {name: [batch.mark, *batch.told] for name, batch in new.items()}
            self.write(self.folder / f"rows-{self._n_files:06}.safetensors", tensors, said)

    def write(self, path: Path, tensors: Mapping[str, Tensor], said: Any) -> None:
        """Writes tensors and what is said of them, if there is room for them."""
        from safetensors.torch import save_file

        start = monotonic()
        more = sum(tensor.nbytes for tensor in tensors.values()) - (
            path.stat().st_size if path.is_file() else 0
        )
        self._full |= self._bytes + more > LIMIT
        if not self._full:
            here = in_main_memory(tensor.detach() for tensor in tensors.values())
            whole = {
                name: tensor.contiguous().clone()
                for name, tensor in zip(tensors, here, strict=True)
            }
            words = json.dumps(said)
            with atomic_path(path) as place:
                save_file(whole, place, {"said": words, "sha256": _sha256(whole, words)})
            self._bytes += more
        self.written = monotonic()
        self._due = self.written + max(EVERY, _TIMES * (self.written - start))


@contextmanager
def opened(
    folder: Path | None, call: Mapping[str, str], seen: Sequence[float], close: float
) -> Iterator[Shelf]:
    """The shelf of a call, for as long as the block lasts; no other process has it then.

    Args:
        folder: Where; None keeps nothing.
        call: What two calls have in common if one can go on where the other was cut off, in words.
        seen: Numbers that the model makes of its first batch: gates, precision or a loss of another
            kind show there.
        close: How far such numbers of the same call may be apart, relative.

    Raises:
        InvalidValue: the folder holds what another call has kept, or another process has it.
    """
    if folder is None:
        yield Shelf()
        return
    with locked(folder, "a call of score()", "Wait for it, or give another folder."):
        path, own = folder / _CALL, {**call, "what the model makes of the first batch": list(seen)}
        try:
            theirs = json.loads(read_bytes(path)) if path.exists() else own
            differing = sorted(
                name
                for name in {*theirs, *own}
                if not _alike(theirs.get(name), own.get(name), close)
            )
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidValue(
                str(path), "what score(folder=) left there", "an unreadable file", _HINT
            ) from error
        if differing:
            got = f"those of another, which differs in {', '.join(differing)[:500]}"
            raise InvalidValue(
                f"score(folder={str(folder.parent)!r})",
                "free, or with batches of this call",
                got,
                _HINT,
            )
        if not path.exists():
            write_atomic(path, json.dumps(own, indent=1, sort_keys=True).encode())
        yield Shelf(folder)


def _alike(a: Any, b: Any, close: float) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_near, a, b, [close] * len(a)))
    return bool(a == b)


def _near(a: Any, b: Any, close: float) -> bool:
    return (
        bool(a == b)
        or math.isclose(float(a), float(b), rel_tol=close, abs_tol=close)
        or (a != a and b != b)
    )


@dataclass(frozen=True)
class _Batch:
    """What a batch gave: the digest of all batches up to it, its rows, and what it left for later
    ones."""

    mark: str
    rows: Tensor
    told: tuple[str, ...]


class Kept:
    """Rows of a pass; see ``Shelf.rows``."""

    def __init__(
        self, shelf: Shelf, number: int, of_batch: Callable[[int, Any], Tensor] | Rows
    ) -> None:
        self._shelf, self._pass, self._of_batch = shelf, number, of_batch

    def __call__(self, number: int, batch: Any, mark: str, check: Callable[[], None]) -> Tensor:
        """The rows of a batch.

        Args:
            number: Of the batch.
            batch: It.
            mark: Digest of all batches up to it.
            check: Called before anything is written: raises for losses that are not finite.

        Raises:
            InvalidValue: rows of this number were kept, of other batches.
        """
        if self._shelf.folder is None:
            return self._of_batch(number, batch)
        name, of_batch = f"{self._pass}/{number}", self._of_batch
        found = self._shelf.find(name)
        if found is not None:
            _same(found.mark, mark, number)
            if hasattr(of_batch, "catch_up"):
                of_batch.catch_up(number, batch, found.told)
            return found.rows
        rows = of_batch(number, batch)
        told = tuple(of_batch.told(batch)) if hasattr(of_batch, "told") else ()
        self._shelf.keep(name, _Batch(mark, rows.detach(), told), check)
        return rows


class Added:
    """Sums, and how far they are; see ``Shelf.added``.

    A place is the number of a pass and how many of its batches are through.
    """

    def __init__(self, shelf: Shelf, number: int, sums: Mapping[str, Sums]) -> None:
        self._shelf, self._sums, self._begun = shelf, sums, monotonic()
        self._path = None if shelf.folder is None else shelf.folder / f"sums-{number}.safetensors"
        self._here, self._there = (0, 0), (0, 0)
        self._mark, self._whole, self._saved = "", "", True
        found = None if self._path is None else _read(self._path)
        if found is None:
            return
        tensors, said = found
        try:
            self._there = int(said["pass"]), int(said["batches"])
            self._mark, self._whole = str(said["mark"]), str(said["whole"])
            for name, one in sums.items():
                one.join(
                    [
                        {
                            k.removeprefix(f"{name}/"): x
                            for k, x in tensors.items()
                            if k.startswith(f"{name}/")
                        }
                    ]
                )
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InvalidValue(
                str(self._path), "sums of this call", "a file without them", _HINT
            ) from error

    @property
    def behind(self) -> bool:
        """Whether batches are still passed over, because the sums hold them and more."""
        return self._here < self._there

    def begin(self) -> None:
        """A pass begins."""
        self._here = self._here[0] + 1, 0

    def holds(self, number: int, mark: str) -> bool:
        """Whether the next batch is in the sums already.

        Raises:
            InvalidValue: others than those that have been read now.
        """
        self._here = self._here[0], self._here[1] + 1
        if self._here == self._there:
            _same(self._mark, mark, number)
        return self._here <= self._there

    def done(self, mark: str, check: Callable[[], None]) -> None:
        """The batch is in the sums; now and then they are written."""
        self._mark, self._saved = mark, False
        if self._shelf.write_is_due():
            self._write(check)

    def end(self, mark: str, check: Callable[[], None]) -> None:
        """A pass is through.

        Raises:
            InvalidValue: the sums hold more batches than it had, or others.
        """
        if self._here[0] == self._there[0] and self.behind:
            _same("more", mark, self._here[1])
        if self._here[0] < self._there[0]:
            _same(self._whole, mark, self._here[1])
        self._whole = mark
        if (
            not self._saved
            and monotonic() - max(self._begun, self._shelf.written) >= EVERY * _AT_END
        ):
            self._write(check)

    def _write(self, check: Callable[[], None]) -> None:
        if self._path is None:
            return
        check()
        self._shelf.flush()
        tensors = {
            f"{name}/{part}": x
            for name, one in self._sums.items()
            for part, x in one.parts().items()
        }
        said = {
            "pass": self._here[0],
            "batches": self._here[1],
            "mark": self._mark,
            "whole": self._whole,
        }
        self._shelf.write(self._path, tensors, said)
        self._saved = True


def _same(theirs: str, mark: str, number: int) -> None:
    if theirs != mark:
        got = f"what others gave, up to batch {number}"
        raise InvalidValue(
            "score(folder=)", "a folder with what these batches gave, in this order", got, _HINT
        )


def _rows_in(path: Path) -> Iterator[tuple[str, _Batch]]:
    """Every batch in a file by its name; none where it is damaged."""
    tensors, said = _read(path) or ({}, {})
    for name, rows in tensors.items():
        told = said.get(name)
        if isinstance(told, list) and told:
            yield name, _Batch(str(told[0]), rows, tuple(map(str, told[1:])))


def _said(path: Path) -> dict[str, Any] | None:
    """What a file says of its tensors, which are not read."""
    from safetensors import SafetensorError, safe_open

    try:
        check_file(path)
        with safe_open(path, framework="pt") as file:
            said = json.loads((file.metadata() or {})["said"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """A file of ours; None where there is none, or a damaged one: what it held is made again."""
    from safetensors import SafetensorError, safe_open

    said = _said(path)
    if said is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            marks = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except (OSError, SafetensorError, ValueError, TypeError, RuntimeError):
        return None
    return (tensors, said) if marks.get("sha256") == _sha256(tensors, marks["said"]) else None


def _sha256(tensors: Mapping[str, Tensor], said: str) -> str:
    digest = hashlib.sha256(said.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
