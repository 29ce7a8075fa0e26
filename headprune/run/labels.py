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

    A freshly built model changes nothing. Labels that are nothing but numbers get the names of a model that is not
    trained and has as many. A model that names its classes and has all names of the data, in capitals or not, keeps its
    numbering. Where it lacks some, its head is trained anew,
    with the data's names; a model that is not trained is taken at its numbers, where the data has numbers too.

    Raises:
        InvalidValue: the model has other names, the data nothing but names, and the recipe does not train it.
    """
    if recipe.model.path is None or not raw.labels:
        return raw
    names = _names(model_config(recipe.model.path))
    if not isinstance(raw.labels[0], str):
        known = recipe.train is None and len(names) == len(raw.labels)
        return replace(raw, labels=names, class_names=dict(enumerate(names))) if known else raw
    spelled = {name.casefold(): name for name in names}
    folded = {label.casefold() for label in raw.labels}
    if folded <= spelled.keys() and (len(folded), len(spelled)) == (len(raw.labels), len(names)):
        stored = raw.class_names or {label: label for label in raw.labels}
        return replace(raw, labels=names, class_names={v: spelled[name.casefold()] for v, name in stored.items()})
    if not names or all(_GENERIC.fullmatch(name) for name in names):
        if recipe.train is not None:
            return raw
        how = "taken by their numbers" if raw.class_names else "numbered in sorted order"
        note = f"{recipe.model.path} does not name its classes; those of the data were {how}"
        return replace(raw, warnings=(*raw.warnings, note))
    lacking = [label for label in raw.labels if label.casefold() not in spelled]
    if recipe.train is None and raw.class_names:
        called = f"{', '.join(names[:8])}; the data calls them {', '.join(raw.labels[:8])}"
        note = f"{recipe.model.path} calls its classes {called}: they were taken by their numbers"
        return replace(raw, warnings=(*raw.warnings, note))
    if recipe.train is None:
        must = f"labels that {recipe.model.path} knows: {', '.join(names[:8])}"
        hint = did_you_mean(lacking[0], names) + " Or add a train section."
        raise InvalidValue("data.label", must, ", ".join(map(repr, lacking[:3])), hint)
    order = "their own order" if raw.class_names else "sorted order"
    note = (
        f"{recipe.model.path} names its classes {', '.join(names[:8])}, which lack {', '.join(lacking[:3])} of the "
        f"data: its head was trained anew, for the data's labels in {order}"
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
