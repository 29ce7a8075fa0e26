"""The proof under masks: attention whose code no layout was proven on is compared under masks that
no example holds.

An example shows what a module does with the mask that it is given there. Code of one's own may
count heads only where another one is given, so each such module is called again, alone, on what it
was given, under masks as it takes them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import VerificationFailed
from headprune.model.precision import full_precision
from headprune.model.running import tensors, undisturbed
from headprune.model.sites import BoundSite
from headprune.surgery.verify import compare

#: Caches that a call has filled; a second call would go on after it.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")


@dataclass
class MaskedCalls:
    """Calls of modules under several masks, and what they returned before a cut.

    Args:
        sites: Those whose modules are called: each that loses heads, for two of one class may
            differ in their numbers.
    """

    sites: list[BoundSite]
    calls: dict[str, _Call] = field(default_factory=dict)
    expected: list[tuple[BoundSite, str, _Call, Tensor]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what the modules are given, for as long as the block lasts."""
        handles = [
            b.module.register_forward_pre_hook(self._noted(b), with_kwargs=True) for b in self.sites
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _noted(self, b: BoundSite) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[b.site.name] = _Call.of(module, args, kwargs)

        return note

    def expect(self, model: nn.Module) -> None:
        """Calls the gated modules; a mask under which one does not run, or not twice alike, proves
        nothing."""
        for b in self.sites:
            given = self.calls.get(b.site.name)
            for what, changed in () if given is None else _variants(b, given):
                try:
                    found, again = changed.run(model, b.module), changed.run(model, b.module)
                except Exception:  # it is code that we know nothing about, which takes no such mask
                    continue
                if found is not None and again is not None and compare([found], [again]).holds:
                    self.expected.append((b, what, changed, found))

    def check(self, model: nn.Module) -> None:
        """Compares the cut modules.

        Raises:
            VerificationFailed: one that differs by more than rounding, or no longer runs.
        """
        for b, what, given, expected in self.expected:
            must = f"equal to the gated one also with {what}"
            hint = "The model is unchanged. Its code counts heads where a cut does not reach them."
            try:
                found = given.run(model, b.module)
            except Exception as error:
                got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise VerificationFailed(f"the pruned {b.site.name}", must, got, hint) from error
            difference = compare([expected], [] if found is None else [found])
            if not difference.holds:
                got = f"a difference of {difference.maximum:.3e}"
                raise VerificationFailed(f"the pruned {b.site.name}", must, got, hint)


@dataclass(frozen=True)
class _Call:
    """What a module was called with; tensors carry no graph.

    Args:
        args, kwargs: Copies of what was given.
        names: Of arguments by position, as far as ``forward`` has names.
        defaults: What it takes beside them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        parameters = inspect.signature(module.forward).parameters.values()
        names = tuple(
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        )[: len(args)]
        defaults = {
            p.name: p.default
            for p in parameters
            if p.default is not p.empty and p.name not in names
        }
        found = cls(_copied(args), _copied(dict(kwargs)), names, defaults)
        return found.having({name: None for name in _CACHES if name in found.named()})

    def named(self) -> dict[str, Any]:
        """All arguments that have a name, given or not."""
        return {**self.defaults, **dict(zip(self.names, self.args, strict=False)), **self.kwargs}

    def having(self, changes: Mapping[str, Any]) -> _Call:
        """The call with other values."""
        args = [
            changes.get(name, value) for name, value in zip(self.names, self.args, strict=False)
        ]
        more = {name: value for name, value in changes.items() if name not in self.names}
        return replace(self, args=(*args, *self.args[len(args) :]), kwargs={**self.kwargs, **more})

    def run(self, model: nn.Module, module: nn.Module) -> Tensor | None:
        """The first tensor that a module returns: the heads' outputs, projected.

        It is given copies: it may fill a cache, or write into what it is given.
        """
        args, kwargs = _copied(self.args), _copied(self.kwargs)
        with undisturbed(model), full_precision(), torch.no_grad():
            found = next(tensors(module(*args, **kwargs)), None)
        return None if found is None else found.detach().clone()


def _copied(value: Any) -> Any:
    """Values that a call may change, as they are now; modules, functions and what has no copy pass
    through."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # an object of somebody's own
        return value


def _variants(b: BoundSite, given: _Call) -> Iterator[tuple[str, _Call]]:
    """The same call under other masks, and what was changed, in words."""
    for name, value in given.named().items():
        if "mask" not in name and "len" not in name:
            continue
        if isinstance(value, Tensor):
            yield f"{name}=None", given.having({name: None})
            yield f"more of {name} hidden", given.having({name: _more_hidden(value)})
        elif value is None and "mask" in name:
            for what, mask in _new_masks(b, given):
                yield f"{name} for {what}", given.having({name: mask})
        elif value is None:
            x = next(tensors([*given.args, *given.kwargs.values()]), None)
            if x is not None and x.ndim == 3:
                lengths = (
                    1 + torch.arange(x.shape[b.layout.batch_axis], device=x.device) % x.shape[1]
                )
                yield f"{name} of its own", given.having({name: lengths})


def _more_hidden(mask: Tensor) -> Tensor:
    """A mask of the same form that hides the last third of the last example's keys too; lengths one
    less."""
    mask = mask.clone()
    if mask.ndim == 1:
        return (
            (mask - 1).clamp(min=1)
            if not mask.is_floating_point() and mask.dtype != torch.bool
            else mask
        )
    hidden = max(1, mask.shape[-1] // 3)
    low = -1e4 if mask.is_floating_point() else 0
    mask[-1, ..., -hidden:] = low
    return mask


def _new_masks(b: BoundSite, given: _Call) -> Iterator[tuple[str, Tensor]]:
    """For padding, and causal with padding, ``[batch, 1, queries, keys]``: what is added to scores
    or is seen."""
    named = given.named()
    inputs = [
        x
        for x in tensors([*given.args, *given.kwargs.values()])
        if x.ndim == 3 and x.is_floating_point()
    ]
    if not inputs or b.layout.batch_axis or b.layout.windows:
        return
    x = inputs[0]
    other = [
        named.get(n)
        for n in ("key_value_states", "encoder_hidden_states", "key", "keys", "context")
    ]
    n_keys = next((o.shape[1] for o in other if isinstance(o, Tensor) and o.ndim == 3), x.shape[1])
    padding = torch.ones(x.shape[0], 1, x.shape[1], n_keys, dtype=torch.bool, device=x.device)
    if n_keys > 1:
        padding[-1, ..., -max(1, n_keys // 3) :] = False
    causal = padding & torch.ones_like(padding).tril(max(0, n_keys - x.shape[1]))
    for what, seen in (("padding", padding), ("what comes later", causal)):
        yield what, x.new_zeros(seen.shape).masked_fill(~seen, -1e4)
        yield f"{what}, as truths", seen
