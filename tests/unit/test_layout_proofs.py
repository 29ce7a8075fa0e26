"""What is proved of a module's code is proved once for all that are built alike, and for nothing
else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn

from headprune.layouts import _once, _proofs
from headprune.layouts._once import once
from headprune.layouts._tiny_textbook import Annotated, Processed, Processor
from headprune.model.sites import bind, find_sites


class Doubled(Annotated):
    """Doubles the queries where an attribute says so."""

    def __init__(self, d_model: int, h: int, doubled: Any = False) -> None:
        super().__init__(d_model, h)
        self.doubled = doubled

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(query * 2 if self.doubled else query, key, value, mask)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules whose code a proof ran for."""
    seen: list[nn.Module] = []
    real = _proofs.is_attention

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
        seen.append(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(_proofs, "is_attention", counted)
    return seen


def test_layers_built_alike_are_proved_once(runs: list[nn.Module]) -> None:
    class Fresh(Annotated):
        pass

    model = nn.ModuleList(Fresh(12, 4) for _ in range(5))
    sites = find_sites(model)
    bind(model, sites)
    assert (len(sites), len(runs)) == (5, 1)
    find_sites(nn.ModuleList([*(Fresh(12, 4) for _ in range(2)), Fresh(12, 3)]))
    assert len(runs) == 2, "another number of heads is another structure"


@pytest.mark.parametrize(
    "odd",
    [True, 1, "yes", (1,), {"a": 1}, Processor(), Processed],
    ids=["a flag", "1", "text", "tuple", "mapping", "object", "class"],
)
def test_another_attribute_is_another_structure(odd: Any) -> None:
    """`1` equals `True` and objects may differ within: neither may pass for what was proved."""
    for usual in (False, ()):
        model = nn.ModuleList([Doubled(12, 4, usual), Doubled(12, 4, odd)])
        assert [s.name for s in find_sites(model)] == ["0"]


def test_a_forward_of_the_instance_is_refused_and_hooks_are_not() -> None:
    first, second, third = (Annotated(12, 4) for _ in range(3))
    second.forward = lambda *args: Annotated.forward(second, *args)  # type: ignore[method-assign]
    for module in third.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    assert [s.name for s in find_sites(nn.ModuleList([first, second, third]))] == ["0", "2"]


def test_more_structures_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_once, "_MANY", 2)
    asked: list[int] = []
    proof = once(lambda module, n: asked.append(n) or True)  # type: ignore[func-returns-value]
    module = nn.Dropout()
    for n in (1, 2, 1, 2, 3, 3, 4, 1, 1):
        assert proof(module, n)
    assert asked == [1, 2, 3, 4, 1]


def test_what_failed_is_asked_again() -> None:
    answers = [False, 0, True, False]
    proof = once(lambda module: answers.pop(0))
    module = nn.Dropout()
    assert [bool(proof(module)) for _ in range(5)] == [False, False, True, True, True]


def test_what_cannot_be_compared_is_proved_every_time() -> None:
    asked: list[Any] = []
    proof = once(lambda module: not asked.append(module))  # type: ignore[func-returns-value]
    plain, held, hidden, lazy, looped = (nn.Sequential(nn.Dropout()) for _ in range(5))
    held.kept = torch.ones(2)  # a tensor that is no parameter
    hidden.kept = object()  # type: ignore[assignment]
    lazy.append(nn.LazyLinear(3))  # which has no shape yet
    looped.ring = [looped]  # type: ignore[assignment]
    for module, times in ((plain, 1), (held, 2), (hidden, 2), (lazy, 2), (looped, 2)):
        asked.clear()
        assert proof(module)
        assert proof(module)
        assert len(asked) == times
