"""MultiHeadAttention made from other modules and turned into them, and what its errors say."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close

from headprune.attention import (
    Additive,
    MultiHeadAttention,
    cut_features,
    replace_features_,
)
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from tests.unit.test_attention import EXACT, F64, make, rand


@pytest.mark.parametrize("own", [False, True])
def test_from_heads(own):
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
    module.prune_heads_([1, 2])
    if not own:
        zeros = torch.zeros_like(parts[0])
        expected = torch.cat([zeros, parts[1], parts[2], zeros], -1)
        assert_close(module(query, key, value), expected, **EXACT)
        assert not module.W_o.weight.requires_grad
    module.prune_heads_([])
    assert_close(module(query, key, value), torch.zeros_like(expected))


def test_from_heads_copies_and_one_matrix_may_serve_thrice():
    shared, W_o, x = [rand(3, 8), rand(3, 8)], rand(4, 6), rand(1, 4, 8)
    heads = [(m, m, m) for m in shared]
    module = MultiHeadAttention.from_heads(heads, W_o, compatibility="additive")
    expected = module(x)
    expected.sum().backward()
    shared[0].zero_()
    W_o.zero_()
    assert torch.equal(module(x), expected)
    assert not torch.equal(module.W_q.weight.grad, module.W_v.weight.grad)


TORCH = [(True, True, None, F64), (False, False, 5, F64), (True, False, None, torch.float32)]


@pytest.mark.parametrize(("batch_first", "bias", "kdim", "dtype"), TORCH)
def test_from_and_to_torch(batch_first, bias, kdim, dtype):
    widths = {"kdim": kdim, "vdim": 7 if kdim else None}
    options = {"bias": bias, "batch_first": batch_first, "dtype": dtype, **widths}
    theirs = nn.MultiheadAttention(12, 4, dropout=0.25, **options).eval()
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    theirs.out_proj.weight.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    inputs = rand(2, 3, 12), rand(2, 5, kdim or 12), rand(2, 5, 7 if kdim else 12)
    inputs = tuple(x.to(dtype) if batch_first else x.to(dtype).transpose(0, 1) for x in inputs)
    lens = torch.tensor([4, 2])
    hidden = torch.arange(5) >= lens[:, None]
    expected, weights = theirs(*inputs, key_padding_mask=hidden, average_attn_weights=False)
    tolerance = EXACT if dtype is F64 else {}
    assert_close(ours(*inputs, valid_lens=lens), expected, **tolerance)
    out, shown = ours(*inputs, mask=~hidden[:, None, None], need_weights=True)
    assert_close(out, expected, **tolerance)
    assert_close(shown, weights, **tolerance)
    back = ours.to_torch()
    assert (back.dropout, back.training, back.batch_first) == (0.25, False, batch_first)
    assert list(back.state_dict()) == list(theirs.state_dict())
    for tensor, other in zip(theirs.parameters(), back.parameters(), strict=True):
        assert torch.equal(tensor, other)
        assert (tensor.requires_grad, tensor.dtype) == (other.requires_grad, other.dtype)
        assert tensor.data_ptr() != other.data_ptr()
    again = back(*inputs, key_padding_mask=hidden)[0]
    assert torch.equal(again, theirs(*inputs, key_padding_mask=hidden)[0])
    assert MultiHeadAttention.from_torch(theirs.train()).training


def test_from_torch_refuses_what_it_cannot_take_over():
    bent = nn.MultiheadAttention(12, 4)
    nn.utils.parametrizations.orthogonal(bent, "in_proj_weight")
    refused = {
        "add_bias_kv": nn.MultiheadAttention(12, 4, add_bias_kv=True),
        "add_zero_attn": nn.MultiheadAttention(12, 4, add_zero_attn=True),
        "got Linear": nn.Linear(2, 2),
        r"parametrizations\.in_proj_weight": bent,
    }
    for words, module in refused.items():
        with pytest.raises(UnsupportedModel, match=words):
            MultiHeadAttention.from_torch(module)


def test_to_torch_refuses_in_words():
    frozen, empty = make(), make()
    frozen.W_k.weight.requires_grad_(False)
    empty.prune_heads_([])
    for module, text in (
        (make(n_kv_heads=2), "one key/value head per query head, got 2 of them"),
        (make(head_dim=2), "fill the query width 12, got 4 heads of head_dim 2"),
        (make(output_size=5), "as wide as the query, 12, got 5"),
        (make(compatibility="additive"), "scaled dot product"),
        (make(output_bias=False), "biases on all of"),
        (frozen, "all frozen or none"),
        (empty, "no head"),
    ):
        with pytest.raises(UnsupportedModel, match=text):
            module.to_torch()


X = torch.zeros(2, 4, 12, dtype=F64)
M = X[0]
of_heads = MultiHeadAttention.from_heads


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: m(M), "query: must be of shape [batch, length, 12], got [4, 12]"),
        (lambda m: m(X, X[:1]), "key: must be of query's batch size 2, got 1"),
        (lambda m: m(X, X[..., :5]), "key: must be of shape [batch, length, 12], got [2, 4, 5]"),
        (lambda m: m(X, X, X[:, :2]), "value: must be as long as key, [2, 4], got [2, 2]"),
        (lambda m: m(X, mask=X), "mask: must be a boolean tensor, got torch.float64"),
        (lambda m: m(X, mask=torch.ones(2, 3).bool()), "= [2, 4, 4, 4], got [2, 3]"),
        (lambda m: m(X, valid_lens=torch.ones(3).long()), "or [batch, queries] = [2, 4], got [3]"),
        (lambda m: m(X, valid_lens=torch.tensor([-1, 5])), "the number of keys 4, got -1 to 5"),
        (lambda m: m(X, valid_lens=torch.ones(2)), "a tensor of integers, got torch.float32"),
        (lambda m: m(X, X[:, :2], hide_self=True), "hide_self=True: must be used with at least 4"),
        (lambda m: m(X, gates=torch.ones(4).bool()), "gates: must be a floating-point tensor"),
        (lambda _: make(12, 0), "n_heads: must be at least 1, got 0"),
        (lambda m: m(X, X[:, :2], causal=True), "causal=True: must be used with at least 4 keys"),
        (lambda m: m(X, gates=torch.ones(5)), "[heads] = [4] or [batch, heads] = [2, 4], got [5]"),
        (lambda _: make(compatibility="scaled_dot_prodct"), "Did you mean 'scaled_dot_product'?"),
        (lambda _: make(compatibility=Additive), "compatibility: must be a name or a callable"),
        (lambda _: make(compatibility=lambda q, k, h: q)(X), "= [2, 4, 4, 4], got [2, 4, 4, 3]"),
        (lambda _: make(13), "query_size: must be a multiple of n_heads = 4, got 13"),
        (lambda _: make(n_kv_heads=3), "n_kv_heads: must be a divisor of the 4 query heads, got 3"),
        (lambda _: make(dropout=1.0), "dropout: must be a probability"),
        (lambda m: m.prune_heads_([0, 4]), "one of the present heads [0, 1, 2, 3], got 4"),
        (lambda m: m.prune_heads_([True]), "keep: must be a collection of head indices, got True"),
        (lambda _: of_heads([]), "heads: must be at least one triple"),
        (lambda _: of_heads([(M, M)]), "heads[0]: must be three matrices"),
        (lambda _: of_heads([(M, M, M), (M, M, M.T)]), "W_v of heads[1]: must be of shape [4, 12]"),
        (lambda _: of_heads([(M, M, M)], M.float()), "W_o: must be of shape [4, 4], torch.float64"),
    ],
)
def test_errors_say_what_to_do(call, text):
    with pytest.raises((InvalidValue, UnknownName)) as error:
        call(make())
    assert text in str(error.value)


def test_what_no_cut_can_be_is_refused():
    module = nn.Linear(4, 6)
    with pytest.raises(InvalidValue, match="named like a parameter of Linear, got 'scale'"):
        replace_features_(module, {"scale": torch.ones(1)})
    for index in ([-1], [6], [1, 1], [2, 1]):
        with pytest.raises(InvalidValue, match="strictly ascending positions below 6"):
            cut_features(module, "out", index)
    with pytest.raises(InvalidValue, match="axis: must be 'in' or 'out'"):
        cut_features(module, "rows", [0])


class Quantised(nn.Parameter):
    """Stands for the parameter classes of quantisation libraries."""


def linear_of(weight):
    module = nn.Linear(4, 6)
    module.weight = weight
    return module


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.Conv1d(4, 6, 1), "an nn.Linear or a Conv1D, got Conv1d"),
        (lambda: prune.identity(nn.Linear(4, 6), "weight"), "got Linear with weight_orig"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), "with parametrizations"),
        (lambda: linear_of(Quantised(torch.zeros(6, 4))), "got Quantised of torch.float32 in Lin"),
        (lambda: linear_of(nn.Parameter(torch.zeros(6, 4).char(), False)), "of torch.int8"),
        (lambda: nn.Linear(4, 6).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ],
)
def test_other_projections_are_refused(build, text):
    with pytest.raises(UnsupportedModel) as error:
        cut_features(build(), "out", [0], where="layer.W_q")
    assert str(error.value).startswith("layer.W_q")
    assert text in str(error.value)
