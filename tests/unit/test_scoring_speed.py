"""What keeps scoring fast on an accelerator, tested without one: how often it looks at values, and
its precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.scoring._gradients import gate_gradients
from tests.laws.support import subject_of


class Looks(TorchDispatchMode):
    """Counts what makes Python wait for a value: ``.item()``, ``bool()``, shapes that depend on
    values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in (
            "_local_scalar_dense",
            "nonzero",
            "equal",
            "is_nonzero",
        )
        return func(*args, **(kwargs or {}))


class Encoder(nn.Module):
    """Without any look of its own, as Transformers' models have at their masks."""

    def __init__(self, n_kv_heads: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(
            hp.MultiHeadAttention(16, 4, n_kv_heads=n_kv_heads) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for attention in self.attentions:
            x = x + attention(x)
        return x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean((1, 2))


def looks(scorer: Any, n_batches: int, n_kv_heads: int) -> int:
    batches = [torch.randn(3, 5, 16) for _ in range(n_batches)]
    model = Encoder(n_kv_heads)
    with Looks() as counting:
        hp.score(model, batches, scorer, loss=loss, progress=False)
    return counting.count


@pytest.mark.parametrize("n_kv_heads", [4, 2], ids=["single", "grouped"])
@pytest.mark.parametrize(
    "scorer",
    [
        "taylor",
        hp.scoring.Taylor(reduce="token"),
        "fisher",
        "taylor2",
        hp.scoring.AttributionPatching(base="zero"),
    ],
    ids=str,
)
def test_first_order_scores_look_at_no_value_a_batch(scorer: Any, n_kv_heads: int) -> None:
    few = looks(scorer, 2, n_kv_heads)
    assert looks(scorer, 7, n_kv_heads) == few  # at batch 8 the CPU looks for coupled losses again
    assert few > 0, "the counting must see what it is for"


def test_the_units_of_grouped_heads_are_put_on_the_device_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    plain = torch.tensor
    monkeypatch.setattr(
        "headprune.scoring._gradients.torch.tensor",
        lambda *a, **k: made.append(1) or plain(*a, **k),
    )
    gate_gradients(Encoder(2), [torch.randn(3, 5, 16)] * 4, loss)
    assert len(made) == 3  # one a site, and the weights of losses that are looked at for coupling
    made.clear()
    gate_gradients(Encoder(4), [torch.randn(3, 5, 16)] * 4, loss)
    assert len(made) == 1


def test_a_loss_that_is_not_finite_is_found_at_the_end_of_the_pass_and_named() -> None:
    calls: list[int] = []

    def breaks(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        found = loss(model, x)
        return torch.where(torch.arange(3) == 1, torch.nan, found) if len(calls) == 3 else found

    with pytest.raises(
        InvalidValue, match=r"the loss of batch 2, example 1: must be finite, got nan"
    ):
        gate_gradients(Encoder(4), [torch.randn(3, 5, 16)] * 5, breaks)
    assert len(calls) == 5


def test_batches_are_numbered_through_however_often_one_looks() -> None:
    """With ``until=`` batches are read chunk by chunk."""
    batches = [torch.randn(3, 5, 16) for _ in range(8)]

    def breaks(model: nn.Module, x: Tensor) -> Tensor:
        found = loss(model, x)
        return (
            torch.where(torch.arange(3) == 1, torch.nan, found)
            if torch.equal(x, batches[6])
            else found
        )

    stable = hp.Stable(k=2, first=6, growth=1.5)
    with pytest.raises(
        InvalidValue, match=r"the loss of batch 6, example 1: must be finite, got nan"
    ):
        hp.score(Encoder(4), batches, "taylor", loss=breaks, until=stable, progress=False)


def test_a_first_batch_that_is_not_finite_ends_the_pass() -> None:
    calls: list[int] = []

    def breaks(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return loss(model, x) * torch.inf

    with pytest.raises(
        InvalidValue, match=r"the loss of batch 0, example 0: must be finite, got inf"
    ):
        gate_gradients(Encoder(4), [torch.randn(3, 5, 16)] * 5, breaks)
    assert len(calls) == 1


# ------------------------------------------------------------------------------------------------
# mixed precision


@pytest.mark.parametrize("mixed", [False, True], ids=["bf16 weights", "autocast"])
def test_gate_gradients_of_a_bf16_pass_are_fp32(mixed: bool) -> None:
    subject = subject_of("bert")
    exact = gate_gradients(subject.copy(), [subject.batch])
    if mixed:
        with torch.autocast("cpu", torch.bfloat16):
            found = gate_gradients(subject.copy().float(), [subject.batch])
    else:
        found = gate_gradients(subject.copy().bfloat16(), [subject.batch])
    rounded = found.bfloat16().double()
    assert float((found != rounded).float().mean()) > 0.9, (
        "the gradients have no more digits than bf16 has"
    )
    assert not torch.equal(found, exact), (
        "the pass must have been in bf16, or the test shows nothing"
    )
    assert_close(found, exact, rtol=0, atol=0.05 * float(exact.abs().max()))


def test_a_gate_of_one_that_asks_for_its_gradient_changes_no_bit_of_a_bf16_model() -> None:
    model = subject_of("bert").copy().bfloat16()
    batch = subject_of("bert").batch
    gates = {s.name: torch.ones(s.n_query_heads, requires_grad=True) for s in hp.find_sites(model)}
    expected = model(**batch).logits
    with hp.gated(model, gates):
        found = model(**batch).logits
    assert_close(found, expected, rtol=0, atol=0)


def test_a_gate_that_asks_for_its_gradient_changes_nothing_where_none_is_taken() -> None:
    model, batch = subject_of("bert").copy().bfloat16(), subject_of("bert").batch
    found = []
    for asks in (False, True):
        gates = {
            s.name: torch.full((s.n_query_heads,), 0.3, requires_grad=asks)
            for s in hp.find_sites(model)
        }
        with hp.gated(model, gates), torch.no_grad():
            found.append(model(**batch).logits)
    assert_close(*found, rtol=0, atol=0)
