"""Slopes that are nothing but rounding: the loss is flat where the model is, as a divergence from
itself is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.gating.context import gated
from headprune.model.recompute import recomputed
from headprune.model.running import device_of, to_device
from headprune.model.sites import sites_of
from headprune.model.transfers import in_fp64, in_main_memory, sent
from headprune.scoring._base import ScoringProblem

#: Slopes above this many roundings are not looked at again: no flat loss was seen to come near.
_SMALL = 1e4
#: How far gates are moved, in roundings; in types of 16 bits, whose roundings are large.
_MOVE, _MOVE_HALF = 64, 4
#: Slopes that change by this share of themselves there are no slopes.
_SHARE = 0.75
#: Slopes of the first batch that are so much smaller than the largest of all say nothing about the
#: others.
_UNLIKE = 1e3

_HINT = (
    "The loss is flat where the model is, as a divergence from the model's own outputs is. Take a"
    " scorer that does not go by its slope there: leave_one_out, integrated_gradients, or ggn,"
    " which reads the output alone. Or take a loss of the labels."
)


def refuse_flat(problem: ScoringProblem, largest: Tensor) -> None:
    """Refuses slopes of the loss that are zero but for rounding; call after a whole pass.

    No size tells them: a loss of 1e-6, of a model that fits its data, has slopes as small as the
    rounding of another loss. So slopes that are small are compared with themselves. The first batch
    is run with all gates at 1, and again with each moved up or down by a few roundings of the
    model's type. A slope changes little there, by its curvature times that step. Rounding changes
    as a whole, and so does the slope of a loss whose minimum is where the model is.

    Args:
        problem: The problem, after a pass.
        largest: The largest absolute value that was found, one number.

    Raises:
        InvalidValue: they are zero but for rounding.
    """
    unit = rounding(problem)
    size = float(largest)
    if not size <= _SMALL * unit:  # also where it is NaN, which others refuse
        return
    move = unit * (_MOVE if unit < 1e-4 else _MOVE_HALF)
    try:
        there, beside = in_main_memory([_slopes(problem, 0.0), _slopes(problem, move)])
    except Exception:  # a loss that cannot be asked again, such as one that counts its calls  # nosec B110
        return
    if size > _UNLIKE * float(there.abs().max()) or float((beside - there).norm()) < _SHARE * float(
        there.norm()
    ):
        return
    got = f"{size:.2g} at most, and others where the gates move by {move:.2g}"
    raise InvalidValue(
        "the slopes of the loss in the gates of the heads", "larger than rounding", got, _HINT
    )


def rounding(problem: ScoringProblem) -> float:
    """The relative rounding of the narrowest type that the model computes in."""
    return max(torch.finfo(dtype).eps for dtype in types_of(problem))


def types_of(problem: ScoringProblem) -> set[torch.dtype]:
    """The types that the model computes in."""
    types = {p.dtype for p in problem.model.parameters() if p.is_floating_point()} or {
        torch.float32
    }
    device = device_of(problem.model).type
    if torch.is_autocast_enabled(device):
        types.add(torch.get_autocast_dtype(device))
    return types


@torch.inference_mode(False)
@torch.enable_grad()
def _slopes(problem: ScoringProblem, move: float) -> Tensor:
    """``[examples, units]`` of the first batch in fp64, on its device, with every gate moved up or
    down from 1."""
    from headprune.scoring._gradients import (
        by_unit,
        gate_shapes,
        gate_slopes,
        open_gates,
    )  # it imports this file

    batch: Any = to_device(problem.opening, device_of(problem.model))
    gates = open_gates(problem, gate_shapes(problem, batch))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for gate in gates.values():  # up or down by head: a norm may hide what all do together
            signs = torch.randint(2, gate.shape[-1:], generator=generator) * 2 - 1
            gate += move * sent(signs, gate.device, gate.dtype)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)  # a loss that draws numbers draws the same ones both times
        with gated(problem.model, gates, sites_of(problem.bound)), recomputed(problem.model):
            slopes = gate_slopes(problem, problem.loss(problem.model, batch).sum(), gates)
    return in_fp64(by_unit(problem, slopes).detach())
