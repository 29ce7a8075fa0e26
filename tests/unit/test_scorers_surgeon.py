"""surgeon: its prices are those of sets of heads solved from scratch, and least squares pays them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.double import Doubled
from headprune.model.losses import default_loss, inputs_of
from headprune.model.padding import query_mask
from headprune.model.sites import bind
from headprune.scoring import Surgeon
from headprune.scoring._activations import unit_columns
from headprune.scoring._distributions import Distributions, fisher_targets
from tests.laws.support import examples_of as data
from tests.laws.support import family_subject
from tests.reference import surgeon as reference


@pytest.fixture(autouse=True)
def _doubled() -> Iterator[None]:
    with Doubled():
        yield


def one_by_one(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v[i : i + 1] for k, v in batch.items()} for i in range(len(next(iter(batch.values()))))]


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    losses: Tensor = model(**batch).logsumexp(-1).square()
    return losses


def predictions(model: nn.Module, example: Any) -> list[Tensor]:
    """Numbers whose slopes' products sum to the Hessian of the divergence from the model's own predictions."""
    logits = model(**inputs_of(model, example)).logits[0]
    p = logits.detach().softmax(-1)
    values, vectors = torch.linalg.eigh(p.diag() - torch.outer(p, p))
    return [value.clamp(min=0).sqrt() * (vector @ logits) for value, vector in zip(values, vectors.T, strict=True)]


@pytest.mark.parametrize(
    ("layout", "loss", "curvature"),
    [
        ("bert", default_loss, "output"),
        ("bert", default_loss, "loss"),
        ("llama", default_loss, "loss"),
        ("multi_head_attention", own_loss, "loss"),
    ],
)
def test_prices_are_those_of_sets_solved_from_scratch(layout: str, loss: Any, curvature: str) -> None:
    """Also where heads share keys, tokens are padding, and prices of two sites compete."""
    subject = family_subject(layout, layout)
    check_prices(subject.model, subject.sites, data(subject, 5), loss, curvature)


def test_prices_of_units_of_unlike_sizes() -> None:
    """A group that lost a query head, beside whole ones."""
    subject = family_subject("llama", "llama")
    batch = data(subject, 5)
    free = hp.find_sites(subject.model, policy="free")
    mask = hp.HeadMask.from_keep({s.name: s.heads[1:] for s in free}, {s.name: s.n_query_heads for s in free})
    hp.prune_(subject.model, mask, sites=free)
    sites = hp.find_sites(subject.model)
    assert {len(unit) for s in sites for unit in s.units} == {1, 2}
    check_prices(subject.model, sites, batch, default_loss, "loss")


def check_prices(model: nn.Module, sites: Any, batch: dict[str, Any], loss: Any, curvature: str) -> None:
    """Compares prices with those of the reference, which solves every set of heads from scratch."""
    bound = bind(model, sites)
    targets = predictions if curvature == "output" else lambda model, example: [loss(model, example).sum()]

    def counted(example: Any) -> Tensor:
        length = example["input_ids"].shape[1] if "input_ids" in example else next(iter(example.values())).shape[1]
        mask = query_mask(model, "self", example, (1, length))
        return torch.ones(length, dtype=torch.bool) if mask is None else mask[0]

    projections = [b.gate for b in bound]
    model.requires_grad_(False)
    found, n = reference.tokens(projections, one_by_one(batch), lambda e: targets(model, e), counted)
    units = [[columns.tolist() for columns in unit_columns(b)] for b in bound]
    expected = reference.prices([p.weight.numpy() for p in projections], found, n, units)
    scorer = Surgeon(blocks=1, curvature=curvature)  # type: ignore[arg-type]
    scores = hp.score(model, [batch], scorer, loss=loss, sites=sites, progress=False)
    assert scores.n_examples == 5
    for mine, literal in zip(scores.values, expected, strict=True):
        assert_close(list(mine), literal, rtol=1e-7, atol=1e-12)


def test_the_lowest_are_those_that_went_first() -> None:
    """The second of two equal heads costs what the pair does; the first costs nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(hp.MultiHeadAttention(12, 3)).double()
    with torch.no_grad():
        for name in ("W_q", "W_k", "W_v"):
            part = model[0].get_submodule(name)
            part.weight[:4] = part.weight[4:8]
            part.bias[:4] = part.bias[4:8]
    batches = [torch.randn(8, 6, 12).double() for _ in range(4)]
    found = hp.score(model, batches, Surgeon(ridge=1e-8), loss=lambda m, x: m(x).square().mean((1, 2)), progress=False)
    first, second = sorted(found.values[0][:2])
    assert first < 1e-6 * second


def test_blocks_change_the_errors_alone() -> None:
    subject = family_subject("bert", "bert")
    batch = data(subject, 12)
    one, some = (hp.score(subject.model, [batch], Surgeon(blocks=n), progress=False) for n in (1, 4))
    assert one.standard_errors is None
    assert some.standard_errors is not None
    assert some.data is not None
    for mine, other in zip(one.values, some.values, strict=True):
        assert_close(mine, other, rtol=1e-9, atol=0)
    assert all(e > 0 for row in some.standard_errors for e in row)


@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification", "regression"])
def test_slopes_of_targets_give_the_second_derivative_of_the_loss(kind: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True)
    found = Distributions(kind, logits, torch.ones(2, 1, dtype=torch.bool), by_token=False)
    targets, drawn = fisher_targets(found, [0, 1], None)
    assert not drawn
    slopes = torch.stack([torch.autograd.grad(t, logits, retain_graph=True)[0][:, 0] for t in targets])
    for example in range(2):
        z = logits[example, 0].detach()
        p = z.softmax(-1)
        expected = {
            "single_label_classification": p.diag() - torch.outer(p, p),
            "multi_label_classification": (z.sigmoid() * (1 - z.sigmoid()) / 4).diag(),
            "regression": 2 / 4 * torch.eye(4, dtype=torch.float64),
        }[kind]
        assert_close(slopes[:, example].T @ slopes[:, example], expected)


def test_slopes_of_drawn_targets_do_so_on_average() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    counted = torch.tensor([[True, True, False]])
    total = torch.zeros(12, 12, dtype=torch.float64)
    for seed in range(40):
        found = Distributions("single_label_classification", logits, counted)
        targets, drawn = fisher_targets(found, [seed], 50)
        assert drawn
        for target in targets:
            slope = torch.autograd.grad(target, logits, retain_graph=True)[0].flatten()
            total += torch.outer(slope, slope) / 40
    expected = torch.block_diag(*[p.diag() - torch.outer(p, p) for p in logits.detach()[0, :2].softmax(-1)]) / 2
    assert_close(total[:8, :8], expected, rtol=0, atol=0.02)
    assert_close(total[8:], torch.zeros_like(total[8:]), rtol=0, atol=0)


def test_a_loss_of_the_users_is_asked() -> None:
    subject = family_subject("bert", "bert")
    batch = data(subject, 4)

    def doubled(model: nn.Module, batch: Any) -> Tensor:
        return 2 * default_loss(model, batch)

    single = hp.score(subject.model, [batch], Surgeon(curvature="loss"), progress=False)
    double = hp.score(subject.model, [batch], Surgeon(), loss=doubled, progress=False)
    for mine, other in zip(double.values, single.values, strict=True):
        assert_close(mine, tuple(4 * v for v in other), rtol=1e-9, atol=0)
    unasked = hp.score(subject.model, [batch], Surgeon(curvature="output"), loss=doubled, progress=False)
    assert any("was not asked" in note for note in unasked.notes)


def test_no_labels_are_needed() -> None:
    subject = family_subject("bert", "bert")
    bare = {k: v for k, v in subject.batch.items() if k != "labels"}
    with_labels, without = (hp.score(subject.model, [b], "surgeon", progress=False) for b in (subject.batch, bare))
    assert with_labels.values == without.values


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_and_equal_examples(n: int) -> None:
    """Where nothing varies there is nothing to stand in for a head, and still an order."""
    subject = family_subject("bert", "bert")
    one = {k: v[:1] for k, v in data(subject, 3).items()}
    for batch in ({k: v[:n] for k, v in data(subject, 3).items()}, {k: torch.cat([v] * n) for k, v in one.items()}):
        found = hp.score(subject.model, [batch], "surgeon", progress=False)
        assert len({v for row in found.values for v in row}) == 12
        assert all(v >= 0 for row in found.values for v in row)


def test_nothing_but_padding() -> None:
    subject = family_subject("bert", "bert")
    batch = {**subject.batch, "attention_mask": torch.zeros(3, 7, dtype=torch.long)}
    with pytest.raises(InvalidValue, match="with a token that"):
        hp.score(subject.model, [batch], "surgeon", progress=False)


def test_sums_beyond_the_range_of_numbers() -> None:
    subject = family_subject("bert", "bert")
    layer = subject.model.bert.encoder.layer[0].attention
    with torch.no_grad():
        for own in layer.self.value.parameters():
            own *= 1e-200
        layer.output.dense.weight *= 1e200  # so that the model computes the same
    with pytest.raises(InvalidValue, match=r"what bert\.encoder\.layer\.0\.attention gives Surgeon: must be finite"):
        hp.score(subject.model, [subject.batch], "surgeon", progress=False)


def test_an_attention_that_runs_on_no_whole_examples() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = hp.MultiHeadAttention(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((1, 2)) + self.attention(x[1:]).mean()

    with pytest.raises(UnsupportedModel, match=r"attention: must be run on 3 examples, got 2 rows\. Leave this site"):
        hp.score(Others(), [torch.randn(3, 4, 8)], "surgeon", loss=lambda m, x: m(x), progress=False)


def test_a_site_that_never_runs() -> None:
    subject = family_subject("bert", "bert")
    subject.model.spare = hp.MultiHeadAttention(8, 2).double()
    with pytest.raises(InvalidValue, match="spare"):
        hp.score(subject.model, [subject.batch], "surgeon", progress=False)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"curvature": "hessian"}, r"Surgeon\.curvature"),
        ({"ridge": 0.0}, r"Surgeon\.ridge"),
        ({"draws": 0}, r"Surgeon\.draws"),
        ({"draws": 2, "curvature": "loss"}, r"Surgeon\.draws"),
        ({"blocks": 0}, r"Surgeon\.blocks"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidValue, match=where):
        Surgeon(**settings)
