"""The structural detector: what it finds is exact, and it touches nothing."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import headprune as hp
from headprune.core.heads import AttentionSite
from headprune.detect import propose
from headprune.detect.prove import masks
from headprune.layouts import registry
from tests.laws.support import CLOSE, mask_of, ragged, unchanged

WIDTH, HEADS = 16, 4


def split(x, n_heads):
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def attend(q, k, v, bias=0.0):
    return ((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


def kernel(module, q, k, v):
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Textbook(nn.Module):
    """Reshapes by a stored head count: silently wrong, not an error, when a cut does not change it.

    Args:
        mix: Another function of the module and of its queries, keys and values.
        run: Another forward.
        parts: Further modules and tensors.
    """

    def __init__(self, mix=kernel, run=None, **parts):
        super().__init__()
        self.num_heads, self.mix, self.run = HEADS, mix, run
        self.W_q, self.W_k, self.W_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.W_o = nn.Linear(WIDTH, WIDTH, bias=False)
        for name, part in parts.items():
            setattr(self, name, part)

    def heads(self, x):
        return split(x, self.num_heads)

    def mixed(self, x):
        return self.mix(self, *(self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v)))

    def forward(self, x):
        return plain(self, x) if self.run is None else self.run(self, x)


def plain(module, x):
    return module.W_o(module.mixed(x))


class Fused(nn.Module):
    """Grouped queries in one projection, a group's queries, key and value side by side; a
    temperature a head."""

    def __init__(self, grouped):
        super().__init__()
        self.kv, self.size, self.grouped = 2, 4, grouped
        self.mix = nn.Linear(WIDTH, 8 * self.size)
        self.temperature = nn.Parameter(torch.rand(4, 1, 1))
        self.end = nn.Linear(4 * self.size, WIDTH)

    def forward(self, x):
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


class Grouped(nn.Module):
    def __init__(self, n_query, n_kv, tiled=False):
        super().__init__()
        self.h, self.kv, self.tiled = n_query, n_kv, tiled
        shared = n_kv * WIDTH // n_query
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.third = nn.Linear(WIDTH, shared), nn.Linear(WIDTH, shared)

    def forward(self, x):
        q = split(self.first(x), self.h)
        k, v = (split(part(x), self.kv) for part in (self.second, self.third))
        if self.tiled:
            k, v = (t.repeat(1, self.h // self.kv, 1, 1) for t in (k, v))
        else:
            k, v = (t.repeat_interleave(self.h // self.kv, 1) for t in (k, v))
        return self.last(attend(q, k, v))


class OneKey(Textbook):
    def __init__(self):
        super().__init__()
        self.W_k, self.W_v = nn.Linear(WIDTH, WIDTH // HEADS), nn.Linear(WIDTH, WIDTH // HEADS)

    def mixed(self, x):
        return attend(self.heads(self.W_q(x)), self.W_k(x)[:, None], self.W_v(x)[:, None])


class GatedAfter(Textbook):
    def __init__(self):
        super().__init__(strength=nn.Linear(WIDTH, HEADS))

    def mixed(self, x):
        apart = super().mixed(x).unflatten(-1, (self.num_heads, -1))
        return (apart * self.strength(x).sigmoid()[..., None]).flatten(2)


class WideValues(nn.Module):
    """Its code reads the width of all values, which is not that of the queries."""

    def __init__(self):
        super().__init__()
        self.n, self.width = HEADS, 2 * WIDTH
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.o = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (split(p(x), self.n) for p in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).reshape(*x.shape[:2], self.width))


def sequence_first(module, x):
    return module.W_o(module.mixed(x.transpose(0, 1)).transpose(0, 1))


def in_windows(module, x):
    halves = plain(module, x.unflatten(1, (2, -1)).flatten(0, 1))
    return halves.unflatten(0, (len(x), 2)).flatten(1, 2)


def tokens_in_a_row(module, x):
    return module.W_o(module.mixed(x).flatten(0, 1)).unflatten(0, x.shape[:2])


def finite_unless_shaken(module, x):
    return plain(module, x) * (1 + torch.sqrt(-module.shift.abs()))


def more_outputs(module, x):
    """One that is empty, and one without a finite number."""
    return plain(module, x), x.new_zeros(0), torch.full((len(x), 2), -torch.inf)


def by_lists(module, q, k, v):
    """The other way to write an einsum."""
    chances = torch.einsum(q, [0, 1, 2, 3], k, [0, 1, 4, 3], [0, 1, 2, 4]).softmax(-1)
    heads = torch.einsum(chances, [0, 1, 2, 4], v, [0, 1, 4, 3], [0, 1, 2, 3])
    return heads.transpose(1, 2).flatten(2)


def from_the_right(module, q, k, v):
    chances = k.transpose(-1, -2).__rmatmul__(q).softmax(-1)
    return v.__rmatmul__(chances).transpose(1, 2).flatten(2)


def sloped(module, q, k, v):
    return attend(q * module.slopes.to(q), k, v)


def many_scales(module, q, k, v):
    """Fourteen tensors that may each be made of heads or not are 16,384 guesses and more."""
    for scale in module.scales:
        q = q * (1 + scale.view(-1, 1, 1))
    return attend(q, k, v)


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)  # a softmax that is no attention

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.gate(x).softmax(-1).amax(-1, keepdim=True) * self.down(self.up(x).relu())


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1)


def model_of(make):
    torch.manual_seed(0)
    return nn.Sequential(Layer(make()), Layer(make()))


def turned():
    return nn.Sequential(Transposed(), model_of(lambda: Textbook(run=sequence_first)), Transposed())


def one_layer_twice():
    layer = Layer(Textbook())
    return nn.Sequential(layer, layer)


def whole_number():
    steps = nn.Parameter(torch.tensor([2]), requires_grad=False)
    return Textbook(run=lambda module, x: plain(module, x) * module.steps, steps=steps)


def scaled():
    return Textbook(many_scales, scales=nn.ParameterList(torch.rand(HEADS) for _ in range(14)))


#: Attentions, by what is odd in them.
EXACT = {
    "a stored count": Textbook,
    "fused, grouped": lambda: Fused(grouped=True),
    "fused, sequential": lambda: Fused(grouped=False),
    "gated after": GatedAfter,
    "windows": lambda: Textbook(run=in_windows),
    "as many tokens in a window": lambda: Textbook(run=in_windows),
    "rows": lambda: Textbook(run=tokens_in_a_row),
    "lists": lambda: Textbook(by_lists),
    "from the right": lambda: Textbook(from_the_right),
    "neither parameter nor buffer": lambda: Textbook(sloped, slopes=torch.rand(HEADS, 1, 1)),
    "wide values": WideValues,
    "many scales": scaled,
    "odd when shaken": lambda: Textbook(
        run=finite_unless_shaken, shift=nn.Parameter(torch.zeros(1))
    ),
    "whole numbers": whole_number,
}
#: Whole models.
EXACT_MODELS = {
    "sequence first": turned,
    "sequence first, as many examples": turned,
    "more outputs": lambda: nn.Sequential(Textbook(run=more_outputs)),
    "one layer twice": one_layer_twice,
}
#: Examples and tokens, where they are other than (3, 5).
SIZES = {
    "windows": (3, 10),
    "as many tokens in a window": (3, 6),
    "sequence first, as many examples": (4, 4),
}


def assert_exact(model, x, sites, mask):
    model, small = model.double(), copy.deepcopy(model)
    with hp.gated(model, mask, sites):
        expected = model(x)
    assert hp.prune_(small, mask, sites=sites).n_removed > 0
    torch.testing.assert_close(small(x), expected, **CLOSE)


@pytest.mark.parametrize("name", [*EXACT, *EXACT_MODELS])
def test_what_is_found_is_exact(name):
    model = model_of(EXACT[name]) if name in EXACT else EXACT_MODELS[name]()
    model.eval()
    x = torch.randn(*SIZES.get(name, (3, 5)), WIDTH, dtype=torch.float64)
    found = hp.propose_layouts(model, x)
    assert not found.refused, str(found)
    sites = hp.find_sites(model, layouts=found)
    assert {s.n_query_heads for s in sites} == {HEADS}
    for seed in range(2):
        assert_exact(model, x, sites, ragged(sites, seed))


@pytest.mark.parametrize(
    ("make", "described"),
    [
        (OneKey, "4 heads in 1 KV groups of width 4"),
        (lambda: Grouped(4, 2, tiled=True), "4 heads in 2 KV groups of width 4"),
        (lambda: Grouped(8, 2), "8 heads in 2 KV groups of width 2"),
    ],
    ids=["one key", "in turn", "side by side"],
)
def test_shared_keys_are_described_as_they_are(make, described):
    model, x = model_of(make).double(), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    found = hp.propose_layouts(model, x)
    sites = hp.find_sites(model, layouts=found)
    assert all(described in str(site) for site in sites)
    if sites[0].n_kv_heads > 1:
        assert found[0].policies == ("group", "balanced")
        sites = hp.find_sites(model, layouts=found, policy="balanced")
    first_of_each = {s.name: [group[0] for group in s.groups] for s in sites}
    assert_exact(model, x, sites, mask_of(sites, first_of_each))


@pytest.mark.parametrize(
    "example",
    [torch.randn(1, 5, WIDTH), torch.randn(3, 5, WIDTH + 1), {"y": torch.randn(3, 5, WIDTH)}, None],
    ids=["one example", "another width", "another name", "nothing"],
)
def test_an_example_that_is_at_fault_is_named(example):
    with pytest.raises(hp.HeadPruneError, match="example: must be"):
        hp.propose_layouts(model_of(Textbook), example)


def test_what_is_no_model_that_can_be_tried_is_named():
    x = torch.randn(3, 5, WIDTH)
    with pytest.raises(hp.HeadPruneError, match=r"must be a torch\.nn\.Module"):
        hp.propose_layouts("bert", x)
    model = model_of(Textbook)
    model.cached = (torch.randn(2, requires_grad=True) * 2,)  # no leaf: deepcopy refuses it
    with pytest.raises(hp.HeadPruneError, match=r"copy\.deepcopy"):
        hp.propose_layouts(model, x)


@pytest.mark.parametrize(
    ("layout", "family", "kind"),
    [
        ("gpt2", "gpt2", "causal"),
        ("llama", "llama", "causal"),
        ("deberta_v2", "deberta-v2", "self"),
    ],
)
def test_known_families_are_found_without_their_layouts(layout, family, kind, monkeypatch):
    model, batch = registry.get(layout).tiny(0, family)
    meant = [s.name for s in hp.find_sites(model)]
    for part in model.modules():  # no flag tells the kind
        part.__dict__.pop("is_causal", None)
    monkeypatch.setattr(propose, "_taken", lambda model, layouts: [])
    found = hp.propose_layouts(model, batch)
    (modules, difference), *others = found.found.values()
    assert not others
    assert list(modules) == meant
    assert difference < 1e-10
    assert {s.kind for s in hp.find_sites(model, layouts=found)} == {kind}


def test_masks_of_a_proof_respect_the_policy():
    shared = AttentionSite("a", "any", "causal", 6, 2, 4, 4, tuple(range(6)), policy="balanced")
    one = AttentionSite("b", "any", "causal", 4, 1, 4, 4, tuple(range(4)), policy="balanced")
    single = AttentionSite("c", "any", "self", 3, 3, 4, 4, (0, 1, 2))
    drawn = masks([shared, one, single])
    for site in (shared, one, single):
        kept = [site.check(mask.kept(site.name)) for mask in drawn]
        assert all(kept)
        removed = [set(site.heads) - set(keep) for keep in kept]
        assert set().union(*removed) == set(site.heads)
    assert any(len(mask.kept("a")) == 4 for mask in drawn)  # one head of each group is removed


def test_the_model_and_the_random_state_do_not_change():
    model, x = model_of(Textbook).train(), torch.randn(3, 5, WIDTH)
    model[0].register_forward_hook(lambda *_: None)
    model(x).sum().backward()
    state = torch.random.get_rng_state()
    gradients = [p.grad for p in model.parameters()]
    with unchanged(model):
        assert len(hp.propose_layouts(model, x)) == 1
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_gets_the_same_proposals(mode):
    model, x = model_of(Textbook), torch.randn(3, 5, WIDTH)
    with mode():
        found = hp.propose_layouts(model, x)
    again = hp.propose_layouts(model, x)
    # The last digits of a proof's difference depend on the kernels of the processor.
    bound = re.compile(r"<= ([\d.e+-]+)")
    assert bound.sub("", str(found)) == bound.sub("", str(again))
    assert max(map(float, bound.findall(f"{found} {again}"))) < 1e-12
    assert len(found) == 1


def test_nothing_is_proposed_for_what_has_a_layout():
    model, batch = registry.get("bert").tiny(0)
    found = hp.propose_layouts(model, batch)
    assert (tuple(found), found.refused) == ((), ())
    assert "every softmax attention has a layout" in str(found)


def test_a_detected_layer_keeps_a_head():
    model, x = model_of(Textbook), torch.randn(3, 5, WIDTH)
    sites = hp.find_sites(model, layouts=hp.propose_layouts(model, x))
    mask = hp.HeadMask.from_keep({sites[0].name: []}, {s.name: 4 for s in sites})
    with pytest.raises(hp.HeadPruneError, match="cut so that it keeps a head"):
        hp.prune_(model, mask, sites=sites)


def test_a_layout_that_was_proven_on_another_width_is_refused() -> None:
    """Its head_dim is a number; the module's own count of heads shows that it does not fit."""

    class Sized(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.num_heads = HEADS
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

        def forward(self, x):
            return self.o(
                kernel(self, *(split(p(x), self.num_heads) for p in (self.q, self.k, self.v)))
            )

    def model(width):
        return nn.Sequential(Sized(width), nn.Linear(width, 3)).eval()

    found = hp.propose_layouts(model(16), torch.randn(4, 5, 16))
    assert len(hp.find_sites(model(16), layouts=found)) == 1
    with pytest.raises(
        hp.HeadPruneError, match="'num_heads' is 4, but heads of width 4 would be 8"
    ):
        hp.find_sites(model(32), layouts=found)

    # Without an example nothing is compared, and the report says what that risks.
    small = model(16)
    sites = hp.find_sites(small, layouts=found)
    report = hp.prune_(small, mask_of(sites, {sites[0].name: [0, 2]}), sites=sites)
    assert any("Nothing was compared" in warning for warning in report.warnings)
