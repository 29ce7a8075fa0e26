"""Why a plan removes what it removes: every unit's score beside what became of it, and how sure the
choice is."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.core.codec import Value
from headprune.core.display import clean, rich_table
from headprune.core.errors import HeadPruneError, PlanMismatch
from headprune.core.plan import PruningPlan
from headprune.core.scores import Cost, HeadScores, ScoredUnit

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

#: So many undecided units are named.
_NAMED = 8


@dataclass(frozen=True)
class Fate:
    """What became of one prune unit.

    Args:
        site: The attention module's name.
        heads: Original indices of the unit's heads.
        score: Its importance.
        standard_error: Of the score, None where the scorer has none.
        rank: 1 is the most important.
        kept: Whether it stays.
        among_lowest: Share of resamples of the examples in which it is among as many lowest units
            as the plan removes; None without per-example numbers.
        why: Empty where its score alone decided; else what its score does not say.
    """

    site: str
    heads: tuple[int, ...]
    score: float
    standard_error: float | None
    rank: int
    kept: bool
    among_lowest: float | None = None
    why: str = ""

    def cells(self) -> tuple[str, str, str, str]:
        """The unit in a table: heads, score, rank, and what the score does not say."""
        spread = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        return (
            f"{self.site}{list(self.heads)}",
            f"{self.score:.4g}{spread}",
            str(self.rank),
            self.why,
        )

    def __str__(self) -> str:
        heads, score, rank, why = self.cells()
        words = f"{heads}  {score}, rank {rank}"
        return f"{words}; {why}" if why else words


@dataclass(frozen=True)
class Explanation(Value):
    """A plan in words, for `explain`.

    Args:
        title: The plan's own.
        scorer: Whose scores these are.
        units: Every prune unit, least important first.
        share: Of all importance, what the removed units hold; None where scores can be negative.
        saved: What goes with them, by name: ``[removed, of the whole model]``; empty where no costs
            were measured.
        same: Share of resamples in which the lowest units are exactly the same; None without
            per-example numbers.
        notes: What selector and scorer had to say.
    """

    title: str
    scorer: str
    units: tuple[Fate, ...]
    share: float | None
    saved: tuple[tuple[str, int, int], ...]
    same: float | None
    notes: tuple[str, ...] = ()

    @property
    def removed(self) -> tuple[Fate, ...]:
        """Units that go, least important first."""
        return tuple(unit for unit in self.units if not unit.kept)

    @property
    def undecided(self) -> tuple[Fate, ...]:
        """Units that other examples would have put on the other side of the line in more than 5 %
        of cases."""
        return tuple(
            u for u in self.units if u.among_lowest is not None and 0.05 < u.among_lowest < 0.95
        )

    def _tables(self) -> dict[str, tuple[Fate, ...]]:
        """Units by what is to be said of them."""
        against = tuple(unit for unit in self.units if unit.kept and unit.why)
        goes = {f"goes, least important by {self.scorer} first:": self.removed}
        return goes | (
            {"stays although its score is lower than some that go:": against} if against else {}
        )

    def __str__(self) -> str:
        lines = [self.title]
        for title, units in self._tables().items():
            lines += ["", title, *([f"  {unit}" for unit in units] or ["  nothing"])]
        return "\n".join([*lines, *self._after()])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        parts: list[Text | Table] = [Text(clean(self.title), style="bold")]
        for title, units in self._tables().items():
            rows = [unit.cells() for unit in units] or [("nothing", "", "", "")]
            parts += [
                Text(f"\n{clean(title)}"),
                rich_table("", ("heads", "score", "rank", ""), rows),
            ]
        return Group(*parts, Text(clean("\n".join(self._after()))))

    def _after(self) -> list[str]:
        """What follows the units: figures, doubts and notes."""
        lines = ["", "what to expect:", *(f"  {line}" for line in self.expected())]
        if self.undecided:
            lines += [
                "",
                (
                    f"{len(self.undecided)} units that other examples might have put on the other"
                    " side:"
                ),
            ]
            lines += [
                f"  {unit.site}{list(unit.heads)}: {_how(unit)}" for unit in self.undecided[:_NAMED]
            ]
            lines += [f"  and {len(self.undecided) - _NAMED} more"] * (len(self.undecided) > _NAMED)
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def expected(self) -> list[str]:
        """What goes, in figures that were computed; never a promise about accuracy."""
        lines = []
        if self.share is not None:
            lines.append(
                f"{100 * self.share:.1f} % of all importance goes, by {self.scorer}'s own measure"
            )
        lines += [
            f"{name}: {gone:,} of {whole:,} go ({100 * gone / whole:.1f} %)"
            for name, gone, whole in self.saved
        ]
        if self.same is not None:
            lines.append(
                f"with other examples the same units would be the lowest in {100 * self.same:.0f} %"
                " of cases"
            )
        return lines


def explain(plan: PruningPlan, scores: HeadScores) -> Explanation:
    """Sets a plan beside the scores that it was made from.

    Args:
        plan: The plan.
        scores: Its scores; those of another scorer for the same model explain, too, how far the two
            agree.

    Raises:
        PlanMismatch: the scores are of other sites than the plan is for, or of a model of another
            structure.
    """
    _check(plan, scores)
    ranked = scores.ranked()
    heads = {row.site: frozenset(row.kept) for row in plan.mask.rows}
    # A unit stays if the plan keeps any of its heads: a plan of finer units than the scores may
    # take a part of one.
    kept = {(unit.site, unit.unit): not heads[unit.name].isdisjoint(unit.heads) for unit in ranked}
    gone = [unit for unit in ranked if not kept[unit.site, unit.unit]]
    highest = max((unit.value for unit in gone), default=-math.inf)
    lowest = min((unit.value for unit in ranked if kept[unit.site, unit.unit]), default=math.inf)
    left = Counter(site for (site, _), stays in kept.items() if stays)
    shares, same = _chances(scores, len(gone))
    fates = tuple(
        Fate(
            unit.name,
            unit.heads,
            unit.value,
            unit.standard_error,
            len(ranked) - place,
            kept[unit.site, unit.unit],
            shares.get((unit.site, unit.unit)),
            _why(unit, kept[unit.site, unit.unit], left[unit.site] == 1, highest, lowest),
        )
        for place, unit in enumerate(ranked)
    )
    whole = sum(unit.value for unit in ranked)
    signed = any(unit.value < 0 for unit in ranked)
    share = None if signed or whole <= 0 else sum(unit.value for unit in gone) / whole
    notes = tuple(dict.fromkeys((*_chosen(scores), *plan.notes, *scores.notes)))
    return Explanation(plan.title, scores.scorer, fates, share, _saved(scores, gone), same, notes)


def _chosen(scores: HeadScores) -> list[str]:
    """Who chose the scorer, where nobody named it."""
    choice = scores.choice
    if choice is None:
        return []
    rows = f"the loss of {choice.n_examples:,} rows that no refit had seen"
    return [
        f"auto took {choice.chosen} by {rows}; scores.choice, and the report of a run, have all"
        " candidates."
    ]


def _check(plan: PruningPlan, scores: HeadScores) -> None:
    if plan.model is not None and plan.model.structure != scores.model.structure:
        raise PlanMismatch(
            "scores", "of the model that the plan is for", "those of a model of another structure"
        )
    known = set(plan.mask.sites)
    unknown = [site.name for site in scores.sites if site.name not in known]
    if unknown:
        raise PlanMismatch(
            "scores", "of sites that the plan is for", f"{unknown[0]!r}, which it lacks"
        )


def _chances(scores: HeadScores, k: int) -> tuple[dict[tuple[int, int], float], float | None]:
    """Every unit's share of resamples in which it is among the k lowest, and that the whole set is
    the same."""
    try:
        rows, same = scores.lowest(k), scores.stable(k).probability
    except HeadPruneError:  # no per-example numbers, or nothing (or everything) goes
        return {}, None
    return {(s, u): share for s, row in enumerate(rows) for u, share in enumerate(row)}, same


def _why(unit: ScoredUnit, stays: bool, alone: bool, highest: float, lowest: float) -> str:
    """What a unit's score alone does not say.

    Args:
        unit: The unit.
        stays: Whether it does.
        alone: Whether it is the only one of its site that does.
        highest: Of the scores that go.
        lowest: Of the scores that stay.
    """
    if stays and unit.value < highest:
        return (
            "the last one of its layer"
            if alone
            else "other units that go save more, or a rule of the selector keeps it"
        )
    return "goes although units with lower scores stay" if not stays and unit.value > lowest else ""


def _saved(scores: HeadScores, gone: list[ScoredUnit]) -> tuple[tuple[str, int, int], ...]:
    if scores.costs is None:
        return ()
    parts, whole, length = (
        Cost.sum(u.cost for u in gone if u.cost),
        scores.costs.total,
        scores.costs.length,
    )
    macs = f"multiply-adds an example of {length} tokens"
    rows = [
        ("parameters", parts.params, whole.params),
        (macs, parts.macs(length), whole.macs(length)),
    ]
    rows.append(("bytes of KV cache a token", parts.kv_bytes, whole.kv_bytes))
    return tuple(row for row in rows if row[2])


def _how(unit: Fate) -> str:
    assert unit.among_lowest is not None
    side = "stays" if unit.kept else "goes"
    return f"{side}, and is among the lowest in {100 * unit.among_lowest:.0f} % of resamples"
