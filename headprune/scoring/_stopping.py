"""Sequential stopping: read data only until the set of the k least important units is settled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headprune.core.errors import InvalidValue
from headprune.model.batches import EMPTY
from headprune.model.running import DataDigest, batch_size, tensors
from headprune.scoring._averages import averaged, mean_and_error
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.scoring._coupling import Couplings
from headprune.scoring._gates import n_units
from headprune.scoring._rows import CollectedRows, PairedMoments, room
from headprune.scoring._shared_values import SharedValues

#: Share of a test's error that chooses which pairs are close; the rest tests them.
_CHOOSING = 0.1
#: Units that are compared at most: a matrix of all pairs takes 275 MiB then.
_MOST_UNITS = 6000
#: Relative difference of means in fp64 that rounding makes.
_SAME = 1e-13


@dataclass(frozen=True)
class Stable:
    """Stop reading as soon as the set of the ``k`` least important units is settled.

    The scores are tested after ``first`` examples, then whenever there are ``growth`` times more.
    Each test compares every unit inside the set with every unit outside it, by their paired
    per-example differences (Chernozhukov, Chetverikov and Kato 2019, two-step self-normalised
    test). The error ``1 - confidence`` is divided over the tests, so that their number does not
    matter (Lan and DeMets 1983).

    The confidence is asymptotic in the number of examples. It holds for the data of which the
    examples read are a random sample, so the batches must come in random order. Events rarer than
    ``rare`` may still change the set. Units that are equal in every example are never separated.
    With several scorers, reading goes on until all of them are settled.

    Args:
        k: Units in the set: how many a budget will remove.
        confidence: Lowest probability that all data would give this set.
        first: Examples before the first test.
        growth: Factor of the examples between two tests.
        rare: Share of examples; only rarer events may change the set unnoticed.

    >>> Stable(k=12)
    Stable(k=12, confidence=0.95, first=200, growth=1.5, rare=0.02)
    """

    k: int
    confidence: float = 0.95
    first: int = 200
    growth: float = 1.5
    rare: float = 0.02

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise InvalidValue("Stable.k", "a count of units >= 1", repr(self.k))
        if not 0 < self.confidence < 1:
            hint = "For example 0.95."
            raise InvalidValue("Stable.confidence", "between 0 and 1", self.confidence, hint)
        if self.first < 2:
            raise InvalidValue("Stable.first", "at least 2 examples", self.first)
        if not self.growth > 1:
            raise InvalidValue("Stable.growth", "above 1", self.growth)
        if not 0 < self.rare < 1:
            must = "a share of the examples between 0 and 1"
            raise InvalidValue("Stable.rare", must, self.rare, "For example 0.02.")

    def error(self, look: int) -> float:
        """What the test of this number, counted from 1, may spend of the error.

        The shares ``1 / (j (j + 1))`` sum to one over all tests.
        """
        return (1 - self.confidence) / (look * (look + 1))


# The test of ``settled`` is that of Chernozhukov, Chetverikov and Kato (2019), "Inference on Causal
# and Structural Parameters using Many Moment Inequalities". Pairs that are clearly ordered are set
# aside first, and the union bound is paid for the close ones alone. So it costs little more than a
# single comparison where one pair decides, for any number of heads.
#
# It is exact for many examples only, and no test of means holds for every distribution (Bahadur and
# Savage 1956): an event that was not seen does not show in a variance. Two rules guard against it.
# 1. Nothing is settled before an event in a share ``rare`` of the examples would have been seen,
#    ``(1 - rare)^n <= error``: 200 examples for 2 %.
# 2. Each difference of means is reduced by what events too rare to be counted may be worth,
#    ``R ln(1/error) / n``, with R the largest deviation that was seen against the difference: the
#    range term of an empirical Bernstein bound (Maurer and Pontil 2009, theorem 4, with constant 1
#    and the range observed, because the true one is not known).
# Events rarer than ``rare``, and tails that are much heavier than all that was read, may still
# change the set.


def settled(seen: PairedMoments, k: int, error: float, rare: float = 0.02) -> bool:
    """Test whether the k units of the lowest means also have the lowest expectations.

    ``T[x, y]`` is the studentised difference "mean of y minus mean of x": large where x is lower.
    The answer is yes if T is above a critical value for every x inside the set and y outside. The
    critical value grows with the number of pairs that it covers. Pairs with ``|T|`` of at least
    twice the value for all pairs are clearly ordered, so that it covers only the close pairs.

    Args:
        seen: Moments of the numbers ``[examples, units]``.
        k: Size of the set.
        error: Largest probability of a wrong yes, for as many examples as ``Stable`` says.
        rare: Share of examples above which an event must have been seen.
    """
    n, n_columns = seen.count, len(seen.mean)
    n_pairs = k * (n_columns - k)

    # 1. Too few examples allow no claim.
    clear = 2 * _critical(_CHOOSING * error, n_pairs, n)
    if (1 - rare) ** n > error or math.isinf(clear):
        return False

    # 2. Count the close pairs, [units, units]; at most one direction of a pair is false.
    studentised = _studentised(seen, error)
    lower = studentised >= clear
    in_every_set = lower.sum(1) >= n_columns - k
    in_no_set = lower.sum(0) >= k
    close = (studentised.abs() < clear) & ~in_every_set[:, None] & ~in_no_set[None]
    close = close & ~torch.eye(n_columns).bool()
    n_close = min(int((close | close.T).triu().sum()), n_pairs)

    # 3. Test every unit inside against every unit outside.
    critical = 0.0
    if n_close:
        critical = _critical((1 - 2 * _CHOOSING) * error, n_close, n)
    inside = torch.zeros(n_columns, dtype=torch.bool)
    inside[lowest(seen.mean, k)] = True
    return bool((studentised[inside][:, ~inside] > critical).all())


def _studentised(seen: PairedMoments, error: float) -> Tensor:
    """``[units, units]``, antisymmetric: studentised differences of means, less what unseen rare
    events may be worth.

    An event that never showed in n examples has, up to ``error``, a share of at most
    ``ln(1/error) / n``. Its size is taken to be that of the largest deviation that was seen against
    the difference. An allowance beyond the difference leaves 0, no evidence for either order.
    """
    n, means, covariance = seen.count, seen.mean, seen.covariance
    variances = covariance.diagonal()
    variance = variances[:, None] + variances[None] - 2 * covariance
    gap = means[None] - means[:, None]
    reduced = gap - (gap + seen.widest) * math.log(1 / error) / n
    # Columns that tie must not be ordered by rounding.
    is_ordered = (reduced > 0) & (gap > _SAME * means.abs().max())
    ratio = reduced * (n / variance.clamp(min=0)) ** 0.5
    positive = torch.where(is_ordered, ratio, torch.zeros_like(gap))
    return torch.where(is_ordered, positive, -positive.T)


def lowest(values: Tensor, k: int) -> Tensor:
    """Indices of the k lowest; ties as in ``HeadScores.ranked``, the later one first."""
    return len(values) - 1 - torch.argsort(values.flip(0), stable=True)[:k]


def _critical(error: float, n_pairs: int, n: int) -> float:
    """Critical value of the largest of ``n_pairs`` self-normalised sums of ``n`` terms; infinite
    where n is too small for any."""
    z = float(torch.special.ndtri(torch.tensor(error / n_pairs, dtype=torch.float64)))
    if z * z >= n:
        return math.inf
    return -z / math.sqrt(1 - z * z / n)


def read_until(
    problem: ScoringProblem, scorers: list[tuple[str, Scorer]], until: Stable
) -> list[Estimate]:
    """Estimates from as many batches as it takes; ``problem.data`` becomes the digest of those.

    Raises:
        InvalidValue: no data, a ``k`` that does not split the units, or a scorer whose score is no
            mean of one number per example.
    """
    width = n_units(problem)
    _check_asked(scorers, until, width)
    digest = DataDigest()
    totals = [_Total() for _ in scorers]
    n_tests, done = 0, False
    n_batches = 0
    for part, is_test in _parts(problem, until, digest, room() // (8 * width)):
        # 1. Estimate from these batches alone.
        _read_part(problem, scorers, totals, part, n_batches)
        n_batches += len(part)
        # 2. Test what all batches gave.
        if is_test:
            n_tests += 1
            error = until.error(n_tests)
            done = all(settled(t.moments, until.k, error, until.rare) for t in totals)
        if done:
            break
    problem.data = digest.hexdigest()
    note = _note(totals[0].moments.count, n_tests, done, until)
    return [total.estimate(note) for total in totals]


def _check_asked(scorers: list[tuple[str, Scorer]], until: Stable, width: int) -> None:
    """Refuse a set of all units, too many units, and scorers that are no mean of one number per
    example."""
    if width > _MOST_UNITS:
        must = (
            f"left out for more than {_MOST_UNITS:,} units, because it compares all pairs of them"
        )
        hint = "Score neurons without it, or give fewer sites."
        raise InvalidValue("score(until=)", must, f"{width:,} units", hint)
    if until.k >= width:
        raise InvalidValue("Stable.k", f"below the number of units, {width}", until.k)
    for name, scorer in scorers:
        if not scorer.needs_data:
            raise _refusal(name, "it uses no data")
        if not scorer.by_example:
            raise _refusal(name, "its number for an example depends on the other examples")


def _read_part(
    problem: ScoringProblem,
    scorers: list[tuple[str, Scorer]],
    totals: list[_Total],
    batches: list[Any],
    n_before: int,
) -> None:
    """Add the estimates from some of the batches to the totals."""
    part = _part(problem, batches, n_before)
    with part.explained():
        estimates = [_checked(name, scorer.estimate(part)) for name, scorer in scorers]
    problem.shared.put(part.shared.of(Couplings))
    if not n_before and len(batches) > 1:
        _check_additive(_part(problem, batches[:1], 0), scorers, estimates)
    for total, estimate in zip(totals, estimates, strict=True):
        total.add(estimate)


def _parts(
    problem: ScoringProblem, until: Stable, digest: DataDigest, most: int
) -> Iterator[tuple[list[Any], bool]]:
    """The batches part by part, and whether the scores are tested after them.

    A part is what there is room for, as batches and as rows of ``most`` examples; more rows than
    that would come back as means of neighbours. The first part has two batches, if there are two.

    Raises:
        InvalidValue: no batches, or one so large that two have no room.
    """
    if problem.batches is None:
        raise InvalidValue("batches", "given, because until= reads data", None)
    target = float(until.first)
    n_seen = 0
    part: list[Any] = []
    n_examples = n_bytes = 0
    fewest = 2  # batches of the first part
    for number, batch in enumerate(problem.batches):
        size = batch_size(batch, f"batch {number}")
        size_in_bytes = sum(t.nbytes for t in tensors(batch))
        if 2 * size > most:
            must = (
                f"of at most {most // 2} examples, so that there is room for the numbers of two"
                " batches"
            )
            raise InvalidValue(f"batch {number}", must, f"{size} examples", "Use smaller batches.")
        # 1. End the part before a batch that has no room.
        too_many = n_examples + size > most
        too_large = len(part) >= fewest and n_bytes + size_in_bytes > room()
        if part and (too_many or too_large):
            yield part, False
            part, n_examples, n_bytes, fewest = [], 0, 0, 1
        digest.add(batch)
        part.append(batch)
        n_examples += size
        n_bytes += size_in_bytes
        n_seen += size
        # 2. End it where the scores are tested.
        if n_seen >= target and len(part) >= fewest:
            yield part, True
            part, n_examples, n_bytes, fewest = [], 0, 0, 1
            target = max(target, n_seen) * until.growth
    if part:
        yield part, True
    elif not n_seen:
        raise InvalidValue(*EMPTY)


def _part(problem: ScoringProblem, batches: list[Any], before: int) -> ScoringProblem:
    """The problem for some of the batches; no numbers of other batches are shared with it."""
    shared = SharedValues()
    shared.put(problem.shared.of(Couplings).copy())
    return replace(problem, batches=batches, shared=shared, before=before)


class _Total:
    """What one scorer's estimates add up to, in memory that does not grow with the examples."""

    def __init__(self) -> None:
        self.moments = PairedMoments()
        self._rows = CollectedRows()
        self._notes: dict[str, None] = {}  # a set in order
        self._seed: int | None = None
        # Sum over examples of the curvature, [units, units].
        self._curvature: Tensor | None = None

    def add(self, estimate: Estimate) -> None:
        """Add an estimate from other examples."""
        rows = _rows(estimate)
        self.moments.add(rows)
        self._rows.add(rows)
        self._seed = estimate.seed
        # Notes about so few examples need not hold for all.
        of_part = averaged(rows).notes
        for note in estimate.notes:
            if note not in of_part:
                self._notes[note] = None
        if estimate.curvature is not None:
            more = estimate.curvature * estimate.n_examples
            self._curvature = more if self._curvature is None else self._curvature + more

    def estimate(self, note: str) -> Estimate:
        """The estimate from all examples, with a note of ours."""
        n = self.moments.count
        estimate = averaged(self._rows.rows, n, self._seed)
        notes = (*self._notes, *estimate.notes, note)
        curvature = None if self._curvature is None else self._curvature / n
        return replace(estimate, notes=notes, curvature=curvature)


def _rows(estimate: Estimate) -> Tensor:
    assert estimate.samples is not None
    return estimate.samples


def _checked(name: str, estimate: Estimate) -> Estimate:
    """Refuse an estimate that is no mean over examples."""
    samples, errors = estimate.samples, estimate.standard_errors
    if samples is None:
        raise _refusal(name, "it has no per-example numbers")
    values = estimate.values.to(samples)
    means, expected = mean_and_error(samples)
    if len(samples) != estimate.n_examples or not _alike(means, values):
        raise _refusal(name, "its score is no mean of one number per example")
    if expected is not None and errors is not None and not _alike(expected, errors):
        raise _refusal(name, "its error has other parts than the choice of examples")
    return estimate


def _check_additive(
    first: ScoringProblem, scorers: list[tuple[str, Scorer]], estimates: list[Estimate]
) -> None:
    """Refuse scorers whose numbers for an example depend on the other examples, for example by a
    common norm.

    Such numbers cannot be merged from parts of the data. The check runs one batch once more.
    """
    # Batches of another size round differently.
    rounding = torch.finfo(next(first.model.parameters()).dtype).eps ** 0.5
    for (name, scorer), together in zip(scorers, estimates, strict=True):
        alone = _rows(_checked(name, scorer.estimate(first)))
        if not _alike(alone, _rows(together)[: len(alone)], rounding):
            raise _refusal(name, "its number for an example depends on the other examples")


def _alike(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    """Whether two tensors are equal up to a part of the largest number."""
    return bool(torch.allclose(a, b, rtol=0, atol=tolerance * float(b.abs().max())))


def _refusal(name: str, reason: str) -> InvalidValue:
    must = "used with scorers whose score is a mean of one number per example"
    hint = "Pass scorer='taylor' or 'fisher', or leave until= out. The default is surgeon."
    return InvalidValue("score(until=)", must, f"{name!r}: {reason}", hint)


def _note(n: int, n_tests: int, done: bool, until: Stable) -> str:
    what = f"the set of the {until.k} lowest"
    confidence = f"confidence {until.confidence:g}"
    if done:
        return f"{what} is settled at {confidence} after {n} examples (test {n_tests})"
    return f"all {n} examples were read and {what} is not settled at {confidence}"
