"""Price every level of every site: the rise of the loss when that site alone keeps fewer units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from headprune import scoring
from headprune.choice._held_out import Folds
from headprune.choice._scores import as_scores
from headprune.core.bars import bar
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.errors import InvalidValue
from headprune.core.heads import AttentionSite
from headprune.core.ladders import SiteLadder
from headprune.model.contexts import reading, watched, wide
from headprune.model.distributions import Distributions, distributions
from headprune.model.losses import shaped_losses
from headprune.model.own_loss import is_default, shift_of
from headprune.model.running import batch_size, device_of, some_examples, to_device
from headprune.model.sites import BoundSite
from headprune.model.transfers import in_main_memory, sent
from headprune.recovery._blocks import blocks_around
from headprune.recovery._least_squares import LeastSquaresSums, Normal, solved
from headprune.recovery._playback import Playback
from headprune.scoring._activations import run
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from headprune.selection._units import bundled, in_rank

#: Rows are dealt to two parts; the rises are measured on the second one.
_PARTS, _PRICED = 2, 1
#: Bytes that the outputs of layers before the priced site may take.
_ROOM = 2**30


@dataclass(frozen=True)
class Ladder(Scorer):
    """The rise of ``KL(whole model || model)`` with one site alone at each level, refitted.

    A level is a number of heads (each one) or of neurons (about twelve widths) that a site keeps,
    the best ones by another scorer. What the removed units would have written is predicted from the
    kept ones by least squares, which is what recovery by ``lstsq`` does to the output projection.
    The rise is measured by a pass from that site on. With your own loss, it is the rise of that.
    Values are the other scorer's; ``scores.ladders`` holds the rises, which ``knapsack`` weighs
    against what each level costs, whatever the budget counts.

    Source: ZipLM (Kurtic et al. 2023, section 3.2) prices levels by a layer's own error.

    When: heads and neurons share one budget, above all ``Budget(speedup=)``.
    Cost: the other scorer's, a pass, and a pass from each site on for each of its levels, over
    ``examples`` rows. Memory: ``width ** 2`` numbers per site.

    Args:
        order: The registered scorer that ranks the units of a site.
        order_settings: Its settings.
        examples: The most rows that rises are measured on.
        ridge: Of the prediction, as ``Lstsq.ridge``.
    """

    order: str = "surgeon"
    order_settings: Mapping[str, Any] = EMPTY
    examples: int = 256
    ridge: float = 0.3

    def __post_init__(self) -> None:
        object.__setattr__(self, "order_settings", FrozenDict(self.order_settings))
        if self.order in ("auto", "ladder"):
            raise InvalidValue("Ladder.order", "a scorer of single units", repr(self.order))
        if type(self.examples) is not int or self.examples < 1:
            raise InvalidValue("Ladder.examples", "a count >= 1", repr(self.examples))
        if not self.ridge > 0:
            raise InvalidValue("Ladder.ridge", "a share > 0", self.ridge)
        self._ranks()  # refuses unknown names and settings

    def _ranks(self) -> Scorer:
        """The scorer that ranks the units."""
        scorer: Scorer = scoring.registry.get(self.order)(**self.order_settings)
        return scorer

    @property
    def by_example(self) -> bool:
        return False

    def estimate(self, problem: ScoringProblem) -> Estimate:
        """Rank the units of every site, and measure the rise at each of its levels.

        Raises:
            InvalidValue: outputs that are no logits, or what the other scorer refuses.
        """
        problem.keep()
        folds = Folds(problem, _PARTS, least=0)
        # 1. Rank the units.
        ranks = self._ranks()
        problem.scorers = (*problem.scorers, ranks)
        estimate = ranks.estimate(problem)
        sites = _with_levels(problem, estimate)

        # 2. Measure the rises; processes share the sites.
        with torch.no_grad():
            sums = _context_sums(problem, folds)
            # A single row has to do for both.
            priced = folds.batches[_PRICED] or folds.batches[0]
            meter = _Meter(problem, _spread(priced, self.examples))
            own = range(problem.workers.rank, len(sites), problem.workers.size)

            def of_own_sites() -> dict[str, Tensor]:
                rises = {}
                for number in bar(own, "prices of levels", problem.progress):
                    levels = _levels(sites[number])
                    rises[str(number)] = self._rises(meter, number, levels, sums.get(number))
                return rises

            measured: dict[str, Tensor] = {}
            for part in problem.gathered("prices of levels", of_own_sites):
                measured.update(part)
        ladders = []
        for number, site in enumerate(sites):
            kept = tuple(map(len, _levels(site)))
            rises = measured[str(number)].tolist()
            ladders.append(SiteLadder(site.name, kept, _monotone(rises)))
        return replace(estimate, ladders=tuple(ladders))

    def _rises(
        self, meter: _Meter, number: int, levels: Sequence[tuple[int, ...]], sums: Normal | None
    ) -> Tensor:
        """``[levels]``: the mean rise at each level of one site, from the fewest units to all.

        Args:
            meter: Measures.
            number: The site's number.
            levels: Heads or neurons kept at each level, best first.
            sums: Of the site's contexts; None for a site without heads.
        """
        if sums is None:
            return torch.zeros(len(levels), dtype=torch.float64)
        rises = []
        for heads in levels[:-1]:
            prediction = Prediction.of(meter.bound[number], heads, sums, self.ridge)
            rises.append(meter.rise(number, prediction))
        # All in one copy; with every unit nothing rises.
        return torch.tensor([*map(float, in_main_memory(rises)), 0.0], dtype=torch.float64)


@dataclass(frozen=True)
class Prediction:
    """What the removed units of a site would have written, predicted from the kept ones.

    Args:
        kept: Columns of the kept units.
        removed: Columns of the others.
        weight: ``[kept, removed]``.
        bias: ``[removed]``.
    """

    kept: Tensor
    removed: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, bound: BoundSite, heads: Sequence[int], sums: Normal, ridge: float) -> Prediction:
        """Fit the prediction to a site's contexts; ``heads`` are kept."""
        site = bound.site
        columns = torch.arange(len(site.heads) * site.value_dim).view(len(site.heads), -1)
        wanted = set(heads)
        is_kept = torch.tensor([head in wanted for head in site.heads])
        device = sums.xx.device
        kept = sent(columns[is_kept].flatten(), device)
        removed = sent(columns[~is_kept].flatten(), device)
        covariance = sums.xx[kept]  # [kept, width]
        weight, _ = solved(covariance[:, kept], covariance[:, removed], ridge)
        bias = sums.x_mean[removed] - sums.x_mean[kept] @ weight
        return cls(kept, removed, weight, bias)

    def filled(self, x: Tensor) -> Tensor:
        """Replace the removed columns of contexts ``[..., width]`` by their prediction."""
        kept = x.index_select(-1, self.kept)
        predicted = kept @ self.weight.to(x) + self.bias.to(x)
        return x.index_copy(-1, self.removed, predicted)


class _Meter:
    """Measures how far a change of one site moves the model's outputs.

    Layers before the changed one are not run again: their outputs are kept.
    """

    def __init__(self, problem: ScoringProblem, batches: Sequence[Any]) -> None:
        self.problem = problem
        self.bound = problem.bound
        self._own_loss = not is_default(problem.loss)
        device = device_of(problem.model)
        self._batches = [to_device(batch, device) for batch in batches]
        self._whole = [self._measured(batch) for batch in self._batches]
        layers = [block.module for block in blocks_around(problem.model, problem.bound)]
        self._playback = Playback(layers, [b.gate for b in problem.bound], _ROOM)
        self._playback.learn(partial(self._measured, self._batches[0]))
        self._verify_playback()

    def _verify_playback(self) -> None:
        """Let all layers run from now on if kept outputs do not lead to the same answer."""
        last = len(self.bound) - 1
        for _ in range(2):  # the first pass keeps outputs, the second one uses them
            with self._playback.before("0", last):
                played = self._measured(self._batches[0])
        if not _same(self._whole[0], played):
            self._playback.forget()

    def rise(self, number: int, prediction: Prediction) -> Tensor:
        """The mean rise ``[]`` over the examples with one site's contexts replaced."""

        def see(_: int, x: Tensor) -> Tensor:
            return prediction.filled(x)

        totals: list[Tensor] = []
        examples = 0
        for place, batch in enumerate(self._batches):
            with self._playback.before(str(place), number), watched([self.bound[number]], see):
                changed = self._measured(batch)
            rises = self._rises(self._whole[place], changed)
            totals.append(rises.to(wide(rises)).sum())
            examples += len(rises)
        return torch.stack(totals).sum() / examples

    def _measured(self, batch: Any) -> Distributions | Tensor:
        """The model's distributions for a batch; with a loss of the user's, its losses."""
        problem = self.problem
        if self._own_loss:
            return shaped_losses(problem.loss, problem.model, batch, 0)
        return distributions(problem.model, batch, "a batch", shifted=shift_of(problem.loss))

    def _rises(self, whole: Any, changed: Any) -> Tensor:
        """``[examples]``: how much more the changed model loses."""
        if self._own_loss:
            loss: Tensor = changed - whole
            return loss
        return divergence(whole, changed)


def _same(a: Any, b: Any) -> bool:
    """Whether two answers of ``_Meter`` are exactly equal."""
    if isinstance(a, Distributions):
        a, b = a.logits, b.logits
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def divergence(whole: Distributions, changed: Distributions) -> Tensor:
    """Compute each example's mean divergence ``[examples]`` over its counted positions.

    KL of softmax or sigmoids from the whole model's; of a regression the squared difference.
    """
    # [examples, positions, classes]
    p, q = whole.logits.to(wide(whole.logits)), changed.logits.to(wide(changed.logits))
    if whole.kind == "single_label_classification":
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        # Padded ends of answers have logits of -inf, and 0 log 0 is 0.
        terms = (log_p.exp() * (log_p - log_q)).nan_to_num(nan=0.0)
        by_position = terms.sum(-1)
    elif whole.kind == "multi_label_classification":
        terms = nn.functional.binary_cross_entropy_with_logits(q, p.sigmoid(), reduction="none")
        least = nn.functional.binary_cross_entropy_with_logits(p, p.sigmoid(), reduction="none")
        by_position = (terms - least).mean(-1)
    else:
        by_position = (p - q).square().mean(-1)
    counted = sent(whole.counted, by_position.device)
    sums = by_position.masked_fill(~counted, 0.0).sum(1)
    return sums / counted.sum(1).clamp(min=1)


def _with_levels(problem: ScoringProblem, estimate: Estimate) -> tuple[AttentionSite, ...]:
    """The sites with the units that a selector decides on: heads, bundles, levels of neurons."""
    ranked = bundled(as_scores(problem, "", estimate))
    sites = []
    for site, row in zip(ranked.sites, ranked.values, strict=True):
        units = tuple(site.units[unit] for unit in in_rank(site, row))
        sites.append(replace(site, bundles=units))
    return tuple(sites)


def _levels(site: AttentionSite) -> list[tuple[int, ...]]:
    """The heads kept at each level, from none to all."""
    return list(accumulate(site.units, initial=()))


def _context_sums(problem: ScoringProblem, folds: Folds) -> dict[int, Normal]:
    """Means and centred products of every site's contexts, over all rows; by site's number."""
    sums: dict[int, LeastSquaresSums] = {}

    def take(number: int, x: Tensor, counted: Tensor | None) -> None:
        tokens = x.flatten(0, -2)
        if number not in sums:
            sums[number] = LeastSquaresSums(wide(x))
        mask = None if counted is None else counted.to(x.device).flatten()
        sums[number].add(tokens, tokens[:, :0], mask)

    with reading(problem.model, problem.bound, take) as begin:
        for batches in folds.batches:
            for batch in batches:
                on_device = to_device(batch, device_of(problem.model))
                begin(on_device)
                run(problem.model, on_device, problem.loss)
    return {number: total.done() for number, total in sums.items()}


def _spread(batches: Sequence[Any], most: int) -> list[Any]:
    """Take at most so many examples, spread evenly over the batches."""
    total = sum(map(batch_size, batches))
    if total <= most:
        return list(batches)
    chosen = torch.linspace(0, total - 1, most).round().long()
    taken = []
    first = 0
    for batch in batches:
        size = batch_size(batch)
        places = chosen[(chosen >= first) & (chosen < first + size)] - first
        if len(places):
            taken.append(some_examples(batch, places))
        first += size
    return taken


def _monotone(rises: Sequence[float]) -> tuple[float, ...]:
    """Rises that never fall when fewer units are kept: noise must not pay for a removal."""
    highest = list(accumulate(reversed(rises), max))
    return tuple(reversed(highest))
