"""Attentions that are odd in one way each: which are refused, by which name and words, and which
are taken all the same; and what the proof itself refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel, VerificationFailed
from headprune.core.heads import AttentionSite
from headprune.detect import propose
from headprune.detect.properties import PROPERTIES
from headprune.detect.prove import Scratch, largest_difference, prove
from headprune.detect.search import sites_by
from headprune.model.sites import Sites
from tests.laws.support import CLOSE, ragged
from tests.unit.test_detect import (
    HEADS,
    WIDTH,
    GatedAfter,
    Layer,
    NumberInCode,
    OneKey,
    Textbook,
    attend,
    model_of,
)
from tests.unit.test_detect import split as by_count

# --- refused
# ----------------------------------------------------------------------------------------------------------


class NoOutput(Textbook):
    def __init__(self) -> None:
        super().__init__()
        del self.W_o

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x)


class OneHead(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 1


class OneModuleTwice(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.W_k = self.W_q


class GivenQueries(Textbook):
    def __init__(self) -> None:
        super().__init__()
        del self.W_q

    def forward(self, x: Tensor, q: Tensor | None = None) -> Tensor:
        assert q is not None
        return self.W_o(attend(self.heads(q), self.heads(self.W_k(x)), self.heads(self.W_v(x))))


class Queries(nn.Module):
    """Makes the queries of two attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.one, self.two = nn.Linear(WIDTH, WIDTH), GivenQueries(), GivenQueries()

    def forward(self, x: Tensor) -> Tensor:
        q = self.asks(x)
        return self.one(x, q) + self.two(x, q)


class OneKeyFourHeads(OneKey):
    """Its values reach all heads, which is no reason; the number in its code is one."""

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, -1)).transpose(1, 2)


class FirstHeadForAll(Textbook):
    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        return attend(q, k, v + v[:, :1])


class SpareFeatures(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.W_q = nn.Linear(WIDTH, WIDTH + 2)

    def mixed(self, x: Tensor) -> Tensor:
        return attend(
            self.heads(self.W_q(x)[..., :WIDTH]), self.heads(self.W_k(x)), self.heads(self.W_v(x))
        )


class MoreBeside(Textbook):
    """Its output projection is given three features that are no head's."""

    def __init__(self) -> None:
        super().__init__()
        self.W_o = nn.Linear(WIDTH + 3, WIDTH)

    def mixed(self, x: Tensor) -> Tensor:
        return torch.cat([super().mixed(x), x[..., :3]], -1)


class Silent(Textbook):
    def forward(self, x: Tensor) -> Tensor:
        return 0.0 * super().forward(x)


class OneSequence(Textbook):
    """All examples attend to each other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)[None]).reshape(x.shape)


class NextExample(Textbook):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(1, 0)


class OtherCode(Textbook):
    """Does without attention when it is cut."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.W_q.out_features < WIDTH else super().forward(x)


class LouderWithTwo(Textbook):
    """One head less changes nothing but that head; two less do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.1 if self.num_heads <= 2 else 1.0)


class CountsCalls(Textbook):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsCalls.calls += 1
        return super().forward(x) + CountsCalls.calls


class Float32Only(Textbook):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("only float32\nand nothing else")
        return super().forward(x)


class NotANumber(Textbook):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("nan")


class Router(Textbook):
    """A softmax over experts that a bare matrix chooses, times bare values."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.values = (
            nn.Parameter(torch.randn(WIDTH, 3)),
            nn.Parameter(torch.randn(3, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.W_o((x @ self.experts).softmax(-1) @ self.values)


def tied() -> nn.Module:
    model = model_of(Textbook)
    model[1].attention.W_q.weight = model[0].attention.W_q.weight
    return model


class Sized(nn.Module):
    """Two and four heads of the same matrices; only a tuple says which."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.sizes = (WIDTH // n_heads,)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, *self.sizes)).transpose(1, 2)
            for p in (self.W_q, self.W_k, self.W_v)
        )
        return self.W_o(attend(q, k, v))


@pytest.mark.parametrize(
    ("make", "why", "words"),
    [
        (
            lambda: nn.Sequential(NoOutput()),
            "no output projection",
            "no projection is given the heads' outputs",
        ),
        (lambda: model_of(OneHead), "one head", "the softmax sees one head"),
        (lambda: model_of(OneModuleTwice), "shared tensors", "'W_q' and 'W_k' are one module"),
        (tied, "shared tensors", "1.attention.W_q.weight: must be cut in one way"),
        (lambda: model_of(Queries), "heads made by other modules", "0.attention.asks lies outside"),
        (
            lambda: model_of(OneKeyFourHeads),
            "head counts kept elsewhere",
            "RuntimeError: Expected size",
        ),
        (
            lambda: model_of(FirstHeadForAll),
            "depends on all heads",
            "one feature of 'W_v' changes all 4 heads' outputs",
        ),
        (
            lambda: model_of(SpareFeatures),
            "heads not side by side",
            "the 18 features of 'W_q' are no 4 heads",
        ),
        (
            lambda: model_of(MoreBeside),
            "no layout found",
            "fit no packing of unknown heads in a width of 19",
        ),
        (lambda: model_of(Silent), "no effect on the example", "no effect of gates of zero"),
        (
            lambda: model_of(OneSequence),
            "heads not side by side",
            "for the 1 x 15 rows that the model runs on",
        ),
        (
            lambda: model_of(NextExample),
            "heads not side by side",
            "example 0 only, got changes in examples [1, 2]",
        ),
        (
            lambda: model_of(OtherCode),
            "no layout found",
            "the pruned model: must be equal to the gated one",
        ),
        (
            lambda: model_of(LouderWithTwo),
            "depends on all heads",
            "cut to 3 heads, each in its place",
        ),
        (lambda: model_of(CountsCalls), "random in evaluation mode", "got random outputs"),
        (lambda: model_of(Float32Only), "does not run in fp64", "got TypeError: only float32"),
        (
            lambda: model_of(NotANumber),
            "does not run in fp64",
            "outputs are finite, got none that is",
        ),
        (lambda: model_of(Router), "no softmax attention", "none was seen on this example"),
        (
            lambda: nn.Sequential(Layer(Sized(4)), Layer(Sized(2))),
            "head counts kept elsewhere",
            "modules of the same sizes have 4 and 2 heads, and no attribute tells which",
        ),
        (
            lambda: nn.Sequential(Layer(Textbook()), Layer(NumberInCode())),
            "head counts kept elsewhere",
            (
                "not on all alike: the pruned model: must be equal to the gated one up to 1e-10,"
                " got a difference of"
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_is_named_and_quoted(
    make: Any, why: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(propose, "_taken", lambda model, layouts: [])
    torch.manual_seed(0)
    found = hp.propose_layouts(make(), torch.randn(3, 5, WIDTH))
    assert not found, str(found)
    assert {r.property for r in found.refused} == {why}
    assert why in PROPERTIES
    assert words in str(found)


# --- taken all the same
# -----------------------------------------------------------------------------------------------


class InWindows(Textbook):
    """Halves of an example attend each to itself."""

    def forward(self, x: Tensor) -> Tensor:
        halves = super().forward(x.unflatten(1, (2, -1)).flatten(0, 1))
        return halves.unflatten(0, (len(x), 2)).flatten(1, 2)


class TokensInARow(Textbook):
    def forward(self, x: Tensor) -> Tensor:
        return self.W_o(self.mixed(x).flatten(0, 1)).unflatten(0, x.shape[:2])


class Lists(Textbook):
    """The other way to write an einsum."""

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        chances = torch.einsum(q, [0, 1, 2, 3], k, [0, 1, 4, 3], [0, 1, 2, 4]).softmax(-1)
        return (
            torch.einsum(chances, [0, 1, 2, 4], v, [0, 1, 4, 3], [0, 1, 2, 3])
            .transpose(1, 2)
            .flatten(2)
        )


class FromTheRight(Textbook):
    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        chances = k.transpose(-1, -2).__rmatmul__(q).softmax(-1)
        return v.__rmatmul__(chances).transpose(1, 2).flatten(2)


class PlainTensor(Textbook):
    """A slope a head that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.rand(HEADS, 1, 1)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        return attend(q * self.slopes.to(q), k, v)


class WithoutGradients(Textbook):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


class WideValues(nn.Module):
    """Its code reads the width of all values, which is not that of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.width = HEADS, 2 * WIDTH
        sizes = (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(*size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (by_count(p(x), self.n) for p in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).reshape(*x.shape[:2], self.width))


class ManyScales(Textbook):
    """Fourteen tensors that may each be made of heads or not are 16,384 guesses and more."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(HEADS) for _ in range(14))

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.W_q, self.W_k, self.W_v))
        for scale in self.scales:
            q = q * (1 + scale.view(-1, 1, 1))
        return attend(q, k, v)


class OddWhenShaken(Textbook):
    """Finite with its own weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.sqrt(-self.shift.abs()))


class WholeNumbers(Textbook):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.tensor([2]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.steps


class MoreOutputs(Textbook):
    """One that is empty, and one without a finite number."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.new_zeros(0), torch.full((len(x), 2), -torch.inf)


def one_layer_twice() -> nn.Module:
    layer = Layer(Textbook())
    return nn.Sequential(layer, layer)


@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (lambda: model_of(InWindows), 10),
        (lambda: model_of(InWindows), 6),  # as many tokens in a window as examples
        (lambda: model_of(TokensInARow), 5),
        (lambda: model_of(Lists), 5),
        (lambda: model_of(FromTheRight), 5),
        (lambda: model_of(PlainTensor), 5),
        (lambda: model_of(WithoutGradients), 5),
        (lambda: model_of(WideValues), 5),
        (lambda: model_of(ManyScales), 5),
        (lambda: model_of(OddWhenShaken), 5),
        (lambda: model_of(WholeNumbers), 5),
        (lambda: nn.Sequential(MoreOutputs()), 5),
        (one_layer_twice, 5),
    ],
    ids=[
        *(
            "windows",
            "few tokens",
            "rows",
            "lists",
            "from the right",
            "plain tensor",
            "without gradients",
            "wide values",
        ),
        *("many scales", "odd when shaken", "whole numbers", "more outputs", "one layer twice"),
    ],
)
def test_what_is_taken_is_exact(make: Any, tokens: int) -> None:
    model, x = make().eval(), torch.randn(3, tokens, WIDTH, dtype=torch.float64)
    found = hp.propose_layouts(model, x)
    assert not found.refused, str(found)
    sites = hp.find_sites(model, layouts=found)
    assert {s.n_query_heads for s in sites} == {HEADS}
    model = model.double()
    mask, small = ragged(sites), copy.deepcopy(model)
    with hp.gated(model, mask, sites):
        expected = model(x)
    assert hp.prune_(small, mask, sites=sites).n_removed > 0
    assert_close(small(x), expected, **CLOSE)


def test_the_attribute_that_tells_modules_of_one_size_apart_need_not_be_the_first() -> None:
    class Told(Sized):
        def __init__(self, n_heads: int) -> None:
            super().__init__(n_heads)
            self.steps, self.many = 7, n_heads

    model = nn.Sequential(Layer(Told(4)), Layer(Told(2)))
    found = hp.propose_layouts(model, torch.randn(3, 5, WIDTH))
    assert [s.n_query_heads for s in hp.find_sites(model, layouts=found)] == [4, 2]


def test_proposals_come_back_from_a_copy_and_from_a_file() -> None:
    model = nn.Sequential(Layer(Textbook()), Layer(MoreBeside()))
    found = hp.propose_layouts(model, torch.randn(3, 5, WIDTH))
    assert len(found) == len(found.refused) == 1
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (tuple(again), again.found, again.refused) == (
            tuple(found),
            found.found,
            found.refused,
        )
        assert str(again) == str(found)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_part_is_refused() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(Layer(Textbook()), torch.jit.trace(Plain(), torch.zeros(1)))
    with pytest.raises(
        UnsupportedModel,
        match="of Python code, which can be watched, got one with modules compiled",
    ):
        hp.propose_layouts(model, torch.randn(3, 5, WIDTH))


# --- the proof
# --------------------------------------------------------------------------------------------------------

ONE, NAN, INF = torch.ones(2), torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        ([ONE], [ONE], 0.0),
        ([ONE + 0.5], [ONE], 0.5),
        ([ONE + 0.5], [ONE * 10], 0.85),  # relative to the largest
        ([ONE, ONE], [ONE], torch.inf),
        ([ONE.view(1, 2)], [ONE], torch.inf),
        ([torch.zeros(0), ONE + 0.5], [torch.zeros(0), ONE], 0.5),
        ([NAN], [NAN], 0.0),
        ([NAN], [ONE], torch.inf),
        ([ONE], [INF], torch.inf),
        ([torch.full((2,), torch.nan), ONE + 0.5], [torch.full((2,), torch.nan), ONE], 0.5),
    ],
)
def test_the_largest_difference(
    got: list[Tensor], expected: list[Tensor], difference: float
) -> None:
    assert largest_difference(got, expected) == pytest.approx(difference)


def test_sites_without_a_choice_prove_nothing() -> None:
    scratch = Scratch(model_of(Textbook), torch.randn(3, 5, WIDTH))
    single = AttentionSite("0.attention", "any", "self", 4, 1, 4, 4, (0, 1, 2, 3))
    with pytest.raises(
        VerificationFailed, match="some with a unit to remove and one to keep, got one unit each"
    ):
        prove(scratch, Sites([single], ()))


def test_a_layout_is_for_no_module_that_it_does_not_fit() -> None:
    model, x = model_of(Textbook), torch.randn(3, 5, WIDTH)
    (layout,) = hp.propose_layouts(model, x)
    other = nn.Sequential(Layer(GatedAfter()))
    with pytest.raises(
        UnsupportedModel,
        match=r"0\.attention: must be of layout 'detected_textbook', got GatedAfter",
    ):
        sites_by(other, layout, ["0.attention"])
