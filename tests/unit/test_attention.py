"""headprune.attention against a literal transcription of the formula, and against PyTorch's own module."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from headprune.attention import (
    Additive,
    KVCache,
    MultiHeadAttention,
    ScaledDotProduct,
    cut_features,
    feature_count,
    replace_features_,
)
from headprune.attention import attend as attend_module
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from tests.reference import attention as reference

EXACT = {"rtol": 1e-12, "atol": 1e-12}
F64 = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make(query_size: int = 12, n_heads: int = 4, **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(query_size, n_heads, dtype=options.pop("dtype", F64), **options).eval()


def rand(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def spy_on_sdpa(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records the keyword arguments of every call of the fast kernel."""
    calls: list[dict[str, Any]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(attend_module.F, "scaled_dot_product_attention", spy)
    return calls


# ---------------------------------------------------------------- the formula

SHAPES = {
    "plain": {},
    "grouped": {"n_kv_heads": 2},
    "multi-query": {"n_kv_heads": 1},
    "no-bias": {"bias": False},
    "output-bias-only": {"bias": False, "output_bias": True},
    "separate-widths": {"key_size": 7, "value_size": 9, "output_size": 5, "head_dim": 2, "value_dim": 6},
    "all": {"n_kv_heads": 2, "key_size": 7, "value_size": 9, "output_size": 5, "head_dim": 5, "value_dim": 2},
}
MASKS = {
    "none": {},
    "lens": {"valid_lens": torch.tensor([3, 1])},
    "lens-per-query": {"valid_lens": torch.tensor([[1, 2, 3, 0], [4, 4, 1, 2]])},
    "mask-2d": {"mask": torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()},
    "mask-keys": {"mask": torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]]).bool()[:, None, None, :]},
    "mask-queries": {"mask": torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]]).bool()[:, None, :, None]},
    "mask-heads": {"mask": torch.rand(2, 4, 4, 4, generator=torch.Generator().manual_seed(1)) > 0.6},
    "causal": {"causal": True},
    "hide-self": {"hide_self": True},
    "everything": {
        "valid_lens": torch.tensor([3, 0]),
        "mask": torch.rand(1, 4, 4, 1, generator=torch.Generator().manual_seed(2)) > 0.3,
        "causal": True,
        "hide_self": True,
    },
}


@pytest.mark.parametrize("compatibility", ["scaled_dot_product", "additive"])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_equals_the_literal_loop(
    shape: dict[str, Any], masks: dict[str, Any], compatibility: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(**shape, compatibility=compatibility)
    query, key, value = (rand(2, 4, p.in_features) for p in (module.W_q, module.W_k, module.W_v))
    fit = reference.scaled_dot_product
    if compatibility == "additive":
        fit = reference.additive(module.compatibility.weight)
    allowed = reference.may_see(2, 4, 4, 4, **masks)
    expected, expected_weights = reference.multi_head(module, query, key, value, allowed, fit)
    calls = spy_on_sdpa(monkeypatch)
    assert_close(module(query, key, value, **masks), expected, **EXACT)
    assert len(calls) == (compatibility == "scaled_dot_product")
    out, weights = module(query, key, value, need_weights=True, **masks)
    assert len(calls) == (compatibility == "scaled_dot_product")
    assert_close(out, expected, **EXACT)
    assert_close(weights, expected_weights, **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_more_keys_than_queries_puts_the_queries_last(causal: bool, need_weights: bool) -> None:
    module = make(n_kv_heads=2)
    query, key = rand(2, 3, 12), rand(2, 5, 12)
    masks = {"causal": causal, "hide_self": not causal}
    expected, _ = reference.multi_head(module, query, key, key, reference.may_see(2, 4, 3, 5, **masks))
    out = module(query, key, need_weights=need_weights, **masks)
    assert_close(out[0] if need_weights else out, expected, **EXACT)


def test_shapes_of_the_textbook_example() -> None:
    module = MultiHeadAttention(100, 5, dropout=0.5).eval()
    queries, keys = torch.ones(2, 4, 100), torch.ones(2, 6, 100)
    out, weights = module(queries, keys, keys, valid_lens=torch.tensor([3, 2]), need_weights=True)
    assert out.shape == (2, 4, 100)
    assert weights.shape == (2, 5, 4, 6)
    assert (weights[0, :, :, 3:] == 0).all()
    assert (weights[1, :, :, 2:] == 0).all()
    assert_close(weights.sum(-1), torch.ones(2, 5, 4))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_the_order_of_the_heads_does_not_matter(order: list[int]) -> None:
    module, x = make(), rand(2, 3, 12)
    permuted = copy.deepcopy(module)
    rows = [h * 3 + i for h in order for i in range(3)]
    with torch.no_grad():
        for name in ("W_q", "W_k", "W_v"):
            getattr(permuted, name).weight.copy_(getattr(module, name).weight[rows])
            getattr(permuted, name).bias.copy_(getattr(module, name).bias[rows])
        permuted.W_o.weight.copy_(module.W_o.weight[:, rows])
    out, weights = module(x, need_weights=True)
    again, permuted_weights = permuted(x, need_weights=True)
    assert_close(again, out, **EXACT)
    assert_close(permuted_weights, weights[:, order], **EXACT)


def test_sequence_first_is_a_transposition() -> None:
    module = make(n_kv_heads=2, output_size=5)
    other = make(n_kv_heads=2, output_size=5, batch_first=False)
    other.load_state_dict(module.state_dict())
    query, key = rand(2, 3, 12), rand(2, 5, 12)
    seen: list[torch.Size] = []
    other.W_o.register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape))
    options: dict[str, Any] = {"valid_lens": torch.tensor([4, 2]), "gates": rand(2, 4), "need_weights": True}
    out, weights = module(query, key, **options)
    other_out, other_weights = other(query.transpose(0, 1), key.transpose(0, 1), **options)
    assert_close(other_out, out.transpose(0, 1), **EXACT)
    assert_close(other_weights, weights, **EXACT)
    assert seen == [torch.Size([2, 3, 12])]  # gates from outside rely on a batch-first input of W_o


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("need_weights", [False, True], ids=["fast", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_kv_heads", [4, 1])
def test_a_query_without_keys_gets_zeros_and_finite_gradients(
    need_weights: bool, dtype: torch.dtype, n_kv_heads: int
) -> None:
    module = make(dtype=dtype, n_kv_heads=n_kv_heads)
    x = rand(3, 4, 12, dtype=dtype).requires_grad_()
    gates = torch.ones(4, dtype=dtype, requires_grad=True)
    lens = torch.tensor([0, 2, 4])
    out = module(x, valid_lens=lens, gates=gates, need_weights=need_weights)
    if need_weights:
        out, weights = out
        assert (weights[0] == 0).all()
    assert_close(out[0], module.W_o.bias.expand(4, 12))
    out.square().sum().backward()
    for tensor in (x, gates, *module.parameters()):
        assert torch.isfinite(tensor.grad).all()
    assert (x.grad[0] == 0).all()
    assert (x.grad[1] != 0).any()


@pytest.mark.parametrize("need_weights", [False, True])
def test_no_keys_at_all_gives_zeros(need_weights: bool) -> None:
    module = make()
    out = module(rand(2, 3, 12), rand(2, 0, 12), need_weights=need_weights)
    if need_weights:
        out, weights = out
        assert weights.shape == (2, 4, 3, 0)
    assert_close(out, module.W_o.bias.expand(2, 3, 12))


def test_the_kernels_get_no_mask_where_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy_on_sdpa(monkeypatch)
    module, x = make(n_kv_heads=2), rand(2, 4, 12)
    module(x)
    module(x, causal=True)
    module(x[:, -1:], x, causal=True)
    module(x, hide_self=True)
    assert [(c["attn_mask"] is None, c["is_causal"], c["enable_gqa"]) for c in calls] == [
        (True, False, True),
        (True, True, True),
        (True, False, True),
        (False, False, False),
    ]


# ---------------------------------------------------------------- compatibility functions


def test_a_callable_sees_original_heads_and_positions() -> None:
    seen: list[tuple[int, ...]] = []
    slopes = torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=F64)

    def fit(query: torch.Tensor, key: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        seen.append(heads)
        i = torch.arange(query.shape[-2])[:, None] + key.shape[-2] - query.shape[-2]
        distance = (i - torch.arange(key.shape[-2])).abs()
        return query @ key.transpose(-2, -1) - slopes[list(heads), None, None] * distance

    module, x = make(compatibility=fit, n_kv_heads=2), rand(2, 4, 12)
    gated = module(x, causal=True, gates=torch.tensor([0, 0, 1, 1], dtype=F64))
    module.prune_heads_([2, 3])
    assert_close(module(x, causal=True), gated, **EXACT)
    assert seen == [(0, 1, 2, 3), (2, 3)]
    cache = KVCache()
    steps = [module(x[:, t : t + 1], causal=True, cache=cache) for t in range(4)]
    assert_close(torch.cat(steps, 1), gated, **EXACT)


def test_a_module_as_compatibility_trains_and_is_saved() -> None:
    module = make(compatibility=Additive(3, dtype=F64))
    assert "compatibility.weight" in module.state_dict()
    module(rand(1, 3, 12)).sum().backward()
    assert (module.compatibility.weight.grad != 0).any()
    before = module.compatibility.weight
    module.prune_heads_([1])
    assert module.compatibility.weight is before


@pytest.mark.parametrize("need_weights", [False, True])
def test_scale(need_weights: bool) -> None:
    module, x = make(compatibility=ScaledDotProduct(0.25)), rand(2, 4, 12)
    expected, _ = reference.multi_head(
        module, x, x, x, reference.may_see(2, 4, 4, 4), lambda q, k: 0.25 * torch.dot(q, k)
    )
    out = module(x, need_weights=need_weights)
    assert_close(out[0] if need_weights else out, expected, **EXACT)


# ---------------------------------------------------------------- gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_gates_of_one_change_no_bit_and_carry_their_gradient(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module, x = make(dtype=dtype), rand(2, 3, 12, dtype=dtype)
    gates = torch.ones(shape, requires_grad=True)
    out = module(x, gates=gates)
    assert torch.equal(out, module(x))
    out.square().sum().backward()
    assert (gates.grad != 0).all()


@pytest.mark.parametrize("per_example", [False, True])
def test_gates_equal_the_loop_and_finite_differences(per_example: bool) -> None:
    module, x = make(n_kv_heads=2, value_dim=5), rand(2, 3, 12)
    gates = rand(2, 4) if per_example else rand(4)
    expected, _ = reference.multi_head(module, x, x, x, reference.may_see(2, 4, 3, 3), gates=gates.expand(2, 4))
    assert_close(module(x, gates=gates), expected, **EXACT)
    assert torch.autograd.gradcheck(lambda g: module(x, gates=g), gates.clone().requires_grad_())
    ones = torch.ones_like(gates, requires_grad=True)
    module(x, gates=ones).square().sum().backward()
    step = 1e-6
    for i in itertools.product(*map(range, gates.shape)):
        up, down = torch.ones_like(gates), torch.ones_like(gates)
        up[i] += step
        down[i] -= step
        numeric = (module(x, gates=up).square().sum() - module(x, gates=down).square().sum()) / (2 * step)
        assert_close(ones.grad[i], numeric.detach(), rtol=1e-6, atol=1e-7)  # central differences are second order


class Operations(TorchDispatchMode):
    """Lists every tensor operation that runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_without_gates_nothing_is_multiplied() -> None:
    module, x, gates = make(), rand(2, 3, 12), torch.ones(4, dtype=F64)
    with Operations() as without:
        module(x)
    with Operations() as gated:
        module(x, gates=gates)
    assert "aten::mul.Tensor" not in without.names
    assert gated.names.count("aten::mul.Tensor") == 1
    assert len(without.names) < len(gated.names)


def test_hooks_on_the_output_projection_gate_the_same() -> None:
    module, x, gates = make(), rand(2, 3, 12), rand(4)
    expected = module(x, gates=gates)
    module.W_o.register_forward_pre_hook(lambda _m, args: (args[0] * gates.repeat_interleave(3),))
    assert_close(module(x), expected, **EXACT)


# ---------------------------------------------------------------- pruning


@pytest.mark.parametrize("compatibility", ["scaled_dot_product", "additive"])
@pytest.mark.parametrize(
    ("shape", "keep"),
    [
        ({}, [0, 2, 3]),
        ({}, [2]),
        ({}, []),
        ({"bias": False}, []),
        ({"n_kv_heads": 2, "value_dim": 5, "output_size": 7}, [2, 3]),
        ({"n_kv_heads": 2}, [0, 1]),
        ({"n_kv_heads": 1, "key_size": 5}, []),
        ({"bias": False, "output_bias": True}, [3, 1]),
    ],
)
def test_pruned_equals_gated_to_zero(shape: dict[str, Any], keep: list[int], compatibility: str) -> None:
    module = make(**shape, compatibility=compatibility)
    query, key = rand(2, 3, 12), rand(2, 5, module.W_k.in_features)
    gates = torch.zeros(4, dtype=F64)
    gates[keep] = 1
    full, weights = module(query, key, valid_lens=torch.tensor([4, 0]), need_weights=True)
    gated = module(query, key, valid_lens=torch.tensor([4, 0]), gates=gates)
    assert not torch.allclose(gated, full)
    size = sum(p.numel() for p in module.parameters())
    removed = module.prune_heads_(keep)
    assert sorted(removed + tuple(keep)) == [0, 1, 2, 3]
    assert sum(p.numel() for p in module.parameters()) < size
    assert_close(module(query, key, valid_lens=torch.tensor([4, 0])), gated, **EXACT)
    again, pruned_weights = module(query, key, valid_lens=torch.tensor([4, 0]), need_weights=True)
    assert_close(again, gated, **EXACT)
    assert_close(pruned_weights, weights[:, sorted(keep)], **EXACT)
    assert module.heads == tuple(sorted(keep))
    assert getattr(module, STATE_ATTRIBUTE) == HeadState(4, shape.get("n_kv_heads", 4), tuple(sorted(keep)))
    assert module.W_q.out_features == module.W_q.weight.shape[0] == len(keep) * module.head_dim
    assert module.W_o.in_features == module.W_o.weight.shape[1] == len(keep) * module.value_dim


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_no_head_left_computes_nothing(bias: bool, batch_first: bool) -> None:
    module, x = make(bias=bias, batch_first=batch_first, output_size=5), rand(2, 3, 12)
    module.prune_heads_([])
    assert (module.n_heads, module.n_kv_heads, module.heads) == (0, 0, ())
    called: list[str] = []
    for name, child in module.named_children():
        child.register_forward_hook(lambda *_a, name=name: called.append(name))
    out = module(x, gates=torch.ones(0))
    assert called == []
    assert out.shape == (2, 3, 5)
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
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, once.state_dict()[name])
    assert module.prune_heads_([]) == (3, 5)
    assert module.prune_heads_([]) == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prune_preserves_what_the_module_is(dtype: torch.dtype) -> None:
    module = make(dtype=dtype).train()
    module.W_k.requires_grad_(False)
    module.W_o.bias.requires_grad_(False)
    module.W_q.weight._is_hf_initialized = True
    parts, hook = dict(module.named_children()), []
    module.W_o.register_forward_hook(lambda *_a: hook.append(1))
    module.W_v.eval()
    bias = module.W_o.bias
    module.prune_heads_([1, 2])
    assert dict(module.named_children()) == parts
    assert module.training
    assert not module.W_v.training
    assert {p.dtype for p in module.parameters()} == {dtype}
    frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
    assert frozen == ["W_k.weight", "W_k.bias", "W_o.bias"]
    assert all(type(p) is nn.Parameter and p.is_contiguous() and p.is_leaf for p in module.parameters())
    assert module.W_o.bias is bias
    assert module.W_q.weight._is_hf_initialized
    module(torch.randn(1, 2, 12, dtype=dtype))
    assert hook == [1]
    assert list(module.state_dict()) == [f"W_{p}.{k}" for p in "qkvo" for k in ("weight", "bias")]


def test_a_refused_prune_changes_nothing() -> None:
    module = make(n_kv_heads=2)
    nn.utils.parametrizations.orthogonal(module.W_o)  # the last projection to be looked at
    before = dict(module.named_parameters())
    with pytest.raises(UnsupportedModel, match="W_o: must be a projection of a weight and a bias only"):
        module.prune_heads_([0, 1])
    with pytest.raises(InvalidValue, match="whole groups of 2 query heads"):
        module.prune_heads_([0, 1, 2])
    assert all(p is before[n] for n, p in module.named_parameters())
    assert (module.n_heads, module.n_kv_heads, hasattr(module, STATE_ATTRIBUTE)) == (4, 2, False)


def test_an_outside_cut_gives_a_right_module() -> None:
    for keep, kv in (([2, 3], 1), ([], 0)):
        module, x = make(n_kv_heads=2, value_dim=5), rand(2, 3, 12)
        ours = copy.deepcopy(module)
        ours.prune_heads_(keep)
        q, o = ([h * d + i for h in keep for i in range(d)] for d in (3, 5))
        k, v = ([(h // 2) * d + i for h in keep[::2] for i in range(d)] for d in (3, 5))
        for name, axis, rows in (("W_q", "out", q), ("W_k", "out", k), ("W_v", "out", v), ("W_o", "in", o)):
            projection = getattr(module, name)
            replace_features_(projection, cut_features(projection, axis, rows))
        module.n_heads, module.n_kv_heads = len(keep), kv
        setattr(module, STATE_ATTRIBUTE, HeadState(4, 2, tuple(keep)))
        assert torch.equal(module(x, causal=True), ours(x, causal=True))
        assert module.heads == tuple(keep)


def test_deepcopy_pickle_and_repr_of_a_pruned_module() -> None:
    module, x = make(n_kv_heads=2), rand(1, 3, 12)
    module.prune_heads_([2, 3])
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.heads == (2, 3)
        assert torch.equal(other(x), module(x))
    assert "n_heads=2, n_kv_heads=1, head_dim=3, heads=[2, 3] of 4" in repr(module)


# ---------------------------------------------------------------- KV cache


@pytest.mark.parametrize("compatibility", ["scaled_dot_product", "additive"])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1), (3, 1, 1), (2, 3)])
@pytest.mark.parametrize("keep", [(0, 1, 2, 3), (2, 3)])
@pytest.mark.parametrize("shape", [{}, {"n_kv_heads": 2, "value_dim": 5}, {"batch_first": False}])
def test_the_cache_equals_the_full_pass(
    shape: dict[str, Any], keep: tuple[int, ...], steps: tuple[int, ...], compatibility: str
) -> None:
    module, x, lens = make(**shape, compatibility=compatibility), rand(2, 5, 12), torch.tensor([5, 3])
    module.prune_heads_(keep)
    axis = 1 if module.batch_first else 0
    x = x if module.batch_first else x.transpose(0, 1)
    for padded in (False, True):
        full = module(x, causal=True, valid_lens=lens if padded else None)
        cache, outs = KVCache(), []
        for part in x.split(steps, dim=axis):
            seen = cache.length + part.shape[axis]
            outs.append(module(part, causal=True, cache=cache, valid_lens=lens.clamp(max=seen) if padded else None))
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


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_acts_in_training_only(need_weights: bool) -> None:
    module, x = make(dropout=0.5), rand(2, 6, 12)
    plain = make(dropout=0.0)
    plain.load_state_dict(module.state_dict())

    def run(m: MultiHeadAttention) -> torch.Tensor:
        out = m(x, need_weights=need_weights)
        return out[0] if need_weights else out

    assert_close(run(module), run(plain), **EXACT)
    module.train()
    first, second = run(module), run(module)
    assert not torch.allclose(first, second)
    with torch.no_grad():
        mean = torch.stack([run(module) for _ in range(1000)]).mean(0)
    assert_close(mean, run(plain), rtol=0, atol=0.1)  # the mean of 1000 draws, each of spread about 1


def test_weights_are_shown_before_dropout() -> None:
    module, x = make(dropout=0.5).train(), rand(2, 6, 12)
    _, weights = module(x, need_weights=True)
    assert_close(weights.sum(-1), torch.ones(2, 4, 6, dtype=F64))


# ---------------------------------------------------------------- construction


@pytest.mark.parametrize("own", [False, True])
def test_from_heads(own: bool) -> None:
    heads = [(rand(3, 8), rand(3, 6), rand(2, 7)) for _ in range(4)]
    W_o = rand(5, 8) if own else None
    state = torch.get_rng_state()
    module = MultiHeadAttention.from_heads(heads, W_o)
    assert torch.equal(torch.get_rng_state(), state)
    query, key, value = rand(2, 3, 8), rand(2, 4, 6), rand(2, 4, 7)
    parts = []
    for W_q, W_k, W_v in heads:
        fit = (query @ W_q.T) @ (key @ W_k.T).transpose(1, 2) / 3**0.5
        parts.append(fit.softmax(-1) @ (value @ W_v.T))
    expected = torch.cat(parts, -1) if W_o is None else torch.cat(parts, -1) @ W_o.T
    assert_close(module(query, key, value), expected, **EXACT)
    assert module.W_o.weight.requires_grad is own
    assert module.W_q.weight.requires_grad
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    module.prune_heads_([1, 2])
    if not own:
        expected = torch.cat([p if i in (1, 2) else torch.zeros_like(p) for i, p in enumerate(parts)], -1)
        assert_close(module(query, key, value), expected, **EXACT)
        assert not module.W_o.weight.requires_grad
    module.prune_heads_([])
    assert_close(module(query, key, value), torch.zeros_like(expected))


def test_from_heads_copies_and_one_matrix_may_serve_thrice() -> None:
    shared = [rand(3, 8), rand(3, 8)]
    W_o = rand(4, 6)
    module = MultiHeadAttention.from_heads([(m, m, m) for m in shared], W_o, compatibility="additive")
    x = rand(1, 4, 8)
    module(x).sum().backward()
    expected = module(x)
    shared[0].zero_()
    W_o.zero_()
    assert torch.equal(module(x), expected)
    assert not torch.equal(module.W_q.weight.grad, module.W_v.weight.grad)


@pytest.mark.parametrize("kdim", [None, 5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_from_and_to_torch(batch_first: bool, bias: bool, kdim: int | None, dtype: torch.dtype) -> None:
    options = {"bias": bias, "batch_first": batch_first, "kdim": kdim, "vdim": 7 if kdim else None, "dtype": dtype}
    theirs = nn.MultiheadAttention(12, 4, dropout=0.25, **options).eval()
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    theirs.out_proj.weight.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    query, key, value = rand(2, 3, 12), rand(2, 5, kdim or 12), rand(2, 5, 7 if kdim else 12)
    query, key, value = (x.to(dtype) if batch_first else x.to(dtype).transpose(0, 1) for x in (query, key, value))
    lens = torch.tensor([4, 2])
    hidden = torch.arange(5) >= lens[:, None]
    expected, weights = theirs(query, key, value, key_padding_mask=hidden, average_attn_weights=False)
    tolerance = EXACT if dtype is F64 else {}
    assert_close(ours(query, key, value, valid_lens=lens), expected, **tolerance)
    out, shown = ours(query, key, value, mask=~hidden[:, None, None], need_weights=True)
    assert_close(out, expected, **tolerance)
    assert_close(shown, weights, **tolerance)
    back = ours.to_torch()
    assert (back.dropout, back.training, back.batch_first) == (0.25, False, batch_first)
    assert list(back.state_dict()) == list(theirs.state_dict())
    for (name, tensor), (_, other) in zip(theirs.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(tensor, other), name
        assert tensor.requires_grad == other.requires_grad, name
        assert tensor.dtype == other.dtype
        assert tensor.data_ptr() != other.data_ptr()
    again = back(query, key, value, key_padding_mask=hidden)[0]
    assert torch.equal(again, theirs(query, key, value, key_padding_mask=hidden)[0])
    assert theirs.train() is not None
    assert MultiHeadAttention.from_torch(theirs).training


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_from_torch_refuses(options: dict[str, bool]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(options))):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 4, **options))


def test_from_torch_refuses_other_classes_and_parametrised_ones() -> None:
    with pytest.raises(UnsupportedModel, match="got Linear"):
        MultiHeadAttention.from_torch(nn.Linear(2, 2))  # type: ignore[arg-type]
    module = nn.MultiheadAttention(12, 4)
    nn.utils.parametrizations.orthogonal(module, "in_proj_weight")
    with pytest.raises(UnsupportedModel, match=r"parametrizations\.in_proj_weight"):
        MultiHeadAttention.from_torch(module)


def _frozen() -> MultiHeadAttention:
    module = make()
    module.W_k.weight.requires_grad_(False)
    return module


def _pruned(keep: list[int]) -> MultiHeadAttention:
    module = make()
    module.prune_heads_(keep)
    return module


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: make(n_kv_heads=2), "one key/value head a query head, got 2 of them"),
        (lambda: make(head_dim=2), "fill the query width 12, got 4 heads of head_dim 2"),
        (lambda: make(value_dim=2), "got 4 heads of value_dim 2"),
        (lambda: make(output_size=5), "as wide as the query, 12, got 5"),
        (lambda: make(compatibility="additive"), "scaled dot product"),
        (lambda: make(compatibility=ScaledDotProduct(1.0)), "scaled dot product"),
        (lambda: make(output_bias=False), "biases on all of"),
        (_frozen, "all frozen or none"),
        (lambda: _pruned([0, 1]), "got 2 heads of head_dim 3"),
        (lambda: _pruned([]), "no head"),
    ],
)
def test_to_torch_refuses_in_words(build: Any, text: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        build().to_torch()
    assert text in str(error.value)


# ---------------------------------------------------------------- errors

X = torch.zeros(2, 4, 12, dtype=F64)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda m: m(X[0]), InvalidValue, "query: must be of shape [batch, length, 12], got [4, 12]"),
        (lambda m: m(X, X[..., :5]), InvalidValue, "key: must be of shape [batch, length, 12], got [2, 4, 5]"),
        (lambda m: m(X, X, X[:, :2]), InvalidValue, "value: must be as long as key, [2, 4], got [2, 2]"),
        (lambda m: m(X, X[:1]), InvalidValue, "key: must be of query's batch size 2, got 1"),
        (lambda m: m(X, mask=X), InvalidValue, "mask: must be a boolean tensor, got torch.float64. True may be seen"),
        (
            lambda m: m(X, mask=torch.ones(2, 3).bool()),
            InvalidValue,
            "mask: must be broadcastable to [batch, heads, queries, keys] = [2, 4, 4, 4], got [2, 3]",
        ),
        (lambda m: m(X, mask=torch.ones(1, 1, 1, 4, 4).bool()), InvalidValue, "got [1, 1, 1, 4, 4]"),
        (lambda m: m(X, valid_lens=[1, 2]), InvalidValue, "valid_lens: must be a tensor of integers, got list"),
        (
            lambda m: m(X, valid_lens=torch.ones(2)),
            InvalidValue,
            "valid_lens: must be a tensor of integers, got torch.f",
        ),
        (
            lambda m: m(X, valid_lens=torch.ones(3).long()),
            InvalidValue,
            "valid_lens: must be of shape [batch] = [2] or [batch, queries] = [2, 4], got [3]",
        ),
        (
            lambda m: m(X, valid_lens=torch.tensor([-1, 5])),
            InvalidValue,
            "valid_lens: must be between 0 and the number of keys 4, got -1 to 5",
        ),
        (lambda m: m(X, X[:, :2], causal=True), InvalidValue, "causal=True: must be used with at least 4 keys"),
        (lambda m: m(X, X[:, :2], hide_self=True), InvalidValue, "hide_self=True: must be used with at least 4 keys"),
        (
            lambda m: m(X, gates=torch.ones(5)),
            InvalidValue,
            "gates: must be of shape [heads] = [4] or [batch, heads] = [2, 4], got [5]",
        ),
        (
            lambda m: m(X, gates=torch.ones(4).bool()),
            InvalidValue,
            "gates: must be a floating-point tensor, got torch.b",
        ),
        (lambda m: m(X, gates=[1.0] * 4), InvalidValue, "gates: must be a floating-point tensor, got list"),
        (
            lambda _: make(compatibility="scaled_dot_prodct"),
            UnknownName,
            "Did you mean 'scaled_dot_product'?",
        ),
        (lambda _: make(compatibility=3), InvalidValue, "compatibility: must be a name or a callable"),
        (lambda _: make(compatibility=Additive), InvalidValue, "compatibility: must be a name or a callable"),
        (lambda _: make(compatibility=lambda q, k, h: q)(X), InvalidValue, "= [2, 4, 4, 4], got [2, 4, 4, 3]"),
        (lambda _: make(compatibility=lambda q, k, h: 0)(X), InvalidValue, "got int"),
        (lambda _: make(13), InvalidValue, "query_size: must be a multiple of n_heads = 4, got 13. Or give head_dim."),
        (lambda _: make(12, 0), InvalidValue, "n_heads: must be at least 1, got 0"),
        (lambda _: make(n_kv_heads=3), InvalidValue, "n_kv_heads: must be a divisor of the 4 query heads, got 3"),
        (lambda _: make(dropout=1.0), InvalidValue, "dropout: must be a probability"),
        (lambda m: m.prune_heads_([0, 4]), UnknownName, "must be one of the present heads [0, 1, 2, 3], got 4"),
        (lambda m: m.prune_heads_([True, False]), InvalidValue, "keep: must be a collection of head indices, got True"),
        (lambda m: m.prune_heads_([0.0]), InvalidValue, "keep: must be a collection of head indices, got 0.0"),
        (lambda _: MultiHeadAttention.from_heads([]), InvalidValue, "heads: must be at least one triple"),
        (lambda _: MultiHeadAttention.from_heads([(X[0], X[0])]), InvalidValue, "heads[0]: must be three matrices"),
        (lambda _: MultiHeadAttention.from_heads([X[0]]), InvalidValue, "heads[0]: must be three matrices"),
        (
            lambda _: MultiHeadAttention.from_heads([(X[0], X[0], X[0]), (X[0], X[0], X[0].T)]),
            InvalidValue,
            "W_v of heads[1]: must be of shape [4, 12], torch.float64, on cpu, got [12, 4]",
        ),
        (
            lambda _: MultiHeadAttention.from_heads([(X[0], X[0, :2], X[0])]),
            InvalidValue,
            "W_k of heads[0]: must be of shape [4, 12]",
        ),
        (
            lambda _: MultiHeadAttention.from_heads([(X[0], X[0], X[0])], X[0].float()),
            InvalidValue,
            "W_o: must be of shape [4, 4], torch.float64",
        ),
    ],
)
def test_errors_say_what_to_do(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        call(make())
    assert text in str(error.value)


# ---------------------------------------------------------------- cutting a projection


class Named(nn.Linear):
    """A subclass that adds no tensors."""


@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 6), lambda: Named(4, 6, bias=False), lambda: Conv1D(6, 4)])
@pytest.mark.parametrize(("axis", "index"), [("out", [0, 5]), ("in", [1, 2, 3]), ("out", []), ("in", [])])
def test_cut_features(build: Any, axis: Any, index: list[int]) -> None:
    module = build()
    x = torch.randn(3, 4)
    if axis == "in":
        kept = torch.zeros(4)
        kept[index] = 1
        expected = module(x * kept)
        x = x[:, index]
    else:
        expected = module(x)[:, index]
    kind, before = type(module), {n: p.clone() for n, p in module.named_parameters()}
    tensors = cut_features(module, axis, index)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
    assert all(not t.requires_grad for t in tensors.values())
    assert replace_features_(module, tensors)[axis == "out"] == len(index) == feature_count(module, axis)
    assert type(module) is kind
    names = ("nx", "nf") if kind is Conv1D else ("in_features", "out_features")
    assert (getattr(module, names[0]), getattr(module, names[1])) == (
        feature_count(module, "in"),
        feature_count(module, "out"),
    )
    if kind is Conv1D and feature_count(module, "in") == 0:
        return  # Transformers' forward views its input as (-1, 0), which torch refuses; the cut itself is right
    assert_close(module(x), expected)


def test_replace_installs_parameters_as_they_are() -> None:
    one, two = nn.Linear(4, 6), nn.Linear(4, 6)
    two.weight = one.weight
    shared = {n: nn.Parameter(t) for n, t in cut_features(one, "out", [1, 2]).items()}
    for module in (one, two):
        replace_features_(module, shared)
    assert one.weight is two.weight
    with pytest.raises(InvalidValue, match="named like a parameter of Linear, got 'scale'"):
        replace_features_(one, {"scale": torch.ones(1)})


def test_cut_on_the_meta_device() -> None:
    module = nn.Linear(4, 6, device="meta", dtype=torch.bfloat16)
    replace_features_(module, cut_features(module, "out", [1, 2]))
    assert (module.weight.device.type, module.weight.dtype, module.weight.shape) == ("meta", torch.bfloat16, (2, 4))


class Adapted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 6)
        self.lora_A = nn.Parameter(torch.zeros(2, 4))


class Quantised(nn.Parameter):
    """Stands for the parameter classes of quantisation libraries."""


def _quantised() -> nn.Module:
    module = nn.Linear(4, 6)
    module.weight = Quantised(torch.zeros(6, 4))
    return module


def _integers() -> nn.Module:
    module = nn.Linear(4, 6)
    module.weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.int8), requires_grad=False)
    return module


def _masked() -> nn.Module:
    module = nn.Linear(4, 6)
    prune.identity(module, "weight")
    return module


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.Conv1d(4, 6, 1), "an nn.Linear or a Conv1D, got Conv1d"),
        (lambda: nn.Embedding(4, 6), "got Embedding"),
        (nn.Identity, "got Identity"),
        (lambda: 3, "got int"),
        (Adapted, "got Adapted with lora_A"),
        (_masked, "got Linear with weight_orig"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
            "got ParametrizedLinear with parametrizations",
        ),
        (_quantised, "plain floating-point nn.Parameter, got Quantised of torch.float32 in Linear"),
        (_integers, "got Parameter of torch.int8 in Linear"),
        (lambda: nn.LazyLinear(6), "got UninitializedParameter"),
        (lambda: nn.Linear(4, 6).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ],
)
def test_other_projections_are_refused(build: Any, text: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        cut_features(build(), "out", [0], where="layer.W_q")
    assert str(error.value).startswith("layer.W_q")
    assert text in str(error.value)


@pytest.mark.parametrize("index", [[-1], [6], [1, 1], [2, 1]])
def test_cut_positions_are_checked(index: list[int]) -> None:
    with pytest.raises(InvalidValue, match="strictly ascending positions below 6"):
        cut_features(nn.Linear(4, 6), "out", index)
    with pytest.raises(InvalidValue, match="axis: must be 'in' or 'out'"):
        cut_features(nn.Linear(4, 6), "rows", [0])  # type: ignore[arg-type]


# ---------------------------------------------------------------- the room


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, headprune.attention as a; assert 'torch' not in sys.modules; a.KVCache; assert a.KVCache"
    subprocess.run([sys.executable, "-c", code], check=True)
    import headprune.attention as room

    assert all(getattr(room, name) for name in room.__all__)
    with pytest.raises(AttributeError, match="no attribute 'MultiHead'"):
        _ = room.MultiHead


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_every_kernel_agrees(backend: SDPBackend) -> None:
    module, x = make(n_kv_heads=2), rand(2, 5, 12)
    masks: dict[str, Any] = {"valid_lens": torch.tensor([0, 3]), "hide_self": True}
    expected, _ = reference.multi_head(module, x, x, x, reference.may_see(2, 4, 5, 5, **masks))
    with sdpa_kernel(backend):
        assert_close(module(x, **masks), expected, **EXACT)


def test_parameters_that_projections_share_stay_shared() -> None:
    attention = MultiHeadAttention(8, 4)
    attention.W_k.weight = attention.W_q.weight
    attention.prune_heads_([1, 3])
    assert attention.W_k.weight is attention.W_q.weight
    assert attention.W_k.bias is not attention.W_q.bias
    assert attention.W_q.weight.shape == (4, 8)
