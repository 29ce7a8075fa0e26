"""The ground truth, measured by switching heads off, and how well a scorer's ranking agrees with
it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

import headprune as hp
from headprune import HeadId, HeadMask, HeadScores
from tests.known.induction import Batch, accuracy

#: A head whose removal alone costs more accuracy than this is necessary.
COST = 0.05


def heads_of(model: nn.Module) -> tuple[HeadId, ...]:
    """All heads in model order."""
    return tuple(HeadId(site.name, head) for site in hp.find_sites(model) for head in site.heads)


def only(model: nn.Module, kept: Collection[HeadId]) -> HeadMask:
    """The mask that keeps these heads and no other."""
    sites = hp.find_sites(model)
    keep = {site.name: [h.head for h in kept if h.site == site.name] for site in sites}
    return HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites})


def achieved(model: nn.Module, kept: Collection[HeadId], batch: Batch) -> float:
    """The accuracy with these heads and no other."""
    with hp.gated(model, only(model, kept)):
        return accuracy(model, batch)


def costs(model: nn.Module, batch: Batch) -> dict[HeadId, float]:
    """How much accuracy is lost when a head alone is switched off."""
    every, full = heads_of(model), accuracy(model, batch)
    return {head: full - achieved(model, [h for h in every if h != head], batch) for head in every}


def necessary(model: nn.Module, batch: Batch) -> tuple[HeadId, ...]:
    """The heads that cost more than COST."""
    return tuple(head for head, cost in costs(model, batch).items() if cost > COST)


def highest(scores: HeadScores, k: int) -> tuple[HeadId, ...]:
    """The k heads that a scorer would keep; ties as in ``select``."""
    return tuple(HeadId(unit.name, unit.heads[0]) for unit in scores.ranked()[-k:])


def recall(scores: HeadScores, wanted: Collection[HeadId]) -> float:
    """Share of the k wanted heads among the k highest; a head that ties with one too many counts as
    missed."""
    values = [unit.value for unit in scores.units()]
    found = [head for head in wanted if sum(v >= scores[head] for v in values) <= len(wanted)]
    return len(found) / len(wanted)
