"""Attentions that are odd in one way each: for which property each is refused, and what the proof
itself refuses."""

from itertools import count

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import UnsupportedModel, VerificationFailed
from headprune.core.heads import AttentionSite
from headprune.detect import propose
from headprune.detect.properties import PROPERTIES
from headprune.detect.prove import Scratch, largest_difference, prove
from headprune.detect.search import sites_by
from headprune.layouts import registry
from headprune.model.sites import Sites
from tests.unit.test_detect import (
    HEADS,
    WIDTH,
    GatedAfter,
    Layer,
    OneKey,
    Textbook,
    attend,
    kernel,
    model_of,
    plain,
    sloped,
    split,
)


class NumberInCode(Textbook):
    def heads(self, x):
        return split(x, 4)


class OneKeyFourHeads(OneKey):
    """Its values reach all heads, which is no reason; the number in its code is one."""

    def heads(self, x):
        return split(x, 4)


class WholeNorm(Textbook):
    def __init__(self):
        super().__init__(query_norm=nn.RMSNorm(WIDTH))

    def mixed(self, x):
        q = self.query_norm(self.W_q(x))
        return kernel(self, *map(self.heads, (q, self.W_k(x), self.W_v(x))))


class Convolved(Textbook):
    def __init__(self):
        super().__init__(W_q=nn.Conv1d(WIDTH, WIDTH, 1))

    def mixed(self, x):
        q = self.W_q(x.transpose(1, 2)).transpose(1, 2)
        return kernel(self, *map(self.heads, (q, self.W_k(x), self.W_v(x))))


class Latent(Textbook):
    def __init__(self):
        super().__init__(common=nn.Linear(WIDTH, 2), W_q=nn.Linear(WIDTH, HEADS * 6))

    def mixed(self, x):
        k = self.heads(self.W_k(x))
        common = self.common(x)[:, None].expand(-1, k.shape[1], -1, -1)
        return attend(self.heads(self.W_q(x)), torch.cat([k, common], -1), self.heads(self.W_v(x)))


class WidthFirst(nn.Module):
    """The head's index runs fastest along the fused projection."""

    def __init__(self):
        super().__init__()
        self.n_heads = HEADS
        self.mix, self.end = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, -1, self.n_heads)).permute(2, 0, 4, 1, 3)
        return self.end(attend(q, k, v))


class GivenQueries(Textbook):
    def __init__(self):
        super().__init__()
        del self.W_q

    def forward(self, x, q=None):
        return self.W_o(attend(*map(self.heads, (q, self.W_k(x), self.W_v(x)))))


class Queries(nn.Module):
    def __init__(self):
        super().__init__()
        self.asks, self.one, self.two = nn.Linear(WIDTH, WIDTH), GivenQueries(), GivenQueries()

    def forward(self, x):
        q = self.asks(x)
        return self.one(x, q) + self.two(x, q)


class OwnProduct(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)


class Sized(nn.Module):
    """Two and four heads of the same matrices; only a tuple says which."""

    def __init__(self, n_heads):
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.sizes = (WIDTH // n_heads,)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, *self.sizes)).transpose(1, 2)
            for p in (self.W_q, self.W_k, self.W_v)
        )
        return self.W_o(attend(q, k, v))


# Functions of a Textbook and of its queries, keys and values, which take the attention's place.


def talking(module, q, k, v):
    chances = (q @ k.transpose(-1, -2)).softmax(-1)
    return (module.talk(chances.movedim(1, -1)).movedim(-1, 1) @ v).transpose(1, 2).flatten(2)


def slopes(module, q, k, v):
    falling = 2.0 ** (-8 * torch.arange(1, module.num_heads + 1) / module.num_heads)
    place = torch.arange(q.shape[2])
    return attend(q, k, v, falling.view(-1, 1, 1) * -(place[:, None] - place).abs())


def over_heads(module, q, k, v):
    return ((q @ k.transpose(-1, -2)).softmax(1) @ v).transpose(1, 2).flatten(2)


def flipped(module, q, k, v):
    return kernel(module, q, k, v).unflatten(-1, (module.num_heads, -1)).flip(-2).flatten(2)


# Functions of a Textbook and of its input, which take the forward's place.


def two_outputs(module, x):
    mixed = module.mixed(x)
    return module.W_o(mixed) + module.other(mixed).tanh()


def past_the_output(module, x):
    mixed = module.mixed(x)
    return module.W_o(mixed) + mixed.mean(-1, keepdim=True)


def more_beside(module, x):
    return module.W_o(torch.cat([module.mixed(x), x[..., :3]], -1))


def without_attention_when_cut(module, x):
    return x if module.W_q.out_features < WIDTH else plain(module, x)


def louder_with_two(module, x):
    """One head less changes nothing but that head; two less do."""
    return plain(module, x) * (1.1 if module.num_heads <= 2 else 1.0)


def float32_only(module, x):
    if x.dtype != torch.float32:
        raise TypeError("only float32\nand nothing else")
    return plain(module, x)


def routed(module, x):
    """A softmax over experts that a bare matrix chooses, times bare values."""
    return module.W_o((x @ module.experts).softmax(-1) @ module.values)


def router():
    experts, values = torch.randn(WIDTH, 3), torch.randn(3, WIDTH)
    return Textbook(run=routed, experts=nn.Parameter(experts), values=nn.Parameter(values))


def one_module_twice():
    module = Textbook()
    module.W_k = module.W_q
    return module


def wider():
    return Textbook(run=more_beside, W_o=nn.Linear(WIDTH + 3, WIDTH))


def tied():
    model = model_of(Textbook)
    model[1].attention.W_q.weight = model[0].attention.W_q.weight
    return model


#: Attentions, by the property for which they are refused and by words of what was seen.
CALLS = count()


def first_head_for_all(module, q, k, v):
    return attend(q, k, v + v[:, :1])


class SpareFeatures(Textbook):
    def __init__(self):
        super().__init__(W_q=nn.Linear(WIDTH, WIDTH + 2))

    def mixed(self, x):
        return attend(*map(self.heads, (self.W_q(x)[..., :WIDTH], self.W_k(x), self.W_v(x))))


REFUSED = {
    "norm across heads": {
        "'inner' over 16": lambda: Textbook(
            lambda module, q, k, v: module.inner(kernel(module, q, k, v)),
            inner=nn.LayerNorm(WIDTH),
        ),
    },
    "norm over the whole projection": {"'query_norm' spans": WholeNorm},
    "talking heads": {"pass talk": lambda: Textbook(talking, talk=nn.Linear(HEADS, HEADS))},
    "depends on all heads": {
        "cut to": lambda: Textbook(slopes),
        "one feature of 'W_v' changes all 4": lambda: Textbook(first_head_for_all),
        "over another axis than the last": lambda: Textbook(over_heads),
        "cut to 3 heads, it computes as many": lambda: Textbook(run=louder_with_two),
    },
    "heads not side by side": {
        "": lambda: Textbook(flipped),
        "alternate between heads": WidthFirst,
        "the 18 features of 'W_q' do not divide into 4 heads": SpareFeatures,
        "for the 1 x 15 rows": lambda: Textbook(
            run=lambda module, x: plain(module, x.flatten(0, 1)[None]).reshape(x.shape)
        ),
        "got changes in examples [1]": lambda: Textbook(
            run=lambda module, x: plain(module, x).roll(1, 0)
        ),
    },
    "more than one output": {
        "'other' beside 'W_o'": lambda: Textbook(run=two_outputs, other=nn.Linear(WIDTH, WIDTH)),
        "the module's own output": lambda: Textbook(run=past_the_output),
    },
    "no output projection": {
        "one native function": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True),
    },
    "projections that are no matrices": {
        "'W_q' is a Conv1d": Convolved,
        "'W_v' is a OwnProduct": lambda: Textbook(W_v=OwnProduct(WIDTH, WIDTH)),
    },
    "latent keys": {"'common' makes a part of every head's keys": Latent},
    "heads made by other modules": {"0.attention.asks lies outside": Queries},
    "head counts kept elsewhere": {
        "": NumberInCode,
        "RuntimeError: Expected size": OneKeyFourHeads,
    },
    "one head": {"the softmax sees one head": lambda: Textbook(num_heads=1)},
    "shared tensors": {"'W_q' and 'W_k' are one module": one_module_twice},
    "no effect on the example": {
        "the same outputs with all its gates at zero": lambda: Textbook(
            run=lambda module, x: 0.0 * plain(module, x)
        )
    },
    "random in evaluation mode": {
        "got random outputs": lambda: Textbook(run=lambda m, x: plain(m, x) + next(CALLS)),
        "": lambda: Textbook(
            lambda *given: nn.functional.dropout(kernel(*given), 0.2, training=True)
        ),
    },
    "does not run in fp64": {
        "got TypeError: only float32": lambda: Textbook(run=float32_only),
        "outputs are no NaN, got NaN, or no outputs": lambda: Textbook(
            run=lambda m, x: plain(m, x) * float("nan")
        ),
    },
    "no softmax attention": {"none was seen on this example": router},
    "no layout found": {
        "fit no packing of unknown heads in a width of 19": wider,
        "the pruned model: must be equal to": lambda: Textbook(run=without_attention_when_cut),
    },
}
CASES = [(why, words) for why, makes in REFUSED.items() for words in makes]


def refusals(model, example, monkeypatch):
    """Why a model is refused whole, also where a layout is registered, and the words."""
    monkeypatch.setattr(propose, "_taken", lambda model, layouts: [])
    found = hp.propose_layouts(model, example)
    assert not found, str(found)
    return found.refused, str(found)


@pytest.mark.parametrize(("why", "words"), CASES)
def test_what_is_not_faithful_is_refused_by_name(why, words, monkeypatch):
    model = nn.Sequential(Layer(REFUSED[why][words]()))
    refused, text = refusals(model, torch.randn(3, 5, WIDTH), monkeypatch)
    assert {r.property for r in refused} == {why}
    assert why in text
    assert words in text


def test_every_property_is_seen():
    assert set(REFUSED) == set(PROPERTIES)


@pytest.mark.parametrize(
    ("make", "why", "words"),
    [
        (
            lambda: nn.Sequential(Textbook(run=Textbook.mixed, W_o=nn.Identity())),
            "no output projection",
            "no projection is given the heads' outputs",
        ),
        (tied, "shared tensors", "1.attention.W_q.weight: must be cut as 0.attention.W_q is"),
        (
            lambda: nn.Sequential(Layer(Sized(4)), Layer(Sized(2))),
            "head counts kept elsewhere",
            "modules of the same sizes have 4 and 2 heads, and no attribute tells which",
        ),
        (
            lambda: nn.Sequential(Layer(Textbook()), Layer(NumberInCode())),
            "head counts kept elsewhere",
            "it also matches modules where its proof fails: the pruned model: must be equal to the gated one up to 1e-10",
        ),
    ],
    ids=["no output", "tied", "two and four heads", "one of two"],
)
def test_models_that_are_refused(make, why, words, monkeypatch):
    refused, text = refusals(make(), torch.randn(3, 5, WIDTH), monkeypatch)
    assert {r.property for r in refused} == {why}
    assert words in text


@pytest.mark.parametrize(
    ("layout", "why"),
    [("bloom", "head counts kept elsewhere"), ("deepseek_v3", "latent keys")],
)
def test_known_families_that_need_more_are_refused_by_name(layout, why, monkeypatch):
    refused, _ = refusals(*registry.get(layout).tiny(0), monkeypatch)
    assert refused[0].property == why


class Sharing(nn.Module):
    """The second attention uses the first one's slopes, as T5's layers do its biases."""

    def __init__(self):
        super().__init__()
        self.one = Textbook(sloped, slopes=nn.Parameter(torch.rand(HEADS, 1, 1)))
        self.two = Textbook(lambda module, q, k, v: sloped(module.others[0], q, k, v))
        self.two.others = (self.one,)  # no part of it

    def forward(self, x):
        return self.two(x + self.one(x))


def test_what_one_layer_makes_for_the_next_is_refused(monkeypatch):
    (first, _), text = refusals(Sharing(), torch.randn(3, 5, WIDTH), monkeypatch)
    assert (first.modules, first.property) == (("one",), "shared tensors")
    assert "'two' takes what it makes for all heads" in text


def test_the_attribute_that_tells_modules_of_one_size_apart_need_not_be_the_first():
    class Told(Sized):
        def __init__(self, n_heads):
            super().__init__(n_heads)
            self.steps, self.many = 7, n_heads

    model = nn.Sequential(Layer(Told(4)), Layer(Told(2)))
    found = hp.propose_layouts(model, torch.randn(3, 5, WIDTH))
    assert [s.n_query_heads for s in hp.find_sites(model, layouts=found)] == [4, 2]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_part_is_refused():
    compiled = torch.jit.trace(nn.Identity(), torch.zeros(1))
    with pytest.raises(UnsupportedModel, match="one with modules compiled"):
        hp.propose_layouts(nn.Sequential(Layer(Textbook()), compiled), torch.randn(3, 5, WIDTH))


ONE, NAN, INF = torch.ones(2), torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])


def test_the_largest_difference():
    for got, expected, difference in (
        ([ONE + 0.5], [ONE * 10], 0.85),  # relative to the largest
        ([ONE, ONE], [ONE], torch.inf),
        ([ONE.view(1, 2)], [ONE], torch.inf),
        ([torch.zeros(0), ONE + 0.5], [torch.zeros(0), ONE], 0.5),
        ([NAN], [NAN], 0.0),
        ([NAN], [ONE], torch.inf),
        ([ONE], [INF], torch.inf),
    ):
        assert largest_difference(got, expected) == pytest.approx(difference)


def test_sites_without_a_choice_prove_nothing():
    scratch = Scratch(model_of(Textbook), torch.randn(3, 5, WIDTH))
    single = AttentionSite("0.attention", "any", "self", 4, 1, 4, 4, (0, 1, 2, 3))
    with pytest.raises(VerificationFailed, match="got one unit each"):
        prove(scratch, Sites([single], ()))


def test_a_layout_is_for_no_module_that_it_does_not_fit():
    (layout,) = hp.propose_layouts(model_of(Textbook), torch.randn(3, 5, WIDTH))
    other = nn.Sequential(Layer(GatedAfter()))
    with pytest.raises(UnsupportedModel, match=r"of layout 'detected_textbook', got GatedAfter"):
        sites_by(other, layout, ["0.attention"])
