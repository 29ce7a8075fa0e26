"""Seeded noise: the baseline that any scorer must beat; needs no data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from headprune.scoring._base import Estimate, Scorer, ScoringProblem, units_per_site


@dataclass(frozen=True)
class Random(Scorer):
    """``I_h`` uniform in [0, 1), drawn from its own generator: torch's random state is kept.

    When: as the baseline that every other scorer must beat.

    Args:
        seed: Of the generator; the same seed gives the same scores.
    """

    seed: int = 0
    needs_data: ClassVar[bool] = False

    def estimate(self, problem: ScoringProblem) -> Estimate:
        generator = torch.Generator().manual_seed(self.seed)
        n_units = sum(units_per_site(problem.bound))
        values = torch.rand(n_units, generator=generator, dtype=torch.float64)
        return Estimate(values, seed=self.seed)
