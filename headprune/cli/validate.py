"""``headprune validate``: print all errors of all given recipes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headprune.cli._shared import (
    BAD_INPUT,
    AsJson,
    Debug,
    Settings,
    echo,
    emit,
    guarded,
    recipe_names,
    say,
)
from headprune.core.errors import HeadPruneError


def validate(
    recipes: Annotated[
        list[str],
        typer.Argument(
            help="Recipe files, or names of shipped recipes.", autocompletion=recipe_names
        ),
    ],
    settings: Settings = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check recipes and list every error, each with its path and a suggestion."""
    with guarded(debug):
        # All recipes are checked, whatever errors the first ones have.
        results = [_check(recipe, settings or []) for recipe in recipes]
        if as_json:
            emit(results)
        else:
            for result in results:
                if result["valid"]:
                    echo(f"{result['recipe']}: valid")
                else:
                    say(f"error: {result['text']}")
        # Any error is bad input.
        if not all(result["valid"] for result in results):
            raise typer.Exit(BAD_INPUT)


def _check(recipe: str, settings: list[str]) -> dict[str, Any]:
    """Check one recipe; return its errors as data and as text."""
    from headprune.recipes.validate import RecipeError, load_recipe

    try:
        load_recipe(recipe, settings)
    except HeadPruneError as error:
        # A recipe can have many problems; any other error is one.
        problems = error.problems if isinstance(error, RecipeError) else [error]
        errors = []
        for problem in problems:
            facts = {
                "path": problem.where,
                "must": problem.must,
                "got": str(problem.got),
                "hint": problem.hint,
            }
            errors.append(facts)
        return {"recipe": recipe, "valid": False, "errors": errors, "text": str(error)}
    return {"recipe": recipe, "valid": True, "errors": [], "text": ""}
