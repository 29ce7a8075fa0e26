"""Quantised projections are refused with an error before anything changes; gates work on them."""

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts import registry
from tests.laws.support import ragged, unchanged


class Int8Parameter(nn.Parameter):
    """A weight in int8 with a scale a row, in the way of bitsandbytes: a parameter of its own
    type."""

    def __new__(cls, weight):
        return torch.Tensor._make_subclass(cls, weight.to(torch.int8), False)


class Linear8bit(nn.Linear):
    def __init__(self, full):
        super().__init__(full.in_features, full.out_features, bias=full.bias is not None)
        scale = full.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = Int8Parameter((full.weight.detach() / scale).round())
        self.scale = scale
        self.bias = full.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class HiddenScale(nn.Linear):
    """A weight of plain floats that something else multiplies: cutting the weight alone would be
    wrong."""

    def __init__(self, full):
        super().__init__(full.in_features, full.out_features)
        self.register_buffer("scale", torch.ones(full.out_features, 1))


def tiny(layout):
    model, batch = registry.get(layout).tiny(0)
    return model.eval(), batch


def replaced(model, kind):
    sites = tuple(f"{s.name}." for s in hp.find_sites(model))
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.startswith(sites):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, kind(module))
    return model


def by_torchao(model):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def in_one_place(model):
    last = model.model.layers[-1].self_attn
    last.o_proj = Linear8bit(last.o_proj)
    return model


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        ("bert", lambda model: replaced(model, Linear8bit), "quantised"),
        ("vit", lambda model: replaced(model, HiddenScale), "quantised"),
        ("llama", in_one_place, r"layers\.\d\.self_attn\.o_proj.*Int8Parameter"),
        ("bert", by_torchao, "quantised"),
    ],
    ids=["8 bits", "hidden scale", "one layer", "torchao"],
)
def test_quantised_projections_are_refused_before_anything_changes(layout, change, words):
    model, batch = tiny(layout)
    sites = hp.find_sites(model)
    model = change(model)
    outputs = model(**batch).logits
    with unchanged(model), pytest.raises(UnsupportedModel, match=words):
        hp.prune_(model, ragged(sites), sites=sites)
    assert torch.equal(model(**batch).logits, outputs)


@pytest.mark.filterwarnings("ignore")  # PyTorch announces the end of this module
def test_dynamically_quantised_linear_layers_are_refused():
    model, _ = tiny("bert")
    sites = hp.find_sites(model)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModel):
        hp.prune_(quantised, ragged(sites), sites=sites)
    with pytest.raises(UnsupportedModel):
        hp.find_sites(quantised)


def test_gates_work_on_quantised_projections():
    model, batch = tiny("bert")
    model = replaced(model, Linear8bit)
    full = model(**batch).logits
    with hp.gated(model, ragged(hp.find_sites(model))):
        gated = model(**batch).logits
    assert (gated - full).abs().max() > 1e-4
    assert torch.equal(model(**batch).logits, full)
