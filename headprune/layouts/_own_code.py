"""Code that is not ours in an attention without heads: PyTorch's fused attention is not called
there."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from headprune.core.mixin import Mixin


class OwnCode(Mixin, nn.Module):
    """Put in front of an attention without heads that goes on with its own code."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with NoKernelWithoutHeads():
            return super().forward(*args, **kwargs)


class NoKernelWithoutHeads(TorchFunctionMode):
    """Answers fused attention of no heads itself: before PyTorch 2.13 its kernel for CPUs divides
    by their number, which ends the process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            query, _, value = (
                args[i] if i < len(args) else kwargs[n]
                for i, n in enumerate(("query", "key", "value"))
            )
            if query.dim() > 3 and not query.shape[-3]:  # [batch, heads, length, head_dim]
                return query.new_zeros(*query.shape[:-1], value.shape[-1])
        return func(*args, **kwargs)
