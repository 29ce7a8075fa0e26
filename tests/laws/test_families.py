"""Laws 1 to 5 over every registered layout and every model family it names; fp64, tiny random models."""

from __future__ import annotations

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.core.layout import STATE_ATTRIBUTE
from headprune.layouts import registry
from headprune.model.double import Doubled
from headprune.model.running import call, outputs
from tests.laws.support import CLOSE, EXACT, Subject, family_subject, objective, picture, set_implementation

FAMILIES = [(layout, family) for layout in registry.names() for family, _ in registry.get(layout).families]

#: Families that must never drop out of the matrix; variants of one (falcon-mqa) count once.
NAMED = """
albert bart beit bert blip bloom camembert clip cohere2 deberta-v2 deberta-v3 deepseek_v3 deit dinov2 dinov3 distilbert
electra falcon gemma2 gemma3 gpt2 gpt_neo gpt_neox gpt_oss gptj granite hubert llama llava m2m_100 marian mbart mistral
mixtral modernbert mpnet mt5 olmo2 opt pegasus phi phi3 qwen2 qwen3 qwen3_next roberta siglip smollm3 starcoder2 swin t5
vit wav2vec2 wavlm whisper xlm-roberta
"""


@pytest.fixture(params=FAMILIES, ids=lambda pair: pair[1])
def subject(request: pytest.FixtureRequest) -> Subject:
    return family_subject(*request.param)


def run(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Every output of the model that is a number, in fp64 throughout."""
    with Doubled():
        return outputs(call(model, batch))


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor], **tolerance: float) -> None:
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, equal_nan=True, **tolerance)


def far(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return max(float((a - b).detach().abs().max()) for a, b in zip(got, expected, strict=True) if a.numel()) > 1e-6


def test_every_layout_names_a_family_and_no_family_twice() -> None:
    names = [family for _, family in FAMILIES]
    assert len(names) == len(set(names))
    assert {layout for layout, _ in FAMILIES} == set(registry.names())


def test_the_matrix_covers_the_models_that_people_have() -> None:
    named = set(NAMED.split())
    assert len(named) >= 45
    assert named <= {family for _, family in FAMILIES}


def test_every_attention_of_the_model_is_a_site_of_its_layout(subject: Subject) -> None:
    assert subject.layout.name in {s.layout for s in subject.sites}
    inside = tuple(f"{s.name}." if s.name else "" for s in subject.sites)
    own = {s.name for s in subject.sites}
    for name, module in subject.model.named_modules():
        holds = any(site.startswith(f"{name}.") for site in own)
        if type(module).__name__.endswith(("Attention", "SelfAttention")) and list(module.parameters()) and not holds:
            assert name in own or name.startswith(inside), f"{name} ({type(module).__name__}) was not found"


def test_law_1_gates_of_one_change_no_bit_and_leave_no_trace(subject: Subject) -> None:
    expected = run(subject.model, subject.batch)  # first: Transformers may install hooks of its own in the first run
    before = picture(subject.model)
    gates = {s.name: torch.ones(3, len(s.heads), dtype=torch.float64, requires_grad=True) for s in subject.sites}
    with hp.gated(subject.model, gates, subject.sites):
        got = run(subject.model, subject.batch)
        gradients = torch.autograd.grad(objective(got[-1] if got[0].ndim == 0 else got[0]), list(gates.values()))
    if all(s.layout not in EXPOSED for s in subject.sites):
        assert_equal(got, expected, **EXACT)
    assert_equal(got, expected, **CLOSE)
    assert all(g.abs().sum(0).min() > 0 for g in gradients), "every head's gate carries a gradient"
    assert picture(subject.model) == before


def test_law_2_a_gate_of_zero_is_a_zeroed_head_and_has_an_effect(subject: Subject) -> None:
    full = run(subject.model, subject.batch)
    for site in subject.sites:
        head = len(site.heads) - 1
        gate = torch.ones(len(site.heads), dtype=torch.float64)
        gate[head] = 0.0
        with hp.gated(subject.model, {site.name: gate}, subject.sites):
            got = run(subject.model, subject.batch)
        assert far(got, full), site.name
        bound = subject.model.get_submodule(site.name)
        layout = subject.sites.layouts[site.layout]
        if not layout.gate:
            continue
        twin = copy.deepcopy(subject.model)
        bound = twin.get_submodule(site.name).get_submodule(layout.gate)
        weight = bound.weight if isinstance(bound.weight, torch.Tensor) else bound.weight()
        axis = 0 if hasattr(getattr(bound, "base_layer", bound), "nf") else 1
        with torch.no_grad():
            weight.narrow(axis, head * site.value_dim, site.value_dim).zero_()
            for name, parameter in bound.named_parameters():
                if "lora_A" in name:
                    parameter.narrow(1, head * site.value_dim, site.value_dim).zero_()
        assert_equal(run(twin, subject.batch), got, **CLOSE)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_law_3_gated_is_pruned(subject: Subject, implementation: str) -> None:
    if hasattr(subject.model, "set_attn_implementation"):
        fixed = not subject.model._can_set_attn_implementation()
        if fixed and implementation == "sdpa" and not subject.model._supports_sdpa:
            pytest.skip("the model's code is its only implementation")
        try:
            if fixed:  # Falcon's one class asks the configuration in every call
                subject.model.config._attn_implementation = implementation
            else:
                set_implementation(subject.model, implementation)
        except ValueError as error:
            pytest.skip(f"the model has no {implementation} attention: {error}")
    elif implementation == "eager":
        pytest.skip("not a Transformers model: it has one implementation")
    for seed in range(2):
        mask, small = subject.ragged(seed), copy.deepcopy(subject.model)
        with hp.gated(subject.model, mask, subject.sites):
            expected = run(subject.model, subject.batch)
            expected_gradients = embedding_gradients(subject.model, subject)
        report = hp.prune_(small, mask, sites=subject.sites)
        assert report.n_removed == mask.n_heads - mask.n_kept > 0
        assert_equal(run(small, subject.batch), expected, **CLOSE)
        for got, wanted in zip(embedding_gradients(small, subject), expected_gradients, strict=True):
            assert_close(got, wanted, **CLOSE)


def embedding_gradients(model: nn.Module, subject: Subject) -> list[torch.Tensor]:
    """Gradients of the parameters that no cut touches."""
    cut = tuple(f"{s.name}." if s.name else "" for s in subject.sites)
    kept = [p for n, p in model.named_parameters() if not n.startswith(cut) and p.requires_grad]
    with Doubled():
        out = outputs(call(model, subject.batch))
        found = torch.autograd.grad(objective(out[-1] if out[0].ndim == 0 else out[0]), kept, allow_unused=True)
    return [g for g in found if g is not None]


def test_law_3_padding_on_the_left(subject: Subject) -> None:
    if "attention_mask" not in subject.batch or "input_ids" not in subject.batch:
        pytest.skip("no padding in its batch")
    batch = {k: v.flip(1) if k in ("attention_mask", "input_ids") else v for k, v in subject.batch.items()}
    mask, small = subject.ragged(1), copy.deepcopy(subject.model)
    with hp.gated(subject.model, mask, subject.sites):
        expected = run(subject.model, batch)
    hp.prune_(small, mask, sites=subject.sites)
    assert_equal(run(small, batch), expected, **CLOSE)


@pytest.mark.parametrize("policy", ["balanced", "free"])
def test_law_3_policies_of_grouped_queries(subject: Subject, policy: Any) -> None:
    grouped = [s for s in subject.sites if s.n_kv_heads < s.n_query_heads]
    if not grouped:
        pytest.skip("no grouped queries")
    if any(policy not in subject.sites.layouts[s.layout].policies for s in grouped):
        with pytest.raises(UnsupportedModel, match="a policy that layout"):
            hp.find_sites(subject.model, policy=policy)
        return
    sites = hp.find_sites(subject.model, policy=policy)
    for seed in range(2):
        mask, small = allowed(sites, policy, seed), copy.deepcopy(subject.model)
        with hp.gated(subject.model, mask, sites):
            expected = run(subject.model, subject.batch)
        hp.prune_(small, mask, sites=sites)
        assert_equal(run(small, subject.batch), expected, **CLOSE)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_law_4_what_survives(subject: Subject, dtype: torch.dtype) -> None:
    model = subject.model.to(dtype)
    batch = {k: v.to(dtype) if torch.is_floating_point(v) else v for k, v in subject.batch.items()}
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    needed = {n: p.requires_grad for n, p in model.named_parameters()}
    classes = [type(m).__name__ for m in model.modules()]
    hp.prune_(model, subject.ragged(), sites=subject.sites)
    listed = any(s.axis == "list" for layout in subject.sites.layouts.values() for s in layout.slabs)
    if not listed:
        assert {n: p.requires_grad for n, p in model.named_parameters()} == needed
        assert [type(m).__name__ for m in model.modules()] == classes
    assert {p.dtype for p in model.parameters()} == {dtype}
    with torch.no_grad():
        assert all(t.dtype != torch.float64 for t in outputs(call(model, batch)))


@pytest.mark.parametrize("empty", [False, True], ids=["ragged", "a layer without heads"])
def test_law_4_save_and_load(subject: Subject, empty: bool, tmp_path: Path) -> None:
    if type(subject.model).__module__.startswith("peft"):
        pytest.skip("saved by merging first")
    layout, family = next(pair for pair in FAMILIES if pair[1] == subject.family)
    model, batch = registry.get(layout).tiny(0, family)
    mask = subject.ragged()
    if empty:
        mask = mask & subject.mask({subject.sites[0].name: []})
        if refused(subject, mask):
            pytest.skip("a layer keeps at least one head, which law 5 looks at")
    hp.prune_(model.eval(), mask)
    hp.save_pretrained(model, tmp_path)
    ours = hasattr(model, "config")
    loaded = (
        hp.from_pretrained(tmp_path) if ours else hp.from_pretrained(tmp_path, registry.get(layout).tiny(1, family)[0])
    )
    with torch.no_grad():
        assert_equal(outputs(call(loaded, batch)), outputs(call(model, batch)), **EXACT)
    assert hp.find_sites(loaded) == hp.find_sites(model)
    for (name, a), (_, b) in zip(loaded.named_modules(), model.named_modules(), strict=True):
        assert getattr(a, STATE_ATTRIBUTE, None) == getattr(b, STATE_ATTRIBUTE, None), name


def test_law_5_one_after_the_other_is_both_at_once(subject: Subject) -> None:
    first = subject.without({s.name: s.units[0] for s in subject.sites[::2] if len(s.units) > 2})
    second = subject.without({s.name: s.units[-1] for s in subject.sites if len(s.units) > 1})
    at_once, in_turn = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
    hp.prune_(at_once, first & second, sites=subject.sites)
    hp.prune_(in_turn, first, sites=subject.sites)
    hp.prune_(in_turn, second, sites=hp.find_sites(in_turn))
    for name, tensor in at_once.state_dict().items():
        assert torch.equal(in_turn.state_dict()[name], tensor), name
    assert_equal(run(in_turn, subject.batch), run(at_once, subject.batch), **EXACT)
    twin = copy.deepcopy(in_turn)
    assert_equal(run(twin, subject.batch), run(in_turn, subject.batch), **EXACT)


def test_law_5_nothing_pruned_nothing_changed(subject: Subject) -> None:
    before = picture(subject.model)
    report = hp.prune_(subject.model, hp.HeadMask.full(subject.sites), sites=subject.sites)
    assert (report.n_removed, picture(subject.model)) == (0, before)


def refused(subject: Subject, mask: hp.HeadMask) -> bool:
    """Whether the plan is refused in words, with the model as it was."""
    model = copy.deepcopy(subject.model)
    before = picture(model)
    try:
        hp.prune_(model, mask, sites=subject.sites)
    except UnsupportedModel as error:
        words = str(error)
    else:
        return False
    assert "left with a head" in words
    assert picture(model) == before
    return True


@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_law_5_a_layer_without_heads_is_exact_or_refused(subject: Subject, which: str) -> None:
    names = [s.name for s in subject.sites]
    chosen = {"first": names[:1], "last": names[-1:], "all": names}[which]
    mask = subject.mask({name: [] for name in chosen})
    if refused(subject, mask):
        return
    small = copy.deepcopy(subject.model)
    with hp.gated(subject.model, mask, subject.sites):
        expected = run(subject.model, subject.batch)
    hp.prune_(small, mask, sites=subject.sites)
    assert_equal(run(small, subject.batch), expected, **CLOSE)
    assert far(expected, run(subject.model, subject.batch))
    twin = copy.deepcopy(small)
    assert_equal(run(twin, subject.batch), run(small, subject.batch), **EXACT)
    assert list(small.state_dict()) == list(subject.model.state_dict()) or any(
        s.axis == "list" for layout in subject.sites.layouts.values() for s in layout.slabs
    )
    assert dataclasses.replace(mask) == hp.HeadMask.full(hp.find_sites(small))


EXPOSED = {name for name in registry.names() if registry.get(name).exposed is not None}
