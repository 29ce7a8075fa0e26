"""Words for what a head does: patterns in its attention maps, each with its share of the weight."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Grid: TypeAlias = NDArray[np.float64]
    Places: TypeAlias = NDArray[np.bool_]

#: Share of its weight that a head's main pattern must have.
MOSTLY = 0.5
#: Every head with a sharp row has this pattern, so it is never the main one.
ONE_KEY = "one key"
#: The main pattern only where no pattern names the positions.
SAME_POSITIONS = "the same positions in every example"
#: Marks of word pieces, which do not make punctuation a word.
_PIECES = "#▁ĠĊ"
#: Neighbours of a patch: name, rows down and columns to the right.
_NEIGHBOURS = (
    ("own patch", 0, 0),
    ("patch to the left", 0, -1),
    ("patch to the right", 0, 1),
    ("patch above", -1, 0),
    ("patch below", 1, 0),
)


@dataclass(frozen=True)
class Pattern:
    """A pattern of a head's attention.

    Args:
        name: In words, such as ``previous token``.
        share: Mean weight on the keys of the pattern, over all queries that have such a key.
        chance: The same share of attention that is even over the keys that a query may see.
    """

    name: str
    share: float
    chance: float

    def __str__(self) -> str:
        return (
            f"{self.name} ({100 * self.share:.0f} % of its weight; even attention:"
            f" {100 * self.chance:.0f} %)"
        )


def find_patterns(
    maps: Sequence[Grid], kind: str, keys: Sequence[Sequence[str]], image: tuple[int, int] | None
) -> tuple[Pattern, ...]:
    """Measure every pattern in one head's maps, the one with the largest share first.

    Args:
        maps: ``[queries, keys]`` of every example, without padding.
        kind: ``self``, ``causal`` or ``cross``.
        keys: Tokens of the keys of every example; empty where they are not known.
        image: Rows and columns of the patches, where keys are patches.
    """
    import numpy as np

    # For each pattern one pair per query: its weight there, and that of even attention.
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for example, weights in enumerate(maps):
        queries, n_keys = weights.shape
        if queries != n_keys and kind == "causal":
            continue
        even = _even(weights.shape, kind)
        words = keys[example] if keys else ()
        # 1. Patterns of keys that are known beforehand.
        for name, places in _places_of(weights.shape, kind, words, image).items():
            rows = (places & (even > 0)).any(1)  # queries that may see such a key
            on_places = (weights * places).sum(1)[rows].tolist()
            by_chance = (even * places).sum(1)[rows].tolist()
            pairs[name].extend(zip(on_places, by_chance, strict=True))
        # 2. The largest weight of each query, on whichever key it is.
        largest = weights.max(1).tolist()
        pairs[ONE_KEY].extend(zip(largest, even.max(1).tolist(), strict=True))
        # 3. Weight on the same keys as in the next example; the last is compared with the first.
        if len(maps) > 1:
            following = maps[(example + 1) % len(maps)]
            pairs[SAME_POSITIONS].extend(_overlaps(weights, following, even))

    patterns = []
    for name, values in pairs.items():
        if values:
            share, chance = np.mean(values, axis=0)
            patterns.append(Pattern(name, float(share), float(chance)))
    return tuple(sorted(patterns, key=lambda pattern: -pattern.share))


def main_pattern(patterns: Sequence[Pattern]) -> Pattern | None:
    """Choose the pattern that says what a head mostly does; None where no pattern does.

    That is the first named pattern that has half of the weight, and either 90 % of it or twice
    what even attention has. Otherwise it is ``the same positions in every example``, if that has
    half of the weight and twice what even attention has.

    Args:
        patterns: Patterns, the one with the largest share first.
    """
    for pattern in patterns:
        is_named = pattern.name not in (ONE_KEY, SAME_POSITIONS)
        # 90 % is always enough, also where uniform attention has more than half of that.
        if is_named and pattern.share >= max(MOSTLY, min(2 * pattern.chance, 0.9)):
            return pattern
    for pattern in patterns:
        # Even attention has the same positions too, so here 90 % alone is not enough.
        is_same = pattern.name == SAME_POSITIONS
        if is_same and pattern.share >= max(MOSTLY, 2 * pattern.chance):
            return pattern
    return None


def _even(shape: tuple[int, ...], kind: str) -> Grid:
    """Attention that is even over the keys that each query may see."""
    import numpy as np

    visible = np.tri(shape[0], shape[1]) if kind == "causal" else np.ones(shape)
    weights: Grid = visible / visible.sum(1, keepdims=True)
    return weights


def _overlaps(weights: Grid, other: Grid, even: Grid) -> list[tuple[float, float]]:
    """Compare two examples, query by query.

    Returns:
        For every query of both: the weight on the same keys in both, and the weight that the first
        shares with even attention.
    """
    import numpy as np

    # Examples differ in length: only queries and keys that both have.
    queries = min(len(weights), len(other))
    keys = min(weights.shape[1], other.shape[1])
    shared = np.minimum(weights[:queries, :keys], other[:queries, :keys]).sum(1)  # [queries]
    chance = np.minimum(weights, even).sum(1)[:queries]
    return list(zip(shared.tolist(), chance.tolist(), strict=True))


def _places_of(
    shape: tuple[int, ...], kind: str, words: Sequence[str], image: tuple[int, int] | None
) -> Mapping[str, Places]:
    """The places of each pattern, ``[queries, keys]``."""
    import numpy as np

    queries, keys = shape
    if image is not None and keys >= image[0] * image[1]:
        return _patches(queries, keys, image)
    places: dict[str, Places] = {}
    if kind != "cross" and queries == keys:
        places["previous token"] = np.eye(queries, k=-1, dtype=bool)
        places["own position"] = np.eye(queries, dtype=bool)
        if kind != "causal":
            places["next token"] = np.eye(queries, k=1, dtype=bool)
        places["first token"] = np.zeros((queries, keys), bool)
        places["first token"][1:, 0] = True  # for the first token it is its own position
    if len(words) == keys:
        marks = np.array(list(map(_is_punctuation, words)))  # [keys]
        places["punctuation"] = np.broadcast_to(marks, (queries, keys))
    return places


@lru_cache(maxsize=4)  # every head of a model asks for the same
def _patches(queries: int, keys: int, image: tuple[int, int]) -> Mapping[str, Places]:
    """The places of an image's patterns: neighbours on the grid, and the model's own tokens.

    The model's own tokens come before the patches.
    """
    import numpy as np

    rows, columns = image
    n_own = keys - rows * columns
    places: dict[str, Places] = {}
    if n_own:
        name = "class token" if n_own == 1 else "the model's own tokens"
        places[name] = np.zeros((queries, keys), bool)
        places[name][n_own:, :n_own] = True
    if queries != keys:
        return places
    for name, down, right in _NEIGHBOURS:
        places[name] = np.zeros((queries, keys), bool)
        # Patches at the edge have no neighbour on that side.
        for y in range(max(0, -down), min(rows, rows - down)):
            for x in range(max(0, -right), min(columns, columns - right)):
                query = n_own + y * columns + x
                places[name][query, query + down * columns + right] = True
    return places


def _is_punctuation(word: str) -> bool:
    """Whether a token is only punctuation; separators such as [SEP] are not."""
    bare = word.strip().strip(_PIECES)
    return bool(bare) and all(character in string.punctuation for character in bare)
