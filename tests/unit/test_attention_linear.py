"""The tensor primitive under every cut: features taken out of one projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

from headprune.attention import cut_features, feature_count, replace_features_
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.mixin import original_class


class Named(nn.Linear):
    """A subclass that adds no tensors."""


@pytest.mark.parametrize(
    "build", [lambda: nn.Linear(4, 6), lambda: Named(4, 6, bias=False), lambda: Conv1D(6, 4)]
)
@pytest.mark.parametrize(
    ("axis", "index"), [("out", [0, 5]), ("in", [1, 2, 3]), ("out", []), ("in", [])]
)
def test_cut_features(build: Any, axis: Any, index: list[int]) -> None:
    module, x = build(), torch.randn(3, 4)
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
    counts = replace_features_(module, tensors)
    assert counts[axis == "out"] == len(index) == feature_count(module, axis)
    assert original_class(module) is kind
    names = ("nx", "nf") if kind is Conv1D else ("in_features", "out_features")
    said = getattr(module, names[0]), getattr(module, names[1])
    assert said == (feature_count(module, "in"), feature_count(module, "out"))
    if kind is Conv1D and feature_count(module, "in") == 0:
        return  # Transformers' forward views its input as (-1, 0), which torch refuses
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
    assert (module.weight.device.type, module.weight.dtype, module.weight.shape) == (
        "meta",
        torch.bfloat16,
        (2, 4),
    )


class Adapted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 6)
        self.lora_A = nn.Parameter(torch.zeros(2, 4))


class Quantised(nn.Parameter):
    """Stands for the parameter classes of quantisation libraries."""


def linear_of(weight: nn.Parameter) -> nn.Module:
    module = nn.Linear(4, 6)
    module.weight = weight
    return module


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.Conv1d(4, 6, 1), "an nn.Linear or a Conv1D, got Conv1d"),
        (lambda: 3, "got int"),
        (Adapted, "got Adapted with lora_A"),
        (lambda: prune.identity(nn.Linear(4, 6), "weight"), "got Linear with weight_orig"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
            "got ParametrizedLinear with parametrizations",
        ),
        (lambda: linear_of(Quantised(torch.zeros(6, 4))), "got Quantised of torch.float32 in Lin"),
        (
            lambda: linear_of(nn.Parameter(torch.zeros(6, 4).char(), requires_grad=False)),
            "got Parameter of torch.int8 in Linear",
        ),
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
