"""Multi-head attention from single heads, and from and to PyTorch's own module; all exact.

The functions take the class to build as an argument, so that this module need not import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from headprune.attention.compatibility import ScaledDotProduct, resolve_compatibility
from headprune.core.errors import InvalidValue, UnsupportedModel

_PROJECTIONS = ("W_q", "W_k", "W_v")
_M = TypeVar("_M", bound=nn.Module)


class Convertible(Protocol):
    """The attributes of ``MultiHeadAttention`` that ``to_torch`` reads."""

    W_q: nn.Linear
    W_k: nn.Linear
    W_v: nn.Linear
    W_o: nn.Linear
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    dropout: float
    batch_first: bool
    training: bool
    compatibility: Callable[..., Tensor]


def from_heads(
    kind: type[_M],
    heads: Sequence[tuple[Tensor, Tensor, Tensor]],
    W_o: Tensor | None = None,
    *,
    dropout: float = 0.0,
    batch_first: bool = True,
    compatibility: str | Callable[..., Tensor] = "scaled_dot_product",
) -> _M:
    """Build multi-head attention from single heads, without biases.

    Matrices are ``[out, in]`` as in ``nn.Linear.weight``. They are copied; one tensor may serve as
    several of them.

    Args:
        kind: MultiHeadAttention.
        heads: For every head
            ``(W_q [head_dim, query_size], W_k [head_dim, key_size], W_v [value_dim, value_size])``.
        W_o: ``[output_size, heads * value_dim]``. None concatenates the heads' outputs by a frozen
            identity matrix; after pruning the output has zeros for removed heads.
        dropout: As in MultiHeadAttention.
        batch_first: As in MultiHeadAttention.
        compatibility: As in MultiHeadAttention.

    Raises:
        InvalidValue: no head, or matrices whose shapes, dtypes or devices do not fit each other.

    >>> from headprune.attention import MultiHeadAttention
    >>> one, two = torch.randn(2, 3, 8)
    >>> attention = MultiHeadAttention.from_heads([(one, one, one), (two, two, two)])
    >>> attention(torch.randn(1, 5, 8)).shape
    torch.Size([1, 5, 6])
    """
    columns = _columns(heads)
    first = columns[0][0]
    head_dim, query_size = first.shape
    key_size = columns[1][0].shape[1]
    value_dim, value_size = columns[2][0].shape
    width = len(heads) * value_dim
    output_size = width
    if W_o is not None:
        # -1 stands for any output size.
        output_size = W_o.shape[0] if W_o.dim() == 2 else -1
        _same("W_o", W_o, (output_size, width), first)
    module = kind(
        query_size,
        len(heads),
        key_size=key_size,
        value_size=value_size,
        output_size=output_size,
        head_dim=head_dim,
        value_dim=value_dim,
        bias=False,
        dropout=dropout,
        batch_first=batch_first,
        device="meta",  # no random numbers are drawn for weights that are given
        dtype=first.dtype,
    )
    # Set afterwards, because it may have parameters of its own, on the real device.
    untyped: Any = module
    untyped.compatibility = resolve_compatibility(
        compatibility, head_dim, first.device, first.dtype
    )
    for name, matrices in zip(_PROJECTIONS, columns, strict=True):
        weight = torch.cat([m.detach() for m in matrices])  # [heads * head_dim, in]
        _set_parameter(module, f"{name}.weight", nn.Parameter(weight))
    if W_o is None:
        identity = torch.eye(width, dtype=first.dtype, device=first.device)
        output = nn.Parameter(identity, requires_grad=False)
    else:
        output = nn.Parameter(W_o.detach().clone())
    _set_parameter(module, "W_o.weight", output)
    return module


def _columns(heads: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[list[Tensor]]:
    """Check the heads and return all W_q, all W_k and all W_v."""
    if len(heads) == 0:
        raise InvalidValue("heads", "at least one triple (W_q, W_k, W_v)", "none")
    for i, head in enumerate(heads):
        if not _is_triple(head):
            shapes = [str(list(getattr(m, "shape", [type(m).__name__]))) for m in head]
            got = f"{len(head)} of {', '.join(shapes)}"
            raise InvalidValue(f"heads[{i}]", "three matrices (W_q, W_k, W_v)", got)
    # All heads have the shapes of the first one, and its W_q and W_k share head_dim.
    q, k, v = heads[0]
    expected = (tuple(q.shape), (q.shape[0], k.shape[1]), tuple(v.shape))
    columns: list[list[Tensor]] = [[], [], []]
    for i, head in enumerate(heads):
        for j, matrix in enumerate(head):
            _same(f"{_PROJECTIONS[j]} of heads[{i}]", matrix, expected[j], q)
            columns[j].append(matrix)
    return columns


def _is_triple(head: Sequence[object]) -> bool:
    # A tensor of three matrices would iterate like a triple of them.
    if isinstance(head, Tensor) or len(head) != 3:
        return False
    return all(isinstance(m, Tensor) and m.dim() == 2 for m in head)


def _same(where: str, matrix: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Check a matrix's shape, and that its dtype and device are those of another."""
    have = (tuple(matrix.shape), matrix.dtype, matrix.device)
    want = (shape, like.dtype, like.device)
    if have != want:
        sizes = ["output_size" if n < 0 else n for n in shape]
        must = f"of shape {sizes}, {like.dtype}, on {like.device}"
        got = f"{list(matrix.shape)}, {matrix.dtype}, on {matrix.device}"
        hint = "Matrices are [out, in], as in nn.Linear.weight."
        raise InvalidValue(where, must, got, hint)


def from_torch(kind: type[_M], module: nn.MultiheadAttention) -> _M:
    """Build the attention that computes the same as PyTorch's ``module``.

    Parameters are copied; training mode and sequence order are kept. In PyTorch's masks True means
    hidden; in ours it means visible.

    Args:
        kind: MultiHeadAttention.
        module: PyTorch's module.

    Raises:
        UnsupportedModel: not an ``nn.MultiheadAttention``, or one with ``add_bias_kv``,
            ``add_zero_attn``, or unknown parameters (quantised, parametrised).

    >>> from headprune.attention import MultiHeadAttention
    >>> attention = MultiHeadAttention.from_torch(
    ...     nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ... )
    >>> attention.n_heads, attention.training
    (2, False)
    """
    _check_torch(module)
    packed = module._qkv_same_embed_dim
    size = module.embed_dim
    ours = kind(
        size,
        module.num_heads,
        key_size=module.kdim,
        value_size=module.vdim,
        bias=module.in_proj_bias is not None,
        output_bias=module.out_proj.bias is not None,
        dropout=module.dropout,
        batch_first=module.batch_first,
        device="meta",  # no random numbers are drawn for weights that are given
    )
    # W_q, W_k and W_v lie in one packed tensor, or in three if their input widths differ.
    for i, name in enumerate(_PROJECTIONS):
        rows = slice(i * size, (i + 1) * size)  # of the packed tensors
        if packed:
            source = module.in_proj_weight
            _give(ours, f"{name}.weight", source[rows], source)
        else:
            source = getattr(module, f"{name[-1]}_proj_weight")
            _give(ours, f"{name}.weight", source, source)
        if module.in_proj_bias is not None:
            _give(ours, f"{name}.bias", module.in_proj_bias[rows], module.in_proj_bias)
    for part in ("weight", "bias"):
        source = getattr(module.out_proj, part)
        if source is not None:
            _give(ours, f"W_o.{part}", source, source)
    return ours.train(module.training)


def _check_torch(module: nn.MultiheadAttention) -> None:
    if not isinstance(module, nn.MultiheadAttention):
        raise UnsupportedModel("module", "an nn.MultiheadAttention", type(module).__name__)
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        got = "add_zero_attn=True" if module.add_zero_attn else "add_bias_kv=True"
        raise UnsupportedModel(
            "module",
            "without keys of its own",
            got,
            "MultiHeadAttention attends to its input only.",
        )
    # Any other parameter would be lost, for example of a quantised projection.
    names = {n for n, _ in module.named_parameters()}
    weights = {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
    if module._qkv_same_embed_dim:
        weights = {"in_proj_weight"}
    if names - {"in_proj_bias", "out_proj.bias"} != weights | {"out_proj.weight"}:
        raise UnsupportedModel(
            "module", "with the parameters of nn.MultiheadAttention", sorted(names)
        )


def _give(module: nn.Module, path: str, tensor: Tensor, like: Tensor) -> None:
    """Set a parameter to a copy of ``tensor`` with the ``requires_grad`` of ``like``."""
    copied = nn.Parameter(tensor.detach().clone(), requires_grad=like.requires_grad)
    _set_parameter(module, path, copied)


def _set_parameter(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, parameter)


def to_torch(module: Convertible) -> nn.MultiheadAttention:
    """Build PyTorch's module that computes the same, with copies of the parameters.

    Raises:
        UnsupportedModel: PyTorch's module cannot represent it: grouped heads, a head width other
            than ``query_size / n_heads`` (so also a pruned module), another output width, another
            compatibility function, biases on some projections only, parts of one packed tensor
            frozen.

    >>> from headprune.attention import MultiHeadAttention
    >>> type(MultiHeadAttention(8, 2).to_torch()).__name__
    'MultiheadAttention'
    """
    _check_shape(module)
    _check_projections(module)
    size = module.W_q.in_features
    key_size = module.W_k.in_features
    value_size = module.W_v.in_features
    packed = size == key_size == value_size
    theirs = nn.MultiheadAttention(
        size,
        module.n_heads,
        dropout=module.dropout,
        bias=module.W_q.bias is not None,
        kdim=key_size,
        vdim=value_size,
        batch_first=module.batch_first,
        device="meta",  # no random numbers are drawn for weights that are given
    )
    weights: list[Tensor] = [module.W_q.weight, module.W_k.weight, module.W_v.weight]
    if packed:
        _give(theirs, "in_proj_weight", torch.cat(weights), weights[0])
    else:
        for name, weight in zip(_PROJECTIONS, weights, strict=True):
            _give(theirs, f"{name[-1]}_proj_weight", weight, weight)
    _give(theirs, "out_proj.weight", module.W_o.weight, module.W_o.weight)
    if module.W_o.bias is not None:
        biases: list[Tensor] = [module.W_q.bias, module.W_k.bias, module.W_v.bias]
        _give(theirs, "in_proj_bias", torch.cat(biases), biases[0])
        _give(theirs, "out_proj.bias", module.W_o.bias, module.W_o.bias)
    return theirs.train(module.training)


def _require(holds: bool, must: str, got: object) -> None:
    if not holds:
        hint = "nn.MultiheadAttention has no form for it."
        raise UnsupportedModel("to_torch()", must, got, hint)


def _check_shape(module: Convertible) -> None:
    """Refuse head counts, widths and functions that PyTorch's module cannot represent."""
    size = module.W_q.in_features
    n_heads = module.n_heads
    _require(n_heads > 0, "called on a module with heads", "no head")
    must = "given one key/value head per query head"
    _require(module.n_kv_heads == n_heads, must, f"{module.n_kv_heads} of them")
    for name, width in (("head_dim", module.head_dim), ("value_dim", module.value_dim)):
        must = f"given heads that fill the query width {size}"
        _require(n_heads * width == size, must, f"{n_heads} heads of {name} {width}")
    must = f"given an output as wide as the query, {size}"
    _require(module.W_o.out_features == size, must, module.W_o.out_features)
    function = module.compatibility
    default = isinstance(function, ScaledDotProduct) and (
        function.scale in (None, 1 / math.sqrt(module.head_dim))
    )
    _require(default, "given the scaled dot product, scaled by 1 / sqrt(head_dim)", function)


def _check_projections(module: Convertible) -> None:
    """Refuse projections that PyTorch's module cannot represent."""
    inputs = [module.W_q, module.W_k, module.W_v]
    projections = [*inputs, module.W_o]
    for projection in projections:
        names = [name for name, _ in projection.named_parameters()]
        plain = isinstance(projection, nn.Linear) and names in (["weight"], ["weight", "bias"])
        _require(plain, "given plain nn.Linear projections", projection)
    has_bias = [p.bias is not None for p in projections]
    must = "given biases on all of W_q, W_k, W_v and W_o, or on none"
    _require(len(set(has_bias)) == 1, must, has_bias)

    # PyTorch packs the biases, and weights of one input width, into one parameter each.
    must = "given W_q, W_k and W_v all frozen or none ({})"
    trained = {p.weight.requires_grad for p in inputs}
    packed = {p.in_features for p in inputs} == {module.W_q.in_features}
    _require(not packed or len(trained) == 1, must.format("weight"), "some of them frozen")
    trained = {p.bias.requires_grad for p in inputs if p.bias is not None}
    _require(len(trained) <= 1, must.format("bias"), "some of them frozen")
