"""Check and encode questions about a text, with rows as in SQuAD."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from headprune.bench.answers import Question
from headprune.core.errors import InvalidValue
from headprune.data.features import Example, row_of
from headprune.recipes.schema import DataSection

#: Position of an answer that was cut off: beyond every batch, so that the default loss ignores it.
BEYOND = 2**31 - 1

#: Rows that are tokenised together: the positions of tokens take far more memory than the tokens.
_AT_ONCE = 1000

#: First and last character of a token in the context; None for tokens of the question and others.
_Span = tuple[int, int] | None


def check_answers(rows: Any, section: DataSection, label: str, role: str) -> None:
    """Refuse rows whose answers do not stand in their context.

    Raises:
        InvalidValue: the first of them.
    """
    column = section.text_columns[1]
    for i, (context, answers) in enumerate(zip(rows[column], rows[label], strict=True)):
        where = f"data: {role}, row {i}"
        texts, starts = _list(answers, "text"), _list(answers, "answer_start")
        if texts is None or starts is None or len(texts) != len(starts):
            must = "answered with {text: [...], answer_start: [...]}, one start per text"
            raise InvalidValue(where, must, repr(answers)[:80])
        for text, start in zip(texts, starts, strict=True):
            if not isinstance(text, str) or not text or not isinstance(start, int) or start < 0:
                must = "answered with a text and the number of its first character"
                raise InvalidValue(where, must, repr(answers))
            if context[start : start + len(text)] != text:
                must = f"an answer that stands in column {column!r} from character {start} on"
                hint = "data.text names the column of the question first, then that of the context."
                raise InvalidValue(where, must, repr(text), hint)


def _list(answers: Any, key: str) -> Sequence[Any] | None:
    value = answers.get(key) if isinstance(answers, Mapping) else None
    return value if isinstance(value, (list, tuple)) else None


def encode_questions(
    rows: Any,
    section: DataSection,
    label: str,
    tokenizer: Any,
    unanswerable: bool,
) -> Iterator[tuple[Example, Question]]:
    """Yield an example and a question per row.

    A context that is too long is cut at its end: a row has only one window.

    Args:
        rows: The rows.
        section: Columns of the question and the context, and the longest length of both together.
        label: The column of answers.
        tokenizer: A fast tokenizer, which knows the positions of its tokens in the text.
        unanswerable: Whether some questions have no answer; the answer is then the ``[CLS]`` token.

    Raises:
        InvalidValue: a tokenizer that lacks one of these, or a question that leaves no room for
            its context.
    """
    if not getattr(tokenizer, "is_fast", False):
        must = "a model with a fast tokenizer, which knows where its tokens stand in the text"
        raise InvalidValue("model.path", must, type(tokenizer).__name__)
    if unanswerable and tokenizer.cls_token_id is None:
        must = "questions with an answer: the model has no [CLS] token to say that there is none"
        raise InvalidValue("data", must, "some without", "Leave these rows out.")
    if section.max_length is not None:
        _check_room(list(rows[section.text_columns[0]]), section.max_length, tokenizer)
    for start in range(0, len(rows), _AT_ONCE):
        yield from _encoded(rows[start : start + _AT_ONCE], section, label, tokenizer, unanswerable)


def _encoded(
    rows: Mapping[str, Any],
    section: DataSection,
    label: str,
    tokenizer: Any,
    unanswerable: bool,
) -> Iterator[tuple[Example, Question]]:
    question_column, context_column = section.text_columns
    questions, contexts = rows[question_column], rows[context_column]
    encoded = tokenizer(
        questions,
        contexts,
        truncation="only_second",
        max_length=section.max_length,
        return_offsets_mapping=True,
    )
    # [rows, tokens, 2]: first and last character of each token in its own text.
    offsets = encoded.pop("offset_mapping")
    for i, (context, answers) in enumerate(zip(contexts, rows[label], strict=True)):
        inputs = row_of(encoded, i)
        spans = _context_spans(offsets[i], encoded.sequence_ids(i))
        no_answer = None
        if unanswerable:
            no_answer = inputs["input_ids"].index(tokenizer.cls_token_id)
        first, last = _answer_tokens(spans, answers, no_answer)
        example = {**inputs, "start_positions": first, "end_positions": last}
        yield example, Question(context, tuple(answers["text"]), spans, no_answer)


def _context_spans(
    offsets: Sequence[tuple[int, int]],
    parts: Sequence[int | None],
) -> tuple[_Span, ...]:
    """Return the characters of each token of the context."""
    spans: list[_Span] = []
    for (start, end), part in zip(offsets, parts, strict=True):
        in_context = part == 1 and end > start  # part 0 is the question
        spans.append((start, end) if in_context else None)
    return tuple(spans)


def _check_room(questions: Sequence[str], max_length: int, tokenizer: Any) -> None:
    lengths = list(map(len, tokenizer(questions, add_special_tokens=False)["input_ids"]))
    needed = max(lengths) + tokenizer.num_special_tokens_to_add(pair=True)
    if needed >= max_length:  # at least one token of context must fit
        longest = questions[lengths.index(max(lengths))]
        must = f"above {needed}, for every question and some of its context"
        raise InvalidValue("data.max_length", must, f"{max_length}, and one asks {longest!r}")


def _answer_tokens(
    spans: Sequence[_Span],
    answers: Mapping[str, Any],
    no_answer: int | None,
) -> tuple[int, int]:
    """Return first and last token of the first answer."""
    if not answers["text"]:
        assert no_answer is not None
        return no_answer, no_answer
    # Characters of the answer: start <= c < end.
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    inside = []
    last_character = 0
    for i, span in enumerate(spans):
        if span is None:
            continue
        last_character = max(last_character, span[1])
        if span[1] > start and span[0] < end:
            inside.append(i)
    # The context was cut before the answer's end.
    if not inside or last_character < end:
        return BEYOND, BEYOND
    return inside[0], inside[-1]


def has_unanswerable(splits: Iterable[Any], label: str) -> bool:
    """Whether a question of these rows has no answer, as in SQuAD 2."""
    all_answers = chain.from_iterable(rows[label] for rows in splits)
    return any(not answers["text"] for answers in all_answers)


def notes_on_lost_answers(
    examples: Mapping[str, Sequence[Example]],
    max_length: int | None,
) -> tuple[str, ...]:
    """Return warnings about questions whose answer was cut off with the end of their context.

    Raises:
        InvalidValue: every train row has lost its answer.
    """
    notes = []
    for name, rows in examples.items():
        lost = sum(example["start_positions"] == BEYOND for example in rows)
        if name == "train" and rows and lost == len(rows):
            must = "long enough for the answer of some train row"
            raise InvalidValue("data.max_length", must, max_length)
        if lost:
            notes.append(
                f"{lost} of {len(rows)} {name} questions have their answer beyond data.max_length,"
                f" {max_length} tokens: they add nothing to the loss, but count like any other in"
                " F1 and exact match"
            )
    return tuple(notes)
