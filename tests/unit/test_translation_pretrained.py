"""Translation by an encoder-decoder as the hub has them: its own tokenizer, a prefix, and nested
columns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import headprune as hp
from headprune.recipes.validate import RecipeError, check_recipe
from headprune.run import prepared, run_recipe
from tests.tiny_models import WORDS, encoder_decoder


def recipe(folder: Path, **changes: Any) -> Any:
    columns = {"text": "translation.en", "target": "translation.xx", "prefix": "w0 w1 : "}
    return check_recipe(
        {
            "name": "tiny",
            "description": "for tests",
            "task": "translation",
            "device": "cpu",
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder), **columns, "holdout": 10, "test_holdout": 10},
            "decode": {"max_length": 12},
            "score": {"random_draws": 0},
            "select": {"keep_heads": 0.5},
            "report": False,
            **changes,
        }
    )


@pytest.mark.parametrize("family", ["T5", "Marian"])
def test_an_encoder_decoder_from_a_folder_is_cut_with_its_own_tokenizer(
    family: str, tmp_path: Path
) -> None:
    encoder_decoder(tmp_path / "model", family)
    draw = random.Random(0)
    texts = [draw.choices(WORDS, k=draw.randint(2, 8)) for _ in range(40)]
    pairs = [{"en": " ".join(words), "xx": " ".join(reversed(words))} for words in texts]
    lines = [json.dumps({"translation": pair}) for pair in pairs]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    chosen = recipe(tmp_path)
    subject = prepared(chosen, say=lambda line: None)
    row, tokenizer = subject.data.examples["test"][0], subject.preparation.tokenizer
    said = tokenizer.decode(row["input_ids"], skip_special_tokens=True).split()
    target = subject.data.targets["test"][0].split()
    assert said[:2] == ["w0", "w1"]
    assert said[-len(target) :] == target[::-1]
    start = subject.model.config.decoder_start_token_id
    assert row["decoder_input_ids"] == [start, *row["labels"][:-1]]
    assert tokenizer.decode(row["labels"], skip_special_tokens=True).split() == target

    record = run_recipe(chosen, out=tmp_path / "out", say=lambda line: None)
    assert record.status == "done"
    assert {row.metric for row in record.quality} == {"bleu"}
    kinds = {site.kind for site in hp.find_sites(hp.from_pretrained(tmp_path / "out" / "model"))}
    assert kinds == {"self", "causal", "cross"}


def test_a_prefix_is_for_translations() -> None:
    data = {"path": "rows.jsonl", "text": "text", "prefix": "translate: "}
    with pytest.raises(RecipeError, match=r"data\.prefix: must be left out for text_class"):
        recipe(Path("here"), task="text_classification", data=data, decode={})
