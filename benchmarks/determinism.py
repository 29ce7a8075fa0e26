"""The same training twice, to the same bits: PyTorch's settings for it, for the length of a block.

A study that goes on on the next machine, from a checkpoint, must come to the weights of one that
was never stopped. On a GPU that takes kernels that add up in one order: PyTorch's deterministic
ones, cuDNN without a search for the fastest, and a workspace of cuBLAS that is laid out the same
way every time, which an environment variable says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

#: What cuBLAS reads when CUDA starts.
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
#: Eight buffers of 4 MiB; the other setting that is deterministic, ``:16:8``, is slower.
WORKSPACE = ":4096:8"
DETERMINISTIC = (WORKSPACE, ":16:8")


@contextmanager
def deterministic() -> Iterator[None]:
    """Has PyTorch compute deterministically for as long as the block lasts; settings are as before
    afterwards.

    The environment variable stays, because cuBLAS has read it by then. Operations that have no
    deterministic kernel raise an error. What is drawn is up to seeds, and the order of the data to
    its loader.

    Raises:
        RuntimeError: CUDA was started without ``CUBLAS_WORKSPACE_CONFIG``.

    >>> with deterministic():
    ...     torch.are_deterministic_algorithms_enabled()
    True
    """
    _set_workspace()
    cudnn = torch.backends.cudnn
    algorithms = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=only_warns)
        cudnn.deterministic, cudnn.benchmark = before


def reproducible(device: torch.device) -> AbstractContextManager[None]:
    """``deterministic()`` on a GPU, where the same training else gives other weights; elsewhere
    nothing is changed."""
    return deterministic() if device.type == "cuda" else nullcontext()


def _set_workspace() -> None:
    if os.environ.get(VARIABLE) in DETERMINISTIC:
        return
    if torch.cuda.is_initialized():
        got = os.environ.get(VARIABLE, "not set")
        raise RuntimeError(
            f"{VARIABLE}: must be {' or '.join(DETERMINISTIC)} before CUDA starts, got {got}, and"
            " CUDA has started. Set it in the shell, or enter deterministic() before anything is"
            " put on the GPU."
        )
    os.environ[VARIABLE] = WORKSPACE
