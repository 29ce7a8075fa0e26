"""Law 6: scores depend on the examples and on nothing else: not on batches, padding, kernels, order
or head numbers.

``random`` is excepted: it looks at nothing. ``auto`` is held to it by what it chose: its scores are
those of another scorer. It deals rows to folds by their place, so that order matters to it.
``Taylor(reduce="batch")`` and learned gates are defined by blocks in data order, so that order
matters to them, the loader's batch size does not.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.choice import Choice
from headprune.core.slabs import blocks
from headprune.model.sites import lookup, slabs_of
from headprune.scoring import Attattr, Auto, HardConcrete, SubsetTopk, Taylor, registry
from headprune.scoring._base import Scorer
from tests.laws import chosen
from tests.laws.support import CLOSE, TRANSFORMERS, Subject, set_implementation, subject_of
from tests.laws.support import examples_of as data
from tests.scoring_help import score, split

#: A few steps tell as much here as the default's hundreds.
LEARNED: dict[str, Any] = {
    "hard_concrete": HardConcrete(steps=3, block=2),
    "subset_topk": SubsetTopk(steps=3, block=2),
}
FEW_STEPS: dict[str, Any] = {**LEARNED, "attattr": Attattr(steps=3)}
EXCEPTED = {"auto", "random"}
SCORERS: list[Any] = [
    FEW_STEPS.get(name) or registry.get(name)() for name in registry.names() if name not in EXCEPTED
]
SCORERS += [
    Taylor(reduce="token"),
    Taylor(reduce="signed"),
    Taylor(normalize="l2"),
    Taylor(reduce="batch", block=2),
]


def name_of(scorer: Any) -> str:
    return registry.resolve(scorer, Scorer, "scorer")[0]


if chosen.SCORER:  # `pytest tests/laws --scorer NAME`
    SCORERS = [s for s in SCORERS if name_of(s) == chosen.SCORER]
BLOCKS = [s for s in SCORERS if getattr(s, "reduce", None) == "batch" or s in LEARNED.values()]


def same(found: Sequence[Any], expected: Sequence[Any], **tolerance: float) -> None:
    """Values and standard errors agree."""
    for a, b in zip(found, expected, strict=True):
        assert (a.scorer, a.settings, a.n_examples) == (b.scorer, b.settings, b.n_examples)
        assert max(abs(v) for row in b.values for v in row) > 1e-4
        for x, y in ((a.values, b.values), (a.standard_errors, b.standard_errors)):
            assert (x is None) == (y is None)
            for row, other in zip(x or (), y or (), strict=True):
                row = torch.tensor(row, dtype=torch.float64)
                other = torch.tensor(other, dtype=torch.float64)
                assert_close(
                    row,
                    other,
                    **(tolerance or CLOSE),
                    msg=lambda m, s=a: f"{s.scorer} {s.settings}: {m}",
                )


def test_every_scorer_is_held_to_this_law() -> None:
    wanted = {chosen.SCORER} if chosen.SCORER else set(registry.names())
    assert {name_of(s) for s in SCORERS} == wanted - EXCEPTED


def test_batch_size(subject: Subject) -> None:
    batch = data(subject, 7)
    expected = score(subject, SCORERS, [batch])
    # Batches of one example are tried on one model: they take the longest.
    for size in (1, 3) if subject.layout.name == "bert" else (3,):
        same(score(subject, SCORERS, split(batch, size)), expected)


@pytest.mark.slow
def test_order_of_the_data(subject: Subject) -> None:
    batch, order = data(subject, 5), [3, 0, 4, 2, 1]
    mixed = {k: v[order] for k, v in batch.items()}
    scorers = [s for s in SCORERS if s not in BLOCKS]
    same(score(subject, scorers, split(mixed, 2)), score(subject, scorers, split(batch, 2)))


def choice(subject: Subject, batches: list[Any]) -> Choice:
    scorer = Auto(candidates=("taylor", "obs", {"surgeon": {"blocks": 2}}), random_draws=1)
    (found,) = score(subject, [scorer], batches)
    assert found.choice is not None
    return cast("Choice", found.choice)


def same_choice(found: Choice, expected: Choice) -> None:
    """The same candidate, and for all of them the same loss, difference and interval."""
    assert (found.chosen, found.n_examples) == (expected.chosen, expected.n_examples)
    by_name = {one.name: one for one in expected.candidates}
    for one in found.candidates:
        other = by_name.pop(one.name)
        for a, b in zip(
            (one.loss, one.low, one.high), (other.loss, other.low, other.high), strict=True
        ):
            assert abs(a - b) < 1e-6 * (1 + abs(expected.whole)), one.name
    assert not by_name


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_batch_size_of_what_auto_chooses(name: str) -> None:
    subject = subject_of(name)
    batch = data(subject, 7)
    same_choice(choice(subject, split(batch, 3)), choice(subject, [batch]))


# ---------------------------------------------------------------- padding


def padded(subject: Subject, left: int, right: int) -> dict[str, Any]:
    """The examples of a text model as they are without padding, then with so many tokens more than
    the longest."""
    mask = subject.batch["attention_mask"]
    longest = int(mask.sum(1).max())
    rows = []
    for ids, here in zip(subject.batch["input_ids"], mask.bool(), strict=True):
        kept = ids[here]
        before = left + (longest - len(kept) if left else 0)
        after = longest + left + right - before - len(kept)
        padding = ids.new_full((1,), 7)  # a word like any other: only the mask says that it is none
        rows.append(
            (
                torch.cat([padding.expand(before), kept, padding.expand(after)]),
                torch.cat(
                    [mask.new_zeros(before), mask.new_ones(len(kept)), mask.new_zeros(after)]
                ),
            )
        )
    changed = {
        "input_ids": torch.stack([r[0] for r in rows]),
        "attention_mask": torch.stack([r[1] for r in rows]),
    }
    return {**subject.batch, **changed}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_padding_on_the_right(name: str) -> None:
    subject = subject_of(name)
    alone = [{k: v[i : i + 1] for k, v in padded(subject, 0, 0).items()} for i in range(3)]
    alone = [
        {k: v[:, : int(b["attention_mask"].sum())] if v.ndim == 2 else v for k, v in b.items()}
        for b in alone
    ]
    assert [b["input_ids"].shape[1] for b in alone] == [7, 7, 4]
    expected = score(subject, SCORERS, alone)
    same(score(subject, SCORERS, [padded(subject, 0, 0)]), expected)
    same(score(subject, SCORERS, [padded(subject, 0, 3)]), expected)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_of_what_auto_chooses(name: str) -> None:
    subject = subject_of(name)
    twice = [{k: torch.cat([v, v]) for k, v in padded(subject, 0, more).items()} for more in (0, 3)]
    same_choice(choice(subject, [twice[1]]), choice(subject, [twice[0]]))


@pytest.mark.parametrize("labelled", [False, True], ids=["inputs", "labels"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_on_the_left(name: str, labelled: bool) -> None:
    subject = subject_of(name)
    batches = [padded(subject, 0, 0), padded(subject, 3, 0)]
    for batch in batches:
        if labelled:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        # Its positions are absolute: they begin at the first token that is no padding.
        if name == "gpt2":
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    right, left = (score(subject, SCORERS, [b]) for b in batches)
    # Llama's rotary angles are relative, but their sines are computed in float32, at other
    # positions.
    same(left, right, **({"rtol": 1e-4, "atol": 1e-5} if name == "llama" else CLOSE))


def test_the_length_of_other_examples() -> None:
    """An example's gradients are the same beside a longer one."""
    subject = subject_of("bert")
    short = {k: v[2:] for k, v in subject.batch.items()}
    short = {k: v[:, :4] if v.ndim == 2 else v for k, v in short.items()}
    beside = hp.scoring.gate_gradients(subject.model, [subject.batch])[2]
    assert_close(hp.scoring.gate_gradients(subject.model, [short])[0], beside, **CLOSE)


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_attention_implementation(name: str) -> None:
    subject = subject_of(name)
    found = []
    for implementation in ("sdpa", "eager"):
        set_implementation(subject.model, implementation)
        found.append(score(subject, SCORERS, [subject.batch]))
    # Eager Llama and ViT take their softmax in float32, whatever the model's dtype.
    loose = name in ("llama", "vit")
    same(found[1], found[0], **({"rtol": 1e-4, "atol": 1e-5} if loose else CLOSE))


# ---------------------------------------------------------------- numbers of heads


def renumbered_(subject: Subject, model: nn.Module) -> dict[str, list[int]]:
    """Permutes the units of every site in the weights, and the heads inside each; returns the new
    order of units."""
    chance, orders = random.Random(0), {}
    for site in subject.sites:
        module = model.get_submodule(site.name)
        units = list(range(len(site.units)))
        while units == sorted(units):
            chance.shuffle(units)
        heads = []  # heads[new position] = old head
        for unit in units:
            members = list(site.units[unit])
            chance.shuffle(members)
            heads += members
        for slab in slabs_of(subject.layout, module):
            starts, start = {}, 0
            for unit, head, width in blocks(site.geometry, slab.units, slab.packing):
                starts[unit, head] = start
                start += width
            index: list[int] = []
            for unit, head, width in blocks(site.geometry, slab.units, slab.packing):
                source = starts[unit, units[head] if unit in ("key", "value") else heads[head]]
                index += range(source, source + width)
            assert sorted(index) == list(range(start))
            reorder_(lookup(module, slab.path), slab.axis, index)
        orders[site.name] = units
    return orders


@torch.no_grad()
def reorder_(target: Any, axis: str | int, index: list[int]) -> None:
    if isinstance(target, Tensor):
        target.copy_(target.index_select(int(axis), torch.tensor(index)))
        return
    transposed = hasattr(target, "nf")
    dimension = int((axis == "in") != transposed)
    target.weight.copy_(target.weight.index_select(dimension, torch.tensor(index)))
    if axis == "out" and target.bias is not None:
        target.bias.copy_(target.bias[index])


def test_scores_follow_a_permutation_of_heads(subject: Subject) -> None:
    batch = data(subject, 5)
    expected = score(subject, SCORERS, [batch])
    other = subject.copy()
    orders = renumbered_(subject, other)
    assert_close(subject.run(other), subject.run(), **CLOSE)
    moved_heads = score(dataclasses.replace(subject, model=other), SCORERS, [batch])
    for found, old in zip(moved_heads, expected, strict=True):
        tolerance = CLOSE
        # Its drawn orders name heads by their places: equal up to what is drawn.
        if found.scorer == "shapley":
            spread = max(e for row in old.standard_errors or () for e in row)
            tolerance = {"rtol": 0.0, "atol": 5 * spread}
        for site, row, before in zip(subject.sites, found.values, old.values, strict=True):
            moved = [before[unit] for unit in orders[site.name]]
            assert_close(
                torch.tensor(row, dtype=torch.float64),
                torch.tensor(moved, dtype=torch.float64),
                **tolerance,
            )
        assert found.values != old.values
