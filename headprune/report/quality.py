"""The accuracy table: rows beside the original model, in points or as a ratio, and what they say in
words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headprune.core.metrics import LOWER as _LOWER
from headprune.core.metrics import POINTS as _POINTS
from headprune.core.metrics import RATIO as _RATIO
from headprune.core.metrics import is_one_of as _is
from headprune.core.record import QualityRow, RunRecord
from headprune.report.formats import fixed, signed, times

Role = Literal["base", "chosen", "random", "magnitude", "other", "recovered"]
_ORDER: tuple[Role, ...] = ("base", "chosen", "random", "magnitude", "other", "recovered")


@dataclass(frozen=True)
class QualityLine:
    """One formatted row; ``amount`` and ``spread_amount`` are what the bar chart draws."""

    name: str
    role: Role
    note: str
    heads: str
    value: str
    short: str
    spread: str
    delta: str
    tone: str
    loss: str
    amount: float | None
    spread_amount: float | None


@dataclass(frozen=True)
class QualityGroup:
    """One table: the rows of one metric on one split."""

    metric: str
    split: str
    n_examples: str
    delta_header: str
    chart_label: str
    rows: tuple[QualityLine, ...]
    remarks: tuple[str, ...]

    @property
    def title(self) -> str:
        """The metric with a capital; the rest stays, as in MCC."""
        return self.metric[:1].upper() + self.metric[1:]

    def find(self, role: Role) -> QualityLine | None:
        """The last row of a role: of several recoveries, what came out of all of them."""
        return next((r for r in reversed(self.rows) if r.role == role), None)


def _role(row: QualityRow, scorer: str | None) -> Role:
    first = row.name.split()[0].lower() if row.name.split() else ""
    if first == "base":
        return "base"
    if row.trained or first == "recovered":
        return (
            "recovered" if first == "recovered" or row.name.startswith(scorer or "\0") else "other"
        )
    if scorer is not None and row.name == scorer:
        return "chosen"
    return "random" if first == "random" else "magnitude" if first == "magnitude" else "other"


def quality_groups(record: RunRecord) -> tuple[QualityGroup, ...]:
    """The tables of a record, in the order in which their metrics first appear."""
    groups: dict[tuple[str, str], list[QualityRow]] = {}
    for row in record.quality:
        groups.setdefault((row.metric, row.split), []).append(row)
    scorer = (
        record.plan.scorer
        if record.plan and record.plan.scorer
        else record.scores and record.scores.scorer
    )
    return tuple(
        _group(metric, split, rows, scorer or None) for (metric, split), rows in groups.items()
    )


def _group(metric: str, split: str, rows: Sequence[QualityRow], scorer: str | None) -> QualityGroup:
    roles = {id(r): _role(r, scorer) for r in rows}
    rows = sorted(rows, key=lambda r: _ORDER.index(roles[id(r)]))
    base = next((r for r in rows if roles[id(r)] == "base"), None)
    points, ratio = _is(metric, _POINTS), _is(metric, _RATIO)
    header = "points" if points else "ratio" if ratio else "difference"
    if base is None:
        label = metric
    else:
        unit = "points" if points else "percent" if ratio else metric
        label = f"change of {metric} from the original model, {unit}"
    examples = sorted({r.n_examples for r in rows})
    return QualityGroup(
        metric=metric,
        split=split,
        n_examples=" or ".join(f"{n:,}" for n in examples),
        delta_header=header if base is not None else "",
        chart_label=label,
        rows=tuple(_line(r, roles[id(r)], base) for r in rows),
        remarks=tuple(_remarks(metric, rows, roles, base)),
    )


def _note(row: QualityRow, role: Role) -> str:
    drawn = f"mean of {row.draws} draws" if row.draws > 1 else ""
    words = {
        "base": "the original model",
        "chosen": "the plan, before recovery",
        "random": f"random heads, {drawn or 'one draw'}",
        "magnitude": "smallest weights go first",
        "recovered": "the plan, after recovery",
        "other": "",
    }[role]
    more = [drawn if role != "random" else "", "trained" if row.trained else ""]
    return ", ".join(w for w in (words, *more) if w)


def _line(row: QualityRow, role: Role, base: QualityRow | None) -> QualityLine:
    points, ratio = _is(row.metric, _POINTS), _is(row.metric, _RATIO)
    amount: float | None = row.value
    scale, delta = 1.0, ""
    if base is not None:
        if points:
            scale, amount = 100.0, 100 * (row.value - base.value)
            delta = signed(amount, 2)
        elif ratio:
            scale = 100 / base.value if base.value else math.nan
            amount = 100 * (row.value / base.value - 1) if base.value else None
            delta = times(row.value / base.value) if base.value else ""
        else:
            amount = row.value - base.value
            delta = signed(amount, 4)
    digits = 4 if abs(row.value) < 10 else 2
    return QualityLine(
        name=row.name,
        role=role,
        note=_note(row, role),
        heads=f"{row.kept_heads:,}",
        value=fixed(row.value, digits),
        short=fixed(row.value, 3 if abs(row.value) < 10 else 2),
        spread="" if row.spread is None else f"± {fixed(row.spread, digits)}",
        delta="" if row is base else delta,
        tone="base" if row is base else _tone(row.metric, amount, base),
        loss=fixed(row.loss, 4),
        amount=amount,
        spread_amount=(
            None if row.spread is None or not math.isfinite(scale) else row.spread * scale
        ),
    )


def _tone(metric: str, amount: float | None, base: QualityRow | None) -> str:
    """Whether a difference is good or bad news; plain where the metric's direction is not known."""
    higher = _is(metric, _POINTS)
    known = higher or _is(metric, _RATIO) or _is(metric, _LOWER)
    if base is None or not known or amount is None or not math.isfinite(amount) or amount == 0:
        return "plain"
    return "good" if (amount > 0) == higher else "bad"


def _remarks(
    metric: str, rows: Sequence[QualityRow], roles: dict[int, Role], base: QualityRow | None
) -> list[str]:
    chosen = next((r for r in rows if roles[id(r)] == "chosen"), None)
    drawn = next((r for r in rows if roles[id(r)] == "random"), None)
    remarks = []
    if chosen and drawn and _is(metric, (*_POINTS, *_RATIO, *_LOWER)):
        remarks.append(_against_random(metric, chosen, drawn))
    budgets = {r.kept_heads for r in rows if r is not base}
    if len(budgets) > 1:
        kept = ", ".join(f"{b:,}" for b in sorted(budgets))
        remarks.append(
            f"The rows do not all keep the same number of heads ({kept}); compare with care."
        )
    if (
        metric.lower() == "accuracy"
        and base is not None
        and base.n_examples > 0
        and 0 <= base.value <= 1
    ):
        margin = 196 * math.sqrt(base.value * (1 - base.value) / base.n_examples)
        remarks.append(
            f"With {base.n_examples:,} examples one example is {fixed(100 / base.n_examples, 2)}"
            f" points, and the original model's own accuracy is known to about ± {fixed(margin, 1)}"
            " points (95 %)."
        )
    return remarks


def _against_random(metric: str, chosen: QualityRow, drawn: QualityRow) -> str:
    if chosen.kept_heads != drawn.kept_heads:
        return (
            f"{chosen.name} and random removal keep different numbers of heads; they are not"
            " compared."
        )
    gain = chosen.value - drawn.value if _is(metric, _POINTS) else drawn.value - chosen.value
    scale, unit = (100, "points of " + metric) if _is(metric, _POINTS) else (1, metric)
    amount = f"{fixed(abs(gain) * scale, 2 if scale == 100 else 4)} {unit}"
    if drawn.spread is not None and abs(gain) <= drawn.spread:
        return (
            f"{chosen.name} is no better and no worse than removing as many heads at random: they"
            f" differ by {amount}, within one standard deviation of the {drawn.draws} draws."
        )
    word = "better" if gain > 0 else "worse"
    return (
        f"Before recovery, {chosen.name} is {amount} {word} than removing as many heads at random."
    )
