"""The benchmarks of scale, run small: a cut on disk, shared processes, and the paper held against
the machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import benchmark


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    return benchmark("scale")


def test_a_cut_on_disk_equals_one_in_memory_and_both_say_what_they_held(
    scale: ModuleType, tmp_path: Path
) -> None:
    sizes = [
        "--layers",
        "2",
        "--width",
        "64",
        "--vocabulary",
        "50",
        "--shard",
        "30000",
        "--rounds",
        "1",
    ]
    out = benchmark("streaming").main(
        ["--work", str(tmp_path / "work"), *sizes, "--out", str(tmp_path / "streaming.json")]
    )
    record = json.loads(out.read_text())
    assert [row["way"] for row in record["rows"]] == ["streamed", "loaded"]
    assert record["rows"][1]["equal"] is True
    assert record["shards"] > 1
    assert all(row["peak"] > row["libraries"] > 10**7 for row in record["rows"])
    said = scale.streamed(tmp_path)
    assert "equal byte for byte" in said
    record["rows"][1]["equal"] = False
    out.write_text(json.dumps(record))
    assert "DIFFER" in scale.streamed(tmp_path)


def test_the_paper_counts_what_is_measured(scale: ModuleType, tmp_path: Path) -> None:
    """Parameters are compared inside; bytes that autograd keeps are the paper's, and times have the
    same order."""
    sizes = ["--shapes", "4 x 256", "--examples", "2", "--tokens", "32", "--rounds", "1"]
    record = json.loads(scale.main([*sizes, "--out", str(tmp_path / "scale-cpu.json")]).read_text())
    rows = {row["way"]: row for row in record["rows"]}
    assert set(rows) == {"forward", "taylor", "leave_one_out"}
    assert rows["taylor"]["kept"] == pytest.approx(rows["taylor"]["kept_on_paper"], rel=0.03)
    assert rows["forward"]["flop"] < rows["taylor"]["flop"] < rows["leave_one_out"]["flop"]
    assert "| 4 x 256 | `taylor` |" in scale.checked(tmp_path)


def test_the_large_models_have_the_parameters_of_their_names(scale: ModuleType) -> None:
    assert [round(s.parameters / 1e9) for s in scale.LARGE] == [8, 71, 406]
    eight = scale.LARGE[0]
    assert eight.forward(512) == pytest.approx(
        2 * 512 * eight.parameters, rel=0.1
    )  # the rule of thumb
    assert 1.9 < eight.taylor(512) / eight.forward(512) < 2.1


def test_the_tables_are_for_any_machine(
    scale: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    scale.main(["--paper", "--rate", "2e14"])
    slow = capsys.readouterr().out
    scale.main(["--paper", "--rate", "4e14"])
    fast = capsys.readouterr().out
    assert slow != fast
    assert "| 405B |" in fast
