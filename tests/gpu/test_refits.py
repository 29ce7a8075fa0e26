"""Refits on the GPU are those of the CPU: weights and outputs, in fp64 and fp32; TF32 costs them
its rounding alone."""

import copy
from functools import cache

import pytest
import torch

import headprune as hp
from headprune.recovery import registry
from tests.gpu import tolerances
from tests.gpu.models import subject
from tests.gpu.modes import FP64, TF32, WIDE, computing
from tests.laws.support import logits

CPU = torch.device("cpu")
R = hp.recovery
METHODS = [
    R.Lstsq(ridge=0.3),
    R.Lstsq(ridge=0.3, feed_forward=True),
    R.Lstsq(ridge=0.3, prior="zero", intercept=False),
    R.Lstsq(ridge=0.3, precision="float32"),
    R.Lstsq(ridge=0.3, max_bytes=0),
    R.MeanFold(),
    R.HeadRescale(),
    R.HeadRescale(precision="float32"),
]
#: All of them on the first two; on the others those that take another way there.
MODELS = ("encoder", "decoder", "encoder-decoder", "own")
CASES = [
    (of, method)
    for of in MODELS
    for method in METHODS
    if of in MODELS[:2] or method in METHODS[1::4]
]
# With ridges by held-out error, on the model whose few rows a refit helps.
CASES.append(("encoder", R.Lstsq()))


def refitted(of, method, mode, device, n_batches=None):
    """What a refit changes, what the model then puts out, and the share of the error that is left
    over."""
    found = subject(of)
    teacher = found.copy(device, mode.dtype)
    batches = found.data(device, mode.dtype)[:n_batches]
    model = copy.deepcopy(teacher)
    hp.prune_(model, found.ragged(1))
    with computing(mode, device):
        report = hp.recover_(model, batches, method, teacher)
        with torch.no_grad():
            output = logits(model, batches[0])
    changed = {name: model.state_dict()[name].clone() for name in report.changed}
    assert changed
    assert all(tensor.device == device for tensor in changed.values())
    return changed, output, float(report.metrics["error_after"])


@cache
def truth(of, method):
    return refitted(of, method, FP64, CPU)


@pytest.mark.parametrize("mode", WIDE, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("of", "method"), CASES, ids=repr)
def test_a_refit(compare, device, of, method, mode):
    if mode.tf32 and device.type == "cpu":
        pytest.skip("a CPU has no TF32")
    if mode is FP64 and device.type == "cpu":
        pytest.skip("the CPU in fp64 is what is compared with")
    weights, output, left = refitted(of, method, mode, device)
    wanted, wanted_output, wanted_left = truth(of, method)
    assert list(weights) == list(wanted)
    # Sums in float32 are not those of fp64, whatever the weights are.
    name = "fp32" if mode is FP64 and getattr(method, "precision", "") == "float32" else mode.name
    what, close = f"{method!r} of the {of}", tolerances.REFITS[name]
    compare(f"weights of {what}", weights, wanted, close, mode.name)
    outputs = close if mode is FP64 and name == "fp64" else tolerances.OUTPUTS[name]
    compare(f"outputs of {what}", output, wanted_output, outputs, mode.name)
    if mode is TF32:
        compare(f"error left by {what}", left, wanted_left, tolerances.RUINED, mode.name)


def test_all_that_do_not_train_are_here():
    names = {name for name in registry.names() if not registry.get(name).trains}
    assert {type(m).__name__ for m in METHODS} == {registry.get(name).__name__ for name in names}


def test_a_refit_of_other_data_is_seen(compare, device):
    """The negative control: a refit over half of the data has other weights."""
    weights, *_ = refitted("encoder", R.Lstsq(), FP64, device, n_batches=1)
    wanted, *_ = truth("encoder", R.Lstsq())
    compare.differs("a refit over half of the data", weights, wanted, tolerances.REFITS["tf32"])
