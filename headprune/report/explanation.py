"""Why a plan removes which heads: every unit's score and fate, and how certain the choice is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from headprune.core.codec import LATER, Value
from headprune.core.display import clean, rich_table
from headprune.core.errors import HeadPruneError, PlanMismatch
from headprune.core.plan import PruningPlan
from headprune.core.scores import Cost, HeadScores, ScoredUnit

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

#: Undecided units that are listed by name, at most.
_NAMED = 8


@dataclass(frozen=True)
class Fate:
    """Whether a plan keeps one prune unit, and why.

    Args:
        site: The attention module's name.
        heads: Original indices of the unit's heads.
        score: Its importance.
        standard_error: Standard error of the score; None where the scorer has none.
        rank: 1 is the most important.
        kept: Whether the plan keeps it.
        among_lowest: Share of resamples in which it is among the k lowest units, where k is how
            many the plan removes; None without per-example numbers.
        why: The reason where its score alone did not decide; else empty.
    """

    site: str
    heads: tuple[int, ...]
    score: float
    standard_error: float | None
    rank: int
    kept: bool
    among_lowest: float | None = None
    why: str = ""

    @property
    def undecided(self) -> bool:
        """Whether more than 5 % of resamples decide otherwise; False where none were drawn."""
        return self.among_lowest is not None and 0.05 < self.among_lowest < 0.95

    def cells(self) -> tuple[str, str, str, str]:
        """Format the unit for a table: heads, score, rank and reason."""
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
    """A plan as text, for `explain`.

    Args:
        title: The plan's title.
        scorer: Name of the scorer whose values the units have.
        units: Every prune unit, least important first.
        share: Share of all importance that the removed units hold; None where scores are negative.
        saved: (name, removed, of the whole model) per kind of cost; empty where no costs were
            measured.
        same: Share of resamples in which the lowest units are exactly the same; None without
            per-example numbers.
        notes: Notes of the selector and the scorer.
        neurons: What every feed-forward keeps, as text; its neurons are not among the units.
    """

    title: str
    scorer: str
    units: tuple[Fate, ...]
    share: float | None
    saved: tuple[tuple[str, int, int], ...]
    same: float | None
    notes: tuple[str, ...] = ()
    neurons: tuple[str, ...] = field(default=(), metadata=LATER)

    @property
    def removed(self) -> tuple[Fate, ...]:
        """Units that the plan removes, least important first."""
        return tuple(unit for unit in self.units if not unit.kept)

    @property
    def undecided(self) -> tuple[Fate, ...]:
        """Units that other examples would have decided otherwise in more than 5 % of cases."""
        return tuple(unit for unit in self.units if unit.undecided)

    def _tables(self) -> dict[str, tuple[Fate, ...]]:
        """Units by the heading under which they are listed."""
        tables = {f"removed, least important by {self.scorer} first:": self.removed}
        against = tuple(unit for unit in self.units if unit.kept and unit.why)
        if against:
            tables["kept although some removed units have higher scores:"] = against
        return tables

    def __str__(self) -> str:
        lines = [self.title]
        for title, units in self._tables().items():
            lines += ["", title]
            lines += [f"  {unit}" for unit in units] or ["  nothing"]
        return "\n".join([*lines, *self._after()])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        parts: list[Text | Table] = [Text(clean(self.title), style="bold")]
        for title, units in self._tables().items():
            rows = [unit.cells() for unit in units] or [("nothing", "", "", "")]
            parts.append(Text(f"\n{clean(title)}"))
            parts.append(rich_table("", ("heads", "score", "rank", ""), rows))
        return Group(*parts, Text(clean("\n".join(self._after()))))

    def _after(self) -> list[str]:
        """Lines after the units: neurons, figures, undecided units and notes."""
        lines = ["", "neurons, layer by layer:"] if self.neurons else []
        lines += [f"  {line}" for line in self.neurons]
        lines += ["", "what to expect:", *(f"  {line}" for line in self.expected())]
        undecided = self.undecided
        if undecided:
            lines.append("")
            lines.append(
                f"{len(undecided)} units that other examples might have decided otherwise:"
            )
            lines += map(_doubt, undecided[:_NAMED])
            if len(undecided) > _NAMED:
                lines.append(f"  and {len(undecided) - _NAMED} more")
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def expected(self) -> list[str]:
        """List what is removed, in computed figures; accuracy is not predicted."""
        lines = []
        if self.share is not None:
            share = f"{100 * self.share:.1f} %"
            of_what = "all importance of heads" if self.neurons else "all importance"
            lines.append(f"{share} of {of_what} is removed, by {self.scorer}'s own measure")
        for name, removed, whole in self.saved:
            share = f"{100 * removed / whole:.1f} %"
            lines.append(f"{name}: {removed:,} of {whole:,} removed ({share})")
        if self.same is not None:
            lines.append(
                f"with other examples the same units would be the lowest in {100 * self.same:.0f} %"
                " of cases"
            )
        return lines


def explain(plan: PruningPlan, scores: HeadScores) -> Explanation:
    """Explain a plan by the scores that it was made from.

    Args:
        plan: The plan.
        scores: Its scores. Another scorer's scores of the same model show how far the two agree.

    Raises:
        PlanMismatch: the scores are of other sites than the plan, or of a model of another
            structure.
    """
    _check(plan, scores)
    neurons, whole = _neurons(plan, scores), scores
    scores = scores.without_neurons()
    # 1. Find the units that the plan keeps, least important first.
    ranked = scores.ranked()
    heads = {row.site: frozenset(row.kept) for row in plan.mask.rows}
    kept: list[ScoredUnit] = []
    removed: list[ScoredUnit] = []
    kept_per_site: Counter[int] = Counter()
    for unit in ranked:
        # A plan of finer units than the scores' may remove a part of a unit: that counts as kept.
        if heads[unit.name].isdisjoint(unit.heads):
            removed.append(unit)
        else:
            kept.append(unit)
            kept_per_site[unit.site] += 1
    # 2. Give the reason of every unit, and how certain it is.
    borders = _Borders(
        highest_removed=max((unit.value for unit in removed), default=-math.inf),
        lowest_kept=min((unit.value for unit in kept), default=math.inf),
        kept_per_site=kept_per_site,
        by_prices=scores.ladders is not None,
    )
    shares, same = _chances(scores, len(removed))
    kept_keys = set(map(_key, kept))
    fates = []
    for place, unit in enumerate(ranked):
        is_kept = _key(unit) in kept_keys
        fates.append(
            Fate(
                site=unit.name,
                heads=unit.heads,
                score=unit.value,
                standard_error=unit.standard_error,
                rank=len(ranked) - place,
                kept=is_kept,
                among_lowest=shares.get(_key(unit)),
                why=borders.reason(unit, is_kept),
            )
        )
    # 3. Sum up what is removed.
    return Explanation(
        title=plan.title,
        scorer=scorer_of_values(scores),
        units=tuple(fates),
        share=_share(ranked, removed),
        saved=_saved(whole, plan),
        same=same,
        # The plan may repeat notes of the scores.
        notes=tuple(dict.fromkeys((*_choice_note(scores), *plan.notes, *scores.notes))),
        neurons=neurons,
    )


def scorer_of_values(scores: HeadScores) -> str:
    """The scorer whose values the scores are: with measured prices, that of the order."""
    if scores.ladders is None:
        return scores.scorer
    return str(scores.settings.get("order", scores.scorer))


def _neurons(plan: PruningPlan, scores: HeadScores) -> tuple[str, ...]:
    """What every feed-forward keeps, with mean scores, and its measured price if there is one."""
    lines = []
    for number, (site, values) in enumerate(zip(scores.sites, scores.values, strict=True)):
        if not site.is_feed_forward:
            continue
        kept = set(plan.mask.kept(site.name))
        by_fate: dict[str, list[float]] = {"kept": [], "removed": []}
        for unit, value in zip(site.units, values, strict=True):
            by_fate["removed" if kept.isdisjoint(unit) else "kept"].append(value)
        means = []
        for fate, of_fate in by_fate.items():
            if of_fate:
                means.append(f"{fate} ones score {fmean(of_fate):.3g} on average")
        n_kept = len(kept.intersection(site.heads))
        if scores.ladders is not None:
            means.append(f"measured price {scores.ladders[number].at(n_kept):.2g}")
        count = f"{n_kept:,} of {len(site.heads):,} neurons kept"
        lines.append("; ".join([f"{site.name}: {count}", *means]))
    return tuple(lines)


def _key(unit: ScoredUnit) -> tuple[int, int]:
    return unit.site, unit.unit


@dataclass(frozen=True)
class _Borders:
    """Where a plan divides the scores; units on the wrong side of a border need a reason.

    Args:
        highest_removed: The highest score of a removed unit.
        lowest_kept: The lowest score of a kept unit.
        kept_per_site: Kept units by number of the site.
        by_prices: Whether levels of sites have measured prices.
    """

    highest_removed: float
    lowest_kept: float
    kept_per_site: Counter[int]
    by_prices: bool

    def reason(self, unit: ScoredUnit, kept: bool) -> str:
        """Say why a unit is kept or removed; empty where its score explains it."""
        if not kept:
            lower_kept = unit.value > self.lowest_kept
            return "removed although units with lower scores are kept" if lower_kept else ""
        if unit.value >= self.highest_removed:
            return ""
        if self.kept_per_site[unit.site] == 1:
            return "the only one kept in its layer"
        if self.by_prices:
            return "measured prices, not scores, decide how many each layer keeps"
        return "other units save more when removed, or a rule of the selector keeps it"


def _choice_note(scores: HeadScores) -> list[str]:
    """Note how `auto` chose the scorer; empty where the user named it."""
    choice = scores.choice
    if choice is None:
        return []
    return [
        f"auto chose {choice.chosen} by the loss of {choice.n_examples:,} rows that no refit had"
        " seen; scores.choice, and the report of a run, have all candidates."
    ]


def _check(plan: PruningPlan, scores: HeadScores) -> None:
    """Refuse scores of another model."""
    if plan.model is not None and plan.model.structure != scores.model.structure:
        raise PlanMismatch(
            "scores", "of the model that the plan is for", "those of a model of another structure"
        )
    for site in scores.sites:
        if site.name not in plan.mask.sites:
            raise PlanMismatch(
                "scores", "of sites that the plan is for", f"{site.name!r}, which it lacks"
            )


def _chances(scores: HeadScores, k: int) -> tuple[dict[tuple[int, int], float], float | None]:
    """Resample the examples.

    Returns:
        Every unit's share of resamples in which it is among the k lowest, and the share in which
        the same k units are the lowest; empty and None where that cannot be computed.
    """
    try:
        rows, same = scores.lowest(k), scores.stable(k).probability
    except HeadPruneError:  # no per-example numbers, or the plan removes no unit or all of them
        return {}, None
    shares = {}
    for site, row in enumerate(rows):
        for unit, share in enumerate(row):
            shares[site, unit] = share
    return shares, same


def _share(ranked: Sequence[ScoredUnit], removed: Sequence[ScoredUnit]) -> float | None:
    """Share of all importance that is removed; None where it means nothing."""
    values = [unit.value for unit in ranked]
    whole = sum(values)
    if whole <= 0 or min(values) < 0:
        return None
    return sum(unit.value for unit in removed) / whole


def _saved(scores: HeadScores, plan: PruningPlan) -> tuple[tuple[str, int, int], ...]:
    """Sum the costs of the removed units: (name, removed, of the whole model)."""
    if scores.costs is None:
        return ()
    length, whole = scores.costs.length, scores.costs.total
    kept = {row.site: frozenset(row.kept) for row in plan.mask.rows}
    removed = (unit for unit in scores.units() if kept[unit.name].isdisjoint(unit.heads))
    parts = Cost.sum(unit.cost for unit in removed if unit.cost)
    rows = [
        ("parameters", parts.params, whole.params),
        (
            f"multiply-adds per example of {length} tokens",
            parts.macs(length),
            whole.macs(length),
        ),
        ("bytes of KV cache per token", parts.kv_bytes, whole.kv_bytes),
    ]
    # Models without a cache have no row for it.
    return tuple(row for row in rows if row[2])


def _doubt(unit: Fate) -> str:
    """Say how often other examples would have put an undecided unit among the lowest."""
    assert unit.among_lowest is not None
    state = "kept" if unit.kept else "removed"
    chance = f"{100 * unit.among_lowest:.0f} %"
    return (
        f"  {unit.site}{list(unit.heads)}: {state}, and among the lowest in {chance} of resamples"
    )
