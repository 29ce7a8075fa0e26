"""Two models whose necessary heads are known: one by construction, one by switching heads off and
looking."""

from __future__ import annotations

import copy
import json
from itertools import combinations
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

import headprune as hp
from headprune import HeadId
from headprune.scoring import Shapley, registry
from tests.known.ablation import COST, achieved, costs, heads_of, highest, necessary, only, recall
from tests.known.constructed import DECOYS, LAYERS, NECESSARY, Head, constructed
from tests.known.induction import (
    AttentionOnly,
    accuracy,
    examples,
    loss,
    predictions,
)
from tests.known.trained import WEIGHTS, train, trained
from tests.scripts import benchmark

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS, INDUCTION = NECESSARY


@pytest.fixture(scope="module")
def made() -> AttentionOnly:
    return constructed().requires_grad_(False)


@pytest.fixture(scope="module")
def learned() -> AttentionOnly:
    return trained().requires_grad_(False)


def name_of(head: HeadId) -> str:
    return LAYERS[int(head.site.removeprefix("layers."))][head.head].name


def all_but(model: AttentionOnly, head: HeadId) -> list[HeadId]:
    return [h for h in heads_of(model) if h != head]


# ---------------------------------------------------------------- weights written by hand


def test_the_constructed_model_needs_both_necessary_heads_and_no_other(made: AttentionOnly) -> None:
    assert accuracy(made, examples(200, 5)) == 1.0
    assert float(loss(made, examples(200, 5)).max()) < 0.01
    assert [name_of(head) for head in NECESSARY] == ["previous", "induction"]
    for head in NECESSARY:
        assert achieved(made, all_but(made, head), examples(100, 5)) < 0.1
    assert necessary(made, examples(100, 5)) == NECESSARY


@pytest.mark.parametrize("decoy", DECOYS, ids=str)
def test_a_decoy_moves_activations_and_no_answer(made: AttentionOnly, decoy: HeadId) -> None:
    batch = examples(100, 5)
    stream = made.residual(batch["input_ids"])
    losses, answers = loss(made, batch), predictions(made, batch)

    def moved(head: HeadId) -> float:
        with hp.gated(made, only(made, all_but(made, head))):
            return float((made.residual(batch["input_ids"]) - stream).norm())

    with hp.gated(made, only(made, all_but(made, decoy))):
        assert_close(predictions(made, batch), answers, rtol=0, atol=0)
        change = float((loss(made, batch) - losses).abs().max())
    if name_of(decoy) == "murmur":  # what is read changes, by too little to change an answer
        assert 1e-8 < change < 1e-3
    else:
        (necessary_one,) = (head for head in NECESSARY if head.site == decoy.site)
        assert change < 1e-6
        assert moved(decoy) > 1.2 * moved(necessary_one)


def test_leave_one_out_finds_exactly_the_necessary_heads_and_the_rest_is_removed(
    made: AttentionOnly,
) -> None:
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


def test_a_head_that_needs_another_one_is_nothing_alone_and_half_of_both(
    made: AttentionOnly,
) -> None:
    """The answer needs both heads, so a lone one is worth nothing and each has half of what both
    achieve."""
    batch = examples(32, 1)
    scorers = ["add_one_in", Shapley(orders=2), Shapley(method="two_sided")]
    alone, share, two_sided = hp.score(made, [batch], scorers, loss=loss, progress=False)
    with hp.gated(made, only(made, ())):
        nothing = float(loss(made, batch).mean())
    both = nothing - float(loss(made, batch).mean())
    assert both > 2
    assert alone[PREVIOUS] == 0.0
    # It looks everywhere alike: tokens that were seen are likelier.
    assert 0 < alone[INDUCTION] < 0.02 * both
    assert recall(alone, NECESSARY) < 1
    for scores in (share, two_sided):
        assert recall(scores, NECESSARY) == 1.0
        for head in NECESSARY:
            assert_close(scores[head], both / 2, rtol=0.05, atol=0)


def test_a_decoy_that_is_heard_is_found() -> None:
    """The verdict is in the weights, not in the names: a murmur that is too loud drowns the answer,
    and that shows."""
    loud = HeadId("layers.1", len(LAYERS[1]))
    model = constructed((LAYERS[0], (*LAYERS[1], Head("murmur", "token", "answer", 500.0))))
    assert accuracy(model, examples(64, 2)) < 0.1
    scores = hp.score(model, [examples(64, 1)], "leave_one_out", loss=loss, progress=False)
    assert scores.ranked()[0].value == scores[loud] < -1  # the model is better without it


# ---------------------------------------------------------------- weights that were trained


def test_ablation_finds_the_trained_models_necessary_heads(learned: AttentionOnly) -> None:
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


def test_the_script_makes_what_is_committed() -> None:
    assert WEIGHTS.stat().st_size < 200_000
    committed, made, again = load_file(WEIGHTS), *(train(steps=3).state_dict() for _ in range(2))
    assert {k: v.shape for k, v in made.items()} == {k: v.shape for k, v in committed.items()}
    for name, tensor in made.items():
        assert_close(again[name], tensor, rtol=0, atol=0)


# ---------------------------------------------------------------- the report


def test_scorers_are_tried_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_record_has_todays_scorers() -> None:
    record = json.loads((ROOT / "benchmarks" / "records" / "known_answer.json").read_text())
    known = benchmark("known_answer")
    assert list(record["scorers"]) == known.SCORERS, "run `python benchmarks/known_answer.py`"
    assert {"torch", "headprune"} <= set(record["versions"])
    assert record["models"]["constructed"]["necessary"] == [str(head) for head in NECESSARY]
    assert known.table(record).count("\n") > len(registry.names())
