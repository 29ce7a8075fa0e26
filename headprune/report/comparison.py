"""Several records compared: a column per record, rows for what they measured and what differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from headprune.core.agreement import Agreement
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId, HeadMask
from headprune.core.record import Proof, RunRecord, SizeRow
from headprune.report.curve import Curve, curve
from headprune.report.difference import plan_difference
from headprune.report.formats import count, fixed, flat, signed
from headprune.report.heatmap import short_names
from headprune.report.quality import QualityGroup, QualityLine, Role, quality_groups
from headprune.report.series import comparable
from headprune.report.speed import speed_line
from headprune.report.verdict import removed_words, verdict

#: Recipe keys that name and place a run; they are not compared.
_PLACES = ("name", "description", "out")

#: Rows of the quality table that are compared, and their labels.
_ROLES: dict[Role, str] = {
    "base": "original",
    "chosen": "after the cut",
    "random": "random heads, same budget",
    "magnitude": "smallest weights, same budget",
    "recovered": "after recovery",
}

#: Rows of the section "What was done".
_METHODS = (
    "status",
    "scorer",
    "examples scored on",
    "selector",
    "budget",
    "heads kept",
    "neurons kept",
    "seconds in all",
)


@dataclass(frozen=True)
class Compared:
    """One column: its name and its record."""

    name: str
    record: RunRecord


@dataclass(frozen=True)
class ComparedCell:
    """One value; ``note`` is smaller, ``tone`` good, bad or plain."""

    text: str
    note: str = ""
    tone: str = "plain"


#: A record that lacks a value.
_MISSING = ComparedCell("–")


@dataclass(frozen=True)
class ComparedRow:
    """One measured value, a cell per record."""

    label: str
    cells: tuple[ComparedCell, ...]


@dataclass(frozen=True)
class ComparedSection:
    """Rows under one heading."""

    title: str
    caption: str  # may be empty
    rows: tuple[ComparedRow, ...]


@dataclass(frozen=True)
class ComparedCurve:
    """The trade-off of records with one task, model and data."""

    title: str  # the records' names; empty for all records
    drawn: Curve


_MARKS = {True: "■", False: "·", None: "–"}
_FATES = {True: "kept", False: "removed", None: "removed before"}


@dataclass(frozen=True)
class FateCell:
    """One head: which records keep it, in their order; None where a record's model lacks it."""

    head: int
    kept: tuple[bool | None, ...]  # per record
    title: str

    @property
    def tone(self) -> str:
        """``all-kept`` or ``all-removed`` where the records agree, else ``differs``."""
        if True in self.kept and False in self.kept:
            return "differs"
        return "all-kept" if True in self.kept else "all-removed"

    @property
    def marks(self) -> str:
        """One mark per record: filled where it keeps the head."""
        return "".join(_MARKS[kept] for kept in self.kept)


@dataclass(frozen=True)
class FateRow:
    """One site."""

    site: str
    label: str  # the part of the name that differs
    cells: tuple[FateCell, ...]


@dataclass(frozen=True)
class ComparisonView:
    """Everything that both templates need."""

    columns: tuple[Compared, ...]  # one per record
    curves: tuple[ComparedCurve, ...]  # one per group of comparable records
    sections: tuple[ComparedSection, ...]
    fates: tuple[FateRow, ...]  # empty unless all plans cover the same sites
    n_columns: int  # heads of the widest site
    plans: tuple[str, ...]  # sentences that compare each plan with the first
    agreement: Agreement | None


def comparison_view(
    compared: Sequence[Compared], agreement: Agreement | None = None
) -> ComparisonView:
    """Format several records for both templates.

    Raises:
        InvalidValue: fewer than two records, or names that are not different.
    """
    names = [column.name for column in compared]
    if len(compared) < 2 or len(set(names)) != len(names):
        raise InvalidValue(
            "comparison", "of two records or more, each with a name of its own", ", ".join(names)
        )
    fates = _fates(compared)
    return ComparisonView(
        columns=tuple(compared),
        curves=_curves(compared),
        sections=_sections([column.record for column in compared]),
        fates=fates,
        n_columns=max((len(row.cells) for row in fates), default=0),
        plans=tuple(_plan_differences(compared)) if fates else (),
        agreement=agreement,
    )


def _sections(records: Sequence[RunRecord]) -> tuple[ComparedSection, ...]:
    """Compare everything that has a table; sections without rows are left out."""
    sections = (
        ComparedSection("Verdict", "Of each run by itself.", _verdicts(records)),
        ComparedSection(
            "Quality",
            "The difference is from the original model of the same run.",
            _quality(records),
        ),
        ComparedSection(
            "Size",
            "After the cut, and the change from the original model.",
            _rows(list(map(_size_column, records))),
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
    return tuple(section for section in sections if section.rows)


def _verdicts(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    columns = []
    for record in records:
        judged = verdict(record)
        clauses = {
            "removed": removed_words(record),
            "cost": judged.cost,
            "speed": judged.gain,
            "random heads": judged.random,
            "in detail": judged.details,
            "next": judged.next,
        }
        columns.append({key: ComparedCell("", text) for key, text in clauses.items() if text})
    return _rows(columns)


def _curves(compared: Sequence[Compared]) -> tuple[ComparedCurve, ...]:
    """Draw a curve per group of comparable records; titled where there are several groups."""
    groups = comparable(((column.name, column.record) for column in compared), "test")
    curves = []
    for group in groups:
        drawn = curve(group.points, "test")
        if drawn is not None:
            # A single curve of all records needs no title.
            names = group.names if len(groups) > 1 else ()
            curves.append(ComparedCurve(", ".join(names), drawn))
    return tuple(curves)


def _rows(
    columns: Sequence[Mapping[str, ComparedCell]], labels: Iterable[str] | None = None
) -> tuple[ComparedRow, ...]:
    """Turn one column of labelled cells per record into rows.

    Args:
        columns: The cells of every record, by label.
        labels: The rows, in order; None takes all labels as they first appear.
    """
    if labels is None:
        labels = dict.fromkeys(chain.from_iterable(columns))
    rows = []
    for label in labels:
        cells = tuple(column.get(label, _MISSING) for column in columns)
        rows.append(ComparedRow(label, cells))
    return tuple(rows)


def _quality(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    columns = []
    # Labels in the order of the tables; a row is shown where any record has it.
    labels: dict[str, bool] = {}
    for record in records:
        cells = {}
        for group in quality_groups(record):
            for role, words in _ROLES.items():
                label = f"{group.metric}, {group.split}: {words}"
                labels.setdefault(label, False)
                line = group.find(role)
                if line is not None:
                    labels[label] = True
                    cells[label] = _quality_cell(group, line)
        columns.append(cells)
    return _rows(columns, [label for label, shown in labels.items() if shown])


def _quality_cell(group: QualityGroup, line: QualityLine) -> ComparedCell:
    text = f"{line.value} {line.spread}".strip()
    if not line.delta:
        return ComparedCell(text, f"{group.n_examples} examples")
    unit = " points" if group.delta_header == "points" else ""
    return ComparedCell(text, f"{line.delta}{unit}", line.tone)


def _size_column(record: RunRecord) -> dict[str, ComparedCell]:
    return {row.name: _size_cell(row) for row in record.size}


def _size_cell(row: SizeRow) -> ComparedCell:
    note = f"of {count(row.original)}"
    if row.original:
        note = f"{signed(100 * row.pruned / row.original - 100, 1)} % {note}"
    return ComparedCell(count(row.pruned), note)


def _speed(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    columns = []
    labels: dict[tuple[int, int], str] = {}
    for record in records:
        cells = {}
        for row in record.speed:
            label = f"batch {row.batch:,} × {row.length:,} tokens"
            labels[row.batch, row.length] = label
            line = speed_line(row)
            cells[label] = ComparedCell(line.ratio, line.interval, line.tone)
        columns.append(cells)
    return _rows(columns, [label for _, label in sorted(labels.items())])


def _proof(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    columns = []
    for record in records:
        # A record may hold several proofs of one quantity: all of them must pass.
        proofs: dict[str, list[Proof]] = {}
        for proof in record.proofs:
            proofs.setdefault(proof.what, []).append(proof)
        columns.append({what: _proof_cell(same) for what, same in proofs.items()})
    return _rows(columns)


def _proof_cell(proofs: Sequence[Proof]) -> ComparedCell:
    note = f"largest difference {max(proof.max_difference for proof in proofs):.2g}"
    if all(proof.max_difference <= proof.tolerance for proof in proofs):
        return ComparedCell("passed", note, "good")
    return ComparedCell("FAILED", note, "bad")


def _methods(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    columns = list(map(_method_cells, records))
    # Neurons have a row only where feed-forwards were cut.
    known = set(chain.from_iterable(columns))
    labels = [label for label in _METHODS if label in known or label != "neurons kept"]
    return _rows(columns, labels)


def _method_cells(record: RunRecord) -> dict[str, ComparedCell]:
    """Format what one run did; the keys are those of ``_METHODS``."""
    texts = {"status": record.status, "seconds in all": _seconds(record)}
    if record.scores is not None:
        texts["scorer"] = record.scores.scorer
        texts["examples scored on"] = f"{record.scores.n_examples:,}"
    if record.plan is not None:
        mask = record.plan.mask
        texts["selector"] = record.plan.selector
        texts["budget"] = record.plan.wanted or "by hand"
        kept, whole = mask.kept_counts, mask.counts
        texts["heads kept"] = f"{kept.heads:,} of {whole.heads:,}"
        if whole.neurons is not None:
            texts["neurons kept"] = f"{kept.neurons:,} of {whole.neurons:,}"
    return {label: ComparedCell(text) for label, text in texts.items() if text}


def _seconds(record: RunRecord) -> str:
    """Add the seconds of all stages; values that are no numbers are ignored."""
    known = [float(value) for value in record.timings.values() if isinstance(value, (int, float))]
    return fixed(sum(known), 0) if known else ""


def _recipes(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    recipes = []
    for record in records:
        pairs = flat(record.recipe)
        recipes.append({key: text for key, text in pairs if key.split(".")[0] not in _PLACES})
    return _differing(recipes)


def _surroundings(records: Sequence[RunRecord]) -> tuple[ComparedRow, ...]:
    tables = []
    for record in records:
        pairs = [*flat(record.versions), *flat(record.hardware)]
        tables.append(dict(pairs, commit=record.git_commit or ""))
    return _differing(tables)


def _differing(tables: Sequence[Mapping[str, str]]) -> tuple[ComparedRow, ...]:
    """Rows of the keys whose texts are not the same in all records."""
    columns: list[dict[str, ComparedCell]] = [{} for _ in tables]
    labels = []
    for key in dict.fromkeys(chain.from_iterable(tables)):
        texts = [table.get(key) for table in tables]
        if len(set(texts)) == 1:
            continue
        labels.append(key)
        for column, text in zip(columns, texts, strict=True):
            # An empty text is shown like a missing one.
            if text:
                column[key] = ComparedCell(text)
    return _rows(columns, labels)


def _fates(compared: Sequence[Compared]) -> tuple[FateRow, ...]:
    """Say of every head which records keep it; empty unless all plans cover the same sites."""
    masks, present, names = [], [], []
    sites: list[tuple[str, int]] | None = None
    for column in compared:
        plan = column.record.plan
        if plan is None:
            return ()
        own = [(row.site, row.n_heads) for row in plan.mask.rows if not row.neurons]
        if sites is not None and own != sites:
            return ()
        sites = own
        masks.append(plan.mask)
        names.append(column.name)
        present.append(_present(column.record))
    if sites is None:
        return ()
    labels = short_names([site for site, _ in sites])[1]
    rows = []
    for (site, n_heads), label in zip(sites, labels, strict=True):
        cells = []
        for head in range(n_heads):
            kept = _kept_by(HeadId(site, head), masks, present)
            cells.append(FateCell(head, kept, _fate_title(site, head, names, kept)))
        rows.append(FateRow(site, label, tuple(cells)))
    return tuple(rows)


def _present(record: RunRecord) -> set[HeadId] | None:
    """List the heads that were there before the cut; None where no scores say so."""
    if record.scores is None:
        return None
    heads = set()
    for site in record.scores.sites:
        for head in site.heads:
            heads.add(HeadId(site.name, head))
    return heads


def _kept_by(
    head: HeadId, masks: Sequence[HeadMask], present: Sequence[set[HeadId] | None]
) -> tuple[bool | None, ...]:
    """Whether each record keeps a head; None where it was not there before the cut."""
    kept: list[bool | None] = []
    for mask, known in zip(masks, present, strict=True):
        absent = known is not None and head not in known
        kept.append(None if absent else head in mask)
    return tuple(kept)


def _fate_title(site: str, head: int, names: Sequence[str], kept: Sequence[bool | None]) -> str:
    fates = [f"{name}: {_FATES[each]}" for name, each in zip(names, kept, strict=True)]
    return f"{site}, head {head}; {', '.join(fates)}"


def _plan_differences(compared: Sequence[Compared]) -> list[str]:
    """Compare each plan with the first, one sentence per plan."""
    first = compared[0]
    lines = []
    for other in compared[1:]:
        assert first.record.plan is not None
        assert other.record.plan is not None
        plans = plan_difference(first.record.plan, other.record.plan, (first.name, other.name))
        n_first, n_second, both = len(plans.only_first), len(plans.only_second), plans.both_keep
        alike = "none"
        if either := n_first + n_second + both:
            alike = f"{fixed(100 * both / either, 0)} % of the heads that either keeps"
        only = f"{n_first:,} kept by {first.name} alone, {n_second:,} by {other.name} alone"
        lines.append(f"{first.name} and {other.name} both keep {both:,} heads ({alike}); {only}.")
        if plans.neurons:
            mine = _neurons_kept(first.record.plan.mask)
            theirs = _neurons_kept(other.record.plan.mask)
            lines.append(f"{first.name} keeps {mine}, and {other.name} {theirs}.")
    return lines


def _neurons_kept(mask: HeadMask) -> str:
    """How many neurons a plan keeps, as text."""
    if mask.counts.neurons is None:
        return "all neurons"
    return f"{mask.kept_counts.neurons:,} of {mask.counts.neurons:,} neurons"
