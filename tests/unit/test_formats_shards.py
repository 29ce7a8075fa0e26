"""Checkpoints in several files: they come back bit for bit, and damage is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import CheckpointError
from tests.unit.test_formats import EMPTY, UNIFORM, cut, tiny


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    model, _ = cut("bert", EMPTY)
    return hp.save_pretrained(model, tmp_path / "sharded", max_shard_size="3KB")


def test_shards_come_back_bit_for_bit(sharded: Path) -> None:
    model, batch = cut("bert", EMPTY)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in sharded.glob("model-*-of-*.safetensors"))
    assert set(index["weight_map"].values()) == set(files)
    assert len(files) > 2
    assert not (sharded / "model.safetensors").exists()
    loaded = hp.from_pretrained(sharded)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


@pytest.mark.parametrize("damage", ["missing", "flipped", "swapped", "index", "no index"])
def test_a_damaged_shard_is_refused_in_words(sharded: Path, damage: str) -> None:
    first, second, *_ = sorted(sharded.glob("model-*-of-*.safetensors"))
    index = sharded / "model.safetensors.index.json"
    words = "a file with other contents. Copy the folder again"
    if damage == "missing":
        second.unlink()
        words = f"{second.name}: must be the model's weights, got no such file"
    elif damage == "flipped":
        second.write_bytes(second.read_bytes()[:-1] + b"\xff")
    elif damage == "swapped":
        a, b = first.read_bytes(), second.read_bytes()
        first.write_bytes(b)
        second.write_bytes(a)
    elif damage == "index":
        index.write_text(index.read_text().replace(first.name, second.name))
    else:
        index.unlink()
        words = "the index of the model's weights, got no such file"
    with pytest.raises(CheckpointError, match=words):
        hp.from_pretrained(sharded)


def test_a_manifest_that_names_a_file_elsewhere(sharded: Path) -> None:
    text = (sharded / "headprune.json").read_text()
    (sharded / "headprune.json").write_text(text.replace('"model-00001', '"../model-00001'))
    with pytest.raises(
        CheckpointError, match=r"a manifest of files in its folder, got \.\./model-00001"
    ):
        hp.from_pretrained(sharded)


def test_one_file_takes_the_place_of_shards(sharded: Path) -> None:
    hp.save_pretrained(hp.from_pretrained(sharded), sharded)
    assert not list(sharded.glob("model-*")) + list(sharded.glob("*.index.json"))
    assert [len(s.heads) for s in hp.find_sites(hp.from_pretrained(sharded))] == [0, 2, 1]


def test_a_shard_size_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="max_shard_size: must be bytes, or text such as '5GB', got 'big'"
    ):
        hp.save_pretrained(tiny("bert")[0], tmp_path, max_shard_size="big")


@pytest.mark.parametrize("form", ["transformers", "remote-code"])
def test_the_other_formats_come_in_shards_too(form: Any, tmp_path: Path) -> None:
    hp.save_pretrained(cut("llama", UNIFORM)[0], tmp_path, format=form, max_shard_size=4000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
