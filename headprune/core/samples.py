"""Matrices behind scores, identified by their hash and stored as safetensors beside the JSON.

Samples are the numbers of single examples. Curvature is how the loss bends when several heads are
removed.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

    Floats = NDArray[np.float64]

_T = TypeVar("_T")

#: Largest matrix that is kept, in bytes: 8 million numbers, for example 58,000 examples of 144
#: heads, or 2896 by 2896 heads.
LIMIT = 64 * 2**20

_DAMAGED = "a damaged file"


class StoredMatrix(ABC):
    """Base of the kinds of matrices; a kind is a frozen dataclass of its sizes and ``sha256``.

    Two are equal when their numbers are: the SHA-256 of the matrix is compared, hashed and written
    into JSON. The matrix itself is fp64 and read-only. It is read when it is first needed, for
    ``<name>.json`` from ``<name>.<kind>.safetensors`` beside it. If that file does not hold this
    hash, others of its kind in the folder are tried: a JSON file may have been renamed, and a
    process may have been killed before the matrix was in place.
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
    def matrix(self) -> Floats:
        """The numbers, not writable.

        Raises:
            InvalidValue: the file beside the JSON is missing or damaged, or there is no such file
                because the scores did not come from one.
        """
        if "matrix" not in self._state:
            self._state["matrix"] = self._read()
        numbers: Floats = self._state["matrix"]
        return numbers

    def stored_with(self, path: str | Path) -> Self:
        """A copy that reads its matrix, when it is needed, from the folder of a JSON file."""
        copy = replace(self)  # type: ignore[type-var]
        copy._state["path"] = Path(path)
        return copy

    def write(self, path: str | Path, temporary_of: Callable[[str | Path], Path]) -> None:
        """Write the matrix for the JSON file ``path``.

        Args:
            path: The JSON file.
            temporary_of: Gives the temporary path of a file's own, see ``atomic_paths``.
        """
        marks = {"headprune": type(self).__name__, "sha256": self.sha256}
        data = packed({self.kind: self.matrix}, marks)
        temporary_of(self._companion(Path(path))).write_bytes(data)

    @property
    def _state(self) -> dict[str, Any]:
        """Numbers and path: no part of the value, but copies and pickles keep them."""
        state: dict[str, Any] = self.__dict__.setdefault("_state", {})
        return state

    def _with_matrix(self, matrix: Floats) -> Self:
        self._state["matrix"] = _sealed(matrix)
        return self

    def _read(self) -> Floats:
        path: Path | None = self._state.get("path")
        must = f"there with {self.what} of these scores ({self.shape[0]} x {self.shape[1]})"
        if path is None:
            hint = (
                "JSON text has only their hash; HeadScores.load(path) reads them from beside the"
                " file. " + self.hint
            )
            raise InvalidValue(self.kind, must, "scores that come from no file", hint)
        # 1. The file of the JSON's own name.
        expected = self._companion(path)
        matrix = self._load(expected)
        if not isinstance(matrix, str):
            return matrix
        # 2. Others. The error is about the expected file, whatever they hold.
        why_not = matrix
        for candidate in self._others(path.parent):
            matrix = self._load(candidate)
            if not isinstance(matrix, str):
                return matrix
        raise InvalidValue(str(expected), must, why_not, self.hint)

    def _others(self, folder: Path) -> Iterator[Path]:
        """Files of this kind in a folder, whole ones before the temporary ones of a kill."""
        yield from sorted(folder.glob(f"*.{self.kind}.safetensors"))
        yield from sorted(folder.glob(f"*.{self.kind}.safetensors.*{PART}"))

    def _load(self, path: Path) -> Floats | str:
        """The matrix of this hash, or why the file does not give it."""
        from safetensors import SafetensorError, safe_open

        try:
            check_file(path)
            with safe_open(path, framework="np") as file:
                # The metadata is read before the numbers: most candidates are other scores'.
                if (file.metadata() or {}).get("sha256") != self.sha256:
                    return "the numbers of other scores"
                if file.get_slice(self.kind).get_dtype() != "F64":
                    return _DAMAGED
                data = file.get_tensor(self.kind)
        except FileNotFoundError:
            return "no such file"
        except NotAFile as error:
            return f"{error.got}"
        except (SafetensorError, OSError):
            return _DAMAGED
        # Metadata can be edited; the hash of the numbers decides.
        if data.shape != self.shape or _digest(data) != self.sha256:
            return _DAMAGED
        return _sealed(data)

    def _companion(self, path: Path) -> Path:
        """Path of a JSON file's matrix; ``x`` and ``x.json`` have different ones."""
        if path.name.endswith(".json"):
            stem = path.name.removesuffix(".json")
        else:
            stem = f"{path.name}.bare"
        return path.with_name(f"{stem}.{self.kind}.safetensors")


@dataclass(frozen=True)
class Samples(StoredMatrix):
    """A matrix ``[rows, units]``: independent numbers whose mean has the scores' sampling error.

    One row per example in data order, or one per block of examples.

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
        "The scores are valid without them; score again for rank intervals, stability and intervals"
        " of agreement."
    )

    @classmethod
    def of(cls, matrix: ArrayLike) -> Samples:
        """Make samples from numbers.

        Above 64 MiB neighbouring rows are averaged in equal blocks; a last partial block is not
        used.

        Raises:
            InvalidValue: not a matrix with a row, or numbers that are not finite.
        """
        import numpy as np

        data = np.array(matrix, dtype="<f8", order="C")  # a copy: nobody else can write into it
        if data.ndim != 2 or not len(data):
            got = f"the shape {list(data.shape)}"
            raise InvalidValue("samples", "a matrix [rows, units] with a row", got)
        _check_finite("samples", data)
        # Ceiling division: blocks as small as the limit allows.
        rows_per_block = -(-data.nbytes // LIMIT)
        if rows_per_block > 1:
            n_blocks = len(data) // rows_per_block
            whole_blocks = data[: n_blocks * rows_per_block]
            data = whole_blocks.reshape(n_blocks, rows_per_block, -1).mean(1)
        return cls(len(data), data.shape[1], _digest(data))._with_matrix(data)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.units

    def columns(self, which: list[int]) -> Samples:
        """The same rows of some units."""
        return Samples.of(self.matrix[:, which])


@dataclass(frozen=True)
class Curvature(StoredMatrix):
    """A symmetric matrix ``I``, ``[units, units]``, that predicts how gates change the loss.

    Under gates m the loss rises by about ``1/2 (1-m)' I (1-m)``. Half its diagonal are the scores
    of single units; the rest says which units can replace each other.

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
    hint: ClassVar[str] = (
        "The scores are valid without it; score again for the selector 'quadratic'."
    )

    @staticmethod
    def too_large(units: int) -> str:
        """Why a matrix of so many units is not kept; empty where it is."""
        if 8 * units**2 <= LIMIT:
            return ""
        return f"The curvature of {units} units is left out: above {LIMIT / 2**20:g} MiB."

    @classmethod
    def of(cls, matrix: ArrayLike) -> Curvature:
        """Make a curvature from numbers; rounding errors of its symmetry are averaged away.

        Raises:
            InvalidValue: not symmetric, numbers that are not finite, or more than 64 MiB.
        """
        import numpy as np

        data = np.array(matrix, dtype="<f8", order="C")
        if data.ndim != 2 or data.shape[0] != data.shape[1]:
            got = f"the shape {list(data.shape)}"
            raise InvalidValue("curvature", "a matrix [units, units]", got)
        _check_finite("curvature", data)
        difference = float(np.abs(data - data.T).max(initial=0))
        if difference > 1e-6 * float(np.abs(data).max(initial=0)):
            got = f"a difference of {difference:.3g} across the diagonal"
            raise InvalidValue("curvature", "symmetric", got)
        hint = cls.too_large(len(data))
        if hint:
            must = f"of at most {LIMIT // 2**20} MiB"
            raise InvalidValue("curvature", must, f"{len(data)} units", hint)
        # The hash depends on the memory order, so it must be row by row.
        data = np.ascontiguousarray((data + data.T) / 2)
        return cls(len(data), _digest(data))._with_matrix(data)

    @property
    def shape(self) -> tuple[int, int]:
        return self.units, self.units

    def part(self, which: list[int]) -> Curvature:
        """The curvature of some units while the others are kept: their rows and columns."""
        return Curvature.of(self.matrix[which][:, which])

    def merged(self, groups: list[list[int]]) -> Curvature:
        """The curvature of larger units, each a group of these: sums over rows and columns."""
        import numpy as np

        # Row g has a 1 for every unit of group g.
        members = np.zeros((len(groups), self.units))  # [groups, units]
        for row, group in zip(members, groups, strict=True):
            row[group] = 1
        return Curvature.of(members @ self.matrix @ members.T)


def if_there(make: Callable[[], _T]) -> tuple[_T | None, tuple[str, ...]]:
    """Make something of a stored matrix, or explain why its file is missing.

    Returns:
        The result and no notes; or None and the reason as a note.
    """
    try:
        return make(), ()
    except InvalidValue as error:
        return None, (str(error),)


def _check_finite(where: str, data: Floats) -> None:
    import numpy as np

    if not np.isfinite(data).all():
        hint = "Look at the scorer's input for them."
        raise InvalidValue(where, "finite", "NaN or infinite numbers", hint)


def _sealed(data: Floats) -> Floats:
    """Make an array read-only."""
    data.setflags(write=False)
    return data


def _digest(data: Floats) -> str:
    digest = hashlib.sha256(repr(tuple(data.shape)).encode())
    # Little-endian on every machine, so that the hash is the same.
    digest.update(data.astype("<f8", copy=False).tobytes())
    return digest.hexdigest()
