"""Scores against literal loops and finite differences; what a call leaves behind; what it says when
it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.model.costs import measure_costs
from headprune.model.losses import default_loss
from headprune.model.running import batch_size, call
from headprune.model.sites import bind
from headprune.scoring import LeaveOneOut, Magnitude, Random, Taylor, gate_gradients
from headprune.scoring._base import Estimate, Scorer, ScoringProblem
from tests.laws.support import Subject, logits, picture, subject_of
from tests.laws.support import examples_of as data
from tests.reference import scores as reference

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """For a model without a Transformers head."""
    return call(model, batch).logsumexp(-1).square()


def loss_of(subject: Subject) -> Callable[[nn.Module, Any], Tensor]:
    return default_loss if hasattr(subject.model, "config") else own_loss


def split(batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
    return [
        {k: v[i : i + size] for k, v in batch.items()}
        for i in range(0, reference.n_examples(batch), size)
    ]


def score(subject: Subject, scorer: Any, batches: Any = None, **options: Any) -> Any:
    return hp.score(
        subject.model,
        batches or [subject.batch],
        scorer,
        loss=loss_of(subject),
        progress=False,
        **options,
    )


def flat(scores: Any, errors: bool = False) -> Tensor:
    rows = scores.standard_errors if errors else scores.values
    return torch.tensor([v for row in rows for v in row], dtype=torch.float64)


# ---------------------------------------------------------------- the matrix of gate gradients


def test_gate_gradients_are_central_differences(subject: Subject) -> None:
    loss = loss_of(subject)
    found = gate_gradients(subject.model, [subject.batch], loss)
    slow = reference.central_differences(
        subject.model, subject.batch, loss, subject.sites, step=1e-4
    )
    assert found.dtype == torch.float64
    assert found.abs().max() > 1e-3
    # The truncation error of a central difference is of order step².
    assert_close(found, reference.by_unit(slow, subject.sites), rtol=1e-5, atol=1e-7)


def test_the_three_routes_agree(subject: Subject) -> None:
    loss = loss_of(subject)
    gate = gate_gradients(subject.model, [subject.batch], loss)
    context = reference.context_route(subject.model, subject.batch, loss, subject.sites).sum(1)
    weight = reference.weight_route(subject.model, subject.batch, loss, subject.sites)
    assert_close(gate, reference.by_unit(context, subject.sites), **EXACT)
    assert_close(gate, reference.by_unit(weight, subject.sites), **EXACT)


@pytest.mark.parametrize("name", ["llama", "multi_head_attention"])
def test_a_group_is_the_sum_of_its_signed_members(name: str) -> None:
    subject = subject_of(name)
    heads = reference.context_route(
        subject.model, subject.batch, loss_of(subject), subject.sites
    ).sum(1)
    signed = reference.by_unit(heads, subject.sites)
    unsigned = reference.by_unit(heads.abs(), subject.sites)
    assert not torch.allclose(signed.abs(), unsigned), (
        "members must cancel somewhere, or the test shows nothing"
    )
    assert_close(flat(score(subject, "taylor")), signed.abs().mean(0), **EXACT)


def test_gradients_on_a_cut_model_are_those_of_the_gated_one(subject: Subject) -> None:
    mask, loss = subject.ragged(), loss_of(subject)
    with hp.gated(subject.model, mask):
        gated = gate_gradients(subject.model, [subject.batch], loss)
    pruned = subject.copy()
    hp.prune_(pruned, mask)
    kept = torch.tensor([set(u) <= set(mask.kept(s.name)) for s in subject.sites for u in s.units])
    assert_close(gate_gradients(pruned, [subject.batch], loss), gated[:, kept], **EXACT)
    assert_close(gated[:, ~kept], torch.zeros_like(gated[:, ~kept]), rtol=0, atol=0)


# ---------------------------------------------------------------- taylor


@pytest.mark.parametrize("normalize", ["none", "l2"])
@pytest.mark.parametrize("reduce", ["example", "token", "batch", "signed"])
def test_taylor_is_its_formula(subject: Subject, reduce: str, normalize: str) -> None:
    loss, batch = loss_of(subject), data(subject, 5)
    block = {"block": 2} if reduce == "batch" else {}
    found = score(subject, Taylor(reduce=reduce, normalize=normalize, **block), split(batch, 3))
    tokens = reference.by_unit(
        reference.context_route(subject.model, batch, loss, subject.sites), subject.sites
    )
    sizes = [len(s.units) for s in subject.sites]
    values, errors = reference.taylor(tokens.sum(1), tokens, sizes, reduce, normalize, 2)
    assert found.n_examples == 5
    assert_close(flat(found), torch.tensor(values, dtype=torch.float64), **EXACT)
    assert_close(flat(found, errors=True), torch.tensor(errors, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize(
    "scorer", [Taylor(), Taylor(reduce="token"), Taylor(normalize="l2"), LeaveOneOut()], ids=repr
)
def test_one_example_has_no_standard_error(scorer: Any) -> None:
    subject = subject_of("bert")
    found = score(subject, scorer, [reference.example(subject.batch, 0)])
    assert found.n_examples == 1
    assert found.standard_errors is None


def test_a_scorer_of_yours_that_says_nothing_of_its_error() -> None:
    @dataclass(frozen=True)
    class Own(Scorer):
        def estimate(self, problem: ScoringProblem) -> Estimate:
            rows = problem.rows("own", lambda number, batch: torch.ones(batch_size(batch), 12))
            return Estimate(rows.mean(0), n_examples=len(rows))

    subject = subject_of("bert")
    one = {k: v[:1] for k, v in subject.batch.items()}
    assert score(subject, Own(), [one]).notes == (
        "No standard error: the scores rest on a single example.",
    )
    assert score(subject, Own(), [subject.batch]).notes == ()


def test_one_block_has_no_standard_error() -> None:
    found = score(subject_of("bert"), Taylor(reduce="batch"))
    assert (found.n_examples, found.standard_errors) == (3, None)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_blocks_are_fixed_whatever_the_batch_size(size: int) -> None:
    subject = subject_of("bert")
    batch = data(subject)
    gradients = gate_gradients(subject.model, [batch])
    values, errors = reference.taylor(gradients, gradients[:, None], [4, 4, 4], "batch", "none", 3)
    found = score(subject, Taylor(reduce="batch", block=3), split(batch, size))
    assert_close(flat(found), torch.tensor(values, dtype=torch.float64), **EXACT)
    assert_close(flat(found, errors=True), torch.tensor(errors, dtype=torch.float64), **EXACT)
    in_one = reference.taylor(gradients, gradients[:, None], [4, 4, 4], "batch", "none", 7)[0]
    assert not torch.allclose(flat(found), torch.tensor(in_one, dtype=torch.float64))


@pytest.mark.parametrize(
    "settings", [{"reduce": "mean"}, {"normalize": "l1"}, {"block": 0}, {"block": 4}], ids=str
)
def test_taylor_refuses_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=r"Taylor\." + next(iter(settings))):
        Taylor(**settings)


# ---------------------------------------------------------------- leave one out


def test_leave_one_out_is_the_loss_with_the_head_masked(subject: Subject) -> None:
    batch = data(subject, 4)
    found = score(subject, "leave_one_out", split(batch, 3))
    values, errors = reference.mean_and_error(
        reference.leave_one_out(subject.model, batch, loss_of(subject), subject.sites)
    )
    assert max(map(abs, values)) > 1e-3
    assert_close(flat(found), torch.tensor(values, dtype=torch.float64), **EXACT)
    assert_close(flat(found, errors=True), torch.tensor(errors, dtype=torch.float64), **EXACT)


def test_leave_one_out_is_the_loss_after_physical_removal(subject: Subject) -> None:
    found, loss = score(subject, "leave_one_out"), loss_of(subject)
    before = loss(subject.model, subject.batch).mean()
    for unit in found.units():
        pruned = subject.copy()
        hp.prune_(pruned, subject.without({unit.name: unit.heads}))
        rise = loss(pruned, subject.batch).mean() - before
        assert_close(torch.tensor(unit.value, dtype=torch.float64), rise.detach(), **EXACT)


def test_scores_of_a_cut_model_go_by_original_indices(subject: Subject) -> None:
    """Heads have moved: the head at position 0 need not be head 0."""
    gone = {s.name: s.units[0] for s in subject.sites}
    hp.prune_(subject.model, subject.without(gone))
    sites, loss = hp.find_sites(subject.model), loss_of(subject)
    assert all(s.heads[0] != 0 for s in sites)
    ablated, magnitude = score(subject, ["leave_one_out", "magnitude"])
    slow, _ = reference.mean_and_error(
        reference.leave_one_out(subject.model, subject.batch, loss, sites)
    )
    assert_close(flat(ablated), torch.tensor(slow, dtype=torch.float64), **EXACT)
    full = hp.score(subject_of(subject.layout.name).model, scorer="magnitude")
    for unit in magnitude.units():
        head = hp.HeadId(unit.name, unit.heads[0])
        assert unit.value == pytest.approx(full[head], rel=1e-12)
        assert ablated[head] == ablated[hp.HeadId(unit.name, unit.heads[-1])]


# ---------------------------------------------------------------- scorers without data


def test_magnitude_is_the_product_of_the_norms(subject: Subject) -> None:
    """Norms taken by zeroing everything but the head, through the module's own weights."""
    found = hp.score(subject.model, scorer="magnitude")
    assert (found.n_examples, found.data, found.costs, found.standard_errors) == (
        0,
        None,
        None,
        None,
    )
    for site, row in zip(subject.sites, found.values, strict=True):
        module, gate = (
            subject.model.get_submodule(site.name),
            reference.projection(subject.model, site),
        )
        for unit, value in zip(site.units, row, strict=True):
            out = gate.weight.T if hasattr(gate, "nf") else gate.weight
            norm_o = torch.cat([out[:, reference.columns(site, h)] for h in unit], 1).norm()
            norm_v = torch.cat(
                [value_rows(module, site, g) for g in {h // site.group_size for h in unit}]
            ).norm()
            assert_close(
                torch.tensor(value, dtype=torch.float64), (norm_v * norm_o).detach(), **EXACT
            )


def value_rows(module: Any, site: Any, group: int) -> Tensor:
    """W_V of one key/value head ``[value_dim, width]``, by the names that the families use."""
    rows = slice(group * site.value_dim, (group + 1) * site.value_dim)
    if site.layout == "gpt2":
        return module.c_attn.weight.T[2 * module.split_size :][rows]
    names = {"bert": "self.value", "multi_head_attention": "W_v"}
    if site.layout not in names and not hasattr(module, "v_proj"):
        pytest.skip(f"this test does not know where {site.layout} keeps its values")
    return module.get_submodule(names.get(site.layout, "v_proj")).weight[rows]


@pytest.mark.parametrize("layout", ["head_list", "head_list_bare"])
def test_magnitude_of_heads_that_are_modules_is_that_of_all_their_weights(layout: str) -> None:
    subject = subject_of(layout)
    found = hp.score(subject.model, scorer="magnitude", sites=subject.sites)
    for site, row in zip(subject.sites, found.values, strict=True):
        module = subject.model.get_submodule(site.name)
        for unit, value in zip(site.units, row, strict=True):
            own = torch.cat(
                [p.flatten() for h in unit for p in module.heads[h].parameters()]
            ).norm()
            if layout == "head_list":
                own = (
                    own
                    * torch.cat(
                        [module.proj.weight[:, reference.columns(site, h)] for h in unit], 1
                    ).norm()
                )
            assert_close(torch.tensor(value, dtype=torch.float64), own.detach(), **EXACT)


def test_random_is_seeded_and_its_own() -> None:
    model = subject_of("bert").model
    state = torch.get_rng_state()
    first, again, other = (hp.score(model, scorer=s) for s in ("random", Random(), Random(seed=1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.values == again.values != other.values
    assert (first.seed, other.seed) == (0, 1)
    assert len({v for row in first.values for v in row}) == 12


# ---------------------------------------------------------------- the model is left as it was found


def mixed(subject: Subject) -> nn.Module:
    """A model with a state of its own in everything that a scorer might touch."""
    model = subject.model.train()
    for number, module in enumerate(model.modules()):
        module.training = number % 3 != 0
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
        if number % 4 == 0:
            parameter.grad = torch.full_like(parameter, 0.5)
    return model


def grads(model: nn.Module) -> list[Any]:
    return [
        (p.requires_grad, p.grad, None if p.grad is None else p.grad.clone())
        for p in model.parameters()
    ]


def assert_untouched(model: nn.Module, before: list[Any], old: list[Any], state: Tensor) -> None:
    assert picture(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    for (needed, grad, copied), (was_needed, was_grad, was_copied) in zip(
        grads(model), old, strict=True
    ):
        assert needed == was_needed
        assert grad is was_grad
        if copied is not None:
            assert_close(copied, was_copied, rtol=0, atol=0)


SCORERS: list[Any] = [Taylor(), Taylor(reduce="token"), LeaveOneOut(), Magnitude(), Random()]


def test_the_model_is_left_as_it_was(subject: Subject) -> None:
    model = mixed(subject)
    before, old, state = picture(model), grads(model), torch.get_rng_state()
    score(subject, SCORERS)
    assert_untouched(model, before, old, state)


@pytest.mark.parametrize("scorer", SCORERS[:3], ids=repr)
def test_the_model_is_left_as_it_was_after_an_error(subject: Subject, scorer: Any) -> None:
    model, loss, calls = mixed(subject), loss_of(subject), []

    def breaks(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return loss(model, batch) * (float("nan") if len(calls) == 3 else 1.0)

    before, old, state = picture(model), grads(model), torch.get_rng_state()
    with pytest.raises(InvalidValue, match="finite"):
        hp.score(model, [subject.batch] * 2, scorer, loss=breaks, progress=False)
    assert len(calls) == 3
    assert_untouched(model, before, old, state)


def test_dropout_plays_no_part() -> None:
    for name in ("bert", "gpt2"):
        subject = subject_of(name)
        expected = [flat(s) for s in score(subject, SCORERS[:3])]
        subject.model.train()
        assert not torch.equal(subject.run(), subject.run()), (
            "dropout must be on, or the test shows nothing"
        )
        for found, value in zip(score(subject, SCORERS[:3]), expected, strict=True):
            assert_close(flat(found), value, rtol=0, atol=0)


# ---------------------------------------------------------------- data


class Counted:
    """An iterable that counts how often it is gone through."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.passes = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.batches)


def once(batches: list[Any]) -> Iterator[Any]:
    yield from batches


def test_a_generator_is_read_whole() -> None:
    subject = subject_of("bert")
    batches = split(data(subject), 3)
    for scorer in ("taylor", "leave_one_out", Taylor(reduce="token")):
        expected = score(subject, scorer, batches)
        found = score(subject, scorer, once(batches))
        assert (found.n_examples, found.data) == (7, expected.data)
        assert_close(flat(found), flat(expected), rtol=0, atol=0)


def test_several_scorers_read_one_generator() -> None:
    subject = subject_of("bert")
    batches = split(data(subject), 3)
    alone = [score(subject, s, batches) for s in SCORERS]
    together = score(subject, SCORERS, once(batches))
    assert isinstance(together, tuple)
    assert together == tuple(alone)


def test_several_scorers_share_their_passes() -> None:
    subject, runs = subject_of("bert"), []
    batches = Counted(split(data(subject), 3))
    handle = subject.model.register_forward_hook(lambda *_: runs.append(1))
    sharing = [Taylor(), Taylor(reduce="signed"), Taylor(normalize="l2"), Taylor(reduce="batch")]
    score(subject, sharing, batches)
    assert len(runs) == 1 + 1 + 3, (
        "one to measure what the model costs, one for its own loss, one a batch"
    )
    assert batches.passes == 1, "the costs are measured on a batch of the same pass"
    runs.clear()
    score(subject, [*sharing, LeaveOneOut(replay=False), "magnitude"], batches)
    assert len(runs) == 1 + 1 + 3 + 3 * (1 + 12)
    handle.remove()


class Changing:
    """An iterable that gives other batches each time, as a DataLoader that shuffles does."""

    def __init__(self, *passes: list[Any]) -> None:
        self.passes = iter(passes)

    def __iter__(self) -> Iterator[Any]:
        return iter(next(self.passes))


def test_batches_that_change_between_passes_are_refused() -> None:
    """Rows of several passes are put together: scores of other examples side by side, or their
    differences."""
    subject = subject_of("bert")
    batches = split(data(subject), 3)
    for second, words in (
        (batches[::-1], "others from batch 0 on"),
        ([batches[0], batches[2], batches[1]], "others from batch 1 on"),
        (batches[:2], "2 batches after 3"),
        ([*batches, batches[0]], "others from batch 3 on"),
    ):
        loader = Changing(batches, second)
        with pytest.raises(
            InvalidValue,
            match=rf"batches: must be the same in every pass.*{words}.*does not shuffle",
        ):
            score(subject, ["taylor", LeaveOneOut(replay=False)], loader)
    with pytest.raises(
        InvalidValue, match="batches: must be readable more than once, got a Changing whose batches"
    ):
        score(subject, ["taylor", LeaveOneOut(replay=False)], Changing(batches, []))
    generator = torch.Generator().manual_seed(0)
    rows = [reference.example(data(subject), i) for i in range(7)]
    loader = torch.utils.data.DataLoader(
        rows, 1, shuffle=True, generator=generator, collate_fn=lambda r: r[0]
    )
    with pytest.raises(InvalidValue, match="the same in every pass"):
        score(subject, hp.scoring.Shapley(orders=1), loader)
    assert score(subject, "taylor", loader).n_examples == 7, "one pass may read in any order"
    both = score(subject, ["taylor", "fisher"], loader)
    assert both[0].data == both[1].data
    same = Counted(batches)
    score(subject, ["taylor", LeaveOneOut(replay=False)], same)
    assert same.passes == 2


def test_costs_are_measured_on_one_example() -> None:
    subject = subject_of("bert")
    sizes: list[int] = []
    handle = subject.model.register_forward_hook(
        lambda m, a, k, o: sizes.append(len(k["input_ids"])), with_kwargs=True
    )
    found = score(subject, "taylor", [data(subject)])
    assert sizes == [
        1,
        7,
        7,
    ], "one for the costs, one for the model's own loss, one for the gradients"
    handle.remove()
    assert found.costs == score(subject, "taylor", split(data(subject), 1)).costs


def test_a_loss_that_needs_several_examples_is_costed_on_the_batch() -> None:
    subject, sizes = subject_of("bert"), []

    def paired(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(reference.n_examples(batch))
        if sizes[-1] < 2:
            raise ValueError("a single example")
        return default_loss(model, batch)

    found = hp.score(subject.model, [data(subject)], loss=paired, progress=False)
    assert sizes == [1, 7, 7]
    assert found.costs == score(subject, "taylor", [data(subject)]).costs


def test_costs_of_models_whose_tokens_come_first_are_those_of_their_length() -> None:
    subject = subject_of("labml")
    found = hp.score(subject.model, [subject.batch], "magnitude", progress=False)
    whole = measure_costs(subject.model, bind(subject.model), subject.batch)
    assert found.costs == whole
    assert whole.length > 1


@pytest.mark.parametrize("parametrised", [True, False], ids=["parametrised", "legacy"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_weight_norm_is_scored_and_costed(parametrised: bool) -> None:
    norm = nn.utils.parametrizations.weight_norm if parametrised else nn.utils.weight_norm
    subject = subject_of("bert")
    plain = score(subject, "taylor")
    attention = subject.model.bert.encoder.layer[0].attention
    norm(attention.output.dense)
    found = score(subject, "taylor")
    assert_close(flat(found), flat(plain), **EXACT)
    assert found.costs is not None
    assert plain.costs is not None
    assert found.costs.units == plain.costs.units
    norm(attention.self.query)
    costs = score(subject, "taylor").costs
    assert costs is not None
    # A head's rows of the query projection have a norm each.
    per_head = subject.sites[0].head_dim
    assert [c.params - per_head for c in costs.units[0]] == [c.params for c in plain.costs.units[0]]
    assert costs.units[1] == plain.costs.units[1]


def test_weights_that_are_nowhere_are_refused() -> None:
    subject = subject_of("bert")
    subject.model.bert.encoder.layer[1].to("meta")
    words = r"weights are in memory, .*, got bert\.encoder\.layer\.1\..* meta device"
    for scorer in ("taylor", "leave_one_out", "magnitude"):
        with pytest.raises(UnsupportedModel, match=words):
            score(subject, scorer)


def test_ggn_says_that_it_asks_no_loss() -> None:
    subject = subject_of("bert")
    quiet = hp.score(subject.model, [subject.batch], "ggn", progress=False)
    told = hp.score(
        subject.model,
        [subject.batch],
        "ggn",
        loss=lambda m, b: 2 * default_loss(m, b),
        progress=False,
    )
    assert told.values == quiet.values
    assert quiet.notes == ()
    assert told.notes == ("loss= was not asked: ggn reads the output alone.",)


def test_one_scorer_in_a_list_is_a_tuple_of_one() -> None:
    subject = subject_of("vit")
    assert score(subject, ["taylor"]) == (score(subject, "taylor"),)


def test_batches_may_be_tuples_or_tensors() -> None:
    subject = subject_of("multi_head_attention")
    x = subject.batch["x"]
    expected = hp.score(subject.model, [{"x": x}], loss=own_loss, progress=False)
    for batch in (x, (x,), [x, None]):
        assert_close(
            flat(hp.score(subject.model, [batch], loss=own_loss, progress=False)),
            flat(expected),
            rtol=0,
            atol=0,
        )


# ---------------------------------------------------------------- circumstances of the caller


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"]
)
def test_works_where_the_caller_turned_gradients_off(context: Any) -> None:
    subject = subject_of("bert")
    expected = score(subject, SCORERS)
    with context():
        assert score(subject, SCORERS) == expected


def test_works_on_frozen_weights(subject: Subject) -> None:
    expected = score(subject, SCORERS)
    subject.model.requires_grad_(False)
    assert [flat(s).tolist() for s in score(subject, SCORERS)] == [
        flat(s).tolist() for s in expected
    ]
    assert not any(p.requires_grad for p in subject.model.parameters())


def test_works_in_bfloat16(subject: Subject) -> None:
    expected = score(subject, [Taylor(), Taylor(reduce="token"), LeaveOneOut()])
    subject.model.bfloat16()
    subject.batch = {
        k: v.bfloat16() if v.is_floating_point() else v for k, v in subject.batch.items()
    }
    for found, value in zip(
        score(subject, [Taylor(), Taylor(reduce="token"), LeaveOneOut()]), expected, strict=True
    ):
        # bf16 carries 8 bits: a few per cent after three layers, of the largest score.
        assert_close(flat(found), flat(value), rtol=0, atol=0.15 * float(flat(value).abs().max()))


def test_works_on_a_compiled_model() -> None:
    subject = subject_of("bert")
    expected, gradients = score(subject, SCORERS), gate_gradients(subject.model, [subject.batch])
    compiled = torch.compile(subject.model, backend="eager")
    compiled(**subject.batch)
    assert hp.score(compiled, [subject.batch], SCORERS, progress=False) == expected
    assert_close(gate_gradients(compiled, [subject.batch]), gradients, **EXACT)


def test_some_sites_only() -> None:
    subject = subject_of("bert")
    whole, some = score(subject, "taylor"), score(subject, "taylor", sites=subject.sites[1:2])
    assert some.values == whole.values[1:2]
    assert [s.name for s in some.sites] == [subject.sites[1].name]


def test_a_layer_without_heads_has_no_scores(subject: Subject) -> None:
    gone = subject.sites[1].name
    hp.prune_(subject.model, subject.mask({gone: []}))
    for found in score(subject, SCORERS):
        assert [len(row) for row in found.values] == [
            0 if s.name == gone else len(s.units) for s in subject.sites
        ]


# ---------------------------------------------------------------- errors


@pytest.fixture
def bert() -> Subject:
    return subject_of("bert")


def test_a_misspelt_scorer(bert: Subject) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'taylor'"):
        score(bert, "tayler")


@pytest.mark.parametrize("scorer", [3, Taylor, ["taylor", None]], ids=str)
def test_what_is_no_scorer(bert: Subject, scorer: Any) -> None:
    with pytest.raises(InvalidValue, match="a configured scorer or one of the names"):
        score(bert, [scorer] if not isinstance(scorer, list) else scorer)


def test_no_scorer(bert: Subject) -> None:
    with pytest.raises(InvalidValue, match="an empty list"):
        score(bert, [])


def test_nan_names_its_batch_and_example() -> None:
    subject = subject_of("vit")
    bad = {**subject.batch, "pixel_values": subject.batch["pixel_values"].clone()}
    bad["pixel_values"][2, 0, 3, 3] = float("nan")
    for scorer in SCORERS[:3]:
        with pytest.raises(InvalidValue, match=r"batch 1, example 2: must be finite, got nan"):
            score(subject, scorer, [subject.batch, bad])


@pytest.mark.parametrize("batches", [[], ()], ids=str)
def test_no_data(bert: Subject, batches: Any) -> None:
    for given in (batches, once(list(batches))):
        with pytest.raises(InvalidValue, match="at least one batch"):
            hp.score(bert.model, given, "taylor")
    with pytest.raises(InvalidValue, match="given, because"):
        hp.score(bert.model, None, "taylor")


def test_an_empty_batch(bert: Subject) -> None:
    with pytest.raises(InvalidValue, match=r"batch 1: must be one with examples"):
        score(bert, "taylor", [bert.batch, {k: v[:0] for k, v in bert.batch.items()}])


def test_no_labels(bert: Subject) -> None:
    bert.batch.pop("labels")
    for scorer in SCORERS[:3]:
        words = (
            r"with 'labels', got only \['attention_mask', 'input_ids'\].*loss=.*ggn and obs need no"
            r" labels"
        )
        with pytest.raises(InvalidValue, match=words):
            score(bert, scorer)


def test_a_batch_that_is_no_mapping_needs_a_loss() -> None:
    subject = subject_of("vit")
    with pytest.raises(InvalidValue, match=r"a mapping with the model's inputs.*Pass loss="):
        score(subject, "taylor", [subject.batch["pixel_values"]])


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda m, b: m(**b).loss, r"got \[\]"),
        (lambda m, b: m(**b).logits, r"got \[3, 3\]"),
        (lambda m, b: m(**b).loss.item(), "got float"),
        (lambda m, b: logits(m, b).mean(1, keepdim=True), r"got \[3, 1\]"),
    ],
    ids=["mean", "logits", "float", "column"],
)
def test_a_loss_of_the_wrong_shape(bert: Subject, loss: Any, got: str) -> None:
    for scorer in ("taylor", "leave_one_out"):
        with pytest.raises(
            InvalidValue, match=rf"\[3\], one loss per example, {got}.*reduction='none'"
        ):
            hp.score(bert.model, [bert.batch], scorer, loss=loss, progress=False)


def test_a_loss_without_a_graph(bert: Subject) -> None:
    def under_no_grad(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            return default_loss(model, batch)

    for loss in (under_no_grad, lambda m, b: default_loss(m, b).detach()):
        with pytest.raises(InvalidValue, match=r"not detached, not under no_grad"):
            hp.score(bert.model, [bert.batch], "taylor", loss=loss, progress=False)


def test_a_loss_that_does_not_see_a_layer(bert: Subject) -> None:
    def first_layer(model: nn.Module, batch: Any) -> Tensor:
        out = model.bert(
            batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
        )
        return out.hidden_states[1].square().mean((1, 2))

    with pytest.raises(InvalidValue, match=rf"{bert.sites[1].name}.*no dependence on it.*sites="):
        hp.score(bert.model, [bert.batch], "taylor", loss=first_layer, progress=False)
    found = hp.score(
        bert.model, [bert.batch], "taylor", loss=first_layer, sites=bert.sites[:1], progress=False
    )
    assert [len(row) for row in found.values] == [4]


def test_no_head_left(subject: Subject) -> None:
    hp.prune_(subject.model, subject.mask({s.name: [] for s in subject.sites}))
    for scorer in ("taylor", "magnitude"):
        with pytest.raises(UnsupportedModel, match="with a head left"):
            score(subject, scorer)


def test_no_attention() -> None:
    with pytest.raises(UnsupportedModel, match="no attention-like module"):
        hp.score(nn.Linear(2, 2), [torch.ones(1, 2)])


def test_the_scores_know_the_model_and_the_data() -> None:
    subject = subject_of("bert")
    found = score(subject, "taylor")
    other = dataclasses.replace(subject, model=subject.copy())
    with torch.no_grad():
        next(other.model.parameters()).mul_(1.5)
    changed = score(other, "taylor")
    assert found.model.structure == changed.model.structure
    assert found.model.weights != changed.model.weights
    assert found.data == changed.data
    assert found.data != score(subject, "taylor", [reference.example(subject.batch, 0)]).data
    assert found.costs is not None
    assert found.costs.length == 7


def test_a_single_batch_in_place_of_a_list_is_refused() -> None:
    subject = subject_of("bert")
    for batch in (subject.batch, subject.batch["input_ids"]):
        with pytest.raises(
            InvalidValue, match=r"batches: must be an iterable of batches.*Wrap a single batch"
        ):
            hp.score(subject.model, batch)


def test_the_room_lists_its_scorers() -> None:
    assert {"Taylor", "LeaveOneOut", "Magnitude", "Random", "gate_gradients"} <= set(
        dir(hp.scoring)
    )
