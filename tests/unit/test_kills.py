"""Runs and sweeps that are killed (SIGKILL) at random moments come to the result of those that nothing happened to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import killing

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")

Whole = tuple[Path, tuple[float, int]]


def _whole(factory: pytest.TempPathFactory, work: Callable[[str], None]) -> Whole:
    folder = factory.mktemp("undisturbed") / "out"
    killing.undisturbed(work, folder)  # its time has the start of the fork server in it
    again = folder.with_name("again")
    whole = killing.undisturbed(work, again)
    return folder, whole


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return _whole(tmp_path_factory, killing.the_run)


@pytest.fixture(scope="module")
def gradual_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return _whole(tmp_path_factory, killing.the_gradual_run)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return _whole(tmp_path_factory, killing.the_sweep)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_killed_run(run: Whole, tmp_path: Path, number: int) -> None:
    folder, whole = run
    said = killing.killed_and_finished(killing.the_run, tmp_path / "out", number, 0, whole)
    print(*said, sep="\n")
    killing.same_runs(tmp_path / "out", folder)


@pytest.mark.long
@pytest.mark.parametrize("number", range(20))
def test_a_run_killed_at_twenty_moments(run: Whole, tmp_path: Path, number: int) -> None:
    folder, whole = run
    said = killing.killed_and_finished(killing.the_run, tmp_path / "out", number, 1, whole)
    print(*said, sep="\n")
    killing.same_runs(tmp_path / "out", folder)


@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
def test_a_run_in_stages_killed_at_six_moments(gradual_run: Whole, tmp_path: Path, number: int) -> None:
    folder, whole = gradual_run
    said = killing.killed_and_finished(killing.the_gradual_run, tmp_path / "out", number, 2, whole)
    print(*said, sep="\n")
    killing.same_runs(tmp_path / "out", folder)


@pytest.mark.long
@pytest.mark.parametrize("number", range(5))
def test_a_sweep_killed_at_five_moments(sweep: Whole, tmp_path: Path, number: int) -> None:
    folder, whole = sweep
    said = killing.killed_and_finished(killing.the_sweep, tmp_path / "out", number, 3, whole)
    print(*said, sep="\n")
    killing.same_sweeps(tmp_path / "out", folder)
