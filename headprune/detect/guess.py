"""Guess how a module with an attention core keeps its heads, most likely layouts first.

``trace.py`` and ``reach.py`` show how many heads there are, which projections make queries, keys
and values, and which of their features influence which head. Three things remain to guess: the
packing of fused projections, which other tensors have an axis of heads, and which attributes count
heads. Names only affect the order. ``search.py`` proves or drops each guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from torch import Tensor, nn

from headprune.core.heads import Grouping, Kind
from headprune.core.layout import AttentionLayout, Count, HeadSlab
from headprune.core.slabs import HeadGeometry, kept_rows
from headprune.detect.reach import Influence, influences_all
from headprune.detect.trace import AttentionCore, Projection, is_projection
from headprune.model.sites import lookup

#: How many combinations of slabs are tried for each size; a wrong one mostly fails at once.
_COMBINATIONS = 48

#: How many assignments of key/value counts to attributes are tried.
_ASSIGNMENTS = 8

#: How many combinations are ranked at once; above, only the first tensors have options.
_RANKED = 20_000

#: A path and the count that a cut writes there.
_PathCount = tuple[str, Count]


@dataclass(frozen=True)
class _Sizes:
    """Head counts and widths that a guess assumes."""

    n_query: int
    n_kv: int
    head_dim: int
    value_dim: int
    grouping: Grouping = "contiguous"

    def width(self, unit: str) -> int:
        """Features of all heads together."""
        n_heads = self.n_kv if unit in ("key", "value", "kv_head") else self.n_query
        if unit in ("query", "key"):
            return n_heads * self.head_dim
        if unit == "gated_query":
            return n_heads * 2 * self.head_dim
        if unit in ("head", "kv_head"):
            return n_heads
        return n_heads * self.value_dim

    def features(self, slab: HeadSlab, head: int) -> list[int]:
        """The features of a slab that belong to a query head."""
        group_size = self.n_query // self.n_kv
        if self.grouping == "contiguous":
            kv_of = tuple(h // group_size for h in range(self.n_query))
        else:
            kv_of = tuple(h % self.n_kv for h in range(self.n_query))
        now = HeadGeometry(self.n_query, self.n_kv, self.head_dim, self.value_dim, None, kv_of)
        return kept_rows(now, slab.units, slab.packing, [head], [kv_of[head]])


def head_counts(core: AttentionCore, n_examples: int) -> list[int]:
    """Possible numbers of query heads: the recorded one, else each axis of the scores that fits."""
    if core.heads:
        return [core.heads]
    shape = core.softmax.shape
    if not shape:
        return []
    width = core.context_width
    # Heads have an axis of their own, or share the first one with the examples.
    axes = (*shape[1:-1], shape[0] // n_examples, shape[0])
    return list(dict.fromkeys(n for n in axes if 0 < n <= width and width % n == 0))


def guesses(
    module: nn.Module,
    core: AttentionCore,
    gate: Projection,
    n_query: int,
    influence: Influence,
    n_examples: int,
) -> Iterator[AttentionLayout]:
    """Layouts with ``n_query`` heads that fit what was recorded of a module, most likely first.

    Args:
        module: The module that holds the core.
        core: The core.
        gate: Its output projection.
        n_query: Number of query heads.
        influence: Of the features of its projections on its heads' outputs.
        n_examples: Rows of the example.
    """
    seen = set()
    for sizes in _sizes(core, gate, n_query):
        combinations = _slabs(module, core, gate, sizes, influence)
        for slabs, untouched in islice(combinations, _COMBINATIONS):
            base = _layout(module, gate, sizes, slabs, untouched)
            for guess in _variants(module, base, gate, sizes, n_examples):
                if guess not in seen:
                    seen.add(guess)
                    yield guess


def _layout(
    module: nn.Module,
    gate: Projection,
    sizes: _Sizes,
    slabs: tuple[HeadSlab, ...],
    untouched: tuple[str, ...],
) -> AttentionLayout:
    """A layout without counts."""
    per_head = tuple(p for p in untouched if _shape(module, p) == (sizes.head_dim,))
    shared = sizes.n_kv < sizes.n_query
    return AttentionLayout(
        name="detected",
        gate=gate.path,
        slabs=(*slabs, HeadSlab(gate.path, "in", "context")),
        head_dim=sizes.head_dim,
        value_dim=None if sizes.value_dim == sizes.head_dim else sizes.value_dim,
        kind=kind_of,
        untouched=tuple(p for p in untouched if p not in per_head),
        per_head=per_head,
        grouping=sizes.grouping,
        policies=("group", "balanced") if shared else ("group",),
        # No batch could prove that a cache works without heads.
        empty="refuse",
    )


def _variants(
    module: nn.Module, base: AttentionLayout, gate: Projection, sizes: _Sizes, n_examples: int
) -> Iterator[AttentionLayout]:
    """A layout with each place where examples may lie, and each set of counts."""
    children = [name for name, _ in module.named_children()]
    for axis, windows in _batch_axes(gate.given, n_examples):
        for counts in _counts(module, sizes):
            requires = tuple(dict.fromkeys([*children, *(path for path, _ in counts)]))
            yield replace(base, counts=counts, requires=requires, batch_axis=axis, windows=windows)


def kind_of(module: Any, name: str) -> Kind:
    """The kind of attention that a module's names and flags state."""
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


def numbers(module: nn.Module) -> dict[str, int]:
    """Whole-number attributes of a module and its parts, without its projections, by path."""
    values: dict[str, int] = {}
    for name, part in module.named_modules():
        if is_projection(part) or isinstance(part, (nn.Embedding, nn.LayerNorm, nn.Dropout)):
            continue
        for key, value in part.__dict__.items():
            # A layer's index is no count.
            hidden = key.startswith("_") or re.search(r"layer|idx|index", key)
            if type(value) is int and not hidden:
                values[f"{name}.{key}".lstrip(".")] = value
    return values


def _batch_axes(given: tuple[int, ...], n_examples: int) -> list[tuple[int, bool]]:
    """Axes where the examples may lie in the output projection's input, and whether in windows."""
    axes: list[tuple[int, bool]] = []
    if given and given[0] == n_examples:
        axes.append((0, False))
    if len(given) > 2 and given[1] == n_examples:
        axes.append((1, False))
    windows = len(given) > 2 and given[0] != n_examples and given[0] % n_examples == 0
    if windows or not axes:
        axes.append((0, windows))
    return axes


def _sizes(core: AttentionCore, gate: Projection, n_query: int) -> Iterator[_Sizes]:
    """Possible widths and numbers of key/value heads."""
    value_dim = gate.given[-1] // n_query
    widths_made = {p.path: p.made[-1] for p in core.before if p.linear and p.made}
    scoring = [widths_made[path] for path in core.scoring if path in widths_made]
    recorded = core.softmax.head_dim
    widths = [recorded or 0]
    if recorded is None or n_query * recorded not in scoring:
        widths.append(value_dim)
        widths += [features // n_query for features in scoring if features % n_query == 0]
    for head_dim in dict.fromkeys(w for w in widths if w):
        for n_kv in range(n_query, 0, -1):
            if n_query % n_kv:
                continue
            yield _Sizes(n_query, n_kv, head_dim, value_dim)
            if 1 < n_kv < n_query:
                yield _Sizes(n_query, n_kv, head_dim, value_dim, "interleaved")


def _slabs(
    module: nn.Module,
    core: AttentionCore,
    gate: Projection,
    sizes: _Sizes,
    influence: Influence,
) -> Iterator[tuple[tuple[HeadSlab, ...], tuple[str, ...]]]:
    """Slabs besides the gate's, and the paths of tensors that no cut touches."""
    options = []
    owned = [f"{gate.path}."]
    for path, part in module.named_modules():
        if is_projection(part) and path != gate.path:
            options.append(_of_projection(core, path, influence, sizes))
            owned.append(f"{path}.")
    parameters = {path for path, _ in module.named_parameters()}
    for path, tensor in _tensors(module):
        if path.startswith(tuple(owned)):
            continue
        roles = _of_tensor(path, tensor, sizes)
        # A buffer that may not have heads needs no mention.
        if path in parameters or len(roles) > 1:
            options.append(roles)
    for combination in _by_rank(options):
        slabs = tuple(role for role in combination if isinstance(role, HeadSlab))
        if _is_complete(core, sizes, slabs):
            yield slabs, tuple(role for role in combination if isinstance(role, str))


def _is_complete(core: AttentionCore, sizes: _Sizes, slabs: tuple[HeadSlab, ...]) -> bool:
    """Whether slabs hold all the queries, keys and values whose projections were recorded."""
    score_units: set[str] = set()
    value_units: set[str] = set()
    for slab in slabs:
        if slab.path in core.scoring:
            score_units.update(slab.units)
        if slab.path in core.valued:
            value_units.update(slab.units)
    if not slabs or (core.scoring and not score_units):
        return False
    if core.valued and "value" not in value_units:
        return False
    return sizes.n_kv == sizes.n_query or "key" in score_units


def _by_rank(options: list[list[HeadSlab | str]]) -> Iterator[tuple[HeadSlab | str, ...]]:
    """All combinations of one option each, those closest to every first option first."""
    total = 1
    for option in options:
        total *= len(option)
    if total > _RANKED:
        options = [o if i < 6 else o[:1] for i, o in enumerate(options)]
    ranked = sorted(product(*(range(len(o)) for o in options)), key=sum)
    for indices in ranked:
        yield tuple(option[i] for option, i in zip(options, indices, strict=True))


def _of_projection(
    core: AttentionCore, path: str, influence: Influence, sizes: _Sizes
) -> list[HeadSlab | str]:
    """Roles that a projection may have: slabs that fit its influence, or its path for none."""
    own_influence = influence.get(path)
    called = {p.path: p for p in (*core.before, *core.after)}
    if path not in called or not called[path].linear or (influence and own_influence is None):
        return [path]

    n_features = called[path].made[-1]
    slabs: list[HeadSlab | str] = []
    for units, packing in _roles(core, path):
        unit: Any = units[0] if len(units) == 1 else units
        slab = HeadSlab(path, "out", unit, packing)  # type: ignore[arg-type]
        if sum(map(sizes.width, units)) != n_features:
            continue
        if own_influence is None or _influences_own(slab, own_influence, sizes):
            slabs.append(slab)

    is_input = path in core.scoring or path in core.valued
    if own_influence is None:
        return slabs if is_input else [path, *slabs]
    if not own_influence.any():
        # An input without influence only chooses what is masked, or the example does not show it.
        return [*slabs, path] if is_input else [path, *slabs]
    if not is_input:
        return [*slabs, path]
    if not slabs and influences_all(own_influence):
        return [path]
    return slabs


def _influences_own(slab: HeadSlab, influence: Tensor, sizes: _Sizes) -> bool:
    """Whether only features that the slab assigns to a head influence it."""
    for head in range(sizes.n_query):
        influencing = influence[head].nonzero().flatten().tolist()
        if not set(influencing) <= set(sizes.features(slab, head)):
            return False
    return True


def _roles(core: AttentionCore, path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Units and packings that a projection may have, most likely first."""
    fused: list[tuple[str, ...]] = []
    if path in core.scoring and path in core.valued:
        single = ["key"]
        if path in core.both:
            fused.append(("query", "key", "value"))
        fused += [("key", "value"), ("query", "query", "key", "value")]
    elif path in core.scoring:
        query_first = _is_query(path, core.scoring.index(path))
        single = ["query", "key"] if query_first else ["key", "query"]
        if path in core.both:
            fused.append(("query", "key"))
        if query_first:
            fused += [("gated_query",), ("query", "query")]
    elif path in core.valued:
        single = ["value"]
    else:  # gates and the like
        single = ["head", "query", "value", "kv_head"]
    for unit in single:
        yield (unit,), "sequential"
    for units in fused:
        yield units, "sequential"
        yield units, "grouped"


def _is_query(path: str, index: int) -> bool:
    """Whether a projection of queries or keys makes queries, by its name, else by its place."""
    name = path.lower()
    if re.search(r"quer|(^|[._])w?_?q([._]|$)|to_q", name):
        return True
    return index == 0 and not re.search(r"key|(^|[._])w?_?k([._]|$)|to_k", name)


def _of_tensor(path: str, tensor: Tensor, sizes: _Sizes) -> list[HeadSlab | str]:
    """Roles that a tensor may have: an axis of heads, none (its path), an axis of features."""
    heads: list[HeadSlab | str] = []
    features: list[HeadSlab | str] = []
    axes = list(enumerate(tensor.shape))
    for axis, length in axes:
        if length == sizes.n_query:
            heads.append(HeadSlab(path, axis, "head"))
    for unit in ("query", "key", "value"):
        width = sizes.width(unit) if sizes.head_dim > 1 else 0
        for axis, length in axes:
            if length == width and HeadSlab(path, axis, "query") not in features:
                features.append(HeadSlab(path, axis, unit))
    if 1 < sizes.n_kv < sizes.n_query:
        for axis, length in axes:
            if length == sizes.n_kv:
                features.append(HeadSlab(path, axis, "kv_head"))
    return [*heads, path, *features]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain tensors that a module or one of its parts holds."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for name, part in module.named_modules():
        for key, value in part.__dict__.items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}".lstrip("."), value


def _shape(module: nn.Module, path: str) -> tuple[int, ...]:
    value = lookup(module, path)
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _counts(module: nn.Module, sizes: _Sizes) -> list[tuple[_PathCount, ...]]:
    """Possible sets of attributes that a cut keeps true, most likely first.

    Those that are named for heads come first, then all whose value fits, then fewer and none.
    """
    # 1. Which counts each attribute's value fits.
    heads: list[_PathCount] = []
    named: list[_PathCount] = []
    shared: list[tuple[str, list[Count]]] = []
    widths: list[_PathCount] = []
    for path, value in numbers(module).items():
        kv_counts = _kv_counts(path, value, sizes)
        if value == sizes.n_query:
            heads.append((path, "n_query_heads"))
            if _is_named_for_heads(path):
                named.append((path, "n_query_heads"))
        elif kv_counts:
            shared.append((path, kv_counts))
        elif value == sizes.n_query * sizes.head_dim:
            widths.append((path, "query_width"))
        elif value == sizes.n_query * sizes.value_dim:
            widths.append((path, "value_width"))

    # 2. Sets of them.
    sets: list[list[_PathCount]] = []
    for chosen in islice(product(*(counts for _, counts in shared)), _ASSIGNMENTS):
        kv = [(path, count) for (path, _), count in zip(shared, chosen, strict=True)]
        for own in (named, heads):
            sets.append([*own, *kv])
            sets.append([*own, *kv, *widths])
            if len(widths) > 1:
                sets += [[*own, *kv, width] for width in widths]
    for path, counts in shared:
        sets += [[*heads, (path, count)] for count in counts]
    sets += [heads, []]
    return list(dict.fromkeys(map(tuple, sets)))


def _kv_counts(path: str, value: int, sizes: _Sizes) -> list[Count]:
    """Counts of key/value heads that an attribute's value fits, most likely first."""
    if sizes.n_kv == sizes.n_query:
        return []
    counts: list[Count] = []
    if value == sizes.n_kv:
        counts.append("n_kv_heads")
    if value == sizes.n_query // sizes.n_kv:
        counts.append("group_size")
    if re.search(r"rep|group_size|per", path.rpartition(".")[2]):
        counts.reverse()
    return counts


def _is_named_for_heads(path: str) -> bool:
    name = path.rpartition(".")[2]
    return "head" in name and not re.search(r"dim|size|width", name)
