"""Which parameter became which in a cut, and the optimizers that go on with the new ones."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.cut import Shortened
from headprune.model.transfers import sent

Optimizers: TypeAlias = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

#: A parameter that is in its model no more; it is gone where nobody else holds it.
Left: TypeAlias = "weakref.ref[nn.Parameter]"

#: Optimizers whose state lies in pieces on several processes, or in buffers that know parameters by
#: their place.
_SPREAD = ("ZeroRedundancyOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedOptimizerWrapper")


@dataclass(frozen=True)
class CutParameter:
    """What a cut did to one parameter, under one of its names.

    Args:
        name: Its name before.
        became: The name of what took its place; None where nothing did.
        dimension: The one along which it was shortened; None where it was not.
        kept: The positions along that dimension that stayed, in order.
    """

    name: str
    became: str | None
    dimension: int | None = None
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Succession:
    """The two parameters of a ``CutParameter``; the old one itself where only its name changed."""

    cut: CutParameter
    old: nn.Parameter
    new: nn.Parameter | None

    def of(self, tensor: Tensor, dimension: int) -> Tensor:
        """The kept part of a tensor that has the shortened dimension at this place."""
        return tensor.index_select(dimension, sent(self.cut.kept, tensor.device, torch.long))

    def gradient(self) -> Tensor | None:
        """The new one's part of the gradient that waits for a step; None where there is none."""
        if self.old.grad is None or self.cut.dimension is None:
            return None
        return self.of(self.old.grad, self.cut.dimension)


def successions(
    before: Mapping[str, nn.Parameter], after: nn.Module, shortened: Iterable[Shortened]
) -> list[Succession]:
    """What became of every parameter that is not as it was.

    Args:
        before: The parameters by name, before the cut; a shared one under each of its names.
        after: The model after it.
        shortened: What the cut did to single tensors.
    """
    ways, known = {id(s.old): s for s in shortened}, {id(old) for old in before.values()}
    now = dict(after.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in reversed(now.items())}
    found = []
    for name, old in before.items():
        way, new = ways.get(id(old)), now.get(name)
        if new is old:
            continue
        if id(old) in names:
            found.append(Succession(CutParameter(name, names[id(old)]), old, old))
        elif way is not None and way.new is not None:
            became = name if new is way.new else names[id(way.new)]
            cut = CutParameter(name, became, way.dimension, way.rows)
            found.append(Succession(cut, old, way.new))
        else:  # gone, also where another took its name, as in a list; or made anew by a layout
            new = None if id(new) in known else new
            found.append(Succession(CutParameter(name, None if new is None else name), old, new))
    return found


def checked(optimizer: Optimizers | None, model: nn.Module) -> list[Any]:
    """The optimizers themselves, out of accelerate's wrappers.

    Raises:
        InvalidValue: no optimizer, or one without a parameter of the model.
        UnsupportedModel: an optimizer that spreads its state over processes.
    """
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable)
    found = [_inner(one) for one in (optimizer if isinstance(optimizer, Iterable) else [optimizer])]
    ours = {id(parameter) for parameter in model.parameters()}
    for number, one in enumerate(found):
        where = f"optimizer[{number}]" if several else "optimizer"
        if not isinstance(one, torch.optim.Optimizer):
            raise InvalidValue(
                where, "a torch.optim.Optimizer, or several of them", type(one).__name__
            )
        if _is_spread(one):
            hint = "Cut the model first, and make its optimizer then."
            raise UnsupportedModel(
                where, "one whose state is whole in this process", type(one).__name__, hint
            )
        if not any(id(p) in ours for group in one.param_groups for p in group["params"]):
            hint = (
                "Pass the optimizer that trains this model; one that was made before an earlier cut"
                " has old tensors."
            )
            raise InvalidValue(
                where, "one of this model's parameters", "one that has none of them", hint
            )
    return found


def carry_(optimizers: Sequence[Any], changes: Iterable[Succession]) -> list[str]:
    """Lets optimizers go on with the new parameters, each with its part of the old one's state and
    gradient.

    Parameter groups stay the same objects, so that schedules of learning rates go on. What was
    reduced over removed rows (factored moments) stays as it is; state that cannot be cut by its
    shape begins anew.

    Returns:
        What a user should know: whose state began anew, or was kept as it was.
    """
    changes = list({id(c.old): c for c in changes if c.new is not c.old}.values())
    states = [_states(one, changes) for one in optimizers]
    grads = [(c.new, c.gradient()) for c in changes]
    notes: list[str] = []
    for one, made in zip(optimizers, states, strict=True):
        _install_(one, changes, made)
        notes += _notes(one, made.values())
        if hasattr(one, "_numel_cache") and changes:  # LBFGS: one long vector of everything
            one._numel_cache = None
            one.state.clear()
            notes.append(f"{type(one).__name__} begins anew")
    for new, grad in grads:
        if new is not None and grad is not None:
            new.grad = grad
    return notes


def _states(optimizer: Any, changes: Iterable[Succession]) -> dict[int, _State]:
    """What it knows of the old parameters, cut as they were; nothing is changed."""
    if hasattr(optimizer, "_numel_cache"):
        return {}
    return {
        id(c.old): _State(optimizer.state[c.old], c) for c in changes if c.old in optimizer.state
    }


def _notes(optimizer: Any, states: Iterable[_State]) -> list[str]:
    states = list(states)
    chosen = {
        "begins anew for": [s.name for s in states if s.lost],
        "keeps moments that are averages over removed rows, too, for": [
            s.name for s in states if s.mixed
        ],
    }
    notes = []
    for text, names in chosen.items():
        more = "" if len(names) <= 3 else f" and {len(names) - 3} more"
        if names:
            notes.append(f"{type(optimizer).__name__} {text} {', '.join(names[:3])}{more}")
    return notes


def watch_optimizers(left: Iterable[Left]) -> None:
    """Lets living optimizers warn in their next step if they hold parameters that a cut replaced.

    They are looked for only where somebody holds such a parameter, for that takes a look at every
    living object.
    """
    held = {id(parameter) for reference in left if (parameter := reference()) is not None}
    living = (
        [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
        if held
        else []
    )
    for one in living:
        groups = one.__dict__.get("param_groups", ())  # a wrapper has none of its own
        if any(id(parameter) in held for group in groups for parameter in group["params"]):
            one.register_step_pre_hook(_warn_of_left)


def _warn_of_left(optimizer: Any, *arguments: Any) -> None:
    hint = "Make it after the cut, or give it to prune_(optimizer=)."
    text = (
        f"{type(optimizer).__name__} trains parameters that a cut has replaced, and not the new"
        f" ones. {hint}"
    )
    warnings.warn(text, UserWarning, stacklevel=3)


def _inner(optimizer: Any) -> Any:
    """Accelerate's wrapper is an optimizer that has one."""
    wraps = isinstance(optimizer, torch.optim.Optimizer) and not _is_spread(optimizer)
    within = getattr(optimizer, "optimizer", None) if wraps else None
    return optimizer if within is None else _inner(within)


def _is_spread(optimizer: Any) -> bool:
    return any(kind.__name__ in _SPREAD for kind in type(optimizer).__mro__)


class _State:
    """What an optimizer knows of one parameter, cut as the parameter was."""

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
        if value is None or isinstance(value, (bool, int, float, str)) or key == "step":
            return value
        dimension = change.cut.dimension
        if dimension is None or type(value) not in (Tensor, nn.Parameter):
            self.lost = True
            return None
        place = _place(key, tuple(value.shape), tuple(change.old.shape), dimension)
        if place is None:
            self.mixed = self.mixed or value.numel() > 1
            return value
        if (
            place < 0 or not value.is_floating_point()
        ):  # 8-bit numbers mean nothing without the scales of their blocks
            self.lost = True
            return None
        return change.of(value, place)


def _place(key: str, shape: tuple[int, ...], whole: tuple[int, ...], dimension: int) -> int | None:
    """The dimension of a state's tensor that is the parameter's shortened one; None where it has
    been reduced, -1 where that cannot be known.

    >>> (
    ...     _place("exp_avg", (6, 4), (6, 4), 0),
    ...     _place("step_size", (), (6, 4), 0),
    ...     _place("absmax", (3,), (6, 4), 0),
    ... )
    (0, None, -1)
    >>> _place("exp_avg_sq_row", (6,), (6, 6), 0), _place("exp_avg_sq_col", (6,), (6, 6), 0)
    (0, None)
    """
    if shape == whole:
        return dimension
    if shape in ((), (1,)):
        return None
    if len(shape) == len(whole) and all(
        ours in (1, theirs) for ours, theirs in zip(shape, whole, strict=True)
    ):
        return dimension if shape[dimension] == whole[dimension] else None
    missing = [i for i in range(len(whole)) if whole[:i] + whole[i + 1 :] == shape]
    named = (
        len(whole) - 1 if key.endswith("row") else len(whole) - 2 if key.endswith("col") else None
    )
    if named in missing:
        missing = [named]
    if len(missing) != 1:
        return -1
    return None if missing[0] == dimension else dimension - (missing[0] < dimension)


def _install_(optimizer: Any, changes: Iterable[Succession], made: Mapping[int, _State]) -> None:
    """Puts the new parameters and their state in place of the old ones; one that left is dropped
    from its group."""
    changed = {id(c.old): c.new for c in changes}
    for group in optimizer.param_groups:
        stays = [changed.get(id(p), p) is not None for p in group["params"]]
        group["params"][:] = [
            changed.get(id(p), p) for p, kept in zip(group["params"], stays, strict=True) if kept
        ]
        if "param_names" in group:
            group["param_names"] = [
                n for n, kept in zip(group["param_names"], stays, strict=True) if kept
            ]
    for change in changes:
        if change.old in optimizer.state:
            del optimizer.state[change.old]
            state = made.get(id(change.old))
            if change.new is not None and state is not None and state.values:
                optimizer.state[change.new] = state.values
