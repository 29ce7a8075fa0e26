"""What heads attend to: data for the page's pictures, and a table of patterns for both reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headprune.core.display import clean
from headprune.core.heads import HeadId
from headprune.core.record import RunRecord
from headprune.maps.patterns import Pattern
from headprune.maps.pictures import MEAN, AttentionPictures, ShownExample, ShownSite
from headprune.report.formats import fixed
from headprune.report.heatmap import by_kind, short_names

#: Invisible characters in tokens, and what is shown for them.
_SPACES = str.maketrans({" ": "␣", "Ġ": "␣", "▁": "␣", "\n": "⏎", "Ċ": "⏎", "\t": "⇥"})


@dataclass(frozen=True)
class HeadLine:
    """One head with a named pattern; ``state`` is empty without a plan."""

    site: str
    head: int
    state: str  # kept or removed
    name: str  # the pattern, such as `previous token`
    share: str  # of the head's weight
    chance: str  # share under even attention


@dataclass(frozen=True)
class PatternLine:
    """One pattern: how many heads have it, and how many of them are kept and removed."""

    name: str
    heads: int
    kept: int
    removed: int


@dataclass(frozen=True)
class AttentionView:
    """The section on attention.

    Args:
        data: JSON for the page's script, safe inside of a script element.
        titles: Titles of the examples.
        queries: For images, the names of the queries that are shown; empty for text.
        heads: Heads with a named pattern, in the model's order.
        patterns: Heads per pattern, the most frequent first.
        n_heads: Heads that were examined.
        planned: Whether there is a plan.
        remark: Which parts the pictures show; empty where they show all.
    """

    data: str
    titles: tuple[str, ...]
    queries: tuple[str, ...]
    heads: tuple[HeadLine, ...]
    patterns: tuple[PatternLine, ...]
    n_heads: int
    planned: bool
    remark: str


def attention_view(record: RunRecord, pictures: AttentionPictures | None) -> AttentionView | None:
    """Format attention pictures; None without any."""
    if pictures is None or not pictures.examples:
        return None
    states = {head: _state(record, head) for head in pictures}
    heads = []
    for site in pictures.sites:
        for head, pattern in zip(site.heads, site.patterns, strict=True):
            if pattern is not None:
                state = states[HeadId(site.site, head)]
                share, chance = _percent(pattern.share), _percent(pattern.chance)
                heads.append(HeadLine(site.site, head, state, pattern.name, share, chance))
    return AttentionView(
        data=_script_safe(_data(pictures, states)),
        titles=tuple(example.title for example in pictures.examples),
        queries=tuple(_queries(pictures)),
        heads=tuple(heads),
        patterns=tuple(_pattern_lines(heads)),
        n_heads=len(states),
        planned=record.plan is not None,
        remark=_remark(pictures),
    )


def _percent(share: float) -> str:
    return f"{fixed(100 * share, 0)} %"


def _state(record: RunRecord, head: HeadId) -> str:
    plan = record.plan
    if plan is None or head.site not in plan.mask.sites:
        return ""
    return "kept" if head in plan.mask else "removed"


def _pattern_lines(heads: Sequence[HeadLine]) -> list[PatternLine]:
    every: Counter[str] = Counter()
    states: Counter[tuple[str, str]] = Counter()
    for line in heads:
        every[line.name] += 1
        states[line.name, line.state] += 1
    lines = []
    for name, n in every.most_common():
        lines.append(PatternLine(name, n, states[name, "kept"], states[name, "removed"]))
    return lines


def _remark(pictures: AttentionPictures) -> str:
    """Say which part of large maps is shown."""
    if pictures.whole:
        return ""
    shown = "of every map the mean over queries, and the rows of the tokens before the patches"
    if pictures.image is None:
        longest = 0
        for site in pictures.sites:
            # Queries and keys of every example.
            for _, n_keys in site.sizes:
                longest = max(longest, n_keys)
        shown = f"the first {longest} tokens of every example"
    return f"To keep this file small it shows {shown}; statements about heads use the whole maps."


def _queries(pictures: AttentionPictures) -> list[str]:
    """Name the queries of an image."""
    if pictures.image is None:
        return []
    rows, columns = pictures.image
    # Tokens before the patches, such as a class token.
    n_before = pictures.sites[0].sizes[0][1] - rows * columns
    names = []
    for row in pictures.rows:
        if row == MEAN:
            names.append("mean over all queries")
        elif row >= n_before:
            y, x = divmod(row - n_before, columns)
            names.append(f"patch in row {y + 1}, column {x + 1}")
        elif n_before == 1:
            names.append("class token")
        else:
            names.append(f"own token {row + 1}")
    return names


def _data(pictures: AttentionPictures, states: dict[HeadId, str]) -> dict[str, Any]:
    """Collect the data of the page's script; `report.js` reads these keys."""
    sites = {site.site: site for site in pictures.sites}
    data = []
    for group, names in by_kind({site.site: site.kind for site in pictures.sites}):
        labels = short_names(names)[1]
        for name, label in zip(names, labels, strict=True):
            data.append(_site_data(sites[name], label, group, states))
    return {
        "image": pictures.image,
        "rows": pictures.rows,
        "queries": _queries(pictures),
        "examples": list(map(_example_data, pictures.examples)),
        "sites": data,
    }


def _site_data(
    site: ShownSite, label: str, group: str, states: dict[HeadId, str]
) -> dict[str, Any]:
    return {
        "name": clean(site.site),
        "label": clean(label),
        "group": group,
        "kind": clean(site.kind),
        "heads": site.heads,
        "states": [states[HeadId(site.site, head)] for head in site.heads],
        "words": list(map(_pattern_text, site.patterns)),
        "sizes": site.sizes,
        "peaks": site.peaks,
        "weights": site.weights,
    }


def _pattern_text(pattern: Pattern | None) -> str:
    return "" if pattern is None else clean(f"mostly {pattern}")


def _example_data(example: ShownExample) -> dict[str, Any]:
    return {
        "title": clean(example.title),
        "tokens": list(map(_visible, example.tokens)),
        "targets": list(map(_visible, example.targets)),
        "pixels": example.pixels,
        "size": (example.height, example.width),
    }


def _visible(token: str) -> str:
    """Show a token with its spaces."""
    return clean(token.translate(_SPACES)) or "∅"


def _script_safe(data: dict[str, Any]) -> str:
    """Write JSON in which no character can end the script element around it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
