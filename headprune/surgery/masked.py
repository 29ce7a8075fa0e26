"""A comparison under masks that no example holds, for attention code that no layout was proven on.

An example shows what a module does with one mask. Code of the user's own may count heads only where
another mask is given. So each such module is called again, alone, with its arguments from the
example, under masks of the same kinds.
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
from headprune.surgery.verify import SIZE_NOT_CUT, compare

#: Names of arguments that are caches.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")

#: Added to scores of hidden keys; in fp16, too, it is finite.
_HIDDEN = -1e4


@dataclass
class MaskedCalls:
    """Calls of modules under several masks, and their outputs before a cut.

    Args:
        sites: The sites whose modules are called: each that loses heads, for two of one class may
            differ in their numbers.
        calls: The arguments of each module, by the name of its site.
        expected: Site, changed mask, call and output of the gated module.
    """

    sites: list[BoundSite]
    calls: dict[str, _ModuleCall] = field(default_factory=dict)
    expected: list[tuple[BoundSite, str, _ModuleCall, Tensor]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the arguments of the modules, for as long as the block lasts."""
        handles = []
        for b in self.sites:
            hook = self._recorder(b)
            handles.append(b.module.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _recorder(self, b: BoundSite) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[b.site.name] = _ModuleCall.of(module, args, kwargs)

        return record

    def expect(self, model: nn.Module) -> None:
        """Call the gated modules under every mask.

        A mask under which a module fails, or gives two different outputs, proves nothing.
        """
        for b in self.sites:
            given = self.calls.get(b.site.name)
            if given is None:
                continue
            for what, changed in _variants(b, given):
                try:
                    first = changed.run(model, b.module)
                    second = changed.run(model, b.module)
                except Exception:  # nosec B112
                    # Code that we know nothing about may not take such a mask.
                    continue
                if first is not None and second is not None and compare([first], [second]).holds:
                    self.expected.append((b, what, changed, first))

    def check(self, model: nn.Module) -> None:
        """Compare the cut modules with the gated ones.

        Raises:
            VerificationFailed: a module that differs by more than rounding, or fails.
        """
        for b, what, given, expected in self.expected:
            where = f"the pruned {b.site.name}"
            must = f"equal to the gated one also with {what}"
            try:
                output = given.run(model, b.module)
            except Exception as error:
                first_line = str(error).partition("\n")[0]
                got = f"{type(error).__name__}: {first_line}"
                raise VerificationFailed(where, must, got, SIZE_NOT_CUT) from error
            difference = compare([expected], [] if output is None else [output])
            if not difference.holds:
                got = f"a difference of {difference.maximum:.3e}"
                raise VerificationFailed(where, must, got, SIZE_NOT_CUT)


@dataclass(frozen=True)
class _ModuleCall:
    """The arguments of one call of a module; tensors carry no graph.

    Args:
        args, kwargs: Copies of the arguments.
        names: Of arguments by position, as far as ``forward`` has names.
        defaults: The values of the other named arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _ModuleCall:
        """The call without its caches."""
        names: list[str] = []
        defaults: dict[str, Any] = {}
        for parameter in inspect.signature(module.forward).parameters.values():
            by_position = parameter.kind in (
                parameter.POSITIONAL_ONLY,
                parameter.POSITIONAL_OR_KEYWORD,
            )
            if by_position and len(names) < len(args):
                names.append(parameter.name)
            elif parameter.default is not parameter.empty:
                defaults[parameter.name] = parameter.default
        given = cls(_copied(args), _copied(dict(kwargs)), tuple(names), defaults)
        # A second call would go on after the tokens in a filled cache.
        no_caches = dict.fromkeys(name for name in _CACHES if name in given.named())
        return given.having(no_caches)

    def named(self) -> dict[str, Any]:
        """All arguments that have a name, given or not."""
        by_position = dict(zip(self.names, self.args, strict=False))
        return {**self.defaults, **by_position, **self.kwargs}

    def inputs(self) -> Iterator[Tensor]:
        """The given tensors, such as hidden states ``[batch, tokens, width]``."""
        return tensors([*self.args, *self.kwargs.values()])

    def having(self, changes: Mapping[str, Any]) -> _ModuleCall:
        """The call with other values."""
        args = list(self.args)
        for place, name in enumerate(self.names):
            args[place] = changes.get(name, args[place])
        others = {name: value for name, value in changes.items() if name not in self.names}
        return replace(self, args=tuple(args), kwargs={**self.kwargs, **others})

    def run(self, model: nn.Module, module: nn.Module) -> Tensor | None:
        """The first tensor that a module returns: the heads' outputs, projected.

        The module gets copies: it may fill a cache, or write into its arguments.
        """
        args, kwargs = _copied(self.args), _copied(self.kwargs)
        with undisturbed(model), full_precision(), torch.no_grad():
            output = next(tensors(module(*args, **kwargs)), None)
        return None if output is None else output.detach().clone()


def _copied(value: Any) -> Any:
    """Copies of values that a call may change; modules and functions pass through."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        return value  # an object of the user's own that has no copy


def _variants(b: BoundSite, given: _ModuleCall) -> Iterator[tuple[str, _ModuleCall]]:
    """The same call under other masks, and the change as text."""
    for name, value in given.named().items():
        if "mask" not in name and "len" not in name:
            continue
        if isinstance(value, Tensor):
            yield f"{name}=None", given.having({name: None})
            yield f"more keys hidden by {name}", given.having({name: _more_hidden(value)})
        elif value is None and "mask" in name:
            for what, mask in _new_masks(b, given):
                yield f"{name} for {what}", given.having({name: mask})
        elif value is None:
            x = next(given.inputs(), None)
            if x is not None and x.ndim == 3:
                # Lengths [batch]: 1, 2, 3... tokens.
                batch_axis = b.layout.batch_axis
                n_examples, n_tokens = x.shape[batch_axis], x.shape[1 - batch_axis]
                lengths = 1 + torch.arange(n_examples, device=x.device) % n_tokens
                yield f"{name} of 1, 2, 3, ... tokens", given.having({name: lengths})


def _more_hidden(mask: Tensor) -> Tensor:
    """A mask of the same form that hides more keys of the last example.

    Lengths ``[batch]`` become one less; other masks hide the last third of the keys.
    """
    mask = mask.clone()
    truths = mask.dtype == torch.bool
    if mask.ndim == 1:
        if truths or mask.is_floating_point():
            return mask
        return (mask - 1).clamp(min=1)
    hidden = max(1, mask.shape[-1] // 3)
    mask[-1, ..., -hidden:] = _HIDDEN if mask.is_floating_point() else 0
    return mask


def _new_masks(b: BoundSite, given: _ModuleCall) -> Iterator[tuple[str, Tensor]]:
    """Masks for padding, and for padding and later tokens, ``[batch, 1, queries, keys]``.

    Each in both forms: numbers that are added to scores, and booleans for visible keys.
    """
    hidden_states = (x for x in given.inputs() if x.ndim == 3 and x.is_floating_point())
    x = next(hidden_states, None)
    if x is None or b.layout.batch_axis or b.layout.windows:
        return
    n_queries = n_keys = x.shape[1]
    # Cross-attention takes its keys from another input.
    named = given.named()
    for name in ("key_value_states", "encoder_hidden_states", "key", "keys", "context"):
        other = named.get(name)
        if isinstance(other, Tensor) and other.ndim == 3:
            n_keys = other.shape[1]
            break
    padding = torch.ones(x.shape[0], 1, n_queries, n_keys, dtype=torch.bool, device=x.device)
    # The last example is padded; one key alone must be visible.
    if n_keys > 1:
        padding[-1, ..., -max(1, n_keys // 3) :] = False
    # The last query sees all keys, as it does after a cache.
    causal = padding & torch.ones_like(padding).tril(max(0, n_keys - n_queries))
    for what, seen in (("padding", padding), ("padding and later tokens", causal)):
        yield what, x.new_zeros(seen.shape).masked_fill(~seen, _HIDDEN)
        yield f"{what}, as booleans", seen
