"""The layers of a model that hold its attention: what a residual stream passes through, one after
the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from headprune.core.heads import AttentionSite, Kind
from headprune.model.contexts import tokens_first
from headprune.model.sites import BoundSite, bind

#: Containers that are not called themselves.
_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Block:
    """One layer.

    Args:
        name: Its qualified name.
        module: The module.
        kind: Of its attention; that of a decoder that also attends to an encoder is not ``self``.
        batch_axis: Where its states have the examples.
    """

    name: str
    module: nn.Module
    kind: Kind
    batch_axis: int


def blocks_of(model: nn.Module, sites: Iterable[AttentionSite] | None) -> list[Block]:
    """The layers with attention, in model order, each once.

    A site's layer is an item of a ``ModuleList`` or ``Sequential`` around it that can be called: of
    the outermost one that has several items with sites, or else of the outermost one. The attention
    itself where there is none.

    Raises:
        UnsupportedModel: no site is found.

    >>> from headprune import MultiHeadAttention
    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(MultiHeadAttention(8, 2))])})
    >>> [block.name for block in blocks_of(model, None)]
    ['layers.0']
    """
    return blocks_around(model, bind(model, sites))


def blocks_around(model: nn.Module, bound: Sequence[BoundSite]) -> list[Block]:
    """See ``blocks_of``."""
    around = {b.site.name: _items_around(model, b.site.name) for b in bound}
    items = {item for names in around.values() for item in names}
    rows = Counter(item.rpartition(".")[0] for item in items)
    found: dict[str, Block] = {}
    for b in bound:
        names = around[b.site.name]
        name = next(
            (n for n in names if rows[n.rpartition(".")[0]] > 1), names[0] if names else b.site.name
        )
        before = found.get(name)
        kind = b.site.kind if before is None or before.kind == "self" else before.kind
        found[name] = Block(name, model.get_submodule(name), kind, int(tokens_first(b)))
    return list(found.values())


def _items_around(model: nn.Module, site: str) -> list[str]:
    """Items of lists that hold a site, outermost first."""
    parts = site.split(".") if site else []
    found = []
    for end in range(1, len(parts)):
        parent, here = (model.get_submodule(".".join(parts[:n])) for n in (end - 1, end))
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and not isinstance(here, _LISTS):
            found.append(".".join(parts[:end]))
    return found
