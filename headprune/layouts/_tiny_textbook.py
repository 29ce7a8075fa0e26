"""Tiny models of textbook attention, one class per layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class D2l(nn.Module):
    """Attention of "Dive into Deep Learning": heads are examples, so lengths are repeated."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = _DotProductAttention()
        self.W_q, self.W_k, self.W_v = (nn.LazyLinear(dim, bias=False) for _ in range(3))
        self.W_o = nn.LazyLinear(dim)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None
    ) -> Tensor:
        q = self._split(self.W_q(queries))
        k = self._split(self.W_k(keys))
        v = self._split(self.W_v(values))
        if valid_lens is not None:
            valid_lens = valid_lens.repeat_interleave(self.num_heads, 0)
        heads = self.attention(q, k, v, valid_lens)
        # [batch * heads, queries, head_dim] -> [batch, queries, heads, head_dim]
        heads = heads.reshape(-1, self.num_heads, *heads.shape[1:]).permute(0, 2, 1, 3)
        out: Tensor = self.W_o(heads.reshape(*heads.shape[:2], -1))
        return out

    def _split(self, x: Tensor) -> Tensor:
        # [batch, length, heads * head_dim] -> [batch * heads, length, head_dim]
        x = x.reshape(*x.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3)
        return x.reshape(-1, *x.shape[2:])


class _DotProductAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None) -> Tensor:
        # [batch * heads, queries, keys]
        scores = torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5
        if valid_lens is not None:
            hidden = torch.arange(k.shape[1], device=k.device) >= valid_lens[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        return torch.bmm(self.dropout(scores.softmax(-1)), v)


class Prepared(nn.Module):
    """labml.ai's attention: sequence first; three modules project and split into heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.d_k = dim // heads
        self.query, self.key, self.value = (_PrepareHeads(dim, heads) for _ in range(3))
        self.output = nn.Linear(dim, dim)
        self.scale = self.d_k**-0.5

    def forward(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        # [length, batch, heads, d_k]
        q = self.query(query)
        k = self.key(key)
        v = self.value(value)
        # [queries, keys, batch, heads]
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask[..., None] == 0, -torch.inf)
        heads = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v)
        out: Tensor = self.output(heads.reshape(*query.shape[:2], -1))
        return out


class _PrepareHeads(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.heads = heads
        self.d_k = dim // heads

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out.view(*x.shape[:-1], self.heads, self.d_k)


class Annotated(nn.Module):
    """Attention of "The Annotated Transformer": the last of four `linears` is the output's."""

    def __init__(self, d_model: int, h: int) -> None:
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(0.0)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        n = query.shape[0]
        inputs = zip(self.linears, (query, key, value), strict=False)
        # [batch, heads, length, d_k]
        q, k, v = (lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2) for lin, x in inputs)
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
        heads = self.dropout(scores.softmax(-1)) @ v
        joined = heads.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        out: Tensor = self.linears[-1](joined)
        return out


class Processed(nn.Module):
    """Attention in the form of diffusers': a processor computes with the module's parts."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = self.sliceable_head_dim = heads
        self.inner_dim = self.inner_kv_dim = dim
        self.scale = (dim // heads) ** -0.5
        # Not the defaults, so that a cut must not lose them.
        self.rescale_output_factor = 2.0
        self.residual_connection = True
        self.is_cross_attention = False
        self.group_norm = nn.GroupNorm(2, dim)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), nn.Dropout(0.0)])
        self.processor = Processor()

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        return self.processor(self, hidden_states, encoder_hidden_states)


class Processor:
    """Computes attention with the parts of a module."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None
    ) -> Tensor:
        x = hidden_states  # [batch, length, width]
        if attn.group_norm is not None:
            # A group norm takes the width second.
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        context = x if encoder_hidden_states is None else encoder_hidden_states
        # [batch, heads, length, head_dim]
        q, k, v = (
            y.view(len(y), -1, attn.heads, y.shape[-1] // attn.heads).transpose(1, 2)
            for y in (attn.to_q(x), attn.to_k(context), attn.to_v(context))
        )
        heads = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        joined = heads.reshape(len(x), -1, attn.heads * q.shape[-1])
        out: Tensor = attn.to_out[1](attn.to_out[0](joined))
        if attn.residual_connection:
            out = out + hidden_states
        scale: float = attn.rescale_output_factor
        return out / scale


class GeluUp(nn.Module):
    """First part of diffusers' feed-forward: a projection and its activation, perhaps gated."""

    def __init__(self, dim: int, neurons: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.proj = nn.Linear(dim, 2 * neurons if gated else neurons)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.proj(x)
        if not self.gated:
            return gelu(up)
        values, gates = up.chunk(2, dim=-1)
        return values * gelu(gates)


class FeedForward(nn.Module):
    """Feed-forward in the form of diffusers': a list of modules that run in turn."""

    def __init__(self, dim: int, neurons: int, gated: bool) -> None:
        super().__init__()
        parts = [GeluUp(dim, neurons, gated), nn.Dropout(0.0), nn.Linear(neurons, dim)]
        self.net = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.net:
            x = part(x)
        return x


class Head(nn.Module):
    """One causal head."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, width, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(16, 16).tril())

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)  # [batch, length, width]
        k = self.key(x)
        n = x.shape[1]
        scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(self.get_buffer("tril")[:n, :n] == 0, -torch.inf)
        out: Tensor = scores.softmax(-1) @ self.value(x)
        return out


class SideBySide(nn.Module):
    """A list of heads; the module returns their concatenated outputs."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(dim, dim // n_heads) for _ in range(n_heads))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class Projected(SideBySide):
    """A list of heads with an output projection."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__(dim, n_heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(super().forward(x))
        return out


class TinyTextbook(nn.Module):
    """Three layers of 16 features and 4 heads; diffusers' also has two feed-forwards.

    The last example pads three tokens, if the attention takes a mask.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, 16)
        self.attentions = nn.ModuleList(kind(16, 4) for _ in range(3))
        self.head = nn.Linear(16, 3)
        kinds = (False, True) if kind is Processed else ()
        self.feed_forwards = nn.ModuleList(FeedForward(16, 24, gated) for gated in kinds)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)  # [batch, length, 16]
        lengths = torch.tensor([7, 7, 4], device=x.device)
        visible = torch.arange(7, device=x.device) < lengths[:, None]  # [batch, length]
        # Each book has its own way to pass a mask.
        for attention in self.attentions:
            if isinstance(attention, D2l):
                x = x + attention(x, x, x, lengths)
            elif isinstance(attention, Annotated):
                x = x + attention(x, x, x, visible[:, None])
            elif isinstance(attention, Prepared):
                rows = x.transpose(0, 1)  # [length, batch, 16]
                out = attention(query=rows, key=rows, value=rows, mask=visible.T[None])
                x = x + out.transpose(0, 1)
            else:
                x = x + attention(x)
        for feed_forward in self.feed_forwards:
            x = x + feed_forward(x)
        logits: Tensor = self.head(x)
        return logits


def tiny(name: str) -> tuple[Any, Any]:
    """Make a model with attentions of a class of this file, and a batch."""
    model = TinyTextbook(globals()[name])
    batch = {"x": torch.randn(3, 7, 16)}
    # Lazy layers get their shapes in the first call.
    with torch.no_grad():
        model(**batch)
    return model, batch
