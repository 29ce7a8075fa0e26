"""Copies between main memory and an accelerator: few, because Python waits for most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

#: A copy of weights stays on a GPU if it has room for this many copies: the copy, gradients,
#: Adam's two averages, and as much again for activations.
_ROOM_FOR = 5


def in_main_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy tensors to main memory, in one copy per device and dtype.

    Tensors in main memory are returned unchanged; the order stays the same.

    >>> [x.tolist() for x in in_main_memory([torch.ones(2), torch.zeros(1, 1)])]
    [[1.0, 1.0], [[0.0]]]
    """
    results = list(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(results):
        if tensor.device.type != "cpu":
            groups.setdefault((tensor.device, tensor.dtype), []).append(number)
    for numbers in groups.values():
        # One flat tensor per device and dtype, one copy, and cut into pieces again.
        shapes = [results[number].shape for number in numbers]
        whole = torch.cat([results[number].detach().reshape(-1) for number in numbers]).cpu()
        pieces = whole.split([shape.numel() for shape in shapes])
        for number, shape, piece in zip(numbers, shapes, pieces, strict=True):
            results[number] = piece.view(shape)
    return results


def sent(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Send numbers, or a tensor in main memory, to a device without a wait.

    ``torch.tensor(values, device=device)`` would wait until the numbers have arrived, after all
    earlier work of the device.
    """
    here = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return here.to(device, dtype, non_blocking=True)


def in_fp64(x: Tensor) -> Tensor:
    """Convert a tensor to fp64; in main memory if its device has no fp64."""
    if x.device.type == "mps":  # has no fp64
        x = x.cpu()
    return x.double()


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy tensors on their GPU if it has room for five of each, else to main memory.

    A copy on the GPU is made without a wait, at the speed of the GPU's own memory.
    """
    originals = list(tensors)
    # What is copied together has to fit together.
    needed: Counter[torch.device] = Counter()
    for tensor in originals:
        needed[tensor.device] += tensor.numel() * tensor.element_size()
    has_room = {device: _has_room(device, n_bytes) for device, n_bytes in needed.items()}
    copied = []
    for tensor in originals:
        if has_room[tensor.device]:
            copied.append(tensor.detach().clone())
        else:
            copied.append(tensor.detach().to("cpu", copy=True))
    return copied


def _has_room(device: torch.device, n_bytes: int) -> bool:
    if device.type != "cuda":
        return False
    # Memory that PyTorch has reserved and does not use is free for its tensors, too.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _ROOM_FOR * n_bytes <= torch.cuda.mem_get_info(device)[0] + unused
