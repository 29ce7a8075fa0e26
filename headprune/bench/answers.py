"""Answers of a model that points into a text, and how good they are: F1 and exact match as SQuAD
defines them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from headprune.bench.quality import Quality, evaluate
from headprune.core.answers import exact_match, f1
from headprune.core.errors import InvalidValue
from headprune.model.batches import Batches
from headprune.model.losses import inputs_of
from headprune.model.running import call, device_of, to_device, undisturbed

#: Tokens of an answer at most, as the usual evaluations of SQuAD have it.
LONGEST = 30


@dataclass(frozen=True)
class Question:
    """What is known of one question beside the model's inputs.

    Args:
        context: The text that the answer is in.
        answers: The true answers; none where the context has no answer.
        spans: For every token of the inputs its first character in the context and the one after
            its last; None for tokens that are not of the context.
        nothing: The token at which a model points to say that there is no answer; None where it
            always has to give one.
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
    """The model's answer to every question, in the order of the batches: the piece of the context
    with the highest sum of the logits of its first and its last token; empty where pointing at
    ``Question.nothing`` twice has a higher one.

    Args:
        model: A Transformers model with a head for extractive question answering; left as it was
            found.
        batches: What the model takes; answers that they hold are not read.
        questions: In the order of the batches.
        longest: Tokens of an answer at most.
    """
    asked, found = iter(questions), []
    device = device_of(model)
    with undisturbed(model, packed=True), torch.no_grad():
        for batch in batches:
            output = call(model, to_device(inputs_of(model, batch), device))
            starts, ends = (output[f"{name}_logits"].float().cpu() for name in ("start", "end"))
            found += list(_pointed_at(starts, ends, asked, longest))
    return found


def _pointed_at(
    starts: Tensor, ends: Tensor, asked: Iterator[Question], longest: int
) -> Iterator[str]:
    for start, end, question in zip(starts, ends, islice(asked, len(starts)), strict=True):
        places = [i for i, span in enumerate(question.spans) if span is not None]
        if not places:  # nothing of the context was left
            yield ""
            continue
        sums = start[places][:, None] + end[places][None, :]
        lawful = torch.ones_like(sums, dtype=torch.bool).triu().tril(longest - 1)
        sums = sums.masked_fill(~lawful, float("-inf"))
        best = int(sums.argmax())
        first, last = (question.spans[places[i]] for i in divmod(best, len(places)))
        assert first is not None
        assert last is not None
        none = question.nothing
        silent = none is not None and float(start[none] + end[none]) > float(sums.flatten()[best])
        yield "" if silent else question.context[first[0] : last[1]]


def evaluate_answers(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    questions: Sequence[Question],
    *,
    longest: int = LONGEST,
) -> Quality:
    """Mean F1 of a model's answers (``Quality.more`` has the share of exact matches), and its
    losses on the true ones.

    Args:
        model: See ``answer``.
        batches: With ``start_positions`` and ``end_positions``, too.
        questions: See ``answer``.
        longest: See ``answer``.

    Raises:
        InvalidValue: there is not one question an example.
    """
    read = Batches.of(batches)  # twice
    quality = evaluate(model, read)
    if len(questions) != quality.n_examples:
        raise InvalidValue(
            "questions", f"one for each of {quality.n_examples} examples", len(questions)
        )
    said = answer(model, read, questions, longest=longest)
    amounts = tuple(f1(text, q.answers) for text, q in zip(said, questions, strict=True))
    exact = [exact_match(text, q.answers) for text, q in zip(said, questions, strict=True)]
    counts = (1.0,) * len(said)
    more = {"exact_match": sum(exact) / len(exact)}
    return replace(
        quality,
        metric="f1",
        value=sum(amounts) / len(amounts),
        amounts=amounts,
        counts=counts,
        more=more,
    )
