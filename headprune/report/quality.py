"""The quality table: rows compared with the original model, in points or as a ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headprune.core.metrics import LOWER, POINTS, RATIO, is_one_of
from headprune.core.record import QualityRow, RunRecord
from headprune.report.formats import fixed, signed, times

Role = Literal["base", "chosen", "random", "magnitude", "other", "recovered"]
_ORDER: tuple[Role, ...] = ("base", "chosen", "random", "magnitude", "other", "recovered")
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
#: How rows of a metric are compared, and the unit of the bar chart; None stands for the metric's.
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
    tone: str  # base, good, bad or plain
    loss: str
    amount: float | None  # None where no change is defined
    spread_amount: float | None


@dataclass(frozen=True)
class QualityGroup:
    """One table: the rows of one metric on one split."""

    metric: str
    split: str
    n_examples: str  # such as `872`, or `872 or 500`
    delta_header: str  # points, ratio or difference; empty without a base row
    chart_label: str  # axis of the bar chart
    rows: tuple[QualityLine, ...]
    remarks: tuple[str, ...]  # sentences below the table

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
    # (metric, split) to rows
    groups: dict[tuple[str, str], list[QualityRow]] = {}
    for row in record.quality:
        groups.setdefault((row.metric, row.split), []).append(row)
    scorer = ""
    if record.plan is not None and record.plan.scorer:
        scorer = record.plan.scorer
    elif record.scores is not None:
        scorer = record.scores.scorer
    tables = []
    for (metric, split), rows in groups.items():
        tables.append(_group(metric, split, rows, scorer))
    return tuple(tables)


def _role(row: QualityRow, scorer: str) -> Role:
    """Tell by a row's name what it measures; ``scorer`` is empty where none is known."""
    words = row.name.lower().split()
    first = words[0] if words else ""
    if first == "base":
        return "base"
    if first == "recovered":
        return "recovered"
    if row.trained:
        # A plan with training between its cuts has the scorer's name, too.
        return "recovered" if scorer and row.name.startswith(scorer) else "other"
    if scorer and row.name == scorer:
        return "chosen"
    return _BASELINES.get(first, "other")


def _group(metric: str, split: str, rows: Sequence[QualityRow], scorer: str) -> QualityGroup:
    ordered = [(_role(row, scorer), row) for row in rows]
    ordered.sort(key=lambda pair: _ORDER.index(pair[0]))
    base = _first(ordered, "base")
    header, label = "", metric
    if base is not None:
        header = _comparison(metric)
        unit = _CHART_UNITS[header] or metric
        label = f"change of {metric} from the original model, {unit}"
    examples = sorted({row.n_examples for row in rows})
    return QualityGroup(
        metric=metric,
        split=split,
        n_examples=" or ".join(f"{n:,}" for n in examples),
        delta_header=header,
        chart_label=label,
        rows=tuple(_line(row, role, base) for role, row in ordered),
        remarks=tuple(_remarks(metric, ordered, base)),
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


def _line(row: QualityRow, role: Role, base: QualityRow | None) -> QualityLine:
    amount, scale, delta = _change(row, base)
    tone = _tone(row.metric, amount, base)
    if row is base:
        delta, tone = "", "base"
    # Values of 10 and more, such as perplexities, have fewer decimals.
    digits, short_digits = 2, 2
    if abs(row.value) < 10:
        digits, short_digits = 4, 3
    spread, spread_amount = "", None
    if row.spread is not None:
        spread = f"± {fixed(row.spread, digits)}"
        if math.isfinite(scale):
            spread_amount = row.spread * scale
    return QualityLine(
        name=row.name,
        role=role,
        note=_note(row, role),
        heads=f"{row.kept_heads:,}",
        value=fixed(row.value, digits),
        short=fixed(row.value, short_digits),
        spread=spread,
        delta=delta,
        tone=tone,
        loss=fixed(row.loss, 4),
        amount=amount,
        spread_amount=spread_amount,
    )


def _note(row: QualityRow, role: Role) -> str:
    """Say what a row is, over how many draws, and whether it was trained."""
    words = [_NOTES[role]]
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


def _tone(metric: str, amount: float | None, base: QualityRow | None) -> str:
    """Whether a change is good or bad; plain where the metric's direction is not known."""
    if base is None or amount is None or not math.isfinite(amount) or amount == 0:
        return "plain"
    if is_one_of(metric, POINTS):
        return "good" if amount > 0 else "bad"
    if is_one_of(metric, (*RATIO, *LOWER)):
        return "good" if amount < 0 else "bad"
    return "plain"


def _remarks(
    metric: str, rows: Sequence[tuple[Role, QualityRow]], base: QualityRow | None
) -> list[str]:
    """Write the sentences below the table: chance, unlike budgets, and the size of one example."""
    remarks = []
    chosen, drawn = _first(rows, "chosen"), _first(rows, "random")
    directed = is_one_of(metric, (*POINTS, *RATIO, *LOWER))
    if chosen is not None and drawn is not None and directed:
        remarks.append(_against_random(metric, chosen, drawn))
    # The original model has no budget.
    budgets = sorted({row.kept_heads for _, row in rows if row is not base})
    if len(budgets) > 1:
        kept = ", ".join(f"{budget:,}" for budget in budgets)
        remarks.append(
            f"The rows do not all keep the same number of heads ({kept}); compare with care."
        )
    if base is not None and metric.lower() == "accuracy":
        remarks += _precision(base)
    return remarks


def _precision(base: QualityRow) -> list[str]:
    """Say how much one example weighs, and how well an accuracy is known; empty without rows."""
    n, accuracy = base.n_examples, base.value
    if n <= 0 or not 0 <= accuracy <= 1:
        return []
    # Half of the 95 % interval of a binomial share, in points.
    margin = 196 * math.sqrt(accuracy * (1 - accuracy) / n)
    return [
        f"With {n:,} examples one example is {fixed(100 / n, 2)} points, and the original model's"
        f" own accuracy is known to about ± {fixed(margin, 1)} points (95 %)."
    ]


def _against_random(metric: str, chosen: QualityRow, drawn: QualityRow) -> str:
    """Compare the plan with random heads; within one standard deviation there is no difference."""
    if chosen.kept_heads != drawn.kept_heads:
        return (
            f"{chosen.name} and random removal keep different numbers of heads; they are not"
            " compared."
        )
    if is_one_of(metric, POINTS):
        gain = chosen.value - drawn.value
        amount = f"{fixed(100 * abs(gain), 2)} points of {metric}"
    else:
        gain = drawn.value - chosen.value
        amount = f"{fixed(abs(gain), 4)} {metric}"
    if drawn.spread is not None and abs(gain) <= drawn.spread:
        return (
            f"{chosen.name} is no better and no worse than removing as many heads at random: they"
            f" differ by {amount}, within one standard deviation of the {drawn.draws} draws."
        )
    word = "better" if gain > 0 else "worse"
    return (
        f"Before recovery, {chosen.name} is {amount} {word} than removing as many heads at random."
    )
