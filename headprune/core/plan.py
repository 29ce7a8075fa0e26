"""Budget: how much of a model may be kept. PruningPlan: which heads are kept, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headprune.core.codec import EMPTY, LATER, FrozenDict, Value
from headprune.core.coverage import coverage_notes
from headprune.core.display import Row, html_grid, rich_grid, text_grid
from headprune.core.errors import InvalidValue, PlanMismatch, check_one_of
from headprune.core.grids import mask_rows
from headprune.core.heads import POLICIES, AttentionSite, HeadMask, Policy, places
from headprune.core.scores import ModelFingerprint

#: The kinds of budget, and what each one counts.
_COUNTED = {
    "keep_heads": "heads",
    "keep_params": "parameters",
    "keep_macs": "MACs",
    "keep_kv": "KV cache",
    "speedup": "",
}


def allowance(amount: int | float, whole: int) -> int:
    """The part of ``whole`` that ``amount`` allows, rounded down.

    A ratio that a float cannot hold exactly is forgiven its rounding error.

    >>> allowance(0.29, 100), allowance(0.5, 7), allowance(4, 7)
    (29, 3, 4)
    """
    if isinstance(amount, int):
        return amount
    # Relative and absolute slack: 0.29 * 100 is 28.999999999999996.
    return math.floor(amount * whole * (1 + 1e-12) + 1e-9)


def share_hint(amount: float) -> str:
    """Say how to write a number that was probably meant as a percentage; else nothing.

    >>> share_hint(50.0), share_hint(144)
    ('For 50 % of the heads, write 0.5.', '')
    """
    return f"For {amount:g} % of the heads, write {amount / 100:g}." if 1 < amount < 100 else ""


def read_keep(text: str, where: str, whole: bool = False) -> int | float:
    """Read a count of heads, or a fraction of them, from a command line.

    Args:
        text: What was typed.
        where: The option.
        whole: Allow 1.0, which keeps all heads but those that are named elsewhere.

    Raises:
        InvalidValue: anything else.

    >>> read_keep("36", "--keep"), read_keep("0.5", "--keep")
    (36, 0.5)
    """
    try:
        amount = int(text) if text.isdecimal() else float(text.rstrip("% "))
    except ValueError:
        amount = math.nan
    if isinstance(amount, int) and amount >= 1:
        return amount
    percent = text.endswith("%")
    is_fraction = 0 < amount < 1 or (whole and amount == 1)
    if is_fraction and not percent:
        return amount
    must = "a count of heads, or a fraction of them above 0 and below 1.0"
    raise InvalidValue(where, must, repr(text), _keep_hint(amount, percent))


def _keep_hint(amount: float, percent: bool) -> str:
    """What to write instead of an amount that is neither a count nor a fraction."""
    if amount == 1 and percent:
        return "For 1 % of the heads, write 0.01."
    if amount == 1:
        return "All heads would be kept. For one head write 1."
    return share_hint(amount) or "For example 0.5, or 36."


@dataclass(frozen=True)
class Budget(Value):
    """How much may be kept; exactly one of the five kinds is given.

    Args:
        keep_heads: A count of heads (int), or a fraction of the heads that are present (float).
        keep_params: Fraction of the whole model's parameters.
        keep_macs: Fraction of the whole model's multiply-adds for one example of ``length`` tokens.
        keep_kv: Fraction of the KV cache's bytes per token, of self-attention; sliding windows
            count like full layers.
        speedup: How many times as fast the pruned model must be, above 1, by a `LatencyTable`
            measured before.
        length: Tokens per example, for ``keep_macs``; by default the length of the scored examples.
        tensor_parallel: GPUs that share each layer when the model is served: at every site the kept
            key/value heads, and neurons, divide by it.

    >>> print(Budget(keep_heads=0.5))
    keep 50 % of the heads
    >>> Budget(keep_macs=0.6, length=128).amount
    0.6
    >>> print(Budget(speedup=1.3))
    at least 1.3 times as fast
    """

    # Exactly one of these five is given.
    keep_heads: int | float | None = None
    keep_params: float | None = None
    keep_macs: float | None = None
    keep_kv: float | None = None
    speedup: float | None = None
    length: int | None = None
    tensor_parallel: int | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        given = [kind for kind in _COUNTED if getattr(self, kind) is not None]
        if len(given) != 1:
            must = f"given by exactly one of {', '.join(_COUNTED)}"
            raise InvalidValue("Budget", must, ", ".join(given) or "none")
        self._check_amount()
        # A bare 1 is a fraction everywhere but in keep_heads.
        if self.kind != "keep_heads" or isinstance(self.amount, float):
            object.__setattr__(self, self.kind, float(self.amount))
        self._check_length()
        gpus = self.tensor_parallel
        if gpus is not None and (type(gpus) is not int or gpus < 1):
            raise InvalidValue("Budget.tensor_parallel", "a count of GPUs >= 1", repr(gpus))

    def _check_amount(self) -> None:
        amount = self.amount
        # bool is an int, but True is no count.
        numeric = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if self.kind == "speedup":
            if not numeric or not 1 < amount < math.inf:
                hint = "1.3 is 30 % more calls per second."
                raise InvalidValue("Budget.speedup", "a number above 1", repr(amount), hint)
            return
        must, hint = "a fraction above 0 and up to 1.0", ""
        valid = numeric and 0 < amount <= 1
        if self.kind == "keep_heads":
            must = f"a count >= 1 or {must}"
            if isinstance(amount, int):
                valid = numeric and amount >= 1
            elif numeric:
                hint = share_hint(amount)
        if not valid:
            raise InvalidValue(f"Budget.{self.kind}", must, repr(amount), hint)

    def _check_length(self) -> None:
        if self.length is None:
            return
        if self.kind != "keep_macs" or type(self.length) is not int or self.length < 1:
            must = "a count of tokens >= 1, with keep_macs only"
            raise InvalidValue("Budget.length", must, repr(self.length))

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(kind for kind in _COUNTED if getattr(self, kind) is not None)

    @property
    def amount(self) -> int | float:
        """The given number."""
        value: int | float = getattr(self, self.kind)
        return value

    def __str__(self) -> str:
        on = f", for {self.tensor_parallel} GPUs" if self.tensor_parallel else ""
        if self.kind == "speedup":
            return f"at least {self.amount:g} times as fast{on}"
        if isinstance(self.amount, int):
            share = f"{self.amount}"
        else:
            share = f"{100 * self.amount:g} % of the"
        at = f" at {self.length} tokens" if self.length else ""
        return f"keep {share} {_COUNTED[self.kind]}{at}{on}"


@dataclass(frozen=True)
class SiteBudget(Value):
    """A budget of some sites; its fractions are of the cost of the heads of those sites.

    Args:
        sites: A kind (``self``, ``causal``, ``cross``, ``feed_forward``), a site's name, or a
            pattern over names.
        budget: How much may be kept there.

    >>> print(SiteBudget("*decoder*", Budget(keep_heads=0.5)))
    *decoder*: keep 50 % of the heads
    """

    sites: str
    budget: Budget

    def places(self, sites: Sequence[AttentionSite]) -> tuple[int, ...]:
        """Positions of those sites among a model's sites."""
        return places(sites, self.sites)

    def __str__(self) -> str:
        return f"{self.sites}: {self.budget}"


@dataclass(frozen=True)
class PruningPlan(Value):
    """The decision: which heads are kept, in original indices.

    Args:
        mask: Kept heads.
        budget: The budget it meets; None for a plan written by hand, or with ``budgets``.
        selector: Registered name of the selector, or ``by hand``.
        settings: The selector's settings.
        scorer: Registered name of the scorer, if scores were used.
        scores: Digest of those scores.
        model: Fingerprint of the model it is for; None fits any model that has its sites.
        notes: Messages of the selector.
        policy: Which query heads can be removed where several share a key/value head.
        budgets: Budgets of groups of sites, in place of ``budget``; each is met by itself.
    """

    mask: HeadMask
    budget: Budget | None = None
    selector: str = "by hand"
    settings: FrozenDict = EMPTY
    scorer: str | None = None
    scores: str | None = None
    model: ModelFingerprint | None = None
    notes: tuple[str, ...] = ()
    policy: Policy = "group"
    budgets: tuple[SiteBudget, ...] = ()

    def __post_init__(self) -> None:
        check_one_of("PruningPlan.policy", self.policy, POLICIES)
        # Both together would not say which one holds.
        if self.budget is not None and self.budgets:
            raise InvalidValue("PruningPlan", "given one of budget and budgets", "both")

    def then(self, other: PruningPlan) -> PruningPlan:
        """The plan that does both: a head is kept if both keep it.

        Raises:
            PlanMismatch: the plans are for models of different structure.
        """
        if self.model and other.model and self.model.structure != other.model.structure:
            must = "for a model of the same structure"
            raise PlanMismatch("plan", must, "plans for two different structures")
        # Both plans may carry the note about attention that is not supported; one is enough.
        own_coverage = set(coverage_notes(self.notes))
        new_notes = [note for note in other.notes if note not in own_coverage]
        return replace(
            other,
            mask=self.mask & other.mask,
            # The first plan's model is the one that both are applied to.
            model=self.model or other.model,
            notes=(*self.notes, *new_notes),
            # The policy that allows more.
            policy=max(self.policy, other.policy, key=POLICIES.index),
        )

    def rows(self) -> list[Row]:
        """The grid that draws which heads are kept."""
        return mask_rows(self.mask)

    @property
    def wanted(self) -> str:
        """The budget or budgets as text; empty for a plan written by hand."""
        if self.budget:
            return str(self.budget)
        return ", ".join(map(str, self.budgets))

    @property
    def title(self) -> str:
        why = [self.selector]
        if self.scorer:
            why.append(f"by {self.scorer}")
        if self.wanted:
            why.append(self.wanted)
        kept = self.mask.kept_counts.of(self.mask.counts)
        return f"{kept} kept ({', '.join(why)})"

    def __str__(self) -> str:
        return text_grid(f"PruningPlan: {self.title}", self.rows())

    def __rich__(self) -> str:
        return rich_grid(f"PruningPlan: {self.title}", self.rows())

    def _repr_html_(self) -> str:
        return html_grid(self.title, self.rows())
