"""Losses that are flat where the model is: scorers of slopes refuse them, and all others rank more
than rounding."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import headprune as hp
from headprune import scoring
from headprune.core.errors import InvalidValue
from headprune.scoring import fisher_matrix, gate_gradients
from headprune.scoring._base import Scorer
from tests.processes_work import SCORERS
from tests.scoring_help import Stack

#: Scorers whose numbers come from slopes of the loss at the model as it is; `auto` has such
#: candidates.
BY_SLOPE = {"attribution_patching", "auto", "fisher", "ladder", "surgeon", "taylor", "taylor2"}
FLAT = r"the gradient of the loss in the gates .* larger than rounding errors, got .* leave_one_out"
Loss = Callable[[nn.Module, Tensor], Tensor]


def name_of(scorer):
    return scoring.registry.resolve(scorer, Scorer, "scorer")[0]


SLOPES = [s for s in SCORERS if name_of(s) in BY_SLOPE]
#: Without ``resample``: its draws are seeded by the bytes of an example, others in another type.
OTHERS = [
    s
    for s in SCORERS
    if name_of(s) not in BY_SLOPE and getattr(s, "replacement", None) != "resample"
]


def divergence(found, expected):
    """KL from the teacher."""
    expected = expected.log_softmax(-1)
    return (expected.exp() * (expected - found.log_softmax(-1))).sum(-1)


#: Of what the model puts out and its teacher, which is the same model.
FLAT_LOSSES = {
    "KL": divergence,
    # Large itself, the entropy of the outputs, and flat all the same.
    "soft labels": lambda a, b: functional.cross_entropy(a, b.softmax(-1), reduction="none"),
    "squared distance": lambda a, b: (a - b).square().mean(-1),
}


def taught(of, teacher):
    def loss(model, x):
        with torch.no_grad():
            expected = teacher(x)
        return of(model(x), expected)

    return loss


def built(dtype):
    """A model, its teacher with equal weights, and data."""
    torch.manual_seed(0)
    model = Stack(8, 4, 11).to(dtype)
    return model, copy.deepcopy(model), [torch.randn(4, 5, 8).to(dtype) for _ in range(2)]


def values(model, batches, scorer, loss, **more):
    return torch.tensor(hp.score(model, batches, scorer, loss=loss, progress=False, **more).values)


@pytest.mark.parametrize("flat", FLAT_LOSSES)
def test_flat_losses_are_refused_by_scorers_of_slopes(flat):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        model, teacher, batches = built(dtype)
        with pytest.raises(InvalidValue, match=FLAT):
            values(model, batches, "taylor", taught(FLAT_LOSSES[flat], teacher))


@pytest.mark.parametrize("scorer", SLOPES, ids=name_of)
def test_every_scorer_of_slopes_refuses_losses_that_no_gate_moves(scorer):
    model, teacher, batches = built(torch.float32)
    for loss in (taught(divergence, teacher), lambda m, x: (m(x).sum(-1) + 1e6).clamp(max=1.0)):
        with pytest.raises(InvalidValue, match=FLAT):
            values(model, batches, scorer, loss)


@pytest.mark.parametrize("scorer", OTHERS, ids=name_of)
def test_no_other_scorer_ranks_the_rounding_of_a_flat_loss(scorer):
    """What is rounding in fp32 is other rounding in fp64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        model, teacher, batches = built(dtype)
        found.append(values(model, batches, scorer, taught(divergence, teacher)))
    assert_close(*found, rtol=1e-2, atol=1e-3 * float(found[1].abs().max()))


def test_a_flat_loss_is_refused_wherever_slopes_are_read():
    model, teacher, batches = built(torch.float32)
    loss = taught(divergence, teacher)
    for find in (gate_gradients, fisher_matrix):
        with pytest.raises(InvalidValue, match=FLAT):
            find(model, batches, loss)
    with pytest.raises(InvalidValue, match=FLAT):
        values(model, batches, "taylor", loss, until=hp.Stable(k=2))


def fitted(model, x):
    """Cross-entropy of a model that is sure of its answers, which are right: between 1e-7 and
    1e-4."""
    logits = model(x)
    logits = logits + 14 * functional.one_hot(logits.argmax(-1), logits.shape[-1])
    return functional.cross_entropy(logits, logits.argmax(-1), reduction="none")


SMALL = [
    fitted,
    lambda m, x: 1e-9 * m(x).square().mean(-1),
    lambda m, x: 1e-15 * m(x).logsumexp(-1),
    lambda m, x: 1e-6 * (m(x) * torch.randn(11).to(x)).mean(-1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_small_slopes_are_no_rounding(dtype):
    model, _, batches = built(dtype)
    for loss in SMALL:
        assert float(values(model, batches, "taylor", loss).abs().max()) > 0
    if dtype == torch.float32:
        for scorer in SLOPES:
            assert float(values(model, batches, scorer, fitted).abs().max()) > 0
    if dtype == torch.float64:
        losses = torch.cat([fitted(model, x) for x in batches]).detach()
        assert 1e-8 < float(losses.min()) < float(losses.max()) < 1e-4


def test_a_loss_that_cannot_be_asked_again_is_not():
    """It is asked again only where its slopes are small, and what it raises then is not shown."""
    model, _, batches = built(torch.float32)
    answers = iter([1e-9] * 3)
    found = values(model, batches, "taylor", lambda m, x: next(answers) * m(x).mean(-1))
    assert float(found.max()) > 0
