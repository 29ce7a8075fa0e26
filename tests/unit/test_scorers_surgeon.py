"""surgeon: its prices are those of sets of heads solved from scratch, and least squares pays
them."""

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.model.double import Doubled
from headprune.model.losses import default_loss, inputs_of
from headprune.model.padding import query_mask
from headprune.model.sites import bind
from headprune.scoring import Surgeon, _removal
from headprune.scoring._activations import unit_columns
from headprune.scoring._distributions import Distributions, fisher_targets, logit_targets
from tests.laws.support import examples_of as data
from tests.laws.support import family_subject
from tests.reference import surgeon as reference
from tests.scoring_help import flat, flat_errors, own_loss, split, wide

ONE_LABEL, SEVERAL_LABELS = "single_label_classification", "multi_label_classification"
KINDS = [ONE_LABEL, SEVERAL_LABELS, "regression"]


@pytest.fixture(autouse=True)
def _doubled():
    with Doubled():
        yield


@pytest.fixture
def bert():
    return family_subject("bert", "bert")


def score(model, batches, scorer, **options):
    batches = batches if isinstance(batches, list) else [batches]
    return hp.score(model, batches, scorer, progress=False, **options)


# ---------------------------------------------------------------- prices


def predictions(model, example):
    """Numbers whose slopes' products sum to the Hessian of the divergence from the model's own
    predictions."""
    logits = model(**inputs_of(model, example)).logits[0]
    p = logits.detach().softmax(-1)
    values, vectors = torch.linalg.eigh(p.diag() - torch.outer(p, p))
    roots = values.clamp(min=0).sqrt()
    return [root * (vector @ logits) for root, vector in zip(roots, vectors.T, strict=True)]


def centred_logits(model, example):
    """Numbers whose slopes' products sum to twice the mean product of the slopes of logits, of
    classes without their mean."""
    logits = model(**inputs_of(model, example)).logits[0]
    mean = 0 if model.config.problem_type in KINDS[1:] else logits.mean()
    return list(((logits - mean) * (2 / len(logits)) ** 0.5).unbind())


def outputs(model, example):
    """The same for labels of their own, and for numbers."""
    logits = model(**inputs_of(model, example)).logits[0]
    p = logits.detach().sigmoid()
    several = model.config.problem_type == SEVERAL_LABELS
    curvature = p * (1 - p) if several else torch.full_like(p, 2)
    return list((logits * (curvature / len(p)) ** 0.5).unbind())


TARGETS = {
    "output": predictions,
    "outputs": outputs,
    "logits": centred_logits,
    "loss": lambda model, example: [default_loss(model, example).sum()],
    "own": lambda model, example: [own_loss(model, example).sum()],
}


def check_prices(model, batch, curvature, draws=None):
    """Compares prices with those of the reference, which solves every set of heads from scratch."""
    sites = hp.find_sites(model)
    bound = bind(model, sites)

    def counted(example):
        tokens = example["input_ids"] if "input_ids" in example else example["x"]
        mask = query_mask(model, "self", example, (1, tokens.shape[1]))
        return torch.ones(tokens.shape[1], dtype=torch.bool) if mask is None else mask[0]

    projections = [b.gate for b in bound]
    model.requires_grad_(False)
    found, n = reference.tokens(
        projections, split(batch, 1), lambda e: TARGETS[curvature](model, e), counted
    )
    units = [[columns.tolist() for columns in unit_columns(b)] for b in bound]
    expected = reference.prices([p.weight.numpy() for p in projections], found, n, units)
    loss = own_loss if curvature == "own" else default_loss
    asked = {"own": "loss", "outputs": "output"}.get(curvature, curvature)
    scores = score(model, batch, Surgeon(blocks=1, curvature=asked, draws=draws), loss=loss)
    assert scores.n_examples == 5
    for mine, literal in zip(scores.values, expected, strict=True):
        assert_close(list(mine), literal, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "curvature"),
    [
        ("bert", "output"),
        ("bert", "logits"),
        ("bert", "loss"),
        ("llama", "loss"),
        ("multi_head_attention", "own"),
    ],
)
def test_prices_are_those_of_sets_solved_from_scratch(family, curvature):
    """Also where heads share keys, tokens are padding, and prices of two sites compete."""
    subject = family_subject(family, family)
    check_prices(subject.model, data(subject, 5), curvature)


def test_prices_of_units_of_unlike_sizes():
    """A group that lost a query head, beside whole ones."""
    subject = family_subject("llama", "llama")
    free = hp.find_sites(subject.model, policy="free")
    mask = subject.mask({s.name: s.heads[1:] for s in free})
    hp.prune_(subject.model, mask, sites=free)
    assert {len(unit) for s in hp.find_sites(subject.model) for unit in s.units} == {1, 2}
    check_prices(subject.model, data(subject, 5), "loss")


def test_blocks_change_the_errors_alone(bert):
    one, some = (score(bert.model, data(bert, 12), Surgeon(blocks=n)) for n in (1, 4))
    assert one.standard_errors is None
    assert bool((flat_errors(some) > 0).all())
    assert_close(flat(one), flat(some), rtol=1e-9, atol=0)


def test_a_loss_of_the_users_is_asked(bert):
    batch = data(bert, 4)
    single = score(bert.model, batch, Surgeon(curvature="loss"))
    double = score(bert.model, batch, Surgeon(), loss=lambda m, b: 2 * default_loss(m, b))
    assert_close(flat(double), 4 * flat(single), rtol=1e-9, atol=0)


def test_few_and_equal_examples_still_have_an_order(bert):
    one, three = data(bert, 1), data(bert, 3)
    for batch in (one, three, {k: torch.cat([v] * 3) for k, v in one.items()}):
        found = flat(score(bert.model, batch, "surgeon"))
        assert len(set(found.tolist())) == 12
        assert bool((found >= 0).all())


def test_sums_beyond_the_range_of_numbers_are_refused(bert):
    layer = bert.model.bert.encoder.layer[0].attention
    with torch.no_grad():
        for own in layer.self.value.parameters():
            own *= 1e-200
        layer.output.dense.weight *= 1e200  # so that the model computes the same
    with pytest.raises(InvalidValue, match=r"layer\.0\.attention gives Surgeon: must be finite"):
        score(bert.model, bert.batch, "surgeon")


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("targets_of", [fisher_targets, logit_targets])
def test_slopes_of_drawn_targets_of_tokens_give_the_curvature_on_average(targets_of):
    """A class that cannot be, as a place of padding where no answer begins, takes no part."""
    logits = torch.randn(1, 3, 4, dtype=torch.float64)
    if targets_of is logit_targets:
        logits[0, 0, 3] = -torch.inf
    logits.requires_grad_()
    counted = torch.tensor([[True, True, False]])
    total = torch.zeros(12, 12, dtype=torch.float64)
    for seed in range(60):
        found = Distributions(ONE_LABEL, logits, counted)
        targets, drawn = targets_of(found, [seed], 50)
        assert drawn
        for target in targets:
            slope = torch.autograd.grad(target, logits, retain_graph=True)[0].flatten()
            total += torch.outer(slope, slope) / 60
    if targets_of is fisher_targets:
        blocks = [p.diag() - torch.outer(p, p) for p in logits.detach()[0, :2].softmax(-1)]
    else:
        three, four = ((torch.eye(n, dtype=torch.float64) - 1 / n) * 2 / n for n in (3, 4))
        blocks = [torch.block_diag(three, wide([[0.0]])), four]
    expected = torch.block_diag(*blocks, torch.zeros(4, 4, dtype=torch.float64)) / 2
    assert_close(total, expected, rtol=0, atol=0.02)
    assert not total[8:].any()


# ---------------------------------------------------------------- many classes


def classifier(classes, kind=ONE_LABEL):
    """An encoder of two layers with slopes as large as a trained one's."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        vocab_size=30,
        max_position_embeddings=16,
        num_labels=classes,
        initializer_range=0.5,
        problem_type=kind,
    )
    return BertForSequenceClassification(config).eval().double()


def sentences(n, padding=0):
    """Rows of 3 to 7 tokens and padding, with so much of it at least."""
    torch.manual_seed(1)
    tokens = functional.pad(torch.randint(2, 30, (n, 7)), (0, padding))
    mask = (torch.arange(7 + padding) < 3 + torch.arange(n)[:, None] % 5).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


@pytest.mark.parametrize(
    ("kind", "curvature"), [(KINDS[1], "outputs"), (KINDS[2], "outputs"), (KINDS[1], "logits")]
)
def test_prices_of_other_outputs_are_those_of_sets_solved_from_scratch(kind, curvature):
    check_prices(classifier(4, kind), sentences(5), curvature)


def test_a_group_for_every_class_is_exact():
    model, batch = classifier(6), sentences(5)
    check_prices(model, batch, "output", draws=6)
    exact, again = (score(model, batch, s) for s in (Surgeon(draws=6), Surgeon(draws=7, seed=1)))
    assert exact.values == again.values


def test_up_to_four_classes_nothing_is_drawn():
    batch, few, many = sentences(5), classifier(4), classifier(5)
    exact, found = (score(few, batch, s) for s in (Surgeon(draws=4), Surgeon(seed=3)))
    assert (found.values, found.seed) == (exact.values, None)
    drawn, other = (score(many, batch, Surgeon(seed=seed)) for seed in (3, 4))
    assert (drawn.seed, other.seed) == (3, 4)
    assert drawn.values != other.values


def test_many_classes_whatever_the_batches_and_the_padding():
    model, batch = classifier(64), sentences(7)
    whole = score(model, batch, "surgeon")
    for batches in (split(batch, 2), split(batch, 1), [sentences(7, padding=4)]):
        found = score(model, batches, "surgeon")
        assert (found.n_examples, found.seed) == (7, 0)
        assert_close(flat(found), flat(whole), rtol=1e-8, atol=0)


# ---------------------------------------------------------------- runs and sites that go together


def test_runs_that_go_together_are_those_that_go_alone(monkeypatch):
    model, batch = classifier(3), sentences(16)
    found = []
    # Four runs go across both sites; one by one.
    for at_once in (4 * _removal.MATRICES * 8 * 16**2, 1):
        monkeypatch.setattr(_removal, "AT_ONCE", at_once)
        found.append(score(model, batch, "surgeon"))
    assert_close(flat(found[0]), flat(found[1]), rtol=1e-9, atol=0)
    assert_close(flat_errors(found[0]), flat_errors(found[1]), rtol=1e-9, atol=0)


def test_sites_of_unlike_shapes_go_apart():
    """Sites of three and of four heads."""
    model = classifier(3)
    first, second = hp.find_sites(model)
    keep = {first.name: first.heads[1:], second.name: second.heads}
    hp.prune_(model, hp.HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
    assert [len(s.units) for s in hp.find_sites(model)] == [3, 4]
    check_prices(model, sentences(5), "output")
