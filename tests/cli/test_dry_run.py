"""``headprune run --dry-run``: what a run would take, measured on a batch or two; nothing is
written."""

import pytest
import torch

from headprune.core.errors import UnsupportedModel
from headprune.recipes.validate import load_recipe
from headprune.run import auto as run_auto
from headprune.run import dry
from headprune.run.dry import DryRun, dry_run
from headprune.run.subject import Subject
from headprune.scoring import Surgeon
from tests.command_line import json_of

SHORT = [
    *("data.calibration=64", "data.holdout=100", "data.test_holdout=200"),
    "model.config.num_hidden_layers=2",
]
ALONE = [
    *(*SHORT, "train=null", "bench=null", "recover=[]"),
    *("score.random_draws=0", "score.magnitude=false", "score.batch_size=16"),
]
AUTO = [
    *(*ALONE, "score.scorer=auto"),
    "score.settings={candidates: [taylor, surgeon], random_draws: 1}",
]
SPEED = ["select.keep_heads=null", "select.speedup=1.2", "select.latency.seconds=7"]


def dried(*settings):
    """The stages of a dry run of the digits, by name."""
    found = dry_run("digits-vit", list(settings), say=lambda line: None)
    return {stage.stage: stage for stage in found.stages}


def test_it_says_what_a_run_would_take_and_writes_nothing(tmp_path):
    settings = " ".join(f"--set {setting}" for setting in SHORT)
    data = json_of(f"run digits-vit {settings} --out {tmp_path / 'out'} --dry-run")
    assert not (tmp_path / "out").exists()
    seconds = data.pop("seconds")
    found = DryRun.from_dict(data)
    assert str(found).endswith("nothing was trained, cut or written")
    assert found.rows["calibration"] == 64
    stages = {stage.stage: stage.seconds for stage in found.stages}
    assert list(stages) == ["train", "score", "choose", "quality", "recover (finetune)", "bench"]
    assert seconds == pytest.approx(sum(stage or 0 for stage in stages.values()))
    recipe = load_recipe("digits-vit", SHORT)
    times = recipe.train.epochs / recipe.recover[0].settings["epochs"]
    trained, recovered = stages["train"], stages["recover (finetune)"]
    assert trained / recovered == pytest.approx(times)
    weights = found.memory["weights of the whole model and of its cut copy"]
    assert weights == 8 * found.parameters
    assert found.memory["gradients and both moments of AdamW"] == 12 * found.parameters


@pytest.mark.parametrize(
    ("settings", "draws"),
    [
        (["score.scorer=taylor", "recover=[{method: mean_fold}]", "score.random_draws=5"], 3),
        (["score.scorer=taylor", "recover=[{method: mean_fold}]", "score.random_draws=1"], 1),
        (["score.scorer=taylor", "score.random_draws=5"], 0),
    ],
)
def test_random_heads_that_are_recovered_alike_are_counted(settings, draws):
    """They are not where a recovery trains, as that of the recipe does."""
    found = dried(*SHORT, "train=null", "bench=null", *settings)
    assert ("random" in found) == bool(draws)
    if draws:
        once = found["recover (mean_fold)"].seconds
        assert found["random"].seconds == pytest.approx(draws * once)
        assert found["random"].basis.startswith(f"{draws} draw")


@pytest.fixture
def counted(monkeypatch):
    """What a dry run does: batches of each scoring, and matrices inverted at a time."""
    found = {"batches": [], "inverted": []}
    score, factor = dry.score, torch.linalg.cholesky_ex

    def scored(model, given, *args, **kwargs):
        found["batches"].append(len(given))
        return score(model, given, *args, **kwargs)

    def factored(a, **kwargs):
        found["inverted"].append(a.shape[:-2].numel())
        return factor(a, **kwargs)

    monkeypatch.setattr(dry, "score", scored)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", factored)
    return found


@pytest.mark.parametrize(
    ("scorer", "batches", "inverted", "basis"),
    [
        ("taylor", [1, 2], 0, "taylor on 64 rows in 4 batches, 2 of which were timed"),
        ("surgeon", [1, 1, 1, 2], 1, "1 of 18 equal parts (the largest site"),
    ],
)
def test_it_scores_a_batch_or_two_and_inverts_one_matrix(scorer, batches, inverted, basis, counted):
    """Of all sites and blocks: 2 sites, 8 blocks and all examples together."""
    stage = dried(*ALONE, f"score.scorer={scorer}")["score"]
    assert sorted(counted["batches"]) == batches
    assert sum(counted["inverted"]) == inverted
    assert basis in stage.basis


def test_what_it_leaves_out_is_counted_for_all_sites_and_blocks(monkeypatch):
    """A second for every batch, 100 for the matrices of one site: 4 batches, and 2 sites times 9
    runs."""
    clock = [0.0]

    def scored(model, batches, scorer, *, sites, progress):
        clock[0] += len(batches) + (100 if type(scorer) is Surgeon else 0)
        assert len(sites) == (1 if scorer.blocks == 1 else 2)

    monkeypatch.setattr(dry, "score", scored)
    monkeypatch.setattr(dry, "perf_counter", lambda: clock[0])
    stage = dried(*ALONE, "score.scorer=surgeon")["score"]
    assert stage.seconds == 4 + 2 * 9 * 100
    assert "; 30 min of it after the passes" in stage.basis


def test_the_matrices_of_a_scorer_count_in_memory_and_prices_say_that_they_cost_less():
    budget = ["select.keep_heads=null", "select.keep_macs=0.5", "select.feed_forward=true"]
    wanted = [*ALONE, *budget, "score.scorer=ladder"]
    few = [*wanted, "score.settings={examples: 24}"]
    found = dry_run("digits-vit", few, say=lambda line: None)
    widths = [len(site.heads) * site.value_dim for site in found.sites]
    # Two of its order by `surgeon`, and the ladder's own.
    matrices = found.memory["matrices of the scorer, width x width per site"]
    assert matrices == 8 * 3 * sum(width**2 for width in widths)
    (stage,) = [stage for stage in found.stages if stage.stage == "score"]
    assert stage.basis.endswith("; at most, for prices are measured on 24 rows")
    assert "at most" not in dried(*wanted)["score"].basis


def test_learned_gates_count_by_their_steps_and_latency_is_taken_at_its_word():
    gates = "score.settings={steps: 12, warmup: 1, block: 16}"
    stages = dried(*ALONE, *SPEED, "score.scorer=hard_concrete", gates)
    assert list(stages) == ["score", "quality", "latency"]
    latency = stages["latency"]
    assert (latency.seconds, latency.basis) == (
        21,
        "the table, a cut copy and the cut model, 7 s each",
    )
    assert stages["score"].basis == "12 steps of 16 rows"


# ---------------------------------------------------------------- auto


def test_one_plan_of_auto_is_judged_in_small_and_no_latency_table_measured(counted, monkeypatch):
    """Candidates are timed as they are alone; one cut and refit on 16 rows and one on 32."""

    def measured(self):
        raise AssertionError("a latency table was measured")

    monkeypatch.setattr(Subject, "latency", property(measured))
    stages = dried(*AUTO, *SPEED, "recover=[{method: lstsq}]")
    assert list(stages) == ["score", "choose", "quality", "recover (lstsq)", "latency"]
    assert counted["batches"][:2] == [1, 2], "of taylor"
    assert sorted(counted["batches"][2:]) == [1, 1, 1, 2], "of surgeon"
    assert "2 of which were timed: 2 scorers, one after the other" in stages["score"].basis
    assert "up to 3 plans, each cut and refitted by lstsq 2 times" in stages["choose"].basis
    assert stages["choose"].basis.endswith("on 16 and 32 rows")


@pytest.mark.parametrize(("size", "samples"), [(16, [1, 2]), (1, [4, 8]), (64, [1])])
def test_what_is_left_out_of_auto_is_counted(monkeypatch, size, samples):
    """A second for every row and 100 for every solving: 64 rows, 3 plans, 2 folds."""
    clock, judged = [0.0], list[int]()

    def once(self, batches):
        judged.append(len(batches))
        clock[0] += 100 + size * len(batches)

    monkeypatch.setattr(dry, "score", lambda *args, **kwargs: None)
    monkeypatch.setattr(dry, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(run_auto.AutoOfRun, "judge_once", once)
    stage = dried(*AUTO, f"score.batch_size={size}")["choose"]
    assert judged == samples
    assert stage.seconds == 3 * 2 * (100 + 64)
    assert "each cut 2 times" in stage.basis


def test_auto_goes_on_where_the_model_refuses_the_refit(monkeypatch):
    def refuse(*args):
        raise UnsupportedModel("the model", "one that can be refitted", "another")

    monkeypatch.setattr(dry, "score", lambda *args, **kwargs: None)
    monkeypatch.setattr(run_auto.AutoOfRun, "refit_", refuse)
    assert dried(*AUTO, "recover=[{method: lstsq}]")["choose"].seconds is not None


def test_a_recovery_without_training_is_timed_on_a_few_rows(monkeypatch):
    """A second for every row and 100 for every solving: 64 rows."""
    clock = [0.0]

    def recovered(subject, pruned, step):
        kept = sum(module.num_attention_heads for module in _attentions(pruned))
        assert kept < sum(module.num_attention_heads for module in _attentions(subject.model))
        clock[0] += 100 + len(subject.data.examples["calibration"])

    monkeypatch.setattr(dry, "recover_once", recovered)
    monkeypatch.setattr(dry, "perf_counter", lambda: clock[0])
    stage = dried(*ALONE[:-3], "recover=[{method: lstsq, batch_size: 8}]", "score.scorer=taylor")
    assert stage["recover (lstsq)"].seconds == 100 + 64
    assert stage["recover (lstsq)"].basis == "on 64 rows; timed on 16 and 32"


def _attentions(model):
    return [module for module in model.modules() if hasattr(module, "num_attention_heads")]


REPRICED = [
    *("select.feed_forward=true", "select.keep_heads=null", "select.keep_macs=0.7"),
    *("score.scorer=ladder", "select.selector=repriced"),
]


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        # Half of 64 rows: one is kept for fits, one is measured.
        ("score.batch_size=64", 32),
        ("score.settings={examples: 8}", 8),
    ],
)
def test_measured_plans_of_repriced_are_estimated(monkeypatch, settings, rows):
    """A second for every measured row of a plan, 100 seconds to prepare, and 10 a batch."""
    clock = [0.0]

    def measure(model, batches, **options):
        clock[0] += 100 + 10 * len(batches)
        measured = sum(len(batch["labels"]) for batch in batches) / 2

        def rise(plans):
            clock[0] += measured * len(plans)

        return rise

    monkeypatch.setattr(dry, "score", lambda *args, **kwargs: None)
    monkeypatch.setattr(dry, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(dry, "refitted_loss_of", measure)
    stage = dried(*ALONE, *REPRICED, settings)["select"]
    # Three rounds: a plan, it with each of four sites one level up and down, four candidates.
    n_plans = 3 * (1 + 4 * 2 + 4)
    n_batches = 1 if "64" in settings else 4
    # The second batch counts for at least a fifth of the first.
    prepared = 110 + (n_batches - 1) * 0.2 * 110
    assert stage.seconds == pytest.approx(prepared + n_plans * rows)
    assert stage.basis.startswith(f"repriced, up to {n_plans} plans; 5 were timed on")


@pytest.mark.parametrize(
    "settings",
    [
        [*ALONE, "select.selector=repriced"],
        [*ALONE, *REPRICED, "select.recover=[{method: mean_fold}]"],
        [*ALONE, *REPRICED, "gradual={stages: 2}"],
    ],
    ids=["scores without prices", "refits are made", "in stages"],
)
def test_plans_that_are_cut_are_not_estimated(settings):
    assert dried(*settings)["select"].seconds is None
