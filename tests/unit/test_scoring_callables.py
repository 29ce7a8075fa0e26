"""What selectors ask of real models: losses of masks, and scores of what is left of them."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadId, HeadMask
from headprune.model.double import Doubled
from headprune.model.losses import default_loss
from tests.laws.support import Subject, labelled_subject, picture, subject_of

EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(scope="module", params=["bert", "llama", "t5"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return labelled_subject(request.param)


def wide_loss(model: Any, batch: Any) -> Any:
    with Doubled():
        return default_loss(model, batch)


def halves(subject: Subject) -> list[Any]:
    return [
        {k: v[:2] for k, v in subject.batch.items()},
        {k: v[2:] for k, v in subject.batch.items()},
    ]


def masks_of(subject: Subject) -> list[HeadMask]:
    last = subject.sites[-1]
    return [
        subject.ragged(0),
        subject.ragged(1),
        subject.mask({last.name: last.units[0]}),
        subject.mask({}),
    ]


def options(subject: Subject) -> dict[str, Any]:
    return {"loss": wide_loss, "sites": subject.sites, "progress": False}


# ---------------------------------------------------------------- losses


def test_losses_are_those_of_gated_models(subject: Subject) -> None:
    with torch.no_grad():
        base = wide_loss(subject.model, subject.batch)
        expected = []
        for mask in masks_of(subject):
            with hp.gated(subject.model, mask, subject.sites):
                expected.append(wide_loss(subject.model, subject.batch) - base)
    before = picture(subject.model)
    rise = hp.scoring.loss_of(subject.model, iter(halves(subject)), **options(subject))
    for order in ([0, 1, 2, 3], [2, 1], [1]):
        found = rise([masks_of(subject)[i] for i in order])
        assert isinstance(found, np.ndarray)
        assert_allclose(found, torch.stack([expected[i] for i in order]).double(), **EXACT)
    assert picture(subject.model) == before
    assert abs(expected[0]).min() > 1e-4


def test_losses_after_a_recovery_are_those_of_recovered_copies(subject: Subject) -> None:
    def recover(small: Any) -> None:
        with Doubled():
            hp.recover_(
                small,
                halves(subject),
                "mean_fold",
                subject.model,
                loss=wide_loss,
                sites=subject.sites,
            )

    rise = hp.scoring.loss_of(subject.model, halves(subject), after_cut=recover, **options(subject))
    mask = subject.ragged(1)
    small = copy.deepcopy(subject.model)
    hp.prune_(small, mask, sites=subject.sites)
    recover(small)
    with torch.no_grad():
        expected = wide_loss(small, subject.batch) - wide_loss(subject.model, subject.batch)
    assert_allclose(rise([mask])[0], expected.double(), **EXACT)
    plain = hp.scoring.loss_of(subject.model, halves(subject), **options(subject))
    assert abs(plain([mask])[0] - rise([mask])[0]).max() > 1e-6


def test_losses_need_masks_and_the_same_data() -> None:
    subject = subject_of("bert")
    order = iter([0, 1, 1, 0])

    class Shuffled:
        def __iter__(self) -> Any:
            first = next(order)
            return iter([halves(subject)[first], halves(subject)[1 - first]])

    rise = hp.scoring.loss_of(subject.model, Shuffled(), progress=False)
    with pytest.raises(InvalidValue, match="masks: must be at least one"):
        rise([])
    with pytest.raises(InvalidValue, match="the same in every pass"):
        rise([subject.ragged(0)])


# ---------------------------------------------------------------- scores anew


def test_what_is_left_is_scored_without_what_is_gone(subject: Subject) -> None:
    """Against the scores of a model that was pruned by the public verb, for scorers of every
    sort."""
    mask = subject.ragged(1)
    small = copy.deepcopy(subject.model)
    hp.prune_(small, mask, sites=subject.sites)
    left = hp.find_sites(small)
    before = picture(subject.model)
    for scorer in ("fisher", "wanda", "magnitude", "leave_one_out"):
        with Doubled():
            rescore = hp.scoring.rescorer(
                subject.model, iter(halves(subject)), scorer, **options(subject)
            )
            rescore(subject.mask({}))
            found = rescore(mask)
            expected = hp.score(
                small, halves(subject), scorer, loss=wide_loss, sites=left, progress=False
            )
            whole = hp.score(subject.model, halves(subject), scorer, **options(subject))
        assert found.sites == tuple(subject.sites)
        for unit in expected.units():
            assert found[HeadId(unit.name, unit.heads[0])] == pytest.approx(
                unit.value, rel=1e-9, abs=1e-12
            )
        gone = [u for u in found.units() if not set(u.heads) & set(mask.kept(u.name))]
        assert gone
        assert [u.value for u in gone] == [0.0] * len(gone)
        if scorer != "magnitude":
            assert any(
                found.values[u.site][u.unit] != pytest.approx(u.value, rel=1e-3)
                for u in whole.units()
            )
    assert picture(subject.model) == before


def test_curvature_and_errors_have_the_place_of_their_units(subject: Subject) -> None:
    mask = subject.ragged(2)
    with Doubled():
        rescore = hp.scoring.rescorer(subject.model, [subject.batch], "fisher", **options(subject))
        found = rescore(mask)
    assert found.curvature is not None
    assert found.standard_errors is not None
    matrix = found.curvature.matrix
    assert_allclose(np.diag(matrix) / 2, np.concatenate(found.values), rtol=1e-9)
    for unit, (error, row) in zip(
        found.units(),
        zip([e for r in found.standard_errors for e in r], matrix, strict=True),
        strict=True,
    ):
        assert (error > 0) == row.any() == bool(set(unit.heads) & set(mask.kept(unit.name)))


def test_a_recovery_comes_before_the_scores() -> None:
    subject = subject_of("bert")
    seen: list[Any] = []

    def recover(small: Any) -> None:
        seen.append({s.name: s.heads for s in hp.find_sites(small)})
        with torch.no_grad():
            for parameter in small.parameters():
                parameter.mul_(2)

    mask = subject.ragged(0)
    plain = hp.scoring.rescorer(subject.model, [subject.batch], "magnitude", progress=False)
    doubled = hp.scoring.rescorer(
        subject.model, [subject.batch], "magnitude", after_cut=recover, progress=False
    )
    before = [float(p.detach().sum()) for p in subject.model.parameters()]
    ratio = np.array([v for row in doubled(mask).values for v in row if v])
    assert (ratio > 1.5 * np.array([v for row in plain(mask).values for v in row if v])).all()
    assert seen == [{row.site: row.kept for row in mask.rows}]
    assert [float(p.detach().sum()) for p in subject.model.parameters()] == before


def test_scores_anew_need_the_same_data() -> None:
    subject = subject_of("bert")
    order = iter([0, 1])

    class Other:
        def __iter__(self) -> Any:
            return iter([halves(subject)[next(order)]])

    rescore = hp.scoring.rescorer(subject.model, Other(), "taylor", progress=False)
    rescore(subject.mask({}))
    with pytest.raises(InvalidValue, match="the same in every call"):
        rescore(subject.mask({}))
