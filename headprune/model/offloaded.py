"""Weights that accelerate keeps elsewhere (``device_map``, ``cpu_offload``, ``disk_offload``): on
the meta device between forwards, and fetched by a hook of the very module that holds them when that
module runs."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.kept_heads import weights_of
from headprune.core.errors import UnsupportedModel


def offloaders(module: nn.Module) -> list[Any]:
    """Accelerate's hooks that fetch a module's own tensors; several, where the module is in several
    places."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks: tuple[Any, ...] = getattr(hook, "hooks", (hook,))
    return [h for h in hooks if getattr(h, "offload", False) and h.weights_map is not None]


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module itself, by name."""
    items = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in items if tensor is not None}


@dataclass(frozen=True)
class Away:
    """A tensor that is elsewhere.

    Args:
        module: The module that holds it.
        name: Its name there.
        like: What stands there, on the meta device.
    """

    module: nn.Module
    name: str
    like: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def read(self) -> Tensor:
        """Its numbers, as the module gets them; they may be those in accelerate's keeping, not a
        copy."""
        value: Tensor = offloaders(self.module)[-1].weights_map[self.name]
        return value.detach().to(self.dtype)


def offloaded(model: nn.Module) -> dict[str, Away]:
    """Every tensor of a model that is elsewhere, by its name in the state dict; buffers that are in
    none, too."""
    found = {}
    for home, module in model.named_modules(remove_duplicate=False):
        if offloaders(module):
            for name, tensor in own_tensors(module).items():
                if tensor.is_meta:
                    found[f"{home}.{name}".removeprefix(".")] = Away(module, name, tensor)
    return found


def tied(model: nn.Module, away: Mapping[str, Away]) -> dict[str, str]:
    """By name of an offloaded tensor, the first name of what it is one with; names that come first
    are left out.

    Accelerate forgets what was one parameter. What shares memory or a place in a file still is; so
    are equal tensors of which the model's class says that they are tied (Transformers).
    """
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, tensor in away.items():
        for key in (("object", id(tensor.like)), _place(tensor)):
            if key is not None and (early := first.setdefault(key, name)) != name:
                same.setdefault(name, same.get(early, early))
    declared: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    order = {name: number for number, name in enumerate(away)}
    for pair in declared.items():
        if not all(name in away for name in pair):
            continue
        early, late = sorted((same.get(name, name) for name in pair), key=order.__getitem__)
        if early != late and torch.equal(away[early].read(), away[late].read()):
            same = {name: early if to == late else to for name, to in same.items()} | {late: early}
    return same


def _place(tensor: Away) -> tuple[Any, ...] | None:
    """Where the numbers are: memory, or a tensor of a file; None where that tells nothing."""
    if not tensor.like.numel():  # all tensors without numbers are at one address
        return None
    source, key = source_of(offloaders(tensor.module)[-1], tensor.name)
    memory = source if isinstance(source, dict) else getattr(source, "state_dict", {})
    if key in memory:
        value = memory[key]
        return ("memory", value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
    entry = getattr(source, "index", {}).get(key, {})
    if entry.get("safetensors_file") is None:
        return None
    return ("file", str(entry["safetensors_file"]), entry.get("weight_name", key))


def source_of(hook: Any, name: str) -> tuple[Any, str]:
    """The mapping that a hook reads a module's tensor from, without prefixes, and the tensor's name
    there."""
    from accelerate.utils import PrefixedDataset

    source, key = hook.weights_map, name
    while isinstance(source, PrefixedDataset):
        source, key = source.dataset, f"{source.prefix}{key}"
    return source, key


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict, every one in memory, tied ones shared."""
    state = weights_of(model)
    away = offloaded(model)
    if not away:
        return state
    same = tied(model, away)
    read = {
        name: tensor.read() for name, tensor in away.items() if name in state and name not in same
    }
    return {name: read.get(same.get(name, name), tensor) for name, tensor in state.items()}


def count_parameters(model: nn.Module) -> int:
    """Numbers in a model's parameters; one that several modules share counts once, also where it is
    offloaded."""
    away = offloaded(model)
    again = tied(model, away) if away else {}
    return sum(p.numel() for name, p in model.named_parameters() if name not in again)


def check_in_memory(model: nn.Module, hint: str, known: bool = False) -> None:
    """Refuses weights that have no numbers.

    Args:
        model: The model.
        hint: What to try.
        known: Whether those are fine that a hook of their own module fetches.

    Raises:
        UnsupportedModel: a parameter on the meta device.
    """
    fine: Container[str] = offloaded(model) if known else ()
    elsewhere = next(
        (name for name, p in model.named_parameters() if p.is_meta and name not in fine), None
    )
    if elsewhere is not None:
        must = "one whose weights are in memory" + (
            ", or fetched for each module by a hook of its own" if known else ""
        )
        raise UnsupportedModel("the model", must, f"{elsewhere} on the meta device", hint)


@contextmanager
def fetched(module: nn.Module) -> Iterator[None]:
    """For as long as the block lasts, a module and those in it have their weights, where they
    run."""
    with ExitStack() as stack:
        for part in module.modules():
            if offloaders(part) and any(tensor.is_meta for tensor in own_tensors(part).values()):
                hook: Any = part._hf_hook
                stack.callback(hook.post_forward, part, None)
                hook.pre_forward(part)
        yield


@contextmanager
def sent_back(model: nn.Module) -> Iterator[None]:
    """Afterwards every offloaded tensor is away again, also where an error ended a forward.

    Hooks put a new parameter on the meta device after each forward; the very ones from before take
    their places, with what was asked of them and what they were shared with.
    """
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules() if offloaders(m)]
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            if any(
                not now.is_meta
                for name, now in own_tensors(module).items()
                if _meta(name, parameters, buffers)
            ):
                hook: Any = module._hf_hook
                hook.post_forward(module, None)
            homes: Any = ((module._parameters, parameters), (module._buffers, buffers))
            for home, kept in homes:
                home.update(
                    {
                        name: tensor
                        for name, tensor in kept.items()
                        if tensor is not None and tensor.is_meta
                    }
                )


def _meta(name: str, *homes: dict[str, Any]) -> bool:
    return any(home.get(name) is not None and home[name].is_meta for home in homes)
