"""The verdict on a run in a few words: what was removed, its cost, its gain, and what next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headprune.core.choice import Choice
from headprune.core.heads import HeadCounts
from headprune.core.metrics import (
    LOWER,
    MATTHEWS,
    POINTS,
    RATIO,
    beats_constant,
    drop,
    is_one_of,
)
from headprune.core.record import ClassRow, Comparison, QualityRow, RunRecord, SpeedRow
from headprune.report.formats import fixed, times
from headprune.report.quality import RECOVERED_RANDOM, Role, headline_rows, own_interval
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
#: How the chosen heads compare with random ones.
_BEAT_RANDOM = "the choice beat random heads"
_RANDOM_BETTER = "random heads did better"
_NOT_SHOWN = "random heads are not shown to be worse at this size"
_NOT_SHOWN_ALIKE = "after a refit, random heads are not shown to be worse"
_NOT_SHOWN_LOSS = "their held-out loss is not shown to be higher"


@dataclass(frozen=True)
class Verdict:
    """About thirty words, their clauses, and the figures behind them.

    Each part is empty where the record says nothing of it.
    """

    sentence: str
    cost: str = ""  # what was lost
    gain: str = ""  # speed
    random: str = ""  # whether the choice beat random heads
    details: str = ""  # intervals, rows and shapes
    next: str = ""  # what to try
    command: str = ""  # shell line for that

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.sentence, self.details, self.command)))


@dataclass(frozen=True)
class _Clause:
    """What the sentence says, and the figures behind it."""

    text: str
    detail: str = ""


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

    @property
    def is_visible(self) -> bool:
        """Whether it is a loss that does not round to 0: one that a reader sees."""
        return self.sign == "above" and not _is_zero(_scaled(self.metric, self.high)[0])

    @property
    def reversed(self) -> _Difference:
        """How much better the first model is."""
        return _Difference(self.metric, -self.drop, -self.high, -self.low)


def verdict(record: RunRecord, folder: str | None = None) -> Verdict:
    """Judge a run by its record alone.

    Args:
        record: Any record, also of a run that is not done.
        folder: The run's folder, for the command; default that of its recipe.

    >>> verdict(RunRecord("demo", "done", "save", "2026-01-01T00:00:00Z")).sentence
    'The run is done; its record holds no results.'
    """
    if record.status == "done" and _is_uncut(record):
        return Verdict(_uncut(record))
    rows = headline_rows(record)
    removed = removed_words(record)
    if not removed:
        return Verdict(_ended(record, _without_plan(record, rows)))
    clauses = [_cost(record, rows), _gain(record), _named(_random(record, rows), _units(record))]
    cost, gain, random = (clause.text for clause in clauses)
    details = _sentences([clause.detail for clause in clauses])
    text = f"Removing {removed} {_joined(cost, gain, random)}."
    after, command = "", ""
    if record.status == "done":
        after, command = _next(record, rows, folder)
    constant = at_chance(rows.get("base"), record.classes)
    if constant:
        details = f"{text} {details}"
        text = f"{constant} So its results say little about the cut."
    sentence = _ended(record, text)
    if after:
        sentence += f" Next: {after}."
    return Verdict(sentence, cost, gain, random, details, after, command)


def card_lines(record: RunRecord) -> list[str]:
    """What a model card says of a run: its verdict, and the quality before and after."""
    rows = headline_rows(record)
    judged = verdict(replace(record, status="done"))
    lines = [f"Verdict: {judged.sentence.partition(' Next: ')[0]}"]
    if judged.details:
        lines.append(f"In detail: {judged.details}")
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
    """The row at the shape of the budget, else with the most tokens per call.

    Both are fixed in advance: it is not the best row.
    """
    wanted = _speed_wanted(record)
    shape = (wanted.get("batch_size"), wanted.get("length"))
    for row in record.speed:
        if (row.batch, row.length) == shape:
            return row
    return max(record.speed, key=lambda row: (row.batch * row.length, row.batch), default=None)


def _speed_wanted(record: RunRecord) -> Mapping[str, Any]:
    """What a run with a latency table noted of its speed (``measure_speed``); else empty."""
    noted = record.metrics.get("speedup")
    return noted if isinstance(noted, Mapping) else {}


def _is_uncut(record: RunRecord) -> bool:
    """Whether there is a plan that removes nothing."""
    counts = removed_counts(record)
    return counts is not None and not counts[0].heads and not counts[0].neurons


def _uncut(record: RunRecord) -> str:
    counts = removed_counts(record)
    assert counts is not None
    assert record.plan is not None
    keeper = "budget allows" if record.plan.wanted else "plan keeps"
    return f"Nothing was removed: the {keeper} all {counts[1]}."


def _joined(cost: str, gain: str, random: str) -> str:
    """Join the clauses: ``cost and gain; random``."""
    comma = "," if "," in cost else ""
    return f"{cost}{comma} and {gain}; {random}"


def at_chance(base: QualityRow | None, classes: Sequence[ClassRow]) -> str:
    """Say that the whole model is not shown to beat a constant answer; empty where it is.

    Args:
        base: Its quality.
        classes: Its results per class; none for tasks without classes.
    """
    if base is None or not classes:
        return ""
    if base.metric == MATTHEWS:
        beaten = base.low is None or base.low > 0  # any constant answer has 0
    else:
        beaten = beats_constant([(row.n_examples, row.before) for row in classes])
    if beaten:
        return ""
    most = max(classes, key=lambda row: row.n_examples)
    return f"The whole model is not shown to do better than always answering {most.label!r}."


def _sentences(details: list[str]) -> str:
    """Write each known detail as a sentence."""
    return " ".join(f"{detail[0].upper()}{detail[1:]}." for detail in details if detail)


def _ended(record: RunRecord, text: str) -> str:
    """Put in front of the text how far an unfinished run came."""
    if record.status == "done":
        return text or "The run is done; its record holds no results."
    start = f"{_UNFINISHED[record.status]} {record.stage}"
    if not text:
        return f"{start}, before anything was measured."
    return f"{start}. Until then: {text[0].lower()}{text[1:]}"


def _without_plan(record: RunRecord, rows: Mapping[Role, QualityRow]) -> str:
    parts = []
    if record.scores is not None:
        parts.append(f"{record.scores.counts} scored, none removed")
    if "base" in rows:
        base = rows["base"]
        parts.append(f"{base.metric} {fixed(base.value, 3)} before the cut")
    return f"{'; '.join(parts)}." if parts else ""


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


def _cost(record: RunRecord, rows: Mapping[Role, QualityRow]) -> _Clause:
    base, final = rows.get("base"), _final(rows)
    if final is None:
        return _Clause("has no measured cost")
    if base is None:
        value = fixed(final.value, 3)
        return _Clause(f"has {final.metric} {value}, without a comparison")
    where = f"on {final.n_examples:,} {final.split} rows"
    values = f"{base.metric} {fixed(base.value, 3)} before, {fixed(final.value, 3)} after, {where}"
    cost = _cost_of(record, rows)
    if cost is None:
        return _Clause(f"changed {base.metric}", values)
    if cost.drop == cost.low == cost.high == 0:
        return _Clause("changed no result", values)
    text = _change(cost)
    if cost.sign == "unknown":
        return _Clause(text, f"{values}; the record has no interval")
    detail = f"{values}: {text}, {_interval(cost)}"
    if cost.drop == 0:
        text = f"did not change the {cost.metric}"
    elif cost.sign == "unclear":
        text += ", which chance can explain"
    return _Clause(text, detail)


def _change(cost: _Difference) -> str:
    """Say how much the metric changed: lost, gained, raised or lowered."""
    worse = cost.drop >= 0
    amount = _amount(cost)
    if is_one_of(cost.metric, POINTS):
        return f"{'cost' if worse else 'gained'} {amount} of {cost.metric}"
    return f"{'raised' if worse else 'lowered'} {cost.metric} by {amount}"


def _amount(difference: _Difference) -> str:
    number, unit = _scaled(difference.metric, abs(difference.drop))
    if difference.drop != 0 and _is_zero(number):
        number = f"less than {number[:-1]}1"
    return f"{number}{unit}"


def _interval(difference: _Difference) -> str:
    """Write the interval with the sign of the amount before it."""
    if difference.drop < 0:
        difference = difference.reversed
    ends = (difference.low, difference.high)
    low, high = (_scaled(difference.metric, end)[0] for end in ends)
    return f"95 % interval {low} to {high}"


def _is_zero(number: str) -> bool:
    """Whether a number is written as 0, 0.00 and the like."""
    return not number.strip("0.")


def _scaled(metric: str, amount: float) -> tuple[str, str]:
    """A drop as a number and its unit."""
    if is_one_of(metric, POINTS):
        return fixed(100 * amount, 2), " points"
    if is_one_of(metric, RATIO):
        return fixed(100 * amount, 2), " %"
    return fixed(amount, 4), ""


# -------------------------------------------------------------------------------------------- gain


def _gain(record: RunRecord) -> _Clause:
    row = headline_speed(record)
    if row is None:
        return _Clause("was not timed")
    words, tone = speed_words(row)
    where = f"speed at batch {row.batch:,} × {row.length:,} tokens"
    if words == "no usable timing":
        return _Clause("has no usable timing", f"{where}: {words}")
    ends = f"{where}: {times(row.ratio)}, 95 % interval {fixed(row.low, 2)} to {fixed(row.high, 2)}"
    detail = "; ".join([ends, *_other_shapes(record)])
    asked = _speed_wanted(record).get("asked")
    if isinstance(asked, int | float) and row.high < asked:
        return _Clause(f"made the model {times(row.ratio)} as fast, not {times(asked)}", detail)
    if tone == "good":
        return _Clause(f"made the model {times(row.ratio)} as fast", detail)
    if tone == "bad":
        return _Clause(f"made the model slower ({times(row.ratio)} as fast)", detail)
    return _Clause("gained no measurable speed", detail)


def _other_shapes(record: RunRecord) -> list[str]:
    """Count the shapes that are slower or no different, however fast the others are."""
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


@dataclass(frozen=True)
class _Chance:
    """Random heads compared with the chosen ones.

    Args:
        more: How much more the chosen ones lose.
        draws: Random plans.
        when: `` before recovery`` if the comparison is from before it; else empty.
        recovered: Whether random heads got the recovery, too.
    """

    more: _Difference
    draws: int
    when: str = ""
    recovered: bool = False

    @property
    def treated(self) -> str:
        """How both were treated."""
        return ", cut and recovered alike" if self.recovered else self.when


def _against_random(record: RunRecord, rows: Mapping[Role, QualityRow]) -> _Chance | None:
    """Compare the chosen heads with random ones; None where nothing does.

    Final models are compared where random heads got the same recovery, else both before it.
    """
    chosen, drawn, final = rows.get("chosen"), rows.get("random"), rows.get("recovered")
    if final is not None and _directed(final.metric):
        alike = record.compared(final.name, "random", final.metric, final.split)
        if alike is not None:
            name = f"{RECOVERED_RANDOM}{final.name}"
            draws = next((row.draws for row in record.quality if row.name == name), 1)
            return _Chance(_of(alike), draws, recovered=True)
    if chosen is None or drawn is None or not _directed(chosen.metric):
        return None
    # Under one budget with neurons the numbers of heads differ; the run compared both anyway.
    paired = record.compared(chosen.name, "random", chosen.metric, chosen.split)
    if chosen.kept != drawn.kept and paired is None:
        return None
    when = " before recovery" if final is not None else ""
    difference = _by_draws(chosen, drawn) if paired is None else _of(paired)
    return _Chance(difference, drawn.draws, when)


def _by_draws(chosen: QualityRow, drawn: QualityRow) -> _Difference:
    """Compare two rows of an older record, which has no comparison of them."""
    lost = drop(chosen.metric, drawn.value, chosen.value)
    if drawn.spread is None:
        return _Difference(chosen.metric, lost)
    # There are no rows to resample: two standard deviations of the draws.
    spread = 2 * abs(drop(chosen.metric, drawn.value, drawn.value + drawn.spread))
    return _Difference(chosen.metric, lost, lost - spread, lost + spread)


def _random_by_auto(choice: Choice, chance: _Chance | None) -> _Clause:
    where = f"on {choice.n_examples:,} held-out calibration rows"
    treated = "cut and refitted alike" if choice.refit else "cut alike"
    detail = f"random heads were {treated}, and their loss compared {where}"
    if choice.loses_to_random:
        return _Clause(_RANDOM_BETTER, detail)
    if not choice.beats_random:
        # The draws of the run, which nothing refitted, may show more.
        if chance is not None and chance.more.reversed.sign == "above":
            by_draws = _random_by_draws(chance)
            text = f"{by_draws.text}, but {_NOT_SHOWN_ALIKE if choice.refit else _NOT_SHOWN_LOSS}"
            return _Clause(text, f"{by_draws.detail}; {detail}")
        return _Clause(_NOT_SHOWN, detail)
    # A loss is compared here: accuracies may be the same.
    return _Clause("its held-out loss is lower than that of random heads", detail)


def _random(record: RunRecord, rows: Mapping[Role, QualityRow]) -> _Clause:
    scores = record.scores
    if scores is not None and scores.scorer == "random":
        return _Clause("its heads were chosen at random")
    chance = _against_random(record, rows)
    choice = _compared_by_auto(record, chance)
    if choice is not None:
        return _random_by_auto(choice, chance)
    if chance is None:
        return _Clause("it was not compared with random heads")
    return _random_by_draws(chance)


def _random_by_draws(chance: _Chance) -> _Clause:
    better = chance.more.reversed
    amount = f"{_amount(better)} of {better.metric}"
    if not is_one_of(better.metric, POINTS):
        amount = f"{_amount(better)} {better.metric}".replace("%", "% of")
    n = f"{chance.draws:,} draw{'s' if chance.draws != 1 else ''} of random heads{chance.treated}"
    if better.sign == "unknown":
        relation = "better" if better.drop > 0 else "worse"
        text = f"it is {relation} than the only draw of random heads{chance.when}"
        return _Clause(text, f"{n}: the difference is {amount}")
    relation = "worse" if better.drop < 0 else "better"
    detail = f"{n}: the choice is {relation} by {amount}, {_interval(better)}"
    texts = {"above": _BEAT_RANDOM, "below": _RANDOM_BETTER}
    text = texts.get(better.sign, _NOT_SHOWN)
    return _Clause(f"{text}{chance.when}", detail)


def _compared_by_auto(record: RunRecord, chance: _Chance | None) -> Choice | None:
    """The choice of `auto` where it refitted random heads alike, and nothing did for test rows."""
    choice = record.scores.choice if record.scores is not None else None
    if choice is None or (chance is not None and chance.recovered):
        return None
    return choice if any(one.scorer == "random" for one in choice.candidates) else None


def random_is_as_good(record: RunRecord, rows: Mapping[Role, QualityRow]) -> bool:
    """Whether random heads are not shown to be worse; False where nothing compares them."""
    chance = _against_random(record, rows)
    choice = _compared_by_auto(record, chance)
    if choice is not None:
        return not choice.beats_random
    return chance is not None and chance.more.sign in ("unclear", "above")


# -------------------------------------------------------------------------------------------- next


def _next(
    record: RunRecord, rows: Mapping[Role, QualityRow], folder: str | None
) -> tuple[str, str]:
    """Return what to try next, and a command for it where one is known to work."""
    # NaN is no pass.
    if not all(proof.max_difference <= proof.tolerance for proof in record.proofs):
        return "do not use it: the cut model does not equal the gated one", ""
    if at_chance(rows.get("base"), record.classes):
        return "check that labels and model belong together, or train the model first", ""
    cost = _cost_of(record, rows)
    if cost is not None and cost.sign == "unknown":
        return "run it again to get an interval for the cost", ""
    if cost is None:
        return "measure it on rows with labels before you use it", ""
    if cost.is_visible:
        return _against_cost(record, rows, random_is_as_good(record, rows)), ""
    half = (cost.high - cost.low) / 2
    if is_one_of(cost.metric, POINTS) and half > _POINT:
        n = rows["base"].n_examples
        needed = math.ceil(n * (half / _POINT) ** 2 / 100) * 100
        return _more_rows(record, n, needed, folder)
    more, command = _smaller(record, folder)
    speed = headline_speed(record)
    if speed is not None and speed_words(speed)[1] != "good":
        return f"{more}, or time longer inputs and larger batches", command
    return more, command


def _against_cost(record: RunRecord, rows: Mapping[Role, QualityRow], tied: bool) -> str:
    more = f"keep more {_units(record)}"
    if tied:
        return f"{more}, or score on more calibration rows"
    final = _final(rows)
    if "recovered" not in rows:
        return f"recover it (`recover: lstsq` needs no training), or {more}"
    if final is not None and not final.trained:
        return f"train it (`recover: finetune`), or {more}"
    return more


def _units(record: RunRecord) -> str:
    """What a run removes, as text."""
    has_neurons = record.scores is not None and record.scores.counts.neurons is not None
    return "heads and neurons" if has_neurons else "heads"


def _named(clause: _Clause, units: str) -> _Clause:
    """A clause about random heads, of a run that removes ``units``."""
    words = f"random {units}"
    return _Clause(
        clause.text.replace("random heads", words), clause.detail.replace("random heads", words)
    )


def _rows_of_source(parts: Iterable[Any], source: Any) -> int:
    """Rows of all parts that were drawn from ``source``."""
    same = [part for part in parts if isinstance(part, Mapping) and part["from"] == source]
    return sum(part["rows"] for part in same)


def _more_rows(record: RunRecord, n: int, needed: int, folder: str | None) -> tuple[str, str]:
    """Suggest more test rows, with a command where the data has them."""
    unsure = f"with {n:,} the cost is uncertain by more than a point"
    parts = [record.rows.get(name) for name in ("test", "train", "validation")]
    test, train = parts[:2]
    if not isinstance(test, Mapping) or not isinstance(train, Mapping) or "from" not in test:
        return f"measure on about {needed:,} test rows; {unsure}", ""
    # Test rows of a split of their own cannot become more.
    total = _rows_of_source(parts, test["from"])
    share = math.ceil(100 * needed / total) / 100
    recipe = recipe_file(record, folder)
    enough = share <= 0.5 and _rows_to_train(record, total - math.ceil(share * total))
    if train["from"] != test["from"] or not enough or not recipe:
        return f"collect labelled rows until about {needed:,} of them are test rows; {unsure}", ""
    out = f"{recipe.removesuffix('/recipe.yaml')}-test"
    command = f"headprune run {shlex.quote(recipe)} --set data.test_holdout={share:g}"
    return (
        f"measure on about {needed:,} of the {total:,} rows; {unsure}",
        f"{command} --out {shlex.quote(out)}",
    )


def _rows_to_train(record: RunRecord, remaining: int) -> bool:
    """Whether calibration rows remain where validation rows are drawn from the same rows."""
    data = record.recipe.get("data") or {}
    holdout, calibration = data.get("holdout", 0), data.get("calibration", 0)
    # A whole number counts rows; a fraction takes a part of what remains, and cannot take all.
    return not isinstance(holdout, int) or remaining >= holdout + calibration


def _smaller(record: RunRecord, folder: str | None) -> tuple[str, str]:
    """Suggest half as many heads, with a command if that budget can be met."""
    counts = removed_counts(record)
    assert counts is not None
    half = (counts[1] - counts[0]).heads // 2
    recipe = recipe_file(record, folder)
    if not recipe or not _can_keep(record, half):
        return f"remove more {_units(record)}", ""
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
