"""Cut models in vLLM and llama.cpp, where ``HEADPRUNE_SERVING`` names their environments' folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.scripts import benchmark

SERVING = benchmark("serving")
FOLDER = os.environ.get("HEADPRUNE_SERVING", "")


@pytest.mark.long
@pytest.mark.skipif(not FOLDER, reason="HEADPRUNE_SERVING names no folder of environments")
@pytest.mark.parametrize("engine", SERVING.ENVIRONMENTS)
def test_engines_answer_as_the_record_says(engine: str, tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    SERVING.main(["--work", FOLDER, "--only", engine, "--out", str(out)])
    known = {}
    for row in json.loads((SERVING.RECORDS / "serving.json").read_text())["rows"]:
        known[row["engine"], row["model"], row["cut"], row["dtype"]] = row
    for row in json.loads(out.read_text())["rows"]:
        recorded = known[row["engine"], row["model"], row["cut"], row["dtype"]]
        assert SERVING.is_equal(row) or not SERVING.is_equal(recorded), row


def test_what_counts_as_equal() -> None:
    tokens, logprobs = list(range(SERVING.STEPS)), SERVING.np.zeros((SERVING.STEPS, 3))
    row = SERVING.compared({"tokens": tokens, "logprobs": logprobs + 5e-5}, tokens, logprobs)
    assert SERVING.is_equal(row)
    off = SERVING.compared({"tokens": tokens, "logprobs": logprobs + 5e-4}, tokens, logprobs)
    assert not SERVING.is_equal(off)
    other = [*tokens[:4], 99, *tokens[5:]]
    row = SERVING.compared({"tokens": other, "logprobs": logprobs}, tokens, logprobs)
    assert row["equal_tokens"] == 4
    assert not SERVING.is_equal(row)
    assert not SERVING.is_equal({"refused": "no"})
