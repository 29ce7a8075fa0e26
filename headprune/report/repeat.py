"""The lines that do a run again: a shell command, and Python on one's own batches."""

from __future__ import annotations

import keyword
import math
import re
import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from headprune.core.codec import EMPTY
from headprune.core.plan import Budget, PruningPlan
from headprune.core.record import RunRecord
from headprune.core.registry import camel_case

#: A name that can be imported, and nothing that could be more than that: these lines are copied and
#: run.
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
#: Recoveries that train: on train rows, and from the run's seed.
TRAINING = ("finetune",)
#: What the lines take from the reader.
_GIVEN = {
    "model": "the uncut model",
    "batches": "what it is scored on, labels with it: the run's calibration rows",
    "batch": "one batch",
    "train_batches": "a DataLoader of train rows",
    "validation_batches": "those of validation rows",
}
_RECORDED = 'plan = hp.RunRecord.load("record.json").plan'
_WIDTH = 100


def command(record: RunRecord) -> str:
    """The shell line that runs the whole recipe again, as it was resolved, into a folder of its
    own."""
    if "task" not in record.recipe:  # not a recipe's record
        return f"headprune run {shlex.quote(record.name)}"
    folder = str(record.recipe.get("out") or f"runs/{record.name}")
    folder = f"./{folder}" if folder.startswith("-") else folder  # else it is an option
    return (
        f"headprune run {shlex.quote(f'{folder}/recipe.yaml')} --out"
        f" {shlex.quote(f'{folder}-again')}"
    )


def python_lines(record: RunRecord) -> str:
    """Python lines that score, select, cut, recover and save again, with every setting that the
    record has.

    They are for a reader's own model and batches, which a comment names. A training before the
    scores, and cuts in stages while the model is trained, are left to the command.
    """
    if record.plan is None and record.scores is None:
        return 'import headprune as hp\n\nrecord = hp.RunRecord.load("record.json")'
    imports, sites = _sites(record)
    given = ["sites=sites"] if sites else []
    gradual = bool(record.recipe.get("gradual"))
    body = [] if gradual else _chosen(record, given)
    if record.plan is not None:
        chosen = any("hp.select(" in line for line in body)
        body += [f"# as this run chose: {_RECORDED}" if chosen else _RECORDED]
        body += (
            ["# the run trained it between the cuts, which the command does again"]
            if gradual
            else []
        )
        body += [_call("hp.prune_", "model", "plan", *given)]
        body += (
            []
            if gradual
            else _recoveries(record.recipe, _list(record.recipe, "recover"), "model", given)
        )
        body += [_call("hp.save_pretrained", "model", "'small'", *given)]
    text = "\n".join(body)
    copied = ["original = copy.deepcopy(model)"] if re.search(r"\boriginal\b", text) else []
    told = _GIVEN | (
        {"model": "the uncut model, as the run trained it: base/ in its folder"}
        if record.recipe.get("train")
        else {}
    )
    named = [
        f"# {name}: {what}" for name, what in told.items() if re.search(rf"\b{name}\b(?!=)", text)
    ]
    head = [*(["import copy", ""] if copied else []), *imports, "import headprune as hp", ""]
    return "\n".join([*head, *named, *sites, *copied, text])


def _sites(record: RunRecord) -> tuple[list[str], list[str]]:
    """Imports, and the line that finds the sites where that takes a layout of one's own or another
    policy."""
    path, how = _map(record.recipe, "model").get("layouts"), []
    imports = []
    if (
        isinstance(path, str)
        and _IMPORT_PATH.fullmatch(path)
        and all(map(_is_name, re.split("[.:]", path)))
    ):
        module, _, layout = path.partition(":")
        imports, how = [f"from {module} import {layout}"], [f"layouts=[{layout}]"]
    asked = _map(record.recipe, "select").get("policy")
    found = [site.policy for site in record.scores.sites] if record.scores else [asked]
    policy = next((each for each in found if each not in (None, "group")), None)
    how += [] if policy is None else [f"policy={policy!r}"]
    return imports, [_call("sites = hp.find_sites", "model", *how)] if how else []


def _chosen(record: RunRecord, given: list[str]) -> list[str]:
    """The scores, and the plan that rests on them."""
    scores, plan, wanted = record.scores, record.plan, _map(record.recipe, "select")
    if scores is None:
        return []
    scorer = _configured("scoring", scores.scorer, scores.settings)
    until = _map(_map(record.recipe, "score"), "until")
    stop = [f"until=hp.Stable({', '.join(_keywords(until))})"] if until else []
    lines = [_call("scores = hp.score", "model", "batches", scorer, *given, *stop)]
    if plan is None or not plan.wanted:
        return lines
    asked = [
        f"{name}={_spelled(wanted[name])}"
        for name in ("must_keep", "must_remove")
        if wanted.get(name)
    ]
    if "speedup=" in (budget := _budget(plan)):
        at = {
            key: value
            for key, value in _map(wanted, "latency").items()
            if value is not None and key != "sites"
        }
        lines.append(
            _call("table = hp.bench.latency_table", "model", "batch", *given, *_keywords(at))
        )
        asked.append("latency=table")
    looks = {
        "iterative": ("rescore", "rescorer", [scorer]),
        "local_search": ("loss", "loss_of", []),
    }
    if plan.selector in looks:
        between = _recoveries(record.recipe, _list(wanted, "recover"), "small", given)
        lines += (
            ["", "def between(small):", *(_indented(line) for line in between), ""]
            if between
            else []
        )
        argument, verb, more = looks[plan.selector]
        after = ["after_cut=between"] if between else []
        arguments = ["model", "batches", *more, *given, *after]
        asked.append(f"{argument}=hp.scoring.{verb}({', '.join(arguments)})")
    selector = _configured("selection", plan.selector, plan.settings)
    return [*lines, _call("plan = hp.select", "scores", budget, selector, *asked)]


def _recoveries(
    recipe: Mapping[str, Any], steps: list[Mapping[str, Any]], model: str, given: list[str]
) -> list[str]:
    """Two lines a step: the method as it is set, and its call."""
    lines = []
    for step in steps:
        name, settings = str(step.get("method")), _map(step, "settings")
        trains = name in TRAINING
        seed = {"seed": recipe["seed"]} if trains and recipe.get("seed") else {}
        rows = step.get("rows") or ("train" if trains else "calibration")
        held = (
            ["validation=validation_batches"]
            if settings.keys() & {"patience", "eval_every"}
            else []
        )
        teacher = "original if method.needs_teacher else None"
        lines.append(f"method = {_configured('recovery', name, {**seed, **settings})}")
        batches = "train_batches" if rows == "train" else "batches"
        lines.append(_call("hp.recover_", model, batches, "method", teacher, *given, *held))
    return lines


def _configured(room: str, name: str, settings: Mapping[str, Any]) -> str:
    """A method with its settings as Python; what is no plain name stays a string."""
    if not all(map(_is_name, (name, camel_case(name), *settings))):
        return repr(name)
    return f"hp.{room}.{camel_case(name)}({', '.join(_keywords(settings))})"


def _is_name(word: str) -> bool:
    """Whether Python takes a word for a name of ours; it takes some beyond ASCII for one
    another."""
    return (
        word.isascii()
        and word.isidentifier()
        and not keyword.iskeyword(word)
        and word != "__debug__"
    )


def _keywords(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_spelled(value)}" for key, value in settings.items() if _is_name(key)]


def _spelled(value: Any) -> str:
    """Stored data as Python."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_spelled(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_spelled, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def _call(name: str, *arguments: str) -> str:
    """A call on one line or, where that is long, with an argument a line."""
    line = f"{name}({', '.join(arguments)})"
    return (
        line
        if len(line) <= _WIDTH
        else "\n".join([f"{name}(", *(_indented(f"{each},") for each in arguments), ")"])
    )


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def _map(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of a recipe; empty where there is none."""
    found = data.get(key)
    return found if isinstance(found, Mapping) else EMPTY


def _list(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = data.get(key)
    return (
        [step for step in found if isinstance(step, Mapping)]
        if isinstance(found, (list, tuple))
        else []
    )


def _budget(plan: PruningPlan) -> str:
    """The budget or budgets of a plan as Python."""

    def spelled(budget: Budget) -> str:
        length = f", length={budget.length}" if budget.length else ""
        return f"hp.Budget({budget.kind}={budget.amount!r}{length})"

    if plan.budget is not None:
        return spelled(plan.budget)
    return "{" + ", ".join(f"{b.sites!r}: {spelled(b.budget)}" for b in plan.budgets) + "}"
