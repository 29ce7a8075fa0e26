"""Extractive question answering: a model's answers, with F1 and exact match as in SQuAD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from headprune.bench.quality import Quality, evaluate
from headprune.core.answers import exact_match, f1
from headprune.core.bars import bar
from headprune.core.errors import InvalidValue
from headprune.model.batches import Batches
from headprune.model.losses import inputs_of
from headprune.model.running import call, device_of, to_device, undisturbed

#: Most tokens of an answer, as in the usual evaluations of SQuAD.
LONGEST = 30


@dataclass(frozen=True)
class Question:
    """One question: its text and true answers, which the model's inputs do not have.

    Args:
        context: The text that the answer is in.
        answers: The true answers; none where the context has no answer.
        spans: For every input token its first character in the context and the one after its last;
            None for tokens outside the context.
        nothing: The token that means "no answer"; None where every question has one.
    """

    context: str
    answers: tuple[str, ...]
    spans: tuple[tuple[int, int] | None, ...]
    nothing: int | None = None


def answer(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    questions: Sequence[Question],
    *,
    longest: int = LONGEST,
) -> list[str]:
    """Answer every question, in the order of the batches.

    An answer is the span of the context whose first and last token have the highest sum of logits.
    It is empty where ``Question.nothing`` as both tokens has a higher one.

    Args:
        model: A Transformers model for extractive question answering; it does not change.
        batches: The model's inputs; answers in them are not read.
        questions: In the order of the batches.
        longest: Most tokens of an answer.
    """
    upcoming = iter(questions)  # one per row of the batches
    answers: list[str] = []
    device = device_of(model)
    with undisturbed(model, packed=True), torch.no_grad():
        for batch in bar(batches, "answers"):
            output = call(model, to_device(inputs_of(model, batch), device))
            starts = output["start_logits"].float().cpu()  # [batch, tokens]
            ends = output["end_logits"].float().cpu()
            of_batch = islice(upcoming, len(starts))
            for start, end, question in zip(starts, ends, of_batch, strict=True):
                answers.append(_best_span(start, end, question, longest))
    return answers


def _best_span(start: Tensor, end: Tensor, question: Question, longest: int) -> str:
    """Return the answer with the highest logits ``[tokens]`` of first and last token."""
    places = [i for i, span in enumerate(question.spans) if span is not None]
    if not places:  # the context was cut off
        return ""
    sums = start[places][:, None] + end[places][None, :]  # [first, last]
    # The last token is not before the first, and not too far behind it.
    allowed = torch.ones_like(sums, dtype=torch.bool).triu().tril(longest - 1)
    sums = sums.masked_fill(~allowed, float("-inf"))
    best = int(sums.argmax())
    none = question.nothing
    if none is not None and float(start[none] + end[none]) > float(sums.flatten()[best]):
        return ""
    row, column = divmod(best, len(places))  # of the matrix `sums`
    first = question.spans[places[row]]
    last = question.spans[places[column]]
    assert first is not None
    assert last is not None
    return question.context[first[0] : last[1]]


def evaluate_answers(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    questions: Sequence[Question],
    *,
    longest: int = LONGEST,
) -> Quality:
    """Compute the mean F1 of a model's answers, and its losses on the true answers.

    Args:
        model: See ``answer``.
        batches: As for ``answer``, with ``start_positions`` and ``end_positions``.
        questions: See ``answer``.
        longest: See ``answer``.

    Returns:
        The quality; ``more`` has the fraction of exact matches.

    Raises:
        InvalidValue: not one question per example.
    """
    # `evaluate` and `answer` both read all batches.
    reread = Batches.of(batches)
    quality = evaluate(model, reread)
    if len(questions) != quality.n_examples:
        must = f"one for each of {quality.n_examples} examples"
        raise InvalidValue("questions", must, len(questions))
    amounts = []
    exact = []
    texts = answer(model, reread, questions, longest=longest)
    for text, question in zip(texts, questions, strict=True):
        amounts.append(f1(text, question.answers))
        exact.append(exact_match(text, question.answers))
    return replace(
        quality,
        metric="f1",
        value=sum(amounts) / len(amounts),
        amounts=tuple(amounts),
        counts=(1.0,) * len(amounts),
        more={"exact_match": sum(exact) / len(exact)},
        outputs=tuple(texts),
    )
