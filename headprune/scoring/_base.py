"""What every scorer has in common: the problem it is given and the estimate it returns."""

from __future__ import annotations

import dataclasses
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from headprune.core.choice import Choice
from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.scores import CostTable
from headprune.model.batches import EMPTY, Batches
from headprune.model.costs import measure_costs
from headprune.model.judging import judged
from headprune.model.losses import Loss, check_finite, shaped_losses
from headprune.model.mistakes import explained, refuse_caches
from headprune.model.own_loss import is_default
from headprune.model.processes import Workers
from headprune.model.running import DataDigest, batch_size, device_of, some_examples, to_device
from headprune.model.sites import BoundSite
from headprune.scoring import _resume_cache
from headprune.scoring._later import Later
from headprune.scoring._resume_cache import Added, Kept, Shelf, Sums
from headprune.scoring._rows import room

#: Batches whose losses are looked at together.
_LOOK = 4096
#: Losses that a call is known by.
_SEEN = 16


@dataclass(frozen=True)
class Estimate:
    """Importance of every unit, flat over sites in model order.

    Args:
        values: ``[units]``, higher is more important.
        standard_errors: ``[units]``, or None where the scorer has none.
        n_examples: Examples that it rests on.
        seed: Of what was drawn, None where nothing was.
        samples: ``[rows, units]``, fp64 on the CPU: independent numbers whose mean has the sampling
            error of the values. One row an example in data order, whose mean is the values, where
            the formula is a mean over examples; else one row a block of examples (jackknife
            pseudo-values). None where nothing was sampled.
        notes: What the user should know: no standard error from one example, a fallback to a slower
            way.
        curvature: ``[units, units]``, symmetric, fp64 on the CPU, in the values' unit: the loss
            rises by ``1/2 (1-m)' I (1-m)``, so that half its diagonal are the values. None where
            the scorer has none.
        choice: How `auto` chose the scorer that the numbers are of; None where it was asked for by
            name.
    """

    values: Tensor
    standard_errors: Tensor | None = None
    n_examples: int = 0
    seed: int | None = None
    samples: Tensor | None = None
    notes: tuple[str, ...] = ()
    curvature: Tensor | None = None
    choice: Choice | None = None


@dataclass
class ScoringProblem:
    """A model, its sites and the data, as a scorer sees them; what several scorers need is computed
    once.

    Args:
        model: The model, in evaluation mode and with frozen weights.
        bound: Its sites.
        batches: The data; None where no scorer needs any.
        loss: Per-example loss.
        progress: Show a bar; None shows it on a terminal only.
        before: Batches of the user's that came before these, which are numbered after them.
        workers: The processes that share the batches.
        shelf: Where what batches give is kept, for a call that is cut off.
        notes: What the user should know about the loss and the model.
    """

    model: nn.Module
    bound: list[BoundSite]
    batches: Iterable[Any] | None
    loss: Loss
    progress: bool | None = None
    data: str | None = None
    costs: CostTable | None = None
    shared: dict[Any, Any] = field(default_factory=dict)
    before: int = 0
    workers: Workers = field(default_factory=Workers)
    shelf: Shelf = field(default_factory=Shelf)
    notes: tuple[str, ...] = ()
    examples: int = field(default=0, init=False)  # of the last whole pass
    _order: bytes | None = field(default=None, init=False)  # of a whole pass
    given: Any = field(
        default=None, init=False
    )  # the batch of the pass that runs, as the user gave it
    opening: Any = field(default=None, init=False)  # the first batch of a pass, as the user gave it
    _unseen: list[tuple[int, Tensor]] = field(default_factory=list, init=False)  # losses, by batch
    _looked: bool = field(
        default=False, init=False
    )  # whether the first losses of the pass were looked at
    _later: Later = field(default_factory=Later, init=False)  # what else is looked at with them
    _mark: str = field(default="", init=False)  # digest of all batches of a pass so far

    def __post_init__(self) -> None:
        if self.batches is not None:
            self.batches = Batches.of(self.batches)

    def judge(self, asked: bool = True) -> None:
        """Looks at the loss on the first batch, before any pass: the default one is to be the
        model's own.

        Args:
            asked: Whether somebody asks for losses, or for what they count.
        """
        if self.batches is not None:
            batch = self._first()
            refuse_caches(batch, 0)
            found = judged(self.model, self.loss, to_device(batch, device_of(self.model)), asked)
            self.loss, self.notes = found.loss, found.notes

    def losses(self, number: int, batch: Any) -> Tensor:
        """``[examples]``: the loss of a batch of ``passes``, which looks whether all are finite
        where it ends.

        A look waits for an accelerator, so there is one a pass, and one at its first loss, where
        most mistakes show; more in a pass of thousands of batches.

        Raises:
            InvalidValue: not one number an example; in the first batch, one that is not finite.
        """
        losses = shaped_losses(self.loss, self.model, batch, number)
        self.see(number, losses)
        return losses

    def see(self, number: int, losses: Tensor) -> None:
        """Has the losses ``[examples]`` of a batch looked at as those of ``losses`` are."""
        self._unseen.append((number, losses.detach()))
        if not self._looked or len(self._unseen) == _LOOK:
            self.look()

    def refuse_later(self, key: Any, failed: Tensor, error: Callable[[int], Exception]) -> None:
        """Raises an error where a batch has ``failed``, when the losses are looked at next.

        Args:
            key: What is tested, and at which site; of one key the first place is named.
            failed: Booleans of any shape, where they are.
            error: Makes the error of the first place that is True, counted flat.
        """
        self._later.refuse(key, failed, error)

    def look(self) -> None:
        """Looks at all that has not been looked at yet; waits for an accelerator.

        Raises:
            InvalidValue: a loss that is not finite, by batch and example.
            HeadPruneError: what ``refuse_later`` was given.
        """
        unseen, self._unseen, self._looked = self._unseen, [], True
        check_finite(unseen)
        self._later.check()

    def added(self, **sums: Sums) -> Added:
        """For a pass whose batches go into sums and nothing else: where the call was cut off, they
        hold what they held then, and the pass gives only the batches after that."""
        return self.shelf.added(sums)

    def passes(self, what: str, into: Added | None = None) -> Iterator[tuple[int, Any]]:
        """Yields ``(number, batch on the model's device)`` for one pass over the data, with a
        progress bar.

        All of it in every process, so that whatever is made of it needs no exchange; ``share``,
        ``rows`` and ``pieces`` are faster.

        Args:
            what: What it is for, in words.
            into: What the batches are ``added`` to, if that is all that is made of them.

        Raises:
            InvalidValue: no data was given, there is no batch in it, an earlier pass gave other
                batches, or one of the ``losses`` is not finite.
        """
        device = device_of(self.model)
        for number, batch in self._into(into, self._read(what)):
            if into is None or not into.holds(number, self._so_far):
                self.given = batch
                yield number, to_device(batch, device)
                if into is not None:
                    into.done(self._so_far, self.look)

    def share(self, what: str, into: Added | None = None) -> Iterator[tuple[int, int, Any]]:
        """Yields ``(number, examples before it, batch)`` of this process's batches; see ``passes``.

        What is made of them is only a part: bring the parts of all processes together with
        ``gathered``.
        """
        device, first = device_of(self.model), 0
        for number, batch in self._into(into, self._read(what)):
            if self.workers.owns(number - self.before) and (
                into is None or not into.holds(number, self._so_far)
            ):
                self.given = batch
                yield number, first, to_device(batch, device)
                if into is not None:
                    into.done(self._so_far, self.look)
            first += batch_size(batch)

    def _into(
        self, into: Added | None, batches: Iterator[tuple[int, Any]]
    ) -> Iterator[tuple[int, Any]]:
        """The batches of a pass, at whose ends sums are told of it."""
        if into is not None:
            into.begin()
        yield from batches
        if into is not None:
            into.end(self._mark, self.look)

    def rows(
        self, what: str, of_batch: Callable[[int, Any], Tensor] | _resume_cache.Rows
    ) -> Tensor:
        """``[examples, ...]``, fp64 on the CPU: what ``of_batch(number, batch)`` gives, in the
        order of the data.

        The processes share the batches, and what was kept is not made again, so that the rows must
        be all that it does and depend on the batch alone; one that does more says what
        (``_resume_cache.Rows``).
        """

        kept = self.shelf.rows(of_batch)

        def own() -> dict[str, Tensor]:
            return {
                str(number): self._kept(kept, number, batch)
                for number, _, batch in self.share(what)
            }

        return in_data_order(self.gathered(what, own))

    def pieces(
        self, what: str, of_batch: Callable[[int, Any], Tensor], width: int, keep: bool = True
    ) -> Iterator[Tensor]:
        """``rows`` of so many numbers each, a piece after the other, so that they need not all be
        in memory.

        The pieces are the same whatever the number of processes, which exchange what they have
        after each. Where the rows are not all that ``of_batch`` makes, ``keep`` must be False.
        """
        device, reading, more = device_of(self.model), self._read(what), True
        kept = (self.shelf if keep else Shelf()).rows(of_batch)

        def own() -> dict[str, Tensor]:
            nonlocal more
            held, size = {}, 0
            for number, batch in reading:
                if self.workers.owns(number - self.before):
                    self.given = batch
                    held[str(number)] = self._kept(kept, number, to_device(batch, device))
                size += 8 * width * batch_size(batch)
                if size > room() // 8:
                    return held
            more = False
            return held

        while more:
            parts = self.gathered(what, own)
            if any(parts):
                yield in_data_order(parts)

    def _kept(self, kept: Kept, number: int, batch: Any) -> Tensor:
        return kept(number, batch, self._so_far, self.look)

    @property
    def _so_far(self) -> str:
        """Digest of the data of the last whole pass, and of all batches of this one."""
        return f"{self.shelf.whole} {self._mark}"

    def gathered(
        self, what: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> list[Mapping[str, Tensor]]:
        """The tensors that ``make`` makes of a ``share``, of all processes by rank.

        Raises:
            InvalidValue: the processes have read other data.
            ProcessFailed: one failed or is gone.
        """
        parts = self.workers.exchanged(make)
        hint = (
            "Give every process all batches in one order: no sampler that deals them out, no"
            " shuffling of its own."
        )
        self.workers.agree("batches", "the same in every process", f"{what}: {self.data}", hint)
        return parts

    def _read(self, what: str) -> Iterator[tuple[int, Any]]:
        """One pass over the data as it was given: what ``passes`` says."""
        if self.batches is None:
            raise InvalidValue("batches", f"given, because {what} needs data", None)
        digest = DataDigest()
        self._looked = False
        order = (
            bytearray()
        )  # of the digest of all batches so far, after each, eight bytes: there may be millions
        disable = None if self.progress is None else not self.progress
        total = operator.length_hint(self.batches) or None
        # tqdm.auto asks for an iterator of its own, and a DataLoader starts its workers for each:
        # give it one.
        bar = tqdm(iter(self.batches), desc=what, total=total, disable=disable, leave=False)
        examples = 0
        for count, batch in enumerate(bar, self.before):
            examples += batch_size(batch, f"batch {count}")
            refuse_caches(batch, count)
            self.opening = batch if count == self.before else self.opening
            digest.add(batch)
            order += digest.short()
            self._mark = order[-8:].hex()
            if self._order is not None and self._order[len(order) - 8 : len(order)] != order[-8:]:
                raise _other_batches(what, f"others from batch {count} on")
            yield count, batch
        self.look()
        if not order:
            raise InvalidValue(*EMPTY)
        if self._order is not None and len(order) < len(self._order):
            raise _other_batches(what, f"{len(order) // 8} batches after {len(self._order) // 8}")
        self.data, self._order, self.examples = digest.hexdigest(), bytes(order), examples
        self.shelf.whole = self._mark

    def measure(self) -> None:
        """Measures what the model costs on the first example; on the first batch where it takes no
        single example."""
        if self.batches is None:
            return
        first = self._first()
        refuse_caches(first, 0)
        loss = None if is_default(self.loss) else self.loss
        one = (
            None if any(b.layout.batch_axis for b in self.bound) else some_examples(first, slice(1))
        )
        if one is not None:
            try:
                self.costs = measure_costs(self.model, self.bound, one, loss)
                return
            except (
                Exception
            ):  # what is wrong with the batch itself shows again below, as the user gave it  # nosec B110
                pass
        self.costs = measure_costs(self.model, self.bound, first, loss)

    def seen(self) -> list[float]:
        """Losses of the first examples, which tell a call from one with other gates, precision or
        loss; none where the batches have no labels for the loss."""
        if self.batches is None:
            return []
        first, devices = (
            to_device(self._first(), device_of(self.model)),
            range(torch.cuda.device_count()),
        )
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                found = self.loss(self.model, first)
            return [float(x) for x in found.detach().double().flatten()[:_SEEN]]
        except Exception:  # whatever is wrong shows again, where it is needed  # nosec B110
            return []

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors in the block say on which batch they were, and what is wrong with it where that is
        known."""
        with explained(
            self.model, Batches.of(self.batches) if self.batches is not None else None, self.before
        ):
            yield

    def _first(self) -> Any:
        """The first batch, which stays the first."""
        assert self.batches is not None
        return Batches.of(self.batches).first()

    def keep(self) -> None:
        """Makes the data of an iterator readable more than once."""
        if self.batches is not None:
            Batches.of(self.batches).keep()


def in_data_order(parts: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Rows by the number of their batch, of all processes, one after the other; fp64 on the CPU."""
    by_number = {int(name): rows for part in parts for name, rows in part.items() if name.isdigit()}
    rows = [by_number[number] for number in sorted(by_number)]
    if len({r.device for r in rows}) > 1:  # some were kept in a folder
        rows = [r.cpu() for r in rows]
    return torch.cat(rows).cpu().double()  # once: every copy waits for the accelerator


def added(parts: Iterable[Mapping[str, Tensor]], name: str) -> Tensor:
    """The sum of one tensor of all processes; the only process's own as it is."""
    first, *others = (part[name] for part in parts)
    return sum(others, first)


class Scorer(ABC):
    """A way to measure importance; subclasses are frozen dataclasses of their settings."""

    needs_data: ClassVar[bool] = True
    #: Whether it asks for losses, or goes by the tokens that count in them; if not, labels may be
    #: missing or anything.
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

    @abstractmethod
    def estimate(self, problem: ScoringProblem) -> Estimate:
        """Importance of every unit of the problem's sites."""


def _other_batches(what: str, got: str) -> InvalidValue:
    """Rows of one example would be put together with those of another."""
    hint = "Pass a list, or a DataLoader that does not shuffle or augment."
    return InvalidValue(
        "batches",
        "the same in every pass, in the same order",
        f"{got} in the pass for {what}",
        hint,
    )


def one_of(where: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuses a setting that is not one of the allowed words."""
    if value not in allowed:
        raise InvalidValue(where, "one of " + ", ".join(allowed), repr(value))
