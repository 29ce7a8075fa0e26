"""The scorers hard_concrete and subset_topk against a literal training loop, and what they say
about themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.gating.learned import unit_of_heads
from headprune.model.losses import default_loss
from headprune.model.sites import bind
from headprune.scoring import HardConcrete, SubsetTopk
from tests.known.ablation import necessary, recall
from tests.known.induction import examples, loss
from tests.known.trained import trained
from tests.laws.support import CLOSE, Subject, examples_of, picture, subject_of

SCORERS: list[Any] = [HardConcrete(steps=4, block=3, warmup=2), SubsetTopk(steps=4, block=3)]


def data(subject: Subject, n: int) -> dict[str, Tensor]:
    batch = examples_of(subject, n)
    if "decoder_input_ids" in batch:
        batch["labels"] = batch["decoder_input_ids"].roll(-1, 1)
    return batch


def split(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    n = len(next(iter(batch.values())))
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, n, size)]


def score(subject: Subject, batches: Any, scorer: Any) -> hp.HeadScores:
    return hp.score(subject.model, batches, scorer, progress=False)


def flat(scores: hp.HeadScores) -> Tensor:
    return torch.tensor([v for row in scores.values for v in row], dtype=torch.float64)


def literal(subject: Subject, batch: dict[str, Tensor], scorer: Any) -> Tensor:
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
    [("bert", SCORERS[0]), ("llama", SCORERS[1]), ("t5", SCORERS[0])],
    ids=["hard", "top of groups", "hard of two stacks"],
)
def test_scores_are_those_of_a_literal_loop(name: str, scorer: Any) -> None:
    subject = subject_of(name)
    batch = data(subject, 7)  # blocks of 3, 3 and 1, then from the front again
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
def test_the_model_is_as_it_was(scorer: Any) -> None:
    subject = subject_of("llama")
    subject.model.train()
    before, state = picture(subject.model), torch.get_rng_state()
    with torch.inference_mode():
        score(subject, [subject.batch], scorer)
    assert picture(subject.model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in subject.model.parameters())


def test_steps_that_end_before_the_data_say_how_much_was_read() -> None:
    subject = subject_of("bert")
    batches = split(data(subject, 7), 2)
    found = score(subject, batches, SubsetTopk(steps=2, block=2))
    assert found.n_examples == 4
    assert found.data == score(subject, batches, "taylor").data
    other = score(subject, [*batches[:2], *batches[3:]], SubsetTopk(steps=2, block=2))
    assert found.values == other.values


def test_the_trained_models_necessary_heads_are_found() -> None:
    """They are known by ablation, on examples that the scorers do not see."""
    model = trained().requires_grad_(False)
    wanted = necessary(model, examples(128, 2))
    hard = HardConcrete(keep=3, steps=80, warmup=20, learning_rate=0.2)
    scorers = [hard, SubsetTopk(keep=3, steps=80)]
    found = hp.score(model, [examples(64, 1)], scorers, loss=loss, progress=False)
    for scores in found:
        assert recall(scores, wanted) == 1.0
        assert "No standard error" in scores.notes[-1]
    assert "3 with P" in found[0].notes[0] or found[0].notes[0].startswith("2.")
    assert found[1].notes[0].startswith("3")


def test_a_price_closes_what_nothing_needs() -> None:
    model = trained().requires_grad_(False)
    settings = {"keep": None, "steps": 60, "warmup": 0, "learning_rate": 0.2}
    scorers = [HardConcrete(price=price, **settings) for price in (0.001, 10.0)]
    cheap, dear = hp.score(model, [examples(32, 1)], scorers, loss=loss, progress=False)
    assert float(flat(dear).max()) < 0 < float(flat(cheap).max())


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (HardConcrete, {"steps": 0}, r"HardConcrete\.steps: must be a count >= 1"),
        (SubsetTopk, {"block": 0}, r"SubsetTopk\.block"),
        (SubsetTopk, {"learning_rate": 0.0}, "learning_rate: must be a number above 0"),
        (HardConcrete, {"price": 0.1}, "one of them"),
        (SubsetTopk, {"keep": 1.0}, "a fraction of the heads"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind: Any, settings: Any, words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        kind(**settings)


def test_a_count_that_the_model_cannot_keep_and_stopping_early_are_refused() -> None:
    subject = subject_of("bert")
    batches, stable = [subject.batch] * 3, hp.Stable(k=3)
    with pytest.raises(InvalidValue, match="some of the 12 heads, neither none nor all"):
        score(subject, batches, SubsetTopk(keep=12))
    with pytest.raises(InvalidValue, match="until"):
        hp.score(subject.model, batches, SCORERS[1], until=stable, progress=False)
