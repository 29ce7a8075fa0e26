"""Samples: the numbers of single examples behind scores, known by their hash, stored as safetensors beside the JSON."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.core.errors import InvalidValue
from headprune.core.files import write_atomic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

#: Bytes that are kept: 8 million numbers, for example 58,000 examples of 144 heads.
LIMIT = 64 * 2**20

_SUFFIX = ".samples.safetensors"
_HINT = "The scores stand without them; score again for rank intervals, stability and intervals of agreement."


@dataclass(frozen=True)
class Samples:
    """A matrix ``[rows, units]``, fp64, never changed: independent numbers whose mean has the scores' sampling error.

    One row an example in data order, or one a block of examples. Two are equal when their numbers are: what is
    compared, hashed and written into JSON is the SHA-256 of the matrix. The matrix itself is read when it is needed,
    for ``<name>.json`` from ``<name>.samples.safetensors`` beside it, or from whichever such file in that folder says
    that it holds this hash, so that a JSON file may be renamed.

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

    @classmethod
    def of(cls, matrix: ArrayLike) -> Samples:
        """From numbers. Above 64 MiB neighbouring rows are averaged in equal blocks, a last partial one is left out.

        Raises:
            InvalidValue: not a matrix with a row, or numbers that are not finite.
        """
        import numpy as np

        data = np.array(matrix, dtype="<f8", order="C")  # a copy: nobody else can write into it
        if data.ndim != 2 or not len(data):
            raise InvalidValue("samples", "a matrix [rows, units] with a row", f"the shape {list(data.shape)}")
        if not np.isfinite(data).all():
            raise InvalidValue("samples", "finite", "NaN or infinite numbers", "Look at the scorer's input for them.")
        block = -(-data.nbytes // LIMIT)
        if block > 1:
            n_blocks = len(data) // block
            data = data[: n_blocks * block].reshape(n_blocks, block, -1).mean(1)
        return cls(len(data), data.shape[1], _digest(data))._holding("matrix", _sealed(data))

    @property
    def matrix(self) -> NDArray[np.float64]:
        """The numbers, not writable.

        Raises:
            InvalidValue: the file beside the JSON is missing or damaged, or there is no such file because the scores
                did not come from one.
        """
        if "matrix" not in self._held:
            self._holding("matrix", self._read())
        found: NDArray[np.float64] = self._held["matrix"]
        return found

    def columns(self, which: list[int]) -> Samples:
        """The same rows of some units."""
        return Samples.of(self.matrix[:, which])

    def beside(self, path: str | Path) -> Samples:
        """These samples, to be read from beside a JSON file when they are needed."""
        return Samples(self.rows, self.units, self.sha256)._holding("path", Path(path))

    def write(self, path: str | Path) -> Path:
        """Writes the matrix beside the JSON file ``path``, whole or not at all; returns where."""
        from safetensors.numpy import save

        data = save({"samples": self.matrix}, {"headprune": "Samples", "sha256": self.sha256})
        return write_atomic(_companion(Path(path)), data)

    @property
    def _held(self) -> dict[str, Any]:
        """State that is no part of the value; copies and pickles keep it."""
        held: dict[str, Any] = self.__dict__.setdefault("_state", {})
        return held

    def _holding(self, key: str, value: Any) -> Samples:
        self._held[key] = value
        return self

    def _read(self) -> NDArray[np.float64]:
        path: Path | None = self._held.get("path")
        must = f"there with the per-example numbers of these scores ({self.rows} x {self.units})"
        if path is None:
            hint = "JSON text holds their hash alone: HeadScores.load(path) finds them beside the file. " + _HINT
            raise InvalidValue("samples", must, "scores that come from no file", hint)
        expected, got = _companion(path), "no such file"
        for candidate in dict.fromkeys([expected, *sorted(path.parent.glob(f"*{_SUFFIX}"))]):
            found = _load(candidate, self.sha256)
            if not isinstance(found, str):
                return found
            got = found if candidate == expected else got
        raise InvalidValue(str(expected), must, got, _HINT)


def _load(path: Path, sha256: str) -> NDArray[np.float64] | str:
    """The matrix of this hash, or why the file does not give it."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return "no such file"
    try:
        with safe_open(path, framework="np") as file:
            if (file.metadata() or {}).get("sha256") != sha256:
                return "the numbers of other scores"
            data = file.get_tensor("samples")
    except (SafetensorError, OSError):
        return "a damaged file"
    return _sealed(data) if _digest(data) == sha256 else "a damaged file"


def _companion(path: Path) -> Path:
    """Where the samples of a JSON file lie; ``x`` and ``x.json`` have files of their own."""
    name = path.name
    return path.with_name((name.removesuffix(".json") if name.endswith(".json") else f"{name}.bare") + _SUFFIX)


def _sealed(data: NDArray[np.float64]) -> NDArray[np.float64]:
    data.setflags(write=False)
    return data


def _digest(data: NDArray[np.float64]) -> str:
    digest = hashlib.sha256(repr(tuple(data.shape)).encode())
    digest.update(data.astype("<f8", copy=False).tobytes())
    return digest.hexdigest()
