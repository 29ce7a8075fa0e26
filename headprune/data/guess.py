"""Guess a recipe: the task from the model's class, the columns from their contents."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from headprune.core.errors import InvalidValue, did_you_mean
from headprune.data.models import model_config
from headprune.data.sources import Source, load_source, undecoded
from headprune.model.classes import class_name_of
from headprune.recipes.reading import override, parse_yaml
from headprune.recipes.references import REFERENCE
from headprune.recipes.schema import UNLABELLED, DataSection, Recipe, Task
from headprune.recipes.validate import check_recipe

#: The task of a model by the end of its class's name; other classes have no head for a task.
_BY_CLASS: dict[str, Task] = {
    "ForSequenceClassification": "text_classification",
    "ForTokenClassification": "token_classification",
    "ForImageClassification": "image_classification",
    "ForQuestionAnswering": "question_answering",
    "ForAudioClassification": "audio_classification",
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForConditionalGeneration": "translation",
    "MTModel": "translation",
    "ForTranslation": "translation",
}
#: Names of label columns, the likeliest first.
_LABELS = (
    "label",
    "labels",
    "class",
    "category",
    "target",
    "coarse_label",
    "score",
    "similarity",
    "ner_tags",
    "tags",
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
#: Tasks whose examples have no tokens.
_WITHOUT_TOKENS = ("image_classification", "audio_classification")
#: Tokens of the longest example in a guessed recipe.
_LONGEST = 256
#: Rows that are searched for a value of a column.
_LOOKED_AT = 100


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
        fractions: Those of the others that hold numbers with a fraction.
    """

    texts: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    sounds: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    fractions: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.texts, *self.words, *self.images, *self.sounds, *self.ids, *self.others)


@dataclass(frozen=True)
class Guess:
    """A guessed recipe, with the reasons.

    Args:
        text: The recipe as commented YAML.
        why: The reasons, one per line.
    """

    text: str
    why: tuple[str, ...]

    def recipe(self, settings: Iterable[str] = ()) -> Recipe:
        """Return the checked recipe.

        Args:
            settings: ``dotted.key=value`` overrides.
        """
        return check_recipe(override(parse_yaml(self.text, "the recipe"), settings), "the recipe")


@dataclass(frozen=True)
class _Draft:
    """The section ``data`` of a guessed recipe, without its path.

    Args:
        values: YAML values by key.
        why: The reasons, one per line.
    """

    values: dict[str, str]
    why: list[str]

    @property
    def lines(self) -> list[str]:
        return [f"{key}: {value}" for key, value in self.values.items()]


def guess(
    model: str,
    data: str,
    *,
    task: str | None = None,
    keep: str = "0.5",
) -> Guess:
    """Guess a recipe that scores, cuts and refits a model on data.

    Args:
        model: A model folder, hub name or ``package:NAME/FOLDER``.
        data: A file, a folder with train/validation/test files, or a hub name.
        task: A recipe's task, where model and columns leave it open.
        keep: Heads to keep: a count or a fraction.

    Raises:
        InvalidValue: model or data cannot be loaded, task or columns remain unclear, or a recipe
            cannot hold a name.
    """
    _check_name(model, "--model", "folder")
    _check_name(data, "--data", "file or folder")
    tasks = get_args(Task)
    if task is not None and task not in tasks:
        must = f"one of {', '.join(tasks)}"
        raise InvalidValue("--task", must, repr(task), did_you_mean(task, tasks))
    # 1. Look at the data and at the model.
    source = load_source(DataSection(path=data))
    columns = _columns(source.splits["train"])
    config = model_config(model)
    kind = class_name_of(config) or type(config).__name__
    of_class = _task_of_class(kind, config)
    # The name comes from a file, and is written into a comment of the recipe.
    if not kind.isidentifier():
        kind = repr(kind)
    # 2. Choose the task.
    chosen: Any = task or of_class or _task_of_columns(columns, data)
    if chosen is None:
        listed = ", ".join(columns.names)
        must = f"given: neither {kind} nor the columns of {data} ({listed}) say it"
        raise InvalidValue("--task", must, "none", f"One of {', '.join(tasks)}.")
    has_head = of_class == chosen
    head = f"{kind} has no head for it, so it is trained first"
    if has_head:
        head = f"{kind} is a model for it"
    # 3. Choose the columns, with a reason for each.
    draft = _draft_of(chosen, columns, data)
    why = [f"the task is {chosen}: {head}", *draft.why]
    lines = draft.lines
    label = parse_yaml("\n".join(lines), "the columns").get("label")
    for line, note in _test_lines(source, label):
        lines.append(_noted(line, note, 2))
        why.append(note)
    if chosen not in _WITHOUT_TOKENS:
        note = "longer examples are cut off"
        lines.append(_noted(f"max_length: {_max_length(config)}", note, 2))
    return Guess(_recipe_text(model, data, chosen, lines, why, has_head, keep), tuple(why))


# ---------------------------------------------------------------- the task


def _task_of_class(kind: str, config: Any) -> Task | None:
    """Return the task that a model's class has a head for."""
    task = next((task for end, task in _BY_CLASS.items() if kind.endswith(end)), None)
    if task != "text_classification":
        return task
    from transformers.models.auto import modeling_auto

    # Transformers has the same names of classes for text and for sound.
    if kind in modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES.values():
        return "audio_classification"
    grades = config.num_labels == 1 or config.problem_type == "regression"
    return "regression" if grades else "text_classification"


def _task_of_columns(columns: Columns, data: str) -> Task | None:
    """Return the task of a model without a head, where the columns allow only one."""
    if columns.images:
        return "image_classification"
    if columns.sounds:
        return "audio_classification"
    if columns.words:
        return "token_classification"
    if not columns.texts:
        return None
    # Text alone says little: a label decides.
    label = _first_of(_LABELS, columns.names)
    if label in columns.fractions:
        return "regression"
    if label is not None:
        return "text_classification"
    plain_text = len(columns.texts) == 1 and Path(data).suffix == ".txt"
    return "causal_lm" if plain_text else None


# ---------------------------------------------------------------- the columns


def _columns(rows: Any) -> Columns:
    """Sort the columns by their first value that is not empty."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name in rows.column_names:
        stored = undecoded(rows, name)
        kind = "sounds"
        if stored is rows:  # else ``datasets`` declares it as sound
            value = next((v for v in rows[name][:_LOOKED_AT] if v is not None), None)
            kind = _kind_of(value)
            if isinstance(value, float):
                names["fractions"].append(name)
        names[kind].append(name)
    return Columns(**{kind: tuple(of_kind) for kind, of_kind in names.items()})


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


def _draft_of(task: Task, columns: Columns, data: str) -> _Draft:
    """Choose the columns of inputs and labels for a task."""
    if task == "question_answering":
        if not {"question", "context", "answers"} <= set(columns.names):
            must = "the columns question, context and answers, as SQuAD has them"
            raise _unclear("text", must, columns.names, data)
        values = {"text": "[question, context]", "label": "answers"}
        return _Draft(values, ["the columns are those of SQuAD"])
    if task == "causal_lm" and not columns.texts and columns.ids:
        name = "input_ids" if "input_ids" in columns.ids else columns.ids[0]
        return _Draft({"tokens": _quoted(name)}, [f"the tokens are in {name!r}"])
    if task in ("text_classification", "regression"):
        return _labelled_text(columns, data)
    inputs = _inputs(task, columns, data)
    values, why = {}, []
    for key, name in inputs.items():
        values[key] = _quoted(name)
        why.append(f"{key} is in {name!r}")
    if task not in UNLABELLED:
        label = _label(columns, tuple(inputs.values()), data)
        values["label"] = _quoted(label)
        why.append(f"the labels are in {label!r}")
    return _Draft(values, why)


def _inputs(task: Task, columns: Columns, data: str) -> dict[str, str]:
    """Return the input columns of a task, by the recipe's key."""
    if task == "image_classification":
        return {"image": _only(columns.images, "image", "images", data)}
    if task == "audio_classification":
        # A path is text like any other: only the column's name tells that it leads to sound.
        sounds = columns.sounds or tuple(name for name in columns.names if name in _SOUNDS)
        what = "sound, or of paths by the name of audio"
        return {"audio": _only(sounds, "audio", what, data)}
    if task == "token_classification":
        # Tags may be words too.
        words = _without(columns.words, _LABELS)
        return {"text": _only(words, "text", "lists of words", data)}
    if task == "translation":
        if len(columns.texts) != 2:
            raise _unclear("text and data.target", "two columns of text", columns.texts, data)
        # Their order is the only sign of the direction.
        source, target = columns.texts
        return {"text": source, "target": target}
    return {"text": _only(columns.texts, "text", "text", data)}


def _labelled_text(columns: Columns, data: str) -> _Draft:
    """Choose one column of text or a pair, and the label."""
    pair = next((pair for pair in _PAIRS if set(pair) <= set(columns.texts)), ())
    label = _label(columns, pair, data)
    texts = pair or _without(columns.texts, (label,))
    # A model reads one text, or two as a pair.
    if not 1 <= len(texts) <= 2:
        raise _unclear("text", "one column of text, or two of a pair", texts, data)
    text = ", ".join(map(_quoted, texts))
    if len(texts) == 2:
        text = f"[{text}]"
    why = [f"the text is in {' and '.join(map(repr, texts))}", f"the labels are in {label!r}"]
    return _Draft({"text": text, "label": _quoted(label)}, why)


def _label(columns: Columns, taken: Sequence[str], data: str) -> str:
    """Return the label column: by its name, else the only column that is no input."""
    known = _first_of(_LABELS, _without(columns.names, taken))
    if known is not None:
        return known
    rest = _without((*columns.others, *columns.ids), taken)
    if taken and not rest:
        rest = _without(columns.texts, taken)  # labels may be names
    return _only(rest, "label", "labels", data)


def _without(names: Sequence[str], taken: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in taken)


def _first_of(wanted: Iterable[str], present: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in present), None)


def _only(names: tuple[str, ...], key: str, what: str, data: str) -> str:
    if len(names) != 1:
        raise _unclear(key, f"one column of {what}", names, data)
    return names[0]


def _unclear(key: str, must: str, names: Sequence[str], data: str) -> InvalidValue:
    hint = (
        "Rename the columns, or write the recipe by hand: `headprune show trec-minilm` is a"
        " complete one."
    )
    got = ", ".join(names) or "none"
    return InvalidValue(f"data.{key}", f"clear from {must} in {data}", got, hint)


def _test_lines(source: Source, label: str | None) -> list[tuple[str, str]]:
    """Return lines, with reasons, for data whose test rows have no labels.

    Contests publish test rows with -1 or nothing as their label.
    """
    splits = source.splits
    if label is None or not {"test", "validation"} <= splits.keys():
        return []
    if label not in splits["test"].column_names:
        return []
    unlabelled = {role: list(map(_is_missing, rows[label])) for role, rows in splits.items()}
    train, validation = unlabelled["train"], unlabelled["validation"]
    if not all(unlabelled["test"]) or any(train) or any(validation):
        return []
    # Test on the validation rows instead, and validate on rows of train: a tenth, or 1000.
    names = source.facts["splits"]
    holdout = 0.1 if len(train) <= 10_000 else 1000
    return [
        (
            f"test_split: {_quoted(names['validation'])}",
            f"the rows of {names['test']} have no labels",
        ),
        (f"holdout: {holdout}", "so rows of train are the validation rows"),
    ]


def _is_missing(label: Any) -> bool:
    """Whether a label is nothing or a negative number."""
    return label is None or (isinstance(label, (int, float)) and label < 0)


# ---------------------------------------------------------------- the recipe's text


def _max_length(config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        return min(_LONGEST, limit)
    return _LONGEST


def _check_name(name: str, where: str, what: str) -> None:
    """Refuse a name that a recipe would read as a reference."""
    reference = REFERENCE.search(name)
    if reference:
        must = f"without {reference[0]}, which a recipe takes for the value of a key"
        raise InvalidValue(where, must, repr(name), f"Rename the {what}.")


def _quoted(name: str) -> str:
    """Return a string as YAML reads it: in quotes where YAML would read it otherwise.

    Raises:
        InvalidValue: it holds a reference.
    """
    _check_name(name, "data: a column's name", "column")
    # Plain is what YAML reads back unchanged, in a list too; "#" may begin a comment.
    try:
        plain = parse_yaml(f"- {name}\n- [{name}]", "a name") == [name, [name]] and "#" not in name
    except InvalidValue:
        plain = False
    return name if plain else yaml.safe_dump(name, default_style='"', width=math.inf).strip()


def _noted(line: str, note: str, indent: int = 0) -> str:
    """Return a line with a comment; all comments begin in one column."""
    return f"{line:<{26 - indent}} # {note}"


def _recipe_text(
    model: str,
    data: str,
    task: str,
    columns: list[str],
    why: list[str],
    has_head: bool,
    keep: str,
) -> str:
    """Return the recipe as commented YAML."""
    # The recipe's name is that of the model's folder, in the characters that names may have.
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(model.rstrip("/")).name).strip("-._")[:90] or "mine"
    lines = [
        f"name: {_quoted(f'{name}-pruned')}",
        f"description: {_quoted(f'{model} loses heads, on {data}.')}",
    ]
    lines += [f"# {line}" for line in why]
    lines += [
        f"task: {task}",
        _noted("device: auto", "a GPU where there is one"),
        "seed: 0",
        "model:",
        f"  path: {_quoted(model)}",
        "data:",
        f"  path: {_quoted(data)}",
    ]
    lines += [f"  {line}" for line in columns]
    lines.append(_noted("  calibration: 1024", "rows of train that heads are scored on"))
    if not has_head:
        note = "the head is new: the model is trained before anything is scored"
        lines.append(_noted("train:", note))
        lines += ["  epochs: 2", "  batch_size: 32", "  learning_rate: 5e-5"]
    by_name = "tries several on held-out rows; or one by name, see `headprune ls`"
    budgets = "a fraction or a count; or keep_params, keep_macs, keep_kv, speedup"
    lines += [
        "score:",
        _noted("  scorer: auto", by_name),
        _noted("  random_draws: 3", "random choices of heads, for comparison"),
        "select:",
        _noted(f"  keep_heads: {keep}", budgets),
        "recover:",
        _noted("  - method: lstsq", "refits the kept heads, without labels or training"),
        "bench:",
        "  batch_sizes: [1, 32]",
        "  seconds: 2.0",
    ]
    return "\n".join(lines) + "\n"
