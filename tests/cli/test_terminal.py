"""A terminal and a shell: progress while one waits, colour, nothing of either in a pipe, and words
that a shell completes."""

import os
import re
import subprocess
import sys

import pytest

from headprune.cli.bench import bench
from headprune.run import shipped_recipes
from tests.command_line import done
from tests.terminals import on_terminal, read_all, terminal
from tests.tiny_models import bert

BAR = re.compile(r"latency: .*1/2 \[\d\d:\d\d<\d\d:\d\d, ")
#: As a shell starts it; nothing that it offers is worth waiting for torch.
SHELL = (
    "import atexit, sys; sys.argv = ['headprune']\n"
    "atexit.register(lambda: 'torch' in sys.modules and print('torch'))\n"
    "from headprune.cli.main import main; main()"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(bert(tmp_path_factory.mktemp("bert"), num_hidden_layers=1))


@pytest.mark.parametrize("quiet", [False, True])
def test_bench_shows_how_long_it_takes_on_a_terminal(model, quiet, monkeypatch, capsys):
    parent, child = terminal()
    asked = {"batch": [1, 2], "length": [4], "seconds": 0.2, "device": "cpu", "quiet": quiet}
    with os.fdopen(child, "w") as errors, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", errors)
        bench(model, model, **asked)
    said = read_all(parent)
    assert bool(BAR.search(said)) is not quiet, said
    assert ("timing 2 sizes" in said) is not quiet
    assert "batch 2 x 4" in capsys.readouterr().out


def test_nothing_is_drawn_into_a_pipe(model):
    timed = f"bench {model} {model} --batch 1 --length 4 --seconds 0.01"
    assert done(timed).stderr == "timing 1 sizes, 0.01 s each or longer\n"
    assert done(f"{timed} --quiet").stderr == ""


def test_help_is_coloured_on_terminals_that_want_it():
    usual = {"TERM": "xterm-256color", "COLUMNS": "100"}
    coloured, status = on_terminal(["--help"], **usual)
    assert status == 0, coloured
    assert "\x1b[" in coloured
    plain, _ = on_terminal(["--help"], NO_COLOR="1", **usual)
    assert "\x1b[3" not in plain  # no colour; bold is none


def recipes(start):
    return [name for name in shipped_recipes() if name.startswith(start)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("headprune run dig", recipes("dig")),
        (
            "headprune score digits-vit --set score.scorer=tay",
            ["score.scorer=taylor", "score.scorer=taylor2"],
        ),
        ("headprune sweep digits-vit --grid scorer=tay", ["scorer=taylor", "scorer=taylor2"]),
        ("headprune prune --selector kn", ["knapsack"]),
        ("headprune expl", ["explain"]),
    ],
)
def test_a_shell_completes(words, expected):
    assert expected
    place = str(len(words.split()) - 1)
    asked = {"_HEADPRUNE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    command = [sys.executable, "-c", SHELL]
    environment = {**os.environ, **asked}
    offered = subprocess.check_output(command, env=environment, text=True, timeout=60)
    assert offered.split() == expected
