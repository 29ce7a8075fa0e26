"""Every peer held to ours in quality and speed, why a row is not won, and what ours adds to
others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pages
from roster import PEERS, REFERENCE, budget, is_share

#: How peers are called that start from our cut model.
TOGETHER = f"{REFERENCE} + "
THEIRS, OURS = "theirs", "ours"
WON, LOST, TRADE, TIED = "won", "**lost**", "a trade", "tied"
UNKNOWN = "it is not known why"


@dataclass(frozen=True)
class Comparison:
    """A peer's row beside one of ours.

    Args:
        line: Their paired comparison, out of the record.
        faster: Whose model is faster beyond noise, by shape; empty where neither is.
    """

    line: dict[str, Any]
    faster: tuple[str, ...]

    @property
    def accurate(self) -> str:
        """Whose model is better beyond noise; the difference is theirs minus ours."""
        low, high = self.line["test"]["low"], self.line["test"]["high"]
        # The record rounds: -0.0 was below 0.
        below = math.copysign(1, high) < 0
        return THEIRS if low > 0 else OURS if below else ""

    @property
    def outcome(self) -> str:
        """For us."""
        better = {self.accurate, *self.faster} - {""}
        return TRADE if len(better) == 2 else {THEIRS: LOST, OURS: WON, "": TIED}["".join(better)]


def comparisons(record: dict[str, Any]) -> list[Comparison]:
    """Of all that has been timed and does not start from ours."""
    rows, limits = timed(record), noise(record)
    found = []
    for line in record.get("compared", []):
        theirs = rows.get((line["peer"], line["kept"]))
        its = rows.get((line["reference"], line["reference_kept"]))
        alone = not ours(line["peer"]) and not line["peer"].startswith(TOGETHER)
        if theirs and its and alone and ours(line["reference"]):
            found.append(Comparison(line, faster(theirs, its, limits)))
    return found


def timed(record: dict[str, Any]) -> dict[tuple[str, float | None], dict[str, Any]]:
    """Rows with a speed, by peer and budget."""
    return {(row["peer"], row["kept"]): row for row in record["rows"] if "speed" in row}


def ours(name: str) -> bool:
    """Whether a row is a model of ours, by itself."""
    return name == REFERENCE or name.startswith(f"{REFERENCE}, ")


def with_noise_of_all(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records with the largest noise that any record of the same shapes shows, under ``noise``.

    A record of shares has no two models of one size but the base model and its copy.
    """
    shown = [(record["shapes"], noise(record)) for record in records]
    found = []
    for record in records:
        alike = [limits for of, limits in shown if of == record["shapes"]]
        found.append({**record, "noise": list(map(max, zip(*alike, strict=True)))})
    return found


def noise(record: dict[str, Any]) -> list[float]:
    """By shape, the largest share by which the speeds of models differ that should be equally fast.

    That is the base model beside its copy, and models of one environment and size (`_size`). Where
    other records show more of it, theirs (`with_noise_of_all`).
    """
    alike: dict[tuple[str, Any], list[list[float]]] = {}
    for row in timed(record).values():
        ratios = [cell["ratio"] for cell in row["speed"]]
        if row["peer"] == "unpruned":
            alike["unpruned", None] = [ratios, [1.0] * len(ratios)]
        elif (size := _size(row)) is not None:
            alike.setdefault((row["environment"], size), []).append(ratios)
    found = list(record.get("noise", [0.0] * len(record["shapes"])))
    for group in alike.values():
        for place, some in enumerate(zip(*group, strict=True)):
            found[place] = max(found[place], max(some) / min(some) - 1)
    return found


def _size(row: dict[str, Any]) -> Any:
    """What is the same for models that should be equally fast; None where it is not known.

    Where neurons are cut as well, that is the heads and neurons of each layer, or the share that a
    smaller architecture has; else the number of heads.
    """
    kept = row["kept"]
    if kept is None or not is_share(kept):
        return _heads(row)
    if PEERS[row["peer"]].program == "smaller":
        return "smaller", kept
    return (tuple(row["heads"]), tuple(row["neurons"])) if "neurons" in row else None


def _heads(row: dict[str, Any]) -> int | None:
    """Heads counted in the weights; None where they cannot be, a layer has none, or neurons are cut
    as well.

    A layer that lost its last head runs no attention, so its model is faster than others.
    """
    if row["kept"] is not None and is_share(row["kept"]):
        return None
    if "heads" in row:
        return sum(row["heads"]) if all(row["heads"]) else None
    return row["kept"] if PEERS[row["peer"]].even else None


def faster(theirs: dict[str, Any], its: dict[str, Any], limits: list[float]) -> tuple[str, ...]:
    """By shape, beyond both intervals and the noise between rows."""

    def above(one: dict[str, Any], other: dict[str, Any], limit: float) -> bool:
        return bool(one["low"] > other["high"] and one["ratio"] > other["ratio"] * (1 + limit))

    cells = zip(theirs["speed"], its["speed"], limits, strict=True)
    return tuple(
        THEIRS if above(a, b, limit) else OURS if above(b, a, limit) else ""
        for a, b, limit in cells
    )


# -------------------------------------------------------------------------------------------------
# in Markdown


def text(record: dict[str, Any]) -> list[str]:
    """The table of outcomes, notes on all that is not won, and what ours adds."""
    names, found = shapes(record), comparisons(record)
    limits = " and ".join(
        f"{100 * n:.1f} % at {name}" for n, name in zip(noise(record), names, strict=True)
    )
    head = [
        "peer",
        "kept",
        "beside",
        "kept",
        "draws",
        "points",
        *(f"faster at {name}" for name in names),
    ]
    head.append("outcome for headprune")
    lines = [
        "",
        "### Quality and speed together",
        "",
        (
            "Quality (accuracy, or what the tables name) differs where the interval of the paired"
            " difference leaves out 0. *Faster*, shape by shape,"
        ),
        (
            "is beyond both intervals and the noise between rows: the most by which, in any record"
            " of these shapes, two models differ that should be"
        ),
        (
            "equally fast (pruned ones of one environment with as many heads and no empty layer, or"
            " with the same heads and neurons in each layer; the base"
        ),
        f"model and its copy), {limits}. *Won*: ours is better in",
        (
            "quality or at a shape, theirs in nothing. *Lost*: the other way round. *A trade*:"
            " each is better in"
        ),
        "something. *Tied*: neither is in anything.",
        "",
        "| " + " | ".join(head) + " |",
        "| --- | ---: | --- |" + " ---: |" * 3 + " --- |" * (len(names) + 1),
    ]
    for one in found:
        line = one.line
        kept, its = (_short(n) for n in (line["kept"], line["reference_kept"]))
        cells = [line["peer"], kept, line["reference"], its, str(line["draws"]), points(line)]
        lines.append(
            "| " + " | ".join([*cells, *(who or "-" for who in one.faster), one.outcome]) + " |"
        )
    return [*lines, "", *notes(record, found), *added(record)]


def shapes(record: dict[str, Any]) -> list[str]:
    return [f"{batch} x {length}" if length else f"{batch}" for batch, length in record["shapes"]]


def points(line: dict[str, Any], split: str = "test") -> str:
    """A paired difference in points, and its interval."""
    found = {k: 100 * v for k, v in line[split].items()}
    return f"{found['difference']:+.1f} [{found['low']:+.1f}, {found['high']:+.1f}]"


def notes(record: dict[str, Any], found: list[Comparison]) -> list[str]:
    """On every row that is not won: why, and what would change it. Those of one reason share a
    line."""
    reasons: dict[tuple[str, str, str], list[float]] = {}
    for one in found:
        if one.outcome in (LOST, TRADE):
            key = one.line["peer"], one.line["reference"], why(record, one)
            reasons.setdefault(key, []).append(one.line["reference_kept"])
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (peer, its, reason), kept in reasons.items():
        alike.setdefault((its, budgets_in_words(kept), reason), []).append(f"**{peer}**")
    lines = [
        f"- {listed(peers)} beside *{its}* with {kept}: {reason}."
        for (its, kept, reason), peers in alike.items()
    ]
    budgets = dict.fromkeys(
        one.line["reference_kept"] for one in found if one.outcome in (LOST, TRADE)
    )
    if budgets:
        best = "; ".join(_best(record, kept) for kept in sorted(budgets, reverse=True))
        lines.append(f"- Of ours the best, by these test rows: {best}.")
    if ties := [tie(one) for one in found if one.outcome == TIED]:
        n_rows = record["rows_used"]["test"]
        lines.append(
            "- **Tied**: the interval contains 0, and neither is measurably faster at any shape. An"
            " interval's width falls with the square root of the test rows: if the measured"
            f" difference is true, this many times the {n_rows} rows would exclude 0. More draws of"
            f" calibration rows would help, too. {'; '.join(ties)}."
        )
    return [*lines, ""] if lines else []


def budgets_in_words(kept: Sequence[float]) -> str:
    """Budgets of one kind, with their unit once.

    >>> budgets_in_words([0.6, 0.42, 0.25]), budgets_in_words([36])
    ('60 %, 42 % and 25 % of the multiply-adds', '36 heads')
    """
    unit = budget(kept[0]).removeprefix(_short(kept[0]))
    return listed([_short(one) for one in kept]) + unit


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def why(record: dict[str, Any], one: Comparison) -> str:
    """What theirs is better in, why, and what would change that."""
    peer, its = PEERS[one.line["peer"]], PEERS[one.line["reference"]]
    found = []
    if one.accurate == THEIRS:
        trained = (
            "it was trained on all labelled rows, which this one of ours was not after its cut."
            " What would change it: that training"
        )
        found.append(
            f"better, as {trained if peer.trains > its.trains else peer.accurate or UNKNOWN}"
        )
    if THEIRS in one.faster:
        names = shapes(record)
        where = [name for name, who in zip(names, one.faster, strict=True) if who == THEIRS]
        at = "" if len(where) == len(names) else f" at {' and '.join(where)}"
        reason = _same_share(one) or peer.faster or _same_heads(record, one) or UNKNOWN
        found.append(f"faster{at}, as {reason}")
    return "; ".join(found)


def _same_share(one: Comparison) -> str:
    """Why a model with as many multiply-adds may be faster; empty for other budgets."""
    kept = one.line["kept"]
    if kept is None or kept >= 1 or kept != one.line["reference_kept"]:
        return ""
    if PEERS[one.line["peer"]].program == "smaller":
        return (
            "it has fewer layers, and each costs time beside its multiply-adds. What would change"
            " it: perhaps a budget of measured time (`Budget(speedup=)`); docs/one-budget.md has"
            " smaller architectures that are about as fast"
        )
    return (
        "equal multiply-adds take different times in different layers and widths. What would"
        " change it: perhaps a budget of measured time (`Budget(speedup=)`); docs/one-budget.md has"
        " such cuts, not beside this peer"
    )


def _same_heads(record: dict[str, Any], one: Comparison) -> str:
    """Why a model with as many heads may be faster; empty where heads are not counted."""
    rows, line = timed(record), one.line
    theirs, its = rows[line["peer"], line["kept"]], rows[line["reference"], line["reference_kept"]]
    if (heads := _heads(theirs)) is None or heads != _heads(its):
        return ""
    return (
        "measured in one process: as many heads are kept, in other layers, and a process's memory may"
        " favour one model. What would change it: timing several processes"
    )


def tie(one: Comparison) -> str:
    """By how many times the test rows would have to grow until the interval leaves out 0."""
    line, test = one.line, one.line["test"]
    apart = test["difference"]
    wide = f"{100 * (test['high'] - test['low']):.1f} points wide"
    reach = test["high"] - apart if apart < 0 else apart - test["low"]
    share = max(1.1, (reach / apart) ** 2) if apart else math.inf
    times = (
        "no number, as none was found"
        if share == math.inf
        else f"{share:.{int(share < 10)}f} times"
    )
    beside = "" if line["reference"] == REFERENCE else f" beside *{line['reference']}*"
    kept = budget(line["kept"])
    if line["kept"] is None:
        kept += f" beside {budget(line['reference_kept'])}"
    return f"{line['peer']}, {kept}{beside}: {times} ({wide})"


def _short(kept: float | None) -> str:
    """A budget in a cell."""
    if kept is None:
        return "all"
    return f"{100 * kept:g} %" if is_share(kept) else str(kept)


def _best(record: dict[str, Any], kept: float) -> str:
    """Our best model of a budget."""
    own = [row for (name, heads), row in timed(record).items() if heads == kept and ours(name)]
    means = {
        row["peer"]: statistics.fmean(accuracies(record, row["peer"], kept).values()) for row in own
    }
    best = max(own, key=lambda row: means[row["peer"]])
    speeds = " and ".join(f"{cell['ratio']:.2f}x" for cell in best["speed"])
    return f"{budget(kept)}, *{best['peer']}*, {means[best['peer']]:.3f} at {speeds}"


def accuracies(record: dict[str, Any], name: str, kept: float | None) -> dict[int, float]:
    """Test accuracy by draw."""
    rows = (
        row
        for row in record["rows"]
        if (row["peer"], row["kept"]) == (name, kept) and "test" in row
    )
    return {row["seed"]: row["test"] for row in rows}


def added(record: dict[str, Any]) -> list[str]:
    """What ours adds to others: a row for each that starts from our cut model, beside the same of
    the whole one."""
    rows, cells = timed(record), list[list[str]]()
    for (name, kept), row in rows.items():
        other = name.removeprefix(TOGETHER)
        if name.startswith(TOGETHER) and (alone := rows.get((other, None))):
            gains = [
                pages.interval(b["ratio"] / a["ratio"], b["low"] / a["high"], b["high"] / a["low"])
                for b, a in zip(row["speed"], alone["speed"], strict=True)
            ]
            cells.append([other, _short(kept), *_gained(record, name, kept, other), *gains])
    if not cells:
        return []
    head = [
        "peer",
        "kept",
        "draws",
        "points",
        *(f"times as fast at {name}" for name in shapes(record)),
    ]
    return [
        (
            f"What {REFERENCE} adds to others, which then start from its cut model: the mean"
            " difference to the same of the"
        ),
        (
            "whole model over draws (with an interval where the record has it), and the first"
            " draw's speed."
        ),
        "",
        *pages.table(head, cells),
    ]


def _gained(record: dict[str, Any], name: str, kept: float | None, other: str) -> tuple[str, str]:
    """Draws and points; what has one draw only is compared with that one."""
    for line in record.get("compared", []):
        if (line["peer"], line["kept"], line["reference"]) == (name, kept, other):
            return str(line["draws"]), points(line)
    both, alone = accuracies(record, name, kept), accuracies(record, other, None)
    return (
        str(len(both)),
        f"{100 * statistics.fmean(v - alone.get(s, alone[0]) for s, v in both.items()):+.1f}",
    )
