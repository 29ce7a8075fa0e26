"""RunRecord: everything that a run did and measured, and the machine it ran on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headprune.core.codec import EMPTY, LATER, FrozenDict, Value
from headprune.core.display import clean, rich_table
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadCounts
from headprune.core.plan import PruningPlan
from headprune.core.scores import HeadScores

if TYPE_CHECKING:
    from rich.console import Group
    from typing_extensions import Self

# Headers of the tables that a terminal shows.
_QUALITY_COLUMNS = ("model", "heads", "rows", "metric", "value", "spread", "draws")
_SPEED_COLUMNS = ("batch", "tokens", "as fast", "95 % interval")

Status = Literal["running", "done", "failed", "interrupted"]


@dataclass(frozen=True)
class QualityRow:
    """One line of the accuracy table.

    Args:
        name: What was evaluated: ``base``, ``taylor``, ``random``, ``recovered (finetune)``.
        kept_heads: Heads of the evaluated model.
        metric: ``accuracy``, ``matthews``, ``perplexity``, ``loss``, ``mse``, ``f1`` or ``bleu``.
        value: The metric on ``split``; the mean over draws.
        split: Which rows it was measured on: ``test`` or ``validation``.
        n_examples: How many of them.
        loss: Mean per-example loss.
        draws: Number of random draws behind the row.
        spread: Standard deviation over the draws.
        trained: Whether the model was trained after the cut.
        kept_neurons: Neurons of the evaluated model, where feed-forwards may be cut.
        low, high: 95 % interval of the value over rows; None where it was not computed.
    """

    name: str
    kept_heads: int
    metric: str
    value: float
    split: str
    n_examples: int
    loss: float
    draws: int = 1
    spread: float | None = None
    trained: bool = False
    low: float | None = field(default=None, metadata=LATER)
    high: float | None = field(default=None, metadata=LATER)
    kept_neurons: int | None = field(default=None, metadata=LATER)

    @property
    def kept(self) -> HeadCounts:
        """Heads and neurons of the evaluated model."""
        return HeadCounts(self.kept_heads, self.kept_neurons)


@dataclass(frozen=True)
class Comparison:
    """Two models on the same rows: how much more the first one loses.

    Args:
        name: The model, as in the accuracy table.
        against: What it is compared with: ``base`` or ``random``.
        metric: The metric.
        split: Which rows.
        n_examples: How many of them.
        drop: See ``headprune.core.metrics.drop``; above 0 the first model is worse.
        low, high: 95 % interval by the paired bootstrap over rows and, for ``random``, draws.
    """

    name: str
    against: str
    metric: str
    split: str
    n_examples: int
    drop: float
    low: float
    high: float


@dataclass(frozen=True)
class ClassRow:
    """Test rows of one class, and how many of them two models get right.

    Args:
        label: The class.
        n_examples: Rows with this label.
        before: How many the uncut model gets right.
        after: How many the final model gets right.
    """

    label: str
    n_examples: int
    before: int
    after: int


@dataclass(frozen=True)
class SpeedRow:
    """One line of the speed table: both models, timed in turn in one process.

    Args:
        batch: Examples per call.
        length: Tokens per example.
        original_p50, original_p90, pruned_p50, pruned_p90: Seconds per call.
        ratio: Median of the paired ratios original / pruned; above 1 the pruned model is faster.
        low, high: 95 % bootstrap interval of that median.
        rounds: Timed calls of each.
    """

    batch: int
    length: int
    original_p50: float
    original_p90: float
    pruned_p50: float
    pruned_p90: float
    ratio: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class SizeRow:
    """A size before and after: parameters, MACs, KV-cache bytes per token, or heads."""

    name: str
    original: float
    pruned: float


@dataclass(frozen=True)
class Proof:
    """The check that the cut model equals the gated one.

    Args:
        what: What was compared: ``logits``, ``generation``.
        max_difference: Largest absolute difference of any output.
        scale: Largest absolute output of the gated model.
        tolerance: Largest allowed difference.
        dtype: Of the model.
        n_examples: Examples compared.
    """

    what: str
    max_difference: float
    scale: float
    tolerance: float
    dtype: str
    n_examples: int


@dataclass(frozen=True)
class RunRecord(Value):
    """One run, machine-readable.

    It is written again after every stage, so that the record of a broken run shows its last stage.

    Args:
        name: The recipe's name.
        status: running, done, failed or interrupted.
        stage: The last stage that was begun.
        created: Start, ISO 8601, UTC.
        recipe: The resolved recipe.
        versions: Of Python and of the libraries.
        hardware: Processor, threads, memory, accelerator.
        git_commit: Of the working directory, if it is a checkout.
        seeds: Every seed that was used.
        rows: Which data rows each step used.
        scores: The scores that the plan rests on.
        plan: What was cut.
        quality: Quality of every choice of heads, by split.
        speed: Times of the whole and the cut model, by batch and length.
        size: Heads, parameters, multiply-adds and cache, before and after.
        proofs: Comparisons of the cut model with the gated one.
        timings: Seconds per stage.
        warnings: Messages for the reader.
        metrics: Other measurements.
        error: Why it stopped, if it did.
        comparisons: Rows of ``quality`` compared on the same examples.
        classes: Results per class, for classification.
    """

    # How far the run came.
    name: str
    status: Status
    stage: str
    created: str
    # Everything that another run needs to repeat it.
    recipe: FrozenDict = EMPTY
    versions: FrozenDict = EMPTY
    hardware: FrozenDict = EMPTY
    git_commit: str | None = None
    seeds: FrozenDict = EMPTY
    rows: FrozenDict = EMPTY
    # Results.
    scores: HeadScores | None = None
    plan: PruningPlan | None = None
    quality: tuple[QualityRow, ...] = ()
    speed: tuple[SpeedRow, ...] = ()
    size: tuple[SizeRow, ...] = ()
    proofs: tuple[Proof, ...] = ()
    # What happened on the way.
    timings: FrozenDict = EMPTY
    warnings: tuple[str, ...] = ()
    metrics: FrozenDict = EMPTY
    error: str | None = None
    comparisons: tuple[Comparison, ...] = field(default=(), metadata=LATER)
    classes: tuple[ClassRow, ...] = field(default=(), metadata=LATER)

    def compared(self, name: str, against: str, metric: str, split: str) -> Comparison | None:
        """Find the comparison of a row of ``quality``; None where there is none."""
        for row in self.comparisons:
            if (row.name, row.against, row.metric, row.split) == (name, against, metric, split):
                return row
        return None

    def __post_init__(self) -> None:
        # Type checkers see Literal; a file may hold any text.
        if self.status not in ("running", "done", "failed", "interrupted"):
            must = "running, done, failed or interrupted"
            raise InvalidValue("RunRecord.status", must, repr(self.status))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote; the scores' samples are read when they are first needed."""
        record = super().load(path)
        if record.scores is None:
            return record
        return replace(record, scores=record.scores.stored_with(path))

    @property
    def title(self) -> str:
        return f"RunRecord {self.name}: {self.status} at {self.stage}, {self.created}"

    def __str__(self) -> str:
        lines = [self.title]
        # One draw has no spread.
        for row in self.quality:
            spread = "" if row.spread is None else f" ± {row.spread:.4f} ({row.draws} draws)"
            lines.append(
                f"  {row.name:<28} {_kept_words(row)}  {row.split} {row.metric}"
                f" {row.value:.4f}{spread}"
            )
        for speed in self.speed:
            interval = f"{speed.ratio:.2f}x [{speed.low:.2f}, {speed.high:.2f}]"
            lines.append(f"  batch {speed.batch:>4} x {speed.length:>4} tokens: {interval}")
        return "\n".join([*lines, *self._last_lines()])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        # Rich breaks long cells; the plain form above keeps one line per row.
        parts: list[Any] = [Text(clean(self.title), style="bold")]
        if self.quality:
            parts.append(rich_table("", _QUALITY_COLUMNS, map(_quality_cells, self.quality)))
        if self.speed:
            parts.append(rich_table("", _SPEED_COLUMNS, map(_speed_cells, self.speed)))
        last = self._last_lines()
        if last:
            parts.append(Text(clean("\n".join(last))))
        return Group(*parts)

    def _last_lines(self) -> list[str]:
        """Lines after quality and speed: proofs, and why the run stopped."""
        lines = []
        for proof in self.proofs:
            limits = f"<= {proof.max_difference:.2e} (allowed {proof.tolerance:.2e})"
            lines.append(f"  {proof.what}: |gated - pruned| {limits}")
        if self.error:
            lines.append(f"  error: {self.error}")
        return lines


def _kept_words(row: QualityRow) -> str:
    words = f"{row.kept_heads:>4} heads"
    return words if row.kept_neurons is None else f"{words} {row.kept_neurons:>7,} neurons"


def _quality_cells(row: QualityRow) -> tuple[str, ...]:
    spread, draws = "", ""
    if row.spread is not None:
        spread, draws = f"± {row.spread:.4f}", str(row.draws)
    value = f"{row.value:.4f}"
    kept = str(row.kept_heads)
    if row.kept_neurons is not None:
        kept += f", {row.kept_neurons:,} neurons"
    return (row.name, kept, row.split, row.metric, value, spread, draws)


def _speed_cells(row: SpeedRow) -> tuple[str, ...]:
    interval = f"[{row.low:.2f}, {row.high:.2f}]"
    return (str(row.batch), str(row.length), f"{row.ratio:.2f}x", interval)
