"""Costs of every registered family, against PyTorch's own counter and against a measurement of the
cut model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import headprune as hp
from headprune.core.scores import Cost, CostTable
from headprune.layouts import registry
from headprune.model.costs import measure_costs
from headprune.model.running import call
from headprune.model.sites import bind
from tests.laws.support import Subject, family_subject
from tests.unit.test_costs import added, less

FAMILIES = [
    (layout, family) for layout in registry.names() for family, _ in registry.get(layout).families
]

#: Multiply-adds of one example that are neither a linear layer's, a convolution's nor an
#: attention's.
ELSEWHERE = {
    "clip": 12,  # the embedding of the image times that of the text
    "siglip": 16,
}

#: Families of whose multiply-adds PyTorch counts more than we do, and what those are; no head takes
#: part in them.
UNCOUNTED = {
    "mixtral": "experts are tensors, not linear layers",
    "gpt_oss": "experts are tensors, not linear layers",
    "olmoe": "experts are tensors, not linear layers",
    "qwen3_next": "experts, and layers of linear attention",
}

#: Attention that adds keys of its own, which its caller does not give; their products are not
#: counted.
OWN_KEYS = ("torch.nn.MultiheadAttention", "x_transformers.Decoder")

#: Models that hold the lengths of a batch of three, and take no other.
THREE = ("annotated transformer", "d2l", "labml")


@pytest.fixture(params=FAMILIES, ids=lambda pair: pair[1])
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param[1] in THREE:
        pytest.skip("its model takes only the batch of three whose lengths it holds")
    return family_subject(*request.param)


def measure(model: nn.Module, batch: Any) -> CostTable:
    return measure_costs(model, bind(model), batch)


def first(subject: Subject) -> dict[str, Any]:
    """The first example, which has no padding."""
    return {k: v[:1] for k, v in subject.batch.items()}


def counted(model: nn.Module, batch: Any) -> int:
    # PyTorch does not count its fused kernels for the CPU: attention as matrix products, layers
    # module by module.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            FlopCounterMode(display=False) as counter,
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
        ):
            call(model, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2


def test_multiply_adds_are_those_that_pytorch_counts(subject: Subject) -> None:
    batch = first(subject)
    table, expected = measure(subject.model, batch), counted(subject.model, batch)
    assert all(c.macs(table.length) > 0 and c.params > 0 for row in table.units for c in row)
    got = table.total.macs(table.length) + ELSEWHERE.get(subject.family, 0)
    if subject.family in UNCOUNTED:
        assert got < expected, UNCOUNTED[subject.family]
    elif subject.family not in OWN_KEYS:
        assert got == expected


def test_costs_do_not_depend_on_the_batch_size(subject: Subject) -> None:
    one = first(subject)
    assert measure(subject.model, one) == measure(
        subject.model, {k: torch.cat([v] * 3) for k, v in one.items()}
    )


def test_what_is_left_is_the_total_less_the_units(subject: Subject) -> None:
    batch = first(subject)
    table, mask = measure(subject.model, batch), subject.ragged()
    gone: list[Cost] = []
    for site, costs in zip(subject.sites, table.units, strict=True):
        gone += [
            c
            for u, c in zip(site.units, costs, strict=True)
            if not set(u) <= set(mask.kept(site.name))
        ]
    small = copy.deepcopy(subject.model)
    hp.prune_(small, mask, sites=subject.sites)
    assert measure(small, batch).total == less(table.total, added(gone))
    if subject.family not in OWN_KEYS:
        assert counted(small, batch) == counted(subject.model, batch) - added(gone).macs(
            table.length
        )
