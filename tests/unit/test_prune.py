"""prune_ and prune_heads_: plans that do not fit, proofs that fail, reports, and the Transformers 4
call."""

import warnings
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import (
    InvalidValue,
    PlanMismatch,
    UnknownName,
    UnsupportedModel,
    VerificationFailed,
)
from headprune.core.plan import PruningPlan
from headprune.core.scores import ModelFingerprint
from headprune.layouts import registry
from headprune.model.fingerprint import fingerprint
from headprune.surgery import prune
from headprune.surgery.verify import TOLERANCE, compare
from tests.laws.support import CLOSE, EXACT, picture, subject_of, unchanged
from tests.unit.test_sites import ODD, odd_model

ONE, TWO = {"0": 2}, {"0": 2, "1": 2}
TOKENS = torch.zeros(0, 7, dtype=torch.long)
FOREIGN = PruningPlan(hp.HeadMask.from_keep({}, ONE), model=ModelFingerprint("0" * 64, "0" * 64))


class Labels(nn.Sequential):
    def forward(self, x):
        return self[0](x).argmax(-1)


def small():
    return nn.Sequential(hp.MultiHeadAttention(8, 2))


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        ("plan.json", InvalidValue, "plan: must be a PruningPlan, a HeadMask or an array"),
        ({"0": [1]}, InvalidValue, "plan: must be a PruningPlan, a HeadMask or an array"),
        (hp.HeadMask.from_keep({}, {"0": 3}), PlanMismatch, "with 3 heads at '0', .* got 2 heads"),
        (hp.HeadMask.from_keep({}, TWO), PlanMismatch, r"got one without such a site \(1 of 2"),
        (hp.HeadMask.from_keep({}, {"zero": 2}), PlanMismatch, "2 of 2 sites differ"),
        (FOREIGN, PlanMismatch, "one for another class or head width"),
        ([[1, 1]] * 2, InvalidValue, r"\[layers, heads\] with one row per site, 1, got 2 rows"),
        ([[1, 1, 1]], InvalidValue, r"array\[0\], for .*: must be one value per head, 2, got 3"),
        ([1], InvalidValue, "must be one value per head, 2, got 1"),
        ([[0, 2]], InvalidValue, r"array\[0\], .* 1 \(kept\) or 0 \(removed\) per head, got 2"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(plan, error, words):
    model = small()
    with unchanged(model), pytest.raises(error, match=words):
        hp.prune_(model, plan)


NO_LAYER = "layer: must be an index from -3 to 2, got "
NO_INDEX = "heads of layer 0: must be a collection of head indices"


@pytest.mark.parametrize(
    ("heads", "error", "words"),
    [
        ({3: [0]}, UnknownName, NO_LAYER + "3"),
        ({True: [0]}, UnknownName, NO_LAYER + "True"),
        ({0: [4]}, UnknownName, "head of layer 0: must be an index from 0 to 3, got 4"),
        ({1: [-1]}, UnknownName, "head of layer 1: must be an index from 0 to 3, got -1"),
        ({0: torch.tensor([0, 1, 0, 0])}, InvalidValue, NO_INDEX),
        ({0: [1.0]}, InvalidValue, NO_INDEX),
        ([[1]], InvalidValue, r"heads: must be \{layer: \[heads\]\}, got list"),
    ],
)
def test_layers_and_heads_that_are_none_change_nothing(heads, error, words):
    model = subject_of("gpt2").model
    with unchanged(model), pytest.raises(error, match=words):
        hp.prune_heads_(model, heads)


def nothing_finite(batch):
    return {**batch, "pixel_values": torch.full_like(batch["pixel_values"], float("nan"))}


@pytest.mark.parametrize(
    ("name", "example", "words"),
    [
        ("llama", lambda batch: {"input_ids": TOKENS}, "one with examples, got an empty batch"),
        ("llama", lambda batch: {"use_cache": True}, "made of tensors"),
        ("vit", nothing_finite, "a batch on which the model's outputs are finite"),
    ],
)
def test_an_example_that_proves_nothing_is_refused_before_any_change(name, example, words):
    subject = subject_of(name)
    with unchanged(subject.model), pytest.raises(InvalidValue, match=words):
        hp.prune_(subject.model, subject.ragged(), example(subject.batch))
    model = Labels(hp.MultiHeadAttention(8, 2))
    with pytest.raises(InvalidValue, match="returns floating-point tensors"):
        hp.prune_(model, hp.HeadMask.from_keep({"0": [1]}, ONE), torch.randn(2, 3, 8))


def test_a_part_of_a_group_is_refused_before_any_change():
    subject = subject_of("llama")
    first, _, last = subject.sites
    part = subject.mask({first.name: [2, 3], last.name: [0, 2, 3]})
    words = "whole groups of 2 query heads"
    with unchanged(subject.model), pytest.raises(InvalidValue, match=words):
        hp.prune_(subject.model, part)


def test_other_weights_are_a_warning_that_the_report_keeps():
    subject = subject_of("bert")
    plan = PruningPlan(subject.ragged(), model=fingerprint(subject.model, subject.sites))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hp.prune_(subject.copy(), plan).warnings == ()
    with torch.no_grad():
        next(subject.model.parameters()).mul_(1.5)
    with pytest.warns(UserWarning, match="same structure with other weights"):
        report = hp.prune_(subject.model, plan, subject.batch)
    (warning,) = report.warnings
    assert "other weights" in warning
    proof = report.proof
    assert (proof.dtype, proof.n_examples) == ("float64", 3)
    assert proof.max_difference <= proof.tolerance


def drop(path):
    """The odd module's layout without one slab: the tensor keeps every head."""
    slabs = tuple(s for s in ODD.slabs if s.path != path)
    return replace(ODD, slabs=slabs, untouched=(*ODD.untouched, path))


#: Layouts that fit the odd module by structure and are wrong.
PACKED = hp.HeadSlab("qkv", "out", ("query", "key", "value"))
WRONG = {
    "packing": replace(ODD, slabs=(PACKED, *ODD.slabs[1:])),
    "count": replace(ODD, counts=ODD.counts[:1]),
    "no temperature": drop("temperature"),
    "no buffer": drop("slopes"),
    "no attribute": drop("scale"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("keep", [[0, 1, 4, 5], []])
def test_a_layout_that_is_wrong_is_found_out_and_the_model_restored(name, keep):
    model, x = odd_model()
    sites = hp.find_sites(model, layouts=[WRONG[name]])
    mask = hp.HeadMask.from_keep({"0": [2, 3, 4, 5], "2": keep}, {"0": 6, "2": 6})
    before, expected = picture(model), model(x)
    # Wrong sizes fail in the module's own forward; wrong numbers fail the comparison.
    with pytest.raises(VerificationFailed) as caught:
        hp.prune_(model, mask, x, sites)
    if name == "packing" and keep:
        for words in ("equal to the gated one up to", "a difference of", "The model is unchanged"):
            assert words in str(caught.value)
    assert picture(model) == before
    assert_close(model(x), expected, **EXACT)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_any_interruption_of_the_proof_restores_the_model(monkeypatch, error):
    subject = subject_of("llama")
    monkeypatch.setattr(prune, "compare", Mock(side_effect=error))
    with unchanged(subject.model), pytest.raises(error):
        hp.prune_(subject.model, subject.mask({subject.sites[0].name: []}), subject.batch)


def test_random_models_are_compared_on_the_same_draw():
    """A model that draws numbers in evaluation mode (as ViT-MAE masks patches) is no wrong cut."""

    class Noisy(nn.Sequential):
        def forward(self, x):
            return self[0](x + torch.randn_like(x))

    model = Noisy(hp.MultiHeadAttention(8, 2, dtype=torch.float64))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    report = hp.prune_(model, hp.HeadMask.from_keep({"0": [1]}, ONE), x)
    assert report.proof.max_difference < 1e-10


def test_compare_takes_nan_other_shapes_and_other_counts_for_different():
    a = torch.ones(2, 3, dtype=torch.float64)
    assert compare([a], [a.clone()]).holds
    assert compare([a], [a + 5e-7]).holds  # fp32 norms inside an fp64 model
    assert not compare([a], [a + 2e-6]).holds
    assert compare([1e6 * a], [1e6 * a + 0.5]).holds  # relative to the largest output
    assert not compare([a], [a * torch.nan]).holds
    assert not compare([a], [a[:1]]).holds
    assert not compare([a], [a, a]).holds
    assert not compare([a, a.float()], [a, a.float() + 1e-4]).holds
    assert TOLERANCE[torch.float32] < TOLERANCE[torch.float16] < TOLERANCE[torch.bfloat16]
    some, other = torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([1.0, 2.0, torch.inf])
    assert compare([some], [some.clone()]).holds, "what is no number in both is no difference"
    assert not compare([other], [some]).holds
    assert not compare([some], [other]).holds


def test_the_report_says_what_was_done():
    model = small()
    report = hp.prune_(model, hp.HeadMask.from_keep({"0": [1]}, ONE))
    assert report.params_before == 4 * (64 + 8)
    assert report.params_after == report.params_before - 4 * 32 - 3 * 4
    assert str(report) == (
        "removed 1 heads, 288 -> 148 parameters (-48.6 %), not compared with the gated model (no"
        " example given)"
    )
    assert report.sites[0].heads == (1,)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_prune_heads_as_in_transformers_4(name):
    """A head that was removed may be named again, and the rest keep their numbers."""
    subject = subject_of(name)
    first, last = subject.sites[0], subject.sites[-1]
    group = first.group_size
    one, both, second = [*range(group)], [*range(2 * group)], [*range(group, 2 * group)]
    small, at_once = subject.copy(), subject.copy()
    report = hp.prune_heads_(small, {0: one, -1: second}, subject.batch)
    assert dict(report.removed) == {first.name: tuple(one), last.name: tuple(second)}
    with hp.gated(subject.model, subject.without({first.name: one, last.name: second})):
        assert_close(subject.run(small), subject.run(), **CLOSE)
    for nothing in ({0: one}, {}, {0: []}):
        with unchanged(small):
            assert hp.prune_heads_(small, nothing).n_removed == 0
    report = hp.prune_heads_(small, {0: both}, subject.batch)
    assert report.removed == ((first.name, tuple(second)),)
    hp.prune_heads_(at_once, {0: both, -1: second})
    assert_close(subject.run(small), subject.run(at_once), **EXACT)


def test_prune_heads_takes_every_kind_of_index():
    subject = subject_of("gpt2")
    for heads in (
        {-1: [1, 2]},
        {2: torch.tensor([1, 2])},
        {2: np.array([1, 2])},
        {np.int64(2): {1, 2}},
        {2: (i for i in (2, 1))},
        {2: [torch.tensor(1), np.int8(2)]},
    ):
        report = hp.prune_heads_(subject.copy(), heads)
        assert report.removed == ((report.sites[2].name, (1, 2)),), heads


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, lambda rows: np.array(rows, bool)])
def test_a_table_of_0_and_1_is_a_plan(make):
    subject, rest = subject_of("gpt2"), [[1, 1, 1, 1], [0, 0, 0, 1]]
    report = hp.prune_(subject.model, make([[1, 0, 1, 1], *rest]), subject.batch)
    assert [site.heads for site in report.sites] == [(0, 2, 3), (0, 1, 2, 3), (3,)]
    again = hp.prune_(subject.model, make([[0, 0, 1, 1], *rest]), subject.batch)
    assert again.removed == ((report.sites[0].name, (0,)),)
    with pytest.raises(UnknownName, match=r"1 only for the present heads \[2, 3\], got 1 for head"):
        hp.prune_(subject.model, make([[1, 1, 1, 1], *rest]))


def test_sites_may_be_a_subset():
    subject = subject_of("gpt2")
    (site,) = some = subject.sites[1:2]
    mask = hp.HeadMask.from_keep({site.name: [2]}, {site.name: 4})
    assert hp.prune_(subject.model, mask, sites=some).removed == ((site.name, (0, 1, 3)),)
    assert [len(s.heads) for s in hp.find_sites(subject.model)] == [4, 1, 4]


def test_a_cut_inside_a_gated_block_is_refused():
    subject, own = subject_of("bert"), hp.MultiHeadAttention(8, 2)
    gates = torch.ones(len(subject.sites), len(subject.sites[0].heads))
    before = {k: v.clone() for k, v in subject.model.state_dict().items()}
    with hp.gated(subject.model, gates), hp.gated(own, torch.ones(1, 2)):
        for cut in (
            lambda: hp.prune_heads_(subject.model, {0: [0]}),
            lambda: own.prune_heads_([0]),
        ):
            with pytest.raises(UnsupportedModel, match="cut outside of gated blocks"):
                cut()
    assert_close(dict(subject.model.state_dict()), before, **EXACT)


def test_labels_in_an_example_leave_the_configuration_alone():
    model, batch = registry.get("bert").tiny(0)
    assert model.config.problem_type is None
    hp.score(model, [batch], ["taylor", "random"], progress=False)
    hp.prune_heads_(model, {0: [0]}, example=batch)
    assert model.config.problem_type is None
