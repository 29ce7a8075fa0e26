"""Matrices behind scores, known by their hash and stored as safetensors beside the JSON.

Samples are the numbers of single examples, Curvature is how the loss bends when several heads go
together.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from headprune.core.arrays import packed
from headprune.core.errors import InvalidValue
from headprune.core.files import PART
from headprune.core.opening import NotAFile, check_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

_T = TypeVar("_T")

#: Bytes that are kept of a matrix: 8 million numbers, for example 58,000 examples of 144 heads, or
#: 2896 by 2896 heads.
LIMIT = 64 * 2**20


class StoredMatrix(ABC):
    """What kinds of matrices share; a kind is a frozen dataclass of its sizes and ``sha256``.

    Two are equal when their numbers are: what is compared, hashed and written into JSON is the
    SHA-256 of the matrix. The matrix itself, fp64 and never changed, is read when it is needed, for
    ``<name>.json`` from ``<name>.<kind>.safetensors`` beside it, or from whichever such file in
    that folder says that it holds this hash, so that a JSON file may be renamed, and that a process
    may be killed before the matrix is in its place.
    """

    sha256: str
    kind: ClassVar[str]
    what: ClassVar[str]
    hint: ClassVar[str]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    def matrix(self) -> NDArray[np.float64]:
        """The numbers, not writable.

        Raises:
            InvalidValue: the file beside the JSON is missing or damaged, or there is no such file
                because the scores did not come from one.
        """
        if "matrix" not in self._held:
            self._holding("matrix", self._read())
        found: NDArray[np.float64] = self._held["matrix"]
        return found

    def beside(self, path: str | Path) -> Self:
        """The same, to be read from beside a JSON file when it is needed."""
        return replace(self)._holding("path", Path(path))  # type: ignore[type-var]

    def write(self, path: str | Path, beside: Callable[[str | Path], Path]) -> None:
        """Writes the matrix for beside the JSON file ``path``, to where ``beside`` of
        ``atomic_paths`` says."""
        data = packed(
            {self.kind: self.matrix}, {"headprune": type(self).__name__, "sha256": self.sha256}
        )
        beside(self._companion(Path(path))).write_bytes(data)

    @property
    def _held(self) -> dict[str, Any]:
        """State that is no part of the value; copies and pickles keep it."""
        held: dict[str, Any] = self.__dict__.setdefault("_state", {})
        return held

    def _holding(self, key: str, value: Any) -> Self:
        self._held[key] = value
        return self

    def _read(self) -> NDArray[np.float64]:
        path: Path | None = self._held.get("path")
        must = f"there with {self.what} of these scores ({self.shape[0]} x {self.shape[1]})"
        if path is None:
            hint = (
                "JSON text holds their hash alone: HeadScores.load(path) finds them beside the"
                " file. " + self.hint
            )
            raise InvalidValue(self.kind, must, "scores that come from no file", hint)
        expected, got = self._companion(path), "no such file"
        others = (
            sorted(path.parent.glob(f"*.{self.kind}.safetensors{end}")) for end in ("", f".*{PART}")
        )
        for candidate in dict.fromkeys([expected, *chain(*others)]):
            found = self._load(candidate)
            if not isinstance(found, str):
                return found
            got = found if candidate == expected else got
        raise InvalidValue(str(expected), must, got, self.hint)

    def _load(self, path: Path) -> NDArray[np.float64] | str:
        """The matrix of this hash, or why the file does not give it."""
        from safetensors import SafetensorError, safe_open

        try:
            check_file(path)
            with safe_open(path, framework="np") as file:
                if (file.metadata() or {}).get("sha256") != self.sha256:
                    return "the numbers of other scores"
                if file.get_slice(self.kind).get_dtype() != "F64":
                    return "a damaged file"
                data = file.get_tensor(self.kind)
        except FileNotFoundError:
            return "no such file"
        except NotAFile as error:
            return f"{error.got}"
        except (SafetensorError, OSError):
            return "a damaged file"
        return (
            _sealed(data)
            if data.shape == self.shape and _digest(data) == self.sha256
            else "a damaged file"
        )

    def _companion(self, path: Path) -> Path:
        """Where the matrix of a JSON file lies; ``x`` and ``x.json`` have files of their own."""
        name = path.name
        stem = name.removesuffix(".json") if name.endswith(".json") else f"{name}.bare"
        return path.with_name(f"{stem}.{self.kind}.safetensors")


@dataclass(frozen=True)
class Samples(StoredMatrix):
    """A matrix ``[rows, units]``: independent numbers whose mean has the scores' sampling error.

    One row an example in data order, or one a block of examples.

    Args:
        rows: Rows of the matrix.
        units: Its columns: the prune units in model order.
        sha256: Of its shape and numbers.

    >>> a = Samples.of([[1.0, 2.0], [3.0, 4.0]])
    >>> a.rows, a.units, a == Samples.of([[1, 2], [3, 4]]), a.columns([1]).matrix.tolist()
    (2, 2, True, [[2.0], [4.0]])
    """

    rows: int
    units: int
    sha256: str

    kind: ClassVar[str] = "samples"
    what: ClassVar[str] = "the per-example numbers"
    hint: ClassVar[str] = (
        "The scores stand without them; score again for rank intervals, stability and intervals of"
        " agreement."
    )

    @classmethod
    def of(cls, matrix: ArrayLike) -> Samples:
        """From numbers. Above 64 MiB neighbouring rows are averaged in equal blocks, a last partial
        one is left out.

        Raises:
            InvalidValue: not a matrix with a row, or numbers that are not finite.
        """
        import numpy as np

        data = np.array(matrix, dtype="<f8", order="C")  # a copy: nobody else can write into it
        if data.ndim != 2 or not len(data):
            raise InvalidValue(
                "samples", "a matrix [rows, units] with a row", f"the shape {list(data.shape)}"
            )
        if not np.isfinite(data).all():
            raise InvalidValue(
                "samples",
                "finite",
                "NaN or infinite numbers",
                "Look at the scorer's input for them.",
            )
        block = -(-data.nbytes // LIMIT)
        if block > 1:
            n_blocks = len(data) // block
            data = data[: n_blocks * block].reshape(n_blocks, block, -1).mean(1)
        return cls(len(data), data.shape[1], _digest(data))._holding("matrix", _sealed(data))

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.units

    def columns(self, which: list[int]) -> Samples:
        """The same rows of some units."""
        return Samples.of(self.matrix[:, which])


@dataclass(frozen=True)
class Curvature(StoredMatrix):
    """A symmetric matrix ``I``, ``[units, units]``: the loss rises by about ``1/2 (1-m)' I (1-m)``
    under gates m.

    Half its diagonal are the scores of single units; the rest says which units stand in for each
    other.

    Args:
        units: Rows and columns: the prune units in model order.
        sha256: Of its shape and numbers.

    >>> bent = Curvature.of([[2.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 4.0]])
    >>> bent.part([0, 2]).matrix.tolist(), bent.merged([[0, 1], [2]]).matrix.tolist()
    ([[2.0, 0.0], [0.0, 4.0]], [[7.0, 0.0], [0.0, 4.0]])
    """

    units: int
    sha256: str

    kind: ClassVar[str] = "curvature"
    what: ClassVar[str] = "the curvature"
    hint: ClassVar[str] = "The scores stand without it; score again for the selector 'quadratic'."

    @staticmethod
    def too_large(units: int) -> str:
        """Why a matrix of so many units is not kept, in words; empty where it is."""
        size = 8 * units**2
        return (
            f"The curvature of {units} units is left out: above {LIMIT / 2**20:g} MiB."
            if size > LIMIT
            else ""
        )

    @classmethod
    def of(cls, matrix: ArrayLike) -> Curvature:
        """From numbers; what rounding leaves unlike across the diagonal is averaged.

        Raises:
            InvalidValue: not symmetric, numbers that are not finite, or more than 64 MiB.
        """
        import numpy as np

        data = np.array(matrix, dtype="<f8", order="C")
        if data.ndim != 2 or data.shape[0] != data.shape[1]:
            raise InvalidValue(
                "curvature", "a matrix [units, units]", f"the shape {list(data.shape)}"
            )
        if not np.isfinite(data).all():
            raise InvalidValue(
                "curvature",
                "finite",
                "NaN or infinite numbers",
                "Look at the scorer's input for them.",
            )
        unlike = float(np.abs(data - data.T).max(initial=0))
        if unlike > 1e-6 * float(np.abs(data).max(initial=0)):
            raise InvalidValue(
                "curvature", "symmetric", f"a difference of {unlike:.3g} across the diagonal"
            )
        if said := cls.too_large(len(data)):
            raise InvalidValue(
                "curvature", f"of at most {LIMIT // 2**20} MiB", f"{len(data)} units", said
            )
        data = np.ascontiguousarray((data + data.T) / 2)
        return cls(len(data), _digest(data))._holding("matrix", _sealed(data))

    @property
    def shape(self) -> tuple[int, int]:
        return self.units, self.units

    def part(self, which: list[int]) -> Curvature:
        """That of some units while the others stay: their rows and columns."""
        return Curvature.of(self.matrix[which][:, which])

    def merged(self, groups: list[list[int]]) -> Curvature:
        """That of larger units, each a group of these: sums over rows and columns."""
        import numpy as np

        members = np.zeros((len(groups), self.units))
        for row, group in zip(members, groups, strict=True):
            row[group] = 1
        return Curvature.of(members @ self.matrix @ members.T)


def if_there(make: Callable[[], _T]) -> tuple[_T | None, tuple[str, ...]]:
    """What is made of a stored matrix; None and why, as a note, where its file is gone."""
    try:
        return make(), ()
    except InvalidValue as error:
        return None, (str(error),)


def _sealed(data: NDArray[np.float64]) -> NDArray[np.float64]:
    data.setflags(write=False)
    return data


def _digest(data: NDArray[np.float64]) -> str:
    digest = hashlib.sha256(repr(tuple(data.shape)).encode())
    digest.update(data.astype("<f8", copy=False).tobytes())
    return digest.hexdigest()
