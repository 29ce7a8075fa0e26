"""Losses of many gate settings: equal to a pass for each, for every family, and at a fraction of
the work."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.gating.candidates import CandidateLosses
from headprune.layouts import registry
from headprune.model.double import Doubled
from headprune.model.running import batch_size, call, outputs
from headprune.model.sites import bind
from tests.laws.support import Subject, family_subject, unchanged

#: Families by how their attention is called and by what follows it.
FAMILIES = [
    *(("bert", "bert"), ("gpt2", "gpt2"), ("llama", "llama"), ("t5", "t5"), ("swin", "swin")),
    *(("bart", "bart"), ("bart", "clip"), ("bart", "siglip"), ("albert", "albert")),
    *(("d2l", "d2l"), ("annotated", "annotated transformer"), ("labml", "labml")),
    *(("deberta_v2", "deberta-v2"), ("timm", "timm.Attention"), ("qwen3_next", "qwen3_next")),
    *(("head_list", "list of heads"), ("multi_head_attention", "multi_head_attention")),
    *(("torch_multi_head", "torch.nn.MultiheadAttention"), ("vit", "vit")),
]
#: Whose passes cannot be played back: examples see each other, or the model takes only the batch
#: whose lengths it has.
WHOLE_PASSES = {"clip", "siglip", "d2l", "annotated transformer", "labml"}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def loss(model, batch):
    size = batch_size(batch)
    with Doubled():
        found = outputs(call(model, batch))
    found = [t for t in found if t.ndim and t.shape[0] == size]
    return torch.stack([t.reshape(size, -1).square().mean(1) for t in found]).sum(0)


def candidates_of(subject, loss=loss, **options):
    return CandidateLosses(subject.model, bind(subject.model, subject.sites), loss, **options)


def settings_of(subject):
    """Every unit alone closed, two random settings, and one that changes nothing."""
    heads = [(s.name, h) for s in subject.sites for h in s.heads]
    units = [{(s.name, h) for h in unit} for s in subject.sites for unit in s.units]
    closed = [[float(head not in unit) for head in heads] for unit in units]
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(2, len(heads), generator=generator, dtype=torch.float64)
    return torch.cat(
        [torch.tensor(closed, dtype=torch.float64), random, torch.ones_like(random[:1])]
    )


def gated_losses(subject, settings):
    """What ``gated`` says, one setting after another."""
    found = []
    for row in settings:
        parts = row.split([len(s.heads) for s in subject.sites])
        gates = {s.name: part for s, part in zip(subject.sites, parts, strict=True)}
        with hp.gated(subject.model, gates, subject.sites):
            found.append(loss(subject.model, subject.batch))
    return torch.stack(found)


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("layout", "family"), FAMILIES, ids=[family for _, family in FAMILIES])
def test_equals_gated_passes_and_leaves_no_trace(layout, family):
    subject = family_subject(layout, family)
    loss(subject.model, subject.batch)  # Transformers installs hooks of its own in a first pass
    settings = settings_of(subject)
    with unchanged(subject.model):
        candidates = candidates_of(subject)
        got, base = candidates(subject.batch, settings)
    assert_close(got, gated_losses(subject, settings), **EXACT)
    assert torch.equal(got[-1], base)
    assert bool(candidates.notes) == (family in WHOLE_PASSES), candidates.notes


@pytest.mark.parametrize(("name", "memory"), [("llama", [1, 2**16, 2**30]), ("t5", [2**30])])
def test_any_base_and_any_memory(name, memory):
    subject = family_subject(name, name)
    settings = settings_of(subject)
    base = settings[0] * 0.5
    expected, expected_base = gated_losses(subject, settings), gated_losses(subject, base[None])[0]
    for max_bytes in memory:
        candidates = candidates_of(subject, max_bytes=max_bytes)
        got, start = candidates(subject.batch, settings, base)
        assert_close(got, expected, **EXACT)
        assert_close(start, expected_base, **EXACT)
        assert candidates.notes == ()


def test_what_no_gate_changes_runs_once_and_settings_share_passes():
    subject = family_subject("bert", "bert")
    layers = subject.model.bert.encoder.layer
    rows = [0] * len(layers)
    settings = settings_of(subject)[:-3]
    candidates = candidates_of(subject)
    candidates(subject.batch, settings)  # with its proof

    def count(i):
        def counting(module, args, out):
            rows[i] += out.shape[0]

        return counting

    for i, layer in enumerate(layers):
        layer.intermediate.register_forward_hook(count(i))
    candidates(subject.batch, settings)
    size, n_heads = batch_size(subject.batch), len(subject.sites[0].heads)
    assert rows == [size * (1 + n_heads * (i + 1)) for i in range(len(layers))]


# ---------------------------------------------------------------- what would be wrong if nobody
# looked


class Block(nn.Module):
    """Attention, and whatever a test puts behind it."""

    def __init__(self):
        super().__init__()
        self.attention = hp.MultiHeadAttention(8, 4)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.feed(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.out = nn.Linear(8, 3)

    def forward(self, x, weights=None):
        for layer in self.layers:
            x = layer(x)
        found = self.out(x.mean(1))
        return found if weights is None else found * weights.sum()


def net(kind=Net):
    return kind().double().eval()


def inputs(size, tokens=5):
    generator = torch.Generator().manual_seed(size)
    return {"x": torch.randn(size, tokens, 8, generator=generator, dtype=torch.float64)}


def subject_of(model, batch):
    return Subject(registry.get("multi_head_attention"), model, batch, hp.find_sites(model))


def held(model, batches, **options):
    """Asserts that all batches get the losses of gated passes; returns the notes."""
    candidates = candidates_of(subject_of(model, batches[0]), **options)
    for number, batch in enumerate(batches):
        subject = subject_of(model, batch)
        settings = settings_of(subject)
        got, _ = candidates(batch, settings, number=number)
        assert_close(got, gated_losses(subject, settings), **EXACT)
    return candidates.notes


class InPlace(Block):
    def forward(self, x):
        x = self.feed(x)
        x[:, 0] = 0
        x += self.attention(x)
        x *= 0.9
        return x


def in_place(model):
    for layer in model.layers:
        layer.__class__ = InPlace


def hooked_projection(model):
    model.layers[2].attention.W_o.register_forward_hook(lambda m, args, out: out.tanh())


def talking_hooks(model):
    box = {}
    model.layers[1].register_forward_hook(lambda m, args, out: box.update(seen=out))
    model.layers[3].register_forward_hook(lambda m, args, out: out + box["seen"].tanh())


@pytest.mark.parametrize("change", [in_place, hooked_projection, talking_hooks])
def test_what_is_played_back_all_the_same(change):
    model = net()
    change(model)
    assert held(model, [inputs(3)]) == ()


def talking_layers(model):
    """Layers that hand something over behind the back of their calls."""
    box = {}

    class Writing(Block):
        def forward(self, x):
            box["seen"] = super().forward(x)
            return box["seen"]

    class Reading(Block):
        def forward(self, x):
            return super().forward(x) + box["seen"].tanh()

    model.layers[1].__class__, model.layers[3].__class__ = Writing, Reading


def coupled(model):
    """Examples that see each other."""
    model.layers[1].feed.register_forward_hook(lambda m, args, out: out - 0.5 * out.mean(0)[None])


class Short(Net):
    """A last layer that large batches leave out."""

    def forward(self, x):
        for layer in self.layers[: 4 if len(x) > 4 else 5]:
            x = layer(x)
        return self.out(x.mean(1))


class Longer(Net):
    """A row more where there are more examples."""

    def forward(self, x):
        return super().forward(torch.cat([x, x[:1]]) if len(x) > 2 else x)[: len(x)]


LEFT_OUT = "the gate of layers.4.attention: must be reached, got a pass that never called it"


@pytest.mark.parametrize(
    ("kind", "change", "max_bytes", "words"),
    [
        (Net, talking_layers, 2**30, ""),
        (Net, coupled, 2**30, ""),
        (Net, coupled, 1, ""),
        (Short, None, 2**30, LEFT_OUT),
        (Longer, None, 2**30, "must be longer on one axis for more examples, got (2,"),
    ],
)
def test_what_has_whole_passes_and_a_note(kind, change, max_bytes, words):
    model = net(kind)
    if change:
        change(model)
    (note,) = held(model, [inputs(4)], max_bytes=max_bytes)
    assert "recorded outputs could not be reused" in note
    assert words in note


def test_a_tensor_that_is_as_long_as_a_batch_by_chance():
    weights = torch.tensor([0.2, 0.3, 0.4], dtype=torch.float64)
    batches = [{**inputs(size), "weights": weights} for size in (4, 2, 3)]
    assert held(net(), batches) == ()
    (note,) = held(net(), batches[::-1])  # here by chance in the first one already
    assert "could not be reused" in note


def test_a_failure_in_a_later_batch_falls_back_and_says_from_when_on():
    class Picky(Net):
        def forward(self, x):
            assert x.shape[1] == 5 or len(x) == 3, "only whole batches of three"
            return super().forward(x)

    (note,) = held(net(Picky), [inputs(3), inputs(3, tokens=7)])
    assert "from batch 1 on" in note
    assert "only whole batches of three" in note


def test_longer_batches_need_no_more_memory_than_allowed():
    model, rows = net(), []
    subject = subject_of(model, inputs(4))
    candidates, settings = candidates_of(subject, max_bytes=400_000), settings_of(subject)
    candidates(inputs(4), settings)
    model.layers[3].feed[0].register_forward_hook(lambda m, args, out: rows.append(out.numel() * 8))
    candidates(inputs(4), settings)
    short = max(rows)
    rows.clear()
    candidates(inputs(4, tokens=200), settings)
    assert max(rows) < 10 * short, "forty times as many tokens"


def test_an_exception_in_a_pass_leaves_no_trace():
    subject = family_subject("llama", "llama")
    loss(subject.model, subject.batch)
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return loss(model, batch)

    with unchanged(subject.model), pytest.raises(KeyboardInterrupt):
        candidates_of(subject, failing)(subject.batch, settings_of(subject))
