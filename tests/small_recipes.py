"""Recipes on rows that a test writes, and runs that say nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import headprune as hp
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import check_recipe
from headprune.run import prepared, run_recipe
from headprune.run.subject import Subject


def checked_recipe(task: str, model: object, data: dict[str, Any], **sections: Any) -> Recipe:
    """A recipe that keeps half of the heads; ``model`` is its section, or a folder."""
    base = {
        "name": "test",
        "description": "for tests",
        "task": task,
        "device": "cpu",
        "model": model if isinstance(model, dict) else {"path": str(model)},
        "data": data,
        "select": {"keep_heads": 0.5},
        "report": False,
    }
    return check_recipe({**base, **sections})


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def llama_with_neurons(
    folder: Path, select: dict[str, Any], rows: Iterable[list[int]], **sections: Any
) -> Recipe:
    """A recipe that cuts heads and neurons of a tiny Llama with 17 tokens."""
    written = write_rows(folder / "rows.jsonl", ({"tokens": tokens} for tokens in rows))
    config = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "max_position_embeddings": 32}
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    model = {"class_name": "LlamaForCausalLM", "config": config}
    data = {"path": str(written), "tokens": "tokens", **sections.pop("data", {})}
    more = {"score": {"scorer": "ladder", "random_draws": 1}, "out": str(folder / "out")}
    select = {"feed_forward": True, **select}
    return checked_recipe("causal_lm", model, data, select=select, **{**more, **sections})


def quiet_run(chosen: Recipe, **options: Any) -> hp.RunRecord:
    return run_recipe(chosen, say=lambda line: None, **options)


def quietly_prepared(chosen: Recipe) -> Subject:
    return prepared(chosen, say=lambda line: None)
