"""benchmarks/pipelines.py: rows are what cut models do, runs go on, intervals and pages are
right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import headprune as hp
from tests.scripts import WORDS, benchmark, tiny_encoder


@pytest.fixture(scope="module")
def pipelines() -> ModuleType:
    return benchmark("pipelines")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose grade is the share of common words; the same first sentences as questions."""
    made = tmp_path_factory.mktemp("pipelines")
    tiny_encoder(made)
    drawing = random.Random(0)
    for task in ("stsb", "trec"):
        (made / task).mkdir()
        for split, count in (("train", 60), ("validation", 20), ("test", 30)):
            rows = []
            for _ in range(count):
                first, second = (drawing.choices(WORDS, k=drawing.randint(3, 7)) for _ in range(2))
                second[: drawing.randint(0, 3)] = first[: drawing.randint(0, 3)]
                pair = {"sentence1": " ".join(first), "sentence2": " ".join(second or first)}
                grade = 5 * len({*first} & {*second}) / len({*first, *second})
                question = {"text": " ".join(first), "label": WORDS.index(first[0]) % 3}
                rows.append({**pair, "score": grade} if task == "stsb" else question)
            (made / task / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


def given(folder: Path, task: str, out: Path, *more: str) -> list[str]:
    where = [
        "--task",
        task,
        "--data",
        str(folder / task),
        "--work",
        str(folder),
        "--model",
        str(folder / "model"),
    ]
    return [
        *where,
        "--budgets",
        "5",
        "3",
        "--seeds",
        "1",
        "--calibration",
        "24",
        "--out",
        str(out),
        *more,
    ]


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_rows_of_sentence_pairs(pipelines: ModuleType, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    out = tmp_path / "pipelines-stsb.json"
    names = ["taylor", "surgeon", "quadratic", "iterative-refit", "kwon2022", "flap2024"]
    record = load(pipelines.main(given(folder, "stsb", out, "--pipelines", *names)))
    assert len(record["rows"]) == 2 * (5 + 3 + 2 + 1 + 1 + 1)
    assert record["heads"] == 8
    row = next(
        r
        for r in record["rows"]
        if (r["pipeline"], r["recovery"], r["kept"]) == ("taylor", "none", 3)
    )
    assert sum(map(len, row["heads"].values())) == 3
    # The same number, from the sites that stayed, by other code.
    encoder, tokenizer = (
        kind.from_pretrained(folder / "model") for kind in (AutoModel, AutoTokenizer)
    )
    keep = {site.removeprefix("encoder."): heads for site, heads in row["heads"].items()}
    hp.prune_(encoder, hp.HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
    rows = [json.loads(line) for line in (folder / "stsb" / "test.jsonl").read_text().splitlines()]
    cosines = []
    with torch.no_grad():
        for pair in rows:
            ids = [
                tokenizer(pair[k], return_tensors="pt")["input_ids"]
                for k in ("sentence1", "sentence2")
            ]
            a, b = (encoder(input_ids=i).last_hidden_state.mean(1) for i in ids)
            cosines.append(float(torch.cosine_similarity(a, b)))
    assert row["test"] == pytest.approx(
        spearmanr(cosines, [r["score"] for r in rows]).statistic, abs=2e-3
    )


def test_a_run_goes_on_and_compares(
    pipelines: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pipelines-trec.json"
    few = given(folder, "trec", out, "--pipelines", "taylor", "--recoveries", "none")
    before = load(pipelines.main(few))["rows"]
    assert [(r["recovery"], r["kept"]) for r in before] == [("none", 5), ("none", 3)]
    compared = ["--references", "taylor/lstsq", "--against", "taylor/none"]
    more = given(
        folder, "trec", out, "--pipelines", "taylor", *compared, "--recoveries", "none", "lstsq"
    )
    record = load(pipelines.main(more))
    assert record["rows"][:2] == before
    assert len(record["rows"]) == 4
    assert [(line["pipeline"], line["kept"]) for line in record["compared"]] == [
        ("taylor/none", 5),
        ("taylor/none", 3),
    ]
    values = {(r["recovery"], r["kept"]): r["test"] for r in record["rows"]}
    for line in record["compared"]:
        found = line["test"]
        expected = values["none", line["kept"]] - values["lstsq", line["kept"]]
        assert found["difference"] == pytest.approx(expected, abs=2e-5)
        assert found["low"] <= found["difference"] <= found["high"]
    with pytest.raises(SystemExit, match="give another --out"):
        pipelines.main([*more, "--calibration", "25"])
    pipelines.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    text = (tmp_path / pipelines.PAGE).read_text()
    assert f"| taylor/none | {values['none', 5]:.3f} | {values['none', 3]:.3f} |" in text
    assert "taylor/lstsq" in (tmp_path / pipelines.PICTURE).read_text()


def test_a_model_that_was_judged_is_not_judged_again(
    pipelines: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pipelines-trec.json"
    made: list[Any] = []
    original = pipelines.recovered
    monkeypatch.setattr(pipelines, "recovered", lambda *a: (made.append(a[1]), original(*a))[1])
    given_now = [*given(folder, "trec", out, "--recoveries", "lstsq"), "--pipelines"]
    rows = load(pipelines.main([*given_now, "taylor", "taylor-min0"]))["rows"]
    by = {(r["pipeline"], r["kept"]): r for r in rows}
    assert len(by) == 4
    again = [
        kept for kept in (5, 3) if by["taylor", kept]["heads"] == by["taylor-min0", kept]["heads"]
    ]
    assert again, "no plan came up twice"
    assert len(made) == 4 - len(again)
    for kept in again:
        assert by["taylor-min0", kept]["as"] == "taylor/lstsq"
        assert by["taylor-min0", kept]["test"] == by["taylor", kept]["test"]
    (store,) = folder.glob("answers-trec-*-24-30")
    assert len(list(store.glob("taylor-min0.lstsq-*.npz"))) == 2
    compared = ["--references", "taylor/lstsq", "--against", "taylor-min0/lstsq"]
    pipelines.main([*given_now, "taylor", *compared])
    spoiled = store / "taylor.lstsq-5-0.npz"
    with np.load(spoiled) as file:
        answers = {split: 1 - values for split, values in file.items()}
    np.savez_compressed(spoiled, **answers)
    with pytest.raises(SystemExit, match="holds other answers than those of the record"):
        pipelines.main([*given_now, "taylor", *compared])


def test_the_readme_says_what_the_record_does(pipelines: ModuleType, tmp_path: Path) -> None:
    rows = [
        {
            "pipeline": name,
            "recovery": recovery,
            "kept": kept,
            "seed": seed,
            "validation": 0.1,
            "test": test + seed / 10,
        }
        for name, recovery, test in (
            ("surgeon", "lstsq+ff", 0.6),
            ("random", "none", 0.3),
            ("random-min0", "lstsq+ff", 0.5),
            ("taylor", "none", 0.4),
        )
        for kept in (36, 24)
        for seed in (0, 1)
    ]
    about = {
        "task": "sst2",
        "heads": 72,
        "calibration": 512,
        "judged": {"test": 7},
        "base": {"test": 0.9},
    }
    (tmp_path / "pipelines-sst2.json").write_text(json.dumps({**about, "rows": rows}))
    text = pipelines.readme(tmp_path)
    assert "512 sentences choose" in text
    assert "2 draws" in text
    assert "on 7 test rows; all 72 heads: 0.900." in text
    assert "then `lstsq` with the feed-forwards | 0.650 ± 0.071 | 0.650 ± 0.071 |" in text
    assert "| random heads, then the same `lstsq` (`min_heads=0`) | 0.550 ± 0.071 |" in text
    assert "| random heads, not refitted | 0.350 ± 0.071 |" in text
    assert "taylor" not in text
    assert "kwon" not in text


def test_an_interval_is_the_paired_one(pipelines: ModuleType) -> None:
    chance = np.random.default_rng(1)
    base = (chance.random(400) < 0.8).astype(np.float32)
    other = base.copy()
    other[:20] = 1 - other[:20]  # answers differ on 20 of 400 rows only
    task = type(
        "Task",
        (),
        {
            "quality": lambda self, a, split, rows=None: float(
                (a if rows is None else a[rows]).mean()
            )
        },
    )()
    found = pipelines.interval(task, "test", [(other, base)])
    difference = other - base
    expected = difference.std() / 20
    assert found["difference"] == pytest.approx(float(difference.mean()), abs=1e-5)
    assert (found["high"] - found["low"]) / 3.92 == pytest.approx(expected, rel=0.1)
