"""Training on the GPU: the loss falls as on the CPU, and the same training twice, or stopped, gives
the same bits."""

import copy
import os

import pytest
import torch
from torch import nn

import headprune as hp
from benchmarks.determinism import VARIABLE, deterministic
from headprune.model.losses import default_loss
from tests.gpu import tolerances
from tests.gpu.models import subject
from tests.gpu.modes import AUTOCAST, FP32, FP64, computing
from tests.gpu.record import same_bits

pytest.importorskip("accelerate", reason="Transformers' Trainer needs accelerate")

CPU = torch.device("cpu")
N_STEPS = 6


def finetune(**settings):
    return hp.recovery.Finetune(
        **{"steps": N_STEPS, "learning_rate": 1e-3, "schedule": "constant", **settings}
    )


def parts(of, mode, device):
    """A cut model without dropout, so that devices can be compared, its teacher, and batches."""
    found = subject(of)
    teacher = found.copy(device, mode.dtype)
    for module in teacher.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = copy.deepcopy(teacher)
    hp.prune_(model, found.ragged(1))
    return model, teacher, found.data(device, mode.dtype)


@torch.no_grad()
def loss_of(model, batches, mode, device):
    with computing(mode, device):
        return float(torch.cat([default_loss(model, batch) for batch in batches]).double().mean())


@pytest.mark.parametrize("of", ["encoder", "decoder"])
@pytest.mark.parametrize("mode", [FP64, FP32], ids=lambda mode: mode.name)
def test_the_loss_falls_as_on_the_cpu(compare, device, of, mode):
    losses = []
    for where in (device, CPU):
        model, teacher, batches = parts(of, mode, where)
        before = loss_of(model, batches, mode, where)
        with computing(mode, where):
            hp.recover_(model, batches, finetune(distill=0.5, distill_hidden=0.1), teacher)
        after = loss_of(model, batches, mode, where)
        compare.holds(f"the loss of the {of} falls on {where.type}", after < before, mode.name)
        losses.append(after)
    compare(f"the loss of the {of} after {N_STEPS} steps", *losses, tolerances.TRAINING, mode.name)


def test_mixed_precision(compare, device):
    model, _, batches = parts("encoder", FP32, device)
    before = loss_of(model, batches, FP32, device)
    wide = copy.deepcopy(model)
    hp.recover_(model, batches, finetune(precision="bf16"))
    hp.recover_(wide, batches, finetune())
    after = loss_of(model, batches, FP32, device)
    compare.holds("the loss falls in bf16", after < before, "autocast")
    wanted = loss_of(wide, batches, FP32, device)
    fell = after / before, wanted / before
    compare("the loss after training in bf16", *fell, tolerances.TRAINING, AUTOCAST.name)


def trained(device, folder=None, stop=None, **settings):
    """The weights after a training with dropout; with ``stop``, one that was interrupted in this
    step and goes on."""
    found = subject("encoder")
    teacher, batches = found.copy(device), found.data(device)
    chosen = finetune(distill=0.5, **settings)

    def once(loss):
        model = copy.deepcopy(teacher)
        hp.prune_(model, found.ragged(1))
        hp.recover_(model, batches, chosen, teacher, loss=loss, folder=folder)
        return model

    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            once(Interrupted(stop))
        assert any(folder.iterdir())
    return {name: tensor.clone() for name, tensor in once(default_loss).state_dict().items()}


class Interrupted:
    """The default loss, which the user interrupts in one of its calls."""

    def __init__(self, stop):
        self.left = stop

    def __call__(self, model, batch):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return default_loss(model, batch)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_deterministic_training(compare, device, tmp_path, precision):
    """A study goes on on the next machine from a checkpoint: that must be the training that was
    never stopped."""
    mode = "autocast" if precision else "fp32"
    with deterministic():
        first, again = (trained(device, precision=precision) for _ in range(2))
        resumed = trained(device, tmp_path, stop=4, precision=precision, checkpoint_every=2)
        other = trained(device, precision=precision, seed=1)
    compare.same("deterministic training", first, again, mode)
    compare.same("deterministic training, stopped and continued", first, resumed, mode)
    compare.differs("another seed trains otherwise", other, first, tolerances.EXACT, mode)


def test_training_without_these_settings(compare, device):
    """Not promised to be the same twice; whether it is, is written down."""
    same = same_bits(trained(device), trained(device))
    compare.note("trained twice without deterministic settings", same_bits=same)


def test_cublas_knows_its_workspace(compare, device):
    compare.note("workspace of cuBLAS", **{VARIABLE: os.environ.get(VARIABLE)})
    with deterministic():
        assert os.environ[VARIABLE] in (":4096:8", ":16:8")
