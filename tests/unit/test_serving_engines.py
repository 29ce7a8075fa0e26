"""Cut models in serving engines, each in an environment of its own; and how answers are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import benchmark
from tests.serving_environments import FOLDER, STORIES, python_of

SERVING = benchmark("serving")


@pytest.mark.long
@pytest.mark.parametrize("engine", SERVING.ENGINES)
def test_engines_answer_as_the_record_says(engine: str, tmp_path: Path) -> None:
    python_of(SERVING, SERVING.ENGINES[engine])
    out = tmp_path / "serving.json"
    data = ["--data", STORIES] if STORIES else []
    SERVING.main(["--work", FOLDER, "--only", engine, "--out", str(out), *data])
    record = json.loads((SERVING.RECORDS / "serving.json").read_text())
    new = json.loads(out.read_text())
    assert new["rows"]
    keys = ("engine", "model", "cut", "dtype")
    for part in ("rows", "families"):
        found = {tuple(row[key] for key in keys): row for row in new[part]}
        for row in record[part]:
            again = found.get(tuple(row[key] for key in keys))
            if again is None or not SERVING.is_equal(row):
                continue  # another engine, or stories that are not here
            # Another machine rounds otherwise.
            assert again.get("equal_tokens") == row["tokens"], again
            assert again["difference"] <= 3 * SERVING.TOLERANCE, again


def answer(tokens: list[list[int]], shift: float = 0.0) -> Any:
    zeros = SERVING.np.zeros((len(tokens), SERVING.STEPS, 3))
    return {"tokens": tokens, "logprobs": zeros + shift}


def test_what_counts_as_equal() -> None:
    tokens = list(range(SERVING.STEPS))
    expected = [(tokens, SERVING.np.zeros((SERVING.STEPS, 3)))] * 2
    assert SERVING.is_equal(SERVING.compared(answer([tokens, tokens], 5e-5), expected))
    assert not SERVING.is_equal(SERVING.compared(answer([tokens, tokens], 5e-4), expected))
    other = [*tokens[:4], 99, *tokens[5:]]
    row = SERVING.compared(answer([tokens, other]), expected)
    assert (row["equal_tokens"], row["tokens"]) == (SERVING.STEPS + 4, 2 * SERVING.STEPS)
    assert not SERVING.is_equal(row)
    assert not SERVING.is_equal({"refused": "no"})


def test_an_environment_that_pip_cannot_fill_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], check: bool) -> None:
        python = tmp_path / "vllm" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()
        if "pip" in command:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(SERVING.subprocess, "run", run)
    with pytest.raises(subprocess.CalledProcessError):
        SERVING.environment(tmp_path, "vllm")
    assert not (tmp_path / "vllm").exists()


def test_an_engine_that_crashes_costs_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()

    def run(command: list[str], **_: Any) -> None:
        if command[-1] != command[3]:  # both folders: it dies at the first
            return
        (Path(command[-1]) / "vllm.npz").touch()

    monkeypatch.setattr(SERVING.subprocess, "run", run)
    SERVING.run(Path(sys.executable), "vllm", folders)
    assert (folders[0] / "vllm.error").read_text() == "the process ended without an answer"
    assert (folders[1] / "vllm.npz").is_file()
