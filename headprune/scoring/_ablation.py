"""What ablations share: settings that close or open one unit, and what stands in for a closed
head's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.gating.candidates import CandidateLosses
from headprune.gating.projections import Stand
from headprune.model.contexts import reading
from headprune.model.processes import Workers
from headprune.model.transfers import in_fp64, in_main_memory, sent
from headprune.scoring._base import Estimate, ScoringProblem
from headprune.scoring._contexts import mean_contexts, read_contexts
from headprune.scoring._distributions import content_seeds

#: ``batch -> {site number: what closed gates let through}``
Fill: TypeAlias = Callable[[Any], Mapping[int, Stand]]


def unit_rows(problem: ScoringProblem) -> Tensor:
    """``[units, heads]``, on the CPU: 1 where a present head belongs to the unit, site after
    site."""
    sites = [b.site for b in problem.bound]
    heads = {(s.name, h): i for i, (s, h) in enumerate((s, h) for s in sites for h in s.heads)}
    units = [(s.name, unit) for s in sites for unit in s.units]
    rows = torch.zeros(len(units), len(heads))
    for row, (name, unit) in zip(rows, units, strict=True):
        row[[heads[name, h] for h in unit]] = 1
    return rows


def differences(
    problem: ScoringProblem, what: str, settings: Tensor, base: Tensor, replay: Replay, fill: Fill
) -> Tensor:
    """``[examples, settings]``: each setting's loss minus the base's, in fp64 on the CPU."""
    return problem.rows(what, _Differences(replay.of(problem), settings, base, fill))


@dataclass(frozen=True)
class _Differences:
    """``[examples, settings]`` of a batch; how batches are run is found out on the first ones, so
    it is remembered."""

    losses: CandidateLosses
    settings: Tensor
    base: Tensor
    fill: Fill

    def __call__(self, number: int, batch: Any) -> Tensor:
        found, start = self.losses(batch, self.settings, self.base, self.fill(batch), number)
        return in_fp64((found - start).T)

    def told(self, batch: Any) -> list[str]:
        return self.losses.replay_state(batch)

    def catch_up(self, number: int, batch: Any, told: Sequence[str]) -> None:
        self.losses.restore_replay(batch, told, self.base, self.fill(batch), number)


class Replay:
    """How the passes of one estimate are run; what was found out about the model serves all of
    them."""

    def __init__(self, max_bytes: int, replay: bool = True) -> None:
        self.max_bytes, self.replay = max_bytes, replay
        self._losses: CandidateLosses | None = None
        self._workers = Workers()

    def of(self, problem: ScoringProblem) -> CandidateLosses:
        self._workers = problem.workers
        if self._losses is None:
            self._losses = CandidateLosses(
                problem.model, problem.bound, problem.loss, self.max_bytes, self.replay, problem.see
            )
        return self._losses

    def told(self, estimate: Estimate) -> Estimate:
        """The estimate with notes about how it was made."""
        notes = self._workers.united(self._losses.notes if self._losses else ())
        return replace(estimate, notes=(*estimate.notes, *notes))


def idle(estimate: Estimate, problem: ScoringProblem) -> Estimate:
    """The estimate with a note about sites whose heads change no loss."""
    sizes = [len(b.site.units) for b in problem.bound]
    sites = zip(problem.bound, estimate.values.split(sizes), strict=True)
    names = [b.site.name for b, values in sites if len(values) and not bool(values.any())]
    if not names or len(names) == sum(size > 0 for size in sizes):
        return estimate
    note = f"No head of {', '.join(names)} changes any loss: does the loss depend on that layer?"
    return replace(estimate, notes=(*estimate.notes, note))


def byte_count(where: str, value: int) -> None:
    """Refuses a bound on memory that is none."""
    if value < 1:
        raise InvalidValue(where, "a count of bytes", value)


def nothing(batch: Any) -> Mapping[int, Stand]:
    """Closed gates let nothing through."""
    return {}


def means(problem: ScoringProblem) -> Fill:
    """Closed gates let through the head's mean output over all tokens of the data that are no
    padding."""
    fill: dict[int, Stand] = dict(mean_contexts(problem))
    return lambda batch: fill


def other_contexts(problem: ScoringProblem, pool: int, seed: int) -> Fill:
    """Closed gates let through what the head puts out on another example, drawn from a pool of
    ``pool``.

    Both draws go by what examples contain, not by their places in the data. Token t takes token t
    of the other example, which begins anew where it ends; padding is counted in neither.
    """
    for b in problem.bound:
        if b.layout.windows or b.layout.batch_axis or not b.layout.gate:
            must = "'zero' or 'mean' where examples are no rows of the output projection's input"
            raise InvalidValue(
                "LeaveOneOut.replacement", must, f"'resample' for {b.site.name} ({b.layout.name})"
            )
    marks = [
        content_seeds(problem.model, problem.given, seed)
        for _ in problem.passes("choosing other examples")
    ]
    chosen = sorted({mark for batch in marks for mark in batch})[:pool]
    if len(chosen) < 2:
        hint = "Use replacement='mean', or more data."
        raise InvalidValue(
            "batches", "at least two unlike examples for 'resample'", len(chosen), hint
        )
    kept: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in problem.bound]
    here: list[int] = []

    def take(site: int, contexts: Tensor, counted: Tensor | None) -> None:
        counted = _all_of(contexts) if counted is None else counted
        for row, mark in enumerate(here):
            if mark in chosen and mark not in kept[site]:
                kept[site][mark] = contexts[row].clone(), counted[row]

    def holding() -> Iterator[tuple[int, Any]]:
        for number, batch in problem.passes("outputs of other examples"):
            here[:] = marks[number - problem.before]
            if not set(here).isdisjoint(chosen):
                yield number, batch

    read_contexts(problem, holding(), take)
    pools = _without_padding(kept)

    def fill(batch: Any) -> Mapping[int, Stand]:
        own, found = content_seeds(problem.model, problem.given, seed), {}
        for site, counted in enumerate(_counted(problem, batch)):
            rows = pools[site]
            if rows and counted is not None:
                places = (counted.cumsum(1) - 1).clamp(
                    min=0
                )  # a token's number among those that are no padding
                others = [rows[_other(mark, sorted(rows))] for mark in own]
                found[site] = tuple(
                    x[place % len(x)] for x, place in zip(others, places, strict=True)
                )
        return found

    return fill


def _without_padding(kept: list[dict[int, tuple[Tensor, Tensor]]]) -> list[dict[int, Tensor]]:
    """By site and example ``[tokens, heads * width]``, of those that count; one look at all of
    them."""
    rows = [
        (site, mark, tokens)
        for site, of_site in enumerate(kept)
        for mark, (tokens, _) in of_site.items()
    ]
    masks = in_main_memory(counted for of_site in kept for _, counted in of_site.values())
    pools: list[dict[int, Tensor]] = [{} for _ in kept]
    for (site, mark, tokens), counted in zip(rows, masks, strict=True):
        if bool(counted.any()):
            pools[site][mark] = tokens[sent(counted.nonzero().squeeze(1), tokens.device)]
    return pools


@torch.no_grad()
def _counted(problem: ScoringProblem, batch: Any) -> list[Tensor | None]:
    """By site ``[examples, tokens]``: which tokens of a batch are no padding; None where a site
    does not run."""
    found: list[Tensor | None] = [None] * len(problem.bound)

    def take(site: int, contexts: Tensor, counted: Tensor | None) -> None:
        found[site] = _all_of(contexts) if counted is None else counted.to(contexts.device)

    with reading(problem.model, problem.bound, take) as begin:
        begin(batch)
        problem.loss(problem.model, batch)
    return found


def _all_of(contexts: Tensor) -> Tensor:
    return torch.ones(contexts.shape[:2], dtype=torch.bool, device=contexts.device)


def _other(mark: int, pool: list[int]) -> int:
    """One of the pool, but not the example itself."""
    others = [other for other in pool if other != mark] or pool
    return others[mark % len(others)]
