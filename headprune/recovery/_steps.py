"""What happens between the steps of a training: the bar, evaluations, checkpoints; and, before it,
a return to one."""

from __future__ import annotations

from time import monotonic
from typing import Any

from transformers import Trainer, TrainerCallback

from headprune.model.judging import Judge
from headprune.recovery._checkpoint import Keeper, load_weights_, weights
from headprune.recovery._objective import Objective
from headprune.recovery._stream import Stream
from headprune.recovery._validation import Watch

#: Seconds between two looks at the loss, for the bar.
_EVERY = 1.0


class Steps(TrainerCallback):
    """Looks after a training between its steps.

    Args:
        trainer: The Trainer, for its gradient scaler.
        objective: What it minimises.
        stream: Its batches.
        bar: A bar of steps.
        watch: Judges it, if wanted.
        eval_every: Steps between judgements.
        keeper: Keeps its checkpoint, if wanted.
        loss: The task loss, of which all parts of a training have to think the same.
    """

    def __init__(
        self,
        trainer: Trainer,
        objective: Objective,
        stream: Stream,
        bar: Any,
        watch: Watch | None,
        eval_every: int,
        keeper: Keeper | None,
        loss: Judge,
    ) -> None:
        self.trainer, self.objective, self.stream, self.bar = trainer, objective, stream, bar
        self.watch, self.eval_every, self.keeper = watch, eval_every, keeper
        self.loss = loss
        self.continued: int | None = None
        self._saved: dict[str, Any] | None = None
        self._due = monotonic()

    def returned(self) -> bool:
        """Goes back to the checkpoint, where there is one; whether it is one of the training's
        end."""
        saved = self._saved = self.keeper.load() if self.keeper is not None else None
        if saved is None:
            return False
        self.continued = saved["step"]
        load_weights_(self.objective.model, saved["weights"])
        self.objective.examples, self.objective.told = saved["examples"], saved["told"]
        self.loss.continue_from(saved.get("shifted"))
        if self.watch is not None:
            self.watch.continue_from(saved["watch"])
        self.bar.update(saved["step"])
        over: bool = saved["over"]
        if over:
            self.stream.past(saved["stream"])  # refuses other batches
        return over

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved, self._saved = self._saved, None
        if saved is None:
            if self.watch is not None:
                self.watch.look(0)
            return
        state.global_step = saved["step"]
        self.stream.continue_from(saved["stream"])
        for name, part in self._parts(kwargs).items():
            part.load_state_dict(saved[name])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, over = state.global_step, state.global_step >= state.max_steps
        self._show()
        if self.watch is not None and (over or step % self.eval_every == 0):
            self.objective.read()
            if self.watch.look(step):
                control.should_training_stop = over = True
        if self.keeper is not None and self.keeper.due(step, over):
            self.objective.read()  # nothing is kept of a training that has failed
            self.keeper.save(
                {
                    "step": step,
                    "over": over,
                    "weights": weights(self.objective.model),
                    "examples": self.objective.examples,
                    "told": self.objective.told,
                    "shifted": self.loss.state(),
                    "stream": self.stream.state(),
                    **{name: part.state_dict() for name, part in self._parts(kwargs).items()},
                    **({"watch": self.watch.state()} if self.watch is not None else {}),
                }
            )

    def _show(self) -> None:
        """Moves the bar; where somebody sees it, the loss is read once in a while."""
        if not self.bar.disable and monotonic() >= self._due:
            self.objective.read()
            self.bar.set_postfix_str(f"loss {self.objective.told['loss'][-1]:.4f}", refresh=False)
            self._due = monotonic() + _EVERY
        self.bar.update()

    def _parts(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What has a state of its own beside the model."""
        scaler = self.trainer.accelerator.scaler
        parts = {"optimizer": kwargs["optimizer"], "scheduler": kwargs["lr_scheduler"]}
        return parts if scaler is None else {**parts, "scaler": scaler}
