"""Benchmark scripts with little state: what they measure, and how records of studies go on."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from benchmarks.determinism import VARIABLE, WORKSPACE, deterministic
from headprune.layouts import registry
from tests.benchmark_runs import record_of
from tests.scripts import BENCHMARKS, benchmark


@pytest.fixture(scope="module")
def studies():
    return benchmark("studies")


def test_figures_are_plain():
    plain = benchmark("pages").plain
    assert [plain(n) for n in (1751.2, 19.96, 6.849, 0.6221)] == ["1,751", "20.0", "6.85", "0.622"]
    assert [plain(n, 2) for n in (123.4, 1.26, 0.0000456)] == ["123", "1.3", "0.000046"]


def test_a_record_of_other_weights_keeps_its_place(studies, tmp_path):
    out = tmp_path / "tradeoff-sst2-cuda.json"
    mine, theirs = {"weights": "a", "gpu": "one"}, {"weights": "b", "gpu": "one"}
    assert studies.aside(out, mine) == out
    out.write_text(json.dumps({**mine, "rows": []}))
    assert studies.aside(out, mine) == out
    other = studies.aside(out, theirs)
    assert other.parent == tmp_path
    assert other.name.startswith("tradeoff-sst2-cuda-")
    assert other == studies.aside(out, theirs)  # the next call goes on with it


def test_native_speed_is_judged_by_its_interval():
    others = benchmark("tradeoff_others")

    def timed(low, high, late=1e-3):
        each = [{"ratio": low}, {"ratio": high}]
        found = {"ratio": (low + high) / 2, "low": low, "high": high}
        extra = {"mean": late, "low": late - 1e-4, "high": late + 1e-4}
        return {**found, "processes": each, "extra_seconds": extra}

    def row(subject, batch, low, high):
        about = {"subject": subject, "batch": batch, "tokens": 32, "dtype": "float32"}
        return {**about, "compiled": False, "speed": timed(low, high)}

    share = {"ratio": 0.97, "low": 0.969, "high": 0.971}
    rows = [
        {**row("bert", 1, 0.80, 0.84), "uncut": timed(0.84, 0.86, 2e-3), "share": share},
        {**row("bert", 8, 0.90, 0.96), "uncut": timed(0.95, 1.05), "share": share},
        {**row("bert", 32, 0.95, 1.01), "uncut": timed(0.95, 1.05), "share": share},
        row("vit", 1, 0.97, 1.01),
        row("llama, free", 1, 0.5, 0.6),
    ]
    cells = [others.cells(0.97, row) for row in rows]
    assert cells[0][-2:] == ["1.00 [0.90, 1.10]", "2.00 [1.90, 2.10]"]
    words = [row[6] for row in cells]
    assert words == ["missed", "missed", "open", "reached", ""]
    assert others.summary(0.97, rows) == [
        "Missed: bert 1 x 32 (float32); bert 8 x 32 (float32). Open: bert 32 x 32 (float32)."
        " bert 1 x 32 (float32) misses it uncut, too: 0.85 [0.84, 0.86]; the cut's own share is"
        " 0.97 [0.97, 0.97]. A call takes 2.00 ms more than the native model's before the cut,"
        " 1.00 ms after it."
    ]
    assert others.summary(0.97, rows[3:]) == ["All reach 0.97."]


def test_native_compares_models_of_one_function(monkeypatch, tmp_path):
    """A thread stands for every process: the spread is computed alike."""
    native = benchmark("native")
    pool = ThreadPoolExecutor
    monkeypatch.setattr(native, "ProcessPoolExecutor", lambda count, mp_context: pool(count))
    out = tmp_path / "native-cpu.json"
    record = record_of(native, f"--small --seconds 0 --threads 1 --processes 2 --out {out}")
    assert [row["subject"] for row in record["rows"]] == list(native.SUBJECTS)
    for row in record["rows"]:
        assert row["largest_difference"] < 1e-4
        assert ("uncut" in row) == ("share" in row) == row["subject"].startswith("bert")
        for timed in (row[key] for key in ("speed", "uncut") if key in row):
            one, other = (process["ratio"] for process in timed["processes"])
            late = [each["pruned_p50"] - each["original_p50"] for each in timed["processes"]]
            assert timed["extra_seconds"]["mean"] == pytest.approx(sum(late) / 2)
            assert timed["ratio"] == pytest.approx((one + other) / 2)
            width = 2 * 12.706 * abs(one - other) / 2
            assert timed["high"] - timed["low"] == pytest.approx(width, rel=1e-3)
    with pytest.raises(SystemExit):
        native.main(["--processes", "1"])


def test_startup_takes_off_what_the_stages_took(monkeypatch, tmp_path):
    startup = benchmark("startup")
    libraries = "import torch; from transformers import PreTrainedModel"
    took = {"--help": 3.0, "import headprune": 2.0, libraries: 5.0}
    monkeypatch.setattr(startup, "timed", lambda command: took.get(command[-1], 1.0))
    monkeypatch.setattr(startup, "a_run", lambda args: (9.0, 2.5))
    record = record_of(startup, f"--rounds 2 --run-rounds 1 --out {tmp_path / 'startup.json'}")
    beyond = {"import headprune": 1.0, "headprune --help": 2.0, "libraries": 4.0}
    beyond |= {"run": 8.0, "run, overhead": 5.5}
    assert record["beyond an empty process"] == beyond


@pytest.mark.parametrize(
    ("model_type", "status", "reason"),
    [
        ("esm", "exact", ""),
        ("xlnet", "refused", "projections that are no matrices"),
        ("longformer", "refused", "head counts kept elsewhere"),
        ("mamba", "no softmax attention", "no softmax attention"),
    ],
)
def test_coverage_examines_one_class(model_type, status, reason):
    row = benchmark("family_coverage").examine(model_type)
    assert row["status"] == status, row
    assert reason in row["reason"]
    assert (row["difference"] is not None and row["difference"] < 1e-10) == (status == "exact")


def test_exactness_measures_a_family(tmp_path):
    out = tmp_path / "exactness.json"
    assert benchmark("exactness").main(["--families", "bert", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"].values()
    assert row["reloaded_minus_pruned"] == 0
    assert row["zero_heads"] == ["ok"]


def test_the_record_of_exactness_is_that_of_todays_families():
    exactness = benchmark("exactness")
    rows = json.loads((BENCHMARKS / "records" / "exactness.json").read_text())["rows"]
    families = {family for name in registry.names() for family, _ in registry.get(name).families}
    assert set(rows) == families, "run `python benchmarks/exactness.py`"
    assert [family for family, row in rows.items() if not exactness.is_exact(row)] == []


@pytest.mark.parametrize("value", [None, ":8:1"])
def test_cuda_that_started_without_the_variable_is_refused(monkeypatch, value):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv(VARIABLE, WORKSPACE)
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    if value is None:
        monkeypatch.delenv(VARIABLE)
    else:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(RuntimeError, match="before CUDA starts"), deterministic():
        pass


@pytest.fixture(scope="module")
def scale():
    return benchmark("scale")


def test_a_cut_on_disk_equals_one_in_memory_and_both_say_what_they_held(
    scale, monkeypatch, tmp_path
):
    """Both run in this process; ``test_streaming.py`` runs the script in one of its own."""
    streaming, out = benchmark("streaming"), tmp_path / "streaming.json"

    def here(command, **_):
        return SimpleNamespace(stdout=json.dumps(streaming.cut(streaming.arguments(command[2:]))))

    monkeypatch.setattr(streaming, "subprocess", SimpleNamespace(run=here))
    sizes = "--layers 2 --width 64 --vocabulary 50 --shard 30000 --rounds 1"
    record = record_of(streaming, f"--work {tmp_path / 'work'} {sizes} --out {out}")
    assert [row["way"] for row in record["rows"]] == ["streamed", "loaded"]
    assert record["rows"][1]["equal"] is True
    assert record["shards"] > 1
    assert all(row["peak"] >= row["libraries"] > 10**7 for row in record["rows"])
    assert "equal byte for byte" in scale.streamed(tmp_path)
    record["rows"][1]["equal"] = False
    out.write_text(json.dumps(record))
    assert "DIFFER" in scale.streamed(tmp_path)


def test_the_paper_counts_what_is_measured(scale, tmp_path):
    """Parameters are compared inside; the bytes that autograd keeps are compared here."""
    sizes = "--shapes '4 x 256' --examples 2 --tokens 32 --rounds 1"
    record = record_of(scale, f"{sizes} --out {tmp_path / 'scale-cpu.json'}")
    rows = {row["way"]: row for row in record["rows"]}
    assert set(rows) == {"forward", "taylor", "leave_one_out"}
    assert rows["taylor"]["kept"] == pytest.approx(rows["taylor"]["kept_on_paper"], rel=0.03)
    assert rows["forward"]["flop"] < rows["taylor"]["flop"] < rows["leave_one_out"]["flop"]
    assert "| 4 x 256 | `taylor` |" in scale.checked(tmp_path)


def test_the_large_models_have_the_parameters_of_their_names(scale):
    assert [round(s.parameters / 1e9) for s in scale.LARGE] == [8, 71, 406]
    eight = scale.LARGE[0]
    rule_of_thumb = 2 * 512 * eight.parameters
    assert eight.forward(512) == pytest.approx(rule_of_thumb, rel=0.1)
    assert 1.9 < eight.taylor(512) / eight.forward(512) < 2.1
