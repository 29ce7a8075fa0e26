"""Distillation: the distance of the model's logits and hidden states from the teacher's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, TypeGuard

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
Calls: TypeAlias = Sequence[tuple[Any, Any, Any]]
#: Layers' outputs with the layers' numbers, in the order in which they ran.
States: TypeAlias = Sequence[tuple[int, Tensor]]


class Comparison:
    """Compares a model with its teacher on the batches that a loss runs the model on.

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
        self.model = model
        self.teacher = teacher
        self.logits = logits
        self.hidden = hidden
        self.blocks = blocks_of(model, sites) if hidden else []
        self.teacher_blocks = blocks_of(teacher, sites) if hidden else []
        self.bound = bind(model, sites) if hidden else []
        n_layers, n_teacher_layers = len(self.blocks), len(self.teacher_blocks)
        if n_layers != n_teacher_layers:
            must = f"used with a teacher of {n_layers} layers"
            raise InvalidValue(_HIDDEN, must, n_teacher_layers)
        self.calls: list[tuple[Any, Any, Any]] = []
        self.states: list[tuple[int, Tensor]] = []
        self.padding_infos: list[PaddingInfo] = []  # what determined each state's padding

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the model's last call inside, with its layers' states."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            # A loss may call the model several times: the last call counts.
            self.states.clear()
            self.padding_infos.clear()
            inputs.begin(kwargs)

        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.calls[:] = [(args, kwargs, output)]

        def note_padding() -> None:
            self.padding_infos.append(inputs.now)

        self.calls.clear()
        with ExitStack() as stack:
            stack.callback(self.model.register_forward_pre_hook(begin, with_kwargs=True).remove)
            inputs = stack.enter_context(inputs_of(self.model, self.bound))
            stack.callback(self.model.register_forward_hook(end, with_kwargs=True).remove)
            stack.enter_context(_recording(self.blocks, self.states, note_padding))
            yield

    def gaps(self) -> dict[str, Tensor]:
        """Run the teacher on the last call and return the wanted distances.

        Returns:
            ``distillation`` (of the logits) and ``hidden_states``, ``[]`` each.
        """
        teacher_states: list[tuple[int, Tensor]] = []
        with _recording(self.teacher_blocks, teacher_states):
            target = answer(self.teacher, self.calls)
        gaps = {}
        if self.logits is not None:
            of_examples = logits_gap(self.calls, target, self.logits, self.model)  # [batch]
            gaps["distillation"] = of_examples.mean()
        if self.hidden is not None:
            gaps["hidden_states"] = hidden_gap(
                self.model,
                self.blocks,
                self.states,
                teacher_states,
                self.padding_infos,
                self.hidden,
            )
        # Frees the graph.
        self.calls.clear()
        self.states.clear()
        self.padding_infos.clear()
        return gaps


# --- Hidden states -------------------------------------------------------------------------------


def hidden_gap(
    model: nn.Module,
    blocks: Sequence[Block],
    ours: States,
    theirs: States,
    padding_infos: Sequence[PaddingInfo],
    which: str,
) -> Tensor:
    """Compute the mean over layers of ``mean (h - h_teacher)² / var(h_teacher)``.

    Over tokens that are no padding. The squared error is averaged over an example's tokens and
    features, then over examples. The variance (of the population, about one mean) is that of all
    counted values of the batch.

    Args:
        model: Determines which padding mask belongs to which layer.
        blocks: The model's layers.
        ours: What they returned.
        theirs: What the teacher's layers returned.
        padding_infos: What determined the padding when each of the model's layers ran.
        which: ``all`` layers, or the ``last`` one.

    Raises:
        InvalidValue: no layer ran, other ones ran, or they returned no states or states of another
            shape.
    """
    numbers = [number for number, _ in ours]
    if not numbers or numbers != [number for number, _ in theirs]:
        names = ", ".join(block.name for block in blocks)
        must = f"used where model and teacher run the same layers ({names})"
        raise InvalidValue(_HIDDEN, must, f"{len(ours)} and {len(theirs)} states")
    compared = list(zip(ours, theirs, padding_infos, strict=True))
    if which == "last":
        compared = compared[-1:]
    gaps = []
    for (number, student), (_, teacher), padding_info in compared:
        block = blocks[number]
        if student.shape != teacher.shape:
            must = f"used with a teacher whose {block.name} returns {list(student.shape)}"
            raise InvalidValue(_HIDDEN, must, list(teacher.shape))
        teacher = teacher.to(student.device)
        gaps.append(_share_missed(model, block, student, teacher, padding_info))
    # Layers may lie on several devices.
    return torch.stack([gap.to(gaps[0].device) for gap in gaps]).mean()


def _share_missed(
    model: nn.Module, block: Block, student: Tensor, teacher: Tensor, padding_info: PaddingInfo
) -> Tensor:
    """Return the squared error divided by the teacher's variance, ``[]``."""
    dtype = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(dtype), teacher.to(dtype)
    mask = None
    if student.ndim == 3:
        # To [batch, tokens, features].
        if block.batch_axis == 1:
            student, teacher = student.transpose(0, 1), teacher.transpose(0, 1)
        shape = (student.shape[0], student.shape[1])
        mask = query_mask(model, block.kind, padding_info, shape)  # [batch, tokens]
    if mask is None:
        return (student - teacher).square().mean() / teacher.var(correction=0)
    mask = mask.to(student.device)
    # Not multiplied by 0: attention may leave NaN at padding.
    errors = torch.where(mask[..., None], student - teacher, 0.0).square()
    of_examples = errors.mean(-1).sum(1)  # [batch]
    n_tokens = mask.sum(1)
    gap = (of_examples / n_tokens.clamp(min=1)).sum() / (n_tokens > 0).sum()
    return gap / _variance(teacher, mask)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    """Return the variance of all values where the mask is True, about one mean.

    Args:
        x: ``[batch, tokens, features]``.
        mask: ``[batch, tokens]``.
    """
    if x.device.type == "cpu":
        return x[mask].var(correction=0)
    # Elsewhere x[mask] would wait until the device has counted the tokens.
    n = mask.sum() * x.shape[-1]
    counted = mask[..., None]
    mean = torch.where(counted, x, 0.0).sum() / n
    return torch.where(counted, x - mean, 0.0).square().sum() / n


@contextmanager
def _recording(
    blocks: Sequence[Block],
    states: list[tuple[int, Tensor]],
    also: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Append what layers return to ``states``, and call ``also`` each time."""

    def hook(number: int) -> Any:
        def returned(module: nn.Module, args: Any, output: Any) -> None:
            states.append((number, _state(output, blocks[number].name)))
            also()

        return returned

    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(block.module.register_forward_hook(hook(number)).remove)
        yield


def _state(output: Any, name: str) -> Tensor:
    """Return the hidden states of a layer: its output, or the first of several."""
    if isinstance(output, Mapping):
        output = list(output.values())
    first = output
    if isinstance(output, (tuple, list)) and output:
        first = output[0]
    if not _is_batched(first):
        must = f"used where {name} returns hidden states first"
        hint = "Distil the logits alone, or give sites= whose layers return their states first."
        raise InvalidValue(_HIDDEN, must, type(output).__name__, hint)
    return first


def _is_batched(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of floating-point numbers with an axis besides the batch."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2


# --- Logits --------------------------------------------------------------------------------------


def answer(teacher: nn.Module, calls: Calls) -> Any:
    """Run the teacher on the model's last call, without gradients.

    Raises:
        InvalidValue: the loss did not call the model.
    """
    if not calls:
        hint = "In your loss=, call the model that it is given."
        raise InvalidValue(_WHERE, "used with a loss that calls it", "one that did not", hint)
    args, kwargs, _ = calls[-1]
    device = device_of(teacher)
    with torch.no_grad():
        return teacher(*to_device(args, device), **to_device(kwargs, device))


def logits_gap(
    calls: Calls, target: Any, temperature: float, model: nn.Module | None = None
) -> Tensor:
    """Compute ``T² · KL(softmax(teacher / T) || softmax(model / T))`` of the model's last call.

    Logits of tokens are averaged over the tokens that are no padding. Start and end logits of
    question answering are distributions over the tokens, and are averaged.

    Args:
        calls: The model's calls.
        target: The teacher's ``answer`` to them.
        temperature: T.
        model: The model, if it determines which outputs are of padding.

    Returns:
        ``[batch]``, differentiable in the model's output.

    Raises:
        InvalidValue: outputs without logits, of one class, or of unlike shapes.
    """
    _, kwargs, output = calls[-1]
    ours, theirs = _logits(output), _logits(target)
    our_shapes = [list(logits.shape) for logits in ours]
    their_shapes = [list(logits.shape) for logits in theirs]
    if our_shapes != their_shapes:
        must = f"used with a teacher of the same outputs, {our_shapes}"
        raise InvalidValue(_WHERE, must, their_shapes)
    divergences = []
    for student, teacher in zip(ours, theirs, strict=True):
        teacher = teacher.to(student.device)
        divergences.append(_divergence(student, teacher, kwargs, temperature, model))
    return torch.stack(divergences).mean(0)


def _divergence(
    student: Tensor,
    teacher: Tensor,
    inputs: Mapping[str, Any],
    temperature: float,
    model: nn.Module | None,
) -> Tensor:
    """Return the mean divergence of the tokens of each example, ``[batch]``."""
    # In fp32 at least: half precision is too coarse for small differences of logarithms.
    dtype = torch.promote_types(student.dtype, torch.float32)
    log_p = nn.functional.log_softmax(teacher.to(dtype) / temperature, dim=-1)
    log_q = nn.functional.log_softmax(student.to(dtype) / temperature, dim=-1)
    of_classes = nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True)
    gaps = temperature**2 * of_classes.sum(-1)  # [batch] or [batch, tokens, ...]
    if gaps.ndim == 1:
        return gaps
    shape = (gaps.shape[0], gaps.shape[1])
    mask = token_mask(inputs, shape) if model is None else output_mask(model, inputs, shape)
    if mask is None or gaps.ndim != 2:
        return gaps.flatten(1).mean(1)
    return gaps.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def _logits(output: Any) -> list[Tensor]:
    """Return the logits of an output: one tensor, or start and end logits.

    Raises:
        InvalidValue: there are none, or they are of one class.
    """
    candidates: list[Any]
    if isinstance(output, Mapping):
        names = ("logits",) if "logits" in output else ("start_logits", "end_logits")
        candidates = list(map(output.get, names))
    elif isinstance(output, (tuple, list)):
        candidates = [value for value in output if _is_batched(value)][:1]
    else:
        candidates = [output]
    if not candidates or not all(map(_is_batched, candidates)):
        must = "used with models that return logits [batch, ..., classes]"
        raise InvalidValue(_WHERE, must, type(output).__name__)
    # The softmax of a single number is constant.
    if any(logits.shape[-1] < 2 for logits in candidates):
        must = "used with logits of two classes or more"
        hint = "A regression has no distribution to distil; train it on the task loss alone."
        raise InvalidValue(_WHERE, must, list(candidates[0].shape), hint)
    return candidates
