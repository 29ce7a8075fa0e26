"""Matthews correlation: scikit-learn's, of any batches, of examples drawn again, and from a
recipe."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, matthews_corrcoef

from headprune.bench.quality import evaluate
from headprune.core.errors import InvalidValue
from headprune.core.matthews import matthews, worst_example
from headprune.core.metrics import drop, drop_words
from headprune.recipes.validate import check_recipe, load_recipe
from headprune.run.dry import dry_run
from headprune.sweep.paired import Answers, paired_drops, resampled_drops, upper_bounds
from tests.unit.test_quality import bert, split, text


def rows_of(labels: Any, predictions: Any, n_classes: int) -> Any:
    one = np.eye(n_classes)
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    return np.column_stack([labels == predictions, one[labels], one[predictions]]).astype(float)


def answers(labels: Any, predictions: Any, n_classes: int) -> Answers:
    return Answers("matthews", rows_of(labels, predictions, n_classes), np.ones(len(labels)))


@pytest.mark.parametrize(
    ("labels", "predictions", "expected"),
    [
        ([0, 1, 1, 0], [0, 0, 0, 0], 0.0),
        ([1, 1, 1, 1], [0, 1, 0, 1], 0.0),
        ([1, 1, 1, 1], [1, 1, 1, 1], 0.0),
        ([0, 1, 1, 0], [0, 1, 1, 0], 1.0),
        ([0, 1, 1, 0], [1, 0, 0, 1], -1.0),
    ],
)
def test_its_ends(labels: list[int], predictions: list[int], expected: float) -> None:
    assert answers(labels, predictions, 2).value == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_it_is_scikit_learns(n_classes: int) -> None:
    rng = np.random.default_rng(n_classes)
    for share in (0.0, 0.3, 0.6):
        labels = rng.integers(n_classes, size=60)
        predictions = np.where(rng.random(60) < share, labels, rng.integers(n_classes, size=60))
        expected = matthews_corrcoef(labels, predictions)
        assert answers(labels, predictions, n_classes).value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_it_is_evaluated_from_logits_whatever_the_batches(n_classes: int) -> None:
    model = bert("BertForSequenceClassification", num_labels=n_classes)
    labels, inputs = torch.arange(24) % n_classes, text(24)
    with torch.no_grad():
        predictions = model(**inputs).logits.argmax(-1)
    expected = matthews_corrcoef(labels, predictions)
    assert expected != 0
    for size in (24, 5):
        found = evaluate(model, split({**inputs, "labels": labels}, size), metric="matthews")
        assert (found.metric, found.value) == ("matthews", pytest.approx(expected, abs=1e-12))
        assert found.more == {"accuracy": pytest.approx(accuracy_score(labels, predictions))}
        again = Answers(found.metric, np.array(found.amounts), np.array(found.counts))
        assert again.value == found.value


def test_of_tokens_it_leaves_out_what_is_not_labelled() -> None:
    model, batch = bert("BertForTokenClassification", num_labels=3), text(6)
    padding = batch["attention_mask"] == 0
    labels = torch.randint(3, batch["input_ids"].shape).masked_fill(padding, -100)
    labels[0, 1] = -100
    with torch.no_grad():
        predictions = model(**batch).logits.argmax(-1)
    counted = labels != -100
    found = evaluate(model, split({**batch, "labels": labels}, 4), metric="matthews")
    expected = matthews_corrcoef(labels[counted], predictions[counted])
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert sum(found.counts) == int(counted.sum())


def test_it_is_refused_where_there_are_no_classes() -> None:
    model = bert("BertForSequenceClassification", num_labels=1)
    batch = {**text(), "labels": torch.randn(5).double()}
    with pytest.raises(InvalidValue, match=r"must be left out .* got 'matthews' for BertFor"):
        evaluate(model, [batch], metric="matthews")
    with pytest.raises(InvalidValue, match=r"must be one of accuracy, matthews, or None"):
        evaluate(model, [batch], metric="f1")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="left out with a loss of your own"):
        evaluate(model, [batch], lambda m, b: m(**b).logits[:, 0], metric="matthews")


def test_drawn_examples_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=40)
    models = [
        np.where(rng.random(40) < share, labels, rng.integers(3, size=40)) for share in (0.8, 0.3)
    ]
    base, other = (answers(labels, model, 3) for model in models)
    found = resampled_drops(base, [other], 50, seed=0)
    draws = np.random.default_rng(0).integers(40, size=(50, 40))
    for rows, value in zip(draws, found[:, 0], strict=True):
        first, second = (matthews_corrcoef(labels[rows], m[rows]) for m in models)
        assert value == pytest.approx(first - second, abs=1e-12)
    (one,) = paired_drops(base, [other])
    assert one.low < one.value < one.high
    first, second = (matthews_corrcoef(labels, m) for m in models)
    assert one.value == pytest.approx(first - second)
    (bound,) = upper_bounds(base, [other], 0.95)
    assert one.value < bound < one.high + 0.1
    assert drop_words("matthews", drop("matthews", 0.61, 0.58)) == "3.00 points"


def test_a_bound_allows_for_a_wrong_answer_that_was_not_seen() -> None:
    labels = np.arange(200) % 2
    right = answers(labels, labels, 2)
    assert paired_drops(right, [right])[0].high == 0
    (bound,) = upper_bounds(right, [right], 0.95)
    share = 1 - matthews_corrcoef(labels, np.where(np.arange(200) < 3, 1 - labels, labels))
    assert 0.5 * share < bound < 1.5 * share  # the rule of three


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_worst_example_is_the_worst_of_all(n_classes: int) -> None:
    rng, classes = np.random.default_rng(1), range(n_classes)
    labels = rng.integers(n_classes, size=30)
    first, second = (
        np.where(rng.random(30) < 0.7, labels, rng.integers(n_classes, size=30)) for _ in range(2)
    )
    tried = []
    for k, j in itertools.permutations(classes, 2):
        better, worse = ([*first, k], [*second, j])
        with_k = [*labels, k]
        tried.append(matthews_corrcoef(with_k, better) - matthews_corrcoef(with_k, worse))
    sums = [rows_of(labels, p, n_classes).sum(0) for p in (first, second)]
    found = worst_example(*sums, 30.0)
    values = [float(matthews(s + row, 31.0)) for s, row in zip(sums, found, strict=True)]
    assert values[0] - values[1] == pytest.approx(max(tried), abs=1e-12)


def test_a_recipe_asks_for_it() -> None:
    assert load_recipe("digits-vit").metric is None
    small = ["data.calibration=64", "data.holdout=100", "data.test_holdout=200"]
    quick = ["train=null", "bench=null", "recover=[]", "model.config.num_hidden_layers=1"]
    asked = ["score.random_draws=0", "score.magnitude=false", "metric=matthews"]
    found = dry_run("digits-vit", [*small, *quick, *asked], say=lambda line: None)
    assert "quality" in {s.stage for s in found.stages}
    other = load_recipe("stsb-minilm")
    assert check_recipe(other.model_dump()) == other, "without it a recipe is as it was"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["metric=f1"], r"metric: must be 'accuracy' or 'matthews', got 'f1'"),
        (["task=regression", "data.text=x"], r"metric: must be left out for regression"),
        (["task=causal_lm", "data.text=x"], r"metric: must be left out for causal_lm"),
    ],
)
def test_what_a_recipe_cannot_ask_for(settings: list[str], words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        load_recipe("digits-vit", ["metric=matthews", *settings])
