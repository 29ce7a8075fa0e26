"""Matthews correlation: scikit-learn's, of any batches, of examples drawn again, and from a
recipe."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, matthews_corrcoef
from torch import Tensor, nn

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


@pytest.mark.parametrize("n_classes", [2, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_scikit_learns(n_classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(n_classes, size=60)
    predictions = np.where(rng.random(60) < 0.2 * seed, labels, rng.integers(n_classes, size=60))
    expected = matthews_corrcoef(labels, predictions)
    assert answers(labels, predictions, n_classes).value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "predictions", "expected"),
    [
        ([0, 1, 1, 0], [0, 0, 0, 0], 0.0),
        ([1, 1, 1, 1], [0, 1, 0, 1], 0.0),
        ([1, 1, 1, 1], [1, 1, 1, 1], 0.0),
        ([0, 1, 1, 0], [0, 1, 1, 0], 1.0),
        ([0, 1, 1, 0], [1, 0, 0, 1], -1.0),
    ],
    ids=[
        "one class predicted",
        "one class labelled",
        "one class in both",
        "all right",
        "all wrong",
    ],
)
def test_its_ends(labels: list[int], predictions: list[int], expected: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # scikit-learn's, of a single class
        assert matthews_corrcoef(labels, predictions) == expected
    assert answers(labels, predictions, 2).value == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_it_is_evaluated_from_logits_whatever_the_batches(n_classes: int) -> None:
    torch.manual_seed(0)
    model, labels = (
        bert("BertForSequenceClassification", num_labels=n_classes),
        torch.arange(24) % n_classes,
    )
    batch = {**text(24), "labels": labels}
    with torch.no_grad():
        predictions = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.argmax(-1)
    expected = matthews_corrcoef(labels, predictions)
    assert expected != 0
    for size in (24, 5):
        found = evaluate(model, split(batch, size), metric="matthews")
        assert (found.metric, found.value) == ("matthews", pytest.approx(expected, abs=1e-12))
        assert found.more == {"accuracy": pytest.approx(accuracy_score(labels, predictions))}
        again = Answers(found.metric, np.array(found.amounts), np.array(found.counts))
        assert again.value == found.value


def test_of_tokens_it_leaves_out_what_is_not_labelled() -> None:
    torch.manual_seed(0)
    model, batch = bert("BertForTokenClassification", num_labels=3), text(6)
    labels = torch.randint(3, batch["input_ids"].shape).masked_fill(
        batch["attention_mask"] == 0, -100
    )
    labels[0, 1] = -100
    with torch.no_grad():
        predictions = model(**batch).logits.argmax(-1)
    counted = labels != -100
    found = evaluate(model, split({**batch, "labels": labels}, 4), metric="matthews")
    assert found.value == pytest.approx(
        matthews_corrcoef(labels[counted], predictions[counted]), abs=1e-12
    )
    assert sum(found.counts) == int(counted.sum())


@pytest.mark.parametrize("metric", [None, "accuracy"])
def test_accuracy_is_what_it_was(metric: Any) -> None:
    torch.manual_seed(0)
    model, batch = (
        bert("BertForSequenceClassification", num_labels=3),
        {**text(), "labels": torch.arange(5) % 3},
    )
    found = evaluate(model, [batch], metric=metric)
    with torch.no_grad():
        right = (model(**batch).logits.argmax(-1) == batch["labels"]).double()
    assert (found.metric, found.amounts, found.counts) == (
        "accuracy",
        tuple(right.tolist()),
        (1.0,) * 5,
    )
    assert found.value == float(right.mean())
    assert not found.more


def regression() -> tuple[nn.Module, dict[str, Tensor]]:
    return bert("BertForSequenceClassification", num_labels=1), {
        **text(),
        "labels": torch.randn(5).double(),
    }


def test_it_is_refused_where_there_are_no_classes() -> None:
    model, batch = regression()
    with pytest.raises(
        InvalidValue, match=r"evaluate\(metric=\): must be left out .* got 'matthews' for BertFor"
    ):
        evaluate(model, [batch], metric="matthews")
    with pytest.raises(
        InvalidValue, match=r"evaluate\(metric=\): must be one of accuracy, matthews, or None"
    ):
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
    expected = [
        np.subtract(*(matthews_corrcoef(labels[rows], m[rows]) for m in models)) for rows in draws
    ]
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-12)
    (one,) = paired_drops(base, [other])
    assert one.low < one.value < one.high
    assert one.value == pytest.approx(
        matthews_corrcoef(labels, models[0]) - matthews_corrcoef(labels, models[1])
    )
    (bound,) = upper_bounds(base, [other], 0.95)
    assert one.value < bound < one.high + 0.1


def test_a_bound_allows_for_a_wrong_answer_that_was_not_seen() -> None:
    labels = np.arange(200) % 2
    right = answers(labels, labels, 2)
    assert paired_drops(right, [right])[0].high == 0
    (bound,) = upper_bounds(right, [right], 0.95)
    share = 1 - matthews_corrcoef(labels, np.where(np.arange(200) < 3, 1 - labels, labels))
    assert 0.5 * share < bound < 1.5 * share  # the rule of three


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_worst_example_is_the_worst_of_all(n_classes: int) -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(n_classes, size=30)
    first, second = (
        np.where(rng.random(30) < 0.7, labels, rng.integers(n_classes, size=30)) for _ in range(2)
    )
    tried = [
        matthews_corrcoef([*labels, k], [*first, k]) - matthews_corrcoef([*labels, k], [*second, j])
        for k in range(n_classes)
        for j in range(n_classes)
        if j != k
    ]
    sums = [rows_of(labels, p, n_classes).sum(0) for p in (first, second)]
    found = worst_example(*sums, 30.0)
    values = [float(matthews(s + row, 31.0)) for s, row in zip(sums, found, strict=True)]
    assert values[0] - values[1] == pytest.approx(max(tried), abs=1e-12)


def test_a_drop_is_given_in_points() -> None:
    assert drop_words("matthews", drop("matthews", 0.61, 0.58)) == "3.00 points"


def test_a_recipe_asks_for_it() -> None:
    small = [
        "data.calibration=64",
        "data.holdout=100",
        "data.test_holdout=200",
        "model.config.num_hidden_layers=1",
    ]
    quick = [
        "train=null",
        "bench=null",
        "recover=[]",
        "score.random_draws=0",
        "score.magnitude=false",
    ]
    assert load_recipe("digits-vit").metric is None
    assert load_recipe("digits-vit", ["metric=matthews"]).metric == "matthews"
    stages = {
        s.stage
        for s in dry_run(
            "digits-vit", [*small, *quick, "metric=matthews"], say=lambda line: None
        ).stages
    }
    assert "quality" in stages


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["metric=f1"], r"metric: must be 'accuracy' or 'matthews', got 'f1'"),
        (
            ["task=regression", "data.text=x"],
            r"metric: must be left out for regression: it is for classifications",
        ),
        (["task=causal_lm", "data.text=x"], r"metric: must be left out for causal_lm"),
    ],
)
def test_what_a_recipe_cannot_ask_for(settings: list[str], words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        load_recipe("digits-vit", ["metric=matthews", *settings])


def test_a_resolved_recipe_of_another_task_can_be_run_again() -> None:
    recipe = load_recipe("stsb-minilm")
    assert check_recipe(recipe.model_dump()) == recipe
