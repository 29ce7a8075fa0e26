"""The engine of `Finetune`: the Transformers Trainer, told what to do and left without a trace."""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from headprune.attention.linear import base_of
from headprune.core.errors import InvalidValue
from headprune.model.judging import Judge
from headprune.model.running import device_of, undisturbed
from headprune.model.transfers import in_main_memory
from headprune.recovery._base import Job, Outcome
from headprune.recovery._checkpoint import Keeper, identity, weights
from headprune.recovery._distillation import Comparison
from headprune.recovery._lora import Adapters, adapted
from headprune.recovery._objective import HINT, Objective
from headprune.recovery._steps import Steps
from headprune.recovery._stream import Stream
from headprune.recovery._traces import no_trace
from headprune.recovery._validation import Watch
from headprune.recovery.finetune import Finetune


class _Trainer(Trainer):
    """Takes the batches as they are and leaves model and batches where they are."""

    def __init__(
        self, objective: Objective, args: TrainingArguments, stream: Stream, part: tuple[int, int]
    ) -> None:
        self.stream, self.part = stream, part
        super().__init__(model=objective, args=args)
        self.remove_callback(PrinterCallback)
        self.accelerator.device_placement = False
        args._n_gpu = min(
            args.n_gpu, 1
        )  # the Trainer would use DataParallel wherever it sees two GPUs

    def get_train_dataloader(self) -> Stream:  # type: ignore[override,unused-ignore]
        return self.stream

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The model stays on its own device."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Tensor:
        loss: Tensor = model(**inputs)
        return loss.to(
            self.args.device
        )  # the Trainer adds losses up on the first GPU, wherever the model is

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the whole training, from where this part of it begins."""
        before, whole = self.part
        scheduler = super().create_scheduler(whole, optimizer)
        if before:
            # all groups of parameters follow one rate
            self.lr_scheduler = LambdaLR(
                scheduler.optimizer, lambda step: scheduler.lr_lambdas[0](step + before)
            )
        return self.lr_scheduler


def train_(settings: Finetune, job: Job, steps: int) -> Outcome:
    """Trains ``job.model`` for so many steps.

    Args:
        settings: How.
        job: The model, its data, loss and teacher.
        steps: Batches.
    """
    model, length = job.model, len(job.batches)  # type: ignore[arg-type]
    with ExitStack() as stack:
        stack.enter_context(no_trace(model))
        if job.teacher is not None:
            stack.enter_context(undisturbed(job.teacher))
        comparison = _comparison(settings, job)
        job.undo.keep(*(weights(model).values() if settings.lora_rank is None else model.buffers()))
        adapters = _adapters(settings, job, stack)
        if adapters is not None:
            job.undo.keep(
                *(base_of(model.get_submodule(name)).weight for name in adapters.targets)
            )  # merged into
        _check_precision(settings, model)
        changed = (
            adapters.changed
            if adapters
            else tuple(n for n, p in model.named_parameters() if p.requires_grad)
        )
        part = job.part or (0, steps)
        keeper = _keeper(settings, job, length, steps, part)
        stream = Stream(job.batches, length, watched=keeper is not None)
        loss = Judge(job.loss)
        watch = (
            Watch(model, loss, job.validation, settings.patience)
            if job.validation is not None
            else None
        )
        objective = Objective(model, loss, comparison, settings, part[0])
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headprune-"))
        bar = stack.enter_context(
            tqdm(total=steps, desc="finetune", disable=not job.progress, leave=False)
        )
        trainer = _Trainer(
            objective, _arguments(settings, folder, steps, part[1], device_of(model)), stream, part
        )
        callback = Steps(
            trainer, objective, stream, bar, watch, settings.eval_every or length, keeper, loss
        )
        trainer.add_callback(callback)
        if not callback.returned():
            trainer.train()
        metrics = objective.metrics(length)
        metrics |= watch.restore_() if watch is not None else {}
        notes = loss.notes + _notes(settings, objective, steps, adapters, callback)
        _check_finite(model, part[0] + steps)
    if keeper is not None:
        keeper.finish()
    return Outcome(changed, objective.examples, metrics, notes)


def _check_finite(model: nn.Module, step: int) -> None:
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    fine = in_main_memory(torch.isfinite(parameter).all() for parameter in trained.values())
    for name, flag in zip(trained, fine, strict=True):
        if not bool(flag):
            raise InvalidValue(
                f"{name} after step {step}", "finite", "NaN or infinite values", HINT
            )


def _comparison(settings: Finetune, job: Job) -> Comparison | None:
    if job.teacher is None:
        return None
    logits = settings.temperature if settings.distill else None
    hidden = settings.hidden_layers if settings.distill_hidden else None
    return Comparison(job.model, job.teacher, job.sites, logits=logits, hidden=hidden)


def _adapters(settings: Finetune, job: Job, stack: ExitStack) -> Adapters | None:
    if settings.lora_rank is None:
        return None
    set_seed(settings.seed)  # A begins at random
    targets = (settings.lora_rank, settings.lora_alpha, settings.lora_targets)
    return stack.enter_context(adapted(job.model, *targets, job.sites))


def _check_precision(settings: Finetune, model: nn.Module) -> None:
    if settings.precision is None:
        return
    device = device_of(model).type
    if settings.precision == "fp16" and device == "cpu":
        hint = "On a CPU take bf16."
        raise InvalidValue(
            "Finetune.precision", "bf16, or used with a model on a GPU", "fp16 on the CPU", hint
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            hint = (
                "Mixed precision trains float32 weights: model.float() first, or leave precision"
                " out."
            )
            raise InvalidValue(f"{name}, for Finetune.precision", "float32", parameter.dtype, hint)


def _keeper(
    settings: Finetune, job: Job, length: int, steps: int, part: tuple[int, int]
) -> Keeper | None:
    if job.folder is None:
        return None
    told = {k: v for k, v in settings.settings.items() if k != "checkpoint_every"}
    numbers = {
        "settings": told,
        "the number of batches": length,
        "the number of steps": [steps, *part],
    }
    own = identity(job.model, job.teacher, numbers)
    return Keeper(job.folder, settings.checkpoint_every or length, own, leave=job.leave_checkpoint)


def _notes(
    settings: Finetune, objective: Objective, steps: int, adapters: Adapters | None, callback: Steps
) -> tuple[str, ...]:
    notes = adapters.notes() if adapters is not None else ()
    if callback.continued is not None:
        notes += (f"Continued after step {callback.continued} from a checkpoint.",)
    if objective.steps < steps:
        why = f"no lower validation loss in {settings.patience} evaluations"
        notes += (f"Stopped after {objective.steps} of {steps} steps: {why}.",)
    return notes


def _arguments(
    settings: Finetune, folder: str, steps: int, whole: int, device: torch.device
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        use_cpu=device.type == "cpu",
        max_steps=steps,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=math.ceil(settings.warmup_ratio * whole),
        lr_scheduler_type=(
            "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
        ),
        max_grad_norm=settings.max_grad_norm or 0.0,
        optim="adamw_torch",
        seed=settings.seed,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
