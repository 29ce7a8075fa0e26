"""Law 4 for state dicts, over every family and policy: weights of one cut that go into another of
the same shapes give the model that they were stored of, or an error that names both sets of heads;
fp64."""

from __future__ import annotations

import copy
import random
from itertools import combinations, permutations

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.attention.kept_heads import KEPT_HEADS, weights_of
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite, Policy
from headprune.core.layout import STATE_ATTRIBUTE
from headprune.layouts import registry
from tests.laws.families import FAMILIES, assert_equal, run
from tests.laws.support import EXACT, Subject

REFUSED = (
    r"the heads of .* in the state dict: must be those of the module, \[.*\] of \d+, got \[.*\]"
    r" of \d+"
)
#: Cuts a family and policy; every two of the same shapes are tried both ways.
_CUTS = 3


def kept_sets(site: AttentionSite, n_units: int, seed: int) -> list[tuple[int, ...]]:
    """Some sets of so many units of a site, each as its heads."""
    found = [
        tuple(sorted(h for unit in units for h in unit))
        for units in combinations(site.units, n_units)
    ]
    random.Random(seed).shuffle(found)
    return [heads for heads in found if lawful(site, heads)][:_CUTS]


def lawful(site: AttentionSite, heads: tuple[int, ...]) -> bool:
    """Whether the site's policy allows it."""
    try:
        site.check(heads)
    except InvalidValue:
        return False
    return True


def cuts_of(subject: Subject, policy: Policy, n_units: int) -> list[nn.Module]:
    """Models that keep as many units at every site, others in each."""
    sites = hp.find_sites(subject.model, layouts=[subject.layout], policy=policy)
    made = []
    for number in range(_CUTS):
        keep = {}
        for place, site in enumerate(sites):
            found = kept_sets(site, min(n_units, len(site.units)), place)
            keep[site.name] = found[number % len(found)] if found else ()
        if not all(keep.values()):
            return []
        made.append(copy.deepcopy(subject.model))
        hp.prune_(made[-1], hp.HeadMask.from_keep(keep, subject.n_heads), sites=sites)
    return made


def heads_of(model: nn.Module) -> list[tuple[int, ...]]:
    return [
        getattr(m, STATE_ATTRIBUTE).heads for m in model.modules() if hasattr(m, STATE_ATTRIBUTE)
    ]


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights_of(model).items()}


CASES = [
    pytest.param(pair, policy, id=f"{pair[1]}-{policy}")
    for pair in FAMILIES
    for policy in registry.get(pair[0]).policies
]


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "policy"), CASES, indirect=["subject"])
def test_law_4_a_state_dict_gives_the_model_it_is_of_or_an_error(
    subject: Subject, policy: Policy
) -> None:
    tried = 0
    for n_units in (3, 2, 1):
        if tried and n_units == 1:
            break
        models = cuts_of(subject, policy, n_units)
        outputs = [run(model, subject.batch) for model in models]
        for a, b in permutations(range(len(models)), 2):
            state = models[a].state_dict()
            if heads_of(models[a]) == heads_of(models[b]) or shapes_of(models[a]) != shapes_of(
                models[b]
            ):
                continue
            tried += 1
            target = copy.deepcopy(models[b])
            for strict in (True, False):
                with pytest.raises(InvalidValue, match=REFUSED):
                    target.load_state_dict(state, strict=strict)
            # As safetensors stores it, without metadata.
            target = copy.deepcopy(models[b])
            if KEPT_HEADS in " ".join(state):
                with pytest.raises(InvalidValue, match=REFUSED):
                    target.load_state_dict(dict(state))
            else:
                target.load_state_dict(dict(state))
                assert_equal(run(target, subject.batch), outputs[a], **EXACT)
    assert tried
