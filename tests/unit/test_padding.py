"""Padding counts nowhere: a padded batch scores and refits as its examples do one by one, without
padding.

tests/laws has every scorer on encoders and decoders of text. Here are the two that read tokens in the
two ways there are on a model of each kind, and every recovery. ``finetune`` steps by batches, so
that one is compared with itself, padded further.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.contexts import reading
from headprune.model.losses import default_loss
from headprune.model.masks import token_mask, unmasked, visible
from headprune.model.running import call
from headprune.model.sites import bind
from headprune.recovery import Finetune, Lstsq
from headprune.scoring import AttributionPatching, LeaveOneOut, Surgeon, Taylor
from tests.laws.support import as_double, shaken, unchanged
from tests.scoring_help import flat, flat_errors, own_loss

Batch = dict[str, Any]

#: Equal up to the rounding of sums over other lengths, in fp64; standard errors divide it.
CLOSE = {"rtol": 1e-7, "atol": 1e-9}
_LENGTHS = (5, 3, 4)
_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
_SIZES |= {"intermediate_size": 12, "initializer_range": 0.3}
_TEXT = {**_SIZES, "vocab_size": 20, "pad_token_id": 0}
_SPECIAL = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2, "bos_token_id": 1}

# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Case:
    """A model with three examples of unlike length."""

    build: Callable[[], nn.Module]
    #: Makes the examples, each a batch of one without padding.
    alone: Callable[[], list[Batch]]
    #: By name of a tensor, what it is padded with; others have one length.
    padding: dict[str, float]
    #: One number an example that does not depend on padding; None is the default loss.
    loss: Callable[[nn.Module, Any], Tensor] | None = None

    def together(self, more):
        """One padded batch, with so many positions more than the longest example."""
        alone, batch = self.examples(), {}
        for name in alone[0]:
            parts = [one[name] for one in alone]
            if name in self.padding:
                longest = max(part.shape[1] for part in parts) + more
                parts = [padded(part, longest, self.padding[name]) for part in parts]
            batch[name] = torch.cat(parts)
        return batch

    def examples(self):
        """In fp64."""
        torch.manual_seed(1)
        return [as_double(one) for one in self.alone()]


def padded(x, length, value):
    """With so many positions along the second axis."""
    more = x.new_full((x.shape[0], length - x.shape[1], *x.shape[2:]), value)
    return torch.cat([x, more], 1)


def words():
    rows = [torch.randint(3, 19, (1, length)) for length in _LENGTHS]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]


def t5():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, **_SPECIAL, vocab_size=20, dropout_rate=0.0)
    return transformers.T5ForConditionalGeneration(config)


def translations():
    sources = words()
    for source, n in zip(sources, (2, 4, 3), strict=True):
        source["labels"] = torch.randint(3, 19, (1, n))
    return sources


_SPEECH = {**_SIZES, "vocab_size": 20, "num_labels": 3, "classifier_proj_size": 8}
_SPEECH |= {"conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (5, 2)}
_SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
#: "group" takes its statistics over padding too: the model itself depends on it.
_SPEECH |= {"num_feat_extract_layers": 2, "feat_extract_norm": "layer"}
_SPEECH |= {"apply_spec_augment": False, "layerdrop": 0.0}
_SPEECH |= {f"{place}_dropout": 0.0 for place in ("hidden", "attention", "activation")}
_SPEECH |= {"feat_proj_dropout": 0.0, "final_dropout": 0.0}
_OF_FAMILY = {
    "WavLM": {"num_buckets": 8, "max_bucket_distance": 12},
    "Data2VecAudio": {"conv_pos_kernel_size": 5, "num_conv_pos_embeddings": 1},
    "SEW": {"squeeze_factor": 2},
}


def speech(family="Wav2Vec2"):
    kind = getattr(transformers, f"{family}ForSequenceClassification")
    return kind(kind.config_class(**{**_SPEECH, **_OF_FAMILY.get(family, {})}))


def waves():
    batches = []
    for samples, label in ((90, 0), (53, 2), (71, 1)):
        sound = {"input_values": torch.randn(1, samples), "labels": torch.tensor([label])}
        batches.append({**sound, "attention_mask": torch.ones(1, samples, dtype=torch.long)})
    return batches


def clip():
    """Its images have 5 tokens, as many as the longest text."""
    image = {**_SIZES, "image_size": 4, "patch_size": 2, "num_channels": 1}
    words_ = {**_TEXT, "max_position_embeddings": 16, "eos_token_id": 19, "bos_token_id": 1}
    config = transformers.CLIPConfig(vision_config=image, text_config=words_, projection_dim=6)
    return transformers.CLIPModel(config)


def captions():
    batches = words()
    for batch in batches:
        batch["input_ids"][:, -1] = 19  # the end of the text, whose state is its embedding
        batch["pixel_values"] = torch.randn(1, 1, 4, 4)
    return batches


def agreement_of_pairs(model, batch):
    """Of each image with its own text."""
    out = model(**batch)
    return -(out.image_embeds * out.text_embeds).sum(-1)


class TorchEncoder(nn.Module):
    """PyTorch's encoder, told its padding by place; one output an example, of its first token."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x, away):
        return self.head(self.encoder(x, None, away)[:, 0])


class TorchDecoder(nn.Module):
    """PyTorch's decoder with padding in both sequences, tokens first."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, dropout=0), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x, memory, away, memory_away):
        hidden = self.decoder(
            x.transpose(0, 1),
            memory.transpose(0, 1),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype),
            tgt_key_padding_mask=x.new_zeros(away.shape).masked_fill(away, float("-inf")),
            memory_key_padding_mask=memory_away.to(x.dtype) * -1e4,
        )
        return self.head(hidden[0])


class OwnLayers(nn.Module):
    """Our own attention, told its padding by lengths; one output an example."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x, lengths):
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        for layer in self.layers:
            x = x + layer(x, valid_lens=lengths)
        return self.head((x * mask[..., None]).sum(1) / lengths[:, None])


def with_lengths():
    return [{"x": torch.randn(1, n, 8), "lengths": torch.tensor([n])} for n in _LENGTHS]


def states():
    return [
        {"x": torch.randn(1, n, 8), "away": torch.zeros(1, n, dtype=torch.bool)} for n in _LENGTHS
    ]


def two_sequences():
    batches = states()
    for batch, n in zip(batches, (3, 5, 4), strict=True):
        batch["memory"] = torch.randn(1, n, 8)
        batch["memory_away"] = torch.zeros(1, n, dtype=torch.bool)
    return batches


_HIDDEN = {"x": 0.7, "away": 1}
_SOUND = {"input_values": 0, "attention_mask": 0}
#: 7 is a word like any other: only the mask says that it is none.
_WORDS = {"input_ids": 7, "attention_mask": 0}
CASES = {
    "text to text": Case(t5, translations, {**_WORDS, "labels": -100}),
    "speech": Case(speech, waves, _SOUND),
    "both towers": Case(clip, captions, _WORDS, agreement_of_pairs),
    "torch.nn encoder": Case(TorchEncoder, states, _HIDDEN, own_loss),
    "torch.nn decoder": Case(
        TorchDecoder, two_sequences, {**_HIDDEN, "memory": 0.7, "memory_away": 1}, own_loss
    ),
    "our attention, lengths": Case(OwnLayers, with_lengths, {"x": 0.7}, own_loss),
}

#: One of gates' gradients and one of what projections read, on each model.
SCORERS = {"taylor of tokens": Taylor(reduce="token"), "obs": "obs"}
#: Those that read maps, other examples or means, where there are two sequences.
MORE = {
    "leave_one_out, mean": LeaveOneOut(replacement="mean"),
    "leave_one_out, resample": LeaveOneOut(replacement="resample", pool=3),
    "attribution_patching, mean": AttributionPatching(base="mean"),
    "surgeon of outputs": Surgeon(curvature="output"),
    "fluctuation": "fluctuation",
    "entropy": "entropy",
}
SCORED = [(name, scorer) for name in CASES for scorer in SCORERS]
SCORED += [("text to text", scorer) for scorer in MORE]


@cache
def model_of(name):
    torch.manual_seed(0)
    return shaken(CASES[name].build()).double().eval()


def data(case):
    """Examples one by one, and one padded batch of them."""
    return case.examples(), [case.together(0)]


def given(case):
    return {"progress": False} if case.loss is None else {"progress": False, "loss": case.loss}


def losses(model, loss, batches):
    with torch.no_grad():
        return torch.cat([(loss or default_loss)(model, batch) for batch in batches])


@pytest.mark.parametrize(("name", "scorer"), SCORED)
def test_scores_of_a_padded_batch_are_those_of_its_examples(name, scorer):
    case, chosen = CASES[name], {**SCORERS, **MORE}[scorer]
    wanted, found = (
        hp.score(model_of(name), batches, chosen, **given(case)) for batches in data(case)
    )
    assert float(flat(wanted).abs().max()) > 1e-6
    assert_close(flat(found), flat(wanted), **CLOSE)
    if found.standard_errors is not None:
        assert_close(flat_errors(found), flat_errors(wanted), **CLOSE)


# ---------------------------------------------------------------- recoveries

REFITS = {
    "head_rescale": "head_rescale",
    "lstsq": Lstsq(ridge=0.3, feed_forward=True),
    "mean_fold": "mean_fold",
}
FINETUNE = Finetune(steps=1, learning_rate=1e-2, distill=1.0, distill_hidden=1.0)
REFITTED = [("text to text", method) for method in REFITS]
REFITTED += [(name, "lstsq") for name in ("speech", "both towers", "torch.nn decoder")]


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def recovered(name, method, batches):
    """All weights of the model without the first head of every site, refitted; as they are without
    batches."""
    model = copy.deepcopy(model_of(name))
    sites = hp.find_sites(model)
    keep = {site.name: [h for unit in site.units[1:] or site.units for h in unit] for site in sites}
    hp.prune_(model, hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites}))
    if batches:
        hp.recover_(model, batches, method, teacher=model_of(name), **given(CASES[name]))
    return weights(model)


@pytest.mark.parametrize(("name", "method"), REFITTED)
def test_refits_on_a_padded_batch_are_those_on_its_examples(name, method):
    case = CASES[name]
    wanted, found = (recovered(name, REFITS[method], batches) for batches in data(case))
    one = recovered(name, REFITS[method], case.examples()[:1])
    assert float((wanted - one).abs().max()) > 1e-6
    assert_close(found, wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["text to text", "torch.nn encoder"])
def test_training_does_not_depend_on_more_padding(name):
    """The task, the teacher's logits and its hidden states, in a step over the whole batch."""
    case = CASES[name]
    batches = [[case.together(more)] for more in (2, 4)]
    wanted, found = (recovered(name, FINETUNE, part) for part in batches)
    assert float((wanted - recovered(name, None, [])).abs().max()) > 1e-3
    assert_close(found, wanted, rtol=1e-7, atol=1e-7)


# ---------------------------------------------------------------- families, masks and towers


@pytest.mark.parametrize("family", ["Data2VecAudio", "SEW", "WavLM"])
def test_families_of_speech(family):
    """Frames that are no padding are counted, also where layers run on half of them (SEW)."""
    model, case = shaken(speech(family)).double().eval(), Case(speech, waves, _SOUND)
    alone, together = data(case)
    if family == "SEW":  # it pools frames before it hides any: only more padding is alike
        alone, together = ([case.together(more)] for more in (40, 80))
    apart = [losses(model, None, batches) for batches in (alone, together)]
    assert_close(apart[1], apart[0], rtol=1e-9, atol=1e-9)
    for scorer in ("activation_norm", "obs"):
        wanted, found = (
            hp.score(model, batches, scorer, progress=False) for batches in (alone, together)
        )
        assert_close(flat(found), flat(wanted), **CLOSE)


HERE = torch.tensor([[1, 1, 0], [1, 0, 0]])
PAIRS = HERE.bool()[:, None, None].expand(2, 1, 3, 3)
CAUSAL = PAIRS & torch.ones(3, 3, dtype=torch.bool).tril()
ADDED = torch.zeros(2, 1, 3, 3).masked_fill(~CAUSAL, -1e4)


def test_keys_that_masks_hide():
    masks = (HERE, HERE.double(), PAIRS, PAIRS[:, :, :1], PAIRS[:, 0], PAIRS.long(), CAUSAL, ADDED)
    for number, mask in enumerate(masks):
        assert unmasked(mask).tolist() == HERE.bool().tolist(), number
    for nothing in (None, "mask", torch.ones(3), torch.ones(1, 1, 1, 1, 1)):
        assert unmasked(nothing) is None
    for all_ones in (torch.ones(1, 1, 3, 3, dtype=torch.bool), torch.zeros(1, 1, 3, 3)):
        found = token_mask({"attention_mask": all_ones}, (2, 3))  # one for all examples
        assert found.tolist() == [[True] * 3] * 2
    assert token_mask({"attention_mask": HERE}, (2, 4)) is None
    assert token_mask((HERE,), (2, 3)) is None
    # No query sees itself: keys that no other one sees either are tokens all the same.
    assert visible(torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(-1)).tolist() == [[True] * 3]


def read(model, batch):
    """By site, which tokens count."""
    bound, found = bind(model), {}

    def take(site, x, counted):
        found[bound[site].site.name] = None if counted is None else counted.int().tolist()

    with torch.no_grad(), reading(model, bound, take) as begin:
        begin(batch)
        call(model, batch)
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_mask_of_a_text_is_not_that_of_its_image(implementation):
    model = copy.deepcopy(model_of("both towers"))
    model.set_attn_implementation(implementation)
    (batch,) = data(CASES["both towers"])[1]
    assert batch["attention_mask"].shape[1] == 5  # tokens, as many as the image has
    found = {name.split("_")[0]: counted for name, counted in read(model, batch).items()}
    assert found == {"text": batch["attention_mask"].tolist(), "vision": None}


class MaskedSum(nn.Module):
    """Uses its mask after all attention: there is no other part that it could be for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(2))

    def forward(self, x, attention_mask):
        for layer in self.layers:
            x = x + layer(x, causal=True)
        return (x * attention_mask[..., None]).sum(1)


def test_a_mask_that_reaches_no_attention_still_counts():
    found = read(MaskedSum(), {"x": torch.randn(2, 3, 8), "attention_mask": HERE})
    assert found == {"layers.0": HERE.tolist(), "layers.1": HERE.tolist()}


def test_what_attention_hides_is_forgotten_with_the_pass():
    """No hook and no mode remains, also after an error inside of attention."""
    model = model_of("our attention, lengths")
    with unchanged(model), pytest.raises(InvalidValue, match="valid_lens"):
        read(model, {"x": torch.randn(1, 3, 8).double(), "lengths": torch.tensor([5])})
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize(
    ("name", "kernel"), [("our attention, lengths", ""), ("speech", "sdpa"), ("speech", "eager")]
)
def test_a_layer_without_heads_is_told_by_the_teachers(name, kernel):
    """Its own attention hides nothing any more."""
    found = []
    for batches in data(CASES[name]):
        model, teacher = (copy.deepcopy(model_of(name)) for _ in range(2))
        for one in (model, teacher) if kernel else ():
            one.set_attn_implementation(kernel)
        sites = hp.find_sites(model)
        heads = {site.name: site.n_query_heads for site in sites}
        hp.prune_(model, hp.HeadMask.from_keep({sites[0].name: []}, heads))
        hp.recover_(model, batches, "lstsq", teacher=teacher, **given(CASES[name]))
        found.append(weights(model))
    assert_close(found[1], found[0], rtol=1e-7, atol=1e-7)


def test_a_decoders_attention_to_itself_tells_the_queries_of_that_to_the_encoder():
    (batch,) = data(CASES["torch.nn decoder"])[1]
    found = read(model_of("torch.nn decoder"), batch)
    assert list(found.values()) == [(~batch["away"]).int().tolist()] * 4


def test_the_mean_of_all_heads_maps_is_no_map_of_a_head():
    with pytest.raises(UnsupportedModel, match="an attention that computes its map"):
        hp.score(speech("WavLM").eval(), waves(), "entropy", progress=False)
