"""Tasks that studies make of texts at hand, written as files of rows; ``MADE`` has them all."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

#: Words that may be missing, rows of each for training, and rows in all for tests.
N_WORDS, N_ROWS, N_TEST = 120, 80, 1500


def write_capitals(text: Path, folder: Path) -> None:
    """Write lines of a text as lower-case words, and for each whether it began with a capital
    letter."""
    lines = [line.split() for line in text.read_text(encoding="utf-8").splitlines()]
    rows = [words for words in lines if len(words) >= 4]
    parts = {"train": rows[:8000], "validation": rows[8000:8500], "test": rows[8500:9500]}
    for name, some in parts.items():
        given = (
            {"words": [w.lower() for w in words], "tags": [int(w[0].isupper()) for w in words]}
            for words in some
        )
        _write(folder / f"{name}.jsonl", given)


def write_missing_words(captions: Path, folder: Path) -> None:
    """Write English captions with one word missing, their German translation behind them, and as
    label which of 120 words it was.

    Each caption is taken once, for the rarest of its words that still lacks rows.

    Args:
        captions: Lines of JSON with ``en`` and ``de``.
        folder: Gets ``train.jsonl`` and ``test.jsonl``.
    """
    lines = captions.read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    random.Random(0).shuffle(pairs)

    # 1. The most frequent words of five letters or more.
    counts: Counter[str] = Counter()
    for pair in pairs:
        counts.update(_words(pair["en"]))
    words = [word for word, _ in counts.most_common(N_WORDS)]
    labels = {word: number for number, word in enumerate(words)}

    # 2. A row per caption. Frequent words find rows in any case, so that rare ones go first.
    of_train: Counter[str] = Counter()
    train, test = [], []
    for pair in pairs:
        inside = sorted(_words(pair["en"]) & set(words), key=lambda word: counts[word])
        if len(test) < N_TEST:
            if inside:
                test.append(_row(pair, inside[0], labels))
            continue
        lacking = [word for word in inside if of_train[word] < N_ROWS]
        if lacking:
            of_train[lacking[0]] += 1
            train.append(_row(pair, lacking[0], labels))
    _write(folder / "train.jsonl", train)
    _write(folder / "test.jsonl", test)


#: By task, the text in the folder of data, and what writes rows of it into another folder.
MADE: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "capitals": ("tinyshakespeare/input.txt", write_capitals),
    "missing-words": ("multi30k/train.jsonl", write_missing_words),
}


def _words(caption: str) -> set[str]:
    return set(re.findall(r"[a-z]{5,}", caption.lower()))


def _row(pair: Mapping[str, str], word: str, labels: Mapping[str, int]) -> dict[str, Any]:
    """A caption without a word, and the number of the word."""
    blank = re.sub(rf"\b{word}\b", "...", pair["en"].lower())
    return {"text": f"{blank} {pair['de']}", "label": labels[word]}


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
