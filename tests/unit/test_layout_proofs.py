"""What is proved of a module's code is proved once for all that are built alike, and for nothing
else; it does not depend on where somebody asked first."""

import threading
import time
import warnings
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from headprune.core.errors import UnsupportedModel
from headprune.layouts import _proofs, registry
from headprune.layouts._isolated import isolated
from headprune.layouts._once import once
from headprune.layouts._tiny_textbook import Annotated, D2l, Processed, Processor
from headprune.model.sites import bind, find_sites
from tests.circumstances import CIRCUMSTANCES


class Doubled(Annotated):
    def __init__(self, d_model, h, doubled=False):
        super().__init__(d_model, h)
        self.doubled = doubled

    def forward(self, query, key, value, mask=None):
        return super().forward(query * 2 if self.doubled else query, key, value, mask)


@pytest.fixture
def runs(monkeypatch):
    counted = Mock(wraps=_proofs.is_attention)
    monkeypatch.setattr(_proofs, "is_attention", counted)
    return counted


def test_layers_built_alike_are_proved_once(runs):
    class Fresh(Annotated):
        pass

    model = nn.ModuleList(Fresh(12, 4) for _ in range(5))
    sites = find_sites(model)
    bind(model, sites)
    assert (len(sites), runs.call_count) == (5, 1)
    find_sites(nn.ModuleList([*(Fresh(12, 4) for _ in range(2)), Fresh(12, 3)]))
    assert runs.call_count == 2, "another number of heads is another structure"


@pytest.mark.parametrize(
    "odd",
    [True, 1, "yes", (1,), {"a": 1}, {1}, Processor(), Processed],
    ids=["a flag", "1", "text", "tuple", "mapping", "set", "object", "class"],
)
def test_another_attribute_is_another_structure(odd):
    """`1` equals `True` and objects may differ within: neither may pass for what was proved."""
    for usual in (False, ()):
        model = nn.ModuleList([Doubled(12, 4, usual), Doubled(12, 4, odd)])
        assert [s.name for s in find_sites(model)] == ["0"]


def test_a_forward_of_the_instance_is_refused_and_hooks_are_not():
    first, second, third = (Annotated(12, 4) for _ in range(3))
    second.forward = lambda *args: Annotated.forward(second, *args)
    for module in third.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    assert [s.name for s in find_sites(nn.ModuleList([first, second, third]))] == ["0", "2"]


def test_what_cannot_be_compared_is_proved_every_time():
    asked = []
    proof = once(lambda module: not asked.append(module))
    plain, held, hidden, lazy, looped = (nn.Sequential(nn.Dropout()) for _ in range(5))
    held.kept = torch.ones(2)  # a tensor that is no parameter
    hidden.kept = object()
    lazy.append(nn.LazyLinear(3))  # which has no shape yet
    looped.ring = [looped]
    for module, times in ((plain, 1), (held, 2), (hidden, 2), (lazy, 2), (looped, 2)):
        asked.clear()
        assert proof(module)
        assert proof(module)
        assert len(asked) == times


#: Layouts that run a module's code before they take it.
PROVING = ("annotated", "d2l", "diffusers", "head_list", "head_list_bare", "labml", "timm")


def fresh_(model, names):
    """Gives every attention a class of its own, of which nothing is known."""
    for name in names:
        module = model.get_submodule(name)
        module.__class__ = type(type(module).__name__, (type(module),), {})


class Scaled(Annotated):
    def forward(self, query, key, value, mask=None):
        return super().forward(query / self.h, key, value, mask)


#: A model of one family of each layout that proves code; the rest under the harshest alone.
OTHERS = {name for name in registry.names() if registry.get(name).families} - set(PROVING)
FAMILY_OF = {layout: registry.get(layout).families[0][0] for layout in PROVING}
FAMILY_OF["timm"] = "timm.Attention before 1.0.24"
HARSH = ("dispatch mode", "fake tensors", "inference mode")
CASES = [("annotated", name) for name in CIRCUMSTANCES]
CASES += [(layout, "dispatch mode") for layout in PROVING[1:]]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_proof_in_any_circumstance_is_the_proof(layout, name):
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
def test_what_is_refused_is_refused_in_any_circumstance(name):
    model = nn.ModuleList([Scaled(12, 4)])
    for ask in (CIRCUMSTANCES[name], lambda asked: asked()):
        with pytest.raises(UnsupportedModel):
            ask(lambda: find_sites(model))


@pytest.mark.parametrize("layout", sorted(OTHERS))
def test_other_layouts_are_found_in_any_circumstance(layout):
    model = registry.get(layout).tiny(0)[0]
    expected = find_sites(model)
    for name in HARSH:
        assert CIRCUMSTANCES[name](lambda: find_sites(model)) == expected, name


class FailsFirst(Annotated):
    errors: Iterator[BaseException] = iter(())

    def forward(self, query, key, value, mask=None):
        for error in type(self).errors:
            raise error
        return super().forward(query, key, value, mask)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ImportError("not there yet"), UnsupportedModel),
        (RecursionError(), UnsupportedModel),
    ],
    ids=lambda e: type(e).__name__ if isinstance(e, BaseException) else "",
)
def test_an_interrupted_proof_is_no_answer(error, seen):
    kind = type("FailsFirstAttention", (FailsFirst,), {"errors": iter([error])})
    model = nn.ModuleList([kind(12, 4)])
    with pytest.raises(seen):
        find_sites(model)
    assert [s.name for s in find_sites(model)] == ["0"]


def changed(x):
    return x


FACTOR = 1.0


class Helped(D2l):
    """Its code lies in methods, in functions and in numbers beside it."""

    def forward(self, queries, keys, values, valid_lens):
        return super().forward(changed(queries) * FACTOR * self.factor, keys, values, valid_lens)

    factor = 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setattr(Helped, "_split", lambda self, x: D2l._split(self, x) * 2),
        lambda m: m.setattr(D2l, "forward", lambda self, q, k, v, n: self.W_o(q)),
        lambda m: m.setattr(f"{__name__}.changed", lambda x: 2 * x),
        lambda m: m.setattr(f"{__name__}.FACTOR", 2.0),
        lambda m: m.setattr(Helped, "factor", 2.0),
    ],
    ids=["method", "inherited", "function", "number", "attribute"],
)
def test_code_that_changed_since_is_proved_anew(change, monkeypatch):
    module = Helped(12, 4)
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


def test_threads_that_prove_at_once_leave_the_settings_of_the_process():
    """The first to begin ends first, so that settings saved by each would end as the second found
    them."""
    before = torch.get_default_dtype(), warnings.filters[:]
    begun, joined = threading.Event(), threading.Event()

    def slow():
        begun.set()
        joined.wait(10)

    def quick():
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
