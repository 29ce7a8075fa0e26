"""What cannot be gated or cut though its layout fits, because of what the rest of the model does
with it.

Everything here is refused in words before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from headprune.attention.sharded import check_whole
from headprune.core.errors import UnsupportedModel
from headprune.model.matching import lookup
from headprune.model.offloaded import offloaders
from headprune.model.sites import BoundSite, unwrap

#: A site and the path of a projection or a tensor in it.
Part = tuple[BoundSite, str]

#: PEFT's prompt encoders that make keys and values; the others make inputs, which do not depend on
#: heads.
_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")


def check_cut(model: nn.Module, parts: list[Part]) -> None:
    """Checks that these parts of the model's sites can be replaced by smaller ones.

    Raises:
        UnsupportedModel: see ``check_unshared``; a site inside of a wrapper with parameters for its
            heads, a weight that is kept elsewhere, or keys and values that come from outside of the
            attention.
    """
    check_whole(unwrap(model), "one whose weights are whole in this process, to be cut")
    check_unshared(model, parts)
    _check_wrappers(model, parts)
    _check_in_place(model, parts)
    _check_prefixes(model, parts)


def check_unshared(model: nn.Module, parts: Iterable[Part]) -> None:
    """Checks that every part is reached through its site's module alone.

    That module itself may be in several places (ALBERT's layers), and parameters may be shared:
    both are handled where they are cut. A module that sits in two attentions, or in one and outside
    of it, cannot be gated or cut for one of them only.

    Raises:
        UnsupportedModel: a part that is also somewhere else.
    """
    paths: dict[int, list[str]] = {}
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(name)
    for bound, path in parts:
        part = lookup(bound.module, path) if path else bound.module
        if isinstance(part, Tensor):  # changes in the module that holds it
            path = path.rpartition(".")[0]
            part = bound.module.get_submodule(path)
        if not path:
            continue
        own = {f"{home}.{path}".removeprefix(".") for home in paths.get(id(bound.module), ())}
        adapted = isinstance(getattr(part, "base_layer", None), nn.Module)
        for suffix, module in part.named_modules() if adapted else [("", part)]:
            known = {f"{name}.{suffix}".removesuffix(".") for name in own}
            beyond = sorted(set(paths.get(id(module), ())) - known)
            if beyond:
                where = ".".join(filter(None, (bound.site.name, path, suffix)))
                hint = "Give each place a module of its own first, for example by a deep copy."
                raise UnsupportedModel(
                    where, "a module of this attention alone", f"one that is also {beyond}", hint
                )


def _check_wrappers(model: nn.Module, parts: Iterable[Part]) -> None:
    """Refuses an attention that adapters wrap as a whole (PEFT's LoRA on
    ``nn.MultiheadAttention``)."""
    for name in dict.fromkeys(bound.site.name for bound, _ in parts if bound.site.name):
        parent, _, leaf = name.rpartition(".")
        wrapper = unwrap(model).get_submodule(parent)
        extra = [
            n
            for n, _ in wrapper.named_parameters()
            if not n.startswith((f"{leaf}.", "modules_to_save."))
        ]
        if extra and (leaf == "base_layer" or type(wrapper).__module__.startswith("peft.")):
            hint = "Merge the adapters first (PEFT: model.merge_and_unload())."
            raise UnsupportedModel(
                name, "an attention without adapters around it", f"one with {extra}", hint
            )


def _check_in_place(model: nn.Module, parts: Iterable[Part]) -> None:
    """Refuses weights that accelerate fetches for a module further out, in which names of what is
    cut are not its."""
    away: set[int] = set()
    for module in unwrap(model).modules():
        if any(hook.place_submodules for hook in offloaders(module)):
            away |= {
                id(p)
                for part in module.modules()
                if not offloaders(part)
                for p in part.parameters(recurse=False)
            }
    for bound, path in parts if away else ():
        target = lookup(bound.module, path)
        tensors = [target] if isinstance(target, Tensor) else list(target.parameters())
        if any(id(t) in away for t in tensors):
            must, got = (
                "in memory, or fetched by a hook of its own module",
                "weights fetched for a module around it",
            )
            hint = (
                "Load the model without preload_module_classes, or onto one device, and cut it"
                " there."
            )
            raise UnsupportedModel(f"{bound.site.name}.{path}", must, got, hint)


def _check_prefixes(model: nn.Module, parts: Iterable[Part]) -> None:
    """Refuses keys and values that a prompt encoder makes for all heads (PEFT's prefix tuning)."""
    where = next((bound.site.name for bound, _ in parts), None)
    encoded = (
        [m for m in unwrap(model).modules() if "prompt_encoder" in m._modules]
        if where is not None
        else []
    )
    for name, settings in [item for m in encoded for item in getattr(m, "peft_config", {}).items()]:
        if settings.peft_type in _PREFIXES:
            must = "an attention that makes all keys and values itself"
            got = f"prefixes for all heads from the adapter {name!r} ({settings.peft_type.value})"
            raise UnsupportedModel(
                str(where), must, got, "Cut the model before it gets the adapter."
            )
