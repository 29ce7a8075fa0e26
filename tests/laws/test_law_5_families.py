"""Law 5 over every family: one cut after the other is both at once, nothing pruned is nothing
changed, and a layer may lose all its heads or the plan is refused with an error; fp64."""

from __future__ import annotations

import copy

import pytest
import torch

import headprune as hp
from headprune.attention.kept_heads import weights_of
from headprune.core.errors import UnsupportedModel
from tests.laws.families import (
    KEEP_A_HEAD,
    assert_equal,
    assert_same_gradients,
    far,
    gradients,
    over,
    run,
    two_plans,
)
from tests.laws.support import CLOSE, EXACT, Subject, unchanged


@over()
def test_law_5_one_after_the_other_is_both_at_once(subject: Subject) -> None:
    first, second = two_plans(subject)
    at_once, in_turn = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
    hp.prune_(at_once, first & second, sites=subject.sites)
    hp.prune_(in_turn, first, sites=subject.sites)
    assert far(run(in_turn, subject.batch), run(at_once, subject.batch))
    hp.prune_(in_turn, second, sites=hp.find_sites(in_turn))
    for name, tensor in at_once.state_dict().items():
        assert torch.equal(in_turn.state_dict()[name], tensor), name
    assert_equal(run(in_turn, subject.batch), run(at_once, subject.batch), **EXACT)
    with hp.gated(subject.model, first & second, subject.sites):
        assert_equal(run(in_turn, subject.batch), run(subject.model, subject.batch), **CLOSE)
    twin = copy.deepcopy(in_turn)
    assert_equal(run(twin, subject.batch), run(in_turn, subject.batch), **EXACT)


@over()
def test_law_5_nothing_pruned_nothing_changed(subject: Subject) -> None:
    with unchanged(subject.model):
        report = hp.prune_(subject.model, hp.HeadMask.full(subject.sites), sites=subject.sites)
    assert (report.n_removed, report.removed) == (0, ())
    assert report.params_before == report.params_after


@pytest.mark.parametrize("which", ["first", "all"])
@over()
def test_law_5_a_layer_without_heads_is_exact_or_refused(subject: Subject, which: str) -> None:
    names = [s.name for s in subject.sites]
    chosen = {"first": names[:1], "all": names}[which]
    mask, small = subject.mask({name: [] for name in chosen}), copy.deepcopy(subject.model)
    if subject.family in KEEP_A_HEAD:
        with unchanged(small), pytest.raises(UnsupportedModel, match="cut so that it keeps a head"):
            hp.prune_(small, mask, sites=subject.sites)
        return
    with hp.gated(subject.model, mask, subject.sites):
        expected, full = run(subject.model, subject.batch), gradients(subject.model, subject.batch)
    hp.prune_(small, mask, sites=subject.sites)
    assert_equal(run(small, subject.batch), expected, **CLOSE)
    assert_same_gradients(subject, small, full, mask)
    assert far(expected, run(subject.model, subject.batch))
    twin = copy.deepcopy(small)
    assert_equal(run(twin, subject.batch), run(small, subject.batch), **EXACT)
    assert list(weights_of(small)) == list(subject.model.state_dict()) or any(
        s.axis == "list" for layout in subject.sites.layouts.values() for s in layout.slabs
    )
    left = hp.find_sites(small)
    assert {s.name: s.heads for s in left} == {s.name: mask.kept(s.name) for s in subject.sites}
    assert mask == hp.HeadMask.full(left)
