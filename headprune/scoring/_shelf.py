"""What batches have given so far, in a folder: a call that was cut off and is made again goes on after them.

A call makes the same passes over the same batches in the same order, so what a batch gave is found by the number of its
pass and its own; a digest of all batches up to it says whether the data are still the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.core.files import write_atomic

#: Seconds between two writes, and how many times as long as a write took is waited for the next.
EVERY, _TIMES = 30.0, 20
#: Bytes of a file of rows, and of all that a call keeps; what comes after that is made again.
_PIECE, LIMIT = 64 << 20, 4 << 30
_CALL = "call.json"
_HINT = "Give another folder, or take that one away to begin anew."


class Sums(Protocol):
    """What batches are added to, so that it is all that is left of them."""

    def parts(self) -> dict[str, Tensor]:
        """All of it."""

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Takes the sum of several ``parts`` in place of its own."""


class Told(Protocol):
    """What says something about how it went."""

    notes: tuple[str, ...]


class Shelf:
    """Where a call keeps what its batches gave.

    Args:
        folder: For this call alone; None keeps nothing.
        call: What two calls have in common if one can go on where the other was cut off, in words.

    Raises:
        InvalidValue: the folder holds what another call has kept.
    """

    def __init__(self, folder: Path | None = None, call: Mapping[str, str] | None = None) -> None:
        self._folder, self._n_passes, self._bytes = folder, 0, 0
        if folder is None:
            return
        own, path = dict(call or {}), folder / _CALL
        try:
            theirs = json.loads(path.read_bytes()) if path.is_file() else own
            differing = sorted(name for name in {*theirs, *own} if theirs.get(name) != own.get(name))
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidValue(str(path), "what score(folder=) left there", "an unreadable file", _HINT) from error
        if differing:
            got = f"those of another, which differs in {', '.join(differing)[:500]}"
            raise InvalidValue(f"score(folder={str(folder)!r})", "free, or with batches of this call", got, _HINT)
        if not path.is_file():
            write_atomic(path, json.dumps(own, indent=1, sort_keys=True).encode())
        self._bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def remembering(self, of_batch: Callable[[int, Any], Tensor], told: Told | None = None) -> Kept:
        """For one pass: ``of_batch``, asked only for batches whose rows were not kept, with what it has ``told``."""
        return Kept(self, self._next(), of_batch, told)

    def added(self, sums: Mapping[str, Sums]) -> Added:
        """For a pass, or several in turn, whose batches are added to ``sums``: what they held when they were kept."""
        return Added(self, self._next(), sums)

    def _next(self) -> Path | None:
        self._n_passes += 1
        return None if self._folder is None else self._folder / f"pass-{self._n_passes}"

    def write(self, path: Path, tensors: Mapping[str, Tensor], marks: Any) -> bool:
        """Writes tensors and what is said of them, if there is room for them."""
        from safetensors.torch import save

        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        more = sum(tensor.nbytes for tensor in whole.values()) - (path.stat().st_size if path.is_file() else 0)
        if self._bytes + more > LIMIT:
            return False
        said = json.dumps(marks)
        write_atomic(path, save(whole, {"said": said, "sha256": _sha256(whole, said)}))
        self._bytes += more
        return True


class _Clock:
    """Says when it is time to write again: not often, and never for more than a small share of the time."""

    def __init__(self) -> None:
        self._due = monotonic() + EVERY

    def rings(self) -> bool:
        return monotonic() >= self._due

    def spent(self, start: float) -> None:
        now = monotonic()
        self._due = now + max(EVERY, _TIMES * (now - start))


class Kept:
    """Rows by the number of their batch; see ``Shelf.remembering``."""

    def __init__(
        self, shelf: Shelf, place: Path | None, of_batch: Callable[[int, Any], Tensor], told: Told | None
    ) -> None:
        self._shelf, self._place, self._of_batch, self._told = shelf, place, of_batch, told
        self._files = [] if place is None else _files(place)
        self._held: dict[int, _Batch] = {}
        self._new: dict[int, _Batch] = {}
        self._clock = _Clock()

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
        if self._place is None:
            return self._of_batch(number, batch)
        while self._files and self._files[0][0] <= number:
            self._held |= _rows_in(self._files.pop(0)[1])
        if number in self._held:
            found = self._held.pop(number)
            _same(found.mark, mark, number)
            if self._told is not None:
                self._told.notes = tuple(dict.fromkeys((*self._told.notes, *found.notes)))
            return found.rows
        rows = self._of_batch(number, batch)
        self._new[number] = _Batch(mark, rows.detach(), () if self._told is None else self._told.notes)
        if self._clock.rings() or sum(b.rows.nbytes for b in self._new.values()) > _PIECE:
            check()
            self._write()
        return rows

    def _write(self) -> None:
        assert self._place is not None
        start, first = monotonic(), min(self._new)
        tensors = {str(number): one.rows for number, one in self._new.items()}
        said = {str(number): [one.mark, *one.notes] for number, one in self._new.items()}
        self._shelf.write(self._place.with_name(f"{self._place.name}-from-{first}.safetensors"), tensors, said)
        self._new = {}
        self._clock.spent(start)


@dataclass(frozen=True)
class _Batch:
    """What a batch gave, and what had been said when it was through."""

    mark: str
    rows: Tensor
    notes: tuple[str, ...]


class Added:
    """Sums, and how many batches they hold; see ``Shelf.added``."""

    def __init__(self, shelf: Shelf, place: Path | None, sums: Mapping[str, Sums]) -> None:
        self._shelf, self._sums, self._clock = shelf, sums, _Clock()
        self._path = None if place is None else place.with_name(f"{place.name}.safetensors")
        self._n_seen, self._n_done, self._mark = 0, 0, ""
        found = None if self._path is None else _read(self._path)
        if found is None:
            return
        tensors, said = found
        parts = {name: _under(name, tensors) for name in sums}
        try:
            self._n_done, self._mark = int(said["batches"]), str(said["mark"])
            for name, one in sums.items():
                one.join([parts[name]])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InvalidValue(str(self._path), "sums of this call", "a file without them", _HINT) from error

    @property
    def behind(self) -> bool:
        """Whether batches are still passed over, because the sums hold them and more."""
        return self._n_seen < self._n_done

    def holds(self, number: int, mark: str) -> bool:
        """Whether the next batch is in the sums already.

        Raises:
            InvalidValue: others than those that have been read now.
        """
        self._n_seen += 1
        if self._n_seen == self._n_done:
            _same(self._mark, mark, number)
        return self._n_seen <= self._n_done

    def done(self, mark: str, check: Callable[[], None]) -> None:
        """The batch is in the sums; now and then they are written."""
        if self._path is None or not self._clock.rings():
            return
        check()
        start = monotonic()
        tensors = {f"{name}/{part}": x for name, one in self._sums.items() for part, x in one.parts().items()}
        self._shelf.write(self._path, tensors, {"batches": self._n_seen, "mark": mark})
        self._clock.spent(start)


def _under(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}/"): x for key, x in tensors.items() if key.startswith(f"{name}/")}


def _same(theirs: str, mark: str, number: int) -> None:
    if theirs != mark:
        got = f"others, up to batch {number}"
        raise InvalidValue("score(folder=)", "a folder with what these batches gave", got, _HINT)


def _files(place: Path) -> list[tuple[int, Path]]:
    """A pass's files of rows, by the number of their first batch."""
    begin = f"{place.name}-from-"
    found = ((path.stem.removeprefix(begin), path) for path in place.parent.glob(f"{begin}*.safetensors"))
    return sorted((int(number), path) for number, path in found if number.isdigit())


def _rows_in(path: Path) -> Iterator[tuple[int, _Batch]]:
    """Every batch in a file by its number; none where it is damaged."""
    tensors, said = _read(path) or ({}, {})
    for name, rows in tensors.items():
        told = said.get(name)
        if name.isdigit() and isinstance(told, list) and told:
            yield int(name), _Batch(str(told[0]), rows, tuple(map(str, told[1:])))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """A file of ours; None where there is none, or a damaged one: what it held is made again."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            marks = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
        said = json.loads(marks["said"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError, RecursionError):
        return None
    whole = marks.get("sha256") == _sha256(tensors, marks["said"]) and isinstance(said, dict)
    return (tensors, said) if whole else None


def _sha256(tensors: Mapping[str, Tensor], said: str) -> str:
    digest = hashlib.sha256(said.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
