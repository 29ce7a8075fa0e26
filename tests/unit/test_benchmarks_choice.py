"""Studies of the scorer "auto" on the tiny digits: regret.py, choice_cost.py, choice_intervals.py."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.benchmark_runs import TINY_DIGITS, page_of, record_of
from tests.scripts import benchmark


@pytest.fixture(scope="module")
def regret():
    return benchmark("regret")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all studies here: the digits are learned once."""
    return tmp_path_factory.mktemp("digits")


def digits(folder, out):
    """The arguments of a study of the digits."""
    where = f"--task digits --data {folder} --work {folder} --out {folder / out}"
    return f"{where} --calibration 24 --set {TINY_DIGITS}"


def test_regret_has_the_cell_that_auto_took_and_a_run_goes_on(regret, folder):
    few = f"{digits(folder, 'regret-digits.json')} --candidates taylor obs --refits lstsq"
    (row,) = record_of(regret, f"{few} --shares 0.5")["rows"]
    assert set(row["cells"]) == {"taylor", "obs", "random"}
    assert len(row["cells"]["random"]["draws"]) == 2
    taken = row["cells"][row["auto"]]
    assert (taken["low"], taken["high"]) == (0, 0)
    assert row["margin"] == max(0, *(-row["cells"][name]["low"] for name in ("taylor", "obs")))
    # A tenth of the heads is fewer than one a layer, and is passed over.
    again = record_of(regret, f"{few} --shares 0.5 0.25 0.1")["rows"]
    assert again[0] == row
    assert [r["share"] for r in again] == [0.5, 0.25]
    assert "## Tasks that choose: digits" in page_of(regret, folder, regret.PAGE)


def record(task, metric, whole, rows, took):
    """A record of one share and refit; a row per draw."""
    made = []
    for draw, (row, auto) in enumerate(zip(rows, took, strict=True)):
        cells = {}
        for name, value in row.items():
            loss = 1.0 + (name != auto)
            cells[name] = {"test": value, "held_out": loss, "low": loss - 1, "high": loss - 1}
        about = {"tuned": 0, "training": "CPU 0", "share": 1 / 3, "refit": "lstsq", "draw": draw}
        made.append({**about, "cells": cells, "auto": auto, "against": auto})
    judged = {"0": {"metric": metric, "test": whole, "n": 9}}
    return {"task": task, "calibration": 8, "whole": judged, "rows": made}


def test_regret_is_taken_to_the_best_mean(regret):
    rows = [{"taylor": 0.8, "obs": 0.7, "random": 0.5}, {"taylor": 0.8, "obs": 0.86, "random": 0.6}]
    found = regret.regrets([record("trec", "accuracy", 0.9, rows, ["taylor", "obs"])])
    at = {name.partition(",")[0]: values["trec", 0.3333] for name, values in found.items()}
    assert at == pytest.approx({"auto": 0.0, "taylor": 3.0, "obs": 5.0, "random": 28.0})


def test_auto_takes_by_its_present_rule_whatever_it_took(regret):
    def cell(loss, half):
        return {"held_out": loss, "low": loss - 1 - half, "high": loss - 1 + half}

    def taken(**cells):
        return regret.taken({"cells": cells, "against": "obs"}, {"task": "trec", "calibration": 50})

    # Intervals are some two standard errors wide to each side.
    wide, near = cell(1.08, 0.3), cell(1.08, 0.1)
    assert taken(surgeon=wide, obs=cell(1.0, 0)) == "surgeon"
    assert taken(surgeon=near, obs=cell(1.0, 0)) == "obs"
    assert taken(surgeon=cell(1.11, 0.9), obs=cell(1.0, 0)) == "obs"
    # The lowest is not the one that intervals compare with: the wider of two is taken.
    assert taken(surgeon=near, obs=cell(1.0, 0), taylor=cell(0.99, 0.5)) == "surgeon"


def test_pipelines_are_compared_pair_by_pair(regret):
    rows = [{"surgeon": 0.8, "obs": 0.82, "random": 0.5}, {"surgeon": 0.8, "obs": 0.7, "random": 0}]
    found = record("trec", "accuracy", 0.9, rows * 2, ["obs", "surgeon", "obs", "obs"])
    for row in found["rows"][2:]:
        row |= {"tuned": 1, "training": "CPU 1"}
    found["whole"]["1"] = found["whole"]["0"]
    at = regret.differences(found, "auto, lstsq", "surgeon, lstsq")
    first, second = pytest.approx([2.0, 0.0]), pytest.approx([2.0, -10.0])
    assert at == {0.3333: {"CPU 0": first, "CPU 1": second}}
    # Over the means of both trainings, 1 and -4: their interval has one degree of freedom.
    lines = regret._against_lines([found], *regret.AGAINST[0])
    half = 12.7062 * 2.5
    expected = f"-1.50 [{-1.5 - half:+.2f}, {-1.5 + half:+.2f}]"
    assert lines[-2] == f"| TREC, 6 classes | {expected} |"

    # Without the refit, of the same heads: each scorer is compared with itself, not random heads.
    alone = record("trec", "accuracy", 0.9, rows, ["obs", "surgeon"])
    for row in alone["rows"]:
        row["refit"] = "no refit"
        row["cells"]["obs"]["test"] -= 0.1
    found["rows"] += alone["rows"]
    assert regret._refit_lines([found])[-2].startswith("| TREC, 6 classes | no refit | -5.00 ± ")
    listed = [name for name in ("obs", "auto", "random") if regret._is_listed(f"{name}, no refit")]
    assert listed == ["auto", "random"]


def test_a_seed_on_a_cpu_is_one_training(regret):
    """Rows of another machine's GPU are of another training, those of another CPU are not."""
    joined = []
    for test, hardware in ((0.8, {}), (0.7, {"gpu": "a GPU"}), (0.6, {})):
        found = record("trec", "accuracy", 0.9, [{"taylor": test}], ["taylor"])
        joined.append({**found, "hardware": {"processor": "one", "threads": 1, **hardware}})
    (task,) = regret.by_task(
        [{**one, "versions": {"torch": "2", "transformers": "5"}, "created": ""} for one in joined]
    )
    rows = [(row["training"], row["cells"]["taylor"]["test"]) for row in task["rows"]]
    assert rows == [("CPU 0", 0.6), ("GPU 0", 0.7)]


def test_a_lower_perplexity_is_better(regret):
    rows = [{"taylor": 6.0, "obs": 5.5}]
    (found,) = regret.cells(record("stories", "perplexity", 5.0, rows, ["obs"])).values()
    at = {name.partition(",")[0]: values for name, (values,) in found.items()}
    assert at == pytest.approx({"taylor": -20.0, "obs": -10.0, "auto": -10.0})


class _Graded(torch.nn.Module):
    def forward(self, x, labels):
        return SimpleNamespace(logits=x)


def test_grades_are_judged_by_the_order_of_all_test_rows(regret):
    answers = torch.tensor([[0.1], [0.9], [0.4], [0.2], [3.0]])
    grades = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0])
    batches = [{"x": answers[:3], "labels": grades[:3]}, {"x": answers[3:], "labels": grades[3:]}]
    data = SimpleNamespace(evaluation=lambda split, size: batches if split == "test" else None)
    subject = SimpleNamespace(recipe=SimpleNamespace(task="regression"), data=data)
    # Ranks 0 3 2 1 4 against 1 2 3 0 4: 1 - 6 * (1 + 1 + 1 + 1 + 0) / (5 * 24).
    assert regret.tested(subject, _Graded()) == ("spearman", pytest.approx(0.8), 5)


@pytest.mark.slow
def test_the_cost_of_a_choice_is_timed_and_put_on_the_page(folder):
    study = benchmark("choice_cost")
    few = f"{digits(folder, 'choice-cost-digits.json')} --memory-rows 8 --rounds 1 --share 0.5"
    seconds, memory = record_of(study, few)["rows"]
    assert (seconds["what"], memory["what"]) == ("seconds", "memory")
    assert all(row[name] > 0 for row in (seconds, memory) for name in study.TITLES)
    assert record_of(study, few)["rows"] == [seconds, memory]  # nothing is measured again
    text = page_of(study, folder, study.PAGE)
    assert f"{seconds['auto'] / seconds['surgeon']:.1f} |" in text
    few = f"{few} --sketches 1"
    *_, sketch = record_of(study, few)["rows"]
    assert sketch["what"] == "sketch"
    # The digits have 10 classes: more passes come closer to one per class.
    assert 0 < sketch["draws"]["8"]["off"] < sketch["draws"]["1"]["off"]
    assert sketch["draws"]["8"]["rank"] > 0.9
    assert f"| 8 | {sketch['draws']['8']['off']:.1%} |" in page_of(study, folder, study.PAGE)
    ways = {"a": print, "b": print, "c": print}
    assert [name for name, _ in study.in_turn(ways, 1)] == ["b", "c", "a"], "each is first in turn"


def test_a_resample_is_compared_with_the_truth(folder):
    """The truth is measured on rows that were not drawn."""
    study = benchmark("choice_intervals")
    few = f"{digits(folder, 'choice-intervals-digits.json')} --shares 0.5"
    (first,) = record_of(study, f"{few} --resamples 1")["rows"]
    names = set(first["truth"])
    assert first["chosen"] in names
    assert names == {name for name in first["held_out"] if name != "random"}
    excess = first["truth"][first["chosen"]] - min(first["truth"].values())
    assert first["excess"] == pytest.approx(excess)
    assert first["within"] == (first["excess"] <= first["margin"])
    again = record_of(study, f"{few} --resamples 2")["rows"]
    assert again[0] == first
    assert [row["resample"] for row in again] == [0, 1]
    assert again[1]["truth"] != first["truth"]
    assert "| 50% | 2 |" in page_of(study, folder, study.PAGE)


def test_a_caption_with_a_missing_word_has_it_as_its_label(tmp_path, monkeypatch):
    made = benchmark("made_tasks")
    monkeypatch.setattr(made, "N_WORDS", 3)
    monkeypatch.setattr(made, "N_ROWS", 2)
    monkeypatch.setattr(made, "N_TEST", 4)
    captions = [f"A {word} stands {n}{word[0]}." for word in ("woman", "horse") for n in "abcdef"]
    lines = [json.dumps({"en": caption, "de": "..."}) for caption in captions]
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    made.write_missing_words(tmp_path / "captions.jsonl", tmp_path / "rows")
    rows = {}
    for name in ("train", "test"):
        lines = (tmp_path / "rows" / f"{name}.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    assert len(rows["test"]) == 4
    assert sorted(row["label"] for row in rows["train"]) == [0, 0, 1, 1, 2, 2]
    # The rarest word of a caption is missing while it lacks rows, then "stands", which all have.
    for row in rows["train"]:
        assert ("stands" in row["text"]) == (row["label"] != 0)
    texts = [row["text"] for part in rows.values() for row in part]
    assert len(set(texts)) == len(texts)
