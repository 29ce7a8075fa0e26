"""AttentionPictures: attention maps of a few examples, small enough to lie beside a record and
inside a page."""

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
from headprune.maps.attention_maps import AttentionMaps
from headprune.maps.patterns import Pattern

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Bytes of weights, one each: 144 heads, 8 examples of 26 tokens. In a page they are a third more.
LIMIT = 800_000
#: Tokens that are shown at least; before that, examples are left out.
_FEWEST = 8
#: The row that is the mean over all queries of an image.
MEAN = -1


@dataclass(frozen=True)
class ShownExample:
    """One example.

    Args:
        title: What it is, such as ``test row 3, label 5``.
        tokens, targets: As in ``AttentionMaps``; of a long text those that are shown.
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
        patterns: What each head mostly does, by the whole maps; None where nothing was found.
        sizes: Of every example, the queries and keys that are shown.
        peaks: Of every example and head, the largest weight that is shown.
        weights: Of every example, one byte a weight in base64, ``[heads, queries, keys]``: 255 is
            the head's peak.
    """

    site: str
    kind: str
    heads: tuple[int, ...]
    patterns: tuple[Pattern | None, ...]
    sizes: tuple[tuple[int, int], ...]
    peaks: tuple[tuple[float, ...], ...]
    weights: tuple[str, ...]

    def __post_init__(self) -> None:
        n, heads = len(self.weights), len(self.heads)
        if (len(self.sizes), len(self.peaks), len(self.patterns)) != (n, n, heads):
            raise InvalidValue(
                f"the pictures of {self.site}",
                f"of {n} examples and {heads} heads",
                "other numbers",
            )
        for row in self.peaks:
            if len(row) != heads or not all(0 <= peak < math.inf for peak in row):
                raise InvalidValue(
                    f"the peaks of {self.site}", f"{heads} numbers >= 0 an example", row
                )
        for (queries, keys), text in zip(self.sizes, self.weights, strict=True):
            if min(queries, keys) < 0:
                raise InvalidValue(f"the sizes of {self.site}", "counts >= 0", (queries, keys))
            _check_bytes(f"the weights of {self.site}", text, heads * queries * keys)


@dataclass(frozen=True)
class AttentionPictures(Value):
    """What every head attended to in a few examples, one byte a weight, and what each head mostly
    does.

    Args:
        examples: The examples.
        sites: The pictures, module by module.
        image: Rows and columns of the patches, where keys are patches.
        rows: Of an image, the queries that are shown; ``MEAN`` is the mean over all. Empty: all,
            from the first.
        whole: False where maps were larger than what is shown of them.
    """

    examples: tuple[ShownExample, ...]
    sites: tuple[ShownSite, ...]
    image: tuple[int, int] | None = None
    rows: tuple[int, ...] = ()
    whole: bool = True

    def __post_init__(self) -> None:
        for site in self.sites:
            if len(site.weights) != len(self.examples):
                raise InvalidValue(
                    f"the weights of {site.site}",
                    f"of {len(self.examples)} examples",
                    len(site.weights),
                )
        if self.examples and not self.sites:
            raise InvalidValue("AttentionPictures.sites", "at least one", "none")
        if self.image is not None and min(self.image) < 1:
            raise InvalidValue(
                "AttentionPictures.image", "rows and columns of patches, both >= 1", self.image
            )

    @classmethod
    def of(
        cls, maps: AttentionMaps, examples: Sequence[ShownExample] = (), *, limit: int = LIMIT
    ) -> AttentionPictures:
        """From maps. What is too large is shown in part: of a text the first tokens, of an image
        the class token's view and the mean over all queries, and at last fewer examples. Words
        about heads rest on the whole maps.

        Args:
            maps: What ``hp.attention_maps`` returned.
            examples: Title and picture of every example; tokens are taken from the maps.
            limit: Bytes of weights at most.
        """
        named = examples or [ShownExample(f"example {i}") for i in range(maps.n_examples)]
        image = maps.image if maps.image is not None and _on_grid(maps) else None
        fit = _Fit(maps.n_examples, (), None)
        if fit.bytes(maps) > limit or image is not None:
            fit = _fit_image(maps, image, limit) if image is not None else _fit_text(maps, limit)
        told = [_told(maps, i, example, fit.longest) for i, example in enumerate(named[: fit.n])]
        whole = fit.n == maps.n_examples and fit.longest is None and len(fit.rows) != fit.own
        return cls(tuple(told), tuple(_sites(maps, fit)), image, fit.rows, whole)

    def __iter__(self) -> Iterator[HeadId]:
        return (HeadId(site.site, head) for site in self.sites for head in site.heads)

    def pattern(self, head: HeadId) -> Pattern | None:
        """What a head mostly does; None where nothing was found, or the head is not shown."""
        for site in self.sites:
            if site.site == head.site and head.head in site.heads:
                return site.patterns[site.heads.index(head.head)]
        return None

    def shown(self, head: HeadId, example: int) -> NDArray[np.float64]:
        """The weights of a head in an example, ``[queries, keys]``, to a 255th of the largest."""
        import numpy as np

        site = next(s for s in self.sites if s.site == head.site)
        place = site.heads.index(head.head)
        grid = np.frombuffer(base64.b64decode(site.weights[example]), np.uint8)
        grid = grid.reshape(len(site.heads), *site.sizes[example])
        weights: NDArray[np.float64] = grid[place] * (site.peaks[example][place] / 255)
        return weights

    def __str__(self) -> str:
        said = sum(p is not None for site in self.sites for p in site.patterns)
        heads = sum(len(site.heads) for site in self.sites)
        return (
            f"AttentionPictures of {heads} heads in {len(self.examples)} examples; words for {said}"
            " of them"
        )


def _check_bytes(where: str, text: str, count: int) -> None:
    try:
        found = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        found = -1
    if found != count:
        raise InvalidValue(
            where, f"{count} bytes in base64", "something else" if found < 0 else f"{found} bytes"
        )


def _on_grid(maps: AttentionMaps) -> bool:
    """Whether all sites attend to the same tokens, which end in the image's patches."""
    assert maps.image is not None
    sizes = {s.weights.shape[2:] for s in maps.sites}
    return len(sizes) == 1 and all(q == k >= maps.image[0] * maps.image[1] for q, k in sizes)


def _size(maps: AttentionMaps, site: int, example: int) -> tuple[int, int]:
    found = maps.sites[site]
    return int(found.queries[example].sum()), int(found.keys[example].sum())


@dataclass(frozen=True)
class _Fit:
    """How much is shown: examples, rows of an image's maps, tokens of a text; ``own`` of the rows
    are not patches."""

    n: int
    rows: tuple[int, ...]
    longest: int | None
    own: int = -1

    def bytes(self, maps: AttentionMaps) -> int:
        """What that takes, one byte a weight."""
        total = 0
        for s, site in enumerate(maps.sites):
            for example in range(self.n):
                queries, keys = _size(maps, s, example)
                queries = len(self.rows) or min(queries, self.longest or queries)
                total += len(site.heads) * queries * min(keys, self.longest or keys)
        return total


def _fit_image(maps: AttentionMaps, image: tuple[int, int], limit: int) -> _Fit:
    queries = maps.sites[0].weights.shape[2]
    every, own = (MEAN, *range(queries)), 1 + queries - image[0] * image[1]
    fit = _Fit(maps.n_examples, every, None, own)
    if fit.bytes(maps) > limit:
        fit = replace(fit, rows=every[:own])
    return _fewer(fit, maps, limit)


def _fit_text(maps: AttentionMaps, limit: int) -> _Fit:
    longest = max(
        max(_size(maps, s, i)) for s in range(len(maps.sites)) for i in range(maps.n_examples)
    )
    fits = (_Fit(maps.n_examples, (), n) for n in range(longest - 1, _FEWEST, -1))
    fit = next((f for f in fits if f.bytes(maps) <= limit), _Fit(maps.n_examples, (), _FEWEST))
    return _fewer(fit, maps, limit)


def _fewer(fit: _Fit, maps: AttentionMaps, limit: int) -> _Fit:
    """The same with as many examples as fit, one at least."""
    while fit.n > 1 and fit.bytes(maps) > limit:
        fit = replace(fit, n=fit.n - 1)
    return fit


def _told(maps: AttentionMaps, i: int, example: ShownExample, longest: int | None) -> ShownExample:
    tokens, targets = (
        tuple(words[i][:longest]) if words else () for words in (maps.tokens, maps.targets)
    )
    return ShownExample(
        example.title, tokens, targets, example.pixels, example.height, example.width
    )


def _sites(maps: AttentionMaps, fit: _Fit) -> Iterator[ShownSite]:
    import numpy as np

    n, rows, longest = fit.n, fit.rows, fit.longest
    for site in maps.sites:
        sizes, peaks, texts = [], [], []
        for example in range(n):
            grid = site.weights[example][:, site.queries[example]][:, :, site.keys[example]]
            if rows:
                mean = grid.mean(1, keepdims=True)
                grid = np.concatenate(
                    [mean if row == MEAN else grid[:, row : row + 1] for row in rows], 1
                )
            grid = grid[:, : None if rows else longest, :longest]
            largest = grid.max((1, 2), initial=0.0)
            scaled = grid * (255 / np.where(largest > 0, largest, 1))[:, None, None]
            sizes.append((grid.shape[1], grid.shape[2]))
            peaks.append(tuple(float(f"{v:.4g}") for v in largest))
            texts.append(base64.b64encode(np.rint(scaled).astype(np.uint8).tobytes()).decode())
        patterns = tuple(maps.mostly(HeadId(site.site, head)) for head in site.heads)
        yield ShownSite(
            site.site, site.kind, site.heads, patterns, tuple(sizes), tuple(peaks), tuple(texts)
        )
