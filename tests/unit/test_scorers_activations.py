"""Scorers that read activations, against literal loops; what they leave out, and their errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.model.double import Doubled
from headprune.scoring import ActivationNorm, Attattr, Confidence, Entropy, Fluctuation, Obs, Wanda
from tests.laws.support import Subject, family_subject
from tests.laws.support import examples_of as data
from tests.reference import activations as reference
from tests.scoring_help import FAMILIES, counted_runs, flat, flat_errors, split, wide

CONTEXTS: list[tuple[Any, Any]] = [
    (ActivationNorm(), reference.activation_norm),
    (ActivationNorm(of="output"), reference.output_norm),
    (Fluctuation(), reference.fluctuation),
    (Fluctuation(normalize="none"), lambda *args: reference.fluctuation(*args, normalize=False)),
    (Wanda(), reference.wanda),
    (Obs(), reference.obs),
]
ACTIVATIONS = [scorer for scorer, _ in CONTEXTS]
READING = [*ACTIVATIONS, Entropy(), Confidence()]
BARE = ("head_list_bare", "list of heads without output")


@pytest.fixture(autouse=True)
def _doubled() -> Iterator[None]:
    """Norms, angles and softmaxes in fp64, which Transformers takes in fp32 whatever the model's
    type."""
    with Doubled():
        yield


@pytest.fixture
def bert() -> Subject:
    return family_subject("bert", "bert")


def score(subject: Subject, scorers: Any, batches: Any = None, **options: Any) -> Any:
    """No scorer here needs a loss."""
    options = {"sites": subject.sites, "progress": False, **options}
    return hp.score(subject.model, batches or [subject.batch], scorers, **options)


def close(found: Any, expected: Any) -> None:
    """Values and standard errors agree, relative to the largest score."""
    for a, b in zip(found, expected, strict=True):
        assert (a.scorer, a.settings, a.n_examples) == (b.scorer, b.settings, b.n_examples)
        atol = 1e-11 * float(flat(b).abs().max())
        assert atol > 0
        assert_close(flat(a), flat(b), rtol=0, atol=atol, msg=str(a))
        if a.standard_errors is not None:
            assert_close(flat_errors(a), flat_errors(b), rtol=0, atol=10 * atol)


# ---------------------------------------------------------------- against literal loops


@pytest.mark.parametrize("family", [*FAMILIES, "albert"])
def test_statistics_of_contexts_are_those_of_literal_loops(family: str) -> None:
    """Values, and standard errors as by leaving out one example at a time; a module that runs twice
    counts twice."""
    subject = family_subject(family, family)
    batch = data(subject, 4)
    scores = score(subject, ACTIVATIONS, split(batch, 3))
    for number, site in enumerate(subject.sites):
        found = reference.contexts(subject.model, batch, site)
        weight = reference.weight_of(subject.model, site)
        for mine, (_, literal) in zip(scores, CONTEXTS, strict=True):
            values, errors = reference.jackknifed(lambda x, f=literal: f(weight, site, x), found)  # noqa: B023
            # Squared distances of a least-squares problem lose half the digits of its solution.
            exact = 1e-8 if mine.scorer == "obs" else 1e-10
            assert_close(list(mine.values[number]), values, rtol=exact, atol=exact / 100)
            assert_close(list(mine.standard_errors[number]), errors, rtol=exact, atol=exact / 100)


# ---------------------------------------------------------------- what they read


def test_padding_of_an_encoder_decoder_is_told_on_both_sides() -> None:
    subject = family_subject("t5", "t5")
    batch = data(subject, 3)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    batch["decoder_attention_mask"] = mask

    def longer(x: Tensor, by: int, value: int) -> Tensor:
        return nn.functional.pad(x, (0, by), value=value)

    without = {
        "input_ids": longer(batch["input_ids"], 2, 7),
        "attention_mask": longer(batch["attention_mask"], 2, 0),
        "decoder_input_ids": longer(batch["decoder_input_ids"], 4, 7),
    }
    decoder_mask = longer(mask, 4, 0)
    labels = without["decoder_input_ids"].masked_fill(decoder_mask == 0, -100)
    expected = score(subject, READING, [batch])
    for told in ({"decoder_attention_mask": decoder_mask}, {"labels": labels}):
        close(score(subject, READING, [{**without, **told}]), expected)
    assert score(subject, Wanda(), [without]).values[2] != expected[4].values[2]


class TwoSentences(nn.Module):
    """An encoder that runs once for each sentence: the batch has no mask of its own, each sentence
    has."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
        a, b = (self.encoder(**tokens).logits for tokens in (first, second))
        return nn.functional.cosine_similarity(a, b)


def test_padding_of_inputs_inside_a_batch_does_not_count(bert: Subject) -> None:
    tokens = {k: bert.batch[k] for k in ("input_ids", "attention_mask")}
    assert bool((tokens["attention_mask"] == 0).any())
    other = {k: v.flip(0) for k, v in tokens.items()}

    def longer(sentence: dict[str, Tensor]) -> dict[str, Tensor]:
        fill = {"input_ids": 7, "attention_mask": 0}
        return {k: nn.functional.pad(v, (0, 3), value=fill[k]) for k, v in sentence.items()}

    found = [
        hp.score(
            TwoSentences(bert.model),
            [{"first": first, "second": second}],
            [*READING, Attattr(steps=2)],
            loss=lambda m, b: m(**b).square(),
            progress=False,
        )
        for first, second in ((longer(tokens), longer(other)), (tokens, other))
    ]
    for padded, short in zip(*found, strict=True):
        assert_close(flat(padded), flat(short), rtol=1e-5, atol=1e-6, msg=short.scorer)


@pytest.mark.parametrize(
    "family",
    [
        ("swin", "swin"),  # windows
        BARE,  # read at its output
        ("torch_multi_head", "torch.nn.MultiheadAttention"),  # no call of its output projection
    ],
    ids=str,
)
def test_other_layouts_are_read_example_by_example(family: tuple[str, str]) -> None:
    subject = family_subject(*family)
    expected = score(subject, ACTIVATIONS)
    found = score(subject, ACTIVATIONS, split(subject.batch, 1))
    close(found, expected)
    assert min(float(flat_errors(mine).min()) for mine in found) > 0


def test_batches_in_which_a_site_does_not_run_do_not_count_for_it() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (hp.MultiHeadAttention(8, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.two(x) if x.shape[1] > 3 else x

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean((1, 2))

    model, long, short = Late().double(), torch.randn(3, 4, 8).double(), torch.randn(2, 3, 8)
    for batches in ([short.double(), long], [long, short.double()]):
        found = hp.score(model, batches, ActivationNorm(), loss=loss, progress=False)
        alone = hp.score(model, [long], ActivationNorm(), loss=loss, progress=False)
        assert_close(found.values[1], alone.values[1])
        assert found.values[0] != alone.values[0]


@pytest.mark.parametrize("family", [("bert", "bert"), BARE], ids=str)
def test_heads_that_are_kept_are_read_in_their_place(family: tuple[str, str]) -> None:
    subject = family_subject(*family)
    scorers = [Wanda(), ActivationNorm(), *([Entropy()] if family[0] == "bert" else [])]
    before = score(subject, scorers)
    mask = subject.without({subject.sites[0].name: [0, 2]})
    hp.prune_(subject.model, mask, sites=subject.sites)
    after = score(subject, scorers, sites=hp.find_sites(subject.model))
    for mine, whole in zip(after, before, strict=True):
        assert_close(list(mine.values[0]), list(whole.values[0][1::2]), rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- standard errors


def test_standard_errors_are_the_spread_over_other_data() -> None:
    """The spread of scores over 60 data sets of 24 examples, which come from the same
    distribution."""
    subject = family_subject("multi_head_attention", "multi_head_attention")
    scorers = [Wanda(), Obs(blocks=4), Fluctuation(normalize="none")]
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(24, 7, 16, generator=generator).double() for _ in range(60)]
    draws = [score(subject, scorers, [{"x": x}]) for x in batches]
    for of_scorer in zip(*draws, strict=True):
        found = wide([scores.values[0] for scores in of_scorer])
        errors = wide([scores.standard_errors[0] for scores in of_scorer])
        ratio = errors.square().mean(0).sqrt() / found.std(0)
        # 60 draws know a spread to 9 %, and a jackknife of 4 blocks is itself rough.
        assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=0.35)


def test_more_examples_than_blocks(bert: Subject) -> None:
    batch = data(bert, 30)
    whole = score(bert, [*READING, Obs(blocks=1)], [batch])
    assert [len(s.samples.matrix) for s in whole] == [20] * 5 + [8, 30, 30, 1]
    close(score(bert, READING, split(batch, 7)), whole[:-1])


# ---------------------------------------------------------------- one pass, no trace


def test_one_forward_pass_for_all_of_them(bert: Subject) -> None:
    counts = []
    for scorers in ([Wanda()], [*ACTIVATIONS, Obs(blocks=2)]):
        with counted_runs(bert.model) as runs:
            score(bert, scorers, split(bert.batch, 1))
        counts.append(len(runs))
    assert counts[0] == counts[1] >= 3
