"""Scores from trained gates: Adam trains them on blocks of examples, while the model is frozen."""

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
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, units_per_site
from headprune.scoring._gates import by_unit, gate_dtype, gate_slopes
from headprune.scoring.magnitude import Magnitude


@dataclass(frozen=True)
class LearnedScorer(Scorer):
    """Train gates and take their weights for scores; a subclass says which gates.

    Args:
        steps: Updates of the gates, one per block of examples; the data are read as often as that
            takes.
        learning_rate: Of Adam.
        block: Examples per update, in data order, for any batch size of the loader; the last block
            of a pass may be smaller. Larger batches run once for every block in them.
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
        # A distribution refuses its own settings.
        self.distribution()

    @abstractmethod
    def distribution(self) -> GateDistribution:
        """The gates that are trained."""

    @property
    def by_example(self) -> bool:
        return False

    # The caller may have turned graphs off.
    @torch.inference_mode(False)
    @torch.enable_grad()
    def estimate(self, problem: ScoringProblem) -> Estimate:
        problem.keep_batches()
        training = _GateTraining(self, problem)
        while training.step < self.steps or training.into.behind:
            training.run_pass()
        return training.estimate()


class _GateTraining:
    """Gates in training: one draw per block of examples.

    All numbers are in fp64 on the CPU, but for the gates in the model. A draw and a step of Adam
    are hundreds of operations on one number per unit, which a CPU finishes before a GPU's kernels
    would have begun.

    Noise is assigned by the rank of a unit's `Magnitude` within its site. So it follows a head to
    any place in the site (among heads of exactly equal size, it follows the place).
    """

    def __init__(self, settings: LearnedScorer, problem: ScoringProblem) -> None:
        self.settings = settings
        self.problem = problem
        self.distribution = settings.distribution()

        # Units per site, and [units] how many heads each has.
        self.counts = units_per_site(problem.bound)
        sizes = [len(unit) for b in problem.bound for unit in b.site.units]
        self.sizes = torch.tensor(sizes, dtype=torch.float64)

        # What is trained.
        n_multipliers = self.distribution.n_multipliers
        self.weights = self.distribution.initial(len(self.sizes)).double().requires_grad_()
        self.multipliers = torch.zeros(n_multipliers, dtype=torch.float64, requires_grad=True)
        self._trained = [self.weights]
        if n_multipliers:
            self._trained.append(self.multipliers)
        self.optimizer = torch.optim.Adam(self._trained, settings.learning_rate)

        # Noise.
        by_size = Magnitude().estimate(problem).values.split(self.counts)
        self.ranks = [row.argsort(stable=True).argsort() for row in by_size]
        self.generator = torch.Generator().manual_seed(settings.seed)

        # Steps, examples in the block that was begun, and examples of all passes.
        self.step = self.filled = self.n_read = 0
        # Of the block, all [units]: its noise, its gates, and the slopes of its losses in them.
        self.noise = self.drawn = self.slopes = torch.zeros_like(self.sizes)
        # Slopes of the block that are on the accelerator yet.
        self.waiting: list[Tensor] = []
        self.into = problem.resumable(training=self)

    def run_pass(self) -> None:
        """Train on one pass over the data, or on its beginning where no more steps are wanted."""
        for number, batch in self.problem.passes(self.distribution.name, self.into):
            # The first pass is read to its end, for the digest of the data.
            if self.problem.examples and self.step == self.settings.steps:
                break
            first, size = 0, batch_size(batch)
            # A batch may end one block and begin others.
            while first < size and self.step < self.settings.steps:
                last = min(size, first + self.settings.block - self.filled)
                self.add(number, batch, slice(first, last))
                first = last
                if self.filled == self.settings.block:
                    self.update()
            self.n_read += first
        # A pass that was not read to its end has made no checks.
        self.problem.run_checks()
        if self.filled and not self.into.behind:
            self.update()

    def add(self, number: int, batch: Any, some: slice) -> None:
        """Add the slopes of some examples' losses in the gates of this block."""
        if not self.filled:
            noise = self.distribution.noise(len(self.sizes), self.generator).split(self.counts)
            self.noise = torch.cat([row[rank] for row, rank in zip(noise, self.ranks, strict=True)])
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
        """Add up the slopes of this block on the CPU.

        This is the only wait per block: the next gates depend on the slopes.
        """
        for slopes in in_main_memory(self.waiting):
            self.slopes += slopes.double()
        self.waiting = []

    def draw(self) -> None:
        """Make the block's gates of its noise."""
        self.drawn = self.distribution.sample(self.weights, self.noise, self.sizes, self.step)

    def placed(self) -> dict[str, Tensor]:
        """The drawn gates on the model's devices, ``[heads]`` per site, each with a graph of its
        own."""
        gates = {}
        drawn = self.drawn.detach().split(self.counts)
        for b, of_site in zip(self.problem.bound, drawn, strict=True):
            of_heads = of_site[unit_of_heads(b)]
            gate = sent(of_heads, device_of(b.module), gate_dtype(b))
            gates[b.site.name] = gate.requires_grad_()
        return gates

    def update(self) -> None:
        """Make one step of Adam on the mean loss of the block and the penalty."""
        self.collect()
        multipliers = self.multipliers if len(self.multipliers) else None
        penalty = self.distribution.penalty(self.weights, multipliers, self.sizes, self.step)
        # Its gradient in the drawn gates is that of the mean loss.
        linear = (self.drawn * self.slopes).sum() / self.filled
        self.optimizer.zero_grad()
        (linear + penalty).backward()
        self.optimizer.step()
        self.step += 1
        self.filled = 0

    def parts(self) -> dict[str, Tensor]:
        """The state of the training, to be resumed; the names are those in a call's folder."""
        self.collect()
        state = {
            "counts": torch.tensor([self.step, self.filled, self.n_read]),
            "dealt": self.noise,
            "slopes": self.slopes,
            "draws": self.generator.get_state(),
        }
        for number, parameter in enumerate(self._trained):
            state[f"trained {number}"] = parameter.detach()
            if parameter in self.optimizer.state:
                for name, x in self.optimizer.state[parameter].items():
                    state[f"adam {number} {name}"] = x
        return state

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Resume from a state, the only one of ``parts``."""
        (state,) = parts
        self.step, self.filled, self.n_read = state["counts"].tolist()
        self.noise, self.slopes = state["dealt"], state["slopes"]
        self.generator.set_state(state["draws"])
        for number, parameter in enumerate(self._trained):
            parameter.data.copy_(state[f"trained {number}"])
            prefix = f"adam {number} "
            adam = {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}
            if adam:
                self.optimizer.state[parameter] = adam
        if self.filled:
            self.draw()

    def estimate(self) -> Estimate:
        """The weights of the gates, with notes."""
        # Passes over the same data count its examples once.
        weights = self.weights.detach()
        notes = self.distribution.notes(weights, self.sizes, self.step)
        if any(b.layout.is_feed_forward for b in self.problem.bound):
            notes += ("Neurons count as heads here, one each.",)
        note = "No standard error: the gates were trained together, not averaged over examples."
        return Estimate(
            weights,
            n_examples=min(self.n_read, self.problem.examples),
            seed=self.settings.seed,
            notes=(*notes, note),
            bundling="mean",
        )
