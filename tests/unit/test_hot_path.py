"""A cut model runs what one that was built small would run: the same modules, the same operations,
plain weights.

``docs/tradeoff.md`` has the speed; here operations are counted, which no other job on the machine
can disturb.
"""

import argparse
import copy
import warnings
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import headprune as hp
from headprune.core.layout import HeadState
from headprune.layouts import registry
from headprune.model.running import call, outputs, without_fused_attention
from headprune.surgery.prune import prune_
from tests.laws.support import mask_of
from tests.scripts import benchmark

#: Operations that compute and copy nothing: another shape of the same numbers.
VIEWS = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze"),
    *("select", "slice", "split", "split_with_sizes", "unbind", "alias", "detach", "as_strided"),
}
#: Families whose attention gets something for all heads at every call, or runs other code than
#: uncut, and what it costs; their layouts say why. Everything else runs no operation more.
CORRECTED = {
    "bloom": {"cat"},  # biases of positions that the model computes for all heads
    "falcon-alibi": {"cat"},
    "mpnet": {"cat"},
    "t5": {"cat"},
    "mt5": {"cat"},
    "umt5": {"cat"},
    "switch_transformers": {"cat"},
    "beit": {"cat"},
    "beit-shared-bias": {"cat"},
    "olmo2": {"cat"},  # a norm over all heads
    "olmoe": {"cat"},
    # Zeros in the places of the removed heads.
    "list of heads without output": {"cat", "new_zeros"},
    "wavlm": {"masked_fill", "cat"},  # called as modules instead of one function
    # In place of three others.
    "timm.Attention before 1.0.24": {"_scaled_dot_product_flash_attention_for_cpu"},
    # The mean of no heads would be NaN.
    "torch.nn.MultiheadAttention": {"sum", "div", "constant_pad_nd"},
    "siglip": {"sum", "div"},
}
#: A product with or without a sum is one product.
PRODUCTS = {"addmm": "mm", "baddbmm": "bmm"}
#: Every layout's first family, and those above.
FAMILIES = [
    (name, family)
    for name in registry.names()
    for number, (family, _) in enumerate(registry.get(name).families)
    if number == 0 or family in CORRECTED
]


class Operations(TorchDispatchMode):
    """Counts the operations that run, by name; with ``shapes`` also by what they get."""

    def __init__(self, shapes=False):
        super().__init__()
        self.shapes = shapes
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            name = PRODUCTS.get(name, name)
            sizes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
            self.found[(name, *sizes) if self.shapes else name] += 1
        return func(*args, **(kwargs or {}))


def operations(model, batch, shapes=False):
    with without_fused_attention(), torch.no_grad():
        call(model, batch)  # what is computed once and kept is no part of it
        with Operations(shapes) as counting:
            call(model, batch)
    return counting.found


def cut_every_second(model):
    """A copy whose sites keep every second unit, so that kept heads do not lie side by side."""
    sites = hp.find_sites(model)
    keep = {site.name: [head for unit in site.units[::2] for head in unit] for site in sites}
    small = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prune_(small, mask_of(sites, keep), sites=sites)
    return small


@pytest.mark.parametrize(("layout", "family"), FAMILIES, ids=[family for _, family in FAMILIES])
def test_a_cut_adds_no_module_and_no_operation(layout, family):
    try:
        model, batch = registry.get(layout).tiny(0, family)
    except ImportError as error:
        pytest.skip(str(error))
    model.eval()
    small = cut_every_second(model)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    for name, tensor in small.named_parameters():
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{name} keeps removed memory"
    assert len(list(small.modules())) <= len(list(model.modules()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small.modules())
    before, after = operations(model, batch), operations(small, batch)
    more = {name: after[name] - before[name] for name in after if after[name] > before[name]}
    assert set(more) <= CORRECTED.get(family, set()), more
    assert not any("index" in name or "gather" in name for name in more)


def arguments(**more):
    sizes = {"layers": 2, "width": 48, "heads": 12, "keep": 4, "small": True}
    return argparse.Namespace(**sizes | more)


def pair(native, subject, which="speed", **more):
    """What was built small, and what was cut."""
    built, small = native.SUBJECTS[subject](arguments(**more))[which]
    return built.eval(), small.eval()


@pytest.mark.parametrize("subject", ["vit", "llama", "vit, with neurons", "llama, with neurons"])
def test_it_runs_what_a_configured_model_of_its_shape_runs(subject):
    """The same operations on tensors of the same shapes, in the same number, with the same
    result."""
    native = benchmark("native")
    (built, small), (_, larger) = pair(native, subject), pair(native, subject, keep=8)
    kind = subject.partition(",")[0]
    batch = native.INPUTS[kind](arguments(), 2, 8, torch.device("cpu"), torch.float32)
    assert [type(m) for m in small.modules()] == [type(m) for m in built.modules()]
    found = operations(small, batch, shapes=True)
    assert found == operations(built, batch, shapes=True)
    assert found != operations(larger, batch, shapes=True), "the shapes must differ"
    assert_close(outputs(call(small, batch))[0], outputs(call(built, batch))[0], rtol=0, atol=0)


def test_policy_free_costs_one_copy_of_keys_and_values_a_layer():
    native = benchmark("native")
    built, small = pair(native, "llama, free")
    batch = native.INPUTS["llama"](arguments(), 2, 8, torch.device("cpu"), torch.float32)
    free, even = operations(small, batch), operations(built, batch)
    assert free - even == Counter({"cat": 2 * 2})  # keys and values of two layers
    assert native.difference(small, built, batch) < 1e-5


def test_a_state_from_before_groups_were_kept_knows_them():
    """Pickles of cut modules hold attributes, and older ones not this one."""
    new = HeadState(8, 4, (0, 1, 2))
    old = object.__new__(HeadState)
    old.__dict__.update({name: value for name, value in vars(new).items() if name != "uneven"})
    assert old.uneven == new.uneven == (2, 1)
    assert old == new
