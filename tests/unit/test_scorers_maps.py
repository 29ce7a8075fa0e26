"""Scorers that read attention maps, against literal loops; and how ``attattr`` proves its maps."""

from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import headprune as hp
from headprune.attention import MultiHeadAttention
from headprune.core.errors import UnsupportedModel
from headprune.model.double import Doubled
from headprune.model.precision import product_eps
from headprune.model.running import call, outputs
from headprune.scoring import Attattr, Confidence, Entropy
from headprune.scoring._maps import eager
from tests.laws.support import examples_of as data
from tests.laws.support import family_subject, set_implementation, unchanged
from tests.reference import activations as reference
from tests.scoring_help import FAMILIES, flat, score, split
from tests.tiny_models import SIZES

EVERYTHING = Confidence(exclude=())
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def bert():
    return family_subject("bert", "bert")


@pytest.fixture
def t5():
    return family_subject("t5", "t5")


@pytest.fixture(autouse=True)
def _doubled(request):
    """Softmaxes in fp64, but where a test says how to compute."""
    with nullcontext() if "_settings" in request.fixturenames else Doubled():
        yield


def small_loss(model, batch):
    """Small, so that ``exp(-loss)`` is a probability worth attributing."""
    first = next(o for o in outputs(call(model, batch)) if o.ndim > 1)
    return first.flatten(1).logsumexp(-1) * 0.3


def scored(subject, scorers, batches=None):
    return score(subject, scorers, batches, loss=small_loss, sites=subject.sites)


# ---------------------------------------------------------------- against literal loops


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_of_maps_are_those_of_literal_loops(family):
    subject = family_subject(family, family)
    batch = data(subject, 4)
    scores = scored(subject, [Entropy(), EVERYTHING], split(batch, 3))
    if hasattr(subject.model, "config"):
        set_implementation(subject.model, "eager")
    for number, site in enumerate(subject.sites):
        for mine, measure in zip(scores, (reference.minus_entropy, max), strict=True):
            rows = torch.tensor(
                reference.of_queries(subject.model, batch, site, subject.sites, measure)
            )
            assert_close(list(mine.values[number]), rows.mean(0).tolist(), rtol=1e-6, atol=1e-8)
            errors = (rows.double().std(0) / 2).tolist()
            assert_close(list(mine.standard_errors[number]), errors, rtol=1e-5, atol=1e-7)


def test_maps_of_windows_are_those_of_their_image():
    subject = family_subject("swin", "swin")
    size = len(subject.batch["pixel_values"])
    scores = scored(subject, [Entropy(), EVERYTHING])
    whole = flat(scored(subject, Attattr(steps=2)))
    alone = flat(scored(subject, Attattr(steps=2), split(subject.batch, 1)))
    set_implementation(subject.model, "eager")
    seen = []
    for site in subject.sites:
        module = subject.model.get_submodule(site.name)
        module.register_forward_hook(lambda m, a, out: seen.append(out[1]))
    with torch.no_grad():
        subject.model(**subject.batch)
    assert_close(alone, whole, rtol=0, atol=1e-11 * float(whole.abs().max()))
    for number, found in enumerate(seen):
        assert len(found) > size
        for mine, rows in zip(scores, (found.xlogy(found).sum(-1), found.amax(-1)), strict=True):
            expected = rows.unflatten(0, (size, -1)).mean((1, 3)).mean(0).tolist()
            assert_close(list(mine.values[number]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "t5", "multi_head_attention"])
def test_attention_attribution_is_that_of_finite_differences(family):
    subject = family_subject(family, family)
    batch = split(subject.batch, 1)[2]
    batch = {k: v[:, :3] if v.ndim > 1 else v for k, v in batch.items()}
    found = scored(subject, Attattr(steps=2), [batch])
    if hasattr(subject.model, "config"):
        set_implementation(subject.model, "eager")
    for module in subject.model.modules():
        if isinstance(module, MultiHeadAttention):  # its softmax is in the open with weights
            module.register_forward_pre_hook(
                lambda m, a, k: (a, {**k, "need_weights": True}), with_kwargs=True
            )
            module.register_forward_hook(lambda m, a, out: out[0])
    number = len(subject.sites) - 1 if family == "t5" else 0  # of T5 the attention to the encoder
    site = subject.sites[number]
    whole = reference.attention_attribution(subject.model, batch, small_loss, number, 2)
    heads = whole.amax((1, 2))
    expected = [float(sum(heads[site.heads.index(h)] for h in unit)) for unit in site.units]
    assert_close(list(found.values[number]), expected, rtol=1e-5, atol=1e-9)


def test_what_an_attention_is_attributed_is_over_all_its_runs():
    """With one step, by the gradient of the answer with respect to the maps that the model itself
    returns."""
    subject = family_subject("albert", "albert")
    inputs = {k: v for k, v in subject.batch.items() if k != "labels"}
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    found = scored(subject, Attattr(steps=1), [inputs])
    set_implementation(subject.model, "eager")
    out = subject.model(**inputs, output_attentions=True)
    answer = torch.exp(-0.3 * out.logits.flatten(1).logsumexp(-1)).sum()
    slopes = torch.autograd.grad(answer, out.attentions)
    assert len(slopes) > 1
    of_runs = [(a * g).amax((2, 3)) for a, g in zip(out.attentions, slopes, strict=True)]
    best = torch.stack(of_runs).amax(0).mean(0)
    assert_close(list(found.values[0]), best.tolist(), rtol=1e-7, atol=1e-12)


# ---------------------------------------------------------------- tokens that confidence leaves out


def test_confidence_leaves_tokens_out_on_both_sides(bert):
    batch = data(bert, 3)
    token = int(batch["input_ids"][0, 2])
    site, total = bert.sites[0], torch.zeros(3, 4)
    found = scored(bert, Confidence(exclude=(token,)), [batch])
    assert found.values != scored(bert, Confidence(), [batch]).values
    set_implementation(bert.model, "eager")
    for i, one in enumerate(split(batch, 1)):
        maps = reference.maps(bert.model, one, site, bert.sites)
        here = one["attention_mask"][0].bool() & (one["input_ids"][0] != token)
        total[i] = maps[:, here][:, :, here].amax(-1).mean(-1)
    assert_close(list(found.values[0]), total.mean(0).tolist(), rtol=1e-6, atol=1e-8)


def test_confidence_knows_what_a_decoder_reads_from_labels(t5):
    batch = data(t5, 3)
    labels = batch.pop("decoder_input_ids")
    labelled = {**batch, "labels": labels}
    shifted = t5.model.prepare_decoder_input_ids_from_labels(labels)
    some = Confidence(exclude=(int(labels[0, 1]),))
    found, whole = scored(t5, [some, EVERYTHING], [labelled])
    given = scored(t5, some, [{**labelled, "decoder_input_ids": shifted}])
    assert_close(flat(found), flat(given), rtol=0, atol=1e-11)
    assert found.values != whole.values


def test_confidence_leaves_out_the_end_of_the_sequence_by_itself(t5):
    batch, end = data(t5, 3), t5.model.config.eos_token_id
    batch["input_ids"][:, 3] = end
    batch["decoder_input_ids"][:, 2] = end
    found, named, whole = scored(
        t5, [Confidence(), Confidence(exclude=(end,)), EVERYTHING], [batch]
    )
    assert found.values == named.values
    assert {s.kind for s in t5.sites} == {"self", "causal", "cross"}
    assert all(mine != other for mine, other in zip(found.values, whole.values, strict=True))


# ---------------------------------------------------------------- kernels


def test_the_parts_of_a_model_take_their_softmax_in_the_open_and_have_their_kernels_back():
    from transformers import CLIPConfig, CLIPModel

    vision = {**SIZES, "image_size": 8, "patch_size": 4}
    holder = nn.Module()  # a model whose parts have no configurations of their own
    holder.config = CLIPModel(CLIPConfig(text_config=SIZES, vision_config=vision)).config
    parts = [holder.config, holder.config.text_config, holder.config.vision_config]
    parts[1]._attn_implementation = "flash_attention_2"

    def kernels():
        return [part._attn_implementation for part in parts]

    with eager(holder):
        assert kernels() == ["eager"] * 3
    assert kernels() == ["sdpa", "flash_attention_2", "sdpa"]


def test_an_error_puts_the_kernel_back(bert):
    assert bert.model.config._attn_implementation == "sdpa"

    def failing(model, batch):
        if model.config._attn_implementation == "eager":
            raise KeyError("while it is eager")
        return small_loss(model, batch)

    for scorer in (Entropy(), Attattr()):
        with unchanged(bert.model), pytest.raises(KeyError, match="while it is eager"):
            score(bert, scorer, loss=failing)
        assert bert.model.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------- attattr proves its maps


class Tf32(TorchDispatchMode):
    """Rounds the factors of fp32 products to 11 bits, as a GPU does under TF32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            args = (*args[:-2], *tree_map(rounded, args[-2:]))
        return func(*args, **(kwargs or {}))


def rounded(x):
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


@pytest.fixture
def _settings():
    yield
    torch.set_float32_matmul_precision("highest")


@contextmanager
def computing(how):
    with ExitStack() as stack:
        if how == "tf32":
            torch.set_float32_matmul_precision("high")
            stack.enter_context(Tf32())
        if how == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        yield


def steps_of(device):
    return [product_eps(t, device) for t in (torch.float64, torch.float32, torch.bfloat16)]


@pytest.mark.usefixtures("_settings")
def test_the_step_of_products():
    assert steps_of(CPU) == [2**-52, 2**-23, 2**-7]
    with torch.autocast("cpu", torch.float16):
        assert steps_of(CPU) == [2**-52, 2**-10, 2**-7]
        assert steps_of(CUDA)[1] == 2**-23, "autocast is for one kind of device"
    for precision, step in (("high", 2**-10), ("highest", 2**-23)):
        torch.set_float32_matmul_precision(precision)
        assert steps_of(CUDA) == [2**-52, step, 2**-7]
    torch.backends.cuda.matmul.allow_tf32 = True
    assert steps_of(CUDA)[1] == 2**-10
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # then the old switch cannot be read
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert [steps_of(device)[1] for device in (CUDA, CPU)] == [2**-10, 2**-23]


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize(
    ("name", "how"), [("bert", "tf32"), ("gpt2", "autocast"), ("multi_head_attention", "tf32")]
)
def test_maps_in_use_are_accepted_within_the_rounding_of_products(name, how):
    subject = family_subject(name, name)
    model = subject.model.float().requires_grad_(True)
    batch = {k: v for k, v in subject.batch.items() if k != "labels"}
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}

    def loss(model, batch):
        return outputs(model(**batch))[0].float().square().flatten(1).mean(1)

    wanted = flat(hp.score(model, [batch], Attattr(steps=2), loss=loss, progress=False))
    with computing(how):
        found = flat(hp.score(model, [batch], Attattr(steps=2), loss=loss, progress=False))
    assert 0 < (found - wanted).abs().max() < 0.2 * wanted.abs().max()


class Beside(MultiHeadAttention):
    """Returns weights that are computed beside the point."""

    def forward(self, query, *args, **kwargs):
        out, weights = super().forward(query, *args, **{**kwargs, "need_weights": True})
        return out, weights.clone() + 0 * query.sum()


class Another(MultiHeadAttention):
    """Uses its weights a second time."""

    def forward(self, query, *args, **kwargs):
        out, weights = super().forward(query, *args, **{**kwargs, "need_weights": True})
        return out + weights.square().sum((1, 3))[..., None], weights


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize(
    ("kind", "how"), [(Beside, "fp64"), (Beside, "tf32"), (Another, "tf32"), (Another, "autocast")]
)
def test_a_map_that_is_not_what_the_output_comes_from_is_refused(kind, how):
    torch.manual_seed(0)
    dtype = torch.float64 if how == "fp64" else torch.float32
    model, x = nn.Sequential(kind(8, 2)).to(dtype), torch.randn(3, 4, 8).to(dtype)

    def loss(model, x):
        out = model(x)
        return (out[0] if isinstance(out, tuple) else out).to(dtype).square().mean((1, 2))

    with (
        computing(how),
        pytest.raises(UnsupportedModel, match="gradient does not match the gate's"),
    ):
        hp.score(model, [x], Attattr(steps=1), loss=loss, progress=False)
