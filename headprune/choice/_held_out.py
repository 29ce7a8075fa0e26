"""Losses of held-out rows: each plan is cut into a copy, which is refitted on the other rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.bars import bar
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import HeadMask
from headprune.model.cut import cut_
from headprune.model.losses import shaped_losses
from headprune.model.running import batch_size, device_of, some_examples, to_device, undisturbed
from headprune.model.sites import bind, sites_of
from headprune.scoring._base import ScoringProblem

#: Rows that a fold must have on average.
LEAST_ROWS = 2
#: Refits a cut model in place on some batches.
Refit = Callable[[nn.Module, list[Any]], object]


class RefitRefused(Exception):
    """A cut model that cannot be refitted, in this or another process; says why."""


class Folds:
    """The rows of a problem, divided into folds, whatever the batches.

    Each block of ``count`` consecutive rows is dealt in a random order, one row to each fold. So
    folds have rows of like length where the data is sorted by it, and rows that alternate by class
    do not give folds of one class. Row i always goes to the same of ``count`` folds.

    Args:
        problem: With the batches.
        count: Folds.
        least: Rows that a fold must have on average.

    Raises:
        InvalidValue: fewer rows than that.
    """

    def __init__(self, problem: ScoringProblem, count: int, least: int = LEAST_ROWS) -> None:
        self.count = count
        #: By fold, the numbers of its rows, and its part of each batch, in main memory.
        self.rows: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * count
        self.batches: list[list[Any]] = [[] for _ in range(count)]
        first = 0  # the number of the batch's first row
        folds_of_rows = fold_numbers(count)
        for _, batch in problem.passes("rows of folds"):
            size = batch_size(batch)
            on_cpu = to_device(problem.given, torch.device("cpu"))
            fold_of_row = torch.tensor(list(islice(folds_of_rows, size)))
            for fold in range(count):
                places = (fold_of_row == fold).nonzero().flatten()
                if len(places):
                    self.batches[fold].append(some_examples(on_cpu, places))
                    self.rows[fold] = torch.cat([self.rows[fold], first + places])
            first += size
        self.size = first
        if self.size < least * count:
            must = f"with at least {least * count} examples for {count} folds"
            hint = (
                "Give more examples, or name a scorer that holds out no rows: taylor, for example."
            )
            raise InvalidValue("batches", must, self.size, hint)

    def others(self, fold: int) -> list[Any]:
        """The batches of all folds but one."""
        batches = []
        for other in range(self.count):
            if other != fold:
                batches += self.batches[other]
        return batches


def fold_numbers(count: int) -> Iterator[int]:
    """Yield the fold of row after row, without end; see ``Folds``."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def whole_losses(problem: ScoringProblem, folds: Folds) -> Tensor:
    """``[rows]``, fp64 on the CPU: the losses of the uncut model."""
    losses = torch.zeros(folds.size, dtype=torch.float64)
    for fold in range(folds.count):
        losses[folds.rows[fold]] = _losses(problem, problem.model, folds.batches[fold])
    return losses


def held_out_losses(
    problem: ScoringProblem, folds: Folds, plans: Sequence[HeadMask], refit: Refit | None
) -> Tensor:
    """``[plans, rows]``, fp64 on the CPU: each row's loss under each plan, cut and refitted without
    that row's fold.

    Processes share the plans. The model does not change.

    Raises:
        RefitRefused: in every process, where a refit was refused in one of them.
    """

    def of_one(number: int, item: tuple[int, HeadMask]) -> Tensor:
        fold, mask = item
        return losses_of_fold(problem, folds, fold, mask, refit)

    # A call that resumes does not refit again what it had judged.
    of_fold = problem.cached(of_one)

    def losses(mask: HeadMask) -> Tensor:
        of_rows = torch.zeros(folds.size, dtype=torch.float64)
        for fold in range(folds.count):
            number = _cache_number(mask, folds.count, fold)
            of_rows[folds.rows[fold]] = of_fold(number, (fold, mask))
        return of_rows

    refusals: list[str] = []

    def own_share() -> dict[str, Tensor]:
        mine = range(problem.workers.rank, len(plans), problem.workers.size)
        try:
            # Each plan is judged by one process.
            return {str(i): losses(plans[i]) for i in bar(mine, "cut and refit", problem.progress)}
        except UnsupportedModel as error:
            if refit is None:
                raise
            refusals.append(str(error))
            return {}

    parts = problem.gathered("held-out losses", own_share)
    # A process without a plan learns of a refusal here, so that all of them go on alike.
    refused = problem.workers.united(refusals)
    if refused:
        raise RefitRefused(refused[0])
    by_plan: dict[str, Tensor] = {}
    for part in parts:
        by_plan.update(part)
    return torch.stack([by_plan[str(i)] for i in range(len(plans))])


def _cache_number(mask: HeadMask, n_folds: int, fold: int) -> int:
    """The number of a plan and a fold in the resume cache."""
    # The appended 1 keeps it apart from the numbers of an earlier version, which dealt rows to
    # folds by parity.
    return int(f"{mask.digest}1", 16) * n_folds + fold


def losses_of_fold(
    problem: ScoringProblem, folds: Folds, fold: int, mask: HeadMask, refit: Refit | None
) -> Tensor:
    """``[rows of the fold]``, fp64 on the CPU: their losses under a plan, cut and refitted on the
    other rows."""
    # The problem's model is needed for the other plans.
    try:
        small = copy.deepcopy(problem.model)
    except (RuntimeError, TypeError) as error:
        hint = "auto cuts copies of it; name a scorer that does not: taylor, for example."
        raise UnsupportedModel("the model", "one that can be copied", str(error), hint) from error
    cut_(small, bind(small, sites_of(problem.bound)), mask)
    if refit is not None:
        refit(small, folds.others(fold))
    return _losses(problem, small, folds.batches[fold])


def _losses(problem: ScoringProblem, model: nn.Module, batches: Sequence[Any]) -> Tensor:
    """``[rows]``, fp64 on the CPU: a model's losses of some batches."""
    device = device_of(problem.model)
    losses = []
    with undisturbed(model), torch.no_grad():
        for number, batch in enumerate(batches):
            losses.append(shaped_losses(problem.loss, model, to_device(batch, device), number))
    return torch.cat(losses).double().cpu()
