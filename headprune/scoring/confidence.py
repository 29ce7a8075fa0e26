"""How sure a head is where to look: the mean of its largest attention weight (Voita et al.
2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.model.losses import is_encoder_decoder
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
    excluded. Higher is more confident, which the paper finds to go with importance. **A statistic
    of the map, not importance.**

    Source: Voita et al. 2019, "Analyzing Multi-Head Self-Attention", section 4. There the end of
    the sentence is left out; here also other tokens of your choice, both as what looks and as what
    is looked at. Every example counts the same, whatever its length; a unit of several heads is
    their mean. Needs maps: Transformers' models run eagerly for the pass, our own attention shows
    its weights, a fused kernel is refused.

    When: to look at heads, or to repeat what papers did; not to choose which heads stay.

    Args:
        exclude: Ids of the tokens to leave out; None is the model's ``eos_token_id``, where its
            configuration has one (BERT's has none: give those of [CLS] and [SEP]). PaddingInfo from
            ``input_ids`` and ``decoder_input_ids`` (or ``labels``); where a batch has no ids
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
        excluded = _end_tokens(problem.model) if self.exclude is None else self.exclude
        if not excluded or not isinstance(batch, Mapping):
            return queries, keys
        decoder = b.site.kind != "self" and is_encoder_decoder(problem.model)
        reads = _decoder_ids(problem.model, batch) if decoder else batch.get("input_ids")
        seen = batch.get("input_ids") if b.site.kind == "cross" else reads
        return _without(queries, reads, excluded), _without(keys, seen, excluded)


def _without(counted: Tensor, ids: Any, excluded: tuple[int, ...]) -> Tensor:
    if not isinstance(ids, Tensor) or ids.shape != counted.shape:
        return counted
    return counted & ~torch.isin(ids, sent(excluded, ids.device)).to(counted.device)


def _end_tokens(model: nn.Module) -> tuple[int, ...]:
    found = getattr(getattr(model, "config", None), "eos_token_id", None)
    return (
        () if found is None else tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    )


def _decoder_ids(model: Any, batch: Mapping[str, Any]) -> Any:
    """What the decoder reads: its own inputs, or those that the model makes from the labels."""
    labels, make = (
        batch.get("labels"),
        getattr(model, "prepare_decoder_input_ids_from_labels", None),
    )
    if batch.get("decoder_input_ids") is not None or make is None or not isinstance(labels, Tensor):
        return batch.get("decoder_input_ids")
    return make(labels)
