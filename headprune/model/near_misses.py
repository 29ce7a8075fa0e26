"""Attention that no layout takes: which modules a person would call attention, and what each of
them lacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from torch import Tensor, nn

from headprune.attention.linear import is_conv1d
from headprune.core.coverage import NotTaken
from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout
from headprune.model.matching import lookup, reason_against

_LISTED = 8
_KIND = re.compile(r"attention|attn|MHS?A(?![a-z])")
_ROLES = tuple(
    re.compile(rf"(^|_)w?({letter}|{word})(_|\d|$)", re.IGNORECASE)
    for letter, word in (("q", "query|queries"), ("k", "keys?"), ("v", "values?"))
)
#: One projection of keys and values, and one of all three.
_KEYS_VALUES = re.compile(r"(^|_)w?(kv|vk|keys?_values?)(_|\d|$)", re.IGNORECASE)
_ALL_THREE = re.compile(r"qkv|kqv|query_key_value", re.IGNORECASE)


def attention_like(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that a person would call attention.

    By their class name, with parameters; by parts or tensors that are named like queries, keys and
    values; or by a projection of a width to three times as much beside one that keeps it, as
    queries, keys and values in one and the output have them.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if _KIND.search(kind) or _KIND.search(kind.lower()):
            if any(True for _ in module.parameters()):
                yield name, module
        elif _has_roles(module) or _has_sizes(module):
            yield name, module


def _has_roles(module: nn.Module) -> bool:
    names = [
        name
        for name, part in (*module._modules.items(), *module._parameters.items())
        if _has_matrix(part)
    ]
    if any(_ALL_THREE.search(name) for name in names):
        return True
    queries, keys, values = ({name for name in names if role.search(name)} for role in _ROLES)
    both = {name for name in names if _KEYS_VALUES.search(name)}
    if queries and both - queries:
        return True
    return bool(queries and keys and values) and len(queries | keys | values) >= len(_ROLES)


def _has_matrix(part: nn.Module | Tensor | None) -> bool:
    """Whether a part can be a projection: norms and biases bear the names of queries and keys,
    too."""
    tensors = part.parameters() if isinstance(part, nn.Module) else [] if part is None else [part]
    return any(tensor.ndim > 1 for tensor in tensors)


def _has_sizes(module: nn.Module) -> bool:
    """Whether a part maps some width to three times as much, another one keeps that width, and
    nothing else is there that mixes features: no second half of a feed-forward layer, no
    convolution."""
    sizes = {_features(part) for part in module._modules.values() if _has_matrix(part)}
    return any(sizes == {(n, 3 * n), (n, n)} for n, _ in sizes if n)


def _features(part: nn.Module | None) -> tuple[int, int]:
    """Features in and out of a linear layer; zeros for everything else."""
    if is_conv1d(part):
        return int(part.nx), int(part.nf)  # type: ignore[union-attr, arg-type]
    return (part.in_features, part.out_features) if isinstance(part, nn.Linear) else (0, 0)


def _parts(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_children() if any(True for _ in part.parameters())]


def closest_reason(module: nn.Module, layouts: Iterable[AttentionLayout]) -> str:
    """What a module lacks for the layout that it is nearest to, if one finds most of what it needs
    there.

    Nearest is the layout with the largest share of its needs; of equals the one with most slabs,
    then the one with least that must not be there.
    """

    def missing(layout: AttentionLayout) -> list[str]:
        return [p for p in (*layout.requires, *_slabs(layout)) if lookup(module, p) is None]

    def nearness(layout: AttentionLayout) -> tuple[float, int, int, int]:
        slabs, without = _slabs(layout), missing(layout)
        share = 1 - len(without) / len((*slabs, *layout.requires))
        odd = sum(
            lookup(module, path) is not None and lookup(module, path) is not False
            for path in layout.absent
        )
        return share, sum(path not in without for path in slabs), -odd, -len(layout.requires)

    best = max(layouts, key=nearness)
    share, n_slabs, *_ = nearness(best)
    if share <= 0.5 or n_slabs <= len(_slabs(best)) / 2:
        return f"near to no layout, made of {', '.join(_parts(module)) or 'parameters alone'}"
    lacks = missing(best)
    reason = f"it has no {', '.join(map(repr, lacks))}" if lacks else reason_against(best, module)
    return f"nearest layout {best.name!r}: {reason}"


def not_taken(
    model: nn.Module, taken: Collection[str], layouts: Iterable[AttentionLayout]
) -> tuple[NotTaken, ...]:
    """Attention-like modules apart from those at the names ``taken``, where no layout fits; alike
    ones together.

    What lies inside of a module that is taken, or around one, is none of its own.
    """
    layouts = list(layouts)
    inside = tuple(f"{name}." if name else "" for name in taken)
    around = {name[:end] for name in taken for end in range(len(name)) if name[end] == "."} | (
        {""} if taken else set()
    )
    found: dict[tuple[str, str], list[str]] = {}
    for name, module in attention_like(model):
        if name in taken or name in around or name.startswith(inside):
            continue
        if all(reason_against(layout, module) is not None for layout in layouts):
            found.setdefault((type(module).__name__, closest_reason(module, layouts)), []).append(
                name
            )
    return tuple(NotTaken(tuple(names), kind, reason) for (kind, reason), names in found.items())


def _slabs(layout: AttentionLayout) -> list[str]:
    return [s.path for s in layout.slabs if not s.optional]


def nothing_found(model: nn.Module, layouts: list[AttentionLayout]) -> UnsupportedModel:
    """The error for a model without sites."""
    seen = list(attention_like(model))
    lines = [
        f"{n or 'the model itself'} ({type(m).__name__}; {closest_reason(m, layouts)})"
        for n, m in seen[:_LISTED]
    ]
    more = f" and {len(seen) - _LISTED} more" if len(seen) > _LISTED else ""
    got = (
        f"attention-like modules that fit no layout: {'; '.join(lines)}{more}"
        if seen
        else "no attention-like module"
    )
    hint = (
        "Let headprune.propose_layouts(model, example) look for a layout and prove it, or describe"
        " your module with "
    )
    hint += "headprune.AttentionLayout; pass either as find_sites(model, layouts=[...])."
    if any(isinstance(m, nn.MultiheadAttention) for _, m in seen):
        hint += (
            " Or replace torch.nn.MultiheadAttention by"
            " headprune.MultiHeadAttention.from_torch(module)."
        )
    return UnsupportedModel(
        type(model).__name__, "a model with attention that headprune knows", got, hint
    )
