"""The proofs of a run hold for what was cut, and fail for anything else."""

from __future__ import annotations

import copy

import pytest
import torch

import headprune as hp
from headprune.core.errors import VerificationFailed
from headprune.run.proofs import generation_proof, reload_proof

EXAMPLES = [{"input_ids": list(range(1 + i, 12 + i)), "attention_mask": [1] * 11} for i in range(4)]


@pytest.fixture
def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.3}
    config = LlamaConfig(max_position_embeddings=64, pad_token_id=None, **sizes, **heads)
    return LlamaForCausalLM(config).eval()


def plan_without(model: torch.nn.Module, group: int) -> hp.PruningPlan:
    sites = hp.find_sites(model)
    keep = {sites[0].name: [h for h in range(8) if h // 2 != group]}
    return hp.PruningPlan(hp.HeadMask.from_keep(keep, {s.name: s.n_query_heads for s in sites}))


def test_generation_of_the_pruned_model_is_that_of_the_gated_one(llama):
    plan, pruned = plan_without(llama, 1), copy.deepcopy(llama)
    hp.prune_(pruned, plan)
    proof = generation_proof(llama, plan, pruned, EXAMPLES, pad=0)
    assert (proof.what, proof.n_examples, proof.dtype) == ("generation", 4, "float32")
    assert proof.max_difference <= proof.tolerance
    assert proof.scale > 1
    assert llama.training is False


@pytest.mark.parametrize("group", [None, 2], ids=["not cut", "another cut"])
def test_generation_of_another_model_fails_the_proof(llama, group):
    pruned = copy.deepcopy(llama)
    if group is not None:
        hp.prune_(pruned, plan_without(llama, group))
    with pytest.raises(VerificationFailed, match="what the pruned model generates"):
        generation_proof(llama, plan_without(llama, 1), pruned, EXAMPLES, pad=0)


def test_reload_is_proven_to_the_last_bit(llama, tmp_path):
    batch = {"input_ids": torch.arange(1, 13).reshape(2, 6)}
    hp.prune_(llama, plan_without(llama, 1))
    hp.save_pretrained(llama, tmp_path)
    assert reload_proof(llama, tmp_path, batch).max_difference == 0
    with torch.no_grad():
        llama.model.norm.weight[0].add_(1e-5)
    with pytest.raises(VerificationFailed, match="equal to the last bit"):
        reload_proof(llama, tmp_path, batch)
