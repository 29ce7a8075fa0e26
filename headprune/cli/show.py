"""``headprune show``: print a recipe with every default filled in."""

from __future__ import annotations

from headprune.cli._shared import AsJson, Debug, RecipeName, Settings, echo, emit, guarded


def show(
    recipe: RecipeName,
    settings: Settings = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show a recipe with every default filled in; the output is a recipe, too."""
    with guarded(debug):
        from headprune.recipes.validate import load_recipe, recipe_yaml

        resolved = load_recipe(recipe, settings or ())
        if as_json:
            emit(resolved.model_dump())
        else:
            echo(recipe_yaml(resolved), nl=False)  # it ends with a newline
