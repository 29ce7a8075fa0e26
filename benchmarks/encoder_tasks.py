"""Encoders on real tasks, for benchmarks: a model, its loss, draws of calibration rows, and rows
that judge.

SST-2 and TREC are fine-tuned first; STS-B takes the sentence encoder as it is, and its quality is
Spearman's correlation of cosines with the grades.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import headprune as hp
from headprune.bench.quality import evaluate
from headprune.data.models import resolve_device, resolve_path
from headprune.model.running import device_of, to_device, undisturbed

sys.path.insert(0, str(Path(__file__).resolve().parent))
from scorers import drawn, encoder_recipe, fine_tuned

TITLES = {"sst2": "SST-2, accuracy", "trec": "TREC, accuracy", "stsb": "STS-B, Spearman"}
#: Text column and epochs of fine-tuning of the classifiers.
COLUMNS = {"sst2": ("sentence", 2.0), "trec": ("text", 1.0), "hwu64": ("text", 5.0)}


@dataclass
class Task:
    """A model, its loss, and its rows.

    Args:
        name: Of the task.
        model: Uncut.
        calibration: ``(seed, by_length=True) -> batches`` of training rows: of like length
            together, or as drawn.
        judged: Batches of validation and test rows.
        loss: Per-example loss; None is the default.
        output: One number an example that the model is used for, where it is no classifier:
            ``surgeon`` takes its slopes in place of the loss's, so that the curvature is that of
            the output, whatever the grades say.
        grades: By split, what a correlation is taken with; empty where the metric is accuracy.
    """

    name: str
    model: nn.Module
    calibration: Callable[..., list[Any]]
    judged: dict[str, list[Any]]
    loss: Any = None
    output: Any = None
    grades: dict[str, np.ndarray] = field(default_factory=dict)

    def score(
        self, batches: list[Any], scorer: Any, sites: Sequence[hp.AttentionSite] | None = None
    ) -> hp.HeadScores:
        """Scores of the model, a scorer by name or configured, by the loss; ``surgeon``'s by the
        output."""
        loss = (
            self.output
            if scorer == "surgeon" or isinstance(scorer, hp.scoring.Surgeon)
            else self.loss
        )
        found: hp.HeadScores = hp.score(
            self.model, batches, scorer, loss=loss, sites=sites, progress=False
        )
        return found

    def recover_(self, small: nn.Module, batches: list[Any], method: Any) -> None:
        """Of a pair, the encoder sees one sentence after the other; recovery is a matter of the
        encoder alone."""
        if isinstance(small, Cosine) and isinstance(self.model, Cosine):
            batches = [batch[side] for batch in batches for side in ("first", "second")]
            hp.recover_(small.encoder, batches, method, self.model.encoder)
        else:
            hp.recover_(small, batches, method, self.model)

    def answers(self, model: nn.Module, split: str) -> np.ndarray:
        """One number an example: whether it is right, or the cosine."""
        if not self.grades:
            return np.array(evaluate(model, self.judged[split]).amounts, dtype=np.float32)
        with undisturbed(model), torch.no_grad():
            batches = (inputs(to_device(batch, device_of(model))) for batch in self.judged[split])
            return torch.cat([model(**batch) for batch in batches]).cpu().numpy()

    def quality(self, answers: np.ndarray, split: str, rows: np.ndarray | None = None) -> float:
        """The metric, of some rows or all."""
        some = slice(None) if rows is None else rows
        if not self.grades:
            return float(answers[some].mean())
        return float(spearmanr(answers[some], self.grades[split][some]).statistic)


def encoder_task(
    name: str,
    data: Path,
    model: str,
    work: Path,
    calibration: int,
    epochs: float | None = None,
    most: int | None = None,
    device: str = "cpu",
) -> Task:
    """A task by name.

    Args:
        name: ``sst2``, ``trec`` or ``stsb``.
        data: Folder with its train, validation and test files; TREC's validation rows are left out
            of training.
        model: Folder, hub name or ``package:`` of the encoder.
        work: Where fine-tuned weights are kept.
        calibration: Rows a draw.
        epochs: Of fine-tuning, in place of the task's own.
        most: Judge by so many rows only.
        device: Where the model is, and where it is fine-tuned.
    """
    if name == "stsb":
        task = _sentences(data, model, calibration, most)
        task.model.to(resolve_device(device))
        return task
    column, own = COLUMNS[name]
    tuned, rows = fine_tuned(
        encoder_recipe(column, model, data, own if epochs is None else epochs, device), work
    )
    judged = {}
    for split in ("validation", "test"):
        # Of like length together: less padding to compute.
        rows.examples[split] = sorted(
            rows.examples[split][:most], key=lambda example: len(example["input_ids"])
        )
        judged[split] = rows.evaluation(split, 128)

    def draw(seed: int, by_length: bool = True) -> list[Any]:
        return drawn(rows, calibration, calibration, seed, by_length)

    return Task(name, tuned, draw, judged)


class Cosine(nn.Module):
    """Cosine of two sentences: mean of the encoder's token states, padding left out."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
        """What the tokenizer gives for the first and for the second sentences; returns
        ``[pairs]``."""
        return nn.functional.cosine_similarity(self.mean(first), self.mean(second))

    def mean(self, tokens: dict[str, Tensor]) -> Tensor:
        mask = tokens["attention_mask"]
        states = self.encoder(**tokens).last_hidden_state
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in batch.items() if k != "grade"}


def cosine(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    found: Tensor = model(**inputs(batch))
    return found


def squared_error(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Of the cosine against the grade, which goes from 0 to 5."""
    return (cosine(model, batch) - batch["grade"] / 5).square()


def _sentences(data: Path, model: str, calibration: int, most: int | None) -> Task:
    from transformers import AutoModel, AutoTokenizer

    folder = resolve_path(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = {split: _graded(data / f"{split}.jsonl") for split in ("train", "validation", "test")}

    def batches(some: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        return [_collated(tokenizer, some[i : i + size]) for i in range(0, len(some), size)]

    def sorted_by_length(some: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(some, key=lambda row: len(row["sentence1"]) + len(row["sentence2"]))

    def draw(seed: int, by_length: bool = True) -> list[dict[str, Any]]:
        some = random.Random(seed).sample(rows["train"], calibration)
        return batches(sorted_by_length(some) if by_length else some, 32)

    judged = {split: sorted_by_length(rows[split][:most]) for split in ("validation", "test")}
    grades = {split: np.array([row["score"] for row in some]) for split, some in judged.items()}
    encoder = Cosine(AutoModel.from_pretrained(folder).float()).eval()
    batched = {k: batches(v, 64) for k, v in judged.items()}
    return Task("stsb", encoder, draw, batched, squared_error, cosine, grades)


def _graded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _collated(tokenizer: Any, some: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens of the first and of the second sentences, and the grades."""

    def tokens(column: str) -> dict[str, Tensor]:
        words = [row[column] for row in some]
        return dict(
            tokenizer(words, padding=True, truncation=True, max_length=128, return_tensors="pt")
        )

    grades = torch.tensor([row["score"] for row in some])
    return {"first": tokens("sentence1"), "second": tokens("sentence2"), "grade": grades}
