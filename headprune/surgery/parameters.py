"""Which parameter replaced which in a cut, and optimizers that go on with the new parameters."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.cut import Shortened
from headprune.model.transfers import sent

Optimizers: TypeAlias = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

#: A parameter that is no longer in its model; it is freed where nothing else holds it.
Replaced: TypeAlias = "weakref.ref[nn.Parameter]"

#: Optimizers whose state is split over several processes, or lies in buffers that know parameters
#: by their place.
_SPREAD = ("ZeroRedundancyOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedOptimizerWrapper")


@dataclass(frozen=True)
class CutParameter:
    """What a cut did to one parameter, under one of its names.

    Args:
        name: Its name before.
        became: The name of its replacement; None where there is none.
        dimension: The dimension that was shortened; None where none was.
        kept: The kept positions along that dimension, in order.
    """

    name: str
    became: str | None
    dimension: int | None = None
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Succession:
    """The old and the new parameter of a ``CutParameter``; the same where only the name changed."""

    cut: CutParameter
    old: nn.Parameter
    new: nn.Parameter | None

    def of(self, tensor: Tensor, dimension: int) -> Tensor:
        """The kept part of a tensor that has the shortened dimension at this place."""
        return tensor.index_select(dimension, sent(self.cut.kept, tensor.device, torch.long))

    def gradient(self) -> Tensor | None:
        """The new parameter's part of a gradient that waits for a step, if there is one."""
        if self.old.grad is None or self.cut.dimension is None:
            return None
        return self.of(self.old.grad, self.cut.dimension)


def successions(
    before: Mapping[str, nn.Parameter], after: nn.Module, shortened: Iterable[Shortened]
) -> list[Succession]:
    """What became of every parameter that a cut changed.

    Args:
        before: The parameters by name, before the cut; a shared one under each of its names.
        after: The model after it.
        shortened: What the cut did to single tensors.
    """
    cuts = {id(cut.old): cut for cut in shortened}
    old_ids = set(map(id, before.values()))
    now = dict(after.named_parameters(remove_duplicate=False))
    # Reversed, so that of several names of a parameter the first one counts.
    name_of = {id(parameter): name for name, parameter in reversed(now.items())}
    changes = []
    for name, old in before.items():
        new = now.get(name)
        if new is old:
            continue
        change = CutParameter(name, None)
        cut = cuts.get(id(old))
        if id(old) in name_of:
            # The same parameter under another name, as in a list that became shorter.
            new = old
            change = CutParameter(name, name_of[id(old)])
        elif cut is not None and cut.new is not None:
            became = name if new is cut.new else name_of[id(cut.new)]
            new = cut.new
            change = CutParameter(name, became, cut.dimension, cut.rows)
        elif new is not None and id(new) not in old_ids:
            # A layout made it anew.
            change = CutParameter(name, name)
        else:
            # Removed; in a list another old parameter may have its name now.
            new = None
        changes.append(Succession(change, old, new))
    return changes


def checked(optimizer: Optimizers | None, model: nn.Module) -> list[Any]:
    """The optimizers themselves, out of accelerate's wrappers.

    Raises:
        InvalidValue: no optimizer, or one without a parameter of the model.
        UnsupportedModel: an optimizer that splits its state over processes.
    """
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable)
    given = optimizer if isinstance(optimizer, Iterable) else [optimizer]
    optimizers = list(map(_unwrapped, given))
    ours = set(map(id, model.parameters()))
    for number, one in enumerate(optimizers):
        _check_optimizer(one, f"optimizer[{number}]" if several else "optimizer", ours)
    return optimizers


def _check_optimizer(optimizer: Any, where: str, ours: Set[int]) -> None:
    """Refuse what is no optimizer of parameters with these ids."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidValue(where, "a torch.optim.Optimizer, or several of them", kind)
    if _is_spread(optimizer):
        hint = "Cut the model first, and make its optimizer then."
        raise UnsupportedModel(where, "one whose state is whole in this process", kind, hint)
    if not _hold(optimizer.param_groups, ours):
        hint = (
            "Pass the optimizer that trains this model; one that was made before an earlier cut"
            " has old tensors."
        )
        must = "one of this model's parameters"
        raise InvalidValue(where, must, "one that has none of them", hint)


def _hold(groups: Iterable[Mapping[str, Any]], ids: Set[int]) -> bool:
    """Whether parameter groups hold a parameter with one of these ids."""
    held = chain.from_iterable(group["params"] for group in groups)
    return any(id(parameter) in ids for parameter in held)


def carry_(optimizers: Sequence[Any], changes: Iterable[Succession]) -> list[str]:
    """Give optimizers the new parameters, with their part of the old state and gradient.

    Parameter groups stay the same objects, so that schedules of learning rates go on. Values that
    were reduced over removed rows (factored moments) are kept; state whose shape tells no cut
    starts again from an empty state.

    Returns:
        Notes for the user: whose state began anew, or was kept unchanged.
    """
    # A shared parameter has a change under each of its names: take it once.
    by_old: dict[int, Succession] = {}
    for change in changes:
        if change.new is not change.old:
            by_old[id(change.old)] = change
    changes = list(by_old.values())
    # 1. Cut states and gradients: this may fail, so nothing is changed yet.
    states = [_states(one, changes) for one in optimizers]
    gradients = [change.gradient() for change in changes]
    # 2. The changes.
    notes: list[str] = []
    for one, made in zip(optimizers, states, strict=True):
        _install_(one, changes, made)
        notes += _notes(one, list(made.values()))
        if _is_lbfgs(one) and changes:
            # Its state is one long vector over all parameters, which no cut of one of them fits.
            one._numel_cache = None
            one.state.clear()
            notes.append(f"{type(one).__name__} starts again from an empty state")
    for change, gradient in zip(changes, gradients, strict=True):
        if change.new is not None and gradient is not None:
            change.new.grad = gradient
    return notes


def _is_lbfgs(optimizer: Any) -> bool:
    return hasattr(optimizer, "_numel_cache")


def _states(optimizer: Any, changes: Iterable[Succession]) -> dict[int, _ParameterState]:
    """The state of the old parameters, cut as they were, by their ids; changes nothing."""
    states: dict[int, _ParameterState] = {}
    if not _is_lbfgs(optimizer):
        for change in changes:
            if change.old in optimizer.state:
                states[id(change.old)] = _ParameterState(optimizer.state[change.old], change)
    return states


def _notes(optimizer: Any, states: Sequence[_ParameterState]) -> list[str]:
    """What became of the states of an optimizer, with the first three parameters."""
    lost = [state.name for state in states if state.lost]
    mixed = [state.name for state in states if state.mixed]
    name = type(optimizer).__name__
    notes = []
    if lost:
        notes.append(f"{name} starts again from an empty state for {_first(lost)}")
    if mixed:
        notes.append(
            f"{name} keeps moments that are averages over removed rows, too, for {_first(mixed)}"
        )
    return notes


def _first(names: list[str]) -> str:
    """The first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def watch_optimizers(replaced: Iterable[Replaced]) -> None:
    """Let living optimizers warn at their next step if they hold replaced parameters."""
    ids = set()
    for reference in replaced:
        parameter = reference()
        if parameter is not None:
            ids.add(id(parameter))
    if not ids:
        # Nothing holds such a parameter, so there is no need to look at every living object.
        return
    for one in gc.get_objects():
        # By its type: `isinstance` would run code of objects that stand for others.
        if issubclass(type(one), torch.optim.Optimizer):
            groups = one.__dict__.get("param_groups", ())  # a wrapper has none of its own
            if _hold(groups, ids):
                one.register_step_pre_hook(_warn_of_replaced)


def _warn_of_replaced(optimizer: Any, *arguments: Any) -> None:
    text = (
        f"{type(optimizer).__name__} trains parameters that a cut has replaced, and not the new"
        " ones. Make it after the cut, or give it to prune_(optimizer=)."
    )
    warnings.warn(text, UserWarning, stacklevel=3)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper, which is an optimizer, too."""
    if not isinstance(optimizer, torch.optim.Optimizer) or _is_spread(optimizer):
        return optimizer
    # Wrappers may be nested.
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else _unwrapped(inner)


def _is_spread(optimizer: Any) -> bool:
    return any(kind.__name__ in _SPREAD for kind in type(optimizer).__mro__)


class _ParameterState:
    """An optimizer's state of one parameter, cut as the parameter was.

    Attributes:
        name: The parameter's name before the cut.
        values: The cut state; empty where it is lost.
        lost: Whether some of it cannot be cut, so that all of it starts again from an empty state.
        mixed: Whether some of it is reduced over removed rows.
    """

    def __init__(self, state: Mapping[str, Any], change: Succession) -> None:
        self.name = change.cut.name
        self.mixed = self.lost = False
        self.values: dict[str, Any] = {}
        if change.new is None:
            return
        for key, value in state.items():
            self.values[key] = self._cut(key, value, change)
        if self.lost:
            self.values = {}

    def _cut(self, key: str, value: Any, change: Succession) -> Any:
        # 1. Counts of steps and settings are the same for every row.
        if value is None or isinstance(value, (bool, int, float, str)) or key == "step":
            return value
        # 2. Where a layout made the parameter anew, or a tensor class hides its numbers, no cut
        #    of the state is known.
        dimension = change.cut.dimension
        if dimension is None or type(value) not in (Tensor, nn.Parameter):
            self.lost = True
            return None
        # 3. The part of the kept rows.
        place = _place(key, tuple(value.shape), tuple(change.old.shape), dimension)
        if place is None:
            self.mixed = self.mixed or value.numel() > 1
            return value
        if place < 0 or not value.is_floating_point():
            # 8-bit numbers mean nothing without the scales of their blocks.
            self.lost = True
            return None
        return change.of(value, place)


def _place(key: str, shape: tuple[int, ...], whole: tuple[int, ...], dimension: int) -> int | None:
    """The dimension of a state's tensor that is the parameter's shortened one.

    Args:
        key: The name of the state.
        shape: The shape of its tensor.
        whole: The shape of the parameter before the cut.
        dimension: The dimension that the cut shortened.

    Returns:
        None where the state was reduced over that dimension, -1 where that cannot be known.

    >>> _place("exp_avg", (6, 4), (6, 4), 0), _place("absmax", (3,), (6, 4), 0)
    (0, -1)
    >>> _place("exp_avg_sq_row", (6,), (6, 6), 0), _place("exp_avg_sq_col", (6,), (6, 6), 0)
    (0, None)
    """
    if shape == whole:
        return dimension
    if shape in ((), (1,)):
        return None  # one number for the whole parameter
    # 1. Reduced dimensions that are still there, with length 1.
    if len(shape) == len(whole):
        pairs = zip(shape, whole, strict=True)
        if all(ours in (1, theirs) for ours, theirs in pairs):
            return dimension if shape[dimension] == whole[dimension] else None
    # 2. One dimension is not there.
    missing = _missing_dimension(key, shape, whole)
    if missing is None:
        return -1
    if missing == dimension:
        return None
    return dimension - 1 if missing < dimension else dimension


def _missing_dimension(key: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> int | None:
    """The only dimension without which ``whole`` is ``shape``; None where it cannot be known."""
    missing = [i for i in range(len(whole)) if whole[:i] + whole[i + 1 :] == shape]
    # Dimensions of equal length: the names of Adafactor's factored moments tell which is missing.
    if key.endswith("row") and len(whole) - 1 in missing:
        return len(whole) - 1
    if key.endswith("col") and len(whole) - 2 in missing:
        return len(whole) - 2
    return missing[0] if len(missing) == 1 else None


def _install_(
    optimizer: Any, changes: Iterable[Succession], made: Mapping[int, _ParameterState]
) -> None:
    """Replace the old parameters and their state; a removed one is dropped from its group."""
    new_of = {id(change.old): change.new for change in changes}
    for group in optimizer.param_groups:
        parameters = []
        names = []
        for old, name in zip_longest(group["params"], group.get("param_names", ())):
            new = new_of.get(id(old), old)
            if new is not None:
                parameters.append(new)
                names.append(name)
        if "param_names" in group:
            group["param_names"] = names
        # In place, so that whoever holds the list sees the new parameters.
        group["params"][:] = parameters
    for change in changes:
        if change.old in optimizer.state:
            del optimizer.state[change.old]
            state = made.get(id(change.old))
            if change.new is not None and state is not None and state.values:
                optimizer.state[change.new] = state.values
