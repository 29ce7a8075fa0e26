"""What an import costs: the façade, core and selection load neither torch nor transformers."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import headprune as hp

ROOT = Path(hp.__file__).parents[1]


def loaded_after(code):
    """Top-level modules that a fresh process has loaded after ``code``."""
    code = f"import sys\n{code}\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
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


def test_importing_the_package_is_light():
    loaded = loaded_after("import headprune; dir(headprune)")
    assert "headprune" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "scipy", "datasets", "pydantic", "rich"}


def test_importing_the_package_loads_two_files_of_it():
    """Counted, because a busy machine says nothing by time; ``benchmarks/startup.py`` has that."""
    code = (
        "import __future__, importlib, typing, sys; a = {*sys.modules}\nimport headprune;"
        " print(*{*sys.modules} - a)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {"headprune", "headprune.core", "headprune.core.version"}


@pytest.mark.parametrize("command", ["--help", "run --help", "ls"])
def test_the_command_line_loads_torch_only_to_work(command):
    code = """
import contextlib, io
from headprune.cli.main import app
with contextlib.redirect_stdout(io.StringIO()) as out:
    app({!r}, standalone_mode=False)
assert "digits-vit" in out.getvalue() or "Usage" in out.getvalue(), out.getvalue()
"""
    assert not loaded_after(code.format(command.split())) & {"torch", "transformers"}


@pytest.mark.parametrize(("room", "at_least"), [("core", 10), ("selection", 5)])
def test_no_module_of_the_room_imports_torch(room, at_least):
    folder = ROOT / "headprune" / room
    names = [f"headprune.{room}.{m.name}" for m in pkgutil.iter_modules([str(folder)])]
    assert len(names) >= at_least
    loaded = loaded_after("\n".join(f"import {name}" for name in names))
    assert not loaded & {"torch", "transformers"}


def test_planning_from_saved_scores_needs_no_torch():
    code = """
import headprune as hp
from headprune.core.scores import ModelFingerprint
site = hp.AttentionSite("x", "bert", "self", 2, 2, 8, 8, (0, 1))
scores = hp.HeadScores((site,), ((1.0, 2.0),), None, "fake", hp.core.codec.EMPTY, 1, ModelFingerprint("s", "w"))
scores = hp.HeadScores.from_json(scores.to_json())
assert hp.select(scores, hp.Budget(keep_heads=1), hp.selection.Uniform()).mask.kept("x") == (1,)
"""
    assert not loaded_after(code) & {"torch", "transformers"}


def test_names_of_the_facade_are_found_and_unknown_ones_refused():
    assert hp.HeadId is hp.core.heads.HeadId
    assert hp.__version__ == "0.1.0"
    assert {"Budget", "select", "core", "selection"} <= set(dir(hp))
    with pytest.raises(AttributeError, match="'headprune' has no attribute 'slect'"):
        hp.slect  # noqa: B018
