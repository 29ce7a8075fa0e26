"""Weights that accelerate offloads (``device_map``, ``cpu_offload``, ``disk_offload``).

Between forwards they are on the meta device. A hook of the module that holds them fetches them when
that module runs.
"""

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
    """Accelerate's hooks that fetch a module's own tensors.

    There are several if the module is in several places.
    """
    hook: Any = getattr(module, "_hf_hook", None)
    # A SequentialHook has several.
    hooks: tuple[Any, ...] = getattr(hook, "hooks", (hook,))
    return [h for h in hooks if getattr(h, "offload", False) and h.weights_map is not None]


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module itself, by name."""
    items = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in items if tensor is not None}


@dataclass(frozen=True)
class OffloadedTensor:
    """An offloaded tensor.

    Args:
        module: The module that holds it.
        name: Its name there.
        like: What the module has in its place, on the meta device.
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
        """Its numbers, as the module gets them; they may be accelerate's own, not a copy."""
        # Of several hooks the last one fetches what the module computes with.
        value: Tensor = offloaders(self.module)[-1].weights_map[self.name]
        return value.detach().to(self.dtype)


def offloaded(model: nn.Module) -> dict[str, OffloadedTensor]:
    """List the offloaded tensors of a model, by their names in the state dict.

    Buffers that are in no state dict are listed, too.
    """
    tensors = {}
    for home, module in model.named_modules(remove_duplicate=False):
        if not offloaders(module):
            continue
        for leaf, tensor in own_tensors(module).items():
            if tensor.is_meta:
                tensors[f"{home}.{leaf}".removeprefix(".")] = OffloadedTensor(module, leaf, tensor)
    return tensors


def tied(model: nn.Module, away: Mapping[str, OffloadedTensor]) -> dict[str, str]:
    """Find offloaded tensors that are tied to others.

    Accelerate forgets which names were one parameter. What shares memory or a place in a file still
    is one. So are equal tensors that the model's class declares as tied (Transformers).

    Returns:
        By name of a tensor, the first name of what it is tied to. First names have no entry.
    """
    same = _at_one_place(away)
    declared: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    order = {name: number for number, name in enumerate(away)}
    for one, other in declared.items():
        if one not in away or other not in away:
            continue
        names = [same.get(one, one), same.get(other, other)]
        early, late = sorted(names, key=order.__getitem__)
        # A class may declare what a checkpoint has untied: the numbers decide.
        if early != late and torch.equal(away[early].read(), away[late].read()):
            for name, to in same.items():
                if to == late:
                    same[name] = early
            same[late] = early
    return same


def _at_one_place(away: Mapping[str, OffloadedTensor]) -> dict[str, str]:
    """Tensors that are the same object, or at the same place, as an earlier one, by name."""
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, tensor in away.items():
        for key in (("object", id(tensor.like)), _place(tensor)):
            if key is None:
                continue
            early = first.setdefault(key, name)
            if early != name:
                same.setdefault(name, same.get(early, early))
    return same


def _place(tensor: OffloadedTensor) -> tuple[Any, ...] | None:
    """Where the numbers are: memory, or a tensor of a file; None if that is unknown."""
    if not tensor.like.numel():  # all tensors without numbers are at one address
        return None
    source, key = source_of(offloaders(tensor.module)[-1], tensor.name)
    memory = source if isinstance(source, dict) else getattr(source, "state_dict", {})
    # Offloaded to main memory: a view of the same numbers is the same tensor.
    if key in memory:
        value = memory[key]
        return ("memory", value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
    # Offloaded to disk, or read from the checkpoint's files.
    entry = getattr(source, "index", {}).get(key, {})
    if entry.get("safetensors_file") is None:
        return None
    return ("file", str(entry["safetensors_file"]), entry.get("weight_name", key))


def source_of(hook: Any, name: str) -> tuple[Any, str]:
    """Find the mapping that a hook reads a module's tensor from, and the tensor's name there.

    Accelerate's mappings with prefixes are unwrapped.
    """
    from accelerate.utils import PrefixedDataset

    source, key = hook.weights_map, name
    while isinstance(source, PrefixedDataset):
        source, key = source.dataset, f"{source.prefix}{key}"
    return source, key


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict, all of them in memory; tied ones are shared."""
    state = weights_of(model)
    away = offloaded(model)
    if not away:
        return state
    same = tied(model, away)
    read = {}
    for name, tensor in away.items():
        if name in state and name not in same:
            read[name] = tensor.read()
    return {name: read.get(same.get(name, name), tensor) for name, tensor in state.items()}


def count_parameters(model: nn.Module) -> int:
    """Count the numbers in a model's parameters; shared ones count once, also if offloaded."""
    away = offloaded(model)
    # PyTorch itself skips shared parameters, but not offloaded ones.
    repeated = tied(model, away) if away else {}
    return sum(p.numel() for name, p in model.named_parameters() if name not in repeated)


def check_in_memory(model: nn.Module, hint: str, known: bool = False) -> None:
    """Refuse weights that have no numbers.

    Args:
        model: The model.
        hint: What to try.
        known: Whether weights are accepted that a hook of their own module fetches.

    Raises:
        UnsupportedModel: a parameter on the meta device.
    """
    accepted: Container[str] = offloaded(model) if known else ()
    must = "one whose weights are in memory"
    if known:
        must += ", or fetched for each module by a hook of its own"
    for name, parameter in model.named_parameters():
        if parameter.is_meta and name not in accepted:
            raise UnsupportedModel("the model", must, f"{name} on the meta device", hint)


@contextmanager
def fetched(module: nn.Module) -> Iterator[None]:
    """Fetch the weights of a module and of those in it, for the length of the block."""
    with ExitStack() as stack:
        for part in module.modules():
            if offloaders(part) and _on_meta(own_tensors(part)):
                hook: Any = part._hf_hook
                stack.callback(hook.post_forward, part, None)
                hook.pre_forward(part)
        yield


@contextmanager
def sent_back(model: nn.Module) -> Iterator[None]:
    """Offload every tensor again after the block, also if an error ended a forward.

    Hooks put a new parameter on the meta device after each forward. The parameters from before are
    put back instead, with their settings and with what they are shared with.
    """
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules() if offloaders(m)]
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            _send_back(module, parameters, buffers)


def _send_back(module: Any, parameters: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
    """Offload a module's tensors as they were before.

    Args:
        module: The module.
        parameters: Its parameters before.
        buffers: Its buffers before.
    """
    parameters, buffers = _on_meta(parameters), _on_meta(buffers)
    # An error inside a forward leaves what its hook has fetched.
    for name, tensor in own_tensors(module).items():
        if (name in parameters or name in buffers) and not tensor.is_meta:
            module._hf_hook.post_forward(module, None)
            break
    module._parameters.update(parameters)
    module._buffers.update(buffers)


def _on_meta(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None and x.is_meta}
