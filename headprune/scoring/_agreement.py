"""``agreement`` of several scores, and ``rank_average``, which makes one of them; no torch in
here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from headprune.core.agreement import MEASURES, Agreement, Measure, Pair
from headprune.core.codec import FrozenDict
from headprune.core.coverage import coverage_notes
from headprune.core.errors import InvalidValue, PlanMismatch
from headprune.core.scores import HeadScores
from headprune.core.uncertainty import (
    check_confidence,
    check_draws,
    check_k,
    lowest_places,
    resampled,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def agreement(
    *scores: HeadScores,
    k: int | None = None,
    names: Sequence[str] | None = None,
    confidence: float = 0.95,
    draws: int = 500,
    seed: int = 0,
) -> Agreement:
    """How alike several scores order the units of one model: Spearman, Kendall's tau-b, Jaccard of
    the k lowest.

    The intervals are value ± z · the bootstrap's standard error, cut at the ends of the range.
    Examples are resampled with replacement; scores of the same data share their resamples, so that
    an example which is hard for both counts once. Scores without per-example numbers stay as they
    are; two of them have no interval. Noise in scores lowers agreement, and no correction is made
    for that: scores from more data agree better.

    Args:
        scores: Two or more, of one model and the same sites.
        k: Units in the sets that are compared; half of the units by default.
        names: What to call them; by default their scorers' names.
        confidence: Of the intervals.
        draws: Resamples.
        seed: Of the resampling.

    Raises:
        InvalidValue: fewer than two scores, or something else than scores.
        PlanMismatch: scores of models of another structure, or of other sites.

    >>> from headprune.core.codec import EMPTY
    >>> from headprune.core.heads import AttentionSite
    >>> from headprune.core.scores import ModelFingerprint
    >>> site, mark = (
    ...     AttentionSite("x", "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3)),
    ...     ModelFingerprint("s", "w"),
    ... )
    >>> a = HeadScores((site,), ((1.0, 2.0, 3.0, 4.0),), None, "a", EMPTY, 0, mark)
    >>> b = HeadScores((site,), ((1.0, 2.0, 4.0, 3.0),), None, "b", EMPTY, 0, mark)
    >>> print(agreement(a, b))
    Agreement over 4 units, intervals of 95 %
      scores  Spearman  Kendall tau-b  Jaccard of the 2 lowest
      a - b   0.80      0.67           1.00
    """
    check_confidence(confidence, "agreement")
    check_draws(draws, "agreement")
    _check_comparable(scores, "agreement")
    n_units = sum(map(len, scores[0].values))
    k = n_units // 2 if k is None else k
    check_k(k, scores[0], "agreement")
    called = _names(scores) if names is None else tuple(names)
    if len(called) != len(scores):
        raise InvalidValue("agreement(names=)", f"one name a score, {len(scores)}", len(called))
    drawn, notes = _draws(scores, called, draws, seed)
    pairs = []
    for a, b in combinations(range(len(scores)), 2):
        values = _compare(_flat(scores[a]), _flat(scores[b]), k)
        spread = None
        if drawn[a] is not None or drawn[b] is not None:
            first, second = (
                x if d is None else d for x, d in ((_flat(scores[i]), drawn[i]) for i in (a, b))
            )
            spread = _compare(first, second, k)
        pairs.append(Pair(a, b, *_measures(values, spread, confidence)))
    if len({s.model.weights for s in scores}) > 1:
        notes.append("the scores are of models with other weights")
    for name, s in zip(called, scores, strict=True):
        if len({v for row in s.values for v in row}) < 2:
            notes.append(f"all scores of {name} are equal: they have no order")
    return Agreement(called, k, n_units, confidence, tuple(pairs), tuple(notes))


def rank_average(scores: Iterable[HeadScores], draws: int = 500, seed: int = 0) -> HeadScores:
    """One score from several of the same model and sites: a unit's mean rank, from 1 (least
    important) upwards.

    Ranks do not care for the scorers' units and outliers; ties have average ranks. Standard errors
    are the bootstrap's, scores of the same data resampled together, scores without per-example
    numbers held as they are; None where none has such numbers.

    Raises:
        InvalidValue: fewer than two scores, or something else than scores.
        PlanMismatch: scores of other models or sites.
    """
    from scipy.stats import rankdata

    scores = tuple(scores)
    check_draws(draws, "rank_average")
    _check_comparable(scores, "rank_average")
    if len({s.model for s in scores}) > 1:
        raise PlanMismatch(
            "rank_average", "given scores of one model", "scores of models with other weights"
        )
    called = _names(scores)
    drawn, notes = _draws(scores, called, draws, seed)
    ranks = sum(rankdata(_flat(s)) for s in scores) / len(scores)
    errors = None
    if any(d is not None for d in drawn):
        parts = [
            rankdata(_flat(s) if d is None else d, axis=-1)
            for s, d in zip(scores, drawn, strict=True)
        ]
        errors = (sum(parts) / len(scores)).std(0, ddof=1)
    data = {s.data for s in scores if s.data is not None}
    settings = [{"scorer": s.scorer, "settings": s.settings, "scores": s.digest} for s in scores]
    first = scores[0]
    return HeadScores(
        sites=first.sites,
        values=_by_site(first, ranks),
        standard_errors=None if errors is None else _by_site(first, errors),
        scorer="rank_average",
        settings=FrozenDict({"of": settings}),
        n_examples=min((s.n_examples for s in scores if s.n_examples), default=0),
        model=first.model,
        data=data.pop() if len(data) == 1 else None,
        seed=None if errors is None else seed,
        costs=next((s.costs for s in scores if s.costs is not None), None),
        notes=(*notes, *coverage_notes(dict.fromkeys(note for s in scores for note in s.notes))),
    )


def _check_comparable(scores: Sequence[HeadScores], where: str) -> None:
    for s in scores:
        if not isinstance(s, HeadScores):
            raise InvalidValue(
                where, "given HeadScores, such as hp.score returns", type(s).__name__
            )
    if len(scores) < 2:
        raise InvalidValue(where, "given two scores or more", len(scores))
    first = scores[0]
    for s in scores[1:]:
        if s.model.structure != first.model.structure:
            raise PlanMismatch(
                where,
                "given scores of one model",
                f"{first.scorer} and {s.scorer} of different models",
            )
        mine, theirs = ([(site.name, site.units) for site in x.sites] for x in (first, s))
        if mine != theirs:
            other = next((t for t in theirs if t not in mine), None) or next(
                m for m in mine if m not in theirs
            )
            got = (
                f"{other[0]} with {len(other[1])} units in one of {first.scorer} and {s.scorer}"
                " alone"
            )
            raise PlanMismatch(
                where,
                "given scores of the same sites and units",
                got,
                "See HeadScores.of(pattern).",
            )


def _names(scores: Sequence[HeadScores]) -> tuple[str, ...]:
    """The scorers' names, numbered where one comes twice."""
    total, seen = Counter(s.scorer for s in scores), Counter[str]()
    names = []
    for s in scores:
        seen[s.scorer] += 1
        names.append(f"{s.scorer} ({seen[s.scorer]})" if total[s.scorer] > 1 else s.scorer)
    return tuple(names)


def _draws(
    scores: Sequence[HeadScores], names: Sequence[str], draws: int, seed: int
) -> tuple[list[Floats | None], list[str]]:
    """Resampled scores, None where there is nothing to resample, and why."""
    found: list[Floats | None] = []
    notes = []
    for place, (s, name) in enumerate(zip(scores, names, strict=True)):
        # Equal seeds and row counts give equal resamples: so those of the same data go together.
        same = (
            i
            for i, other in enumerate(scores)
            if other.data == s.data and _n_rows(other) == _n_rows(s)
        )
        drawn, reason = _drawn(s, draws, seed + next(same, place))
        found.append(drawn)
        notes += [f"{name} is held fixed: {reason}"] if drawn is None and s.n_examples else []
    return found, notes


def _n_rows(scores: HeadScores) -> int:
    return 0 if scores.samples is None else scores.samples.rows


def _drawn(scores: HeadScores, draws: int, seed: int) -> tuple[Floats | None, str]:
    try:
        return resampled(scores, draws, seed, "agreement"), ""
    except InvalidValue as error:
        return None, str(error.got)


def _compare(a: Floats, b: Floats, k: int) -> dict[str, Floats]:
    """Each measure for every draw of ``a`` and ``b``, ``[draws, units]``; one of them may be a
    single row."""
    import numpy as np
    from scipy.stats import rankdata

    rows = max(len(np.atleast_2d(a)), len(np.atleast_2d(b)))
    a, b = (np.broadcast_to(np.atleast_2d(x), (rows, np.shape(x)[-1])) for x in (a, b))
    ranks = [rankdata(x, axis=-1) for x in (a, b)]
    first, second = (r - r.mean(-1, keepdims=True) for r in ranks)
    common = ((lowest_places(a) < k) & (lowest_places(b) < k)).sum(-1)
    return {
        "spearman": _cosine(first, second),
        "kendall": _kendall(a, b),
        "jaccard": common / (2 * k - common),
    }


def _kendall(a: Floats, b: Floats) -> Floats:
    """Tau-b row by row; NaN where all of one are equal. SciPy counts pairs by sorting, in n log n
    steps a row."""
    import numpy as np
    from scipy.stats import kendalltau

    # The p-value is not used; this way to one is quick, and divides by zero for two units.
    method = "asymptotic" if a.shape[-1] > 2 else "auto"
    return np.array([kendalltau(x, y, method=method).statistic for x, y in zip(a, b, strict=True)])


def _cosine(a: Floats, b: Floats) -> Floats:
    """Row by row; NaN where one of them is zero."""
    import numpy as np

    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    found: Floats = np.divide((a * b).sum(-1), size, out=np.full(len(size), np.nan), where=size > 0)
    return np.clip(found, -1, 1)


def _measures(
    values: dict[str, Floats], spread: dict[str, Floats] | None, confidence: float
) -> list[Measure]:
    import numpy as np
    from scipy.special import ndtri

    found = []
    for name, lowest in MEASURES.items():
        value = float(values[name][0])
        drawn = None if spread is None else spread[name][np.isfinite(spread[name])]
        if drawn is None or len(drawn) < 2 or np.isnan(value):
            found.append(Measure(value))
            continue
        width = float(ndtri((1 + confidence) / 2) * drawn.std(ddof=1))
        found.append(Measure(value, max(value - width, lowest), min(value + width, 1.0)))
    return found


def _flat(scores: HeadScores) -> Floats:
    import numpy as np

    return np.array([v for row in scores.values for v in row], dtype=np.float64)


def _by_site(scores: HeadScores, flat: Floats) -> tuple[tuple[float, ...], ...]:
    left = iter(flat.tolist())
    return tuple(tuple(next(left) for _ in row) for row in scores.values)
