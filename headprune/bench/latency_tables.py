"""Latency tables: seconds of each attention and feed-forward at each size, from cut copies."""

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
from headprune.core.errors import InvalidValue, UnsupportedModel, reason_of
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.latency import BUSY, LatencyTable, SiteLatency
from headprune.core.levels import level_widths
from headprune.model.cut import cut_
from headprune.model.losses import decoder_ids
from headprune.model.offloaded import count_parameters
from headprune.model.running import batch_size as rows_in
from headprune.model.running import call, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, bind, unwrap

_WARMUP = 2
_MIN_ROUNDS = 5
_MAX_ROUNDS = 500
# Calls shorter than _BURST seconds are timed several at a time, at most _MAX_BURST.
_BURST = 1e-3
_MAX_BURST = 20
# A note reports smoothing that moved an entry by more than this fraction.
_WORTH_SAYING = 0.1
# A note reports times of the whole model whose middle half spreads by more than this fraction.
_BUSY = 0.25
# Fractions of the time for calls of the whole model, and of models with all sites cut.
_MODEL_SHARE = 0.25
_TOGETHER_SHARE = 0.25
# A site saves in the model at most this many times more, or less, than alone; a larger measured
# factor is noise.
_MAX_FACTOR = 2.0
# Copies that are timed beside the model: cut of heads, of neurons, of both.
_N_COPIES = 3

#: Seconds by number of heads or neurons; None where it was not measured.
SecondsByCount: TypeAlias = "Sequence[float | None]"


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
    """Measure the seconds of each attention and feed-forward at the sizes that it can be cut to.

    Modules and their cut copies are timed alone, in turn, on recorded inputs; entries are
    medians. Attention is timed at every number of heads, a feed-forward at about twelve widths,
    less its time without neurons. Then cut copies of the model are timed beside it, and
    savings are scaled to agree with theirs. Memory: a cut copy of the model.

    Args:
        model: The model; runs uncompiled.
        batch: Its input; a mapping where ``batch_size`` or ``length`` is given.
        batch_size: Examples per call; default the batch's.
        length: Tokens of each; default the batch's.
        sites: Default ``find_sites(model)``: attention alone.
        seconds: About the total; each measurement has at least 5 rounds.
        smooth: Make rows non-decreasing. False keeps real steps of kernels.
        progress: Show a progress bar.

    Returns:
        Seconds per call, by site and number of kept heads or neurons.

    Raises:
        UnsupportedModel: a site that the batch does not run, or that cannot run cut.
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
    inputs = to_device(_shaped(unwrap(model), batch, batch_size, length), device)

    # 1. Measure. Modules that are built alike and got inputs of equal shape share a measurement.
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        stack.enter_context(torch.inference_mode())
        calls = recorded(model, bound, inputs)
        kinds = _kinds(calls)
        clock = _Clock(device, seconds, len(kinds))
        measured: dict[Any, SecondsByCount] = {}
        for key, one in bar(kinds.items(), "latency table", progress):
            # The whole model before, between and after the modules, so that drift affects both.
            clock.time_whole(lambda: call(model, inputs))
            measured[key] = clock.time_site(model, one)
        clock.time_whole(lambda: call(model, inputs))
        savings = clock.time_savings(model, bound, inputs)

    # 2. Smooth each kind, then add up the calls of each site.
    rows = dict(measured)
    if smooth:
        rows = {key: _smoothed(row) for key, row in measured.items()}
    # A module that runs several times in a pass counts as often.
    table = []
    for name, of_site in calls.items():
        of_calls = [rows[key] for key, _ in of_site]
        _, first_call = of_site[0]
        neurons = first_call.bound.site.is_feed_forward
        table.append(SiteLatency(name, _sum(of_calls), neurons))

    # 3. Scale to the whole model. Alone, modules find their weights in a processor's cache more
    # easily than in the model, or pay more for each call.
    whole = statistics.median(clock.whole)
    alone = math.fsum(row.whole for row in table)
    factors = {}
    for noun, fraction in savings.items():
        of_kind = [row for row in table if row.noun == noun]
        factors[noun] = _factor(of_kind, fraction * whole)
    for place, row in enumerate(table):
        factor = factors.get(row.noun, 1.0)
        table[place] = replace(row, seconds=_scaled(row.seconds, factor))
    table = _fitted(table, whole)
    return LatencyTable(
        whole=whole,
        sites=tuple(table),
        batch_size=rows_in(inputs),
        length=length or max(tokens_of(one) for one in kinds.values()),
        device=_device_name(device),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        notes=(*_notes(measured, rows, alone, whole, factors), *_busy(clock.whole)),
        n_parameters=count_parameters(unwrap(model)),
    )


def _kinds(calls: Mapping[str, list[tuple[Any, RecordedCall]]]) -> dict[Any, RecordedCall]:
    """Return one call of each kind."""
    kinds: dict[Any, RecordedCall] = {}
    for of_site in calls.values():
        kinds.update(of_site)
    return kinds


def _shaped(model: nn.Module, batch: Any, size: int | None, length: int | None) -> Any:
    if size is None and length is None:
        return batch
    if not isinstance(batch, Mapping):
        must = "a mapping, because batch_size or length is given"
        raise InvalidValue("latency_table(batch=)", must, type(batch).__name__)
    # `shaped_batch` drops the labels, of which a decoder's input may have to be made.
    ids = decoder_ids(model, batch)
    if ids is not None:
        batch = {**batch, "decoder_input_ids": ids}
    if length is not None and not any(name in batch for name in TOKENS):
        must = f"left out for a batch without any of {', '.join(TOKENS)}, whose length is its own"
        raise InvalidValue("latency_table(length=)", must, length)
    if size is None:
        size = rows_in(batch)
    return shaped_batch(batch, size, length)


def _keeps(site: AttentionSite) -> list[tuple[int, ...]]:
    """Return one choice of kept heads for every number of heads that the policy allows.

    Of neurons, only the numbers that a selector chooses from.
    """
    if site.is_feed_forward:
        counts = level_widths(len(site.heads), site.n_query_heads)
        return [site.heads[:count] for count in counts]
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
    """Return the module with every number of heads or neurons that it can have, as cut copies."""
    # Together about (n + 1) / 2 times the weights of the module of n heads.
    variants: dict[int, nn.Module] = {}
    for keep in _keeps(b.site):
        if len(keep) == len(b.site.heads):
            variants[len(keep)] = b.module
            continue
        if len(keep) < b.site.least:
            continue  # a layer that must keep a head
        variants[len(keep)] = cut_copy(model, [b], {b.site.name: keep}, b.module)
    return variants


def _smallest(model: nn.Module, bound: Sequence[BoundSite]) -> nn.Module | None:
    """Return a copy of the model with the fewest heads at these sites; None where there is none."""
    keep = {b.site.name: _fewest(b.site) for b in bound}
    if all(len(keep[b.site.name]) == len(b.site.heads) for b in bound):
        return None
    try:
        return cut_copy(model, bound, keep, model)
    except (RuntimeError, TypeError):  # a model that cannot be copied
        return None


def cut_copy(
    model: nn.Module, bound: Sequence[BoundSite], keep: Mapping[str, Sequence[int]], part: nn.Module
) -> nn.Module:
    """Cut the model in place, copy it or a module of it, and undo the cut.

    Args:
        model: The model.
        bound: Sites that are cut.
        keep: The heads that are kept, by site.
        part: What is copied: the model, or a module of it.
    """
    mask = HeadMask.from_keep(keep, {b.site.name: b.site.n_query_heads for b in bound})
    undo = cut_(model, bound, mask)
    try:
        return copy.deepcopy(part)
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

    def time_site(self, model: nn.Module, recorded_call: RecordedCall) -> SecondsByCount:
        """Return the median seconds by number of heads or neurons."""
        variants = _variants(model, recorded_call.bound)
        seconds = self.seconds * (1 - _MODEL_SHARE - _TOGETHER_SHARE) / self.n_kinds
        ready = [partial(_ready, module, recorded_call) for module in variants.values()]
        for count, make in zip(variants, ready, strict=True):
            _check_runs(make, recorded_call.bound.site, count)
        times = self._rounds(ready, seconds)  # [rounds, variants]
        # Index: number of kept heads.
        row: list[float | None] = [None] * (len(recorded_call.bound.site.heads) + 1)
        for count, median in zip(variants, np.median(times, axis=0).tolist(), strict=True):
            row[count] = median
        if recorded_call.bound.site.is_feed_forward:
            return _time_of_neurons(row)
        return row

    def time_savings(
        self, model: nn.Module, bound: Sequence[BoundSite], inputs: Any
    ) -> dict[str, float]:
        """Time copies with all heads, all neurons and both cut to the fewest, beside the model.

        Returns:
            By ``AttentionSite.noun`` the fraction of the model's time that a cut saves, at least 0.
            A kind is missing where that is not known: it cannot be cut, or the model cannot be
            copied.
        """
        saved: dict[str, float] = {}
        for noun in ("head", "neuron"):
            of_kind = [b for b in bound if b.site.noun == noun]
            part = self._saved(model, of_kind, inputs)
            if part is not None:
                saved[noun] = part
        if len(saved) < 2:
            return saved
        # Together they may save more or less than one after the other.
        both = self._saved(model, bound, inputs)
        if both is None:
            return {}
        total = sum(saved.values())
        if not total:
            return saved
        # Split what both save in the ratio of what each saves alone.
        return {noun: part * both / total for noun, part in saved.items()}

    def _saved(self, model: nn.Module, bound: Sequence[BoundSite], inputs: Any) -> float | None:
        """The fraction of the model's time that a copy saves with the fewest heads at these
        sites, at least 0; None where it cannot be made."""
        small = _smallest(model, bound)
        if small is None:
            return None
        ready = [_always(partial(call, one, inputs)) for one in (model, small)]
        seconds = self.seconds * _TOGETHER_SHARE / _N_COPIES
        times = self._rounds(ready, seconds)  # [rounds, 2]
        return max(0.0, float(np.median(1 - times[:, 1] / times[:, 0])))

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


def _check_runs(make: _Ready, site: AttentionSite, count: int) -> None:
    """Refuse a site whose cut copy does not run.

    Raises:
        UnsupportedModel: it does not; names the number of heads or neurons.
    """
    try:
        make()()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the user's code may raise anything
        must = f"one that runs with {count} of its {len(site.heads)} {site.noun}s"
        hint = (
            "Its code may rely on the number of heads or neurons of the uncut module. Give"
            " latency_table `sites` without it, or find_sites a layout that cuts that, too."
        )
        raise UnsupportedModel(f"site {site.name}", must, reason_of(error), hint) from error


def _factor(rows: Sequence[SiteLatency], saved: float) -> float:
    """How many times more sites save in the model than alone, within ``_MAX_FACTOR``.

    Args:
        rows: Of the sites, measured alone.
        saved: Seconds that they saved together.
    """
    alone = 0.0
    for row in rows:
        # Not entry 0: the copy of `_smallest` keeps at least one.
        entries = [seconds for seconds in row.seconds[1:] if seconds is not None]
        if entries:
            alone += entries[-1] - entries[0]
    if alone <= 0:
        return 1.0
    return min(max(saved / alone, 1 / _MAX_FACTOR), _MAX_FACTOR)


def _fitted(table: Sequence[SiteLatency], whole: float) -> list[SiteLatency]:
    """Bring the sum of all sites down to the time of the whole model.

    Subtract from each row the same share of its smallest entry, which no cut saves, so that the sum
    falls to the model's time. Scale the rows if that is not enough.
    """
    excess = math.fsum(row.whole for row in table) - whole
    if excess <= 0:
        return list(table)
    least = {}
    for row in table:
        least[row.site] = min(s for s in row.seconds if s is not None)
    constant = math.fsum(least.values())
    share = min(1.0, excess / constant) if constant else 0.0
    rows = []
    for row in table:
        less = share * least[row.site]
        seconds = tuple(None if s is None else s - less for s in row.seconds)
        rows.append(replace(row, seconds=seconds))
    return _scaled_to(rows, whole)


def _scaled_to(table: Sequence[SiteLatency], whole: float) -> list[SiteLatency]:
    """Scale all sites alike, so that their sum is at most the time of the whole model."""
    total = math.fsum(row.whole for row in table)
    scale = min(1.0, whole / total) if total else 1.0
    return [replace(row, seconds=_scaled(row.seconds, scale)) for row in table]


def _time_of_neurons(row: SecondsByCount) -> SecondsByCount:
    """Subtract the entry without neurons: the module may be a whole layer with its attention."""
    without = row[0] or 0.0
    return [None if seconds is None else max(0.0, seconds - without) for seconds in row]


def _smoothed(row: SecondsByCount) -> SecondsByCount:
    """Return the nearest non-decreasing row in least squares."""
    # Fewer heads are less work, so where a row falls it is mostly noise. A selector looks for the
    # best entries and would find every one that is too low by chance.
    known = [n for n, seconds in enumerate(row) if seconds is not None]
    smooth = isotonic_regression([row[n] for n in known]).x.tolist()
    smoothed: list[float | None] = [None] * len(row)
    for n, seconds in zip(known, smooth, strict=True):
        smoothed[n] = seconds
    return smoothed


def _sum(rows: Sequence[SecondsByCount]) -> tuple[float | None, ...]:
    """Add up the rows of several calls of one module."""
    sums: list[float | None] = []
    for entries in zip(*rows, strict=True):
        known = [seconds for seconds in entries if seconds is not None]
        sums.append(math.fsum(known) if len(known) == len(entries) else None)
    return tuple(sums)


def _scaled(row: SecondsByCount, factor: float) -> tuple[float | None, ...]:
    return tuple(None if seconds is None else seconds * factor for seconds in row)


def _notes(
    raw: Mapping[Any, SecondsByCount],
    rows: Mapping[Any, SecondsByCount],
    alone: float,
    whole: float,
    factors: Mapping[str, float],
) -> Iterator[str]:
    """Say what differs by more than a little from what was measured.

    Args:
        raw: Measured rows.
        rows: Smoothed rows.
        alone: Seconds of all sites, timed alone.
        whole: Seconds of the model.
        factors: What rows were scaled by, by ``SiteLatency.noun``.
    """
    moved = 0.0  # the largest relative change by smoothing
    for key, row in raw.items():
        for before, after in zip(row, rows[key], strict=True):
            change = abs((before or 0.0) - (after or 0.0)) / (before or 1.0)
            moved = max(moved, change)
    if moved > _WORTH_SAYING:
        yield (
            f"Rows were made non-decreasing, which moved an entry by up to {100 * moved:.0f} %: a"
            " longer measurement is more precise."
        )
    for noun, factor in factors.items():
        if abs(factor - 1) > _WORTH_SAYING:
            at_least = "at least " if factor in (1 / _MAX_FACTOR, _MAX_FACTOR) else ""
            compared = f"{at_least}{abs(factor - 1):.0%} {'more' if factor > 1 else 'less'}"
            yield f"In the model, cut {noun}s save {compared} than alone; times are scaled to it."
    if alone > whole:
        more = f"{100 * (alone / whole - 1):.0f} %"
        yield f"Timed alone, layers took {more} longer than the model; times are scaled to it."


def _busy(whole: Sequence[float]) -> Iterator[str]:
    """Say that times of the whole model differ much: long calls suffer most from other work."""
    low, middle, high = statistics.quantiles(whole)
    spread = (high - low) / middle
    if spread > _BUSY:
        yield (
            f"{BUSY}: the middle half of the model's times spans {spread:.0%} of the median."
            " Measure again when it is idle, or for longer."
        )


def _device_name(device: torch.device) -> str:
    # The name is part of the table, because its numbers hold for this device only.
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return str(device)
