"""``attention_maps``: what every head attends to in some examples, for pictures and for words about
heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import AttentionSite
from headprune.maps.attention_maps import AttentionMaps, SiteMaps
from headprune.model.inside import bare
from headprune.model.losses import default_loss, is_encoder_decoder
from headprune.model.mistakes import explained_one
from headprune.model.padding import PaddingInfo
from headprune.model.running import batch_size, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, bind, unwrap
from headprune.scoring._activations import run
from headprune.scoring._maps import Places, by_example, checked_runs, eager, mapping, told, visible


def attention_maps(
    model: nn.Module,
    batch: Any,
    *,
    sites: Iterable[AttentionSite] | None = None,
    tokenizer: Any = None,
    image: tuple[int, int] | None = None,
) -> AttentionMaps:
    """The attention weights of every head on one batch, as the model itself computes them; it is
    left as it was.

    Transformers' models run eagerly for the pass, our own attention shows its weights; a fused
    kernel makes no map and is refused. Of a module that runs several times in a pass the first run
    is shown.

    Args:
        model: A model with known attention, whole or cut; run in evaluation mode.
        batch: One batch of what the model takes; a few examples make a picture.
        sites: Default ``find_sites(model)``.
        tokenizer: Turns token numbers into words (``convert_ids_to_tokens``), to write beside the
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
    bound = [b for b in bind(model, sites) if b.site.heads]
    if not bound:
        raise UnsupportedModel("the model", "one with a head left", "no head at any site")
    batch = to_device(batch, device_of(model))
    size = batch_size(batch)
    with (
        undisturbed(model),
        torch.no_grad(),
        eager(model) as taken,
        mapping(bound, Places()) as maps,
    ):
        batch = taken(batch)
        with told(model, bound, batch) as given, explained_one(model, batch, "batch"):
            run(model, batch, default_loss)
        shown = maps()
    found = [_site(model, b, shown[i], given[i], size) for i, b in enumerate(bound)]
    tokens, targets = ((), ()) if tokenizer is None else _words(model, batch, tokenizer)
    return AttentionMaps(tuple(found), tokens, targets, image)


def _site(
    model: nn.Module, b: BoundSite, runs: list[Tensor], given: list[PaddingInfo], size: int
) -> SiteMaps:
    weights = by_example(b, checked_runs(b, runs)[0], size).cpu().float()
    masks = (mask.cpu() for mask in visible(model, b, given[0], (size, *weights.shape[2:])))
    queries, keys = (mask.expand(size, -1) for mask in masks)
    seen = queries[:, None, :, None] & keys[:, None, None, :]
    shown = weights.masked_fill(~seen, 0).numpy()  # rows of padding may be NaN
    return SiteMaps(
        b.site.name, b.site.kind, b.site.heads, shown, queries.numpy().copy(), keys.numpy().copy()
    )


def _words(model: nn.Module, batch: Any, tokenizer: Any) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Tokens of the batch, and of the decoder where it has one."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        got = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise InvalidValue(
            "attention_maps(tokenizer=)", "left out where the batch has no input_ids", got
        )
    ids = batch["input_ids"]
    read = _row_words(tokenizer, ids, batch.get("attention_mask"))
    if not is_encoder_decoder(model):
        return read, ()
    target, mask = batch.get("decoder_input_ids"), batch.get("decoder_attention_mask")
    if target is None:
        labels = batch["labels"]
        first: int = bare(model).config.decoder_start_token_id  # type: ignore[union-attr, assignment]
        start = labels.new_full((len(labels), 1), first)
        target = torch.cat([start, labels[:, :-1]], 1)
        mask = (
            labels != -100 if mask is None else mask
        )  # a query counts where there is a token to tell
    return read, _row_words(tokenizer, target, mask)


def _row_words(tokenizer: Any, ids: Tensor, mask: Tensor | None) -> tuple[tuple[str, ...], ...]:
    masks = torch.ones_like(ids) if mask is None else mask
    rows = (row[kept.bool()].tolist() for row, kept in zip(ids, masks, strict=True))
    # Byte pairs are spelled in letters that stand for bytes: "ü" is two of them.
    byte_pairs = "ByteLevel" in repr(
        getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    )
    words = (tuple(map(str, tokenizer.convert_ids_to_tokens(row))) for row in rows)
    return tuple(
        tuple(_readable(word, tokenizer) for word in row) if byte_pairs else row for row in words
    )


def _readable(token: str, tokenizer: Any) -> str:
    """A byte pair as text, with a mark where a word or a line begins; what is a part of a letter
    stays as it is."""
    text = str(tokenizer.convert_tokens_to_string([token]))
    return token if "\ufffd" in text else text.replace(" ", "▁").replace("\n", "↵")
