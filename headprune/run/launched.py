"""A run in several processes, as ``torchrun`` or ``accelerate launch`` start them: the first runs,
all score."""

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

#: What tells a process that it is one of several; what it needs to find the others is left.
_TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
#: Engines that split the model, which a run builds itself and whole.
_ENGINES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
#: The first process comes to the others when it has trained its model. Whoever started them ends
#: all if one fails.
_PATIENCE = timedelta(days=30)
_HINT = "Look for the first error among the processes' outputs."


@dataclass(frozen=True)
class Launch:
    """One process of several that were started together.

    Args:
        rank: Which one, from 0.
        size: How many there are.
        environment: The variables that say so.
    """

    rank: int
    size: int
    environment: Mapping[str, str]

    @contextmanager
    def met(self, model: nn.Module) -> Iterator[Processes | None]:
        """A process group for as long as the block lasts, with the first process's weights in every
        ``model``.

        There is none before and after, so that the Trainer of the first process trains alone. None
        where the first process has called it off.
        """
        from headprune.model.processes import Processes, copy_from_first_

        with self._meeting(wanted=True) as wanted:
            if wanted:
                copy_from_first_(model)
            yield Processes() if wanted else None

    def call_off(self) -> None:
        """Lets the others go, who wait for the first process: it has the scores of an earlier
        run."""
        with self._meeting(wanted=False):
            pass

    @contextmanager
    def _meeting(self, wanted: bool) -> Iterator[bool]:
        """The process group, and whether the first process wants to share anything.

        Raises:
            ProcessFailed: another process is gone.
        """
        import torch
        from torch import distributed

        from headprune.model.processes import translated_errors

        with (
            _with_variables(self.environment),
            translated_errors(_PATIENCE.total_seconds(), "the other processes", _HINT),
        ):
            distributed.init_process_group("gloo", timeout=_PATIENCE)
        try:
            said = torch.tensor(wanted)
            with translated_errors(_PATIENCE.total_seconds(), "the first process", _HINT):
                distributed.broadcast(said, 0)
            yield bool(said)
        finally:
            distributed.destroy_process_group()


def several() -> bool:
    """Whether a launcher has started this process as one of several."""
    known = all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return known and int(os.environ["WORLD_SIZE"]) > 1


def check_alone(verb: str) -> None:
    """Refuses several processes for a command that would do the same thing in each.

    Raises:
        InvalidValue: there are several.
    """
    if several():
        hint = (
            "Only headprune run shares its work among processes: start this one without the"
            " launcher."
        )
        raise InvalidValue(
            f"headprune {verb}", "started once", f"{os.environ['WORLD_SIZE']} processes", hint
        )


def launched() -> Launch | None:
    """This process among several; None where it is the only one.

    From now on the environment is that of a process of its own: Transformers and accelerate would
    else wait for the others wherever they find a chance. Of several GPUs each process gets one.

    Raises:
        InvalidValue: the launcher is set to an engine that splits the model.
    """
    if not several():
        return None
    engine = next(
        (name for name in _ENGINES if os.environ.get(name, "false").lower() == "true"), None
    )
    if engine is not None:
        hint = "Start it with accelerate launch --multi_gpu, or with torchrun."
        raise InvalidValue(
            "accelerate launch", "set to plain processes, which share the scoring", engine, hint
        )
    environment = {name: os.environ.pop(name) for name in _TOLD if name in os.environ}
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment["LOCAL_RANK"]) % torch.cuda.device_count())
    return Launch(int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment)


@contextmanager
def _with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
