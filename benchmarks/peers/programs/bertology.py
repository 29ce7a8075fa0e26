"""``prune_heads`` of Transformers 4 with the scores of its bertology example.

The example (``run_bertology.py``) follows Michel et al. 2019: |dl/dm_h| by ``head_mask``, summed
over single examples, divided by the L2 norm of its layer, a tenth of the heads masked at a time
with new scores in between, ``prune_heads`` at the end. It never clears ``head_mask.grad``, so that
its scores depend on the order of the examples, and fails at its second round of scores, for a mask
that is no leaf; both are mended here.
"""

from __future__ import annotations

import copy
from pathlib import Path
from time import perf_counter

import torch
from protocol import Cut, Job, Run, head_width, heads_kept, main, pretrained, running, saving
from torch import Tensor, nn


def cut(job: Job) -> Cut:
    base = pretrained(job.base, job.device)
    small = copy.deepcopy(base)
    batches = job.batches("calibration", size=1, labels=True)
    start, scoring = perf_counter(), 0.0
    mask = torch.ones(
        base.config.num_hidden_layers, base.config.num_attention_heads, device=job.device
    )
    while (left := int(mask.sum())) > job.kept:
        begun = perf_counter()
        scores = importance(small, batches, mask)
        scoring += perf_counter() - begun
        go = min(left - job.kept, max(1, round(job.settings["step"] * mask.numel())))
        scores[mask == 0] = float("inf")
        mask.view(-1)[scores.view(-1).argsort()[:go]] = 0
    small.prune_heads(
        {
            layer: (row == 0).nonzero().view(-1).tolist()
            for layer, row in enumerate(mask)
            if not row.all()
        }
    )
    seconds = {"score": scoring, "cut": perf_counter() - start - scoring}
    return Cut(
        running(base), running(small), saving(small), seconds, heads_kept(small, head_width(base))
    )


def importance(model: nn.Module, batches: list[dict[str, Tensor]], mask: Tensor) -> Tensor:
    """``[layers, heads]``."""
    total = torch.zeros_like(mask)
    wanted = [p for p in model.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    for batch in batches:
        gates = mask.clone().requires_grad_(True)
        loss = model(**batch, head_mask=gates).loss
        if not loss.requires_grad:  # nothing else is trainable here
            raise RuntimeError("head_mask= is taken and ignored: the loss does not depend on it")
        loss.backward()
        assert gates.grad is not None
        total += gates.grad.abs()
    for parameter in wanted:
        parameter.requires_grad_(True)
    return total / (total.norm(dim=1, keepdim=True) + 1e-20)


def load(job: Job, folder: Path) -> Run:
    return running(pretrained(folder, job.device))


if __name__ == "__main__":
    main(cut, load)
