"""Scores on the GPU are the CPU's in fp64, in every precision that a scorer takes.

Draws: ``random``, ``shapley`` (orders) and the learned scorers draw from generators on the CPU, by
their seed; ``ggn`` and ``surgeon`` of token distributions and ``resample`` draw by what examples
contain. So all of them must be the same on both devices; nothing here is compared statistically. A
label that is drawn lies at a step of a cumulated distribution, which rounding may cross: with
narrow numbers drawn labels differ, so drawing scorers are compared in fp64 and fp32.
"""

from functools import cache

import pytest
import torch

import headprune as hp
from headprune.scoring import registry
from tests.gpu import tolerances
from tests.gpu.models import NAMES, placed, subject
from tests.gpu.modes import FP16, FP32, FP64, MODES, TF32, WIDE, computing
from tests.gpu.record import disagreement
from tests.reference import scores as reference
from tests.scoring_help import flat, flat_errors

CPU = torch.device("cpu")
S = hp.scoring

#: Settings that keep a check short; all other scorers run as they are.
SHORT = {
    "attattr": S.Attattr(steps=4),
    "attribution_patching": S.AttributionPatching(base="mean"),
    "hard_concrete": S.HardConcrete(steps=10, block=4),
    "integrated_gradients": S.IntegratedGradients(points=4),
    "shapley": S.Shapley(orders=1),
    "subset_topk": S.SubsetTopk(steps=10, block=4),
}
#: Other settings that take other ways through the code.
OTHERS = [
    S.Taylor(reduce="token"),
    S.Taylor(reduce="batch", block=2, normalize="l2"),
    S.LeaveOneOut(replacement="mean"),
    S.LeaveOneOut(replacement="resample", pool=3),
    S.LeaveOneOut(replay=False),
    S.Surgeon(curvature="loss", blocks=2),
    S.Ggn(draws=2),
    S.Fisher(block=3),
    S.ActivationNorm(of="output"),
]
#: What every model is scored by: gradients, ablations, activations, drawn labels, maps.
SOME = ("taylor", "leave_one_out", "obs", "ggn", "surgeon", "fluctuation", "entropy", "attattr")
TRAINED = ("hard_concrete", "subset_topk")
#: Those with many passes.
SLOW = (*TRAINED, "attattr", "integrated_gradients", "shapley", "surgeon")
#: PyTorch's own encoder shows no attention maps.
NO_MAPS = {("torch", "entropy"), ("torch", "attattr")}


def scored(of, scorer, mode, device):
    model, batches = of.copy(device, mode.dtype), of.data(device, mode.dtype)
    with computing(mode, device):
        return flat(hp.score(model, batches, scorer, loss=of.loss, progress=False))


@cache
def truth(name, scorer):
    """Scores on the CPU in fp64."""
    return scored(subject(name), scorer, FP64, CPU)


def rehearsable(known, mode):
    """Skips what says nothing, or takes long, where a CPU stands in for the GPU."""
    if mode.tf32:
        pytest.skip("a CPU has no TF32")
    if mode is FP64:
        pytest.skip("the CPU in fp64 is what is compared with")
    if mode is FP16 and known in SLOW:
        pytest.skip("float16 takes ten times as long on a CPU")


def check(compare, of, scorer, mode, device, known):
    if device.type == "cpu":
        rehearsable(known, mode)
    wanted = truth(of, scorer)
    found = scored(subject(of), scorer, mode, device)
    table = tolerances.TRAINED_SCORES if known in TRAINED else tolerances.SCORES
    compare(f"scores of the {of} by {known}", found, wanted, table[mode.name], mode.name)
    if mode not in WIDE:
        apart = disagreement(found, wanted)
        compare(f"ranks of the {of} by {known}", apart, 0.0, tolerances.RANKS, mode.name)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", registry.names())
def test_every_scorer(compare, device, name, mode):
    check(compare, "encoder", SHORT.get(name, name), mode, device, name)


@pytest.mark.parametrize("mode", [FP64, FP32], ids=lambda mode: mode.name)
@pytest.mark.parametrize("scorer", OTHERS, ids=repr)
def test_other_settings(compare, device, scorer, mode):
    check(compare, "encoder", scorer, mode, device, repr(scorer))


@pytest.mark.parametrize("mode", WIDE, ids=lambda mode: mode.name)
@pytest.mark.parametrize("scorer", SOME)
@pytest.mark.parametrize("of", [name for name in NAMES if name != "encoder"])
def test_every_model(compare, device, of, scorer, mode):
    if (of, scorer) in NO_MAPS:
        pytest.skip("no attention maps are to be had")
    draws = scorer in ("ggn", "surgeon") and of in ("decoder", "encoder-decoder")
    if draws and mode is TF32:
        pytest.skip("labels are drawn by distributions that TF32 moves")
    check(compare, of, SHORT.get(scorer, scorer), mode, device, scorer)


@pytest.mark.parametrize("policy", ["balanced", "free"])
def test_policies(compare, device, policy):
    of, found = subject("decoder"), []
    for where in (device, CPU):
        model, batches = of.copy(where, FP64.dtype), of.data(where, FP64.dtype)
        sites = hp.find_sites(model, policy=policy)
        with computing(FP64, where):
            found.append(flat(hp.score(model, batches, "taylor", sites=sites, progress=False)))
    compare(f"scores under policy {policy}", *found, tolerances.SCORES, "fp64")


def test_batches_may_lie_on_either_device(compare, device):
    of = subject("encoder")
    model = of.copy(device)
    found = [
        flat(hp.score(model, of.data(where), "taylor", progress=False)) for where in (device, CPU)
    ]
    # Not the same bits: the backward pass of fused attention may add up in any order.
    compare("scores with batches on the GPU and on the CPU", *found, tolerances.SCORES, "fp32")


def test_standard_errors_samples_and_curvature(compare, device):
    of, found = subject("encoder"), []
    for where in (device, CPU):
        with computing(FP64, where):
            scores = hp.score(of.copy(where, FP64.dtype), of.data(where), "fisher", progress=False)
        matrices = (torch.tensor(x.matrix) for x in (scores.samples, scores.curvature))
        found.append([flat_errors(scores), *matrices])
    compare("standard errors, samples and curvature", *found, tolerances.SCORES, "fp64")


def test_a_head_that_is_scaled_is_seen(compare, device):
    """Another model must not pass: one head's output weights are 1 % larger."""
    of = subject("encoder")
    model, site = of.copy(device, FP32.dtype), of.sites[1]
    with torch.no_grad():
        reference.projection(model, site).weight[:, reference.columns(site, 2)] *= 1.01
    with computing(FP32, device):
        found = flat(hp.score(model, of.data(device), "taylor", progress=False))
    wanted = truth("encoder", "taylor")
    compare.differs("a head scaled by 1.01", found, wanted, tolerances.SCORES, "fp32")


def test_tf32_is_really_on(compare, gpu):
    """What is compared as TF32 is TF32: it would not pass for fp32."""
    found = scored(subject("decoder"), "taylor", TF32, gpu)
    wanted, tolerance = truth("decoder", "taylor"), tolerances.SCORES["fp32"]
    compare.differs("TF32 taken for fp32", found, wanted, tolerance, "tf32")


def test_generated_batches_keep_their_device(compare, device):
    """Until the lowest heads are settled, batches are read one by one."""
    of, found = subject("encoder"), []
    for where in (device, CPU):
        model = of.copy(where, FP64.dtype)
        batches = (placed(batch, "cpu", FP64.dtype) for batch in of.batches * 3)
        with computing(FP64, where):
            scores = hp.score(model, batches, "taylor", until=hp.Stable(k=8), progress=False)
        found.append(flat(scores))
    compare("scores until they are stable", *found, tolerances.SCORES, "fp64")
