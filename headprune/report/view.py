"""A record as formatted text, for both templates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from headprune.core.agreement import Agreement
from headprune.core.changed import ChangedAnswers
from headprune.core.metrics import wilson
from headprune.core.record import ClassRow, Proof, RunRecord, SizeRow, SpeedRow
from headprune.report.attention import AttentionView, attention_view
from headprune.report.choice import ChoiceTable, choice_table
from headprune.report.decoding import DecodingLine, decoding_lines
from headprune.report.explanation import scorer_of_values
from headprune.report.formats import count, fixed, flat, signed, significant
from headprune.report.heatmap import HeatMap, heat_map
from headprune.report.inputs import NOTHING, ReportInputs
from headprune.report.layers import LayerTable, layer_table
from headprune.report.neurons import NeuronTable, neuron_table
from headprune.report.provenance import Pairs, provenance
from headprune.report.quality import QualityGroup, headline_rows, quality_groups
from headprune.report.repeat import command, python_lines
from headprune.report.speed import SpeedGrid, SpeedLine, speed_grid, speed_line
from headprune.report.verdict import Verdict, headline_speed, removed_counts, verdict

#: How a difference is named in the headline figures, by the header of its column.
_UNITS = {"points": "points", "ratio": "the original", "difference": ""}


@dataclass(frozen=True)
class Fact:
    """One figure under the headline; ``tone`` is good, bad or plain."""

    label: str
    value: str
    note: str
    tone: str = "plain"


@dataclass(frozen=True)
class SizeLine:
    """One formatted row of the size table; ``remaining`` is a percentage."""

    name: str  # such as `parameters`
    original: str
    pruned: str
    change: str  # such as `−9.4 %`; empty for an original of 0
    remaining: float


@dataclass(frozen=True)
class ProofLine:
    """A proof as text."""

    what: str
    passed: bool
    words: str


@dataclass(frozen=True)
class ClassLine:
    """One formatted row of the table of classes."""

    label: str
    n_examples: str
    before: str  # share that is right, per cent
    after: str  # share that is right, per cent
    interval: str  # of ``after``, 95 %
    change: str  # rows, such as `−3`


@dataclass(frozen=True)
class View:
    """Everything both templates need."""

    record: RunRecord
    verdict: Verdict  # the headline
    contents: tuple[tuple[str, str], ...]  # the main sections: anchor and title
    facts: tuple[Fact, ...]  # figures under the headline
    plan: str  # one sentence; empty without a plan
    heads: tuple[HeatMap, ...]  # one map per scorer, the record's first
    attention: AttentionView | None
    agreement: Agreement | None  # of the scorers
    choice: ChoiceTable | None
    quality: tuple[QualityGroup, ...]  # one table per metric and split
    classes: tuple[ClassLine, ...]
    changed: ChangedAnswers | None  # rows whose answer changed
    speed: tuple[SpeedLine, ...]
    grid: SpeedGrid | None  # None with fewer than two shapes
    decoding: tuple[DecodingLine, ...]  # generation; empty for encoders
    size: tuple[SizeLine, ...]
    layers: LayerTable | None  # None without a plan or costs
    neurons: NeuronTable | None  # the same for heads and neurons
    proofs: tuple[ProofLine, ...]
    provenance: tuple[tuple[str, Pairs], ...]  # titled tables
    measurements: Pairs  # metrics without a table of their own
    recipe: str  # YAML
    command: str  # shell line that repeats the run; empty for the record of no recipe
    python: str  # lines that repeat the run
    missing: tuple[str, ...]  # parts that the record lacks


def view(record: RunRecord, inputs: ReportInputs = NOTHING) -> View:
    """Format a record and the other inputs of its report."""
    quality, heads = quality_groups(record), _heat_maps(record, inputs)
    decoding = decoding_lines(record)
    proofs = tuple(map(_proof_line, record.proofs))
    metrics = dict(record.metrics)
    if decoding:
        # Shown in a table of its own.
        del metrics["decoding"]
    return View(
        record=record,
        verdict=verdict(record, inputs.folder),
        contents=_contents(record, inputs, bool(heads)),
        facts=tuple(_facts(record, quality, proofs)),
        plan=_plan_words(record),
        heads=heads,
        attention=attention_view(record, inputs.pictures),
        agreement=inputs.agreement,
        choice=choice_table(record),
        quality=quality,
        classes=tuple(map(_class_line, record.classes)),
        changed=inputs.changed,
        speed=tuple(map(speed_line, record.speed)),
        grid=speed_grid(record.speed),
        decoding=decoding,
        size=tuple(map(_size_line, record.size)),
        layers=layer_table(record),
        neurons=neuron_table(record, inputs.latency),
        proofs=proofs,
        provenance=provenance(record),
        measurements=flat(metrics),
        recipe=_recipe_text(record),
        command=command(record, inputs.folder),
        python=python_lines(record),
        missing=_missing(record),
    )


def _contents(record: RunRecord, inputs: ReportInputs, heads: bool) -> tuple[tuple[str, str], ...]:
    """List the main sections that the record has, in the order of the page."""
    sections = (
        ("quality", "Quality", record.quality),
        ("speed-and-size", "Speed and size", record.speed or record.size),
        ("the-heads", "Heads", heads),
        ("attention", "Attention", inputs.pictures and inputs.pictures.examples),
        ("agreement", "Agreement", inputs.agreement),
        ("origin", "Provenance", True),
    )
    return tuple((anchor, title) for anchor, title, there in sections if there)


def _class_line(row: ClassRow) -> ClassLine:
    low, high = wilson(row.after / row.n_examples, row.n_examples)
    return ClassLine(
        label=row.label,
        n_examples=f"{row.n_examples:,}",
        before=fixed(100 * row.before / row.n_examples, 1),
        after=fixed(100 * row.after / row.n_examples, 1),
        interval=f"{fixed(100 * low, 1)} to {fixed(100 * high, 1)}",
        change=signed(row.after - row.before, 0),
    )


def _missing(record: RunRecord) -> tuple[str, ...]:
    """Name the parts that the record lacks."""
    parts = {
        "scores": record.scores,
        "plan": record.plan,
        "accuracy": record.quality,
        "speed": record.speed,
        "size": record.size,
        "proof": record.proofs,
    }
    return tuple(name for name, part in parts.items() if not part)


def _recipe_text(record: RunRecord) -> str:
    """The recipe as YAML; empty where the record has none."""
    recipe = record.to_dict()["recipe"]
    if not recipe:
        return ""
    # Keys stay in the order of the recipe's schema.
    text: str = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)
    return text.strip()


def _heat_maps(record: RunRecord, inputs: ReportInputs) -> tuple[HeatMap, ...]:
    """One map per scorer, the record's own first."""
    maps = []
    for scores in (None, *inputs.scores):
        grid = heat_map(record, scores, inputs.pictures)
        if grid is not None:
            maps.append(grid)
    return tuple(maps)


#: Selectors that read the prices of levels.
_READ_PRICES = ("knapsack", "repriced")


def _plan_words(record: RunRecord) -> str:
    """Say how many heads are kept and how they were chosen.

    Unlike ``PruningPlan.title`` it does not count heads that were removed before.
    """
    plan, removed = record.plan, removed_counts(record)
    if plan is None or removed is None:
        return ""
    how = plan.selector if plan.selector == "by hand" else f"with {plan.selector}"
    if plan.scorer:
        how += f" by {plan.scorer}"
    if plan.wanted:
        how += f" to {plan.wanted}"
    words = f"{plan.mask.kept_counts.of(removed[1], ',')} are kept, chosen {how}."
    scores = record.scores
    if scores is None or scores.ladders is None or plan.selector not in _READ_PRICES:
        return words
    orderer = scorer_of_values(scores)
    if orderer != scores.scorer:
        words += f" The scores shown are those of {orderer}, in whose order units of a layer go;"
        words += " measured prices decide how many."
    return words


def _headline_quality(record: RunRecord, quality: Sequence[QualityGroup]) -> QualityGroup | None:
    """The table that the verdict is about."""
    for row in headline_rows(record).values():
        for group in quality:
            if (group.metric, group.split) == (row.metric, row.split):
                return group
    return None


def _size_line(row: SizeRow) -> SizeLine:
    before, after = count(row.original), count(row.pruned)
    share = 100 * row.pruned / row.original if row.original else math.nan
    if math.isnan(share):
        return SizeLine(row.name, before, after, "", 0.0)
    remaining = min(max(share, 0.0), 100.0)
    return SizeLine(row.name, before, after, f"{signed(share - 100, 1)} %", round(remaining, 2))


def _proof_line(proof: Proof) -> ProofLine:
    passed = proof.max_difference <= proof.tolerance
    equals, within = "equals", "within"
    if not passed:
        equals, within = "does NOT equal", "over"
    examples = f"{proof.n_examples:,} example"
    if proof.n_examples != 1:
        examples += "s"
    words = (
        f"The pruned model {equals} the gated one: the largest difference of {proof.what} is"
        f" {significant(proof.max_difference, 3)}, {within} the tolerance of"
        f" {significant(proof.tolerance, 3)} ({examples}, {proof.dtype}; the largest output is"
        f" {significant(proof.scale, 3)})."
    )
    return ProofLine(proof.what, passed, words)


def _facts(
    record: RunRecord, quality: Sequence[QualityGroup], proofs: Sequence[ProofLine]
) -> list[Fact]:
    """List the figures under the headline; what was not measured has none."""
    facts = []
    removed = removed_counts(record)
    if record.plan is not None and removed:
        budget = record.plan.wanted or "by hand"
        gone, whole = removed
        facts.append(Fact("Heads removed", f"{gone.heads:,} of {whole.heads:,}", budget))
        if whole.neurons is not None:
            facts.append(Fact("Neurons removed", f"{gone.neurons:,} of {whole.neurons:,}", budget))
    group = _headline_quality(record, quality)
    if group is not None:
        facts += _quality_facts(group)
    speed = headline_speed(record)
    if speed is not None:
        facts.append(_speed_fact(speed))
    for row in record.size:
        # However the record spells the row of parameters.
        if "param" in row.name.lower():
            size = _size_line(row)
            facts.append(Fact("Parameters", size.change, f"{size.original} → {size.pruned}"))
    if proofs:
        facts.append(_proof_fact(proofs))
    return facts


def _proof_fact(proofs: Sequence[ProofLine]) -> Fact:
    for proof in proofs:
        if not proof.passed:
            return Fact("Proof", "FAILED", "pruned differs from gated", "bad")
    return Fact("Proof", "passed", "pruned equals gated", "good")


def _quality_facts(group: QualityGroup) -> list[Fact]:
    """The final model's quality; empty where only other models were measured."""
    last = group.find("recovered") or group.find("chosen")
    if last is None:
        return []
    # Without the original model there is no change to show.
    note = last.note
    if last.delta:
        note = f"{last.delta} {_UNITS.get(group.delta_header, '')}".strip()
    if last.delta_interval:
        note += f" ({last.delta_interval})"
    return [Fact(f"{group.title}, {group.split}", last.short, note, last.tone)]


def _speed_fact(row: SpeedRow) -> Fact:
    line = speed_line(row)
    # No line break within the batch and the length.
    note = f"{line.interval} at batch {line.batch}\u00a0×\u00a0{line.length}"
    if line.tone == "plain":
        note = f"not measurable: {note}"
    return Fact("Speed", line.ratio, note, line.tone)
