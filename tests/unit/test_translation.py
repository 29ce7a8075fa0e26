"""Translation as a task: tokenizers trained on the spot, batches, decoding, BLEU, and what recipes
may say of it."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sacrebleu.metrics import BLEU
from transformers import AutoTokenizer

import headprune as hp
from headprune.attention.transformer import TransformerConfig, TransformerForTranslation
from headprune.bench.quality import evaluate
from headprune.bench.translation import evaluate_translation, translate
from headprune.core.bleu import bleu
from headprune.core.errors import InvalidValue
from headprune.core.metrics import drop, drop_words
from headprune.core.paired import Answers, paired_drops, resampled_drops, upper_bounds
from headprune.data.datasets import load_rows
from headprune.data.models import prepare
from headprune.data.order import LikeLengths
from headprune.data.vocabulary import train_tokenizer
from headprune.layouts import registry
from headprune.recipes.reading import override
from headprune.recipes.validate import RecipeError, check_recipe
from headprune.sweep.base import open_base, ready_base
from headprune.sweep.outcome import ModelOutcome, judge
from tests.small_recipes import quiet_run, quietly_prepared, write_rows
from tests.tiny_models import WORDS, bert, encoder_decoder

COMMON = ["cat", "dog", "house", "tree", "sun", "moon", "red", "blue"]
TEXTS = ["A man's dog.", "Straße  über\tLöwe ☃ <s> </s>.", " leading", "trailing \n", "<pad>"]


def sentences(count: int, seed: int, longest: int = 7) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(COMMON, k=draw.randint(1, longest))) for _ in range(count)]


def test_byte_pairs_give_every_text_back_and_end_it(tmp_path):
    tokenizer = train_tokenizer("bpe", sentences(200, 0), 320)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        marks = {tokenizer.pad_token_id, tokenizer.bos_token_id}
        assert not marks & set(ids), "text was taken for a mark"
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(train_tokenizer("bpe", sentences(200, 0), 270)) == 270
    assert len(train_tokenizer("bpe", sentences(200, 0))) > 270, "all that there is"
    assert set(tokenizer(TEXTS[0])) == {"input_ids", "attention_mask"}
    assert len(tokenizer("cat dog cat")["input_ids"]) == 4, "nothing was merged"
    assert train_tokenizer("bpe", sentences(200, 0), 320).get_vocab() == tokenizer.get_vocab()
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert [again(t)["input_ids"] for t in TEXTS] == [tokenizer(t)["input_ids"] for t in TEXTS]


def test_characters_are_tokens(tmp_path):
    tokenizer = train_tokenizer("characters", ["ab\n", "b c"])
    assert len(tokenizer) == 1 + len("\n abc")
    text = "cab\n\n  ba"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("z")["input_ids"] == [tokenizer.unk_token_id]
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids


def counts_of(said: list[str], true: list[str]) -> tuple[Any, Any]:
    scorer = BLEU(effective_order=True)
    found = [scorer.sentence_score(a, [b]) for a, b in zip(said, true, strict=True)]
    counts = np.array([[*s.counts, *s.totals] for s in found], float)
    return counts, np.array([s.ref_len for s in found], float)


def test_bleu_is_sacrebleus():
    for seed in range(12):
        draw = random.Random(seed)
        n = draw.randint(1, 5)
        said, true = sentences(n, seed), sentences(n, seed + 1000)
        said = [draw.choice([a, b, "", b + " cat"]) for a, b in zip(said, true, strict=True)]
        counts, reference = counts_of(said, true)
        ours = 100 * float(bleu(counts.sum(0), reference.sum()))
        assert ours == pytest.approx(BLEU().corpus_score(said, [true]).score, abs=1e-9)


def test_bleu_needs_sacrebleu(monkeypatch):
    recipe = check_recipe(RECIPE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidValue, match=r"task: .* Install it: pip install sacrebleu"):
        quietly_prepared(recipe)


def test_bleu_has_a_direction_and_a_paired_bootstrap():
    assert drop("bleu", 0.35, 0.34) == pytest.approx(0.01)
    assert drop_words("bleu", 0.01) == "1.00 points"
    true, draw = sentences(30, 1), random.Random(0)
    base, worse = ([t if draw.random() > p else "cat dog" for t in true] for p in (0.2, 0.5))
    first, second = (Answers("bleu", *counts_of(said, true)) for said in (base, worse))
    assert 100 * first.value == pytest.approx(BLEU().corpus_score(base, [true]).score, abs=1e-9)
    found = resampled_drops(first, [second, first], 20, 3)
    for i, picked in enumerate(np.random.default_rng(3).integers(30, size=(20, 30))):
        drawn = [true[k] for k in picked]
        a, b = (
            BLEU().corpus_score([said[k] for k in picked], [drawn]).score for said in (base, worse)
        )
        assert found[i, 0] == pytest.approx((a - b) / 100, abs=1e-9)
    assert not found[:, 1].any()
    (interval,) = paired_drops(first, [second], draws=500)
    assert 0 < interval.low < interval.value < interval.high
    bound, same = (upper_bounds(first, [other], 0.95, draws=500)[0] for other in (second, first))
    assert interval.value < bound < 1
    assert same == 0


SIZES = {"d_model": 16, "ffn_dim": 16, "num_attention_heads": 2}
SIZES |= {"encoder_layers": 1, "decoder_layers": 1}


def test_the_metric_is_sacrebleu_of_the_translations():
    model = TransformerForTranslation(TransformerConfig(vocab_size=320, **SIZES))
    with torch.no_grad():
        model.decoder.layers[0].feed_forward[3].weight.mul_(20)
    tokenizer, texts = train_tokenizer("bpe", sentences(200, 0), 320), sentences(6, 5)
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
    whole = {**encoded, "labels": labels}
    batches = [{k: v[i : i + 3] for k, v in whole.items()} for i in (0, 3)]
    how: dict[str, Any] = {"beams": 2, "max_length": 24}
    said = translate(model.train(), batches, tokenizer, **how)
    assert model.training
    assert len(set(said)) > 1
    alone = [tokenizer([text], return_tensors="pt") for text in texts]
    assert translate(model, alone, tokenizer, **how) == said, "padding changes translations"
    true = [f"{text} cat" for text in said]
    found = evaluate_translation(model, batches, true, tokenizer, **how)
    assert found.metric == "bleu"
    assert 0 < found.value < 1
    expected = BLEU().corpus_score(said, [true]).score
    assert 100 * found.value == pytest.approx(expected, abs=1e-9)
    assert found.losses == evaluate(model, batches).losses
    with pytest.raises(InvalidValue, match="references: must be one for each of 6 sentences"):
        evaluate_translation(model, batches, true[1:], tokenizer)


def test_bits_per_character_is_the_logarithm_of_perplexity():
    model, batch = registry.get("llama").tiny(0)
    bits, plain = evaluate(model, [batch], bits=True), evaluate(model, [batch])
    assert (bits.metric, plain.metric) == ("bits_per_character", "perplexity")
    assert bits.value == pytest.approx(math.log2(plain.value), rel=1e-9)
    assert sum(bits.amounts) / sum(bits.counts) == pytest.approx(bits.value, rel=1e-12)
    assert drop("bits_per_character", 2.0, 2.25) == 0.25


def folder_of(path: Path, count: int = 40) -> Path:
    for split, seed in (("train", 0), ("validation", 1), ("test", 2)):
        texts = [f"{split} {text}" for text in sentences(count, seed)]
        write_rows(path / f"{split}.jsonl", ({"en": text, "de": text.upper()} for text in texts))
    return path


RECIPE: dict[str, Any] = {
    "name": "tiny",
    "description": "for tests",
    "task": "translation",
    "device": "cpu",
    "model": {"class_name": "TransformerForTranslation", "config": SIZES},
    "data": {"path": "rows.jsonl", "text": "en", "target": "de"},
    "select": {"keep_heads": 0.5},
}
RECIPE["data"] |= {"tokenizer": "bpe", "vocabulary": 300}
#: The same for another task, in place of translation.
CAUSAL = ["task=causal_lm", "data.tokenizer=null", "data.vocabulary=null"]
TOKENS = [*CAUSAL, "data.target=null", "data.tokenizer=characters"]


def ready(folder: Path, *changes: str) -> Any:
    recipe = check_recipe(override(RECIPE, [f"data.path={folder_of(folder)}", *changes]))
    return quietly_prepared(recipe)


def test_rows_become_what_a_decoder_reads_and_what_it_should_write(tmp_path):
    subject = ready(tmp_path)
    tokenizer, data, model = subject.preparation.tokenizer, subject.data, subject.model
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.decoder_start_token_id == tokenizer.bos_token_id

    def text_of(labels: list[int]) -> str:
        return tokenizer.decode([i for i in labels if i >= 0], skip_special_tokens=True)

    row = data.examples["test"][0]
    assert text_of(row["labels"]) == data.targets["test"][0]
    assert row["decoder_input_ids"] == [tokenizer.bos_token_id, *row["labels"][:-1]]
    batches, references = data.evaluation("test", 16), data.references("test")
    assert [text_of(r) for batch in batches for r in batch["labels"].tolist()] == references
    assert len(references) == 40
    assert references != data.targets["test"], "nothing was sorted"
    for batch in [*batches, *data.loader("train", 16)]:
        counted = batch["labels"] >= 0
        shifted = model._shifted(batch["labels"])
        assert torch.equal(shifted[counted], batch["decoder_input_ids"][counted])
        assert torch.equal(batch["decoder_attention_mask"], counted.long())


def causal(path: Path, **more: Any) -> dict[str, Any]:
    data = {"path": str(path), "text": "text", "tokenizer": "characters", "block": 50, **more}
    model = {"class_name": "LlamaForCausalLM", "config": {}}
    return {**RECIPE, "task": "causal_lm", "model": model, "data": data}


def blocks(path: Path, **more: Any) -> list[list[str]]:
    found = load_rows(check_recipe(causal(path, **more))).splits
    return [list(found[name]["text"]) for name in ("train", "validation", "test")]


def test_a_text_is_cut_into_rows_and_its_end_is_held_out(tmp_path):
    path, text = tmp_path / "text.txt", "".join(f"{i:04d}\n" for i in range(400))
    path.write_text(text)
    splits = blocks(path, holdout=4, test_holdout=0.1)
    assert "".join(row for rows in splits for row in rows) == text
    assert [len(rows) for rows in splits] == [32, 4, 4]
    assert {len(row) for rows in splits for row in rows} == {50}
    with pytest.raises(InvalidValue, match=r"test_holdout: must be fewer than the 40 blocks"):
        blocks(path, holdout=4, test_holdout=40)
    with pytest.raises(InvalidValue, match=r"data\.text: must be a column"):
        load_rows(check_recipe(causal(path, text="txt", holdout=4)))
    write_rows(tmp_path / "rows.jsonl", ({"text": i} for i in range(40)))
    with pytest.raises(InvalidValue, match="must be rows of text, to be cut into blocks"):
        blocks(tmp_path / "rows.jsonl")
    (tmp_path / "own").mkdir()
    for name, count in (("train", 40), ("test", 10)):  # a test file takes none of train's end
        own = "".join(f"{name[1]}{i:03d}\n" for i in range(count))
        (tmp_path / "own" / f"{name}.txt").write_text(own)
    splits = blocks(tmp_path / "own", block=25, holdout=2)
    assert "".join(splits[2]) == own
    assert [len(rows) for rows in splits] == [6, 2, 2]


def test_what_a_translators_preparation_needs(tmp_path):
    with pytest.raises(InvalidValue, match=r"prepare\(texts=\): must be given for data\.tokenizer"):
        prepare(check_recipe(RECIPE))
    given = ["data.tokenizer=null", "data.vocabulary=null", f"model={{path: {bert(tmp_path)}}}"]
    with pytest.raises(InvalidValue, match=r"whose configuration has a decoder_start_token_id"):
        prepare(check_recipe(override(RECIPE, given)))


def test_what_the_trained_tokenizer_says_is_not_said_otherwise(tmp_path):
    words = r"model\.config\.pad_token_id: must be left out, because the trained tokenizer"
    with pytest.raises(InvalidValue, match=words):
        ready(tmp_path, "model.config.pad_token_id=7")


def test_a_sweep_finds_the_base_with_its_tokenizer_and_keeps_what_bleu_is_made_of(tmp_path):
    (tmp_path / "rows").mkdir()
    said, sweep = ready(tmp_path / "rows", "decode.max_length=12"), tmp_path / "sweep"
    recipe = said.recipe
    base = ready_base(recipe, sweep, lambda line: None)
    subject = open_base(base, sweep, recipe)
    assert subject.preparation.tokenizer.get_vocab() == said.preparation.tokenizer.get_vocab()
    assert subject.data.examples == said.data.examples
    batches = {split: subject.data.evaluation(split, 16) for split in ("validation", "test")}
    path = judge(subject, subject.model, batches).save(tmp_path / "outcome.safetensors", "key")
    found = ModelOutcome.find(path, "key")
    assert found.answers("test").amounts.shape == (40, 8)
    assert found.answers("test").value == said.judge(said.model, "test").value
    other = check_recipe(override(recipe.model_dump(), ["decode.beams=2"]))
    assert ready_base(other, sweep, lambda line: None).made_of != base.made_of


def test_recipes_that_make_no_sense():
    for changes, path, words in (
        (["data.target=null"], "data.target", "the column with the translation"),
        (["data.label=de"], "data.label", "left out: translation has no labels"),
        (["data.text=[en, de]"], "data.text", "the column of the source language"),
        (["data.tokens=ids"], "data.tokens", "left out"),
        (["data.tokenizer=characters"], "data.tokenizer", "bpe for translation"),
        (["data.tokenizer=null"], "data.vocabulary", "used with tokenizer: bpe"),
        (["data.block=20"], "data.block", "used with causal_lm"),
        (["decode.beams=0"], "decode.beams", "greater than or equal to 1"),
        ([*CAUSAL, "data.target=null", "decode.beams=2"], "decode", "only translation decodes"),
        (CAUSAL, "data.target", "left out for causal_lm"),
        (["model={path: there}"], "data.tokenizer", "the model has its own"),
        ([*TOKENS, "data.text=null", "data.tokens=ids"], "data.tokens", "out with data.tokenizer"),
    ):
        with pytest.raises(RecipeError) as caught:
            check_recipe(override(RECIPE, changes))
        found = {p.where: str(p) for p in caught.value.problems}
        assert path in found, found
        assert words in found[path]


def test_a_resolved_recipe_is_one_again_and_rows_need_translations(tmp_path):
    recipe = check_recipe(override(RECIPE, [f"data.path={folder_of(tmp_path)}"]))
    assert check_recipe(recipe.model_dump()) == recipe
    (tmp_path / "test.jsonl").write_text(json.dumps({"en": "a dog", "de": ""}))
    with pytest.raises(InvalidValue, match="test, row 0: must be a translation that is not empty"):
        load_rows(recipe)


def pretrained(folder: Path, **changes: Any) -> Any:
    columns = {"text": "translation.en", "target": "translation.xx", "prefix": "w0 w1 : "}
    own = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder), **columns, "holdout": 10, "test_holdout": 10},
        "decode": {"max_length": 12},
        "score": {"random_draws": 0},
        "report": False,
    }
    return check_recipe({**RECIPE, **own, **changes})


def test_an_encoder_decoder_from_a_folder_is_cut_with_its_own_tokenizer(tmp_path):
    encoder_decoder(tmp_path / "model", "T5")
    draw = random.Random(0)
    texts = [draw.choices(WORDS, k=draw.randint(2, 8)) for _ in range(40)]
    pairs = [{"en": " ".join(words), "xx": " ".join(reversed(words))} for words in texts]
    write_rows(tmp_path / "train.jsonl", ({"translation": pair} for pair in pairs))
    chosen = pretrained(tmp_path)
    subject = quietly_prepared(chosen)
    row, tokenizer = subject.data.examples["test"][0], subject.preparation.tokenizer
    said = tokenizer.decode(row["input_ids"], skip_special_tokens=True).split()
    target = subject.data.targets["test"][0].split()
    assert said[:2] == ["w0", "w1"]
    assert said[-len(target) :] == target[::-1]
    start = subject.model.config.decoder_start_token_id
    assert row["decoder_input_ids"] == [start, *row["labels"][:-1]]
    assert tokenizer.decode(row["labels"], skip_special_tokens=True).split() == target

    quiet_run(chosen, out=tmp_path / "out")
    kinds = {site.kind for site in hp.find_sites(hp.from_pretrained(tmp_path / "out" / "model"))}
    assert kinds == {"self", "causal", "cross"}


def test_a_prefix_is_for_translations():
    data = {"path": "rows.jsonl", "text": "text", "prefix": "translate: "}
    with pytest.raises(RecipeError, match=r"data\.prefix: must be left out for text_class"):
        pretrained(Path("here"), task="text_classification", data=data, decode={})


def test_batches_of_like_length_hold_every_row_once_in_a_new_order():
    draw = random.Random(0)
    lengths = [draw.randint(1, 40) for _ in range(1003)]  # more than one pool
    order = LikeLengths(lengths, 8, torch.Generator().manual_seed(0))
    first, second = list(order), list(order)
    assert len(first) == len(order) == 126
    assert sorted(i for batch in first for i in batch) == list(range(1003))
    assert first != second
    assert list(LikeLengths(lengths, 8, torch.Generator().manual_seed(0))) == first
    assert sum(max(lengths[i] for i in b) * len(b) for b in first) < 1.1 * sum(lengths)
    shuffled = [lengths[batch[0]] for batch in first]
    assert shuffled != sorted(shuffled), "batches come in order of length"
