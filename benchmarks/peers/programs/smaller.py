"""A plain smaller BERT or ViT with as many multiply-adds, trained as long or longer: what anyone
could do instead.

It keeps the first layers of the pretrained model, as many as the cut model's multiply-adds pay for,
rounded up, and narrows their feed-forwards (neurons of the largest weights stay) until the
multiply-adds are those of the cut model. A layer of width D with feed-forward F at T tokens takes
``4 D² + 2 T D + 2 D F`` a token; a layer that keeps the share s of its heads,
``s (4 D² + 2 T D) + 2 D F``. Where the budget is a share of all multiply-adds, it is met directly.
"""

from __future__ import annotations

import math
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import training
from protocol import (
    Cut,
    Job,
    Run,
    feed_forward,
    layer_macs,
    layers_of,
    main,
    pretrained,
    running,
    saving,
)
from torch import nn


def cut(job: Job) -> Cut:
    base = pretrained(job.base, job.device)
    start = perf_counter()
    small: Any = pretrained(Path(job.settings["before"]), job.device)  # before it was fine-tuned
    share = job.kept
    if not job.of_share:
        share = share_of_heads(small.config, job.kept / job.heads, job.tokens)
    layers, inner = shape(small.config, share, job.tokens)
    stack = layers_of(small)
    del stack[layers:]
    for layer in stack:
        narrow_(*feed_forward(layer), inner)
    small.config.num_hidden_layers, small.config.intermediate_size = layers, inner
    seconds = {"cut": perf_counter() - start}
    start = perf_counter()
    said = training.train_(small, job, base, job.settings["distill"], job.settings.get("times", 1))
    seconds["train"] = perf_counter() - start
    counted = "1 layer" if layers == 1 else f"{layers} layers"
    notes = [f"{counted} with feed-forwards of {inner}", *said]
    return Cut(running(base), running(small.eval()), saving(small), seconds, notes=notes)


def share_of_heads(config: Any, heads: float, tokens: int) -> float:
    """The share of the multiply-adds that layers with a share of their ``heads`` have."""
    attention, neurons = layer_macs(config, tokens)
    return (heads * attention + neurons) / (attention + neurons)


def shape(config: Any, share: float, tokens: int) -> tuple[int, int]:
    """Layers, and their feed-forward's width, with a ``share`` of the multiply-adds.

    >>> from types import SimpleNamespace
    >>> shape(SimpleNamespace(hidden_size=4, intermediate_size=16, num_hidden_layers=6), 1.0, 8)
    (6, 16)
    """
    attention, neurons = layer_macs(config, tokens)
    kept = config.num_hidden_layers * share * (attention + neurons)
    layers = math.ceil(kept / (attention + neurons) - 1e-9)
    return layers, round((kept / layers - attention) / (2 * config.hidden_size))


def narrow_(first: nn.Linear, second: nn.Linear, inner: int) -> None:
    """Keeps the neurons with the largest product of norms."""
    size = first.weight.norm(dim=1) * second.weight.norm(dim=0)
    keep = size.argsort(descending=True)[:inner].sort().values
    with torch.no_grad():
        first.weight, first.bias = nn.Parameter(first.weight[keep]), nn.Parameter(first.bias[keep])
        second.weight = nn.Parameter(second.weight[:, keep])
    first.out_features = second.in_features = inner


def load(job: Job, folder: Path) -> Run:
    return running(pretrained(folder, job.device))


if __name__ == "__main__":
    main(cut, load)
