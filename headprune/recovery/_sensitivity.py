"""Measures how strongly a model's output depends on each token that its projections write."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.distributions import content_seeds, distributions_of
from headprune.model.padding import output_mask
from headprune.model.running import batch_size, device_of, outputs, to_device
from headprune.model.transfers import sent

#: Random combinations of the output.
DRAWS = 4
_SEED = 0
_HINT = 'token_weights="equal" needs no slopes.'

#: A part of the output, ``[batch, positions, classes]``, and the positions that count,
#: ``[batch, positions]`` in main memory.
OutputPart: TypeAlias = tuple[Tensor, Tensor]


def sensitivities(
    model: nn.Module,
    projections: Sequence[nn.Module],
    batch: Any,
    run: Callable[[nn.Module, Any], Any],
) -> list[list[Tensor]]:
    """Compute the mean over z of ``|d(z·output) / d(what a projection writes)|²`` per token.

    z is a random sign for every number of an example's output, drawn from a seed that depends on
    the example's contents alone. The mean over all z is the squared norm of the output's
    derivative. What a projection writes and the stream that it is added to have the same slopes.

    Args:
        model: The model; its weights need no gradient.
        projections: Modules that return one tensor.
        batch: The batch, as the user gave it.
        run: Runs the model on it, and returns logits, other numbers of every example, or losses
            ``[batch]``.

    Returns:
        By projection and call ``[..., 1]``. Zeros for a call that the output does not depend on or
        that has no derivative.

    Raises:
        InvalidValue: an output without numbers of every example.
        UnsupportedModel: an output that cannot be differentiated.
    """
    written: list[list[Tensor]] = [[] for _ in projections]

    def hook(number: int) -> Callable[..., Tensor | None]:
        def returned(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            written[number].append(output)
            if output.is_inference():
                return None
            if not output.requires_grad:
                output.requires_grad_()
            # A copy, because the model may go on to change it in place.
            return output.clone()

        return returned

    with torch.enable_grad():
        with ExitStack() as stack:
            for number, projection in enumerate(projections):
                stack.callback(projection.register_forward_hook(hook(number)).remove)
            on_device = to_device(batch, device_of(model))
            output = run(model, on_device)
        combined = _combinations(model, on_device, batch, output)
        slopes = _squared_slopes(model, combined, list(itertools.chain(*written)))
    by_projection = []
    begin = 0
    for calls in written:
        by_projection.append(slopes[begin : begin + len(calls)])
        begin += len(calls)
    return by_projection


def _squared_slopes(
    model: nn.Module, combined: Sequence[Tensor], written: Sequence[Tensor]
) -> list[Tensor]:
    """Return the mean squared slope of the combinations for each tensor, ``[..., 1]``."""
    totals: list[Tensor] = []
    numbers: list[int] = []  # of the tensors that can be differentiated
    differentiable: list[Tensor] = []
    for number, tensor in enumerate(written):
        # Half precision would overflow at the squares.
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        totals.append(tensor.new_zeros(*tensor.shape[:-1], 1, dtype=dtype))
        if tensor.requires_grad:
            numbers.append(number)
            differentiable.append(tensor)
    where = type(model).__name__
    must = 'an output that can be differentiated, for token_weights="output"'
    if not numbers or not combined[0].requires_grad:
        raise UnsupportedModel(where, must, "one without a graph", _HINT)
    for draw, combination in enumerate(combined):
        is_last = draw + 1 == len(combined)
        try:
            slopes = torch.autograd.grad(
                combination, differentiable, retain_graph=not is_last, allow_unused=True
            )
        except torch.OutOfMemoryError:
            # A RuntimeError, too, but no fault of the model.
            raise
        except RuntimeError as error:
            got = f"one that PyTorch refuses: {error}"
            raise UnsupportedModel(where, must, got, _HINT) from error
        for number, slope in zip(numbers, slopes, strict=True):
            # None where the output does not depend on the tensor.
            if slope is not None:
                squares = slope.to(totals[number]).square().sum(-1, keepdim=True)
                totals[number] += squares / len(combined)
    return totals


def _combinations(model: nn.Module, on_device: Any, batch: Any, output: Any) -> list[Tensor]:
    """Return ``DRAWS`` random combinations of all numbers of the output, summed over the examples.

    The sign of a number is that of its position times that of its class. Drawing a sign for each
    number of a language model's output would take longer than the pass.
    """
    parts = _parts(model, on_device, batch, output)
    signs = _signs(parts, content_seeds(model, batch, _SEED))
    combinations = []
    for draw in range(DRAWS):
        sums = []
        for (values, _), (positions, classes) in zip(parts, signs, strict=True):
            class_signs = classes[draw].to(values)  # [batch, classes]
            position_signs = positions[draw].to(values)  # [batch, positions]
            sums.append(torch.einsum("bpc,bc,bp->", values, class_signs, position_signs))
        # Parts of the output may lie on several devices.
        together = [one.to(sums[0].device, sums[0].dtype) for one in sums]
        combinations.append(torch.stack(together).sum())
    return combinations


def _signs(parts: Sequence[OutputPart], seeds: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Draw the signs of every part's positions and classes.

    The signs of an example do not depend on its padding.

    Returns:
        ``[draws, batch, positions]``, 0 where a position does not count, and
        ``[draws, batch, classes]``.
    """
    signs = []
    for values, _ in parts:
        n_examples, n_positions, n_classes = values.shape
        positions = torch.zeros(DRAWS, n_examples, n_positions)
        signs.append((positions, torch.zeros(DRAWS, n_examples, n_classes)))
    for example, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        for (_, counted), (positions, classes) in zip(parts, signs, strict=True):
            here = counted[example]
            positions[:, example, here] = _drawn(int(here.sum()), generator)
            classes[:, example] = _drawn(classes.shape[2], generator)
    on_device = []
    for (values, _), (positions, classes) in zip(parts, signs, strict=True):
        on_device.append((sent(positions, values.device), sent(classes, values.device)))
    return on_device


def _drawn(count: int, generator: torch.Generator) -> Tensor:
    """Draw -1 and 1, ``[draws, count]``."""
    return torch.randint(0, 2, (count, DRAWS), generator=generator).T * 2.0 - 1


def _parts(model: nn.Module, on_device: Any, batch: Any, output: Any) -> list[OutputPart]:
    """Return the output's tensors with the positions that count."""
    size = batch_size(batch)
    is_mapping = isinstance(output, Mapping)
    # 1. Question answering: the positions are the text's tokens, those of padding do not count.
    if is_mapping and "start_logits" in output:
        ends = torch.stack([output["start_logits"], output["end_logits"]], -1)
        return [(ends, _counted(model, batch, ends))]
    # 2. Logits.
    logits = output.get("logits") if is_mapping else output
    if _are_logits(logits, size):
        distributions = distributions_of(model, on_device, output, "the batch", batch)
        return [(distributions.logits, distributions.counted)]
    # 3. Any other tensors with numbers of every example.
    return _other_parts(model, batch, output, size)


def _are_logits(logits: Any, size: int) -> bool:
    return (
        isinstance(logits, Tensor)
        and logits.ndim in (2, 3)
        and logits.is_floating_point()
        and len(logits) == size
    )


def _other_parts(model: nn.Module, batch: Any, output: Any, size: int) -> list[OutputPart]:
    """Return the output's tensors that have an axis of examples and a graph.

    Raises:
        InvalidValue: there are none.
    """
    parts = []
    for tensor in outputs(output):
        if not (tensor.ndim and len(tensor) == size and tensor.requires_grad):
            continue
        if tensor.ndim > 2:
            values = tensor.flatten(2)
            parts.append((values, _counted(model, batch, values)))
        else:
            values = tensor.reshape(size, 1, -1)  # a single position
            parts.append((values, torch.ones(values.shape[:2], dtype=torch.bool)))
    if not parts:
        where = "what the teacher, or loss(teacher, batch), returns"
        must = (
            f"numbers of each of {size} examples that can be differentiated, for"
            ' token_weights="output"'
        )
        shapes = [list(tensor.shape) for tensor in outputs(output)]
        got = type(output).__name__
        if shapes:
            got = f"none with a graph; floating-point tensors {shapes}"
        raise InvalidValue(where, must, got, _HINT)
    return parts


def _counted(model: nn.Module, batch: Any, values: Tensor) -> Tensor:
    """Return the positions that are not of padding, as far as the batch says.

    Returns:
        ``[batch, positions]``, in main memory.
    """
    shape = (values.shape[0], values.shape[1])
    mask = output_mask(model, batch, shape)
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    return mask.cpu()
