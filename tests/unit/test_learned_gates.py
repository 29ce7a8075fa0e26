"""learned_gates: what is drawn is what ``gated`` would do with it, in one's own loop and in the
Trainer; no trace."""

import copy
import warnings

import pytest
import torch
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.gating import HardConcrete, SubsetTopk
from headprune.gating.learned import generator_of, unit_of_heads
from headprune.model.losses import default_loss
from headprune.model.sites import bind
from tests.known.ablation import recall
from tests.known.constructed import NECESSARY, constructed
from tests.known.induction import examples, loss
from tests.laws.support import CLOSE, EXACT, no_dropout, objective, picture, subject_of, unchanged

HARD = HardConcrete(keep=0.5, warmup=3, start=0.5, temperature=1.0)
TOP = SubsetTopk(keep=0.5, steps=4)
#: Each layout once, each distribution twice.
PAIRS = [("bert", TOP), ("llama", HARD), ("t5", HARD), ("multi_head_attention", TOP)]
each = pytest.mark.parametrize(("name", "dist"), PAIRS, ids=lambda x: getattr(x, "name", x))


def shake_(gates):
    with torch.no_grad():
        gates.weights += torch.randn(gates.weights.shape)


def table_of(gates, subject, flat):
    """Gates by site, as ``gated`` takes them."""
    return dict(zip([s.name for s in subject.sites], gates.by_site(flat), strict=True))


def drawn(gates, subject, number):
    """The gates of forward ``number``, from the distribution's own functions."""
    bound = bind(subject.model, subject.sites)
    sizes = torch.tensor([len(u) for b in bound for u in b.site.units], dtype=torch.float64)
    noise = gates.distribution.noise(len(sizes), generator_of(gates.seed, number))
    flat = gates.distribution.sample(gates.weights, noise, sizes, number)
    parts = flat.split([len(b.site.units) for b in bound])
    return {b.site.name: part[unit_of_heads(b)] for b, part in zip(bound, parts, strict=True)}


def training(model):
    """In training mode as gates see it, without dropout, which T5 has in its functions too."""
    model.eval().training = True
    return model


# ---------------------------------------------------------------- what a forward does


@each
def test_a_training_forward_is_gated_by_what_was_drawn(name, dist):
    subject = subject_of(name)
    training(subject.model)
    whole = subject.run()
    with hp.learned_gates(subject.model, dist, seed=3) as gates:
        shake_(gates)
        found = [subject.run() for _ in range(2)]
        slopes = torch.autograd.grad(objective(found[1]), gates.weights)
        assert gates.n_forwards == 2
        assert gates.n_examples == 2 * len(next(iter(subject.batch.values())))
    for number in range(2):
        with hp.gated(subject.model, drawn(gates, subject, number)):
            expected = subject.run()
        assert_close(found[number], expected, **EXACT)
    assert (found[0] - found[1]).abs().max() > 1e-4
    assert (found[0] - whole).abs().max() > 1e-4
    assert_close(slopes, torch.autograd.grad(objective(expected), gates.weights), **CLOSE)
    assert float(slopes[0].abs().max()) > 1e-6


@pytest.mark.parametrize("policy", ["group", "balanced", "free"])
def test_heads_of_a_group_share_a_gate_unless_the_policy_frees_them(policy):
    subject = subject_of("llama")
    assert any(len(u) > 1 for s in subject.sites for u in s.units)
    sites = hp.find_sites(subject.model, policy=policy)
    with hp.learned_gates(subject.model, HARD, sites) as gates:
        assert len(gates.weights) == sum(len(s.units) for s in sites)
        shake_(gates)
        gates.n_forwards, gates._penalty_used = 1, True
        plan = hp.select(gates.scores(), hp.Budget(keep_heads=0.5))
    for site in sites:
        site.check(plan.mask.kept(site.name))


@each
def test_evaluation_is_deterministic_and_does_not_count(name, dist):
    subject = subject_of(name)
    with hp.learned_gates(subject.model, dist) as gates:
        shake_(gates)
        found = [subject.run() for _ in range(2)]
        table = table_of(gates, subject, gates.evaluated())
        assert gates.n_forwards == 0
    assert_close(found[0], found[1], **EXACT)
    with hp.gated(subject.model, table):
        assert_close(found[0], subject.run(), **EXACT)
    if dist is TOP:
        assert {float(g) for row in table.values() for g in row} == {0.0, 1.0}


# ---------------------------------------------------------------- nothing remains


def test_nothing_remains():
    subject = subject_of("bert")
    subject.model.train()
    text = repr(subject.model)
    with unchanged(subject.model), hp.learned_gates(subject.model, HARD) as gates:
        objective(subject.run()).backward()
        assert repr(subject.model) == text
        assert not set(map(id, gates.parameters())) & set(map(id, subject.model.parameters()))
    with unchanged(subject.model):
        with pytest.raises(ZeroDivisionError), hp.learned_gates(subject.model, TOP):
            subject.run().detach() / (1 // 0)
        with pytest.raises(InvalidValue, match="some of the"):
            hp.learned_gates(subject.model, SubsetTopk(keep=999, steps=1)).__enter__()


def test_a_copy_made_inside_has_no_gates(tmp_path):
    subject = subject_of("bert")
    expected = subject.run()
    with hp.learned_gates(subject.model, TOP):
        twin = copy.deepcopy(subject.model)
        assert (subject.run() - expected).abs().max() > 1e-4
        assert_close(subject.run(twin), expected, **EXACT)
        subject.model.save_pretrained(tmp_path)
    assert type(twin) is type(subject.model)
    assert not any("headprune" in k for m in twin.modules() for k in m.__dict__)
    loaded = type(twin).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert_close(subject.run(loaded), expected, **EXACT)


# ---------------------------------------------------------------- one's own loop


@pytest.mark.parametrize(
    "dist", [HardConcrete(keep=2, warmup=30), SubsetTopk(keep=2, steps=100)], ids=lambda d: d.name
)
def test_necessary_heads_are_found_and_the_rest_can_be_removed(dist):
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


def test_training_goes_on_from_a_state():
    subject = subject_of("llama")
    training(subject.model)

    def train(gates, steps):
        for _ in range(steps):
            gates.zero_grad()
            (objective(subject.run()) + gates.penalty()).backward()
            with torch.no_grad():
                for p in gates.parameters():
                    p -= 0.1 * p.grad

    with hp.learned_gates(subject.model, HARD) as gates:
        train(gates, 4)
    with hp.learned_gates(subject.model, HARD) as half:
        train(half, 2)
        state = copy.deepcopy(half.state_dict())
    with hp.learned_gates(subject.model, HARD) as rest:
        rest.load_state_dict(state)
        train(rest, 2)
    assert_close(rest.weights, gates.weights, **EXACT)
    assert rest.n_forwards == 4
    assert rest.scores().values == gates.scores().values


def test_a_result_of_gates_that_were_not_trained_is_refused():
    subject = subject_of("bert")
    with hp.learned_gates(subject.model, HARD) as gates:
        with pytest.raises(InvalidValue, match=r"no training forward.*model\.train\(\)"):
            gates.scores()
        subject.model.train()
        subject.run()
        with pytest.raises(InvalidValue, match=r"penalty\(\) never called.*Add gates\.penalty"):
            gates.scores()
        gates.penalty()
        with pytest.raises(InvalidValue, match=r"as at first, after 1 forwards.*to the optimizer"):
            gates.scores()
        shake_(gates)
        assert "Still warming up: 1 of 3" in " ".join(gates.scores().notes)
    with hp.learned_gates(subject.model, TOP) as gates:  # this one has no penalty
        subject.run()
        shake_(gates)
        assert "Still annealing: 1 of 4" in " ".join(gates.scores().notes)


def test_a_cut_model_is_gated_where_it_has_heads():
    subject = subject_of("bert")
    first = subject.sites[0].name
    hp.prune_(subject.model, subject.without({first: range(4), subject.sites[1].name: [0]}))
    no_dropout(subject.model).train()
    with hp.learned_gates(subject.model, HARD) as gates:
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


def run_of(target, subject):
    """Losses of three steps of the gates, and the evaluated output."""
    found = []
    with hp.learned_gates(target, SubsetTopk(keep=6, steps=5)) as gates:
        no_dropout(target).train()
        optimizer = torch.optim.Adam(gates.parameters(), lr=0.1)
        for _ in range(3):
            total = objective(subject.run(target))
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            found.append(total.detach())
        target.eval()
        found.append(subject.run(target))
    assert gates.n_forwards == 3
    return found


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_meets_the_gates_of_its_forward():
    plain, subject = subject_of("bert"), subject_of("bert")
    subject.model.gradient_checkpointing_enable()
    assert_close(run_of(subject.model, subject), run_of(plain.model, plain), **CLOSE)


# Dynamo looks at its inputs' .grad, where torch shows this warning only to those who make it an
# error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_models_draw_too():
    plain, subject = (subject_of("multi_head_attention") for _ in range(2))
    expected = run_of(plain.model, plain)
    compiled = torch.compile(subject.model, backend="eager")
    subject.run(compiled)  # before there were gates
    before = picture(subject.model)
    assert_close(run_of(compiled, subject), expected, **CLOSE)
    no_dropout(subject.model)
    assert [p[:2] for p in picture(subject.model)] == [p[:2] for p in before]
    assert type(compiled).__name__ == "OptimizedModule"


# ---------------------------------------------------------------- the Trainer


def trainer_of(model, gates, folder, rows, accumulate):
    from transformers import Trainer, TrainingArguments

    groups = [{"params": model.parameters()}, {"params": gates.parameters(), "lr": 0.5}]
    arguments = TrainingArguments(
        str(folder),
        max_steps=4 // accumulate,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=8,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        dataloader_pin_memory=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        gradient_accumulation_steps=accumulate,
    )
    return Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        compute_loss_func=gates.trainer_loss,
        optimizers=(torch.optim.SGD(groups, lr=0.01), None),
    )


def test_the_trainer_takes_the_same_steps_as_a_loop(tmp_path):
    dist, accumulate = HARD, 2
    ours, theirs = subject_of("bert"), subject_of("bert")
    rows = [{k: v[i % 3] for k, v in ours.batch.items()} for i in range(8)]
    before = [type(m) for m in theirs.model.modules()]
    with hp.learned_gates(no_dropout(theirs.model), dist) as gates, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of(theirs.model, gates, tmp_path, rows, accumulate)
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
        plain = default_loss(ours.model, collate(rows)).mean()
    assert len(order) == gates.n_forwards == 4
    assert_close(gates.weights, expected.weights, **CLOSE)
    weights, wanted = (dict(one.model.named_parameters()) for one in (theirs, ours))
    assert_close(weights, wanted, **CLOSE)
    assert_close(found, plain.item(), rtol=1e-6, atol=0)  # no penalty in evaluation
    assert gates.scores().n_examples == 8
    assert [type(m) for m in theirs.model.modules()] == before


# ---------------------------------------------------------------- refusals


def test_what_cannot_be_trained_is_refused(monkeypatch):
    subject = subject_of("bert")
    model = subject.model
    with pytest.raises(InvalidValue, match=r"a gate distribution, got 'hard_concrete'"):
        hp.learned_gates(model, "hard_concrete").__enter__()
    with hp.learned_gates(model, HARD) as gates:
        with pytest.raises(InvalidValue, match="must be the labels of the batch"):
            gates.trainer_loss({}, None)
        with pytest.raises(InvalidValue, match="one block at a time"):
            hp.learned_gates(model, HARD).__enter__()
        replica = model._replicate_for_data_parallel()
        with pytest.raises(UnsupportedModel, match="DataParallel"):
            replica(**subject.batch)
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        with pytest.raises(UnsupportedModel, match="one process"):
            hp.learned_gates(model, HARD).__enter__()
    hp.prune_(model, subject.without({s.name: range(4) for s in subject.sites}))
    with pytest.raises(UnsupportedModel, match="no head at any site"):
        hp.learned_gates(model, HARD).__enter__()


def test_narrow_models_have_gates_in_fp32():
    model, batch = subject_of("bert").layout.tiny(0)
    no_dropout(model).half().train()
    with hp.learned_gates(model, HARD) as gates:
        assert gates.weights.dtype == torch.float32
        (model(**batch).loss + gates.penalty()).backward()
    assert bool(torch.isfinite(gates.weights.grad).all())
