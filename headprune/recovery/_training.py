"""Trains a model with the Transformers Trainer, and restores everything but the parameters."""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from headprune.attention.linear import base_of
from headprune.core.bars import bar
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
from headprune.recovery._training_settings import TrainingSettings
from headprune.recovery._validation import EarlyStopping


class _Trainer(Trainer):
    """A Trainer that does not move or change the model and its batches.

    Args:
        objective: The model with its losses.
        args: The Trainer's arguments.
        stream: The batches.
        part: Steps before this part of a longer training, and steps of the whole.
    """

    def __init__(
        self, objective: Objective, args: TrainingArguments, stream: Stream, part: tuple[int, int]
    ) -> None:
        self.stream, self.part = stream, part
        super().__init__(model=objective, args=args)
        # It would print every log.
        self.remove_callback(PrinterCallback)
        # The stream and the objective place tensors themselves.
        self.accelerator.device_placement = False
        # The Trainer would use DataParallel wherever it sees two GPUs.
        args._n_gpu = min(args.n_gpu, 1)

    def get_train_dataloader(self) -> Stream:  # type: ignore[override,unused-ignore]
        return self.stream

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Keep the model on its own device."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Tensor:
        loss: Tensor = model(**inputs)
        # The Trainer adds losses up on the first GPU, wherever the model is.
        return loss.to(self.args.device)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule of the whole training, from the beginning of this part."""
        before, whole = self.part
        scheduler = super().create_scheduler(whole, optimizer)
        if before:
            # All groups of parameters follow one rate.
            rate = scheduler.lr_lambdas[0]
            self.lr_scheduler = LambdaLR(scheduler.optimizer, lambda step: rate(step + before))
        return self.lr_scheduler


def train_(settings: TrainingSettings, job: Job, steps: int) -> Outcome:
    """Train ``job.model`` for this many steps.

    Args:
        settings: The settings.
        job: The model, its data, loss and teacher.
        steps: Number of batches.
    """
    model, length = job.model, len(job.batches)  # type: ignore[arg-type]
    # Steps before this part of a longer training, and steps of the whole.
    part = job.part or (0, steps)
    with ExitStack() as stack:
        # 1. The teacher, and what is trained.
        stack.enter_context(no_trace(model))
        if job.teacher is not None:
            stack.enter_context(undisturbed(job.teacher))
        comparison = _comparison(settings, job)
        adapters = _prepare_weights_(settings, job, stack)
        _check_precision(settings, model)
        if adapters is not None:
            changed = adapters.changed
        else:
            changed = tuple(n for n, p in model.named_parameters() if p.requires_grad)

        # 2. The loss, the batches and what happens between the steps.
        keeper = _keeper(settings, job, length, steps, part)
        stream = Stream(job.batches, length, watched=keeper is not None)
        loss = Judge(job.loss)
        early_stopping = None
        if job.validation is not None:
            early_stopping = EarlyStopping(model, loss, job.validation, settings.patience)
        distances = {"distillation": settings.distill, "hidden_states": settings.distill_hidden}
        objective = Objective(model, loss, comparison, distances, part[0])
        # The Trainer wants a folder, though it writes nothing there.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headprune-"))
        shown = stack.enter_context(bar(None, "finetune", job.progress, steps))
        arguments = _arguments(settings, folder, steps, part[1], device_of(model))
        trainer = _Trainer(objective, arguments, stream, part)
        eval_every = settings.eval_every or length
        callback = Steps(
            trainer, objective, stream, shown, early_stopping, eval_every, keeper, loss
        )
        trainer.add_callback(callback)

        # 3. Train, unless a checkpoint of the end is there.
        if not callback.load_checkpoint():
            trainer.train()
        metrics = objective.metrics(length)
        if early_stopping is not None:
            metrics |= early_stopping.restore_()
        notes = loss.notes + _notes(settings, objective, steps, adapters, callback)
        _check_finite(model, part[0] + steps)
    if keeper is not None:
        keeper.finish()
    return Outcome(changed, objective.examples, metrics, notes)


def _check_finite(model: nn.Module, step: int) -> None:
    """Refuse trained parameters that are not finite."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    finite = in_main_memory(torch.isfinite(parameter).all() for parameter in trained.values())
    for name, flag in zip(trained, finite, strict=True):
        if not bool(flag):
            where = f"{name} after step {step}"
            raise InvalidValue(where, "finite", "NaN or infinite values", HINT)


def _comparison(settings: TrainingSettings, job: Job) -> Comparison | None:
    if job.teacher is None:
        return None
    temperature = settings.temperature if settings.distill else None
    layers = settings.hidden_layers if settings.distill_hidden else None
    return Comparison(job.model, job.teacher, job.sites, logits=temperature, hidden=layers)


def _prepare_weights_(settings: TrainingSettings, job: Job, stack: ExitStack) -> Adapters | None:
    """Remember what is going to change, and add adapters if wanted."""
    if settings.lora_rank is None:
        job.undo.keep(*weights(job.model).values())
        return None
    job.undo.keep(*job.model.buffers())
    # The matrix A of an adapter begins at random.
    set_seed(settings.seed)
    rank, alpha, targets = settings.lora_rank, settings.lora_alpha, settings.lora_targets
    adapters = stack.enter_context(adapted(job.model, rank, alpha, targets, job.sites))
    # The weights that adapters are merged into.
    job.undo.keep(*(base_of(job.model.get_submodule(n)).weight for n in adapters.targets))
    return adapters


def _check_precision(settings: TrainingSettings, model: nn.Module) -> None:
    """Refuse mixed precision for a model that it cannot train."""
    if settings.precision is None:
        return
    if settings.precision == "fp16" and device_of(model).type == "cpu":
        must = "bf16, or used with a model on a GPU"
        hint = "On a CPU take bf16."
        raise InvalidValue("Finetune.precision", must, "fp16 on the CPU", hint)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            hint = (
                "Mixed precision trains float32 weights: model.float() first, or leave precision"
                " out."
            )
            raise InvalidValue(f"{name}, for Finetune.precision", "float32", parameter.dtype, hint)


def _keeper(
    settings: TrainingSettings, job: Job, length: int, steps: int, part: tuple[int, int]
) -> Keeper | None:
    if job.folder is None:
        return None
    # Another interval between checkpoints is no other training.
    own_settings = {k: v for k, v in settings.settings.items() if k != "checkpoint_every"}
    numbers = {
        "settings": own_settings,
        "the number of batches": length,
        "the number of steps": [steps, *part],
    }
    own = identity(job.model, job.teacher, numbers)
    every = settings.checkpoint_every or length
    return Keeper(job.folder, every, own, leave=job.leave_checkpoint)


def _notes(
    settings: TrainingSettings,
    objective: Objective,
    steps: int,
    adapters: Adapters | None,
    callback: Steps,
) -> tuple[str, ...]:
    notes = adapters.notes() if adapters is not None else ()
    if callback.continued_after is not None:
        notes += (f"Continued after step {callback.continued_after} from a checkpoint.",)
    if objective.steps < steps:
        why = f"no lower validation loss in {settings.patience} evaluations"
        notes += (f"Stopped after {objective.steps} of {steps} steps: {why}.",)
    return notes


def _arguments(
    settings: TrainingSettings, folder: str, steps: int, whole: int, device: torch.device
) -> TrainingArguments:
    """Return the Trainer's arguments; it saves, evaluates and logs nothing itself."""
    schedule = settings.schedule
    if schedule == "constant":
        # The Trainer's "constant" would ignore the warmup.
        schedule = "constant_with_warmup"
    return TrainingArguments(
        output_dir=folder,
        use_cpu=device.type == "cpu",
        max_steps=steps,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=math.ceil(settings.warmup_ratio * whole),
        lr_scheduler_type=schedule,
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
