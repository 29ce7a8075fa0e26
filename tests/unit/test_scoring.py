"""Scores against literal loops and finite differences; what a call reads; what it does to the
model."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.model.costs import measure_costs
from headprune.model.losses import default_loss
from headprune.model.sites import bind
from headprune.scoring import LeaveOneOut, Magnitude, Random, Taylor, gate_gradients
from tests.laws.support import examples_of as data
from tests.laws.support import picture, subject_of
from tests.reference import scores as reference
from tests.scoring_help import (
    EXACT,
    counted_runs,
    flat,
    flat_errors,
    loss_of,
    own_loss,
    score,
    split,
    wide,
)

SCORERS = [Taylor(), Taylor(reduce="token"), LeaveOneOut(), Magnitude(), Random()]


# ---------------------------------------------------------------- the matrix of gate gradients


def test_gate_gradients_are_central_differences(subject):
    loss = loss_of(subject)
    found = gate_gradients(subject.model, [subject.batch], loss)
    weight = reference.weight_route(subject.model, subject.batch, loss, subject.sites)
    assert_close(found, reference.by_unit(weight, subject.sites), **EXACT)
    slow = reference.central_differences(
        subject.model, subject.batch, loss, subject.sites, step=1e-4
    )
    assert found.dtype == torch.float64
    assert found.abs().max() > 1e-3
    # The truncation error of a central difference is of order step².
    assert_close(found, reference.by_unit(slow, subject.sites), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- taylor


def test_taylor_is_its_formula(subject):
    loss, batch = loss_of(subject), data(subject, 5)
    tokens = reference.by_unit(
        reference.context_route(subject.model, batch, loss, subject.sites), subject.sites
    )
    sizes = [len(s.units) for s in subject.sites]
    scorers = [
        Taylor(),
        Taylor(normalize="l2"),
        Taylor(reduce="token"),
        Taylor(reduce="batch", block=2, normalize="l2"),
        Taylor(reduce="signed"),
    ]
    for scorer, found in zip(scorers, score(subject, scorers, split(batch, 3)), strict=True):
        values, errors = reference.taylor(
            tokens.sum(1), tokens, sizes, scorer.reduce, scorer.normalize, 2
        )
        assert found.n_examples == 5
        assert_close(flat(found), wide(values), **EXACT)
        assert_close(flat_errors(found), wide(errors), **EXACT)


# ---------------------------------------------------------------- removed heads


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_scores_of_a_cut_model_go_by_original_indices(name):
    subject = subject_of(name)
    hp.prune_(subject.model, subject.without({s.name: s.units[0] for s in subject.sites}))
    sites, loss = hp.find_sites(subject.model), loss_of(subject)
    assert all(s.heads[0] != 0 for s in sites)
    ablated, magnitude = score(subject, ["leave_one_out", "magnitude"])
    slow = reference.leave_one_out(subject.model, subject.batch, loss, sites)
    assert_close(flat(ablated), wide(reference.mean_and_error(slow)[0]), **EXACT)
    full = hp.score(subject_of(name).model, scorer="magnitude")
    for unit in magnitude.units():
        head = hp.HeadId(unit.name, unit.heads[0])
        assert unit.value == pytest.approx(full[head], rel=1e-12)
        assert ablated[head] == ablated[hp.HeadId(unit.name, unit.heads[-1])]


def test_a_layer_without_heads_has_no_scores():
    subject = subject_of("llama")
    empty = subject.sites[1].name
    hp.prune_(subject.model, subject.mask({empty: []}))
    for found in score(subject, SCORERS):
        expected = [0 if s.name == empty else len(s.units) for s in subject.sites]
        assert [len(row) for row in found.values] == expected


# ---------------------------------------------------------------- scorers without data


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "multi_head_attention"])
def test_magnitude_is_the_product_of_the_norms(name):
    subject = subject_of(name)
    found = hp.score(subject.model, scorer="magnitude")
    assert (found.n_examples, found.data, found.costs, found.standard_errors) == (0, *[None] * 3)
    for site, row in zip(subject.sites, found.values, strict=True):
        gate = reference.projection(subject.model, site)
        out = gate.weight.T if hasattr(gate, "nf") else gate.weight
        for unit, value in zip(site.units, row, strict=True):
            norm_o = torch.cat([out[:, reference.columns(site, h)] for h in unit], 1).norm()
            groups = {h // site.group_size for h in unit}
            norm_v = torch.cat([value_rows(subject.model, site, g) for g in groups]).norm()
            assert value == pytest.approx(float((norm_v * norm_o).detach()), rel=1e-10)


def value_rows(model, site, group):
    """W_V of one key/value head ``[value_dim, width]``."""
    rows = slice(group * site.value_dim, (group + 1) * site.value_dim)
    module = model.get_submodule(site.name)
    if site.layout == "gpt2":
        return module.c_attn.weight.T[2 * module.split_size :][rows]
    names = {"bert": "self.value", "multi_head_attention": "W_v"}
    return module.get_submodule(names.get(site.layout, "v_proj")).weight[rows]


@pytest.mark.parametrize("layout", ["head_list", "head_list_bare"])
def test_magnitude_of_heads_that_are_modules_is_that_of_all_their_weights(layout):
    subject = subject_of(layout)
    found = hp.score(subject.model, scorer="magnitude", sites=subject.sites)
    for site, row in zip(subject.sites, found.values, strict=True):
        module = subject.model.get_submodule(site.name)
        for (head,), value in zip(site.units, row, strict=True):
            own = torch.cat([p.flatten() for p in module.heads[head].parameters()]).norm()
            if layout == "head_list":
                own = own * module.proj.weight[:, reference.columns(site, head)].norm()
            assert value == pytest.approx(float(own.detach()), rel=1e-10)


def test_random_is_seeded_and_its_own():
    model = subject_of("bert").model
    state = torch.get_rng_state()
    first, again, other = (hp.score(model, scorer=s) for s in ("random", Random(), Random(seed=1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.values == again.values != other.values
    assert (first.seed, other.seed) == (0, 1)
    assert len({v for row in first.values for v in row}) == 12


# ---------------------------------------------------------------- the model is as it was found


def mixed(subject):
    """A model with a state of its own in everything that a scorer might touch."""
    model = subject.model.train()
    for number, module in enumerate(model.modules()):
        module.training = number % 3 != 0
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
        if number % 4 == 0:
            parameter.grad = torch.full_like(parameter, 0.5)
    return model


def state_of(model):
    grads = [(id(p.grad), p.grad.tolist()) for p in model.parameters() if p.grad is not None]
    return [picture(model), grads, torch.get_rng_state().tolist()]


@pytest.mark.parametrize("name", ["bert", "multi_head_attention"])
def test_the_model_is_as_it_was_also_after_an_error(name):
    subject = subject_of(name)
    model, loss, calls = mixed(subject), loss_of(subject), []
    expected = score(dataclasses.replace(subject, model=subject.copy().eval()), SCORERS)
    before = state_of(model)
    assert [s.values for s in score(subject, SCORERS)] == [s.values for s in expected]
    assert state_of(model) == before

    def breaks(model, batch):
        calls.append(1)
        return loss(model, batch) * (float("nan") if len(calls) == 3 else 1.0)

    for scorer in SCORERS[:3]:
        calls.clear()
        with pytest.raises(InvalidValue, match="finite"):
            score(subject, scorer, [subject.batch] * 2, loss=breaks)
        assert len(calls) == 3
        assert state_of(model) == before


# ---------------------------------------------------------------- data


class Passes:
    """Batches of each pass in turn, the last ones again and again."""

    def __init__(self, *passes):
        self.of_pass, self.passes = passes, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.of_pass[min(self.passes, len(self.of_pass)) - 1])


def test_several_scorers_share_their_passes():
    subject = subject_of("bert")
    once = (batch for batch in split(data(subject), 3))
    alone = [score(subject, scorer, split(data(subject), 3)) for scorer in SCORERS]
    assert score(subject, SCORERS, once) == tuple(alone)
    batches = Passes(split(data(subject), 3))
    sharing = [Taylor(), Taylor(reduce="signed"), Taylor(normalize="l2"), Taylor(reduce="batch")]
    with counted_runs(subject.model) as runs:
        score(subject, sharing, batches)
        assert len(runs) == 1 + 1 + 3, "one for the costs, one for the model's own loss"
        assert batches.passes == 1, "the costs are measured on a batch of the same pass"
        runs.clear()
        score(subject, [*sharing, LeaveOneOut(replay=False), "magnitude"], batches)
        assert len(runs) == 1 + 1 + 3 + 3 * (1 + 12)


def test_batches_that_change_between_passes_are_refused():
    """Rows of several passes are put together: they must be of the same examples."""
    subject = subject_of("bert")
    batches = split(data(subject), 3)
    two_passes = ["taylor", LeaveOneOut(replay=False)]
    for second, words in (
        (batches[::-1], "must be the same in every pass.*others from batch 0 on"),
        ([batches[0], batches[2], batches[1]], "others from batch 1 on.*does not shuffle"),
        (batches[:2], "2 batches after 3"),
        ([*batches, batches[0]], "others from batch 3 on"),
        ([], "must be readable more than once, got a Passes whose batches"),
    ):
        with pytest.raises(InvalidValue, match=words):
            score(subject, two_passes, Passes(batches, second))
    same = Passes(batches)
    score(subject, two_passes, same)
    assert same.passes == 2


def test_one_pass_may_read_in_any_order():
    subject = subject_of("bert")
    rows = [reference.example(data(subject), i) for i in range(7)]
    loader = torch.utils.data.DataLoader(rows, 1, shuffle=True, collate_fn=lambda r: r[0])
    with pytest.raises(InvalidValue, match="the same in every pass"):
        score(subject, hp.scoring.Shapley(orders=1), loader)
    taylor, fisher = score(subject, ["taylor", "fisher"], loader)
    assert taylor.data == fisher.data
    assert taylor.n_examples == 7


def test_batches_may_be_tuples_or_tensors():
    subject = subject_of("multi_head_attention")
    x = subject.batch["x"]
    expected = score(subject, "surgeon", [{"x": x}])
    for batch in (x, (x,), [x, None]):
        found = hp.score(subject.model, [batch], loss=own_loss, progress=False)
        assert found.values == expected.values


# ---------------------------------------------------------------- costs


def test_costs_are_measured_on_one_example():
    subject, sizes = subject_of("bert"), []
    handle = subject.model.register_forward_hook(
        lambda m, a, k, o: sizes.append(len(k["input_ids"])), with_kwargs=True
    )
    found = score(subject, "taylor", [data(subject)])
    handle.remove()
    assert sizes == [1, 7, 7], "the costs, the model's own loss, the gradients"
    assert found.costs == score(subject, "taylor", split(data(subject), 1)).costs


def test_a_loss_that_needs_several_examples_is_costed_on_the_batch():
    subject = subject_of("bert")

    def paired(model, batch):
        if reference.n_examples(batch) < 2:
            raise ValueError("a single example")
        return default_loss(model, batch)

    assert score(subject, "taylor", loss=paired).costs == score(subject, "taylor").costs


def test_costs_of_models_whose_tokens_come_first_are_those_of_their_length():
    subject = subject_of("labml")
    found = hp.score(subject.model, [subject.batch], "magnitude", progress=False)
    assert found.costs == measure_costs(subject.model, bind(subject.model), subject.batch)
    assert found.costs.length > 1


@pytest.mark.parametrize("parametrised", [True, False], ids=["parametrised", "legacy"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_weight_norm_is_scored_and_costed(parametrised):
    norm = nn.utils.parametrizations.weight_norm if parametrised else nn.utils.weight_norm
    subject = subject_of("bert")
    plain = score(subject, "taylor")
    attention = subject.model.bert.encoder.layer[0].attention
    norm(attention.output.dense)
    found = score(subject, "taylor")
    assert_close(flat(found), flat(plain), **EXACT)
    assert found.costs.units == plain.costs.units
    norm(attention.self.query)
    costs = score(subject, "taylor").costs
    # A head's rows of the query projection have a norm each.
    per_head = subject.sites[0].head_dim
    assert [c.params - per_head for c in costs.units[0]] == [c.params for c in plain.costs.units[0]]
    assert costs.units[1] == plain.costs.units[1]


# ---------------------------------------------------------------- circumstances of the caller


def test_works_where_the_caller_turned_gradients_off():
    subject = subject_of("bert")
    expected = score(subject, SCORERS)
    with torch.inference_mode():
        assert score(subject, SCORERS) == expected


@pytest.mark.parametrize("name", ["bert", "llama", "multi_head_attention"])
def test_works_in_bfloat16(name):
    subject = subject_of(name)
    expected = score(subject, SCORERS[:3])
    subject.model.bfloat16()
    for name, value in subject.batch.items():
        subject.batch[name] = value.bfloat16() if value.is_floating_point() else value
    for found, value in zip(score(subject, SCORERS[:3]), expected, strict=True):
        # bf16 carries 8 bits: a few per cent after three layers, of the largest score.
        assert_close(flat(found), flat(value), rtol=0, atol=0.15 * float(flat(value).abs().max()))


def test_works_on_a_compiled_model():
    subject = subject_of("bert")
    expected, gradients = score(subject, SCORERS), gate_gradients(subject.model, [subject.batch])
    compiled = torch.compile(subject.model, backend="eager")
    compiled(**subject.batch)
    assert hp.score(compiled, [subject.batch], SCORERS, progress=False) == expected
    assert_close(gate_gradients(compiled, [subject.batch]), gradients, **EXACT)


def two_layers():
    return nn.Sequential(hp.MultiHeadAttention(16, 4), hp.MultiHeadAttention(16, 4))


def squared(model, x):
    return model(x).square().mean((1, 2))


@pytest.mark.parametrize(("bad", "n_calls"), [(0, 1), (2, 5)])
def test_a_loss_that_is_not_finite_ends_the_pass_and_is_named(bad, n_calls):
    """At once in the first batch, else at the end of the pass."""
    calls, batches = [], [torch.randn(3, 5, 16) for _ in range(5)]

    def breaks(model, x):
        calls.append(1)
        wrong = torch.arange(3) == (1 if len(calls) == bad + 1 else -1)
        return torch.where(wrong, torch.nan, squared(model, x))

    with pytest.raises(InvalidValue, match=rf"the loss of batch {bad}, example 1: must be finite"):
        gate_gradients(two_layers(), batches, breaks)
    assert len(calls) == n_calls


def test_batches_are_numbered_through_however_often_one_looks():
    """With ``until=`` batches are read chunk by chunk."""
    batches = [torch.randn(3, 5, 16) for _ in range(8)]

    def breaks(model, x):
        return squared(model, x) * (torch.nan if torch.equal(x, batches[6]) else 1)

    stable = hp.Stable(k=2, first=6, growth=1.5)
    with pytest.raises(InvalidValue, match=r"the loss of batch 6, example 0: must be finite"):
        hp.score(two_layers(), batches, "taylor", loss=breaks, until=stable, progress=False)


@pytest.mark.parametrize("mixed", [False, True], ids=["bf16 weights", "autocast"])
def test_gate_gradients_of_a_bf16_pass_are_fp32(mixed):
    subject = subject_of("bert")
    exact = gate_gradients(subject.copy(), [subject.batch])
    narrow = subject.copy().float() if mixed else subject.copy().bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        found = gate_gradients(narrow, [subject.batch])
    more_digits = found != found.bfloat16().double()
    assert float(more_digits.float().mean()) > 0.9, "more digits than bf16 has"
    assert not torch.equal(found, exact), "the pass must have been in bf16"
    assert_close(found, exact, rtol=0, atol=0.05 * float(exact.abs().max()))
