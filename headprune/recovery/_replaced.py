"""Output projections that are being changed, and the biases that they get for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.core.layout import FOLDED_ATTRIBUTE
from headprune.model.cut import Undo
from headprune.model.transfers import in_main_memory
from headprune.model.wrappers import check_unwrapped, retire_wrappers
from headprune.recovery._targets import Target


class Replaced:
    """Projections that are being changed.

    Args:
        model: The model that they are in.
        undo: Puts them back as they were on an error.
        adds_biases: Whether those that have no bias keep the one that they get.
    """

    def __init__(self, model: nn.Module, undo: Undo, adds_biases: bool) -> None:
        self._model, self._undo, self._adds_biases = model, undo, adds_biases
        self._parameters: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self._kept: set[int] = set()
        self._finite: list[
            tuple[str, torch.dtype, Tensor]
        ] = []  # of what was added: name, type, whether it is finite
        self.added = 0

    def __enter__(self) -> Replaced:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for identity, (module, parameters) in self._parameters.items():
            if identity not in self._kept:
                module._parameters.clear()
                module._parameters.update(parameters)

    def open_(self, modules: Iterable[nn.Module]) -> None:
        """Gives projections a bias of zeros where they have none; call it where weights need
        gradients as ever.

        Raises:
            UnsupportedModel: a new bias in a wrapper that would not know of it.
        """
        modules = list(modules)
        if self._adds_biases:
            names = {id(module): name for name, module in self._model.named_modules()}
            new = [
                names.get(id(module), "")
                for module in modules
                if module._parameters.get("bias") is None
            ]
            check_unwrapped(self._model, new, "given new biases before it is wrapped")
        for module in modules:
            if id(module) in self._parameters:
                continue
            self._parameters[id(module)] = (module, dict(module._parameters))
            if module._parameters.get("bias") is None:
                weight = module.get_parameter("weight")
                width = weight.shape[0 if isinstance(module, nn.Linear) else 1]
                module.bias = nn.Parameter(
                    weight.new_zeros(width), requires_grad=weight.requires_grad
                )

    def add_(self, target: Target, name: str, change: Tensor) -> Tensor:
        """Adds ``[in, out]`` to a weight or ``[out]`` to a bias; returns what it came to after
        rounding.

        Whether that is finite is tested here, and read in ``check``.
        """
        parameter = target.ours.get_parameter(name)
        turned = name == "weight" and isinstance(target.ours, nn.Linear)  # Conv1D keeps [in, out]
        old = parameter.detach().clone()
        new = (old.to(change) + (change.T if turned else change)).to(old)
        self._finite.append((f"{target.name}.{name}", old.dtype, torch.isfinite(new).all()))
        self._undo.keep(parameter)
        with torch.no_grad():
            parameter.copy_(new)
        came = new.to(change) - old.to(change)
        return came.T if turned else came

    def check(self) -> None:
        """Raises:
        InvalidValue: something was added that went beyond the range of a type.
        """
        tested, self._finite = self._finite, []
        flags = in_main_memory(flag for _, _, flag in tested)
        for (name, kind, _), fine in zip(tested, flags, strict=True):
            if not bool(fine):
                raise InvalidValue(name, f"within the range of {kind}", "an infinite value")

    def close_(self, targets: Iterable[Target]) -> None:
        """Keeps the biases that were given to these projections, if it adds any, and notes what
        they hold.

        Raises:
            InvalidValue: see ``check``.
        """
        self.check()
        grown = []
        for target in targets if self._adds_biases else ():
            module = target.ours
            self._kept.add(id(module))
            if self._parameters[id(module)][1].get("bias") is None:
                grown.append(module)
            held = {*getattr(module, FOLDED_ATTRIBUTE, ()), *target.gone}
            if held:
                module.__dict__[FOLDED_ATTRIBUTE] = tuple(sorted(held))
        self.added += len(grown)
        retire_wrappers(grown)
