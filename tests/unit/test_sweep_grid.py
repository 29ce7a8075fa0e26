"""Grids: every combination once, what goes over from the recipe, and every error at once before any
work."""

from __future__ import annotations

from typing import Any

import pytest

from headprune.core.errors import InvalidValue
from headprune.recipes.validate import RecipeError, check_recipe, load_recipe, recipe_yaml
from headprune.sweep.grid import lay_out

RAW: dict[str, Any] = {
    "name": "test",
    "description": "for tests",
    "task": "text_classification",
    "model": {"path": "somewhere"},
    "data": {"path": "rows.jsonl", "text": "text"},
    "score": {"scorer": "taylor", "settings": {"reduce": "token"}, "until": {"k": 3}},
    "select": {"keep_macs": 0.5, "length": 32},
    "recover": [{"method": "finetune", "settings": {"epochs": 3}}],
}


def problems(*grid: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        lay_out(check_recipe(RAW), (), grid)
    return {p.where: str(p) for p in caught.value.problems}


def test_every_combination_once_in_order():
    grid = ["scorer=taylor,random", "keep=0.5,8", "recover=none,mean_fold"]
    design = lay_out("digits-vit", ["seed=3"], grid)
    assert (design.keys, design.budgets) == (("scorer", "keep", "recover"), ("keep",))
    values = [tuple(point.values.values()) for point in design.points]
    recoveries = ("none", "mean_fold")
    wanted = [(s, k, r) for s in ("taylor", "random") for k in (0.5, 8) for r in recoveries]
    assert values == wanted
    for point, (scorer, keep, recover) in zip(design.points, values, strict=True):
        recipe = point.recipe
        assert (recipe.seed, recipe.score.scorer, recipe.select.keep_heads) == (3, scorer, keep)
        assert [step.method for step in recipe.recover] == ([] if recover == "none" else [recover])


@pytest.mark.parametrize("feed_forward", [False, True])
def test_a_selector_that_follows_from_the_scorer_changes_with_it(feed_forward, tmp_path):
    """Also where a run wrote the recipe, with its defaults."""
    select = {"keep_macs": 0.5, "feed_forward": feed_forward}
    raw = {**RAW, "score": {"scorer": "ladder"}, "select": select}
    written = tmp_path / "recipe.yaml"
    written.write_text(recipe_yaml(check_recipe(raw)))
    plain = "knapsack" if feed_forward else "global_topk"
    for recipe in (check_recipe(raw), written):
        found = lay_out(recipe, (), ["scorer=ladder,surgeon,random"]).points
        selectors = [point.recipe.select.selector for point in found]
        assert selectors == ["repriced", plain, plain]
    # A selector that the user chose stays.
    raw["select"] = {**select, "selector": "local_search"}
    (point,) = lay_out(check_recipe(raw), (), ["scorer=surgeon"]).points
    assert point.recipe.select.selector == "local_search"


def test_a_mapping_and_paths_say_the_same():
    given = {"score.scorer": ["taylor"], "select.keep_heads": [0.5], "recover": "none"}
    one = lay_out("digits-vit", (), given)
    two = lay_out(load_recipe("digits-vit"), (), ["scorer=taylor", "keep=0.5", "recover=none"])
    assert [p.recipe for p in one.points] == [p.recipe for p in two.points]
    assert one.budgets == ("select.keep_heads",)


def test_settings_of_the_recipe_are_used_where_they_are_meant():
    grid = ["scorer=taylor,fisher,random", "recover=none,finetune,mean_fold+finetune"]
    found = lay_out(check_recipe(RAW), (), grid).points
    points = {tuple(point.values.values()): point.recipe for point in found}
    assert points["taylor", "none"].score.settings == {"reduce": "token"}
    assert points["fisher", "none"].score.settings == {}, "they were those of another scorer"
    assert points["fisher", "none"].score.until is not None
    assert points["random", "none"].score.until is None, "it reads no data"
    assert [step.settings for step in points["taylor", "finetune"].recover] == [{"epochs": 3}]
    steps = [(s.method, s.settings) for s in points["taylor", "mean_fold+finetune"].recover]
    assert steps == [("mean_fold", {}), ("finetune", {"epochs": 3})]


def test_a_default_selector_is_not_taken_for_a_choice():
    """A checked recipe has its selector, and every combination has its own default."""
    raw = {**RAW, "select": {"keep_params": 0.7}, "score": {"scorer": "taylor"}}
    found = lay_out(check_recipe(raw), (), ["select.feed_forward=false,true"]).points
    assert [point.recipe.select.selector for point in found] == ["global_topk", "knapsack"]
    found = lay_out(check_recipe(raw), (), ["scorer=taylor,ladder"]).points
    assert [point.recipe.select.selector for point in found] == ["global_topk", "repriced"]


def test_a_budget_replaces_the_recipes():
    heads = lay_out(check_recipe(RAW), (), ["keep=0.5,1"]).points[0]
    macs = lay_out(check_recipe(RAW), (), ["keep_macs=0.5,0.6"]).points[0]
    assert heads.recipe.select.budget.kind == "keep_heads"
    assert macs.recipe.select.budget.length == 32


def test_every_error_at_once():
    grid = ["scorer=tailor,taylor,taylor", "kep=0.5", "train.epochs=1,2", "selector="]
    grid += ["recover=none,[]", "keep=0.5,2.5", "select.keep_heads=0.5", "score.magnitude=true"]
    grid += ["oops", "score.scorerr=1", "score=1", "keep_kv=[1"]
    found = problems(*grid)
    for where, text in {
        "--grid scorer": "must be values that differ, got 'taylor' again",
        "score.scorer": "'tailor'. Did you mean 'taylor'",
        "--grid kep": "Did you mean 'keep'",
        "--grid train.epochs": "All runs of a sweep share one base model",
        "--grid selector": "must be given values, got none",
        "--grid recover": "'[]', which means the same as 'none'",
        "--grid select.keep_heads": "must be given once, got as keep too",
        "--grid score.magnitude": "must be a key that a sweep uses",
        "--grid oops": "must be written key=value,value",
        "score.scorerr": "must be a known key",
        "--grid score": "must be a key inside that section",
        "--grid keep_kv": "must be valid YAML",
        "select.keep_heads": "a fraction above 0",
    }.items():
        assert text in found[where], (where, found)
    assert "given a key with values" in problems()["--grid"]
    found = problems("scorer=taylor,fisher", "score.settings.reduce=token,example")
    assert list(found) == ["score.settings.reduce"]
    assert "a setting of fisher" in found["score.settings.reduce"]


def test_budgets_of_speed_and_cuts_in_stages_are_refused():
    found = problems("select.speedup=1.2,1.5")["--grid select.speedup"]
    assert "other processes would disturb, got select.speedup" in found
    for settings, words in (
        (["select.keep_heads=null", "select.speedup=1.2"], "select: must be a budget other than"),
        (["gradual={stages: 2}"], "gradual"),
    ):
        with pytest.raises(RecipeError, match=words):
            lay_out("digits-vit", settings, ["scorer=taylor,fisher"])


def test_presets_beside_the_recipe_itself():
    points = lay_out("digits-vit", [], ["preset=none,kwon2022,flap2024", "keep=0.5,0.25"]).points
    scorers = [scorer for scorer in ("auto", "fisher", "fluctuation") for _ in range(2)]
    assert [p.recipe.score.scorer for p in points] == scorers
    assert [p.recipe.select.keep_heads for p in points] == [0.5, 0.25] * 3
    with pytest.raises(InvalidValue, match="checked already"):
        lay_out(check_recipe(RAW), ["seed=1"], ["keep=0.5"])
    with pytest.raises(RecipeError, match="--grid scorer: must be left out beside preset"):
        lay_out("digits-vit", [], ["preset=kwon2022", "scorer=taylor,fisher"])
