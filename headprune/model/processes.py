"""Shares work among the processes of ``torch.distributed``: each makes a part, all get all parts.

Tensors are exchanged over a gloo group of their own. It works next to every other backend, has its
own timeout, and notices by the closed connection that a process has ended. Nothing is pickled.
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

#: The key of the message that a failed process sends instead of tensors.
_FAILED = "failed"
_HINT = (
    "Look for the first error among the processes' outputs; Processes(timeout=) is how long they"
    " wait."
)


@dataclass(frozen=True)
class Processes:
    """Share the batches of ``hp.score`` among the processes of ``torch.distributed``.

    Every process makes the same calls with the same model and the same, whole batches. Process
    ``i % processes`` runs batch i, and the others only read it, so that every example counts once
    whatever the number of batches. Every process returns what one process alone would return
    (numbers per row to the last bit, sums to rounding).

    So do not split the data among the processes: no ``DistributedSampler``, no
    ``accelerator.prepare(loader)``. Both repeat examples until all parts are equally long. Batches
    or weights that differ between processes are refused.

    Start the processes with ``torchrun`` or ``accelerate launch`` and call
    ``torch.distributed.init_process_group("gloo")`` (any backend will do). Without a group there is
    one process.

    Args:
        timeout: Seconds that a process waits for the others where all combine their results: how
            much longer the slowest may take than the fastest. A process that has ended is noticed
            at once.

    Raises:
        InvalidValue: a timeout that is no positive number.

    >>> Processes(timeout=600)
    Processes(timeout=600)
    """

    timeout: float = 1800.0

    def __post_init__(self) -> None:
        number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if not number or not self.timeout > 0:  # NaN is not above 0 either
            must = "a number of seconds above 0"
            raise InvalidValue("Processes.timeout", must, repr(self.timeout))

    @contextmanager
    def together(self) -> Iterator[Workers]:
        """Open a group of all processes for the block; every process has to come here.

        Raises:
            InvalidValue: several processes were started, and ``torch.distributed`` is not
                initialised.
            ProcessFailed: not all of them came in time.
        """
        if not (dist.is_available() and dist.is_initialized()):
            started = os.environ.get("WORLD_SIZE", "1")
            # torchrun and accelerate set it, whether or not the program joins the group.
            if started != "1":
                must = "an initialised torch.distributed where several processes were started"
                hint = "Call torch.distributed.init_process_group('gloo') before."
                got = f"WORLD_SIZE={started} and no process group"
                raise InvalidValue("processes", must, got, hint)
            yield Workers()
            return
        with translated_errors(self.timeout, "the process group"):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        try:
            yield Workers(dist.get_rank(), dist.get_world_size(), group, self.timeout)
        finally:
            dist.destroy_process_group(group)


@dataclass(frozen=True)
class Workers:
    """This process among those that share work; by default the only one.

    Args:
        rank: Its number, from 0.
        size: How many processes there are.
        group: The process group.
        timeout: Of the group, in seconds.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    timeout: float = 0.0

    def owns(self, index: int) -> bool:
        """Whether a piece of work is this process's."""
        return index % self.size == self.rank

    def exchanged(self, make: Callable[[], Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
        """Exchange what ``make`` returns in every process.

        Returns:
            Tensors by rank, on the CPU; of a single process unchanged.

        Raises:
            ProcessFailed: another process has ended, is late, or raised an error, which the message
                quotes.
        """
        if self.size == 1:
            return [make()]
        try:
            parts = make()
        except Exception as error:
            # Send the error to the others; it also comes before any failure of theirs.
            with suppress(ProcessFailed):
                self._gathered({_FAILED: _encoded(f"{type(error).__name__}: {error}")})
            raise
        return self._gathered(parts)

    def united(self, lines: Iterable[str]) -> tuple[str, ...]:
        """The lines of all processes, each once, in the order of the processes."""
        own = {"lines": _encoded("\0".join(lines))}
        every: dict[str, None] = {}  # keeps the order
        for part in self.exchanged(lambda: own):
            every.update(dict.fromkeys(_decoded(part["lines"]).split("\0")))
        every.pop("", None)
        return tuple(every)

    def agree(self, where: str, must: str, value: str, hint: str = "") -> None:
        """Check that a text is the same in every process.

        Raises:
            InvalidValue: another process has another text.
        """
        if self.size == 1:
            return
        own = {"value": _encoded(value)}
        for rank, part in enumerate(self.exchanged(lambda: own)):
            if _decoded(part["value"]) != value:
                got = f"different ones in processes {rank} and {self.rank}"
                raise InvalidValue(where, must, got, hint)

    def _gathered(self, parts: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """The tensors of every process, by rank."""
        flat = save({name: tensor.detach().cpu().contiguous() for name, tensor in parts.items()})
        own = torch.frombuffer(bytearray(flat), dtype=torch.uint8)
        with translated_errors(self.timeout, "the other processes"):
            # 1. How many bytes each process sends.
            sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(own)]), group=self.group)
            # 2. The bytes, all padded to one length.
            length = int(max(sizes))
            received = [own.new_empty(length) for _ in sizes]
            padded = torch.cat([own, own.new_zeros(length - len(own))])
            dist.all_gather(received, padded, group=self.group)
        gathered = []
        for size, data in zip(sizes, received, strict=True):
            gathered.append(load(bytes(data[: int(size)].numpy())))
        for rank, other in enumerate(gathered):
            if _FAILED in other and rank != self.rank:
                got = _decoded(other[_FAILED])
                raise ProcessFailed(f"process {rank}", "able to finish its share", got)
        return gathered


def _encoded(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _decoded(letters: Tensor) -> str:
    return bytes(letters.tolist()).decode()


def copy_from_first_(model: nn.Module) -> None:
    """Copy the tensors of process 0's model to all others, in place; over the default gloo group.

    Raises:
        ProcessFailed: another process has ended.
    """
    for tensor in weights_of(model).values():
        # As bytes: gloo does not know every dtype.
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        with translated_errors(math.inf, "the other processes"):
            dist.broadcast(flat, 0)
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


@contextmanager
def translated_errors(timeout: float, what: str, hint: str = _HINT) -> Iterator[None]:
    """Replace the RuntimeErrors that ``torch.distributed`` raises inside the block.

    Args:
        timeout: Seconds that the call waits.
        what: What it waits for.
        hint: What to try.

    Raises:
        ProcessFailed: instead of such an error.
    """
    try:
        yield
    except RuntimeError as error:
        # The first sentence, without the transport's marks in brackets.
        text = re.sub(r"^(\[\S*\]\s*)+", "", str(error).strip())
        sentence = text.partition("\n")[0].partition(". ")[0]
        must = f"reachable and answer within {timeout:g} s"
        raise ProcessFailed(what, must, f"none ({sentence})", hint) from error
