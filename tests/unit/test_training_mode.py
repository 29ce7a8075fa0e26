"""A model that does something else in training mode, dropout apart, is told; noise and running
statistics are none."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import headprune as hp
from headprune.attention import MultiHeadAttention
from headprune.layouts import registry
from headprune.model import modes
from headprune.model.judging import judged
from headprune.model.modes import difference_in_training
from headprune.model.running import call, outputs
from headprune.recovery import Finetune
from tests.unit.test_own_loss import CLASSES, classifier

TOLD = "Apart from dropout, the model computes something different in training mode: "
TOKENS = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(1))


class Decoder(nn.Module):
    """As in "Dive into Deep Learning", 11.7: the future is hidden in training alone, for it then
    reads word by word."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.attention = MultiHeadAttention(16, 4, dropout=0.5)
        self.dense = nn.Linear(16, 20)

    def forward(self, tokens):
        x = functional.dropout(self.embedding(tokens), 0.5, self.training)
        return self.dense(x + self.attention(x, causal=self.training))


def next_token(model, batch):
    return functional.cross_entropy(
        model(batch[0])[:, :-1].transpose(1, 2), batch[1][:, 1:], reduction="none"
    ).mean(1)


def next_of_one(model, batch):
    return next_token(model, (batch, batch))


def said(notes):
    return bool(notes) and notes[0].startswith(TOLD)


def test_scores_tell():
    """Where the batch is of the loss's own form, it is the loss that differs, else what the model
    puts out."""
    for loss, batch in ((next_token, (TOKENS, TOKENS)), (next_of_one, TOKENS)):
        for scorer in ("taylor", "wanda", "magnitude"):
            notes = hp.score(Decoder(), [batch], scorer, loss=loss, progress=False).notes
            assert said(notes) == (scorer != "magnitude"), scorer


@pytest.mark.parametrize("method", [Finetune(steps=1), "lstsq", "mean_fold"])
def test_recoveries_tell(method):
    teacher, model = Decoder(), Decoder()
    hp.prune_(model, hp.HeadMask.from_keep({"attention": [0, 2, 3]}, {"attention": 4}))
    of = None if isinstance(method, Finetune) else teacher
    assert said(hp.recover_(model, [TOKENS], method, of, loss=next_of_one).notes)


def test_what_is_told(monkeypatch):
    found = difference_in_training(Decoder(), lambda: [torch.tensor([2.0])], "loss")
    assert found == ""
    model = Decoder()
    (note,) = judged(model, next_of_one, TOKENS).notes
    assert note.startswith(f"{TOLD}the output of the first batch differs by up to ")
    assert note.endswith("The model was judged in evaluation mode.")
    model.eval()
    values = []
    monkeypatch.setattr(functional, "dropout", lambda x, *_: x)
    for causal in (False, True):
        model.training = causal
        values.append(float(next_of_one(model, TOKENS).mean().detach()))
    note = difference_in_training(model, lambda: [next_of_one(model, TOKENS)], "loss")
    assert f"is {values[0]:.4g} in evaluation mode and {values[1]:.4g} in training mode" in note


class Own(nn.Module):
    """Linear, and something that trains."""

    def __init__(self, inside=None):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.inside = nn.Identity() if inside is None else inside
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scale", torch.ones(8))
        self.steps = 0

    def forward(self, x):
        return self.last(self.between(self.inside(self.first(x))))

    def between(self, x):
        return x


class Functions(Own):
    """Dropout and running statistics as functions."""

    def between(self, x):
        x = functional.dropout(x, 0.5, self.training)
        x = functional.dropout(x, training=self.training, p=0.3)
        x = functional.alpha_dropout(x, 0.2, self.training)
        x = functional.batch_norm(x, self.mean, self.scale, training=self.training)
        attend = functional.scaled_dot_product_attention
        q = x[:, None, None].expand(-1, 2, 3, -1)
        q = attend(q, q, q, None, 0.5 if self.training else 0.0)
        return attend(q, q, q, dropout_p=0.5 * self.training)[:, 0, 0]


class Refusing(Own):
    def between(self, x):
        if self.training:
            raise RuntimeError("targets, please")
        return x


class More(Own):
    def forward(self, x):
        return (super().forward(x), torch.ones(3)) if self.training else (super().forward(x),)


class Stepping(Own):
    """Draws from three generators, keeps count, replaces a buffer, changes another."""

    def between(self, x):
        if self.training:
            self.steps += 1
            self.mean += x.mean(0)
            self.scale = self.scale * 2
            return x + random.random() + float(np.random.rand()) + torch.rand([])
        return x


QUIET = {
    "dropout": lambda: Own(nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.RReLU())),
    "batch norm": lambda: Own(nn.BatchNorm1d(8)),
    "functions": Functions,
    "random numbers": Stepping,
    "a training mode that wants more": Refusing,
    "another output beside": More,
}


@pytest.mark.parametrize("name", QUIET)
def test_noise_and_running_statistics_are_not_told(name):
    model = QUIET[name]().train()
    x = torch.randn(6, 8)
    assert judged(model, lambda m, b: m(b).square().mean(1), x).notes == ()


def test_the_comparison_leaves_no_trace():
    model, x = Stepping(nn.BatchNorm1d(8)).train(), torch.randn(6, 8)
    model.first.eval()
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}

    def states():
        return [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]

    before = states()
    judged(model, None, x)
    assert states() == before
    assert (model.steps, model.training, model.first.training) == (0, True, False)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1])


def test_a_model_of_known_packages_is_run_in_evaluation_mode_alone():
    model, seen = classifier(), []
    model.register_forward_hook(lambda m, *_: seen.append(any(x.training for x in m.modules())))
    hp.score(model, [CLASSES], "wanda", progress=False)
    assert seen == [False, False]  # costs and contexts


FAMILIES = ["bert", "llama", "t5", "swin"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_told_of(family, monkeypatch):
    """As if all of its code were somebody's own, with dropout in its configuration."""
    layout = next(name for name in registry if family in dict(registry.get(name).families))
    model, batch = registry.get(layout).tiny(0, family)
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.3)
    own = lambda module: not type(module).__module__.startswith("torch.")  # noqa: E731
    monkeypatch.setattr(modes, "_is_own", own)
    tried = []

    def value():
        tried.append(any(m.training for m in model.modules()))
        found = outputs(call(model, batch))
        assert all(math.isfinite(float(t.abs().sum())) for t in found)
        return found

    assert difference_in_training(model, value, "output") == ""
    assert tried == [False, True]
