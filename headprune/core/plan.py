"""Budget: what may stay. PruningPlan: which heads stay, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from headprune.core.codec import EMPTY, FrozenDict, Value
from headprune.core.coverage import coverage_notes
from headprune.core.display import Cell, Row, html_grid, rich_grid, text_grid
from headprune.core.errors import InvalidValue, PlanMismatch
from headprune.core.heads import POLICIES, AttentionSite, HeadMask, Policy, places
from headprune.core.scores import ModelFingerprint

_KINDS = ("keep_heads", "keep_params", "keep_macs", "keep_kv", "speedup")


def allowance(amount: int | float, whole: int) -> int:
    """What ``amount`` of ``whole`` comes to, rounded down, forgiving what a float loses in spelling
    a ratio.

    >>> allowance(0.29, 100), allowance(0.5, 7), allowance(4, 7)
    (29, 3, 4)
    """
    return amount if isinstance(amount, int) else math.floor(amount * whole * (1 + 1e-12) + 1e-9)


@dataclass(frozen=True)
class Budget(Value):
    """What may stay; exactly one of the five is given.

    Args:
        keep_heads: A count of heads (int), or a fraction of the heads that are present (float).
        keep_params: Fraction of the whole model's parameters.
        keep_macs: Fraction of the whole model's multiply-adds for one example of ``length`` tokens.
        keep_kv: Fraction of the KV cache's bytes a token.
        speedup: How many times as fast the pruned model must be, above 1, by a `LatencyTable`
            measured before.
        length: Tokens an example, for ``keep_macs``; the length of the scored examples where it is
            left out.

    >>> print(Budget(keep_heads=0.5))
    keep 50 % of the heads
    >>> Budget(keep_macs=0.6, length=128).amount
    0.6
    >>> print(Budget(speedup=1.3))
    at least 1.3 times as fast
    """

    keep_heads: int | float | None = None
    keep_params: float | None = None
    keep_macs: float | None = None
    keep_kv: float | None = None
    speedup: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        given = [k for k in _KINDS if getattr(self, k) is not None]
        if len(given) != 1:
            raise InvalidValue(
                "Budget", f"given by exactly one of {', '.join(_KINDS)}", ", ".join(given) or "none"
            )
        value = self.amount
        count = self.kind == "keep_heads" and isinstance(value, int)
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.kind == "speedup":
            if not numeric or not 1 < value < math.inf:
                hint = "1.3 is 30 % more calls a second."
                raise InvalidValue("Budget.speedup", "a number above 1", repr(value), hint)
        elif not numeric or not (value >= 1 if count else 0 < value <= 1):
            must = "a fraction above 0 and up to 1.0"
            must = f"a count >= 1 or {must}" if self.kind == "keep_heads" else must
            raise InvalidValue(f"Budget.{self.kind}", must, repr(value))
        if not count:  # a bare 1 is a fraction everywhere but in keep_heads
            object.__setattr__(self, self.kind, float(value))
        if self.length is not None and (
            self.kind != "keep_macs" or type(self.length) is not int or self.length < 1
        ):
            raise InvalidValue(
                "Budget.length", "a count of tokens >= 1, with keep_macs only", repr(self.length)
            )

    @property
    def kind(self) -> str:
        """Which of the budgets is given."""
        return next(k for k in _KINDS if getattr(self, k) is not None)

    @property
    def amount(self) -> int | float:
        """The given number."""
        value: int | float = getattr(self, self.kind)
        return value

    def __str__(self) -> str:
        if self.kind == "speedup":
            return f"at least {self.amount:g} times as fast"
        what = {
            "keep_heads": "heads",
            "keep_params": "parameters",
            "keep_macs": "MACs",
            "keep_kv": "KV cache",
        }
        share = (
            f"{self.amount}" if isinstance(self.amount, int) else f"{100 * self.amount:g} % of the"
        )
        at = f" at {self.length} tokens" if self.length else ""
        return f"keep {share} {what[self.kind]}{at}"


@dataclass(frozen=True)
class SiteBudget(Value):
    """A budget of some sites alone: its fractions are of what the heads of those sites cost
    together.

    Args:
        sites: A kind of attention (``self``, ``causal``, ``cross``), a site's name, or a pattern
            over names.
        budget: What may stay there.

    >>> print(SiteBudget("*decoder*", Budget(keep_heads=0.5)))
    *decoder*: keep 50 % of the heads
    """

    sites: str
    budget: Budget

    def places(self, sites: Sequence[AttentionSite]) -> tuple[int, ...]:
        """Which of a model's sites are those."""
        return places(sites, self.sites)

    def __str__(self) -> str:
        return f"{self.sites}: {self.budget}"


@dataclass(frozen=True)
class PruningPlan(Value):
    """The decision: which heads stay, in original indices.

    Args:
        mask: Kept heads.
        budget: The budget it meets; None for a plan written by hand, or with ``budgets``.
        selector: Registered name of the selector, or ``by hand``.
        settings: The selector's settings.
        scorer: Registered name of the scorer, if scores were used.
        scores: Digest of those scores.
        model: Fingerprint of the model it is for; None fits any model that has its sites.
        notes: What the selector has to say.
        policy: Which query heads may leave where several share a key/value head.
        budgets: Or the budgets that groups of sites meet, each by itself.
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
        if self.policy not in POLICIES:
            raise InvalidValue(
                "PruningPlan.policy", f"one of {', '.join(POLICIES)}", repr(self.policy)
            )
        if self.budget is not None and self.budgets:
            raise InvalidValue("PruningPlan", "given one of budget and budgets", "both")

    def then(self, other: PruningPlan) -> PruningPlan:
        """The plan that does both: a head stays if both keep it.

        Raises:
            PlanMismatch: the plans are for models of different structure.
        """
        if self.model and other.model and self.model.structure != other.model.structure:
            raise PlanMismatch(
                "plan", "for a model of the same structure", "plans for two different structures"
            )
        own = ("mask", "model", "notes", "policy")
        said = {f.name: getattr(other, f.name) for f in fields(other) if f.name not in own}
        model = (
            self.model or other.model
        )  # the plan that does both is for the model that the first one is for
        policy = max(self.policy, other.policy, key=POLICIES.index)  # the one that allows more
        once = set(coverage_notes(self.notes))
        notes = (*self.notes, *(note for note in other.notes if note not in once))
        return PruningPlan(
            mask=self.mask & other.mask, model=model, notes=notes, policy=policy, **said
        )

    def rows(self) -> list[Row]:
        """The grid of cells that shows what stays."""

        def cell(site: str, head: int, kept: tuple[int, ...]) -> Cell:
            return Cell(
                head, None, head in kept, f"{site}[{head}]: {'kept' if head in kept else 'removed'}"
            )

        return [
            Row(r.site, tuple(cell(r.site, h, r.kept) for h in range(r.n_heads)))
            for r in self.mask.rows
        ]

    @property
    def wanted(self) -> str:
        """The budget or budgets in words; empty for a plan written by hand."""
        return ", ".join(map(str, [self.budget] if self.budget else self.budgets))

    @property
    def title(self) -> str:
        why = [
            self.selector,
            *([f"by {self.scorer}"] if self.scorer else []),
            *([self.wanted] if self.wanted else []),
        ]
        return f"{self.mask.n_kept} of {self.mask.n_heads} heads stay ({', '.join(why)})"

    def __str__(self) -> str:
        return text_grid(f"PruningPlan: {self.title}", self.rows())

    def __rich__(self) -> str:
        return rich_grid(f"PruningPlan: {self.title}", self.rows())

    def _repr_html_(self) -> str:
        return html_grid(self.title, self.rows())
