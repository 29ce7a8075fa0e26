"""What commands print, letter by letter, on a terminal and without one: ``tests/cli/golden``.

``NAME.txt`` is what goes into a pipe. Where a terminal shows more, ``NAME.terminal.txt`` has its
colours and tables, and ``NAME.no-color.txt`` what is left of them under ``NO_COLOR``; everywhere
else a terminal shows what a pipe gets.

After a change that is meant: ``HEADPRUNE_GOLDEN=write pytest tests/cli/test_golden.py``, and read
the difference.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import headprune as hp
from headprune.cli.inspect import _inspect
from headprune.core.codec import FrozenDict
from headprune.core.display import clean
from headprune.core.record import QualityRow, RunRecord, SpeedRow
from headprune.core.scores import Cost, CostTable, ModelFingerprint
from headprune.layouts import registry
from tests.command_line import call
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
    "agree": ["agree", "run/scores.json", "fisher.json"],
    "scores": ["run/scores.json"],
    "record": ["run/record.json"],
    "inspect": ["sites.json"],
}
_SHOW = """
import sys
from headprune.cli._shared import show
from headprune.core.{0} import {1}
show({1}.load(sys.argv[1]))
"""
#: What prints as a command does, without the work before it, which takes torch and seconds.
PRINTERS = {
    "scores": _SHOW.format("scores", "HeadScores"),
    "record": _SHOW.format("record", "RunRecord"),
    "inspect": (
        "import json, sys; from headprune.cli.inspect import _print;"
        " _print(json.load(open(sys.argv[1])))"
    ),
}
#: What a terminal shows in colours and tables.
COLOURED = {"agree", "explain", "scores", "record", "inspect"}
PLACES = [(name, "pipe") for name in COMMANDS]
PLACES += [(name, place) for name in sorted(COLOURED) for place in ("terminal", "no-color")]
PLACES += [("alone", "terminal"), ("misspelt", "terminal")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs on paper: plans, scores and records with figures that nobody measured."""
    home = tmp_path_factory.mktemp("golden")
    model = ModelFingerprint("structure", "weights")
    sites = tuple(
        hp.AttentionSite(f"layer.{i}", "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3)) for i in range(2)
    )
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
        plan = hp.PruningPlan(
            mask, hp.Budget(keep_heads=mask.n_kept), "global_topk", scorer="taylor", model=model
        )
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
    other = ((0.3, 0.2, 0.9, 0.1), (0.25, 0.05, 0.4, 0.6))
    replace(scores, values=other, standard_errors=None, scorer="fisher").save(home / "fisher.json")
    model, _ = registry.get("llama").tiny(0, "llama")
    (home / "sites.json").write_text(json.dumps(_inspect(model, "group")))
    return home


def said(folder, name, place):
    """Everything that a command writes, and its exit status."""
    own = {"COLUMNS": "120", "TERM": "xterm-256color", "COLORTERM": "", "PYTHONUTF8": "1"}
    own |= {"NO_COLOR": "1"} if place == "no-color" else {}
    unset = ("NO_COLOR", "FORCE_COLOR")
    command = COMMANDS[name]
    if place == "pipe" and name not in PRINTERS:
        result = call("", *command, env={**dict.fromkeys(unset), **own})
        return f"{result.stdout}{result.stderr}exit status {result.exit_code}\n"
    around = {key: value for key, value in os.environ.items() if key not in unset}
    program = [sys.executable, "-c", PRINTERS[name]] if name in PRINTERS else HEADPRUNE
    if place != "pipe":
        text, status = on_terminal(command, folder, program, around, **own)
        return f"{text}exit status {status}\n"
    done = subprocess.run(
        [*program, *command], cwd=folder, env={**around, **own},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return f"{done.stdout}{done.stderr}exit status {done.returncode}\n"


def golden(name, place):
    return GOLDEN / (
        f"{name}.txt" if place == "pipe" or name not in COLOURED else f"{name}.{place}.txt"
    )


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_command_prints_what_it_printed(name, place, folder, monkeypatch):
    monkeypatch.chdir(folder)
    text, path = said(folder, name, place), golden(name, place)
    if os.environ.get("HEADPRUNE_GOLDEN") == "write" and (place == "pipe" or name in COLOURED):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_every_golden_file_is_of_a_command():
    assert {*GOLDEN.iterdir()} == {golden(name, place) for name, place in PLACES}


@pytest.mark.parametrize("name", sorted(COLOURED))
def test_colours_are_for_terminals_and_nothing_is_said_by_them_alone(name):
    pipe, coloured, plain = (
        golden(name, place).read_text() for place in ("pipe", "terminal", "no-color")
    )
    assert "\x1b[" not in pipe
    assert "\x1b[" in coloured
    settings = {
        int(code) for found in re.findall(r"\x1b\[([\d;]+)m", plain) for code in found.split(";")
    }
    assert settings <= {0, 1, 3}, "bold and italics alone are no colours"
    assert clean(plain) == clean(coloured)
    words, shown = (set(re.findall(r"\w[\w.]*|[▁-█]", text)) for text in (pipe, clean(coloured)))
    assert words - shown <= {"x"}, "a table has columns for batch x tokens"
