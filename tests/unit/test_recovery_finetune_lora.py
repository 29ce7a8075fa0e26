"""Finetune with low-rank adapters: what they are put around, and that a plain model is left."""

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

peft = pytest.importorskip("peft")


def build(name="bert", cut=True):
    model, batch = layouts.get(name).tiny(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if cut:
        prune_heads_(model, {0: [1], 2: [0, 3]})
    return model, batch


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
    model, batch = build(name, cut=False)
    before, looks = values(model), picture(model)
    batch = {"labels": batch["decoder_input_ids"], **batch} if name == "t5" else batch
    report = hp.recover_(
        model, [batch], Finetune(steps=3, learning_rate=0.01, lora_rank=2, weight_decay=0.1)
    )
    found = changed(model, before)
    assert found == list(report.changed)
    assert {n for n in before if any(n.endswith(f"{leaf}.weight") for leaf in leaves)} - {
        "bert.pooler.dense"
    } == set(found)
    assert picture(model) == looks
    assert not report.notes
    for weight in found:
        rank = torch.linalg.matrix_rank(model.get_parameter(weight) - before[weight], rtol=1e-3)
        assert rank <= 2


def test_it_trains_as_a_plain_loop_over_the_factors_does():
    """W + alpha / rank B A, with A and B handed to AdamW; in fp64."""
    model, batch = build()
    model.double()
    oracle = copy.deepcopy(model)
    target = "bert.encoder.layer.1.output.dense"
    settings = Finetune(
        steps=4,
        learning_rate=0.01,
        schedule="constant",
        lora_rank=2,
        lora_alpha=6.0,
        lora_targets=(target,),
        seed=3,
    )
    hp.recover_(model, [batch], settings)
    torch.manual_seed(3)
    probe = copy.deepcopy(oracle)
    with adapted(probe, 2, None, (target,), None) as found:
        a, b = (
            getattr(probe.get_submodule(target), f"lora_{x}")["recovery"].weight.detach().clone()
            for x in "AB"
        )
        assert found.changed == (f"{target}.weight",)
    assert not b.any()
    factors = [a.requires_grad_(), b.requires_grad_()]
    optimizer = torch.optim.AdamW(factors, lr=0.01, weight_decay=0.0)
    base = oracle.get_parameter(f"{target}.weight").detach().clone()
    oracle.train()
    for _ in range(4):
        merged = {f"{target}.weight": base + 3.0 * b @ a}
        out = torch.func.functional_call(
            oracle, merged, (), {k: v for k, v in batch.items() if k != "labels"}
        )
        loss = nn.functional.cross_entropy(out.logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(factors, 1.0)
        optimizer.step()
    torch.testing.assert_close(
        model.get_parameter(f"{target}.weight"), (base + 3.0 * b @ a).detach()
    )


def test_merged_is_what_was_trained_and_it_saves_and_loads(tmp_path):
    model, batch = build()
    seen = []

    def loss(m, b):
        losses = default_loss(m, b)
        if not m.training:
            seen.append(losses.mean().item())
        return losses

    settings = Finetune(steps=4, learning_rate=0.01, lora_rank=2, eval_every=4)
    report = hp.recover_(model, [batch], settings, loss=loss, validation=[batch])
    assert report.metrics["best_step"] == 4
    model.eval()
    merged = default_loss(model, batch).mean().item()
    assert merged == pytest.approx(seen[-1], rel=1e-5)  # with adapters, before the merge
    assert abs(seen[0] - merged) > 1e-3
    assert not any("lora" in n or "base_layer" in n for n, _ in model.named_modules())
    hp.save_pretrained(model, tmp_path / "small")
    again = hp.from_pretrained(tmp_path / "small")
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits)


def test_targets_are_names_or_ends_of_names():
    model, batch = build()
    report = hp.recover_(
        model,
        [batch],
        Finetune(steps=1, lora_rank=1, lora_targets=("query", "layer.0.output.dense")),
    )
    names = [f"bert.encoder.layer.{i}.attention.self.query.weight" for i in range(3)]
    assert report.changed == (*names, "bert.encoder.layer.0.output.dense.weight")
    with pytest.raises(
        UnknownName, match=r"lora_targets: must be names of projections of Bert.*'quary'.*'query'"
    ):
        hp.recover_(model, [batch], Finetune(lora_rank=1, lora_targets=("quary",)))
    with pytest.raises(
        UnsupportedModel, match="LayerNorm: must be a projection that an adapter can be put around"
    ):
        hp.recover_(model, [batch], Finetune(lora_rank=1, lora_targets=("LayerNorm",)))


def test_flags_stay_also_those_of_frozen_weights():
    model, batch = build()
    model.bert.encoder.requires_grad_(False)
    looks = picture(model)
    report = hp.recover_(model, [batch], Finetune(steps=2, learning_rate=0.01, lora_rank=2))
    assert len(report.changed) == 18
    assert picture(model) == looks


def test_a_layer_without_heads_is_left_out():
    model, batch = build(cut=False)
    prune_heads_(model, {1: [0, 1, 2, 3]})
    report = hp.recover_(model, [batch], Finetune(steps=1, lora_rank=1))
    assert not any("layer.1.attention" in n for n in report.changed)
    assert any("layer.1.output" in n for n in report.changed)


def test_an_error_leaves_the_weights_as_they_were():
    model, batch = build()
    before, looks = values(model), picture(model)

    def loss(m, b):
        steps.append(1)
        return default_loss(m, b) * (float("nan") if len(steps) == 3 else 1.0)

    steps = []
    with pytest.raises(InvalidValue, match="step 3"):
        hp.recover_(model, [batch], Finetune(steps=4, learning_rate=0.01, lora_rank=2), loss=loss)
    assert changed(model, before) == []
    assert picture(model) == looks


def test_what_reads_weights_past_adapters_is_refused_or_told():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(48, 2)
    )
    x, loss = torch.randn(4, 3, 16), lambda m, x: m(x).square().mean(1)
    settings = Finetune(steps=3, learning_rate=0.05, lora_rank=2, eval_every=3)
    report = hp.recover_(model, [x], settings, loss=loss, validation=[x])
    assert report.changed == tuple(
        f"0.layers.{i}.linear{j}.weight" for i in range(2) for j in (1, 2)
    )
    # PyTorch's fused layer, in evaluation without gradients, would not see the adapters
    assert report.metrics["validation_loss"] < report.metrics["validation_loss_before"]
    assert report.metrics["validation_loss"] == pytest.approx(
        loss(model.eval(), x).mean().item(), rel=1e-4
    )
    with pytest.raises(UnsupportedModel, match="reads its weight past an adapter"):
        hp.recover_(model, [x], Finetune(lora_rank=1, lora_targets=("out_proj",)), loss=loss)

    class Past(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.passed = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.linear(self.used(x), self.passed.weight)

    settings = Finetune(steps=2, lora_rank=1, lora_targets=("used", "passed"))
    report = hp.recover_(
        Past(), [torch.randn(2, 4)], settings, loss=lambda m, x: m(x).square().mean(1)
    )
    assert report.notes == ("No gradient reached the adapters of passed: they changed nothing.",)


def test_without_targets_there_must_be_projections_in_layers_that_are_known():
    class Scaled(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("scale", torch.ones(1))

    x, loss = torch.randn(4, 3, 16), lambda m, x: m(x).square().mean((1, 2))
    unknown = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    words = (
        r"lora_targets: must be given for a model without known attention.*Name the projections:"
        r" lora_targets"
    )
    with pytest.raises(UnsupportedModel, match=words):
        hp.recover_(unknown, [x], Finetune(lora_rank=1), loss=loss)
    alone = nn.Sequential(nn.MultiheadAttention(16, 4), nn.ReLU())
    words = (
        "lora_targets: must be given, or a model with projections in its layers, got none there."
        " Train the weights"
    )
    with pytest.raises(UnsupportedModel, match=words):
        hp.recover_(
            alone,
            [x],
            Finetune(lora_rank=1),
            loss=lambda m, x: m[0](x, x, x)[0].square().mean((1, 2)),
        )
    known = nn.ModuleList(
        nn.ModuleList([hp.MultiHeadAttention(16, 4), Scaled(16, 16)]) for _ in range(2)
    )
    known = nn.Sequential(*(nn.Sequential(*layer) for layer in known))
    report = hp.recover_(known, [x], Finetune(steps=1, lora_rank=1), loss=loss)
    assert report.changed == tuple(
        f"{i}.0.{name}.weight" for i in range(2) for name in ("W_q", "W_k", "W_v", "W_o")
    )
    with pytest.raises(
        UnsupportedModel,
        match=r"lora_targets: 0\.1: must be a projection .*, got Scaled with scale",
    ):
        hp.recover_(known, [x], Finetune(lora_rank=1, lora_targets=("0.1",)), loss=loss)


def test_a_model_with_adapters_is_not_given_more():
    model, batch = build()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["query"]), model)
    with pytest.raises(InvalidValue, match=r"one without adapters, for Finetune\.lora_rank"):
        hp.recover_(model, [batch], Finetune(lora_rank=2))


def test_peft_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    model, batch = build()
    hp.recover_(model, [batch], Finetune(steps=1))
    with pytest.raises(
        InvalidValue,
        match=r"lora_rank: must be left out where PEFT is not installed.*pip install peft",
    ):
        hp.recover_(model, [batch], Finetune(lora_rank=2))


def test_the_seed_decides():
    results = []
    for seed in (0, 0, 1):
        model, batch = build()
        torch.rand(1)
        hp.recover_(model, [batch], Finetune(steps=2, learning_rate=0.01, lora_rank=2, seed=seed))
        results.append(model.get_parameter("bert.encoder.layer.0.output.dense.weight").detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 0}, "Finetune.lora_rank: must be a count of dimensions >= 1"),
        ({"lora_alpha": 2.0}, "Finetune.lora_alpha: must be used with lora_rank"),
        ({"lora_targets": ("query",)}, "Finetune.lora_targets: must be used with lora_rank"),
        (
            {"lora_rank": 2, "lora_targets": "query"},
            "Finetune.lora_targets: must be names of projections in a tuple",
        ),
        (
            {"lora_rank": 2, "lora_targets": ()},
            "Finetune.lora_targets: must be names of projections in a tuple",
        ),
        ({"lora_rank": 2, "lora_alpha": 0}, "Finetune.lora_alpha: must be a number above 0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(InvalidValue, match=message):
        Finetune(**settings)
