"""Latency of a model before and after a cut, timed in turn in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from headprune.core.errors import InvalidValue
from headprune.core.record import SpeedRow
from headprune.model.running import call, device_of, to_device, undisturbed

_RESAMPLES = 2000
_LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions")
TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class Effort:
    """How long one cell may take."""

    seconds: float
    warmup: int
    min_rounds: int
    max_rounds: int

    def __post_init__(self) -> None:
        for name in ("warmup", "min_rounds", "max_rounds"):
            check_count(name, getattr(self, name), least=0 if name == "warmup" else 1)
        if (
            isinstance(self.seconds, bool)
            or not isinstance(self.seconds, (int, float))
            or not self.seconds >= 0
        ):
            raise InvalidValue("seconds", "a number >= 0", repr(self.seconds))
        if self.max_rounds < self.min_rounds:
            raise InvalidValue(
                "max_rounds", f"at least min_rounds, {self.min_rounds}", self.max_rounds
            )


def compare_latency(
    original: nn.Module,
    pruned: nn.Module,
    make_batch: Callable[[int, int], Any],
    batch_sizes: Sequence[int] = (1, 8, 32),
    lengths: Sequence[int] = (128,),
    *,
    seconds: float = 5.0,
    warmup: int = 3,
    min_rounds: int = 10,
    max_rounds: int = 200,
    seed: int = 0,
    progress: bool = False,
) -> tuple[SpeedRow, ...]:
    """Times two models on every batch size and length.

    A round is one call of each, right after the other; which one goes first alternates, so that
    drift of the machine and the state of its caches weigh on both alike. The ratio is the median
    over the rounds of original / pruned, with a 95 % percentile bootstrap interval over the rounds.
    Both run in evaluation and inference mode, and are left as they were; on an accelerator the
    clock stops when its work is done. A compiled model runs compiled.

    Args:
        original: The model before the cut.
        pruned: The model after it, on the same device.
        make_batch: ``make_batch(batch, length)`` gives what both models take; see ``shaped_batch``.
        batch_sizes: Examples a call.
        lengths: Tokens an example.
        seconds: Rounds of one cell end when their calls have taken this long together.
        warmup: Calls of each model before a cell is timed.
        min_rounds: Rounds of a cell, however long they take.
        max_rounds: Rounds of a cell at most.
        seed: Of the bootstrap.
        progress: Show a progress bar.

    Returns:
        One row for each length and, within it, each batch size.

    Raises:
        InvalidValue: no sizes, sizes below 1, models on two devices.

    >>> from headprune import MultiHeadAttention
    >>> models = MultiHeadAttention(8, 4), MultiHeadAttention(8, 2)
    >>> rows = compare_latency(
    ...     *models, lambda n, t: torch.randn(n, t, 8), [1, 2], [5], seconds=0, min_rounds=2
    ... )
    >>> [(row.batch, row.length, row.rounds) for row in rows]
    [(1, 5, 2), (2, 5, 2)]
    """
    effort = Effort(seconds, warmup, min_rounds, max_rounds)
    cells = [
        (batch, length)
        for length in sizes_of("lengths", lengths)
        for batch in sizes_of("batch_sizes", batch_sizes)
    ]
    device = device_of(original)
    if device_of(pruned) != device:
        raise InvalidValue(
            "pruned", f"on {device}, where the original is", device_of(pruned), "Move it there."
        )
    rows = []
    with ExitStack() as stack:
        stack.enter_context(undisturbed(original, compiled=True, packed=True))
        stack.enter_context(undisturbed(pruned, compiled=True, packed=True))
        stack.enter_context(torch.inference_mode())
        for batch, length in tqdm(cells, desc="latency", disable=not progress, leave=False):
            inputs = to_device(make_batch(batch, length), device)
            runs = [partial(call, model, inputs) for model in (original, pruned)]
            rows.append(speed_row(batch, length, in_turn(runs, device, effort), seed))
    return tuple(rows)


def rounds(
    timed: Callable[[int], tuple[float, ...]], effort: Effort, models: int = 2
) -> np.ndarray:
    """Seconds ``[rounds, models, ...]``, one call of each model a round; ``timed(i)`` takes those
    of model ``i``.

    Which one goes first changes from round to round, and each is first equally often.
    """
    for _ in range(effort.warmup):
        for which in range(models):
            timed(which)
    times: list[list[tuple[float, ...]]] = []
    spent = 0.0
    with no_collection():
        # After another number of rounds one model would have gone first more often.
        while len(times) < effort.max_rounds and (
            len(times) < effort.min_rounds or len(times) % models or spent < effort.seconds
        ):
            took: list[tuple[float, ...]] = [()] * models
            for turn in range(models):
                which = (turn + len(times)) % models
                took[which] = timed(which)
            times.append(took)
            spent += sum(map(sum, took))
    return np.array(times)


def in_turn(runs: Sequence[Callable[[], Any]], device: torch.device, effort: Effort) -> np.ndarray:
    """Seconds ``[rounds, runs]``, as ``rounds`` has it."""

    def timed(which: int) -> tuple[float]:
        synchronize(device)
        start = perf_counter()
        runs[which]()
        synchronize(device)
        return (perf_counter() - start,)

    return rounds(timed, effort, len(runs))[:, :, 0]


def synchronize(device: torch.device) -> None:
    """Waits for an accelerator; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    elif device.type == "xpu":
        torch.xpu.synchronize(device)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector out of the timings."""
    running = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def speed_row(batch: int, length: int, times: np.ndarray, seed: int) -> SpeedRow:
    ratios = times[:, 0] / times[:, 1]
    draws = np.random.default_rng(seed).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), (2.5, 97.5))
    p50, p90 = np.percentile(times, 50, axis=0), np.percentile(times, 90, axis=0)
    return SpeedRow(
        batch=batch,
        length=length,
        original_p50=float(p50[0]),
        original_p90=float(p90[0]),
        pruned_p50=float(p50[1]),
        pruned_p90=float(p90[1]),
        ratio=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        rounds=len(times),
    )


def shaped_batch(
    example: Mapping[str, Any], batch: int, length: int | None = None
) -> dict[str, Any]:
    """Inputs of a wanted size out of an example: rows and tokens are repeated or cut off, labels
    left out.

    ``input_ids`` and what else is ``[batch, tokens]`` like them (``inputs_embeds`` too; the same
    for a decoder's) get ``length`` tokens, attention masks are all ones and ``position_ids`` count
    up. Other tensors, images for example, only get ``batch`` rows; without any tokens, ``length``
    changes nothing.

    Args:
        example: What a model takes; tensors have the examples first.
        batch: Rows wanted.
        length: Tokens wanted; where left out, as many as the example has, and the decoder's as many
            as it has.

    Raises:
        InvalidValue: no mapping, no tensor in it, or sizes below 1.

    >>> example = {
    ...     "input_ids": torch.tensor([[1, 2, 3]]),
    ...     "attention_mask": torch.tensor([[1, 1, 0]]),
    ... }
    >>> shaped_batch(example, 2, 4)
    {'input_ids': tensor([[1, 2, 3, 1],
            [1, 2, 3, 1]]), 'attention_mask': tensor([[1, 1, 1, 1],
            [1, 1, 1, 1]])}
    """
    check_count("batch", batch, 1)
    if length is not None:
        check_count("length", length, 1)
    kept = (
        {k: v for k, v in example.items() if k not in _LABELS}
        if isinstance(example, Mapping)
        else {}
    )
    if not any(isinstance(v, Tensor) and v.ndim and len(v) for v in kept.values()):
        must = "a mapping of tensors with the examples first"
        raise InvalidValue(
            "example",
            must,
            sorted(kept) if isinstance(example, Mapping) else type(example).__name__,
        )
    return {name: _shaped(name, value, kept, batch, length) for name, value in kept.items()}


def _shaped(
    name: str, value: Any, example: Mapping[str, Any], batch: int, length: int | None
) -> Any:
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    rows = value.index_select(0, torch.arange(batch, device=value.device) % len(value))
    decoder = name.startswith("decoder_")
    tokens = next(
        (example[k] for k in TOKENS if k in example and k.startswith("decoder_") == decoder), None
    )
    of_tokens = value.ndim == 2 or name in TOKENS
    if tokens is None or not of_tokens or value.shape[1] != tokens.shape[1]:
        return rows
    length = value.shape[1] if length is None else length
    places = torch.arange(length, device=value.device)
    if name.endswith("position_ids"):
        return places.to(value.dtype).expand(batch, length).contiguous()
    rows = rows.index_select(1, places % value.shape[1])
    return torch.ones_like(rows) if name in _MASKS else rows


def sizes_of(name: str, sizes: Sequence[int]) -> list[int]:
    if isinstance(sizes, (str, int)) or not len(sizes):
        raise InvalidValue(name, "a list of counts, at least one", repr(sizes))
    for size in sizes:
        check_count(name, size, 1)
    return list(sizes)


def check_count(where: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidValue(where, f"a whole number >= {least}", repr(value))
