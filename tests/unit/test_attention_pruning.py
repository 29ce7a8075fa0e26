"""MultiHeadAttention without some of its heads, and with a cache of keys and values."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.attention import KVCache, MultiHeadAttention
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from tests.unit.test_attention import EXACT, F64, make, rand

# ---------------------------------------------------------------- pruning


@pytest.mark.parametrize("n_kv", [1, 2, 4])
@pytest.mark.parametrize("keep", [[0, 1, 2, 3], [0, 1], [1, 2], [3], []])
def test_the_geometry_says_which_heads_share(n_kv: int, keep: list[int]) -> None:
    module = MultiHeadAttention(8, 4, n_kv_heads=n_kv)
    (site,) = hp.find_sites(module, policy="free")
    hp.prune_(module, hp.HeadMask.from_keep({"": keep}, {"": 4}), sites=[site])
    groups = [h // (4 // n_kv) for h in keep]
    found = module.geometry
    assert (found.n_query_heads, found.n_kv_heads) == (len(keep), len(set(groups)))
    assert (found.n_query_heads, found.n_kv_heads) == (module.n_heads, module.n_kv_heads)
    shared = found.kv_of or [i * found.n_kv_heads // len(keep) for i in range(len(keep))]
    assert list(shared) == [sorted(set(groups)).index(g) for g in groups]


@pytest.mark.parametrize(
    ("shape", "keep"),
    [
        ({}, [0, 2, 3]),
        ({"compatibility": "additive"}, [2]),
        ({"bias": False}, []),
        ({"n_kv_heads": 2, "value_dim": 5, "output_size": 7}, [2, 3]),
        ({"n_kv_heads": 2, "compatibility": "additive"}, [0, 1]),
        ({"n_kv_heads": 1, "key_size": 5}, []),
        ({"bias": False, "output_bias": True}, [3, 1]),
    ],
)
def test_pruned_equals_gated_to_zero(shape: dict[str, Any], keep: list[int]) -> None:
    module = make(**shape)
    given = rand(2, 3, 12), rand(2, 5, module.W_k.in_features)
    lens, gates = torch.tensor([4, 0]), torch.zeros(4, dtype=F64)
    gates[keep] = 1
    full, weights = module(*given, valid_lens=lens, need_weights=True)
    gated = module(*given, valid_lens=lens, gates=gates)
    assert not torch.allclose(gated, full)
    size = sum(p.numel() for p in module.parameters())
    removed = module.prune_heads_(keep)
    assert sorted(removed + tuple(keep)) == [0, 1, 2, 3]
    assert sum(p.numel() for p in module.parameters()) < size
    assert_close(module(*given, valid_lens=lens), gated, **EXACT)
    again, pruned_weights = module(*given, valid_lens=lens, need_weights=True)
    assert_close(again, gated, **EXACT)
    assert_close(pruned_weights, weights[:, sorted(keep)], **EXACT)
    assert module.heads == tuple(sorted(keep))
    state = HeadState(4, shape.get("n_kv_heads", 4), tuple(sorted(keep)))
    assert getattr(module, STATE_ATTRIBUTE) == state
    assert module.W_q.out_features == module.W_q.weight.shape[0] == len(keep) * module.head_dim
    assert module.W_o.in_features == module.W_o.weight.shape[1] == len(keep) * module.value_dim


@pytest.mark.parametrize(("bias", "batch_first"), [(True, True), (False, False)])
def test_without_heads_nothing_is_computed(bias: bool, batch_first: bool) -> None:
    module, x = make(bias=bias, batch_first=batch_first, output_size=5), rand(2, 3, 12)
    module.prune_heads_([])
    assert (module.n_heads, module.n_kv_heads, module.heads) == (0, 0, ())
    called: list[str] = []
    for name, child in module.named_children():
        child.register_forward_hook(lambda *_a, name=name: called.append(name))
    out = module(x, gates=torch.ones(0))
    assert called == []
    assert_close(out, module.W_o.bias.expand(2, 3, 5) if bias else torch.zeros(2, 3, 5, dtype=F64))
    out.add_(1)  # not a view of the bias
    if bias:
        module(x).sum().backward()
        assert_close(module.W_o.bias.grad, torch.full((5,), 6.0, dtype=F64))
    with pytest.raises(InvalidValue, match="valid_lens"):
        module(x, valid_lens=torch.tensor([9, 9, 9, 9]))
    cache = KVCache()
    module(x, cache=cache, causal=True)
    module(x, cache=cache, causal=True)
    assert cache.length == (6 if batch_first else 4)
    none = torch.zeros(0, dtype=torch.long)  # no examples have no lengths
    assert make()(rand(0, 3, 12), valid_lens=none).shape == (0, 3, 12)


def test_prune_twice_equals_prune_once_and_nothing_changes_nothing() -> None:
    module, x = make(query_size=12, n_heads=6, head_dim=2), rand(2, 3, 12)
    once, before = copy.deepcopy(module), module.W_q.weight
    assert module.prune_heads_(range(6)) == ()
    assert module.W_q.weight is before
    assert not hasattr(module, STATE_ATTRIBUTE)
    assert module.prune_heads_([0, 2, 3, 5]) == (1, 4)
    assert module.prune_heads_(torch.tensor([3, 5])) == (0, 2)
    once.prune_heads_([5, 3])
    assert module.heads == once.heads == (3, 5)
    assert torch.equal(module(x), once(x))
    assert_close(module.state_dict(), once.state_dict(), rtol=0, atol=0)
    assert module.prune_heads_([]) == (3, 5)
    assert module.prune_heads_([]) == ()


def test_a_refused_prune_changes_nothing() -> None:
    module = make(n_kv_heads=2)
    nn.utils.parametrizations.orthogonal(module.W_o)  # the last projection to be looked at
    before = dict(module.named_parameters())
    with pytest.raises(
        UnsupportedModel, match="W_o: must be a projection of a weight and a bias only"
    ):
        module.prune_heads_([0, 1])
    with pytest.raises(InvalidValue, match="whole groups of 2 query heads"):
        module.prune_heads_([0, 1, 2])
    assert all(p is before[n] for n, p in module.named_parameters())
    assert (module.n_heads, module.n_kv_heads, hasattr(module, STATE_ATTRIBUTE)) == (4, 2, False)


def test_deepcopy_pickle_and_repr_of_a_pruned_module() -> None:
    module, x = make(n_kv_heads=2), rand(1, 3, 12)
    module.prune_heads_([2, 3])
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.heads == (2, 3)
        assert torch.equal(other(x), module(x))
    assert "n_heads=2, n_kv_heads=1, head_dim=3, heads=[2, 3] of 4" in repr(module)


def test_parameters_that_projections_share_stay_shared() -> None:
    attention = MultiHeadAttention(8, 4)
    attention.W_k.weight = attention.W_q.weight
    attention.prune_heads_([1, 3])
    assert attention.W_k.weight is attention.W_q.weight
    assert attention.W_k.bias is not attention.W_q.bias
    assert attention.W_q.weight.shape == (4, 8)


# ---------------------------------------------------------------- KV cache


@pytest.mark.parametrize(
    ("shape", "keep", "steps"),
    [
        ({}, (0, 1, 2, 3), (1, 1, 1, 1, 1)),
        ({"compatibility": "additive"}, (2, 3), (3, 1, 1)),
        ({"n_kv_heads": 2, "value_dim": 5}, (2, 3), (2, 3)),
        ({"n_kv_heads": 2, "compatibility": "additive"}, (0, 1, 2, 3), (2, 3)),
        ({"batch_first": False}, (2, 3), (1, 1, 1, 1, 1)),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_the_cache_equals_the_full_pass(
    shape: dict[str, Any], keep: tuple[int, ...], steps: tuple[int, ...], padded: bool
) -> None:
    module, x, lens = make(**shape), rand(2, 5, 12), torch.tensor([5, 3])
    module.prune_heads_(keep)
    axis = 1 if module.batch_first else 0
    x = x if module.batch_first else x.transpose(0, 1)
    full = module(x, causal=True, valid_lens=lens if padded else None)
    cache, outs = KVCache(), []
    for part in x.split(steps, dim=axis):
        so_far = lens.clamp(max=cache.length + part.shape[axis]) if padded else None
        outs.append(module(part, causal=True, cache=cache, valid_lens=so_far))
    assert_close(torch.cat(outs, axis), full, **EXACT)
    assert cache.length == 5
    assert cache.keys.shape == (2, module.n_kv_heads, 5, module.head_dim)
    assert cache.values.shape == (2, module.n_kv_heads, 5, module.value_dim)


def test_the_cache_refuses_what_does_not_go_on() -> None:
    module, cache = make(), KVCache()
    module(rand(2, 3, 12), cache=cache)
    with pytest.raises(InvalidValue, match="cached batch size"):
        module(rand(1, 1, 12), cache=cache)
    with pytest.raises(InvalidValue, match="mask"):
        module(rand(2, 1, 12), cache=cache, mask=torch.ones(1, 9, dtype=torch.bool))
    module.prune_heads_([0])
    with pytest.raises(InvalidValue, match="after heads were pruned"):
        module(rand(2, 1, 12), cache=cache)
    assert cache.length == 3
