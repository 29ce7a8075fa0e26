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
from headprune.core.scores import Cost
from headprune.model.running import call
from tests.laws.families import FAMILIES
from tests.laws.support import family_subject
from tests.unit.test_costs import less, measure, removed_units

#: Multiply-adds of one example that are neither a linear layer's, a convolution's nor an
#: attention's: the embedding of the image times that of the text.
ELSEWHERE = {"clip": 12, "siglip": 16}

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


def counted(model: nn.Module, batch: Any) -> int:
    """Multiply-adds by PyTorch, which does not count its fused kernels for the CPU: attention as
    matrix products, layers module by module."""
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


@pytest.mark.parametrize(
    ("layout", "family"), [pair for pair in FAMILIES if pair[1] not in THREE], ids=lambda name: name
)
def test_costs_are_those_that_pytorch_counts_before_and_after_a_cut(
    layout: str, family: str
) -> None:
    """Also for a batch of three examples; the first example has no padding."""
    subject = family_subject(layout, family)
    batch = {k: v[:1] for k, v in subject.batch.items()}
    table, whole = measure(subject.model, batch), counted(subject.model, batch)
    assert all(c.macs(table.length) > 0 and c.params > 0 for row in table.units for c in row)
    assert measure(subject.model, {k: torch.cat([v] * 3) for k, v in batch.items()}) == table
    got = table.total.macs(table.length) + ELSEWHERE.get(family, 0)
    if family in UNCOUNTED:
        assert got < whole, UNCOUNTED[family]
    elif family not in OWN_KEYS:
        assert got == whole

    mask = subject.ragged()
    removed = Cost.sum(removed_units(subject, table, mask))
    small = copy.deepcopy(subject.model)
    hp.prune_(small, mask, sites=subject.sites)
    assert measure(small, batch).total == less(table.total, removed)
    if family not in OWN_KEYS:
        assert counted(small, batch) == whole - removed.macs(table.length)
