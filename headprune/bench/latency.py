"""Latency of a model before and after a cut, timed alternately in one process."""

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

from headprune.core.bars import bar
from headprune.core.errors import InvalidValue
from headprune.core.record import SpeedRow
from headprune.model.running import call, device_of, to_device, undisturbed

_RESAMPLES = 2000  # of the bootstrap
# Inputs that only the loss reads.
_LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions")
# Inputs whose second axis is the tokens of an example.
TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class Effort:
    """Limits on the time of one cell.

    Args:
        seconds: Rounds end when their calls have taken this long in total.
        warmup: Calls of each model before timing.
        min_rounds: Rounds, however long they take.
        max_rounds: Rounds at most.
    """

    seconds: float
    warmup: int
    min_rounds: int
    max_rounds: int

    def __post_init__(self) -> None:
        check_whole_number("warmup", self.warmup, least=0)
        check_whole_number("min_rounds", self.min_rounds, least=1)
        check_whole_number("max_rounds", self.max_rounds, least=1)
        check_seconds("seconds", self.seconds)
        if self.max_rounds < self.min_rounds:
            must = f"at least min_rounds, {self.min_rounds}"
            raise InvalidValue("max_rounds", must, self.max_rounds)


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
    """Time two models on every batch size and length (a cell).

    A round calls each model once; the one that goes first alternates, so that drift of the machine
    affects both equally. The ratio is the median of original / pruned over the rounds, with a 95 %
    percentile bootstrap interval. A compiled model runs compiled.

    Args:
        original: The model before the cut.
        pruned: The model after it, on the same device.
        make_batch: ``make_batch(batch, length)`` makes the input of both; see ``shaped_batch``.
        batch_sizes: Examples per call.
        lengths: Tokens per example.
        seconds: Rounds of a cell end when their calls have taken this long in total.
        warmup: Calls of each model before timing.
        min_rounds: Rounds of a cell, however long they take.
        max_rounds: Rounds of a cell at most.
        seed: Of the bootstrap.
        progress: Show a progress bar.

    Returns:
        One row per length and batch size.

    Raises:
        InvalidValue: wrong sizes, or models on two devices.

    >>> from headprune import MultiHeadAttention
    >>> models = MultiHeadAttention(8, 4), MultiHeadAttention(8, 2)
    >>> rows = compare_latency(
    ...     *models, lambda n, t: torch.randn(n, t, 8), [1, 2], [5], seconds=0, min_rounds=2
    ... )
    >>> [(row.batch, row.length, row.rounds) for row in rows]
    [(1, 5, 2), (2, 5, 2)]
    """
    effort = Effort(seconds, warmup, min_rounds, max_rounds)
    lengths = sizes_of("lengths", lengths)
    batch_sizes = sizes_of("batch_sizes", batch_sizes)
    cells = [(batch, length) for length in lengths for batch in batch_sizes]
    device = device_of(original)
    if device_of(pruned) != device:
        must = f"on {device}, where the original is"
        raise InvalidValue("pruned", must, device_of(pruned), "Move it there.")
    rows = []
    with ExitStack() as stack:
        stack.enter_context(undisturbed(original, compiled=True, packed=True))
        stack.enter_context(undisturbed(pruned, compiled=True, packed=True))
        stack.enter_context(torch.inference_mode())
        for batch, length in bar(cells, "latency", progress):
            inputs = to_device(make_batch(batch, length), device)
            runs = [partial(call, original, inputs), partial(call, pruned, inputs)]
            rows.append(speed_row(batch, length, in_turn(runs, device, effort), seed))
    return tuple(rows)


def rounds(
    timed: Callable[[int], tuple[float, ...]], effort: Effort, models: int = 2
) -> np.ndarray:
    """Time rounds of one call per model; each model goes first equally often.

    Args:
        timed: ``timed(i)`` calls model i and returns its seconds.
        effort: The limits.
        models: How many models.

    Returns:
        Seconds, ``[rounds, models, ...]``.
    """
    # Warm-up compiles kernels and fills caches.
    for _ in range(effort.warmup):
        for which in range(models):
            timed(which)
    times: list[list[tuple[float, ...]]] = []
    spent = 0.0
    with no_collection():
        while len(times) < effort.max_rounds:
            enough = len(times) >= effort.min_rounds and spent >= effort.seconds
            # Only at a multiple of the models has each gone first equally often.
            if enough and len(times) % models == 0:
                break
            took: list[tuple[float, ...]] = [()] * models
            for turn in range(models):
                which = (turn + len(times)) % models
                took[which] = timed(which)
            times.append(took)
            spent += sum(map(sum, took))
    return np.array(times)


def in_turn(runs: Sequence[Callable[[], Any]], device: torch.device, effort: Effort) -> np.ndarray:
    """Time functions in rounds; return seconds, ``[rounds, runs]``."""

    def timed(which: int) -> tuple[float]:
        # An accelerator returns from a call before its work is done.
        synchronize(device)
        start = perf_counter()
        runs[which]()
        synchronize(device)
        return (perf_counter() - start,)

    return rounds(timed, effort, len(runs))[:, :, 0]


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done its work; a CPU needs no wait."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    elif device.type == "xpu":
        torch.xpu.synchronize(device)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of the timings."""
    running = gc.isenabled()
    # Now, because garbage from before would fill the memory while it is off.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def speed_row(batch: int, length: int, times: np.ndarray, seed: int) -> SpeedRow:
    """Summarise the seconds ``[rounds, 2]`` of one cell."""
    ratios = times[:, 0] / times[:, 1]  # [rounds], paired within a round
    # 95 % percentile bootstrap interval of the median.
    draws = np.random.default_rng(seed).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), (2.5, 97.5))
    p50 = np.percentile(times, 50, axis=0)
    p90 = np.percentile(times, 90, axis=0)
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
    """Repeat or cut the rows and tokens of an example to a given size; drop labels.

    ``input_ids``, ``inputs_embeds`` and every other ``[batch, tokens]`` get ``length`` tokens; so
    do a decoder's. Attention masks are all ones and ``position_ids`` count up. Other tensors,
    images for example, only get ``batch`` rows.

    Args:
        example: A model's inputs; tensors have the examples first.
        batch: New number of rows.
        length: New number of tokens; default unchanged.

    Returns:
        The new inputs.

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
    check_whole_number("batch", batch, 1)
    if length is not None:
        check_whole_number("length", length, 1)
    must = "a mapping of tensors with the examples first"
    if not isinstance(example, Mapping):
        raise InvalidValue("example", must, type(example).__name__)
    inputs = {name: value for name, value in example.items() if name not in _LABELS}
    if not any(isinstance(v, Tensor) and v.ndim and len(v) for v in inputs.values()):
        raise InvalidValue("example", must, sorted(inputs))
    return {name: _shaped(name, value, inputs, batch, length) for name, value in inputs.items()}


def _shaped(
    name: str, value: Any, inputs: Mapping[str, Any], batch: int, length: int | None
) -> Any:
    """Bring one input to the given rows and, if it has tokens, to the given length."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    # Rows and tokens start again from the first where there are too few.
    rows = value.index_select(0, torch.arange(batch, device=value.device) % len(value))
    if not _has_tokens(name, value, inputs):
        return rows
    if length is None:
        length = value.shape[1]
    places = torch.arange(length, device=value.device)
    if name.endswith("position_ids"):
        return places.to(value.dtype).expand(batch, length).contiguous()
    rows = rows.index_select(1, places % value.shape[1])
    # No padding: all tokens count.
    return torch.ones_like(rows) if name in _MASKS else rows


def _has_tokens(name: str, value: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Whether the second axis of an input is the tokens of the encoder or of the decoder."""
    if value.ndim != 2 and name not in TOKENS:
        return False
    decoder = name.startswith("decoder_")
    for other in TOKENS:
        if other in inputs and other.startswith("decoder_") == decoder:
            n_tokens: int = inputs[other].shape[1]
            return value.shape[1] == n_tokens
    return False


def sizes_of(name: str, sizes: Sequence[int]) -> list[int]:
    """Check a list of counts >= 1 and return a copy."""
    if isinstance(sizes, (str, int)) or not len(sizes):
        raise InvalidValue(name, "a list of counts, at least one", repr(sizes))
    for size in sizes:
        check_whole_number(name, size, 1)
    return list(sizes)


def check_seconds(where: str, value: Any) -> None:
    """Refuse everything but a number >= 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= 0:  # NaN is not >= 0
        raise InvalidValue(where, "a number >= 0", repr(value))


def check_whole_number(where: str, value: Any, least: int) -> None:
    """Refuse everything but a whole number >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidValue(where, f"a whole number >= {least}", repr(value))
