"""Distillation: how far the model's logits and hidden states are from the teacher's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite
from headprune.model.masks import token_mask
from headprune.model.padding import PaddingInfo, inputs_of, output_mask, query_mask
from headprune.model.running import device_of, to_device
from headprune.model.sites import bind
from headprune.recovery._blocks import Block, blocks_of

_WHERE = "Finetune(distill=)"
_HIDDEN = "Finetune(distill_hidden=)"

#: The model's calls: positional arguments, keyword arguments, output.
Calls = Sequence[tuple[Any, Any, Any]]


class Comparison:
    """A model beside its teacher: listens while a loss runs the model, then asks the teacher the
    same.

    Args:
        model: The model.
        teacher: The teacher.
        sites: Of both; None finds them. Used for hidden states alone.
        logits: Compare logits, at this temperature.
        hidden: Compare hidden states: of ``all`` layers, or of the ``last`` one that runs.

    Raises:
        UnsupportedModel: hidden states are wanted of a model without known attention, by which
            layers are found.
        InvalidValue: the two have another number of layers.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        sites: Iterable[AttentionSite] | None = None,
        *,
        logits: float | None = None,
        hidden: str | None = None,
    ) -> None:
        self.model, self.teacher, self.logits, self.hidden = model, teacher, logits, hidden
        self.blocks, self.their_blocks = [
            blocks_of(m, sites) if hidden else [] for m in (model, teacher)
        ]
        if len(self.blocks) != len(self.their_blocks):
            raise InvalidValue(
                _HIDDEN, f"used with a teacher of {len(self.blocks)} layers", len(self.their_blocks)
            )
        self.calls: list[tuple[Any, Any, Any]] = []
        self.states: list[tuple[int, Tensor]] = []
        self.inputs: list[PaddingInfo] = []  # what told each state's padding
        self.bound = bind(model, sites) if hidden else []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside of it the model's last call is remembered, with its layers' states."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.states.clear()
            self.inputs.clear()
            inputs.begin(kwargs)

        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.calls[:] = [(args, kwargs, output)]

        self.calls.clear()
        with ExitStack() as stack:
            stack.callback(self.model.register_forward_pre_hook(begin, with_kwargs=True).remove)
            inputs = stack.enter_context(inputs_of(self.model, self.bound))
            stack.callback(self.model.register_forward_hook(end, with_kwargs=True).remove)
            stack.enter_context(
                _recording(self.blocks, self.states, lambda: self.inputs.append(inputs.now))
            )
            yield

    def gaps(self) -> dict[str, Tensor]:
        """What was asked for, one number each: ``distillation`` of the logits,
        ``hidden_states``."""
        theirs: list[tuple[int, Tensor]] = []
        with _recording(self.their_blocks, theirs):
            target = answer(self.teacher, self.calls)
        found = {}
        if self.logits is not None:
            found["distillation"] = logits_gap(self.calls, target, self.logits, self.model).mean()
        if self.hidden is not None:
            given = (self.model, self.blocks, self.states, theirs, self.inputs, self.hidden)
            found["hidden_states"] = hidden_gap(*given)
        self.calls.clear()
        self.states.clear()
        self.inputs.clear()
        return found


def hidden_gap(
    model: nn.Module,
    blocks: Sequence[Block],
    ours: Sequence[tuple[int, Tensor]],
    theirs: Sequence[tuple[int, Tensor]],
    inputs: Sequence[PaddingInfo],
    which: str,
) -> Tensor:
    """Mean over layers of ``mean (h - h_teacher)² / var(h_teacher)``, over tokens that are no
    padding.

    The squared error is averaged over an example's tokens and features, then over examples; the
    variance (of the population, about one mean) is that of all counted values of the batch.

    Args:
        model: Says whose padding mask is whose.
        blocks: The model's layers.
        ours: What they returned, with their numbers, in the order in which they ran.
        theirs: The same of the teacher.
        inputs: What told the padding when each of them ran.
        which: ``all``, or ``last``.

    Raises:
        InvalidValue: no layer ran, other ones ran, or they returned no states or states of another
            shape.
    """
    if not ours or [n for n, _ in ours] != [n for n, _ in theirs]:
        must = (
            "used where model and teacher run the same layers"
            f" ({', '.join(b.name for b in blocks)})"
        )
        raise InvalidValue(_HIDDEN, must, f"{len(ours)} and {len(theirs)} states")
    pairs = list(zip(ours, theirs, inputs, strict=True))
    gaps = []
    for (number, student), (_, teacher), given in pairs if which == "all" else pairs[-1:]:
        block = blocks[number]
        if student.shape != teacher.shape:
            must = f"used with a teacher whose {block.name} returns {list(student.shape)}"
            raise InvalidValue(_HIDDEN, must, list(teacher.shape))
        gaps.append(_share_missed(model, block, student, teacher.to(student.device), given))
    return torch.stack([gap.to(gaps[0].device) for gap in gaps]).mean()


def _share_missed(
    model: nn.Module, block: Block, student: Tensor, teacher: Tensor, inputs: PaddingInfo
) -> Tensor:
    kind = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(kind), teacher.to(kind)
    if block.batch_axis == 1 and student.ndim == 3:
        student, teacher = student.transpose(0, 1), teacher.transpose(0, 1)
    mask = (
        query_mask(model, block.kind, inputs, (student.shape[0], student.shape[1]))
        if student.ndim == 3
        else None
    )
    if mask is None:
        return (student - teacher).square().mean() / teacher.var(correction=0)
    mask = mask.to(student.device)
    # Chosen, not multiplied by 0: attention may leave NaN at padding.
    tokens = torch.where(mask[..., None], student - teacher, 0.0).square().mean(-1).sum(1)
    counted = mask.sum(1)
    gap = (tokens / counted.clamp(min=1)).sum() / (counted > 0).sum()
    return gap / _variance(teacher, mask)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    """Of all numbers of ``x`` ``[batch, tokens, features]`` where ``mask`` ``[batch, tokens]``,
    about one mean."""
    if x.device.type == "cpu":
        return x[mask].var(correction=0)
    # Elsewhere x[mask] would wait until the device has counted the tokens.
    n = mask.sum() * x.shape[-1]
    here = mask[..., None]
    mean = torch.where(here, x, 0.0).sum() / n
    return torch.where(here, x - mean, 0.0).square().sum() / n


@contextmanager
def _recording(
    blocks: Sequence[Block], into: list[tuple[int, Tensor]], also: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Writes down what layers return, and does something ``also``."""

    def hook(number: int) -> Any:
        def returned(module: nn.Module, args: Any, output: Any) -> None:
            into.append((number, _state(output, blocks[number].name)))
            also()

        return returned

    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(block.module.register_forward_hook(hook(number)).remove)
        yield


def _state(output: Any, name: str) -> Tensor:
    """The hidden states that a layer returned: its output, or the first of several."""
    if isinstance(output, Mapping):
        output = list(output.values())
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.ndim < 2:
        hint = "Distil the logits alone, or give sites= whose layers return their states first."
        raise InvalidValue(
            _HIDDEN, f"used where {name} returns hidden states first", type(output).__name__, hint
        )
    return first


def answer(teacher: nn.Module, calls: Calls) -> Any:
    """What the teacher says to the model's last call, without gradients.

    Raises:
        InvalidValue: the loss did not call the model.
    """
    if not calls:
        raise InvalidValue(_WHERE, "used with a loss that calls model(...)", "one that did not")
    args, kwargs, _ = calls[-1]
    device = device_of(teacher)
    with torch.no_grad():
        return teacher(*to_device(args, device), **to_device(kwargs, device))


def logits_gap(
    calls: Calls, target: Any, temperature: float, model: nn.Module | None = None
) -> Tensor:
    """``T² · KL(softmax(teacher / T) || softmax(model / T))`` of the last call of the model, one
    number an example.

    Logits of tokens are averaged over the tokens that are no padding; start and end logits of
    question answering are distributions over the tokens, and are averaged.

    Args:
        calls: The model's calls.
        target: The teacher's ``answer`` to them.
        temperature: T.
        model: The model, where it says which outputs are of padding.

    Returns:
        ``[batch]``, differentiable in the model's output.

    Raises:
        InvalidValue: outputs without logits, of one class, or of unlike shapes.
    """
    _, kwargs, output = calls[-1]
    ours, theirs = _logits(output), _logits(target)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        must = f"used with a teacher of the same outputs, {[list(t.shape) for t in ours]}"
        raise InvalidValue(_WHERE, must, [list(t.shape) for t in theirs])
    pairs = zip(ours, theirs, strict=True)
    return torch.stack(
        [_divergence(s, t.to(s.device), kwargs, temperature, model) for s, t in pairs]
    ).mean(0)


def _divergence(
    student: Tensor,
    teacher: Tensor,
    inputs: Mapping[str, Any],
    temperature: float,
    model: nn.Module | None,
) -> Tensor:
    wide = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = (
        nn.functional.log_softmax(x.to(wide) / temperature, dim=-1) for x in (teacher, student)
    )
    gaps = temperature**2 * nn.functional.kl_div(
        log_q, log_p, reduction="none", log_target=True
    ).sum(-1)
    if gaps.ndim == 1:
        return gaps
    shape = (gaps.shape[0], gaps.shape[1])
    mask = token_mask(inputs, shape) if model is None else output_mask(model, inputs, shape)
    if mask is None or gaps.ndim != 2:
        return gaps.flatten(1).mean(1)
    return gaps.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def _logits(output: Any) -> list[Tensor]:
    if isinstance(output, Mapping):
        names = ("logits",) if "logits" in output else ("start_logits", "end_logits")
        found: list[Any] = [output.get(name) for name in names]
    elif isinstance(output, (tuple, list)):
        found = [
            t for t in output if isinstance(t, Tensor) and t.is_floating_point() and t.ndim >= 2
        ][:1]
    else:
        found = [output]
    tensors = [t for t in found if isinstance(t, Tensor) and t.is_floating_point() and t.ndim >= 2]
    if not tensors or len(tensors) != len(found):
        raise InvalidValue(
            _WHERE,
            "used with models that return logits [batch, ..., classes]",
            type(output).__name__,
        )
    if any(t.shape[-1] < 2 for t in tensors):
        hint = "A regression has no distribution to distil; train it on the task loss alone."
        raise InvalidValue(
            _WHERE, "used with logits of two classes or more", list(tensors[0].shape), hint
        )
    return tensors
