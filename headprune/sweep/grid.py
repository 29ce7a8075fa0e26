"""Grids: ``key=value,value`` become checked recipes, one a combination; every error is found before
any work."""

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
)
from headprune.recipes.validate import RecipeError, check_recipe

#: Short names of recipe keys. Any other key is a path into the recipe, such as
#: ``score.settings.reduce``.
ALIASES = {
    "scorer": "score.scorer",
    "keep": "select.keep_heads",
    **{name: f"select.{name}" for name in BudgetSection.model_fields if name.startswith("keep_")},
    "selector": "select.selector",
    "policy": "select.policy",
    "recover": "recover",
    "calibration": "data.calibration",
}
_BUDGETS = frozenset(
    f"select.{n}" for n in BudgetSection.model_fields if n.startswith("keep_") or n == "speedup"
)
_OF_BUDGETS = (
    frozenset(f"select.{n}" for n in BudgetSection.model_fields) - _BUDGETS
)  # such as select.length
_SECTIONS: dict[str, type[Section]] = {"score": ScoreSection, "select": SelectSection}
_TIMED = "a budget other than speedup: what is timed beside other processes is not true"
_RECOVERIES = {
    "recover": (),
    "select.recover": ("select",),
}  # paths whose values are lists of recoveries
_OF_PRESETS = (
    "score.scorer",
    "score.settings",
    "select.selector",
    "select.settings",
    "select.recover",
    "recover",
)
_UNUSED = ("score.magnitude", "score.random_draws")  # a sweep compares what is in the grid
_SWITCHES = (
    "score.scorer",
    "select.selector",
    *sorted(_BUDGETS),
)  # what these replace goes before others are set

Grid = Mapping[str, Sequence[Any]] | Iterable[str]


@dataclass(frozen=True)
class Point:
    """One combination: the grid's values as text or numbers, by key, and the recipe that they
    make."""

    values: FrozenDict
    recipe: Recipe


@dataclass(frozen=True)
class Design:
    """A checked sweep.

    Args:
        recipe: The recipe without the grid.
        keys: The grid's keys as they were given.
        budgets: Those of them that are budgets.
        points: Every combination once, the last key changing fastest.
    """

    recipe: Recipe
    keys: tuple[str, ...]
    budgets: tuple[str, ...]
    points: tuple[Point, ...]


def lay_out(recipe: str | Path | Recipe, settings: Iterable[str], grid: Grid) -> Design:
    """The sweep of a recipe over a grid.

    ``recover`` takes ``none``, a method, or several joined by ``+``; a method has the settings that
    the recipe gives it, if it does. A scorer or selector other than the recipe's own starts from
    its defaults, and a budget replaces the recipe's.

    Args:
        recipe: A path, the name of a shipped recipe, or a Recipe.
        settings: ``dotted.key=value`` overrides, for a recipe that is no Recipe.
        grid: ``key=value,value`` strings, or a mapping from keys to values. A key is a path into
            ``score``, ``select``, ``recover`` or ``data.calibration``, one of ``ALIASES``, or
            ``preset``, whose ``none`` is the recipe itself.

    Raises:
        RecipeError: with every error that the grid and its combinations have.
    """
    settings, source = list(settings), recipe.name if isinstance(recipe, Recipe) else str(recipe)
    if isinstance(recipe, Recipe):
        if settings:
            raise InvalidValue(
                "settings", "left out for a Recipe, which is checked already", settings
            )
        raw = recipe.model_dump(exclude_unset=True)  # defaults may not be written beside any budget
    else:
        raw = override(read_raw(locate(recipe)), settings)
    problems: list[InvalidValue] = []
    if raw.get("gradual") is not None:
        problems.append(
            InvalidValue("gradual", "left out of a sweep, which cuts at once", "a section")
        )
    axes = _axes(grid, raw, problems)
    keys = tuple(key for key, _, _ in axes)
    budgets = tuple(key for key, path, _ in axes if path in _BUDGETS)
    points = []
    for combination in itertools.product(*(values for _, _, values in axes)):
        chosen = {path: value for (_, path, _), (_, value) in zip(axes, combination, strict=True)}
        shown = {key: text for key, (text, _) in zip(keys, combination, strict=True)}
        try:
            points.append(Point(FrozenDict(shown), _untimed(check_recipe(_combined(raw, chosen)))))
        except RecipeError as error:
            problems += error.problems
        except InvalidValue as error:
            problems.append(error)
    if problems:
        raise RecipeError(f"{source} with this grid", {str(p): p for p in problems}.values())
    # Without the grid's budget a recipe may have none, which is fine here: its first combination
    # stands for it.
    return Design(points[0].recipe, keys, budgets, tuple(points))


def _untimed(recipe: Recipe) -> Recipe:
    sites = {f"select.sites.{name}": section for name, section in recipe.select.sites.items()}
    for path, section in {"select": recipe.select, **sites}.items():
        if section.speedup is not None:
            raise InvalidValue(path, _TIMED, f"speedup {section.speedup}")
    return recipe


def _axes(
    grid: Grid, raw: Mapping[str, Any], problems: list[InvalidValue]
) -> list[tuple[str, str, list[tuple[Any, Any]]]]:
    """``(key, path, [(as shown, as set)])`` of every key that is fit to be combined; the rest goes
    to ``problems``."""
    axes: list[tuple[str, str, list[tuple[Any, Any]]]] = []
    for key, values in _items(grid, problems):
        path, where = ALIASES.get(key, key), f"--grid {key}"
        if (problem := _key_problem(path, where)) is not None:
            problems.append(problem)
            continue
        if (other := next((k for k, p, _ in axes if p == path), None)) is not None:
            problems.append(
                InvalidValue(where, "given once", "twice" if key == other else f"as {other} too")
            )
            continue
        if not values:
            problems.append(
                InvalidValue(where, "given values", "none", f"For example --grid {key}=a,b.")
            )
            continue
        spelt = [(_shown(v), _steps(v, raw, path) if path in _RECOVERIES else v) for v in values]
        if path == "preset":
            spelt = [(shown, None if value == "none" else value) for shown, value in spelt]
        seen: dict[str, Any] = {}
        for shown, value in spelt:
            if (text := json.dumps(value, sort_keys=True, default=str)) in seen:
                got = (
                    f"{shown!r} again"
                    if shown == seen[text]
                    else f"{shown!r}, which is {seen[text]!r} again"
                )
                problems.append(InvalidValue(where, "values that differ", got))
            seen.setdefault(text, shown)
        axes.append((key, path, spelt))
    if any(path == "preset" for _, path, _ in axes):
        beside = [key for key, path, _ in axes if path.startswith(_OF_PRESETS)]
        must = "left out beside preset, which sets it"
        problems += [InvalidValue(f"--grid {key}", must, key) for key in beside]
    if not axes and not problems:
        problems.append(
            InvalidValue(
                "--grid", "given a key with values", "none", "For example --grid keep=0.75,0.5."
            )
        )
    return axes


def _items(grid: Grid, problems: list[InvalidValue]) -> list[tuple[str, list[Any]]]:
    if isinstance(grid, Mapping):
        return [(str(k), list(v) if isinstance(v, (list, tuple)) else [v]) for k, v in grid.items()]
    found = []
    for text in [grid] if isinstance(grid, str) else grid:
        key, equals, values = text.partition("=")
        if not equals or not key.strip():
            hint = "For example --grid scorer=taylor,fisher."
            problems.append(
                InvalidValue(f"--grid {text}", "written key=value,value", repr(text), hint)
            )
            continue
        try:
            found.append((key.strip(), parse_yaml(f"[{values}]", f"--grid {key.strip()}")))
        except InvalidValue as error:
            problems.append(error)
    return found


def _key_problem(path: str, where: str) -> InvalidValue | None:
    steps = path.split(".")
    known = [*ALIASES, *(f"{n}.{k}" for n, s in _SECTIONS.items() for k in s.model_fields)]
    if path == "select.speedup":
        return InvalidValue(where, _TIMED, path)
    if path in _UNUSED:
        return InvalidValue(
            where,
            "a key that a sweep uses",
            path,
            "Baselines are scorers: --grid scorer=...,random.",
        )
    if steps[0] in ("score", "select", "recover") or path in ("data.calibration", "preset"):
        return (
            None
            if all(steps) and path not in ("score", "select")
            else InvalidValue(where, "a key of it", path)
        )
    must = "a key of score, select, recover, or data.calibration, or preset"
    if steps[0] in Recipe.model_fields:
        hint = (
            "All runs of a sweep share one base model and its data: make a sweep for each, with"
            " --set."
        )
        return InvalidValue(where, must, path, hint)
    return InvalidValue(where, must, repr(path), did_you_mean(path, known))


def _shown(value: Any) -> Any:
    """A value as the table has it."""
    plain = value is None or isinstance(value, (str, int, float, bool))
    return value if plain else json.dumps(value, sort_keys=True, default=str)


def _steps(value: Any, raw: Mapping[str, Any], path: str) -> Any:
    """The steps of ``recover`` that a word stands for."""
    for section in _RECOVERIES[path]:
        raw = section_in(raw, section)
    if not isinstance(value, str):
        return value
    own = [step for step in raw.get("recover") or () if isinstance(step, Mapping)]
    names = [] if value == "none" else value.split("+")
    return [
        next((dict(s) for s in own if s.get("method") == name.strip()), {"method": name.strip()})
        for name in names
    ]


def _combined(raw: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's data with a combination put in."""
    other = chosen.keys() & _BUDGETS - {
        f"select.{k}" for k, v in section_in(raw, "select").items() if v is not None
    }
    replaced: dict[str, Any] = dict.fromkeys(_BUDGETS if chosen.keys() & _BUDGETS else ())
    replaced |= dict.fromkeys(_OF_BUDGETS if other else ())
    for section, key, default in (
        ("score", "scorer", DEFAULT_SCORER),
        ("select", "selector", "global_topk"),
    ):
        own = section_in(raw, section)
        if chosen.get(f"{section}.{key}", own.get(key, default)) != own.get(key, default):
            replaced[f"{section}.settings"] = {}
            if (
                section == "score"
                and own.get("until") is not None
                and not _may_stop_early(chosen["score.scorer"])
            ):
                replaced["score.until"] = None
    order = sorted(chosen, key=lambda path: path not in _SWITCHES)
    changes = {**replaced, **{path: chosen[path] for path in order}}
    return override(
        raw, [f"{path}={json.dumps(value, default=str)}" for path, value in changes.items()]
    )


def _may_stop_early(scorer: Any) -> bool:
    """Whether ``score.until`` is for it: it reads data, and is not ``auto``."""
    from headprune import scoring

    try:
        return scorer != "auto" and bool(scoring.registry.get(scorer).needs_data)
    except (HeadPruneError, TypeError):
        return True  # refused with the recipe
