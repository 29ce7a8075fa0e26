"""The origin of a record: versions, hardware, data, methods and digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headprune.core.record import RunRecord
from headprune.report.formats import duration, flat

Pairs = Sequence[tuple[str, str]]


def provenance(record: RunRecord) -> tuple[tuple[str, Pairs], ...]:
    """List titled tables of keys and texts; empty ones are left out."""
    run = [
        ("created", record.created),
        ("status", f"{record.status}, last stage {record.stage}"),
        ("git commit", record.git_commit or "not in a checkout"),
    ]
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
    pairs = []
    for stage, seconds in timings.items():
        # Records by others may hold anything here.
        text = str(seconds)
        if isinstance(seconds, (int, float)):
            text = duration(float(seconds))
        pairs.append((stage, text))
    return pairs


def _methods(record: RunRecord) -> Pairs:
    pairs: list[tuple[str, str]] = []
    scores, plan = record.scores, record.plan
    if scores is not None:
        pairs.append(("scorer", scores.scorer))
        pairs.append(("examples", f"{scores.n_examples:,}"))
        pairs += flat(scores.settings, "scorer.")
        if scores.seed is not None:
            pairs.append(("scorer seed", str(scores.seed)))
    if plan is not None:
        pairs.append(("selector", plan.selector))
        pairs += flat(plan.settings, "selector.")
        if plan.wanted:
            pairs.append(("budget", plan.wanted))
        pairs += [("selector's note", note) for note in plan.notes]
    return pairs


def _digests(record: RunRecord) -> Pairs:
    # Digests name files by their content: a plan names its scores, scores their data.
    pairs = [("record", record.digest)]
    scores, plan = record.scores, record.plan
    if scores is not None:
        pairs.append(("scores", scores.digest))
        pairs.append(("model structure", scores.model.structure))
        pairs.append(("model weights", scores.model.weights))
        if scores.data:
            pairs.append(("data", scores.data))
    if plan is not None:
        pairs.append(("plan", plan.digest))
        if plan.scores:
            pairs.append(("scores of the plan", plan.scores))
    return pairs
