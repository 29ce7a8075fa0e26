"""What every output projection reads, the heads' outputs side by side, and which of its tokens are
no padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from headprune.model.exposed import exposed
from headprune.model.padding import PaddingInfo, inputs_of, query_mask
from headprune.model.running import batch_size
from headprune.model.sites import BoundSite
from headprune.model.transfers import sent

#: ``take(number, contexts, counted)``: the number of the site, its contexts
#: ``[rows, tokens, heads * width]``, and ``[rows, tokens]`` or None.
Take: TypeAlias = Callable[[int, Tensor, Tensor | None], None]


@contextmanager
def reading(
    model: nn.Module, bound: Sequence[BoundSite], take: Take
) -> Iterator[Callable[[Any], None]]:
    """For as long as the block lasts, ``take`` gets what a site's output projection reads whenever
    it runs.

    Contexts are ``[rows, tokens, heads * width]`` of the present heads, batch first, without a
    graph. A row is an example; with windows it is a window, and those of an example follow one
    another. ``counted`` is True where a token is no padding, None where nothing is known. A module
    that runs several times in a pass hands over each of its runs. A layout without an output
    projection is read at its output.

    Yields:
        A function that must be given each batch before the model runs on it: padding is told from
        it.
    """

    def seen(number: int, x: Tensor) -> None:
        b, info = bound[number], inputs.now
        x = rows_of(b, x.detach(), info.batch)
        take(number, x, counted(model, b, x, info))

    with inputs_of(model, bound) as inputs, watched(bound, seen):
        yield inputs.begin


@contextmanager
def watched(
    bound: Sequence[BoundSite], see: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """For as long as the block lasts, ``see(number of the site, x)`` gets what a site's output
    projection is given whenever it runs, or what a module without one returns. A tensor that it
    returns takes the place of x."""

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


def counted(model: nn.Module, b: BoundSite, rows: Tensor, info: PaddingInfo) -> Tensor | None:
    """``[rows, tokens]``: True where a token of ``rows_of`` is no padding; None where nothing is
    known."""
    return (
        None
        if b.layout.windows
        else query_mask(model, b.site.kind, info, (rows.shape[0], rows.shape[1]))
    )


def tokens_first(b: BoundSite) -> bool:
    """Whether the states around an attention are ``[tokens, batch, width]``."""
    return b.layout.batch_axis == 1 or getattr(b.module, "batch_first", True) is False


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
    """Without an output projection a cut attention keeps its width: heads that have left put out
    zeros."""
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is None:
        return out
    index = sent(state.heads, out.device)
    by_head: Tensor = out.unflatten(-1, (state.n_query_heads, -1))
    return by_head.index_select(-2, index).flatten(-2)
