"""Tiny models of textbook attention, one class a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class D2l(nn.Module):
    """`W_q W_k W_v W_o`; the head count drives the reshape and repeats the valid lengths."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = _Dot()
        self.W_q, self.W_k, self.W_v = (nn.LazyLinear(dim, bias=False) for _ in range(3))
        self.W_o = nn.LazyLinear(dim)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None
    ) -> Tensor:
        split = [
            self._split(w(x))
            for w, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        ]
        if valid_lens is not None:
            valid_lens = valid_lens.repeat_interleave(self.num_heads, 0)
        heads = self.attention(*split, valid_lens)
        heads = heads.reshape(-1, self.num_heads, *heads.shape[1:]).permute(0, 2, 1, 3)
        out: Tensor = self.W_o(heads.reshape(*heads.shape[:2], -1))
        return out

    def _split(self, x: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3)
        return x.reshape(-1, *x.shape[2:])


class _Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Tensor | None) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5
        if valid_lens is not None:
            hidden = torch.arange(k.shape[1], device=k.device) >= valid_lens[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        return torch.bmm(self.dropout(scores.softmax(-1)), v)


class Prepared(nn.Module):
    """Sequence first; three modules that project and split into heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d_k = heads, dim // heads
        self.query, self.key, self.value = (_Prepare(dim, heads) for _ in range(3))
        self.output = nn.Linear(dim, dim)
        self.scale = self.d_k**-0.5

    def forward(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.query(query), self.key(key), self.value(value)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask[..., None] == 0, -torch.inf)
        heads = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v)
        out: Tensor = self.output(heads.reshape(*query.shape[:2], -1))
        return out


class _Prepare(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.heads, self.d_k = heads, dim // heads

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out.view(*x.shape[:-1], self.heads, self.d_k)


class Annotated(nn.Module):
    """Four `linears`, the last of which is the output's."""

    def __init__(self, d_model: int, h: int) -> None:
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(0.0)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        n = query.shape[0]
        inputs = zip(self.linears, (query, key, value), strict=False)
        q, k, v = (way(x).view(n, -1, self.h, self.d_k).transpose(1, 2) for way, x in inputs)
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
        heads = self.dropout(scores.softmax(-1)) @ v
        out: Tensor = self.linears[-1](
            heads.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        )
        return out


class Processed(nn.Module):
    """In the form of diffusers': a processor computes, and the module only holds."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = self.sliceable_head_dim = heads
        self.inner_dim = self.inner_kv_dim = dim
        self.scale, self.rescale_output_factor = (dim // heads) ** -0.5, 2.0
        self.is_cross_attention, self.residual_connection = False, True
        self.group_norm = nn.GroupNorm(2, dim)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), nn.Dropout(0.0)])
        self.processor = Processor()

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        return self.processor(self, hidden_states, encoder_hidden_states)


class Processor:
    """Attention with the parts of a module."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None
    ) -> Tensor:
        x = hidden_states
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        context = x if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            y.view(len(y), -1, attn.heads, y.shape[-1] // attn.heads).transpose(1, 2)
            for y in (attn.to_q(x), attn.to_k(context), attn.to_v(context))
        )
        heads = scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out: Tensor = attn.to_out[1](
            attn.to_out[0](heads.reshape(len(x), -1, attn.heads * q.shape[-1]))
        )
        if attn.residual_connection:
            out = out + hidden_states
        scale: float = attn.rescale_output_factor
        return out / scale


class Head(nn.Module):
    """One causal head."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, width, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(16, 16).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, n = self.query(x), self.key(x), x.shape[1]
        scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(self.get_buffer("tril")[:n, :n] == 0, -torch.inf)
        out: Tensor = scores.softmax(-1) @ self.value(x)
        return out


class SideBySide(nn.Module):
    """A list of heads, whose outputs side by side are the module's."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(dim, dim // n_heads) for _ in range(n_heads))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class Projected(SideBySide):
    """The same with an output projection."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__(dim, n_heads)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(super().forward(x))
        return out


class Tiny(nn.Module):
    """Three layers of 16 features and 4 heads; the last example pads three tokens where the
    attention has a mask."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Linear(16, 16)
        self.attentions = nn.ModuleList(kind(16, 4) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, lengths = self.embedding(x), torch.tensor([7, 7, 4], device=x.device)
        seen = torch.arange(7, device=x.device) < lengths[:, None]
        for attention in self.attentions:
            if isinstance(attention, D2l):
                x = x + attention(x, x, x, lengths)
            elif isinstance(attention, Annotated):
                x = x + attention(x, x, x, seen[:, None])
            elif isinstance(attention, Prepared):
                rows = x.transpose(0, 1)
                x = x + attention(query=rows, key=rows, value=rows, mask=seen.T[None]).transpose(
                    0, 1
                )
            else:
                x = x + attention(x)
        out: Tensor = self.head(x)
        return out


def tiny(name: str) -> tuple[Any, Any]:
    """A model of attentions of a class of this file, and a batch; lazy layers have seen it."""
    model, batch = Tiny(globals()[name]), {"x": torch.randn(3, 7, 16)}
    with torch.no_grad():
        model(**batch)
    return model, batch
