"""Layers that a refit no longer changes are played back, with the very same result; where they
cannot be, they run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.model.running import tensors
from headprune.recovery import Lstsq, _playback
from tests.laws.support import family_subject


def test_the_same_with_fewer_calls() -> None:
    subject = family_subject("bert", "bert", 0)
    batches = [family_subject("bert", "bert", seed).batch for seed in range(4)]
    states, calls = [], []
    for room in (2**30, 0):
        small = subject.copy()
        hp.prune_(small, subject.ragged())
        ran: list[int] = []
        for layer in small.bert.encoder.layer:  # type: ignore[union-attr]
            layer.intermediate.register_forward_hook(lambda *_, to=ran: to.append(1))
        hp.recover_(small, batches, Lstsq(feed_forward=True, max_bytes=room), subject.model)
        states.append(small.state_dict())
        calls.append(len(ran))
    assert_close(*states, rtol=0, atol=0)
    assert calls[0] < calls[1]


class Residual(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = hp.MultiHeadAttention(8, 2)
        self.asked = 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += 1
        y: Tensor = x + self.attention(x)
        return y


class Moody(Residual):
    """Returns something else whenever it is asked three times."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.asked // 3


def cut(teacher: nn.Sequential) -> Any:
    model = copy.deepcopy(teacher)
    names = [f"{n}.attention" for n in range(len(teacher))]
    hp.prune_(model, hp.HeadMask.from_keep({name: [1] for name in names}, dict.fromkeys(names, 2)))
    return model


def test_what_does_not_repeat_itself_runs() -> None:
    teacher = nn.Sequential(Moody(), Moody(), Moody())
    model = cut(teacher)
    before = model[0].asked
    batches = [torch.randn(3, 5, 8) for _ in range(2)]
    hp.recover_(model, batches, Lstsq(), teacher)
    # To see what training mode changes, to find projections, to learn the layers, errors, one for
    # each projection
    whole = 1 + 1 + 1 + len(batches) * (1 + 3)
    assert model[0].asked - before == whole


def test_batches_that_call_a_layer_more_often_than_the_first() -> None:
    teacher = nn.Sequential(*[Residual() for _ in range(4)])
    batches = [torch.randn(3, 5, 8), torch.randn(3, 15, 8)]

    def pieces(model: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([model(piece) for piece in x.split(5, 1)], 1).square().mean((1, 2))

    states = []
    for room in (2**30, 0):
        model = cut(teacher)
        hp.recover_(model, batches, Lstsq(max_bytes=room), teacher, loss=pieces)
        states.append(model.state_dict())
    assert_close(*states, rtol=0, atol=0)


class Playing:
    """Three linear layers, one after the other, that count their calls."""

    def __init__(self, room: int = 2**30) -> None:
        self.layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
        self.ran: list[int] = []
        for number, layer in enumerate(self.layers):
            original = layer.forward

            def forward(x: Tensor, n: int = number, run: Any = original) -> Any:
                self.ran.append(n)
                return run(x)

            layer.__dict__["forward"] = forward
        self.x = torch.ones(1, 2)
        self.playback = _playback.Playback(self.layers, list(self.layers), room)
        self.playback.learn(lambda: self.layers(self.x))

    def run(self, key: str | None, number: int) -> list[int]:
        """The layers that ran in a pass to this projection."""
        self.ran.clear()
        with self.playback.before(key, number):
            self.layers(self.x)
        return list(self.ran)


@torch.no_grad()
def test_a_layer_runs_once_a_batch_after_its_projection_is_done() -> None:
    playing = Playing()
    assert playing.run("a", 0) == [0, 1, 2]
    assert not playing.playback.helps("a", 1)
    assert playing.run("a", 1) == [0, 1, 2]
    assert playing.playback.helps("a", 1)
    assert not playing.playback.helps("b", 1)
    assert playing.run("a", 1) == [1, 2]
    assert playing.run("b", 2) == [0, 1, 2]
    assert playing.run("a", 2) == [1, 2]
    assert playing.run("a", 2) == [2]
    assert playing.run(None, 2) == [0, 1, 2]
    playing.playback.forget()
    assert playing.run("a", 2) == [0, 1, 2]


class Boxed(nn.Module):
    """A layer that returns more than a tensor."""

    def __init__(self, box: Any) -> None:
        super().__init__()
        self.linear, self.box, self.ran = nn.Linear(2, 2), box, 0

    def forward(self, x: Tensor) -> Any:
        self.ran += 1
        return self.box(self.linear(x))


BOXES: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "mapping": (lambda x: {"states": x, "more": (None, "words", 1.5)}, 1),
    "lists": (lambda x: [x, [x.mean()]], 1),
    "an object": (lambda x: (x, object()), 3),
    "an object within": (lambda x: {"states": x, "cache": {"kept": object()}}, 3),
}


@pytest.mark.parametrize("name", BOXES)
@torch.no_grad()
def test_only_tensors_and_constants_are_played_back(name: str) -> None:
    box, runs = BOXES[name]
    layer, last, x = Boxed(box), nn.Linear(2, 2), torch.ones(1, 2)
    playback = _playback.Playback([layer], [layer.linear, last], 2**20)

    def run() -> Any:
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
def test_room_is_kept_to() -> None:
    playing = Playing(room=8)  # one output of two numbers
    assert playing.run("a", 2) == [0, 1, 2]
    assert playing.run("a", 2) == [1, 2]


@torch.no_grad()
def test_what_is_kept_is_not_changed_by_who_gets_it() -> None:
    playing = Playing()
    playing.run("a", 1)
    with playing.playback.before("a", 1):
        first = playing.layers[0](playing.x)
        expected = first.clone()
        first.add_(1)
        assert_close(playing.layers[0](playing.x), expected, rtol=0, atol=0)
