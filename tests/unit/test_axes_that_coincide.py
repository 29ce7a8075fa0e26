"""Sizes that are equal decide no axis: as many examples as tokens, as heads and as features a head
are nothing odd."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.layouts._tiny_textbook import Annotated, D2l, Prepared
from headprune.model.contexts import reading
from headprune.model.double import Doubled
from headprune.model.running import call
from headprune.model.sites import bind
from tests.laws.families import FAMILIES, over
from tests.laws.support import CLOSE, as_double


def square(subject):
    """A batch with as many examples as tokens; where it is text alone, as many as heads too."""
    n_heads = subject.sites[0].n_query_heads
    named = [subject.family] if subject.family else []
    parts = [as_double(subject.layout.tiny(seed, *named)[1]) for seed in range(4)]
    batch = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    if set(batch) <= {"input_ids", "attention_mask", "labels", "decoder_input_ids", "x"}:
        n = min(n_heads, batch[next(iter(batch))].shape[1])
        return {k: v[-n:, :n] if v.ndim > 1 and k != "labels" else v[-n:] for k, v in batch.items()}
    lengths = [len(x[0]) for x in contexts(subject, batch, {})]
    return {k: v[-min(lengths) :] if len(v) >= min(lengths) else v for k, v in batch.items()}


def contexts(subject, batch, gates):
    """What every output projection reads, ``[rows, tokens, heads * width]``, its gates in it."""
    bound = bind(subject.model, subject.sites)
    found = {}

    def take(number, x, counted):
        found.setdefault(number, x.clone())

    with (
        hp.gated(subject.model, gates, subject.sites),
        reading(subject.model, bound, take) as begin,
        Doubled(),
    ):
        begin(batch)
        call(subject.model, batch)
    return [found[i] for i in sorted(found)]


#: One for each way in which layouts tell examples from tokens.
TOLD = ["bert", "gpt2", "llama", "falcon", "bloom", "t5", "whisper", "vit", "swin", "deberta-v2"]
TOLD += ["multi_head_attention", "x_transformers.Encoder"]


@over([f for f in FAMILIES if f[1] in TOLD])
def test_a_gate_an_example_lands_on_it(subject):
    batch = square(subject)
    n = len(next(iter(batch.values())))
    gates = {s.name: torch.rand(n, len(s.heads)).double() + 0.5 for s in subject.sites}
    together = contexts(subject, batch, gates)
    for i in range(n):
        one = {k: v[i : i + 1] for k, v in batch.items()}
        alone = contexts(subject, one, {name: gate[i] for name, gate in gates.items()})
        for whole, part in zip(together, alone, strict=True):
            rows = whole.unflatten(0, (n, -1))[i]  # windows of an example follow one another
            assert_close(rows.flatten(0, -2), part.flatten(0, -2), **CLOSE)


class Textbook(nn.Module):
    def __init__(self, kind, dim, n_heads):
        super().__init__()
        self.layers = nn.ModuleList(kind(dim, n_heads) for _ in range(2))

    def forward(self, x, lengths):
        seen = torch.arange(x.shape[1]) < lengths[:, None]
        for layer in self.layers:
            if isinstance(layer, D2l):
                x = x + layer(x, x, x, lengths)
            elif isinstance(layer, Annotated):
                x = x + layer(x, x, x, seen[:, None])
            else:
                rows = x.transpose(0, 1)
                x = x + layer(query=rows, key=rows, value=rows, mask=seen.T[None]).transpose(0, 1)
        return x


def squares(model, batch):
    return model(**batch).square().mean((1, 2))


@pytest.mark.parametrize(("kind", "n"), [(D2l, 2), (Annotated, 3), (Prepared, 3)])
def test_examples_tokens_heads_and_widths_of_one_number(kind, n):
    model = Textbook(kind, n * n, n)
    x, lengths = torch.randn(n, n, n * n).double(), 1 + torch.arange(n)
    if kind is D2l:
        model(x.float(), lengths)
    model.double()
    gates = {f"layers.{i}": torch.rand(n, n).double() + 0.5 for i in range(2)}
    with hp.gated(model, gates):
        together = model(x, lengths)
    for i in range(n):
        with hp.gated(model, {name: gate[i] for name, gate in gates.items()}):
            assert_close(together[i : i + 1], model(x[i : i + 1], lengths[i : i + 1]), **CLOSE)
    whole = [{"x": x, "lengths": lengths}]
    apart = [{"x": x[i : i + 1], "lengths": lengths[i : i + 1]} for i in range(n)]
    a, b = (hp.score(model, given, "taylor", loss=squares) for given in (whole, apart))
    assert_close(torch.tensor(a.values), torch.tensor(b.values), rtol=1e-8, atol=1e-12)


class Split(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.way, self.n_heads = nn.Linear(dim, dim), n_heads

    def forward(self, x):
        return self.way(x).unflatten(-1, (self.n_heads, -1))


class SequenceFirst(nn.Module):
    """In the form of labml's, with other names: tokens on the first axis, examples on the
    second."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.a, self.b, self.c = (Split(dim, n_heads) for _ in range(3))
        self.end = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.a(x), self.b(x), self.c(x)
        scores = torch.einsum("ibhd,jbhd->bhij", q, k) * q.shape[-1] ** -0.5
        return self.end(torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), v).flatten(2))


class Around(nn.Module):
    def __init__(self, turned, dim, n_heads):
        super().__init__()
        self.attention, self.turned = SequenceFirst(dim, n_heads), turned

    def forward(self, x):
        if not self.turned:
            return self.attention(x)
        return self.attention(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("sizes", "n_heads", "width"), [((4, 4), 4, 8), ((2, 2), 2, 4), ((8, 8), 4, 6), ((3, 5), 8, 4)]
)
def test_a_proposed_axis_of_examples_is_that_of_other_sizes(sizes, n_heads, width):
    x = torch.randn(*sizes, n_heads * width)
    (layout,) = hp.propose_layouts(Around(True, n_heads * width, n_heads), x)
    assert layout.batch_axis == 1
    refused = hp.propose_layouts(Around(False, n_heads * width, n_heads), x)
    assert not refused
    assert "examples on the first axis" in str(refused)
