"""Inside of a caller's ``torch.autocast``, which keeps narrow copies of weights, nothing computes
with old numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import headprune as hp
from headprune.model.precision import weights_change
from headprune.recovery._checkpoint import load_weights_, weights
from headprune.recovery.finetune import Finetune
from tests.laws.support import EXACT, subject_of

BF16: dict[str, Any] = {"device_type": "cpu", "dtype": torch.bfloat16}


def steps(**more: Any) -> Finetune:
    return Finetune(epochs=3, learning_rate=1e-2, **more)


#: Method, arguments of the caller's autocast, and whether there is a teacher.
METHODS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "lstsq": ("lstsq", {}, True),
    "mean_fold": ("mean_fold", {}, True),
    "head_rescale": ("head_rescale", {}, True),
    "finetune": (steps(), {}, False),
    "finetune in bf16": (steps(precision="bf16"), {}, False),
    "finetune in bf16, autocast off outside": (steps(precision="bf16"), {"enabled": False}, False),
    "adapters": (steps(lora_rank=2), {}, False),
}


class Boom(Exception):
    pass


def bert() -> tuple[Any, dict[str, Any]]:
    subject = subject_of("bert")
    return subject.model.float().requires_grad_(True), subject.batch


def half(sites: hp.Sites) -> hp.HeadMask:
    return hp.HeadMask.from_keep(
        {s.name: s.heads[::2] for s in sites}, {s.name: s.n_query_heads for s in sites}
    )


def recovered(method: Any, teacher: bool, options: dict[str, Any], kept: bool) -> list[Tensor]:
    """Outputs before and after a recovery inside of autocast, and the weights; with narrow copies
    kept, or not."""
    model, batch = bert()
    more = {"teacher": copy.deepcopy(model)} if teacher else {}
    with torch.autocast(**{**BF16, **options}, cache_enabled=kept):
        model(**batch)
        hp.prune_(model, half(hp.find_sites(model)), example=batch)
        before = model(**batch).logits.detach().clone()
        hp.recover_(model, [batch], method, **more)
        after = model(**batch).logits.detach().clone()
        assert torch.is_autocast_cache_enabled() == kept
    assert (before - after).abs().max() > 1e-2
    return [before, after, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("name", METHODS)
def test_a_recovery_computes_with_the_weights_as_they_are(name: str) -> None:
    method, options, teacher = METHODS[name]
    for a, b in zip(
        *(recovered(method, teacher, options, kept) for kept in (True, False)), strict=True
    ):
        assert_close(a, b, **EXACT)


def test_weights_that_are_put_back_are_used_again() -> None:
    model, batch = bert()

    def loss(model: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Boom
        out: Tensor = model(**batch).logits.float().square().mean(1)
        return out

    with torch.autocast(**BF16):
        before, calls = model(**batch).logits.detach().clone(), 0
        with pytest.raises(Boom):
            hp.recover_(model, [batch], steps(), loss=loss)
        assert_close(model(**batch).logits.detach(), before, **EXACT)


def test_a_checkpoint_that_is_loaded_is_computed_with() -> None:
    model, batch = bert()
    other = {
        name: 2 * tensor if tensor.is_floating_point() else tensor
        for name, tensor in weights(model).items()
    }
    with torch.autocast(**BF16):
        before = model(**batch).logits.detach().clone()
        load_weights_(model, other)
        after = model(**batch).logits.detach().clone()
        torch.clear_autocast_cache()
        assert_close(model(**batch).logits.detach(), after, **EXACT)
    assert (before - after).abs().max() > 1e-2


def test_gates_and_cuts_inside_of_autocast() -> None:
    """Neither changes a weight in place: a cut makes new ones."""
    model, batch = bert()
    mask = half(hp.find_sites(model))
    with torch.autocast(**BF16):
        outputs = [model(**batch).logits.detach().clone()]
        for fresh in (False, True):
            if fresh:
                torch.clear_autocast_cache()
            with hp.gated(model, mask):
                outputs.append(model(**batch).logits.detach().clone())
        assert_close(outputs[1], outputs[2], **EXACT)
        assert (outputs[0] - outputs[1]).abs().max() > 1e-2
        hp.prune_(model, mask, example=batch)
        cut = model(**batch).logits.detach().clone()
        torch.clear_autocast_cache()
        assert_close(model(**batch).logits.detach(), cut, **EXACT)


def test_what_was_set_comes_back() -> None:
    with weights_change():
        assert torch.is_autocast_cache_enabled(), (
            "outside of autocast its blocks take their copies with them"
        )

    def fails() -> None:
        with weights_change():
            assert not torch.is_autocast_cache_enabled()
            raise Boom

    with torch.autocast(**BF16):
        with pytest.raises(Boom):
            fails()
        assert torch.is_autocast_cache_enabled()
