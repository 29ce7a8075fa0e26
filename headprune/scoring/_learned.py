"""Scores from trained gates: the model is frozen, Adam trains the gates, on blocks of examples in
data order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.gating.context import gated
from headprune.gating.learned import unit_of_heads
from headprune.gating.stochastic import GateDistribution
from headprune.model.recompute import recomputed
from headprune.model.running import batch_size, device_of
from headprune.model.sites import sites_of
from headprune.model.transfers import in_main_memory, sent
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.scoring._gradients import by_unit, gate_slopes
from headprune.scoring.magnitude import Magnitude


@dataclass(frozen=True)
class LearnedScorer(Scorer):
    """Trains gates and takes their weights for scores; a scorer says which gates.

    Args:
        steps: Updates of the gates, one a block of examples; the data is gone through as often as
            that takes.
        learning_rate: Of Adam.
        block: Examples of an update, in data order, whatever the loader's batch size; the last one
            of a pass may be smaller. Batches that are longer run once for every block in them.
        seed: Of the draws.
    """

    steps: int = field(default=200, kw_only=True)
    learning_rate: float = field(default=0.1, kw_only=True)
    block: int = field(default=32, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        for key in ("steps", "block"):
            if getattr(self, key) < 1:
                raise InvalidValue(f"{name}.{key}", "a count >= 1", getattr(self, key))
        if not self.learning_rate > 0:
            raise InvalidValue(f"{name}.learning_rate", "a number above 0", self.learning_rate)
        self.distribution()  # refuses its own settings

    @abstractmethod
    def distribution(self) -> GateDistribution:
        """The gates that are trained."""

    @property
    def by_example(self) -> bool:
        return False

    @torch.inference_mode(False)
    @torch.enable_grad()  # whatever the caller has set
    def estimate(self, problem: ScoringProblem) -> Estimate:
        problem.keep()
        training = _Training(self, problem)
        while training.step < self.steps or training.into.behind:
            training.go_through()
        return training.estimate()


class _Training:
    """Gates in training: one draw of them a block of examples, all in fp64 on the CPU but for the
    gates in the model.

    A draw and a step of Adam are hundreds of operations on a number a unit: a CPU has done them
    before a GPU's kernels would have begun.

    Noise is dealt out by the rank of a unit's `Magnitude` within its site, so that it follows a
    head wherever it stands (among heads of exactly equal size, by place).
    """

    def __init__(self, settings: LearnedScorer, problem: ScoringProblem) -> None:
        self.settings, self.problem, self.distribution = settings, problem, settings.distribution()
        self.counts = [len(b.site.units) for b in problem.bound]
        self.sizes = torch.tensor(
            [len(u) for b in problem.bound for u in b.site.units], dtype=torch.float64
        )
        self.weights = self.distribution.initial(len(self.sizes)).double().requires_grad_()
        self.multipliers = torch.zeros(
            self.distribution.n_multipliers, dtype=torch.float64, requires_grad=True
        )
        self._trained = (
            [self.weights, self.multipliers] if len(self.multipliers) else [self.weights]
        )
        self.optimizer = torch.optim.Adam(self._trained, settings.learning_rate)
        by_size = Magnitude().estimate(problem).values.split(self.counts)
        self.ranks = [row.argsort(stable=True).argsort() for row in by_size]
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.step = self.filled = self.n_read = 0
        self.dealt = self.drawn = self.slopes = torch.zeros_like(self.sizes)
        self.waiting: list[Tensor] = []  # slopes of this block that are where they were made
        self.into = problem.added(training=self)

    def go_through(self) -> None:
        """One pass over the data, or what of it the steps still take."""
        for number, batch in self.problem.passes(self.distribution.name, self.into):
            if self.problem.examples and self.step == self.settings.steps:
                break  # the first pass goes to its end, for the digest of the data
            first, size = 0, batch_size(batch)
            while first < size and self.step < self.settings.steps:
                last = min(size, first + self.settings.block - self.filled)
                self.add(number, batch, slice(first, last))
                first = last
                if self.filled == self.settings.block:
                    self.update()
            self.n_read += first
        self.problem.look()  # also where the pass was not read to its end
        if self.filled and not self.into.behind:
            self.update()

    def add(self, number: int, batch: Any, some: slice) -> None:
        """Adds the slopes of some examples' losses in the gates of this block."""
        if not self.filled:
            noise = self.distribution.noise(len(self.sizes), self.generator).split(self.counts)
            self.dealt = torch.cat([row[rank] for row, rank in zip(noise, self.ranks, strict=True)])
            self.slopes = torch.zeros_like(self.sizes)
            self.draw()
        gates = self.placed()
        with (
            gated(self.problem.model, gates, sites_of(self.problem.bound)),
            recomputed(self.problem.model),
        ):
            losses = self.problem.losses(number, batch)
            slopes = gate_slopes(self.problem, losses[some].sum(), gates)
        self.waiting.append(by_unit(self.problem, slopes))
        self.filled += some.stop - some.start

    def collect(self) -> None:
        """Adds up the slopes of this block on the CPU: the one wait a block, because the next gates
        depend on them."""
        for slopes in in_main_memory(self.waiting):
            self.slopes += slopes.double()
        self.waiting = []

    def draw(self) -> None:
        """Gates from the noise that was dealt out."""
        self.drawn = self.distribution.sample(self.weights, self.dealt, self.sizes, self.step)

    def placed(self) -> dict[str, Tensor]:
        """The drawn gates where the model wants them, one tensor ``[heads]`` a site, each the
        beginning of a graph."""
        gates = {}
        for b, drawn in zip(
            self.problem.bound, self.drawn.detach().split(self.counts), strict=True
        ):
            weight = next(b.module.parameters())
            wide = torch.promote_types(weight.dtype, torch.float32)
            gates[b.site.name] = sent(
                drawn[unit_of_heads(b)], device_of(b.module), wide
            ).requires_grad_()
        return gates

    def update(self) -> None:
        """One step of Adam on the mean loss of the block and the penalty."""
        self.collect()
        multipliers = self.multipliers if len(self.multipliers) else None
        penalty = self.distribution.penalty(self.weights, multipliers, self.sizes, self.step)
        self.optimizer.zero_grad()
        ((self.drawn * self.slopes).sum() / self.filled + penalty).backward()
        self.optimizer.step()
        self.step, self.filled = self.step + 1, 0

    def parts(self) -> dict[str, Tensor]:
        """All that a training goes on from."""
        self.collect()
        counts = torch.tensor([self.step, self.filled, self.n_read])
        own = {
            "counts": counts,
            "dealt": self.dealt,
            "slopes": self.slopes,
            "draws": self.generator.get_state(),
        }
        trained = {f"trained {i}": p.detach() for i, p in enumerate(self._trained)}
        states = {
            i: self.optimizer.state[p]
            for i, p in enumerate(self._trained)
            if p in self.optimizer.state
        }
        return (
            own
            | trained
            | {f"adam {i} {name}": x for i, state in states.items() for name, x in state.items()}
        )

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Goes on from the only ones of ``parts``."""
        (found,) = parts
        self.step, self.filled, self.n_read = found["counts"].tolist()
        self.dealt, self.slopes = found["dealt"], found["slopes"]
        self.generator.set_state(found["draws"])
        for i, p in enumerate(self._trained):
            p.data.copy_(found[f"trained {i}"])
            adam = {
                name.removeprefix(f"adam {i} "): x
                for name, x in found.items()
                if name.startswith(f"adam {i} ")
            }
            if adam:
                self.optimizer.state[p] = adam
        if self.filled:
            self.draw()

    def estimate(self) -> Estimate:
        weights = self.weights.detach()
        told = self.distribution.notes(weights, self.sizes, self.step)
        note = "No standard error: the gates were trained together, not averaged over examples."
        return Estimate(
            weights,
            n_examples=min(self.n_read, self.problem.examples),
            seed=self.settings.seed,
            notes=(*told, note),
        )
