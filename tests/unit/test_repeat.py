"""The lines with which a report does a run again: run on a finished run, they come to its plan and
its model."""

from dataclasses import fields, replace

import pytest
import torch

import headprune as hp
from headprune import recovery
from headprune.core.codec import FrozenDict
from headprune.core.ladders import SiteLadder
from headprune.recipes.validate import load_recipe
from headprune.report.repeat import TRAINING, python_lines
from headprune.run import prepared, run_recipe
from tests.recipe_fixtures import FIXTURES
from tests.report_records import record_of

#: Settings that are nobody's defaults, each of which changes the plan or the model.
OWN = (
    "seed=3",
    "bench=null",
    "report=false",
    "score.magnitude=false",
    "score.random_draws=0",
    "score.scorer=taylor",
    "score.settings.reduce=token",
    "select.policy=free",
    "select.keep_kv=null",
    "select.keep_heads=0.5",
    "select.settings.min_heads=2",
    "select.settings.multiple_of=2",
    "select.must_keep={model.layers.0.self_attn: [0]}",
    "recover=[{method: lstsq, settings: {ridge: 0.5}}]",
)


def test_the_lines_come_to_the_runs_plan_and_model(tmp_path, monkeypatch):
    torch.manual_seed(0)
    settings = [*FIXTURES["llama-stories"](tmp_path), *OWN, f"out={tmp_path / 'run'}"]
    recipe = load_recipe("llama-stories", settings)
    record = run_recipe(recipe, say=lambda line: None)
    subject = prepared(recipe, say=lambda line: None)
    batches = subject.data.of_like_length("calibration", recipe.score.batch_size)
    own = {"model": subject.model, "batches": batches}
    monkeypatch.chdir(tmp_path)
    exec(python_lines(record), own)
    assert own["scores"].settings == record.scores.settings
    assert own["plan"] == record.plan
    again, first = (hp.from_pretrained(tmp_path / name) for name in ("small", "run/model"))
    found = again.state_dict()
    for name, tensor in first.state_dict().items():
        # The run refits in another order.
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def test_recoveries_that_train_are_known():
    methods = {name: recovery.registry.get(name) for name in recovery.registry}
    assert {name for name, method in methods.items() if method.trains} == set(TRAINING)
    seeded = {name for name, m in methods.items() if "seed" in {f.name for f in fields(m)}}
    assert seeded == set(TRAINING)


def lines_of(record, **recipe):
    text = python_lines(replace(record, recipe=FrozenDict(recipe)))
    compile(text, "lines", "exec")
    return text


def planned(**changes):
    """A record with another plan."""
    record = record_of()
    return replace(record, plan=replace(record.plan, **changes))


def test_recoveries_are_handed_their_rows_their_teacher_and_their_seed():
    steps = [
        {"method": "lstsq", "settings": {}, "rows": "train", "examples": 1024},
        {"method": "finetune", "settings": {"patience": 2}, "rows": None},
    ]
    until = {"until": {"k": 3, "confidence": 0.9}}
    text = lines_of(record_of(), recover=steps, seed=7, train={"epochs": 1}, score=until)
    for line in (
        "until=hp.Stable(k=3, confidence=0.9)",
        "hp.recover_(model, train_batches, method, original if method.needs_teacher else None)"
        "  # on at most 1024 of the rows",
        "method = hp.recovery.Finetune(seed=7, patience=2)",
        "validation=validation_batches",
        "# model: the uncut model, as the run trained it",
    ):
        assert line in text
    assert text.index("original = copy.deepcopy(model)") < text.index("hp.prune_(model, plan)")
    comments = [line.partition(":")[0] for line in text.splitlines() if line.startswith("# ")]
    names = ["# model", "# batches", "# train_batches", "# validation_batches"]
    assert comments == [*names, "# as this run chose"]


@pytest.mark.parametrize(
    ("selector", "line"),
    [
        ("iterative", "rescore=hp.scoring.rescorer(model, batches, hp.scoring.Taylor("),
        ("local_search", "loss=hp.scoring.loss_of(model, batches, after_cut=between)"),
    ],
)
def test_selectors_are_handed_what_they_ask_for(selector, line):
    select = {"recover": [{"method": "mean_fold"}], "must_remove": {"a.b": [1]}}
    text = lines_of(planned(selector=selector), select=select)
    assert line in text
    assert "hp.recover_(small, batches, method, original if method.needs_teacher" in text
    assert "must_remove={'a.b': (1,)}" in text


@pytest.mark.parametrize("selector", ["local_search", "repriced"])
def test_levels_are_measured_as_they_were_priced(selector):
    """Also where `auto` chose the scorer of prices."""
    record = planned(selector=selector)
    names = [site.name for site in record.scores.sites]
    ladders = tuple(SiteLadder(name, (0, 1), (1.0, 0.0)) for name in names)
    settings = FrozenDict({"order": "surgeon", "examples": 64, "ridge": 0.1})
    scores = replace(record.scores, scorer="ladder", settings=settings, ladders=ladders)
    text = lines_of(replace(record, scores=scores), score={"scorer": "auto"})
    call = "loss=hp.scoring.refitted_loss_of(model, batches, examples=64, ridge=0.1)"
    assert call in text


def test_a_budget_of_speed_is_measured_where_the_run_measured_it():
    timed = planned(budget=hp.Budget(speedup=1.2), selector="knapsack")
    text = lines_of(timed, select={"latency": {"batch_size": 4, "length": None, "seconds": 20}})
    assert "table = hp.bench.latency_table(model, batch, batch_size=4, seconds=20)" in text
    assert "latency=table" in text
    assert "# batch: one batch" in text


def test_of_cuts_in_stages_only_the_plan_is_taken():
    text = lines_of(record_of(), gradual={"stages": 3}, recover=[{"method": "lstsq"}])
    assert "hp.score(" not in text
    assert "hp.recover_(" not in text
    assert 'plan = hp.RunRecord.load("record.json").plan\n' in text


@pytest.mark.parametrize(
    "name", ["_", "none", "_1", "import", "\N{LATIN SMALL LIGATURE FI}", "__debug__"]
)
def test_names_that_python_takes_for_something_else_are_not_written_as_names(name):
    settings, record = FrozenDict({name: 2}), record_of()
    scores = replace(record.scores, scorer=name, settings=settings)
    text = " ".join(lines_of(replace(record, scores=scores)).split()).replace("( ", "(")
    assert f"hp.score(model, batches, {name!r}" in text
    recipe = {
        "model": {"layouts": f"mine:{name}"},
        "select": {"latency": {name: 1, "sites": 1}, "policy": "free"},
        "score": {"until": {name: 1}},
        "recover": [{"method": name, "settings": {}}, {"method": "lstsq", "settings": settings}],
    }
    for each in (record, planned(budget=hp.Budget(speedup=1.2), settings=settings)):
        lines_of(each, **recipe)


def test_names_and_settings_of_a_record_cannot_become_code():
    bad, record = "x()\nimport os", record_of()
    scores = replace(record.scores, scorer=bad, settings=FrozenDict({bad: bad}))
    steps = [{"method": bad, "settings": {bad: bad}}]
    recipe = {"recover": steps, "model": {"layouts": bad}, "select": {"policy": bad}}
    nasty = replace(planned(selector=bad), scores=scores)
    text = lines_of(nasty, **recipe, score={"until": {"k": bad, bad: 1}})
    assert not [line for line in text.splitlines() if line.startswith("import os")]
    assert repr(bad) in text
    infinite = lines_of(record, select={"must_keep": {"a": [float("inf")]}})
    assert "inf" not in infinite.replace("float('inf')", "")
