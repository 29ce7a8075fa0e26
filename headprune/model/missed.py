"""Attention that no layout takes: which modules a person would call attention, and what each of them lacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

from headprune.core.errors import UnsupportedModel
from headprune.core.layout import AttentionLayout
from headprune.model.fit import lookup, reason_against

_LISTED = 8
_ROLES = tuple(
    re.compile(rf"(^|_)w?({letter}|{word})(_|\d|$)", re.IGNORECASE)
    for letter, word in (("q", "query|queries"), ("k", "keys?"), ("v", "values?"))
)


def attention_like(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that a person would call attention: by their class name, with parameters, or by three parts with
    parameters that are named like queries, keys and values."""
    for name, module in model.named_modules():
        if "attention" in type(module).__name__.lower():
            if any(True for _ in module.parameters()):
                yield name, module
        elif _has_roles(module):
            yield name, module


def _has_roles(module: nn.Module) -> bool:
    found = [{n for n in _parts(module) if role.search(n)} for role in _ROLES]
    return all(found) and len(set.union(*found)) >= len(_ROLES)


def _parts(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_children() if any(True for _ in part.parameters())]


def closest_reason(module: nn.Module, layouts: Iterable[AttentionLayout]) -> str:
    """What a module lacks for the layout that it is nearest to, if one finds most of what it needs there.

    Nearest is the layout with the largest share of its needs; of equals the one with most slabs, then the one with
    least that must not be there.
    """

    def missing(layout: AttentionLayout) -> list[str]:
        return [p for p in (*layout.requires, *_slabs(layout)) if lookup(module, p) is None]

    def nearness(layout: AttentionLayout) -> tuple[float, int, int, int]:
        slabs, without = _slabs(layout), missing(layout)
        share = 1 - len(without) / len((*slabs, *layout.requires))
        odd = sum(lookup(module, path) is not None and lookup(module, path) is not False for path in layout.absent)
        return share, sum(path not in without for path in slabs), -odd, -len(layout.requires)

    best = max(layouts, key=nearness)
    share, n_slabs, *_ = nearness(best)
    if share <= 0.5 or n_slabs <= len(_slabs(best)) / 2:
        return f"near to no layout, made of {', '.join(_parts(module)) or 'parameters alone'}"
    lacks = missing(best)
    reason = f"it has no {', '.join(map(repr, lacks))}" if lacks else reason_against(best, module)
    return f"nearest layout {best.name!r}: {reason}"


def _slabs(layout: AttentionLayout) -> list[str]:
    return [s.path for s in layout.slabs if not s.optional]


def nothing_found(model: nn.Module, layouts: list[AttentionLayout]) -> UnsupportedModel:
    """The error for a model without sites."""
    seen = list(attention_like(model))
    lines = [f"{n or 'the model itself'} ({type(m).__name__}; {closest_reason(m, layouts)})" for n, m in seen[:_LISTED]]
    more = f" and {len(seen) - _LISTED} more" if len(seen) > _LISTED else ""
    got = f"attention-like modules that fit no layout: {'; '.join(lines)}{more}" if seen else "no attention-like module"
    hint = "Let headprune.propose_layouts(model, example) look for a layout and prove it, or describe your module with "
    hint += "headprune.AttentionLayout; pass either as find_sites(model, layouts=[...])."
    if any(isinstance(m, nn.MultiheadAttention) for _, m in seen):
        hint += " Or replace torch.nn.MultiheadAttention by headprune.MultiHeadAttention.from_torch(module)."
    return UnsupportedModel(type(model).__name__, "a model with attention that headprune knows", got, hint)
