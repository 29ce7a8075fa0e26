"""Finetune with low-rank adapters: what they are put around, and that a plain model is kept."""

import copy
import sys

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.layouts import registry as layouts
from headprune.model.losses import default_loss
from headprune.recovery import Finetune
from headprune.recovery._lora import adapted
from headprune.surgery.prune import prune_heads_
from tests.unit.test_recovery_finetune import build as plain

peft = pytest.importorskip("peft")


def build(name="bert", cut=None):
    model, (batch, _) = plain(name)
    prune_heads_(model, cut or {0: [1], 2: [0, 3]})
    return model, batch


def lora(**more):
    return Finetune(**{"steps": 2, "learning_rate": 0.01, "lora_rank": 2, **more})


def squared(model, x):
    return model(x).square().mean((1, 2))


def picture(model):
    """Everything about a model but the values of its parameters."""
    return (
        [(n, type(m), m.training, set(vars(m)), set(m._modules)) for n, m in model.named_modules()],
        [(n, id(p), p.requires_grad, p.dtype, tuple(p.shape)) for n, p in model.named_parameters()],
    )


def values(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def changed(model, before):
    return [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("bert", ("query", "key", "value", "output.dense", "intermediate.dense")),
        ("gpt2", ("c_attn", "c_proj", "c_fc")),
        ("t5", ("q", "k", "v", "o", "wi", "wo")),
        ("llama", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_every_projection_of_attention_and_feed_forward_changes_and_nothing_else(name, leaves):
    model, batch = layouts.get(name).tiny(0)
    before, looks = values(model), picture(model)
    batch = {"labels": batch["decoder_input_ids"], **batch} if name == "t5" else batch
    report = hp.recover_(model, [batch], lora(steps=3, weight_decay=0.1))
    found = changed(model, before)
    assert found == list(report.changed)
    assert set(found) == {n for n in before if n.endswith(tuple(f"{x}.weight" for x in leaves))}
    assert picture(model) == looks
    assert not report.notes
    for weight in found:
        change = model.get_parameter(weight) - before[weight]
        assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 2


def test_it_trains_as_a_plain_loop_over_the_factors_does():
    """W + alpha / rank B A, with A and B handed to AdamW; in fp64."""
    model, batch = build()
    model.double()
    oracle = copy.deepcopy(model)
    target = "bert.encoder.layer.1.output.dense"
    settings = lora(steps=4, schedule="constant", lora_alpha=6.0, lora_targets=(target,), seed=3)
    hp.recover_(model, [batch], settings)
    torch.manual_seed(3)
    probe = copy.deepcopy(oracle)
    with adapted(probe, 2, None, (target,), None) as found:
        adapter = probe.get_submodule(target)
        pair = (adapter.lora_A["recovery"], adapter.lora_B["recovery"])
        a, b = (factor.weight.detach().clone() for factor in pair)
        assert found.changed == (f"{target}.weight",)
    assert not b.any()
    factors = [a.requires_grad_(), b.requires_grad_()]
    optimizer = torch.optim.AdamW(factors, lr=0.01, weight_decay=0.0)
    base = oracle.get_parameter(f"{target}.weight").detach().clone()
    oracle.train()
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    for _ in range(4):
        merged = {f"{target}.weight": base + 3.0 * b @ a}
        out = torch.func.functional_call(oracle, merged, (), inputs)
        optimizer.zero_grad()
        nn.functional.cross_entropy(out.logits, batch["labels"]).backward()
        torch.nn.utils.clip_grad_norm_(factors, 1.0)
        optimizer.step()
    weight = model.get_parameter(f"{target}.weight")
    torch.testing.assert_close(weight, (base + 3.0 * b @ a).detach())


def test_merged_is_what_was_trained_and_it_saves_and_loads(tmp_path):
    model, batch = build()
    seen = []

    def loss(m, b):
        losses = default_loss(m, b)
        if not m.training:
            seen.append(losses.mean().item())
        return losses

    settings = lora(steps=4, eval_every=4)
    report = hp.recover_(model, [batch], settings, loss=loss, validation=[batch])
    assert report.metrics["best_step"] == 4
    model.eval()
    merged = default_loss(model, batch).mean().item()
    assert merged == pytest.approx(seen[-1], rel=1e-5)  # with adapters, before the merge
    assert abs(seen[0] - merged) > 1e-3
    hp.save_pretrained(model, tmp_path / "small")
    again = hp.from_pretrained(tmp_path / "small")
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits)


def test_targets_are_names_or_ends_of_names():
    model, batch = build()
    report = hp.recover_(model, [batch], lora(lora_targets=("query", "layer.0.output.dense")))
    names = [f"bert.encoder.layer.{i}.attention.self.query.weight" for i in range(3)]
    assert report.changed == (*names, "bert.encoder.layer.0.output.dense.weight")
    with pytest.raises(UnknownName, match=r"names of projections of Bert.*'quary'.*'query'"):
        hp.recover_(model, [batch], lora(lora_targets=("quary",)))
    with pytest.raises(UnsupportedModel, match="LayerNorm: must be a projection"):
        hp.recover_(model, [batch], lora(lora_targets=("LayerNorm",)))


def test_flags_of_frozen_weights_do_not_change_and_layers_without_heads_are_passed_over():
    model, batch = build(cut={1: [0, 1, 2, 3]})
    model.bert.encoder.requires_grad_(False)
    looks = picture(model)
    report = hp.recover_(model, [batch], lora())
    assert len(report.changed) == 14
    assert picture(model) == looks
    assert not any("layer.1.attention" in n for n in report.changed)
    assert any("layer.1.output" in n for n in report.changed)
    report = hp.recover_(model, [batch], lora(lora_targets=("query",)))
    assert [name.split(".")[3] for name in report.changed] == ["0", "2"]
    with pytest.raises(UnsupportedModel, match="one without inputs or outputs"):
        hp.recover_(model, [batch], lora(lora_targets=("layer.1.attention.self.query",)))


def test_after_an_error_the_weights_are_as_they_were():
    model, batch = build()
    before, looks = values(model), picture(model)

    def loss(m, b):
        steps.append(1)
        return default_loss(m, b) * (float("nan") if len(steps) == 3 else 1.0)

    steps = []
    with pytest.raises(InvalidValue, match="step 3"):
        hp.recover_(model, [batch], lora(steps=4), loss=loss)
    assert changed(model, before) == []
    assert picture(model) == looks


class Past(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.passed = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.used(x), self.passed.weight)


def test_what_reads_weights_past_adapters_is_refused_or_told():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Linear(16, 16))
    x = torch.randn(4, 3, 16)
    settings = lora(steps=3, learning_rate=0.05, eval_every=3)
    report = hp.recover_(model, [x], settings, loss=squared, validation=[x])
    names = [f"0.layers.{i}.linear{j}.weight" for i in range(2) for j in (1, 2)]
    assert list(report.changed) == names
    # PyTorch's fused layer, in evaluation without gradients, would not see the adapters
    found = report.metrics["validation_loss"]
    assert found < report.metrics["validation_loss_before"]
    assert found == pytest.approx(squared(model.eval(), x).mean().item(), rel=1e-4)
    with pytest.raises(UnsupportedModel, match="reads its weight past an adapter"):
        hp.recover_(model, [x], lora(lora_targets=("out_proj",)), loss=squared)
    settings = lora(lora_targets=("used", "passed"))
    report = hp.recover_(Past(), [torch.randn(2, 3, 4)], settings, loss=squared)
    assert report.notes == ("No gradient reached the adapters of passed: they changed nothing.",)


class Scaled(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(1))


def test_without_targets_there_must_be_projections_in_layers_that_are_known():
    x = torch.randn(4, 3, 16)
    unknown = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    words = "lora_targets: must be given for a model without known attention.*Name the projections"
    with pytest.raises(UnsupportedModel, match=words):
        hp.recover_(unknown, [x], lora(), loss=squared)
    alone = nn.Sequential(nn.MultiheadAttention(16, 4), nn.ReLU())
    words = "no layer with attention has a projection .*, got none. Name projections"
    with pytest.raises(UnsupportedModel, match=words):
        hp.recover_(alone, [x], lora(), loss=lambda m, x: m[0](x, x, x)[0].square().mean((1, 2)))
    layers = [nn.Sequential(hp.MultiHeadAttention(16, 4), Scaled(16, 16)) for _ in range(2)]
    known = nn.Sequential(*layers)
    report = hp.recover_(known, [x], lora(), loss=squared)
    names = [f"{i}.0.{name}.weight" for i in range(2) for name in ("W_q", "W_k", "W_v", "W_o")]
    assert list(report.changed) == names
    with pytest.raises(UnsupportedModel, match=r"0\.1: must be .*, got Scaled with scale"):
        hp.recover_(known, [x], lora(lora_targets=("0.1",)), loss=squared)


def test_a_model_with_adapters_is_not_given_more():
    model, batch = build()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["query"]), model)
    with pytest.raises(InvalidValue, match=r"one without adapters, for Finetune\.lora_rank"):
        hp.recover_(model, [batch], lora())


def test_peft_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    model, batch = build()
    hp.recover_(model, [batch], Finetune(steps=1))
    with pytest.raises(InvalidValue, match=r"where PEFT is not installed.*pip install peft"):
        hp.recover_(model, [batch], lora())
