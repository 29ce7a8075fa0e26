"""Law 4, the cut itself: dtype, device, requires_grad, tied weights, hooks and training modes
survive ``prune_``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import headprune as hp
from headprune.model.sites import slabs_of
from tests.laws.support import CLOSE, EXACT, Subject, unchanged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype(subject: Subject, dtype: torch.dtype) -> None:
    model = subject.model.to(dtype)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in subject.batch.items()}
    report = hp.prune_(model, subject.ragged(), batch)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert report.proof.dtype == str(dtype).removeprefix("torch.")
    assert subject.run(model, **batch).dtype == dtype


def test_mixed_dtypes_stay_where_they_are(subject: Subject) -> None:
    site = subject.sites[0]
    projection = subject.model.get_submodule(f"{site.name}.{subject.layout.gate}").float()
    dtypes = {n: p.dtype for n, p in subject.model.named_parameters()}
    hp.prune_(subject.model, subject.ragged())
    assert {n: p.dtype for n, p in subject.model.named_parameters()} == dtypes
    assert projection.weight.dtype == torch.float32


def test_device(subject: Subject) -> None:
    model = subject.copy().to("meta")
    hp.prune_(model, subject.ragged())
    hp.prune_(subject.model, subject.ragged())
    assert {p.device.type for p in model.parameters()} == {"meta"}
    shapes = {n: p.shape for n, p in subject.model.state_dict().items()}
    assert {n: p.shape for n, p in model.state_dict().items()} == shapes


def test_requires_grad_and_the_flags_of_parameters(subject: Subject) -> None:
    for index, parameter in enumerate(subject.model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
        parameter.mark = index
    needed = {n: (p.requires_grad, p.mark) for n, p in subject.model.named_parameters()}
    hp.prune_(subject.model, subject.ragged(), subject.batch)
    assert {n: (p.requires_grad, p.mark) for n, p in subject.model.named_parameters()} == needed
    assert all(type(p) is nn.Parameter and p.is_leaf for p in subject.model.parameters())


def test_training_modes_one_by_one(subject: Subject) -> None:
    for index, module in enumerate(subject.model.modules()):
        module.training = index % 3 == 0
    modes = {n: m.training for n, m in subject.model.named_modules()}
    hp.prune_(subject.model, subject.mask({subject.sites[0].name: []}), subject.batch)
    assert {n: m.training for n, m in subject.model.named_modules()} == modes


def test_hooks_stay_and_fire(subject: Subject) -> None:
    site, fired = subject.sites[0], []
    attention = subject.model.get_submodule(site.name)
    slabs = slabs_of(subject.layout, attention)
    for slab in slabs:
        attention.get_submodule(slab.path).register_forward_hook(
            lambda *_, p=slab.path: fired.append(p)
        )
    attention.register_forward_pre_hook(lambda *_: fired.append("attention"))
    hp.prune_(subject.model, subject.ragged())
    subject.run()
    assert set(fired) == {"attention", *(s.path for s in slabs)}


def test_the_proof_disturbs_nothing_else(subject: Subject) -> None:
    """Random state, the gradients that were there, and tensors that were not cut."""
    subject.run().sum().backward()
    cut = {f"{s.name}.{slab.path}" for s in subject.sites for slab in subject.layout.slabs}
    others = {
        n: (p, p.grad)
        for n, p in subject.model.named_parameters()
        if n.rpartition(".")[0] not in cut
    }
    state = torch.get_rng_state()
    hp.prune_(subject.model, subject.ragged(), subject.batch)
    assert torch.equal(torch.get_rng_state(), state)
    now = dict(subject.model.named_parameters())
    assert others
    for name, (parameter, grad) in others.items():
        assert now[name] is parameter, name
        assert now[name].grad is grad, name


def test_the_cut_shares_no_memory_with_what_it_was_cut_from(subject: Subject) -> None:
    full = subject.copy()
    old = {p.untyped_storage().data_ptr() for p in subject.model.parameters()}
    # The old parameters stay alive, so no address is reused.
    keep = list(subject.model.parameters())
    hp.prune_(subject.model, subject.ragged())
    site = subject.sites[0]
    weight = subject.model.get_submodule(f"{site.name}.{subject.layout.gate}").weight
    assert weight.untyped_storage().data_ptr() not in old
    assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    for parameter, original in zip(keep, full.parameters(), strict=True):
        assert_close(parameter, original, **EXACT)


def test_the_counts_in_modules_are_true(subject: Subject) -> None:
    mask = subject.ragged()
    hp.prune_(subject.model, mask)
    for site in subject.sites:
        attention, n_kept = subject.model.get_submodule(site.name), len(mask.kept(site.name))
        gate = attention.get_submodule(subject.layout.gate)
        features = gate.nx if hasattr(gate, "nx") else gate.in_features
        assert features == n_kept * site.value_dim
        for owner in (attention, getattr(attention, "self", None)):
            for name in ("num_heads", "num_attention_heads", "n_heads"):
                assert getattr(owner, name, n_kept) == n_kept, name


def test_tied_embeddings_stay_tied() -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).double().eval()
    sites = hp.find_sites(model)
    mask = hp.HeadMask.from_keep({sites[0].name: [2, 3]}, {s.name: 4 for s in sites})
    hp.prune_(model, mask, {"input_ids": torch.randint(0, 50, (2, 5))})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_a_parameter_that_is_query_and_key_stays_one() -> None:
    attention = hp.MultiHeadAttention(12, 4, dtype=torch.float64).eval()
    attention.W_k.weight, attention.W_k.bias = attention.W_q.weight, attention.W_q.bias
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    gate = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    with hp.gated(attention, {"": gate}):
        expected = attention(x)
    hp.prune_(attention, hp.HeadMask.from_keep({"": [1, 3]}, {"": 4}), x)
    assert attention.W_k.weight is attention.W_q.weight
    assert attention.W_k.bias is attention.W_q.bias
    assert_close(attention(x), expected, **CLOSE)
    attention(x).sum().backward()
    assert attention.W_q.weight.grad.shape == (6, 12)


def test_one_attention_module_in_two_places_is_one_site() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = hp.MultiHeadAttention(12, 4, dtype=torch.float64)
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(x + self.first(x))
            return out

    model, x = Twice().eval(), torch.randn(2, 5, 12, dtype=torch.float64)
    (site,) = hp.find_sites(model)
    assert (site.name, site.shared_with) == ("first", ("second",))
    mask = hp.HeadMask.from_keep({"first": [0, 3]}, {"first": 4})
    with hp.gated(model, mask):
        expected = model(x)
    report = hp.prune_(model, mask, x)
    assert model.first is model.second
    assert_close(model(x), expected, **CLOSE)
    assert report.sites[0].shared_with == ("second",)


def test_what_is_refused_changes_nothing(subject: Subject) -> None:
    other = hp.HeadMask.from_keep({}, {"elsewhere": 4})
    with unchanged(subject.model), pytest.raises(hp.HeadPruneError):
        hp.prune_(subject.model, other)
