"""Compiled code that is sure to have been compiled, for the benchmarks that time it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def compiling(compiled: bool) -> Iterator[Callable[[int], dict[str, int]]]:
    """Compiled code of this block alone, and all of it compiled: falling back to eager mode is an
    error.

    The models share their class's code, and past a limit of versions PyTorch would run the rest
    uncompiled, which the times alone would not tell.

    Yields:
        ``(models) -> facts``: graphs, and breaks between them, for the row.
    """
    if not compiled:
        yield lambda models: {}
        return
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()

    def facts(models: int) -> dict[str, int]:
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        if graphs < models:
            raise RuntimeError(f"{graphs} graphs were compiled for {models} models")
        return {"graphs": graphs, "graph_breaks": breaks}

    with torch._dynamo.config.patch(recompile_limit=1024, fail_on_recompile_limit_hit=True):
        yield facts
