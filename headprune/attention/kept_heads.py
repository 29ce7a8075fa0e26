"""Kept heads in a module's state dict, so that weights of other heads are refused on loading.

Two cuts of one size have weights of the same shapes. But the output of a module may depend on more:
on the key/value head that a query head reads, or on slopes or biases for all heads. Such a module
stores its heads in a buffer, so that any code that stores or moves weights handles them too. Where
only the weights matter, the heads are in the metadata of the state dict alone. Then a smaller model
of the same class can load the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention.compatibility import Additive, ScaledDotProduct
from headprune.core.errors import InvalidValue
from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from headprune.core.slabs import MOST_HEADS

#: The buffer ``[2 + heads]``: query and key/value heads before the cut, then the kept heads.
KEPT_HEADS = "headprune_kept"
# A number n is stored as 16 n + 8, because averaging models rounds whole numbers down a little at
# every step.
_SPREAD = 16


def store_heads_(module: nn.Module, in_buffer: bool) -> None:
    """Add the buffer of kept heads to a cut module, or remove it."""
    # Removed first, because the number of heads may have changed.
    module._buffers.pop(KEPT_HEADS, None)
    if in_buffer:
        module.register_buffer(KEPT_HEADS, _stored(_state_of(module), _device_of(module)))


def watch_heads_(module: nn.Module) -> None:
    """Make a module of another library store and check its heads in state dicts."""
    # Once per module: a second cut must not add the hooks again.
    known = [getattr(hook, "hook", None) for hook in module._load_state_dict_pre_hooks.values()]
    if _check_before_load not in known:
        module.register_state_dict_post_hook(_say_after_save)
        module.register_load_state_dict_pre_hook(_check_before_load)


def weights_of(model: nn.Module, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return the state dict without the buffers of kept heads.

    Our folders and fingerprints store the heads themselves.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=keep_vars)
    for name, module in model.named_modules(remove_duplicate=False):
        if KEPT_HEADS in module._buffers:
            state.pop(f"{name}.{KEPT_HEADS}".removeprefix("."), None)
    return state


def say_heads(module: nn.Module, destination: Any, prefix: str) -> None:
    """Add the heads to the metadata of a state dict, which not every file format keeps."""
    metadata: MutableMapping[str, Any] | None = getattr(destination, "_metadata", None)
    if metadata is not None:
        state = _state_of(module)
        noted = [state.n_query_heads, state.n_kv_heads, *state.heads]
        metadata.setdefault(prefix.removesuffix("."), {})[KEPT_HEADS] = noted


def check_heads(
    module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any
) -> None:
    """Compare the stored heads with the module's before any weight is changed.

    A state dict without heads, from an older version, is accepted.

    Raises:
        InvalidValue: weights of other heads than those of the module.
    """
    key = prefix + KEPT_HEADS
    where = f"the heads of {prefix.removesuffix('.') or type(module).__name__} in the state dict"
    # The buffer, else the metadata.
    stored = state_dict.get(key, (metadata or {}).get(KEPT_HEADS))
    if stored is not None and not getattr(stored, "is_meta", False):
        check_stored(module, stored, where)
    buffer = module._buffers.get(KEPT_HEADS)
    if buffer is None:
        state_dict.pop(key, None)
        return
    # Load the module's own heads: after to_empty the buffer is uninitialised memory.
    device = torch.device("cpu") if buffer.is_meta else buffer.device
    state_dict[key] = _stored(_state_of(module), device)


def check_stored(module: nn.Module, stored: Any, where: str) -> None:
    """Compare stored heads, ``[2 + heads]``, with the module's.

    Raises:
        InvalidValue: they differ.
    """
    ours = _state_of(module)
    theirs = _read(stored, where)
    if not _equivalent(module, ours, theirs):
        kept = list(theirs.heads)
        hint = (
            f"Cut the full-size model to the heads {kept} before it gets these weights (in one of"
            f" our own: prune_heads_({kept})), or store models with hp.save_pretrained and load"
            " them with hp.from_pretrained."
        )
        must = f"those of the module, {_shown(ours)}"
        raise InvalidValue(where, must, _shown(theirs), hint)


def _state_of(module: Any) -> HeadState:
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    if state is not None:
        return state
    # A module that was never cut.
    return HeadState(module.n_heads, module.n_kv_heads, tuple(range(module.n_heads)))


def _stored(state: HeadState, device: torch.device) -> Tensor:
    """Return the contents of the buffer, ``[2 + heads]``."""
    numbers = [state.n_query_heads, state.n_kv_heads, *state.heads]
    buffer = torch.tensor(numbers, device="cpu") * _SPREAD + _SPREAD // 2
    return buffer.to(device, non_blocking=True)


def _device_of(module: nn.Module) -> torch.device:
    """Return the module's device, or the CPU for meta weights, so that the heads are readable."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _read(stored: Any, where: str) -> HeadState:
    """Read a buffer or a list of metadata.

    Raises:
        InvalidValue: not two counts and the heads.
    """
    numbers = stored
    got = type(stored).__name__
    if isinstance(stored, Tensor):
        numbers = [n // _SPREAD for n in stored.flatten().tolist()]
        got = f"a tensor {list(stored.shape)}"
    valid = isinstance(numbers, list) and len(numbers) >= 2
    if not valid or not 0 <= numbers[1] <= numbers[0] <= MOST_HEADS:
        raise InvalidValue(where, "a tensor [2 + heads]: two counts and the heads", got)
    # Averaging models may have made them floats.
    n_heads, n_kv_heads, *heads = map(int, numbers)
    return HeadState(n_heads, n_kv_heads, tuple(heads))


def _equivalent(module: nn.Module, ours: HeadState, theirs: HeadState) -> bool:
    """Whether the module computes the same with weights of their heads as with its own."""
    same_counts = (ours.n_query_heads, ours.n_kv_heads) == (theirs.n_query_heads, theirs.n_kv_heads)
    if same_counts and ours.heads == theirs.heads:
        return True
    # A module built with as many heads computes the same as a cut one, unless it depends on more
    # than its weights.
    if len(ours.heads) != len(theirs.heads) or ours.uneven != theirs.uneven:
        return False
    uncut = any(s.heads == tuple(range(s.n_query_heads)) for s in (ours, theirs))
    return uncut and _ignores_indices(module)


def _ignores_indices(module: Any) -> bool:
    """Whether it is our own attention with a compatibility function that ignores head indices."""
    return isinstance(getattr(module, "compatibility", None), (ScaledDotProduct, Additive))


def _shown(state: HeadState) -> str:
    return f"{list(state.heads)} of {state.n_query_heads}"


def _say_after_save(
    module: nn.Module, destination: Any, prefix: str, metadata: Mapping[str, Any]
) -> None:
    say_heads(module, destination, prefix)


def _check_before_load(
    module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any, *rest: Any
) -> None:
    check_heads(module, state_dict, prefix, metadata)
