"""Which batches a recovery of a run reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headprune.recipes.schema import RecoverStep
from headprune.recipes.validate import load_recipe
from headprune.run import prepared, recovering
from tests.recipe_fixtures import FIXTURES


def _first_rows(batches: Any) -> list[Any]:
    return [batch["input_ids"][0].tolist() for batch in batches]


@pytest.mark.parametrize(("method", "same"), [("lstsq", True), ("finetune", False)])
def test_only_a_training_gets_another_order_in_every_pass(method, same, tmp_path, monkeypatch):
    subject = prepared(load_recipe("llama-stories", FIXTURES["llama-stories"](tmp_path)))
    read: list[Any] = []

    def noted(model: Any, batches: Any, *args: Any, **kwargs: Any) -> None:
        read.append(batches)

    monkeypatch.setattr(recovering, "recover_", noted)
    small = copy.deepcopy(subject.model)
    step = RecoverStep(method=method, batch_size=4, rows="train", examples=8)
    recovering.recover_once(subject, small, step)
    (batches,) = read
    rows = []
    for batch in batches:
        lengths = batch["attention_mask"].sum(dim=1)
        rows += [row[:n].tolist() for row, n in zip(batch["input_ids"], lengths, strict=True)]
    train = [list(row["input_ids"]) for row in subject.data.examples["train"]]
    assert len(rows) == 8 < len(train)
    assert all(row in train for row in rows)
    # Caches of earlier passes are found by a batch's content, so they need the same batches again.
    assert (_first_rows(batches) == _first_rows(batches)) is same
