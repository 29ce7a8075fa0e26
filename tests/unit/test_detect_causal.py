"""Kinds of detected attention: causal is what was seen to hide every later token, not what only
hides padding."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import headprune as hp
from headprune.detect.causality import is_causal

WIDTH, HEADS, LENGTH = 16, 4, 5
LOWEST = torch.finfo(torch.float32).min
EVERY = torch.ones(LENGTH, LENGTH).bool()
EARLIER = EVERY.tril()


class Attention(nn.Module):
    """No name and no flag tells what it attends to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.n = how, HEADS
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        seen = {"plain": EVERY, "window": EARLIER & ~EARLIER.tril(-2)}.get(how, EARLIER)
        self.register_buffer("seen", seen)

    def forward(self, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        read = x if other is None else other
        made = self.a(x), self.b(read), self.c(read)
        q, k, v = (t.unflatten(-1, (self.n, -1)).transpose(1, 2) for t in made)
        if self.how == "kernel":
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "kernel mask":
            seen = self.seen if mask is None else self.seen & mask[:, None, None, :].bool()
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            hidden = LOWEST if self.how == "large" else -torch.inf
            scores = (q @ k.transpose(-1, -2)).masked_fill(~self.seen, hidden)
            if mask is not None:
                # As Transformers 4 added it: a row of padding alone sees everything alike
                scores = scores + (1 - mask[:, None, None, :]) * LOWEST
            out = scores.softmax(-1) @ v
        return self.d(out.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    def __init__(self, *how: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Attention(h) for h in how])

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        for part in self.parts:
            x = x + part(x, mask=attention_mask if hidden is None else 1 - hidden)
        return x


class TwoSequences(nn.Module):
    """A decoder of sequences as long as the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = Attention("plain"), Attention("buffer")
        self.cross_attention = Attention("plain")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        read = x + self.encode(x)
        y = y + self.decode(y)
        return y + self.cross_attention(y, read)


class Twice(nn.Module):
    """Hides later tokens in one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Attention("plain")

    def forward(self, x: Tensor) -> Tensor:
        self.part.seen = EARLIER
        x = x + self.part(x)
        self.part.seen = EVERY
        return x + self.part(x)


def kinds(model: nn.Module, example: Any) -> list[str]:
    found = hp.propose_layouts(model, example)
    assert not found.refused, str(found)
    again = pickle.loads(pickle.dumps(found))
    sites = hp.find_sites(model, layouts=found)
    assert sites == hp.find_sites(model, layouts=again)
    return [site.kind for site in sites]


def rows() -> Tensor:
    return torch.randn(3, LENGTH, WIDTH)


def padded(*lengths: int, left: bool = False) -> Tensor:
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).double()
    return mask.flip(-1) if left else mask


@pytest.mark.parametrize("how", ["buffer", "window", "large", "kernel", "kernel mask"])
def test_a_masked_decoder_is_causal(how: str) -> None:
    assert kinds(Layers(how), rows()) == ["causal"]


@pytest.mark.parametrize(
    ("how", "left"), [("buffer", False), ("kernel mask", False), ("large", True)]
)
def test_a_padded_decoder_is_causal(how: str, left: bool) -> None:
    batch = {"x": rows(), "attention_mask": padded(2, 5, 3, left=left)}
    assert kinds(Layers(how), batch) == ["causal"]


@pytest.mark.parametrize(
    ("lengths", "name"),
    [((2, 5, 3), "attention_mask"), ((1, 2, 3), "hidden"), ((1, 1, 1), "attention_mask")],
)
def test_an_encoder_with_padding_is_not(lengths: tuple[int, ...], name: str) -> None:
    mask = padded(*lengths)
    batch = {"x": rows(), name: mask if name == "attention_mask" else 1 - mask}
    assert kinds(Layers("plain"), batch) == ["self"]


def test_modules_of_one_build_have_kinds_of_their_own() -> None:
    assert kinds(Layers("plain", "buffer", "plain"), rows()) == ["self", "causal", "self"]


def test_cross_attention_to_a_sequence_as_long_is_cross() -> None:
    assert kinds(TwoSequences(), {"x": rows(), "y": rows()}) == ["self", "causal", "cross"]


def test_a_module_that_is_causal_in_one_of_its_calls_is_not() -> None:
    assert kinds(Twice(), rows()) == ["self"]


def test_a_layout_of_causal_modules_fits_a_deeper_model() -> None:
    found = hp.propose_layouts(Layers("buffer"), rows())
    deeper = hp.find_sites(Layers("buffer", "buffer"), layouts=found)
    assert [site.kind for site in deeper] == ["causal", "causal"]


PAIRS = {
    "itself": (torch.eye(4).bool(), False),
    "not itself": (EARLIER.tril(-1), False),
    "more keys": (EARLIER[:4], False),
    "one token": (EVERY[:1, :1], False),
    "later ones": (EARLIER.mT, False),
    "the next one": (EVERY.tril(1), False),
    "earlier ones": (EARLIER.expand(2, 3, LENGTH, LENGTH), True),
    "one head sees all": (torch.stack([EARLIER] * 3 + [EVERY]), False),
}


@pytest.mark.parametrize(("pairs", "causal"), PAIRS.values(), ids=PAIRS)
def test_what_is_causal(pairs: Tensor, causal: bool) -> None:
    assert is_causal(pairs, torch.zeros(2, LENGTH)) is causal
