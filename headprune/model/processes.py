"""The processes of ``torch.distributed``, which share work: each makes its part, and all get
everybody's parts.

What is exchanged is tensors, over a gloo group that exists for this alone: it works beside every
other backend, has a timeout of its own, and notices a process that is gone by its closed
connection. Nothing is pickled.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch import distributed as dist

from headprune.attention.kept_heads import weights_of
from headprune.core.errors import InvalidValue, ProcessFailed

#: The key of what a process says in place of tensors when it failed.
_FAILED = "failed"
_HINT = (
    "Look for the first error among the processes' outputs; Processes(timeout=) is how long they"
    " wait."
)


@dataclass(frozen=True)
class Processes:
    """The processes of an initialised ``torch.distributed`` group share the batches of
    ``hp.score``.

    Every process makes the same calls with the same model and the same, whole batches: batch i is
    run by process ``i % processes``, the others only read it, so that every example counts once
    whatever the number of batches, and every process returns what one process alone would have
    (numbers a row to the last bit, sums to rounding). So do not let a loader deal out the data: no
    ``DistributedSampler``, no ``accelerator.prepare(loader)``. Both repeat examples until all parts
    are equally long. Batches or weights that differ between processes are refused.

    Start the processes with ``torchrun`` or ``accelerate launch`` and call
    ``torch.distributed.init_process_group("gloo")`` (any backend will do). Without a group there is
    one process.

    Args:
        timeout: Seconds that a process waits where all put together what they have; the slowest may
            need so much longer than the fastest. One that is gone is noticed at once.

    Raises:
        InvalidValue: a timeout that is none.

    >>> Processes(timeout=600)
    Processes(timeout=600)
    """

    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if (
            isinstance(self.timeout, bool)
            or not isinstance(self.timeout, (int, float))
            or not self.timeout > 0
        ):
            raise InvalidValue(
                "Processes.timeout", "a number of seconds above 0", repr(self.timeout)
            )

    @contextmanager
    def together(self) -> Iterator[Workers]:
        """For as long as the block lasts, a group of all processes; every process has to come here.

        Raises:
            InvalidValue: several processes were started and nobody has initialised
                ``torch.distributed``.
            ProcessFailed: not all of them came in time.
        """
        if not (dist.is_available() and dist.is_initialized()):
            started = os.environ.get("WORLD_SIZE", "1")
            if started != "1":
                must = "an initialised torch.distributed where several processes were started"
                hint = "Call torch.distributed.init_process_group('gloo') before."
                raise InvalidValue(
                    "processes", must, f"WORLD_SIZE={started} and no process group", hint
                )
            yield Workers()
            return
        with in_words(self.timeout, "the process group"):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        try:
            yield Workers(dist.get_rank(), dist.get_world_size(), group, self.timeout)
        finally:
            dist.destroy_process_group(group)


@dataclass(frozen=True)
class Workers:
    """One process among those that share work; by default the only one.

    Args:
        rank: Which one, from 0.
        size: How many there are.
        group: What they talk through.
        timeout: Of that, in seconds.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    timeout: float = 0.0

    def owns(self, index: int) -> bool:
        """Whether a piece of work is this process's."""
        return index % self.size == self.rank

    def exchanged(self, make: Callable[[], Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
        """What ``make`` gives in every process, by rank, on the CPU; the only process's own as it
        is.

        Raises:
            ProcessFailed: another process is gone, late, or raised an error, which the message
                quotes.
        """
        if self.size == 1:
            return [make()]
        try:
            parts = make()
        except Exception as error:
            with suppress(ProcessFailed):  # what happened here comes first
                self._gathered({_FAILED: _letters(f"{type(error).__name__}: {error}")})
            raise
        return self._gathered(parts)

    def united(self, lines: Iterable[str]) -> tuple[str, ...]:
        """The lines of all processes, each once, in the order of the processes."""
        own = "\0".join(lines)
        found = [_words(part["lines"]) for part in self.exchanged(lambda: {"lines": _letters(own)})]
        return tuple(dict.fromkeys(line for text in found for line in text.split("\0") if line))

    def agree(self, where: str, must: str, said: str, hint: str = "") -> None:
        """Refuses what must be the same in every process.

        Raises:
            InvalidValue: another process says something else.
        """
        if self.size == 1:
            return
        for rank, part in enumerate(self.exchanged(lambda: {"said": _letters(said)})):
            if _words(part["said"]) != said:
                raise InvalidValue(
                    where, must, f"others in process {rank} than in process {self.rank}", hint
                )

    def _gathered(self, parts: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        flat = save({name: tensor.detach().cpu().contiguous() for name, tensor in parts.items()})
        own = torch.frombuffer(bytearray(flat), dtype=torch.uint8)
        with in_words(self.timeout, "the other processes"):
            sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(own)]), group=self.group)
            room = [own.new_empty(int(max(sizes))) for _ in sizes]
            dist.all_gather(
                room, torch.cat([own, own.new_zeros(len(room[0]) - len(own))]), group=self.group
            )
        found = [load(bytes(x[: int(n)].numpy())) for x, n in zip(room, sizes, strict=True)]
        for rank, other in enumerate(found):
            if _FAILED in other and rank != self.rank:
                must, got = "through with its share", _words(other[_FAILED])
                raise ProcessFailed(f"process {rank}", must, got)
        return found


def _letters(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _words(letters: Tensor) -> str:
    return bytes(letters.tolist()).decode()


def copy_from_first_(model: nn.Module) -> None:
    """Puts the tensors of process 0's model into those of all others, in place; over the default
    group, by gloo.

    Raises:
        ProcessFailed: another process is gone.
    """
    for tensor in weights_of(model).values():
        flat = (
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        )  # gloo knows not every type
        with in_words(math.inf, "the other processes"):
            dist.broadcast(flat, 0)
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


@contextmanager
def in_words(timeout: float, what: str, hint: str = _HINT) -> Iterator[None]:
    """What ``torch.distributed`` raises is a RuntimeError in the words of its transport.

    Raises:
        ProcessFailed: that, in ours.
    """
    try:
        yield
    except RuntimeError as error:
        said = (
            re.sub(r"^(\[\S*\]\s*)+", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
        )
        raise ProcessFailed(
            what, f"there, with an answer within {timeout:g} s", f"none ({said})", hint
        ) from error
