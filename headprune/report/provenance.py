"""Where a record comes from, and the lines that do it again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from headprune.core.plan import Budget, PruningPlan
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
    return [(k, duration(float(v)) if isinstance(v, (int, float)) else str(v)) for k, v in timings.items()]


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


def command(record: RunRecord) -> str:
    """The shell line that runs the whole recipe again, as it was resolved, into a folder of its own."""
    if "task" not in record.recipe:  # not a recipe's record
        return f"headprune run {shlex.quote(record.name)}"
    folder = str(record.recipe.get("out") or f"runs/{record.name}")
    return f"headprune run {shlex.quote(f'{folder}/recipe.yaml')} --out {shlex.quote(f'{folder}-again')}"


#: What selectors that look at the model are handed, by name.
_ASKED = {
    "iterative": ", rescore=hp.scoring.rescorer(model, batches, {!r})",
    "local_search": ", loss=hp.scoring.loss_of(model, batches)",
}


#: A name that can be imported, and nothing that could be more than that: these lines are copied and run.
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def python_lines(record: RunRecord) -> str:
    """Python lines that repeat the cut, from the record and from the start."""
    lines = ["import headprune as hp", ""]
    module, _, layout = _own_layout(record).partition(":")
    sites, given = "sites = hp.find_sites(model)", ""
    if layout:  # attention of one's own: every verb is told where it is
        lines.insert(0, f"from {module} import {layout}")
        sites, given = f"sites = hp.find_sites(model, layouts=[{layout}])", ", sites=sites"
        lines += [sites, ""]
    if record.plan is not None:
        lines += [
            "# the same cut, from this run's record",
            'record = hp.RunRecord.load("record.json")',
            f"hp.prune_(model, record.plan{given})",
        ]
    if record.scores is not None:
        lines += ["" if record.plan is None else "\n# or from the start, on your own batches"]
        lines += [] if layout else [sites]
        lines += [f"scores = hp.score(model, batches, {record.scores.scorer!r}{given})"]
        if record.plan is not None and record.plan.wanted:
            how = f"{_budget(record.plan)}, {record.plan.selector!r}"
            if "speedup=" in how:
                lines.append("table = hp.bench.latency_table(model, batch)  # of the size that must be fast")
                how += ", latency=table"
            how += _ASKED.get(record.plan.selector, "").format(record.scores.scorer)
            lines += [f"plan = hp.select(scores, {how})", f"hp.prune_(model, plan{given})"]
    if record.plan is None and record.scores is None:
        lines.append('record = hp.RunRecord.load("record.json")')
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _own_layout(record: RunRecord) -> str:
    """``module:NAME`` of the recipe's layouts; empty where it has none, or what is no such name."""
    model = record.recipe.get("model")
    found = model.get("layouts") if isinstance(model, Mapping) else None
    return found if isinstance(found, str) and _IMPORT_PATH.fullmatch(found) else ""


def _budget(plan: PruningPlan) -> str:
    """The budget or budgets of a plan as Python."""

    def spelled(budget: Budget) -> str:
        length = f", length={budget.length}" if budget.length else ""
        return f"hp.Budget({budget.kind}={budget.amount!r}{length})"

    if plan.budget is not None:
        return spelled(plan.budget)
    return "{" + ", ".join(f"{b.sites!r}: {spelled(b.budget)}" for b in plan.budgets) + "}"
