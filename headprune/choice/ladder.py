"""Measure how much the loss rises when one site alone keeps fewer units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headprune import scoring
from headprune.choice._meter import (
    TEMPERATURE,
    Meter,
    check_projections,
    check_settings,
    two_parts,
)
from headprune.choice._scores import as_scores
from headprune.core.bars import bar
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite
from headprune.core.ladders import SiteLadder
from headprune.model.transfers import in_main_memory
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.selection._units import bundled, in_rank

#: Prices of fewer rows come with a note.
_FEW = 32


@dataclass(frozen=True)
class Ladder(Scorer):
    """``KL(whole model || model)`` in nats, one site alone cut to each of its levels and refitted.

    A level is how many heads or neurons a site keeps: any number of heads, or one of about twelve
    widths; the best by ``order``. Least squares over all rows predicts what removed units would
    write; prices are measured on half. Your own loss replaces KL. Values are those of ``order``;
    ``scores.ladders`` has the prices.

    A softmax saturated on training rows hides changes: outputs are divided by a temperature, KL is
    multiplied by its square (Hinton et al. 2015, section 2).

    Source: ZipLM (Kurtic et al. 2023, section 3.2) prices levels by a layer's own error.

    When: heads and neurons share one budget, above all ``Budget(speedup=)``.
    Cost: the other scorer's, a pass, and per level a pass over ``examples`` rows that begins at its
    site. Memory: ``width ** 2`` numbers per site. Where logits exceed a gigabyte, fewer positions
    are compared.

    Args:
        order: The registered scorer that ranks the units of a site.
        order_settings: Its settings.
        examples: The most rows that rises are measured on.
        ridge: As ``Lstsq.ridge``, but never None.
        temperature: Divides the outputs; 1 compares the model's own distributions.
    """

    order: str = "surgeon"
    order_settings: Mapping[str, Any] = EMPTY
    examples: int = 256
    ridge: float = 0.3
    temperature: float = TEMPERATURE

    def __post_init__(self) -> None:
        object.__setattr__(self, "order_settings", FrozenDict(self.order_settings))
        if self.order in ("auto", "ladder"):
            must = "the name of a scorer other than auto and ladder"
            raise InvalidValue("Ladder.order", must, repr(self.order))
        check_settings("Ladder", self.examples, self.ridge, self.temperature)
        self.ranker()  # refuses unknown names and settings

    def ranker(self) -> Scorer:
        """The scorer that ranks the units."""
        settings = self.order_settings
        scorer: Scorer = scoring.registry.configured(self.order, settings, "Ladder.order_settings")
        return scorer

    @property
    def by_example(self) -> bool:
        return False

    @property
    def scores_neurons(self) -> bool:
        """Whether the scorer that ranks the units does."""
        return self.ranker().scores_neurons

    def estimate(self, problem: ScoringProblem) -> Estimate:
        """Rank the units of every site, and measure the rise at each of its levels.

        Raises:
            InvalidValue: outputs that are no logits, or what the other scorer refuses.
            UnsupportedModel: an attention without an output projection.
        """
        check_projections(problem.bound)
        problem.keep_batches()
        folds = two_parts(problem)
        # 1. Rank the units.
        ranker = self.ranker()
        # Scorers that read the same share a pass.
        problem.scorers = (*problem.scorers, ranker)
        estimate = ranker.estimate(problem)
        sites = _with_levels(problem, estimate)

        # 2. Measure the rises; processes share the sites.
        with torch.no_grad():
            meter = Meter(problem, folds, self.examples, self.ridge, self.temperature)
            own = range(problem.workers.rank, len(sites), problem.workers.size)

            def of_own_sites() -> dict[str, Tensor]:
                rises = {}
                for number in bar(own, "prices of levels", problem.progress):
                    levels = _levels(sites[number])
                    rises[str(number)] = _rises(meter, number, levels)
                return rises

            measured: dict[str, Tensor] = {}
            for part in problem.gathered("prices of levels", of_own_sites):
                measured.update(part)
        ladders = []
        for number, site in enumerate(sites):
            kept = tuple(map(len, _levels(site)))
            rises = measured[str(number)].tolist()
            _check_finite(site, kept, rises)
            ladders.append(SiteLadder(site.name, kept, _monotone(rises)))
        notes = (*estimate.notes, *_few_rows(folds.size))
        # Of the prices: a scorer that ranks by weights alone has seen no example.
        return replace(estimate, ladders=tuple(ladders), notes=notes, n_examples=folds.size)


def _few_rows(n_examples: int) -> list[str]:
    if n_examples >= _FEW:
        return []
    return [
        f"Prices of levels come out too low on few rows ({n_examples}): predictions are fitted on"
        " the rows that they are measured on."
    ]


def _rises(meter: Meter, number: int, levels: Sequence[tuple[int, ...]]) -> Tensor:
    """``[levels]``: the mean rise at each level of one site, from the fewest units to all.

    Args:
        meter: Measures.
        number: The site's number.
        levels: Heads or neurons kept at each level, best first.
    """
    if number not in meter.sums:  # without heads
        return torch.zeros(len(levels), dtype=torch.float64)
    rises = []
    for heads in levels[:-1]:
        prediction = meter.prediction(number, heads)
        rises.append(meter.rises({number: prediction}).mean())
    # All in one copy; with every unit nothing rises.
    return torch.tensor([*map(float, in_main_memory(rises)), 0.0], dtype=torch.float64)


def _with_levels(problem: ScoringProblem, estimate: Estimate) -> tuple[AttentionSite, ...]:
    """The sites with the units that a selector decides on: heads, bundles, levels of neurons."""
    ranked = bundled(as_scores(problem, "", estimate))
    sites = []
    for site, row in zip(ranked.sites, ranked.values, strict=True):
        units = tuple(site.units[unit] for unit in in_rank(site, row))
        sites.append(replace(site, bundles=units))
    return tuple(sites)


def _levels(site: AttentionSite) -> list[tuple[int, ...]]:
    """The heads kept at each level, from none to all."""
    return list(accumulate(site.units, initial=()))


def _check_finite(site: AttentionSite, kept: Sequence[int], rises: Sequence[float]) -> None:
    """Refuse a level without a price.

    Raises:
        InvalidValue: names the level.
    """
    for count, rise in zip(kept, rises, strict=True):
        if not math.isfinite(rise):
            of_all = f"{count} of {len(site.heads)} {site.noun}s of {site.name}"
            where = f"the rise of the loss with {of_all}"
            hint = "The model overflows there: score it in float32, or with smaller inputs."
            raise InvalidValue(where, "finite", rise, hint)


def _monotone(rises: Sequence[float]) -> tuple[float, ...]:
    """Rises that never fall when fewer units are kept: noise must not pay for a removal."""
    highest = list(accumulate(reversed(rises), max))
    return tuple(reversed(highest))
