"""Gradient checkpointing while scoring: the same numbers in evaluation mode, in less memory."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import headprune as hp
from headprune.model.losses import default_loss
from headprune.model.recompute import recomputed
from headprune.scoring import HardConcrete, IntegratedGradients
from tests.laws.support import EXACT, labelled_subject, unchanged
from tests.scripts import benchmark

SCORERS = ["taylor", "taylor2", "fisher", "ggn", HardConcrete(steps=2)]
SCORERS += [IntegratedGradients(points=2)]


def checkpointed(model):
    getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )()  # renamed within version 5
    return model


def dropping(model):
    """Dropout everywhere, so that a pass in training mode shows in the numbers."""
    for module in model.modules():
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.5)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    return model


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_scores_are_those_without(name):
    subject = labelled_subject(name)
    model, data = dropping(subject.model), [subject.batch]
    expected = hp.score(model, data, SCORERS, progress=False)
    runs = []
    gate = model.get_submodule(f"{subject.sites[0].name}.{subject.layout.gate}")
    handle = gate.register_forward_hook(lambda *_: runs.append("o"))
    hp.score(model, data, "taylor", progress=False)
    once = len(runs)
    checkpointed(model)
    runs.clear()
    hp.score(model, data, "taylor", progress=False)
    # Once for the slopes, and once to see whether the loss couples the examples of the first batch
    assert len(runs) == once + 2, "the layer did not run again"
    handle.remove()
    with unchanged(model):
        found = hp.score(model, data, SCORERS, progress=False)
    for a, b in zip(expected, found, strict=True):
        assert_close(b.values, a.values, **EXACT, msg=a.scorer)
        assert b.notes == a.notes


def test_without_gradients_layers_run_once_and_have_their_cache():
    subject = labelled_subject("llama")
    model, seen = checkpointed(subject.model), []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(1))
    ids = {"input_ids": subject.batch["input_ids"], "use_cache": True}
    with recomputed(model):
        with torch.no_grad():
            cached = model(**ids).past_key_values
        model(**ids).logits.sum().backward()
    assert cached.get_seq_length() == ids["input_ids"].shape[1]
    assert len(seen) == 3


def test_offloaded_layers_are_sent_back_after_they_ran_again():
    subject = labelled_subject("llama")
    expected = hp.score(subject.model, [subject.batch], "taylor", progress=False)
    model = cpu_offload(checkpointed(copy.deepcopy(subject.model)))
    seen = []

    def loss(model, batch):
        losses = default_loss(model, batch)
        if losses.requires_grad:
            losses.register_hook(lambda g: seen.append(all(p.is_meta for p in model.parameters())))
        return losses

    found = hp.score(model, [subject.batch], "taylor", loss=loss, progress=False)
    assert_close(found.values, expected.values, **EXACT)
    assert seen == [True, True]  # the slopes, and whether the loss couples examples
    assert all(p.is_meta for p in model.parameters())


def test_long_sequences_take_less_memory():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6, vocab_size=40))
    batch = {"input_ids": torch.randint(40, (2, 64))}
    peak, cpu = benchmark("scoring_cost").peak, torch.device("cpu")
    whole = peak(lambda: hp.score(model, [batch], "taylor", progress=False), cpu)
    checkpointed(model)
    assert peak(lambda: hp.score(model, [batch], "taylor", progress=False), cpu) < whole / 2
