"""What models and their units cost, against what physically leaves and against PyTorch's own
counter."""

import copy
import dataclasses

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import headprune as hp
from headprune.core.heads import HeadMask
from headprune.core.scores import Cost
from headprune.layouts import registry
from headprune.model.costs import measure_costs
from headprune.model.running import call
from headprune.model.sites import bind
from tests.laws.families import FAMILIES
from tests.laws.support import family_subject, set_implementation, subject_of, unchanged


def measure(model, batch):
    return measure_costs(model, bind(model), batch)


def of_length(subject, length, size=1):
    """A batch of examples of one length, without padding; an image model has but one length."""
    if "pixel_values" in subject.batch:
        return {"pixel_values": subject.batch["pixel_values"][:size]}
    if "x" in subject.batch:
        return {"x": torch.randn(size, length, 16, dtype=torch.float64)}
    return {"input_ids": torch.randint(3, 50, (size, length))}


def counted(model, batch):
    """Multiply-adds by PyTorch, which does not count its fused kernels for the CPU: attention as
    matrix products, layers module by module."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            FlopCounterMode(display=False) as counter,
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
        ):
            call(model, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2


def n_parameters(model):
    return sum(p.numel() for p in model.parameters())


def less(total, removed):
    pairs = zip(dataclasses.astuple(total), dataclasses.astuple(removed), strict=True)
    return Cost(*(a - b for a, b in pairs))


def removed_units(subject, table, mask):
    """The costs of the units that a mask removes."""
    found = []
    for site, costs in zip(subject.sites, table.units, strict=True):
        kept = set(mask.kept(site.name))
        found += [c for u, c in zip(site.units, costs, strict=True) if not set(u) <= kept]
    return found


def test_parameters_of_a_unit_are_those_that_are_removed(subject):
    table = measure(subject.model, subject.batch)
    before = n_parameters(subject.model)
    assert table.total.params == before
    for site, costs in zip(subject.sites, table.units, strict=True):
        assert len(costs) == len(site.units)
        for unit, cost in zip(site.units, costs, strict=True):
            pruned = subject.copy()
            hp.prune_(pruned, subject.without({site.name: unit}))
            assert cost.params == before - n_parameters(pruned) > 0


def test_multiply_adds_are_those_that_pytorch_counts_at_every_length(subject):
    """Eager attention: both products of the attention are matrix products then, causal ones whole,
    as we count them.

    Nothing differs: norms, softmax, activations, rotary angles and embeddings count nothing in
    either. One measurement tells every length; an image model has but one.
    """
    if hasattr(subject.model, "set_attn_implementation"):
        set_implementation(subject.model, "eager")
    short, long = (measure(subject.model, of_length(subject, length)) for length in (5, 12))
    assert (short.total, short.units) == (long.total, long.units)
    assert short.total.macs_per_pair > 0
    assert short.total.macs_per_pair == sum(
        len(s.heads) * (s.head_dim + s.value_dim) for s in subject.sites
    )
    for length in (5, 12):
        batch = of_length(subject, length)
        length = short.length if "pixel_values" in batch else length
        assert short.total.macs(length) == counted(subject.model, batch)


def test_what_is_left_is_the_total_less_the_units(subject):
    """The prediction that selection rests on, against a measurement of the cut model."""
    table = measure(subject.model, subject.batch)
    for mask in (subject.ragged(0), subject.mask({subject.sites[1].name: []})):
        removed = removed_units(subject, table, mask)
        pruned = subject.copy()
        hp.prune_(pruned, mask)
        after = measure(pruned, subject.batch)
        assert after.total == less(table.total, Cost.sum(removed))
        assert after.total.params == n_parameters(pruned)
        rest = HeadMask.full(subject.sites) - mask
        kept = [c for row in after.units for c in row]
        assert kept == removed_units(subject, table, rest)


def test_nothing_is_left_of_the_attention_without_heads(subject):
    hp.prune_(subject.model, subject.mask({s.name: [] for s in subject.sites}))
    found = measure(subject.model, subject.batch)
    assert (found.total.macs_per_pair, found.total.kv_bytes) == (0, 0)
    assert found.total.params == n_parameters(subject.model)


def cache_bytes(model, length):
    """Bytes of the key and value tensors of each layer after a forward pass of one example."""
    with torch.no_grad():
        cache = model(input_ids=torch.randint(3, 50, (1, length)), use_cache=True).past_key_values
    return [
        sum(t.numel() * t.element_size() for t in (layer.keys, layer.values))
        for layer in cache.layers
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_cache_bytes_are_those_of_the_real_cache(decoder, dtype):
    model = decoder.model.to(dtype)
    batch = of_length(decoder, 9)
    assert measure(model, batch).total.kv_bytes * 9 == sum(cache_bytes(model, 9)) > 0
    hp.prune_(model, decoder.ragged())
    after = measure(model, batch)
    assert [sum(c.kv_bytes for c in row) * 9 for row in after.units] == cache_bytes(model, 9)


def test_the_marker_of_a_layer_without_heads_is_not_counted(decoder):
    """Two numbers a token stay in the cache there, so that positions are counted; they are no keys
    or values."""
    hp.prune_(decoder.model, decoder.mask({decoder.sites[0].name: []}))
    table = measure(decoder.model, of_length(decoder, 9))
    real = cache_bytes(decoder.model, 9)
    assert table.units[0] == ()
    assert real[0] == 2 * 8 * 9
    assert table.total.kv_bytes * 9 == sum(real[1:])


def test_an_encoder_has_no_cache():
    for name in ("bert", "vit"):
        subject = subject_of(name)
        assert measure(subject.model, subject.batch).total.kv_bytes == 0


def test_a_module_that_runs_twice_costs_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = hp.MultiHeadAttention(8, 2)

        def forward(self, x):
            return self.attention(self.attention(x))

    class Once(Twice):
        def forward(self, x):
            return self.attention(x)

    once, twice = Once(), Twice()
    x = torch.randn(2, 5, 8)
    a, b = measure(once, x), measure(twice, x)
    assert b.total.macs_per_token == 2 * a.total.macs_per_token
    assert b.total.macs_per_pair == 2 * a.total.macs_per_pair
    assert b.total.params == a.total.params
    assert [c.macs_per_token for c in b.units[0]] == [2 * c.macs_per_token for c in a.units[0]]
    mask = HeadMask.from_keep({"attention": [1]}, {"attention": 2})
    hp.prune_(twice, mask)
    assert measure(twice, x).total == less(b.total, b.units[0][0])


def test_measuring_leaves_the_model_as_it_was(subject):
    subject.model.train()
    state = torch.get_rng_state()
    with unchanged(subject.model):
        measure(subject.model, subject.batch)

    def breaks(model, batch):
        call(model, batch)
        raise RuntimeError("after everything ran")

    with unchanged(subject.model), pytest.raises(RuntimeError, match="after everything ran"):
        measure_costs(subject.model, bind(subject.model), subject.batch, breaks)
    assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


def test_a_loss_says_how_the_model_is_called():
    model = subject_of("bert").model
    batch = (torch.randint(3, 50, (2, 5)), torch.tensor([0, 1]))
    found = measure_costs(model, bind(model), batch, lambda m, b: m(b[0]).logits.sum(1))
    assert found == measure(model, {"input_ids": batch[0]})


def test_totals_are_the_whole_models_whatever_sites_are_asked_for():
    model, batch = registry.get("llama").tiny(0)
    sites = hp.find_sites(model)
    whole = measure_costs(model, bind(model, sites), batch)
    part = measure_costs(model, bind(model, sites[:1]), batch)
    assert part.total == whole.total
    assert part.units == whole.units[:1]


def test_a_model_compiled_in_place_is_costed_as_it_is():
    model, batch = registry.get("bert").tiny(0)
    sites = bind(model, hp.find_sites(model))
    plain = measure_costs(model, sites, batch)
    model.eval().requires_grad_(False)
    model.compile(backend="eager")
    with torch.no_grad():
        model(**batch)
    assert measure_costs(model, sites, batch) == plain
    torch._dynamo.reset()


def test_a_cut_model_is_counted_at_the_uncut_ones_length():
    """Without attention in the encoder, only the decoder's shorter input has a length."""
    subject = family_subject("bart", "bart")
    encoder = [site for site in subject.sites if site.kind == "self"]
    small = copy.deepcopy(subject.model)
    hp.prune_(small, subject.without({site.name: site.heads for site in encoder}))
    batch = {name: values[:1] for name, values in subject.batch.items()}
    batch["decoder_input_ids"] = batch["input_ids"][:, :2]
    rows = hp.bench.sizes(subject.model, small, batch)
    (macs,) = [row for row in rows if row.name.startswith("MACs")]
    assert (macs.original, macs.pruned) == (counted(subject.model, batch), counted(small, batch))


# --- every registered family

#: Multiply-adds of one example that are neither a linear layer's, a convolution's nor an
#: attention's: the embedding of the image times that of the text.
ELSEWHERE = {"clip": 12, "siglip": 16}

#: Families of whose multiply-adds PyTorch counts more than we do, and what those are; no head takes
#: part in them.
UNCOUNTED = {
    "qwen3_next": "experts, and layers of linear attention",
}

#: Mixtures whose experts are tensors, and no linear layers.
EXPERTS = ("mixtral", "gpt_oss", "olmoe")

#: Attention that adds keys of its own, which its caller does not give; their products are not
#: counted.
OWN_KEYS = ("torch.nn.MultiheadAttention", "x_transformers.Decoder")

#: Models that hold the lengths of a batch of three, and take no other.
THREE = ("annotated transformer", "d2l", "labml")


#: One family of every layout, and those that count otherwise.
OTHERWISE = (*ELSEWHERE, *UNCOUNTED, *EXPERTS, *OWN_KEYS)
FIRST = {layout: (layout, family) for layout, family in reversed(FAMILIES) if family not in THREE}
COUNTED = [pair for pair in FAMILIES if pair in FIRST.values() or pair[1] in OTHERWISE]


@pytest.mark.parametrize(("layout", "family"), COUNTED, ids=lambda name: name)
def test_costs_are_those_that_pytorch_counts_before_and_after_a_cut(layout, family):
    """Also for a batch of three examples; the first example has no padding."""
    subject = family_subject(layout, family)
    batch = {k: v[:1] for k, v in subject.batch.items()}
    table, whole = measure(subject.model, batch), counted(subject.model, batch)
    assert all(c.macs(table.length) > 0 and c.params > 0 for row in table.units for c in row)
    assert measure(subject.model, {k: torch.cat([v] * 3) for k, v in batch.items()}) == table
    got = table.total.macs(table.length) + ELSEWHERE.get(family, 0)
    if family in UNCOUNTED:
        assert got < whole, UNCOUNTED[family]
    elif family not in OWN_KEYS:
        assert got == whole

    mask = subject.ragged()
    removed = Cost.sum(removed_units(subject, table, mask))
    small = copy.deepcopy(subject.model)
    hp.prune_(small, mask, sites=subject.sites)
    assert measure(small, batch).total == less(table.total, removed)
    if family not in OWN_KEYS:
        assert counted(small, batch) == whole - removed.macs(table.length)


def test_a_router_that_returns_what_it_chose_is_counted() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 50, "intermediate_size": 48}
    config = transformers.Llama4TextConfig(
        **sizes, intermediate_size_mlp=48, num_local_experts=2, pad_token_id=0
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(3, 50, (3, 11))}
    assert hp.score(model, [batch], "fluctuation").costs.total.macs(11) > 0
