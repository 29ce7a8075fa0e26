"""What a core's heads are made of, measured by gradients: which features of each projection reach
which head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headprune.detect.prove import Scratch
from headprune.detect.trace import Core
from headprune.model.double import Doubled
from headprune.model.running import call, tensors

#: For each projection, by its path: ``[heads, features]``, True where a feature changes a head's
#: output.
Reach = dict[str, Tensor]


def reach(scratch: Scratch, core: Core, n_heads: int) -> Reach:
    """Which features of the core's projections change which block of the output projection's input,
    by gradients.

    Every projection's output is cut from its own inputs, so that a feature counts only where no
    other projection lies between. Empty where the model computes without gradients.
    """
    assert core.gate is not None
    module = scratch.model.get_submodule(core.name)
    leaves: dict[str, list[Tensor]] = {}
    given: list[Tensor] = []

    def leaf(path: str) -> Any:
        def cut(_: Any, args: Any, out: Tensor) -> Tensor:
            leaves.setdefault(path, []).append(out.detach().requires_grad_())
            return leaves[path][-1].clone()

        return cut

    def keep(_: Any, args: Any) -> None:
        given.append(next(tensors(args)))

    paths = dict.fromkeys(
        p.path for p in (*core.before, *core.after) if p.linear and p.path != core.gate.path
    )
    handles = [module.get_submodule(path).register_forward_hook(leaf(path)) for path in paths]
    handles.append(module.get_submodule(core.gate.path).register_forward_pre_hook(keep))
    try:
        with scratch.running(), Doubled(), torch.enable_grad():
            call(scratch.model, scratch.example)
    finally:
        for handle in handles:
            handle.remove()
    if not given or not given[0].requires_grad:
        return {}
    flat = [(path, t) for path, found in leaves.items() for t in found]
    found = {path: torch.zeros(n_heads, t.shape[-1], dtype=torch.bool) for path, t in flat}
    context = given[0].unflatten(-1, (n_heads, -1))
    weights = torch.rand(
        context.shape, generator=torch.Generator().manual_seed(2), dtype=context.dtype
    )
    for head in range(n_heads):
        value = (context * weights.to(context.device))[..., head, :].sum()
        got = torch.autograd.grad(value, [t for _, t in flat], retain_graph=True, allow_unused=True)
        for (path, t), gradient in zip(flat, got, strict=True):
            if gradient is not None:
                found[path][head] |= (
                    (gradient.nan_to_num() != 0).reshape(-1, t.shape[-1]).any(0).cpu()
                )
    return found


def of_all(reaching: Tensor) -> bool:
    """Whether every feature that reaches a head reaches all of them, and some do."""
    return bool(reaching.any()) and bool((reaching.any(0) == reaching.all(0)).all())


def latent(core: Core, reached: Reach) -> str | None:
    """A projection that makes only a part of every head's keys, beside those that make the heads'
    own; None if none."""
    found = [
        (path, of_all(reached[path]))
        for path in core.scoring
        if path in reached and reached[path].any()
    ]
    if sum(not shared for _, shared in found) < 2:
        return None
    return next((path for path, shared in found if shared), None)
