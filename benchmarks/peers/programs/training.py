"""Training as the base model was trained, for the peers of our own environment that train."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Job
from torch import Tensor, nn
from torch.utils.data import DataLoader

import headprune as hp


def train_(
    model: nn.Module,
    job: Job,
    teacher: nn.Module | None = None,
    distill: float = 0.0,
    times: float = 1,
) -> list[str]:
    """The base model's own epochs, ``times`` over, batches and learning rate; with a teacher's
    logits where ``distill`` is above 0 and a model gives more than a grade.

    Returns:
        What a reader of the record should know.
    """
    settings = {**job.train, "epochs": times * job.train["epochs"]}
    size = settings.pop("batch_size")
    arrays = {k: torch.from_numpy(v) for k, v in job.arrays("train").items()}
    count = len(arrays["label"])
    grades = arrays["label"].is_floating_point()
    notes = []
    if grades and distill:
        distill = 0.0
        notes.append("trained on the grades alone: a single number is no distribution to distil")
    order = torch.Generator().manual_seed(job.seed)

    def collate(some: list[int]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {
            ("labels" if k == "label" else k): v[some] for k, v in arrays.items()
        }
        if "attention_mask" in batch:
            longest = int(batch["attention_mask"].sum(1).max())
            batch = {k: v[:, :longest] if v.ndim == 2 else v for k, v in batch.items()}
        return batch

    rows: Any = range(count)
    loader = DataLoader(rows, batch_size=size, shuffle=True, generator=order, collate_fn=collate)
    tune = hp.recovery.Finetune(**settings, distill=distill, seed=job.seed)
    hp.recover_(model, loader, tune, teacher if distill else None)
    return notes
