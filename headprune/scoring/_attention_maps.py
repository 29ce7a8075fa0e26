"""``attention_maps``: what every head attends to in some examples, for pictures of heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import AttentionSite
from headprune.maps.attention_maps import AttentionMaps, SiteMaps
from headprune.model.inside import bare
from headprune.model.losses import decoder_ids, default_loss, is_encoder_decoder
from headprune.model.mistakes import explained_one
from headprune.model.padding import PaddingInfo
from headprune.model.running import batch_size, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, bind, unwrap
from headprune.scoring._activations import run
from headprune.scoring._base import with_heads
from headprune.scoring._maps import (
    Places,
    by_example,
    checked_runs,
    eager,
    mapping,
    padding_info,
    visible,
)

#: Of every example its tokens, as text.
Words: TypeAlias = tuple[tuple[str, ...], ...]


def attention_maps(
    model: nn.Module,
    batch: Any,
    *,
    sites: Iterable[AttentionSite] | None = None,
    tokenizer: Any = None,
    image: tuple[int, int] | None = None,
) -> AttentionMaps:
    """Compute the attention weights of every head on one batch, without changing the model.

    Transformers' models run eagerly for the pass, our own attention returns its weights; a fused
    kernel makes no map and is refused. Of a module that runs several times in a pass the first run
    is shown.

    Args:
        model: A model with known attention, whole or cut; run in evaluation mode.
        batch: One batch of what the model takes; a few examples make a picture.
        sites: Default ``find_sites(model)``.
        tokenizer: Turns token numbers into words (``convert_ids_to_tokens``), the labels of the
            weights.
        image: Rows and columns of the patches, for a model that reads images.

    Raises:
        InvalidValue: no example, or a tokenizer without token numbers in the batch.
        UnsupportedModel: an attention that shows no map.

    >>> import torch
    >>> from headprune import HeadId, MultiHeadAttention
    >>> model = torch.nn.Sequential(MultiHeadAttention(8, 2))
    >>> maps = attention_maps(model, torch.randn(3, 5, 8))
    >>> maps, maps[HeadId("0", 1)].shape
    (AttentionMaps of 2 heads at 1 sites, 3 examples, (3, 5, 5))
    """
    model = unwrap(model)
    bound = with_heads(bind(model, sites))
    if not bound:
        raise UnsupportedModel("the model", "one with a head", "no head at any site")
    batch = to_device(batch, device_of(model))
    size = batch_size(batch)
    with (
        undisturbed(model),
        torch.no_grad(),
        eager(model) as taken,
        mapping(bound, Places()) as maps,
    ):
        batch = taken(batch)
        with padding_info(model, bound, batch) as given, explained_one(model, batch, "batch"):
            run(model, batch, default_loss)
        shown = maps()
    site_maps = [_site(model, b, shown[i], given[i], size) for i, b in enumerate(bound)]
    tokens: Words = ()
    targets: Words = ()
    if tokenizer is not None:
        tokens, targets = _words(model, batch, tokenizer)
    return AttentionMaps(tuple(site_maps), tokens, targets, image)


def _site(
    model: nn.Module, b: BoundSite, runs: list[Tensor], given: list[PaddingInfo], size: int
) -> SiteMaps:
    """The maps of a site's first run, with zeros at padding."""
    # [examples, heads, queries, keys]
    weights = by_example(b, checked_runs(b, runs)[0], size).cpu().float()
    masks = visible(model, b, given[0], (size, *weights.shape[2:]))
    queries, keys = (mask.cpu().expand(size, -1) for mask in masks)
    counted = queries[:, None, :, None] & keys[:, None, None, :]
    shown = weights.masked_fill(~counted, 0).numpy()  # rows of padding may be NaN
    return SiteMaps(
        b.site.name, b.site.kind, b.site.heads, shown, queries.numpy().copy(), keys.numpy().copy()
    )


def _words(model: nn.Module, batch: Any, tokenizer: Any) -> tuple[Words, Words]:
    """Tokens of the batch, and of the decoder where it has one."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        got: Any = type(batch).__name__
        if isinstance(batch, Mapping):
            got = sorted(map(str, batch))
        must = "left out where the batch has no input_ids"
        raise InvalidValue("attention_maps(tokenizer=)", must, got)
    ids = batch["input_ids"]
    read = _row_words(tokenizer, ids, batch.get("attention_mask"))
    if not is_encoder_decoder(model):
        return read, ()
    target, mask = decoder_ids(model, batch), batch.get("decoder_attention_mask")
    if target is None and isinstance(batch.get("labels"), Tensor):
        target = _shifted(model, batch["labels"])
    if target is None:
        must = "left out where the batch has neither decoder_input_ids nor labels"
        raise InvalidValue("attention_maps(tokenizer=)", must, sorted(map(str, batch)))
    if mask is None and batch.get("decoder_input_ids") is None:
        # A query counts where there is a token to predict.
        mask = batch["labels"] != -100
    return read, _row_words(tokenizer, target, mask)


def _shifted(model: nn.Module, labels: Tensor) -> Tensor:
    """The labels one place to the right, for a model without a method that makes them."""
    config: Any = bare(model).config
    start = labels.new_full((len(labels), 1), config.decoder_start_token_id)
    read = torch.cat([start, labels[:, :-1]], 1)
    return read.masked_fill(read == -100, config.pad_token_id or 0)


def _row_words(tokenizer: Any, ids: Tensor, mask: Tensor | None) -> Words:
    """The tokens of every row that are no padding."""
    masks = torch.ones_like(ids) if mask is None else mask
    # Byte pairs are spelled in letters that stand for bytes: "ü" is two of them.
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    has_byte_pairs = "ByteLevel" in repr(decoder)
    rows = []
    for row, kept in zip(ids, masks, strict=True):
        words = list(map(str, tokenizer.convert_ids_to_tokens(row[kept.bool()].tolist())))
        if has_byte_pairs:
            words = [_readable(word, tokenizer) for word in words]
        rows.append(tuple(words))
    return tuple(rows)


def _readable(token: str, tokenizer: Any) -> str:
    """A byte pair as text, with a mark where a word or a line begins.

    A byte pair that is a part of a letter is not changed.
    """
    text = str(tokenizer.convert_tokens_to_string([token]))
    if "\ufffd" in text:
        return token
    return text.replace(" ", "▁").replace("\n", "↵")
