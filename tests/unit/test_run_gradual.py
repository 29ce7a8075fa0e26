"""Heads that are removed in stages while the model is trained: schedule, budget, one learning rate,
recipes."""

import copy
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import headprune as hp
from headprune.core.errors import InfeasibleBudget, InvalidValue, UnknownName
from headprune.model.losses import default_loss
from headprune.recovery import Finetune
from headprune.run import gradual, prune_gradually_, runner
from headprune.run.gradual import GradualReport, stage_budget
from tests.small_recipes import checked_recipe, quiet_run, write_rows
from tests.unit.test_recovery_finetune import build

EXACT = {"rtol": 0, "atol": 0}
TINY = Finetune(steps=6, learning_rate=1e-3)
HALF = hp.Budget(keep_heads=0.5)


def pruned(model, batches, budget=HALF, **settings):
    standard = {"stages": 3, "finetune": TINY, "scorer": "magnitude"}
    return prune_gradually_(model, batches, budget, **{**standard, **settings})


def heads_of(model):
    return {site.name: site.heads for site in hp.find_sites(model)}


def test_the_schedule_is_cubic():
    """Zhu & Gupta 2017, equation 1, literally: s_t = s_f + (s_i - s_f) (1 - (t - t0) / (n Δt))³, s
    the sparsity."""
    for final, stages in ((0.1, 1), (0.5, 3), (0.9, 8)):
        for t in range(1, stages + 1):
            sparsity = (1 - final) + (0 - (1 - final)) * (1 - t / stages) ** 3
            found = stage_budget(hp.Budget(keep_macs=final, length=9), t, stages, 0)
            assert found.amount == pytest.approx(1 - sparsity, abs=1e-9)
            assert found.length == 9
    last = hp.Budget(keep_params=0.3)
    assert stage_budget(last, 5, 5, 0) == last  # not rounded
    assert [stage_budget(hp.Budget(keep_heads=5), i, 3, 12).amount for i in (1, 2, 3)] == [7, 5, 5]
    more_than_there_are = hp.Budget(keep_heads=20)
    assert stage_budget(more_than_there_are, 1, 3, 12).amount == 20


@pytest.mark.parametrize(
    ("name", "kind", "final"),
    [
        ("bert", "keep_params", 0.9),
        ("llama", "keep_heads", None),  # a third of them, as a count
        ("llama", "keep_macs", None),  # 70 % of what can be spared
        ("llama", "keep_kv", 0.4),
    ],
)
def test_every_stage_meets_its_budget_of_the_whole_model(name, kind, final):
    model, batches = build(name)
    original = hp.score(model, batches[:1], "magnitude", progress=False)
    heads, total = original.n_heads, original.costs.total
    if kind == "keep_macs":
        spare = sum(sum(c.macs(7) for c in units[1:]) for units in original.costs.units)
        final = round(1 - 0.7 * spare / total.macs(7), 3)
    budget = hp.Budget(**{kind: final or heads // 3})
    settings = replace(TINY, steps=3)
    report = pruned(model, batches, budget, finetune=settings, example=batches[0])
    masks = [stage.plan.mask for stage in report.stages]
    assert [stage.plan.budget.kind for stage in report.stages] == [kind] * 3
    assert (report.plan, report.plan.budget.amount) == (report.stages[-1].plan, budget.amount)
    assert masks[0].n_kept > masks[-1].n_kept
    assert all((before & after) == after for before, after in pairwise(masks)), "nested"
    assert heads_of(model) == {r.site: r.kept for r in masks[-1].rows}
    group = original.sites[0].group_size
    measure = {
        "keep_heads": lambda cost: group,
        "keep_params": lambda cost: cost.params,
        "keep_macs": lambda cost: cost.macs(7),
        "keep_kv": lambda cost: cost.kv_bytes,
    }[kind]
    costs = {(u.name, u.heads[0]): measure(u.cost) for u in original.units()}
    whole = heads if kind == "keep_heads" else measure(total)
    for stage, mask in zip(report.stages, masks, strict=True):
        units = [(row, head) for row in mask.rows for head in range(0, row.n_heads, group)]
        kept = whole - sum(costs[row.site, head] for row, head in units if head not in row.kept)
        amount = stage.plan.budget.amount
        limit = amount if isinstance(amount, int) else amount * whole + 1e-6
        assert kept <= limit
        if kind != "keep_macs":
            assert kept > limit - max(costs.values()), "no unit more than it must"
        assert stage.proof.max_difference <= stage.proof.tolerance
    if kind == "keep_params":
        assert sum(p.numel() for p in model.parameters()) <= final * total.params


def test_the_same_final_plan_as_at_once_where_scores_do_not_change():
    model, batches = build()
    once = hp.select(hp.score(model, batches, "magnitude", progress=False), HALF)
    report = pruned(model, batches, stages=4, finetune=Finetune(steps=4, learning_rate=1e-12))
    assert report.plan.mask == once.mask
    assert GradualReport.from_json(report.to_json()) == report
    assert str(report).count("\n") == 3


def test_a_budget_of_the_cache_that_an_early_stage_used_up_changes_no_other_layer():
    """Bart's encoder has no cache: once no decoder head is there, later stages only train."""
    model, batches = build("bart")
    batches = [{**batch, "labels": batch["decoder_input_ids"]} for batch in batches]
    before = heads_of(model)
    selector = hp.selection.GlobalTopk(min_heads=0)
    budget = hp.Budget(keep_kv=0.02)
    report = pruned(model, batches, budget, example=batches[0], selector=selector)
    for site in hp.find_sites(model):
        assert site.heads == (() if site.kind == "causal" else before[site.name])
    assert len(report.stages) == 3


def test_heads_that_must_be_kept_or_removed():
    model, batches = build()
    weakest = hp.score(model, batches, "magnitude", progress=False).ranked()[0]
    keep = {weakest.name: list(weakest.heads)}
    remove = {next(name for name in heads_of(model) if name not in keep): [0]}
    for stage in pruned(model, batches, must_keep=keep, must_remove=remove).stages:
        kept = {row.site: set(row.kept) for row in stage.plan.mask.rows}
        assert all(set(heads) <= kept[site] for site, heads in keep.items())
        assert not any(set(heads) & kept[site] for site, heads in remove.items())
    plain, batches = build()
    pruned(plain, batches)
    assert not set(weakest.heads) <= set(heads_of(plain)[weakest.name]), "it is removed else"
    with pytest.raises(UnknownName, match="must_keep"):
        pruned(plain, batches, must_keep={"nowhere": [1]})


def test_scores_are_those_of_the_trained_model_at_every_stage():
    model, batches = build()
    settings = Finetune(steps=4, learning_rate=0.01)
    report = prune_gradually_(model, batches, HALF, stages=2, finetune=settings)
    first, second = (stage.plan for stage in report.stages)
    assert first.model.structure == second.model.structure
    assert first.model.weights != second.model.weights
    assert first.scores != second.scores
    assert second.scorer == "taylor"


def rates_of(monkeypatch, run):
    found = []
    step = torch.optim.AdamW.step

    def spied(self, *args, **kwargs):
        found.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", spied)
        run()
    return found


def test_one_learning_rate_over_all_stages_and_data_read_on(monkeypatch):
    settings = Finetune(steps=7, learning_rate=0.01, warmup_ratio=0.3, schedule="linear")
    seen = []

    def loss(m, batch):
        if m.training:
            seen.append(batch["input_ids"].shape[0])
        return default_loss(m, batch)

    def in_stages():
        report = pruned(*build(), finetune=settings, loss=loss)
        assert [s.training.metrics["steps"] for s in report.stages] == [2, 2, 3]

    wanted = rates_of(monkeypatch, lambda: hp.recover_(*build(), settings))
    assert rates_of(monkeypatch, in_stages) == wanted
    assert len(set(wanted)) > 3
    assert seen == [3, 2, 3, 2, 3, 2, 3]


def test_one_stage_is_cut_and_train():
    model, batches = build()
    twin, settings = copy.deepcopy(model), Finetune(steps=3, learning_rate=0.01, seed=4)
    report = prune_gradually_(model, batches, HALF, stages=1, finetune=settings)
    hp.prune_(twin, hp.select(hp.score(twin, batches, "taylor", progress=False), HALF))
    hp.recover_(twin, batches, settings)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name, **EXACT)
    assert report.stages[0].training.settings["seed"] == 4


def test_a_teacher_and_adapters():
    model, batches = build("llama")
    settings = Finetune(steps=4, learning_rate=1e-3, distill=0.5, distill_hidden=0.5, lora_rank=2)
    report = pruned(model, batches, stages=2, finetune=settings, teacher=copy.deepcopy(model))
    assert all("hidden_states" in stage.training.metrics for stage in report.stages)
    assert not any("lora" in n for n, _ in model.named_modules())


@pytest.mark.parametrize("selector", ["iterative", "local_search"])
def test_a_selector_that_looks_at_the_model_looks_at_every_stages(selector, monkeypatch):
    model, batches = build()
    seen = []

    def looking(make):
        def made(subject, *args, **kwargs):
            seen.append(sum(len(site.heads) for site in hp.find_sites(subject)))
            return make(subject, *args, **kwargs)

        return made

    for name in ("loss_of", "rescorer"):
        monkeypatch.setattr(gradual, name, looking(getattr(gradual, name)))
    settings = {"stages": 2, "finetune": replace(TINY, steps=2), "selector": selector}
    done = prune_gradually_(model, batches, HALF, **settings)
    before = done.stages[0].plan.mask
    assert seen == [before.n_heads, before.n_kept]
    assert done.plan.selector == selector


class Once(list):
    def __iter__(self):
        while self:
            yield self.pop()


def test_what_makes_no_sense_is_refused():
    model, batches = build()
    for more, message in (
        ({"stages": 7}, "stages=.: must be a count from 1 to the number of steps, 6"),
        ({"stages": 0}, "stages=.: must be a count from 1"),
        ({"budget": hp.Budget(speedup=1.5)}, "budget=.: must be a Budget by one of keep_heads"),
        ({"budget": {"self": HALF}}, "budget=.: must be a Budget by one of"),
        ({"budget": hp.Budget(keep_kv=0.5)}, "no KV cache"),
        (
            {"finetune": replace(TINY, patience=2)},
            "patience: must be left out, because every stage is",
        ),
        ({"finetune": replace(TINY, distill=1.0)}, "teacher: must be the unpruned original"),
        ({"batches": iter([])}, "sized and readable more than once"),
        (
            {"batches": Once(batches), "calibration": batches},
            "batches: must be readable more than once, got none on a second",
        ),
    ):
        with pytest.raises(InvalidValue, match=message):
            pruned(model, **{"batches": batches, **more})


def test_a_budget_that_cannot_be_met_is_refused_before_anything_changes():
    none = hp.selection.Uniform(min_heads=0)
    for name, keep, selector in (("bert", 0.1, "global_topk"), ("llama", 1, none)):
        model, batches = build(name)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(InfeasibleBudget):
            pruned(model, batches, hp.Budget(keep_heads=keep), selector=selector)
        torch.testing.assert_close(model.state_dict(), before, **EXACT)


def recipe(folder, **sections):
    draw = random.Random(0)
    rows = [{"tokens": [draw.randint(1, 19) for _ in range(draw.randint(4, 9))]} for _ in range(40)]
    config = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = {"class_name": "LlamaForCausalLM", "config": config}
    data = {"path": str(write_rows(folder / "rows.jsonl", rows)), "tokens": "tokens"}
    score = {"scorer": "taylor", "random_draws": 0, "magnitude": False}
    standard = {"out": str(folder / "out"), "score": score}
    return checked_recipe("causal_lm", model, data, **{**standard, **sections})


def test_a_recipe_asks_for_it_and_its_rules_hold_in_every_stage(tmp_path):
    settings = {"steps": 4, "distill_hidden": 0.5}
    section = {"stages": 2, "batch_size": 8, "settings": settings}
    watching = {"steps": 2, "eval_every": 1, "lora_rank": 2, "precision": "bf16"}
    watched = {"method": "finetune", "settings": watching}
    weakest = runner.score_recipe(recipe(tmp_path), say=lambda line: None).ranked()[0]
    select = {"keep_heads": 0.5, "must_keep": {weakest.name: list(weakest.heads)}}
    record = quiet_run(recipe(tmp_path, gradual=section, recover=[watched], select=select))
    assert record.status == "done"
    assert [(s["kept"], s["steps"]) for s in record.metrics["gradual"]] == [(4, 2), (4, 2)]
    assert record.plan == hp.PruningPlan.load(tmp_path / "out" / "plan.json")
    assert set(weakest.heads) <= set(record.plan.mask.kept(weakest.name))
    names = {row.name: row.trained for row in record.quality}
    assert names["gradual"] is names["recovered (finetune)"] is True
    assert names["base"] is names["taylor"] is False
    assert [proof.what for proof in record.proofs] == ["outputs", "outputs", "reload"]
    assert record.metrics["recovery"]["0"]["evaluations"] == 3
    model = hp.from_pretrained(tmp_path / "out" / "model")
    assert sum(len(heads) for heads in heads_of(model).values()) == 4 == record.plan.mask.n_kept
