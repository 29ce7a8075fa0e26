"""lstsq: tokens weighted by what the output feels, and ridges chosen by held-out error, against
slow transcriptions."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification, BertModel

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.double import Doubled
from headprune.model.running import call
from headprune.model.sites import bind
from headprune.recipes.validate import RecipeError, check_recipe
from headprune.recovery import Lstsq, _layerwise, _sensitivity
from headprune.recovery._held_out import (
    BIAS_ALONE,
    NO_CHANGE,
    RIDGES,
    best,
    choices,
    held_out_errors,
    notes,
)
from headprune.recovery._least_squares import LeastSquaresSums, pooled, solved
from headprune.recovery._sensitivity import sensitivities
from headprune.recovery._side_by_side import quiet
from headprune.run import runner
from tests.laws.support import Subject, family_subject
from tests.reference import recovery as reference
from tests.unit.test_recovery_lstsq import TwoSentences, later, pruned, recovered, subject_of
from tests.unit.test_run_gradual import raw

Array = NDArray[np.float64]
BOTH = Lstsq(ridge=None, token_weights="output", feed_forward=True)

# ---------------------------------------------------------------- what the output feels


def small_bert(labels: int) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=20,
        max_position_embeddings=16,
        num_labels=labels,
        initializer_range=0.5,
    )
    return BertForSequenceClassification(config).double().eval()


def some_tokens() -> dict[str, Tensor]:
    ids = torch.randint(1, 20, (3, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[2, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def felt(model: nn.Module, batch: Any, run: Any = call) -> list[Tensor]:
    """By layer of attention, ``[batch, tokens]``."""
    bound = bind(model)
    with quiet(model, model, list(zip(bound, bound, strict=True))):
        found = sensitivities(model, [b.gate for b in bound], batch, run)
    return [of_call.squeeze(-1) for of_projection in found for of_call in of_projection]


def slopes(model: nn.Module, projection: nn.Module, batch: Any, step: float = 1e-5) -> Tensor:
    """``[batch, tokens, width, outputs]`` by differences."""

    def logits(change: Tensor | None) -> Tensor:
        handle = projection.register_forward_hook(
            lambda m, a, out: out if change is None else out + change
        )
        with torch.no_grad():
            found = model(**batch).logits
        handle.remove()
        return found

    shape = (*batch["input_ids"].shape, 8)
    rows = []
    for place in range(shape[1] * shape[2]):
        change = torch.zeros(shape, dtype=torch.float64).flatten(1)
        change[:, place] = step
        change = change.view(shape)
        rows.append((logits(change) - logits(-change)) / (2 * step))
    return torch.stack(rows, 1).unflatten(1, shape[1:])


def test_one_output_is_felt_as_differences_say() -> None:
    """The square of a sign is 1: nothing is random where an example has one number."""
    model, batch = small_bert(1), some_tokens()
    for layer, found in zip(model.bert.encoder.layer, felt(model, batch), strict=True):
        expected = slopes(model, layer.attention.output.dense, batch)[..., 0].square().sum(-1)
        assert_close(found, expected, rtol=1e-5, atol=1e-9)
        assert float(expected[:, 0].min()) > 1e-3
    assert (
        float(found[:, 1:].max()) < 1e-20
    )  # of the last layer the classifier reads the first token alone


def test_several_outputs_are_felt_on_average_as_differences_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = small_bert(3), some_tokens()
    monkeypatch.setattr(_sensitivity, "DRAWS", 1500)
    found = felt(model, batch)[0]
    expected = (
        slopes(model, model.bert.encoder.layer[0].attention.output.dense, batch)
        .square()
        .sum((-1, -2))
    )
    assert_close(found, expected, rtol=0.15, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_what_is_felt_depends_on_the_example_alone(family: str) -> None:
    subject, (batch, *_) = subject_of(family)
    with Doubled():
        together = felt(subject.model, batch)
        for example in range(3):
            alone = felt(subject.model, {k: v[example : example + 1] for k, v in batch.items()})
            for whole, single in zip(together, alone, strict=True):
                assert_close(whole[example : example + 1], single, rtol=1e-8, atol=1e-12)
                assert float(single.max()) > 0


def test_padding_neither_counts_nor_changes_the_signs() -> None:
    model, batch = small_bert(3), some_tokens()
    longer = {k: torch.cat([v, torch.zeros_like(v)], 1) for k, v in batch.items()}
    for short, long in zip(felt(model, batch), felt(model, longer), strict=True):
        assert_close(long[:, :5], short, rtol=1e-9, atol=1e-12)


def test_a_bare_encoder_and_a_loss_are_felt() -> None:
    subject, batch = small_bert(3), some_tokens()
    encoder: Any = BertModel(subject.config, add_pooling_layer=False).double().eval()
    assert all(float(layer.min()) > 0 for layer in [one[:2] for one in felt(encoder, batch)])
    assert float(felt(encoder, batch)[-1][2, 3:].max()) == 0  # padding that nothing else reads
    answers = {**batch, "labels": torch.tensor([0, 2, 1])}

    def loss(model: nn.Module, given: Any) -> Tensor:
        out = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
        return nn.functional.cross_entropy(out, given["labels"], reduction="none")

    found = felt(subject, answers, loss)
    probabilities = subject(**batch).logits.detach().softmax(-1) - nn.functional.one_hot(
        answers["labels"], 3
    )
    exact = slopes(subject, subject.bert.encoder.layer[0].attention.output.dense, batch)
    assert_close(
        found[0],
        (exact * probabilities[:, None, None]).sum(-1).square().sum(-1),
        rtol=1e-5,
        atol=1e-9,
    )


def test_what_cannot_be_differentiated_is_said() -> None:
    subject, batches = subject_of("bert")
    mean = torch.no_grad()(lambda model, batch: model(**batch).logits.sum(-1))
    before = copy.deepcopy(pruned(subject).state_dict())
    for loss, error, words in (
        (mean, InvalidValue, "numbers of each of 3 examples"),
        (torch.no_grad()(lambda model, batch: model(**batch)), UnsupportedModel, "without a graph"),
        (
            lambda model, batch: model(**batch).logits.mean(),
            InvalidValue,
            "numbers of each of 3 examples",
        ),
    ):
        model = pruned(subject)
        with pytest.raises(error, match=rf"(?s){words}.*token_weights=\"equal\""):
            recovered(model, batches, Lstsq(token_weights="output"), subject.model, loss=loss)
        assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


# ---------------------------------------------------------------- weighted fits


def weighted(x: Array, e: Array, w: Array, ridge: float) -> tuple[Array, Array]:
    """Ridge with an intercept, as one long system whose rows are tokens."""
    x_mean, e_mean = (w[:, None] * x).sum(0) / w.sum(), (w[:, None] * e).sum(0) / w.sum()
    centred = x - x_mean
    strength = ridge * (w[:, None] * centred**2).sum() / x.shape[1]
    rows = np.concatenate([np.sqrt(w)[:, None] * centred, math.sqrt(strength) * np.eye(x.shape[1])])
    right = np.concatenate([np.sqrt(w)[:, None] * (e - e_mean), np.zeros((x.shape[1], e.shape[1]))])
    weight = np.linalg.lstsq(rows, right, rcond=None)[0]
    return weight, e_mean - x_mean @ weight


def test_a_weighted_fit_is_numpys() -> None:
    subject, batches = subject_of("bert")
    site, place = subject.sites[-1], reference.bert(2, False)[0]
    mask = subject.without({site.name: site.units[0]})
    model, before = pruned(subject, mask), pruned(subject, mask)
    report = recovered(model, batches, Lstsq(token_weights="output"), subject.model)
    with Doubled():
        felt_tokens = [felt(subject.model, batch)[-1] for batch in batches]
    kept = [
        felt_tokens[n][i, reference.real(place, batch, i, batch["input_ids"].shape[1])]
        for n, batch in enumerate(batches)
        for i in range(3)
    ]
    s = torch.cat(kept).numpy()
    x, _, ours = reference.rows(before, place, batches)
    theirs = reference.rows(subject.model, place, batches)[2]
    weight, bias = weighted(x, theirs - ours, 0.1 + 0.9 * s / s.mean(), 0.3)
    dense, old = (one.get_submodule(place.projection) for one in (model, before))
    assert_close(
        dense.weight.detach(),
        old.weight.detach() + torch.from_numpy(weight.T),
        rtol=1e-7,
        atol=1e-8,
    )
    assert_close(
        dense.bias.detach(), old.bias.detach() + torch.from_numpy(bias), rtol=1e-7, atol=1e-8
    )
    error = reference.error(model, subject.model, place, batches)  # of all tokens alike
    assert report.metrics["error_after"] == pytest.approx(error, rel=1e-6)
    equal = pruned(subject, mask)
    recovered(equal, batches, Lstsq(), subject.model)
    assert (
        float((equal.get_submodule(place.projection).weight - dense.weight).detach().abs().max())
        > 1e-3
    )


def test_moments_of_weighted_tokens() -> None:
    torch.manual_seed(0)
    x, e, w = torch.randn(30, 4).double() + 50, torch.randn(30, 3).double(), torch.rand(30).double()
    counted = torch.rand(30) > 0.3
    sums = LeastSquaresSums(torch.float64)
    for rows in (slice(0, 12), slice(12, 30)):
        sums.add(
            x[rows], torch.where(counted[rows, None], e[rows], torch.nan), counted[rows], w[rows]
        )
    normal = sums.done()
    x, e, w = x[counted], e[counted], w[counted]
    x_mean, e_mean = (w[:, None] * x).sum(0) / w.sum(), (w[:, None] * e).sum(0) / w.sum()
    assert_close(normal.n, w.sum())
    assert int(normal.tokens) == int(counted.sum())
    assert_close((normal.x_mean, normal.e_mean), (x_mean, e_mean))
    assert_close(normal.xx, (x - x_mean).T @ (w[:, None] * (x - x_mean)))
    assert_close(normal.xe, (x - x_mean).T @ (w[:, None] * (e - e_mean)))
    assert_close(normal.ee, (w[:, None] * (e - e_mean) ** 2).sum())
    weight, bias = torch.randn(4, 3).double(), torch.randn(3).double()
    assert_close(
        normal.remaining_error(weight, bias), (w[:, None] * (e - x @ weight - bias) ** 2).sum()
    )


def test_nothing_felt_weighs_alike() -> None:
    alike = _layerwise._weights(torch.zeros(3), torch.zeros(()))
    assert_close(alike, torch.ones(3))
    assert_close(
        _layerwise._weights(torch.tensor([0.0, 4.0]), torch.tensor(2.0)), torch.tensor([0.1, 1.9])
    )


# ---------------------------------------------------------------- ridges by held-out error


def parts_of(x: Tensor, e: Tensor, w: Tensor | None = None, folds: int = 4) -> list[Any]:
    parts = []
    for fold in range(folds):
        sums = LeastSquaresSums(torch.float64)
        sums.add(x[fold::folds], e[fold::folds], None, None if w is None else w[fold::folds])
        parts.append(sums.done())
    return parts


def drawn(n: int = 120) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, noise, weights, and a map ``[in, out]``."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(n, 6), (n, 5), (6, 5)]
    x, noise, linear = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes
    )
    return x + 2, noise, torch.rand(n, generator=generator, dtype=torch.float64) + 0.1, linear


@pytest.mark.parametrize("weights", [False, True])
def test_held_out_errors_are_those_of_fits_to_the_other_parts(weights: bool) -> None:
    x, noise, w, linear = drawn()
    e = x @ linear + noise + 1
    found = held_out_errors(
        parts_of(x, e, w if weights else None), lambda n, r: n.xe, intercept=True
    )
    xs, es, ws = x.numpy(), e.numpy(), w.numpy() if weights else np.ones(len(x))
    expected = np.zeros(2 + len(RIDGES))
    for fold in range(4):
        held = np.arange(len(xs)) % 4 == fold
        x_in, e_in, w_in = xs[~held], es[~held], ws[~held]
        e_mean = (w_in[:, None] * e_in).sum(0) / w_in.sum()
        fits = [weighted(x_in, e_in, w_in, ridge) for ridge in RIDGES]
        left = [
            es[held],
            es[held] - e_mean,
            *[es[held] - xs[held] @ weight - bias for weight, bias in fits],
        ]
        expected += [(ws[held][:, None] * rest**2).sum() for rest in left]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4)
    assert best(found.tolist(), choices(True, 6)) == choices(True, 6)[int(expected.argmin())]


def test_without_an_intercept_the_bias_stays() -> None:
    x, noise, _, linear = drawn()
    e = x @ linear + noise
    found = held_out_errors(parts_of(x, e), lambda n, r: n.xe, intercept=False)
    expected = torch.zeros(1 + len(RIDGES), dtype=torch.float64)
    for fold in range(4):
        held = torch.arange(len(x)) % 4 == fold
        left = [e[held]]
        for ridge in RIDGES:
            weight, _ = solved(x[~held].T @ x[~held], x[~held].T @ e[~held], ridge)
            left.append(e[held] - x[held] @ weight)
        expected += torch.stack([rest.square().sum() for rest in left])
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert choices(False, 6)[0] == NO_CHANGE
    assert len(choices(False, 6)) == len(found)


def test_noise_is_not_fitted_and_what_is_linear_is() -> None:
    x, noise, _, linear = drawn()
    chosen = {}
    for name, e in {
        "noise": noise - noise.mean(0),
        "shift": noise + 9,
        "linear": x @ linear + 3,
    }.items():
        chosen[name] = best(
            held_out_errors(parts_of(x, e), lambda n, r: n.xe, True).tolist(), choices(True, 6)
        )
    assert chosen == {"noise": NO_CHANGE, "shift": BIAS_ALONE, "linear": min(RIDGES)}


def test_no_columns_have_a_bias_alone() -> None:
    _, noise, _, _ = drawn()
    errors = held_out_errors(parts_of(noise[:, :0], noise + 9), lambda n, r: n.xe, True)
    assert best(errors.tolist(), choices(True, 0)) == BIAS_ALONE


def test_the_more_cautious_of_equals_and_nothing_that_failed() -> None:
    of = choices(True, 1)
    assert best([1.0] * len(of), of) == NO_CHANGE
    assert best([math.nan, 5.0, math.inf, 4.0, 4.0, math.nan], of) == 3.0


def test_parts_add_up() -> None:
    x, noise, w, _ = drawn()
    whole, of_parts = parts_of(x, noise, w, 1)[0], pooled(parts_of(x, noise, w))
    for name in ("tokens", "n", "x_mean", "e_mean", "xx", "xe", "ee"):
        assert_close(getattr(of_parts, name), getattr(whole, name))


def more(subject: Subject, batches: Sequence[Any]) -> list[Any]:
    """Seven examples."""
    extra = family_subject(subject.layout.name, subject.family, 9).batch
    return [*batches, {k: v[:1] for k, v in extra.items()}]


@pytest.mark.parametrize("family", ["bert", "t5", "llama", "vit"])
def test_the_batch_size_does_not_matter(family: str) -> None:
    subject, batches = subject_of(family)
    batches = more(subject, batches)
    expected = pruned(subject)
    report = recovered(expected, batches, BOTH, subject.model)
    model = pruned(subject)
    singles = [
        {k: v[i : i + 1] for k, v in b.items()}
        for b in batches
        for i in range(len(next(iter(b.values()))))
    ]
    again = recovered(model, singles, BOTH, subject.model)
    assert again.metrics["ridges"] == report.metrics["ridges"]
    assert set(report.metrics["ridges"]) == set(report.metrics["errors"])
    assert_close(dict(model.state_dict()), dict(expected.state_dict()), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("family", ["bert", "t5", "albert"])
def test_kept_streams_and_slopes_change_nothing(family: str) -> None:
    subject, batches = subject_of(family)
    models = []
    for room in (2**30, 0, 3000):
        models.append(pruned(subject))
        settings = Lstsq(ridge=None, token_weights="output", feed_forward=True, max_bytes=room)
        recovered(models[-1], batches, settings, subject.model)
    for model in models[1:]:
        assert_close(dict(model.state_dict()), dict(models[0].state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        "swin",
        "torch.nn.MultiheadAttention",
        "torch.nn.TransformerDecoder",
        "multi_head_attention",
    ],
)
def test_every_layout_takes_both(family: str) -> None:
    subject, batches = subject_of(family)
    model, plain = pruned(subject), pruned(subject)
    report = recovered(
        model, batches, Lstsq(token_weights="output", feed_forward=True), subject.model
    )
    recovered(plain, batches, Lstsq(feed_forward=True), subject.model)
    assert report.metrics["error_after"] < report.metrics["error_before"]
    name = report.changed[0]
    assert not torch.equal(model.state_dict()[name], plain.state_dict()[name])
    chosen = recovered(pruned(subject), batches, BOTH, subject.model).metrics["ridges"]
    assert set(chosen) == set(report.metrics["errors"])
    assert set(chosen.values()) <= {NO_CHANGE, BIAS_ALONE, *RIDGES}


def test_each_run_of_a_pass_has_the_examples_of_its_batch() -> None:
    subject, batches = subject_of("bert")
    inputs = [{k: v for k, v in b.items() if k != "labels"} for b in batches]
    two = TwoSentences(pruned(subject))
    report = recovered(
        two, [{"first": inputs[0], "second": inputs[1]}], BOTH, TwoSentences(subject.model)
    )
    assert report.metrics["error_after"] < report.metrics["error_before"]


def test_rows_are_of_the_examples_of_their_batch() -> None:
    from headprune.recovery._targets import Target

    plain = nn.Linear(4, 4)
    target = Target("down", plain, plain)
    assert target.examples(torch.zeros(3, 2, 4), None, 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert target.examples(torch.zeros(2, 3, 4), None, 3).tolist() == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]  # the tokens come first
    assert target.examples(torch.zeros(6, 4), None, 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert target.examples(torch.zeros(6, 2, 4), None, 3).tolist() == [
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        2,
        2,
        2,
        2,
    ]
    assert target.examples(torch.zeros(5, 4), None, 3).tolist() == [0, 1, 2, 3, 4]
    assert Target("down", plain, plain, tokens_first=True).examples(torch.zeros(3, 3, 4), None, 3)[
        :3
    ].tolist() == [
        0,
        1,
        2,
    ]


def test_what_is_given_up_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, batches = subject_of("llama")
    model = pruned(subject)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(_layerwise, "best", lambda errors, of: NO_CHANGE)
    report = recovered(model, batches, Lstsq(ridge=None), subject.model)
    assert report.changed == ()
    assert report.metrics["biases_added"] == report.metrics["projections"] == 0
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert any("Not refitted" in note for note in report.notes)
    assert report.metrics["error_after"] == pytest.approx(report.metrics["error_before"], rel=1e-9)
    assert (
        recovered(model, batches, "mean_fold", subject.model).metrics["heads"] > 0
    )  # it still has something to do
    model = pruned(subject)
    monkeypatch.setattr(_layerwise, "best", lambda errors, of: BIAS_ALONE)
    report = recovered(model, batches, Lstsq(ridge=None), subject.model)
    assert {name.rpartition(".")[2] for name in report.changed} == {"bias"}
    weights = {k: v for k, v in model.state_dict().items() if k in before}
    assert_close(weights, dict(before), rtol=0, atol=0)


def test_few_examples_are_said_with_how_many_would_do() -> None:
    found = notes({"a": NO_CHANGE, "b": 0.3}, {"a": (300, 400), "b": (300, 100)}, 20)
    assert found[0].endswith(": a.")
    assert "1 of 2 projections" in found[1]
    assert "54 examples in place of 20" in found[1]  # 800 tokens at 15 an example
    assert notes({"a": 0.3}, {"a": (800, 400)}, 20) == []
    # A ridge that is given: fewer tokens than numbers are few.
    assert len(notes({}, {"a": (399, 400)}, 20)) == 1
    assert notes({}, {"a": (400, 400)}, 20) == []
    subject, batches = subject_of("bert")
    one = [{k: v[:1] for k, v in batches[0].items()}]
    with pytest.raises(InvalidValue, match="at least 2 examples"):
        recovered(pruned(subject), one, Lstsq(ridge=None), subject.model)


def test_fp32_sums_choose_alike() -> None:
    subject, batches = subject_of("bert", 4)
    subject.model.float()
    reports = []
    for precision in ("float64", "float32"):
        model = pruned(subject, later(subject))
        settings: Any = Lstsq(
            ridge=None, token_weights="output", feed_forward=True, precision=precision
        )  # type: ignore[arg-type]
        reports.append((hp.recover_(model, batches, settings, subject.model), model))
    assert reports[0][0].metrics["ridges"] == reports[1][0].metrics["ridges"]
    assert_close(
        dict(reports[0][1].state_dict()), dict(reports[1][1].state_dict()), rtol=2e-3, atol=2e-3
    )
    assert hp.recovery.RecoveryReport.from_json(reports[0][0].to_json()) == reports[0][0]


def test_a_recipe_asks_for_both(tmp_path: Path) -> None:
    step = {
        "method": "lstsq",
        "settings": {"ridge": None, "token_weights": "output", "feed_forward": True},
    }
    recipe = check_recipe(raw(tmp_path, recover=[step], report=True))
    assert dict(recipe.recover[0].settings) == step["settings"]
    record = runner.run_recipe(recipe, say=lambda line: None)
    assert record.status == "done"
    assert record.metrics["recovery"]["0"]["ridges"]
    wrong = {"method": "lstsq", "settings": {"token_weights": "all"}}
    with pytest.raises(RecipeError, match="must be 'equal' or 'output'"):
        check_recipe(raw(tmp_path, recover=[wrong]))


def test_bad_token_weights_are_refused() -> None:
    with pytest.raises(InvalidValue, match=r"Lstsq\.token_weights: must be one of equal, output"):
        Lstsq(token_weights="some")  # type: ignore[arg-type]
