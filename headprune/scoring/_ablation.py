"""What ablations share: settings that close or open one unit, and replacements for a closed head's
output."""

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
from headprune.scoring._base import Estimate, ScoringProblem, units_per_site
from headprune.scoring._contexts import mean_contexts, read_contexts
from headprune.scoring._distributions import content_seeds

#: ``batch -> {site number: replacement}``: what closed gates let through instead of the head's own
#: output; 0 at sites that are missing.
Fill: TypeAlias = Callable[[Any], Mapping[int, Stand]]


def unit_rows(problem: ScoringProblem) -> Tensor:
    """``[units, heads]``, on the CPU: 1 where a present head belongs to the unit, site after
    site."""
    rows = []  # by site [units, heads of the site]
    for b in problem.bound:
        of_site = torch.zeros(len(b.site.units), len(b.site.heads))
        for row, unit in zip(of_site, b.site.units, strict=True):
            row[list(map(b.site.heads.index, unit))] = 1
        rows.append(of_site)
    matrix: Tensor = torch.block_diag(*rows)
    return matrix


def differences(
    problem: ScoringProblem, what: str, settings: Tensor, base: Tensor, replay: Replay, fill: Fill
) -> Tensor:
    """How much each setting of the gates raises each example's loss above the base's.

    Args:
        problem: The problem.
        what: What the pass is for.
        settings: ``[settings, heads]``, the gates of all sites.
        base: ``[heads]``, the gates to compare with.
        replay: How the passes are run.
        fill: What closed gates let through.

    Returns:
        ``[examples, settings]``, in fp64 on the CPU.
    """
    return problem.rows(what, _Differences(replay.of(problem), settings, base, fill))


@dataclass(frozen=True)
class _Differences:
    """``[examples, settings]`` of a batch.

    The first batches show how batches can be run, which a call that resumes must remember.
    """

    losses: CandidateLosses
    settings: Tensor
    base: Tensor
    fill: Fill

    def __call__(self, number: int, batch: Any) -> Tensor:
        fill = self.fill(batch)
        losses, base_losses = self.losses(batch, self.settings, self.base, fill, number)
        return in_fp64((losses - base_losses).T)

    def findings(self, batch: Any) -> list[str]:
        return self.losses.replay_state(batch)

    def catch_up(self, number: int, batch: Any, findings: Sequence[str]) -> None:
        self.losses.restore_replay(batch, findings, self.base, self.fill(batch), number)


class Replay:
    """How the passes of one estimate are run; findings about the model serve all of them.

    Args:
        max_bytes: Bound on the memory for settings that run at once.
        replay: Play back the layers before the first one that a setting changes.
    """

    def __init__(self, max_bytes: int, replay: bool = True) -> None:
        self.max_bytes = max_bytes
        self.replay = replay
        self._losses: CandidateLosses | None = None
        self._workers = Workers()

    def of(self, problem: ScoringProblem) -> CandidateLosses:
        """What runs the problem's batches."""
        self._workers = problem.workers
        if self._losses is None:
            self._losses = CandidateLosses(
                problem.model,
                problem.bound,
                problem.loss,
                self.max_bytes,
                self.replay,
                problem.checks.add_losses,
            )
        return self._losses

    def noted(self, estimate: Estimate) -> Estimate:
        """The estimate with notes about how it was made, by any of the processes."""
        own = () if self._losses is None else self._losses.notes
        notes = self._workers.united(own)
        return replace(estimate, notes=(*estimate.notes, *notes))


def idle(estimate: Estimate, problem: ScoringProblem) -> Estimate:
    """The estimate with a note about sites whose heads change no loss."""
    sizes = units_per_site(problem.bound)
    names = []
    for b, values in zip(problem.bound, estimate.values.split(sizes), strict=True):
        if len(values) and not bool(values.any()):
            names.append(b.site.name)
    # Where no head at all changes a loss, another note says so.
    n_sites = sum(size > 0 for size in sizes)
    if not names or len(names) == n_sites:
        return estimate
    note = f"No head of {', '.join(names)} changes any loss: does the loss depend on that layer?"
    return replace(estimate, notes=(*estimate.notes, note))


def byte_count(where: str, value: int) -> None:
    """Refuse a bound on memory below one byte."""
    if value < 1:
        raise InvalidValue(where, "a count of bytes", value)


def nothing(batch: Any) -> Mapping[int, Stand]:
    """Replace closed heads' outputs by zeros."""
    return {}


def means(problem: ScoringProblem) -> Fill:
    """Replace closed heads' outputs by their means over all tokens that are no padding, per site
    ``[heads * width]``."""
    fill: dict[int, Stand] = dict(mean_contexts(problem))
    return lambda batch: fill


def other_contexts(problem: ScoringProblem, pool: int, seed: int) -> Fill:
    """Replace closed heads' outputs by those on another example, drawn from a pool.

    Both draws depend on the content of examples, not on their places in the data. Token t takes
    token t of the other example, from its beginning again where it ends. Padding is not counted in
    either.

    Args:
        problem: The problem.
        pool: Examples in the pool.
        seed: Of the draws.
    """
    for b in problem.bound:
        if b.layout.windows or b.layout.batch_axis or not b.layout.gate:
            must = "'zero' or 'mean' where the projection's input has no row per example"
            got = f"'resample' for {b.site.name} ({b.layout.name})"
            raise InvalidValue("LeaveOneOut.replacement", must, got)
    pools = _pools(problem, pool, seed)

    def fill(batch: Any) -> Mapping[int, Stand]:
        marks = content_seeds(problem.model, problem.given, seed)
        replacements: dict[int, Stand] = {}
        for site, counted in enumerate(_counted(problem, batch)):
            if pools[site] and counted is not None:
                replacements[site] = _replacements(pools[site], marks, counted)
        return replacements

    return fill


def _pools(problem: ScoringProblem, size: int, seed: int) -> list[dict[int, Tensor]]:
    """The contexts of examples to draw from: by site and example ``[tokens, heads * width]``,
    without padding."""
    # 1. Choose the examples with the lowest marks.
    # By batch, one per example.
    marks = [
        content_seeds(problem.model, problem.given, seed)
        for _ in problem.passes("choosing other examples")
    ]
    chosen = sorted(set().union(*marks))[:size]
    if len(chosen) < 2:
        must = "at least two unlike examples for 'resample'"
        hint = "Use replacement='mean', or more data."
        raise InvalidValue("batches", must, len(chosen), hint)

    # 2. Keep their contexts, and which of their tokens count.
    kept: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in problem.bound]
    here: list[int] = []  # marks of the batch that runs

    def take(site: int, contexts: Tensor, counted: Tensor | None) -> None:
        counted = _all_of(contexts) if counted is None else counted
        for row, mark in enumerate(here):
            if mark in chosen and mark not in kept[site]:
                kept[site][mark] = contexts[row].clone(), counted[row]

    def with_chosen() -> Iterator[tuple[int, Any]]:
        for number, batch in problem.passes("outputs of other examples"):
            here[:] = marks[number - problem.before]
            if not set(here).isdisjoint(chosen):
                yield number, batch

    read_contexts(problem, with_chosen(), take)
    return _without_padding(kept)


def _without_padding(kept: list[dict[int, tuple[Tensor, Tensor]]]) -> list[dict[int, Tensor]]:
    """By site and example ``[tokens, heads * width]``, of the tokens that count."""
    # One copy of all masks, because each waits for the accelerator.
    masks = iter(in_main_memory(counted for of_site in kept for _, counted in of_site.values()))
    pools = []
    for of_site in kept:
        pool = {}
        for mark, (tokens, _) in of_site.items():
            places = next(masks).nonzero().squeeze(1)
            if len(places):
                pool[mark] = tokens[sent(places, tokens.device)]
        pools.append(pool)
    return pools


def _replacements(
    pool: dict[int, Tensor], marks: Sequence[int], counted: Tensor
) -> tuple[Tensor, ...]:
    """For every example of a batch ``[tokens, heads * width]`` of another example of the pool.

    Args:
        pool: Contexts by example.
        marks: Of the batch's examples.
        counted: ``[examples, tokens]``: which tokens are no padding.
    """
    # By example [tokens of the other example, heads * width].
    others = [pool[_other(mark, sorted(pool))] for mark in marks]
    # A token's number among those that are no padding.
    places = (counted.cumsum(1) - 1).clamp(min=0)
    return tuple(x[place % len(x)] for x, place in zip(others, places, strict=True))


@torch.no_grad()
def _counted(problem: ScoringProblem, batch: Any) -> list[Tensor | None]:
    """By site ``[examples, tokens]``: which tokens of a batch are no padding; None where a site
    does not run."""
    masks: list[Tensor | None] = [None] * len(problem.bound)

    def take(site: int, contexts: Tensor, counted: Tensor | None) -> None:
        counted = _all_of(contexts) if counted is None else counted
        masks[site] = counted.to(contexts.device)

    with reading(problem.model, problem.bound, take) as begin:
        begin(batch)
        problem.loss(problem.model, batch)
    return masks


def _all_of(contexts: Tensor) -> Tensor:
    return torch.ones(contexts.shape[:2], dtype=torch.bool, device=contexts.device)


def _other(mark: int, pool: list[int]) -> int:
    """One of the pool, but not the example itself."""
    # Where this example alone has tokens at a site, it replaces itself.
    others = [other for other in pool if other != mark] or pool
    return others[mark % len(others)]
