"""Whether a recipe's model, data and task go together, beyond what the types can say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headprune.core.errors import InvalidValue
from headprune.recipes.schema import CLASSIFICATIONS, LABEL, UNLABELLED, DecodeSection

#: Tasks for models of one's own.
_OWN_TASKS = ("image_classification", "audio_classification")


def section_in(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a recipe; empty where it is none."""
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def model_problems(model: Mapping[str, Any], task: Any) -> list[InvalidValue]:
    """What is wrong with the section ``model``."""
    given = [name for name in ("path", "class_name", "import_path") if model.get(name) is not None]
    if len(given) != 1:
        must = "given by one of path, class_name and import_path"
        return [InvalidValue("model", must, " and ".join(given) or "none")]
    if given == ["path"] and model.get("config"):
        return [
            InvalidValue(
                "model.config", "left out: a model from a path has its own", model["config"]
            )
        ]
    if given != ["import_path"] and model.get("layouts") is not None:
        return [
            InvalidValue(
                "model.layouts", "left out: only a model by import_path needs one", model["layouts"]
            )
        ]
    if given == ["import_path"] and task not in _OWN_TASKS:
        must = (
            f"used with {' or '.join(_OWN_TASKS)}: other tasks ask for a tokenizer, and for a model"
            " of Transformers"
        )
        return [InvalidValue("model.import_path", must, repr(task))]
    return []


def metric_problems(data: Mapping[str, Any]) -> list[InvalidValue]:
    """What is wrong with ``metric``, beside a name that is none."""
    task, metric = data.get("task"), data.get("metric")
    if metric is None or task in CLASSIFICATIONS:
        return []
    must = f"left out for {task}: it is for classifications, {', '.join(CLASSIFICATIONS)}"
    return [InvalidValue("metric", must, repr(metric))]


def data_problems(data: Mapping[str, Any]) -> list[InvalidValue]:
    """What is wrong with the section ``data``, and with what goes with it."""
    task, columns = data.get("task"), section_in(data, "data")
    text, tokens = columns.get("text"), columns.get("tokens")
    if not columns:
        return []
    if problems := [
        *_translation_problems(data, task, columns),
        *_tokenizer_problems(data, task, columns),
    ]:
        return problems
    if (
        task in UNLABELLED and (label := columns.get("label", LABEL)) != LABEL
    ):  # a resolved recipe has the default
        return [InvalidValue("data.label", f"left out: {task} has no labels", repr(label))]
    if (order := columns.get("labels")) is not None:
        if task not in CLASSIFICATIONS:
            return [InvalidValue("data.labels", f"left out: {task} has no classes", repr(order))]
        if isinstance(order, list) and len({str(label) for label in order}) < len(order):
            return [InvalidValue("data.labels", "a list without repetitions", repr(order))]
    if columns.get("normalise") is not None and section_in(data, "model").get("path") is not None:
        return [
            InvalidValue("data.normalise", "left out: the model has its own", columns["normalise"])
        ]
    if task == "causal_lm" and (text is None) == (tokens is None):
        got = "neither" if text is None else "both"
        return [
            InvalidValue(
                "data", "given text or tokens, the column that a language model reads", got
            )
        ]
    if task != "audio_classification" and columns.get("seconds") is not None:
        return [
            InvalidValue(
                "data.seconds",
                "left out: only audio_classification reads sound",
                columns["seconds"],
            )
        ]
    if task in ("image_classification", "audio_classification") and (
        text is not None or tokens is not None
    ):
        return [InvalidValue("data.text", f"left out for {task}", repr(text or tokens))]
    if task in ("text_classification", "regression", "token_classification", "question_answering"):
        if task == "question_answering" and not (isinstance(text, list) and len(text) == 2):
            must = "two columns, that of the question and that of its context"
            return [InvalidValue("data.text", must, repr(text))]
        if text is None:
            return [InvalidValue("data.text", f"the column with text, for {task}", "nothing")]
        if tokens is not None:
            return [
                InvalidValue(
                    "data.tokens", "left out: only causal_lm takes tokenised data", repr(tokens)
                )
            ]
    return []


def _translation_problems(
    data: Mapping[str, Any], task: Any, columns: Mapping[str, Any]
) -> list[InvalidValue]:
    """What translation alone needs, and others have no use for."""
    target, tokens = columns.get("target"), columns.get("tokens")
    if task == "translation":
        text, must = columns.get("text"), "the column of the source language"
        wrong = [] if isinstance(text, str) else [InvalidValue("data.text", must, repr(text))]
        if target is None:
            wrong.append(InvalidValue("data.target", "the column with the translation", "nothing"))
        if tokens is not None:
            wrong.append(
                InvalidValue(
                    "data.tokens", "left out: only causal_lm takes tokenised data", repr(tokens)
                )
            )
        return wrong
    alone = {"data.target": target, "data.prefix": columns.get("prefix") or None}
    wrong = [
        InvalidValue(key, f"left out for {task}", repr(one))
        for key, one in alone.items()
        if one is not None
    ]
    if data.get("decode") not in (
        None,
        {},
        DecodeSection().model_dump(),
    ):  # a resolved recipe has them all
        wrong.append(InvalidValue("decode", "left out: only translation decodes", "a section"))
    return wrong


def _tokenizer_problems(
    data: Mapping[str, Any], task: Any, columns: Mapping[str, Any]
) -> list[InvalidValue]:
    """A tokenizer of one's own is for a model of one's own, and blocks are for language models."""
    kind, block = columns.get("tokenizer"), columns.get("block")
    wrong = []
    if kind is not None and section_in(data, "model").get("path") is not None:
        wrong.append(InvalidValue("data.tokenizer", "left out: the model has its own", repr(kind)))
    elif kind is not None and task not in (("translation",) if kind == "bpe" else ("causal_lm",)):
        must = "bpe for translation, characters for causal_lm, and left out for other tasks"
        wrong.append(InvalidValue("data.tokenizer", must, f"{kind!r} for {task}"))
    if kind is not None and columns.get("tokens") is not None:
        must = "left out with data.tokenizer, which reads text"
        wrong.append(InvalidValue("data.tokens", must, repr(columns["tokens"])))
    if columns.get("vocabulary") is not None and kind != "bpe":
        wrong.append(
            InvalidValue("data.vocabulary", "used with tokenizer: bpe", columns["vocabulary"])
        )
    if block is not None and (task != "causal_lm" or not isinstance(columns.get("text"), str)):
        wrong.append(InvalidValue("data.block", "used with causal_lm on one column of text", block))
    return wrong
