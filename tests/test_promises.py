"""What is promised of speed and accuracy holds in the committed records."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from headprune.run import load_recipe
from tests.scripts import ROOT, benchmark, script

RECORDS = ROOT / "benchmarks" / "records"


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return found


def rows(found: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Those of a kind; none at all would let a promise hold of nothing."""
    some = [row for row in found["rows"] if wanted.items() <= row.items()]
    assert some, wanted
    return some


def test_a_third_of_the_heads_is_within_a_point_and_near_the_limit() -> None:
    found = record("tradeoff-sst2-cpu")
    assert (found["heads"], found["small"]) == (72, False)
    compared = rows(found, what="paired", way="surgeon + lstsq", kept=24, against="base")
    assert max(compared, key=lambda row: row["draws"])["difference"] >= -0.01
    speed = rows(found, what="speed", kept=24, batch=32, length=128)
    for row in speed:
        assert row["ratio"] >= 0.9 * row["limit"], row
    rows({"rows": speed}, dtype="float32", attention="sdpa", compiled=False)


def test_half_of_the_groups_are_half_of_the_cache() -> None:
    for row in rows(record("tradeoff-sst2-cpu"), what="kv"):
        before, after = row["bytes"]
        assert before == 2 * after > 0


def test_long_inputs_are_measured_with_half_of_the_heads_beside_their_limits() -> None:
    half = rows(record("tradeoff-sst2-cpu"), what="attention", kept=36)
    assert {row["length"] for row in half} & {512, 1024, 2048}
    for row in half:
        assert row["attention_limit"] == 2.0
        assert 1 < row["limit"] < row["attention_limit"]
        for part in ("alone", "model"):
            assert 1 < row[part]["low"] <= row[part]["ratio"] <= row[part]["high"]


def test_a_translator_loses_half_of_its_heads_within_half_a_point() -> None:
    found = record("translation-small-cpu")
    n_kept = sum(found["heads"].values()) // 2
    (half,) = rows(found, part="all", kept=n_kept, way="distilled", seed=0)
    assert half["test"]["drop"] <= 0.005
    # What the recipe does is what was measured.
    steps = load_recipe(ROOT / "recipes" / "translation.yaml").recover
    for step, measured in zip(steps, found["ways"]["distilled"], strict=True):
        does = {"method": step.method, "batch_size": step.batch_size, **step.settings}
        assert does == measured


@pytest.mark.parametrize("task", ["sst2", "digits"])
def test_every_peer_ran_or_has_its_error_in_the_table(task: str) -> None:
    found = record(f"peers-{task}")
    for peer in benchmark("peers/roster").PEERS.values():
        # What has rows of shares alone is in no record of heads.
        if task in peer.tasks and (peer.cuts or not peer.shares):
            for row in rows(found, peer=peer.name, seed=0):
                assert "error" in row or {"test", "speed"} <= row.keys(), peer.name


@pytest.mark.parametrize("file", sorted(path.stem for path in RECORDS.glob("peers-*.json")))
def test_every_peer_that_is_not_beaten_has_a_note_why_and_what_would_change_it(file: str) -> None:
    verdict = benchmark("peers/run").page.verdict
    names = sorted(path.stem for path in RECORDS.glob("peers-*.json"))
    found = dict(zip(names, verdict.with_noise_of_all(list(map(record, names))), strict=True))[file]
    lines = (ROOT / "docs" / "peers.md").read_text().splitlines()
    notes = [line for line in lines if line.startswith("- ")]
    assert not any(verdict.UNKNOWN in note for note in notes)
    compared = verdict.comparisons(found)
    assert compared
    for one in compared:
        peer, budget = one.line["peer"], verdict.budget(one.line["reference_kept"])
        amount = budget.removesuffix(" heads").removesuffix(" of the multiply-adds")
        if one.outcome == verdict.TIED:
            ties = [note for note in notes if note.startswith("- **Tied**")]
            assert any(verdict.tie(one) in note for note in ties), peer
        elif one.outcome != verdict.WON:
            reason = f": {verdict.why(found, one)}."
            assert "What would change it: " in reason
            beside = f" beside *{one.line['reference']}* with "
            explained = [note.removesuffix(reason) for note in notes if note.endswith(reason)]
            parts = [note.partition(beside) for note in explained]
            assert any(
                f"**{peer}**" in who and amount in re.split(", | and | heads| of the", budgets)
                for who, _, budgets in parts
            ), (peer, amount)


@pytest.mark.parametrize(
    ("task", "way", "asked", "draws", "speed", "quality"),
    [
        # 0.880 is the aim.
        ("sst2", "heads and neurons", 2.2, 4, 2.2, 0.878),
        ("sst2", "heads and neurons", 3.6, 3, 3.6, 0.870),
        ("sst2", "heads and neurons", 4.3, 3, 4.3, 0.862),
        # Within 1.5 points of the whole model's 0.9117.
        ("hwu64", "heads and neurons", 2.1, 3, 2.0, 0.8967),
        # 0.890 at twice the speed is the aim.
        ("sst2", "heads and neurons, then trained", 2.2, 4, 2.0, 0.885),
        ("sst2", "heads and neurons, then trained", 3.6, 3, 3.5, 0.880),
        ("sst2", "heads and neurons, then INT8", 3.6, 3, 4.5, 0.868),
        ("sst2", "heads and neurons, then INT8", 4.3, 3, 4.5, 0.868),
    ],
)
def test_one_budget_keeps_its_quality_at_its_speed(
    task: str, way: str, asked: float, draws: int, speed: float, quality: float
) -> None:
    found = rows(record(f"one-budget-{task}"), way=way, asked=asked)
    assert len(found) == draws
    assert statistics.fmean(row["ratio"] for row in found) >= speed
    assert statistics.fmean(row["test"] for row in found) >= quality


def test_heads_alone_keep_their_quality_at_their_speed() -> None:
    headline = script(ROOT / "docs" / "figures.py").headline
    quality, speeds = headline.read(RECORDS)
    accuracies = headline.pipelines.cells(quality, "test")[headline.CHOSEN][14]
    assert len(accuracies) == 3
    assert statistics.fmean(accuracies) >= 0.874
    assert speeds[14]["ratio"] >= 1.47


@pytest.mark.parametrize(("asked", "quality"), [(2.2, 0.875), (3.6, 0.868), (4.3, 0.855)])
def test_the_readmes_command_reaches_the_speed_that_is_asked_for(
    asked: float, quality: float
) -> None:
    """By three runs whose latency tables were corrected; one run may miss it on a busy machine."""
    found = rows(record("by-command-sst2"), asked=asked)
    assert [row["draw"] for row in found] == [0, 1, 2]
    assert statistics.fmean(row["ratio"] for row in found) >= 0.95 * asked
    assert statistics.fmean(row["test"] for row in found) >= quality


#: Speeds that were asked for and that cuts of heads and neurons miss: they are slower than 0.95 of
#: the prediction, as docs/one-budget.md says.
MISSED = {
    "one-budget-digits": {1.2, 1.5, 1.8},
    "one-budget-digits-epyc": {1.5, 1.8},
    "one-budget-trec-epyc": {2.2, 3.0, 3.6},
}


@pytest.mark.parametrize("path", sorted(RECORDS.glob("one-budget-*.json")), ids=lambda p: p.stem)
def test_latency_tables_predict_the_speed_of_one_budget(path: Path) -> None:
    measured, predicted = defaultdict(list), defaultdict(list)
    for cut in rows(record(path.stem), way="heads and neurons"):
        if "ratio" in cut:
            measured[cut["asked"]].append(cut["ratio"])
            predicted[cut["asked"]].append(cut["predicted"])
    assert measured
    missed = {
        asked
        for asked, ratios in measured.items()
        if statistics.fmean(ratios) < 0.95 * statistics.fmean(predicted[asked])
    }
    assert missed == MISSED.get(path.stem, set())


def test_the_package_is_imported_within_its_time() -> None:
    found, what = record("startup"), "import headprune"
    assert statistics.median(found["seconds"][what]) < found["aim"][what] == 0.15


#: Cut models that are below 0.97 of the speed of one built small, and their batch sizes. Both run
#: the same matrix products; BERT's code in Transformers takes more beside them (docs/tradeoff.md).
SLOWER_THAN_SMALL = {
    "native-cpu": {("bert", 1)},
    "native-neurons-cpu": {("bert, with neurons", batch) for batch in (1, 8, 32)},
}


@pytest.mark.parametrize("name", SLOWER_THAN_SMALL)
def test_pruned_models_reach_those_that_were_built_small(name: str) -> None:
    slower = set()
    for row in record(name)["rows"]:
        if "free" not in row["subject"] and row["speed"]["ratio"] < 0.97:
            slower.add((row["subject"], row["batch"]))
            # Not shown to take more milliseconds beyond the native one's than before the cut.
            extra = row["speed"]["extra_seconds"]["low"]
            assert extra <= row["uncut"]["extra_seconds"]["high"], row
    assert slower == SLOWER_THAN_SMALL[name]
