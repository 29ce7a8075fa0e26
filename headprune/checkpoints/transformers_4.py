"""Load a folder of Transformers 4 whose heads were cut by its ``prune_heads``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from headprune.checkpoints.cut_class import filled_by_transformers
from headprune.checkpoints.foreign import check_folder, check_weights
from headprune.core.errors import CheckpointError
from headprune.core.heads import without
from headprune.core.opening import read_text
from headprune.model.classes import class_named
from headprune.model.cut import cut_
from headprune.model.sites import bind, find_sites

_KEY = "pruned_heads"


def pruned_heads(folder: Path) -> dict[int, tuple[int, ...]]:
    """The removed heads by layer, as a folder's configuration states them; empty without any.

    Raises:
        CheckpointError: ``pruned_heads`` that are no lists of heads by layer.
    """
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(read_text(path))
    except ValueError:
        return {}  # the reader of the configuration has a better error
    pruned = config.get(_KEY) if isinstance(config, dict) else None
    if not pruned:
        return {}
    removed = {}
    try:
        for layer, heads in pruned.items():
            if heads:
                removed[int(layer)] = tuple(sorted(set(map(int, heads))))
    except (AttributeError, TypeError, ValueError) as error:
        must = "lists of removed heads by layer, as Transformers 4 wrote them"
        raise CheckpointError(f"{path}: {_KEY}", must, repr(pruned)[:100]) from error
    return removed


def opened(folder: Path) -> nn.Module:
    """The cut model of such a folder, in evaluation mode, with its heads' original indices.

    Transformers 5 builds every layer whole. So the class is built, cut as the configuration says,
    and filled.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: no class of Transformers, layers or heads that the model does not have, or
            weights that do not fit the cut model.
    """
    # 1. The class.
    check_folder(folder)
    heads = pruned_heads(folder)
    names = json.loads(read_text(folder / "config.json")).get("architectures") or [""]
    kind: Any = class_named(str(names[0]))
    if kind is None:
        must = "a model of a class of Transformers"
        raise CheckpointError(str(folder), must, f"architectures {names}")
    check_weights(kind, folder)

    # 2. Transformers fills it.
    config = kind.config_class.from_pretrained(folder)
    config.__dict__.pop(_KEY, None)
    what = f"all weights of a {kind.__name__} without heads {heads}"
    return filled_by_transformers(
        kind, config, folder, lambda model: _cut_(model, heads, folder), what
    )


def _cut_(model: nn.Module, heads: Mapping[int, tuple[int, ...]], folder: Path) -> None:
    """Cut a model that was just built."""
    where = f"{folder / 'config.json'}: {_KEY}"
    sites = find_sites(model)
    # Transformers 4 counted the layers of self-attention.
    layers = [site for site in sites if site.kind != "cross"]
    removed = {}
    for layer, layer_heads in heads.items():
        if not 0 <= layer < len(layers):
            must = f"of the {len(layers)} layers of the model"
            raise CheckpointError(where, must, f"layer {layer}")
        site = layers[layer]
        unknown = sorted(set(layer_heads) - set(site.heads))
        if unknown:
            must = f"heads of layer {layer}, {list(site.heads)}"
            raise CheckpointError(where, must, unknown[0])
        removed[site.name] = layer_heads
    cut_(model, bind(model, sites), without(sites, removed))
