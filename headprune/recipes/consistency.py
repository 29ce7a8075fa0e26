"""Check that a recipe's model, data and task go together, beyond what types can say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from headprune.core.errors import InvalidValue
from headprune.recipes.schema import CLASSIFICATIONS, LABEL, UNLABELLED, DecodeSection

#: Tasks that a user's own model can have: its inputs need no tokenizer.
_OWN_TASKS = ("image_classification", "audio_classification")
#: Tasks whose input is text, but for those of language models and translation.
_ON_TEXT = ("text_classification", "regression", "token_classification", "question_answering")
_NO_TOKENS = "left out: only causal_lm takes tokenised data"


def section_in(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a recipe; empty where it is missing or no section."""
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def model_problems(model: Mapping[str, Any], task: Any) -> list[InvalidValue]:
    """Return what is wrong with the section ``model``."""
    given = [name for name in ("path", "class_name", "import_path") if model.get(name) is not None]
    if len(given) != 1:
        must = "given by one of path, class_name and import_path"
        return [InvalidValue("model", must, " and ".join(given) or "none")]
    source = given[0]
    if source == "path" and model.get("config"):
        must = "left out: a model from a path has its own"
        return [InvalidValue("model.config", must, model["config"])]
    if source != "import_path" and model.get("layouts") is not None:
        must = "left out: only a model by import_path needs one"
        return [InvalidValue("model.layouts", must, model["layouts"])]
    if source == "import_path" and task not in _OWN_TASKS:
        must = (
            f"used with {' or '.join(_OWN_TASKS)}: other tasks ask for a tokenizer, and for a model"
            " of Transformers"
        )
        return [InvalidValue("model.import_path", must, repr(task))]
    return []


def metric_problems(data: Mapping[str, Any]) -> list[InvalidValue]:
    """Return what is wrong with a known ``metric``."""
    task, metric = data.get("task"), data.get("metric")
    if metric is None or task in CLASSIFICATIONS:
        return []
    must = f"left out for {task}: it is for classifications, {', '.join(CLASSIFICATIONS)}"
    return [InvalidValue("metric", must, repr(metric))]


def data_problems(data: Mapping[str, Any]) -> list[InvalidValue]:
    """Return what is wrong with the section ``data``, for this task and model.

    All problems of translation and tokenizers; if there are none, the first of the others.
    """
    task, columns = data.get("task"), section_in(data, "data")
    if not columns:
        return []
    problems = [*_translation_problems(data, task, columns)]
    problems += _tokenizer_problems(data, task, columns)
    if problems:
        return problems
    others = chain(_label_problems(task, columns), _input_problems(data, task, columns))
    first = next(others, None)
    return [] if first is None else [first]


def _translation_problems(
    data: Mapping[str, Any],
    task: Any,
    columns: Mapping[str, Any],
) -> Iterator[InvalidValue]:
    """Yield missing columns of a translation, or keys that only translation uses."""
    text, target = columns.get("text"), columns.get("target")
    if task == "translation":
        if not isinstance(text, str):
            yield InvalidValue("data.text", "the column of the source language", repr(text))
        if target is None:
            yield InvalidValue("data.target", "the column with the translation", "nothing")
        if columns.get("tokens") is not None:
            yield InvalidValue("data.tokens", _NO_TOKENS, repr(columns["tokens"]))
        return
    if target is not None:
        yield InvalidValue("data.target", f"left out for {task}", repr(target))
    if columns.get("prefix"):
        yield InvalidValue("data.prefix", f"left out for {task}", repr(columns["prefix"]))
    # A recipe that was written out has this section with all its defaults.
    if data.get("decode") not in (None, {}, DecodeSection().model_dump()):
        yield InvalidValue("decode", "left out: only translation decodes", "a section")


def _tokenizer_problems(
    data: Mapping[str, Any],
    task: Any,
    columns: Mapping[str, Any],
) -> Iterator[InvalidValue]:
    """Yield misuses of trained tokenizers, which need a new model, and of blocks of text."""
    kind, block = columns.get("tokenizer"), columns.get("block")
    if kind is not None:
        expected = "translation" if kind == "bpe" else "causal_lm"
        if section_in(data, "model").get("path") is not None:
            yield InvalidValue("data.tokenizer", "left out: the model has its own", repr(kind))
        elif task != expected:
            must = "bpe for translation, characters for causal_lm, and left out for other tasks"
            yield InvalidValue("data.tokenizer", must, f"{kind!r} for {task}")
        if columns.get("tokens") is not None:
            must = "left out with data.tokenizer, which reads text"
            yield InvalidValue("data.tokens", must, repr(columns["tokens"]))
    if columns.get("vocabulary") is not None and kind != "bpe":
        yield InvalidValue("data.vocabulary", "used with tokenizer: bpe", columns["vocabulary"])
    if block is not None and (task != "causal_lm" or not isinstance(columns.get("text"), str)):
        yield InvalidValue("data.block", "used with causal_lm on one column of text", block)


def _label_problems(
    task: Any,
    columns: Mapping[str, Any],
) -> Iterator[InvalidValue]:
    label, order = columns.get("label", LABEL), columns.get("labels")
    # A recipe that was written out has the default label.
    if task in UNLABELLED and label != LABEL:
        yield InvalidValue("data.label", f"left out: {task} has no labels", repr(label))
    if order is None:
        return
    if task not in CLASSIFICATIONS:
        yield InvalidValue("data.labels", f"left out: {task} has no classes", repr(order))
    elif isinstance(order, list) and len(set(map(str, order))) < len(order):
        yield InvalidValue("data.labels", "a list without repetitions", repr(order))


def _input_problems(
    data: Mapping[str, Any],
    task: Any,
    columns: Mapping[str, Any],
) -> Iterator[InvalidValue]:
    """Yield input columns that a task lacks or does not use."""
    text, tokens = columns.get("text"), columns.get("tokens")
    given = tokens if text is None else text
    if columns.get("normalise") is not None and section_in(data, "model").get("path") is not None:
        must = "left out: the model has its own"
        yield InvalidValue("data.normalise", must, columns["normalise"])
    if task == "causal_lm" and (text is None) == (tokens is None):
        must = "given text or tokens, the column that a language model reads"
        yield InvalidValue("data", must, "neither" if text is None else "both")
    if task != "audio_classification" and columns.get("seconds") is not None:
        must = "left out: only audio_classification reads sound"
        yield InvalidValue("data.seconds", must, columns["seconds"])
    if task in _OWN_TASKS and given is not None:
        yield InvalidValue("data.text", f"left out for {task}", repr(given))
    if task in _ON_TEXT:
        yield from _text_problems(task, text, tokens)


def _text_problems(task: Any, text: Any, tokens: Any) -> Iterator[InvalidValue]:
    pair = isinstance(text, list) and len(text) == 2
    if task == "question_answering" and not pair:
        must = "two columns, that of the question and that of its context"
        yield InvalidValue("data.text", must, repr(text))
    if text is None:
        yield InvalidValue("data.text", f"the column with text, for {task}", "nothing")
    if tokens is not None:
        yield InvalidValue("data.tokens", _NO_TOKENS, repr(tokens))
