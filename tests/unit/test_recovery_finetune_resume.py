"""Finetune killed and continued: the same weights bit for bit; and early stopping by validation
loss."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, Dataset

import headprune as hp
from headprune.core.errors import CheckpointError, InvalidValue, NotWritten
from headprune.recovery import Finetune, MeanFold
from headprune.recovery._checkpoint import FILE

EXACT = {"rtol": 0, "atol": 0}
STATES = (PartialState, AcceleratorState, GradientState)


class Killed(Exception):
    pass


class Rows(Dataset):
    """Rows that are shifted at random when they are read, by all three generators; it may end the
    process."""

    def __init__(self, kill_at=None):
        self.x = torch.randn(11, 3, 8, generator=torch.Generator().manual_seed(0))
        self.reads, self.kill_at = 0, kill_at

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.reads += 1
        if self.reads == self.kill_at:
            raise Killed
        return self.x[i] + 0.1 * (torch.rand(1) + random.random() + float(np.random.rand()))


class Model(nn.Module):
    """Attention, dropout, and a batch norm, whose buffers are no parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.norm = hp.MultiHeadAttention(8, 2), nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.norm(x + self.attention(x)))


def loss(model, x):
    return (model(x) - x.flip(2)).square().mean((1, 2))


def loader(kind, rows):
    if kind == "own generator":
        return DataLoader(rows, 2, shuffle=True, generator=torch.Generator().manual_seed(7))
    return DataLoader(rows, 2, shuffle=kind == "shuffled")


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def of(**more):
    return Finetune(**{"steps": 15, "learning_rate": 0.02, "checkpoint_every": 4, **more})


SETTINGS = {
    "plain": of(warmup_ratio=0.2),
    # 6 batches a pass, a checkpoint at each
    "pass ends": Finetune(epochs=3, learning_rate=0.02, schedule="cosine"),
    "distilled": of(distill_hidden=1.0, checkpoint_every=5),
    "lora": of(lora_rank=2),
    "bf16": of(precision="bf16"),
    "watched": of(learning_rate=0.3, eval_every=2, checkpoint_every=7, schedule="constant"),
}


def train(settings, kind, folder=None, kill_at=None, leave=False):
    """``kill_at``: the row's read at which the process ends, 2 rows a batch."""
    model, batches = Model(), loader(kind, Rows(kill_at))
    teacher = Model().requires_grad_(False) if settings.needs_teacher else None
    if teacher is not None:
        teacher.attention.W_o.weight.mul_(1.5)
    validation = [torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(2))]
    held = validation if settings.needs_validation else None
    settings = settings if folder is not None else replace(settings, checkpoint_every=None)
    torch.rand(3)  # what was drawn before must not matter
    more = {"validation": held, "folder": folder, "leave_checkpoint": leave}
    report = hp.recover_(model, batches, settings, teacher, loss, **more)
    return model, report


@pytest.mark.parametrize(
    ("name", "kind"),
    [("plain", "own generator"), *((name, "shuffled") for name in SETTINGS if name != "plain")],
)
def test_a_killed_training_continues_to_the_same_weights(name, kind, tmp_path):
    settings = SETTINGS[name]
    whole, wanted = train(settings, kind)
    with pytest.raises(Killed):  # in the 11th batch of 15 or 18, in the second pass
        train(settings, kind, tmp_path, kill_at=21)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    model, report = train(settings, kind, tmp_path)
    torch.testing.assert_close(state(model), state(whole), **EXACT)
    at = {"pass ends": 6, "distilled": 10, "watched": 7}.get(name, 8)
    assert report.notes == (f"Continued after step {at} from a checkpoint.",)
    assert report.metrics == wanted.metrics
    assert (report.n_examples, report.changed) == (wanted.n_examples, wanted.changed)
    assert list(tmp_path.iterdir()) == []  # the training is over


@pytest.mark.parametrize(("name", "steps"), [("pass ends", 18), ("lora", 15), ("watched", 15)])
def test_a_finished_training_whose_checkpoint_is_kept_is_not_done_again(
    name, steps, tmp_path, monkeypatch
):
    whole, wanted = train(SETTINGS[name], "shuffled", tmp_path, leave=True)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    monkeypatch.setattr(torch.Tensor, "backward", None)  # a step would need it
    model, report = train(SETTINGS[name], "shuffled", tmp_path, leave=True)
    torch.testing.assert_close(state(model), state(whole), **EXACT)
    assert report.notes == (*wanted.notes, f"Continued after step {steps} from a checkpoint.")
    assert report.metrics == wanted.metrics
    assert (report.n_examples, report.changed) == (wanted.n_examples, wanted.changed)


def test_a_training_that_stopped_early_is_not_gone_on_with(tmp_path):
    settings = Finetune(steps=24, learning_rate=0.1, schedule="constant", eval_every=2, patience=2)
    found = []
    for _ in range(2):
        model, batches, held = overshooting(0.55)
        more = {"validation": held, "folder": tmp_path, "leave_checkpoint": True}
        report = hp.recover_(model, batches, settings, loss=squared, **more)
        found.append((model.weight.item(), dict(report.metrics)))
    assert found[0] == found[1]
    assert report.metrics["steps"] < 24


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    folder = tmp_path_factory.mktemp("left")
    with pytest.raises(Killed):
        train(SETTINGS["plain"], "in order", folder, kill_at=21)
    return folder


@pytest.fixture
def killed(left, tmp_path):
    """A copy of a killed training's folder."""
    return Path(shutil.copytree(left, tmp_path / "killed"))


@pytest.mark.parametrize("leave", [False, True], ids=["killed", "finished"])
def test_another_trainings_checkpoint_is_refused(leave, killed):
    settings, rows = SETTINGS["plain"], Rows()
    if leave:
        train(settings, "in order", killed, leave=True)
    frozen = Model()
    frozen.norm.requires_grad_(False)
    others = Rows()
    others.x = others.x + 1
    for model, batches, given, words in (
        (Model(), DataLoader(rows, 2), of(learning_rate=0.03, warmup_ratio=0.2), "settings"),
        (Model(), DataLoader(rows, 3), settings, "the number of batches"),
        (nn.Sequential(Model(), Model()), DataLoader(rows, 2), settings, "the model's structure"),
        (frozen, DataLoader(rows, 2), settings, "frozen weights, the model's structure"),
        (Model(), DataLoader(others, 2), settings, "batches: must be the ones that the checkpoint"),
    ):
        before = state(model)
        with pytest.raises(CheckpointError, match=words):
            hp.recover_(model, batches, given, loss=loss, folder=killed)
        torch.testing.assert_close(state(model), before, **EXACT)


def test_another_interval_of_checkpoints_is_the_same_training(killed):
    settings = replace(SETTINGS["plain"], checkpoint_every=3)
    model, report = train(settings, "in order", killed)
    torch.testing.assert_close(state(model), state(train(settings, "in order")[0]), **EXACT)
    assert report.notes


@pytest.mark.parametrize("damage", [b"", b"no checkpoint", None])
def test_a_damaged_checkpoint_is_refused(killed, damage):
    path = killed / FILE
    path.write_bytes(path.read_bytes()[:-500] if damage is None else damage)
    with pytest.raises(CheckpointError, match="a checkpoint that a training wrote"):
        train(SETTINGS["plain"], "in order", killed)


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_a_checkpoint_is_written_whole_or_not_at_all(kind, killed, monkeypatch):
    before = (killed / FILE).read_bytes()

    def half(what, path):
        path.write_bytes(b"half")
        raise kind("disk full\nin PyTorchStreamWriter")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(NotWritten, match="got disk full"):
        train(SETTINGS["plain"], "in order", killed)
    assert (killed / FILE).read_bytes() == before
    assert [p.name for p in killed.iterdir()] == [FILE]


def test_a_checkpoint_runs_no_code(killed):
    torch.load(killed / FILE, weights_only=True)


FIVE_ROWS = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        (Finetune(), {"validation": [FIVE_ROWS]}, "validation: must be left out: finetune"),
        (Finetune(patience=1), {}, "validation: must be given: finetune with .* got none"),
        (MeanFold(), {"teacher": Model(), "folder": "x"}, "folder: must be left out: mean_fold"),
        (Finetune(checkpoint_every=3), {}, r"must be used with recover_\(folder=\)"),
        (Finetune(), {"leave_checkpoint": True}, "leave_checkpoint: must be given with folder"),
        (Finetune(precision="fp16"), {}, "bf16, or used with a model on a GPU, got fp16 on the"),
        (
            Finetune(eval_every=1),
            {"validation": [FIVE_ROWS * float("nan")]},
            "validation after step 0: the loss of batch 0, example 0: must be finite",
        ),
    ],
)
def test_arguments_without_a_use_or_a_meaning_are_refused(method, given, words):
    with pytest.raises(InvalidValue, match=words):
        hp.recover_(Model(), [FIVE_ROWS], method, loss=loss, **given)


def test_mixed_precision_trains_float32_alone():
    with pytest.raises(InvalidValue, match=r"must be float32, got torch\.bfloat16"):
        hp.recover_(Model().bfloat16(), [FIVE_ROWS], Finetune(precision="bf16"), loss=loss)


def squared(model, batch):
    x, y = batch
    return (model(x) - y).square().squeeze(1)


def overshooting(wanted):
    """A weight that goes from 0 to 1, by about 0.1 a step, and examples that want another one."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    ones = torch.ones(4, 1)
    return model, [(ones, ones)], [(ones, wanted * ones)]


def test_early_stopping_restores_the_best():
    settings = Finetune(steps=24, learning_rate=0.1, schedule="constant", eval_every=2, patience=2)
    model, batches, held = overshooting(0.55)
    losses, weights = [], []

    def watched(m, b):
        found = squared(m, b)
        if not m.training:
            losses.append(found.mean().item())
            weights.append(m.weight.item())
        return found

    report = hp.recover_(model, batches, settings, loss=watched, validation=held)
    best = losses.index(min(losses))
    assert 0 < best < len(losses) - 1  # it fell, and rose
    assert weights == sorted(weights)
    metrics, steps = report.metrics, 2 * (best + 2)
    assert metrics["best_step"] == 2 * best
    assert metrics["validation_loss"] == pytest.approx(losses[best])
    assert metrics["validation_loss_before"] == pytest.approx(0.55**2)
    # two without a lower one, and that at step 0
    assert len(losses) == metrics["evaluations"] == best + 3
    assert metrics["steps"] == steps
    words = f"Stopped after {steps} of 24 steps: no lower validation loss in 2 evaluations."
    assert report.notes == (words,)
    assert model.weight.item() == weights[best] != weights[-1]


def test_without_patience_it_trains_to_the_end_and_keeps_the_best():
    model, batches, held = overshooting(0.55)
    settings = Finetune(steps=11, learning_rate=0.1, schedule="constant", eval_every=4)
    report = hp.recover_(model, batches, settings, loss=squared, validation=held)
    assert report.metrics["steps"] == 11
    assert report.metrics["evaluations"] == 4  # at 0, 4, 8 and 11
    assert report.metrics["best_step"] == 4
    assert report.notes == ()
    assert model.weight.item() == pytest.approx(0.4, abs=0.02)


def test_after_training_that_only_harms_the_model_is_as_it_was():
    model, batches, held = overshooting(-1.0)
    settings = Finetune(epochs=9, patience=2)  # one evaluation a pass by default
    report = hp.recover_(model, batches, settings, loss=squared, validation=held)
    assert (report.metrics["best_step"], report.metrics["steps"]) == (0, 2)
    assert model.weight.item() == 0


def test_watching_does_not_change_the_training():
    """Dropout and order are those of a training that nobody watches, also by a loader that
    draws."""
    settings = Finetune(steps=9, learning_rate=0.02)
    _, report = train(settings, "shuffled")
    held, watching = DataLoader(Rows(), 3, shuffle=True), replace(settings, eval_every=2)
    batches = loader("shuffled", Rows())
    watched = hp.recover_(Model(), batches, watching, loss=loss, validation=held)
    assert watched.metrics["loss"] == report.metrics["loss"]


def test_a_mean_is_over_examples_not_batches():
    model, x = Model().eval(), FIVE_ROWS
    wanted = loss(model, x).mean().item()
    settings = Finetune(steps=1, eval_every=1)
    report = hp.recover_(model, [x], settings, loss=loss, validation=[x[:4], x[4:]])
    assert report.metrics["validation_loss_before"] == pytest.approx(wanted, rel=1e-5)


def test_bf16_keeps_fp32_weights_and_leaves_no_trace():
    before = [dict(kind._shared_state) for kind in STATES]
    model, twin, types = Model(), Model(), []

    def typed(m, x):
        types.append((m.attention.W_q(x).dtype, m.attention.W_q.weight.dtype))
        return loss(m, x)

    for m, precision in ((model, "bf16"), (twin, None)):
        settings = Finetune(steps=5, learning_rate=0.01, precision=precision)
        hp.recover_(m, [FIVE_ROWS], settings, loss=typed)
    assert set(types[:5]) == {(torch.bfloat16, torch.float32)}
    assert set(types[5:]) == {(torch.float32, torch.float32)}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    weight = model.attention.W_q.weight
    # the same training, rounded otherwise
    assert 0 < (weight - twin.attention.W_q.weight).abs().max() < 0.01
    assert weight.bfloat16().float().ne(weight).any()  # finer than bf16
    assert [dict(kind._shared_state) for kind in STATES] == before
    assert model(FIVE_ROWS).dtype == torch.float32
