"""Contexts: the concatenated outputs of the heads, and which of their tokens are no padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import Kind
from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from headprune.model.exposed import exposed
from headprune.model.padding import PaddingInfo, inputs_of, query_mask
from headprune.model.running import batch_size
from headprune.model.sites import BoundSite
from headprune.model.transfers import sent

#: ``take(number of the site, contexts [rows, tokens, heads * width], counted)``; ``counted`` is
#: ``[rows, tokens]`` or None.
Take: TypeAlias = Callable[[int, Tensor, Tensor | None], None]


@contextmanager
def reading(
    model: nn.Module, bound: Sequence[BoundSite], take: Take
) -> Iterator[Callable[[Any], None]]:
    """Hand the contexts of every site to ``take`` inside the block, whenever it runs.

    Contexts are ``[rows, tokens, heads * width]`` of the present heads, batch first, without a
    graph. A row is an example; with windows it is a window, and those of an example follow one
    another. ``counted`` is True where a token is no padding, None where nothing is known. A module
    that runs several times in a pass hands over each of its runs. A layout without an output
    projection is read at its output.

    Args:
        model: The model.
        bound: The sites.
        take: Gets the contexts.

    Yields:
        A function that must be called with each batch before the model runs on it, because the
        batch shows its padding.
    """

    def hand_over(number: int, x: Tensor) -> None:
        b, info = bound[number], inputs.now
        rows = rows_of(b, x.detach(), info.batch)
        take(number, rows, counted(model, b, rows, info))

    with inputs_of(model, bound) as inputs, watched(bound, hand_over):
        yield inputs.begin


@contextmanager
def watched(
    bound: Sequence[BoundSite], see: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call ``see(number of the site, x)`` inside the block whenever a site runs.

    Args:
        bound: The sites; one without heads is not watched.
        see: Gets the input of the output projection, or the output of a module without one. If it
            returns a tensor, the model continues with that.
    """

    def before_projection(number: int, module: nn.Module, args: tuple[Any, ...]) -> Any:
        x = see(number, first_input(args, bound[number].site.name))
        return None if x is None else (x, *args[1:])

    def after_module(number: int, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        # Attention often returns (output, attention weights).
        if isinstance(out, Tensor):
            return see(number, out)
        x = see(number, out[0])
        return None if x is None else (x, *out[1:])

    with ExitStack() as stack:
        stack.enter_context(exposed(bound))
        for number, b in enumerate(bound):
            if not b.site.heads:
                continue
            if b.layout.gate:
                handle = b.gate.register_forward_pre_hook(partial(before_projection, number))
            else:
                handle = b.gate.register_forward_hook(partial(after_module, number))
            stack.callback(handle.remove)
        yield


def first_input(inputs: Sequence[Any], where: str) -> Any:
    """The first input of a call of an output projection; ``where`` is for the error.

    Raises:
        UnsupportedModel: there is none, because the call gives it by name.
    """
    if not inputs:
        must = "code that gives the output projection its input first, as in down(hidden)"
        hint = "Change that call in the model's code."
        raise UnsupportedModel(where, must, "an input by name", hint)
    return inputs[0]


def counted(model: nn.Module, b: BoundSite, rows: Tensor, info: PaddingInfo) -> Tensor | None:
    """Find the tokens of ``rows_of`` that are no padding.

    Returns:
        ``[rows, tokens]``: True where a token is no padding; None where nothing is known.
    """
    if b.layout.windows:  # windows of an image have no padding that a batch shows
        return None
    return query_mask(model, kind_of_queries(b), info, (rows.shape[0], rows.shape[1]))


def kind_of_queries(b: BoundSite) -> Kind:
    """The kind of attention by which the padding of a site's tokens is found.

    It is the site's own. A feed-forward has that of a decoder, ``causal``, inside a part of that
    name, else ``self``.
    """
    if not b.layout.is_feed_forward:
        return b.site.kind
    # The two differ in an encoder-decoder alone, whose parts have these names.
    return "causal" if "decoder" in b.site.name.split(".") else "self"


class ContextSums:
    """By site the sum of its contexts and, as the last number, of its tokens without padding.

    Args:
        columns: By number of the site, the columns that are added up; None for all.
    """

    def __init__(self, columns: Sequence[Sequence[int]] | None = None) -> None:
        self.columns = columns
        #: By number of the site ``[columns + 1]``, on its device.
        self.of_site: dict[int, Tensor] = {}

    def take(self, site: int, x: Tensor, counted: Tensor | None) -> None:
        """Add what a site read, as ``reading`` hands it over."""
        tokens = x.flatten(0, -2)  # [all tokens, heads * width]
        if self.columns is not None:
            tokens = tokens.index_select(1, sent(self.columns[site], x.device, torch.long))
        tokens = tokens.to(wide(x))
        if counted is None:
            n_tokens = tokens.new_full((1,), len(tokens))
        else:
            counted = counted.to(x.device).flatten()
            # Chosen, not multiplied by 0: attention may leave NaN at padding.
            tokens = tokens.masked_fill(~counted[:, None], 0)
            n_tokens = counted.sum(0, keepdim=True).to(tokens)
        self._add(site, torch.cat([tokens.sum(0), n_tokens]))

    def parts(self) -> dict[str, Tensor]:
        """All sums, by the number of the site."""
        return {str(site): total for site, total in self.of_site.items()}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Replace the own sums by those of all processes."""
        self.of_site = {}
        for part in parts:
            for name, total in part.items():
                self._add(int(name), total)

    def _add(self, site: int, total: Tensor) -> None:
        if site in self.of_site:
            # A layer that was loaded on another device for this batch has its sums there.
            total = self.of_site[site].to(total.device) + total
        self.of_site[site] = total


def not_reached(name: str, hint: str = "Leave this site out with sites=.") -> UnsupportedModel:
    """The error of a site, by its name, that did not run."""
    must, got = "a module that runs when the model does", "one that no batch reached"
    return UnsupportedModel(name, must, got, hint)


def only_padding(name: str) -> InvalidValue:
    """The error of batches in which a site, by its name, reads nothing but padding."""
    return InvalidValue("batches", "with a token that is no padding", f"only padding at {name}")


def not_finite(where: str) -> InvalidValue:
    """The error of numbers that are NaN or infinite, which most often come from the batches."""
    hint = "Look for NaN or infinite values in the batches."
    return InvalidValue(where, "finite", "NaN or infinite", hint)


def tokens_first(b: BoundSite) -> bool:
    """Whether the states around an attention are ``[tokens, batch, width]``."""
    return b.layout.batch_axis == 1 or getattr(b.module, "batch_first", True) is False


def wide(x: Tensor) -> torch.dtype:
    """The dtype for sums."""
    if x.device.type == "mps":  # has no float64
        return torch.float32
    return torch.float64


def rows_of(b: BoundSite, x: Tensor, batch: Any) -> Tensor:
    """Bring a tensor of ``watched`` to ``[rows, tokens, heads * width]`` of the present heads."""
    if not b.layout.gate:
        x = _of_present_heads(b.module, x)
    if x.ndim == 2:
        if len(x) == batch_size(batch):  # [batch, width]: one token per example
            return x.unsqueeze(1)
        if b.layout.is_feed_forward and not len(x) % batch_size(batch):
            # [batch * tokens, neurons], as OPT's. Without neurons, no size can be inferred.
            examples = batch_size(batch)
            return x.reshape(examples, len(x) // examples, x.shape[1])
        return x.unsqueeze(0)  # [tokens, width]: one example
    if x.ndim == 3:
        # [tokens, batch, width] or [batch, tokens, width]
        return x.transpose(0, 1) if b.layout.batch_axis == 1 else x
    return x.flatten(1, -2)  # several axes of tokens, as of images


def _of_present_heads(module: nn.Module, out: Tensor) -> Tensor:
    """The outputs of the present heads, from a module without an output projection.

    After a cut it keeps its width: removed heads have outputs of 0.
    """
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is None:
        return out
    index = sent(state.heads, out.device)
    # [..., heads of the uncut module, width]
    by_head: Tensor = out.unflatten(-1, (state.n_query_heads, -1))
    return by_head.index_select(-2, index).flatten(-2)
