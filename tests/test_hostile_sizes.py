"""Absurd sizes in files: refused before a model of them is built, and what models have is
believed."""

import hashlib
import json
import time

import pytest
import torch
import transformers

import headprune as hp
from headprune.checkpoints import foreign
from headprune.checkpoints.foreign import check_config
from headprune.checkpoints.streaming import prune_checkpoint
from headprune.core.errors import CheckpointError, InvalidValue
from headprune.data.models import open_model
from tests.fuzzing import changed
from tests.tiny_models import bert


@pytest.fixture
def folder(tmp_path):
    """The folder of a sound model, for a test to damage."""
    return bert(tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("max_position_embeddings", 2**40),
        ("vocab_size", 2**31),
        ("intermediate_size", 2**25),
    ],
)
def test_a_configuration_of_no_model_is_refused_before_it_is_built(key, value, folder):
    changed(folder / "config.json", **{key: value})
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=key if value > 2**26 else "weights beside it"):
        open_model(str(folder))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("inner_group_num", 60_000_000),
        ("num_labels", 60_000_000),
        ("num_key_value_heads", 100_000),  # "value" is a part of its name
        ("num_layer_repeats", -(10**6)),
        ("warmup_steps", 10**6),  # and so is "eps"
        ("depths", [1024, 1024]),
        ("num_conv_layers", [[300, 300], [500, 0]]),
    ],
)
def test_counts_of_no_model_are_refused(key, value, tmp_path):
    path = tmp_path / "config.json"
    for config in ({key: value}, {"text_config": [{key: value}]}):
        path.write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=f"{key}: must be a number that a model can have"):
            check_config(path)


@pytest.mark.parametrize(
    "text", ["[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900], ids=["lists", "objects"]
)
def test_a_configuration_that_is_nested_deep_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"a": {text}}}')
    with pytest.raises(CheckpointError, match="nested more than 40 deep"):
        check_config(tmp_path / "config.json")


def test_numbers_of_models_are_believed(tmp_path):
    config = {
        "vocab_size": 20_000_000,
        "rope_parameters": {"full": {"rope_theta": 10**9, "factor": 10**6}},
        "eos_token_id": [200_001, 200_007],
        "max_position_embeddings": 10_485_760,
        "label2id": {"layers": 10**6},
        "sampling_rate": 192_000,
        "num_attention_heads_per_layer": [64] * 80,
        "depths": [3, 3, 27, 3],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_config(tmp_path / "config.json")


def test_numbers_that_multiply_are_stopped_while_the_model_is_built(tmp_path, monkeypatch):
    sizes = {"vocab_size": 17, "embedding_size": 8, "hidden_size": 8}
    config = transformers.AlbertConfig(num_attention_heads=2, intermediate_size=8, **sizes)
    model = transformers.AlbertModel(config)
    hub, ours = tmp_path / "hub", hp.save_pretrained(model, tmp_path / "ours")
    model.save_pretrained(hub)
    monkeypatch.setattr(foreign, "_MODULES", 1000)
    open_model(str(hub))  # sound so far
    hp.from_pretrained(ours)
    for place in (hub, ours):
        changed(place / "config.json", num_hidden_groups=50, inner_group_num=50)
    digest = hashlib.sha256((ours / "config.json").read_bytes()).hexdigest()
    changed(ours / "headprune.json", config_sha256=digest)
    for read in (
        lambda: open_model(str(hub)),
        lambda: hp.from_pretrained(ours),
        lambda: prune_checkpoint(hub, hp.HeadMask(()), tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match="a model of at most 1,000 modules"):
            read()
    # Nothing is counted afterwards.
    torch.nn.ModuleList(torch.nn.Identity() for _ in range(1001))


def test_a_configuration_that_is_too_long_is_not_read_whole(folder, monkeypatch):
    monkeypatch.setattr(foreign, "_LONGEST", 10_000)
    open_model(str(folder))  # sound so far
    with open(folder / "config.json", "a") as file:
        file.write(" " * 10_000)
    with pytest.raises(CheckpointError, match="in a file of at most 10,000 bytes, got one of"):
        open_model(str(folder))


def test_weights_that_are_not_there_are_not_made_up(folder):
    # All sizes are the defaults: those of BERT base.
    config = {"model_type": "bert", "architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="weights beside it"):
        open_model(str(folder))


def test_a_mask_of_a_billion_heads_is_refused():
    text = hp.HeadMask.from_keep({}, {"a": 4}).to_json()
    with pytest.raises(InvalidValue, match="of 0 to 262,144 heads"):
        hp.HeadMask.from_json(text.replace('"n_heads": 4', f'"n_heads": {10**9}'))
