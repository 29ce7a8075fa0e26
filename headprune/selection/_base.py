"""What every selector is asked (Problem) and what it is (Selector)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from headprune.core.codec import FrozenDict
from headprune.core.plan import Budget
from headprune.core.scores import HeadScores

#: One prune unit: its site's place in ``HeadScores.sites`` and its own in ``AttentionSite.units``.
Position = tuple[int, int]


@dataclass(frozen=True)
class Problem:
    """A budget laid over scores, in whole numbers of one currency: heads, parameters, MACs or KV bytes a token.

    Args:
        scores: The scored units.
        budget: What the user asked for.
        costs: For every site, what each of its units costs.
        fixed: What the part of the model that no selector can remove costs.
        limit: The most that the kept units may cost, `fixed` taken off; negative where nothing can be kept.
    """

    scores: HeadScores
    budget: Budget
    costs: tuple[tuple[int, ...], ...]
    fixed: int
    limit: int

    def cost(self, keep: Iterable[Position]) -> int:
        """What these units cost together."""
        return sum(self.costs[site][unit] for site, unit in keep)

    def fits(self, keep: Iterable[Position]) -> bool:
        """Whether these units may all stay."""
        return self.cost(keep) <= self.limit

    @property
    def whole(self) -> int:
        """What the model costs now; fractions in a budget are fractions of this."""
        return self.fixed + sum(map(sum, self.costs))


class Selector(abc.ABC):
    """Chooses the units that stay. A concrete selector is a frozen dataclass of its settings, which are JSON data."""

    @abc.abstractmethod
    def keep(self, problem: Problem) -> frozenset[Position]:
        """The units that stay; `Problem.fits` holds for them.

        Raises:
            InfeasibleBudget: none of the choices that the settings allow fits.
        """

    @property
    def settings(self) -> FrozenDict:
        """The settings as they are written into the plan."""
        return FrozenDict({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})  # type: ignore[arg-type]
