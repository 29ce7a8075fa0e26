"""Fingerprints and plans do not depend on the device."""

import warnings

import pytest
import torch

import headprune as hp
from headprune.model.fingerprint import fingerprint, weights_digest
from headprune.model.running import digest_of
from tests.gpu.models import NAMES, subject
from tests.gpu.modes import BF16, FP32, FP64

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", [FP64, FP32, BF16], ids=lambda mode: mode.name)
@pytest.mark.parametrize("of", NAMES)
def test_the_same_on_both_devices(compare, device, of, mode):
    found = subject(of)
    here, there = found.copy(device, mode.dtype), found.copy(CPU, mode.dtype)
    marks = [fingerprint(model, hp.find_sites(model)) for model in (here, there)]
    compare.holds(f"fingerprints of the {of}", marks[0] == marks[1], mode.name)
    compare.holds(f"digests of the {of}", weights_digest(here) == weights_digest(there), mode.name)
    digests = {digest_of(found.data(where, mode.dtype)[0]) for where in (device, CPU)}
    compare.holds(f"digests of the data of the {of}", len(digests) == 1, mode.name)
    with torch.no_grad():
        next(here.parameters()).view(-1)[0] += 1
    changed = fingerprint(here, found.sites) != marks[1]
    compare.holds(f"another weight of the {of} is seen", changed, mode.name)


@pytest.mark.parametrize("of", NAMES)
def test_a_plan_from_one_device_fits_the_other(compare, device, of):
    """Without the warning that the weights are others."""
    found, cut = subject(of), []
    for scored_on, cut_on in ((CPU, device), (device, CPU)):
        model = found.copy(scored_on)
        scores = hp.score(model, found.data(scored_on), "magnitude", progress=False)
        plan = hp.select(scores, hp.Budget(keep_heads=0.5))
        other = found.copy(cut_on)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hp.prune_(other, plan)
        cut.append(other.state_dict())
    compare.same(f"plans of the {of}", *cut, "fp32")
