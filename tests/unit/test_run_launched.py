"""A recipe in two processes, as launchers start them: the first writes what it would have written
alone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from typer.testing import CliRunner

import headprune as hp
from headprune.cli.main import app
from headprune.core.errors import InvalidValue
from headprune.run import run_recipe, stages
from headprune.run.launched import Launch, launched
from tests import processes
from tests.scripts import ROOT
from tests.tiny_recipe import TINY

RECIPE = {
    **TINY,
    "report": False,
    "score": {"scorer": "fisher", "batch_size": 12, "random_draws": 1},
    "bench": {"seconds": 0.01},
}


ACCELERATE = "accelerate.commands.launch --num_processes 2 --num_machines 1 --main_process_port 0"
LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc-per-node 2",
    # With --cpu it would start one process, without a word; --multi_gpu starts them on any machine.
    "accelerate": f"{ACCELERATE} --multi_gpu",
}


def command(launcher: str, recipe: Path, out: Path) -> list[str]:
    headprune = ["-m", "headprune", "run", str(recipe), "--out", str(out)]
    return [sys.executable, "-m", *LAUNCHERS[launcher].split(), *headprune]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HOME": str(home)}


def launch(recipe: Path, out: Path, launcher: str) -> subprocess.CompletedProcess[str]:
    pipes = {"capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run(
        command(launcher, recipe, out), env=environment(out.parent / "home"), check=False, **pipes
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.mark.slow
def test_two_processes_write_what_one_writes(recipe, tmp_path):
    """The second has the weights that the first has trained, or its scores would be refused as
    another model's."""
    together, alone = tmp_path / "together", tmp_path / "alone"
    done = launch(recipe, together, "torchrun")
    assert done.stdout.count("RunRecord tiny: done") == 1, "the second process says nothing"
    assert done.stderr.count("[train]") == 1, "the second process does not train"
    expected = run_recipe(recipe, out=alone, say=lambda line: None)
    record = hp.RunRecord.load(together / "record.json")
    assert record.hardware["processes"] == 2
    assert (record.scores, record.quality) == (expected.scores, expected.quality)
    for name in ("plan.json", "rows.json", "model/model.safetensors"):
        assert (together / name).read_bytes() == (alone / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ended", "again", "launcher"),
    [("score_heads", True, "accelerate"), ("compare_plans", False, "torchrun")],
)
def test_two_processes_go_on_where_one_ended(ended, again, launcher, recipe, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(stages, ended, Mock(side_effect=RuntimeError("power is gone")))
        with pytest.raises(RuntimeError, match="power is gone"):
            run_recipe(recipe, out=out, say=lambda line: None)
    done = launch(recipe, out, launcher)
    assert "[train] was done before" in done.stderr
    assert ("[score] was done before" in done.stderr) != again
    record = hp.RunRecord.load(out / "record.json")
    assert record.status == "done"
    assert record.hardware.get("processes") == (2 if again else None)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_is_killed_ends_the_others(recipe, tmp_path):
    """The second one while the first trains."""
    out = tmp_path / "out"
    recipe.write_text(yaml.safe_dump({**RECIPE, "train": {**TINY["train"], "epochs": 2000}}))
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    settings = {"env": environment(tmp_path / "home"), "start_new_session": True, **pipes}
    with subprocess.Popen(command("torchrun", recipe, out), **settings) as running:
        workers: dict[int, int] = {}
        try:
            for line in running.stderr:
                if "[train]" in line:
                    break
            workers = ranks(running.pid)
            os.kill(workers[1], signal.SIGKILL)
            said = running.communicate(timeout=300)[1]
        finally:
            for pid in (running.pid, *workers.values()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert running.returncode != 0
    assert "Signal 9 (SIGKILL)" in said
    assert not any(alive(pid) for pid in workers.values())
    assert hp.RunRecord.load(out / "record.json").status == "running"


def ranks(launcher: int) -> dict[int, int]:
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        lines = Path(f"/proc/{child}/environ").read_text().split("\0")
        variables = dict(line.partition("=")[::2] for line in lines)
        found[int(variables["RANK"])] = int(child)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_the_loss_of_the_first_process_is_told_in_words(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.together(2, "alone_meet", tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    said = (tmp_path / "told").read_text()
    # It may end before the second one has met it.
    assert re.match(
        "the (first process|other processes): must be reachable and answer within", said
    )
    assert said.endswith("Look for the first error among the processes' outputs.")


def start(monkeypatch: pytest.MonkeyPatch, **more: str) -> dict[str, str]:
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    for name, value in {**variables, **more}.items():
        monkeypatch.setenv(name, value)
    return variables


def test_a_started_process_looks_like_a_process_of_its_own(monkeypatch):
    """The Trainer would else wait for processes that do not train."""
    assert launched() is None
    variables = start(monkeypatch)
    assert launched() == Launch(1, 2, variables)
    assert not variables.keys() & os.environ.keys()
    assert launched() is None


def test_engines_that_split_the_model_are_refused(monkeypatch):
    start(monkeypatch, ACCELERATE_USE_FSDP="true")
    with pytest.raises(InvalidValue, match="ACCELERATE_USE_FSDP"):
        launched()


def test_other_commands_are_started_once(monkeypatch, tmp_path):
    start(monkeypatch)
    done = CliRunner().invoke(app, ["sweep", "digits-vit", "--out", str(tmp_path / "sweep")])
    assert done.exit_code == 2
    assert "headprune sweep: must be started once, got 2 processes" in done.stderr
    assert not (tmp_path / "sweep").exists()
