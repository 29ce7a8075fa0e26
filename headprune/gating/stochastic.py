"""Random gates whose distribution is trained: what is drawn, what is expected, and the decision; no
model in sight.

A prune unit (a head, or a KV group with its query heads) has one number, its weight w, and one
gate. ``sizes`` says how many heads each unit has; counts of heads are sums of sizes.
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

#: Halvings of the interval in which the threshold of `SubsetTopk` lies; one Newton step follows.
_HALVINGS = 80


class GateDistribution(ABC):
    """One random gate a unit, differentiable in the weights; subclasses are frozen dataclasses of
    their settings.

    Everywhere: ``weights`` ``[units]``, ``sizes`` ``[units]`` of the same dtype, on the CPU (heads
    are counted there), ``step`` the number of training forwards before this one.
    """

    name: ClassVar[str]
    has_penalty: ClassVar[bool] = False

    @property
    def n_multipliers(self) -> int:
        """How many numbers the penalty learns for itself."""
        return 0

    @property
    def settings(self) -> FrozenDict:
        """The settings as JSON data."""
        return FrozenDict(asdict(self))  # type: ignore[call-overload]

    @abstractmethod
    def initial(self, n_units: int) -> Tensor:
        """Weights ``[units]`` to begin with."""

    @abstractmethod
    def noise(self, n_units: int, generator: torch.Generator) -> Tensor:
        """What a draw of gates takes, ``[units]``, independent, fp64 on the CPU."""

    @abstractmethod
    def sample(self, weights: Tensor, noise: Tensor, sizes: Tensor, step: int) -> Tensor:
        """Gates in [0, 1] for training, ``[units]``, with gradients."""

    @abstractmethod
    def gates(self, weights: Tensor, sizes: Tensor) -> Tensor:
        """The deterministic gates of evaluation, ``[units]``."""

    @abstractmethod
    def hard(self, weights: Tensor, sizes: Tensor) -> Tensor:
        """Which units stay, as 0 and 1, ``[units]``."""

    @abstractmethod
    def expected_open(self, weights: Tensor, sizes: Tensor) -> Tensor:
        """How many heads a draw leaves open on average."""

    @abstractmethod
    def penalty(
        self, weights: Tensor, multipliers: Tensor | None, sizes: Tensor, step: int
    ) -> Tensor:
        """What is added to the loss. ``multipliers`` ``[n_multipliers]`` ascend where the weights
        descend."""

    @abstractmethod
    def told(self, weights: Tensor, sizes: Tensor, step: int) -> tuple[str, ...]:
        """What the user should know of the state after ``step`` training forwards."""


@dataclass(frozen=True)
class HardConcrete(GateDistribution):
    """Gates that are 0 or 1 with a probability above zero and have gradients in between: L0
    regularisation of heads.

    ``g = clip(s (upper - lower) + lower, 0, 1)``,
    ``s = sigmoid((log u - log(1 - u) + w) / temperature)``, u uniform.
    ``P(g > 0) = sigmoid(w - temperature log(-lower / upper))``. Evaluation uses
    ``clip(sigmoid(w) (upper - lower) + lower, 0, 1)``; a unit stays if ``P(g > 0) > 1/2``.

    Source: Louizos et al. 2018, "Learning Sparse Neural Networks through L0 Regularization",
    section 2.2; for heads Voita et al. 2019, "Analyzing Multi-Head Self-Attention", section 5. The
    penalty is one of two:

    - ``price`` (lambda): ``price * sum_h P(g_h > 0)``, a sum over all heads as in the papers;
      Voita's code averages over the heads of a layer and then over layers.
    - ``keep``: ``l1 (s - t) + l2 (s - t)^2``, s the expected share of closed heads, t the wanted
      one, l1 and l2 learned by gradient ascent (Xia et al. 2022, CoFi, section 3.2; there s is a
      share of parameters). s goes past t before it settles, with small targets for some hundreds of
      steps: ``expected_open()`` says where it is.

    Args:
        keep: Heads that stay in expectation: a share, or a count; the Lagrangian.
        price: What an open head costs, in units of the loss, in place of ``keep``.
        warmup: Training forwards in which t, or the price, rises from 0.
        temperature: Of the concrete distribution.
        lower: Where the stretched interval begins, below 0.
        upper: Where it ends, above 1.
        start: Every weight to begin with; 2 is open with probability 0.94.

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
        """``P(g > 0)`` of every unit."""
        return torch.sigmoid(weights - self.temperature * math.log(-self.lower / self.upper))

    def hard(self, weights: Tensor, sizes: Tensor) -> Tensor:
        return (self.p_open(weights) > 0.5).to(weights)

    def expected_open(self, weights: Tensor, sizes: Tensor) -> Tensor:
        return (self.p_open(weights) * sent(sizes, weights.device)).sum()

    def penalty(
        self, weights: Tensor, multipliers: Tensor | None, sizes: Tensor, step: int
    ) -> Tensor:
        risen = min(1.0, step / self.warmup) if self.warmup else 1.0
        if self.price is not None:
            return risen * self.price * self.expected_open(weights, sizes)
        assert multipliers is not None
        assert self.keep is not None
        n_heads = int(sizes.sum())
        wanted = risen * (1 - heads_kept("HardConcrete.keep", self.keep, n_heads) / n_heads)
        over = 1 - self.expected_open(weights, sizes) / n_heads - wanted
        first, second = (
            2 * multipliers.detach() - multipliers
        )  # the value, with the gradient's sign turned: ascent
        price: Tensor = first * over + second * over.square()
        return price

    def told(self, weights: Tensor, sizes: Tensor, step: int) -> tuple[str, ...]:
        n_open, n_hard = (
            float(self.expected_open(weights, sizes)),
            int((self.hard(weights, sizes).cpu() * sizes).sum()),
        )
        n_heads = int(sizes.sum())
        target = (
            ""
            if self.keep is None
            else f" (asked: {heads_kept('HardConcrete.keep', self.keep, n_heads)})"
        )
        notes = [
            f"{n_open:.1f} of {n_heads} heads open in expectation{target}, {n_hard} with P(open) >"
            " 1/2."
        ]
        if step < self.warmup:
            notes.append(f"Still warming up: {step} of {self.warmup} training forwards.")
        return tuple(notes)

    def _clipped(self, x: Tensor) -> Tensor:
        return (torch.sigmoid(x) * (self.upper - self.lower) + self.lower).clamp(0, 1)


@dataclass(frozen=True)
class SubsetTopk(GateDistribution):
    """Gates that always add up to k heads, soft at first and ever harder: a subset of exactly k
    heads in the end.

    ``g = sigmoid((w + e - v) / T)``, e Gumbel noise, v the threshold at which the gates add up to
    k; T falls geometrically from ``start`` to ``end``. Evaluation opens the k heads of the largest
    w, no other.

    Source: Li et al. 2021, "Differentiable Subset Pruning of Transformer Heads", section 3.3. They
    draw k times from a softmax, each time without what was drawn before (O(n k)); v by bisection
    with an exact gradient has the same sum and the same limit for T -> 0 in O(n). Their hard gates
    compare with the k-th weight, so that ties keep fewer; here the earlier unit stays.

    Args:
        keep: Heads that stay: a share (rounded down, as in ``Budget``), or a count.
        steps: Training forwards in which T falls.
        start: T to begin with.
        end: T in the end.
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
        drawn = -(-_uniform(n_units, generator).log()).log()
        return drawn if self.gumbel else torch.zeros_like(drawn)

    def temperature(self, step: int) -> float:
        """T after so many training forwards."""
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

    def told(self, weights: Tensor, sizes: Tensor, step: int) -> tuple[str, ...]:
        kept, now = int((self.hard(weights, sizes).cpu() * sizes).sum()), self.temperature(step)
        notes = [f"{kept} of {int(sizes.sum())} heads stay; final temperature {now:.3g}."]
        if step < self.steps:
            notes.append(f"Still annealing: {step} of {self.steps} training forwards.")
        return tuple(notes)

    def _k(self, sizes: Tensor) -> int:
        return heads_kept("SubsetTopk.keep", self.keep, int(sizes.sum()), set(sizes.int().tolist()))


def soft_subset(weights: Tensor, k: float, temperature: float, sizes: Tensor) -> Tensor:
    """``sigmoid((w - v) / T)`` with v such that the gates, each times its unit's heads, add up to
    ``k``.

    v is found by bisection, without gradients; a Newton step from there changes nothing but gives v
    the gradient of the implicit function, so that the gates' gradients add up to zero.

    Args:
        weights: ``[units]``.
        k: Heads, 0 < k < all of them.
        temperature: T > 0.
        sizes: Heads of each unit, ``[units]``, on the CPU.
    """
    # Many small steps are no work for an accelerator; it is waited for once.
    w, n = weights.detach().cpu().double(), sizes.cpu().double()
    reach = 40 * temperature + 1e-6 * float(
        w.abs().max()
    )  # that far away all gates are 0, or all 1, up to rounding
    low, high = float(w.min()) - reach, float(w.max()) + reach
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        too_many = (torch.sigmoid((w - middle) / temperature) * n).sum() > k
        low, high = (middle, high) if too_many else (low, middle)
    v = torch.full((), middle, dtype=weights.dtype, device=weights.device)
    near = torch.sigmoid((w - middle) / temperature)
    slope = float((n * near * (1 - near)).sum()) / temperature  # minus the slope of the sum in v
    if (
        slope > torch.finfo(weights.dtype).eps
    ):  # else every gate is 0 or 1, and nothing has a gradient
        gates = torch.sigmoid((weights - v) / temperature) * sent(sizes, weights.device)
        v = v + (gates.sum() - k) / slope
    return torch.sigmoid((weights - v) / temperature)


def top_units(weights: Tensor, k: int, sizes: Tensor) -> Tensor:
    """1 for the units of the largest weights that together have at most ``k`` heads; of equals the
    earlier one."""
    kept, left = torch.zeros_like(weights, device="cpu"), k
    for unit in weights.detach().cpu().argsort(descending=True, stable=True).tolist():
        if sizes[unit] <= left:
            kept[unit], left = 1.0, left - int(sizes[unit])
    return sent(kept, weights.device)


def heads_kept(
    where: str, keep: float | int, n_heads: int, unit_sizes: set[int] | None = None
) -> int:
    """``keep`` as a count of heads; a share is rounded down as in ``Budget``, to whole units where
    all are equal.

    Raises:
        InvalidValue: not some of the heads but none or all, or a count that whole units of equal
            size cannot have.
    """
    kept = allowance(keep, n_heads)
    if isinstance(keep, float) and unit_sizes and len(unit_sizes) == 1:
        kept -= kept % max(unit_sizes)
    if not 0 < kept < n_heads:
        raise InvalidValue(
            where, f"some of the {n_heads} heads, neither none nor all", f"{keep} (that is {kept})"
        )
    if unit_sizes and len(unit_sizes) == 1 and kept % max(unit_sizes):
        must = f"a multiple of {max(unit_sizes)} heads, which leave together"
        hint = "Or find the sites with policy='balanced' or 'free', where the layout allows it."
        raise InvalidValue(where, must, f"{keep} (that is {kept} of {n_heads})", hint)
    return kept


def _check_keep(where: str, keep: object) -> None:
    share = isinstance(keep, float) and 0 < keep < 1
    if not share and not (isinstance(keep, int) and not isinstance(keep, bool) and keep > 0):
        raise InvalidValue(
            where, "a share of the heads above 0 and below 1, or a count of them >= 1", keep
        )


def _uniform(n: int, generator: torch.Generator) -> Tensor:
    """In the open interval (0, 1): both ends would make noise infinite."""
    return torch.rand(n, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
