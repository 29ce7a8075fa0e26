"""How a family of attention modules stores its heads: HeadSlab, AttentionLayout, HeadState.

A layout is data. It names the tensors that are made of heads, the module whose input is the heads'
outputs side by side (the gate point), the attributes that count heads, and the parameters that a
cut does not change. A module matches a layout by structure alone: every slab exists, a whole number
of heads explains every length, and every parameter of the module is accounted for. A module with
any other parameter is refused, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import POLICIES, Grouping, Kind, Policy
from headprune.core.mixin import WITHOUT_HEADS, Mixin, original_class, refusal
from headprune.core.slabs import Packing, check_slab

#: Attribute of a cut module that holds its original heads (a HeadState).
STATE_ATTRIBUTE = "headprune_state"

#: Attribute of a projection that holds its gates inside a ``gated`` block.
GATES_ATTRIBUTE = "headprune_gates"

#: Attribute of an output projection that lists the heads whose mean was added to its bias.
FOLDED_ATTRIBUTE = "headprune_folded"

#: Number that a count attribute of a module holds, by its name in HeadGeometry.
Count = Literal["n_query_heads", "n_kv_heads", "group_size", "query_width", "value_width"]

#: Heads whose keys and values a cache holds; or numbers per token of latents that all heads share.
Cached = Literal["key/value", "query"] | int


@dataclass(frozen=True)
class HeadState:
    """The original heads of a cut module.

    Args:
        n_query_heads: Query heads of the uncut module.
        n_kv_heads: Key/value heads of the uncut module.
        heads: Original indices of the present heads.
        widths: Of a query, a value and a key, where no attribute of the module holds them.
        layout: The layout's name; a module without heads could match several.
        own: The layout itself, where this library has none of this name.
    """

    n_query_heads: int
    n_kv_heads: int
    heads: tuple[int, ...]
    widths: tuple[int, int, int | None] | None = None
    layout: str | None = None
    own: AttentionLayout | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.uneven  # noqa: B018 (computed now: a module reads it in every forward)

    @cached_property
    def uneven(self) -> tuple[int, ...] | None:
        """Query heads per present key/value head; None where all have as many.

        For modules in which consecutive heads share a key/value head.
        """
        group_size = self.n_query_heads // max(1, self.n_kv_heads)
        readers = Counter(head // group_size for head in self.heads)
        sizes = tuple(readers[kv] for kv in range(self.n_kv_heads) if kv in readers)
        return sizes if len(set(sizes)) > 1 else None


@dataclass(frozen=True)
class HeadSlab:
    """One axis of one tensor, or of one projection, that is cut head by head.

    Args:
        path: A projection (cut together with its bias), a bare tensor, or a ``ModuleList`` with one
            module per head, relative to the attention module.
        axis: ``out`` or ``in`` features for a projection; a dimension for a bare tensor; ``list``
            for a ModuleList.
        unit: Kind of block, see ``core/slabs.py``; several for a fused projection.
        packing: The order of several units on the axis.
        optional: Whether a module without it matches too.
    """

    path: str
    axis: Literal["in", "out", "list"] | int
    unit: str | tuple[str, ...]
    packing: Packing = "sequential"
    optional: bool = False

    def __post_init__(self) -> None:
        check_slab(self.units, self.packing)
        is_dimension = isinstance(self.axis, int) and not isinstance(self.axis, bool)
        if self.axis not in ("in", "out", "list") and not is_dimension:
            must = "'in', 'out', 'list' or a dimension"
            raise InvalidValue(f"HeadSlab({self.path!r}).axis", must, repr(self.axis))

    @property
    def units(self) -> tuple[str, ...]:
        """The kinds of block, in their order on the axis."""
        if isinstance(self.unit, str):
            return (self.unit,)
        return tuple(self.unit)


def separate_projections(query: str, key: str, value: str, output: str) -> tuple[HeadSlab, ...]:
    """Return the slabs of four separate projections, by their paths in the attention module."""
    return (
        HeadSlab(query, "out", "query"),
        HeadSlab(key, "out", "key"),
        HeadSlab(value, "out", "value"),
        HeadSlab(output, "in", "context"),
    )


#: Builds a small random model with an attention, and a batch for it; takes a seed.
Tiny = Callable[[int], tuple[Any, Any]]

#: A width: an attribute's path, the number itself, or a function of the uncut module.
Width = str | int | Callable[[Any], int]


@dataclass(frozen=True)
class AttentionLayout:
    """Where one family of attention modules stores its heads.

    Args:
        name: The registered name.
        gate: Path of the output projection; its input is gated.
        slabs: Every tensor axis that is made of heads.
        head_dim: Width of a query head.
        value_dim: Width of a value head; None where it is ``head_dim``.
        key_dim: Width of a key's block; None where it is ``head_dim``.
        kind: ``self``, ``causal``, ``cross`` or ``feed_forward``.
        requires: Attributes that must exist.
        absent: Attributes that must not exist.
        untouched: Paths of parameters without heads.
        per_head: Paths of modules that each head passes by itself.
        counts: Attributes that count heads or widths.
        batch_axis: The axis of examples in the gate's input.
        windows: Whether it holds several windows per example.
        grouping: Which query heads share a key/value head.
        cached: What a causal module's cache holds.
        policies: Which heads can be removed where several share a key/value head.
        adapt: Runs after every cut.
        products: Multiply-adds that slabs do not show.
        exposed: A class that calls the output projection as a module.
        empty: Makes a module run without heads; ``"refuse"``: it cannot.
        proves: Whether ``head_dim`` checks the module's own code.
        families: Model families, each with a tiny model for the tests.
    """

    name: str
    # Its input is the heads' outputs side by side, [..., heads * value_dim]. An empty path: the
    # module has no output projection. Its own output is gated then, and keeps its width.
    gate: str
    # The gate's input is among them, with unit ``context``.
    slabs: tuple[HeadSlab, ...]
    # Width of a query head.
    head_dim: Width
    # Width of a value head; None where it equals ``head_dim``.
    value_dim: Width | None = None
    # Width of a key's block; None where it equals ``head_dim``.
    key_dim: Width | None = None
    # Or a function of the module and its name that says which.
    kind: Kind | Callable[[Any, str], Kind] = "self"
    # Attribute paths that must exist for a module to match.
    requires: tuple[str, ...] = ()
    # Attribute paths that must not exist, or must be False or None.
    absent: tuple[str, ...] = ()
    # Paths whose parameters do not depend on the heads, such as a layer norm of the model's width.
    untouched: tuple[str, ...] = ()
    # Paths of norms that span one head's width, and of linear layers that each head passes by
    # itself; they need not exist. A norm across several heads is refused: a cut would change the
    # kept heads.
    per_head: tuple[str, ...] = ()
    # Attributes of the module that count heads, and what they count. A cut keeps them true. A name
    # that the module lacks is passed over: families of one layout may have different ones.
    counts: tuple[tuple[str, Count], ...] = ()
    # Axis of the gate's input that holds the examples.
    batch_axis: int = 0
    # Whether that axis holds several windows per example, one example's after another's.
    windows: bool = False
    # Which query heads share a key/value head.
    grouping: Grouping = "contiguous"
    # What a causal module's cache holds keys and values of: each key/value head, or each query head
    # (repeated before they are cached). A number: latents that all heads share, so many per token.
    cached: Cached | Callable[[Any], Cached] = "key/value"
    # Which heads can be removed where several share a key/value head. The first is taken where the
    # user's choice makes no difference.
    policies: tuple[Policy, ...] = ("group",)
    # ``(module, model) -> None``: runs after every cut for what slabs and counts do not describe,
    # such as a bias for all heads that is an argument. Its docstring says what it does;
    # docs/layouts.md quotes it.
    adapt: Callable[[Any, Any], None] | None = None
    # ``(module) -> (per query token, per key token)``: multiply-adds of a head besides those of
    # linear layers and of its products with keys and values (DeBERTa's with relative positions).
    products: Callable[[Any], tuple[int, int]] | None = None
    # A class to put in front where the module's own code does not call its output projection, so
    # that no gate sees its input. It computes the same and calls the projection.
    exposed: type[Mixin] | None = None
    # ``(module) -> None``: turns a cut module without heads into one that adds only the output
    # projection's bias. None: the module's own code runs without heads (fused attention of no heads
    # is computed by us, see ``layouts/_own_code.py``). "refuse": neither works. If it refuses some
    # modules, its attribute ``refusal``, ``(module) -> UnsupportedModel | None``, says so before.
    empty: Callable[[Any], None] | Literal["refuse"] | None = None
    # Whether ``head_dim`` runs the module's own code and refuses a module that would not lose heads
    # exactly. Code that is not a library's is cut without an example only then.
    proves: bool | Callable[[Any], bool] = False
    # The model families that are known to have it.
    families: tuple[tuple[str, Tiny], ...] = ()

    def __post_init__(self) -> None:
        contexts = [slab for slab in self.slabs if slab.units == ("context",)]
        paths = [slab.path for slab in contexts]
        if self.gate and (paths != [self.gate] or contexts[0].axis != "in"):
            must = f"the one slab of unit 'context': HeadSlab({self.gate!r}, 'in', 'context')"
            got = f"slabs of 'context' at {paths}"
            hint = "gate and that slab name the same projection, which reads all heads' outputs."
            raise InvalidValue(f"gate {self.gate!r} of layout {self.name!r}", must, got, hint)
        if not self.policies or not set(self.policies) <= set(POLICIES):
            must = f"some of {', '.join(POLICIES)}"
            raise InvalidValue(f"layout {self.name!r}.policies", must, self.policies)

    @property
    def is_feed_forward(self) -> bool:
        """Whether its heads are the neurons of a feed-forward."""
        return self.kind == "feed_forward"

    def refusal(self, module: Any) -> UnsupportedModel | None:
        """Why a module must keep a head; None where it can lose all of them.

        ``empty`` may still refuse a module when it is called.
        """
        if self.empty == "refuse":
            name = original_class(module).__name__
            return UnsupportedModel(name, f"{WITHOUT_HEADS} (layout {self.name!r})", "none kept")
        if self.empty is None:
            return refusal(module, WITHOUT_HEADS)  # a class of ours is put in front of it
        check: Callable[[Any], UnsupportedModel | None] | None
        check = getattr(self.empty, "refusal", None)
        return None if check is None else check(module)

    def tiny(self, seed: int, family: str | None = None) -> tuple[Any, Any]:
        """Build the tiny model and batch of a family, by default the first one."""
        build = self.families[0][1] if family is None else dict(self.families)[family]
        return build(seed)
