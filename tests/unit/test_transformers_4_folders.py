"""Folders of Transformers 4 with ``pruned_heads``: opened with the heads that they have, or
refused."""

import json

import pytest
import torch
import transformers
from torch.testing import assert_close

import headprune as hp
from headprune.checkpoints.transformers_4 import pruned_heads
from headprune.core.errors import CheckpointError, InvalidValue
from headprune.data.models import open_model
from headprune.model.saves import RECORD, WEIGHTS_FILE
from tests import tiny_models

BERT = {**tiny_models.SIZES, "num_hidden_layers": 3, "intermediate_size": 24}
SIZES = {
    "Bert": BERT,
    "DistilBert": {"dim": 16, "n_layers": 3, "n_heads": 4, "hidden_dim": 24},
    "GPT2": {"n_embd": 16, "n_layer": 3, "n_head": 4},
}
HEADS = {0: [1, 2], 2: [0, 1, 3]}


def folder_of(family, place, said=None):
    """A folder as Transformers 4 left it: cut weights, sizes of the whole model, and the heads that
    were cut."""
    kind = getattr(transformers, f"{family}ForSequenceClassification")
    model = kind(kind.config_class(**SIZES[family], vocab_size=40, pad_token_id=0)).eval()
    hp.prune_heads_(model, HEADS)
    model.save_pretrained(place)
    written = json.loads((place / "config.json").read_text())
    for key in (RECORD, WEIGHTS_FILE):  # Transformers 4 wrote neither
        written.pop(key, None)
    written["pruned_heads"] = {str(k): v for k, v in HEADS.items()} if said is None else said
    (place / "config.json").write_text(json.dumps(written))
    return model, place


@pytest.mark.parametrize("family", SIZES)
def test_opened_with_the_heads_that_it_has(family, tmp_path):
    model, folder = folder_of(family, tmp_path)
    ids = torch.randint(1, 40, (2, 6))
    for opened in (hp.from_pretrained(folder), open_model(str(folder))):
        assert type(opened) is type(model)
        assert not opened.training
        assert [site.heads for site in hp.find_sites(opened)] == [(0, 3), (0, 1, 2, 3), (2,)]
        with torch.no_grad():
            assert_close(opened(ids).logits, model(ids).logits, rtol=0, atol=0)
    hp.save_pretrained(opened, tmp_path / "again")
    assert [site.heads for site in hp.find_sites(hp.from_pretrained(tmp_path / "again"))][2] == (2,)


def test_weights_in_a_pickle_of_torch(tmp_path):
    model, folder = folder_of("Bert", tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    ids = torch.randint(1, 40, (2, 6))
    with torch.no_grad():
        assert_close(hp.from_pretrained(folder)(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"0": [1]}, "all weights of a BertForSequenceClassification without heads .*missing or"),
        ({"3": [1]}, "must be of the 3 layers of the model, got layer 3"),
        ({"0": [4]}, r"must be heads of layer 0, \[0, 1, 2, 3\], got 4"),
        ([1, 2], "must be lists of removed heads by layer, as Transformers 4 wrote them"),
        ({"a": [1]}, "must be lists of removed heads by layer"),
    ],
)
def test_what_does_not_fit_is_refused(said, words, tmp_path):
    _, folder = folder_of("Bert", tmp_path, said)
    with pytest.raises(CheckpointError, match=words):
        hp.from_pretrained(folder)


@pytest.mark.parametrize("name", ["plan", "sites"])
def test_arguments_that_say_what_the_folder_says_are_refused(name, tmp_path):
    model, folder = folder_of("Bert", tmp_path)
    sites = hp.find_sites(model)
    given = sites if name == "sites" else hp.HeadMask.from_keep({}, {s.name: 4 for s in sites})
    with pytest.raises(
        InvalidValue, match="left out, because the configuration's pruned_heads say"
    ):
        hp.from_pretrained(folder, **{name: given})


@pytest.mark.parametrize("text", ["{}", '{"pruned_heads": null}', "[1]", "no json"])
def test_a_folder_without_cut_heads_is_opened_as_any_other(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert pruned_heads(tmp_path) == {}
    with pytest.raises(CheckpointError, match=r"no headprune\.json in it"):
        hp.from_pretrained(tmp_path)
