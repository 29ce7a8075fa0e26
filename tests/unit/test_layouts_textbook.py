"""Attention from textbooks: what is taken, and look-alikes that a cut would silently change, which
are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.layouts._tiny_textbook import D2l, Head, Prepared, Projected, SideBySide
from headprune.layouts.head_list import head_width
from headprune.model.sites import find_sites
from tests.laws.support import CLOSE, picture, shaken


class Scaled(D2l):
    """Divides by the number of heads, which a cut changes."""

    def forward(self, queries: Tensor, keys: Any, values: Any, valid_lens: Any) -> Any:
        return super().forward(queries / self.num_heads, keys, values, valid_lens)


class Talking(D2l):
    """Mixes the heads' outputs before the projection."""

    def _split(self, x: Tensor) -> Tensor:
        heads = super()._split(x).unflatten(0, (-1, self.num_heads))
        return (heads + heads.mean(1, keepdim=True)).flatten(0, 1)


class InsideOut(D2l):
    """Lays the heads' outputs inside out: neighbouring inputs of the projection are of different
    heads."""

    def forward(self, queries: Tensor, keys: Any, values: Any, valid_lens: Any) -> Any:
        given = (self.W_q, queries), (self.W_k, keys), (self.W_v, values)
        split = [self._split(projection(x)) for projection, x in given]
        heads = self.attention(*split, valid_lens).unflatten(0, (-1, self.num_heads))
        return self.W_o(heads.permute(0, 2, 3, 1).flatten(2))


class Additive(D2l):
    """Its scores have parameters of their own."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.attention.w_v = nn.Linear(dim // num_heads, 1)


class OverQueries(Prepared):
    """Normalises its scores over the queries."""

    def forward(self, *, query: Tensor, key: Any, value: Any, mask: Any = None) -> Any:
        q, k, v = self.query(query), self.key(key), self.value(value)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * self.scale
        heads = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(0), v)
        return self.output(heads.reshape(*query.shape[:2], -1))


class Normed(Projected):
    """Normalises over all heads, without a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.cat([head(x) for head in self.heads], -1)
        return self.proj(nn.functional.layer_norm(heads, heads.shape[-1:]))


class Averaged(SideBySide):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


def built(kind: type[nn.Module]) -> nn.Module:
    module = kind(12, 4)
    if isinstance(module, D2l):
        x = torch.randn(2, 5, 12)
        for projection in (module.W_q, module.W_k, module.W_v, module.W_o):
            projection(x)
    return shaken(module).double().eval()


@pytest.mark.parametrize("kind", [Scaled, Talking, InsideOut, OverQueries, Normed, Averaged])
def test_look_alikes_are_refused(kind: type[nn.Module]) -> None:
    module = built(kind)
    module.__class__ = type("AnyAttention", (kind,), {})
    with pytest.raises(UnsupportedModel, match=r"AnyAttention\.forward: .* got something else"):
        find_sites(nn.ModuleList([module]))


def test_scores_with_parameters_are_refused() -> None:
    module = Additive(12, 4)
    module(torch.randn(2, 5, 12), torch.randn(2, 5, 12), torch.randn(2, 5, 12), None)
    module.__class__ = type("AdditiveAttention", (Additive,), {})
    with pytest.raises(UnsupportedModel, match="must be scaled dot-product attention"):
        find_sites(nn.ModuleList([module]))


def test_lazy_projections_ask_for_a_first_run() -> None:
    module = D2l(12, 4)
    module.__class__ = type("LazyAttention", (D2l,), {})
    with pytest.raises(UnsupportedModel, match=r"got torch.*LazyLinear"):
        find_sites(nn.ModuleList([module]))


def test_the_proof_leaves_no_trace() -> None:
    module = nn.ModuleList([built(D2l)]).train()
    before, state = picture(module), torch.random.get_rng_state()
    find_sites(module)
    assert picture(module) == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_head_count_repeats_the_valid_lengths() -> None:
    model = nn.ModuleList([built(D2l)])
    small, x = copy.deepcopy(model), torch.randn(3, 5, 12).double()
    lengths = torch.tensor([5, 2, 3])
    mask = hp.HeadMask.from_keep({"0": [3, 1, 0]}, {"0": 4})
    with hp.gated(model, mask):
        expected = model[0](x, x, x, lengths)
    hp.prune_(small, mask)
    assert small[0].num_heads == 3
    assert_close(small[0](x, x, x, lengths), expected, **CLOSE)


def test_head_counts_of_the_preparing_modules() -> None:
    model = nn.ModuleList([built(Prepared)])
    x = torch.randn(5, 3, 12).double()
    rows = [[1.0, 0, 1, 1], [1, 1, 1, 1], [0.5, 2, 0, 0]]  # one an example: the second axis
    gates = torch.tensor(rows).double()
    with hp.gated(model, {"0": gates}):
        together = model[0](query=x, key=x, value=x)
    for number, example in enumerate(x.split(1, 1)):
        with hp.gated(model, {"0": gates[number]}):
            alone = model[0](query=example, key=example, value=example)
        assert_close(together[:, number : number + 1], alone, **CLOSE)
    hp.prune_(model, hp.HeadMask.from_keep({"0": [2]}, {"0": 4}))
    inner = model[0]
    assert {inner.heads, inner.query.heads, inner.key.heads, inner.value.heads} == {1}


@pytest.mark.parametrize("keep", [[0, 3], []], ids=str)
def test_without_an_output_projection_the_width_is_as_it_was(keep: list[int]) -> None:
    model = nn.ModuleList([built(SideBySide)])
    small, x = copy.deepcopy(model), torch.randn(2, 5, 12).double()
    mask = hp.HeadMask.from_keep({"0": keep}, {"0": 4})
    with hp.gated(model, mask):
        expected = model[0](x)
    hp.prune_(small, mask)
    assert_close(small[0](x), expected, **CLOSE)
    assert len(small[0].heads) == len(keep)
    assert [s.heads for s in find_sites(small)] == [tuple(keep)]


def test_gates_of_a_cut_module_are_for_the_heads_that_it_has() -> None:
    model, x = nn.ModuleList([built(SideBySide)]), torch.randn(2, 5, 12).double()
    hp.prune_(model, hp.HeadMask.from_keep({"0": [0, 3]}, {"0": 4}))
    expected = model[0](x).clone()
    expected[..., 9:12] = 0
    with hp.gated(model, {"0": torch.tensor([1.0, 0.0]).double()}):
        assert_close(model[0](x), expected, **CLOSE)


class Lists(nn.Module):
    """A list of projections each of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("queries", "keys", "heads"):
            setattr(self, name, nn.ModuleList(nn.Linear(12, 3) for _ in range(4)))
        self.proj = nn.Linear(12, 12)


LISTS = hp.AttentionLayout(
    name="lists",
    gate="proj",
    slabs=(
        hp.HeadSlab("queries", "list", "query"),
        hp.HeadSlab("keys", "list", "key"),
        hp.HeadSlab("heads", "list", "value"),
        hp.HeadSlab("proj", "in", "context"),
    ),
    head_dim=3,
)


@pytest.mark.parametrize("module", [built(Projected), Lists()])
def test_magnitude_of_a_list_is_that_of_its_values_and_the_output(module: Any) -> None:
    sites = find_sites(nn.Sequential(module), layouts=[LISTS])
    scores = hp.score(nn.Sequential(module), scorer="magnitude", sites=sites)
    for head, value in enumerate(scores.values[0]):
        own = torch.cat([p.flatten() for p in module.heads[head].parameters()]).norm()
        out = module.proj.weight[:, 3 * head : 3 * head + 3].norm()
        assert_close(value, float((own * out).detach()), rtol=1e-6, atol=0)


def test_heads_of_unlike_widths_are_no_list_of_heads() -> None:
    class Unlike(SideBySide):
        def __init__(self) -> None:
            super().__init__(12, 4)
            self.heads[2] = Head(12, 5)

    with pytest.raises(InvalidValue, match=r"heads: must be modules that return .*, got \[3, 5\]"):
        head_width(Unlike(), "")
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        find_sites(nn.Sequential(Unlike()))


def test_compiles_with_the_class_put_in_front() -> None:
    model: Any = nn.Sequential(built(SideBySide))
    x = torch.randn(2, 5, 12).double()
    hp.prune_(model, hp.HeadMask.from_keep({"0": [1, 2]}, {"0": 4}))
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(x), model(x), **CLOSE)
