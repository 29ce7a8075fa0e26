"""The base class of recoveries, what they are given (Job), and what they return (Outcome,
RecoveryReport)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headprune.core.codec import EMPTY, FrozenDict, Value

if TYPE_CHECKING:
    from torch import nn

    from headprune.core.heads import AttentionSite
    from headprune.model.cut import Undo
    from headprune.model.losses import Loss


def _undo() -> Undo:
    # Imported here because it imports torch, which settings do without.
    from headprune.model.cut import Undo

    return Undo()


@dataclass(frozen=True)
class Job:
    """A model to recover, and what a method needs for it.

    Args:
        model: The model, without ``torch.compile``'s wrapper; changed in place.
        batches: The data.
        teacher: The unpruned original, if the method needs one.
        loss: Per-example loss; None is the default loss.
        sites: The attention sites; None finds them.
        progress: Show a progress bar.
        validation: Data to judge the training by, if the method does.
        folder: Where a method that ``resumes`` keeps its checkpoint.
        leave_checkpoint: Whether to keep a checkpoint of the end there.
        part: Steps before and steps of the whole, if this is one part of a longer training. It
            determines where the learning rate begins.
        undo: Restores the model after an error. It knows the modules; a method gives it every
            tensor that it changes in place (``keep``), before the change.
    """

    model: nn.Module
    batches: Iterable[Any]
    teacher: nn.Module | None = None
    loss: Loss | None = None
    sites: Iterable[AttentionSite] | None = None
    progress: bool = False
    validation: Iterable[Any] | None = None
    folder: Path | None = None
    leave_checkpoint: bool = False
    part: tuple[int, int] | None = None
    undo: Undo = field(default_factory=_undo)


@dataclass(frozen=True)
class Outcome:
    """The result of a recovery.

    Args:
        changed: Qualified names of the parameters that it changed or added.
        n_examples: Number of examples: with repeats for training, else of one pass.
        metrics: The method's own numbers, JSON data.
        notes: Notes for the user.
    """

    changed: tuple[str, ...]
    n_examples: int
    metrics: Mapping[str, Any] = field(default_factory=FrozenDict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecoveryReport(Value):
    """The report of ``recover_``.

    Args:
        method: Registered name of the method.
        settings: Its settings.
        changed: Qualified names of the parameters that were changed or added.
        n_examples: Number of examples: with repeats for training, else of one pass.
        seconds: Duration.
        metrics: The method's own numbers. Of training: ``steps`` and the final mean ``loss``.
            Without training: ``heads``, the number of heads compensated for, and
            ``errors`` ``before`` and ``after`` by output projection, from the first cut on:
            ``sum |T - S|² / sum |A - mean A|²`` over tokens. T and S are the teacher's and the
            model's stream after it, A is what the teacher's projection writes. ``error_before``
            and ``error_after`` are their means.
        notes: Notes for the user.
    """

    method: str
    settings: FrozenDict
    changed: tuple[str, ...]
    n_examples: int
    seconds: float
    metrics: FrozenDict = EMPTY
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [
            f"{len(self.changed)} parameters changed",
            f"{self.n_examples} examples",
            f"{self.seconds:.1f} s",
        ]
        for name, value in self.metrics.items():
            if isinstance(value, float):
                parts.append(f"{name} {value:.4g}")
            # Numbers of single projections would fill the screen.
            elif not isinstance(value, Mapping):
                parts.append(f"{name} {value}")
        return "\n  ".join([f"{self.method}: {', '.join(parts)}", *self.notes])


class Recovery(abc.ABC):
    """A method that recovers what a cut cost.

    A concrete one is a frozen dataclass of its settings, which are JSON data.
    """

    #: Whether it trains. One that does not uses ``loss`` only to run models on batches that are
    #: not simply their arguments.
    trains: ClassVar[bool] = False

    #: Whether it can keep checkpoints in a folder and continue from them.
    resumes: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def needs_teacher(self) -> bool:
        """Whether it reads the unpruned original. If not, ``recover_`` refuses ``teacher=``."""

    @property
    def adds_biases(self) -> bool:
        """Whether projections without a bias may get one, which not every format can hold."""
        return False

    @property
    def needs_validation(self) -> bool:
        """Whether it judges its work by other examples.

        If not, ``recover_`` refuses ``validation=``.
        """
        return False

    @abc.abstractmethod
    def recover_(self, job: Job) -> Outcome:
        """Change ``job.model`` in place and return what was done."""

    @property
    def settings(self) -> FrozenDict:
        """The settings as the report shows them."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return FrozenDict({field.name: getattr(self, field.name) for field in fields})
