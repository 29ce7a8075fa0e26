"""The command line as a person uses it: recipes made up, dry runs, plans explained, runs compared,
one command."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

import headprune as hp
import headprune.cli.prune
from headprune.cli.main import COMMANDS, app
from headprune.core.codec import EMPTY
from headprune.core.errors import HeadPruneError, PlanMismatch, UnsupportedModel
from headprune.core.record import RunRecord
from headprune.core.scores import ModelFingerprint
from headprune.data.guess import guess
from headprune.recipes.validate import check_recipe, load_recipe
from headprune.report.difference import PlanDifference, RecordDifference
from headprune.report.explanation import Explanation, explain
from headprune.run import auto as run_auto
from headprune.run import dry, stages
from headprune.run.dry import DryRun, dry_run
from headprune.run.subject import Subject
from headprune.scoring import Surgeon
from tests.scripts import WORDS, tiny_encoder
from tests.terminals import on_terminal


def call(*arguments: object, **settings: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], **settings)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text classifier saved with ``save_pretrained``, and a CSV."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("person")
    tiny_encoder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    config = BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=32, num_labels=3, **shape
    )
    BertForSequenceClassification(config).save_pretrained(folder / "classifier")
    tokenizer.save_pretrained(folder / "classifier")
    draw = random.Random(0)
    rows = [f"{' '.join(draw.choices(WORDS, k=6))} {i},{i % 3}" for i in range(90)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]))
    return folder


@pytest.mark.parametrize("where", ["bench", "save"])
def test_a_cut_on_data_that_ended_early_goes_on(
    where: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of its run, or between its run and the folder that comes of it."""
    arguments = (
        "--model",
        home / "classifier",
        "--data",
        home / "rows.csv",
        "--keep",
        "0.5",
        "--out",
        tmp_path / "a",
    )
    short = ("--set", "bench.seconds=0.05", "--set", "score.random_draws=1")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(
            *(
                (stages, "bench", fail)
                if where == "bench"
                else (headprune.cli.prune, "_write", fail)
            )
        )
        assert "power is gone" in call("prune", *arguments, *short).stderr
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"run"}
    result = call("prune", *arguments, *short)
    assert result.exit_code == 0, result.output
    assert ("[score] was done before" in result.stderr) == (where == "bench")
    assert ("[score]" in result.stderr) == (where == "bench")
    assert len(hp.find_sites(hp.from_pretrained(tmp_path / "a"))[0].heads) < 4
    assert call("prune", *arguments, *short).exit_code == 2, "a model is there now"


@pytest.fixture(scope="module")
def small(home: Path) -> tuple[Path, Any]:
    """What one command makes of them."""
    arguments = ("--model", home / "classifier", "--data", home / "rows.csv", "--keep", "0.5")
    short = ("--set", "bench.seconds=0.05", "--set", "score.random_draws=1")
    result = call("prune", *arguments, "--out", home / "small", *short)
    assert result.exit_code == 0, result.output
    return home / "small", result


def test_alone_it_says_where_to_start() -> None:
    result = call()
    assert result.exit_code == 0
    commands = [
        line.split() for line in result.stdout.splitlines() if line.startswith("  headprune ")
    ]
    assert len(commands) == 3
    assert {words[1] for words in commands} <= {command.__name__ for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.__name__)
def test_every_command_has_an_example_that_it_understands(command: Any) -> None:
    words = COMMANDS[command].split()
    assert words[:2] == ["headprune", command.__name__]
    found = typer.main.get_command(app).get_command(click.Context(click.Command("x")), words[1])  # type: ignore[attr-defined]
    found.make_context(words[1], words[2:])  # an unknown option, or a missing argument, is an error
    assert " ".join(COMMANDS[command].split()) in " ".join(call(words[1], "--help").stdout.split())


def test_completion_is_offered() -> None:
    assert "--install-completion" in call("--help").stdout


# ---------------------------------------------------------------- init


def test_init_writes_a_recipe_that_runs(home: Path, tmp_path: Path) -> None:
    where = ("--model", home / "classifier", "--data", home / "rows.csv")
    result = call("init", *where, "--out", tmp_path / "mine.yaml")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "mine.yaml").read_text()
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert (recipe.task, recipe.data.text, recipe.data.label) == (
        "text_classification",
        "text",
        "label",
    )
    assert recipe.train is None  # the classifier has its head
    assert recipe.data.max_length == 32  # what it can read
    notes = {line.index("#") for line in text.splitlines() if " # " in line}
    assert len(notes) == 1, "comments stand in one column"
    again = call("init", *where, "--out", tmp_path / "mine.yaml")
    assert again.exit_code == 2
    assert "must be a new file" in again.stderr
    printed = call("init", *where, "--out", "-", "--keep", "3")
    assert yaml.safe_load(printed.stdout)["select"] == {"keep_heads": 3}


def test_init_as_json_has_the_recipe_and_why(home: Path, tmp_path: Path) -> None:
    where = ("--model", home / "classifier", "--data", home / "rows.csv", "--json")
    for out, told in (("-", None), (tmp_path / "mine.yaml", str(tmp_path / "mine.yaml"))):
        data = json.loads(call("init", *where, "--out", out).stdout)
        assert data["out"] == told
        assert data["why"][0].startswith("the task is text_classification: ")
        assert check_recipe(data["recipe"]).data.text == "text"
    assert load_recipe(tmp_path / "mine.yaml") == check_recipe(data["recipe"])


def test_a_model_without_a_head_is_trained_first(home: Path) -> None:
    found = guess(str(home / "model"), str(home / "rows.csv"))
    assert "has no head for it" in found.why[0]
    assert found.recipe().train is not None


@pytest.mark.parametrize(
    ("header", "row", "task", "expected"),
    [
        ("premise,hypothesis,score", "a,c,0.5", "regression", {"text": ["premise", "hypothesis"], "label": "score"}),
        ("label,body", "x,a b", "text_classification", {"text": "body", "label": "label"}),
        ("id,text,stars", "7,a b,3", None, {"data.label": "id, stars"}),
        ("a,b,c,label", "x y,y z,z x,0", "text_classification", {"data.text": "a, b, c"}),
        ("x,y", "1,2", None, {"--task": "none"}),
    ],
)  # fmt: skip
def test_columns_are_told_by_what_they_hold(
    home: Path, tmp_path: Path, header: str, row: str, task: str | None, expected: dict[str, Any]
) -> None:
    (tmp_path / "rows.csv").write_text("\n".join([header, *[row] * 5]))
    kind = task or ("text_classification" if "text" in header else None)
    rows = str(tmp_path / "rows.csv")
    if "text" in expected:
        data = guess(str(home / "model"), rows, task=kind).recipe().data
        assert {name: getattr(data, name) for name in expected} == expected
        return
    with pytest.raises(HeadPruneError) as refused:
        guess(str(home / "model"), rows, task=kind)
    assert {refused.value.where: str(refused.value.got)} == expected


def test_a_task_is_checked(home: Path) -> None:
    result = call(
        "init", "--model", home / "model", "--data", home / "rows.csv", "--task", "regresion"
    )
    assert result.exit_code == 2
    assert "regression" in result.stderr


# ---------------------------------------------------------------- dry run


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(tmp_path: Path) -> None:
    short = [
        "data.calibration=64",
        "data.holdout=100",
        "data.test_holdout=200",
        "model.config.num_hidden_layers=2",
    ]
    settings = [word for setting in short for word in ("--set", setting)]
    result = call("run", "digits-vit", *settings, "--out", tmp_path / "out", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    seconds = data.pop("seconds")
    found = DryRun.from_dict(data)
    assert not (tmp_path / "out").exists()
    assert found.rows["calibration"] == 64
    stages = {stage.stage: stage for stage in found.stages}
    assert list(stages) == ["train", "score", "quality", "recover (finetune)", "bench"]
    assert seconds == pytest.approx(sum(stage.seconds or 0 for stage in found.stages))
    recipe = load_recipe("digits-vit", short)
    steps, one = (
        recipe.train.epochs * found.rows["train"],
        recipe.recover[0].settings["epochs"] * found.rows["train"],
    )  # type: ignore[union-attr]
    assert stages["train"].seconds / stages["recover (finetune)"].seconds == pytest.approx(
        steps / one
    )  # type: ignore[operator]
    weights = found.memory["weights of the whole model and of its cut copy"]
    assert weights == 8 * found.parameters
    assert found.memory["gradients and both moments of AdamW"] == 12 * found.parameters
    assert str(found).endswith("nothing was trained, cut or written")


SHORT = [
    "data.calibration=64",
    "data.holdout=100",
    "data.test_holdout=200",
    "model.config.num_hidden_layers=2",
]
ALONE = [
    *SHORT,
    "train=null",
    "bench=null",
    "recover=[]",
    "score.random_draws=0",
    "score.magnitude=false",
]


def counted_dry_run(
    monkeypatch: pytest.MonkeyPatch, scorer: str, settings: str = "{}"
) -> dict[str, Any]:
    """Batches that were scored in each call; matrices that were inverted, and removals; what was
    said of the score."""
    batches: list[int] = []
    inverted, removed = [0], [0]
    real = dry.score, torch.linalg.cholesky_ex, torch.linalg.solve_ex

    def scored(model: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(len(given))
        return real[0](model, given, *args, **kwargs)

    def factored(a: torch.Tensor, **kwargs: Any) -> Any:
        inverted[0] += a.shape[:-2].numel()
        return real[1](a, **kwargs)

    def solved(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
        removed[0] += a.shape[:-2].numel()
        return real[2](a, b, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(dry, "score", scored)
        patch.setattr(torch.linalg, "cholesky_ex", factored)
        patch.setattr(torch.linalg, "solve_ex", solved)
        chosen = [f"score.scorer={scorer}", f"score.settings={settings}", "score.batch_size=16"]
        found = dry_run("digits-vit", [*ALONE, *chosen], say=lambda line: None)
    stage = next(stage for stage in found.stages if stage.stage == "score")
    site = found.sites[0]
    return {
        "batches": batches,
        "inverted": inverted[0],
        "removed": removed[0],
        "stage": stage,
        "site": site,
    }


def test_a_dry_run_scores_one_batch_and_two(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted_dry_run(monkeypatch, "taylor")
    assert found["batches"] == [1, 2]
    assert found["stage"].basis == "taylor on 64 rows in 4 batches, 2 of which were timed"


@pytest.mark.parametrize(("scorer", "removes"), [("surgeon", True), ("obs", False)])
def test_a_dry_run_inverts_one_matrix(
    monkeypatch: pytest.MonkeyPatch, scorer: str, removes: bool
) -> None:
    """Of all sites and blocks: 2 sites, 8 blocks and all examples together."""
    found = counted_dry_run(monkeypatch, scorer)
    assert sorted(found["batches"]) == [1, 1, 1, 2]
    assert found["inverted"] == 1
    assert found["removed"] <= len(found["site"].units) if removes else not found["removed"]
    assert bool(found["removed"]) is removes
    assert (
        "one of 18 equal parts was timed (the largest site, without a standard error)"
        in found["stage"].basis
    )
    assert found["stage"].seconds > 0
    alone = counted_dry_run(monkeypatch, scorer, "{blocks: 1}")
    assert "one of 2 equal parts was timed" in alone["stage"].basis


def test_what_a_dry_run_leaves_out_is_counted_for_all_sites_and_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second for every batch, 100 for the matrices of one site: 4 batches, and 2 sites times 9
    runs."""
    clock = [0.0]

    def scored(model: Any, batches: Any, scorer: Any, *, sites: Any, progress: bool) -> None:
        clock[0] += len(batches) + (100 if type(scorer) is Surgeon else 0)
        assert len(sites) == (1 if scorer.blocks == 1 else 2)

    monkeypatch.setattr(dry, "score", scored)
    monkeypatch.setattr(dry, "perf_counter", lambda: clock[0])
    chosen = ["score.scorer=surgeon", "score.batch_size=16"]
    found = dry_run("digits-vit", [*ALONE, *chosen], say=lambda line: None)
    stage = next(stage for stage in found.stages if stage.stage == "score")
    assert stage.seconds == 4 + 2 * 9 * 100
    assert "; 30 min of it after the passes" in stage.basis


def test_a_dry_run_counts_learned_gates_by_their_steps_and_takes_latency_at_its_word() -> None:
    short = [
        "data.calibration=64",
        "data.holdout=100",
        "data.test_holdout=200",
        "model.config.num_hidden_layers=2",
    ]
    speed = [
        "select.keep_heads=null",
        "select.speedup=1.2",
        "select.latency.seconds=7",
        "train=null",
        "bench=null",
    ]
    gates = [
        "score.scorer=hard_concrete",
        "score.settings={steps: 12, warmup: 1, block: 16}",
        "recover=[]",
    ]
    found = dry_run("digits-vit", [*short, *speed, *gates], say=lambda line: None)
    stages = {stage.stage: stage for stage in found.stages}
    assert list(stages) == ["score", "quality", "latency"]
    assert (stages["latency"].seconds, stages["latency"].basis) == (
        14,
        "as long as the recipe says",
    )
    assert stages["score"].basis == "12 steps of 16 rows"


AUTO = [
    "score.scorer=auto",
    "score.settings={candidates: [taylor, surgeon], random_draws: 1}",
    "score.batch_size=16",
]


def test_a_dry_run_judges_one_plan_of_auto_once_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are timed as they are alone; one cut and refit on 16 rows and one on 32, half of
    which judge."""
    scored: list[tuple[str, int]] = []
    judged: list[int] = []
    score, losses = dry.score, run_auto.losses_of_fold

    def seen(model: Any, given: Any, scorer: Any, **kwargs: Any) -> Any:
        scored.append((type(scorer).__name__, len(given)))
        return score(model, given, scorer, **kwargs)

    def once(problem: Any, folds: Any, fold: int, mask: Any, refit: Any) -> torch.Tensor:
        assert refit is not None
        assert mask.n_kept == 8
        found = losses(problem, folds, fold, mask, refit)
        judged.append(len(found))
        return found

    def whole(*args: Any) -> Any:
        raise AssertionError("a dry run runs all of auto")

    monkeypatch.setattr(dry, "score", seen)
    monkeypatch.setattr(run_auto, "losses_of_fold", once)
    monkeypatch.setattr(run_auto.Auto, "estimate", whole)
    found = dry_run(
        "digits-vit", [*ALONE, *AUTO, "recover=[{method: lstsq}]"], say=lambda line: None
    )
    assert scored[:2] == [("Taylor", 1), ("Taylor", 2)]
    assert sorted(scored[2:]) == [
        ("Surgeon", 1),
        ("_SurgeonPasses", 1),
        ("_SurgeonPasses", 1),
        ("_SurgeonPasses", 2),
    ]
    assert judged == [8, 16]
    stages = {stage.stage: stage.basis for stage in found.stages}
    assert (
        stages["score"]
        == "auto on 64 rows in 4 batches, 2 of which were timed: 2 scorers, one after the other"
    )
    assert stages["choose"].startswith(
        "up to 3 plans, each cut and refitted by lstsq 2 times; one such time"
    )
    assert stages["choose"].endswith("on 16 and 32 rows")


@pytest.mark.parametrize(("size", "samples"), [(16, [1, 2]), (1, [4, 8]), (64, [1])])
def test_what_a_dry_run_leaves_out_of_auto_is_counted(
    monkeypatch: pytest.MonkeyPatch, size: int, samples: list[int]
) -> None:
    """A second for every row and 100 for every solving: 64 rows, 3 plans, 2 folds."""
    clock, judged = [0.0], list[int]()

    def once(self: Any, batches: Any) -> None:
        judged.append(len(batches))
        clock[0] += 100 + size * len(batches)

    monkeypatch.setattr(dry, "score", lambda *args, **kwargs: None)
    monkeypatch.setattr(dry, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(run_auto.AutoOfRun, "judge_once", once)
    found = dry_run(
        "digits-vit", [*ALONE, *AUTO, f"score.batch_size={size}"], say=lambda line: None
    )
    stage = next(stage for stage in found.stages if stage.stage == "choose")
    assert judged == samples
    assert stage.seconds == 3 * 2 * (100 + 64)
    assert "each cut 2 times" in stage.basis


def test_a_dry_run_of_auto_measures_no_latency_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(self: Any) -> Any:
        raise AssertionError("a latency table was measured")

    monkeypatch.setattr(Subject, "latency", property(measured))
    speed = ["select.keep_heads=null", "select.speedup=1.2", "select.latency.seconds=7"]
    found = dry_run("digits-vit", [*ALONE, *AUTO, *speed], say=lambda line: None)
    assert [stage.stage for stage in found.stages] == ["score", "choose", "quality", "latency"]


def test_a_dry_run_of_auto_goes_on_where_the_model_refuses_the_refit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: Any) -> Any:
        raise UnsupportedModel("the model", "one that can be refitted", "another")

    monkeypatch.setattr(run_auto.AutoOfRun, "refit_", refused)
    found = dry_run(
        "digits-vit", [*ALONE, *AUTO, "recover=[{method: lstsq}]"], say=lambda line: None
    )
    assert next(stage for stage in found.stages if stage.stage == "choose").seconds is not None


# ---------------------------------------------------------------- prune on data


def test_one_command_from_a_folder_and_a_csv_to_a_smaller_model(
    small: tuple[Path, Any], home: Path
) -> None:
    folder, result = small
    model = hp.from_pretrained(folder)
    assert sum(len(site.heads) for site in hp.find_sites(model)) == 4
    record = RunRecord.load(folder / "run" / "record.json")
    assert (record.status, record.plan.mask.n_kept) == ("done", 4)  # type: ignore[union-attr]
    choice = record.scores.choice  # type: ignore[union-attr]
    assert choice is not None
    assert choice.budget == record.plan.wanted  # type: ignore[union-attr]
    assert choice.refit == "lstsq"
    assert f"auto took {choice.chosen}: " in result.stderr
    assert "recovered (lstsq)" in [row.name for row in record.quality]
    assert (folder / "run" / "report.html").is_file()
    assert not (folder / "run" / "model").exists()
    assert (folder / "tokenizer.json").is_file()
    assert "the labels are in 'label'" in result.stderr
    assert str(folder / "run" / "report.html") in result.stdout


def test_a_format_that_cannot_hold_the_cut_loses_nothing(home: Path, tmp_path: Path) -> None:
    where = (
        "--model",
        home / "classifier",
        "--data",
        home / "rows.csv",
        "--keep",
        "3",
        "--out",
        tmp_path / "out",
    )
    result = call(
        "prune",
        *where,
        "--format",
        "transformers",
        "--set",
        "bench=null",
        "--set",
        "score.random_draws=0",
    )
    assert result.exit_code == 2
    assert "--format: must be one that can hold this cut" in result.stderr
    left = hp.from_pretrained(tmp_path / "out" / "run" / "model")
    assert sum(len(site.heads) for site in hp.find_sites(left)) == 3


def test_what_prune_goes_by_is_one_thing(home: Path, tmp_path: Path) -> None:
    base = ("prune", "--model", home / "classifier", "--out", tmp_path / "x")
    for more, words in (
        ((), "must be given one of --plan, --scores, --data"),
        (("--data", "a", "--plan", "b"), "--plan and --data"),
        (("--plan", "b", "--task", "regression"), "left out without --data"),
        (("--data", home / "rows.csv"), "--keep: must be given with --data"),
        (
            ("--data", home / "rows.csv", "--keep", "0.5", "--keep-macs", "0.5"),
            "--keep and --keep-macs",
        ),
    ):
        result = call(*base, *more)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------- explain, diff


def test_explain_says_which_go_and_why(small: tuple[Path, Any]) -> None:
    run = small[0] / "run"
    data = json.loads(call("explain", run, "--json").stdout)
    assert [row["name"] for row in data.pop("measured")][:1] == ["base"]
    found = Explanation.from_dict(data)
    plan, scores = hp.PruningPlan.load(run / "plan.json"), hp.HeadScores.load(run / "scores.json")
    gone = {(fate.site, fate.heads[0]) for fate in found.removed}
    assert gone == {(row.site, h) for row in plan.mask.rows for h in plan.mask.removed(row.site)}
    assert [fate.score for fate in found.units] == sorted(unit.value for unit in scores.units())
    assert found.share == pytest.approx(
        sum(f.score for f in found.removed) / sum(f.score for f in found.units)
    )
    saved = {name: (part, whole) for name, part, whole in found.saved}
    model = hp.from_pretrained(small[0])
    assert saved["parameters"][1] - saved["parameters"][0] == sum(
        p.numel() for p in model.parameters()
    )
    text = call("explain", run / "plan.json").stdout
    assert "what was measured:" in text
    assert text.count("rank ") >= 4


def test_what_a_score_alone_does_not_say() -> None:
    sites = tuple(hp.AttentionSite(name, "bert", "self", 2, 2, 4, 4, (0, 1)) for name in ("a", "b"))
    model = ModelFingerprint("s", "w")
    scores = hp.HeadScores(sites, ((0.1, 0.2), (0.3, 0.9)), None, "leave_one_out", EMPTY, 4, model)
    keep = {"a": [1], "b": [1]}
    plan = hp.PruningPlan(hp.HeadMask.from_keep(keep, {"a": 2, "b": 2}), model=model)
    found = explain(plan, scores)
    why = {(fate.site, *fate.heads): fate.why for fate in found.units}
    assert why["a", 0] == ""
    assert why["a", 1] == "the last one of its layer"
    assert why["b", 0] == "removed although units with lower scores are kept"
    other = hp.PruningPlan(plan.mask, model=ModelFingerprint("t", "w"))
    with pytest.raises(PlanMismatch, match="another structure"):
        explain(other, scores)


def test_explain_says_of_scores_that_the_plan_was_not_made_from_them(
    small: tuple[Path, Any], tmp_path: Path
) -> None:
    run = small[0] / "run"
    scores, plan = hp.HeadScores.load(run / "scores.json"), hp.PruningPlan.load(run / "plan.json")
    plan.save(tmp_path / "plan.json")
    said = "holds other scores than those that the plan was made from"
    plain = call("explain", tmp_path / "plan.json", "--scores", run / "scores.json")
    assert said not in plain.stderr
    assert "what was measured" not in plain.stdout, "no record lies beside it"
    values = tuple(tuple(2 * value for value in row) for row in scores.values)
    dataclasses.replace(scores, values=values).save(tmp_path / "scores.json")
    result = call("explain", tmp_path)
    assert result.exit_code == 0, result.output
    assert f"warning: {tmp_path / 'scores.json'} {said}" in result.stderr


def test_explain_asks_for_scores(tmp_path: Path) -> None:
    hp.PruningPlan(hp.HeadMask.from_keep({}, {"a": 2})).save(tmp_path / "plan.json")
    result = call("explain", tmp_path / "plan.json")
    assert result.exit_code == 2
    assert "scores.json beside the plan" in result.stderr


def test_diff_of_plans_and_of_records(small: tuple[Path, Any], tmp_path: Path) -> None:
    sizes = {"a": 4, "b": 2}
    for name, keep in (("x", {"a": [0, 1]}), ("y", {"a": [1, 2], "b": [1]})):
        hp.PruningPlan(hp.HeadMask.from_keep(keep, sizes)).save(tmp_path / f"{name}.json")
    found = PlanDifference.from_json(
        call("diff", tmp_path / "x.json", tmp_path / "y.json", "--json").stdout
    )
    assert (found.n_heads, found.both_keep, found.both_remove) == (6, 2, 1)
    assert [str(h) for h in found.only_first] == ["a[0]", "b[0]"]
    assert [str(h) for h in found.only_second] == ["a[2]"]
    assert found.agreement == 0.25
    record = RunRecord.load(small[0] / "run" / "record.json")
    other = RunRecord.from_dict(
        {**record.to_dict(), "git_commit": "abc", "recipe": {**record.recipe, "seed": 1}}
    )
    other.save(tmp_path / "record.json")
    text = call("diff", small[0] / "run", tmp_path).stdout
    assert "  seed: 0 -> 1 (+1)" in text
    assert "  git_commit: " in text
    difference = RecordDifference.from_json(
        call("diff", small[0] / "run", tmp_path, "--json").stdout
    )
    assert {change.what for change in difference.recipe} == {"seed"}
    assert difference.plans is not None
    assert difference.plans.agreement == 1
    mixed = call("diff", tmp_path / "x.json", tmp_path)
    assert mixed.exit_code == 2
    assert "a PruningPlan and a RunRecord" in mixed.stderr
    for text, got in (("{", "JSONDecodeError"), ("[]", "TypeError"), ("{}", "KeyError")):
        (tmp_path / "z.json").write_text(text)
        other = call("diff", tmp_path / "x.json", tmp_path / "z.json")
        assert other.exit_code == 2
        assert f"z.json: must be a plan, a record or the folder of a run, got {got}" in other.stderr
    assert (
        "got FileNotFoundError" in call("diff", tmp_path / "x.json", tmp_path / "none.json").stderr
    )


# ---------------------------------------------------------------- terminals


def test_colour_is_for_terminals_that_want_it(small: tuple[Path, Any], tmp_path: Path) -> None:
    plan = hp.PruningPlan.load(small[0] / "run" / "plan.json")
    assert "\x1b[" not in call("diff", small[0] / "run", small[0] / "run").stdout
    usual = {"TERM": "xterm-256color", "COLUMNS": "100"}
    coloured, status = on_terminal(["--help"], **usual)
    assert status == 0, coloured
    assert "\x1b[" in coloured
    plain, status = on_terminal(["--help"], NO_COLOR="1", **usual)
    assert status == 0, plain
    assert "\x1b[3" not in plain  # no colour; bold is none
    assert plan.mask.n_kept == 4


def test_quiet_says_nothing_on_the_way(home: Path, tmp_path: Path) -> None:
    arguments = ["--set", "bench=null", "--set", "score.random_draws=0", "--set", "report=false"]
    made = guess(str(home / "classifier"), str(home / "rows.csv"))
    (tmp_path / "r.yaml").write_text(made.text)
    loud = call("run", tmp_path / "r.yaml", "--out", tmp_path / "a", *arguments)
    still = call("run", tmp_path / "r.yaml", "--out", tmp_path / "b", *arguments, "--quiet")
    assert loud.exit_code == still.exit_code == 0
    assert "[prune]" in loud.stderr
    assert "[prune]" not in still.stderr
    assert still.stdout.splitlines()[0].startswith("RunRecord")
