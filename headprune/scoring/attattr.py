"""Attention attribution: integrated gradients of the answer over a layer's attention maps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue, UnsupportedModel, check_count, check_one_of
from headprune.gating.context import gated
from headprune.model.contexts import only_padding
from headprune.model.padding import PaddingInfo
from headprune.model.precision import product_eps
from headprune.model.running import batch_size, device_of
from headprune.model.sites import BoundSite, sites_of
from headprune.scoring._activations import run
from headprune.scoring._base import (
    Estimate,
    Scorer,
    ScoringProblem,
    with_heads,
)
from headprune.scoring._gates import gate_dtype
from headprune.scoring._gradients import refuse_coupled_losses
from headprune.scoring._maps import (
    Places,
    by_example,
    checked_runs,
    eager,
    mapping,
    mean_over_examples,
    padding_info,
    unit_sums,
    visible,
)


@dataclass(frozen=True)
class Attattr(Scorer):
    """``I_h = mean_i max_qk Attr_h[q, k]``, ``Attr_h = A_h * 1/m sum_{s=1..m} dF(s/m A) / dA_h``;
    needs labels.

    A are the maps of all heads of one site; the layers below keep theirs, those above follow. F is
    the probability of the label, ``exp(-loss)``. Higher is more important; a head that only speaks
    against the label can come out below 0.

    Source: Hao et al. 2021, "Self-Attention Attribution: Interpreting Information Interactions
    Inside Transformer", equations (3), (4), and section 5.1. Differences: a per-example loss in
    place of the label's probability, so that language models have one (the geometric mean over
    tokens); no padding in the maximum; a unit of several heads is the sum of theirs; the maximum is
    over all runs of a module.

    When: few examples are there, and many passes can be paid: with 32 it did about as well as
    ``taylor`` with 512.
    Cost: ``steps`` forward and backward passes per site; a backward pass ends at the site. Needs
    attention maps: Transformers' models run eagerly for the pass, fused kernels are refused.

    Args:
        steps: m, of the sum that stands for the integral; the paper's is 20.
        of: F: ``probability`` (the paper), or ``loss``, the log-probability ``-loss``.
    """

    steps: int = 20
    of: str = "probability"

    @property
    def scores_neurons(self) -> bool:
        return False

    def __post_init__(self) -> None:
        check_count("Attattr.steps", self.steps)
        check_one_of("Attattr.of", self.of, ("probability", "loss"))

    def estimate(self, problem: ScoringProblem) -> Estimate:
        bound = with_heads(problem.bound)
        device = device_of(problem.model)
        places = Places(problem)

        def of_batch(number: int, batch: Any) -> Tensor:
            batch = for_eager(batch)
            if not places.knows(bound):
                # The places of all sites in one pass, because reading them waits for an
                # accelerator.
                with torch.no_grad(), mapping(bound, places) as maps:
                    run(problem.model, batch, problem.loss)
                    maps()
            rows = [self._site(problem, b, number, batch, places) for b in bound]
            refuse_coupled_losses(problem, number, batch, "attattr")
            if number == problem.before:
                # Most mistakes show in the first batch, and the others may take long.
                problem.run_checks()
            return torch.cat([of_site.to(device) for of_site in rows], 1)

        with eager(problem.model) as for_eager:
            rows = problem.rows("attention attribution", of_batch)
        return mean_over_examples(rows)

    def _site(
        self, problem: ScoringProblem, b: BoundSite, number: int, batch: Any, places: Places
    ) -> Tensor:
        """``[examples, units]``."""
        size = batch_size(batch)
        # 1. Sum the gradients over all steps, per run of the site.
        total: list[Tensor] = []
        for step in range(1, self.steps + 1):
            maps, gradients, paddings = self._step(
                problem, b, number, batch, step / self.steps, places
            )
            if total:
                gradients = [t + g for t, g in zip(total, gradients, strict=True)]
            total = gradients

        # 2. Multiply them with the maps of the last step, which are whole.
        largest = []  # per run [examples, heads]
        for whole, summed, padding in zip(maps, total, paddings, strict=True):
            attribution = by_example(b, whole.double() * summed / self.steps, size)
            queries, keys = visible(problem.model, b, padding, (size, *attribution.shape[2:]))
            counted = queries[:, None, :, None] & keys[:, None, None, :]
            nothing = ~counted.flatten(1).any(1)
            key = "a token that is no padding", b.site.name
            problem.refuse_later(key, nothing, lambda _: only_padding(b.site.name))
            largest.append(attribution.masked_fill(~counted, -torch.inf).amax((2, 3)))
        return unit_sums(b, torch.stack(largest).amax(0))

    @torch.inference_mode(False)
    @torch.enable_grad()  # whatever the caller has set
    def _step(
        self,
        problem: ScoringProblem,
        b: BoundSite,
        number: int,
        batch: Any,
        scale: float,
        places: Places,
    ) -> tuple[list[Tensor], list[Tensor], list[PaddingInfo]]:
        """The maps of a site's runs, the gradients of F at the maps times ``scale`` in fp64, and
        the padding of each run."""
        # 1. Run the model. A gate scales the map of its head, because (aA)V = a(AV).
        shape = (batch_size(batch), len(b.site.heads))
        gate = torch.full(shape, scale, device=device_of(b.module), dtype=gate_dtype(b))
        gate.requires_grad_()
        with ExitStack() as stack:
            shown = stack.enter_context(mapping([b], places, graph=True))
            stack.enter_context(gated(problem.model, {b.site.name: gate}, sites_of(problem.bound)))
            paddings = stack.enter_context(padding_info(problem.model, [b], batch))
            losses = problem.losses(number, batch)
            maps = checked_runs(b, shown()[0])

        # 2. Take the gradients with respect to the gate and the maps.
        answer = -losses
        if self.of == "probability":
            answer = torch.exp(answer)
        total = answer.sum()
        if not total.requires_grad:
            must, got = f"one that depends on {b.site.name}", "no dependence on it"
            hint = "Leave this site out with sites=, or use a loss that depends on it."
            raise InvalidValue("the loss", must, got, hint)
        of_gate, *of_maps = torch.autograd.grad(total, [gate, *maps], allow_unused=True)
        gradients = [g.double() for g in of_maps if g is not None]
        if of_gate is None or len(gradients) < len(maps):
            raise _unused(b)

        # 3. Prove that the maps are those in use: sum_qk A dF/dA is the gradient of the gate.
        maps = [m.detach().double() for m in maps]
        inner = []
        for m, g in zip(maps, gradients, strict=True):
            inner.append(by_example(b, m * g, len(of_gate)).nan_to_num(0).sum((2, 3)))
        expected = of_gate.double() * scale  # [examples, heads]
        weight = next(b.module.parameters())
        tolerance = min(0.1, 64 * product_eps(weight.dtype, weight.device) ** 0.75)
        slack = tolerance * (expected.abs().max() + 1e-6)
        apart = (torch.stack(inner).sum(0) - expected).abs() > slack
        problem.refuse_later(("a map in use", b.site.name), apart, lambda _: _unused(b))
        return maps, [g / scale for g in gradients], paddings[0]


def _unused(b: BoundSite) -> UnsupportedModel:
    must = "the one that the values are multiplied by (eager attention)"
    got = "another: its gradient does not match the gate's"
    hint = "Leave this site out with sites=, or take another scorer, such as integrated_gradients."
    return UnsupportedModel(f"the attention map of {b.site.name}", must, got, hint)
