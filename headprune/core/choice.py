"""Choice: the scorer that `auto` chose, the loss of the others, and how sure the choice is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headprune.core.codec import LATER, FrozenDict

#: The candidate that every other one has to beat.
RANDOM = "random"
#: The most that the chosen one's loss, or perplexity, may be above the lowest, as a fraction of it.
#: A few rows with large losses make the standard error larger than any difference that matters.
_MOST_ABOVE = 0.1
#: Decimals of losses in tables: so many, and more where differences are small.
_DECIMALS = 4
_MOST_DECIMALS = 8
#: Title of a column of tables, where losses are those of a text.
_PERPLEXITY = "perplexity  "


def candidate_name(scorer: str, settings: Mapping[str, Any], by_kind: bool) -> str:
    """Name a candidate for tables.

    >>> candidate_name("surgeon", {"curvature": "logits"}, True)
    'surgeon (curvature=logits), by kind'
    """
    given = ", ".join(f"{key}={value}" for key, value in settings.items())
    name = f"{scorer} ({given})" if given else scorer
    return f"{name}, by kind" if by_kind else name


def most_above(lowest: float, is_text: bool) -> float:
    """How far the chosen candidate's loss may be above the lowest, whatever the standard error.

    >>> most_above(0.5, is_text=False)
    0.05
    """
    # A loss that rises by log(1.1) makes the perplexity 1.1 times as large.
    return math.log1p(_MOST_ABOVE) if is_text else _MOST_ABOVE * abs(lowest)


@dataclass(frozen=True)
class Candidate:
    """A scorer's plan and its loss on rows that its refit has not seen.

    Args:
        scorer: Registered name.
        settings: Its settings, where they are not the defaults.
        by_kind: Whether each kind of attention met the budget by itself.
        loss: Mean loss of the held-out rows.
        difference: ``loss`` minus that of the chosen candidate.
        low: Lower end of the difference's interval. Of random draws, that of their mean, or the
            lowest difference of a draw if that is lower.
        high: Upper end, or the highest difference of a draw.
        same_as: An earlier candidate that keeps the same heads; empty where there is none.
    """

    # The plan.
    scorer: str
    settings: FrozenDict
    by_kind: bool
    # Its loss on held-out rows, and how much more that is than the chosen one's.
    loss: float
    difference: float
    low: float
    high: float
    same_as: str = ""

    @property
    def name(self) -> str:
        """Its name in tables."""
        return candidate_name(self.scorer, self.settings, self.by_kind)


@dataclass(frozen=True)
class Refitting:
    """Effect of the refit: the chosen plan's loss without it, on the same held-out rows.

    Args:
        loss: Mean loss of the cut model without a refit.
        low: Lower end of the interval of ``loss`` minus the loss with the refit.
        high: Upper end.
    """

    loss: float
    low: float
    high: float

    @property
    def harms(self) -> bool:
        """Whether the refit raises the loss: the whole interval is below 0."""
        return self.high < 0

    @property
    def helps(self) -> bool:
        """Whether the refit lowers the loss: the whole interval is above 0."""
        return self.low > 0


@dataclass(frozen=True)
class Choice:
    """The candidates of `auto` and the chosen one.

    Args:
        candidates: From the lowest loss to the highest; the draws of ``random`` as one, their mean.
        chosen: ``name`` of the chosen one.
        budget: The budget that all of them meet, as text.
        refit: Recovery that was applied to each cut model before its loss; empty for none.
        n_examples: Held-out rows.
        whole: Mean loss of the uncut model on the same rows.
        confidence: Confidence level of all intervals together.
        notes: Messages for the user.
        refitting: Effect of the refit; None where there was none.
        is_text: Whether losses are those of a text's tokens, so that tables show perplexities.
        selector: That made the plans; empty in older files.
        n_refitted: Rows that each refit was fitted to, on average; 0 for no refit and in older
            files.
    """

    candidates: tuple[Candidate, ...]
    chosen: str
    budget: str
    refit: str
    n_examples: int
    whole: float
    confidence: float = 0.95
    notes: tuple[str, ...] = ()
    refitting: Refitting | None = field(default=None, metadata=LATER)
    is_text: bool = field(default=False, metadata=LATER)
    selector: str = field(default="", metadata=LATER)
    n_refitted: int = field(default=0, metadata=LATER)

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return next(one for one in self.candidates if one.name == self.chosen)

    @property
    def _scored(self) -> list[Candidate]:
        """All candidates but the random draws."""
        return [one for one in self.candidates if one.scorer != RANDOM]

    @property
    def preferred(self) -> str:
        """Why the chosen one is not the candidate with the lowest loss; empty where it is."""
        # Candidates are sorted by their loss.
        lowest = self._scored[0]
        if lowest.loss == self.best.loss:
            return ""
        within = "one standard error"
        # Older files may hold a choice by one standard error alone.
        if self.best.loss - lowest.loss <= most_above(lowest.loss, self.is_text):
            within += f" and {100 * _MOST_ABOVE:g} %"
        return (
            f"{self.chosen} comes before {lowest.name} in the list of candidates, and its loss is"
            f" within {within} of the lowest."
        )

    @property
    def by_kind(self) -> bool:
        """Whether the budget holds for each kind of attention by itself."""
        return self.best.by_kind

    @property
    def ties(self) -> tuple[Candidate, ...]:
        """Other candidates whose loss these rows cannot distinguish from the chosen one's.

        Random draws and candidates that keep the chosen one's heads do not count.
        """
        # The interval of the difference reaches 0 or below.
        ties = []
        for one in self._scored:
            is_other = one is not self.best and one.same_as != self.chosen
            if is_other and one.low <= 0:
                ties.append(one)
        return tuple(ties)

    @property
    def margin(self) -> float:
        """How much lower another candidate's loss may be, at the confidence of the choice."""
        # ``low`` is the lower end of a candidate's loss minus the chosen one's.
        gaps = [-one.low for one in self._scored]
        return max([0.0, *gaps])

    @property
    def beats_random(self) -> bool:
        """Whether random heads are shown to be worse on average, and none of the draws is better.

        True where none were drawn.
        """
        return all(one.low > 0 for one in self.candidates if one.scorer == RANDOM)

    @property
    def loses_to_random(self) -> bool:
        """Whether random heads are shown to be better on average, and no draw is worse."""
        return any(one.high < 0 for one in self.candidates if one.scorer == RANDOM)

    @property
    def are_all_equal(self) -> bool:
        """Whether all of several candidates keep the same heads, and random draws lose as much."""
        others = [one for one in self.candidates if one is not self.best]
        for one in others:
            is_equal = one.low == one.high == 0
            if not is_equal or (one.scorer != RANDOM and one.same_as != self.chosen):
                return False
        return bool(others)

    @property
    def doubt(self) -> str:
        """A warning that random heads may be as good, or are better; empty where they are worse."""
        if self.are_all_equal:
            return f"There was nothing to choose: every plan keeps the same heads ({self.budget})."
        if self.beats_random:
            return ""
        alike = ", refitted alike" if self.refit else ""
        if self.loses_to_random:
            comma = "," if alike else ""
            return f"On these rows random heads{alike}{comma} did better than the chosen ones."
        return f"These rows do not show that the chosen heads are better than random ones{alike}."

    @property
    def tie_note(self) -> str:
        """Which other plans these rows cannot distinguish from the chosen one; empty for none."""
        # Of candidates that keep the same heads, the first one stands for all.
        others = [one.name for one in self.ties if not one.same_as]
        if not others:
            return ""
        names = f"{', '.join([self.chosen, *others[:-1]])} and {others[-1]}"
        return f"These rows do not show a difference between {names}, which keep different heads."

    @property
    def decimals(self) -> int:
        """Decimals of losses in tables, enough to show the smallest interval of a difference."""
        widths = []
        for one in self.candidates:
            width = max(abs(one.low), abs(one.high))
            if one is not self.best and width:
                widths.append(width)
        # Two significant digits where four decimals would show fewer.
        smallest = min(widths, default=1.0)
        if smallest >= 5 * 10**-_DECIMALS or not math.isfinite(smallest):
            return _DECIMALS
        return min(_MOST_DECIMALS, math.ceil(-math.log10(smallest)) + 1)

    @property
    def refitted(self) -> str:
        """How each cut model was refitted, as text; empty where it was not."""
        if not self.refit:
            return ""
        if not self.n_refitted:
            return f"refitted by {self.refit}"
        return f"refitted by {self.refit} on {self.n_refitted:,} of {self.n_examples:,} rows"

    @property
    def _rows(self) -> str:
        """The rows of the losses, as text."""
        if self.n_refitted:
            return "the other rows, in turn"
        return f"{self.n_examples:,} held-out rows"

    @property
    def unrefitted(self) -> str:
        """Name of the chosen plan without its refit in tables."""
        return f"{self.chosen}, without {self.refit}"

    @property
    def refit_doubt(self) -> str:
        """A warning that the refit harms, or is not shown to help; empty where it helps."""
        if self.refitting is None or self.refitting.helps:
            return ""
        n, refitting = self.decimals, self.refitting
        losses = f"loss {self.best.loss:.{n}f} with it, {refitting.loss:.{n}f} without"
        losses += f", a difference of [{refitting.low:+.{n}f}, {refitting.high:+.{n}f}]"
        if self.refitting.harms:
            return (
                f"Fitted to part of these rows, {self.refit} makes the cut model worse on the"
                f" others ({losses}). Give more calibration rows, or compare with a run without it."
            )
        return f"These rows do not show that {self.refit} helps ({losses})."

    def perplexity(self, loss: float) -> str:
        """The exponential of a mean loss, for tables; empty where losses are not of a text.

        Every row weighs alike. ``evaluate`` weighs a text's rows by their tokens.
        """
        if not self.is_text:
            return ""
        # Above this, the exponential is no float.
        return f"{math.exp(loss):.4g}" if loss < 700 else "over 1e304"

    def _cells(self, loss: float) -> str:
        """The loss, and its perplexity where there is one, as they stand in the table."""
        cells = f"{loss:.{self.decimals}f}  "
        return f"{cells}{self.perplexity(loss):<{len(_PERPLEXITY)}}" if self.is_text else cells

    def mark(self, one: Candidate) -> str:
        """A candidate's remark in tables: chosen, ties, or whose heads it keeps."""
        if one is self.best:
            return "chosen"
        if one.same_as:
            return f"the heads of {one.same_as}"
        return "ties" if one in self.ties else ""

    def __str__(self) -> str:
        refit = f", {self.refitted}" if self.refit else ""
        lines = [f"auto chose {self.best.name}: {self.budget}{refit}, loss of {self._rows}"]
        # One column for names, also those of lines that are no candidates.
        names = ["whole model", *(one.name for one in self.candidates)]
        if self.refitting is not None:
            names.append(self.unrefitted)
        width = max(map(len, names))
        level = f"{100 * self.confidence:g} %"
        n = self.decimals
        header = _PERPLEXITY if self.is_text else ""
        title = f"{'loss':<{n + 2}}  {header}minus the chosen one's [{level}]"
        lines.append(f"  {'':<{width}}  {title}")
        lines.append(f"  {'whole model':<{width}}  {self._cells(self.whole)}".rstrip())
        if self.refitting is not None:
            lines.append(
                f"  {self.unrefitted:<{width}}  {self._cells(self.refitting.loss)}".rstrip()
            )
        for one in self.candidates:
            interval = ""
            if one is not self.best:
                # A small negative number would round to "-0.0000"; adding 0.0 removes its sign.
                ends = [round(end, n) + 0.0 for end in (one.difference, one.low, one.high)]
                interval = "{:+.{n}f} [{:+.{n}f}, {:+.{n}f}]".format(*ends, n=n)
            cells, mark = self._cells(one.loss), self.mark(one)
            lines.append(f"  {one.name:<{width}}  {cells}{interval:<{3 * n + 16}} {mark}".rstrip())
        lines.append(
            f"  the best candidate's loss is at most {self.margin:.{n}f} below that of"
            f" {self.chosen} ({100 * self.confidence:g} % confidence)"
        )
        # Each is empty where there is none.
        sentences = (self.preferred, self.doubt, self.refit_doubt)
        lines += [f"  {sentence}" for sentence in sentences if sentence]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
