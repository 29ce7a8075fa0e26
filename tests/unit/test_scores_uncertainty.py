"""Samples behind scores: how they are kept, and the intervals, ranks and sets that are drawn from
them."""

import copy
import math
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import headprune as hp
from headprune.core import samples as samples_module
from headprune.core import uncertainty
from headprune.core.arrays import packed
from headprune.core.codec import EMPTY
from headprune.core.errors import InvalidValue, UnknownName
from headprune.core.heads import AttentionSite, HeadId
from headprune.core.samples import Samples
from headprune.core.scores import HeadScores, ModelFingerprint
from tests.laws.support import examples_of, subject_of
from tests.scoring_help import score, split

KINDS = ("self", "causal", "cross")
SITES = tuple(
    AttentionSite(f"{kind}.attention", "t5", kind, 4, 4, 8, 8, (0, 1, 2, 3)) for kind in KINDS
)
FIRST = HeadId("self.attention", 0)
HALF = hp.Budget(keep_heads=0.5)


def scores_of(matrix, sites=SITES, **changes):
    matrix = np.asarray(matrix, dtype=np.float64)
    n, ends = len(matrix), np.cumsum([len(s.units) for s in sites])[:-1]

    def rows(flat):
        return tuple(tuple(map(float, part)) for part in np.split(flat, ends))

    made = HeadScores(
        sites,
        rows(matrix.mean(0)),
        rows(matrix.std(0, ddof=1) / n**0.5) if n > 1 else None,
        "taylor",
        EMPTY,
        n,
        ModelFingerprint("s", "w"),
        "data",
        samples=Samples.of(matrix),
    )
    return replace(made, **changes)


def noise(n, gaps=1.0, seed=0):
    """Twelve units in the order of their place, ``gaps`` standard deviations apart."""
    return np.random.default_rng(seed).normal(size=(n, 12)) + gaps * np.arange(12)


# ---------------------------------------------------------------- how they are kept


def test_samples_come_back_from_beside_the_file(tmp_path):
    scores = scores_of(noise(20), notes=("a note",))
    path = scores.save(tmp_path / "a.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.samples.safetensors"]
    loaded = HeadScores.load(path)
    assert (loaded, hash(loaded), loaded.digest) == (scores, hash(scores), scores.digest)
    assert (loaded.samples.matrix == noise(20)).all()
    assert loaded.rank_interval() == scores.rank_interval()
    assert pickle.loads(pickle.dumps(loaded)).lowest(3) == copy.deepcopy(scores).lowest(3)
    for shown in (str(loaded), loaded.__rich__(), loaded._repr_html_()):
        assert "a note" in shown


def test_samples_are_found_by_their_hash_beside_others(tmp_path):
    """Of a file that was renamed, of one without an ending, and of a record."""
    first, second = scores_of(noise(20)), scores_of(noise(20, seed=1))
    assert first.lowest(3) != second.lowest(3)
    first.save(tmp_path / "a.json")
    second.save(tmp_path / "b.json").rename(tmp_path / "c.json")
    first.save(tmp_path / "x")
    second.save(tmp_path / "x.json")
    for name, scores in (("c.json", second), ("x", first), ("x.json", second)):
        assert HeadScores.load(tmp_path / name).lowest(3) == scores.lowest(3)
    hp.RunRecord("run", "done", "save", "now", scores=first).save(tmp_path / "record.json")
    assert hp.RunRecord.load(tmp_path / "record.json").scores.lowest(3) == first.lowest(3)


def test_other_numbers_make_other_scores():
    scores = scores_of(noise(20))
    other = replace(scores, samples=Samples.of(noise(20)[::-1]))
    assert scores != other
    assert scores.digest != other.digest
    assert scores == replace(scores, samples=Samples.of(noise(20)))
    with pytest.raises(ValueError, match="read-only"):
        scores.samples.matrix[0, 0] = 1.0


def take_another(path, scores):
    other = scores_of(noise(5)).save(path.parent / "others" / "a.json")
    shutil.copy(other.with_name("a.samples.safetensors"), path)


def flip_last_byte(path, scores):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def round_to_single_precision(path, scores):
    """Under the hash of the numbers in double precision."""
    matrix = scores.samples.matrix.astype(np.float32)
    path.write_bytes(packed({"samples": matrix}, {"sha256": scores.samples.sha256}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (take_another, "the numbers of other scores"),
        (round_to_single_precision, "a damaged file"),
        (flip_last_byte, "a damaged file"),
        (lambda path, scores: path.unlink(), "no such file"),
    ],
)
def test_scores_stay_usable_without_the_file(tmp_path, spoil, words):
    scores = scores_of(noise(20))
    path = scores.save(tmp_path / "a.json")
    spoil(tmp_path / "a.samples.safetensors", scores)
    loaded = HeadScores.load(path)
    assert loaded == scores
    assert hp.select(loaded, HALF).scores == scores.digest
    assert hp.select(loaded, {"cross": HALF}).mask.n_kept == 10
    assert loaded.interval(FIRST) == scores.interval(FIRST)
    with pytest.raises(InvalidValue, match=rf"a\.samples\.safetensors: must be .* got {words}"):
        loaded.stable(6)
    alone = loaded.of("cross")
    assert alone.samples is None
    assert words in alone.notes[-1]
    with pytest.warns(UserWarning, match=rf"written without per-example numbers.*{words}"):
        loaded.save(tmp_path / "elsewhere" / "b.json")
    assert HeadScores.load(tmp_path / "elsewhere" / "b.json") == scores


def test_text_alone_has_no_numbers():
    scores = scores_of(noise(20))
    read = HeadScores.from_json(scores.to_json())
    assert read == scores
    with pytest.raises(InvalidValue, match=r"come from no file\. .*HeadScores\.load"):
        read.lowest(2)


def test_samples_are_one_finite_column_a_unit():
    with pytest.raises(InvalidValue, match="one column per unit, 12, got 11"):
        scores_of(noise(20), samples=Samples.of(noise(20)[:, 1:]))
    for bad, words in (([1.0], "matrix"), (np.ones((0, 3)), "matrix"), ([[math.nan]], "finite")):
        with pytest.raises(InvalidValue, match=words):
            Samples.of(bad)


def test_where_there_is_no_room_neighbours_are_joined(monkeypatch):
    monkeypatch.setattr(samples_module, "LIMIT", 12 * 8 * 8)
    kept = Samples.of(noise(20))
    assert (kept.rows, kept.units) == (6, 12)
    assert_allclose(kept.matrix, noise(20)[:18].reshape(6, 3, 12).mean(1))


def test_the_parts_of_an_encoder_decoder_stand_alone():
    scores = scores_of(noise(20))
    for index, kind in enumerate(KINDS):
        part = scores.of(kind)
        assert [s.kind for s in part.sites] == [kind]
        assert part.values == scores.values[index : index + 1]
        assert part.standard_errors == scores.standard_errors[index : index + 1]
        assert (part.samples.matrix == noise(20)[:, 4 * index : 4 * index + 4]).all()
    assert scores.of("*attention") == scores
    assert scores.of("c*").sites == SITES[1:]
    with pytest.raises(UnknownName, match=r"got 'crosss'\. Did you mean 'cross'"):
        scores.of("crosss")
    with pytest.raises(UnknownName, match=r"got 'cross'\. The scored sites are of kind self\."):
        scores.of("self").of("cross")


# ---------------------------------------------------------------- what they say


def test_an_interval_is_of_a_head():
    with pytest.raises(InvalidValue, match=r"head: must be a HeadId.*, got 0\.95"):
        scores_of(noise(9)).interval(0.95)


def test_intervals_are_students():
    scores = scores_of(noise(9))
    column = noise(9)[:, 0]
    low, high = scores.interval(FIRST)
    # 2.306 is the 97.5 % quantile of Student's t with 8 degrees of freedom in any table.
    width = 2.306004 * column.std(ddof=1) / 3
    assert_allclose([low, high], [column.mean() - width, column.mean() + width], rtol=1e-6)
    narrow = scores.interval(FIRST, confidence=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_resampling_is_efrons():
    """Against a loop over draws that ranks by sorting; the share of a unit in the lowest has a
    known error."""
    matrix = noise(15, gaps=0.3)
    scores = scores_of(matrix)
    rng = np.random.default_rng(7)
    draws = [matrix[rng.integers(15, size=15)].mean(0) for _ in range(2000)]
    slow = np.mean([np.isin(np.arange(12), np.argsort(d)[:5]) for d in draws], axis=0)
    fast = np.array(scores.lowest(5, draws=2000)).ravel()
    assert fast.sum() == pytest.approx(5)
    assert 0.05 < fast[4] < 0.95, "a unit at the border is undecided"
    # The difference of two shares of 2000 draws has a standard deviation of at most 0.016.
    assert_allclose(fast, slow, atol=0.06)
    ranks = np.array([12 - np.argsort(np.argsort(d)) for d in draws])
    bounds = np.array(scores.rank_interval(draws=2000)).reshape(12, 2)
    assert_allclose(bounds, np.quantile(ranks, [0.025, 0.975], axis=0).T, atol=1)
    assert scores.lowest(5, seed=1) == scores.lowest(5, seed=1) != scores.lowest(5, seed=2)


def test_means_of_resamples_have_the_standard_error_of_the_formula(monkeypatch):
    """In steps, where rows are many; twice as large where the scorer says so; around the score
    where that is no mean."""
    monkeypatch.setattr(uncertainty, "_STEP", 100 * 40)
    plain = scores_of(noise(40))
    doubled = tuple(tuple(2 * e for e in row) for row in plain.standard_errors)
    error = noise(40).std(0) / 40**0.5
    drawn = uncertainty.resampled(plain, 1030, 0, "test")
    assert drawn.shape == (1030, 12)
    assert_allclose(drawn.mean(0), noise(40).mean(0), atol=0.02)
    assert_allclose(drawn.std(0), error, rtol=0.12)
    wide = uncertainty.resampled(replace(plain, standard_errors=doubled), 1030, 0, "test")
    assert_allclose(wide.std(0), 2 * drawn.std(0), rtol=0.1)
    moved = replace(plain, values=((10.0, 20.0, 30.0, 40.0),) * 3)
    assert_allclose(uncertainty.resampled(moved, 500, 0, "test").mean(0)[:2], [10, 20], atol=0.1)


def test_well_separated_units_are_settled():
    scores = scores_of(noise(30, gaps=3.0))
    found = scores.stable(5)
    assert found
    assert (found.probability, found.undecided) == (1.0, ())
    assert [u.name for u in found.settled_in] == ["self.attention"] * 4 + ["causal.attention"]
    assert len(found.settled_out) == 7
    assert scores.rank_interval()[0][0] == (12, 12)
    assert scores.rank_interval()[2][3] == (1, 1)
    assert scores_of(noise(8, gaps=3.0), n_examples=800).stable(6), "one row a block is enough"
    before, of_torch = np.random.get_state()[1].copy(), torch.get_rng_state()
    alike = scores_of(noise(30, gaps=0.05)).stable(5)
    assert not alike
    assert alike.probability < 0.5
    assert len(alike.settled_in) + len(alike.settled_out) + len(alike.undecided) == 12
    assert (np.random.get_state()[1] == before).all()
    assert torch.equal(torch.get_rng_state(), of_torch)


def test_ties_fall_as_in_ranked():
    """Constant columns that tie: the later unit is the lower one, in every resample as in the
    scores."""
    scores = scores_of(np.ones((10, 12)))
    lowest = {(u.site, u.unit) for u in scores.ranked()[:3]}
    shares = scores.lowest(3)
    assert lowest == {(2, 3), (2, 2), (2, 1)}
    assert lowest == {(s, u) for s in range(3) for u in range(4) if shares[s][u] == 1.0}
    assert scores.stable(3).probability == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": None, "n_examples": 1}, "got one example: no standard error"),
        ({"samples": Samples.of(noise(1))}, "got one block of examples: no standard error"),
        ({"samples": None}, "got scores of 'taylor' without them"),
        ({"samples": None, "n_examples": 0}, "got 'taylor', which uses no data"),
    ],
)
def test_no_uncertainty_is_refused_in_words(changes, words):
    scores = scores_of(noise(20), **changes, standard_errors=None)
    for ask in (
        scores.rank_interval,
        lambda: scores.lowest(3),
        lambda: scores.stable(3),
        lambda: scores.interval(FIRST),
    ):
        with pytest.raises(InvalidValue, match=words):
            ask()


def test_what_is_asked_is_checked():
    scores = scores_of(noise(20))
    for k in (0, 12, 2.5, True):
        for ask in (scores.lowest, scores.stable):
            with pytest.raises(InvalidValue, match="must be a count of units from 1 to 11"):
                ask(k)
    with pytest.raises(InvalidValue, match="between 0 and 1"):
        scores.rank_interval(1.0)
    with pytest.raises(InvalidValue, match="between 0 and 1"):
        scores.interval(FIRST, 95)
    with pytest.raises(InvalidValue, match="a count of resamples"):
        scores.lowest(3, draws=0)


# ---------------------------------------------------------------- as `score` gives them


def test_score_passes_samples_on():
    subject = subject_of("bert")
    batches = split(examples_of(subject, 9), 3)
    *drawn, magnitude = score(subject, ["taylor", "leave_one_out", "magnitude"], batches)
    for scores in drawn:
        assert scores.samples.rows == scores.n_examples == 9
        assert_allclose(scores.samples.matrix.mean(0), np.concatenate(scores.values), rtol=1e-12)
    assert (magnitude.samples, magnitude.notes) == (None, ())
    alone = score(subject, "taylor", split(batches[0], 1)[:1])
    assert alone.standard_errors is None
    assert str(alone).count("No standard error") == 1
