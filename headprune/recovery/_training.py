"""The engine of `Finetune`: the Transformers Trainer, told what to do and left without a trace."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from headprune.core.errors import InvalidValue
from headprune.model.losses import Loss, checked_losses, default_loss
from headprune.model.running import batch_size, device_of, to_device, undisturbed
from headprune.recovery._base import Job, Outcome
from headprune.recovery._distillation import distillation
from headprune.recovery.finetune import Finetune

_HINT = "Lower learning_rate, or look for NaN in the batches."


class _Objective(nn.Module):
    """The model with its losses: a batch in, one number to minimise out. The Trainer sees only this."""

    def __init__(self, model: nn.Module, loss: Loss, teacher: nn.Module | None, settings: Finetune) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self.outside = (loss, teacher)  # in a tuple: modules, maybe, but no part of what is trained
        self.examples = 0
        self.task: list[float] = []
        self.distilled: list[float] = []

    def forward(self, batch: Any) -> Tensor:
        step = len(self.task) + 1
        batch = to_device(batch, device_of(self.model))
        loss, teacher = self.outside
        calls: list[tuple[Any, Any, Any]] = []
        handle = None
        if teacher is not None:
            watch = lambda module, args, kwargs, output: calls.append((args, kwargs, output))  # noqa: E731
            handle = self.model.register_forward_hook(watch, with_kwargs=True)
        try:
            losses = checked_losses(loss, self.model, batch, step - 1)
        except InvalidValue as error:
            raise InvalidValue(f"step {step}: {error.where}", error.must, error.got, f"{error.hint} {_HINT}") from None
        finally:
            if handle is not None:
                handle.remove()
        total = losses.mean()
        self.task.append(total.item())
        self.examples += batch_size(batch)
        if teacher is not None:
            gap = distillation(teacher, calls, self.settings.temperature).mean()
            self.distilled.append(gap.item())
            total = total + self.settings.distill * gap.to(total)
            if not math.isfinite(total.item()):
                raise InvalidValue(f"step {step}: the distillation loss", "finite", gap.item(), _HINT)
        return total


class _Batches:
    """The user's loader; each batch in a mapping, because the Trainer asks every batch for its labels."""

    def __init__(self, batches: Iterable[Any], length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"batch": batch} for batch in self.batches)


class _Trainer(Trainer):
    """Takes the batches as they are and leaves model and batches where they are."""

    def __init__(self, objective: _Objective, args: TrainingArguments, batches: _Batches, bar: TrainerCallback) -> None:
        self.batches = batches
        super().__init__(model=objective, args=args, callbacks=[bar])
        self.remove_callback(PrinterCallback)
        self.accelerator.device_placement = False
        args._n_gpu = min(args.n_gpu, 1)  # the Trainer would use DataParallel wherever it sees two GPUs

    def get_train_dataloader(self) -> _Batches:  # type: ignore[override,unused-ignore]
        return self.batches

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The model stays on its own device."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Tensor:
        loss: Tensor = model(**inputs)
        return loss.to(self.args.device)  # the Trainer adds losses up on the first GPU, wherever the model is


class _Bar(TrainerCallback):
    def __init__(self, bar: Any, losses: Sequence[float]) -> None:
        self.bar, self.losses = bar, losses

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.set_postfix_str(f"loss {self.losses[-1]:.4f}", refresh=False)
        self.bar.update()


def train_(settings: Finetune, job: Job, steps: int, changed: tuple[str, ...]) -> Outcome:
    """Trains ``job.model`` for so many steps.

    Args:
        settings: How.
        job: The model, its data, loss and teacher.
        steps: Batches.
        changed: Names of the parameters that need a gradient.
    """
    batches = _Batches(job.batches, len(job.batches))  # type: ignore[arg-type]
    objective = _Objective(job.model, job.loss or default_loss, job.teacher, settings)
    with ExitStack() as stack:
        stack.enter_context(_no_trace(job.model))
        if job.teacher is not None:
            stack.enter_context(undisturbed(job.teacher))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headprune-"))
        bar = stack.enter_context(tqdm(total=steps, desc="finetune", disable=not job.progress, leave=False))
        arguments = _arguments(settings, folder, steps, device_of(job.model))
        _Trainer(objective, arguments, batches, _Bar(bar, objective.task)).train()
    if len(objective.task) != steps:
        got = f"{len(objective.task)} steps instead of {steps}"
        raise InvalidValue("batches", f"as many as len() says, {len(batches)}, in every pass", got)
    for name, parameter in job.model.named_parameters():
        if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
            raise InvalidValue(f"{name} after step {steps}", "finite", "NaN or infinite values", _HINT)
    last = min(len(batches), steps)  # the last pass
    metrics: dict[str, Any] = {"steps": steps, "loss": sum(objective.task[-last:]) / last}
    if objective.distilled:
        metrics["distillation"] = sum(objective.distilled[-last:]) / last
    return Outcome(changed, objective.examples, metrics)


def _arguments(settings: Finetune, folder: str, steps: int, device: torch.device) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        use_cpu=device.type == "cpu",
        max_steps=steps,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=math.ceil(settings.warmup_ratio * steps),
        lr_scheduler_type="constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        max_grad_norm=settings.max_grad_norm or 0.0,
        optim="adamw_torch",
        seed=settings.seed,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


@contextmanager
def _no_trace(model: nn.Module) -> Iterator[None]:
    """Puts back what a Trainer changes outside of the parameters: modes, random states, accelerate's global state."""
    modes = [(m, m.training) for m in model.modules()]
    states = [
        (kind._shared_state, dict(kind._shared_state)) for kind in (PartialState, AcceleratorState, GradientState)
    ]
    python, numpy = random.getstate(), np.random.get_state()
    # set_seed seeds every GPU, but one that was never used must not be woken for that
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    current = torch.cuda.current_device() if gpus else None
    with torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter in model.parameters():
                parameter.grad = None
            for shared, before in states:
                shared.clear()
                shared.update(before)
            random.setstate(python)
            np.random.set_state(numpy)
            if current is not None:
                torch.cuda.set_device(current)
