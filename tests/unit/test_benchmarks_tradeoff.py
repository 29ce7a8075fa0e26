"""benchmarks/tradeoff.py: a tiny run of every part, runs that go on, and what its page says."""

import importlib
import json
import shlex

import pytest
import torch

import headprune as hp
from tests.benchmark_runs import encoder_study, page_of, record_of
from tests.scripts import benchmark

#: ``--small`` takes budgets from the second on and every second batch size.
COMMAND = (
    "--small --seconds 0.01 --calibration 20 --threads 1 --attention-lengths 16 --prompts 16 "
    "--new-tokens 4 --batch-sizes 1 7 2 --lengths 8 --budgets 8 6 3 --timed taylor "
    "--ways random 'surgeon + finetune' --parts"
)


@pytest.fixture(scope="module")
def tradeoff():
    return benchmark("tradeoff")


@pytest.fixture(scope="module")
def command(tradeoff, tmp_path_factory):
    study = encoder_study(tmp_path_factory.mktemp("tradeoff"), "trec")
    return f"{study} {COMMAND} {' '.join(tradeoff.PARTS)}"


@pytest.fixture(scope="module")
def ran(tradeoff, command, tmp_path_factory):
    """The record of a run."""
    out = tmp_path_factory.mktemp("record") / "tradeoff-trec-cpu.json"
    threads = torch.get_num_threads()
    record = record_of(tradeoff, f"{command} --out {out}")
    assert torch.get_num_threads() == threads
    return record


def test_every_part_is_measured(ran):
    record = ran
    assert (record["heads"], record["judged"], record["device"]) == (8, 40, "cpu")
    found = {}
    for row in record["rows"]:
        found.setdefault(row["what"], []).append(row)
    # The grid is last: a lent machine may not reach its end.
    parts = ["quality", "paired", "kv", "sizes", "ceiling", "gpu", "attention", "speed"]
    assert list(found) == parts
    measured = {(row["way"], row["kept"]): row["quality"] for row in found["quality"]}
    ways = [(way, kept) for way in ("random", "surgeon + finetune") for kept in (6, 3)]
    assert list(measured) == [*ways, ("dense + finetune", 8)]
    paired = {(row["way"], row["kept"], row["against"]): row for row in found["paired"]}
    dense = {(way, kept, "dense + finetune") for way, kept in ways if "finetune" in way}
    assert set(paired) == {*((*key, "base") for key in measured), *dense}
    for (way, kept, against), row in paired.items():
        other = record["base"] if against == "base" else measured[against, 8]
        assert row["difference"] == pytest.approx(measured[way, kept] - other, abs=1e-5)
        assert row["low"] <= row["difference"] <= row["high"]
    for row in found["sizes"]:
        assert row["heads"] == [8, row["kept"]]
        assert row["bytes on disk"][0] > row["bytes on disk"][1]
    for row in found["kv"]:
        assert row["bytes"][0] == 2 * row["bytes"][1]
    for row in found["attention"]:
        assert row["alone"]["original_p50"] < row["model"]["original_p50"]
    speed = found["speed"]
    assert [(row["batch"], row["kept"]) for row in speed] == [(1, 6), (1, 3), (2, 6), (2, 3)]
    for row in speed:
        # The whole model and two cuts take turns at being first, equally often.
        assert row["rounds"] % 3 == 0
        assert row["rounds"] >= 10
        same = [r["original_p50"] for r in speed if r["batch"] == row["batch"]]
        assert same == [row["original_p50"]] * 2
        assert row["throughput"][1] == pytest.approx(row["batch"] / row["pruned_p50"])
        assert 1 < row["limit"] < row["attention_limit"] == pytest.approx(8 / row["kept"])
        assert row["weight_bytes"][0] > row["weight_bytes"][1]
        assert row["peak_bytes"][0] >= row["peak_bytes"][1] > 0


def test_the_page_says_the_record(ran, tradeoff, tmp_path):
    (tmp_path / "tradeoff-trec-cpu.json").write_text(json.dumps(ran))
    text = page_of(tradeoff, tmp_path, "tradeoff.md")
    assert f"All 8 heads: {ran['base']:.3f}, on 40 test rows." in text
    assert "No record yet, on a CPU, of SST-2, STS-B.\n\nOn a GPU: no GPU record yet.\n" in text
    first = (tmp_path / "tradeoff.svg").read_bytes()
    page_of(tradeoff, tmp_path, "tradeoff.md")
    assert (tmp_path / "tradeoff.svg").read_bytes() == first


def test_a_cell_that_was_not_compiled_is_an_error(tradeoff, monkeypatch):
    speed = importlib.import_module("tradeoff_speed")
    whole, cut = (torch.nn.Sequential(hp.MultiHeadAttention(8, n, head_dim=2)) for n in (4, 3))
    monkeypatch.setattr(speed, "limits", lambda *_: {})
    monkeypatch.setattr(speed, "shaped_batch", lambda _, *shape: torch.randn(*shape, 8))
    args = tradeoff.arguments(shlex.split("--task trec --data x --work x --seconds 0 --no-memory"))
    args.attention, args.compile = ["eager"], ["on"]
    args.lengths, args.batch_sizes = [3], [1]
    monkeypatch.setattr(speed.torch, "compile", lambda model, **_: model)
    (row,) = speed.speed_rows(whole, {3: cut}, None, args, set())
    assert row["error"] == "RuntimeError: 0 graphs were compiled for 2 models"


def cell(batch, low, high, p90=1.9):
    times = {"original_p50": 1.0, "original_p90": 1.9, "pruned_p50": 1.0, "pruned_p90": p90}
    return {**times, "batch": batch, "low": low, "high": high, "kept": 6, "length": 8}


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([cell(1, 1.1, 1.2), cell(8, 1.2, 1.3)], "faster at every batch size (1 to 8)"),
        (
            [cell(1, 0.8, 0.9), cell(8, 0.9, 1.1), cell(32, 1.1, 1.2), cell(128, 1.2, 1.3)],
            "faster from batch 32 on, not faster: slower at batch 1, no difference shown at batch 8",
        ),
        (
            [cell(1, 1.1, 1.2), cell(8, 1.1, 1.2, p90=2.1), cell(32, 1.1, 1.2)],
            "faster from batch 32 on, faster at batch 1, disturbed at batch 8",
        ),
        ([cell(1, 0.8, 0.9)], "not faster: slower at batch 1"),
        ([cell(1, 0.8, 0.9, p90=2.1)], "disturbed at batch 1"),
    ],
)
def test_the_page_says_where_it_is_faster_and_where_not(cells, words):
    assert benchmark("tradeoff_times")._in_words(cells) == words


def test_the_page_says_how_far_processes_differ(tradeoff, tmp_path):
    page = tradeoff.tradeoff_page
    assert page.between_processes(tmp_path) == []

    def row(*ratios):
        return {"speed": {"processes": [{"ratio": ratio} for ratio in ratios]}}

    for name, hardware, rows in (
        ("native-cpu", {}, [row(1.0, 1.02), row(0.9, 1.1)]),
        ("native-cuda", {"gpu": "a GPU"}, [row(0.99, 1.01)]),
    ):
        found = {"hardware": hardware, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    (said,) = page.between_processes(tmp_path)
    assert said.endswith(" of up to 14 % on a CPU and 1 % on a GPU (`native.py`).")


def test_the_comparison_of_the_most_draws_is_shown(tradeoff):
    """A record that went on with more draws holds the older comparison, too."""
    about = {"what": "paired", "way": "surgeon", "kept": 6, "low": -0.02, "high": 0.0}
    rows = [
        {**about, "against": against, "draws": n, "difference": sign * n / 1000}
        for against, sign in (("base", -1), ("dense + finetune", 1))
        for n in (1, 3, 2)
    ]
    rows += [{"what": "quality", "way": "surgeon", "kept": 6, "quality": 0.9}] * 3
    record = {"task": "sst2", "rows": rows, "heads": 8, "base": 0.9, "judged": 20}
    text = "\n".join(tradeoff.tradeoff_page.accuracy(record))
    assert "| surgeon | 0.900 ± 0.000 (-0.3 [-2.0, +0.0]) |" in text
    assert text.endswith("trained as long: surgeon, 6 kept: +0.3 [-2.0, +0.0].")
