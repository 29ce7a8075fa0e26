"""Draws docs/concepts.svg: gate, score, plan, prune, prove and recover, by the numbers of the
demo's record."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from headprune.core.files import write_atomic
from headprune.core.record import RunRecord

_PANEL, _GAP, _CELL = (280, 236), 24, 24
_INK, _SOFT, _PAPER, _BLUE, _ORANGE = "#1b1b1f", "#5b5b66", "#ffffff", "#0b5394", "#b45309"
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
    ' aria-labelledby="t d">'
)
_DESCRIPTION = (
    "Six steps. Gate: a number multiplies what each head passes on. Score: an importance for each"
    " head. Plan: which heads are kept. Prune: remove the other heads from the weights. Prove: the cut model equals"
    " the gated one. Recover: the kept weights make up for what was removed."
)


def draw(records: Path, docs: Path) -> Path:
    """Writes the figure from ``demo.json`` of ``records`` into ``docs``."""
    record = RunRecord.load(records / "demo.json")
    panels = [
        ("1 gate", "a switch on every head", _gate()),
        ("2 score", "how important is each?", _score(record)),
        ("3 plan", _kept_heads(record), _plan(record)),
        ("4 prune", "remove the other heads", _prune(record)),
        ("5 prove", "gated = pruned", _prove(record)),
        ("6 recover", "kept weights are trained again", _recover(record)),
    ]
    width, height = 3 * _PANEL[0] + 4 * _GAP, 2 * _PANEL[1] + 3 * _GAP
    lines = [
        _HEAD.format(width=width, height=height),
        '<title id="t">From gates to a smaller model</title>',
        f'<desc id="d">{escape(_DESCRIPTION)}</desc>',
        f'<rect width="{width}" height="{height}" rx="12" fill="{_PAPER}"/>',
        '<g font-family="system-ui, sans-serif">',
    ]
    for place, (name, says, body) in enumerate(panels):
        row, column = divmod(place, 3)
        x, y = _GAP + column * (_PANEL[0] + _GAP), _GAP + row * (_PANEL[1] + _GAP)
        lines += [f'<g transform="translate({x} {y})">', _box(0, 0, *_PANEL, "none", "#c9c9d1")]
        lines += [
            _text(16, 32, name, 20, weight="bold"),
            _text(16, 54, says, 14, _SOFT),
            *body,
            "</g>",
        ]
    write_atomic(docs / "concepts.svg", "\n".join([*lines, "</g>", "</svg>", ""]).encode())
    return docs / "concepts.svg"


def _kept_heads(record: RunRecord) -> str:
    mask = record.plan.mask
    return f"{mask.n_kept} of {mask.n_heads} heads kept"


def _text(
    x: float,
    y: float,
    words: str,
    size: int,
    colour: str = _INK,
    weight: str = "",
    anchor: str = "",
) -> str:
    more = f' font-weight="{weight}"' * bool(weight) + f' text-anchor="{anchor}"' * bool(anchor)
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{more}>{escape(words)}</text>'
    )


def _box(
    x: float, y: float, width: float, height: float, fill: str, stroke: str, more: str = ""
) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="3" fill="{fill}" stroke="{stroke}"{more}/>'


def _gate() -> list[str]:
    """Three heads, one of them off, on their way to the output projection."""
    lines = []
    for i, gate in enumerate((1, 0, 1)):
        y, colour = 88 + 46 * i, _BLUE if gate else _ORANGE
        dashes = "" if gate else ' stroke-dasharray="4 4"'
        lines += [
            _box(16, y - 17, 74, 34, "none", _INK),
            _text(53, y + 5, f"head {i}", 14, anchor="middle"),
            f'<path d="M90 {y}H120M152 {y}H200" stroke="{colour}" stroke-width="2"{dashes}/>',
            (
                f'<circle cx="136" cy="{y}" r="16" fill="{_PAPER}" stroke="{colour}"'
                ' stroke-width="2"/>'
            ),
            _text(136, y + 5, f"×{gate}", 14, colour, anchor="middle"),
        ]
    return [
        *lines,
        _box(200, 71, 48, 126, "none", _INK),
        _text(224, 139, "W_o", 14, anchor="middle"),
    ]


def _cells(rows: Iterable[Iterable[tuple[str, str, str]]]) -> list[str]:
    """A head map: a row a layer, ``(fill, stroke, more)`` a head."""
    lines = []
    for i, row in enumerate(rows):
        lines.append(_text(16, 89 + 32 * i, f"layer {i}", 13, _SOFT))
        lines += [
            _box(70 + 25 * j, 72 + 32 * i, _CELL - 2, _CELL, *cell) for j, cell in enumerate(row)
        ]
    return lines


def _score(record: RunRecord) -> list[str]:
    """The scores, darker for more; by rank, because they differ by powers of ten."""
    flat = sorted(value for row in record.scores.values for value in row)
    shares = [
        [flat.index(value) / (len(flat) - 1) for value in row] for row in record.scores.values
    ]
    grey = [
        [
            f"#{round(245 - 205 * s):02x}{round(247 - 165 * s):02x}{round(250 - 105 * s):02x}"
            for s in r
        ]
        for r in shares
    ]
    return [
        *_cells([(fill, "#8a8a94", "") for fill in row] for row in grey),
        _text(70, 216, "darker: matters more", 13, _SOFT),
    ]


def _plan(record: RunRecord) -> list[str]:
    """Filled cells are kept heads."""
    kept, removed = (_BLUE, _BLUE, ""), (_PAPER, _ORANGE, ' stroke-dasharray="3 3"')
    rows = [
        [kept if h in row.kept else removed for h in range(row.n_heads)]
        for row in record.plan.mask.rows
    ]
    return [*_cells(rows), _text(70, 216, "filled: kept", 13, _SOFT)]


def _prune(record: RunRecord) -> list[str]:
    """The four matrices of a layer in the middle, whole and cut."""
    layer = len(record.plan.mask.rows) // 2
    row = record.plan.mask.rows[layer]
    share, side = len(row.kept) / row.n_heads, 50
    lines = []
    for i, name in enumerate(("W_q", "W_k", "W_v", "W_o")):
        x = 16 + 63 * i
        wide, high = (side * share, side) if name == "W_o" else (side, side * share)
        lines += [
            _text(x + side / 2, 86, name, 14, anchor="middle"),
            _box(x, 96, side, side, _PAPER, _ORANGE, ' stroke-dasharray="3 3"'),
            _box(x, 96, wide, high, _BLUE, _BLUE),
        ]
    sizes = {size.name: size for size in record.size}["parameters"]
    lines.append(_text(16, 176, f"layer {layer} keeps {len(row.kept)} of {row.n_heads} heads", 14))
    return [*lines, _text(16, 198, f"{sizes.original:,.0f} → {sizes.pruned:,.0f} parameters", 14)]


def _prove(record: RunRecord) -> list[str]:
    """Both models' outputs, and how far apart they are."""
    worst = max(proof.max_difference for proof in record.proofs)
    lines = [_text(140, 122, "=", 28, anchor="middle")]
    for x, name, says in ((16, "gated", "heads off"), (164, "pruned", "heads cut")):
        lines += [
            _box(x, 78, 100, 72, "none", _BLUE, ' stroke-width="2"'),
            _text(x + 50, 108, name, 16, anchor="middle"),
        ]
        lines.append(_text(x + 50, 132, says, 13, _SOFT, anchor="middle"))
    return [*lines, _text(16, 186, f"outputs differ by {worst:.1e} at most", 14)]


def _recover(record: RunRecord) -> list[str]:
    """Quality on test rows: whole, cut at random, cut by scores, recovered."""
    rows = [row for row in record.quality if row.split == "test" and row.name != "magnitude"]
    lines = []
    for i, row in enumerate(rows):
        name = {
            "base": "whole",
            "random": "cut at random",
            record.scores.scorer: "cut by scores",
        }.get(row.name, "recovered")
        y = 78 + 34 * i
        lines += [
            _text(16, y + 15, name, 13),
            _box(120, y, 96 * row.value, 20, _BLUE if name != "cut at random" else _ORANGE, "none"),
        ]
        lines += [_text(224, y + 15, f"{row.value:.3f}", 13)]
    return [
        *lines,
        _text(16, 224, f"{rows[0].metric} on {rows[0].n_examples} test rows", 13, _SOFT),
    ]
