"""Scorers that read activations, against literal loops; what they leave out, and their errors."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.model.double import Doubled
from headprune.scoring import ActivationNorm, Confidence, Entropy, Fluctuation, Obs, Wanda
from tests.laws.support import examples_of as data
from tests.laws.support import family_subject
from tests.reference import activations as reference
from tests.scoring_help import FAMILIES, flat, flat_errors, split

CONTEXTS = [
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
def _doubled():
    """Norms, angles and softmaxes in fp64, which Transformers takes in fp32 whatever the model's
    type."""
    with Doubled():
        yield


@pytest.fixture
def bert():
    return family_subject("bert", "bert")


def score(subject, scorers, batches=None, **options):
    """No scorer here needs a loss."""
    options = {"sites": subject.sites, "progress": False, **options}
    return hp.score(subject.model, batches or [subject.batch], scorers, **options)


def close(found, expected):
    """Values and standard errors agree, relative to the largest score."""
    for a, b in zip(found, expected, strict=True):
        assert (a.scorer, a.settings, a.n_examples) == (b.scorer, b.settings, b.n_examples)
        atol = 1e-11 * float(flat(b).abs().max())
        assert atol > 0
        assert_close(flat(a), flat(b), rtol=0, atol=atol, msg=str(a))
        if a.standard_errors is not None:
            assert_close(flat_errors(a), flat_errors(b), rtol=0, atol=10 * atol)


@pytest.mark.parametrize("family", [*FAMILIES, "albert"])
def test_statistics_of_contexts_are_those_of_literal_loops(family):
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


def test_padding_of_an_encoder_decoder_is_told_on_both_sides():
    subject = family_subject("t5", "t5")
    batch = data(subject, 3)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    batch["decoder_attention_mask"] = mask

    def longer(x, by, value):
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


@pytest.mark.parametrize(
    "family",
    [
        ("swin", "swin"),  # windows
        BARE,  # read at its output
        ("torch_multi_head", "torch.nn.MultiheadAttention"),  # no call of its output projection
    ],
    ids=str,
)
def test_other_layouts_are_read_example_by_example(family):
    subject = family_subject(*family)
    expected = score(subject, ACTIVATIONS)
    found = score(subject, ACTIVATIONS, split(subject.batch, 1))
    close(found, expected)
    assert min(float(flat_errors(mine).min()) for mine in found) > 0


def test_batches_in_which_a_site_does_not_run_do_not_count_for_it():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (hp.MultiHeadAttention(8, 2) for _ in range(2))

        def forward(self, x):
            x = self.one(x)
            return self.two(x) if x.shape[1] > 3 else x

    def loss(model, x):
        return model(x).mean((1, 2))

    model, long, short = Late().double(), torch.randn(3, 4, 8).double(), torch.randn(2, 3, 8)
    for batches in ([short.double(), long], [long, short.double()]):
        found = hp.score(model, batches, ActivationNorm(), loss=loss, progress=False)
        alone = hp.score(model, [long], ActivationNorm(), loss=loss, progress=False)
        assert_close(found.values[1], alone.values[1])
        assert found.values[0] != alone.values[0]


@pytest.mark.parametrize("family", [("bert", "bert"), BARE], ids=str)
def test_heads_that_are_kept_are_read_in_their_place(family):
    subject = family_subject(*family)
    scorers = [Wanda(), ActivationNorm(), *([Entropy()] if family[0] == "bert" else [])]
    before = score(subject, scorers)
    mask = subject.without({subject.sites[0].name: [0, 2]})
    hp.prune_(subject.model, mask, sites=subject.sites)
    after = score(subject, scorers, sites=hp.find_sites(subject.model))
    for mine, whole in zip(after, before, strict=True):
        assert_close(list(mine.values[0]), list(whole.values[0][1::2]), rtol=1e-10, atol=1e-12)


def test_more_examples_than_blocks(bert):
    batch = data(bert, 30)
    whole = score(bert, [*READING, Obs(blocks=1)], [batch])
    assert [len(s.samples.matrix) for s in whole] == [20] * 5 + [8, 30, 30, 1]
    close(score(bert, READING, split(batch, 7)), whole[:-1])


# ---------------------------------------------------------------- one pass, no trace


@pytest.mark.parametrize("normalize", ["zscore", "none"])
def test_a_weight_that_is_no_number_is_refused(normalize):
    subject = family_subject("bert", "bert")
    with torch.no_grad():
        subject.model.bert.encoder.layer[1].attention.self.value.weight[0, 0] = float("nan")
    with pytest.raises(InvalidValue, match="must be finite, got NaN or infinite"):
        hp.score(subject.model, [subject.batch], Fluctuation(normalize=normalize))
