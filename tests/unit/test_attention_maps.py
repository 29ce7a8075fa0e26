"""hp.attention_maps: the weights that the model used, without padding; stored, and said in words
where they hold."""

import copy
import json
import math

import numpy as np
import pytest
import torch

import headprune as hp
from headprune.core.arrays import packed
from headprune.core.errors import (
    CheckpointError,
    HeadPruneError,
    InvalidValue,
    UnknownName,
    UnsupportedModel,
)
from headprune.core.heads import HeadId
from headprune.maps import attention_maps
from headprune.maps.attention_maps import AttentionMaps
from tests.laws.support import mask_of


class Words:
    def convert_ids_to_tokens(self, ids):
        return ["," if i == 7 else f"w{i}" for i in ids]


@pytest.fixture(scope="module")
def bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16}
    config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    return BertModel(config).eval()


def padded():
    ids = torch.tensor([[3, 7, 5, 6, 9], [4, 8, 2, 0, 0]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_the_weights_are_those_of_the_model_which_stays_as_it_was(bert):
    implementation = bert.config._attn_implementation
    maps = hp.attention_maps(bert, padded(), tokenizer=Words())
    assert bert.config._attn_implementation == implementation == "sdpa"
    assert not bert.encoder.layer[0].attention._forward_hooks
    eager = copy.deepcopy(bert)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        expected = eager(**padded(), output_attentions=True).attentions
    for site, weights in zip(maps.sites, expected, strict=True):
        for i, n in enumerate((5, 3)):
            shown = maps.shown(HeadId(site.site, 2), i)
            np.testing.assert_allclose(shown, weights[i, 2, :n, :n].numpy(), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(shown.sum(1), 1, rtol=1e-5)
        assert not site.weights[1, :, 3:].any()
    assert maps.tokens == (("w3", ",", "w5", "w6", "w9"), ("w4", "w8", "w2"))
    assert maps.labels(maps.sites[0].site, 1) == (maps.tokens[1], maps.tokens[1])
    assert len(list(maps)) == 8


def test_a_cut_model_shows_its_heads_by_their_original_numbers(bert):
    small = copy.deepcopy(bert)
    first, second = (site.name for site in hp.find_sites(small))
    hp.prune_(small, hp.HeadMask.from_keep({first: [1, 3], second: []}, {first: 4, second: 4}))
    maps = hp.attention_maps(small, padded())
    assert list(maps) == [HeadId(first, 1), HeadId(first, 3)]
    whole = hp.attention_maps(bert, padded())
    head = HeadId(first, 3)
    np.testing.assert_allclose(maps[head], whole[head], rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidValue, match="one of its heads"):
        maps[HeadId(first, 0)]
    with pytest.raises(UnknownName, match="a site that has maps"):
        maps.of(second)
    assert maps.labels(first, 0)[0] == ("0", "1", "2", "3", "4")


def test_a_translator_has_words_of_both_languages():
    from headprune.attention.transformer import TransformerConfig, TransformerForTranslation

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "d_model": 16, "ffn_dim": 16, "num_attention_heads": 2}
    config = TransformerConfig(**sizes, encoder_layers=1, decoder_layers=1)
    model = TransformerForTranslation(config).eval()
    labels = torch.tensor([[11, 12, 13], [14, 15, -100]])
    maps = hp.attention_maps(model, {**padded(), "labels": labels}, tokenizer=Words())
    by_kind = {site.kind: site.site for site in maps.sites}
    start = f"w{config.decoder_start_token_id}"
    assert maps.targets == ((start, "w11", "w12"), (start, "w14"))
    assert maps.labels(by_kind["cross"], 1) == (maps.targets[1], maps.tokens[1])
    assert maps.labels(by_kind["causal"], 0) == (maps.targets[0], maps.targets[0])
    assert maps.labels(by_kind["self"], 0) == (maps.tokens[0], maps.tokens[0])
    assert maps.shown(HeadId(by_kind["cross"], 0), 1).shape == (2, 3)
    in_front = {**padded(), "labels": torch.tensor([[11, 12, 13], [-100, 14, 15]])}
    assert hp.attention_maps(model, in_front, tokenizer=Words()).targets[1][-1] == "w14"


def test_what_shows_no_map_is_refused(bert):
    model = copy.deepcopy(bert)
    sites = hp.find_sites(model)
    hp.prune_(model, mask_of(sites, {site.name: () for site in sites}))
    with pytest.raises(UnsupportedModel, match="one with a head, got no head at any site"):
        hp.attention_maps(model, padded())
    with pytest.raises((UnsupportedModel, InvalidValue)):
        hp.attention_maps(torch.nn.Linear(4, 4), torch.randn(2, 4))
    own = torch.nn.Sequential(hp.MultiHeadAttention(8, 2))
    with pytest.raises(InvalidValue, match="left out where the batch has no input_ids"):
        hp.attention_maps(own, torch.randn(2, 3, 8), tokenizer=Words())


# ---------------------------------------------------------------- files


def test_they_are_stored_and_damage_is_seen(bert, tmp_path):
    maps = hp.attention_maps(bert, padded(), tokenizer=Words(), image=(1, 2))
    path = maps.save(tmp_path / "maps.safetensors")
    again = AttentionMaps.load(path)
    assert (again.tokens, again.targets, again.image) == (maps.tokens, (), (1, 2))
    for a, b in zip(again.sites, maps.sites, strict=True):
        assert (a.site, a.kind, a.heads) == (b.site, b.kind, b.heads)
        for name in ("weights", "queries", "keys"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    whole = path.read_bytes()
    for damaged, words in (
        (whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:], "a damaged one"),
        (whole.replace(b"w3", b"w4"), "a damaged one"),
        (b"{}", "a file of attention maps"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=words):
            AttentionMaps.load(path)
    with pytest.raises(CheckpointError, match="a file of attention maps"):
        AttentionMaps.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("arrays", "facts", "words"),
    [
        ({"0.weights": np.ones((1, 1, 2, 2))}, {}, "numbers of type BOOL, F64"),
        ({}, {"sites": [["x", "upwards", [0]]]}, "has a name, kind or heads of a wrong type"),
        ({}, {"sites": [["x", "self", [0, 1]]]}, r"x has 2 heads and weights \[1, 1, 2, 2\]"),
        ({}, {"sites": [["x", "self", [0]], ["y", "self", [0]]]}, "KeyError: '1.weights'"),
        ({}, {"image": [math.inf, 1]}, "OverflowError"),
        ({}, {"tokens": [["a", "b"], ["c"]]}, "AttentionMaps"),
    ],
)
def test_a_file_whose_words_do_not_fit_its_numbers(tmp_path, arrays, facts, words):
    masks = {f"0.{name}": np.ones((1, 2), bool) for name in ("queries", "keys")}
    found = {"0.weights": np.full((1, 1, 2, 2), 0.5, np.float32), **masks, **arrays}
    whole = {"sites": [["x", "self", [0]]], "tokens": [], "targets": [], "image": None}
    text, path = json.dumps({**whole, **facts}), tmp_path / "maps.safetensors"
    digest = attention_maps._digest(found, text)
    marks = {"headprune": attention_maps._MARK, "facts": text, "sha256": digest}
    path.write_bytes(packed(found, marks))
    with pytest.raises(HeadPruneError, match=words):
        AttentionMaps.load(path)
    path.write_bytes(packed(masks, {**marks, "headprune": "x"}))
    with pytest.raises(CheckpointError, match="got a file of something else"):
        AttentionMaps.load(path)


# ---------------------------------------------------------------- tokens


def test_byte_pairs_are_shown_as_text(bert):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    how = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=letters, show_progress=False
    )
    pairs.train_from_iterator(["fünf und fünf und"] * 9, how)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs)
    ids = torch.tensor([[0, *tokenizer("fünf und\nö")["input_ids"]]])
    words = tokenizer.convert_ids_to_tokens(ids[0])
    assert words == ["<s>", "fÃ¼nf", "Ġund", "Ċ", "Ã", "¶"]
    # The model's vocabulary is smaller than the tokenizer's.
    tokenizer.convert_ids_to_tokens = lambda ids: words
    maps = hp.attention_maps(bert, {"input_ids": ids % 20}, tokenizer=tokenizer)
    assert maps.tokens == (("<s>", "fünf", "▁und", "↵", "Ã", "¶"),)
