"""Makes modules call their output projections (``torch.nn.MultiheadAttention`` does not)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from headprune.core.mixin import mix_in, mix_out
from headprune.model.sites import BoundSite


@contextmanager
def exposed(bound: Iterable[BoundSite]) -> Iterator[None]:
    """Make every site call its output projection as a module inside the block.

    Gates and hooks on it take effect then. See ``AttentionLayout.exposed``; it costs nothing where
    the module calls it anyway.
    """
    with ExitStack() as stack:
        for b in bound:
            if b.layout.exposed is not None and mix_in(b.module, b.layout.exposed):
                stack.callback(mix_out, b.module, b.layout.exposed)
        yield
