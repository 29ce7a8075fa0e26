"""benchmarks/translation.py: its rows are what cut translators do, a run goes on, and the page says
the record."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headprune as hp
from tests.scripts import WORDS, benchmark

pytest.importorskip("sacrebleu")


@pytest.fixture(scope="module")
def translation() -> ModuleType:
    return benchmark("translation")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Sentences of a language whose translation says every word in capitals, and a Transformer of
    two tiny towers."""
    folder = tmp_path_factory.mktemp("translation")
    draw = random.Random(0)
    for split, count in (("train", 60), ("validation", 8), ("test", 12)):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(count)]
        rows = [{"en": text, "de": text.upper()} for text in texts]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = ["encoder_layers=1", "decoder_layers=1", "d_model=32", "num_attention_heads=4"]
    settings = [f"model.config.{size}" for size in sizes]
    settings += [
        "data.vocabulary=300",
        "data.calibration=24",
        "decode.max_length=8",
        "train.epochs=2",
    ]
    return ["--data", str(folder), "--work", str(folder / "work"), "--small", "--set", *settings]


def test_rows_and_a_run_that_goes_on(
    translation: ModuleType, given: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "translation-small-cpu.json"
    few = [*given, "--out", str(out), "--ways", "cut", "refitted"]
    record = json.loads(translation.main([*few, "--parts", "cross"]).read_text())
    assert record["heads"] == {"self": 4, "causal": 4, "cross": 4}
    assert [(row["kept"], row["way"]) for row in record["rows"]] == [
        (kept, way) for kept in (3, 2, 1) for way in ("cut", "refitted")
    ]
    more = json.loads(
        translation.main([*given, "--out", str(out), "--parts", "all", "cross"]).read_text()
    )
    assert more["rows"][:6] == record["rows"]
    ways = {(row["part"], row["kept"], row["way"]): row for row in more["rows"]}
    assert set(ways) == {
        *(("all", 12, way) for way in translation.TRAINED),
        *(("all", kept, way) for kept in (9, 6, 4) for way in translation.WAYS),
        *(("cross", kept, way) for kept in (3, 2, 1) for way in translation.WAYS),
    }
    assert record["ways"]["distilled"][1]["distill"] == 1.0  # the recipe's own

    # The same by other code: two heads between encoder and decoder go, nothing else.
    args = translation.arguments(given)
    settings = [*translation.SMALL, f"data.path={args.data}", "device=cpu", *args.set]
    recipe = translation.load_recipe(translation.locate("translation"), settings)
    base = translation.ready_base(recipe, args.work, print)
    subject = translation.open_base(base, args.work, recipe)
    scores = hp.score(
        subject.model, subject.data.redrawn(24, 0).batches("calibration", 32), "taylor"
    ).of("cross")
    cut = copy.deepcopy(subject.model)
    best = sorted(scores.units(), key=lambda unit: -unit.value)[:2]
    keep = {site.name: range(4) for site in hp.find_sites(cut)} | {
        best[0].name: [unit.heads[0] for unit in best]
    }
    hp.prune_(cut, hp.HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
    assert {site.kind: len(site.heads) for site in hp.find_sites(cut)} == {
        "self": 4,
        "causal": 4,
        "cross": 2,
    }
    found = subject.measure(cut, "cut", 2, "test")
    row = ways["cross", 2, "cut"]["test"]
    assert row["bleu"] == pytest.approx(found.value)
    assert row["drop"] == pytest.approx(record["base"]["test"] - found.value)
    assert row["low"] <= row["drop"] <= row["high"]

    with pytest.raises(SystemExit, match="give another --out"):
        translation.main([*few[:-3], "--set", *args.set, "train.epochs=1"])
    translation.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    text = (tmp_path / translation.PAGE).read_text()
    points = "{:+.2f} [{:+.2f}, {:+.2f}]".format(
        *(0 - 100 * row[name] for name in ("drop", "high", "low"))
    )
    assert f"| between them | 2 of 4 | {100 * row['bleu']:.2f} ({points})" in text
    assert "12 heads; whole:" in text
    assert "All heads, trained on as long, nothing refitted: " in text
    assert "- *distilled*: `lstsq` (" in text
    assert (
        "35 BLEU or more before any cut aimed at, has not been run yet.\n\nOn a GPU: no GPU record"
        " yet.\n" in text
    )
    draws = [
        {"test": {"bleu": b, "drop": d, "low": d - 0.02, "high": d + 0.01}}
        for b, d in ((0.3, 0.01), (0.32, -0.01))
    ]
    assert translation.cell(draws) == "31.00 ± 1.41 (+0.00 [-2.00, +3.00])"
    on_gpu = {**record, "size": "full", "hardware": {"device": "cuda", "gpu": "a GPU"}}
    text = translation.page([record, on_gpu])
    assert f"aimed at, reached {100 * record['base']['test']:.2f}.\n" in text
    assert "no GPU record yet" not in text


def test_no_row_is_begun_when_the_training_took_the_time(
    translation: ModuleType, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, real = [0.0], translation.open_base

    def slow(*some: Any) -> Any:
        now[0] += 61
        return real(*some)

    monkeypatch.setattr(translation, "open_base", slow)
    monkeypatch.setattr(translation.studies, "perf_counter", lambda: now[0])
    few = [
        *given,
        "--out",
        str(tmp_path / "translation-small-cpu.json"),
        "--ways",
        "cut",
        "--parts",
        "cross",
    ]
    assert not translation.main([*few, "--minutes", "1"]).is_file()
    assert len(json.loads(translation.main([*few, "--minutes", "2"]).read_text())["rows"]) == 3


def test_missing_arguments_are_named(
    translation: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        translation.main(["--data", "x"])
    assert "--data and --work must be given, or --figure" in capsys.readouterr().err
