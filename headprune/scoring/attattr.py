"""Attention attribution: integrated gradients of the answer over a layer's attention maps (Hao et
al. 2021)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.gating.context import gated
from headprune.model.padding import PaddingInfo
from headprune.model.precision import product_eps
from headprune.model.running import batch_size, device_of
from headprune.model.sites import BoundSite, sites_of
from headprune.scoring._activations import run
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, one_of
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
    labels.

    A are the maps of all heads of one site; the layers below are as they are, those above follow. F
    is the probability of the label, ``exp(-loss)``. Higher is more important; a head that only
    speaks against the label can come out below 0. Scaling a map is gating its head,
    ``(aA)V = a(AV)``, so every step runs with gates of s/m.

    Source: Hao et al. 2021, "Self-Attention Attribution: Interpreting Information Interactions
    Inside Transformer", equations (3) and (4) for Attr, section 5.1 for I. Differences: the label's
    probability is that of the per-example loss, so that language models have one too (that of a
    token, in the geometric mean); padding takes no part in the maximum; a unit of several heads is
    the sum of theirs; a module that runs several times in a pass is scaled in all its runs, and the
    maximum is over all of them.

    When: few examples are there, and many passes can be paid: with 32 it did about as well as
    ``taylor`` with 512.
    Cost: ``steps`` forward passes and backward passes a site, those backward only from the loss to
    the site. Needs maps that the values are multiplied with: Transformers' models run eagerly for
    the pass, our own attention shows its weights. That a map is the one in use is proven in every
    pass: ``sum_qk A dF/dA`` is the gradient of the head's gate. What fails is refused, as is a
        fused kernel.

    Args:
        steps: m, of the sum that stands for the integral; the paper's is 20.
        of: F: ``probability`` (the paper), or ``loss``, the log-probability ``-loss``.
    """

    steps: int = 20
    of: str = "probability"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InvalidValue("Attattr.steps", "a count >= 1", self.steps)
        one_of("Attattr.of", self.of, ("probability", "loss"))

    def estimate(self, problem: ScoringProblem) -> Estimate:
        bound = [b for b in problem.bound if b.site.heads]
        device, places = device_of(problem.model), Places(problem)

        def of_batch(number: int, batch: Any) -> Tensor:
            batch = taken(batch)
            if not places.knows(
                bound
            ):  # of all sites in one pass, so that they are looked at together
                with torch.no_grad(), mapping(bound, places) as maps:
                    run(problem.model, batch, problem.loss)
                    maps()
            rows = [self._site(problem, b, number, batch, places) for b in bound]
            refuse_coupled_losses(problem, number, batch, "attattr")
            if number == problem.before:
                # Most mistakes show in the first batch, and the others may take long.
                problem.run_checks()
            return torch.cat([of_site.to(device) for of_site in rows], 1)

        with eager(problem.model) as taken:
            rows = problem.rows("attention attribution", of_batch)
        return mean_over_examples(rows)

    def _site(
        self, problem: ScoringProblem, b: BoundSite, number: int, batch: Any, places: Places
    ) -> Tensor:
        """``[examples, units]``."""
        size = batch_size(batch)
        total: list[Tensor] = []
        for step in range(1, self.steps + 1):
            maps, gradients, given = self._step(
                problem, b, number, batch, step / self.steps, places
            )
            total = (
                gradients if not total else [t + g for t, g in zip(total, gradients, strict=True)]
            )
        only_padding = InvalidValue(
            "batches", "with a token that is no padding", f"only padding at {b.site.name}"
        )
        best = []
        for whole, summed, inputs in zip(
            maps, total, given, strict=True
        ):  # of the last step: its maps are whole
            found = by_example(b, whole.double() * summed / self.steps, size)
            queries, keys = visible(problem.model, b, inputs, (size, *found.shape[2:]))
            counted = queries[:, None, :, None] & keys[:, None, None, :]
            nothing = ~counted.flatten(1).any(1)
            problem.refuse_later(
                ("a token that is no padding", b.site.name), nothing, lambda _: only_padding
            )
            best.append(found.masked_fill(~counted, -torch.inf).amax((2, 3)))
        return unit_sums(b, torch.stack(best).amax(0))

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
        """The maps of a site's runs, the gradients of F with respect to the maps times ``scale``,
        in fp64, and what tells the padding of each run.
        """
        weight = next(b.module.parameters())
        wide = torch.promote_types(weight.dtype, torch.float32)
        shape = (batch_size(batch), len(b.site.heads))
        gate = torch.full(shape, scale, device=device_of(b.module), dtype=wide, requires_grad=True)
        with ExitStack() as stack:
            shown = stack.enter_context(mapping([b], places, graph=True))
            stack.enter_context(gated(problem.model, {b.site.name: gate}, sites_of(problem.bound)))
            given = stack.enter_context(padding_info(problem.model, [b], batch))
            losses = problem.losses(number, batch)
            maps = checked_runs(b, shown()[0])
        answer = (torch.exp(-losses) if self.of == "probability" else -losses).sum()
        if not answer.requires_grad:
            hint = "Leave this site out with sites=, or use a loss that depends on it."
            raise InvalidValue(
                "the loss", f"one that depends on {b.site.name}", "no dependence on it", hint
            )
        of_gate, *gradients = torch.autograd.grad(answer, [gate, *maps], allow_unused=True)
        pairs = [
            (m.detach().double(), g.double())
            for m, g in zip(maps, gradients, strict=True)
            if g is not None
        ]
        if of_gate is None or len(pairs) < len(maps):
            raise _unused(b)
        inner = [by_example(b, m * g, len(of_gate)).nan_to_num(0).sum((2, 3)) for m, g in pairs]
        expected = of_gate.double() * scale
        slack = min(0.1, 64 * product_eps(weight.dtype, weight.device) ** 0.75) * (
            expected.abs().max() + 1e-6
        )
        apart = (torch.stack(inner).sum(0) - expected).abs() > slack
        problem.refuse_later(("a map in use", b.site.name), apart, lambda _: _unused(b))
        return [m for m, _ in pairs], [g / scale for _, g in pairs], given[0]


def _unused(b: BoundSite) -> UnsupportedModel:
    hint = "Leave this site out with sites=, or take another scorer, such as integrated_gradients."
    must, got = (
        "what the values are multiplied with (eager attention)",
        "others: their gradient is not the gate's",
    )
    return UnsupportedModel(f"the attention map of {b.site.name}", must, got, hint)
