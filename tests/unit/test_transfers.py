"""What happens on an accelerator alone, on a pretended one: where copies are kept, checks that are
read late, and other ways to compute. tests/unit/test_pretended_cuda.py counts the copies."""

import pytest
import torch
from torch.testing import assert_close

from headprune.model.cut import Undo
from headprune.model.transfers import copies
from headprune.recovery._distillation import _variance
from headprune.scoring._checks import DeferredChecks
from headprune.scoring._inverse import inverted
from tests.pretended_cuda import CPU, CUDA, PretendedCuda


@pytest.mark.parametrize(("free", "where"), [(5 * 40, CUDA), (5 * 40 - 1, CPU)])
def test_copies_stay_on_the_gpu_where_it_has_room(free, where, monkeypatch):
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


def test_what_is_refused_later_is_the_first_that_failed():
    checks = DeferredChecks()
    checks.run()

    def error(what):
        return lambda place: ValueError(f"{what} at {place}")

    checks.refuse("a", torch.tensor([False, False]), error("a"))
    checks.refuse("b", torch.tensor([[False, False], [True, True]]), error("b"))
    checks.refuse("b", torch.tensor([True]), error("b again"))
    with pytest.raises(ValueError, match=r"^b at 2$"):
        checks.run()
    checks.run()  # what was read is gone


def test_what_a_gpu_computes_another_way_is_the_same():
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
