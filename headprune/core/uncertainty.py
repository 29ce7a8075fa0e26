"""Sampling error of scores: intervals of values and ranks, and stability of the lowest set.

Everything here resamples rows of the per-example numbers with replacement (Efron and Tibshirani
1993, chapter 6). All units share the resampled rows, because an example that is hard for one head
is hard for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headprune.core.errors import InvalidValue
from headprune.core.samples import Samples
from headprune.core.units import ScoredUnit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

#: Numbers that one step of the bootstrap holds at a time: 32 MB.
_STEP = 2**22


class SampledScores(Protocol):
    """The part of ``HeadScores`` that its sampling error depends on."""

    @property
    def values(self) -> tuple[tuple[float, ...], ...]: ...

    @property
    def standard_errors(self) -> tuple[tuple[float, ...], ...] | None: ...

    @property
    def samples(self) -> Samples | None: ...

    @property
    def scorer(self) -> str: ...

    @property
    def n_examples(self) -> int: ...


@dataclass(frozen=True)
class Stability:
    """Whether other examples would change the set of the k lowest; true when they would not.

    Args:
        k: Units in the set.
        confidence: Share of resamples from which on the set counts as settled.
        probability: Share of resamples in which the set of the k lowest is exactly that of the
            scores.
        settled_in: Units of the set that are among the k lowest in at least ``confidence`` of the
            resamples.
        settled_out: Units outside the set that are among them in at most ``1 - confidence``.
        undecided: All others, least important first, with the share of resamples in which each is
            among them.
    """

    k: int
    confidence: float
    probability: float
    settled_in: tuple[ScoredUnit, ...]
    settled_out: tuple[ScoredUnit, ...]
    undecided: tuple[tuple[ScoredUnit, float], ...]

    @property
    def settled(self) -> bool:
        """Whether the whole set comes back in at least ``confidence`` of the resamples."""
        return self.probability >= self.confidence

    def __bool__(self) -> bool:
        return self.settled

    def __str__(self) -> str:
        counts = f"{len(self.settled_in)} settled in, {len(self.settled_out)} settled out"
        lines = [
            f"the {self.k} lowest are the same in {self.probability:.1%} of resamples; {counts}"
        ]
        for unit, share in self.undecided:
            lines.append(f"  {unit.name}{list(unit.heads)}: among them in {share:.1%}")
        return "\n".join(lines)


def resampled(scores: SampledScores, draws: int, seed: int, what: str) -> Floats:
    """Score resampled examples ``draws`` times.

    Equal seeds and row counts resample the same rows.

    Args:
        scores: The scores.
        draws: Number of resamples.
        seed: Of the resampling.
        what: The caller, for an error.

    Returns:
        ``[draws, units]``.

    Raises:
        InvalidValue: the scores have no samples, or only one row of them.
    """
    check_draws(draws, what)
    check_samples(scores, what)
    assert scores.samples is not None
    matrix = scores.samples.matrix  # [rows, units]
    # The change of the mean is added to the score. So resamples are centred on the score even
    # where the rows' mean is not the score itself (jackknife pseudo-values).
    changes = _resampled_means(matrix - matrix.mean(0), draws, seed)  # [draws, units]
    moved: Floats = _flat(scores.values) + changes + _other_errors(scores, matrix, draws, seed)
    return moved


def _resampled_means(matrix: Floats, draws: int, seed: int) -> Floats:
    """Draw rows with replacement and average them, ``[draws, units]``."""
    import numpy as np

    rng = np.random.default_rng(seed)
    n_rows = len(matrix)
    step = max(1, _STEP // n_rows)
    means = []
    for start in range(0, draws, step):
        size = min(step, draws - start)
        # Every draw counts its rows in a range of its own: one bincount serves all draws.
        rows = rng.integers(n_rows, size=(size, n_rows)) + n_rows * np.arange(size)[:, None]
        counts = np.bincount(rows.ravel(), minlength=size * n_rows)
        weights = counts.reshape(size, n_rows) / n_rows  # [draws of this step, rows]
        means.append(weights @ matrix)
    return np.concatenate(means)


def _other_errors(scores: SampledScores, matrix: Floats, draws: int, seed: int) -> Floats | float:
    """Draw normal noise for the part of a standard error that the choice of examples lacks.

    A scorer may draw more than examples, such as the orders of ``shapley``.
    """
    import numpy as np

    if scores.standard_errors is None:
        return 0.0
    variance = _flat(scores.standard_errors) ** 2  # [units]
    other = np.clip(variance - matrix.var(0, ddof=1) / len(matrix), 0, None)
    if (other <= 1e-6 * variance).all():  # rounding alone
        return 0.0
    assert scores.samples is not None
    # The seed holds the samples' hash: other scores must not share this noise.
    rng = np.random.default_rng([seed, int(scores.samples.sha256[:8], 16)])
    noise: Floats = rng.normal(size=(draws, len(other))) * np.sqrt(other)
    return noise


def _flat(rows: Sequence[Sequence[float]]) -> Floats:
    """Put one value per unit of every site into one array, ``[units]``."""
    import numpy as np

    return np.array([value for row in rows for value in row], dtype=np.float64)


def check_samples(scores: SampledScores, what: str) -> None:
    """Refuse scores without samples, or with only one row of them."""
    samples = scores.samples
    if samples is not None and samples.rows > 1:
        return
    got = f"scores of {scores.scorer!r} without them"
    hint = "Score again: older files and some scorers have none."
    if scores.scorer == "rank_average":
        hint = "Averaged ranks have only standard errors: use the scores that were averaged."
    elif not scores.n_examples:
        got = f"{scores.scorer!r}, which uses no data"
        hint = "Such scores have no sampling error."
    elif scores.n_examples == 1:
        got = "one example: no standard error"
        hint = "Give more examples."
    elif samples is not None:
        got = "one block of examples: no standard error"
        hint = "Give more examples, or smaller blocks."
    must = "called on scores with per-example numbers of several examples"
    raise InvalidValue(what, must, got, hint)


def half_width(scores: SampledScores, standard_error: float | None, confidence: float) -> float:
    """Student's t times the standard error.

    Degrees of freedom: one less than there are rows of samples (or examples).
    """
    from scipy.special import stdtrit

    what = "HeadScores.interval"
    check_confidence(confidence, what)
    if standard_error is None:
        check_samples(scores, what)
        must = "called on scores with standard errors"
        raise InvalidValue(what, must, f"{scores.scorer!r} without")
    rows = scores.n_examples if scores.samples is None else scores.samples.rows
    return float(stdtrit(rows - 1, (1 + confidence) / 2)) * standard_error


def rank_bounds(
    scores: SampledScores, confidence: float, draws: int, seed: int
) -> list[tuple[int, int]]:
    """For every unit the central interval of its rank over resamples; 1 is most important."""
    import numpy as np

    what = "HeadScores.rank_interval"
    check_confidence(confidence, what)
    places = lowest_places(resampled(scores, draws, seed, what))
    ranks = places.shape[1] - places  # [draws, units]
    tail = (1 - confidence) / 2
    low = np.quantile(ranks, tail, axis=0, method="inverted_cdf")
    high = np.quantile(ranks, 1 - tail, axis=0, method="inverted_cdf")
    return list(zip(low.astype(int).tolist(), high.astype(int).tolist(), strict=True))


def lowest_shares(scores: SampledScores, k: int, draws: int, seed: int) -> list[float]:
    """For every unit the share of resamples in which it is among the k lowest."""
    what = "HeadScores.lowest"
    check_k(k, scores, what)
    among = lowest_places(resampled(scores, draws, seed, what)) < k  # [draws, units]
    shares: list[float] = among.mean(0).tolist()
    return shares


def stability(
    scores: SampledScores,
    ranked: Sequence[ScoredUnit],
    k: int,
    confidence: float,
    draws: int,
    seed: int,
) -> Stability:
    """Count how often the set of the k lowest comes back.

    Args:
        scores: The scores.
        ranked: Their units, least important first.
        k: Units in the set.
        confidence: Share of resamples that settles a unit, or the set.
        draws: Number of resamples.
        seed: Of the resampling.
    """
    what = "HeadScores.stable"
    check_k(k, scores, what)
    check_confidence(confidence, what)
    among = lowest_places(resampled(scores, draws, seed, what)) < k  # [draws, units]

    # 1. The units in model order, as the columns of ``among`` are.
    in_set = {(unit.site, unit.unit) for unit in ranked[:k]}
    in_order = sorted((unit.site, unit.unit) for unit in ranked)
    own_set = [place in in_set for place in in_order]  # [units]
    shares = dict(zip(in_order, among.mean(0).tolist(), strict=True))

    # 2. Units whose place the resamples settle, and the rest.
    settled_in, settled_out, undecided = [], [], []
    for position, unit in enumerate(ranked):
        share = shares[unit.site, unit.unit]
        if position < k and share >= confidence:
            settled_in.append(unit)
        elif position >= k and share <= 1 - confidence:
            settled_out.append(unit)
        else:
            undecided.append((unit, share))
    probability = float((among == own_set).all(1).mean())
    return Stability(
        k, confidence, probability, tuple(settled_in), tuple(settled_out), tuple(undecided)
    )


def lowest_places(values: Floats) -> NDArray[np.intp]:
    """Return each unit's rank in every row of ``[draws, units]``; 0 is the least important.

    Of equal units the later one comes first, as in ``HeadScores.ranked``.
    """
    import numpy as np

    n_units = values.shape[1]
    # A stable sort of the reversed columns puts the later of equal units first.
    order = n_units - 1 - np.argsort(values[:, ::-1], axis=1, kind="stable")
    # The inverse permutation: places[row, order[row, i]] = i.
    places: NDArray[np.intp] = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(n_units), order.shape), axis=1)
    return places


def check_confidence(confidence: float, what: str) -> None:
    """Refuse a confidence level outside of 0 to 1."""
    if not 0 < confidence < 1:
        where = f"{what}(confidence=)"
        raise InvalidValue(where, "between 0 and 1", confidence, "For example 0.95.")


def check_draws(draws: int, what: str) -> None:
    """Refuse a count of resamples below 1."""
    if draws < 1:
        raise InvalidValue(f"{what}(draws=)", "a count of resamples >= 1", draws)


def check_k(k: int, scores: SampledScores, what: str) -> None:
    """Refuse a k that does not split the units in two."""
    n_units = sum(map(len, scores.values))
    if isinstance(k, bool) or not isinstance(k, int) or not 0 < k < n_units:
        raise InvalidValue(f"{what}(k=)", f"a count of units from 1 to {n_units - 1}", repr(k))
