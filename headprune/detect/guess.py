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

from headprune.core.heads import Grouping
from headprune.core.layout import AttentionLayout, Count, HeadSlab
from headprune.core.layout_data import kind_of
from headprune.core.slabs import HeadGeometry, kept_rows
from headprune.detect.reach import Influence, influences_all
from headprune.detect.trace import AttentionCore, Projection, is_projection
from headprune.model.sites import lookup

#: How many combinations of slabs are tried for each size; a wrong one mostly fails at once.
_COMBINATIONS = 48

#: How many assignments of key/value counts to attributes are tried.
_ASSIGNMENTS = 8

#: How many combinations are ranked at once; above, only so many tensors have options.
_RANKED = 20_000
_FREE = 6

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
        kv_of = tuple(map(self._kv_head, range(self.n_query)))
        now = HeadGeometry(self.n_query, self.n_kv, self.head_dim, self.value_dim, None, kv_of)
        return kept_rows(now, slab.units, slab.packing, [head], [kv_of[head]])

    def _kv_head(self, head: int) -> int:
        """The key/value head of a query head."""
        if self.grouping == "contiguous":
            return head // (self.n_query // self.n_kv)
        return head % self.n_kv


def head_counts(core: AttentionCore, n_examples: int) -> list[int]:
    """Possible numbers of query heads, by the record or the axes of the scores."""
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
    # A vector of one head's width serves each head, such as a norm's weight.
    per_head = []
    other = []
    for path in untouched:
        if _shape(module, path) == (sizes.head_dim,):
            per_head.append(path)
        else:
            other.append(path)
    shared = sizes.n_kv < sizes.n_query
    return AttentionLayout(
        name="detected",
        gate=gate.path,
        slabs=(*slabs, HeadSlab(gate.path, "in", "context")),
        head_dim=sizes.head_dim,
        value_dim=None if sizes.value_dim == sizes.head_dim else sizes.value_dim,
        kind=kind_of,
        untouched=tuple(other),
        per_head=tuple(per_head),
        grouping=sizes.grouping,
        policies=("group", "balanced") if shared else ("group",),
        # No batch could prove that a cache works without heads.
        empty="refuse",
    )


def _variants(
    module: nn.Module, base: AttentionLayout, gate: Projection, sizes: _Sizes, n_examples: int
) -> Iterator[AttentionLayout]:
    """A layout with each place where examples may lie, and each set of counts."""
    children = dict(module.named_children())
    for axis, windows in _batch_axes(gate.input_shape, n_examples):
        for counts in _counts(module, sizes):
            # A module fits the layout if it has the same parts and attributes.
            requires = tuple({**children, **dict(counts)})
            yield replace(base, counts=counts, requires=requires, batch_axis=axis, windows=windows)


def numbers(module: nn.Module) -> dict[str, int]:
    """Whole-number attributes of a module and its parts, without its projections, by path."""
    values: dict[str, int] = {}
    for name, part in module.named_modules():
        if is_projection(part) or isinstance(part, (nn.Embedding, nn.LayerNorm, nn.Dropout)):
            continue
        for key, value in part.__dict__.items():
            # A layer's index is no count.
            hidden = key.startswith("_") or re.search(r"layer|idx|index", key)
            if type(value) is int and not hidden:  # a bool is none
                values[f"{name}.{key}".lstrip(".")] = value
    return values


def _batch_axes(input_shape: tuple[int, ...], n_examples: int) -> list[tuple[int, bool]]:
    """Axes where the examples may lie in the output projection's input, and whether in windows."""
    # [examples, tokens, features], [tokens, examples, features] or [rows, features].
    axes: list[tuple[int, bool]] = []
    if input_shape and input_shape[0] == n_examples:
        axes.append((0, False))
    if len(input_shape) > 2 and input_shape[1] == n_examples:
        axes.append((1, False))
    # Windows: each example's tokens are split over several rows.
    windows = (
        len(input_shape) > 2 and input_shape[0] != n_examples and input_shape[0] % n_examples == 0
    )
    if windows or not axes:
        axes.append((0, windows))
    return axes


def _sizes(core: AttentionCore, gate: Projection, n_query: int) -> Iterator[_Sizes]:
    """Possible widths and numbers of key/value heads."""
    value_dim = gate.input_shape[-1] // n_query
    for head_dim in _head_dims(core, n_query, value_dim):
        # As many key/value heads as query heads first.
        for n_kv in range(n_query, 0, -1):
            if n_query % n_kv:
                continue
            yield _Sizes(n_query, n_kv, head_dim, value_dim)
            if 1 < n_kv < n_query:
                yield _Sizes(n_query, n_kv, head_dim, value_dim, "interleaved")


def _head_dims(core: AttentionCore, n_query: int, value_dim: int) -> list[int]:
    """Possible widths of a query: the recorded one, and others if no projection makes that."""
    outputs = [
        p.output_shape[-1]
        for p in core.before
        if p.linear and p.output_shape and p.path in core.query_key_paths
    ]
    recorded = core.softmax.head_dim
    widths = [recorded or 0]
    if recorded is None or n_query * recorded not in outputs:
        widths.append(value_dim)
        widths += [features // n_query for features in outputs if features % n_query == 0]
    return list(dict.fromkeys(filter(None, widths)))


def _slabs(
    module: nn.Module,
    core: AttentionCore,
    gate: Projection,
    sizes: _Sizes,
    influence: Influence,
) -> Iterator[tuple[tuple[HeadSlab, ...], tuple[str, ...]]]:
    """Slabs besides the gate's, and the paths of tensors that no cut touches."""
    # 1. The roles that each projection and each tensor of no projection may have.
    options = []
    owned = [f"{gate.path}."]
    for path, part in module.named_modules():
        if is_projection(part) and path != gate.path:
            options.append(_of_projection(core, path, influence, sizes))
            owned.append(f"{path}.")
    parameters = dict(module.named_parameters())
    for path, tensor in _tensors(module):
        roles = _of_tensor(path, tensor, sizes)
        # A buffer without an axis that may be heads needs no mention.
        if not path.startswith(tuple(owned)) and (path in parameters or len(roles) > 1):
            options.append(roles)

    # 2. Combinations of them.
    for combination in _by_rank(options):
        slabs: list[HeadSlab] = []
        untouched: list[str] = []
        for role in combination:
            if isinstance(role, HeadSlab):
                slabs.append(role)
            else:
                untouched.append(role)
        if _is_complete(core, sizes, slabs):
            yield tuple(slabs), tuple(untouched)


def _is_complete(core: AttentionCore, sizes: _Sizes, slabs: list[HeadSlab]) -> bool:
    """Whether slabs hold all the queries, keys and values whose projections the trace recorded."""
    query_key_units: set[str] = set()
    value_units: set[str] = set()
    for slab in slabs:
        if slab.path in core.query_key_paths:
            query_key_units.update(slab.units)
        if slab.path in core.value_paths:
            value_units.update(slab.units)
    if not slabs or (core.query_key_paths and not query_key_units):
        return False
    # Queries or keys may come from outside of the projections; values may not.
    if core.value_paths and "value" not in value_units:
        return False
    # Where key/value heads are fewer than query heads, a slab must hold the keys.
    return sizes.n_kv == sizes.n_query or "key" in query_key_units


def _by_rank(options: list[list[HeadSlab | str]]) -> Iterator[tuple[HeadSlab | str, ...]]:
    """All combinations of one option each, those closest to every first option first."""
    total = 1
    for option in options:
        total *= len(option)
    # Sorting needs all of them in memory.
    if total > _RANKED:
        options = options[:_FREE] + [option[:1] for option in options[_FREE:]]
    ranked = sorted(product(*map(range, map(len, options))), key=sum)
    for indices in ranked:
        yield tuple(option[i] for option, i in zip(options, indices, strict=True))


def _of_projection(
    core: AttentionCore, path: str, influence: Influence, sizes: _Sizes
) -> list[HeadSlab | str]:
    """Roles that a projection may have: slabs, or its path for none."""
    projection = _called(core, path)
    own_influence = influence.get(path)
    if projection is None or not projection.linear or (influence and own_influence is None):
        return [path]
    slabs: list[HeadSlab | str] = []
    slabs += _fitting_slabs(core, projection, own_influence, sizes)
    has_influence = own_influence is not None and bool(own_influence.any())

    # 1. A projection of anything else than queries, keys or values.
    if path not in core.query_key_paths and path not in core.value_paths:
        return [*slabs, path] if has_influence else [path, *slabs]

    # 2. A projection of queries, keys or values.
    if own_influence is None:
        return slabs
    if not has_influence:  # it only chooses what is masked, or the example does not show it
        return [*slabs, path]
    if not slabs and influences_all(own_influence):
        return [path]
    return slabs


def _called(core: AttentionCore, path: str) -> Projection | None:
    """The record of a projection of a core."""
    for projection in (*core.after, *core.before):
        if projection.path == path:
            return projection
    return None


def _fitting_slabs(
    core: AttentionCore, projection: Projection, influence: Tensor | None, sizes: _Sizes
) -> Iterator[HeadSlab]:
    """Slabs that a projection's output may consist of, by its size and its influence."""
    for units, packing in _roles(core, projection.path):
        if sum(map(sizes.width, units)) != projection.output_shape[-1]:
            continue
        unit: Any = units[0] if len(units) == 1 else units
        slab = HeadSlab(projection.path, "out", unit, packing)  # type: ignore[arg-type]
        if influence is None or _influences_own(slab, influence, sizes):
            yield slab


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
    # 1. By where its output was used.
    if path in core.query_key_paths and path in core.value_paths:
        single = ["key"]
        if path in core.fused_paths:
            fused.append(("query", "key", "value"))
        fused += [("key", "value"), ("query", "query", "key", "value")]
    elif path in core.query_key_paths:
        query_first = _is_query(path, core.query_key_paths.index(path))
        single = ["query", "key"] if query_first else ["key", "query"]
        if path in core.fused_paths:
            fused.append(("query", "key"))
        if query_first:
            fused += [("gated_query",), ("query", "query")]
    elif path in core.value_paths:
        single = ["value"]
    else:  # gates and the like
        single = ["head", "query", "value", "kv_head"]
    # 2. One unit alone, then fused ones; "grouped" holds all units of one head side by side.
    for unit in single:
        yield (unit,), "sequential"
    for units in fused:
        yield units, "sequential"
        yield units, "grouped"


def _is_query(path: str, index: int) -> bool:
    """Whether a projection of queries or keys makes queries, by name or place."""
    name = path.lower()
    if re.search(r"quer|(^|[._])w?_?q([._]|$)|to_q", name):
        return True
    return index == 0 and not re.search(r"key|(^|[._])w?_?k([._]|$)|to_k", name)


def _of_tensor(path: str, tensor: Tensor, sizes: _Sizes) -> list[HeadSlab | str]:
    """Roles that a tensor may have: slabs, or its path for none."""
    heads: list[HeadSlab | str] = []
    features: list[HeadSlab | str] = []
    axes = list(enumerate(tensor.shape))
    # 1. One number per head.
    for axis, length in axes:
        if length == sizes.n_query:
            heads.append(HeadSlab(path, axis, "head"))
    # 2. One number per feature of all heads; a width that fits queries counts as theirs.
    for unit in ("query", "key", "value"):
        width = sizes.width(unit) if sizes.head_dim > 1 else 0
        for axis, length in axes:
            if length == width and HeadSlab(path, axis, "query") not in features:
                features.append(HeadSlab(path, axis, unit))
    # 3. One number per key/value head.
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
    # 1. Which counts each attribute's value fits. It may fit several: heads come first.
    heads: list[_PathCount] = []
    shared: list[tuple[str, list[Count]]] = []
    widths: list[_PathCount] = []
    for path, value in numbers(module).items():
        kv_counts = _kv_counts(path, value, sizes)
        if value == sizes.n_query:
            heads.append((path, "n_query_heads"))
        elif kv_counts:
            shared.append((path, kv_counts))
        elif value == sizes.n_query * sizes.head_dim:
            widths.append((path, "query_width"))
        elif value == sizes.n_query * sizes.value_dim:
            widths.append((path, "value_width"))

    # 2. Sets of them.
    sets = _sets_of_counts(heads, shared, widths)
    return list(dict.fromkeys(map(tuple, sets)))


def _sets_of_counts(
    heads: list[_PathCount], shared: list[tuple[str, list[Count]]], widths: list[_PathCount]
) -> list[list[_PathCount]]:
    """Sets of attributes, most likely first; some may be there twice."""
    named = [pair for pair in heads if _is_named_for_heads(pair[0])]
    sets: list[list[_PathCount]] = []
    kv_paths = [path for path, _ in shared]
    for chosen in islice(product(*(counts for _, counts in shared)), _ASSIGNMENTS):
        kv = list(zip(kv_paths, chosen, strict=True))
        sets += _with_widths([*named, *kv], widths)
        sets += _with_widths([*heads, *kv], widths)
    for path, counts in shared:
        sets += [[*heads, (path, count)] for count in counts]
    return [*sets, heads, []]


def _with_widths(counts: list[_PathCount], widths: list[_PathCount]) -> list[list[_PathCount]]:
    """Counts without widths, with all of them, and with each."""
    sets = [counts, [*counts, *widths]]
    if len(widths) > 1:
        sets += [[*counts, width] for width in widths]
    return sets


def _kv_counts(path: str, value: int, sizes: _Sizes) -> list[Count]:
    """Counts of key/value heads that an attribute's value fits, most likely first."""
    if sizes.n_kv == sizes.n_query:
        return []  # no attribute can count what is not shared
    counts: list[Count] = []
    if value == sizes.n_kv:
        counts.append("n_kv_heads")
    if value == sizes.n_query // sizes.n_kv:
        counts.append("group_size")
    # Such as `n_rep` and `queries_per_group`. Only the order of the guesses depends on it.
    if re.search(r"rep|group_size|per", path.rpartition(".")[2]):
        counts.reverse()
    return counts


def _is_named_for_heads(path: str) -> bool:
    name = path.rpartition(".")[2]
    return "head" in name and not re.search(r"dim|size|width", name)
