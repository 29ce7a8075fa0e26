"""How sure a head is where to look: the mean of its largest attention weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.model.losses import decoder_ids, is_encoder_decoder
from headprune.model.padding import PaddingInfo
from headprune.model.sites import BoundSite
from headprune.model.transfers import sent
from headprune.scoring._base import ScoringProblem
from headprune.scoring._maps import MapScorer, visible


@dataclass(frozen=True)
class Confidence(MapScorer):
    """``I_h = mean_i mean_q max_k A_qk`` without the end of the sequence: one eager forward pass,
    no labels.

    A is the head's attention map; q and k run over the tokens that are neither padding nor
    excluded. Higher is more confident, which the paper finds to correlate with importance.
    **A statistic of the map, not importance.**

    Source: Voita et al. 2019, "Analyzing Multi-Head Self-Attention", section 4. There the end of
    the sentence is left out; here also other tokens of your choice, both as queries and as keys.
    Every example counts the same, whatever its length; a unit of several heads is their mean. Needs
    maps: Transformers' models run eagerly for the pass, our own attention shows its weights, a
    fused kernel is refused.

    When: to study heads, or to repeat results of papers; not to choose which heads to keep.

    Args:
        exclude: Ids of the tokens to leave out; None is the model's ``eos_token_id``, where its
            configuration has one (BERT's has none: give those of [CLS] and [SEP]). They are looked
            up in ``input_ids`` and ``decoder_input_ids`` (or ``labels``); where a batch has no ids
            nothing is left out.
    """

    exclude: tuple[int, ...] | None = None

    def of_rows(self, probabilities: Tensor) -> Tensor:
        return probabilities.amax(-1)

    def kept(
        self, problem: ScoringProblem, b: BoundSite, given: PaddingInfo, shape: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        queries, keys = visible(problem.model, b, given, shape)
        batch = given.batch
        excluded = self.exclude
        if excluded is None:
            excluded = _end_tokens(problem.model)
        if not excluded or not isinstance(batch, Mapping):
            return queries, keys
        ids = batch.get("input_ids")
        query_ids = key_ids = ids
        if b.site.kind != "self" and is_encoder_decoder(problem.model):
            query_ids = decoder_ids(problem.model, batch)
            # Cross-attention takes its keys from the encoder.
            key_ids = ids if b.site.kind == "cross" else query_ids
        return _without(queries, query_ids, excluded), _without(keys, key_ids, excluded)


def _without(counted: Tensor, ids: Any, excluded: tuple[int, ...]) -> Tensor:
    """The tokens that count, ``[examples, tokens]``, less those with excluded ids."""
    if not isinstance(ids, Tensor) or ids.shape != counted.shape:
        return counted
    return counted & ~torch.isin(ids, sent(excluded, ids.device)).to(counted.device)


def _end_tokens(model: nn.Module) -> tuple[int, ...]:
    """The ids of the model's end of a sequence: none, one or several."""
    ids = getattr(getattr(model, "config", None), "eos_token_id", None)
    if ids is None:
        return ()
    if isinstance(ids, (list, tuple)):
        return tuple(ids)
    return (int(ids),)
