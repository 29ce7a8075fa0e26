"""Benchmark scripts run from end to end on models and data made here."""

from __future__ import annotations

import importlib
import itertools
import json
import random
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import headprune as hp
from tests.scripts import BENCHMARKS, WORDS, benchmark, tiny_encoder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tradeoff() -> ModuleType:
    return benchmark("tradeoff")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a tokenizer in ``model/``, and labelled questions."""
    folder = tmp_path_factory.mktemp("tradeoff")
    tiny_encoder(folder)
    draw = random.Random(0)
    for split, count in (("train", 60), ("validation", 12), ("test", 20)):
        rows = [{"text": " ".join(draw.choices(WORDS, k=6)), "label": i % 3} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


SMALL = [
    "--small",
    "--seconds",
    "0.01",
    "--calibration",
    "20",
    "--threads",
    "1",
    "--attention-lengths",
    "16",
]
GRID = [
    "--batch-sizes",
    "1",
    "7",
    "2",
    "--lengths",
    "8",
    "16",
    "--prompts",
    "16",
    "--new-tokens",
    "4",
]


@pytest.fixture(scope="module")
def ran(tradeoff: ModuleType, given: Path) -> tuple[list[str], dict[str, Any]]:
    """The arguments of a run, and its record."""
    where = [
        "--task",
        "trec",
        "--data",
        str(given),
        "--model",
        str(given / "model"),
        "--work",
        str(given / "work"),
    ]
    out = ["--out", str(given / "tradeoff-trec-cpu.json")]
    parts = ["--parts", *tradeoff.PARTS]
    ways = ["--ways", "random", "surgeon + finetune"]
    arguments = [*where, *out, *SMALL, *GRID, *parts, "--budgets", "8", "6", "3", *ways]
    threads = torch.get_num_threads()
    record: dict[str, Any] = json.loads(
        tradeoff.main([*arguments, "--timed", "taylor"]).read_text()
    )
    assert torch.get_num_threads() == threads
    return [*arguments, "--timed", "taylor"], record


def test_tradeoff_measures_every_part(
    ran: tuple[list[str], dict[str, Any]], tradeoff: ModuleType
) -> None:
    _, record = ran
    assert {"torch", "transformers", "headprune"} <= set(record["versions"])
    assert (record["heads"], record["judged"], record["device"]) == (8, 20, "cpu")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault(row["what"], []).append(row)
    # The grid last, which a lent machine may not end.
    assert list(found) == [
        "quality",
        "paired",
        "kv",
        "sizes",
        "ceiling",
        "gpu",
        "attention",
        "speed",
    ]
    quality = [(row["way"], row["kept"]) for row in found["quality"]]
    ways = [(way, kept) for way in ("random", "surgeon + finetune") for kept in (6, 3)]
    assert quality == [*ways, ("dense + finetune", 8)]
    measured = {(row["way"], row["kept"]): row["quality"] for row in found["quality"]}
    paired = {(row["way"], row["kept"], row["against"]): row for row in found["paired"]}
    dense = {(way, kept, "dense + finetune") for way, kept in ways if "finetune" in way}
    assert set(paired) == {*((way, kept, "base") for way, kept in measured), *dense}
    for (way, kept, against), row in paired.items():
        other = record["base"] if against == "base" else measured[against, 8]
        assert row["difference"] == pytest.approx(measured[way, kept] - other, abs=1e-5)
        assert row["low"] <= row["difference"] <= row["high"]
    cells = [(row["length"], row["batch"], row["kept"]) for row in found["speed"]]
    assert cells == [
        (length, batch, kept) for length in (8, 16) for batch in (1, 2) for kept in (6, 3)
    ]
    assert all(row["processor"] == record["hardware"]["processor"] for row in record["rows"])
    for row in found["speed"]:
        assert row["rounds"] % 3 == 0  # the whole model and two cuts, each first equally often
        assert row["rounds"] >= 10
        same = [
            r["original_p50"]
            for r in found["speed"]
            if (r["length"], r["batch"]) == (row["length"], row["batch"])
        ]
        assert same == [row["original_p50"]] * 2
        assert row["weight_bytes"][0] > row["weight_bytes"][1]
        assert row["throughput"][1] == pytest.approx(row["batch"] / row["pruned_p50"])
        assert 1 < row["limit"] < row["attention_limit"] == pytest.approx(8 / row["kept"])
        assert (
            row["peak_bytes"][0] >= row["peak_bytes"][1] > 0
        )  # so small, the feed-forward's is the peak
    for row in found["sizes"]:
        assert row["heads"] == [8, row["kept"]]
        assert row["bytes on disk"][0] > row["bytes on disk"][1]
    for row in found["attention"]:
        assert row["attention_limit"] == pytest.approx(8 / row["kept"])
        for part in ("alone", "model"):
            assert row[part]["low"] <= row[part]["ratio"] <= row[part]["high"]
        assert row["alone"]["original_p50"] < row["model"]["original_p50"]
    for row in found["kv"]:
        before, after = row["bytes"]
        assert before == 2 * after
        assert set(row["tokens_a_second"]) == {
            f"{m}_{p}" for m in ("original", "pruned") for p in ("prefill", "decode")
        }


def test_tradeoff_goes_on_after_the_last_row(
    ran: tuple[list[str], dict[str, Any]], tradeoff: ModuleType
) -> None:
    arguments, record = ran
    out = Path(arguments[arguments.index("--out") + 1])
    gone = {"what": "speed", "length": 16, "kept": 3}
    left = [row for row in record["rows"] if not gone.items() <= row.items()]
    out.write_text(json.dumps({**record, "rows": left}))
    again = json.loads(tradeoff.main(arguments).read_text())
    assert again["rows"][: len(left)] == left
    assert [(row["what"], row["length"], row["kept"]) for row in again["rows"][len(left) :]] == [
        ("speed", 16, 3)
    ] * 2
    with pytest.raises(SystemExit, match="record of another run, with other timed"):
        tradeoff.main([*arguments[:-1], "surgeon"])


def test_compiled_cells_are_compiled(
    given: Path, tradeoff: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = importlib.import_module("tradeoff_speed")
    monkeypatch.setattr(speed.torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    whole, *cuts = (
        torch.nn.Sequential(hp.MultiHeadAttention(8, heads, head_dim=2)) for heads in (4, 3, 2, 1)
    )
    monkeypatch.setattr(speed, "limits", lambda *_: {})
    monkeypatch.setattr(
        speed, "shaped_batch", lambda example, batch, length: torch.randn(batch, length, 8)
    )
    args = tradeoff.arguments(
        ["--task", "trec", "--data", "x", "--work", "x", "--seconds", "0", "--no-memory"]
    )
    args.attention, args.compile, args.lengths, args.batch_sizes = (
        ["eager"],
        ["on"],
        [3, 4, 5],
        [1, 2, 3],
    )
    rows = list(speed.speed_rows(whole, dict(zip((3, 2, 1), cuts, strict=True)), None, args, set()))
    assert len(rows) == 3 * 9
    assert [row for row in rows if "error" in row] == []
    assert {row["compiled"] for row in rows} == {True}
    assert all(row["graphs"] >= 4 for row in rows)  # PyTorch alone would stop compiling after eight

    def uncompiled(model: torch.nn.Module, **_: Any) -> torch.nn.Module:
        return model

    monkeypatch.setattr(speed.torch, "compile", uncompiled)
    rows = list(speed.speed_rows(whole, {3: cuts[0]}, None, args, set()))
    assert {row["error"] for row in rows} == {"RuntimeError: 0 graphs were compiled for 2 models"}


def test_what_does_not_fit_is_said_and_tried_again(
    ran: tuple[list[str], dict[str, Any]],
    tradeoff: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments, record = ran
    speed, out = importlib.import_module("tradeoff_speed"), tmp_path / "tradeoff-trec-cpu.json"
    record = {**record, "rows": [row for row in record["rows"] if row["what"] != "speed"]}
    out.write_text(json.dumps(record))
    real = speed.measured

    def full(models: Any, example: Any, cell: Any, args: Any) -> Any:
        if cell.batch == 2:
            raise torch.OutOfMemoryError("no room\nfor more")
        return real(models, example, cell, args)

    monkeypatch.setattr(speed, "measured", full)
    again = [
        *arguments[: arguments.index("--out")],
        "--out",
        str(out),
        *arguments[arguments.index("--out") + 2 :],
    ]
    failed = [row for row in json.loads(tradeoff.main(again).read_text())["rows"] if "error" in row]
    assert [(row["length"], row["batch"], row["kept"]) for row in failed] == [
        (length, 2, kept) for length in (8, 16) for kept in (6, 3)
    ]
    page = tradeoff.tradeoff_page.page(tmp_path)
    assert (
        "- float32, sdpa attention, eager mode, 8 tokens, batch 2, 6 kept: OutOfMemoryError: no"
        " room\n" in page
    )
    monkeypatch.setattr(speed, "measured", real)
    ticks = iter([0.0, 0.0, 61.0])  # begun, before the first row, and before the second
    with monkeypatch.context() as patched:
        patched.setattr(tradeoff.studies, "perf_counter", lambda: next(ticks))
        rows = json.loads(tradeoff.main([*again, "--minutes", "1"]).read_text())["rows"]
    assert (
        len(rows) == len(record["rows"]) + 4 + 1
    )  # what went well, and the first of what had failed: time was over
    rows = json.loads(tradeoff.main(again).read_text())["rows"]
    assert not any("error" in row for row in rows)


def test_tradeoff_says_where_it_is_faster_and_where_not(tradeoff: ModuleType) -> None:
    def cell(batch: int, low: float, high: float, p90: float = 1.9) -> dict[str, Any]:
        times = {"original_p50": 1.0, "original_p90": 1.9, "pruned_p50": 1.0, "pruned_p90": p90}
        return {**times, "batch": batch, "low": low, "high": high, "kept": 6, "length": 8}

    words = benchmark("tradeoff_times")._in_words
    assert words([cell(1, 1.1, 1.2), cell(8, 1.2, 1.3)]) == "faster at every batch size (1 to 8)"
    mixed = [cell(1, 0.8, 0.9), cell(8, 0.9, 1.1), cell(32, 1.1, 1.2), cell(128, 1.2, 1.3)]
    assert (
        words(mixed)
        == "faster from batch 32 on, not faster: slower at batch 1, no difference shown at batch 8"
    )
    assert (
        words([cell(1, 1.1, 1.2), cell(8, 0.9, 1.1)])
        == "faster at batch 1, no difference shown at batch 8"
    )
    assert words([cell(1, 0.8, 0.9)]) == "not faster: slower at batch 1"
    assert words([cell(1, 1.1, 1.2)]) == "faster at batch 1"
    shaken = [cell(1, 1.1, 1.2), cell(8, 1.1, 1.2, 2.1), cell(32, 1.1, 1.2)]
    assert words(shaken) == "faster from batch 32 on, faster at batch 1, disturbed at batch 8"
    assert words([cell(1, 0.8, 0.9, 2.1)]) == "disturbed at batch 1"
    assert (
        tradeoff.tradeoff_page.timed({**shaken[1], "ratio": 1.15}) == "1.15 [1.10, 1.20], disturbed"
    )


def test_tradeoff_draws_its_page_from_the_record(
    ran: tuple[list[str], dict[str, Any]], tradeoff: ModuleType, tmp_path: Path
) -> None:
    arguments, record = ran
    folder = Path(arguments[arguments.index("--out") + 1]).parent
    tradeoff.main(["--figure", "--records", str(folder), "--docs", str(tmp_path)])
    text = (tmp_path / "tradeoff.md").read_text()
    row = next(row for row in record["rows"] if row["what"] == "speed")
    shaken = ", disturbed" * tradeoff.tradeoff_page.disturbed(row)  # so short, on a busy machine
    assert (
        f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]{shaken} | {row['limit']:.2f}"
        in text
    )
    assert f"All 8 heads: {record['base']:.3f}, on 20 test rows." in text
    assert "No record yet, on a CPU, of SST-2, STS-B.\n\nOn a GPU: no GPU record yet.\n" in text
    first = (tmp_path / "tradeoff.svg").read_bytes()
    tradeoff.main(["--figure", "--records", str(folder), "--docs", str(tmp_path)])
    assert (tmp_path / "tradeoff.svg").read_bytes() == first
    assert "6 heads" in tradeoff.tradeoff_page.readme(folder)


def test_tradeoff_says_what_was_not_measured_and_where_a_row_was(tradeoff: ModuleType) -> None:
    page = tradeoff.tradeoff_page
    assert set(page.TITLES) == set(tradeoff.TASKS)

    def cell(length: int, batch: int, kept: int, **more: Any) -> dict[str, Any]:
        way = {"what": "speed", "dtype": "float32", "attention": "sdpa", "compiled": False}
        return {**way, "length": length, "batch": batch, "kept": kept, **more}

    args = tradeoff.arguments(["--task", "trec", "--data", "x", "--work", "x"])
    whole = [cell(*at) for at in itertools.product(args.lengths, args.batch_sizes, args.budgets)]
    assert page.lacking(whole, []) == []
    few = [
        row
        for row in whole
        if row["length"] < 512 and row["batch"] in (1, 32) and row["kept"] in (36, 24)
    ]
    said = (
        "Not measured: 32, 128 tokens at batch 8, 128; 512 tokens at any batch; 54, 14 heads kept."
    )
    assert page.lacking(few, []) == ["", said]
    failed = [
        row | {"error": "full"} for row in whole if row["length"] == 512 and row["batch"] != 8
    ]
    rest = "Not measured: 32, 128 tokens at batch 8, 128; 512 tokens at batch 8."
    assert page.lacking(few, failed) == ["", rest]

    rows = [cell(32, 8, 6), cell(512, 8, 6, compiled=True, processor="another")]

    record = {"rows": rows, "hardware": {"processor": "usual"}, "task": "trec", "device": "cpu"}
    said = ["Timed on another: float32, sdpa attention, torch.compile, 512 tokens, batch 8.", ""]
    assert page.elsewhere(record) == said
    assert (
        page.elsewhere({**record, "hardware": {"processor": "another"}}) == []
    )  # rows without one are the record's
    on_gpu = {**record, "device": "cuda", "hardware": {"gpu": "a GPU"}}
    assert page.not_yet([record, on_gpu])[-2:] == [
        "No record yet, on a CPU, of SST-2, STS-B.",
        "No record yet, on a GPU, of SST-2, STS-B.",
    ]


def timed_row(batch: int, kept: int, whole: float = 2.0, **more: Any) -> dict[str, Any]:
    """A cell at 128 tokens, in seconds."""
    way = {
        "what": "speed",
        "dtype": "float32",
        "attention": "sdpa",
        "compiled": False,
        "length": 128,
    }
    times = {"original_p50": whole, "original_p90": whole, "pruned_p50": 1.0, "pruned_p90": 1.5}
    found = {
        "ratio": whole,
        "low": whole - 0.1,
        "high": whole + 0.1,
        "limit": 2.5,
        "throughput": [batch / whole, batch],
    }
    return {**way, **times, **found, "batch": batch, "kept": kept, "weight_bytes": [4, 2], **more}


def test_tradeoff_sets_a_row_of_another_session_beside_its_own_whole_model(
    tradeoff: ModuleType,
) -> None:
    page = tradeoff.tradeoff_page
    rows = [timed_row(1, 36), timed_row(1, 24), timed_row(8, 36), timed_row(8, 24, whole=3.0)]
    table = page.times(rows, [36, 24])
    assert (
        "| 128 | 1 | 2,000 (2,000) | 0.5 | 1,000 (1,500) | 2.00 [1.90, 2.10] | 2.50 | 1,000 (1,500)"
        " | 2.00" in table[2]
    )
    assert "| 1,000 (1,500) of 3,000 | 3.00 [2.90, 3.10] | 2.50 |" in table[3]
    assert table[4:] == [
        "",
        "*of*: timed in another session, in which the whole model took so many ms.",
    ]
    assert len(page.times(rows[:3], [36, 24])) == 4


def test_figures_are_plain() -> None:
    plain = benchmark("pages").plain
    figures = [plain(n) for n in (1751.2, 100.4, 19.96, 6.849, 0.6221)]
    assert figures == ["1,751", "100", "20.0", "6.85", "0.622"]
    assert [plain(n, 2) for n in (123.4, 1.26, 0.00123, 0.0000456)] == [
        "123",
        "1.3",
        "0.0012",
        "0.000046",
    ]


def test_a_gpu_record_without_accuracy_has_its_speed_on_the_page(
    tradeoff: ModuleType, tmp_path: Path
) -> None:
    """What benchmarks/README.md advises first on a GPU that is lent for minutes."""
    page = tradeoff.tradeoff_page
    where = {"processor": "a processor", "threads": 2, "gpu": "a GPU"}
    about = {
        "task": "sst2",
        "device": "cuda",
        "gpu": "a GPU",
        "timed": "surgeon",
        "heads": 72,
        "base": 0.9,
    }
    about |= {
        "hardware": where,
        "versions": {"torch": "2", "transformers": "5"},
        "created": "2026-01-01T00",
    }
    rows = [timed_row(32, 36, 1.5), timed_row(32, 24)]
    (tmp_path / "tradeoff-sst2-cuda.json").write_text(json.dumps({**about, "rows": rows}))
    text = page.page(tmp_path)
    assert "## SST-2, speed, on a GPU\n" in text
    said = (
        "With 24 of 72 heads; accuracy was not measured here: at batch 32 of 128 tokens the model"
        " is 2.00 [1.90, 2.10]"
    )
    assert f"{said} times as fast, 0.80 of the 2.50 that" in text
    not_at_all = next(
        line for line in text.splitlines() if line.startswith("Not measured at all: ")
    )
    assert "bfloat16, eager attention, torch.compile" in not_at_all
    assert tradeoff.studies.NO_GPU not in text.partition("## Beside")[0]
    block = page.readme(tmp_path)
    assert block.startswith(
        "Speed alone, at batch 32 of 128 tokens, on a GPU:\n\n- SST-2, speed, of all 72 heads: 36"
        " heads"
    )
    assert "36 heads 1.50x [1.40, 1.60]; 24 heads 2.00x [1.90, 2.10]\n" in block
    assert tradeoff.studies.NO_GPU not in block
    assert "accuracy" not in block
    assert "±" not in block

    draws = [
        {"what": "quality", "way": "surgeon + lstsq", "kept": 24, "quality": q}
        for q in (0.89, 0.91)
    ]
    here = {"hardware": {"processor": "a processor", "threads": 1}, "device": "cpu"}
    other = {k: v for k, v in about.items() if k != "gpu"} | here | {"rows": [*rows, *draws]}
    (tmp_path / "tradeoff-sst2-cpu.json").write_text(json.dumps(other))
    block = page.readme(tmp_path)
    chosen = (
        "Heads chosen by `surgeon`, what is left refitted by `lstsq`, nothing trained; at batch 32"
        " of 128 tokens, on"
    )
    assert (
        f"{chosen} a CPU (a processor, 1 thread):\n\n- SST-2, accuracy, 0.900 with all 72 heads: 24"
        " heads" in block
    )
    assert "24 heads 0.900 ± 0.014 at 2.00x [1.90, 2.10]\n" in block
    assert "\n±: standard deviation over draws of calibration rows.\n" in block
    assert "\nSpeed alone, " in block


def test_tradeoff_says_how_far_processes_differ_and_where_other_tasks_are(
    tradeoff: ModuleType, tmp_path: Path
) -> None:
    page = tradeoff.tradeoff_page
    assert page.between_processes(tmp_path) == page.other_tasks(tmp_path) == []

    def row(*ratios: float) -> dict[str, Any]:
        return {
            "speed": {"processes": [{"ratio": 1.0}, {"ratio": 1.0}]},
            "uncut": {"processes": [{"ratio": r} for r in ratios]},
        }

    for name, hardware, rows in (
        ("cpu", {}, [row(1.0, 1.02), row(0.9, 1.1)]),
        ("cuda", {"gpu": "a GPU"}, [row(0.99, 1.01)]),
    ):
        (tmp_path / f"native-{name}.json").write_text(
            json.dumps({"hardware": hardware, "rows": rows})
        )
    (said,) = page.between_processes(tmp_path)
    assert said.endswith(
        ": by a standard deviation of up to 14 % on a CPU and 1 % on a GPU (`native.py`)."
    )
    for name in ("demo", "run-char-gpt", "kv-groups-stories"):
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"name": "digits-vit" if name == "demo" else name[4:]})
        )
    _, said = page.other_tasks(tmp_path)
    assert "(digits-vit, char-gpt): [recipes](recipe-runs.md)" in said
    assert "kv-groups.md" in said
    assert "translation.md" not in said


def test_tradeoff_compares_by_the_most_draws(tradeoff: ModuleType) -> None:
    """A record that went on with more draws holds the older comparison, too."""
    page = tradeoff.tradeoff_page
    about = {"what": "paired", "way": "surgeon", "kept": 6, "low": -0.02, "high": 0.0}
    rows = [{**about, "against": "base", "draws": n, "difference": -n / 1000} for n in (1, 3, 2)]
    rows += [
        {**about, "against": "dense + finetune", "draws": n, "difference": n / 1000} for n in (1, 3)
    ]
    draws = [{"what": "quality", "way": "surgeon", "kept": 6, "quality": 0.9} for _ in range(3)]
    record = {"task": "sst2", "rows": rows + draws, "heads": 8, "base": 0.9, "judged": 20}
    text = "\n".join(page.accuracy(record))
    assert "| surgeon | 0.900 ± 0.000 (-0.3 [-2.0, +0.0]) |" in text
    assert text.endswith(
        "Points against all heads trained as long: surgeon, 6 kept: +0.3 [-2.0, +0.0]."
    )


def test_native_speed_is_judged_by_its_interval() -> None:
    others = benchmark("tradeoff_others")
    share, extra = (
        {"ratio": 0.97, "low": 0.969, "high": 0.971},
        {"mean": 1e-3, "low": 9e-4, "high": 1.1e-3},
    )

    def timed(
        subject: str, batch: int, low: float, high: float, uncut: tuple[float, float]
    ) -> dict[str, Any]:
        each = [{"ratio": low}, {"ratio": high}]
        speed, before = (
            {"ratio": (a + b) / 2, "low": a, "high": b, "processes": each, "extra_seconds": extra}
            for a, b in ((low, high), uncut)
        )
        about = {
            "subject": subject,
            "batch": batch,
            "tokens": 32,
            "dtype": "float32",
            "compiled": False,
        }
        return {**about, "speed": speed} | (
            {"uncut": before, "share": share} if subject == "bert" else {}
        )

    rows = [
        timed("bert", 1, 0.80, 0.84, (0.84, 0.86)),
        timed("bert", 8, 0.90, 0.96, (0.95, 1.05)),
        timed("bert", 32, 0.95, 1.01, (0.95, 1.05)),
        timed("vit", 1, 0.97, 1.01, (0.8, 0.9)),
        timed("llama, free", 1, 0.5, 0.6, (0.8, 0.9)),
    ]
    assert others.cells(0.97, rows[0])[8:] == ["0.97 [0.97, 0.97]", *["1.00 [0.90, 1.10]"] * 2]
    assert others.cells(0.97, rows[0])[4:6] == ["0.82 [0.80, 0.84]", "0.80 to 0.84"]
    assert [others.cells(0.97, row)[6] for row in rows] == [
        "missed",
        "missed",
        "open",
        "reached",
        "",
    ]
    assert [others.cells(0.97, row)[7] for row in rows] == [
        *["0.85 [0.84, 0.86]", *["1.00 [0.95, 1.05]"] * 2],
        "",
        "",
    ]
    assert others.summary(0.97, rows) == [
        "Missed: bert 1 x 32 (float32); bert 8 x 32 (float32). Open: bert 32 x 32 (float32)."
        " bert 1 x 32 (float32) misses it uncut, too: 0.85 [0.84, 0.86]."
    ]
    assert others.summary(0.97, rows[3:]) == ["All reach 0.97."]


def test_native_compares_models_of_one_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    native = importlib.import_module("native")  # its processes import it by name
    out = ["--out", str(tmp_path / "native-cpu.json")]
    little = ["--small", "--seconds", "0", "--threads", "1", "--processes", "2"]
    record = json.loads(native.main([*little, *out]).read_text())
    assert [row["subject"] for row in record["rows"]] == list(native.SUBJECTS)
    for row in record["rows"]:
        assert row["largest_difference"] < 1e-4
        assert ("uncut" in row) == (row["subject"] == "bert")
        assert ("share" in row) == ("uncut" in row)
        for timed in (row[key] for key in ("speed", "uncut") if key in row):
            one, other = (process["ratio"] for process in timed["processes"])
            late = [
                process["pruned_p50"] - process["original_p50"] for process in timed["processes"]
            ]
            assert timed["extra_seconds"]["mean"] == pytest.approx(sum(late) / 2)
            assert timed["ratio"] == pytest.approx((one + other) / 2)
            assert timed["high"] - timed["low"] == pytest.approx(
                2 * 12.706 * abs(one - other) / 2, rel=1e-3
            )
    with pytest.raises(SystemExit):
        native.main(["--processes", "1"])


def test_startup_takes_off_what_the_stages_took(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    startup = benchmark("startup")
    took = {
        "--help": 3.0,
        "import headprune": 2.0,
        "import torch; from transformers import PreTrainedModel": 5.0,
    }
    monkeypatch.setattr(startup, "timed", lambda command: took.get(command[-1], 1.0))
    monkeypatch.setattr(startup, "a_run", lambda args: (9.0, 2.5))
    out = tmp_path / "startup.json"
    record = json.loads(
        startup.main(["--rounds", "2", "--run-rounds", "1", "--out", str(out)]).read_text()
    )
    beyond = {
        "import headprune": 1.0,
        "headprune --help": 2.0,
        "libraries": 4.0,
        "run": 8.0,
        "run, overhead": 5.5,
    }
    assert record["beyond an empty process"] == beyond
    assert len(record["seconds"]["python"]) == 2


@pytest.mark.parametrize(
    ("model_type", "status", "reason"),
    [
        ("esm", "exact", ""),
        ("git", "exact", ""),
        ("gpt_bigcode", "exact", ""),
        ("xlnet", "refused", "projections that are no matrices"),
        ("longformer", "refused", "head counts kept elsewhere"),
        ("mamba", "no softmax attention", "no softmax attention"),
    ],
)
def test_coverage_examines_one_class(model_type: str, status: str, reason: str) -> None:
    row = benchmark("family_coverage").examine(model_type)
    assert row["status"] == status, row
    assert reason in row["reason"]
    assert (row["difference"] is not None and row["difference"] < 1e-10) == (status == "exact")


def test_coverage_draws_the_same_classes_for_a_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    coverage = benchmark("family_coverage")
    row = {
        "class": "X",
        "sites": 1,
        "unreached": 0,
        "layouts": ["bert"],
        "difference": 1e-15,
        "status": "exact",
    }
    monkeypatch.setattr(
        coverage,
        "examine_apart",
        lambda model_type, seconds: {"model_type": model_type, "reason": "", **row},
    )
    records = []
    for name in ("one", "two"):
        out, page = tmp_path / f"{name}.json", tmp_path / f"{name}.md"
        coverage.main(["--count", "4", "--out", str(out), "--table", str(page)])
        records.append(json.loads(out.read_text()))
        assert "**4 of\n4 are cut exactly" in page.read_text()
    drawn = [[r["model_type"] for r in record["rows"]] for record in records]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 4
    assert not set(drawn[0]) & coverage.known_types()


def test_exactness_measures_a_family(tmp_path: Path) -> None:
    out = tmp_path / "exactness.json"
    assert benchmark("exactness").main(["--families", "bert", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"].values()
    assert row["reloaded_minus_pruned"] == 0
    assert row["zero_heads"] == ["ok"]


def test_the_record_of_exactness_is_that_of_todays_families() -> None:
    from headprune.layouts import registry

    rows = json.loads((ROOT / "benchmarks" / "records" / "exactness.json").read_text())["rows"]
    families = {family for name in registry.names() for family, _ in registry.get(name).families}
    assert set(rows) == families, "run `python benchmarks/exactness.py`"
    assert [
        family for family, row in rows.items() if not benchmark("exactness").is_exact(row)
    ] == []
