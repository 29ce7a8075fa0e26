"""Puts shorter tensors where accelerate keeps those that are offloaded: in its dictionary, or in
its folder.

Nothing that is there is changed: hooks get mappings of their own with the new tensors, and a folder
gets new files beside the old ones. So another model that shares them, such as a copy that was kept
as the teacher, stays whole, and what a cut has done is undone by the old mappings.
"""

from __future__ import annotations

import contextlib
import copy
import secrets
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.core.errors import UnsupportedModel
from headprune.core.files import atomic_path
from headprune.model.offloaded import Away, offloaders, own_tensors, source_of
from headprune.model.transfers import sent

#: A tensor of a module, the dimension that is cut, and the positions along it that stay.
Shortening: TypeAlias = tuple[Away, int, Sequence[int]]

_HINT = (
    "Load the model into memory, or offload it again with accelerate's own functions, and cut it"
    " then."
)


@dataclass
class Rehomed:
    """Shorter tensors that are kept and not yet used.

    Args:
        maps: Hooks with the mappings that they are to read from.
        files: What was written.
    """

    maps: list[tuple[Any, Mapping[str, Tensor]]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def install_(self) -> list[tuple[Any, Mapping[str, Tensor]]]:
        """Gives the hooks their new mappings; returns the old ones."""
        before = [(hook, hook.weights_map) for hook, _ in self.maps]
        for hook, new in self.maps:
            hook.weights_map = new
        return before

    def discard(self) -> None:
        """Removes what was written."""
        for file in self.files:
            with contextlib.suppress(OSError):
                file.unlink()


def rehomed(model: nn.Module, shortenings: Iterable[Shortening]) -> Rehomed:
    """Keeps the shorter tensors, one after the other, beside those that they come from; nothing is
    changed.

    Raises:
        UnsupportedModel: tensors that are kept in another way than ``accelerate`` does, on disk
            without a folder, or shared with others by accelerate's own bookkeeping.
    """
    done, made = Rehomed(), _Made()
    try:
        for away, dimension, rows in shortenings:
            for hook in offloaders(away.module):
                made.add(hook, away, dimension, rows, done.files)
        done.maps = made.maps(model)
    except BaseException:
        done.discard()
        raise
    return done


def bring_home_(module: nn.Module) -> None:
    """The tensors of one module, few after a cut, stay where it runs from now on."""
    hooks = offloaders(module)
    for name, tensor in own_tensors(module).items() if hooks else ():
        if not tensor.is_meta:
            continue
        here = Away(module, name, tensor).read().to(hooks[-1].execution_device, copy=True)
        if isinstance(tensor, nn.Parameter):
            module._parameters[name] = nn.Parameter(here, requires_grad=tensor.requires_grad)
        else:
            module._buffers[name] = here
    if hooks:
        stays = copy.copy(hooks[-1])
        stays.offload = False
        module.__dict__["_hf_hook"] = stays


def check_fetched(
    model: nn.Module,
    before: Iterable[tuple[nn.Module, Mapping[str, Mapping[str, Any]]]],
    done: Iterable[Shortening],
) -> None:
    """Checks after a cut that accelerate will fetch what every module has.

    Args:
        model: The model after the cut.
        before: Its modules with what they held.
        done: What was put in the place of offloaded tensors.

    Raises:
        UnsupportedModel: a layout whose cut makes or changes offloaded tensors in another way.
    """
    known = {(id(away.module), away.name) for away, _, _ in done}
    old = {id(module): {**homes["_parameters"], **homes["_buffers"]} for module, homes in before}
    for name, module in model.named_modules():
        held = old.get(id(module), {})
        for leaf, tensor in own_tensors(module).items():
            was = held.get(leaf)
            as_before = (
                was is not None and was.shape == tensor.shape and was.is_meta == tensor.is_meta
            )
            fetched = tensor.is_meta or (leaf in module._parameters and bool(offloaders(module)))
            if fetched and not as_before and (id(module), leaf) not in known:
                must = "one whose cut leaves rows and columns away, because it is offloaded"
                raise UnsupportedModel(f"{name}.{leaf}", must, "one that is made anew", _HINT)


@dataclass
class _Made:
    """New tensors by the mapping that they are for, and by what they were made of, so that a shared
    one stays so."""

    sources: dict[int, Any] = field(default_factory=dict)
    memory: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    disk: dict[int, dict[str, Any]] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)

    def add(
        self, hook: Any, away: Away, dimension: int, rows: Sequence[int], files: list[Path]
    ) -> None:
        where = f"{type(away.module).__name__}.{away.name}"
        source, key = source_of(hook, away.name)
        in_memory = source if isinstance(source, dict) else getattr(source, "state_dict", None)
        if in_memory is None or not (isinstance(source, dict) or hasattr(source, "index")):
            must = "offloaded to a dictionary or an OffloadedWeightsLoader of accelerate"
            raise UnsupportedModel(where, must, f"a {type(source).__name__}", _HINT)
        self.sources[id(source)] = source
        cut, addresses = (
            (dimension, tuple(rows), away.dtype),
            getattr(hook, "tied_params_map", None) or {},
        )
        held = in_memory[key].data_ptr() in addresses if key in in_memory else False
        if held or away.name in getattr(hook, "tied_params_names", ()):
            raise UnsupportedModel(
                where, "a parameter of its own", "one that accelerate offloads as tied", _HINT
            )
        if key in in_memory:
            old = in_memory[key]
            place: Any = (
                ("memory", old.data_ptr(), old.shape, old.stride(), *cut)
                if old.numel()
                else ("key", key, *cut)
            )
            if place not in self.known:
                new = _shorter(old.detach().to(away.dtype), dimension, rows)
                self.known[place] = _elsewhere_than(addresses, new)
            self.memory.setdefault(id(source), {})[key] = self.known[place]
            return
        entry = source.index[key]
        place = (
            "file",
            str(entry.get("safetensors_file") or key),
            entry.get("weight_name", key),
            *cut,
        )
        if place not in self.known:
            self.known[place] = _written(
                _shorter(away.read(), dimension, rows), key, source.save_folder, where, files
            )
        self.disk.setdefault(id(source), {})[key] = self.known[place]

    def maps(self, model: nn.Module) -> list[tuple[Any, Mapping[str, Tensor]]]:
        """For every hook that reads from a mapping of which a tensor is replaced, one that has the
        new tensor."""
        from accelerate.utils import PrefixedDataset

        new = {number: self._renewed(number) for number in self.sources}
        found: list[tuple[Any, Mapping[str, Tensor]]] = []
        for hook in [hook for module in model.modules() for hook in offloaders(module)]:
            source, prefix = source_of(hook, "")
            if id(source) in new:
                given = new[id(source)]
                found.append((hook, PrefixedDataset(given, prefix) if prefix else given))
        return found

    def _renewed(self, number: int) -> Any:
        from accelerate.utils import OffloadedWeightsLoader

        source, memory, disk = (
            self.sources[number],
            self.memory.get(number, {}),
            self.disk.get(number, {}),
        )
        if isinstance(source, dict):
            return {**source, **memory}
        settings = {"device": source.device} if getattr(source, "device", None) is not None else {}
        index = {**source.index, **disk}
        return OffloadedWeightsLoader(
            {**source.state_dict, **memory}, source.save_folder, index, **settings
        )


def _shorter(tensor: Tensor, dimension: int, rows: Sequence[int]) -> Tensor:
    index = sent(list(rows), tensor.device, torch.long)
    return tensor.index_select(dimension, index)


def _elsewhere_than(addresses: Container[int], tensor: Tensor) -> Tensor:
    """The same numbers, not at one of these: accelerate would take them for a parameter that was
    there once."""
    held = [tensor]
    while held[-1].data_ptr() in addresses:
        held.append(held[-1].clone())
    return held[-1]


def _written(
    tensor: Tensor, key: str, folder: Any, where: str, files: list[Path]
) -> dict[str, str]:
    """Writes a tensor into accelerate's folder under a new name; returns its entry in the index."""
    from safetensors.torch import save_file

    if folder is None:
        hint = "Give from_pretrained an offload_folder=, where the shorter tensors can be kept."
        raise UnsupportedModel(
            where, "offloaded to a folder", "one that is read from its checkpoint", hint
        )
    path = Path(folder) / f"{key}.{secrets.token_hex(8)}.safetensors"
    with atomic_path(path) as temporary:
        save_file({key: tensor.cpu().contiguous()}, temporary)
    files.append(path)
    return {
        "safetensors_file": str(path),
        "weight_name": key,
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
