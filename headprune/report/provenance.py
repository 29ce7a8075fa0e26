"""Where a record comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headprune.core.record import RunRecord
from headprune.report.formats import duration, flat

Pairs = Sequence[tuple[str, str]]


def provenance(record: RunRecord) -> tuple[tuple[str, Pairs], ...]:
    """Titled lists of keys and texts; empty ones are left out."""
    run = [("created", record.created), ("status", f"{record.status}, last stage {record.stage}")]
    run.append(("git commit", record.git_commit or "not in a checkout"))
    parts = (
        ("Run", run),
        ("Versions", flat(record.versions)),
        ("Hardware", flat(record.hardware)),
        ("Seeds", flat(record.seeds)),
        ("Data rows", flat(record.rows)),
        ("Timings", _timings(record.timings)),
        ("Scorer and selector", _methods(record)),
        ("Fingerprints and digests", _digests(record)),
    )
    return tuple((title, pairs) for title, pairs in parts if pairs)


def _timings(timings: Mapping[str, Any]) -> Pairs:
    return [
        (k, duration(float(v)) if isinstance(v, (int, float)) else str(v))
        for k, v in timings.items()
    ]


def _methods(record: RunRecord) -> Pairs:
    pairs: list[tuple[str, str]] = []
    if scores := record.scores:
        pairs += [("scorer", scores.scorer), ("examples", f"{scores.n_examples:,}")]
        pairs += flat(scores.settings, "scorer.")
        pairs += [("scorer seed", str(scores.seed))] if scores.seed is not None else []
    if plan := record.plan:
        pairs += [("selector", plan.selector), *flat(plan.settings, "selector.")]
        pairs += [("budget", plan.wanted)] if plan.wanted else []
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
