"""A latency table: how long a model's attention takes at every number of heads, measured on copies
that are cut."""

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
from tqdm.auto import tqdm

from headprune.bench.latency import TOKENS, no_collection, shaped_batch, synchronize
from headprune.bench.recording import Run, fresh, recorded, tokens_of
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, HeadMask
from headprune.core.latency import LatencyTable, SiteLatency
from headprune.model.cut import cut_
from headprune.model.running import batch_size as rows_in
from headprune.model.running import call, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, bind

_WARMUP, _MIN_ROUNDS, _MAX_ROUNDS = 2, 5, 500
_BURST, _MAX_BURST = 1e-3, 20  # seconds: shorter calls are timed several at a time
_WORTH_SAYING = 0.1
_MODEL_SHARE = 0.25  # of the time, for calls of the whole model


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
    """Measures what each attention layer takes at every number of heads that it can be cut to.

    One pass of the whole model records what goes into every attention module. Then the module alone
    is called with that again, as it is and in copies that are cut, all in turn, the order turned
    round every other round, so that drift of the machine weighs on all alike; an entry is the
    median over the rounds. Modules that are built alike and got inputs of equal shape share one
    measurement, and a module that runs several times in a pass counts as often. The whole model is
    timed before, between and after.

    With ``smooth`` each row is made non-decreasing by isotonic regression (the nearest such row in
    least squares). Fewer heads are less work, so where a row falls it is mostly noise, and a
    selector, which looks for the best entries, finds every one that came out too low; averaging it
    with its neighbours takes that away. Where kernels really have steps (sizes that do not suit
    them), ``smooth=False`` keeps them.

    Where heads share a key/value head and may leave one by one, entries are for heads spread over
    all groups: a choice that empties whole groups is somewhat faster. Modules run alone find their
    weights in the cache of a large processor more easily than in the model, so the table is a
    prediction: measure what comes of it (`compare_latency`). Where all of them together come out
    slower than the whole model, they are scaled to it, with a note. Memory: the inputs of each kind
    of attention, and about (n + 1) / 2 times the weights of one module for the copies of n heads.

    Args:
        model: A model; it is left as it was. Compiled, it runs uncompiled here.
        batch: What it takes, run as it is. With ``batch_size`` or ``length``, a mapping, brought to
            that shape by `shaped_batch`, which leaves labels out and padding too.
        batch_size: Examples a call; those of the batch where left out.
        length: Tokens an example; those of the batch where left out.
        sites: Default `find_sites`; they carry the policy of shared key/value heads.
        seconds: About how long all measurements take together; each has at least 5 rounds.
        smooth: Make rows non-decreasing.
        progress: Show a progress bar.

    Raises:
        UnsupportedModel: an attention that this batch does not run, or that cannot be cut.
        InvalidValue: a batch of another kind, a length for one without tokens, or no time.

    >>> from headprune import MultiHeadAttention
    >>> table = latency_table(
    ...     nn.Sequential(MultiHeadAttention(8, 4)), torch.randn(2, 5, 8), seconds=0
    ... )
    >>> len(table.row("0")), table.batch_size, table.length
    (5, 2, 5)
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InvalidValue("latency_table(seconds=)", "a number >= 0", repr(seconds))
    bound, device = bind(model, sites), device_of(model)
    inputs = to_device(_shaped(batch, batch_size, length), device)
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        stack.enter_context(torch.inference_mode())
        seen = recorded(model, bound, inputs)
        kinds = {key: one for runs in seen.values() for key, one in runs}
        clock = _Clock(device, seconds, len(kinds))
        measured: dict[Any, list[float | None]] = {}
        for key, one in tqdm(
            kinds.items(), desc="latency table", disable=not progress, leave=False
        ):
            clock.time_whole(lambda: call(model, inputs))
            measured[key] = clock.time_site(model, one)
        clock.time_whole(lambda: call(model, inputs))
    rows = {key: _smoothed(row) if smooth else row for key, row in measured.items()}
    table = tuple(
        SiteLatency(b.site.name, _sum([rows[key] for key, _ in seen[b.site.name]])) for b in bound
    )
    whole, total = (
        statistics.median(clock.whole),
        math.fsum(row.seconds[-1] or 0.0 for row in table),
    )
    if total > whole:
        table = tuple(replace(row, seconds=_scaled(row.seconds, whole / total)) for row in table)
    return LatencyTable(
        whole=whole,
        sites=table,
        batch_size=rows_in(inputs),
        length=length or max(tokens_of(one) for one in kinds.values()),
        device=_in_words(device),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        notes=tuple(_notes(measured, rows, total, whole)),
    )


def _shaped(batch: Any, size: int | None, length: int | None) -> Any:
    if size is None and length is None:
        return batch
    if not isinstance(batch, Mapping):
        raise InvalidValue(
            "latency_table(batch=)", "a mapping, to be given another size", type(batch).__name__
        )
    if length is not None and not any(name in batch for name in TOKENS):
        must = f"left out for a batch without any of {', '.join(TOKENS)}, whose length is its own"
        raise InvalidValue("latency_table(length=)", must, length)
    return shaped_batch(batch, rows_in(batch) if size is None else size, length)


def _keeps(site: AttentionSite) -> Iterator[tuple[int, ...]]:
    """Heads to keep, one choice for every number of heads that the site's policy can leave, spread
    over groups."""
    if site.policy == "group":
        order = [head for unit in site.units for head in unit]
    else:
        order = [head for row in zip_longest(*site.groups) for head in row if head is not None]
    return (
        tuple(sorted(order[:count]))
        for count in range(len(order) + 1)
        if _allowed(site, order[:count])
    )


def _allowed(site: AttentionSite, keep: Sequence[int]) -> bool:
    try:
        site.check(keep)
    except InvalidValue:
        return False
    return True


def _variants(model: nn.Module, b: BoundSite) -> dict[int, nn.Module]:
    """The module with every number of heads that it can have: copies that are really cut."""
    found: dict[int, nn.Module] = {}
    for keep in _keeps(b.site):
        if len(keep) == len(b.site.heads):
            found[len(keep)] = b.module
            continue
        if len(keep) < b.site.least:
            continue  # a layer that must keep a head
        undo = cut_(
            model, [b], HeadMask.from_keep({b.site.name: keep}, {b.site.name: b.site.n_query_heads})
        )
        try:
            found[len(keep)] = copy.deepcopy(b.module)
        finally:
            undo.restore()
    return found


#: Makes a call ready; only the call that it returns is timed.
_Ready: TypeAlias = Callable[[], Callable[[], Any]]


@dataclass
class _Clock:
    """Times a model and its modules; the time that is allowed is shared among them."""

    device: torch.device
    seconds: float
    n_kinds: int
    whole: list[float] = field(default_factory=list)

    def time_whole(self, run: Callable[[], Any]) -> None:
        times = self._rounds([lambda: run], self.seconds * _MODEL_SHARE / (self.n_kinds + 1))
        self.whole += times[:, 0].tolist()

    def time_site(self, model: nn.Module, run: Run) -> list[float | None]:
        """Median seconds by number of heads."""
        variants = _variants(model, run.bound)
        share = self.seconds * (1 - _MODEL_SHARE) / self.n_kinds
        times = self._rounds([partial(_ready, module, run) for module in variants.values()], share)
        row: list[float | None] = [None] * (len(run.bound.site.heads) + 1)
        for count, median in zip(variants, np.median(times, axis=0).tolist(), strict=True):
            row[count] = median
        return row

    def _rounds(self, ready: Sequence[_Ready], seconds: float) -> NDArray[np.float64]:
        """Seconds a call, ``[rounds, functions]``; bursts are as long for all, so that none gains
        by its length."""
        slowest = max(self._burst(make, 1) for _ in range(_WARMUP) for make in ready)
        calls = max(1, min(_MAX_BURST, round(_BURST / max(slowest, 1e-9))))
        rounds: list[list[float]] = []
        start = perf_counter()
        with no_collection():
            while len(rounds) < _MAX_ROUNDS and (
                len(rounds) < _MIN_ROUNDS or perf_counter() - start < seconds
            ):
                took = [0.0] * len(ready)
                for which in range(len(ready))[:: 1 if len(rounds) % 2 else -1]:
                    took[which] = self._burst(ready[which], calls)
                rounds.append(took)
        return np.array(rounds)

    def _burst(self, make: _Ready, calls: int) -> float:
        """Seconds of one of several calls right after each other, which an accelerator may overlap
        as in a model."""
        runs = [make() for _ in range(calls)]
        synchronize(self.device)
        start = perf_counter()
        for run in runs:
            run()
        synchronize(self.device)
        return (perf_counter() - start) / calls


def _ready(module: nn.Module, run: Run) -> Callable[[], Any]:
    args, kwargs = fresh(run.args), fresh(run.kwargs)
    return lambda: module(*args, **kwargs)


def _smoothed(row: list[float | None]) -> list[float | None]:
    """The nearest non-decreasing row."""
    known = [n for n, seconds in enumerate(row) if seconds is not None]
    smooth = isotonic_regression([row[n] for n in known]).x.tolist()
    return [smooth[known.index(n)] if n in known else None for n in range(len(row))]


def _sum(rows: list[list[float | None]]) -> tuple[float | None, ...]:
    """What several runs of one module take together."""
    return tuple(
        None if None in entries else math.fsum(s or 0.0 for s in entries)
        for entries in zip(*rows, strict=True)
    )


def _scaled(row: Sequence[float | None], factor: float) -> tuple[float | None, ...]:
    return tuple(None if seconds is None else seconds * factor for seconds in row)


def _notes(
    raw: Mapping[Any, list[float | None]],
    rows: Mapping[Any, list[float | None]],
    total: float,
    whole: float,
) -> Iterator[str]:
    moved = max(
        abs((a or 0.0) - (b or 0.0)) / (a or 1.0)
        for k in raw
        for a, b in zip(raw[k], rows[k], strict=True)
    )
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
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    )
