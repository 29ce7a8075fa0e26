"""Neurons where a feed-forward is used in a less common way: adapters, images, ties, activations."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    SamVisionConfig,
    SamVisionModel,
)

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel

WIDTH = 24


def made(kind, config, **sizes):
    torch.manual_seed(0)
    return kind(config(**sizes, initializer_range=0.3)).eval()


def opt():
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": WIDTH}
    sizes |= {"num_attention_heads": 4, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
    return made(OPTForCausalLM, OPTConfig, **sizes, init_std=0.3)


def gpt2():
    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
    return made(GPT2LMHeadModel, GPT2Config, **sizes, bos_token_id=1, eos_token_id=2)


def llama():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": WIDTH}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    return made(LlamaForCausalLM, LlamaConfig, **sizes)


def ids():
    tokens = torch.randint(3, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens}


def feed_forwards(model):
    return [s for s in hp.find_sites(model, feed_forward=True) if s.is_feed_forward]


def keeping(model, kept):
    """A mask of the feed-forwards, in order; the others and all heads are kept."""
    sites = hp.find_sites(model, feed_forward=True)
    keep = {site.name: list(site.heads) for site in sites}
    for site, heads in zip(feed_forwards(model), kept, strict=False):
        keep[site.name] = list(heads)
    return hp.HeadMask.from_keep(keep, {site.name: site.n_query_heads for site in sites})


@pytest.mark.parametrize("method", ["lstsq", "mean_fold", "head_rescale"])
def test_without_neurons_tokens_that_lie_one_after_another_are_still_told_apart(method):
    whole, batch = opt(), ids()
    model = copy.deepcopy(whole)
    hp.prune_(model, keeping(model, [[]]), example=batch)
    report = hp.recover_(model, [batch], method, teacher=whole, progress=False)
    assert report.metrics["error_after"] < report.metrics["error_before"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_conv1d_with_an_adapter_runs_without_neurons():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["c_proj"], fan_in_fan_out=True, init_lora_weights=False
    )
    model, batch = peft.get_peft_model(gpt2(), config).eval(), ids()
    mask = keeping(model, [[]])
    with torch.no_grad():
        with hp.gated(model, mask):
            expected = model(**batch).logits
        hp.prune_(model, mask, example=batch)
        assert_close(model(**batch).logits, expected)


@pytest.mark.parametrize(
    "activation", [nn.Softmax(-1), nn.LayerNorm(WIDTH, elementwise_affine=False)]
)
def test_a_librarys_activation_over_neurons_is_refused(activation):
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": WIDTH}
    model = made(BertModel, BertConfig, **sizes, num_hidden_layers=2, num_attention_heads=4)
    calls = []
    for layer in model.encoder.layer:
        parts = nn.Sequential(nn.Dropout(0.9), activation).train()
        parts[0].register_forward_hook(lambda *_: calls.append(1))
        layer.intermediate.intermediate_act_fn = parts
    words = r"encoder\.layer\.0 .*activation treats every neuron by itself"
    with pytest.raises(UnsupportedModel, match=words):
        hp.find_sites(model, feed_forward=True)
    assert len(hp.find_sites(model)) == 2, "heads are taken"
    model.encoder.layer[1].intermediate.intermediate_act_fn[1] = nn.GELU()
    assert [site.name for site in feed_forwards(model)] == ["encoder.layer.1"]
    assert not calls, "a user's hooks do not run"


def test_what_is_no_mixing_activation_is_no_reason_to_refuse():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": WIDTH}
    model = made(BertModel, BertConfig, **sizes, num_hidden_layers=1, num_attention_heads=4)
    layer = model.encoder.layer[0]
    for part in (
        nn.SiLU(inplace=True),
        nn.Sequential(nn.GELU(), nn.Dropout(0.5)).train(),
        nn.AvgPool1d(3),  # reads no neurons: it does not run on a row of them
        nn.Flatten(),
        nn.GLU(-1),
    ):
        layer.beside = part
        assert len(feed_forwards(model)) == 1, part
    for part in (nn.Sequential(nn.Dropout(0.5), nn.Softmax(-1)), Doubled()):
        layer.beside = part
        with pytest.raises(UnsupportedModel, match="treats every neuron by itself"):
            hp.find_sites(model, feed_forward=True)


class Doubled(nn.Module):
    """An activation with a part, whose own code mixes neurons."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x - x.mean(-1, keepdim=True))


class Named(nn.Module):
    """A feed-forward that gives its projection the input by name."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8), nn.GELU()

    def forward(self, x):
        return self.fc2(input=self.act(self.fc1(x)))


def test_a_projection_whose_input_is_given_by_name_is_named():
    model, x = nn.Sequential(hp.MultiHeadAttention(8, 2), Named()).eval(), torch.randn(2, 3, 8)
    sites = hp.find_sites(model, feed_forward=True)
    words = (
        r"gives the output projection its input first, as in down\(hidden\), got an input by name"
    )
    with pytest.raises(UnsupportedModel, match=words):
        hp.prune_(model, keeping(model, [range(8)]), example=x, sites=sites)
    with pytest.raises(UnsupportedModel, match=words):
        hp.score(model, [x], "fluctuation", sites=sites, progress=False)


def test_gates_of_examples_where_the_tokens_are_an_image():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"mlp_dim": WIDTH, "image_size": 32, "patch_size": 8, "output_channels": 8}
    sizes |= {"window_size": 2, "global_attn_indexes": [0], "num_pos_feats": 8}
    model = made(SamVisionModel, SamVisionConfig, **sizes)
    (site,) = feed_forwards(model)
    images = torch.randn(2, 3, 32, 32)
    gates = torch.rand(2, WIDTH)
    # By position, too: [examples, height * width, neurons].
    by_position = torch.rand(2, 16, WIDTH)
    with torch.no_grad():
        for given in (gates, by_position):
            with hp.gated(model, {site.name: given}):
                both = model(images).last_hidden_state
            for i in range(2):
                with hp.gated(model, {site.name: given[i : i + 1]}):
                    alone = model(images[i : i + 1]).last_hidden_state
                assert_close(both[i : i + 1], alone)
        with (
            pytest.raises(InvalidValue, match="gates: must be for the 2 x 4 x 4 rows"),
            hp.gated(model, {site.name: torch.rand(2, 5, WIDTH)}),
        ):
            model(images)


def test_uncut_heads_of_encoder_and_decoder_may_differ_in_transformers_format(tmp_path):
    sizes = {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "pad_token_id": 0}
    sizes |= {"encoder_ffn_dim": WIDTH, "decoder_ffn_dim": WIDTH, "max_position_embeddings": 32}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "init_std": 0.3}
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**sizes)).eval()
    batch = {**ids(), "decoder_input_ids": ids()["input_ids"][:, :5]}
    hp.prune_(model, keeping(model, [range(12)] * 2), example=batch)
    hp.save_pretrained(model, tmp_path, format="transformers", example=batch)
    again = BartForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert (again.config.encoder_ffn_dim, again.config.decoder_ffn_dim) == (12, 12)
    with torch.no_grad():
        assert_close(again(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_layers_that_share_parameters_are_both_named():
    model = llama()
    first, second = (layer.mlp for layer in model.model.layers)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(second, name).weight = getattr(first, name).weight
    words = r"layers\.1\.mlp\.gate_proj\.weight: must be cut as model\.layers\.0\.mlp\.gate_proj is"
    with pytest.raises(UnsupportedModel, match=words):
        hp.prune_(model, keeping(model, [range(8), range(12)]), example=ids())
    hp.prune_(model, keeping(model, [range(8), range(8)]), example=ids())


def test_more_neurons_than_any_model_has_heads():
    sizes = {"vocab_size": 9, "hidden_size": 4, "intermediate_size": 73_728}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    model = made(LlamaForCausalLM, LlamaConfig, **sizes)
    hp.prune_(model, keeping(model, [range(70_000)]))
    (site,) = feed_forwards(model)
    assert (len(site.heads), site.n_query_heads) == (70_000, 73_728)
