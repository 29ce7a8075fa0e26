"""What a head does, in words: patterns that its attention maps are searched for, each with its
share of the weight."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Grid: TypeAlias = NDArray[np.float64]
    Places: TypeAlias = NDArray[np.bool_]

#: A head is said to do what this share of its weight supports.
MOSTLY = 0.5
#: Holds for every head with a sharp row, so it is no word for what a head does.
ONE_KEY = "one key"
#: Said of a head only where nothing says which positions they are.
SAME_POSITIONS = "the same positions in every example"
#: Marks of word pieces, which do not make punctuation a word.
_PIECES = "#▁ĠĊ"


@dataclass(frozen=True)
class Pattern:
    """What a head does, and how much of its weight says so.

    Args:
        name: In words, such as ``previous token``.
        share: Mean weight on what the name says, over all queries that have such a key.
        chance: What attention that is even over the keys that a query may see would have.
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
    """Every pattern that can be looked for in one head's maps, the one with the largest share
    first.

    Args:
        maps: ``[queries, keys]`` of every example, without padding.
        kind: ``self``, ``causal`` or ``cross``.
        keys: Tokens under the keys of every example; empty where they are not known.
        image: Rows and columns of the patches, where keys are patches.
    """
    import numpy as np

    sums: dict[str, list[tuple[float, float]]] = {}
    for example, weights in enumerate(maps):
        if weights.shape[0] != weights.shape[1] and kind == "causal":
            continue
        even = _even(weights.shape, kind)
        for name, wanted in _wanted(
            weights.shape, kind, keys[example] if keys else (), image
        ).items():
            rows = (wanted & (even > 0)).any(1)
            values = ((m * wanted).sum(1)[rows] for m in (weights, even))
            sums.setdefault(name, []).extend(zip(*(v.tolist() for v in values), strict=True))
        sums.setdefault(ONE_KEY, []).extend(
            zip(weights.max(1).tolist(), even.max(1).tolist(), strict=True)
        )
        if len(maps) > 1:
            pairs = _overlaps(weights, maps[(example + 1) % len(maps)], even)
            sums.setdefault(SAME_POSITIONS, []).extend(pairs)
    every = [
        Pattern(name, *map(float, np.mean(pairs, axis=0))) for name, pairs in sums.items() if pairs
    ]
    return tuple(sorted(every, key=lambda p: -p.share))


def main_pattern(found: Sequence[Pattern]) -> Pattern | None:
    """What a head mostly does: the named pattern with the largest share, if that is at least half
    of its weight and twice what even attention would have. Else
    ``the same positions in every example``, if that holds for it; even attention has its positions
    in common too, so there the factor of two is asked in full. Else None."""
    named = [p for p in found if p.name not in (ONE_KEY, SAME_POSITIONS)]
    best = next((p for p in named if p.share >= max(MOSTLY, min(2 * p.chance, 0.9))), None)
    same = (p for p in found if p.name == SAME_POSITIONS and p.share >= max(MOSTLY, 2 * p.chance))
    return best or next(same, None)


def _even(shape: tuple[int, ...], kind: str) -> Grid:
    """Attention that is even over the keys that each query may see."""
    import numpy as np

    seen = np.tri(shape[0], shape[1]) if kind == "causal" else np.ones(shape)
    shares: Grid = seen / seen.sum(1, keepdims=True)
    return shares


def _overlaps(weights: Grid, other: Grid, even: Grid) -> list[tuple[float, float]]:
    """For every query that both examples have: the weight that lies on the same keys in both, and
    what even attention has in common with it."""
    import numpy as np

    queries, keys = (min(a, b) for a, b in zip(weights.shape, other.shape, strict=True))
    first, second = weights[:queries, :keys], other[:queries, :keys]
    shared = np.minimum(first, second).sum(1)
    chance = np.minimum(weights, even).sum(1)[:queries]
    return list(zip(shared.tolist(), chance.tolist(), strict=True))


def _wanted(
    shape: tuple[int, ...], kind: str, words: Sequence[str], image: tuple[int, int] | None
) -> dict[str, Places]:
    """Which weights each pattern is about, ``[queries, keys]``."""
    import numpy as np

    queries, keys = shape
    if image is not None and keys >= image[0] * image[1]:
        return _patches(queries, keys, image)
    wanted: dict[str, Places] = {}
    if kind != "cross" and queries == keys:
        shifts = {"previous token": -1, "own position": 0, "next token": 1}
        if kind == "causal":
            del shifts["next token"]
        wanted = {name: np.eye(queries, k=shift, dtype=bool) for name, shift in shifts.items()}
        wanted["first token"] = np.zeros((queries, keys), bool)
        wanted["first token"][1:, 0] = True  # of the first token itself it is its own position
    if len(words) == keys:
        marks = np.array([_is_punctuation(word) for word in words])
        wanted["punctuation"] = np.broadcast_to(marks, (queries, keys))
    return wanted


@lru_cache(maxsize=4)  # every head of a model asks for the same
def _patches(queries: int, keys: int, image: tuple[int, int]) -> dict[str, Places]:
    """The same for an image: neighbours on the grid, and the tokens before the patches, which are
    the model's own."""
    import numpy as np

    rows, columns = image
    own = keys - rows * columns
    wanted: dict[str, Places] = {}
    if own:
        name = "class token" if own == 1 else "the model's own tokens"
        wanted[name] = np.zeros((queries, keys), bool)
        wanted[name][own:, :own] = True
    if queries != keys:
        return wanted
    for name, down, right in _NEIGHBOURS:
        places = np.zeros((queries, keys), bool)
        for y in range(max(0, -down), min(rows, rows - down)):
            for x in range(max(0, -right), min(columns, columns - right)):
                places[own + y * columns + x, own + (y + down) * columns + x + right] = True
        wanted[name] = places
    return wanted


#: Name, rows down and columns to the right.
_NEIGHBOURS = (
    ("own patch", 0, 0),
    ("patch to the left", 0, -1),
    ("patch to the right", 0, 1),
    ("patch above", -1, 0),
    ("patch below", 1, 0),
)


def _is_punctuation(word: str) -> bool:
    """Whether a token is nothing but punctuation; word pieces' marks and separators such as [SEP]
    are none."""
    bare = word.strip().strip(_PIECES)
    return bool(bare) and all(c in string.punctuation for c in bare)
