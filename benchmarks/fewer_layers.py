"""A smaller architecture that is about as fast as a cut model: one that can be trained instead.

It keeps the first layers of the weights that the base model had before its fine-tuning, as many as
the speed pays for. The feed-forwards of these layers are narrowed until the speed is met; of each
the neurons of the largest weights are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

import headprune as hp
from headprune.core.errors import InfeasibleBudget
from headprune.core.latency import LatencyTable
from headprune.data.models import build_model
from headprune.model.running import device_of
from headprune.run.subject import Subject


def layer_seconds(
    model: nn.Module, table: LatencyTable, ratio: Callable[[nn.Module], float]
) -> float:
    """Seconds of one layer, with the norms and additions that go with it.

    Args:
        model: The base model.
        table: Its latency table.
        ratio: Measures how many times as fast a model is as the base model.
    """
    single = copy.deepcopy(model)
    n_layers = len(_layers(single))
    first_layers_(single, 1)
    return (table.whole - table.whole / ratio(single)) / (n_layers - 1)


def fewer_layers(subject: Subject, table: LatencyTable, layer: float, asked: float) -> nn.Module:
    """The untrained smaller model, predicted to be ``asked`` times as fast as the base model.

    Args:
        subject: The base model and its recipe.
        table: Its latency table.
        layer: Seconds of one of its layers.
        asked: The speed.

    Raises:
        InfeasibleBudget: not even one layer with its narrowest feed-forward is so fast.
    """
    n_layers, n_neurons = shape(table, len(_layers(subject.model)), layer, asked)
    labels = list(subject.model.config.id2label.values())
    small = build_model(subject.recipe, labels, subject.preparation).to(device_of(subject.model))
    first_layers_(small, n_layers)
    sites = hp.find_sites(small, feed_forward=True)
    # The magnitude reads the weights alone.
    scores = hp.score(small, [subject.example], "magnitude", sites=sites, progress=False)
    keep = {}
    for site, values in zip(scores.sites, scores.values, strict=True):
        best = sorted(site.heads, key=lambda unit: -values[unit])
        keep[site.name] = sorted(best[:n_neurons]) if site.is_feed_forward else list(site.heads)
    counts = {site.name: site.n_query_heads for site in sites}
    hp.prune_(small, hp.HeadMask.from_keep(keep, counts), sites=sites)
    return small


def shape(table: LatencyTable, n_layers: int, layer: float, asked: float) -> tuple[int, int]:
    """The most layers that are fast enough, and the most neurons of each.

    Args:
        table: Of a model whose layers are alike.
        n_layers: Its layers.
        layer: Seconds of one of them.
        asked: The speed.

    >>> from headprune.core.latency import LatencyTable, SiteLatency
    >>> rows = [SiteLatency(f"attention {i}", (0.0, 1.0)) for i in range(4)]
    >>> rows += [SiteLatency(f"feed-forward {i}", (0.0, 0.5, 1.0), neurons=True) for i in range(4)]
    >>> table = LatencyTable(8.0, tuple(rows), 8, 128, "CPU", "float32")
    >>> [shape(table, 4, 2.0, asked) for asked in (1.0, 2.0, 2.3, 3.0)]
    [(4, 2), (2, 2), (2, 1), (1, 2)]
    """
    feed_forward = next(row for row in table.sites if row.neurons)
    outside = table.whole - n_layers * layer
    for kept in range(n_layers, 0, -1):
        # What a layer may take, above what is beside its feed-forward.
        most = (table.whole / asked - outside) / kept - (layer - feed_forward.whole)
        widths = [
            n
            for n, seconds in enumerate(feed_forward.seconds)
            if n and seconds is not None and seconds <= most * (1 + 1e-9)
        ]
        if widths:
            return kept, max(widths)
    must = "met by one layer with its narrowest feed-forward"
    raise InfeasibleBudget("A smaller architecture", must, f"{asked:g} times the speed")


def _layers(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def first_layers_(model: Any, n_layers: int) -> None:
    """Keep the first layers."""
    del _layers(model)[n_layers:]
    model.config.num_hidden_layers = n_layers
