"""Studies of encoders: benchmarks/pipelines.py and benchmarks/selector_loss.py."""

import json
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import headprune as hp
from headprune.bench.quality import evaluate
from tests.benchmark_runs import encoder_study, page_of, record_of
from tests.scripts import benchmark


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The arguments of a study of graded pairs."""
    return f"{encoder_study(tmp_path_factory.mktemp('pairs'), 'stsb')} --calibration 24"


@pytest.fixture(scope="module")
def pipelines():
    return benchmark("pipelines")


def test_rows_of_sentence_pairs_are_what_cut_models_do(pipelines, pairs, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    names = "taylor iterative-refit kwon2022"
    few = f"{pairs} --budgets 3 --seeds 1 --out {tmp_path / 'pipelines-stsb.json'}"
    record = record_of(pipelines, f"{few} --pipelines {names}")
    assert len(record["rows"]) == 5 + 1 + 1
    assert record["heads"] == 8
    first = [r for r in record["rows"] if (r["pipeline"], r["recovery"]) == ("taylor", "none")]
    (row,) = first
    assert sum(map(len, row["heads"].values())) == 3
    # Plain code that cuts these heads comes to the same number.
    args = pipelines.arguments(shlex.split(pairs))
    encoder, tokenizer = (kind.from_pretrained(args.model) for kind in (AutoModel, AutoTokenizer))
    keep = {site.removeprefix("encoder."): heads for site, heads in row["heads"].items()}
    hp.prune_(encoder, hp.HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
    rows = [json.loads(line) for line in (args.data / "test.jsonl").read_text().splitlines()]

    def embedded(sentence):
        ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return encoder(input_ids=ids).last_hidden_state.mean(1)

    cosines = [
        float(torch.cosine_similarity(*(embedded(pair[f"sentence{i}"]) for i in (1, 2))))
        for pair in rows
    ]
    expected = spearmanr(cosines, [pair["score"] for pair in rows]).statistic
    assert row["test"] == pytest.approx(expected, abs=2e-3)


def test_a_run_of_pipelines_goes_on_and_compares(pipelines, tmp_path):
    study = f"{encoder_study(tmp_path, 'trec')} --calibration 24 --budgets 5 3 --seeds 1"
    few = f"{study} --out {tmp_path / 'pipelines-trec.json'} --pipelines taylor"
    before = record_of(pipelines, f"{few} --recoveries none")["rows"]
    assert [(row["recovery"], row["kept"]) for row in before] == [("none", 5), ("none", 3)]
    more = f"{few} --recoveries none lstsq --references taylor/lstsq --against taylor/none"
    record = record_of(pipelines, more)
    assert record["rows"][:2] == before
    assert len(record["rows"]) == 4
    values = {(row["recovery"], row["kept"]): row["test"] for row in record["rows"]}
    compared = [(line["pipeline"], line["kept"]) for line in record["compared"]]
    assert compared == [("taylor/none", 5), ("taylor/none", 3)]
    for line in record["compared"]:
        found = line["test"]
        expected = values["none", line["kept"]] - values["lstsq", line["kept"]]
        assert found["difference"] == pytest.approx(expected, abs=2e-5)
        assert found["low"] <= found["difference"] <= found["high"]
    with pytest.raises(SystemExit, match="give another --out"):
        pipelines.main(shlex.split(f"{more} --calibration 25"))
    cells = f"| taylor/none | {values['none', 5]:.3f} | {values['none', 3]:.3f} |"
    assert cells in page_of(pipelines, tmp_path, pipelines.PAGE)


@pytest.mark.parametrize("task", ["trec", "stsb"])
def test_heads_and_neurons_share_a_budget_of_multiply_adds(pipelines, tmp_path, task):
    study = f"{encoder_study(tmp_path, task)} --calibration 24 --seeds 1 --shares 0.6"
    few = f"{study} --out {tmp_path / f'pipelines-{task}-shares.json'}"
    record = record_of(pipelines, f"{few} --pipelines ladder surgeon-knapsack random")
    rows = {pipelines.title(row): row for row in record["rows"]}
    assert len(rows) == 2 + 1 + 2
    of_all = sum(len(heads) for heads in rows["random/none"]["heads"].values())
    assert 0 < of_all < record["heads"] == 8
    neurons = [row["neurons"] for row in rows.values()]
    assert all(any(count < 64 for count in found.values()) for found in neurons)
    assert rows["ladder/none"]["neurons"] == rows["ladder/lstsq+ff"]["neurons"]
    assert [line["reference"] for line in record["compared"]] == ["ladder/lstsq+ff"] * 2
    page = page_of(pipelines, tmp_path, pipelines.PAGE)
    assert f"| ladder/none | {rows['ladder/none']['test']:.3f} |" in page
    with pytest.raises(SystemExit):
        pipelines.arguments(shlex.split(f"{few} --pipelines iterative"))


def test_an_interval_is_the_paired_one(pipelines):
    base = (np.random.default_rng(1).random(400) < 0.8).astype(np.float32)
    other = base.copy()
    other[:20] = 1 - other[:20]  # answers differ on 20 of 400 rows only

    def quality(answers, split, rows=None):
        return float((answers if rows is None else answers[rows]).mean())

    found = pipelines.interval(SimpleNamespace(quality=quality), "test", [(other, base)])
    difference = other - base
    assert found["difference"] == pytest.approx(float(difference.mean()), abs=1e-5)
    error = (found["high"] - found["low"]) / 3.92
    assert error == pytest.approx(difference.std() / 20, rel=0.1)


@pytest.fixture(scope="module")
def selectors():
    return benchmark("selector_loss")


def test_losses_are_those_of_masked_models_and_a_run_goes_on(selectors, pairs, tmp_path):
    few = f"{pairs} --budgets 5 --out {tmp_path / 'selector-loss-stsb.json'}"
    record = record_of(selectors, f"{few} --seeds 1")
    assert [(row["scorer"], row["selector"]) for row in record["rows"]] == list(selectors.PAIRS)
    args = selectors.arguments(shlex.split(few))
    task = selectors.encoder_task("stsb", args.data, args.model, args.work, 24)
    scores = hp.score(task.model, task.calibration(0), "fisher", loss=task.loss)
    with hp.gated(task.model, hp.select(scores, hp.Budget(keep_heads=5), "quadratic")):
        expected = evaluate(task.model, task.judged["validation"], task.loss)
    row = record["rows"][1]
    assert row["loss"] == pytest.approx(expected.loss)
    assert row["losses"] == pytest.approx(expected.losses, abs=1e-5)
    assert "swaps" in " ".join(record["rows"][3]["notes"])

    more = record_of(selectors, f"{few} --seeds 2")["rows"]
    assert more[:5] == record["rows"]
    assert [row["seed"] for row in more] == [0] * 5 + [1] * 5
    fisher = [row for row in more if row["scorer"] == "fisher"]
    loss = {(row["selector"], row["seed"]): np.mean(row["losses"]) for row in fisher}
    gain = np.mean([loss["quadratic", seed] - loss["global_topk", seed] for seed in (0, 1)])
    assert f"| {gain:+.4f} [" in page_of(selectors, tmp_path, selectors.PAGE)


def test_a_difference_of_selectors_is_paired(selectors):
    chance = np.random.default_rng(0)
    plain = {seed: chance.random(300).tolist() for seed in (0, 1)}
    better = {seed: [loss - 0.1 for loss in losses] for seed, losses in plain.items()}
    assert selectors.difference(better, plain) == "-0.1000 [-0.1000, -0.1000]"
    assert selectors.difference(better, {2: plain[0]}) == "-"
