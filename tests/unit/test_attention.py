"""headprune.attention against a literal transcription of the formula, and against PyTorch's own
module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from headprune.attention import KVCache, MultiHeadAttention, ScaledDotProduct
from headprune.attention import attend as attend_module
from tests.reference import attention as reference

EXACT = {"rtol": 1e-12, "atol": 1e-12}
F64 = torch.float64


def make(query_size: int = 12, n_heads: int = 4, **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(
        query_size, n_heads, dtype=options.pop("dtype", F64), **options
    ).eval()


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
    "separate-widths": {"key_size": 7, "value_size": 9, "output_size": 5, "head_dim": 2},
    "all": {"n_kv_heads": 2, "key_size": 7, "value_size": 9, "output_size": 5, "value_dim": 2},
}
KEYS = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]]).bool()
ANY = torch.rand(2, 4, 4, 4, generator=torch.Generator().manual_seed(1)) > 0.4
MASKS = {
    "none": {},
    "lens": {"valid_lens": torch.tensor([3, 1])},
    "lens-per-query": {"valid_lens": torch.tensor([[1, 2, 3, 0], [4, 4, 1, 2]])},
    "mask-2d": {"mask": KEYS.repeat(2, 1)},
    "mask-keys": {"mask": KEYS[:, None, None, :]},
    "mask-queries": {"mask": KEYS[:, None, :, None]},
    "mask-heads": {"mask": ANY},
    "causal": {"causal": True},
    "hide-self": {"hide_self": True},
    "everything": {
        "valid_lens": torch.tensor([3, 0]),
        "mask": ANY[:1, :, :, :1],
        "causal": True,
        "hide_self": True,
    },
}


#: Every shape with every kind of mask at once, and every mask with the plainest and the oddest shape.
CASES = [(shape, "everything") for shape in SHAPES]
CASES += [(shape, mask) for mask in list(MASKS)[:-1] for shape in ("plain", "all")]


def quarter(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return 0.25 * torch.dot(query, key)


@pytest.mark.parametrize("compatibility", ["scaled_dot_product", "additive", "own scale"])
@pytest.mark.parametrize(("shape", "mask"), CASES, ids="-".join)
@torch.no_grad()
def test_equals_the_literal_loop(
    shape: str, mask: str, compatibility: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = compatibility != "additive"
    own = ScaledDotProduct(0.25) if compatibility == "own scale" else compatibility
    module, masks = make(**SHAPES[shape], compatibility=own), MASKS[mask]
    query, key, value = (rand(2, 4, p.in_features) for p in (module.W_q, module.W_k, module.W_v))
    fit = reference.scaled_dot_product
    if compatibility == "additive":
        fit = reference.additive(module.compatibility.weight)
    elif compatibility == "own scale":
        fit = quarter
    allowed = reference.may_see(2, 4, 4, 4, **masks)
    expected, expected_weights = reference.multi_head(module, query, key, value, allowed, fit)
    calls = spy_on_sdpa(monkeypatch)
    assert_close(module(query, key, value, **masks), expected, **EXACT)
    out, weights = module(query, key, value, need_weights=True, **masks)
    assert len(calls) == fast, "one fast pass, and none where the weights are asked for"
    assert_close(out, expected, **EXACT)
    assert_close(weights, expected_weights, **EXACT)


@pytest.mark.parametrize("masks", [{"causal": True}, {"hide_self": True}])
def test_more_keys_than_queries_puts_the_queries_last(masks: dict[str, bool]) -> None:
    module, query, key = make(n_kv_heads=2), rand(2, 3, 12), rand(2, 5, 12)
    allowed = reference.may_see(2, 4, 3, 5, **masks)
    expected, _ = reference.multi_head(module, query, key, key, allowed)
    assert_close(module(query, key, **masks), expected, **EXACT)
    assert_close(module(query, key, need_weights=True, **masks)[0], expected, **EXACT)


def test_sequence_first_is_a_transposition() -> None:
    module = make(n_kv_heads=2, output_size=5)
    other = make(n_kv_heads=2, output_size=5, batch_first=False)
    other.load_state_dict(module.state_dict())
    query, key = rand(2, 3, 12), rand(2, 5, 12)
    seen: list[torch.Size] = []
    other.W_o.register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape))
    lens = torch.tensor([4, 2])
    options: dict[str, Any] = {"valid_lens": lens, "gates": rand(2, 4), "need_weights": True}
    out, weights = module(query, key, **options)
    other_out, other_weights = other(query.transpose(0, 1), key.transpose(0, 1), **options)
    assert_close(other_out, out.transpose(0, 1), **EXACT)
    assert_close(other_weights, weights, **EXACT)
    assert seen == [torch.Size([2, 3, 12])]  # gates from outside rely on a batch-first input of W_o


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("need_weights", [False, True], ids=["fast", "weights"])
@pytest.mark.parametrize(("dtype", "n_kv_heads"), [(torch.float32, 4), (torch.float64, 1)])
def test_a_query_without_keys_gets_zeros_and_finite_gradients(
    need_weights: bool, dtype: torch.dtype, n_kv_heads: int
) -> None:
    module = make(dtype=dtype, n_kv_heads=n_kv_heads)
    x, lens = rand(3, 4, 12, dtype=dtype).requires_grad_(), torch.tensor([0, 2, 4])
    gates, nothing = torch.ones(4, dtype=dtype, requires_grad=True), x[:, :0]
    out = module(x, valid_lens=lens, gates=gates, need_weights=need_weights)
    none = module(x, nothing, need_weights=need_weights)
    if need_weights:
        (out, weights), (none, no_weights) = out, none
        assert (weights[0] == 0).all()
        assert no_weights.shape == (3, 4, 4, 0)
    assert_close(out[0], module.W_o.bias.expand(4, 12))
    assert_close(none, module.W_o.bias.expand(3, 4, 12))
    out.square().sum().backward()
    for tensor in (x, gates, *module.parameters()):
        assert torch.isfinite(tensor.grad).all()
    assert (x.grad[0] == 0).all()
    assert (x.grad[1] != 0).any()


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


# ---------------------------------------------------------------- gates


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_gates_of_one_change_no_bit_and_carry_their_gradient(shape: tuple[int, ...]) -> None:
    module, x = make(dtype=torch.bfloat16), rand(2, 3, 12, dtype=torch.bfloat16)
    gates = torch.ones(shape, requires_grad=True)
    out = module(x, gates=gates)
    assert torch.equal(out, module(x))
    out.square().sum().backward()
    assert (gates.grad != 0).all()


@pytest.mark.parametrize("per_example", [False, True])
def test_gates_equal_the_loop_and_finite_differences(per_example: bool) -> None:
    module, x = make(n_kv_heads=2, value_dim=5), rand(2, 3, 12)
    gates = rand(2, 4) if per_example else rand(4)
    allowed = reference.may_see(2, 4, 3, 3)
    expected, _ = reference.multi_head(module, x, x, x, allowed, gates=gates.expand(2, 4))
    assert_close(module(x, gates=gates), expected, **EXACT)
    for at in (gates, torch.ones_like(gates)):
        assert torch.autograd.gradcheck(lambda g: module(x, gates=g), at.requires_grad_())
    if not per_example:  # as gates from outside do
        hook = lambda _m, args: (args[0] * gates.repeat_interleave(5),)  # noqa: E731
        module.W_o.register_forward_pre_hook(hook)
        assert_close(module(x), expected, **EXACT)


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_acts_in_training_only(need_weights: bool) -> None:
    module, plain, x = make(dropout=0.5), make(dropout=0.0), rand(2, 6, 12)
    plain.load_state_dict(module.state_dict())

    def run(m: MultiHeadAttention) -> torch.Tensor:
        out = m(x, need_weights=need_weights)
        if need_weights:
            out, weights = out
            assert_close(weights.sum(-1), torch.ones(2, 4, 6, dtype=F64))  # before dropout
        return out

    expected = run(plain)
    assert_close(run(module), expected, **EXACT)
    module.train()
    with torch.no_grad():
        assert not torch.allclose(run(module), run(module))
        mean = torch.stack([run(module) for _ in range(400)]).mean(0)
    assert_close(mean, expected, rtol=0, atol=0.2)  # of 400 draws, each of spread about 1
