"""A smaller architecture that is as fast as a cut model: what anyone could train instead.

It keeps the first layers of the weights that the base model had before its fine-tuning, as many as
the speed pays for, rounded up; the feed-forwards of these layers are narrowed until it is met. Of
each the neurons of the largest weights are kept.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

import headprune as hp
from headprune.core.errors import InfeasibleBudget
from headprune.core.latency import LatencyTable
from headprune.data.models import build_model
from headprune.run.subject import Subject


def fewer_layers(subject: Subject, table: LatencyTable, asked: float) -> nn.Module:
    """The untrained smaller model, predicted to be ``asked`` times as fast as the base model.

    Raises:
        InfeasibleBudget: not even one layer with its narrowest feed-forward is so fast.
    """
    n_layers, n_neurons = shape(table, asked)
    labels = list(subject.model.config.id2label.values())
    small: Any = build_model(subject.recipe, labels, subject.preparation)
    stack = next(module for module in small.modules() if isinstance(module, nn.ModuleList))
    del stack[n_layers:]
    small.config.num_hidden_layers = n_layers
    sites = hp.find_sites(small, feed_forward=True)
    scores = hp.score(small, [subject.example], "magnitude", sites=sites, progress=False)
    keep = {}
    for site, values in zip(scores.sites, scores.values, strict=True):
        best = sorted(site.heads, key=lambda unit: -values[unit])
        keep[site.name] = sorted(best[:n_neurons]) if site.is_feed_forward else list(site.heads)
    counts = {site.name: site.n_query_heads for site in sites}
    hp.prune_(small, hp.HeadMask.from_keep(keep, counts), sites=sites)
    return small


def shape(table: LatencyTable, asked: float) -> tuple[int, int]:
    """Layers, and the neurons of each, by the times of a model whose layers are alike.

    >>> from headprune.core.latency import LatencyTable, SiteLatency
    >>> rows = [SiteLatency(f"attention {i}", (0.0, 1.0)) for i in range(4)]
    >>> rows += [SiteLatency(f"feed-forward {i}", (0.0, 0.5, 1.0), neurons=True) for i in range(4)]
    >>> table = LatencyTable(8.0, tuple(rows), 8, 128, "CPU", "float32")
    >>> shape(table, 1.0), shape(table, 2.0), shape(table, 2.3)
    ((4, 2), (2, 2), (2, 1))
    """
    attention = next(row for row in table.sites if not row.neurons)
    feed_forward = next(row for row in table.sites if row.neurons)
    n_layers = sum(not row.neurons for row in table.sites)
    layer = attention.whole + feed_forward.whole
    # What is outside of the layers stays.
    budget = table.whole / asked - (table.whole - n_layers * layer)
    kept = math.ceil(budget / layer - 1e-9)
    most = budget / kept - attention.whole if kept > 0 else 0.0
    widths = [
        n
        for n, seconds in enumerate(feed_forward.seconds)
        if n and seconds is not None and seconds <= most * (1 + 1e-9)
    ]
    if not widths:
        must = "met by one layer with its narrowest feed-forward"
        got = f"{asked:g} times the speed"
        raise InfeasibleBudget("A smaller architecture", must, got)
    return kept, max(widths)
