"""Runs of recipes: ``run_recipe`` takes a recipe from data to report, with one record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprune.core.lazy import lazy

#: The module of every public name; it is imported when the name is first used.
_HOME = {
    "Recipe": "headprune.recipes.schema",
    "RecipeError": "headprune.recipes.validate",
    "load_recipe": "headprune.recipes.validate",
    "pick": "headprune.sweep.pick",
    "prepared": "headprune.run.runner",
    "prune_gradually_": "headprune.run.gradual",
    "run_recipe": "headprune.run.runner",
    "score_recipe": "headprune.run.runner",
    "shipped_recipes": "headprune.recipes.reading",
    "sweep": "headprune.sweep.sweeping",
}

__all__ = [
    "Recipe",
    "RecipeError",
    "load_recipe",
    "pick",
    "prepared",
    "prune_gradually_",
    "run_recipe",
    "score_recipe",
    "shipped_recipes",
    "sweep",
]

__getattr__, __dir__ = lazy(__name__, _HOME)

if TYPE_CHECKING:
    from headprune.recipes.reading import shipped_recipes
    from headprune.recipes.schema import Recipe
    from headprune.recipes.validate import RecipeError, load_recipe
    from headprune.run.gradual import prune_gradually_
    from headprune.run.runner import prepared, run_recipe, score_recipe
    from headprune.sweep.pick import pick
    from headprune.sweep.sweeping import sweep
