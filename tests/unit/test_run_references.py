"""References in recipes (``${...}``): whatever they stand for, reading a recipe takes little time
and memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headprune.cli.main import app
from headprune.core.errors import HeadPruneError
from headprune.recipes.references import interpolate
from headprune.recipes.validate import RecipeError, load_recipe
from headprune.sweep.grid import lay_out
from tests.fuzzing import alarm
from tests.tiny_recipe import TINY

#: Most of the memory that reading one of these recipes may take; the texts themselves are at most
#: 200 kB.
MEMORY = 40 * 2**20


def doubled(first: str, n: int) -> dict[str, str]:
    here = "model.config."
    return {
        "a0": first,
        **{f"a{i}": f"${{{here}a{i - 1}}}${{{here}a{i - 1}}}" for i in range(1, n)},
    }


def chain(n: int) -> dict[str, str]:
    return {"a0": "x", **{f"a{i}": f"${{model.config.a{i - 1}}}" for i in range(1, n)}}


def backwards(values: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(values.items()))


LONG, WIDE = "x" * 10_000, "${model.config.a0}" * 50
SECTIONS = {f"b{i}": {"c": WIDE} for i in range(100)}

#: Recipes whose references stand for too much, by what is in ``model.config``; with a bound on what
#: would be made of them (some 100 MB), so that this file ends where there is no limit.
TOO_MUCH: dict[str, Callable[[], dict[str, Any]]] = {
    "each twice the one before": lambda: doubled("lol" * 10, 22),
    "backwards": lambda: backwards(doubled("lol" * 10, 22)),
    "in lists in lists": lambda: {"a0": LONG, "a": [[[WIDE]] * 10] * 10},
    "in sections": lambda: {"a0": LONG, "a": SECTIONS},
    "one long text in many places": lambda: {"a0": LONG * 5, "a": ["${model.config.a0}"] * 2000},
    "a long chain backwards": lambda: backwards(chain(1500)),
}

KEYS = [f"b{i}" for i in range(8000)]

#: Recipes that cost far more than they come to, or that are wrong in thousands of places.
COSTLY: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing, doubled": lambda: doubled("", 40),
    "circles, doubled": lambda: doubled("${model.config.a39}", 40),
    "unknown keys": lambda: {f"a{i}": f"${{model.confic.b{i}}}" for i in range(1500)},
    "long keys in each other": lambda: deep(38, {"c": "${name}"} | dict.fromkeys(KEYS, 1)),
}


def deep(levels: int, value: dict[str, Any]) -> dict[str, Any]:
    for _ in range(levels):
        value = {"k" * 1000: value}
    return value


class Unaliased(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def written(config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Path]:
    raw, path = {**TINY, "model": {**TINY["model"], "config": config}}, folder / "recipe.yaml"
    path.write_text(yaml.dump(raw, Dumper=Unaliased, sort_keys=False, width=10**6))
    return raw, path


@pytest.mark.parametrize("what", TOO_MUCH | COSTLY)
def test_references_take_little_time_and_memory(what, tmp_path):
    raw, path = written((TOO_MUCH | COSTLY)[what](), tmp_path)
    refused_at = ""
    with alarm(20):  # reading thousands of lines of YAML takes seconds by itself
        try:
            tracemalloc.start()
            interpolate(raw)
        except HeadPruneError as refusal:
            refused_at = refusal.where
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    is_refused = what in (*TOO_MUCH, "long keys in each other")
    assert refused_at.startswith("model.config.") == is_refused
    assert peak < MEMORY
    if what in TOO_MUCH:
        with alarm(20), pytest.raises(RecipeError) as refused:
            load_recipe(path)
        (problem,) = refused.value.problems
        assert problem.where == refused_at
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("command", ["validate", "sweep --grid keep=0.5,0.75 --out sweep"])
def test_every_command_refuses_them_in_one_line(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, path = written(doubled("lol" * 10, 22), tmp_path)
    verb, *options = command.split()
    with alarm(60):
        result = CliRunner().invoke(app, [verb, str(path), *options])
    assert result.exit_code == 2, result.output
    assert "model.config.a12: must be at most 200,000 characters" in result.output


def test_references_in_overrides_and_grids_are_under_the_same_limit(tmp_path):
    _, path = written({"a0": LONG}, tmp_path)
    wide, limit = WIDE * 2, "must be at most 200,000 characters"
    with alarm(60):
        with pytest.raises(RecipeError, match=rf"model\.config\.a1: {limit}"):
            load_recipe(path, [f"model.config.a1={wide}"])
        with pytest.raises(RecipeError, match=rf"score\.settings\.a: {limit}"):
            lay_out(path, [], {"score.settings.a": [wide, f"{wide} "]})


@pytest.mark.parametrize("order", [dict, backwards])
def test_the_longest_chain_is_the_same_in_every_order(order):
    whole = {"model": {"config": order(chain(41))}}
    assert set(interpolate(whole)[0]["model"]["config"].values()) == {"x"}
    with pytest.raises(HeadPruneError, match=r"a41: must be at the end of a chain of at most 40"):
        interpolate({"model": {"config": order(chain(42))}})
