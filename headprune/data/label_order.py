"""Notice labels that are numbered in another order than the model's classes."""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from headprune.core.errors import InvalidValue
from headprune.data.datasets import Data, RawData
from headprune.data.labels import as_setting
from headprune.model.losses import logits_of, predict
from headprune.model.running import device_of, to_device, undisturbed
from headprune.model.transfers import in_main_memory

#: Train rows that the model answers: half of them choose another order, and half judge it.
_ROWS = 256
_BATCH = 32
#: Another order is far better where its accuracy is higher by ``_FAR``; or by ``_SOME``, if it also
#: halves the errors.
_FAR, _SOME = 0.2, 0.05
#: Largest probability, by the sign test, that chance favours the other order as much.
_CHANCE = 1e-6
#: Labels that a message lists.
_SHOWN = 8

_HOW = {
    "name": "by their names",
    "number": "by their numbers",
    "sorted": "in sorted order, because nothing says which class each one is",
    "given": "as data.labels says",
}


@dataclass(frozen=True)
class Fit:
    """How well a model's answers fit the labels.

    Args:
        rows: Rows that were judged.
        accuracy: Share of labels that the model predicts with the numbers they have.
        usual: Share of the most frequent label.
        order: The class of the model for each label number, in an order that fits far better;
            empty where there is none.
        better: Accuracy in that order.
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
        """Whether the model does no better than always predicting the most frequent label."""
        return self.accuracy <= self.usual


def mapping_words(raw: RawData, new: bool = False) -> str:
    """Return a sentence that says which label is which class of the model, which may be new."""
    # By class number, so that the sentence reads in the model's own order.
    ids = sorted(raw.label_ids.items(), key=lambda item: item[1])
    shown = []
    for value, number in ids[:_SHOWN]:
        name = str(raw.labels[number])
        shown.append(f"{value!r} is class {number}" + (f" ({name})" if name != str(value) else ""))
    more = f", and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    how = "of a new head" if new else _HOW[raw.numbering]
    return f"labels: {', '.join(shown)}{more} ({how})"


def check_order(
    model: nn.Module,
    data: Data,
    raw: RawData,
) -> tuple[Fit, tuple[str, ...]]:
    """Compare the model's answers on some train rows with the labels.

    Returns:
        The fit, and warnings for readers of the record.

    Raises:
        InvalidValue: another order of labels fits far better, and neither names nor the recipe
            say which label is which class.
    """
    fit = measure(model, data, len(raw.labels))
    how = _HOW[raw.numbering]
    if not fit.order:
        if not fit.at_chance or raw.numbering not in ("sorted", "number"):
            return fit, ()
        note = (
            f"labels were numbered {how}; so the model is {fit}, no more than if it always"
            " predicted the most frequent one. If its classes have another order, set data.labels"
        )
        return fit, (note,)
    order = _as_yaml(_labels_in_order(raw, fit.order))
    got = (
        f"numbered {how}, where the model is {fit}; in the order {order} it is right on"
        f" {fit.better:.1%}"
    )
    if raw.numbering in ("name", "given"):
        note = f"labels are {got}. If that is the model's own order, set data.labels: {order}"
        return fit, (note,)
    must = "given, because another order of labels fits the model's answers far better"
    setting = shlex.quote(f"data.labels={order}")
    hint = (
        f"Add data.labels: {order} (--set {setting}), one label per class in the model's"
        " order; or give an order of your own."
    )
    raise InvalidValue("data.labels", must, f"labels {got}", hint)


def measure(model: nn.Module, data: Data, n_labels: int) -> Fit:
    """Choose an order of labels on half of some train rows; judge it on the other half.

    So luck with the rows that chose an order cannot make it look good.

    Args:
        model: The model.
        data: Its examples.
        n_labels: Number of labels.
    """
    # 1. Count the answers to each label, on no more rows than are evaluated anyway.
    train = data.examples["train"]
    n_rows = min(_ROWS, len(train), len(data.examples["test"]) + len(data.examples["validation"]))
    chosen = [train[i] for i in random.Random(0).sample(range(len(train)), n_rows)]
    # [rows, labels, answers]
    counts = _answers(model, data, chosen, n_labels)
    half = len(chosen) // 2
    choosing, judging = counts[:half].sum(0), counts[half:]
    # 2. Accuracy with the numbers that labels have.
    total = max(judging.sum(), 1)
    right = np.einsum("nii->n", judging)  # [rows]
    accuracy = float(right.sum() / total)
    usual = float(judging.sum((0, 2)).max(initial=0) / total)
    # 3. Accuracy in the best order of the other half.
    order = _best_order(choosing)  # [labels]
    # [rows]
    right_in_order = judging[:, np.arange(n_labels), order].sum(1)
    better = float(right_in_order.sum() / total)
    # 4. Is it far better, and by more than chance?
    gain = better - accuracy
    far = gain >= _FAR or (gain >= _SOME and 1 - better <= (1 - accuracy) / 2)
    wins, losses = int((right_in_order > right).sum()), int((right_in_order < right).sum())
    if far and _sign_test(wins, losses) <= _CHANCE:
        return Fit(len(judging), accuracy, usual, tuple(order.tolist()), better)
    return Fit(len(judging), accuracy, usual)


def facts_of_labels(raw: RawData, fit: Fit) -> Mapping[str, Any]:
    """Return the numbering of labels and its fit, for the record."""
    facts: dict[str, Any] = {"numbered": raw.numbering, "rows": fit.rows, "accuracy": fit.accuracy}
    facts["classes"] = list(map(str, raw.labels))
    if fit.order:
        facts["better order"] = _labels_in_order(raw, fit.order)
        facts["its accuracy"] = fit.better
    return facts


def _answers(
    model: nn.Module,
    data: Data,
    rows: list[Any],
    n_labels: int,
) -> np.ndarray[Any, Any]:
    """Count how often each row's labels got which answers: ``[rows, labels, answers]``."""
    counts: list[Tensor] = []
    device = device_of(model)
    with undisturbed(model), torch.no_grad():
        for start in range(0, len(rows), _BATCH):
            batch = to_device(data.collate(rows[start : start + _BATCH]), device)
            answers = logits_of(predict(model, batch)).argmax(-1)
            # [rows, 1 or tokens]
            labels = batch["labels"].reshape(len(answers), -1)
            answers = answers.reshape(labels.shape)
            # Each pair of label and answer is one cell; padding, label -100, counts as 0.
            cells = labels.clamp(min=0) * n_labels + answers
            counted = (labels >= 0).long()
            empty = torch.zeros(len(labels), n_labels**2, dtype=torch.long, device=labels.device)
            per_row = empty.scatter_add_(1, cells, counted)
            counts.append(per_row.view(-1, n_labels, n_labels))
    return torch.cat(in_main_memory(counts)).numpy()


def _best_order(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Assign an answer to each label so that most are right.

    Of equal choices, the one that changes fewest labels.
    """
    from scipy.optimize import linear_sum_assignment

    # Doubled counts leave room for a preference that decides only between equal choices.
    _, order = linear_sum_assignment(2 * counts + np.eye(len(counts)), maximize=True)
    return np.asarray(order)


def _sign_test(wins: int, losses: int) -> float:
    """Return the probability of at least ``wins`` wins if both orders are equally good."""
    # Rows that both orders get right, or both wrong, say nothing.
    n = wins + losses
    return float(sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n)


def _labels_in_order(raw: RawData, order: tuple[int, ...]) -> list[Any]:
    """Return the data's label of each class in an order.

    A class without a label in the data has the model's name, or its number where that name is a
    label of another class.
    """
    by_number = {}
    for value, number in raw.label_ids.items():
        by_number[number] = raw.dataset_names.get(value, as_setting(value))
    taken = set(map(str, by_number.values()))
    by_class = {}
    for number, answer in enumerate(order):
        name = raw.labels[number]
        spare = f"class {answer}" if str(name) in taken else name
        by_class[answer] = by_number.get(number, spare)
    return list(dict(sorted(by_class.items())).values())


def _as_yaml(labels: list[Any]) -> str:
    """Return labels as a recipe has them, in one line."""
    text: str = yaml.safe_dump(labels, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.strip()
