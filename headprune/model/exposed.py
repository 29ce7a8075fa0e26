"""Makes output projections callable where a module's own code passes by them
(``torch.nn.MultiheadAttention``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from headprune.core.mixin import mix_in, mix_out
from headprune.model.sites import BoundSite


@contextmanager
def exposed(bound: Iterable[BoundSite]) -> Iterator[None]:
    """For as long as the block lasts, every site's output projection is called as a module, so that
    gates and hooks on it take effect. Costs nothing where that is so anyway; see
    ``AttentionLayout.exposed``."""
    with ExitStack() as stack:
        for b in bound:
            if b.layout.exposed is not None and mix_in(b.module, b.layout.exposed):
                stack.callback(mix_out, b.module, b.layout.exposed)
        yield
