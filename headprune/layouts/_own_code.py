"""Run an attention's own code without heads, and keep it from PyTorch's fused kernel."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from headprune.core.mixin import Mixin


class OwnCode(Mixin, nn.Module):
    """Put in front of an attention without heads that continues with its own code."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with NoKernelWithoutHeads():
            return super().forward(*args, **kwargs)


class NoKernelWithoutHeads(TorchFunctionMode):
    """Answer fused attention of no heads without calling a kernel."""

    # Before PyTorch 2.13, the CPU kernel divides by the number of heads, which kills the process.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            query, value = named["query"], named["value"]
            if query.dim() > 3 and not query.shape[-3]:  # [batch, heads, length, head_dim]
                return query.new_zeros(*query.shape[:-1], value.shape[-1])
        return func(*args, **kwargs)
