"""A layout as JSON data, so that one that nobody registered travels with a checkpoint.

Every field of a layout is data, except functions and classes. Of those only the two that
``propose_layouts`` uses for ``kind`` have a written form.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from headprune.core.codec import FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.heads import Kind
from headprune.core.layout import AttentionLayout, HeadSlab

#: Fields that only the tests of this library use.
_NOT_STORED = ("families",)
#: Fields that hold tuples, or tuples of tuples.
_TUPLES = ("requires", "absent", "untouched", "per_head", "policies")


def kind_of(module: Any, name: str) -> Kind:
    """The kind of attention that a module's names and flags state."""
    # The last part of its path and its class.
    words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    if "cross" in words or "encoder_attn" in words or "encdec" in words:
        return "cross"
    for part in (module, *module.children()):
        if getattr(part, "is_causal", False) or getattr(part, "is_decoder", False):
            return "causal"
    return "self"


@dataclass(frozen=True)
class SeenKind:
    """``AttentionLayout.kind`` of modules some of which were seen to be causal.

    Of the others it is what ``kind_of`` returns.

    Args:
        causal: Names of the causal ones; None where all were.
    """

    causal: tuple[str, ...] | None

    def __call__(self, module: Any, name: str) -> Kind:
        kind = kind_of(module, name)
        seen = self.causal is None or name in self.causal
        return "causal" if seen and kind == "self" else kind


def data_of(layout: AttentionLayout) -> FrozenDict | None:
    """A layout as data; None where it has code of its own, which no file may hold."""
    data: dict[str, Any] = {}
    for field in fields(layout):
        value = getattr(layout, field.name)
        if field.name in _NOT_STORED or value == field.default:
            continue
        data[field.name] = value
    data["slabs"] = list(map(asdict, layout.slabs))
    if layout.kind is kind_of:
        data["kind"] = {"by_name": True}
    elif isinstance(layout.kind, SeenKind):
        data["kind"] = {"causal": layout.kind.causal}
    try:
        return FrozenDict(data)
    except InvalidValue:
        return None


def layout_from(data: FrozenDict) -> AttentionLayout:
    """The layout that ``data_of`` wrote.

    Raises:
        InvalidValue: data that describe no layout.
    """
    values = dict(data)
    try:
        values["slabs"] = tuple(HeadSlab(**_slab_values(slab)) for slab in values["slabs"])
        for name in _TUPLES:
            if name in values:
                values[name] = tuple(values[name])
        if "counts" in values:
            values["counts"] = tuple(map(tuple, values["counts"]))
        values["kind"] = _kind(values.get("kind", "self"))
        return AttentionLayout(**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        must = "the data of an AttentionLayout"
        raise InvalidValue("a stored layout", must, f"{type(error).__name__}: {error}") from error


def _slab_values(slab: Any) -> dict[str, Any]:
    values = dict(slab)
    if not isinstance(values["unit"], str):
        values["unit"] = tuple(values["unit"])
    return values


def _kind(stored: Any) -> Any:
    if isinstance(stored, str):
        return stored
    if "causal" not in stored:
        return kind_of
    causal = stored["causal"]
    return SeenKind(None if causal is None else tuple(causal))
