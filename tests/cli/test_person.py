"""The command line as a person uses it: recipes made up, one command from data to a smaller model,
plans explained, runs compared."""

import dataclasses
import random
import shutil

import pytest
import torch
import yaml

import headprune as hp
import headprune.cli.prune
from headprune.core.codec import EMPTY
from headprune.core.errors import HeadPruneError, PlanMismatch
from headprune.core.record import RunRecord
from headprune.core.scores import ModelFingerprint
from headprune.data.guess import guess
from headprune.recipes.validate import check_recipe, load_recipe
from headprune.report.difference import PlanDifference, RecordDifference
from headprune.report.explanation import Explanation, explain
from headprune.run import stages
from tests.command_line import call, done, json_of, refused
from tests.tiny_models import WORDS, bert

QUICK = "--set bench.seconds=0.05 --set score.random_draws=1"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A tiny text classifier with a head for three labels, an encoder without a head, and a CSV."""
    folder = tmp_path_factory.mktemp("person")
    torch.manual_seed(0)
    bert(folder / "classifier", num_labels=3, max_position_embeddings=32)
    bert(folder / "encoder", "BertModel")
    draw = random.Random(0)
    rows = [f"{' '.join(draw.choices(WORDS, k=6))} {i},{i % 3}" for i in range(90)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]))
    return folder


@pytest.fixture(scope="module")
def given(home):
    """The options that name the classifier and its rows."""
    return f"--model {home / 'classifier'} --data {home / 'rows.csv'}"


@pytest.fixture(scope="module")
def small(home, given):
    """The folder that one command makes of them, and what the command said."""
    return home / "small", done(f"prune {given} --keep 0.5 --out {home / 'small'} {QUICK}")


# ---------------------------------------------------------------- init


def test_init_writes_a_recipe_that_runs(given, tmp_path):
    mine = tmp_path / "mine.yaml"
    found = json_of(f"init {given} --out {mine}")
    recipe = load_recipe(mine)
    assert recipe == check_recipe(found["recipe"])
    assert found["out"] == str(mine)
    assert found["why"][0].startswith("the task is text_classification: ")
    assert (recipe.data.text, recipe.data.label) == ("text", "label")
    assert recipe.train is None  # the classifier has its head
    assert recipe.data.max_length == 32  # what it can read
    (step,) = recipe.recover
    assert (step.method, step.settings) == ("lstsq", {"feed_forward": True, "precision": "float32"})
    notes = {line.index("#") for line in mine.read_text().splitlines() if " # " in line}
    assert len(notes) == 1, "comments stand in one column"
    assert "must be a new file" in refused(f"init {given} --out {mine}")
    printed = done(f"init {given} --out - --keep 3").stdout
    assert yaml.safe_load(printed)["select"] == {"keep_heads": 3}
    assert json_of(f"init {given} --out -")["out"] is None


@pytest.mark.parametrize(
    ("header", "row", "asked"),
    [
        ("id,text,stars", "7,a b,3", {"--label": "id, stars"}),
        ("a,b,c,label", "x y,y z,z x,0", {"--text": "a, b, c"}),
    ],
)
def test_columns_that_could_be_either_are_asked_for(home, tmp_path, header, row, asked):
    rows = tmp_path / "rows.csv"
    rows.write_text("\n".join([header, *[row] * 5]))
    with pytest.raises(HeadPruneError) as error:
        guess(str(home / "encoder"), str(rows), task="text_classification")
    assert {error.value.where: str(error.value.got)} == asked


def test_a_task_is_checked(given):
    assert "Did you mean 'regression'" in refused(f"init {given} --task regresion")


# ---------------------------------------------------------------- prune on data


def test_one_command_from_a_folder_and_a_csv_to_a_smaller_model(small):
    folder, result = small
    assert sum(len(site.heads) for site in hp.find_sites(hp.from_pretrained(folder))) == 4
    record = RunRecord.load(folder / "run" / "record.json")
    assert record.status == "done"
    assert record.plan.mask.n_kept == 4
    choice = record.scores.choice
    assert (choice.budget, choice.refit) == (record.plan.wanted, "lstsq")
    assert "recovered (lstsq)" in [row.name for row in record.quality]
    at_chance = "The whole model is not shown to do better than always answering"
    assert result.stdout.startswith(at_chance), "its labels are by chance"
    for words in (
        f"warning: {at_chance}",
        f"auto chose {choice.chosen}: ",
        "label: label (has the numbers of the model's 3 classes); text: text",
    ):
        assert words in result.stderr
    assert str(folder / "run" / "report.html") in result.stdout
    assert (folder / "run" / "report.html").is_file()
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "run" / "model").exists()


@pytest.mark.parametrize("where", ["bench", "save"])
def test_a_command_that_ended_early_goes_on(where, given, tmp_path, monkeypatch):
    """In the middle of its run, or between its run and the folder that comes of it."""
    command = f"prune {given} --keep 0.5 --out {tmp_path / 'a'} {QUICK} --set score.scorer=taylor"

    def fail(*_, **__):
        raise RuntimeError("power is gone")

    failing = (stages, "bench") if where == "bench" else (headprune.cli.prune, "_write")
    with monkeypatch.context() as patch:
        patch.setattr(*failing, fail)
        assert "power is gone" in call(command).stderr
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"run"}
    result = done(command)
    said = result.stderr
    record = hp.RunRecord.load(tmp_path / "a" / "run" / "record.json")
    assert str(record) in result.stdout, "the lines of progress had a part of it"
    assert {f"note: {n}" for n in record.plan.notes} <= set(result.stdout.splitlines())
    assert ("[score] was done before" in said) == (where == "bench")
    assert ("[score]" in said) == (where == "bench")
    assert len(hp.find_sites(hp.from_pretrained(tmp_path / "a"))[0].heads) < 4
    refused(command)  # a model is there now


def test_a_format_that_can_hold_no_cut_is_refused_before_the_run(given, tmp_path):
    command = f"prune {given} --keep 3 --out {tmp_path / 'out'} --format transformers"
    assert "--format: must be one that can hold a cut of this model" in refused(command)
    assert not (tmp_path / "out").exists()
    # Neurons alone may be cut evenly, but not by every selector.
    both = command.replace("--keep 3", "--keep-params 0.9 --feed-forward --dry-run")
    for more, warned in (("", True), (" --selector uniform", False)):
        assert ("selector repriced may keep others, uniform" in done(both + more).stderr) is warned


def test_a_model_without_its_tokenizer_is_refused_before_the_run(home, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(home / "classifier", folder)
    for path in folder.iterdir():
        if path.name not in {"config.json", "model.safetensors"}:
            path.unlink()
    said = refused(
        f"prune --model {folder} --data {home / 'rows.csv'} --keep 0.5 --out {tmp_path}/s"
    )
    assert "model.path: must be a folder with its tokenizer's files" in said
    assert "tokenizer knows no word" in said


def test_quiet_shows_no_progress(given, tmp_path):
    done(f"init {given} --out {tmp_path / 'r.yaml'}")
    short = "--set bench=null --set score.scorer=taylor --set score.random_draws=0"
    still = done(f"run {tmp_path / 'r.yaml'} --out {tmp_path / 'b'} {short} --quiet")
    assert all(line.startswith("warning: ") for line in still.stderr.splitlines())
    verdict, record = still.stdout.split("\n\n")[:2]
    assert "Removing " in verdict
    assert record.startswith("RunRecord")


# ---------------------------------------------------------------- explain


def test_explain_says_which_heads_are_removed_and_why(small):
    run = small[0] / "run"
    data = json_of(f"explain {run}")
    assert data.pop("measured")[0]["name"] == "base"
    found = Explanation.from_dict(data)
    plan, scores = hp.PruningPlan.load(run / "plan.json"), hp.HeadScores.load(run / "scores.json")
    heads = {(fate.site, fate.heads[0]) for fate in found.removed}
    assert heads == {(row.site, h) for row in plan.mask.rows for h in plan.mask.removed(row.site)}
    assert [fate.score for fate in found.units] == sorted(unit.value for unit in scores.units())
    removed = sum(fate.score for fate in found.removed)
    assert found.share == pytest.approx(removed / sum(fate.score for fate in found.units))
    (saved,) = (whole - part for name, part, whole in found.saved if name == "parameters")
    assert saved == sum(p.numel() for p in hp.from_pretrained(small[0]).parameters())
    text = done(f"explain {run / 'plan.json'}").stdout
    assert "what was measured:" in text
    assert text.count("rank ") >= 4


def test_what_a_score_alone_does_not_say():
    sites = tuple(hp.AttentionSite(name, "bert", "self", 2, 2, 4, 4, (0, 1)) for name in ("a", "b"))
    model = ModelFingerprint("s", "w")
    scores = hp.HeadScores(sites, ((0.1, 0.2), (0.3, 0.9)), None, "leave_one_out", EMPTY, 4, model)
    mask = hp.HeadMask.from_keep({"a": [1], "b": [1]}, {"a": 2, "b": 2})
    found = explain(hp.PruningPlan(mask, model=model), scores)
    why = {(fate.site, *fate.heads): fate.why for fate in found.units}
    assert why["a", 0] == ""
    assert why["a", 1] == "the only one kept in its layer"
    assert why["b", 0] == "removed although units with lower scores are kept"
    with pytest.raises(PlanMismatch, match="another structure"):
        explain(hp.PruningPlan(mask, model=ModelFingerprint("t", "w")), scores)


def test_explain_asks_for_scores_and_says_if_the_plan_was_made_from_others(small, tmp_path):
    run, plan = small[0] / "run", tmp_path / "plan.json"
    hp.PruningPlan.load(run / "plan.json").save(plan)
    assert "scores.json beside the plan" in refused(f"explain {plan}")
    said = "holds other scores than those that the plan was made from"
    plain = done(f"explain {plan} --scores {run / 'scores.json'}")
    assert said not in plain.stderr
    assert "what was measured" not in plain.stdout, "no record lies beside it"
    scores = hp.HeadScores.load(run / "scores.json")
    values = tuple(tuple(2 * value for value in row) for row in scores.values)
    other = dataclasses.replace(scores, values=values).save(tmp_path / "scores.json")
    assert f"warning: {other} {said}" in done(f"explain {tmp_path}").stderr


# ---------------------------------------------------------------- diff


def test_diff_of_plans(tmp_path):
    for name, keep in (("x", {"a": [0, 1]}), ("y", {"a": [1, 2], "b": [1]})):
        mask = hp.HeadMask.from_keep(keep, {"a": 4, "b": 2})
        hp.PruningPlan(mask).save(tmp_path / f"{name}.json")
    found = PlanDifference.from_dict(json_of(f"diff {tmp_path / 'x.json'} {tmp_path / 'y.json'}"))
    assert (found.n_heads, found.both_keep, found.both_remove) == (6, 2, 1)
    assert [str(head) for head in found.only_first] == ["a[0]", "b[0]"]
    assert [str(head) for head in found.only_second] == ["a[2]"]
    assert found.agreement == 0.25


def test_diff_of_records(small, tmp_path):
    run = small[0] / "run"
    record = RunRecord.load(run / "record.json").to_dict()
    changes = {"git_commit": "abc", "recipe": {**record["recipe"], "seed": 1}}
    RunRecord.from_dict({**record, **changes}).save(tmp_path / "record.json")
    text = done(f"diff {run} {tmp_path}").stdout
    assert "  seed: 0 -> 1 (+1)" in text
    assert "  git_commit: " in text
    found = RecordDifference.from_dict(json_of(f"diff {run} {tmp_path}"))
    assert {change.what for change in found.recipe} == {"seed"}
    assert found.plans.agreement == 1
    assert "a PruningPlan and a RunRecord" in refused(f"diff {run / 'plan.json'} {tmp_path}")
    for written, got in (("{", "JSONDecodeError"), ("[]", "TypeError"), ("{}", "KeyError")):
        (tmp_path / "z.json").write_text(written)
        message = refused(f"diff {run} {tmp_path / 'z.json'}")
        assert f"z.json: must be a plan, a record or the folder of a run, got {got}" in message
    assert "got FileNotFoundError" in refused(f"diff {run} {tmp_path / 'none.json'}")
