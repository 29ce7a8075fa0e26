"""Accuracy, perplexity and error, counted by hand, and the Matthews correlation of scikit-learn;
independent of batches and of padding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from sklearn.metrics import accuracy_score, matthews_corrcoef
from torch import Tensor, nn
from torch.testing import assert_close

from headprune.bench.quality import evaluate
from headprune.core.errors import InvalidValue
from headprune.core.matthews import matthews, worst_example
from headprune.core.metrics import drop, drop_words
from headprune.core.paired import Answers, paired_drops, resampled_drops, upper_bounds
from headprune.recipes.validate import check_recipe, load_recipe
from headprune.run.dry import dry_run
from tests.laws.support import examples_of as data
from tests.laws.support import subject_of, unchanged
from tests.scoring_help import split

BERT = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"intermediate_size": 8, "max_position_embeddings": 16, "initializer_range": 0.5}


def bert(kind: str, **options: Any) -> nn.Module:
    return getattr(hf, kind)(hf.BertConfig(**BERT, **options)).double().eval()


def text(n: int = 5, length: int = 6) -> dict[str, Tensor]:
    mask = torch.ones(n, length, dtype=torch.long)
    mask[1, 4:] = mask[3, 2:] = 0
    return {"input_ids": torch.randint(3, 50, (n, length)), "attention_mask": mask}


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_accuracy_of_sequences_and_images(name):
    subject = subject_of(name)
    batch = data(subject)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        guess = [int(subject.model(**one).logits[0].argmax()) for one in split(inputs, 1)]
    right = sum(int(a == int(b)) for a, b in zip(guess, batch["labels"], strict=True))
    assert 0 < right < 7
    for size in (7, 3, 1):
        found = evaluate(subject.model, split(batch, size))
        assert (found.metric, found.n_examples, len(found.losses)) == ("accuracy", 7, 7)
        assert found.value == right / 7
        assert found.loss == pytest.approx(sum(found.losses) / 7, rel=1e-12)


def test_accuracy_of_tokens_leaves_out_what_is_not_labelled():
    model, batch = bert("BertForTokenClassification", num_labels=2), text()
    with torch.no_grad():
        guess = model(**batch).logits.argmax(-1)
    labels = torch.randint(0, 2, (5, 6))
    labels[0, :3] = -100
    counted = (labels >= 0) & (batch["attention_mask"] == 1)
    assert counted.sum() == 21
    found = evaluate(model, split({**batch, "labels": labels}, 2))
    assert found.metric == "accuracy"
    assert found.value == pytest.approx(float((guess == labels)[counted].double().mean()))


def test_answers_are_kept_for_every_labelled_token_and_number():
    torch.manual_seed(0)
    batch = {**text(), "labels": torch.randint(0, 3, (5, 6))}
    batch["labels"][:, 0] = -100
    model = bert("BertForTokenClassification", num_labels=3)
    found = evaluate(model, split(batch, 2))
    assert [len(row) for row in found.outputs] == [5, 3, 5, 1, 5], "padding and -100 do not count"
    right = [sum(label == said for label, said in row) for row in found.outputs]
    assert right == list(found.amounts)

    batch["labels"] = torch.randn(5).double()
    model = bert("BertForSequenceClassification", num_labels=1)
    found = evaluate(model, split(batch, 2))
    assert [(label - said) ** 2 for label, said in found.outputs] == pytest.approx(found.amounts)


@pytest.mark.parametrize(
    ("name", "side"), [("llama", "right"), ("llama", "left"), ("gpt2", "left")]
)
def test_perplexity_weighs_tokens_and_not_examples(name, side):
    subject = subject_of(name)
    rows = [torch.randint(3, 50, (n,)) for n in (9, 3, 6)]
    total = 0.0
    for ids in rows:  # every example alone and without padding
        with torch.no_grad():
            log = subject.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        total -= float(log[:-1].gather(1, ids[1:, None]).sum())
    pad = [(0, 11 - len(r)) if side == "right" else (11 - len(r), 0) for r in rows]
    pairs = list(zip(rows, pad, strict=True))
    ids = torch.stack([nn.functional.pad(r, p, value=5) for r, p in pairs])
    mask = torch.stack([nn.functional.pad(torch.ones_like(r), p) for r, p in pairs])
    batch = {"input_ids": ids, "attention_mask": mask}
    if name == "gpt2":
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    # Llama's rotary sines are computed in float32, at other positions if the padding is on the
    # left.
    tolerance = 1e-5 if (name, side) == ("llama", "left") else 1e-10
    for size in (1, 2, 3):
        found = evaluate(subject.model, split(batch, size))
        assert found.metric == "perplexity"
        assert found.value == pytest.approx(math.exp(total / 15), rel=tolerance)
        mean = math.exp(found.loss)
        assert found.value != pytest.approx(mean, rel=1e-3), "that of examples is another number"


def test_mean_squared_error():
    model, inputs = bert("BertForSequenceClassification", num_labels=1), text()
    labels = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0]).double()
    with torch.no_grad():
        guess = model(**inputs).logits[:, 0]
    found = evaluate(model, split({**inputs, "labels": labels}, 2))
    assert found.metric == "mse"
    assert found.value == pytest.approx(float(((guess - labels) ** 2).mean()))
    assert found.value == pytest.approx(found.loss)


def test_where_no_metric_fits_it_is_the_loss():
    starts = torch.tensor([0, 1, 2, 0, 1])
    asked = {**text(), "start_positions": starts, "end_positions": starts + 1}
    several = {**text(), "labels": torch.randint(0, 2, (5, 3)).double()}
    for model, batch in (
        (bert("BertForQuestionAnswering"), asked),
        (bert("BertForSequenceClassification", num_labels=3), several),
    ):
        found = evaluate(model, split(batch, 2))
        assert found.metric == "loss"
        assert found.value == pytest.approx(found.loss, rel=1e-12)
        assert found.loss == pytest.approx(sum(found.losses) / 5)


def test_a_loss_of_your_own_is_the_metric(subject):
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(**batch)
        return getattr(out, "logits", out).flatten(1).square().mean(1)

    batch = data(subject)
    with torch.no_grad():
        expected = [float(loss(subject.model, one)[0]) for one in split(batch, 1)]
    found = evaluate(subject.model, split(batch, 3), loss)
    assert found.metric == "loss"
    assert found.losses == pytest.approx(expected, rel=1e-10)
    assert found.value == pytest.approx(found.loss, rel=1e-12)
    assert found.loss == pytest.approx(sum(expected) / 7)


def test_the_model_is_left_as_it_was():
    subject = subject_of("bert")
    model, batch = subject.model.train(), subject.batch
    bad, state = {**batch, "labels": torch.tensor([0, 9, 1])}, torch.get_rng_state()
    with unchanged(model):
        assert evaluate(model, [batch]) == evaluate(model, iter([batch]))
        with pytest.raises(InvalidValue, match="labels of batch 1"):
            evaluate(model, [batch, bad])
    assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


def test_what_it_refuses():
    subject = subject_of("vit")
    with pytest.raises(InvalidValue, match="at least one batch"):
        evaluate(subject.model, [])
    with pytest.raises(InvalidValue, match="with 'labels'"):
        evaluate(subject.model, [{"pixel_values": subject.batch["pixel_values"]}])
    bad = {**subject.batch, "pixel_values": subject.batch["pixel_values"].clone()}
    bad["pixel_values"][1] = float("nan")
    with pytest.raises(InvalidValue, match="batch 1, example 1: must be finite"):
        evaluate(subject.model, [subject.batch, bad])
    with pytest.raises(InvalidValue, match="one loss per example"):
        evaluate(subject.model, [subject.batch], lambda m, b: m(**b).loss)


def test_perplexity_does_not_overflow():
    subject = subject_of("llama")
    with torch.no_grad():
        subject.model.lm_head.weight *= 1e6
    assert math.isfinite(evaluate(subject.model, [subject.batch]).value)


def rows_of(labels: Any, predictions: Any, n_classes: int) -> Any:
    one = np.eye(n_classes)
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    return np.column_stack([labels == predictions, one[labels], one[predictions]]).astype(float)


def answers(labels: Any, predictions: Any, n_classes: int) -> Answers:
    return Answers("matthews", rows_of(labels, predictions, n_classes), np.ones(len(labels)))


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_it_is_scikit_learns(n_classes):
    rng = np.random.default_rng(n_classes)
    labels = rng.integers(n_classes, size=60)
    same = np.zeros(60, dtype=int)
    some = np.where(rng.random(60) < 0.3, labels, rng.integers(n_classes, size=60))
    for true, said in ((labels, some), (labels, labels), (labels, same), (same, labels)):
        expected = matthews_corrcoef(true, said)
        assert answers(true, said, n_classes).value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_it_is_evaluated_from_logits_whatever_the_batches(n_classes):
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


def test_it_is_refused_where_there_are_no_classes():
    model = bert("BertForSequenceClassification", num_labels=1)
    batch = {**text(), "labels": torch.randn(5).double()}
    with pytest.raises(InvalidValue, match=r"must be left out .* got 'matthews' for BertFor"):
        evaluate(model, [batch], metric="matthews")
    with pytest.raises(InvalidValue, match=r"must be one of accuracy, matthews, or None"):
        evaluate(model, [batch], metric="f1")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="left out with a loss of your own"):
        evaluate(model, [batch], lambda m, b: m(**b).logits[:, 0], metric="matthews")


def test_drawn_examples_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=40)
    models = [np.where(rng.random(40) < p, labels, rng.integers(3, size=40)) for p in (0.8, 0.3)]
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


def test_a_bound_allows_for_a_wrong_answer_that_was_not_seen():
    labels = np.arange(200) % 2
    right = answers(labels, labels, 2)
    assert paired_drops(right, [right])[0].high == 0
    (bound,) = upper_bounds(right, [right], 0.95)
    share = 1 - matthews_corrcoef(labels, np.where(np.arange(200) < 3, 1 - labels, labels))
    assert 0.5 * share < bound < 1.5 * share  # the rule of three


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_worst_example_is_the_worst_of_all(n_classes):
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


def test_a_recipe_asks_for_it():
    assert load_recipe("digits-vit").metric is None
    small = ["data.calibration=64", "data.holdout=100", "data.test_holdout=200"]
    quick = ["train=null", "bench=null", "recover=[]", "model.config.num_hidden_layers=1"]
    asked = ["score.random_draws=0", "score.magnitude=false", "metric=matthews"]
    found = dry_run("digits-vit", [*small, *quick, *asked], say=lambda line: None)
    assert "quality" in {s.stage for s in found.stages}
    other = load_recipe("stsb-minilm")
    assert check_recipe(other.model_dump()) == other, "without it a recipe is as it was"


def test_what_a_recipe_cannot_ask_for():
    for settings, words in (
        (["metric=f1"], r"metric: must be 'accuracy' or 'matthews', got 'f1'"),
        (["task=regression", "data.text=x"], r"metric: must be left out for regression"),
    ):
        with pytest.raises(InvalidValue, match=words):
            load_recipe("digits-vit", ["metric=matthews", *settings])


def test_matthews_of_tokens_leaves_out_what_is_not_labelled():
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
