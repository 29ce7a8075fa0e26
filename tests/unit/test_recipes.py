"""Law 8: every recipe found by rglob validates and runs a smoke step, on data and models made here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import headprune as hp
from headprune.run import load_recipe, run_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
WORDS = [f"w{i}" for i in range(30)]


def _encoder(folder: Path, labels: int) -> list[str]:
    """A tiny BERT with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=24,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=16,
        max_position_embeddings=64,
        num_labels=labels,
    )
    BertForSequenceClassification(config).save_pretrained(folder / "model")
    return [f"model.path={folder / 'model'}", f"data.path={folder}", "train.epochs=1", "bench.lengths=[8]"]


def _questions(folder: Path) -> list[str]:
    """Questions whose class is their first word."""
    draw = random.Random(0)
    for split, count in (("train", 90), ("test", 20)):
        rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(2, 9))), "label": i % 6} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [*_encoder(folder, 2), "data.holdout=20"]


def _pairs(folder: Path) -> list[str]:
    """Pairs of sentences, whose grade is their share of common words."""
    draw = random.Random(0)
    for split, count in (("train", 90), ("validation", 20), ("test", 20)):
        sentences = [[draw.choices(WORDS, k=draw.randint(2, 9)) for _ in range(2)] for _ in range(count)]
        rows = [
            {"sentence1": " ".join(a), "sentence2": " ".join(b), "score": len({*a} & {*b}) / len({*a, *b})}
            for a, b in sentences
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return _encoder(folder, 1)


def _stories(folder: Path) -> list[str]:
    """A tiny Llama with grouped queries, and token numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    draw = random.Random(0)
    rows = [{"input_ids": [1, *draw.choices(range(3, 40), k=draw.randint(6, 30))]} for _ in range(40)]
    (folder / "stories.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"model.path={folder}", "data.holdout=8", "data.test_holdout=10", "bench.lengths=[8]"]


def _digits(folder: Path) -> list[str]:
    return ["train.epochs=1", "data.test_holdout=1400", "data.holdout=100"]


def _sentences(folder: Path) -> list[str]:
    """Sentences of a language whose translation says every word in capitals, and a Transformer of two small layers."""
    draw = random.Random(0)
    for split, count in (("train", 60), ("validation", 12), ("test", 12)):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(count)]
        rows = [{"en": text, "de": text.upper()} for text in texts]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    layers = ["model.config.encoder_layers=1", "model.config.decoder_layers=1", "model.config.d_model=32"]
    data = [f"data.path={folder}", "data.vocabulary=300", "decode.max_length=8"]
    return [*layers, *data, "train.epochs=1", "bench.lengths=[8]"]


def _plays(folder: Path) -> list[str]:
    """A text of words, for a language model of letters."""
    draw = random.Random(0)
    (folder / "text.txt").write_text("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(60)))
    data = [f"data.path={folder / 'text.txt'}", "data.block=32", "data.revision=null"]
    return [*data, "model.config.hidden_size=32", "train.epochs=1", "bench.lengths=[8]"]


FIXTURES: dict[str, Callable[[Path], list[str]]] = {
    "char-gpt": _plays,
    "digits-vit": _digits,
    "llama-stories": _stories,
    "sst2-minilm": _questions,
    "stsb-minilm": _pairs,
    "translation": _sentences,
    "trec-minilm": _questions,
}
QUICK = ["data.calibration=24", "score.random_draws=2", "bench.batch_sizes=[2]", "bench.seconds=0.01", "device=cpu"]


def test_every_recipe_has_a_smoke_test_and_is_shipped() -> None:
    assert [p.stem for p in RECIPES] == sorted(FIXTURES)
    assert len(RECIPES) == 7
    assert list(shipped_recipes()) == sorted(FIXTURES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_is_valid_short_and_at_home(path: Path) -> None:
    recipe = load_recipe(path)
    text = path.read_text()
    assert recipe.name == path.stem
    assert recipe.device == "auto"
    assert len(text.splitlines()) <= 45
    assert ".." not in text
    for value in (recipe.model.path, recipe.data.path):
        assert value is None or not value.startswith(("/", "~", "."))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_runs_a_smoke_step(path: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "given").mkdir()
    settings = [*FIXTURES[path.stem](tmp_path / "given"), *QUICK]
    recipe = yaml.safe_load(path.read_text())
    ways = [step["method"] for step in recipe["recover"]]
    short = [f"recover.{i}.settings={{steps: 1}}" for i, way in enumerate(ways) if way == "finetune"]
    out = tmp_path / "out"
    record = run_recipe(path, [*settings, *short], out=out, say=lambda line: None)

    assert record.status == "done"
    assert record == hp.RunRecord.load(out / "record.json")
    assert {"data", "model", "score", "select", "prune", "recover", "bench", "save"} <= set(record.timings)
    names = [row.name for row in record.quality if row.split == "test"]
    assert names == ["base", recipe["score"]["scorer"], "magnitude", "random", f"recovered ({', '.join(ways)})"]
    assert all(row.n_examples == record.rows["test"]["rows"] for row in record.quality if row.split == "test")
    proofs = {proof.what: proof for proof in record.proofs}
    assert set(proofs) == {"outputs", "reload"} | ({"generation"} if record.recipe["task"] == "causal_lm" else set())
    assert all(p.max_difference <= p.tolerance and p.scale > 0 for p in proofs.values())
    assert len(record.speed) == 1
    assert record.plan is not None
    assert record.plan.mask.n_kept < record.plan.mask.n_heads
    assert hp.PruningPlan.load(out / "plan.json") == record.plan
    assert hp.HeadScores.load(out / "scores.json") == record.scores
    assert sum(len(s.heads) for s in hp.find_sites(hp.from_pretrained(out / "model"))) == record.plan.mask.n_kept
    assert "<html" in (out / "report.html").read_text()
    assert (out / "report.md").read_text()
    assert (out / "base" / "model.safetensors").is_file() == (record.recipe["train"] is not None)
