"""Sets a pruned model and its teacher side by side, and averages the teacher's head outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from headprune.core.errors import HeadPruneError, InvalidValue, PlanMismatch, UnsupportedModel
from headprune.core.heads import AttentionSite
from headprune.model.expose import exposed
from headprune.model.fingerprint import fingerprint
from headprune.model.running import batch_size, device_of, to_device, token_mask, undisturbed
from headprune.model.sites import BoundSite, bind

_MUST = "the model that the pruned one was cut from"


def paired(
    model: nn.Module, teacher: nn.Module, sites: Iterable[AttentionSite] | None
) -> list[tuple[BoundSite, BoundSite]]:
    """Every site of the model with the same site of the teacher.

    Raises:
        PlanMismatch: the teacher has another structure, or lacks heads that the model has.
    """
    ours = bind(model, sites)
    try:
        theirs = bind(teacher, sites)
    except HeadPruneError as error:
        raise PlanMismatch("teacher", _MUST, f"a {type(teacher).__name__} ({error})") from error
    structure = [fingerprint(m, [b.site for b in bound]).structure for m, bound in ((model, ours), (teacher, theirs))]
    if structure[0] != structure[1]:
        got = f"one of another structure: {_words(teacher, theirs)} against {_words(model, ours)}"
        raise PlanMismatch("teacher", _MUST, got)
    pairs = list(zip(ours, theirs, strict=True))
    for our, their in pairs:
        lacking = sorted(set(our.site.heads) - set(their.site.heads))
        if lacking:
            hint = "Are teacher and model swapped?"
            raise PlanMismatch("teacher", _MUST, f"one without heads {lacking} of {our.site.name}", hint)
    return pairs


def _words(model: nn.Module, bound: Sequence[BoundSite]) -> str:
    return f"{type(model).__name__} with {sum(b.site.n_query_heads for b in bound)} heads at {len(bound)} sites"


class _Mean:
    """A forward pre-hook that averages columns of a projection's input over the tokens that are no padding."""

    def __init__(self, bound: BoundSite, columns: Sequence[int]) -> None:
        self.bound, self.columns = bound, columns
        self.batch: Any = None
        self.total: Tensor | None = None
        self.count = 0

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        if self.bound.layout.batch_axis == 1 and x.ndim == 3:
            x = x.transpose(0, 1)
        mask = token_mask(self.batch, (x.shape[0], x.shape[1]))
        # Chosen, not multiplied by 0: attention may leave NaN at padding.
        tokens = x.flatten(0, -2) if mask is None or x.ndim != 3 else x[mask]
        wide = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64
        index = torch.tensor(self.columns, dtype=torch.long, device=x.device)
        total = tokens.index_select(1, index).to(wide).sum(0)
        self.total = total if self.total is None else self.total + total
        self.count += len(tokens)

    def mean(self) -> Tensor:
        name = self.bound.site.name
        if self.total is None:
            must = f"a module that runs when {type(self.bound.module).__name__} does"
            raise UnsupportedModel(f"{name}.{self.bound.layout.gate}", must, "one that no batch reached")
        if not self.count:
            raise InvalidValue("batches", "with a token that is no padding", f"only padding at {name}")
        mean = self.total / self.count
        if not bool(torch.isfinite(mean).all()):
            hint = "Look for NaN or infinite values in the batches."
            raise InvalidValue(f"the teacher's mean head output at {name}", "finite", "NaN or infinite", hint)
        return mean


def mean_contexts(
    teacher: nn.Module,
    wanted: Sequence[tuple[BoundSite, Sequence[int]]],
    batches: Iterable[Any],
    run: Callable[[nn.Module, Any], Any],
    progress: bool,
) -> tuple[list[Tensor], int]:
    """Means of columns of the output projections' inputs, over every token that is no padding.

    A module that runs several times in a forward pass is averaged over all its runs.

    Args:
        teacher: The model; run in evaluation mode and left as it was.
        wanted: Sites of it, each with columns of its output projection's input.
        batches: The data.
        run: Runs a model on a batch.
        progress: Show a progress bar.

    Returns:
        One mean ``[columns]`` in fp64 a site, and the number of examples.

    Raises:
        InvalidValue: no batches, nothing but padding, or means that are not finite.
    """
    means = [_Mean(bound, columns) for bound, columns in wanted]
    device = device_of(teacher)
    examples = 0
    with ExitStack() as stack:
        stack.enter_context(undisturbed(teacher))
        stack.enter_context(torch.no_grad())
        stack.enter_context(exposed(m.bound for m in means))
        for mean in means:
            stack.callback(mean.bound.gate.register_forward_pre_hook(mean).remove)
        for number, batch in enumerate(tqdm(batches, desc="teacher", disable=not progress, leave=False)):
            examples += batch_size(batch, f"batch {number}")
            batch = to_device(batch, device)
            for mean in means:
                mean.batch = batch
            run(teacher, batch)
    if not examples:
        raise InvalidValue("batches", "at least one batch", "an empty iterable")
    return [m.mean() for m in means], examples
