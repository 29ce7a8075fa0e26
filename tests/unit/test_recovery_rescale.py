"""head_rescale: the factors of one long system with a row a token and channel; and recipes that
name it or lstsq."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import UnsupportedModel
from headprune.recipes.validate import RecipeError
from headprune.recovery import HeadRescale
from headprune.run import runner
from tests.laws.support import unchanged
from tests.reference import recovery as reference
from tests.reference.scores import columns
from tests.unit.test_recovery_lstsq import places_of, pruned, recovered, subject_of
from tests.unit.test_run_gradual import recipe as checked


@pytest.mark.parametrize(
    ("family", "intercept"), [("bert", "fold"), ("gpt2", "none"), ("llama", "drop")]
)
def test_it_is_the_solution_of_one_long_system(family, intercept):
    subject, batches = subject_of(family)
    site, place = subject.sites[-1], places_of(family, False)[-1]
    mask = subject.without({site.name: site.units[0]})
    model, before = pruned(subject, mask), pruned(subject, mask)
    report = recovered(model, batches, HeadRescale(intercept=intercept, ridge=0.0), subject.model)
    here = next(s for s in hp.find_sites(before) if s.name == site.name)
    slices = [columns(here, head) for head in here.heads]
    with_one = intercept != "none"
    factors, extra = reference.rescale(
        before, subject.model, place, slices, batches, intercept=with_one
    )
    old, new = (m.get_submodule(place.projection) for m in (before, model))
    by_channel = torch.from_numpy(np.repeat(factors, site.value_dim))
    by_channel = by_channel[:, None] if family == "gpt2" else by_channel
    assert_close(new.weight, old.weight * by_channel, rtol=0, atol=1e-8)
    if intercept == "fold":
        assert_close(new.bias, old.bias + torch.from_numpy(extra), rtol=0, atol=1e-8)
        assert len(report.changed) == 2
    else:
        assert (new.bias is None) == (old.bias is None)
        assert old.bias is None or torch.equal(new.bias, old.bias)
        assert report.changed == (f"{place.projection}.weight",)
    expected = reference.error(model, subject.model, place, batches)
    assert report.metrics["error_after"] == pytest.approx(expected)


@pytest.mark.parametrize("intercept", ["fold", "drop"])
def test_only_without_an_intercept_a_later_mean_fold_folds(intercept):
    subject, batches = subject_of("bert")
    model, mask = pruned(subject), subject.ragged()
    recovered(model, batches, HeadRescale(intercept=intercept), subject.model)
    folded = recovered(model, batches, "mean_fold", subject.model).metrics["heads"]
    assert folded == (0 if intercept == "fold" else mask.n_heads - mask.n_kept)


@pytest.mark.parametrize("intercept", ["fold", "drop"])
def test_a_site_without_heads_gets_its_bias_alone(intercept):
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


@pytest.mark.parametrize("method", ["lstsq", "head_rescale", "mean_fold"])
def test_an_attention_without_an_output_projection_is_refused(method):
    subject, batches = subject_of("list of heads without output")
    model = pruned(subject)
    with unchanged(model), pytest.raises(UnsupportedModel, match="with an output projection"):
        recovered(model, batches, method, subject.model)


@pytest.mark.parametrize("method", ["lstsq", "mean_fold"])
def test_a_loss_says_how_both_models_are_run(method):
    subject, (batch, _) = subject_of("gpt2")
    # Padding is told from the batch's own attention_mask, which a nested batch hides
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    plain, nested = pruned(subject), pruned(subject)
    recovered(plain, [batch], method, subject.model)
    loss = lambda m, b: m(**b["inputs"]).logits.sum(1)  # noqa: E731
    recovered(nested, [{"inputs": batch}], method, subject.model, loss=loss)
    assert_close(nested.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_recipe_names_methods_and_their_settings(tmp_path):
    settings = {"ridge": None, "token_weights": "output", "feed_forward": True}
    steps = [{"method": "lstsq", "settings": settings}, {"method": "head_rescale"}]
    recipe = checked(tmp_path, recover=steps)
    assert dict(recipe.recover[0].settings) == settings
    record = runner.run_recipe(recipe, say=lambda line: None)
    assert record.status == "done"
    first = record.metrics["recovery"]["0"]
    assert (first["method"], first["rows"]) == ("lstsq", "calibration")
    assert first["ridges"]
    assert first["error_after"] < first["error_before"]
    names = {row.name for row in record.quality}
    assert {"recovered (lstsq)", "recovered (lstsq + head_rescale)"} <= names
    assert {"outputs", "reload"} <= {proof.what for proof in record.proofs}
    wrong = {"method": "lstsq", "settings": {"token_weights": "all"}}
    with pytest.raises(RecipeError, match="must be 'equal' or 'output'"):
        checked(tmp_path, recover=[wrong])
