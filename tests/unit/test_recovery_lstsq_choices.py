"""lstsq: tokens weighted by what the output feels, and ridges chosen by held-out error, against
slow transcriptions."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification, BertModel

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.double import Doubled
from headprune.model.running import call
from headprune.model.sites import bind
from headprune.recovery import Lstsq, _layerwise, _sensitivity
from headprune.recovery._held_out import (
    BIAS_ALONE,
    NO_CHANGE,
    RIDGES,
    best,
    choices,
    held_out_errors,
    is_held_out,
    notes,
)
from headprune.recovery._least_squares import LeastSquaresSums
from headprune.recovery._sensitivity import sensitivities
from headprune.recovery._side_by_side import quiet
from tests.reference import recovery as reference
from tests.unit.test_recovery_lstsq import TwoSentences, later, pruned, recovered, subject_of

Array = NDArray[np.float64]
BOTH = Lstsq(ridge=None, token_weights="output", feed_forward=True)

# ---------------------------------------------------------------- what the output feels


def small_bert(labels):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 16}
    config = BertConfig(**sizes, num_labels=labels, initializer_range=0.5)
    return BertForSequenceClassification(config).double().eval()


def some_tokens():
    ids = torch.randint(1, 20, (3, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[2, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def felt(model, batch, run=call):
    """By layer of attention, ``[batch, tokens]``."""
    bound = bind(model)
    with quiet(model, model, list(zip(bound, bound, strict=True))):
        found = sensitivities(model, [b.gate for b in bound], batch, run)
    return [of_call.squeeze(-1) for of_projection in found for of_call in of_projection]


def slopes(model, projection, batch, step=1e-05):
    """``[batch, tokens, width, outputs]`` by differences."""

    def logits(change):
        handle = projection.register_forward_hook(lambda m, a, out: out + change)
        with torch.no_grad():
            found = model(**batch).logits
        handle.remove()
        return found

    examples, tokens = batch["input_ids"].shape
    rows = []
    for place in range(tokens * 8):
        change = torch.zeros(examples, tokens * 8, dtype=torch.float64)
        change[:, place] = step
        change = change.view(examples, tokens, 8)
        rows.append((logits(change) - logits(-change)) / (2 * step))
    return torch.stack(rows, 1).unflatten(1, (tokens, 8))


def test_one_output_is_felt_as_differences_say():
    """The square of a sign is 1: nothing is random where an example has one number."""
    model, batch = small_bert(1), some_tokens()
    for layer, found in zip(model.bert.encoder.layer, felt(model, batch), strict=True):
        expected = slopes(model, layer.attention.output.dense, batch)[..., 0].square().sum(-1)
        assert_close(found, expected, rtol=1e-5, atol=1e-9)
        assert float(expected[:, 0].min()) > 1e-3
    # of the last layer the classifier reads the first token alone
    assert float(found[:, 1:].max()) < 1e-20


def test_several_outputs_are_felt_on_average_as_differences_say(monkeypatch):
    model, batch = small_bert(3), some_tokens()
    monkeypatch.setattr(_sensitivity, "DRAWS", 800)
    dense = model.bert.encoder.layer[0].attention.output.dense
    expected = slopes(model, dense, batch).square().sum((-1, -2))
    assert_close(felt(model, batch)[0], expected, rtol=0.2, atol=1e-6)


def test_padding_neither_counts_nor_changes_the_signs():
    model, batch = small_bert(3), some_tokens()
    longer = {k: torch.cat([v, torch.zeros_like(v)], 1) for k, v in batch.items()}
    for short, long in zip(felt(model, batch), felt(model, longer), strict=True):
        assert_close(long[:, :5], short, rtol=1e-9, atol=1e-12)


def test_a_bare_encoder_and_a_loss_are_felt():
    subject, batch = small_bert(3), some_tokens()
    encoder = BertModel(subject.config, add_pooling_layer=False).double().eval()
    of_layers = felt(encoder, batch)
    assert all(float(layer[:2].min()) > 0 for layer in of_layers)
    assert float(of_layers[-1][2, 3:].max()) == 0  # padding that nothing else reads
    labels = torch.tensor([0, 2, 1])

    def loss(model, given):
        return nn.functional.cross_entropy(model(**given).logits, labels, reduction="none")

    found = felt(subject, batch, loss)[0]
    by_logit = subject(**batch).logits.detach().softmax(-1) - nn.functional.one_hot(labels, 3)
    exact = slopes(subject, subject.bert.encoder.layer[0].attention.output.dense, batch)
    expected = (exact * by_logit[:, None, None]).sum(-1).square().sum(-1)
    assert_close(found, expected, rtol=1e-5, atol=1e-9)


NUMBERS = "numbers of each of 3 examples"


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (torch.no_grad()(lambda m, b: m(**b).logits.sum(-1)), InvalidValue, NUMBERS),
        (torch.no_grad()(lambda m, b: m(**b)), UnsupportedModel, "without a graph"),
        (lambda m, b: m(**b).logits.mean(), InvalidValue, NUMBERS),
    ],
)
def test_what_cannot_be_differentiated_is_said(loss, error, words):
    subject, batches = subject_of("bert")
    model = pruned(subject)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=rf"(?s){words}.*token_weights=\"equal\""):
        recovered(model, batches, Lstsq(token_weights="output"), subject.model, loss=loss)
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


# ---------------------------------------------------------------- weighted fits


def weighted(x, e, w, ridge, intercept=True):
    """Ridge, as one long system whose rows are tokens."""
    share = w[:, None] / w.sum() * intercept
    x_mean, e_mean = (share * x).sum(0), (share * e).sum(0)
    centred = x - x_mean
    strength = ridge * (w[:, None] * centred**2).sum() / x.shape[1]
    rows = np.concatenate([np.sqrt(w)[:, None] * centred, math.sqrt(strength) * np.eye(x.shape[1])])
    right = np.concatenate([np.sqrt(w)[:, None] * (e - e_mean), np.zeros((x.shape[1], e.shape[1]))])
    weight = np.linalg.lstsq(rows, right, rcond=None)[0]
    return weight, e_mean - x_mean @ weight


def test_a_weighted_fit_is_numpys():
    subject, batches = subject_of("bert")
    site, place = subject.sites[-1], reference.bert(2, False)[0]
    mask = subject.without({site.name: site.units[0]})
    model, before, equal = (pruned(subject, mask) for _ in range(3))
    report = recovered(model, batches, Lstsq(ridge=0.3, token_weights="output"), subject.model)
    kept = []
    for batch in batches:
        with Doubled():
            of_batch = felt(subject.model, batch)[-1]
        for i in range(3):
            length = batch["input_ids"].shape[1]
            kept.append(of_batch[i, reference.real(place, batch, i, length)])
    s = torch.cat(kept).numpy()
    x, _, ours = reference.rows(before, place, batches)
    theirs = reference.rows(subject.model, place, batches)[2]
    weight, bias = weighted(x, theirs - ours, 0.1 + 0.9 * s / s.mean(), 0.3)
    recovered(equal, batches, Lstsq(ridge=0.3), subject.model)
    dense, old, alike = (one.get_submodule(place.projection) for one in (model, before, equal))
    found = (dense.weight - old.weight).detach().T, (dense.bias - old.bias).detach()
    assert_close(found, (torch.from_numpy(weight), torch.from_numpy(bias)), rtol=1e-7, atol=1e-8)
    error = reference.error(model, subject.model, place, batches)  # of all tokens alike
    assert report.metrics["error_after"] == pytest.approx(error, rel=1e-6)
    assert float((alike.weight - dense.weight).detach().abs().max()) > 1e-3


def test_nothing_felt_weighs_alike():
    assert_close(_layerwise._weights(torch.zeros(3), torch.zeros(())), torch.ones(3))
    found = _layerwise._weights(torch.tensor([0.0, 4.0]), torch.tensor(2.0))
    assert_close(found, torch.tensor([0.1, 1.9]))


# ---------------------------------------------------------------- ridges by held-out error


def parts_of(x, e, w=None):
    """Sums of what is fitted and of what is held out, a token an example."""
    held = is_held_out(torch.arange(len(x)))
    parts = []
    for part in (~held, held):
        sums = LeastSquaresSums(torch.float64)
        sums.add(x[part], e[part], None, None if w is None else w[part])
        parts.append(sums.done())
    return parts


def drawn(n=120):
    torch.manual_seed(3)
    x, noise, linear = (torch.randn(size).double() for size in ((n, 6), (n, 5), (6, 5)))
    return x + 2, noise, torch.rand(n).double() + 0.1, linear


@pytest.mark.parametrize(("weights", "intercept"), [(False, True), (True, True), (False, False)])
def test_held_out_errors_are_those_of_fits_to_the_rest(weights, intercept):
    x, noise, w, linear = drawn()
    e = x @ linear + noise + intercept
    parts = parts_of(x, e, w if weights else None)
    found = held_out_errors(*parts, lambda n, r: n.xe, intercept=intercept)
    xs, es, ws = x.numpy(), e.numpy(), w.numpy() if weights else np.ones(len(x))
    of = choices(intercept, 6)
    held = is_held_out(torch.arange(len(x))).numpy()
    x_in, e_in, w_in = xs[~held], es[~held], ws[~held]
    remaining = [es[held]]
    if intercept:
        remaining.append(es[held] - (w_in[:, None] * e_in).sum(0) / w_in.sum())
    for ridge in RIDGES:
        weight, bias = weighted(x_in, e_in, w_in, ridge, intercept)
        remaining.append(es[held] - xs[held] @ weight - bias)
    expected = np.array([(ws[held][:, None] * rest**2).sum() for rest in remaining])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert best(found.tolist(), of) == of[int(expected.argmin())]


def test_without_columns_there_is_a_bias_alone():
    _, noise, _, _ = drawn()
    errors = held_out_errors(*parts_of(noise[:, :0], noise + 9), lambda n, r: n.xe, True)
    assert best(errors.tolist(), choices(True, 0)) == BIAS_ALONE


def test_the_more_cautious_of_equals_and_nothing_that_failed():
    of = choices(True, 1)
    assert best([1.0] * len(of), of) == NO_CHANGE
    assert best([math.nan, 5.0, math.inf, 4.0, 4.0, math.nan, 9.0], of) == 3.0


@pytest.mark.parametrize(
    ("family", "whole", "room"),
    [("bert", True, 3000), ("t5", False, 2**30), ("albert", False, 0)],
)
def test_the_batch_size_and_what_is_kept_do_not_matter(family, whole, room):
    """Batches as they were, or of one example; ``room`` is for what is kept, in bytes."""
    subject, batches = subject_of(family)
    batches[1] = {k: v[:1] for k, v in batches[1].items()}
    given = batches
    if not whole:
        rows = [(b, i) for b in batches for i in range(len(b["attention_mask"]))]
        given = [{k: v[i : i + 1] for k, v in b.items()} for b, i in rows]
    expected = pruned(subject)
    report = recovered(expected, batches, BOTH, subject.model)
    assert set(report.metrics["ridges"]) == set(report.metrics["errors"])
    near = 0.0 if whole else 1e-7
    model = pruned(subject)
    again = recovered(model, given, replace(BOTH, max_bytes=room), subject.model)
    assert again.metrics["ridges"] == report.metrics["ridges"]
    assert_close(dict(model.state_dict()), dict(expected.state_dict()), rtol=near, atol=near)


@pytest.mark.parametrize("family", ["swin", "torch.nn.TransformerDecoder"])
def test_other_layouts_take_both(family):
    subject, batches = subject_of(family)
    model, plain = pruned(subject), pruned(subject)
    report = recovered(model, batches, BOTH, subject.model)
    recovered(plain, batches, Lstsq(ridge=None, feed_forward=True), subject.model)
    assert report.metrics["error_after"] < report.metrics["error_before"]
    name = report.changed[0]
    assert not torch.equal(model.state_dict()[name], plain.state_dict()[name])
    chosen = report.metrics["ridges"]
    assert set(chosen) == set(report.metrics["errors"])
    assert set(chosen.values()) <= {NO_CHANGE, BIAS_ALONE, *RIDGES}


def test_each_run_of_a_pass_has_the_examples_of_its_batch():
    subject, batches = subject_of("bert")
    first, second = ({k: v for k, v in b.items() if k != "labels"} for b in batches)
    two, teacher = TwoSentences(pruned(subject)), TwoSentences(subject.model)
    report = recovered(two, [{"first": first, "second": second}], BOTH, teacher)
    assert report.metrics["error_after"] < report.metrics["error_before"]


@pytest.mark.parametrize("choice", [NO_CHANGE, BIAS_ALONE])
def test_what_is_given_up_is_as_it_was(choice, monkeypatch):
    subject, batches = subject_of("llama")
    model = pruned(subject)
    before = copy.deepcopy(dict(model.state_dict()))
    monkeypatch.setattr(_layerwise, "best", lambda errors, of: choice)
    report = recovered(model, batches, Lstsq(ridge=None), subject.model)
    weights = {k: v for k, v in model.state_dict().items() if k in before}
    assert_close(weights, before, rtol=0, atol=0)
    if choice == BIAS_ALONE:
        assert {name.rpartition(".")[2] for name in report.changed} == {"bias"}
        return
    assert report.changed == ()
    assert report.metrics["biases_added"] == report.metrics["projections"] == 0
    assert any("Not refitted" in note for note in report.notes)
    assert report.metrics["error_after"] == pytest.approx(report.metrics["error_before"], rel=1e-9)
    # mean_fold still has something to do
    assert recovered(model, batches, "mean_fold", subject.model).metrics["heads"] > 0


def test_few_examples_are_said_with_how_many_would_do():
    found = notes({"a": NO_CHANGE, "b": 0.3}, {"a": (300, 400), "b": (300, 100)}, 20)
    assert found[0].endswith(": a.")
    assert "1 of 2 projections" in found[1]
    assert "Use about 54 examples, not 20" in found[1]  # 800 tokens at 15 an example
    assert notes({"a": 0.3}, {"a": (800, 400)}, 20) == []
    # A ridge that is given: fewer tokens than numbers are few.
    assert len(notes({}, {"a": (399, 400)}, 20)) == 1
    assert notes({}, {"a": (400, 400)}, 20) == []
    subject, batches = subject_of("bert")
    one = [{k: v[:1] for k, v in batches[0].items()}]
    alone, given = pruned(subject), pruned(subject)
    report = recovered(alone, one, Lstsq(), subject.model)
    assert report.notes[0].startswith("No examples could be held out to choose a ridge, so 0.3 was")
    recovered(given, one, Lstsq(ridge=0.3), subject.model)
    assert_close(dict(alone.state_dict()), dict(given.state_dict()), rtol=0, atol=0)


def test_held_out_examples_do_not_follow_an_order():
    held = is_held_out(torch.arange(4000)).float()
    assert float(held.mean()) == 0.25
    for period in (2, 3, 4, 7, 8, 23):
        for first in range(period):
            assert float(held[first::period].mean()) == pytest.approx(0.25, abs=0.09)


def test_a_part_that_is_all_padding_holds_nothing_out():
    subject, batches = subject_of("bert")
    two = {k: v[:2].clone() for k, v in batches[0].items()}
    for padded in (0, 1):
        batch = {**two, "attention_mask": two["attention_mask"].clone()}
        batch["attention_mask"][padded] = 0
        report = recovered(pruned(subject), [batch], Lstsq(), subject.model)
        assert set(report.metrics["ridges"].values()) == {0.3}
        assert "No examples could be held out" in report.notes[0]
        assert report.changed


def test_fp32_sums_choose_alike():
    subject, batches = subject_of("bert", 4)
    subject.model.float()
    found = []
    for precision in ("float64", "float32"):
        model = pruned(subject, later(subject))
        settings = replace(BOTH, precision=precision)
        report = hp.recover_(model, batches, settings, subject.model)
        found.append((report.metrics["ridges"], dict(model.state_dict())))
        assert hp.recovery.RecoveryReport.from_json(report.to_json()) == report
    assert found[0][0] == found[1][0]
    assert_close(found[0][1], found[1][1], rtol=2e-3, atol=2e-3)
