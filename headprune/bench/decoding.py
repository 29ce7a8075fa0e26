"""Generation before and after a cut: the time of the prompt, the time of the tokens after it, and the cache's bytes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune.bench.latency import _check_count, _Effort, _row, _sizes, no_collection, synchronize
from headprune.core.errors import InvalidValue
from headprune.core.record import SpeedRow
from headprune.model.losses import is_causal_lm
from headprune.model.running import device_of, undisturbed
from headprune.model.sites import unwrap


@dataclass(frozen=True)
class DecodingRow:
    """One batch size and prompt length.

    Args:
        new_tokens: Tokens after the prompt.
        prefill: Seconds of the prompt's pass.
        decode: Seconds of all steps after it, one token each.
        original_bytes, pruned_bytes: Of the keys and values that the cache holds in the end.
    """

    new_tokens: int
    prefill: SpeedRow
    decode: SpeedRow
    original_bytes: int
    pruned_bytes: int

    def tokens_per_second(self) -> dict[str, float]:
        """Of both models, in prefill and in decode: tokens of all examples, by the median time."""
        phases = (("prefill", self.prefill, self.prefill.length), ("decode", self.decode, self.new_tokens))
        return {
            f"{which}_{phase}": row.batch * count / getattr(row, f"{which}_p50")
            for phase, row, count in phases
            for which in ("original", "pruned")
        }


def compare_decoding(
    original: nn.Module,
    pruned: nn.Module,
    batch_sizes: Sequence[int] = (1, 8),
    prompts: Sequence[int] = (128,),
    new_tokens: int = 32,
    *,
    seconds: float = 5.0,
    warmup: int = 1,
    min_rounds: int = 4,
    max_rounds: int = 100,
    seed: int = 0,
) -> tuple[DecodingRow, ...]:
    """Times two causal language models with their KV cache, in turn, as ``compare_latency`` does.

    The tokens are drawn and given, not chosen: both models read the same, and no choice is timed. Of the logits only
    the last position's are made, where the model's ``forward`` knows ``logits_to_keep``, as in generation.
    A compiled model runs compiled.

    Args:
        original: The model before the cut.
        pruned: The model after it, on the same device.
        batch_sizes: Examples a call.
        prompts: Tokens of a prompt.
        new_tokens: Tokens after it.
        seconds: Rounds of one cell end when their calls have taken this long together.
        warmup: Rounds before a cell is timed.
        min_rounds: Rounds of a cell, however long they take.
        max_rounds: Rounds of a cell at most.
        seed: Of the tokens and of the bootstrap.

    Returns:
        One row for each prompt length and, within it, each batch size.

    Raises:
        InvalidValue: sizes below 1, a model that is no causal language model, models on two devices.
    """
    effort = _Effort(seconds, warmup, min_rounds, max_rounds)
    _check_count("new_tokens", new_tokens, 1)
    device = device_of(original)
    for name, model in (("original", original), ("pruned", pruned)):
        if not is_causal_lm(model):
            raise InvalidValue(name, "a causal language model of Transformers", type(model).__name__)
        if device_of(model) != device:
            raise InvalidValue(name, f"on {device}, where the original is", device_of(model), "Move it there.")
    vocabulary = int(original.config.vocab_size)  # type: ignore[union-attr, arg-type]
    draw, rows = torch.Generator().manual_seed(seed), []
    with ExitStack() as stack:
        for model in (original, pruned):
            stack.enter_context(undisturbed(model, compiled=True))
        stack.enter_context(torch.inference_mode())
        for prompt in _sizes("prompts", prompts):
            for batch in _sizes("batch_sizes", batch_sizes):
                ids = torch.randint(vocabulary, (batch, prompt + new_tokens), generator=draw).to(device)
                times, held = _rounds((original, pruned), ids, prompt, effort)
                prefill, decode = (_row(batch, prompt, times[:, :, phase], seed) for phase in (0, 1))
                rows.append(DecodingRow(new_tokens, prefill, decode, *held))
    return tuple(rows)


def _rounds(
    models: tuple[nn.Module, nn.Module], ids: Tensor, prompt: int, effort: _Effort
) -> tuple[np.ndarray, tuple[int, int]]:
    """Seconds ``[rounds, 2 models, 2 phases]``, and the bytes of both caches."""
    times: list[list[tuple[float, float]]] = []
    held = [0, 0]
    for _ in range(effort.warmup):
        for model in models:
            _timed(model, ids, prompt)
    spent = 0.0
    with no_collection():
        while len(times) < effort.max_rounds and (
            len(times) < effort.min_rounds or len(times) % 2 or spent < effort.seconds
        ):
            took = [(0.0, 0.0), (0.0, 0.0)]
            for which in (0, 1) if len(times) % 2 == 0 else (1, 0):
                took[which], held[which] = _timed(models[which], ids, prompt)
            times.append(took)
            spent += sum(map(sum, took))
    return np.array(times), (held[0], held[1])


def _timed(model: nn.Module, ids: Tensor, prompt: int) -> tuple[tuple[float, float], int]:
    last: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters:
        last["logits_to_keep"] = 1
    synchronize(ids.device)
    start = perf_counter()
    cache = model(input_ids=ids[:, :prompt], **last).past_key_values
    synchronize(ids.device)
    begun = perf_counter()
    for place in range(prompt, ids.shape[1]):
        cache = model(input_ids=ids[:, place : place + 1], past_key_values=cache, **last).past_key_values
    synchronize(ids.device)
    return (begun - start, perf_counter() - begun), cache_bytes(cache)


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a Transformers cache, measured on its tensors."""
    held = (tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
