"""Torch-Pruning removes whole heads of a BERT or ViT of Transformers, as its examples do it, with
Taylor importance.

Its examples shrink every layer; all layers but query, key and value projections are ignored here,
so that nothing but whole heads goes. Of a share of the multiply-adds, neurons of feed-forwards go
as well, as large a share of them as of the heads. Attributes of the attention are mended by hand,
as in its examples. Its gradients are sums over the calibration rows.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from protocol import (
    Cut,
    Job,
    Run,
    feed_forward,
    head_width,
    heads_kept,
    layers_of,
    main,
    neurons_kept,
    pretrained,
    running,
)
from torch import nn


def cut(job: Job) -> Cut:
    package = importlib.import_module("torch_pruning")
    base = pretrained(job.base, job.device)
    width = head_width(base)
    small = copy.deepcopy(base)
    attentions = [m for m in small.modules() if isinstance(getattr(m, "query", None), nn.Linear)]
    projections = {
        p: base.config.num_attention_heads for m in attentions for p in (m.query, m.key, m.value)
    }
    pruned = set(projections)
    if job.of_share:
        pruned |= {feed_forward(layer)[0] for layer in layers_of(small)}
    others = [
        m for m in small.modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and m not in pruned
    ]
    start = perf_counter()
    for parameter in small.parameters():
        parameter.grad = None
    for batch in job.batches("calibration", labels=True):
        small(**batch).loss.backward()
    seconds = {"score": perf_counter() - start}
    start = perf_counter()
    ratio = 1 - (job.kept if job.of_share else job.kept / job.heads)
    pruner = package.pruner.BasePruner(
        small,
        job.batches("test", size=2)[0],
        importance=package.importance.TaylorImportance(),
        global_pruning=job.settings["global"],
        pruning_ratio=ratio,
        head_pruning_ratio=ratio,
        num_heads=dict(projections),
        prune_num_heads=True,
        prune_head_dims=False,
        ignored_layers=others,
        output_transform=lambda found: found.logits.sum(),
    )
    for group in pruner.step(interactive=True):
        group.prune()
    if not all(pruner.num_heads[attention.query] for attention in attentions):
        raise RuntimeError("removed every head of a layer, with which the model does not run")
    for attention in attentions:
        attention.num_attention_heads = pruner.num_heads[attention.query]
        attention.all_head_size = attention.query.out_features
        attention.attention_head_size = attention.all_head_size // attention.num_attention_heads
    small.zero_grad(set_to_none=True)
    seconds["cut"] = perf_counter() - start
    kept = heads_kept(small, width)
    if sum(kept) == job.heads:
        raise RuntimeError("removed no head, and said nothing")
    neurons = neurons_kept(small) if job.of_share else None
    return Cut(running(base), running(small), _saving(small), seconds, kept, neurons=neurons)


def _saving(model: Any) -> Any:
    def save(folder: Path) -> str:
        """As its examples save: the module itself."""
        torch.save(model, folder / "model.pth")
        return "torch.save of the module (a pickle), torch.load"

    return save


def load(job: Job, folder: Path) -> Run:
    return running(
        torch.load(folder / "model.pth", map_location=job.device, weights_only=False).eval()
    )


if __name__ == "__main__":
    main(cut, load)
