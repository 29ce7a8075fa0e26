"""A recipe in two processes, as launchers start them: the first writes what it would have written alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import headprune as hp
from headprune.cli.main import app
from headprune.core.errors import InvalidValue
from headprune.run import run_recipe
from headprune.run.launched import Launch, launched
from tests.scripts import ROOT
from tests.tiny_recipe import TINY

RECIPE = {
    **TINY,
    "report": False,
    "score": {"scorer": "fisher", "batch_size": 12, "random_draws": 1},
    "bench": {"seconds": 0.01},
}


@pytest.mark.slow
def test_two_processes_leave_what_one_leaves(tmp_path: Path) -> None:
    """The second has the weights that the first has trained, or its scores would be refused as another model's."""
    recipe, together, alone = tmp_path / "tiny.yaml", tmp_path / "together", tmp_path / "alone"
    recipe.write_text(yaml.safe_dump(RECIPE))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "headprune", "run", str(recipe), "--out", str(together)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RunRecord tiny: done") == 1, "the second process says nothing"
    assert done.stderr.count("[train]") == 1, "the second process does not train"
    run_recipe(recipe, out=alone, say=lambda line: None)
    record = hp.RunRecord.load(together / "record.json")
    assert record.hardware["processes"] == 2
    assert hp.HeadScores.load(together / "scores.json") == hp.HeadScores.load(alone / "scores.json")
    for name in ("plan.json", "rows.json", "model/model.safetensors"):
        assert (together / name).read_bytes() == (alone / name).read_bytes(), name
    assert record.quality == hp.RunRecord.load(alone / "record.json").quality


def start(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)


def test_a_started_process_looks_like_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer would else wait for processes that do not train."""
    assert launched() is None
    start(monkeypatch)
    assert launched() == Launch(1, 2, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(os.environ)
    assert launched() is None


def test_engines_that_split_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, ACCELERATE_USE_FSDP="true")
    with pytest.raises(InvalidValue, match="ACCELERATE_USE_FSDP"):
        launched()


def test_other_commands_are_started_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(monkeypatch)
    done = CliRunner().invoke(app, ["sweep", "digits-vit", "--out", str(tmp_path / "sweep")])
    assert done.exit_code == 2
    assert "headprune sweep: must be started once, got 2 processes" in done.stderr
    assert not (tmp_path / "sweep").exists()
