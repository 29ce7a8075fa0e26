"""Classes that are put in front of a module's: with accelerate's hooks, after them, not over a
forward of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

from headprune.core.mixin import Mixin, has_own_forward, mix_in, mix_out

ONE = torch.ones(1)


class Negated(Mixin, nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


class Tripled(Mixin, nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def hooked(module: nn.Module) -> Any:
    return add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))


@pytest.mark.parametrize(
    "before", [[], [hooked], [hooked, remove_hook_from_module], [hooked, copy.deepcopy]], ids=len
)
def test_what_is_put_in_front_runs_whatever_hooks_there_are(before: list[Any]) -> None:
    module: nn.Module = nn.Identity()
    for step in before:
        module = step(module)
    assert not has_own_forward(module)
    assert mix_in(module, Negated)
    assert not mix_in(module, Negated)
    assert module(ONE) == -1
    assert mix_in(module, Tripled)
    assert (module(ONE), copy.deepcopy(module)(ONE)) == (-3, -3)
    mix_out(module, Negated)
    assert module(ONE) == 3
    if before == [hooked]:
        assert remove_hook_from_module(module)(ONE) == 3
    mix_out(module, Tripled)
    assert module(ONE) == 1
    assert type(module) is nn.Identity


def test_a_hook_that_comes_later_does_not_hold_on_to_a_class() -> None:
    module = nn.Identity()
    mix_in(module, Negated)
    hooked(module)
    assert module(ONE) == -1
    mix_out(module, Negated)
    assert module(ONE) == 1
