"""A model's results on every validation and test row, and its sizes; stored as safetensors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headprune.core.arrays import packed
from headprune.core.codec import FrozenDict
from headprune.core.files import write_atomic
from headprune.core.heads import HeadCounts
from headprune.core.opening import check_file
from headprune.core.paired import Answers
from headprune.model.costs import measure_costs
from headprune.model.sites import bind
from headprune.run.subject import Subject

#: Splits that models are compared on; choices go by the first one alone.
SPLITS = ("validation", "test")
#: The arrays of every split, a row per example.
_COLUMNS = ("amounts", "counts", "losses")


@dataclass(frozen=True, eq=False)
class ModelOutcome:
    """The results and sizes of one model.

    Args:
        metric: The metric that ``amounts`` and ``counts`` give; see
            ``headprune.core.paired.Answers``.
        sizes: ``heads`` (of attention), ``params``, ``macs`` and ``kv`` (None without a cache);
            ``neurons`` where feed-forwards may be cut.
        arrays: ``<split>.amounts``, ``.counts`` and ``.losses``, a row per example, in the same
            order for all models.
        notes: Notes of its recoveries.
    """

    metric: str
    sizes: FrozenDict
    arrays: dict[str, NDArray[np.float64]]
    notes: tuple[str, ...] = ()

    def answers(self, split: str) -> Answers:
        """Return the results on the rows of a split."""
        return Answers(self.metric, self.arrays[f"{split}.amounts"], self.arrays[f"{split}.counts"])

    def loss(self, split: str) -> float:
        """Return the mean per-example loss on a split."""
        return float(self.arrays[f"{split}.losses"].mean())

    def save(self, path: Path, key: str) -> Path:
        """Write it atomically: a kill leaves the old file or the new one."""
        facts = {"metric": self.metric, "sizes": dict(self.sizes), "notes": self.notes}
        marks = {
            "headprune": "Outcome",
            "key": key,
            "facts": json.dumps(facts),
            "sha256": self._sha256(),
        }
        return write_atomic(path, packed(self.arrays, marks))

    @classmethod
    def find(cls, path: Path, key: str) -> ModelOutcome | None:
        """Load an outcome; None if its file is missing, damaged or of another key."""
        from safetensors import SafetensorError, safe_open

        # 1. Read the arrays and the facts; files of any other kind are refused.
        try:
            check_file(path)
            with safe_open(path, framework="np") as file:
                marks = file.metadata() or {}
                types = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118, no mapping
                if types != {"F64"}:
                    return None
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
            facts = json.loads(marks["facts"])
            outcome = cls(
                str(facts["metric"]),
                FrozenDict(facts["sizes"]),
                arrays,
                tuple(map(str, facts["notes"])),
            )
        except (
            OSError,
            SafetensorError,
            KeyError,
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
        ):
            return None
        # 2. Check that it is the right one, and complete.
        if marks.get("key") != key or marks.get("sha256") != outcome._sha256():
            return None
        return outcome if outcome._complete() else None

    def _complete(self) -> bool:
        """Whether every column of both splits has a row for each example."""
        if len(self.arrays) != len(SPLITS) * len(_COLUMNS):
            return False
        for split in SPLITS:
            if any(f"{split}.{column}" not in self.arrays for column in _COLUMNS):
                return False
            losses = self.arrays[f"{split}.losses"].shape
            if len(losses) != 1 or losses[0] == 0:
                return False
            # Amounts may have several numbers per example: [examples, ...].
            if self.arrays[f"{split}.counts"].shape != losses:
                return False
            if self.arrays[f"{split}.amounts"].shape[:1] != losses:
                return False
        return True

    def _sha256(self) -> str:
        """Digest of metric, sizes and arrays."""
        # In the order of the names, so that the order of the file does not matter.
        digest = hashlib.sha256(json.dumps([self.metric, dict(self.sizes)]).encode())
        for name in sorted(self.arrays):
            digest.update(name.encode() + np.ascontiguousarray(self.arrays[name]).tobytes())
        return digest.hexdigest()


def judge(
    subject: Subject, model: nn.Module, batches: dict[str, list[Any]], notes: tuple[str, ...] = ()
) -> ModelOutcome:
    """Evaluate a model on both splits and count its sizes.

    Args:
        subject: The base model's subject. It has the metric, the sites, and the example on which
            sizes are counted.
        model: The base model, or a cut copy of it.
        batches: The batches of every split.
        notes: Notes for the outcome.
    """
    # 1. Results per example.
    arrays: dict[str, NDArray[np.float64]] = {}
    metric = ""
    for split in SPLITS:
        quality = subject.evaluate(model, split, batches[split])
        metric = quality.metric
        for name in _COLUMNS:
            arrays[f"{split}.{name}"] = np.array(getattr(quality, name), dtype=np.float64)
    # 2. Sizes.
    bound = bind(model, subject.sites)
    costs = measure_costs(model, bound, subject.example)
    present = HeadCounts.present(b.site for b in bound)
    sizes = {
        "heads": present.heads,
        "params": costs.total.params,
        "macs": costs.total.macs(costs.length),
        "kv": costs.total.kv_bytes or None,
    }
    if present.neurons is not None:
        sizes["neurons"] = present.neurons
    return ModelOutcome(metric, FrozenDict(sizes), arrays, notes)
