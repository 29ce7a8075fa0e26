"""Numbers of labels: a model that was trained on named classes keeps its own numbering."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headprune.core.errors import InvalidValue, did_you_mean
from headprune.run.data import RawData
from headprune.run.models import model_config
from headprune.run.recipe import Recipe

_GENERIC = re.compile(r"LABEL_\d+")


def number_labels(recipe: Recipe, raw: RawData) -> RawData:
    """The rows with their named labels in the order in which the recipe's model numbers them.

    A freshly built model, and labels that are numbers already, change nothing. A model that names its classes and has
    all names of the data keeps its numbering. Where it lacks some, its head is trained anew, with the data's names.

    Raises:
        InvalidValue: the model has other names, and the recipe does not train it.
    """
    if recipe.model.path is None or not raw.labels or not isinstance(raw.labels[0], str):
        return raw
    names = _names(model_config(recipe))
    if names and set(raw.labels) <= set(names):
        return replace(raw, labels=names)
    if not names or all(_GENERIC.fullmatch(name) for name in names):
        if recipe.train is not None:
            return raw
        note = f"{recipe.model.path} does not name its classes; those of the data were numbered in sorted order"
        return replace(raw, warnings=(*raw.warnings, note))
    lacking = [label for label in raw.labels if label not in names]
    if recipe.train is None:
        must = f"labels that {recipe.model.path} knows: {', '.join(names[:8])}"
        hint = did_you_mean(lacking[0], names) + " Or add a train section."
        raise InvalidValue("data.label", must, ", ".join(map(repr, lacking[:3])), hint)
    note = (
        f"{recipe.model.path} names its classes {', '.join(names[:8])}, which lack {', '.join(lacking[:3])} of the "
        "data: its head was trained anew, for the data's labels in sorted order"
    )
    return replace(raw, warnings=(*raw.warnings, note))


def _names(config: Any) -> tuple[str, ...]:
    """Class names in the order of their numbers; none where they are not numbered 0, 1, 2..."""
    by_number: Mapping[int, str] = getattr(config, "id2label", None) or {}
    by_name: Mapping[str, int] = getattr(config, "label2id", None) or {}
    names = {int(i): str(name) for i, name in by_number.items()}
    if all(_GENERIC.fullmatch(name) for name in names.values()) and len(by_name) >= len(names):
        names = {int(i): str(name) for name, i in by_name.items()}
    if sorted(names) != list(range(len(names))) or len(set(names.values())) != len(names):
        return ()
    return tuple(names[i] for i in range(len(names)))
