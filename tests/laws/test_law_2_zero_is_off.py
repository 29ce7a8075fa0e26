"""Law 2: a gate at 0 equals a head whose slice of the output projection is zero, and changes the
output."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from tests.laws.support import CLOSE, EXACT, Subject


def with_zeroed(subject: Subject, site: hp.AttentionSite, heads: list[int]) -> nn.Module:
    """A copy in which the output projection no longer reads the heads: no code of ours says which
    columns those are."""
    model = subject.copy()
    projection = model.get_submodule(f"{site.name}.{subject.layout.gate}")
    width = subject.sites[0].value_dim
    with torch.no_grad():
        for head in heads:
            columns = slice(head * width, (head + 1) * width)
            if isinstance(projection, nn.Linear):
                projection.weight[:, columns] = 0
            else:  # Conv1D keeps [in, out]
                projection.weight[columns] = 0
    return model


def test_a_gate_at_zero_is_a_zeroed_head(subject: Subject) -> None:
    base = subject.run()
    for site in subject.sites:
        for head in site.heads:
            gate = torch.ones(site.n_query_heads, dtype=torch.float64)
            gate[head] = 0
            with hp.gated(subject.model, {site.name: gate}):
                got = subject.run()
            assert_close(got, subject.run(with_zeroed(subject, site, [head])), **CLOSE)
            assert (got - base).abs().max() > 1e-5, f"head {head} of {site.name} has no effect"


def test_a_mask_switches_off_what_it_does_not_keep(subject: Subject) -> None:
    site = subject.sites[-1]
    gone = [0, 1] if site.group_size == 2 else [0]
    with hp.gated(subject.model, subject.without({site.name: gone})):
        got = subject.run()
    assert_close(got, subject.run(with_zeroed(subject, site, gone)), **CLOSE)


def test_a_row_of_gates_is_for_its_example_only(subject: Subject) -> None:
    base, site = subject.run(), subject.sites[0]
    gate = torch.ones(3, site.n_query_heads, dtype=torch.float64)
    gate[1] = 0
    with hp.gated(subject.model, {site.name: gate}):
        got = subject.run()
    zeroed = subject.run(with_zeroed(subject, site, list(site.heads)))
    assert_close(got[1], zeroed[1], **CLOSE)
    assert (got[1] - base[1]).abs().max() > 1e-5
    assert_close(got[[0, 2]], base[[0, 2]], **EXACT)
