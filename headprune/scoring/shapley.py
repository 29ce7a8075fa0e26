"""Each head's fair share of what all heads achieve together, averaged over orders of heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue, check_count, check_one_of
from headprune.scoring._ablation import Replay, byte_count, differences, nothing, unit_rows
from headprune.scoring._averages import averaged, mean_and_error
from headprune.scoring._base import Estimate, Scorer, ScoringProblem

#: Fewer pairs of orders come with a note: their variance is too uncertain for an interval.
_FEW = 8


@dataclass(frozen=True)
class Shapley(Scorer):
    """``phi_h = mean over orders of [v(before h, and h) - v(before h)]``,
    ``v(S) = -mean_i l_i(only S open)``; needs labels.

    Source: Shapley 1953; for heads Held & Yang 2022, "Shapley Head Pruning". The shares add up to
    ``v(all heads) - v(no head)`` exactly, for any number of orders.

    When: each head's contribution is to be explained, with shares that add up to the whole, and any
    number of passes is fine.

    Args:
        method: ``permutation``: drawn orders (Castro et al. 2009), each with its reverse (Mitchell
            et al. 2022), up to n forward passes per order. ``two_sided``: the mean of
            ``leave_one_out`` and ``add_one_in``, exact where v has no interactions of three heads.
        orders: Pairs of an order and its reverse.
        truncation: An order ends once ``|v(all) - v|`` is at most this share of
            ``|v(all) - v(none)|``; its other heads share the rest evenly (Ghorbani & Zou 2019,
            "Data Shapley"); 0 never ends early.
        step: Heads between two such tests.
        seed: Of the orders.
        max_bytes: Approximate bound on the memory for settings that run at once.

    The standard error has two parts, added as squares: over examples (the rows of
    `Estimate.samples`), and over orders.
    """

    method: str = "permutation"
    orders: int = 8
    truncation: float = 0.01
    step: int = 16
    seed: int = 0
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        check_one_of("Shapley.method", self.method, ("permutation", "two_sided"))
        check_count("Shapley.orders", self.orders)
        check_count("Shapley.step", self.step)
        if not 0 <= self.truncation < 1:
            must = "a share, 0 <= truncation < 1"
            raise InvalidValue("Shapley.truncation", must, self.truncation)
        byte_count("Shapley.max_bytes", self.max_bytes)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        problem.keep_batches()
        rows = unit_rows(problem)  # [units, heads], 1 at the unit's heads
        replay = Replay(self.max_bytes)
        every, none = rows.new_ones(rows.shape[1]), rows.new_zeros(rows.shape[1])
        if self.method == "two_sided":
            what = "shapley, heads alone"
            first = -differences(problem, what, rows, none, replay, nothing)
            what = "shapley, heads left out"
            last = differences(problem, what, every - rows, every, replay, nothing)
            return replay.noted(averaged((first + last) / 2))

        # 1. How much each example's loss rises without any head.
        what = "shapley, no head"
        whole = differences(problem, what, none[None], every, replay, nothing)[:, 0]

        # 2. The mean of the shares over pairs of an order and its reverse.
        generator = torch.Generator().manual_seed(self.seed)
        samples = 0.0 * whole[:, None].expand(-1, len(rows))  # [examples, units]
        pairs = []
        for _ in range(self.orders):
            order = torch.randperm(len(rows), generator=generator)
            forwards = self._shares(problem, rows, order, whole, replay)
            backwards = self._shares(problem, rows, order.flip(0), whole, replay)
            pair = (forwards + backwards) / 2
            samples = samples + pair / self.orders
            pairs.append(pair.mean(0))

        estimate = replay.noted(averaged(samples, seed=self.seed))
        return _with_error_of_orders(estimate, torch.stack(pairs))

    def _shares(
        self, problem: ScoringProblem, rows: Tensor, order: Tensor, whole: Tensor, replay: Replay
    ) -> Tensor:
        """``[examples, units]``: what each unit adds when units are opened in this order.

        ``whole`` is each example's loss without heads minus its loss with all.
        """
        every, none = rows.new_ones(rows.shape[1]), rows.new_zeros(rows.shape[1])
        shares = whole.new_zeros(len(whole), len(rows))
        # Each example's loss minus that with all heads; no head is open yet.
        before = whole
        done = 0
        while done < len(order) - 1:
            # 1. Open the next units one by one.
            units = order[done : min(done + self.step, len(order) - 1)]
            opened = rows[order[:done]].sum(0) if done else none
            settings = opened + rows[units].cumsum(0)
            losses = differences(problem, "shapley", settings, every, replay, nothing)
            # 2. Each gets the fall of the loss since the unit before it.
            shares[:, units] = torch.cat([before[:, None], losses[:, :-1]], 1) - losses
            before = losses[:, -1]
            done += len(units)
            if abs(before.mean()) <= self.truncation * abs(whole.mean()):
                break
        # 3. The last units share what remains: the loss with all heads is 0 above itself.
        # Data Shapley gives them 0, so that the shares do not add up.
        last = order[done:]
        shares[:, last] = before[:, None] / len(last)
        return shares


def _with_error_of_orders(estimate: Estimate, pairs: Tensor) -> Estimate:
    """Add the variance over pairs of orders, ``[pairs, units]``, to that over examples."""
    _, of_orders = mean_and_error(pairs)
    of_examples = estimate.standard_errors
    if of_orders is None:
        note = (
            "One pair of orders: the standard error is that over examples alone, not over orders."
        )
        return replace(estimate, notes=(*estimate.notes, note))
    if of_examples is None:
        note = "The standard error is that over orders alone."
        return replace(estimate, standard_errors=of_orders, notes=(*estimate.notes, note))
    both = (of_examples.square() + of_orders.square()).sqrt()
    notes = estimate.notes
    if len(pairs) < _FEW:
        notes += (
            f"Only {len(pairs)} pairs of orders: intervals may be too short. Use orders={_FEW} or"
            " more.",
        )
    return replace(estimate, standard_errors=both, notes=notes)
