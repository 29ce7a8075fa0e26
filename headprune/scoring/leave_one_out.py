"""Ablation: how much the loss rises when one head alone is switched off; exact, one forward pass a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headprune.gating.context import gated
from headprune.model.losses import checked_losses
from headprune.model.sites import sites_of
from headprune.scoring._base import Estimate, Problem, Scorer
from headprune.scoring.taylor import mean_and_error


@dataclass(frozen=True)
class LeaveOneOut(Scorer):
    """``I_h = mean_i [l_i(m_h = 0) - l_i(m = 1)]``: n + 1 forward passes for n heads, labels.

    Source: Michel, Levy, Neubig 2019, section 3.2 (there on accuracy and BLEU; here on the loss, which is finer).
    Negative where the model does better without the head. The standard error is that of the mean over examples.
    """

    def estimate(self, problem: Problem) -> Estimate:
        sites = sites_of(problem.bound)
        rows = []
        with torch.no_grad():
            for number, batch in problem.passes("leave one out"):
                base = checked_losses(problem.loss, problem.model, batch, number)
                columns = []
                for bound in problem.bound:
                    for unit in bound.site.units:
                        gate = torch.tensor([float(h not in unit) for h in bound.site.heads], device=base.device)
                        with gated(problem.model, {bound.site.name: gate}, sites):
                            columns.append(checked_losses(problem.loss, problem.model, batch, number) - base)
                rows.append(torch.stack(columns, 1).double().cpu())
        differences = torch.cat(rows)
        return Estimate(*mean_and_error(differences), len(differences))
