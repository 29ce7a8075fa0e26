"""The verdict on a run in one sentence: what was removed, its cost, its gain, and what next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from headprune.core.heads import HeadCounts
from headprune.core.metrics import LOWER, POINTS, RATIO, drop, is_one_of
from headprune.core.record import Comparison, QualityRow, RunRecord, SpeedRow
from headprune.report.formats import fixed, times
from headprune.report.quality import Role, headline_rows, own_interval
from headprune.report.repeat import recipe_file
from headprune.report.speed import verdict as speed_words

#: ``above`` and ``below`` 0 by the whole interval, ``unclear`` where it holds 0.
Sign = Literal["above", "below", "unclear", "unknown"]
#: An interval of a share that is narrower than this on each side, a point, is narrow enough.
_POINT = 0.01
#: How the sentence about a run that is not done begins.
_UNFINISHED = {
    "failed": "The run failed in stage",
    "interrupted": "The run was interrupted in stage",
    "running": "The run is in stage",
}


@dataclass(frozen=True)
class Verdict:
    """The sentence and its clauses; each is empty where the record says nothing of it."""

    sentence: str
    cost: str  # what was lost, with its interval
    gain: str  # speed, at which shape
    random: str  # whether the choice beat random heads
    next: str  # what to try
    command: str  # shell line for that

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.sentence, self.command)))


@dataclass(frozen=True)
class _Difference:
    """How much more one model loses than another; above 0 is worse."""

    metric: str
    drop: float
    low: float = math.nan
    high: float = math.nan

    @property
    def sign(self) -> Sign:
        if math.isnan(self.low):
            return "unknown"
        if self.low > 0:
            return "above"
        return "below" if self.high < 0 else "unclear"


def verdict(record: RunRecord, folder: str | None = None) -> Verdict:
    """Judge a run by its record alone.

    Args:
        record: Any record, also of a run that is not done.
        folder: The run's folder, for the command; default that of its recipe.

    >>> verdict(RunRecord("demo", "done", "save", "2026-01-01T00:00:00Z")).sentence
    'The run is done; its record holds no results.'
    """
    rows = headline_rows(record)
    cost, gain, random = "", "", ""
    removed = removed_words(record)
    if removed:
        cost, gain, random = _cost(record, rows), _gain(record), _random(record, rows)
    clauses = [clause for clause in (cost, gain, random) if clause]
    text = f"Removing {removed} {_listed(clauses)}" if removed else _without_plan(record, rows)
    if record.status != "done":
        start = f"{_UNFINISHED[record.status]} {record.stage}"
        until = f"{start}, before anything was measured."
        if text:
            until = f"{start}. Until then: {text}."
        return Verdict(until, cost, gain, random, "", "")
    if not text:
        return Verdict("The run is done; its record holds no results.", "", "", "", "", "")
    after, command = _next(record, rows, folder) if removed else ("", "")
    ending = f"; next, {after}." if after else "."
    return Verdict(text + ending, cost, gain, random, after, command)


def card_lines(record: RunRecord) -> list[str]:
    """What a model card says of a run: its verdict, and the quality before and after."""
    rows = headline_rows(record)
    judged = verdict(replace(record, status="done"))
    clauses = [clause for clause in (judged.cost, judged.gain, judged.random) if clause]
    lines = [f"Verdict: removing {removed_words(record)} {_listed(clauses)}."]
    for words, row in (("Before", rows.get("base")), ("After", _final(rows))):
        if row is not None:
            interval = own_interval(row)
            known = f" (95 % interval {interval})" if interval else ""
            where = f"on {row.n_examples:,} {row.split} rows"
            lines.append(f"{words}: {row.metric} {fixed(row.value, 4)}{known} {where}")
    for speed in record.speed:
        ends = f"95 % interval {fixed(speed.low, 2)} to {fixed(speed.high, 2)}"
        where = f"batch {speed.batch:,} × {speed.length:,} tokens"
        lines.append(f"Speed: {times(speed.ratio)} as fast as before at {where} ({ends})")
    return lines


def removed_counts(record: RunRecord) -> tuple[HeadCounts, HeadCounts] | None:
    """Count the heads and neurons that the plan removes, and those present before it."""
    if record.plan is None:
        return None
    mask = record.plan.mask
    # The mask also counts heads that were removed before; the scores do not.
    present = mask.counts if record.scores is None else record.scores.counts
    return present - mask.kept_counts, present


def removed_words(record: RunRecord) -> str:
    """Say what the plan removes; empty without a plan."""
    counts = removed_counts(record)
    return counts[0].of(counts[1], ",") if counts else ""


def headline_speed(record: RunRecord) -> SpeedRow | None:
    """The row with the most tokens per call: fixed in advance, not the best one."""
    return max(record.speed, key=lambda row: (row.batch * row.length, row.batch), default=None)


def _listed(clauses: list[str]) -> str:
    """Join clauses: ``a``, ``a and b``, ``a, b, and c``."""
    if len(clauses) < 3:
        return " and ".join(clauses)
    return f"{', '.join(clauses[:-1])}, and {clauses[-1]}"


def _without_plan(record: RunRecord, rows: Mapping[Role, QualityRow]) -> str:
    parts = []
    if record.scores is not None:
        parts.append(f"{record.scores.n_heads:,} heads scored, none removed")
    if "base" in rows:
        base = rows["base"]
        parts.append(f"{base.metric} {fixed(base.value, 3)} before the cut")
    return "; ".join(parts)


# -------------------------------------------------------------------------------------------- cost


def _final(rows: Mapping[Role, QualityRow]) -> QualityRow | None:
    return rows.get("recovered") or rows.get("chosen")


def _cost_of(record: RunRecord, rows: Mapping[Role, QualityRow]) -> _Difference | None:
    """The final model's loss of quality; None where it or the uncut model was not measured."""
    base, final = rows.get("base"), _final(rows)
    if base is None or final is None or not _directed(base.metric):
        return None
    found = record.compared(final.name, "base", final.metric, final.split)
    if found is not None:
        return _of(found)
    return _Difference(base.metric, drop(base.metric, base.value, final.value))


def _of(found: Comparison) -> _Difference:
    return _Difference(found.metric, found.drop, found.low, found.high)


def _directed(metric: str) -> bool:
    return is_one_of(metric, (*POINTS, *RATIO, *LOWER))


def _cost(record: RunRecord, rows: Mapping[Role, QualityRow]) -> str:
    base, final = rows.get("base"), _final(rows)
    if final is None:
        return "has no measured cost"
    if base is None:
        return f"gives {final.metric} {fixed(final.value, 3)}, which nothing is compared with"
    where = f" on {final.n_examples:,} {final.split} rows"
    cost = _cost_of(record, rows)
    if cost is None:
        return (
            f"changed {base.metric} from {fixed(base.value, 3)} to {fixed(final.value, 3)}{where}"
        )
    if cost.drop == cost.low == cost.high == 0:
        return f"changed the result of none of {final.n_examples:,} {final.split} rows"
    if cost.drop == 0:
        ends = f" ({_interval(cost)})" if cost.sign == "unclear" else ""
        return f"did not change the {cost.metric}{where}{ends}"
    text = _change(cost) + where
    if cost.sign == "unknown":
        return f"{text} (the record has no interval)"
    if cost.sign == "unclear":
        text += ", which chance can explain"
    return f"{text} ({_interval(cost)})"


def _change(cost: _Difference) -> str:
    """Say how much the metric changed: lost, gained, raised or lowered."""
    worse = cost.drop >= 0
    if is_one_of(cost.metric, POINTS):
        return f"{'cost' if worse else 'gained'} {_amount(cost)} of {cost.metric}"
    return f"{'raised' if worse else 'lowered'} {cost.metric} by {_amount(cost)}"


def _amount(difference: _Difference) -> str:
    number, unit = _scaled(difference.metric, abs(difference.drop))
    return f"{number}{unit}"


def _interval(difference: _Difference) -> str:
    """Write the interval with the sign of the amount before it."""
    ends = difference.low, difference.high
    if difference.drop < 0:
        ends = -difference.high, -difference.low
    low, high = (_scaled(difference.metric, end)[0] for end in ends)
    return f"95 % interval {low} to {high}"


def _scaled(metric: str, amount: float) -> tuple[str, str]:
    """A drop as a number and its unit."""
    if is_one_of(metric, POINTS):
        return fixed(100 * amount, 2), " points"
    if is_one_of(metric, RATIO):
        return fixed(100 * amount, 2), " %"
    return fixed(amount, 4), ""


# -------------------------------------------------------------------------------------------- gain


def _gain(record: RunRecord) -> str:
    row = headline_speed(record)
    if row is None:
        return "was not timed"
    where = f"at batch {row.batch:,} × {row.length:,} tokens"
    words, tone = speed_words(row)
    inside = [f"95 % interval {fixed(row.low, 2)} to {fixed(row.high, 2)}", *_other_shapes(record)]
    more = f" ({'; '.join(inside)})"
    if tone == "good":
        return f"made it {times(row.ratio)} as fast {where}{more}"
    if tone == "bad":
        return f"made it slower, {times(row.ratio)} as fast, {where}{more}"
    if words == "no usable timing":
        return f"has no usable timing {where}"
    return f"gained no measurable speed {where}{more}"


def _other_shapes(record: RunRecord) -> list[str]:
    """Name the shapes that are slower or no different, however fast the others are."""
    tones = [speed_words(row)[1] for row in record.speed]
    n, texts = len(tones), []
    if n < 2:
        return []
    if tones.count("plain"):
        texts.append(f"no measurable difference at {tones.count('plain')} of {n} shapes")
    if tones.count("bad"):
        texts.append(f"slower at {tones.count('bad')} of {n} shapes")
    return texts


# ------------------------------------------------------------------------------------------ random


def _against_random(record: RunRecord, rows: Mapping[Role, QualityRow]) -> _Difference | None:
    """How much more the chosen heads lose than random ones; None where nothing compares them."""
    chosen, drawn = rows.get("chosen"), rows.get("random")
    if chosen is None or drawn is None or not _directed(chosen.metric):
        return None
    if chosen.kept_heads != drawn.kept_heads:
        return None
    found = record.compared(chosen.name, "random", chosen.metric, chosen.split)
    if found is not None:
        return _of(found)
    lost = drop(chosen.metric, drawn.value, chosen.value)
    if drawn.spread is None:
        return _Difference(chosen.metric, lost)
    # Older records have no rows to resample: two standard deviations of the draws.
    spread = 2 * abs(drop(chosen.metric, drawn.value, drawn.value + drawn.spread))
    return _Difference(chosen.metric, lost, lost - spread, lost + spread)


def _random(record: RunRecord, rows: Mapping[Role, QualityRow]) -> str:
    scores = record.scores
    if scores is not None and scores.scorer == "random":
        return "took its heads at random"
    # Judged by `auto` on rows that the refit had not seen, random heads were refitted alike.
    if _refitted_alike(record) and scores is not None and scores.choice is not None:
        where = f"on {scores.choice.n_examples:,} held-out calibration rows"
        if scores.choice.beats_random:
            return f"beat random heads that were treated alike, {where}"
        return f"is not shown to beat random heads that were treated alike, {where}"
    difference = _against_random(record, rows)
    if difference is None:
        return "was not compared with random heads"
    when = " before recovery" if "recovered" in rows else ""
    better = _Difference(difference.metric, -difference.drop, -difference.high, -difference.low)
    amount = f"{_amount(better)} of {better.metric}"
    if not is_one_of(better.metric, POINTS):
        amount = f"{_amount(better)} {better.metric}".replace("%", "% of")
    if better.sign == "unknown":
        relation = "above" if better.drop > 0 else "below"
        return f"is {amount} {relation} the only draw of random heads{when}"
    more = f"({_interval_of(better)})"
    if better.sign == "above":
        return f"beat random heads by {amount}{when} {more}"
    if better.sign == "below":
        return f"is worse than random heads by {amount}{when} {more}"
    return f"is no better than random heads{when} {more}"


def _refitted_alike(record: RunRecord) -> bool:
    """Whether `auto` drew random heads, and treated them as its own candidates."""
    choice = record.scores.choice if record.scores is not None else None
    return choice is not None and any(one.scorer == "random" for one in choice.candidates)


def _interval_of(better: _Difference) -> str:
    low, unit = _scaled(better.metric, better.low)
    return (
        f"95 % interval of the difference {low} to {_scaled(better.metric, better.high)[0]}{unit}"
    )


def random_is_as_good(record: RunRecord, rows: Mapping[Role, QualityRow] | None = None) -> bool:
    """Whether random heads are not shown to be worse; False where nothing compares them."""
    if _refitted_alike(record) and record.scores is not None and record.scores.choice is not None:
        return not record.scores.choice.beats_random
    difference = _against_random(record, rows if rows is not None else headline_rows(record))
    return difference is not None and difference.sign in ("unclear", "above")


# -------------------------------------------------------------------------------------------- next


def _next(
    record: RunRecord, rows: Mapping[Role, QualityRow], folder: str | None
) -> tuple[str, str]:
    """Return what to try next, and a command for it where one is known to work."""
    # NaN is no pass.
    if not all(proof.max_difference <= proof.tolerance for proof in record.proofs):
        return "do not use it: the cut model does not equal the gated one", ""
    cost = _cost_of(record, rows)
    if cost is not None and cost.sign == "unknown":
        return "run it again: this version of headprune gives the cost an interval", ""
    if cost is None:
        return "measure it on rows with labels before you use it", ""
    tied = random_is_as_good(record, rows)
    more, command = _smaller(record, folder)
    if cost.sign == "above":
        return _against_cost(rows, tied), ""
    half = (cost.high - cost.low) / 2
    if is_one_of(cost.metric, POINTS) and half > _POINT:
        n = rows["base"].n_examples
        needed = math.ceil(n * (half / _POINT) ** 2 / 100) * 100
        return f"measure on about {needed:,} rows: {n:,} leave more than a point open", ""
    if tied:
        return f"{more}: with so many kept, any choice of heads does as well", command
    speed = headline_speed(record)
    if speed is not None and speed_words(speed)[1] != "good":
        return f"{more}, or time longer inputs and larger batches", command
    return more, command


def _against_cost(rows: Mapping[Role, QualityRow], tied: bool) -> str:
    if tied:
        return "keep more heads, or score on more calibration rows: the choice adds nothing yet"
    final = _final(rows)
    if "recovered" not in rows:
        return "recover it (`recover: lstsq` needs no training), or keep more heads"
    if final is not None and not final.trained:
        return "train it (`recover: finetune`), or keep more heads"
    return "keep more heads"


def _smaller(record: RunRecord, folder: str | None) -> tuple[str, str]:
    """Suggest half as many heads, with a command if that budget can be met."""
    counts = removed_counts(record)
    assert counts is not None
    half = (counts[1] - counts[0]).heads // 2
    recipe = recipe_file(record, folder)
    if not recipe or not _can_keep(record, half):
        return "remove more heads", ""
    out = f"{recipe.removesuffix('/recipe.yaml')}-{half}"
    command = f"headprune run {shlex.quote(recipe)} --set select.keep_heads={half}"
    return f"keep {half:,} heads", f"{command} --out {shlex.quote(out)}"


def _can_keep(record: RunRecord, heads: int) -> bool:
    """Whether a run with this budget in place of its own cannot be refused."""
    plan, select = record.plan, record.recipe.get("select")
    if plan is None or record.scores is None or not isinstance(select, Mapping):
        return False
    # The recipe has no other budget, and no rule that the new one may break.
    if plan.budget is None or select.get("keep_heads") != plan.budget.amount:
        return False
    if select.get("must_keep") or plan.settings.get("multiple_of", 1) != 1:
        return False
    # Query heads that share a key/value head are removed together.
    if any(site.n_kv_heads < site.n_query_heads for site in record.scores.sites):
        return False
    if record.scores.counts.neurons is not None:  # a budget of heads counts none of them
        return False
    fewest: int = max(1, plan.settings.get("min_heads", 1)) * len(plan.mask.rows)
    return fewest <= heads
