"""``repriced``: levels priced again around the knapsack's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.core.heads import HeadMask
from headprune.core.ladders import SiteLadder
from headprune.core.scores import HeadScores
from headprune.selection import Repriced
from tests.selection_problems import make, site

SITES = [site("a", 6), site("b", 6), site("c", 6)]


def scores_of(seed: int) -> HeadScores:
    rng = np.random.default_rng(seed)
    return make(SITES, [rng.uniform(0.1, 1, len(s.units)) for s in SITES])


class Together:
    """A loss that adds up by site, and rises more where two sites are cut."""

    def __init__(self, scores: HeadScores, seed: int, tie: float) -> None:
        rng = np.random.default_rng(seed)
        self.scores, self.tie = scores, tie
        self.noise = rng.normal(0, 0.01, 50)
        self.calls = 0

    def __call__(self, masks: Sequence[HeadMask]) -> Any:
        self.calls += len(masks)
        rows = []
        for mask in masks:
            lost = []
            for row, values in zip(mask.rows, self.scores.values, strict=True):
                lost.append(sum(v for h, v in enumerate(values) if h not in row.kept))
            # The first two sites make up for each other, so cutting both costs more.
            rows.append(sum(lost) + self.tie * lost[0] * lost[1] + self.noise)
        return np.stack(rows)


@pytest.mark.parametrize("seed", range(6))
def test_the_loss_falls_and_the_budget_is_kept(seed: int) -> None:
    scores = scores_of(seed)
    loss = Together(scores, seed, tie=2.0)
    budget = hp.Budget(keep_heads=9)
    before = hp.select(scores, budget, "knapsack")
    after = hp.select(scores, budget, "repriced", loss=loss)
    assert after.mask.n_kept <= 9
    means = loss([before.mask, after.mask]).mean(1)
    assert means[1] <= means[0]
    if after.mask == before.mask:
        return
    assert means[1] < means[0]
    (note,) = [note for note in after.notes if "pricing again" in note]
    assert f"{means[0]:.4g} by scores, {means[1]:.4g} after" in note


def test_it_finds_what_prices_of_single_sites_miss() -> None:
    changed = 0
    for seed in range(6):
        scores = scores_of(seed)
        loss = Together(scores, seed, tie=2.0)
        plans = [
            hp.select(scores, hp.Budget(keep_heads=9), "knapsack"),
            hp.select(scores, hp.Budget(keep_heads=9), "repriced", loss=loss),
        ]
        changed += plans[0].mask != plans[1].mask
    assert changed >= 3


def test_a_loss_that_adds_up_keeps_the_plan_of_the_knapsack() -> None:
    scores = scores_of(0)
    budget = hp.Budget(keep_heads=9)
    loss = Together(scores, 0, tie=0.0)
    found = hp.select(scores, budget, "repriced", loss=loss)
    assert found.mask == hp.select(scores, budget, "knapsack").mask
    n_steps = 3 * 2 * 2  # sites, directions, reach
    assert loss.calls <= 1 + n_steps, "one round shows that nothing is better"


def test_a_gain_within_noise_is_not_taken() -> None:
    scores = scores_of(0)
    budget = hp.Budget(keep_heads=9)
    rng = np.random.default_rng(0)

    def noise(masks: Sequence[HeadMask]) -> Any:
        return rng.normal(0, 1, (len(masks), 30))

    found = hp.select(scores, budget, Repriced(margin=4.0), loss=noise)
    assert found.mask == hp.select(scores, budget, "knapsack").mask


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"reach": 0}, {"margin": -1.0}])
def test_settings_that_it_refuses(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        Repriced(**settings)


def test_prices_and_a_loss_choose_it_by_default() -> None:
    sites = [site("a", 2), site("b", 2)]
    prices = tuple(SiteLadder(s.name, (0, 1, 2), (0.5, 0.1, 0.0)) for s in sites)
    scores = replace(make(sites, [[0.4, 0.1]] * 2), ladders=prices)
    loss = Together(scores, 0, tie=0.0)
    assert hp.select(scores, hp.Budget(keep_heads=2), loss=loss).selector == "repriced"
    assert hp.select(scores, hp.Budget(keep_heads=2)).selector == "knapsack"
