"""The matrix of the laws: every registered family, what can be told of it without building it, and
how it is run."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.layouts import registry
from headprune.model.double import Doubled
from headprune.model.running import call, outputs
from tests.laws.support import Subject, objective, set_implementation

#: (layout, family), everything that is registered.
FAMILIES = [
    (layout, family) for layout in registry.names() for family, _ in registry.get(layout).families
]

#: Families whose layers must keep a head; every other one may lose all.
KEEP_A_HEAD = {family for layout, family in FAMILIES if registry.get(layout).empty == "refuse"}

#: One family per layout of feed-forwards.
ONE_EACH = [
    ("albert", "albert"),
    ("bart", "bart"),
    ("bart", "gptj"),
    ("bart", "wav2vec2"),
    ("bert", "bert"),
    ("diffusers", "diffusers-style"),
    ("distilbert", "distilbert"),
    ("gpt2", "gpt2"),
    ("gpt_neox", "gpt_neox"),
    ("llama", "llama"),
    ("modernbert", "modernbert"),
    ("multi_head_attention", "multi_head_attention"),
    ("phi3", "phi3"),
    ("t5", "t5"),
    ("t5", "mt5"),
    ("torch_multi_head", "torch.nn.TransformerEncoder"),
    ("x_transformers", "x_transformers.Encoder"),
    ("x_transformers", "x_transformers.Decoder"),
]


def over(families: Iterable[tuple[str, str]] = FAMILIES) -> pytest.MarkDecorator:
    """Runs a test on every one of these families; its argument ``subject`` is the family's
    model."""
    pairs = list(families)
    names = [family for _, family in pairs]
    return pytest.mark.parametrize("subject", pairs, indirect=True, ids=names)


def builder(layout: str, family: str) -> Any:
    return dict(registry.get(layout).families)[family]


def model_class(layout: str, family: str) -> Any:
    """A family's class in Transformers, which is not built; None for other modules."""
    return getattr(transformers, getattr(builder(layout, family), "model", ""), None)


def batch_of(layout: str, family: str) -> dict[str, Any]:
    """A family's batch; of Transformers' models without the model."""
    build = builder(layout, family)
    made: dict[str, Any] = build.batch(torch) if hasattr(build, "batch") else build(0)[1]
    return made


def implementations(layout: str, family: str) -> list[str]:
    """The attention kernels that a family's class has; "own" is the code of a module from
    elsewhere."""
    kind = model_class(layout, family)
    if kind is None:
        return ["own"]
    return ["eager", "sdpa"] if kind._supports_sdpa else ["eager"]


def use(model: Any, implementation: str) -> None:
    """Switches the kernel, and proves that the switch took."""
    if implementation == "own":
        return
    if model._can_set_attn_implementation():
        set_implementation(model, implementation)
    else:  # one class with both, which asks the configuration in every call (Falcon), or with one
        model.config._attn_implementation = implementation


def run(model: nn.Module, batch: Any) -> list[Tensor]:
    """Every output of the model that is a number, in fp64 throughout."""
    with Doubled():
        return outputs(call(model, batch))


def assert_equal(got: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, equal_nan=True, **tolerance)


def far(got: list[Tensor], expected: list[Tensor]) -> bool:
    return (
        max(
            float((a - b).detach().abs().max())
            for a, b in zip(got, expected, strict=True)
            if a.numel()
        )
        > 1e-6
    )


def gradients(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The gradient of every trainable parameter, by name; zeros where there is none."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with Doubled():
        out = outputs(call(model, batch))
        aim = objective(out[-1] if out[0].ndim == 0 else out[0])
        if not aim.requires_grad:  # all that is trained, adapters, has been cut
            return {n: torch.zeros_like(p) for n, p in named.items()}
        found = torch.autograd.grad(aim, list(named.values()), allow_unused=True)
    return {
        n: torch.zeros_like(named[n]) if g is None else g for n, g in zip(named, found, strict=True)
    }


def slices(
    model: nn.Module, full: dict[str, Tensor], mask: hp.HeadMask, sites: Any
) -> dict[str, Tensor]:
    """What is left of the gated model's gradients after a cut: they take the weights' place, and
    are cut like them."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(full.get(name, torch.zeros_like(parameter)))
    hp.prune_(twin, mask, sites=sites)
    return {n: p.detach() for n, p in twin.named_parameters() if p.requires_grad}


def assert_same_gradients(
    subject: Subject,
    small: nn.Module,
    full: dict[str, Tensor],
    mask: hp.HeadMask,
    sites: Any = None,
) -> None:
    """The gradients of a cut model are slices of the gated model's, ``full``.

    Rounding is of the largest gradient: keys' biases have none but what softmax leaves of it in
    rounding.
    """
    expected, got = slices(subject.model, full, mask, sites), gradients(small, subject.batch)
    assert list(got) == list(expected)
    scale = max(1.0, *(float(g.abs().max()) for g in expected.values() if g.numel()))
    for name, gradient in got.items():
        assert_close(
            gradient,
            expected[name],
            rtol=1e-10,
            atol=1e-11 * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def two_plans(subject: Subject) -> tuple[hp.HeadMask, hp.HeadMask]:
    """The first unit of every other site, then the last of every site; each plan takes what the
    other leaves."""
    first = subject.without({s.name: s.units[0] for s in subject.sites[::2]})
    second = subject.without({s.name: s.units[-1] for s in subject.sites})
    assert (first & second).n_kept < min(first.n_kept, second.n_kept)
    assert all(len(s.units) > 2 for s in subject.sites) or subject.family not in KEEP_A_HEAD
    return first, second
