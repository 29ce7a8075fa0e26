"""What scorers refuse and in which words; what scores say that their numbers cannot."""

import pytest
import torch
from torch import nn

import headprune as hp
from headprune import scoring
from headprune.attention import MultiHeadAttention
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.model.losses import default_loss
from tests.laws.support import family_subject, subject_of
from tests.scoring_help import own_loss, score, split

ONE_OF_EACH = [
    scoring.Taylor(),
    scoring.Taylor(reduce="batch"),
    scoring.Fisher(),
    scoring.Ggn(),
    scoring.AttributionPatching(base="mean"),
    scoring.LeaveOneOut(),
    scoring.Shapley(orders=1),
    scoring.Shapley(method="two_sided"),
    scoring.Wanda(),
    scoring.Obs(),
    scoring.Entropy(),
]
#: A scorer, settings that it refuses, and the one that is named.
WRONG_SETTINGS = [
    ("Taylor", {"reduce": "mean"}, "reduce"),
    ("Taylor", {"normalize": "l1"}, "normalize"),
    ("Taylor", {"reduce": "batch", "block": 0}, "block"),
    ("Taylor", {"block": 4}, "block"),
    ("Fisher", {"block": 0}, "block"),
    ("Ggn", {"draws": 0}, "draws"),
    ("IntegratedGradients", {"points": 0}, "points"),
    ("IntegratedGradients", {"points": 2.5}, "points"),
    ("AttributionPatching", {"base": "noise"}, "base"),
    ("AttributionPatching", {"base": "corrupt"}, "corrupt"),
    ("AttributionPatching", {"corrupt": dict}, "corrupt"),
    ("LeaveOneOut", {"replacement": "noise"}, "replacement"),
    ("LeaveOneOut", {"pool": 3}, "pool"),
    ("LeaveOneOut", {"max_bytes": 0}, "max_bytes"),
    ("AddOneIn", {"max_bytes": 0}, "max_bytes"),
    ("Shapley", {"method": "exact"}, "method"),
    ("Shapley", {"orders": 0}, "orders"),
    ("Shapley", {"orders": True}, "orders"),
    ("Shapley", {"step": 0}, "step"),
    ("Shapley", {"truncation": 1.0}, "truncation"),
    ("Shapley", {"max_bytes": 0}, "max_bytes"),
    ("Obs", {"ridge": -1.0}, "ridge"),
    ("Obs", {"blocks": 0}, "blocks"),
    ("ActivationNorm", {"of": "heads"}, "of"),
    ("Fluctuation", {"normalize": "l2"}, "normalize"),
    ("Attattr", {"steps": 0}, "steps"),
    ("Attattr", {"steps": "3"}, "steps"),
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
]


@pytest.fixture
def bert():
    return subject_of("bert")


def first_layer(model, batch):
    """A loss that only the first layer moves."""
    mask = batch["attention_mask"]
    out = model.bert(batch["input_ids"], attention_mask=mask, output_hidden_states=True)
    return out.hidden_states[1].square().mean((1, 2))


def refused(words, subject, scorers, *given, **options):
    """By each of these scorers."""
    for scorer in scorers:
        with pytest.raises((InvalidValue, UnsupportedModel), match=words):
            score(subject, scorer, *given, **options)


def test_wrong_settings_are_refused():
    for scorer, settings, field in WRONG_SETTINGS:
        with pytest.raises(InvalidValue, match=rf"{scorer}\.{field}"):
            getattr(scoring, scorer)(**settings)
    for matrix in (scoring.fisher_matrix, scoring.ggn_matrix):
        with pytest.raises(InvalidValue, match="structure="):
            matrix(nn.Linear(1, 1), [], structure="banded")


def test_what_is_no_scorer_is_refused(bert):
    with pytest.raises(UnknownName, match="Did you mean 'taylor'"):
        score(bert, "tayler")
    wrong = ([3], [scoring.Taylor], ["taylor", None])
    refused("a configured scorer or one of the names", bert, wrong)
    refused("an empty list", bert, [[]])
    assert {"Taylor", "Random", "gate_gradients"} <= set(dir(scoring))


def test_no_data_is_refused(bert):
    for name in ("taylor", "obs", "wanda", "entropy", "surgeon"):
        with pytest.raises(InvalidValue, match=r"given, because .*needs data"):
            hp.score(bert.model, None, name)
    for given in ([], iter(())):
        with pytest.raises(InvalidValue, match="at least one batch"):
            hp.score(bert.model, given, "taylor")
    for batch in (bert.batch, bert.batch["input_ids"]):
        with pytest.raises(InvalidValue, match=r"an iterable of batches.*Wrap a single batch"):
            hp.score(bert.model, batch)


def test_labels_are_asked_for_where_the_loss_needs_them(bert):
    without = ["wanda", "entropy", "ggn", "surgeon"]
    labelled = score(bert, without, loss=None)
    del bert.batch["labels"]
    words = r"with 'labels', got only \['attention_mask', 'input_ids'\].*loss="
    refused(words, bert, ("taylor", "fisher", "leave_one_out", "attattr"))
    bare = score(bert, without, loss=None)
    assert [s.values for s in bare] == [s.values for s in labelled]


def test_batches_that_no_scorer_can_read(bert):
    from transformers import DynamicCache

    gpt2 = subject_of("gpt2")
    cached = [{**gpt2.batch, "past_key_values": DynamicCache()}]
    words = r"past_key_values.*left out, because every pass would add"
    refused(words, gpt2, ("leave_one_out", "taylor", "activation_norm"), cached)
    nothing = [{**bert.batch, "attention_mask": torch.zeros_like(bert.batch["attention_mask"])}]
    attattr, mean = scoring.Attattr(steps=1), scoring.LeaveOneOut(replacement="mean")
    words = r"with a token that|no padding, got only padding at"
    refused(words, bert, ("wanda", "entropy", attattr, "surgeon", mean), nothing)


def test_a_loss_without_a_graph(bert):
    def under_no_grad(model, batch):
        with torch.no_grad():
            return default_loss(model, batch)

    for loss in (under_no_grad, lambda m, b: default_loss(m, b).detach()):
        refused("must be computed by the model with gradients", bert, ["taylor"], loss=loss)


def test_a_loss_that_does_not_see_a_layer(bert):
    scorers = ("taylor", "integrated_gradients", "attribution_patching")
    words = rf"{bert.sites[1].name}.*no dependence on it.*sites="
    refused(words, bert, scorers, loss=first_layer)
    refused("no dependence", bert, [scoring.Attattr(steps=1)], loss=first_layer)
    for found in score(bert, scorers, loss=first_layer, sites=bert.sites[:1]):
        assert [len(row) for row in found.values] == [4]


def test_activations_and_maps_that_are_not_finite(bert):
    ids = bert.batch["input_ids"]
    odd = next(int(i) for i in ids[1, :3] if i not in ids[0])
    with torch.no_grad():
        bert.model.bert.embeddings.word_embeddings.weight[odd] = torch.nan
    refused("the attention maps of example 1: must be finite", bert, ["entropy"])
    refused("finite", bert, ["wanda"])


def test_models_that_cannot_be_scored(bert):
    with pytest.raises(UnsupportedModel, match="no attention-like module"):
        hp.score(nn.Linear(2, 2), [torch.ones(1, 2)])
    spare = subject_of("bert")
    spare.model.spare = MultiHeadAttention(8, 2).double()  # it never runs
    refused("spare", spare, ("wanda", "entropy", scoring.Attattr(steps=1), "surgeon"))
    nowhere = subject_of("bert")
    nowhere.model.bert.encoder.layer[1].to("meta")
    words = r"got bert\.encoder\.layer\.1\..* meta device"
    refused(words, nowhere, ("taylor", "leave_one_out", "magnitude"))
    fused = family_subject("torch_multi_head", "torch.nn.MultiheadAttention")
    words = "attention map of first.*fused kernel"
    refused(words, fused, ("entropy", "attattr"), loss=own_loss)
    hp.prune_(bert.model, bert.mask({s.name: [] for s in bert.sites}))
    refused("one with a head", bert, ("taylor", "magnitude"))


def test_attention_that_runs_on_no_whole_examples_is_refused():
    class Others(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = MultiHeadAttention(8, 2)

        def forward(self, x):
            return x.mean((1, 2)) + self.attention(x[1:]).mean()

    cases = {
        "entropy": "must be a module whose map has one row per example, 3, got a map of 2 rows",
        "surgeon": "must be a module that reads whole examples, 3 in this batch, got 2 rows",
    }
    for scorer, words in cases.items():
        with pytest.raises(UnsupportedModel, match=words):
            hp.score(Others(), [torch.randn(3, 4, 8)], scorer, loss=lambda m, x: m(x))


def test_ggn_needs_logits_and_batches_that_the_model_takes(bert):
    del bert.batch["labels"]
    words = r"batch 0: must be logits .*BaseModelOutput.*surgeon, fisher or"
    with pytest.raises(InvalidValue, match=words):
        hp.score(bert.model.bert, [bert.batch], "ggn", progress=False)
    model, x = nn.Sequential(MultiHeadAttention(8, 2)), torch.randn(6, 5, 8)
    with pytest.raises(InvalidValue, match=r"must be what Sequential takes.*without targets"):
        hp.score(model, [(x, x)], "ggn", loss=lambda m, b: m(b[0]).mean((1, 2)), progress=False)


def test_data_that_a_setting_cannot_use(bert):
    resample = scoring.LeaveOneOut(replacement="resample")
    twice = {k: v[:1].repeat(2, *[1] * (v.ndim - 1)) for k, v in bert.batch.items()}
    refused("at least two unlike examples", bert, [resample], [twice])
    refused("has no row per example", family_subject("swin", "swin"), [resample])
    shorter = scoring.AttributionPatching(
        base="corrupt", corrupt=lambda b: {k: v[:, :5] if v.ndim == 2 else v for k, v in b.items()}
    )
    refused(r"corrupted batch at .*\[3, 7, 16\], got \[3, 5, 16\]", bert, [shorter])
    # Without a ridge channels must not depend on each other.
    refused(r"Obs\.ridge", bert, [scoring.Obs(ridge=0.0)], split(bert.batch, 1)[2:])


# ---------------------------------------------------------------- notes


def test_one_example_has_no_standard_error_and_equal_ones_promise_nothing(bert):
    one = split(bert.batch, 1)[:1]
    for single in score(bert, ONE_OF_EACH, one):
        assert (single.n_examples, single.standard_errors) == (1, None), single
        assert any("standard error" in note for note in single.notes), single
    for equal in score(bert, ONE_OF_EACH[2:-3], one * 4):
        assert any("same numbers" in note for note in equal.notes), equal


def test_heads_that_change_nothing_are_told(bert):
    notes = score(bert, scoring.LeaveOneOut(), loss=first_layer).notes
    assert any("No head of" in note for note in notes)
    bert.model.classifier.weight.data.zero_()
    for scorer in (scoring.LeaveOneOut(), scoring.Ggn()):
        assert any("Every score is 0" in note for note in score(bert, scorer).notes)


def test_a_scorer_that_asks_no_loss_says_so(bert):
    for scorer in (scoring.Ggn(), scoring.Surgeon(curvature="output")):
        quiet = score(bert, scorer)
        told = score(bert, scorer, loss=lambda m, b: 2 * default_loss(m, b))
        assert told.values == quiet.values
        assert quiet.notes == ()
        assert any("loss= was not used" in note for note in told.notes)


def test_what_scores_cannot_promise_is_told(bert):
    batch, blocks = score(bert, [scoring.Taylor(reduce="batch"), scoring.Obs(blocks=1)])
    assert batch.standard_errors is blocks.standard_errors is None
    order = score(bert, scoring.Shapley(orders=1, step=4))
    assert any("not over orders" in note for note in order.notes)
    one = score(bert, scoring.Shapley(orders=2), split(bert.batch, 1)[:1])
    assert one.standard_errors is not None
    assert any("over orders alone" in note for note in one.notes)
    few, enough = score(bert, [scoring.IntegratedGradients(points=n) for n in (1, 48)])
    assert (enough.notes, "take more points" in few.notes[0]) == ((), True)
    ones = torch.ones(3, 1, dtype=torch.long)
    same = {**bert.batch, "input_ids": 5 * ones, "attention_mask": ones}
    found = score(bert, scoring.Fluctuation(), [same])
    assert not any(map(any, found.values))
    assert any("Nothing varies over the tokens at" in note for note in found.notes)
