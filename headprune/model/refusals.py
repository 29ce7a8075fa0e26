"""Refuses sites that cannot be gated or cut because of the rest of the model.

All checks raise an error before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from headprune.attention.sharded import check_whole
from headprune.core.errors import UnsupportedModel
from headprune.model.matching import lookup
from headprune.model.offloaded import offloaders
from headprune.model.sites import BoundSite, unwrap

#: A site and the path of a projection or a tensor in it.
Part = tuple[BoundSite, str]

#: PEFT's prompt encoders that make keys and values. The others make inputs, which do not depend on
#: heads.
_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")


def check_cut(model: nn.Module, parts: list[Part]) -> None:
    """Check that these parts of the model's sites can be replaced by smaller ones.

    Raises:
        UnsupportedModel: see ``check_unshared``; a site inside of a wrapper with parameters for its
            heads, a weight that is offloaded for an outer module, or keys and values that come from
            outside of the attention.
    """
    check_whole(unwrap(model), "one whose weights are whole in this process, to be cut")
    check_unshared(model, parts)
    _check_wrappers(model, parts)
    _check_in_place(model, parts)
    _check_prefixes(model, parts)


def check_unshared(model: nn.Module, parts: Iterable[Part]) -> None:
    """Check that every part is reached through its site's module alone.

    That module itself may be in several places (ALBERT's layers), and parameters may be shared:
    both are handled where they are cut. A module that is in two attentions, or in one and outside
    of it, cannot be gated or cut for one of them only.

    Raises:
        UnsupportedModel: a part that is also somewhere else.
    """
    names: dict[int, list[str]] = {}  # by id of a module
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    for bound, path in parts:
        part = lookup(bound.module, path) if path else bound.module
        if isinstance(part, Tensor):  # the module that holds it changes
            path = path.rpartition(".")[0]
            part = bound.module.get_submodule(path)
        if path:
            _check_one_place(bound, path, part, names)


def _check_one_place(
    bound: BoundSite, path: str, part: nn.Module, names: dict[int, list[str]]
) -> None:
    """Check that a part of a site is in no other place.

    Args:
        bound: The site.
        path: The part's path in the site.
        part: The part.
        names: All names of every module, by its id.
    """
    # Its names through every place of the site's module; any other name is another place.
    homes = names.get(id(bound.module), ())
    own = {f"{home}.{path}".removeprefix(".") for home in homes}
    modules: Iterable[tuple[str, nn.Module]] = [("", part)]
    if isinstance(getattr(part, "base_layer", None), nn.Module):  # with adapters
        modules = part.named_modules()
    for suffix, module in modules:
        known = {f"{name}.{suffix}".removesuffix(".") for name in own}
        beyond = sorted(set(names.get(id(module), ())) - known)
        if beyond:
            where = ".".join(filter(None, (bound.site.name, path, suffix)))
            must = "used in this place only"
            hint = "Give each place a module of its own first, for example by a deep copy."
            raise UnsupportedModel(where, must, f"a module that is also {beyond}", hint)


def _check_wrappers(model: nn.Module, parts: Iterable[Part]) -> None:
    """Refuse an attention that adapters wrap as a whole.

    PEFT's LoRA does so with ``nn.MultiheadAttention``.
    """
    for name in dict.fromkeys(bound.site.name for bound, _ in parts if bound.site.name):
        parent, _, leaf = name.rpartition(".")
        wrapper = unwrap(model).get_submodule(parent)
        if leaf != "base_layer" and not type(wrapper).__module__.startswith("peft."):
            continue
        inner = (f"{leaf}.", "modules_to_save.")
        extra = [n for n, _ in wrapper.named_parameters() if not n.startswith(inner)]
        # Parameters of the wrapper itself: adapters for heads that would be removed.
        if extra:
            must = "an attention without adapters around it"
            hint = "Merge the adapters first (PEFT: model.merge_and_unload())."
            raise UnsupportedModel(name, must, f"one with {extra}", hint)


def _check_in_place(model: nn.Module, parts: Iterable[Part]) -> None:
    """Refuse weights that accelerate fetches for an outer module, which names them otherwise."""
    away: set[int] = set()  # ids of parameters
    for module in unwrap(model).modules():
        # Such a hook fetches all weights inside its module, by their names there.
        if any(hook.place_submodules for hook in offloaders(module)):
            away |= _without_own_hooks(module)
    if not away:
        return
    for bound, path in parts:
        target = lookup(bound.module, path)
        tensors = [target] if isinstance(target, Tensor) else target.parameters()
        if not away.isdisjoint(map(id, tensors)):
            must = "in memory, or fetched by a hook of its own module"
            got = "weights fetched for a module around it"
            hint = (
                "Load the model without preload_module_classes, or onto one device, and cut it"
                " there."
            )
            raise UnsupportedModel(f"{bound.site.name}.{path}", must, got, hint)


def _without_own_hooks(module: nn.Module) -> set[int]:
    """Ids of parameters in a module whose own modules have no offloading hook."""
    ids: set[int] = set()
    for part in module.modules():
        if not offloaders(part):
            ids.update(map(id, part.parameters(recurse=False)))
    return ids


def _check_prefixes(model: nn.Module, parts: list[Part]) -> None:
    """Refuse keys and values that a prompt encoder makes for all heads (PEFT's prefix tuning)."""
    if not parts:
        return
    bound, _ = parts[0]
    for module in unwrap(model).modules():
        if "prompt_encoder" not in module._modules:
            continue
        adapters: dict[str, Any] = getattr(module, "peft_config", {})
        for name, settings in adapters.items():
            kind = settings.peft_type
            if kind in _PREFIXES:
                must = "an attention that makes all keys and values itself"
                got = f"prefixes for all heads from the adapter {name!r} ({kind.value})"
                hint = "Cut the model before it gets the adapter."
                raise UnsupportedModel(bound.site.name, must, got, hint)
