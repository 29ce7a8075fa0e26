"""headprune.attention against a literal transcription of the formula; without some of its heads,
and with a cache of keys and values."""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from headprune.attention import KVCache, MultiHeadAttention, ScaledDotProduct
from headprune.attention import attend as attend_module
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from tests.reference import attention as reference

EXACT = {"rtol": 1e-12, "atol": 1e-12}
F64 = torch.float64


def make(query_size=12, n_heads=4, **options):
    return MultiHeadAttention(
        query_size, n_heads, dtype=options.pop("dtype", F64), **options
    ).eval()


def rand(*shape, dtype=F64):
    return torch.randn(*shape, dtype=dtype)


def spy_on_sdpa(monkeypatch):
    spy = Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(attend_module.F, "scaled_dot_product_attention", spy)
    return spy


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


def quarter(query, key):
    return 0.25 * torch.dot(query, key)


@pytest.mark.parametrize("compatibility", ["scaled_dot_product", "additive", "own scale"])
@pytest.mark.parametrize(("shape", "mask"), CASES, ids="-".join)
@torch.no_grad()
def test_equals_the_literal_loop(shape, mask, compatibility, monkeypatch):
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
    spy = spy_on_sdpa(monkeypatch)
    assert_close(module(query, key, value, **masks), expected, **EXACT)
    out, weights = module(query, key, value, need_weights=True, **masks)
    assert spy.call_count == fast, "one fast pass, and none where the weights are asked for"
    assert_close(out, expected, **EXACT)
    assert_close(weights, expected_weights, **EXACT)


@pytest.mark.parametrize("masks", [{"causal": True}, {"hide_self": True}])
def test_more_keys_than_queries_puts_the_queries_last(masks):
    module, query, key = make(n_kv_heads=2), rand(2, 3, 12), rand(2, 5, 12)
    allowed = reference.may_see(2, 4, 3, 5, **masks)
    expected, _ = reference.multi_head(module, query, key, key, allowed)
    assert_close(module(query, key, **masks), expected, **EXACT)
    assert_close(module(query, key, need_weights=True, **masks)[0], expected, **EXACT)


def test_sequence_first_is_a_transposition():
    module = make(n_kv_heads=2, output_size=5)
    other = make(n_kv_heads=2, output_size=5, batch_first=False)
    other.load_state_dict(module.state_dict())
    query, key = rand(2, 3, 12), rand(2, 5, 12)
    seen = []
    other.W_o.register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape))
    lens = torch.tensor([4, 2])
    options = {"valid_lens": lens, "gates": rand(2, 4), "need_weights": True}
    out, weights = module(query, key, **options)
    other_out, other_weights = other(query.transpose(0, 1), key.transpose(0, 1), **options)
    assert_close(other_out, out.transpose(0, 1), **EXACT)
    assert_close(other_weights, weights, **EXACT)
    assert seen == [torch.Size([2, 3, 12])]  # gates from outside rely on a batch-first input of W_o


@pytest.mark.parametrize("need_weights", [False, True], ids=["fast", "weights"])
@pytest.mark.parametrize(("dtype", "n_kv_heads"), [(torch.float32, 4), (torch.float64, 1)])
def test_a_query_without_keys_gets_zeros_and_finite_gradients(need_weights, dtype, n_kv_heads):
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


def test_the_kernels_get_no_mask_where_none_is_needed(monkeypatch):
    spy = spy_on_sdpa(monkeypatch)
    module, x = make(n_kv_heads=2), rand(2, 4, 12)
    module(x)
    module(x, causal=True)
    module(x[:, -1:], x, causal=True)
    module(x, hide_self=True)
    calls = [call.kwargs for call in spy.call_args_list]
    assert [(c["attn_mask"] is None, c["is_causal"], c["enable_gqa"]) for c in calls] == [
        (True, False, True),
        (True, True, True),
        (True, False, True),
        (False, False, False),
    ]


def test_a_callable_sees_original_heads_and_positions():
    seen = []
    slopes = torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=F64)

    def fit(query, key, heads):
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


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_gates_of_one_change_no_bit_and_carry_their_gradient(shape):
    module, x = make(dtype=torch.bfloat16), rand(2, 3, 12, dtype=torch.bfloat16)
    gates = torch.ones(shape, requires_grad=True)
    out = module(x, gates=gates)
    assert torch.equal(out, module(x))
    out.square().sum().backward()
    assert (gates.grad != 0).all()


@pytest.mark.parametrize("per_example", [False, True])
def test_gates_equal_the_loop_and_finite_differences(per_example):
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


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_acts_in_training_only(need_weights):
    module, plain, x = make(dropout=0.5), make(dropout=0.0), rand(2, 6, 12)
    plain.load_state_dict(module.state_dict())

    def run(m):
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
def test_pruned_equals_gated_to_zero(shape, keep):
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
def test_without_heads_nothing_is_computed(bias, batch_first):
    module, x = make(bias=bias, batch_first=batch_first, output_size=5), rand(2, 3, 12)
    module.prune_heads_([])
    assert (module.n_heads, module.n_kv_heads, module.heads) == (0, 0, ())
    called = []
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


def test_prune_twice_equals_prune_once_and_nothing_changes_nothing():
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


def test_a_refused_prune_changes_nothing():
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


def test_parameters_that_projections_share_stay_shared():
    attention = MultiHeadAttention(8, 4)
    attention.W_k.weight = attention.W_q.weight
    attention.prune_heads_([1, 3])
    assert attention.W_k.weight is attention.W_q.weight
    assert attention.W_k.bias is not attention.W_q.bias
    assert attention.W_q.weight.shape == (4, 8)


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
def test_the_cache_equals_the_full_pass(shape, keep, steps, padded):
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


def test_the_cache_refuses_what_does_not_go_on():
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
