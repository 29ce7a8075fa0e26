"""AttentionPictures: attention maps of a few examples, small enough for a record and a page."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headprune.core.codec import Value
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId
from headprune.maps.attention_maps import AttentionMaps, SiteMaps
from headprune.maps.patterns import Pattern

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Most bytes of weights, one each: 144 heads, 8 examples of 26 tokens. A page has a third more.
LIMIT = 800_000
#: Fewest tokens of a text that is shown in part; then examples are dropped.
_FEWEST = 8
#: Number of the row that is the mean over all queries of an image.
MEAN = -1


@dataclass(frozen=True)
class ShownExample:
    """One example.

    Args:
        title: Its name, such as ``test row 3, label 5``.
        tokens, targets: As in ``AttentionMaps``; of a long text the shown ones.
        pixels: Its picture, RGB bytes in base64; empty for text.
        height, width: Of that picture.
    """

    title: str
    tokens: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    pixels: str = ""
    height: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        _check_bytes(f"the picture of {self.title}", self.pixels, 3 * self.height * self.width)


@dataclass(frozen=True)
class ShownSite:
    """The pictures of one attention module.

    Args:
        site: Its name.
        kind: ``self``, ``causal`` or ``cross``.
        heads: Original indices of its heads.
        patterns: The main pattern of each head in the whole maps; None where it has none.
        sizes: For every example, the numbers of shown queries and keys.
        peaks: For every example and head, the largest shown weight.
        weights: For every example, one byte per weight in base64, ``[heads, queries, keys]``: 255
            is the head's peak.
    """

    site: str
    kind: str
    heads: tuple[int, ...]
    patterns: tuple[Pattern | None, ...]
    sizes: tuple[tuple[int, int], ...]
    peaks: tuple[tuple[float, ...], ...]
    weights: tuple[str, ...]

    def __post_init__(self) -> None:
        n_examples, n_heads = len(self.weights), len(self.heads)
        lengths = (len(self.sizes), len(self.peaks), len(self.patterns))
        if lengths != (n_examples, n_examples, n_heads):
            must = f"of {n_examples} examples and {n_heads} heads"
            raise InvalidValue(f"the pictures of {self.site}", must, "other numbers")
        for row in self.peaks:
            if len(row) != n_heads or not all(0 <= peak < math.inf for peak in row):
                must = f"{n_heads} numbers >= 0 per example"
                raise InvalidValue(f"the peaks of {self.site}", must, row)
        for (queries, keys), text in zip(self.sizes, self.weights, strict=True):
            if min(queries, keys) < 0:
                raise InvalidValue(f"the sizes of {self.site}", "counts >= 0", (queries, keys))
            _check_bytes(f"the weights of {self.site}", text, n_heads * queries * keys)


@dataclass(frozen=True)
class AttentionPictures(Value):
    """Attention of every head in a few examples, one byte per weight, and its main pattern.

    Args:
        examples: The examples.
        sites: The pictures, module by module.
        image: Rows and columns of the patches, where keys are patches.
        rows: Of an image, the shown queries; ``MEAN`` is the mean over all. Empty: all of them.
        whole: False where only a part of the maps is shown.
    """

    examples: tuple[ShownExample, ...]
    sites: tuple[ShownSite, ...]
    image: tuple[int, int] | None = None
    rows: tuple[int, ...] = ()
    whole: bool = True

    def __post_init__(self) -> None:
        for site in self.sites:
            if len(site.weights) != len(self.examples):
                must = f"of {len(self.examples)} examples"
                raise InvalidValue(f"the weights of {site.site}", must, len(site.weights))
        if self.examples and not self.sites:
            raise InvalidValue("AttentionPictures.sites", "at least one", "none")
        if self.image is not None and min(self.image) < 1:
            must = "rows and columns of patches, both >= 1"
            raise InvalidValue("AttentionPictures.image", must, self.image)

    @classmethod
    def of(
        cls, maps: AttentionMaps, examples: Sequence[ShownExample] = (), *, limit: int = LIMIT
    ) -> AttentionPictures:
        """Draw maps; maps that are too large are shown in part.

        Of a text the first tokens are shown; of an image the rows of the model's own tokens and the
        mean over all queries. If that is still too large, fewer examples are. Patterns are always
        those of the whole maps.

        Args:
            maps: The result of ``hp.attention_maps``.
            examples: Title and picture of every example; tokens are taken from the maps.
            limit: Most bytes of weights.
        """
        titled = examples or [ShownExample(f"example {i}") for i in range(maps.n_examples)]
        # 1. How much fits.
        image = None
        if maps.image is not None and _on_grid(maps):
            image = maps.image
            part = _image_part(maps, image, limit)
        else:
            part = _text_part(maps, limit)
        # 2. Titles and tokens of the shown examples, then the weights.
        shown = []
        for i, example in enumerate(titled[: part.n_examples]):
            tokens = _first_words(maps.tokens, i, part.longest)
            targets = _first_words(maps.targets, i, part.longest)
            shown.append(replace(example, tokens=tokens, targets=targets))
        sites = [_draw(maps, site, part) for site in maps.sites]
        whole = part.n_examples == maps.n_examples and not part.is_cut
        return cls(tuple(shown), tuple(sites), image, part.rows, whole)

    def __iter__(self) -> Iterator[HeadId]:
        for site in self.sites:
            for head in site.heads:
                yield HeadId(site.site, head)

    def pattern(self, head: HeadId) -> Pattern | None:
        """The main pattern of a head; None where it has none, or the head is not shown."""
        for site in self.sites:
            if site.site == head.site and head.head in site.heads:
                return site.patterns[site.heads.index(head.head)]
        return None

    def shown(self, head: HeadId, example: int) -> NDArray[np.float64]:
        """The shown weights of a head, ``[queries, keys]``, exact to a 255th of the largest."""
        import numpy as np

        site = next(site for site in self.sites if site.site == head.site)
        place = site.heads.index(head.head)
        # A byte is a 255th of the head's peak.
        numbers = np.frombuffer(base64.b64decode(site.weights[example]), np.uint8)
        grid = numbers.reshape(len(site.heads), *site.sizes[example])  # [heads, queries, keys]
        weights: NDArray[np.float64] = grid[place] * (site.peaks[example][place] / 255)
        return weights

    def __str__(self) -> str:
        patterns = list(map(self.pattern, self))
        n_named = len(patterns) - patterns.count(None)
        return (
            f"attention of {len(patterns)} heads on {len(self.examples)} examples: {n_named} of"
            " these heads mostly do one thing that has a name"
        )


def _check_bytes(where: str, text: str, count: int) -> None:
    try:
        length = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        length = -1
    if length != count:
        got = "something else" if length < 0 else f"{length} bytes"
        raise InvalidValue(where, f"{count} bytes in base64", got)


def _on_grid(maps: AttentionMaps) -> bool:
    """Whether all sites attend to the same tokens, which end in the image's patches."""
    assert maps.image is not None
    # Tokens before the patches are the model's own.
    n_patches = maps.image[0] * maps.image[1]
    sizes = {site.weights.shape[2:] for site in maps.sites}  # (queries, keys)
    if len(sizes) != 1:
        return False
    queries, keys = sizes.pop()
    return bool(queries == keys >= n_patches)


def _size(site: SiteMaps, example: int) -> tuple[int, int]:
    """Queries and keys of an example that are no padding."""
    return int(site.queries[example].sum()), int(site.keys[example].sum())


@dataclass(frozen=True)
class _Part:
    """The part of the maps that is shown.

    Args:
        n_examples: How many examples, from the first.
        rows: Of an image, the shown queries, with ``MEAN``; empty: all.
        longest: Of a text, how many tokens, from the first; None: all.
        is_cut: Whether rows or tokens are missing.
    """

    n_examples: int
    rows: tuple[int, ...] = ()
    longest: int | None = None
    is_cut: bool = False

    def n_bytes(self, maps: AttentionMaps) -> int:
        """Bytes of its weights, one each."""
        total = 0
        for site in maps.sites:
            for example in range(self.n_examples):
                queries, keys = _size(site, example)
                if self.longest is not None:
                    queries = min(queries, self.longest)
                    keys = min(keys, self.longest)
                if self.rows:
                    queries = len(self.rows)
                total += len(site.heads) * queries * keys
        return total


def _image_part(maps: AttentionMaps, image: tuple[int, int], limit: int) -> _Part:
    """All queries and their mean if they fit, else only the mean and the model's own tokens."""
    queries = maps.sites[0].weights.shape[2]
    n_own = queries - image[0] * image[1]
    part = _Part(maps.n_examples, rows=(MEAN, *range(queries)))
    if part.n_bytes(maps) > limit:
        part = replace(part, rows=(MEAN, *range(n_own)), is_cut=True)
    return _with_fewer_examples(part, maps, limit)


def _text_part(maps: AttentionMaps, limit: int) -> _Part:
    """All tokens if they fit, else as many as fit."""
    part = _Part(maps.n_examples)
    if part.n_bytes(maps) <= limit:
        return part
    # The longest text decides where to start.
    longest = 0
    for site in maps.sites:
        for example in range(maps.n_examples):
            longest = max(longest, *_size(site, example))
    part = replace(part, longest=max(longest - 1, _FEWEST), is_cut=True)
    # One token at a time: sizes are cheap to count.
    while part.longest is not None and part.longest > _FEWEST and part.n_bytes(maps) > limit:
        part = replace(part, longest=part.longest - 1)
    return _with_fewer_examples(part, maps, limit)


def _with_fewer_examples(part: _Part, maps: AttentionMaps, limit: int) -> _Part:
    """The same with as many examples as fit, at least one."""
    while part.n_examples > 1 and part.n_bytes(maps) > limit:
        part = replace(part, n_examples=part.n_examples - 1)
    return part


def _first_words(
    words: Sequence[Sequence[str]], example: int, longest: int | None
) -> tuple[str, ...]:
    return tuple(words[example][:longest]) if words else ()


def _draw(maps: AttentionMaps, site: SiteMaps, part: _Part) -> ShownSite:
    """Draw the shown part of one module's maps, one byte per weight."""
    import numpy as np

    sizes, peaks, texts = [], [], []
    for example in range(part.n_examples):
        # 1. The weights without padding, [heads, queries, keys].
        of_queries = site.weights[example][:, site.queries[example]]
        grid = of_queries[:, :, site.keys[example]]
        # 2. The shown queries and keys.
        if part.rows:
            grid = _rows(grid, part.rows)
        grid = grid[:, : part.longest, : part.longest]
        # 3. Each head scaled to its own peak; a head without any weight stays at 0.
        largest = grid.max((1, 2), initial=0.0)  # [heads]
        scaled = grid * (255 / np.where(largest > 0, largest, 1))[:, None, None]
        sizes.append((grid.shape[1], grid.shape[2]))
        peaks.append(tuple(float(f"{peak:.4g}") for peak in largest))
        texts.append(base64.b64encode(np.rint(scaled).astype(np.uint8).tobytes()).decode())
    patterns = [maps.mostly(HeadId(site.site, head)) for head in site.heads]
    return ShownSite(
        site=site.site,
        kind=site.kind,
        heads=site.heads,
        patterns=tuple(patterns),
        sizes=tuple(sizes),
        peaks=tuple(peaks),
        weights=tuple(texts),
    )


def _rows(grid: NDArray[np.float32], rows: Sequence[int]) -> NDArray[np.float32]:
    """Some queries of ``[heads, queries, keys]``; ``MEAN`` is the mean over all of them."""
    import numpy as np

    parts = []
    for row in rows:
        if row == MEAN:
            parts.append(grid.mean(1, keepdims=True))
        else:
            parts.append(grid[:, row : row + 1])
    return np.concatenate(parts, 1)
