"""learned_gates: what is drawn is what ``gated`` would do with it, in one's own loop and in the
Trainer; no trace."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.gating import HardConcrete, SubsetTopk
from headprune.gating.learned import LearnedGates, generator_of, unit_of_heads
from headprune.gating.stochastic import GateDistribution
from headprune.model.losses import default_loss
from headprune.model.sites import bind
from tests.known.ablation import recall
from tests.known.constructed import NECESSARY, constructed
from tests.known.induction import examples, loss
from tests.laws.support import CLOSE, EXACT, Subject, no_dropout, objective, picture, subject_of

NAMES = ["bert", "llama", "t5", "multi_head_attention"]
SOFT = [HardConcrete(keep=0.5, warmup=3, start=0.5, temperature=1.0), SubsetTopk(keep=0.5, steps=4)]


@pytest.fixture(params=NAMES)
def each(request: pytest.FixtureRequest) -> Subject:
    return subject_of(request.param)


def drawn(gates: LearnedGates, subject: Subject, number: int) -> dict[str, Tensor]:
    """The gates of forward ``number``, from the distribution's own functions, as ``gated`` takes
    them."""
    bound = bind(subject.model, subject.sites)
    sizes = torch.tensor([len(u) for b in bound for u in b.site.units], dtype=torch.float64)
    noise = gates.distribution.noise(len(sizes), generator_of(gates.seed, number))
    flat = gates.distribution.sample(gates.weights, noise, sizes, number)
    parts = flat.split([len(b.site.units) for b in bound])
    return {b.site.name: part[unit_of_heads(b)] for b, part in zip(bound, parts, strict=True)}


def training(model: nn.Module) -> nn.Module:
    """In training mode as gates see it, without dropout, which T5 has in its functions too."""
    model.eval().training = True
    return model


# ---------------------------------------------------------------- what a forward does


@pytest.mark.parametrize("dist", SOFT, ids=lambda d: d.name)
def test_a_training_forward_is_gated_by_what_was_drawn(
    each: Subject, dist: GateDistribution
) -> None:
    training(each.model)
    whole = each.run()
    with hp.learned_gates(each.model, dist, seed=3) as gates:
        with torch.no_grad():
            gates.weights += torch.randn(
                gates.weights.shape, generator=torch.Generator().manual_seed(0)
            )
        found = [each.run() for _ in range(2)]
        slopes = torch.autograd.grad(objective(found[1]), gates.weights)
        assert gates.n_forwards == 2
        assert gates.n_examples == 2 * len(next(iter(each.batch.values())))
    expected = []
    for number in range(2):
        with hp.gated(each.model, drawn(gates, each, number)):
            expected.append(each.run())
    assert_close(found[0], expected[0], **EXACT)
    assert_close(found[1], expected[1], **EXACT)
    assert (found[0] - found[1]).abs().max() > 1e-4
    assert (found[0] - whole).abs().max() > 1e-4
    assert_close(slopes, torch.autograd.grad(objective(expected[1]), gates.weights), **CLOSE)
    assert float(slopes[0].abs().max()) > 1e-6


def test_heads_of_a_group_share_a_gate_unless_the_policy_frees_them() -> None:
    subject = subject_of("llama")
    assert any(len(u) > 1 for s in subject.sites for u in s.units)
    for policy in ("group", "balanced", "free"):
        sites = hp.find_sites(subject.model, policy=policy)
        with hp.learned_gates(subject.model, SOFT[0], sites) as gates:
            assert len(gates.weights) == sum(len(s.units) for s in sites)
            with torch.no_grad():
                gates.weights += torch.randn(gates.weights.shape)
            gates.n_forwards, gates._penalty_used = 1, True
            scores = gates.scores()
        plan = hp.select(scores, hp.Budget(keep_heads=0.5))
        for site in sites:
            site.check(plan.mask.kept(site.name))


@pytest.mark.parametrize("dist", SOFT, ids=lambda d: d.name)
def test_evaluation_is_deterministic_and_does_not_count(
    each: Subject, dist: GateDistribution
) -> None:
    each.model.eval()
    with hp.learned_gates(each.model, dist) as gates:
        with torch.no_grad():
            gates.weights += torch.randn(
                gates.weights.shape, generator=torch.Generator().manual_seed(0)
            )
        found = [each.run() for _ in range(2)]
        table = dict(
            zip([s.name for s in each.sites], gates.by_site(gates.evaluated()), strict=True)
        )
        assert gates.n_forwards == 0
    assert_close(found[0], found[1], **EXACT)
    with hp.gated(each.model, table):
        assert_close(found[0], each.run(), **EXACT)
    if isinstance(dist, SubsetTopk):
        assert {float(g) for row in table.values() for g in row} == {0.0, 1.0}


def test_draws_have_a_seed_and_a_generator_of_their_own() -> None:
    subject = subject_of("bert")
    no_dropout(subject.model).train()
    state, found = torch.get_rng_state(), []
    for seed in (0, 0, 1):
        with hp.learned_gates(subject.model, SOFT[0], seed=seed):
            found.append(subject.run())
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(found[0], found[1], **EXACT)
    assert (found[0] - found[2]).abs().max() > 1e-4


# ---------------------------------------------------------------- nothing remains


def test_nothing_remains(each: Subject) -> None:
    each.model.train()
    before, text = picture(each.model), repr(each.model)
    with hp.learned_gates(each.model, SOFT[0]) as gates:
        objective(each.run()).backward()
        assert repr(each.model) == text
        assert not set(map(id, gates.parameters())) & set(map(id, each.model.parameters()))
    assert picture(each.model) == before


def test_nothing_remains_after_an_exception(each: Subject) -> None:
    before = picture(each.model)
    with pytest.raises(ZeroDivisionError), hp.learned_gates(each.model, SOFT[1]):
        each.run().detach() / (1 // 0)
    with (
        pytest.raises(InvalidValue, match="some of the"),
        hp.learned_gates(each.model, SubsetTopk(keep=999, steps=1)),
    ):
        pass
    assert picture(each.model) == before


def test_a_copy_made_inside_has_no_gates(tmp_path: Path) -> None:
    subject = subject_of("bert")
    expected = subject.run()
    with hp.learned_gates(subject.model, SOFT[1]):
        twin = copy.deepcopy(subject.model)
        assert (subject.run() - expected).abs().max() > 1e-4
        assert_close(subject.run(twin), expected, **EXACT)
        subject.model.save_pretrained(tmp_path)
    assert type(twin) is type(subject.model)
    assert not any("headprune" in k for m in twin.modules() for k in m.__dict__)
    loaded = type(twin).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert_close(subject.run(loaded), expected, **EXACT)


def test_gates_multiply_with_those_of_gated() -> None:
    subject = subject_of("bert")
    mask = subject.ragged()
    with hp.learned_gates(subject.model, SOFT[0]) as gates, hp.gated(subject.model, mask):
        both = subject.run()
        table = dict(
            zip([s.name for s in subject.sites], gates.by_site(gates.evaluated()), strict=True)
        )
    with hp.gated(subject.model, mask), hp.gated(subject.model, table):
        assert_close(both, subject.run(), **CLOSE)


# ---------------------------------------------------------------- one's own loop


@pytest.mark.parametrize(
    "dist", [HardConcrete(keep=2, warmup=30), SubsetTopk(keep=2, steps=100)], ids=lambda d: d.name
)
def test_necessary_heads_are_found_and_the_rest_can_go(dist: GateDistribution) -> None:
    model = constructed().requires_grad_(False).train()
    with hp.learned_gates(model, dist) as gates:
        optimizer = torch.optim.Adam(gates.parameters(), lr=0.15)
        for step in range(120):
            total = loss(model, examples(8, 100 + step)).mean() + gates.penalty()
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
    scores = gates.scores(examples(2, 0), loss)
    assert recall(scores, NECESSARY) == 1.0
    assert (gates.n_open, scores.n_examples, scores.scorer, scores.seed) == (2, 960, dist.name, 0)
    assert round(gates.expected_open()) == 2
    assert scores.costs is not None
    assert dict(scores.settings)["keep"] == 2
    assert "2 of 10 heads" in scores.notes[0] or "2 with P(open)" in scores.notes[0]
    plan = hp.select(scores, hp.Budget(keep_heads=gates.n_open))
    assert set(plan.mask) == set(NECESSARY)
    assert plan.model == scores.model
    assert hp.HeadScores.from_json(scores.to_json()) == scores
    model.eval()
    with hp.gated(model, plan):
        assert float(loss(model, examples(50, 5)).max()) < 0.02


def test_training_goes_on_from_a_state(each: Subject) -> None:
    training(each.model)

    def train(gates: LearnedGates, steps: int) -> None:
        for _ in range(steps):
            gates.zero_grad()
            (objective(each.run()) + gates.penalty()).backward()
            with torch.no_grad():
                for p in gates.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad

    with hp.learned_gates(each.model, SOFT[0]) as gates:
        train(gates, 4)
    with hp.learned_gates(each.model, SOFT[0]) as half:
        train(half, 2)
        state = copy.deepcopy(half.state_dict())
    with hp.learned_gates(each.model, SOFT[0]) as rest:
        rest.load_state_dict(state)
        train(rest, 2)
    assert_close(rest.weights, gates.weights, **EXACT)
    assert rest.n_forwards == 4
    assert rest.scores().values == gates.scores().values


def test_a_result_of_gates_that_were_not_trained_is_refused() -> None:
    subject = subject_of("bert")
    with hp.learned_gates(subject.model, SOFT[0]) as gates:
        with pytest.raises(InvalidValue, match=r"no training forward.*model\.train\(\)"):
            gates.scores()
        subject.model.train()
        subject.run()
        with pytest.raises(InvalidValue, match=r"penalty\(\) never called.*Add gates\.penalty"):
            gates.scores()
        gates.penalty()
        with pytest.raises(
            InvalidValue,
            match=r"as at first, after 1 forwards.*gates\.parameters\(\) to the optimizer",
        ):
            gates.scores()
        with torch.no_grad():
            gates.weights[0] += 1
        assert "Still warming up: 1 of 3" in " ".join(gates.scores().notes)
    subject.model.eval()
    with hp.learned_gates(subject.model, SOFT[1]) as gates:
        subject.model.train()
        subject.run()
        with torch.no_grad():
            gates.weights[0] += 1
        assert "Still annealing: 1 of 4" in " ".join(gates.scores().notes), (
            "this one has no penalty"
        )


def test_a_cut_model_is_gated_where_it_has_heads() -> None:
    subject = subject_of("bert")
    first = subject.sites[0].name
    hp.prune_(subject.model, subject.without({first: range(4), subject.sites[1].name: [0]}))
    no_dropout(subject.model).train()
    with hp.learned_gates(subject.model, SOFT[0]) as gates:
        (objective(subject.run()) + gates.penalty()).backward()
        assert gates.weights.grad is not None
        assert bool((gates.weights.grad != 0).any())
        with torch.no_grad():
            gates.weights -= gates.weights.grad
    assert [(s.name, s.heads) for s in gates.scores().sites] == [
        (subject.sites[1].name, (1, 2, 3)),
        (subject.sites[2].name, (0, 1, 2, 3)),
    ]


# ---------------------------------------------------------------- compiled, checkpointed, narrow


def run_of(target: nn.Module, subject: Subject) -> list[Tensor]:
    """Losses of three steps of the gates, and the evaluated output."""
    found = []
    with hp.learned_gates(target, SubsetTopk(keep=6, steps=5)) as gates:
        no_dropout(target).train()
        optimizer = torch.optim.Adam(gates.parameters(), lr=0.1)
        for _ in range(3):
            total = objective(target(**subject.batch).logits)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            found.append(total.detach())
        target.eval()
        found.append(subject.run(target))
    assert gates.n_forwards == 3
    return found


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_meets_the_gates_of_its_forward() -> None:
    plain, subject = subject_of("bert"), subject_of("bert")
    subject.model.gradient_checkpointing_enable()
    assert_close(run_of(subject.model, subject), run_of(plain.model, plain), **CLOSE)


# Dynamo looks at its inputs' .grad, where torch shows this warning only to those who make it an
# error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_models_draw_too() -> None:
    plain, subject = subject_of("bert"), subject_of("bert")
    expected = run_of(plain.model, plain)
    compiled = torch.compile(subject.model, backend="eager")
    compiled(**subject.batch)  # before there were gates
    before = picture(subject.model)
    assert_close(run_of(compiled, subject), expected, **CLOSE)
    no_dropout(subject.model)
    assert [p[:2] for p in picture(subject.model)] == [p[:2] for p in before]
    assert type(compiled).__name__ == "OptimizedModule"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_have_gates_in_fp32(dtype: torch.dtype) -> None:
    model, batch = subject_of("bert").layout.tiny(0)
    no_dropout(model).to(dtype).train()
    with hp.learned_gates(model, SOFT[0]) as gates:
        assert gates.weights.dtype == torch.float32
        total = model(**batch).loss + gates.penalty()
        total.backward()
    assert gates.weights.grad is not None
    assert bool(torch.isfinite(gates.weights.grad).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_draws_are_those_of_the_cpu() -> None:
    subject, other = subject_of("bert"), subject_of("bert")
    other.model.cuda()
    other.batch = {k: v.cuda() for k, v in other.batch.items()}
    for here, there in zip(run_of(subject.model, subject), run_of(other.model, other), strict=True):
        assert_close(there.cpu(), here, rtol=1e-8, atol=1e-8)


# ---------------------------------------------------------------- the Trainer


def trainer_of(
    model: nn.Module, gates: LearnedGates, folder: Path, rows: list[Any], steps: int, **more: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    groups = [{"params": model.parameters()}, {"params": gates.parameters(), "lr": 0.5}]
    settings = {
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **more,
    }
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=8,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        dataloader_pin_memory=False,
        **settings,
    )
    optimizer = torch.optim.SGD(groups, lr=0.01)
    return Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        compute_loss_func=gates.trainer_loss,
        optimizers=(optimizer, None),
    )


def rows_of(subject: Subject) -> list[dict[str, Tensor]]:
    return [{k: v[i % 3] for k, v in subject.batch.items()} for i in range(8)]


@pytest.mark.parametrize("dist", SOFT, ids=lambda d: d.name)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_takes_the_same_steps_as_a_loop(
    dist: GateDistribution, accumulate: int, tmp_path: Path
) -> None:
    ours, theirs = subject_of("bert"), subject_of("bert")
    rows = rows_of(ours)
    before = [type(m) for m in theirs.model.modules()]
    with hp.learned_gates(no_dropout(theirs.model), dist) as gates, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more = {"gradient_accumulation_steps": accumulate}
        trainer = trainer_of(theirs.model, gates, tmp_path, rows, 4 // accumulate, **more)
        trainer.loss_is_scaled_for_ga = False
        collate, order = trainer.data_collator, []
        trainer.data_collator = lambda some: order.append(collate(some)) or dict(order[-1])
        trainer.train()
        trainer.data_collator = collate
        found = trainer.evaluate()["eval_loss"]
    with hp.learned_gates(no_dropout(ours.model).train(), dist) as expected:
        optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.01)
        optimizer.add_param_group({"params": list(expected.parameters()), "lr": 0.5})
        for number, batch in enumerate(order):
            total = default_loss(ours.model, batch).mean() + expected.penalty()
            (total / accumulate).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        ours.model.eval()
        whole = collate(rows)
        plain = default_loss(ours.model, whole).mean()
    assert len(order) == gates.n_forwards == 4
    assert_close(gates.weights, expected.weights, **CLOSE)
    assert_close(
        dict(theirs.model.named_parameters()), dict(ours.model.named_parameters()), **CLOSE
    )
    assert_close(found, plain.item(), rtol=1e-6, atol=0)  # no penalty in evaluation
    assert gates.scores().n_examples == 8
    assert [type(m) for m in theirs.model.modules()] == before


def test_the_trainers_loss_needs_labels() -> None:
    subject = subject_of("bert")
    with (
        hp.learned_gates(subject.model, SOFT[0]) as gates,
        pytest.raises(InvalidValue, match="must be the labels of the batch"),
    ):
        gates.trainer_loss({}, None)


# ---------------------------------------------------------------- refusals


def test_what_cannot_be_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("bert")
    model: Any = subject.model
    with pytest.raises(
        InvalidValue, match=r"a gate distribution, got 'hard_concrete'.*hp\.gating\.HardConcrete"
    ):
        hp.learned_gates(model, "hard_concrete").__enter__()  # type: ignore[arg-type]
    with (
        hp.learned_gates(model, SOFT[0]),
        pytest.raises(InvalidValue, match="one block at a time"),
        hp.learned_gates(model, SOFT[0]),
    ):
        pass
    with hp.learned_gates(model, SOFT[0]):
        replica = model._replicate_for_data_parallel()
        with pytest.raises(UnsupportedModel, match="DataParallel"):
            replica(**subject.batch)
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        with pytest.raises(UnsupportedModel, match="one process"):
            hp.learned_gates(model, SOFT[0]).__enter__()
    hp.prune_(model, subject.without({s.name: range(4) for s in subject.sites}))
    with pytest.raises(UnsupportedModel, match="no head at any site"):
        hp.learned_gates(model, SOFT[0]).__enter__()
