"""Two models whose necessary heads are known: one by construction, one by switching heads off and
looking."""

import copy
import json
from itertools import combinations
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

import headprune as hp
from headprune.scoring import registry
from tests.known.ablation import COST, achieved, costs, heads_of, highest, necessary, only, recall
from tests.known.constructed import DECOYS, LAYERS, NECESSARY, constructed
from tests.known.induction import accuracy, examples, loss, predictions
from tests.known.trained import WEIGHTS, train, trained
from tests.scripts import benchmark

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS, INDUCTION = NECESSARY


@pytest.fixture(scope="module")
def made():
    return constructed().requires_grad_(False)


@pytest.fixture(scope="module")
def learned():
    return trained().requires_grad_(False)


def name_of(head):
    return LAYERS[int(head.site.removeprefix("layers."))][head.head].name


def all_but(model, head):
    return [h for h in heads_of(model) if h != head]


def test_the_constructed_model_needs_both_necessary_heads_and_no_other(made):
    assert accuracy(made, examples(200, 5)) == 1.0
    assert float(loss(made, examples(200, 5)).max()) < 0.01
    assert [name_of(head) for head in NECESSARY] == ["previous", "induction"]
    for head in NECESSARY:
        assert achieved(made, all_but(made, head), examples(100, 5)) < 0.1
    assert necessary(made, examples(100, 5)) == NECESSARY


def test_leave_one_out_finds_exactly_the_necessary_heads_and_the_rest_is_removed(made):
    seen, new = examples(64, 1), examples(64, 2)
    scores = hp.score(made, [seen], "leave_one_out", loss=loss, progress=False)
    assert recall(scores, NECESSARY) == 1.0
    assert min(scores[head] for head in NECESSARY) > 1.0
    assert max(abs(scores[head]) for head in DECOYS) < 1e-3
    plan = hp.select(scores, hp.Budget(keep_heads=0.2))
    assert plan.mask == only(made, NECESSARY)
    small, answers = copy.deepcopy(made), predictions(made, new)
    report = hp.prune_(small, plan, example={"input_ids": new["input_ids"]})
    assert report.n_removed == len(DECOYS)
    assert_close(predictions(small, new), answers, rtol=0, atol=0)
    again = hp.score(small, [seen], "leave_one_out", loss=loss, progress=False)
    assert recall(again, NECESSARY) == 1.0


def test_ablation_finds_the_trained_models_necessary_heads(learned):
    """Measured, not assumed: a wide gap in what removals cost, and no other set of as many heads
    does better."""
    seen, new = examples(64, 1), examples(128, 2)
    full = accuracy(learned, new)
    assert full > 0.99
    wanted, cost = necessary(learned, new), costs(learned, new)
    assert 2 <= len(wanted) < len(cost) / 2
    assert {head.site for head in wanted} == {"layers.0", "layers.1"}
    assert min(cost[h] for h in wanted) > 2 * COST
    assert 1.5 * max(c for h, c in cost.items() if h not in wanted) < COST
    kept = achieved(learned, wanted, new)
    assert kept > full - COST
    assert kept == max(achieved(learned, some, new) for some in combinations(cost, len(wanted)))
    scores = hp.score(learned, [seen], "leave_one_out", loss=loss, progress=False)
    assert set(highest(scores, len(wanted))) == set(wanted)
    small = copy.deepcopy(learned)
    hp.prune_(small, only(learned, wanted), example={"input_ids": new["input_ids"]})
    assert_close(accuracy(small, new), kept)


def test_the_script_makes_what_is_committed():
    assert WEIGHTS.stat().st_size < 200_000
    committed, made, again = load_file(WEIGHTS), *(train(steps=3).state_dict() for _ in range(2))
    assert {k: v.shape for k, v in made.items()} == {k: v.shape for k, v in committed.items()}
    for name, tensor in made.items():
        assert_close(again[name], tensor, rtol=0, atol=0)


def test_scorers_are_tried_and_reported(tmp_path, capsys):
    out, names = tmp_path / "record.json", ["taylor", "leave_one_out", "random"]
    asked = ["--scorers", *names, "--examples", "4", "--out", str(out)]
    assert benchmark("known_answer").main(asked) == 0
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert list(record["scorers"]) == names
    for name, row in record["scorers"].items():
        assert name in printed
        for model, sizes in (("constructed", [5, 5]), ("trained", [4, 4])):
            assert 0 <= row[model]["recall"] <= 1, row[model]
            assert [len(values) for values in row[model]["values"]] == sizes
    assert record["scorers"]["leave_one_out"]["constructed"]["recall"] == 1


def test_the_record_has_todays_scorers():
    record = json.loads((ROOT / "benchmarks" / "records" / "known_answer.json").read_text())
    known = benchmark("known_answer")
    assert list(record["scorers"]) == known.SCORERS, "run `python benchmarks/known_answer.py`"
    assert {"torch", "headprune"} <= set(record["versions"])
    assert record["models"]["constructed"]["necessary"] == [str(head) for head in NECESSARY]
    assert known.table(record).count("\n") > len(registry.names())
