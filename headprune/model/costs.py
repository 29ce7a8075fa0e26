"""What a model and each of its prune units cost: parameters, multiply-adds, KV-cache bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from headprune.attention.linear import base_of, is_conv1d, projections
from headprune.core.errors import UnsupportedModel
from headprune.core.layout import Cached, HeadSlab
from headprune.core.scores import Cost, CostTable
from headprune.core.slabs import freed_groups, kept_rows
from headprune.model.exposed import exposed
from headprune.model.losses import Loss
from headprune.model.matching import lookup, slab_length
from headprune.model.offloaded import count_parameters
from headprune.model.running import batch_size, call, device_of, to_device, undisturbed
from headprune.model.sites import BoundSite, bind, find_sites, unwrap

#: Norms of torch's ``weight_norm``: parameters that a row of a weight has besides its numbers.
_WEIGHT_NORMS = ("weight_g", "parametrizations.weight.original0")


# ---------------------------------------------------------------- numbers that grow with the length


@dataclass(frozen=True)
class _Count:
    """A number per example: a fixed part, a part per token and a part per pair of tokens."""

    fixed: int = 0
    per_token: int = 0
    per_pair: int = 0

    def __add__(self, other: _Count) -> _Count:
        return _Count(
            self.fixed + other.fixed,
            self.per_token + other.per_token,
            self.per_pair + other.per_pair,
        )

    def times(self, factor: int) -> _Count:
        return _Count(self.fixed * factor, self.per_token * factor, self.per_pair * factor)


def _count_of(numbers: Iterable[int], length: int) -> _Count:
    """Sort numbers into multiples of the length (per token) and all others (fixed)."""
    fixed = per_token = 0
    for number in numbers:
        if number % length:
            fixed += number
        else:
            per_token += number // length
    return _Count(fixed, per_token)


@dataclass(frozen=True)
class _PassCounts:
    """Rows and pairs of tokens per example in one pass of the model, one number per call.

    Args:
        length: The length that "a token" and "a pair of tokens" refer to.
        rows: Of each linear layer, by its ``id``.
        keys: Key tokens of each site, by its name.
        pairs: Query tokens times the key tokens that they attend to, by name of the site.
    """

    length: int
    rows: dict[int, list[int]] = field(default_factory=dict)
    keys: dict[str, list[int]] = field(default_factory=dict)
    pairs: dict[str, list[int]] = field(default_factory=dict)

    def rows_of(self, module: Any) -> _Count:
        """Rows of a linear layer; one per token if it did not run."""
        return _count_of(self.rows.get(id(module), [self.length]), self.length)

    def keys_of(self, name: str) -> _Count:
        """Key tokens of a site; every token if it did not run."""
        return _count_of(self.keys.get(name, [self.length]), self.length)

    def pairs_of(self, name: str) -> _Count:
        """Pairs of tokens of a site; all pairs if it did not run."""
        square = self.length**2
        whole, rest = 0, []
        for number in self.pairs.get(name, [square]):
            if number % square == 0:
                whole += number // square
            else:
                rest.append(number)
        return _count_of(rest, self.length) + _Count(per_pair=whole)


# ---------------------------------------------------------------- counting in one pass


class _Recorder:
    """Hooks that read shapes while the model runs once.

    Args:
        n_examples: Examples in the batch.
    """

    def __init__(self, n_examples: int) -> None:
        self.n_examples = n_examples
        self.rows: dict[int, list[int]] = {}
        self.keys: dict[str, list[int]] = {}
        self.pairs: dict[str, list[int]] = {}
        self.macs_per_row: dict[int, int] = {}  # by id of a linear layer
        self.convolution_macs = 0
        self._lengths: list[int] = []
        self._keys_in_call: dict[str, int] = {}  # key tokens that a site was called with

    @contextmanager
    def attached(self, model: nn.Module, sites: Iterable[BoundSite]) -> Iterator[None]:
        """Count the layers of the model and these sites inside the block."""
        with ExitStack() as stack:
            for site in sites:
                if site.layout.is_feed_forward:  # its linear layers are counted as such
                    continue
                values = _value_weights(site)
                count = partial(self._count_attention, site, list(map(base_of, values)))
                stack.callback(site.gate.register_forward_pre_hook(count).remove)
                # Without a layer for the values, only the call shows how many keys there are.
                if all(isinstance(value, Tensor) for value in values):
                    note = partial(self._note_keys, site.site.name)
                    handle = site.module.register_forward_pre_hook(note, with_kwargs=True)
                    stack.callback(handle.remove)
            for module in model.modules():
                if isinstance(module, nn.Linear) or is_conv1d(module):
                    stack.callback(module.register_forward_hook(self._count_linear).remove)
                elif type(module).__name__.endswith("Router"):
                    stack.callback(module.register_forward_pre_hook(self._count_router).remove)
                elif _weights_of_experts(module):
                    handle = module.register_forward_hook(self._count_experts, with_kwargs=True)
                    stack.callback(handle.remove)
                elif isinstance(module, _ConvNd):
                    stack.callback(module.register_forward_hook(self._count_convolution).remove)
            yield

    def counts(self, length: int | None) -> _PassCounts:
        """What was counted, at a length: by default that of the longest site, or else layer."""
        length = length or max(self._lengths, default=0)
        if not length:
            length = max(map(max, self.rows.values()), default=1)
        return _PassCounts(length, self.rows, self.keys, self.pairs)

    def _count_linear(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        weight: Any = module.weight
        if not weight.numel():
            return
        if isinstance(output, tuple):  # a router that also returns what it chose (Llama 4)
            output = output[0]
        # Tables of positions pass once for all examples (DeBERTa, Swin v2): not divided among them.
        once = output.shape[0] == 1 and (
            output.ndim > 3 or (output.ndim == 3 and output.shape[1] != self.n_examples)
        )
        n_rows = output.numel() // output.shape[-1]
        if not once:
            n_rows //= self.n_examples
        self._add(module, weight.numel(), n_rows)

    def _add(self, module: nn.Module, macs_per_row: int, n_rows: int) -> None:
        """Add a call of a layer with so many rows per example."""
        self.macs_per_row[id(module)] = macs_per_row
        self.rows.setdefault(id(module), []).append(n_rows)

    def _count_router(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count a router that is a linear layer by another name."""
        weight, x = getattr(module, "weight", None), args[0] if args else None
        if isinstance(weight, Tensor) and weight.ndim == 2 and isinstance(x, Tensor):
            self._add(module, weight.numel(), x.numel() // weight.shape[1] // self.n_examples)

    def _count_experts(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Count the experts that were chosen for each token, by the call's table of numbers."""
        for value in (*args, *kwargs.values()):
            # [tokens, experts per token]
            if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point():
                weights = _weights_of_experts(module)
                macs_per_row = sum(weight[0].numel() for weight in weights)
                self._add(module, macs_per_row, value.numel() // self.n_examples)
                return

    def _count_convolution(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        weight: Any = module.weight
        self.convolution_macs += output.numel() // self.n_examples * weight[0].numel()

    def _count_attention(
        self, site: BoundSite, values: list[Any], module: nn.Module, args: tuple[Any, ...]
    ) -> None:
        name = site.site.name
        length = args[0].shape[1 - site.layout.batch_axis]
        if site.layout.windows:
            # Tokens attend within their window; windows of an example follow one another.
            n_windows = args[0].shape[0] // self.n_examples
            n_keys = n_windows * length
            n_pairs = n_windows * length**2
        else:
            self._lengths.append(length)
            n_keys = self._n_keys(name, values, length)
            n_pairs = length * n_keys
        self.keys.setdefault(name, []).append(n_keys)
        self.pairs.setdefault(name, []).append(n_pairs)

    def _n_keys(self, name: str, values: list[Any], length: int) -> int:
        """Key tokens of the running call: rows of its value layer, else of its argument."""
        for value in values:
            if id(value) in self.rows:
                return self.rows[id(value)][-1]
        return self._keys_in_call.get(name, length)

    def _note_keys(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # Attention with several inputs is called (query, key, ...).
        default = args[1] if len(args) > 1 else None
        key = kwargs.get("key", default)
        if isinstance(key, Tensor) and not key.is_nested:
            self._keys_in_call[name] = key.numel() // key.shape[-1] // self.n_examples


def _weights_of_experts(module: nn.Module) -> list[Tensor]:
    """The weights ``[experts, out, in]`` of a mixture's experts; empty for any other module."""
    if not type(module).__name__.endswith("Experts"):
        return []
    return [weight for weight in module.parameters(recurse=False) if weight.ndim == 3]


def _value_weights(site: BoundSite) -> list[Any]:
    """The projections, or plain tensors, that make a site's values."""
    return [lookup(site.module, slab.path) for slab in site.slabs if "value" in slab.units]


def measure_costs(
    model: nn.Module,
    bound: list[BoundSite],
    batch: Any,
    loss: Loss | None = None,
    length: int | None = None,
) -> CostTable:
    """Run the model once on a batch and count, from the shapes, what it costs.

    Multiply-adds are those of linear layers (also Transformers' Conv1D), convolutions, the routers
    of experts and the experts chosen for each token, and the two products inside each located
    attention: ``heads * (head_dim + value_dim)`` per pair of tokens, causal ones counted whole.
    Element-wise work, norms and embeddings count nothing. What runs on a
    multiple of the sequence length counts per token, on a multiple of its square per pair of
    tokens, and all else per example: windows of an image, the shorter of two inputs.

    Args:
        model: The model.
        bound: The sites whose units are costed; the totals are the whole model's.
        batch: Any batch that the model takes; its longest site gives the length.
        loss: How the model is called, where a batch is not simply its arguments.
        length: Tokens of an example, where it is known: of a cut model, the uncut one's.

    Returns:
        The whole model's cost and the cost of each unit of ``bound``.
    """
    # The totals need the attention of the whole model, not only of these sites.
    sites = [*bound, *_other_sites(model, bound)]
    batch = to_device(batch, device_of(model))

    # 1. Count while the model runs.
    recorder = _Recorder(batch_size(batch))
    run = loss or call
    inner = unwrap(model)
    with recorder.attached(inner, sites), undisturbed(model), torch.no_grad(), exposed(sites):
        run(inner, batch)
    counts = recorder.counts(length)

    # 2. Multiply-adds of the whole model: convolutions, linear layers, products of the heads.
    macs = _Count(recorder.convolution_macs)
    for layer, numbers in counts.rows.items():
        macs += _count_of(numbers, counts.length).times(recorder.macs_per_row[layer])
    kv_bytes = 0
    for site in sites:
        n_heads = len(site.site.heads)
        macs += _products(site, counts).times(n_heads)
        kv_bytes += _cache_bytes(site, n_heads, site.site.geometry.n_kv_heads)
        kv_bytes += _shared_cache_bytes(site)
    total = Cost(
        params=count_parameters(unwrap(model)),
        macs_fixed=macs.fixed,
        macs_per_token=macs.per_token,
        macs_per_pair=macs.per_pair,
        kv_bytes=kv_bytes,
    )

    # 3. Costs of the units that were asked for.
    units = tuple(unit_costs(site, counts) for site in bound)
    return CostTable(total, units, counts.length)


def _other_sites(model: nn.Module, bound: list[BoundSite]) -> list[BoundSite]:
    """Sites that were not asked for: their attention is a part of the whole model's cost."""
    try:
        sites = bind(model, find_sites(model))
    except UnsupportedModel:
        return []
    names = {b.site.name for b in bound}
    return [b for b in sites if b.site.name not in names]


# ---------------------------------------------------------------- costs of heads


def _products(bound: BoundSite, counts: _PassCounts) -> _Count:
    """Multiply-adds of one head that no linear layer does.

    They are those with the keys, with the values, and the layout's ``products``.
    """
    site, layout = bound.site, bound.layout
    if layout.is_feed_forward:
        return _Count()
    macs = counts.pairs_of(site.name).times(site.head_dim + site.value_dim)
    if layout.products:
        macs_per_query, macs_per_key = layout.products(bound.module)
        macs += counts.rows_of(bound.gate).times(macs_per_query)
        macs += counts.keys_of(site.name).times(macs_per_key)
    return macs


def _cache_bytes(bound: BoundSite, n_query_heads: int, n_kv_heads: int) -> int:
    """Bytes per token that so many heads have in a cache for themselves."""
    site, cached = bound.site, _cached(bound)
    if cached is None or isinstance(cached, int):
        return 0
    n_heads = {"key/value": n_kv_heads, "query": n_query_heads}[cached]
    return n_heads * (site.head_dim + site.value_dim) * _element_size(bound)


def _shared_cache_bytes(bound: BoundSite) -> int:
    """Bytes per token that all heads of a site share, kept as long as one of them is."""
    cached = _cached(bound)
    if not isinstance(cached, int) or not bound.site.heads:
        return 0
    return cached * _element_size(bound)


def _cached(bound: BoundSite) -> Cached | None:
    """What a cache stores of a site; None where it has none."""
    if bound.site.kind != "causal":
        return None
    cached = bound.layout.cached
    return cached(bound.module) if callable(cached) else cached


def _element_size(bound: BoundSite) -> int:
    return next(bound.module.parameters()).element_size()


def unit_costs(bound: BoundSite, counts: _PassCounts | None = None) -> tuple[Cost, ...]:
    """Compute what the model saves without each unit of a site.

    Args:
        bound: The site.
        counts: How often its parts run; by default once, on every token.

    Returns:
        Costs in the order of ``AttentionSite.units``.
    """
    if counts is None:
        counts = _PassCounts(1)
    units = bound.site.units
    # Neurons cost all alike, and there are thousands of them.
    if bound.layout.is_feed_forward and bound.site.bundles is None and units:
        return (_unit_cost(bound, units[0], counts),) * len(units)
    return tuple(_unit_cost(bound, unit, counts) for unit in units)


def _unit_cost(bound: BoundSite, unit: tuple[int, ...], counts: _PassCounts) -> Cost:
    """What the model saves without one unit of a site."""
    site = bound.site
    positions = site.positions(unit)
    groups = freed_groups(site.geometry, positions)
    params = 0
    macs = _products(bound, counts).times(len(unit)) + _per_head_macs(bound, len(unit), counts)
    for slab in bound.slabs:
        slab_params, slab_macs = _slab_cost(bound, slab, positions, groups, counts)
        params += slab_params
        macs += slab_macs
    kv_bytes = _cache_bytes(bound, len(unit), len(groups))
    return Cost(params, macs.fixed, macs.per_token, macs.per_pair, kv_bytes)


def _per_head_macs(bound: BoundSite, n_heads: int, counts: _PassCounts) -> _Count:
    """Multiply-adds of layers that see every head as a row of its own."""
    total = _Count()
    for path in bound.layout.per_head:
        layer = lookup(bound.module, path)
        if isinstance(layer, nn.Linear):  # a norm counts nothing
            rows = [n // len(bound.site.heads) for n in counts.rows.get(id(layer), [])]
            total += _count_of(rows, counts.length).times(n_heads * layer.weight.numel())
    return total


def _slab_cost(
    bound: BoundSite,
    slab: HeadSlab,
    positions: list[int],
    groups: list[int],
    counts: _PassCounts,
) -> tuple[int, _Count]:
    """Parameters and multiply-adds of one slab that a cut of these heads removes.

    Args:
        bound: The site.
        slab: The slab.
        positions: Places of the removed heads among the present ones.
        groups: Key/value heads that no other head uses.
        counts: How often the slab's layers run.
    """
    target = lookup(bound.module, slab.path)
    if isinstance(target, nn.ModuleList):
        return _module_list_cost(target, positions, counts)
    n_rows = len(kept_rows(bound.site.geometry, slab.units, slab.packing, positions, groups))
    length = slab_length(bound.module, slab)
    if isinstance(target, Tensor):  # a table: element-wise, so without multiply-adds
        return n_rows * target.numel() // length, _Count()

    params, macs = 0, _Count()
    if slab.axis == "out" and target.bias is not None:
        params += n_rows
    # An adapted projection has several parts: the base layer and its adapters.
    for part in projections(target, slab.axis, slab.path):  # type: ignore[arg-type]
        weight: Any = part.weight  # with weight_norm not a parameter, but computed from two
        n_weights = n_rows * weight.numel() // length
        params += n_weights + n_rows * _n_norms(part, slab.axis)
        macs += counts.rows_of(part).times(n_weights)
    return params, macs


def _module_list_cost(
    modules: nn.ModuleList, positions: list[int], counts: _PassCounts
) -> tuple[int, _Count]:
    """Cost of heads that are modules of a list; each is removed whole."""
    params = n_weights = 0
    for position in positions:
        for parameter in modules[position].parameters():
            params += parameter.numel()
            if parameter.ndim == 2:  # a weight of a linear layer, not a bias or a norm
                n_weights += parameter.numel()
    return params, counts.rows_of(modules[positions[0]]).times(n_weights)


def _n_norms(projection: nn.Module, axis: object) -> int:
    """Norms of ``weight_norm`` per row of a weight: 1 if they lie on that axis, else 0."""
    total = 0
    for name, parameter in projection.named_parameters():
        if name in _WEIGHT_NORMS:
            total += parameter.numel() == parameter.shape[axis == "in"]
    return total
