"""Which sites say that they must keep a head (``AttentionSite.least``), against what a cut to none
really does."""

import re
import types
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.layouts._tiny_timm import AttentionRope
from headprune.model.cut import cut_
from headprune.model.running import call, outputs
from headprune.model.sites import bind
from tests.laws.families import FAMILIES
from tests.laws.support import family_subject, mask_of, subject_of

SIZES = {"vocab_size": 19, "hidden_size": 24, "intermediate_size": 16}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 6}


def check(model):
    """The sites' least counts, which are those that a cut agrees with."""
    bound = bind(model)
    assert bound
    for b in bound:
        nothing = hp.HeadMask.from_keep({b.site.name: []}, {b.site.name: b.site.n_query_heads})
        if b.site.least:
            words = f"^{re.escape(b.site.name)}: must be cut so that it keeps a head"
            with pytest.raises(UnsupportedModel, match=words):
                cut_(model, [b], nothing)
        else:
            cut_(model, [b], nothing).restore()
    return {b.site.least for b in bound}


class Watched(TorchFunctionMode):
    """Fails at fused attention of no heads, which ends the process before PyTorch 2.13."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            assert (args[0] if args else kwargs["query"]).numel()
        return func(*args, **kwargs)


def emptied(model):
    """Without all heads that may be removed."""
    bound = [b for b in bind(model) if not b.site.least]
    sites = [b.site for b in bound]
    cut_(model, bound, mask_of(sites, {site.name: [] for site in sites}))
    return model


#: One family a layout, and those that call PyTorch's fused attention in a way of their own.
LAYOUTS = dict(reversed(FAMILIES))
CASES = [
    *LAYOUTS.items(),
    ("timm", "timm.AttentionRope"),
    ("llama", "gemma3"),
    ("falcon", "falcon-alibi"),
]
CASES += [("torch_multi_head", "torch.nn.TransformerEncoder"), ("vit", "beit"), ("bart", "gptj")]


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_every_layout_says_whether_a_layer_may_lose_all_heads_and_calls_no_kernel_without_them(
    layout, family
):
    subject = family_subject(layout, family)
    check(subject.model)
    small = emptied(subject.model)
    with Watched():
        made = outputs(call(small, subject.batch))
    assert all(x.isfinite().all() for x in made if x.is_floating_point())


def test_a_compiled_layer_without_heads_calls_no_kernel():
    model = emptied(nn.Sequential(AttentionRope(12, 6)).eval())
    x = torch.randn(2, 5, 12)
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(model, backend=keep, fullgraph=True)(x), model(x))
    assert graphs
    nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert not any("scaled_dot_product" in target for target in nodes)


def t5gemma():
    sizes = {**SIZES, "num_key_value_heads": 3, "head_dim": 4, "query_pre_attn_scalar": 4}
    parts = [transformers.T5GemmaModuleConfig(**sizes) for _ in range(2)]
    config = transformers.T5GemmaConfig(encoder=parts[0], decoder=parts[1], vocab_size=19)
    return transformers.T5GemmaForConditionalGeneration(config)


def mobilebert():
    sizes = {**SIZES, "intra_bottleneck_size": 24, "true_hidden_size": 24, "embedding_size": 24}
    return transformers.MobileBertModel(transformers.MobileBertConfig(**sizes))


@pytest.mark.parametrize("make", [t5gemma, mobilebert])
def test_modules_that_their_own_code_forbids_to_empty(make):
    assert 1 in check(make().eval())


def test_a_forward_of_its_own_keeps_a_head_and_a_plan_without_rules_can_be_cut():
    subject = subject_of("bert")
    first = subject.model.get_submodule(subject.sites[0].name)
    inner = next(m for m in first.modules() if hasattr(m, "query"))
    inner.forward = types.MethodType(
        lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), inner
    )
    sites = hp.find_sites(subject.model)
    assert [site.least for site in sites] == [1, *[0] * (len(sites) - 1)]
    scores = hp.score(subject.model, None, "magnitude")
    lowest, *others = scores.values
    scores = replace(scores, values=((-1.0,) * len(lowest), *others))
    free = hp.selection.GlobalTopk(min_heads=0)
    plan = hp.select(scores, hp.Budget(keep_heads=3), free)
    assert len(plan.mask.kept(sites[0].name)) == 1
    hp.prune_(subject.model, plan, example=subject.batch)
