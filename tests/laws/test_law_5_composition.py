"""Law 5: prune A then B = prune A ∪ B; nothing pruned, nothing changed; a layer may lose every
head."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.attention.kept_heads import weights_of
from headprune.core.layout import STATE_ATTRIBUTE
from tests.laws.families import two_plans
from tests.laws.support import (
    CLOSE,
    EXACT,
    TRANSFORMERS,
    Subject,
    emptied,
    objective,
    set_implementation,
    unchanged,
)

EMPTY = ["first", "middle", "last", "all"]


def assert_same_bits(got: nn.Module, expected: nn.Module) -> None:
    mine, theirs = got.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name
    for (name, a), (_, b) in zip(got.named_modules(), expected.named_modules(), strict=True):
        assert getattr(a, STATE_ATTRIBUTE, None) == getattr(b, STATE_ATTRIBUTE, None), name
        for count in (
            "in_features",
            "out_features",
            "nf",
            "nx",
            "num_heads",
            "num_attention_heads",
            "n_heads",
        ):
            assert getattr(a, count, None) == getattr(b, count, None), (name, count)


@pytest.mark.parametrize("empties", [False, True])
def test_one_after_the_other_is_both_at_once(subject: Subject, empties: bool) -> None:
    a, b = two_plans(subject)
    if empties:
        b = b & emptied(subject, "first")
    at_once, in_turn, other_way = subject.copy(), subject.copy(), subject.copy()
    hp.prune_(at_once, a & b)
    hp.prune_(in_turn, a)
    hp.prune_(in_turn, b, subject.batch)
    hp.prune_(other_way, b)
    hp.prune_(other_way, a, subject.batch)
    assert_same_bits(in_turn, at_once)
    assert_same_bits(other_way, at_once)
    assert hp.find_sites(in_turn) == hp.find_sites(at_once)
    assert_close(subject.run(in_turn), subject.run(at_once), **EXACT)
    assert_close(subject.run(in_turn), subject.run_gated(a & b), **CLOSE)


def test_gates_on_a_pruned_model_are_for_the_heads_that_are_left(subject: Subject) -> None:
    a, b = two_plans(subject)
    small = subject.copy()
    hp.prune_(small, a)
    expected = subject.run_gated(a & b)
    with hp.gated(small, b):
        assert_close(subject.run(small), expected, **CLOSE)
    by_hand = {}
    for site in hp.find_sites(small):
        by_hand[site.name] = torch.tensor(
            [float(h in b.kept(site.name)) for h in site.heads], dtype=torch.float64
        )
    with hp.gated(small, by_hand):
        assert_close(subject.run(small), expected, **CLOSE)


def test_pruning_nothing_more_changes_nothing(subject: Subject) -> None:
    hp.prune_(subject.model, subject.ragged())
    with unchanged(subject.model):
        report = hp.prune_(subject.model, subject.ragged(), subject.batch)
    assert report.n_removed == 0


@pytest.mark.parametrize("which", EMPTY)
def test_a_layer_without_heads_equals_the_gated_one(subject: Subject, which: str) -> None:
    mask, small = emptied(subject, which), subject.copy()
    expected = subject.run_gated(mask)
    report = hp.prune_(small, mask, subject.batch)
    assert (expected - subject.run()).abs().max() > 1e-4
    assert_close(subject.run(small), expected, **CLOSE)
    assert [s.heads for s in report.sites] == [mask.kept(s.name) for s in subject.sites]
    assert [type(m).__name__ for m in small.modules()] == [
        type(m).__name__ for m in subject.model.modules()
    ]
    assert all(
        isinstance(a, type(b))
        for a, b in zip(small.modules(), subject.model.modules(), strict=True)
    )
    assert list(weights_of(small)) == list(subject.model.state_dict())


@pytest.mark.parametrize("which", EMPTY)
def test_a_layer_without_heads_can_be_copied_trained_and_cut_again(
    subject: Subject, which: str
) -> None:
    mask = emptied(subject, which)
    hp.prune_(subject.model, mask)
    twin = copy.deepcopy(subject.model)
    assert_close(subject.run(twin), subject.run(), **EXACT)
    assert_same_bits(twin, subject.model)
    twin.train()
    objective(subject.run(twin)).backward()
    torch.optim.AdamW(twin.parameters(), lr=0.1).step()
    twin.eval()
    with torch.no_grad():
        assert (subject.run(twin) - subject.run()).abs().max() > 1e-4
    rest = mask & subject.ragged()
    hp.prune_(twin, rest, subject.batch)
    assert [s.heads for s in hp.find_sites(twin)] == [rest.kept(s.name) for s in subject.sites]
    with hp.gated(twin, rest):
        assert subject.run(twin).isfinite().all()


@pytest.mark.parametrize("which", EMPTY)
@pytest.mark.parametrize("subject", TRANSFORMERS, indirect=True)
def test_output_attentions_of_a_layer_without_heads(subject: Subject, which: str) -> None:
    set_implementation(subject.model, "eager")
    mask = emptied(subject, which)
    hp.prune_(subject.model, mask)
    maps = subject.model(**subject.batch, output_attentions=True).attentions
    assert [a.shape[1] for a in maps] == [len(mask.kept(s.name)) for s in subject.sites]
    assert {(a.shape[0], *a.shape[2:]) for a in maps} == {(3, *maps[-1].shape[2:])}


def test_removing_the_last_unit_of_a_layer_unit_by_unit(subject: Subject) -> None:
    small, site, left = subject.copy(), subject.sites[0], list(subject.sites[0].units)
    while left:
        left.pop(len(left) // 2)
        mask = subject.mask({site.name: [h for unit in left for h in unit]})
        hp.prune_(small, mask, subject.batch)
        assert_close(subject.run(small), subject.run_gated(mask), **CLOSE)
    assert hp.find_sites(small)[0].heads == ()


@pytest.mark.parametrize("which", ["first", "all"])
# The other one's class no pickle can name.
@pytest.mark.parametrize("subject", TRANSFORMERS, indirect=True)
def test_a_layer_without_heads_survives_a_pickle(subject: Subject, which: str) -> None:
    hp.prune_(subject.model, emptied(subject, which))
    twin = pickle.loads(pickle.dumps(subject.model))
    assert_same_bits(twin, subject.model)
    assert_close(subject.run(twin), subject.run(), **EXACT)
    assert [type(m).__mro__[1].__name__ for m in twin.modules()] == [
        type(m).__mro__[1].__name__ for m in subject.model.modules()
    ]
