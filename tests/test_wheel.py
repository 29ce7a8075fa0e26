"""What users get: a wheel with everything in it, which installs into an empty environment and runs
the demo."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.scripts import ROOT

pytestmark = pytest.mark.long  # installs torch, and runs the recipe of two minutes


def run(*command, cwd):
    """A command that knows nothing of this checkout."""
    own = {**os.environ}
    for name in ("PYTHONPATH", "PYTHONHOME"):
        own.pop(name, None)
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def empty(folder):
    """A new environment; the folder of its programs."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if sys.platform == "win32" else "bin")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    home = tmp_path_factory.mktemp("wheel")
    programs = empty(home / "builder")
    run(programs / "python", "-m", "pip", "install", "--quiet", "build", cwd=home)
    run(programs / "python", "-m", "build", "--outdir", home / "dist", ROOT, cwd=home)
    (found,) = (home / "dist").glob("*.whl")
    assert len(list((home / "dist").glob("*.tar.gz"))) == 1
    return found


def test_the_wheel_holds_types_recipes_and_templates_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "headprune/py.typed" in names
    assert {f"headprune/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")} <= names
    for path in (ROOT / "headprune").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT).as_posix() in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"headprune"}


def test_the_wheel_installs_into_an_empty_environment_and_runs_the_demo(wheel, tmp_path):
    programs = empty(tmp_path / "empty")
    pins = ["-c", ROOT / "constraints.txt"]  # on Linux an open range brings gigabytes for GPUs
    run(programs / "python", "-m", "pip", "install", "--quiet", *pins, wheel, cwd=tmp_path)
    said = run(programs / "headprune", "--version", cwd=tmp_path)
    assert said.startswith(f"headprune {wheel.name.split('-')[1]}\n")
    run(programs / "headprune", "run", "digits-vit", "--out", "demo", cwd=tmp_path)
    record = json.loads((tmp_path / "demo" / "record.json").read_text())
    assert record["status"] == "done"
    assert record["git_commit"] is None, "it did not run from this checkout"
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000
    ask = "import headprune; print(headprune.__file__)"
    where = run(programs / "python", "-c", ask, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)
