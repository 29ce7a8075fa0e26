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

    NAMES = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.NAMES
        return func(*args, **(kwargs or {}))


class Encoder(nn.Module):
    """Without any look of its own, as Transformers' models have at their masks."""

    def __init__(self, n_kv_heads: int = 2) -> None:
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


def batches_of(n: int) -> list[Tensor]:
    return [torch.randn(3, 5, 16) for _ in range(n)]


@pytest.mark.parametrize(
    "scorer",
    ["taylor", hp.scoring.Taylor(reduce="token"), "fisher", "taylor2", "attribution_patching"],
    ids=str,
)
def test_first_order_scores_look_at_no_value_a_batch(scorer: Any) -> None:
    def looks(n_batches: int) -> int:
        model, batches = Encoder(), batches_of(n_batches)
        with Looks() as counting:
            hp.score(model, batches, scorer, loss=loss, progress=False)
        return counting.count

    # At batch 8 the CPU looks for coupled losses again.
    assert looks(7) == looks(2) > 0


def test_the_units_of_grouped_heads_are_put_on_the_device_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    plain = torch.tensor
    monkeypatch.setattr(
        "headprune.scoring._gradients.torch.tensor",
        lambda *a, **k: made.append(1) or plain(*a, **k),
    )
    # One a site, and the weights of losses that are looked at for coupling.
    for n_kv_heads, n_made in ((2, 3), (4, 1)):
        made.clear()
        gate_gradients(Encoder(n_kv_heads), batches_of(1) * 4, loss)
        assert len(made) == n_made


@pytest.mark.parametrize(("bad", "n_calls"), [(0, 1), (2, 5)])
def test_a_loss_that_is_not_finite_ends_the_pass_and_is_named(bad: int, n_calls: int) -> None:
    """At once in the first batch, else at the end of the pass."""
    calls: list[int] = []

    def breaks(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        wrong = torch.arange(3) == (1 if len(calls) == bad + 1 else -1)
        return torch.where(wrong, torch.nan, loss(model, x))

    with pytest.raises(InvalidValue, match=rf"the loss of batch {bad}, example 1: must be finite"):
        gate_gradients(Encoder(), batches_of(5), breaks)
    assert len(calls) == n_calls


def test_batches_are_numbered_through_however_often_one_looks() -> None:
    """With ``until=`` batches are read chunk by chunk."""
    batches = batches_of(8)

    def breaks(model: nn.Module, x: Tensor) -> Tensor:
        return loss(model, x) * (torch.nan if torch.equal(x, batches[6]) else 1)

    stable = hp.Stable(k=2, first=6, growth=1.5)
    with pytest.raises(InvalidValue, match=r"the loss of batch 6, example 0: must be finite"):
        hp.score(Encoder(), batches, "taylor", loss=breaks, until=stable, progress=False)


# ---------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("mixed", [False, True], ids=["bf16 weights", "autocast"])
def test_gate_gradients_of_a_bf16_pass_are_fp32(mixed: bool) -> None:
    subject = subject_of("bert")
    exact = gate_gradients(subject.copy(), [subject.batch])
    narrow = subject.copy().float() if mixed else subject.copy().bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        found = gate_gradients(narrow, [subject.batch])
    more_digits = found != found.bfloat16().double()
    assert float(more_digits.float().mean()) > 0.9, "more digits than bf16 has"
    assert not torch.equal(found, exact), "the pass must have been in bf16"
    assert_close(found, exact, rtol=0, atol=0.05 * float(exact.abs().max()))


def test_a_gate_of_one_that_asks_for_its_gradient_changes_no_bit() -> None:
    subject = subject_of("bert")
    model = subject.model.bfloat16()
    gates = {s.name: torch.ones(s.n_query_heads, requires_grad=True) for s in subject.sites}
    with hp.gated(model, gates):
        found = model(**subject.batch).logits
    assert torch.equal(found, model(**subject.batch).logits)
