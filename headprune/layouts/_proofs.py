"""Proofs that a module's code computes textbook attention, or puts its heads side by side, for any
number of heads.

Every size is another one (examples, queries, keys, features, heads, a head's width), so no axis
passes for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.layouts._once import once
from headprune.layouts._stand_in import agree, linear, on_cpu, same, stand_in, tried, wave

EXAMPLES, WIDTH, QUERIES, KEYS, _MODEL = 2, 3, 5, 7, 11
HEADS = (1, 4, 6)
#: Of six heads, those that stay where a mask is given.
_KEPT = ((4,), (0, 2, 3, 5))

#: Makes the stand-in, given a number of heads and the four projections.
Build = Callable[[int, tuple[nn.Linear, ...]], Any]
#: Calls it with queries, keys and values, ``[batch, length, width]``, and a mask or None, and
#: returns the same.
Call = Callable[[Any, Tensor, Tensor, Tensor, Any], Any]


def is_attention(
    module: nn.Module,
    build: Build,
    call: Call,
    values_are_keys: bool = False,
    forms: Iterable[Tensor] = (),
) -> bool:
    """Whether a module's code is scaled dot-product attention for any number of heads, whatever
    else it is made of, and loses heads exactly under every mask that it takes.

    Args:
        module: The module.
        build: Makes the stand-in.
        call: Calls it.
        values_are_keys: Whether it takes one input for both.
        forms: Masks as such a module is given them.
    """
    q, k = wave(EXAMPLES, QUERIES, _MODEL), wave(EXAMPLES, KEYS, _MODEL, start=1)
    v = k if values_are_keys else wave(EXAMPLES, KEYS, _MODEL, start=2)
    for n_heads in HEADS:
        ways = _projections(n_heads)

        def expected(ways: tuple[nn.Linear, ...] = ways, n_heads: int = n_heads) -> Tensor:
            split = [
                way(x).unflatten(-1, (n_heads, WIDTH)).transpose(1, 2)
                for way, x in zip(ways, (q, k, v), strict=False)
            ]
            out: Tensor = ways[3](scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))
            return out

        if not agree(expected, lambda ways=ways, n=n_heads: call(build(n, ways), q, k, v, None)):  # type: ignore[misc]
            return False

    return _loses_heads_under_masks(
        build, lambda small, mask: tried(lambda: call(small, q, k, v, mask)), list(forms)
    )


def _loses_heads_under_masks(
    build: Build, run: Callable[[Any, Tensor | None], Tensor | None], forms: list[Tensor]
) -> bool:
    """Whether heads that are gated and heads that are cut make no difference, under every mask that
    is taken.

    Nothing is supposed of what a mask means. One that the uncut module does not take proves
    nothing, and one in another form than is usual counts only where it hides nothing if it is all
    ones, or all zeros: it may fit axes by chance.
    """
    n_heads = max(HEADS)
    whole = build(n_heads, _projections(n_heads))
    pairs = [(build(n_heads, _gated(kept)), build(len(kept), _cut(kept))) for kept in _KEPT]
    unmasked = run(whole, None)
    assert unmasked is not None

    def hides_nothing(mask: Tensor) -> bool:
        plain = (run(whole, filled) for filled in (torch.ones_like(mask), torch.zeros_like(mask)))
        return any(found is not None and same(found, unmasked) for found in plain)

    for mask in (*forms, *filter(hides_nothing, masks())):
        for gated, cut in pairs:
            expected = run(gated, mask)
            if expected is None or expected.shape != unmasked.shape:
                break
            found = run(cut, mask)
            if found is None or not same(found, expected):
                return False
    return True


def lengths() -> list[Tensor]:
    """How many keys each example has, ``[examples]``, or each query of it,
    ``[examples, queries]``."""
    return [torch.tensor([3, 6]), torch.tensor([[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]])]


def seen() -> tuple[Tensor, Tensor, Tensor]:
    """Which keys are seen: ``[examples, 1, keys]`` for padding, ``[1, queries, keys]`` causally,
    and both together."""
    padding = (torch.arange(KEYS) < lengths()[0][:, None])[:, None]
    causal = torch.ones(1, QUERIES, KEYS).tril(1).bool()
    return padding, causal, padding & causal


def masks() -> Iterator[Tensor]:
    """Masks in other forms that attention is given: of truths, numbers and what is added to scores;
    with an axis for heads or without; with the examples first or last. No query loses all its
    keys."""
    for mask in seen():
        forms = [mask, mask.unsqueeze(1), mask.permute(1, 2, 0)]
        forms += [mask.squeeze(1)] if mask.shape[1] == 1 else []
        forms += [mask.squeeze(0)] if mask.shape[0] == 1 else []
        for form in forms:
            yield form
            yield form.float()
            yield added(form)


def added(mask: Tensor) -> Tensor:
    """A mask as what is added to scores."""
    return torch.zeros(mask.shape).masked_fill(~mask, -1e4)


def _projections(n_heads: int) -> tuple[nn.Linear, ...]:
    """Of queries, keys, values and the output."""
    inner = n_heads * WIDTH
    return (*(linear(_MODEL, inner, seed) for seed in range(3)), linear(inner, _MODEL, 3))


def _gated(kept: tuple[int, ...]) -> tuple[nn.Linear, ...]:
    """The projections of most heads, of which the output projection reads only these."""
    *ways, out = _projections(max(HEADS))
    gone = [row for row in range(max(HEADS) * WIDTH) if row not in _rows(kept)]
    out.weight.data[:, gone] = 0.0
    return (*ways, out)


def _cut(kept: tuple[int, ...]) -> tuple[nn.Linear, ...]:
    """The same projections without the other heads."""
    *ways, out = _projections(max(HEADS))
    rows = _rows(kept)
    for way in ways:
        way.weight.data, way.bias.data = way.weight.data[rows], way.bias.data[rows]
    out.weight.data = out.weight.data[:, rows]
    for way in (*ways, out):
        way.out_features, way.in_features = way.weight.shape
    return (*ways, out)


def _rows(heads: tuple[int, ...]) -> list[int]:
    return [head * WIDTH + i for head in heads for i in range(WIDTH)]


@once
def is_concatenation(module: Any, projection: str) -> bool:
    """Whether a module puts the outputs of its ``heads`` side by side, and through ``projection``
    if there is one."""
    n_heads = HEADS[1]
    x, heads = (
        wave(EXAMPLES, QUERIES, _MODEL),
        nn.ModuleList(linear(_MODEL, WIDTH, seed) for seed in range(n_heads)),
    )
    children: dict[str, nn.Module | None] = {"heads": heads}
    if projection:
        children[projection] = linear(n_heads * WIDTH, _MODEL, n_heads)

    def expected() -> Tensor:
        out = torch.cat([head(x) for head in heads], -1)
        return children[projection](out) if projection else out  # type: ignore[misc]

    return agree(expected, lambda: stand_in(module, children).forward(x))


def value_width(heads: nn.ModuleList) -> int:
    """Features of what each head returns for a token.

    Raises:
        InvalidValue: heads that do not return features of one width.
    """
    widths = sorted({_returned_width(head) for head in heads})
    if len(widths) != 1 or not widths[0]:
        must = (
            "modules that return features of one width, [batch, length, width] of [batch, length,"
            " features]"
        )
        raise InvalidValue("heads", must, [width or "unknown" for width in widths])
    return int(widths[0])


@once
def _returned_width(head: nn.Module) -> int:
    """How many features a head returns for a token, seen by running a copy; 0 where that shows none
    or several.

    How many it takes is a size of one of its parameters, whichever way round these lie.
    """
    try:
        small = on_cpu(head)
    except UnsupportedModel:
        return 0
    sizes = {n for p in small.parameters() for n in p.shape}
    n_examples, length = [n for n in range(2, len(sizes) + 4) if n not in sizes][:2]
    found = set()
    for n_features in sorted(sizes):
        out = tried(lambda n=n_features: small(wave(n_examples, length, n)))  # type: ignore[misc]
        if out is not None and out.ndim == 3 and out.shape[:2] == (n_examples, length):
            found.add(out.shape[2])
    return int(found.pop()) if len(found) == 1 else 0
