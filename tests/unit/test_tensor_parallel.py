"""Kept key/value heads that GPUs can share: ``Budget(tensor_parallel=N)``."""

import pytest
import transformers as hf

import headprune as hp
from headprune.core.codec import EMPTY
from headprune.core.errors import InfeasibleBudget, InvalidValue
from headprune.core.heads import AttentionSite
from headprune.core.plan import Budget
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.recipes.schema import BudgetSection
from tests.command_line import done, json_of, refused


def _scores(policy="group", n_kv_heads=4):
    """Two layers of 8 query heads, whose best heads are unevenly spread."""
    sites = []
    for name in ("a", "b"):
        site = AttentionSite(
            name, "llama", "causal", 8, n_kv_heads, 4, 4, tuple(range(8)), policy=policy
        )
        sites.append(site)
    values = []
    for place, site in enumerate(sites):
        values.append(tuple(10.0 ** (place + 1) + unit for unit in range(len(site.units))))
    model = ModelFingerprint("s", "w")
    return HeadScores(tuple(sites), tuple(values), None, "taylor", EMPTY, 4, model)


@pytest.mark.parametrize("selector", ["global_topk", "knapsack", "uniform"])
@pytest.mark.parametrize(("n_kv_heads", "n_kept"), [(4, 10), (8, 11)])
def test_every_layer_keeps_heads_that_divide(selector, n_kv_heads, n_kept):
    scores = _scores(n_kv_heads=n_kv_heads)
    free = hp.select(scores, Budget(keep_heads=n_kept), "global_topk")
    counts = [len(free.mask.kept(site)) * n_kv_heads // 8 for site in "ab"]
    assert any(count % 2 for count in counts), "the rule would change nothing"
    plan = hp.select(scores, Budget(keep_heads=n_kept, tensor_parallel=2), selector)
    for site in "ab":
        count = len(plan.mask.kept(site)) * n_kv_heads // 8
        assert count > 0
        assert count % 2 == 0
    assert "for 2 GPUs" in str(plan)


def test_a_budget_too_small_for_the_gpus_names_the_nearest():
    with pytest.raises(InfeasibleBudget, match=r"at least 8.*tensor_parallel=2"):
        hp.select(_scores(), Budget(keep_heads=6, tensor_parallel=2))


@pytest.mark.parametrize(
    ("policy", "n_kv_heads", "gpus"), [("free", 4, 2), ("balanced", 4, 3), ("group", 4, 8)]
)
def test_heads_that_no_choice_can_share_are_refused(policy, n_kv_heads, gpus):
    with pytest.raises(InvalidValue, match="tensor_parallel"):
        hp.select(_scores(policy, n_kv_heads), Budget(keep_heads=0.5, tensor_parallel=gpus))


def test_balanced_groups_are_shared_as_they_are():
    plan = hp.select(_scores("balanced"), Budget(keep_heads=8, tensor_parallel=4))
    assert plan.mask.n_kept == 8


@pytest.mark.parametrize("gpus", [0, 1.5, True])
def test_a_count_of_gpus_that_is_none(gpus):
    with pytest.raises(InvalidValue, match="tensor_parallel: must be a count of GPUs"):
        Budget(keep_heads=0.5, tensor_parallel=gpus)


def test_on_the_command_line(tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = hf.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    model = hf.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    assert json_of(f"inspect {tmp_path}/model")["tensor_parallel"] == [1, 2, 4]
    hp.score(model, None, "magnitude").save(tmp_path / "scores.json")
    line = f"prune --model {tmp_path}/model --scores {tmp_path}/scores.json --keep 8"
    done(f"{line} --tensor-parallel 2 --out {tmp_path}/small")
    assert json_of(f"inspect {tmp_path}/small")["tensor_parallel"] == [1, 2]
    assert "divisors of every layer" in done(f"inspect {tmp_path}/small").stdout
    message = refused(f"{line} --tensor-parallel 3 --out {tmp_path}/other")
    assert "tensor_parallel=3" in message


def test_in_a_recipe():
    assert BudgetSection(keep_heads=0.5, tensor_parallel=2).budget.tensor_parallel == 2
