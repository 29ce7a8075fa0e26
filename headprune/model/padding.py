"""Which positions are no padding: by what a batch says, and by what attention itself hides where it
runs.

A batch's mask need not be that of the tokens that attention sees: it may count samples where the
states of a speech model count frames, or be another tower's. So the scores that reach a softmax and
the masks that reach a kernel are seen at every site. Nothing here waits for an accelerator.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.core.heads import Kind
from headprune.model.losses import is_encoder_decoder
from headprune.model.masks import HIDDEN, Visible, token_mask, unhidden, unmasked, visible
from headprune.model.running import tensors
from headprune.model.sites import BoundSite, unwrap

_MASK = "attention_mask"
_KEPT = 4  # masks that are remembered: layers share one or two


@dataclass(frozen=True, eq=False)
class PaddingInfo:
    """What tells the padding of a call: the batch, and what attention hid.

    Args:
        batch: The batch, or what a part of the model was given.
        here: Whether the batch's ``attention_mask`` is for this part of the model.
        stream: What attention to its own sequence hid of it.
        keys: What the attention that ran last hid of its keys.
    """

    batch: Any
    here: bool = True
    stream: tuple[Visible, ...] = ()
    keys: tuple[Visible, ...] = ()


def query_mask(model: nn.Module, kind: Kind, info: Any, shape: tuple[int, int]) -> Tensor | None:
    """``[batch, queries]``: True where a query is no padding; None where nothing tells, or nothing
    is hidden.

    A query counts unless attention hides it, as a key, from all, and unless the batch says that it
    is padding: the queries of an encoder-decoder's decoder (kinds ``causal`` and ``cross``) follow
    ``decoder_attention_mask``; without one, labels of -100 are padding; with neither and no inputs
    of its own, the decoder reads the encoder's. All other queries follow ``attention_mask``, if it
    is for their part of the model. A mask of another shape tells nothing.

    Args:
        model: Says whether there is a decoder.
        kind: What the queries are.
        info: The padding information, or the batch alone.
        shape: ``(batch, queries)``.
    """
    info = info if isinstance(info, PaddingInfo) else PaddingInfo(info)
    said, (_, seen) = _mask_of_batch(model, kind, info, shape), unhidden(info.stream, shape)
    if said is None or seen is None:
        return seen if said is None else said
    return said & seen.to(said.device)


def _mask_of_batch(
    model: nn.Module, kind: Kind, info: PaddingInfo, shape: tuple[int, int]
) -> Tensor | None:
    """What the batch says of queries."""
    batch = info.batch
    if not isinstance(batch, Mapping):
        return None
    if kind == "self" or not is_encoder_decoder(model):
        return token_mask(batch, shape) if info.here else None
    mask, labels, own = batch.get(_MASK), batch.get("labels"), batch.get("decoder_input_ids")
    if isinstance(labels, Tensor) and labels.ndim == 2:
        mask = labels != -100
    elif own is not None or batch.get("decoder_inputs_embeds") is not None:
        mask = None
    mask = mask if batch.get("decoder_attention_mask") is None else batch["decoder_attention_mask"]
    return token_mask({_MASK: mask}, shape)


def key_mask(info: Any, shape: tuple[int, int]) -> Tensor | None:
    """``[batch, keys]`` of another sequence: True where a key is no padding; None where nothing is
    hidden.

    By what attention hid, where it was seen to run; else by ``attention_mask``.
    """
    info = info if isinstance(info, PaddingInfo) else PaddingInfo(info)
    seen, mask = unhidden(info.keys, shape)
    return mask if seen else token_mask(info.batch, shape)


def output_mask(model: nn.Module, batch: Any, shape: tuple[int, int]) -> Tensor | None:
    """``[batch, positions]``: True where an output is not of padding; None where the batch does not
    tell.

    Outputs of an encoder-decoder are its decoder's. Where a mask counts samples of sound and
    outputs are frames, the model itself says which frames they come to.
    """
    mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
    frames = getattr(unwrap(model), "_get_feature_vector_attention_mask", None)
    found = _mask_of_batch(model, "causal", PaddingInfo(batch), shape)
    if (
        found is not None
        or frames is None
        or is_encoder_decoder(model)
        or not _is_mask(mask)
        or len(mask) != shape[0]
    ):
        return found
    in_frames: Tensor = frames(shape[1], mask)
    return in_frames.bool()


class Inputs:
    """What tells the padding of the call that is running: ``now``.

    Args:
        model: The model.
        bound: Its sites.
    """

    def __init__(self, model: nn.Module, bound: Iterable[BoundSite]) -> None:
        bound = list(bound)
        self._model, self._kinds = unwrap(model), {b.site.name: b.site.kind for b in bound}
        self._watch = _Watch({b.site.name: b.layout.batch_axis for b in bound})
        self.begin(None)

    def begin(self, batch: Any) -> None:
        """A pass on this batch follows."""
        self._batch, self._here, self._last = batch, True, ""
        self._tells = isinstance(batch, Mapping) and _MASK in batch
        self._masks = [batch[_MASK]] if self._tells else []
        self._called: set[str] = set()
        self._handed: set[str] = set()  # modules that were called with one of the masks
        self._found: dict[
            str, _Found
        ] = {}  # by site of attention to its own sequence, the latest first
        self._watch.forget()

    @property
    def now(self) -> PaddingInfo:
        """As of the attention that runs, or ran last."""
        same = _same_layer if self._kinds.get(self._last) == "cross" else _same_stack
        streams = (found.visible for name, found in self._found.items() if same(name, self._last))
        return PaddingInfo(
            self._batch, self._here, next(filter(None, streams), ()), self._watch.found.visible
        )

    def called(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """A module around attention is called so, or attention itself."""
        self._called.add(name)
        if not name:
            self._masks.append(_argument(module, args, kwargs, _MASK))
        if any(t is mask for t in tensors((args, kwargs)) for mask in self._masks):
            self._handed.add(name)
        inside = f"{name}." if name else ""
        if name not in self._kinds:  # what its attentions hid was of its call before
            self._found = {
                site: found for site, found in self._found.items() if not site.startswith(inside)
            }

    def see(self, kwargs: Mapping[str, Any]) -> None:
        """A part of the model is called so: where the batch does not tell, that may."""
        if self._tells:
            return
        mask, away = kwargs.get(_MASK), kwargs.get("src_key_padding_mask")
        if (
            _is_mask(mask) and not mask.is_floating_point()
        ):  # one of floats is added to attention's scores
            self._batch = dict(kwargs)
            self._masks.append(mask)
        elif _is_mask(away) and away.dtype == torch.bool:
            self._batch = {_MASK: ~away}
            self._masks.append(away)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Attention begins to run."""
        self._last, self._here = name, self._is_here(name)
        found = self._watch.enter(name, unmasked(_argument(module, args, kwargs, _MASK)))
        if self._kinds[name] != "cross":
            self._found.pop(name, None)
            self._found = {name: found, **self._found}

    def leave(self) -> None:
        """Attention has run."""
        self._watch.leave()

    def _is_here(self, name: str) -> bool:
        """Whether the batch's mask is for a site.

        It is not where the module that is the last one on the way to the site to be handed it has
        another part that hands on masks, and calls the part with the site without it: a vision
        tower beside a text tower.
        """
        parts = name.split(".") if name else []
        path = [".".join(parts[:n]) for n in range(len(parts) + 1)]
        called = [n for n, part in enumerate(path) if part in self._called]
        handed = [n for n in called if path[n] in self._handed]
        start = handed[-1] if handed else max(0, called[0] - 1)
        below = next((n for n in called if n > start), start)
        kind = type(self._model.get_submodule(path[below]))
        for n in range(start, below):
            for child, other in self._model.get_submodule(path[n]).named_children():
                if child != parts[n] and type(other) is not kind and _hands_on_masks(other):
                    return False
        return True


class _Found:
    """What was found out at one run of attention.

    Args:
        given: By the mask that it was called with, for kernels that are not seen.
    """

    def __init__(self, given: Visible | None = None) -> None:
        self.given = given
        self.seen: list[Visible] = []

    @property
    def visible(self) -> tuple[Visible, ...]:
        """What it hid."""
        return tuple(self.seen) if self.seen or self.given is None else (self.given,)


class _Watch(TorchFunctionMode):
    """Sees what attention hides while it runs: scores that reach a softmax, masks that reach a
    kernel.

    Args:
        batch_axes: By site, where its contexts have the examples.
    """

    def __init__(self, batch_axes: Mapping[str, int]) -> None:
        super().__init__()
        self.found = _Found()
        self._batch_axes, self._batch_axis, self._on = batch_axes, 0, False
        self._known: dict[tuple[int, int], tuple[Tensor, Visible]] = {}

    def forget(self) -> None:
        """A pass follows."""
        self.leave()
        self.found, self._known = _Found(), {}

    def enter(self, name: str, given: Visible | None) -> _Found:
        """Attention begins to run."""
        self.leave()
        self.found, self._batch_axis, self._on = _Found(given), self._batch_axes[name], True
        self.__enter__()  # type: ignore[no-untyped-call]
        return self.found

    def leave(self) -> None:
        """Attention has run, or an error ended it."""
        if self._on:
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        note = _NOTED.get(getattr(func, "__name__", ""))
        if note is not None:
            found = note(self, args, kwargs)
            self.found.seen += [] if found is None else [found]
        return func(*args, **kwargs)

    def _scores(self, args: Any, kwargs: Mapping[str, Any]) -> Visible | None:
        """What ``softmax(scores, dim)`` hides."""
        scores, dim = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "dim")
        if scores.is_nested or scores.ndim < 2 or not isinstance(dim, int):
            return None
        if dim not in (-1, scores.ndim - 1):
            if self._batch_axis != 1 or scores.ndim != 4:
                return None
            scores = (
                scores.movedim(dim, -1).movedim(1, 0).movedim(1, -2)
            )  # from [queries, batch, heads, keys]
        return visible(scores > HIDDEN)

    def _kernel(self, args: Any, kwargs: Mapping[str, Any]) -> Visible | None:
        """What ``scaled_dot_product_attention(query, key, value, attn_mask)`` hides."""
        query, key = (_given(args, kwargs, n, name) for n, name in enumerate(("query", "key")))
        mask = _given(args, kwargs, 3, "attn_mask")
        if mask is None:
            return None if key.is_nested else int(key.shape[-2])
        known = id(mask), 0 if mask.is_inference() else mask._version
        if known not in self._known:
            pairs = mask.reshape((1,) * (query.ndim - mask.ndim) + mask.shape)
            pairs = pairs if pairs.dtype == torch.bool else pairs > HIDDEN
            self._known = dict([*self._known.items()][1 - _KEPT :])
            self._known[known] = mask, visible(pairs)
        return self._known[known][1]

    def _module(self, args: Any, kwargs: Mapping[str, Any]) -> Visible | None:
        """What PyTorch's ``multi_head_attention_forward`` hides."""
        mask = kwargs.get("key_padding_mask")
        if mask is None:
            return None
        pairs = ~mask if mask.dtype == torch.bool else mask > HIDDEN
        return visible(pairs.unsqueeze(-2))


_NOTED: dict[str, Callable[[_Watch, Any, Mapping[str, Any]], Visible | None]] = {
    "softmax": _Watch._scores,
    "scaled_dot_product_attention": _Watch._kernel,
    "multi_head_attention_forward": _Watch._module,
}


@contextmanager
def inputs_of(model: nn.Module, bound: Iterable[BoundSite]) -> Iterator[Inputs]:
    """Follows what tells the padding, for as long as the block lasts.

    A batch with an ``attention_mask`` tells it, in the parts of the model that it is for. Others
    may hold the inputs of inner models, such as those of an encoder that runs once for each of two
    sentences: there the last ``attention_mask`` ``[batch, tokens]`` counts, or PyTorch's
    ``src_key_padding_mask``, by which a module around the attention was called. In all of them
    attention tells what it hides.
    """
    bound = list(bound)
    sites = {b.site.name: b.module for b in bound}
    parts = [name.split(".") for name in sites]
    around = {".".join(p[:n]) for p in parts for n in range(len(p))} - set(sites)
    inputs = Inputs(model, bound)

    def called(name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if name not in sites:
            inputs.see(kwargs)
        inputs.called(name, module, args, kwargs)
        if name in sites:
            inputs.enter(name, module, args, kwargs)

    def returned(module: nn.Module, args: Any, output: Any) -> None:
        inputs.leave()

    with ExitStack() as stack:
        stack.callback(inputs.leave)
        for name, module in [
            *((name, model.get_submodule(name)) for name in around),
            *sites.items(),
        ]:
            hook = functools.partial(called, name)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for module in sites.values():
            stack.callback(module.register_forward_hook(returned, always_call=True).remove)
        yield inputs


def _is_mask(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 2


def _given(args: Any, kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _argument(module: nn.Module, args: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """What a module is given under a name; None where nothing is."""
    if not args or name in kwargs:
        return kwargs.get(name)
    names = _parameters(module)
    return args[names.index(name)] if name in names[: len(args)] else None


def _parameters(module: nn.Module) -> tuple[str, ...]:
    return _parameters_of(getattr(type(module), "forward", None))


@functools.cache
def _parameters_of(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:] if inspect.isfunction(forward) else ()


def _hands_on_masks(module: nn.Module) -> bool:
    """Whether it takes an ``attention_mask``, and a part of it does."""
    parts = (_parameters(m) for m in module.modules() if m is not module)
    return _MASK in _parameters(module) and any(_MASK in names for names in parts)


def _same_stack(name: str, other: str) -> bool:
    """Whether two sites are one, or the same part of two layers of a list: one without heads hides
    nothing itself."""
    a, b = name.split("."), other.split(".")
    apart = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
    return len(a) == len(b) and (
        not apart or (len(apart) == 1 and all(part.isdigit() for part in apart[0]))
    )


def _same_layer(name: str, other: str) -> bool:
    """Whether two sites lie as deep in one layer, as a decoder's attention to itself and that to
    the encoder."""
    a, b = name.split("."), other.split(".")
    n_common = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    parent = n_common == len(a) - 1
    return len(a) == len(b) and (parent or (n_common > 0 and a[n_common - 1].isdigit()))
