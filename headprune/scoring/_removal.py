"""Remove the units of a site one after the other, the cheapest first, while the others compensate;
many runs at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from headprune.model.transfers import sent
from headprune.scoring._activations import has_unit_per_channel, unit_columns
from headprune.scoring._factors import Factors
from headprune.scoring._inverse import inverted

#: Bytes of runs that are made at once; a single run takes what it needs.
AT_ONCE = 2**28
#: Peak memory of a run, in matrices of ``width ** 2`` fp64 numbers: C, and to find A's inverse.
MATRICES = 5
#: Matrices are updated each time that 1/64 of the kept neurons are removed.
_STEPS = 64
#: Blocks of a symmetric matrix ``[runs, n, n]``: removed by removed, removed by rest, rest by rest.
_Blocks: TypeAlias = tuple[Tensor, Tensor, Tensor]
#: A's diagonal is at least this share of the contexts' mean square.
_ROUNDING = 1e-10


def removed(
    factors: Sequence[Factors], weights: Tensor, examples: Tensor, ridge: float
) -> list[Tensor]:
    """Remove all units of every site, the cheapest first, in several runs.

    A run counts some blocks of examples. Sites do not depend on each other. So runs, and sites of
    equal shape, are made at once, as far as there is room (``AT_ONCE``).

    Args:
        factors: The sums of every site.
        weights: ``[runs, blocks]`` of 0 and 1, on the CPU: the blocks that a run counts.
        examples: ``[runs]``, on the CPU: how many examples are in those.
        ridge: Added to A's diagonal, as a share of its mean.

    Returns:
        For every site ``[runs, 2, units]``, on its device: units by number, in the order in which
        they are removed, and their prices; NaN where a matrix has no inverse.
    """
    # Everything remains on the device: also which unit is removed is a number there. The CPU would
    # need one wait, too, but width ** 2 multiply-adds per channel are a GPU's work (at a width of
    # 4096, some 4e11 per site in fp64).
    tables = list(map(_UnitTable, factors))
    results: list[list[Tensor]] = [[] for _ in factors]
    for jobs in _together(tables, len(weights)):
        # 1. The matrices of all jobs, [jobs, units * channels, units * channels].
        of_sites = [(tables[site], runs) for site, runs in jobs.items()]
        c = _joined([table.slopes(weights[runs], examples[runs]) for table, runs in of_sites])
        parts = [table.inverses(weights[runs], ridge) for table, runs in of_sites]
        inverse = _joined([inverse for inverse, _ in parts])
        failed = torch.cat([failed for _, failed in parts])
        del parts  # as large as the joined ones

        # 2. Remove the units.
        shape = of_sites[0][0].shape
        if of_sites[0][0].are_neurons:
            orders = _neurons_in_order(inverse, c, failed)
        else:
            orders = _in_order(inverse, c, failed, *shape)

        # 3. Give every site its runs.
        n_runs = list(map(len, jobs.values()))
        for site, part in zip(jobs, orders.split(n_runs), strict=True):
            results[site].append(part)
    return list(map(torch.cat, results))


def _joined(parts: list[Tensor]) -> Tensor:
    """All parts in one tensor; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _together(sites: Sequence[_UnitTable], n_runs: int) -> Iterator[dict[int, list[int]]]:
    """Runs to be made at once, by number of the site; these sites have one device and one shape."""
    alike: dict[tuple[torch.device, tuple[int, int], bool], list[int]] = {}
    for number, site in enumerate(sites):
        alike.setdefault((site.table.device, site.shape, site.are_neurons), []).append(number)
    for (_, (n_units, length), _), numbers in alike.items():
        at_once = max(1, AT_ONCE // (MATRICES * 8 * (n_units * length) ** 2))
        runs = list(product(numbers, range(n_runs)))
        for first in range(0, len(runs), at_once):
            jobs: dict[int, list[int]] = {}
            for number, run in runs[first : first + at_once]:
                jobs.setdefault(number, []).append(run)
            yield jobs


class _UnitTable:
    """The columns of a site's units, as rows of one length.

    A shorter unit is filled up with channels that are 1 in A and 0 in C, so that they add nothing
    to a price.
    """

    def __init__(self, factors: Factors) -> None:
        self.factors = factors
        self.are_neurons = has_unit_per_channel(factors.bound)
        if self.are_neurons:
            device = factors.weight.device
            self.shape, self.n_more, self.in_order = (factors.width, 1), 0, True
            self.table = torch.arange(factors.width, device=device)
            return
        columns = unit_columns(factors.bound)
        length = max(map(len, columns))
        #: Units, and channels of each.
        self.shape = len(columns), length
        rows = []
        end = factors.width  # the filling channels are numbered after the site's own
        for column in columns:
            n_missing = length - len(column)
            filling = torch.arange(end, end + n_missing)
            rows.append(torch.cat([column, sent(filling, column.device)]))
            end += n_missing
        #: Filling channels of all units.
        self.n_more = end - factors.width
        #: ``[units * channels]``, a unit after the other.
        self.table = torch.cat(rows)
        of_units = tuple(chain.from_iterable(factors.bound.site.units))
        self.in_order = of_units == factors.bound.site.heads and not self.n_more

    def inverses(self, weights: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """The inverse of A, the covariance of the contexts, in the table's order.

        Returns:
            ``[runs, units * channels, units * channels]``; and ``[runs]``, where there is none.
        """
        f = self.factors
        weights = sent(weights, f.weight.device, f.weight.dtype)
        total = (weights @ f.weight).clamp(min=torch.finfo(weights.dtype).tiny)
        mean = weights @ f.x / total[:, None]
        a = torch.tensordot(weights, f.xx, 1).div_(total[:, None, None])
        diagonal = a.diagonal(dim1=1, dim2=2)
        # Without it, contexts that do not vary would have no inverse.
        rounding = _ROUNDING * diagonal.mean(1)
        a.baddbmm_(mean[:, :, None], mean[:, None, :], alpha=-1)
        added = torch.maximum(ridge * diagonal.mean(1), rounding).clamp(min=1e-30)
        diagonal.add_(added[:, None])
        inverse, failed = inverted(a)
        del a, diagonal  # as large as what follows
        return self._in_table(inverse, 1.0), failed

    def slopes(self, weights: Tensor, examples: Tensor) -> Tensor:
        """C, the products of slopes, in the table's order: ``[runs, units * channels, units *
        channels]``."""
        gg = self.factors.gg
        c = torch.tensordot(sent(weights, gg.device, gg.dtype), gg, 1)
        c /= sent(examples, c.device, c.dtype).clamp(min=1)[:, None, None]
        return self._in_table(c, 0.0)

    def _in_table(self, matrices: Tensor, alone: float) -> Tensor:
        """Matrices in the table's order, with ``alone`` on the diagonal of filling channels."""
        if self.in_order:
            return matrices
        if self.n_more:
            matrices = pad(matrices, (0, self.n_more, 0, self.n_more))
            matrices.diagonal(dim1=1, dim2=2)[:, -self.n_more :] = alone
        return matrices.index_select(1, self.table).index_select(2, self.table)


def _in_order(inverse: Tensor, c: Tensor, failed: Tensor, n_units: int, length: int) -> Tensor:
    """Remove all units, the cheapest first.

    The last unit takes the place of a removed one, and the matrices end a unit earlier, in place.
    So the work is a third of what whole matrices would take.

    Args:
        inverse: ``[runs, units * length, units * length]``, of A; overwritten.
        c: C, as ``inverse``; overwritten.
        failed: ``[runs]``: where there is no inverse.
        n_units: Units.
        length: Channels of each.

    Returns:
        ``[runs, 2, units]``: the units in the order in which they are removed, and their prices.
    """
    n_runs = len(c)
    within = torch.arange(length, device=c.device)
    # [runs, kept units]: the number of the unit at each place.
    names = torch.arange(n_units, device=c.device).repeat(n_runs, 1)
    order, paid = [], []
    for n_kept in range(n_units, 0, -1):
        # 1. Find the cheapest unit of each run; of equals, the first by number.
        prices, broken = _prices(inverse, c, n_kept, length)
        failed = failed | broken
        by_name = torch.full((n_runs, n_units), torch.inf, dtype=c.dtype, device=c.device)
        by_name.scatter_(1, names, prices)
        unit = by_name.argmin(1, keepdim=True)
        order.append(unit)
        paid.append(by_name.gather(1, unit))
        if n_kept == 1:
            break
        # 2. Remove it.
        place = (names == unit).int().argmax(1, keepdim=True)
        names = names.scatter(1, place, names[:, -1:])[:, :-1]
        broken = _remove_(inverse, c, place * length + within)
        failed = failed | broken
        inverse, c = (matrix[:, :-length, :-length] for matrix in (inverse, c))
    prices = torch.cat(paid, 1).masked_fill(failed[:, None], torch.nan)
    return torch.stack([torch.cat(order, 1).to(prices), prices], 1)


def _neurons_in_order(inverse: Tensor, c: Tensor, failed: Tensor) -> Tensor:
    """Remove all units of one channel, one after the other, the cheapest first.

    Thousands of single removals would read the matrices thousands of times. So the matrices are
    updated in steps, for several removals at once; within a step only the diagonals are.

    Args:
        inverse: ``[runs, neurons, neurons]``, of A.
        c: C, as ``inverse``.
        failed: ``[runs]``: where there is no inverse.

    Returns:
        ``[runs, 2, neurons]``: as ``_in_order``.
    """
    n_runs, n_units = c.shape[:2]
    # [runs, kept neurons]: the number of the neuron at each place, in ascending order.
    names = torch.arange(n_units, device=c.device).repeat(n_runs, 1)
    order, paid = [], []
    while True:
        # 1. The neurons that each run removes next.
        n_kept = names.shape[1]
        places, prices, broken = _cheapest_neurons(inverse, c, -(-n_kept // _STEPS))
        failed = failed | broken
        order.append(names.gather(1, places))
        paid.append(prices)
        if places.shape[1] == n_kept:
            break
        # 2. Remove them; the others compensate.
        is_kept = torch.ones_like(names, dtype=torch.bool).scatter(1, places, False)
        rest = is_kept.nonzero()[:, 1].view(n_runs, -1)  # equally many in every run
        names = names.gather(1, rest)
        of_inverse, of_c = (_split(matrix, places, rest) for matrix in (inverse, c))
        failed = failed | _compensate_(of_inverse, of_c)
        inverse, c = of_inverse[2], of_c[2]
    all_prices = torch.cat(paid, 1).masked_fill(failed[:, None], torch.nan)
    return torch.stack([torch.cat(order, 1).to(all_prices), all_prices], 1)


def _cheapest_neurons(inverse: Tensor, c: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The neurons that are removed next, one after the other; the matrices stay as they are.

    Args:
        inverse: ``[runs, n, n]``, of A.
        c: C, as ``inverse``.
        count: How many.

    Returns:
        ``[runs, count]``: their places, in the order in which they are removed; their prices; and
        ``[runs]``, where this has no answer.
    """
    runs = torch.arange(len(c), device=c.device)
    # Diagonals of both matrices as the removals so far change them.
    own = inverse.diagonal(dim1=1, dim2=2).clone()  # [runs, n]
    slopes = c.diagonal(dim1=1, dim2=2).clone()
    is_removed = torch.zeros_like(own, dtype=torch.bool)
    failed = torch.zeros_like(runs, dtype=torch.bool)
    # Of each removal: the weights by which the others take over, [runs, removals, n]; the neuron's
    # row of C; and its entries on both diagonals, [runs, removals, 1].
    taken = own.new_empty(len(c), count, own.shape[1])
    rows = torch.empty_like(taken)
    on_inverse, on_c = own.new_empty(len(c), count, 1), own.new_empty(len(c), count, 1)
    places, paid = [], []
    for n in range(count):
        # 1. The cheapest neuron.
        failed = failed | ((own <= 0) & ~is_removed).any(1)
        prices = (slopes / own / 2).clamp(min=0).masked_fill(is_removed, torch.inf)
        place = prices.argmin(1, keepdim=True)  # [runs, 1]
        places.append(place)
        paid.append(prices.gather(1, place))
        if n == count - 1:
            break
        # 2. Its rows of both matrices after the earlier removals.
        at = place[:, 0]
        before, rows_before = taken[:, :n], rows[:, :n]
        to_it = before[runs, :, at][:, None]  # [runs, 1, removals]
        its_row = rows_before[runs, :, at][:, None] - to_it * on_c[:, :n].mT
        of_inverse = inverse[runs, at] - (to_it * on_inverse[:, :n].mT @ before)[:, 0]
        of_c = c[runs, at] - (to_it @ rows_before + its_row @ before)[:, 0]  # [runs, n]
        # 3. What its removal changes on the diagonals.
        on_inverse[:, n], on_c[:, n] = of_inverse.gather(1, place), of_c.gather(1, place)
        weights = of_inverse / on_inverse[:, n]
        own -= weights.square() * on_inverse[:, n]
        slopes -= weights * (2 * of_c - weights * on_c[:, n])
        taken[:, n], rows[:, n] = weights, of_c
        is_removed.scatter_(1, place, True)
    return torch.cat(places, 1), torch.cat(paid, 1), failed


def _split(matrix: Tensor, first: Tensor, rest: Tensor) -> _Blocks:
    """The blocks of a symmetric matrix ``[runs, n, n]``: first by first, first by rest, and rest by
    rest."""

    def rows(of: Tensor, which: Tensor) -> Tensor:
        return of.gather(1, which[:, :, None].expand(-1, -1, of.shape[2]))

    def columns(of: Tensor, which: Tensor) -> Tensor:
        return of.gather(2, which[:, None, :].expand(-1, of.shape[1], -1))

    top = rows(matrix, first)
    return columns(top, first), columns(top, rest), columns(rows(matrix, rest), rest)


def _prices(inverse: Tensor, c: Tensor, n_units: int, length: int) -> tuple[Tensor, Tensor]:
    """How much the loss rises if each unit is removed next.

    Returns:
        ``[runs, units]``; and ``[runs]``, where that has no answer.
    """

    def blocks(matrices: Tensor) -> Tensor:
        apart: Tensor = matrices.unflatten(2, (n_units, length)).unflatten(1, (n_units, length))
        return apart.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # [runs, units, length, length]

    own, code = torch.linalg.inv_ex(blocks(inverse))
    prices: Tensor = (own * blocks(c)).sum((2, 3)) / 2
    return prices.clamp(min=0), (code != 0).any(1)


def _remove_(inverse: Tensor, c: Tensor, u: Tensor) -> Tensor:
    """Remove a unit, for which the others compensate; the last unit takes its place.

    Args:
        inverse: ``[runs, width, width]``. Afterwards it is that of the others, without the last
            unit's rows and columns.
        c: As ``inverse``.
        u: ``[runs, length]``, the unit's rows.

    Returns:
        ``[runs]``: where this has no answer.
    """
    n_rest = inverse.shape[2] - u.shape[1]
    of_inverse, of_c = (
        (*_taken_out_(matrix, u), matrix[:, :n_rest, :n_rest]) for matrix in (inverse, c)
    )
    return _compensate_(of_inverse, of_c)


def _compensate_(of_inverse: _Blocks, of_c: _Blocks) -> Tensor:
    """Let the rest compensate for what is removed: update its blocks in place.

    Args:
        of_inverse: Of the inverse, the blocks removed by removed, removed by rest, rest by rest.
        of_c: The same of C.

    Returns:
        ``[runs]``: where this has no answer.
    """
    own, others, rest = of_inverse
    taken, code = torch.linalg.solve_ex(own, others)  # [runs, removed, rest]
    rest.baddbmm_(others.mT, taken, alpha=-1)
    own, others, rest = of_c
    # c - others' taken - taken' others + taken' own taken, in one product
    half = others - own @ taken / 2
    rest.baddbmm_(torch.cat([half, taken], 1).mT, torch.cat([taken, half], 1), alpha=-1)
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
