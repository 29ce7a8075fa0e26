"""Law 3 over every family: gated = pruned in outputs and in every gradient, with every kernel,
padded left and right, under every policy of grouped queries, and beneath accelerate's hooks;
fp64."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from torch import nn

import headprune as hp
from headprune.attention.kept_heads import weights_of
from headprune.core.errors import UnsupportedModel
from headprune.core.heads import POLICIES
from headprune.layouts import registry
from headprune.model.offloaded import state_of
from tests.laws.families import (
    FAMILIES,
    assert_equal,
    assert_same_gradients,
    batch_of,
    far,
    gradients,
    implementations,
    over,
    run,
    use,
)
from tests.laws.support import CLOSE, Subject

#: One case a family and kernel that it has.
KERNELS = [
    pytest.param(pair, kernel, id=f"{pair[1]}-{kernel}")
    for pair in FAMILIES
    for kernel in implementations(*pair)
]


@pytest.mark.parametrize(("subject", "implementation"), KERNELS, indirect=["subject"])
def test_law_3_gated_is_pruned(subject: Subject, implementation: str) -> None:
    use(subject.model, implementation)
    for seed in range(2):
        mask, small = subject.ragged(seed), copy.deepcopy(subject.model)
        with hp.gated(subject.model, mask, subject.sites):
            expected = run(subject.model, subject.batch)
            full = gradients(subject.model, subject.batch)
        report = hp.prune_(small, mask, sites=subject.sites)
        assert report.n_removed == mask.n_heads - mask.n_kept > 0
        assert_equal(run(small, subject.batch), expected, **CLOSE)
        assert_same_gradients(subject, small, full, mask)
        for site in subject.sites:
            prefix = f"{site.name}." if site.name else ""
            inside = (g for n, g in full.items() if n.startswith(prefix))
            assert any((g.abs() > 1e-6).any() for g in inside), f"{site.name} has no gradient"


def turned(batch: dict[str, Any]) -> dict[str, Any] | None:
    """The batch with its padding on the left; None where there is none, or where it may only be on
    the right."""
    if "attention_mask" in batch and "input_ids" in batch:
        return {
            k: v.flip(1) if k in ("attention_mask", "input_ids") else v for k, v in batch.items()
        }
    if "padding" in batch:
        return {k: v.flip(-1) if k == "padding" else v for k, v in batch.items()}
    return None


@over(pair for pair in FAMILIES if turned(batch_of(*pair)) is not None)
def test_law_3_padding_on_the_left(subject: Subject) -> None:
    batch = turned(subject.batch)
    mask, small = subject.ragged(1), copy.deepcopy(subject.model)
    with hp.gated(subject.model, mask, subject.sites):
        expected = run(subject.model, batch)
    assert far(expected, run(subject.model, batch))
    hp.prune_(small, mask, sites=subject.sites)
    assert_equal(run(small, batch), expected, **CLOSE)


def mask_of(layout: str, left: bool) -> dict[str, Any]:
    """The argument by which an attention takes a mask: the last example pads three tokens."""
    seen = torch.arange(7) < torch.tensor([[7], [7], [4]])
    seen = seen.flip(1) if left else seen
    return {
        "annotated": {"mask": seen[:, None]},
        "labml": {"mask": seen.T[None]},
        "timm": {"attn_mask": seen[:, None, None]},
        "x_transformers": {"mask": seen},
    }[layout]


#: Families whose model takes no mask while its attentions do. The textbook ones' models pad on the
#: right by themselves.
MASKED = {"x_transformers.Encoder": 2, "x_transformers.Decoder": 2, "timm.AttentionRope": 2}
MASKED |= {"annotated transformer": 1, "labml": 1}
PADDED = [
    pytest.param(pair, left, id=f"{pair[1]}-{'left' if left else 'right'}")
    for pair in FAMILIES
    for left in [True, False][: MASKED.get(pair[1], 0)]
]


@pytest.mark.parametrize(("subject", "left"), PADDED, indirect=["subject"])
def test_law_3_padding_that_the_attentions_are_given(subject: Subject, left: bool) -> None:
    given, otherwise = mask_of(subject.layout.name, left), run(subject.model, subject.batch)
    for site in subject.sites:  # before the copy, so that both models have them
        subject.model.get_submodule(site.name).register_forward_pre_hook(
            lambda module, args, kwargs: (args[:3], {**kwargs, **given}), with_kwargs=True
        )
    mask, small = subject.ragged(1), copy.deepcopy(subject.model)
    with hp.gated(subject.model, mask, subject.sites):
        expected = run(subject.model, subject.batch)
    full = run(subject.model, subject.batch)
    assert far(full, otherwise)
    assert far(full, expected)
    hp.prune_(small, mask, subject.batch, subject.sites)  # hooks are code of one's own
    assert_equal(run(small, subject.batch), expected, **CLOSE)


#: One case a policy and family whose layout has it.
SHARED = [pair for pair in FAMILIES if len(registry.get(pair[0]).policies) > 1]
POLICY = [
    pytest.param(pair, policy, id=f"{pair[1]}-{policy}")
    for pair in SHARED
    for policy in registry.get(pair[0]).policies
    if policy != "group"  # which the other tests are under
]


@pytest.mark.parametrize(("subject", "policy"), POLICY, indirect=["subject"])
def test_law_3_policies_of_grouped_queries(subject: Subject, policy: Any) -> None:
    sites = hp.find_sites(subject.model, policy=policy)
    if not any(s.n_kv_heads < s.n_query_heads for s in sites):
        assert sites == subject.sites, "where no heads share, all policies are one"
        return
    for seed in range(2):
        mask, small = allowed(sites, policy, seed), copy.deepcopy(subject.model)
        with hp.gated(subject.model, mask, sites):
            expected = run(subject.model, subject.batch)
            full = gradients(subject.model, subject.batch)
        hp.prune_(small, mask, sites=sites)
        assert_equal(run(small, subject.batch), expected, **CLOSE)
        assert_same_gradients(subject, small, full, mask, sites)
        again = hp.find_sites(small, policy=policy)
        assert {s.name: s.heads for s in again} == {s.name: mask.kept(s.name) for s in sites}
        second = allowed(again, policy, seed + 5)
        with hp.gated(subject.model, second, sites):
            expected = run(subject.model, subject.batch)
        hp.prune_(small, second, sites=again)
        assert_equal(run(small, subject.batch), expected, **CLOSE)


def allowed(sites: Any, policy: str, seed: int) -> hp.HeadMask:
    """Part of the heads of every group, as the policy allows; at least one of every site."""
    rng, keep = random.Random(seed), {}
    for site in sites:
        if policy == "free":
            keep[site.name] = rng.sample(site.heads, max(1, len(site.heads) - 1 - seed % 2))
        else:
            n = max(1, min(map(len, site.groups)) - 1)
            keep[site.name] = [h for group in site.groups for h in rng.sample(group, n)]
    return hp.HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites})


@over(pair for pair in FAMILIES if set(registry.get(pair[0]).policies) != set(POLICIES))
def test_law_3_a_policy_a_layout_lacks_is_refused_or_makes_no_difference(subject: Subject) -> None:
    for policy in set(POLICIES) - set(subject.layout.policies):
        if any(s.n_kv_heads < s.n_query_heads for s in subject.sites):
            with pytest.raises(UnsupportedModel, match="a policy of layout"):
                hp.find_sites(subject.model, policy=policy)
        else:
            assert hp.find_sites(subject.model, policy=policy) == subject.sites


def hooked(model: nn.Module) -> nn.Module:
    """A copy with accelerate's hooks on every module, as ``device_map="auto"`` puts them there:
    each takes the place of its module's ``forward``."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=False))
    return twin


@pytest.mark.slow
@over()
def test_law_3_beneath_the_hooks_of_accelerate(subject: Subject) -> None:
    mask, small = subject.ragged(), hooked(subject.model)
    assert hp.find_sites(small) == subject.sites
    full = run(subject.model, subject.batch)
    with hp.gated(subject.model, mask, subject.sites):
        expected = run(subject.model, subject.batch)
    assert far(expected, full)
    with hp.gated(small, mask):
        assert_equal(run(small, subject.batch), expected, **CLOSE)
    assert_equal(run(small, subject.batch), full, **CLOSE)
    hp.prune_(small, mask)
    assert_equal(run(small, subject.batch), expected, **CLOSE)
    remove_hook_from_submodules(small)
    assert_equal(run(small, subject.batch), expected, **CLOSE)


#: Those whose own code reads weights of a module that it does not call, which accelerate does not
#: fetch.
NOT_OFFLOADED = {
    "deberta-v2",
    "deberta-v3",
    "siglip",
    "torch.nn.MultiheadAttention",
    "torch.nn.TransformerDecoder",
    "torch.nn.TransformerEncoder",
    "wavlm",
}


@pytest.mark.slow
@over()
def test_law_3_offloaded_by_accelerate(subject: Subject) -> None:
    mask, plain = subject.ragged(), copy.deepcopy(subject.model)
    small = cpu_offload(copy.deepcopy(subject.model))
    if subject.family in NOT_OFFLOADED:
        with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta"):
            run(small, subject.batch)
        return
    hp.prune_(plain, mask, sites=subject.sites)
    hp.prune_(small, mask)
    assert any(p.is_meta for p in small.parameters())
    assert_equal(run(small, subject.batch), run(plain, subject.batch), **CLOSE)
    expected, found = weights_of(plain), state_of(small)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
