"""Budgets by kind of attention and by pattern, and kinds told apart wherever scores are shown."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headprune as hp
from headprune.core.errors import InvalidValue, UnknownName
from headprune.core.heads import AttentionSite
from headprune.core.plan import Budget, PruningPlan, SiteBudget
from headprune.core.record import RunRecord
from headprune.core.scores import Cost, CostTable, HeadScores
from headprune.layouts import registry
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import RecipeError, check_recipe, recipe_yaml
from headprune.report import render_html
from headprune.report.heatmap import heat_map
from headprune.report.repeat import python_lines
from headprune.run import choosing
from headprune.run.runner import prepared
from headprune.selection import registry as selectors
from headprune.selection._api import _uneven_notes
from tests.selection_problems import make, site, unit_cost

BY_SCORES = [name for name in selectors.names() if not selectors.get(name).needs]
HALF, QUARTER = Budget(keep_heads=0.5), Budget(keep_heads=0.25)


SITES = (
    site("encoder.0", 4, kind="self"),
    site("encoder.1", 4, kind="self"),
    site("decoder.0.self_attn", 4),
    site("decoder.0.cross", 4, kind="cross"),
    site("decoder.1.self_attn", 8, 4, policy="balanced"),
    site("decoder.1.cross", 4, kind="cross"),
)


def scores_of(sites: Sequence[AttentionSite] = SITES) -> HeadScores:
    """Scores of another size for every kind: one budget for all would cut one kind alone."""
    rng, scale = random.Random(0), {"self": 1.0, "causal": 100.0, "cross": 0.01}
    values = [[scale[s.kind] * (rng.random() + 0.1) for _ in s.units] for s in sites]
    costs = [[unit_cost(len(u), 16 * (s.kind == "causal")) for u in s.units] for s in sites]
    errors = tuple(tuple(0.1 * v for v in row) for row in values)
    return replace(make(sites, values, costs), standard_errors=errors)


def kept(plan: PruningPlan, *names: str) -> int:
    return sum(len(plan.mask.kept(name)) for name in names)


@pytest.mark.parametrize("selector", BY_SCORES)
def test_every_group_meets_its_own_budget_and_the_rest_is_kept_whole(selector: str) -> None:
    plan = hp.select(scores_of(), {"cross": HALF, "decoder.?.self_attn": HALF}, selector)
    assert kept(plan, "encoder.0", "encoder.1") == 8
    assert kept(plan, "decoder.0.cross", "decoder.1.cross") == 4
    assert 5 <= kept(plan, "decoder.0.self_attn", "decoder.1.self_attn") <= 6
    for s in SITES:
        s.check(plan.mask.kept(s.name))


def test_a_kind_that_keeps_far_fewer_heads_is_named() -> None:
    """A budget for all kinds removes few causal heads here: their scores are the largest."""

    def named(plan: PruningPlan) -> list[str]:
        return [note for note in plan.notes if "may not compare" in note]

    (note,) = named(hp.select(scores_of(), HALF))
    few = "2 of 8 heads of kind self, 2 of 8 heads of kind cross"
    assert note.startswith(f"Kept are {few}, and 50% of all heads.")
    even = {"self": HALF, "causal": HALF, "cross": HALF}
    assert named(hp.select(scores_of(), even)) == []
    assert named(hp.select(scores_of(), Budget(keep_heads=1.0))) == []
    # Without any head, no kind keeps fewer than another.
    empty = hp.HeadMask.from_keep({s.name: [] for s in SITES}, {s.name: 8 for s in SITES})
    assert list(_uneven_notes(SITES, empty)) == []


@pytest.mark.parametrize("name", ["net.a[b]", "net.a*", "net.a?", "net.[!x]"])
def test_the_name_of_a_site_is_that_site_alone(name: str) -> None:
    """Whatever it is as a pattern: ``net.a[b]`` fits no name here, ``net.a*`` fits two."""
    scores = scores_of([site(n, 4, kind="self") for n in (name, "net.ab", "net.b")])
    plan = hp.select(scores, {name: HALF})
    assert [kept(plan, s.name) for s in scores.sites] == [2, 4, 4]
    assert [s.name for s in scores.of(name).sites] == [name]
    plan = hp.select(scores, {name: HALF, "net.ab": QUARTER})
    assert [kept(plan, s.name) for s in scores.sites] == [2, 1, 4]


@pytest.mark.parametrize(
    ("selector", "currency"),
    [
        *((selector, "keep_heads") for selector in BY_SCORES),
        ("global_topk", "keep_params"),
        ("knapsack", "keep_macs"),
    ],
)
def test_a_group_is_cut_as_if_it_were_alone(selector: str, currency: str) -> None:
    """Its plan is that of a model that has nothing but its heads."""
    scores, budget = scores_of(), Budget(**{currency: 0.6})
    plan = hp.select(scores, {"cross": budget, "self": HALF}, selector)

    def of_cross(rows: Any) -> Any:
        return tuple(row for row, s in zip(rows, SITES, strict=True) if s.kind == "cross")

    units = of_cross(scores.costs.units)
    alone = replace(
        scores,
        sites=of_cross(SITES),
        values=of_cross(scores.values),
        standard_errors=of_cross(scores.standard_errors),
        costs=CostTable(Cost.sum(c for row in units for c in row), units, 10),
    )
    for row in hp.select(alone, budget, selector).mask.rows:
        assert plan.mask.kept(row.site) == row.kept


def test_a_budget_of_the_cache_is_one_of_the_causal_sites() -> None:
    """Other mappings that are refused: ``tests/selection_answers.json``."""
    grouped = scores_of(tuple(replace(s, policy="group") for s in SITES))
    plan = hp.select(grouped, {"causal": Budget(keep_kv=0.5)})
    causal = [s.name for s in SITES if s.kind == "causal"]
    assert kept(plan, *causal) < 12
    assert kept(plan, *(s.name for s in SITES)) == 16 + kept(plan, *causal)
    with pytest.raises(InvalidValue, match=r"select\(budget=\)\['cross'\]\.keep_kv: .*no KV cache"):
        hp.select(scores_of(), {"cross": Budget(keep_kv=0.5)})


def test_one_key_for_all_is_one_budget_for_all() -> None:
    one, all_of_them = hp.select(scores_of(), HALF), hp.select(scores_of(), {"*": HALF})
    assert one.mask == all_of_them.mask
    assert (all_of_them.budget, all_of_them.budgets) == (None, (SiteBudget("*", HALF),))


def test_a_group_may_lose_its_last_head_and_the_plan_says_so() -> None:
    """By its budget as by ``must_remove``; only the whole model keeps one."""
    scores = scores_of()
    names = [site.name for site in scores.sites if site.kind == "cross"]
    free = hp.selection.GlobalTopk(min_heads=0)
    plan = hp.select(scores, {"cross": Budget(keep_heads=0.01)}, free)
    assert {row.site for row in plan.mask.rows if not row.kept} == set(names)
    assert f"Without a head: {', '.join(names)}." in plan.notes
    one = hp.select(scores, {"cross": Budget(keep_heads=1)}, free).mask
    assert one.n_kept == scores.n_heads - scores.of("cross").n_heads + 1


def test_the_plan_records_and_prints_its_budgets(tmp_path: Path) -> None:
    plan = hp.select(scores_of(), {"cross": HALF, "encoder.*": Budget(keep_macs=0.5, length=9)})
    assert PruningPlan.load(plan.save(tmp_path / "plan.json")) == plan
    words = "cross: keep 50 % of the heads, encoder.*: keep 50 % of the MACs at 9 tokens"
    assert plan.wanted == words
    assert f"by fake, {words})" in str(plan)
    assert hp.select(scores_of(), HALF).then(plan).budgets == plan.budgets
    old = plan.to_dict()
    del old["budgets"]
    assert PruningPlan.from_dict(old).budgets == (), "plans written before this still load"


def record_of(plan: PruningPlan, scores: HeadScores) -> RunRecord:
    return RunRecord("test", "done", "report", "2026-01-01", scores=scores, plan=plan)


def test_the_report_names_kinds_and_budgets() -> None:
    scores = scores_of()
    record = record_of(hp.select(scores, {"cross": HALF, "self": QUARTER}), scores)
    grid = heat_map(record)
    assert grid is not None
    kinds = {s.name: s.kind for s in SITES}
    assert [{kinds[row.site] for row in group.rows} for group in grid.groups] == [
        *({"self"}, {"causal"}, {"cross"})
    ]
    assert sum(len(group.rows) for group in grid.groups) == len(SITES)
    titles = {group.title for group in grid.groups}
    assert len(titles) == 3
    html = render_html(record)
    assert all(f">{title}" in html for title in titles)
    assert "cross: keep 50 % of the heads, self: keep 25 %" in html
    line = "{'cross': hp.Budget(keep_heads=0.5), 'self': hp.Budget(keep_heads=0.25)}"
    assert line in python_lines(record)


def test_scores_name_kinds_where_there_are_several() -> None:
    text = str(scores_of()).splitlines()
    assert [line.split()[:2] for line in text[1:]] == [[s.name, s.kind] for s in SITES]
    assert len({len(line) for line in text[1:4]}) == 1, "kinds stand in a column"
    assert scores_of()._repr_html_().count("<i>cross</i>") == 2
    assert "cross" in scores_of().__rich__()
    alone = scores_of(SITES[:2])
    assert "self" not in str(alone) + alone.__rich__()
    assert "<i>" not in alone._repr_html_()
    grid = heat_map(record_of(hp.select(alone, HALF), alone))
    assert grid is not None
    assert [group.title for group in grid.groups] == [""]


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_scored_and_cut_by_kind(family: str) -> None:
    layout = next(n for n in registry.names() if family in dict(registry.get(n).families))
    model, batch = registry.get(layout).tiny(0, family)
    sites = hp.find_sites(model)
    assert {s.kind for s in sites} == {"self", "causal", "cross"}
    scores = hp.score(model, [batch], "magnitude")
    plan = hp.select(scores, {"cross": HALF, "causal": QUARTER})
    kinds = {s.name: s.kind for s in sites}
    report = hp.prune_(model, plan, batch)
    assert report.proof is not None
    for kind, n_kept in (("self", 8), ("causal", 2), ("cross", 4)):
        now = [s.heads for s in hp.find_sites(model) if kinds[s.name] == kind]
        assert sum(map(len, now)) == n_kept


RECIPE: dict[str, Any] = {
    "name": "test",
    "description": "for tests",
    "task": "text_classification",
    "model": {"path": "somewhere"},
    "data": {"path": "rows.jsonl", "text": "text"},
}


def recipe(**select: Any) -> Recipe:
    return check_recipe({**RECIPE, "select": select})


def test_recipes_give_budgets_by_kind() -> None:
    checked = recipe(
        sites={"cross": {"keep_heads": 0.5}, "*encoder*": {"keep_macs": 0.4, "length": 9}}
    )
    assert checked.select.budgets == {"cross": HALF, "*encoder*": Budget(keep_macs=0.4, length=9)}
    assert "cross:\n      keep_heads: 0.5" in recipe_yaml(checked)
    assert Recipe.model_validate(checked.model_dump()) == checked
    assert recipe(keep_heads=3).select.budgets == {}


@pytest.mark.parametrize(
    ("select", "path", "words"),
    [
        ({"sites": {"cross": {}}}, "sites.cross", "exactly one of"),
        ({"sites": {"cross": {"keep_heads": 1.5}}}, "sites.cross.keep_heads", "a count >= 1"),
        ({"sites": {"cross": {"keep_head": 1}}}, "sites.cross.keep_head", "mean 'keep_heads'"),
        ({"sites": {"cross": 0.5}}, "sites.cross", "a section with keys of its own"),
        ({"sites": ["cross"]}, "sites", "a section with keys of its own"),
        ({"sites": {"cross": {"keep_heads": 0.5}}, "keep_kv": 0.5}, "", "got sites, keep_kv"),
        ({"sites": {}}, "", "exactly one of"),
        ({"cross": {"keep_heads": 0.5}, "keep_heads": 4}, "cross", "a known key"),
    ],
)
def test_errors_of_recipes_have_their_path(select: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(**select)
    found = {p.where: str(p) for p in caught.value.problems}
    assert words in found[f"select.{path}".removesuffix(".")], found


def test_a_run_cuts_by_the_budgets_of_its_recipe() -> None:
    chosen = recipe(selector="uniform", sites={"cross": {"keep_heads": 0.5}})
    run: Any = SimpleNamespace(recipe=chosen, latency=None)
    plan = choosing.choose_heads(run, scores_of())
    assert plan == hp.select(scores_of(), {"cross": HALF}, "uniform")


def test_a_run_refuses_a_budget_for_nothing_before_it_trains() -> None:
    settings = ["select.keep_heads=null", "select.sites={cross: {keep_heads: 0.5}}"]
    said: list[str] = []
    with pytest.raises(UnknownName, match=r"\['cross'\]: must be a kind \(self\)"):
        prepared("digits-vit", settings, say=said.append)
    assert "[train]" not in said
    assert "[model]" in said


def test_a_budget_of_the_cache_says_that_it_does_not_count_cross_attention() -> None:
    said = "keep_kv does not count the cache of cross-attention, which keeps its size."
    grouped = scores_of(tuple(replace(s, policy="group") for s in SITES))
    assert said in hp.select(grouped, {"causal": Budget(keep_kv=0.5)}).notes
    assert said not in hp.select(grouped, Budget(keep_heads=0.5)).notes
