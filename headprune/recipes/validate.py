"""Check a recipe, and report everything that is wrong with it at once."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from headprune.core.errors import HeadPruneError, InvalidValue, UnknownName, did_you_mean
from headprune.core.registry import Registry
from headprune.recipes.consistency import (
    data_problems,
    metric_problems,
    model_problems,
    section_in,
)
from headprune.recipes.presets import preset_named
from headprune.recipes.reading import locate, override, read_raw
from headprune.recipes.references import interpolate
from headprune.recipes.schema import (
    DEFAULT_SCORER,
    BudgetSection,
    LatencySection,
    Recipe,
    default_selector,
)
from headprune.selection._inner import CALLABLES

#: Errors that a message lists.
_SHOWN = 50
#: Settings of the scorer ``auto`` that are sections of a recipe.
_OF_RECIPE = {"keep": "select", "refit": "recover", "refit_settings": "recover"}
#: What strings must look like, by key.
_PATTERNS = {"name": "made of letters, digits, '.', '_' and '-', a letter or digit first"}
#: Tasks whose inputs have a fixed length.
_FIXED_LENGTH = ("image_classification", "audio_classification")


class RecipeError(InvalidValue):
    """Everything that is wrong with one recipe; ``problems`` lists it one by one."""

    def __init__(self, source: str, problems: Iterable[InvalidValue]) -> None:
        self.problems = tuple(problems)
        super().__init__(source, "a valid recipe", f"{len(self.problems)} errors")

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"{self.where}: {count} error{'' if count == 1 else 's'}"]
        lines += map(str, self.problems[:_SHOWN])
        if count > _SHOWN:
            lines.append(f"and {count - _SHOWN} more")
        return "\n  ".join(lines)


def load_recipe(recipe: str | Path, settings: Iterable[str] = ()) -> Recipe:
    """Read, complete and check a recipe.

    Args:
        recipe: A path, or the name of a shipped recipe.
        settings: ``dotted.key=value`` overrides.

    Raises:
        RecipeError: with every error that the recipe has.
        InvalidValue: the file cannot be read, or an override is malformed.
        UnknownName: no such recipe.
    """
    path = locate(recipe)
    return check_recipe(override(read_raw(path), settings), str(path))


def check_recipe(raw: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Return the recipe in ``raw``, with references, preset and defaults filled in.

    Raises:
        RecipeError: with every error that the recipe has.
    """
    # 1. Replace references. A recipe that is far too long is not checked any further.
    try:
        data, problems = interpolate(raw)
    except InvalidValue as error:
        raise RecipeError(source, [error]) from None
    # 2. Apply a preset.
    if data.get("preset") is not None:
        try:
            data = preset_named(data["preset"]).laid_over(data)
        except UnknownName as error:
            problems.append(InvalidValue(error.where, error.must, error.got, error.hint))
    # 3. Check types, then what types cannot say. A key with an error already is not blamed twice.
    recipe = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        problems += _from_pydantic(error, data)
    blamed = {problem.where for problem in problems}
    problems += [problem for problem in _beyond_types(data) if problem.where not in blamed]
    if problems or recipe is None:
        raise RecipeError(source, problems)
    return recipe


def recipe_yaml(recipe: Recipe) -> str:
    """Return the whole recipe as YAML that can be run, defaults filled in."""
    return str(yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True, width=110))


# ---------------------------------------------------------------- types


def _from_pydantic(error: ValidationError, data: Any) -> list[InvalidValue]:
    """Return pydantic's errors in our template, those of one value's alternatives joined."""
    musts: dict[str, list[str]] = {}
    details: dict[str, tuple[str, str]] = {}
    for item in error.errors(include_url=False):
        path, known = _real_path(item["loc"], data)
        must, got, hint = _in_our_words(item, path, known)
        alternatives = musts.setdefault(path, [])
        if must not in alternatives:
            alternatives.append(must)
        details[path] = (got, hint)
    return [InvalidValue(path, " or ".join(musts[path]), *details[path]) for path in musts]


def _in_our_words(item: Any, path: str, known: list[str]) -> tuple[str, str, str]:
    """Return what must be, what it got and a hint, for one error of pydantic."""
    kind, got = item["type"], repr(item["input"])
    if kind == "extra_forbidden":
        key = item["loc"][-1]
        return "a known key", repr(key), did_you_mean(str(key), known)
    if kind == "missing":
        return "given", "nothing", ""
    if kind in ("model_type", "dict_type"):
        return "a section with keys of its own", got, ""
    if kind == "string_pattern_mismatch":
        key = path.rpartition(".")[2]
        return _PATTERNS.get(key, "written package.module:name"), got, ""
    hint = _closest(item) if kind == "literal_error" else ""
    return item["msg"].removeprefix("Input should be "), got, hint


def _closest(item: Any) -> str:
    """Suggest one of several words, only where one is close: the message lists them all."""
    expected = item["ctx"]["expected"].replace(" or ", ", ").split(", ")
    hint = did_you_mean(str(item["input"]), [word.strip("'") for word in expected])
    return hint if hint.startswith("Did") else ""


def _real_path(location: tuple[int | str, ...], data: Any) -> tuple[str, list[str]]:
    """Return the dotted path of an error, and the keys known at its end.

    Pydantic's location also has marks for the alternatives of a type, which are no keys.
    """
    steps: list[str] = []
    section: type[BaseModel] | None = Recipe
    known = list(Recipe.model_fields)
    for step in location:
        present = _has(data, step)
        declared = section is not None and step in section.model_fields
        if not present and not declared:
            continue  # a mark
        steps.append(str(step))
        data = data[step] if present else None
        if section is not None:
            known = list(section.model_fields)
            if isinstance(step, str):
                field = section.model_fields.get(step)
                section = _section_of(field.annotation) if field else None
    return ".".join(steps), known


def _has(data: Any, step: int | str) -> bool:
    if isinstance(data, list):
        return isinstance(step, int) and step < len(data)
    return isinstance(data, Mapping) and step in data


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a type such as ``Section | None`` or ``list[Section]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        section = _section_of(inner)
        if section is not None:
            return section
    return None


# ---------------------------------------------------------------- beyond types


def _beyond_types(data: Mapping[str, Any]) -> Iterator[InvalidValue]:
    """Yield what types cannot say, section by section: one bad section hides no other."""
    from headprune import scoring, selection

    task, model = data.get("task"), data.get("model")
    if isinstance(model, Mapping):
        yield from model_problems(model, task)
    yield from data_problems(data)
    yield from metric_problems(data)
    score = section_in(data, "score")
    scorer = score.get("scorer", DEFAULT_SCORER)
    yield from check_method(scoring.registry, scorer, score.get("settings"), "score", "scorer")
    yield from _until_problems(score, scorer)
    if scorer == "auto":
        yield from _auto_problems(score)
    select = section_in(data, "select")
    selector = select.get("selector", default_selector(select, scorer))
    settings = select.get("settings")
    yield from check_method(selection.registry, selector, settings, "select", "selector")
    yield from _select_problems(select)
    yield from _neuron_problems(select, scorer, score.get("settings"))
    yield from _latency_problems(select, task)
    yield from _recover_problems(data, "recover")
    yield from _recover_problems(select, "select.recover")
    yield from _unused_recoveries(select, selector)
    new_tokens = section_in(data, "bench").get("new_tokens")
    if new_tokens is not None and task != "causal_lm":
        must = "left out: only causal_lm is timed in generation"
        yield InvalidValue("bench.new_tokens", must, repr(new_tokens))
    if isinstance(data.get("gradual"), Mapping):
        yield from _gradual_problems(data["gradual"], score, select)
    if isinstance(data.get("train"), Mapping):
        yield from _train_problems(data["train"])


def _recover_problems(
    section: Mapping[str, Any],
    path: str,
) -> Iterator[InvalidValue]:
    from headprune import recovery

    steps = section.get("recover")
    for i, step in enumerate(steps if isinstance(steps, list) else ()):
        if isinstance(step, Mapping) and "method" in step:
            method, settings = step["method"], step.get("settings")
            yield from check_method(recovery.registry, method, settings, f"{path}.{i}", "method")
            why = "a run sets its own checkpoints"
            yield from _useless(settings, ("checkpoint_every",), f"{path}.{i}", why)


def _unused_recoveries(
    select: Mapping[str, Any],
    selector: Any,
) -> Iterator[InvalidValue]:
    """Refuse recoveries for a selector that measures no cut model."""
    from headprune import selection

    known = isinstance(selector, str) and selector in selection.registry
    if not select.get("recover") or not known:
        return
    if not selection.registry.get(selector).needs & CALLABLES:
        must, got = "left out with a selector that measures no cut model", "recoveries, with"
        hint = "To recover the cut model, use the section recover."
        yield InvalidValue("select.recover", must, f"{got} {selector}", hint)


def _until_problems(
    score: Mapping[str, Any],
    scorer: Any,
) -> Iterator[InvalidValue]:
    from headprune import scoring

    known = isinstance(scorer, str) and scorer in scoring.registry
    if score.get("until") is None or not known or scorer == "auto":
        return  # of auto, `_auto_problems` says it
    if not scoring.registry.get(scorer).needs_data:
        yield InvalidValue("score.until", "left out for a scorer that uses no data", scorer)
    elif not _can(scorer, score.get("settings"), "by_example"):
        must = "left out for a scorer whose number for an example depends on the others"
        yield InvalidValue("score.until", must, scorer)


def _auto_problems(score: Mapping[str, Any]) -> Iterator[InvalidValue]:
    """Refuse settings of ``auto`` that are sections of a recipe, and ``until``."""
    settings = section_in(score, "settings")
    for name, section in _OF_RECIPE.items():
        if name in settings:
            must = f"left out: a run uses its section {section}"
            yield InvalidValue(f"score.settings.{name}", must, repr(settings[name]))
    if score.get("until") is not None:
        must = "left out with auto, the default scorer, which judges on all rows"
        hint = "Name a scorer that may stop early: score.scorer=taylor."
        yield InvalidValue("score.until", must, "a section", hint)


def _select_problems(select: Mapping[str, Any]) -> Iterator[InvalidValue]:
    sites = select.get("sites")
    if not sites:
        yield from _budget_problems(select, "select")
        return
    given = [key for key in BudgetSection.model_fields if select.get(key) is not None]
    if given:
        must = "given one budget, or sites with budgets of their own"
        yield InvalidValue("select", must, f"sites, {given[0]}")
        return
    for key, budget in section_in(select, "sites").items():
        if isinstance(budget, Mapping):
            yield from _budget_problems(budget, f"select.sites.{key}")


def _can(name: str, settings: Any, trait: str) -> bool:
    """Whether a scorer with these settings has a trait, such as ``scores_neurons``; True if the
    settings are wrong."""
    from headprune import scoring

    try:
        return bool(getattr(configured(scoring.registry, name, settings or {}), trait))
    except (HeadPruneError, TypeError, ValueError):  # a ValidationError is a ValueError
        return True  # `check_method` says what is wrong


def _neuron_problems(
    select: Mapping[str, Any], scorer: Any, settings: Any
) -> Iterator[InvalidValue]:
    """Refuse scorers and budgets that have no meaning for neurons."""
    from headprune import scoring

    if select.get("feed_forward") is not True:
        return
    known = isinstance(scorer, str) and scorer in scoring.registry
    if known and not _can(scorer, settings, "scores_neurons"):
        must = "one that scores neurons, with select.feed_forward"
        hint = "It reads attention maps, which feed-forwards lack; take ladder, taylor or surgeon."
        yield InvalidValue("score.scorer", must, repr(scorer), hint)
    for key in ("keep_heads", "keep_kv"):
        if select.get(key) is not None:
            must = "left out with feed_forward: this budget does not count neurons"
            hint = "Use speedup, keep_params or keep_macs."
            yield InvalidValue(f"select.{key}", must, repr(select[key]), hint)


def _budget_problems(
    section: Mapping[str, Any],
    path: str,
) -> Iterator[InvalidValue]:
    keys = {key: section.get(key) for key in BudgetSection.model_fields}
    try:
        _ = BudgetSection.model_validate(keys).budget
    except ValidationError:
        return  # reported with the types
    except HeadPruneError as error:
        where = error.where.replace("Budget", path)
        yield InvalidValue(where, error.must, error.got, error.hint)


def _latency_problems(
    select: Mapping[str, Any],
    task: Any,
) -> Iterator[InvalidValue]:
    budgets = [select, *section_in(select, "sites").values()]
    timed = any(isinstance(b, Mapping) and b.get("speedup") is not None for b in budgets)
    length = section_in(select, "latency").get("length")
    if timed and length is not None and task in _FIXED_LENGTH:
        must = "left out: images and sound have a length of their own"
        yield InvalidValue("select.latency.length", must, length)
    # A recipe that was written out has this section with all its defaults.
    unset: tuple[Any, ...] = (None, {}, LatencySection().model_dump())
    if not timed and select.get("latency") not in unset:
        must = "left out: nothing is timed without a budget speedup"
        yield InvalidValue("select.latency", must, "a section")


def _gradual_problems(
    gradual: Mapping[str, Any],
    score: Mapping[str, Any],
    select: Mapping[str, Any],
) -> Iterator[InvalidValue]:
    from headprune import recovery

    settings = gradual.get("settings")
    yield from check_method(recovery.registry, "finetune", settings, "gradual", "method")
    useless = ("patience", "eval_every", "checkpoint_every")
    yield from _useless(settings, useless, "gradual", "every stage is a training of its own")
    if select.get("sites"):
        must = "left out with gradual, which has one budget"
        yield InvalidValue("select.sites", must, "budgets of sites")
    if select.get("recover"):
        must = "left out with gradual, which trains between cuts"
        yield InvalidValue("select.recover", must, "recoveries between the choices")
    if select.get("speedup") is not None:
        must = "another budget with gradual"
        yield InvalidValue("select.speedup", must, repr(select["speedup"]))
    if score.get("until") is not None:
        must = "left out with gradual, which scores all rows"
        yield InvalidValue("score.until", must, "a section")


def _useless(
    settings: Any,
    names: Iterable[str],
    path: str,
    why: str,
) -> Iterator[InvalidValue]:
    """Refuse settings that have no effect here."""
    for name in names if isinstance(settings, Mapping) else ():
        if settings.get(name) is not None:
            where = f"{path}.settings.{name}"
            yield InvalidValue(where, f"left out: {why}", repr(settings[name]))


def _train_problems(train: Mapping[str, Any]) -> Iterator[InvalidValue]:
    from headprune import recovery

    settings = {key: value for key, value in train.items() if key != "batch_size"}
    for problem in check_method(recovery.registry, "finetune", settings, "train", "method"):
        where = problem.where.replace("train.settings", "train")
        yield InvalidValue(where, problem.must, problem.got, problem.hint)


# ---------------------------------------------------------------- registered methods


def check_method(
    registry: Registry,
    name: Any,
    settings: Any,
    path: str,
    key: str,
) -> list[InvalidValue]:
    """Return what is wrong with a registered name and its settings.

    Args:
        registry: The registry.
        name: The name that the recipe gives.
        settings: The settings that the recipe gives.
        path: The section's dotted path.
        key: The name's key in that section.
    """
    if not isinstance(name, str):
        return []  # reported with the types
    if name not in registry:
        must = f"a registered {registry.kind}"
        hint = did_you_mean(name, registry.names())
        return [InvalidValue(f"{path}.{key}", must, repr(name), hint)]
    if not isinstance(settings, Mapping):
        return []
    return _all_setting_problems(registry.get(name), name, settings, f"{path}.settings")


def _all_setting_problems(
    cls: Any,
    name: str,
    settings: Mapping[str, Any],
    path: str,
) -> list[InvalidValue]:
    """Return unknown settings, and everything that is wrong with the others."""
    problems = []
    fields = [field.name for field in dataclasses.fields(cls)]
    for setting in settings:
        if setting not in fields:
            must, hint = f"a setting of {name}", did_you_mean(str(setting), fields)
            problems.append(InvalidValue(f"{path}.{setting}", must, repr(setting), hint))
    # A method stops at its first complaint: remove that setting, and check the others.
    known = {setting: value for setting, value in settings.items() if setting in fields}
    while known:
        by_setting = _setting_problems(cls, known, path)
        problems += by_setting.values()
        if not by_setting or None in by_setting:
            break
        known = {setting: value for setting, value in known.items() if setting not in by_setting}
    return problems


def _setting_problems(
    cls: type,
    settings: Mapping[str, Any],
    path: str,
) -> dict[str | None, InvalidValue]:
    """Return problems by setting; under None, one of all settings together."""
    problems: dict[str | None, InvalidValue] = {}
    try:
        TypeAdapter(cls).validate_python(dict(settings))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            # A method's own checks raise errors in our template.
            own = item.get("ctx", {}).get("error")
            name = getattr(own, "where", "").rpartition(".")[2]
            if item["loc"]:
                name = str(item["loc"][0])
            key = name if name in settings else None
            where = path if key is None else f"{path}.{key}"
            if isinstance(own, HeadPruneError):
                problems[key] = InvalidValue(where, own.must, own.got, own.hint)
            else:
                must = item["msg"].removeprefix("Input should be ")
                problems[key] = InvalidValue(where, must, repr(item["input"]))
    except HeadPruneError as error:
        problems[None] = InvalidValue(path, error.must, error.got, error.hint)
    return problems


def configured(registry: Registry, name: str, settings: Mapping[str, Any]) -> Any:
    """Return the registered method with these settings, converted to their declared types."""
    return TypeAdapter(registry.get(name)).validate_python(dict(settings))
