"""Models with random weights for the checks on a GPU, small but no toys, and padded batches for
them.

Weights and inputs are numbers that bfloat16 and float16 hold exactly, so that one model in fp64 on
the CPU is the truth for every precision on the GPU: what a comparison finds is the error of
computing, not of storing.
"""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

import headprune as hp
from headprune.core.heads import HeadMask
from headprune.model.double import double_
from headprune.model.losses import Loss, default_loss
from headprune.model.running import call, over_tensors
from headprune.model.sites import Sites
from tests.laws.support import logits, ragged

VOCABULARY = 200
#: Examples a batch and tokens an example; every batch pads some of its examples.
N_EXAMPLES, N_TOKENS = 4, 20
#: Spread of random weights at a width of 64: attention is neither flat nor a single key.
SPREAD = 0.1
#: The smallest normal number of float16: weights below it become zero.
SMALLEST = 2.0**-14

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Subject:
    """A model on the CPU in float32, what it takes, and what its scores go by.

    Args:
        name: What it is called here.
        model: In evaluation mode; take ``copy``.
        batches: Two batches on the CPU, the second one shorter.
        sites: Of the model.
        loss: Per-example loss.
    """

    name: str
    model: nn.Module
    batches: list[dict[str, Any]]
    sites: Sites
    loss: Loss

    def copy(self, device="cpu", dtype=torch.float32):
        """A copy of the model to run, cut or train."""
        model = copy.deepcopy(self.model)
        model = double_(model) if dtype == torch.float64 else model.to(dtype)
        return model.to(device)

    def data(self, device="cpu", dtype=torch.float32):
        """The batches, floating-point tensors in a dtype."""
        return [placed(batch, device, dtype) for batch in self.batches]

    def ragged(self, seed=0):
        """Another number of heads in every layer."""
        return ragged(self.sites, seed)

    def mask(self, keep):
        """Sites that are not named keep every head."""
        return HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in self.sites})


def placed(batch, device, dtype):
    """A batch on a device, its floating-point tensors in a dtype."""
    return over_tensors(
        batch, lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device)
    )


class OwnModel(nn.Module):
    """Three layers of our own attention with grouped queries, one of them causal, and a
    classifier."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList(
            hp.MultiHeadAttention(96, 6, n_kv_heads=3, value_dim=12) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(3))
        self.head = nn.Linear(96, 3)

    def forward(self, x, valid_lens=None):
        for number, (attention, norm) in enumerate(zip(self.attention, self.norms, strict=True)):
            x = norm(x + attention(x, valid_lens=valid_lens, causal=number == 1))
        return self.head(x[:, 0])


class TorchModel(nn.Module):
    """PyTorch's own encoder of three layers and a classifier on the first token."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(96, 6, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(96, 3)

    def forward(self, x, padding=None):
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


@torch.no_grad()
def output(model, batch):
    """What a model puts out."""
    return logits(model, batch)


def gated_and_pruned(model, mask, batch, sites=None):
    """What a model puts out with gates, and what it does once it is cut."""
    with hp.gated(model, mask, sites):
        gated = output(model, batch)
    hp.prune_(model, mask, sites=sites)
    return gated, output(model, batch)


def own_loss(model, batch):
    """``[batch]``, for models without labels."""
    found = call(model, batch)
    if found.dtype != torch.float64:
        found = found.float()
    return found.logsumexp(-1).square()


def _encoder():
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 256, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    more = {"num_labels": 3, "initializer_range": SPREAD / 2}
    return _transformers("BertForSequenceClassification", **sizes, **more)


def _decoder():
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": VOCABULARY}
    return _transformers("LlamaForCausalLM", **sizes, initializer_range=SPREAD, **_SPECIAL)


def _vision():
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_channels": 3}
    more = {"num_labels": 3, "initializer_range": SPREAD}
    return _transformers("ViTForImageClassification", **sizes, **more)


def _encoder_decoder():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return _transformers("T5ForConditionalGeneration", vocab_size=VOCABULARY, **sizes, **special)


def _transformers(kind, **settings):
    import transformers

    found = getattr(transformers, kind)
    return found(found.config_class(**settings))


def _lengths(n_tokens):
    """How many tokens of each example are no padding."""
    return torch.linspace(n_tokens, n_tokens // 2, N_EXAMPLES).long()


def _text(n_tokens):
    mask = (torch.arange(n_tokens) < _lengths(n_tokens)[:, None]).long()
    return {"input_ids": torch.randint(3, VOCABULARY, mask.shape) * mask, "attention_mask": mask}


def _labelled_text(n_tokens):
    return {**_text(n_tokens), "labels": torch.randint(0, 3, (N_EXAMPLES,))}


def _images(n_tokens):
    return {
        "pixel_values": torch.randn(N_EXAMPLES, 3, 16, 16),
        "labels": torch.randint(0, 3, (N_EXAMPLES,)),
    }


def _text_to_text(n_tokens):
    return {**_text(n_tokens), "labels": torch.randint(3, VOCABULARY, (N_EXAMPLES, n_tokens // 2))}


def _vectors(n_tokens):
    return {"x": torch.randn(N_EXAMPLES, n_tokens, 96), "valid_lens": _lengths(n_tokens)}


def _padded_vectors(n_tokens):
    padding = torch.arange(n_tokens) >= _lengths(n_tokens)[:, None]
    return {"x": torch.randn(N_EXAMPLES, n_tokens, 96), "padding": padding}


#: Name, model, batch of so many tokens, loss.
_MAKERS = {
    "encoder": (_encoder, _labelled_text, default_loss),
    "decoder": (_decoder, _text, default_loss),
    "vision": (_vision, _images, default_loss),
    "encoder-decoder": (_encoder_decoder, _text_to_text, default_loss),
    "own": (OwnModel, _vectors, own_loss),
    "torch": (TorchModel, _padded_vectors, own_loss),
}
NAMES = tuple(_MAKERS)


@cache
def subject(name):
    """The model of a name and its data: the same ones in every process and on every machine."""
    make_model, make_batch, loss = _MAKERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(name.encode()))
        model = make_model().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Fresh biases are zero and norms one, which would hide mistakes.
                if parameter.ndim == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
                parameter.copy_(exact(parameter))
        batches = [make_batch(n_tokens) for n_tokens in (N_TOKENS, N_TOKENS - 6)]
    batches = [
        over_tensors(batch, lambda t: exact(t) if t.is_floating_point() else t) for batch in batches
    ]
    return Subject(name, model, batches, hp.find_sites(model), loss)


def exact(values):
    """The nearest numbers that bfloat16 and float16 both hold exactly."""
    values = values.bfloat16().float()
    return torch.where(values.abs() < SMALLEST, torch.zeros_like(values), values)
