"""Copies between main memory and an accelerator, on a pretended one: how many there are, and where
copies are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from headprune.model.cut import Undo
from headprune.model.fingerprint import fingerprint, sampled_bytes
from headprune.model.transfers import copies, in_main_memory
from headprune.recovery._distillation import _variance
from headprune.scoring._activations import by_block
from headprune.scoring._checks import DeferredChecks
from headprune.scoring._inverse import inverted
from tests.pretended_cuda import CPU, CUDA, PretendedCuda


def test_tensors_of_a_device_and_type_come_in_one_copy() -> None:
    floats = [torch.arange(6.0).view(2, 3), torch.ones(())]
    expected = [*floats, torch.tensor([7]), torch.zeros(0, 2), torch.arange(4)]
    with PretendedCuda() as gpu:
        given = [x if number == 1 else x.to("cuda") for number, x in enumerate(expected)]
        gpu.forget()
        found = in_main_memory(given)
        assert len(gpu.waits) == 2, gpu.report()  # floats and whole numbers
        assert all(x.device == CPU for x in found)
        assert found[1] is given[1]
    assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("free", "where"), [(5 * 40, CUDA), (5 * 40 - 1, CPU)])
def test_copies_stay_on_the_gpu_where_it_has_room(
    free: int, where: torch.device, monkeypatch: Any
) -> None:
    with PretendedCuda():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - 30, 10**9))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
        there, here = torch.ones(10, device="cuda"), torch.ones(10**6)
        first, second = copies([there, here])
        assert (first.device, second.device) == (where, CPU)
        undo = Undo()
        undo.keep(there)
        there.zero_()
        undo.restore()
        assert bool((there == 1).all())
        assert there.device == CUDA


def test_a_fingerprint_is_the_same_on_a_gpu_and_takes_one_copy() -> None:
    model = nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40), nn.Linear(40, 3).bfloat16())
    model.append(nn.Linear(2, 2).double())
    expected = fingerprint(model, ())
    with PretendedCuda() as gpu:
        model.to("cuda")
        gpu.forget()
        assert fingerprint(model, ()) == expected
        assert len(gpu.waits) == 1, gpu.report()
        assert gpu.uploads == gpu.mismatches == []
    given = [torch.zeros(0), torch.zeros(3, device="meta"), torch.ones(1)]
    assert sampled_bytes(given) == [b"", b"", b"\0\0\x80?"]


def test_blocks_of_examples_are_those_of_their_numbers() -> None:
    for examples in (range(3), range(5, 12), range(7, 8)):
        numbers = torch.arange(examples.start, examples.stop)
        found = {block: numbers[some].tolist() for block, some in by_block(examples, 3)}
        expected = {int(b): numbers[numbers % 3 == b].tolist() for b in (numbers % 3).unique()}
        assert found == expected


def test_what_is_refused_later_is_the_first_that_failed() -> None:
    checks = DeferredChecks()
    checks.run()

    def error(what: str) -> Any:
        return lambda place: ValueError(f"{what} at {place}")

    checks.refuse("a", torch.tensor([False, False]), error("a"))
    checks.refuse("b", torch.tensor([[False, False], [True, True]]), error("b"))
    checks.refuse("b", torch.tensor([True]), error("b again"))
    with pytest.raises(ValueError, match=r"^b at 2$"):
        checks.run()
    checks.run()  # what was read is gone


def test_what_a_gpu_computes_another_way_is_the_same() -> None:
    x, mask = torch.randn(3, 4, 5) + 7, torch.rand(3, 4) > 0.4
    a = torch.randn(6, 9, dtype=torch.float64)
    a = a @ a.T
    variance, (inverse, failed) = _variance(x, mask), inverted(a)
    assert_close(inverse, torch.linalg.inv(a))
    assert not bool(failed)
    assert bool(inverted(-a)[1])
    with PretendedCuda() as gpu:
        there = [_variance(x.to("cuda"), mask.to("cuda")), *inverted(a.to("cuda"))]
        assert gpu.waits == [], gpu.report()
    assert_close(there, [variance, inverse, failed])
