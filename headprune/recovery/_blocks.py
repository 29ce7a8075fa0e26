"""Finds the layers of a model that contain its attention and pass on the residual stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from headprune.core.heads import AttentionSite, Kind
from headprune.model.contexts import kind_of_queries, tokens_first
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
        batch_axis: The axis of the examples in its states.
    """

    name: str
    module: nn.Module
    kind: Kind
    batch_axis: int


def blocks_of(model: nn.Module, sites: Iterable[AttentionSite] | None) -> list[Block]:
    """Return the layers with attention, in model order, each once.

    A site's layer is a callable item of a ``ModuleList`` or ``Sequential`` around the site. If
    there are several, it is the outermost one of a list where several items contain sites; else
    the outermost one. If there is none, it is the attention itself.

    Raises:
        UnsupportedModel: no site is found.

    >>> from headprune import MultiHeadAttention
    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(MultiHeadAttention(8, 2))])})
    >>> [block.name for block in blocks_of(model, None)]
    ['layers.0']
    """
    return blocks_around(model, bind(model, sites))


def blocks_around(model: nn.Module, bound: Sequence[BoundSite]) -> list[Block]:
    """Return the layers around these sites; see ``blocks_of``."""
    # 1. Count the items with sites by the list that contains them.
    items_around = {b.site.name: _items_around(model, b.site.name) for b in bound}
    items: set[str] = set()
    items.update(*items_around.values())
    n_items = Counter(_parent(item) for item in items)

    # 2. Choose an item per site.
    blocks: dict[str, Block] = {}
    for b in bound:
        names = items_around[b.site.name]
        repeated = [name for name in names if n_items[_parent(name)] > 1]
        name = [*repeated, *names, b.site.name][0]
        # A layer may have several attentions; the first kind other than "self" counts.
        kind = kind_of_queries(b)
        if name in blocks and blocks[name].kind != "self":
            kind = blocks[name].kind
        blocks[name] = Block(name, model.get_submodule(name), kind, int(tokens_first(b)))
    return list(blocks.values())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _items_around(model: nn.Module, site: str) -> list[str]:
    """Return the callable items of lists that contain a site, outermost first."""
    parts = site.split(".") if site else []
    items = []
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        container = model.get_submodule(_parent(name))
        is_item = isinstance(container, (nn.ModuleList, nn.Sequential))
        if is_item and not isinstance(model.get_submodule(name), _LISTS):
            items.append(name)
    return items
