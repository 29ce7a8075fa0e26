"""Copies between main memory and an accelerator: Python waits for the accelerator at most of them,
so they are few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

#: Copies of weights stay on a GPU that has room for so many: such a copy, gradients, Adam's two
#: averages, and as much again for what a pass leaves behind.
_TIMES = 5


def in_main_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors in main memory, in their order; those of one device and type come in one copy.

    What lies in main memory already is given back as it is.

    >>> [x.tolist() for x in in_main_memory([torch.ones(2), torch.zeros(1, 1)])]
    [[1.0, 1.0], [[0.0]]]
    """
    found = list(tensors)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(found):
        if tensor.device.type != "cpu":
            together.setdefault((tensor.device, tensor.dtype), []).append(number)
    for numbers in together.values():
        shapes = [found[number].shape for number in numbers]
        whole = torch.cat([found[number].detach().reshape(-1) for number in numbers]).cpu()
        pieces = whole.split([shape.numel() for shape in shapes])
        for number, shape, piece in zip(numbers, shapes, pieces, strict=True):
            found[number] = piece.view(shape)
    return found


def sent(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of Python's numbers, or of a tensor in main memory, on a device; Python goes on at
    once.

    ``torch.tensor(values, device=device)`` would wait until the numbers have arrived, behind all
    work that the device was given before.
    """
    here = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return here.to(device, dtype, non_blocking=True)


def in_fp64(x: Tensor) -> Tensor:
    """A tensor in fp64 where it lies; in main memory where the device has no fp64."""
    return x.cpu().double() if x.device.type == "mps" else x.double()


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of tensors: on the GPU where they lie if it has room for five of each, else in main
    memory.

    A copy on the GPU is made without a wait, and at the pace of the GPU's own memory.
    """
    found = list(tensors)
    needed: Counter[torch.device] = Counter()
    for tensor in found:
        needed[tensor.device] += tensor.numel() * tensor.element_size()
    stays = {device: _has_room(device, n_bytes) for device, n_bytes in needed.items()}
    return [
        x.detach().clone() if stays[x.device] else x.detach().to("cpu", copy=True) for x in found
    ]


def _has_room(device: torch.device, n_bytes: int) -> bool:
    if device.type != "cuda":
        return False
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _TIMES * n_bytes <= torch.cuda.mem_get_info(device)[0] + unused
