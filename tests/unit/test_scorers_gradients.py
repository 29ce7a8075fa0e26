"""Scorers made of gate gradients, against literal transcriptions and their identities."""

import pytest
import torch
from torch.testing import assert_close

import headprune as hp
from headprune.model.double import Doubled
from headprune.model.running import call
from headprune.scoring import (
    AttributionPatching,
    Fisher,
    Ggn,
    IntegratedGradients,
    Taylor,
    fisher_matrix,
    ggn_matrix,
)
from tests.laws.support import Subject, examples_of, family_subject
from tests.reference import gradients as reference
from tests.reference import scores as heads
from tests.scoring_help import EXACT, FAMILIES, counted_runs, flat, loss_of, score, split, wide


def rolled(batch):
    """A corruption: every word, or number, becomes another one."""
    name = "input_ids" if "input_ids" in batch else "x"
    values = batch[name]
    return {**batch, name: (values + 11) % 50 if name == "input_ids" else values.roll(3, -1)}


@pytest.fixture(params=FAMILIES)
def subject(request):
    """A tiny model in fp64 throughout, with labels where its loss needs some."""
    with Doubled():
        found = family_subject(request.param, request.param)
        if "decoder_input_ids" in found.batch:
            found.batch["labels"] = found.batch["decoder_input_ids"].roll(1, 1)
        yield found


@pytest.fixture
def bert():
    return family_subject("bert", "bert")


def slopes_of(subject, batch=None):
    batch = subject.batch if batch is None else batch
    return reference.alone(subject.model, batch, loss_of(subject), subject.sites)


# ---------------------------------------------------------------- fisher and taylor2


@pytest.mark.parametrize("block", [1, 2])
def test_fisher_is_half_the_mean_squared_gradient_of_a_loop(subject, block):
    batch = subject.batch if subject.family == "t5" else examples_of(subject, 5)
    slow = wide(reference.fisher_matrix(slopes_of(subject, batch), block))
    found = score(subject, Fisher(block=block), split(batch, 3))
    assert found.n_examples == heads.n_examples(batch)
    assert_close(flat(found), slow.diagonal() / 2, **EXACT)
    whole = fisher_matrix(subject.model, split(batch, 2), loss_of(subject), block=block)
    assert_close(whole, slow, **EXACT)
    assert torch.linalg.eigvalsh(whole).min() > -1e-12 * whole.abs().max()


@pytest.mark.parametrize("matrix", [fisher_matrix, ggn_matrix])
def test_structures_of_the_matrices(bert, matrix):
    full, block, diag = (
        matrix(bert.model, [bert.batch], structure=s) for s in ("full", "block", "diag")
    )
    together = torch.block_diag(*(torch.ones(4, 4, dtype=torch.bool) for _ in range(3)))
    assert full[~together].abs().max() > 1e-6
    assert torch.equal(block, full * together)
    assert torch.equal(diag, full * torch.eye(12))


def test_taylor2_is_its_formula(subject):
    slow = wide(reference.taylor2(slopes_of(subject)))
    assert_close(flat(score(subject, "taylor2")), slow, **EXACT)


# ---------------------------------------------------------------- ggn


def class_logits(model, one):
    out = call(model, {k: v for k, v in one.items() if k != "labels"})
    return out.logits if hasattr(out, "logits") else out


def next_token_logits(model, one):
    """``[positions that count, vocabulary]`` of one example."""
    out = call(model, one).logits[0]
    if "decoder_input_ids" in one:
        return out
    return out[:-1][one["attention_mask"][0, 1:].bool()]


def mean_hessian(subject, function, logits, diagonal=True):
    rows = []
    for one in split(subject.batch, 1):
        with torch.no_grad():
            near = function(logits, logits(subject.model, one))
        rows.append(reference.hessian(subject.model, one, near, subject.sites, diagonal))
    found = wide(rows).mean(0)
    return found.diagonal() if diagonal else found


def is_unbiased(subject, hessian, draws, n_seeds):
    """The mean over seeds is half the Hessian, as far as chance allows, and in all within 10 %."""
    seeds = [Ggn(draws=draws, seed=seed) for seed in range(n_seeds)]
    found = torch.stack([flat(scores) for scores in score(subject, seeds)])
    mean, error = found.mean(0), found.std(0) / n_seeds**0.5
    assert ((mean - hessian / 2).abs() / error).max() < 4.5
    assert float(mean.sum() / (hessian.sum() / 2)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("subject", ["bert", "multi_head_attention"], indirect=True)
def test_ggn_is_the_hessian_of_the_divergence(subject):
    hessian = mean_hessian(subject, reference.divergence, class_logits, diagonal=False)
    matrix = ggn_matrix(subject.model, split(subject.batch, 2))
    # Second differences with a step of 1e-3 are off by about its square, and by rounding.
    assert_close(matrix, hessian, rtol=1e-4, atol=1e-5 * float(hessian.abs().max()))
    assert_close(flat(score(subject, "ggn")), matrix.diagonal() / 2, **EXACT)
    assert torch.linalg.eigvalsh(matrix).min() > -1e-12 * matrix.abs().max()


@pytest.mark.parametrize("subject", ["llama", "t5"], indirect=True)
def test_ggn_of_tokens_is_unbiased(subject):
    hessian = mean_hessian(subject, reference.divergence, next_token_logits)
    is_unbiased(subject, hessian, draws=8, n_seeds=24)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("regression", reference.squared_difference),
        ("multi_label_classification", reference.bernoulli_divergence),
    ],
)
def test_ggn_of_other_outputs(bert, kind, function):
    bert.model.config.problem_type = kind
    hessian = mean_hessian(bert, function, class_logits)
    del bert.batch["labels"]
    assert_close(flat(score(bert, Ggn())), hessian / 2, rtol=1e-4, atol=1e-7)


def test_ggn_of_an_answers_ends(bert):
    from transformers import BertForQuestionAnswering

    bert.model.config.num_labels = 2
    model = BertForQuestionAnswering(bert.model.config).double().eval()
    del bert.batch["labels"]
    subject = Subject(bert.layout, model, bert.batch, hp.find_sites(model), "bert")

    def ends(model, one):
        out, mask = call(model, one), one["attention_mask"][0].bool()
        return torch.stack([out.start_logits[0, mask], out.end_logits[0, mask]])

    is_unbiased(subject, mean_hessian(subject, reference.divergence, ends), draws=16, n_seeds=12)
    ids = bert.batch["input_ids"]
    bare, whole, masked = (
        score(subject, "ggn", [batch], loss=None)
        for batch in (
            {"input_ids": ids},
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            bert.batch,
        )
    )
    assert bare.values == whole.values != masked.values


# ---------------------------------------------------------------- integrated gradients


def test_integrated_gradients_are_complete(subject):
    loss = loss_of(subject)
    closed = {s.name: torch.zeros(len(s.heads), dtype=torch.float64) for s in subject.sites}
    with torch.no_grad():
        whole = loss(subject.model, subject.batch)
        with hp.gated(subject.model, closed):
            saved = loss(subject.model, subject.batch) - whole
    # Llama's loss turns over and over where its gates are almost closed. The slopes of T5 jump
    # where a ReLU does, and no quadrature is fast there.
    close = {"llama": 0.03, "t5": 0.02}.get(subject.family, 1e-6)
    few, many = (
        float((wide(s.samples.matrix.tolist()).sum(1) - saved).abs().max() / saved.abs().max())
        for s in score(subject, [IntegratedGradients(points=n) for n in (4, 64)])
    )
    assert many < few / 4
    assert many < close
    assert float(saved.abs().max()) > 0.01


# ---------------------------------------------------------------- attribution patching


def patched(subject, base):
    rows = reference.patched(subject.model, subject.batch, loss_of(subject), subject.sites, base)
    return wide(rows).mean(0)


def contexts(subject, one, backward=True):
    return reference.contexts(subject.model, one, loss_of(subject), subject.sites, backward)


def test_a_base_of_zero_is_the_signed_slope(subject):
    zero, signed = score(subject, [AttributionPatching(), Taylor(reduce="signed")])
    assert zero.values == signed.values
    assert_close(flat(zero), patched(subject, lambda i, s, t: wide([0.0] * 99)), **EXACT)


def query_tokens(subject, site, one, length):
    """Which queries of a site are no padding."""
    mask = one.get("attention_mask")
    if "valid_lens" in one:
        return [t < int(one["valid_lens"][0]) for t in range(length)]
    if mask is None or (subject.family == "t5" and site.kind != "self"):
        return [True] * length
    return mask[0].bool().tolist()


def test_a_mean_base_is_its_formula(subject):
    tokens = [[] for _ in subject.sites]
    for one in split(subject.batch, 1):
        for site, read, kept in zip(subject.sites, contexts(subject, one), tokens, strict=True):
            here = query_tokens(subject, site, one, read.shape[1])
            kept += [row for row, counts in zip(read.detach()[0], here, strict=True) if counts]
    means = [torch.stack(kept).mean(0) for kept in tokens]
    found = score(subject, AttributionPatching(base="mean"), split(subject.batch, 2))
    assert_close(flat(found), patched(subject, lambda i, s, t: means[s]), **EXACT)


def test_a_corrupted_base_is_its_formula(subject):
    corrupted = [contexts(subject, one, backward=False) for one in split(rolled(subject.batch), 1)]
    slow = patched(subject, lambda i, s, t: corrupted[i][s].detach()[0, t])
    scorer = AttributionPatching(base="corrupt", corrupt=rolled)
    found = score(subject, scorer, split(subject.batch, 2))
    assert_close(flat(found), slow, **EXACT)
    assert found.settings == {"base": "corrupt", "corrupt": f"{__name__}.rolled"}
    assert hp.HeadScores.from_json(found.to_json()) == found


@pytest.mark.parametrize("family", ["albert", "swin", "labml"])
def test_shared_windowed_and_sequence_first_layers(family):
    """A layer that runs several times, windows on the batch axis, tokens before examples: same
    slope by both ways."""
    with Doubled():
        subject = family_subject(family, family)
        own = {"loss": lambda m, b: call(m, b).flatten(1).logsumexp(-1)}
        options = own if family == "labml" else {}
        unchanged = AttributionPatching(base="corrupt", corrupt=lambda b: b)
        scorers = [Taylor(reduce="signed"), unchanged, AttributionPatching(base="mean")]
        zero, same, whole = (flat(s) for s in score(subject, scorers, **options))
        halves = [subject.batch] if family == "labml" else split(subject.batch, 2)
        mean = flat(score(subject, AttributionPatching(base="mean"), halves, **options))
    assert zero.abs().max() > 1e-3
    assert same.abs().max() < 1e-14, "a corruption that changes nothing has no effect"
    assert_close(mean, whole, **EXACT)
    assert not torch.allclose(whole, zero)


# ---------------------------------------------------------------- passes and samples


def test_the_fewest_passes_serve_them_all(bert):
    batches = split(examples_of(bert, 7), 3)
    for scorer, passes in (
        (["taylor", "fisher", "taylor2", "attribution_patching", "ggn", Fisher(block=32)], 2),
        (IntegratedGradients(points=5), 5 + 2),
        (AttributionPatching(base="mean"), 2),
        (AttributionPatching(base="corrupt", corrupt=rolled), 2),
    ):
        with counted_runs(bert.model) as runs:
            score(bert, scorer, batches)
        assert len(runs) == 2 + 3 * passes, "one for the costs, one for the model's own loss"
