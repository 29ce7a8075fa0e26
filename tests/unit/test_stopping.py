"""Sequential stopping: the set is that of all data, no more batches are read than needed, and what
is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core import samples as samples_module
from headprune.core.errors import InvalidValue
from headprune.model.losses import default_loss
from headprune.model.sites import bind
from headprune.scoring import Attattr, IntegratedGradients, Shapley, Taylor, _stopping, registry
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.scoring._rows import PairedMoments
from headprune.scoring._stopping import Stable, lowest, read_until
from headprune.scoring._stopping import settled as settled_by
from tests.laws.support import as_double, subject_of
from tests.scoring_help import flat, flat_errors

UNITS = 8


@dataclass(frozen=True)
class Columns(Scorer):
    """The numbers of an example are the example itself: a scorer without a model."""

    def estimate(self, problem: ScoringProblem) -> Estimate:
        samples = torch.cat([batch[:, :UNITS] for _, batch in problem.passes("columns")])
        return Estimate(samples.mean(0), None, len(samples), None, samples)


class Stream:
    def __init__(self, data: Tensor, size: int = 10) -> None:
        self.batches, self.read = data.split(size), 0

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            self.read += 1
            yield batch


def problem_of(batches: Any) -> ScoringProblem:
    model = nn.Sequential(hp.MultiHeadAttention(2 * UNITS, UNITS))
    return ScoringProblem(model, bind(model), batches, default_loss, progress=False)


def stopped(data: Tensor, until: Stable, size: int = 10, scorer: Any = None) -> Estimate:
    return read_until(problem_of(data.split(size)), [("own", scorer or Columns())], until)[0]


def settled(data: Tensor, k: int, error: float, rare: float = 0.02) -> bool:
    seen = PairedMoments()
    seen.add(data)
    return settled_by(seen, k, error, rare)


def random_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(seed: int, n: int, heavy: bool) -> Tensor:
    """Units whose examples are hard together; ``heavy``: skewed, and the larger the noisier, as
    gradients are."""
    generator = random_of(seed)
    levels = 2 * torch.rand(UNITS, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, UNITS + 1, generator=generator, dtype=torch.float64)
    noise = noise[:, :UNITS] + noise[:, UNITS:]
    return (levels + 0.5) * (0.7 * noise).exp() if heavy else levels + noise


def members(values: Tensor, k: int) -> set[int]:
    return set(lowest(values, k).tolist())


@pytest.mark.parametrize("heavy", [False, True])
def test_at_least_95_percent_of_the_streams_that_stop_are_right(heavy):
    stops = wrong = hasty = 0
    for seed in range(60):
        data = draw(seed, 2000, heavy)
        found, true = stopped(data, Stable(k=3)), members(data.mean(0), 3)
        is_wrong = members(found.values, 3) != true
        stops += found.n_examples < len(data)
        wrong += is_wrong
        assert not is_wrong or found.n_examples < len(data)
        hasty += members(data[:200].mean(0), 3) != true
    assert stops >= 24, "hardly a stream stops early"
    assert wrong <= 0.05 * stops
    assert hasty >= 6, "the first look is nearly always right"


def rare_event(generator: torch.Generator, n: int) -> Tensor:
    rare = (torch.rand(n, generator=generator) < 0.02).double()
    noise = 1e-3 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return noise + torch.stack([torch.full_like(rare, 0.01), rare], 1)


def far_tail(generator: torch.Generator, n: int) -> Tensor:
    noise = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return torch.stack([1.2 * (2.5 * noise[:, 0] - 3.125).exp(), 1 + 0.1 * noise[:, 1]], 1)


@pytest.mark.parametrize("stream", [rare_event, far_tail])
def test_what_has_not_been_seen_settles_nothing(stream):
    """A small variance of what was read promises nothing: 64 equal differences may miss an event of
    2 %."""
    wrong = misled = 0
    for seed in range(60):
        data = stream(random_of(seed), 2000)
        true, found = members(data.mean(0), 1), stopped(data, Stable(k=1), size=50)
        wrong += members(found.values, 1) != true
        difference = data[:64, 1] - data[:64, 0]
        studentised = difference.mean() / difference.std() * 8
        misled += bool(studentised.abs() > 3) and {int(studentised < 0)} != true
    assert misled >= 6, "plain studentised means are right"
    assert wrong <= 3


def test_looks_are_paid_for():
    until = Stable(k=2, confidence=0.9)
    spent = sum(until.error(look) for look in range(1, 2000))
    assert 0.1 * 0.999 < spent < 0.1


def test_a_look_is_worth_nothing_before_a_rare_event_would_show():
    """Where 2 % are to be seen, (1 - 0.02)^n must be below the error."""
    for rare, first in ((0.02, 184), (0.01, 368), (0.5, 8)):
        data = torch.arange(UNITS).double() + 1e-6 * torch.randn(400, UNITS, dtype=torch.float64)
        limit = next(n for n in range(1, 1000) if (1 - rare) ** n <= 0.025)
        assert limit == pytest.approx(first, abs=3)
        assert not settled(data[: limit - 1], 3, 0.025, rare)
        assert settled(data[: max(limit, 60)], 3, 0.025, rare)


def test_moments_are_those_of_all_rows():
    data = torch.randn(50, 3, dtype=torch.float64) + 100
    seen = PairedMoments()
    for part in data.split([7, 1, 22, 20]):
        seen.add(part)
    assert seen.count == 50
    assert_close(seen.mean, data.mean(0))
    assert_close(seen.covariance, data.T.cov(correction=0))
    assert_close(seen.widest, (data[:, :, None] - data[:, None]).amax(0))


def test_no_more_batches_are_read_than_were_needed():
    data = draw(0, 2000, False) + 10 * torch.arange(UNITS)
    stream = Stream(data)
    problem = problem_of(stream)
    (found,) = read_until(problem, [("columns", Columns())], Stable(k=3))
    assert (stream.read, found.n_examples) == (20, 200)
    assert found.notes == (
        "the set of the 3 lowest is settled at confidence 0.95 after 200 examples (test 1)",
    )
    again = problem_of(data[:200].split(10))
    assert_close(found.values, Columns().estimate(again).values)
    assert_close(found.samples, data[:200])
    assert problem.data == again.data
    assert_close(found.standard_errors, data[:200].std(0) / 200**0.5)


@pytest.mark.parametrize("n", [1, 201])
def test_a_last_part_of_one_example_says_nothing_about_all(n):
    found = stopped(torch.randn(n, UNITS, dtype=torch.float64), Stable(k=3, confidence=1 - 1e-12))
    assert found.n_examples == n
    assert (found.standard_errors is None) == (n == 1)
    assert len(found.notes) == (2 if n == 1 else 1)


def test_ties_across_the_border_read_everything_and_give_the_set_of_all_data():
    data = torch.rand(300, 1, dtype=torch.float64).expand(-1, UNITS).clone()
    found = stopped(data, Stable(k=4))
    assert found.n_examples == 300
    assert "all 300 examples were read and the set" in found.notes[0]
    assert_close(found.values, data.mean(0))


def test_what_settles_settles_without_room(monkeypatch):
    data = draw(3, 2000, True)
    expected = stopped(data, Stable(k=3))
    assert 200 < expected.n_examples < 2000, "several looks"
    monkeypatch.setattr(samples_module, "LIMIT", 8 * UNITS * 10)
    found = stopped(data, Stable(k=3))
    assert (found.n_examples, found.notes) == (expected.n_examples, expected.notes)
    assert len(found.samples) <= 20
    assert_close(found.values, expected.values)
    with pytest.raises(InvalidValue, match=r"batch 0: must be of at most 10 examples, .* got 11"):
        stopped(data, Stable(k=3), size=11)


def batches_of(n: int) -> list[Any]:
    layout = subject_of("bert").layout
    return [as_double(layout.tiny(seed)[1]) for seed in range(n)]


def score(scorer: Any, data: Any, until: Any = None, model: Any = None) -> Any:
    model = model or subject_of("bert").model
    return hp.score(model, data, scorer, until=until, progress=False)


def same(found: Any, expected: Any) -> None:
    assert (found.n_examples, found.data) == (expected.n_examples, expected.data)
    assert_close(flat(found), flat(expected), rtol=1e-8, atol=1e-10)
    assert_close(flat_errors(found), flat_errors(expected), rtol=1e-8, atol=1e-10)


@pytest.fixture
def clear_cut() -> Any:
    model = subject_of("bert").model
    with torch.no_grad():
        for layer in model.bert.encoder.layer[:2]:
            weight = layer.attention.output.dense.weight
            weight[:, : weight.shape[1] // 2] *= 1e-3
    return model


def test_a_real_model_stops_with_the_set_of_all_data(clear_cut):
    data, until = batches_of(80), hp.Stable(k=4)
    full = score("taylor", data, model=clear_cut)
    short = score("taylor", data, until, clear_cut)
    assert short.n_examples < full.n_examples == 240

    def low(scores: Any) -> list[tuple[int, int]]:
        return sorted((u.site, u.unit) for u in scores.ranked()[:4])

    assert low(short) == low(full) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert f"after {short.n_examples} examples" in str(short)
    again = score("taylor", data[: short.n_examples // 3], model=clear_cut)
    generated = score("taylor", iter(data), until, clear_cut)
    assert again.samples == short.samples
    for other in (again, generated):
        assert (other.values, other.data) == (short.values, short.data)
    taylor, fisher = score(["taylor", "fisher"], data, until, clear_cut)
    assert taylor.n_examples == fisher.n_examples < 240
    assert taylor.data == fisher.data


#: With as few passes as they can do with.
FEW = {"attattr": Attattr(steps=2), "integrated_gradients": IntegratedGradients(points=2)}


@pytest.mark.parametrize("name", list(registry))
def test_every_scorer_gives_what_it_gives_at_once_or_is_refused(name):
    """Put together from the parts between looks, scores are those of one pass over the same
    batches."""
    model, data = subject_of("bert").model, batches_of(6)
    model.set_attn_implementation("eager")
    until = hp.Stable(k=4, confidence=1 - 1e-12, first=5)  # never settled: several looks, all data
    try:
        found = score(FEW.get(name, name), data, until, model)
    except InvalidValue as error:
        assert error.where == "score(until=)"  # noqa: PT017
        assert name not in ("taylor", "fisher", "taylor2", "ggn", "leave_one_out")
        return
    same(found, score(FEW.get(name, name), data, model=model))


@dataclass(frozen=True)
class Blind(Columns):
    def estimate(self, problem: ScoringProblem) -> Estimate:
        return replace(super().estimate(problem), samples=None)


class Together(Columns):
    @property
    def by_example(self) -> bool:
        return False


def test_scorers_that_are_no_mean_over_examples_are_refused():
    for scorer, words in (
        (["taylor", "random"], "it uses no data"),
        (Taylor(reduce="batch", block=4), "its score is no mean of one number per example"),
        (Taylor(normalize="l2"), "its"),
        (Shapley(orders=2), "its error has other parts than the choice of examples"),
    ):
        with pytest.raises(InvalidValue, match=rf"score\(until=\): .* scorers .*'.*': {words}"):
            score(scorer, batches_of(4), hp.Stable(k=4, first=6))


def test_own_scorers_without_a_number_an_example_are_refused():
    depends = "its number for an example depends on the other examples"
    for scorer, words in ((Blind(), "it has no per-example numbers"), (Together(), depends)):
        with pytest.raises(InvalidValue, match=f"'own': {words}"):
            stopped(draw(3, 100, False), Stable(k=3), scorer=scorer)
    with pytest.raises(InvalidValue, match="at least one batch, got an empty iterable"):
        read_until(problem_of([]), [("own", Columns())], Stable(k=3))


def test_more_units_than_can_be_compared_pair_by_pair_are_refused(monkeypatch):
    monkeypatch.setattr(_stopping, "_MOST_UNITS", 11)
    with pytest.raises(InvalidValue, match=r"left out for more than 11 units.*got 12 units"):
        score("taylor", batches_of(1), hp.Stable(k=4))


def test_bad_calls_are_refused():
    for data, until, words in (
        (batches_of(1), hp.Stable(k=12), r"Stable\.k: must be below the number of units, 12"),
        (batches_of(1), 4, r"score\(until=\): must be hp\.Stable\(k=\.\.\.\), got int"),
        (None, hp.Stable(k=4), "batches: must be given"),
        ([], hp.Stable(k=4), "at least one batch"),
    ):
        with pytest.raises(InvalidValue, match=words):
            score("taylor", data, until)
