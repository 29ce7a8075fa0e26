"""prune_ and prune_heads_: plans that do not fit, proofs that fail, reports, and the Transformers 4
call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from headprune.surgery.verify import TOLERANCE, compare, sample_outputs
from tests.laws.support import CLOSE, EXACT, Subject, picture, subject_of
from tests.unit.test_sites import ODD, odd_model

# --- plans
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [None, {"0": [1]}, {0, 1}, "plan.json"])
def test_something_that_is_no_plan(plan: Any) -> None:
    with pytest.raises(InvalidValue, match="plan: must be a PruningPlan, a HeadMask or an array"):
        hp.prune_(hp.MultiHeadAttention(8, 2), plan)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (
            {"0": 3},
            r"with 3 heads at '0', like the plan's, got 2 heads there \(1 of 1 sites differ\)",
        ),
        (
            {"0": 2, "1": 2},
            r"with 2 heads at '1', like the plan's, got one without such a site \(1 of 2",
        ),
        ({"zero": 2}, "2 of 2 sites differ"),
    ],
)
def test_a_plan_for_a_model_of_other_sites(counts: dict[str, int], words: str) -> None:
    model = nn.Sequential(hp.MultiHeadAttention(8, 2))
    before = picture(model)
    with pytest.raises(PlanMismatch, match=words):
        hp.prune_(model, hp.HeadMask.from_keep({}, counts))
    assert picture(model) == before


def test_a_plan_for_another_class_with_the_same_sites(subject: Subject) -> None:
    plan = PruningPlan(subject.ragged(), model=ModelFingerprint("0" * 64, "0" * 64))
    before = picture(subject.model)
    with pytest.raises(PlanMismatch, match="one for another class or head width"):
        hp.prune_(subject.model, plan)
    assert picture(subject.model) == before


def test_other_weights_are_a_warning_that_the_report_keeps(subject: Subject) -> None:
    plan = PruningPlan(subject.ragged(), model=fingerprint(subject.model, subject.sites))
    assert hp.prune_(subject.copy(), plan).warnings == ()
    with torch.no_grad():
        next(subject.model.parameters()).mul_(1.5)
    with pytest.warns(UserWarning, match="same structure with other weights"):
        report = hp.prune_(subject.model, plan, subject.batch)
    assert len(report.warnings) == 1
    assert "other weights" in report.warnings[0]
    assert report.n_removed > 0


def test_a_part_of_a_group_is_refused_before_any_change() -> None:
    subject = subject_of("llama")
    before = picture(subject.model)
    with pytest.raises(InvalidValue, match="whole groups of 2 query heads"):
        hp.prune_(
            subject.model,
            subject.mask({subject.sites[0].name: [2, 3], subject.sites[2].name: [0, 2, 3]}),
        )
    assert picture(subject.model) == before


def test_sites_may_be_a_subset() -> None:
    subject = subject_of("gpt2")
    some = subject.sites[1:2]
    report = hp.prune_(
        subject.model, hp.HeadMask.from_keep({some[0].name: [2]}, {some[0].name: 4}), sites=some
    )
    assert report.removed == ((some[0].name, (0, 1, 3)),)
    assert [len(s.heads) for s in hp.find_sites(subject.model)] == [4, 1, 4]


# --- the proof
# --------------------------------------------------------------------------------------------------------


def drop(path: str) -> hp.AttentionLayout:
    """The odd module's layout without one slab: the tensor keeps every head."""
    return replace(
        ODD, slabs=tuple(s for s in ODD.slabs if s.path != path), untouched=(*ODD.untouched, path)
    )


#: Layouts that fit the odd module by structure and are wrong.
WRONG = {
    "packing": replace(
        ODD, slabs=(hp.HeadSlab("qkv", "out", ("query", "key", "value")), *ODD.slabs[1:])
    ),
    "count": replace(ODD, counts=ODD.counts[:1]),
    "no temperature": drop("temperature"),
    "no buffer": drop("slopes"),
    "no attribute": drop("scale"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("keep", [[0, 1], [0, 1, 4, 5], []])
def test_a_layout_that_is_wrong_is_found_out_and_the_model_restored(
    name: str, keep: list[int]
) -> None:
    model, x = odd_model()
    sites = hp.find_sites(model, layouts=[WRONG[name]])
    mask = hp.HeadMask.from_keep({"0": [2, 3, 4, 5], "2": keep}, {"0": 6, "2": 6})
    before, expected = picture(model), model(x)
    # Wrong sizes already fail in the module's own forward; only wrong numbers need the proof.
    with pytest.raises((VerificationFailed, RuntimeError, ZeroDivisionError)):
        hp.prune_(model, mask, x, sites)
    assert picture(model) == before
    assert_close(model(x), expected, **EXACT)


def test_a_wrong_result_of_the_right_shape_fails_the_proof_in_words() -> None:
    model, x = odd_model()
    sites = hp.find_sites(model, layouts=[WRONG["packing"]])
    with pytest.raises(VerificationFailed, match="equal to the gated one up to") as caught:
        hp.prune_(model, hp.HeadMask.from_keep({"0": [2, 3]}, {"0": 6, "2": 6}), x, sites)
    assert "The model is unchanged" in str(caught.value)
    assert "a difference of" in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_any_interruption_of_the_proof_restores_the_model(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    before = picture(subject.model)

    def interrupted(*_: Any) -> None:
        raise error

    monkeypatch.setattr(prune, "compare", interrupted)
    with pytest.raises(error):
        hp.prune_(subject.model, subject.mask({subject.sites[0].name: []}), subject.batch)
    assert picture(subject.model) == before


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (
            {"input_ids": torch.zeros(0, 7, dtype=torch.long)},
            "one with examples, got an empty batch",
        ),
        ({"use_cache": True}, "made of tensors"),
    ],
)
def test_an_example_that_proves_nothing_is_refused_before_any_change(
    example: Any, words: str
) -> None:
    subject = subject_of("llama")
    before = picture(subject.model)
    with pytest.raises(InvalidValue, match=words):
        hp.prune_(subject.model, subject.ragged(), example)
    assert picture(subject.model) == before


def test_an_example_without_a_floating_point_output_is_refused_before_any_change() -> None:
    class Labels(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).argmax(-1)

    model = Labels(hp.MultiHeadAttention(8, 2))
    before = picture(model)
    with pytest.raises(InvalidValue, match="returns floating-point tensors"):
        hp.prune_(model, hp.HeadMask.from_keep({"0": [1]}, {"0": 2}), torch.randn(2, 3, 8))
    assert picture(model) == before


def test_random_models_are_compared_on_the_same_draw() -> None:
    """A model that draws numbers in evaluation mode (as ViT-MAE masks patches) is no wrong cut."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = hp.MultiHeadAttention(8, 2, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attention(x + torch.randn_like(x))
            return out

    mask = hp.HeadMask.from_keep({"attention": [1]}, {"attention": 2})
    report = hp.prune_(Noisy(), mask, torch.randn(2, 3, 8, dtype=torch.float64))
    assert report.proof.max_difference < 1e-10


def test_the_proof_names_what_was_compared() -> None:
    subject = subject_of("bert")
    proof = hp.prune_(subject.model, subject.ragged(), subject.batch).proof
    assert (proof.dtype, proof.n_examples) == ("float64", 3)
    assert proof.max_difference <= proof.tolerance


def test_compare_takes_nan_other_shapes_and_other_counts_for_different() -> None:
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


def test_sample_outputs_are_those_of_evaluation_mode() -> None:
    model = nn.Sequential(nn.Dropout(0.9)).train()
    x = torch.ones(50)
    assert_close(sample_outputs(model, x)[0], x, **EXACT)
    assert model.training


# --- the report
# -------------------------------------------------------------------------------------------------------


def test_the_report_says_what_was_done() -> None:
    model = nn.Sequential(hp.MultiHeadAttention(8, 2, dtype=torch.float64))
    full = sum(p.numel() for p in model.parameters())
    mask = hp.HeadMask.from_keep({"0": [1]}, {"0": 2})
    report = hp.prune_(model, mask)
    assert report.params_before == full == 4 * (64 + 8)
    assert report.params_after == full - 4 * 32 - 3 * 4
    assert (
        str(report)
        == "removed 1 heads, 288 -> 148 parameters (-48.6 %), not compared with the gated model (no"
        " example given)"
    )
    assert report.sites[0].heads == (1,)


# --- the Transformers 4 call
# ------------------------------------------------------------------------------------------


def test_prune_heads_as_in_transformers_4(subject: Subject) -> None:
    group = subject.sites[0].group_size
    last = len(subject.sites) - 1
    heads = {0: range(group), last: list(range(group, 2 * group))}
    expected = subject.without(
        {subject.sites[0].name: heads[0], subject.sites[last].name: heads[last]}
    )
    small = subject.copy()
    report = hp.prune_heads_(small, heads, subject.batch)
    assert dict(report.removed) == {
        subject.sites[0].name: tuple(heads[0]),
        subject.sites[last].name: tuple(heads[last]),
    }
    with hp.gated(subject.model, expected):
        assert_close(subject.run(small), subject.run(), **CLOSE)


def test_prune_heads_twice_names_original_indices(subject: Subject) -> None:
    """As in Transformers 4: a head that is gone may be named again, and the rest keep their
    numbers."""
    group, site = subject.sites[0].group_size, subject.sites[0]
    first, both = list(range(group)), list(range(2 * group))
    small = subject.copy()
    hp.prune_heads_(small, {0: first})
    again = hp.prune_heads_(small, {0: first})
    assert again.n_removed == 0
    report = hp.prune_heads_(small, {0: both}, subject.batch)
    assert report.removed == ((site.name, tuple(range(group, 2 * group))),)
    at_once = subject.copy()
    hp.prune_heads_(at_once, {0: both})
    assert_close(subject.run(small), subject.run(at_once), **EXACT)


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ({3: [0]}, "layer: must be an index below 3, got 3"),
        ({-4: [0]}, "layer: must be an index below 3, got -4"),
        ({True: [0]}, "layer: must be an index below 3, got True"),
        ({"0": [0]}, "layer: must be an index below 3, got '0'"),
        ({0: [4]}, "head of layer 0: must be an index below 4, got 4"),
        ({1: [-1]}, "head of layer 1: must be an index below 4, got -1"),
    ],
)
def test_prune_heads_of_a_layer_or_head_that_is_not_there(heads: Any, words: str) -> None:
    subject = subject_of("gpt2")
    before = picture(subject.model)
    with pytest.raises(UnknownName, match=words):
        hp.prune_heads_(subject.model, heads)
    assert picture(subject.model) == before


@pytest.mark.parametrize(
    "heads",
    [
        {-1: [1, 2]},
        {2: torch.tensor([1, 2])},
        {2: np.array([1, 2])},
        {np.int64(2): {1, 2}},
        {2: (i for i in (2, 1))},
        {2: [torch.tensor(1), np.int8(2)]},
    ],
    ids=["layer -1", "tensor", "array", "NumPy layer", "generator", "scalars"],
)
def test_prune_heads_takes_every_kind_of_index(heads: Any) -> None:
    subject = subject_of("gpt2")
    report = hp.prune_heads_(subject.model, heads, subject.batch)
    assert [gone for _, gone in report.removed] == [(1, 2)]
    assert report.removed[0][0] == report.sites[2].name


@pytest.mark.parametrize(
    "row", [[True, False, True, True], [1, 0, 1, 1], torch.tensor([0, 1, 0, 0]), 1, "12", [1.0]]
)
def test_prune_heads_of_what_is_no_index(row: Any) -> None:
    subject = subject_of("gpt2")
    before = picture(subject.model)
    with pytest.raises(
        InvalidValue, match="heads of layer 0: must be a collection of head indices"
    ):
        hp.prune_heads_(subject.model, {0: row})
    assert picture(subject.model) == before


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, lambda rows: np.array(rows, bool)])
def test_a_table_of_0_and_1_is_a_plan(make: Callable[[Any], Any]) -> None:
    subject = subject_of("gpt2")
    table = [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
    report = hp.prune_(subject.model, make(table), subject.batch)
    assert [site.heads for site in report.sites] == [(0, 2, 3), (0, 1, 2, 3), (3,)]
    again = hp.prune_(
        subject.model, make([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]), subject.batch
    )
    assert again.removed == ((report.sites[0].name, (0,)),)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            [[1, 1, 1, 1]] * 2,
            r"array: must be \[layers, heads\] with one row per site, 3, got 2 rows",
        ),
        ([[1, 1, 1]] * 3, r"array\[0\], for .*: must be one value per head, 4, got 3"),
        (
            [[0, 1, 2, 3]] * 3,
            r"array\[0\], for .*: must be 1 \(kept\) or 0 \(removed\) per head, got 2",
        ),
        (np.full((3, 4), np.nan), "got nan"),
        ([1, 1, 1], "must be one value per head, 4, got 1"),
    ],
)
def test_a_table_that_is_none_of_the_heads(table: Any, words: str) -> None:
    subject = subject_of("gpt2")
    before = picture(subject.model)
    with pytest.raises(InvalidValue, match=words):
        hp.prune_(subject.model, table)
    assert picture(subject.model) == before


def test_a_table_does_not_bring_heads_back() -> None:
    subject = subject_of("gpt2")
    hp.prune_heads_(subject.model, {1: [2]})
    with pytest.raises(
        UnknownName, match=r"must be 1 only for the present heads \[0, 1, 3\], got 1 for head 2"
    ):
        hp.prune_(subject.model, np.ones((3, 4)))


def test_prune_heads_of_nothing(subject: Subject) -> None:
    before = picture(subject.model)
    assert hp.prune_heads_(subject.model, {}).n_removed == 0
    assert hp.prune_heads_(subject.model, {0: []}).n_removed == 0
    assert picture(subject.model) == before


def test_prune_heads_with_a_layout_of_ones_own() -> None:
    model, x = odd_model()
    with pytest.raises(UnsupportedModel):
        hp.prune_heads_(model, {1: [0, 1]}, x)
    report = hp.prune_heads_(model, {1: [0, 1]}, x, hp.find_sites(model, layouts=[ODD]))
    assert report.removed == (("2", (0, 1)),)


def test_a_cut_warns_of_nothing(subject: Subject) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hp.prune_(subject.model, PruningPlan(subject.ragged()), subject.batch)


def test_a_cut_inside_a_gated_block_is_refused() -> None:
    subject = subject_of("bert")
    sites = hp.find_sites(subject.model)
    before = {k: v.clone() for k, v in subject.model.state_dict().items()}
    with hp.gated(subject.model, torch.ones(len(sites), len(sites[0].heads))):
        with pytest.raises(UnsupportedModel, match="cut outside of gated blocks"):
            hp.prune_heads_(subject.model, {0: [0]})
        own = hp.MultiHeadAttention(8, 2)
        with (
            hp.gated(own, torch.ones(1, 2)),
            pytest.raises(UnsupportedModel, match="cut outside of gated blocks"),
        ):
            own.prune_heads_([0])
    assert_close(subject.model.state_dict(), before, **EXACT)


def test_an_example_without_any_finite_output_is_refused_before_the_cut() -> None:
    subject = subject_of("vit")
    batch = {
        **subject.batch,
        "pixel_values": torch.full_like(subject.batch["pixel_values"], float("nan")),
    }
    before = picture(subject.model)
    with pytest.raises(
        InvalidValue, match="example: must be a batch on which the model's outputs are finite"
    ):
        hp.prune_heads_(subject.model, {0: [0]}, example=batch)
    assert picture(subject.model) == before


def test_what_is_not_a_number_in_both_is_no_difference_and_in_one_it_is() -> None:
    nan, inf = float("nan"), float("inf")
    assert compare([torch.tensor([1.0, nan, inf])], [torch.tensor([1.0, nan, inf])]).holds
    assert not compare([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, nan])]).holds
    assert not compare([torch.tensor([1.0, nan])], [torch.tensor([1.0, 2.0])]).holds


def test_labels_in_an_example_leave_the_configuration_alone() -> None:
    model, batch = registry.get("bert").tiny(0)
    assert model.config.problem_type is None
    hp.score(model, [batch], ["taylor", "random"], progress=False)
    hp.prune_heads_(model, {0: [0]}, example=batch)
    assert model.config.problem_type is None
