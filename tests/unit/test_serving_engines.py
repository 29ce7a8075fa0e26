"""Cut models in serving engines, each in an environment of its own; and how answers are compared."""

import json

import pytest

from tests.scripts import benchmark
from tests.serving_environments import FOLDER, STORIES, python_of

SERVING = benchmark("serving")


@pytest.mark.long
@pytest.mark.parametrize("engine", SERVING.ENGINES)
def test_engines_answer_as_the_record_says(engine, tmp_path):
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


def answer(tokens, shift=0.0):
    zeros = SERVING.np.zeros((len(tokens), SERVING.STEPS, 3))
    return {"tokens": tokens, "logprobs": zeros + shift}


def test_what_counts_as_equal():
    tokens = list(range(SERVING.STEPS))
    expected = [(tokens, SERVING.np.zeros((SERVING.STEPS, 3)))] * 2
    assert SERVING.is_equal(SERVING.compared(answer([tokens, tokens], 5e-5), expected))
    assert not SERVING.is_equal(SERVING.compared(answer([tokens, tokens], 5e-4), expected))
    other = [*tokens[:4], 99, *tokens[5:]]
    row = SERVING.compared(answer([tokens, other]), expected)
    assert (row["equal_tokens"], row["tokens"]) == (SERVING.STEPS + 4, 2 * SERVING.STEPS)
    assert not SERVING.is_equal(row)
    assert not SERVING.is_equal({"refused": "no"})
