"""Sweeps: each combination once, pieces shared and never taken for another model's, failures kept,
picks made again."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from safetensors import safe_open

import headprune as hp
from headprune.core.codec import FrozenDict
from headprune.core.errors import CheckpointError, HeadPruneError, InvalidValue, VerificationFailed
from headprune.core.files import PART
from headprune.core.scores import ModelFingerprint
from headprune.core.sweeps import SweepTable
from headprune.data.splits import calibration_rows
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import check_recipe
from headprune.run.surroundings import versions
from headprune.sweep import pick, runs, sweeping, tasks
from headprune.sweep.base import Base, open_base, ready_base
from headprune.sweep.outcome import ModelOutcome
from headprune.sweep.runs import SweepRun
from headprune.sweep.speeds import load_speeds
from tests.small_recipes import checked_recipe, write_rows
from tests.tiny_models import llama
from tests.tiny_recipe import TINY, interrupt_after

GRID = ["scorer=taylor,random", "keep=0.75,0.5", "recover=none,mean_fold"]


def tiny(**changes: Any) -> Recipe:
    return check_recipe({**TINY, **changes})


def sweep(
    folder: Path, grid: Any = GRID, lines: list[str] | None = None, **settings: Any
) -> sweeping.SweepResult:
    recipe = settings.pop("recipe", None) or tiny()
    said: list[str] = [] if lines is None else lines
    return hp.run.sweep(recipe, grid, out=folder, say=said.append, **{"seeds": 2, **settings})


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file of finished work, with what tells whether it was written again."""
    kinds = ("scores", "plans", "outcomes", "runs", "bases")
    found = [path for kind in kinds for path in (folder / kind).rglob("*.*")]
    return {str(p.relative_to(folder)): (p.stat().st_ino, p.stat().st_mtime_ns) for p in found}


def unchanged(folder: Path, before: dict[str, tuple[int, int]]) -> bool:
    after = files(folder)
    return all(after.get(name) == mark for name, mark in before.items())


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> sweeping.SweepResult:
    return sweep(tmp_path_factory.mktemp("sweep") / "one")


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than such models; the first sweep has drawn one."""
    monkeypatch.setattr(sweeping, "report_sweep", lambda folder: [])


@pytest.fixture
def copied(swept: sweeping.SweepResult, tmp_path: Path, _undrawn: None) -> Path:
    return Path(shutil.copytree(swept.folder, tmp_path / "copy"))


@pytest.fixture
def whole(swept: sweeping.SweepResult) -> bytes:
    return (swept.folder / "table.json").read_bytes()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the pieces of work that are really done from now on."""
    done: list[str] = []
    for kind, maker in list(tasks._MAKERS.items()):

        def make(task: Any, kind: str = kind, maker: Any = maker) -> None:
            done.append(kind)
            maker(task)

        monkeypatch.setitem(tasks._MAKERS, kind, make)
    return done


def break_at(patch: pytest.MonkeyPatch, kind: str, value: object) -> None:
    real = tasks._MAKERS[kind]

    def broken(task: Any) -> None:
        if value in (task.recipe.score.scorer, task.recipe.select.keep_heads):
            raise RuntimeError("out of memory")
        real(task)

    patch.setitem(tasks._MAKERS, kind, broken)


def test_every_combination_once_and_pieces_shared(swept):
    folder, table = swept.folder, swept.table
    keys = {(r["scorer"], r["keep"], r["recover"], r["seed"]) for r in table.rows}
    assert len({row["run"] for row in table.rows}) == len(table.rows) == len(keys) == 16
    kinds = {k: len(list((folder / k).glob("*.json"))) for k in ("scores", "plans", "runs")}
    # Both budgets share scores, and both recoveries plans.
    assert kinds == {"scores": 4, "plans": 8, "runs": 16}
    assert {row["heads"] for row in table.rows if row["keep"] == 0.75} == {6}
    assert (table.base["heads"], table.base["kv"]) == (8, None)
    scores = [hp.HeadScores.load(path) for path in (folder / "scores").glob("*.json")]
    taylor, noise = ([s for s in scores if s.scorer == name] for name in ("taylor", "random"))
    assert taylor[0].data != taylor[1].data, "a draw is other calibration rows"
    assert {s.seed for s in noise} == {0, 1}
    assert len({s.model for s in scores}) == 1


def test_tables_in_every_form(swept):
    folder, table = swept.folder, swept.table
    assert SweepTable.load(folder / "table.json") == table
    stored = parquet.read_table(folder / "table.parquet").to_pylist()
    assert stored == [dict(row) for row in table.rows]
    with open(folder / "table.csv", newline="") as file:
        assert [float(r["test"]) for r in csv.DictReader(file)] == [r["test"] for r in table.rows]
    with open(folder / "timings.csv", newline="") as file:
        assert all(float(r["score"]) > 0 for r in csv.DictReader(file))
    assert {"summary.md", "tradeoff.svg", "tradeoff.png"} <= {p.name for p in folder.iterdir()}


def test_a_row_is_what_the_verbs_give(swept):
    """Draw 1, from the saved base model on, by hand."""
    wanted = {"scorer": "taylor", "keep": 0.5, "recover": "mean_fold", "seed": 1}
    row = next(row for row in swept.table.rows if wanted.items() <= row.items())
    subject = hp.run.prepared(tiny(), say=lambda line: None)
    train = subject.data.examples["train"]
    rows = [train[i] for i in calibration_rows(len(train), 40, seed=1)]
    batches = [subject.data.collate(rows[i : i + 32]) for i in (0, 32)]
    scores = hp.score(subject.model, batches, "taylor", progress=False)
    plan = hp.select(scores, hp.Budget(keep_heads=0.5))
    assert hp.PruningPlan.load(swept.folder / row["plan"]).mask == plan.mask
    model = copy.deepcopy(subject.model)
    hp.prune_(model, plan)
    hp.recover_(model, batches, "mean_fold", teacher=subject.model)
    for split in ("validation", "test"):
        quality = subject.judge(model, split)
        assert row[split] == quality.value
        assert row[f"{split}_loss"] == pytest.approx(quality.loss, abs=1e-5)
        assert row[f"{split}_drop"] == pytest.approx(swept.table.base[split] - row[split])
        assert row[f"{split}_drop_low"] <= row[f"{split}_drop"] <= row[f"{split}_drop_high"]


def test_a_sweep_does_only_what_is_not_done(copied, counted, whole):
    before, lines = files(copied), list[str]()
    sweep(copied, lines=lines)
    assert not counted
    assert files(copied) == before
    assert (copied / "table.json").read_bytes() == whole
    assert "16 of 16 runs are done already" in lines
    larger = sweep(copied, ["scorer=taylor", "keep=0.75,0.5,0.25", "recover=none"]).table
    assert sorted(set(counted)) == ["outcomes", "plans"], "scores are there for the new budget"
    assert counted.count("plans") == 2
    assert unchanged(copied, before)
    assert len(larger.rows) == 6


def test_cut_models_are_timed_once_and_beside_the_base(copied, whole):
    timed, lines = tiny(bench={"batch_sizes": [1, 2], "seconds": 0.001}), list[str]()
    sweep(copied, recipe=timed, lines=lines)
    said = [line for line in lines if line.startswith("[speed]")]
    speeds = load_speeds(copied)
    assert {row["plan"] for row in SweepTable.load(copied / "table.json").rows} == set(speeds)
    assert {row.batch for row in speeds.values()} == {2}, "the largest shape of the recipe"
    assert len(said) <= len(speeds), "models of one shape have one speed"
    assert (copied / "table.json").read_bytes() == whole, "the table has no times"
    again = list[str]()
    sweep(copied, recipe=timed, lines=again)
    assert not [line for line in again if line.startswith("[speed]")]
    sweep(copied, recipe=tiny(bench={"batch_sizes": [3], "seconds": 0.001}), lines=again)
    assert {row.batch for row in load_speeds(copied).values()} == {3}, "timed again"
    (copied / "speeds.json").write_text("{")
    assert load_speeds(copied) == {}


@pytest.mark.parametrize("change", ["versions", "device"])
def test_work_of_another_torch_or_device_is_done_again(copied, counted, monkeypatch, change):
    before = SweepTable.load(copied / "table.json")
    grid: Any = ["scorer=random", "keep=0.5"]
    sweep(copied, grid, seeds=1)
    assert counted == []
    if change == "versions":
        monkeypatch.setattr(runs, "versions", lambda: {**versions(), "torch": "99.0"})
    else:
        monkeypatch.setattr(runs, "resolve_device", lambda _: torch.device("meta"))
    table = sweep(copied, grid, seeds=1).table
    assert counted == ["outcomes", "scores", "plans", "outcomes"], "the base model's answers first"
    assert not {row["run"] for row in table.rows} & {row["run"] for row in before.rows}
    assert hp.run.pick(copied, max_drop=1.0).run == table.rows[0]["run"]
    found = json.loads((copied / "surroundings.json").read_text())
    assert (found["versions"], found["hardware"]["device"]) == (versions(), "cpu")


def test_damaged_and_missing_pieces_are_made_again(copied, whole):
    def spoil(kind: str) -> None:
        paths = (copied / kind).iterdir()
        first, second, *_ = sorted(path for path in paths if ".samples." not in path.name)
        first.write_bytes(first.read_bytes()[:-200])
        second.unlink()

    for kind in ("plans", "outcomes", "runs"):
        spoil(kind)
    sweep(copied)
    assert (copied / "table.json").read_bytes() == whole
    for kind in ("runs", "plans"):  # nobody asks for scores whose runs are done
        shutil.rmtree(copied / kind)
    spoil("scores")
    sweep(copied)
    assert (copied / "table.json").read_bytes() == whole


def test_damaged_curvature_is_scored_again(copied):
    grid = ["scorer=fisher", "selector=quadratic", "keep=0.5"]
    table = sweep(copied, grid, seeds=1).table
    (curvature,) = (copied / "scores").glob("*.curvature.safetensors")
    curvature.write_bytes(curvature.read_bytes()[:-8])
    for kind in ("runs", "plans"):
        shutil.rmtree(copied / kind)
    again = sweep(copied, grid, seeds=1).table
    assert not again.failed
    assert again == table


def test_pieces_of_another_model_are_no_answer(copied, whole):
    before = files(copied)
    other = sweep(copied, recipe=tiny(seed=7), seeds=1).table
    assert other.base["validation_loss"] != json.loads(whole)["base"]["validation_loss"]
    assert len(list((copied / "bases").iterdir())) == 2
    assert unchanged(copied, before)
    for kind in ("scores", "plans"):
        mine = [copied / n for n in before if n.startswith(kind) and n.endswith(".json")]
        theirs = sorted(set((copied / kind).glob("*.json")) - set(mine))
        for path, foreign in zip(mine, theirs, strict=False):
            shutil.copy(foreign, path)
            for samples in foreign.parent.glob(f"{foreign.stem}.*.safetensors"):
                shutil.copy(samples, path.with_name(samples.name.replace(foreign.stem, path.stem)))
    shutil.rmtree(copied / "runs")
    sweep(copied)
    assert (copied / "table.json").read_bytes() == whole


def test_remains_of_killed_work_are_removed(copied):
    work, half = copied / ".work" / f"{tasks.SCORING}killed", copied / "bases" / f".half.x{PART}"
    for folder in (work, half / "model"):
        folder.mkdir(parents=True)
    sweep(copied, ["scorer=random", "keep=0.5"], seeds=1)
    assert not work.exists()
    sweep(copied, ["scorer=random", "keep=0.375"], recipe=tiny(seed=7), seeds=1)
    assert not half.exists(), "a base model was trained"


def test_an_outcome_of_other_numbers_is_none(swept, tmp_path):
    found, key = stored(next((swept.folder / "outcomes").iterdir()))
    path = tmp_path / "outcome.safetensors"
    other_type = {name: array.astype("float32") for name, array in found.arrays.items()}
    missing = {name: array for name, array in found.arrays.items() if name != "test.losses"}
    for arrays in (other_type, missing):
        dataclasses.replace(found, arrays=arrays).save(path, key)
        assert ModelOutcome.find(path, key) is None
    assert ModelOutcome.find(found.save(path, key), key) is not None


def stored(path: Path) -> tuple[ModelOutcome, str]:
    with safe_open(path, framework="np") as file:
        key = str(file.metadata()["key"])
    found = ModelOutcome.find(path, key)
    return found, key


def test_a_base_model_that_is_another_one_is_refused(copied):
    (mark,) = (copied / "bases").glob("*/base.json")
    base = Base.load(mark)
    dataclasses.replace(base, made_of=f"{base.made_of[:-1]}x").save(mark)
    with pytest.raises(CheckpointError, match="that its name says, got another base model"):
        sweep(copied)
    base.save(mark)
    weights = mark.parent / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 64
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"as it was saved, got another model.safetensors"):
        sweep(copied, ["keep=0.25"])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"rows": FrozenDict()}, InvalidValue, "the data that the base model saw, got other rows"),
        ({"model": ModelFingerprint("s", "w")}, CheckpointError, "the model that was saved there"),
    ],
)
def test_a_base_model_is_checked_when_it_is_opened(swept, changes, error, words):
    (mark,) = (swept.folder / "bases").glob("*/base.json")
    with pytest.raises(error, match=words):
        open_base(dataclasses.replace(Base.load(mark), **changes), swept.folder, tiny())


def test_an_interrupted_training_of_the_base_goes_on(tmp_path, monkeypatch):
    few = {**TINY["data"], "test_holdout": 1200}
    recipe = tiny(train={**TINY["train"], "epochs": 2}, data=few)
    with monkeypatch.context() as patch:
        seen = interrupt_after(9, patch)  # of 2 passes of 7 steps
        with pytest.raises(KeyboardInterrupt):
            ready_base(recipe, tmp_path / "cut", lambda line: None)
        cut = ready_base(recipe, tmp_path / "cut", lambda line: None)
    assert seen[8:] == [9, *range(8, 15)]
    assert cut.files == ready_base(recipe, tmp_path / "whole", lambda line: None).files
    assert [path.name for path in (tmp_path / "cut" / "bases").iterdir()] == [cut.made_of[:16]]


def test_failures_are_kept_and_stop_nothing(copied, monkeypatch):
    lines: list[str] = []
    table = sweep(copied, ["keep=1,0.5", "scorer=random", "recover=none"], lines, seeds=1).table
    assert [row["keep"] for row in table.rows] == [0.5]
    assert [row["keep"] for row in table.failed] == [1]
    assert "must be at least 2" in table.failed[0]["error"]
    assert sum("failed: Budget.keep_heads" in line for line in lines) == 1
    error = "RuntimeError: out of memory"
    with monkeypatch.context() as patch:
        break_at(patch, "scores", "fisher")
        table = sweep(copied, ["scorer=fisher,wanda", "keep=0.5"], seeds=1).table
    assert [row["scorer"] for row in table.rows] == ["wanda"]
    assert [row["error"] for row in table.failed] == [error]
    with monkeypatch.context() as patch:
        break_at(patch, "outcomes", 0.25)
        table = sweep(copied, ["scorer=random", "keep=0.625,0.25"], seeds=1).table
    assert [row["keep"] for row in table.rows] == [0.625]
    assert [(row["keep"], row["error"]) for row in table.failed] == [(0.25, error)]
    again = sweep(copied, ["scorer=fisher,wanda", "keep=0.5"], seeds=1).table  # tried again
    assert (len(again.rows), again.failed) == (2, ())


def test_a_base_model_that_cannot_be_judged_ends_the_sweep(copied, monkeypatch):
    shutil.rmtree(copied / "outcomes")
    break_at(monkeypatch, "outcomes", "taylor")
    words = "the base model: must be one that can be evaluated, got RuntimeError: out of"
    with pytest.raises(InvalidValue, match=words):
        sweep(copied)


def test_an_interrupt_says_how_to_go_on(copied, whole, monkeypatch):
    real, calls, lines = tasks._MAKERS["outcomes"], list[str](), list[str]()

    def interrupted(task: Any) -> None:
        calls.append(task.key)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(task)

    for kind in ("runs", "outcomes"):
        shutil.rmtree(copied / kind)
    with monkeypatch.context() as patch:
        patch.setitem(tasks._MAKERS, "outcomes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep(copied, lines=lines)
    assert "the same command resumes here" in lines[-1]
    before = files(copied)
    sweep(copied)
    assert unchanged(copied, before)
    assert (copied / "table.json").read_bytes() == whole


def test_bad_arguments(tmp_path):
    for settings, words in (
        ({"seeds": 1.5}, "seeds"),
        ({"jobs": 0}, "or -1"),
        ({"jobs": -2}, "or -1"),
        ({"seeds": "3"}, "a count >= 1"),
        ({"recipe": tiny(data={**TINY["data"], "holdout": 1})}, "validation: must be two or more"),
    ):
        with pytest.raises(InvalidValue, match=words):
            sweep(tmp_path / "new", **settings)
        assert not (tmp_path / "new" / "bases").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValue, match="must be a folder, got a file"):
        sweep(tmp_path / "file")


def test_a_pick_is_made_again_and_saved(swept, tmp_path):
    found = hp.run.pick(swept, max_drop=0.9, out=tmp_path / "picked")
    rows = [row for row in swept.table.rows if row["scorer"] != "random"]
    smallest = min(rows, key=lambda row: (row["heads"], row["validation_drop"]))
    assert (found.run, found.size, found.confirmed) == (smallest["run"], 4.0, True)
    assert found.validation.value == pytest.approx(smallest["validation_drop"])
    assert not any("random" in look.setting for look in found.looks)
    assert pick.Pick.load(tmp_path / "picked" / "pick.json") == found
    model = hp.from_pretrained(tmp_path / "picked" / "model")
    assert sum(len(site.heads) for site in hp.find_sites(model)) == 4
    subject = hp.run.prepared(tiny(), say=lambda line: None)
    assert subject.judge(model, "test").value == smallest["test"]
    with pytest.raises(InvalidValue, match="an earlier pick"):
        hp.run.pick(swept, max_drop=0.9, out=tmp_path / "picked")


def test_test_rows_take_no_part_in_the_choice(copied):
    before = hp.run.pick(copied, max_drop=0.9)
    for path in (copied / "outcomes").iterdir():
        found, key = stored(path)
        found.arrays["test.amounts"][:] = 1.0 if found.sizes["heads"] == 8 else 0.0
        found.save(path, key)
    after = hp.run.pick(copied / "table.json", max_drop=0.9)
    for name in ("run", "looks", "validation"):
        assert getattr(after, name) == getattr(before, name)
    assert (after.test.value, after.confirmed) == (1.0, False)
    assert "do not confirm it" in str(after)


def test_a_model_that_answers_otherwise_is_not_written(copied, tmp_path):
    found = hp.run.pick(copied, max_drop=0.9)
    key = str(SweepRun.load(copied / "runs" / f"{found.run}.json").outcome)
    path = tasks.file_of(copied, "outcomes", key)
    outcome, _ = stored(path)
    outcome.arrays["test.losses"][3] += 0.1
    outcome.save(path, key)
    with pytest.raises(VerificationFailed, match=r"as in the sweep, test.losses"):
        hp.run.pick(copied, max_drop=0.9, out=tmp_path / "picked")
    assert not (tmp_path / "picked").exists()


def test_bad_picks(swept):
    for settings, words in (
        ({"max_drop": float("nan")}, "a number, such as 0.01"),
        ({"by": "size"}, "one of heads, params, macs, kv"),
        ({"by": "kv"}, "without a KV cache"),
        *(({"confidence": wrong}, "at most 0.9999") for wrong in (95, 0.0, 1 - 1e-9, float("nan"))),
    ):
        with pytest.raises(HeadPruneError, match=words):
            hp.run.pick(swept, **{"max_drop": 0.1, **settings})


def test_a_pick_needs_a_finished_run_of_this_version(copied, tmp_path):
    with pytest.raises(InvalidValue, match="a sweep that was stopped has no table yet"):
        hp.run.pick(tmp_path, max_drop=0.1)
    for path in (copied / "runs").iterdir():
        run = SweepRun.load(path)
        score = {k: v for k, v in run.settings["score"].items() if k != "same"}
        dataclasses.replace(run, settings=FrozenDict({**run.settings, "score": score})).save(path)
    words = r"must be complete \(with score\.same\).*Call the sweep again"
    with pytest.raises(InvalidValue, match=words):
        hp.run.pick(copied, max_drop=1.0)
    table = SweepTable.load(copied / "table.json")
    dataclasses.replace(table, rows=()).save(copied / "table.json")
    with pytest.raises(InvalidValue, match="must be a sweep with a finished run, got none"):
        hp.run.pick(copied, max_drop=0.1)


def test_a_language_model_is_judged_by_perplexity(tmp_path):
    draw = random.Random(0)
    rows = [{"ids": draw.choices(range(3, 20), k=draw.randint(3, 9))} for _ in range(60)]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    data = {"path": path, "tokens": "ids", "calibration": 16}
    model = llama(tmp_path / "model", num_key_value_heads=2)
    recipe = checked_recipe("causal_lm", model, data, select={"keep_kv": 0.5})
    table = sweep(tmp_path / "out", ["keep_kv=0.5"], recipe=recipe, seeds=1).table
    assert table.metric == "perplexity"
    (row,) = table.rows
    assert row["kv"] / table.base["kv"] == 0.5
    assert row["test_drop"] == pytest.approx(row["test"] / table.base["test"] - 1)
    found = hp.run.pick(tmp_path / "out", max_drop=0.5, by="kv")
    assert found.size == row["kv"]
