"""Latency tables: seconds of each attention at every number of heads, measured on cut copies."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import nn

from headprune.bench.latency import (
    TOKENS,
    check_seconds,
    no_collection,
    shaped_batch,
    synchronize,
)
from headprune.bench.recording import RecordedCall, fresh, recorded, tokens_of
from headprune.core.bars import bar
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.core.levels import level_widths
from headprune.model.cut import cut_
from headprune.model.running import batch_size as rows_in
from headprune.model.running import call, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, bind

_WARMUP = 2
_MIN_ROUNDS = 5
_MAX_ROUNDS = 500
# Calls shorter than so many seconds are timed several at a time, at most so many.
_BURST = 1e-3
_MAX_BURST = 20
# A note reports smoothing that moved an entry by more than this fraction.
_WORTH_SAYING = 0.1
# Fractions of the time for calls of the whole model, and of models with all sites cut.
_MODEL_SHARE = 0.25
_TOGETHER_SHARE = 0.25
# What sites save together is at most so many times more or less than alone: beyond is noise.
_MOST = 2.0

#: Seconds by number of heads; None where the site cannot have that number.
SecondsByHeads: TypeAlias = "Sequence[float | None]"


def latency_table(
    model: nn.Module,
    batch: Any,
    *,
    batch_size: int | None = None,
    length: int | None = None,
    sites: Iterable[AttentionSite] | None = None,
    seconds: float = 30.0,
    smooth: bool = True,
    progress: bool = False,
) -> LatencyTable:
    """Measure the seconds of each attention at every number of heads that it can be cut to.

    Each attention module and its cut copies are timed alone, in turn, on recorded inputs; an entry
    is the median. Then copies of the model with all attention cut to the fewest heads, and all
    feed-forwards, are timed beside the whole one, and the entries are scaled to what that saved. If
    they take longer in total than the whole model, they are scaled to it, with a note. Check the
    table's predictions with ``compare_latency``.

    Args:
        model: A model. If compiled, it runs uncompiled here.
        batch: Its input; with ``batch_size`` or ``length`` a mapping for ``shaped_batch``, which
            drops labels and padding.
        batch_size: Examples per call; default those of the batch.
        length: Tokens per example; default those of the batch.
        sites: Default ``find_sites``; they have the policies of shared key/value heads.
        seconds: About the total time; each measurement has at least 5 rounds.
        smooth: Make rows non-decreasing. False keeps real steps of kernels.
        progress: Show a progress bar.

    Raises:
        UnsupportedModel: an attention that the batch does not run, or that cannot be cut.
        InvalidValue: a wrong batch, length or time.

    >>> from headprune import MultiHeadAttention
    >>> table = latency_table(
    ...     nn.Sequential(MultiHeadAttention(8, 4)), torch.randn(2, 5, 8), seconds=0
    ... )
    >>> len(table.row("0")), table.batch_size, table.length
    (5, 2, 5)
    """
    check_seconds("latency_table(seconds=)", seconds)
    bound = bind(model, sites)
    device = device_of(model)
    inputs = to_device(_shaped(batch, batch_size, length), device)

    # 1. Measure. Modules that are built alike and got inputs of equal shape share a measurement.
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        stack.enter_context(torch.inference_mode())
        calls = recorded(model, bound, inputs)
        kinds = _kinds(calls)
        clock = _Clock(device, seconds, len(kinds))
        measured: dict[Any, SecondsByHeads] = {}
        for key, one in bar(kinds.items(), "latency table", progress):
            # The whole model before, between and after the modules, so that drift affects both.
            clock.time_whole(lambda: call(model, inputs))
            measured[key] = clock.time_site(model, one)
        clock.time_whole(lambda: call(model, inputs))
        saved = clock.time_savings(model, bound, inputs)

    # 2. Smooth each kind, then add up the calls of each site.
    rows = dict(measured)
    if smooth:
        rows = {key: _smoothed(row) for key, row in measured.items()}
    # A module that runs several times in a pass counts as often.
    table = []
    for name, of_site in calls.items():
        of_calls = [rows[key] for key, _ in of_site]
        neurons = of_site[0][1].bound.site.is_feed_forward
        table.append(SiteLatency(name, _sum(of_calls), neurons))

    # 3. Scale to the whole model. Alone, modules find their weights in a processor's cache more
    # easily than in the model, or pay more for each call.
    whole = statistics.median(clock.whole)
    factors = [_factor(table, row, saved, whole) for row in table]
    table = [
        replace(row, seconds=_scaled(row.seconds, factor))
        for row, factor in zip(table, factors, strict=True)
    ]
    total = math.fsum(row.seconds[-1] or 0.0 for row in table)
    if total > whole:
        table = [replace(row, seconds=_scaled(row.seconds, whole / total)) for row in table]
    return LatencyTable(
        whole=whole,
        sites=tuple(table),
        batch_size=rows_in(inputs),
        length=length or max(tokens_of(one) for one in kinds.values()),
        device=_in_words(device),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        notes=tuple(_notes(measured, rows, total, whole)),
    )


def _kinds(calls: Mapping[str, list[tuple[Any, RecordedCall]]]) -> dict[Any, RecordedCall]:
    """Return one call of each kind."""
    kinds: dict[Any, RecordedCall] = {}
    for of_site in calls.values():
        kinds.update(of_site)
    return kinds


def _shaped(batch: Any, size: int | None, length: int | None) -> Any:
    if size is None and length is None:
        return batch
    if not isinstance(batch, Mapping):
        must = "a mapping, to be given another size"
        raise InvalidValue("latency_table(batch=)", must, type(batch).__name__)
    if length is not None and not any(name in batch for name in TOKENS):
        must = f"left out for a batch without any of {', '.join(TOKENS)}, whose length is its own"
        raise InvalidValue("latency_table(length=)", must, length)
    if size is None:
        size = rows_in(batch)
    return shaped_batch(batch, size, length)


def _keeps(site: AttentionSite) -> list[tuple[int, ...]]:
    """Return one choice of kept heads for every number of heads that the policy allows.

    Of neurons, only numbers that a selector chooses from.
    """
    if site.is_feed_forward:
        return [site.heads[:count] for count in level_widths(len(site.heads))]
    # Whole groups one after another; or single heads spread over all groups. A choice that empties
    # groups is somewhat faster than the table says.
    order: list[int] = []
    for units in site.units if site.policy == "group" else zip_longest(*site.groups):
        order += [head for head in units if head is not None]
    first = [order[:count] for count in range(len(order) + 1)]
    return [tuple(sorted(keep)) for keep in first if _allowed(site, keep)]


def _fewest(site: AttentionSite) -> tuple[int, ...]:
    """Return the fewest heads or neurons, at least one, that a cut may keep."""
    allowed = [keep for keep in _keeps(site) if len(keep) >= max(1, site.least)]
    return min(allowed, key=len, default=site.heads)


def _allowed(site: AttentionSite, keep: Sequence[int]) -> bool:
    try:
        site.check(keep)
    except InvalidValue:
        return False
    return True


def _variants(model: nn.Module, b: BoundSite) -> dict[int, nn.Module]:
    """Return the module with every number of heads that it can have: copies that are really cut."""
    # Together about (n + 1) / 2 times the weights of the module of n heads.
    variants: dict[int, nn.Module] = {}
    for keep in _keeps(b.site):
        if len(keep) == len(b.site.heads):
            variants[len(keep)] = b.module
            continue
        if len(keep) < b.site.least:
            continue  # a layer that must keep a head
        name = b.site.name
        mask = HeadMask.from_keep({name: keep}, {name: b.site.n_query_heads})
        # Cut the module in place, copy it, and undo the cut.
        undo = cut_(model, [b], mask)
        try:
            variants[len(keep)] = copy.deepcopy(b.module)
        finally:
            undo.restore()
    return variants


def _cut_copy(model: nn.Module, bound: Sequence[BoundSite]) -> nn.Module | None:
    """Return a copy with the fewest heads at these sites; None where there is none."""
    keep, sizes = {}, {}
    for b in bound:
        keep[b.site.name] = _fewest(b.site)
        sizes[b.site.name] = b.site.n_query_heads
    if all(len(kept) == sizes[name] for name, kept in keep.items()):
        return None
    undo = cut_(model, bound, HeadMask.from_keep(keep, sizes))
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError):  # a model that cannot be copied
        return None
    finally:
        undo.restore()


#: Prepares a call; only the call that it returns is timed.
_Ready: TypeAlias = Callable[[], Callable[[], Any]]


@dataclass
class _Clock:
    """Times a model and its modules within a total time.

    Args:
        device: Of the model.
        seconds: The total time.
        n_kinds: Different modules to time.
        whole: Seconds of all calls of the whole model.
    """

    device: torch.device
    seconds: float
    n_kinds: int
    whole: list[float] = field(default_factory=list)

    def time_whole(self, run: Callable[[], Any]) -> None:
        times = self._rounds([_always(run)], self.seconds * _MODEL_SHARE / (self.n_kinds + 1))
        self.whole += times[:, 0].tolist()

    def time_site(self, model: nn.Module, recorded_call: RecordedCall) -> SecondsByHeads:
        """Return the median seconds by number of heads."""
        variants = _variants(model, recorded_call.bound)
        seconds = self.seconds * (1 - _MODEL_SHARE - _TOGETHER_SHARE) / self.n_kinds
        ready = [partial(_ready, module, recorded_call) for module in variants.values()]
        times = self._rounds(ready, seconds)  # [rounds, variants]
        # Index: number of kept heads.
        row: list[float | None] = [None] * (len(recorded_call.bound.site.heads) + 1)
        for count, median in zip(variants, np.median(times, axis=0).tolist(), strict=True):
            row[count] = median
        if recorded_call.bound.site.is_feed_forward:
            return _above_none(row)
        return row

    def time_savings(
        self, model: nn.Module, bound: Sequence[BoundSite], inputs: Any
    ) -> dict[bool, float]:
        """Return the fraction of the model's time that all attention saves when it is cut to the
        fewest heads, by False, and all feed-forwards with the fewest neurons, by True.

        Where a model has both, the fractions add up to what both save together. A kind that cannot
        be cut, or a model that cannot be copied, has no entry.
        """
        # 1. A copy with each kind cut, and one with both.
        kinds: list[bool] = []
        small: list[nn.Module] = []
        for neurons in (False, True):
            copied = _cut_copy(model, [b for b in bound if b.site.is_feed_forward is neurons])
            if copied is not None:
                kinds.append(neurons)
                small.append(copied)
        both = _cut_copy(model, bound) if len(kinds) == 2 else None
        if both is not None:
            small.append(both)
        if not small:
            return {}

        # 2. Time them beside the model.
        ready = [_always(partial(call, one, inputs)) for one in (model, *small)]
        times = self._rounds(ready, self.seconds * _TOGETHER_SHARE)  # [rounds, models]
        saved = np.median(1 - times[:, 1:] / times[:, :1], axis=0).tolist()
        by_kind = dict(zip(kinds, saved, strict=False))
        total = sum(by_kind.values())
        if both is not None and total > 0:
            by_kind = {kind: part * saved[-1] / total for kind, part in by_kind.items()}
        return by_kind

    def _rounds(self, ready: Sequence[_Ready], seconds: float) -> NDArray[np.float64]:
        """Time functions in turn; return seconds per call, ``[rounds, functions]``."""
        # All bursts have the same number of calls, so that no function gains by it.
        slowest = max(self._burst(make, 1) for _ in range(_WARMUP) for make in ready)
        calls = max(1, min(_MAX_BURST, round(_BURST / max(slowest, 1e-9))))
        rounds: list[list[float]] = []
        start = perf_counter()
        with no_collection():
            while len(rounds) < _MAX_ROUNDS and (
                len(rounds) < _MIN_ROUNDS or perf_counter() - start < seconds
            ):
                took = [0.0] * len(ready)
                # Every other round backwards, so that drift affects all equally.
                order = range(len(ready))
                for which in order if len(rounds) % 2 else reversed(order):
                    took[which] = self._burst(ready[which], calls)
                rounds.append(took)
        return np.array(rounds)

    def _burst(self, make: _Ready, calls: int) -> float:
        """Time several calls without a pause; return seconds per call."""
        # An accelerator may overlap them, as in a model.
        runs = [make() for _ in range(calls)]  # prepared before the clock starts
        synchronize(self.device)
        start = perf_counter()
        for run in runs:
            run()
        synchronize(self.device)
        return (perf_counter() - start) / calls


def _always(run: Callable[[], Any]) -> _Ready:
    """A call that needs no preparation."""
    return lambda: run


def _ready(module: nn.Module, recorded_call: RecordedCall) -> Callable[[], Any]:
    # Not timed: copies of caches, for example, which grow in a call.
    args = fresh(recorded_call.args)
    kwargs = fresh(recorded_call.kwargs)
    return lambda: module(*args, **kwargs)


def _factor(
    table: Sequence[SiteLatency], row: SiteLatency, saved: Mapping[bool, float], whole: float
) -> float:
    """How many times more sites of a row's kind save in the model than alone.

    Args:
        table: All rows, measured alone.
        row: One of them.
        saved: By kind, the fraction of the model's time that its sites saved together.
        whole: Seconds of the model.
    """
    alone = 0.0
    for other in table:
        if other.neurons == row.neurons:
            entries = [seconds for seconds in other.seconds[1:] if seconds is not None]
            alone += entries[-1] - entries[0]
    if row.neurons not in saved or alone <= 0:
        return 1.0
    return min(max(saved[row.neurons] * whole / alone, 1 / _MOST), _MOST)


def _above_none(row: SecondsByHeads) -> SecondsByHeads:
    """Subtract the time without neurons: the module may be a whole layer, with its attention."""
    without = row[0] or 0.0
    return [None if seconds is None else max(0.0, seconds - without) for seconds in row]


def _smoothed(row: SecondsByHeads) -> SecondsByHeads:
    """Return the nearest non-decreasing row in least squares."""
    # Fewer heads are less work, so where a row falls it is mostly noise. A selector looks for the
    # best entries and would find every one that is too low by chance.
    known = [n for n, seconds in enumerate(row) if seconds is not None]
    smooth = isotonic_regression([row[n] for n in known]).x.tolist()
    smoothed: list[float | None] = [None] * len(row)
    for n, seconds in zip(known, smooth, strict=True):
        smoothed[n] = seconds
    return smoothed


def _sum(rows: Sequence[SecondsByHeads]) -> tuple[float | None, ...]:
    """Add up the rows of several calls of one module."""
    sums: list[float | None] = []
    for entries in zip(*rows, strict=True):
        known = [seconds for seconds in entries if seconds is not None]
        sums.append(math.fsum(known) if len(known) == len(entries) else None)
    return tuple(sums)


def _scaled(row: SecondsByHeads, factor: float) -> tuple[float | None, ...]:
    return tuple(None if seconds is None else seconds * factor for seconds in row)


def _notes(
    raw: Mapping[Any, SecondsByHeads],
    rows: Mapping[Any, SecondsByHeads],
    total: float,
    whole: float,
) -> Iterator[str]:
    moved = 0.0  # the largest relative change by smoothing
    for key, row in raw.items():
        for before, after in zip(row, rows[key], strict=True):
            change = abs((before or 0.0) - (after or 0.0)) / (before or 1.0)
            moved = max(moved, change)
    if moved > _WORTH_SAYING:
        yield (
            f"Made non-decreasing, which moved an entry by up to {100 * moved:.0f} %: more seconds"
            " make it surer."
        )
    if total > whole:
        more = f"{100 * (total / whole - 1):.0f} %"
        yield (
            f"The attention layers alone took {more} longer than the model: their times are scaled"
            " to its own."
        )


def _in_words(device: torch.device) -> str:
    # The name is part of the table, because its numbers hold for this device only.
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return str(device)
