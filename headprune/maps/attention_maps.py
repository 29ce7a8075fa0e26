"""AttentionMaps: what every head attended to in some examples, a value that is saved; and what a
head mostly does."""

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
from headprune.core.heads import KINDS, HeadId
from headprune.core.opening import check_file, reason
from headprune.maps.patterns import Pattern, find_patterns, main_pattern

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

_MARK = "AttentionMaps 1"
_HINT = "Make them again with hp.attention_maps."


@dataclass(frozen=True)
class SiteMaps:
    """The maps of one attention module.

    Args:
        site: Its name.
        kind: ``self``, ``causal`` or ``cross``.
        heads: Original indices of its heads.
        weights: ``[examples, heads, queries, keys]`` in fp32; 0 at padding.
        queries, keys: Which queries and keys are no padding, ``[examples, queries]`` and
        ``[examples, keys]``.
    """

    site: str
    kind: str
    heads: tuple[int, ...]
    weights: NDArray[np.float32]
    queries: NDArray[np.bool_]
    keys: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """What every head attended to, example by example; ``maps[HeadId(site, head)]`` is
    ``[examples, queries, keys]``.

    Args:
        sites: The maps, module by module.
        tokens: The tokens that the model reads, in words, a row an example, where they are known;
            without padding.
        targets: Those that the decoder of an encoder-decoder reads.
        image: Rows and columns of the image's patches, where keys are patches; tokens before them
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
            if len(getattr(self, name)) not in (0, n):
                raise InvalidValue(
                    f"AttentionMaps.{name}",
                    f"one row for each of {n} examples",
                    len(getattr(self, name)),
                )

    @property
    def n_examples(self) -> int:
        """Examples."""
        return len(self.sites[0].weights)

    @cached_property
    def _places(self) -> dict[str, SiteMaps]:
        return {s.site: s for s in self.sites}

    def of(self, site: str) -> SiteMaps:
        """The maps of one module.

        Raises:
            UnknownName: there are none of that name.
        """
        if site not in self._places:
            raise UnknownName(
                "attention map", "a site that was looked at", site, did_you_mean(site, self._places)
            )
        return self._places[site]

    def __getitem__(self, head: HeadId) -> NDArray[np.float32]:
        found = self.of(head.site)
        if head.head not in found.heads:
            raise InvalidValue(
                f"attention map of {head.site}", f"one of its heads, {found.heads}", head.head
            )
        return found.weights[:, found.heads.index(head.head)]

    def __iter__(self) -> Iterator[HeadId]:
        return (HeadId(s.site, head) for s in self.sites for head in s.heads)

    def labels(self, site: str, example: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What to write beside the queries and under the keys of an example, padding left out:
        tokens or positions."""
        found = self.of(site)
        queries, keys = (int(mask[example].sum()) for mask in (found.queries, found.keys))
        beside, under = self._words(found.kind)
        return _labels(beside[example] if beside else (), queries), _labels(
            under[example] if under else (), keys
        )

    def _words(self, kind: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Tokens of queries and of keys of a kind of attention."""
        if kind == "cross":
            return self.targets, self.tokens
        own = self.targets if kind == "causal" and self.targets else self.tokens
        return own, own

    def shown(self, head: HeadId, example: int) -> NDArray[np.float32]:
        """One head's weights in one example, ``[queries, keys]`` without padding."""
        found = self.of(head.site)
        weights: NDArray[np.float32] = self[head][example][found.queries[example]][
            :, found.keys[example]
        ]
        return weights

    def patterns(self, head: HeadId) -> tuple[Pattern, ...]:
        """Every pattern that can be looked for in the head's maps, the one with the largest share
        first.

        ``previous token``, ``own position``, ``next token`` and ``first token`` where queries and
        keys are the same tokens, ``punctuation`` where tokens were given; of an image, the class
        token and the neighbours on the grid. ``one key`` anywhere: the largest weight of each
        query; and of two examples or more ``the same positions in every example``: the weight that
        a query has on the same keys in two of them.
        """
        import numpy as np

        found = self.of(head.site)
        shown = [self.shown(head, example).astype(np.float64) for example in range(self.n_examples)]
        return find_patterns(shown, found.kind, self._words(found.kind)[1], self.image)

    def mostly(self, head: HeadId) -> Pattern | None:
        """What the head mostly does, where its weight supports a word: half of it, and twice what
        even attention has; see ``headprune.maps.patterns.main_pattern``. Else None."""
        return main_pattern(self.patterns(head))

    def save(self, path: str | Path) -> Path:
        """Writes them as one safetensors file, whole or not at all."""
        arrays = {
            f"{i}.{name}": getattr(s, name) for i, s in enumerate(self.sites) for name in _ARRAYS
        }
        sites = [[s.site, s.kind, s.heads] for s in self.sites]
        facts = json.dumps(
            {"sites": sites, "tokens": self.tokens, "targets": self.targets, "image": self.image}
        )
        marks = {"headprune": _MARK, "facts": facts, "sha256": _digest(arrays, facts)}
        return write_atomic(Path(path), packed(arrays, marks))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what ``save`` wrote.

        Raises:
            CheckpointError: no such file, a damaged one, or one of something else.
        """
        from safetensors import SafetensorError, safe_open

        must = "a file of attention maps"
        try:
            check_file(path)
            with safe_open(path, framework="np") as file:
                marks: dict[str, str] = file.metadata() or {}
                types = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118, no mapping
                if not types <= {"F32", "BOOL"}:
                    raise CheckpointError(
                        str(path), must, f"numbers of type {', '.join(sorted(types))}", _HINT
                    )
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
        except (OSError, SafetensorError) as error:
            raise CheckpointError(str(path), must, reason(error), _HINT) from error
        if marks.get("headprune") != _MARK:
            raise CheckpointError(str(path), must, "a file of something else", _HINT)
        if marks.get("sha256") != _digest(arrays, marks.get("facts", "")):
            raise CheckpointError(str(path), must, "a damaged one", _HINT)
        try:
            return cls._of_file(arrays, json.loads(marks["facts"]))
        except HeadPruneError:
            raise
        except (
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:  # no such words fit
            got = f"one whose words do not fit its numbers ({type(error).__name__}: {error})"
            raise CheckpointError(str(path), must, got, _HINT) from error

    @classmethod
    def _of_file(cls, arrays: dict[str, NDArray[Any]], facts: Any) -> Self:
        sites = []
        for i, (name, kind, heads) in enumerate(facts["sites"]):
            weights, queries, keys = (arrays[f"{i}.{part}"] for part in _ARRAYS)
            n, _, n_queries, n_keys = weights.shape
            if (
                not isinstance(name, str)
                or kind not in KINDS
                or {type(head) for head in heads} != {int}
            ):
                raise TypeError(
                    f"the site {name!r} is described by other things than words and heads"
                )
            if (
                weights.shape[1] != len(heads)
                or queries.shape != (n, n_queries)
                or keys.shape != (n, n_keys)
            ):
                raise ValueError(f"{name} has {len(heads)} heads and weights {list(weights.shape)}")
            sites.append(SiteMaps(name, kind, tuple(heads), weights, queries, keys))
        tokens, targets = (
            tuple(tuple(map(str, row)) for row in facts[name]) for name in ("tokens", "targets")
        )
        image = None if facts["image"] is None else (int(facts["image"][0]), int(facts["image"][1]))
        return cls(tuple(sites), tokens, targets, image)

    def __repr__(self) -> str:
        heads = sum(len(s.heads) for s in self.sites)
        return (
            f"AttentionMaps of {heads} heads at {len(self.sites)} sites, {self.n_examples} examples"
        )


_ARRAYS = ("weights", "queries", "keys")


def _digest(arrays: dict[str, Any], facts: str) -> str:
    found = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        found.update(
            f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode() + arrays[name].tobytes()
        )
    return found.hexdigest()


def _labels(words: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(words) if len(words) == count else tuple(map(str, range(count)))
