"""Attention maps: the probabilities that a site's values are averaged with, as its module itself computed them.

Fused kernels never make a map, so Transformers' models run eagerly here, and our own attention shows its weights.
A map is known by what it is, ``[rows, heads, queries, keys]`` of non-negative numbers that sum to 1 over the keys at
most (less with attention sinks), among what the attention module and its parts return.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headprune.attention.multi_head import MultiHeadAttention
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.contexts import inputs_of, query_mask
from headprune.model.double import Doubled
from headprune.model.running import batch_size, device_of, tensors, token_mask
from headprune.model.sites import BoundSite
from headprune.scoring._activations import run
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Problem, Scorer

#: For every site by number, the maps of its runs in the last forward pass.
Maps: TypeAlias = dict[int, list[Tensor]]

_SWITCH = "_attn_implementation_internal"  # what a configuration's ``_attn_implementation`` reads
_HINT = "Leave this site out with sites=, or take a scorer that needs no maps."


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Transformers' models inside ``model`` compute attention eagerly for as long as the block lasts.

    Written into the configurations themselves, which attention modules ask in every call, because the model's own
    switch also asks whether a kernel is installed, warns, and cannot be put back where parts had kernels of their own.
    A model in fp64 takes its fp32 steps in fp64 too: its masks hold the least number of fp64, which is minus infinity
    to a softmax in fp32, and so NaN in a row of padding on the left.
    """
    configurations = {id(c): c for m in model.modules() for c in _with_parts(getattr(m, "config", None))}
    before = [(c, getattr(c, _SWITCH)) for c in configurations.values()]
    double = any(p.dtype == torch.float64 for p in model.parameters())
    try:
        for configuration, _ in before:
            setattr(configuration, _SWITCH, "eager")
        with Doubled() if before and double else nullcontext():
            yield
    finally:
        for configuration, implementation in before:
            setattr(configuration, _SWITCH, implementation)


def _with_parts(configuration: Any) -> Iterator[Any]:
    if hasattr(configuration, _SWITCH):
        yield configuration
        for name in getattr(configuration, "sub_configs", ()):
            yield from _with_parts(getattr(configuration, name, None))


@contextmanager
def mapping(bound: Iterable[BoundSite], graph: bool = False) -> Iterator[Maps]:
    """For as long as the block lasts, every forward pass writes its maps into the dictionary, which starts empty.

    Args:
        bound: Sites with heads; numbered as they come.
        graph: Make the maps part of a graph although no weight needs a gradient, and keep it.

    Raises:
        UnsupportedModel: in the forward pass: a module that runs and returns no map.
    """
    found: Maps = {}
    with ExitStack() as stack:
        for number, b in enumerate(bound):
            watch = _Watch(b, found.setdefault(number, []), graph)
            stack.callback(b.module.register_forward_pre_hook(watch.before, with_kwargs=True).remove)
            for part in b.module.modules():
                hook = watch.after if part is b.module else watch.inside
                stack.callback(part.register_forward_hook(hook).remove)
        yield found


class _Watch:
    """The hooks on one attention module."""

    def __init__(self, bound: BoundSite, maps: list[Tensor], graph: bool) -> None:
        self.bound, self.maps, self.graph = bound, maps, graph
        self.parts: list[Tensor] = []
        self.asked = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.parts = []
        if isinstance(module, MultiHeadAttention):
            self.asked = kwargs.get("need_weights", False)
            kwargs = {**kwargs, "need_weights": True}
        if not self.graph:
            return args, kwargs
        # The first input gets a graph of its own, unless an earlier run of the same module has given it one.
        values = [*args, *kwargs.values()]
        first = next(i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 2)
        if not values[first].requires_grad:
            values[first] = values[first].detach().requires_grad_()
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def inside(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.parts += [t for t in tensors(out) if self._is_map(t)]

    def after(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        own = [t for t in tensors(out) if self._is_map(t)]
        maps = own or self.parts
        self.parts = []
        if not maps:
            must = "an attention that computes its map (eager attention) and returns it"
            got = f"{type(module).__name__}, which has none: a fused kernel makes no map, other code keeps it to itself"
            raise UnsupportedModel(f"the attention map of {self.bound.site.name}", must, got, _HINT)
        self.maps.append(maps[0] if self.graph else maps[0].detach())
        return out[0] if isinstance(module, MultiHeadAttention) and not self.asked else None

    def _is_map(self, x: Tensor) -> bool:
        if not x.is_floating_point() or x.ndim != 4 or x.shape[1] != len(self.bound.site.heads):
            return False
        x = x.detach()
        sums = x.sum(-1, dtype=torch.float32).nan_to_num(0)  # rows of padding may be NaN
        return bool((x.nan_to_num(0) >= 0).all()) and bool((sums < 1.01).all()) and bool((sums > 0).any())


def by_example(b: BoundSite, probabilities: Tensor, size: int) -> Tensor:
    """``[examples, heads, queries, keys]``; the windows of an example become queries one after another."""
    if len(probabilities) == size:
        return probabilities
    if len(probabilities) % size or not b.layout.windows:
        raise UnsupportedModel(b.site.name, f"run on {size} examples", f"a map of {len(probabilities)} rows", _HINT)
    windows: Tensor = probabilities.unflatten(0, (size, -1))
    return windows.transpose(1, 2).flatten(2, 3)


def visible(model: nn.Module, b: BoundSite, batch: Any, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """``[examples, queries]`` and ``[examples, keys]``: which queries and keys are no padding.

    Keys of cross-attention follow ``attention_mask``, all others the mask of the queries; see ``query_mask``.
    """
    size, queries, keys = shape
    device = device_of(b.module)
    nothing = b.layout.windows
    of_queries = None if nothing else query_mask(model, b.site.kind, batch, (size, queries))
    if b.site.kind == "cross":
        of_keys = token_mask(batch, (size, keys))
    else:
        of_keys = None if nothing else query_mask(model, b.site.kind, batch, (size, keys))
    return (
        torch.ones(size, queries, dtype=torch.bool, device=device) if of_queries is None else of_queries.to(device),
        torch.ones(size, keys, dtype=torch.bool, device=device) if of_keys is None else of_keys.to(device),
    )


@contextmanager
def told(model: nn.Module, bound: Iterable[BoundSite], batch: Any) -> Iterator[dict[int, list[Any]]]:
    """By site number, what tells the padding of each run that the block makes on a batch; see ``inputs_of``."""
    bound = list(bound)
    given: dict[int, list[Any]] = {number: [] for number in range(len(bound))}

    def noting(number: int) -> Callable[..., None]:
        return lambda *_: given[number].append(inputs.now)

    with inputs_of(model, bound) as inputs, ExitStack() as stack:
        inputs.begin(batch)
        for number, b in enumerate(bound):
            stack.callback(b.module.register_forward_hook(noting(number)).remove)
        yield given


class MapScorer(Scorer):
    """A scorer that reads a number off every row of a map: mean over queries, examples and the unit's heads."""

    @abstractmethod
    def of_rows(self, probabilities: Tensor) -> Tensor:
        """``[..., keys]`` in fp64, 0 where a key does not count, to ``[...]``."""

    def kept(self, problem: Problem, b: BoundSite, batch: Any, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Which queries and keys count."""
        return visible(problem.model, b, batch, shape)

    def estimate(self, problem: Problem) -> Estimate:
        bound = [b for b in problem.bound if b.site.heads]

        def of_batch(number: int, batch: Any) -> Tensor:
            for runs in maps.values():
                runs.clear()
            with told(problem.model, bound, batch) as given:
                run(problem.model, batch, problem.loss)
            size = batch_size(batch)
            return torch.cat([self._site(problem, b, maps[i], given[i], size) for i, b in enumerate(bound)], 1)

        with torch.no_grad(), eager(problem.model), mapping(bound) as maps:
            rows = problem.rows("attention maps", of_batch)
        return mean_over_examples(rows)

    def _site(self, problem: Problem, b: BoundSite, runs: list[Tensor], given: list[Any], size: int) -> Tensor:
        """``[examples, units]``, means over the queries of all runs."""
        total, count = torch.zeros(size, len(b.site.heads), dtype=torch.float64), torch.zeros(size, 1)
        for probabilities, inputs in zip(checked_runs(b, runs), given, strict=True):
            probabilities = by_example(b, probabilities, size).cpu().double()
            queries, keys = self.kept(problem, b, inputs, (size, *probabilities.shape[2:]))
            queries, keys = queries.cpu(), keys.cpu()
            # Chosen, not multiplied by 0: rows of padding may be NaN.
            wanted = queries[:, None, :, None] & keys[:, None, None, :]
            found = self.of_rows(probabilities.masked_fill(~wanted, 0))
            total += found.masked_fill(~queries[:, None], 0).sum(2)
            count += queries.sum(1, keepdim=True)
        if not bool(count.all()):
            row = int((count == 0).nonzero()[0, 0])
            got = f"none in example {row} of a batch, at {b.site.name}"
            raise InvalidValue("batches", "with a token that counts in every example", got)
        return unit_means(b, total / count)


def checked_runs(b: BoundSite, runs: list[Tensor]) -> list[Tensor]:
    """The maps of a site, at least one."""
    if not runs:
        must = "a module that runs when the model does"
        raise UnsupportedModel(b.site.name, must, "one that no batch reached", _HINT)
    return runs


def unit_means(b: BoundSite, heads: Tensor) -> Tensor:
    """``[examples, heads]`` to ``[examples, units]``."""
    return torch.stack([heads[:, [b.site.heads.index(h) for h in unit]].mean(1) for unit in b.site.units], 1)


def mean_over_examples(rows: Tensor) -> Estimate:
    """The estimate that is a mean over examples, ``[examples, units]``."""
    if not bool(torch.isfinite(rows).all()):
        row = int((~torch.isfinite(rows)).any(1).nonzero()[0])
        hint = "Look for NaN or infinite values in the batches."
        raise InvalidValue(f"the attention maps of example {row}", "finite", "NaN or infinite", hint)
    return averaged(rows)
