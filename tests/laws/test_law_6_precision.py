"""Law 6 in numbers: how far scores of 64 examples move, relative to their layer's largest, in fp64
and in fp32.

``test_law_6_scores`` tries the law in every corner; here every change comes with the bound that
users are promised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headprune.scoring import Attattr, IntegratedGradients, Shapley
from tests.laws.support import TRANSFORMERS, Subject, set_implementation, subject_of
from tests.laws.test_law_6_scores import BLOCKS, SCORERS, data, renumbered_
from tests.scoring_help import score, split

#: Relative to the layer's largest score.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4}
#: Those of many passes, with as few as they can do with.
FEW: list[Any] = [Attattr(steps=2), IntegratedGradients(points=2), Shapley(orders=2)]
FEW = [s for s in FEW if type(s) in map(type, SCORERS)]
CHEAP = [s for s in SCORERS if type(s) not in map(type, FEW)]
ALL = CHEAP + FEW

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("dtype", BOUNDS, ids=["fp64", "fp32"])]
#: Examples of a batch; a multiple of no batch size below.
EXAMPLES = 64
names = pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "multi_head_attention"])


def examples(name: str, dtype: torch.dtype) -> tuple[Subject, dict[str, Tensor]]:
    subject = subject_of(name)
    batch = data(subject, EXAMPLES)
    subject.model.to(dtype)
    return subject, {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def scored(subject: Subject, scorers: Sequence[Any], batches: list[Any]) -> Any:
    if not scorers:
        pytest.skip("the scorer of --scorer is exempt here")
    return score(subject, scorers, batches)


def check(found: Sequence[Any], expected: Sequence[Any], dtype: torch.dtype) -> None:
    """No score moves by more than the bound, relative to the largest of its site."""
    beyond = {}
    for a, b in zip(found, expected, strict=True):
        for site, x, y in zip(
            b.sites, *(map(torch.DoubleTensor, s.values) for s in (a, b)), strict=True
        ):
            assert y.abs().max() > 0
            change = float((x - y).abs().max() / y.abs().max())
            if not change <= BOUNDS[dtype]:
                beyond[f"{a.scorer} {dict(a.settings)} at {site.name}"] = change
    assert not beyond, beyond


@names
def test_batch_size_and_order(name: str, dtype: torch.dtype) -> None:
    subject, batch = examples(name, dtype)
    expected = scored(subject, ALL, [batch])
    check(scored(subject, ALL, split(batch, 7)), expected, dtype)
    free = [i for i, s in enumerate(ALL) if s not in BLOCKS]
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(0))
    mixed = {k: v[order] for k, v in batch.items()}
    found = scored(subject, [ALL[i] for i in free], split(mixed, 7))
    check(found, [expected[i] for i in free], dtype)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_extra_padding(name: str, dtype: torch.dtype) -> None:
    subject, batch = examples(name, dtype)
    assert batch["attention_mask"].ndim == 2

    def longer(tokens: Tensor, key: str) -> Tensor:
        if tokens.shape[:2] != batch["input_ids"].shape:
            return tokens
        fill = {"attention_mask": 0, "labels": -100}.get(key, 7)  # 7 is a word like any other
        return torch.cat([tokens, tokens.new_full((len(tokens), 5), fill)], 1)

    padded = {k: longer(v, k) for k, v in batch.items()}
    assert padded["input_ids"].shape[1] == batch["input_ids"].shape[1] + 5
    check(scored(subject, ALL, [padded]), scored(subject, ALL, [batch]), dtype)


@pytest.mark.parametrize("name", [n for n in TRANSFORMERS if n in ("bert", "gpt2")])
def test_attention_implementation(name: str, dtype: torch.dtype) -> None:
    """Not Llama and ViT: their eager softmax is in fp32 in every dtype."""
    subject, batch = examples(name, dtype)
    found = []
    for implementation in ("sdpa", "eager"):
        set_implementation(subject.model, implementation)
        found.append(scored(subject, ALL, [batch]))
    check(found[1], found[0], dtype)


@names
def test_permutation_of_heads(name: str, dtype: torch.dtype) -> None:
    subject, batch = examples(name, dtype)
    # Its drawn orders name heads by their places.
    scorers = [s for s in ALL if not isinstance(s, Shapley)]
    expected = scored(subject, scorers, [batch])
    other = subject.copy()
    orders = renumbered_(subject, other)
    found = []
    for scores in scored(dataclasses.replace(subject, model=other), scorers, [batch]):
        rows = zip(scores.sites, scores.values, strict=True)
        back = [
            [row[orders[site.name].index(unit)] for unit in range(len(row))] for site, row in rows
        ]
        found.append(
            type(
                "Moved", (), {"scorer": scores.scorer, "settings": scores.settings, "values": back}
            )()
        )
    check(found, expected, dtype)
