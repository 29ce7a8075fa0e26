"""Runs in several processes of ``torchrun`` or ``accelerate launch``, which share the scoring."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from headprune.core.errors import InvalidValue

if TYPE_CHECKING:
    from torch import nn

    from headprune.model.processes import Processes

#: The variables by which a process knows that it is one of several. Those by which it finds the
#: others are not in this list.
_LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
#: Variables of engines that split the model; a run needs it whole.
_ENGINES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
#: How long the others wait for the first process, which may train its model first. If one process
#: fails, the launcher ends all.
_TIMEOUT = timedelta(days=30)
_HINT = "Look for the first error among the processes' outputs."


@dataclass(frozen=True)
class Launch:
    """One process of several that were started together.

    Args:
        rank: Number of this process, from 0.
        size: Number of processes.
        environment: The launcher's variables that say so.
    """

    rank: int
    size: int
    environment: Mapping[str, str]

    @contextmanager
    def met(self, model: nn.Module) -> Iterator[Processes | None]:
        """Join the other processes, and give every ``model`` the first process's weights.

        The process group exists only inside the block, so that the first process trains alone
        before and after it.

        Yields:
            The processes; None if the first process does not share its scoring.
        """
        from headprune.model.processes import Processes, copy_from_first_

        # Each process asks to share the scoring; the first process's answer decides.
        with self._meeting(wanted=True) as wanted:
            if wanted:
                copy_from_first_(model)
            yield Processes() if wanted else None

    def call_off(self) -> None:
        """End the other processes: the first one reuses the scores of an earlier run."""
        with self._meeting(wanted=False):
            pass

    @contextmanager
    def _meeting(self, wanted: bool) -> Iterator[bool]:
        """Open a process group, and yield whether the first process wants to share the scoring.

        Raises:
            ProcessFailed: another process failed or ended.
        """
        import torch
        from torch import distributed

        from headprune.model.processes import translated_errors

        seconds = _TIMEOUT.total_seconds()
        # The variables tell PyTorch where to find the others.
        with (
            _with_variables(self.environment),
            translated_errors(seconds, "the other processes", _HINT),
        ):
            distributed.init_process_group("gloo", timeout=_TIMEOUT)
        try:
            # The first process's answer counts; broadcast overwrites the others'.
            answer = torch.tensor(wanted)
            with translated_errors(seconds, "the first process", _HINT):
                distributed.broadcast(answer, 0)
            yield bool(answer)
        finally:
            distributed.destroy_process_group()


def several() -> bool:
    """Whether a launcher has started this process as one of several."""
    known = all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return known and int(os.environ["WORLD_SIZE"]) > 1


def check_alone(verb: str) -> None:
    """Refuse several processes for a command that would do the same in each of them.

    Raises:
        InvalidValue: there are several.
    """
    if several():
        hint = "Only headprune run shares its work among processes: "
        hint += "start this one without the launcher."
        got = f"{os.environ['WORLD_SIZE']} processes"
        raise InvalidValue(f"headprune {verb}", "started once", got, hint)


def launched() -> Launch | None:
    """Return this process's place among several; None if it is the only one.

    Removes the launcher's variables from the environment: with them, Transformers and accelerate
    would wait for the other processes. Each process gets one of the GPUs.

    Raises:
        InvalidValue: the launcher is set to an engine that splits the model.
    """
    if not several():
        return None
    # 1. Refuse engines that split the model.
    for engine in _ENGINES:
        if os.environ.get(engine, "false").lower() == "true":
            must = "set to plain processes, which share the scoring"
            hint = "Start it with accelerate launch --multi_gpu, or with torchrun."
            raise InvalidValue("accelerate launch", must, engine, hint)
    # 2. Take the variables out of the environment.
    environment = {name: os.environ.pop(name) for name in _LAUNCH_VARIABLES if name in os.environ}
    import torch  # after the variables are gone

    # 3. Choose a GPU.
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment["LOCAL_RANK"]) % torch.cuda.device_count())
    return Launch(int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment)


@contextmanager
def _with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
