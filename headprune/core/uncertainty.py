"""How sure scores are: intervals of values and ranks, and of the set of the lowest, all from the
per-example numbers.

Everything here resamples rows of ``HeadScores.samples`` with replacement (Efron and Tibshirani
1993, chapter 6), the same rows for all units, because an example that is hard for one head is hard
for others. A resampled score is the score plus the change of the mean, so that it is centred where
the mean of the rows is not the score itself (jackknife pseudo-values). Where the standard error is
larger than that of the rows, because a scorer draws more than examples, the rest is added as
independent normal noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.core.errors import InvalidValue

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headprune.core.scores import HeadScores, ScoredUnit

    Floats = NDArray[np.float64]

#: Numbers that one step of the bootstrap holds at a time: 32 MB.
_STEP = 2**22


@dataclass(frozen=True)
class Stability:
    """Whether the set of the k lowest would be another with other examples. True in a condition
    when it is settled.

    Args:
        k: Units in the set.
        confidence: What settled means.
        probability: Share of resamples in which the set of the k lowest is exactly that of the
            scores.
        surely_in: Units of the set that are among the k lowest in at least ``confidence`` of the
            resamples.
        surely_out: Units outside that are among them in at most ``1 - confidence``.
        undecided: All others, least important first, with the share of resamples in which each is
            among them.
    """

    k: int
    confidence: float
    probability: float
    surely_in: tuple[ScoredUnit, ...]
    surely_out: tuple[ScoredUnit, ...]
    undecided: tuple[tuple[ScoredUnit, float], ...]

    @property
    def settled(self) -> bool:
        """The whole set comes back in at least ``confidence`` of the resamples."""
        return self.probability >= self.confidence

    def __bool__(self) -> bool:
        return self.settled

    def __str__(self) -> str:
        counts = f"{len(self.surely_in)} surely among them, {len(self.surely_out)} surely not"
        lines = [
            f"the {self.k} lowest are the same in {self.probability:.1%} of resamples; {counts}"
        ]
        lines += [f"  {u.name}{list(u.heads)}: among them in {p:.1%}" for u, p in self.undecided]
        return "\n".join(lines)


def resampled(scores: HeadScores, draws: int, seed: int, what: str) -> Floats:
    """``[draws, units]``: scores of resampled examples. Equal seeds and row counts resample the
    same rows.

    Raises:
        InvalidValue: the scores have no samples, or only one row of them.
    """
    import numpy as np

    check_draws(draws, what)
    check_samples(scores, what)
    assert scores.samples is not None
    matrix = scores.samples.matrix
    centred = matrix - matrix.mean(0)
    rng, n = np.random.default_rng(seed), len(matrix)
    step = max(1, _STEP // n)
    parts = []
    for start in range(0, draws, step):
        size = min(step, draws - start)
        rows = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        weights = np.bincount(rows.ravel(), minlength=size * n).reshape(size, n) / n
        parts.append(weights @ centred)
    values = np.array([v for row in scores.values for v in row], dtype=np.float64)
    moved: Floats = values + np.concatenate(parts) + _other_errors(scores, matrix, draws, seed)
    return moved


def _other_errors(scores: HeadScores, matrix: Floats, draws: int, seed: int) -> Floats | float:
    """Normal noise for what a standard error holds beside the choice of examples, such as the
    orders of ``shapley``."""
    import numpy as np

    if scores.standard_errors is None:
        return 0.0
    whole = np.array([e for row in scores.standard_errors for e in row], dtype=np.float64) ** 2
    other = np.clip(whole - matrix.var(0, ddof=1) / len(matrix), 0, None)
    if (other <= 1e-6 * whole).all():
        return 0.0
    assert scores.samples is not None
    own = np.random.default_rng(
        [seed, int(scores.samples.sha256[:8], 16)]
    )  # not shared with other scores
    noise: Floats = own.normal(size=(draws, len(other))) * np.sqrt(other)
    return noise


def check_samples(scores: HeadScores, what: str) -> None:
    """Refuses scores whose sampling error cannot be known: no samples, or only one row of them."""
    if scores.samples is not None and scores.samples.rows > 1:
        return
    got, hint = (
        f"scores of {scores.scorer!r} without them",
        "Score again: older files and some scorers have none.",
    )
    if scores.scorer == "rank_average":
        hint = "Averaged ranks have standard errors alone: ask the scores that they were made of."
    elif not scores.n_examples:
        got, hint = f"{scores.scorer!r}, which uses no data", "Such scores have no sampling error."
    elif scores.n_examples == 1:
        got, hint = "one example: no standard error", "Give more examples."
    elif scores.samples is not None:
        got, hint = (
            "one block of examples: no standard error",
            "Give more examples, or smaller blocks.",
        )
    raise InvalidValue(
        what, "called on scores with per-example numbers of several examples", got, hint
    )


def half_width(scores: HeadScores, standard_error: float | None, confidence: float) -> float:
    """Student's t times the standard error, with one degree of freedom less than there are rows (or
    examples)."""
    from scipy.special import stdtrit

    check_confidence(confidence, "HeadScores.interval")
    if standard_error is None:
        check_samples(scores, "HeadScores.interval")
        raise InvalidValue(
            "HeadScores.interval",
            "called on scores with standard errors",
            f"{scores.scorer!r} without",
        )
    rows = scores.n_examples if scores.samples is None else scores.samples.rows
    return float(stdtrit(rows - 1, (1 + confidence) / 2)) * standard_error


def rank_bounds(
    scores: HeadScores, confidence: float, draws: int, seed: int
) -> list[tuple[int, int]]:
    """For every unit the central interval of its rank over resamples; rank 1 is the most
    important."""
    import numpy as np

    what = "HeadScores.rank_interval"
    check_confidence(confidence, what)
    places = lowest_places(resampled(scores, draws, seed, what))
    ranks = places.shape[1] - places
    tail = (1 - confidence) / 2
    low = np.quantile(ranks, tail, axis=0, method="inverted_cdf")
    high = np.quantile(ranks, 1 - tail, axis=0, method="inverted_cdf")
    return list(zip(low.astype(int).tolist(), high.astype(int).tolist(), strict=True))


def lowest_shares(scores: HeadScores, k: int, draws: int, seed: int) -> list[float]:
    """For every unit the share of resamples in which it is among the k lowest."""
    check_k(k, scores, "HeadScores.lowest")
    shares: list[float] = (
        (lowest_places(resampled(scores, draws, seed, "HeadScores.lowest")) < k).mean(0).tolist()
    )
    return shares


def stability(scores: HeadScores, k: int, confidence: float, draws: int, seed: int) -> Stability:
    """How often the set of the k lowest comes back."""
    what = "HeadScores.stable"
    check_k(k, scores, what)
    check_confidence(confidence, what)
    among = lowest_places(resampled(scores, draws, seed, what)) < k
    ranked, units = scores.ranked(), list(scores.units())
    own = {(u.site, u.unit) for u in ranked[:k]}
    inside = [(u.site, u.unit) in own for u in units]
    shares = {(u.site, u.unit): float(share) for u, share in zip(units, among.mean(0), strict=True)}
    sure_in = tuple(u for u in ranked[:k] if shares[u.site, u.unit] >= confidence)
    sure_out = tuple(u for u in ranked[k:] if shares[u.site, u.unit] <= 1 - confidence)
    sure = {(u.site, u.unit) for u in (*sure_in, *sure_out)}
    rest = tuple((u, shares[u.site, u.unit]) for u in ranked if (u.site, u.unit) not in sure)
    return Stability(k, confidence, float((among == inside).all(1).mean()), sure_in, sure_out, rest)


def lowest_places(values: Floats) -> NDArray[np.intp]:
    """Each unit's place from the least important, 0; ties as in ``HeadScores.ranked``: the later
    one comes first."""
    import numpy as np

    n_units = values.shape[1]
    order = n_units - 1 - np.argsort(values[:, ::-1], axis=1, kind="stable")
    places: NDArray[np.intp] = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(n_units), order.shape), axis=1)
    return places


def check_confidence(confidence: float, what: str) -> None:
    """Refuses what is no confidence level."""
    if not 0 < confidence < 1:
        raise InvalidValue(
            f"{what}(confidence=)", "between 0 and 1", confidence, "For example 0.95."
        )


def check_draws(draws: int, what: str) -> None:
    """Refuses what is no count of resamples."""
    if draws < 1:
        raise InvalidValue(f"{what}(draws=)", "a count of resamples >= 1", draws)


def check_k(k: int, scores: HeadScores, what: str) -> None:
    """Refuses a k that does not split the units in two."""
    n_units = sum(map(len, scores.values))
    if isinstance(k, bool) or not isinstance(k, int) or not 0 < k < n_units:
        raise InvalidValue(f"{what}(k=)", f"a count of units from 1 to {n_units - 1}", repr(k))
