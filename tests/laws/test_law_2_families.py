"""Law 2 over every family: a gate of zero is a head whose output nobody reads, and it has an
effect; fp64."""

from __future__ import annotations

import copy

import torch

import headprune as hp
from tests.laws.families import assert_equal, far, over, run
from tests.laws.support import CLOSE, Subject


@over()
def test_law_2_a_gate_of_zero_is_a_zeroed_head_and_has_an_effect(subject: Subject) -> None:
    full = run(subject.model, subject.batch)
    for site in subject.sites:
        head = len(site.heads) - 1
        gate = torch.ones(len(site.heads), dtype=torch.float64)
        gate[head] = 0.0
        with hp.gated(subject.model, {site.name: gate}, subject.sites):
            got = run(subject.model, subject.batch)
        assert far(got, full), site.name
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
