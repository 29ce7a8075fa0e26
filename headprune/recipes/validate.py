"""Checks a recipe and reports everything that is wrong with it at once."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from headprune.core.errors import HeadPruneError, InvalidValue, UnknownName, did_you_mean
from headprune.core.registry import Registry
from headprune.recipes.consistency import data_problems, metric_problems, model_problems, section_in
from headprune.recipes.presets import preset_named
from headprune.recipes.reading import locate, override, read_raw
from headprune.recipes.references import interpolate
from headprune.recipes.schema import DEFAULT_SCORER, BudgetSection, LatencySection, Recipe
from headprune.selection._inner import CALLABLES

#: So many errors are told of one by one.
_SHOWN = 50
#: Settings of the scorer ``auto`` that a recipe says in its own sections.
_OF_RECIPE = {"keep": "select", "refit": "recover", "refit_settings": "recover"}
#: What strings must look like, by key.
_PATTERNS = {"name": "made of letters, digits, '.', '_' and '-', a letter or digit first"}


class RecipeError(InvalidValue):
    """Everything that is wrong with one recipe; ``problems`` has it one by one."""

    def __init__(self, source: str, problems: Iterable[InvalidValue]) -> None:
        self.problems = tuple(problems)
        super().__init__(source, "a valid recipe", f"{len(self.problems)} errors")

    def __str__(self) -> str:
        count = f"{len(self.problems)} error{'' if len(self.problems) == 1 else 's'}"
        more = len(self.problems) - _SHOWN
        lines = [*map(str, self.problems[:_SHOWN]), *([f"and {more} more"] if more > 0 else [])]
        return "\n  ".join([f"{self.where}: {count}", *lines])


def load_recipe(recipe: str | Path, settings: Iterable[str] = ()) -> Recipe:
    """Reads, completes and checks a recipe.

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
    """The recipe in ``raw``.

    Raises:
        RecipeError: with every error that the recipe has.
    """
    try:
        data, problems = interpolate(raw)
    except (
        InvalidValue
    ) as error:  # nothing is written out that is too long, so there is nothing else to check
        raise RecipeError(source, [error]) from None
    recipe = None
    if data.get("preset") is not None:
        try:
            data = preset_named(data["preset"]).laid_over(data)
        except UnknownName as error:
            problems.append(InvalidValue(error.where, error.must, error.got, error.hint))
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        problems += _from_pydantic(error, data)
    blamed = {problem.where for problem in problems}
    problems += [p for p in _beyond_types(data) if p.where not in blamed]
    if problems or recipe is None:
        raise RecipeError(source, problems)
    return recipe


def recipe_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults filled in; it can be run again as it is."""
    return str(yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True, width=110))


def _from_pydantic(error: ValidationError, data: Any) -> list[InvalidValue]:
    """Pydantic's errors in our template, those of one value's alternatives joined."""
    found: dict[str, tuple[list[str], object, str]] = {}
    for item in error.errors(include_url=False):
        path, known = _real_path(item["loc"], data)
        musts, got, hint = found.setdefault(path, ([], repr(item["input"]), ""))
        if item["type"] == "extra_forbidden":
            must, got, hint = (
                "a known key",
                repr(item["loc"][-1]),
                did_you_mean(str(item["loc"][-1]), known),
            )
        elif item["type"] == "missing":
            must, got = "given", "nothing"
        elif item["type"] in ("model_type", "dict_type"):
            must = "a section with keys of its own"
        elif item["type"] == "string_pattern_mismatch":
            must = _PATTERNS.get(path.rpartition(".")[2], "written package.module:name")
        else:
            must = item["msg"].removeprefix("Input should be ")
            hint = _closest(item) if item["type"] == "literal_error" else ""
        found[path] = ([*musts, must] if must not in musts else musts, got, hint)
    return [
        InvalidValue(path, " or ".join(musts), got, hint)
        for path, (musts, got, hint) in found.items()
    ]


def _closest(item: Any) -> str:
    """A suggestion for one of several words, only where one is close: the message lists them
    all."""
    words = [w.strip("'") for w in item["ctx"]["expected"].replace(" or ", ", ").split(", ")]
    hint = did_you_mean(str(item["input"]), words)
    return hint if hint.startswith("Did") else ""


def _real_path(location: tuple[int | str, ...], data: Any) -> tuple[str, list[str]]:
    """The dotted path without pydantic's marks for alternatives, and the keys that are known at its
    end."""
    steps: list[str] = []
    schema: type[BaseModel] | None = Recipe
    known = list(Recipe.model_fields)
    for step in location:
        inside = (isinstance(data, Mapping) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if not inside and not (
            isinstance(step, str) and schema is not None and step in schema.model_fields
        ):
            continue
        steps.append(str(step))
        data = data[step] if inside else None
        known = list(schema.model_fields) if schema is not None else known
        if schema is not None and isinstance(step, str):
            field = schema.model_fields.get(step)
            schema = _section_of(field.annotation) if field else None
    return ".".join(steps), known


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((s for a in typing.get_args(annotation) if (s := _section_of(a)) is not None), None)


def _beyond_types(data: Mapping[str, Any]) -> list[InvalidValue]:
    """What the types cannot say; looked at section by section, so that one bad section hides no
    other."""
    from headprune import scoring, selection

    model = data.get("model")
    problems = [
        *(model_problems(model, data.get("task")) if isinstance(model, Mapping) else ()),
        *data_problems(data),
    ]
    problems += metric_problems(data)
    score, select = section_in(data, "score"), section_in(data, "select")
    problems += check_method(
        scoring.registry,
        score.get("scorer", DEFAULT_SCORER),
        score.get("settings"),
        "score",
        "scorer",
    )
    problems += [*_until_problems(score), *_auto_problems(score)]
    selector = select.get("selector", "global_topk")
    problems += check_method(
        selection.registry, selector, select.get("settings"), "select", "selector"
    )
    problems += [*_select_problems(select), *_latency_problems(select, data.get("task"))]
    problems += [
        *_recover_problems(data, ""),
        *_recover_problems(select, "select."),
        *_looking_problems(select),
    ]
    if section_in(data, "bench").get("new_tokens") is not None and data.get("task") != "causal_lm":
        got = repr(data["bench"]["new_tokens"])
        problems.append(
            InvalidValue("bench.new_tokens", "left out: only causal_lm is timed in generation", got)
        )
    if isinstance(data.get("gradual"), Mapping):
        problems += _gradual_problems(data["gradual"], score, select)
    if isinstance(data.get("train"), Mapping):
        problems += _train_problems(data["train"])
    return problems


def _recover_problems(section: Mapping[str, Any], inside: str) -> list[InvalidValue]:
    from headprune import recovery

    problems: list[InvalidValue] = []
    steps = section.get("recover") or []
    for i, step in enumerate(steps if isinstance(steps, list) else []):
        if isinstance(step, Mapping) and "method" in step:
            path = f"{inside}recover.{i}"
            problems += check_method(
                recovery.registry, step["method"], step.get("settings"), path, "method"
            )
            problems += _useless(
                step.get("settings"),
                ("checkpoint_every",),
                path,
                "a run begins anew, and keeps none",
            )
    return problems


def _looking_problems(select: Mapping[str, Any]) -> list[InvalidValue]:
    """Recoveries for a selector that looks at no cut model."""
    from headprune import selection

    name = select.get("selector", "global_topk")
    known = isinstance(name, str) and name in selection.registry
    if not select.get("recover") or not known or selection.registry.get(name).needs & CALLABLES:
        return []
    must = "left out with a selector that looks at scores alone"
    return [
        InvalidValue(
            "select.recover", must, f"recoveries, with {name}", "To recover the cut model: recover."
        )
    ]


def _until_problems(score: Mapping[str, Any]) -> list[InvalidValue]:
    from headprune import scoring

    name = score.get("scorer", DEFAULT_SCORER)
    known = isinstance(name, str) and name in scoring.registry
    if score.get("until") is None or not known or scoring.registry.get(name).needs_data:
        return []
    return [InvalidValue("score.until", "left out for a scorer that uses no data", name)]


def _auto_problems(score: Mapping[str, Any]) -> list[InvalidValue]:
    """Settings of ``auto`` that a recipe says in its own sections, and ``until``, which it cannot
    be read by."""
    if score.get("scorer", DEFAULT_SCORER) != "auto":
        return []
    settings = score.get("settings")
    given = settings if isinstance(settings, Mapping) else {}
    problems = [
        InvalidValue(
            f"score.settings.{name}",
            f"left out: a run goes by its section {section}",
            repr(given[name]),
        )
        for name, section in _OF_RECIPE.items()
        if name in given
    ]
    if score.get("until") is not None:
        problems.append(
            InvalidValue(
                "score.until",
                "left out with auto, the default scorer, which judges on all rows",
                "a section",
                "Name a scorer that may stop early: score.scorer=taylor.",
            )
        )
    return problems


def _select_problems(select: Mapping[str, Any]) -> list[InvalidValue]:
    sites, given = (
        select.get("sites"),
        [k for k in BudgetSection.model_fields if select.get(k) is not None],
    )
    if not sites:
        return _budget_problems(select, "select")
    if given:
        return [
            InvalidValue(
                "select",
                "given one budget, or sites with budgets of their own",
                f"sites, {given[0]}",
            )
        ]
    groups = sites.items() if isinstance(sites, Mapping) else ()
    return [
        p
        for key, one in groups
        if isinstance(one, Mapping)
        for p in _budget_problems(one, f"select.sites.{key}")
    ]


def _latency_problems(select: Mapping[str, Any], task: Any) -> list[InvalidValue]:
    sites = select.get("sites")
    sections = [
        select,
        *(
            s
            for s in (sites.values() if isinstance(sites, Mapping) else ())
            if isinstance(s, Mapping)
        ),
    ]
    timed = any(section.get("speedup") is not None for section in sections)
    length = section_in(select, "latency").get("length")
    if timed and length is not None and task in ("image_classification", "audio_classification"):
        return [
            InvalidValue(
                "select.latency.length",
                "left out: images and sound have a length of their own",
                length,
            )
        ]
    if timed or select.get("latency") in (
        None,
        {},
        LatencySection().model_dump(),
    ):  # a resolved recipe has them all
        return []
    return [
        InvalidValue(
            "select.latency", "left out: nothing is timed without a budget speedup", "a section"
        )
    ]


def _budget_problems(section: Mapping[str, Any], path: str) -> list[InvalidValue]:
    try:
        BudgetSection.model_validate({k: section.get(k) for k in BudgetSection.model_fields}).budget  # noqa: B018
    except ValidationError:
        return []  # reported with the types
    except HeadPruneError as error:
        return [
            InvalidValue(error.where.replace("Budget", path), error.must, error.got, error.hint)
        ]
    return []


def _gradual_problems(
    gradual: Mapping[str, Any], score: Mapping[str, Any], select: Mapping[str, Any]
) -> list[InvalidValue]:
    from headprune import recovery

    problems = check_method(
        recovery.registry, "finetune", gradual.get("settings"), "gradual", "method"
    )
    alone = ("patience", "eval_every", "checkpoint_every")
    problems += _useless(
        gradual.get("settings"), alone, "gradual", "every stage is a training of its own"
    )
    if select.get("sites"):
        problems.append(
            InvalidValue(
                "select.sites", "left out with gradual, which has one budget", "budgets of sites"
            )
        )
    if select.get("recover"):
        got = "recoveries between the choices"
        problems.append(
            InvalidValue("select.recover", "left out with gradual, which trains between cuts", got)
        )
    if select.get("speedup") is not None:
        problems.append(
            InvalidValue("select.speedup", "another budget with gradual", repr(select["speedup"]))
        )
    if score.get("until") is not None:
        problems.append(
            InvalidValue("score.until", "left out with gradual, which scores all rows", "a section")
        )
    return problems


def _useless(settings: Any, names: Iterable[str], path: str, why: str) -> list[InvalidValue]:
    """Settings that have no use where they are given."""
    given = settings if isinstance(settings, Mapping) else {}
    wrong = [name for name in names if given.get(name) is not None]
    return [
        InvalidValue(f"{path}.settings.{name}", f"left out: {why}", repr(given[name]))
        for name in wrong
    ]


def _train_problems(train: Mapping[str, Any]) -> list[InvalidValue]:
    from headprune import recovery

    settings = {k: v for k, v in train.items() if k not in ("batch_size",)}
    problems = check_method(recovery.registry, "finetune", settings, "train", "method")
    return [
        InvalidValue(p.where.replace("train.settings", "train"), p.must, p.got, p.hint)
        for p in problems
    ]


def check_method(
    registry: Registry, name: Any, settings: Any, path: str, key: str
) -> list[InvalidValue]:
    """What is wrong with a registered name and the settings given for it."""
    if not isinstance(name, str):
        return []  # reported with the types
    if name not in registry:
        must = f"a registered {registry.kind}"
        return [
            InvalidValue(f"{path}.{key}", must, repr(name), did_you_mean(name, registry.names()))
        ]
    if not isinstance(settings or {}, Mapping):
        return []
    cls = registry.get(name)
    fields = [f.name for f in dataclasses.fields(cls)]
    problems = [
        InvalidValue(
            f"{path}.settings.{k}", f"a setting of {name}", repr(k), did_you_mean(str(k), fields)
        )
        for k in settings or {}
        if k not in fields
    ]
    known = {k: v for k, v in (settings or {}).items() if k in fields}
    while known:  # a method stops at its first complaint: take that setting away and ask again
        found = _setting_problems(cls, known, f"{path}.settings")
        problems += found.values()
        if not found or None in found:
            break
        known = {k: v for k, v in known.items() if k not in found}
    return problems


def _setting_problems(
    cls: type, settings: Mapping[str, Any], path: str
) -> dict[str | None, InvalidValue]:
    """What is wrong with settings, by key; under None what is wrong with all of them together."""
    problems: dict[str | None, InvalidValue] = {}
    try:
        TypeAdapter(cls).validate_python(dict(settings))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            own = item.get("ctx", {}).get("error")
            name = (
                str(item["loc"][0]) if item["loc"] else getattr(own, "where", "").rpartition(".")[2]
            )
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
    """The registered method with these settings, converted to the types that it declares."""
    return TypeAdapter(registry.get(name)).validate_python(dict(settings))
