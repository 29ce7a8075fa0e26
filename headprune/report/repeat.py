"""The lines that repeat a run: a shell command, and Python for the reader's own batches."""

from __future__ import annotations

import keyword
import math
import re
import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from headprune.core.codec import EMPTY
from headprune.core.ladders import PRICE_SETTINGS
from headprune.core.latency import SAVINGS_FACTOR
from headprune.core.plan import Budget, PruningPlan
from headprune.core.record import RunRecord
from headprune.core.registry import camel_case

#: A path to import, and nothing that could be code: readers copy and run these lines.
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
#: Recoveries that train: they take train rows and the run's seed.
TRAINING = ("finetune",)
#: Names that the reader defines.
_GIVEN = {
    "model": "the uncut model",
    "batches": "batches to score on, with labels: the run's calibration rows",
    "batch": "one batch",
    "train_batches": "a DataLoader of train rows",
    "validation_batches": "batches of validation rows",
}
_TRAINED = "the uncut model, as the run trained it: base/ in its folder"
_RECORDED = 'plan = hp.RunRecord.load("record.json").plan'
_WIDTH = 100


def recipe_file(record: RunRecord, folder: str | None = None) -> str:
    """Name the recipe that the run wrote; empty for the record of no recipe.

    Args:
        record: The record.
        folder: The run's folder; default that of its recipe.
    """
    if "task" not in record.recipe:
        return ""
    folder = folder or str(record.recipe.get("out") or f"runs/{record.name}")
    if folder.startswith("-"):
        folder = f"./{folder}"  # else the shell line has one more option
    return f"{folder}/recipe.yaml"


def command(record: RunRecord, folder: str | None = None) -> str:
    """Write the shell line that repeats the whole recipe, as it was resolved, into a new folder.

    Args:
        record: The record; one of no recipe has no such line.
        folder: The run's folder; default that of its recipe.
    """
    recipe = recipe_file(record, folder)
    if not recipe:
        return ""
    out = f"{recipe.removesuffix('/recipe.yaml')}-again"
    return f"headprune run {shlex.quote(recipe)} --out {shlex.quote(out)}"


def python_lines(record: RunRecord) -> str:
    """Write Python lines that score, select, cut, recover and save, with the record's settings.

    They use the reader's own model and batches, which a comment names. Training before the scores,
    and cuts in stages while the model is trained, are left to the command.
    """
    if record.plan is None and record.scores is None:
        return 'import headprune as hp\n\nrecord = hp.RunRecord.load("record.json")'
    imports, sites = _sites(record)
    # Every call takes the sites where the defaults would not find them.
    given = ["sites=sites"] if sites else []
    body = "\n".join(_body(record, given))
    # Teachers need the model as it was before the cut.
    copied = re.search(r"\boriginal\b", body) is not None
    lines = ["import copy", ""] if copied else []
    lines += [*imports, "import headprune as hp", ""]
    lines += _definitions(record, body)
    lines += sites
    if copied:
        lines.append("original = copy.deepcopy(model)")
    return "\n".join([*lines, body])


def _definitions(record: RunRecord, body: str) -> list[str]:
    """Comment on the names that the reader has to define."""
    meanings = dict(_GIVEN)
    if record.recipe.get("train"):
        meanings["model"] = _TRAINED
    comments = []
    for name, meaning in meanings.items():
        # A keyword argument of that name is no use of it.
        used = re.search(rf"\b{name}\b(?!=)", body)
        if used:
            comments.append(f"# {name}: {meaning}")
    return comments


def _sites(record: RunRecord) -> tuple[list[str], list[str]]:
    """Write imports, and the line that finds the sites; empty where the defaults find them."""
    imports, options = [], []
    path = _map(record.recipe, "model").get("layouts")
    if isinstance(path, str) and _can_be_imported(path):
        module, _, layout = path.partition(":")
        imports.append(f"from {module} import {layout}")
        options.append(f"layouts=[{layout}]")
    policy = _policy(record)
    if policy is not None:
        options.append(f"policy={policy!r}")
    if _map(record.recipe, "select").get("feed_forward") is True:
        options.append("feed_forward=True")
    if not options:
        return [], []
    return imports, [_call("sites = hp.find_sites", "model", *options)]


def _can_be_imported(path: str) -> bool:
    return _IMPORT_PATH.fullmatch(path) is not None and all(map(_is_name, re.split("[.:]", path)))


def _policy(record: RunRecord) -> Any:
    """The policy for key/value groups; None for the default."""
    if record.scores is None:
        policy = _map(record.recipe, "select").get("policy")
        return None if policy == "group" else policy
    for site in record.scores.sites:
        if site.policy != "group":
            return site.policy
    return None


def _body(record: RunRecord, given: list[str]) -> list[str]:
    """Write everything after the imports; ``given`` are arguments for the sites."""
    # Cuts in stages are the command's: the lines begin with their plan.
    gradual = bool(record.recipe.get("gradual"))
    lines = [] if gradual else _chosen(record, given)
    if record.plan is None:
        return lines
    if any("hp.select(" in line for line in lines):
        lines.append(f"# as this run chose: {_RECORDED}")
    else:
        lines.append(_RECORDED)
    if gradual:
        lines.append("# the run trained it between the cuts, which the command does again")
    lines.append(_call("hp.prune_", "model", "plan", *given))
    if not gradual:
        lines += _recoveries(record.recipe, _list(record.recipe, "recover"), "model", given)
    lines.append(_call("hp.save_pretrained", "model", "'small'", *given))
    return lines


def _chosen(record: RunRecord, given: list[str]) -> list[str]:
    """Write the lines that score and select."""
    scores = record.scores
    if scores is None:
        return []
    scorer = _configured("scoring", scores.scorer, scores.settings)
    arguments = ["model", "batches", scorer, *given]
    until = _map(_map(record.recipe, "score"), "until")
    if until:
        arguments.append(f"until=hp.Stable({', '.join(_keywords(until))})")
    lines = [_call("scores = hp.score", *arguments)]
    # A plan by hand has no budget to select by.
    if record.plan is not None and record.plan.wanted:
        prices = scores.settings if scores.ladders is not None else {}
        lines += _selected(record, record.plan, scorer, given, prices)
    return lines


def _selected(
    record: RunRecord,
    plan: PruningPlan,
    scorer: str,
    given: list[str],
    prices: Mapping[str, Any],
) -> list[str]:
    """Write the call of ``hp.select``, after the lines that its arguments need.

    Args:
        record: Of the run.
        plan: The plan that was selected.
        scorer: Writes the scorer.
        given: Arguments that all calls have.
        prices: Settings of the scorer that priced levels; empty where none were priced.
    """
    recipe = record.recipe
    section = _map(recipe, "select")
    rules = {rule: section[rule] for rule in ("must_keep", "must_remove") if section.get(rule)}
    lines, options = [], _keywords(rules)
    budget = _budget(plan)
    if "speedup=" in budget:
        lines.append(_latency_table(_map(section, "latency"), given))
        factor = record.metrics.get(SAVINGS_FACTOR)
        if factor is not None:
            lines.append(
                f"table = table.with_savings({_spelled(factor)})  # measured on a cut copy"
            )
        options.append("latency=table")
    if plan.selector in ("local_search", "repriced") and prices and not section.get("recover"):
        known = {name: prices[name] for name in PRICE_SETTINGS if name in prices}
        call = _call("hp.scoring.refitted_loss_of", "model", "batches", *given, *_keywords(known))
        options.append(f"loss={call}")
    elif plan.selector in ("iterative", "local_search", "repriced"):
        between = _recoveries(recipe, _list(section, "recover"), "small", given)
        if between:
            lines += ["", "def between(small):", *map(_indented, between), ""]
        options.append(_measured(plan, scorer, given, recovers=bool(between)))
    selector = _configured("selection", plan.selector, plan.settings)
    return [*lines, _call("plan = hp.select", "scores", budget, selector, *options)]


def _latency_table(settings: Mapping[str, Any], given: list[str]) -> str:
    # ``given`` holds the sites.
    known = {key: value for key, value in settings.items() if value is not None and key != "sites"}
    return _call("table = hp.bench.latency_table", "model", "batch", *given, *_keywords(known))


def _measured(plan: PruningPlan, scorer: str, given: list[str], recovers: bool) -> str:
    """Write the argument by which a selector measures smaller models."""
    arguments = ["model", "batches"]
    start = "loss=hp.scoring.loss_of"
    if plan.selector == "iterative":
        start = "rescore=hp.scoring.rescorer"
        arguments.append(scorer)
    arguments += given
    if recovers:
        arguments.append("after_cut=between")
    return f"{start}({', '.join(arguments)})"


def _recoveries(
    recipe: Mapping[str, Any], steps: list[Mapping[str, Any]], model: str, given: list[str]
) -> list[str]:
    """Write two lines per step: the configured method, and its call."""
    teacher = "original if method.needs_teacher else None"
    lines = []
    for step in steps:
        name, settings = str(step.get("method")), _map(step, "settings")
        trains = name in TRAINING
        seed = {}
        if trains and recipe.get("seed"):
            seed["seed"] = recipe["seed"]
        lines.append(f"method = {_configured('recovery', name, {**seed, **settings})}")
        # A step without rows takes the calibration rows, unless it trains.
        rows, most = step.get("rows"), step.get("examples")
        on_train = rows == "train" or (trains and not rows)
        batches = "train_batches" if on_train else "batches"
        arguments = [model, batches, "method", teacher, *given]
        if "patience" in settings or "eval_every" in settings:
            arguments.append("validation=validation_batches")
        call = _call("hp.recover_", *arguments)
        lines.append(f"{call}  # on at most {most} of the rows" if most else call)
    return lines


def _configured(package: str, name: str, settings: Mapping[str, Any]) -> str:
    """Write a method with its settings as Python; what is not a plain name stays a string."""
    if not all(map(_is_name, (name, camel_case(name), *settings))):
        return repr(name)
    return f"hp.{package}.{camel_case(name)}({', '.join(_keywords(settings))})"


def _is_name(word: str) -> bool:
    """Whether a word is a Python name.

    ASCII only, as Python takes some other letters for one another.
    """
    if not word.isascii() or not word.isidentifier():
        return False
    return not keyword.iskeyword(word) and word != "__debug__"


def _keywords(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_spelled(value)}" for key, value in settings.items() if _is_name(key)]


def _spelled(value: Any) -> str:
    """Write stored data as Python."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_spelled(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_spelled, value))
        # Without the comma a tuple of one is a number in brackets.
        if len(value) == 1:
            items += ","
        return f"({items})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def _call(name: str, *arguments: str) -> str:
    """Write a call on one line or, where that is long, with one argument per line."""
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(_indented(f"{each},") for each in arguments), ")"])


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def _map(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Read a section of a recipe; empty where there is none."""
    section = data.get(key)
    return section if isinstance(section, Mapping) else EMPTY


def _list(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Read a list of sections; empty where there is none."""
    sections = data.get(key)
    if not isinstance(sections, (list, tuple)):
        return []
    return [section for section in sections if isinstance(section, Mapping)]


def _budget(plan: PruningPlan) -> str:
    """Write the budget or the budgets of a plan as Python."""
    if plan.budget is not None:
        return _spelled_budget(plan.budget)
    budgets = [f"{each.sites!r}: {_spelled_budget(each.budget)}" for each in plan.budgets]
    return "{" + ", ".join(budgets) + "}"


def _spelled_budget(budget: Budget) -> str:
    length = f", length={budget.length}" if budget.length else ""
    gpus = f", tensor_parallel={budget.tensor_parallel}" if budget.tensor_parallel else ""
    return f"hp.Budget({budget.kind}={budget.amount!r}{length}{gpus})"
