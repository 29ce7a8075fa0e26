"""Cuts on the GPU: gated equals pruned equals the CPU, for every model, precision and policy, and
in generation."""

from functools import cache

import pytest
import torch

import headprune as hp
from tests.gpu import tolerances
from tests.gpu.models import NAMES, gated_and_pruned, output, subject
from tests.gpu.modes import FP32, FP64, MODES, TF32, computing, usable
from tests.laws.support import ragged

CPU = torch.device("cpu")
N_NEW = 8


@cache
def cut_output(name, mask, policy="group"):
    """What the cut model puts out on the CPU in fp64."""
    of = subject(name)
    model = of.copy(CPU, FP64.dtype)
    hp.prune_(model, mask, sites=hp.find_sites(model, policy=policy))
    with computing(FP64, CPU):
        return output(model, of.data(CPU, FP64.dtype)[0])


def plans(of):
    first, last = of.sites[0], of.sites[-1]
    return {
        "uneven": of.ragged(1),
        "one unit a layer": of.mask({s.name: s.units[-1] for s in of.sites}),
        "first layer without heads": of.mask({first.name: []}),
        "last layer without heads": of.mask({last.name: [], first.name: first.units[0]}),
    }


def check(compare, device, of, mode, mask, what, policy="group"):
    """Gated equals pruned equals the CPU; returns the cut model."""
    found = subject(of)
    model, batch = found.copy(device, mode.dtype), found.data(device, mode.dtype)[0]
    with computing(mode, device):
        sites = hp.find_sites(model, policy=policy)
        gated, pruned = gated_and_pruned(model, mask, batch, sites)
    tolerance, wanted = tolerances.OUTPUTS[mode.name], cut_output(of, mask, policy)
    compare(f"gated and pruned {of}, {what}", pruned, gated, tolerance, mode.name)
    compare(f"pruned {of} on GPU and CPU, {what}", pruned, wanted, tolerance, mode.name)
    return model


@pytest.mark.parametrize(
    "plan", ["uneven", "one unit a layer", "first layer without heads", "last layer without heads"]
)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("of", NAMES)
def test_gated_is_pruned_is_the_cpus(compare, device, of, mode, plan):
    usable(mode, device)
    model = check(compare, device, of, mode, plans(subject(of))[plan], plan)
    for name, parameter in model.named_parameters():
        assert parameter.device == device, name
        assert parameter.dtype == mode.dtype, name


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("of", NAMES)
def test_the_proof_of_a_cut_holds(compare, device, of, mode):
    """``prune_`` with an example refuses no cut that is right, however PyTorch is set."""
    usable(mode, device)
    found = subject(of)
    model, batch = found.copy(device, mode.dtype), found.data(device, mode.dtype)[0]
    with computing(mode, device):
        report = hp.prune_(model, found.ragged(2), batch)
    proof = report.proof
    compare(f"proof of {of}", proof.max_difference, 0.0, proof.tolerance, mode.name)


@pytest.mark.parametrize("policy", ["group", "balanced", "free"])
@pytest.mark.parametrize("of", ["decoder", "own"])
def test_policies(compare, device, of, policy):
    found = subject(of)
    sites = hp.find_sites(found.model, policy=policy)
    scores = hp.score(found.copy(device), scorer="magnitude", sites=sites)
    plan = hp.select(scores, hp.Budget(keep_heads=0.5))
    check(compare, device, of, FP64, plan.mask, f"policy {policy}", policy)


@pytest.mark.parametrize("of", NAMES)
def test_a_cut_on_the_gpu_has_the_weights_of_a_cut_on_the_cpu(compare, device, of):
    found, mask = subject(of), subject(of).ragged(3)
    here, there = found.copy(device), found.copy(CPU)
    hp.prune_(here, mask)
    hp.prune_(there, mask)
    compare.same(f"weights of the cut {of}", here.state_dict(), there.state_dict(), "fp32")
    moved = found.copy(CPU)
    hp.prune_(moved, mask)
    moved.to(device)
    batch = found.data(device)[0]
    outputs = output(moved, batch), output(here, batch)
    compare.same(f"outputs of a cut {of} that moved", *outputs, "fp32")


@pytest.mark.parametrize("plan", ["uneven", "first layer without heads"])
@pytest.mark.parametrize("mode", [FP64, FP32, TF32], ids=lambda mode: mode.name)
@pytest.mark.parametrize("of", ["decoder", "encoder-decoder"])
def test_generation_with_the_cache(compare, device, of, mode, plan):
    """Greedy tokens of the gated and of the pruned model, and of the pruned one on the CPU."""
    usable(mode, device)
    found, mask = subject(of), plans(subject(of))[plan]
    model = found.copy(device, mode.dtype)
    with computing(mode, device):
        with hp.gated(model, mask):
            gated = generated(model, found, device)
        hp.prune_(model, mask)
        pruned = generated(model, found, device)
    compare.same(f"tokens of the gated and the pruned {of}, {plan}", gated, pruned, mode.name)
    if mode is not TF32:  # whose rounding may swap two tokens that are almost equal
        model = found.copy(CPU, mode.dtype)
        hp.prune_(model, mask)
        with computing(mode, CPU):
            wanted = generated(model, found, CPU)
        name = f"tokens of the pruned {of} on GPU and CPU, {plan}"
        compare.same(name, pruned, wanted, mode.name)


@torch.no_grad()
def generated(model, of, device):
    """``[examples, tokens]``: what greedy search adds to prompts that are padded on the left."""
    batch = of.data(device)[0]
    ids, mask = (batch[name].flip(1) for name in ("input_ids", "attention_mask"))
    tokens = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=N_NEW,
        min_new_tokens=N_NEW,
        do_sample=False,
        use_cache=True,
    )
    return tokens[:, -N_NEW:]


def test_a_wrong_cut_is_seen(compare, device):
    """Another head than the plan's leaves, and the checks above see it, in every precision."""
    found = subject("encoder")
    site = found.sites[1]
    right, wrong = found.mask({site.name: range(1, 8)}), found.mask({site.name: [0, *range(2, 8)]})
    for mode in MODES:
        if mode.tf32 and device.type == "cpu":
            continue
        model, batch = found.copy(device, mode.dtype), found.data(device, mode.dtype)[0]
        with computing(mode, device):
            with hp.gated(model, right):
                gated = output(model, batch)
            hp.prune_(model, wrong)
            pruned = output(model, batch)
        compare.differs("another head leaves", pruned, gated, tolerances.OUTPUTS, mode.name)


def test_tf32_is_really_on(compare, gpu):
    """What is compared as TF32 is TF32: it would not pass for fp32."""
    found = subject("decoder")
    mask = found.ragged(1)
    model, batch = found.copy(gpu), found.data(gpu)[0]
    hp.prune_(model, mask)
    with computing(TF32, gpu):
        pruned = output(model, batch)
    wanted, tolerance = cut_output("decoder", mask), tolerances.OUTPUTS["fp32"]
    compare.differs("TF32 taken for fp32", pruned, wanted, tolerance, "tf32")


def test_two_cuts_are_one(compare, device):
    found = subject("encoder")
    first = found.ragged(1)
    model, direct = found.copy(device), found.copy(device)
    hp.prune_(model, first)
    second = first & ragged(found.sites, 2)
    hp.prune_(model, second)
    hp.prune_(direct, second)
    weights = model.state_dict(), direct.state_dict()
    compare.same("weights after two cuts and after one", *weights, "fp32")
