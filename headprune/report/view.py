"""A record as formatted text, for both templates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from headprune.core.agreement import Agreement
from headprune.core.record import Proof, RunRecord, SizeRow, SpeedRow
from headprune.report.attention import AttentionView, attention_view
from headprune.report.choice import ChoiceTable, choice_table
from headprune.report.decoding import DecodingLine, decoding_lines
from headprune.report.formats import count, flat, signed, significant
from headprune.report.heatmap import HeatMap, heat_map
from headprune.report.inputs import NOTHING, ReportInputs
from headprune.report.layers import LayerTable, layer_table
from headprune.report.provenance import Pairs, provenance
from headprune.report.quality import QualityGroup, quality_groups
from headprune.report.repeat import command, python_lines
from headprune.report.speed import SpeedGrid, SpeedLine, speed_grid, speed_line, verdict

#: How a difference is named in the headline figures, by the header of its column.
_UNITS = {"points": "points", "ratio": "the original", "difference": ""}
#: How the sentence about a run that is not done begins.
_UNFINISHED = {
    "failed": "The run failed in stage",
    "interrupted": "The run was interrupted in stage",
    "running": "The run is in stage",
}


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
    """A proof in words."""

    what: str
    passed: bool
    words: str


@dataclass(frozen=True)
class View:
    """Everything both templates need."""

    record: RunRecord
    sentence: str  # the headline
    facts: tuple[Fact, ...]  # figures under the headline
    plan: str  # one sentence; empty without a plan
    heads: tuple[HeatMap, ...]  # one map per scorer, the record's first
    attention: AttentionView | None
    agreement: Agreement | None  # of the scorers
    choice: ChoiceTable | None
    quality: tuple[QualityGroup, ...]  # one table per metric and split
    speed: tuple[SpeedLine, ...]
    grid: SpeedGrid | None  # None with fewer than two shapes
    decoding: tuple[DecodingLine, ...]  # generation; empty for encoders
    size: tuple[SizeLine, ...]
    layers: LayerTable | None  # None without a plan or costs
    proofs: tuple[ProofLine, ...]
    provenance: tuple[tuple[str, Pairs], ...]  # titled tables
    measurements: Pairs  # metrics without a table of their own
    recipe: str  # YAML
    command: str  # shell line that repeats the run
    python: str  # lines that repeat the run
    missing: tuple[str, ...]  # parts that the record lacks


def view(record: RunRecord, inputs: ReportInputs = NOTHING) -> View:
    """Format a record and the other inputs of its report."""
    quality = quality_groups(record)
    decoding = decoding_lines(record)
    proofs = tuple(map(_proof_line, record.proofs))
    metrics = dict(record.metrics)
    if decoding:
        # Shown in a table of its own.
        del metrics["decoding"]
    return View(
        record=record,
        sentence=_sentence(record, quality),
        facts=tuple(_facts(record, quality, proofs)),
        plan=_plan_words(record),
        heads=_heat_maps(record, inputs),
        attention=attention_view(record, inputs.pictures),
        agreement=inputs.agreement,
        choice=choice_table(record),
        quality=quality,
        speed=tuple(map(speed_line, record.speed)),
        grid=speed_grid(record.speed),
        decoding=decoding,
        size=tuple(map(_size_line, record.size)),
        layers=layer_table(record),
        proofs=proofs,
        provenance=provenance(record),
        measurements=flat(metrics),
        recipe=_recipe_text(record),
        command=command(record),
        python=python_lines(record),
        missing=_missing(record),
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


def _removed(record: RunRecord) -> tuple[int, int] | None:
    """Count the heads that the plan removes, and those present before it."""
    if record.plan is None:
        return None
    mask = record.plan.mask
    # The mask also counts heads that were removed before; the scores do not.
    present = mask.n_heads if record.scores is None else record.scores.n_heads
    return present - mask.n_kept, present


def _plan_words(record: RunRecord) -> str:
    """Say how many heads are kept and how they were chosen.

    Unlike ``PruningPlan.title`` it does not count heads that were removed before.
    """
    plan, removed = record.plan, _removed(record)
    if plan is None or removed is None:
        return ""
    how = plan.selector if plan.selector == "by hand" else f"with {plan.selector}"
    if plan.scorer:
        how += f" by {plan.scorer}"
    if plan.wanted:
        how += f" to {plan.wanted}"
    return f"{plan.mask.n_kept:,} of {removed[1]:,} heads are kept, chosen {how}."


def _headline_speed(record: RunRecord) -> SpeedRow | None:
    """The row with the most tokens per call: fixed in advance, not the best one."""
    return max(record.speed, key=lambda row: (row.batch * row.length, row.batch), default=None)


def _headline_quality(quality: Sequence[QualityGroup]) -> QualityGroup | None:
    """The first table with the original model and a model to compare, on test rows if possible."""
    groups = [group for group in quality if len(group.rows) > 1 and group.find("base")]
    if not groups:
        groups = [group for group in quality if group.rows]
    for group in groups:
        if group.split == "test":
            return group
    return groups[0] if groups else None


def _quality_words(group: QualityGroup) -> str:
    """Give the metric before the cut, after it and after recovery, as far as they are known."""
    base, chosen, recovered = group.find("base"), group.find("chosen"), group.find("recovered")
    start = f"{group.metric} "
    if base:
        start += base.short
    if chosen or recovered:
        start += " → " if base else ""
    if chosen and recovered:
        return f"{start}{chosen.short} before recovery, {recovered.short} after"
    if recovered:
        return f"{start}{recovered.short} after recovery"
    if chosen:
        return f"{start}{chosen.short} after the cut"
    return f"{start} before the cut" if base else ""


def _sentence(record: RunRecord, quality: Sequence[QualityGroup]) -> str:
    """Write the headline: heads, quality and speed, and where a run stopped."""
    parts = []
    # 1. What was measured, as far as the run came.
    removed = _removed(record)
    if removed:
        parts.append(f"{removed[0]:,} of {removed[1]:,} heads removed")
    elif record.scores is not None:
        parts.append(f"{record.scores.n_heads:,} heads scored, none removed")
    group = _headline_quality(quality)
    if group is not None:
        parts.append(_quality_words(group))
    speed = _headline_speed(record)
    if speed is not None:
        parts.append(f"{verdict(speed)[0]} at batch {speed.batch} × {speed.length} tokens")
    # 2. Where the run stopped. A table without the original or the chosen model has no words.
    text = "; ".join(filter(None, parts))
    if record.status == "done":
        return f"{text}." if text else "The run is done; its record holds no results."
    start = f"{_UNFINISHED[record.status]} {record.stage}"
    if not text:
        return f"{start}, before anything was measured."
    return f"{start}. Until then: {text}."


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
    removed = _removed(record)
    if record.plan is not None and removed:
        budget = record.plan.wanted or "by hand"
        facts.append(Fact("Heads removed", f"{removed[0]:,} of {removed[1]:,}", budget))
    group = _headline_quality(quality)
    if group is not None:
        facts += _quality_facts(group)
    speed = _headline_speed(record)
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
    return [Fact(f"{group.title}, {group.split}", last.short, note, last.tone)]


def _speed_fact(row: SpeedRow) -> Fact:
    line = speed_line(row)
    # No line break within the batch and the length.
    note = f"{line.interval} at batch {line.batch}\u00a0×\u00a0{line.length}"
    if line.tone == "plain":
        note = f"not measurable: {note}"
    return Fact("Speed", line.ratio, note, line.tone)
