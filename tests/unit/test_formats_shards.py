"""Checkpoints in several files: they come back bit for bit, and damage is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import CheckpointError
from tests.unit.test_formats import EMPTY, UNIFORM, cut


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


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def rename(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize("damage", ["missing", "flipped", "swapped", "index", "no index", "path"])
def test_a_damaged_shard_is_refused_in_words(sharded: Path, damage: str) -> None:
    first, second, *_ = sorted(sharded.glob("model-*-of-*.safetensors"))
    index, manifest = sharded / "model.safetensors.index.json", sharded / "headprune.json"
    do, words = {
        "missing": (second.unlink, f"{second.name}: must be the model's weights, got no such file"),
        "flipped": (
            lambda: second.write_bytes(second.read_bytes()[:-1] + b"\xff"),
            "other content",
        ),
        "swapped": (
            lambda: swap(first, second),
            "a file with other contents. Copy the folder again",
        ),
        "index": (lambda: rename(index, first.name, second.name), "a file with other contents"),
        "no index": (index.unlink, "the index of the model's weights, got no such file"),
        "path": (lambda: rename(manifest, '"model-0', '"../model-0'), r"folder, got \.\./model-0"),
    }[damage]
    do()
    with pytest.raises(CheckpointError, match=words):
        hp.from_pretrained(sharded)


def test_one_file_takes_the_place_of_shards(sharded: Path) -> None:
    hp.save_pretrained(hp.from_pretrained(sharded), sharded)
    assert not list(sharded.glob("model-*")) + list(sharded.glob("*.index.json"))
    assert [len(s.heads) for s in hp.find_sites(hp.from_pretrained(sharded))] == [0, 2, 1]


@pytest.mark.parametrize("form", ["transformers", "remote-code"])
def test_the_other_formats_come_in_shards_too(form: Any, tmp_path: Path) -> None:
    model, _ = cut("llama", UNIFORM)
    hp.save_pretrained(model, tmp_path, format=form, max_shard_size=4000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    with pytest.raises(CheckpointError, match="must be bytes, or text such as '5GB', got 'big'"):
        hp.save_pretrained(model, tmp_path, format=form, max_shard_size="big")
