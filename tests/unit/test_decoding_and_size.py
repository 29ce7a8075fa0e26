"""Sizes before and after a cut, and timing of generation.

Cache bytes are exact, tokens are those of a whole pass, rounds are fair.
"""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headprune as hp
from headprune.bench import compare_decoding
from headprune.bench.size import sizes
from headprune.core.errors import InvalidValue
from headprune.recipes.validate import RecipeError, load_recipe
from tests.laws.support import subject_of

LAYERS, GROUPS, WIDTH = 2, 4, 4


@pytest.fixture
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 8, "num_key_value_heads": GROUPS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, pad_token_id=None, **sizes, **heads))


def test_half_of_the_groups_is_half_of_the_cache(model):
    small = copy.deepcopy(model)
    hp.prune_heads_(small, {layer: [0, 1, 4, 5] for layer in range(LAYERS)})
    effort = {"seconds": 0, "min_rounds": 2, "warmup": 0}
    rows = compare_decoding(model.train(), small, [1, 3], [5], new_tokens=4, **effort)
    assert model.training
    sizes = [(r.decode.batch, r.decode.length, r.prefill.rounds) for r in rows]
    assert sizes == [(1, 5, 2), (3, 5, 2)]
    for row in rows:
        batch, length = row.decode.batch, row.decode.length
        assert row.original_bytes == 2 * LAYERS * GROUPS * WIDTH * batch * (length + 4) * 4
        assert row.pruned_bytes * 2 == row.original_bytes
        speed = row.tokens_per_second()
        assert speed["pruned_decode"] == batch * 4 / row.decode.pruned_p50
        assert speed["original_prefill"] == batch * length / row.prefill.original_p50


ONCE = {"seconds": 0, "min_rounds": 1, "max_rounds": 1, "warmup": 0}


def test_steps_read_every_token_once_after_those_before(model):
    calls = []

    def note(module, args, kwargs):
        past = kwargs.get("past_key_values")
        calls.append((kwargs["input_ids"].shape[1], 0 if past is None else past.get_seq_length()))
        assert kwargs["logits_to_keep"] == 1

    model.register_forward_pre_hook(note, with_kwargs=True)
    compare_decoding(model, copy.deepcopy(model), [2], [5], 3, **ONCE)
    assert calls == [(5, 0), (1, 5), (1, 6), (1, 7)] * 2


def test_a_compiled_model_makes_the_last_logits_alone_too(model):
    made = []
    model.lm_head.register_forward_pre_hook(lambda module, args: made.append(args[0].shape[1]))
    compare_decoding(torch.compile(model, backend="eager"), model, [2], [5], 1, **ONCE)
    assert made
    assert set(made) == {1}


def test_what_cannot_be_timed_is_refused(model):
    with pytest.raises(InvalidValue, match="new_tokens"):
        compare_decoding(model, model, new_tokens=0)
    with pytest.raises(InvalidValue, match="pruned: must be a causal language model"):
        compare_decoding(model, hp.MultiHeadAttention(8, 2))
    with pytest.raises(InvalidValue, match="must be on cpu, where the original is, got meta"):
        compare_decoding(model, copy.deepcopy(model).to("meta"))
    with pytest.raises(RecipeError, match=r"bench.new_tokens: must be left out"):
        load_recipe("digits-vit", ["bench.new_tokens=3"])


@pytest.mark.parametrize(
    ("name", "tokens", "cache"),
    # Llama: three layers of three groups, keys and values of width 4 in fp64; one group is removed.
    [("vit", 5, None), ("bert", 7, None), ("llama", 7, (9 * 64, 8 * 64))],
)
def test_sizes_are_those_of_both_models(name, tokens, cache):
    subject = subject_of(name)
    pruned, first = subject.copy(), subject.sites[0]
    mask = subject.without({first.name: first.units[0]})
    hp.prune_(pruned, mask)
    found = sizes(subject.model, pruned, subject.batch)
    rows = {row.name: (row.original, row.pruned) for row in found}
    assert rows["heads"] == (sum(s.n_query_heads for s in subject.sites), mask.n_kept)
    counts = [sum(p.numel() for p in m.parameters()) for m in (subject.model, pruned)]
    assert rows["parameters"] == tuple(counts)
    before, after = rows[f"MACs an example of {tokens} tokens"]
    assert before > after > 0
    assert rows.get("KV-cache bytes per token") == cache
    given = type(subject.sites)(subject.sites[:1], [])  # sites that are given alone count
    heads = sizes(subject.model, subject.model, subject.batch, sites=given)[0]
    assert heads.original == heads.pruned == first.n_query_heads
