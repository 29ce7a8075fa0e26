"""The benchmarks of scoring: scoring_cost.py, scorers.py and learned_gates.py, run small."""

import json
import shlex

import numpy as np
import pytest
import torch

import headprune as hp
from headprune.bench.quality import evaluate
from tests.benchmark_runs import encoder_study, page_of, record_of
from tests.scripts import benchmark

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cost():
    return benchmark("scoring_cost")


@pytest.fixture(scope="module")
def measured(cost, tmp_path_factory):
    sizes = "--width 12 --middle 12 --vocabulary 50 --tokens 4 --batch-tokens 8"
    amounts = "--rounds 2 --batches 1 --ablation-rounds 1 --small 1 --largest 1 --threads 1"
    out = tmp_path_factory.mktemp("cost") / "record.json"
    more = f"--ablation-tokens 4 --examples 8 --out {out}"
    threads, real = torch.get_num_threads(), cost.encoder
    with pytest.MonkeyPatch.context() as patched:
        # A sixth of the layers.
        patched.setattr(cost, "encoder", lambda layers, *given: real(layers // 6, *given))
        found = record_of(cost, f"{sizes} {amounts} {more}")
    assert torch.get_num_threads() == threads
    return found


def test_ratios_are_those_of_the_rounds(measured):
    assert [row["layers"] for row in measured["first_order"]] == [1, 2]
    for row in measured["first_order"]:
        seconds = {name: np.array(values) for name, values in row["seconds"].items()}
        assert {len(values) for values in seconds.values()} == {2}
        ratios = (seconds["taylor"] - seconds["once"]) / seconds["forward + full backward"]
        assert row["ratios"]["taylor / full"]["median"] == pytest.approx(float(np.median(ratios)))
        whole = seconds["taylor + fisher + taylor2"] / seconds["taylor"]
        found = row["ratios"]["three / taylor, whole"]["p90"]
        assert found == pytest.approx(float(np.percentile(whole, 90)))
    for row in measured["leave_one_out"]:
        (fast,), (loop,) = row["seconds"]["fast"], row["seconds"]["hp.gated, a share of heads"]
        assert row["ratios"]["hp.gated loop / fast"]["median"] == pytest.approx(4 * loop / fast)
        (once,) = row["seconds"]["once, at most"]
        assert row["ratios"]["once / fast"]["median"] == pytest.approx(once / fast)
    for row in measured["memory"]:
        expected = row["bytes"]["taylor"] / row["bytes"]["frozen forward + backward"]
        assert row["ratios"]["taylor / frozen"] == expected
    (row,) = measured["throughput"]
    for name in ("taylor", "forward"):
        rate = row["ratios"][f"{name}, examples a second"]["median"]
        assert rate == pytest.approx(float(np.median(8 / np.array(row["seconds"][name]))))


def test_all_ways_of_ablation_agree(measured):
    rows = measured["leave_one_out"]
    assert sum(row["saturated"] for row in rows) == 1
    for row in rows:
        assert set(row["largest_difference"]) == {"naive", "hp.gated loop"}
        assert all(gap < 1e-5 for gap in row["largest_difference"].values())


def test_the_frozen_pass_reaches_the_embeddings_and_thaws_the_model(cost):
    model = cost.encoder(6, 12, cost.arguments(["--vocabulary", "50", "--tokens", "4"]), CPU)
    outputs = []
    embeddings = model.get_input_embeddings()
    watch = embeddings.register_forward_hook(lambda m, i, out: outputs.append(out))
    cost.frozen_pass(model, [{"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])}])
    watch.remove()
    (output,) = outputs
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
def test_saturation(cost, monkeypatch, per_call, expected):
    times = iter([{"forward": np.full(8, per_call[size])} for size in sorted(per_call)])
    monkeypatch.setattr(cost, "interleaved", lambda *_: next(times))
    args = cost.arguments(["--largest", "8", "--vocabulary", "50"])
    found, rates = cost.saturation(torch.nn.Linear(1, 1), args, 4, CPU)
    assert found == expected
    assert rates == {str(size): size / seconds for size, seconds in per_call.items()}


def test_every_way_is_first_in_a_round(cost):
    calls = []
    ways = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = cost.interleaved(ways, 3, CPU)
    assert "".join(calls) == "abcbcacab"
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.fixture(scope="module")
def scorers():
    return benchmark("scorers")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The arguments of a study of questions whose label is a word in them."""
    return f"{encoder_study(tmp_path_factory.mktemp('scorers'), 'trec')} --calibration 20"


@pytest.fixture(scope="module")
def command(study):
    return f"{study} --budgets 6 3 --seeds 2 --few 0.1"


def test_rows_are_draws_and_accuracies_those_of_cut_models(scorers, command, tmp_path):
    from transformers import AutoTokenizer

    names = "--scorers taylor shapley magnitude"
    record = record_of(scorers, f"{command} --out {tmp_path / 'scorers-trec.json'} {names}")
    keys = [(row["scorer"], row["seed"], row["examples"]) for row in record["rows"]]
    few = [("shapley", 0, 3), ("shapley", 1, 3)]
    assert keys == [("taylor", 0, 20), ("taylor", 1, 20), *few, ("magnitude", 0, 0)]
    assert (record["judged"]["n"], record["heads"]) == (40, 8)
    args = scorers.arguments(shlex.split(command))
    (folder,) = args.work.glob("fine-tuned-*")
    model, tokenizer = hp.from_pretrained(folder), AutoTokenizer.from_pretrained(args.model)
    judged = [json.loads(line) for line in (args.data / "test.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in judged]
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    batch["labels"] = torch.tensor([row["label"] for row in judged])
    assert record["judged"]["accuracy"] == evaluate(model, [dict(batch)]).value
    hp.prune_(model, hp.select(hp.score(model, None, "magnitude"), hp.Budget(keep_heads=3)))
    assert record["rows"][-1]["accuracy"]["3"] == evaluate(model, [dict(batch)]).value
    accuracies = " | ".join(f"{value:.3f}" for value in record["rows"][-1]["accuracy"].values())
    page = page_of(scorers, tmp_path, scorers.PAGE)
    assert f"| `magnitude` | - | 1 | {accuracies} |" in page


def test_learned_gates_and_one_shot_scores_train_equally_many_steps(study, tmp_path, monkeypatch):
    learned = benchmark("learned_gates")
    steps = []
    original = torch.optim.AdamW.step
    step = lambda *a, **k: (steps.append("step"), original(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    few = f"{study} --budgets 6 3 --seeds 1 --out {tmp_path / 'learned-gates-trec.json'}"
    methods = "--methods fisher hard_concrete"
    record = record_of(learned, f"{few} --steps 3 {methods}")
    rows = record["rows"]
    assert [(row["method"], row["kept"], sum(row["heads"])) for row in rows] == [
        ("all heads", 8, 8),
        ("fisher", 6, 6),
        ("hard_concrete", 6, 6),
        ("fisher", 3, 3),
        ("hard_concrete", 3, 3),
    ]
    assert [row["untrained"] is None for row in rows] == [True, False, True, False, True]
    steps.clear()
    again = record_of(learned, f"{few} --steps 3 {methods} subset_topk")["rows"]
    assert len(steps) == 2 * 3, "only what is missing"
    assert again[:5] == rows
    cells = f"| `subset_topk` | 1 | {again[5]['accuracy']:.3f} |"
    assert cells in page_of(learned, tmp_path, learned.PAGE)
