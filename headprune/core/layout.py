"""How a family of attention modules keeps its heads: HeadSlab and AttentionLayout, plus the state
of a cut module.

A layout is data. It names the tensors that are made of heads, the module whose input is the heads'
outputs side by side (the gate point), the attributes that count heads, and which other parameters
may stay as they are. A module matches a layout by structure alone: every slab is there, every
length is explained by a whole number of heads, and every parameter of the module is accounted for.
What is not accounted for is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import POLICIES, Grouping, Kind, Policy
from headprune.core.mixin import WITHOUT_HEADS, Mixin, original_class, refusal
from headprune.core.slabs import Packing, check_slab

#: Attribute under which a module that has been cut remembers its original heads (a HeadState).
STATE_ATTRIBUTE = "headprune_state"

#: Attribute under which a projection holds its gates while a ``gated`` block lasts.
GATES_ATTRIBUTE = "headprune_gates"

#: Attribute under which an output projection remembers the heads whose mean its bias holds.
FOLDED_ATTRIBUTE = "headprune_folded"

#: What a count attribute of a module holds, in words of HeadGeometry.
Count = Literal["n_query_heads", "n_kv_heads", "group_size", "query_width", "value_width"]


#: Heads whose keys and values a cache holds; or how many numbers a token, of latents that all heads
#: share.
Cached = Literal["key/value", "query"] | int


@dataclass(frozen=True)
class HeadState:
    """What a cut module remembers: the original counts, which original heads are left, widths
    (query, value, key) where no attribute of the module tells them, and the layout: without heads,
    a module could be of several."""

    n_query_heads: int
    n_kv_heads: int
    heads: tuple[int, ...]
    widths: tuple[int, int, int | None] | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        self.uneven  # noqa: B018 (worked out now: a module asks in every forward)

    @cached_property
    def uneven(self) -> tuple[int, ...] | None:
        """How many query heads read each key/value head that is left, where consecutive heads share
        one; None where all are as many."""
        size = self.n_query_heads // max(1, self.n_kv_heads)
        readers = [sum(h // size == kv for h in self.heads) for kv in range(self.n_kv_heads)]
        sizes = tuple(n for n in readers if n)
        return sizes if len(set(sizes)) > 1 else None


@dataclass(frozen=True)
class HeadSlab:
    """One axis of one tensor, or of one projection, that is cut head by head.

    Args:
        path: A projection (cut together with its bias), a bare tensor, or a ``ModuleList`` with one
            module a head, relative to the attention module.
        axis: ``out`` or ``in`` features for a projection; a dimension for a bare tensor; ``list``
            for a ModuleList.
        unit: What the blocks are, see ``core/slabs.py``; several for a fused projection.
        packing: How several units lie on the axis.
        optional: Whether a module without it matches too.
    """

    path: str
    axis: Literal["in", "out", "list"] | int
    unit: str | tuple[str, ...]
    packing: Packing = "sequential"
    optional: bool = False

    def __post_init__(self) -> None:
        check_slab(self.units, self.packing)
        if self.axis not in ("in", "out", "list") and (
            not isinstance(self.axis, int) or isinstance(self.axis, bool)
        ):
            raise InvalidValue(
                f"HeadSlab({self.path!r}).axis",
                "'in', 'out', 'list' or a dimension",
                repr(self.axis),
            )

    @property
    def units(self) -> tuple[str, ...]:
        return (self.unit,) if isinstance(self.unit, str) else tuple(self.unit)


#: Builds a small random model with an attention, and an example batch for it; called with a seed.
Tiny = Callable[[int], tuple[Any, Any]]

#: A width: an attribute's path, the number itself, or a function of the uncut module.
Width = str | int | Callable[[Any], int]


@dataclass(frozen=True)
class AttentionLayout:
    """Where one family of attention modules keeps its heads.

    Args:
        name: The registered name.
        gate: Path of the output projection; its input is gated, ``[..., heads * value_dim]``. Empty
            where there is
            none: then the module's own output is the heads' outputs side by side, and keeps its
                width.
        slabs: Every tensor axis that is made of heads; the gate's input is among them with unit
            ``context``.
        head_dim: Width of a query head.
        value_dim: Width of a value head; None where it equals ``head_dim``.
        key_dim: Width of a key's block where it is not ``head_dim``.
        kind: ``self``, ``causal``, ``cross``, or a function of the module and its name that says
            which.
        requires: Attribute paths that must exist for a module to match.
        absent: Attribute paths that must not exist, or must be False or None.
        untouched: Paths whose parameters do not depend on the heads (a layer norm of the model's
            width).
        per_head: Paths of norms that span one head's width, and of linear layers that each head
            passes by itself, if the module has them; one that spans several heads is refused,
            because cutting it would change the heads that stay.
        counts: Attributes that count heads or widths, kept true by a cut where the module has them.
        batch_axis: Axis of the gate's input that holds the examples.
        windows: Whether that axis holds several windows of each example, one example's after
            another's.
        grouping: Which query heads share a key/value head.
        cached: Of what a causal module's cache holds keys and values: each key/value head, or each
            query head (repeated before they are cached). A number where it holds latents that all
            heads share: how many a token.
        policies: What may leave where they do; the first is taken where the user's choice does not
            matter.
        adapt: ``(module, model) -> None``, run after every cut for what no slab or count says, for
            example a bias that comes as an argument for all heads. Its docstring says what it does;
            docs/layouts.md quotes it.
        products: ``(module) -> (a query token, a key token)``: multiply-adds of a head for its cost
            beyond those of linear layers and of its products with keys and values (DeBERTa's with
            relative positions).
        exposed: A class to put in front where the module's own code passes by its output
            projection's ``forward`` (and so by every gate); it computes the same and calls the
            projection.
        empty: ``(module) -> None`` that turns a cut module without heads into one that adds only
            the output projection's bias; None where the module's own code runs with no head (fused
            attention of no heads is answered by us, see ``layouts/_own_code.py``), "refuse" where
            neither works. If it refuses some modules, its attribute ``refusal``,
            ``(module) -> UnsupportedModel | None``, says so before.
        proves: Whether ``head_dim`` runs the module's own code and refuses what would not lose
            heads exactly. Other code than a library's is cut without an example only then.
        families: The model families that are known to have it, each with a tiny model for the laws.
    """

    name: str
    gate: str
    slabs: tuple[HeadSlab, ...]
    head_dim: Width
    value_dim: Width | None = None
    key_dim: Width | None = None
    kind: Kind | Callable[[Any, str], Kind] = "self"
    requires: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    counts: tuple[tuple[str, Count], ...] = ()
    batch_axis: int = 0
    windows: bool = False
    grouping: Grouping = "contiguous"
    cached: Cached | Callable[[Any], Cached] = "key/value"
    policies: tuple[Policy, ...] = ("group",)
    adapt: Callable[[Any, Any], None] | None = None
    products: Callable[[Any], tuple[int, int]] | None = None
    exposed: type[Mixin] | None = None
    empty: Callable[[Any], None] | Literal["refuse"] | None = None
    proves: bool | Callable[[Any], bool] = False
    families: tuple[tuple[str, Tiny], ...] = ()

    def __post_init__(self) -> None:
        contexts = [s for s in self.slabs if s.units == ("context",)]
        if self.gate and ([s.path for s in contexts] != [self.gate] or contexts[0].axis != "in"):
            must = (
                "described by one slab of unit 'context', the gate's input:"
                f" HeadSlab({self.gate!r}, 'in', 'context')"
            )
            raise InvalidValue(f"layout {self.name!r}", must, [s.path for s in contexts])
        if not self.policies or not set(self.policies) <= set(POLICIES):
            raise InvalidValue(
                f"layout {self.name!r}.policies", f"some of {', '.join(POLICIES)}", self.policies
            )

    def refusal(self, module: Any) -> UnsupportedModel | None:
        """Why a module must keep a head; None where it can lose all, as far as ``empty`` tells
        before it is called."""
        if self.empty == "refuse":
            name = original_class(module).__name__
            return UnsupportedModel(name, f"left with a head (layout {self.name!r})", "none kept")
        if self.empty is None:
            return refusal(module, WITHOUT_HEADS)  # a class is put in front of it
        told: Callable[[Any], UnsupportedModel | None] | None = getattr(self.empty, "refusal", None)
        return None if told is None else told(module)

    def tiny(self, seed: int, family: str | None = None) -> tuple[Any, Any]:
        """The tiny model and batch of a family, by default of the first one."""
        return (self.families[0][1] if family is None else dict(self.families)[family])(seed)
