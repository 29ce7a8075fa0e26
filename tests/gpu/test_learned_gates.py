"""Learned gates on the GPU: steps run, nothing lies on two devices, draws and gradients are the
CPU's."""

import pytest
import torch

import headprune as hp
from headprune.gating import HardConcrete, SubsetTopk
from headprune.model.losses import default_loss
from tests.gpu import tolerances
from tests.gpu.models import subject
from tests.gpu.modes import AUTOCAST, FP32, FP64, computing
from tests.laws.support import no_dropout

CPU = torch.device("cpu")
DISTRIBUTIONS = [HardConcrete(keep=0.5, warmup=2), SubsetTopk(keep=0.5, steps=3)]


def trained(of, distribution, mode, device):
    """Slopes of the gates' weights in the first step, and the weights after four."""
    found = subject(of)
    model = no_dropout(found.copy(device, mode.dtype)).eval()
    batches = found.data(device, mode.dtype)
    model.training = True  # gates are drawn, and dropout that is a function stays out
    slopes = []
    with computing(mode, device), hp.learned_gates(model, distribution, seed=3) as gates:
        # The slope at a step of length 1 is compared, because Adam's step has one length whatever
        # the slope is.
        optimizer = torch.optim.SGD(gates.parameters(), lr=1.0)
        for batch in batches * 2:
            loss = default_loss(model, batch).mean() + gates.penalty()
            optimizer.zero_grad()
            loss.backward()
            slopes.append(gates.weights.grad.detach().clone())
            optimizer.step()
        weights = gates.weights.detach().clone()
        assert gates.scores().n_examples == sum(len(batch["input_ids"]) for batch in batches * 2)
    assert {p.device.type for p in model.parameters()} == {device.type}
    return slopes[0], weights


@pytest.mark.parametrize("mode", [FP64, FP32, AUTOCAST], ids=lambda mode: mode.name)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
@pytest.mark.parametrize("of", ["encoder", "decoder"])
def test_gates_are_trained(compare, device, of, distribution, mode):
    slopes, weights = trained(of, distribution, mode, device)
    first, last = trained(of, distribution, FP64, CPU)
    name = f"{distribution.name} of the {of}"
    # Gates reach the model as fp32 at most where their weights are fp32.
    close = tolerances.SCORES["fp32" if mode is FP64 else mode.name]
    compare(f"slopes of {name}", slopes, first, close, mode.name)
    close = tolerances.TRAINED_SCORES["fp32" if mode is FP64 else mode.name]
    compare(f"weights of {name}", weights, last, close, mode.name)
    start, close = torch.full_like(weights, float(weights[0])), tolerances.TRAINED_SCORES["fp32"]
    compare.differs(f"weights of {name} move", weights, start, close, mode.name)


def test_evaluation_is_hard(compare, device):
    found = subject("encoder")
    model, batch = found.copy(device), found.data(device)[0]
    with hp.learned_gates(model, SubsetTopk(keep=0.5, steps=3)) as gates, torch.no_grad():
        gates.weights.copy_(
            torch.randn(gates.weights.shape, generator=torch.Generator().manual_seed(0))
        )
        learned = model(**batch).logits
        names = [s.name for s in found.sites]
        table = dict(zip(names, gates.by_site(gates.evaluated()), strict=True))
    with hp.gated(model, table), torch.no_grad():
        gated = model(**batch).logits
    compare("learned gates in evaluation and gated", learned, gated, tolerances.EXACT, "fp32")
