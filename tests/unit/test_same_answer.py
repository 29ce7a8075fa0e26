"""The same recipe gives the same bytes in another process, and the same plan on another number of
threads."""

import os
import subprocess
import sys

import pytest
import yaml

from headprune.core.plan import PruningPlan
from headprune.core.record import RunRecord
from tests.scripts import ROOT
from tests.tiny_recipe import TINY

pytestmark = pytest.mark.slow  # three processes that import Transformers

#: What is stored of a run, without what was timed.
FILES = [
    "scores.json",
    "scores.samples.safetensors",
    "scores-magnitude.json",
    "plan.json",
    "rows.json",
    "recipe.yaml",
    "attention.json",
    "model/model.safetensors",
    "base/model.safetensors",
    "untimed.json",
    "report.html",
    "report.md",
]

#: Runs the recipe, and draws the report again from the record without what was timed.
SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path

from headprune.core.codec import EMPTY, FrozenDict
from headprune.run import run_recipe
from headprune.run.reporting import report_run

def untimed(data):
    if isinstance(data, dict) or hasattr(data, "items"):
        return {k: untimed(v) for k, v in data.items() if "second" not in k}
    return [untimed(v) for v in data] if isinstance(data, tuple) else data

record = run_recipe("tiny.yaml", sys.argv[1:], out="run", say=lambda line: None, progress=False)
metrics = FrozenDict(untimed(record.metrics))
record = replace(record, created="", timings=EMPTY, speed=(), metrics=metrics)
record.save("run/untimed.json")
report_run(record, Path("run"))
"""


def begin(folder, seed, *settings):
    """Begins a process of its own, which writes a run into the folder."""
    folder.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
    model = {**TINY["model"], "config": {**TINY["model"]["config"], **sizes}}
    more = {"bench": {"seconds": 0.01}, "recover": [{"method": "mean_fold"}]}
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**TINY, "model": model, **more}))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    own |= {"OMP_NUM_THREADS": "2"} if settings else {}
    command = [sys.executable, "-c", SCRIPT, *settings]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=own, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One thread under two hash seeds, and two threads."""
    home = tmp_path_factory.mktemp("same")
    begun = {
        home / "a": begin(home / "a", "0"),
        home / "b": begin(home / "b", "4711"),
        home / "c": begin(home / "c", "1", "threads=2"),
    }
    for process in begun.values():
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return [folder / "run" for folder in begun]


def test_files_are_the_same_bytes_in_every_process_but_for_what_was_timed(runs):
    for name in FILES:
        first, second = ((folder / name).read_bytes() for folder in runs[:2])
        assert first == second, name
    assert b"<svg" in (runs[0] / "report.html").read_bytes()


def test_one_thread_and_two_give_the_same_plan(runs):
    """Their sums are in another order, so weights and scores differ in last digits."""
    one, two = (PruningPlan.load(folder / "plan.json") for folder in runs[1:])
    assert one.mask == two.mask
    assert 0 < one.mask.n_kept < one.mask.n_heads
    records = [RunRecord.load(folder / "record.json") for folder in runs]
    # The record says where another answer may come from.
    assert [record.hardware["threads"] for record in records] == [1, 1, 2]
    about = {"processor", "instructions", "cores", "device", "system"}
    assert about <= set(records[0].hardware)
    assert records[0].hardware["instructions"]
    assert {"python", "torch", "transformers", "numpy"} <= set(records[0].versions)
