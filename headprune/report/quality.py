"""The quality table: rows compared with the original model, in points or as a ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headprune.core.metrics import LOWER, POINTS, RATIO, is_one_of, wilson
from headprune.core.record import Comparison, QualityRow, RunRecord
from headprune.report.formats import fixed, signed, times

Role = Literal["base", "chosen", "random", "magnitude", "other", "recovered"]
_ORDER: tuple[Role, ...] = ("base", "chosen", "random", "magnitude", "other", "recovered")
#: How the row of random heads that were recovered alike begins; the name of the recovery follows.
RECOVERED_RANDOM = "random, "
_BASELINES: dict[str, Role] = {"random": "random", "magnitude": "magnitude"}
#: What a row is, next to its name.
_NOTES: dict[Role, str] = {
    "base": "the original model",
    "chosen": "the plan, before recovery",
    "random": "random heads",
    "magnitude": "smallest weights are removed",
    "recovered": "the plan, after recovery",
    "other": "",
}
#: The unit of the bar chart, by how rows are compared; None means the metric itself.
_CHART_UNITS = {"points": "points", "ratio": "percent", "difference": None}


@dataclass(frozen=True)
class QualityLine:
    """One formatted row; the bar chart draws ``amount`` and ``spread_amount``."""

    name: str
    role: Role
    note: str  # such as `mean of 10 draws`
    heads: str  # heads kept
    value: str  # the metric, in full
    short: str  # the metric, for the headline
    spread: str  # such as `± 0.0214`; empty without
    delta: str  # change from the original model
    tone: str  # base, good or bad; plain within the noise
    loss: str
    interval: str  # the value's own, 95 %; empty without
    delta_interval: str  # of the change, 95 %; empty without
    amount: float | None  # None where no change is defined
    spread_amount: float | None


@dataclass(frozen=True)
class QualityGroup:
    """One table: the rows of one metric on one split."""

    metric: str
    split: str
    n_examples: str  # such as `872`, or `872 or 500`
    delta_header: str  # points, ratio or difference; empty without a base row
    known: bool  # whether a row has an interval
    chart_label: str  # axis of the bar chart
    rows: tuple[QualityLine, ...]
    remarks: tuple[str, ...]  # sentences below the table
    neurons: bool  # whether feed-forwards may be cut

    @property
    def kept_header(self) -> str:
        """The heading of the column with what each row keeps."""
        return "Kept" if self.neurons else "Heads kept"

    @property
    def title(self) -> str:
        """The metric with a capital; other letters are unchanged, as in MCC."""
        return self.metric[:1].upper() + self.metric[1:]

    def find(self, role: Role) -> QualityLine | None:
        """Return the last row of a role: after several recoveries, the final model's."""
        for row in reversed(self.rows):
            if row.role == role:
                return row
        return None


def quality_groups(record: RunRecord) -> tuple[QualityGroup, ...]:
    """Make the tables of a record, in the order in which their metrics first appear."""
    return tuple(_group(record, rows) for rows in _tables(record))


def headline_rows(record: RunRecord) -> dict[Role, QualityRow]:
    """Return the rows that the verdict is about, by role: the last one of each.

    It is the first table with the uncut model and another, on test rows if possible.
    """
    tables: list[dict[Role, QualityRow]] = [dict(rows) for rows in _tables(record)]
    for table in tables:
        table.pop("other", None)
    complete = [table for table in tables if len(table) > 1 and "base" in table]
    chosen = complete or [table for table in tables if table]
    # False comes before True.
    chosen.sort(key=lambda table: next(iter(table.values())).split != "test")
    return chosen[0] if chosen else {}


def _tables(record: RunRecord) -> list[list[tuple[Role, QualityRow]]]:
    """Group rows by metric and split; sort each group by role."""
    groups: dict[tuple[str, str], list[tuple[Role, QualityRow]]] = {}
    scorer = ""
    if record.plan is not None and record.plan.scorer:
        scorer = record.plan.scorer
    elif record.scores is not None:
        scorer = record.scores.scorer
    for row in record.quality:
        groups.setdefault((row.metric, row.split), []).append((_role(row, scorer), row))
    for rows in groups.values():
        rows.sort(key=lambda pair: _ORDER.index(pair[0]))
    return list(groups.values())


def _role(row: QualityRow, scorer: str) -> Role:
    """Tell by a row's name what it measures; ``scorer`` is empty where none is known."""
    words = row.name.lower().split()
    first = words[0] if words else ""
    if first == "base":
        return "base"
    # A gradual cut is trained between its steps, so its model is a recovered one.
    if first in ("recovered", "gradual"):
        return "recovered"
    if scorer and row.name == scorer:
        return "chosen"
    return _BASELINES.get(first, "other")


def _group(record: RunRecord, rows: Sequence[tuple[Role, QualityRow]]) -> QualityGroup:
    base = _first(rows, "base")
    metric, split = rows[0][1].metric, rows[0][1].split
    header, label = "", metric
    if base is not None:
        header = _comparison(metric)
        unit = _CHART_UNITS[header] or metric
        label = f"change of {metric} from the original model, {unit}"
    examples = sorted({row.n_examples for _, row in rows})
    lines = tuple(_line(record, row, role, base) for role, row in rows)
    return QualityGroup(
        metric=metric,
        split=split,
        n_examples=" or ".join(f"{n:,}" for n in examples),
        delta_header=header,
        known=any(line.interval or line.delta_interval for line in lines),
        chart_label=label,
        rows=lines,
        remarks=tuple(_remarks(record, rows, base)),
        neurons=_counts_neurons(rows),
    )


def _first(rows: Sequence[tuple[Role, QualityRow]], role: Role) -> QualityRow | None:
    for each, row in rows:
        if each == role:
            return row
    return None


def _comparison(metric: str) -> Literal["points", "ratio", "difference"]:
    """How values of a metric are compared with the original model's."""
    if is_one_of(metric, POINTS):
        return "points"
    return "ratio" if is_one_of(metric, RATIO) else "difference"


def _line(record: RunRecord, row: QualityRow, role: Role, base: QualityRow | None) -> QualityLine:
    amount, scale, delta = _change(row, base)
    found = record.compared(row.name, "base", row.metric, row.split)
    tone = _tone(found, row, base)
    if row is base:
        delta, tone = "", "base"
    digits = _digits(row.value)
    short_digits = min(digits, 3)
    spread, spread_amount = "", None
    if row.spread is not None:
        spread = f"± {fixed(row.spread, digits)}"
        if math.isfinite(scale):
            spread_amount = row.spread * scale
    return QualityLine(
        name=row.name,
        role=role,
        note=_note(row, role),
        heads=_kept(row),
        value=fixed(row.value, digits),
        short=fixed(row.value, short_digits),
        spread=spread,
        delta=delta,
        tone=tone,
        loss=fixed(row.loss, 4),
        interval=own_interval(row),
        delta_interval=_delta_interval(found, row, base),
        amount=amount,
        spread_amount=spread_amount,
    )


def _kept(row: QualityRow) -> str:
    """Heads that are kept, and neurons where feed-forwards may be cut."""
    if row.kept_neurons is None:
        return f"{row.kept_heads:,}"
    return f"{row.kept_heads:,} heads and {row.kept_neurons:,} neurons"


def _note(row: QualityRow, role: Role) -> str:
    """Say what a row is, over how many draws, and whether it was trained."""
    words = [_NOTES[role]]
    if row.name.startswith(RECOVERED_RANDOM):
        words = ["random heads, recovered as the plan"]
    if row.draws > 1:
        words.append(f"mean of {row.draws} draws")
    elif role == "random":
        words.append("one draw")
    if row.trained:
        words.append("trained")
    return ", ".join(filter(None, words))


def _change(row: QualityRow, base: QualityRow | None) -> tuple[float | None, float, str]:
    """Compare a row with the original model.

    Returns:
        The change in the chart's unit, None where it is not defined; the factor from the metric to
        that unit; the change as text.
    """
    if base is None:
        return row.value, 1.0, ""
    kind = _comparison(row.metric)
    if kind == "points":
        points = 100 * (row.value - base.value)
        return points, 100.0, signed(points, 2)
    if kind == "difference":
        difference = row.value - base.value
        return difference, 1.0, signed(difference, 4)
    # A ratio to zero is not defined.
    if not base.value:
        return None, math.nan, ""
    ratio = row.value / base.value
    return 100 * (ratio - 1), 100 / base.value, times(ratio)


def _digits(value: float) -> int:
    """Decimals; values of 10 and more, such as perplexities, have fewer."""
    return 4 if abs(value) < 10 else 2


def own_interval(row: QualityRow) -> str:
    """The value's own 95 % interval; Wilson's for the accuracy of an older record."""
    low, high = row.low, row.high
    if low is None or high is None:
        one_draw = row.spread is None and row.n_examples > 0
        if row.metric.lower() != "accuracy" or not one_draw or not 0 <= row.value <= 1:
            return ""
        low, high = wilson(row.value, row.n_examples)
    digits = _digits(row.value)
    return f"{fixed(low, digits)} to {fixed(high, digits)}"


def _delta_interval(found: Comparison | None, row: QualityRow, base: QualityRow | None) -> str:
    """The change's 95 % interval, in the unit of its column."""
    if found is None or row is base or base is None:
        return ""
    header = _comparison(row.metric)
    if header == "points":
        return f"{signed(-100 * found.high, 2)} to {signed(-100 * found.low, 2)}"
    if header == "ratio":
        return f"{times(1 + found.low)} to {times(1 + found.high)}"
    return f"{signed(found.low, 4)} to {signed(found.high, 4)}"


def _tone(found: Comparison | None, row: QualityRow, base: QualityRow | None) -> str:
    """Whether a change is good or bad; plain within the noise, or where that is not known."""
    if base is None or row is base:
        return "plain"
    if found is not None:
        if found.low > 0:
            return "bad"
        return "good" if found.high < 0 else "plain"
    error = _error_of_difference(row, base)
    if error is None or abs(row.value - base.value) <= 1.96 * error:
        return "plain"
    return "good" if row.value > base.value else "bad"


def _error_of_difference(row: QualityRow, base: QualityRow) -> float | None:
    """Standard error of the difference of two accuracies; None where it is not known.

    Both count as separate samples, so for the same rows the error is too large, not too small.
    """
    n, ends = min(row.n_examples, base.n_examples), (row.value, base.value)
    if row.metric.lower() != "accuracy" or n < 1 or not all(0 <= end <= 1 for end in ends):
        return None
    error = math.sqrt(sum(end * (1 - end) for end in ends) / n)
    if row.spread is None:
        return error
    return math.hypot(error, row.spread / math.sqrt(max(1, row.draws)))


def _remarks(
    record: RunRecord, rows: Sequence[tuple[Role, QualityRow]], base: QualityRow | None
) -> list[str]:
    """Write the sentences below the table: chance, unlike budgets, and the size of one example."""
    remarks = []
    metric = rows[0][1].metric
    chosen, drawn = _first(rows, "chosen"), _first(rows, "random")
    directed = is_one_of(metric, (*POINTS, *RATIO, *LOWER))
    if chosen is not None and drawn is not None and directed:
        found = record.compared(chosen.name, "random", metric, chosen.split)
        remarks.append(_against_random(metric, chosen, drawn, found))
    # The original model has no budget.
    budgets = sorted({(row.kept_heads, _kept(row)) for _, row in rows if row is not base})
    if len(budgets) > 1:
        kept = ", ".join(words for _, words in budgets)
        units = "heads and neurons" if _counts_neurons(rows) else "heads"
        remarks.append(f"The rows do not all keep as many {units} ({kept}); compare with care.")
    if base is not None and metric.lower() == "accuracy" and base.n_examples > 0:
        n = base.n_examples
        remarks.append(f"With {n:,} examples one example is {fixed(100 / n, 2)} points.")
    return remarks


def _counts_neurons(rows: Sequence[tuple[Role, QualityRow]]) -> bool:
    return any(row.kept_neurons is not None for _, row in rows)


def _noise(gain: float, drawn: QualityRow, found: Comparison | None) -> str:
    """What may explain a difference from random heads, as text; empty where nothing does."""
    if found is not None:
        return "which chance can explain" if found.low <= 0 <= found.high else ""
    if drawn.spread is not None and abs(gain) <= 2 * drawn.spread:
        return f"within two standard deviations of the {drawn.draws} draws"
    return ""


def _against_random(
    metric: str, chosen: QualityRow, drawn: QualityRow, found: Comparison | None
) -> str:
    """Compare the plan with random heads, by the interval where there is one.

    Older records have none; there, two standard deviations of the draws are the noise.
    """
    alike = chosen.kept == drawn.kept
    if not alike and found is None:
        return (
            f"{chosen.name} and random removal keep different numbers of heads; they are not"
            " compared."
        )
    others = "removing as many heads at random" if alike else "random removal by the same budget"
    if is_one_of(metric, POINTS):
        gain = chosen.value - drawn.value
        amount = f"{fixed(100 * abs(gain), 2)} points of {metric}"
    else:
        gain = drawn.value - chosen.value
        amount = f"{fixed(abs(gain), 4)} {metric}"
    noise = _noise(gain, drawn, found)
    if noise:
        return (
            f"{chosen.name} and {others} differ by {amount}, {noise}: neither is shown"
            " to be better."
        )
    word = "better" if gain > 0 else "worse"
    return f"Before recovery, {chosen.name} is {amount} {word} than {others}."
