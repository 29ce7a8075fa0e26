"""Changes output projections, and gives them the biases that they need for it."""

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
    """Projections that are being changed; those that are not closed lose their new biases at exit.

    Args:
        model: The model that contains them.
        undo: Restores them after an error.
        adds_biases: Whether projections keep the biases that they get.
    """

    def __init__(self, model: nn.Module, undo: Undo, adds_biases: bool) -> None:
        self.added = 0
        self._model = model
        self._undo = undo
        self._adds_biases = adds_biases
        # By identity of the module: the module and its parameters before.
        self._parameters: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self._closed: set[int] = set()
        # Of every change: the parameter's name and type, and whether it is finite.
        self._finite: list[tuple[str, torch.dtype, Tensor]] = []

    def __enter__(self) -> Replaced:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for identity, (module, parameters) in self._parameters.items():
            if identity not in self._closed:
                module._parameters.clear()
                module._parameters.update(parameters)

    def open_(self, modules: Iterable[nn.Module]) -> None:
        """Give projections without a bias one of zeros.

        Call it outside of ``quiet``: inside, no weight requires a gradient, nor would the bias.

        Raises:
            UnsupportedModel: a new bias in a wrapper that would not know of it.
        """
        modules = list(modules)
        if self._adds_biases:
            names = {id(module): name for name, module in self._model.named_modules()}
            without_bias = [m for m in modules if m._parameters.get("bias") is None]
            parts = [names.get(id(module), "") for module in without_bias]
            check_unwrapped(self._model, parts, "given new biases before it is wrapped")
        for module in modules:
            if id(module) in self._parameters:
                continue
            self._parameters[id(module)] = (module, dict(module._parameters))
            if module._parameters.get("bias") is None:
                weight = module.get_parameter("weight")
                # Conv1D keeps [in, out].
                width = weight.shape[0 if isinstance(module, nn.Linear) else 1]
                bias = weight.new_zeros(width)
                module.bias = nn.Parameter(bias, requires_grad=weight.requires_grad)

    def add_(self, target: Target, name: str, change: Tensor) -> Tensor:
        """Add to a parameter. ``check`` later refuses values that are not finite.

        Args:
            target: The projection.
            name: ``weight`` or ``bias``.
            change: ``[in, out]`` for a weight, ``[out]`` for a bias.

        Returns:
            The change after rounding to the parameter's type, in the shape of ``change``.
        """
        parameter = target.module.get_parameter(name)
        # Conv1D keeps [in, out].
        transposed = name == "weight" and isinstance(target.module, nn.Linear)
        old = parameter.detach().clone()
        new = (old.to(change) + (change.T if transposed else change)).to(old)
        self._finite.append((f"{target.name}.{name}", old.dtype, torch.isfinite(new).all()))
        self._undo.keep(parameter)
        with torch.no_grad():
            parameter.copy_(new)
        rounded = new.to(change) - old.to(change)
        return rounded.T if transposed else rounded

    def check(self) -> None:
        """Refuse changes that went beyond the range of a parameter's type.

        Raises:
            InvalidValue: a parameter is not finite.
        """
        changes, self._finite = self._finite, []
        flags = in_main_memory(flag for _, _, flag in changes)
        for (name, dtype, _), finite in zip(changes, flags, strict=True):
            if not bool(finite):
                raise InvalidValue(name, f"within the range of {dtype}", "an infinite value")

    def close_(self, targets: Iterable[Target]) -> None:
        """Keep the new biases of these projections, and note which heads they stand for.

        Raises:
            InvalidValue: see ``check``.
        """
        self.check()
        if not self._adds_biases:
            return
        grown = []
        for target in targets:
            module = target.module
            self._closed.add(id(module))
            if self._parameters[id(module)][1].get("bias") is None:
                grown.append(module)
            folded = {*getattr(module, FOLDED_ATTRIBUTE, ()), *target.removed}
            if folded:
                module.__dict__[FOLDED_ATTRIBUTE] = tuple(sorted(folded))
        self.added += len(grown)
        retire_wrappers(grown)
