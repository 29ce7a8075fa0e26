"""Each head's fair share of what all heads achieve together, whatever the order in which they
come."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.scoring._ablation import Replay, byte_count, differences, nothing, unit_rows
from headprune.scoring._averages import averaged, mean_and_error
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, one_of


@dataclass(frozen=True)
class Shapley(Scorer):
    """``phi_h = mean over orders of [v(before h, and h) - v(before h)]``,
    ``v(S) = -mean_i l_i(only S open)``; labels.

    Source: Shapley 1953; for heads Held & Yang 2022, "Shapley Head Pruning". The shares add up to
    ``v(all heads) - v(no head)`` exactly, for any number of orders.

    When: what each head contributes is to be explained, with shares that add up to the whole, and
    passes are no matter.

    Args:
        method: ``permutation``: drawn orders (Castro et al. 2009), each together with its reverse
            (antithetic; Mitchell et al. 2022), up to n forward passes an order. ``two_sided``: the
            mean of ``leave_one_out`` and ``add_one_in``, 2n settings; the Shapley value itself
            where v has no interactions of three heads or more, an estimate without its sum
            otherwise.
        orders: Pairs of an order and its reverse.
        truncation: An order ends early once v is within this part of ``v(all) - v(none)`` from
            v(all), and its last heads share the rest evenly (Ghorbani & Zou 2019, "Data Shapley",
            who give them nothing, which loses the sum); 0 never ends early.
        step: Heads of an order that are evaluated before that is looked at.
        seed: Of the orders.
        max_bytes: Bound on the memory for settings that run at once, about.

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
        one_of("Shapley.method", self.method, ("permutation", "two_sided"))
        if self.orders < 1:
            raise InvalidValue("Shapley.orders", "a count >= 1", self.orders)
        if self.step < 1:
            raise InvalidValue("Shapley.step", "a count >= 1", self.step)
        if not 0 <= self.truncation < 1:
            raise InvalidValue(
                "Shapley.truncation", "a part of the whole, 0 <= truncation < 1", self.truncation
            )
        byte_count("Shapley.max_bytes", self.max_bytes)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        problem.keep()
        rows, replay = unit_rows(problem), Replay(self.max_bytes)
        every, none = rows.new_ones(rows.shape[1]), rows.new_zeros(rows.shape[1])
        if self.method == "two_sided":
            first = -differences(problem, "shapley, heads alone", rows, none, replay, nothing)
            last = differences(
                problem, "shapley, heads left out", every - rows, every, replay, nothing
            )
            samples = (first + last) / 2
            return replay.noted(averaged(samples))
        generator = torch.Generator().manual_seed(self.seed)
        whole = differences(problem, "shapley, no head", none[None], every, replay, nothing)[:, 0]
        samples, pairs = 0.0 * whole[:, None].expand(-1, len(rows)), []
        for _ in range(self.orders):
            order = torch.randperm(len(rows), generator=generator)
            both = [self._shares(problem, rows, o, whole, replay) for o in (order, order.flip(0))]
            pair = (both[0] + both[1]) / 2
            samples = samples + pair / self.orders
            pairs.append(pair.mean(0))
        found = replay.noted(averaged(samples, seed=self.seed))
        _, drawn = mean_and_error(torch.stack(pairs))
        if drawn is None:
            note = (
                "One pair of orders: the standard error is that over examples alone, not over"
                " orders."
            )
            return replace(found, notes=(*found.notes, note))
        if found.standard_errors is None:
            note = "The standard error is that over orders alone."
            return replace(found, standard_errors=drawn, notes=(*found.notes, note))
        return replace(
            found, standard_errors=(found.standard_errors.square() + drawn.square()).sqrt()
        )

    def _shares(
        self, problem: ScoringProblem, rows: Tensor, order: Tensor, whole: Tensor, replay: Replay
    ) -> Tensor:
        """``[examples, units]``: what each unit adds when units are opened in this order.

        ``whole`` is each example's loss without heads minus its loss with all.
        """
        every, none = rows.new_ones(rows.shape[1]), rows.new_zeros(rows.shape[1])
        shares = whole.new_zeros(len(whole), len(rows))
        before, done = (
            whole,
            0,
        )  # each example's loss minus that with all heads; no head is open yet
        while done < len(order) - 1:
            some = order[done : min(done + self.step, len(order) - 1)]
            open_ = (rows[order[:done]].sum(0) if done else none) + rows[some].cumsum(0)
            losses = differences(problem, "shapley", open_, every, replay, nothing)
            shares[:, some] = torch.cat([before[:, None], losses[:, :-1]], 1) - losses
            before, done = losses[:, -1], done + len(some)
            if abs(before.mean()) <= self.truncation * abs(whole.mean()):
                break
        left = order[done:]
        shares[:, left] = before[:, None] / len(left)  # loss with all heads: 0 above itself
        return shares
