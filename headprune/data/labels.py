"""Numbers of labels: a model that was trained on named classes keeps its own numbering."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headprune.core.errors import InvalidValue, did_you_mean
from headprune.data.datasets import RawData
from headprune.data.models import model_config
from headprune.recipes.schema import Recipe

_GENERIC = re.compile(r"LABEL_\d+")
#: Spellings under which names are the same, the strictest first.
_SPELLINGS: tuple[Callable[[str], str], ...] = (
    str,
    str.casefold,
    lambda name: " ".join(re.split(r"[\s_-]+", name.strip())).casefold(),
)


def number_labels(recipe: Recipe, raw: RawData) -> RawData:
    """The rows with their labels in the order in which the recipe's model numbers them, and how
    that was known.

    The recipe's ``data.labels`` is that order where it is given. Else a freshly built model changes
    nothing. A model that names its classes and has all names of the data, in capitals, with blanks
    for underscores or not, keeps its numbering. Labels that are nothing but numbers, as text too,
    are the numbers of the classes of a model that is not trained, and get their names. Where a
    model lacks some names, its head is trained anew, with the data's names; a model that is not
    trained is taken at its numbers, where the data has numbers too.

    Raises:
        InvalidValue: the model has other names, the data nothing but names, and the recipe does not
            train it. Or numbers that begin at 1 for a model that counts from 0; names that stand at
            other numbers of the model; an order in ``data.labels`` that lacks labels of the data.
    """
    if not raw.labels:
        return raw
    path, trained = recipe.model.path, recipe.train is not None
    names = () if path is None else _names(model_config(path))
    if recipe.data.labels is not None:
        return _given(raw, recipe.data.labels, () if trained else names)
    by_name = isinstance(raw.labels[0], str)
    if path is None:
        return replace(raw, numbering="sorted" if by_name and not raw.said else "number")
    if by_name and (found := _same_names(raw, names)):
        return found
    if not trained and (not by_name or _are_numbers(raw)):
        return _by_number(raw, names)
    if not by_name:
        return raw
    if not names or all(_GENERIC.fullmatch(name) for name in names):
        if trained:
            return raw
        if not raw.said and len(raw.labels) < len(names):
            must = (
                f"given: {path} has {len(names)} classes without names, so nothing says which of"
                " them "
            )
            must += f"the {len(raw.labels)} labels of the data are"
            hint = (
                "List a label for every class, in the order of the classes; those that the data"
                " lacks by any name."
            )
            raise InvalidValue("data.labels", must, "none", hint)
        how = "taken by their numbers" if raw.said else "numbered in sorted order"
        note = f"{path} does not name its classes; those of the data were {how}"
        return replace(
            raw, warnings=(*raw.warnings, note), numbering="number" if raw.said else "sorted"
        )
    if trained:
        return replace(raw, warnings=(*raw.warnings, _trained_anew(path, raw, names)))
    return _other_names(path, raw, names)


def _given(raw: RawData, order: Sequence[Any], names: Sequence[str]) -> RawData:
    """The order of ``data.labels``; the classes are called as the model does, where it names
    them."""
    places = {str(label): i for i, label in enumerate(order)}
    called = raw.said or {value: value for value in raw.present}
    if lacking := [str(called[value]) for value in raw.present if str(called[value]) not in places]:
        must = f"a list with every label of the data, {', '.join(sorted(lacking)[:8])} too"
        raise InvalidValue("data.labels", must, list(order), did_you_mean(lacking[0], places))
    named = len(names) == len(order) and not all(_GENERIC.fullmatch(name) for name in names)
    labels = tuple(names) if named else tuple(map(str, order))
    class_names = {
        value: labels[places[str(name)]] for value, name in called.items() if str(name) in places
    }
    return replace(raw, labels=labels, class_names=class_names, numbering="given")


def _same_names(raw: RawData, names: Sequence[str]) -> RawData | None:
    """The model's own numbering, where it has every name of the data in some spelling."""
    for spelling in _SPELLINGS:
        spelled = {spelling(name): name for name in names}
        asked = {spelling(label) for label in raw.labels}
        if asked <= spelled.keys() and (len(asked), len(spelled)) == (len(raw.labels), len(names)):
            stored = raw.class_names or {label: label for label in raw.labels}
            class_names = {value: spelled[spelling(name)] for value, name in stored.items()}
            return replace(raw, labels=tuple(names), class_names=class_names, numbering="name")
    return None


def _are_numbers(raw: RawData) -> bool:
    """Whether labels without names of their own are numbers, written as text."""
    return not raw.said and all(
        label.isdecimal() and str(int(label)) == label for label in raw.labels
    )


def _by_number(raw: RawData, names: Sequence[str]) -> RawData:
    """Labels as the numbers of the classes of a model that is not trained; it may have more of
    them."""
    numbers = {value: int(value) for value in raw.present}
    least, most = min(numbers.values()), max(numbers.values())
    if least >= 1 and most == len(names):
        must = (
            f"given, for the numbers of the data, {least} to {most}, are not those of the model's"
            " classes, "
        )
        must += f"0 to {most - 1}"
        hint = (
            f"data.labels: {list(range(1, most + 1))} takes {least} for class {least - 1}, and"
            " so on."
        )
        raise InvalidValue("data.labels", must, "none", hint)
    # More numbers than classes: a model of another task, or with too few outputs, which is refused
    # when it is loaded.
    labels: tuple[Any, ...] = tuple(names) if most < len(names) else tuple(range(most + 1))
    class_names: dict[Any, Any] = {value: labels[number] for value, number in numbers.items()}
    return replace(raw, labels=labels, class_names=class_names, numbering="number")


def _other_names(path: str, raw: RawData, names: Sequence[str]) -> RawData:
    """A model that is not trained, and names its classes otherwise than the data does."""
    if not raw.said:
        lacking = _lacking(raw, names)
        must = f"labels that {path} knows: {', '.join(names[:8])}"
        hint = (
            f"{did_you_mean(lacking[0], names)} Or say with data.labels which label each class is,"
            " in the order of "
        )
        hint += "the classes. Or add a train section."
        raise InvalidValue("data.label", must, ", ".join(map(repr, lacking[:3])), hint)
    folded = {_SPELLINGS[-1](name): number for number, name in enumerate(names)}
    for number, name in raw.said.items():
        if (there := folded.get(_SPELLINGS[-1](name), number)) != number:
            must = (
                f"given: class {number} of the data is {name!r}, which is class {there} of {path},"
                " and other names "
            )
            must += f"differ ({', '.join(names[:8])})"
            hint = "List the data's names in the order of the model's classes."
            raise InvalidValue("data.labels", must, "none", hint)
    called = f"{', '.join(names[:8])}; the data calls them {', '.join(raw.labels[:8])}"
    note = f"{path} calls its classes {called}: they were taken by their numbers"
    return replace(raw, warnings=(*raw.warnings, note), numbering="number")


def _trained_anew(path: str, raw: RawData, names: Sequence[str]) -> str:
    order = "their own order" if raw.said else "sorted order"
    return (
        f"{path} names its classes {', '.join(names[:8])}, which lack"
        f" {', '.join(_lacking(raw, names)[:3])} of the data: its head was trained anew, for the"
        f" data's labels in {order}"
    )


def _lacking(raw: RawData, names: Sequence[str]) -> list[str]:
    folded = {name.casefold() for name in names}
    lacking = [label for label in raw.labels if label.casefold() not in folded]
    return lacking or list(raw.labels)


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
