"""Units of a site removed one after the other, the cheapest first, while the rest takes over; many
runs in one go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from headprune.model.transfers import sent
from headprune.scoring._activations import unit_columns
from headprune.scoring._factors import Factors
from headprune.scoring._inverse import inverted

#: Runs that go together take at most so many bytes; a single run takes what it needs.
AT_ONCE = 2**28
#: What a run takes at its peak, in matrices of ``width ** 2`` fp64 numbers: C, and to find A's
#: inverse.
MATRICES = 5
#: A's diagonal is at least this share of the contexts' mean square.
_ROUNDING = 1e-10


def removed(
    factors: Sequence[Factors], weights: Tensor, examples: Tensor, ridge: float
) -> list[Tensor]:
    """Removes all units of every site, the cheapest first, in several runs; Python looks at
    nothing.

    What goes at one site changes nothing at another, and a run is a choice of blocks. So runs, and
    sites of equal shape, go together, as far as there is room (``AT_ONCE``): fewer calls, and
    larger ones.

    Which unit goes is a number on the device, and picks its columns there: to bring A and C to the
    CPU instead would cost one wait, too, but the ``width ** 2`` multiply-adds of every channel are
    a GPU's work (at a width of 4096, some 4e11 a site in fp64).

    Args:
        factors: The sums of every site.
        weights: ``[runs, blocks]`` of 0 and 1, on the CPU: the blocks that a run counts.
        examples: ``[runs]``, on the CPU: how many examples are in those.
        ridge: Added to A's diagonal, as a share of its mean.

    Returns:
        For every site ``[runs, 2, units]``, on its device: units by number, in the order in which
        they go, and their prices; NaN where a matrix has no inverse.
    """
    sites = [_Site(f) for f in factors]
    found: list[list[Tensor]] = [[] for _ in factors]
    for jobs in _together(sites, len(weights)):
        c = _joined(
            [sites[site].slopes(weights[runs], examples[runs]) for site, runs in jobs.items()]
        )
        parts = [sites[site].inverses(weights[runs], ridge) for site, runs in jobs.items()]
        failed = torch.cat([part for _, part in parts])
        inverse = _joined([part for part, _ in parts])
        del parts
        orders = _in_order(inverse, c, failed, *sites[next(iter(jobs))].shape)
        for site, part in zip(
            jobs, orders.split([len(runs) for runs in jobs.values()]), strict=True
        ):
            found[site].append(part)
    return [torch.cat(parts) for parts in found]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _together(sites: Sequence[_Site], n_runs: int) -> Iterator[dict[int, list[int]]]:
    """Batches of runs, by number of the site: those of a batch have one device and one shape."""
    alike: dict[tuple[torch.device, tuple[int, int]], list[int]] = {}
    for number, site in enumerate(sites):
        alike.setdefault((site.table.device, site.shape), []).append(number)
    for (_, (n_units, length)), numbers in alike.items():
        at_once = max(1, AT_ONCE // (MATRICES * 8 * (n_units * length) ** 2))
        runs = [(number, run) for number in numbers for run in range(n_runs)]
        for first in range(0, len(runs), at_once):
            jobs: dict[int, list[int]] = {}
            for number, run in runs[first : first + at_once]:
                jobs.setdefault(number, []).append(run)
            yield jobs


class _Site:
    """Where a site's units lie, in a table whose rows are of one length: what a unit has not stands
    for itself alone.

    Such a channel is 1 in A and 0 in C, and adds nothing to a price.
    """

    def __init__(self, factors: Factors) -> None:
        self.factors = factors
        columns = unit_columns(factors.bound)
        length = max(map(len, columns))
        #: Units, and channels of each.
        self.shape = len(columns), length
        more = torch.arange(factors.width, factors.width + sum(length - len(u) for u in columns))
        rows, first = [], 0
        for u in columns:
            rows.append(torch.cat([u, sent(more[first : first + length - len(u)], u.device)]))
            first += length - len(u)
        self.n_more = len(more)
        #: ``[units * channels]``, a unit after the other.
        self.table = torch.cat(rows)
        of_units = [head for unit in factors.bound.site.units for head in unit]
        self.in_order = of_units == list(factors.bound.site.heads) and not self.n_more

    def inverses(self, weights: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """The inverse of A in the table's order, ``[runs, units * channels, units * channels]``;
        and ``[runs]``, whether there was none."""
        f = self.factors
        weights = sent(weights, f.weight.device, f.weight.dtype)
        total = (weights @ f.weight).clamp(min=torch.finfo(weights.dtype).tiny)
        mean = weights @ f.x / total[:, None]
        a = torch.tensordot(weights, f.xx, 1).div_(total[:, None, None])
        diagonal = a.diagonal(dim1=1, dim2=2)
        rounding = _ROUNDING * diagonal.mean(1)  # what does not vary has no inverse else
        a.baddbmm_(mean[:, :, None], mean[:, None, :], alpha=-1)
        added = torch.maximum(ridge * diagonal.mean(1), rounding).clamp(min=1e-30)
        diagonal.add_(added[:, None])
        inverse, failed = inverted(a)
        del a, diagonal  # as large as what follows
        return self._in_table(inverse, 1.0), failed

    def slopes(self, weights: Tensor, examples: Tensor) -> Tensor:
        """C in the table's order, ``[runs, units * channels, units * channels]``."""
        gg = self.factors.gg
        c = torch.tensordot(sent(weights, gg.device, gg.dtype), gg, 1)
        c /= sent(examples, c.device, c.dtype).clamp(min=1)[:, None, None]
        return self._in_table(c, 0.0)

    def _in_table(self, matrices: Tensor, alone: float) -> Tensor:
        if self.in_order:
            return matrices
        if self.n_more:
            matrices = pad(matrices, (0, self.n_more, 0, self.n_more))
            matrices.diagonal(dim1=1, dim2=2)[:, -self.n_more :] = alone
        return matrices.index_select(1, self.table).index_select(2, self.table)


def _in_order(inverse: Tensor, c: Tensor, failed: Tensor, n_units: int, length: int) -> Tensor:
    """``[runs, 2, units]``: the units in the order in which they go, and their prices.

    What has gone is dropped: the last unit takes its place, and the matrices end a unit earlier, in
    place. So the work is a third of what whole matrices would take.

    Args:
        inverse: ``[runs, units * length, units * length]``, of A; overwritten.
        c: C, as ``inverse``; overwritten.
        failed: ``[runs]``: where there is no inverse.
        n_units: Units.
        length: Channels of each.
    """
    n_runs = len(c)
    within = torch.arange(length, device=c.device)
    names = torch.arange(n_units, device=c.device).repeat(n_runs, 1)  # by place
    order, paid = [], []
    for n_left in range(n_units, 0, -1):
        prices, broken = _prices(inverse, c, n_left, length)
        failed = failed | broken
        by_name = torch.full((n_runs, n_units), torch.inf, dtype=c.dtype, device=c.device).scatter_(
            1, names, prices
        )
        unit = by_name.argmin(1, keepdim=True)  # of equals, the first
        order.append(unit)
        paid.append(by_name.gather(1, unit))
        if n_left == 1:
            break
        place = (names == unit).int().argmax(1, keepdim=True)
        names = names.scatter(1, place, names[:, -1:])[:, :-1]
        broken = _remove_(inverse, c, place * length + within)
        failed = failed | broken
        inverse, c = (matrix[:, :-length, :-length] for matrix in (inverse, c))
    prices = torch.cat(paid, 1).masked_fill(failed[:, None], torch.nan)
    return torch.stack([torch.cat(order, 1).to(prices), prices], 1)


def _prices(inverse: Tensor, c: Tensor, n_units: int, length: int) -> tuple[Tensor, Tensor]:
    """``[runs, units]``: what the loss rises by if each goes next; and ``[runs]``, where that has
    no answer."""

    def blocks(matrices: Tensor) -> Tensor:
        apart: Tensor = matrices.unflatten(2, (n_units, length)).unflatten(1, (n_units, length))
        return apart.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # [runs, units, length, length]

    own, code = torch.linalg.inv_ex(blocks(inverse))
    prices: Tensor = (own * blocks(c)).sum((2, 3)) / 2
    return prices.clamp(min=0), (code != 0).any(1)


def _remove_(inverse: Tensor, c: Tensor, u: Tensor) -> Tensor:
    """The rest takes over what it can of a unit, whose place the last one then has.

    Args:
        inverse: ``[runs, width, width]``. Without the last unit's rows and columns, it is the
            rest's afterwards.
        c: As ``inverse``.
        u: ``[runs, length]``, the unit's rows.

    Returns:
        ``[runs]``: where this has no answer.
    """
    own, others = _taken_out_(inverse, u)
    taken, code = torch.linalg.solve_ex(own, others)
    n_rest = others.shape[2]
    inverse[:, :n_rest, :n_rest].baddbmm_(others.mT, taken, alpha=-1)
    own, others = _taken_out_(c, u)
    # c - others' taken - taken' others + taken' own taken, in one product
    half = others - own @ taken / 2
    c[:, :n_rest, :n_rest].baddbmm_(
        torch.cat([half, taken], 1).mT, torch.cat([taken, half], 1), alpha=-1
    )
    broken: Tensor = code != 0
    return broken


def _taken_out_(matrix: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A unit's rows ``[runs, length, length]`` at its own columns, ``[runs, length, rest]`` at the
    rest's; the last unit takes its place in the matrix."""
    width, length = matrix.shape[2], u.shape[1]
    at_rows = u[:, :, None].expand(-1, -1, width)
    at_columns = u[:, None, :].expand(-1, width, -1)
    rows = matrix.gather(1, at_rows)
    own = rows.gather(2, at_columns[:, :length])
    others = rows.scatter_(2, at_columns[:, :length], rows[:, :, -length:].clone())[:, :, :-length]
    matrix.scatter_(1, at_rows, matrix[:, -length:].clone())
    matrix.scatter_(2, at_columns, matrix[:, :, -length:].clone())
    return own, others
