"""Layers without heads under quantisers, tracers, exporters, pickles, caches of every kind, and
code that reads what an attention keeps of its last call: the answer is that of the gated model."""

from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.cache_utils import Cache, DynamicLayer, QuantizedLayer

import headprune as hp
from headprune.attention.linear import WithoutFeatures, replace_features_
from headprune.core.mixin import original_class
from headprune.layouts._tiny_textbook import Annotated, D2l, Prepared, _DotProductAttention
from headprune.model.running import call, outputs
from headprune.model.sites import bind, find_sites
from tests.laws import test_law_3_families_generation as generation
from tests.laws.families import FAMILIES, KEEP_A_HEAD
from tests.laws.support import Subject, registry, shaken

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32
EMPTIED = [pair for pair in FAMILIES if pair[1] not in KEEP_A_HEAD]
#: The first family of every layout, but of those that take long and run the code of another.
LIKE_OTHERS = {"umt5", "qwen3_next", "wavlm"}
LAYOUTS = {pair[0]: pair for pair in reversed(EMPTIED) if pair[0] not in LIKE_OTHERS}


#: Of projections of every class, and lists of heads.
SOME = [LAYOUTS[layout] for layout in ("bert", "gpt2", "head_list_bare", "d2l", "torch_multi_head")]
#: Of those that PyTorch traces and exports.
TRACED = [LAYOUTS[layout] for layout in ("llama", "t5")]


def over(pairs):
    pairs = list(pairs)
    return pytest.mark.parametrize(("layout", "family"), pairs, ids=[family for _, family in pairs])


def subject_of(layout, family):
    """A family in fp32, as consumers get it, without a cache among its outputs."""
    found = registry.get(layout)
    model, batch = found.tiny(0, family)
    model = shaken(model, norms=False).eval()
    for part in model.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    batch = {k: v for k, v in batch.items() if k != "labels"}
    return Subject(found, model, batch, find_sites(model), family)


def emptied(subject):
    """The first site of every kind, and the model in which they have no heads."""
    first = {site.kind: site.name for site in reversed(subject.sites)}
    small = subject.copy()
    hp.prune_(small, subject.mask({name: [] for name in first.values()}), sites=subject.sites)
    return list(first.values()), small


def silent(subject, names):
    """The gated model in its weights: those sites' output projections multiply by zero."""
    model = subject.copy()
    with torch.no_grad():
        for bound in bind(model):
            if bound.site.name not in names:
                continue
            module = bound.module
            for way in [bound.gate] if bound.layout.gate else [h.value for h in module.heads]:
                way.weight.zero_()
    return model


@torch.no_grad()
def run(model, batch):
    return outputs(call(model, batch))


def check(got, expected):
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, **CLOSE)


@pytest.mark.filterwarnings("ignore")  # PyTorch announces the end of this module
@over(SOME)
def test_dynamic_quantisation(layout, family):
    subject = subject_of(layout, family)
    names, small = emptied(subject)
    wanted, got = (
        torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, dtype=torch.qint8)
        for m in (silent(subject, names), small)
    )
    check(run(got, subject.batch), run(wanted, subject.batch))


class Outputs(nn.Module):
    """A model from tensors to tensors, which is what a trace is."""

    def __init__(self, model, batch):
        super().__init__()
        self.model = model
        self.names = [n for n, t in batch.items() if isinstance(t, Tensor)]
        self.training = False

    def forward(self, *tensors):
        return tuple(outputs(self.model(**dict(zip(self.names, tensors, strict=True)))))


@pytest.mark.filterwarnings("ignore")  # of code that is traced, what it warns of at every turn
@over(TRACED)
def test_jit_trace(layout, family):
    subject = subject_of(layout, family)
    names, small = emptied(subject)
    inputs = tuple(t for t in subject.batch.values() if isinstance(t, Tensor))
    with torch.no_grad():
        traced = torch.jit.trace(Outputs(small, subject.batch), inputs, check_trace=False)
        check(list(traced(*inputs)), run(silent(subject, names), subject.batch))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@over(TRACED)
def test_compile_and_export(layout, family):
    subject = subject_of(layout, family)
    names, small = emptied(subject)
    wanted = run(silent(subject, names), subject.batch)
    torch._dynamo.reset()
    check(run(torch.compile(small, backend="eager"), subject.batch), wanted)
    torch._dynamo.reset()
    inputs = tuple(t for t in subject.batch.values() if isinstance(t, Tensor))
    program = torch.export.export(Outputs(small, subject.batch), inputs, strict=False).module()
    check(list(program(*inputs)), wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("n_in", "n_out", "bias", "hooked"),
    [(0, 4, True, False), (0, 4, False, True), (4, 0, True, True), (4, 0, False, False)],
)
def test_a_projection_of_nothing_is_no_linear_layer_for_quantisers(n_in, n_out, bias, hooked):
    full = nn.Linear(4, 4, bias)
    if hooked:
        full.forward = full.forward
    rest = {} if full.bias is None or n_out else {"bias": torch.empty(0)}
    replace_features_(full, {"weight": torch.empty(n_out, n_in), **rest})
    assert type(full) is not nn.Linear
    assert isinstance(full, (nn.Linear, WithoutFeatures))
    assert original_class(full) is nn.Linear
    assert repr(full) == f"Linear(in_features={n_in}, out_features={n_out}, bias={bias})"
    assert list(full.state_dict()) == ["weight", "bias"][: 1 + bias]
    quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(full), {nn.Linear})
    got = quantised(torch.randn(2, 3, n_in))
    expected = torch.zeros(2, 3, n_out) if full.bias is None else full.bias.expand(2, 3, n_out)
    assert torch.equal(got, expected)


class Grouped(QuantizedLayer):
    """Rounds keys and values in groups, and asserts what HQQ and Quanto do: no group may be a
    part."""

    def _quantize(self, tensor, axis):
        assert tensor.shape[-1] % self.q_group_size == 0
        groups = tensor.unflatten(-1, (-1, self.q_group_size))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
        return (groups / scale).round(), scale

    def _dequantize(self, qtensor):
        rounded, scale = qtensor
        return (rounded * scale).flatten(-2)


#: Layers of linear attention have a cache of their own; quantised ones are for decoders alone.
DECODERS = {
    layout: (layout, family)
    for layout, family in reversed(generation.FAMILIES)
    if family != "qwen3_next"
    and not generation.model_class(layout, family)._is_stateful
    and "cross" not in {site.kind for site in subject_of(layout, family).sites}
}


def generate(model, inputs, **options):
    made = model.generate(
        **inputs,
        **options,
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(made.logits)


@over(DECODERS[layout] for layout in ("gpt2", "llama", "falcon", "deepseek_v3"))
def test_a_cache_that_quantises(layout, family):
    subject = subject_of(layout, family)
    names, small = emptied(subject)
    inputs = generation.left_padded(subject)
    full = silent(subject, names)
    n_layers = full.config.get_text_config(decoder=True).num_hidden_layers

    def cache():
        return Cache(layers=[Grouped(q_group_size=2, residual_length=2) for _ in range(n_layers)])

    used = cache()
    got = generate(small, inputs, past_key_values=used)
    assert_close(got, generate(full, inputs, past_key_values=cache()), **CLOSE)
    assert {type(layer) for layer in used.layers} == {Grouped, DynamicLayer}
    assert (generate(full, inputs) - got).abs().max() > 1e-4, "the cache has rounded"
    small_beams, full_beams = (
        generate(model, inputs, past_key_values=cache(), num_beams=3) for model in (small, full)
    )
    assert_close(small_beams, full_beams, **CLOSE)


class KeptDot(_DotProductAttention):
    def forward(self, q, k, v, valid_lens):
        self.attention_weights = torch.ones(1)
        return super().forward(q, k, v, valid_lens)


class KeptD2l(D2l):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.attention = KeptDot()


class KeptAnnotated(Annotated):
    def forward(self, query, key, value, mask=None):
        self.attn = torch.ones(1)
        return super().forward(query, key, value, mask)


class KeptPrepared(Prepared):
    """As labml.ai's, and something that only this class keeps."""

    def forward(self, *, query, key, value, mask=None):
        self.attn = torch.ones(1)
        self.last_heads = torch.ones(1)
        return super().forward(query=query, key=key, value=value, mask=mask)


#: Where each keeps its weights, and their shape for a batch of 2 without heads.
KEEPERS = {
    "d2l": (KeptD2l, "attention.attention_weights", (0, 5, 6)),
    "annotated": (KeptAnnotated, "attn", (2, 0, 5, 6)),
    "labml": (KeptPrepared, "attn", (5, 6, 2, 0)),
}


@pytest.mark.parametrize(
    ("name", "by_name"), [("d2l", False), ("d2l", True), ("annotated", False), ("labml", True)]
)
def test_nothing_stale_is_kept(name, by_name):
    kind, path, shape = KEEPERS[name]
    module = kind(16, 4)
    for way in (m for m in module.modules() if isinstance(m, nn.LazyLinear)):
        way(torch.randn(1, 16))  # lazy layers have seen their input, and the attention has not run
    model = nn.ModuleDict({"attention": shaken(module).eval()})
    (site,) = find_sites(model)
    assert site.layout == name
    queries, keys = torch.randn(2, 5, 16), torch.randn(2, 6, 16)
    if name == "labml":
        queries, keys = queries.transpose(0, 1), keys.transpose(0, 1)
    given = {"queries": queries, "keys": keys, "values": keys, "valid_lens": None}
    if name != "d2l":
        given = {"query": queries, "key": keys, "value": keys}
    if not by_name:
        module(**given)  # cut after it ran
    hp.prune_(model, hp.HeadMask.from_keep({site.name: []}, {site.name: 4}))
    assert getattr(module, "last_heads", None) is None, "what is no longer true"
    positional = name != "labml" and not by_name
    out = module(*given.values()) if positional else module(**given)
    assert attrgetter(path)(module).shape == shape
    assert_close(out, bind(model)[0].gate.bias.expand(*queries.shape[:2], 16))


@over(LAYOUTS.values())
def test_no_layer_without_heads_keeps_a_tensor_of_an_earlier_call(layout, family):
    """What a call of the full model changes among a layer's plain attributes is not there as it was
    after the cut."""
    subject = subject_of(layout, family)
    first = {site.kind: site for site in reversed(subject.sites)}.values()
    places = tuple(f"{n}." for site in first for n in (site.name, *site.shared_with))

    def plain(model):
        inside = [(n, m) for n, m in model.named_modules() if f"{n}.".startswith(places)]
        held = {f"{n}.{key}": value for n, m in inside for key, value in vars(m).items()}
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    before = plain(subject.model)
    run(subject.model, subject.batch)
    changed = {k for k, v in plain(subject.model).items() if before.get(k) is not v}
    _, small = emptied(subject)
    stale = plain(small)
    run(small, subject.batch)
    now = plain(small)
    assert not [k for k in changed & now.keys() if now[k] is stale.get(k) and now[k].numel()]
