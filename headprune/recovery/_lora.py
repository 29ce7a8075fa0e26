"""Low-rank adapters for the length of a training: put around projections with PEFT, merged into
them at the end."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from headprune.attention.linear import base_of, feature_count, is_conv1d
from headprune.core.errors import (
    HeadPruneError,
    InvalidValue,
    UnknownName,
    UnsupportedModel,
    did_you_mean,
)
from headprune.core.heads import AttentionSite
from headprune.model.sites import bind
from headprune.model.wrappers import check_unwrapped
from headprune.recovery._blocks import blocks_of

_TARGETS = "Finetune.lora_targets"
_NAME = "recovery"


@dataclass(frozen=True)
class Adapters:
    """Adapters in a model.

    Args:
        model: The model.
        tuner: PEFT's.
        targets: Qualified names of the projections that have one.
    """

    model: nn.Module
    tuner: Any
    targets: tuple[str, ...]

    @property
    def changed(self) -> tuple[str, ...]:
        """The weights that a merge changes."""
        return tuple(f"{name}.weight" for name in self.targets)

    def notes(self) -> tuple[str, ...]:
        """Adapters that learned nothing: B begins at 0, and stays there where no gradient comes."""
        idle = [
            n
            for n in self.targets
            if not bool(self.model.get_parameter(f"{n}.lora_B.{_NAME}.weight").any())
        ]
        told = f"No gradient reached the adapters of {', '.join(idle)}: they changed nothing."
        return (told,) if idle else ()


@contextmanager
def adapted(
    model: nn.Module,
    rank: int,
    alpha: float | None,
    targets: tuple[str, ...] | None,
    sites: Iterable[AttentionSite] | None,
) -> Iterator[Adapters]:
    """Inside of it only adapters need a gradient; they are merged at the end, or thrown away after
    an error.

    Afterwards every module and parameter is the object that it was, with its ``requires_grad``.

    Args:
        model: The model, changed in place.
        rank: Of the adapters.
        alpha: Their scale times the rank; None is the rank.
        targets: Names or ends of names of projections; None takes every projection of the layers
            with attention.
        sites: Where the heads are; None finds them.

    Raises:
        InvalidValue: PEFT is not installed, or the model has adapters already.
        UnknownName: a target that names no module.
        UnsupportedModel: a target that cannot have an adapter, or no layer with attention to look
            in; a wrapper that would not average the adapters' gradients.
    """
    peft = _peft()
    if any(base_of(module) is not module for module in model.modules()):
        hint = (
            "Merge them first (PEFT: model.merge_and_unload()), or leave lora_rank out to train"
            " them."
        )
        raise InvalidValue(
            "model", "one without adapters, for Finetune.lora_rank", "adapters", hint
        )
    names = _named(model, targets) if targets is not None else _default(model, sites)
    check_unwrapped(model, names, "given adapters before it is wrapped")
    needed = [(p, p.requires_grad) for p in model.parameters()]
    pattern = "|".join(map(re.escape, names))
    config = peft.LoraConfig(
        r=rank, lora_alpha=rank if alpha is None else alpha, target_modules=pattern
    )
    tuner = None
    try:
        with warnings.catch_warnings():
            # PEFT turns Conv1D's weights by itself, and says so
            warnings.filterwarnings("ignore", ".*fan_in_fan_out.*", UserWarning)
            tuner = peft.LoraModel(model, {_NAME: config}, _NAME)
        yield Adapters(model, tuner, names)
        tuner.merge_adapter(safe_merge=True)
    finally:
        if tuner is not None:
            tuner.unload()
        for parameter, before in needed:
            parameter.requires_grad_(before)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        hint = "Install it: pip install peft."
        raise InvalidValue(
            "Finetune.lora_rank", "left out where PEFT is not installed", str(error), hint
        ) from error
    return peft


def _default(model: nn.Module, sites: Iterable[AttentionSite] | None) -> tuple[str, ...]:
    """Every projection of the layers with attention that an adapter can be put around."""
    try:
        bound = bind(model, sites)
        layers = [block.name for block in blocks_of(model, sites)]
    except UnsupportedModel as error:
        hint = f"Name the projections: lora_targets=(...). {error.hint}"
        raise UnsupportedModel(
            _TARGETS, "given for a model without known attention", error.got, hint
        ) from error
    inside = [n for n, _ in model.named_modules() if any(_under(n, layer) for layer in layers)]
    # an attention may have small ones besides its projections: WavLM's that gates a position bias
    within = [n for n in inside if any(_under(n, b.site.name) for b in bound)]
    slabs = {f"{b.site.name}.{slab.path}".removeprefix(".") for b in bound for slab in b.slabs}
    inside = [n for n in inside if n not in within or n in slabs]
    found = tuple(name for name in inside if _reason_against(model, name) is None)
    if not found:
        hint = "Train the weights themselves."
        raise UnsupportedModel(
            _TARGETS, "given, or a model with projections in its layers", "none there", hint
        )
    return found


def _under(name: str, layer: str) -> bool:
    return not layer or name == layer or name.startswith(f"{layer}.")


def _named(model: nn.Module, targets: tuple[str, ...]) -> tuple[str, ...]:
    modules = [name for name, _ in model.named_modules() if name]
    found: list[str] = []
    for target in targets:
        those = [n for n in modules if n == target or n.endswith(f".{target}")]
        if not those:
            hint = did_you_mean(
                target, {n.rpartition(".")[2] for n in modules if _reason_against(model, n) is None}
            )
            raise UnknownName(
                _TARGETS, f"names of projections of {type(model).__name__}", repr(target), hint
            )
        for name in those:
            reason = _reason_against(model, name)
            if reason is not None:
                raise UnsupportedModel(
                    f"{_TARGETS}: {name}", "a projection that an adapter can be put around", reason
                )
        found += those
    return tuple(dict.fromkeys(found))


def _reason_against(model: nn.Module, name: str) -> str | None:
    """Why there cannot be an adapter around a module; None where there can."""
    module = model.get_submodule(name)
    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        return f"a {type(module).__name__}"
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        return "a part of torch.nn.MultiheadAttention, which reads its weight past an adapter"
    try:
        empty = not (feature_count(module, "in", name) and feature_count(module, "out", name))
    except HeadPruneError as error:
        return str(error.got)
    return "one that all heads have left" if empty else None
