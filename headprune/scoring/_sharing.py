"""Passes whose batches the processes share, and whose results a resumed call finds in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headprune.model.processes import Workers
from headprune.model.running import batch_size, to_device
from headprune.scoring._checks import DeferredChecks
from headprune.scoring._reading import BatchReader
from headprune.scoring._resume_cache import CachedRows, MakeRows, ResumableSums, ResumeCache
from headprune.scoring._rows import room


@dataclass(frozen=True)
class SharedPasses:
    """Passes over the data, by one process or by several.

    Args:
        reader: Reads the batches; every process reads all of them.
        workers: The processes; batch i belongs to process ``i % processes``.
        cache: What batches gave to an earlier call that was cut off.
        checks: Run before anything is written to the cache.
        device: Where the model takes its batches.
    """

    reader: BatchReader
    workers: Workers
    cache: ResumeCache
    checks: DeferredChecks
    device: torch.device

    def batches(
        self, what: str, into: ResumableSums | None = None, own_only: bool = False
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield ``(number, examples before it, batch on the model's device)`` for one pass.

        Args:
            what: What the pass is for.
            into: The sums that the batches are added to; batches that they hold are not yielded.
            own_only: Only the batches that belong to this process.
        """
        into = ResumableSums.of_nothing() if into is None else into
        n_before = 0
        into.begin_pass()
        # Every process reads all batches: for the digest of the data, and to count examples.
        for number, batch in self._read(what):
            is_own = not own_only or self._owns(number)
            if is_own and not into.holds(number, self._so_far):
                self.reader.given = batch
                yield number, n_before, to_device(batch, self.device)
                into.batch_added(self._so_far, self.checks.run)
            n_before += batch_size(batch)
        into.end_pass(self.reader.mark, self.checks.run)

    def rows(self, what: str, of_batch: MakeRows) -> Tensor:
        """Rows of all batches in the order of the data; see ``ScoringProblem.rows``."""
        cached = self.cache.rows(of_batch)

        def own_rows() -> dict[str, Tensor]:
            rows = {}
            for number, _, batch in self.batches(what, own_only=True):
                rows[str(number)] = self._rows_of(cached, number, batch)
            return rows

        return in_data_order(self.gathered(what, own_rows))

    def pieces(self, what: str, of_batch: MakeRows, width: int, keep: bool) -> Iterator[Tensor]:
        """Rows of some batches after the other; see ``ScoringProblem.pieces``."""
        reading = self._read(what)
        # An empty cache has every batch computed.
        cache = self.cache if keep else ResumeCache()
        cached = cache.rows(of_batch)
        more = True  # batches to read

        def own_rows() -> dict[str, Tensor]:
            nonlocal more
            rows: dict[str, Tensor] = {}
            n_bytes = 0  # of the rows of all processes, so that all of them end a piece together
            for number, batch in reading:
                if self._owns(number):
                    self.reader.given = batch
                    on_device = to_device(batch, self.device)
                    rows[str(number)] = self._rows_of(cached, number, on_device)
                n_bytes += 8 * width * batch_size(batch)
                if n_bytes > room() // 8:
                    return rows
            more = False
            return rows

        while more:
            parts = self.gathered(what, own_rows)
            # The last piece is empty where the one before ended with the data.
            if any(parts):
                yield in_data_order(parts)

    def gathered(
        self, what: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> list[Mapping[str, Tensor]]:
        """The tensors that every process makes of its batches, by rank.

        Raises:
            InvalidValue: the processes have read other data.
            ProcessFailed: a process failed or ended.
        """
        parts = self.workers.exchanged(make)
        hint = (
            "Give every process all batches in one order: no DistributedSampler, and the same"
            " shuffling."
        )
        read = f"{what}: {self.reader.data}"
        self.workers.agree("batches", "the same in every process", read, hint)
        return parts

    def _read(self, what: str) -> Iterator[tuple[int, Any]]:
        yield from self.reader.read(what)
        # Only a pass that was read to its end comes here.
        self.cache.last_pass = self.reader.mark

    def _owns(self, number: int) -> bool:
        return self.workers.owns(number - self.reader.before)

    def _rows_of(self, cached: CachedRows, number: int, batch: Any) -> Tensor:
        return cached(number, batch, self._so_far, self.checks.run)

    @property
    def _so_far(self) -> str:
        """Digest of the data of the last whole pass, and of all batches of this one."""
        return f"{self.cache.last_pass} {self.reader.mark}"


def in_data_order(parts: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Rows by the number of their batch, of all processes, one after the other; fp64 on the CPU."""
    by_number: dict[int, Tensor] = {}
    for part in parts:
        for name, rows in part.items():
            if name.isdigit():
                by_number[int(name)] = rows
    ordered = [by_number[number] for number in sorted(by_number)]
    devices = {rows.device for rows in ordered}
    if len(devices) > 1:  # rows from the resume cache are on the CPU
        ordered = [rows.cpu() for rows in ordered]
    # One copy of all: every copy waits for the accelerator.
    return torch.cat(ordered).cpu().double()


def summed(parts: Iterable[Mapping[str, Tensor]], name: str) -> Tensor:
    """The sum of one tensor over all processes; for one process the tensor itself."""
    first, *others = (part[name] for part in parts)
    return sum(others, first)
