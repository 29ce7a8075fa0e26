"""How far a cut and refitted model's outputs move from the whole model's, without cutting: what the
removed units would have written is predicted from the kept ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.choice._held_out import Folds
from headprune.core.errors import InvalidValue, UnsupportedModel, check_count
from headprune.model.contexts import not_reached, reading, watched, wide
from headprune.model.distributions import Distributions, distributions
from headprune.model.losses import shaped_losses
from headprune.model.own_loss import is_default, shift_of
from headprune.model.running import batch_size, device_of, some_examples, to_device
from headprune.model.sites import BoundSite
from headprune.model.transfers import sent
from headprune.recovery._blocks import blocks_around
from headprune.recovery._least_squares import LeastSquaresSums, Normal, solved
from headprune.recovery._playback import Playback
from headprune.scoring._activations import run
from headprune.scoring._base import ScoringProblem

#: Rows are divided into two parts: predictions are fitted on both, rises are measured on the
#: second. Rises of rows that were held out gave worse cuts (docs/decisions/046).
_N_PARTS = 2
_MEASURED_PART = 1
#: Divides outputs before they are compared.
TEMPERATURE = 2.0
#: Bytes that the outputs of layers before the changed site may take; as many for the outputs of
#: the whole model.
_ROOM = 2**30


@dataclass(frozen=True)
class Prediction:
    """What the removed units of a site would have written, predicted from the kept ones.

    Args:
        heads: The heads or neurons that are kept.
        kept: Columns of the kept units.
        removed: Columns of the others.
        weight: ``[kept, removed]``.
        bias: ``[removed]``.
    """

    heads: tuple[int, ...]
    kept: Tensor
    removed: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, bound: BoundSite, heads: Sequence[int], sums: Normal, ridge: float) -> Prediction:
        """Fit the prediction to a site's contexts; ``heads`` are kept."""
        site = bound.site
        # Columns of every head: [heads, value_dim].
        columns = torch.arange(len(site.heads) * site.value_dim).view(len(site.heads), -1)
        wanted = set(heads)
        is_kept = torch.tensor([head in wanted for head in site.heads])
        device = sums.xx.device
        kept = sent(columns[is_kept].flatten(), device)
        removed = sent(columns[~is_kept].flatten(), device)
        covariance = sums.xx[kept]  # [kept, width]
        # Least squares on centred contexts: [kept, removed].
        weight, _ = solved(covariance[:, kept], covariance[:, removed], ridge)
        bias = sums.x_mean[removed] - sums.x_mean[kept] @ weight
        return cls(tuple(heads), kept, removed, weight, bias)

    def filled(self, x: Tensor) -> Tensor:
        """Replace the removed columns of contexts ``[..., width]`` by their prediction."""
        kept = x.index_select(-1, self.kept)
        # [..., removed]
        predicted = kept @ self.weight.to(x) + self.bias.to(x)
        return x.index_copy(-1, self.removed, predicted)


def check_settings(where: str, examples: int, ridge: float, temperature: float) -> None:
    """Refuse settings of `Meter` that are out of range; ``where`` has them."""
    check_count(f"{where}.examples", examples)
    if ridge is None or not ridge > 0:
        raise InvalidValue(f"{where}.ridge", "a number > 0", ridge)
    if not 0 < temperature < math.inf:
        raise InvalidValue(f"{where}.temperature", "a number > 0", temperature)


def check_projections(bound: Iterable[BoundSite]) -> None:
    """Refuse an attention without an output projection: nothing makes up for its removed heads."""
    for b in bound:
        if not b.layout.gate:
            must = "one with an output projection, which makes up for removed heads"
            hint = "Name another scorer: taylor, for example."
            raise UnsupportedModel(b.site.name, must, "one without", hint)


def two_parts(problem: ScoringProblem) -> Folds:
    """The rows of a problem, divided into the parts that `Meter` takes."""
    return Folds(problem, _N_PARTS, least=0)


class Meter:
    """Measures, by example, how far a cut and refitted model's outputs are from the whole model's.

    A *change* maps numbers of cut sites to their predictions. ``start_from(change)`` makes one the
    reference; another change runs only the layers from the first site where the two differ. Where
    the whole model's logits would take more than a gigabyte, outputs are compared at fewer
    positions of each example, spread evenly.

    Args:
        problem: With model, sites and loss.
        folds: Its rows, see `two_parts`.
        examples: The most rows that rises are measured on.
        ridge: Of the predictions, as ``Lstsq.ridge``.
        temperature: See `divergence`.

    Raises:
        UnsupportedModel: a site with heads that no batch reaches.
    """

    def __init__(
        self,
        problem: ScoringProblem,
        folds: Folds,
        examples: int,
        ridge: float,
        temperature: float,
    ) -> None:
        self.problem = problem
        self.ridge, self.temperature = ridge, temperature
        self.bound = problem.bound
        #: By the number of a site, the sums of its contexts; a site without heads has none.
        self.sums = _context_sums(problem, folds)
        for number, b in enumerate(self.bound):
            if b.site.heads and number not in self.sums:
                raise not_reached(b.site.name)
        self._present: Mapping[int, Prediction] = {}
        self._own_loss = not is_default(problem.loss)
        device = device_of(problem.model)
        # A single row leaves the second part empty: it is fitted and measured.
        measured = _spread(folds.batches[_MEASURED_PART] or folds.batches[0], examples)
        self._batches = [to_device(batch, device) for batch in measured]
        self._examples = sum(map(batch_size, measured))
        self._whole_outputs = [self._outputs(place) for place in range(len(self._batches))]
        layers = [block.module for block in blocks_around(problem.model, problem.bound)]
        self._playback = Playback(layers, [b.gate for b in problem.bound], _ROOM)
        self._playback.learn(partial(self._outputs, 0))
        self._verify_playback()

    def _verify_playback(self) -> None:
        """Let all layers run from now on if kept outputs do not lead to the same answer."""
        last = len(self.bound) - 1
        for _ in range(2):  # the first pass keeps outputs, the second one uses them
            with self._playback.before("0", last):
                played = self._outputs(0)
        if not _same(self._whole_outputs[0], played):
            self._playback.forget()

    def prediction(self, number: int, heads: Sequence[int]) -> Prediction:
        """Predict a site that keeps these heads.

        Where the present change keeps the same, its own object: see ``_first_difference``.
        """
        present = self._present.get(number)
        if present is not None and present.heads == tuple(heads):
            return present
        return Prediction.of(self.bound[number], heads, self.sums[number], self.ridge)

    def start_from(self, predictions: Mapping[int, Prediction]) -> None:
        """Make this the present change, to which later ones are near."""
        self._present = dict(predictions)
        self._playback.restart()

    def rises(self, predictions: Mapping[int, Prediction]) -> Tensor:
        """Measure one change of the model.

        Args:
            predictions: By the number of a site, what its removed contexts are replaced by.

        Returns:
            ``[examples]``: the divergence (nats times ``temperature ** 2``), or the rise of your
            own loss.
        """
        watched_sites = [self.bound[number] for number in predictions]
        in_order = list(predictions.values())

        def see(place: int, x: Tensor) -> Tensor:
            return in_order[place].filled(x)

        first = self._first_difference(predictions)
        rises = []
        for place in range(len(self._batches)):
            with self._playback.before(str(place), first), watched(watched_sites, see):
                changed = self._outputs(place)
            of_batch = self._rises(self._whole_outputs[place], changed)
            rises.append(of_batch.to(wide(of_batch)))
        return torch.cat(rises)

    def _first_difference(self, predictions: Mapping[int, Prediction]) -> int:
        """The first site that differs from the present change; the last one where none does."""
        for number in range(len(self.bound)):
            # By identity: ``prediction`` returns the present object where a site keeps the same.
            if predictions.get(number) is not self._present.get(number):
                return number
        return len(self.bound) - 1

    def _outputs(self, place: int) -> Distributions | Tensor:
        """The model's distributions for a measured batch; with a loss of the user's, its losses."""
        problem, batch = self.problem, self._batches[place]
        if self._own_loss:
            return shaped_losses(problem.loss, problem.model, batch, place)
        where = f"batch {place} of the measured rows"
        found = distributions(problem.model, batch, where, shifted=shift_of(problem.loss))
        n_classes = found.logits.shape[-1]
        # One position of every measured example.
        position_bytes = self._examples * n_classes * found.logits.element_size()
        most_positions = _ROOM // max(1, position_bytes)
        return found.thinned(max(1, most_positions))

    def _rises(self, whole: Any, changed: Any) -> Tensor:
        """``[examples]``: how much more the changed model loses."""
        if self._own_loss:
            loss: Tensor = changed - whole
            return loss
        return divergence(whole, changed, self.temperature)


def _same(a: Any, b: Any) -> bool:
    """Whether two answers of ``Meter`` are exactly equal."""
    if isinstance(a, Distributions):
        a, b = a.logits, b.logits
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def divergence(whole: Distributions, changed: Distributions, temperature: float) -> Tensor:
    """Compute each example's mean divergence ``[examples]`` over its counted positions.

    KL of softmax or sigmoids from the whole model's; of a regression the squared difference.
    Outputs are divided by the temperature, and the divergence is multiplied by its square, which
    keeps the scale of small differences.
    """
    # [examples, positions, classes]
    p = whole.logits.to(wide(whole.logits)) / temperature
    q = changed.logits.to(wide(changed.logits)) / temperature
    if whole.kind == "single_label_classification":
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        # Padded ends of answers have logits of -inf, and 0 log 0 is 0. Other NaN shows an error.
        terms = (log_p.exp() * (log_p - log_q)).masked_fill(log_p == -torch.inf, 0.0)
        by_position = terms.sum(-1)
    elif whole.kind == "multi_label_classification":
        terms = nn.functional.binary_cross_entropy_with_logits(q, p.sigmoid(), reduction="none")
        least = nn.functional.binary_cross_entropy_with_logits(p, p.sigmoid(), reduction="none")
        by_position = (terms - least).mean(-1)
    else:
        by_position = (p - q).square().mean(-1)
    counted = sent(whole.counted, by_position.device)
    sums = by_position.masked_fill(~counted, 0.0).sum(1)
    return sums / counted.sum(1).clamp(min=1) * temperature**2


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
