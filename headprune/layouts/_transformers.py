"""Attention without heads for Transformers: it adds the output bias and updates the cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core import mixin
from headprune.core.errors import UnsupportedModel
from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from headprune.core.mixin import WITHOUT_HEADS, Mixin, mix_in, original_class


# Files of format remote-code hold the source of these two classes: they may use nothing else
# of this module.
class WithoutHeads(Mixin, nn.Module):
    """Put in front of an attention class: add the output projection's bias and nothing else."""

    headprune_gate: str | None
    headprune_cross: bool

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        past_key_values: Any = None,
        layer_past: Any = None,
        key_value_states: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        # hidden_states: [batch, length, width], or [batch, height, width of the image, width]
        shape = hidden_states.shape
        cache = layer_past if past_key_values is None else past_key_values
        encoded = key_value_states
        if encoded is None:
            encoded = kwargs.get("encoder_hidden_states")
        n_keys = self._count_in_cache(cache, hidden_states, encoded)
        weights = hidden_states.new_zeros(shape[0], 0, shape[1], n_keys)  # no heads

        # The output projection is a sibling; it adds its bias itself.
        if self.headprune_gate is None:
            return hidden_states.new_zeros(*shape[:-1], 0), weights

        bias = self.get_submodule(self.headprune_gate).bias
        if callable(bias):  # a quantised projection has a method
            bias = bias()
        output = torch.zeros_like(hidden_states)
        if isinstance(bias, Tensor):
            output = output + bias
        return output, weights

    def _count_in_cache(self, cache: Any, hidden_states: Tensor, encoded: Tensor | None) -> int:
        """Count the tokens in the cache of a layer without heads; return its number of keys.

        Transformers reads a layer's length off its cached keys, and takes keys without elements for
        an empty cache. Positions after a first layer without heads would then start again from
        zero. So the cache gets one key of width 1 per token.
        """
        batch, length = hidden_states.shape[:2]
        cross = self.headprune_cross or encoded is not None
        n_keys: int = length if encoded is None else encoded.shape[1]
        index = getattr(self, "layer_idx", getattr(self, "layer_id", None))

        # An encoder-decoder's cache is a pair; the part for the encoder's keys is filled once.
        if cross:
            part = getattr(cache, "cross_attention_cache", None)
            filled = encoded is None or getattr(cache, "is_updated", {}).get(index)
        else:
            part = getattr(cache, "self_attention_cache", cache)
            filled = False
        if part is None or filled:
            return n_keys

        self._keep_unquantised(part, index)
        marker = hidden_states.new_zeros(batch, 1, n_keys, 1)  # [batch, heads, keys, head_dim]
        n_keys = part.update(marker, marker, index)[0].shape[-2]
        if cross:
            cache.is_updated[index] = True
        return n_keys

    @staticmethod
    def _keep_unquantised(cache: Any, index: Any) -> None:
        """Replace a quantised cache layer, whose groups would not fit keys of width 1."""
        from transformers.cache_utils import DynamicLayer, QuantizedLayer

        layers: Any = getattr(cache, "layers", ())
        if index < len(layers) and isinstance(layers[index], QuantizedLayer):
            layers[index] = DynamicLayer()


class NormedWithoutHeads(WithoutHeads):
    """For an attention that adds the residual and normalises by itself (ALBERT)."""

    LayerNorm: nn.Module
    output_dropout: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(hidden_states, *args, **kwargs)
        return self.LayerNorm(hidden_states + self.output_dropout(output)), weights


def without_heads(
    module: nn.Module,
    gate: str | None,
    cross: bool = False,
    kind: type[WithoutHeads] = WithoutHeads,
) -> None:
    """Turn a module in place into a subclass of its class that has no heads.

    Args:
        module: The attention module whose ``forward`` computes the heads.
        gate: Path of the output projection inside it; None where that is a sibling.
        cross: Whether it attends to another sequence, whose keys a cache keeps apart.
        kind: A subclass of ``WithoutHeads`` for a module with other arguments or another result.

    Raises:
        UnsupportedModel: the module's ``forward`` was replaced, or takes something else first than
            ``hidden_states``.
    """
    refused = refusal(module, kind)
    if refused is not None:
        raise refused
    mix_in(module, kind, WITHOUT_HEADS)
    module.headprune_gate, module.headprune_cross = gate, cross  # type: ignore[assignment]


def refusal(module: nn.Module, kind: type[WithoutHeads]) -> UnsupportedModel | None:
    """Return why ``without_heads`` does not apply to a module; None where it does."""
    original = original_class(module)
    # The argument after ``self``: the result takes its shape from it.
    first = list(inspect.signature(original.forward).parameters)[1:2]  # type: ignore[attr-defined]
    if kind.forward is WithoutHeads.forward and first != ["hidden_states"]:
        must = f"{WITHOUT_HEADS}, because its first argument is not hidden_states"
        return UnsupportedModel(original.__name__, must, f"forward({', '.join(first)}, ...)")
    return mixin.refusal(module, WITHOUT_HEADS)


def present_heads(module: nn.Module, x: Tensor, dim: int) -> Tensor:
    """Take the rows of the kept heads from a tensor with a row per original head.

    Args:
        module: The attention module; an uncut one gets ``x`` back.
        x: A tensor with the original heads on one axis.
        dim: That axis.
    """
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    return x if state is None else picked(x, dim, state.heads)


def picked(x: Tensor, dim: int, indices: tuple[int, ...]) -> Tensor:
    """Take ascending indices of an axis by slices, which need no index tensor on the device.

    >>> picked(torch.arange(6), 0, (0, 1, 4)).tolist()
    [0, 1, 4]
    """
    # Runs of neighbours: each is one slice.
    starts = [i for i in indices if i - 1 not in indices]
    stops = [i + 1 for i in indices if i + 1 not in indices]
    runs = [x.narrow(dim, start, stop - start) for start, stop in zip(starts, stops, strict=True)]
    if not runs:
        return x.narrow(dim, 0, 0)
    if len(runs) == 1:
        return runs[0]  # a view; concatenating it alone would copy
    return torch.cat(runs, dim)
