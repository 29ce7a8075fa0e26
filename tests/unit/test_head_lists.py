"""Lists of heads: however a head is made, a cut equals the gates, or the module is refused before
it."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts._tiny_textbook import Projected, SideBySide
from headprune.model.sites import find_sites
from tests.laws.support import CLOSE, shaken

Way = Callable[[int, int], nn.Module]


class InOut(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))

    def forward(self, x):
        return x @ self.weight


class OutIn(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))

    def forward(self, x):
        return functional.linear(x, self.weight)


WAYS = {
    "Linear": lambda n_in, n_out: nn.Linear(n_in, n_out, bias=False),
    "Linear with bias": nn.Linear,
    "in x out": InOut,
    "out x in": OutIn,
    "Conv1D": lambda n_in, n_out: Conv1D(n_out, n_in),
}


class Head(nn.Module):
    """Queries and keys of one width; values of another one, or the inputs themselves."""

    def __init__(self, dim, width, value_width, way, causal=False):
        super().__init__()
        self.query, self.key = way(dim, width), way(dim, width)
        self.value = way(dim, value_width) if value_width else nn.Identity()
        if causal:
            self.register_buffer("tril", torch.ones(8, 8).tril())

    def forward(self, x):
        q, k, v, n = self.query(x), self.key(x), self.value(x), x.shape[1]
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if hasattr(self, "tril"):
            scores = scores.masked_fill(self.get_buffer("tril")[:n, :n] == 0, -torch.inf)
        return scores.softmax(-1) @ v


class Net(nn.Module):
    def __init__(self, kind, heads, dim, width):
        super().__init__()
        attention = kind(dim, len(heads))
        attention.heads = nn.ModuleList(heads)
        if isinstance(attention, Projected):
            attention.proj = nn.Linear(len(heads) * width, dim)
        self.attention = attention
        self.end = nn.Linear(dim if isinstance(attention, Projected) else len(heads) * width, 2)

    def forward(self, x):
        return self.end(self.attention(x))


#: Width of the input, of queries and keys, of values; 0: the inputs. With axes that coincide, and
#: all different.
SIZES = [(12, 3, 3), (12, 3, 5), (12, 5, 3), (12, 3, 0), (4, 4, 4), (4, 4, 0), (4, 2, 4), (8, 8, 8)]


#: Every way of making a head with the size whose axes coincide, every size with a way by turns.
CASES = [
    *((way, SIZES[4], False) for way in WAYS),
    *((list(WAYS)[i % 5], sizes, i % 2 == 0) for i, sizes in enumerate(SIZES) if i != 4),
]


@pytest.mark.parametrize("kind", [SideBySide, Projected])
@pytest.mark.parametrize(("way", "sizes", "causal"), CASES, ids=str)
def test_a_cut_is_right(kind, way, sizes, causal):
    """With an example to prove it on, and for the other kind of list without."""
    dim, _, value_width = sizes
    made = value_width or dim
    heads = [Head(*sizes, WAYS[way], causal) for _ in range(4)]
    torch.manual_seed(0)
    with torch.no_grad():
        for head in heads:
            for parameter in head.parameters():
                parameter.normal_()
    model = shaken(Net(kind, heads, dim, made)).double().eval()
    x = torch.randn(3, 6, dim).double()
    (site,) = find_sites(model)
    assert (site.n_query_heads, site.value_dim) == (4, made)
    example = x if kind is Projected else None
    for keep in ([0, 3], [2], []):
        small, mask = copy.deepcopy(model), hp.HeadMask.from_keep({site.name: keep}, {site.name: 4})
        with hp.gated(model, mask):
            expected = model(x)
        hp.prune_(small, mask, example=example)
        assert_close(small(x), expected, **CLOSE)


class Sliced(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5))

    def forward(self, x):
        return torch.cat([x, x[..., :3] @ self.weight], -1)


@pytest.mark.parametrize("head", [Sliced, nn.Identity, lambda: nn.LazyLinear(3)])
def test_a_width_that_does_not_show_is_refused(head):
    model = nn.Sequential(SideBySide(12, 4))
    model[0].heads = nn.ModuleList(head() for _ in range(4))
    model[0].__class__ = type("ListAttention", (SideBySide,), {})
    with pytest.raises(UnsupportedModel, match=r"fit no layout|no attention-like"):
        find_sites(model)
