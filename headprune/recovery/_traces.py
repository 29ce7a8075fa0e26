"""Saves and restores what a training touches besides the parameters: modes, random states and
accelerate's global state."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

#: Plain tensors, numbers and tuples, so that ``torch.load(weights_only=True)`` reads them.
RandomStates: TypeAlias = dict[str, Any]


def random_states(generators: Iterable[torch.Generator] = ()) -> RandomStates:
    """Return the random states of Python, NumPy, torch and these generators."""
    name, keys, *rest = np.random.get_state()
    # Reading the state of a GPU that was never used would initialize it.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "generators": [generator.get_state() for generator in generators],
    }


def set_random_states(states: RandomStates, generators: Iterable[torch.Generator] = ()) -> None:
    """Restore what ``random_states`` returned."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    for generator, state in zip(generators, states["generators"], strict=True):
        generator.set_state(state)


@contextmanager
def no_trace(model: nn.Module) -> Iterator[None]:
    """Restore at exit what a Trainer changes besides the parameters.

    That is modes, gradients, random states, the current GPU and accelerate's global state. Inside,
    accelerate does not know the precision of an Accelerator outside.
    """
    # 1. Save.
    modes = [(module, module.training) for module in model.modules()]
    shared_states = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    saved_states = list(map(dict, shared_states))
    before = random_states()
    current_gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        AcceleratorState._shared_state.clear()
        yield
    finally:
        # 2. Restore.
        for module, mode in modes:
            module.training = mode
        for parameter in model.parameters():
            parameter.grad = None
        for shared, saved in zip(shared_states, saved_states, strict=True):
            shared.clear()
            shared.update(saved)
        set_random_states(before)
        if current_gpu is not None:
            torch.cuda.set_device(current_gpu)
