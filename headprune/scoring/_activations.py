"""Statistics of what the output projections read, gathered for all activation scorers of a call in
one forward pass.

Nothing here needs a loss. Sums are in fp64, padding is left out, and every statistic is kept apart
for a few blocks of examples (example i is in block ``i % blocks``), so that leaving a block out
gives standard errors in bounded memory.
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
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.contexts import reading
from headprune.model.losses import Loss, inputs_of
from headprune.model.offloaded import fetched
from headprune.model.own_loss import is_default
from headprune.model.running import batch_size, call, device_of
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_main_memory, sent
from headprune.scoring._averages import averaged
from headprune.scoring._base import Estimate, Scorer, ScoringProblem, added
from headprune.scoring._contexts import by_example

#: Blocks of examples for statistics of a vector a site.
BLOCKS = 20

#: A kind of statistic and what it is made with besides the site; scorers that gather the same share
#: it.
Gathers: TypeAlias = tuple[Any, ...]


class Statistic(ABC):
    """What is gathered at one site: ``count`` ``[blocks]`` and sums that go with it.

    Args:
        bound: The site.
        blocks: Blocks of examples that are kept apart.
    """

    #: The tensors that hold the sums, which those of other processes are added to.
    added: ClassVar[tuple[str, ...]]

    def __init__(self, bound: BoundSite, blocks: int = BLOCKS) -> None:
        self.bound, self.blocks = bound, blocks
        self.width = len(bound.site.heads) * bound.site.value_dim
        self.runs = 0
        self.rounding = 0.0  # relative, of what is read
        self.count = self.zeros()

    def zeros(self, *shape: int) -> Tensor:
        """fp64 zeros for every block; on the CPU where the device has no fp64."""
        device = device_of(self.bound.module)
        found = "cpu" if device.type == "mps" else device
        return torch.zeros(self.blocks, *shape, dtype=torch.float64, device=found)

    def block_of(self, examples: range) -> Tensor:
        """``[examples]``, the block of each, where the sums are."""
        return torch.arange(examples.start, examples.stop, device=self.count.device) % self.blocks

    @abstractmethod
    def add(self, examples: range, x: Tensor, counted: Tensor) -> None:
        """Takes one run of the projection.

        Args:
            examples: Numbers of the batch's examples.
            x: ``[examples, tokens, width]``, fp64, zeros where a token does not count.
            counted: ``[examples, tokens]``, 0 or 1 in fp64.
        """

    def end(self, examples: range) -> None:  # noqa: B027 (most statistics have nothing to do)
        """All runs of a batch have been taken."""

    def parts(self) -> dict[str, Tensor]:
        """All that was gathered, for the other processes."""
        seen = {
            "runs": torch.tensor(self.runs),
            "rounding": torch.tensor(self.rounding, dtype=torch.float64),
        }
        return {**{name: getattr(self, name) for name in self.added}, **seen}

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        """Takes what all processes have gathered in place of its own."""
        for name in self.added:
            setattr(self, name, added(parts, name).to(self.count.device))
        self.runs = int(added(parts, "runs"))
        self.rounding = max(float(part["rounding"]) for part in parts)


class Moments(Statistic):
    """Mean and sum of squared deviations of every channel over tokens, merged example by example
    (Chan et al. 1979)."""

    added = ("count", "mean", "squares")

    def __init__(self, bound: BoundSite) -> None:
        super().__init__(bound)
        self.mean, self.squares = self.zeros(self.width), self.zeros(self.width)

    def join(self, parts: list[Mapping[str, Tensor]]) -> None:
        n = added(parts, "count").unsqueeze(1)
        shares = [part["count"].unsqueeze(1) / n.clamp(min=1) for part in parts]
        mean = torch.stack(
            [share * part["mean"] for share, part in zip(shares, parts, strict=True)]
        ).sum(0)
        squares = [
            p["squares"] + p["count"].unsqueeze(1) * (p["mean"] - mean).square() for p in parts
        ]
        super().join(parts)
        self.mean, self.squares = mean.to(self.mean), torch.stack(squares).sum(0).to(self.squares)

    def add(self, examples: range, x: Tensor, counted: Tensor) -> None:
        block = self.block_of(examples)
        count = counted.sum(1)
        mean = x.sum(1) / count.clamp(min=1).unsqueeze(1)
        squares = ((x - mean.unsqueeze(1)) * counted.unsqueeze(2)).square().sum(1)
        for start in range(0, len(block), self.blocks):  # in such a stretch no block comes twice
            part = slice(start, start + self.blocks)
            here, before = block[part], self.count[block[part]]
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
        """``[width]``, unbiased variance over the tokens of the blocks with weight 1; 0 for a
        single token.

        0 also where tokens differ by the model's rounding only: standardised, that would look like
        a signal.
        """
        n = self.count * weights
        mean = n @ self.mean / n.sum()
        variance = (weights @ self.squares + n @ (self.mean - mean).square()) / (n.sum() - 1).clamp(
            min=1
        )
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
        self._batch: list[tuple[Tensor, Tensor]] = []

    def add(self, examples: range, x: Tensor, counted: Tensor) -> None:
        if self.of == "output":
            weight = output_weight(self.bound).to(x)
            x = torch.stack(
                [(x[..., u] @ weight[:, u].T).norm(dim=-1) for u in unit_columns(self.bound)], -1
            )
        self._batch.append((x.abs().sum(1), counted.sum(1)))

    def end(self, examples: range) -> None:
        if self._batch:
            block = self.block_of(examples)
            total, count = (sum(run[1:], run[0]) for run in zip(*self._batch, strict=True))
            self.squares.index_add_(0, block, (total / count.clamp(min=1).unsqueeze(1)).square())
            self.count.index_add_(0, block, (count > 0).double())
            self._batch = []

    def size(self, weights: Tensor) -> Tensor:
        """Root mean square over the examples of the blocks with weight 1; ``[width]`` or
        ``[units]``."""
        return (weights @ self.squares / (self.count @ weights)).sqrt()


class Products(Statistic):
    """Sums over tokens of ``x x'``; memory ``blocks * width ** 2`` a site."""

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

    Example i is in block ``i % blocks``, which Python knows: to ask a tensor of block numbers waits
    for its device.
    """
    for place in range(min(len(examples), blocks)):
        yield examples[place] % blocks, slice(place, None, blocks)


class ActivationScorer(Scorer):
    """A scorer that reads one statistic a site; its standard errors are a jackknife over blocks of
    examples."""

    reads_loss: ClassVar[bool] = False

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
        where = f"what {statistic.bound.site.name} gives {type(self).__name__}"
        hint = "Look for NaN or infinite values in the batches."
        return InvalidValue(where, "finite", "NaN or infinite", hint)

    def estimate(self, problem: ScoringProblem) -> Estimate:
        statistics, n_examples = _gathered(problem, self)
        parts = []
        for statistic in statistics:
            sizes = [len(range(g, n_examples, statistic.blocks)) for g in range(statistic.blocks)]
            parts.append(jackknife(partial(self.site_values, statistic), statistic.count, sizes))
        parts = in_main_memory(parts)  # of all sites in one copy
        for statistic, part in zip(statistics, parts, strict=True):
            if not bool(torch.isfinite(part).all()):
                raise self.refused(statistic)
        rows = torch.cat(parts, 1)
        found = averaged(
            rows, n_examples, row="example" if n_examples == 1 else "block of examples"
        )
        return replace(found, notes=(*found.notes, *self.notes(statistics)))


def jackknife(values_of: Callable[[Tensor], Tensor], like: Tensor, sizes: Iterable[int]) -> Tensor:
    """Numbers, one row a block, whose mean is a statistic of all blocks and whose spread is its
    sampling error.

    They are the pseudo-values of the jackknife that leaves out groups of unlike size (Busing,
    Meijer, van der Leeden 1999), stretched so that the variance of their mean is that jackknife's,
    and moved so that their mean is the statistic. For a mean over examples, each of which is a
    block, they are the examples.

    Args:
        values_of: From weights ``[blocks]`` of 0 and 1 to ``[units]``.
        like: A tensor of the weights' shape, type and device.
        sizes: Examples of each block.

    Returns:
        ``[blocks with examples, units]``; the statistic itself for a single block.
    """
    held = list(sizes)
    return pseudo_values(torch.stack([values_of(weights) for weights in runs_of(like, held)]), held)


def runs_of(like: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """What a jackknife asks for: all blocks, then, for every block with examples, all but that;
    each ``[blocks]``.

    Where a single block has examples, all blocks are all that is asked for.
    """
    everything = torch.ones_like(like)
    found = [everything]
    given = [block for block, size in enumerate(sizes) if size]
    for block in given if len(given) > 1 else []:
        weights = everything.clone()
        weights[block].zero_()
        found.append(weights)
    return found


def pseudo_values(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows of ``jackknife`` from ``values`` ``[1 + blocks with examples, units]``, one row a
    run of ``runs_of``."""
    whole, left_out = values[0], values[1:]
    if not len(left_out):
        return values
    given = [size for size in sizes if size]
    shares = sent([sum(given) / size for size in given], whole.device, whole.dtype).unsqueeze(1)
    pseudo = shares * whole - (shares - 1) * left_out
    deviations = (pseudo - (pseudo / shares).sum(0)) * ((len(given) - 1) / (shares - 1)).sqrt()
    return whole + deviations - deviations.mean(0)


def output_weight(bound: BoundSite) -> Tensor:
    """``[out, heads * width]``, what a site's contexts are multiplied by.

    Without an output projection every channel goes to its own place in the output, which a cut
    leaves as wide.
    """
    if bound.layout.gate:
        with fetched(bound.gate):
            return effective_weight(bound.gate).detach()
    site = bound.site
    places = torch.eye(site.n_query_heads)[:, list(site.heads)]
    return sent(torch.kron(places, torch.eye(site.value_dim)), device_of(bound.module))


def unit_columns(bound: BoundSite) -> list[Tensor]:
    """Where every unit lies in its site's contexts: all columns of all its heads."""
    site = bound.site
    device = device_of(bound.module)
    columns = torch.arange(len(site.heads) * site.value_dim, device=device).view(
        len(site.heads), site.value_dim
    )
    # One head after the other: a list of places would have to be sent to the device.
    return [torch.cat([columns[site.heads.index(head)] for head in unit]) for unit in site.units]


def run(model: nn.Module, batch: Any, loss: Loss) -> None:
    """Runs a model on a batch without asking for a loss; through a loss of the user's, which knows
    the batch's form.

    Labels are left out, except for an encoder-decoder, which makes its decoder's inputs from them.
    """
    if not is_default(loss):
        loss(model, batch)
        return
    call(model, inputs_of(model, batch))


def _gathered(problem: ScoringProblem, scorer: ActivationScorer) -> tuple[list[Any], int]:
    """A scorer's statistics, one a site with heads, and the number of examples; those of the call's
    other scorers are gathered in the same pass."""
    found: dict[Gathers, list[Statistic]] = problem.shared.setdefault("activations", {})
    if scorer.gathers not in found:
        together = [s for s in problem.shared.get("scorers", ()) if isinstance(s, ActivationScorer)]
        wanted = dict.fromkeys(s.gathers for s in (scorer, *together) if s.gathers not in found)
        bound = [b for b in problem.bound if b.site.heads]
        new = {key: [key[0](b, *key[1:]) for b in bound] for key in wanted}
        problem.shared["activations examples"] = _pass(problem, bound, list(new.values()))
        found.update(new)
    return found[scorer.gathers], problem.shared["activations examples"]


@torch.no_grad()
def _pass(
    problem: ScoringProblem, bound: list[BoundSite], statistics: list[list[Statistic]]
) -> int:
    first, size = 0, 0

    def take(number: int, x: Tensor, counted: Tensor | None) -> None:
        x = by_example(bound[number], x, size)
        x = x.cpu() if x.device.type == "mps" else x
        counted = (
            torch.ones(x.shape[:2], device=x.device) if counted is None else counted.to(x.device)
        )
        counted = counted.reshape(size, -1)
        rounding = torch.finfo(x.dtype).eps
        # Chosen, not multiplied by 0: attention may leave NaN at padding.
        x = x.masked_fill(counted.unsqueeze(-1) == 0, 0).double()
        for of_kind in statistics:
            of_kind[number].runs += 1
            of_kind[number].rounding = rounding
            of_kind[number].add(range(first, first + size), x, counted.double())

    every = list(enumerate(s for of_kind in statistics for s in of_kind))

    def own() -> dict[str, Tensor]:
        nonlocal first, size
        with reading(problem.model, bound, take) as begin:
            for _, before, batch in problem.share(
                "activations", problem.added(**{str(i): s for i, s in every})
            ):
                first, size = before, batch_size(batch)
                begin(batch)
                run(problem.model, batch, problem.loss)
                for _, statistic in every:
                    statistic.end(range(first, first + size))
        return {}

    problem.gathered("activations", own)
    for _, statistic in every:
        if problem.workers.size > 1:
            statistic.join(
                problem.workers.exchanged(statistic.parts)
            )  # one at a time: they may be large
        name = statistic.bound.site.name
        if not statistic.runs:
            hint = "Leave this site out with sites=."
            raise UnsupportedModel(
                name, "a module that runs when the model does", "one that no batch reached", hint
            )
    reached = in_main_memory(statistic.count.any() for _, statistic in every)
    for (_, statistic), some in zip(every, reached, strict=True):
        if not bool(some):
            name = statistic.bound.site.name
            raise InvalidValue(
                "batches", "with a token that is no padding", f"only padding at {name}"
            )
    return problem.examples
