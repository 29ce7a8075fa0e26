"""What a report says, as formatted text: the one place where a record's numbers become words."""

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


@dataclass(frozen=True)
class Fact:
    """One tile under the headline; ``tone`` is good, bad or plain."""

    label: str
    value: str
    note: str
    tone: str = "plain"


@dataclass(frozen=True)
class SizeLine:
    """One formatted row of the size table; ``remaining`` is a percentage."""

    name: str
    original: str
    pruned: str
    change: str
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
    sentence: str
    facts: tuple[Fact, ...]
    plan: str
    heads: tuple[HeatMap, ...]
    attention: AttentionView | None
    agreement: Agreement | None
    choice: ChoiceTable | None
    quality: tuple[QualityGroup, ...]
    speed: tuple[SpeedLine, ...]
    grid: SpeedGrid | None
    decoding: tuple[DecodingLine, ...]
    size: tuple[SizeLine, ...]
    layers: LayerTable | None
    proofs: tuple[ProofLine, ...]
    provenance: tuple[tuple[str, Pairs], ...]
    measurements: Pairs
    recipe: str
    command: str
    python: str
    missing: tuple[str, ...]


def view(record: RunRecord, beside: ReportInputs = NOTHING) -> View:
    """Formats a record with what lies beside it."""
    quality = quality_groups(record)
    speed = tuple(speed_line(r) for r in record.speed)
    decoding = decoding_lines(record)
    proofs = tuple(_proof_line(p) for p in record.proofs)
    parts = {
        "scores": record.scores,
        "plan": record.plan,
        "accuracy": record.quality,
        "speed": record.speed,
        "size": record.size,
        "proof": record.proofs,
    }
    recipe = record.to_dict()["recipe"]
    shown = {"decoding"} if decoding else set()
    return View(
        record=record,
        sentence=_sentence(record, quality),
        facts=tuple(_facts(record, quality, proofs)),
        plan=_plan_words(record),
        heads=_heat_maps(record, beside),
        attention=attention_view(record, beside.pictures),
        agreement=beside.agreement,
        choice=choice_table(record),
        quality=quality,
        speed=speed,
        grid=speed_grid(record.speed),
        decoding=decoding,
        size=tuple(_size_line(r) for r in record.size),
        layers=layer_table(record),
        proofs=proofs,
        provenance=provenance(record),
        measurements=flat({k: v for k, v in record.metrics.items() if k not in shown}),
        recipe=(
            yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100).strip()
            if recipe
            else ""
        ),
        command=command(record),
        python=python_lines(record),
        missing=tuple(name for name, part in parts.items() if not part),
    )


def _heat_maps(record: RunRecord, beside: ReportInputs) -> tuple[HeatMap, ...]:
    """One a scorer, the record's own first."""
    maps = [heat_map(record, scores, beside.pictures) for scores in (None, *beside.scores)]
    return tuple(found for found in maps if found is not None)


def _removed(record: RunRecord) -> tuple[int, int] | None:
    """Removed heads and heads present before."""
    if record.plan is None:
        return None
    kept = record.plan.mask.n_kept
    present = record.scores.n_heads if record.scores is not None else record.plan.mask.n_heads
    return present - kept, present


def _plan_words(record: RunRecord) -> str:
    """What stays and why; unlike ``PruningPlan.title`` it leaves out heads that were gone
    before."""
    plan, removed = record.plan, _removed(record)
    if plan is None or removed is None:
        return ""
    how = plan.selector if plan.selector == "by hand" else f"with {plan.selector}"
    by = f" by {plan.scorer}" if plan.scorer else ""
    budget = f" to {plan.wanted}" if plan.wanted else ""
    return f"{plan.mask.n_kept:,} of {removed[1]:,} heads stay, chosen {how}{by}{budget}."


def _headline_speed(record: RunRecord) -> SpeedRow | None:
    """The row with the most tokens a call: fixed in advance, not the best one."""
    return max(record.speed, key=lambda r: (r.batch * r.length, r.batch), default=None)


def _headline_quality(quality: Sequence[QualityGroup]) -> QualityGroup | None:
    """The first table with the original model and something to compare, on test rows if there are
    any."""
    full = [g for g in quality if len(g.rows) > 1 and g.find("base")] or [
        g for g in quality if g.rows
    ]
    return next((g for g in full if g.split == "test"), full[0] if full else None)


def _quality_words(group: QualityGroup) -> str:
    base, chosen, recovered = group.find("base"), group.find("chosen"), group.find("recovered")
    if chosen and recovered:
        start = f"{base.short} → {chosen.short}" if base else chosen.short
        return f"{group.metric} {start} before recovery, {recovered.short} after"
    last = recovered or chosen
    if last:
        start = f"{base.short} → " if base else ""
        return (
            f"{group.metric} {start}{last.short}"
            f" {'after recovery' if recovered else 'after the cut'}"
        )
    return f"{group.metric} {base.short} before the cut" if base else ""


def _sentence(record: RunRecord, quality: Sequence[QualityGroup]) -> str:
    parts = []
    removed, group, speed = _removed(record), _headline_quality(quality), _headline_speed(record)
    if removed:
        parts.append(f"{removed[0]:,} of {removed[1]:,} heads removed")
    elif record.scores is not None:
        parts.append(f"{record.scores.n_heads:,} heads scored, none removed")
    if group and (words := _quality_words(group)):
        parts.append(words)
    if speed:
        parts.append(f"{verdict(speed)[0]} at batch {speed.batch} × {speed.length} tokens")
    text = "; ".join(parts)
    if record.status == "done":
        return f"{text}." if text else "The run is done; its record holds no results."
    lead = {
        "failed": f"The run failed in stage {record.stage}",
        "interrupted": f"The run was interrupted in stage {record.stage}",
        "running": f"The run is in stage {record.stage}",
    }[record.status]
    return f"{lead}. Until then: {text}." if text else f"{lead}, before anything was measured."


def _size_line(row: SizeRow) -> SizeLine:
    share = 100 * row.pruned / row.original if row.original else math.nan
    change = "" if math.isnan(share) else f"{signed(share - 100, 1)} %"
    remaining = 0.0 if math.isnan(share) else min(max(share, 0.0), 100.0)
    return SizeLine(row.name, count(row.original), count(row.pruned), change, round(remaining, 2))


def _proof_line(proof: Proof) -> ProofLine:
    passed = proof.max_difference <= proof.tolerance
    verdict = (
        "The pruned model equals the gated one"
        if passed
        else "The pruned model does NOT equal the gated one"
    )
    examples = f"{proof.n_examples:,} example{'' if proof.n_examples == 1 else 's'}"
    return ProofLine(
        what=proof.what,
        passed=passed,
        words=(
            f"{verdict}: the largest difference of {proof.what} is"
            f" {significant(proof.max_difference, 3)}, {'within' if passed else 'over'} the"
            f" tolerance of {significant(proof.tolerance, 3)} ({examples}, {proof.dtype}; the"
            f" largest output is {significant(proof.scale, 3)})."
        ),
    )


def _facts(
    record: RunRecord, quality: Sequence[QualityGroup], proofs: Sequence[ProofLine]
) -> list[Fact]:
    facts = []
    if removed := _removed(record):
        budget = (record.plan.wanted if record.plan else "") or "by hand"
        facts.append(Fact("Heads removed", f"{removed[0]:,} of {removed[1]:,}", budget))
    group = _headline_quality(quality)
    last = group and (group.find("recovered") or group.find("chosen"))
    if group and last:
        unit = {"points": "points", "ratio": "the original", "difference": ""}.get(
            group.delta_header, ""
        )
        change = f"{last.delta} {unit}".strip() if last.delta else last.note
        facts.append(Fact(f"{group.title}, {group.split}", last.short, change, last.tone))
    if speed := _headline_speed(record):
        line = speed_line(speed)
        note = f"{line.interval} at batch {line.batch}\u00a0×\u00a0{line.length}"
        facts.append(
            Fact(
                "Speed",
                line.ratio,
                note if line.tone != "plain" else f"not measurable: {note}",
                line.tone,
            )
        )
    for row in record.size:
        if "param" in row.name.lower():
            size = _size_line(row)
            facts.append(Fact("Parameters", size.change, f"{size.original} → {size.pruned}"))
    if proofs:
        passed = all(p.passed for p in proofs)
        note = "pruned equals gated" if passed else "pruned differs from gated"
        facts.append(
            Fact("Proof", "passed" if passed else "FAILED", note, "good" if passed else "bad")
        )
    return facts
