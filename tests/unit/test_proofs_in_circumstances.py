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
from headprune.model.sites import bind, find_sites
from tests.circumstances import CIRCUMSTANCES

#: Layouts that run a module's code before they take it.
PROVING = ("annotated", "d2l", "diffusers", "head_list", "head_list_bare", "labml", "timm")


def fresh_(model: nn.Module, names: list[str]) -> None:
    """Gives every attention a class of its own, of which nothing is known."""
    for name in names:
        module = model.get_submodule(name)
        module.__class__ = type(type(module).__name__, (type(module),), {})


class Scaled(Annotated):
    """Depends on the number of heads."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(query / self.h, key, value, mask)


#: A model of one family of each layout that proves code; the rest under the harshest alone.
FAMILY_OF = {layout: registry.get(layout).families[0][0] for layout in PROVING}
CASES = [("annotated", name) for name in CIRCUMSTANCES]
CASES += [(layout, "dispatch mode") for layout in PROVING[1:]]
CASES += [(layout, "fake tensors") for layout in PROVING[1:]]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_proof_in_any_circumstance_is_the_proof(layout: str, name: str) -> None:
    model = registry.get(layout).tiny(0, FAMILY_OF[layout])[0]
    expected = find_sites(model)
    names = [s.name for s in expected]
    ask = CIRCUMSTANCES[name]
    fresh_(model, names)
    assert ask(lambda: find_sites(model)) == expected, "asked there first"
    assert find_sites(model) == expected
    fresh_(model, names)
    assert find_sites(model) == expected
    assert ask(lambda: find_sites(model)) == expected, "asked elsewhere first"


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_what_is_refused_is_refused_in_any_circumstance(name: str) -> None:
    model = nn.ModuleList([Scaled(12, 4)])
    for ask in (CIRCUMSTANCES[name], lambda asked: asked()):
        with pytest.raises(UnsupportedModel):
            ask(lambda: find_sites(model))


@pytest.mark.parametrize("layout", [name for name in registry.names() if name not in PROVING])
def test_other_layouts_are_found_in_any_circumstance(layout: str) -> None:
    model = registry.get(layout).tiny(0)[0]
    expected = find_sites(model)
    for name, ask in CIRCUMSTANCES.items():
        assert ask(lambda: find_sites(model)) == expected, name


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
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError),
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
    sites = find_sites(model)
    change(monkeypatch)
    with pytest.raises(UnsupportedModel):
        find_sites(model)
    with pytest.raises(UnsupportedModel, match="got something else"):
        bind(model, sites)
    monkeypatch.undo()
    find_sites(model)


def test_threads_that_prove_at_once_leave_the_settings_of_the_process() -> None:
    """The first to begin ends first, so that settings saved by each would end as the second found
    them."""
    before = torch.get_default_dtype(), warnings.filters[:]
    begun, joined = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        joined.wait(10)

    def quick() -> None:
        joined.set()
        time.sleep(0.01)

    torch.set_default_dtype(torch.float64)
    try:
        first, second = (threading.Thread(target=isolated, args=(work,)) for work in (slow, quick))
        first.start()
        begun.wait(10)
        second.start()
        first.join()
        second.join()
        assert torch.get_default_dtype() == torch.float64
        assert warnings.filters == before[1]
    finally:
        torch.set_default_dtype(before[0])
