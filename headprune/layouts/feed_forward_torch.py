"""Feed-forward of PyTorch's transformer layers: `linear1` and `linear2`, in the layer itself."""

from __future__ import annotations

from typing import Any

from headprune.core.errors import UnsupportedModel
from headprune.core.mixin import Mixin
from headprune.layouts._feed_forward import check_elementwise, feed_forward


class CallsItsLayers(Mixin):
    """Put in front of an encoder layer: no native operation in place of its linear layers."""

    @property
    def activation_relu_or_gelu(self) -> int:
        # The layer, and the encoder around it, ask for this before they run the operation.
        return 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; a nested tensor ``[batch, (length), width]`` is padded meanwhile.

        Gates multiply padded tensors alone.
        """
        src = args[0] if args else kwargs.get("src")
        if src is None or not src.is_nested:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        import torch

        from headprune.layouts._torch_multi_head import padded

        x, padding = padded(src)
        out = super().forward(x, src_key_padding_mask=padding)  # type: ignore[misc]
        return torch._nested_tensor_from_mask(out, ~padding, mask_check=False)


def _check(module: Any) -> None:
    """Refuse layers that run tokens first, and activations that are not elementwise."""
    # Gates are per example, and multiply along the first axis.
    attention = getattr(module, "self_attn", None)
    if not getattr(attention, "batch_first", False):
        must, got = "built with batch_first=True", "one without it"
        raise UnsupportedModel(type(module).__name__, must, got)
    # `NeuronWidth` checks modules alone, and this activation may be a plain function.
    down = module.linear2
    device = "cpu" if down.weight.is_meta else str(down.weight.device)
    check_elementwise(type(module).__name__, module.activation, down.in_features, device)


LAYOUT = feed_forward(
    "feed_forward_torch",
    down="linear2",
    up={"linear1": "head"},
    untouched=("self_attn", "multihead_attn", "norm1", "norm2", "norm3"),
    exposed=CallsItsLayers,
    check=_check,
)
