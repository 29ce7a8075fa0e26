"""What a report says, as formatted text: the one place where a record's numbers become words."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from headprune.core.record import Proof, RunRecord, SizeRow, SpeedRow
from headprune.report.formats import count, duration, fixed, flat, milliseconds, signed, significant, times
from headprune.report.heatmap import HeatMap, heat_map
from headprune.report.quality import QualityGroup, quality_groups

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Fact:
    """One tile under the headline; ``tone`` is good, bad or plain."""

    label: str
    value: str
    note: str
    tone: str = "plain"


@dataclass(frozen=True)
class SpeedLine:
    """One formatted row of the speed table."""

    batch: str
    length: str
    original: tuple[str, str]
    pruned: tuple[str, str]
    ratio: str
    interval: str
    verdict: str
    tone: str
    rounds: str


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
    heads: HeatMap | None
    quality: tuple[QualityGroup, ...]
    speed: tuple[SpeedLine, ...]
    size: tuple[SizeLine, ...]
    proofs: tuple[ProofLine, ...]
    provenance: tuple[tuple[str, Pairs], ...]
    measurements: Pairs
    recipe: str
    command: str
    python: str
    missing: tuple[str, ...]


def view(record: RunRecord) -> View:
    """Formats a record."""
    quality = quality_groups(record)
    speed = tuple(_speed_line(r) for r in record.speed)
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
    return View(
        record=record,
        sentence=_sentence(record, quality),
        facts=tuple(_facts(record, quality, proofs)),
        heads=heat_map(record),
        quality=quality,
        speed=speed,
        size=tuple(_size_line(r) for r in record.size),
        proofs=proofs,
        provenance=tuple((title, pairs) for title, pairs in _provenance(record) if pairs),
        measurements=flat({k: v for k, v in record.metrics.items() if k != "attention"}),
        recipe=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100).strip() if recipe else "",
        command=f"headprune run {shlex.quote(record.name)}",
        python=_python(record),
        missing=tuple(name for name, part in parts.items() if not part),
    )


def _removed(record: RunRecord) -> tuple[int, int] | None:
    """Removed heads and heads present before."""
    if record.plan is None:
        return None
    kept = record.plan.mask.n_kept
    present = record.scores.n_heads if record.scores is not None else record.plan.mask.n_heads
    return present - kept, present


def _headline_speed(record: RunRecord) -> SpeedRow | None:
    """The row with the most tokens a call: fixed in advance, not the best one."""
    return max(record.speed, key=lambda r: (r.batch * r.length, r.batch), default=None)


def _headline_quality(quality: Sequence[QualityGroup]) -> QualityGroup | None:
    """The first table with the original model and something to compare, on test rows if there are any."""
    full = [g for g in quality if len(g.rows) > 1 and g.find("base")] or [g for g in quality if g.rows]
    return next((g for g in full if g.split == "test"), full[0] if full else None)


def _quality_words(group: QualityGroup) -> str:
    base, chosen, recovered = group.find("base"), group.find("chosen"), group.find("recovered")
    if chosen and recovered:
        start = f"{base.short} → {chosen.short}" if base else chosen.short
        return f"{group.metric} {start} before recovery, {recovered.short} after"
    last = recovered or chosen
    if last:
        start = f"{base.short} → " if base else ""
        return f"{group.metric} {start}{last.short} {'after recovery' if recovered else 'after the cut'}"
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
        parts.append(f"{_verdict(speed)[0]} at batch {speed.batch} × {speed.length} tokens")
    text = "; ".join(parts)
    if record.status == "done":
        return f"{text}." if text else "The run is done; its record holds no results."
    lead = {
        "failed": f"The run failed in stage {record.stage}",
        "interrupted": f"The run was interrupted in stage {record.stage}",
        "running": f"The run is in stage {record.stage}",
    }[record.status]
    return f"{lead}. Until then: {text}." if text else f"{lead}, before anything was measured."


def _verdict(row: SpeedRow) -> tuple[str, str]:
    """What a ratio says, and its tone; an interval that holds 1 says nothing."""
    if not all(map(math.isfinite, (row.ratio, row.low, row.high))) or row.ratio <= 0:
        return "no usable timing", "plain"
    if row.low > 1:
        return f"{times(row.ratio)} faster", "good"
    if row.high < 1:
        return f"{times(1 / row.ratio)} slower", "bad"
    return "no measurable difference in speed", "plain"


def _speed_line(row: SpeedRow) -> SpeedLine:
    verdict, tone = _verdict(row)
    return SpeedLine(
        batch=f"{row.batch:,}",
        length=f"{row.length:,}",
        original=(milliseconds(row.original_p50), milliseconds(row.original_p90)),
        pruned=(milliseconds(row.pruned_p50), milliseconds(row.pruned_p90)),
        ratio=times(row.ratio),
        interval=f"{fixed(row.low, 3)} to {fixed(row.high, 3)}",
        verdict=verdict,
        tone=tone,
        rounds=f"{row.rounds:,}",
    )


def _size_line(row: SizeRow) -> SizeLine:
    share = 100 * row.pruned / row.original if row.original else math.nan
    change = "" if math.isnan(share) else f"{signed(share - 100, 1)} %"
    remaining = 0.0 if math.isnan(share) else min(max(share, 0.0), 100.0)
    return SizeLine(row.name, count(row.original), count(row.pruned), change, round(remaining, 2))


def _proof_line(proof: Proof) -> ProofLine:
    passed = proof.max_difference <= proof.tolerance
    verdict = "The pruned model equals the gated one" if passed else "The pruned model does NOT equal the gated one"
    examples = f"{proof.n_examples:,} example{'' if proof.n_examples == 1 else 's'}"
    return ProofLine(
        what=proof.what,
        passed=passed,
        words=(
            f"{verdict}: the largest difference of {proof.what} is {significant(proof.max_difference, 3)}, "
            f"{'within' if passed else 'over'} the tolerance of {significant(proof.tolerance, 3)} "
            f"({examples}, {proof.dtype}; the largest output is {significant(proof.scale, 3)})."
        ),
    )


def _facts(record: RunRecord, quality: Sequence[QualityGroup], proofs: Sequence[ProofLine]) -> list[Fact]:
    facts = []
    if removed := _removed(record):
        budget = str(record.plan.budget) if record.plan and record.plan.budget else "by hand"
        facts.append(Fact("Heads removed", f"{removed[0]:,} of {removed[1]:,}", budget))
    group = _headline_quality(quality)
    last = group and (group.find("recovered") or group.find("chosen"))
    if group and last:
        unit = {"points": "points", "ratio": "the original", "difference": ""}.get(group.delta_header, "")
        change = f"{last.delta} {unit}".strip() if last.delta else last.note
        facts.append(Fact(f"{group.metric}, {group.split}".capitalize(), last.short, change, last.tone))
    if speed := _headline_speed(record):
        line = _speed_line(speed)
        note = f"{line.interval} at batch {line.batch} × {line.length}"
        facts.append(Fact("Speed", line.ratio, note if line.tone != "plain" else f"not measurable: {note}", line.tone))
    for row in record.size:
        if "param" in row.name.lower():
            size = _size_line(row)
            facts.append(Fact("Parameters", size.change, f"{size.original} → {size.pruned}"))
    if proofs:
        passed = all(p.passed for p in proofs)
        note = "pruned equals gated" if passed else "pruned differs from gated"
        facts.append(Fact("Proof", "passed" if passed else "FAILED", note, "good" if passed else "bad"))
    return facts


def _provenance(record: RunRecord) -> list[tuple[str, Pairs]]:
    run = [("created", record.created), ("status", f"{record.status}, last stage {record.stage}")]
    run.append(("git commit", record.git_commit or "not in a checkout"))
    return [
        ("Run", run),
        ("Versions", flat(record.versions)),
        ("Hardware", flat(record.hardware)),
        ("Seeds", flat(record.seeds)),
        ("Data rows", flat(record.rows)),
        ("Timings", _timings(record.timings)),
        ("Scorer and selector", _methods(record)),
        ("Fingerprints and digests", _digests(record)),
    ]


def _timings(timings: Mapping[str, Any]) -> Pairs:
    return [(k, duration(float(v)) if isinstance(v, (int, float)) else str(v)) for k, v in timings.items()]


def _methods(record: RunRecord) -> Pairs:
    pairs: list[tuple[str, str]] = []
    if scores := record.scores:
        pairs += [("scorer", scores.scorer), ("examples", f"{scores.n_examples:,}")]
        pairs += flat(scores.settings, "scorer.")
        pairs += [("scorer seed", str(scores.seed))] if scores.seed is not None else []
    if plan := record.plan:
        pairs += [("selector", plan.selector), *flat(plan.settings, "selector.")]
        pairs += [("budget", str(plan.budget))] if plan.budget else []
        pairs += [("selector's note", note) for note in plan.notes]
    return pairs


def _digests(record: RunRecord) -> Pairs:
    pairs = [("record", record.digest)]
    if scores := record.scores:
        pairs += [("scores", scores.digest), ("model structure", scores.model.structure)]
        pairs += [("model weights", scores.model.weights)]
        pairs += [("data", scores.data)] if scores.data else []
    if plan := record.plan:
        pairs.append(("plan", plan.digest))
        pairs += [("scores the plan rests on", plan.scores)] if plan.scores else []
    return pairs


def _python(record: RunRecord) -> str:
    lines = ["import headprune as hp", ""]
    if record.plan is not None:
        lines += [
            'record = hp.RunRecord.load("record.json")  # the record that this page was drawn from',
            "hp.prune_(model, record.plan)  # the same cut on the same model, in place",
        ]
    if record.scores is not None:
        lines += ["" if record.plan is None else "\n# or from the start, on your own model and batches"]
        lines += ["sites = hp.find_sites(model)", f"scores = hp.score(model, batches, {record.scores.scorer!r})"]
        if record.plan is not None and record.plan.budget is not None:
            budget = record.plan.budget
            length = f", length={budget.length}" if budget.length else ""
            how = f"hp.Budget({budget.kind}={budget.amount!r}{length}), {record.plan.selector!r}"
            lines += [f"plan = hp.select(scores, {how})", "hp.prune_(model, plan)"]
    if len(lines) == 2:
        lines.append('record = hp.RunRecord.load("record.json")')
    return "\n".join(lines).replace("\n\n\n", "\n\n")
