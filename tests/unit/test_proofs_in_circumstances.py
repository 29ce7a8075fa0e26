"""What is proved of a module does not depend on where somebody asked first, and nothing of the
place is remembered."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headprune.core.errors import UnsupportedModel
from headprune.layouts import registry
from headprune.layouts._isolated import isolated
from headprune.layouts._tiny_textbook import Annotated, D2l
from headprune.model.sites import find_sites
from tests.circumstances import CIRCUMSTANCES
from tests.laws.families import FAMILIES

#: Layouts that run a module's code before they take it.
PROVING = ("annotated", "d2l", "diffusers", "head_list", "head_list_bare", "labml", "timm")


def fresh_(model: nn.Module, names: list[str]) -> None:
    """Gives every attention a class of its own, of which nothing is known."""
    for name in names:
        module = model.get_submodule(name)
        module.__class__ = type(type(module).__name__, (type(module),), {})


@pytest.fixture(params=[f for f in FAMILIES if f[0] in PROVING], ids=lambda f: f[1])
def model(request: pytest.FixtureRequest) -> nn.Module:
    made: nn.Module = registry.get(request.param[0]).tiny(0, request.param[1])[0]
    return made


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_a_proof_in_any_circumstance_is_the_proof(model: nn.Module, name: str) -> None:
    expected = find_sites(model)
    names = [s.name for s in expected]
    ask = CIRCUMSTANCES[name]
    fresh_(model, names)
    assert ask(lambda: find_sites(model)) == expected, "asked there first"
    assert find_sites(model) == expected
    fresh_(model, names)
    assert find_sites(model) == expected
    assert ask(lambda: find_sites(model)) == expected, "asked elsewhere first"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f[1])
def test_every_family_is_found_in_any_circumstance(family: tuple[str, str]) -> None:
    model = registry.get(family[0]).tiny(0, family[1])[0]
    expected = find_sites(model)
    found = {
        name: ask(lambda: find_sites(model)) == expected for name, ask in CIRCUMSTANCES.items()
    }
    assert [name for name, same in found.items() if not same] == []


class Scaled(Annotated):
    """Depends on the number of heads."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(query / self.h, key, value, mask)


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_what_is_refused_is_refused_in_any_circumstance(name: str) -> None:
    model = nn.ModuleList([Scaled(12, 4)])
    with pytest.raises(UnsupportedModel):
        CIRCUMSTANCES[name](lambda: find_sites(model))
    with pytest.raises(UnsupportedModel):
        find_sites(model)


class FailsFirst(Annotated):
    """Its first runs end in an error."""

    errors: Iterator[BaseException] = iter(())

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        for error in type(self).errors:
            raise error
        return super().forward(query, key, value, mask)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (MemoryError(), MemoryError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
            ),
            RuntimeError,
        ),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ImportError("not there yet"), UnsupportedModel),
        (TimeoutError(), UnsupportedModel),
        (RecursionError(), UnsupportedModel),
    ],
    ids=lambda e: type(e).__name__ if isinstance(e, BaseException) else "",
)
def test_an_interrupted_proof_is_no_answer(error: BaseException, seen: type[BaseException]) -> None:
    kind = type("FailsFirstAttention", (FailsFirst,), {"errors": iter([error])})
    model = nn.ModuleList([kind(12, 4)])
    with pytest.raises(seen):
        find_sites(model)
    assert [s.name for s in find_sites(model)] == ["0"]


def _doubled(x: Tensor) -> Tensor:
    return x


FACTOR = 1.0


class Helped(D2l):
    """Its code lies in methods, in functions and in numbers beside it."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None
    ) -> Tensor:
        return super().forward(_doubled(queries) * FACTOR * self.factor, keys, values, valid_lens)

    factor = 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setattr(Helped, "_split", lambda self, x: D2l._split(self, x) * 2),
        lambda m: m.setattr(D2l, "forward", lambda self, q, k, v, n: self.W_o(q)),
        lambda m: m.setattr(f"{__name__}._doubled", lambda x: 2 * x),
        lambda m: m.setattr(f"{__name__}.FACTOR", 2.0),
        lambda m: m.setattr(Helped, "factor", 2.0),
    ],
    ids=["method", "inherited", "function", "number", "attribute"],
)
def test_code_that_changed_since_is_proved_anew(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = Helped(12, 4)
    module(*[torch.randn(2, 5, 12)] * 3, None)
    model = nn.ModuleList([module])
    find_sites(model)
    change(monkeypatch)
    with pytest.raises(UnsupportedModel):
        find_sites(model)
    monkeypatch.undo()
    find_sites(model)


def test_threads_that_prove_at_once_leave_the_settings_of_the_process() -> None:
    before = torch.get_default_dtype(), warnings.filters[:]
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(15):
            # The first to come is the last to go, so that settings saved by each would end as the
            # second found them
            first, second = threading.Event(), threading.Event()

            def slow(first: threading.Event = first, second: threading.Event = second) -> None:
                first.set()
                second.wait(10)

            thread = threading.Thread(target=isolated, args=(slow,))
            thread.start()
            first.wait(10)

            def quick(second: threading.Event = second) -> None:
                second.set()
                time.sleep(0.01)

            other = threading.Thread(target=isolated, args=(quick,))
            other.start()
            thread.join()
            other.join()
            assert torch.get_default_dtype() == torch.float64
            assert warnings.filters == before[1]
    finally:
        torch.set_default_dtype(before[0])
