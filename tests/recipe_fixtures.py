"""For every shipped recipe: data and a tiny random model in a folder, and the settings that put
them in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_models import WORDS, bert, encoder_decoder, llama, vit, wav2vec2, write_wav

Fixture = Callable[[Path], list[str]]


def _write(folder: Path, split: str, rows: Iterable[dict[str, Any]]) -> None:
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _words(draw: random.Random, least: int = 2, most: int = 9) -> list[str]:
    return draw.choices(WORDS, k=draw.randint(least, most))


def _at(folder: Path, *more: str) -> list[str]:
    """Settings for a model and rows in one folder."""
    return [f"model.path={folder / 'model'}", f"data.path={folder}", *more]


def _texts(folder: Path, labels: int, splits: dict[str, int], **config: Any) -> list[str]:
    """A classifier of texts."""
    draw = random.Random(0)
    for split, count in splits.items():
        _write(
            folder,
            split,
            ({"text": " ".join(_words(draw)), "label": i % labels} for i in range(count)),
        )
    bert(folder / "model", **{"num_labels": labels, **config})
    return _at(folder, "bench.lengths=[8]")


def _questions(folder: Path) -> list[str]:
    """As many layers and heads as MiniLM; it has two labels and the rows six, so that its head is
    made anew."""
    settings = _texts(
        folder, 6, {"train": 90, "test": 20}, num_labels=2, heads=12, num_hidden_layers=6
    )
    return [*settings, "train.epochs=1", "data.holdout=20"]


def _pairs(folder: Path) -> list[str]:
    """Pairs of sentences, whose grade is their share of common words."""
    draw = random.Random(0)
    for split, count in (("train", 90), ("validation", 20), ("test", 20)):
        sentences = [[_words(draw) for _ in range(2)] for _ in range(count)]
        rows = (
            {
                "sentence1": " ".join(a),
                "sentence2": " ".join(b),
                "score": len({*a} & {*b}) / len({*a, *b}),
            }
            for a, b in sentences
        )
        _write(folder, split, rows)
    bert(folder / "model", num_labels=1, heads=12, num_hidden_layers=6)
    return _at(folder, "train.epochs=1", "bench.lengths=[8]")


def _stories(folder: Path) -> list[str]:
    """Token numbers in the model's own folder."""
    llama(folder)
    draw = random.Random(0)
    rows = (
        {"input_ids": [1, *draw.choices(range(3, 34), k=draw.randint(6, 30))]} for _ in range(40)
    )
    _write(folder, "stories", rows)
    return [f"model.path={folder}", "data.holdout=8", "data.test_holdout=10", "bench.lengths=[8]"]


def _digits(folder: Path) -> list[str]:
    return ["train.epochs=1", "data.test_holdout=1400", "data.holdout=100"]


def _sentences(folder: Path) -> list[str]:
    """Sentences of a language whose translation says every word in capitals, and a Transformer of
    two small layers."""
    _captions(folder)
    layers = [
        "model.config.encoder_layers=1",
        "model.config.decoder_layers=1",
        "model.config.d_model=32",
    ]
    data = [f"data.path={folder}", "data.vocabulary=300", "decode.max_length=8"]
    return [*layers, *data, "train.epochs=1", "bench.lengths=[8]"]


def _captions(folder: Path) -> None:
    draw = random.Random(0)
    for split, count in (("train", 60), ("validation", 12), ("test", 12)):
        texts = [" ".join(_words(draw)) for _ in range(count)]
        _write(folder, split, ({"en": text, "de": text.upper()} for text in texts))


def _pretrained_translator(folder: Path) -> list[str]:
    _captions(folder)
    encoder_decoder(folder / "model")
    return _at(folder, "decode.max_length=8", "bench.lengths=[8]")


def _plays(folder: Path) -> list[str]:
    """A text of words, for a language model of letters."""
    data = [*_wikipedia(folder)[1:3], "data.block=32", "data.revision=null"]
    return [*data, "model.config.hidden_size=32", "train.epochs=1", "bench.lengths=[8]"]


def _wikipedia(folder: Path) -> list[str]:
    """A text of words, for a language model of words with three KV groups a layer."""
    draw = random.Random(0)
    (folder / "text.txt").write_text("\n".join(" ".join(_words(draw, 8, 8)) for _ in range(60)))
    llama(folder / "model", num_attention_heads=6, num_key_value_heads=3, hidden_size=24)
    data = [f"data.path={folder / 'text.txt'}", "bench.new_tokens=4"]
    return [f"model.path={folder / 'model'}", *data, "data.block=60", "bench.lengths=[8]"]


def _names(folder: Path) -> list[str]:
    """Words with tags as the hub has them: numbers, in another order than the model's."""
    from datasets import ClassLabel, Dataset, Features, List, Value

    tags = ClassLabel(names=["O", "B-PER", "I-PER"])
    draw = random.Random(0)
    for split, count in (("train", 60), ("validation", 12), ("test", 12)):
        rows = [_words(draw) for _ in range(count)]
        columns = {"tokens": rows, "ner_tags": [[len(w) % 3 for w in words] for words in rows]}
        features = Features({"tokens": List(Value("string")), "ner_tags": List(tags)})
        Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}.parquet")
    names = dict(enumerate(["B-PER", "I-PER", "O"]))
    bert(
        folder / "model",
        "BertForTokenClassification",
        id2label=names,
        label2id={n: i for i, n in names.items()},
    )
    return _at(folder, "bench.lengths=[8]")


def _squad(folder: Path) -> list[str]:
    """Which word comes after the one that the question names?"""
    draw = random.Random(0)
    for split, count in (("train", 60), ("validation", 16)):
        rows = []
        for _ in range(count):
            words = draw.sample(WORDS, draw.randint(3, 12))
            place = draw.randrange(len(words) - 1)
            start = len(" ".join(words[: place + 1])) + 1
            answers = {"text": [words[place + 1]], "answer_start": [start]}
            rows.append({"question": words[place], "context": " ".join(words), "answers": answers})
        _write(folder, split, rows)
    bert(folder / "model", "BertForQuestionAnswering")
    return _at(folder, "data.holdout=10", "data.max_length=16", "bench.lengths=[8]")


def _leaves(folder: Path) -> list[str]:
    """Pictures as the hub has them."""
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as Picture

    draw, names = np.random.default_rng(0), ["angular_leaf_spot", "bean_rust", "healthy"]
    features = Features({"image": Image(), "labels": ClassLabel(names=names)})
    for split, count in (("train", 40), ("validation", 9), ("test", 9)):
        pictures = [
            Picture.fromarray(draw.integers(0, 256, (12, 12, 3), dtype=np.uint8))
            for _ in range(count)
        ]
        columns = {"image": pictures, "labels": [i % 3 for i in range(count)]}
        Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}.parquet")
    vit(
        folder / "model",
        id2label=dict(enumerate(names)),
        label2id={n: i for i, n in enumerate(names)},
    )
    return _at(folder)


def _calls(folder: Path) -> list[str]:
    """Tones in wav files."""
    rows = []
    for i in range(60):
        seconds = np.arange(60 + i) / 200
        write_wav(folder / f"{i}.wav", np.sin(2 * np.pi * (3 + 12 * (i % 2)) * seconds + i), 200)
        rows.append({"audio": f"{i}.wav", "intent_class": ["pay", "block"][i % 2]})
    _write(folder, "train", rows)
    wav2vec2(folder / "model")
    amounts = ["data.seconds=0.5", "data.subset=null", "data.holdout=10", "data.test_holdout=10"]
    return _at(folder, *amounts, "train.epochs=1")


def _news(folder: Path) -> list[str]:
    settings = _texts(folder, 4, {"train": 80, "test": 20})
    return [*settings, "data.holdout=20", "score.settings.steps=4", "score.settings.warmup=1"]


def _quick_answers(folder: Path) -> list[str]:
    settings = _texts(folder, 2, {"train": 60, "validation": 12, "test": 12})
    # What a tiny model can reach whatever the noise.
    latency = ["select.latency.seconds=0.01", "select.latency.length=8", "select.speedup=1.05"]
    return [*settings, *latency]


def _tomatoes(folder: Path) -> list[str]:
    return [*_texts(folder, 2, {"train": 60, "validation": 12, "test": 12}), "train.epochs=1"]


def _rows(folder: Path) -> list[str]:
    return [*_digits(folder), "model.config={width: 16, n_heads: 4, n_layers: 2}"]


FIXTURES: dict[str, Fixture] = {
    "beans-vit": _leaves,
    "char-gpt": _plays,
    "custom-model": _rows,
    "digits-vit": _digits,
    "latency-target": _quick_answers,
    "learned-gates": _news,
    "llama-stories": _stories,
    "minds14-wav2vec2": _calls,
    "ner-bert": _names,
    "opus-mt-en-de": _pretrained_translator,
    "smollm-wikitext": _wikipedia,
    "squad-distilbert": _squad,
    "sst2-minilm": _questions,
    "stsb-minilm": _pairs,
    "sweep-rotten-tomatoes": _tomatoes,
    "translation": _sentences,
    "trec-minilm": _questions,
}
