"""Which positions are no padding: what a batch says, and what attention hides when it runs.

A batch's mask need not be that of the tokens that attention sees: it may count samples where the
states of a speech model count frames, or be another tower's. So the scores that reach a softmax and
the masks that reach a kernel are read at every site. Nothing here waits for an accelerator.
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

from headprune.core.errors import UnsupportedModel
from headprune.core.heads import Kind
from headprune.model.losses import is_encoder_decoder
from headprune.model.masks import HIDDEN, Visible, token_mask, unhidden, unmasked, visible
from headprune.model.near_misses import names_around
from headprune.model.running import tensors
from headprune.model.sites import BoundSite, bind, unwrap

_MASK = "attention_mask"
_IGNORED = -100
_CACHED_MASKS = 4  # layers share one or two


@dataclass(frozen=True, eq=False)
class PaddingInfo:
    """What shows the padding of a call: the batch, and what attention hid.

    Args:
        batch: The batch, or what a part of the model was called with.
        here: Whether the batch's ``attention_mask`` is for this part of the model.
        stream: What attention to its own sequence hid of it.
        keys: What the attention that ran last hid of its keys.
    """

    batch: Any
    here: bool = True
    stream: tuple[Visible, ...] = ()
    keys: tuple[Visible, ...] = ()


def query_mask(model: nn.Module, kind: Kind, info: Any, shape: tuple[int, int]) -> Tensor | None:
    """Find the queries that are no padding.

    A query counts unless attention hides it, as a key, from all, and unless the batch says that it
    is padding. The queries of an encoder-decoder's decoder (kinds ``causal`` and ``cross``) follow
    ``decoder_attention_mask``; without one, labels of -100 are padding; with neither and no inputs
    of its own, the decoder reads the encoder's. All other queries follow ``attention_mask``, if it
    is for their part of the model. A mask of another shape is ignored.

    Args:
        model: Says whether there is a decoder.
        kind: What the queries are.
        info: The padding information, or the batch alone.
        shape: ``(batch, queries)``.

    Returns:
        ``[batch, queries]``: True where a query is no padding; None where nothing shows it, or
        nothing is hidden.
    """
    info = _as_info(info)
    by_batch = _mask_of_batch(model, kind, info, shape)
    _, by_attention = unhidden(info.stream, shape)
    if by_batch is None:
        return by_attention
    if by_attention is None:
        return by_batch
    return by_batch & by_attention.to(by_batch.device)


def _as_info(info: Any) -> PaddingInfo:
    return info if isinstance(info, PaddingInfo) else PaddingInfo(info)


def _mask_of_batch(
    model: nn.Module, kind: Kind, info: PaddingInfo, shape: tuple[int, int]
) -> Tensor | None:
    """The mask of queries ``[batch, queries]`` by the batch alone."""
    batch = info.batch
    if not isinstance(batch, Mapping):
        return None
    if kind == "self" or not is_encoder_decoder(model):
        if not info.here:
            return None
        return token_mask(batch, shape)

    # The decoder's queries: its own mask first, then the labels, then the encoder's mask.
    mask = batch.get("decoder_attention_mask")
    if mask is None:
        labels = batch.get("labels")
        ids, embeddings = batch.get("decoder_input_ids"), batch.get("decoder_inputs_embeds")
        if isinstance(labels, Tensor) and labels.ndim == 2:
            mask = labels != _IGNORED
        elif ids is None and embeddings is None:
            mask = batch.get(_MASK)
    return token_mask({_MASK: mask}, shape)


def key_mask(info: Any, shape: tuple[int, int]) -> Tensor | None:
    """Find the keys of another sequence that are no padding.

    By what attention hid, where it ran; else by ``attention_mask``.

    Returns:
        ``[batch, keys]``: True where a key is no padding; None where nothing is hidden.
    """
    info = _as_info(info)
    seen, mask = unhidden(info.keys, shape)
    return mask if seen else token_mask(info.batch, shape)


def output_mask(model: nn.Module, batch: Any, shape: tuple[int, int]) -> Tensor | None:
    """Find the outputs that are not of padding.

    Outputs of an encoder-decoder are its decoder's. Where a mask counts samples of sound and
    outputs are frames, the model itself computes the mask of its frames.

    Returns:
        ``[batch, positions]``: True where an output is no padding; None where the batch does not
        show it.
    """
    by_batch = _mask_of_batch(model, "causal", PaddingInfo(batch), shape)
    if by_batch is not None or is_encoder_decoder(model):
        return by_batch
    mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
    to_frames = getattr(unwrap(model), "_get_feature_vector_attention_mask", None)
    if to_frames is None or not _is_mask(mask) or len(mask) != shape[0]:
        return None
    frames: Tensor = to_frames(shape[1], mask)
    return frames.bool()


class Inputs:
    """The padding information of the call that is running: ``now``.

    Args:
        model: The model.
        bound: Its sites.
    """

    def __init__(self, model: nn.Module, bound: Iterable[BoundSite]) -> None:
        bound = list(bound)
        self._model = unwrap(model)
        self._kinds = {b.site.name: b.site.kind for b in bound}
        self._watcher = _MaskWatcher({b.site.name: b.layout.batch_axis for b in bound})
        self.begin(None)

    def begin(self, batch: Any) -> None:
        """Start a pass on this batch."""
        self._batch = batch
        self._here = True
        self._last = ""  # the site that runs, or ran last
        self._has_mask = isinstance(batch, Mapping) and _MASK in batch
        # Masks of this pass, to recognise them where a module is called with one.
        self._masks = [batch[_MASK]] if self._has_mask else []
        self._called: set[str] = set()
        self._handed: set[str] = set()  # modules that were called with one of the masks
        # By site of attention to its own sequence, the latest first.
        self._hidden: dict[str, _HiddenKeys] = {}
        self._watcher.forget()

    @property
    def now(self) -> PaddingInfo:
        """As of the attention that runs, or ran last."""
        # Queries of cross-attention are of the stream of the attention to itself next to it.
        same = _same_stack
        if self._kinds.get(self._last) == "cross":
            same = _same_layer
        stream: tuple[Visible, ...] = ()
        for name, hidden in self._hidden.items():
            if same(name, self._last) and hidden.visible:
                stream = hidden.visible
                break
        return PaddingInfo(self._batch, self._here, stream, self._watcher.hidden.visible)

    def called(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note the call of a module around attention, or of attention itself."""
        self._called.add(name)
        if not name:  # the whole model
            self._masks.append(_argument(module, args, kwargs, _MASK))
        if any(map(self._is_known_mask, tensors((args, kwargs)))):
            self._handed.add(name)
        if name not in self._kinds:
            # What the attentions inside hid belongs to the module's call before.
            inside = f"{name}." if name else ""
            for site in [site for site in self._hidden if site.startswith(inside)]:
                del self._hidden[site]

    def _is_known_mask(self, tensor: Tensor) -> bool:
        return any(tensor is mask for mask in self._masks)

    def see(self, kwargs: Mapping[str, Any]) -> None:
        """Take the mask that a part of the model is called with, if the batch has none."""
        if self._has_mask:
            return
        mask, away = kwargs.get(_MASK), kwargs.get("src_key_padding_mask")
        # A mask of floats is added to attention's scores: its numbers are no 0 and 1.
        if _is_mask(mask) and not mask.is_floating_point():
            self._batch = dict(kwargs)
            self._masks.append(mask)
        elif _is_mask(away) and away.dtype == torch.bool:
            self._batch = {_MASK: ~away}
            self._masks.append(away)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Start to watch an attention, which begins to run."""
        self._last = name
        self._here = self._is_here(name)
        hidden = self._watcher.enter(name, unmasked(_argument(module, args, kwargs, _MASK)))
        # The keys of cross-attention are another sequence.
        if self._kinds[name] != "cross":
            self._hidden.pop(name, None)
            self._hidden = {name: hidden, **self._hidden}

    def leave(self) -> None:
        """Stop watching an attention that has run."""
        self._watcher.leave()

    def _is_here(self, name: str) -> bool:
        """Whether the batch's mask is for a site.

        Take the last module on the way to the site that was called with the mask. The mask is for
        another part, such as a text tower next to a vision tower, if that module calls the part
        with the site without it, and has another part that hands on masks.
        """
        parts = name.split(".") if name else []
        # Names of the modules on the way: "", "encoder", "encoder.layer", ...
        path = [".".join(parts[:n]) for n in range(len(parts) + 1)]
        called = [n for n, part in enumerate(path) if part in self._called]
        # From the last module with the mask, or the parent of the first called one ...
        start = max(0, called[0] - 1)
        for n in called:
            if path[n] in self._handed:
                start = n
        # ... to the next module that is called.
        below = next((n for n in called if n > start), start)
        kind = type(self._model.get_submodule(path[below]))
        for n in range(start, below):
            parent = self._model.get_submodule(path[n])
            if _hands_masks_elsewhere(parent, parts[n], kind):
                return False
        return True


class _HiddenKeys:
    """Keys that one run of attention hid.

    Args:
        by_argument: By the mask that it was called with, for kernels that are not watched.
    """

    def __init__(self, by_argument: Visible | None = None) -> None:
        self.by_argument = by_argument
        self.seen: list[Visible] = []

    @property
    def visible(self) -> tuple[Visible, ...]:
        """Which keys it did not hide, per softmax or kernel."""
        if self.seen or self.by_argument is None:
            return tuple(self.seen)
        return (self.by_argument,)


class _MaskWatcher(TorchFunctionMode):
    """Reads what a running attention hides: scores at a softmax, masks at a kernel.

    Args:
        batch_axes: By site, the axis of its contexts that the examples are on.
    """

    def __init__(self, batch_axes: Mapping[str, int]) -> None:
        super().__init__()
        self.hidden = _HiddenKeys()
        self._batch_axes = batch_axes
        self._batch_axis = 0
        self._is_on = False
        # By id and version of a mask. The mask itself is kept so that no other one gets its id.
        self._cache: dict[tuple[int, int], tuple[Tensor, Visible]] = {}

    def forget(self) -> None:
        """Start a new pass."""
        self.leave()
        self.hidden = _HiddenKeys()
        self._cache = {}

    def enter(self, name: str, by_argument: Visible | None) -> _HiddenKeys:
        """Start to watch the attention of a site."""
        self.leave()
        self.hidden = _HiddenKeys(by_argument)
        self._batch_axis = self._batch_axes[name]
        self._is_on = True
        # Entered by a hook and left by another one, so there is no block.
        self.__enter__()  # type: ignore[no-untyped-call]
        return self.hidden

    def leave(self) -> None:
        """Stop; attention has run, or an error ended it."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = _READERS.get(getattr(func, "__name__", ""))
        if read is not None:
            keys = read(self, args, kwargs)
            if keys is not None:
                self.hidden.seen.append(keys)
        return func(*args, **kwargs)

    def _of_scores(self, args: Any, kwargs: Mapping[str, Any]) -> Visible | None:
        """The keys that ``softmax(scores, dim)`` does not hide."""
        scores = _call_argument(args, kwargs, 0, "input")
        dim = _call_argument(args, kwargs, 1, "dim")
        if scores.is_nested or scores.ndim < 2 or not isinstance(dim, int):
            return None
        if dim not in (-1, scores.ndim - 1):
            if self._batch_axis != 1 or scores.ndim != 4:
                return None
            # From [queries, batch, heads, keys] to [batch, heads, queries, keys].
            scores = scores.movedim(dim, -1).movedim(1, 0).movedim(1, -2)
        return visible(scores > HIDDEN)

    def _of_kernel(self, args: Any, kwargs: Mapping[str, Any]) -> Visible | None:
        """The keys that ``scaled_dot_product_attention(query, key, value, attn_mask)`` sees."""
        query = _call_argument(args, kwargs, 0, "query")
        key = _call_argument(args, kwargs, 1, "key")
        mask = _call_argument(args, kwargs, 3, "attn_mask")
        # Padding is asked for, so `is_causal` does not matter: without a mask all keys are seen.
        if mask is None:
            return None if key.is_nested else int(key.shape[-2])
        # The cache holds the mask too, so that no other tensor gets its id.
        version = 0 if mask.is_inference() else mask._version  # inference tensors have none
        known = id(mask), version
        if known not in self._cache:
            # [(batch,) (heads,) queries, keys], with ones for the axes that the mask lacks
            pairs: Tensor = mask.reshape((1,) * (query.ndim - mask.ndim) + mask.shape)
            if pairs.dtype != torch.bool:
                pairs = pairs > HIDDEN
            while len(self._cache) >= _CACHED_MASKS:  # the oldest entry goes first
                del self._cache[next(iter(self._cache))]
            self._cache[known] = mask, visible(pairs)
        return self._cache[known][1]

    def _of_module(self, args: Any, kwargs: Mapping[str, Any]) -> Visible | None:
        """The keys that PyTorch's ``multi_head_attention_forward`` sees."""
        mask = kwargs.get("key_padding_mask")
        if mask is None:
            return None
        # Booleans are True at padding; floats are added to the scores.
        pairs = ~mask if mask.dtype == torch.bool else mask > HIDDEN
        return visible(pairs.unsqueeze(-2))  # [batch, 1, keys]


#: By name of a function of PyTorch's, how the keys that it hides are read.
_READERS: dict[str, Callable[[_MaskWatcher, Any, Mapping[str, Any]], Visible | None]] = {
    "softmax": _MaskWatcher._of_scores,
    "scaled_dot_product_attention": _MaskWatcher._of_kernel,
    "multi_head_attention_forward": _MaskWatcher._of_module,
}


@contextmanager
def inputs_of(model: nn.Module, bound: Iterable[BoundSite]) -> Iterator[Inputs]:
    """Follow the padding of a model's calls inside the block.

    A batch with an ``attention_mask`` shows it, in the parts of the model that it is for. Other
    batches may hold the inputs of inner models, such as those of an encoder that runs once for each
    of two sentences. There the last mask counts with which a module around the attention was
    called: ``attention_mask`` ``[batch, tokens]``, or PyTorch's ``src_key_padding_mask``. In all of
    them attention shows what it hides.
    """
    # A feed-forward hides nothing: its tokens are those of the attention that ran before it.
    bound = list(bound)
    attention = [b for b in bound if not b.layout.is_feed_forward]
    if bound and not attention:
        attention = _attention_of(model)
    sites = {b.site.name: b.module for b in attention}
    inputs = Inputs(model, attention)

    def called(name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if name not in sites:
            inputs.see(kwargs)
        inputs.called(name, module, args, kwargs)
        if name in sites:
            inputs.enter(name, module, args, kwargs)

    def returned(module: nn.Module, args: Any, output: Any) -> None:
        inputs.leave()

    around = {"", *names_around(sites)} if sites else set()
    watched = {name: model.get_submodule(name) for name in around.difference(sites)}
    watched.update(sites)
    with ExitStack() as stack:
        stack.callback(inputs.leave)
        for name, module in watched.items():
            hook = functools.partial(called, name)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for module in sites.values():
            stack.callback(module.register_forward_hook(returned, always_call=True).remove)
        yield inputs


def _attention_of(model: nn.Module) -> list[BoundSite]:
    """All attention of a model, where there is some that a layout takes."""
    try:
        return bind(model)
    except UnsupportedModel:
        return []


# ---------------------------------------------------------------- arguments


def _is_mask(value: Any) -> TypeGuard[Tensor]:
    """Whether a value may be a mask ``[batch, tokens]``."""
    return isinstance(value, Tensor) and value.ndim == 2


def _call_argument(args: Any, kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _argument(module: nn.Module, args: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """What a module is called with under a name; None where nothing is."""
    if not args or name in kwargs:
        return kwargs.get(name)
    names = _parameters(module)
    return args[names.index(name)] if name in names[: len(args)] else None


def _parameters(module: nn.Module) -> tuple[str, ...]:
    return _parameters_of(getattr(type(module), "forward", None))


@functools.cache
def _parameters_of(forward: Any) -> tuple[str, ...]:
    """Names of a method's parameters, without ``self``."""
    if not inspect.isfunction(forward):  # compiled code has no signature
        return ()
    return tuple(inspect.signature(forward).parameters)[1:]


def _hands_masks_elsewhere(parent: nn.Module, part: str, kind: type) -> bool:
    """Whether a module has a part besides this one, of another class, that hands on masks."""
    for name, other in parent.named_children():
        if name != part and type(other) is not kind and _hands_on_masks(other):
            return True
    return False


def _hands_on_masks(module: nn.Module) -> bool:
    """Whether it takes an ``attention_mask``, and a part of it does."""
    if _MASK not in _parameters(module):
        return False
    return any(_MASK in _parameters(part) for part in module.modules() if part is not module)


# ---------------------------------------------------------------- names of sites


def _same_stack(name: str, other: str) -> bool:
    """Whether two sites are one, or the same part of two layers of a list.

    A layer without heads hides nothing itself, so that its neighbours' masks are taken.
    """
    a, b = name.split("."), other.split(".")
    if len(a) != len(b):
        return False
    differing = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    if not differing:
        return True
    return len(differing) == 1 and all(part.isdigit() for part in differing[0])


def _same_layer(name: str, other: str) -> bool:
    """Whether two sites lie as deep in one layer, as a decoder's two kinds of attention do."""
    a, b = name.split("."), other.split(".")
    if len(a) != len(b):
        return False
    n_common = 0
    while n_common < len(a) and a[n_common] == b[n_common]:
        n_common += 1
    if n_common == len(a) - 1:
        return True
    return n_common > 0 and a[n_common - 1].isdigit()
