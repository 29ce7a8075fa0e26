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
from headprune.detect import propose
from headprune.detect.causality import is_causal
from headprune.layouts import registry

WIDTH, HEADS, LENGTH = 16, 4, 5


class Attention(nn.Module):
    """No name and no flag tells what it attends to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.n = how, HEADS
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("tril", torch.ones(LENGTH, LENGTH).tril())

    def forward(self, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        read = x if other is None else other
        q, k, v = (
            t.unflatten(-1, (self.n, -1)).transpose(1, 2)
            for t in (self.a(x), self.b(read), self.c(read))
        )
        if self.how == "kernel":
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "kernel mask":
            hidden = (
                self.tril.bool()
                if mask is None
                else self.tril.bool() & mask[:, None, None, :].bool()
            )
            out = scaled_dot_product_attention(q, k, v, attn_mask=hidden)
        else:
            scores = q @ k.transpose(-1, -2)
            if self.how in ("buffer", "window"):
                scores = scores.masked_fill(self.tril == 0, float("-inf"))
            if self.how == "window":
                scores = scores.masked_fill(self.tril.tril(-2) == 1, float("-inf"))
            if self.how == "large":
                scores = scores + (1 - self.tril) * torch.finfo(torch.float32).min
            if (
                mask is not None
            ):  # as Transformers 4 added it: a row of padding alone sees everything alike
                scores = scores + (1 - mask[:, None, None, :]) * torch.finfo(torch.float32).min
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
        self.encode, self.decode, self.cross_attention = (
            Attention("plain"),
            Attention("buffer"),
            Attention("plain"),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        read = x + self.encode(x)
        y = y + self.decode(y)
        return y + self.cross_attention(y, read)


def kinds(model: nn.Module, example: Any) -> list[str]:
    found = hp.propose_layouts(model, example)
    assert not found.refused, str(found)
    again = pickle.loads(pickle.dumps(found))
    sites = hp.find_sites(model, layouts=found)
    assert sites == hp.find_sites(model, layouts=again)
    return [site.kind for site in sites]


def rows(count: int = 3) -> Tensor:
    return torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def padded(*lengths: int, left: bool = False) -> Tensor:
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).double()
    return mask.flip(-1) if left else mask


@pytest.mark.parametrize("how", ["buffer", "window", "large", "kernel", "kernel mask"])
def test_a_masked_decoder_is_causal(how: str) -> None:
    torch.manual_seed(0)
    assert kinds(Layers(how, how), rows()) == ["causal", "causal"]


@pytest.mark.parametrize(
    ("how", "left"), [("buffer", False), ("kernel mask", False), ("large", False), ("large", True)]
)
def test_a_padded_decoder_is_causal(how: str, left: bool) -> None:
    torch.manual_seed(0)
    mask = padded(2, 5, 3, left=left)
    assert kinds(Layers(how), {"x": rows(), "attention_mask": mask}) == ["causal"]


@pytest.mark.parametrize("name", ["attention_mask", "hidden"])
@pytest.mark.parametrize("lengths", [(2, 5, 3), (1, 2, 3), (1, 1, 1), (5, 5, 5)])
def test_an_encoder_with_padding_is_not(lengths: tuple[int, ...], name: str) -> None:
    torch.manual_seed(0)
    mask = padded(*lengths)
    given = {"x": rows(), name: mask if name == "attention_mask" else 1 - mask}
    assert kinds(Layers("plain", "plain"), given) == ["self", "self"]


def test_modules_of_one_build_have_kinds_of_their_own() -> None:
    torch.manual_seed(0)
    assert kinds(Layers("plain", "buffer", "plain"), rows()) == ["self", "causal", "self"]


def test_cross_attention_to_a_sequence_as_long_stays_cross() -> None:
    torch.manual_seed(0)
    assert kinds(TwoSequences(), {"x": rows(), "y": rows().flip(0)}) == ["self", "causal", "cross"]


def test_a_module_that_is_causal_in_one_of_its_calls_is_not() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Attention("plain")

        def forward(self, x: Tensor) -> Tensor:
            self.part.how = "buffer"
            x = x + self.part(x)
            self.part.how = "plain"
            return x + self.part(x)

    torch.manual_seed(0)
    assert kinds(Twice(), rows()) == ["self"]


def test_a_layout_of_causal_modules_fits_a_deeper_model() -> None:
    torch.manual_seed(0)
    found = hp.propose_layouts(Layers("buffer"), rows())
    assert [site.kind for site in hp.find_sites(Layers(*["buffer"] * 3), layouts=found)] == [
        "causal"
    ] * 3


@pytest.mark.parametrize(
    ("layout", "family", "kind"), [("bert", "bert", "self"), ("llama", "llama", "causal")]
)
def test_known_families_are_of_their_kind(
    layout: str, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = registry.get(layout).tiny(0, family)
    for part in model.modules():  # no flag tells
        part.__dict__.pop("is_causal", None)
    monkeypatch.setattr(propose, "_taken", lambda model, layouts: [])
    assert set(kinds(model, batch)) == {kind}


@pytest.mark.parametrize(
    ("pairs", "causal"),
    [
        (torch.eye(4).bool(), False),
        (torch.ones(4, 4).bool().tril(-1), False),
        (torch.ones(4, 5).bool().tril(), False),
        (torch.ones(1, 1).bool(), False),
        (torch.ones(4, 4).bool().triu(), False),
        (torch.ones(4, 4).bool().tril(1), False),
        (torch.ones(2, 3, 4, 4).bool().tril(), True),
        (torch.stack([torch.ones(4, 4).bool().tril()] * 3 + [torch.ones(4, 4).bool()]), False),
    ],
    ids=[
        "itself",
        "not itself",
        "more keys",
        "one token",
        "later ones",
        "the next one",
        "causal",
        "one head sees all",
    ],
)
def test_what_is_causal(pairs: Tensor, causal: bool) -> None:
    assert is_causal(pairs, torch.zeros(2, 4)) is causal
