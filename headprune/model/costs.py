"""What a model and each of its prune units cost: parameters, multiply-adds for any length, KV-cache
bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from headprune.attention.linear import base_of, is_conv1d, projections
from headprune.core.errors import UnsupportedModel
from headprune.core.layout import Cached
from headprune.core.scores import Cost, CostTable
from headprune.core.slabs import freed_groups, kept_rows
from headprune.model.exposed import exposed
from headprune.model.losses import Loss
from headprune.model.matching import lookup, slab_length
from headprune.model.offloaded import count_parameters
from headprune.model.running import batch_size, call, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, bind, find_sites, unwrap


@dataclass(frozen=True)
class _Seen:
    """What one pass of the model showed: rows and pairs of tokens an example, one number a call.

    Args:
        length: The length that "a token" and "a pair of tokens" refer to.
        rows: Of each linear layer, by its ``id``.
        keys: Key tokens of each site, by its name.
        pairs: Of each site, by its name: query tokens times the key tokens that they attend to.
    """

    length: int
    rows: dict[int, list[int]] = field(default_factory=dict)
    keys: dict[str, list[int]] = field(default_factory=dict)
    pairs: dict[str, list[int]] = field(default_factory=dict)

    def rows_of(self, module: Any) -> _Count:
        """Rows of a linear layer; where none was seen, one a token."""
        return _counted(self.rows.get(id(module), [self.length]), self.length)

    def keys_of(self, name: str) -> _Count:
        """Key tokens of a site; where none were seen, all."""
        return _counted(self.keys.get(name, [self.length]), self.length)

    def pairs_of(self, name: str) -> _Count:
        """Pairs of tokens of a site; where none were seen, every token attends to every one."""
        seen, square = self.pairs.get(name, [self.length**2]), self.length**2
        whole = [n for n in seen if n % square == 0]
        rest = _counted([n for n in seen if n % square], self.length)
        return _Count(rest.fixed, rest.per_token, sum(whole) // square)


class _Count(NamedTuple):
    """A number that may grow with the length, as far as one length tells."""

    fixed: int
    per_token: int
    per_pair: int = 0


def _counted(numbers: list[int], length: int) -> _Count:
    fixed = sum(n for n in numbers if n % length)
    return _Count(fixed, sum(n // length for n in numbers if n % length == 0))


def measure_costs(
    model: nn.Module, bound: list[BoundSite], batch: Any, loss: Loss | None = None
) -> CostTable:
    """Runs the model once on ``batch`` and counts, from the shapes that pass through it.

    Multiply-adds are those of linear layers (also Transformers' Conv1D), convolutions, and the two
    products inside each located attention, ``heads * (head_dim + value_dim)`` a pair of tokens,
    causal ones counted whole. Element-wise work, norms and embeddings count nothing. What runs on a
    multiple of the sequence length is counted a token, on a multiple of its square a pair of
    tokens, and all else an example: windows of an image, the shorter of two inputs.

    Args:
        model: The model.
        bound: The sites whose units are costed; the totals are the whole model's.
        batch: Any batch that the model takes; its longest site gives the length.
        loss: How the model is called, where a batch is not simply its arguments.
    """
    everywhere = [*bound, *_others(model, bound)]
    batch = to_device(batch, device_of(model))
    size = batch_size(batch)
    rows: dict[int, list[int]] = {}
    macs: dict[int, int] = {}  # of a linear layer, a row
    keys: dict[str, list[int]] = {}
    pairs: dict[str, list[int]] = {}
    fixed = [0]
    lengths: list[int] = []
    given: dict[str, int] = {}  # key tokens that a site was called with: (query, key, ...)

    def linear(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        weight: Any = module.weight
        if weight.numel():
            # Tables of positions pass once for all examples (DeBERTa, Swin v2), and so are not
            # divided among them.
            once = output.shape[0] == 1 and (
                output.ndim > 3 or (output.ndim == 3 and output.shape[1] != size)
            )
            macs[id(module)] = weight.numel()
            rows.setdefault(id(module), []).append(
                output.numel() // output.shape[-1] // (1 if once else size)
            )

    def convolution(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        weight: Any = module.weight
        fixed[0] += output.numel() // size * weight[0].numel()

    def gate(site: BoundSite) -> Any:
        found = [lookup(site.module, s.path) for s in site.slabs if "value" in s.units]
        values = [base_of(v) for v in found]

        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            name, length = site.site.name, args[0].shape[1 - site.layout.batch_axis]
            if site.layout.windows:  # tokens attend within their window
                n_windows = args[0].shape[0] // size
                n_keys, n_pairs = n_windows * length, n_windows * length**2
            else:
                lengths.append(length)
                n_keys = next(
                    (rows[id(v)][-1] for v in values if id(v) in rows), given.get(name, length)
                )
                n_pairs = length * n_keys
            keys.setdefault(name, []).append(n_keys)
            pairs.setdefault(name, []).append(n_pairs)

        return count

    def call_of(site: BoundSite) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            key = kwargs.get("key", args[1] if len(args) > 1 else None)
            if isinstance(key, Tensor) and not key.is_nested:
                given[site.site.name] = key.numel() // key.shape[-1] // size

        return note

    handles = [site.gate.register_forward_pre_hook(gate(site)) for site in everywhere]
    handles += [
        s.module.register_forward_pre_hook(call_of(s), with_kwargs=True)
        for s in everywhere
        if all(
            isinstance(lookup(s.module, slab.path), Tensor)
            for slab in s.slabs
            if "value" in slab.units
        )
    ]
    for module in unwrap(model).modules():
        if isinstance(module, nn.Linear) or is_conv1d(module):
            handles.append(module.register_forward_hook(linear))
        elif isinstance(module, _ConvNd):
            handles.append(module.register_forward_hook(convolution))
    try:
        with undisturbed(model), torch.no_grad(), exposed(everywhere):
            (loss or call)(unwrap(model), batch)
    finally:
        for handle in handles:
            handle.remove()
    seen = _Seen(
        max(lengths, default=max((n for row in rows.values() for n in row), default=1)),
        rows,
        keys,
        pairs,
    )
    units = tuple(unit_costs(s, seen) for s in everywhere)
    layers = [(macs[layer], _counted(numbers, seen.length)) for layer, numbers in rows.items()]
    heads = [(len(s.site.heads), _products(s, seen)) for s in everywhere]
    total = Cost(
        params=count_parameters(unwrap(model)),
        macs_fixed=fixed[0] + sum(n * c.fixed for n, c in (*layers, *heads)),
        macs_per_token=sum(n * c.per_token for n, c in (*layers, *heads)),
        macs_per_pair=sum(n * c.per_pair for n, c in heads),
        kv_bytes=sum(
            _cache_bytes(s, len(s.site.heads), s.site.geometry.n_kv_heads) + _shared_bytes(s)
            for s in everywhere
        ),
    )
    return CostTable(total, units[: len(bound)], seen.length)


def _others(model: nn.Module, bound: list[BoundSite]) -> list[BoundSite]:
    """The model's sites that were not asked for: their attention is a part of the whole model's
    cost."""
    try:
        found = bind(model, find_sites(model))
    except UnsupportedModel:
        return []
    names = {b.site.name for b in bound}
    return [b for b in found if b.site.name not in names]


def _products(bound: BoundSite, seen: _Seen) -> _Count:
    """Multiply-adds of one head that no linear layer does: with the keys, the values and the
    layout's ``products``."""
    site, layout = bound.site, bound.layout
    width = site.head_dim + site.value_dim
    a_query, a_key = layout.products(bound.module) if layout.products else (0, 0)
    pairs, keys, queries = (
        seen.pairs_of(site.name),
        seen.keys_of(site.name),
        seen.rows_of(bound.gate),
    )
    return _Count(
        pairs.fixed * width + queries.fixed * a_query + keys.fixed * a_key,
        pairs.per_token * width + queries.per_token * a_query + keys.per_token * a_key,
        pairs.per_pair * width,
    )


def _cache_bytes(bound: BoundSite, n_query_heads: int, n_kv_heads: int) -> int:
    """Bytes a token that so many heads have in a cache for themselves."""
    site, cached = bound.site, _cached(bound)
    if cached is None or isinstance(cached, int):
        return 0
    n_heads = {"key/value": n_kv_heads, "query": n_query_heads}[cached]
    return n_heads * (site.head_dim + site.value_dim) * _element_size(bound)


def _shared_bytes(bound: BoundSite) -> int:
    """Bytes a token that all heads of a site share in a cache, and that stay as long as one of them
    does."""
    cached = _cached(bound)
    return cached * _element_size(bound) if isinstance(cached, int) and bound.site.heads else 0


def _cached(bound: BoundSite) -> Cached | None:
    """What a cache holds of a site; None where it has none."""
    if bound.site.kind != "causal":
        return None
    cached = bound.layout.cached
    return cached(bound.module) if callable(cached) else cached


def _element_size(bound: BoundSite) -> int:
    return next(bound.module.parameters()).element_size()


def _norms(projection: nn.Module, axis: object) -> int:
    """Parameters that a row of a weight has beside it: the norm of torch's weight_norm, if it lies
    on that axis."""
    names = ("weight_g", "parametrizations.weight.original0")
    return sum(
        p.numel() == p.shape[axis == "in"] for n, p in projection.named_parameters() if n in names
    )


def unit_costs(bound: BoundSite, seen: _Seen | None = None) -> tuple[Cost, ...]:
    """What leaves the model with each unit of a site, in the order of ``AttentionSite.units``.

    Args:
        bound: The site.
        seen: How often its parts run; by default once, on every token.
    """
    seen = _Seen(1) if seen is None else seen
    site = bound.site
    products = _products(bound, seen)
    narrow = [
        m
        for m in (lookup(bound.module, p) for p in bound.layout.per_head)
        if isinstance(m, nn.Linear)
    ]
    costs = []
    for unit in site.units:
        positions = [site.heads.index(h) for h in unit]
        groups = freed_groups(site.geometry, positions)
        params = fixed = per_token = 0
        for slab in bound.slabs:
            target = lookup(bound.module, slab.path)
            if isinstance(target, nn.ModuleList):
                leaving = [p for h in positions for p in target[h].parameters()]
                params += sum(p.numel() for p in leaving)
                count, macs = (
                    seen.rows_of(target[positions[0]]),
                    sum(p.numel() for p in leaving if p.ndim == 2),
                )
                fixed, per_token = fixed + macs * count.fixed, per_token + macs * count.per_token
                continue
            n_rows = len(kept_rows(site.geometry, slab.units, slab.packing, positions, groups))
            length = slab_length(bound.module, slab)
            if isinstance(target, Tensor):
                params += n_rows * target.numel() // length
                continue
            params += n_rows if slab.axis == "out" and target.bias is not None else 0
            for part in projections(target, slab.axis, slab.path):  # type: ignore[arg-type]
                weight: Any = part.weight  # with weight_norm not a parameter, but computed from two
                macs, count = n_rows * weight.numel() // length, seen.rows_of(part)
                params, fixed = (
                    params + macs + n_rows * _norms(part, slab.axis),
                    fixed + macs * count.fixed,
                )
                per_token += macs * count.per_token
        for layer in narrow:  # sees every head as a row of its own
            numbers = [n // len(site.heads) for n in seen.rows.get(id(layer), [])]
            count, macs = _counted(numbers, seen.length), len(unit) * layer.weight.numel()
            fixed, per_token = fixed + macs * count.fixed, per_token + macs * count.per_token
        fixed, per_token = (
            fixed + len(unit) * products.fixed,
            per_token + len(unit) * products.per_token,
        )
        costs.append(
            Cost(
                params,
                fixed,
                per_token,
                len(unit) * products.per_pair,
                _cache_bytes(bound, len(unit), len(groups)),
            )
        )
    return tuple(costs)
