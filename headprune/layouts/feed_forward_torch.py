"""Feed-forward of PyTorch's transformer layers: `linear1` and `linear2`, in the layer itself."""

from __future__ import annotations

from typing import Any

from headprune.core.errors import UnsupportedModel
from headprune.core.mixin import Mixin
from headprune.layouts._feed_forward import feed_forward


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


def _width(module: Any) -> int:
    """Refuse layers that a cut would change, or where gates per example cannot be."""
    # Tokens come before the examples.
    attention = getattr(module, "self_attn", None)
    if not getattr(attention, "batch_first", False):
        must, got = "built with batch_first=True", "another layer"
        raise UnsupportedModel(type(module).__name__, must, got)
    if not _treats_neurons_alone(module.activation, module.linear1.weight):
        must = "a layer whose activation treats every neuron by itself"
        raise UnsupportedModel(type(module).__name__, must, repr(module.activation))
    return 1


def _treats_neurons_alone(activation: Any, like: Any) -> bool:
    """Whether an activation, which may be the user's own, gives some neurons the same alone.

    Args:
        activation: Called with the neurons on the last axis.
        like: The weight to the neurons, [neurons, width].
    """
    import torch

    if like.is_meta:
        return True
    # Values in no order, and a subset without a period whose mean is another one.
    n = len(like)
    places = torch.arange(n, device=like.device)
    scattered = (places * 0.618) % 1
    row = (5 * scattered - 2).to(like.dtype)
    kept = places[(places * 0.414) % 1 + 0.5 * scattered < 0.75]
    # Vectorised and scalar code round apart; types of 16 bits hide that.
    error = (4 if like.dtype.itemsize == 2 else 64) * torch.finfo(like.dtype).eps
    try:
        with torch.no_grad():
            whole, part = activation(row), activation(row[kept])
            return whole.shape == row.shape and torch.allclose(whole[kept], part, error, error)
    # Code that knows its number of neurons may raise anything.
    except Exception:
        return False


LAYOUT = feed_forward(
    "feed_forward_torch",
    "linear2",
    {"linear1": "head"},
    untouched=("self_attn", "multihead_attn", "norm1", "norm2", "norm3"),
    exposed=CallsItsLayers,
    head_dim=_width,
)
