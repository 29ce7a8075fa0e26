"""Inside of a caller's ``torch.autocast``, which keeps narrow copies of weights, nothing computes
with old numbers."""

import copy

import pytest
import torch
from torch.testing import assert_close

import headprune as hp
from headprune.recovery._checkpoint import load_weights_, weights
from headprune.recovery.finetune import Finetune
from tests.laws.support import EXACT, mask_of, subject_of

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def steps(**more):
    return Finetune(epochs=2, learning_rate=1e-2, **more)


#: Method, arguments of the caller's autocast.
METHODS = {
    "lstsq": ("lstsq", {}),
    "finetune": (steps(), {}),
    "finetune in bf16, autocast off outside": (steps(precision="bf16"), {"enabled": False}),
    "adapters": (steps(lora_rank=2), {}),
}


class Boom(Exception):
    pass


def bert():
    subject = subject_of("bert")
    return subject.model.float().requires_grad_(True), subject.batch


def half(model):
    sites = hp.find_sites(model)
    return mask_of(sites, {s.name: s.heads[::2] for s in sites})


def logits(model, batch):
    return model(**batch).logits.detach().clone()


def recovered(method, options, kept):
    """Outputs before and after a recovery inside of autocast, and the weights; with narrow copies
    kept, or not."""
    model, batch = bert()
    teacher = copy.deepcopy(model) if isinstance(method, str) else None
    with torch.autocast(**{**BF16, **options}, cache_enabled=kept):
        model(**batch)
        hp.prune_(model, half(model), example=batch)
        before = logits(model, batch)
        hp.recover_(model, [batch], method, teacher)
        after = logits(model, batch)
        assert torch.is_autocast_cache_enabled() == kept
    assert (before - after).abs().max() > 1e-2
    return [before, after, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("name", METHODS)
def test_a_recovery_computes_with_the_weights_as_they_are(name):
    found, expected = (recovered(*METHODS[name], kept) for kept in (True, False))
    assert_close(found, expected, **EXACT)


def test_weights_that_are_put_back_are_used_again():
    model, batch = bert()

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Boom
        return model(**batch).logits.float().square().mean(1)

    with torch.autocast(**BF16):
        before, calls = logits(model, batch), 0
        with pytest.raises(Boom):
            hp.recover_(model, [batch], Finetune(epochs=3, learning_rate=1e-2), loss=loss)
        assert_close(logits(model, batch), before, **EXACT)


def test_a_checkpoint_that_is_loaded_is_computed_with():
    model, batch = bert()
    other = {k: 2 * x if x.is_floating_point() else x for k, x in weights(model).items()}
    with torch.autocast(**BF16):
        before = logits(model, batch)
        load_weights_(model, other)
        after = logits(model, batch)
        torch.clear_autocast_cache()
        assert_close(logits(model, batch), after, **EXACT)
    assert (before - after).abs().max() > 1e-2
