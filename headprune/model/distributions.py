"""A model's output as distributions, and a seed for every example; needs no labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """A model's output as ``positions`` distributions per example.

    Args:
        kind: ``single_label_classification`` (a softmax over the last axis),
            ``multi_label_classification`` (a sigmoid each) or ``regression``.
        logits: ``[batch, positions, classes]``, with their graph.
        counted: ``[batch, positions]``, on the CPU: which positions the default loss averages over.
        by_token: Whether there is one for every token, or end of an answer, and not one per
            example.
    """

    kind: str
    logits: Tensor
    counted: Tensor
    by_token: bool = True

    def numbers(self) -> Tensor:
        """A weighted sum ``[batch]`` of each example's counted logits, each weight different."""
        # [batch, positions, 1]; cosines of different numbers are all different
        counted = sent(self.counted, self.logits.device).unsqueeze(-1)
        logits = self.logits.masked_fill(~counted, 0).flatten(1)
        weights = torch.arange(logits.shape[1], device=logits.device, dtype=torch.float32).cos()
        return logits @ weights.to(logits.dtype)

    def logits_counted(self) -> Tensor:
        """The logits ``[counted positions, classes]`` that count, example after example."""
        # The mask is on the CPU, so nothing waits for the numbers of positions.
        examples, positions = self.counted.nonzero(as_tuple=True)
        device = self.logits.device
        return self.logits[sent(examples, device), sent(positions, device)]

    def thinned(self, most: int) -> Distributions:
        """Keep at most ``most`` counted positions per example, spread evenly over those it has."""
        examples, positions = self.counted.shape
        if positions <= most:
            return self
        chosen = torch.zeros(examples, most, dtype=torch.long)
        counted = torch.zeros(examples, most, dtype=torch.bool)
        for example, row in enumerate(self.counted):
            places = row.nonzero().flatten()
            if len(places) > most:
                # The middle of each of so many equal stretches.
                middles = (torch.arange(most) + 0.5) * len(places) / most
                places = places[middles.long()]
            chosen[example, : len(places)] = places
            counted[example, : len(places)] = True
        # [batch, most, classes]
        index = sent(chosen, self.logits.device).unsqueeze(-1)
        logits = self.logits.take_along_dim(index, 1)
        return replace(self, logits=logits, counted=counted)


def distributions(
    model: nn.Module, batch: Any, where: str, given: Any = None, shifted: bool | None = None
) -> Distributions:
    """Run a model and read its output as distributions.

    Labels, if there are any, only decide which positions count.

    Args:
        model: The model.
        batch: A batch on its device.
        where: What messages call the batch.
        given: The same batch as the user gave it; default ``batch``. If its mask is in main memory,
            Python need not wait for a copy from the device.
        shifted: Whether labels of tokens are those of the next token; None goes by the model's
            class.

    Raises:
        InvalidValue: an output that is no logits, or a batch that the model itself does not take.
    """
    try:
        output = call(model, inputs_of(model, batch))
    except TypeError as error:  # a batch with targets, which only the user's loss can take apart
        must = f"what {type(model).__name__} takes"
        got = f"a batch that it refuses: {error}"
        hint = (
            "The model itself is called here, not your loss: give batches without targets, or"
            " another scorer."
        )
        raise InvalidValue(where, must, got, hint) from error
    return distributions_of(model, batch, output, where, given, shifted)


def distributions_of(
    model: nn.Module,
    batch: Any,
    output: Any,
    where: str,
    given: Any = None,
    shifted: bool | None = None,
) -> Distributions:
    """Read a model's output for a batch; see ``distributions``."""
    mapping = batch if isinstance(batch, Mapping) else {}
    if isinstance(output, Mapping) and "start_logits" in output:
        # Encoder-decoders search the answer in the decoder's tokens.
        name = "attention_mask"
        if is_encoder_decoder(model):
            name = "decoder_attention_mask"
        ends = torch.stack([output["start_logits"], output["end_logits"]], 1)
        return _of_ends(ends, mapping.get(name))
    logits = _logits_of(output, where)
    if logits.ndim == 2:  # [batch, classes]
        return _of_examples(model, logits, mapping.get("labels"))
    known = given if isinstance(given, Mapping) else mapping
    if shifted is None:
        shifted = reads_next(model)
    shifted = shifted or (known.get("labels") is None and is_causal_lm(model))
    return _of_tokens(model, logits, known, shifted)


def _logits_of(output: Any, where: str) -> Tensor:
    """The logits of an output, in fp32 where they are narrower."""
    logits = output.get("logits") if isinstance(output, Mapping) else output
    place = f"the model's output for {where}"
    must = "logits [batch, classes] or [batch, tokens, ...]"
    hint = "Give a loss of your own (loss=) to surgeon, fisher or Ladder(order='fluctuation'), or"
    hint += " take a model with a head."
    if not isinstance(logits, Tensor):
        raise InvalidValue(place, must, f"a {type(output).__name__}", hint)
    if logits.ndim not in (2, 3) or not logits.is_floating_point():
        raise InvalidValue(place, must, f"a tensor {list(logits.shape)}", hint)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits


def _of_examples(model: nn.Module, logits: Tensor, labels: Any) -> Distributions:
    """One distribution per example, from logits ``[batch, classes]``."""
    if not isinstance(labels, Tensor):  # whole numbers: a single label if the model does not say
        labels = torch.zeros(0, dtype=torch.long)
    kind = problem_type(model, labels, logits)
    counted = torch.ones(len(logits), 1, dtype=torch.bool)
    return Distributions(kind, logits.unsqueeze(1), counted, by_token=False)


def _of_ends(logits: Tensor, mask: Any) -> Distributions:
    """Where an answer begins and ends; padding takes no part, as in the default loss.

    Args:
        logits: ``[batch, 2, tokens]``.
        mask: The attention mask of the tokens, if there is one.
    """
    unpadded = token_mask({"attention_mask": mask}, (logits.shape[0], logits.shape[2]))
    if unpadded is not None:
        logits = logits.masked_fill(~unpadded.unsqueeze(1), float("-inf"))
    counted = torch.ones(logits.shape[:2], dtype=torch.bool)
    return Distributions("single_label_classification", logits, counted)


def _of_tokens(
    model: nn.Module, logits: Tensor, batch: Mapping[str, Any], shifted: bool
) -> Distributions:
    """A distribution for every token, or for every next token if ``shifted``."""
    shape, labels = logits.shape[:2], batch.get("labels")
    mask = output_mask(model, batch, (shape[0], shape[1]))
    unpadded = torch.ones(shape, dtype=torch.bool) if mask is None else mask.cpu()
    counted = unpadded
    if isinstance(labels, Tensor) and labels.shape == shape:
        counted = counted & (labels.cpu() != _IGNORED)
    if shifted:
        # The last token, and padding, predict nothing.
        logits, counted = logits[:, :-1], counted[:, 1:] & unpadded[:, :-1]
    return Distributions("single_label_classification", logits, counted)


def content_seeds(model: nn.Module, batch: Any, seed: int) -> list[int]:
    """Compute a seed per example from what it contains, without padding.

    So what is drawn for an example does not depend on its batch.

    Args:
        model: Names its main input. Where the batch lacks it, all tensors but answers count.
        batch: The batch as the user gave it; one on an accelerator has to be copied back.
        seed: Enters every seed.
    """
    mapping = batch if isinstance(batch, Mapping) else {}
    mask = mapping.get("attention_mask")
    # Padding depends on the batch.
    unpadded = unmasked(mask.cpu()) if isinstance(mask, Tensor) else None
    parts = [part.detach().cpu() for part in _contents(model, batch)]
    seeds = []
    for example in range(batch_size(batch)):
        digest = hashlib.blake2b(str(seed).encode(), digest_size=8)
        for part in parts:
            row = part[example]
            # Only tensors with an axis of tokens have padding.
            if unpadded is not None and part.shape[:2] == unpadded.shape:
                row = row[unpadded[example]]
            digest.update(row.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        # Generators take seeds below 2 ** 63.
        seeds.append(int.from_bytes(digest.digest(), "little") % 2**63)
    return seeds


def _contents(model: nn.Module, batch: Any) -> list[Tensor]:
    """The model's main input, or all tensors by example that are no answers."""
    inputs = batch
    if isinstance(batch, Mapping):
        main = batch.get(getattr(model, "main_input_name", ""))
        if isinstance(main, Tensor):
            return [main]
        inputs = {name: value for name, value in batch.items() if name not in ANSWERS}
    size = batch_size(batch)
    return [tensor for tensor in tensors(inputs) if tensor.ndim and len(tensor) == size]
