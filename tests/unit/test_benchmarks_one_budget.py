"""The study of heads and neurons under one budget of speed, on the tiny digits."""

import json
import sys

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import headprune as hp
from tests.benchmark_runs import TINY_DIGITS, page_of, record_of
from tests.scripts import benchmark
from tests.steady_clock import steady_levels


def test_what_one_machine_judges_another_one_times(tmp_path, monkeypatch):
    """What is trained stands beside a smaller architecture."""
    study = benchmark("one_budget")
    page = sys.modules["one_budget_page"]
    # A latency table that does not depend on the machine; no plan is a thousand times as fast.
    monkeypatch.setattr(hp.bench, "latency_table", steady_levels)
    command = (
        f"--task digits --data {tmp_path} --work {tmp_path} --out {tmp_path}/one-budget-digits.json"
        f" --calibration 24 --set {TINY_DIGITS} --seconds 0.01 --batch 2 --speedups 1.5 1000 --train"
    )
    tables = tmp_path / "tables"
    with pytest.raises(SystemExit, match="--step table"):
        study.main([*command.split(), "--step", "judge", "--tables", str(tables)])
    tables.mkdir()
    study.main([*command.split(), "--step", "table", "--tables", str(tables)])
    judging = f"{command} --step judge --tables {tables}"
    first = study.main([*judging.split(), "--ways", page.SMALLER])
    assert [row["way"] for row in json.loads(first.read_text())["rows"]] == [page.SMALLER]
    judged = record_of(study, judging)["rows"]
    assert all("test" in row and "ratio" not in row for row in judged)
    # A run that is stopped keeps the turns that were timed; the next one goes on.
    answers = iter([False, True])
    with monkeypatch.context() as patched:
        patched.setattr(study.studies, "clock", lambda args: lambda: next(answers))
        stopped = record_of(study, f"{command} --step time")["rows"]
    assert [len(row["turns"]) for row in stopped if "turns" in row] == [1]
    speed, calls = study._speed, []
    monkeypatch.setattr(study, "_speed", lambda *given: calls.append(1) or speed(*given))
    timed = record_of(study, f"{command} --step time")
    shapes = {page.shape_of(row) for row in timed["rows"]}
    assert len(calls) == len(shapes) * study.TURNS - 1
    assert not any("turns" in row for row in timed["rows"])
    assert timed["timed"]["hardware"]["device"] == "cpu"
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in timed["rows"])
    untimed = [{k: row[k] for k in old} for row, old in zip(timed["rows"], judged, strict=True)]
    assert untimed == judged
    rows = {row["way"]: row for row in timed["rows"]}
    assert list(rows) == [*page.TIMES_OF_SMALLER, page.BOTH, *page.TIMES, page.HEADS]
    both, alone = rows[page.BOTH], rows[page.HEADS]
    assert both["predicted"] >= 1.5
    # Every projection that lost something is refitted: of attention and of feed-forwards.
    assert both["projections"] == len(both["heads"]) + len(both["neurons"])
    assert alone["predicted"] >= 1.5
    assert len(set(alone["neurons"])) == 1, "all are kept"
    assert sum(both["heads"]) >= sum(alone["heads"])
    cut, trained, smaller = both, rows[page.TRAINED], rows[page.SMALLER]
    assert cut["ratio"] == trained["ratio"], "one shape is timed once"
    assert (trained["heads"], trained["neurons"]) == (cut["heads"], cut["neurons"])
    assert "train" not in cut["seconds"]
    assert len(smaller["heads"]) <= len(cut["heads"])
    assert len({*smaller["neurons"]}) == 1, "all layers are alike"
    assert sum(smaller["neurons"]) < 2 * smaller["width"], "fewer or narrower layers"
    cells = f"| {page.BOTH} | 1.5 | {both['predicted']:.2f} |"
    text = page_of(study, tmp_path, page.PAGE)
    assert cells in text
    assert "- Asked 1.5, longer: " in text
    # The same cut at other batch sizes; an image has one length.
    shapes = record_of(study, f"{command} --step shapes")["shapes"]
    assert [(row["batch"], row["length"]) for row in shapes["rows"]] == [
        (size, both["length"]) for size in study.BATCHES
    ]
    calls.clear()
    record_of(study, f"{command} --step shapes")
    assert not calls, "all are there"
    assert "| length | batch | asked 1.5 |" in page_of(study, tmp_path, page.PAGE)


@pytest.mark.slow
def test_a_model_in_int8_is_called_as_it_is_and_answers_almost_alike():
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 6}
    torch.manual_seed(0)
    config = BertConfig(**sizes, num_hidden_layers=2, vocab_size=32, num_labels=3)
    model = BertForSequenceClassification(config).eval()
    hp.prune_heads_(model, {0: [1, 2], 1: [0]})
    batch = {"input_ids": torch.randint(32, (4, 9)), "attention_mask": torch.ones(4, 9).long()}
    labels = torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        whole = model(**batch, labels=labels)
        rounded = benchmark("in_int8").InInt8(model, batch)(**batch, labels=labels)
    difference = (rounded.logits - whole.logits).abs().max()
    assert 0 < difference < 0.05 * whole.logits.abs().max()
    assert rounded.loss.item() == pytest.approx(whole.loss.item(), rel=0.02)
