"""Passes over a problem's data that read what the output projections read, for scorers that need it
beside the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.contexts import Take, reading, watched, wide
from headprune.model.running import device_of
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_main_memory
from headprune.scoring._base import ScoringProblem


def read_contexts(problem: ScoringProblem, batches: Iterable[tuple[int, Any]], take: Take) -> None:
    """Runs the loss on numbered batches, handing the contexts of every site to ``take``; see
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
    problem.keep()
    what, sums = "mean outputs of heads", _Totals()

    def own() -> dict[str, Tensor]:
        read_contexts(
            problem,
            ((n, batch) for n, _, batch in problem.share(what, problem.added(sums=sums))),
            sums.take,
        )
        return sums.parts()

    sums.join(problem.gathered(what, own))
    counts = in_main_memory(total[-1] for total in sums.of_site.values())
    for site, count in zip(sums.of_site, counts, strict=True):
        if not count:
            name = problem.bound[site].site.name
            raise InvalidValue(
                "batches", "with a token that is no padding", f"only padding at {name}"
            )
    return {
        site: (t[:-1] / t[-1]).to(device_of(problem.bound[site].module))
        for site, t in sums.of_site.items()
    }


class _Totals:
    """Of every site ``[heads * width + 1]``: the sum of its contexts, and over how many tokens."""

    def __init__(self) -> None:
        self.of_site: dict[int, Tensor] = {}

    def take(self, site: int, x: Tensor, counted: Tensor | None) -> None:
        """Adds what a site read."""
        tokens, here = (
            x.flatten(0, -2).to(wide(x)),
            torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device),
        )
        here = (here if counted is None else counted.to(x.device)).flatten()
        total = tokens.masked_fill(~here[:, None], 0).sum(
            0
        )  # chosen: attention may leave NaN at padding
        more = torch.cat([total, here.sum(0, keepdim=True).to(total)])
        self.of_site[site] = (
            self.of_site[site].to(more.device) + more if site in self.of_site else more
        )

    def parts(self) -> dict[str, Tensor]:
        return {str(site): total for site, total in self.of_site.items()}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        found: dict[int, Tensor] = {}
        for part in parts:
            for name, total in part.items():
                found[int(name)] = found[int(name)] + total if int(name) in found else total
        self.of_site = found


@contextmanager
def leaves(
    problem: ScoringProblem, see: Callable[[int, Tensor], None] | None = None
) -> Iterator[list[list[Tensor]]]:
    """For as long as the block lasts, every site keeps what it reads whenever it runs, and that
    asks for a gradient.

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
