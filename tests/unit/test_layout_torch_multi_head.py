"""torch.nn.MultiheadAttention: the exposed attention is PyTorch's, and what is measured and cut does
not depend on PyTorch's native paths and nested tensors."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.core.mixin import mix_in
from headprune.layouts._tiny_torch_multi_head import EncoderLayers, Mixed
from headprune.layouts.torch_multi_head import LAYOUT, Exposed
from headprune.model.sites import reason_against
from tests.laws.support import CLOSE, shaken

NESTED = "ignore:The PyTorch API of nested tensors"
FORMS = {
    "fused": {},
    "batch first": {"batch_first": True},
    "without biases": {"bias": False, "batch_first": True},
    "separate": {"kdim": 6, "vdim": 5},
    "added keys": {"add_bias_kv": True, "batch_first": True},
    "a key of zeros": {"add_zero_attn": True},
    "both": {"add_zero_attn": True, "add_bias_kv": True, "kdim": 6, "vdim": 5, "bias": False},
}
LATER = torch.ones(4, 5, dtype=torch.bool).triu(2)
PADDED = torch.tensor([[False] * 5, [False, False, True, True, True]])
BY_HEAD = torch.randn(8, 4, 5, dtype=torch.float64)
CALLS = {
    "plain": {},
    "weights a head": {"average_attn_weights": False},
    "mask": {"attn_mask": LATER},
    "added mask": {"attn_mask": torch.randn(4, 5, dtype=torch.float64)},
    "mask a head": {"attn_mask": BY_HEAD, "need_weights": False},
    "padding": {"key_padding_mask": PADDED},
    "both": {"attn_mask": LATER, "key_padding_mask": PADDED, "need_weights": False},
    "causal": {"attn_mask": LATER, "is_causal": True, "need_weights": False},
}
CALLS["causal, padding"] = {**CALLS["causal"], "key_padding_mask": PADDED}
#: Every call of the most usual form, and every form with calls that add to the keys' masks.
CASES = [
    *(("batch first", call) for call in CALLS),
    *((form, call) for form in FORMS if form != "batch first" for call in ("plain", "both")),
]


def attention(**options):
    module = nn.MultiheadAttention(12, 4, **options)
    shaken(module)
    return module.double().eval()


def inputs(module, batched=True):
    made = [torch.randn(2, n, w).double() for n, w in ((4, 12), (5, module.kdim), (5, module.vdim))]
    if not batched:
        return [x[0] for x in made]
    return made if module.batch_first else [x.transpose(0, 1) for x in made]


@pytest.mark.parametrize(("form", "call"), CASES)
def test_exposed_is_the_same_attention(form, call):
    module = attention(**FORMS[form])
    given = inputs(module)
    expected = module(*given, **CALLS[call])
    assert mix_in(module, Exposed)
    seen = []
    module.out_proj.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    got = module(*given, **CALLS[call])
    assert_close(got, expected, equal_nan=True, **CLOSE)
    assert seen == [(2, 4, 12)]


def test_exposed_without_a_batch():
    module = attention(batch_first=True)
    given = inputs(module, batched=False)
    call = {"key_padding_mask": PADDED[1], "attn_mask": BY_HEAD[:4]}
    expected = module(*given, **call)
    mix_in(module, Exposed)
    assert_close(module(*given, **call), expected, **CLOSE)


def test_a_mask_for_each_head_may_be_for_the_original_heads():
    model = nn.ModuleDict({"a": attention(batch_first=True)})
    small, given = copy.deepcopy(model), inputs(model["a"])
    plan = hp.HeadMask.from_keep({"a": [1, 3]}, {"a": 4})
    with hp.gated(model, plan):
        expected = model["a"](*given, attn_mask=BY_HEAD, need_weights=False)[0]
    hp.prune_(small, plan)
    present = BY_HEAD.unflatten(0, (2, 4))[:, [1, 3]].flatten(0, 1)
    for mask in (BY_HEAD, present):
        got = small["a"](*given, attn_mask=mask, need_weights=False)[0]
        assert_close(got, expected, **CLOSE)
    with pytest.raises(RuntimeError, match="2 present or 4 original heads"):
        small["a"](*given, attn_mask=BY_HEAD[:6], need_weights=False)


def nested_model():
    """A model that PyTorch runs on nested tensors, a batch, and the names of its attentions."""
    model, batch = shaken(EncoderLayers(nested=True)).double().eval(), EncoderLayers.tiny()[1]
    batch["x"] = batch["x"].double()
    return model, batch, [f"encoder.layers.{i}.self_attn" for i in range(3)]


@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize("removed", [{0: [1]}, {0: [0], 2: [3]}, {1: [0, 1, 2, 3]}], ids=str)
def test_native_layers_on_nested_tensors(removed, monkeypatch):
    native = []
    operation = torch._transformer_encoder_layer_fwd

    def counted(src, *args):
        native.append(src.is_nested)
        return operation(src, *args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    model, batch, names = nested_model()
    keep = {names[i]: set(range(4)) - set(heads) for i, heads in removed.items()}
    plan = hp.HeadMask.from_keep(keep, dict.fromkeys(names, 4))
    slow = model(**batch)
    with torch.no_grad():
        full = model(**batch)
        assert native == [True] * 3, "PyTorch takes its native operation"
        kept = ~batch["padding"]
        assert_close(full[kept], slow[kept], **CLOSE)
        native.clear()
        with hp.gated(model, plan):
            expected = model(**batch)
        assert not native, "a gate on every layer takes all off the native operation"
        with hp.gated(model, {names[i]: torch.ones(4) for i in removed}):
            assert_close(model(**batch), full, **CLOSE)
        assert native == [True] * (3 - len(removed)), "the others are on it"
        small = copy.deepcopy(model)
        hp.prune_(small, plan)
        native.clear()
        assert_close(small(**batch), expected, **CLOSE)
        assert native == [True] * (3 - len(removed))
        assert (expected - full).abs().max() > 1e-6
        assert_close(pickle.loads(pickle.dumps(small))(**batch), expected, **CLOSE)


@pytest.mark.filterwarnings(NESTED)
def test_nested_tensors_attend_to_themselves_alone():
    module = attention(batch_first=True)
    hp.prune_(module, hp.HeadMask.from_keep({"": [0, 2]}, {"": 4}))
    x = torch.nested.nested_tensor([torch.randn(n, 12, dtype=torch.float64) for n in (3, 5)])
    other = torch.nested.nested_tensor([t.clone() for t in x.unbind()])
    for arguments, more in (((x, x, other), {}), ((x, x, x), {"attn_mask": torch.ones(5, 5)})):
        with pytest.raises(RuntimeError, match="only self-attention without masks"):
            module(*arguments, **more)
    together = module(x, x, x, need_weights=False)[0]
    for example, whole in zip(together.unbind(), x.unbind(), strict=True):
        assert_close(example, module(*[whole[None]] * 3, need_weights=False)[0][0], **CLOSE)


def test_kinds():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2), 1)
    kinds = {s.name: s.kind for s in hp.find_sites(decoder)}
    assert kinds == {"layers.0.self_attn": "self", "layers.0.multihead_attn": "cross"}
    assert {s.name: s.kind for s in hp.find_sites(Mixed())}["cross"] == "cross"


class RotatedAttention(nn.MultiheadAttention):
    def forward(self, query, *args, **kwargs):
        return super().forward(query.roll(1, 1), *args, **kwargs)


def test_another_forward_is_refused():
    wrapped = nn.MultiheadAttention(8, 2)
    wrapped.forward = wrapped.forward
    # Its class's own, as accelerate's hooks put it on the instance
    assert reason_against(LAYOUT, wrapped) is None
    wrapped.forward = lambda *args: type(wrapped).forward(wrapped, *args)
    assert reason_against(LAYOUT, wrapped) is not None
    must = r"must be that of torch\.nn\.MultiheadAttention, got another"
    with pytest.raises(UnsupportedModel, match=must):
        hp.find_sites(nn.ModuleDict({"attention": RotatedAttention(8, 2)}))


class Reader(nn.Module):
    """An encoder of padded sentences, of which PyTorch makes nested tensors in evaluation."""

    def __init__(self, nested, mean=False):
        super().__init__()
        self.mean, self.embedding = mean, nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(16, 3)

    def forward(self, ids):
        x = self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0)
        return self.head(x.mean(1) if self.mean else x[:, 0])


def reader(nested, mean=False):
    torch.manual_seed(0)
    return shaken(Reader(nested, mean)).double().eval()


def sentences():
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in (9, 7):
        ids = torch.randint(1, 30, (5, length), generator=generator)
        ids[::2, 4:] = 0
        batches.append({"ids": ids, "labels": torch.randint(3, (5,), generator=generator)})
    return batches


def loss(model, batch):
    return functional.cross_entropy(model(batch["ids"]), batch["labels"], reduction="none")


#: One of each way to look at a model: what projections read, maps, curvature, passes, gradients.
SCORERS = ("activation_norm", "attattr", "ggn", "leave_one_out", "taylor")


def scored(model, scorer):
    try:
        found = hp.score(model, sentences(), scorer, loss=loss, progress=False)
    except UnsupportedModel as error:  # no map to be seen
        return str(error)
    return found.values, found.standard_errors, found.costs, found.notes


@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize("scorer", SCORERS)
def test_scores_do_not_depend_on_nested_tensors(scorer):
    default = reader(nested=True)
    assert scored(default, scorer) == scored(reader(nested=False), scorer)
    assert default.encoder.use_nested_tensor, "it is as it was"


@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize("method", ["finetune", "lstsq"])
def test_recoveries_do_not_depend_on_nested_tensors(method):
    chosen = hp.recovery.Finetune(steps=1, learning_rate=1e-2) if method == "finetune" else method
    names = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    mask = hp.HeadMask.from_keep({names[0]: [0, 2, 3], names[1]: [1, 3]}, dict.fromkeys(names, 4))
    states = []
    for nested in (True, False):
        teacher = reader(nested)
        small = copy.deepcopy(teacher)
        hp.prune_(small, mask)
        cut = copy.deepcopy(small)
        torch.manual_seed(0)
        needed = {} if method == "finetune" else {"teacher": teacher}
        hp.recover_(small, sentences(), chosen, loss=loss, **needed)
        states.append(small.state_dict())
        ids = sentences()[0]["ids"]
        assert (small(ids) - cut(ids)).abs().max() > 1e-6
    assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.filterwarnings(NESTED)
def test_a_model_that_reads_padding_is_told_of_zeros_there():
    model = reader(nested=True, mean=True)
    (note,) = hp.score(model, sentences(), "taylor", loss=loss, progress=False).notes
    assert "enable_nested_tensor=False" in note
    model.encoder.use_nested_tensor = False
    assert not hp.score(model, sentences(), "taylor", loss=loss, progress=False).notes
