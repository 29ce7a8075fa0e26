"""Law 1: no gate costs nothing; gates at 1 are bit-identical and carry their gradient; nothing
remains afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

import headprune as hp
from headprune.layouts import registry
from tests.laws.support import CLOSE, DEEP, EXACT, Subject, objective, picture, unchanged


def gates(
    subject: Subject, form: str, value: float = 1.0, batch: int = 3
) -> torch.Tensor | dict[str, torch.Tensor]:
    n_heads = subject.sites[0].n_query_heads
    if form == "table":
        return torch.full((len(subject.sites), n_heads), value, dtype=torch.float64)
    shape = {"heads": (n_heads,), "batch": (batch, n_heads), "tokens": (batch, 1, n_heads)}[form]
    return {site.name: torch.full(shape, value, dtype=torch.float64) for site in subject.sites}


def test_the_five_layouts_are_under_law() -> None:
    assert set(DEEP) <= set(registry.names())


def test_no_gate_changes_nothing_at_all(subject: Subject) -> None:
    before = picture(subject.model)
    expected = subject.run()
    with hp.gated(subject.model, {}) as model:
        assert model is subject.model
        assert picture(model) == before
        assert_close(subject.run(), expected, **EXACT)
    assert picture(subject.model) == before


@pytest.mark.parametrize("form", ["heads", "batch", "table"])
def test_gates_at_one_are_bit_identical(subject: Subject, form: str) -> None:
    expected = subject.run()
    with hp.gated(subject.model, gates(subject, form)):
        assert_close(subject.run(), expected, **EXACT)
    with hp.gated(subject.model, gates(subject, form, 0.5)):
        assert (
            subject.run() - expected
        ).abs().max() > 1e-4  # the same form at another value does something


@pytest.mark.parametrize("form", ["heads", "batch", "tokens", "table"])
def test_gradient_at_one_is_the_finite_difference(subject: Subject, form: str) -> None:
    given = gates(subject, form)
    leaves = [given] if isinstance(given, torch.Tensor) else list(given.values())
    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)  # gates need no other gradient to get theirs

    def value() -> torch.Tensor:
        with hp.gated(subject.model, given):
            return objective(subject.run())

    for leaf in leaves:
        leaf.requires_grad_()
    got = torch.autograd.grad(value(), leaves)
    step = 1e-5
    for leaf, gradient in zip(leaves, got, strict=True):
        expected = torch.zeros_like(leaf)
        with torch.no_grad():
            for index in range(leaf.numel()):
                entry = leaf.view(-1)[index]
                at_one = entry.item()
                entry.fill_(at_one + step)
                above = value()
                entry.fill_(at_one - step)
                below = value()
                entry.fill_(at_one)
                expected.view(-1)[index] = (above - below) / (2 * step)
        assert gradient.abs().max() > 1e-3
        # A central difference is itself wrong by step**2 times the third derivative.
        assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


def test_every_form_of_gradient_adds_up_to_the_others(subject: Subject) -> None:
    site = subject.sites[0]
    n_heads = site.n_query_heads
    per_head, per_example = (torch.ones(*lead, n_heads, dtype=torch.float64) for lead in ((), (3,)))
    table = torch.ones(len(subject.sites), n_heads, dtype=torch.float64)
    found = []
    for leaf, given in (
        (per_head, {site.name: per_head}),
        (per_example, {site.name: per_example}),
        (table, table),
    ):
        leaf.requires_grad_()
        with hp.gated(subject.model, given):
            found.append(torch.autograd.grad(objective(subject.run()), leaf)[0])
    assert_close(found[1].sum(0), found[0], **CLOSE)
    assert_close(found[2][0], found[0], **CLOSE)


def test_names_and_kinds_are_as_ever_inside(subject: Subject) -> None:
    keys = list(subject.model.state_dict())
    modules = [(n, type(m).__name__) for n, m in subject.model.named_modules()]
    parameters = [(n, id(p)) for n, p in subject.model.named_parameters()]
    kinds = {n: type(m) for n, m in subject.model.named_modules()}
    with hp.gated(subject.model, subject.ragged()) as model:
        assert list(model.state_dict()) == keys
        assert [(n, type(m).__name__) for n, m in model.named_modules()] == modules
        assert [(n, id(p)) for n, p in model.named_parameters()] == parameters
        assert all(isinstance(m, kinds[n]) for n, m in model.named_modules())
        assert hp.find_sites(model) == subject.sites


def test_nothing_remains(subject: Subject) -> None:
    expected = subject.run()
    with unchanged(subject.model), hp.gated(subject.model, subject.ragged()):
        assert (subject.run() - expected).abs().max() > 1e-4
    assert_close(subject.run(), expected, **EXACT)


def test_nothing_remains_after_an_exception_in_the_block(subject: Subject) -> None:
    model, ragged = subject.model, subject.ragged()
    with unchanged(model), pytest.raises(RuntimeError, match="mine"), hp.gated(model, ragged):
        raise RuntimeError("mine")


def test_nothing_remains_after_an_exception_in_the_model(subject: Subject) -> None:
    model, wrong = subject.model, gates(subject, "batch", batch=2)
    with unchanged(model), pytest.raises(hp.HeadPruneError, match="gates"), hp.gated(model, wrong):
        subject.run()


def test_nothing_remains_where_the_gates_are_refused(subject: Subject) -> None:
    good, bad = subject.sites[0], subject.sites[-1]
    given = {good.name: torch.ones(good.n_query_heads), bad.name: torch.ones(bad.n_query_heads + 1)}
    with unchanged(subject.model), pytest.raises(hp.HeadPruneError, match=r"gates\["):
        hp.gated(subject.model, given).__enter__()


def test_nested_gates_multiply(subject: Subject) -> None:
    before, site = picture(subject.model), subject.sites[0]
    a, b = (torch.rand(site.n_query_heads, dtype=torch.float64) for _ in range(2))
    with hp.gated(subject.model, {site.name: a * b}):
        expected = subject.run()
    with hp.gated(subject.model, {site.name: a}):
        with hp.gated(subject.model, {site.name: b}):
            assert_close(subject.run(), expected, **CLOSE)
        with hp.gated(subject.model, {site.name: a}):
            twice = subject.run()
    assert picture(subject.model) == before
    with hp.gated(subject.model, {site.name: a * a}):
        assert_close(twice, subject.run(), **CLOSE)


def test_one_tensor_may_gate_two_nested_blocks(subject: Subject) -> None:
    """The inner block takes only its own gate away, though the outer block's is the very same
    tensor."""
    before, site = picture(subject.model), subject.sites[0]
    a = torch.full((site.n_query_heads,), 0.5, dtype=torch.float64)
    with hp.gated(subject.model, {site.name: a}):
        once = subject.run()
        with hp.gated(subject.model, {site.name: a}):
            assert (subject.run() - once).abs().max() > 1e-4
        assert_close(subject.run(), once, **EXACT)
    assert picture(subject.model) == before


def test_blocks_may_be_left_in_any_order(subject: Subject) -> None:
    before, site = picture(subject.model), subject.sites[0]
    a, b = (torch.rand(site.n_query_heads, dtype=torch.float64) for _ in range(2))
    with hp.gated(subject.model, {site.name: b}):
        expected = subject.run()
    first, second = hp.gated(subject.model, {site.name: a}), hp.gated(subject.model, {site.name: b})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert_close(subject.run(), expected, **EXACT)
    second.__exit__(None, None, None)
    assert picture(subject.model) == before


@pytest.mark.parametrize("asks", [False, True])
def test_gates_take_effect_in_a_model_of_any_dtype_without_changing_it(
    subject: Subject, asks: bool
) -> None:
    model = copy.deepcopy(subject.model).to(torch.bfloat16)
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in subject.batch.items()}
    expected = subject.run(model, **batch)
    ones = {s.name: torch.ones(s.n_query_heads, requires_grad=asks) for s in subject.sites}
    with hp.gated(model, ones):
        got = subject.run(model, **batch)
    assert got.dtype == torch.bfloat16
    assert_close(got, expected, **EXACT)
