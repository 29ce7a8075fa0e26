"""The benchmarks of scoring, run from end to end on models and data made here, and what they
compute by hand."""

from __future__ import annotations

import json
import random
import statistics
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import headprune as hp
from headprune.bench.quality import evaluate
from tests.scripts import WORDS, benchmark, tiny_encoder

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------
# scoring_cost.py


@pytest.fixture(scope="module")
def cost() -> ModuleType:
    return benchmark("scoring_cost")


@pytest.fixture(scope="module")
def measured(cost: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes = [
        "--width",
        "12",
        "--middle",
        "12",
        "--vocabulary",
        "50",
        "--tokens",
        "4",
        "--batch-tokens",
        "8",
    ]
    amounts = [
        "--rounds",
        "2",
        "--batches",
        "1",
        "--ablation-rounds",
        "1",
        "--small",
        "1",
        "--largest",
        "1",
    ]
    out = tmp_path_factory.mktemp("cost") / "record.json"
    threads = torch.get_num_threads()
    more = ["--ablation-tokens", "4", "--threads", "1", "--examples", "8", "--out", str(out)]
    found: dict[str, Any] = json.loads(cost.main([*sizes, *amounts, *more]).read_text())
    assert torch.get_num_threads() == threads
    return found


def test_the_record_says_where_and_what(measured: dict[str, Any]) -> None:
    assert measured["hardware"]["threads"] == 1
    assert {"torch", "transformers", "headprune"} <= set(measured["versions"])
    assert "git_commit" in measured
    shapes = [
        (row["layers"], row["heads"], row["width"], row["batch"]) for row in measured["first_order"]
    ]
    assert shapes == [(6, 12, 12, 2), (12, 12, 12, 2)]


def test_ratios_are_those_of_the_rounds(measured: dict[str, Any]) -> None:
    for row in measured["first_order"]:
        seconds = {name: np.array(values) for name, values in row["seconds"].items()}
        assert {len(values) for values in seconds.values()} == {2}
        expected = (seconds["taylor"] - seconds["once"]) / seconds["forward + full backward"]
        assert row["ratios"]["taylor / full"]["median"] == pytest.approx(float(np.median(expected)))
        whole = seconds["taylor + fisher + taylor2"] / seconds["taylor"]
        assert row["ratios"]["three / taylor, whole"]["p90"] == pytest.approx(
            float(np.percentile(whole, 90))
        )
    for row in measured["leave_one_out"]:
        (fast,), (loop,) = row["seconds"]["fast"], row["seconds"]["hp.gated, a share of heads"]
        assert row["ratios"]["hp.gated loop / fast"]["median"] == pytest.approx(4 * loop / fast)
        assert row["ratios"]["once / fast"]["median"] == pytest.approx(
            row["seconds"]["once, at most"][0] / fast
        )


def test_all_ways_of_ablation_agree(measured: dict[str, Any]) -> None:
    rows = measured["leave_one_out"]
    assert sum(row["saturated"] for row in rows) == 1
    for row in rows:
        assert set(row["largest_difference"]) == {"naive", "hp.gated loop"}
        assert all(gap < 1e-5 for gap in row["largest_difference"].values())


def test_memory_counts_what_is_alive_at_once(cost: ModuleType, measured: dict[str, Any]) -> None:
    one = 1000 * 1000 * 4
    assert cost.peak(lambda: [len(torch.empty(1000, 1000)) for _ in range(3)], CPU) == one
    assert cost.peak(lambda: [torch.empty(1000, 1000) for _ in range(3)], CPU) == 3 * one
    for row in measured["memory"]:
        n_bytes = row["bytes"]
        assert (
            row["ratios"]["taylor / frozen"]
            == n_bytes["taylor"] / n_bytes["frozen forward + backward"]
        )


def test_throughput_is_that_of_all_examples(measured: dict[str, Any]) -> None:
    (row,) = measured["throughput"]
    assert (row["precision"], row["batch"] * row["batches"]) == ("fp32", 8)
    for name in ("taylor", "forward"):
        rate = row["ratios"][f"{name}, examples a second"]["median"]
        assert rate == pytest.approx(float(np.median(8 / np.array(row["seconds"][name]))))
        assert row["waits"][name] is None  # no GPU


def test_waits_are_those_of_the_run_not_of_the_mode(
    cost: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch warns once a process that its mode does not detect all synchronizing operations: that
    is no wait."""
    about = (
        "Synchronization debug mode is a prototype feature and does not yet detect all"
        " synchronizing operations"
    )
    modes: list[Any] = []

    def switch(mode: Any) -> None:
        if not modes:
            warnings.warn(about, stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switch)

    def run() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    assert [cost.waits(run, torch.device("cuda")) for _ in range(2)] == [2, 2]
    assert modes == ["warn", 0] * 2
    assert cost.waits(run, CPU) is None


def test_the_frozen_pass_reaches_the_embeddings_and_thaws_the_model(cost: ModuleType) -> None:
    model = cost.encoder(6, 12, cost.arguments(["--vocabulary", "50", "--tokens", "4"]), CPU)
    outputs: list[torch.Tensor] = []
    embeddings = model.get_input_embeddings()
    watch = embeddings.register_forward_hook(lambda m, i, out: outputs.append(out))
    cost.frozen_pass(model, [{"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])}])
    watch.remove()
    (output,) = outputs
    assert output.grad is not None
    assert bool(output.grad.any())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not embeddings._forward_hooks


@pytest.mark.parametrize(
    ("per_call", "expected"),
    [
        ({1: 1.0, 2: 1.2, 4: 2.0, 8: 3.9}, 4),  # 1, 1.67, 2, 2.05 a second
        ({1: 1.0, 2: 1.9}, 1),  # no gain from the start
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 8),  # still growing where the search ends
    ],
)
def test_saturation(
    cost: ModuleType, monkeypatch: pytest.MonkeyPatch, per_call: dict[int, float], expected: int
) -> None:
    sizes = iter(sorted(per_call))
    monkeypatch.setattr(
        cost, "interleaved", lambda *a: {"forward": np.full(8, per_call[next(sizes)])}
    )
    args = cost.arguments(["--largest", "8", "--vocabulary", "50"])
    found, rates = cost.saturation(torch.nn.Linear(1, 1), args, 4, CPU)
    assert found == expected
    assert rates == {str(size): size / seconds for size, seconds in per_call.items()}


def test_rounds_turn(cost: ModuleType) -> None:
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = cost.interleaved(ways, 3, CPU)
    assert "".join(calls) == "abcbcacab"
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3, "c": 3}


# ------------------------------------------------------------------------------------------------
# scorers.py


@pytest.fixture(scope="module")
def scorers() -> ModuleType:
    return benchmark("scorers")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments: a tiny BERT with a tokenizer, questions whose label is a word in them, small
    amounts."""
    folder = tmp_path_factory.mktemp("scorers")
    tiny_encoder(folder)
    drawing = random.Random(0)
    for split, count in (("train", 60), ("validation", 12), ("test", 40)):
        texts = [drawing.choices(WORDS, k=drawing.randint(3, 7)) for _ in range(count)]
        rows = [{"text": " ".join(text), "label": WORDS.index(text[0]) % 3} for text in texts]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    where = [
        "--task",
        "trec",
        "--data",
        str(folder),
        "--work",
        str(folder),
        "--model",
        str(folder / "model"),
    ]
    return [*where, "--budgets", "6", "3", "--seeds", "2", "--calibration", "20", "--few", "0.1"]


def run(scorers: ModuleType, given: list[str], out: Path, *names: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        scorers.main([*given, "--out", str(out), "--scorers", *names]).read_text(encoding="utf-8")
    )
    return found


def test_rows_are_draws_and_accuracies_those_of_cut_models(
    scorers: ModuleType, given: list[str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    record = run(scorers, given, tmp_path / "record.json", "taylor", "shapley", "magnitude")
    keys = [(row["scorer"], row["seed"], row["examples"]) for row in record["rows"]]
    assert keys == [
        ("taylor", 0, 20),
        ("taylor", 1, 20),
        ("shapley", 0, 3),
        ("shapley", 1, 3),
        ("magnitude", 0, 0),
    ]
    assert record["judged"]["n"] == 40
    assert record["heads"] == 8
    (folder,) = Path(given[5]).glob("fine-tuned-*")
    model = hp.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(Path(given[5]) / "model")
    judged = [json.loads(line) for line in (Path(given[3]) / "test.jsonl").read_text().splitlines()]
    batch = tokenizer([row["text"] for row in judged], padding=True, return_tensors="pt")
    batch["labels"] = torch.tensor([row["label"] for row in judged])
    batches = [{k: v for k, v in batch.items() if k != "token_type_ids"}]
    assert record["judged"]["accuracy"] == evaluate(model, batches).value
    plan = hp.select(hp.score(model, None, "magnitude"), hp.Budget(keep_heads=3))
    hp.prune_(model, plan)
    assert record["rows"][-1]["accuracy"]["3"] == evaluate(model, batches).value


def test_a_run_goes_on_after_the_last_row(
    scorers: ModuleType, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "record.json"
    done: list[tuple[str, int]] = []
    original = scorers.measured

    def two_only(*args: Any) -> Any:
        if len(done) == 2:
            raise InterruptedError
        done.append(args[3:5])
        return original(*args)

    run(scorers, given, tmp_path / "other.json", "magnitude")  # leaves the trained model
    monkeypatch.setattr(scorers, "measured", two_only)
    monkeypatch.setattr(hp, "recover_", lambda *a: pytest.fail("trained again"))
    with pytest.raises(InterruptedError):
        run(scorers, given, out, "taylor", "fisher")
    assert [row["scorer"] for row in json.loads(out.read_text())["rows"]] == ["taylor", "taylor"]
    monkeypatch.setattr(scorers, "measured", original)
    before = json.loads(out.read_text())["rows"]
    after = run(scorers, given, out, "taylor", "fisher")["rows"]
    assert after[:2] == before
    assert [(row["scorer"], row["seed"]) for row in after[2:]] == [("fisher", 0), ("fisher", 1)]
    with pytest.raises(SystemExit, match="give another --out"):
        scorers.main([*given, "--out", str(out), "--budgets", "5"])


def test_a_refusal_is_a_row_and_is_tried_again(
    scorers: ModuleType, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "scorers-trec.json"

    def refuse(self: object, problem: object) -> None:
        raise hp.HeadPruneError("taylor", "another model", "this one")

    with monkeypatch.context() as patched:
        patched.setattr(hp.scoring.Taylor, "estimate", refuse)
        record = run(scorers, given, out, "taylor", "random")
    assert [row.get("accuracy") for row in record["rows"][:2]] == [None, None]
    assert len(record["rows"]) == 12
    scorers.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    assert "`taylor` refused: " in (tmp_path / scorers.PAGE).read_text()
    record = run(scorers, given, out, "taylor")
    assert len(record["rows"]) == 12
    assert all("accuracy" in row for row in record["rows"])


def test_the_page_and_the_figure_are_computed_from_the_record(
    scorers: ModuleType, tmp_path: Path
) -> None:
    draws = {
        "low": [(0.5, 0.4), (0.6, 0.5)],
        "high": [(0.8, 0.7), (0.9, 0.65)],
        "once": [(0.55, 0.5)],
    }
    rows = [
        {"scorer": name, "seed": seed, "examples": 9, "accuracy": {"6": six, "3": three}}
        for name, found in draws.items()
        for seed, (six, three) in enumerate(found)
    ]
    judged = {"rows": "test", "n": 100, "accuracy": 0.9}
    about = {
        "task": "trec",
        "heads": 8,
        "budgets": [6, 3],
        "epochs": 1.0,
        "training_rows": 60,
        "judged": judged,
    }
    (tmp_path / "scorers-trec.json").write_text(json.dumps({**about, "rows": rows}))
    scorers.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    text = (tmp_path / scorers.PAGE).read_text()
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == [
        "high",
        "once",
        "low",
    ]  # by the mean over budgets
    spread = statistics.stdev([0.8, 0.9])
    assert lines[0] == f"| `high` | 9 | 2 | 0.850 ± {spread:.3f} | 0.675 ± 0.035 |"
    assert lines[1] == "| `once` | 9 | 1 | 0.550 | 0.500 |"
    assert "0.900 ± 0.030" in text
    first = (tmp_path / scorers.PICTURE).read_bytes()
    scorers.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    assert (tmp_path / scorers.PICTURE).read_bytes() == first
    assert all(word in first.decode() for word in ("high", "once", "6 of 8 heads"))


def test_the_committed_page_is_that_of_the_records(scorers: ModuleType, tmp_path: Path) -> None:
    if not list(scorers.RECORDS.glob("scorers-*.json")):
        pytest.skip("no record of benchmarks/scorers.py yet")
    scorers.main(["--figure", "--docs", str(tmp_path)])
    fresh, page = tmp_path / scorers.PAGE, ROOT / "docs" / scorers.PAGE
    assert page.read_text() == fresh.read_text(), "run `python benchmarks/scorers.py --figure`"
    assert (ROOT / "docs" / scorers.PICTURE).is_file()


def test_arguments_that_are_missing_are_named(
    scorers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scorers.arguments(["--task", "sst2"])
    assert "--task, --data and --work must be given, or --figure" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# learned_gates.py


@pytest.fixture(scope="module")
def learned() -> ModuleType:
    return benchmark("learned_gates")


def test_learned_gates_and_one_shot_scores_train_equally_many_steps(
    learned: ModuleType, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "learned-gates-trec.json"
    few = [
        *given[:8],
        "--budgets",
        "6",
        "3",
        "--seeds",
        "1",
        "--calibration",
        "20",
        "--steps",
        "3",
        "--out",
        str(out),
    ]
    steps: list[str] = []
    original = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda *a, **k: (steps.append("step"), original(*a, **k))[1]
    )
    methods = ["fisher", "hard_concrete"]
    record = json.loads(learned.main([*few, "--methods", *methods]).read_text())
    del steps[
        : len(steps) - 15
    ]  # those of the fine-tuning that both begin with, if it was not there yet
    assert len(steps) == (1 + 2 * 2) * 3
    assert [(row["method"], row["kept"], sum(row["heads"])) for row in record["rows"]] == [
        ("all heads", 8, 8),
        ("fisher", 6, 6),
        ("hard_concrete", 6, 6),
        ("fisher", 3, 3),
        ("hard_concrete", 3, 3),
    ]
    assert [row["untrained"] is None for row in record["rows"]] == [True, False, True, False, True]
    assert all(0 <= row["accuracy"] <= 1 for row in record["rows"])
    steps.clear()
    again = json.loads(learned.main([*few, "--methods", *methods, "subset_topk"]).read_text())
    assert len(steps) == 2 * 3, "only what is missing"
    assert again["rows"][:5] == record["rows"]
    with pytest.raises(SystemExit, match="record of another training"):
        learned.main([*few[:-4], "--steps", "4", "--out", str(out)])
    learned.main(["--figure", "--records", str(tmp_path), "--docs", str(tmp_path)])
    text = (tmp_path / learned.PAGE).read_text()
    assert f"The whole model after 3 steps: {record['rows'][0]['accuracy']:.3f}." in text
    first = record["rows"][1]
    assert f"| `fisher` | 1 | {first['accuracy']:.3f} ({first['untrained']:.3f}) |" in text
    assert f"| `subset_topk` | 1 | {again['rows'][5]['accuracy']:.3f} |" in text
    assert "3 steps of 32 examples; judged on 40 test rows" in text


def test_the_committed_page_of_learned_gates_is_that_of_the_records(
    learned: ModuleType, tmp_path: Path
) -> None:
    if not list(learned.RECORDS.glob("learned-gates-*.json")):
        pytest.skip("no record of benchmarks/learned_gates.py yet")
    learned.main(["--figure", "--docs", str(tmp_path)])
    page = ROOT / "docs" / learned.PAGE
    assert page.read_text() == (tmp_path / learned.PAGE).read_text(), (
        "run `python benchmarks/learned_gates.py --figure`"
    )
