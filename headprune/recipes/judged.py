"""Choose the recoveries that a cut model gets before `auto` judges it."""

from __future__ import annotations

from headprune import recovery
from headprune.recipes.schema import Recipe, RecoverStep

#: Replaces a recovery that trains while candidates are judged, because training takes too long.
STAND_IN = RecoverStep(method="lstsq", settings={"feed_forward": True, "precision": "float32"})


def judged_after(recipe: Recipe) -> list[RecoverStep]:
    """Return the recoveries that a candidate's cut model gets before it is judged.

    These are the recipe's recoveries without training; ``lstsq`` where the recipe only trains.
    """
    quick = [step for step in recipe.recover if not recovery.registry.get(step.method).trains]
    trains = len(quick) < len(recipe.recover) or recipe.gradual is not None
    return [STAND_IN] if trains and not quick else quick
