"""torch.nn.MultiheadAttention: the exposed attention is PyTorch's; the native paths are left for a
gate or a cut."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.core.mixin import mix_in
from headprune.layouts._tiny_torch_multi_head import EncoderLayers, Mixed
from headprune.layouts.torch_multi_head import LAYOUT, Exposed
from headprune.model.sites import reason_against
from tests.laws.support import CLOSE, shaken

FORMS: dict[str, dict[str, Any]] = {
    "fused": {},
    "batch first": {"batch_first": True},
    "without biases": {"bias": False, "batch_first": True},
    "separate": {"kdim": 6, "vdim": 5},
    "added keys": {"add_bias_kv": True, "batch_first": True},
    "a key of zeros": {"add_zero_attn": True},
    "both": {"add_zero_attn": True, "add_bias_kv": True, "kdim": 6, "vdim": 5, "bias": False},
}
LATER = torch.ones(4, 5, dtype=torch.bool).triu(2)
PADDED = torch.tensor([[False] * 5, [False, False, True, True, True]])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no weights": {"need_weights": False},
    "weights a head": {"average_attn_weights": False},
    "mask": {"attn_mask": LATER},
    "mask, no weights": {"attn_mask": LATER, "need_weights": False},
    "added mask": {"attn_mask": torch.randn(4, 5, dtype=torch.float64)},
    "mask a head": {"attn_mask": torch.randn(8, 4, 5, dtype=torch.float64), "need_weights": False},
    "padding": {"key_padding_mask": PADDED},
    "both": {"key_padding_mask": PADDED, "attn_mask": LATER, "need_weights": False},
    "causal": {"attn_mask": LATER, "is_causal": True, "need_weights": False},
    "causal, weights": {"attn_mask": LATER, "is_causal": True},
    "causal, padding": {
        "attn_mask": LATER,
        "is_causal": True,
        "key_padding_mask": PADDED,
        "need_weights": False,
    },
}


def attention(**options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(12, 4, **options)
    shaken(module)
    return module.double().eval()


def inputs(module: nn.MultiheadAttention, batched: bool = True) -> list[Tensor]:
    made = [torch.randn(2, n, w).double() for n, w in ((4, 12), (5, module.kdim), (5, module.vdim))]
    if not batched:
        return [x[0] for x in made]
    return made if module.batch_first else [x.transpose(0, 1) for x in made]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_exposed_is_the_same_attention(options: dict[str, Any], call: dict[str, Any]) -> None:
    module = attention(**options)
    given = inputs(module)
    expected = module(*given, **call)
    assert mix_in(module, Exposed)
    got = module(*given, **call)
    assert_close(got[0], expected[0], equal_nan=True, **CLOSE)
    assert_close(got[1], expected[1], equal_nan=True, **CLOSE) if expected[1] is not None else None
    assert (got[1] is None) == (expected[1] is None)
    seen: list[Tensor] = []
    handle = module.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module(*given, **call)
    handle.remove()
    assert [tuple(x.shape) for x in seen] == [(2, 4, 12)]


@pytest.mark.parametrize("need_weights", [True, False])
def test_exposed_without_a_batch(need_weights: bool) -> None:
    module = attention(batch_first=True)
    given = inputs(module, batched=False)
    call = {
        "key_padding_mask": PADDED[1],
        "attn_mask": torch.randn(4, 4, 5).double(),
        "need_weights": need_weights,
    }
    expected = module(*given, **call)
    mix_in(module, Exposed)
    assert_close(module(*given, **call), expected, **CLOSE)


def test_the_causal_hint_needs_its_mask() -> None:
    module = attention()
    mix_in(module, Exposed)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        module(*inputs(module), is_causal=True)


def test_a_mask_for_each_head_may_be_for_the_original_heads() -> None:
    model = nn.ModuleDict({"a": attention(batch_first=True)})
    small, given = copy.deepcopy(model), inputs(model["a"])
    mask = torch.randn(8, 4, 5).double()
    plan = hp.HeadMask.from_keep({"a": [1, 3]}, {"a": 4})
    with hp.gated(model, plan):
        expected = model["a"](*given, attn_mask=mask, need_weights=False)[0]
    hp.prune_(small, plan)
    assert_close(small["a"](*given, attn_mask=mask, need_weights=False)[0], expected, **CLOSE)
    present = mask.unflatten(0, (2, 4))[:, [1, 3]].flatten(0, 1)
    assert_close(small["a"](*given, attn_mask=present, need_weights=False)[0], expected, **CLOSE)
    with pytest.raises(RuntimeError, match="2 present or 4 original heads"):
        small["a"](*given, attn_mask=mask[:6], need_weights=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "gone", [{0: [1]}, {0: [0], 2: [3]}, {1: [0, 1, 2, 3]}, {2: [0, 1, 2]}], ids=str
)
def test_native_layers_on_nested_tensors(
    gone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    native: list[bool] = []
    operation = torch._transformer_encoder_layer_fwd

    def counted(src: Tensor, *args: Any) -> Tensor:
        native.append(src.is_nested)
        return operation(src, *args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    model, batch = shaken(EncoderLayers(nested=True)).double().eval(), EncoderLayers.tiny()[1]
    batch["x"] = batch["x"].double()
    plan = hp.HeadMask.from_keep(
        {f"encoder.layers.{i}.self_attn": set(range(4)) - set(heads) for i, heads in gone.items()},
        {f"encoder.layers.{i}.self_attn": 4 for i in range(3)},
    )
    slow = model(**batch)
    with torch.no_grad():
        full = model(**batch)
        assert native == [True] * 3, "PyTorch takes its native operation"
        kept = ~batch["padding"]
        assert_close(full[kept], slow[kept], **CLOSE)
        native.clear()
        with hp.gated(model, plan):
            expected = model(**batch)
        assert not native, "a gate on every layer takes all off the native operation"
        with hp.gated(model, {f"encoder.layers.{i}.self_attn": torch.ones(4) for i in gone}):
            assert_close(model(**batch), full, **CLOSE)
        assert native == [True] * (3 - len(gone)), "the others stay on it"
        small = copy.deepcopy(model)
        hp.prune_(small, plan)
        native.clear()
        assert_close(small(**batch), expected, **CLOSE)
        assert native == [True] * (3 - len(gone))
        assert (expected - full).abs().max() > 1e-6
        assert_close(pickle.loads(pickle.dumps(small))(**batch), expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_attend_to_themselves_alone() -> None:
    module = attention(batch_first=True)
    hp.prune_(module, hp.HeadMask.from_keep({"": [0, 2]}, {"": 4}))
    x = torch.nested.nested_tensor(
        [torch.randn(3, 12, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)]
    )
    other = torch.nested.nested_tensor([t.clone() for t in x.unbind()])
    for arguments, more in (
        ((x, other, x), {}),
        ((x, x, other), {}),
        ((x, x, x), {"attn_mask": torch.ones(5, 5)}),
    ):
        with pytest.raises(
            RuntimeError, match="A nested tensor attends to itself and without masks"
        ):
            module(*arguments, **more)
    for example, whole in zip(
        module(x, x, x, need_weights=False)[0].unbind(), x.unbind(), strict=True
    ):
        assert_close(example, module(*[whole[None]] * 3, need_weights=False)[0][0], **CLOSE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_gate_gradients_through_nested_tensors() -> None:
    model, batch = shaken(EncoderLayers(nested=True)).double().eval(), EncoderLayers.tiny()[1]
    batch["x"] = batch["x"].double()
    kept = ~batch["padding"]
    found = []
    for frozen in (False, True):  # frozen weights let the encoder make nested tensors
        model.requires_grad_(not frozen)
        gates = {
            f"encoder.layers.{i}.self_attn": torch.ones(4).double().requires_grad_()
            for i in range(3)
        }
        with hp.gated(model, gates):
            out = model(**batch)
        found.append(torch.autograd.grad((out[kept] ** 2).sum(), list(gates.values())))
    assert_close(found[1], found[0], **CLOSE)


def test_kinds() -> None:
    kinds = {
        s.name: s.kind
        for s in hp.find_sites(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2), 1))
    }
    assert kinds == {"layers.0.self_attn": "self", "layers.0.multihead_attn": "cross"}
    assert {s.name: s.kind for s in hp.find_sites(Mixed())}["cross"] == "cross"


def test_callers_find_the_width_they_expect() -> None:
    model = nn.TransformerEncoderLayer(12, 4, 8, batch_first=True).eval()
    hp.prune_(model, hp.HeadMask.from_keep({"self_attn": [2]}, {"self_attn": 4}))
    inner = model.self_attn
    assert (inner.embed_dim, inner.num_heads, inner.head_dim, inner.in_proj_weight.shape) == (
        12,
        1,
        3,
        (9, 12),
    )
    assert isinstance(inner, nn.MultiheadAttention)
    with torch.no_grad():
        assert model(torch.randn(2, 3, 12)).shape == (2, 3, 12)


class RotatedAttention(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(query.roll(1, 1), *args, **kwargs)


def test_another_forward_is_refused() -> None:
    reason = reason_against(LAYOUT, RotatedAttention(8, 2))
    assert reason is not None
    assert "that of torch.nn.MultiheadAttention" in reason
    wrapped = nn.MultiheadAttention(8, 2)
    wrapped.forward = wrapped.forward  # type: ignore[method-assign]
    assert reason_against(LAYOUT, wrapped) is None, (
        "its class's own, as accelerate's hooks leave it behind"
    )
    wrapped.forward = lambda *args: type(wrapped).forward(wrapped, *args)  # type: ignore[method-assign]
    assert reason_against(LAYOUT, wrapped) is not None
    with pytest.raises(
        UnsupportedModel, match=r"must be that of torch\.nn\.MultiheadAttention, got another"
    ):
        hp.find_sites(nn.ModuleDict({"attention": RotatedAttention(8, 2)}))


def test_costs_count_the_fused_projection() -> None:
    model, batch = EncoderLayers(), EncoderLayers.tiny()[1]
    sites = hp.find_sites(model)
    scores = hp.score(model.eval(), [batch], "magnitude")
    head = scores.costs.units[0][0]
    assert head.macs_per_token == 4 * 4 * 16
    assert head.params == 4 * 4 * 16 + 3 * 4
    layers = 3 * (4 * 16 * 16 + 2 * 16 * 24)
    assert scores.costs.total.macs_per_token == 16 * 16 + 16 * 3 + layers
    assert len(sites) == 3
