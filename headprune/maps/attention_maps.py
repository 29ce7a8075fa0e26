"""AttentionMaps: attention weights of every head in some examples, and its main pattern."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.core.arrays import packed
from headprune.core.errors import (
    CheckpointError,
    HeadPruneError,
    InvalidValue,
    UnknownName,
    did_you_mean,
)
from headprune.core.files import write_atomic
from headprune.core.heads import ATTENTION_KINDS, HeadId
from headprune.core.opening import check_file, reason
from headprune.maps.patterns import Pattern, find_patterns, main_pattern

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

#: Type and version in a file.
_MARK = "AttentionMaps 1"
#: Arrays of each site in a file.
_ARRAYS = ("weights", "queries", "keys")
_MUST = "a file of attention maps"
_HINT = "Make them again with hp.attention_maps."


@dataclass(frozen=True)
class SiteMaps:
    """The maps of one attention module.

    Args:
        site: Its name.
        kind: ``self``, ``causal`` or ``cross``.
        heads: Original indices of its heads.
        weights: ``[examples, heads, queries, keys]`` in fp32; 0 at padding.
        queries: ``[examples, queries]``: True where a query is no padding.
        keys: ``[examples, keys]``: True where a key is no padding.
    """

    site: str
    kind: str
    heads: tuple[int, ...]
    weights: NDArray[np.float32]
    queries: NDArray[np.bool_]
    keys: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Attention weights of every head, example by example.

    ``maps[HeadId(site, head)]`` is ``[examples, queries, keys]``.

    Args:
        sites: The maps, module by module.
        tokens: The input tokens of every example as text, without padding; empty where they are
            not known.
        targets: The same of the decoder of an encoder-decoder.
        image: Rows and columns of the image's patches, where keys are patches. Tokens before them
            are the model's own.
    """

    sites: tuple[SiteMaps, ...]
    tokens: tuple[tuple[str, ...], ...] = ()
    targets: tuple[tuple[str, ...], ...] = ()
    image: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.sites:
            raise InvalidValue("AttentionMaps.sites", "at least one", "none")
        n = len(self.sites[0].weights)
        for name in ("tokens", "targets"):
            n_rows = len(getattr(self, name))
            if n_rows not in (0, n):
                must = f"one row for each of {n} examples"
                raise InvalidValue(f"AttentionMaps.{name}", must, n_rows)

    @property
    def n_examples(self) -> int:
        """Number of examples."""
        return len(self.sites[0].weights)

    @cached_property
    def _maps_of(self) -> dict[str, SiteMaps]:
        """The maps by the module's name."""
        return {maps.site: maps for maps in self.sites}

    def of(self, site: str) -> SiteMaps:
        """The maps of one module.

        Raises:
            UnknownName: there are none of that name.
        """
        if site not in self._maps_of:
            hint = did_you_mean(site, self._maps_of)
            raise UnknownName("attention map", "a site that has maps", site, hint)
        return self._maps_of[site]

    def __getitem__(self, head: HeadId) -> NDArray[np.float32]:
        maps = self.of(head.site)
        if head.head not in maps.heads:
            must = f"one of its heads, {maps.heads}"
            raise InvalidValue(f"attention map of {head.site}", must, head.head)
        return maps.weights[:, maps.heads.index(head.head)]

    def __iter__(self) -> Iterator[HeadId]:
        for maps in self.sites:
            for head in maps.heads:
                yield HeadId(maps.site, head)

    def labels(self, site: str, example: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Labels of the queries and of the keys of an example, without padding.

        They are tokens, or positions where tokens are not known.
        """
        maps = self.of(site)
        of_queries, of_keys = self._words(maps.kind)
        return (
            _labels(of_queries, example, int(maps.queries[example].sum())),
            _labels(of_keys, example, int(maps.keys[example].sum())),
        )

    def _words(self, kind: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Tokens of the queries and of the keys of a kind of attention."""
        if kind == "cross":
            return self.targets, self.tokens
        # Without targets a causal model is a decoder alone, which reads the tokens.
        own = self.targets if kind == "causal" and self.targets else self.tokens
        return own, own

    def shown(self, head: HeadId, example: int) -> NDArray[np.float32]:
        """One head's weights in one example, ``[queries, keys]`` without padding."""
        maps = self.of(head.site)
        of_example = self[head][example]  # [queries, keys]
        weights: NDArray[np.float32]
        weights = of_example[maps.queries[example]][:, maps.keys[example]]
        return weights

    def patterns(self, head: HeadId) -> tuple[Pattern, ...]:
        """Measure every pattern in the head's maps, the one with the largest share first.

        Where queries and keys are the same tokens: ``previous token``, ``own position``, ``next
        token`` and ``first token``. Where tokens are known: ``punctuation``. Of an image: the class
        token and the neighbours on the grid. Always ``one key``, the largest weight of each query.
        Of two examples or more ``the same positions in every example``: the weight that a query has
        on the same keys in two of them.
        """
        import numpy as np

        kind = self.of(head.site).kind
        _, keys = self._words(kind)
        shown = [self.shown(head, example).astype(np.float64) for example in range(self.n_examples)]
        return find_patterns(shown, kind, keys, self.image)

    def mostly(self, head: HeadId) -> Pattern | None:
        """The pattern that says what the head mostly does; None where no pattern does.

        It has at least half of the weight, and twice its share of even attention (or 90 %); see
        ``headprune.maps.patterns.main_pattern``.
        """
        return main_pattern(self.patterns(head))

    def save(self, path: str | Path) -> Path:
        """Write them as one safetensors file, whole or not at all."""
        arrays, sites = {}, []
        for i, maps in enumerate(self.sites):
            sites.append([maps.site, maps.kind, maps.heads])
            for name in _ARRAYS:
                arrays[f"{i}.{name}"] = getattr(maps, name)
        # Arrays go into the file as they are, all else as one JSON text.
        facts = json.dumps(
            {"sites": sites, "tokens": self.tokens, "targets": self.targets, "image": self.image}
        )
        marks = {"headprune": _MARK, "facts": facts, "sha256": _digest(arrays, facts)}
        return write_atomic(Path(path), packed(arrays, marks))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote.

        Raises:
            CheckpointError: no such file, a damaged one, or one of something else.
        """
        marks, arrays = _read(path)
        # A file from anywhere may have a right hash and facts that do not fit its arrays.
        try:
            return cls._of_file(arrays, json.loads(marks["facts"]))
        except HeadPruneError:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            got = f"one whose metadata does not fit its arrays ({type(error).__name__}: {error})"
            raise CheckpointError(str(path), _MUST, got, _HINT) from error

    @classmethod
    def _of_file(cls, arrays: dict[str, NDArray[Any]], facts: Any) -> Self:
        sites = []
        for i, (name, kind, heads) in enumerate(facts["sites"]):
            weights, queries, keys = (arrays[f"{i}.{part}"] for part in _ARRAYS)
            _check_site(name, kind, heads)
            n, n_heads, n_queries, n_keys = weights.shape
            # Other shapes would fail only when somebody asks for this site.
            masks_fit = queries.shape == (n, n_queries) and keys.shape == (n, n_keys)
            if n_heads != len(heads) or not masks_fit:
                raise ValueError(f"{name} has {len(heads)} heads and weights {list(weights.shape)}")
            sites.append(SiteMaps(name, kind, tuple(heads), weights, queries, keys))
        image = facts["image"]
        if image is not None:
            image = (int(image[0]), int(image[1]))
        return cls(tuple(sites), _texts(facts["tokens"]), _texts(facts["targets"]), image)

    def __repr__(self) -> str:
        heads = sum(len(maps.heads) for maps in self.sites)
        return (
            f"AttentionMaps of {heads} heads at {len(self.sites)} sites, {self.n_examples} examples"
        )


def _read(path: str | Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Read the metadata and the arrays of a file, and check its hash."""
    from safetensors import SafetensorError, safe_open

    try:
        check_file(path)
        with safe_open(path, framework="np") as file:
            marks: dict[str, str] = file.metadata() or {}
            names = list(file.keys())
            types = {file.get_slice(name).get_dtype() for name in names}
            if not types <= {"F32", "BOOL"}:
                got = f"numbers of type {', '.join(sorted(types))}"
                raise CheckpointError(str(path), _MUST, got, _HINT)
            arrays = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), _MUST, reason(error), _HINT) from error
    if marks.get("headprune") != _MARK:
        raise CheckpointError(str(path), _MUST, "a file of something else", _HINT)
    if marks.get("sha256") != _digest(arrays, marks.get("facts", "")):
        raise CheckpointError(str(path), _MUST, "a damaged one", _HINT)
    return marks, arrays


def _check_site(name: Any, kind: Any, heads: Any) -> None:
    only_ints = set(map(type, heads)) == {int}
    if not isinstance(name, str) or kind not in ATTENTION_KINDS or not only_ints:
        raise TypeError(f"the site {name!r} has a name, kind or heads of a wrong type")


def _texts(rows: Any) -> tuple[tuple[str, ...], ...]:
    """Tokens as they were before JSON made lists of them."""
    return tuple(tuple(map(str, row)) for row in rows)


def _digest(arrays: dict[str, Any], facts: str) -> str:
    # Names and shapes count too: two arrays must not be exchanged.
    digest = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _labels(words: Sequence[Sequence[str]], example: int, count: int) -> tuple[str, ...]:
    """The tokens of an example, or positions where their number is another."""
    tokens = words[example] if words else ()
    if len(tokens) == count:
        return tuple(tokens)
    return tuple(map(str, range(count)))
