"""Kinds of detected attention: causal is what was seen to hide every later token, not what only
hides padding."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import headprune as hp
from headprune.detect.causality import is_causal

WIDTH, HEADS, LENGTH = 16, 4, 5
LOWEST = torch.finfo(torch.float32).min
EVERY = torch.ones(LENGTH, LENGTH).bool()
EARLIER = EVERY.tril()


class Attention(nn.Module):
    """No name and no flag tells what it attends to."""

    def __init__(self, how):
        super().__init__()
        self.how, self.n = how, HEADS
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        seen = {"plain": EVERY, "window": EARLIER & ~EARLIER.tril(-2)}.get(how, EARLIER)
        self.register_buffer("seen", seen)

    def forward(self, x, other=None, mask=None):
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
    def __init__(self, *how):
        super().__init__()
        self.parts = nn.ModuleList([Attention(h) for h in how])

    def forward(self, x, attention_mask=None, hidden=None):
        for part in self.parts:
            x = x + part(x, mask=attention_mask if hidden is None else 1 - hidden)
        return x


class TwoSequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = Attention("plain"), Attention("buffer")
        self.cross_attention = Attention("plain")

    def forward(self, x, y):
        read = x + self.encode(x)
        y = y + self.decode(y)
        return y + self.cross_attention(y, read)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Attention("plain")

    def forward(self, x):
        self.part.seen = EARLIER
        x = x + self.part(x)
        self.part.seen = EVERY
        return x + self.part(x)


def kinds(model, example):
    found = hp.propose_layouts(model, example)
    assert not found.refused, str(found)
    again = pickle.loads(pickle.dumps(found))
    sites = hp.find_sites(model, layouts=found)
    assert sites == hp.find_sites(model, layouts=again)
    return [site.kind for site in sites]


def rows():
    return torch.randn(3, LENGTH, WIDTH)


def padded(*lengths, left=False):
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).double()
    return mask.flip(-1) if left else mask


def mask(*lengths, left=False):
    return {"attention_mask": padded(*lengths, left=left)}


#: A model, what it is called with besides rows, and the kinds of its attentions.
KINDS = {
    "buffer": (Layers("buffer"), {}, ["causal"]),
    "window": (Layers("window"), {}, ["causal"]),
    "large": (Layers("large"), {}, ["causal"]),
    "kernel": (Layers("kernel"), {}, ["causal"]),
    "kernel mask": (Layers("kernel mask"), {}, ["causal"]),
    "padded": (Layers("buffer"), mask(2, 5, 3), ["causal"]),
    "padded kernel mask": (Layers("kernel mask"), mask(2, 5, 3), ["causal"]),
    "padded left": (Layers("large"), mask(2, 5, 3, left=True), ["causal"]),
    "encoder": (Layers("plain"), mask(2, 5, 3), ["self"]),
    "encoder, hidden": (Layers("plain"), {"hidden": 1 - padded(1, 2, 3)}, ["self"]),
    "encoder of one token": (Layers("plain"), mask(1, 1, 1), ["self"]),
    "kinds of their own": (Layers("plain", "buffer"), {}, ["self", "causal"]),
    "as long as the encoder's": (TwoSequences(), {"y": rows()}, ["self", "causal", "cross"]),
    "causal in one of its calls": (Twice(), {}, ["self"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_told_by_what_is_hidden(name):
    model, more, expected = KINDS[name]
    assert kinds(model, {"x": rows(), **more}) == expected


def test_a_layout_of_causal_modules_fits_a_deeper_model():
    found = hp.propose_layouts(Layers("buffer"), rows())
    deeper = hp.find_sites(Layers("buffer", "buffer"), layouts=found)
    assert [site.kind for site in deeper] == ["causal", "causal"]


def test_what_is_causal():
    for pairs, causal in (
        (torch.eye(4).bool(), False),
        (EARLIER.tril(-1), False),
        (EARLIER[:4], False),  # more keys than queries
        (EVERY[:1, :1], False),
        (EVERY.tril(1), False),
        (EARLIER.expand(2, 3, LENGTH, LENGTH), True),
        (torch.stack([EARLIER, EVERY]), False),  # one head sees all
    ):
        assert is_causal(pairs, torch.zeros(2, LENGTH)) is causal
