"""What an import costs: the façade, core and selection load neither torch nor transformers."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import headprune as hp

ROOT = Path(hp.__file__).parents[1]
HEAVY = {"torch", "transformers"}


def loaded_after(code):
    """Modules that a fresh process has loaded after ``code`` and had not before."""
    code = f"""
import __future__, importlib, sys, typing
before = {{*sys.modules}}
{code}
print(*sorted({{*sys.modules}} - before))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_three_files_of_it_and_nothing_else():
    """Counted, because a busy machine says nothing by time; ``benchmarks/startup.py`` has that."""
    loaded = loaded_after("import headprune")
    assert loaded == {
        "headprune",
        "headprune.core",
        "headprune.core.lazy",
        "headprune.core.version",
    }
    listed = loaded_after("import headprune; dir(headprune)")
    assert not listed & {*HEAVY, "numpy", "scipy", "datasets", "pydantic", "rich"}


def test_the_command_line_loads_torch_only_to_work():
    code = """
import contextlib, io
from headprune.cli.main import app
for command in (["--help"], ["run", "--help"], ["ls"]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        app(command, standalone_mode=False)
    assert "digits-vit" in out.getvalue() or "Usage" in out.getvalue(), out.getvalue()
"""
    assert not loaded_after(code) & HEAVY


def test_a_mistake_in_a_recipe_is_reported_without_torch():
    code = """
import contextlib, io
from headprune.cli.main import app
for command, text in (
    ("run digit-vit", "Did you mean 'digits-vit'?"),
    ("run digits-vit --set select.keep_heads=none", "select.keep_heads: must be"),
    ("sweep digit-vit --grid keep=0.5,0.7", "Did you mean 'digits-vit'?"),
    ("sweep digits-vit --grid keap=0.5,0.7", "keap"),
):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        status = app(command.split(), standalone_mode=False)
    assert status == 2, status
    assert text in err.getvalue(), err.getvalue()
"""
    assert not loaded_after(code) & HEAVY


def test_planning_from_saved_scores_needs_no_torch():
    """After every module of ``core`` and ``selection`` was imported."""
    names = []
    for room, at_least in (("core", 10), ("selection", 5)):
        modules = pkgutil.iter_modules([str(ROOT / "headprune" / room)])
        found = [f"headprune.{room}.{module.name}" for module in modules]
        assert len(found) >= at_least
        names += found
    code = f"""
import {", ".join(names)}
import headprune as hp
from headprune.core.scores import ModelFingerprint
model, empty = ModelFingerprint("s", "w"), hp.core.codec.EMPTY
site = hp.AttentionSite("x", "bert", "self", 2, 2, 8, 8, (0, 1))
scores = hp.HeadScores((site,), ((1.0, 2.0),), None, "fake", empty, 1, model)
scores = hp.HeadScores.from_json(scores.to_json())
plan = hp.select(scores, hp.Budget(keep_heads=1), hp.selection.Uniform())
assert plan.mask.kept("x") == (1,)
"""
    assert not loaded_after(code) & HEAVY


def test_names_of_the_facade_are_found_and_unknown_ones_refused():
    assert hp.HeadId is hp.core.heads.HeadId
    assert hp.__version__ == "0.1.0"
    assert {"Budget", "select", "core", "selection"} <= set(dir(hp))
    with pytest.raises(AttributeError, match="'headprune' has no attribute 'slect'"):
        hp.slect  # noqa: B018
