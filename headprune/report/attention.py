"""What heads attend to, as the page and its twin show it: data for the pictures, and words about
every head."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headprune.core.display import clean
from headprune.core.heads import HeadId
from headprune.core.record import RunRecord
from headprune.maps.pictures import MEAN, AttentionPictures, ShownExample
from headprune.report.formats import fixed
from headprune.report.heatmap import by_kind, short_names

#: Characters that would not be seen in a token, and what stands for them.
_SPACES = str.maketrans({" ": "␣", "Ġ": "␣", "▁": "␣", "\n": "⏎", "Ċ": "⏎", "\t": "⇥"})


@dataclass(frozen=True)
class HeadLine:
    """One head for which there is a word; ``state`` is empty without a plan."""

    site: str
    head: int
    state: str
    name: str
    share: str
    chance: str


@dataclass(frozen=True)
class PatternLine:
    """How many heads mostly do one thing, and how many of them stay and go."""

    name: str
    heads: int
    kept: int
    removed: int


@dataclass(frozen=True)
class AttentionView:
    """The section.

    Args:
        data: JSON for the page's script, safe inside of a script element.
        titles: Of the examples.
        queries: Of an image, names of the queries that are shown; empty for text.
        heads: Heads with a word, in the model's order.
        patterns: The same, counted.
        n_heads: Heads that were looked at.
        planned: Whether a plan says which of them go.
        remark: What is left out of the pictures; empty where they are whole.
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
    """Formats pictures; None without any."""
    if pictures is None or not pictures.examples:
        return None
    states = {head: _state(record, head) for head in pictures}
    heads = []
    for site in pictures.sites:
        for head, pattern in zip(site.heads, site.patterns, strict=True):
            if pattern is not None:
                share, chance = (f"{fixed(100 * v, 0)} %" for v in (pattern.share, pattern.chance))
                heads.append(
                    HeadLine(
                        site.site,
                        head,
                        states[HeadId(site.site, head)],
                        pattern.name,
                        share,
                        chance,
                    )
                )
    return AttentionView(
        data=_script_safe(_data(pictures, states)),
        titles=tuple(example.title for example in pictures.examples),
        queries=tuple(_queries(pictures)),
        heads=tuple(heads),
        patterns=tuple(_counted(heads)),
        n_heads=len(states),
        planned=record.plan is not None,
        remark=_remark(pictures),
    )


def _state(record: RunRecord, head: HeadId) -> str:
    plan = record.plan
    if plan is None or head.site not in plan.mask.sites:
        return ""
    return "kept" if head in plan.mask else "removed"


def _counted(heads: Sequence[HeadLine]) -> list[PatternLine]:
    every = Counter(line.name for line in heads)
    by_state = {
        state: Counter(line.name for line in heads if line.state == state)
        for state in ("kept", "removed")
    }
    return [
        PatternLine(name, n, by_state["kept"][name], by_state["removed"][name])
        for name, n in every.most_common()
    ]


def _remark(pictures: AttentionPictures) -> str:
    if pictures.whole:
        return ""
    what = "of every map the mean over all queries and the view from the tokens before the patches"
    if pictures.image is None:
        longest = max(keys for site in pictures.sites for _, keys in site.sizes)
        what = f"the first {longest} tokens of every example"
    return f"To keep this file small it shows {what}; the words about heads rest on all of it."


def _queries(pictures: AttentionPictures) -> list[str]:
    """Names of an image's queries."""
    if pictures.image is None:
        return []
    rows, columns = pictures.image
    own = pictures.sites[0].sizes[0][1] - rows * columns
    names = []
    for row in pictures.rows:
        y, x = divmod(row - own, columns)
        tokens = "class token" if own == 1 else f"own token {row + 1}"
        place = f"patch in row {y + 1}, column {x + 1}"
        names.append("mean over all queries" if row == MEAN else tokens if row < own else place)
    return names


def _data(pictures: AttentionPictures, states: dict[HeadId, str]) -> dict[str, Any]:
    kinds = by_kind({site.site: site.kind for site in pictures.sites})
    places = [
        (group, *named)
        for group, names in kinds
        for named in zip(names, short_names(names)[1], strict=True)
    ]
    sites = {site.site: site for site in pictures.sites}
    return {
        "image": pictures.image,
        "rows": pictures.rows,
        "queries": _queries(pictures),
        "examples": [_example(example) for example in pictures.examples],
        "sites": [
            {
                "name": clean(name),
                "label": clean(label),
                "group": group,
                "kind": clean(site.kind),
                "heads": site.heads,
                "states": [states[HeadId(site.site, head)] for head in site.heads],
                "words": ["" if p is None else clean(f"mostly {p}") for p in site.patterns],
                "sizes": site.sizes,
                "peaks": site.peaks,
                "weights": site.weights,
            }
            for group, name, label in places
            for site in [sites[name]]
        ],
    }


def _example(example: ShownExample) -> dict[str, Any]:
    tokens, targets = ([_visible(t) for t in words] for words in (example.tokens, example.targets))
    size = (example.height, example.width)
    return {
        "title": clean(example.title),
        "tokens": tokens,
        "targets": targets,
        "pixels": example.pixels,
        "size": size,
    }


def _visible(token: str) -> str:
    """A token with its spaces to be seen."""
    return clean(token.translate(_SPACES)) or "∅"


def _script_safe(data: dict[str, Any]) -> str:
    """JSON in which no character can end the element that holds it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
