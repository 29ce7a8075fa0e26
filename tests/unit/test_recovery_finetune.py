"""Finetune: the steps against plain PyTorch loops, and nothing left behind."""

import copy
import json
import os
import random
import tempfile

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.layouts import registry as layouts
from headprune.model.losses import default_loss
from headprune.recovery import Finetune, RecoveryReport
from headprune.recovery._distillation import answer, logits_gap
from headprune.surgery.prune import prune_heads_

STATES = (PartialState, AcceleratorState, GradientState)


def build(name="bert", dropout=False):
    model, batch = layouts.get(name).tiny(0)
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    second = layouts.get(name).tiny(1)[1]
    return model, [batch, {k: v[:2] for k, v in second.items()}]


def parameters(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_trained_alike(model, oracle):
    """In fp64, because Adam magnifies the rounding of a gradient that should be 0."""
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    torch.testing.assert_close(parameters(model), parameters(oracle), rtol=1e-8, atol=1e-8)


def by_hand(model, batches, loss, n_steps, rates, decay=0.0, clip=None):
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
    for step in range(n_steps):
        value = loss(model, batches[step % len(batches)])
        optimizer.zero_grad()
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named], clip)
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        optimizer.step()
        values.append(value.item())
    return values


def mean_loss(model, batch):
    return default_loss(model, batch).mean()


def test_it_trains_as_a_plain_loop_does():
    model, batches = build()
    model.double()
    oracle = copy.deepcopy(model)
    rates = [
        0.01 * factor for factor in (0.0, 0.5, 1.0, 0.75, 0.5, 0.25)
    ]  # 2 steps up, then down to 0
    settings = Finetune(
        epochs=3, learning_rate=0.01, weight_decay=0.1, warmup_ratio=0.3, max_grad_norm=0.5
    )
    report = hp.recover_(model, batches, settings)
    values = by_hand(oracle, batches, mean_loss, 6, rates, decay=0.1, clip=0.5)
    assert_trained_alike(model, oracle)
    assert report.metrics["steps"] == 6
    assert report.metrics["loss"] == pytest.approx(sum(values[4:]) / 2, rel=1e-4)
    assert report.n_examples == 15
    assert report.changed == tuple(parameters(model))


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({"schedule": "constant"}, (1.0, 1.0, 1.0, 1.0)),
        ({"schedule": "constant", "warmup_ratio": 0.5}, (0.0, 0.5, 1.0, 1.0)),
        ({"schedule": "cosine"}, (1.0, 0.5 + 0.5 * 2**-0.5, 0.5, 0.5 - 0.5 * 2**-0.5)),
    ],
)
def test_schedules(settings, factors):
    model, batches = build()
    model.double()
    oracle = copy.deepcopy(model)
    hp.recover_(
        model, batches, Finetune(epochs=2, learning_rate=0.01, max_grad_norm=None, **settings)
    )
    by_hand(oracle, batches, mean_loss, 4, [0.01 * f for f in factors])
    assert_trained_alike(model, oracle)


@pytest.mark.parametrize(
    ("settings", "n_steps"), [({"steps": 5}, 5), ({"epochs": 1.5}, 3), ({}, 2)]
)
def test_steps_take_the_place_of_epochs_and_epochs_may_be_broken(settings, n_steps):
    model, batches = build()
    report = hp.recover_(model, batches, Finetune(**settings))
    assert report.metrics["steps"] == n_steps
    assert report.n_examples == {2: 5, 3: 8, 5: 13}[n_steps]


def kl(teacher, student, temperature):
    p = torch.softmax(teacher / temperature, -1)
    return temperature**2 * (p * (p.log() - torch.log_softmax(student / temperature, -1))).sum(-1)


def distillation(teacher, calls, temperature):
    return logits_gap(calls, answer(teacher, calls), temperature)


@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 5), (3, 4, 2, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_distance_of_logits_is_one_number_an_example(shape, masked):
    """Of tokens that are no padding, where the logits are of tokens; of all, where they are of
    several for each."""
    ours, theirs = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    found = logits_gap([((), {"attention_mask": mask} if masked else {}, ours)], theirs, 2.0)
    each = kl(theirs, ours, 2.0)
    if masked and len(shape) == 3:
        expected = torch.stack(
            [row[kept].mean() for row, kept in zip(each, mask.bool(), strict=True)]
        )
    else:
        expected = each.flatten(1).mean(1) if each.ndim > 1 else each
    torch.testing.assert_close(found, expected)


def test_distillation_adds_the_teachers_logits():
    teacher, batches = build(dropout=True)
    model = build()[0].double()
    teacher.double()
    prune_heads_(model, {0: [1], 2: [0, 3]})
    oracle, flags = copy.deepcopy(model), [m.training for m in teacher.modules()]
    before = parameters(teacher)
    settings = Finetune(
        epochs=2, learning_rate=0.01, schedule="constant", distill=3.0, temperature=2.0
    )
    report = hp.recover_(model, batches, settings, teacher=teacher)

    def loss(student, batch):
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        with torch.no_grad():
            target = copy.deepcopy(teacher).eval()(**inputs).logits
        gaps.append(kl(target, student(**inputs).logits, 2.0).mean())
        return mean_loss(student, batch) + 3.0 * gaps[-1]

    gaps = []
    by_hand(oracle, batches, loss, 4, [0.01] * 4, clip=1.0)
    assert_trained_alike(model, oracle)
    assert report.metrics["distillation"] == pytest.approx((gaps[2] + gaps[3]).item() / 2, rel=1e-3)
    torch.testing.assert_close(parameters(teacher), before, rtol=0, atol=0)
    assert [m.training for m in teacher.modules()] == flags
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def recorded(model, batch):
    return [((), batch, model(**batch))]


def test_distillation_of_tokens_leaves_padding_out():
    (model, batches), (teacher, _) = build("gpt2"), build("gpt2")
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    model.eval()
    teacher.eval()
    batch = batches[0]
    got = distillation(teacher, recorded(model, batch), 1.5)
    assert got.shape == (3,)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        single = {"input_ids": batch["input_ids"][row : row + 1, :length]}
        wanted = kl(teacher(**single).logits, model(**single).logits, 1.5).mean()
        torch.testing.assert_close(got[row], wanted, rtol=1e-4, atol=1e-6)
    assert got.min() > 1e-4
    got.sum().backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in model.parameters())
    torch.testing.assert_close(distillation(model, recorded(model, batch), 1.5), torch.zeros(3))


def test_distillation_covers_the_usual_outputs_and_refuses_others():
    class Fixed(nn.Module):
        def __init__(self, output):
            super().__init__()
            self.output = output

        def forward(self, x):
            return self.output

    def gap(ours, theirs):
        return distillation(Fixed(theirs), [((torch.zeros(2),), {}, ours)], 1.0)

    a, b = torch.randn(2, 4), torch.randn(2, 4)
    torch.testing.assert_close(gap(a, b), kl(b, a, 1.0))
    torch.testing.assert_close(gap((a, None), (b, None)), kl(b, a, 1.0))
    torch.testing.assert_close(gap({"loss": a.sum(), "logits": a}, {"logits": b}), kl(b, a, 1.0))
    answers = gap({"start_logits": a, "end_logits": b}, {"start_logits": b, "end_logits": a})
    torch.testing.assert_close(answers, (kl(b, a, 1.0) + kl(a, b, 1.0)) / 2)
    half = gap(a.to(torch.bfloat16), b.to(torch.bfloat16))
    assert half.dtype is torch.float32
    with pytest.raises(InvalidValue, match="a teacher of the same outputs"):
        gap(a, b[:, :3])
    with pytest.raises(InvalidValue, match="two classes or more"):
        gap(a[:, :1], b[:, :1])
    with pytest.raises(InvalidValue, match="models that return logits"):
        gap({"last_hidden_state": a}, {"last_hidden_state": b})
    with pytest.raises(InvalidValue, match="a loss that calls model"):
        distillation(Fixed(a), [], 1.0)


def test_a_loss_and_a_model_of_ones_own():
    """No config, batches that are tuples, a loss that is a module with weights of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(hp.MultiHeadAttention(8, 2), nn.Flatten(), nn.Linear(24, 3))
    data = TensorDataset(torch.randn(8, 3, 8), torch.randint(0, 3, (8,)))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, model, batch):
            x, y = batch
            return self.weight * nn.functional.cross_entropy(model(x), y, reduction="none")

    loss = Loss()
    teacher = copy.deepcopy(model)
    settings = Finetune(epochs=20, learning_rate=0.01, distill=0.1)
    report = hp.recover_(model, DataLoader(data, 4), settings, teacher=teacher, loss=loss)
    assert report.metrics["steps"] == 40
    start = loss(teacher, data[:]).mean().item()
    assert report.metrics["loss"] < 0.7 * start
    torch.testing.assert_close(
        loss.weight.detach(), torch.ones(()), rtol=0, atol=0
    )  # not the model's to train


def test_bare_tensors_are_batches():
    model = nn.Sequential(hp.MultiHeadAttention(8, 2))
    report = hp.recover_(
        model, [torch.randn(2, 3, 8)], "finetune", loss=lambda m, x: m(x).square().mean((1, 2))
    )
    assert report.metrics["steps"] == 1


def test_a_compiled_model_is_trained_uncompiled():
    model, batches = build()
    twin = copy.deepcopy(model)
    report = hp.recover_(torch.compile(model, backend="eager"), batches, "finetune")
    assert report.changed == tuple(parameters(model))
    hp.recover_(twin, batches, "finetune")
    torch.testing.assert_close(parameters(model), parameters(twin), rtol=0, atol=0)


def test_frozen_parameters_stay():
    model, batches = build()
    model.bert.embeddings.requires_grad_(False)
    before = parameters(model)
    report = hp.recover_(model, batches, Finetune(learning_rate=0.01, weight_decay=0.1))
    after = parameters(model)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert not any(n.startswith("bert.embeddings") for n in changed)
    assert not any(n.startswith("bert.embeddings") for n in report.changed)
    # what does not change has no gradient: a bias on all keys
    assert set(report.changed) - changed <= {
        f"bert.encoder.layer.{i}.attention.self.key.bias" for i in range(3)
    }
    assert not model.bert.embeddings.word_embeddings.weight.requires_grad


def test_the_loader_shuffles_by_the_seed():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    loader = DataLoader(torch.arange(16.0).reshape(8, 2), 2, shuffle=True)
    orders = []

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
    assert (
        sorted(orders[0][:8])
        == sorted(orders[0][8:])
        == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    )


def test_dropout_follows_the_seed():
    results = []
    for seed in (0, 0, 1):
        model, batches = build(dropout=True)
        hp.recover_(model, batches, Finetune(learning_rate=0.01, seed=seed))
        results.append(parameters(model)["classifier.weight"])
        torch.rand(1)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0], results[2])


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
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
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
        draws.append((torch.rand(1), np.random.rand(), random.random()))
        return default_loss(m, batch)

    def interrupt(_):
        raise KeyboardInterrupt

    draws = []
    try:
        if fails:
            # in the middle of a backward pass: later layers have their gradients by then
            model.transformer.h[1].mlp.c_fc.weight.register_post_accumulate_grad_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                hp.recover_(model, batches, "finetune", loss=loss)
        else:
            hp.recover_(model, batches, "finetune", loss=loss)
        assert states() == before
    finally:
        PartialState._shared_state.clear()
    assert [m.training for m in model.modules()] == modes
    assert model.config.to_json_string() == config
    assert set(vars(model)) == attributes
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    assert os.listdir(tmp_path) == ["scratch"]
    assert not os.listdir(scratch)
    assert capfd.readouterr() == ("", "")


def test_a_bar_is_shown_when_asked_for(capfd):
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


def test_a_loss_that_is_not_finite_names_the_step():
    model, batches = build()

    def loss(m, batch):
        calls.append(1)
        return default_loss(m, batch) * (float("nan") if len(calls) == 3 else 1.0)

    calls = []
    with pytest.raises(
        InvalidValue, match=r"step 3: .*must be finite, got nan.*Lower learning_rate"
    ):
        hp.recover_(model, batches, Finetune(epochs=2), loss=loss)


def test_weights_that_are_not_finite_in_the_end_are_an_error():
    """A gradient of the last step shows in no loss any more."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    with pytest.raises(InvalidValue, match=r"weight after step 1: must be finite"):
        hp.recover_(
            model,
            [torch.zeros(2, 1)],
            Finetune(max_grad_norm=None),
            loss=lambda m, x: m(x).squeeze(1).abs().sqrt(),
        )


def test_a_distillation_that_is_not_finite_names_the_step():
    (model, batches), (teacher, _) = build(), build()
    with torch.no_grad():
        teacher.classifier.bias[0] = float("inf")
    with pytest.raises(InvalidValue, match="step 1: the distillation loss: must be finite"):
        hp.recover_(model, batches, Finetune(distill=1.0), teacher=teacher)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(4, 2))


class SizedIterator:
    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration

    def __len__(self):
        return 3


class Lying(list):
    def __len__(self):
        return 5


def test_batches_must_be_sized_readable_twice_and_there():
    model, batches = build()
    again = "batches: must be sized and readable more than once"
    for wrong in (
        (b for b in batches),
        iter(batches),
        SizedIterator(),
        DataLoader(Stream(), 2),
        None,
    ):
        with pytest.raises(InvalidValue, match=again):
            hp.recover_(model, wrong, "finetune")
    for empty in ([], DataLoader(TensorDataset(torch.zeros(0, 2)))):
        with pytest.raises(InvalidValue, match="batches: must be at least one batch"):
            hp.recover_(model, empty, "finetune")
    with pytest.raises(InvalidValue, match=r"as many as len\(\) says, 5"):
        hp.recover_(model, Lying(batches), "finetune")


def test_arguments_without_a_use_are_refused():
    model, batches = build()
    with pytest.raises(
        InvalidValue, match="teacher: must be left out: finetune, as it is set, does not read it"
    ):
        hp.recover_(model, batches, "finetune", teacher=build()[0])
    with pytest.raises(
        InvalidValue, match="teacher: must be the unpruned original, which finetune needs"
    ):
        hp.recover_(model, batches, Finetune(distill=0.5))
    with pytest.raises(InvalidValue, match="got one that shares trainable parameters with it"):
        hp.recover_(model, batches, Finetune(distill=0.5), teacher=nn.Sequential(model))
    model.requires_grad_(False)
    with pytest.raises(InvalidValue, match="a parameter that requires a gradient"):
        hp.recover_(model, batches, "finetune")


def test_a_loss_of_one_number_is_refused():
    model, batches = build()
    with pytest.raises(
        InvalidValue,
        match=r"step 1: loss\(model, batch\) of batch 0: must be a tensor of shape \[3\]",
    ):
        hp.recover_(model, batches, "finetune", loss=mean_loss)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "Finetune.epochs: must be a number above 0"),
        ({"epochs": True}, "Finetune.epochs: must be a number above 0"),
        ({"epochs": 2, "steps": 3}, "Finetune: must be given epochs or steps"),
        ({"steps": 0}, "Finetune.steps: must be a count"),
        ({"steps": 1.0}, "Finetune.steps: must be a count"),
        ({"learning_rate": float("inf")}, "Finetune.learning_rate: must be a number above 0"),
        ({"weight_decay": -1.0}, "Finetune.weight_decay: must be a number >= 0"),
        ({"distill": "kl"}, "Finetune.distill: must be a number >= 0"),
        ({"temperature": 0.0}, "Finetune.temperature: must be a number above 0"),
        ({"warmup_ratio": 1.0}, "Finetune.warmup_ratio: must be a share"),
        ({"max_grad_norm": 0.0}, "Finetune.max_grad_norm: must be a number above 0"),
        ({"seed": -1}, "Finetune.seed: must be a whole number"),
        ({"schedule": "Linear"}, "Finetune.schedule: must be one of linear, cosine, constant"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(InvalidValue, match=message):
        Finetune(**settings)


def test_the_report_is_a_value():
    model, batches = build()
    report = hp.recover_(model, batches, Finetune(steps=1, max_grad_norm=None))
    assert RecoveryReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["settings"]["max_grad_norm"] is None
    assert report.method == "finetune"
    assert report.seconds > 0
    assert "steps 1, loss" in str(report)
