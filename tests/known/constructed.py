"""Weights written by hand: a previous-token head, an induction head that reads it, and eight
decoys.

The residual stream is five subspaces side by side, and the unembedding reads the last of them
alone:

| subspace | width | who writes it |
| --- | --- | --- |
| token | N_TOKENS | embedding: one-hot, zero for BOS |
| position | LENGTH | embedding: one-hot |
| previous | N_TOKENS | head ``previous``: the one-hot token one position back |
| scrap | N_TOKENS | decoys; read by a decoy only |
| answer | N_TOKENS | head ``induction``: the predicted token |

A head's query and key are each a subspace of the stream as it is, or shifted by one position. As
these are one-hot, a query meets a key with SHARPNESS or with 0, and the softmax is near one-hot; a
head without a query attends evenly.

Layer 0, ``previous``: the query is position t - 1, the key is position, the value is token, written
to *previous*. Layer 1, ``induction``: the query is token, the key is *previous*, so it looks where
the token before was the present one; the value is token, written to *answer*. Without ``previous``
it sees all positions alike; without ``induction`` nothing is written that tells one answer from
another. So both are necessary, and together they suffice.

The decoys are loud, or change what is read by less than what it takes to change an answer:

- ``loud`` (both layers) attends evenly and writes to *scrap*, 30 times what it reads; that of layer
  1 reads *scrap*, so it depends on the decoys before it;
- ``sharp`` (layer 0) attends to BOS with certainty and writes its position to *scrap*, as loudly;
- ``twin`` (both layers) attends exactly as the necessary head of its layer and writes to *scrap*,
  as loudly;
- ``murmur`` (both layers) attends evenly and writes a little of every token to what the necessary
  head of its layer writes, within the margin of the answer: the loss changes, no prediction does;
- ``shift`` (layer 1) adds the same number to every answer, as large as an answer; the softmax does
  not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headprune import HeadId, MultiHeadAttention
from tests.known.induction import LENGTH, N_TOKENS, AttentionOnly

SHARPNESS = 12.0  # of a match over no match, before the softmax
ANSWER = 10.0  # logit of the predicted token over the others
LOUD = 30.0
MURMUR = 0.2  # of what the necessary head writes, spread over the tokens seen

_WIDTHS = {
    "token": N_TOKENS,
    "position": LENGTH,
    "previous": N_TOKENS,
    "scrap": N_TOKENS,
    "answer": N_TOKENS,
}
_SPACES: dict[str, slice] = {}
for _name, _width in _WIDTHS.items():
    _start = sum(_WIDTHS[before] for before in _SPACES)
    _SPACES[_name] = slice(_start, _start + _width)


@dataclass(frozen=True)
class Head:
    """A head in words.

    Args:
        name: What the text above calls it.
        value, to: The subspaces it reads from and writes to; ``one`` is the constant, spread over
        all of ``to``.
        size: What is written for a value of one.
        query, key: Subspaces that are compared; empty attends evenly.
        back: Positions that the query is moved back; None asks for position 0, which is BOS.
    """

    name: str
    value: str
    to: str
    size: float = 1.0
    query: str = ""
    key: str = ""
    back: int | None = 0


LAYERS = (
    (
        Head("loud", "token", "scrap", LOUD),
        Head("sharp", "position", "scrap", LOUD, "position", "position", back=None),
        Head("murmur", "token", "previous", MURMUR),
        Head("previous", "token", "previous", 1.0, "position", "position", back=1),
        Head("twin", "token", "scrap", LOUD, "position", "position", back=1),
    ),
    (
        Head("loud", "scrap", "scrap", LOUD),
        Head("twin", "token", "scrap", LOUD, "token", "previous"),
        Head("induction", "token", "answer", ANSWER, "token", "previous"),
        Head("murmur", "token", "answer", MURMUR * ANSWER),
        Head("shift", "one", "answer", ANSWER),
    ),
)


def _heads(necessary: bool) -> tuple[HeadId, ...]:
    return tuple(
        HeadId(f"layers.{layer}", index)
        for layer, heads in enumerate(LAYERS)
        for index, head in enumerate(heads)
        if (head.name in ("previous", "induction")) == necessary
    )


NECESSARY, DECOYS = _heads(True), _heads(False)


def constructed(layers: Sequence[Sequence[Head]] = LAYERS) -> AttentionOnly:
    """The model, fp32, in evaluation mode."""
    model = AttentionOnly(
        sum(_WIDTHS.values()),
        tuple(map(len, layers)),
        head_dim=LENGTH,
        value_dim=LENGTH,
        bias=False,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.token.weight[:N_TOKENS, _SPACES["token"]] = torch.eye(N_TOKENS)
        model.position.weight[:, _SPACES["position"]] = torch.eye(LENGTH)
        model.unembed.weight[:, _SPACES["answer"]] = torch.eye(N_TOKENS)
        for module, heads in zip(model.layers, layers, strict=True):
            for index, head in enumerate(heads):
                _write_(module, index, head)
    return model.eval()


def _write_(module: MultiHeadAttention, index: int, head: Head) -> None:
    rows = slice(index * LENGTH, (index + 1) * LENGTH)
    query, key, value = (w.weight[rows] for w in (module.W_q, module.W_k, module.W_v))
    output = module.W_o.weight[:, rows]
    if head.query:
        # attention divides by the square root of head_dim
        query[:, _SPACES[head.query]] = (
            SHARPNESS * LENGTH**0.5 * _moved(_WIDTHS[head.query], head.back)
        )
        key[: _WIDTHS[head.key], _SPACES[head.key]] = torch.eye(_WIDTHS[head.key])
    if head.value == "one":  # one-hot positions add up to one
        value[0, _SPACES["position"]] = 1.0
        output[_SPACES[head.to], 0] = head.size
        return
    width = min(_WIDTHS[head.value], _WIDTHS[head.to])
    value[:, _SPACES[head.value]] = torch.eye(LENGTH, _WIDTHS[head.value])
    output[_SPACES[head.to], :width] = head.size * torch.eye(_WIDTHS[head.to], width)


def _moved(width: int, back: int | None) -> Tensor:
    """``[LENGTH, width]``: takes one-hot t to one-hot t - back; with None, every t to one-hot 0."""
    if back is None:
        first = torch.zeros(LENGTH, width)
        first[0] = 1.0
        return first
    return torch.eye(LENGTH, width).roll(-back, 0)
