"""``learned_gates``: random gates on every head, trained by the user's own loop or by the Trainer.

Inside the block the model's class is a subclass that draws the gates before each forward. So there
is no callback to forget, and schedules count the forwards. The backward pass of gradient
checkpointing, which runs inner modules again, meets the gates of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.core.heads import AttentionSite
from headprune.core.mixin import remade
from headprune.core.scores import HeadScores
from headprune.gating.context import gated_class, installed, ungated_class
from headprune.gating.stochastic import GateDistribution
from headprune.model.costs import measure_costs
from headprune.model.fingerprint import fingerprint
from headprune.model.losses import Loss, losses_of
from headprune.model.own_loss import Reading, reading_of
from headprune.model.running import device_of, tensors
from headprune.model.sites import BoundSite, bind, unwrap
from headprune.model.transfers import sent

# The attribute of a model that holds its gates. It is in ``__dict__`` only, so that the gates are
# no submodule.
_GATES = "_headprune_gates"
_OWN = "pass a compute_loss_func of your own that adds gates.penalty()."


@contextmanager
def learned_gates(
    model: nn.Module,
    distribution: GateDistribution,
    sites: Iterable[AttentionSite] | None = None,
    *,
    seed: int = 0,
) -> Iterator[LearnedGates]:
    """Put a trainable random gate on every prune unit of ``model`` inside a ``with`` block.

    In training mode every forward draws gates; in evaluation mode they are deterministic. Nothing
    stays on the model afterwards. Train them with or without the weights::

        with hp.learned_gates(model, hp.gating.HardConcrete(keep=0.5, warmup=100)) as gates:
            of_gates = {"params": gates.parameters(), "lr": 0.1, "weight_decay": 0.0}
            optimizer = torch.optim.AdamW([{"params": model.parameters()}, of_gates], lr=5e-5)
            for batch in batches:
                loss = model(**batch).loss + gates.penalty()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        plan = hp.select(gates.scores(), hp.Budget(keep_heads=gates.n_open))

    For the Trainer see ``LearnedGates.trainer_loss``.

    Args:
        model: The model called in training. Compile it before the block and pass the result.
        distribution: ``hp.gating.HardConcrete(...)`` or ``hp.gating.SubsetTopk(...)``.
        sites: Where; default ``find_sites(model)``.
        seed: Of the draws, which are the same on every device.

    Yields:
        LearnedGates.

    Raises:
        InvalidValue: no distribution, a target that these heads cannot meet, or nested blocks.
        UnsupportedModel: no head, several processes, or refused by ``gated``.

    >>> import torch
    >>> from headprune import MultiHeadAttention
    >>> from headprune.gating import SubsetTopk
    >>> x, model = torch.randn(4, 5, 8), MultiHeadAttention(8, 4)
    >>> with learned_gates(model, SubsetTopk(keep=2, steps=10)) as gates:
    ...     optimizer = torch.optim.Adam(gates.parameters(), lr=0.1)
    ...     for _ in range(10):
    ...         loss = model(x).square().mean() + gates.penalty()
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         _ = optimizer.step()
    >>> gates.n_open, gates.scores().n_examples
    (2, 40)
    """
    # A gate belongs to a unit: under policy ``group`` all query heads of a key/value head share
    # one. Under ``balanced`` and ``free`` every query head has its own, and ``select`` then
    # balances the groups.
    if not isinstance(distribution, GateDistribution):
        hint = "For example hp.gating.HardConcrete(keep=0.5)."
        got = type(distribution).__name__
        if isinstance(distribution, str):
            got = repr(distribution)
        raise InvalidValue("learned_gates(distribution=)", "a gate distribution", got, hint)
    if _GATES in model.__dict__:
        raise InvalidValue(
            "learned_gates", "one block at a time on a model", "a model that has learned gates"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        hint = "Learn the gates in one process, on one device."
        must = "trained in one process (nothing would keep the gates of several equal)"
        raise UnsupportedModel("the model", must, "torch.distributed", hint)
    bound = [b for b in bind(unwrap(model), sites) if b.site.heads]
    if not bound:
        raise UnsupportedModel("the model", "one with a head", "no head at any site")
    gates = LearnedGates(model, bound, distribution, seed)
    first = gates.by_site(gates.evaluated())
    with (
        installed(unwrap(model), list(zip(bound, first, strict=True))) as puts,
        _drawing(model, gates),
    ):
        gates.opened(puts)
        try:
            yield gates
        finally:
            gates.opened([])


class LearnedGates(nn.Module):
    """The gates of a ``learned_gates`` block: their parameters, penalty and result.

    It is a module for its ``parameters()`` and ``state_dict()``. The state has the counts of the
    schedules too, so that training can resume. The MODEL's mode, not this module's, decides whether
    gates are drawn or fixed.
    """

    def __init__(
        self, model: nn.Module, bound: list[BoundSite], distribution: GateDistribution, seed: int
    ) -> None:
        super().__init__()
        self.distribution = distribution
        self.seed = seed
        self.n_forwards = 0
        self.n_examples = 0
        # In a tuple, so that the model is no submodule.
        self._about = (model, bound)
        self._puts: list[Callable[[Tensor], None]] = []
        self._penalty_used = False

        # Until `trainer_loss` has read how the model uses labels: the arguments of the model's last
        # call, and the gates in place.
        self._reading: Reading | None = None
        self._given: dict[str, Any] | None = None
        self._now: list[Tensor] = []

        like = next(bound[0].module.parameters())
        options: Any = {
            "device": device_of(bound[0].module),
            "dtype": torch.promote_types(like.dtype, torch.float32),
        }
        # [units], heads per unit; on the CPU, where heads are counted
        units = [len(unit) for b in bound for unit in b.site.units]
        self._sizes = torch.tensor(units, dtype=options["dtype"])
        self._start = distribution.initial(len(units))
        self.weights = nn.Parameter(sent(self._start.clone(), **options))
        self.multipliers: nn.Parameter | None = None
        if distribution.n_multipliers:
            self.multipliers = nn.Parameter(torch.zeros(distribution.n_multipliers, **options))

        # Refuses a target that these heads cannot meet.
        self.penalty()
        self._penalty_used = False

    # ---------------------------------------------------------------- in training

    def penalty(self) -> Tensor:
        """Return the term to add to the loss of the last forward; 0 if there is no penalty."""
        self._penalty_used = True
        step = max(0, self.n_forwards - 1)
        return self.distribution.penalty(self.weights, self.multipliers, self._sizes_here(), step)

    def trainer_loss(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute the mean loss plus the penalty: a ``compute_loss_func`` for the Trainer.

        Inside the block:
        ``Trainer(model, ..., compute_loss_func=gates.trainer_loss, optimizers=(optimizer, None))``,
        with an optimizer that has ``gates.parameters()``, because the Trainer's own would not. The
        Trainer clears gradients by ``model.zero_grad()``, which clears those of the gates too. So
        compile before the block, not by ``torch_compile=True``. The Trainer's checkpoints hold the
        model alone; save ``gates.state_dict()`` yourself.

        The penalty is left out in evaluation mode. With gradient accumulation set
        ``trainer.loss_is_scaled_for_ga = False``, because this is a mean over the batch. For
        another loss: ``lambda outputs, labels, num_items_in_batch=None: own(...) +
        gates.penalty()``.

        Args:
            outputs: The model's output.
            labels: The batch's labels; -100 does not count.
            num_items_in_batch: Ignored.

        Raises:
            InvalidValue: no labels, or on the first batch another loss than the model's own.
        """
        model, _ = self._about
        if labels is None:
            hint = f"Add labels to the examples, or {_OWN}"
            raise InvalidValue(
                "LearnedGates.trainer_loss(labels=)", "the labels of the batch", None, hint
            )
        if self._reading is None:
            self._reading = self._read(labels)
        refused = self._reading.refusal
        if refused is not None:
            raise InvalidValue(refused.where, refused.must, refused.got, _OWN.capitalize())
        loss = losses_of(model, {"labels": labels}, outputs, self._reading.shifted).mean()
        return loss + self.penalty().to(loss) if model.training else loss

    def _read(self, labels: Tensor) -> Reading:
        """Find out by one more pass how the model reads labels, then restore the drawn gates."""
        model, _ = self._about
        drawn = self._now
        batch: dict[str, Any] = {}
        if self._given:
            batch = {**self._given, "labels": labels}
        self._given = None
        reading = reading_of(model, batch)
        self._place(drawn)
        return reading

    # ---------------------------------------------------------------- the result

    def expected_open(self) -> float:
        """Return the expected number of open heads of a draw."""
        with torch.no_grad():
            return float(self.distribution.expected_open(self.weights, self._sizes_here()))

    @property
    def n_open(self) -> int:
        """Number of heads that the gates keep, for ``hp.Budget(keep_heads=gates.n_open)``."""
        with torch.no_grad():
            sizes = self._sizes_here()
            return int((self.distribution.hard(self.weights, sizes).cpu() * sizes).sum())

    def scores(self, batch: Any = None, loss: Loss | None = None) -> HeadScores:
        """Return the weights as scores; a higher weight is more important.

        Kept heads may have trained with gates below 1; the pruned model has gates of 1.

        Args:
            batch: Measures the costs of units, for budgets of MACs, parameters or cache.
            loss: For ``batch``, where the model's arguments are not the batch.

        Raises:
            InvalidValue: the gates were not trained: no forward in training mode, ``penalty`` never
                called, or weights still at their initial values.
        """
        self._check_trained()
        model, bound = self._about
        flat = self.weights.detach().double().cpu()  # [units]
        sizes = [len(b.site.units) for b in bound]  # units per site
        inner = unwrap(model)
        costs = None
        if batch is not None:
            costs = measure_costs(inner, bound, batch, loss)
        notes = (
            *self.distribution.notes(self.weights.detach(), self._sizes_here(), self.n_forwards),
            (
                f"No standard error: gates trained for {self.n_forwards} forwards, examples counted"
                " as often as seen."
            ),
        )
        return HeadScores(
            sites=tuple(b.site for b in bound),
            values=tuple(tuple(row.tolist()) for row in flat.split(sizes)),
            standard_errors=None,
            scorer=self.distribution.name,
            settings=self.distribution.settings,
            n_examples=self.n_examples,
            model=fingerprint(inner, [b.site for b in bound]),
            seed=self.seed,
            costs=costs,
            notes=notes,
            bundling="mean",
        )

    def _check_trained(self) -> None:
        if not self.n_forwards:
            hint = (
                "Call the model that was given to learned_gates, in training mode (model.train())."
            )
            raise InvalidValue(
                "the learned gates", "trained before they are read", "no training forward", hint
            )
        if self.distribution.has_penalty and not self._penalty_used:
            hint = "Add gates.penalty() to every loss."
            raise InvalidValue(
                "the learned gates",
                "trained with their penalty",
                "gates.penalty() never called",
                hint,
            )
        if torch.equal(self.weights.detach().cpu(), self._start.to(self.weights.dtype)):
            hint = "Give gates.parameters() to the optimizer."
            raise InvalidValue(
                "the learned gates",
                "trained",
                f"as at first, after {self.n_forwards} forwards",
                hint,
            )

    # ---------------------------------------------------------------- for the block

    def opened(self, puts: list[Callable[[Tensor], None]]) -> None:
        """Set the functions that put gates into place, one per site; none after the block."""
        self._puts = puts

    def draw(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Put the gates of the next forward into place."""
        if getattr(model, "_is_replica", False):
            hint = "Use one GPU: CUDA_VISIBLE_DEVICES=0, for example."
            raise UnsupportedModel("the model", "run on one device", "torch.nn.DataParallel", hint)
        self._given = None
        if self._reading is None and not args:
            self._given = kwargs
        gates = self._sampled(args, kwargs) if model.training else self.evaluated()
        self._place(self.by_site(gates))

    def _place(self, gates: list[Tensor]) -> None:
        # Needed until the reading is known; later they would only hold memory.
        self._now = gates if self._reading is None else []
        for put, gate in zip(self._puts, gates, strict=True):
            put(gate)

    def evaluated(self) -> Tensor:
        """Return the deterministic gates, ``[units]``."""
        with torch.no_grad():
            return self.distribution.gates(self.weights, self._sizes_here())

    def _sampled(self, args: Any, kwargs: Any) -> Tensor:
        """Draw gates ``[units]`` and count the forward."""
        # A generator per forward: the draws do not depend on other random numbers.
        generator = generator_of(self.seed, self.n_forwards)
        noise = self.distribution.noise(len(self.weights), generator)
        noise = sent(noise, self.weights.device, self.weights.dtype)
        drawn = self.distribution.sample(self.weights, noise, self._sizes_here(), self.n_forwards)
        self.n_forwards += 1
        # The first axis of the first tensor is the batch.
        self.n_examples += next((t.shape[0] for t in tensors((args, kwargs)) if t.ndim), 0)
        return drawn

    def by_site(self, gates: Tensor) -> list[Tensor]:
        """Spread gates ``[units]`` to one tensor ``[heads]`` per site."""
        _, bound = self._about
        parts = gates.split([len(b.site.units) for b in bound])
        of_heads = []
        for b, part in zip(bound, parts, strict=True):
            index = sent(unit_of_heads(b), part.device)  # [heads]
            of_heads.append(part[index])
        return of_heads

    def _sizes_here(self) -> Tensor:
        # The user may have cast this module to another dtype.
        return self._sizes.to(self.weights.dtype)

    def get_extra_state(self) -> dict[str, int]:
        return {"n_forwards": self.n_forwards, "n_examples": self.n_examples}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n_forwards, self.n_examples = state["n_forwards"], state["n_examples"]


def generator_of(seed: int, number: int) -> torch.Generator:
    """Make the generator of forward ``number``."""
    # Torch's CPU generator reads 32 bits; the odd factor spreads seeds far apart in them.
    return torch.Generator().manual_seed((seed * 0x9E3779B1 + number) % 2**32)


def unit_of_heads(bound: BoundSite) -> Tensor:
    """Return the index of the unit of every present head, ``[heads]``."""
    unit_of: dict[int, int] = {}
    for index, unit in enumerate(bound.site.units):
        for head in unit:
            unit_of[head] = index
    return torch.tensor([unit_of[head] for head in bound.site.heads], dtype=torch.long)


class _Drawn(nn.Module):
    """Mixed into a model's class: draws the gates of each forward before it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__[_GATES].draw(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        # The Trainer clears the gradients of its model, not of an optimizer.
        super().zero_grad(set_to_none)
        self.__dict__[_GATES].zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy made inside the block has no gates, as with `gated`.
        state = {k: v for k, v in self.__dict__.items() if k != _GATES}
        return remade(ungated_class(type(self)), state)


@contextmanager
def _drawing(model: nn.Module, gates: LearnedGates) -> Iterator[None]:
    before = type(model)
    model.__class__ = gated_class(_Drawn, before)  # type: ignore[arg-type]
    model.__dict__[_GATES] = gates
    try:
        yield
    finally:
        del model.__dict__[_GATES]
        model.__class__ = before
