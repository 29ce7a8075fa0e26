"""Generation before and after a cut: times of prefill and decode, and the bytes of the cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headprune.bench.latency import (
    Effort,
    check_whole_number,
    rounds,
    sizes_of,
    speed_row,
    synchronize,
)
from headprune.core.errors import InvalidValue
from headprune.core.record import SpeedRow
from headprune.model.losses import is_causal_lm
from headprune.model.running import device_of, undisturbed
from headprune.model.sites import unwrap


@dataclass(frozen=True)
class DecodingRow:
    """The measurements of one batch size and prompt length.

    Args:
        new_tokens: Tokens after the prompt.
        prefill: Seconds of the prompt's pass.
        decode: Seconds of all steps after it, one token each.
        original_bytes, pruned_bytes: Of the keys and values in the final cache.
    """

    new_tokens: int
    prefill: SpeedRow
    decode: SpeedRow
    original_bytes: int
    pruned_bytes: int

    def tokens_per_second(self) -> dict[str, float]:
        """Return tokens of all examples per median second, by model and phase."""
        phases = (
            ("prefill", self.prefill, self.prefill.length),
            ("decode", self.decode, self.new_tokens),
        )
        speeds = {}
        for phase, row, count in phases:
            n_tokens = row.batch * count
            speeds[f"original_{phase}"] = n_tokens / row.original_p50
            speeds[f"pruned_{phase}"] = n_tokens / row.pruned_p50
        return speeds


def compare_decoding(
    original: nn.Module,
    pruned: nn.Module,
    batch_sizes: Sequence[int] = (1, 8),
    prompts: Sequence[int] = (128,),
    new_tokens: int = 32,
    *,
    seconds: float = 5.0,
    warmup: int = 1,
    min_rounds: int = 10,
    max_rounds: int = 100,
    seed: int = 0,
) -> tuple[DecodingRow, ...]:
    """Time two causal language models with their KV cache, alternately as ``compare_latency``.

    Both models read the same random tokens; no sampling is timed. Only the last position's logits
    are computed, as in generation, where the model's ``forward`` has ``logits_to_keep``. A compiled
    model runs compiled.

    Args:
        original: The model before the cut.
        pruned: The model after it, on the same device.
        batch_sizes: Examples per call.
        prompts: Tokens of a prompt.
        new_tokens: Tokens after it.
        seconds: Rounds of one cell end when their calls have taken this long in total.
        warmup: Rounds before a cell is timed.
        min_rounds: Rounds of a cell, however long they take.
        max_rounds: Rounds of a cell at most.
        seed: Of the tokens and of the bootstrap.

    Returns:
        One row for each prompt length and, within it, each batch size.

    Raises:
        InvalidValue: sizes below 1, a model that is no causal language model, models on two
            devices.
    """
    # 1. Check everything.
    effort = Effort(seconds, warmup, min_rounds, max_rounds)
    check_whole_number("new_tokens", new_tokens, 1)
    device = device_of(original)
    for name, model in (("original", original), ("pruned", pruned)):
        if not is_causal_lm(model):
            must = "a causal language model of Transformers"
            raise InvalidValue(name, must, type(model).__name__)
        if device_of(model) != device:
            must = f"on {device}, where the original is"
            raise InvalidValue(name, must, device_of(model), "Move it there.")

    # 2. Time every cell.
    vocabulary = int(original.config.vocab_size)  # type: ignore[union-attr, arg-type]
    models = (original, pruned)  # `timed` takes their index
    options = list(map(_last_logits, models))
    draw = torch.Generator().manual_seed(seed)
    rows = []
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(undisturbed(model, compiled=True, packed=True))
        stack.enter_context(torch.inference_mode())
        # Each cell has its own tokens, equal for both models.
        for prompt in sizes_of("prompts", prompts):
            for batch in sizes_of("batch_sizes", batch_sizes):
                size = (batch, prompt + new_tokens)
                ids = torch.randint(vocabulary, size, generator=draw).to(device)
                n_bytes = [0, 0]  # of the caches of the two models

                # The defaults bind this cell's values.
                def timed(
                    which: int, ids: Tensor = ids, prompt: int = prompt, held: list[int] = n_bytes
                ) -> Any:
                    took, held[which] = _timed(models[which], ids, prompt, options[which])
                    return took

                times = rounds(timed, effort)  # [rounds, models, 2 phases]
                prefill = speed_row(batch, prompt, times[:, :, 0], seed)
                decode = speed_row(batch, prompt, times[:, :, 1], seed)
                rows.append(DecodingRow(new_tokens, prefill, decode, *n_bytes))
    return tuple(rows)


def _last_logits(model: nn.Module) -> dict[str, Any]:
    """Return the option that limits logits to the last position, if the model has it."""
    if "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters:
        return {"logits_to_keep": 1}
    return {}


def _timed(
    model: nn.Module, ids: Tensor, prompt: int, options: dict[str, Any]
) -> tuple[tuple[float, float], int]:
    """Return the seconds of the prompt and of the steps after it, and the cache's bytes."""
    # 1. Prefill.
    synchronize(ids.device)
    start = perf_counter()
    cache = model(input_ids=ids[:, :prompt], use_cache=True, **options).past_key_values
    synchronize(ids.device)

    # 2. Decode, one token per step.
    begun = perf_counter()
    for place in range(prompt, ids.shape[1]):
        step = ids[:, place : place + 1]
        cache = model(
            input_ids=step, past_key_values=cache, use_cache=True, **options
        ).past_key_values
    synchronize(ids.device)
    return (begun - start, perf_counter() - begun), cache_bytes(cache)


def cache_bytes(cache: Any) -> int:
    """Count the bytes of the keys and values in a Transformers cache."""
    n_bytes = 0
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            if tensor is not None:  # a layer that never ran
                n_bytes += tensor.numel() * tensor.element_size()
    return n_bytes
