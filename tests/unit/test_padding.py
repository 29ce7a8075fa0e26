"""Padding counts nowhere: a padded batch scores and refits as its examples do one by one, without
padding.

Over one model of every task and tower, every scorer and every recovery. What cannot hold is in
``REFUSED`` and ``DRAWN``, with why. ``finetune`` steps by batches, so that one is compared with
itself, padded further.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.attention.transformer import TransformerConfig, TransformerForTranslation
from headprune.core.errors import HeadPruneError, InvalidValue, UnsupportedModel
from headprune.model.contexts import reading
from headprune.model.losses import default_loss
from headprune.model.masks import token_mask, unmasked, visible
from headprune.model.running import call
from headprune.model.sites import bind
from headprune.recovery import Finetune, Lstsq
from headprune.recovery import registry as recoveries
from headprune.scoring import AttributionPatching, Auto, LeaveOneOut, Surgeon, Taylor
from headprune.scoring import registry as scorers
from headprune.scoring._base import Scorer
from headprune.scoring._distributions import content_seeds
from tests.laws.support import picture, shaken

Batch = dict[str, Any]

#: Equal up to the rounding of sums over other lengths, in fp64; standard errors divide it.
CLOSE = {"rtol": 1e-7, "atol": 1e-9}
_LENGTHS = (5, 3, 4)
_SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "initializer_range": 0.3,
}
_TEXT: dict[str, Any] = {**_SIZES, "vocab_size": 20, "pad_token_id": 0}
_BERT: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # draws depend on shapes

# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Case:
    """A model with three examples of unlike length.

    Args:
        build: Makes the model.
        alone: Makes the examples, each a batch of one without padding.
        together: Makes one padded batch of them, with so many positions more than the longest.
        loss: One number an example that does not depend on padding; None is the default loss.
        refused: By scorer, what a clear error says where there is nothing to compare.
        drawn: Scorers whose draws are seeded by what examples contain, where nothing tells padding
            from content.
        blurred: Positions of padding that the model itself does not tell from an example's last
            ones: its layers before attention read over the end. Such a batch is compared with one
                of more padding.
    """

    build: Callable[[], nn.Module]
    alone: Callable[[], list[Any]]
    together: Callable[[list[Any], int], Any]
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    refused: dict[str, str] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()
    blurred: int = 0


def padded(x: Tensor, length: int, value: float = 0, dim: int = 1) -> Tensor:
    """With so many positions along an axis."""
    more = x.new_full((*x.shape[:dim], length - x.shape[dim], *x.shape[dim + 1 :]), value)
    return torch.cat([x, more], dim)


def stacked(
    values: dict[str, float], axes: dict[str, int] | None = None
) -> Callable[[list[Any], int], Any]:
    """Pads tensors by name with these values; others have one length."""

    def together(alone: list[Any], more: int) -> Any:
        batch = {}
        for name in alone[0]:
            parts, axis = [one[name] for one in alone], (axes or {}).get(name, 1)
            if name in values:
                longest = max(part.shape[axis] for part in parts) + more
                parts = [padded(part, longest, values[name], axis) for part in parts]
            batch[name] = torch.cat(parts)
        return batch

    return together


def words(labels: bool = True, n: Sequence[int] = _LENGTHS) -> list[Batch]:
    torch.manual_seed(1)
    rows = [torch.randint(3, 19, (1, length)) for length in n]
    batches: list[Batch] = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows
    ]
    for number, batch in enumerate(batches if labels else []):
        batch["labels"] = torch.tensor([number % 3])
    return batches


#: A word like any other: only the mask says that it is none.
text = stacked({"input_ids": 7, "attention_mask": 0})


def four_axes(dtype: torch.dtype) -> Callable[[list[Any], int], Any]:
    """The mask as ``[batch, 1, tokens, tokens]``: booleans, or floats that are added to scores."""

    def together(alone: list[Any], more: int) -> Any:
        batch = text(alone, more)
        seen = (
            batch["attention_mask"]
            .bool()[:, None, None]
            .expand(-1, -1, batch["input_ids"].shape[1], -1)
        )
        if "labels" not in batch:  # a causal language model
            seen = seen & torch.ones_like(seen).tril()
        low = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(
            ~seen, torch.finfo(torch.float64).min
        )
        batch["attention_mask"] = seen if dtype == torch.bool else low
        return batch

    return together


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**_TEXT, **_BERT, num_labels=3)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT, num_key_value_heads=1))


def t5() -> nn.Module:
    sizes = {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 12,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 20,
        "dropout_rate": 0.0,
    }
    special = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **special))


def translations() -> list[Batch]:
    sources = words(labels=False)
    for source, n in zip(sources, (2, 4, 3), strict=True):
        source["labels"] = torch.randint(3, 19, (1, n))
    return sources


def translator() -> nn.Module:
    sizes = {
        "d_model": 8,
        "ffn_dim": 12,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "num_attention_heads": 2,
    }
    return TransformerForTranslation(TransformerConfig(vocab_size=20, dropout=0.0, **sizes))


_SPEECH: dict[str, Any] = {
    **_SIZES,
    "vocab_size": 20,
    "num_labels": 3,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 4),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "feat_extract_norm": (
        "layer"
    ),  # "group" takes its statistics over padding too: the model itself depends on it
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0
    ),
    "final_dropout": 0.0,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "WavLM": {"num_buckets": 8, "max_bucket_distance": 12},
    "Data2VecAudio": {"conv_pos_kernel_size": 5, "num_conv_pos_embeddings": 1},
    "SEW": {"squeeze_factor": 2},
    "SEWD": {"squeeze_factor": 2, "max_position_embeddings": 64, "position_buckets": 8},
}


def speech(family: str, task: str = "ForSequenceClassification") -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        kind = getattr(transformers, family + task)
        made: nn.Module = kind(kind.config_class(**{**_SPEECH, **_OF_FAMILY.get(family, {})}))
        return made

    return build


def waves() -> list[Batch]:
    torch.manual_seed(1)
    rows = [torch.randn(1, samples) for samples in (90, 53, 71)]
    masks = [torch.ones_like(row, dtype=torch.long) for row in rows]
    labels = [torch.tensor([label]) for label in (0, 2, 1)]
    return [
        {"input_values": x, "attention_mask": m, "labels": y}
        for x, m, y in zip(rows, masks, labels, strict=True)
    ]


def unlabelled_waves() -> list[Batch]:
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in waves()]


sound = stacked({"input_values": 0, "attention_mask": 0})


def frames_loss(model: Any, batch: Any) -> Tensor:
    """The mean over frames of a number for each, of a model that puts out frames."""
    logits = model(**batch).logits
    frames = model._get_feature_vector_attention_mask(logits.shape[1], batch["attention_mask"])
    return (logits.logsumexp(-1).square() * frames).sum(1) / frames.sum(1)


def speech_to_text() -> nn.Module:
    sizes = {
        "d_model": 8,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_ffn_dim": 12,
        "decoder_ffn_dim": 12,
    }
    heads = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "input_feat_per_channel": 4,
    }
    special = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2, "bos_token_id": 1}
    more = {
        "conv_channels": 8,
        "max_source_positions": 64,
        "max_target_positions": 16,
        "init_std": 0.3,
        "dropout": 0.0,
    }
    config = transformers.Speech2TextConfig(vocab_size=20, **sizes, **heads, **special, **more)
    return transformers.Speech2TextForConditionalGeneration(config)


def spoken() -> list[Batch]:
    """Features ``[1, frames, mels]`` of which the encoder sees every fourth."""
    batches = translations()
    for batch, frames in zip(batches, (24, 12, 20), strict=True):
        del batch["input_ids"]
        batch["input_features"] = torch.randn(1, frames, 4)
        batch["attention_mask"] = torch.ones(1, frames, dtype=torch.long)
    return batches


def clip() -> nn.Module:
    image = {
        **_SIZES,
        "image_size": 4,
        "patch_size": 2,
        "num_channels": 1,
    }  # 5 tokens, as many as the longest text
    words_ = {**_TEXT, "max_position_embeddings": 16, "eos_token_id": 19, "bos_token_id": 1}
    return transformers.CLIPModel(
        transformers.CLIPConfig(vision_config=image, text_config=words_, projection_dim=6)
    )


def captions() -> list[Batch]:
    batches = words(labels=False)
    for batch in batches:
        batch["input_ids"][:, -1] = 19  # the end of the text, whose state is its embedding
        batch["pixel_values"] = torch.randn(1, 1, 4, 4)
    return batches


def agreement_of_pairs(model: Any, batch: Any) -> Tensor:
    """Of each image with its own text."""
    out = model(**batch)
    return -(out.image_embeds * out.text_embeds).sum(-1)


def llava() -> nn.Module:
    image = {
        **_SIZES,
        "model_type": "clip_vision_model",
        "image_size": 4,
        "patch_size": 2,
        "num_channels": 1,
    }
    text_ = {**_TEXT, "model_type": "llama", "num_key_value_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=image,
        text_config=text_,
        vision_feature_layer=-1,
        image_token_index=1,
        image_seq_length=4,
    )
    return transformers.LlavaForConditionalGeneration(config)


def pictures_in_text() -> list[Batch]:
    batches = words(labels=False, n=(8, 6, 7))
    for batch in batches:
        batch["input_ids"][:, 1:5] = 1
        batch["pixel_values"] = torch.randn(1, 1, 4, 4)
    return batches


def last_token(model: Any, batch: Any) -> Tensor:
    """A number of the last token's logits."""
    n = batch["attention_mask"].sum(1)
    return model(**batch).logits[torch.arange(len(n)), n - 1].logsumexp(-1).square()


class TorchEncoder(nn.Module):
    """PyTorch's encoder, told its padding by place; one output an example, of its first token."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, away: Tensor) -> Any:
        return self.head(self.encoder(x, None, away)[:, 0])


class TorchDecoder(nn.Module):
    """PyTorch's decoder with padding in both sequences, tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, dropout=0), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, memory: Tensor, away: Tensor, memory_away: Tensor) -> Any:
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        hidden = self.decoder(
            x.transpose(0, 1),
            memory.transpose(0, 1),
            tgt_mask=later,
            tgt_key_padding_mask=torch.zeros_like(away, dtype=x.dtype).masked_fill(
                away, float("-inf")
            ),
            memory_key_padding_mask=memory_away.to(x.dtype) * -1e4,
        )
        return self.head(hidden[0])


class OwnLayers(nn.Module):
    """Our own attention, told its padding by lengths or by a mask; one output an example."""

    def __init__(self, by_lengths: bool) -> None:
        super().__init__()
        self.by_lengths = by_lengths
        self.layers = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        for layer in self.layers:
            told = {"valid_lens": lengths} if self.by_lengths else {"mask": mask[:, None, None]}
            x = x + layer(x, **told)
        return self.head((x * mask[..., None]).sum(1) / lengths[:, None])


class Masked(nn.Module):
    """A user's model around BERT's encoder, which takes its mask by place and has no batch of
    names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = bert()

    def forward(self, ids: Tensor, here: Tensor) -> Any:
        return self.inner(ids, here).logits


def states() -> list[Batch]:
    torch.manual_seed(1)
    return [
        {"x": torch.randn(1, n, 8), "away": torch.zeros(1, n, dtype=torch.bool)} for n in _LENGTHS
    ]


def two_sequences() -> list[Batch]:
    batches = states()
    for batch, n in zip(batches, (3, 5, 4), strict=True):
        batch["memory"] = torch.randn(1, n, 8)
        batch["memory_away"] = torch.zeros(1, n, dtype=torch.bool)
    return batches


def in_order(
    names: Sequence[str], together: Callable[[list[Any], int], Any]
) -> Callable[[list[Any], int], Any]:
    """Batches that are tuples."""
    return lambda alone, more: tuple(
        together([dict(zip(names, b, strict=True)) for b in alone], more).values()
    )


def lengths_and_states() -> list[tuple[Tensor, Tensor]]:
    return [(batch["x"], torch.tensor([batch["x"].shape[1]])) for batch in states()]


def pairs_of_words() -> list[tuple[Tensor, Tensor]]:
    return [(batch["input_ids"], batch["attention_mask"]) for batch in words()]


def own_loss(model: Any, batch: Any) -> Tensor:
    out: Tensor = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out.logsumexp(-1).square()


#: Attention whose module shows no map, or the mean of its heads' maps alone.
_NO_MAP = dict.fromkeys(("attattr", "confidence", "entropy"), "an attention that computes its map")
_NO_LOGITS = {"ggn": "logits", "surgeon of outputs": "logits"}
_RESAMPLE = "leave_one_out, resample"

CASES: dict[str, Case] = {
    "text encoder": Case(bert, words, text),
    "text encoder, floats of four axes": Case(bert, words, four_axes(torch.float64)),
    "text encoder, booleans of four axes": Case(bert, words, four_axes(torch.bool)),
    "text decoder": Case(llama, lambda: words(labels=False), text),
    "text decoder, floats of four axes": Case(
        llama, lambda: words(labels=False), four_axes(torch.float64)
    ),
    "text to text": Case(
        t5, translations, stacked({"input_ids": 7, "attention_mask": 0, "labels": -100})
    ),
    "our translator": Case(
        translator, translations, stacked({"input_ids": 0, "attention_mask": 0, "labels": -100})
    ),
    "speech": Case(speech("Wav2Vec2"), waves, sound),
    "speech, an output a frame": Case(
        speech("Hubert", "ForCTC"), unlabelled_waves, sound, frames_loss
    ),
    "speech, biases of positions": Case(speech("WavLM"), waves, sound, refused=_NO_MAP),
    "speech to text": Case(
        speech_to_text,
        spoken,
        stacked({"input_features": 0, "attention_mask": 0, "labels": -100}),
        blurred=16,
    ),
    "both towers": Case(clip, captions, text, agreement_of_pairs, refused=_NO_LOGITS),
    "images in text": Case(llava, pictures_in_text, text, last_token),
    "torch.nn encoder": Case(
        TorchEncoder,
        states,
        stacked({"x": 0.7, "away": 1}),
        own_loss,
        refused=_NO_MAP,
        drawn=(_RESAMPLE,),
    ),
    "torch.nn decoder": Case(
        TorchDecoder,
        two_sequences,
        stacked({"x": 0.7, "away": 1, "memory": 0.7, "memory_away": 1}),
        own_loss,
        refused=_NO_MAP,
        drawn=(_RESAMPLE,),
    ),
    "our attention, lengths": Case(
        lambda: OwnLayers(by_lengths=True),
        lengths_and_states,
        in_order(("x", "lengths"), stacked({"x": 0.7})),
        own_loss,
        drawn=(_RESAMPLE,),
    ),
    "our attention, masks": Case(
        lambda: OwnLayers(by_lengths=False),
        lengths_and_states,
        in_order(("x", "lengths"), stacked({"x": 0.7})),
        own_loss,
        drawn=(_RESAMPLE,),
    ),
    "batches without names": Case(
        Masked,
        pairs_of_words,
        in_order(("ids", "here"), stacked({"ids": 7, "here": 0})),
        own_loss,
        drawn=(_RESAMPLE,),
    ),
}

#: Variants of others, which the long tests try.
_LONG = (
    "text encoder, booleans of four axes",
    "text decoder, floats of four axes",
    "our translator",
    "speech, an output a frame",
    "speech, biases of positions",
    "images in text",
    "our attention, masks",
    "batches without names",
)
OVER = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in _LONG else name for name in CASES],
)

#: A few steps tell as much here as the defaults.
_QUICK: dict[str, dict[str, Any]] = {
    "attattr": {"steps": 2},
    "auto": {"candidates": ("taylor", "obs"), "random_draws": 1},
    "hard_concrete": {"steps": 3, "block": 2},
    "integrated_gradients": {"points": 2},
    "shapley": {"orders": 1, "truncation": 0.0},
    "subset_topk": {"steps": 3, "block": 2},
}
#: ``random`` looks at nothing, ``magnitude`` at weights.
SCORERS: dict[str, Any] = {
    name: replace(scorers.get(name)(), **_QUICK.get(name, {}))
    for name in scorers.names()
    if name not in ("random", "magnitude")
}
SCORERS |= {
    "taylor of tokens": Taylor(reduce="token"),
    "leave_one_out, mean": LeaveOneOut(replacement="mean"),
    _RESAMPLE: LeaveOneOut(replacement="resample", pool=3),
    "attribution_patching, mean": AttributionPatching(base="mean"),
    "surgeon of outputs": Surgeon(curvature="output"),
}


@cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken(CASES[name].build()).double().eval()


def wide(batch: Any) -> Any:
    """The batch in fp64."""
    if isinstance(batch, dict):
        return {k: wide(v) for k, v in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(wide, batch))
    return batch.double() if batch.is_floating_point() else batch


def data(case: Case) -> tuple[list[Any], list[Any]]:
    """Examples one by one, and one padded batch of them; of a blurred model, a padded batch and one
    padded further."""
    alone = case.alone()
    expected = [case.together(alone, case.blurred)] if case.blurred else alone
    return [wide(one) for one in expected], [wide(case.together(alone, 2 * case.blurred))]


def scores(name: str, scorer: Any, batches: list[Any]) -> hp.HeadScores:
    loss = CASES[name].loss
    given = {} if loss is None else {"loss": loss}
    if isinstance(scorer, Auto):
        batches = [*batches, *batches]  # it deals the examples to folds, and needs more of them
    found: hp.HeadScores = hp.score(model_of(name), batches, scorer, progress=False, **given)
    return found


def flat(values: Any) -> Tensor:
    return torch.tensor([value for row in values for value in row], dtype=torch.float64)


def losses(name: str, batches: list[Any]) -> Tensor:
    loss = CASES[name].loss or default_loss
    with torch.no_grad():
        return torch.cat([loss(model_of(name), batch) for batch in batches])


@pytest.mark.parametrize("name", CASES)
def test_the_model_itself_does_not_depend_on_padding(name: str) -> None:
    """Else nothing below would say anything; and blurred models do, which is why they are compared
    otherwise."""
    case = CASES[name]
    expected, together = data(case)
    assert_close(losses(name, together), losses(name, expected), rtol=1e-9, atol=1e-9)
    if case.blurred:
        alone = [wide(one) for one in case.alone()]
        assert float((losses(name, alone) - losses(name, expected)).abs().max()) > 1e-3


@pytest.mark.parametrize("scorer", SCORERS)
@OVER
def test_scores_of_a_padded_batch_are_those_of_its_examples(name: str, scorer: str) -> None:
    case = CASES[name]
    expected, together = data(case)
    if scorer in case.refused:
        for batches in (expected, together):
            with pytest.raises(HeadPruneError, match=case.refused[scorer]):
                scores(name, SCORERS[scorer], batches)
        return
    if scorer in case.drawn:
        seeds = [seed for batch in expected for seed in content_seeds(model_of(name), batch, 0)]
        assert seeds != content_seeds(model_of(name), together[0], 0)
        return
    wanted = scores(name, SCORERS[scorer], expected)
    found = scores(name, SCORERS[scorer], together)
    assert float(flat(wanted.values).abs().max()) > 1e-6
    assert_close(flat(found.values), flat(wanted.values), **CLOSE)
    if not case.blurred and found.standard_errors is not None:
        assert_close(flat(found.standard_errors), flat(wanted.standard_errors), **CLOSE)


def test_every_scorer_and_every_recovery_is_here() -> None:
    found = {scorers.resolve(scorer, Scorer, "scorer")[0] for scorer in SCORERS.values()}
    assert found == set(scorers.names()) - {"random", "magnitude"}
    assert set(RECOVERIES) == set(recoveries.names())


# ---------------------------------------------------------------- recoveries

RECOVERIES: dict[str, Any] = {
    "finetune": Finetune(steps=1, learning_rate=1e-2, distill=1.0, distill_hidden=1.0),
    "head_rescale": "head_rescale",
    "lstsq": Lstsq(feed_forward=True),
    "mean_fold": "mean_fold",
}


def recovered(name: str, method: Any, batches: list[Any]) -> Tensor:
    """All weights of the model without the first head of every site, refitted; as they are without
    batches."""
    model, case = copy.deepcopy(model_of(name)), CASES[name]
    sites = hp.find_sites(model)
    keep = {site.name: [h for unit in site.units[1:] or site.units for h in unit] for site in sites}
    hp.prune_(model, hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites}))
    given = {} if case.loss is None else {"loss": case.loss}
    if batches:
        hp.recover_(model, batches, method, teacher=model_of(name), progress=False, **given)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("method", sorted(set(recoveries.names()) - {"finetune"}))
@OVER
def test_refits_on_a_padded_batch_are_those_on_its_examples(name: str, method: str) -> None:
    expected, together = data(CASES[name])
    wanted, found = (
        recovered(name, RECOVERIES[method], batches) for batches in (expected, together)
    )
    one = recovered(name, RECOVERIES[method], [wide(CASES[name].alone()[0])])
    assert float((wanted - one).abs().max()) > 1e-6
    assert_close(found, wanted, rtol=1e-7, atol=1e-7)


#: Trained in every run of the tests; the others with the long ones, for a Trainer takes its time.
_TRAINED = ("text decoder", "speech", "torch.nn encoder")


@pytest.mark.parametrize(
    "name",
    [name if name in _TRAINED else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_training_does_not_depend_on_more_padding(name: str) -> None:
    """The task, the teacher's logits and its hidden states, in a step over the whole batch."""
    case = CASES[name]
    more = max(2, case.blurred)
    batches = [[wide(case.together(case.alone(), n * more))] for n in (1, 2)]
    no_logits = "ggn" in case.refused
    method = replace(RECOVERIES["finetune"], distill=0.0) if no_logits else RECOVERIES["finetune"]
    wanted, found = (recovered(name, method, part) for part in batches)
    assert float((wanted - recovered(name, None, [])).abs().max()) > 1e-3
    assert_close(found, wanted, rtol=1e-7, atol=1e-7)


# ---------------------------------------------------------------- families, masks and towers


@pytest.mark.parametrize(
    "family", ["Data2VecAudio", "Hubert", "SEW", "SEWD", "UniSpeech", "UniSpeechSat", "WavLM"]
)
def test_every_family_of_speech(family: str) -> None:
    """Frames that are no padding are counted, also where layers run on half of them (SEW)."""
    torch.manual_seed(0)
    model = shaken(speech(family)()).double().eval()
    blurred = 40 if family.startswith("SEW") else 0  # it pools frames before it hides any
    alone = waves()
    batches = [
        [wide(one) for one in alone],
        [wide(sound(alone, blurred))],
        [wide(sound(alone, 2 * blurred))],
    ]
    pair = batches[1:] if blurred else batches[:2]
    with torch.no_grad():
        apart = [torch.cat([default_loss(model, batch) for batch in part]) for part in pair]
    assert_close(apart[1], apart[0], rtol=1e-9, atol=1e-9)
    found = [
        hp.score(model, part, ["activation_norm", "obs", "fluctuation"], progress=False)
        for part in pair
    ]
    for a, b in zip(*found, strict=True):
        assert_close(flat(b.values), flat(a.values), **CLOSE)


def test_keys_that_masks_hide() -> None:
    here = torch.tensor([[1, 1, 0], [1, 0, 0]])
    seen = here.bool()
    pairs = seen[:, None, None].expand(2, 1, 3, 3)
    causal = pairs & torch.ones(3, 3, dtype=torch.bool).tril()
    added = torch.zeros(2, 1, 3, 3).masked_fill(~causal, -1e4)
    for mask in (
        here,
        here.double(),
        pairs,
        pairs[:, :, :1],
        pairs[:, 0],
        pairs.long(),
        causal,
        added,
    ):
        found = unmasked(mask)
        assert found is not None
        assert found.tolist() == seen.tolist()
    for nothing in (None, "mask", torch.ones(3), torch.ones(1, 1, 1, 1, 1)):
        assert unmasked(nothing) is None
    for all_ones in (torch.ones(1, 1, 3, 3, dtype=torch.bool), torch.zeros(1, 1, 3, 3)):
        found = token_mask({"attention_mask": all_ones}, (2, 3))  # one for all examples
        assert found is not None
        assert found.tolist() == [[True] * 3] * 2
    # No query sees itself: keys that no other one sees either are hidden by that, and are tokens
    # all the same.
    assert visible(torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(-1)).tolist() == [[True] * 3]


def read(model: nn.Module, batch: Any) -> dict[str, Any]:
    """By site, which tokens count."""
    bound, found = bind(model), {}

    def take(site: int, x: Tensor, counted: Tensor | None) -> None:
        found[bound[site].site.name] = None if counted is None else counted.int().tolist()

    with torch.no_grad(), reading(model, bound, take) as begin:
        begin(batch)
        call(model, batch)
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_mask_of_a_text_is_not_that_of_its_image(implementation: str) -> None:
    case, model = CASES["both towers"], model_of("both towers")
    model.set_attn_implementation(implementation)  # type: ignore[operator]
    (batch,) = data(case)[1]
    assert batch["attention_mask"].shape[1] == 5  # tokens, as many as the image has
    found = read(model, batch)
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    assert {name.split("_")[0]: kept for name, kept in found.items()} == {
        "text": batch["attention_mask"].tolist(),
        "vision": None,
    }


def test_a_mask_that_reaches_no_attention_still_counts() -> None:
    """A model of one's own may use it in its loss alone: there is no other part that it could be
    for."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(hp.MultiHeadAttention(8, 2) for _ in range(2))

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, causal=True)
            return (x * attention_mask[..., None]).sum(1)

    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    found = read(Own(), {"x": torch.randn(2, 3, 8), "attention_mask": mask})
    assert found == {"layers.0": mask.tolist(), "layers.1": mask.tolist()}


def test_what_attention_hides_is_forgotten_with_the_pass() -> None:
    """No hook and no mode remains, also after an error inside of attention."""
    model = model_of("our attention, lengths")
    before = picture(model)
    with pytest.raises(InvalidValue, match="valid_lens"):
        read(model, (torch.randn(1, 3, 8, dtype=torch.float64), torch.tensor([5])))
    assert picture(model) == before
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_layer_without_heads_is_told_by_the_teachers(kind: str) -> None:
    """Its own attention hides nothing any more."""
    for name in ("our attention, lengths", "speech"):
        case = CASES[name]
        weights = []
        for batches in data(case):
            model, teacher = (copy.deepcopy(model_of(name)) for _ in range(2))
            if name == "speech":
                for one in (model, teacher):
                    one.set_attn_implementation(kind)  # type: ignore[operator]
            sites = hp.find_sites(model)
            keep: dict[str, list[int]] = {sites[0].name: []}
            hp.prune_(
                model,
                hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites}),
            )
            given = {} if case.loss is None else {"loss": case.loss}
            hp.recover_(model, batches, "lstsq", teacher=teacher, progress=False, **given)
            weights.append(
                torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            )
        assert_close(weights[1], weights[0], rtol=1e-7, atol=1e-7)


def test_a_decoders_attention_to_itself_tells_the_queries_of_that_to_the_encoder() -> None:
    (batch,) = data(CASES["torch.nn decoder"])[1]
    found = read(model_of("torch.nn decoder"), batch)
    assert len(found) == 4
    assert set(map(str, found.values())) == {str((~batch["away"]).int().tolist())}


def test_the_mean_of_all_heads_maps_is_no_map_of_a_head() -> None:
    with pytest.raises(UnsupportedModel, match="an attention that computes its map"):
        scores(
            "speech, biases of positions", "entropy", data(CASES["speech, biases of positions"])[0]
        )
