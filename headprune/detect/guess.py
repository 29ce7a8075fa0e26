"""Guesses of how a module with an attention keeps its heads, the likeliest first; ``detect.py``
proves or drops them.

How many heads there are, which projections make queries, keys and values, and which of their
features reach which head was seen (``trace.py``). What is left to guess is the packing of fused
projections, which other tensors are made of heads, and which attributes count them. Names are hints
for the order only.
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
from headprune.detect.reach import Reach, of_all
from headprune.detect.trace import Core, Projection, is_projection
from headprune.model.sites import lookup

#: How many guesses of slabs one module is worth; each costs a forward pass or two, a wrong one
#: mostly less.
_GUESSES = 48


@dataclass(frozen=True)
class _Sizes:
    """Head counts and widths that a guess starts from."""

    n_query: int
    n_kv: int
    head_dim: int
    value_dim: int
    grouping: Grouping = "contiguous"

    def width(self, unit: str) -> int:
        """Features of all heads together."""
        one = {
            "query": self.head_dim,
            "gated_query": 2 * self.head_dim,
            "key": self.head_dim,
            "head": 1,
            "kv_head": 1,
        }
        return (self.n_kv if unit in ("key", "value", "kv_head") else self.n_query) * one.get(
            unit, self.value_dim
        )

    def rows(self, slab: HeadSlab, head: int) -> list[int]:
        """The features of a slab that belong to a query head."""
        contiguous = self.grouping == "contiguous"
        size = self.n_query // self.n_kv
        kv_of = tuple(h // size if contiguous else h % self.n_kv for h in range(self.n_query))
        now = HeadGeometry(self.n_query, self.n_kv, self.head_dim, self.value_dim, None, kv_of)
        return kept_rows(now, slab.units, slab.packing, [head], [kv_of[head]])


def head_counts(core: Core, n_examples: int) -> list[int]:
    """How many query heads there may be: what was seen or, where a value's width was not, an axis
    of the scores."""
    if core.heads:
        return [core.heads]
    shape, features = (
        core.softmax.shape,
        core.gate.given[-1] if core.gate and core.gate.given else 0,
    )
    axes = (*shape[1:-1], shape[0] // n_examples, shape[0]) if shape else ()
    return list(dict.fromkeys(n for n in axes if 0 < n <= features and features % n == 0))


def guesses(
    module: nn.Module, core: Core, gate: Projection, n_query: int, reached: Reach, n_examples: int
) -> Iterator[AttentionLayout]:
    """Layouts with so many query heads that fit what was seen of ``module``, the likeliest
    first."""
    children = tuple(name for name, _ in module.named_children())
    seen = set()
    for sizes in _sizes(core, gate, n_query):
        for slabs, untouched in islice(_slabs(module, core, gate, sizes, reached), _GUESSES):
            per_head = tuple(p for p in untouched if _shape(module, p) == (sizes.head_dim,))
            layout = AttentionLayout(
                name="detected",
                gate=gate.path,
                slabs=(*slabs, HeadSlab(gate.path, "in", "context")),
                head_dim=sizes.head_dim,
                value_dim=None if sizes.value_dim == sizes.head_dim else sizes.value_dim,
                kind=kind_of,
                untouched=tuple(p for p in untouched if p not in per_head),
                per_head=per_head,
                grouping=sizes.grouping,
                policies=("group", "balanced") if sizes.n_kv < sizes.n_query else ("group",),
                # No batch could prove that a cache works without heads.
                empty="refuse",
            )
            for axis, windows in _batches(gate.given, n_examples):
                for counts in _counts(module, sizes):
                    requires = tuple(dict.fromkeys((*children, *(path for path, _ in counts))))
                    found = replace(
                        layout, counts=counts, requires=requires, batch_axis=axis, windows=windows
                    )
                    if found not in seen:
                        seen.add(found)
                        yield found


def kind_of(module: Any, name: str) -> Kind:
    """What a module attends to, as far as its names and flags tell."""
    words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    if "cross" in words or "encoder_attn" in words or "encdec" in words:
        return "cross"
    parts = (module, *module.children())
    return (
        "causal"
        if any(getattr(p, "is_causal", False) or getattr(p, "is_decoder", False) for p in parts)
        else "self"
    )


@dataclass(frozen=True)
class SeenKind:
    """``AttentionLayout.kind`` of modules some of which were seen to be causal; of others what
    ``kind_of`` says.

    Args:
        causal: Names of the causal ones; None where all were.
    """

    causal: tuple[str, ...] | None

    def __call__(self, module: Any, name: str) -> Kind:
        kind = kind_of(module, name)
        seen = self.causal is None or name in self.causal
        return "causal" if seen and kind == "self" else kind


def numbers(module: nn.Module) -> dict[str, int]:
    """Whole-number attributes of a module and of those in it, but not of its projections, by
    path."""
    found: dict[str, int] = {}
    for name, part in module.named_modules():
        if is_projection(part) or isinstance(part, (nn.Embedding, nn.LayerNorm, nn.Dropout)):
            continue
        for key, value in part.__dict__.items():
            if (
                type(value) is int
                and not key.startswith("_")
                and not re.search(r"layer|idx|index", key)
            ):
                found[f"{name}.{key}".lstrip(".")] = value
    return found


def _batches(given: tuple[int, ...], n: int) -> list[tuple[int, bool]]:
    """Where the examples may lie in the output projection's input, and whether in windows."""
    axes = [
        axis
        for axis in (0, 1)
        if len(given) > axis and given[axis] == n and (axis == 0 or len(given) > 2)
    ]
    windows = len(given) > 2 and given[0] != n and given[0] % n == 0
    return [*((axis, False) for axis in axes), *([(0, windows)] if windows or not axes else [])]


def _sizes(core: Core, gate: Projection, n_query: int) -> Iterator[_Sizes]:
    value_dim = gate.given[-1] // n_query
    made = {p.path: p.made[-1] for p in core.before if p.linear and p.made}
    scoring = [made[p] for p in core.scoring if p in made]
    seen = core.softmax.head_dim
    widths = [seen] if seen else []
    if seen is None or n_query * seen not in scoring:
        widths += [value_dim, *(rows // n_query for rows in scoring if rows % n_query == 0)]
    for head_dim in dict.fromkeys(w for w in widths if w):
        divisors = [k for k in range(n_query, 0, -1) if n_query % k == 0]
        for n_kv in divisors:
            yield _Sizes(n_query, n_kv, head_dim, value_dim)
            if 1 < n_kv < n_query:
                yield _Sizes(n_query, n_kv, head_dim, value_dim, "interleaved")


def _slabs(
    module: nn.Module, core: Core, gate: Projection, sizes: _Sizes, reached: Reach
) -> Iterator[tuple[tuple[HeadSlab, ...], tuple[str, ...]]]:
    """Slabs beside the gate's, and the paths that no cut touches."""
    projections = [
        n for n, part in module.named_modules() if is_projection(part) and n != gate.path
    ]
    options = [_of_projection(core, path, reached, sizes) for path in projections]
    owned = tuple(f"{path}." for path in (*projections, gate.path))
    for path, tensor in _tensors(module):
        if not path.startswith(owned):
            found = _of_tensor(path, tensor, sizes)
            if path in dict(module.named_parameters()) or len(found) > 1:
                options.append(found)
    for chosen in _by_rank(options):
        slabs = tuple(c for c in chosen if isinstance(c, HeadSlab))
        units = {
            p: {u for s in slabs if s.path in p for u in s.units}
            for p in (core.scoring, core.valued)
        }
        missing = (core.scoring and not units[core.scoring]) or (
            core.valued and "value" not in units[core.valued]
        )
        keyless = sizes.n_kv < sizes.n_query and "key" not in units[core.scoring]
        if slabs and not missing and not keyless:
            yield slabs, tuple(c for c in chosen if isinstance(c, str))


def _by_rank(options: list[list[HeadSlab | str]]) -> Iterator[tuple[HeadSlab | str, ...]]:
    """All choices of one each, those nearest to every first option first."""
    total = 1
    for o in options:
        total *= len(o)
    if total > 20_000:
        options = [o if i < 6 else o[:1] for i, o in enumerate(options)]
    ranked = sorted(product(*(range(len(o)) for o in options)), key=sum)
    for choice in ranked:
        yield tuple(o[i] for o, i in zip(options, choice, strict=True))


def _of_projection(core: Core, path: str, reached: Reach, sizes: _Sizes) -> list[HeadSlab | str]:
    """What a projection may be: slabs whose every feature reaches the heads that it should, or none
    of the heads'."""
    reaching = reached.get(path)
    called = {p.path: p for p in (*core.before, *core.after)}
    if path not in called or not called[path].linear or (reached and reaching is None):
        return [path]
    rows = called[path].made[-1]
    part: list[HeadSlab | str] = []
    for units, packing in _roles(core, path):
        slab = HeadSlab(path, "out", units[0] if len(units) == 1 else units, packing)  # type: ignore[arg-type]
        if sum(map(sizes.width, units)) == rows and _reaches_only(slab, reaching, sizes):
            part.append(slab)
    if path in (*core.scoring, *core.valued):
        if reaching is not None and not reaching.any():
            return [*part, path]  # it only chooses what is masked, or the example does not show it
        return part or ([path] if reaching is not None and of_all(reaching) else [])
    return [path, *part] if reaching is None or not reaching.any() else [*part, path]


def _reaches_only(slab: HeadSlab, reaching: Tensor | None, sizes: _Sizes) -> bool:
    """Whether no head is changed by features beyond those that the slab says are its own."""
    if reaching is None:
        return True
    rows = [set(sizes.rows(slab, head)) for head in range(sizes.n_query)]
    return all(set(reaching[h].nonzero().flatten().tolist()) <= own for h, own in enumerate(rows))


def _roles(core: Core, path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Units and packings that a projection may have by where its output went; the likeliest
    first."""
    fused: list[tuple[str, ...]] = []
    if path in core.scoring and path in core.valued:
        fused = [("query", "key", "value")] if path in core.both else []
        fused += [("key", "value"), ("query", "query", "key", "value")]
        yield ("key",), "sequential"
    elif path in core.scoring:
        query_first = _is_query(path, core.scoring.index(path))
        yield from (
            ((unit,), "sequential")
            for unit in (("query", "key") if query_first else ("key", "query"))
        )
        fused = [("query", "key")] if path in core.both else []
        fused += [("gated_query",), ("query", "query")] if query_first else []
    elif path in core.valued:
        yield ("value",), "sequential"
    else:  # gates and the like
        yield from (((unit,), "sequential") for unit in ("head", "query", "value", "kv_head"))
    for units in fused:
        yield units, "sequential"
        yield units, "grouped"


def _is_query(path: str, index: int) -> bool:
    leaf = path.lower()
    if re.search(r"quer|(^|[._])w?_?q([._]|$)|to_q", leaf):
        return True
    return index == 0 and not re.search(r"key|(^|[._])w?_?k([._]|$)|to_k", leaf)


def _of_tensor(path: str, tensor: Tensor, sizes: _Sizes) -> list[HeadSlab | str]:
    axes = list(enumerate(tensor.shape))
    heads: list[HeadSlab | str] = [HeadSlab(path, d, "head") for d, n in axes if n == sizes.n_query]
    found: list[HeadSlab | str] = []
    for unit in ("query", "key", "value"):
        width = sizes.width(unit) if sizes.head_dim > 1 else 0
        found += [
            HeadSlab(path, d, unit)
            for d, n in axes
            if n == width and HeadSlab(path, d, "query") not in found
        ]
    if 1 < sizes.n_kv < sizes.n_query:
        found += [HeadSlab(path, d, "kv_head") for d, n in axes if n == sizes.n_kv]
    return [*heads, path, *found]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain tensors that a module or one in it holds."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for name, part in module.named_modules():
        for key, value in part.__dict__.items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}".lstrip("."), value


def _shape(module: nn.Module, path: str) -> tuple[int, ...]:
    found = lookup(module, path)
    return tuple(found.shape) if isinstance(found, Tensor) else ()


def _counts(module: nn.Module, sizes: _Sizes) -> Iterator[tuple[tuple[str, Count], ...]]:
    """Which attributes a cut keeps true: those that are named for heads, then all that fit, then
    fewer and none."""
    n_query, n_kv = sizes.n_query, sizes.n_kv
    group = n_query // n_kv
    heads: list[tuple[str, Count]] = []
    named: list[tuple[str, Count]] = []
    shared: list[tuple[str, tuple[Count, ...]]] = []
    widths: list[tuple[str, Count]] = []
    for path, value in numbers(module).items():
        leaf = path.rpartition(".")[2]
        by_name = "head" in leaf and not re.search(r"dim|size|width", leaf)
        if value == n_query:
            heads.append((path, "n_query_heads"))
            named += [heads[-1]] if by_name else []
        elif n_kv < n_query and value in (n_kv, group):
            fits: list[Count] = ["n_kv_heads"] if value == n_kv else []
            fits += ["group_size"] if value == group else []
            shared.append(
                (path, tuple(reversed(fits) if re.search(r"rep|group_size|per", leaf) else fits))
            )
        elif value == n_query * sizes.head_dim:
            widths.append((path, "query_width"))
        elif value == n_query * sizes.value_dim:
            widths.append((path, "value_width"))
    sets: list[list[tuple[str, Count]]] = []
    for choice in islice(product(*(fits for _, fits in shared)), 8):
        both = [(path, count) for (path, _), count in zip(shared, choice, strict=True)]
        for own in (named, heads):
            sets += [[*own, *both], [*own, *both, *widths]]
            sets += [[*own, *both, w] for w in widths] if len(widths) > 1 else []
    sets += [*([*heads, pair] for pair in [(p, c) for p, fits in shared for c in fits]), heads, []]
    yield from dict.fromkeys(map(tuple, sets))
