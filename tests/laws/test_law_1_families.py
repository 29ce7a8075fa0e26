"""Law 1 over every family: gates of one change no bit, carry a gradient, and leave no trace;
fp64."""

from __future__ import annotations

import torch

import headprune as hp
from headprune.layouts import registry
from tests.laws.families import assert_equal, over, run
from tests.laws.support import CLOSE, EXACT, Subject, objective, picture

#: Layouts whose output projection is called by code of ours as long as there are gates: equal up to
#: rounding.
EXPOSED = {name for name in registry.names() if registry.get(name).exposed is not None}


@over()
def test_law_1_gates_of_one_change_no_bit_and_leave_no_trace(subject: Subject) -> None:
    # First: Transformers may install hooks of its own in the first run.
    expected = run(subject.model, subject.batch)
    before = picture(subject.model)
    gates = {
        s.name: torch.ones(3, len(s.heads), dtype=torch.float64, requires_grad=True)
        for s in subject.sites
    }
    with hp.gated(subject.model, gates, subject.sites):
        got = run(subject.model, subject.batch)
        gradients = torch.autograd.grad(
            objective(got[-1] if got[0].ndim == 0 else got[0]), list(gates.values())
        )
    exposed = any(s.layout in EXPOSED for s in subject.sites)
    assert_equal(got, expected, **(CLOSE if exposed else EXACT))
    assert all(g.abs().sum(0).min() > 0 for g in gradients), "every head's gate carries a gradient"
    assert picture(subject.model) == before
