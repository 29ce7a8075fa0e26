"""A recipe for a model and data that nobody wrote one for: the task by the model's class, columns
by their contents."""

from __future__ import annotations

import math
import re
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
#: Columns that are the label where they are there, the likeliest first.
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
#: Columns of paths to sound.
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


@dataclass(frozen=True)
class Columns:
    """The columns of the data by what they hold.

    Args:
        texts: One text a row.
        words: A list of words a row.
        images: A picture a row.
        sounds: Sound a row, with its sampling rate.
        ids: A list of numbers a row.
        others: The rest, numbers most of all: what a label can be.
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
        return (*self.texts, *self.words, *self.images, *self.sounds, *self.ids, *self.others)


@dataclass(frozen=True)
class Guess:
    """A recipe, and what it was guessed from.

    Args:
        text: The recipe as commented YAML.
        why: What led to it, a line each.
    """

    text: str
    why: tuple[str, ...]

    def recipe(self, settings: Iterable[str] = ()) -> Recipe:
        """The recipe, checked.

        Args:
            settings: ``dotted.key=value`` overrides.
        """
        return check_recipe(override(parse_yaml(self.text, "the recipe"), settings), "the recipe")


def guess(model: str, data: str, *, task: str | None = None, keep: str = "0.5") -> Guess:
    """A recipe that scores, cuts and refits a model on data.

    Args:
        model: A model folder, hub name or ``package:NAME/FOLDER``.
        data: A file, a folder with train/validation/test files, or a hub name.
        task: A recipe's task, where the model's class and the columns do not say it.
        keep: Heads to keep: a count or a fraction.

    Raises:
        InvalidValue: the model or the data cannot be had, task or columns cannot be told, or a
            recipe cannot hold a name.
    """
    _check_name(model, "--model", "folder")
    _check_name(data, "--data", "file or folder")
    tasks = get_args(Task)
    if task is not None and task not in tasks:
        raise InvalidValue(
            "--task", f"one of {', '.join(tasks)}", repr(task), did_you_mean(task, tasks)
        )
    section = DataSection(path=data)
    source = load_source(section)
    columns = _columns(source.splits["train"])
    config = model_config(model)
    kind = class_name_of(config) or type(config).__name__
    found = next((t for end, t in _BY_CLASS.items() if kind.endswith(end)), None)
    if found == "text_classification":
        found = _by_config(kind, config)
    if not kind.isidentifier():  # it comes out of a file, and stands in a comment
        kind = repr(kind)
    chosen: Any = task or found or _task_of(columns, data)
    if chosen is None:
        must = (
            f"given: neither {kind} nor the columns of {data} ({', '.join(columns.names)}) say it"
        )
        raise InvalidValue("--task", must, "none", f"One of {', '.join(tasks)}.")
    lines, why = _data_lines(chosen, columns, data)
    head = (
        f"{kind} is a model for it"
        if found == chosen
        else f"{kind} has no head for it, so it is trained first"
    )
    about = [f"the task is {chosen}: {head}", *why]
    for line, note in _test_lines(source, parse_yaml("\n".join(lines), "the columns").get("label")):
        lines.append(_noted(line, note, 2))
        about.append(note)
    if chosen not in ("image_classification", "audio_classification"):
        limit = getattr(config, "max_position_embeddings", None)
        longest = min(256, limit) if isinstance(limit, int) and limit > 0 else 256
        lines.append(_noted(f"max_length: {longest}", "longer examples are cut off", 2))
    return Guess(_text(model, data, chosen, lines, about, found == chosen, keep), tuple(about))


def _by_config(kind: str, config: Any) -> Task:
    """What a class for whole sequences is for: Transformers has the same names for text and for
    sound."""
    from transformers.models.auto import modeling_auto

    if kind in modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES.values():
        return "audio_classification"
    grades = config.num_labels == 1 or config.problem_type == "regression"
    return "regression" if grades else "text_classification"


def _columns(rows: Any) -> Columns:
    """What the columns hold, by the first row that has something."""
    found: dict[str, list[str]] = {name: [] for name in Columns.__dataclass_fields__}
    for name in rows.column_names:
        stored = undecoded(rows, name)
        value = next((v for v in stored[name][:100] if v is not None), None)
        if isinstance(value, str):
            found["texts"].append(name)
        elif hasattr(value, "convert") or (
            isinstance(value, list) and value and isinstance(value[0], list)
        ):
            found["images"].append(name)
        elif stored is not rows or (isinstance(value, Mapping) and "sampling_rate" in value):
            found["sounds"].append(name)
        elif isinstance(value, list) and value:
            found["words" if isinstance(value[0], str) else "ids"].append(name)
        else:
            found["others"].append(name)
            if isinstance(value, float):
                found["fractions"].append(name)
    return Columns(**{name: tuple(names) for name, names in found.items()})


def _task_of(columns: Columns, data: str) -> Task | None:
    """The task of a model without a head, where the columns leave one."""
    if columns.images or columns.sounds:
        return "image_classification" if columns.images else "audio_classification"
    if columns.words:
        return "token_classification"
    if not columns.texts:
        return None
    label = next((name for name in _LABELS if name in columns.names), None)
    if label in columns.fractions:
        return "regression"
    if label is not None:
        return "text_classification"
    return "causal_lm" if len(columns.texts) == 1 and Path(data).suffix == ".txt" else None


def _data_lines(task: Task, columns: Columns, data: str) -> tuple[list[str], list[str]]:
    """The lines of the section ``data`` that name columns, and why."""
    if task == "image_classification":
        inputs = {"image": _only(columns.images, "image", "images", data)}
    elif task == "token_classification":
        words = tuple(
            name for name in columns.words if name not in _LABELS
        )  # tags may be words too
        inputs = {"text": _only(words, "text", "lists of words", data)}
    elif task == "causal_lm":
        if not columns.texts and len(columns.ids) >= 1:
            name = next((n for n in columns.ids if n == "input_ids"), columns.ids[0])
            return [f"tokens: {_quoted(name)}"], [f"the tokens are in {name!r}"]
        inputs = {"text": _only(columns.texts, "text", "text", data)}
    elif task == "audio_classification":
        # A path says no more than any text does: the column's name has to.
        sounds = columns.sounds or tuple(name for name in columns.names if name in _SOUNDS)
        inputs = {"audio": _only(sounds, "audio", "sound, or of paths by the name of audio", data)}
    elif task == "question_answering":
        if not {"question", "context", "answers"} <= set(columns.names):
            raise _unclear(
                "text",
                "the columns question, context and answers, as SQuAD has them",
                columns.names,
                data,
            )
        return ["text: [question, context]", "label: answers"], ["the columns are those of SQuAD"]
    elif task == "translation":
        if len(columns.texts) != 2:
            raise _unclear("text and data.target", "two columns of text", columns.texts, data)
        inputs = dict(zip(("text", "target"), columns.texts, strict=True))
    else:
        return _labelled_text(columns, data, task)
    why = [f"{key} is in {name!r}" for key, name in inputs.items()]
    if task in UNLABELLED:
        return [f"{key}: {_quoted(name)}" for key, name in inputs.items()], why
    label = _label(columns, tuple(inputs.values()), data)
    lines = [f"{key}: {_quoted(name)}" for key, name in {**inputs, "label": label}.items()]
    return lines, [*why, f"the labels are in {label!r}"]


def _labelled_text(columns: Columns, data: str, task: Task) -> tuple[list[str], list[str]]:
    """One column of text or a pair, and the label."""
    pair = next((p for p in _PAIRS if set(p) <= set(columns.texts)), ())
    label = _label(columns, pair, data)
    texts = pair or tuple(name for name in columns.texts if name != label)
    if not 1 <= len(texts) <= 2:
        raise _unclear("text", "one column of text, or two of a pair", texts, data)
    shown = _quoted(texts[0]) if len(texts) == 1 else f"[{', '.join(map(_quoted, texts))}]"
    words = " and ".join(map(repr, texts))
    return [f"text: {shown}", f"label: {_quoted(label)}"], [
        f"the text is in {words}",
        f"the labels are in {label!r}",
    ]


def _label(columns: Columns, taken: Sequence[str], data: str) -> str:
    free = [name for name in columns.names if name not in taken]
    if found := next((name for name in _LABELS if name in free), None):
        return found
    rest = [name for name in (*columns.others, *columns.ids) if name not in taken]
    if taken and not rest:
        rest = [name for name in columns.texts if name not in taken]
    return _only(tuple(rest), "label", "labels", data)


def _test_lines(source: Source, label: str | None) -> list[tuple[str, str]]:
    """Lines for data whose test rows have -1 or nothing in the place of a label, as those of a
    contest, and why."""
    splits = source.splits
    if (
        label is None
        or not {"test", "validation"} <= splits.keys()
        or label not in splits["test"].column_names
    ):
        return []
    lacking = {
        role: [
            value is None or (isinstance(value, (int, float)) and value < 0)
            for value in rows[label]
        ]
        for role, rows in splits.items()
    }
    if not all(lacking["test"]) or any(lacking["train"]) or any(lacking["validation"]):
        return []
    names, n_train = source.facts["splits"], len(splits["train"])
    return [
        (
            f"test_split: {_quoted(names['validation'])}",
            f"the rows of {names['test']} have no labels",
        ),
        (
            f"holdout: {0.1 if n_train <= 10_000 else 1000}",
            "so rows of train are the validation rows",
        ),
    ]


def _only(names: tuple[str, ...], key: str, what: str, data: str) -> str:
    if len(names) != 1:
        raise _unclear(key, f"one column of {what}", names, data)
    return names[0]


def _unclear(key: str, must: str, names: Sequence[str], data: str) -> InvalidValue:
    hint = (
        "Rename the columns, or write the recipe by hand: `headprune show trec-minilm` is a"
        " complete one."
    )
    return InvalidValue(
        f"data.{key}", f"told by {must} in {data}", ", ".join(names) or "none", hint
    )


def _check_name(name: str, where: str, what: str) -> None:
    """Refuses what a recipe would take for a reference to one of its keys."""
    if found := REFERENCE.search(name):
        must = f"without {found[0]}, which a recipe takes for the value of a key"
        raise InvalidValue(where, must, repr(name), f"Rename the {what}.")


def _quoted(name: str) -> str:
    """A string as YAML takes it: as it is, where nothing in it has a meaning of its own.

    Raises:
        InvalidValue: it holds a reference.
    """
    _check_name(name, "data: a column's name", "column")
    try:
        plain = parse_yaml(f"- {name}\n- [{name}]", "a name") == [name, [name]] and "#" not in name
    except InvalidValue:
        plain = False
    return name if plain else yaml.safe_dump(name, default_style='"', width=math.inf).strip()


def _noted(line: str, note: str, indent: int = 0) -> str:
    """A line with a comment, all of them in one column."""
    return f"{line:<{26 - indent}} # {note}"


def _text(
    model: str, data: str, task: Task, columns: list[str], why: list[str], trained: bool, keep: str
) -> str:  # fmt: skip
    """The commented recipe."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(model.rstrip("/")).name).strip("-._")[:90] or "mine"
    training = [
        _noted("train:", "the head is new: the model is trained before anything is scored"),
        "  epochs: 2",
        "  batch_size: 32",
        "  learning_rate: 5e-5",
    ]
    lines = [
        f"name: {_quoted(f'{name}-pruned')}",
        f"description: {_quoted(f'{model} loses heads, on {data}.')}",
        *(f"# {line}" for line in why),
        f"task: {task}",
        _noted("device: auto", "a GPU where there is one"),
        "seed: 0",
        "model:",
        f"  path: {_quoted(model)}",
        "data:",
        f"  path: {_quoted(data)}",
        *(f"  {line}" for line in columns),
        _noted("  calibration: 1024", "rows of train that heads are scored on"),
        *([] if trained else training),
        "score:",
        _noted(
            "  scorer: auto", "tries several on held-out rows; or one by name, see `headprune ls`"
        ),
        _noted("  random_draws: 3", "how chance would have chosen, beside it"),
        "select:",
        _noted(
            f"  keep_heads: {keep}",
            "a fraction or a count; or keep_params, keep_macs, keep_kv, speedup",
        ),
        "recover:",
        _noted(
            "  - method: lstsq", "what is left is refitted, without labels and without training"
        ),
        "bench:",
        "  batch_sizes: [1, 32]",
        "  seconds: 2.0",
    ]
    return "\n".join(lines) + "\n"
