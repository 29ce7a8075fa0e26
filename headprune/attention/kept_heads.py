"""Which heads a module has, as a part of its state dict: weights of other heads are refused where
they are loaded.

Two cuts of one size have weights of the same shapes. What a module computes may depend on more than
those: on which key/value head a query head reads, on slopes or biases that come for all heads. Such
a module says its heads in a buffer, a tensor like any other for whoever stores or dispatches
weights. Where the weights are all that counts, only the metadata of the state dict say it, so that
a smaller model of the same class takes them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.core.layout import STATE_ATTRIBUTE, HeadState
from headprune.core.slabs import MOST_HEADS

#: The buffer: query and key/value heads of the whole module, then the heads that are kept,
#: ``[2 + heads]``.
KEPT_HEADS = "headprune_kept"
#: A number n stands in the buffer as 16 n + 8: averages of models round whole numbers down, a
#: little at every step.
_SPREAD = 16


def store_heads_(module: nn.Module, in_buffer: bool) -> None:
    """Gives a module that was cut its buffer of kept heads, or takes it away."""
    module._buffers.pop(KEPT_HEADS, None)
    if in_buffer:
        module.register_buffer(KEPT_HEADS, _stored(_state_of(module), _device_of(module)))


def watch_heads_(module: nn.Module) -> None:
    """Lets a module of a class that is not ours say its heads in state dicts and check them; once
    is enough."""
    known = [getattr(hook, "hook", None) for hook in module._load_state_dict_pre_hooks.values()]
    if _check_before_load not in known:
        module.register_state_dict_post_hook(_say_after_save)
        module.register_load_state_dict_pre_hook(_check_before_load)


def weights_of(model: nn.Module, keep_vars: bool = False) -> dict[str, Tensor]:
    """The state dict without the buffers of kept heads.

    Our folders and fingerprints know the heads by themselves, and what they store of a model stays
    as it was.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=keep_vars)
    for name, module in model.named_modules(remove_duplicate=False):
        if KEPT_HEADS in module._buffers:
            state.pop(f"{name}.{KEPT_HEADS}".removeprefix("."), None)
    return state


def say_heads(module: nn.Module, destination: Any, prefix: str) -> None:
    """Notes the heads in the metadata of a state dict, which only some ways to store it keep."""
    metadata: MutableMapping[str, Any] | None = getattr(destination, "_metadata", None)
    if metadata is not None:
        state = _state_of(module)
        noted = [state.n_query_heads, state.n_kv_heads, *state.heads]
        metadata.setdefault(prefix.removesuffix("."), {})[KEPT_HEADS] = noted


def check_heads(
    module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any
) -> None:
    """Compares the heads that were stored with those of the module, before any of its weights is
    changed.

    Older state dicts do not say which heads they have; the module's are taken for theirs.

    Raises:
        InvalidValue: weights of other heads than those of the module.
    """
    key, ours = prefix + KEPT_HEADS, _state_of(module)
    where = f"the heads of {prefix.removesuffix('.') or type(module).__name__} in the state dict"
    stored = state_dict.get(key, (metadata or {}).get(KEPT_HEADS))
    if stored is not None and not getattr(stored, "is_meta", False):
        check_stored(module, stored, where)
    buffer = module._buffers.get(KEPT_HEADS)
    if buffer is None:
        state_dict.pop(key, None)
    else:  # what is there may be memory that nobody has filled, after to_empty
        state_dict[key] = _stored(ours, torch.device("cpu") if buffer.is_meta else buffer.device)


def check_stored(module: nn.Module, stored: Any, where: str) -> None:
    """Compares heads that were stored, ``[2 + heads]``, with those that a module has.

    Raises:
        InvalidValue: they are others.
    """
    ours, theirs = _state_of(module), _read(stored, where)
    if not _alike(module, ours, theirs):
        kept = list(theirs.heads)
        hint = (
            f"Cut the full-size model to the heads {kept} before it gets these weights (in one of"
            " our own: "
        )
        hint += (
            f"prune_heads_({kept})), or store models with hp.save_pretrained and load them with"
            " hp.from_pretrained."
        )
        raise InvalidValue(where, f"those of the module, {_said(ours)}", _said(theirs), hint)


def _state_of(module: Any) -> HeadState:
    state: HeadState | None = getattr(module, STATE_ATTRIBUTE, None)
    return (
        HeadState(module.n_heads, module.n_kv_heads, tuple(range(module.n_heads)))
        if state is None
        else state
    )


def _stored(state: HeadState, device: torch.device) -> Tensor:
    made = (
        torch.tensor([state.n_query_heads, state.n_kv_heads, *state.heads], device="cpu") * _SPREAD
        + _SPREAD // 2
    )
    return made.to(device, non_blocking=True)


def _device_of(module: nn.Module) -> torch.device:
    """Where the module runs; where its weights are elsewhere, main memory, so that the heads are
    known."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _read(stored: Any, where: str) -> HeadState:
    """Raises:
    InvalidValue: not two counts and the heads.
    """
    numbers = (
        [n // _SPREAD for n in stored.flatten().tolist()] if isinstance(stored, Tensor) else stored
    )
    counts = [0, -1] if not isinstance(numbers, list) else numbers[:2]
    if len(counts) < 2 or not 0 <= counts[1] <= counts[0] <= MOST_HEADS:
        got = (
            f"a tensor {list(stored.shape)}"
            if isinstance(stored, Tensor)
            else type(stored).__name__
        )
        raise InvalidValue(where, "a tensor [2 + heads]: two counts and the heads", got)
    n_heads, n_kv_heads, *heads = map(
        int, numbers
    )  # an average of models may have made them floats
    return HeadState(n_heads, n_kv_heads, tuple(heads))


def _alike(module: nn.Module, ours: HeadState, theirs: HeadState) -> bool:
    """Whether weights of their heads mean the same in the module."""
    if (ours.n_query_heads, ours.n_kv_heads, ours.heads) == (
        theirs.n_query_heads,
        theirs.n_kv_heads,
        theirs.heads,
    ):
        return True
    whole = any(s.heads == tuple(range(s.n_query_heads)) for s in (ours, theirs))
    # One that was built with as many heads computes the same, unless it asks for more than its
    # weights.
    return (
        whole
        and len(ours.heads) == len(theirs.heads)
        and ours.uneven == theirs.uneven
        and _counts_alone(module)
    )


def _counts_alone(module: Any) -> bool:
    """Whether, of our own attention, the compatibility function asks only for weights and not for
    original heads."""
    from headprune.attention.compatibility import Additive, ScaledDotProduct

    return isinstance(getattr(module, "compatibility", None), (ScaledDotProduct, Additive))


def _said(state: HeadState) -> str:
    return f"{list(state.heads)} of {state.n_query_heads}"


def _say_after_save(
    module: nn.Module, destination: Any, prefix: str, metadata: Mapping[str, Any]
) -> None:
    say_heads(module, destination, prefix)


def _check_before_load(
    module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any, *rest: Any
) -> None:
    check_heads(module, state_dict, prefix, metadata)
