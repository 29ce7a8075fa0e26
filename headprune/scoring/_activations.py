"""Statistics of what the output projections read, for all activation scorers of a call in one pass.

Nothing here needs a loss. Sums are in fp64, without padding. Every statistic is kept apart for a
few blocks of examples (example i is in block ``i % blocks``), so that a jackknife over blocks gives
standard errors in bounded memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from headprune.attention.linear import effective_weight
from headprune.core.errors import InvalidValue
from headprune.core.scores import Bundling
from headprune.model.contexts import not_finite, not_reached, only_padding, reading
from headprune.model.losses import Loss, inputs_of
from headprune.model.offloaded import fetched
from headprune.model.own_loss import is_default
from headprune.model.running import batch_size, call, device_of
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_main_memory, sent
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, with_heads
from headprune.scoring._contexts import by_example
from headprune.scoring._sharing import summed

#: Blocks of examples, for statistics of one vector per site.
BLOCKS = 20

#: A kind of statistic and what it is made with besides the site; scorers that gather the same share
#: it.
Gathers: TypeAlias = tuple[Any, ...]


class Statistic(ABC):
    """Sums at one site, by block of examples; ``count`` ``[blocks]`` is their divisor.

    Args:
        bound: The site.
        blocks: Blocks of examples that are kept apart.
    """

    #: The tensors that hold the sums, which those of other processes are added to.
    added: ClassVar[tuple[str, ...]]

    def __init__(self, bound: BoundSite, blocks: int = BLOCKS) -> None:
        self.bound = bound
        self.blocks = blocks
        self.width = len(bound.site.heads) * bound.site.value_dim
        #: How often the output projection ran.
        self.runs = 0
        #: Relative rounding of what it read.
        self.rounding = 0.0
        self.count = self.zeros()

    def zeros(self, *shape: int) -> Tensor:
        """fp64 zeros for every block; on the CPU where the device has no fp64."""
        device = device_of(self.bound.module)
        if device.type == "mps":
            device = torch.device("cpu")
        return torch.zeros(self.blocks, *shape, dtype=torch.float64, device=device)

    def block_of(self, examples: range) -> Tensor:
        """``[examples]``, the block of each, on the device of the sums."""
        return torch.arange(examples.start, examples.stop, device=self.count.device) % self.blocks

    @abstractmethod
    def add(self, examples: range, x: Tensor, counted: Tensor) -> None:
        """Take one run of the projection.

        Args:
            examples: Numbers of the batch's examples.
            x: ``[examples, tokens, width]``, fp64, zeros where a token does not count.
            counted: ``[examples, tokens]``, 0 or 1 in fp64.
        """

    def end(self, examples: range) -> None:  # noqa: B027 (most statistics have nothing to do)
        """Finish a batch, of which all runs were taken."""

    def parts(self) -> dict[str, Tensor]:
        """All that was gathered, for the other processes."""
        parts: dict[str, Tensor] = {}
        for name in self.added:
            parts[name] = getattr(self, name)
        parts["runs"] = torch.tensor(self.runs)
        parts["rounding"] = torch.tensor(self.rounding, dtype=torch.float64)
        return parts

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Replace the own sums by those of all processes."""
        for name in self.added:
            setattr(self, name, summed(parts, name).to(self.count.device))
        self.runs = int(summed(parts, "runs"))
        self.rounding = max(float(part["rounding"]) for part in parts)


class ChannelMoments(Statistic):
    """Mean and sum of squared deviations of every channel over tokens, merged example by example
    (Chan et al. 1979)."""

    added = ("count", "mean", "squares")

    def __init__(self, bound: BoundSite) -> None:
        super().__init__(bound)
        # Both [blocks, width].
        self.mean = self.zeros(self.width)
        self.squares = self.zeros(self.width)

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        n = summed(parts, "count").unsqueeze(1)
        # A block without tokens has the mean 0.
        shares = [part["count"].unsqueeze(1) / n.clamp(min=1) for part in parts]
        means = [share * part["mean"] for share, part in zip(shares, parts, strict=True)]
        mean = torch.stack(means).sum(0)
        squares = []
        for part in parts:
            between = part["count"].unsqueeze(1) * (part["mean"] - mean).square()
            squares.append(part["squares"] + between)
        super().join(parts)
        self.mean = mean.to(self.mean)
        self.squares = torch.stack(squares).sum(0).to(self.squares)

    def add(self, examples: range, x: Tensor, counted: Tensor) -> None:
        block = self.block_of(examples)
        # Moments of every example: [examples] and [examples, width].
        count = counted.sum(1)
        mean = x.sum(1) / count.clamp(min=1).unsqueeze(1)
        squares = ((x - mean.unsqueeze(1)) * counted.unsqueeze(2)).square().sum(1)
        # Merge as many examples at once as there are blocks: then no block comes twice.
        for start in range(0, len(block), self.blocks):
            part = slice(start, start + self.blocks)
            here = block[part]
            before = self.count[here]
            share = (count[part] / (before + count[part]).clamp(min=1)).unsqueeze(1)
            delta = mean[part] - self.mean[here]
            self.mean[here] += delta * share
            self.squares[here] += squares[part] + delta.square() * before.unsqueeze(1) * share
            self.count[here] += count[part]

    def mean_square(self, weights: Tensor) -> Tensor:
        """``[width]``, mean square of every channel over the tokens of the blocks with weight 1."""
        n = self.count * weights
        return (weights @ self.squares + n @ self.mean.square()) / n.sum()

    def variance(self, weights: Tensor) -> Tensor:
        """``[width]``, unbiased variance over the tokens of the blocks with weight 1.

        0 for a single token, and where tokens differ by the model's rounding only: standardised,
        that would look like a signal.
        """
        n = self.count * weights
        mean = n @ self.mean / n.sum()
        squares = weights @ self.squares + n @ (self.mean - mean).square()
        variance = squares / (n.sum() - 1).clamp(min=1)
        return variance.masked_fill(variance <= (4 * self.rounding * mean).square(), 0)


class Magnitudes(Statistic):
    """Sums over examples of ``(mean over tokens of a magnitude) ** 2``.

    Args:
        bound: The site.
        of: ``channels``, every channel's absolute value; ``output``, the norm of what a unit adds
            to the output.
    """

    added = ("count", "squares")

    def __init__(self, bound: BoundSite, of: str) -> None:
        super().__init__(bound)
        self.of = of
        self.squares = self.zeros(self.width if of == "channels" else len(bound.site.units))
        # Of every run of a batch: sums of magnitudes [examples, width or units], and [examples]
        # tokens.
        self._batch: list[tuple[Tensor, Tensor]] = []

    def add(self, examples: range, x: Tensor, counted: Tensor) -> None:
        if self.of == "output":
            weight = output_weight(self.bound).to(x)
            # [examples, tokens, units]
            if has_unit_per_channel(self.bound):
                x = x * weight.norm(dim=0)
            else:
                columns = unit_columns(self.bound)
                x = torch.stack([(x[..., u] @ weight[:, u].T).norm(dim=-1) for u in columns], -1)
        self._batch.append((x.abs().sum(1), counted.sum(1)))

    def end(self, examples: range) -> None:
        if not self._batch:
            return
        block = self.block_of(examples)
        total, count = (sum(run[1:], run[0]) for run in zip(*self._batch, strict=True))
        mean = total / count.clamp(min=1).unsqueeze(1)
        self.squares.index_add_(0, block, mean.square())
        # Examples with a token that counts.
        self.count.index_add_(0, block, (count > 0).double())
        self._batch = []

    def size(self, weights: Tensor) -> Tensor:
        """Root mean square over the examples of the blocks with weight 1; ``[width]`` or
        ``[units]``."""
        return (weights @ self.squares / (self.count @ weights)).sqrt()


class Products(Statistic):
    """Sums over tokens of ``x x'``; ``blocks * width ** 2`` numbers per site."""

    added = ("count", "sums")

    def __init__(self, bound: BoundSite, blocks: int) -> None:
        super().__init__(bound, blocks)
        self.sums = self.zeros(self.width, self.width)

    def add(self, examples: range, x: Tensor, counted: Tensor) -> None:
        for number, here in by_block(examples, self.blocks):
            rows = x[here].flatten(0, 1)  # tokens that do not count are zeros
            self.sums[number].addmm_(rows.T, rows)
        self.count.index_add_(0, self.block_of(examples), counted.sum(1))

    def mean(self, weights: Tensor) -> Tensor:
        """``[width, width]``, mean over the tokens of the blocks with weight 1."""
        total: Tensor = torch.tensordot(weights, self.sums, 1)
        return total / (self.count @ weights)


def by_block(examples: range, blocks: int) -> Iterator[tuple[int, slice]]:
    """The blocks that examples fall into, each with the places of its examples in the batch.

    Example i is in block ``i % blocks``, which Python knows: reading a tensor of block numbers
    would wait for its device.
    """
    for place in range(min(len(examples), blocks)):
        yield examples[place] % blocks, slice(place, None, blocks)


class ActivationScorer(Scorer):
    """A scorer that reads one statistic per site; its standard errors are a jackknife over blocks
    of examples."""

    reads_loss: ClassVar[bool] = False
    #: How the score of several neurons follows from theirs.
    bundling: ClassVar[Bundling] = "sum"

    @property
    @abstractmethod
    def gathers(self) -> Gathers:
        """The class of the statistic, and what it is made with besides the site."""

    @abstractmethod
    def site_values(self, statistic: Any, weights: Tensor) -> Tensor:
        """``[units]`` of a site, from the blocks with weight 1."""

    def notes(self, statistics: Iterable[Any]) -> tuple[str, ...]:
        """What else the user should know."""
        return ()

    def refused(self, statistic: Any) -> InvalidValue:
        """Why a site's values are not finite."""
        return not_finite(f"what {statistic.bound.site.name} gives {type(self).__name__}")

    def estimate(self, problem: ScoringProblem) -> Estimate:
        statistics, n_examples = _gathered(problem, self)
        parts = []
        for statistic in statistics:
            blocks = range(statistic.blocks)
            sizes = [len(range(block, n_examples, statistic.blocks)) for block in blocks]
            parts.append(jackknife(partial(self.site_values, statistic), statistic.count, sizes))
        parts = in_main_memory(parts)  # of all sites in one copy
        for statistic, part in zip(statistics, parts, strict=True):
            if not bool(torch.isfinite(part).all()):
                raise self.refused(statistic)
        row = "example" if n_examples == 1 else "block of examples"
        estimate = averaged(torch.cat(parts, 1), n_examples, row=row)
        notes = (*estimate.notes, *self.notes(statistics))
        return replace(estimate, notes=notes, bundling=self.bundling)


def jackknife(values_of: Callable[[Tensor], Tensor], like: Tensor, sizes: Iterable[int]) -> Tensor:
    """Rows, one per block, whose mean is a statistic of all blocks and whose spread is its sampling
    error.

    They are the pseudo-values of the jackknife that leaves out groups of unlike size (Busing,
    Meijer, van der Leeden 1999). They are stretched so that the variance of their mean is that
    jackknife's, and moved so that their mean is the statistic. For a mean over examples, each of
    which is a block, they are the examples.

    Args:
        values_of: From weights ``[blocks]`` of 0 and 1 to ``[units]``.
        like: A tensor of the weights' shape, type and device.
        sizes: Examples of each block.

    Returns:
        ``[blocks with examples, units]``; the statistic itself for a single block.
    """
    listed = list(sizes)
    values = [values_of(weights) for weights in runs_of(like, listed)]
    return pseudo_values(torch.stack(values), listed)


def runs_of(like: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The weights ``[blocks]`` that a jackknife needs values for.

    First all blocks; then, for every block with examples, all but that one. Where a single block
    has examples, all blocks alone.
    """
    everything = torch.ones_like(like)
    runs = [everything]
    with_examples = [block for block, size in enumerate(sizes) if size]
    if len(with_examples) < 2:
        return runs
    for block in with_examples:
        weights = everything.clone()
        weights[block].zero_()
        runs.append(weights)
    return runs


def pseudo_values(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows of ``jackknife``, from ``values`` ``[1 + blocks with examples, units]``, one row per
    run of ``runs_of``."""
    whole, left_out = values[0], values[1:]
    if not len(left_out):
        return values
    given = [size for size in sizes if size]
    # [blocks, 1]: all examples divided by those of the block.
    ratios = [sum(given) / size for size in given]
    shares = sent(ratios, whole.device, whole.dtype).unsqueeze(1)
    pseudo = shares * whole - (shares - 1) * left_out
    deviations = (pseudo - (pseudo / shares).sum(0)) * ((len(given) - 1) / (shares - 1)).sqrt()
    return whole + deviations - deviations.mean(0)


def output_weight(bound: BoundSite) -> Tensor:
    """``[out, heads * width]``, what a site's contexts are multiplied by.

    Without an output projection every channel has its own place in the output, which a cut leaves
    as wide.
    """
    if bound.layout.gate:
        with fetched(bound.gate):
            return effective_weight(bound.gate).detach()
    site = bound.site
    places = torch.eye(site.n_query_heads)[:, list(site.heads)]
    return sent(torch.kron(places, torch.eye(site.value_dim)), device_of(bound.module))


def has_unit_per_channel(bound: BoundSite) -> bool:
    """Whether every unit is one channel of the contexts, as the neurons of a feed-forward are."""
    return bound.layout.is_feed_forward and bound.site.bundles is None


def unit_columns(bound: BoundSite) -> list[Tensor]:
    """The columns of every unit in its site's contexts: those of all its heads."""
    site = bound.site
    n_heads = len(site.heads)
    columns = torch.arange(n_heads * site.value_dim, device=device_of(bound.module))
    of_head = dict(zip(site.heads, columns.view(n_heads, site.value_dim), strict=True))

    def columns_of(unit: tuple[int, ...]) -> Tensor:
        # One head after the other: a list of places would have to be sent to the device.
        return torch.cat([of_head[head] for head in unit])

    return list(map(columns_of, site.units))


def of_units(bound: BoundSite, channels: Tensor, number_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce ``[heads * width]`` to ``[units]``: ``number_of`` the channels of each unit.

    A neuron is one channel, so its number is that channel's.
    """
    if has_unit_per_channel(bound):
        return channels
    return torch.stack([number_of(channels[unit]) for unit in unit_columns(bound)])


def run(model: nn.Module, batch: Any, loss: Loss) -> None:
    """Run a model on a batch without asking for a loss.

    A loss of the user's is called all the same, because it knows the batch's form. Labels are left
    out, except for an encoder-decoder, which makes its decoder's inputs from them.
    """
    if not is_default(loss):
        loss(model, batch)
        return
    call(model, inputs_of(model, batch))


class _SharedStatistics:
    """Statistics by kind, one per site with heads; shared by the scorers of a call."""

    def __init__(self) -> None:
        self.of_kind: dict[Gathers, list[Statistic]] = {}
        self.n_examples = 0


def _gathered(problem: ScoringProblem, scorer: ActivationScorer) -> tuple[list[Any], int]:
    """A scorer's statistics, one per site with heads, and the number of examples.

    The statistics of the call's other scorers are gathered in the same pass.
    """
    shared = problem.shared.of(_SharedStatistics)
    if scorer.gathers not in shared.of_kind:
        kinds = {scorer.gathers: None}  # a set in order
        for other in problem.scorers:
            if isinstance(other, ActivationScorer) and other.gathers not in shared.of_kind:
                kinds[other.gathers] = None
        bound = with_heads(problem.bound)
        new = {kind: _made(kind, bound) for kind in kinds}
        shared.n_examples = _gather(problem, bound, list(new.values()))
        shared.of_kind.update(new)
    return shared.of_kind[scorer.gathers], shared.n_examples


def _made(kind: Gathers, bound: list[BoundSite]) -> list[Statistic]:
    """An empty statistic of a kind for every site."""
    cls, *settings = kind
    return [cls(b, *settings) for b in bound]


@torch.no_grad()
def _gather(
    problem: ScoringProblem, bound: list[BoundSite], statistics: list[list[Statistic]]
) -> int:
    """Fill statistics in one pass; return the number of examples.

    Args:
        problem: The problem.
        bound: Its sites with heads.
        statistics: For every kind, one statistic per site.
    """
    every = [statistic for of_kind in statistics for statistic in of_kind]
    examples = range(0)  # of the batch that runs

    def take(number: int, x: Tensor, counted: Tensor | None) -> None:
        rows, counted = _without_padding(bound[number], x, counted, len(examples))
        rounding = torch.finfo(rows.dtype).eps
        rows = rows.double()
        for of_kind in statistics:
            statistic = of_kind[number]
            statistic.runs += 1
            statistic.rounding = rounding
            statistic.add(examples, rows, counted.double())

    def read_own() -> dict[str, Tensor]:
        nonlocal examples
        into = problem.resumable(**{str(i): statistic for i, statistic in enumerate(every)})
        with reading(problem.model, bound, take) as begin:
            for _, before, batch in problem.share("activations", into):
                examples = range(before, before + batch_size(batch))
                begin(batch)
                run(problem.model, batch, problem.loss)
                for statistic in every:
                    statistic.end(examples)
        return {}

    problem.gathered("activations", read_own)
    if problem.workers.size > 1:
        for statistic in every:
            # One at a time: they may be large.
            statistic.join(problem.workers.exchanged(statistic.parts))
    _check_reached(every)
    return problem.examples


def _without_padding(
    b: BoundSite, x: Tensor, counted: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """What a site read, with zeros at padding.

    Returns:
        ``[examples, tokens, width]``, and ``[examples, tokens]``: which tokens count.
    """
    rows = by_example(b, x, size)
    if rows.device.type == "mps":  # it has no fp64
        rows = rows.cpu()
    if counted is None:
        counted = torch.ones(rows.shape[:2], device=rows.device)
    counted = counted.to(rows.device).reshape(size, -1)
    # Chosen, not multiplied by 0: attention may leave NaN at padding.
    return rows.masked_fill(counted.unsqueeze(-1) == 0, 0), counted


def _check_reached(statistics: Iterable[Statistic]) -> None:
    """Refuse sites that did not run, or that read nothing but padding."""
    for statistic in statistics:
        if not statistic.runs:
            raise not_reached(statistic.bound.site.name)
    # Of all sites in one copy.
    reached = in_main_memory(statistic.count.any() for statistic in statistics)
    for statistic, has_tokens in zip(statistics, reached, strict=True):
        if not bool(has_tokens):
            raise only_padding(statistic.bound.site.name)
