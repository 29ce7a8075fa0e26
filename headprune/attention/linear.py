"""Cutting features out of one projection: the tensor primitive under every physical removal of
heads.

Two steps, so that a caller can compute every cut of a model before it changes anything:
``cut_features`` is pure and refuses what it cannot cut; ``replace_features_`` installs its result.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headprune.attention.sharded import whole
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.mixin import Mixin, mix_in

Axis = Literal["in", "out"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HINT = (
    "Cut the model before it is quantised, parametrised or wrapped in adapters, or merge those"
    " first."
)


class WithoutFeatures(Mixin, nn.modules.linear.NonDynamicallyQuantizableLinear):
    """Put in front of an ``nn.Linear`` that has no inputs or no outputs, so that quantisers pass it
    by.

    There is nothing to quantise, and their kernels read past an empty weight or fail. They take the
    class ``nn.Linear`` itself; ``torchao`` takes its subclasses too, but this one of PyTorch's.
    """


def is_conv1d(module: Any) -> bool:
    """Whether a module is a Transformers ``Conv1D`` (GPT-2), whose weight is ``[in, out]``.

    It is known by its attributes: this room does not import transformers.
    """
    weight = module._parameters.get("weight") if isinstance(module, nn.Module) else None
    counts = (getattr(module, "nx", None), getattr(module, "nf", None))
    return (
        weight is not None and all(type(n) is int for n in counts) and tuple(weight.shape) == counts
    )


def base_of(projection: Any) -> Any:
    """The projection that adapters (PEFT) were put around; itself where it has none."""
    return getattr(projection, "base_layer", projection)


def _weight_axis(module: nn.Module, axis: Axis) -> int:
    """The dimension of the weight that holds the features: nn.Linear is ``[out, in]``, Conv1D is
    ``[in, out]``."""
    return int((axis == "out") != isinstance(module, nn.Linear))


def _check(module: nn.Module, axis: str, where: str) -> None:
    if axis not in ("in", "out"):
        raise InvalidValue("axis", "'in' or 'out'", repr(axis))
    if not isinstance(module, nn.Module):
        raise UnsupportedModel(where, "an nn.Linear or a Conv1D", type(module).__name__)
    kind = type(module).__name__
    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        raise UnsupportedModel(where, "an nn.Linear or a Conv1D", kind, _HINT)
    extra = [n for n, _ in module.named_parameters() if n not in ("weight", "bias")]
    extra += [n for n, _ in module.named_buffers()] + [n for n, _ in module.named_children()]
    if extra:
        must = "a projection of a weight and a bias only"
        raise UnsupportedModel(where, must, f"{kind} with {', '.join(dict.fromkeys(extra))}", _HINT)
    for name in ("weight", "bias"):
        tensor = module._parameters.get(name)
        if tensor is None and name == "bias" and getattr(module, "bias", None) is None:
            continue
        check_plain(tensor, f"{where}.{name}", f" in {kind}")


def check_plain(
    tensor: Any, where: str, place: str = "", kind: type[Tensor] = nn.Parameter
) -> None:
    """Checks that a tensor holds its own numbers: quantised, sharded and lazy ones are subclasses
    of ``kind``, or no parameters of their module at all.

    Raises:
        UnsupportedModel: another kind of tensor, or one that is not floating-point.
    """
    if type(tensor) is not kind or tensor.dtype not in _FLOATS:
        name = "nn.Parameter" if kind is nn.Parameter else "tensor"
        got = f"{type(tensor).__name__} of {getattr(tensor, 'dtype', 'no dtype')}{place}"
        raise UnsupportedModel(where, f"a plain floating-point {name}", got, _HINT)


def projections(module: nn.Module, axis: Axis, where: str = "projection") -> list[nn.Module]:
    """The plain projections that have a projection's features on ``axis``: itself, unless it has
    adapters.

    One with LoRA adapters (PEFT) computes ``base(x) + sum_a scale_a * B_a(A_a(x))`` over its
    adapters: its ``in`` features are those of the base and of every A, its ``out`` features those
    of the base and of every B. Cutting all of them is exact, before a merge and after it.

    Raises:
        UnsupportedModel: adapters of another kind, for example DoRA, whose scale is a norm over all
            ``in`` features.
    """
    base = base_of(module)
    adapters = getattr(module, "lora_A" if axis == "in" else "lora_B", None)
    if base is module or not isinstance(base, nn.Module):
        return [module]
    known = ("base_layer.weight", "base_layer.bias")
    lora = {
        f"lora_{side}.{name}.weight"
        for side in "AB"
        for name in getattr(module, f"lora_{side}", ())
    }
    extra = [n for n, _ in module.named_parameters() if n not in known and n not in lora]
    extra += [n for n, _ in module.named_buffers()]
    extra += [f"{type(v).__name__} {n!r}" for n, v in getattr(module, "lora_variant", {}).items()]
    if extra or not lora or not isinstance(adapters, nn.ModuleDict):
        must = "a projection, or one with plain LoRA adapters"
        got = f"{type(module).__module__}.{type(module).__name__}" + (
            f" with {', '.join(extra)}" if extra else ""
        )
        raise UnsupportedModel(where, must, got, _HINT)
    return [base, *adapters.values()]


def effective_weight(module: Any) -> Tensor:
    """What a projection multiplies by, ``[out, in]``: its weight and what its active adapters add
    to it."""
    base = base_of(module)
    weight: Tensor = whole(base.weight)
    if (
        base is not module
        and hasattr(module, "lora_A")
        and not (module.merged or module.disable_adapters)
    ):
        weight = weight + sum(
            module.get_delta_weight(name)
            for name in module.active_adapters
            if name in module.lora_A
        )
    return weight.T if is_conv1d(base) else weight


def recount_(module: nn.Module) -> None:
    """Makes the feature counts of a projection with adapters those of its base again."""
    base = base_of(module)
    for axis in ("in", "out"):
        if base is not module and hasattr(module, f"{axis}_features"):
            setattr(module, f"{axis}_features", feature_count(base, axis))


def feature_count(module: nn.Module, axis: Axis, where: str = "projection") -> int:
    """How many features a projection has on ``axis``.

    Args:
        module: An ``nn.Linear`` or a Transformers ``Conv1D``, or a subclass that adds no tensors.
        axis: ``in`` or ``out``.
        where: The projection's name in errors.

    Raises:
        UnsupportedModel: anything else than a plain floating-point projection.

    >>> feature_count(nn.Linear(4, 6), "in")
    4
    """
    _check(module, axis, where)
    return int(module._parameters["weight"].shape[_weight_axis(module, axis)])  # type: ignore[union-attr]


def cut_features(
    module: nn.Module, axis: Axis, index: Sequence[int], where: str = "projection"
) -> dict[str, Tensor]:
    """The tensors a projection has once only the features ``index`` are left; the module is not
    changed.

    A cut of ``out`` features cuts the bias with the weight; a cut of ``in`` features keeps the
    bias. The result has the dtype and the device of what it was cut from, shares no memory with it
    and carries no graph.

    Args:
        module: An ``nn.Linear`` (weight ``[out, in]``) or a Transformers ``Conv1D`` (weight
            ``[in, out]``).
        axis: ``in`` or ``out``.
        index: Positions that stay, strictly ascending; may be empty.
        where: The projection's name in errors.

    Returns:
        ``{"weight": ..., "bias": ...}``, without what does not change.

    Raises:
        UnsupportedModel: anything else than a plain floating-point projection (quantised,
            parametrised, adapted).
        InvalidValue: an unknown axis, or positions that are out of range, repeated or out of order.

    >>> projection = nn.Linear(4, 6)
    >>> {name: tuple(t.shape) for name, t in cut_features(projection, "out", [0, 5]).items()}
    {'weight': (2, 4), 'bias': (2,)}
    >>> {name: tuple(t.shape) for name, t in cut_features(projection, "in", [1]).items()}
    {'weight': (6, 1)}
    """
    size = feature_count(module, axis, where)
    index = [operator.index(i) for i in index]
    if any(not 0 <= i < size for i in index) or any(a >= b for a, b in pairwise(index)):
        raise InvalidValue(f"index of {where}", f"strictly ascending positions below {size}", index)
    tensors = {}
    for name, dimension in feature_dimensions(module, axis).items():
        old: Any = module._parameters[name]
        rows = torch.tensor(index, dtype=torch.long).to(
            old.device, non_blocking=True
        )  # no wait for the device
        tensors[name] = old.detach().index_select(dimension, rows)
    return tensors


def feature_dimensions(module: nn.Module, axis: Axis) -> dict[str, int]:
    """The dimension that holds the features of an axis, by name of a projection's parameter;
    without those that do not.

    >>> feature_dimensions(nn.Linear(4, 6), "out"), feature_dimensions(nn.Linear(4, 6), "in")
    ({'weight': 0, 'bias': 0}, {'weight': 1})
    """
    biased = axis == "out" and module._parameters.get("bias") is not None
    return {"weight": _weight_axis(module, axis), **({"bias": 0} if biased else {})}


def replace_features_(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Installs what ``cut_features`` computed and keeps the module's feature counts true.

    The module stays the same object, with its hooks and its training mode; each parameter becomes a
    new one that requires a gradient where the old one did. An ``nn.Parameter`` among ``tensors`` is
    installed as it is, which is how a caller keeps tied projections tied.

    Args:
        module: The projection.
        tensors: New tensors by parameter name.

    Returns:
        The feature counts ``(in, out)`` after the replacement.

    Raises:
        UnsupportedModel: anything else than a plain floating-point projection.

    >>> projection = nn.Linear(4, 6)
    >>> replace_features_(projection, cut_features(projection, "out", [0, 5]))
    (4, 2)
    >>> projection
    Linear(in_features=4, out_features=2, bias=True)
    """
    _check(module, "in", "projection")
    linear = isinstance(module, nn.Linear)
    for name, tensor in tensors.items():
        old = module._parameters.get(name)
        if old is None:
            raise InvalidValue(
                "tensors", f"named like a parameter of {type(module).__name__}", repr(name)
            )
        if type(tensor) is nn.Parameter:
            new = tensor
        else:
            new = nn.Parameter(tensor, requires_grad=old.requires_grad)
            new.__dict__.update(
                old.__dict__
            )  # flags that libraries set on parameters, as Transformers' loader does
        setattr(module, name, new)
    shape = module._parameters["weight"].shape  # type: ignore[union-attr]
    counts = shape[_weight_axis(module, "in")], shape[_weight_axis(module, "out")]
    for name, count in zip(
        ("in_features", "out_features") if linear else ("nx", "nf"), counts, strict=True
    ):
        setattr(module, name, count)
    if linear and not min(counts):
        mix_in(module, WithoutFeatures)
    return counts
