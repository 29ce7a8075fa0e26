"""Does what happens between the steps of a training: progress, evaluations and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from transformers import Trainer, TrainerCallback

from headprune.model.judging import Judge
from headprune.recovery._checkpoint import Keeper, load_weights_, weights
from headprune.recovery._objective import Objective
from headprune.recovery._stream import Stream
from headprune.recovery._validation import EarlyStopping

#: Seconds between two updates of the loss in the progress bar.
_SECONDS = 1.0


@dataclass(eq=False, repr=False)
class Steps(TrainerCallback):
    """Shows, evaluates and saves a training between its steps, and continues from a checkpoint.

    Args:
        trainer: The Trainer, for its gradient scaler.
        objective: What it minimizes.
        stream: Its batches.
        bar: A progress bar of steps.
        early_stopping: Evaluates the model, if wanted.
        eval_every: Steps between evaluations.
        keeper: Keeps the checkpoint, if wanted.
        loss: The task loss; all parts of a training must treat its labels alike.
    """

    trainer: Trainer
    objective: Objective
    stream: Stream
    bar: Any
    early_stopping: EarlyStopping | None
    eval_every: int
    keeper: Keeper | None
    loss: Judge
    continued_after: int | None = field(default=None, init=False)  # step of the checkpoint
    _saved: dict[str, Any] | None = field(default=None, init=False)
    _next_update: float = field(default_factory=monotonic, init=False)

    def load_checkpoint(self) -> bool:
        """Continue from the checkpoint, if there is one.

        Returns:
            Whether the checkpoint is one of the training's end.
        """
        saved = self.keeper.load() if self.keeper is not None else None
        self._saved = saved
        if saved is None:
            return False
        self.continued_after = saved["step"]
        load_weights_(self.objective.model, saved["weights"])
        self.objective.examples = saved["examples"]
        self.objective.history = saved["told"]
        self.loss.continue_from(saved.get("shifted"))
        if self.early_stopping is not None:
            self.early_stopping.continue_from(saved["watch"])
        self.bar.update(saved["step"])
        over: bool = saved["over"]
        if over:
            # Nothing is trained, but other batches are refused.
            self.stream.past(saved["stream"])
        return over

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            # The model before the training may be the best one.
            if self.early_stopping is not None:
                self.early_stopping.evaluate(0)
            return
        # The optimizer exists only now, so its state could not be loaded before.
        state.global_step = saved["step"]
        self.stream.continue_from(saved["stream"])
        for name, part in self._parts(kwargs).items():
            part.load_state_dict(saved[name])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        over = step >= state.max_steps
        self._show_progress()
        if self.early_stopping is not None and (over or step % self.eval_every == 0):
            self.objective.read()
            if self.early_stopping.evaluate(step):
                control.should_training_stop = over = True
        if self.keeper is not None and self.keeper.due(step, over):
            # Reading refuses numbers that are not finite, so no failed training is saved.
            self.objective.read()
            self.keeper.save(self._state(step, over, kwargs))

    def _state(self, step: int, over: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint after a step."""
        # The keys are a file format: trainings that were begun before read them.
        state = {
            "step": step,
            "over": over,
            "weights": weights(self.objective.model),
            "examples": self.objective.examples,
            "told": self.objective.history,
            "shifted": self.loss.state(),
            "stream": self.stream.state(),
        }
        for name, part in self._parts(kwargs).items():
            state[name] = part.state_dict()
        if self.early_stopping is not None:
            state["watch"] = self.early_stopping.state()
        return state

    def _show_progress(self) -> None:
        """Move the bar; if it is visible, show the loss at most once per second."""
        if not self.bar.disable and monotonic() >= self._next_update:
            self.objective.read()
            loss = self.objective.history["loss"][-1]
            self.bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._next_update = monotonic() + _SECONDS
        self.bar.update()

    def _parts(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return what has a state besides the model."""
        parts = {"optimizer": kwargs["optimizer"], "scheduler": kwargs["lr_scheduler"]}
        scaler = self.trainer.accelerator.scaler
        if scaler is not None:
            parts["scaler"] = scaler
        return parts
