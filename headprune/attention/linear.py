"""Cutting features out of one projection: the tensor operation behind every removal of heads.

There are two steps, so that a caller can compute every cut of a model before it changes anything.
``cut_features`` is pure and refuses projections that it cannot cut; ``replace_features_`` installs
its result.
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

# Features of a projection's input or of its output.
Axis = Literal["in", "out"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HINT = (
    "Cut the model before it is quantised, parametrised or wrapped in adapters, or merge those"
    " first."
)


class WithoutFeatures(Mixin, nn.modules.linear.NonDynamicallyQuantizableLinear):
    """Mixed into an ``nn.Linear`` without inputs or outputs, so that quantisers skip it.

    Their kernels read past an empty weight or fail. Quantisers change the class ``nn.Linear``
    itself; ``torchao`` changes its subclasses too, except this base class of PyTorch's.
    """


def is_conv1d(module: Any) -> bool:
    """Whether a module is a Transformers ``Conv1D`` (GPT-2), whose weight is ``[in, out]``."""
    # By its attributes, because importing transformers is slow.
    if not isinstance(module, nn.Module):
        return False
    weight = module._parameters.get("weight")
    counts = (getattr(module, "nx", None), getattr(module, "nf", None))
    if weight is None or type(counts[0]) is not int or type(counts[1]) is not int:
        return False
    return tuple(weight.shape) == counts


def base_of(projection: Any) -> Any:
    """Return the projection inside adapters (PEFT), or the projection itself."""
    return getattr(projection, "base_layer", projection)


def _weight_axis(module: nn.Module, axis: Axis) -> int:
    """Return the dimension of the weight that holds the features of an axis."""
    # nn.Linear is [out, in], Conv1D is [in, out].
    return int((axis == "out") != isinstance(module, nn.Linear))


def _check(module: nn.Module, axis: str, where: str) -> None:
    """Refuse everything but a plain floating-point projection."""
    if axis not in ("in", "out"):
        raise InvalidValue("axis", "'in' or 'out'", repr(axis))
    if not isinstance(module, nn.Module):
        raise UnsupportedModel(where, "an nn.Linear or a Conv1D", type(module).__name__)
    kind = type(module).__name__
    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        raise UnsupportedModel(where, "an nn.Linear or a Conv1D", kind, _HINT)
    extra = _extra_parts(module)
    if extra:
        must = "a projection of a weight and a bias only"
        raise UnsupportedModel(where, must, f"{kind} with {', '.join(extra)}", _HINT)
    for name in ("weight", "bias"):
        tensor = module._parameters.get(name)
        # A parametrised or quantised bias is an attribute but no parameter.
        if tensor is None and name == "bias" and getattr(module, "bias", None) is None:
            continue
        check_plain(tensor, f"{where}.{name}", f" in {kind}")


def _extra_parts(module: nn.Module) -> list[str]:
    """Return the names of all parts that are no weight and no bias, without repeats."""
    extra = dict.fromkeys(name for name, _ in module.named_parameters())
    for name in ("weight", "bias"):
        extra.pop(name, None)
    for name, _ in [*module.named_buffers(), *module.named_children()]:
        extra[name] = None
    return list(extra)


def check_plain(
    tensor: Any, where: str, place: str = "", kind: type[Tensor] = nn.Parameter
) -> None:
    """Check that a tensor is a plain floating-point one of exactly the class ``kind``.

    Quantised, sharded and lazy tensors are subclasses, or no parameters of their module at all.

    Raises:
        UnsupportedModel: another kind of tensor, or one that is not floating-point.
    """
    if type(tensor) is not kind or tensor.dtype not in _FLOATS:
        name = "nn.Parameter" if kind is nn.Parameter else "tensor"
        got = f"{type(tensor).__name__} of {getattr(tensor, 'dtype', 'no dtype')}{place}"
        raise UnsupportedModel(where, f"a plain floating-point {name}", got, _HINT)


def projections(module: nn.Module, axis: Axis, where: str = "projection") -> list[nn.Module]:
    """Return the plain projections to cut together when features on ``axis`` are cut.

    Without adapters that is the projection itself. With LoRA adapters (PEFT) it computes
    ``base(x) + sum_a scale_a * B_a(A_a(x))`` over its adapters. Its ``in`` features are those of
    the base and of every A; its ``out`` features are those of the base and of every B. Cutting all
    of them is exact, before a merge and after it.

    Raises:
        UnsupportedModel: adapters of another kind, for example DoRA, whose scale is a norm over all
            ``in`` features.
    """
    base = base_of(module)
    # A reads the projection's input, B writes to its output.
    adapters = getattr(module, "lora_A" if axis == "in" else "lora_B", None)
    if base is module or not isinstance(base, nn.Module):
        return [module]
    names = _lora_names(module)
    extra = _not_plain_lora(module, names)
    if extra or not names or not isinstance(adapters, nn.ModuleDict):
        must = "a projection, or one with plain LoRA adapters"
        got = f"{type(module).__module__}.{type(module).__name__}"
        if extra:
            got += f" with {', '.join(extra)}"
        raise UnsupportedModel(where, must, got, _HINT)
    return [base, *adapters.values()]


def _lora_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters of plain LoRA adapters."""
    names = set()
    for side in ("lora_A", "lora_B"):
        for adapter in getattr(module, side, ()):
            names.add(f"{side}.{adapter}.weight")
    return names


def _not_plain_lora(module: nn.Module, lora: set[str]) -> list[str]:
    """Return, for a message, the parts of adapters that are not plain LoRA."""
    known = {"base_layer.weight", "base_layer.bias", *lora}
    extra = [name for name, _ in module.named_parameters() if name not in known]
    extra += [name for name, _ in module.named_buffers()]
    for name, variant in getattr(module, "lora_variant", {}).items():
        extra.append(f"{type(variant).__name__} {name!r}")
    return extra


def effective_weight(module: Any) -> Tensor:
    """Return the weight of a projection with its active adapters added, ``[out, in]``."""
    base = base_of(module)
    weight: Tensor = whole(base.weight)
    has_lora = base is not module and hasattr(module, "lora_A")
    # Merged adapters are in the base's weight already.
    if has_lora and not module.merged and not module.disable_adapters:
        active = [name for name in module.active_adapters if name in module.lora_A]
        weight = weight + sum(module.get_delta_weight(name) for name in active)
    return weight.T if is_conv1d(base) else weight


def recount_(module: nn.Module) -> None:
    """Set the feature counts of a projection with adapters to those of its base."""
    base = base_of(module)
    for axis in ("in", "out"):
        if base is not module and hasattr(module, f"{axis}_features"):
            setattr(module, f"{axis}_features", feature_count(base, axis))


def feature_count(module: nn.Module, axis: Axis, where: str = "projection") -> int:
    """Count the features of a projection on ``axis``.

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
    """Compute a projection's tensors with only the features ``index``; change nothing.

    A cut of ``out`` features cuts the bias with the weight; a cut of ``in`` features keeps the
    bias. The new tensors have the old dtype and device, share no memory with the old ones and carry
    no graph.

    Args:
        module: An ``nn.Linear`` (weight ``[out, in]``) or a Transformers ``Conv1D`` (weight
            ``[in, out]``).
        axis: ``in`` or ``out``.
        index: Kept positions, strictly ascending; may be empty.
        where: The projection's name in errors.

    Returns:
        ``{"weight": ..., "bias": ...}``, without tensors that do not change.

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
    index = list(map(operator.index, index))
    in_range = all(0 <= i < size for i in index)
    if not in_range or any(a >= b for a, b in pairwise(index)):
        raise InvalidValue(f"index of {where}", f"strictly ascending positions below {size}", index)
    tensors = {}
    for name, dimension in feature_dimensions(module, axis).items():
        old: Any = module._parameters[name]
        # Python does not wait for the device.
        rows = torch.tensor(index, dtype=torch.long).to(old.device, non_blocking=True)
        tensors[name] = old.detach().index_select(dimension, rows)
    return tensors


def feature_dimensions(module: nn.Module, axis: Axis) -> dict[str, int]:
    """Return the dimension of an axis's features, by name of each parameter that has them.

    >>> feature_dimensions(nn.Linear(4, 6), "out"), feature_dimensions(nn.Linear(4, 6), "in")
    ({'weight': 0, 'bias': 0}, {'weight': 1})
    """
    dimensions = {"weight": _weight_axis(module, axis)}
    if axis == "out" and module._parameters.get("bias") is not None:
        dimensions["bias"] = 0
    return dimensions


def replace_features_(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Install the tensors of ``cut_features`` and update the module's feature counts.

    The module stays the same object, with its hooks and its training mode. Each new parameter has
    the ``requires_grad`` of the old one. An ``nn.Parameter`` among ``tensors`` is installed without
    a copy, so that a caller can keep tied projections tied.

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
    # 1. Parameters.
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
            # Libraries set flags on parameters, as Transformers' loader does.
            new.__dict__.update(old.__dict__)
        setattr(module, name, new)
    # 2. Feature counts, by the names of the module's class.
    shape = module._parameters["weight"].shape  # type: ignore[union-attr]
    counts = (shape[_weight_axis(module, "in")], shape[_weight_axis(module, "out")])
    names = ("in_features", "out_features") if linear else ("nx", "nf")
    for name, count in zip(names, counts, strict=True):
        setattr(module, name, count)
    # 3. An empty projection is hidden from quantisers.
    if linear and not min(counts):
        mix_in(module, WithoutFeatures)
    return counts
