"""Several records side by side: a column a record, rows of what they measured and where they
differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from headprune.core.agreement import Agreement
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId, HeadMask
from headprune.core.record import RunRecord, SizeRow
from headprune.report.curve import Curve, curve
from headprune.report.difference import plan_difference
from headprune.report.formats import count, fixed, flat, signed
from headprune.report.heatmap import short_names
from headprune.report.quality import QualityGroup, quality_groups
from headprune.report.series import comparable
from headprune.report.speed import speed_line

#: Keys of recipes that say where a run lies, not what it did.
_PLACES = ("name", "description", "out")


#: Rows of the accuracy table that are compared, and what they are called.
_ROLES = {
    "base": "original",
    "chosen": "after the cut",
    "random": "random heads, as many",
    "magnitude": "smallest weights, as many",
    "recovered": "after recovery",
}


@dataclass(frozen=True)
class Compared:
    """One column: what it is called, and its record."""

    name: str
    record: RunRecord


@dataclass(frozen=True)
class ComparedCell:
    """One value; ``note`` is smaller, ``tone`` good, bad or plain."""

    text: str
    note: str = ""
    tone: str = "plain"


@dataclass(frozen=True)
class ComparedRow:
    """One thing that was measured, a cell a record."""

    label: str
    cells: tuple[ComparedCell, ...]


@dataclass(frozen=True)
class ComparedSection:
    """Rows under one heading."""

    title: str
    caption: str
    rows: tuple[ComparedRow, ...]


@dataclass(frozen=True)
class ComparedCurve:
    """The trade-off of the records that can be compared: of one task, model and data."""

    title: str
    drawn: Curve


@dataclass(frozen=True)
class FateCell:
    """One head: which of the records keep it, in their order; None for a head that a record never
    had."""

    head: int
    kept: tuple[bool | None, ...]
    title: str

    @property
    def tone(self) -> str:
        """``all-kept`` or ``all-removed`` where all say the same, else ``differs``."""
        fates = {k for k in self.kept if k is not None}
        return "differs" if len(fates) > 1 else "all-kept" if True in fates else "all-removed"

    @property
    def marks(self) -> str:
        """A mark a record: filled where the head stays."""
        return "".join("–" if k is None else "■" if k else "·" for k in self.kept)


@dataclass(frozen=True)
class FateRow:
    """One site."""

    site: str
    label: str
    cells: tuple[FateCell, ...]


@dataclass(frozen=True)
class ComparisonView:
    """Everything that both templates need."""

    columns: tuple[Compared, ...]
    curves: tuple[ComparedCurve, ...]
    sections: tuple[ComparedSection, ...]
    fates: tuple[FateRow, ...]
    n_columns: int
    plans: tuple[str, ...]
    agreement: Agreement | None


def comparison_view(
    compared: Sequence[Compared], agreement: Agreement | None = None
) -> ComparisonView:
    """Formats records.

    Raises:
        InvalidValue: fewer than two, or names that are not different.
    """
    names = [column.name for column in compared]
    if len(compared) < 2 or len(set(names)) != len(names):
        raise InvalidValue(
            "comparison", "of two records or more, each with a name of its own", ", ".join(names)
        )
    records = [column.record for column in compared]
    sections = (
        ComparedSection(
            "Quality",
            "The difference is from the original model of the same run.",
            _quality(records),
        ),
        ComparedSection(
            "Size", "After the cut, and the change from the original model.", _size(records)
        ),
        ComparedSection(
            "Speed", "Original over pruned: above 1 the pruned model is faster.", _speed(records)
        ),
        ComparedSection("Proof", "The cut model equals the gated one.", _proof(records)),
        ComparedSection("What was done", "", _methods(records)),
        ComparedSection(
            "Where the recipes differ",
            "Keys that are the same in all are left out.",
            _recipes(records),
        ),
        ComparedSection("Where the surroundings differ", "", _surroundings(records)),
    )
    fates = _fates(compared)
    return ComparisonView(
        columns=tuple(compared),
        curves=_curves(compared),
        sections=tuple(section for section in sections if section.rows),
        fates=fates,
        n_columns=max((len(row.cells) for row in fates), default=0),
        plans=tuple(_plan_differences(compared)) if fates else (),
        agreement=agreement,
    )


def _curves(compared: Sequence[Compared]) -> tuple[ComparedCurve, ...]:
    groups = comparable(((column.name, column.record) for column in compared), "test")
    drawn = [(group.names, curve(group.points, "test")) for group in groups]
    every = len(groups) == 1
    return tuple(
        ComparedCurve("" if every else ", ".join(names), found)
        for names, found in drawn
        if found is not None
    )


def _row(label: str, cells: Iterable[ComparedCell | None]) -> ComparedRow:
    return ComparedRow(label, tuple(cell or ComparedCell("–") for cell in cells))


def _quality(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    tables = [{(g.metric, g.split): g for g in quality_groups(record)} for record in records]
    rows = []
    for metric, split in dict.fromkeys(key for table in tables for key in table):
        groups = [table.get((metric, split)) for table in tables]
        for role, words in _ROLES.items():
            cells = [_quality_cell(group, role) for group in groups]
            if any(cells):
                rows.append(_row(f"{metric}, {split}: {words}", cells))
    return tuple(rows)


def _quality_cell(group: QualityGroup | None, role: str) -> ComparedCell | None:
    line = group.find(role) if group else None  # type: ignore[arg-type]
    if group is None or line is None:
        return None
    unit = " points" if group.delta_header == "points" else ""
    note = f"{line.delta}{unit}" if line.delta else f"{group.n_examples} examples"
    return ComparedCell(
        f"{line.value} {line.spread}".strip(), note, line.tone if line.delta else "plain"
    )


def _size(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    def cell(row: SizeRow) -> ComparedCell:
        change = f"{signed(100 * row.pruned / row.original - 100, 1)} %" if row.original else ""
        return ComparedCell(count(row.pruned), f"{change} of {count(row.original)}".strip())

    found = [{row.name: cell(row) for row in record.size} for record in records]
    names = dict.fromkeys(name for cells in found for name in cells)
    return tuple(_row(name, (cells.get(name) for cells in found)) for name in names)


def _speed(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    found = [
        {(row.batch, row.length): speed_line(row) for row in record.speed} for record in records
    ]
    rows = []
    for batch, length in sorted({at for lines in found for at in lines}):
        lines = [each.get((batch, length)) for each in found]
        cells = [
            None if line is None else ComparedCell(line.ratio, line.interval, line.tone)
            for line in lines
        ]
        rows.append(_row(f"batch {batch:,} × {length:,} tokens", cells))
    return tuple(rows)


def _proof(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    rows = []
    for what in dict.fromkeys(proof.what for record in records for proof in record.proofs):
        cells = []
        for record in records:
            proofs = [p for p in record.proofs if p.what == what]
            passed = all(p.max_difference <= p.tolerance for p in proofs)
            note = f"largest difference {max((p.max_difference for p in proofs), default=0):.2g}"
            told = ComparedCell("passed" if passed else "FAILED", note, "good" if passed else "bad")
            cells.append(told if proofs else None)
        rows.append(_row(what, cells))
    return tuple(rows)


def _methods(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    named: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
        ("status", lambda r: r.status),
        ("scorer", lambda r: r.scores.scorer if r.scores else ""),
        ("examples scored on", lambda r: f"{r.scores.n_examples:,}" if r.scores else ""),
        ("selector", lambda r: r.plan.selector if r.plan else ""),
        ("budget", lambda r: (r.plan.wanted or "by hand") if r.plan else ""),
        (
            "heads kept",
            lambda r: f"{r.plan.mask.n_kept:,} of {r.plan.mask.n_heads:,}" if r.plan else "",
        ),
        ("seconds in all", _seconds),
    )
    return tuple(
        _row(label, (ComparedCell(tell(r)) if tell(r) else None for r in records))
        for label, tell in named
    )


def _seconds(record: RunRecord) -> str:
    """Of all stages; what is no number is passed over, as a record may come from anywhere."""
    known = [float(each) for each in record.timings.values() if isinstance(each, (int, float))]
    return fixed(sum(known), 0) if known else ""


def _recipes(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    recipes = [{k: v for k, v in flat(r.recipe) if k.split(".")[0] not in _PLACES} for r in records]
    return _differing(recipes)


def _surroundings(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    parts = (
        [*flat(r.versions), *flat(r.hardware), ("commit", r.git_commit or "")] for r in records
    )
    return _differing([dict(pairs) for pairs in parts])


def _differing(tables: Sequence[dict[str, str]]) -> tuple[ComparedRow, ...]:
    keys = dict.fromkeys(key for table in tables for key in table)
    differing = [key for key in keys if len({table.get(key) for table in tables}) > 1]
    return tuple(
        _row(key, (ComparedCell(t[key]) if t.get(key) else None for t in tables))
        for key in differing
    )


def _fates(compared: Sequence[Compared]) -> tuple[FateRow, ...]:
    """Every head's fate in every record; empty where not all have plans for the same sites."""
    masks = [column.record.plan.mask for column in compared if column.record.plan is not None]
    if (
        len(masks) < len(compared)
        or len({tuple((r.site, r.n_heads) for r in mask.rows) for mask in masks}) > 1
    ):
        return ()
    present = [_present(column.record) for column in compared]
    names = [column.name for column in compared]
    labels = short_names([row.site for row in masks[0].rows])[1]
    return tuple(
        FateRow(
            row.site,
            label,
            tuple(map(partial(_fate, masks, present, names, row.site), range(row.n_heads))),
        )
        for row, label in zip(masks[0].rows, labels, strict=True)
    )


def _present(record: RunRecord) -> set[HeadId] | None:
    """Heads that were there before the cut; None where nothing says so."""
    return (
        {HeadId(s.name, h) for s in record.scores.sites for h in s.heads} if record.scores else None
    )


def _fate(
    masks: Sequence[HeadMask],
    present: Sequence[set[HeadId] | None],
    names: Sequence[str],
    site: str,
    head: int,
) -> FateCell:
    place = HeadId(site, head)
    had = [there is None or place in there for there in present]
    kept = tuple(place in mask if here else None for mask, here in zip(masks, had, strict=True))
    words = {None: "not there", True: "kept", False: "removed"}
    told = (f"{name}: {words[fate]}" for name, fate in zip(names, kept, strict=True))
    return FateCell(head, kept, f"{site}, head {head}; {', '.join(told)}")


def _plan_differences(compared: Sequence[Compared]) -> list[str]:
    """Each plan against the first, in words."""
    first = compared[0]
    lines = []
    for other in compared[1:]:
        assert first.record.plan is not None
        assert other.record.plan is not None
        found = plan_difference(first.record.plan, other.record.plan, (first.name, other.name))
        mine, theirs, both = len(found.only_first), len(found.only_second), found.both_keep
        either = mine + theirs + both
        alike = (
            f"{fixed(100 * both / either, 0)} % of the heads that either keeps"
            if either
            else "none"
        )
        only = f"{mine:,} kept by {first.name} alone, {theirs:,} by {other.name} alone"
        lines.append(f"{first.name} and {other.name} both keep {both:,} heads ({alike}); {only}.")
    return lines
