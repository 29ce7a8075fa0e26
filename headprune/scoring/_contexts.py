"""Passes over a problem's data that read what the output projections read, for scorers that need it beside the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.contexts import Take, reading, watched, wide
from headprune.model.sites import BoundSite
from headprune.scoring._base import Problem


def read_contexts(problem: Problem, batches: Iterable[tuple[int, Any]], take: Take) -> None:
    """Runs the loss on numbered batches, handing the contexts of every site to ``take``; see ``reading``."""
    with torch.no_grad(), reading(problem.model, problem.bound, take) as begin:
        for number, batch in batches:
            begin(batch)
            problem.losses(number, batch)


def mean_contexts(problem: Problem) -> dict[int, Tensor]:
    """``[heads * width]`` in fp64, the mean context of every site over all tokens that are no padding.

    Raises:
        InvalidValue: batches of nothing but padding.
    """
    problem.keep()
    totals: dict[int, Tensor] = {}
    counts: dict[int, int] = {}

    def take(site: int, x: Tensor, counted: Tensor | None) -> None:
        tokens = x.flatten(0, -2) if counted is None else x[counted]  # chosen: attention may leave NaN at padding
        total = tokens.to(wide(x)).sum(0)
        totals[site] = totals[site] + total if site in totals else total
        counts[site] = counts.get(site, 0) + len(tokens)

    def own() -> dict[str, Tensor]:
        what = "mean outputs of heads"
        read_contexts(problem, ((number, batch) for number, _, batch in problem.share(what)), take)
        return {str(site): torch.cat([total, total.new_tensor([counts[site]])]) for site, total in totals.items()}

    found: dict[int, Tensor] = {}
    for part in problem.gathered("mean outputs of heads", own):
        for name, sums in part.items():
            found[int(name)] = found[int(name)] + sums if int(name) in found else sums
    for site, sums in found.items():
        if not sums[-1]:
            name = problem.bound[site].site.name
            raise InvalidValue("batches", "with a token that is no padding", f"only padding at {name}")
    return {site: (sums[:-1] / sums[-1]).to(totals.get(site, sums).device) for site, sums in found.items()}


@contextmanager
def leaves(problem: Problem, see: Callable[[int, Tensor], None] | None = None) -> Iterator[list[list[Tensor]]]:
    """For as long as the block lasts, every site keeps what it reads whenever it runs, and that asks for a gradient.

    ``see(number of the site, x)`` is called at each run.
    """
    kept: list[list[Tensor]] = [[] for _ in problem.bound]

    def asking(site: int, x: Tensor) -> Tensor:
        if see is not None:
            see(site, x)
        kept[site].append(x if x.requires_grad else x.detach().requires_grad_())
        return kept[site][-1]

    with watched(problem.bound, asking):
        yield kept


def by_example(b: BoundSite, rows: Tensor, size: int) -> Tensor:
    """``[examples, tokens, ...]`` of rows, of which windows of an example follow one another.

    Raises:
        UnsupportedModel: rows that are no examples.
    """
    if len(rows) % size:
        hint = "Leave this site out with sites=, or give batches with the examples first."
        raise UnsupportedModel(b.site.name, f"run on {size} examples", f"{len(rows)} rows", hint)
    return rows.reshape(size, -1, *rows.shape[2:])
