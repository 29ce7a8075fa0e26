"""``learned_gates``: random gates on every head of a model, trained by the user's own loop or by
the Trainer.

The model draws its gates itself: for the length of the block its class is a subclass that does so
before each forward. So there is no callback to forget, schedules count the forwards, and the
backward pass of gradient checkpointing, which runs inner modules again, meets the gates of its
forward.
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

#: The attribute in which a model has its gates: in its ``__dict__`` alone, so that they are no
#: module of it.
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
    """Puts a trainable random gate on every prune unit of ``model``; nothing stays on the model
    afterwards.

    In training mode every forward of ``model`` draws gates and counts for their schedules
    (temperature, warm-up); in evaluation mode the gates are deterministic. Train them together with
    the weights, or with frozen ones::

        with hp.learned_gates(model, hp.gating.HardConcrete(keep=0.5, warmup=100)) as gates:
            of_gates = {"params": gates.parameters(), "lr": 0.1, "weight_decay": 0.0}  # decay would
            pull at them too optimizer = torch.optim.AdamW([{"params": model.parameters()},
            of_gates], lr=5e-5) for batch in batches:
                loss = model(**batch).loss + gates.penalty()
                loss.backward(); optimizer.step(); optimizer.zero_grad()
        plan = hp.select(gates.scores(), hp.Budget(keep_heads=gates.n_open))

    With the Trainer:
    ``Trainer(model, ..., compute_loss_func=gates.trainer_loss, optimizers=(optimizer, None))``,
    inside the block, with an optimizer like this one (the Trainer's own would not know the gates).
    It clears gradients by ``model.zero_grad()``, which clears those of the gates too; so compile
    before (see ``model``), not by its ``torch_compile=True``. Its checkpoints hold the model alone:
    ``gates.state_dict()`` is yours to save.

    A gate belongs to a unit: under policy ``group`` all query heads of a key/value head share one.
    Under ``balanced`` and ``free`` every query head has its own; ``select`` then balances the
    groups. Kept heads that were trained with gates between 0 and 1 have gates of 1 once the plan is
    applied.

    Args:
        model: What is called in training. Pass a compiled model itself (``torch.compile(model)``),
            not what is inside; compile before the block.
        distribution: ``hp.gating.HardConcrete(...)`` or ``hp.gating.SubsetTopk(...)``.
        sites: Where; default ``find_sites(model)``.
        seed: Of the draws, which have a generator of their own: forward number i draws the same on
            every device, whatever else is random.

    Yields:
        LearnedGates.

    Raises:
        InvalidValue: no distribution, a target that these heads cannot meet, or learned gates
            inside learned gates.
        UnsupportedModel: no head left, several processes, or what ``gated`` refuses.

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
    if not isinstance(distribution, GateDistribution):
        hint = "For example hp.gating.HardConcrete(keep=0.5)."
        got = repr(distribution) if isinstance(distribution, str) else type(distribution).__name__
        raise InvalidValue("learned_gates(distribution=)", "a gate distribution", got, hint)
    if _GATES in model.__dict__:
        raise InvalidValue(
            "learned_gates", "one block at a time on a model", "a model that has learned gates"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        hint = "Learn the gates in one process, on one device."
        must = "trained in one process (nothing would keep the gates of several alike)"
        raise UnsupportedModel("the model", must, "torch.distributed", hint)
    bound = [b for b in bind(unwrap(model), sites) if b.site.heads]
    if not bound:
        raise UnsupportedModel("the model", "one with a head left", "no head at any site")
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
    """The gates of a ``learned_gates`` block: what the optimizer takes, the penalty, and the
    result.

    A module for its ``parameters()`` and ``state_dict()`` (which has the counts of the schedules
    too, so that training goes on where it was); whether gates are drawn or fixed is decided by the
    MODEL's mode.
    """

    def __init__(
        self, model: nn.Module, bound: list[BoundSite], distribution: GateDistribution, seed: int
    ) -> None:
        super().__init__()
        self.distribution, self.seed = distribution, seed
        self.n_forwards = 0
        self.n_examples = 0
        self._about = (model, bound)  # in a tuple: the model is no part of this module
        self._puts: list[Callable[[Tensor], None]] = []
        self._asked = False
        self._reading: Reading | None = None
        self._given: dict[str, Any] | None = (
            None  # what the model was called with last, until a loss is asked
        )
        self._now: list[Tensor] = []  # the gates that are in place, until then
        like = next(bound[0].module.parameters())
        options: Any = {
            "device": device_of(bound[0].module),
            "dtype": torch.promote_types(like.dtype, torch.float32),
        }
        units = [len(unit) for b in bound for unit in b.site.units]
        self._sizes = torch.tensor(
            units, dtype=options["dtype"]
        )  # on the CPU, where heads are counted
        start = distribution.initial(len(units))
        self._start = start
        self.weights = nn.Parameter(sent(start.clone(), **options))
        extra = distribution.n_multipliers
        self.multipliers = nn.Parameter(torch.zeros(extra, **options)) if extra else None
        self.penalty()  # refuses a target that these heads cannot meet
        self._asked = False

    # ---------------------------------------------------------------- in training

    def penalty(self) -> Tensor:
        """What is added to the loss of the forward that was made last; 0 where the distribution
        needs none."""
        self._asked = True
        step = max(0, self.n_forwards - 1)
        return self.distribution.penalty(self.weights, self.multipliers, self._sizes_here(), step)

    def trainer_loss(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Any = None
    ) -> Tensor:
        """A ``compute_loss_func`` for the Transformers Trainer: the mean of the per-example losses,
        plus the penalty.

        The penalty is left out in evaluation mode. With gradient accumulation set
        ``trainer.loss_is_scaled_for_ga = False``, because this is a mean over the batch;
        ``num_items_in_batch`` plays no part. Labels of -100 do not count. A loss of your own:
        ``lambda outputs, labels, num_items_in_batch=None: own(...) + gates.penalty()``.

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
        """How the model reads labels, by a pass of its own; the gates of the pass before are in
        place again."""
        model, _ = self._about
        given, self._given, drawn = self._given or {}, None, self._now
        reading = reading_of(model, {**given, "labels": labels} if given else {})
        self._place(drawn)
        return reading

    # ---------------------------------------------------------------- the result

    def expected_open(self) -> float:
        """How many heads a draw leaves open on average."""
        with torch.no_grad():
            return float(self.distribution.expected_open(self.weights, self._sizes_here()))

    @property
    def n_open(self) -> int:
        """How many heads the gates keep;
        ``hp.select(gates.scores(), hp.Budget(keep_heads=gates.n_open))``."""
        with torch.no_grad():
            sizes = self._sizes_here()
            return int((self.distribution.hard(self.weights, sizes).cpu() * sizes).sum())

    def scores(self, batch: Any = None, loss: Loss | None = None) -> HeadScores:
        """The weights as importance, higher is more important, for the model as it is now.

        Args:
            batch: Measure on it what the units cost, for budgets of MACs, parameters or cache.
            loss: For ``batch``, where the model's arguments are not the batch.

        Raises:
            InvalidValue: the gates were not trained: no forward in training mode, a penalty that
                was never asked for, or weights as they began.
        """
        self._check_trained()
        model, bound = self._about
        flat = self.weights.detach().double().cpu()
        sizes = [len(b.site.units) for b in bound]
        inner = unwrap(model)
        notes = (
            *self.distribution.told(self.weights.detach(), self._sizes_here(), self.n_forwards),
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
            costs=None if batch is None else measure_costs(inner, bound, batch, loss),
            notes=notes,
        )

    def _check_trained(self) -> None:
        if not self.n_forwards:
            hint = (
                "Call the model that was given to learned_gates, in training mode (model.train())."
            )
            raise InvalidValue(
                "the learned gates", "trained before they are read", "no training forward", hint
            )
        if self.distribution.has_penalty and not self._asked:
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

    # ---------------------------------------------------------------- the block's own

    def opened(self, puts: list[Callable[[Tensor], None]]) -> None:
        """Takes what puts gates into place, one a site; none once the block is left."""
        self._puts = puts

    def draw(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Puts the gates of the next forward into place."""
        if getattr(model, "_is_replica", False):
            hint = "Use one GPU: CUDA_VISIBLE_DEVICES=0, for example."
            raise UnsupportedModel("the model", "run on one device", "torch.nn.DataParallel", hint)
        self._given = kwargs if self._reading is None and not args else None
        found = self._sampled(args, kwargs) if model.training else self.evaluated()
        self._place(self.by_site(found))

    def _place(self, gates: list[Tensor]) -> None:
        self._now = gates if self._reading is None else []
        for put, gate in zip(self._puts, gates, strict=True):
            put(gate)

    def evaluated(self) -> Tensor:
        """The deterministic gates, ``[units]``."""
        with torch.no_grad():
            return self.distribution.gates(self.weights, self._sizes_here())

    def _sampled(self, args: Any, kwargs: Any) -> Tensor:
        generator = generator_of(self.seed, self.n_forwards)
        noise = self.distribution.noise(len(self.weights), generator)
        noise = sent(noise, self.weights.device, self.weights.dtype)
        drawn = self.distribution.sample(self.weights, noise, self._sizes_here(), self.n_forwards)
        self.n_forwards += 1
        self.n_examples += next((t.shape[0] for t in tensors((args, kwargs)) if t.ndim), 0)
        return drawn

    def by_site(self, gates: Tensor) -> list[Tensor]:
        """Gates ``[units]`` as one tensor ``[heads]`` a site."""
        _, bound = self._about
        parts = gates.split([len(b.site.units) for b in bound])
        return [
            part[sent(unit_of_heads(b), part.device)] for b, part in zip(bound, parts, strict=True)
        ]

    def _sizes_here(self) -> Tensor:
        return self._sizes.to(self.weights.dtype)

    def get_extra_state(self) -> dict[str, int]:
        return {"n_forwards": self.n_forwards, "n_examples": self.n_examples}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n_forwards, self.n_examples = state["n_forwards"], state["n_examples"]


def generator_of(seed: int, number: int) -> torch.Generator:
    """A generator for forward ``number``; torch's on the CPU reads 32 bits, in which different
    seeds lie far apart."""
    return torch.Generator().manual_seed((seed * 0x9E3779B1 + number) % 2**32)


def unit_of_heads(bound: BoundSite) -> Tensor:
    """For every present head of a site, which of its units it belongs to, ``[heads]``."""
    of = {head: index for index, unit in enumerate(bound.site.units) for head in unit}
    return torch.tensor([of[head] for head in bound.site.heads], dtype=torch.long)


class _Drawn(nn.Module):
    """Mixed into a model's class: draws the gates of each forward before it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__[_GATES].draw(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def zero_grad(
        self, set_to_none: bool = True
    ) -> None:  # the Trainer clears its model's gradients, no optimizer's
        super().zero_grad(set_to_none)
        self.__dict__[_GATES].zero_grad(set_to_none)

    def __reduce_ex__(
        self, protocol: Any
    ) -> Any:  # a copy made inside the block has no gates, like those of `gated`
        return remade(
            ungated_class(type(self)), {k: v for k, v in self.__dict__.items() if k != _GATES}
        )


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
