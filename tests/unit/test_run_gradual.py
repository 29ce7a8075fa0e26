"""Heads that leave in stages while the model is trained: schedule, budget, one learning rate,
recipes."""

import copy
import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import InfeasibleBudget, InvalidValue, UnknownName
from headprune.layouts import registry as layouts
from headprune.model.losses import default_loss
from headprune.recipes import schema as recipes
from headprune.recipes.validate import RecipeError, check_recipe
from headprune.recovery import Finetune
from headprune.recovery._api import carry_out
from headprune.recovery._base import Job
from headprune.run import gradual, prune_gradually_, runner
from headprune.run.gradual import GradualReport, stage_budget

EXACT = {"rtol": 0, "atol": 0}
TINY = Finetune(steps=6, learning_rate=1e-3)


def build(name="bert"):
    model, batch = layouts.get(name).tiny(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    second = layouts.get(name).tiny(1)[1]
    return model, [batch, {k: v[:2] for k, v in second.items()}]


def test_the_schedule_is_cubic():
    """Zhu & Gupta 2017, equation 1, literally: s_t = s_f + (s_i - s_f) (1 - (t - t0) / (n Δt))³, s
    the sparsity."""
    for final in (0.1, 0.5, 0.9):
        for stages in (1, 3, 8):
            for t in range(1, stages + 1):
                sparsity = (1 - final) + (0 - (1 - final)) * (1 - t / stages) ** 3
                found = stage_budget(hp.Budget(keep_macs=final, length=9), t, stages, 0)
                assert found.amount == pytest.approx(1 - sparsity, abs=1e-9)
                assert found.length == 9
    assert stage_budget(hp.Budget(keep_params=0.3), 5, 5, 0) == hp.Budget(
        keep_params=0.3
    )  # no rounding in the end
    assert [stage_budget(hp.Budget(keep_heads=5), i, 3, 12).amount for i in (1, 2, 3)] == [7, 5, 5]
    assert (
        stage_budget(hp.Budget(keep_heads=20), 1, 3, 12).amount == 20
    )  # more than there are: nothing leaves


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("bert", kind) for kind in ("keep_heads", "keep_params", "keep_macs", "keep_kv")),
        *(("llama", kind) for kind in ("count", "keep_params", "keep_macs", "keep_kv")),
    ],
)
def test_every_stage_meets_its_budget_of_the_whole_model(name, kind):
    model, batches = build(name)
    if kind == "keep_kv" and name == "bert":
        with pytest.raises(InvalidValue, match="no KV cache"):
            prune_gradually_(
                model, batches, hp.Budget(keep_kv=0.5), stages=2, finetune=TINY, scorer="magnitude"
            )
        return
    original = hp.score(model, batches[:1], "magnitude", progress=False)
    heads, total = original.n_heads, original.costs.total
    spare = sum(sum(c.macs(7) for c in units[1:]) for units in original.costs.units) / total.macs(7)
    final = {
        "keep_heads": 0.4,
        "keep_kv": 0.4,
        "keep_params": 0.9,
        "keep_macs": round(1 - 0.7 * spare, 3),
    }.get(kind)
    settings = replace(TINY, steps=3)
    budget = hp.Budget(keep_heads=heads // 3) if kind == "count" else hp.Budget(**{kind: final})
    report = prune_gradually_(
        model, batches, budget, stages=3, finetune=settings, scorer="magnitude", example=batches[0]
    )
    kept = [stage.plan.mask for stage in report.stages]
    assert [stage.plan.budget.kind for stage in report.stages] == [budget.kind] * 3
    assert (report.stages[-1].plan.budget.amount, report.plan) == (
        budget.amount,
        report.stages[-1].plan,
    )
    assert kept[0].n_kept > kept[-1].n_kept
    for before, after in pairwise(kept):
        assert (before & after) == after  # nested
    assert {s.name: s.heads for s in hp.find_sites(model)} == {
        r.site: r.kept for r in kept[-1].rows
    }
    costs = {(u.name, h): u.cost for u in original.units() for h in u.heads[:1]}
    group = original.sites[0].group_size
    for stage, mask in zip(report.stages, kept, strict=True):
        gone = [
            costs[r.site, h]
            for r in mask.rows
            for h in range(r.n_heads)
            if h not in r.kept and h % group == 0
        ]
        left = {
            "keep_heads": (mask.n_kept, heads),
            "keep_params": (total.params - sum(c.params for c in gone), total.params),
            "keep_macs": (total.macs(7) - sum(c.macs(7) for c in gone), total.macs(7)),
            "keep_kv": (total.kv_bytes - sum(c.kv_bytes for c in gone), total.kv_bytes),
        }[budget.kind]
        amount = stage.plan.budget.amount
        limit = amount if isinstance(amount, int) else amount * left[1] + 1e-6
        unit = {"keep_heads": group}.get(budget.kind) or max(
            getattr(c, "kv_bytes" if kind == "keep_kv" else "params", 0) for c in costs.values()
        )
        assert left[0] <= limit
        if kind != "keep_macs":
            assert left[0] > limit - unit  # and no unit more than it must
        assert stage.proof.max_difference <= stage.proof.tolerance
    if kind == "keep_params":
        assert sum(p.numel() for p in model.parameters()) <= final * total.params


def test_the_same_final_plan_as_at_once_where_scores_do_not_change():
    """Scores of a rate of almost 0 stay, so that the steps down lead where one step leads."""
    model, batches = build()
    once = hp.select(
        hp.score(model, batches, "magnitude", progress=False), hp.Budget(keep_heads=0.5)
    )
    settings = Finetune(steps=4, learning_rate=1e-12)
    report = prune_gradually_(
        model, batches, hp.Budget(keep_heads=0.5), stages=4, finetune=settings, scorer="magnitude"
    )
    assert report.plan.mask == once.mask
    assert GradualReport.from_json(report.to_json()) == report
    assert str(report).count("\n") == 3


def test_scores_are_those_of_the_trained_model_at_every_stage():
    model, batches = build()
    report = prune_gradually_(
        model,
        batches,
        hp.Budget(keep_heads=0.5),
        stages=2,
        finetune=Finetune(steps=4, learning_rate=0.01),
    )
    first, second = (stage.plan for stage in report.stages)
    assert first.model.structure == second.model.structure
    assert first.model.weights != second.model.weights
    assert first.scores != second.scores
    assert second.scorer == "taylor"


def rates_of(monkeypatch, run):
    """Learning rates of the steps, in order."""
    found = []
    step = torch.optim.AdamW.step

    def spied(self, *args, **kwargs):
        found.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spied)
    run()
    return found


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_one_learning_rate_over_all_stages_and_data_read_on(monkeypatch, schedule):
    settings = Finetune(steps=7, learning_rate=0.01, warmup_ratio=0.3, schedule=schedule)
    seen = []

    def loss(m, batch):
        if m.training:
            seen.append(batch["input_ids"].shape[0])
        return default_loss(m, batch)

    def gradual():
        model, batches = build()
        report = prune_gradually_(
            model,
            batches,
            hp.Budget(keep_heads=0.5),
            stages=3,
            finetune=settings,
            scorer="magnitude",
            loss=loss,
        )
        assert [s.training.metrics["steps"] for s in report.stages] == [2, 2, 3]

    def whole():
        model, batches = build()
        hp.recover_(model, batches, settings)

    with monkeypatch.context() as patch:
        wanted = rates_of(patch, whole)
    with monkeypatch.context() as patch:
        assert rates_of(patch, gradual) == wanted
    assert len(set(wanted)) > 3
    assert seen == [3, 2, 3, 2, 3, 2, 3]


def test_one_stage_is_cut_and_train():
    model, batches = build()
    twin, settings = copy.deepcopy(model), Finetune(steps=3, learning_rate=0.01, seed=4)
    report = prune_gradually_(
        model, batches, hp.Budget(keep_heads=0.5), stages=1, finetune=settings
    )
    hp.prune_(
        twin,
        hp.select(hp.score(twin, batches, "taylor", progress=False), hp.Budget(keep_heads=0.5)),
    )
    hp.recover_(twin, batches, settings)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name, **EXACT)
    assert report.stages[0].training.settings["seed"] == 4


def test_parts_put_together_are_the_schedule():
    """A part says where its rate begins; without momentum two parts are one training."""
    model = nn.Linear(2, 1)
    batches = [torch.randn(3, 2) for _ in range(4)]
    loss = lambda m, x: m(x).squeeze(1).square()  # noqa: E731
    job = Job(model, batches, loss=loss, part=(2, 4))
    report = carry_out("finetune", Finetune(steps=2, learning_rate=0.01), job)
    assert report.metrics["steps"] == 2


def test_a_teacher_and_adapters():
    model, batches = build("llama")
    teacher = copy.deepcopy(model)
    settings = Finetune(steps=4, learning_rate=1e-3, distill=0.5, distill_hidden=0.5, lora_rank=2)
    report = prune_gradually_(
        model,
        batches,
        hp.Budget(keep_heads=0.5),
        stages=2,
        finetune=settings,
        teacher=teacher,
        scorer="magnitude",
    )
    assert all("hidden_states" in stage.training.metrics for stage in report.stages)
    assert not any("lora" in n for n, _ in model.named_modules())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stages": 7}, "stages=.: must be a count from 1 to the number of steps, 6"),
        ({"stages": 0}, "stages=.: must be a count from 1"),
        ({"budget": hp.Budget(speedup=1.5)}, "budget=.: must be a Budget by one of keep_heads"),
        ({"budget": {"self": hp.Budget(keep_heads=0.5)}}, "budget=.: must be a Budget by one of"),
        (
            {"finetune": replace(TINY, patience=2)},
            "patience: must be left out: every stage is a training of its own",
        ),
        ({"finetune": replace(TINY, distill=1.0)}, "teacher: must be the unpruned original"),
        ({"batches": iter([])}, "sized and readable more than once"),
    ],
)
def test_what_makes_no_sense_is_refused(more, message):
    model, batches = build()
    given = {
        "batches": batches,
        "budget": hp.Budget(keep_heads=0.5),
        "stages": 2,
        "finetune": TINY,
    } | more
    with pytest.raises(InvalidValue, match=message):
        prune_gradually_(
            model, given.pop("batches"), given.pop("budget"), scorer="magnitude", **given
        )


def test_a_budget_that_cannot_be_met_is_refused_before_anything_changes():
    model, batches = build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(
        InfeasibleBudget, match=r"Budget.keep_heads: must be at least 0\.25, got 0\.1"
    ):
        prune_gradually_(
            model, batches, hp.Budget(keep_heads=0.1), stages=3, finetune=TINY, scorer="magnitude"
        )
    torch.testing.assert_close(model.state_dict(), before, **EXACT)


def test_a_budget_of_the_cache_that_an_early_stage_used_up_leaves_the_rest_alone():
    """Bart's encoder has no cache: once no decoder head is left, later stages only train."""
    model, batches = build("bart")
    batches = [{**batch, "labels": batch["decoder_input_ids"]} for batch in batches]
    heads = {s.name: len(s.heads) for s in hp.find_sites(model)}
    settings = {
        "finetune": TINY,
        "scorer": "magnitude",
        "selector": hp.selection.GlobalTopk(min_heads=0),
    }
    report = prune_gradually_(
        model, batches, hp.Budget(keep_kv=0.02), stages=3, example=batches[0], **settings
    )
    left = {s.name: (s.kind, len(s.heads)) for s in hp.find_sites(model)}
    assert all(n == (0 if kind == "causal" else heads[name]) for name, (kind, n) in left.items())
    assert len(report.stages) == 3


def test_uniform_stages_leave_a_head_or_are_refused_at_once():
    model, batches = build("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    settings = {
        "finetune": TINY,
        "scorer": "magnitude",
        "selector": hp.selection.Uniform(min_heads=0),
    }
    with pytest.raises(InfeasibleBudget):
        prune_gradually_(model, batches, hp.Budget(keep_heads=1), stages=3, **settings)
    torch.testing.assert_close(model.state_dict(), before, **EXACT)


def raw(folder, **sections):
    draw = random.Random(0)
    rows = [{"tokens": [draw.randint(1, 19) for _ in range(draw.randint(4, 9))]} for _ in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return {
        "name": "test",
        "description": "for tests",
        "task": "causal_lm",
        "device": "cpu",
        "out": str(folder / "out"),
        "model": {
            "class_name": "LlamaForCausalLM",
            "config": {"vocab_size": 20, "intermediate_size": 16, **sizes},
        },
        "data": {"path": str(folder / "rows.jsonl"), "tokens": "tokens"},
        "score": {"scorer": "taylor", "random_draws": 0, "magnitude": False},
        "select": {"keep_heads": 0.5},
        "report": False,
        **sections,
    }


def test_heads_that_must_stay_or_go():
    model, batches = build()
    weakest = hp.score(model, batches, "magnitude", progress=False).ranked()
    stay = {weakest[0].name: list(weakest[0].heads)}
    gone = {next(site.name for site in hp.find_sites(model) if site.name not in stay): [0]}
    done = prune_gradually_(
        model, batches, hp.Budget(keep_heads=0.5), stages=3, finetune=TINY, scorer="magnitude", must_keep=stay,
        must_remove=gone,
    )  # fmt: skip
    for stage in done.stages:
        kept = {row.site: set(row.kept) for row in stage.plan.mask.rows}
        assert all(set(heads) <= kept[site] for site, heads in stay.items())
        assert not any(set(heads) & kept[site] for site, heads in gone.items())
    plain, batches = build()
    prune_gradually_(
        plain, batches, hp.Budget(keep_heads=0.5), stages=3, finetune=TINY, scorer="magnitude"
    )
    ((site, heads),) = stay.items()
    assert not set(heads) <= set(next(s.heads for s in hp.find_sites(plain) if s.name == site)), (
        "it would have left"
    )
    with pytest.raises(UnknownName, match="must_keep"):
        prune_gradually_(
            plain,
            batches,
            hp.Budget(keep_heads=2),
            stages=2,
            finetune=TINY,
            must_keep={"nowhere": [1]},
        )


def test_a_recipes_rules_hold_in_every_stage(tmp_path):
    gradual = {"stages": 2, "batch_size": 8, "settings": {"steps": 4}}
    scores = runner.score_recipe(check_recipe(raw(tmp_path)), say=lambda line: None)
    weakest = scores.ranked()[0]
    select = {"keep_heads": 0.5, "must_keep": {weakest.name: list(weakest.heads)}}
    record = runner.run_recipe(
        check_recipe(raw(tmp_path, gradual=gradual, select=select)), say=lambda line: None
    )
    kept = {row.site: set(row.kept) for row in record.plan.mask.rows}
    assert set(weakest.heads) <= kept[weakest.name]


def test_a_recipe_asks_for_it(tmp_path):
    gradual = {"stages": 2, "batch_size": 8, "settings": {"steps": 4, "distill_hidden": 0.5}}
    watched = {
        "method": "finetune",
        "settings": {"steps": 2, "eval_every": 1, "lora_rank": 2, "precision": "bf16"},
    }
    record = runner.run_recipe(
        check_recipe(raw(tmp_path, gradual=gradual, recover=[watched])), say=lambda line: None
    )
    assert record.status == "done"
    assert [stage["kept"] for stage in record.metrics["gradual"]] == [4, 4]
    assert [stage["steps"] for stage in record.metrics["gradual"]] == [2, 2]
    assert record.plan == hp.PruningPlan.load(tmp_path / "out" / "plan.json")
    assert record.plan.mask.n_kept == 4
    names = {row.name: row.trained for row in record.quality}
    assert names["gradual"] is True
    assert names["recovered (finetune)"] is True
    assert names["base"] is names["taylor"] is False
    assert [proof.what for proof in record.proofs] == ["outputs", "outputs", "reload"]
    assert record.metrics["recovery"]["0"]["evaluations"] == 3
    model = hp.from_pretrained(tmp_path / "out" / "model")
    assert sum(len(site.heads) for site in hp.find_sites(model)) == 4


def test_a_recipe_says_what_is_wrong_with_it(tmp_path):
    gradual = {"stages": 0, "settings": {"patience": 2, "step": 3}}
    select = {"sites": {"causal": {"keep_heads": 0.5}}}
    steps = [{"method": "finetune", "settings": {"checkpoint_every": 5}}]
    with pytest.raises(RecipeError) as error:
        check_recipe(
            raw(tmp_path, gradual=gradual, select=select, recover=steps, score={"until": {"k": 2}})
        )
    found = {problem.where for problem in error.value.problems}
    assert found == {
        *(
            "gradual.stages",
            "gradual.settings.patience",
            "gradual.settings.step",
            "select.sites",
            "score.until",
        ),
        "recover.0.settings.checkpoint_every",
    }
    assert recipes.GradualSection().stages == 8
    steps = [{"method": "mean_fold"}]
    with pytest.raises(RecipeError) as error:
        check_recipe(
            raw(
                tmp_path,
                gradual={},
                select={"speedup": 1.2, "selector": "iterative", "recover": steps},
            )
        )
    assert {problem.where for problem in error.value.problems} == {
        "select.recover",
        "select.speedup",
    }


@pytest.mark.parametrize("selector", ["iterative", "local_search"])
def test_a_selector_that_looks_at_the_model_looks_at_every_stages(selector, monkeypatch):
    model, batches = build()
    left = []

    def looking(make):
        def made(subject, *args, **kwargs):
            left.append(sum(len(site.heads) for site in hp.find_sites(subject)))
            return make(subject, *args, **kwargs)

        return made

    for name in ("loss_of", "rescorer"):
        monkeypatch.setattr(gradual, name, looking(getattr(gradual, name)))
    done = prune_gradually_(
        model,
        batches,
        hp.Budget(keep_heads=0.5),
        stages=2,
        finetune=replace(TINY, steps=2),
        selector=selector,
    )
    before = done.stages[0].plan.mask
    assert left == [before.n_heads, before.n_kept]
    assert done.plan.selector == selector


def test_batches_that_are_read_once_are_too_few():
    class Once(list):
        def __iter__(self):
            while self:
                yield self.pop()

    model, batches = build()
    with pytest.raises(
        InvalidValue, match="batches: must be readable more than once, got none on a second reading"
    ):
        prune_gradually_(
            model, Once(batches), hp.Budget(keep_heads=0.5), stages=1, finetune=TINY, scorer="magnitude",
            calibration=batches,
        )  # fmt: skip
