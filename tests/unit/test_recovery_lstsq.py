"""lstsq: NumPy's least squares on stacked activations, layer by layer, whatever the batches,
padding and layout."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.double import Doubled
from headprune.model.running import call
from headprune.model.sites import bind
from headprune.recovery import HeadRescale, Lstsq, MeanFold
from headprune.recovery._follow import follow
from headprune.recovery._side_by_side import quiet
from tests.laws.families import FAMILIES
from tests.laws.support import family_subject, picture, unchanged
from tests.reference import recovery as reference


def albert(layer, feed_forward):
    """One layer, which is called several times."""
    at = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    first = reference.Place(f"{at}.attention.dense", f"{at}.attention.LayerNorm", "in")
    return [first, reference.Place(f"{at}.ffn_output", f"{at}.full_layer_layer_norm", "in")]


def gemma2(layer, feed_forward):
    """Normalises what attention writes before it is added: the output itself is fitted there."""
    name = f"model.layers.{layer}.self_attn.o_proj"
    return [reference.Place(name, name, "out")]


#: Family: where its streams are, its layers.
PLACES = {
    "bert": (reference.bert, 3),
    "gpt2": (reference.gpt2, 3),
    "llama": (reference.llama, 3),
    "vit": (reference.vit, 3),
    "multi_head_attention": (reference.multi_head_attention, 2),
    "torch.nn.TransformerEncoder": (reference.torch_encoder, 3),
    "t5": (reference.t5, 4),
    "albert": (albert, 1),
    "gemma2": (gemma2, 3),
}
CLOSE = {"rtol": 1e-7, "atol": 1e-8}
#: No ridge, drawn nowhere: the plain problem.
PLAIN = Lstsq(ridge=0.0)


def subject_of(family, n_batches=2):
    """A family's model, and batches enough that its systems have one solution."""
    layout = next(name for name, one in FAMILIES if one == family)
    subjects = [family_subject(layout, family, seed) for seed in range(n_batches)]
    return subjects[0], [s.batch for s in subjects]


def recovered(model, batches, method, teacher, **more):
    with Doubled():
        return hp.recover_(model, batches, method, teacher, **more)


def pruned(subject, mask=None):
    model = subject.copy()
    hp.prune_(model, mask or subject.ragged())
    return model


def later(subject):
    """Another number of heads at every site but the first, which stays whole; none at the last but
    one."""
    mask = subject.ragged(1)
    names = [s.name for s in subject.sites]
    keep = {name: mask.kept(name) for name in names} | {names[-2]: ()}
    if len(names) > 2:
        keep[names[0]] = tuple(range(subject.n_heads[names[0]]))
    return subject.mask(keep)


def places_of(family, feed_forward, first=0):
    place, layers = PLACES[family]
    return [p for layer in range(first, layers) for p in place(layer, feed_forward)]


#: Feed-forwards with those families that have them, attention alone with the others and two more.
FITTED = [("bert", True), ("gpt2", True), ("llama", True), ("t5", True), ("albert", True)]
FITTED += [("vit", False), ("multi_head_attention", False)]
FITTED += [("torch.nn.TransformerEncoder", False), ("gemma2", False)]


@pytest.mark.parametrize(("family", "feed_forward"), FITTED)
def test_it_is_numpys_least_squares_layer_by_layer(family, feed_forward):
    subject, batches = subject_of(family, 4 if feed_forward else 2)
    everywhere = family in ("albert", "gemma2")
    mask = subject.ragged() if everywhere else later(subject)
    model, oracle, raw = (pruned(subject, mask) for _ in range(3))
    report = recovered(model, batches, Lstsq(ridge=0.0, feed_forward=feed_forward), subject.model)
    # before the first cut nothing has anything to make up for
    first = 0 if everywhere or len(subject.sites) == 2 else 1
    places = places_of(family, feed_forward, first)
    reference.lstsq(oracle, subject.model, places, batches)
    assert list(report.metrics["errors"]) == [p.projection for p in places]
    assert_close(dict(model.state_dict()), dict(oracle.state_dict()), **CLOSE)
    if not feed_forward:
        found = report.metrics["errors"][places[-1].projection]
        for when, one in (("before", raw), ("after", oracle)):
            expected = reference.error(one, subject.model, places[-1], batches)
            assert found[when] == pytest.approx(expected, rel=1e-6)
    assert report.n_examples == sum(len(next(iter(b.values()))) for b in batches)
    if family == "gemma2":
        assert report.notes[0].startswith(", ".join(p.projection for p in places))


def test_nan_at_padding_does_not_matter():
    """Some kernels leave NaN where a token sees nothing."""
    subject, batches = subject_of("bert")
    expected, model = pruned(subject), pruned(subject)
    recovered(expected, batches, Lstsq(ridge=0.3), subject.model)
    assert not any(bool(b["attention_mask"][2, -1]) for b in batches)

    def spoil(module, args, out):
        hidden = out[0].clone()
        hidden[2, -1] = float("nan")  # the last example is padded
        return (hidden, *out[1:])

    for one in (model, subject.model):
        one.bert.encoder.layer[-1].attention.self.register_forward_hook(spoil)
    recovered(model, batches, Lstsq(ridge=0.3), subject.model)
    assert_close(dict(model.state_dict()), dict(expected.state_dict()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [Lstsq(feed_forward=True, prior="zero"), MeanFold()], ids=str)
def test_a_model_that_lost_nothing_is_not_changed(method):
    subject, batches = subject_of("bert")
    model = subject.copy()
    with unchanged(model):
        report = recovered(model, batches, method, subject.model)
    assert report.changed == ()
    assert "Nothing to" in report.notes[0]


def test_cut_recover_cut_recover_is_cut_and_recover_at_once():
    subject, batches = subject_of("llama")
    site = subject.sites[1]
    first, both = subject.without({site.name: site.units[0]}), later(subject)
    model, direct = pruned(subject, first), pruned(subject, first & both)
    recovered(model, batches, PLAIN, subject.model)
    hp.prune_(model, first & both)
    recovered(model, batches, PLAIN, subject.model)
    recovered(direct, batches, PLAIN, subject.model)
    assert_close(dict(model.state_dict()), dict(direct.state_dict()), **CLOSE)


def test_what_it_made_good_is_not_folded_again():
    subject, batches = subject_of("gpt2")
    model = pruned(subject)

    def folded(model):
        return recovered(model, batches, MeanFold(), subject.model).metrics["heads"]

    recovered(model, batches, Lstsq(intercept=False), subject.model)
    assert folded(copy.deepcopy(model)) > 0
    recovered(model, batches, Lstsq(ridge=0.3), subject.model)
    assert folded(model) == 0
    site = next(s for s in hp.find_sites(model) if len(s.heads) > 1)
    kept = {s.name: s.heads for s in hp.find_sites(model)} | {site.name: site.heads[1:]}
    hp.prune_(model, subject.mask(kept))
    assert folded(model) == 1


def test_the_price_that_obs_names_is_paid():
    """rho of the scorer is what the refit leaves, for each head alone, where nothing is held
    back."""
    subject, batches = subject_of("gpt2")
    site, place = subject.sites[-1], places_of("gpt2", False)[-1]
    with Doubled():
        scores = hp.score(subject.model, batches, hp.scoring.Obs(ridge=0.0))
    written = reference.rows(subject.model, place, batches)[1]
    variance = np.square(written - written.mean(0)).sum() / len(written)
    for head in site.heads:
        model = pruned(subject, subject.without({site.name: [head]}))
        report = recovered(model, batches, Lstsq(ridge=0.0, intercept=False), subject.model)
        rho = report.metrics["error_after"] * variance
        assert rho == pytest.approx(scores[hp.HeadId(site.name, head)], rel=1e-6)


class TwoSentences(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, first, second):
        a, b = (self.encoder(**tokens).logits for tokens in (first, second))
        return nn.functional.cosine_similarity(a, b)


@pytest.mark.parametrize("method", [Lstsq(ridge=0.0, feed_forward=True), MeanFold()], ids=str)
def test_an_encoder_that_runs_twice_is_fitted_over_both_runs(method):
    subject, batches = subject_of("bert")
    single, model = pruned(subject), TwoSentences(pruned(subject))
    recovered(single, batches, method, subject.model)
    first, second = ({k: v for k, v in b.items() if k != "labels"} for b in batches)
    two = [{"first": first, "second": second}]
    report = recovered(model, two, method, TwoSentences(subject.model))
    assert report.notes == ()
    assert_close(dict(model.encoder.state_dict()), dict(single.state_dict()), **CLOSE)


@pytest.mark.parametrize(("room", "least", "most"), [(2**30, 10, 10), (2000, 11, 63)])
def test_the_teacher_runs_once_for_all_projections(room, least, most):
    """Its streams are kept as far as there is room, by what a batch holds: a loader may shuffle."""
    subject, batches = subject_of("bert", 3)
    rows = [{k: v[i] for k, v in b.items()} for b in batches for i in range(3)]
    runs = []
    teacher = subject.copy()
    teacher.bert.embeddings.register_forward_hook(lambda *_: runs.append(1))
    settings = Lstsq(feed_forward=True, max_bytes=room)
    recovered(pruned(subject), DataLoader(rows, shuffle=True), settings, teacher)
    assert least <= len(runs) <= most


def test_packed_sentences_of_pytorchs_encoder():
    """Its fused way packs what is no padding into nested tensors, whose additions cannot be
    followed."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    teacher = nn.TransformerEncoder(layer, 2).double().eval()
    padding = torch.zeros(4, 9, dtype=torch.bool)
    padding[1:, 4:] = True
    padding[0, 6:] = True
    sources = [torch.randn(4, 9, 8).double() for _ in range(3)]
    states = []
    for length in (6, 9):
        model = copy.deepcopy(teacher)
        hp.prune_heads_(model, {0: [1], 1: [1]})
        given = [
            {"src": x[:, :length], "src_key_padding_mask": padding[:, :length]} for x in sources
        ]
        report = recovered(model, given, Lstsq(ridge=0.3, feed_forward=True), teacher)
        assert (report.notes, len(report.metrics["errors"])) == ((), 4)
        states.append(dict(model.state_dict()))
    assert_close(states[0], states[1], rtol=1e-9, atol=1e-9)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("family", ["swin", "torch.nn.TransformerDecoder", "falcon"])
def test_the_stream_is_in_the_order_of_the_output(family):
    """Noise on what a projection puts out comes out in the stream, token by token, and nothing else
    does."""
    subject, _ = subject_of(family)
    bound = bind(subject.model)

    def followed(number, gate):
        (found,) = follow(lambda: call(subject.model, subject.batch), {number: gate}, 1)
        return found

    with quiet(subject.model, subject.copy(), list(zip(bound, bound, strict=True))), Doubled():
        for number, b in enumerate(bound):
            plain = followed(number, b.gate)
            noise = torch.randn(plain.output.shape).double()
            handle = b.gate.register_forward_hook(lambda m, a, out, noise=noise: out + noise)
            noisy = followed(number, b.gate)
            handle.remove()
            assert plain.summed, b.site.name
            assert_close(noisy.stream(True) - plain.stream(True), noise, rtol=0, atol=1e-9)
            # something was added
            assert float((plain.stream(True) - plain.output).abs().max()) > 1e-3


def test_biases_it_added_are_saved(tmp_path):
    subject, batches = subject_of("llama")
    subject.model.float()
    model = pruned(subject, later(subject))
    report = hp.recover_(model, batches, Lstsq(ridge=0.3, feed_forward=True), subject.model)
    assert report.metrics["biases_added"] == 4
    loaded = hp.from_pretrained(hp.save_pretrained(model, tmp_path))
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert loaded.model.layers[2].mlp.down_proj.bias is not None
    again = hp.recover_(loaded, batches, "mean_fold", subject.model)
    assert again.metrics["heads"] == 0  # what the biases hold is known


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", Lstsq(ridge=0.3)), ("llama", MeanFold()), ("gpt2", MeanFold())],
    ids=str,
)
def test_all_is_as_it_was_but_the_projections(family, method):
    """New biases are parameters that are frozen like the weight; an existing one is the same
    parameter as before, for an optimizer must go on holding it."""
    subject, batches = subject_of(family)
    model = pruned(subject, later(subject))
    model.train()
    gates = [model.get_submodule(f"{s.name}.{subject.layout.gate}") for s in subject.sites[1:]]
    gates[0].weight.requires_grad_(False)
    parameters, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with unchanged(subject.model):
        report = recovered(model, batches, method, subject.model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    now = dict(model.named_parameters())
    assert all(now[name] is parameter for name, parameter in parameters.items())
    assert all(type(gate.bias) is nn.Parameter for gate in gates)
    assert family == "gpt2" or [gate.bias.requires_grad for gate in gates] == [False, True]
    assert report.metrics["biases_added"] == (2 if family == "llama" else 0)
    for name, tensor in model.state_dict().items():
        same = name in before and torch.equal(tensor, before[name])
        assert same == (name not in report.changed), name
        assert same or name.endswith("bias") or method == Lstsq(ridge=0.3)


class Breaking(list):
    passes = 0

    def __iter__(self):
        self.passes += 1
        for i, batch in enumerate(super().__iter__()):
            if (self.passes, i) == (3, 1):
                raise RuntimeError("the disk is gone")
            yield batch


@pytest.mark.parametrize(
    "method", [Lstsq(feed_forward=True), HeadRescale(), MeanFold()], ids=lambda m: type(m).__name__
)
def test_after_an_error_half_way_the_model_is_as_it_was(method):
    subject, batches = subject_of("llama")
    model = pruned(subject, later(subject))
    before, values = picture(model), copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="the disk is gone"):
        recovered(model, Breaking(batches), method, subject.model)
    versions = [entry for entry in picture(model) if len(entry) != 5]
    assert versions == [entry for entry in before if len(entry) != 5]
    assert_close(model.state_dict(), values, rtol=0, atol=0)


def test_narrow_models_are_fitted_in_wide_arithmetic():
    """bf16 keeps 8 bits; statistics in it would leave several times as much as the rounding of the
    weights does."""
    subject, batches = subject_of("vit")
    left = {}
    for dtype in (torch.float64, torch.bfloat16):
        teacher = copy.deepcopy(subject.model).to(dtype)
        model = copy.deepcopy(teacher)
        hp.prune_(model, subject.ragged())
        given = [
            {k: v.to(dtype) if v.is_floating_point() else v for k, v in b.items()} for b in batches
        ]
        report = hp.recover_(model, given, Lstsq(ridge=0.3), teacher)
        assert {p.dtype for p in model.parameters()} == {dtype}
        left[dtype] = report.metrics["error_after"]
    assert left[torch.bfloat16] < 1.1 * left[torch.float64] + 0.01


def test_inputs_that_depend_on_each_other_are_said():
    subject, batches = subject_of("bert")
    few = [{k: v[:1, :3] if v.ndim == 2 else v[:1] for k, v in batches[0].items()}]
    report = recovered(pruned(subject), few, PLAIN, subject.model)
    assert report.metrics["error_after"] < 1e-12
    assert any("linearly dependent" in note for note in report.notes)
    (note,) = recovered(pruned(subject), few, Lstsq(ridge=0.3), subject.model).notes
    assert note.startswith("Few examples for 3 of 3 projections: ")
    assert "12 numbers per output channel to 3 tokens. Use about 8 examples, not 1" in note


def test_the_ridge_draws_to_the_prior():
    subject, batches = subject_of("bert")
    model, zero = pruned(subject), pruned(subject)
    before = copy.deepcopy(model.state_dict())
    recovered(model, batches, Lstsq(ridge=1e12, intercept=False), subject.model)
    assert_close(model.state_dict(), before, rtol=0, atol=1e-9)
    recovered(zero, batches, Lstsq(ridge=1e12, prior="zero", intercept=False), subject.model)
    weight = zero.bert.encoder.layer[0].attention.output.dense.weight
    assert_close(weight, torch.zeros_like(weight), rtol=0, atol=1e-9)


def test_what_cannot_be_refitted_is_refused_in_words():
    subject, batches = subject_of("bert")
    model = pruned(subject)
    before = copy.deepcopy(model.state_dict())
    blank = {**batches[0], "attention_mask": torch.zeros_like(batches[0]["attention_mask"])}
    for given, words in (([], "at least one batch"), ([blank], "only padding")):
        with pytest.raises(InvalidValue, match=words):
            recovered(model, given, "lstsq", subject.model)
    nn.init.constant_(subject.model.bert.encoder.layer[1].attention.output.dense.bias, math.nan)
    with pytest.raises(InvalidValue, match="must be finite"):
        recovered(model, batches, "lstsq", subject.model)
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_parameters_that_are_shared_are_refused():
    subject, batches = subject_of("bert")
    mask = subject.without({subject.sites[0].name: [1]})
    model = pruned(subject, mask).requires_grad_(False)
    projections = [layer.attention.output.dense for layer in subject.model.bert.encoder.layer]
    projections[2].weight = model.bert.encoder.layer[2].attention.output.dense.weight
    words = r"teacher: must be a model with its own parameters at bert\.encoder"
    with pytest.raises(InvalidValue, match=words):
        recovered(model, batches, "lstsq", subject.model)
    projections[2].weight = projections[1].weight
    with pytest.raises(UnsupportedModel, match="must be used by one projection only"):
        recovered(pruned(subject, mask), batches, "lstsq", subject.model)


BAD = [
    (Lstsq, {"ridge": -1.0}),
    (Lstsq, {"prior": "mean"}),
    (Lstsq, {"precision": "bfloat16"}),
    (Lstsq, {"token_weights": "some"}),
    (Lstsq, {"max_bytes": -1}),
    (Lstsq, {"max_bytes": 1e9}),
    (HeadRescale, {"ridge": -1.0}),
    (HeadRescale, {"intercept": True}),
    (HeadRescale, {"precision": "float16"}),
]


@pytest.mark.parametrize(("kind", "settings"), BAD)
def test_bad_settings_are_refused(kind, settings):
    with pytest.raises(InvalidValue, match=f"{kind.__name__}.{next(iter(settings))}: must be"):
        kind(**settings)
