"""In which order heads should go when the rest is refitted: what each removal adds to the loss, by K-FAC."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.model.contexts import counted, rows_of, wide
from headprune.model.own_loss import is_default, shift_of
from headprune.model.padding import inputs_of
from headprune.model.running import batch_size, device_of
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_main_memory, sent
from headprune.scoring._activations import by_block, jackknife, unit_columns
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Problem, added
from headprune.scoring._constant import ConstantWork
from headprune.scoring._contexts import by_example, leaves
from headprune.scoring._coupling import LOSSES, OUTPUTS, Slopes, coupled, noted, refuse_coupled
from headprune.scoring._distributions import content_seeds, distributions, fisher_targets
from headprune.scoring._flat import refuse_flat
from headprune.scoring._gradients import gradients_of, slopes_of
from headprune.scoring._inverse import inverted

CURVATURES = ("output", "loss")
#: A price that would be below the one before it is above it by this share, so that the order can be read off.
_APART = 1e-9
#: A's diagonal is at least this share of the contexts' mean square.
_ROUNDING = 1e-10


@dataclass(frozen=True)
class Surgeon(ConstantWork):
    """``1/2 tr([(A^-1)_uu]^-1 C_uu)`` when unit u is the cheapest that is left: a backward pass a class, no labels.

    Of one site, x is what its output projection reads at a token and g the slope of the loss there. With
    ``A = sum |g|^2 (x - x_mean)(x - x_mean)' / sum |g|^2`` and ``C = sum g g' / examples``, ``A ⊗ C`` stands for the
    curvature of the loss in the projection's weights, and the expression is the least that the loss rises, to second
    order, when unit u may no longer be read and the rest of the projection is refitted. The cheapest unit of all sites
    goes, A and C become those of the refitted projection, and so on until nothing is left. So two heads that stand in
    for each other cost little once and much the second time, and prices of all sites are in the loss's unit. They add
    up to the rise of the whole, but that a price that falls is raised to the one before it: the k lowest are the first
    k that went.

    Made for recovery by ``lstsq``, whose intercept is why A is centred. Slopes are those of the model's own predictions
    (no labels, as ``ggn``), or of a loss.

    Sources: Hassibi, Stork 1992, for the refit; Martens, Grosse 2015, for the factors; van der Ouderaa et al. 2024
    (The LLM Surgeon), section 3, for both together, rows and columns, with refits on the way. Ours are the units
    of attention under one projection; tokens weigh in A by their slopes, one step towards the nearest product; and
    C is taken where the projection reads, ``W'(.)W``, so that layouts without a projection have it too.

    When: many heads go, and the rest is refitted (recovery by ``lstsq``): each price counts what went before.
    Cost: a forward and a backward pass a class (a draw for token distributions, one for a loss); then, once and once
    more a block, an inverse of ``width ** 2`` numbers a site and ``width ** 2`` multiply-adds a removed channel.
    Memory: ``2 * blocks * width ** 2`` fp64 numbers a site, and a batch's contexts and their slopes for one class.

    Args:
        curvature: Slopes of ``output``, the model's own predictions, or of the ``loss``; None is the loss where one of
            yours is given, and else the output.
        ridge: Added to A's diagonal, as a share of its mean.
        draws: Labels drawn for every distribution of the output; None is exact where an example has one, and 1
            elsewhere.
        blocks: Blocks of examples for the standard error (a jackknife); 1 gives none and saves memory. Where leaving
            out a block changes the order in which units go, the error is a rough one.
        seed: Of the draws; see ``Ggn``.
    """

    curvature: Literal["output", "loss"] | None = None
    ridge: float = 1e-2
    draws: int | None = None
    blocks: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.curvature is not None and self.curvature not in CURVATURES:
            raise InvalidValue("Surgeon.curvature", f"one of {', '.join(CURVATURES)}, or None", repr(self.curvature))
        if not self.ridge > 0:
            raise InvalidValue("Surgeon.ridge", "a share > 0", self.ridge)
        if self.draws is not None and self.draws < 1:
            raise InvalidValue("Surgeon.draws", "at least 1, or None", self.draws)
        if self.draws is not None and self.curvature == "loss":
            raise InvalidValue("Surgeon.draws", "None with curvature='loss', which draws nothing", self.draws)
        if self.blocks < 1:
            raise InvalidValue("Surgeon.blocks", "a count >= 1", self.blocks)

    @property
    def by_example(self) -> bool:
        return False

    def only_passes(self) -> _OnlyPasses:
        return _OnlyPasses(self.curvature, self.ridge, self.draws, self.blocks, self.seed)

    def estimate(self, problem: Problem) -> Estimate:
        own = self.curvature or ("output" if is_default(problem.loss) else "loss")
        factors = {site: _Factors(b, self.blocks) for site, b in enumerate(problem.bound) if b.site.heads}

        seen = _Seen()

        def of_share() -> dict[str, Tensor]:
            into = problem.added(seen=seen, **{str(site): factor for site, factor in factors.items()})
            for number, first, batch in problem.share("slopes of contexts", into):
                seen.drawn |= self._slopes(problem, number, batch, own, factors, first)
                seen.coupled |= problem.shared.get(LOSSES, False)
            return seen.parts()

        seen.join(problem.gathered("slopes of contexts", of_share))
        problem.shared |= {LOSSES: True} if seen.coupled else {}
        for f in factors.values():
            if problem.crew.size > 1:
                f.join(problem.crew.exchanged(f.parts))  # one at a time: they may be large
        _check(list(factors.values()))
        first = problem.examples
        examples = torch.tensor([len(range(g, first, self.blocks)) for g in range(self.blocks)], dtype=torch.float64)
        rows = jackknife(partial(self._prices, list(factors.values()), examples), examples, examples.int().tolist())
        if own == "loss":
            refuse_flat(problem, (2 * rows.abs().max()).sqrt())  # a price is half a squared slope
        found = averaged(rows, first, row="example" if first == 1 else "block of examples")
        unasked = own == "output" and not is_default(problem.loss)
        notes = ("loss= was not asked: curvature='output' reads the output alone.",) if unasked else ()
        found = replace(found, seed=self.seed if seen.drawn else None, notes=(*found.notes, *notes))
        return noted(problem, found) if own == "loss" else found

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _slopes(
        self, problem: Problem, number: int, batch: Any, own: str, factors: Mapping[int, _Factors], first: int
    ) -> bool:
        """Adds a batch's tokens to the factors; whether labels were drawn."""
        drawn = False
        told: list[list[Tensor | None]] = [[] for _ in problem.bound]

        def see(site: int, x: Tensor) -> None:
            b = problem.bound[site]
            now = inputs.now
            told[site].append(counted(problem.model, b, rows_of(b, x.detach(), now.batch), now))

        with inputs_of(problem.model, problem.bound) as inputs, leaves(problem, see) as contexts:
            inputs.begin(batch)
            if own == "loss":
                losses = problem.losses(number, batch)
                each = coupled(problem, losses, self._by_example(problem, batch, losses, contexts))
                targets = list(losses.unbind()) if each else [losses.sum()]
            else:
                found = distributions(problem.model, batch, f"batch {number}", problem.given, shift_of(problem.loss))
                numbers = found.numbers()
                if coupled(problem, numbers, self._by_example(problem, batch, numbers, contexts), key=OUTPUTS):
                    refuse_coupled(problem, "surgeon with curvature='output'", OUTPUTS)
                seeds = content_seeds(problem.model, problem.given, self.seed)
                targets, drawn = fisher_targets(found, seeds, self.draws)
            what = "the loss" if own == "loss" else "the model's output"
            examples = range(first, first + batch_size(batch))
            weights: list[list[Tensor | None]] = [[None] * len(runs) for runs in contexts]
            for number, target in enumerate(targets):  # one at a time: a class's slopes are as large as the contexts
                slopes = gradients_of(problem, target, contexts, what, number < len(targets) - 1)
                for site, factor in factors.items():
                    for run, g in enumerate(slopes[site]):
                        more = factor.add_slopes(examples, g, batch, told[site][run])
                        before = weights[site][run]
                        weights[site][run] = more if before is None else before + more
        for site, factor in factors.items():
            for run, x in enumerate(contexts[site]):
                weight = weights[site][run]
                assert weight is not None  # there is a target
                factor.add_tokens(examples, x.detach(), weight, batch)
        return drawn

    def _by_example(self, problem: Problem, batch: Any, numbers: Tensor, contexts: list[list[Tensor]]) -> Slopes:
        """Slopes of numbers ``[examples]`` in all that the sites have read."""
        runs = [(b, x) for b, xs in zip(problem.bound, contexts, strict=True) for x in xs]
        of_sums = slopes_of(numbers, [x for _, x in runs])

        def slopes(weights: Tensor) -> list[Tensor]:
            pairs = zip(runs, of_sums(weights), strict=True)
            rows = [by_example(b, rows_of(b, g, batch), len(numbers)).flatten(1) for (b, _), g in pairs]
            return [x.nan_to_num(0) for x in rows]  # attention may leave NaN at padding

        return slopes

    def _prices(self, factors: Sequence[_Factors], examples: Tensor, weights: Tensor) -> Tensor:
        """``[units]`` from the blocks with weight 1, on the CPU.

        What goes at one site changes nothing at another. So each site's order is found where its sums are, without a
        look, all of them are brought to the CPU in one copy, and only there they are merged.
        """
        n = float((weights @ examples).clamp(min=1))
        removals = in_main_memory(_removed(f, weights, n, self.ridge) for f in factors)
        orders = []
        for f, (units, prices) in zip(factors, removals, strict=True):
            if bool(prices.isnan().any()):
                got = f"{self.ridge} at {f.bound.site.name}, whose channels depend on each other"
                raise InvalidValue("Surgeon.ridge", "large enough to invert A", got, "Use 1e-2, or more data.")
            orders.append(list(zip(map(int, units), map(float, prices), strict=True)))
        found: dict[tuple[int, int], float] = {}
        highest = 0.0
        for site, unit, price in _merged(orders):
            highest = max(price, highest * (1 + _APART))
            found[site, unit] = highest
        return torch.tensor([found[place] for place in sorted(found)], dtype=torch.float64)


class _OnlyPasses(Surgeon):
    """Removes nothing."""

    def _prices(self, factors: Sequence[_Factors], examples: Tensor, weights: Tensor) -> Tensor:
        n_units = sum(len(f.bound.site.units) for f in factors)
        return torch.ones(*weights.shape[:-1], n_units, dtype=torch.float64)


def _merged(orders: Sequence[list[tuple[int, float]]]) -> Iterator[tuple[int, int, float]]:
    """``(site, unit, price)`` in the order in which units go when the cheapest of all sites does; of equals, the first.

    Args:
        orders: For every site its units and their prices, in the order in which they go there.
    """
    places = [0] * len(orders)
    for _ in range(sum(map(len, orders))):
        waiting = [site for site, order in enumerate(orders) if places[site] < len(order)]
        site = min(waiting, key=lambda s: (orders[s][places[s]][1], s))
        yield site, *orders[site][places[site]]
        places[site] += 1


class _Seen:
    """Whether labels were drawn, and whether the loss couples examples."""

    drawn = coupled = False

    def parts(self) -> dict[str, Tensor]:
        return {"drawn": torch.tensor(self.drawn), "coupled": torch.tensor(self.coupled)}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        self.drawn = any(bool(part["drawn"]) for part in parts)
        self.coupled = any(bool(part["coupled"]) for part in parts)


class _Factors:
    """A site's sums over tokens, by block of examples, in fp64 on its device."""

    def __init__(self, bound: BoundSite, blocks: int) -> None:
        self.bound = bound
        self.width = len(bound.site.heads) * bound.site.value_dim
        parameter = next(bound.module.parameters())
        nothing = torch.zeros(blocks, dtype=wide(parameter), device=device_of(bound.module))
        self.weight = nothing.clone()
        self.x = nothing.new_zeros(blocks, self.width)
        self.xx = nothing.new_zeros(blocks, self.width, self.width)
        self.gg = torch.zeros_like(self.xx)
        self.tokens = torch.zeros((), dtype=torch.int64, device=nothing.device)

    def add_slopes(self, examples: range, g: Tensor, batch: Any, here: Tensor | None) -> Tensor:
        """Adds the slopes of one target at one run; returns how much each token weighs, ``[examples, tokens]``."""
        g = self._by_example(g, len(examples), batch).to(self.gg.dtype)
        if here is not None:  # chosen, not multiplied by 0: attention may leave NaN at padding
            g = g.masked_fill(~here.to(g.device).reshape(g.shape[:2])[..., None], 0)
        for number, some in by_block(examples, len(self.gg)):
            rows = g[some].flatten(0, 1)
            self.gg[number].addmm_(rows.T, rows)
        self.tokens += g.shape[0] * g.shape[1] if here is None else here.sum().to(self.tokens.device)
        return g.square().sum(-1)

    def add_tokens(self, examples: range, x: Tensor, weights: Tensor, batch: Any) -> None:
        """Adds one run's contexts, by the weights of their tokens; those that weigh nothing are left out."""
        x = self._by_example(x, len(examples), batch).to(self.xx.dtype)
        x = x.masked_fill(weights[..., None] == 0, 0)
        for number, some in by_block(examples, len(self.xx)):
            rows, w = x[some].flatten(0, 1), weights[some].flatten()
            weighted = rows * w[:, None]
            self.weight[number] += w.sum()
            self.x[number] += weighted.sum(0)
            self.xx[number].addmm_(weighted.T, rows)

    def parts(self) -> dict[str, Tensor]:
        """All sums, for the other processes."""
        sums = {"weight": self.weight, "x": self.x, "xx": self.xx, "gg": self.gg}
        return {**sums, "tokens": self.tokens}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Takes the sums of all processes in place of its own."""
        # In memory of their own: what was read from a file may begin anywhere, and products there round otherwise.
        self.weight, self.x, self.xx, self.gg, self.tokens = (
            added(parts, name).to(self.weight.device).clone() for name in ("weight", "x", "xx", "gg", "tokens")
        )

    def _by_example(self, x: Tensor, size: int, batch: Any) -> Tensor:
        return by_example(self.bound, rows_of(self.bound, x, batch), size)


def _check(factors: Sequence[_Factors]) -> None:
    """Looks at all sites at once.

    Raises:
        InvalidValue: nothing but padding reached a site, or numbers that are not finite.
    """
    seen = in_main_memory(torch.stack([f.tokens > 0, f.xx.isfinite().all() & f.gg.isfinite().all()]) for f in factors)
    for f, flags in zip(factors, seen, strict=True):
        name = f.bound.site.name
        reached, finite = flags.tolist()
        if not reached:
            raise InvalidValue("batches", "with a token that is no padding", f"only padding at {name}")
        if not finite:
            hint = "Look for NaN or infinite values in the batches."
            raise InvalidValue(f"what {name} gives Surgeon", "finite", "NaN or infinite", hint)


def _removed(factors: _Factors, weights: Tensor, n: float, ridge: float) -> Tensor:
    """Removes all units of a site, the cheapest first, on its device; Python looks at nothing.

    Which unit goes is a number on the device, and picks its columns there: to bring A and C to the CPU instead would
    cost one wait, too, but the ``width ** 2`` multiply-adds of every channel are a GPU's work (at a width of 4096, some
    4e11 a site in fp64).

    Returns:
        ``[2, units]``: units by number, in the order in which they go, and their prices; NaN where a matrix has no
        inverse.
    """
    site = _Site(factors, weights, n, ridge)
    gone = torch.zeros(len(site.units), dtype=torch.bool, device=site.units.device)
    order, paid = [], []
    for _ in range(len(site.units)):
        prices = site.prices().masked_fill(gone, torch.inf)
        unit = prices.argmin(keepdim=True)  # of equals, the first
        order.append(unit)
        paid.append(prices.index_select(0, unit))
        gone = gone.index_fill(0, unit, True)
        site.remove_(unit)
    return torch.stack([torch.cat(order).to(site.c), torch.cat(paid).masked_fill(site.failed, torch.nan)])


class _Site:
    """A site while its units go one after the other: the inverse of A, and C, of the refitted projection.

    Units are the rows of a table of columns. Where some have fewer heads than others, columns that stand for themselves
    alone (1 in A, 0 in C) fill up their rows: they add nothing to a price.
    """

    def __init__(self, factors: _Factors, weights: Tensor, n: float, ridge: float) -> None:
        weights = sent(weights, factors.weight.device, factors.weight.dtype)
        total = (weights @ factors.weight).clamp(min=torch.finfo(weights.dtype).tiny)
        mean = weights @ factors.x / total
        second = torch.tensordot(weights, factors.xx, 1) / total
        a = second - torch.outer(mean, mean)
        rounding = _ROUNDING * second.diagonal().mean()  # what does not vary has no inverse else
        added = torch.maximum(ridge * a.diagonal().mean(), rounding).clamp(min=1e-30)
        a.diagonal().add_(added)
        inverse, self.failed = inverted(a)
        columns = unit_columns(factors.bound)
        longest = max(map(len, columns))
        n_more = longest - min(map(len, columns))
        more = torch.arange(factors.width, factors.width + n_more, device=a.device)
        #: ``[units, columns]``
        self.units = torch.stack([torch.cat([u.to(a.device), more[: longest - len(u)]]) for u in columns])
        self.inverse = torch.block_diag(inverse, torch.eye(n_more, dtype=a.dtype, device=a.device))
        c = torch.tensordot(weights, factors.gg, 1) / n
        self.c = torch.block_diag(c, c.new_zeros(n_more, n_more))

    def prices(self) -> Tensor:
        """``[units]``: what the loss rises by if each goes next; of units that are gone, nothing of use."""
        rows, columns = self.units.unsqueeze(2), self.units.unsqueeze(1)
        blocks, code = torch.linalg.inv_ex(self.inverse[rows, columns])
        self.failed = self.failed | (code != 0).any()
        found: Tensor = (blocks * self.c[rows, columns]).sum((1, 2)) / 2
        return found.clamp(min=0)

    def remove_(self, unit: Tensor) -> None:
        """The rest takes over what it can of a unit; the unit's own channels stay, alone and without a slope.

        Args:
            unit: ``[1]``, its number, on the device.
        """
        u = self.units.index_select(0, unit).squeeze(0)
        rows = self.inverse.index_select(0, u)
        taken, code = torch.linalg.solve_ex(rows.index_select(1, u), rows)
        self.failed = self.failed | (code != 0)
        self.inverse = self.inverse - self.inverse.index_select(1, u) @ taken
        across = self.c.index_select(1, u) @ taken
        own = self.c.index_select(0, u).index_select(1, u)
        self.c = self.c - across - across.T + taken.T @ own @ taken
        for matrix, alone in ((self.inverse, 1.0), (self.c, 0.0)):
            matrix.index_fill_(0, u, 0.0).index_fill_(1, u, 0.0)
            matrix.diagonal().index_fill_(0, u, alone)
