"""The structural detector: what it finds is exact, what it cannot prove it refuses by name, and it touches nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import headprune as hp
from headprune.layouts import registry
from headprune.surgery import detect
from headprune.surgery.properties import PROPERTIES
from tests.laws.support import CLOSE, picture, ragged

WIDTH, HEADS = 16, 4


class Textbook(nn.Module):
    """Reshapes by a stored head count: silently wrong, not an error, when a cut leaves that as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.W_q, self.W_k, self.W_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.W_o = nn.Linear(WIDTH, WIDTH, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.W_o(self.mixed(x))


class Fused(nn.Module):
    """Grouped queries in one projection, a group's queries, key and value side by side; a temperature a head."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.kv, self.size, self.grouped = 2, 4, grouped
        self.mix = nn.Linear(WIDTH, 8 * self.size)
        self.temperature = nn.Parameter(torch.rand(4, 1, 1))
        self.end = nn.Linear(4 * self.size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.mix(x)
        if self.grouped:
            made = made.unflatten(-1, (-1, 4, self.size))
            q, k, v = made[..., :2, :].flatten(2, 3), made[..., 2, :], made[..., 3, :]
        else:
            n_kv = made.shape[-1] // (4 * self.size)
            made = made.unflatten(-1, (-1, self.size))
            q, k, v = made.split([2 * n_kv, n_kv, n_kv], dim=2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) * self.temperature).softmax(-1)
        return self.end((scores @ v).transpose(1, 2).flatten(2))


class SequenceFirst(Textbook):
    def forward(self, x: Tensor) -> Tensor:
        return self.W_o(self.mixed(x.transpose(0, 1)).transpose(0, 1))


class NormAcross(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.W_o(self.inner(self.mixed(x)))


class WholeNorm(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.query_norm = nn.RMSNorm(WIDTH)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query_norm(self.W_q(x))), self.heads(self.W_k(x)), self.heads(self.W_v(x))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Talking(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Linear(HEADS, HEADS)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return (self.talk(scores.movedim(1, -1)).movedim(-1, 1) @ v).transpose(1, 2).flatten(2)


class NumberInCode(Textbook):
    """Four heads, whatever its weights say."""

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, -1)).transpose(1, 2)


class Convolved(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.W_q = nn.Conv1d(WIDTH, WIDTH, 1)  # type: ignore[assignment]

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.W_q(x.transpose(1, 2)).transpose(1, 2), self.W_k(x), self.W_v(x)
        return scaled_dot_product_attention(*map(self.heads, (q, k, v))).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.up, self.down = attention, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)  # a softmax that is no attention

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.gate(x).softmax(-1).amax(-1, keepdim=True) * self.down(self.up(x).relu())


def model_of(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(make()), Layer(make()))


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (Textbook, (3, 5, WIDTH)),
        (lambda: Fused(grouped=True), (3, 5, WIDTH)),
        (lambda: Fused(grouped=False), (3, 5, WIDTH)),
        (SequenceFirst, (5, 3, WIDTH)),
    ],
    ids=["a stored count", "fused, grouped", "fused, sequential", "sequence first"],
)
def test_what_is_found_is_exact(make: Any, example: tuple[int, ...]) -> None:
    model, x = model_of(make), torch.randn(example, dtype=torch.float64)
    if make is SequenceFirst:
        model = nn.Sequential(Transposed(), model, Transposed())
        x = x.transpose(0, 1)
    found = hp.propose_layouts(model, x)
    assert not found.refused, str(found)
    sites = hp.find_sites(model, layouts=found)
    assert len(sites) == 2
    assert {(s.n_query_heads, s.n_kv_heads) for s in sites} == {(4, 2 if "mix" in str(model) else 4)}
    model = model.double()
    for seed in range(3):
        mask, small = ragged(sites, seed), copy.deepcopy(model)
        with hp.gated(model, mask, sites):
            expected = model(x)
        assert hp.prune_(small, mask, sites=sites).n_removed > 0
        torch.testing.assert_close(small(x), expected, **CLOSE)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


def test_a_fused_projection_is_told_apart_by_proof() -> None:
    packings = [
        hp.propose_layouts(model_of(lambda g=g: Fused(g)), torch.randn(3, 5, WIDTH))[0].slabs[0].packing
        for g in (True, False)
    ]
    assert packings == ["grouped", "sequential"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (NormAcross, "norm across heads"),
        (WholeNorm, "norm over the whole projection"),
        (Talking, "talking heads"),
        (NumberInCode, "head counts kept elsewhere"),
        (Convolved, "projections that are no matrices"),
        (lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True), "no output projection"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_faithful_is_refused_by_name(make: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_taken", lambda model, layouts: [])
    found = hp.propose_layouts(model_of(make), torch.randn(3, 5, WIDTH))
    assert not found
    assert [r.property for r in found.refused] == [why]
    assert len(found.refused[0].modules) == 2
    assert why in PROPERTIES
    assert why in str(found)


@pytest.mark.parametrize(
    ("layout", "family"),
    [(n, f) for n, f in [("bert", "bert"), ("gpt2", "gpt2"), ("llama", "llama"), ("deberta_v2", "deberta-v2")]],
)
def test_known_families_are_found_without_their_layouts(
    layout: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = registry.get(layout).tiny(0, family)
    meant = [s.name for s in hp.find_sites(model)]
    monkeypatch.setattr(detect, "_taken", lambda model, layouts: [])
    found = hp.propose_layouts(model, batch)
    (modules, difference), *others = found.found.values()
    assert not others
    assert list(modules) == meant
    assert difference < 1e-10


def test_the_model_and_the_random_state_stay_as_they_are() -> None:
    model, x = model_of(Textbook).train(), torch.randn(3, 5, WIDTH)
    model[0].register_forward_hook(lambda *_: None)
    model(x).sum().backward()
    before, state = picture(model), torch.random.get_rng_state()
    gradients = [p.grad for p in model.parameters()]
    assert len(hp.propose_layouts(model, x)) == 1
    assert picture(model) == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_nothing_is_proposed_for_what_has_a_layout() -> None:
    model, batch = registry.get("bert").tiny(0)
    found = hp.propose_layouts(model, batch)
    assert (tuple(found), found.refused) == ((), ())
    assert "every softmax attention has a layout" in str(found)


def test_a_detected_layer_keeps_a_head() -> None:
    model, x = model_of(Textbook), torch.randn(3, 5, WIDTH)
    sites = hp.find_sites(model, layouts=hp.propose_layouts(model, x))
    with pytest.raises(hp.HeadPruneError, match="left with a head"):
        hp.prune_(model, hp.HeadMask.from_keep({sites[0].name: []}, {s.name: 4 for s in sites}), sites=sites)
