"""Our own attention under what records, compiles or vectorises it: every mask, at sizes that were
not recorded, cut and uncut. The answer is that of eager code."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close

from headprune.attention import MultiHeadAttention
from headprune.attention.transformer import TransformerConfig, TransformerForTranslation

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32, other kernels
CUTS = {
    "whole": (6, None, "group"),
    "whole groups": (3, None, "group"),
    "one key": (1, [0, 1, 4], "balanced"),
    "cut": (6, [0, 4, 5], "group"),
    "cut groups": (3, [0, 1, 4, 5], "group"),
    "uneven groups": (3, [0, 1, 3], "free"),
    "without heads": (3, [], "group"),
}


def attention(cut):
    n_kv_heads, keep, policy = CUTS[cut]
    module = MultiHeadAttention(12, 6, n_kv_heads=n_kv_heads).eval()
    if keep is not None:
        module.prune_heads_(keep, policy)
    return module


def masks(name, batch, queries, keys):
    generator = torch.Generator().manual_seed(batch + keys)
    lengths = torch.randint(1, keys + 1, (batch,), generator=generator)
    per_query = torch.randint(0, keys + 1, (batch, queries), generator=generator)
    padding = (torch.arange(keys) < lengths[:, None])[:, None, None]
    found = {
        "none": {},
        "causal": {"causal": True},
        "lengths": {"valid_lens": lengths},
        "lengths per query": {"valid_lens": per_query},
        "padding": {"mask": padding},
        "4-D": {"mask": torch.rand(batch, 1, queries, keys, generator=generator) > 0.4},
        "hide self": {"hide_self": True},
        "all": {"causal": True, "valid_lens": lengths, "mask": padding},
    }
    return found[name]


class Called(nn.Module):
    """The attention from tensors to one tensor; ``other``: with keys of their own."""

    def __init__(self, module, mask, other, need_weights):
        super().__init__()
        self.module, self.other = module, other
        given = masks(mask, 2, 2, 2)
        self.names = [n for n, v in given.items() if isinstance(v, Tensor)]
        self.fixed = {n: v for n, v in given.items() if not isinstance(v, Tensor)}
        self.need_weights = need_weights
        self.training = False

    def forward(self, x, *more):
        keys, rest = (more[0], more[1:]) if self.other else (None, more)
        named = dict(zip(self.names, rest, strict=True))
        out = self.module(x, keys, **named, **self.fixed, need_weights=self.need_weights)
        return torch.cat([o.flatten(1) for o in out], 1) if self.need_weights else out


def inputs(called, mask, batch, queries, keys):
    generator = torch.Generator().manual_seed(queries)
    x, y = (torch.randn(batch, n, 12, generator=generator) for n in (queries, keys))
    given = masks(mask, batch, queries, keys)
    return (x, *((y,) if called.other else ()), *(given[n] for n in called.names))


def sizes(other):
    """Batch, queries and keys; the first are recorded, with as many keys as queries, which others
    have not."""
    return [(3, 6, 6), (4, 5, 9), (2, 4, 4)] if other else [(3, 6, 6), (4, 9, 9), (2, 4, 4)]


#: Every cut and every mask.
CASES = [
    ("whole", "none"),
    ("whole groups", "causal"),
    ("one key", "lengths"),
    ("cut", "lengths per query"),
    ("cut groups", "padding"),
    ("uneven groups", "4-D"),
    ("uneven groups", "hide self"),
    ("without heads", "all"),
]
#: For what takes long.
SOME = [("uneven groups", "4-D"), ("without heads", "all")]


def all_calls(cut, mask):
    for other in (False, True):
        for need_weights in (False, True):
            called = Called(attention(cut), mask, other, need_weights)
            yield called, [inputs(called, mask, *size) for size in sizes(other)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of a head's width, which is fixed
@pytest.mark.parametrize(("cut", "mask"), CASES)
@torch.no_grad()
def test_jit_trace(cut, mask):
    for called, examples in all_calls(cut, mask):
        for first in (0, 1):
            traced = torch.jit.trace(called, examples[first], check_trace=False)
            for example in examples:
                assert_close(traced(*example), called(*example), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "mask"), SOME)
@torch.no_grad()
def test_compiled_in_one_graph_at_every_length(cut, mask):
    for called, examples in all_calls(cut, mask):
        if called.need_weights:
            continue
        torch._dynamo.reset()
        compiled = torch.compile(called, backend="eager", fullgraph=True)
        for example in [*examples, inputs(called, mask, 3, 1, 1 + 3 * called.other)]:
            assert_close(compiled(*example), called(*example), **CLOSE)
    torch._dynamo.reset()


# PyTorch has no rule for its kernel, and loops.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("cut", "mask"), CASES)
@torch.no_grad()
def test_vmap(cut, mask):
    for called, examples in all_calls(cut, mask):
        twice = [torch.stack([t, t.flip(0)]) for t in examples[1]]
        one_by_one = torch.stack([called(*(t[i] for t in twice)) for i in range(2)])
        assert_close(torch.func.vmap(called)(*twice), one_by_one, **CLOSE)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_the_translator_exported_with_free_lengths():
    sizes = {"vocab_size": 20, "d_model": 12, "ffn_dim": 8, "num_attention_heads": 3}
    config = TransformerConfig(**sizes, encoder_layers=2, decoder_layers=2)
    model = TransformerForTranslation(config).eval()
    model.encoder.layers[0].self_attention.prune_heads_([])
    model.decoder.layers[0].self_attention.prune_heads_([0, 2])
    model.decoder.layers[1].cross_attention.prune_heads_([])

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, source, mask, labels):
            return self.model(source, mask, labels=labels).logits

    def example(batch, n, m):
        mask = torch.arange(n) < torch.arange(n, n - batch, -1)[:, None]
        return torch.randint(3, 20, (batch, n)), mask.long(), torch.randint(3, 20, (batch, m))

    step = Logits().eval()
    examples = [example(3, 6, 6), example(2, 5, 8), example(4, 9, 4)]
    batch, source = (Dim(n, min=2, max=64) for n in ("batch", "source"))
    # All but the last are read, and PyTorch takes one for a constant.
    target = Dim("target", min=3, max=64)
    shapes = ({0: batch, 1: source}, {0: batch, 1: source}, {0: batch, 1: target})
    made = torch.export.export(step, examples[0], dynamic_shapes=shapes, strict=False).module()
    for given in examples:
        assert_close(made(*given), step(*given), **CLOSE)
