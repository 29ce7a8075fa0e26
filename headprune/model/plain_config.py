"""Checkpoints that Transformers loads by itself, with the head counts in the configuration.

Whether a family can is tried: a configuration with the new counts is built, then the class without
memory for its weights, and every tensor must have the cut model's shape. ``proof.py`` proves that
the code computes the same with them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from headprune.attention.kept_heads import weights_of
from headprune.core.errors import UnsupportedModel
from headprune.core.slabs import HeadGeometry
from headprune.model.building import fresh, is_known
from headprune.model.sites import BoundSite

#: Names of head counts in configurations.
_QUERY = (
    "num_attention_heads",
    "num_heads",
    "n_head",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_KEY_VALUE = ("num_key_value_heads", "num_kv_heads")
#: Names of the number of neurons of a feed-forward.
_NEURONS = (
    "intermediate_size",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "hidden_dim",
    "d_ff",
    "n_inner",
    "ffn_hidden_size",
    "d_inner",
    "dff",
)
_WHERE = "format 'transformers'"


def config_of_cut(model: nn.Module, bound: list[BoundSite]) -> Any:
    """A configuration from which the model's class has exactly the tensors of the cut model.

    Raises:
        UnsupportedModel: there is none; the message says why.
    """
    kind = type(model).__name__
    if not is_known(model):
        raise UnsupportedModel(_WHERE, "for a class of Transformers", kind)
    for b in bound:
        name = b.site.name
        if not b.site.heads:
            unit = "neurons" if b.layout.is_feed_forward else "a head"
            must = f"for a model with {unit} in every layer"
            raise UnsupportedModel(_WHERE, must, f"none kept in {name}")
        kv_of = b.site.geometry.kv_of
        if kv_of is not None:
            must = "for query heads that share key/value heads evenly"
            raise UnsupportedModel(_WHERE, must, f"{name} with key/value heads {kv_of}")
    # The reason of the first try is the one to report.
    reasons = []
    # Some families compute a head's width from the counts, unless it is set.
    for with_width in (False, True):
        config: Any = copy.deepcopy(model.config)
        try:
            for section, sites in _sections(model, config, bound):
                _set_counts(section, sites, with_width)
            config = type(config).from_dict(config.to_dict())  # what a reader of the file gets
            differing = differing_shapes(fresh(model, config), model)
        except UnsupportedModel:
            raise
        # A configuration's validators, and constructors, may raise anything.
        except Exception as error:
            reasons.append(f"{type(config).__name__} refuses them: {' '.join(str(error).split())}")
            continue
        if not differing:
            return config
        reasons.append(f"with these counts {kind} would have {differing[0]}")
    raise UnsupportedModel(_WHERE, "for a cut that the configuration can state", reasons[0])


def differing_shapes(built: nn.Module | None, model: nn.Module) -> list[str]:
    """Tensors of a new model that differ from the cut model's, as text."""
    assert built is not None
    theirs = {name: list(t.shape) for name, t in weights_of(built).items()}
    own = {name: list(t.shape) for name, t in weights_of(model).items()}
    differing = []
    for name in {**own, **theirs}:
        if theirs.get(name) != own.get(name):
            shapes = f"{theirs.get(name, 'missing')}, not {own.get(name, 'at all')}"
            differing.append(f"{name} {shapes}")
    return differing


def _sections(
    model: Any, config: Any, bound: list[BoundSite]
) -> Iterator[tuple[Any, list[BoundSite]]]:
    """Parts of a configuration, with the sites that each describes.

    A model of text and images has a part for each.

    Args:
        model: The model.
        config: A copy of its configuration, whose parts are returned.
        bound: The model's sites.
    """
    paths = {id(section): path for path, section in _parts(model.config)}
    sites_at: dict[tuple[str, ...], list[BoundSite]] = {}
    for b in bound:
        # The first part of the configuration that the attention or a module in it holds.
        path: tuple[str, ...] = ()
        for module in b.module.modules():
            held = id(getattr(module, "config", None))
            if held in paths:
                path = paths[held]
                break
        sites_at.setdefault(path, []).append(b)
    # The same parts of the copy.
    for path, sites in sites_at.items():
        section = config
        for name in path:
            section = getattr(section, name)
        yield section, sites


def _parts(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every part of a configuration, with the names that lead to it."""
    yield path, config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            yield from _parts(part, (*path, name))


def _set_counts(section: Any, sites: list[BoundSite], with_width: bool) -> None:
    """Set the counts of heads and of neurons in a part of a configuration."""
    neurons = [b for b in sites if b.layout.is_feed_forward]
    if neurons:
        _set_neurons(section, neurons)
    heads = [b for b in sites if not b.layout.is_feed_forward]
    if heads:
        _set_heads(section, heads, with_width)


def _set_neurons(section: Any, sites: list[BoundSite]) -> None:
    # All are read before any is set, because a configuration may have one value under two names.
    values = {}
    for name in _NEURONS:
        described = _described_by(section, name, sites, "n_query_heads")
        if described:
            values[name] = _number_of_neurons(described)
    # GPT-2's is None where it is four times the width.
    if not values and getattr(section, "n_inner", 0) is None:
        values["n_inner"] = _number_of_neurons(sites)
    for name, value in values.items():
        setattr(section, name, value)


def _described_by(section: Any, name: str, sites: list[BoundSite], count: str) -> list[BoundSite]:
    """The sites that a setting is of: its value is their ``count`` before the cut."""
    whole = getattr(section, name, None)
    return [b for b in sites if getattr(b.site, count) == whole and _describes(name, b.site.name)]


def _describes(name: str, site: str) -> bool:
    """Whether a setting is of this site: an encoder's is of no site in the decoder.

    >>> _describes("encoder_ffn_dim", "model.decoder.layers.0"), _describes("d_ff", "decoder.0")
    (False, True)
    """
    side = name.partition("_")[0]
    others = {"encoder": "decoder", "decoder": "encoder"}
    return others.get(side) not in site.split(".")


def _number_of_neurons(sites: list[BoundSite]) -> int:
    counts = [len(b.site.heads) for b in sites]
    for count in counts:
        if count != counts[0]:
            must = "for the same number of neurons in every layer"
            got = f"layers with {counts[0]} and {count} neurons"
            raise UnsupportedModel(_WHERE, must, got)
    return counts[0]


def _set_heads(section: Any, sites: list[BoundSite], with_width: bool) -> None:
    if not any(map(_lost_heads, sites)):
        return
    # Only names whose value is the full model's count. All are read before any is set, because a
    # configuration may have one value under two names.
    values = {}
    for names, count in ((_QUERY, "n_query_heads"), (_KEY_VALUE, "n_kv_heads")):
        for name in names:
            described = _described_by(section, name, sites, count)
            if described:
                values[name] = getattr(_geometry_of_all(described), count)
    if with_width:
        values["head_dim"] = sites[0].site.head_dim
    for name, value in values.items():
        setattr(section, name, value)


def _lost_heads(b: BoundSite) -> bool:
    geometry = b.site.geometry
    whole = (b.site.n_query_heads, b.site.n_kv_heads)
    return (geometry.n_query_heads, geometry.n_kv_heads) != whole


def _geometry_of_all(sites: list[BoundSite]) -> HeadGeometry:
    """The present heads of sites that all keep the same numbers."""
    counts = {(b.site.geometry.n_query_heads, b.site.geometry.n_kv_heads) for b in sites}
    if len(counts) > 1:
        each = ", ".join(str(len(b.site.heads)) for b in sites)
        must = "for the same number of heads in every layer"
        raise UnsupportedModel(_WHERE, must, f"layers with {each} heads")
    return sites[0].site.geometry
