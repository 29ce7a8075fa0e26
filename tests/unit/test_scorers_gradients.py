"""Scorers made of gate gradients, against literal transcriptions, their identities, and what may
not change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.model.double import Doubled
from headprune.model.losses import default_loss
from headprune.model.running import call, undisturbed
from headprune.model.sites import bind
from headprune.scoring import (
    AttributionPatching,
    Fisher,
    Ggn,
    IntegratedGradients,
    Taylor,
    Taylor2,
    fisher_matrix,
    gate_gradients,
    ggn_matrix,
)
from headprune.scoring._base import Estimate, ScoringProblem
from headprune.scoring._distributions import content_seeds, distributions, drawn_labels
from tests.laws.support import Subject, family_subject, set_implementation
from tests.laws.test_law_6_scores import padded, renumbered_
from tests.reference import gradients as reference
from tests.reference import scores as heads


def named(scorer: Any) -> str:
    """Without the address of a function, so that all workers collect the same."""
    return str(scorer).partition(" at 0x")[0]


#: BERT-like, GPT-2-like, grouped queries, encoder-decoder with cross-attention, our own attention.
FAMILIES = [
    ("bert", "bert"),
    ("gpt2", "gpt2"),
    ("llama", "llama"),
    ("t5", "t5"),
    ("multi_head_attention", "multi_head_attention"),
]
EXACT = {"rtol": 1e-10, "atol": 1e-12}
ALL: list[Any] = [
    Taylor(),
    Taylor(reduce="signed"),
    Fisher(),
    Fisher(block=2),
    Taylor2(),
    Ggn(),
    Ggn(draws=2),
    IntegratedGradients(points=3),
    AttributionPatching(),
    AttributionPatching(base="mean"),
    AttributionPatching(base="corrupt", corrupt=lambda batch: rolled(batch)),
]


def rolled(batch: Any) -> Any:
    """A corruption that no order or size of batches changes: every word, or number, becomes another
    one."""
    name = "input_ids" if "input_ids" in batch else "x"
    values = batch[name]
    return {**batch, name: (values + 11) % 50 if name == "input_ids" else values.roll(3, -1)}


@pytest.fixture(params=FAMILIES, ids=[family for _, family in FAMILIES])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A tiny model in fp64 throughout, with labels where its loss needs some."""
    with Doubled():
        yield labelled(family_subject(*request.param))


@pytest.fixture
def bert() -> Subject:
    return family_subject("bert", "bert")


def labelled(subject: Subject) -> Subject:
    if "decoder_input_ids" in subject.batch:
        subject.batch["labels"] = subject.batch["decoder_input_ids"].roll(1, 1)
    return subject


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return call(model, batch).logsumexp(-1).square()


def loss_of(subject: Subject) -> Callable[[nn.Module, Any], Tensor]:
    return default_loss if hasattr(subject.model, "config") else own_loss


def more(subject: Subject, n: int) -> dict[str, Any]:
    """``n`` different examples."""
    parts = [subject.layout.tiny(seed, subject.family)[1] for seed in range(1 + n // 3)]
    joined = {k: torch.cat([p[k] for p in parts])[:n] for k in parts[0]}
    return {k: v.double() if v.is_floating_point() else v for k, v in joined.items()}


def split(batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
    return [
        {k: v[i : i + size] for k, v in batch.items()}
        for i in range(0, heads.n_examples(batch), size)
    ]


def score(subject: Subject, scorer: Any, batches: Any = None, **options: Any) -> Any:
    options = {"loss": loss_of(subject), "progress": False, **options}
    return hp.score(subject.model, batches or [subject.batch], scorer, **options)


def estimate(subject: Subject, scorer: Any, batches: Any = None) -> Estimate:
    with undisturbed(subject.model):
        bound = bind(subject.model, subject.sites)
        found: Estimate = scorer.estimate(
            ScoringProblem(
                subject.model, bound, batches or [subject.batch], loss_of(subject), False
            )
        )
        return found


def flat(scores: Any, errors: bool = False) -> Tensor:
    rows = scores.standard_errors if errors else scores.values
    return torch.tensor([v for row in rows for v in row], dtype=torch.float64)


def exactly(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Forward passes of a model."""
    runs: list[int] = []
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    try:
        yield runs
    finally:
        handle.remove()


# ---------------------------------------------------------------- the gradient itself


def test_taylor_is_the_central_difference(subject: Subject) -> None:
    loss = loss_of(subject)
    slow = exactly(
        [
            reference.slopes(subject.model, heads.example(subject.batch, i), loss, subject.sites)
            for i in range(3)
        ]
    )
    assert slow.abs().max() > 1e-3
    # A central difference is off by the square of its step.
    assert_close(flat(score(subject, "taylor")), slow.abs().mean(0), rtol=1e-5, atol=1e-7)
    assert_close(flat(score(subject, Taylor(reduce="signed"))), -slow.mean(0), rtol=1e-5, atol=1e-7)


def test_the_three_routes_to_the_slope_agree(subject: Subject) -> None:
    loss = loss_of(subject)
    gate = gate_gradients(subject.model, [subject.batch], loss)
    context = exactly(reference.alone(subject.model, subject.batch, loss, subject.sites))
    weight = heads.by_unit(
        heads.weight_route(subject.model, subject.batch, loss, subject.sites), subject.sites
    )
    assert_close(gate, context, **EXACT)
    assert_close(gate, weight, **EXACT)


# ---------------------------------------------------------------- fisher and taylor2


@pytest.mark.parametrize("block", [1, 2])
def test_fisher_is_half_the_mean_squared_gradient_of_a_loop(subject: Subject, block: int) -> None:
    batch = subject.batch if subject.family == "t5" else more(subject, 5)
    slow = exactly(
        reference.fisher_matrix(
            reference.alone(subject.model, batch, loss_of(subject), subject.sites), block
        )
    )
    found = score(subject, Fisher(block=block), split(batch, 3))
    assert found.n_examples == heads.n_examples(batch)
    assert_close(flat(found), slow.diagonal() / 2, **EXACT)
    whole = fisher_matrix(subject.model, split(batch, 2), loss_of(subject), block=block)
    assert_close(whole, slow, **EXACT)
    assert torch.linalg.eigvalsh(whole).min() > -1e-12 * whole.abs().max()


def test_structures_of_the_matrices(bert: Subject) -> None:
    for matrix in (
        lambda s: fisher_matrix(bert.model, [bert.batch], structure=s),
        lambda s: ggn_matrix(bert.model, [bert.batch], structure=s),
    ):
        full, block, diag = (matrix(s) for s in ("full", "block", "diag"))
        same = torch.block_diag(*(torch.ones(4, 4, dtype=torch.bool) for _ in range(3)))
        assert full[~same].abs().max() > 1e-6
        assert torch.equal(block, full * same)
        assert torch.equal(diag, full * torch.eye(12))


def test_taylor2_is_its_formula(subject: Subject) -> None:
    slow = reference.taylor2(
        reference.alone(subject.model, subject.batch, loss_of(subject), subject.sites)
    )
    assert_close(flat(score(subject, "taylor2")), exactly(slow), **EXACT)


class Linear(nn.Module):
    """One layer of attention and a sum, ``[batch, 1]``: what it puts out is linear in the gates."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = hp.MultiHeadAttention(8, 4, n_kv_heads=2)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.attention(x).mean(1))
        return out


def test_taylor2_is_exact_where_the_loss_is_quadratic_with_the_fisher_curvature() -> None:
    """A squared error of 1/2 everywhere: its second derivative ``2 c^2`` is then its squared slope
    ``(2 e c)^2``."""
    model, x = Linear().double().eval(), torch.randn(6, 5, 8, dtype=torch.float64)
    sign = exactly([1, 1, -1, 1, -1, -1])
    with torch.no_grad():
        targets = model(x)[:, 0] - sign * 0.5**0.5
    found, exact = hp.score(
        model,
        [(x, targets)],
        ["taylor2", "leave_one_out"],
        loss=lambda m, b: (m(b[0])[:, 0] - b[1]).square(),
        progress=False,
    )
    assert flat(exact).abs().max() > 1e-3
    assert_close(flat(found), flat(exact), **EXACT)


# ---------------------------------------------------------------- ggn


def class_logits(model: nn.Module, one: Any) -> Tensor:
    out = call(model, {k: v for k, v in one.items() if k != "labels"})
    return out.logits if hasattr(out, "logits") else out


def next_token_logits(model: nn.Module, one: Any) -> Tensor:
    """``[positions that count, vocabulary]`` of one example."""
    out = call(model, one).logits[0]
    if "decoder_input_ids" in one:
        return out
    return out[:-1][one["attention_mask"][0, 1:].bool()]


def mean_hessian(subject: Subject, function: Any, logits: Any, diagonal: bool) -> Tensor:
    rows = []
    for number in range(heads.n_examples(subject.batch)):
        one = heads.example(subject.batch, number)
        with torch.no_grad():
            whole = logits(subject.model, one)
        rows.append(
            reference.hessian(subject.model, one, function(logits, whole), subject.sites, diagonal)
        )
    return exactly(rows).mean(0)


@pytest.mark.parametrize(
    "subject", [FAMILIES[0], FAMILIES[4]], indirect=True, ids=["bert", "multi_head_attention"]
)
def test_ggn_is_the_hessian_of_the_divergence(subject: Subject) -> None:
    hessian = mean_hessian(subject, reference.divergence, class_logits, diagonal=False)
    matrix = ggn_matrix(subject.model, split(subject.batch, 2))
    # Second differences with a step of 1e-3 are off by about its square, and by rounding, 1e-16 /
    # 1e-6.
    close = {"rtol": 1e-4, "atol": 1e-5 * float(hessian.abs().max())}
    assert_close(matrix, hessian, **close)
    assert_close(flat(score(subject, "ggn")), matrix.diagonal() / 2, **EXACT)
    assert torch.linalg.eigvalsh(matrix).min() > -1e-12 * matrix.abs().max()


@pytest.mark.parametrize("subject", FAMILIES[1:4], indirect=True, ids=["gpt2", "llama", "t5"])
def test_ggn_of_tokens_is_unbiased(subject: Subject) -> None:
    hessian = mean_hessian(
        subject, reference.divergence, next_token_logits, diagonal=True
    ).diagonal()
    seeds = [Ggn(draws=8, seed=seed) for seed in range(24)]
    found = torch.stack([flat(score(subject, s)) for s in seeds])
    mean, error = found.mean(0), found.std(0) / len(seeds) ** 0.5
    assert ((mean - hessian / 2).abs() / error).max() < 4.5, "over twelve to twenty-four units"
    # Sharp enough to tell a wrong factor: in all, and within a few per cent.
    assert float(mean.sum() / (hessian.sum() / 2)) == pytest.approx(1, abs=0.1)


def test_drawn_classes_agree_with_all_classes(bert: Subject) -> None:
    exact, drawn = score(bert, [Ggn(), Ggn(draws=600)])
    assert (exact.seed, drawn.seed) == (None, 0)
    assert_close(flat(drawn), flat(exact), rtol=0.25, atol=0.02 * float(flat(exact).max()))
    assert flat(drawn).tolist() != flat(exact).tolist()


def test_ggn_of_a_regression_and_of_several_labels(bert: Subject) -> None:
    close = {"rtol": 1e-4, "atol": 1e-7}
    for kind, function in (
        ("regression", reference.squared_difference),
        ("multi_label_classification", reference.bernoulli_divergence),
    ):
        bert.model.config.problem_type = kind
        hessian = mean_hessian(bert, function, class_logits, diagonal=True).diagonal()
        del bert.batch["labels"]
        assert_close(flat(score(bert, Ggn())), hessian / 2, **close)
        bert.batch["labels"] = torch.tensor([0, 2, 1])


def test_ggn_reads_no_labels(bert: Subject) -> None:
    expected = score(bert, ["ggn", "fisher"])
    bert.batch["labels"] = torch.tensor([2, 1, 0])
    flipped = score(bert, ["ggn", "fisher"])
    assert flipped[0].values == expected[0].values
    assert flipped[1].values != expected[1].values
    del bert.batch["labels"]
    assert score(bert, "ggn", loss=None).values == expected[0].values


def test_ggn_of_answers_in_texts_without_a_mask() -> None:
    from transformers import BertConfig, BertForQuestionAnswering

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    model, ids = (
        BertForQuestionAnswering(BertConfig(vocab_size=20, **sizes)).eval(),
        torch.randint(20, (3, 5)),
    )
    mask = torch.ones_like(ids)
    bare, whole = (
        hp.score(model, [b], "ggn")
        for b in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask})
    )
    assert bare.values == whole.values
    mask[1:, 2:] = 0
    assert (
        hp.score(model, [{"input_ids": ids, "attention_mask": mask}], "ggn").values != whole.values
    )


def test_ggn_does_not_vanish_on_fitted_examples() -> None:
    """A squared error of 0: the loss's slope is 0, its curvature is not, and is what removal
    costs."""
    model, x = Linear().double().eval(), torch.randn(6, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        targets = model(x)

    def loss(m: Any, b: Tensor) -> Tensor:
        found: Tensor = (m(b) - targets).square().squeeze(1)
        return found

    ggn, exact = hp.score(model, [x], ["ggn", "leave_one_out"], loss=loss, progress=False)
    with pytest.raises(
        InvalidValue, match=r"the slopes of the loss .* must be larger than rounding"
    ):
        hp.score(model, [x], "fisher", loss=loss, progress=False)
    assert flat(exact).min() > 1e-6
    assert_close(flat(ggn), flat(exact), **EXACT)


def test_ggn_goes_forward_once_and_backward_once_a_class_but_one(
    bert: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))  # type: ignore[func-returns-value]
    with counted(bert.model) as runs:
        score(bert, "ggn", split(bert.batch, 2))
    coupled = 2  # on the first batch: do its examples see each other?
    assert (len(runs), len(calls)) == (
        2 + 2,
        2 * (3 - 1) + coupled,
    )  # with the costs and the model's own loss


def test_ggn_of_an_answers_ends() -> None:
    from transformers import BertForQuestionAnswering

    subject = family_subject("bert", "bert")
    subject.model.config.num_labels = 2
    model = BertForQuestionAnswering(subject.model.config).double().eval()
    subject = Subject(subject.layout, model, subject.batch, hp.find_sites(model), "bert")
    del subject.batch["labels"]

    def ends(model: nn.Module, one: Any) -> Tensor:
        out, mask = call(model, one), one["attention_mask"][0].bool()
        return torch.stack([out.start_logits[0, mask], out.end_logits[0, mask]])

    hessian = mean_hessian(subject, reference.divergence, ends, diagonal=True).diagonal()
    found = torch.stack([flat(score(subject, Ggn(draws=16, seed=s))) for s in range(12)])
    assert ((found.mean(0) - hessian / 2).abs() / (found.std(0) / 12**0.5)).max() < 4.5
    assert float(found.mean(0).sum() / (hessian.sum() / 2)) == pytest.approx(1, abs=0.1)


def test_labels_are_drawn_from_the_predictions() -> None:
    subject = family_subject("gpt2", "gpt2")
    with torch.no_grad():
        found = distributions(subject.model, subject.batch, "batch")
    labels = drawn_labels(found, content_seeds(subject.model, subject.batch, 0), 4000)
    p = found.logits[found.counted].softmax(-1)
    seen = torch.stack([torch.bincount(row, minlength=p.shape[1]) for row in labels.T]) / 4000
    assert ((seen - p).abs() / (p * (1 - p) / 4000).sqrt().clamp(min=1e-3)).max() < 5.5
    others = drawn_labels(found, content_seeds(subject.model, subject.batch, 1), 4000)
    assert (labels == others).double().mean() < 0.9


# ---------------------------------------------------------------- integrated gradients


@pytest.mark.parametrize(
    "subject", [FAMILIES[0], FAMILIES[4]], indirect=True, ids=["bert", "multi_head_attention"]
)
def test_integrated_gradients_are_the_integral(subject: Subject) -> None:
    one = heads.example(subject.batch, 0)
    slow = reference.integrated(
        subject.model, one, loss_of(subject), subject.sites[:2], intervals=24
    )
    with_all = score(subject, IntegratedGradients(points=24), [one], sites=subject.sites[:2])
    # Simpson's rule over 24 intervals.
    assert_close(flat(with_all), exactly(slow), rtol=1e-2, atol=3e-3 * max(map(abs, slow)))


def test_integrated_gradients_are_complete(subject: Subject) -> None:
    loss = loss_of(subject)
    with torch.no_grad():
        whole = loss(subject.model, subject.batch)
        closed = {s.name: torch.zeros(len(s.heads), dtype=torch.float64) for s in subject.sites}
        with hp.gated(subject.model, closed):
            saved = loss(subject.model, subject.batch) - whole
    # Tiny weights and a norm at once: Llama's loss turns over and over where its gates are almost
    # closed. The slopes of
    # T5 jump where a ReLU does, and no quadrature is fast there.
    close = {"llama": 0.03, "t5": 0.02}.get(subject.family, 1e-6)
    gaps = []
    for points in (4, 64):
        samples = estimate(subject, IntegratedGradients(points=points)).samples
        assert samples is not None
        gaps.append(float((samples.sum(1) - saved).abs().max() / saved.abs().max()))
    assert gaps[1] < gaps[0] / 4
    assert gaps[1] < close
    assert float(saved.abs().max()) > 0.01


def test_too_few_points_are_told(bert: Subject) -> None:
    few, enough = (estimate(bert, IntegratedGradients(points=n)).notes for n in (1, 48))
    assert enough == ()
    assert "take more points" in few[0]


def test_integrated_gradients_are_exact_on_a_polynomial() -> None:
    """A loss of degree 2 in the gates: its slope has degree 1, for which one point is enough."""
    model, x = Linear().double().eval(), torch.randn(6, 5, 8, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().squeeze(1)

    one, many = hp.score(
        model,
        [x],
        [IntegratedGradients(points=1), IntegratedGradients(points=9)],
        loss=loss,
        progress=False,
    )
    assert_close(flat(one), flat(many), **EXACT)
    loo, aio = hp.score(model, [x], ["leave_one_out", "add_one_in"], loss=loss, progress=False)
    # Of a quadratic game the Aumann-Shapley and the Shapley values are the mean of first and last
    # contribution.
    assert_close(flat(one), (flat(loo) + flat(aio)) / 2, **EXACT)


# ---------------------------------------------------------------- attribution patching


def test_a_base_of_zero_is_the_signed_slope(subject: Subject) -> None:
    zero, signed = score(subject, [AttributionPatching(), Taylor(reduce="signed")])
    assert zero.values == signed.values
    slow = reference.patched(
        subject.model,
        subject.batch,
        loss_of(subject),
        subject.sites,
        lambda i, s, t: torch.zeros(99, dtype=torch.float64),
    )
    assert_close(flat(zero), exactly(slow).mean(0), **EXACT)


def query_tokens(subject: Subject, site: Any, example: int, length: int) -> list[bool]:
    """Which queries of a site are no padding."""
    one = heads.example(subject.batch, example)
    mask = one.get("attention_mask")
    if "valid_lens" in one:
        return [t < int(one["valid_lens"][0]) for t in range(length)]
    if mask is None or (subject.family == "t5" and site.kind != "self"):
        return [True] * length
    return mask[0].bool().tolist()


def test_a_mean_base_is_its_formula(subject: Subject) -> None:
    loss, n = loss_of(subject), heads.n_examples(subject.batch)
    read = [
        reference.contexts(subject.model, heads.example(subject.batch, i), loss, subject.sites)
        for i in range(n)
    ]
    means = []
    for s, site in enumerate(subject.sites):
        tokens = [
            read[i][s].detach()[0, t]
            for i in range(n)
            for t, here in enumerate(query_tokens(subject, site, i, read[i][s].shape[1]))
            if here
        ]
        means.append(torch.stack(tokens).mean(0))
    slow = reference.patched(
        subject.model, subject.batch, loss, subject.sites, lambda i, s, t: means[s]
    )
    found = score(subject, AttributionPatching(base="mean"), split(subject.batch, 2))
    assert_close(flat(found), exactly(slow).mean(0), **EXACT)


def test_a_corrupted_base_is_its_formula(subject: Subject) -> None:
    loss, n = loss_of(subject), heads.n_examples(subject.batch)
    corrupted = [
        reference.contexts(
            subject.model,
            heads.example(rolled(subject.batch), i),
            loss,
            subject.sites,
            backward=False,
        )
        for i in range(n)
    ]
    slow = reference.patched(
        subject.model,
        subject.batch,
        loss,
        subject.sites,
        lambda i, s, t: corrupted[i][s].detach()[0, t],
    )
    found = score(
        subject, AttributionPatching(base="corrupt", corrupt=rolled), split(subject.batch, 2)
    )
    assert_close(flat(found), exactly(slow).mean(0), **EXACT)
    assert found.settings == {"base": "corrupt", "corrupt": f"{__name__}.rolled"}
    assert hp.HeadScores.from_json(found.to_json()) == found


def test_patching_is_exact_where_the_output_is_linear_in_the_contexts() -> None:
    """The estimate is the effect: replacing a head's contexts by their mean changes a linear loss
    by just that."""
    model, x = Linear().double().eval(), torch.randn(6, 5, 8, dtype=torch.float64)
    patching, mean = hp.score(
        model,
        [x],
        [AttributionPatching(base="mean"), hp.scoring.LeaveOneOut(replacement="mean")],
        loss=lambda m, b: m(b)[:, 0],
        progress=False,
    )
    assert_close(flat(patching), flat(mean), rtol=1e-9, atol=1e-12)


def test_shared_windowed_and_sequence_first_layers() -> None:
    """A layer that runs several times, windows on the batch axis, tokens before examples: same
    slope by both ways."""
    for layout, family in (("albert", "albert"), ("swin", "swin"), ("labml", "labml")):
        with Doubled():
            subject = family_subject(layout, family)
            loss = (
                loss_of(subject)
                if layout != "labml"
                else lambda m, b: call(m, b).flatten(1).logsumexp(-1)
            )
            zero = score(subject, Taylor(reduce="signed"), loss=loss)
            # A corruption that changes nothing has no effect, and one to zero is the slope.
            same = score(
                subject, AttributionPatching(base="corrupt", corrupt=lambda b: b), loss=loss
            )
            halves = [subject.batch] if layout == "labml" else split(subject.batch, 2)
            mean = score(subject, AttributionPatching(base="mean"), halves, loss=loss)
            whole = score(subject, AttributionPatching(base="mean"), loss=loss)
        assert flat(zero).abs().max() > 1e-3
        assert flat(same).abs().max() < 1e-14
        assert_close(flat(mean), flat(whole), **EXACT)
        assert not torch.allclose(flat(whole), flat(zero))


# ---------------------------------------------------------------- what they cost


def test_one_pass_serves_them_all(bert: Subject) -> None:
    batches = split(more(bert, 7), 3)
    with counted(bert.model) as runs:
        together = score(
            bert, ["taylor", "fisher", "taylor2", "attribution_patching", Fisher(block=32)], batches
        )
    assert len(runs) == 2 + 3, (
        "one to measure what the model costs, one for its own loss, one a batch"
    )
    assert together == tuple(
        score(bert, s, batches)
        for s in ("taylor", "fisher", "taylor2", "attribution_patching", Fisher(block=32))
    )
    for scorer, passes in (
        (IntegratedGradients(points=5), 5 + 2),
        (AttributionPatching(base="mean"), 2),
        (ALL[-1], 2),
    ):
        with counted(bert.model) as runs:
            score(bert, scorer, batches)
        assert len(runs) == 2 + 3 * passes  # costs, own loss


# ---------------------------------------------------------------- samples, notes


@pytest.mark.parametrize("scorer", ALL, ids=named)
def test_samples_are_the_examples_in_order(bert: Subject, scorer: Any) -> None:
    batch = more(bert, 5)
    found = estimate(bert, scorer, split(batch, 2))
    assert found.samples is not None
    assert found.samples.dtype == torch.float64
    rows = 3 if scorer == Fisher(block=2) else 5
    assert (tuple(found.samples.shape), found.n_examples) == ((rows, 12), 5)
    assert found.notes == () or isinstance(scorer, IntegratedGradients)
    assert_close(found.samples.mean(0), found.values.double(), **EXACT)
    assert_close(found.samples.std(0) / rows**0.5, found.standard_errors, **EXACT)
    if rows == 5 and getattr(scorer, "base", None) != "mean":
        last = estimate(bert, scorer, [heads.example(batch, 4)])
        assert_close(last.values.double(), found.samples[4], **EXACT)


@pytest.mark.parametrize("scorer", ALL, ids=named)
def test_one_example_and_equal_examples_are_told(bert: Subject, scorer: Any) -> None:
    one = heads.example(bert.batch, 0)
    single = estimate(bert, scorer, [one])
    assert single.standard_errors is None
    assert [n for n in single.notes if "No standard error" in n]
    equal = estimate(bert, scorer, [one] * 4)
    assert equal.standard_errors is not None
    assert [n for n in equal.notes if "promises nothing" in n]


def test_scores_of_zero_are_told(bert: Subject) -> None:
    bert.model.classifier.weight.data.zero_()
    assert any("Every score is 0" in n for n in estimate(bert, Ggn()).notes)
    with pytest.raises(InvalidValue, match="must be larger than rounding, got 0 at most"):
        estimate(bert, Fisher())


# ---------------------------------------------------------------- what may not change them


def same(
    found: Any, expected: Any, order: dict[str, list[int]] | None = None, blocks: bool = True
) -> None:
    """Equal to 1e-12 of the layer's largest score."""
    for a, b in zip(found, expected, strict=True):
        for site, row, other in zip(b.sites, a.values, b.values, strict=True):
            other = [other[u] for u in order[site.name]] if order else other
            largest = max(map(abs, other))
            assert largest > 1e-7
            assert_close(
                exactly(row) / largest,
                exactly(other) / largest,
                rtol=0,
                atol=1e-12,
                msg=lambda m, a=a: f"{a.scorer} {a.settings}: {m}",
            )


@pytest.fixture(params=[FAMILIES[0], FAMILIES[2]], ids=["bert", "llama"])
def text(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with Doubled():
        yield family_subject(*request.param)


def test_unchanged_by_batch_size_and_order(text: Subject) -> None:
    batch = more(text, 10)
    expected = score(text, ALL, split(batch, 7))
    for size in (1, 64):
        same(score(text, ALL, split(batch, size)), expected)
    order = [3, 9, 0, 4, 2, 8, 1, 7, 5, 6]
    unordered = [(s, e) for s, e in zip(ALL, expected, strict=True) if s != Fisher(block=2)]
    mixed = score(
        text, [s for s, _ in unordered], split({k: v[order] for k, v in batch.items()}, 4)
    )
    same(mixed, [e for _, e in unordered])


def test_unchanged_by_padding(text: Subject) -> None:
    same(score(text, ALL, [padded(text, 0, 5)]), score(text, ALL, [padded(text, 0, 0)]))


def test_drawn_labels_are_those_of_the_example_with_padding_on_the_left() -> None:
    with Doubled():
        text = family_subject("llama", "llama")
        same(
            score(text, [Ggn(), Taylor()], [padded(text, 3, 0)]),
            score(text, [Ggn(), Taylor()], [padded(text, 0, 0)]),
        )


def test_unchanged_by_the_attention_kernel(text: Subject) -> None:
    found = []
    for implementation in ("eager", "sdpa"):
        set_implementation(text.model, implementation)
        found.append(score(text, ALL, split(text.batch, 2)))
    same(*found)


def test_they_follow_a_permutation_of_heads(text: Subject) -> None:
    other = text.copy()
    orders = renumbered_(text, other)
    expected = score(text, ALL)
    found = hp.score(other, [text.batch], ALL, loss=loss_of(text), progress=False)
    same(found, expected, orders)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Fisher(block=0), "Fisher.block"),
        (lambda: Ggn(draws=0), "Ggn.draws"),
        (lambda: IntegratedGradients(points=0), "IntegratedGradients.points"),
        (lambda: AttributionPatching(base="noise"), "AttributionPatching.base"),
        (lambda: AttributionPatching(base="corrupt"), "AttributionPatching.corrupt"),
        (lambda: AttributionPatching(corrupt=rolled), "AttributionPatching.corrupt"),
        (lambda: fisher_matrix(nn.Linear(1, 1), [], structure="banded"), "structure="),
        (lambda: ggn_matrix(nn.Linear(1, 1), [], structure="banded"), "structure="),
    ],
)
def test_settings_that_are_refused(make: Any, where: str) -> None:
    with pytest.raises(InvalidValue, match=where):
        make()


@pytest.mark.parametrize(
    "scorer", ["taylor", "fisher", "taylor2", "integrated_gradients", "attribution_patching"]
)
def test_no_labels(bert: Subject, scorer: str) -> None:
    del bert.batch["labels"]
    with pytest.raises(
        InvalidValue, match=r"with 'labels', got only \['attention_mask', 'input_ids'\].*loss="
    ):
        score(bert, scorer)


@pytest.mark.parametrize("scorer", [s for s in ALL if not isinstance(s, Ggn)], ids=named)
def test_a_loss_that_does_not_see_a_layer(bert: Subject, scorer: Any) -> None:
    def first_layer(model: Any, batch: Any) -> Tensor:
        out = model.bert(
            batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
        )
        return out.hidden_states[1].square().mean((1, 2))

    with pytest.raises(InvalidValue, match=rf"{bert.sites[1].name}.*no dependence on it.*sites="):
        score(bert, scorer, loss=first_layer)


def test_ggn_of_a_model_without_logits(bert: Subject) -> None:
    bert.model = bert.model.bert
    del bert.batch["labels"]
    with pytest.raises(
        InvalidValue, match=r"batch 0: must be logits .*BaseModelOutput.*Use fisher"
    ):
        hp.score(bert.model, [bert.batch], "ggn", progress=False)


def test_ggn_of_batches_that_only_the_loss_takes_apart() -> None:
    x = torch.randn(6, 5, 8)
    with pytest.raises(
        InvalidValue, match=r"batch 0: must be what Linear takes.*batches without targets"
    ):
        hp.score(Linear(), [(x, x)], "ggn", loss=lambda m, b: m(b[0])[:, 0], progress=False)


def test_a_corrupted_batch_of_another_length(bert: Subject) -> None:
    def shorter(batch: Any) -> Any:
        return {k: v[:, :5] if v.ndim == 2 else v for k, v in batch.items()}

    with pytest.raises(InvalidValue, match=r"corrupted batch at .*\[3, 7, 16\], got \[3, 5, 16\]"):
        score(bert, AttributionPatching(base="corrupt", corrupt=shorter))
