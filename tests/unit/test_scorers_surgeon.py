"""surgeon: its prices are those of sets of heads solved from scratch, and least squares pays
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification

import headprune as hp
from headprune.core.errors import InvalidValue, UnsupportedModel
from headprune.model.double import Doubled
from headprune.model.losses import default_loss, inputs_of
from headprune.model.padding import query_mask
from headprune.model.sites import bind
from headprune.scoring import Surgeon, _removal, surgeon
from headprune.scoring._activations import unit_columns
from headprune.scoring._distributions import Distributions, fisher_targets, logit_targets
from headprune.scoring._removal import removed
from tests.laws.support import examples_of as data
from tests.laws.support import family_subject
from tests.reference import surgeon as reference


@pytest.fixture(autouse=True)
def _doubled() -> Iterator[None]:
    with Doubled():
        yield


def one_by_one(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {k: v[i : i + 1] for k, v in batch.items()} for i in range(len(next(iter(batch.values()))))
    ]


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    losses: Tensor = model(**batch).logsumexp(-1).square()
    return losses


def predictions(model: nn.Module, example: Any) -> list[Tensor]:
    """Numbers whose slopes' products sum to the Hessian of the divergence from the model's own
    predictions."""
    logits = model(**inputs_of(model, example)).logits[0]
    p = logits.detach().softmax(-1)
    values, vectors = torch.linalg.eigh(p.diag() - torch.outer(p, p))
    return [
        value.clamp(min=0).sqrt() * (vector @ logits)
        for value, vector in zip(values, vectors.T, strict=True)
    ]


def centred_logits(model: nn.Module, example: Any) -> list[Tensor]:
    """Numbers whose slopes' products sum to twice the mean product of the slopes of logits without
    their mean."""
    logits = model(**inputs_of(model, example)).logits[0]
    return list(((logits - logits.mean()) * (2 / len(logits)) ** 0.5).unbind())


@pytest.mark.parametrize(
    ("layout", "loss", "curvature"),
    [
        ("bert", default_loss, "output"),
        ("bert", default_loss, "logits"),
        ("bert", default_loss, "loss"),
        ("llama", default_loss, "loss"),
        ("multi_head_attention", own_loss, "loss"),
    ],
)
def test_prices_are_those_of_sets_solved_from_scratch(
    layout: str, loss: Any, curvature: str
) -> None:
    """Also where heads share keys, tokens are padding, and prices of two sites compete."""
    subject = family_subject(layout, layout)
    check_prices(subject.model, subject.sites, data(subject, 5), loss, curvature)


def test_prices_of_units_of_unlike_sizes() -> None:
    """A group that lost a query head, beside whole ones."""
    subject = family_subject("llama", "llama")
    batch = data(subject, 5)
    free = hp.find_sites(subject.model, policy="free")
    mask = hp.HeadMask.from_keep(
        {s.name: s.heads[1:] for s in free}, {s.name: s.n_query_heads for s in free}
    )
    hp.prune_(subject.model, mask, sites=free)
    sites = hp.find_sites(subject.model)
    assert {len(unit) for s in sites for unit in s.units} == {1, 2}
    check_prices(subject.model, sites, batch, default_loss, "loss")


def check_prices(
    model: nn.Module,
    sites: Any,
    batch: dict[str, Any],
    loss: Any,
    curvature: Any,
    draws: int | None = None,
) -> None:
    """Compares prices with those of the reference, which solves every set of heads from scratch."""
    bound = bind(model, sites)
    own: dict[str, Any] = {"output": predictions, "logits": centred_logits}
    targets = own.get(curvature, lambda model, example: [loss(model, example).sum()])

    def counted(example: Any) -> Tensor:
        length = (
            example["input_ids"].shape[1]
            if "input_ids" in example
            else next(iter(example.values())).shape[1]
        )
        mask = query_mask(model, "self", example, (1, length))
        return torch.ones(length, dtype=torch.bool) if mask is None else mask[0]

    projections = [b.gate for b in bound]
    model.requires_grad_(False)
    found, n = reference.tokens(
        projections, one_by_one(batch), lambda e: targets(model, e), counted
    )
    units = [[columns.tolist() for columns in unit_columns(b)] for b in bound]
    expected = reference.prices([p.weight.numpy() for p in projections], found, n, units)
    scorer = Surgeon(blocks=1, curvature=curvature, draws=draws)
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
    found = hp.score(
        model,
        batches,
        Surgeon(ridge=1e-8),
        loss=lambda m, x: m(x).square().mean((1, 2)),
        progress=False,
    )
    first, second = sorted(found.values[0][:2])
    assert first < 1e-6 * second


def test_blocks_change_the_errors_alone() -> None:
    subject = family_subject("bert", "bert")
    batch = data(subject, 12)
    one, some = (
        hp.score(subject.model, [batch], Surgeon(blocks=n), progress=False) for n in (1, 4)
    )
    assert one.standard_errors is None
    assert some.standard_errors is not None
    assert some.data is not None
    for mine, other in zip(one.values, some.values, strict=True):
        assert_close(mine, other, rtol=1e-9, atol=0)
    assert all(e > 0 for row in some.standard_errors for e in row)


@pytest.mark.parametrize(
    "kind", ["single_label_classification", "multi_label_classification", "regression"]
)
def test_slopes_of_targets_give_the_second_derivative_of_the_loss(kind: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True)
    found = Distributions(kind, logits, torch.ones(2, 1, dtype=torch.bool), by_token=False)
    targets, drawn = fisher_targets(found, [0, 1], None)
    assert not drawn
    slopes = torch.stack(
        [torch.autograd.grad(t, logits, retain_graph=True)[0][:, 0] for t in targets]
    )
    for example in range(2):
        z = logits[example, 0].detach()
        p = z.softmax(-1)
        expected = {
            "single_label_classification": p.diag() - torch.outer(p, p),
            "multi_label_classification": (z.sigmoid() * (1 - z.sigmoid()) / 4).diag(),
            "regression": 2 / 4 * torch.eye(4, dtype=torch.float64),
        }[kind]
        assert_close(slopes[:, example].T @ slopes[:, example], expected)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize(
    "kind", ["single_label_classification", "multi_label_classification", "regression"]
)
def test_slopes_of_groups_of_columns_do_so_on_average(kind: str, groups: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1500, 1, 5, dtype=torch.float64)
    logits = logits[:1].expand_as(logits).clone().requires_grad_()
    found = Distributions(kind, logits, torch.ones(1500, 1, dtype=torch.bool), by_token=False)

    def products(draws: int) -> tuple[Tensor, int, bool]:
        targets, drawn = fisher_targets(found, list(range(1500)), draws)
        slopes = torch.stack(
            [torch.autograd.grad(t, logits, retain_graph=True)[0][:, 0] for t in targets]
        )
        return torch.einsum("kei,kej->eij", slopes, slopes), len(targets), drawn

    exact, n_columns, exact_is_drawn = products(5)
    some, n_targets, drawn = products(groups)
    assert (n_columns, exact_is_drawn, n_targets, drawn) == (5, False, groups, True)
    # The mean of 1500 has 1/39 of the error of one; four times that is the bound.
    noise = (some - exact).square().mean(0).sqrt().norm()
    assert noise > 0.1 * exact[0].norm()
    assert (some.mean(0) - exact[0]).norm() < 4 * noise / 1500**0.5


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
    expected = (
        torch.block_diag(
            *[p.diag() - torch.outer(p, p) for p in logits.detach()[0, :2].softmax(-1)]
        )
        / 2
    )
    assert_close(total[:8, :8], expected, rtol=0, atol=0.02)
    assert_close(total[8:], torch.zeros_like(total[8:]), rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind", ["single_label_classification", "multi_label_classification", "regression"]
)
def test_slopes_of_logits_weigh_all_classes_alike(kind: str) -> None:
    logits = torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True)
    found = Distributions(kind, logits, torch.ones(2, 1, dtype=torch.bool), by_token=False)
    targets, drawn = logit_targets(found, [0, 1], None)
    assert not drawn
    slopes = torch.stack(
        [torch.autograd.grad(t, logits, retain_graph=True)[0][:, 0] for t in targets]
    )
    alike = torch.eye(4, dtype=torch.float64) - (
        0.25 if kind == "single_label_classification" else 0
    )
    for example in range(2):
        assert_close(slopes[:, example].T @ slopes[:, example], 2 / 4 * alike)


def test_slopes_of_logits_of_tokens_do_so_on_average() -> None:
    """A class that cannot be, as a place of padding where no answer begins, takes no part."""
    logits = torch.randn(1, 3, 4, dtype=torch.float64)
    logits[0, 0, 3] = -torch.inf
    logits.requires_grad_()
    counted = torch.tensor([[True, True, False]])
    total = torch.zeros(12, 12, dtype=torch.float64)
    for seed in range(100):
        targets, drawn = logit_targets(
            Distributions("single_label_classification", logits, counted), [seed], 50
        )
        assert drawn
        for target in targets:
            slope = torch.autograd.grad(target, logits, retain_graph=True)[0].flatten()
            total += torch.outer(slope, slope) / 100
    three, four = (torch.eye(n, dtype=torch.float64) - 1 / n for n in (3, 4))
    nothing = torch.zeros(1, 1, dtype=torch.float64)
    expected = (
        torch.block_diag(
            three * 2 / 3, nothing, four * 2 / 4, torch.zeros(4, 4, dtype=torch.float64)
        )
        / 2
    )
    assert_close(total, expected, rtol=0, atol=0.02)


def test_a_loss_of_the_users_is_asked() -> None:
    subject = family_subject("bert", "bert")
    batch = data(subject, 4)

    def doubled(model: nn.Module, batch: Any) -> Tensor:
        return 2 * default_loss(model, batch)

    single = hp.score(subject.model, [batch], Surgeon(curvature="loss"), progress=False)
    double = hp.score(subject.model, [batch], Surgeon(), loss=doubled, progress=False)
    for mine, other in zip(double.values, single.values, strict=True):
        assert_close(mine, tuple(4 * v for v in other), rtol=1e-9, atol=0)
    unasked = hp.score(
        subject.model, [batch], Surgeon(curvature="output"), loss=doubled, progress=False
    )
    assert any("was not asked" in note for note in unasked.notes)


def test_no_labels_are_needed() -> None:
    subject = family_subject("bert", "bert")
    bare = {k: v for k, v in subject.batch.items() if k != "labels"}
    with_labels, without = (
        hp.score(subject.model, [b], "surgeon", progress=False) for b in (subject.batch, bare)
    )
    assert with_labels.values == without.values


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_and_equal_examples(n: int) -> None:
    """Where nothing varies there is nothing to stand in for a head, and still an order."""
    subject = family_subject("bert", "bert")
    one = {k: v[:1] for k, v in data(subject, 3).items()}
    for batch in (
        {k: v[:n] for k, v in data(subject, 3).items()},
        {k: torch.cat([v] * n) for k, v in one.items()},
    ):
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
    with pytest.raises(
        InvalidValue, match=r"what bert\.encoder\.layer\.0\.attention gives Surgeon: must be finite"
    ):
        hp.score(subject.model, [subject.batch], "surgeon", progress=False)


def test_an_attention_that_runs_on_no_whole_examples() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = hp.MultiHeadAttention(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((1, 2)) + self.attention(x[1:]).mean()

    with pytest.raises(
        UnsupportedModel,
        match=r"attention: must be run on 3 examples, got 2 rows\. Leave this site",
    ):
        hp.score(
            Others(), [torch.randn(3, 4, 8)], "surgeon", loss=lambda m, x: m(x), progress=False
        )


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


# ---------------------------------------------------------------- many classes


def classifier(classes: int, kind: str = "single_label_classification") -> nn.Module:
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


def sentences(n: int, padding: int = 0) -> dict[str, Tensor]:
    """Rows of 3 to 7 tokens and padding, with so much of it at least."""
    torch.manual_seed(1)
    tokens = functional.pad(torch.randint(2, 30, (n, 7)), (0, padding))
    mask = (torch.arange(7 + padding) < 3 + torch.arange(n)[:, None] % 5).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def passes(model: Any, scorer: Surgeon) -> int:
    """How many backward passes a call of three batches takes, seen where they come by the
    logits."""
    count = 0

    def counting(slope: Tensor) -> None:
        nonlocal count
        count += 1

    def watch(module: nn.Module, args: Any, logits: Tensor) -> None:
        if logits.requires_grad:
            logits.register_hook(counting)

    handle = model.classifier.register_forward_hook(watch)
    hp.score(model, [sentences(4)] * 3, scorer, progress=False)
    handle.remove()
    return count


def test_more_classes_cost_no_more_backward_passes() -> None:
    three, four, five, many = (passes(classifier(n), Surgeon()) for n in (3, 4, 5, 64))
    assert four == five == many
    assert four - three == 3, "one for each of three batches"
    assert four - passes(classifier(64), Surgeon(draws=2)) == 2 * 3
    assert passes(classifier(64), Surgeon(draws=64)) - four == 60 * 3
    assert passes(classifier(64), Surgeon(draws=99)) - four == 60 * 3, "no more groups than columns"
    for kind in ("regression", "multi_label_classification"):
        assert passes(classifier(64, kind), Surgeon()) == four


def test_a_group_for_every_class_is_exact() -> None:
    model, batch = classifier(6), sentences(5)
    check_prices(model, hp.find_sites(model), batch, default_loss, "output", draws=6)
    exact = hp.score(model, [batch], Surgeon(draws=6), progress=False)
    again = hp.score(model, [batch], Surgeon(draws=7, seed=1), progress=False)
    assert exact.values == again.values


def test_up_to_four_classes_nothing_is_drawn() -> None:
    batch = sentences(5)
    few, many = classifier(4), classifier(5)
    exact = hp.score(few, [batch], Surgeon(draws=4), progress=False)
    found = hp.score(few, [batch], Surgeon(seed=3), progress=False)
    assert (found.values, found.seed) == (exact.values, None)
    drawn, other = (hp.score(many, [batch], Surgeon(seed=seed), progress=False) for seed in (3, 4))
    assert (drawn.seed, other.seed) == (3, 4)
    assert drawn.values != other.values


def test_prices_of_groups_approach_those_of_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """C's mean over seeds, of every site; half of that is off by as much as chance allows."""
    model, batch = classifier(9), sentences(6)
    seen: list[Tensor] = []

    def keeping(factors: Any, *args: Any) -> Any:
        seen.append(torch.stack([f.gg.sum(0) for f in factors]))
        return removed(factors, *args)

    monkeypatch.setattr(surgeon, "removed", keeping)
    for scorer in (Surgeon(draws=9), *(Surgeon(draws=2, seed=seed) for seed in range(60))):
        hp.score(model, [batch], replace(scorer, blocks=1), progress=False)
    exact, drawn = seen[0], torch.stack(seen[1:])
    noise = (drawn - exact).square().mean(0).sqrt().norm()
    assert noise > 0.02 * exact.norm()
    assert (drawn.mean(0) - exact).norm() < 4 * noise / 60**0.5


def test_many_classes_whatever_the_batches_and_the_padding() -> None:
    model, batch = classifier(64), sentences(7)
    whole = hp.score(model, [batch], "surgeon", progress=False)
    split = [{k: v[i : i + 2] for k, v in batch.items()} for i in range(0, 7, 2)]
    for batches in (split, one_by_one(batch), [sentences(7, padding=4)]):
        found = hp.score(model, batches, "surgeon", progress=False)
        assert (found.n_examples, found.seed) == (7, 0)
        for mine, other in zip(found.values, whole.values, strict=True):
            assert_close(list(mine), list(other), rtol=1e-8, atol=0)


# ---------------------------------------------------------------- runs and sites that go together


@pytest.mark.parametrize("at_once", [1, 4 * _removal.MATRICES * 8 * 16**2, 2**28])
def test_runs_that_go_together_are_those_that_go_alone(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time, four (that is across both sites), and all 18; by how often something is
    removed."""
    model, batches = classifier(3), [sentences(16)]
    calls: list[int] = []
    solve = torch.linalg.solve_ex

    def counting(a: Tensor, b: Tensor) -> Any:
        calls.append(len(a))
        return solve(a, b)

    monkeypatch.setattr(torch.linalg, "solve_ex", counting)
    monkeypatch.setattr(_removal, "AT_ONCE", at_once)
    found = hp.score(model, batches, "surgeon", progress=False)
    expected = {1: [1] * 54, 2**28: [18] * 3}.get(at_once, [4] * 12 + [2] * 3)
    assert calls == expected, "three removals a run: the last unit has nobody to take over"
    monkeypatch.setattr(_removal, "AT_ONCE", 1)
    alone = hp.score(model, batches, "surgeon", progress=False)
    assert found.standard_errors is not None
    assert alone.standard_errors is not None
    for mine, other in zip(
        (*found.values, *found.standard_errors),
        (*alone.values, *alone.standard_errors),
        strict=True,
    ):
        assert_close(list(mine), list(other), rtol=1e-9, atol=0)


def test_sites_of_unlike_shapes_go_apart() -> None:
    """Sites of three and of four heads."""
    model, batch = classifier(3), sentences(5)
    first, second = hp.find_sites(model)
    keep = {first.name: first.heads[1:], second.name: second.heads}
    hp.prune_(model, hp.HeadMask.from_keep(keep, dict.fromkeys(keep, 4)))
    assert [len(s.units) for s in hp.find_sites(model)] == [3, 4]
    check_prices(model, hp.find_sites(model), batch, default_loss, "output")
