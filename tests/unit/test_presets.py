"""Presets: they resolve to registered methods, take the place of a recipe's own, and mean what the
papers did."""

from __future__ import annotations

import pytest

import headprune as hp
from headprune.core.errors import UnknownName
from headprune.recipes.presets import PRESETS, preset_named
from headprune.recipes.reading import locate, read_raw
from headprune.recipes.validate import RecipeError, check_recipe, load_recipe
from headprune.sweep.grid import lay_out


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_the_place_of_the_recipes_own(name):
    own = load_recipe("digits-vit")
    recipe = load_recipe("digits-vit", [f"preset={name}"])
    preset = PRESETS[name]
    assert recipe.score.scorer == preset.score["scorer"]
    assert recipe.score.settings == dict(preset.score["settings"])
    assert recipe.select.selector == preset.select["selector"]
    assert [step.method for step in recipe.recover] == [step["method"] for step in preset.recover]
    assert recipe.select.budget == own.select.budget
    assert recipe.score.random_draws == own.score.random_draws
    assert check_recipe(recipe.model_dump()) == recipe  # a resolved recipe runs again as it is
    assert recipe.score.scorer in hp.scoring.registry


def test_recoveries_while_the_recipe_selects_go_with_its_selector():
    own = ["select.selector=iterative", "select.recover=[{method: mean_fold}]"]
    own.append("select.policy=free")
    recipe = load_recipe("digits-vit", [*own, "preset=kwon2022"])
    assert (recipe.select.selector, recipe.select.recover) == ("quadratic", [])
    assert recipe.select.policy == "free"
    assert load_recipe("digits-vit", own).select.recover
    with pytest.raises(RecipeError, match=r"--grid select\.recover: .* beside preset"):
        lay_out("digits-vit", own, ["preset=none,kwon2022", "select.recover=none,mean_fold"])


def test_an_unknown_preset():
    with pytest.raises(UnknownName, match="Did you mean 'kwon2022'"):
        preset_named("kwon202")
    raw = {**read_raw(locate("digits-vit")), "preset": "kwon202", "sed": 1}
    with pytest.raises(RecipeError) as caught:
        check_recipe(raw)
    assert [p.where for p in caught.value.problems] == ["preset", "sed"]
