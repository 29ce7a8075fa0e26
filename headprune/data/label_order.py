"""Whether a model's answers fit the numbers that labels were given, or another order of them far
better."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.data.datasets import Data, RawData
from headprune.model.losses import logits_of, predict
from headprune.model.running import device_of, to_device, undisturbed
from headprune.model.transfers import in_main_memory

#: Train rows that the model answers, half of them to find another order and half to judge it.
_ROWS = 256
_BATCH = 32
#: Another order is far better where it is right on so many more of all labels, or on some more and
#: leaves at most half of the errors; and where so many more rows speak for it than against it, that
#: chance would do as well once in a million times.
_FAR, _SOME, _CHANCE = 0.2, 0.05, 1e-6
_SHOWN = 8

_HOW = {
    "name": "by their names",
    "number": "by their numbers",
    "sorted": "in sorted order, for nothing says which is which",
    "given": "as data.labels says",
}


@dataclass(frozen=True)
class Fit:
    """How the model's answers fit.

    Args:
        rows: Rows that were judged.
        accuracy: Share of labels that it gets right, by the numbers that they have.
        usual: The share of the most frequent label, which anyone gets right.
        order: For every number the class that fits far better; empty where none does.
        better: The share of right labels by that order.
    """

    rows: int
    accuracy: float
    usual: float
    order: tuple[int, ...] = ()
    better: float = math.nan

    def __str__(self) -> str:
        return f"right on {self.accuracy:.1%} of the labels of {self.rows} train rows"

    @property
    def at_chance(self) -> bool:
        """Whether the model does no better than who always says the most frequent label."""
        return self.accuracy <= self.usual


def mapping_words(raw: RawData) -> str:
    """Which label is which class of the model, in words."""
    ids = sorted(raw.label_ids.items(), key=lambda item: item[1])
    shown = [
        f"{value!r} is class {number}{_called(raw, value, number)}"
        for value, number in ids[:_SHOWN]
    ]
    more = f", and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"labels: {', '.join(shown)}{more} ({_HOW[raw.numbering]})"


def check_order(model: nn.Module, data: Data, raw: RawData) -> tuple[Fit, tuple[str, ...]]:
    """Lets the model answer some train rows; returns how that fits, and what a reader should know
    of it.

    Raises:
        InvalidValue: another order of labels fits far better, and neither names nor the recipe say
            which is which.
    """
    fit = measure(model, data, len(raw.labels))
    if not fit.order:
        guessed = raw.numbering in ("sorted", "number")
        note = (
            f"labels were numbered {_HOW[raw.numbering]}; so the model is {fit}, no more than who"
            " always says "
        )
        note += "the most frequent one. If its classes have another order, data.labels says so"
        return fit, (note,) if guessed and fit.at_chance else ()
    order = _in_order(raw, fit.order)
    got = f"numbered {_HOW[raw.numbering]}, where the model is {fit}; "
    got += f"in the order {order} it is on {fit.better:.1%}"
    if raw.numbering in ("name", "given"):
        return fit, (
            f"labels are {got}. If that is the model's own order, data.labels: {order} says so",
        )
    must = "given, for another order of labels fits the model's answers far better"
    hint = (
        f"Add data.labels: {order} (--set 'data.labels={order}'), the label of every class of the"
        " model in its order; "
    )
    hint += "or your own order, which is then taken."
    raise InvalidValue("data.labels", must, f"labels {got}", hint)


def measure(model: nn.Module, data: Data, n_labels: int) -> Fit:
    """Fits an order of labels to one half of some train rows, and judges it on the other half.

    So a good order is no luck of the rows that it was found on, however many orders there are.
    """
    train = data.examples["train"]
    most = min(_ROWS, len(train), len(data.examples["test"]) + len(data.examples["validation"]))
    chosen = [train[i] for i in random.Random(0).sample(range(len(train)), most)]
    counts = _answers(model, data, chosen, n_labels)  # [rows, labels, answers]
    half = len(chosen) // 2
    seen, judged = counts[:half].sum(0), counts[half:]
    total = max(judged.sum(), 1)
    right = np.einsum("nii->n", judged)
    usual = judged.sum((0, 2)).max(initial=0) / total
    accuracy = float(right.sum() / total)
    order = _best(seen)
    other = judged[:, np.arange(n_labels), order].sum(1)
    better = float(other.sum() / total)
    wins, losses = int((other > right).sum()), int((other < right).sum())
    gain = better - accuracy
    far = gain >= _FAR or (gain >= _SOME and 1 - better <= (1 - accuracy) / 2)
    far = far and _by_chance(wins, losses) <= _CHANCE
    found = (tuple(order.tolist()), better) if far else ((), math.nan)
    return Fit(len(judged), accuracy, float(usual), *found)


def facts_of_labels(raw: RawData, fit: Fit) -> Mapping[str, Any]:
    """The same for the record."""
    facts: dict[str, Any] = {"numbered": raw.numbering, "rows": fit.rows, "accuracy": fit.accuracy}
    facts["classes"] = [str(label) for label in raw.labels]
    return (
        {**facts, "better order": _values(raw, fit.order), "its accuracy": fit.better}
        if fit.order
        else facts
    )


def _answers(model: nn.Module, data: Data, rows: list[Any], n_labels: int) -> np.ndarray[Any, Any]:
    """How often each row's labels got which answers: ``[rows, labels, answers]``."""
    found: list[Tensor] = []
    device = device_of(model)
    with undisturbed(model), torch.no_grad():
        for start in range(0, len(rows), _BATCH):
            batch = to_device(data.collate(rows[start : start + _BATCH]), device)
            answers = logits_of(predict(model, batch)).argmax(-1)
            labels = batch["labels"].reshape(len(answers), -1)  # [rows, 1 or tokens]
            answers = answers.reshape(labels.shape)
            counted = (labels >= 0).long()
            places = labels.clamp(min=0) * n_labels + answers
            counts = torch.zeros(
                len(labels), n_labels * n_labels, dtype=torch.long, device=labels.device
            )
            found.append(counts.scatter_add_(1, places, counted).view(-1, n_labels, n_labels))
    return torch.cat(in_main_memory(found)).numpy()


def _best(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For every label an answer of its own, so that most are right; of equal choices the one that
    changes least."""
    from scipy.optimize import linear_sum_assignment

    _, order = linear_sum_assignment(2 * counts + np.eye(len(counts)), maximize=True)
    return np.asarray(order)


def _by_chance(wins: int, losses: int) -> float:
    """Probability of so many wins or more out of all rows that differ, were both orders equally
    good."""
    n = wins + losses
    return float(sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n)


def _called(raw: RawData, value: Any, number: int) -> str:
    name = str(raw.labels[number])
    return "" if name == str(value) else f" ({name})"


def _values(raw: RawData, order: tuple[int, ...]) -> list[Any]:
    """The data's labels in the order of the classes that they fit; what the data lacks is called as
    the model does."""
    called = {number: raw.said.get(value, value) for value, number in raw.label_ids.items()}
    by_class = {
        answer: called.get(number, raw.labels[number]) for number, answer in enumerate(order)
    }
    return [by_class[i] for i in range(len(order))]


def _in_order(raw: RawData, order: tuple[int, ...]) -> str:
    """The same as a recipe has it."""
    text: str = yaml.safe_dump(
        _values(raw, order), default_flow_style=True, allow_unicode=True, width=math.inf
    )
    return text.strip()
