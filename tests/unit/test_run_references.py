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
    """``a0`` as given, and each further key twice the one before."""
    here = "model.config."
    return {
        "a0": first,
        **{f"a{i}": f"${{{here}a{i - 1}}}${{{here}a{i - 1}}}" for i in range(1, n)},
    }


def chain(n: int) -> dict[str, str]:
    return {"a0": "x", **{f"a{i}": f"${{model.config.a{i - 1}}}" for i in range(1, n)}}


def backwards(values: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(values.items()))


#: Recipes whose references stand for too much, by what is in ``model.config``; with a bound on what
#: would be made of them (some 100 MB), so that this file ends where there is no limit.
TOO_MUCH: dict[str, Callable[[], dict[str, Any]]] = {
    "each twice the one before": lambda: doubled("lol" * 10, 22),
    "backwards": lambda: backwards(doubled("lol" * 10, 22)),
    "in a list": lambda: {"a0": "x" * 10_000, "a": ["${model.config.a0} " * 50] * 100},
    "in lists in lists": lambda: {
        "a0": "x" * 10_000,
        "a": [[["${model.config.a0}" * 50]] * 10] * 10,
    },
    "in sections": lambda: {
        "a0": "x" * 10_000,
        "a": {f"b{i}": {"c": "${model.config.a0}" * 50} for i in range(100)},
    },
    "one long text in many places": lambda: {
        "a0": "x" * 50_000,
        "a": ["${model.config.a0}"] * 2000,
    },
    "a long chain": lambda: chain(1500),
    "a long chain backwards": lambda: backwards(chain(1500)),
}

#: Recipes that cost far more than they come to, or that are wrong in thousands of places.
COSTLY: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing, doubled": lambda: doubled("", 40),
    "circles, doubled": lambda: doubled("${model.config.a39}", 40),
    "unknown keys": lambda: {f"a{i}": f"${{model.confic.b{i}}}" for i in range(5000)},
    "one unknown key, doubled": lambda: doubled("${nowhere}", 40),
    "long keys in each other": lambda: deep(
        38, {f"b{i}": 1 for i in range(8000)} | {"c": "${name}"}
    ),
}


def deep(levels: int, value: dict[str, Any]) -> dict[str, Any]:
    for _ in range(levels):
        value = {"k" * 1000: value}
    return value


def written(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {**TINY, "model": {**TINY["model"], "config": config}}, sort_keys=False, width=10**6
        )
    )
    return path


class Unaliased(yaml.SafeDumper):
    """YAML without aliases, which recipes do not have."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


@pytest.mark.parametrize("what", TOO_MUCH | COSTLY)
def test_references_take_little_time_and_memory(what: str, tmp_path: Path) -> None:
    raw = {**TINY, "model": {**TINY["model"], "config": (TOO_MUCH | COSTLY)[what]()}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.dump(raw, Dumper=Unaliased, sort_keys=False, width=10**6))
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
    assert (
        refused_at.startswith("model.config.")
        if what in (*TOO_MUCH, "long keys in each other")
        else not refused_at
    )
    assert peak < MEMORY
    if what in TOO_MUCH:
        with alarm(20), pytest.raises(RecipeError) as refused:
            load_recipe(path)
        (problem,) = refused.value.problems
        assert problem.where == refused_at
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "command",
    [
        ["validate"],
        ["show"],
        ["run", "--dry-run"],
        ["sweep", "--grid", "keep=0.5,0.75", "--out", "sweep"],
    ],
)
def test_every_command_refuses_them_in_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(doubled("lol" * 10, 22), tmp_path)
    with alarm(60):
        result = CliRunner().invoke(app, [command[0], str(path), *command[1:]])
    assert result.exit_code == 2, result.output
    assert "model.config.a12: must be at most 200,000 characters" in result.output


def test_references_in_overrides_and_grids_are_under_the_same_limit(tmp_path: Path) -> None:
    path = written({"a0": "x" * 10_000}, tmp_path)
    long = "${model.config.a0}" * 100
    with alarm(60):
        with pytest.raises(
            RecipeError, match=r"model\.config\.a1: must be at most 200,000 characters"
        ):
            load_recipe(path, [f"model.config.a1={long}"])
        with pytest.raises(
            RecipeError, match=r"score\.settings\.a: must be at most 200,000 characters"
        ):
            lay_out(path, [], {"score.settings.a": [long, f"{long} "]})


def test_what_recipes_have_is_no_problem() -> None:
    raw = {
        "a": "x" * 1000,
        "b": ["${a}"] * 150,
        "c": {"d": "${a}/${b.0}"},
        "e": "${f}",
        "f": "${g}",
        "g": 3,
    }
    data, problems = interpolate(raw)
    assert not problems
    assert (data["b"][149], data["c"]["d"], data["e"]) == (
        "x" * 1000,
        "x" * 1000 + "/" + "x" * 1000,
        3,
    )
    assert interpolate(chain(41)) is not None


@pytest.mark.parametrize("n", [41, 42])
def test_the_longest_chain_is_the_same_in_every_order(n: int) -> None:
    for values in (chain(n), backwards(chain(n))):
        raw = {"model": {"config": values}}
        if n == 41:
            assert set(interpolate(raw)[0]["model"]["config"].values()) == {"x"}
            continue
        with pytest.raises(
            HeadPruneError, match=r"a41: must be at the end of a chain of at most 40 references"
        ):
            interpolate(raw)
