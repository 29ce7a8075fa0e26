"""Fingerprints: the structure outlives a cut, the weights show any training."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn

import headprune as hp
from headprune.model.fingerprint import check_plan, fingerprint, sample_positions, weights_digest
from tests.laws.support import objective, subject_of


def test_the_same_model_has_the_same_fingerprint(subject):
    first = fingerprint(subject.model, subject.sites)
    assert fingerprint(subject.copy(), subject.sites) == first
    assert fingerprint(subject_of(subject.layout.name).model, subject.sites) == first
    assert fingerprint(torch.compile(subject.model, backend="eager"), subject.sites) == first
    with hp.gated(subject.model, subject.ragged()):
        assert fingerprint(subject.model, subject.sites) == first


def cut(subject):
    hp.prune_(subject.model, subject.mask({subject.sites[0].name: []}) & subject.ragged())


def train(subject):
    objective(subject.run()).backward()
    torch.optim.SGD(subject.model.parameters(), lr=1e-6).step()


@pytest.mark.parametrize("change", [cut, train])
def test_a_cut_and_a_step_of_training_change_the_weights_only(subject, change):
    before = fingerprint(subject.model, hp.find_sites(subject.model))
    change(subject)
    after = fingerprint(subject.model, hp.find_sites(subject.model))
    assert after.structure == before.structure
    assert after.weights != before.weights


def test_names_types_shapes_and_ends_count():
    def weights(**tensors):
        model = nn.Module()
        for name, tensor in tensors.items():
            model.register_buffer(name, tensor)
        return fingerprint(model, ()).weights

    zeros = torch.zeros(4)
    seen = {
        weights(a=zeros),
        weights(b=zeros),
        weights(a=zeros.view(2, 2)),
        weights(a=zeros.int()),
        weights(a=torch.tensor(0.0)),
        weights(a=torch.zeros(0)),
        weights(a=torch.zeros(4, dtype=torch.bool)),
    }
    assert len(seen) == 7
    assert weights(a=zeros.to("meta"))
    long = torch.zeros(10_000)
    assert weights(a=long) != weights(a=torch.cat([long[1:], torch.ones(1)]))


def test_class_sites_and_widths_are_structure():
    wide, narrow = (hp.MultiHeadAttention(8, 2, head_dim=dim) for dim in (4, 2))
    models = (wide, narrow, nn.Sequential(wide))
    assert len({fingerprint(m, hp.find_sites(m)).structure for m in models}) == 3


def test_every_byte_of_every_tensor_is_in_the_digest():
    """The fingerprint leaves most values of large tensors out; nothing may differ where processes
    share the work."""
    model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))
    first, sampled = weights_digest(model), fingerprint(model, ())
    for twin in (copy.deepcopy(model), torch.compile(model, backend="eager")):
        assert weights_digest(twin) == first
    seen = {first}
    with torch.no_grad():
        place = next(i for i in range(10_000) if i not in sample_positions(10_000))
        model[0].weight.view(-1)[place] += 1e-6
        assert fingerprint(model, ()) == sampled
        seen.add(weights_digest(model))
        model[1].running_mean[7] += 1
        seen.add(weights_digest(model))
    seen.add(weights_digest(nn.Sequential(model[0], nn.Identity(), model[1])))
    seen.add(weights_digest(copy.deepcopy(model).bfloat16()))
    model[0].weight = nn.Parameter(model[0].weight.detach().view(50, 200))
    seen.add(weights_digest(model))
    assert len(seen) == 6


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_the_digest_of_an_offloaded_model_is_that_in_memory(kind, tmp_path):
    subject = subject_of("llama")
    first = weights_digest(subject.model)
    model = cpu_offload(subject.copy()) if kind == "cpu" else disk_offload(subject.copy(), tmp_path)
    assert weights_digest(model) == first
    assert fingerprint(model, subject.sites) == fingerprint(subject.model, subject.sites)


def test_what_is_no_tensor_is_left_out():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"no": "tensor"}

    plain, extra = nn.Linear(3, 3), Extra(3, 3)
    extra.load_state_dict(plain.state_dict(), strict=False)
    assert list(extra.state_dict()) != list(plain.state_dict())
    assert fingerprint(extra, ()).weights == fingerprint(plain, ()).weights
    assert weights_digest(extra) == weights_digest(plain)


def test_check_plan_goes_by_original_heads(subject):
    plan = hp.PruningPlan(subject.ragged(), model=fingerprint(subject.model, subject.sites))
    assert check_plan(subject.model, subject.sites, plan) == []
    assert check_plan(subject.model, subject.sites, plan.mask) == []
    hp.prune_(subject.model, subject.ragged(1))
    (note,) = check_plan(subject.model, hp.find_sites(subject.model), plan)
    assert "other weights" in note
