"""How `auto` chose the scorer: a table of the candidates' losses on held-out rows."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.core.choice import Candidate, Choice
from headprune.core.record import RunRecord
from headprune.report.formats import fixed, signed


@dataclass(frozen=True)
class CandidateLine:
    """One formatted row; ``tone`` is good for the chosen candidate, else empty."""

    name: str
    loss: str  # on held-out rows
    perplexity: str  # the same as a perplexity, where losses are those of a text
    difference: str  # from the chosen one, with its interval
    mark: str  # such as `chosen` or `ties`
    tone: str


@dataclass(frozen=True)
class ChoiceTable:
    """The table, and the sentences above and below it."""

    above: str
    is_text: bool  # whether there are perplexities
    rows: tuple[CandidateLine, ...]
    below: tuple[str, ...]


def choice_table(record: RunRecord) -> ChoiceTable | None:
    """Format the table of a run whose scorer ``auto`` chose; None for other runs."""
    if record.scores is None or record.scores.choice is None:
        return None
    choice = record.scores.choice
    refit = f" and {choice.refitted}" if choice.refit else ""
    above = (
        f"Each candidate's plan ({choice.budget}) was cut{refit}, and judged by the loss of"
        f" {choice.n_examples:,} rows that its refit had not seen. The whole model's loss there is"
        f" {fixed(choice.whole, choice.decimals)}"
    )
    whole = choice.perplexity(choice.whole)
    above += f", its perplexity {whole}." if whole else "."
    lines = tuple(_line(choice, candidate) for candidate in choice.candidates)
    return ChoiceTable(above, choice.is_text, lines, tuple(_below(choice)))


def _line(choice: Choice, candidate: Candidate) -> CandidateLine:
    is_chosen = candidate is choice.best
    # Candidates that remove the same heads have no difference to show.
    difference = "–"
    digits = choice.decimals
    if not is_chosen and candidate.same_as != choice.chosen:
        interval = f"[{signed(candidate.low, digits)}, {signed(candidate.high, digits)}]"
        difference = f"{signed(candidate.difference, digits)} {interval}"
    tone = "good" if is_chosen else ""
    mark = choice.mark(candidate)
    return CandidateLine(
        name=candidate.name,
        loss=fixed(candidate.loss, digits),
        perplexity=choice.perplexity(candidate.loss),
        difference=difference,
        mark=mark,
        tone=tone,
    )


def _below(choice: Choice) -> list[str]:
    """Write the sentences below the table: the margin, the refit's gain, and doubts."""
    confidence = f"{100 * choice.confidence:g} % confidence"
    digits = choice.decimals
    lines = [
        f"The best candidate's loss is at most {fixed(choice.margin, digits)} below the chosen"
        f" one's ({confidence})."
    ]
    refitting = choice.refitting
    if refitting is not None:
        gain = signed(refitting.loss - choice.best.loss, digits)
        interval = f"[{signed(refitting.low, digits)}, {signed(refitting.high, digits)}]"
        without = fixed(refitting.loss, digits)
        lines.append(
            f"Without {choice.refit} the loss of the chosen plan is {without}, a"
            f" difference of {gain} {interval} ({confidence})."
        )
    # Sentences that do not apply are empty.
    lines += filter(None, (choice.preferred, choice.doubt, choice.refit_doubt))
    return [*lines, *choice.notes]
