"""Gate distributions by themselves: what is drawn is what the formulas say, and every gradient is
exact."""

import pytest
import torch
from torch.testing import assert_close

from headprune.core.errors import InvalidValue
from headprune.gating import HardConcrete, SubsetTopk
from headprune.gating.stochastic import soft_subset, top_units

F64 = torch.float64


def ones(n):
    return torch.ones(n, dtype=F64)


def randn(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.66, "lower": -0.2, "upper": 1.05}])
def test_a_hard_concrete_gate_is_open_as_often_as_its_formula_says(settings):
    dist, n = HardConcrete(keep=0.5, **settings), 100_000
    generator = torch.Generator().manual_seed(0)
    for weight in (-2.5, 0.0, 1.5):
        weights = torch.full((n,), weight, dtype=F64)
        drawn = dist.sample(weights, dist.noise(n, generator), ones(n), 0)
        p = dist.p_open(weights[:1])[0]
        error = float((p * (1 - p) / n).sqrt())  # of a share of n
        assert_close((drawn > 0).double().mean(), p, rtol=0, atol=4 * error)
        assert bool((drawn == 0).any())
        assert bool((drawn == 1).any()) or weight < 0
        assert 0 <= drawn.min() <= drawn.max() <= 1


def test_a_hard_concrete_gate_is_the_papers_formula():
    u, w = torch.tensor([0.2, 0.5, 0.7], dtype=F64), torch.tensor([-0.4, 0.1, 0.3], dtype=F64)
    dist = HardConcrete(keep=0.5)
    s = torch.sigmoid((torch.log(u) - torch.log(1 - u) + w) / 0.33)
    assert_close(dist.sample(w, torch.log(u / (1 - u)), ones(3), 0), (s * 1.2 - 0.1).clamp(0, 1))
    assert_close(dist.gates(w, ones(3)), (torch.sigmoid(w) * 1.2 - 0.1).clamp(0, 1))


def test_the_price_is_of_every_head_that_is_expected_to_be_open_and_warms_up():
    sizes, w = torch.tensor([1.0, 4.0], dtype=F64), torch.tensor([0.3, -0.2], dtype=F64)
    dist = HardConcrete(price=0.1, warmup=4)
    expected = dist.p_open(w)[0] + 4 * dist.p_open(w)[1]
    assert_close(dist.expected_open(w, sizes), expected)
    for step, share in ((0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0)):
        assert_close(dist.penalty(w, None, sizes, step), share * 0.1 * expected)


@pytest.mark.parametrize("keep", [0.25, 2])
def test_the_lagrangian_descends_in_weights_and_ascends_in_its_multipliers(keep):
    dist = HardConcrete(keep=keep, warmup=10)
    w = randn(8).requires_grad_()
    multipliers = torch.tensor([0.7, 0.4], dtype=F64, requires_grad=True)
    closed = 1 - dist.p_open(w.detach()).mean()
    for step, target in ((0, 0.0), (5, 0.375), (20, 0.75)):
        over = closed - target
        penalty = dist.penalty(w, multipliers, ones(8), step)
        assert_close(penalty.detach(), 0.7 * over + 0.4 * over**2)
        by_w, by_multipliers = torch.autograd.grad(penalty, [w, multipliers])
        assert_close(by_multipliers, -torch.stack([over, over**2]))
        slope = torch.autograd.functional.jacobian(lambda x: 1 - dist.p_open(x).mean(), w.detach())
        assert_close(by_w, (0.7 + 0.8 * over) * slope)


def test_the_lagrangian_alone_reaches_its_target():
    dist = HardConcrete(keep=0.3)
    w = dist.initial(10).double().requires_grad_()
    multipliers = torch.zeros(2, dtype=F64, requires_grad=True)
    optimizer = torch.optim.Adam([w, multipliers], 0.05)
    for step in range(600):
        optimizer.zero_grad()
        dist.penalty(w, multipliers, ones(10), step).backward()
        optimizer.step()
    assert dist.expected_open(w, ones(10)).item() == pytest.approx(3, abs=0.3)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.003), (5, 5.0), (11, 1.0)])
def test_subset_gates_add_up_to_k(k, temperature):
    gates = soft_subset(3 * randn(12), k, temperature, ones(12))
    assert_close(gates.sum(), torch.tensor(float(k), dtype=F64), rtol=1e-9, atol=0)
    assert bool(((gates >= 0) & (gates <= 1)).all())
    narrow = soft_subset(randn(72).float(), 24, 0.1, torch.ones(72))
    assert_close(narrow.sum(), torch.tensor(24.0), rtol=1e-5, atol=0)
    sizes = torch.tensor([4.0, 1, 1, 2, 4], dtype=F64)
    whole = soft_subset(randn(5), 6, 0.5, sizes)
    assert_close((whole * sizes).sum(), torch.tensor(6.0, dtype=F64))


def test_the_top_is_exactly_k_also_of_ties_and_of_units_that_do_not_fit():
    w = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0, 1.0], dtype=F64)
    assert top_units(w, 3, ones(6)).tolist() == [1, 1, 1, 0, 0, 0]
    expected = torch.tensor([0.5, 1, 0.5, 0.5, 0, 0.5], dtype=F64)
    assert_close(soft_subset(w, 3, 1e-6, ones(6)), expected)
    w, sizes = torch.tensor([3.0, 2.0, 1.0], dtype=F64), torch.tensor([2.0, 4.0, 1.0], dtype=F64)
    assert top_units(w, 3, sizes).tolist() == [1, 0, 1]


@pytest.mark.parametrize("sizes", [[1.0] * 6, [2.0, 1, 1, 3, 1, 1]], ids=["heads", "groups"])
def test_gradients_go_through_the_threshold(sizes):
    w = randn(6).requires_grad_()
    n = torch.tensor(sizes, dtype=F64)
    assert torch.autograd.gradcheck(lambda x: soft_subset(x, 3, 0.7, n), [w])
    (total,) = torch.autograd.grad((soft_subset(w, 3, 0.7, n) * n).sum(), [w])
    assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-12)


def test_the_temperature_falls_geometrically_to_its_end():
    dist = SubsetTopk(keep=2, steps=10, start=1.0, end=0.01)
    found = [dist.temperature(step) for step in (0, 5, 10, 50)]
    assert found == pytest.approx([1.0, 0.1, 0.01, 0.01])
    w, noise = randn(6), dist.noise(6, torch.Generator().manual_seed(0))
    assert_close(dist.sample(w, noise, ones(6), 5), soft_subset(w + noise, 2, 0.1, ones(6)))


def test_gumbel_noise_makes_top_k_draw_without_replacement():
    """Gumbel-top-1 draws unit i with probability softmax(w)_i."""
    dist, w, n = SubsetTopk(keep=1, steps=1), torch.tensor([1.0, 0.0, -1.0], dtype=F64), 60_000
    noise = dist.noise(3 * n, torch.Generator().manual_seed(0)).view(n, 3)
    shares = torch.bincount((w + noise).argmax(1), minlength=3).double() / n
    assert_close(shares, w.softmax(0), rtol=0, atol=0.01)
    assert not SubsetTopk(keep=1, steps=1, gumbel=False).noise(3, torch.Generator()).any()


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [([1] * 6, 3), ([3] * 6, 9), ([1, 2, 2, 1, 1, 1], 4), ([2] * 6, 6), ([2] * 5, 4)],
)
def test_shares_are_rounded_down_to_whole_units(sizes, heads):
    n = torch.tensor(sizes, dtype=F64)
    gates = SubsetTopk(keep=0.5, steps=1).hard(torch.arange(len(sizes), dtype=F64), n)
    assert int((gates * n).sum()) == heads


WRONG = [
    (HardConcrete, {}, r"given keep \(a target\) or price"),
    (HardConcrete, {"keep": 0.5, "price": 1.0}, "one of them"),
    (HardConcrete, {"keep": 1.5}, "keep: must be a fraction"),
    (HardConcrete, {"price": -1.0}, "price: must be a number above 0"),
    (HardConcrete, {"keep": 0.5, "lower": 0.0}, "wider than"),
    (HardConcrete, {"keep": 0.5, "lower": -float("inf")}, "wider than"),
    (HardConcrete, {"keep": 0.5, "temperature": 0.0}, "temperature: must be a number above 0"),
    (HardConcrete, {"keep": 0.5, "warmup": -1}, "warmup"),
    (HardConcrete, {"keep": 0.5, "start": float("nan")}, "start: must be a number"),
    (SubsetTopk, {"keep": 2, "steps": 1, "start": 0.1, "end": 0.5}, "0 < end <= start"),
    (SubsetTopk, {"keep": 0, "steps": 1}, "keep: must be a fraction"),
    (SubsetTopk, {"keep": 2, "steps": 0}, "steps"),
]


def test_what_makes_no_sense_is_refused():
    for kind, settings, words in WRONG:
        with pytest.raises(InvalidValue, match=words):
            kind(**settings)
    counts = [
        (6, 1, "some of the 6 heads"),
        (3, 2, "a multiple of 2 heads"),
        (0.1, 1, "neither none nor"),
    ]
    for keep, size, words in counts:
        with pytest.raises(InvalidValue, match=words):
            SubsetTopk(keep=keep, steps=1).hard(ones(6), size * ones(6))


def test_units_are_kept_that_are_open_more_often_than_not():
    dist, w = HardConcrete(keep=0.35), torch.linspace(-2, 1, 31, dtype=F64)
    assert torch.equal(dist.hard(w, ones(31)) == 1, dist.p_open(w) > 0.5)
    (note,) = dist.notes(torch.full((10,), -9.0, dtype=F64), ones(10), 5000)
    assert note.startswith("0.0 of 10 heads open in expectation (asked: 3), 0 with")
