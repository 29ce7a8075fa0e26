"""Layers that a refit no longer changes are played back, with the very same result; where they
cannot be, they run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.model.running import tensors
from headprune.recovery import Lstsq, _playback
from tests.laws.support import family_subject


def counted(model: nn.Module) -> list[int]:
    """Grows with every call of a feed-forward's first layer."""
    calls: list[int] = []
    for module in model.modules():
        if type(module).__name__ == "BertIntermediate":
            module.register_forward_hook(lambda *_: calls.append(1))
    return calls


def refitted(
    model: nn.Module, mask: Any, batches: list[Any], teacher: nn.Module, max_bytes: int
) -> tuple[nn.Module, int]:
    """A copy that is cut and refitted, and the calls of feed-forwards that it took."""
    small = copy.deepcopy(model)
    hp.prune_(small, mask)
    calls = counted(small)
    hp.recover_(small, batches, Lstsq(feed_forward=True, max_bytes=max_bytes), teacher)
    return small, len(calls)


def test_the_same_with_fewer_calls() -> None:
    subject = family_subject("bert", "bert", 0)
    batches = [family_subject("bert", "bert", seed).batch for seed in range(4)]
    model = subject.model
    fast, few = refitted(model, subject.ragged(), batches, model, 2**30)
    slow, many = refitted(model, subject.ragged(), batches, model, 0)
    assert_close(fast.state_dict(), slow.state_dict(), rtol=0, atol=0)
    assert few < many


class Moody(nn.Module):
    """A layer that returns something else whenever it is asked three times."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = hp.MultiHeadAttention(8, 2)
        self.asked = 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += 1
        y: Tensor = x + self.attention(x) + self.asked // 3
        return y


def test_what_does_not_repeat_itself_runs() -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(Moody(), Moody(), Moody())
    model = copy.deepcopy(teacher)
    names = [f"{n}.attention" for n in range(3)]
    hp.prune_(model, hp.HeadMask.from_keep({name: [1] for name in names}, dict.fromkeys(names, 2)))
    before = model[0].asked
    batches = [torch.randn(3, 5, 8) for _ in range(2)]
    hp.recover_(model, batches, Lstsq(), teacher)
    # To see what training mode changes, to find projections, to learn the layers, errors, one for
    # each projection
    whole = 1 + 1 + 1 + len(batches) * (1 + 3)
    assert model[0].asked - before == whole


class Residual(nn.Module):
    """A layer."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.attention(x)
        return y


def test_batches_that_call_a_layer_more_often_than_the_first() -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(*[Residual(hp.MultiHeadAttention(8, 2)) for _ in range(4)])
    names = [f"{n}.attention" for n in range(4)]
    mask = hp.HeadMask.from_keep({name: [1] for name in names}, dict.fromkeys(names, 2))
    batches = [torch.randn(3, 5, 8), torch.randn(3, 15, 8)]

    def pieces(model: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([model(piece) for piece in x.split(5, 1)], 1).square().mean((1, 2))

    states = []
    for room in (2**30, 0):
        model = copy.deepcopy(teacher)
        hp.prune_(model, mask)
        hp.recover_(model, batches, Lstsq(max_bytes=room), teacher, loss=pieces)
        states.append(model.state_dict())
    assert_close(*states, rtol=0, atol=0)


class Playing:
    """Three linear layers, one after the other, that count their calls."""

    def __init__(self, room: int = 2**30) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        self.ran: list[int] = []
        for number, layer in enumerate(self.layers):
            original = layer.forward
            layer.__dict__["forward"] = lambda x, n=number, f=original: (self.ran.append(n), f(x))[
                1
            ]
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


@pytest.mark.parametrize(
    ("box", "runs"),
    [
        (lambda x: {"states": x, "more": (None, "words", 1.5)}, 1),
        (lambda x: [x, [x.mean()]], 1),
        (lambda x: (x, object()), 3),
        (lambda x: {"states": x, "cache": {"kept": object()}}, 3),
    ],
    ids=["mapping", "lists", "an object", "an object within"],
)
@torch.no_grad()
def test_only_tensors_and_constants_are_played_back(box: Any, runs: int) -> None:
    layer, last, x = Boxed(box), nn.Linear(2, 2), torch.ones(1, 2)
    playback = _playback.Playback([layer], [layer.linear, last], 2**20)

    def run() -> Any:
        found = layer(x)
        last(x)
        return found

    playback.learn(run)
    layer.ran = 0
    seen = []
    for _ in range(3):
        with playback.before("a batch", 1):
            seen.append(run())
    assert layer.ran == runs
    assert_close(
        [list(tensors(found)) for found in seen], [list(tensors(box(layer.linear(x))))] * 3
    )


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


@torch.no_grad()
def test_a_layer_that_runs_twice_is_not_played_back() -> None:
    playing = Playing()
    twice = _playback.Playback([playing.layers[0]], list(playing.layers), 2**30)
    twice.learn(lambda: playing.layers(playing.layers(playing.x)))
    playing.ran.clear()
    for _ in range(2):
        with twice.before("a", 2):
            playing.layers[0](playing.x)
    assert playing.ran == [0, 0]
