"""Choose the columns of a table: by name, by contents, and by the classes of the model."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headprune.core.errors import InvalidValue, did_you_mean
from headprune.data.labels import are_names_of, is_class_number
from headprune.data.sources import undecoded
from headprune.data.tidy import is_missing, plain_label
from headprune.recipes.schema import UNLABELLED, Task

#: Names of label columns, the likeliest first. Case does not count.
LABELS = (
    "label",
    "labels",
    "class",
    "category",
    "target",
    "coarse_label",
    "sentiment",
    "intent",
    "rating",
    "score",
    "similarity",
    "ner_tags",
    "tags",
)
#: Names of text columns, the likeliest first.
_TEXTS = (
    "text",
    "sentence",
    "message",
    "body",
    "review",
    "content",
    "comment",
    "document",
    "utterance",
    "question",
    "tweet",
    "description",
)
#: Names of columns of paths to sound.
_SOUNDS = ("audio", "file", "path", "wav")
#: Pairs of text columns, of which the second is no translation.
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
#: Tasks on one text or a pair, with one label per row.
LABELLED_TEXT: tuple[Task, ...] = ("text_classification", "regression")
#: Rows that are searched for a value of a column.
_LOOKED_AT = 100
#: Columns that a message lists.
_SHOWN = 12


@dataclass(frozen=True)
class Columns:
    """The columns of the data by what they hold.

    Args:
        texts: One text per row.
        words: A list of words per row.
        images: A picture per row.
        sounds: Sound with its sampling rate.
        ids: A list of numbers per row.
        others: The rest, mostly numbers: possible labels.
        in_order: All columns, in the order of the data.
    """

    texts: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    sounds: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    in_order: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.texts, *self.words, *self.images, *self.sounds, *self.ids, *self.others)


@dataclass(frozen=True)
class Table:
    """What columns are chosen by.

    Args:
        data: Where the rows come from, for messages.
        rows: The train rows.
        columns: Their columns.
        asked: Columns that the user named, by option: ``--text``, ``--text-pair``, ``--label``.
        classes: Names of the model's classes; empty where it has no head for the task.
    """

    data: str
    rows: Any
    columns: Columns
    asked: Mapping[str, str]
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """The chosen columns.

    Args:
        columns: A column, or two of a pair, by the key of the recipe.
        why: Reasons for some of them.
        runners_up: Columns that could be the label, too.
    """

    columns: dict[str, str | list[str]]
    why: dict[str, str] = field(default_factory=dict)
    runners_up: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """The text columns."""
        text = self.columns.get("text", [])
        return [text] if isinstance(text, str) else text

    def words(self, names: Sequence[str]) -> str:
        """Say what was chosen, and which columns were not, in one line.

        Args:
            names: All columns of the data.
        """
        parts, taken = [], []
        for key in sorted(self.columns):  # the label before the text
            chosen = self.columns[key]
            of_key = [chosen] if isinstance(chosen, str) else chosen
            taken += of_key
            reason = f" ({self.why[key]})" if key in self.why else ""
            parts.append(f"{key}: {' and '.join(map(shown, of_key))}{reason}")
        line = "; ".join(parts)
        others = []
        for name in without(names, taken):
            note = " (could be the label)" if name in self.runners_up else ""
            others.append(f"{shown(name)}{note}")
        return f"{line}. Other columns: {listed(others)}" if others else line


@dataclass(frozen=True)
class _Candidate:
    """A column that could be the label; ``grade`` orders how much speaks for it."""

    name: str
    grade: int
    why: str


def columns_of(rows: Any) -> Columns:
    """Sort the columns by their first value that is not empty."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name in rows.column_names:
        stored = undecoded(rows, name)
        kind = "sounds"
        if stored is rows:  # else ``datasets`` declares it as sound
            value = next((v for v in rows[name][:_LOOKED_AT] if v is not None), None)
            kind = _kind_of(value)
        names[kind].append(name)
    by_kind = {kind: tuple(of_kind) for kind, of_kind in names.items()}
    return Columns(**by_kind, in_order=tuple(rows.column_names))


def _kind_of(value: Any) -> str:
    """Return the field of ``Columns`` for a column with such a value."""
    if isinstance(value, str):
        return "texts"
    if hasattr(value, "convert"):  # an image of Pillow
        return "images"
    if isinstance(value, Mapping) and "sampling_rate" in value:
        return "sounds"
    if not isinstance(value, list) or not value:
        return "others"
    if isinstance(value[0], list):  # rows of pixels
        return "images"
    return "words" if isinstance(value[0], str) else "ids"


def check_asked(asked: Mapping[str, str], columns: Columns, data: str) -> None:
    """Refuse columns that do not exist, or that are named twice.

    Raises:
        InvalidValue: one of them.
    """
    for option, name in asked.items():
        # "a.b" is b inside column a.
        if name not in columns.names and name.partition(".")[0] not in columns.names:
            must = f"a column of {data}"
            raise InvalidValue(option, must, repr(name), did_you_mean(name, columns.names))
        if list(asked.values()).count(name) > 1:
            given = ", ".join(option for option, other in asked.items() if other == name)
            raise InvalidValue(given, "columns that differ", repr(name))


def has_fractions(rows: Any, name: str) -> bool:
    """Whether a column holds floats, as the labels of a regression do."""
    return any(isinstance(value, float) for value in _values(rows, name) or ())


# ---------------------------------------------------------------- the choice


def choose(task: Task, table: Table) -> Choice:
    """Choose the columns of inputs and labels for a task.

    Raises:
        InvalidValue: several columns could be meant, or none, or the task has no use for a column
            that the user named.
    """
    _check_use(task, table.asked)
    if task in LABELLED_TEXT:
        return _labelled_text(task, table)
    columns = table.columns
    if task == "question_answering":
        if not {"question", "context", "answers"} <= set(columns.names):
            must = "the columns question, context and answers, as SQuAD has them"
            raise _unclear("data.text", must, columns.names, table)
        return Choice({"text": ["question", "context"], "label": "answers"})
    if task == "causal_lm" and not columns.texts and columns.ids and not table.asked:
        name = "input_ids" if "input_ids" in columns.ids else columns.ids[0]
        return Choice({"tokens": name})
    inputs = _inputs(task, table)
    chosen: dict[str, str | list[str]] = dict(inputs)
    if task in UNLABELLED:
        return Choice(chosen)
    if task == "token_classification":
        label = table.asked.get("--label") or _label_of_words(table, tuple(inputs.values()))
        return Choice({**chosen, "label": label})
    found = _label(task, table, tuple(inputs.values()))
    return Choice({**chosen, "label": found.name}, {"label": found.why})


def _check_use(task: Task, asked: Mapping[str, str]) -> None:
    """Refuse a column that the task has no use for."""
    useful = {"--text", "--label"}
    if task in LABELLED_TEXT:
        useful.add("--text-pair")
    if task in UNLABELLED:
        useful.remove("--label")
    if task in ("image_classification", "audio_classification", "translation"):
        useful.remove("--text")
    if task == "question_answering":
        useful = set()
    for option in asked:
        if option not in useful:
            raise InvalidValue(option, f"left out for the task {task}", repr(asked[option]))


def _inputs(task: Task, table: Table) -> dict[str, str]:
    """Return the input columns of a task, by the recipe's key."""
    columns = table.columns
    if task == "image_classification":
        return {"image": _only(columns.images, "data.image", "images", table)}
    if task == "audio_classification":
        # A path is text like any other: only the column's name tells that it leads to sound.
        sounds = columns.sounds or tuple(name for name in columns.names if name in _SOUNDS)
        what = "sound, or of paths in a column named audio, file, path or wav"
        return {"audio": _only(sounds, "data.audio", what, table)}
    if task == "token_classification":
        # Tags may be words too.
        words = without(columns.words, LABELS)
        asked = table.asked.get("--text")
        return {"text": asked or _only(words, "--text", "lists of words", table)}
    if task == "translation":
        if len(columns.texts) != 2:
            where = "data.text and data.target"
            raise _unclear(where, "two columns of text", columns.texts, table)
        # Their order is the only sign of the direction.
        source, target = columns.texts
        return {"text": source, "target": target}
    return {"text": table.asked.get("--text") or _text(columns.texts, table)}


def _labelled_text(task: Task, table: Table) -> Choice:
    """Choose one column of text or a pair, and the label."""
    asked, columns = table.asked, table.columns
    # 1. Texts that are sure: the user's, or a pair by its names.
    texts = [asked[option] for option in ("--text", "--text-pair") if option in asked]
    if not asked.keys() & {"--text", "--text-pair"}:
        texts = list(next((pair for pair in _PAIRS if set(pair) <= set(columns.texts)), ()))
    # 2. The label.
    label = _label(task, table, texts)
    # 3. Other texts: one of the columns that remain.
    if "--text" not in asked and len(texts) < 2:
        texts.insert(0, _text(without(columns.texts, (*texts, label.name)), table))
    text = texts[0] if len(texts) == 1 else texts
    rest = without(columns.names, (*texts, label.name))
    others = [c.name for c in _candidates(task, table, rest) if c.grade > 0]
    return Choice({"text": text, "label": label.name}, {"label": label.why}, tuple(others))


def _text(names: Sequence[str], table: Table) -> str:
    """Return the text column: by its name, else the one with by far the most words."""
    known = first_of(_TEXTS, names)
    if known is not None:
        return known
    words = {name: _words_per_row(table.rows, name) for name in names}
    # Those with far fewer words than another one are codes, dates or names.
    among = [name for name in names if 2 * words[name] > max(words.values())]
    return _only(tuple(among or names), "--text", "text", table)


def _words_per_row(rows: Any, name: str) -> float:
    """Return the mean number of words with a letter, so that dates and numbers have none."""
    count, texts = 0, [text for text in rows[name][:_LOOKED_AT] if text]
    for text in texts:
        count += sum(any(map(str.isalpha, word)) for word in text.split())
    return count / max(len(texts), 1)


# ---------------------------------------------------------------- the label


def _label(task: Task, table: Table, taken: Sequence[str]) -> _Candidate:
    """Return the label column, with the reason."""
    if "--label" in table.asked:
        return _Candidate(table.asked["--label"], 9, "as asked")
    names = without((*table.columns.others, *table.columns.texts), taken)
    found = _candidates(task, table, names)
    best = max((c.grade for c in found), default=0)
    among = [c for c in found if c.grade == best]
    known = first_of(LABELS, [c.name for c in among])
    if known is not None:
        among = [c for c in among if c.name == known]
    if len(among) != 1:
        what = f"labels that repeat{_of_classes(table)}"
        if task == "regression":
            what = "numbers"
        raise _unclear("--label", f"one column of {what}", [c.name for c in among], table)
    return among[0]


def _candidates(task: Task, table: Table, names: Sequence[str]) -> list[_Candidate]:
    """Return the columns that could be the label, each with how much speaks for it."""
    found = []
    for name in names:
        values = _values(table.rows, name)
        if not values:
            continue
        if task == "regression":
            graded = _grade_of_numbers(name, values)
        else:
            graded = _grade_of_classes(name, values, table.classes)
        if graded is not None:
            found.append(_Candidate(name, *graded))
    return found


def _grade_of_numbers(name: str, values: Sequence[Any]) -> tuple[int, str] | None:
    """Rate a column as regression labels, with the reason; None where it cannot be."""
    if any(isinstance(value, str) for value in values):
        return None
    if first_of(LABELS, [name]):
        return 2, "by its name"
    if any(isinstance(value, float) for value in values):
        return 1, "the only one with fractions"
    # Whole numbers that never repeat only count the rows.
    return None if _all_differ(values) else (0, "the only one with numbers that repeat")


def _grade_of_classes(
    name: str, values: Sequence[Any], classes: Sequence[str]
) -> tuple[int, str] | None:
    """Rate a column as class labels, with the reason; None where it cannot be."""
    distinct = set(values)
    if _all_differ(values) or any(isinstance(value, float) for value in distinct):
        return None
    known = first_of(LABELS, [name]) is not None
    fit = _fit_to_classes(distinct, known, classes)
    if fit is not None:
        return fit
    if known:
        return 2, "by its name"
    if first_of(_TEXTS, [name]) or 2 * len(distinct) > len(values):
        return None
    return 0, "the only one whose values repeat"


def _fit_to_classes(
    distinct: set[Any], known: bool, classes: Sequence[str]
) -> tuple[int, str] | None:
    """Grade values by how they fit the model's classes; None where they do not."""
    n = len(classes)
    numbers = all(map(is_class_number, distinct))
    # Few small numbers may mean anything, unless the column's name says that they are labels.
    telling = known or len(distinct) == n or not numbers
    if telling and are_names_of(distinct, classes):
        return 5 + (len(distinct) == n), f"matches the model's {n} classes"
    if numbers and all(0 <= int(value) < n for value in distinct):
        return (4, f"has the numbers of the model's {n} classes") if telling else None
    if len(distinct) == n:
        return 3, f"has as many values as the model has classes, {n}"
    return None


def _all_differ(values: Sequence[Any]) -> bool:
    return len(values) > 1 and len(set(values)) == len(values)


def _values(rows: Any, name: str) -> list[str | int | float] | None:
    """Return a column's values that are there; None where some are no text and no number."""
    values = [plain_label(value) for value in rows[name] if not is_missing(value)]
    return values if all(isinstance(value, (str, int, float)) for value in values) else None


def _label_of_words(table: Table, taken: Sequence[str]) -> str:
    """Return the column with a label for every word."""
    columns = table.columns
    known = first_of(LABELS, without(columns.names, taken))
    rest = without((*columns.others, *columns.ids), taken)
    return known or _only(rest, "--label", "labels", table)


def _of_classes(table: Table) -> str:
    if not table.classes:
        return ""
    return f", for the model's {len(table.classes)} classes ({listed(table.classes)}),"


# ---------------------------------------------------------------- names


def without(names: Sequence[str], taken: Sequence[str]) -> tuple[str, ...]:
    """Return the names that are not taken."""
    return tuple(name for name in names if name not in taken)


def first_of(wanted: Iterable[str], present: Sequence[str]) -> str | None:
    """Return the first wanted name that is present, in its own case."""
    by_case = {name.casefold(): name for name in reversed(present)}
    return next((by_case[name] for name in wanted if name in by_case), None)


def listed(names: Sequence[str]) -> str:
    """Return names as a list for people."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def shown(name: str) -> str:
    """Return a column's name; in quotes where it would break a line."""
    return name if name.isprintable() and name.strip() == name != "" else repr(name)


def _only(names: tuple[str, ...], where: str, what: str, table: Table) -> str:
    if len(names) != 1:
        raise _unclear(where, f"one column of {what}", names, table)
    return names[0]


def _unclear(where: str, must: str, names: Sequence[str], table: Table) -> InvalidValue:
    all_names = table.columns.in_order
    hint = f"The columns are {listed(all_names)}."
    if where.startswith("--") and names:
        hint += f" Name one, such as {where} {shlex.quote(names[0])}."
    elif where.startswith("--"):
        hint += f" None of them fits by its contents; name one: {where} COLUMN."
    else:
        hint += " Rename them, or write the recipe by hand: `headprune show trec-minilm` is one."
    return InvalidValue(
        where, f"clear from {must} in {table.data}", ", ".join(names) or "none", hint
    )
