"""What every recovery is given (Job), what it is (Recovery), and what it answers (Outcome,
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
    from headprune.model.cut import Undo  # imports torch, which settings do without

    return Undo()


@dataclass(frozen=True)
class Job:
    """A model to recover, and with what.

    Args:
        model: The model, out of ``torch.compile``'s wrapper; changed in place.
        batches: The data.
        teacher: The unpruned original, if the method needs one.
        loss: Per-example loss; None is the default loss.
        sites: Where the heads are; None finds them.
        progress: Show a progress bar.
        validation: Data to judge the training by, if the method does.
        folder: Where a method that ``resumes`` keeps its checkpoint.
        leave_checkpoint: Whether it leaves one of its end there.
        part: Steps that were done before and steps in all, where this is one part of a longer
            training: it says where its learning rate begins.
        undo: Puts the model back on an error; it has the modules, and a method gives it every
            tensor (``keep``) whose numbers it changes in place.
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
    """What a recovery did.

    Args:
        changed: Qualified names of the parameters that it changed or added.
        n_examples: Examples that it saw: repeats counted in training, else those of one pass.
        metrics: Numbers of its own, JSON data.
        notes: What a user should know.
    """

    changed: tuple[str, ...]
    n_examples: int
    metrics: Mapping[str, Any] = field(default_factory=FrozenDict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecoveryReport(Value):
    """What ``recover_`` did.

    Args:
        method: Registered name of the method.
        settings: Its settings.
        changed: Qualified names of the parameters that were changed or added.
        n_examples: Examples that were seen: repeats counted in training, else those of one pass.
        seconds: How long it took.
        metrics: The method's own numbers: ``steps`` and final mean ``loss`` of training; without
            training, ``heads`` made good for, and of each output projection from the first cut on,
            by name, ``errors`` ``before`` and ``after``: ``sum |T - S|² / sum |A - mean A|²`` over
            tokens, with T and S the teacher's and the model's stream after it and A what the
            teacher's writes. ``error_before`` and ``error_after`` are their means.
        notes: What a user should know.
    """

    method: str
    settings: FrozenDict
    changed: tuple[str, ...]
    n_examples: int
    seconds: float
    metrics: FrozenDict = EMPTY
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        single = {k: v for k, v in self.metrics.items() if not isinstance(v, Mapping)}
        numbers = [
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in single.items()
        ]
        seen = (
            f"{len(self.changed)} parameters changed, {self.n_examples} examples,"
            f" {self.seconds:.1f} s"
        )
        return "\n  ".join([f"{self.method}: {', '.join([seen, *numbers])}", *self.notes])


class Recovery(abc.ABC):
    """Wins back what a cut cost. A concrete one is a frozen dataclass of its settings, which are
    JSON data."""

    #: Whether it trains; one that does not runs models through ``loss`` only where a batch is not
    #: their arguments.
    trains: ClassVar[bool] = False

    #: Whether it can keep checkpoints in a folder and continue from them.
    resumes: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def needs_teacher(self) -> bool:
        """Whether it reads the unpruned original; one that does not refuses ``teacher=``."""

    @property
    def needs_validation(self) -> bool:
        """Whether it judges its work by other examples; one that does not refuses
        ``validation=``."""
        return False

    @abc.abstractmethod
    def recover_(self, job: Job) -> Outcome:
        """Changes ``job.model`` in place and says how."""

    @property
    def settings(self) -> FrozenDict:
        """The settings as they are written into the report."""
        return FrozenDict({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})  # type: ignore[arg-type]
