"""Measure by gradients which features of each projection influence which head's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headprune.detect.prove import Scratch
from headprune.detect.trace import AttentionCore
from headprune.model.double import Doubled
from headprune.model.running import call, tensors

#: For each projection, by its path: ``[heads, features]``, True where a feature changes a head's
#: output.
Influence = dict[str, Tensor]


@torch.enable_grad()  # whatever the caller has set
def feature_influence(scratch: Scratch, core: AttentionCore, n_heads: int) -> Influence:
    """Measure which features of a core's projections change which head's output.

    Each projection's output is detached from its own input, so that a feature counts only where no
    other projection lies between.

    Args:
        scratch: The model and its example.
        core: A core with an output projection.
        n_heads: Number of heads whose outputs the output projection takes.

    Returns:
        The influence of each projection; empty where the model computes without gradients.
    """
    # 1. Record the projections' outputs as leaves, and the heads' outputs.
    leaves, context = _run_with_leaves(scratch, core)
    if context is None or not context.requires_grad:
        return {}
    influence = {}
    paths = []
    outputs = []  # each [..., features]
    for path, calls in leaves.items():
        for output in calls:
            paths.append(path)
            outputs.append(output)
            influence[path] = torch.zeros(n_heads, output.shape[-1], dtype=torch.bool)

    # 2. A weighted sum of one head's outputs has a gradient where a feature influences it.
    context = context.unflatten(-1, (n_heads, -1))  # [..., heads, value_dim]
    # Random weights, because a plain sum of outputs may be constant (after a norm).
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(context.shape, generator=generator, dtype=context.dtype)
    weighted = context * weights.to(context.device)
    for head in range(n_heads):
        objective = weighted[..., head, :].sum()
        gradients = torch.autograd.grad(objective, outputs, retain_graph=True, allow_unused=True)
        for path, gradient in zip(paths, gradients, strict=True):
            if gradient is not None:
                changes = gradient.nan_to_num() != 0
                influence[path][head] |= changes.reshape(-1, changes.shape[-1]).any(0).cpu()
    return influence


def _run_with_leaves(
    scratch: Scratch, core: AttentionCore
) -> tuple[dict[str, list[Tensor]], Tensor | None]:
    """Every output of each projection, as a leaf of the graph, and the heads' outputs."""
    assert core.gate is not None
    module = scratch.model.get_submodule(core.name)
    leaves: dict[str, list[Tensor]] = {}
    contexts: list[Tensor] = []

    def leaf(path: str) -> Any:
        def detach(_: Any, args: Any, output: Tensor) -> Tensor:
            detached = output.detach().requires_grad_()
            leaves.setdefault(path, []).append(detached)
            # A clone, because the model may change the output in place, which a leaf forbids.
            return detached.clone()

        return detach

    def keep(_: Any, args: Any) -> None:
        contexts.append(next(tensors(args)))

    gate = core.gate.path
    handles = [module.get_submodule(gate).register_forward_pre_hook(keep)]
    for path in dict.fromkeys(p.path for p in (*core.before, *core.after) if p.linear):
        projection = module.get_submodule(path)
        if path != gate:
            handles.append(projection.register_forward_hook(leaf(path)))
    try:
        with scratch.running(), Doubled(), torch.enable_grad():
            call(scratch.model, scratch.example)
    finally:
        for handle in handles:
            handle.remove()
    return leaves, contexts[0] if contexts else None


def influences_all(influence: Tensor) -> bool:
    """Whether the features that influence any head influence all heads, and there are some."""
    return bool(influence.any()) and bool((influence.any(0) == influence.all(0)).all())


def latent_projection(core: AttentionCore, influence: Influence) -> str | None:
    """Path of a projection that makes one part of every head's keys.

    Others make the rest of each head's queries and keys. None where there is no such projection.
    """
    shared = []
    n_per_head = 0
    for path in core.query_key_paths:
        if path not in influence or not influence[path].any():
            continue
        if influences_all(influence[path]):
            shared.append(path)
        else:
            n_per_head += 1
    # With fewer than two others (queries, the rest of the keys) all heads just share their keys.
    if n_per_head < 2 or not shared:
        return None
    return shared[0]
