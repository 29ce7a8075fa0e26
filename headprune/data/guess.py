"""Guess a recipe: the task from the model's class, the columns from their contents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from headprune.core.errors import InvalidValue, did_you_mean
from headprune.core.files import pruned_name
from headprune.data.columns import (
    LABELLED_TEXT,
    LABELS,
    Choice,
    Columns,
    Table,
    check_asked,
    choose,
    columns_of,
    first_of,
    has_fractions,
)
from headprune.data.labels import class_names
from headprune.data.models import model_config
from headprune.data.sources import Source, load_source
from headprune.data.tidy import complete_rows
from headprune.model.classes import class_name_of
from headprune.recipes.reading import override, parse_yaml
from headprune.recipes.references import REFERENCE
from headprune.recipes.schema import DataSection, Recipe, RecoverStep, Task
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
#: Tasks whose examples have no tokens.
_WITHOUT_TOKENS = ("image_classification", "audio_classification")
#: Tokens of the longest example in a guessed recipe.
_LONGEST = 256
#: Rows of train that heads are scored on.
CALIBRATION = 256
#: Words that a refit is to read, by rows of train where the calibration rows have fewer.
_REFIT_WORDS = 16_384
#: Most rows to refit on.
_MOST_REFIT_ROWS = 1024
#: The same where neurons are removed: the refit of a feed-forward has several times as many inputs
#: as that of an attention.
_REFIT_WORDS_WITH_NEURONS = 65_536
_MOST_REFIT_ROWS_WITH_NEURONS = 2048
#: Settings by which a user decides what a refit reads.
_SETS_REFIT_ROWS = re.compile(r"recover(\.\d+)?(\.(rows|examples))?")
#: Rows whose words are counted.
_READ = 200
#: Letters that make a word where there are no blanks.
_LETTERS = 6


@dataclass(frozen=True)
class Guess:
    """A guessed recipe, with the reasons.

    Args:
        text: The recipe as commented YAML.
        why: The reasons, one per line.
        rows_with_neurons: Train rows that a refit reads where neurons are removed; None where the
            calibration rows are enough.
    """

    text: str
    why: tuple[str, ...]
    rows_with_neurons: int | None = None

    def recipe(self, settings: Iterable[str] = ()) -> Recipe:
        """Return the checked recipe.

        Args:
            settings: ``dotted.key=value`` overrides.
        """
        settings = list(settings)
        given = override(parse_yaml(self.text, "the recipe"), settings)
        recipe = check_recipe(given, "the recipe")
        names = [setting.partition("=")[0].strip() for setting in settings]
        if any(_SETS_REFIT_ROWS.fullmatch(name) for name in names):
            return recipe
        with_neurons = self.rows_with_neurons if recipe.select.feed_forward else None
        rows = recipe.data.calibration
        steps = [_on_enough_rows(step, rows, with_neurons) for step in recipe.recover]
        return recipe.model_copy(update={"recover": steps})


def _on_enough_rows(step: RecoverStep, calibration: int, with_neurons: int | None) -> RecoverStep:
    """Return a guessed step of recovery with the rows that it is to read.

    Args:
        step: The step.
        calibration: Rows that heads are scored on. Whoever asks for more of them wants no refit on
            fewer.
        with_neurons: Train rows that a refit reads at least; None where no neurons are removed.
    """
    if step.method == "lstsq" and with_neurons is not None and with_neurons > calibration:
        return step.model_copy(update={"rows": "train", "examples": with_neurons})
    if step.examples is not None and step.examples < calibration:
        return step.model_copy(update={"examples": calibration})
    return step


def guess(
    model: str,
    data: str,
    *,
    task: str | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    keep: str = "0.5",
) -> Guess:
    """Guess a recipe that scores, cuts and refits a model on data.

    Args:
        model: A model folder, hub name or ``package:NAME/FOLDER``.
        data: A file, a folder with train/validation/test files, or a hub name.
        task: A recipe's task, where model and columns leave it open.
        text: The column of text, where the columns leave it open.
        text_pair: The column of the second text of a pair.
        label: The column of labels.
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
    rows = source.splits["train"]
    columns = columns_of(rows)
    options = {"--text": text, "--text-pair": text_pair, "--label": label}
    asked = {option: name for option, name in options.items() if name is not None}
    check_asked(asked, columns, data)
    config = model_config(model)
    kind = class_name_of(config) or type(config).__name__
    of_class = _task_of_class(kind, config)
    # The name comes from a file, and is written into a comment of the recipe.
    if not kind.isidentifier():
        kind = repr(kind)
    # 2. Choose the task.
    chosen: Any = task or of_class or _task_of_columns(rows, columns, data, label)
    if chosen is None:
        listed = ", ".join(columns.names)
        must = f"given: neither {kind} nor the columns of {data} ({listed}) say it"
        raise InvalidValue("--task", must, "none", f"One of {', '.join(tasks)}.")
    has_head = of_class == chosen
    head = f"{kind} has no task head for this, so the model is trained first"
    if has_head:
        head = f"{kind} has a head for this task"
    # 3. Choose the columns, and say which.
    classes = _classes(config) if has_head else ()
    choice = choose(chosen, Table(data, rows, columns, asked, classes))
    why = [f"the task is {chosen}: {head}", choice.words(columns.in_order)]
    lines = [f"{key}: {_listed(names)}" for key, names in choice.columns.items()]
    for line, note in _row_lines(chosen, source, choice):
        lines.append(_noted(line, note, 2))
        why.append(note)
    if chosen not in _WITHOUT_TOKENS:
        note = "longer examples are cut off"
        lines.append(_noted(f"max_length: {_max_length(config)}", note, 2))
    per_row = _words_per_row(chosen, rows, choice.texts)
    refitted = _refit_rows(_REFIT_WORDS, per_row, _MOST_REFIT_ROWS)
    most = _MOST_REFIT_ROWS_WITH_NEURONS
    with_neurons = _refit_rows(_REFIT_WORDS_WITH_NEURONS, per_row, most)
    recipe = _recipe_text(model, data, chosen, lines, why, has_head, keep, refitted)
    return Guess(recipe, tuple(why), with_neurons)


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


def _classes(config: Any) -> tuple[str, ...]:
    """Return the names of a model's classes; numbers where they are not in order."""
    return class_names(config) or tuple(map(str, range(config.num_labels)))


def _task_of_columns(rows: Any, columns: Columns, data: str, label: str | None) -> Task | None:
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
    label = label or first_of(LABELS, columns.names)
    if label is not None:
        return "regression" if has_fractions(rows, label) else "text_classification"
    plain_text = len(columns.texts) == 1 and Path(data).suffix.lower() == ".txt"
    return "causal_lm" if plain_text else None


# ---------------------------------------------------------------- rows


def _row_lines(task: Task, source: Source, choice: Choice) -> list[tuple[str, str]]:
    """Return lines, with reasons, about rows that lack a text or a label."""
    label = choice.columns.get("label")
    if not isinstance(label, str):  # a task without labels
        return []
    lines = _test_lines(source, label)
    if task not in LABELLED_TEXT:
        return lines
    needed = [label, *choice.texts]
    incomplete = 0
    for role, rows in source.splits.items():
        unused = role == "test" and lines
        if not unused and set(needed) <= set(rows.column_names):
            incomplete += len(rows) - len(complete_rows(rows, needed))
    if incomplete:
        lines.append(("drop_incomplete: true", f"{incomplete:,} rows lack a text or a label"))
    return lines


def _test_lines(source: Source, label: str) -> list[tuple[str, str]]:
    """Return lines, with reasons, for data whose test rows have no labels.

    Contests publish test rows with -1 or nothing as their label.
    """
    splits = source.splits
    if not {"test", "validation"} <= splits.keys():
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


def _words_per_row(task: Task, rows: Any, texts: Sequence[str]) -> float:
    """Return how many words a train row has, about; infinity where a refit needs no other rows."""
    if task not in (*LABELLED_TEXT, "token_classification") or len(rows) <= CALIBRATION:
        return math.inf
    some = rows.select(range(min(len(rows), _READ)))
    words = 0
    for name in texts:
        # A name such as `meta.text` is that of a part of a column.
        if name in some.column_names:
            words += sum(map(_count_words, some[name]))
    return words / len(some) if words else math.inf


def _refit_rows(words: int, per_row: float, most: int) -> int | None:
    """Return how many train rows to refit on; None where the calibration rows are enough.

    A feed-forward has a thousand inputs or more, and short texts have few tokens: 256 sentences
    leave a refit short of them.
    """
    wanted = math.ceil(words / per_row)
    return min(wanted, most) if wanted > CALIBRATION else None


def _count_words(text: Any) -> int:
    """Count the words of a text or a list of words; 0 for anything else."""
    if isinstance(text, str):
        # Some scripts have no blanks between words.
        return max(len(text.split()), len(text) // _LETTERS)
    return len(text) if isinstance(text, list) else 0


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


def _listed(names: str | list[str]) -> str:
    """Return a name, or a list of names, as YAML."""
    if isinstance(names, str):
        return _quoted(names)
    return f"[{', '.join(map(_quoted, names))}]"


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
    refitted: int | None,
) -> str:
    """Return the recipe as commented YAML."""
    lines = [
        f"name: {_quoted(pruned_name(model))}",
        f"description: {_quoted(f'{model} is pruned, on {data}.')}",
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
    note = "rows of train that heads are scored on"
    lines.append(_noted(f"  calibration: {CALIBRATION}", note))
    if not has_head:
        note = "the task head is new: the model is trained before anything is scored"
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
        _noted("  - method: lstsq", "refits heads and feed-forwards, without labels or training"),
        "    settings: {feed_forward: true, precision: float32}",
    ]
    if refitted is not None:
        note = "short texts: it reads more rows than the scores"
        lines += ["    rows: train", _noted(f"    examples: {refitted}", note)]
    lines += [
        "bench:",
        "  batch_sizes: [1, 32]",
        "  seconds: 2.0",
    ]
    return "\n".join(lines) + "\n"
