"""Finetune: the steps against plain PyTorch loops, and nothing left behind."""

import copy
import os
import random
import tempfile
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import tqdm.auto
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.layouts import registry as layouts
from headprune.model.losses import default_loss
from headprune.recovery import Finetune
from headprune.recovery._distillation import answer, logits_gap
from headprune.surgery.prune import prune_heads_
from tests.laws.support import no_dropout
from tests.unit.test_recovery_finetune_hidden import compared

STATES = (PartialState, AcceleratorState, GradientState)


def build(name="bert"):
    """A tiny model without dropout, and two batches."""
    model, batch = layouts.get(name).tiny(0)
    second = layouts.get(name).tiny(1)[1]
    return no_dropout(model), [batch, {k: v[:2] for k, v in second.items()}]


def parameters(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_trained_alike(model, oracle):
    """In fp64, because Adam magnifies the rounding of a gradient that should be 0."""
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    torch.testing.assert_close(parameters(model), parameters(oracle), rtol=1e-8, atol=1e-8)


def by_hand(model, batches, loss, rates, decay=0.0, clip=None):
    """Oracle: AdamW with biases and norms outside of weight decay, one learning rate a step."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    undecayed = {id(p) for n, p in named if "bias" in n.lower() or "norm" in n.lower()}
    groups = [
        {"params": [p for _, p in named if id(p) not in undecayed], "weight_decay": decay},
        {"params": [p for _, p in named if id(p) in undecayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    values = []
    model.train()
    for step, rate in enumerate(rates):
        value = loss(model, batches[step % len(batches)])
        optimizer.zero_grad()
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named], clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        values.append(value.item())
    return values


def mean_loss(model, batch):
    return default_loss(model, batch).mean()


#: Settings, and the share of the learning rate at every step.
TRAININGS = [
    # 2 steps up, then down to 0
    (
        {"epochs": 3, "weight_decay": 0.1, "warmup_ratio": 0.3, "max_grad_norm": 0.5},
        (0.0, 0.5, 1.0, 0.75, 0.5, 0.25),
    ),
    ({"epochs": 2, "schedule": "constant", "warmup_ratio": 0.5}, (0.0, 0.5, 1.0, 1.0)),
    ({"steps": 4, "schedule": "cosine"}, (1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5)),
    ({"epochs": 1.5, "schedule": "constant", "max_grad_norm": None}, (1.0, 1.0, 1.0)),
]


@pytest.mark.parametrize(("settings", "factors"), TRAININGS)
def test_it_trains_as_a_plain_loop_does(settings, factors):
    model, batches = build()
    model.double()
    oracle = copy.deepcopy(model)
    method = Finetune(learning_rate=0.01, **settings)
    report = hp.recover_(model, batches, method)
    rates, clip = [0.01 * factor for factor in factors], method.max_grad_norm
    values = by_hand(oracle, batches, mean_loss, rates, decay=method.weight_decay, clip=clip)
    assert_trained_alike(model, oracle)
    assert report.metrics["steps"] == len(factors)
    assert report.n_examples == {3: 8, 4: 10, 6: 15}[len(factors)]
    assert report.changed == tuple(parameters(model))
    if len(factors) == 6:
        assert report.metrics["loss"] == pytest.approx(sum(values[4:]) / 2, rel=1e-4)


def kl(teacher, student, temperature):
    p = torch.softmax(teacher / temperature, -1)
    return temperature**2 * (p * (p.log() - torch.log_softmax(student / temperature, -1))).sum(-1)


@pytest.mark.parametrize(
    ("shape", "masked"),
    [((3, 5), True), ((3, 4, 5), False), ((3, 4, 5), True), ((3, 4, 2, 5), True)],
)
def test_the_distance_of_logits_is_one_number_an_example(shape, masked):
    ours, theirs = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    given = {"attention_mask": mask} if masked else {}
    found = logits_gap([((), given, ours)], theirs, 2.0)
    each = kl(theirs, ours, 2.0)
    if masked and len(shape) == 3:
        expected = [row[kept].mean() for row, kept in zip(each, mask.bool(), strict=True)]
    else:
        expected = [row.mean() for row in each]
    torch.testing.assert_close(found, torch.stack(expected))


def test_distillation_adds_the_teachers_logits_and_hidden_states():
    (teacher, batches), (model, _) = build(), build()
    teacher, model = teacher.double(), model.double()
    prune_heads_(model, {0: [1], 2: [0, 3]})
    oracle, flags = copy.deepcopy(model), [m.training for m in teacher.modules()]
    before, target_of = parameters(teacher), copy.deepcopy(teacher).eval()
    loop = {"epochs": 2, "learning_rate": 0.01, "schedule": "constant"}
    settings = Finetune(**loop, distill=3.0, temperature=2.0, distill_hidden=5.0)
    report = hp.recover_(model, batches, settings, teacher=teacher)

    def loss(student, batch):
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        with torch.no_grad():
            target = target_of(**inputs).logits
        logits.append(kl(target, student(**inputs).logits, 2.0).mean())
        hidden.append(compared(student, target_of, lambda m: m(**inputs)))
        return mean_loss(student, batch) + 3.0 * logits[-1] + 5.0 * hidden[-1]

    logits, hidden = [], []
    by_hand(oracle, batches, loss, [0.01] * 4, clip=1.0)
    assert_trained_alike(model, oracle)
    for name, gaps in (("distillation", logits), ("hidden_states", hidden)):
        assert report.metrics[name] == pytest.approx((gaps[2] + gaps[3]).item() / 2, rel=1e-3)
    torch.testing.assert_close(parameters(teacher), before, rtol=0, atol=0)
    assert [m.training for m in teacher.modules()] == flags
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())
    modules = [*model.modules(), *teacher.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


class Fixed(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output


def gap(ours, theirs):
    calls = [((torch.zeros(2),), {}, ours)]
    return logits_gap(calls, answer(Fixed(theirs), calls), 1.0)


def test_distillation_covers_the_usual_outputs_and_refuses_others():
    a, b = torch.randn(2, 4), torch.randn(2, 4)
    torch.testing.assert_close(gap(a, b), kl(b, a, 1.0))
    torch.testing.assert_close(gap((a, None), (b, None)), kl(b, a, 1.0))
    torch.testing.assert_close(gap({"loss": a.sum(), "logits": a}, {"logits": b}), kl(b, a, 1.0))
    answers = gap({"start_logits": a, "end_logits": b}, {"start_logits": b, "end_logits": a})
    torch.testing.assert_close(answers, (kl(b, a, 1.0) + kl(a, b, 1.0)) / 2)
    assert gap(a.to(torch.bfloat16), b.to(torch.bfloat16)).dtype is torch.float32
    for ours, theirs, words in (
        (a, b[:, :3], "a teacher of the same outputs"),
        (a[:, :1], b[:, :1], "two classes or more"),
        ({"last_hidden_state": a}, {"last_hidden_state": b}, "models that return logits"),
    ):
        with pytest.raises(InvalidValue, match=words):
            gap(ours, theirs)
    with pytest.raises(InvalidValue, match="a loss that calls it, got one that did not"):
        logits_gap([], answer(Fixed(a), []), 1.0)


def test_frozen_parameters_do_not_change():
    model, batches = build()
    model.bert.embeddings.requires_grad_(False)
    before = parameters(model)
    report = hp.recover_(model, batches, Finetune(learning_rate=0.01, weight_decay=0.1))
    changed = {n for n, p in parameters(model).items() if not torch.equal(before[n], p)}
    assert not any(n.startswith("bert.embeddings") for n in changed | set(report.changed))
    # what else does not change has no gradient: a bias on all keys
    assert all(n.endswith("self.key.bias") for n in set(report.changed) - changed)
    assert not model.bert.embeddings.word_embeddings.weight.requires_grad


def test_the_loader_shuffles_by_the_seed():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    loader = DataLoader(torch.arange(16.0).reshape(8, 2), 2, shuffle=True)

    def order(seed):
        seen = []

        def loss(m, x):
            seen.extend(x[:, 0].tolist())
            return m(x).squeeze(1).square()

        torch.rand(3)  # the state outside does not matter
        hp.recover_(copy.deepcopy(model), loader, Finetune(epochs=2, seed=seed), loss=loss)
        return seen

    orders = [order(0), order(0), order(1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:8] != orders[0][8:]
    assert sorted(orders[0][:8]) == sorted(orders[0][8:]) == list(range(0, 16, 2))


def states():
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
        "accelerate": [str(dict(kind._shared_state)) for kind in STATES],
        "environment": dict(os.environ),
    }


@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
def test_nothing_is_left_behind(fails, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, batches = build("gpt2")
    model.train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    config, attributes = model.config.to_json_string(), set(vars(model))
    PartialState._shared_state["sentinel"] = 1  # an Accelerator of the user's
    torch.manual_seed(123)  # no state that a training would leave by chance
    before = states()

    def loss(m, batch):
        assert m.training
        assert torch.rand(1) + np.random.rand() + random.random() > 0
        return default_loss(m, batch)

    interrupt = Mock(side_effect=KeyboardInterrupt)
    try:
        if fails:
            # in the middle of a backward pass: later layers have their gradients by then
            model.transformer.h[1].mlp.c_fc.weight.register_post_accumulate_grad_hook(interrupt)
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
            hp.recover_(model, batches, "finetune", loss=loss)
        assert states() == before
    finally:
        PartialState._shared_state.clear()
    assert [m.training for m in model.modules()] == modes
    assert (model.config.to_json_string(), set(vars(model))) == (config, attributes)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    assert not os.listdir(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_bar_is_shown_when_asked_for(capfd, monkeypatch):
    class EveryStep(tqdm.auto.tqdm):
        """Drawn at every step: two steps may take less than the usual 0.1 s."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, mininterval=0, **kwargs)

    monkeypatch.setattr(tqdm.auto, "tqdm", EveryStep)
    model, batches = build()
    hp.recover_(model, batches, "finetune", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "finetune" in err
    assert "loss" in err


def test_a_device_other_than_the_trainers_is_left_to_the_model(monkeypatch):
    """The Trainer may neither move a model nor take the batches from it."""
    moved = []
    monkeypatch.setattr(nn.Module, "to", lambda self, *args, **kwargs: moved.append(args) or self)
    model, batches = build()
    hp.recover_(model, batches, "finetune")
    assert moved == []


def test_what_is_not_finite_names_the_step():
    model, batches = build()

    def loss(m, batch):
        calls.append(1)
        return default_loss(m, batch) * (float("nan") if len(calls) == 3 else 1.0)

    calls = []
    with pytest.raises(InvalidValue, match=r"step 3: .*must be finite.*Lower learning_rate"):
        hp.recover_(model, batches, Finetune(epochs=2), loss=loss)
    teacher, _ = build()
    nn.init.constant_(teacher.bert.encoder.layer[0].output.dense.bias, float("nan"))
    for name, what in (("distill", "distillation loss"), ("distill_hidden", "distance of hidden")):
        with pytest.raises(InvalidValue, match=f"step 1: the {what}.*: must be finite"):
            hp.recover_(build()[0], batches, Finetune(**{name: 1.0}), teacher=teacher)


def test_weights_that_are_not_finite_in_the_end_are_an_error():
    """A gradient of the last step shows in no loss any more."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    loss = lambda m, x: m(x).squeeze(1).abs().sqrt()  # noqa: E731
    with pytest.raises(InvalidValue, match=r"weight after step 1: must be finite"):
        hp.recover_(model, [torch.zeros(2, 1)], Finetune(max_grad_norm=None), loss=loss)


class Lying(list):
    def __len__(self):
        return 5


def test_batches_must_be_there_and_losses_must_be_of_examples():
    model, batches = build()
    for empty in ([], DataLoader(TensorDataset(torch.zeros(0, 2)))):
        with pytest.raises(InvalidValue, match="batches: must be at least one batch"):
            hp.recover_(model, empty, "finetune")
    with pytest.raises(InvalidValue, match=r"as many as len\(\) says, 5"):
        hp.recover_(model, Lying(batches), "finetune")
    with pytest.raises(InvalidValue, match=r"step 1: loss.* must be a tensor of shape \[3\]"):
        hp.recover_(model, batches, "finetune", loss=mean_loss)


def test_arguments_without_a_use_are_refused():
    model, batches = build()
    distilled = Finetune(distill=0.5)
    with pytest.raises(InvalidValue, match="teacher: must be left out: finetune"):
        hp.recover_(model, batches, "finetune", teacher=build()[0])
    with pytest.raises(InvalidValue, match="unpruned original, which finetune needs"):
        hp.recover_(model, batches, distilled)
    with pytest.raises(InvalidValue, match="shares trainable parameters with it"):
        hp.recover_(model, batches, distilled, teacher=nn.Sequential(model))
    model.requires_grad_(False)
    with pytest.raises(InvalidValue, match="a parameter that requires a gradient"):
        hp.recover_(model, batches, "finetune")


WRONG = [
    ({"epochs": 0}, "epochs: must be a number above 0"),
    ({"steps": 0}, "steps: must be a count"),
    ({"learning_rate": float("inf")}, "learning_rate: must be a number above 0"),
    ({"weight_decay": -1.0}, "weight_decay: must be a number >= 0"),
    ({"distill": "kl"}, "distill: must be a number >= 0"),
    ({"temperature": 0.0}, "temperature: must be a number above 0"),
    ({"temperature": 2.0}, "temperature: must be used with distill"),
    ({"warmup_ratio": 1.0}, "warmup_ratio: must be a share"),
    ({"max_grad_norm": 0.0}, "max_grad_norm: must be a number above 0"),
    ({"seed": -1}, "seed: must be a whole number"),
    ({"schedule": "Linear"}, "schedule: must be one of linear, cosine, constant"),
    ({"distill_hidden": -1.0}, "distill_hidden: must be a number >= 0"),
    ({"hidden_layers": "last"}, "hidden_layers: must be used with distill_hidden"),
    ({"precision": "fp32"}, "precision: must be one of bf16, fp16"),
    ({"patience": 0}, "patience: must be a count of"),
    ({"eval_every": 1.5}, "eval_every: must be a count of"),
    ({"checkpoint_every": True}, "checkpoint_every: must be a count of"),
    ({"lora_rank": 0}, "lora_rank: must be a count of dimensions >= 1"),
    ({"lora_alpha": 2.0}, "lora_alpha: must be used with lora_rank"),
    ({"lora_targets": ("query",)}, "lora_targets: must be used with lora_rank"),
    ({"lora_rank": 2, "lora_targets": "query"}, "lora_targets: must be names of projections"),
    ({"lora_rank": 2, "lora_alpha": 0}, "lora_alpha: must be a number above 0"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_settings_are_checked(settings, words):
    with pytest.raises(InvalidValue, match=f"Finetune.{words}"):
        Finetune(**settings)
    with pytest.raises(InvalidValue, match="Finetune: must be given epochs or steps"):
        Finetune(epochs=2, steps=3)
