"""Distributions of random gates that are trained: draws, expectations and the final decision.

No model is needed here. A prune unit (a head, or a KV group with its query heads) has one number,
its weight w, and one gate. ``sizes`` holds the number of heads of each unit, so counts of heads are
sums of sizes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.plan import allowance
from headprune.model.transfers import sent

# Halvings of the interval that has the threshold of `SubsetTopk`; one Newton step follows.
_HALVINGS = 80


class GateDistribution(ABC):
    """One random gate per unit, differentiable in the weights.

    Subclasses are frozen dataclasses of their settings. In all methods ``weights`` is ``[units]``;
    ``sizes`` is ``[units]`` of the same dtype, on the CPU, where heads are counted; ``step`` is the
    number of training forwards before this one.
    """

    name: ClassVar[str]
    has_penalty: ClassVar[bool] = False

    @property
    def n_multipliers(self) -> int:
        """Number of multipliers that the penalty learns."""
        return 0

    @property
    def settings(self) -> FrozenDict:
        """The settings as JSON data."""
        return FrozenDict(asdict(self))  # type: ignore[call-overload]

    @abstractmethod
    def initial(self, n_units: int) -> Tensor:
        """Return the initial weights, ``[units]``."""

    @abstractmethod
    def noise(self, n_units: int, generator: torch.Generator) -> Tensor:
        """Draw the independent noise of one draw of gates: ``[units]``, fp64 on the CPU."""

    @abstractmethod
    def sample(self, weights: Tensor, noise: Tensor, sizes: Tensor, step: int) -> Tensor:
        """Return gates in [0, 1] for training, ``[units]``, with gradients."""

    @abstractmethod
    def gates(self, weights: Tensor, sizes: Tensor) -> Tensor:
        """Return the deterministic gates of evaluation, ``[units]``."""

    @abstractmethod
    def hard(self, weights: Tensor, sizes: Tensor) -> Tensor:
        """Return 1 for kept and 0 for removed units, ``[units]``."""

    @abstractmethod
    def expected_open(self, weights: Tensor, sizes: Tensor) -> Tensor:
        """Return the expected number of open heads."""

    @abstractmethod
    def penalty(
        self, weights: Tensor, multipliers: Tensor | None, sizes: Tensor, step: int
    ) -> Tensor:
        """Return the term to add to the loss.

        Gradient descent on it descends in the weights and ascends in ``multipliers
        [n_multipliers]``.
        """

    @abstractmethod
    def notes(self, weights: Tensor, sizes: Tensor, step: int) -> tuple[str, ...]:
        """Describe the state after ``step`` training forwards in sentences for the user."""


@dataclass(frozen=True)
class HardConcrete(GateDistribution):
    """Gates that are exactly 0 or 1 with positive probability: L0 regularisation of heads.

    ``g = clip(s (upper - lower) + lower, 0, 1)``, where
    ``s = sigmoid((log u - log(1 - u) + w) / temperature)`` and u is uniform. Evaluation uses
    ``s = sigmoid(w)``. A unit is kept if ``P(g > 0) > 1/2``.

    The penalty of ``price`` (lambda) is ``price * sum_h P(g_h > 0)`` over all heads. The penalty of
    ``keep`` is the Lagrangian ``l1 (s - t) + l2 (s - t)^2``: s is the expected fraction of closed
    heads, t the wanted one; l1 and l2 are learned by gradient ascent.

    Source: Louizos et al. 2018, section 2.2; for heads Voita et al. 2019, section 5; Lagrangian:
    Xia et al. 2022 (CoFi), section 3.2.

    Args:
        keep: Expected heads kept: a fraction, or a count.
        price: Cost of an open head in units of the loss, instead.
        warmup: Training forwards in which t, or the price, rises from 0.
        temperature: Of the distribution.
        lower: Start of the stretched interval, below 0.
        upper: Its end, above 1.
        start: Initial weight; 2 is open with probability 0.94.

    >>> half = HardConcrete(keep=0.5)
    >>> float(half.p_open(torch.tensor(0.0)))  # doctest: +ELLIPSIS
    0.688...
    """

    keep: float | int | None = None
    price: float | None = None
    warmup: int = 0
    temperature: float = 0.33
    lower: float = -0.1
    upper: float = 1.1
    start: float = 2.0
    name: ClassVar[str] = "hard_concrete"
    has_penalty: ClassVar[bool] = True
    # Voita's code averages the penalty over the heads of a layer and then over layers; the papers
    # sum over all heads, and so does this class. CoFi's s counts parameters, here it counts heads.
    # s overshoots t before it settles, with small targets for some hundreds of steps.
    # `expected_open` shows where it is.

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.price is None):
            got = f"keep={self.keep}, price={self.price}"
            raise InvalidValue(
                "HardConcrete", "given keep (a target) or price (lambda), one of them", got
            )
        if self.keep is not None:
            _check_keep("HardConcrete.keep", self.keep)
        if self.price is not None and not (math.isfinite(self.price) and self.price > 0):
            raise InvalidValue("HardConcrete.price", "a number above 0", self.price)
        if self.warmup < 0:
            raise InvalidValue(
                "HardConcrete.warmup", "a count of training forwards, >= 0", self.warmup
            )
        if not 0 < self.temperature < math.inf:
            raise InvalidValue("HardConcrete.temperature", "a number above 0", self.temperature)
        if not math.isfinite(self.start):
            raise InvalidValue("HardConcrete.start", "a number", self.start)
        if not (-math.inf < self.lower < 0 and 1 < self.upper < math.inf):
            must = "wider than [0, 1] at both ends, or no gate would ever be 0 or 1"
            raise InvalidValue("HardConcrete(lower=, upper=)", must, (self.lower, self.upper))

    @property
    def n_multipliers(self) -> int:
        return 0 if self.keep is None else 2

    def initial(self, n_units: int) -> Tensor:
        return torch.full((n_units,), self.start)

    def noise(self, n_units: int, generator: torch.Generator) -> Tensor:
        u = _uniform(n_units, generator)
        return u.log() - (-u).log1p()

    def sample(self, weights: Tensor, noise: Tensor, sizes: Tensor, step: int) -> Tensor:
        return self._clipped((noise + weights) / self.temperature)

    def gates(self, weights: Tensor, sizes: Tensor) -> Tensor:
        return self._clipped(weights)

    def p_open(self, weights: Tensor) -> Tensor:
        """Return ``P(g > 0)`` of every unit."""
        # P(g > 0) = sigmoid(w - temperature * log(-lower / upper))
        return torch.sigmoid(weights - self.temperature * math.log(-self.lower / self.upper))

    def hard(self, weights: Tensor, sizes: Tensor) -> Tensor:
        return (self.p_open(weights) > 0.5).to(weights)

    def expected_open(self, weights: Tensor, sizes: Tensor) -> Tensor:
        return (self.p_open(weights) * sent(sizes, weights.device)).sum()

    def penalty(
        self, weights: Tensor, multipliers: Tensor | None, sizes: Tensor, step: int
    ) -> Tensor:
        risen = 1.0  # fraction of the target or price
        if self.warmup:
            risen = min(1.0, step / self.warmup)
        if self.price is not None:
            return risen * self.price * self.expected_open(weights, sizes)
        assert multipliers is not None
        assert self.keep is not None
        # wanted: the fraction of closed heads; over: how much larger than that it is.
        n_heads = int(sizes.sum())
        wanted = risen * (1 - heads_kept("HardConcrete.keep", self.keep, n_heads) / n_heads)
        over = 1 - self.expected_open(weights, sizes) / n_heads - wanted
        # The same values with the opposite gradient, so that gradient descent ascends in them.
        first, second = 2 * multipliers.detach() - multipliers
        price: Tensor = first * over + second * over.square()
        return price

    def notes(self, weights: Tensor, sizes: Tensor, step: int) -> tuple[str, ...]:
        n_heads = int(sizes.sum())
        n_open = float(self.expected_open(weights, sizes))
        n_kept = _count_heads(self.hard(weights, sizes), sizes)
        target = ""
        if self.keep is not None:
            target = f" (asked: {heads_kept('HardConcrete.keep', self.keep, n_heads)})"
        notes = [
            f"{n_open:.1f} of {n_heads} heads open in expectation{target}, {n_kept} with P(open) >"
            " 1/2."
        ]
        if step < self.warmup:
            notes.append(f"Still warming up: {step} of {self.warmup} training forwards.")
        return tuple(notes)

    def _clipped(self, x: Tensor) -> Tensor:
        return (torch.sigmoid(x) * (self.upper - self.lower) + self.lower).clamp(0, 1)


@dataclass(frozen=True)
class SubsetTopk(GateDistribution):
    """Gates that always add up to k heads: soft at first, exactly k open heads in the end.

    ``g = sigmoid((w + e - v) / T)``. e is Gumbel noise; v is the threshold at which the gates add
    up to k; T falls geometrically from ``start`` to ``end``. Evaluation opens the k heads of the
    largest w.

    Source: Li et al. 2021, "Differentiable Subset Pruning of Transformer Heads", section 3.3. They
    draw k times from a softmax without replacement, O(n k). Bisection for v is O(n), with the same
    sum, the same limit for T -> 0, and an exact gradient. Of equal weights the earlier unit is
    kept.

    Args:
        keep: Heads kept: a fraction (rounded down, as in ``Budget``), or a count.
        steps: Training forwards in which T falls.
        start: Initial T.
        end: Final T.
        gumbel: Whether training draws noise; without it the gates follow the weights alone.

    >>> soft = SubsetTopk(keep=2, steps=10)
    >>> w, heads = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.ones(4)
    >>> print(
    ...     f"{float(soft.sample(w, torch.zeros(4), heads, step=0).sum()):.4f}",
    ...     soft.hard(w, heads).tolist(),
    ... )
    2.0000 [1.0, 0.0, 1.0, 0.0]
    """

    keep: float | int
    steps: int
    start: float = 1.0
    end: float = 0.1
    gumbel: bool = True
    name: ClassVar[str] = "subset_topk"

    def __post_init__(self) -> None:
        _check_keep("SubsetTopk.keep", self.keep)
        if self.steps < 1:
            raise InvalidValue("SubsetTopk.steps", "a count of training forwards, >= 1", self.steps)
        if not 0 < self.end <= self.start < math.inf:
            raise InvalidValue(
                "SubsetTopk(start=, end=)", "temperatures, 0 < end <= start", (self.start, self.end)
            )

    def initial(self, n_units: int) -> Tensor:
        return torch.zeros(n_units)

    def noise(self, n_units: int, generator: torch.Generator) -> Tensor:
        # Drawn in both cases, so that the generator moves on alike.
        gumbel = -(-_uniform(n_units, generator).log()).log()
        return gumbel if self.gumbel else torch.zeros_like(gumbel)

    def temperature(self, step: int) -> float:
        """Return T after ``step`` training forwards."""
        temperature: float = self.start * (self.end / self.start) ** min(1.0, step / self.steps)
        return temperature

    def sample(self, weights: Tensor, noise: Tensor, sizes: Tensor, step: int) -> Tensor:
        return soft_subset(weights + noise, self._k(sizes), self.temperature(step), sizes)

    def gates(self, weights: Tensor, sizes: Tensor) -> Tensor:
        return self.hard(weights, sizes)

    def hard(self, weights: Tensor, sizes: Tensor) -> Tensor:
        return top_units(weights, self._k(sizes), sizes)

    def expected_open(self, weights: Tensor, sizes: Tensor) -> Tensor:
        return torch.full((), float(self._k(sizes)), dtype=weights.dtype, device=weights.device)

    def penalty(
        self, weights: Tensor, multipliers: Tensor | None, sizes: Tensor, step: int
    ) -> Tensor:
        return weights.new_zeros(())

    def notes(self, weights: Tensor, sizes: Tensor, step: int) -> tuple[str, ...]:
        kept = _count_heads(self.hard(weights, sizes), sizes)
        now = self.temperature(step)
        notes = [f"{kept} of {int(sizes.sum())} heads kept; final temperature {now:.3g}."]
        if step < self.steps:
            notes.append(f"Still annealing: {step} of {self.steps} training forwards.")
        return tuple(notes)

    def _k(self, sizes: Tensor) -> int:
        return heads_kept("SubsetTopk.keep", self.keep, int(sizes.sum()), set(sizes.int().tolist()))


def soft_subset(weights: Tensor, k: float, temperature: float, sizes: Tensor) -> Tensor:
    """Return ``sigmoid((w - v) / T)`` with v such that the gates of all heads add up to ``k``.

    v is found by bisection, without gradients. A Newton step from there does not change its value
    but gives it the gradient of the implicit function. So the gates' gradients add up to zero.

    Args:
        weights: ``[units]``.
        k: Heads, 0 < k < all of them.
        temperature: T > 0.
        sizes: Heads of each unit, ``[units]``, on the CPU.

    Returns:
        Gates ``[units]``.
    """
    # 1. Bisection on the CPU: an accelerator is slow at many small steps. This waits for it once.
    w = weights.detach().cpu().double()
    n = sizes.cpu().double()
    # So far away all gates are 0, or all 1, up to rounding.
    reach = 40 * temperature + 1e-6 * float(w.abs().max())
    low = float(w.min()) - reach
    high = float(w.max()) + reach
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        gates = torch.sigmoid((w - middle) / temperature)
        if (gates * n).sum() > k:
            low = middle
        else:
            high = middle

    # 2. One Newton step, with gradients.
    v = torch.full((), middle, dtype=weights.dtype, device=weights.device)
    near = torch.sigmoid((w - middle) / temperature)
    slope = float((n * near * (1 - near)).sum()) / temperature  # minus the slope of the sum in v
    # With slope 0 every gate is 0 or 1, and nothing has a gradient.
    if slope > torch.finfo(weights.dtype).eps:
        gates = torch.sigmoid((weights - v) / temperature) * sent(sizes, weights.device)
        v = v + (gates.sum() - k) / slope
    return torch.sigmoid((weights - v) / temperature)


def top_units(weights: Tensor, k: int, sizes: Tensor) -> Tensor:
    """Return 1 for the units of the largest weights that together have at most ``k`` heads.

    Of equal weights the earlier unit comes first.
    """
    kept = torch.zeros_like(weights, device="cpu")
    room = k
    for unit in weights.detach().cpu().argsort(descending=True, stable=True).tolist():
        if sizes[unit] <= room:
            kept[unit] = 1.0
            room -= int(sizes[unit])
    return sent(kept, weights.device)


def _count_heads(hard: Tensor, sizes: Tensor) -> int:
    """Count the heads of kept units."""
    return int((hard.cpu() * sizes).sum())


def heads_kept(
    where: str, keep: float | int, n_heads: int, unit_sizes: set[int] | None = None
) -> int:
    """Turn ``keep`` into a count of heads.

    A fraction is rounded down as in ``Budget``, to whole units where all have one size.

    Args:
        where: The setting, for messages.
        keep: A fraction or a count.
        n_heads: All heads.
        unit_sizes: The different sizes of units.

    Raises:
        InvalidValue: none or all of the heads, or a count that whole units of equal size cannot
            have.
    """
    kept = allowance(keep, n_heads)
    unit_size = 1
    if unit_sizes and len(unit_sizes) == 1:
        (unit_size,) = unit_sizes
    if isinstance(keep, float):
        kept -= kept % unit_size
    if not 0 < kept < n_heads:
        raise InvalidValue(
            where, f"some of the {n_heads} heads, neither none nor all", f"{keep} (that is {kept})"
        )
    if kept % unit_size:
        must = f"a multiple of {unit_size} heads, which are removed together"
        hint = "Or find the sites with policy='balanced' or 'free', where the layout allows it."
        raise InvalidValue(where, must, f"{keep} (that is {kept} of {n_heads})", hint)
    return kept


def _check_keep(where: str, keep: object) -> None:
    if isinstance(keep, float):
        fits = 0 < keep < 1
    else:
        fits = isinstance(keep, int) and not isinstance(keep, bool) and keep > 0
    if not fits:
        must = "a fraction of the heads above 0 and below 1, or a count of them >= 1"
        raise InvalidValue(where, must, keep)


def _uniform(n: int, generator: torch.Generator) -> Tensor:
    """Draw from the open interval (0, 1), because both ends would make the noise infinite."""
    return torch.rand(n, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
