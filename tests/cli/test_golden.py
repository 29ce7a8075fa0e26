"""What commands print, letter by letter, on a terminal and without one: ``tests/cli/golden``, a file each.

After a change that is meant: ``HEADPRUNE_GOLDEN=write pytest tests/cli/test_golden.py``, and read the difference.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import headprune as hp
from headprune.core.codec import FrozenDict
from headprune.core.record import QualityRow, RunRecord, SpeedRow
from headprune.core.scores import Cost, CostTable, ModelFingerprint
from tests.terminals import HEADPRUNE, on_terminal

GOLDEN = Path(__file__).with_name("golden")
COMMANDS = {
    "alone": [],
    "explain": ["explain", "run"],
    "diff-plans": ["diff", "run/plan.json", "other/plan.json"],
    "diff-runs": ["diff", "run", "other"],
    "no-scores": ["explain", "other"],
    "bad-budget": ["prune", "--model", "m", "--data", "rows.csv", "--out", "small"],
    "misspelt": ["run", "digit-vit"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on paper: plans, scores and records with figures that nobody measured."""
    home = tmp_path_factory.mktemp("golden")
    model = ModelFingerprint("structure", "weights")
    sites = tuple(hp.AttentionSite(f"layer.{i}", "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3)) for i in range(2))
    unit = Cost(1000, 0, 900, 16, 64)
    costs = CostTable(Cost(20000, 0, 18000, 128, 512), ((unit,) * 4,) * 2, 16)
    scores = hp.HeadScores(
        sites, ((0.4, 0.1, 0.8, 0.3), (0.2, 0.02, 0.6, 0.5)), ((0.05,) * 4, (0.01,) * 4), "taylor", FrozenDict(), 64,
        model, costs=costs, notes=("the 2 longest examples were cut off",),
    )  # fmt: skip
    for name, keep, accuracy in (
        ("run", {"layer.0": [0, 2], "layer.1": [2, 3]}, 0.91),
        ("other", {"layer.1": [0]}, 0.88),
    ):
        mask = hp.HeadMask.from_keep(keep, {site.name: 4 for site in sites})
        plan = hp.PruningPlan(mask, hp.Budget(keep_heads=mask.n_kept), "global_topk", scorer="taylor", model=model)
        (home / name).mkdir()
        plan.save(home / name / "plan.json")
        quality = (
            QualityRow("base", 8, "accuracy", 0.93, "test", 100, 0.2),
            QualityRow("taylor", mask.n_kept, "accuracy", accuracy, "test", 100, 0.3),
        )
        speed = (SpeedRow(32, 128, 0.2, 0.21, 0.15, 0.16, 1.33, 1.3, 1.36, 20),)
        record = RunRecord(
            name, "done", "report", "2026-01-01T00:00:00+00:00", FrozenDict({"seed": len(name)}), plan=plan,
            quality=quality, speed=speed, hardware=FrozenDict({"threads": 2}), timings=FrozenDict({"score": 1.5}),
        )  # fmt: skip
        record.save(home / name / "record.json")
    scores.save(home / "run" / "scores.json")
    return home


def said(folder: Path, command: list[str], terminal: bool) -> str:
    """Everything that a command writes, and its exit status."""
    own = {"COLUMNS": "100", "TERM": "xterm-256color", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    if terminal:
        text, status = on_terminal(command, folder, **own)
        return f"{text}exit status {status}\n"
    done = subprocess.run(
        [*HEADPRUNE, *command],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return f"{done.stdout}{done.stderr}exit status {done.returncode}\n"


@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "terminal"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_it_printed(name: str, terminal: bool, folder: Path) -> None:
    text = said(folder, COMMANDS[name], terminal)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("HEADPRUNE_GOLDEN") == "write" and not terminal:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_every_golden_file_is_of_a_command() -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == set(COMMANDS)
