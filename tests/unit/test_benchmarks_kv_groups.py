"""benchmarks/kv_groups.py: its rows are what cut models do, a run goes on, and the page says the
record."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.scripts import benchmark


@pytest.fixture(scope="module")
def kv_groups() -> ModuleType:
    return benchmark("kv_groups")


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with grouped queries, and token numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("stories")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, num_attention_heads=8, num_key_value_heads=4, pad_token_id=None, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    draw = random.Random(0)
    rows = [{"input_ids": [1, *draw.choices(range(3, 40), k=12)]} for _ in range(380)]
    (folder / "stories.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_rows_and_page(kv_groups: ModuleType, stories: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    out = tmp_path / "kv-groups-stories.json"
    given = [
        "--model",
        str(stories),
        "--keep",
        "0.5",
        "--seeds",
        "1",
        "--steps",
        "3",
        "--out",
        str(out),
    ]
    record = json.loads(kv_groups.main([*given, "--scorers", "surgeon"]).read_text())
    assert record["groups"] == 8
    ways = {row["way"]: row for row in record["rows"] if row["scorer"] == "surgeon"}
    assert tuple(ways) == kv_groups.WAYS
    assert all(sum(row["groups"]) == 4 for row in ways.values())
    assert (
        ways["lstsq+ff"]["perplexity"] != ways["cut"]["perplexity"] != ways["trained"]["perplexity"]
    )
    # The same number by other code: perplexity of the uncut model over the last rows.
    model = LlamaForCausalLM.from_pretrained(stories).eval()
    lines = (stories / "stories.jsonl").read_text().splitlines()
    ids = torch.tensor([json.loads(line)["input_ids"] for line in lines])
    with torch.no_grad():
        every = math.exp(float(model(input_ids=ids, labels=ids).loss))
    assert record["base"] == pytest.approx(every, rel=0.02)  # the test rows are a draw of all

    more = json.loads(kv_groups.main([*given, "--scorers", "surgeon", "random"]).read_text())
    assert more["rows"][: len(record["rows"])] == record["rows"]
    assert len(more["rows"]) == len(record["rows"]) + len(kv_groups.WAYS)

    two = [
        "--keep",
        "0.5",
        "--scorers",
        "random",
        "--seeds",
        "2",
        "--steps",
        "3",
        "--out",
        str(out),
    ]
    last = json.loads(kv_groups.main(["--model", str(stories), *two]).read_text())
    dense = [row["perplexity"] for row in last["rows"] if row["scorer"] == "dense"]
    assert len(dense) == 2
    assert dense[0] != dense[1], "a seed is another order of training rows"
    with pytest.raises(SystemExit, match="give another --out"):
        kv_groups.main([*given, "--steps", "4"])
    text = kv_groups.main(
        ["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)]
    ).read_text()
    assert f"\n{record['hardware']['processor']}, " in text
    cells = " | ".join(f"{ways[way]['perplexity']:.3f}" for way in kv_groups.WAYS)
    assert f"| surgeon | 50% | {cells} |" in text
