"""Outcome: what one model made of every validation and test row, and how large it is; stored as
safetensors."""

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
from headprune.core.opening import check_file
from headprune.model.costs import measure_costs
from headprune.model.sites import bind
from headprune.run.subject import Subject
from headprune.sweep.paired import Answers

SPLITS = ("validation", "test")
_COLUMNS = ("amounts", "counts", "losses")


@dataclass(frozen=True, eq=False)
class Outcome:
    """One model, judged.

    Args:
        metric: What ``amounts`` and ``counts`` make; see ``headprune.sweep.paired.Answers``.
        sizes: ``heads``, ``params``, ``macs`` and ``kv`` (None without a cache).
        arrays: ``<split>.amounts``, ``.counts`` and ``.losses``, a row an example, in one order for
            all models.
        notes: What recoveries had to say.
    """

    metric: str
    sizes: FrozenDict
    arrays: dict[str, NDArray[np.float64]]
    notes: tuple[str, ...] = ()

    def answers(self, split: str) -> Answers:
        """What the model made of the rows of a split."""
        return Answers(self.metric, self.arrays[f"{split}.amounts"], self.arrays[f"{split}.counts"])

    def loss(self, split: str) -> float:
        """Mean per-example loss."""
        return float(self.arrays[f"{split}.losses"].mean())

    def save(self, path: Path, key: str) -> Path:
        """Writes it, whole or not at all."""
        facts = {"metric": self.metric, "sizes": dict(self.sizes), "notes": self.notes}
        marks = {
            "headprune": "Outcome",
            "key": key,
            "facts": json.dumps(facts),
            "sha256": self._sha256(),
        }
        return write_atomic(path, packed(self.arrays, marks))

    @classmethod
    def find(cls, path: Path, key: str) -> Outcome | None:
        """The outcome of this key, where its file is there, whole, and says so itself."""
        from safetensors import SafetensorError, safe_open

        try:
            check_file(path)
            with safe_open(path, framework="np") as file:
                marks = file.metadata() or {}
                types = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118, no mapping
                if types != {"F64"}:
                    return None
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
            facts = json.loads(marks["facts"])
            found = cls(
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
        whole = marks.get("key") == key and marks.get("sha256") == found._sha256()
        return found if whole and found._sound() else None

    def _sound(self) -> bool:
        """Whether there is a row of every column for each example of both splits."""
        if {f"{s}.{c}" for s in SPLITS for c in _COLUMNS} != self.arrays.keys():
            return False
        shapes = {name: array.shape for name, array in self.arrays.items()}
        losses = {s: shapes[f"{s}.losses"] for s in SPLITS}
        alike = all(
            shapes[f"{s}.counts"] == losses[s] == shapes[f"{s}.amounts"][:1] for s in SPLITS
        )
        return alike and all(len(shape) == 1 and shape[0] for shape in losses.values())

    def _sha256(self) -> str:
        found = hashlib.sha256(json.dumps([self.metric, dict(self.sizes)]).encode())
        for name in sorted(self.arrays):
            found.update(name.encode() + np.ascontiguousarray(self.arrays[name]).tobytes())
        return found.hexdigest()


def judge(
    subject: Subject, model: nn.Module, batches: dict[str, list[Any]], notes: tuple[str, ...] = ()
) -> Outcome:
    """Evaluates a model on both splits and counts its sizes.

    Args:
        subject: The base model's, for the metric, the sites and the example that sizes are counted
            on.
        model: It, or what is left of it.
        batches: The batches of every split.
        notes: Go into the outcome.
    """
    arrays: dict[str, NDArray[np.float64]] = {}
    metric = ""
    for split in SPLITS:
        quality = subject.evaluate(model, split, batches[split])
        metric = quality.metric
        arrays |= {
            f"{split}.{name}": np.array(getattr(quality, name), dtype=np.float64)
            for name in _COLUMNS
        }
    bound = bind(model, subject.sites)
    costs = measure_costs(model, bound, subject.example)
    sizes = {
        "heads": sum(len(b.site.heads) for b in bound),
        "params": costs.total.params,
        "macs": costs.total.macs(costs.length),
        "kv": costs.total.kv_bytes or None,
    }
    return Outcome(metric, FrozenDict(sizes), arrays, notes)
