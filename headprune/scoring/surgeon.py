"""What each removal adds to the loss when the rest is refitted, head after head (K-FAC)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.model.contexts import counted, not_finite, only_padding, rows_of
from headprune.model.own_loss import is_default, output_notes, shift_of
from headprune.model.padding import inputs_of
from headprune.model.running import batch_size
from headprune.model.transfers import in_main_memory
from headprune.scoring._activations import pseudo_values, runs_of
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, ScoringProblem
from headprune.scoring._constant import ConstantWork
from headprune.scoring._contexts import by_example, leaves
from headprune.scoring._coupling import (
    OUTPUTS,
    coupled,
    losses_are_coupled,
    noted,
    refuse_coupled,
    remember_coupled_losses,
)
from headprune.scoring._distributions import (
    content_seeds,
    distributions,
    fisher_targets,
    logit_targets,
)
from headprune.scoring._factors import Factors
from headprune.scoring._flat import refuse_flat
from headprune.scoring._gates import Slopes, gradients_of, slopes_of
from headprune.scoring._removal import removed

CURVATURES = ("output", "logits", "loss")
#: A price that would be below the one before it is above it by this share, so that the order can be
#: read off.
_APART = 1e-9
#: Why there is no standard error where feed-forwards are scored.
_ONE_BLOCK = (
    "With feed-forwards, all examples are one block: matrices of several would be too large."
)
#: By site number and run: a tensor, or None where there is none.
_PerRun: TypeAlias = list[list[Tensor | None]]


@dataclass(frozen=True)
class Surgeon(ConstantWork):
    """``1/2 tr([(A^-1)_uu]^-1 C_uu)`` of the cheapest unit u still kept: up to 4 backward passes
    per batch, no labels.

    x ``[width]`` is the output projection's input at a token, g the loss's slope there. A is the
    covariance of x, weighted by ``|g|^2``, and ``C = sum g g' / examples``. A price is how much the
    loss rises, to second order, when the unit is removed and the projection refitted. The cheapest
    unit of all sites is removed, A and C updated, and so on.

    Source: van der Ouderaa et al. 2024 (The LLM Surgeon), section 3.

    When: many heads are removed and the rest is refitted: a price counts earlier removals.
    Cost: the passes, and ``blocks + 1`` inverses of ``width^2`` numbers per site; ``2 blocks
    width^2`` fp64 numbers.

    Args:
        curvature: Slopes of the predictions (``output``), of all classes alike (``logits``), or of
            the ``loss``. None: ``loss`` where you give one, else ``output``.
        ridge: Added to A's diagonal, a share of its mean.
        draws: Backward passes per batch: groups of classes (None: 4, prices 4 % off), or labels
            per token (None: 1).
        blocks: For the jackknife's standard error; 1, as for neurons, gives none.
        seed: See ``Ggn``.
    """

    # After Hassibi, Stork 1992 (the refit) and Martens, Grosse 2015 (the factors).
    # - A is centred because recovery by lstsq fits an intercept.
    # - A ⊗ C stands for the curvature in the projection's weights. Tokens weigh in A by their
    #   slopes, which is one step towards the nearest product of this form.
    # - The Surgeon takes C at the projection's output. Here it is W'(.)W, where the projection
    #   reads, so that layouts without a projection have it too. It has no bias from the draws.
    # - Two heads that do the same cost little once and much the second time. Prices of all sites
    #   are in the loss's unit and add up to the rise of the whole, except where a falling price was
    #   raised to the one before it.
    # - Where leaving out a block changes the order of removal, the standard error is a rough one.

    matrices: ClassVar[int] = 2
    one_block_with_neurons: ClassVar[bool] = True

    curvature: Literal["output", "logits", "loss"] | None = None
    ridge: float = 1e-2
    draws: int | None = None
    blocks: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.curvature is not None and self.curvature not in CURVATURES:
            must = f"one of {', '.join(CURVATURES)}, or None"
            raise InvalidValue("Surgeon.curvature", must, repr(self.curvature))
        if not self.ridge > 0:
            raise InvalidValue("Surgeon.ridge", "a number > 0", self.ridge)
        if self.draws is not None and self.draws < 1:
            raise InvalidValue("Surgeon.draws", "at least 1, or None", self.draws)
        if self.draws is not None and self.curvature == "loss":
            must = "None with curvature='loss', which draws nothing"
            raise InvalidValue("Surgeon.draws", must, self.draws)
        if self.blocks < 1:
            raise InvalidValue("Surgeon.blocks", "a count >= 1", self.blocks)

    @property
    def by_example(self) -> bool:
        return False

    def only_passes(self) -> _SurgeonPasses:
        return _SurgeonPasses(self.curvature, self.ridge, self.draws, self.blocks, self.seed)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        # Its matrices are as wide as a feed-forward: one block of examples has to do.
        neurons = any(b.layout.is_feed_forward for b in problem.bound)
        if neurons and self.blocks > 1:
            estimate = replace(self, blocks=1).estimate(problem)
            return replace(estimate, notes=(*estimate.notes, _ONE_BLOCK))
        curvature: str | None = self.curvature
        if curvature is None:
            curvature = "output" if is_default(problem.loss) else "loss"

        # 1. Gather both factors of all sites in one pass.
        flags, of_site = self._gathered(problem, curvature)
        factors = list(of_site.values())
        _check(factors)

        # 2. Price the units: with all examples, and without each block of them.
        n_examples = problem.examples
        sizes = [len(range(block, n_examples, self.blocks)) for block in range(self.blocks)]
        examples = torch.tensor(sizes, dtype=torch.float64)  # [blocks]
        runs = torch.stack(runs_of(examples, sizes))  # [runs, blocks]
        rows = pseudo_values(self._prices(factors, examples, runs), sizes)
        if curvature == "loss":
            refuse_flat(problem, (2 * rows.abs().max()).sqrt())  # a price is half a squared slope

        # 3. Average, and note what the user should know.
        row = "example" if n_examples == 1 else "block of examples"
        estimate = averaged(rows, n_examples, row=row)
        if flags.drawn:
            estimate = replace(estimate, seed=self.seed)
        if curvature == "loss":
            return noted(problem, estimate)
        notes = output_notes(problem.loss, f"curvature={curvature!r}")
        return replace(estimate, notes=(*estimate.notes, *notes))

    def _gathered(
        self, problem: ScoringProblem, curvature: str
    ) -> tuple[_Flags, dict[int, Factors]]:
        """The factors of every site with heads, by its number, over the data of all processes."""
        what = "slopes of contexts"
        flags = _Flags()
        factors = {}
        for site, b in enumerate(problem.bound):
            if b.site.heads:
                factors[site] = Factors(b, self.blocks)
        by_name = {str(site): factor for site, factor in factors.items()}

        def add_share() -> dict[str, Tensor]:
            into = problem.resumable(seen=flags, **by_name)
            for number, first, batch in problem.share(what, into):
                examples = range(first, first + batch_size(batch))
                flags.drawn |= self._add_batch(problem, number, batch, curvature, factors, examples)
                flags.coupled |= losses_are_coupled(problem)
            return flags.parts()

        flags.join(problem.gathered(what, add_share))
        if flags.coupled:
            remember_coupled_losses(problem)
        if problem.workers.size > 1:
            for factor in factors.values():
                # One at a time, because they may be large.
                factor.join(problem.workers.exchanged(factor.parts))
        return flags, factors

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _add_batch(
        self,
        problem: ScoringProblem,
        number: int,
        batch: Any,
        curvature: str,
        factors: Mapping[int, Factors],
        examples: range,
    ) -> bool:
        """Add a batch's tokens to the factors, and return whether labels were drawn."""
        # By site and run, [rows, tokens]: which tokens are no padding; None where all count.
        tokens: _PerRun = [[] for _ in problem.bound]

        def note_tokens(site: int, x: Tensor) -> None:
            b, run = problem.bound[site], inputs.now
            rows = rows_of(b, x.detach(), run.batch)
            tokens[site].append(counted(problem.model, b, rows, run))

        with (
            inputs_of(problem.model, problem.bound) as inputs,
            leaves(problem, note_tokens) as contexts,
        ):
            inputs.begin(batch)
            # 1. Run the model, and choose the numbers to differentiate.
            drawn = False
            if curvature == "loss":
                targets = _losses(problem, number, batch, contexts)
            else:
                targets, drawn = self._outputs(problem, number, batch, curvature, contexts)
            # 2. Add their slopes to C.
            what = "the loss" if curvature == "loss" else "the model's output"
            weights: _PerRun = [[None] * len(runs) for runs in contexts]
            # One target at a time: the slopes of one are as large as the contexts.
            for i, target in enumerate(targets):
                is_last = i == len(targets) - 1
                slopes = gradients_of(problem, target, contexts, what, not is_last)
                _add_slopes(factors, examples, batch, slopes, tokens, weights)
        # 3. Add the contexts, weighted by the slopes of all targets, to A.
        for site, factor in factors.items():
            for x, weight in zip(contexts[site], weights[site], strict=True):
                assert weight is not None  # there is a target
                factor.add_tokens(examples, x.detach(), weight, batch)
        return drawn

    def _outputs(
        self,
        problem: ScoringProblem,
        number: int,
        batch: Any,
        curvature: str,
        contexts: list[list[Tensor]],
    ) -> tuple[list[Tensor], bool]:
        """Numbers to differentiate made of the model's output, and whether any were drawn."""
        predicted = distributions(
            problem.model, batch, f"batch {number}", problem.given, shift_of(problem.loss)
        )
        numbers = predicted.numbers()  # [examples]
        slopes = _slopes_by_example(problem, batch, numbers, contexts)
        if coupled(problem, numbers, slopes, numbers=OUTPUTS):
            refuse_coupled(problem, f"surgeon with curvature={curvature!r}", OUTPUTS)
        seeds = content_seeds(problem.model, problem.given, self.seed)
        if curvature == "output":
            return fisher_targets(predicted, seeds, self.draws)
        return logit_targets(predicted, seeds, self.draws)

    def _prices(self, factors: Sequence[Factors], examples: Tensor, weights: Tensor) -> Tensor:
        """``[runs, units]`` from the blocks that count in each run, on the CPU.

        Args:
            factors: The sums of every site.
            examples: ``[blocks]``, how many are in each.
            weights: ``[runs, blocks]`` of 0 and 1.
        """
        # A removal at one site changes nothing at another. So each site's order is found on its own
        # device, without waiting for it. One copy brings all of them to the CPU, to be merged.
        removals = in_main_memory(removed(factors, weights, weights @ examples, self.ridge))
        for f, of_site in zip(factors, removals, strict=True):
            if bool(of_site[:, 1].isnan().any()):
                must = "large enough to invert the covariance of the projection's input"
                got = f"{self.ridge} at {f.bound.site.name}, with linearly dependent channels"
                raise InvalidValue("Surgeon.ridge", must, got, "Use a larger one, or more data.")
        by_run = zip(*removals, strict=True)  # of each run, [2, units] per site
        return torch.stack(list(map(_rising, by_run)))


class _SurgeonPasses(Surgeon):
    """The passes of ``Surgeon`` without its removals."""

    def _prices(self, factors: Sequence[Factors], examples: Tensor, weights: Tensor) -> Tensor:
        n_units = sum(len(f.bound.site.units) for f in factors)
        return torch.ones(*weights.shape[:-1], n_units, dtype=torch.float64)


def _losses(
    problem: ScoringProblem, number: int, batch: Any, contexts: list[list[Tensor]]
) -> list[Tensor]:
    """The summed loss of a batch; each example's own where losses depend on other examples."""
    losses = problem.losses(number, batch)
    slopes = _slopes_by_example(problem, batch, losses, contexts)
    if coupled(problem, losses, slopes):
        return list(losses.unbind())
    return [losses.sum()]


def _slopes_by_example(
    problem: ScoringProblem, batch: Any, numbers: Tensor, contexts: list[list[Tensor]]
) -> Slopes:
    """Slopes of numbers ``[examples]`` in everything that the sites have read."""
    runs = [(b, x) for b, xs in zip(problem.bound, contexts, strict=True) for x in xs]
    of_sums = slopes_of(numbers, [x for _, x in runs])

    def slopes(weights: Tensor) -> list[Tensor]:
        of_runs = []
        for (b, _), g in zip(runs, of_sums(weights), strict=True):
            rows = by_example(b, rows_of(b, g, batch), len(numbers)).flatten(1)
            of_runs.append(rows.nan_to_num(0))  # attention may leave NaN at padding
        return of_runs

    return slopes


def _add_slopes(
    factors: Mapping[int, Factors],
    examples: range,
    batch: Any,
    slopes: Sequence[Sequence[Tensor]],
    tokens: _PerRun,
    weights: _PerRun,
) -> None:
    """Add one target's slopes to the factors, and to the ``weights`` of the tokens."""
    for site, factor in factors.items():
        for run, g in enumerate(slopes[site]):
            weight = factor.add_slopes(examples, g, batch, tokens[site][run])
            before = weights[site][run]
            weights[site][run] = weight if before is None else before + weight


def _rising(removals: Sequence[Tensor]) -> Tensor:
    """``[units]``: the prices of all sites' units in one run, none below the one before it.

    Args:
        removals: Of every site ``[2, units]``: its units in their order of removal there, and their
            prices.
    """
    orders = []
    for units, prices in removals:
        orders.append(list(zip(map(int, units), map(float, prices), strict=True)))
    risen: dict[tuple[int, int], float] = {}
    highest = 0.0
    for site, unit, price in _merged(orders):
        highest = max(price, highest * (1 + _APART))
        risen[site, unit] = highest
    return torch.tensor([risen[place] for place in sorted(risen)], dtype=torch.float64)


def _merged(orders: Sequence[list[tuple[int, float]]]) -> Iterator[tuple[int, int, float]]:
    """Yield ``(site, unit, price)`` in the order of removal, always the cheapest of all sites.

    Of equal prices the first site comes first.

    Args:
        orders: For every site its units and their prices, in their order of removal there.
    """
    places = [0] * len(orders)
    for _ in range(sum(map(len, orders))):
        waiting = [site for site, order in enumerate(orders) if places[site] < len(order)]
        site = min(waiting, key=lambda s: orders[s][places[s]][1])
        yield site, *orders[site][places[site]]
        places[site] += 1


class _Flags:
    """Whether labels were drawn, and whether the loss couples examples."""

    drawn = False
    coupled = False

    def parts(self) -> dict[str, Tensor]:
        """Both, for the other processes."""
        return {"drawn": torch.tensor(self.drawn), "coupled": torch.tensor(self.coupled)}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Replace both by whether they hold in any process."""
        self.drawn = any(bool(part["drawn"]) for part in parts)
        self.coupled = any(bool(part["coupled"]) for part in parts)


def _check(factors: Sequence[Factors]) -> None:
    """Check the sums of all sites, with one copy from the device.

    Raises:
        InvalidValue: nothing but padding reached a site, or numbers that are not finite.
    """
    flags = []
    for f in factors:
        is_finite = f.xx.isfinite().all() & f.gg.isfinite().all()
        flags.append(torch.stack([f.tokens > 0, is_finite]))
    for f, of_site in zip(factors, in_main_memory(flags), strict=True):
        name = f.bound.site.name
        has_tokens, is_finite = of_site.tolist()
        if not has_tokens:
            raise only_padding(name)
        if not is_finite:
            raise not_finite(f"what {name} gives Surgeon")
