"""MultiHeadAttention made from other modules and turned into them, and what its errors say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from headprune.attention import (
    Additive,
    MultiHeadAttention,
    ScaledDotProduct,
)
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from tests.unit.test_attention import EXACT, F64, make, rand

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
        expected = torch.cat(
            [p if i in (1, 2) else torch.zeros_like(p) for i, p in enumerate(parts)], -1
        )
        assert_close(module(query, key, value), expected, **EXACT)
        assert not module.W_o.weight.requires_grad
    module.prune_heads_([])
    assert_close(module(query, key, value), torch.zeros_like(expected))


def test_from_heads_copies_and_one_matrix_may_serve_thrice() -> None:
    shared = [rand(3, 8), rand(3, 8)]
    W_o = rand(4, 6)
    module = MultiHeadAttention.from_heads(
        [(m, m, m) for m in shared], W_o, compatibility="additive"
    )
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
def test_from_and_to_torch(
    batch_first: bool, bias: bool, kdim: int | None, dtype: torch.dtype
) -> None:
    options = {
        "bias": bias,
        "batch_first": batch_first,
        "kdim": kdim,
        "vdim": 7 if kdim else None,
        "dtype": dtype,
    }
    theirs = nn.MultiheadAttention(12, 4, dropout=0.25, **options).eval()
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    theirs.out_proj.weight.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    query, key, value = rand(2, 3, 12), rand(2, 5, kdim or 12), rand(2, 5, 7 if kdim else 12)
    query, key, value = (
        x.to(dtype) if batch_first else x.to(dtype).transpose(0, 1) for x in (query, key, value)
    )
    lens = torch.tensor([4, 2])
    hidden = torch.arange(5) >= lens[:, None]
    expected, weights = theirs(
        query, key, value, key_padding_mask=hidden, average_attn_weights=False
    )
    tolerance = EXACT if dtype is F64 else {}
    assert_close(ours(query, key, value, valid_lens=lens), expected, **tolerance)
    out, shown = ours(query, key, value, mask=~hidden[:, None, None], need_weights=True)
    assert_close(out, expected, **tolerance)
    assert_close(shown, weights, **tolerance)
    back = ours.to_torch()
    assert (back.dropout, back.training, back.batch_first) == (0.25, False, batch_first)
    assert list(back.state_dict()) == list(theirs.state_dict())
    for (name, tensor), (_, other) in zip(
        theirs.named_parameters(), back.named_parameters(), strict=True
    ):
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
        (lambda: make(n_kv_heads=2), "one key/value head per query head, got 2 of them"),
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
        (
            lambda m: m(X[0]),
            InvalidValue,
            "query: must be of shape [batch, length, 12], got [4, 12]",
        ),
        (
            lambda m: m(X, X[..., :5]),
            InvalidValue,
            "key: must be of shape [batch, length, 12], got [2, 4, 5]",
        ),
        (
            lambda m: m(X, X, X[:, :2]),
            InvalidValue,
            "value: must be as long as key, [2, 4], got [2, 2]",
        ),
        (lambda m: m(X, X[:1]), InvalidValue, "key: must be of query's batch size 2, got 1"),
        (
            lambda m: m(X, mask=X),
            InvalidValue,
            "mask: must be a boolean tensor, got torch.float64. True may be seen",
        ),
        (
            lambda m: m(X, mask=torch.ones(2, 3).bool()),
            InvalidValue,
            (
                "mask: must be broadcastable to [batch, heads, queries, keys] = [2, 4, 4, 4], got"
                " [2, 3]"
            ),
        ),
        (
            lambda m: m(X, mask=torch.ones(1, 1, 1, 4, 4).bool()),
            InvalidValue,
            "got [1, 1, 1, 4, 4]",
        ),
        (
            lambda m: m(X, valid_lens=[1, 2]),
            InvalidValue,
            "valid_lens: must be a tensor of integers, got list",
        ),
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
        (
            lambda m: m(X, X[:, :2], causal=True),
            InvalidValue,
            "causal=True: must be used with at least 4 keys",
        ),
        (
            lambda m: m(X, X[:, :2], hide_self=True),
            InvalidValue,
            "hide_self=True: must be used with at least 4 keys",
        ),
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
        (
            lambda m: m(X, gates=[1.0] * 4),
            InvalidValue,
            "gates: must be a floating-point tensor, got list",
        ),
        (
            lambda _: make(compatibility="scaled_dot_prodct"),
            UnknownName,
            "Did you mean 'scaled_dot_product'?",
        ),
        (
            lambda _: make(compatibility=3),
            InvalidValue,
            "compatibility: must be a name or a callable",
        ),
        (
            lambda _: make(compatibility=Additive),
            InvalidValue,
            "compatibility: must be a name or a callable",
        ),
        (
            lambda _: make(compatibility=lambda q, k, h: q)(X),
            InvalidValue,
            "= [2, 4, 4, 4], got [2, 4, 4, 3]",
        ),
        (lambda _: make(compatibility=lambda q, k, h: 0)(X), InvalidValue, "got int"),
        (
            lambda _: make(13),
            InvalidValue,
            "query_size: must be a multiple of n_heads = 4, got 13. Or give head_dim.",
        ),
        (lambda _: make(12, 0), InvalidValue, "n_heads: must be at least 1, got 0"),
        (
            lambda _: make(n_kv_heads=3),
            InvalidValue,
            "n_kv_heads: must be a divisor of the 4 query heads, got 3",
        ),
        (lambda _: make(dropout=1.0), InvalidValue, "dropout: must be a probability"),
        (
            lambda m: m.prune_heads_([0, 4]),
            UnknownName,
            "must be one of the present heads [0, 1, 2, 3], got 4",
        ),
        (
            lambda m: m.prune_heads_([True, False]),
            InvalidValue,
            "keep: must be a collection of head indices, got True",
        ),
        (
            lambda m: m.prune_heads_([0.0]),
            InvalidValue,
            "keep: must be a collection of head indices, got 0.0",
        ),
        (
            lambda _: MultiHeadAttention.from_heads([]),
            InvalidValue,
            "heads: must be at least one triple",
        ),
        (
            lambda _: MultiHeadAttention.from_heads([(X[0], X[0])]),
            InvalidValue,
            "heads[0]: must be three matrices",
        ),
        (
            lambda _: MultiHeadAttention.from_heads([X[0]]),
            InvalidValue,
            "heads[0]: must be three matrices",
        ),
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
