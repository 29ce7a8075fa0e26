"""The stages of a run, in order; each takes the work as it is, does one thing, and notes what came of it."""

from __future__ import annotations

import copy
import dataclasses
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import recovery, scoring, selection
from headprune.bench.latency import compare_latency, shaped_batch
from headprune.bench.quality import Quality, evaluate
from headprune.bench.size import sizes
from headprune.core.errors import InvalidValue
from headprune.core.plan import PruningPlan
from headprune.core.record import QualityRow
from headprune.core.scores import HeadScores
from headprune.gating.context import gated
from headprune.recovery._api import recover_
from headprune.run.data import Data, RawData, encode_rows, load_rows
from headprune.run.journal import BASE, MODEL, PLAN, SCORES, Journal
from headprune.run.models import Preparation, build_model, prepare, resolve_device
from headprune.run.proofs import generation_proof, reload_proof
from headprune.run.recipe import Recipe
from headprune.run.validate import configured
from headprune.scoring._api import score
from headprune.selection._api import select
from headprune.surgery.checkpoint import save_pretrained
from headprune.surgery.prune import prune_

_EVALUATION_BATCH = 64
_EXAMPLE_ROWS = 8


@dataclass
class Work:
    """What the stages hand on to each other."""

    recipe: Recipe
    journal: Journal
    folder: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    raw: RawData | None = None
    preparation: Preparation = field(default_factory=Preparation)
    quick: dict[str, list[Any]] = field(default_factory=dict)
    _held: dict[str, Any] = field(default_factory=dict)

    def hold(self, **values: Any) -> None:
        """Keeps what a later stage needs: data, model, pruned, scores, baselines, plan."""
        self._held.update(values)

    @property
    def data(self) -> Data:
        data: Data = self._held["data"]
        return data

    @property
    def model(self) -> nn.Module:
        """The original: trained, never cut."""
        model: nn.Module = self._held["model"]
        return model

    @property
    def pruned(self) -> nn.Module:
        pruned: nn.Module = self._held["pruned"]
        return pruned

    @property
    def scores(self) -> HeadScores:
        scores: HeadScores = self._held["scores"]
        return scores

    @property
    def baselines(self) -> tuple[HeadScores, ...]:
        baselines: tuple[HeadScores, ...] = self._held["baselines"]
        return baselines

    @property
    def plan(self) -> PruningPlan:
        plan: PruningPlan = self._held["plan"]
        return plan

    @property
    def example(self) -> Any:
        """A small batch of test rows, for proofs and sizes."""
        return self.data.collate(self.data.examples["test"][:_EXAMPLE_ROWS])
