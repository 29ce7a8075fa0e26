"""Agreement of scores: against SciPy and by hand, its intervals, what it refuses, averaged ranks."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import kendalltau, rankdata, spearmanr

import headprune as hp
from headprune.core.agreement import Agreement
from headprune.core.codec import EMPTY
from headprune.core.errors import InvalidValue, PlanMismatch, UnknownName
from headprune.core.heads import AttentionSite
from headprune.core.ladders import SiteLadder
from headprune.core.samples import Samples
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.report import draw_agreement
from headprune.scoring import rank_average

SITES = tuple(
    AttentionSite(f"layer.{i}", "bert", "self", 6, 6, 8, 8, tuple(range(6))) for i in range(2)
)
MARK = ModelFingerprint("s", "w")


def fixed(values, scorer="magnitude", **changes):
    rows = tuple(tuple(map(float, row)) for row in np.reshape(values, (2, 6)))
    return replace(HeadScores(SITES, rows, None, scorer, EMPTY, 0, MARK), **changes)


def sampled(matrix, scorer="taylor", data="data"):
    samples = Samples.of(matrix)
    return fixed(matrix.mean(0), scorer, samples=samples, n_examples=len(matrix), data=data)


def noise(seed, n=40):
    return np.random.default_rng(seed).normal(size=(n, 12)) + 0.2 * np.arange(12)


def test_measures_are_scipys_and_sets_by_hand():
    for seed in range(4):
        rng = np.random.default_rng(seed)
        a, b = rng.integers(5, size=12), rng.normal(size=12)  # ties on one side
        pair = hp.agreement(fixed(a), fixed(b), k=4).pairs[0]
        assert pair.spearman.value == pytest.approx(spearmanr(a, b).statistic)
        assert pair.kendall.value == pytest.approx(kendalltau(a, b).statistic)
        first, second = ({(u.site, u.unit) for u in fixed(x).ranked()[:4]} for x in (a, b))
        assert pair.jaccard.value == pytest.approx(len(first & second) / len(first | second))
        assert (pair.spearman.low, pair.kendall.high) == (None, None)
    old = hp.agreement(fixed(np.arange(12)), fixed(noise(2).mean(0), "old", n_examples=9))
    assert old.pairs[0].spearman.low is None
    assert old.notes == ("old is not resampled: scores of 'old' without them",)


def test_intervals_are_those_of_a_literal_bootstrap():
    """The same resampled examples are taken for both scorers."""
    a, b = noise(0), noise(0) ** 2 + noise(1)
    found = hp.agreement(sampled(a), sampled(b, "fisher"), draws=1000).pairs[0].spearman
    rng, drawn = np.random.default_rng(5), []
    for _ in range(1000):
        rows = rng.integers(40, size=40)
        drawn.append(spearmanr(a[rows].mean(0), b[rows].mean(0)).statistic)
    width = 1.959964 * np.std(drawn, ddof=1)
    assert width > 0.05
    # Both standard deviations come from 1,000 draws, 2 to 3 % each.
    wanted = [found.value - width, min(found.value + width, 1)]
    assert_allclose([found.low, found.high], wanted, atol=0.15 * width)


def test_scores_of_the_same_examples_share_their_resamples():
    """The same numbers twice agree in every resample; as numbers of other data they do not."""
    together = hp.agreement(sampled(noise(0)), sampled(noise(0))).pairs[0].spearman
    apart = hp.agreement(sampled(noise(0)), sampled(noise(0), data="other")).pairs[0].spearman
    assert (together.low, together.high) == (1.0, 1.0)
    assert apart.low < 0.97


def test_it_is_a_value_with_a_table():
    found = hp.agreement(sampled(noise(0)), fixed(np.arange(12)), sampled(noise(1)), k=3)
    assert found.names == ("taylor (1)", "magnitude", "taylor (2)")
    assert Agreement.from_json(found.to_json()) == found
    pair = found.between("magnitude", "taylor (1)")
    assert pair == found.pairs[0]
    with pytest.raises(UnknownName, match="Did you mean"):
        found.between("magnitude", "tailor (1)")
    with pytest.raises(UnknownName, match="two different names of those compared"):
        found.between("magnitude", "magnitude")
    assert "Jaccard of the 3 lowest" in str(found)
    for text in (str(found), found._repr_html_()):
        assert str(pair.spearman) in text
        assert "taylor (1) - magnitude" in text
    flat = fixed(np.arange(12))
    assert "<b>" not in hp.agreement(flat, flat, names=["<b>", "[b]"])._repr_html_()


def test_equal_scores_have_no_order():
    """NaN is not equal to itself; an agreement is equal to what is read back, and so is its hash."""
    found = hp.agreement(fixed(np.ones(12), "flat"), sampled(noise(0)))
    assert math.isnan(found.pairs[0].spearman.value)
    assert "not defined" in str(found)
    assert "all scores of flat are equal: they have no order" in found.notes
    read = Agreement.from_json(found.to_json())
    assert (read, hash(read)) == (found, hash(found))
    assert pickle.loads(pickle.dumps(found)) == found
    other = replace(found.pairs[0], spearman=replace(found.pairs[0].spearman, value=0.0))
    assert found.pairs[0] != other
    assert found.pairs[0].spearman != math.nan


def test_prices_of_levels_are_not_compared():
    ladders = tuple(SiteLadder(site.name, (0, 6), (1.0, 0.0)) for site in SITES)
    priced = fixed(np.arange(12), "ladder", ladders=ladders)
    (note,) = hp.agreement(priced, fixed(np.arange(12), "surgeon", n_examples=0)).notes
    assert note == "of ladder the order of units is compared, not the prices of levels"


def test_the_picture_is_written_in_known_formats(tmp_path):
    scores = [sampled(noise(0)), fixed(np.ones(12)), sampled(noise(1))]
    found = hp.agreement(*scores, names=["one", "two", "three"])
    for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        data = draw_agreement(found, tmp_path / f"a.{ending}").read_bytes()
        assert len(data) > 5000
        assert data.startswith(start)
    with pytest.raises(InvalidValue, match=r"ends in one of .*png.*got '\.doc'"):
        draw_agreement(found, tmp_path / "a.doc")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.svg"]


A = fixed(np.arange(12))
OTHER_MODEL = fixed(np.arange(12), "other", model=ModelFingerprint("t", "w"))
OTHER_WEIGHTS = fixed(np.arange(12), model=ModelFingerprint("s", "x"))


WRONG = [
    ([A], {}, InvalidValue, "two scores or more, got 1"),
    ([[A, A]], {}, InvalidValue, r"given HeadScores, .*got list"),
    ([A, OTHER_MODEL], {}, PlanMismatch, "scores of one model, got magnitude and other of"),
    ([A, A.of("layer.0")], {}, PlanMismatch, r"same sites and units, got layer\.1 with 6"),
    ([A, A], {"k": 0}, InvalidValue, "a count of units from 1 to 11"),
    ([A, A], {"k": 12}, InvalidValue, "a count of units from 1 to 11"),
    ([A, A], {"names": ["a"]}, InvalidValue, "one name per score, 2, got 1"),
    ([A, A], {"names": ["a", "a"]}, InvalidValue, "different from one another"),
]


def test_scores_that_cannot_be_compared_are_refused_and_other_weights_noted():
    for scores, settings, error, words in WRONG:
        with pytest.raises(error, match=words):
            hp.agreement(*scores, **settings)
    assert "the scores are of models with other weights" in hp.agreement(A, OTHER_WEIGHTS).notes
    with pytest.raises(PlanMismatch, match="models with other weights"):
        rank_average([A, OTHER_WEIGHTS])


def test_the_same_sites_in_another_order_are_refused():
    turned = replace(A, sites=A.sites[::-1])
    with pytest.raises(PlanMismatch, match="scores of the same sites"):
        hp.agreement(A, turned)


def test_ranks_are_averaged():
    a, b = np.array([5, 5, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]), 1000.0 * np.arange(12)
    found = rank_average([fixed(a), fixed(b, "random")])
    assert_allclose(np.ravel(found.values), (rankdata(a) + rankdata(b)) / 2)
    assert (found.scorer, found.standard_errors, found.n_examples) == ("rank_average", None, 0)
    assert [s["scorer"] for s in found.settings["of"]] == ["magnitude", "random"]
    assert HeadScores.from_json(found.to_json()) == found
    assert hp.select(found, hp.Budget(keep_heads=6)).mask.n_kept == 6
    with pytest.raises(InvalidValue, match="use the scores that were averaged"):
        rank_average([sampled(noise(0)), A]).stable(3)


def test_averaged_ranks_have_standard_errors_and_know_their_examples():
    a, b = noise(0), noise(0) + noise(1)
    found = rank_average([sampled(a), sampled(b, "fisher"), A], draws=1000)
    assert (found.n_examples, found.data, found.seed) == (40, "data", 0)
    rng, drawn = np.random.default_rng(3), []
    for _ in range(1000):
        rows = rng.integers(40, size=40)
        drawn.append((rankdata(a[rows].mean(0)) + rankdata(b[rows].mean(0)) + np.arange(1, 13)) / 3)
    assert_allclose(np.ravel(found.standard_errors), np.std(drawn, axis=0), rtol=0.15)
