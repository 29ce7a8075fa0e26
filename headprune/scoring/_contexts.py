"""Passes over a problem's data for scorers that need the contexts, the inputs of the output
projections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headprune.core.errors import UnsupportedModel
from headprune.model.contexts import ContextSums, Take, only_padding, reading, watched
from headprune.model.running import device_of
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_main_memory
from headprune.scoring._base import ScoringProblem


def read_contexts(problem: ScoringProblem, batches: Iterable[tuple[int, Any]], take: Take) -> None:
    """Run the loss on numbered batches, and hand the contexts of every site to ``take``; see
    ``reading``."""
    with torch.no_grad(), reading(problem.model, problem.bound, take) as begin:
        for number, batch in batches:
            begin(batch)
            problem.losses(number, batch)


def mean_contexts(problem: ScoringProblem) -> dict[int, Tensor]:
    """``[heads * width]`` in fp64, the mean context of every site over all tokens that are no
    padding.

    Raises:
        InvalidValue: batches of nothing but padding.
    """
    problem.keep_batches()  # the scorer reads the data again
    what, sums = "mean outputs of heads", ContextSums()

    def read_own() -> dict[str, Tensor]:
        share = problem.share(what, problem.resumable(sums=sums))
        read_contexts(problem, ((number, batch) for number, _, batch in share), sums.take)
        return sums.parts()

    sums.join(problem.gathered(what, read_own))
    # Tokens per site, of all sites in one copy.
    counts = in_main_memory(total[-1] for total in sums.of_site.values())
    means = {}
    for (site, total), count in zip(sums.of_site.items(), counts, strict=True):
        b = problem.bound[site]
        if not count:
            raise only_padding(b.site.name)
        means[site] = (total[:-1] / total[-1]).to(device_of(b.module))
    return means


@contextmanager
def leaves(
    problem: ScoringProblem, see: Callable[[int, Tensor], None] | None = None
) -> Iterator[list[list[Tensor]]]:
    """Keep what every site reads in the block, run by run, and have it ask for a gradient.

    ``see(number of the site, x)`` is called at each run.

    Yields:
        By site, what it read in each of its runs.
    """
    contexts: list[list[Tensor]] = [[] for _ in problem.bound]

    def keep(site: int, x: Tensor) -> Tensor:
        if see is not None:
            see(site, x)
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        contexts[site].append(x)
        return x

    with watched(problem.bound, keep):
        yield contexts


def by_example(b: BoundSite, rows: Tensor, size: int) -> Tensor:
    """``[examples, tokens, ...]`` of rows, where the windows of an example follow one another.

    Raises:
        UnsupportedModel: rows that are no examples.
    """
    # A site may run on windows, several of them per example.
    if len(rows) % size:
        hint = "Leave this site out with sites=, or give batches with the examples first."
        must = f"a module that reads whole examples, {size} in this batch"
        raise UnsupportedModel(b.site.name, must, f"{len(rows)} rows", hint)
    return rows.reshape(size, -1, *rows.shape[2:])
