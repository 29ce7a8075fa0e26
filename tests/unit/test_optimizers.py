"""Optimizers that exist before a cut: which parameter became which, and training goes on as if the
heads were gated."""

import copy
import inspect

import accelerate
import pytest
import torch
import transformers
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.surgery.parameters import CutParameter
from tests.laws.support import CLOSE, logits, objective, picture, subject_of

#: Every optimizer of PyTorch whose step takes each number of a weight by itself, with settings that
#: give it all states.
ELEMENTWISE = {
    "ASGD": {"lr": 1e-3, "t0": 1},
    "Adadelta": {},
    "Adagrad": {"lr": 1e-2},
    "Adam": {"lr": 1e-3, "amsgrad": True},
    "AdamW": {"lr": 1e-3},
    "Adamax": {"lr": 1e-3},
    "NAdam": {"lr": 1e-3},
    "RAdam": {"lr": 1e-3},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-3},
    "SGD": {"lr": 1e-4, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
#: Those whose step takes a weight as a whole, or is for other gradients.
OTHERS = {"Adafactor", "LBFGS", "Muon", "Optimizer", "SparseAdam"}
LAYOUTS = ["multi_head_attention", "bert", "gpt2", "llama", "head_list", "t5", "albert"]


def test_every_optimizer_of_pytorch_is_tried():
    kinds = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    assert kinds == {*ELEMENTWISE, *OTHERS}


def made(name, model):
    """With two groups, and weights that are named."""
    named = list(model.named_parameters())
    groups = [{"params": named[::2]}, {"params": named[1::2], "lr": 2e-4}]
    return getattr(torch.optim, name)(groups, **ELEMENTWISE[name])


def step(model, optimizer, batch):
    optimizer.zero_grad()
    objective(logits(model, batch)).backward()
    optimizer.step()


def mask_of(subject):
    return subject.without({s.name: s.units[i % 2] for i, s in enumerate(subject.sites)})


#: Every optimizer with one layout, every layout with one optimizer.
PAIRS = [(name, "multi_head_attention") for name in ELEMENTWISE if name != "AdamW"]
PAIRS += [("AdamW", layout) for layout in LAYOUTS]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_training_goes_on_as_if_the_heads_were_gated(name, layout):
    subject = subject_of(layout)
    mask = mask_of(subject)
    gated, cut = subject.model, subject.copy()  # without dropout
    optimizers = [made(name, gated), made(name, cut)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for _ in range(3):
        for model, optimizer, schedule in zip((gated, cut), optimizers, schedules, strict=True):
            step(model, optimizer, subject.batch)
            schedule.step()
    groups = [id(group) for group in optimizers[1].param_groups]
    report = hp.prune_(cut, mask, optimizer=optimizers[1])
    assert report.warnings == ()
    assert [id(group) for group in optimizers[1].param_groups] == groups
    assert held(optimizers[1]) == {id(p) for p in cut.parameters()}
    assert set(map(id, optimizers[1].state)) <= held(optimizers[1])
    for _ in range(3):
        with hp.gated(gated, mask, subject.sites):
            step(gated, optimizers[0], subject.batch)
            expected = logits(gated, subject.batch)
        before = logits(cut, subject.batch)
        step(cut, optimizers[1], subject.batch)
        for schedule in schedules:
            schedule.step()
        after = logits(cut, subject.batch)
        assert_close(after, expected, **CLOSE)
        assert not torch.equal(before, after)
    for group in optimizers[1].param_groups:
        assert len(group["params"]) == len(group["param_names"])


def held(optimizer):
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("layout", ["llama", "head_list", "albert"])
def test_the_report_says_which_parameter_became_which(layout):
    """From it alone anybody's state can be cut: the old weights, cut so, are the new ones."""
    subject = subject_of(layout)
    cut = subject.copy()
    report = hp.prune_(cut, mask_of(subject))
    old, new = (dict(m.named_parameters(remove_duplicate=False)) for m in (subject.model, cut))
    told = {c.name: c for c in report.parameters}
    assert len(told) == len(report.parameters) > 0
    reached = set()
    for name, tensor in old.items():
        c = told.get(name, CutParameter(name, name))
        if c.became is None:
            continue
        reached.add(c.became)
        if c.dimension is not None:
            tensor = tensor.index_select(c.dimension, torch.tensor(c.kept))
        assert torch.equal(tensor, new[c.became]), name
    assert reached == set(new)
    assert any(c.became is None for c in told.values()) == (layout == "head_list")


def pruned(optimizer, model, **more):
    mask = hp.HeadMask.from_keep({"0": [0, 2]}, {"0": 4})
    return hp.prune_(model, mask, optimizer=optimizer, **more)


def attention():
    torch.manual_seed(0)
    return nn.Sequential(hp.MultiHeadAttention(8, 4), nn.Linear(8, 8))


def train(optimizer, model):
    def loss():
        optimizer.zero_grad()
        found = model(torch.ones(2, 3, 8)).square().sum()
        found.backward()
        return found

    for _ in range(2):
        loss()
        optimizer.step(loss) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    return optimizer


KEPT = [0, 1, 4, 5]
ADAFACTOR = {"lr": 1e-3, "relative_step": False}


@pytest.mark.parametrize(
    ("kind", "settings", "row", "column"),
    [
        (torch.optim.Adafactor, {}, "row_var", "col_var"),
        (transformers.Adafactor, ADAFACTOR, "exp_avg_sq_row", "exp_avg_sq_col"),
    ],
)
def test_factored_moments_are_cut_along_the_axis_that_they_have(kind, settings, row, column):
    """Also where rows and columns are equally many, and a shape alone does not tell them apart."""
    model = attention()
    optimizer = train(kind(model.parameters(), **settings), model)

    def states():
        weights = (model[0].W_q.weight, model[0].W_o.weight)
        return [copy.deepcopy(optimizer.state[weight]) for weight in weights]

    before = states()
    report = pruned(optimizer, model)
    after = states()
    assert torch.equal(after[0][row], before[0][row][KEPT])
    assert torch.equal(after[0][column], before[0][column])
    assert torch.equal(after[1][row], before[1][row])
    assert torch.equal(after[1][column].flatten(), before[1][column].flatten()[KEPT])
    assert after[0]["step"] == before[0]["step"]
    assert "averages over removed rows" in report.warnings[0]
    train(optimizer, model)


def test_muon_goes_on():
    model = attention()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = train(torch.optim.Muon(matrices, lr=1e-3), model)
    before = optimizer.state[model[0].W_o.weight]["momentum_buffer"].clone()
    assert pruned(optimizer, model).warnings == ()
    after = optimizer.state[model[0].W_o.weight]["momentum_buffer"]
    assert torch.equal(after, before[:, KEPT])
    train(optimizer, model)


def test_lbfgs_begins_anew():
    model = attention()
    optimizer = train(torch.optim.LBFGS(model.parameters(), lr=1e-2), model)
    assert pruned(optimizer, model).warnings == ("LBFGS starts again from an empty state",)
    assert not optimizer.state
    train(optimizer, model)


class EightBit(torch.optim.SGD):
    """Keeps state as bitsandbytes does: a number of 8 bits for each weight, and one scale a block
    of them."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(
                        state1=torch.ones_like(p, dtype=torch.uint8), absmax1=torch.ones(2), step=0
                    )
                state["step"] += 1


def test_state_that_cannot_be_cut_begins_anew():
    model = attention()
    optimizer = train(EightBit(model.parameters(), lr=1e-3), model)
    report = pruned(optimizer, model)
    words = "EightBit starts again from an empty state for 0.W_q.weight, 0.W_q.bias, 0.W_k.weight and 4 more"
    assert words in report.warnings
    assert set(optimizer.state) == {model[1].weight, model[1].bias, model[0].W_o.bias}
    train(optimizer, model)
    assert optimizer.state[model[0].W_q.weight]["step"] == 2


def test_several_optimizers_and_parameters_that_are_frozen():
    model = attention()
    model[0].W_k.weight.requires_grad_(False)
    some = [*model[0].W_o.parameters(), *model[1].parameters()]
    one = train(torch.optim.AdamW(model[0].W_q.parameters()), model)
    two = train(torch.optim.SGD(some, lr=1e-3, momentum=0.9), model)
    pruned([one, two], model)
    assert held(one) == {id(p) for p in model[0].W_q.parameters()}
    assert held(two) == {id(p) for p in [*model[0].W_o.parameters(), *model[1].parameters()]}
    assert one.state[model[0].W_q.weight]["exp_avg"].shape == (4, 8)
    assert two.state[model[0].W_o.weight]["momentum_buffer"].shape == (8, 4)


def test_gradients_that_wait_for_their_step_come_along():
    model = attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(torch.ones(2, 3, 8)).square().sum().backward()
    before = {n: p.grad for n, p in model.named_parameters()}
    pruned(optimizer, model)
    assert torch.equal(model[0].W_q.weight.grad, before["0.W_q.weight"][KEPT])
    assert torch.equal(model[0].W_o.weight.grad, before["0.W_o.weight"][:, KEPT])
    assert model[1].weight.grad is before["1.weight"]


def test_accelerate_wraps_optimizers():
    model = attention()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    train(optimizer, model)
    pruned(optimizer, model)
    assert held(optimizer) == {id(p) for p in model.parameters()}
    assert optimizer.state[model[0].W_q.weight]["exp_avg"].shape == (4, 8)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Has the name of the one that spreads its state over processes."""


def test_what_is_no_optimizer_of_the_model_is_refused():
    model = attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = torch.optim.SGD(attention().parameters(), lr=1e-3)
    before = picture(model)
    for wrong, where in (
        (schedule, "optimizer:"),
        (other, "optimizer:"),
        ([optimizer, other], r"optimizer\[1\]:"),
    ):
        with pytest.raises(InvalidValue, match=where):
            pruned(wrong, model)
    with pytest.raises(UnsupportedModel, match="state is whole in this process"):
        pruned(ZeroRedundancyOptimizer(model.parameters(), lr=1e-3), model)
    assert picture(model) == before
    pruned(optimizer, model)
    stale = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1e-3)
    with pytest.raises(InvalidValue, match="earlier cut has old tensors"):
        hp.prune_heads_(model, {0: [0]}, optimizer=stale)
    hp.prune_heads_(model, {0: [0]}, optimizer=optimizer)
    assert held(optimizer) == {id(p) for p in model.parameters()}


def test_after_a_cut_that_fails_optimizers_are_as_they_were(monkeypatch):
    model = attention()
    optimizer = train(torch.optim.AdamW(model.parameters()), model)
    before = copy.deepcopy(optimizer.state_dict())
    parameters = [id(p) for p in model.parameters()]
    monkeypatch.setattr("headprune.surgery.prune.compare", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pruned(optimizer, model, example=torch.ones(2, 3, 8))
    assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == parameters
    assert held(optimizer) == {id(p) for p in model.parameters()}


def test_an_optimizer_that_was_not_given_says_so_when_it_steps():
    """And only then: one that is thrown away, made later, or of another model says nothing."""
    model, other = attention(), attention()
    stale = torch.optim.SGD(model.parameters(), lr=1e-3)
    fine = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (other, model[1])]
    hp.prune_heads_(model, {0: [1]})
    fine.append(torch.optim.SGD(model.parameters(), lr=1e-3))
    for one in fine:
        one.step()
    with pytest.warns(UserWarning, match="SGD trains parameters that a cut has replaced"):
        stale.step()
    hp.prune_heads_(model, {0: [0]}, optimizer=fine[-1])
    fine[-1].step()
