"""How `auto` chose the scorer: the candidates' losses on held-out rows, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.core.choice import Candidate, Choice
from headprune.core.record import RunRecord
from headprune.report.formats import fixed, signed


@dataclass(frozen=True)
class CandidateLine:
    """One formatted row; ``tone`` is good for the one that was taken."""

    name: str
    loss: str
    difference: str
    mark: str
    tone: str


@dataclass(frozen=True)
class ChoiceTable:
    """The table and what is said above and below it."""

    above: str
    rows: tuple[CandidateLine, ...]
    below: tuple[str, ...]


def choice_table(record: RunRecord) -> ChoiceTable | None:
    """The table of a run whose scorer ``auto`` chose; None for others."""
    choice = record.scores.choice if record.scores is not None else None
    if choice is None:
        return None
    refit = f" and refitted by {choice.refit}" if choice.refit else ""
    above = (
        f"Each candidate's plan ({choice.budget}) was cut{refit}, and judged by the loss of"
        f" {choice.n_examples:,} rows "
    )
    above += (
        f"that its refit had not seen. The whole model's loss there is {fixed(choice.whole, 4)}."
    )
    return ChoiceTable(
        above, tuple(_line(choice, one) for one in choice.candidates), tuple(_below(choice))
    )


def _line(choice: Choice, one: Candidate) -> CandidateLine:
    taken = one is choice.best
    same = taken or one.same_as == choice.chosen
    difference, low, high = (signed(x, 4) for x in (one.difference, one.low, one.high))
    above = "–" if same else f"{difference} [{low}, {high}]"
    return CandidateLine(one.name, fixed(one.loss, 4), above, choice.mark(one), "good" * taken)


def _below(choice: Choice) -> list[str]:
    confidence = f"{100 * choice.confidence:g} % confidence"
    lines = [
        f"The best candidate's loss is at most {fixed(choice.margin, 4)} below the chosen one's"
        f" ({confidence})."
    ]
    worth = choice.refitting
    if worth is not None:
        low, high = signed(worth.low, 4), signed(worth.high, 4)
        lines.append(
            f"Without {choice.refit} the loss of the chosen plan is {fixed(worth.loss, 4)}, a"
            f" difference of {signed(worth.loss - choice.best.loss, 4)} [{low}, {high}]"
            f" ({confidence})."
        )
    said = [choice.preferred, choice.doubt, choice.refit_doubt]
    return [*lines, *filter(None, said), *choice.notes]
