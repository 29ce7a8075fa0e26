"""Generation before and after a cut: the time of the prompt, the time of the tokens after it, and
the cache's bytes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headprune.bench.latency import Effort, check_count, rounds, sizes_of, speed_row, synchronize
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
        phases = (
            ("prefill", self.prefill, self.prefill.length),
            ("decode", self.decode, self.new_tokens),
        )
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
    min_rounds: int = 10,
    max_rounds: int = 100,
    seed: int = 0,
) -> tuple[DecodingRow, ...]:
    """Times two causal language models with their KV cache, in turn, as ``compare_latency`` does.

    The tokens are drawn and given, not chosen: both models read the same, and no choice is timed.
    Of the logits only the last position's are made, where the model's ``forward`` knows
    ``logits_to_keep``, as in generation. A compiled model runs compiled.

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
        InvalidValue: sizes below 1, a model that is no causal language model, models on two
            devices.
    """
    effort = Effort(seconds, warmup, min_rounds, max_rounds)
    check_count("new_tokens", new_tokens, 1)
    device = device_of(original)
    for name, model in (("original", original), ("pruned", pruned)):
        if not is_causal_lm(model):
            raise InvalidValue(
                name, "a causal language model of Transformers", type(model).__name__
            )
        if device_of(model) != device:
            raise InvalidValue(
                name, f"on {device}, where the original is", device_of(model), "Move it there."
            )
    vocabulary = int(original.config.vocab_size)  # type: ignore[union-attr, arg-type]
    models = (original, pruned)
    options = [_last_logits(model) for model in models]
    draw, rows = torch.Generator().manual_seed(seed), []
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(undisturbed(model, compiled=True, packed=True))
        stack.enter_context(torch.inference_mode())
        for prompt in sizes_of("prompts", prompts):
            for batch in sizes_of("batch_sizes", batch_sizes):
                ids = torch.randint(vocabulary, (batch, prompt + new_tokens), generator=draw).to(
                    device
                )
                held = [0, 0]

                def timed(
                    which: int, ids: Tensor = ids, prompt: int = prompt, held: list[int] = held
                ) -> Any:
                    took, held[which] = _timed(models[which], ids, prompt, options[which])
                    return took

                times = rounds(timed, effort)
                prefill, decode = (
                    speed_row(batch, prompt, times[:, :, phase], seed) for phase in (0, 1)
                )
                rows.append(DecodingRow(new_tokens, prefill, decode, *held))
    return tuple(rows)


def _last_logits(model: nn.Module) -> dict[str, Any]:
    """The argument by which a model makes the last position's logits alone, where it knows one."""
    return (
        {"logits_to_keep": 1}
        if "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters
        else {}
    )


def _timed(
    model: nn.Module, ids: Tensor, prompt: int, options: dict[str, Any]
) -> tuple[tuple[float, float], int]:
    """Seconds of the prompt and of the steps after it, and the bytes that the cache holds then."""
    synchronize(ids.device)
    start = perf_counter()
    cache = model(input_ids=ids[:, :prompt], use_cache=True, **options).past_key_values
    synchronize(ids.device)
    begun = perf_counter()
    for place in range(prompt, ids.shape[1]):
        step = ids[:, place : place + 1]
        cache = model(
            input_ids=step, past_key_values=cache, use_cache=True, **options
        ).past_key_values
    synchronize(ids.device)
    return (begun - start, perf_counter() - begun), cache_bytes(cache)


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a Transformers cache, measured on its tensors."""
    held = (
        tensor
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
        if tensor is not None
    )
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
