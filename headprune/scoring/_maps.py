"""Attention maps: the probabilities that a site's values are averaged with, as its module itself
computed them.

Fused kernels never make a map, so Transformers' models run eagerly here, and our own attention
returns its weights. A map is recognised among all that the attention module and its parts return:
``[rows, heads, queries, keys]`` of non-negative numbers that sum to 1 over the keys at most (less
with attention sinks).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from headprune.attention.multi_head import MultiHeadAttention
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.contexts import not_finite, not_reached
from headprune.model.double import Doubled
from headprune.model.padding import PaddingInfo, inputs_of, key_mask, query_mask
from headprune.model.running import batch_size, device_of, tensors
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_fp64, in_main_memory
from headprune.scoring._activations import run
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, with_heads

#: For every site by number, the maps of its runs in the last forward pass.
Maps: TypeAlias = dict[int, list[Tensor]]

_SWITCH = "_attn_implementation_internal"  # what a configuration's ``_attn_implementation`` reads
_MASKS = ("attention_mask", "decoder_attention_mask")
_HINT = "Leave this site out with sites=, or take a scorer that needs no maps."


@contextmanager
def eager(model: nn.Module) -> Iterator[Callable[[Any], Any]]:
    """Compute attention eagerly in Transformers' models inside ``model``.

    Yields:
        A function that makes a batch mean the same to eager attention as to the model's own.
    """
    # The configurations themselves are changed, which attention modules ask in every call. The
    # model's own switch also asks whether a kernel is installed, warns, and cannot be put back
    # where parts had kernels of their own.
    configurations = _configurations(model)
    before = [getattr(configuration, _SWITCH) for configuration in configurations]
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    dtype = dtypes[0] if dtypes else torch.float32
    is_changed = any(implementation != "eager" for implementation in before)

    def for_eager(batch: Any) -> Any:
        return _with_added_masks(batch, dtype) if is_changed else batch

    with ExitStack() as stack:
        for configuration, implementation in zip(configurations, before, strict=True):
            stack.callback(setattr, configuration, _SWITCH, implementation)
            setattr(configuration, _SWITCH, "eager")
        if configurations and torch.float64 in dtypes:
            # A model in fp64 takes its fp32 steps in fp64, too: its masks hold the least number of
            # fp64. To a softmax in fp32 that is minus infinity, and so NaN in a row of padding.
            stack.enter_context(Doubled())
        yield for_eager


def _configurations(model: nn.Module) -> list[Any]:
    """The Transformers configurations inside a model, each once."""
    by_id: dict[int, Any] = {}
    for module in model.modules():
        for configuration in _with_parts(getattr(module, "config", None)):
            by_id[id(configuration)] = configuration
    return list(by_id.values())


def _with_added_masks(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with boolean masks ``[examples, heads, queries, keys]`` as numbers.

    Other kernels take booleans. Eager attention adds masks to scores, so that booleans would hide
    nothing.
    """
    if not isinstance(batch, Mapping):
        return batch
    changed = dict(batch)
    for name in _MASKS:
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.bool:
            zeros = torch.zeros_like(mask, dtype=dtype)
            changed[name] = zeros.masked_fill(~mask, torch.finfo(dtype).min)
    return changed


def _with_parts(configuration: Any) -> Iterator[Any]:
    """A configuration and those of its parts."""
    if hasattr(configuration, _SWITCH):
        yield configuration
        for name in getattr(configuration, "sub_configs", ()):
            yield from _with_parts(getattr(configuration, name, None))


class Places:
    """Which of an attention module's tensors is its map, found on the first batch.

    The numbers of a tensor show whether it is a map, and reading them waits for an accelerator. So
    they are read once, of all sites together. Later maps are taken from the same place. They are
    tested, too; those answers are read where the problem checks its losses.
    """

    def __init__(self, problem: ScoringProblem | None = None) -> None:
        self.problem = problem
        #: By site: the place of the map among the tensors of a run.
        self.known: dict[str, int] = {}

    def knows(self, bound: Iterable[BoundSite]) -> bool:
        """Whether nothing has to be read for these sites."""
        return all(b.site.name in self.known for b in bound)

    def maps(self, watches: Sequence[_MapHooks]) -> Maps:
        """The maps of all runs since the last call.

        Raises:
            UnsupportedModel: a module that ran and returned no map.
        """
        # 1. Test the tensors of sites whose place is not known, and read all answers together.
        tested: list[list[Tensor]] = []
        for watch in watches:
            if watch.bound.site.name not in self.known:
                tested += watch.runs
        are_maps = iter(in_main_memory(map(_are_maps, tested)))

        # 2. Take the map of every run.
        maps: Maps = {}
        for number, watch in enumerate(watches):
            runs, watch.runs = watch.runs, []
            if watch.bound.site.name in self.known:
                maps[number] = [x for (x,) in runs]
                self._test(watch, maps[number])
            else:
                places = [_first_true(next(are_maps)) for _ in runs]
                maps[number] = self._at_places(watch, runs, places)
        return maps

    def _at_places(
        self, watch: _MapHooks, runs: list[list[Tensor]], places: list[int | None]
    ) -> list[Tensor]:
        """The maps of a site's runs; their place is remembered where it is one for all runs."""
        maps = []
        for shown, place in zip(runs, places, strict=True):
            if place is None:
                raise watch.no_map()
            maps.append(shown[place])
        if len(set(places)) == 1 and places[0] is not None:
            self.known[watch.bound.site.name] = places[0]
        return maps

    def _test(self, watch: _MapHooks, maps: list[Tensor]) -> None:
        """Have tensors from a known place refused later, should they be no maps."""
        if self.problem is not None and maps:
            key = "a map", watch.bound.site.name
            self.problem.refuse_later(key, ~_are_maps(maps), lambda _: watch.no_map())


def _first_true(flags: Tensor) -> int | None:
    for place, flag in enumerate(flags.tolist()):
        if flag:
            return place
    return None


def _are_maps(tensors: Iterable[Tensor]) -> Tensor:
    """``[tensors]``: which of them are maps."""
    return torch.stack(list(map(is_map, tensors)))


def is_map(x: Tensor) -> Tensor:
    """``[]``: whether ``[rows, heads, queries, keys]`` are probabilities over the keys.

    The answer is on the device, so that nothing waits for it.
    """
    x = x.detach()
    sums = x.sum(-1, dtype=torch.float32).nan_to_num(0)  # rows of padding may be NaN
    return (x.nan_to_num(0) >= 0).all() & (sums < 1.01).all() & (sums > 0).any()


@contextmanager
def mapping(
    bound: Iterable[BoundSite], places: Places, graph: bool = False
) -> Iterator[Callable[[], Maps]]:
    """Take attention maps from every forward pass in the block.

    Args:
        bound: Sites with heads; numbered as they come.
        places: What is known of where their maps are.
        graph: Make the maps part of a graph although no weight needs a gradient, and keep it.

    Yields:
        A function that gives the maps of all passes since its last call.

    Raises:
        UnsupportedModel: in the forward pass: a module that runs and returns nothing of a map's
            shape.
    """
    watches = [_MapHooks(b, places, graph) for b in bound]
    with ExitStack() as stack:
        for watch in watches:
            module = watch.bound.module
            stack.callback(module.register_forward_pre_hook(watch.before, with_kwargs=True).remove)
            for part in module.modules():
                hook = watch.after if part is module else watch.inside
                stack.callback(part.register_forward_hook(hook).remove)
        yield lambda: places.maps(watches)


class _MapHooks:
    """The hooks on one attention module.

    Args:
        bound: The site.
        places: What is known of where its map is.
        graph: Make the maps part of a graph.
    """

    def __init__(self, bound: BoundSite, places: Places, graph: bool) -> None:
        self.bound = bound
        self.places = places
        self.graph = graph
        #: By run, the tensors that may be its map: what the module returned, then what its parts
        #: returned. Where the place of the map is known, that tensor alone.
        self.runs: list[list[Tensor]] = []
        # Tensors that the parts returned in the run that goes on.
        self.parts: list[Tensor] = []
        # Whether the caller of our own attention wants its weights.
        self.weights_wanted = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ask our own attention for its weights, and begin a graph where one is wanted."""
        self.parts = []
        if isinstance(module, MultiHeadAttention):
            self.weights_wanted = kwargs.get("need_weights", False)
            kwargs = {**kwargs, "need_weights": True}
        if self.graph:
            return _with_graph(args, kwargs)
        return args, kwargs

    def inside(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """Note what a part of the module returned."""
        self.parts += filter(self._may_be_map, tensors(out))

    def after(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Note what the module returned, and end the run."""
        shown = [*filter(self._may_be_map, tensors(out)), *self.parts]
        self.parts = []
        place = self.places.known.get(self.bound.site.name)
        if place is not None:
            shown = shown[place : place + 1]
        if not shown:
            raise self.no_map()
        if not self.graph:
            shown = [x.detach() for x in shown]
        self.runs.append(shown)
        if isinstance(module, MultiHeadAttention) and not self.weights_wanted:
            return out[0]
        return None

    def no_map(self) -> UnsupportedModel:
        name, kind = self.bound.site.name, type(self.bound.module).__name__
        must = "an attention that computes its map (eager attention) and returns it"
        got = f"a {kind} that returned none: fused kernels make none, other code may not return it"
        return UnsupportedModel(f"the attention map of {name}", must, got, _HINT)

    def _may_be_map(self, x: Tensor) -> bool:
        """Whether a tensor has a map's type and shape."""
        n_heads = len(self.bound.site.heads)
        if not x.is_floating_point() or x.ndim != 4 or x.shape[1] != n_heads:
            return False
        # The mean of all heads, expanded to each of them, is no map (WavLM).
        return n_heads == 1 or x.stride(1) != 0


def _with_graph(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a module, of which the first one asks for its gradient.

    It does already where an earlier run of the same module gave it a graph.
    """
    values = [*args, *kwargs.values()]
    for place, value in enumerate(values):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2:
            if not value.requires_grad:
                values[place] = value.detach().requires_grad_()
            break
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def by_example(b: BoundSite, probabilities: Tensor, size: int) -> Tensor:
    """``[examples, heads, queries, keys]``; the windows of an example become queries one after
    another."""
    if len(probabilities) == size:
        return probabilities
    if len(probabilities) % size or not b.layout.windows:
        must = f"a module whose map has one row per example, {size}"
        got = f"a map of {len(probabilities)} rows"
        raise UnsupportedModel(b.site.name, must, got, _HINT)
    windows: Tensor = probabilities.unflatten(0, (size, -1))
    return windows.transpose(1, 2).flatten(2, 3)


def visible(
    model: nn.Module, b: BoundSite, given: PaddingInfo, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """``[examples, queries]`` and ``[examples, keys]``: which queries and keys are no padding.

    Keys of cross-attention follow ``key_mask``, all others the mask of the queries; see
    ``query_mask``.
    """
    size, n_queries, n_keys = shape
    device = device_of(b.module)
    queries: Tensor | None = None
    keys: Tensor | None = None
    if not b.layout.windows:  # windows of an image have no padding
        queries = query_mask(model, b.site.kind, given, (size, n_queries))
    if b.site.kind == "cross":
        keys = key_mask(given, (size, n_keys))
    elif not b.layout.windows:
        keys = query_mask(model, b.site.kind, given, (size, n_keys))
    # Without a mask nothing is padding.
    if queries is None:
        queries = torch.ones(size, n_queries, dtype=torch.bool, device=device)
    if keys is None:
        keys = torch.ones(size, n_keys, dtype=torch.bool, device=device)
    return queries.to(device), keys.to(device)


@contextmanager
def padding_info(
    model: nn.Module, bound: Iterable[BoundSite], batch: Any
) -> Iterator[dict[int, list[PaddingInfo]]]:
    """Note the padding of each run that the block makes on a batch, by site number; see
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
    """A scorer that makes a number of every row of a map: mean over queries, examples and the
    unit's heads."""

    reads_loss: ClassVar[bool] = False

    @property
    def scores_neurons(self) -> bool:
        return False

    @abstractmethod
    def of_rows(self, probabilities: Tensor) -> Tensor:
        """From ``[..., keys]`` in fp64, 0 where a key does not count, to ``[...]``."""

    def kept(
        self, problem: ScoringProblem, b: BoundSite, given: PaddingInfo, shape: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        """Which queries and keys count."""
        return visible(problem.model, b, given, shape)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        bound = with_heads(problem.bound)
        device = device_of(problem.model)

        def of_batch(number: int, batch: Any) -> Tensor:
            batch = taken(batch)
            with padding_info(problem.model, bound, batch) as given:
                run(problem.model, batch, problem.loss)
            shown, size = maps(), batch_size(batch)
            rows = []
            for number, b in enumerate(bound):
                of_site = self._site(problem, b, shown[number], given[number], size)
                rows.append(of_site.to(device))
            return torch.cat(rows, 1)

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
        # By run: [examples, heads], sums over queries, and [examples, 1], how many they are.
        total, count = [], []
        for of_run, told_of_run in zip(checked_runs(b, runs), given, strict=True):
            # [examples, heads, queries, keys]
            probabilities = in_fp64(by_example(b, of_run, size))
            masks = self.kept(problem, b, told_of_run, (size, *probabilities.shape[2:]))
            queries, keys = (mask.to(probabilities.device) for mask in masks)
            # Chosen, not multiplied by 0: rows of padding may be NaN.
            wanted = queries[:, None, :, None] & keys[:, None, None, :]
            numbers = self.of_rows(probabilities.masked_fill(~wanted, 0))
            total.append(numbers.masked_fill(~queries[:, None], 0).sum(2))
            count.append(queries.sum(1, keepdim=True).float())
        n_queries = sum(count[1:], count[0])

        def nothing(row: int) -> InvalidValue:
            must = "of examples with a token that is neither padding nor excluded"
            got = f"none in example {row} of a batch, at {b.site.name}"
            return InvalidValue("batches", must, got, "Leave such examples out.")

        problem.refuse_later(("a token that counts", b.site.name), n_queries == 0, nothing)
        return unit_means(b, sum(total[1:], total[0]) / n_queries)


def checked_runs(b: BoundSite, runs: list[Tensor]) -> list[Tensor]:
    """The maps of a site, at least one."""
    if not runs:
        raise not_reached(b.site.name, _HINT)
    return runs


def unit_means(b: BoundSite, heads: Tensor) -> Tensor:
    """``[examples, heads]`` to ``[examples, units]``."""
    return torch.stack([_columns(b, heads, unit).mean(1) for unit in b.site.units], 1)


def unit_sums(b: BoundSite, heads: Tensor) -> Tensor:
    """``[examples, heads]`` to ``[examples, units]``."""
    return torch.stack([_columns(b, heads, unit).sum(1) for unit in b.site.units], 1)


def _columns(b: BoundSite, heads: Tensor, unit: tuple[int, ...]) -> Tensor:
    """``[examples, heads of the unit]``."""
    # One after the other: a list of places would have to be sent to the device.
    return torch.stack([heads[:, b.site.heads.index(head)] for head in unit], 1)


def mean_over_examples(rows: Tensor) -> Estimate:
    """The estimate that is a mean over examples, ``[examples, units]``."""
    if not bool(torch.isfinite(rows).all()):
        row = int((~torch.isfinite(rows)).any(1).nonzero()[0])
        raise not_finite(f"the attention maps of example {row}")
    return averaged(rows)
