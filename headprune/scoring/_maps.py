"""Attention maps: the probabilities that a site's values are averaged with, as its module itself
computed them.

Fused kernels never make a map, so Transformers' models run eagerly here, and our own attention
shows its weights. A map is known by what it is, ``[rows, heads, queries, keys]`` of non-negative
numbers that sum to 1 over the keys at most (less with attention sinks), among what the attention
module and its parts return.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from headprune.attention.multi_head import MultiHeadAttention
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.double import Doubled
from headprune.model.padding import PaddingInfo, inputs_of, key_mask, query_mask
from headprune.model.running import batch_size, device_of, tensors
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_fp64, in_main_memory
from headprune.scoring._activations import run
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Scorer, ScoringProblem

#: For every site by number, the maps of its runs in the last forward pass.
Maps: TypeAlias = dict[int, list[Tensor]]

_SWITCH = "_attn_implementation_internal"  # what a configuration's ``_attn_implementation`` reads
_MASKS = ("attention_mask", "decoder_attention_mask")
_HINT = "Leave this site out with sites=, or take a scorer that needs no maps."


@contextmanager
def eager(model: nn.Module) -> Iterator[Callable[[Any], Any]]:
    """Transformers' models inside ``model`` compute attention eagerly for as long as the block
    lasts.

    Written into the configurations themselves, which attention modules ask in every call, because
    the model's own switch also asks whether a kernel is installed, warns, and cannot be put back
    where parts had kernels of their own. A model in fp64 takes its fp32 steps in fp64 too: its
    masks hold the least number of fp64, which is minus infinity to a softmax in fp32, and so NaN in
    a row of padding on the left.

    Yields:
        What makes a batch one that means the same to eager attention as to the model's own.
    """
    configurations = {
        id(c): c for m in model.modules() for c in _with_parts(getattr(m, "config", None))
    }
    before = [(c, getattr(c, _SWITCH)) for c in configurations.values()]
    double = any(p.dtype == torch.float64 for p in model.parameters())
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    changed = any(implementation != "eager" for _, implementation in before)
    try:
        for configuration, _ in before:
            setattr(configuration, _SWITCH, "eager")
        with Doubled() if before and double else nullcontext():
            yield lambda batch: _with_added_masks(batch, dtype) if changed else batch
    finally:
        for configuration, implementation in before:
            setattr(configuration, _SWITCH, implementation)


def _with_added_masks(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with boolean masks of four axes as numbers that are added to scores.

    To other kernels they say which keys may be seen; eager attention adds masks, and booleans would
    hide nothing.
    """
    if not isinstance(batch, Mapping):
        return batch

    def added(mask: Tensor) -> Tensor:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    hide = [
        name for name in _MASKS if isinstance(batch.get(name), Tensor) and batch[name].ndim == 4
    ]
    return {
        **batch,
        **{name: added(batch[name]) for name in hide if batch[name].dtype == torch.bool},
    }


def _with_parts(configuration: Any) -> Iterator[Any]:
    if hasattr(configuration, _SWITCH):
        yield configuration
        for name in getattr(configuration, "sub_configs", ()):
            yield from _with_parts(getattr(configuration, name, None))


class Places:
    """Which of an attention module's tensors is its map, found out on the first batch.

    That a tensor is a map its numbers tell, and to read them waits for an accelerator. So they are
    read once, of all sites together. Later maps are taken from the same place; they are tested,
    too, and the answers are read where the problem looks at its losses.
    """

    def __init__(self, problem: ScoringProblem | None = None) -> None:
        self.problem = problem
        self.known: dict[str, int] = {}  # by site

    def knows(self, bound: Iterable[BoundSite]) -> bool:
        """Whether nothing has to be read for these sites."""
        return all(b.site.name in self.known for b in bound)

    def maps(self, watches: Sequence[_Watch]) -> Maps:
        """The maps that were seen since the last call.

        Raises:
            UnsupportedModel: a module that ran and showed no map.
        """
        runs = [watch.runs for watch in watches]
        asked: list[list[Tensor]] = []
        for watch in watches:
            asked += [] if self._is_known(watch) else watch.runs
        answers = iter(in_main_memory(torch.stack([is_map(x) for x in run]) for run in asked))
        found: Maps = {}
        for number, (watch, of_site) in enumerate(zip(watches, runs, strict=True)):
            watch.runs = []
            if self._is_known(watch):
                found[number] = [x for (x,) in of_site]
                self._test(watch, found[number])
                continue
            places = [_first_true(next(answers)) for _ in of_site]
            if None in places:
                raise watch.no_map()
            found[number] = [
                run[place] for run, place in zip(of_site, places, strict=True) if place is not None
            ]
            if len(set(places)) == 1 and places[0] is not None:
                self.known[watch.bound.site.name] = places[0]
        return found

    def _is_known(self, watch: _Watch) -> bool:
        return watch.bound.site.name in self.known

    def _test(self, watch: _Watch, maps: list[Tensor]) -> None:
        if self.problem is not None and maps:
            others = torch.stack([~is_map(x) for x in maps])
            self.problem.refuse_later(
                ("a map", watch.bound.site.name), others, lambda _: watch.no_map()
            )


def _first_true(flags: Tensor) -> int | None:
    return next((place for place, flag in enumerate(flags.tolist()) if flag), None)


def is_map(x: Tensor) -> Tensor:
    """``[]``: whether ``[rows, heads, queries, keys]`` are probabilities over the keys; nobody
    looks."""
    x = x.detach()
    sums = x.sum(-1, dtype=torch.float32).nan_to_num(0)  # rows of padding may be NaN
    return (x.nan_to_num(0) >= 0).all() & (sums < 1.01).all() & (sums > 0).any()


@contextmanager
def mapping(
    bound: Iterable[BoundSite], places: Places, graph: bool = False
) -> Iterator[Callable[[], Maps]]:
    """For as long as the block lasts, attention maps are taken from every forward pass.

    Args:
        bound: Sites with heads; numbered as they come.
        places: What is known of where their maps are.
        graph: Make the maps part of a graph although no weight needs a gradient, and keep it.

    Yields:
        A function that gives the maps of all passes since it was called last.

    Raises:
        UnsupportedModel: in the forward pass: a module that runs and returns nothing of a map's
            shape.
    """
    watches = [_Watch(b, places, graph) for b in bound]
    with ExitStack() as stack:
        for watch in watches:
            module = watch.bound.module
            stack.callback(module.register_forward_pre_hook(watch.before, with_kwargs=True).remove)
            for part in module.modules():
                hook = watch.after if part is module else watch.inside
                stack.callback(part.register_forward_hook(hook).remove)
        yield lambda: places.maps(watches)


class _Watch:
    """The hooks on one attention module.

    ``runs`` are the runs that nobody has asked for yet, each with the tensors that may be its map:
    what the module returned, then what its parts did; where the place of the map is known, that one
    alone.
    """

    def __init__(self, bound: BoundSite, places: Places, graph: bool) -> None:
        self.bound, self.places, self.graph = bound, places, graph
        self.runs: list[list[Tensor]] = []
        self.parts: list[Tensor] = []
        self.asked = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.parts = []
        if isinstance(module, MultiHeadAttention):
            self.asked = kwargs.get("need_weights", False)
            kwargs = {**kwargs, "need_weights": True}
        if not self.graph:
            return args, kwargs
        # The first input gets a graph of its own, unless an earlier run of the same module has
        # given it one.
        values = [*args, *kwargs.values()]
        first = next(
            i
            for i, v in enumerate(values)
            if isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 2
        )
        if not values[first].requires_grad:
            values[first] = values[first].detach().requires_grad_()
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def inside(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.parts += [t for t in tensors(out) if self._may_be_map(t)]

    def after(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        shown = [t for t in tensors(out) if self._may_be_map(t)] + self.parts
        self.parts = []
        place = self.places.known.get(self.bound.site.name)
        if place is not None:
            shown = shown[place : place + 1]
        if not shown:
            raise self.no_map()
        self.runs.append(shown if self.graph else [x.detach() for x in shown])
        return out[0] if isinstance(module, MultiHeadAttention) and not self.asked else None

    def no_map(self) -> UnsupportedModel:
        name, kind = self.bound.site.name, type(self.bound.module).__name__
        must = "an attention that computes its map (eager attention) and returns it"
        got = f"{kind}, which has none: a fused kernel makes no map, other code keeps it to itself"
        return UnsupportedModel(f"the attention map of {name}", must, got, _HINT)

    def _may_be_map(self, x: Tensor) -> bool:
        n_heads = len(self.bound.site.heads)
        one_for_all = (
            n_heads > 1 and x.ndim == 4 and x.stride(1) == 0
        )  # their mean, shown once a head (WavLM)
        return x.is_floating_point() and x.ndim == 4 and x.shape[1] == n_heads and not one_for_all


def by_example(b: BoundSite, probabilities: Tensor, size: int) -> Tensor:
    """``[examples, heads, queries, keys]``; the windows of an example become queries one after
    another."""
    if len(probabilities) == size:
        return probabilities
    if len(probabilities) % size or not b.layout.windows:
        raise UnsupportedModel(
            b.site.name, f"run on {size} examples", f"a map of {len(probabilities)} rows", _HINT
        )
    windows: Tensor = probabilities.unflatten(0, (size, -1))
    return windows.transpose(1, 2).flatten(2, 3)


def visible(
    model: nn.Module, b: BoundSite, given: PaddingInfo, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """``[examples, queries]`` and ``[examples, keys]``: which queries and keys are no padding.

    Keys of cross-attention follow ``key_mask``, all others the mask of the queries; see
    ``query_mask``.
    """
    size, queries, keys = shape
    device = device_of(b.module)
    nothing = b.layout.windows
    of_queries = None if nothing else query_mask(model, b.site.kind, given, (size, queries))
    if b.site.kind == "cross":
        of_keys = key_mask(given, (size, keys))
    else:
        of_keys = None if nothing else query_mask(model, b.site.kind, given, (size, keys))
    return (
        torch.ones(size, queries, dtype=torch.bool, device=device)
        if of_queries is None
        else of_queries.to(device),
        torch.ones(size, keys, dtype=torch.bool, device=device)
        if of_keys is None
        else of_keys.to(device),
    )


@contextmanager
def told(
    model: nn.Module, bound: Iterable[BoundSite], batch: Any
) -> Iterator[dict[int, list[PaddingInfo]]]:
    """By site number, what tells the padding of each run that the block makes on a batch; see
    ``inputs_of``."""
    bound = list(bound)
    given: dict[int, list[PaddingInfo]] = {number: [] for number in range(len(bound))}

    def noting(number: int) -> Callable[..., None]:
        return lambda *_: given[number].append(inputs.now)

    with inputs_of(model, bound) as inputs, ExitStack() as stack:
        inputs.begin(batch)
        for number, b in enumerate(bound):
            stack.callback(b.module.register_forward_hook(noting(number)).remove)
        yield given


class MapScorer(Scorer):
    """A scorer that reads a number off every row of a map: mean over queries, examples and the
    unit's heads."""

    reads_loss: ClassVar[bool] = False

    @abstractmethod
    def of_rows(self, probabilities: Tensor) -> Tensor:
        """``[..., keys]`` in fp64, 0 where a key does not count, to ``[...]``."""

    def kept(
        self, problem: ScoringProblem, b: BoundSite, given: PaddingInfo, shape: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        """Which queries and keys count."""
        return visible(problem.model, b, given, shape)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        bound = [b for b in problem.bound if b.site.heads]
        device = device_of(problem.model)

        def of_batch(number: int, batch: Any) -> Tensor:
            batch = taken(batch)
            with told(problem.model, bound, batch) as given:
                run(problem.model, batch, problem.loss)
            found, size = maps(), batch_size(batch)
            rows = [self._site(problem, b, found[i], given[i], size) for i, b in enumerate(bound)]
            return torch.cat([of_site.to(device) for of_site in rows], 1)

        with (
            torch.no_grad(),
            eager(problem.model) as taken,
            mapping(bound, Places(problem)) as maps,
        ):
            rows = problem.rows("attention maps", of_batch)
        return mean_over_examples(rows)

    def _site(
        self,
        problem: ScoringProblem,
        b: BoundSite,
        runs: list[Tensor],
        given: list[PaddingInfo],
        size: int,
    ) -> Tensor:
        """``[examples, units]``, means over the queries of all runs."""
        total, count = [], []
        for probabilities, of_run in zip(checked_runs(b, runs), given, strict=True):
            probabilities = in_fp64(by_example(b, probabilities, size))
            masks = self.kept(problem, b, of_run, (size, *probabilities.shape[2:]))
            queries, keys = (mask.to(probabilities.device) for mask in masks)
            # Chosen, not multiplied by 0: rows of padding may be NaN.
            wanted = queries[:, None, :, None] & keys[:, None, None, :]
            found = self.of_rows(probabilities.masked_fill(~wanted, 0))
            total.append(found.masked_fill(~queries[:, None], 0).sum(2))
            count.append(queries.sum(1, keepdim=True).float())
        n_queries = sum(count[1:], count[0])

        def nothing(row: int) -> InvalidValue:
            got = f"none in example {row} of a batch, at {b.site.name}"
            return InvalidValue("batches", "with a token that counts in every example", got)

        problem.refuse_later(("a token that counts", b.site.name), n_queries == 0, nothing)
        return unit_means(b, sum(total[1:], total[0]) / n_queries)


def checked_runs(b: BoundSite, runs: list[Tensor]) -> list[Tensor]:
    """The maps of a site, at least one."""
    if not runs:
        must = "a module that runs when the model does"
        raise UnsupportedModel(b.site.name, must, "one that no batch reached", _HINT)
    return runs


def unit_means(b: BoundSite, heads: Tensor) -> Tensor:
    """``[examples, heads]`` to ``[examples, units]``."""
    return torch.stack([_columns(b, heads, unit).mean(1) for unit in b.site.units], 1)


def unit_sums(b: BoundSite, heads: Tensor) -> Tensor:
    """``[examples, heads]`` to ``[examples, units]``."""
    return torch.stack([_columns(b, heads, unit).sum(1) for unit in b.site.units], 1)


def _columns(b: BoundSite, heads: Tensor, unit: tuple[int, ...]) -> Tensor:
    """``[examples, heads of the unit]``, one after the other: a list of places would have to be
    sent to the device."""
    return torch.stack([heads[:, b.site.heads.index(head)] for head in unit], 1)


def mean_over_examples(rows: Tensor) -> Estimate:
    """The estimate that is a mean over examples, ``[examples, units]``."""
    if not bool(torch.isfinite(rows).all()):
        row = int((~torch.isfinite(rows)).any(1).nonzero()[0])
        hint = "Look for NaN or infinite values in the batches."
        raise InvalidValue(
            f"the attention maps of example {row}", "finite", "NaN or infinite", hint
        )
    return averaged(rows)
