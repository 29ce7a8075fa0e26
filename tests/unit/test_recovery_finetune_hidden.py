"""Finetune's distillation of hidden states: against a literal transcription, and where it is
refused."""

import copy

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.layouts import registry as layouts
from headprune.model.losses import default_loss
from headprune.recovery import Finetune
from headprune.recovery._blocks import blocks_of
from headprune.recovery._distillation import Comparison
from headprune.surgery.prune import prune_heads_
from tests.laws.support import as_double, no_dropout
from tests.unit.test_recovery_lstsq import TwoSentences

CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def pair(name):
    """A cut model, the whole one, and a batch; fp64, no dropout."""
    model, batch = layouts.get(name).tiny(0)
    model = no_dropout(model).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(1)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    teacher = copy.deepcopy(model)
    prune_heads_(model, {0: hp.find_sites(model)[0].units[0]})
    return model, teacher, as_double(batch)


def literal(ours, theirs, mask):
    """Oracle: example by example, token by token."""
    layers = []
    for h, t in zip(ours, theirs, strict=True):
        rows, values = [], []
        for i in range(h.shape[0]):
            tokens = [j for j in range(h.shape[1]) if mask is None or mask[i, j]]
            rows.append(sum(((h[i, j] - t[i, j]) ** 2).mean() for j in tokens) / len(tokens))
            values += [t[i, j] for j in tokens]
        values = torch.stack(values)
        variance = ((values - values.mean()) ** 2).mean()
        layers.append(sum(rows) / len(rows) / variance)
    return sum(layers) / len(layers)


def states(model, run):
    found = []
    handles = [
        block.module.register_forward_hook(
            lambda _, a, out: found.append(out[0] if isinstance(out, tuple) else out)
        )
        for block in blocks_of(model, None)
    ]
    result = run(model)
    for handle in handles:
        handle.remove()
    return found, result


def compared(model, teacher, run, which="all"):
    comparison = Comparison(model, teacher, hidden=which)
    with comparison.listening():
        run(model)
    return comparison.gaps()["hidden_states"]


@pytest.mark.parametrize(
    ("name", "which"), [("bert", "all"), ("vit", "last"), ("llama", "all"), ("llama", "last")]
)
def test_it_is_the_literal_transcription_in_value_and_gradient(name, which):
    """The layers of these put out Transformers' ``hidden_states``; its last one of a decoder is
    after another norm."""
    model, teacher, batch = pair(name)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    mask = batch.get("attention_mask")
    assert mask is None or not mask.all()

    def layers(model):
        found, out = states(model, lambda m: m(**inputs, output_hidden_states=True))
        for own, theirs in zip(found[:-1], out.hidden_states[1:-1], strict=True):
            assert torch.equal(own, theirs)
        return found if which == "all" else found[-1:]

    with torch.no_grad():
        target = layers(teacher)
    wanted = literal(layers(model), target, mask)
    got = compared(model, teacher, lambda m: default_loss(m, batch), which)
    assert wanted > 1e-4
    torch.testing.assert_close(got, wanted, **CLOSE)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected, found = (
        torch.autograd.grad(gap, parameters, allow_unused=True, materialize_grads=True)
        for gap in (wanted, got)
    )
    assert sum(bool(gradient.any()) for gradient in expected) > 10
    torch.testing.assert_close(found, expected, **CLOSE)
    assert all(p.grad is None for p in teacher.parameters())


def test_a_decoders_padding_is_its_own():
    model, teacher, batch = pair("t5")
    assert [b.kind != "self" for b in blocks_of(model, None)] == [False, False, True, True]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])

    def run(m):
        return m(**batch, decoder_attention_mask=mask)

    ours, theirs = (states(m, run)[0] for m in (model, teacher))
    masks = [batch["attention_mask"]] * 2 + [mask] * 2
    parts = [literal([h], [t], m) for h, t, m in zip(ours, theirs, masks, strict=True)]
    torch.testing.assert_close(compared(model, teacher, run), sum(parts) / 4, **CLOSE)


def test_what_has_no_layers_is_refused_in_words():
    plain = nn.Linear(4, 2)
    settings = Finetune(distill_hidden=1.0)
    with pytest.raises(UnsupportedModel):
        hp.recover_(plain, [torch.randn(2, 4)], settings, teacher=copy.deepcopy(plain))
    model, _, batch = pair("bert")
    shallow = layouts.get("bert").tiny(0)[0].double()
    shallow.bert.encoder.layer = shallow.bert.encoder.layer[:2]
    with pytest.raises(InvalidValue, match="a teacher of 3 layers, got 2"):
        hp.recover_(model, [batch], settings, teacher=shallow)


class Odd(nn.Module):
    """A layer that puts out what ``answer`` makes of its attention."""

    def __init__(self, answer):
        super().__init__()
        self.attention, self.answer = hp.MultiHeadAttention(8, 2), answer

    def forward(self, x):
        return self.answer(self.attention(x))


def test_layers_that_return_no_states_or_others_are_refused():
    def run(ours, theirs):
        torch.manual_seed(0)
        model, teacher = nn.Sequential(Odd(ours)), nn.Sequential(Odd(theirs))
        return compared(model, teacher, lambda m: m(torch.randn(2, 3, 8)))

    plain = run(lambda x: (x, None), lambda x: (x, None))
    assert plain > 0
    assert run(lambda x: {"states": x, "more": 1}, lambda x: x) == plain
    with pytest.raises(InvalidValue, match="where 0 returns hidden states first, got list"):
        run(lambda x: ["nothing"], lambda x: x)
    with pytest.raises(InvalidValue, match=r"whose 0 returns \[2, 3, 8\], got \[2, 2, 8\]"):
        run(lambda x: x, lambda x: x[:, :2])


class Early(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(3))
        self.depth = depth

    def forward(self, x):
        for layer in self.layers[: self.depth]:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (0, 0)])
def test_layers_that_do_not_all_run_in_both_are_refused(ours, theirs):
    words = rf"the same layers \(layers\.0, .*, got {ours} and {theirs} states"
    with pytest.raises(InvalidValue, match=words):
        compared(Early(ours), Early(theirs), lambda m: m(torch.randn(2, 3, 8)))


def test_padding_of_an_encoder_that_runs_twice():
    """What stands at padding does not count, whichever run it is in: only each run's own inputs
    tell what that is."""
    _, whole, batch = pair("bert")
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    away = inputs["attention_mask"] == 0
    assert bool(away.any())
    gaps = []
    for spoilt in (0.0, 100.0):
        model, teacher = TwoSentences(whole), TwoSentences(copy.deepcopy(whole))
        last = teacher.encoder.bert.encoder.layer[-1]
        last.register_forward_hook(
            lambda m, a, out, by=spoilt: out + out.square() + by * away[..., None]
        )
        gaps.append(compared(model, teacher, lambda m: m(inputs, inputs), "last").detach())
    assert float(gaps[0]) > 0
    torch.testing.assert_close(gaps[1], gaps[0])
