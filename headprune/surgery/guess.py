"""Guesses of how a module with an attention keeps its heads, the likeliest first; ``detect.py`` proves or drops them.

Names are hints for the order only. What counts are sizes: a projection's features are explained as a whole number of
query heads, key/value heads or both; every other parameter is made of heads along one axis, or of none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from torch import Tensor, nn

from headprune.core.heads import Kind
from headprune.core.layout import AttentionLayout, Count, HeadSlab
from headprune.model.sites import lookup
from headprune.surgery.trace import Core, Projection, is_projection

#: How many guesses of slabs one module is worth; each costs a forward pass or two, a wrong one mostly less.
_GUESSES = 48


@dataclass(frozen=True)
class _Sizes:
    """Head counts and widths that a guess starts from."""

    n_query: int
    n_kv: int
    head_dim: int
    value_dim: int


def guesses(module: nn.Module, core: Core, n_examples: int) -> Iterator[AttentionLayout]:
    """Layouts that fit the sizes of ``module``, the likeliest first; at most some hundred."""
    seen = set()
    for gate in [p for p in core.after if p.linear][:2]:
        for layout in islice(_of_gate(module, core, gate, n_examples), 3 * _GUESSES):
            if layout not in seen:
                seen.add(layout)
                yield layout


def _of_gate(module: nn.Module, core: Core, gate: Projection, n_examples: int) -> Iterator[AttentionLayout]:
    batch_axis, windows = _batch(gate.given, n_examples)
    children = tuple(name for name, _ in module.named_children())
    for sizes in _sizes(module, core, gate, n_examples):
        for slabs, untouched in islice(_slabs(module, core, gate, sizes), _GUESSES):
            used = (*slabs, HeadSlab(gate.path, "in", "context"))
            per_head = tuple(p for p in untouched if _shape(module, p) == (sizes.head_dim,))
            layout = AttentionLayout(
                name="detected",
                gate=gate.path,
                slabs=used,
                head_dim=sizes.head_dim,
                value_dim=None if sizes.value_dim == sizes.head_dim else sizes.value_dim,
                kind=kind_of,
                untouched=tuple(p for p in untouched if p not in per_head),
                per_head=per_head,
                batch_axis=batch_axis,
                windows=windows,
                policies=("group", "balanced") if sizes.n_kv < sizes.n_query else ("group",),
                empty="refuse",  # whether a cache works without heads is nothing that a batch could prove
            )
            for counts in _counts(module, sizes, {s.path for s in used}):
                requires = tuple(dict.fromkeys((*children, *(path for path, _ in counts))))
                yield replace(layout, counts=counts, requires=requires)


def kind_of(module: Any, name: str) -> Kind:
    """What a module attends to, as far as its names and flags tell."""
    words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    if "cross" in words or "encoder_attn" in words or "encdec" in words:
        return "cross"
    parts = (module, *module.children())
    return "causal" if any(getattr(p, "is_causal", False) or getattr(p, "is_decoder", False) for p in parts) else "self"


def numbers(module: nn.Module) -> dict[str, int]:
    """Whole-number attributes of a module and of those in it, but not of its projections, by path."""
    found: dict[str, int] = {}
    for name, part in module.named_modules():
        if is_projection(part) or isinstance(part, (nn.Embedding, nn.LayerNorm, nn.Dropout)):
            continue
        for key, value in part.__dict__.items():
            if type(value) is int and not key.startswith("_") and not re.search(r"layer|idx|index", key):
                found[f"{name}.{key}".lstrip(".")] = value
    return found


def config_numbers(module: nn.Module) -> dict[str, int]:
    """Whole-number settings about heads of the configuration that a module or one in it holds."""
    configs = (getattr(part, "config", None) for part in module.modules())
    found = (getattr(c, "__dict__", {}) for c in configs if c is not None)
    return {k: v for values in found for k, v in values.items() if type(v) is int and "head" in k}


def _batch(given: tuple[int, ...], n: int) -> tuple[int, bool]:
    if not given or given[0] == n or len(given) < 3:
        return 0, False
    if given[1] == n:
        return 1, False
    return 0, given[0] % n == 0


def _sizes(module: nn.Module, core: Core, gate: Projection, n_examples: int) -> Iterator[_Sizes]:
    context = gate.given[-1] if gate.given else 0
    rows = {p.made[-1] for p in core.before if p.linear and p.made}
    for n_query in _head_counts(module, core, context, n_examples):
        value_dim = context // n_query
        widths = dict.fromkeys([value_dim, *(r // n_query for r in sorted(rows) if r % n_query == 0)])
        for head_dim in widths:
            smaller = {r // w for r in rows for w in (head_dim, value_dim) if r % w == 0}
            fused = head_dim + value_dim
            smaller |= {(r - n_query * head_dim) // fused for r in rows if (r - n_query * head_dim) % fused == 0}
            shared = sorted((k for k in smaller if 0 < k < n_query and n_query % k == 0), reverse=True)
            for n_kv in (n_query, *shared):
                yield _Sizes(n_query, n_kv, head_dim, value_dim)


def _head_counts(module: nn.Module, core: Core, context: int, n_examples: int) -> list[int]:
    """How many query heads there may be: what the softmax was given tells it, attributes may."""
    hints: list[int] = []
    if len(core.scores) >= 4:
        hints += [core.scores[1], core.scores[-3], core.scores[2]]
    elif len(core.scores) == 3:
        hints.append(core.scores[0] // n_examples)
    named = {**config_numbers(module), **numbers(module)}
    for path, value in named.items():
        if value > 0 and "head" in path:
            hints += [context // value, value] if re.search(r"dim|size|width", path) else [value, context // value]
    hints += [value for path, value in named.items() if "head" not in path]
    return list(dict.fromkeys(h for h in hints if 1 < h <= context and context % h == 0))[:6]


def _slabs(
    module: nn.Module, core: Core, gate: Projection, sizes: _Sizes
) -> Iterator[tuple[tuple[HeadSlab, ...], tuple[str, ...]]]:
    """Slabs beside the gate's, and the paths that no cut touches."""
    projections = [n for n, part in module.named_modules() if is_projection(part) and n != gate.path]
    order, later = [p.path for p in core.before], {p.path for p in core.after}
    projections.sort(key=lambda n: order.index(n) if n in order else len(order))
    options: list[list[HeadSlab | str]] = [
        # What is called after the softmax alone (a feed-forward network) is no head's, though it may be cut as well.
        [path] if path in later and path not in order else _of_projection(module, path, i, sizes)
        for i, path in enumerate(projections)
    ]
    owned = tuple(f"{path}." for path in (*projections, gate.path))
    for path, tensor in _tensors(module):
        if not path.startswith(owned):
            found = _of_tensor(path, tensor, sizes)
            if path in dict(module.named_parameters()) or len(found) > 1:
                options.append(found)
    for chosen in _by_rank(options):
        slabs = tuple(c for c in chosen if isinstance(c, HeadSlab))
        if any(s.path in order and s.units != ("head",) for s in slabs):
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


def _of_projection(module: nn.Module, path: str, index: int, sizes: _Sizes) -> list[HeadSlab | str]:
    part = module.get_submodule(path)
    weight: Any = part.weight
    if weight.ndim != 2:
        return [path]
    rows = int(weight.shape[1 if hasattr(part, "nf") else 0])
    q, k, v = sizes.n_query * sizes.head_dim, sizes.n_kv * sizes.head_dim, sizes.n_kv * sizes.value_dim
    plain = {"query": q, "key": k, "value": v}
    first = _role(path, index)
    found: list[HeadSlab | str] = []
    for unit in dict.fromkeys([first, "key", "value", "query"]):
        same = any(plain[s.units[0]] == rows for s in found if isinstance(s, HeadSlab)) and sizes.n_kv == sizes.n_query
        if plain[unit] == rows and not same:
            found.append(HeadSlab(path, "out", unit))
    fused: tuple[tuple[str, ...], ...] = (("query", "key", "value"), ("key", "value"), ("query", "key"))
    for units in (*fused, ("query", "query"), ("query", "query", "key", "value")):
        if sum(plain[u] for u in units) == rows:
            found += [HeadSlab(path, "out", units), HeadSlab(path, "out", units, "grouped")]
    if rows == sizes.n_query:
        found.append(HeadSlab(path, "out", "head"))
    return [*found, path]


def _role(path: str, index: int) -> str:
    leaf = path.lower()
    for unit, word in (("query", r"quer|(^|[._])w?_?q([._]|$)|to_q"), ("key", r"key|(^|[._])w?_?k([._]|$)|to_k")):
        if re.search(word, leaf):
            return unit
    if re.search(r"val|(^|[._])w?_?v([._]|$)|to_v", leaf):
        return "value"
    return ("query", "key", "value")[min(index, 2)]


def _of_tensor(path: str, tensor: Tensor, sizes: _Sizes) -> list[HeadSlab | str]:
    heads: list[HeadSlab | str] = [HeadSlab(path, d, "head") for d, n in enumerate(tensor.shape) if n == sizes.n_query]
    if len(tensor.shape) == 1 and tensor.shape[0] == sizes.n_query * sizes.head_dim and sizes.head_dim > 1:
        return [path, HeadSlab(path, 0, "query")]
    return [*heads, path]


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


def _counts(module: nn.Module, sizes: _Sizes, slabs: set[str]) -> Iterator[tuple[tuple[str, Count], ...]]:
    """Which attributes a cut keeps true: those that are named for heads, then more of those that fit, then fewer."""
    heads: list[tuple[str, Count]] = []
    others: list[tuple[str, Count]] = []
    widths: list[tuple[str, Count]] = []
    for path, value in numbers(module).items():
        leaf = path.rpartition(".")[2]
        named = "head" in leaf and not re.search(r"dim|size|width", leaf)
        if sizes.n_kv < sizes.n_query and value == sizes.n_query // sizes.n_kv and re.search(r"group|rep", leaf):
            heads.append((path, "group_size"))
        elif value == sizes.n_kv and re.search(r"kv|key", leaf) and named:
            heads.append((path, "n_kv_heads"))
        elif value == sizes.n_query:
            (heads if named or leaf in ("h", "n_head", "heads") else others).append((path, "n_query_heads"))
        elif value == sizes.n_kv and named:
            heads.append((path, "n_kv_heads"))
        elif value == sizes.n_query * sizes.head_dim:
            widths.append((path, "query_width"))
        elif value == sizes.n_query * sizes.value_dim:
            widths.append((path, "value_width"))
    sets = [heads, [*heads, *widths]]
    sets += [[*heads, w] for w in widths] if len(widths) > 1 else []
    sets += [[*heads, *others], [*heads, *others, *widths], []]
    yield from dict.fromkeys(map(tuple, sets))
