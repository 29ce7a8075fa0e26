"""What a cut model gets before `auto` judges it: the recoveries of a recipe that do not train."""

from __future__ import annotations

from headprune import recovery
from headprune.recipes.schema import Recipe, RecoverStep

#: What stands in for a recovery that trains, while candidates are judged.
STAND_IN = RecoverStep(method="lstsq", settings={"feed_forward": True})


def judged_after(recipe: Recipe) -> list[RecoverStep]:
    """The recoveries that a candidate's cut model gets before it is judged.

    Those of the recipe that train nothing; where it only trains, ``lstsq`` stands in for the
    training.
    """
    alone = [step for step in recipe.recover if not recovery.registry.get(step.method).trains]
    trains = len(alone) < len(recipe.recover) or recipe.gradual is not None
    return [STAND_IN] if trains and not alone else alone
