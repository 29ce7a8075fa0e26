"""What the Transformers families share: an attention without heads that keeps bias and cache calls
working."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core import mixin
from headprune.core.errors import UnsupportedModel
from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from headprune.core.mixin import WITHOUT_HEADS, Mixin, mix_in, original_class


class WithoutHeads(Mixin, nn.Module):
    """Put in front of an attention class: adds the output projection's bias and nothing else.

    The cache is told of every token through a key of one head of width 1: Transformers reads a
    layer's length off its cached keys and takes keys without elements for an empty cache, so that
    positions after a headless first layer would start again from zero. A cache that quantises keeps
    these keys as they are.
    """

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
        shape = (
            hidden_states.shape
        )  # [batch, length, width], or [batch, height, width of the image, width]
        cache = layer_past if past_key_values is None else past_key_values
        other = (
            kwargs.get("encoder_hidden_states") if key_value_states is None else key_value_states
        )
        cross = self.headprune_cross or other is not None
        n_keys = shape[1] if other is None else other.shape[1]
        index = getattr(self, "layer_idx", getattr(self, "layer_id", None))
        # An encoder-decoder's cache is a pair, of which the part for the encoder's keys is filled
        # once.
        part = getattr(
            cache,
            "cross_attention_cache" if cross else "self_attention_cache",
            None if cross else cache,
        )
        filled = cross and (other is None or getattr(cache, "is_updated", {}).get(index))
        if part is not None and not filled:
            self._keep_plain(part, index)
            marker = hidden_states.new_zeros(shape[0], 1, n_keys, 1)
            n_keys = part.update(marker, marker, index)[0].shape[-2]
            if cross:
                cache.is_updated[index] = True
        weights = hidden_states.new_zeros(shape[0], 0, shape[1], n_keys)
        if (
            self.headprune_gate is None
        ):  # the output projection is a sibling and adds its bias itself
            return hidden_states.new_zeros(*shape[:-1], 0), weights
        projection = self.get_submodule(self.headprune_gate)
        output = torch.zeros_like(hidden_states)
        bias = (
            projection.bias() if callable(projection.bias) else projection.bias
        )  # a quantised one has a method
        return (output + bias if isinstance(bias, Tensor) else output), weights

    @staticmethod
    def _keep_plain(cache: Any, index: Any) -> None:
        """Takes quantisation out of this layer of a cache: its groups would not fit keys of width
        1."""
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
    """Turns ``module`` in place into its own subclass that has no heads; it keeps its class name
    and its place.

    Args:
        module: The attention module whose ``forward`` computes the heads.
        gate: The output projection inside it, None where that is a sibling.
        cross: Whether it attends to another sequence, whose keys a cache keeps apart.
        kind: A subclass of ``WithoutHeads`` for a module that is called or answers in another way.

    Raises:
        UnsupportedModel: the module has a ``forward`` of its own that would hide the class's, or is
            called with something else first than the states that it adds to.
    """
    refused = refusal(module, kind)
    if refused is not None:
        raise refused
    mix_in(module, kind, WITHOUT_HEADS)
    module.headprune_gate, module.headprune_cross = gate, cross  # type: ignore[assignment]


def refusal(module: nn.Module, kind: type[WithoutHeads]) -> UnsupportedModel | None:
    """Why ``without_heads`` cannot be for ``module``; None where it can."""
    original = original_class(module)
    called = list(inspect.signature(original.forward).parameters)[1:2]  # type: ignore[attr-defined]
    if kind.forward is WithoutHeads.forward and called != ["hidden_states"]:
        must = f"{WITHOUT_HEADS}, for only one called with hidden_states is known to work without"
        return UnsupportedModel(original.__name__, must, f"forward({', '.join(called)}, ...)")
    return mixin.refusal(module, WITHOUT_HEADS)


def present_heads(module: nn.Module, x: Tensor, dim: int) -> Tensor:
    """Of what has a row for every original head, the rows of those that ``module`` has left."""
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    return x if state is None else picked(x, dim, state.heads)


def picked(x: Tensor, dim: int, indices: tuple[int, ...]) -> Tensor:
    """``x`` at some indices of an axis, ascending; by slices, which need no index on the right
    device.

    >>> picked(torch.arange(6), 0, (0, 1, 4)).tolist()
    [0, 1, 4]
    """
    starts = [i for i in indices if i - 1 not in indices]
    stops = [i + 1 for i in indices if i + 1 not in indices]
    runs = [x.narrow(dim, start, stop - start) for start, stop in zip(starts, stops, strict=True)]
    if len(runs) == 1:
        return runs[0]  # a view; to join it alone would copy it
    return torch.cat(runs, dim) if runs else x.narrow(dim, 0, 0)
