"""SiteLadder: what the loss rises by when one site keeps fewer heads or neurons."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from headprune.core.errors import InvalidValue

#: Settings of ``ladder`` that ``refitted_loss_of`` shares, so that levels and whole plans are
#: measured alike.
PRICE_SETTINGS = ("examples", "ridge", "temperature")


@dataclass(frozen=True)
class SiteLadder:
    """What the loss rises by, the price, at each level of one site: a number of kept units.

    Args:
        site: The site's name.
        kept: Heads or neurons kept at each level, from the fewest to all that are present.
        rises: Per level, the mean over examples of what the model loses when this site alone keeps
            so many, its best ones, refitted: `temperature² · KL(whole model || model)` in nats, of
            a regression the squared difference, or the rise of a loss of your own. The last is 0.

    >>> ladder = SiteLadder("layer", (0, 64, 128), (0.5, 0.1, 0.0))
    >>> ladder.at(64), ladder.at(96)
    (0.1, 0.05)
    """

    site: str
    kept: tuple[int, ...]
    rises: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"ladder of {self.site}"
        ascending = all(a < b for a, b in zip(self.kept, self.kept[1:], strict=False))
        if not self.kept or not ascending or len(self.rises) != len(self.kept):
            must = "one rise per level, from the fewest kept to all"
            raise InvalidValue(where, must, (self.kept, self.rises))
        if not all(map(math.isfinite, self.rises)):
            raise InvalidValue(where, "of finite rises", self.rises)

    def at(self, count: int) -> float:
        """The rise with so many kept; between two measured levels, on the line between them."""
        if count <= self.kept[0]:
            return self.rises[0]
        if count >= self.kept[-1]:
            return self.rises[-1]
        upper = bisect_left(self.kept, count)
        if self.kept[upper] == count:
            return self.rises[upper]
        below, above = self.kept[upper - 1], self.kept[upper]
        share = (count - below) / (above - below)
        return self.rises[upper - 1] + share * (self.rises[upper] - self.rises[upper - 1])
