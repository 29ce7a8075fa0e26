"""Number the labels of the data in the order of the model's classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from headprune.core.errors import InvalidValue, did_you_mean
from headprune.data.datasets import RawData
from headprune.data.models import model_config
from headprune.recipes.schema import Recipe

#: A class name that Transformers made up.
_GENERIC = re.compile(r"LABEL_\d+")
#: A whole number as a float or a boolean is written, and the number itself.
_WHOLE = re.compile(r"(\d+)\.0+")
_BOOLEANS = {"false": "0", "true": "1"}
#: Names that a message lists.
_SHOWN = 8


def _loose(name: str) -> str:
    """Return a name without case, with one blank for blanks, underscores and hyphens.

    Numbers lose their form: "1.0" and "True" become "1".
    """
    plain = " ".join(re.split(r"[\s_-]+", name.strip())).casefold()
    whole = _WHOLE.fullmatch(plain)
    return _BOOLEANS.get(plain, whole[1] if whole else plain)


#: Spellings under which names are compared, the strictest first.
_SPELLINGS = (str, str.casefold, _loose)


def number_labels(recipe: Recipe, raw: RawData) -> RawData:
    """Return the rows with their labels numbered as the recipe's model numbers them.

    The first rule that applies decides:

    1. ``data.labels`` is the order, where it is given.
    2. A freshly built model takes the data's own order.
    3. A model that names every class of the data, in any spelling, keeps its numbering: a label
       1 is the class named "1", whatever that class's number is.
    4. A model that is not trained takes labels that are numbers, as text too, as class numbers.
    5. A model that is trained gets a new head for the data's labels.
    6. A model without class names takes the data's numbers, or sorted names.
    7. Any other model keeps its numbering where the data has numbers too, with a warning.

    Raises:
        InvalidValue: the model has other names, the data only names, and the recipe does not
            train it; numbers that begin at 1 for a model that counts from 0; names or numbers
            that the model gives to other classes; or ``data.labels`` without some label of the
            data.
    """
    if not raw.labels:
        return raw
    path, trained = recipe.model.path, recipe.train is not None
    names: tuple[str, ...] = ()
    if path is not None:
        names = class_names(model_config(path))
    if recipe.data.labels is not None:
        return _in_given_order(raw, recipe.data.labels, () if trained else names)
    if path is None:
        return replace(raw, numbering=_own_order(raw))
    matched = _by_name(raw, names)
    if matched is not None:
        return matched
    if _are_numbers(raw) and not trained:
        return _by_number(raw, names)
    if trained:
        return _for_new_head(path, raw, names)
    if _is_unnamed(names):
        return _unnamed(path, raw, names)
    return _renamed(path, raw, names)


def names_by_number(config: Any) -> Mapping[int, str]:
    """Return a configuration's names of classes by their numbers; empty where it has none."""
    return getattr(config, "id2label", None) or {}


def class_names(config: Any) -> tuple[str, ...]:
    """Return a model's class names in order; none unless numbered 0, 1, 2 ..."""
    by_number = names_by_number(config)
    by_name: Mapping[str, int] = getattr(config, "label2id", None) or {}
    names = {int(i): str(name) for i, name in by_number.items()}
    # Some configurations have real names in label2id alone.
    if _is_unnamed(names.values()) and len(by_name) >= len(names):
        names = {int(i): str(name) for name, i in by_name.items()}
    complete = sorted(names) == list(range(len(names)))
    distinct = len(set(names.values())) == len(names)
    if not complete or not distinct:
        return ()
    return tuple(dict(sorted(names.items())).values())


def is_class_number(label: Any) -> bool:
    """Whether a label is a class number, as text too."""
    if isinstance(label, str):
        return label.isdecimal() and str(int(label)) == label
    return isinstance(label, int)


def are_names_of(labels: Iterable[Any], names: Iterable[str]) -> bool:
    """Whether every label, as text, is one of these names, in any spelling."""
    known = set(map(_loose, names))
    return all(_loose(str(label)) in known for label in labels)


def as_setting(label: Any) -> str | int:
    """Return a label as ``data.labels`` takes it: a boolean is its name."""
    return str(label) if isinstance(label, bool) else label


def _only_count(names: Sequence[str]) -> bool:
    """Whether the names are the numbers of the classes."""
    return list(names) == list(map(str, range(len(names))))


def _is_unnamed(names: Any) -> bool:
    """Whether a model has only made-up class names, or none."""
    return all(_GENERIC.fullmatch(name) for name in names)


def _own_order(raw: RawData) -> Literal["number", "sorted"]:
    """How the data itself orders its labels."""
    only_names = isinstance(raw.labels[0], str) and not raw.dataset_names
    return "sorted" if only_names else "number"


def _are_numbers(raw: RawData) -> bool:
    """Whether labels are numbers, as text too, without names in the data set."""
    if not isinstance(raw.labels[0], str):
        return True
    if raw.dataset_names:
        return False
    return all(map(is_class_number, raw.labels))


def _in_given_order(
    raw: RawData,
    order: Sequence[Any],
    names: Sequence[str],
) -> RawData:
    """Number labels as ``data.labels`` does; use the model's names where it has some."""
    numbers = {str(label): i for i, label in enumerate(order)}
    shown = raw.dataset_names or dict(zip(raw.present, raw.present, strict=True))
    lacking = [str(shown[value]) for value in raw.present if str(shown[value]) not in numbers]
    if lacking:
        must = f"a list with every label of the data, {_listed(sorted(lacking))} too"
        hint = did_you_mean(lacking[0], numbers)
        raise InvalidValue("data.labels", must, list(order), hint)
    # Report the model's own names where it has real ones.
    labels = tuple(map(str, order))
    if len(names) == len(order) and not _is_unnamed(names):
        labels = tuple(names)
    class_names = {}
    for value, name in shown.items():
        if str(name) in numbers:
            class_names[value] = labels[numbers[str(name)]]
    return replace(raw, labels=labels, class_names=class_names, numbering="given")


def _by_name(raw: RawData, names: Sequence[str]) -> RawData | None:
    """Use the model's numbering where it has every name of the data in some spelling."""
    # Names 0, 1, 2 ... only count the classes: as numbers, they are checked more strictly.
    if not isinstance(raw.labels[0], str) and _only_count(names):
        return None
    stored = raw.class_names or {value: str(value) for value in raw.present}
    for spelling in _SPELLINGS:
        in_model = dict(zip(map(spelling, names), names, strict=True))
        in_data = set(map(spelling, stored.values()))
        # Two names with one spelling would be mixed up.
        distinct = len(in_data) == len(stored) and len(in_model) == len(names)
        if distinct and in_data <= in_model.keys():
            class_names = {value: in_model[spelling(name)] for value, name in stored.items()}
            return replace(raw, labels=tuple(names), class_names=class_names, numbering="name")
    return None


def _by_number(raw: RawData, names: Sequence[str]) -> RawData:
    """Take labels as class numbers; the model may have more classes."""
    numbers = {value: int(value) for value in raw.present}
    # Labels 1 to n, for a model with classes 0 to n - 1, would be off by one.
    least, most = min(numbers.values()), max(numbers.values())
    if least >= 1 and most == len(names):
        must = (
            f"given, because the data's numbers, {least} to {most}, are not those of the model's"
            f" classes, 0 to {most - 1}"
        )
        example = f"--set 'data.labels={list(range(1, most + 1))}'"
        hint = f"{example} takes {least} for class {least - 1}, and so on."
        raise InvalidValue("data.labels", must, "none", hint)
    if most < len(names):
        _check_numbers(numbers, names)
    # A model with fewer classes than numbers is refused when it is loaded.
    labels: tuple[Any, ...] = tuple(names) if most < len(names) else tuple(range(most + 1))
    class_names: dict[Any, Any] = {value: labels[number] for value, number in numbers.items()}
    return replace(raw, labels=labels, class_names=class_names, numbering="number")


def _check_numbers(numbers: Mapping[Any, int], names: Sequence[str]) -> None:
    """Refuse a number that the model has as the name of another class."""
    in_model = {_loose(name): number for number, name in enumerate(names)}
    for value, number in numbers.items():
        other = in_model.get(_loose(str(value)), number)
        if other != number:
            must = (
                f"given: the model calls its class {other} {names[other]!r}, so label {value!r} may"
                f" mean class {other} or class {number}; in order its classes are {_listed(names)}"
            )
            by_number = {number: as_setting(value) for value, number in numbers.items()}
            order = [by_number.get(number, number) for number in range(len(names))]
            setting = f"--set 'data.labels={json.dumps(order)}'"
            hint = f"{setting} takes {value!r} for class {number}, and so on."
            raise InvalidValue("data.labels", must, "none", hint)


def _for_new_head(path: str, raw: RawData, names: Sequence[str]) -> RawData:
    """Keep the data's order for a new head; warn of names that the model lacks."""
    if not isinstance(raw.labels[0], str) or _is_unnamed(names):
        return raw
    order = "their own order" if raw.dataset_names else "sorted order"
    note = (
        f"{path} names its classes {_listed(names)}, which lack"
        f" {', '.join(_lacking(raw, names)[:3])} of the data: a new head was trained for the"
        f" data's labels in {order}"
    )
    return replace(raw, warnings=(*raw.warnings, note))


def _unnamed(path: str, raw: RawData, names: Sequence[str]) -> RawData:
    """Number the data's names for a model that does not name its classes."""
    if not raw.dataset_names and len(raw.labels) < len(names):
        must = (
            f"given: {path} has {len(names)} classes without names, so nothing says which of them"
            f" the {len(raw.labels)} labels of the data are"
        )
        hint = (
            "List a label for every class, in the order of the classes; give any name to a class"
            " that the data lacks."
        )
        raise InvalidValue("data.labels", must, "none", hint)
    how = "taken by their numbers" if raw.dataset_names else "numbered in sorted order"
    note = f"{path} does not name its classes; those of the data were {how}"
    return replace(raw, warnings=(*raw.warnings, note), numbering=_own_order(raw))


def _renamed(path: str, raw: RawData, names: Sequence[str]) -> RawData:
    """Take the data's numbers for a model with other names, where no name contradicts them."""
    if not raw.dataset_names:
        lacking = _lacking(raw, names)
        must = f"labels that {path} knows: {_listed(names)}"
        hint = (
            f"{did_you_mean(lacking[0], names)} Or say with data.labels which label each class is,"
            " in the order of the classes. Or add a train section."
        )
        raise InvalidValue("data.label", must, ", ".join(map(repr, lacking[:3])), hint)
    # A name that the model has at another number shows that the numbers differ.
    in_model = {_loose(name): number for number, name in enumerate(names)}
    for number, name in raw.dataset_names.items():
        other = in_model.get(_loose(name), number)
        if other != number:
            must = (
                f"given: class {number} of the data is {name!r}, which is class {other} of {path},"
                f" and other names differ ({_listed(names)})"
            )
            hint = "List the data's names in the order of the model's classes."
            raise InvalidValue("data.labels", must, "none", hint)
    note = (
        f"{path} calls its classes {_listed(names)}; the data calls them {_listed(raw.labels)}:"
        " they were taken by their numbers"
    )
    return replace(raw, warnings=(*raw.warnings, note), numbering="number")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN])


def _lacking(raw: RawData, names: Sequence[str]) -> list[str]:
    """Return the data's labels that the model does not name, or all of them."""
    known = set(map(str.casefold, names))
    lacking = [label for label in raw.labels if label.casefold() not in known]
    return lacking or list(raw.labels)
