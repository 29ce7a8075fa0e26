"""``headprune sweep`` and ``headprune pick``: killed and resumed, in two processes, locked; exit
codes and words."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock
from typer.testing import CliRunner

from headprune.cli.main import app
from headprune.core.sweeps import SweepTable
from tests.tiny_recipe import TINY

GRID = [
    "--grid",
    "scorer=taylor,random",
    "--grid",
    "keep=0.75,0.5",
    "--grid",
    "recover=none,mean_fold",
    "--seeds",
    2,
]


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def command(*arguments: object) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from headprune.cli.main import main; main()",
        *map(str, arguments),
    ]


def files(folder: Path, ending: str = "*.*") -> dict[str, tuple[int, int]]:
    found = [
        p
        for kind in ("scores", "plans", "outcomes", "runs", "bases")
        for p in (folder / kind).rglob(ending)
    ]
    whole = [
        p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts)
    ]
    return {str(p.relative_to(folder)): (p.stat().st_ino, p.stat().st_mtime_ns) for p in whole}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that nothing disturbed."""
    out = tmp_path_factory.mktemp("sweeps") / "whole"
    result = call("sweep", recipe, *GRID, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    assert len(SweepTable.from_dict(json.loads(result.stdout)).rows) == 16
    assert "[16/16]" in result.stderr
    assert "gone)" in result.stderr
    return out


@pytest.mark.slow
def test_killed_and_called_again(recipe: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    process = subprocess.Popen(
        command("sweep", recipe, *GRID, "--out", out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while len(list((out / "runs").glob("*.json"))) < 3:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = files(out)
    n_done = len(list((out / "runs").glob("*.json")))
    assert 3 <= n_done < 16
    assert not (out / "table.json").exists()
    result = call("sweep", recipe, *GRID, "--out", out)  # the lock has gone with its process
    assert result.exit_code == 0, result.output
    assert f"{n_done} of 16 runs are done already" in result.stderr
    assert "[train]" not in result.stderr
    assert {name: mark for name, mark in files(out).items() if name in before} == before
    for name in (
        "table.json",
        "table.csv",
        "table.parquet",
        "tradeoff.svg",
        "summary.md",
        "report.html",
    ):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow
def test_two_processes_give_the_same_table(recipe: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "parallel"
    shutil.copytree(whole / "bases", out / "bases")
    done = subprocess.run(
        command("sweep", recipe, *GRID, "--out", out, "--jobs", 2),
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert (out / "table.json").read_bytes() == (whole / "table.json").read_bytes()
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.long
def test_a_cluster_gives_the_same_table(recipe: Path, whole: Path, tmp_path: Path) -> None:
    """One of Dask's on this machine, which the command starts by itself;
    ``pip install distributed``."""
    pytest.importorskip("distributed")
    out = tmp_path / "cluster"
    shutil.copytree(whole / "bases", out / "bases")
    asked = command("sweep", recipe, *GRID, "--out", out, "--jobs", 2, "--backend", "dask")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert (out / "table.json").read_bytes() == (whole / "table.json").read_bytes()


def test_its_page_is_drawn_anew(whole: Path, tmp_path: Path) -> None:
    result = call("report", whole, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert sorted(json.loads(result.stdout)) == ["html", "markdown", "png", "svg"]
    elsewhere = (
        (tmp_path / "report.html")
        .read_text()
        .replace(f"headprune pick {whole} ", "headprune pick . ")
    )
    assert elsewhere == (whole / "report.html").read_text().replace(
        "; in the folder of this page", ""
    )


def test_one_sweep_a_folder(recipe: Path, whole: Path) -> None:
    with FileLock(whole / ".lock"):
        result = call("sweep", recipe, *GRID, "--out", whole)
    assert result.exit_code == 2
    assert "must be free, got a sweep that is running there" in result.stderr


def test_failed_runs_end_in_a_list_and_an_exit_code(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole / "bases", tmp_path / "bases")
    result = call("sweep", recipe, "--grid", "keep=1,0.5", "--out", tmp_path)
    assert result.exit_code == 1
    assert "failed: keep 1, seed 0, error Budget.keep_heads: must be at least 2" in result.stderr
    assert len(SweepTable.load(tmp_path / "table.json").rows) == 1
    assert "## Failed" in (tmp_path / "summary.md").read_text()


def test_bad_input(
    recipe: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, words in (
        (["--grid", "scorer=tailor", "--grid", "kep=1"], "2 errors"),
        (["--grid", "keep=0.5", "--seeds", 0], "seeds"),
        (
            ["--grid", "keep=0.5", "--backend", "loki"],
            "backend: must be one of joblib's, got 'loki'",
        ),
        (
            ["--grid", "keep=0.5", "--backend", "dask"],
            "backend: must be one whose package is installed: pip install distributed",
        ),
    ):
        out = tmp_path / "out"
        if "--backend" in arguments:
            shutil.copytree(whole / "bases", out / "bases", dirs_exist_ok=True)
        if "dask" in arguments:
            monkeypatch.setitem(sys.modules, "distributed", None)
        result = call("sweep", recipe, *arguments, "--out", out)
        assert result.exit_code == 2, result.output
        assert words in result.stderr


def test_pick(whole: Path, tmp_path: Path) -> None:
    result = call("pick", whole, "--max-drop", 0.9, "--out", tmp_path / "small")
    assert result.exit_code == 0, result.output
    assert "4 heads, loses at most 90.00 points at 95 % confidence" in result.stdout
    assert "test rows: drop" in result.stdout
    assert sorted(os.listdir(tmp_path / "small")) == ["model", "pick.json", "plan.json"]
    assert re.match(
        r"making .*seed \d.* again, to prove that it answers as in the sweep\n", result.stderr
    )
    assert (
        "making"
        not in call("pick", whole, "--max-drop", 0.9, "--out", tmp_path / "other", "--quiet").stderr
    )
    found = json.loads(call("pick", whole, "--max-drop", 0.9, "--json").stdout)
    assert (found["headprune"], found["size"]) == ("Pick", 4.0)


def test_pick_of_nothing(whole: Path, tmp_path: Path) -> None:
    result = call("pick", whole, "--max-drop", -0.9)
    assert result.exit_code == 1
    assert "no model of the sweep is shown to lose at most" in result.stdout
    result = call("pick", tmp_path, "--max-drop", 0.01)
    assert result.exit_code == 2
    assert "a sweep that was stopped has no table yet" in result.stderr
