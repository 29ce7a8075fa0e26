"""A terminal and a shell: progress while one waits, nothing of it in a pipe, and words that a shell
completes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headprune.cli.bench import bench
from headprune.cli.main import app
from headprune.run import shipped_recipes
from tests.terminals import read_all, terminal

BAR = re.compile(r"latency: .*1/2 \[\d\d:\d\d<\d\d:\d\d, ")
#: As a shell starts it; nothing that it offers is worth waiting for torch.
SHELL = (
    "import atexit, sys; sys.argv = ['headprune']\n"
    "atexit.register(lambda: 'torch' in sys.modules and print('torch'))\n"
    "from headprune.cli.main import main; main()"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForSequenceClassification(BertConfig(vocab_size=30, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("quiet", [False, True])
def test_bench_shows_how_long_it_takes_on_a_terminal(
    model: Path, quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parent, child = terminal()
    with os.fdopen(child, "w") as errors, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", errors)
        bench(
            str(model), str(model), batch=[1, 2], length=[4], seconds=0.2, device="cpu", quiet=quiet
        )
    said = read_all(parent)
    assert bool(BAR.search(said)) is not quiet, said
    assert ("timing 2 sizes" in said) is not quiet
    assert "batch 2 x 4" in capsys.readouterr().out


def test_nothing_is_drawn_into_a_pipe(model: Path) -> None:
    timed = ["bench", str(model), str(model), "--batch", "1", "--length", "4", "--seconds", "0.01"]
    result = CliRunner().invoke(app, timed)
    assert result.exit_code == 0, result.output
    assert result.stderr == "timing 1 sizes, 0.01 s each or longer\n"
    assert CliRunner().invoke(app, [*timed, "--quiet"]).stderr == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("headprune run dig", [name for name in shipped_recipes() if name.startswith("dig")]),
        (
            "headprune validate llama",
            [name for name in shipped_recipes() if name.startswith("llama")],
        ),
        (
            "headprune score digits-vit --set score.scorer=tay",
            ["score.scorer=taylor", "score.scorer=taylor2"],
        ),
        ("headprune sweep digits-vit --grid scorer=tay", ["scorer=taylor", "scorer=taylor2"]),
        ("headprune prune --selector kn", ["knapsack"]),
        ("headprune expl", ["explain"]),
    ],
)
def test_a_shell_completes(words: str, expected: list[str]) -> None:
    assert expected
    asked = {
        "_HEADPRUNE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    command = [sys.executable, "-c", SHELL]
    done = subprocess.run(
        command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == expected
