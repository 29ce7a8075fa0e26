"""``headprune ls``: list everything that has a name, without importing it."""

from __future__ import annotations

import importlib
from pathlib import Path

from headprune.cli._shared import AsJson, Debug, echo, emit, guarded

#: The registries, by title and by the package that has them.
_REGISTRIES = {
    "layouts": "layouts",
    "scorers": "scoring",
    "selectors": "selection",
    "recoveries": "recovery",
}


def ls(as_json: AsJson = False, debug: Debug = False) -> None:
    """List recipes, presets, layouts, scorers, selectors and recoveries."""
    with guarded(debug):
        listed = {"recipes": _recipes(), "presets": _presets()}
        for title, package in _REGISTRIES.items():
            # Summaries are read from source files: importing them all would take seconds.
            registry = importlib.import_module(f"headprune.{package}").registry
            listed[title] = {name: registry.summary(name) for name in registry.names()}
        if as_json:
            emit(listed)
            return
        names = [name for entries in listed.values() for name in entries]
        # Names in a column, as wide as the longest of them.
        width = max(map(len, names))
        for title, entries in listed.items():
            echo(title)
            for name, summary in entries.items():
                echo(f"  {name:<{width}}  {summary}")


def _recipes() -> dict[str, str]:
    from headprune.recipes.reading import read_raw, shipped_recipes

    return {name: _description(read_raw(path), path) for name, path in shipped_recipes().items()}


def _presets() -> dict[str, str]:
    from headprune.recipes.presets import PRESETS

    # The source starts with the reference, such as a paper.
    return {name: preset.source.partition(": ")[0] for name, preset in PRESETS.items()}


def _description(raw: dict[str, object], path: Path) -> str:
    return str(raw.get("description") or path)
