"""In which order heads should go when the rest is refitted: what each removal adds to the loss, by K-FAC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.model.contexts import counted, inputs_of, rows_of, wide
from headprune.model.losses import default_loss
from headprune.model.running import batch_size, device_of
from headprune.model.sites import BoundSite
from headprune.scoring._activations import jackknife, unit_columns
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Problem, Scorer, added
from headprune.scoring._contexts import by_example, leaves
from headprune.scoring._distributions import content_seeds, distributions, fisher_targets
from headprune.scoring._gradients import gradients_of

CURVATURES = ("output", "loss")
#: A price that would be below the one before it is above it by this share, so that the order can be read off.
_APART = 1e-9
#: A's diagonal is at least this share of the contexts' mean square.
_ROUNDING = 1e-10


@dataclass(frozen=True)
class Surgeon(Scorer):
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

    def estimate(self, problem: Problem) -> Estimate:
        own = self.curvature or ("output" if problem.loss is default_loss else "loss")
        factors = {site: _Factors(b, self.blocks) for site, b in enumerate(problem.bound) if b.site.heads}

        seen = _Seen()

        def of_share() -> dict[str, Tensor]:
            into = problem.added(seen=seen, **{str(site): factor for site, factor in factors.items()})
            for number, first, batch in problem.share("slopes of contexts", into):
                seen.drawn |= self._slopes(problem, number, batch, own, factors, first)
            return seen.parts()

        seen.join(problem.gathered("slopes of contexts", of_share))
        for f in factors.values():
            if problem.crew.size > 1:
                f.join(problem.crew.exchanged(f.parts))  # one at a time: they may be large
            f.check()
        first = problem.examples
        examples = torch.tensor([len(range(g, first, self.blocks)) for g in range(self.blocks)], dtype=torch.float64)
        rows = jackknife(partial(self._prices, list(factors.values()), examples), examples, examples.int().tolist())
        found = averaged(rows, first, row="example" if first == 1 else "block of examples")
        unasked = own == "output" and problem.loss is not default_loss
        notes = ("loss= was not asked: curvature='output' reads the output alone.",) if unasked else ()
        return replace(found, seed=self.seed if seen.drawn else None, notes=(*found.notes, *notes))

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
            told[site].append(counted(problem.model, b, rows_of(b, x.detach(), inputs.now), inputs.now))

        with inputs_of(problem.model, problem.bound) as inputs, leaves(problem, see) as contexts:
            inputs.begin(batch)
            if own == "loss":
                targets = [problem.losses(number, batch).sum()]
            else:
                found = distributions(problem.model, batch, f"batch {number}")
                seeds = content_seeds(problem.model, batch, self.seed)
                targets, drawn = fisher_targets(found, seeds, self.draws)
            what = "the loss" if own == "loss" else "the model's output"
            block = torch.arange(first, first + batch_size(batch)) % self.blocks
            weights = [[torch.zeros(())] * len(runs) for runs in contexts]
            for number, target in enumerate(targets):  # one at a time: a class's slopes are as large as the contexts
                slopes = gradients_of(problem, target, contexts, what, number < len(targets) - 1)
                for site, factor in factors.items():
                    for run, g in enumerate(slopes[site]):
                        more = factor.add_slopes(block, g, batch, told[site][run])
                        weights[site][run] = weights[site][run].to(more) + more
        for site, factor in factors.items():
            for run, x in enumerate(contexts[site]):
                factor.add_tokens(block, x.detach(), weights[site][run], batch)
        return drawn

    def _prices(self, factors: Sequence[_Factors], examples: Tensor, weights: Tensor) -> Tensor:
        """``[units]`` from the blocks with weight 1."""
        n = (weights @ examples).clamp(min=1)
        sites = [_Site(f, weights, n, self.ridge) for f in factors]
        left = {(s, u): price for s, site in enumerate(sites) for u, price in enumerate(site.prices())}
        found: dict[tuple[int, int], float] = {}
        highest = 0.0
        while left:
            place = min(left, key=lambda p: (left[p], p))
            highest = max(left.pop(place), highest * (1 + _APART))
            found[place] = highest
            s, u = place
            sites[s].remove_(u)
            left.update({(s, v): price for v, price in enumerate(sites[s].prices()) if (s, v) in left})
        return torch.tensor([found[place] for place in sorted(found)], dtype=torch.float64)


class _Seen:
    """Whether labels were drawn."""

    drawn = False

    def parts(self) -> dict[str, Tensor]:
        return {"drawn": torch.tensor(self.drawn)}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        self.drawn = any(bool(part["drawn"]) for part in parts)


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
        self.tokens = 0

    def add_slopes(self, block: Tensor, g: Tensor, batch: Any, here: Tensor | None) -> Tensor:
        """Adds the slopes of one target at one run; returns how much each token weighs, ``[examples, tokens]``."""
        g = self._by_example(g, len(block), batch).to(self.gg.dtype)
        if here is not None:  # chosen, not multiplied by 0: attention may leave NaN at padding
            g = g.masked_fill(~here.to(g.device).reshape(g.shape[:2])[..., None], 0)
        for number in block.unique().tolist():
            rows = g[block == number].flatten(0, 1)
            self.gg[number].addmm_(rows.T, rows)
        self.tokens += g.shape[0] * g.shape[1] if here is None else int(here.sum())
        return g.square().sum(-1)

    def add_tokens(self, block: Tensor, x: Tensor, weights: Tensor, batch: Any) -> None:
        """Adds one run's contexts, by the weights of their tokens; those that weigh nothing are left out."""
        x = self._by_example(x, len(block), batch).to(self.xx.dtype)
        x = x.masked_fill(weights[..., None] == 0, 0)
        for number in block.unique().tolist():
            rows, w = x[block == number].flatten(0, 1), weights[block == number].flatten()
            weighted = rows * w[:, None]
            self.weight[number] += w.sum()
            self.x[number] += weighted.sum(0)
            self.xx[number].addmm_(weighted.T, rows)

    def parts(self) -> dict[str, Tensor]:
        """All sums, for the other processes."""
        sums = {"weight": self.weight, "x": self.x, "xx": self.xx, "gg": self.gg}
        return {**sums, "tokens": torch.tensor(self.tokens)}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Takes the sums of all processes in place of its own."""
        self.weight, self.x, self.xx, self.gg = (
            added(parts, name).to(self.weight.device) for name in ("weight", "x", "xx", "gg")
        )
        self.tokens = int(added(parts, "tokens"))

    def check(self) -> None:
        """Raises:
        InvalidValue: nothing but padding reached the site, or numbers that are not finite.
        """
        name = self.bound.site.name
        if not self.tokens:
            raise InvalidValue("batches", "with a token that is no padding", f"only padding at {name}")
        if not bool(self.xx.isfinite().all() & self.gg.isfinite().all()):
            hint = "Look for NaN or infinite values in the batches."
            raise InvalidValue(f"what {name} gives Surgeon", "finite", "NaN or infinite", hint)

    def _by_example(self, x: Tensor, size: int, batch: Any) -> Tensor:
        return by_example(self.bound, rows_of(self.bound, x, batch), size)


class _Site:
    """A site while its units go one after the other: the inverse of A, and C, of the refitted projection."""

    def __init__(self, factors: _Factors, weights: Tensor, n: Tensor, ridge: float) -> None:
        weights = weights.to(factors.weight)
        total = (weights @ factors.weight).clamp(min=torch.finfo(weights.dtype).tiny)
        mean = weights @ factors.x / total
        second = torch.tensordot(weights, factors.xx, 1) / total
        a = second - torch.outer(mean, mean)
        rounding = _ROUNDING * second.diagonal().mean()  # what does not vary has no inverse else
        added = torch.maximum(ridge * a.diagonal().mean(), rounding).clamp(min=1e-30)
        a.diagonal().add_(added)
        factor, failed = torch.linalg.cholesky_ex(a)
        if int(failed):
            got = f"{ridge} at {factors.bound.site.name}, whose channels depend on each other"
            raise InvalidValue("Surgeon.ridge", "large enough to invert A", got, "Use 1e-2, or more data.")
        self.inverse = torch.cholesky_inverse(factor)
        self.c = torch.tensordot(weights, factors.gg, 1) / n.to(weights)
        self.units = unit_columns(factors.bound)

    def prices(self) -> list[float]:
        """What the loss rises by if each unit goes next; of units that are gone, nothing of use."""
        found = [(torch.linalg.inv(self.inverse[u][:, u]) * self.c[u][:, u]).sum() / 2 for u in self.units]
        return torch.stack(found).clamp(min=0).tolist()

    def remove_(self, unit: int) -> None:
        """The rest takes over what it can of a unit; the unit's own channels stay, alone and without a slope."""
        u = self.units[unit]
        taken = torch.linalg.solve(self.inverse[u][:, u], self.inverse[u])
        self.inverse = self.inverse - self.inverse[:, u] @ taken
        across = self.c[:, u] @ taken
        self.c = self.c - across - across.T + taken.T @ self.c[u][:, u] @ taken
        for matrix, alone in ((self.inverse, 1.0), (self.c, 0.0)):
            matrix[u], matrix[:, u] = 0.0, 0.0
            matrix[u, u] = alone
