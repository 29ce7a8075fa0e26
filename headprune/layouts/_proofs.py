"""Prove that a module's code computes scaled dot-product attention, or concatenates heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.layouts._once import once
from headprune.layouts._stand_in import (
    first_tensor,
    fixed_linear,
    fixed_values,
    nearly_equal,
    on_cpu,
    outputs_agree,
    stand_in,
)

# All sizes differ, so that code which mixes up two axes fails instead of passing by chance.
EXAMPLES = 2
HEAD_DIM = 3
QUERIES = 5
KEYS = 7
_MODEL_DIM = 11
HEAD_COUNTS = (1, 4, 6)

#: Of six heads, those that are kept in the proofs with masks.
_KEPT = ((4,), (0, 2, 3, 5))

#: Makes the stand-in from a number of heads and the four projections.
Build = Callable[[int, tuple[nn.Linear, ...]], Any]
#: Calls it with queries, keys and values, ``[batch, length, width]``, and a mask or None; returns
#: ``[batch, length, width]``.
Call = Callable[[Any, Tensor, Tensor, Tensor, Any], Any]


def is_attention(
    module: nn.Module,
    build: Build,
    call: Call,
    values_are_keys: bool = False,
    forms: Iterable[Tensor] = (),
) -> bool:
    """Return whether a module's code is scaled dot-product attention that can lose heads.

    It must agree with the formula for every number of heads. Under every mask that it accepts,
    cutting heads must give the same output as zeroing their columns of the output projection.

    Args:
        module: The module.
        build: Makes the stand-in.
        call: Calls it.
        values_are_keys: Whether keys and values are one input.
        forms: Masks in the form that this kind of module documents.
    """
    queries = fixed_values(EXAMPLES, QUERIES, _MODEL_DIM)
    keys = fixed_values(EXAMPLES, KEYS, _MODEL_DIM, start=1)
    values = keys
    if not values_are_keys:
        values = fixed_values(EXAMPLES, KEYS, _MODEL_DIM, start=2)
    inputs = (queries, keys, values)

    def built_and_called(n_heads: int, projections: tuple[nn.Linear, ...]) -> Any:
        return call(build(n_heads, projections), *inputs, None)

    def called(small: Any, mask: Tensor | None) -> Tensor | None:
        return first_tensor(lambda: call(small, *inputs, mask))

    # 1. Without a mask it must be the formula, for several numbers of heads.
    for n_heads in HEAD_COUNTS:
        projections = _projections(n_heads)
        formula = partial(_attention, projections, inputs, n_heads)
        if not outputs_agree(formula, partial(built_and_called, n_heads, projections)):
            return False

    # 2. With masks, whose meaning is unknown, cutting must equal gating.
    return _loses_heads_under_masks(build, called, list(forms))


def _attention(
    projections: tuple[nn.Linear, ...], inputs: tuple[Tensor, ...], n_heads: int
) -> Tensor:
    """Compute multi-head attention from its definition."""
    split = []
    for projection, x in zip(projections[:3], inputs, strict=True):
        # [batch, heads, length, head_dim]
        split.append(projection(x).unflatten(-1, (n_heads, HEAD_DIM)).transpose(1, 2))
    heads = scaled_dot_product_attention(*split)
    out: Tensor = projections[3](heads.transpose(1, 2).flatten(2))
    return out


def _loses_heads_under_masks(
    build: Build, run: Callable[[Any, Tensor | None], Tensor | None], forms: list[Tensor]
) -> bool:
    """Return whether cut heads equal gated heads under every mask that the code accepts."""
    n_heads = max(HEAD_COUNTS)
    whole = build(n_heads, _projections(n_heads))
    pairs = [(build(n_heads, _gated(kept)), build(len(kept), _cut(kept))) for kept in _KEPT]
    unmasked = run(whole, None)
    assert unmasked is not None

    # A mask in an undocumented form may fit the axes by chance; then its result proves nothing.
    call_whole = partial(run, whole)
    other_forms = [mask for mask in masks() if _can_hide_nothing(mask, call_whole, unmasked)]

    for mask in (*forms, *other_forms):
        for gated, cut in pairs:
            expected = run(gated, mask)
            # The uncut module does not accept this mask, so the cut one need not either.
            if expected is None or expected.shape != unmasked.shape:
                break
            output = run(cut, mask)
            if output is None or not nearly_equal(output, expected):
                return False
    return True


def _can_hide_nothing(
    mask: Tensor, call: Callable[[Tensor], Tensor | None], unmasked: Tensor
) -> bool:
    """Return whether all ones or all zeros in this form hide nothing."""
    for filled in (torch.ones_like(mask), torch.zeros_like(mask)):
        output = call(filled)
        if output is not None and nearly_equal(output, unmasked):
            return True
    return False


def valid_lengths() -> list[Tensor]:
    """Numbers of valid keys: ``[examples]``, and ``[examples, queries]``."""
    per_example = torch.tensor([3, 6])
    per_query = torch.tensor([[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]])
    return [per_example, per_query]


def visible_keys() -> tuple[Tensor, Tensor, Tensor]:
    """Boolean masks, True for a visible key.

    Padding is ``[examples, 1, keys]``, causality ``[1, queries, keys]``; the third is both.
    """
    padding = (torch.arange(KEYS) < valid_lengths()[0][:, None])[:, None]
    causal = torch.ones(1, QUERIES, KEYS).tril(1).bool()
    return padding, causal, padding & causal


def masks() -> Iterator[Tensor]:
    """Yield masks in the forms that attention modules use; every query sees some key."""
    for mask in visible_keys():
        # With an axis for heads, and with the examples last.
        forms = [mask, mask.unsqueeze(1), mask.permute(1, 2, 0)]
        # Without the axes that hold one entry.
        if mask.shape[1] == 1:
            forms.append(mask.squeeze(1))
        if mask.shape[0] == 1:
            forms.append(mask.squeeze(0))
        for form in forms:
            yield form
            yield form.float()
            yield score_bias(form)


def score_bias(mask: Tensor) -> Tensor:
    """Turn a boolean mask into what is added to scores."""
    return torch.zeros(mask.shape).masked_fill(~mask, -1e4)


def _projections(n_heads: int) -> tuple[nn.Linear, ...]:
    """The projections of queries, keys, values and output."""
    inner = n_heads * HEAD_DIM
    query, key, value = (fixed_linear(_MODEL_DIM, inner, seed) for seed in range(3))
    return query, key, value, fixed_linear(inner, _MODEL_DIM, 3)


def _gated(kept: tuple[int, ...]) -> tuple[nn.Linear, ...]:
    """All heads' projections, where the output projection ignores the removed heads."""
    n_heads = max(HEAD_COUNTS)
    *inputs, out = _projections(n_heads)
    kept_rows = _rows(kept)
    removed = [row for row in range(n_heads * HEAD_DIM) if row not in kept_rows]
    out.weight.data[:, removed] = 0.0
    return (*inputs, out)


def _cut(kept: tuple[int, ...]) -> tuple[nn.Linear, ...]:
    """The same projections without the removed heads."""
    *inputs, out = _projections(max(HEAD_COUNTS))
    rows = _rows(kept)
    for projection in inputs:
        projection.weight.data = projection.weight.data[rows]
        projection.bias.data = projection.bias.data[rows]
    out.weight.data = out.weight.data[:, rows]
    for projection in (*inputs, out):
        projection.out_features, projection.in_features = projection.weight.shape
    return (*inputs, out)


def _rows(heads: tuple[int, ...]) -> list[int]:
    """Rows of a projection that belong to these heads."""
    rows: list[int] = []
    for head in heads:
        rows.extend(range(head * HEAD_DIM, (head + 1) * HEAD_DIM))
    return rows


@once
def is_concatenation(module: Any, projection: str) -> bool:
    """Return whether a module concatenates the outputs of ``heads``, then projects them.

    Args:
        module: The module.
        projection: Name of the output projection; empty where there is none.
    """
    n_heads = HEAD_COUNTS[1]
    x = fixed_values(EXAMPLES, QUERIES, _MODEL_DIM)
    heads = nn.ModuleList(fixed_linear(_MODEL_DIM, HEAD_DIM, seed) for seed in range(n_heads))
    children: dict[str, nn.Module | None] = {"heads": heads}
    if projection:
        children[projection] = fixed_linear(n_heads * HEAD_DIM, _MODEL_DIM, n_heads)

    def expected() -> Tensor:
        out = torch.cat([head(x) for head in heads], -1)
        return children[projection](out) if projection else out  # type: ignore[misc]

    return outputs_agree(expected, lambda: stand_in(module, children).forward(x))


def value_width(heads: nn.ModuleList) -> int:
    """Return how many features each head outputs per token.

    Raises:
        InvalidValue: the heads do not return features of one width.
    """
    widths = sorted(set(map(_returned_width, heads)))
    if len(widths) != 1 or not widths[0]:
        must = (
            "modules that return features of one width, [batch, length, width] of [batch, length,"
            " features]"
        )
        raise InvalidValue("heads", must, [width or "unknown" for width in widths])
    return int(widths[0])


@once
def _returned_width(head: nn.Module) -> int:
    """Run a copy of a head to see its output width; 0 if unclear."""
    try:
        small = on_cpu(head)
    except UnsupportedModel:
        return 0
    # The input width is unknown, but it is a size of one of the parameters.
    sizes: set[int] = set()
    for parameter in small.parameters():
        sizes.update(parameter.shape)
    # Sizes that no parameter has, which identify the axes of the output.
    n_examples, length = [n for n in range(2, len(sizes) + 4) if n not in sizes][:2]
    widths = set()
    for n_features in sorted(sizes):
        x = fixed_values(n_examples, length, n_features)
        out = first_tensor(partial(small, x))
        if out is not None and out.ndim == 3 and out.shape[:2] == (n_examples, length):
            widths.add(out.shape[2])
    return int(widths.pop()) if len(widths) == 1 else 0
