"""Attention from textbooks: what is taken, and look-alikes that a cut would silently change, which
are refused."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.layouts._tiny_textbook import D2l, Head, Prepared, Projected, SideBySide
from headprune.layouts.head_list import head_width
from headprune.model.sites import find_sites
from tests.laws.support import CLOSE, shaken, unchanged


class Scaled(D2l):
    def forward(self, queries, keys, values, valid_lens):
        return super().forward(queries / self.num_heads, keys, values, valid_lens)


class Talking(D2l):
    def _split(self, x):
        heads = super()._split(x).unflatten(0, (-1, self.num_heads))
        return (heads + heads.mean(1, keepdim=True)).flatten(0, 1)


class InsideOut(D2l):
    """Lays the heads' outputs inside out: neighbouring inputs of the projection are of different
    heads."""

    def forward(self, queries, keys, values, valid_lens):
        given = (self.W_q, queries), (self.W_k, keys), (self.W_v, values)
        split = [self._split(projection(x)) for projection, x in given]
        heads = self.attention(*split, valid_lens).unflatten(0, (-1, self.num_heads))
        return self.W_o(heads.permute(0, 2, 3, 1).flatten(2))


class Additive(D2l):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.attention.w_v = nn.Linear(dim // num_heads, 1)


class OverQueries(Prepared):
    def forward(self, *, query, key, value, mask=None):
        q, k, v = self.query(query), self.key(key), self.value(value)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * self.scale
        heads = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(0), v)
        return self.output(heads.reshape(*query.shape[:2], -1))


class Normed(Projected):
    def forward(self, x):
        heads = torch.cat([head(x) for head in self.heads], -1)
        return self.proj(nn.functional.layer_norm(heads, heads.shape[-1:]))


class Averaged(SideBySide):
    def forward(self, x):
        return torch.stack([head(x) for head in self.heads]).mean(0)


def built(kind):
    module = kind(12, 4)
    if isinstance(module, D2l):
        x = torch.randn(2, 5, 12)
        for projection in (module.W_q, module.W_k, module.W_v, module.W_o):
            projection(x)
    return shaken(module).double().eval()


@pytest.mark.parametrize("kind", [Scaled, Talking, InsideOut, OverQueries, Normed, Averaged])
def test_look_alikes_are_refused(kind):
    module = built(kind)
    module.__class__ = type("AnyAttention", (kind,), {})
    with pytest.raises(UnsupportedModel, match=r"AnyAttention\.forward: .* got something else"):
        find_sites(nn.ModuleList([module]))


def test_scores_with_parameters_are_refused():
    module = Additive(12, 4)
    module(torch.randn(2, 5, 12), torch.randn(2, 5, 12), torch.randn(2, 5, 12), None)
    module.__class__ = type("AdditiveAttention", (Additive,), {})
    with pytest.raises(UnsupportedModel, match="must be scaled dot-product attention"):
        find_sites(nn.ModuleList([module]))


def test_lazy_projections_ask_for_a_first_run():
    module = D2l(12, 4)
    module.__class__ = type("LazyAttention", (D2l,), {})
    with pytest.raises(UnsupportedModel, match=r"got torch.*LazyLinear"):
        find_sites(nn.ModuleList([module]))


def test_the_proof_leaves_no_trace():
    module = nn.ModuleList([built(D2l)]).train()
    state = torch.random.get_rng_state()
    with unchanged(module):
        find_sites(module)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_gates_of_a_cut_module_are_for_the_heads_that_it_has():
    model, x = nn.ModuleList([built(SideBySide)]), torch.randn(2, 5, 12).double()
    hp.prune_(model, hp.HeadMask.from_keep({"0": [0, 3]}, {"0": 4}))
    expected = model[0](x).clone()
    expected[..., 9:12] = 0
    with hp.gated(model, {"0": torch.tensor([1.0, 0.0]).double()}):
        assert_close(model[0](x), expected, **CLOSE)


class Lists(nn.Module):
    def __init__(self):
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
def test_magnitude_of_a_list_is_that_of_its_values_and_the_output(module):
    sites = find_sites(nn.Sequential(module), layouts=[LISTS])
    scores = hp.score(nn.Sequential(module), scorer="magnitude", sites=sites)
    for head, value in enumerate(scores.values[0]):
        own = torch.cat([p.flatten() for p in module.heads[head].parameters()]).norm()
        out = module.proj.weight[:, 3 * head : 3 * head + 3].norm()
        assert_close(value, float((own * out).detach()), rtol=1e-6, atol=0)


def test_heads_of_unlike_widths_are_no_list_of_heads():
    class Unlike(SideBySide):
        def __init__(self):
            super().__init__(12, 4)
            self.heads[2] = Head(12, 5)

    with pytest.raises(InvalidValue, match=r"heads: must be modules that return .*, got \[3, 5\]"):
        head_width(Unlike(), "")
    with pytest.raises(UnsupportedModel, match="fit no layout"):
        find_sites(nn.Sequential(Unlike()))


def test_compiles_with_the_class_put_in_front():
    model = nn.Sequential(built(SideBySide))
    x = torch.randn(2, 5, 12).double()
    hp.prune_(model, hp.HeadMask.from_keep({"0": [1, 2]}, {"0": 4}))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(x), model(x), **CLOSE)
