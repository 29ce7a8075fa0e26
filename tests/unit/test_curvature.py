"""The curvature of scores: what fisher and ggn supply, how it is kept, and how it follows its
units."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import headprune as hp
from headprune.core import samples as samples_module
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId
from headprune.core.samples import Curvature
from headprune.core.scores import HeadScores
from headprune.model.double import Doubled
from headprune.scoring import Fisher, fisher_matrix, ggn_matrix
from headprune.selection._groups import scores_of_sites
from headprune.selection._units import bundled
from tests.laws.support import labelled_subject, subject_of
from tests.scoring_help import score, split, wide_loss
from tests.selection_problems import make, site

EXACT = {"rtol": 1e-9, "atol": 1e-12}
SITES = (
    site("first", 3, kind="self"),
    site("second", 4, 2, kind="cross"),
    site("third", 2, kind="self"),
)
SOME = hp.Budget(keep_heads=0.6)


def bent(seed=0, n=7):
    rows = np.random.default_rng(seed).normal(size=(20, n))
    return rows.T @ rows / 20


def scores_of(matrix, sites=SITES):
    values = np.split(np.diag(matrix) / 2, np.cumsum([len(s.units) for s in sites])[:-1])
    return replace(make(sites, values), curvature=Curvature.of(matrix))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_half_its_diagonal_are_the_scores_and_the_whole_is_the_matrix(name):
    subject = labelled_subject(name)
    halves = split(subject.batch, 2)
    with Doubled():
        fisher = score(subject, "fisher", halves, loss=wide_loss)
        blocks = score(subject, Fisher(block=2), halves, loss=wide_loss)
        ggn = score(subject, "ggn", halves)
        expected = (
            fisher_matrix(subject.model, halves, wide_loss),
            ggn_matrix(subject.model, halves),
        )
    for scores, matrix in zip((fisher, ggn), expected, strict=True):
        assert_allclose(scores.curvature.matrix, matrix, **EXACT)
        off = matrix - torch.diag(matrix.diagonal())
        assert off.abs().max() > 1e-3 * matrix.abs().max()
    assert blocks.curvature != fisher.curvature
    for scores in (fisher, blocks, ggn):
        diagonal = np.diag(scores.curvature.matrix)
        assert_allclose(diagonal / 2, np.concatenate(scores.values), **EXACT)


def test_too_large_a_matrix_is_not_kept_and_that_is_said(monkeypatch):
    subject = subject_of("bert")
    monkeypatch.setattr(samples_module, "LIMIT", 8 * 12**2 - 1)
    for scores in score(subject, ["fisher", "ggn"]):
        assert scores.curvature is None
        assert any("curvature of 12 units is left out" in note for note in scores.notes)
        with pytest.raises(InvalidValue, match=r"carry their curvature.*is left out: above"):
            hp.select(scores, SOME, "quadratic")
    with pytest.raises(InvalidValue, match="curvature: must be of at most"):
        Curvature.of(np.eye(12))


@pytest.mark.parametrize("name", ["ggn", "surgeon"])
def test_short_texts_are_scored_as_if_padded(name):
    """A text of one token predicts nothing, one of two tokens as much alone as beside longer
    ones."""
    model, batch = hp.layouts.registry.get("llama").tiny(0)
    model.double()

    def scored(*lengths, width=None):
        batches = []
        for row, length in zip(batch["input_ids"], lengths, strict=False):
            ids = row[: width or length].clone()[None]
            mask = (torch.arange(ids.shape[1])[None] < length).long()
            batches.append({"input_ids": ids, "attention_mask": mask})
        return np.concatenate(hp.score(model, batches, name, progress=False).values)

    alone, padded = scored(2, 1, 2), scored(2, 1, 2, width=7)
    assert_allclose(alone, padded, rtol=1e-8, atol=1e-12)
    assert alone.max() > 0
    assert not scored(1, 1).any()


def test_it_comes_back_from_beside_the_file(tmp_path):
    scores = scores_of(bent())
    path = scores.save(tmp_path / "a.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.curvature.safetensors", "a.json"]
    loaded = HeadScores.load(path)
    assert (loaded, hash(loaded), loaded.digest) == (scores, hash(scores), scores.digest)
    other = replace(scores, curvature=Curvature.of(bent(1)))
    assert scores != other
    assert scores.digest != other.digest
    for copied in (loaded, pickle.loads(pickle.dumps(loaded))):
        assert_allclose(copied.curvature.matrix, bent(), **EXACT)
    assert hp.select(loaded, SOME, "quadratic") == hp.select(scores, SOME, "quadratic")


def test_without_its_file_only_what_needs_it_fails(tmp_path):
    path = scores_of(bent()).save(tmp_path / "a.json")
    (tmp_path / "a.curvature.safetensors").unlink()
    loaded = HeadScores.load(path)
    assert hp.select(loaded, SOME).mask.n_kept <= 6
    by_kind = hp.select(loaded, {"cross": SOME})
    assert by_kind.mask.n_kept == 7
    assert by_kind.notes == hp.select(scores_of(bent()), {"cross": SOME}).notes
    with pytest.raises(InvalidValue, match=r"a\.curvature\.safetensors: must be .*no such file"):
        hp.select(loaded, SOME, "quadratic")
    with pytest.raises(InvalidValue, match=r"carry their curvature.*no such file"):
        hp.select(loaded, {"cross": SOME}, "quadratic")
    assert "no such file" in loaded.of("cross").notes[-1]
    with pytest.warns(UserWarning, match=r"written without curvature.*no such file"):
        loaded.save(tmp_path / "b.json")


def test_what_is_no_curvature_is_refused():
    for wrong, words in (
        (np.ones((2, 3)), r"a matrix \[units, units\]"),
        (np.array([[1.0, 2.0], [0.0, 1.0]]), "symmetric"),
        (np.array([[np.nan]]), "finite"),
    ):
        with pytest.raises(InvalidValue, match=words):
            Curvature.of(wrong)
    with pytest.raises(InvalidValue, match=r"one row and column per unit, 7, got 6"):
        replace(scores_of(bent()), curvature=Curvature.of(bent(n=6)))


def test_some_sites_have_their_rows_and_columns():
    scores, own = scores_of(bent()), np.ix_([0, 1, 2, 5, 6], [0, 1, 2, 5, 6])
    for some in (scores.of("self"), scores_of_sites(scores, [0, 2])):
        assert_allclose(some.curvature.matrix, bent()[own], **EXACT)


def test_bundles_have_the_form_of_their_heads():
    sites = (site("a", 4, 2, policy="balanced"), site("b", 3))
    matrix = bent(2, 7)
    found = bundled(scores_of(matrix, sites))
    flat = [HeadId(s.name, h) for s in sites for u in s.units for h in u]
    for removed in ([0], [0, 1], [1, 3], [0, 2, 4]):
        units = [u for i, u in enumerate(found.units()) if i in removed]
        heads = {HeadId(u.name, h) for u in units for h in u.heads}
        r = np.array([h in heads for h in flat], float)
        few = np.isin(np.arange(5), removed).astype(float)
        assert_allclose(few @ found.curvature.matrix @ few, r @ matrix @ r, **EXACT)
