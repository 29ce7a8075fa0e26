"""Sequential stopping: reads data only until the set of the k least important units is settled."""

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
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.scoring._coupling import BATCHES, LOSSES, OUTPUTS
from headprune.scoring._rows import Collected, Moments, room

#: Share of a look's error that chooses which pairs are close; the rest tests them.
_CHOOSING = 0.1
#: What of a problem holds for all data.
_CARRIED = ("scorers", LOSSES, OUTPUTS, *BATCHES.values())
#: Relative difference of means in fp64 that rounding makes.
_SAME = 1e-13


@dataclass(frozen=True)
class Stable:
    """Stop as soon as the set of the ``k`` least important units is settled.

    The data are looked at when ``first`` examples have been read and then whenever there are
    ``growth`` times as many. At each look every unit inside the set is compared with every unit
    outside by the studentised mean of their paired per-example differences, and the set is settled
    if all of these exceed a critical value. The critical value is that of the two-step
    self-normalised test of many inequalities (Chernozhukov, Chetverikov and Kato 2019, "Inference
    on Causal and Structural Parameters using Many Moment Inequalities"): pairs that are clearly
    ordered are set aside first, and the union bound is paid for the close ones alone. So it is
    close to a single comparison where one pair decides, whatever the number of heads. The error
    ``1 - confidence`` is divided over looks as 1/(j (j + 1)), which sums to one, so that any number
    of looks is paid for (error spending: Lan and DeMets 1983).

    That is exact for many examples only, and no test of means holds for every distribution (Bahadur
    and Savage 1956): what has not been seen leaves no trace in a variance. Two rules guard against
    it. Nothing is settled before an event in a share ``rare`` of the examples would have been seen,
    ``(1 - rare)^n <= error``: 200 examples for 2 %. And from each difference of means is taken what
    events too rare to be counted may be worth, ``R ln(1/error) / n`` with R the largest deviation
    that was seen against the difference (the range term of an empirical Bernstein bound, Maurer and
    Pontil 2009, theorem 4, with constant 1 and the range observed, because nobody knows the true
    one). What is left to
    trust: events rarer than ``rare``, and tails that are much heavier than all that was read, may
        still change the set.

    The claim is about all data that those read are a random part of, so the batches must come in
    random order; sorted ones (by length, by label) void it. With several scorers reading goes on
    until all of them are settled at one look, each at the confidence given. Units that are equal in
    every example on both sides of the border are never told
    apart: all data are read. Only ``batches`` are ever read, and no more of them than were needed.

    Args:
        k: Units in the set: what a budget will remove.
        confidence: Probability that the set is that of all data, at the least, in the sense above.
        first: Examples before the first look.
        growth: How much more is read before the next look.
        rare: Share of examples above which an event that changes the set is not to be overlooked.

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
            raise InvalidValue(
                "Stable.confidence", "between 0 and 1", self.confidence, "For example 0.95."
            )
        if self.first < 2:
            raise InvalidValue("Stable.first", "at least 2 examples", self.first)
        if not self.growth > 1:
            raise InvalidValue("Stable.growth", "above 1", self.growth)
        if not 0 < self.rare < 1:
            raise InvalidValue(
                "Stable.rare",
                "a share of the examples between 0 and 1",
                self.rare,
                "For example 0.02.",
            )

    def error(self, look: int) -> float:
        """What the look of this number, counted from 1, may spend of the error."""
        return (1 - self.confidence) / (look * (look + 1))


def settled(seen: Moments, k: int, error: float, rare: float = 0.02) -> bool:
    """Whether the k columns of the lowest means are, up to ``error``, those of the lowest
    expectations.

    ``T[x, y]`` speaks for x being lower than y. If the true set is S, then all T[x, y] with y in S,
    x outside have expectations of at most zero. Every S but the measured one must be rejected, each
    at the level ``error``; sets that contradict a clearly ordered pair (T of twice the first
    critical value) are rejected at once, and for all others only the close pairs can matter.

    Args:
        seen: Of the numbers ``[examples, units]``.
        k: Size of the set.
        error: Probability of a wrong yes, at most, for as many examples as ``Stable`` says.
        rare: Share of examples above which an event must have been seen.
    """
    n, n_units = seen.count, len(seen.mean)
    n_pairs = k * (n_units - k)
    clear = 2 * _critical(_CHOOSING * error, n_pairs, n)
    if (1 - rare) ** n > error or math.isinf(
        clear
    ):  # too few examples for any claim, whatever they look like
        return False
    studentised = _studentised(seen, error)
    lower = studentised >= clear
    surely_in = lower.sum(1) >= n_units - k
    surely_out = lower.sum(0) >= k
    close = (
        (studentised.abs() < clear)
        & ~surely_in[:, None]
        & ~surely_out[None]
        & ~torch.eye(n_units).bool()
    )
    n_close = min(
        int((close | close.T).triu().sum()), n_pairs
    )  # one direction of a pair at most is false
    critical = _critical((1 - 2 * _CHOOSING) * error, n_close, n) if n_close else 0.0
    inside = torch.zeros(n_units, dtype=torch.bool)
    inside[lowest(seen.mean, k)] = True
    return bool((studentised[inside][:, ~inside] > critical).all())


def _studentised(seen: Moments, error: float) -> Tensor:
    """``[units, units]``, antisymmetric: studentised differences of means, less what unseen rare
    events may be worth.

    An event that never showed in n examples has, up to ``error``, a share of at most
    ``ln(1/error) / n``; its size is taken to be that of the largest deviation which was seen
    against the difference. An allowance beyond the difference leaves 0, no evidence either way.
    """
    n, means, covariance = seen.count, seen.mean, seen.covariance
    variance = covariance.diagonal()[:, None] + covariance.diagonal()[None] - 2 * covariance
    gap = means[None] - means[:, None]
    left = gap - (gap + seen.widest) * math.log(1 / error) / n
    told = (left > 0) & (
        gap > _SAME * means.abs().max()
    )  # columns that tie must not be told apart by rounding
    found = torch.where(told, left * (n / variance.clamp(min=0)) ** 0.5, torch.zeros_like(gap))
    return torch.where(told, found, -found.T)


def lowest(values: Tensor, k: int) -> Tensor:
    """Indices of the k lowest; ties as in ``HeadScores.ranked``, the later one first."""
    return len(values) - 1 - torch.argsort(values.flip(0), stable=True)[:k]


def _critical(error: float, n_pairs: int, n: int) -> float:
    """Of the largest of ``n_pairs`` self-normalised sums of ``n`` terms; infinite where n is too
    small for any."""
    z = float(torch.special.ndtri(torch.tensor(error / n_pairs, dtype=torch.float64)))
    return -z / math.sqrt(1 - z * z / n) if z * z < n else math.inf


def read_until(
    problem: ScoringProblem, scorers: list[tuple[str, Scorer]], until: Stable
) -> list[Estimate]:
    """Estimates from as many batches as it takes; ``problem.data`` becomes the digest of those.

    Raises:
        InvalidValue: no data, a ``k`` that does not split the units, or a scorer whose score is no
            mean of one number an example.
    """
    n_units = sum(len(b.site.units) for b in problem.bound)
    if until.k >= n_units:
        raise InvalidValue("Stable.k", f"below the number of units, {n_units}", until.k)
    for name, scorer in scorers:
        if not scorer.needs_data:
            raise _refusal(name, "it uses no data")
        if not scorer.by_example:
            raise _refusal(name, "its number for an example depends on the other examples")
    digest, so_far = DataDigest(), [_SoFar() for _ in scorers]
    looks, done, read = 0, False, 0
    for batches, look in _parts(problem, until, digest, room() // (8 * n_units)):
        part = _part(problem, batches, read)
        with part.explained():
            found = [_checked(name, scorer.estimate(part)) for name, scorer in scorers]
        problem.shared |= {k: v for k, v in part.shared.items() if k in _CARRIED}
        if not read and len(batches) > 1:
            _check_additive(_part(problem, batches[:1], 0), scorers, found)
        read += len(batches)
        for one, estimate in zip(so_far, found, strict=True):
            one.add(estimate)
        if look:
            looks += 1
            done = all(
                settled(one.moments, until.k, until.error(looks), until.rare) for one in so_far
            )
        if done:
            break
    problem.data = digest.hexdigest()
    note = _note(so_far[0].moments.count, looks, done, until)
    return [one.joined(note) for one in so_far]


def _parts(
    problem: ScoringProblem, until: Stable, digest: DataDigest, most: int
) -> Iterator[tuple[list[Any], bool]]:
    """The batches piece by piece, and whether the data are looked at after them.

    A piece is what there is room for, as batches and as rows of ``most`` examples; more rows than
    that would come back as means of neighbours. The first piece has two batches, if there are two.

    Raises:
        InvalidValue: no batches, or one so large that two have no room.
    """
    if problem.batches is None:
        raise InvalidValue("batches", "given, because until= reads data", None)
    seen, target, first = 0, float(until.first), True
    part: list[Any] = []
    examples = nbytes = 0
    for number, batch in enumerate(problem.batches):
        size, bytes_here = (
            batch_size(batch, f"batch {number}"),
            sum(t.nbytes for t in tensors(batch)),
        )
        if 2 * size > most:
            must = (
                f"of at most {most // 2} examples, so that there is room for the numbers of two"
                " batches"
            )
            raise InvalidValue(f"batch {number}", must, f"{size} examples", "Use smaller batches.")
        whole = len(part) > 1 or not first
        if part and (examples + size > most or (whole and nbytes + bytes_here > room())):
            yield part, False
            part, examples, nbytes, first = [], 0, 0, False
        digest.add(batch)
        part.append(batch)
        examples, nbytes, seen = examples + size, nbytes + bytes_here, seen + size
        if seen >= target and (len(part) > 1 or not first):
            yield part, True
            part, examples, nbytes, first, target = (
                [],
                0,
                0,
                False,
                max(target, seen) * until.growth,
            )
    if part:
        yield part, True
    elif not seen:
        raise InvalidValue(*EMPTY)


def _part(problem: ScoringProblem, batches: list[Any], before: int) -> ScoringProblem:
    """The problem for some of the batches; no numbers of others are carried over."""
    kept = {k: v for k, v in problem.shared.items() if k in _CARRIED}
    return replace(problem, batches=batches, shared=kept, before=before)


class _SoFar:
    """What one scorer has said of all that was read, in memory that does not grow with it."""

    def __init__(self) -> None:
        self.moments, self._rows, self._said = Moments(), Collected(), dict[str, None]()
        self._seed: int | None = None
        self._bent: Tensor | None = None

    def add(self, estimate: Estimate) -> None:
        rows = _rows(estimate)
        self.moments.add(rows)
        self._rows.add(rows)
        self._seed = estimate.seed
        of_part = averaged(rows).notes  # what is said of so few examples need not hold for all
        self._said.update(dict.fromkeys(note for note in estimate.notes if note not in of_part))
        if estimate.curvature is not None:
            bent = estimate.curvature * estimate.n_examples
            self._bent = bent if self._bent is None else self._bent + bent

    def joined(self, note: str) -> Estimate:
        n = self.moments.count
        found = averaged(self._rows.rows, n, self._seed)
        curvature = None if self._bent is None else self._bent / n
        return replace(found, notes=(*self._said, *found.notes, note), curvature=curvature)


def _rows(estimate: Estimate) -> Tensor:
    assert estimate.samples is not None
    return estimate.samples


def _checked(name: str, estimate: Estimate) -> Estimate:
    """Refuses what is no mean over examples."""
    if estimate.samples is None:
        raise _refusal(name, "it has no per-example numbers")
    if len(estimate.samples) != estimate.n_examples or not _alike(
        estimate.samples.mean(0), estimate.values.to(estimate.samples)
    ):
        raise _refusal(name, "its score is no mean of one number an example")
    errors = _errors(estimate.samples)
    if (
        errors is not None
        and estimate.standard_errors is not None
        and not _alike(errors, estimate.standard_errors)
    ):
        raise _refusal(name, "its error has other parts than the choice of examples")
    return estimate


def _check_additive(
    first: ScoringProblem, scorers: list[tuple[str, Scorer]], found: list[Estimate]
) -> None:
    """Refuses scorers whose numbers for an example depend on the other examples, for example by a
    common norm.

    It costs one batch more; such numbers cannot be put together from parts of the data.
    """
    rounding = (
        torch.finfo(next(first.model.parameters()).dtype).eps ** 0.5
    )  # batches of another size round differently
    for (name, scorer), together in zip(scorers, found, strict=True):
        alone = _rows(_checked(name, scorer.estimate(first)))
        if not _alike(alone, _rows(together)[: len(alone)], rounding):
            raise _refusal(name, "its number for an example depends on the other examples")


def _alike(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    """Equal up to a part of the largest number."""
    return bool(torch.allclose(a, b, rtol=0, atol=tolerance * float(b.abs().max())))


def _refusal(name: str, reason: str) -> InvalidValue:
    must = "used with scorers whose score is a mean of one number an example"
    return InvalidValue(
        "score(until=)", must, f"{name!r}: {reason}", "Leave until= out, or take taylor or fisher."
    )


def _errors(samples: Tensor) -> Tensor | None:
    return samples.std(0) / len(samples) ** 0.5 if len(samples) > 1 else None


def _note(n: int, looks: int, done: bool, until: Stable) -> str:
    what = f"the set of the {until.k} lowest"
    if done:
        return (
            f"{what} is settled at confidence {until.confidence:g} after {n} examples (look"
            f" {looks})"
        )
    return (
        f"all {n} examples were read and {what} is not settled at confidence {until.confidence:g}"
    )
