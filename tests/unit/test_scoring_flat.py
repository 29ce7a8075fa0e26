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
BY_SLOPE = {"attribution_patching", "auto", "fisher", "surgeon", "taylor", "taylor2"}
FLAT = (
    "the slopes of the loss in the gates of the heads: must be larger than rounding, got .*"
    " leave_one_out"
)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = hp.MultiHeadAttention(8, 4), hp.MultiHeadAttention(8, 4)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        logits: Tensor = self.head((x + self.second(x)).mean(1))
        return logits


Loss = Callable[[nn.Module, Tensor], Tensor]


def divergence(teacher: nn.Module, share: float = 1.0) -> Loss:
    """KL from the teacher, at a temperature."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            expected = (teacher(x) * share).log_softmax(-1)
        return (expected.exp() * (expected - (model(x) * share).log_softmax(-1))).sum(-1)

    return loss


def soft_labels(teacher: nn.Module) -> Loss:
    """Large itself, the entropy of the outputs, and flat all the same."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            expected = teacher(x).softmax(-1)
        return functional.cross_entropy(model(x), expected, reduction="none")

    return loss


def distance(teacher: nn.Module) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            expected = teacher(x)
        return (model(x) - expected).square().mean(-1)

    return loss


def angle(teacher: nn.Module) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            expected = teacher(x)
        return 1 - functional.cosine_similarity(model(x), expected, dim=-1)

    return loss


FLAT_LOSSES: dict[str, Callable[[nn.Module], Loss]] = {
    "KL": divergence,
    "KL at temperature 2": lambda teacher: divergence(teacher, 0.5),
    "KL times 10": lambda teacher: lambda m, x: 10 * divergence(teacher)(m, x),
    "soft labels": soft_labels,
    "squared distance": distance,
    "cosine": angle,
}


def built(dtype: torch.dtype) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """A model, its teacher with equal weights, and data."""
    torch.manual_seed(0)
    model = Classifier().to(dtype)
    return model, copy.deepcopy(model), [torch.randn(4, 5, 8).to(dtype) for _ in range(2)]


def name_of(scorer: Any) -> str:
    return scoring.registry.resolve(scorer, Scorer, "scorer")[0]


def values(model: nn.Module, batches: list[Tensor], scorer: Any, loss: Any) -> Tensor:
    return torch.tensor(hp.score(model, batches, scorer, loss=loss, progress=False).values)


#: What ``resample`` draws is seeded by the bytes of an example, which are others in another type.
SAME_DRAWS = [s for s in SCORERS if getattr(s, "replacement", None) != "resample"]


@pytest.mark.parametrize("flat", FLAT_LOSSES)
@pytest.mark.parametrize("scorer", SAME_DRAWS, ids=name_of)
def test_no_scorer_ranks_the_rounding_of_a_flat_loss(scorer: Any, flat: str) -> None:
    """What is rounding in fp32 is other rounding in fp64; what is no rounding is the same but for
    some."""
    found = []
    for dtype in (torch.float32, torch.float64):
        model, teacher, batches = built(dtype)
        if name_of(scorer) in BY_SLOPE:
            with pytest.raises(InvalidValue, match=FLAT):
                values(model, batches, scorer, FLAT_LOSSES[flat](teacher))
        else:
            found.append(values(model, batches, scorer, FLAT_LOSSES[flat](teacher)))
    if found:
        assert_close(*found, rtol=1e-2, atol=1e-3 * float(found[1].abs().max()))


@pytest.mark.parametrize("scorer", [s for s in SCORERS if name_of(s) in BY_SLOPE], ids=name_of)
def test_a_loss_that_no_gate_moves_is_refused(scorer: Any) -> None:
    """All slopes are exactly 0."""
    model, _, batches = built(torch.float32)
    with pytest.raises(InvalidValue, match=FLAT):
        values(model, batches, scorer, lambda m, x: (m(x).sum(-1) + 1e6).clamp(max=1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_are_refused_too(dtype: torch.dtype) -> None:
    model, teacher, batches = built(dtype)
    with pytest.raises(InvalidValue, match=FLAT):
        values(model, batches, "taylor", divergence(teacher))


def test_matrices_of_slopes_are_refused_too() -> None:
    model, teacher, batches = built(torch.float32)
    for find in (gate_gradients, fisher_matrix):
        with pytest.raises(InvalidValue, match=FLAT):
            find(model, batches, divergence(teacher))


def test_slopes_are_judged_where_reading_stops_early_and_where_there_is_little_room() -> None:
    model, teacher, batches = built(torch.float32)
    with pytest.raises(InvalidValue, match=FLAT):
        hp.score(
            model, batches, "taylor", loss=divergence(teacher), until=hp.Stable(k=2), progress=False
        )


# --- what is small and no rounding
# ------------------------------------------------------------------------------------


def fitted(model: nn.Module, x: Tensor) -> Tensor:
    """Cross-entropy of a model that is sure of its answers, which are right: between 1e-7 and
    1e-4."""
    logits = model(x)
    logits = logits + 14 * functional.one_hot(logits.argmax(-1), logits.shape[-1])
    return functional.cross_entropy(logits, logits.argmax(-1), reduction="none")


SMALL: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "fitted": fitted,
    "times 1e-9": lambda m, x: 1e-9 * m(x).square().mean(-1),
    "times 1e-15": lambda m, x: 1e-15 * m(x).logsumexp(-1),
    "random": lambda m, x: 1e-6 * (m(x) * torch.randn(11).to(x)).mean(-1),
}


@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scorer", [s for s in SCORERS if name_of(s) in BY_SLOPE], ids=name_of)
def test_small_slopes_are_no_rounding(scorer: Any, dtype: torch.dtype, small: str) -> None:
    model, _, batches = built(dtype)
    assert float(values(model, batches, scorer, SMALL[small]).abs().max()) > 0


def test_the_loss_of_the_fitted_model_is_small() -> None:
    model, _, batches = built(torch.float64)
    losses = torch.cat([fitted(model, x) for x in batches])
    assert 1e-8 < float(losses.detach().min()) < float(losses.detach().max()) < 1e-4


def test_a_model_near_its_teacher_is_scored_by_slopes() -> None:
    """A head that is gone, or weights that were rounded, are a difference to learn from."""
    model, teacher, batches = built(torch.float32)
    with torch.no_grad():
        model.get_parameter("first.W_o.weight").mul_(1.001)
    assert float(values(model, batches, Fisher(), divergence(teacher)).max()) > 0


def test_a_loss_that_cannot_be_asked_again_is_not() -> None:
    """It is asked again only where its slopes are small, and what it raises then is not shown."""
    model, _, batches = built(torch.float32)
    answers = iter([1e-9] * 3)
    assert (
        float(values(model, batches, "taylor", lambda m, x: next(answers) * m(x).mean(-1)).max())
        > 0
    )
