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
from headprune.scoring._gates import by_unit, gate_shapes, gate_slopes, open_gates

#: Slopes above this many roundings are not tested: no flat loss was seen to come near.
_SMALL = 1e4
#: How far gates are moved, in roundings; in types of 16 bits, whose roundings are large.
_MOVE, _MOVE_HALF = 64, 4
#: Slopes that change by this share of themselves are rounding.
_SHARE = 0.75
#: Slopes of the first batch that are so much smaller than the largest of all say nothing about the
#: others.
_UNLIKE = 1e3

_HINT = (
    "The loss has its minimum at the model, as a divergence from the model's own outputs does."
    " Use leave_one_out, integrated_gradients or ggn, which do not read the gradient there, or a"
    " loss of the labels."
)


def refuse_flat(problem: ScoringProblem, largest: Tensor) -> None:
    """Refuse slopes of the loss that are zero but for rounding; call after a whole pass.

    Their size alone does not show it: a loss of 1e-6, of a model that fits its data, has slopes as
    small as the rounding of another loss. So small slopes are compared with themselves. The first
    batch is run with all gates at 1, and again with each moved up or down by a few roundings of the
    model's type. A true slope changes little, by its curvature times that step. Rounding changes
    altogether, and so does the slope of a loss whose minimum is where the model is.

    Args:
        problem: The problem, after a pass.
        largest: The largest absolute slope of the pass, one number.

    Raises:
        InvalidValue: they are zero but for rounding.
    """
    # 1. Large slopes need no test. The comparison is also False for NaN, which others refuse.
    unit = rounding(problem)
    size = float(largest)
    if not size <= _SMALL * unit:
        return

    # 2. Slopes of the first batch, at gates of 1 and beside.
    move = unit * (_MOVE if unit < 1e-4 else _MOVE_HALF)
    try:
        at_one, moved = in_main_memory([_slopes(problem, 0.0), _slopes(problem, move)])
    except Exception:  # nosec B110
        # The loss cannot be asked again, such as one that counts its calls.
        return

    # 3. True slopes stay alike.
    if size > _UNLIKE * float(at_one.abs().max()):
        return
    if float((moved - at_one).norm()) < _SHARE * float(at_one.norm()):
        return
    where = "the gradient of the loss in the gates of the heads"
    got = f"at most {size:.2g}, which changes when the gates move by {move:.2g}"
    raise InvalidValue(where, "larger than rounding errors", got, _HINT)


def rounding(problem: ScoringProblem) -> float:
    """The relative rounding of the narrowest type that the model computes in."""
    return max(torch.finfo(dtype).eps for dtype in types_of(problem))


def types_of(problem: ScoringProblem) -> set[torch.dtype]:
    """The types that the model computes in."""
    types = {p.dtype for p in problem.model.parameters() if p.is_floating_point()}
    if not types:
        types.add(torch.float32)
    device = device_of(problem.model).type
    if torch.is_autocast_enabled(device):
        types.add(torch.get_autocast_dtype(device))
    return types


@torch.inference_mode(False)
@torch.enable_grad()
def _slopes(problem: ScoringProblem, move: float) -> Tensor:
    """``[examples, units]`` of the first batch in fp64, on its device, with every gate moved up or
    down from 1."""
    batch: Any = to_device(problem.reader.first, device_of(problem.model))
    gates = open_gates(problem, gate_shapes(problem, batch))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for gate in gates.values():
            # Up or down by head: a norm may hide a move that all heads make together.
            signs = torch.randint(2, gate.shape[-1:], generator=generator) * 2 - 1
            gate += move * sent(signs, gate.device, gate.dtype)
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        # A loss that draws numbers draws the same ones both times.
        torch.manual_seed(0)
        with gated(problem.model, gates, sites_of(problem.bound)), recomputed(problem.model):
            losses = problem.loss(problem.model, batch)
            slopes = gate_slopes(problem, losses.sum(), gates)
    return in_fp64(by_unit(problem, slopes).detach())
