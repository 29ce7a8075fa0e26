"""``attattr`` proves its maps within the rounding of what products are computed in, and refuses
wrong ones there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import headprune as hp
from headprune.attention import MultiHeadAttention
from headprune.core.errors import UnsupportedModel
from headprune.model.precision import product_eps
from headprune.scoring import Attattr
from tests.laws.support import family_subject

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Tf32(TorchDispatchMode):
    """Rounds the factors of fp32 products to 11 bits, as a GPU does under TF32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            args = (*args[:-2], *tree_map(rounded, args[-2:]))
        return func(*args, **(kwargs or {}))


def rounded(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@contextmanager
def computing(how: str) -> Iterator[None]:
    with ExitStack() as stack:
        if how == "tf32":
            torch.set_float32_matmul_precision("high")
            stack.enter_context(Tf32())
        if how == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        yield


NARROW = pytest.mark.parametrize("how", ["tf32", "autocast"])


def test_the_step_of_products() -> None:
    assert [product_eps(t, CPU) for t in (torch.float64, torch.float32, torch.bfloat16)] == [
        2**-52,
        2**-23,
        2**-7,
    ]
    with torch.autocast("cpu", torch.float16):
        assert [product_eps(t, CPU) for t in (torch.float64, torch.float32, torch.bfloat16)] == [
            2**-52,
            2**-10,
            2**-7,
        ]
        assert product_eps(torch.float32, CUDA) == 2**-23, "autocast is for one kind of device"
    for precision, step in (("high", 2**-10), ("highest", 2**-23)):
        torch.set_float32_matmul_precision(precision)
        assert product_eps(torch.float32, CUDA) == step
        assert product_eps(torch.float64, CUDA) == 2**-52
        assert product_eps(torch.bfloat16, CUDA) == 2**-7
    torch.backends.cuda.matmul.allow_tf32 = True
    assert product_eps(torch.float32, CUDA) == 2**-10


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="this PyTorch has the old switch",
)
def test_the_step_by_the_newer_switch() -> None:
    """PyTorch refuses to answer by its old switch once the new one says something else."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert [product_eps(torch.float32, device) for device in (CUDA, CPU)] == [2**-10, 2**-23]


@NARROW
@pytest.mark.parametrize("name", ["bert", "gpt2", "multi_head_attention"])
def test_maps_in_use_are_accepted(name: str, how: str) -> None:
    subject = family_subject(name, name)
    model = subject.model.float().requires_grad_(True)
    batch = {
        k: v.float() if v.is_floating_point() else v
        for k, v in subject.batch.items()
        if k != "labels"
    }

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(**batch)
        return (out if isinstance(out, Tensor) else out[0]).float().square().flatten(1).mean(1)

    wanted = hp.score(model, [batch], Attattr(steps=2), loss=loss, progress=False)
    with computing(how):
        found = hp.score(model, [batch], Attattr(steps=2), loss=loss, progress=False)
    a, b = (torch.tensor([v for row in s.values for v in row]) for s in (found, wanted))
    assert 0 < (a - b).abs().max() < 0.2 * b.abs().max()


class Beside(MultiHeadAttention):  # type: ignore[misc]
    """Returns weights that are computed beside the point."""

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(query, *args, **{**kwargs, "need_weights": True})
        return out, weights.clone() + 0 * query.sum()


class Another(MultiHeadAttention):  # type: ignore[misc]
    """Uses its weights a second time."""

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(query, *args, **{**kwargs, "need_weights": True})
        return out + weights.square().sum((1, 3))[..., None], weights


@NARROW
@pytest.mark.parametrize("kind", [Beside, Another])
def test_a_wrong_map_is_refused(kind: Any, how: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(8, 2)), torch.randn(3, 4, 8)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return (out[0] if isinstance(out, tuple) else out).float().square().mean((1, 2))

    with computing(how), pytest.raises(UnsupportedModel, match="gradient is not the gate's"):
        hp.score(model, [x], Attattr(steps=1), loss=loss, progress=False)
