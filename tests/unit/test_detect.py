"""The structural detector: what it finds is exact, what it cannot prove it refuses by name, and it
touches nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import headprune as hp
from headprune.core.heads import AttentionSite
from headprune.detect import propose
from headprune.detect.properties import PROPERTIES
from headprune.detect.prove import masks
from headprune.layouts import registry
from tests.laws.support import CLOSE, picture, ragged

WIDTH, HEADS = 16, 4


class Textbook(nn.Module):
    """Reshapes by a stored head count: silently wrong, not an error, when a cut leaves that as it
    was."""

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
    """Grouped queries in one projection, a group's queries, key and value side by side; a
    temperature a head."""

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
        q, k, v = (
            self.heads(self.query_norm(self.W_q(x))),
            self.heads(self.W_k(x)),
            self.heads(self.W_v(x)),
        )
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


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any = 0.0) -> Tensor:
    return ((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


def split(x: Tensor, n_heads: int) -> Tensor:
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


class Grouped(nn.Module):
    """Query heads share key/value heads; counts under any names, shared consecutively or in
    turn."""

    def __init__(
        self, n_query: int, n_kv: int, names: tuple[str, str] = ("h", "kv"), tiled: bool = False
    ) -> None:
        super().__init__()
        self.names, self.tiled, size = names, tiled, WIDTH // n_query
        setattr(self, names[0], n_query)
        setattr(self, names[1], n_kv)
        self.first, self.second, self.third, self.last = (
            nn.Linear(*sizes)
            for sizes in ((WIDTH, WIDTH), *[(WIDTH, n_kv * size)] * 2, (WIDTH, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        n_query, n_kv = (getattr(self, name) for name in self.names)
        q, k, v = (
            split(self.first(x), n_query),
            split(self.second(x), n_kv),
            split(self.third(x), n_kv),
        )
        if self.tiled:
            k, v = (t.repeat(1, n_query // n_kv, 1, 1) for t in (k, v))
        else:
            k, v = (t.repeat_interleave(n_query // n_kv, 1) for t in (k, v))
        return self.last(attend(q, k, v))


class OneKey(Textbook):
    """One key/value head for all, that no code repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.W_k, self.W_v = nn.Linear(WIDTH, WIDTH // HEADS), nn.Linear(WIDTH, WIDTH // HEADS)

    def mixed(self, x: Tensor) -> Tensor:
        return attend(self.heads(self.W_q(x)), self.W_k(x)[:, None], self.W_v(x)[:, None])


class GatedAfter(Textbook):
    """Every head's output times a gate that is computed after the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Linear(WIDTH, HEADS)

    def mixed(self, x: Tensor) -> Tensor:
        made = (
            super().mixed(x).unflatten(-1, (self.num_heads, -1))
            * self.strength(x).sigmoid()[..., None]
        )
        return made.flatten(2)


class TalkingConvolution(Talking):
    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Conv2d(HEADS, HEADS, 1)  # type: ignore[assignment]

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        return (self.talk(q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)


class TalkingTensor(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Parameter(torch.randn(HEADS, HEADS))

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        chances = torch.einsum("bhij,hg->bgij", (q @ k.transpose(-1, -2)).softmax(-1), self.talk)
        return (chances @ v).transpose(1, 2).flatten(2)


class NormFunction(Textbook):
    def mixed(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(super().mixed(x), (self.W_q.out_features,))


class Slopes(Textbook):
    """ALiBi slopes computed from the number of heads."""

    def mixed(self, x: Tensor) -> Tensor:
        slopes = 2.0 ** (-8 * torch.arange(1, self.num_heads + 1) / self.num_heads)
        place = torch.arange(x.shape[1])
        bias = slopes.view(-1, 1, 1) * -(place[:, None] - place).abs()
        return attend(*(self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v)), bias)


class OverHeads(Textbook):
    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        return ((q @ k.transpose(-1, -2)).softmax(1) @ v).transpose(1, 2).flatten(2)


class Flipped(Textbook):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x).unflatten(-1, (self.num_heads, -1)).flip(-2).flatten(2)


class WidthFirst(nn.Module):
    """The head's index runs fastest along the fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.mix, self.end = (
            HEADS,
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, -1, self.n_heads)).permute(2, 0, 4, 1, 3)
        return self.end(attend(q, k, v))


class TwoOutputs(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixed(x)
        return self.W_o(mixed) + self.other(mixed).tanh()


class PastTheOutput(Textbook):
    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixed(x)
        return self.W_o(mixed) + mixed.mean(-1, keepdim=True)


class Parametrised(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.W_v = nn.utils.parametrizations.weight_norm(self.W_v)


class OwnProduct(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)


class Subclassed(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.W_v = OwnProduct(WIDTH, WIDTH)


class NeverCertain(Textbook):
    def mixed(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().mixed(x), 0.2, training=True)


class Latent(Textbook):
    """A part of every head's keys is one for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.W_q = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, HEADS * 6)

    def mixed(self, x: Tensor) -> Tensor:
        k = self.heads(self.W_k(x))
        common = self.common(x)[:, None].expand(-1, k.shape[1], -1, -1)
        return attend(self.heads(self.W_q(x)), torch.cat([k, common], -1), self.heads(self.W_v(x)))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.up, self.down = (
            attention,
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
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
        (SequenceFirst, (4, 4, WIDTH)),
        (GatedAfter, (3, 5, WIDTH)),
    ],
    ids=[
        "a stored count",
        "fused, grouped",
        "fused, sequential",
        "sequence first",
        "as many examples",
        "gated after",
    ],
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
    assert {(s.n_query_heads, s.n_kv_heads) for s in sites} == {
        (4, 2 if "mix" in str(model) else 4)
    }
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
        hp.propose_layouts(model_of(lambda g=g: Fused(g)), torch.randn(3, 5, WIDTH))[0]
        .slabs[0]
        .packing
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
        (TalkingConvolution, "talking heads"),
        (TalkingTensor, "talking heads"),
        (NormFunction, "norm across heads"),
        (Slopes, "depends on all heads"),
        (OverHeads, "depends on all heads"),
        (Flipped, "heads not side by side"),
        (WidthFirst, "heads not side by side"),
        (TwoOutputs, "more than one output"),
        (PastTheOutput, "more than one output"),
        (Parametrised, "projections that are no matrices"),
        (Subclassed, "projections that are no matrices"),
        (NeverCertain, "random in evaluation mode"),
        (Latent, "latent keys"),
        (Convolved, "projections that are no matrices"),
        (
            lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True),
            "no output projection",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_faithful_is_refused_by_name(
    make: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(propose, "_taken", lambda model, layouts: [])
    found = hp.propose_layouts(model_of(make), torch.randn(3, 5, WIDTH))
    assert not found
    assert [r.property for r in found.refused] == [why]
    assert len(found.refused[0].modules) == 2
    assert why in PROPERTIES
    assert why in str(found)


@pytest.mark.parametrize(
    ("make", "described"),
    [
        (OneKey, "4 heads in 1 KV groups of width 4"),
        (lambda: Grouped(4, 2), "4 heads in 2 KV groups of width 4"),
        (lambda: Grouped(4, 2, ("n_head", "n_query_groups")), "4 heads in 2 KV groups of width 4"),
        (lambda: Grouped(4, 2, tiled=True), "4 heads in 2 KV groups of width 4"),
        (lambda: Grouped(8, 2), "8 heads in 2 KV groups of width 2"),
    ],
    ids=["one key", "any names", "names of others", "tiled", "eight"],
)
def test_shared_keys_are_described_as_they_are(make: Any, described: str) -> None:
    model, x = model_of(make).double(), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    found = hp.propose_layouts(model, x)
    sites = hp.find_sites(model, layouts=found)
    assert all(described in str(site) for site in sites)
    if sites[0].n_kv_heads > 1:
        assert found[0].policies == ("group", "balanced")
        sites = hp.find_sites(model, layouts=found, policy="balanced")
    keep = {s.name: [group[0] for group in s.groups] for s in sites}
    mask, small = (
        hp.HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites}),
        copy.deepcopy(model),
    )
    with hp.gated(model, mask, sites):
        expected = model(x)
    hp.prune_(small, mask, sites=sites)
    torch.testing.assert_close(small(x), expected, **CLOSE)


def test_modules_of_one_size_keep_their_own_head_counts() -> None:
    torch.manual_seed(0)
    wide, narrow = Grouped(4, 4), Grouped(2, 2)
    model = nn.Sequential(Layer(wide), Layer(narrow))
    found = hp.propose_layouts(model, torch.randn(3, 5, WIDTH))
    assert [s.n_query_heads for s in hp.find_sites(model, layouts=found)] == [4, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Identity(),
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Unflatten(-1, (HEADS, -1)), nn.Softmax(-1), nn.Flatten(2)
        ),
    ],
    ids=["nothing", "softmax over features"],
)
def test_a_softmax_that_is_no_attention_is_none(make: Any) -> None:
    found = hp.propose_layouts(model_of(make), torch.randn(3, 5, WIDTH))
    assert not found
    assert [r.property for r in found.refused] == ["no softmax attention"]


@pytest.mark.parametrize(
    "example",
    [torch.randn(1, 5, WIDTH), torch.randn(3, 5, WIDTH + 1), {"y": torch.randn(3, 5, WIDTH)}, None],
    ids=["one example", "another width", "another name", "nothing"],
)
def test_an_example_that_is_at_fault_is_named(example: Any) -> None:
    with pytest.raises(hp.HeadPruneError, match="example: must be"):
        hp.propose_layouts(model_of(Textbook), example)


def test_what_is_no_model_that_can_be_tried_is_named() -> None:
    x = torch.randn(3, 5, WIDTH)
    with pytest.raises(hp.HeadPruneError, match=r"must be a torch\.nn\.Module"):
        hp.propose_layouts("bert", x)  # type: ignore[arg-type]
    model = model_of(Textbook)
    model.cached = (torch.randn(2, requires_grad=True) * 2,)  # no leaf: deepcopy refuses it
    with pytest.raises(hp.HeadPruneError, match=r"copy\.deepcopy"):
        hp.propose_layouts(model, x)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        (n, f)
        for n, f in [
            ("bert", "bert"),
            ("gpt2", "gpt2"),
            ("llama", "llama"),
            ("deberta_v2", "deberta-v2"),
        ]
    ],
)
def test_known_families_are_found_without_their_layouts(
    layout: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = registry.get(layout).tiny(0, family)
    meant = [s.name for s in hp.find_sites(model)]
    monkeypatch.setattr(propose, "_taken", lambda model, layouts: [])
    found = hp.propose_layouts(model, batch)
    (modules, difference), *others = found.found.values()
    assert not others
    assert list(modules) == meant
    assert difference < 1e-10


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("bloom", "head counts kept elsewhere"),
        ("t5", "shared tensors"),
        ("deepseek_v3", "latent keys"),
    ],
)
def test_known_families_that_need_more_are_refused_by_name(
    layout: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(propose, "_taken", lambda model, layouts: [])
    found = hp.propose_layouts(*registry.get(layout).tiny(0))
    assert not found
    assert found.refused[0].property == why


def test_masks_of_a_proof_respect_the_policy() -> None:
    shared = AttentionSite("a", "any", "causal", 6, 2, 4, 4, tuple(range(6)), policy="balanced")
    one = AttentionSite("b", "any", "causal", 4, 1, 4, 4, tuple(range(4)), policy="balanced")
    plain = AttentionSite("c", "any", "self", 3, 3, 4, 4, (0, 1, 2))
    drawn = masks([shared, one, plain])
    for site in (shared, one, plain):
        kept = [site.check(mask.kept(site.name)) for mask in drawn]
        assert all(kept)
        assert set().union(*({h for h in site.heads if h not in keep} for keep in kept)) == set(
            site.heads
        )
    assert any(len(mask.kept("a")) == 4 for mask in drawn)  # one head of each group gone


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
    with pytest.raises(hp.HeadPruneError, match="cut so that it keeps a head"):
        hp.prune_(
            model,
            hp.HeadMask.from_keep({sites[0].name: []}, {s.name: 4 for s in sites}),
            sites=sites,
        )
