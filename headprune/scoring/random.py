"""Seeded noise: the baseline that any scorer must beat; needs no data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from headprune.core.levels import LEVELS
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, units_per_site


@dataclass(frozen=True)
class Random(Scorer):
    """``I_h`` uniform in [0, 1), drawn from its own generator: torch's random state is kept.

    That of a neuron is divided by the neurons of a level, so that a level counts like a head.

    When: as the baseline that every other scorer must beat.

    Args:
        seed: Of the generator; the same seed gives the same scores.
    """

    seed: int = 0
    needs_data: ClassVar[bool] = False

    def estimate(self, problem: ScoringProblem) -> Estimate:
        generator = torch.Generator().manual_seed(self.seed)
        counts = units_per_site(problem.bound)
        values = torch.rand(sum(counts), generator=generator, dtype=torch.float64)
        for b, of_site in zip(problem.bound, values.split(counts), strict=True):
            if b.layout.is_feed_forward:
                of_site /= max(1.0, len(of_site) / LEVELS)
        return Estimate(values, seed=self.seed)
