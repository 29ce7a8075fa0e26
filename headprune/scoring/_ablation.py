"""What ablations share: settings that close or open one unit, and what stands in for a closed head's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.gating.candidates import CandidateLosses, Stand
from headprune.model.contexts import reading, wide
from headprune.model.losses import checked_losses
from headprune.model.running import batch_size, device_of
from headprune.scoring._base import Problem

#: ``(index of the batch's first example, batch) -> {site number: what closed gates let through}``
Fill: TypeAlias = Callable[[int, Any], Mapping[int, Stand]]


def unit_rows(problem: Problem) -> Tensor:
    """``[units, heads]``: 1 where a present head belongs to the unit, site after site."""
    sites = [b.site for b in problem.bound]
    heads = {(s.name, h): i for i, (s, h) in enumerate((s, h) for s in sites for h in s.heads)}
    units = [(s.name, unit) for s in sites for unit in s.units]
    rows = torch.zeros(len(units), len(heads), device=device_of(problem.model))
    for row, (name, unit) in zip(rows, units, strict=True):
        row[[heads[name, h] for h in unit]] = 1
    return rows


def differences(problem: Problem, what: str, settings: Tensor, base: Tensor, replay: Replay, fill: Fill) -> Tensor:
    """``[examples, settings]``: each setting's loss minus the base's, in fp64 on the CPU."""
    losses = replay.of(problem)
    rows, seen = [], 0
    for number, batch in problem.passes(what):
        found, start = losses(batch, settings, base, fill(seen, batch), number)
        rows.append((found - start).T.double().cpu())
        seen += batch_size(batch)
    replay.notes = losses.notes
    return torch.cat(rows)


class Replay:
    """How the passes of one estimate are run, and afterwards what is to be said about that."""

    def __init__(self, max_bytes: int, replay: bool) -> None:
        self.max_bytes, self.replay = max_bytes, replay
        self.notes: tuple[str, ...] = ()

    def of(self, problem: Problem) -> CandidateLosses:
        return CandidateLosses(problem.model, problem.bound, problem.loss, self.max_bytes, self.replay)


def nothing(start: int, batch: Any) -> Mapping[int, Stand]:
    """Closed gates let nothing through."""
    return {}


def mean_contexts(problem: Problem) -> Fill:
    """Closed gates let through the head's mean output over all tokens of the data that are no padding."""
    means: list[tuple[int, Tensor]] = [(0, torch.zeros(())) for _ in problem.bound]

    def take(site: int, contexts: Tensor, counted: Tensor | None) -> None:
        flat = (contexts if counted is None else contexts[counted]).flatten(0, -2).to(wide(contexts))
        count, total = means[site]
        means[site] = count + len(flat), total.to(flat) + flat.sum(0)

    _read(problem, "mean outputs of heads", problem.passes("mean outputs of heads"), take)
    fill: dict[int, Stand] = {site: total / count for site, (count, total) in enumerate(means) if count}
    return lambda start, batch: fill


def other_contexts(problem: Problem, pool: int, seed: int) -> Fill:
    """Closed gates let through what the head puts out on another example, drawn among the first ``pool``.

    Token t of an example takes token t of the other, which begins anew where it ends; padding is no part of it.
    """
    for b in problem.bound:
        if b.layout.windows or b.layout.batch_axis or not b.layout.gate:
            must = "'zero' or 'mean' where examples are no rows of the output projection's input"
            raise InvalidValue("LeaveOneOut.replacement", must, f"'resample' for {b.site.name} ({b.layout.name})")
    kept: list[list[Tensor]] = [[] for _ in problem.bound]

    def take(site: int, contexts: Tensor, counted: Tensor | None) -> None:
        rows = contexts if counted is None else [x[mask] for x, mask in zip(contexts, counted, strict=True)]
        kept[site] += [x.clone() for x in rows]

    def first() -> Iterator[tuple[int, Any]]:
        seen = 0
        for number, batch in problem.passes("outputs of other examples"):
            yield number, batch
            seen += batch_size(batch)
            if seen >= pool:
                return

    _read(problem, "outputs of other examples", first(), take)
    kept = [[x for x in rows[:pool] if len(x)] for rows in kept]
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []

    def fill(start: int, batch: Any) -> Mapping[int, Stand]:
        stop = start + batch_size(batch)
        while len(drawn) < stop:
            drawn.append(int(torch.randint(2**31, (), generator=generator)))
        return {
            site: tuple(rows[_other(example, drawn[example], len(rows))] for example in range(start, stop))
            for site, rows in enumerate(kept)
            if rows
        }

    return fill


def _other(example: int, number: int, n_rows: int) -> int:
    """One of the pool's rows, but not the example itself."""
    if example >= n_rows or n_rows == 1:
        return number % n_rows
    place = number % (n_rows - 1)
    return place + (place >= example)


def _read(problem: Problem, what: str, batches: Iterator[tuple[int, Any]], take: Any) -> None:
    with torch.no_grad(), reading(problem.model, problem.bound, take) as begin:
        for number, batch in batches:
            begin(batch)
            checked_losses(problem.loss, problem.model, batch, number)
