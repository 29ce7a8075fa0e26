"""``agreement`` of several scores, and ``rank_average``, which merges them; without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, zip_longest
from typing import TYPE_CHECKING, TypeAlias

from headprune.core.agreement import MEASURES, Agreement, Measure, Pair
from headprune.core.codec import FrozenDict
from headprune.core.coverage import coverage_notes
from headprune.core.errors import InvalidValue, PlanMismatch
from headprune.core.scores import CostTable, HeadScores
from headprune.core.uncertainty import (
    check_confidence,
    check_draws,
    check_k,
    lowest_places,
    resampled,
)
from headprune.core.units import by_site

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

#: A site's name and its units.
Site: TypeAlias = tuple[str, tuple[tuple[int, ...], ...]]


def agreement(
    *scores: HeadScores,
    k: int | None = None,
    names: Sequence[str] | None = None,
    confidence: float = 0.95,
    draws: int = 500,
    seed: int = 0,
) -> Agreement:
    """Compare how several scores order the units of one model.

    The measures are Spearman's correlation, Kendall's tau-b and the Jaccard index of the k lowest.
    Intervals are value ± z · the bootstrap's standard error. Scores of the same data share
    resamples; scores without per-example numbers are held fixed. Noise lowers agreement.

    Args:
        scores: Two or more, of one model and the same sites.
        k: Units in the sets that are compared; default half of the units.
        names: Default their scorers' names.
        confidence: Of the intervals.
        draws: Resamples.
        seed: Of the resampling.

    Raises:
        InvalidValue: fewer than two scores, or something else than scores.
        PlanMismatch: scores of models of another structure, or of other sites.

    >>> from headprune.core.codec import EMPTY
    >>> from headprune.core.heads import AttentionSite
    >>> from headprune.core.scores import ModelFingerprint
    >>> site = AttentionSite("x", "bert", "self", 4, 4, 8, 8, (0, 1, 2, 3))
    >>> mark = ModelFingerprint("s", "w")
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
    # By default compare the halves that a budget of half the heads would remove.
    n_units = sum(map(len, scores[0].values))
    k = n_units // 2 if k is None else k
    check_k(k, scores[0], "agreement")
    labels = _names(scores) if names is None else tuple(names)
    if len(labels) != len(scores):
        raise InvalidValue("agreement(names=)", f"one name per score, {len(scores)}", len(labels))

    # Compare every pair, as it was measured and in every resample.
    resamples, notes = _resamples(scores, labels, draws, seed)
    flat = list(map(_flat, scores))
    pairs = []
    for a, b in combinations(range(len(scores)), 2):
        values = _compare(flat[a], flat[b], k)
        # Where one of them is held fixed, the other alone is resampled.
        drawn = None
        if resamples[a] is not None or resamples[b] is not None:
            drawn = _compare(_or(resamples[a], flat[a]), _or(resamples[b], flat[b]), k)
        pairs.append(Pair(a, b, *_measures(values, drawn, confidence)))

    notes.extend(_weaknesses(labels, scores, flat))
    return Agreement(labels, k, n_units, confidence, tuple(pairs), tuple(notes))


def _weaknesses(
    labels: Sequence[str], scores: Sequence[HeadScores], flat: Sequence[Floats]
) -> Iterator[str]:
    """What weakens the comparison, as notes."""
    if len({s.model.weights for s in scores}) > 1:
        yield "the scores are of models with other weights"
    for name, compared, values in zip(labels, scores, flat, strict=True):
        if len(set(values.tolist())) < 2:
            yield f"all scores of {name} are equal: they have no order"
        if compared.ladders is not None:
            yield f"of {name} the order of units is compared, not the prices of levels"


def rank_average(scores: Iterable[HeadScores], draws: int = 500, seed: int = 0) -> HeadScores:
    """Merge several scores of one model into one: a unit's mean rank.

    Ranks begin at 1, the least important unit; ties have average ranks. They do not depend on the
    scorers' measures and outliers. Standard errors are the bootstrap's, with scores of the same
    data resampled together and scores without per-example numbers held fixed; None where no score
    has such numbers.

    Args:
        scores: Two or more, of one model and the same sites.
        draws: Resamples.
        seed: Of the resampling.

    Raises:
        InvalidValue: fewer than two scores, or something else than scores.
        PlanMismatch: scores of other models or sites.
    """
    from scipy.stats import rankdata

    # 1. Check that the scores can be merged.
    scores = tuple(scores)
    check_draws(draws, "rank_average")
    _check_comparable(scores, "rank_average")
    if len({s.model for s in scores}) > 1:
        got = "scores of models with other weights"
        raise PlanMismatch("rank_average", "given scores of one model", got)

    # 2. Average the ranks, as measured and in every resample.
    resamples, notes = _resamples(scores, _names(scores), draws, seed)
    flat = list(map(_flat, scores))
    ranks = sum(map(rankdata, flat)) / len(scores)
    errors = None
    if any(drawn is not None for drawn in resamples):
        # [draws, units] or, of scores that are held fixed, [units]
        drawn_ranks = [
            rankdata(_or(drawn, values), axis=-1)
            for drawn, values in zip(resamples, flat, strict=True)
        ]
        errors = (sum(drawn_ranks) / len(scores)).std(0, ddof=1)

    # 3. Say what they are made of.
    first = scores[0]
    sizes = list(map(len, first.values))
    settings = [{"scorer": s.scorer, "settings": s.settings, "scores": s.digest} for s in scores]
    return HeadScores(
        sites=first.sites,
        values=by_site(ranks.tolist(), sizes),
        standard_errors=None if errors is None else by_site(errors.tolist(), sizes),
        scorer="rank_average",
        bundling="mean",
        settings=FrozenDict({"of": settings}),
        n_examples=min((s.n_examples for s in scores if s.n_examples), default=0),
        model=first.model,
        data=_common_data(scores),
        seed=None if errors is None else seed,
        costs=_first_costs(scores),
        notes=(*notes, *_merged_notes(scores)),
    )


def _first_costs(scores: Sequence[HeadScores]) -> CostTable | None:
    """What the units cost, from the first scores that say so."""
    return next((s.costs for s in scores if s.costs is not None), None)


def _common_data(scores: Sequence[HeadScores]) -> str | None:
    """The digest of the data, where all scores that have one have the same."""
    data = {s.data for s in scores if s.data is not None}
    return data.pop() if len(data) == 1 else None


def _merged_notes(scores: Sequence[HeadScores]) -> Iterable[str]:
    """The notes about coverage of all scores, each once."""
    notes: dict[str, None] = {}  # a set in order
    for s in scores:
        notes |= dict.fromkeys(s.notes)
    return coverage_notes(notes)


def _or(drawn: Floats | None, values: Floats) -> Floats:
    """Resampled values ``[draws, units]``; without them the values themselves, ``[units]``."""
    return values if drawn is None else drawn


def _check_comparable(scores: Sequence[HeadScores], where: str) -> None:
    """Refuse scores of other models, sites or units than the first."""
    for s in scores:
        if not isinstance(s, HeadScores):
            must = "given HeadScores, such as hp.score returns"
            raise InvalidValue(where, must, type(s).__name__)
    if len(scores) < 2:
        raise InvalidValue(where, "given two scores or more", len(scores))
    first = scores[0]
    for s in scores[1:]:
        if s.model.structure != first.model.structure:
            got = f"{first.scorer} and {s.scorer} of different models"
            raise PlanMismatch(where, "given scores of one model", got)
        other = _differing_site(_units(first), _units(s))
        if other is not None:
            name, units = other
            scorers = f"{first.scorer} and {s.scorer}"
            got = f"{name} with {len(units)} units in only one of {scorers}"
            must = "given scores of the same sites and units"
            raise PlanMismatch(where, must, got, "Take the common sites: HeadScores.of(pattern).")


def _units(scores: HeadScores) -> list[Site]:
    return [(site.name, site.units) for site in scores.sites]


def _differing_site(mine: list[Site], theirs: list[Site]) -> Site | None:
    """The first site that only one of two scores has in its place, with its units."""
    pairs = zip_longest(mine, theirs)
    return next((other or own for own, other in pairs if own != other), None)


def _names(scores: Sequence[HeadScores]) -> tuple[str, ...]:
    """The scorers' names, numbered where several scores have the same one."""
    total, seen = Counter(s.scorer for s in scores), Counter[str]()
    names = []
    for s in scores:
        seen[s.scorer] += 1
        names.append(f"{s.scorer} ({seen[s.scorer]})" if total[s.scorer] > 1 else s.scorer)
    return tuple(names)


def _resamples(
    scores: Sequence[HeadScores], names: Sequence[str], draws: int, seed: int
) -> tuple[list[Floats | None], list[str]]:
    """Resampled scores ``[draws, units]``, None where there is nothing to resample; and notes
    why."""
    resamples: list[Floats | None] = []
    notes = []
    # Equal seeds and row counts give equal resamples. So scores of the same data get the seed of
    # the first of them.
    seeds: dict[tuple[str | None, int], int] = {}
    for place, (s, name) in enumerate(zip(scores, names, strict=True)):
        n_rows = 0 if s.samples is None else s.samples.rows
        own_seed = seeds.setdefault((s.data, n_rows), seed + place)
        drawn = None
        try:
            drawn = resampled(s, draws, own_seed, "agreement")
        except InvalidValue as error:
            if s.n_examples:
                notes.append(f"{name} is not resampled: {error.got}")
        resamples.append(drawn)
    return resamples, notes


def _compare(a: Floats, b: Floats, k: int) -> dict[str, Floats]:
    """Each measure, ``[draws]``, of ``a`` and ``b``, ``[draws, units]`` or a single row."""
    import numpy as np
    from scipy.stats import rankdata

    # Repeat a single row for every draw.
    rows = max(len(np.atleast_2d(a)), len(np.atleast_2d(b)))
    a, b = (np.broadcast_to(np.atleast_2d(x), (rows, np.shape(x)[-1])) for x in (a, b))
    # Spearman's correlation is that of the ranks.
    ranks = [rankdata(x, axis=-1) for x in (a, b)]
    first, second = (r - r.mean(-1, keepdims=True) for r in ranks)
    # Units that are among the k lowest of both.
    common = ((lowest_places(a) < k) & (lowest_places(b) < k)).sum(-1)
    return {
        "spearman": _cosine(first, second),
        "kendall": _kendall(a, b),
        "jaccard": common / (2 * k - common),
    }


def _kendall(a: Floats, b: Floats) -> Floats:
    """Tau-b row by row; NaN where all of one are equal.

    SciPy counts pairs by sorting, in n log n steps per row.
    """
    import numpy as np
    from scipy.stats import kendalltau

    # The p-value is not used. The asymptotic one is quick, but divides by zero for two units.
    method = "asymptotic" if a.shape[-1] > 2 else "auto"
    return np.array([kendalltau(x, y, method=method).statistic for x, y in zip(a, b, strict=True)])


def _cosine(a: Floats, b: Floats) -> Floats:
    """Cosine row by row; NaN where a row is zero."""
    import numpy as np

    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    nan = np.full(len(size), np.nan)
    cosine: Floats = np.divide((a * b).sum(-1), size, out=nan, where=size > 0)
    return np.clip(cosine, -1, 1)  # rounding may exceed 1


def _measures(
    values: dict[str, Floats], drawn: dict[str, Floats] | None, confidence: float
) -> list[Measure]:
    """Each measure, with an interval where there are resamples."""
    import numpy as np
    from scipy.special import ndtri

    measures = []
    for name, lowest in MEASURES.items():
        value = float(values[name][0])
        finite = np.empty(0)
        if drawn is not None:
            finite = drawn[name][np.isfinite(drawn[name])]
        if len(finite) < 2 or np.isnan(value):
            measures.append(Measure(value))
            continue
        # The bootstrap's standard error, taken for normal.
        width = float(ndtri((1 + confidence) / 2) * finite.std(ddof=1))
        measures.append(Measure(value, max(value - width, lowest), min(value + width, 1.0)))
    return measures


def _flat(scores: HeadScores) -> Floats:
    """``[units]``."""
    import numpy as np

    return np.array(list(chain.from_iterable(scores.values)), dtype=np.float64)
