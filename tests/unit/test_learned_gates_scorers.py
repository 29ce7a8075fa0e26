"""The scorers hard_concrete and subset_topk against a literal training loop, and what they say
about themselves."""

import pytest
import torch
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.gating.learned import unit_of_heads
from headprune.model.losses import default_loss
from headprune.model.sites import bind
from headprune.scoring import HardConcrete, SubsetTopk
from tests.laws.support import CLOSE, examples_of, subject_of, unchanged
from tests.scoring_help import flat, split

SCORERS = [HardConcrete(steps=4, block=3, warmup=2), SubsetTopk(steps=4, block=3)]


def score(subject, batches, scorer):
    return hp.score(subject.model, batches, scorer, progress=False)


def literal(subject, batch, scorer):
    """One pass over blocks of 3 after another, everything in one graph, noise dealt out by the size
    of heads."""
    dist, bound = scorer.distribution(), bind(subject.model)
    counts = [len(b.site.units) for b in bound]
    sizes = torch.tensor([len(u) for b in bound for u in b.site.units], dtype=torch.float64)
    weights = dist.initial(len(sizes)).double().requires_grad_()
    multipliers = torch.zeros(dist.n_multipliers, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam(
        [weights, multipliers] if len(multipliers) else [weights], scorer.learning_rate
    )
    generator = torch.Generator().manual_seed(scorer.seed)
    magnitude = hp.score(subject.model, scorer="magnitude").values
    blocks = split(batch, scorer.block)
    for step in range(scorer.steps):
        noise = dist.noise(len(sizes), generator).split(counts)
        for row, drawn in zip(magnitude, noise, strict=True):
            smallest_first = sorted(range(len(row)), key=lambda unit: row[unit])
            drawn[smallest_first] = drawn.clone()
        flat_gates = dist.sample(weights, torch.cat(noise), sizes, step)
        gates = {
            b.site.name: part[unit_of_heads(b)]
            for b, part in zip(bound, flat_gates.split(counts), strict=True)
        }
        with hp.gated(subject.model, gates):
            mean = default_loss(subject.model, blocks[step % len(blocks)]).mean()
        optimizer.zero_grad()
        (mean + dist.penalty(weights, multipliers, sizes, step)).backward()
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize(
    ("name", "scorer"),
    [
        ("bert", HardConcrete(keep=None, price=0.1, steps=4, block=3, warmup=2)),
        ("llama", SCORERS[1]),
        ("t5", SCORERS[0]),
    ],
    ids=["hard at a price", "top of groups", "hard of two stacks"],
)
def test_scores_are_those_of_a_literal_loop(name, scorer):
    subject = subject_of(name)
    batch = examples_of(subject, 7)  # blocks of 3, 3 and 1, then from the front again
    if name == "t5":
        batch["labels"] = batch["decoder_input_ids"].roll(-1, 1)
    expected = literal(subject, batch, scorer)
    assert float((expected - expected[0]).abs().max()) > 0.01
    # T5's norms compute in float32, whatever the model's dtype.
    near = {"rtol": 1e-4, "atol": 1e-5} if name == "t5" else CLOSE
    for size in (7, 2):
        found = score(subject, split(batch, size), scorer)
        assert_close(flat(found), expected, **near)
        assert (found.n_examples, found.seed) == (7, 0)
        assert found.standard_errors is None
        assert found.samples is None


@pytest.mark.parametrize("scorer", SCORERS, ids=lambda s: type(s).__name__)
def test_the_model_is_as_it_was(scorer):
    subject = subject_of("llama")
    subject.model.train()
    state = torch.get_rng_state()
    with unchanged(subject.model), torch.inference_mode():
        score(subject, [subject.batch], scorer)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in subject.model.parameters())


def test_steps_that_end_before_the_data_say_how_much_was_read():
    subject = subject_of("bert")
    batches = split(examples_of(subject, 7), 2)
    found = score(subject, batches, SubsetTopk(steps=2, block=2))
    assert found.n_examples == 4
    assert found.data == score(subject, batches, "taylor").data
    other = score(subject, [*batches[:2], *batches[3:]], SubsetTopk(steps=2, block=2))
    assert found.values == other.values


def test_what_is_refused():
    settings = [
        (HardConcrete, {"steps": 0}, r"HardConcrete\.steps: must be a count >= 1"),
        (SubsetTopk, {"block": 0}, r"SubsetTopk\.block"),
        (SubsetTopk, {"learning_rate": 0.0}, "learning_rate: must be a number above 0"),
        (HardConcrete, {"price": 0.1}, "one of them"),
        (SubsetTopk, {"keep": 1.0}, "a fraction of the heads"),
    ]
    for kind, wrong, words in settings:
        with pytest.raises(InvalidValue, match=words):
            kind(**wrong)
    subject = subject_of("bert")
    batches, stable = [subject.batch] * 3, hp.Stable(k=3)
    with pytest.raises(InvalidValue, match="some of the 12 heads, neither none nor all"):
        score(subject, batches, SubsetTopk(keep=12))
    with pytest.raises(InvalidValue, match="until"):
        hp.score(subject.model, batches, SCORERS[1], until=stable, progress=False)
