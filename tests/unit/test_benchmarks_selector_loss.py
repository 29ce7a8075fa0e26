"""benchmarks/selector_loss.py: its losses are those of masked models, a run goes on, and
differences are paired."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import headprune as hp
from headprune.bench.quality import evaluate
from tests.scripts import WORDS, benchmark, tiny_encoder


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return benchmark("selector_loss")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Pairs of sentences with a grade, a tiny encoder, and the arguments about them."""
    folder = tmp_path_factory.mktemp("selectors")
    draw = random.Random(0)
    for split, count in (("train", 40), ("validation", 20), ("test", 20)):
        pairs = [
            [" ".join(draw.choices(WORDS, k=draw.randint(3, 7))) for _ in range(2)]
            for _ in range(count)
        ]
        rows = [{"sentence1": a, "sentence2": b, "score": draw.uniform(0, 5)} for a, b in pairs]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    where = [
        "--task",
        "stsb",
        "--data",
        str(folder),
        "--work",
        str(folder),
        "--model",
        str(tiny_encoder(folder)),
    ]
    return [*where, "--calibration", "24"]


def test_rows_and_a_run_that_goes_on(study: ModuleType, given: list[str], tmp_path: Path) -> None:
    out = tmp_path / "selector-loss-stsb.json"
    few = [*given, "--budgets", "5", "--out", str(out)]
    record = json.loads(study.main([*few, "--seeds", "1"]).read_text())
    assert [(row["scorer"], row["selector"]) for row in record["rows"]] == list(study.PAIRS)
    args = study.arguments(few)
    task = study.encoder_task("stsb", args.data, args.model, args.work, 24)
    scores = hp.score(task.model, task.calibration(0), "fisher", loss=task.loss)
    with hp.gated(task.model, hp.select(scores, hp.Budget(keep_heads=5), "quadratic")):
        expected = evaluate(task.model, task.judged["validation"], task.loss)
    row = record["rows"][1]
    assert row["loss"] == pytest.approx(expected.loss)
    assert row["losses"] == pytest.approx(expected.losses, abs=1e-5)
    assert "swaps" in " ".join(record["rows"][3]["notes"])

    more = json.loads(study.main([*few, "--seeds", "2"]).read_text())
    assert more["rows"][:5] == record["rows"]
    assert [row["seed"] for row in more["rows"]] == [0] * 5 + [1] * 5
    with pytest.raises(SystemExit, match="give another --out"):
        study.main([*few[:-4], "--calibration", "25", "--out", str(out)])

    study.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    text = (tmp_path / study.PAGE).read_text()
    assert f"All 8 heads: {record['judged']['loss']:.4f}. 24 calibration rows." in text
    loss = {
        (r["selector"], r["seed"]): np.mean(r["losses"])
        for r in more["rows"]
        if r["scorer"] == "fisher"
    }
    gain = np.mean([loss["quadratic", seed] - loss["global_topk", seed] for seed in (0, 1)])
    assert f"| {gain:+.4f} [" in text


def test_a_difference_is_paired(study: ModuleType) -> None:
    chance = np.random.default_rng(0)
    plain = {seed: chance.random(300).tolist() for seed in (0, 1)}
    better = {seed: [loss - 0.1 for loss in losses] for seed, losses in plain.items()}
    assert study.difference(better, plain) == "-0.1000 [-0.1000, -0.1000]"
    assert study.difference(better, {2: plain[0]}) == "-"
