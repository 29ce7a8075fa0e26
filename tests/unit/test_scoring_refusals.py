"""What scorers refuse and in which words; what scores say that their numbers cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from headprune import scoring
from headprune.attention import MultiHeadAttention
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.model.losses import default_loss
from headprune.model.running import batch_size
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from tests.laws.support import Subject, family_subject, logits, subject_of
from tests.scoring_help import own_loss, score, split

ONE_OF_EACH: list[Any] = [
    scoring.Taylor(),
    scoring.Taylor(reduce="token"),
    scoring.Taylor(normalize="l2"),
    scoring.Taylor(reduce="batch"),
    scoring.Fisher(),
    scoring.Ggn(),
    scoring.IntegratedGradients(points=3),
    scoring.AttributionPatching(base="mean"),
    scoring.LeaveOneOut(),
    scoring.AddOneIn(),
    scoring.Shapley(orders=1),
    scoring.Shapley(method="two_sided"),
    scoring.Wanda(),
    scoring.Obs(),
    scoring.Entropy(),
]


@pytest.fixture
def bert() -> Subject:
    return subject_of("bert")


def first_layer(model: Any, batch: Any) -> Tensor:
    """A loss that only the first layer moves."""
    mask = batch["attention_mask"]
    out = model.bert(batch["input_ids"], attention_mask=mask, output_hidden_states=True)
    return out.hidden_states[1].square().mean((1, 2))


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("scorer", "settings", "field"),
    [
        ("Taylor", {"reduce": "mean"}, "reduce"),
        ("Taylor", {"normalize": "l1"}, "normalize"),
        ("Taylor", {"reduce": "batch", "block": 0}, "block"),
        ("Taylor", {"block": 4}, "block"),
        ("Fisher", {"block": 0}, "block"),
        ("Ggn", {"draws": 0}, "draws"),
        ("IntegratedGradients", {"points": 0}, "points"),
        ("AttributionPatching", {"base": "noise"}, "base"),
        ("AttributionPatching", {"base": "corrupt"}, "corrupt"),
        ("AttributionPatching", {"corrupt": dict}, "corrupt"),
        ("LeaveOneOut", {"replacement": "noise"}, "replacement"),
        ("LeaveOneOut", {"pool": 3}, "pool"),
        ("LeaveOneOut", {"max_bytes": 0}, "max_bytes"),
        ("AddOneIn", {"max_bytes": 0}, "max_bytes"),
        ("Shapley", {"method": "exact"}, "method"),
        ("Shapley", {"orders": 0}, "orders"),
        ("Shapley", {"step": 0}, "step"),
        ("Shapley", {"truncation": 1.0}, "truncation"),
        ("Shapley", {"max_bytes": 0}, "max_bytes"),
        ("Obs", {"ridge": -1.0}, "ridge"),
        ("Obs", {"blocks": 0}, "blocks"),
        ("ActivationNorm", {"of": "heads"}, "of"),
        ("Fluctuation", {"normalize": "l2"}, "normalize"),
        ("Attattr", {"steps": 0}, "steps"),
        ("Attattr", {"of": "logit"}, "of"),
        ("Surgeon", {"curvature": "hessian"}, "curvature"),
        ("Surgeon", {"ridge": 0.0}, "ridge"),
        ("Surgeon", {"draws": 0}, "draws"),
        ("Surgeon", {"draws": 2, "curvature": "loss"}, "draws"),
        ("Surgeon", {"blocks": 0}, "blocks"),
        ("Stable", {"k": 0}, "k"),
        ("Stable", {"k": True}, "k"),
        ("Stable", {"k": 2, "confidence": 1}, "confidence"),
        ("Stable", {"k": 2, "first": 1}, "first"),
        ("Stable", {"k": 2, "growth": 1.0}, "growth"),
        ("Stable", {"k": 2, "rare": 0.0}, "rare"),
    ],
)
def test_wrong_settings_are_refused(scorer: str, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue, match=rf"{scorer}\.{field}"):
        getattr(scoring, scorer)(**settings)


@pytest.mark.parametrize("matrix", [scoring.fisher_matrix, scoring.ggn_matrix])
def test_a_matrix_of_an_unknown_structure_is_refused(matrix: Any) -> None:
    with pytest.raises(InvalidValue, match="structure="):
        matrix(nn.Linear(1, 1), [], structure="banded")


# ---------------------------------------------------------------- scorers and data


def test_what_is_no_scorer_is_refused(bert: Subject) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'taylor'"):
        score(bert, "tayler")
    for scorer in ([3], [scoring.Taylor], ["taylor", None]):
        with pytest.raises(InvalidValue, match="a configured scorer or one of the names"):
            score(bert, scorer)
    with pytest.raises(InvalidValue, match="an empty list"):
        score(bert, [])
    assert {"Taylor", "Random", "gate_gradients"} <= set(dir(scoring))


def test_no_data_is_refused(bert: Subject) -> None:
    for name in ("taylor", "obs", "wanda", "entropy", "surgeon"):
        with pytest.raises(InvalidValue, match=r"given, because .*needs data"):
            hp.score(bert.model, None, name)
    for given in ([], iter(())):
        with pytest.raises(InvalidValue, match="at least one batch"):
            hp.score(bert.model, given, "taylor")
    with pytest.raises(InvalidValue, match=r"batch 1: must be one with examples"):
        score(bert, "taylor", [bert.batch, {k: v[:0] for k, v in bert.batch.items()}])


def test_a_single_batch_in_place_of_a_list_is_refused(bert: Subject) -> None:
    for batch in (bert.batch, bert.batch["input_ids"]):
        with pytest.raises(InvalidValue, match=r"an iterable of batches.*Wrap a single batch"):
            hp.score(bert.model, batch)


def test_a_batch_that_is_no_mapping_needs_a_loss() -> None:
    subject = subject_of("vit")
    with pytest.raises(InvalidValue, match=r"a mapping with the model's inputs.*Pass loss="):
        score(subject, "taylor", [subject.batch["pixel_values"]])


def test_labels_are_asked_for_where_the_loss_needs_them(bert: Subject) -> None:
    without = ["wanda", "entropy", "ggn", "surgeon"]
    labelled = score(bert, without, loss=None)
    del bert.batch["labels"]
    words = r"with 'labels', got only \['attention_mask', 'input_ids'\].*loss="
    for scorer in ("taylor", "fisher", "leave_one_out", "attattr"):
        with pytest.raises(InvalidValue, match=words):
            score(bert, scorer)
    bare = score(bert, without, loss=None)
    assert [s.values for s in bare] == [s.values for s in labelled]


@pytest.mark.parametrize("scorer", ["leave_one_out", "taylor", "activation_norm"])
def test_a_cache_in_a_batch_is_refused(scorer: str) -> None:
    from transformers import DynamicCache

    subject = subject_of("gpt2")
    with pytest.raises(InvalidValue, match=r"past_key_values.*left out, for every pass would add"):
        score(subject, scorer, [{**subject.batch, "past_key_values": DynamicCache()}])


def test_nothing_but_padding_is_refused(bert: Subject) -> None:
    mask = torch.zeros_like(bert.batch["attention_mask"])
    for scorer in (
        scoring.Wanda(),
        scoring.Entropy(),
        scoring.Attattr(steps=1),
        scoring.Surgeon(),
        scoring.LeaveOneOut(replacement="mean"),
    ):
        with pytest.raises(
            InvalidValue, match=r"with a token that|no padding, got only padding at"
        ):
            score(bert, scorer, [{**bert.batch, "attention_mask": mask}])


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda m, b: m(**b).loss, r"got \[\]"),
        (lambda m, b: m(**b).logits, r"got \[3, 3\]"),
        (lambda m, b: m(**b).loss.item(), "got float"),
        (lambda m, b: logits(m, b).mean(1, keepdim=True), r"got \[3, 1\]"),
    ],
    ids=["mean", "logits", "float", "column"],
)
def test_a_loss_of_the_wrong_shape(bert: Subject, loss: Any, got: str) -> None:
    for scorer in ("taylor", "leave_one_out"):
        with pytest.raises(InvalidValue, match=rf"\[3\], one loss per example, {got}"):
            score(bert, scorer, loss=loss)


def test_a_loss_without_a_graph(bert: Subject) -> None:
    def under_no_grad(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            return default_loss(model, batch)

    for loss in (under_no_grad, lambda m, b: default_loss(m, b).detach()):
        with pytest.raises(InvalidValue, match=r"not detached, not under no_grad"):
            score(bert, "taylor", loss=loss)


@pytest.mark.parametrize(
    "scorer", ["taylor", "fisher", "taylor2", "integrated_gradients", "attribution_patching"]
)
def test_a_loss_that_does_not_see_a_layer(bert: Subject, scorer: str) -> None:
    with pytest.raises(InvalidValue, match=rf"{bert.sites[1].name}.*no dependence on it.*sites="):
        score(bert, scorer, loss=first_layer)
    found = score(bert, scorer, loss=first_layer, sites=bert.sites[:1])
    assert [len(row) for row in found.values] == [4]


def test_activations_and_maps_that_are_not_finite(bert: Subject) -> None:
    ids = bert.batch["input_ids"]
    odd = next(int(i) for i in ids[1, :3] if i not in ids[0])
    with torch.no_grad():
        bert.model.bert.embeddings.word_embeddings.weight[odd] = torch.nan
    with pytest.raises(InvalidValue, match="the attention maps of example 1: must be finite"):
        score(bert, scoring.Entropy())
    with pytest.raises(InvalidValue, match="finite"):
        score(bert, scoring.Wanda())


# ---------------------------------------------------------------- models


def test_weights_that_are_nowhere_are_refused(bert: Subject) -> None:
    bert.model.bert.encoder.layer[1].to("meta")
    for scorer in ("taylor", "leave_one_out", "magnitude"):
        with pytest.raises(UnsupportedModel, match=r"got bert\.encoder\.layer\.1\..* meta device"):
            score(bert, scorer)


def test_a_model_without_heads_is_refused(bert: Subject) -> None:
    with pytest.raises(UnsupportedModel, match="no attention-like module"):
        hp.score(nn.Linear(2, 2), [torch.ones(1, 2)])
    hp.prune_(bert.model, bert.mask({s.name: [] for s in bert.sites}))
    for scorer in ("taylor", "magnitude"):
        with pytest.raises(UnsupportedModel, match="one with a head"):
            score(bert, scorer)


def test_a_site_that_never_runs_is_refused(bert: Subject) -> None:
    bert.model.spare = MultiHeadAttention(8, 2).double()
    for scorer in (scoring.Wanda(), scoring.Entropy(), scoring.Attattr(steps=1), scoring.Surgeon()):
        with pytest.raises((InvalidValue, UnsupportedModel), match="spare"):
            score(bert, scorer)


def test_attention_that_runs_on_no_whole_examples_is_refused() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiHeadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x.mean((1, 2)) + self.attention(x[1:]).mean()

    for scorer, words in (("entropy", "got a map of 2 rows"), ("surgeon", "got 2 rows")):
        with pytest.raises(UnsupportedModel, match=rf"must be run on 3 examples, {words}"):
            hp.score(Others(), [torch.randn(3, 4, 8)], scorer, loss=lambda m, x: m(x))


def test_a_fused_kernel_shows_no_maps() -> None:
    subject = family_subject("torch_multi_head", "torch.nn.MultiheadAttention")
    for scorer in (scoring.Entropy(), scoring.Attattr()):
        with pytest.raises(UnsupportedModel, match=r"attention map of first.*fused kernel"):
            score(subject, scorer, loss=own_loss)


def test_ggn_needs_logits_and_batches_that_the_model_takes(bert: Subject) -> None:
    del bert.batch["labels"]
    with pytest.raises(
        InvalidValue, match=r"batch 0: must be logits .*BaseModelOutput.*surgeon or fisher"
    ):
        hp.score(bert.model.bert, [bert.batch], "ggn", progress=False)
    model, x = nn.Sequential(MultiHeadAttention(8, 2)), torch.randn(6, 5, 8)
    with pytest.raises(InvalidValue, match=r"must be what Sequential takes.*without targets"):
        hp.score(model, [(x, x)], "ggn", loss=lambda m, b: m(b[0]).mean((1, 2)), progress=False)


def test_resampling_needs_unlike_examples_on_an_axis_of_their_own(bert: Subject) -> None:
    twice = {k: v[:1].repeat(2, *[1] * (v.ndim - 1)) for k, v in bert.batch.items()}
    with pytest.raises(InvalidValue, match="at least two unlike examples"):
        score(bert, scoring.LeaveOneOut(replacement="resample"), [twice])
    windows = family_subject("swin", "swin")
    with pytest.raises(InvalidValue, match="examples are no rows"):
        score(windows, scoring.LeaveOneOut(replacement="resample"))


def test_a_corrupted_batch_of_another_length_is_refused(bert: Subject) -> None:
    def shorter(batch: Any) -> Any:
        return {k: v[:, :5] if v.ndim == 2 else v for k, v in batch.items()}

    with pytest.raises(InvalidValue, match=r"corrupted batch at .*\[3, 7, 16\], got \[3, 5, 16\]"):
        score(bert, scoring.AttributionPatching(base="corrupt", corrupt=shorter))


def test_obs_without_a_ridge_needs_channels_that_do_not_depend_on_each_other(bert: Subject) -> None:
    with pytest.raises(InvalidValue, match=r"Obs\.ridge"):
        score(bert, scoring.Obs(ridge=0.0), split(bert.batch, 1)[2:])


# ---------------------------------------------------------------- notes


@pytest.mark.parametrize("scorer", ONE_OF_EACH, ids=repr)
def test_one_example_has_no_standard_error_and_says_so(bert: Subject, scorer: Any) -> None:
    one = split(bert.batch, 1)[0]
    single = score(bert, scorer, [one])
    assert (single.n_examples, single.standard_errors) == (1, None)
    assert any("standard error" in note for note in single.notes)


@pytest.mark.parametrize("scorer", ONE_OF_EACH[4:-3], ids=repr)
def test_equal_examples_promise_nothing_and_that_is_said(bert: Subject, scorer: Any) -> None:
    equal = score(bert, scorer, [split(bert.batch, 1)[0]] * 4)
    assert any("same numbers" in note for note in equal.notes)


def test_one_block_or_one_order_has_no_standard_error(bert: Subject) -> None:
    block, blocks, order = score(
        bert,
        [scoring.Taylor(reduce="batch"), scoring.Obs(blocks=1), scoring.Shapley(orders=1, step=4)],
    )
    assert block.standard_errors is None
    assert blocks.standard_errors is None
    assert any("not over orders" in note for note in order.notes)
    one = score(bert, scoring.Shapley(orders=2), split(bert.batch, 1)[:1])
    assert any("over orders alone" in note for note in one.notes)


def test_a_scorer_of_yours_that_says_nothing_of_its_error(bert: Subject) -> None:
    @dataclass(frozen=True)
    class Own(Scorer):
        def estimate(self, problem: ScoringProblem) -> Estimate:
            rows = problem.rows("own", lambda number, batch: torch.ones(batch_size(batch), 12))
            return Estimate(rows.mean(0), n_examples=len(rows))

    note = "No standard error: the scores rest on a single example."
    assert score(bert, Own(), split(bert.batch, 1)[:1]).notes == (note,)
    assert score(bert, Own()).notes == ()


def test_heads_that_change_nothing_are_told(bert: Subject) -> None:
    assert any(
        "No head of" in n for n in score(bert, scoring.LeaveOneOut(), loss=first_layer).notes
    )
    bert.model.classifier.weight.data.zero_()
    for scorer in (scoring.LeaveOneOut(), scoring.Ggn()):
        assert any("Every score is 0" in note for note in score(bert, scorer).notes)


def test_a_scorer_that_asks_no_loss_says_so(bert: Subject) -> None:
    def doubled(model: nn.Module, batch: Any) -> Tensor:
        return 2 * default_loss(model, batch)

    for scorer in (scoring.Ggn(), scoring.Surgeon(curvature="output")):
        quiet, told = score(bert, scorer), score(bert, scorer, loss=doubled)
        assert told.values == quiet.values
        assert quiet.notes == ()
        assert any("loss= was not asked" in note for note in told.notes)


def test_tokens_that_do_not_vary_are_told(bert: Subject) -> None:
    ones = torch.ones(3, 1, dtype=torch.long)
    batch = {**bert.batch, "input_ids": 5 * ones, "attention_mask": ones}
    found = score(bert, scoring.Fluctuation(), [batch])
    assert not any(map(any, found.values))
    assert any("Nothing varies over the tokens at" in note for note in found.notes)


def test_too_few_points_of_an_integral_are_told(bert: Subject) -> None:
    few, enough = score(bert, [scoring.IntegratedGradients(points=n) for n in (1, 48)])
    assert enough.notes == ()
    assert "take more points" in few.notes[0]
