"""The curvature of scores: what fisher and ggn supply, how it is kept, and how it follows its
units."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from headprune.model.losses import default_loss
from headprune.scoring import Fisher, Ggn, Stable, fisher_matrix, ggn_matrix
from headprune.selection._groups import part
from headprune.selection._units import bundled
from tests.laws.support import Subject, labelled_subject, subject_of
from tests.selection_problems import make, site

EXACT = {"rtol": 1e-9, "atol": 1e-12}
SITES = (
    site("first", 3, kind="self"),
    site("second", 4, 2, kind="cross"),
    site("third", 2, kind="self"),
)
N_UNITS = 7


def wide_loss(model: Any, batch: Any) -> Any:
    with Doubled():
        return default_loss(model, batch)


def bent(seed: int = 0, n: int = N_UNITS) -> Any:
    rows = np.random.default_rng(seed).normal(size=(20, n))
    return rows.T @ rows / 20


def scores_of(matrix: Any, sites: Any = SITES) -> HeadScores:
    values = np.split(np.diag(matrix) / 2, np.cumsum([len(s.units) for s in sites])[:-1])
    return replace(make(sites, values), curvature=Curvature.of(matrix))


# ---------------------------------------------------------------- what scorers supply


@pytest.fixture(scope="module", params=["bert", "llama", "t5"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return labelled_subject(request.param)


def test_half_its_diagonal_are_the_scores_and_the_whole_is_the_matrix(subject: Subject) -> None:
    halves = [
        {k: v[:2] for k, v in subject.batch.items()},
        {k: v[2:] for k, v in subject.batch.items()},
    ]
    options: dict[str, Any] = {"sites": subject.sites, "progress": False}
    with Doubled():
        fisher = hp.score(subject.model, halves, "fisher", loss=wide_loss, **options)
        ggn = hp.score(subject.model, halves, "ggn", **options)
        matrices = (
            fisher_matrix(subject.model, [subject.batch], wide_loss, subject.sites),
            ggn_matrix(subject.model, [subject.batch], subject.sites),
        )
    for scores, matrix in zip((fisher, ggn), matrices, strict=True):
        assert scores.curvature is not None
        assert_allclose(scores.curvature.matrix, matrix, **EXACT)
        assert_allclose(
            np.diag(scores.curvature.matrix) / 2, np.concatenate(scores.values), **EXACT
        )
        off = scores.curvature.matrix - np.diag(np.diag(scores.curvature.matrix))
        assert np.abs(off).max() > 1e-3 * np.abs(scores.curvature.matrix).max()


def test_blocks_of_examples_are_those_of_the_scores() -> None:
    subject = subject_of("bert")
    scores = hp.score(subject.model, [subject.batch], Fisher(block=2), progress=False)
    assert scores.curvature is not None
    assert_allclose(np.diag(scores.curvature.matrix) / 2, np.concatenate(scores.values), **EXACT)
    single = hp.score(subject.model, [subject.batch], "fisher", progress=False)
    assert single.curvature != scores.curvature


def test_it_rests_on_the_examples_that_were_read() -> None:
    subject = subject_of("bert")
    batch = {k: v[:2] for k, v in subject.batch.items()}
    batches = [batch] * 5
    read = hp.score(subject.model, batches, Ggn(), until=Stable(3, first=4), progress=False)
    whole = hp.score(subject.model, batches, Ggn(), progress=False)
    assert read.curvature is not None
    assert whole.curvature is not None
    assert read.n_examples == 10
    assert_allclose(read.curvature.matrix, whole.curvature.matrix, **EXACT)


def test_too_large_a_matrix_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("bert")
    n_units = sum(len(s.units) for s in subject.sites)
    monkeypatch.setattr(samples_module, "LIMIT", 8 * n_units**2 - 1)
    for scores in hp.score(subject.model, [subject.batch], ["fisher", "ggn"], progress=False):
        assert scores.curvature is None
        assert any(f"curvature of {n_units} units is left out" in note for note in scores.notes)
        with pytest.raises(InvalidValue, match=r"carry their curvature.*is left out: above"):
            hp.select(scores, hp.Budget(keep_heads=0.5), "quadratic")
    with pytest.raises(InvalidValue, match="curvature: must be of at most"):
        Curvature.of(np.eye(n_units))


# ---------------------------------------------------------------- how it is kept


def test_it_comes_back_from_beside_the_file(tmp_path: Path) -> None:
    scores = scores_of(bent())
    path = scores.save(tmp_path / "a.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.curvature.safetensors", "a.json"]
    loaded = HeadScores.load(path)
    assert (loaded, hash(loaded), loaded.digest) == (scores, hash(scores), scores.digest)
    assert loaded.curvature is not None
    assert_allclose(loaded.curvature.matrix, bent(), **EXACT)
    assert (
        pickle.loads(pickle.dumps(loaded)).curvature.matrix.tolist()
        == loaded.curvature.matrix.tolist()
    )
    budget = hp.Budget(keep_heads=0.6)
    assert hp.select(loaded, budget, "quadratic") == hp.select(scores, budget, "quadratic")


def test_another_curvature_makes_other_scores() -> None:
    scores, other = scores_of(bent()), replace(scores_of(bent()), curvature=Curvature.of(bent(1)))
    assert scores != other
    assert scores.digest != other.digest
    assert scores != replace(scores, curvature=None)
    with pytest.raises(ValueError, match="read-only"):
        scores.curvature.matrix[0, 0] = 1.0  # type: ignore[union-attr]


def test_without_its_file_only_what_needs_it_fails(tmp_path: Path) -> None:
    path = scores_of(bent()).save(tmp_path / "a.json")
    (tmp_path / "a.curvature.safetensors").unlink()
    loaded, budget = HeadScores.load(path), hp.Budget(keep_heads=0.6)
    assert hp.select(loaded, budget).mask.n_kept <= 6
    assert hp.select(loaded, {"cross": budget}).mask.n_kept == 7
    with pytest.raises(
        InvalidValue,
        match=r"a\.curvature\.safetensors: must be there with the curvature.*no such file",
    ):
        hp.select(loaded, budget, "quadratic")
    with pytest.raises(InvalidValue, match=r"carry their curvature.*no such file"):
        hp.select(loaded, {"cross": budget}, "quadratic")
    assert "no such file" in loaded.of("cross").notes[-1]
    with pytest.warns(UserWarning, match=r"written without curvature.*no such file"):
        loaded.save(tmp_path / "b.json")
    assert (
        hp.select(loaded, {"cross": budget}).notes
        == hp.select(scores_of(bent()), {"cross": budget}).notes
    )


def test_files_from_before_there_was_one_still_load(tmp_path: Path) -> None:
    old = json.loads(replace(scores_of(bent()), curvature=None).to_json())
    del old["curvature"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert HeadScores.load(tmp_path / "old.json").curvature is None


def test_what_is_no_curvature_is_refused() -> None:
    for wrong, words in [
        (np.ones((2, 3)), r"a matrix \[units, units\]"),
        (np.array([[1.0, 2.0], [0.0, 1.0]]), "symmetric"),
        (np.array([[np.nan]]), "finite"),
    ]:
        with pytest.raises(InvalidValue, match=words):
            Curvature.of(wrong)
    with pytest.raises(InvalidValue, match=r"one row and column per unit, 7, got 6"):
        replace(scores_of(bent()), curvature=Curvature.of(bent(n=6)))


# ---------------------------------------------------------------- how it follows its units


def test_some_sites_have_their_rows_and_columns() -> None:
    scores = scores_of(bent())
    own = [0, 1, 2, 5, 6]
    assert_allclose(scores.of("self").curvature.matrix, bent()[np.ix_(own, own)], **EXACT)  # type: ignore[union-attr]
    assert_allclose(part(scores, [0, 2]).curvature.matrix, bent()[np.ix_(own, own)], **EXACT)  # type: ignore[union-attr]


def test_bundles_have_the_form_of_their_heads() -> None:
    sites = (site("a", 4, 2, policy="balanced"), site("b", 3))
    matrix = bent(2, 7)
    found = bundled(scores_of(matrix, sites))
    assert found.curvature is not None
    flat = [HeadId(s.name, h) for s in sites for u in s.units for h in u]
    for gone in ([0], [1], [0, 1], [1, 3], [0, 2, 4]):
        units = [u for i, u in enumerate(found.units()) if i in gone]
        heads = {HeadId(u.name, h) for u in units for h in u.heads}
        r, few = (
            np.array([h in heads for h in flat], float),
            np.isin(np.arange(5), gone).astype(float),
        )
        assert len(heads) > len(gone) or set(gone) <= {2, 3, 4}
        assert_allclose(few @ found.curvature.matrix @ few, r @ matrix @ r, **EXACT)


@pytest.mark.parametrize("name", ["ggn", "surgeon"])
def test_short_texts_are_scored_as_if_padded(name: str) -> None:
    """A text of one token predicts nothing, one of two tokens as much alone as beside longer
    ones."""
    from headprune.layouts import registry

    model, batch = registry.get("llama").tiny(0)
    ids = batch["input_ids"]

    def scored(*lengths: int, width: int | None = None) -> HeadScores:
        batches = []
        for row, length in zip(ids, lengths, strict=False):
            row = row[: width or length].clone()[None]
            batches.append(
                {
                    "input_ids": row,
                    "attention_mask": (torch.arange(row.shape[1])[None] < length).long(),
                }
            )
        found = hp.score(model.double(), batches, name, progress=False)
        assert isinstance(found, HeadScores)
        return found

    alone, padded = scored(2, 1, 2), scored(2, 1, 2, width=7)
    assert_allclose(
        np.concatenate(alone.values), np.concatenate(padded.values), rtol=1e-8, atol=1e-12
    )
    assert max(map(max, alone.values)) > 0
    nothing = scored(1, 1)
    assert not any(map(any, nothing.values))
