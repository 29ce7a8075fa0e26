"""What selectors ask of real models: losses of masks, and scores of what is kept of them."""

import copy

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId
from headprune.model.double import Doubled
from tests.laws.support import labelled_subject, picture, subject_of
from tests.scoring_help import score, split, wide_loss

EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(scope="module", params=["llama", "t5"])
def subject(request):
    return labelled_subject(request.param)


class Changing:
    """The same batches, in another order after the first pass."""

    def __init__(self, subject):
        self.batches, self.passes = split(subject.batch, 2), 0

    def __iter__(self):
        self.passes += 1
        return iter(self.batches if self.passes < 2 else self.batches[::-1])


def options(subject):
    return {"loss": wide_loss, "sites": subject.sites, "progress": False}


def pruned(subject, mask):
    small = copy.deepcopy(subject.model)
    hp.prune_(small, mask, sites=subject.sites)
    return small


def test_losses_after_a_recovery_are_those_of_recovered_copies(subject):
    halves, given = split(subject.batch, 2), options(subject)

    def recover(small):
        more = {"loss": wide_loss, "sites": subject.sites}
        with Doubled():
            hp.recover_(small, halves, "mean_fold", subject.model, **more)

    mask = subject.ragged(1)
    small = pruned(subject, mask)
    recover(small)
    with torch.no_grad():
        expected = wide_loss(small, subject.batch) - wide_loss(subject.model, subject.batch)
    found = hp.scoring.loss_of(subject.model, halves, after_cut=recover, **given)([mask])[0]
    plain = hp.scoring.loss_of(subject.model, halves, **given)([mask])[0]
    assert_allclose(found, expected, **EXACT)
    assert abs(plain - found).max() > 1e-6


def test_what_is_kept_is_scored_without_what_is_removed(subject):
    """Against the scores of a model that was pruned by the public verb, for scorers of every
    sort."""
    mask, halves = subject.ragged(1), split(subject.batch, 2)
    small = pruned(subject, mask)
    before = picture(subject.model)
    for scorer in ("wanda", "magnitude", "leave_one_out"):
        with Doubled():
            rescore = hp.scoring.rescorer(subject.model, iter(halves), scorer, **options(subject))
            rescore(subject.mask({}))
            found = rescore(mask)
            expected = hp.score(small, halves, scorer, loss=wide_loss, progress=False)
            whole = score(subject, scorer, halves, **options(subject))
        assert found.sites == tuple(subject.sites)
        kept = {HeadId(u.name, u.heads[0]): u.value for u in expected.units()}
        for head, value in kept.items():
            assert found[head] == pytest.approx(value, rel=1e-9, abs=1e-12)
        removed = [u for u in found.units() if not set(u.heads) & set(mask.kept(u.name))]
        assert removed
        assert not any(u.value for u in removed)
        if scorer != "magnitude":
            assert any(v != pytest.approx(whole[head], rel=1e-3) for head, v in kept.items())
    assert picture(subject.model) == before


def test_curvature_and_errors_have_the_place_of_their_units(subject):
    mask = subject.ragged(2)
    with Doubled():
        rescore = hp.scoring.rescorer(subject.model, [subject.batch], "fisher", **options(subject))
        found = rescore(mask)
    matrix = found.curvature.matrix
    errors = np.concatenate(found.standard_errors)
    assert_allclose(np.diag(matrix) / 2, np.concatenate(found.values), rtol=1e-9)
    for unit, error, row in zip(found.units(), errors, matrix, strict=True):
        assert (error > 0) == row.any() == bool(set(unit.heads) & set(mask.kept(unit.name)))


def test_a_recovery_comes_before_the_scores():
    subject, seen = subject_of("bert"), []
    mask = subject.ragged(0)

    def double_(small):
        seen.append({s.name: s.heads for s in hp.find_sites(small)})
        with torch.no_grad():
            for parameter in small.parameters():
                parameter.mul_(2)

    before = [float(p.detach().sum()) for p in subject.model.parameters()]
    plain, doubled = (
        hp.scoring.rescorer(subject.model, [subject.batch], "magnitude", **more)(mask)
        for more in ({}, {"after_cut": double_})
    )
    assert_allclose(np.concatenate(doubled.values), 4 * np.concatenate(plain.values))
    assert seen == [{row.site: row.kept for row in mask.rows}]
    assert [float(p.detach().sum()) for p in subject.model.parameters()] == before


def test_the_data_must_be_the_same_in_every_pass():
    subject = subject_of("bert")
    rise = hp.scoring.loss_of(subject.model, Changing(subject), progress=False)
    with pytest.raises(InvalidValue, match="masks: must be at least one"):
        rise([])
    with pytest.raises(InvalidValue, match="the same in every pass"):
        rise([subject.ragged(0)])
    rescore = hp.scoring.rescorer(subject.model, Changing(subject), "taylor", progress=False)
    rescore(subject.mask({}))
    with pytest.raises(InvalidValue, match="the same in every call"):
        rescore(subject.mask({}))
