"""What a training touches besides the parameters, put back: modes, random states, accelerate's
global state."""

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
    """Where Python's, NumPy's, torch's generators and some more stand; a GPU that was never used is
    not woken."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "generators": [g.get_state() for g in generators],
    }


def set_random_states(states: RandomStates, generators: Iterable[torch.Generator] = ()) -> None:
    """Puts them there again."""
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
    """Puts back what a Trainer changes outside of the parameters: modes, random states,
    accelerate's global state.

    Inside, accelerate knows of no precision that an Accelerator outside was made for.
    """
    modes = [(m, m.training) for m in model.modules()]
    states = [
        (kind._shared_state, dict(kind._shared_state))
        for kind in (PartialState, AcceleratorState, GradientState)
    ]
    before = random_states()
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        AcceleratorState._shared_state.clear()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter in model.parameters():
            parameter.grad = None
        for shared, held in states:
            shared.clear()
            shared.update(held)
        set_random_states(before)
        if current is not None:
            torch.cuda.set_device(current)
