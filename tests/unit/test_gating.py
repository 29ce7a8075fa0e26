"""gated: the forms of gates it takes, those it refuses, and the corners that the laws do not
reach."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils import checkpoint

import headprune as hp
from headprune.core.errors import InvalidValue, PlanMismatch, UnknownName
from headprune.core.plan import PruningPlan
from headprune.core.scores import ModelFingerprint
from headprune.layouts._tiny_textbook import Prepared
from tests.laws.support import CLOSE, EXACT, subject_of, unchanged

F64 = torch.float64


def one(n_heads=4):
    return hp.MultiHeadAttention(8, n_heads, dtype=F64).eval()


def two_layers():
    return nn.Sequential(one(), one(2)).eval()


def x_of(*shape):
    return torch.randn(*(shape or (2, 5, 8)), dtype=F64)


DIFFERENT = r"a mapping, because the layers have different head counts, got \[4, 2\]"
MASK = hp.HeadMask.from_keep


@pytest.mark.parametrize(
    ("gates", "kind", "words"),
    [
        ({"0": torch.ones(3)}, InvalidValue, r"gates\['0'\]: must be .* \[4\], .*got shape \[3\]"),
        ({"0": torch.ones(2, 2, 2, 4)}, InvalidValue, r"got shape \[2, 2, 2, 4\]"),
        ({"0": torch.tensor(1.0)}, InvalidValue, r"got shape \[\]"),
        ({"0": 2 * torch.ones(4, dtype=torch.long)}, InvalidValue, "got torch.int64"),
        ({"0": np.full(4, np.nan)}, InvalidValue, "must be finite, got NaN or infinite"),
        ({"0": [1.0, 1.0, 0.0]}, InvalidValue, r"got shape \[3\]"),
        ({"0": ["a", "b"]}, InvalidValue, "numbers or booleans, got an array of <U1"),
        ({"0": [[1.0], [1.0, 0.0]]}, InvalidValue, "numbers or booleans, as many per row"),
        ({"0": [1.0, 0.0, math.nan, 1.0]}, InvalidValue, "must be finite, got NaN or infinite"),
        ({"o": torch.ones(4)}, UnknownName, "gates: must be keyed by site names, got 'o'"),
        ({1: torch.ones(4)}, UnknownName, "keyed by site names, got 1"),
        (torch.ones(2, 4), InvalidValue, DIFFERENT),
        ([1.0, 0.0], InvalidValue, r"gates\['0'\]: must be .* \[4\], .*got float"),
        ([[1.0, 0.0]], InvalidValue, "one row per site, 2, got 1 rows"),
        (None, InvalidValue, "got NoneType"),
        (MASK({}, {"0": 4, "1": 3}), PlanMismatch, "with 3 heads at '1'"),
        (MASK({}, {"0": 4}), PlanMismatch, "with no heads at '1'"),
        (MASK({}, {"0": 4, "1": 2, "2": 2}), PlanMismatch, "2 heads at '2', like the plan's"),
        (
            PruningPlan(MASK({}, {"0": 4, "1": 2}), model=ModelFingerprint("another", "one")),
            PlanMismatch,
            "another class or head width",
        ),
    ],
)
def test_refused(gates, kind, words):
    model = two_layers()
    with unchanged(model), pytest.raises(kind, match=words), hp.gated(model, gates):
        pytest.fail("the block was entered")


def test_arrays_and_booleans_are_gates():
    subject = subject_of("llama")
    table = torch.ones(3, 6)
    table[1, :2] = 0
    with hp.gated(subject.model, table):
        expected = subject.run()
    by_site = dict(zip(subject.n_heads, table.double().numpy(), strict=True))
    masks = (table.bool(), table.bool().numpy(), table.int(), table.long().numpy())
    for gates in (table.numpy(), *masks, by_site, table.tolist(), table.bool().tolist()):
        with hp.gated(subject.model, gates):
            assert_close(subject.run(), expected, **EXACT)


def test_rows_of_different_lengths():
    model, rows = two_layers(), [[1, 0, 1, 1], [0.5, 1]]
    by_site = {str(i): torch.tensor(row, dtype=F64) for i, row in enumerate(rows)}
    x = x_of()
    with hp.gated(model, by_site):
        expected = model(x)
    with hp.gated(model, rows):
        assert_close(model(x), expected, **EXACT)


@pytest.mark.parametrize("shape", [(2, 6), (6,), (3, 5)])
def test_a_table_of_a_wrong_shape(shape):
    with pytest.raises(InvalidValue, match=r"of shape \[layers, heads\] = \[3, 6\]"):
        hp.gated(subject_of("llama").model, torch.ones(shape)).__enter__()


@pytest.mark.parametrize("shape", [(3, 4), (5, 2, 4)])
def test_gates_for_other_rows_than_the_model_runs_on(shape):
    model = two_layers()
    with (
        hp.gated(model, {"0": torch.ones(shape, dtype=F64)}),
        pytest.raises(InvalidValue, match="2 x 5 rows"),
    ):
        model(x_of())


class Frames(nn.Module):
    """Runs its output projection on ``[videos, frames, tokens, width]``."""

    def __init__(self):
        super().__init__()
        self.inner = one()

    def forward(self, x):
        return self.inner.W_o(x)


def test_a_gate_an_example_is_not_stretched_over_another_axis():
    """Two videos and two frames: rows of gates would fit the frames by chance."""
    model, x, gate = Frames().eval(), x_of(2, 2, 5, 8), torch.rand(2, 4, dtype=F64)
    with hp.gated(model, {"inner": gate}):
        found = model(x)
    assert_close(found, model(x * gate.repeat_interleave(2, 1)[:, None, None]), **CLOSE)
    three = torch.rand(3, 4, dtype=F64)
    with hp.gated(model, {"inner": three}), pytest.raises(InvalidValue, match="2 x 2 x 5 rows"):
        model(x)
    with hp.gated(model, {"inner": gate[0]}):  # one gate a head needs to know no axis
        found = model(x)
    assert_close(found, model(x * gate[0].repeat_interleave(2)), **CLOSE)


@pytest.mark.parametrize("sequence_first", [False, True])
def test_every_token_may_have_its_own_gate(sequence_first):
    model = nn.ModuleList([Prepared(8, 4).double() if sequence_first else one()])
    x, gate = x_of(), torch.rand(2, 5, 4, dtype=F64)

    def run():
        if not sequence_first:
            return model[0](x)
        rows = x.transpose(0, 1)
        return model[0](query=rows, key=rows, value=rows).transpose(0, 1)

    with hp.gated(model, {"0": gate}):
        got = run()
    for example, token in ((0, 0), (0, 4), (1, 2)):
        with hp.gated(model, {"0": gate[example, token]}):
            assert_close(got[example, token], run()[example, token], **CLOSE)


def test_a_subset_of_sites_takes_a_table_of_its_own():
    subject = subject_of("llama")
    some = subject.sites[1:]
    table = torch.zeros(2, 6, dtype=F64)
    with hp.gated(subject.model, table, some):
        got = subject.run()
    with hp.gated(subject.model, subject.mask({s.name: [] for s in some})):
        assert_close(got, subject.run(), **EXACT)


def test_hooks_on_the_projection_see_gated_heads_and_those_added_inside_are_kept():
    attention, x, seen = one(), x_of(), []
    handle = attention.W_o.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    attention(x)
    with hp.gated(attention, {"": torch.tensor([1.0, 0.0, 1.0, 2.0], dtype=F64)}):
        attention(x)
        attention.W_o.register_forward_hook(lambda *_: seen.append(x))
    expected = seen[0] * torch.tensor([1, 1, 0, 0, 1, 1, 2, 2], dtype=F64)
    assert_close(seen[1], expected, **CLOSE)
    handle.remove()
    attention(x)
    assert len(seen) == 3


def test_a_gate_that_changes_in_place_is_read_anew():
    attention, x, gate = one(), x_of(), torch.ones(4, dtype=F64)
    with hp.gated(attention, {"": gate}):
        gate.zero_()
        assert_close(attention(x), attention.W_o.bias.expand_as(x), **EXACT)


def test_checkpointing_with_the_backward_outside_of_the_block_is_an_error():
    """The documented limit: outside, the forward that runs again has no gate, and PyTorch must
    notice."""
    gate = torch.full((4,), 0.5, dtype=F64, requires_grad=True)
    attention = one()
    with hp.gated(attention, {"": gate}):
        out = checkpoint.checkpoint(attention, x_of(), use_reentrant=False)
    with pytest.raises(checkpoint.CheckpointError):
        out.sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_inside_the_block_has_no_gates(copied):
    model, x = two_layers(), x_of()
    expected, gate = model(x), torch.zeros(4, dtype=F64, requires_grad=True)
    with hp.gated(model, {"0": gate * 1}):  # no leaf: such a tensor itself cannot be copied
        twin = copied(model)
        assert (model(x) - expected).abs().max() > 1e-3
        assert_close(twin(x), expected, **EXACT)
        two_layers().load_state_dict(model.state_dict(), strict=True)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    assert not any(k.startswith("headprune") for m in twin.modules() for k in m.__dict__)


def test_a_plan_for_other_weights_warns_here_too():
    subject = subject_of("bert")
    plan = hp.select(hp.score(subject.model, None, "magnitude"), hp.Budget(keep_heads=0.5))
    with hp.gated(subject.model, plan):
        pass
    nn.init.zeros_(subject.model.classifier.weight)
    with pytest.warns(UserWarning, match="other weights"), hp.gated(subject.model, plan):
        pass
