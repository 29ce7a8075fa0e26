"""`scorer: auto` in recipes: judged by the run's own budget and recoveries, in runs, sweeps and
gradual cuts."""

import pytest

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.core.record import RunRecord
from headprune.core.scores import HeadScores
from headprune.recipes.judged import judged_after
from headprune.recipes.validate import RecipeError, check_recipe
from headprune.run.runner import run_recipe
from tests.tiny_recipe import TINY

AUTO = {
    **TINY,
    "score": {"scorer": "auto", "settings": {"candidates": ["taylor", "obs"]}, "random_draws": 1},
    "recover": [{"method": "lstsq"}],
}
GRADUAL = {"recover": [], "gradual": {"stages": 2, "settings": {"steps": 2}}}
BARE = {"bench": None, "report": False}


def run(out, said=None, **changes):
    recipe = check_recipe({**AUTO, **changes, "out": str(out)})
    return run_recipe(recipe, say=said or (lambda line: None), progress=False)


def test_a_run(tmp_path):
    said = []
    record = run(tmp_path, said.append)
    choice = record.scores.choice
    assert (choice.refit, choice.n_examples) == ("lstsq", 40)
    assert choice.best.scorer == record.scores.scorer == record.plan.scorer
    assert {c.scorer for c in choice.candidates} == {"taylor", "obs", "random"}
    # On test rows, too, random heads are compared with the same refit.
    assert "random, recovered (lstsq)" in [row.name for row in record.quality]
    text = "\n".join(said)
    announced = "auto: 2 scorers, then up to 4 plans, each cut and refitted by lstsq 2 times"
    assert text.index(announced) < text.index(f"auto chose {choice.chosen}: keep 50 % of the heads")
    for name in ("report.html", "report.md"):
        page = (tmp_path / name).read_text()
        assert "How the scorer was chosen" in page
        assert f"{choice.best.loss:.4f}" in page
    assert HeadScores.load(tmp_path / "scores.json").choice == choice
    assert RunRecord.load(tmp_path / "record.json").scores == record.scores


def test_a_training_is_stood_in_for_by_lstsq():
    train, fold = {"method": "finetune", "settings": {"epochs": 1}}, {"method": "mean_fold"}
    for changes, methods in (
        ({"recover": []}, []),
        ({"recover": [train]}, ["lstsq"]),
        ({"recover": [fold, train]}, ["mean_fold"]),
        (GRADUAL, ["lstsq"]),
    ):
        assert [step.method for step in judged_after(check_recipe({**AUTO, **changes}))] == methods


def test_a_gradual_cut_goes_on_with_the_chosen_scorer(tmp_path):
    record = run(tmp_path, **GRADUAL, **BARE)
    assert record.status == "done"
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
def test_settings_that_other_sections_say_are_refused(score, where):
    with pytest.raises(RecipeError) as error:
        check_recipe({**AUTO, "score": {"scorer": "auto", **score}})
    assert [problem.where for problem in error.value.problems] == [where]


def test_too_few_rows_are_refused_before_the_model_is_measured(tmp_path):
    said = []
    data = {**AUTO["data"], "calibration": 3}
    with pytest.raises(InvalidValue, match=r"data.calibration: must be at least 4 rows, .*got 3"):
        run(tmp_path, said.append, **BARE, data=data)
    assert not any("[base]" in line for line in said)


def test_a_run_says_where_its_own_refit_reads_more_rows(tmp_path):
    said = []
    recover = [{"method": "lstsq", "rows": "train", "examples": 60}]
    record = run(tmp_path, said.append, **BARE, recover=recover)
    assert any("fits lstsq to 20 rows, the run will fit it to 60 of train" in line for line in said)
    assert any("refitted by lstsq on 20 of 40 rows" in line for line in said)
    assert (record.scores.choice.n_refitted, record.scores.choice.selector) == (20, "global_topk")


def test_a_sweep_chooses_anew_for_every_budget(tmp_path):
    axes = ["keep=0.75,0.25"]
    hp.run.sweep(check_recipe({**AUTO, **BARE}), axes, out=tmp_path, seeds=1, say=lambda line: None)
    paths = (tmp_path / "scores").glob("*.json")
    budgets = {HeadScores.load(path).choice.budget for path in paths}
    assert budgets == {"keep 75 % of the heads", "keep 25 % of the heads"}
