"""Layers that a refit no longer changes are played back, with the very same result; where they
cannot be, they run."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.model.running import tensors
from headprune.recovery import Lstsq, _playback
from tests.laws.support import family_subject


def test_the_same_with_fewer_calls():
    subject = family_subject("bert", "bert", 0)
    batches = [family_subject("bert", "bert", seed).batch for seed in range(2)]
    states, calls = [], []
    for room in (2**30, 0):
        small = subject.copy()
        hp.prune_(small, subject.ragged())
        ran = []
        for layer in small.bert.encoder.layer:
            layer.intermediate.register_forward_hook(lambda *_, to=ran: to.append(1))
        hp.recover_(small, batches, Lstsq(feed_forward=True, max_bytes=room), subject.model)
        states.append(small.state_dict())
        calls.append(len(ran))
    assert_close(*states, rtol=0, atol=0)
    assert calls[0] < calls[1]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = hp.MultiHeadAttention(8, 2)
        self.asked = 0

    def forward(self, x):
        self.asked += 1
        return x + self.attention(x)


class Moody(Residual):
    """Returns something else whenever it is asked three times."""

    def forward(self, x):
        return super().forward(x) + self.asked // 3


def cut(teacher):
    model = copy.deepcopy(teacher)
    names = [f"{n}.attention" for n in range(len(teacher))]
    hp.prune_(model, hp.HeadMask.from_keep({name: [1] for name in names}, dict.fromkeys(names, 2)))
    return model


def test_what_does_not_repeat_itself_runs():
    teacher = nn.Sequential(Moody(), Moody(), Moody())
    model = cut(teacher)
    before = model[0].asked
    batches = [torch.randn(3, 5, 8) for _ in range(2)]
    hp.recover_(model, batches, Lstsq(), teacher)
    # To see what training mode changes, to find projections, to learn the layers, errors, one for
    # each projection
    whole = 1 + 1 + 1 + len(batches) * (1 + 3)
    assert model[0].asked - before == whole


def test_batches_that_call_a_layer_more_often_than_the_first():
    teacher = nn.Sequential(*[Residual() for _ in range(4)])
    batches = [torch.randn(3, 5, 8), torch.randn(3, 15, 8)]

    def pieces(model, x):
        return torch.cat([model(piece) for piece in x.split(5, 1)], 1).square().mean((1, 2))

    states = []
    for room in (2**30, 0):
        model = cut(teacher)
        hp.recover_(model, batches, Lstsq(max_bytes=room), teacher, loss=pieces)
        states.append(model.state_dict())
    assert_close(*states, rtol=0, atol=0)


class Boxed(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.linear, self.box, self.ran = nn.Linear(2, 2), box, 0

    def forward(self, x):
        self.ran += 1
        return self.box(self.linear(x))


BOXES = {
    "mapping": (lambda x: {"states": x, "more": (None, "words", 1.5)}, 1),
    "lists": (lambda x: [x, [x.mean()]], 1),
    "an object": (lambda x: (x, object()), 3),
    "an object within": (lambda x: {"states": x, "cache": {"kept": object()}}, 3),
}


@pytest.mark.parametrize("name", BOXES)
@torch.no_grad()
def test_only_tensors_and_constants_are_played_back(name):
    box, runs = BOXES[name]
    layer, last, x = Boxed(box), nn.Linear(2, 2), torch.ones(1, 2)
    playback = _playback.Playback([layer], [layer.linear, last], 2**20)

    def run():
        found = layer(x)
        last(x)
        return found

    playback.learn(run)
    layer.ran = 0
    expected = list(tensors(box(layer.linear(x))))
    for _ in range(3):
        with playback.before("a batch", 1):
            assert_close(list(tensors(run())), expected)
    assert layer.ran == runs


@torch.no_grad()
def test_what_is_kept_is_not_changed_by_who_gets_it():
    layers, x, found = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2), []
    playback = _playback.Playback(layers, list(layers), 2**30)
    playback.learn(lambda: layers(x))
    for _ in range(3):  # kept in the first pass, played back in the others
        with playback.before("a", 1):
            output = layers[0](x)
        found.append(output.clone())
        output.add_(1)
    assert_close(found[1:], [found[0]] * 2, rtol=0, atol=0)
