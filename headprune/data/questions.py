"""Questions about a text, rows as SQuAD has them: what is checked, and where an answer lies among
the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headprune.bench.answers import Question
from headprune.core.errors import InvalidValue
from headprune.data.features import Example
from headprune.recipes.schema import DataSection

#: Where an answer "stands" that was cut off: beyond every batch, so that the default loss leaves it
#: out.
BEYOND = 2**31 - 1

#: Rows that are tokenised together: where tokens stand takes far more memory than the tokens.
_AT_ONCE = 1000


def check_answers(rows: Any, section: DataSection, label: str, role: str) -> None:
    """Refuses rows whose answers do not stand in their context.

    Raises:
        InvalidValue: the first of them.
    """
    contexts = rows[section.text_columns[1]]
    for i, (context, answers) in enumerate(zip(contexts, rows[label], strict=True)):
        where = f"data: {role}, row {i}"
        texts, starts = (_list(answers, key) for key in ("text", "answer_start"))
        if texts is None or starts is None or len(texts) != len(starts):
            must = "answered with {text: [...], answer_start: [...]}, one start a text"
            raise InvalidValue(where, must, repr(answers)[:80])
        for text, start in zip(texts, starts, strict=True):
            if not isinstance(text, str) or not text or not isinstance(start, int) or start < 0:
                raise InvalidValue(
                    where,
                    "answered with a text and the number of its first character",
                    repr(answers),
                )
            if context[start : start + len(text)] != text:
                must = (
                    f"an answer that stands in column {section.text_columns[1]!r} from character"
                    f" {start} on"
                )
                hint = "data.text names the column of the question first, then that of the context."
                raise InvalidValue(where, must, repr(text), hint)


def _list(answers: Any, key: str) -> Sequence[Any] | None:
    found = answers.get(key) if isinstance(answers, Mapping) else None
    return found if isinstance(found, (list, tuple)) else None


def encode_questions(
    rows: Any, section: DataSection, label: str, tokenizer: Any, unanswerable: bool
) -> Iterator[tuple[Example, Question]]:
    """An example and a question for every row. A context that is too long is cut at its end: there
    is one window a row.

    Args:
        rows: The rows.
        section: Columns of the question and the context, and the longest length of both together.
        label: The column of answers.
        tokenizer: A fast one, which knows where its tokens stand in the text.
        unanswerable: Whether some questions of the data have no answer; a model then says so at its
            ``[CLS]`` token.

    Raises:
        InvalidValue: a tokenizer that cannot serve, or a question that leaves no room for its
            context.
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
    rows: Mapping[str, Any], section: DataSection, label: str, tokenizer: Any, unanswerable: bool
) -> Iterator[tuple[Example, Question]]:
    asked, contexts = (rows[name] for name in section.text_columns)
    limit = {
        "truncation": "only_second",
        "max_length": section.max_length,
        "return_offsets_mapping": True,
    }
    encoded = tokenizer(asked, contexts, **limit)
    offsets = encoded.pop("offset_mapping")
    for i, (context, answers) in enumerate(zip(contexts, rows[label], strict=True)):
        inputs = {name: encoded[name][i] for name in encoded}
        of_context = [part == 1 for part in encoded.sequence_ids(i)]
        spans = tuple(
            (a, b) if mine and b > a else None
            for (a, b), mine in zip(offsets[i], of_context, strict=True)
        )
        nothing = inputs["input_ids"].index(tokenizer.cls_token_id) if unanswerable else None
        first, last = _tokens(spans, answers, nothing)
        example = {**inputs, "start_positions": first, "end_positions": last}
        yield example, Question(context, tuple(answers["text"]), spans, nothing)


def _check_room(asked: Sequence[str], max_length: int, tokenizer: Any) -> None:
    lengths = [len(ids) for ids in tokenizer(asked, add_special_tokens=False)["input_ids"]]
    needed = max(lengths) + tokenizer.num_special_tokens_to_add(pair=True)
    if needed >= max_length:
        must = f"above {needed}, for every question and some of its context"
        longest = asked[lengths.index(max(lengths))]
        raise InvalidValue("data.max_length", must, f"{max_length}, and one asks {longest!r}")


def _tokens(
    spans: Sequence[tuple[int, int] | None], answers: Mapping[str, Any], nothing: int | None
) -> tuple[int, int]:
    """First and last token of the first answer."""
    if not answers["text"]:
        assert nothing is not None
        return nothing, nothing
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    inside = [
        i for i, span in enumerate(spans) if span is not None and span[1] > start and span[0] < end
    ]
    covered = max((span[1] for span in spans if span is not None), default=0)
    return (inside[0], inside[-1]) if inside and covered >= end else (BEYOND, BEYOND)


def has_unanswerable(splits: Iterable[Any], label: str) -> bool:
    """Whether a question of these rows has no answer, as in SQuAD 2."""
    return any(not answers["text"] for rows in splits for answers in rows[label])


def cut_off(examples: Mapping[str, Sequence[Example]], max_length: int | None) -> tuple[str, ...]:
    """What a reader should know of questions whose answer was cut off with the end of their
    context.

    Raises:
        InvalidValue: no train row has its answer left.
    """
    notes = []
    for name, rows in examples.items():
        lost = sum(example["start_positions"] == BEYOND for example in rows)
        if name == "train" and lost == len(rows):
            raise InvalidValue(
                "data.max_length", "long enough for the answer of some train row", max_length
            )
        if lost:
            text = (
                f"{lost} of {len(rows)} {name} questions have their answer beyond data.max_length,"
                f" {max_length} "
            )
            notes.append(
                text
                + "tokens: no loss is taken of them, and they count as any other in F1 and exact"
                " match"
            )
    return tuple(notes)
