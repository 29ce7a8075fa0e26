"""How a family of attention modules keeps its heads: HeadSlab and AttentionLayout, plus the state of a cut module.

A layout is data. It names the tensors that are made of heads, the module whose input is the heads' outputs side by
side (the gate point), the attributes that count heads, and which other parameters may stay as they are. A module
matches a layout by structure alone: every slab is there, every length is explained by a whole number of heads, and
every parameter of the module is accounted for. What is not accounted for is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headprune.core.errors import InvalidValue
from headprune.core.heads import Kind
from headprune.core.slabs import Packing, check_slab

#: Attribute under which a module that has been cut remembers its original heads (a HeadState).
STATE_ATTRIBUTE = "headprune_state"

#: Attribute under which a projection holds its gates while a ``gated`` block lasts.
GATES_ATTRIBUTE = "headprune_gates"

#: Attribute under which an output projection remembers the heads whose mean its bias holds.
FOLDED_ATTRIBUTE = "headprune_folded"

#: What a count attribute of a module holds, in words of HeadGeometry.
Count = Literal["n_query_heads", "n_kv_heads", "group_size", "query_width", "value_width"]


@dataclass(frozen=True)
class HeadState:
    """What a cut module remembers: the original counts, and which original heads are left."""

    n_query_heads: int
    n_kv_heads: int
    heads: tuple[int, ...]


@dataclass(frozen=True)
class HeadSlab:
    """One axis of one tensor, or of one projection, that is cut head by head.

    Args:
        path: A projection (cut together with its bias) or a bare tensor, relative to the attention module.
        axis: ``out`` or ``in`` features for a projection; a dimension for a bare tensor.
        unit: What the blocks are, see ``core/slabs.py``; several for a fused projection.
        packing: How several units lie on the axis.
    """

    path: str
    axis: Literal["in", "out"] | int
    unit: str | tuple[str, ...]
    packing: Packing = "sequential"

    def __post_init__(self) -> None:
        check_slab(self.units, self.packing)
        if self.axis not in ("in", "out") and (not isinstance(self.axis, int) or isinstance(self.axis, bool)):
            raise InvalidValue(f"HeadSlab({self.path!r}).axis", "'in', 'out' or a dimension", repr(self.axis))

    @property
    def units(self) -> tuple[str, ...]:
        return (self.unit,) if isinstance(self.unit, str) else tuple(self.unit)


@dataclass(frozen=True)
class AttentionLayout:
    """Where one family of attention modules keeps its heads.

    Args:
        name: The registered name.
        gate: Path of the output projection; its input is gated, ``[..., heads * value_dim]``.
        slabs: Every tensor axis that is made of heads; the gate's input is among them with unit ``context``.
        head_dim: Path of the attribute with the width of a query/key head, or the width itself.
        value_dim: The same for value heads; None where it equals ``head_dim``.
        kind: ``self``, ``causal``, ``cross``, or a function of the module that says which.
        requires: Attribute paths that must exist for a module to match.
        absent: Attribute paths that must not exist, or must be False or None.
        untouched: Paths whose parameters do not depend on the heads (a layer norm of the model's width).
        per_head: Paths of norms that span one head's width, if the module has them; one that spans several heads is
            refused, because cutting it would change the heads that stay.
        counts: Attributes that count heads or widths, kept true by a cut where the module has them.
        batch_axis: Axis of the gate's input that holds the examples.
        empty: ``(module) -> None`` that turns a cut module without heads into one that adds only the output
            projection's bias; None where the module's own code runs with no head, "refuse" where neither works.
        tiny: Builds a small random model with this attention and an example batch, for the laws; called with a seed.
    """

    name: str
    gate: str
    slabs: tuple[HeadSlab, ...]
    head_dim: str | int
    value_dim: str | int | None = None
    kind: Kind | Callable[[Any], Kind] = "self"
    requires: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    counts: tuple[tuple[str, Count], ...] = ()
    batch_axis: int = 0
    empty: Callable[[Any], None] | Literal["refuse"] | None = None
    tiny: Callable[[int], tuple[Any, Any]] | None = None

    def __post_init__(self) -> None:
        contexts = [s for s in self.slabs if s.units == ("context",)]
        if [s.path for s in contexts] != [self.gate] or contexts[0].axis != "in":
            must = (
                f"described by one slab of unit 'context', the gate's input: HeadSlab({self.gate!r}, 'in', 'context')"
            )
            raise InvalidValue(f"layout {self.name!r}", must, [s.path for s in contexts])
