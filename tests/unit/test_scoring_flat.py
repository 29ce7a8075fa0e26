"""Losses that are flat where the model is: scorers of slopes refuse them, and all others rank more
than rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import headprune as hp
from headprune import scoring
from headprune.core.errors import InvalidValue
from headprune.scoring import Fisher, fisher_matrix, gate_gradients
from headprune.scoring._base import Scorer
from tests.processes_work import SCORERS

#: Scorers whose numbers come from slopes of the loss at the model as it is; `auto` has such
#: candidates.
BY_SLOPE = {"attribution_patching", "auto", "fisher", "ladder", "surgeon", "taylor", "taylor2"}
FLAT = r"the slopes of the loss in the gates .* larger than rounding, got .* leave_one_out"
Loss = Callable[[nn.Module, Tensor], Tensor]


def name_of(scorer: Any) -> str:
    return scoring.registry.resolve(scorer, Scorer, "scorer")[0]


SLOPES = [s for s in SCORERS if name_of(s) in BY_SLOPE]
#: Without ``resample``: its draws are seeded by the bytes of an example, others in another type.
OTHERS = [
    s
    for s in SCORERS
    if name_of(s) not in BY_SLOPE and getattr(s, "replacement", None) != "resample"
]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 4)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return self.head((x + self.second(x)).mean(1))


def divergence(found: Tensor, expected: Tensor) -> Tensor:
    """KL from the teacher."""
    expected = expected.log_softmax(-1)
    return (expected.exp() * (expected - found.log_softmax(-1))).sum(-1)


#: Of what the model puts out and its teacher, which is the same model.
FLAT_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "KL": divergence,
    "KL times 10": lambda a, b: 10 * divergence(a, b),
    # Large itself, the entropy of the outputs, and flat all the same.
    "soft labels": lambda a, b: functional.cross_entropy(a, b.softmax(-1), reduction="none"),
    "squared distance": lambda a, b: (a - b).square().mean(-1),
    "cosine": lambda a, b: 1 - functional.cosine_similarity(a, b, dim=-1),
}


def taught(of: Callable[[Tensor, Tensor], Tensor], teacher: nn.Module) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            expected = teacher(x)
        return of(model(x), expected)

    return loss


def built(dtype: torch.dtype) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """A model, its teacher with equal weights, and data."""
    torch.manual_seed(0)
    model = Classifier().to(dtype)
    return model, copy.deepcopy(model), [torch.randn(4, 5, 8).to(dtype) for _ in range(2)]


def values(model: nn.Module, batches: list[Tensor], scorer: Any, loss: Any, **more: Any) -> Tensor:
    return torch.tensor(hp.score(model, batches, scorer, loss=loss, progress=False, **more).values)


# ---------------------------------------------------------------- what is rounding


@pytest.mark.parametrize("flat", FLAT_LOSSES)
def test_flat_losses_are_refused_by_scorers_of_slopes(flat: str) -> None:
    for dtype in (torch.float32, torch.float64):
        model, teacher, batches = built(dtype)
        with pytest.raises(InvalidValue, match=FLAT):
            values(model, batches, "taylor", taught(FLAT_LOSSES[flat], teacher))


@pytest.mark.parametrize("scorer", SLOPES, ids=name_of)
def test_every_scorer_of_slopes_refuses_losses_that_no_gate_moves(scorer: Any) -> None:
    """Slopes that are rounding, and slopes that are exactly 0."""
    model, teacher, batches = built(torch.float32)
    for loss in (taught(divergence, teacher), lambda m, x: (m(x).sum(-1) + 1e6).clamp(max=1.0)):
        with pytest.raises(InvalidValue, match=FLAT):
            values(model, batches, scorer, loss)


@pytest.mark.parametrize("scorer", OTHERS, ids=name_of)
def test_no_other_scorer_ranks_the_rounding_of_a_flat_loss(scorer: Any) -> None:
    """What is rounding in fp32 is other rounding in fp64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        model, teacher, batches = built(dtype)
        found.append(values(model, batches, scorer, taught(divergence, teacher)))
    assert_close(*found, rtol=1e-2, atol=1e-3 * float(found[1].abs().max()))


def test_a_flat_loss_is_refused_wherever_slopes_are_read() -> None:
    model, teacher, batches = built(torch.float32)
    loss = taught(divergence, teacher)
    for find in (gate_gradients, fisher_matrix):
        with pytest.raises(InvalidValue, match=FLAT):
            find(model, batches, loss)
    with pytest.raises(InvalidValue, match=FLAT):
        values(model, batches, "taylor", loss, until=hp.Stable(k=2))
    for dtype in (torch.bfloat16, torch.float16):
        model, teacher, batches = built(dtype)
        with pytest.raises(InvalidValue, match=FLAT):
            values(model, batches, "taylor", taught(divergence, teacher))


# ---------------------------------------------------------------- what is small and no rounding


def fitted(model: nn.Module, x: Tensor) -> Tensor:
    """Cross-entropy of a model that is sure of its answers, which are right: between 1e-7 and
    1e-4."""
    logits = model(x)
    logits = logits + 14 * functional.one_hot(logits.argmax(-1), logits.shape[-1])
    return functional.cross_entropy(logits, logits.argmax(-1), reduction="none")


SMALL: list[Loss] = [
    fitted,
    lambda m, x: 1e-9 * m(x).square().mean(-1),
    lambda m, x: 1e-15 * m(x).logsumexp(-1),
    lambda m, x: 1e-6 * (m(x) * torch.randn(11).to(x)).mean(-1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_small_slopes_are_no_rounding(dtype: torch.dtype) -> None:
    model, _, batches = built(dtype)
    for loss in SMALL:
        assert float(values(model, batches, "taylor", loss).abs().max()) > 0
    if dtype == torch.float32:
        for scorer in SLOPES:
            assert float(values(model, batches, scorer, fitted).abs().max()) > 0
    if dtype == torch.float64:
        losses = torch.cat([fitted(model, x) for x in batches]).detach()
        assert 1e-8 < float(losses.min()) < float(losses.max()) < 1e-4


def test_a_model_near_its_teacher_is_scored_by_slopes() -> None:
    """Weights that were rounded are a difference to learn from."""
    model, teacher, batches = built(torch.float32)
    with torch.no_grad():
        model.get_parameter("first.W_o.weight").mul_(1.001)
    assert float(values(model, batches, Fisher(), taught(divergence, teacher)).max()) > 0


def test_a_loss_that_cannot_be_asked_again_is_not() -> None:
    """It is asked again only where its slopes are small, and what it raises then is not shown."""
    model, _, batches = built(torch.float32)
    answers = iter([1e-9] * 3)
    found = values(model, batches, "taylor", lambda m, x: next(answers) * m(x).mean(-1))
    assert float(found.max()) > 0
