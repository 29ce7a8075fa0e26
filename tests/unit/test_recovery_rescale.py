"""head_rescale: the factors of one long system with a row a token and channel; and recipes that
name it or lstsq."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.layouts import registry as layouts
from headprune.recovery import HeadRescale, Lstsq
from tests.laws.support import picture
from tests.reference import recovery as reference
from tests.reference.scores import columns
from tests.unit.test_recovery_lstsq import places_of, pruned, recovered, subject_of


@pytest.mark.parametrize("intercept", ["fold", "drop", "none"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_it_is_the_solution_of_one_long_system(family: str, intercept: Any) -> None:
    subject, batches = subject_of(family)
    site, place = subject.sites[-1], places_of(family, False)[-1]
    mask = subject.without({site.name: site.units[0]})
    model, before = pruned(subject, mask), pruned(subject, mask)
    report = recovered(model, batches, HeadRescale(intercept=intercept, ridge=0.0), subject.model)
    here = next(s for s in hp.find_sites(before) if s.name == site.name)
    slices = [columns(here, head) for head in here.heads]
    factors, extra = reference.rescale(
        before, subject.model, place, slices, batches, intercept != "none"
    )
    old, new = (m.get_submodule(place.projection) for m in (before, model))
    per_channel = torch.from_numpy(np.repeat(factors, site.value_dim))
    assert_close(
        new.weight,
        old.weight * (per_channel[:, None] if family == "gpt2" else per_channel),
        rtol=0,
        atol=1e-8,
    )
    bias = (
        torch.zeros(len(old.weight) if old.bias is None else len(old.bias)).double()
        if old.bias is None
        else old.bias
    )
    if intercept == "fold":
        assert_close(new.bias, bias + torch.from_numpy(extra), rtol=0, atol=1e-8)
        assert len(report.changed) == 2
    else:
        assert (new.bias is None) == (old.bias is None)
        assert old.bias is None or torch.equal(new.bias, old.bias)
        assert report.changed == (f"{place.projection}.weight",)
    assert report.metrics["error_after"] == pytest.approx(
        reference.error(model, subject.model, place, batches)
    )


def test_without_an_intercept_a_later_mean_fold_folds_and_with_one_it_does_not() -> None:
    subject, batches = subject_of("bert")
    for intercept, heads in (
        ("fold", 0),
        ("drop", subject.ragged().n_heads - subject.ragged().n_kept),
    ):
        model = pruned(subject)
        recovered(model, batches, HeadRescale(intercept=intercept), subject.model)  # type: ignore[arg-type]
        assert recovered(model, batches, "mean_fold", subject.model).metrics["heads"] == heads


@pytest.mark.parametrize("intercept", ["fold", "drop"])
def test_a_site_without_heads_gets_its_bias_alone(intercept: Any) -> None:
    subject, batches = subject_of("llama")
    name = subject.sites[1].name
    model = pruned(subject, subject.mask({name: ()}))
    report = recovered(model, batches, HeadRescale(intercept=intercept), subject.model)
    bias = model.get_submodule(name).o_proj.bias
    errors = report.metrics["errors"][f"{name}.o_proj"]
    if intercept == "fold":
        assert errors["after"] < errors["before"]
        assert f"{name}.o_proj.bias" in report.changed
    else:
        assert bias is None
        assert errors["after"] == pytest.approx(errors["before"])
        assert not any(changed.startswith(name) for changed in report.changed)


@pytest.mark.parametrize("method", ["lstsq", "head_rescale"])
def test_an_attention_without_an_output_projection_is_refused(method: str) -> None:
    subject, batches = subject_of("list of heads without output")
    model = pruned(subject)
    before = picture(model)
    with pytest.raises(UnsupportedModel, match="with an output projection"):
        recovered(model, batches, method, subject.model)
    assert picture(model) == before


@pytest.mark.parametrize(
    "settings", [{"ridge": -1.0}, {"intercept": True}, {"precision": "float16"}]
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=f"HeadRescale.{next(iter(settings))}"):
        HeadRescale(**settings)


def test_a_loss_says_how_both_models_are_run() -> None:
    model, batch = layouts.get("gpt2").tiny(0)
    teacher = model.double().eval()
    batch = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    counts = {s.name: s.n_query_heads for s in hp.find_sites(teacher)}
    models = []
    for nested in (False, True):
        models.append(layouts.get("gpt2").tiny(0)[0].double().eval())
        hp.prune_(models[-1], hp.HeadMask.from_keep({next(iter(counts)): [1]}, counts))
        given = [{"inputs": batch}] if nested else [batch]
        loss: Any = (lambda m, b: m(**b["inputs"]).logits.sum(1)) if nested else None
        hp.recover_(models[-1], given, Lstsq(), teacher, loss=loss)
    assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)


def test_a_recipe_names_it(tmp_path: Path) -> None:
    from tests.unit.test_run_runner import bert as saved
    from tests.unit.test_run_runner import quiet_run, recipe

    class Factory:
        def mktemp(self, name: str) -> Path:
            (tmp_path / name).mkdir()
            return tmp_path / name

    folder = saved.__wrapped__(Factory())  # type: ignore[attr-defined]
    steps = [{"method": "lstsq", "settings": {"feed_forward": True}}, {"method": "head_rescale"}]
    record = quiet_run(recipe(folder, tmp_path, recover=steps))
    assert record.status == "done"
    first = record.metrics["recovery"]["0"]
    assert (first["method"], first["rows"], first["projections"]) == ("lstsq", "calibration", 4)
    assert first["error_after"] < first["error_before"]
    assert {"recovered (lstsq)", "recovered (lstsq + head_rescale)"} <= {
        row.name for row in record.quality
    }
    assert [proof.what for proof in record.proofs] == ["outputs", "reload"]
