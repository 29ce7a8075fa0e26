"""Which builds a cell of the compatibility matrix tries, and what a row says of one that is not to
be had."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import benchmark


@pytest.fixture
def compatibility() -> ModuleType:
    return benchmark("compatibility")


@pytest.fixture
def pip(compatibility: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What pip is asked for, by a stand-in that has no torch build for processors alone, and no
    torch 3 at all."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        lacking = next(
            (word for word in command if word.endswith("+cpu") or word.startswith("torch==3")), None
        )
        if "install" in command:
            asked.append(command)
        said = f"ERROR: No matching distribution found for {lacking}\n" if lacking else ""
        return subprocess.CompletedProcess(command, 1 if lacking else 0, "", said)

    monkeypatch.setattr(compatibility.subprocess, "run", run)
    monkeypatch.setattr(compatibility, "interpreter", lambda version: f"python{version}")
    monkeypatch.setattr(compatibility.platform, "system", lambda: "Linux")
    return asked


def made(compatibility: ModuleType, work: Path, cell: Any, **options: Any) -> Path:
    (work / cell.name).mkdir(parents=True)
    return Path(compatibility.environment(cell, work, (), **options))


def test_builds_for_processors_come_first(
    compatibility: ModuleType, pip: list[list[str]], tmp_path: Path
) -> None:
    cell = compatibility.Cell("3.10", "2.8.0", "5.14.0")
    made(compatibility, tmp_path, cell, any_build=True)
    assert [word for command in pip for word in command if word.startswith("torch")] == [
        "torch==2.8.0+cpu",
        "torch==2.8.0",
    ]
    assert (tmp_path / cell.name / "complete").is_file(), "it is used again"


def test_no_other_build_unless_asked_for(
    compatibility: ModuleType, pip: list[list[str]], tmp_path: Path
) -> None:
    with pytest.raises(
        compatibility.Missing, match=r"^no package torch==2.8.0\+cpu for this Python"
    ):
        made(compatibility, tmp_path, compatibility.Cell("3.10", "2.8.0", "5.14.0"))
    assert len(pip) == 1


def test_a_row_names_all_that_is_missing(
    compatibility: ModuleType, pip: list[list[str]], tmp_path: Path
) -> None:
    cell = compatibility.Cell("3.10", "3.0.0", "5.14.0")
    (tmp_path / cell.name).mkdir()
    row = compatibility.tried(cell, tmp_path, (), any_build=True)
    assert "torch==3.0.0+cpu" in row["missing"]
    assert "torch==3.0.0 for" in row["missing"]
    assert compatibility.said(row).startswith("not run: no package torch==3.0.0+cpu")
