"""Samples behind scores: how they are kept, and the intervals, ranks and sets that are drawn from
them."""

from __future__ import annotations

import copy
import json
import math
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import headprune as hp
from headprune.core import samples as samples_module
from headprune.core.arrays import packed
from headprune.core.codec import EMPTY
from headprune.core.errors import InvalidValue, UnknownName
from headprune.core.heads import AttentionSite, HeadId
from headprune.core.samples import Samples
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.model.losses import default_loss
from tests.laws.support import as_double, subject_of

KINDS = ("self", "causal", "cross")
SITES = tuple(
    AttentionSite(f"{kind}.attention", "t5", kind, 4, 4, 8, 8, (0, 1, 2, 3)) for kind in KINDS
)


def scores_of(matrix: Any, sites: tuple[AttentionSite, ...] = SITES, **changes: Any) -> HeadScores:
    matrix = np.asarray(matrix, dtype=np.float64)
    n, sizes = len(matrix), [len(s.units) for s in sites]
    errors = matrix.std(0, ddof=1) / n**0.5 if n > 1 else None

    def rows(flat: Any) -> Any:
        return tuple(tuple(map(float, part)) for part in np.split(flat, np.cumsum(sizes)[:-1]))

    made = HeadScores(
        sites,
        rows(matrix.mean(0)),
        None if errors is None else rows(errors),
        "taylor",
        EMPTY,
        n,
        ModelFingerprint("s", "w"),
        "data",
        samples=Samples.of(matrix),
    )
    return replace(made, **changes)


def noise(n: int, gaps: float = 1.0, seed: int = 0) -> Any:
    """Twelve units in the order of their place, ``gaps`` standard deviations apart."""
    return np.random.default_rng(seed).normal(size=(n, 12)) + gaps * np.arange(12)


# ---------------------------------------------------------------- how they are kept


def test_samples_come_back_from_beside_the_file(tmp_path: Path) -> None:
    scores = scores_of(noise(20), notes=("a note",))
    path = scores.save(tmp_path / "a.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.samples.safetensors"]
    loaded = HeadScores.load(path)
    assert (loaded, hash(loaded), loaded.digest) == (scores, hash(scores), scores.digest)
    assert loaded.samples is not None
    assert (loaded.samples.matrix == noise(20)).all()
    assert loaded.rank_interval() == scores.rank_interval()
    assert pickle.loads(pickle.dumps(loaded)).lowest(3) == copy.deepcopy(scores).lowest(3)
    assert "a note" in str(loaded)
    assert "a note" in loaded.__rich__()
    assert "a note" in loaded._repr_html_()


def test_samples_are_found_by_their_hash_when_a_file_was_renamed(tmp_path: Path) -> None:
    first, second = scores_of(noise(20)), scores_of(noise(20, seed=1))
    first.save(tmp_path / "a.json")
    second.save(tmp_path / "b.json").rename(tmp_path / "c.json")
    loaded = HeadScores.load(tmp_path / "c.json")
    assert loaded.lowest(3) == second.lowest(3) != first.lowest(3)


def test_files_with_and_without_an_ending_have_samples_of_their_own(tmp_path: Path) -> None:
    first, second = scores_of(noise(20)), scores_of(noise(20, seed=1))
    first.save(tmp_path / "x")
    second.save(tmp_path / "x.json")
    for name, scores in (("x", first), ("x.json", second)):
        loaded = HeadScores.load(tmp_path / name)
        assert loaded.samples is not None
        assert (loaded.samples.matrix == scores.samples.matrix).all()  # type: ignore[union-attr]


def test_a_record_finds_the_samples_of_its_scores(tmp_path: Path) -> None:
    scores = scores_of(noise(20))
    scores.save(tmp_path / "scores.json")
    hp.RunRecord("run", "done", "save", "now", scores=scores).save(tmp_path / "record.json")
    loaded = hp.RunRecord.load(tmp_path / "record.json").scores
    assert loaded is not None
    assert loaded.lowest(3) == scores.lowest(3)


def test_other_numbers_make_other_scores() -> None:
    scores = scores_of(noise(20))
    other = replace(scores, samples=Samples.of(noise(20)[::-1]))
    assert scores != other
    assert scores.digest != other.digest
    assert scores == replace(scores, samples=Samples.of(noise(20)))
    with pytest.raises(ValueError, match="read-only"):
        scores.samples.matrix[0, 0] = 1.0  # type: ignore[union-attr]


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _others(folder: Path) -> Path:
    return scores_of(noise(5)).save(folder / "a.json").with_name("a.samples.safetensors")


def test_scores_stay_usable_without_the_file(tmp_path: Path) -> None:
    scores = scores_of(noise(20))
    path, beside = scores.save(tmp_path / "a.json"), tmp_path / "a.samples.safetensors"
    for spoil, words in (
        (damaged, "a damaged file"),
        (lambda p: p.write_bytes(b"{}"), "a damaged file"),
        (lambda p: shutil.copy(_others(tmp_path / "others"), p), "the numbers of other scores"),
        (lambda p: _in_single_precision(p, scores), "a damaged file"),
        (Path.unlink, "no such file"),
    ):
        spoil(beside)
        loaded = HeadScores.load(path)
        assert loaded == scores
        assert hp.select(loaded, hp.Budget(keep_heads=0.5)).scores == scores.digest
        assert hp.select(loaded, {"cross": hp.Budget(keep_heads=0.5)}).mask.n_kept == 10
        assert loaded.interval(HeadId("self.attention", 0)) == scores.interval(
            HeadId("self.attention", 0)
        )
        with pytest.raises(
            InvalidValue, match=rf"a\.samples\.safetensors: must be there .* got {words}"
        ):
            loaded.stable(6)
    alone = loaded.of("cross")
    assert alone.samples is None
    assert "no such file" in alone.notes[-1]
    with pytest.warns(UserWarning, match=r"written without per-example numbers.*no such file"):
        loaded.save(tmp_path / "elsewhere" / "b.json")
    assert HeadScores.load(tmp_path / "elsewhere" / "b.json") == scores


def _in_single_precision(path: Path, scores: HeadScores) -> None:
    """Under the hash of the numbers in double precision."""
    assert scores.samples is not None
    matrix = scores.samples.matrix.astype(np.float32)
    path.write_bytes(packed({"samples": matrix}, {"sha256": scores.samples.sha256}))


def test_text_alone_has_no_numbers() -> None:
    scores = scores_of(noise(20))
    read = HeadScores.from_json(scores.to_json())
    assert read == scores
    with pytest.raises(InvalidValue, match=r"come from no file\. .*HeadScores\.load"):
        read.lowest(2)


def test_files_from_before_there_were_samples_still_load(tmp_path: Path) -> None:
    old = json.loads(replace(scores_of(noise(20)), samples=None).to_json())
    del old["samples"], old["notes"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    loaded = HeadScores.load(tmp_path / "old.json")
    assert (loaded.samples, loaded.notes, loaded.n_examples) == (None, (), 20)
    assert loaded.interval(HeadId("self.attention", 0))[0] < loaded[HeadId("self.attention", 0)]
    with pytest.raises(
        InvalidValue, match=r"HeadScores\.rank_interval: .*scores of 'taylor' without them"
    ):
        loaded.rank_interval()


def test_samples_are_one_finite_column_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidValue, match=r"HeadScores\.samples: must be one column per unit, 12, got 11"
    ):
        scores_of(noise(20), samples=Samples.of(noise(20)[:, 1:]))
    for bad, words in (
        ([1.0], "a matrix"),
        (np.ones((0, 3)), "a matrix"),
        ([[math.nan]], "finite"),
    ):
        with pytest.raises(InvalidValue, match=words):
            Samples.of(bad)
    monkeypatch.setattr(samples_module, "LIMIT", 12 * 8 * 8)
    kept = Samples.of(noise(20))
    assert (kept.rows, kept.units) == (6, 12)
    assert_allclose(kept.matrix, noise(20)[:18].reshape(6, 3, 12).mean(1))


def test_the_parts_of_an_encoder_decoder_stand_alone() -> None:
    scores = scores_of(noise(20))
    for index, kind in enumerate(KINDS):
        part = scores.of(kind)
        assert [s.kind for s in part.sites] == [kind]
        assert part.values == scores.values[index : index + 1]
        assert part.standard_errors == scores.standard_errors[index : index + 1]  # type: ignore[index]
        assert (part.samples.matrix == noise(20)[:, 4 * index : 4 * index + 4]).all()  # type: ignore[union-attr]
    assert scores.of("*attention") == scores
    assert scores.of("c*").sites == SITES[1:]
    with pytest.raises(UnknownName, match=r"HeadScores\.of: .*got 'crosss'\. Did you mean 'cross'"):
        scores.of("crosss")
    with pytest.raises(UnknownName, match=r"got 'cross'\. The scored sites are of kind self\."):
        scores.of("self").of("cross")


# ---------------------------------------------------------------- what they say


def test_intervals_are_students() -> None:
    scores = scores_of(noise(9))
    column = noise(9)[:, 0]
    low, high = scores.interval(HeadId("self.attention", 0))
    # 2.306 is the 97.5 % quantile of Student's t with 8 degrees of freedom in any table.
    width = 2.306004 * column.std(ddof=1) / 3
    assert_allclose([low, high], [column.mean() - width, column.mean() + width], rtol=1e-6)
    narrow = scores.interval(HeadId("self.attention", 0), confidence=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_resampling_is_efrons() -> None:
    """Against a loop over draws that ranks by sorting; the share of a unit in the lowest has a
    known error."""
    matrix = noise(15, gaps=0.3)
    scores = scores_of(matrix)
    rng = np.random.default_rng(7)
    draws = [matrix[rng.integers(15, size=15)].mean(0) for _ in range(2000)]
    slow = np.mean([np.isin(np.arange(12), np.argsort(d)[:5]) for d in draws], axis=0)
    fast = np.array(scores.lowest(5, draws=2000)).ravel()
    assert fast.sum() == pytest.approx(5)
    assert 0.05 < fast[4] < 0.95, "a unit at the border is undecided, or the test shows little"
    # The difference of two shares of 2000 draws has a standard deviation of at most 0.016.
    assert_allclose(fast, slow, atol=0.06)
    ranks = np.array([12 - np.argsort(np.argsort(d)) for d in draws])
    bounds = np.array(scores.rank_interval(draws=2000)).reshape(12, 2)
    assert_allclose(bounds, np.quantile(ranks, [0.025, 0.975], axis=0).T, atol=1)
    assert scores.lowest(5, seed=1) == scores.lowest(5, seed=1) != scores.lowest(5, seed=2)


def test_many_rows_are_resampled_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of resamples have the standard error that the formula gives."""
    from headprune.core import uncertainty

    monkeypatch.setattr(uncertainty, "_STEP", 100 * 40)
    scores = scores_of(noise(40))
    drawn = uncertainty.resampled(scores, 1030, 0, "test")
    assert drawn.shape == (1030, 12)
    assert_allclose(drawn.mean(0), noise(40).mean(0), atol=0.02)
    assert_allclose(drawn.std(0), noise(40).std(0) / 40**0.5, rtol=0.12)


def test_scores_that_are_no_mean_are_resampled_around_themselves() -> None:
    """Pseudo-values of a jackknife have another mean than the score."""
    scores = scores_of(noise(20), values=tuple((10.0 + r, 20.0, 30.0, 40.0) for r in range(3)))
    from headprune.core.uncertainty import resampled

    assert_allclose(resampled(scores, 500, 0, "test").mean(0)[:2], [10.0, 20.0], atol=0.1)


def test_errors_beside_the_choice_of_examples_are_counted() -> None:
    """A standard error of twice that of the rows: a scorer that draws more than examples."""
    from headprune.core.uncertainty import resampled

    plain = scores_of(noise(40))
    doubled = replace(
        plain, standard_errors=tuple(tuple(2 * e for e in r) for r in plain.standard_errors or ())
    )
    spread = [resampled(s, 2000, 0, "test").std(0) for s in (plain, doubled)]
    assert_allclose(spread[1], 2 * spread[0], rtol=0.1)


def test_one_row_a_block_is_enough() -> None:
    scores = scores_of(noise(8, gaps=3.0), n_examples=800)
    assert scores.stable(6)
    assert scores.interval(HeadId("self.attention", 0))[0] < scores.values[0][0]


def test_well_separated_units_are_settled() -> None:
    found = scores_of(noise(30, gaps=3.0)).stable(5)
    assert found
    assert (found.probability, len(found.surely_in), len(found.surely_out), found.undecided) == (
        1.0,
        5,
        7,
        (),
    )
    assert [u.name for u in found.surely_in] == ["self.attention"] * 4 + ["causal.attention"]
    assert scores_of(noise(30, gaps=3.0)).rank_interval()[0][0] == (12, 12)
    assert scores_of(noise(30, gaps=3.0)).rank_interval()[2][3] == (1, 1)


def test_units_that_are_alike_are_not() -> None:
    found = scores_of(noise(30, gaps=0.05)).stable(5)
    assert not found
    assert found.probability < 0.5
    assert len(found.surely_in) + len(found.surely_out) + len(found.undecided) == 12
    assert "among them in" in str(found)
    assert f"{found.probability:.1%}" in str(found)


def test_ties_fall_as_in_ranked() -> None:
    """Constant columns that tie: the later unit is the lower one, in every resample as in the
    scores."""
    scores = scores_of(np.ones((10, 12)))
    own = {(u.site, u.unit) for u in scores.ranked()[:3]}
    shares = scores.lowest(3)
    assert (
        {(s, u) for s in range(3) for u in range(4) if shares[s][u] == 1.0}
        == own
        == {(2, 3), (2, 2), (2, 1)}
    )
    assert scores.stable(3).probability == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"samples": None, "n_examples": 1, "standard_errors": None},
            "got one example: no standard error",
        ),
        (
            {"samples": Samples.of(noise(1)), "standard_errors": None},
            "got one block of examples: no standard error",
        ),
        ({"samples": None, "standard_errors": None}, "got scores of 'taylor' without them"),
        (
            {"samples": None, "n_examples": 0, "standard_errors": None},
            "got 'taylor', which uses no data",
        ),
    ],
)
def test_no_uncertainty_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    scores = scores_of(noise(20), **changes)
    for ask in (scores.rank_interval, lambda: scores.lowest(3), lambda: scores.stable(3)):
        with pytest.raises(InvalidValue, match=words):
            ask()
    with pytest.raises(InvalidValue, match=words):
        scores.interval(HeadId("self.attention", 0))


@pytest.mark.parametrize("k", [0, 12, -1, 2.5, True])
def test_k_splits_the_units(k: Any) -> None:
    for ask in (scores_of(noise(20)).lowest, scores_of(noise(20)).stable):
        with pytest.raises(InvalidValue, match=r"\(k=\): must be a count of units from 1 to 11"):
            ask(k)


def test_confidence_and_draws_are_checked() -> None:
    scores = scores_of(noise(20))
    for ask in (
        lambda: scores.rank_interval(1.0),
        lambda: scores.interval(HeadId("self.attention", 0), 95),
    ):
        with pytest.raises(InvalidValue, match="between 0 and 1"):
            ask()
    with pytest.raises(InvalidValue, match="a count of resamples"):
        scores.lowest(3, draws=0)


# ---------------------------------------------------------------- as `score` gives them


def test_score_passes_samples_and_notes_on() -> None:
    subject = subject_of("bert")
    data = [as_double(subject.layout.tiny(seed)[1]) for seed in range(3)]
    found = hp.score(subject.model, data, ["taylor", "leave_one_out", "magnitude"], progress=False)
    for scores in found[:2]:
        assert scores.samples is not None
        assert scores.samples.rows == scores.n_examples == 9
        assert_allclose(scores.samples.matrix.mean(0), np.concatenate(scores.values), rtol=1e-12)
    assert (found[2].samples, found[2].notes) == (None, ())
    alone = hp.score(subject.model, [{k: v[:1] for k, v in data[0].items()}], progress=False)
    assert alone.standard_errors is None
    assert sum("No standard error" in note for note in alone.notes) == 1
    assert "No standard error" in str(alone)


@pytest.mark.parametrize("scorer", ["taylor", "leave_one_out"])
def test_intervals_hold_the_full_data_value(scorer: str) -> None:
    """2,000 resamples of 60 examples, the 95 % intervals of all heads together: 93 to 97 % hold the
    mean of all."""
    subject = subject_of("bert")
    data = [as_double(subject.layout.tiny(seed)[1]) for seed in range(20)]
    scores = hp.score(subject.model, data, scorer, loss=default_loss, progress=False)
    assert scores.samples is not None
    matrix, rng = scores.samples.matrix, np.random.default_rng(0)
    assert len(matrix) == 60
    truth, held = matrix.mean(0), []
    heads = [HeadId(u.name, u.heads[0]) for u in scores.units()]
    # The class's own interval on a few resamples, and the same formula at once on all of them.
    for draw in range(2000):
        rows = matrix[rng.integers(60, size=60)]
        width = (
            2.000995 * rows.std(0, ddof=1) / 60**0.5
        )  # Student's 97.5 % quantile, 59 degrees of freedom
        held.append(np.abs(rows.mean(0) - truth) <= width)
        if draw < 3:
            redone = scores_of(rows, scores.sites)
            bounds = np.array([redone.interval(head) for head in heads])
            assert_allclose(bounds[:, 1] - bounds[:, 0], 2 * width, rtol=1e-6)
            assert (((bounds[:, 0] <= truth) & (truth <= bounds[:, 1])) == held[-1]).all()
    assert 0.93 <= np.mean(held) <= 0.97


def test_global_random_states_are_left_alone() -> None:
    """Resampling leaves NumPy's and torch's global random states alone."""
    before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index]
    scores_of(noise(20)).stable(3)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]
    torch.testing.assert_close(torch.get_rng_state(), torch_before)
