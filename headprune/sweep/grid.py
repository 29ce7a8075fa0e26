"""Grids: ``key=value,value`` become one checked recipe per combination, before any work."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.errors import HeadPruneError, InvalidValue, did_you_mean
from headprune.recipes.consistency import section_in
from headprune.recipes.reading import locate, override, parse_yaml, read_raw
from headprune.recipes.schema import (
    DEFAULT_SCORER,
    BudgetSection,
    Recipe,
    ScoreSection,
    Section,
    SelectSection,
    default_selector,
)
from headprune.recipes.validate import RecipeError, check_recipe

_KEEP_KEYS = [name for name in BudgetSection.model_fields if name.startswith("keep_")]

#: Short names of recipe keys. Any other key is a path into the recipe, such as
#: ``score.settings.reduce``.
ALIASES = {
    "scorer": "score.scorer",
    "keep": "select.keep_heads",
    **{name: f"select.{name}" for name in _KEEP_KEYS},
    "selector": "select.selector",
    "policy": "select.policy",
    "recover": "recover",
    "calibration": "data.calibration",
}
#: Paths of budgets.
_BUDGETS = frozenset(f"select.{name}" for name in (*_KEEP_KEYS, "speedup"))
#: Paths of settings of a budget, such as select.length.
_OF_BUDGETS = frozenset(f"select.{name}" for name in BudgetSection.model_fields) - _BUDGETS
_SECTIONS: dict[str, type[Section]] = {"score": ScoreSection, "select": SelectSection}
_TIMED = "a budget other than speedup, whose timing other processes would disturb"
#: Paths whose values are lists of recoveries, with the section that each is in.
_RECOVERIES = {"recover": (), "select.recover": ("select",)}
#: Paths that a preset sets.
_OF_PRESETS = (
    "score.scorer",
    "score.settings",
    "select.selector",
    "select.settings",
    "select.recover",
    "recover",
)
#: Paths that a sweep does not use: it compares what is in the grid.
_UNUSED = ("score.magnitude", "score.random_draws")
#: Paths whose value resets other keys; they are set before these.
_SWITCHES = ("score.scorer", "select.selector", *sorted(_BUDGETS))

Grid = Mapping[str, Sequence[Any]] | Iterable[str]


@dataclass(frozen=True)
class Combination:
    """One combination of the grid's values.

    Args:
        values: By key, as text or numbers.
        recipe: The recipe that they make.
    """

    values: FrozenDict
    recipe: Recipe


@dataclass(frozen=True)
class Design:
    """A checked sweep.

    Args:
        recipe: The recipe without the grid.
        keys: The grid's keys as they were given.
        budgets: The keys that are budgets.
        points: Every combination once, the last key changing fastest.
    """

    recipe: Recipe
    keys: tuple[str, ...]
    budgets: tuple[str, ...]
    points: tuple[Combination, ...]


@dataclass(frozen=True)
class _Axis:
    """One key of the grid with its values.

    Args:
        key: As it was given.
        path: Its path into the recipe.
        shown: The values as the table has them.
        values: The values as the recipe has them.
    """

    key: str
    path: str
    shown: list[Any]
    values: list[Any]


def lay_out(recipe: str | Path | Recipe, settings: Iterable[str], grid: Grid) -> Design:
    """Make a checked recipe for every combination of a grid.

    ``recover`` takes ``none``, a method, or several joined by ``+``; a method has the settings that
    the recipe gives it. A scorer or selector other than the recipe's starts from its defaults, and
    a budget replaces the recipe's.

    Args:
        recipe: A path, the name of a shipped recipe, or a Recipe.
        settings: ``dotted.key=value`` overrides, not for a Recipe.
        grid: ``key=value,value`` strings, or a mapping from keys to values. A key is a path into
            ``score``, ``select``, ``recover`` or ``data.calibration``, one of ``ALIASES``, or
            ``preset``, whose ``none`` is the recipe itself.

    Raises:
        RecipeError: with all errors of the grid and its combinations.
    """
    # 1. Read the recipe and the grid; errors are collected.
    problems: list[InvalidValue] = []
    raw = _without_default_selector(_read_recipe(recipe, list(settings)))
    if raw.get("gradual") is not None:
        must = "left out of a sweep, which cuts at once"
        problems.append(InvalidValue("gradual", must, "a section"))
    axes = _axes(grid, raw, problems)

    # 2. Check the recipe of every combination.
    points = _combinations(axes, raw, problems)
    if problems:
        source = recipe.name if isinstance(recipe, Recipe) else str(recipe)
        different = {str(problem): problem for problem in problems}
        raise RecipeError(f"{source} with this grid", different.values())

    # 3. The recipe of the base model is that of the first combination: without the grid's budget
    # a recipe may have none.
    keys = tuple(axis.key for axis in axes)
    budgets = tuple(axis.key for axis in axes if axis.path in _BUDGETS)
    return Design(points[0].recipe, keys, budgets, tuple(points))


def _combinations(
    axes: Sequence[_Axis], raw: Mapping[str, Any], problems: list[InvalidValue]
) -> list[Combination]:
    """Make the checked recipe of every combination; add errors to ``problems``."""
    points = []
    ranges = [range(len(axis.values)) for axis in axes]
    for indices in itertools.product(*ranges):
        values: dict[str, Any] = {}  # by key, as the table has them
        chosen: dict[str, Any] = {}  # by path, as the recipe has them
        for axis, i in zip(axes, indices, strict=True):
            values[axis.key] = axis.shown[i]
            chosen[axis.path] = axis.values[i]
        try:
            recipe = check_recipe(_combined(raw, chosen))
            _check_untimed(recipe)
            points.append(Combination(FrozenDict(values), recipe))
        except RecipeError as error:
            problems += error.problems
        except InvalidValue as error:
            problems.append(error)
    return points


def _read_recipe(recipe: str | Path | Recipe, settings: list[str]) -> Mapping[str, Any]:
    """The recipe as it was written, without defaults."""
    if not isinstance(recipe, Recipe):
        return override(read_raw(locate(recipe)), settings)
    if settings:
        must = "left out for a Recipe, which is checked already"
        raise InvalidValue("settings", must, settings)
    # Default budgets and the like would conflict with those of the grid.
    return recipe.model_dump(exclude_unset=True)


def _without_default_selector(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe without a selector that follows from its scorer, as other scorers have others.

    A recipe that a run wrote names its selector. One with settings is the user's choice.
    """
    select = section_in(raw, "select")
    scorer = section_in(raw, "score").get("scorer", DEFAULT_SCORER)
    if "selector" not in select or select.get("settings"):
        return raw
    if select["selector"] != default_selector(dict(select), scorer):
        return raw
    without = {key: value for key, value in select.items() if key != "selector"}
    return {**raw, "select": without}


def _check_untimed(recipe: Recipe) -> None:
    """Refuse budgets of speed: other processes would disturb their measurement."""
    sections = {"select": recipe.select}
    sites = {f"select.sites.{name}": section for name, section in recipe.select.sites.items()}
    for path, section in {**sections, **sites}.items():
        if section.speedup is not None:
            raise InvalidValue(path, _TIMED, f"speedup {section.speedup}")


# ------------------------------------------------------------------------------------ grid to axes


def _axes(grid: Grid, raw: Mapping[str, Any], problems: list[InvalidValue]) -> list[_Axis]:
    """Return the axes of the grid; add what cannot be combined to ``problems``."""
    axes: list[_Axis] = []
    for key, values in _items(grid, problems):
        path = ALIASES.get(key, key)
        problem = _key_problem(key, path, values, axes)
        if problem is not None:
            problems.append(problem)
            continue
        axis = _axis(key, path, values, raw)
        problems += _repeated_values(axis)
        axes.append(axis)
    if any(axis.path == "preset" for axis in axes):
        for axis in axes:
            if axis.path.startswith(_OF_PRESETS):
                must = "left out beside preset, which sets it"
                problems.append(InvalidValue(f"--grid {axis.key}", must, axis.key))
    if not axes and not problems:
        hint = "For example --grid keep=0.75,0.5."
        problems.append(InvalidValue("--grid", "given a key with values", "none", hint))
    return axes


def _items(grid: Grid, problems: list[InvalidValue]) -> list[tuple[str, list[Any]]]:
    """Return the keys of the grid with their values."""
    items: list[tuple[str, list[Any]]] = []
    if isinstance(grid, Mapping):
        for name, value in grid.items():
            values = list(value) if isinstance(value, (list, tuple)) else [value]
            items.append((str(name), values))
        return items
    for text in [grid] if isinstance(grid, str) else grid:
        key, equals, listed = text.partition("=")
        key = key.strip()
        if not equals or not key:
            must, hint = "written key=value,value", "For example --grid scorer=taylor,fisher."
            problems.append(InvalidValue(f"--grid {text}", must, repr(text), hint))
            continue
        try:
            items.append((key, parse_yaml(f"[{listed}]", f"--grid {key}")))
        except InvalidValue as error:
            problems.append(error)
    return items


def _key_problem(
    key: str, path: str, values: Sequence[Any], axes: Sequence[_Axis]
) -> InvalidValue | None:
    """Say why a key is no axis: it is unknown, repeated, or without values."""
    where = f"--grid {key}"
    problem = _path_problem(path, where)
    if problem is not None:
        return problem
    for axis in axes:
        if axis.path == path:
            got = "twice" if axis.key == key else f"as {axis.key} too"
            return InvalidValue(where, "given once", got)
    if not values:
        return InvalidValue(where, "given values", "none", f"For example --grid {key}=a,b.")
    return None


def _path_problem(path: str, where: str) -> InvalidValue | None:
    """Say why a grid may not have this path; None if it may."""
    steps = path.split(".")
    if path == "select.speedup":
        return InvalidValue(where, _TIMED, path)
    if path in _UNUSED:
        hint = "Baselines are scorers: --grid scorer=...,random."
        return InvalidValue(where, "a key that a sweep uses", path, hint)
    if steps[0] in ("score", "select", "recover") or path in ("data.calibration", "preset"):
        if all(steps) and path not in ("score", "select"):
            return None
        return InvalidValue(where, "a key inside that section", path)
    must = "a key of score, select, recover, or data.calibration, or preset"
    if steps[0] in Recipe.model_fields:
        hint = "All runs of a sweep share one base model and its data: "
        hint += "make a sweep for each, with --set."
        return InvalidValue(where, must, path, hint)
    known = [*ALIASES]
    for name, section in _SECTIONS.items():
        known += [f"{name}.{field}" for field in section.model_fields]
    return InvalidValue(where, must, repr(path), did_you_mean(path, known))


def _axis(key: str, path: str, values: Sequence[Any], raw: Mapping[str, Any]) -> _Axis:
    """Turn given values into what the table shows and what the recipe takes."""
    shown = list(map(_shown, values))
    set_to = list(values)
    if path in _RECOVERIES:
        set_to = [_recovery_steps(value, raw, path) for value in values]
    if path == "preset":
        set_to = [None if value == "none" else value for value in values]
    return _Axis(key, path, shown, set_to)


def _shown(value: Any) -> Any:
    """A value as the table has it."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def _recovery_steps(value: Any, raw: Mapping[str, Any], path: str) -> Any:
    """Turn ``none``, or methods joined by ``+``, into a list of recoveries of the recipe."""
    if not isinstance(value, str):
        return value
    if value == "none":
        return []
    for section in _RECOVERIES[path]:
        raw = section_in(raw, section)
    own: dict[str, dict[str, Any]] = {}  # the recipe's recoveries, the first of each method
    for step in raw.get("recover") or ():
        if isinstance(step, Mapping) and isinstance(step.get("method"), str):
            own.setdefault(step["method"], dict(step))
    names = [name.strip() for name in value.split("+")]
    return [dict(own.get(name, {"method": name})) for name in names]


def _repeated_values(axis: _Axis) -> list[InvalidValue]:
    """Find values of an axis that the recipe takes for the same."""
    problems = []
    seen: dict[str, Any] = {}
    for shown, value in zip(axis.shown, axis.values, strict=True):
        text = json.dumps(value, sort_keys=True, default=str)
        if text not in seen:
            seen[text] = shown
            continue
        got = f"{shown!r} again"
        if shown != seen[text]:
            got = f"{shown!r}, which means the same as {seen[text]!r}"
        problems.append(InvalidValue(f"--grid {axis.key}", "values that differ", got))
    return problems


# ----------------------------------------------------------------------------- one combination


def _combined(raw: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Put a combination's values into the recipe.

    Args:
        raw: The recipe as it was written.
        chosen: The values, by path.
    """
    changes = _resets(raw, chosen)
    # Values that reset other keys come first, so that the others are set after that.
    for path in sorted(chosen, key=lambda path: path not in _SWITCHES):
        changes[path] = chosen[path]
    settings = [f"{path}={json.dumps(value, default=str)}" for path, value in changes.items()]
    return override(raw, settings)


def _resets(raw: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a combination resets: other budgets, and settings of another scorer."""
    resets: dict[str, Any] = {}

    # A budget replaces the recipe's budget, and one of another kind also its settings.
    given = chosen.keys() & _BUDGETS
    own_keys = [key for key, value in section_in(raw, "select").items() if value is not None]
    if given:
        resets |= dict.fromkeys(_BUDGETS)
    if given - {f"select.{key}" for key in own_keys}:
        resets |= dict.fromkeys(_OF_BUDGETS)

    # Another scorer does not have the settings of the recipe's scorer, and may not stop early.
    if _replaced(raw, chosen, "score", "scorer", DEFAULT_SCORER):
        resets["score.settings"] = {}
        until = section_in(raw, "score").get("until")
        if until is not None and not _may_stop_early(chosen["score.scorer"]):
            resets["score.until"] = None

    # Nor does another selector have the settings of the recipe's selector.
    scorer = section_in(raw, "score").get("scorer", DEFAULT_SCORER)
    selector = default_selector(section_in(raw, "select"), scorer)
    if _replaced(raw, chosen, "select", "selector", selector):
        resets["select.settings"] = {}
    return resets


def _replaced(
    raw: Mapping[str, Any], chosen: Mapping[str, Any], section: str, key: str, default: str
) -> bool:
    """Whether the combination's scorer or selector is another than the recipe's."""
    own = section_in(raw, section).get(key, default)
    return bool(chosen.get(f"{section}.{key}", own) != own)


def _may_stop_early(scorer: Any) -> bool:
    """Whether ``score.until`` applies to a scorer: it reads data, and is not ``auto``."""
    from headprune import scoring

    try:
        return scorer != "auto" and bool(scoring.registry.get(scorer).needs_data)
    except (HeadPruneError, TypeError):
        return True  # refused with the recipe
