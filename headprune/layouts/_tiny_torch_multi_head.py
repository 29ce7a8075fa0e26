"""Tiny models with PyTorch's attention: alone, in encoder layers and in decoder layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Mixed(nn.Module):
    """Three attentions that together use most options of ``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, 16)
        # Sequence first, with a fused projection.
        self.first = nn.MultiheadAttention(16, 4)
        # No bias, and an added key and value of zeros.
        self.causal = nn.MultiheadAttention(16, 4, bias=False, batch_first=True, add_zero_attn=True)
        # Separate projections, and an added learned key and value.
        self.cross = nn.MultiheadAttention(
            16, 4, batch_first=True, kdim=6, vdim=5, add_bias_kv=True
        )
        self.head = nn.Linear(16, 3)

    @classmethod
    def tiny(cls) -> tuple[Any, Any]:
        x = torch.randn(3, 7, 16)
        keys = torch.randn(3, 5, 6)
        values = torch.randn(3, 5, 5)
        return cls(), {"x": x, "keys": keys, "values": values, "padding": _padding(5)}

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, padding: Tensor) -> Tensor:
        x = self.embedding(x)
        rows = x.transpose(0, 1)  # [length, batch, 16]
        x = x + self.first(rows, rows, rows, need_weights=False)[0].transpose(0, 1)
        later = torch.ones(7, 7, dtype=torch.bool, device=x.device).triu(1)
        x = x + self.causal(x, x, x, attn_mask=later)[0]
        x = x + self.cross(x, keys, values, key_padding_mask=padding)[0]
        out: Tensor = self.head(x)
        return out


class EncoderLayers(nn.Module):
    """Three layers, which PyTorch runs with its native operation where it needs no gradient.

    With ``nested``, PyTorch runs them with nested tensors, and warns.
    """

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested)
        self.head = nn.Linear(16, 3)

    @classmethod
    def tiny(cls) -> tuple[Any, Any]:
        return cls(), {"x": torch.randn(3, 7, 16), "padding": _padding(7)}

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(x), src_key_padding_mask=padding))
        return out


class Decoder(nn.Module):
    """Two layers, each with causal attention and attention to the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, 16)
        layer = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(16, 3)

    @classmethod
    def tiny(cls) -> tuple[Any, Any]:
        return cls(), {
            "x": torch.randn(3, 7, 16),
            "memory": torch.randn(3, 5, 16),
            "padding": _padding(5),
        }

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=x.dtype
        )
        hidden = self.decoder(
            self.embedding(x),
            memory,
            tgt_mask=later,
            # A float mask, which PyTorch takes as well as a boolean one.
            memory_key_padding_mask=padding.to(x.dtype) * -1e4,
            tgt_is_causal=True,
        )
        out: Tensor = self.head(hidden)
        return out


def _padding(length: int) -> Tensor:
    """Mark the padding, [3, length]: the last example pads three tokens."""
    return torch.arange(length) >= torch.tensor([[length], [length], [length - 3]])


def tiny(name: str) -> tuple[Any, Any]:
    """Make the model of a class of this file, and its batch."""
    made: tuple[Any, Any] = globals()[name].tiny()
    return made
