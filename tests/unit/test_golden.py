"""Stored values of every schema version that was released load, and say what they said:
``tests/golden``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headprune.core
from headprune.core.codec import Value
from headprune.core.heads import HeadId
from headprune.core.scores import HeadScores
from headprune.maps.attention_maps import AttentionMaps
from tests.golden.check import check_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FIRST = "model.layers.0.self_attn"


def kinds() -> dict[str, type[Value]]:
    """Every stored value of the rooms that hold values for users, by name."""
    rooms = (headprune.core, headprune.maps, headprune.report)
    for room in rooms:
        for module in pkgutil.iter_modules(room.__path__):
            importlib.import_module(f"{room.__name__}.{module.name}")
    within = tuple(f"{room.__name__}." for room in rooms)
    return {k.__name__: k for k in Value.__subclasses__() if k.__module__.startswith(within)}


#: What every file must say: of each kind and version, a few facts that were true when it was
#: written.
FACTS: dict[str, Callable[[Any], Any]] = {
    "HeadScores-1": lambda s: (
        [s.scorer, round(s[HeadId(FIRST, 0)], 6), s.samples.matrix[2].tolist(), s.costs.length]
        == ["taylor", 0.713048, [2.0, 2.125, 2.25, 2.375], 128]
        and s.curvature.matrix[0].tolist() == [1.25, 0.25, 0.25, 0.25]
    ),
    "PruningPlan-1": lambda p: (
        [p.mask.kept(FIRST), p.budget.amount, p.scorer] == [(0, 1, 2, 3), 0.5, "taylor"]
    ),
    "HeadMask-1": lambda m: [m.n_kept, m.n_heads, m.kept(FIRST)] == [4, 8, (0, 1, 2, 3)],
    "Budget-1": lambda b: [b.kind, b.amount, b.length] == ["keep_macs", 0.5, 128],
    "SiteBudget-1": lambda b: [b.sites, b.budget.amount] == ["*layers.0*", 3],
    "HeadId-1": lambda h: [h.site, h.head] == [FIRST, 3],
    "AttentionSite-1": lambda s: [s.units, s.head_dim] == [((0, 1), (2, 3)), 64],
    "RunRecord-1": lambda r: (
        [r.status, len(r.quality), r.plan.mask.n_kept, r.hardware["threads"]] == ["done", 5, 4, 2]
    ),
    "SweepTable-1": lambda t: (
        [t.metric, len(t.rows), t.settings()[0].validation.mean] == ["accuracy", 8, 0.02]
    ),
    "AttentionPictures-1": lambda p: (
        [len(p.sites), p.sites[0].heads, p.whole] == [2, (0, 1, 2, 3), True]
    ),
    "Agreement-1": lambda a: [a.names, a.pairs[0].spearman.low] == [("taylor", "fisher"), -0.25],
    "ChangedAnswers-1": lambda c: [c.n_lost, c.rows[0].after] == [1, "bad"],
    "LatencyTable-1": lambda t: [t.whole, t.sites[0].seconds] == [1.0, (0.1, 0.3, 0.4)],
    "Explanation-1": lambda e: [len(e.units), len(e.removed)] == [4, 2],
    "PlanDifference-1": lambda d: (
        "kept by other alone, 2 heads:\n  model.layers.1.self_attn  0, 1" in str(d)
    ),
    "RecordDifference-1": lambda d: "base, test accuracy: 0.9763 -> 0.9763" in str(d),
}


@pytest.mark.parametrize("name", sorted(kinds()))
def test_every_version_of_every_kind_has_a_file_and_facts(name: str) -> None:
    wanted = {f"{name}-{version}" for version in range(1, kinds()[name].SCHEMA_VERSION + 1)}
    assert {path.stem for path in GOLDEN.glob(f"{name}-*.json")} == wanted, (
        "see tests/golden/README.md"
    )
    assert wanted <= set(FACTS)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_loads_and_says_what_it_said(path: Path) -> None:
    check_file(path, kinds(), FACTS)


#: What must be in the files of runs whose scorer `auto` chose.
CHOSEN: dict[str, Callable[[Any], Any]] = {
    "HeadScores-1": lambda s: (
        [s.choice.chosen, s.choice.by_kind, s.choice.margin, s.choice.beats_random]
        == ["surgeon (curvature=logits), by kind", True, 0.125, True]
    ),
    "RunRecord-1": lambda r: (
        [c.same_as for c in r.scores.choice.candidates] == ["", "", "taylor", ""]
    ),
}


@pytest.mark.parametrize(
    "path", sorted((GOLDEN / "auto").glob("*.json")), ids=lambda path: path.stem
)
def test_a_file_with_a_choice_loads_and_says_what_it_said(path: Path) -> None:
    check_file(path, kinds(), CHOSEN)


def test_scores_that_nobody_chose_say_nothing_of_it() -> None:
    """So older files, and the digests by which plans know their scores, stay what they were."""
    scores = HeadScores.load(GOLDEN / "HeadScores-1.json")
    assert scores.choice is None
    assert "choice" not in scores.to_dict()
    assert {path.stem for path in (GOLDEN / "auto").glob("*.json")} == set(CHOSEN)


def test_attention_maps_load() -> None:
    maps = AttentionMaps.load(GOLDEN / "AttentionMaps-1.safetensors")
    site = maps.sites[0].site
    assert (maps.n_examples, len(list(maps))) == (1, 2)
    assert maps.labels(site, 0)[0] == ("t0.0", "t0.1", "t0.2")
    assert maps.shown(HeadId(site, 0), 0)[1, 0] > 0.9
