"""The attention pictures of a run: which rows, their words and pictures, and what happens where
there are none."""

from __future__ import annotations

import base64
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.core.heads import HeadId
from headprune.recipes.validate import check_recipe
from headprune.run import pictures as made
from headprune.run.subject import Subject
from tests.small_recipes import checked_recipe, quiet_run, quietly_prepared, write_rows
from tests.tiny_recipe import TINY

TEXT = [
    "the cat sat on the mat",
    "a dog",
    "birds sing, and sing",
    "so be it",
    "the end is near",
    "it is not",
    "yes it is",
]


def subject(task: str, model: Any, data: Any) -> Subject:
    return quietly_prepared(checked_recipe(task, model, data, threads=1))


@pytest.fixture(scope="module")
def digits() -> Subject:
    return subject(TINY["task"], TINY["model"], TINY["data"])


def test_images_are_shown_with_their_patches_and_themselves(digits):
    found = made.draw_attention(digits)
    assert (len(found.examples), found.image, found.whole) == (8, (2, 2), True)
    label, example = digits.data.examples["test"][3]["labels"], found.examples[3]
    assert example.title == f"test row 3, label {label}"
    assert (example.height, example.width) == (8, 8)
    pixels = np.frombuffer(base64.b64decode(example.pixels), np.uint8).reshape(8, 8, 3)
    image = digits.data.examples["test"][3]["pixel_values"][0].numpy()
    scaled = 255 * (image - image.min()) / (image.max() - image.min())
    np.testing.assert_allclose(pixels[..., 0], scaled, atol=0.51)
    assert (pixels[..., 0] == pixels[..., 2]).all()
    batch = digits.data.collate(digits.data.examples["test"][:8])
    maps = hp.attention_maps(digits.model, batch)
    head = HeadId(maps.sites[1].site, 2)
    true = maps.shown(head, 5)
    np.testing.assert_allclose(found.shown(head, 5)[1:], true, atol=true.max() / 255)


def test_text_has_its_tokens_and_short_rows_come_first(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", ({"text": t} for t in TEXT * 3))
    config = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    data = {"path": str(path), "text": "text", "tokenizer": "characters", "test_holdout": 6}
    found = subject("causal_lm", {"class_name": "LlamaForCausalLM", "config": config}, data)
    lengths = [len(example["input_ids"]) for example in found.data.examples["test"]]
    pictures = made.draw_attention(found)
    assert [site.kind for site in pictures.sites] == ["causal"]
    ids = found.data.examples["test"][0]["input_ids"]
    words = found.preparation.tokenizer.convert_ids_to_tokens(ids)
    assert pictures.examples[0].tokens == tuple(words)
    assert [keys for _, keys in pictures.sites[0].sizes] == lengths
    monkeypatch.setattr(made, "_TOKENS", sorted(lengths)[2])
    assert made._choose_rows(found) == [i for i, n in enumerate(lengths) if n <= sorted(lengths)[2]]


def test_a_model_that_shows_no_maps_has_a_run_all_the_same(tmp_path, monkeypatch):
    none = UnsupportedModel("the attention map of a.b", "an attention with a map", "a kernel")
    monkeypatch.setattr(made, "attention_maps", Mock(side_effect=none))
    quick = {**TINY, "score": {"random_draws": 0}, "out": str(tmp_path / "out")}
    record = quiet_run(check_recipe(quick))
    assert record.status == "done"
    assert "no attention pictures: the attention map of a.b" in " ".join(record.warnings)
    assert not (tmp_path / "out" / "attention.json").exists()
    assert 'id="attention"' not in (tmp_path / "out" / "report.html").read_text()
