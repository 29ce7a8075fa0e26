"""What a model puts out, read as distributions, and a seed for every example; needs no labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.model.losses import (
    inputs_of,
    is_causal_lm,
    is_encoder_decoder,
    problem_type,
    reads_next,
)
from headprune.model.masks import token_mask, unmasked
from headprune.model.padding import output_mask
from headprune.model.running import ANSWERS, batch_size, call, tensors
from headprune.model.transfers import sent

_IGNORED = -100


@dataclass(frozen=True)
class Distributions:
    """A model's output as ``positions`` distributions an example.

    Args:
        kind: ``single_label_classification`` (a softmax over the last axis),
            ``multi_label_classification`` (a sigmoid each) or ``regression``.
        logits: ``[batch, positions, classes]``, with their graph.
        counted: ``[batch, positions]``, on the CPU: which positions the default loss averages over.
        by_token: Whether there is one for every token, or end of an answer, and not one an example.
    """

    kind: str
    logits: Tensor
    counted: Tensor
    by_token: bool = True

    def numbers(self) -> Tensor:
        """``[batch]``: a number an example that all of its counted logits are in, each with a
        weight of its own."""
        counted = sent(self.counted, self.logits.device).unsqueeze(-1)
        logits = self.logits.masked_fill(~counted, 0).flatten(1)
        weights = torch.arange(logits.shape[1], device=logits.device, dtype=torch.float32).cos()
        return logits @ weights.to(logits.dtype)

    def logits_counted(self) -> Tensor:
        """``[counted positions, classes]``: those that count, example after example."""
        examples, positions = (
            sent(index, self.logits.device) for index in self.counted.nonzero(as_tuple=True)
        )
        return self.logits[examples, positions]


def distributions(
    model: nn.Module, batch: Any, where: str, given: Any = None, shifted: bool | None = None
) -> Distributions:
    """Runs a model and reads its output; labels, if there are any, only say which positions count.

    Args:
        model: The model.
        batch: A batch on its device.
        where: What the batch is called in messages.
        given: The same batch as the user gave it; default ``batch``. A mask that is in main memory
            there need not be copied from the device, for which Python would wait.
        shifted: Whether labels of tokens are those of the next token; None goes by the model's
            class.

    Raises:
        InvalidValue: an output that is no logits, or a batch that the model itself does not take.
    """
    try:
        output = call(model, inputs_of(model, batch))
    except (
        TypeError
    ) as error:  # a batch with targets in it that only a loss of the user's can take apart
        hint = (
            "The model itself is called here, not your loss: give batches without targets, or"
            " another scorer."
        )
        raise InvalidValue(
            where, f"what {type(model).__name__} takes", f"a batch that it refuses: {error}", hint
        ) from error
    return distributions_of(model, batch, output, where, given, shifted)


def distributions_of(
    model: nn.Module,
    batch: Any,
    output: Any,
    where: str,
    given: Any = None,
    shifted: bool | None = None,
) -> Distributions:
    """Reads a model's output for a batch; see ``distributions``."""
    mapping = batch if isinstance(batch, Mapping) else {}
    name = "decoder_attention_mask" if is_encoder_decoder(model) else "attention_mask"
    mask = mapping.get(name)
    if isinstance(output, Mapping) and "start_logits" in output:
        return _ends(torch.stack([output["start_logits"], output["end_logits"]], 1), mask)
    logits = output.get("logits") if isinstance(output, Mapping) else output
    if (
        not isinstance(logits, Tensor)
        or logits.ndim not in (2, 3)
        or not logits.is_floating_point()
    ):
        got = (
            f"a {type(output).__name__}"
            if not isinstance(logits, Tensor)
            else f"a tensor {list(logits.shape)}"
        )
        hint = "Use fisher with a loss of your own, or a model with a head."
        raise InvalidValue(
            f"the model's output for {where}",
            "logits [batch, classes] or [batch, tokens, ...]",
            got,
            hint,
        )
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if logits.ndim == 2:
        labels = mapping.get("labels")
        kind = problem_type(
            model,
            labels if isinstance(labels, Tensor) else torch.zeros(0, dtype=torch.long),
            logits,
        )
        return Distributions(
            kind, logits.unsqueeze(1), torch.ones(len(logits), 1, dtype=torch.bool), False
        )
    known = given if isinstance(given, Mapping) else mapping
    by_next = reads_next(model) if shifted is None else shifted
    by_next = by_next or (known.get("labels") is None and is_causal_lm(model))
    return _tokens(model, logits, known, by_next)


def _ends(logits: Tensor, mask: Any) -> Distributions:
    """Where an answer begins and ends: padding takes no part, as in the default loss."""
    here = token_mask({"attention_mask": mask}, (logits.shape[0], logits.shape[2]))
    if here is not None:
        logits = logits.masked_fill(~here.unsqueeze(1), float("-inf"))
    counted = torch.ones(logits.shape[:2], dtype=torch.bool)
    return Distributions("single_label_classification", logits, counted)


def _tokens(
    model: nn.Module, logits: Tensor, batch: Mapping[str, Any], by_next: bool
) -> Distributions:
    """A distribution for every token; where it is that of the next token, the last one, and any
    after padding, predicts nothing."""
    shape, labels = logits.shape[:2], batch.get("labels")
    counted = torch.ones(shape, dtype=torch.bool)
    found = output_mask(model, batch, (shape[0], shape[1]))
    here = counted if found is None else found.cpu()
    counted = counted & here
    if isinstance(labels, Tensor) and labels.shape == shape:
        counted = counted & (labels.cpu() != _IGNORED)
    if by_next:
        logits, counted = logits[:, :-1], counted[:, 1:] & here[:, :-1]
    return Distributions("single_label_classification", logits, counted)


def content_seeds(model: nn.Module, batch: Any, seed: int) -> list[int]:
    """A seed an example from what it contains, padding left out: the model's main input, or all
    tensors but answers.

    Give the batch as the user gave it: one on an accelerator has to be copied back.
    """
    mapping = batch if isinstance(batch, Mapping) else {}
    main = mapping.get(getattr(model, "main_input_name", ""))
    mask = mapping.get("attention_mask")
    size = batch_size(batch)
    others = {k: v for k, v in mapping.items() if k not in ANSWERS} if mapping else batch
    parts = (
        [main]
        if isinstance(main, Tensor)
        else [t for t in tensors(others) if t.ndim and len(t) == size]
    )
    parts = [part.detach().cpu() for part in parts]
    here = unmasked(mask.cpu()) if isinstance(mask, Tensor) else None
    seeds = []
    for example in range(size):
        digest = hashlib.blake2b(str(seed).encode(), digest_size=8)
        for part in parts:
            row = part[example]
            if here is not None and part.shape[:2] == here.shape:
                row = row[here[example]]
            digest.update(row.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        seeds.append(int.from_bytes(digest.digest(), "little") % 2**63)
    return seeds
