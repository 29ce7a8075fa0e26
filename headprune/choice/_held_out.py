"""Losses of rows that a refit has not seen: each plan is cut into a copy, refitted on the other
rows, and run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import HeadMask
from headprune.model.cut import cut_
from headprune.model.losses import shaped_losses
from headprune.model.running import batch_size, device_of, some_examples, to_device, undisturbed
from headprune.model.sites import bind, sites_of
from headprune.scoring._base import ScoringProblem

#: Refits a cut model in place on some batches.
Refit = Callable[[nn.Module, list[Any]], object]


class RefitRefused(Exception):
    """A cut model that cannot be refitted, in this or another process; says why."""


class Folds:
    """The rows of a problem, dealt to folds: row i of the data is in fold ``i % folds``, whatever
    the batches.

    Args:
        problem: With the batches.
        count: Folds.

    Raises:
        InvalidValue: fewer rows than folds.
    """

    def __init__(self, problem: ScoringProblem, count: int) -> None:
        self.count = count
        self.rows: list[Tensor] = [torch.empty(0, dtype=torch.int64) for _ in range(count)]
        self.batches: list[list[Any]] = [[] for _ in range(count)]
        first = 0
        for _, batch in problem.passes("rows of folds"):
            size, own = batch_size(batch), to_device(problem.given, torch.device("cpu"))
            for fold in range(count):
                places = torch.arange((fold - first) % count, size, count)
                if len(places):
                    self.batches[fold].append(some_examples(own, places))
                    self.rows[fold] = torch.cat([self.rows[fold], first + places])
            first += size
        self.size = first
        if first < 2 * count:
            hint = "Give more examples, or name a scorer that holds none out: taylor, for example."
            raise InvalidValue(
                "batches", f"with at least {2 * count} examples for {count} folds", first, hint
            )

    def others(self, fold: int) -> list[Any]:
        """The batches of all folds but one."""
        return [
            batch for other in range(self.count) if other != fold for batch in self.batches[other]
        ]


def whole_losses(problem: ScoringProblem, folds: Folds) -> Tensor:
    """``[rows]``, fp64 on the CPU: the losses of the uncut model."""
    found = torch.zeros(folds.size, dtype=torch.float64)
    for fold in range(folds.count):
        found[folds.rows[fold]] = _losses(problem, problem.model, folds.batches[fold])
    return found


def held_out_losses(
    problem: ScoringProblem, folds: Folds, plans: Sequence[HeadMask], refit: Refit | None
) -> Tensor:
    """``[plans, rows]``, fp64 on the CPU: each row's loss under each plan, cut and refitted without
    that row's fold.

    Processes share the plans. The model does not change.

    Raises:
        RefitRefused: in every process, where a refit was refused in one of them.
    """
    disable = None if problem.progress is None else not problem.progress

    def losses(mask: HeadMask) -> Tensor:
        found = torch.zeros(folds.size, dtype=torch.float64)
        for fold in range(folds.count):
            found[folds.rows[fold]] = losses_of_fold(problem, folds, fold, mask, refit)
        return found

    refusals: list[str] = []

    def own() -> dict[str, Tensor]:
        mine = range(problem.workers.rank, len(plans), problem.workers.size)
        bar = tqdm(mine, desc="cut and refit", disable=disable, leave=False)
        try:
            return {str(i): losses(plans[i]) for i in bar}
        except UnsupportedModel as error:
            if refit is None:
                raise
            refusals.append(str(error))
            return {}

    parts = problem.gathered("held-out losses", own)
    # A process without a plan learns of a refusal here, so that all of them go on alike.
    refused = problem.workers.united(refusals)
    if refused:
        raise RefitRefused(refused[0])
    by_plan = {int(i): row for part in parts for i, row in part.items()}
    return torch.stack([by_plan[i] for i in range(len(plans))])


def losses_of_fold(
    problem: ScoringProblem, folds: Folds, fold: int, mask: HeadMask, refit: Refit | None
) -> Tensor:
    """``[rows of the fold]``, fp64 on the CPU: their losses under a plan, cut and refitted on the
    other rows."""
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
    device, found = device_of(problem.model), []
    with undisturbed(model), torch.no_grad():
        for number, batch in enumerate(batches):
            found.append(shaped_losses(problem.loss, model, to_device(batch, device), number))
    return torch.cat(found).double().cpu()
