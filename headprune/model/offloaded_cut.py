"""Stores shorter tensors where accelerate keeps offloaded ones: in its dictionary or its folder.

Nothing that is there is changed: hooks get new mappings with the new tensors, and a folder gets new
files next to the old ones. So another model that shares them, such as a copy that is the teacher,
stays whole, and the old mappings undo a cut.
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
from headprune.model.offloaded import OffloadedTensor, offloaders, own_tensors, source_of
from headprune.model.transfers import sent

#: A tensor of a module, the dimension that is cut, and the kept positions along it.
Shortening: TypeAlias = tuple[OffloadedTensor, int, Sequence[int]]
#: A mapping that a hook reads its module's tensors from.
WeightsMap: TypeAlias = Mapping[str, Tensor]

_HINT = (
    "Load the model into memory, or offload it again with accelerate's own functions, and cut it"
    " then."
)


@dataclass
class ShortenedWeights:
    """Shorter tensors that are stored and not yet used.

    Args:
        maps: Hooks with their new mappings.
        files: Files that were written.
    """

    maps: list[tuple[Any, WeightsMap]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def install_(self) -> list[tuple[Any, WeightsMap]]:
        """Give the hooks their new mappings; return the old ones."""
        before = [(hook, hook.weights_map) for hook, _ in self.maps]
        for hook, new in self.maps:
            hook.weights_map = new
        return before

    def discard(self) -> None:
        """Delete the files that were written."""
        for file in self.files:
            with contextlib.suppress(OSError):
                file.unlink()


def store_shortened(model: nn.Module, shortenings: Iterable[Shortening]) -> ShortenedWeights:
    """Store shorter tensors, one after the other; change neither the model nor the old tensors.

    Raises:
        UnsupportedModel: tensors that are offloaded in another way than by ``accelerate``, on disk
            without a folder, or shared with others by accelerate's own bookkeeping.
    """
    stored, new = ShortenedWeights(), _NewWeights()
    try:
        for away, dimension, rows in shortenings:
            for hook in offloaders(away.module):
                new.add(hook, away, dimension, rows, stored.files)
        stored.maps = new.maps(model)
    except BaseException:
        stored.discard()
        raise
    return stored


def bring_home_(module: nn.Module) -> None:
    """Keep the tensors of one module on the device where it runs; after a cut they are few."""
    hooks = offloaders(module)
    if not hooks:
        return
    for name, tensor in own_tensors(module).items():
        if not tensor.is_meta:
            continue
        numbers = OffloadedTensor(module, name, tensor).read()
        here = numbers.to(hooks[-1].execution_device, copy=True)
        if isinstance(tensor, nn.Parameter):
            module._parameters[name] = nn.Parameter(here, requires_grad=tensor.requires_grad)
        else:
            module._buffers[name] = here
    # A copy of the hook: the module may share its hook with others.
    hook = copy.copy(hooks[-1])
    hook.offload = False
    module.__dict__["_hf_hook"] = hook


def check_fetched(
    model: nn.Module,
    before: Iterable[tuple[nn.Module, Mapping[str, Mapping[str, Any]]]],
    done: Iterable[Shortening],
) -> None:
    """Check after a cut that accelerate will fetch the tensors that every module has.

    Args:
        model: The model after the cut.
        before: Its modules with their mappings before.
        done: The cuts of offloaded tensors that were stored.

    Raises:
        UnsupportedModel: a layout whose cut makes or changes offloaded tensors in another way.
    """
    stored = {(id(away.module), away.name) for away, _, _ in done}
    old = {id(module): {**homes["_parameters"], **homes["_buffers"]} for module, homes in before}
    for name, module in model.named_modules():
        held = old.get(id(module), {})
        for leaf, tensor in own_tensors(module).items():
            is_fetched = tensor.is_meta or (leaf in module._parameters and offloaders(module))
            if not is_fetched or (id(module), leaf) in stored:
                continue
            was = held.get(leaf)
            if was is None or was.shape != tensor.shape or was.is_meta != tensor.is_meta:
                must = "cut by rows and columns only, because it is offloaded"
                raise UnsupportedModel(f"{name}.{leaf}", must, "a new or changed tensor", _HINT)


@dataclass
class _NewWeights:
    """New tensors, by the mapping that they are for.

    Args:
        sources: Mappings of accelerate, by their ``id``.
        memory: New tensors in memory, by ``id`` of the mapping and by name.
        disk: New entries of the index, by ``id`` of the mapping and by name.
        made: New tensors and entries by what they were made of, so that shared ones stay shared.
    """

    sources: dict[int, Any] = field(default_factory=dict)
    memory: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    disk: dict[int, dict[str, Any]] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)

    def add(
        self,
        hook: Any,
        away: OffloadedTensor,
        dimension: int,
        rows: Sequence[int],
        files: list[Path],
    ) -> None:
        """Make one shorter tensor, and write it if the old one is on disk."""
        where = f"{type(away.module).__name__}.{away.name}"
        source, key = source_of(hook, away.name)
        in_memory = _tensors_in_memory(source, where)
        self.sources[id(source)] = source
        addresses = getattr(hook, "tied_params_map", None) or {}
        is_tied = key in in_memory and in_memory[key].data_ptr() in addresses
        if is_tied or away.name in getattr(hook, "tied_params_names", ()):
            must, got = "a parameter of its own", "one that accelerate offloads as tied"
            raise UnsupportedModel(where, must, got, _HINT)

        # 1. Tensors in memory. The same place and cut give one new tensor, so sharing survives.
        place: tuple[Any, ...]
        cut = (dimension, tuple(rows), away.dtype)
        if key in in_memory:
            old = in_memory[key]
            place = ("key", key, *cut)  # tensors without numbers are all at one address
            if old.numel():
                place = ("memory", old.data_ptr(), old.shape, old.stride(), *cut)
            if place not in self.made:
                new = _shorter(old.detach().to(away.dtype), dimension, rows)
                self.made[place] = _at_a_new_address(addresses, new)
            self.memory.setdefault(id(source), {})[key] = self.made[place]
            return

        # 2. Tensors on disk, told apart by file and name.
        entry = source.index[key]
        file = str(entry.get("safetensors_file") or key)
        place = ("file", file, entry.get("weight_name", key), *cut)
        if place not in self.made:
            new = _shorter(away.read(), dimension, rows)
            self.made[place] = _written(new, key, source.save_folder, where, files)
        self.disk.setdefault(id(source), {})[key] = self.made[place]

    def maps(self, model: nn.Module) -> list[tuple[Any, WeightsMap]]:
        """New mappings, for every hook whose mapping has a replaced tensor."""
        from accelerate.utils import PrefixedDataset

        new = {number: self._renewed(number) for number in self.sources}
        maps: list[tuple[Any, WeightsMap]] = []
        for module in model.modules():
            for hook in offloaders(module):
                source, prefix = source_of(hook, "")
                if id(source) in new:
                    mapping = new[id(source)]
                    maps.append((hook, PrefixedDataset(mapping, prefix) if prefix else mapping))
        return maps

    def _renewed(self, number: int) -> Any:
        from accelerate.utils import OffloadedWeightsLoader

        # New tensors and entries take the place of old ones of the same name.
        source = self.sources[number]
        memory = self.memory.get(number, {})
        disk = self.disk.get(number, {})
        if isinstance(source, dict):
            return {**source, **memory}
        settings = {}
        if getattr(source, "device", None) is not None:
            settings["device"] = source.device
        state_dict = {**source.state_dict, **memory}
        index = {**source.index, **disk}
        return OffloadedWeightsLoader(state_dict, source.save_folder, index, **settings)


def _tensors_in_memory(source: Any, where: str) -> Mapping[str, Tensor]:
    """The tensors that a mapping of accelerate has in memory.

    Raises:
        UnsupportedModel: a mapping of another kind.
    """
    if isinstance(source, dict):
        return source
    in_memory: Mapping[str, Tensor] | None = getattr(source, "state_dict", None)
    if in_memory is None or not hasattr(source, "index"):
        must = "offloaded to a dictionary or an OffloadedWeightsLoader of accelerate"
        raise UnsupportedModel(where, must, f"a {type(source).__name__}", _HINT)
    return in_memory


def _shorter(tensor: Tensor, dimension: int, rows: Sequence[int]) -> Tensor:
    index = sent(list(rows), tensor.device, torch.long)
    return tensor.index_select(dimension, index)


def _at_a_new_address(addresses: Container[int], tensor: Tensor) -> Tensor:
    """Return a tensor with the same numbers at none of these addresses.

    Accelerate recognises tied parameters by their address: it would take a new tensor at an old
    address for the old parameter.
    """
    copies = [tensor]  # all are kept, so that none of their addresses is used again
    while copies[-1].data_ptr() in addresses:
        copies.append(copies[-1].clone())
    return copies[-1]


def _written(
    tensor: Tensor, key: str, folder: Any, where: str, files: list[Path]
) -> dict[str, str]:
    """Write a tensor into accelerate's folder under a new name; return its entry in the index."""
    from safetensors.torch import save_file

    if folder is None:
        must, got = "offloaded to a folder", "one that is read from its checkpoint"
        hint = "Give from_pretrained an offload_folder=, where the shorter tensors can be kept."
        raise UnsupportedModel(where, must, got, hint)
    path = Path(folder) / f"{key}.{secrets.token_hex(8)}.safetensors"
    with atomic_path(path) as temporary:
        save_file({key: tensor.cpu().contiguous()}, temporary)
    files.append(path)
    return {
        "safetensors_file": str(path),
        "weight_name": key,
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
