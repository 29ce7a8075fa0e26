"""`scorer: auto` in recipes: judged by the run's own budget and recoveries, in runs, sweeps and
gradual cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headprune as hp
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.recipes.judged import judged_after
from headprune.recipes.validate import RecipeError, check_recipe
from headprune.run.runner import run_recipe
from tests.tiny_recipe import TINY

AUTO: dict[str, Any] = {
    **TINY,
    "score": {"scorer": "auto", "settings": {"candidates": ["taylor", "obs"]}, "random_draws": 1},
    "recover": [{"method": "lstsq"}],
}


def test_a_run(tmp_path: Path) -> None:
    said: list[str] = []
    record = run_recipe(
        check_recipe({**AUTO, "out": str(tmp_path / "run")}), say=said.append, progress=False
    )
    assert record.scores is not None
    choice = record.scores.choice
    assert choice is not None
    assert (choice.best.scorer, choice.refit, choice.n_examples) == (
        record.scores.scorer,
        "lstsq",
        40,
    )
    assert {c.scorer for c in choice.candidates} == {"taylor", "obs", "random"}
    assert record.plan is not None
    assert record.plan.scorer == choice.best.scorer
    text = "\n".join(said)
    assert text.index(
        "auto: 2 scorers, then up to 4 plans, each cut and refitted by lstsq 2 times, on 40 rows"
    ) < (text.index(f"auto took {choice.chosen}: keep 50 % of the heads, refitted by lstsq"))
    for name in ("report.html", "report.md"):
        page = (tmp_path / "run" / name).read_text()
        assert "How the scorer was chosen" in page
        assert f"{choice.best.loss:.4f}" in page
    again = HeadScores.load(tmp_path / "run" / "scores.json")
    assert again.choice == choice
    assert RunRecord.load(tmp_path / "run" / "record.json").scores == record.scores


def test_a_training_is_stood_in_for_by_lstsq() -> None:
    train = {"method": "finetune", "settings": {"epochs": 1}}

    def methods(**changes: Any) -> list[str]:
        return [step.method for step in judged_after(check_recipe({**AUTO, **changes}))]

    assert methods(recover=[]) == []
    assert methods(recover=[train]) == ["lstsq"]
    assert methods(recover=[{"method": "mean_fold"}, train]) == ["mean_fold"]
    gradual = {"stages": 2, "settings": {"epochs": 1}}
    assert methods(recover=[], gradual=gradual) == ["lstsq"]


def test_a_gradual_cut_goes_on_with_the_chosen_scorer(tmp_path: Path) -> None:
    raw = {
        **AUTO,
        "recover": [],
        "gradual": {"stages": 2, "settings": {"epochs": 1}},
        "out": str(tmp_path / "run"),
    }
    record = run_recipe(check_recipe(raw), say=lambda line: None, progress=False)
    assert record.status == "done"
    assert record.plan is not None
    assert record.scores is not None
    assert record.plan.scorer == record.scores.scorer in ("taylor", "obs")


@pytest.mark.parametrize(
    ("score", "where"),
    [
        ({"settings": {"keep": 0.5}}, "score.settings.keep"),
        ({"settings": {"refit": "lstsq"}}, "score.settings.refit"),
        ({"until": {"k": 3}}, "score.until"),
        ({"settings": {"candidates": ["random"]}}, "score.settings.candidates"),
    ],
)
def test_settings_that_other_sections_say_are_refused(score: dict[str, Any], where: str) -> None:
    with pytest.raises(RecipeError) as error:
        check_recipe({**AUTO, "score": {"scorer": "auto", **score}})
    assert [problem.where for problem in error.value.problems] == [where]


def test_a_sweep_chooses_anew_for_every_budget(tmp_path: Path) -> None:
    hp.run.sweep(
        check_recipe(AUTO), ["keep=0.75,0.25"], out=tmp_path, seeds=1, say=lambda line: None
    )
    choices = [HeadScores.load(path).choice for path in (tmp_path / "scores").glob("*.json")]
    assert {choice.budget for choice in choices if choice} == {
        "keep 75 % of the heads",
        "keep 25 % of the heads",
    }
