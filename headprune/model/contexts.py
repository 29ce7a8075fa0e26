"""What every output projection reads, the heads' outputs side by side, and which of its tokens are no padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from headprune.core.heads import Kind
from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from headprune.model.expose import exposed
from headprune.model.running import batch_size
from headprune.model.sites import BoundSite
from headprune.model.transfers import sent

#: ``take(number of the site, contexts [rows, tokens, heads * width], counted [rows, tokens] or None)``
Take: TypeAlias = Callable[[int, Tensor, Tensor | None], None]


@contextmanager
def reading(model: nn.Module, bound: Sequence[BoundSite], take: Take) -> Iterator[Callable[[Any], None]]:
    """For as long as the block lasts, ``take`` gets what a site's output projection reads whenever it runs.

    Contexts are ``[rows, tokens, heads * width]`` of the present heads, batch first, without a graph. A row is an
    example; with windows it is a window, and those of an example follow one another. ``counted`` is True where a token
    is no padding, None where nothing is known. A module that runs several times in a pass hands over each of its runs.
    A layout without an output projection is read at its output.

    Yields:
        A function that must be given each batch before the model runs on it: padding is told from it.
    """

    def seen(number: int, x: Tensor) -> None:
        b, batch = bound[number], inputs.now
        x = rows_of(b, x.detach(), batch)
        take(number, x, counted(model, b, x, batch))

    with inputs_of(model, bound) as inputs, watched(bound, seen):
        yield inputs.begin


class Inputs:
    """What tells the padding of the call that is running: ``now``, the batch or what a part of the model is given."""

    def __init__(self) -> None:
        self.now: Any = None
        self._told = True

    def begin(self, batch: Any) -> None:
        """A pass on this batch follows."""
        self.now, self._told = batch, isinstance(batch, Mapping) and "attention_mask" in batch

    def see(self, kwargs: Mapping[str, Any]) -> None:
        """A part of the model is called so."""
        if self._told:
            return
        mask, away = kwargs.get("attention_mask"), kwargs.get("src_key_padding_mask")
        if _is_mask(mask) and not mask.is_floating_point():  # one of floats is added to attention's scores
            self.now = dict(kwargs)
        elif _is_mask(away) and away.dtype == torch.bool:
            self.now = {"attention_mask": ~away}


def _is_mask(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 2


@contextmanager
def inputs_of(model: nn.Module, bound: Iterable[BoundSite]) -> Iterator[Inputs]:
    """Follows which inputs tell the padding, for as long as the block lasts.

    A batch with an ``attention_mask`` tells it itself. Others may hold the inputs of inner models, such as those of an
    encoder that runs once for each of two sentences: there the last ``attention_mask`` ``[batch, tokens]`` counts, or
    PyTorch's ``src_key_padding_mask``, by which a module around the attention was called.
    """
    parts = [b.site.name.split(".") for b in bound]
    names = {".".join(p[:n]) for p in parts for n in range(len(p))}
    inputs = Inputs()

    def called(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        inputs.see(kwargs)

    with ExitStack() as stack:
        for name in names:
            hook = model.get_submodule(name).register_forward_pre_hook(called, with_kwargs=True)
            stack.callback(hook.remove)
        yield inputs


@contextmanager
def watched(bound: Sequence[BoundSite], see: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
    """For as long as the block lasts, ``see(number of the site, x)`` gets what a site's output projection is given
    whenever it runs, or what a module without one returns. A tensor that it returns takes the place of x."""

    def hook(number: int, b: BoundSite) -> Any:
        def given(module: nn.Module, args: tuple[Any, ...]) -> Any:
            x = see(number, args[0])
            return None if x is None else (x, *args[1:])

        def returned(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            x = see(number, out if isinstance(out, Tensor) else out[0])
            return x if x is None or isinstance(out, Tensor) else (x, *out[1:])

        if b.layout.gate:
            return b.gate.register_forward_pre_hook(given)
        return b.gate.register_forward_hook(returned)

    with ExitStack() as stack:
        stack.enter_context(exposed(bound))
        for number, b in enumerate(bound):
            if b.site.heads:
                stack.callback(hook(number, b).remove)
        yield


def query_mask(model: nn.Module, kind: Kind, batch: Any, shape: tuple[int, int]) -> Tensor | None:
    """``[batch, queries]``: True where a query is no padding; None where the batch does not tell.

    The queries of an encoder-decoder's decoder (kinds ``causal`` and ``cross``) follow ``decoder_attention_mask``;
    without one, labels of -100 are padding; with neither and no inputs of its own, the decoder reads the encoder's.
    All other queries follow ``attention_mask``. A mask of another shape tells nothing.
    """
    if not isinstance(batch, Mapping):
        return None
    mask = batch.get("attention_mask")
    if kind != "self" and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        labels, own = batch.get("labels"), batch.get("decoder_input_ids")
        if isinstance(labels, Tensor) and labels.ndim == 2:
            mask = labels != -100
        elif own is not None or batch.get("decoder_inputs_embeds") is not None:
            mask = None
        mask = mask if batch.get("decoder_attention_mask") is None else batch["decoder_attention_mask"]
    return mask.bool() if isinstance(mask, Tensor) and tuple(mask.shape) == shape else None


def counted(model: nn.Module, b: BoundSite, rows: Tensor, batch: Any) -> Tensor | None:
    """``[rows, tokens]``: True where a token of ``rows_of`` is no padding; None where nothing is known."""
    return None if b.layout.windows else query_mask(model, b.site.kind, batch, (rows.shape[0], rows.shape[1]))


def wide(x: Tensor) -> torch.dtype:
    """The type to add up in."""
    return torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64


def rows_of(b: BoundSite, x: Tensor, batch: Any) -> Tensor:
    """What ``watched`` hands over as ``[rows, tokens, heads * width]`` of the present heads."""
    x = x if b.layout.gate else _of_present_heads(b.module, x)
    if x.ndim == 2:  # one token an example, or one example
        return x.unsqueeze(1 if len(x) == batch_size(batch) else 0)
    if x.ndim == 3:
        return x.transpose(0, 1) if b.layout.batch_axis == 1 else x
    return x.flatten(1, -2)


def _of_present_heads(module: nn.Module, out: Tensor) -> Tensor:
    """Without an output projection a cut attention keeps its width: heads that have left put out zeros."""
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is None:
        return out
    index = sent(state.heads, out.device)
    return out.unflatten(-1, (state.n_query_heads, -1)).index_select(-2, index).flatten(-2)
