"""How much a model's output feels each token of what its projections write: squared slopes of
random combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

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


def sensitivities(
    model: nn.Module,
    projections: Sequence[nn.Module],
    batch: Any,
    run: Callable[[nn.Module, Any], Any],
) -> list[list[Tensor]]:
    """By projection and call ``mean over z of |d(z·output) / d(what it writes)|²``, ``[..., 1]``: a
    number per token.

    z is a random sign for every number of an example's output, drawn from a seed that depends on
    what the example holds and on nothing else. The mean over all z is the squared norm of the
    output's derivative. What a projection writes and the stream that it is added to have the same
    slopes.

    A call that nothing can be differentiated for, or that the output does not depend on, has zeros.

    Args:
        model: Its weights need no gradient.
        projections: Modules that return one tensor.
        batch: As the user gave it.
        run: Runs the model on it, and returns logits, other numbers of every example, or losses
            ``[batch]``.

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
            return output.clone()  # code may go on to change it in place

        return returned

    with torch.enable_grad():
        with ExitStack() as stack:
            for number, projection in enumerate(projections):
                stack.callback(projection.register_forward_hook(hook(number)).remove)
            here = to_device(batch, device_of(model))
            output = run(model, here)
        combined = _combinations(model, here, batch, output)
        slopes = _squared_slopes(model, combined, [t for calls in written for t in calls])
    each = iter(slopes)
    return [[next(each) for _ in calls] for calls in written]


def _squared_slopes(
    model: nn.Module, combined: Sequence[Tensor], written: Sequence[Tensor]
) -> list[Tensor]:
    """``[..., 1]`` for each of what was written: the mean over the combinations."""
    totals = [
        t.new_zeros(*t.shape[:-1], 1, dtype=torch.promote_types(t.dtype, torch.float32))
        for t in written
    ]
    places = [i for i, t in enumerate(written) if t.requires_grad]
    must = 'an output that can be differentiated, for token_weights="output"'
    if not places or not combined[0].requires_grad:
        raise UnsupportedModel(type(model).__name__, must, "one without a graph", _HINT)
    for number, one in enumerate(combined):
        more = number + 1 < len(combined)
        try:
            found = torch.autograd.grad(
                one, [written[i] for i in places], retain_graph=more, allow_unused=True
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UnsupportedModel(
                type(model).__name__, must, f"one that PyTorch refuses: {error}", _HINT
            ) from error
        for i, slope in zip(places, found, strict=True):
            if slope is not None:
                totals[i] += slope.to(totals[i]).square().sum(-1, keepdim=True) / len(combined)
    return totals


def _combinations(model: nn.Module, here: Any, given: Any, output: Any) -> list[Tensor]:
    """``DRAWS`` random combinations of all numbers of the output, summed over the examples.

    The sign of a number is that of its position times that of its class: signs of all numbers of a
    language model's output would take longer to draw than the pass takes.
    """
    parts = _parts(model, here, given, output)
    signs = _signs(parts, content_seeds(model, given, _SEED))
    sums = []
    for draw in range(DRAWS):
        of_parts = [
            torch.einsum(
                "bpc,bc,bp->", values, classes[draw].to(values), positions[draw].to(values)
            )
            for (values, _), (positions, classes) in zip(parts, signs, strict=True)
        ]
        sums.append(
            torch.stack([one.to(of_parts[0].device, of_parts[0].dtype) for one in of_parts]).sum()
        )
    return sums


def _signs(
    parts: Sequence[tuple[Tensor, Tensor]], seeds: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Of every part ``[draws, batch, positions]``, 0 where a position does not count, and
    ``[draws, batch, classes]``.

    Those of an example do not depend on the padding beside it.
    """
    found = [
        (torch.zeros(DRAWS, *values.shape[:2]), torch.zeros(DRAWS, len(values), values.shape[2]))
        for values, _ in parts
    ]
    for example, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        for (_, counted), (positions, classes) in zip(parts, found, strict=True):
            here = counted[example]
            positions[:, example, here] = _drawn(int(here.sum()), generator)
            classes[:, example] = _drawn(classes.shape[2], generator)
    return [
        (sent(positions, values.device), sent(classes, values.device))
        for (values, _), (positions, classes) in zip(parts, found, strict=True)
    ]


def _drawn(count: int, generator: torch.Generator) -> Tensor:
    """``[draws, count]`` of -1 and 1."""
    return torch.randint(0, 2, (count, DRAWS), generator=generator).T * 2.0 - 1


def _parts(model: nn.Module, here: Any, given: Any, output: Any) -> list[tuple[Tensor, Tensor]]:
    """The output as tensors ``[batch, positions, classes]``, each with the positions that count,
    ``[batch, positions]`` in main memory."""
    size = batch_size(given)
    is_mapping = isinstance(output, Mapping)
    if (
        is_mapping and "start_logits" in output
    ):  # a text's tokens are the positions: where it is padded, none counts
        ends = torch.stack([output["start_logits"], output["end_logits"]], -1)
        return [(ends, _counted(model, given, ends))]
    logits = output.get("logits") if is_mapping else output
    if (
        isinstance(logits, Tensor)
        and logits.ndim in (2, 3)
        and logits.is_floating_point()
        and len(logits) == size
    ):
        found = distributions_of(model, here, output, "the batch", given)
        return [(found.logits, found.counted)]
    parts = [
        (_three_axes(t), t.ndim)
        for t in outputs(output)
        if t.ndim and len(t) == size and t.requires_grad
    ]
    if not parts:
        shapes = [list(t.shape) for t in outputs(output)]
        got = (
            f"none with a graph; floating-point tensors {shapes}"
            if shapes
            else type(output).__name__
        )
        must = (
            f"numbers of each of {size} examples that can be differentiated, for"
            ' token_weights="output"'
        )
        raise InvalidValue("what the teacher, or loss(teacher, batch), returns", must, got, _HINT)
    return [
        (t, _counted(model, given, t) if ndim > 2 else torch.ones(t.shape[:2], dtype=torch.bool))
        for t, ndim in parts
    ]


def _three_axes(x: Tensor) -> Tensor:
    """``[batch, positions, the rest]``; one position where there are fewer than three axes."""
    return x.flatten(2) if x.ndim > 2 else x.reshape(len(x), 1, -1)


def _counted(model: nn.Module, given: Any, values: Tensor) -> Tensor:
    """``[batch, positions]``, in main memory: those that are not of padding, as far as the batch
    tells."""
    shape = (values.shape[0], values.shape[1])
    found = output_mask(model, given, shape)
    return torch.ones(shape, dtype=torch.bool) if found is None else found.cpu()
