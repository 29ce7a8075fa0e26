"""What every scorer has in common: the problem it is given and the estimate it returns."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headprune.core.choice import Choice
from headprune.core.codec import FrozenDict
from headprune.core.ladders import SiteLadder
from headprune.core.scores import Bundling, CostTable
from headprune.model.batches import Batches
from headprune.model.costs import measure_costs
from headprune.model.judging import judged
from headprune.model.losses import Loss, shaped_losses
from headprune.model.mistakes import explained, refuse_caches
from headprune.model.own_loss import is_default
from headprune.model.processes import Workers
from headprune.model.running import device_of, some_examples, to_device
from headprune.model.sites import BoundSite
from headprune.scoring._checks import DeferredChecks
from headprune.scoring._reading import BatchReader
from headprune.scoring._resume_cache import MakeRows, ResumableSums, ResumeCache, Sums
from headprune.scoring._shared_values import SharedValues
from headprune.scoring._sharing import SharedPasses

#: Losses of the first batch that a call is recognised by.
_N_FIRST_LOSSES = 16


@dataclass(frozen=True)
class Estimate:
    """Importance of every unit, flat over sites in model order.

    Args:
        values: ``[units]``, higher is more important.
        standard_errors: ``[units]``, or None where the scorer has none.
        n_examples: Number of examples read.
        seed: Seed of the random draws; None without any.
        samples: ``[rows, units]``, fp64 on the CPU: independent numbers whose mean has the sampling
            error of the values. Where the formula is a mean over examples: one row per example in
            data order, whose mean is the values. Else one row per block of examples (jackknife
            pseudo-values). None where nothing was sampled.
        notes: What the user should know: no standard error from one example, a fallback to a slower
            way.
        curvature: ``[units, units]``, symmetric, fp64 on the CPU, in the values' unit: the loss
            rises by ``1/2 (1-m)' I (1-m)``, so that half its diagonal are the values. None where
            the scorer has none.
        choice: How `auto` chose the scorer; None where the user named it.
        ladders: For every site, the measured price of keeping fewer units; None where the scorer
            measures none.
        bundling: How scores of neurons in one bundle combine: ``sum``, ``mean`` or ``norm``.
    """

    values: Tensor
    standard_errors: Tensor | None = None
    n_examples: int = 0
    seed: int | None = None
    samples: Tensor | None = None
    notes: tuple[str, ...] = ()
    curvature: Tensor | None = None
    choice: Choice | None = None
    ladders: tuple[SiteLadder, ...] | None = None
    bundling: Bundling = "sum"


class Scorer(ABC):
    """A way to measure importance; subclasses are frozen dataclasses of their settings."""

    needs_data: ClassVar[bool] = True
    #: Whether it reads losses, or which tokens count in them. Without that, labels may be missing
    #: or anything.
    reads_loss: ClassVar[bool] = True

    @property
    def settings(self) -> FrozenDict:
        """The settings as JSON data."""
        assert dataclasses.is_dataclass(self)
        return FrozenDict(dataclasses.asdict(self))

    @property
    def by_example(self) -> bool:
        """Whether an example's row depends on that example alone, so that data may be read piece by
        piece."""
        return True

    @property
    def scores_neurons(self) -> bool:
        """Whether it can score the neurons of feed-forwards, which have no attention maps."""
        return True

    @abstractmethod
    def estimate(self, problem: ScoringProblem) -> Estimate:
        """Importance of every unit of the problem's sites."""


@dataclass
class ScoringProblem:
    """A model, its sites and the data, as a scorer sees them.

    Args:
        model: The model, in evaluation mode and with frozen weights.
        bound: Its sites.
        batches: The data; None where no scorer needs any.
        loss: ``(model, batch) -> Tensor[batch]``.
        progress: Show a bar; None shows it on a terminal only.
        costs: What the model costs; see ``measure_costs``.
        scorers: All scorers of the call; those that read the same share one pass.
        shared: What scorers compute once for all of them.
        before: Number of batches read before; errors number these batches after them.
        workers: The processes that share the batches.
        cache: Stored results of batches, from which a call that was stopped resumes.
        notes: What the user should know about the loss and the model.
    """

    model: nn.Module
    bound: list[BoundSite]
    batches: Iterable[Any] | None
    loss: Loss
    progress: bool | None = None
    costs: CostTable | None = None
    scorers: tuple[Scorer, ...] = ()
    shared: SharedValues = field(default_factory=SharedValues)
    before: int = 0
    workers: Workers = field(default_factory=Workers)
    cache: ResumeCache = field(default_factory=ResumeCache)
    notes: tuple[str, ...] = ()
    reader: BatchReader = field(init=False)
    checks: DeferredChecks = field(default_factory=DeferredChecks, init=False)

    def __post_init__(self) -> None:
        if self.batches is not None:
            self.batches = Batches.of(self.batches)
        self.reader = BatchReader(self._batches, self.checks, self.progress, self.before)

    # What the last pass read.

    @property
    def given(self) -> Any:
        """The batch of the pass that runs, as the user gave it."""
        return self.reader.given

    @property
    def examples(self) -> int:
        """Examples of the last whole pass."""
        return self.reader.examples

    @property
    def data(self) -> str | None:
        """Digest of the batches of the last whole pass."""
        return self.reader.data

    @data.setter
    def data(self, digest: str) -> None:
        self.reader.data = digest

    # Losses, and checks that are made later.

    def losses(self, number: int, batch: Any) -> Tensor:
        """``[examples]``: the losses of a batch of ``passes``, to be checked where the pass ends.

        A check waits for an accelerator. So there is one at the first loss of a pass, where most
        mistakes show, and one at its end; more in a pass of thousands of batches.

        Raises:
            InvalidValue: not one number per example, or a loss of the first batch that is not
                finite.
        """
        losses = shaped_losses(self.loss, self.model, batch, number)
        self.checks.add_losses(number, losses)
        return losses

    def refuse_later(self, key: Any, failed: Tensor, error: Callable[[int], Exception]) -> None:
        """Raise an error where a batch has ``failed``, when the losses are checked next.

        Args:
            key: What is tested, and at which site; of one key the first place is named.
            failed: Booleans of any shape.
            error: Makes the error of the first place that is True, counted flat.
        """
        self.checks.refuse(key, failed, error)

    def run_checks(self) -> None:
        """Make all pending checks; this waits for an accelerator.

        Raises:
            InvalidValue: a loss that is not finite, by batch and example.
            Exception: an error that ``refuse_later`` was given.
        """
        self.checks.run()

    # Passes over the data.

    def resumable(self, **sums: Sums) -> ResumableSums:
        """Resume these sums where an interrupted call stopped.

        For a pass whose batches are added to these sums and used for nothing else. A resumed pass
        gives only the batches that the sums do not hold.
        """
        return self.cache.sums(sums)

    def passes(self, what: str, into: ResumableSums | None = None) -> Iterator[tuple[int, Any]]:
        """Yield ``(number, batch on the model's device)`` for one pass over the data.

        Every process gets all batches, so that nothing has to be exchanged; ``share``, ``rows`` and
        ``pieces`` are faster.

        Args:
            what: What the pass is for; shown at the progress bar.
            into: What the batches are ``added`` to, if they are used for nothing else.

        Raises:
            InvalidValue: no data was given, there is no batch in it, an earlier pass gave other
                batches, or one of the ``losses`` is not finite.
        """
        for number, _, batch in self._passes.batches(what, into):
            yield number, batch

    def share(self, what: str, into: ResumableSums | None = None) -> Iterator[tuple[int, int, Any]]:
        """Yield ``(number, examples before it, batch)`` of this process's batches; see ``passes``.

        Bring the results of all processes together with ``gathered``.
        """
        return self._passes.batches(what, into, own_only=True)

    def rows(self, what: str, of_batch: MakeRows) -> Tensor:
        """Rows ``[examples, ...]`` of all batches in the order of the data, fp64 on the CPU.

        The processes share the batches, and rows in the resume cache are not computed again. So
        they must depend on the batch alone, and ``of_batch`` must compute nothing else, unless it
        is a ``StatefulRows``.

        Args:
            what: What the pass is for.
            of_batch: From the number of a batch and the batch to its rows.
        """
        return self._passes.rows(what, of_batch)

    def cached(self, of_item: Callable[[int, Any], Tensor]) -> Callable[[int, Any], Tensor]:
        """Cache rows that belong to no batch, so that a resumed call does not compute them again.

        Call it after a whole pass over the data. Different items must have different numbers.
        """
        rows, mark = self.cache.rows(of_item), self.cache.last_pass
        return lambda number, item: rows(number, item, mark, self.checks.run)

    def pieces(
        self, what: str, of_batch: MakeRows, width: int, keep: bool = True
    ) -> Iterator[Tensor]:
        """Yield the ``rows`` piece by piece, so that they need not all be in memory.

        The pieces are the same for any number of processes, which exchange their rows after each.

        Args:
            what: What the pass is for.
            of_batch: From the number of a batch and the batch to its rows.
            width: Numbers per row.
            keep: False where ``of_batch`` computes more than the rows.
        """
        return self._passes.pieces(what, of_batch, width, keep)

    def gathered(
        self, what: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> list[Mapping[str, Tensor]]:
        """The tensors that ``make`` makes of a ``share``, of all processes by rank.

        Raises:
            InvalidValue: the processes have read other data.
            ProcessFailed: a process failed or ended.
        """
        return self._passes.gathered(what, make)

    @property
    def _passes(self) -> SharedPasses:
        device = device_of(self.model)
        return SharedPasses(self.reader, self.workers, self.cache, self.checks, device)

    # The first batch, before any pass.

    def choose_loss(self, asked: bool = True) -> None:
        """Choose the model's own loss where the default one is asked for, by the first batch.

        Args:
            asked: Whether a scorer reads losses, or which tokens count in them.
        """
        if self._batches is None:
            return
        batch = self._batches.first()
        refuse_caches(batch, 0)
        on_device = to_device(batch, device_of(self.model))
        judgement = judged(self.model, self.loss, on_device, asked)
        self.loss, self.notes = judgement.loss, judgement.notes

    def measure_costs(self) -> None:
        """Measure what the model costs, on the first example.

        Where the model takes no single example the first batch is measured.
        """
        if self._batches is None:
            return
        batch = self._batches.first()
        refuse_caches(batch, 0)
        loss = None if is_default(self.loss) else self.loss
        # With the batch as second axis, a slice of the first one is no example.
        example = None
        if not any(b.layout.batch_axis for b in self.bound):
            example = some_examples(batch, slice(1))
        if example is not None:
            try:
                self.costs = measure_costs(self.model, self.bound, example, loss)
                return
            except Exception:  # nosec B110
                # A mistake in the batch shows again below, where the batch is the user's.
                pass
        self.costs = measure_costs(self.model, self.bound, batch, loss)

    def first_losses(self) -> list[float]:
        """Losses of the first examples; none where the batches have no labels for the loss.

        They differ between calls with other gates, another precision or another loss.
        """
        if self._batches is None:
            return []
        batch = to_device(self._batches.first(), device_of(self.model))
        devices = range(torch.cuda.device_count())
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                losses = self.loss(self.model, batch)
            return [float(x) for x in losses.detach().double().flatten()[:_N_FIRST_LOSSES]]
        except Exception:  # nosec B110
            # A mistake shows again, where the losses are needed.
            return []

    def keep_batches(self) -> None:
        """Make the data of an iterator readable more than once."""
        if self._batches is not None:
            self._batches.keep()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add to errors in the block which batch they are about, and what is wrong with it where
        that is known."""
        with explained(self.model, self._batches, self.before):
            yield

    @property
    def _batches(self) -> Batches | None:
        return None if self.batches is None else Batches.of(self.batches)


def units_per_site(bound: Iterable[BoundSite]) -> list[int]:
    """The number of units of every site."""
    return [len(b.site.units) for b in bound]


def with_heads(bound: Iterable[BoundSite]) -> list[BoundSite]:
    """The sites that have heads: cuts may have removed all of a site's."""
    return [b for b in bound if b.site.heads]
