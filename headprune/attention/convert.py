"""MultiHeadAttention from single heads, and from and to PyTorch's own module; all exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headprune.attention.compatibility import ScaledDotProduct, resolve_compatibility
from headprune.attention.multi_head import MultiHeadAttention
from headprune.core.errors import InvalidValue, UnsupportedModel

_PROJECTIONS = ("W_q", "W_k", "W_v")


def from_heads(
    heads: Sequence[tuple[Tensor, Tensor, Tensor]],
    W_o: Tensor | None = None,
    *,
    dropout: float = 0.0,
    batch_first: bool = True,
    compatibility: str | Callable[..., Tensor] = "scaled_dot_product",
) -> MultiHeadAttention:
    """Multi-head attention from single heads, without biases.

    Matrices lie as in ``nn.Linear.weight``, output by input, and are copied; one tensor may serve
    as several of them.

    Args:
        heads: For every head
            ``(W_q [head_dim, query_size], W_k [head_dim, key_size], W_v [value_dim, value_size])``.
        W_o: ``[output_size, heads * value_dim]``; None: the heads' outputs side by side. That is a
            frozen identity matrix, so the output keeps its width when heads are pruned, with zeros
            where they were.
        dropout: As in MultiHeadAttention.
        batch_first: As in MultiHeadAttention.
        compatibility: As in MultiHeadAttention.

    Raises:
        InvalidValue: no head, or matrices whose shapes, dtypes or devices do not fit each other.

    >>> one, two = torch.randn(2, 3, 8)
    >>> attention = MultiHeadAttention.from_heads([(one, one, one), (two, two, two)])
    >>> attention(torch.randn(1, 5, 8)).shape
    torch.Size([1, 5, 6])
    """
    columns = _columns(heads)
    (head_dim, query_size), (_, key_size), (value_dim, value_size) = (
        tuple(c[0].shape) for c in columns
    )
    width = len(heads) * value_dim
    first = columns[0][0]
    if W_o is not None:
        _same("W_o", W_o, (W_o.shape[0] if W_o.dim() == 2 else -1, width), first)
    module = MultiHeadAttention(
        query_size,
        len(heads),
        key_size=key_size,
        value_size=value_size,
        output_size=width if W_o is None else W_o.shape[0],
        head_dim=head_dim,
        value_dim=value_dim,
        bias=False,
        dropout=dropout,
        batch_first=batch_first,
        device="meta",  # no random numbers are drawn for weights that are given
        dtype=first.dtype,
    )
    module.compatibility = resolve_compatibility(compatibility, head_dim, first.device, first.dtype)
    for name, matrices in zip(_PROJECTIONS, columns, strict=True):
        getattr(module, name).weight = nn.Parameter(torch.cat([m.detach() for m in matrices]))
    if W_o is None:
        identity = torch.eye(width, dtype=first.dtype, device=first.device)
        module.W_o.weight = nn.Parameter(identity, requires_grad=False)
    else:
        module.W_o.weight = nn.Parameter(W_o.detach().clone())
    return module


def _columns(heads: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[list[Tensor]]:
    """All W_q, all W_k and all W_v, checked."""
    if len(heads) == 0:
        raise InvalidValue("heads", "at least one triple (W_q, W_k, W_v)", "none")
    for i, head in enumerate(heads):
        if (
            isinstance(head, Tensor)
            or len(head) != 3
            or not all(isinstance(m, Tensor) and m.dim() == 2 for m in head)
        ):
            got = f"{len(head)} of " + ", ".join(
                str(list(getattr(m, "shape", [type(m).__name__]))) for m in head
            )
            raise InvalidValue(f"heads[{i}]", "three matrices (W_q, W_k, W_v)", got)
    q, k, v = heads[0]
    expected = (tuple(q.shape), (q.shape[0], k.shape[1]), tuple(v.shape))
    for i, head in enumerate(heads):
        for name, matrix, shape in zip(_PROJECTIONS, head, expected, strict=True):
            _same(f"{name} of heads[{i}]", matrix, shape, q)
    return [[head[j] for head in heads] for j in range(3)]


def _same(where: str, matrix: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    have = (tuple(matrix.shape), matrix.dtype, matrix.device)
    want = (shape, like.dtype, like.device)
    if have != want:
        must = (
            f"of shape {['output_size' if n < 0 else n for n in shape]}, {like.dtype}, on"
            f" {like.device}"
        )
        got = f"{list(matrix.shape)}, {matrix.dtype}, on {matrix.device}"
        hint = "Matrices lie as in nn.Linear.weight: output by input."
        raise InvalidValue(where, must, got, hint)


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """The same function as ``module``, with copies of its parameters, its training mode and its
    sequence order.

    PyTorch's masks say True for what is HIDDEN, ours for what may be seen.

    Raises:
        UnsupportedModel: not an ``nn.MultiheadAttention``, or one with ``add_bias_kv``,
            ``add_zero_attn``, or parameters we do not know (quantised, parametrised).

    >>> attention = MultiHeadAttention.from_torch(
    ...     nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ... )
    >>> attention.n_heads, attention.training
    (2, False)
    """
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
    names = {n for n, _ in module.named_parameters()}
    packed = module._qkv_same_embed_dim
    weights = {"in_proj_weight"} if packed else {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
    if names - {"in_proj_bias", "out_proj.bias"} != weights | {"out_proj.weight"}:
        raise UnsupportedModel(
            "module", "with the parameters of nn.MultiheadAttention", sorted(names)
        )
    size = module.embed_dim
    ours = MultiHeadAttention(
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
    for i, name in enumerate(_PROJECTIONS):
        rows = slice(i * size, (i + 1) * size)
        source = getattr(module, "in_proj_weight" if packed else f"{name[-1]}_proj_weight")
        _give(ours, f"{name}.weight", source[rows] if packed else source, source)
        if module.in_proj_bias is not None:
            _give(ours, f"{name}.bias", module.in_proj_bias[rows], module.in_proj_bias)
    for kind in ("weight", "bias"):
        source = getattr(module.out_proj, kind)
        if source is not None:
            _give(ours, f"W_o.{kind}", source, source)
    return ours.train(module.training)


def _give(module: nn.Module, path: str, tensor: Tensor, like: Tensor) -> None:
    """Sets a parameter to a copy of ``tensor`` that requires a gradient where ``like`` does."""
    owner, _, name = path.rpartition(".")
    parameter = nn.Parameter(tensor.detach().clone(), requires_grad=like.requires_grad)
    setattr(module.get_submodule(owner), name, parameter)


def to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """The same function as PyTorch's module, with copies of the parameters.

    Raises:
        UnsupportedModel: what PyTorch's module has no form for: grouped heads, a head width other
            than ``query_size / n_heads`` (so also a module that has lost heads), another output
            width, another compatibility function, biases on some projections only, parts of one
            packed tensor frozen.

    >>> type(MultiHeadAttention(8, 2).to_torch()).__name__
    'MultiheadAttention'
    """
    _refuse_what_torch_lacks(module)
    size, key_size, value_size = (getattr(module, name).in_features for name in _PROJECTIONS)
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
    weights, biases = (
        [getattr(getattr(module, n), kind) for n in _PROJECTIONS] for kind in ("weight", "bias")
    )
    if packed:
        _give(theirs, "in_proj_weight", torch.cat(weights), weights[0])
    else:
        for name, weight in zip(_PROJECTIONS, weights, strict=True):
            _give(theirs, f"{name[-1]}_proj_weight", weight, weight)
    _give(theirs, "out_proj.weight", module.W_o.weight, module.W_o.weight)
    if module.W_o.bias is not None:
        _give(theirs, "in_proj_bias", torch.cat(biases), biases[0])
        _give(theirs, "out_proj.bias", module.W_o.bias, module.W_o.bias)
    return theirs.train(module.training)


def _refuse_what_torch_lacks(module: MultiHeadAttention) -> None:
    size = module.W_q.in_features

    def must(holds: bool, what: str, got: object) -> None:
        if not holds:
            raise UnsupportedModel(
                "to_torch()", what, got, "nn.MultiheadAttention has no form for it."
            )

    must(module.n_heads > 0, "called on a module with heads", "no head")
    must(
        module.n_kv_heads == module.n_heads,
        "given one key/value head a query head",
        f"{module.n_kv_heads} of them",
    )
    for name, width in (("head_dim", module.head_dim), ("value_dim", module.value_dim)):
        got = f"{module.n_heads} heads of {name} {width}"
        must(module.n_heads * width == size, f"given heads that fill the query width {size}", got)
    must(
        module.W_o.out_features == size,
        f"given an output as wide as the query, {size}",
        module.W_o.out_features,
    )
    fit = module.compatibility
    default = isinstance(fit, ScaledDotProduct) and fit.scale in (
        None,
        1 / math.sqrt(module.head_dim),
    )
    must(default, "given the scaled dot product, scaled by 1 / sqrt(head_dim)", fit)
    projections = [getattr(module, name) for name in (*_PROJECTIONS, "W_o")]
    for p in projections:
        plain = isinstance(p, nn.Linear) and [n for n, _ in p.named_parameters()] in (
            ["weight"],
            ["weight", "bias"],
        )
        must(plain, "given plain nn.Linear projections", p)
    biases = [p.bias is not None for p in projections]
    must(len(set(biases)) == 1, "given biases on all of W_q, W_k, W_v and W_o, or on none", biases)
    packed = {p.in_features for p in projections[:3]} == {size}
    for kind in ("weight", "bias"):
        flags = {
            getattr(p, kind).requires_grad for p in projections[:3] if getattr(p, kind) is not None
        }
        mixed = len(flags) > 1 and (packed or kind == "bias")
        must(
            not mixed, f"given W_q, W_k and W_v all frozen or none ({kind})", "some of them frozen"
        )
