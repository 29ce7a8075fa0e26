"""Puts low-rank adapters around projections for a training with PEFT, and merges them at the
end."""

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

#: The setting, in error texts.
_TARGETS = "Finetune.lora_targets"
_EMPTY = "one without inputs or outputs"
#: Name of the adapters inside PEFT.
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
        """Name the adapters that learned nothing.

        B begins at 0, and is still 0 where no gradient came.
        """
        idle = []
        for name in self.targets:
            b = self.model.get_parameter(f"{name}.lora_B.{_NAME}.weight")
            if not bool(b.any()):
                idle.append(name)
        if not idle:
            return ()
        names = ", ".join(idle)
        return (f"No gradient reached the adapters of {names}: they changed nothing.",)


@contextmanager
def adapted(
    model: nn.Module,
    rank: int,
    alpha: float | None,
    targets: tuple[str, ...] | None,
    sites: Iterable[AttentionSite] | None,
) -> Iterator[Adapters]:
    """Add adapters, the only parameters that require a gradient inside; merge them at exit.

    After an error they are dropped. Afterwards every module and parameter is the same object as
    before, with its ``requires_grad``.

    Args:
        model: The model, changed in place.
        rank: Rank of the adapters.
        alpha: Their scale times the rank; None is the rank.
        targets: Names or name endings of projections; None takes every projection of the layers
            with attention.
        sites: The attention sites; None finds them.

    Raises:
        InvalidValue: PEFT is not installed, or the model has adapters already.
        UnknownName: a target that names no module.
        UnsupportedModel: a target that cannot have an adapter, or no layer with attention to look
            in; a wrapper that would not average the adapters' gradients.
    """
    peft = _peft()
    if any(base_of(module) is not module for module in model.modules()):
        must = "one without adapters, for Finetune.lora_rank"
        hint = (
            "Merge them first (PEFT: model.merge_and_unload()), or leave lora_rank out to train"
            " them."
        )
        raise InvalidValue("model", must, "adapters", hint)
    # 1. Where adapters go.
    names = _default(model, sites) if targets is None else _named(model, targets)
    check_unwrapped(model, names, "given adapters before it is wrapped")
    requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        # A pattern, because PEFT would match a list of names as endings.
        target_modules="|".join(map(re.escape, names)),
    )

    # 2. Put them there for the time of the training.
    tuner = None
    try:
        with warnings.catch_warnings():
            # PEFT transposes Conv1D's weights by itself, and warns about it.
            warnings.filterwarnings("ignore", ".*fan_in_fan_out.*", UserWarning)
            tuner = peft.LoraModel(model, {_NAME: config}, _NAME)
        yield Adapters(model, tuner, names)
        # Safe: adapters that are not finite are refused before they are added to a weight.
        tuner.merge_adapter(safe_merge=True)
    finally:
        # 3. Put the original modules back; after a merge they hold the new weights.
        if tuner is not None:
            tuner.unload()
        for parameter, before in requires_grad:
            parameter.requires_grad_(before)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        must, hint = "left out where PEFT is not installed", "Install it: pip install peft."
        raise InvalidValue("Finetune.lora_rank", must, str(error), hint) from error
    return peft


def _default(model: nn.Module, sites: Iterable[AttentionSite] | None) -> tuple[str, ...]:
    """Return every projection in the layers with attention that can have an adapter.

    Inside an attention that is its projections alone. It may have other small linear layers, such
    as the one of WavLM that gates a position bias.
    """
    try:
        bound = bind(model, sites)
        layers = [block.name for block in blocks_of(model, sites)]
    except UnsupportedModel as error:
        must = "given for a model without known attention"
        hint = f"Name the projections: lora_targets=(...). {error.hint}"
        raise UnsupportedModel(_TARGETS, must, error.got, hint) from error
    attentions = [b.site.name for b in bound]
    projections: set[str] = set()
    for b in bound:
        for slab in b.slabs:
            # A model that is an attention itself has the empty name.
            projections.add(f"{b.site.name}.{slab.path}".removeprefix("."))
    names = []
    for name, _ in model.named_modules():
        other = _is_under(name, attentions) and name not in projections
        if _is_under(name, layers) and not other and _reason_against(model, name) is None:
            names.append(name)
    if not names:
        must, hint = (
            "given: no layer with attention has a projection that can have an adapter",
            "Name projections, or leave lora_rank out to train the weights themselves.",
        )
        raise UnsupportedModel(_TARGETS, must, "none", hint)
    return tuple(names)


def _is_under(name: str, parents: Iterable[str]) -> bool:
    """Whether a module is one of these or inside one of these; the empty name is the model."""
    return any(not parent or f"{name}.".startswith(f"{parent}.") for parent in parents)


def _named(model: nn.Module, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the projections with these names or name endings, each once.

    Raises:
        UnknownName: a target that names no module.
        UnsupportedModel: a module that cannot have an adapter.
    """
    names: dict[str, None] = {}
    for target in targets:
        matches = _matches(model, target)
        # A cut may have emptied some of them.
        filled = [name for name in matches if _reason_against(model, name) != _EMPTY]
        for name in filled or matches:
            reason = _reason_against(model, name)
            if reason is not None:
                must = "a projection that an adapter can be put around"
                raise UnsupportedModel(f"{_TARGETS}: {name}", must, reason)
            names[name] = None
    return tuple(names)


def _matches(model: nn.Module, target: str) -> list[str]:
    """Return the modules with this name or name ending."""
    modules = [name for name, _ in model.named_modules() if name]
    matches = [name for name in modules if f".{name}".endswith(f".{target}")]
    if not matches:
        usable = [name for name in modules if _reason_against(model, name) is None]
        endings = {name.rpartition(".")[2] for name in usable}
        hint = did_you_mean(target, endings)
        must = f"names of projections of {type(model).__name__}"
        raise UnknownName(_TARGETS, must, repr(target), hint)
    return matches


def _reason_against(model: nn.Module, name: str) -> str | None:
    """Return why a module cannot have an adapter; None if it can."""
    module = model.get_submodule(name)
    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        return f"a {type(module).__name__}"
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return "a part of torch.nn.MultiheadAttention, which reads its weight past an adapter"
    try:
        n_in, n_out = feature_count(module, "in", name), feature_count(module, "out", name)
    except HeadPruneError as error:
        return str(error.got)
    if not n_in or not n_out:
        return _EMPTY
    return None
