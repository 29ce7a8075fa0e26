"""Losses that depend on other examples of their batch: every scorer computes what it documents, or
says no."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.model.sites import bind
from headprune.scoring import (
    AttributionPatching,
    Fisher,
    LeaveOneOut,
    Surgeon,
    Taylor,
    _coupling,
    _gradients,
    gate_gradients,
    ggn_matrix,
    registry,
)
from headprune.scoring._base import ScoringProblem
from headprune.scoring._coupling import NOTE
from tests.laws.support import subject_of
from tests.scoring_help import Stack, flat, flat_errors

SIZE = 12  # examples in a batch
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def classifier(last=None):
    torch.manual_seed(0)
    model = Stack(12, 3, 4)
    model.head = nn.Sequential(model.head, last or nn.Identity())
    return model.double().eval()


def data(batches=2, size=SIZE):
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(batches):
        x = torch.randn(size, 4, 12, generator=generator, dtype=torch.float64)
        found.append({"x": x, "labels": torch.randint(4, (size,), generator=generator)})
    return found


# ---------------------------------------------------------------- losses


def own(model, batch):
    """Of each example alone."""
    return told(model(batch["x"]), batch)


def told(logits, batch):
    return functional.cross_entropy(logits, batch["labels"], reduction="none")


def contrastive(model, batch):
    z = functional.normalize(model(batch["x"]), dim=-1)
    return functional.cross_entropy(5 * z @ z.roll(1, 0).T, torch.arange(len(z)), reduction="none")


def centred(model, batch):
    """Sums to 0, so that the slopes of the sum are 0."""
    losses = own(model, batch)
    return losses - losses.mean()


def one_pair(model, batch):
    """Example 10 alone sees another one."""
    z = model(batch["x"])
    seen = torch.zeros(len(z), dtype=z.dtype)
    seen[10 % len(z)] = 1
    return told(z, batch) + seen * z[3 % len(z)].square().mean()


def weak(model, batch):
    z = model(batch["x"])
    return told(z, batch) + 1e-5 * z.square().mean()


COUPLED = [contrastive, centred, one_pair, weak]


# ---------------------------------------------------------------- what is documented, literally


def jacobian(model, batches, loss, at=1.0):
    """``[examples, units]``: the slope of every example's loss in gates that all examples share."""
    sites = hp.find_sites(model)
    rows = []
    for batch in batches:
        ones = [torch.full((3,), at, dtype=torch.float64, requires_grad=True) for _ in sites]
        with hp.gated(model, {s.name: gate for s, gate in zip(sites, ones, strict=True)}):
            losses = loss(model, batch)
            slopes = [torch.autograd.grad(one, ones, retain_graph=True) for one in losses]
        rows += [torch.cat(of_example) for of_example in slopes]
    return torch.stack(rows)


def ablated(model, batches, loss):
    """``[examples, units]``: what every loss rises by without each head."""
    sites = hp.find_sites(model)
    rows = []
    with torch.no_grad():
        for batch in batches:
            base, columns = loss(model, batch), []
            for site in sites:
                for head in range(3):
                    gate = torch.ones(3, dtype=torch.float64)
                    gate[head] = 0
                    with hp.gated(model, {site.name: gate}):
                        columns.append(loss(model, batch) - base)
            rows.append(torch.stack(columns, 1))
    return torch.cat(rows)


def integrated(model, batches, loss):
    total = torch.zeros(())
    for x, weight in zip(*np.polynomial.legendre.leggauss(8), strict=True):
        total = total - weight / 2 * jacobian(model, batches, loss, (1 + x) / 2).mean(0)
    return total


def in_blocks(*given):
    return torch.stack([block.mean(0) for block in jacobian(*given).split(5)])


#: What scores are, by the scorer's name.
ORACLES = {
    "taylor": lambda *given: jacobian(*given).abs().mean(0),
    "taylor2": lambda *given: (jacobian(*given).square() / 2 - jacobian(*given)).mean(0),
    "fisher": lambda *given: jacobian(*given).square().mean(0) / 2,
    "attribution_patching": lambda *given: -jacobian(*given).mean(0),
    "integrated_gradients": integrated,
    "leave_one_out": lambda *given: ablated(*given).mean(0),
}
#: The same of scorers with settings.
CONFIGURED = {
    "blocks": (Taylor(reduce="batch", block=5), lambda *given: in_blocks(*given).abs().mean(0)),
    "fisher in blocks": (Fisher(block=5), lambda *given: in_blocks(*given).square().mean(0) / 2),
    "without replay": (LeaveOneOut(replay=False), ORACLES["leave_one_out"]),
}
#: What needs no slope of a loss: statistics, losses of whole batches, gates trained on the mean
#: loss of a block.
NO_SLOPES = {
    *("activation_norm", "add_one_in", "confidence", "entropy", "fluctuation", "hard_concrete"),
    *("magnitude", "obs", "random", "shapley", "subset_topk", "wanda"),
    "ggn",  # of the output
}


def test_every_scorer_is_in_a_table():
    assert {*ORACLES, *NO_SLOPES, "attattr", "auto", "ladder", "surgeon"} == set(registry.names())


def scored(scorer, model, batches, loss, **more):
    return hp.score(model, batches, scorer, loss=loss, progress=False, **more)


@pytest.mark.parametrize("name", [*ORACLES, *CONFIGURED])
def test_scores_are_what_is_documented(name):
    scorer, oracle = CONFIGURED.get(name) or (name, ORACLES[name])
    model, batches = classifier(), data()
    found = scored(scorer, model, batches, contrastive)
    assert_close(flat(found), oracle(model, batches, contrastive), **CLOSE)
    asks_slopes = "leave_one_out" not in found.scorer
    assert (NOTE in found.notes) == asks_slopes


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
def test_every_coupling_is_found_and_rows_and_errors_are_of_the_examples(loss):
    model, batches = classifier(), data()
    found, slopes = scored("taylor", model, batches, loss), jacobian(model, batches, loss)
    rows = slopes.abs()
    assert NOTE in found.notes
    assert_close(flat(found), rows.mean(0), **CLOSE)
    assert_close(torch.tensor(found.samples.matrix), rows, rtol=1e-6, atol=1e-9)
    assert_close(flat_errors(found), rows.std(0) / len(rows) ** 0.5, **CLOSE)
    assert_close(gate_gradients(model, batches, loss), slopes, **CLOSE)


@pytest.mark.parametrize("scorer", ["attattr", Taylor(reduce="token")], ids=str)
def test_scorers_that_need_losses_of_each_example_alone_say_no(scorer):
    model = classifier()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(InvalidValue, match=r"independent of the other examples.*Take taylor"):
        scored(scorer, model, data(), contrastive)
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("loss", [contrastive, one_pair], ids=lambda loss: loss.__name__)
def test_played_back_passes_are_whole_ones(loss):
    """Also of a loss that shows no coupling on the two examples of the proof."""
    model, batches = classifier(), data(1)
    found = scored("leave_one_out", model, batches, loss)
    assert_close(flat(found), ablated(model, batches, loss).mean(0), **CLOSE)
    shares = flat(scored("shapley", model, batches, loss))
    off = {s.name: torch.zeros(3) for s in hp.find_sites(model)}
    with torch.no_grad(), hp.gated(model, off):
        none = loss(model, batches[0]).mean()
    assert_close(shares.sum(), none - loss(model, batches[0]).mean().detach(), **CLOSE)


def test_a_batch_of_one_couples_nothing_and_the_next_one_is_looked_at():
    model, batches = classifier(), [data(1, 1)[0], *data(1)]
    found = scored("taylor", model, batches, contrastive)
    assert_close(flat(found), jacobian(model, batches, contrastive).abs().mean(0), **CLOSE)


# ---------------------------------------------------------------- models that couple


class BatchStatistics(nn.BatchNorm1d):
    """Statistics of the batch, also in evaluation."""

    def __init__(self):
        super().__init__(4, track_running_stats=False)


@pytest.mark.parametrize("name", ["taylor", "leave_one_out"])
def test_a_model_that_couples(name):
    model, batches = classifier(BatchStatistics()), data()
    found = scored(name, model, batches, own)
    assert_close(flat(found), ORACLES[name](model, batches, own), **CLOSE)


@pytest.mark.parametrize("scorer", ["ggn", Surgeon(curvature="output")], ids=["ggn", "surgeon"])
def test_the_output_of_a_model_that_couples(scorer):
    for last in (nn.BatchNorm1d(4), None):
        found = hp.score(classifier(last), data(), scorer, progress=False)
        assert found.n_examples == 2 * SIZE
    with pytest.raises(InvalidValue, match="the model's output: must be independent of"):
        hp.score(classifier(BatchStatistics()), data(), scorer, progress=False)
    with pytest.raises(InvalidValue, match="the model's output"):
        ggn_matrix(classifier(BatchStatistics()), data())


# ---------------------------------------------------------------- losses that couple nothing


@pytest.mark.parametrize("scorer", ["surgeon", AttributionPatching(base="mean")], ids=str)
def test_the_slow_way_gives_the_same(scorer, monkeypatch):
    """Of scorers without an oracle above: what is computed where examples are coupled is what is
    computed where they are not."""
    model, batches = classifier(), data()
    fast = scored(scorer, model, batches, own)
    assert NOTE not in fast.notes

    def always(problem, *_, **__):
        _coupling.remember_coupled_losses(problem)
        return True

    for module in (_gradients, __import__(f"headprune.scoring.{fast.scorer}", fromlist=["x"])):
        if hasattr(module, "coupled"):
            monkeypatch.setattr(module, "coupled", always)
    slow = scored(scorer, model, batches, own)
    assert NOTE in slow.notes, "it ran"
    assert_close(flat(slow), flat(fast), rtol=1e-8, atol=1e-12)


def read_logits(model, batch):
    output = model(**{k: v for k, v in batch.items() if k != "labels"})
    if not isinstance(output, Tensor):
        output = next(t for t in output.values() if isinstance(t, Tensor))
    return output.float().flatten(1).logsumexp(1).square()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("bert", "gpt2", "t5", "swin", "vit", "head_list")),
        *(("llama", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
    ],
    ids=str,
)
def test_models_that_do_not_couple_take_two_backward_passes_more(layout, dtype, monkeypatch):
    """One to find out, on the first batch; none of an example alone, also where types are
    narrow."""
    subject = subject_of(layout)
    model = subject.model.to(dtype)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in subject.batch.items()}
    calls, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    # It looks twice where types are narrow.
    monkeypatch.setattr(_gradients, "refuse_flat", lambda *_: None)
    problem = ScoringProblem(model, bind(model), [batch, batch], read_logits, progress=False)
    for p in model.parameters():
        p.requires_grad_(False)
    found = _gradients.unit_gradients(problem)
    assert problem.shared.of(_coupling.Couplings).losses.is_coupled is False
    assert len(calls) == 2 + 1
    first, second = found.chunk(2)
    assert_close(first, second, rtol=0, atol=0)


# ---------------------------------------------------------------- batches after the first


def coupled_where_asked(model, batch):
    x, coupled = batch
    states = model(x).mean((1, 2))
    return states.square() + coupled * states.roll(1).square()


@pytest.mark.parametrize("n_before", [1, 7])
@pytest.mark.parametrize("scorer", ["taylor", "attribution_patching", "attattr"])
def test_a_loss_that_couples_later_examples_alone_is_refused(scorer, n_before):
    torch.manual_seed(0)
    model = nn.Sequential(hp.MultiHeadAttention(8, 4)).double().eval()
    couples = [0] * n_before + [1, 1]
    batches = [(torch.randn(4, 5, 8).double(), coupled) for coupled in couples]
    with pytest.raises(InvalidValue, match="first appears in a later batch"):
        scored(scorer, model, batches, coupled_where_asked)
