"""First-order estimate of how the loss changes when a head's output is replaced by another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue, check_one_of
from headprune.model.contexts import reading, rows_of
from headprune.model.sites import BoundSite
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, ScoringProblem
from headprune.scoring._contexts import leaves, mean_contexts
from headprune.scoring._coupling import alone, asks, coupled, noted
from headprune.scoring._flat import refuse_flat
from headprune.scoring._gates import by_unit, gradients_of, slopes_of
from headprune.scoring._gradients import GradientScorer, gathered

#: By site number, the heads' outputs: one tensor for each time that the site runs in a pass, or one
#: for all of them.
Contexts: TypeAlias = dict[int, list[Tensor]]


@dataclass(frozen=True)
class AttributionPatching(GradientScorer):
    """``I_h = mean_i sum_t <base_th - ctx_ith, dl_i/dctx_ith>``: at most two forward and one
    backward pass, needs labels.

    It estimates how much the loss rises when the head's output ``ctx``, the output projection's
    input, is replaced at every token. Signed; higher is more important.

    Source: Nanda 2023, "Attribution Patching: Activation Patching At Industrial Scale", and Syed,
    Rager, Conmy 2023, "Attribution Patching Outperforms Automated Circuit Discovery". Their base is
    a corrupted input and their metric a difference of logits; ours is the loss.

    When: the question is what a head passes on about its input (``corrupt``); to choose heads, take
    ``taylor``.

    Args:
        base: ``zero``, which is ``Taylor(reduce="signed")`` and shares its pass; ``mean``, the
            head's mean output over all tokens that are no padding; ``corrupt``, its output at the
            same place on a corrupted batch.
        corrupt: For ``corrupt``: ``batch -> corrupted batch``, with the same examples and tokens.
            It must be deterministic. For prepared pairs, let batches carry both; the loss runs the
            clean part.

    The standard error is over examples; the mean output is taken as known.

    >>> AttributionPatching(
    ...     base="corrupt", corrupt=lambda batch: {**batch, "input_ids": batch["input_ids"].flip(0)}
    ... )
    AttributionPatching(base='corrupt', corrupt=<function <lambda> at ...>)
    """

    base: str = "zero"
    corrupt: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        check_one_of("AttributionPatching.base", self.base, ("zero", "mean", "corrupt"))
        if (self.base == "corrupt") != callable(self.corrupt):
            must = "a callable batch -> corrupted batch, with base='corrupt' only"
            raise InvalidValue("AttributionPatching.corrupt", must, self.corrupt)

    @property
    def settings(self) -> FrozenDict:
        if self.corrupt is None:
            return FrozenDict({"base": self.base, "corrupt": None})
        named = getattr(self.corrupt, "__qualname__", type(self.corrupt).__qualname__)
        return FrozenDict({"base": self.base, "corrupt": f"{self.corrupt.__module__}.{named}"})

    def estimate(self, problem: ScoringProblem) -> Estimate:
        if self.base == "zero":
            return noted(problem, averaged(gathered(problem, self).rows))
        means: dict[int, Tensor] = {}
        if self.base == "mean":
            means = mean_contexts(problem)

        def of_batch(number: int, batch: Any) -> Tensor:
            if self.base == "corrupt":
                return _effects(problem, number, batch, self._corrupted(problem, batch))
            return _effects(problem, number, batch, {site: [m] for site, m in means.items()})

        rows = problem.rows("attribution patching", of_batch)
        refuse_flat(problem, rows.abs().max())
        return noted(problem, averaged(rows))

    @property
    def reads_gradients(self) -> bool:
        return self.base == "zero"

    def of_gradients(self, gradients: Tensor) -> Tensor:
        return -gradients

    def _corrupted(self, problem: ScoringProblem, batch: Any) -> Contexts:
        """The heads' outputs on the corrupted batch."""
        assert self.corrupt is not None
        outputs: Contexts = {}
        corrupted = self.corrupt(batch)

        def take(site: int, x: Tensor, counted: Tensor | None) -> None:
            outputs.setdefault(site, []).append(x)

        with torch.no_grad(), reading(problem.model, problem.bound, take) as begin:
            begin(corrupted)
            problem.loss(problem.model, corrupted)
        return outputs


@torch.inference_mode(False)
@torch.enable_grad()
def _effects(problem: ScoringProblem, number: int, batch: Any, bases: Contexts) -> Tensor:
    """``[examples, units]``: ``sum_t <base - ctx, dl/dctx>``, summed over the runs of a site and
    its unit's heads."""
    with leaves(problem) as contexts:
        losses = problem.losses(number, batch)
        asked = asks(problem, len(losses), losses.device)  # whether gradients of other sums follow
        gradients_of_sum = gradients_of(problem, losses.sum(), contexts, keep_graph=asked)
    of_sums = slopes_of(losses, list(chain.from_iterable(contexts)))

    def effects(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        of_sites = []
        for site, (xs, of_site) in enumerate(zip(contexts, gradients, strict=True)):
            b = problem.bound[site]
            of_sites.append(_effect(b, batch, losses, xs, bases[site], of_site))
        return of_sites

    def slopes(weights: Tensor) -> list[Tensor]:
        flat = iter(of_sums(weights))
        return effects([list(islice(flat, len(xs))) for xs in contexts])

    of_heads = effects(gradients_of_sum)  # per site [examples, heads]
    if coupled(problem, losses, slopes, of_heads):
        of_heads = alone(losses, slopes)
    return by_unit(problem, of_heads)


def _effect(
    b: BoundSite,
    batch: Any,
    losses: Tensor,
    contexts: Sequence[Tensor],
    bases: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Tensor:
    """``[examples, heads]`` of a site, in all its runs."""
    n_examples, n_heads = len(losses), len(b.site.heads)
    effect = losses.new_zeros(n_examples, n_heads).detach()
    for run, (x, gradient) in enumerate(zip(contexts, gradients, strict=True)):
        # One base may stand for all runs.
        base = bases[min(run, len(bases) - 1)].to(x.dtype)
        x = rows_of(b, x.detach(), batch)
        if base.ndim > 1 and base.shape != x.shape:
            where = f"the corrupted batch at {b.site.name}, rows x tokens x width"
            must = f"as long as the clean one, {list(x.shape)}"
            raise InvalidValue(where, must, list(base.shape))
        products = (base - x) * rows_of(b, gradient, batch)  # [rows, tokens, heads * width]
        effect += products.reshape(n_examples, -1, n_heads, b.site.value_dim).sum((1, 3))
    return effect
