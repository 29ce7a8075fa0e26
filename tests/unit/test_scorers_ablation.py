"""leave_one_out, add_one_in and shapley against every coalition written out, and their
identities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headprune as hp
from headprune.core.errors import InvalidValue
from headprune.model.double import Doubled
from headprune.model.losses import default_loss
from headprune.model.running import batch_size, call
from headprune.scoring import AddOneIn, LeaveOneOut, Shapley
from tests.laws.support import Subject, family_subject, labelled_subject, subject_of
from tests.reference import games
from tests.reference import scores as reference

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SUBJECTS = ["bert", "gpt2", "llama", "multi_head_attention", "t5"]


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return labelled_subject(request.param)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return call(model, batch).logsumexp(-1).square().reshape(batch_size(batch), -1).mean(1)


def wide_loss(model: nn.Module, batch: Any) -> Tensor:
    with Doubled():
        return default_loss(model, batch)


def wide(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(subject: Subject) -> Callable[[nn.Module, Any], Tensor]:
    return wide_loss if hasattr(subject.model, "config") else own_loss


def score(subject: Subject, scorer: Any, batches: Any = None, **options: Any) -> Any:
    return hp.score(
        *(subject.model, batches or [subject.batch], scorer),
        **{"loss": loss_of(subject), "sites": subject.sites, "progress": False} | options,
    )


def flat(scores: Any) -> Tensor:
    return torch.tensor([v for row in scores.values for v in row], dtype=torch.float64)


def split(batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
    return [
        {k: v[i : i + size] for k, v in batch.items()}
        for i in range(0, reference.n_examples(batch), size)
    ]


def mask_of(subject: Subject, site: Any) -> Tensor | None:
    """Padding of a site's queries."""
    if "valid_lens" in subject.batch:
        return torch.arange(subject.batch["x"].shape[1]) < subject.batch["valid_lens"][:, None]
    name = (
        "decoder_attention_mask"
        if subject.layout.name == "t5" and site.kind != "self"
        else "attention_mask"
    )
    return subject.batch.get(name)


def test_leave_one_out_is_the_loop_over_examples_and_units(subject: Subject) -> None:
    loss = loss_of(subject)
    slow = wide(reference.leave_one_out(subject.model, subject.batch, loss, subject.sites))
    found = score(subject, "leave_one_out")
    assert_close(flat(found), slow.mean(0), **EXACT)
    assert found.notes == ()
    assert_close(flat(score(subject, LeaveOneOut(replay=False))), slow.mean(0), **EXACT)


def test_leave_one_out_with_means_is_the_loop(subject: Subject) -> None:
    loss, batch, columns = loss_of(subject), subject.batch, []
    full = [
        reference.value(subject.model, reference.example(batch, i), loss)
        for i in range(len(next(iter(batch.values()))))
    ]
    for site in subject.sites:
        mean = torch.cat(
            games.contexts(subject.model, batch, loss, site, mask_of(subject, site))
        ).mean(0)[None]
        for unit in site.units:
            ones = (reference.example(batch, i) for i in range(len(full)))
            columns.append(
                [games.in_place_of(subject.model, one, loss, site, unit, mean) for one in ones]
            )
    slow = (wide(columns) - wide(full)).mean(1)
    assert_close(flat(score(subject, LeaveOneOut(replacement="mean"))), slow, **EXACT)


@pytest.mark.parametrize("gone", [[], [1]])
def test_means_take_the_place_of_heads_that_have_no_output_projection(gone: list[int]) -> None:
    subject = subject_of("head_list_bare")
    first = subject.sites[0]
    hp.prune_(subject.model, subject.without({first.name: gone}), sites=subject.sites)
    sites, (batch,) = hp.find_sites(subject.model), [subject.batch]
    found = score(subject, LeaveOneOut(replacement="mean"), sites=sites)
    whole = own_loss(subject.model, batch)
    for site, row in zip(sites, found.values, strict=True):
        module, seen = subject.model.get_submodule(site.name), []
        handle = module.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
        own_loss(subject.model, batch)
        handle.remove()
        for head, value in zip(site.heads, row, strict=True):
            columns = slice(head * site.value_dim, (head + 1) * site.value_dim)

            def replaced(
                m: Any, a: Any, out: Tensor, at: slice = columns, seen: Any = seen
            ) -> Tensor:
                out = out.clone()
                out[..., at] = seen[0][..., at].flatten(0, -2).mean(0)
                return out

            handle = module.register_forward_hook(replaced)
            expected = (own_loss(subject.model, batch) - whole).mean()
            handle.remove()
            assert_close(value, float(expected.detach()), **EXACT)


def test_leave_one_out_with_other_examples_is_the_loop(subject: Subject) -> None:
    """With a pool of two, which other example it is does not depend on the draw."""
    loss, batch, columns = loss_of(subject), split(subject.batch, 2)[0], []
    full = [reference.value(subject.model, reference.example(batch, i), loss) for i in range(2)]
    for site in subject.sites:
        mask = mask_of(subject, site)
        pool = games.contexts(subject.model, batch, loss, site, None if mask is None else mask[:2])
        for unit in site.units:
            ones = [(reference.example(batch, i), pool[1 - i]) for i in range(2)]
            columns.append(
                [
                    games.in_place_of(subject.model, one, loss, site, unit, other)
                    for one, other in ones
                ]
            )
    slow = (wide(columns) - wide(full)).mean(1)
    scorer = LeaveOneOut(replacement="resample", pool=2)
    assert_close(flat(score(subject, scorer, [batch])), slow, **EXACT)
    assert_close(flat(score(subject, scorer, split(batch, 1))), slow, **EXACT)


def test_add_one_in_is_the_loop(subject: Subject) -> None:
    loss = loss_of(subject)
    n = len(games.units_of(subject.sites))
    empty, *alone = (
        wide(games.worth(subject.model, subject.batch, loss, subject.sites, s)).mean()
        for s in [set(), *({u} for u in range(n))]
    )
    found = score(subject, AddOneIn())
    assert_close(flat(found), torch.stack(alone) - empty, **EXACT)
    assert found.notes == ()


def small_game() -> tuple[Subject, dict[frozenset[int], list[float]]]:
    """Six units, every coalition of which is run."""
    torch.manual_seed(0)
    model = nn.Sequential(*(hp.MultiHeadAttention(6, 3) for _ in range(2))).double().eval()
    batch = {"input": torch.randn(3, 4, 6, dtype=torch.float64) * 3}
    subject = Subject(
        hp.layouts.registry.get("multi_head_attention"), model, batch, hp.find_sites(model)
    )
    return subject, games.coalitions(model, batch, own_loss, subject.sites)


def test_shapley_shares_add_up_and_come_close_to_the_enumeration() -> None:
    subject, v = small_game()
    exact = games.shapley(v).mean(0)
    everyone = max(v, key=len)
    whole = wide(v[everyone]).mean() - wide(v[frozenset()]).mean()
    assert_close(exact.sum(), whole, **EXACT)
    found = score(subject, Shapley(orders=300, truncation=0.0, step=2))
    assert_close(flat(found).sum(), whole, rtol=1e-10, atol=1e-10)
    errors = torch.tensor([e for row in found.standard_errors or () for e in row])
    assert float((flat(found) - exact).abs().max()) < 0.05 * float(exact.abs().max())
    assert bool((errors > 0).all())
    few = flat(score(subject, Shapley(orders=1, truncation=0.0)))
    assert_close(few.sum(), whole, rtol=1e-10, atol=1e-10)
    assert float((few - exact).abs().max()) > float((flat(found) - exact).abs().max())


def test_shapley_of_one_order_is_its_marginals() -> None:
    subject, v = small_game()
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3)).tolist()
    expected = torch.zeros(6, dtype=torch.float64)
    for sequence in (order, order[::-1]):
        for place, unit in enumerate(sequence):
            before = frozenset(sequence[:place])
            gain = wide(v[before | {unit}]) - wide(v[before])
            expected[unit] += gain.mean() / 2
    assert_close(
        flat(score(subject, Shapley(orders=1, truncation=0.0, seed=3, step=2))), expected, **EXACT
    )


def test_truncation_keeps_the_sum_and_runs_less() -> None:
    subject, v = small_game()
    whole = wide(v[max(v, key=len)]).mean() - wide(v[frozenset()]).mean()
    calls = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return own_loss(model, batch)

    counts = []
    for truncation in (0.0, 0.6):
        calls.clear()
        found = score(subject, Shapley(orders=4, truncation=truncation, step=1), loss=counted)
        assert_close(flat(found).sum(), whole, rtol=1e-10, atol=1e-10)
        counts.append(len(calls))
    assert counts[1] < counts[0]


def test_two_sided_is_half_of_either_end_and_exact_without_third_order_interactions() -> None:
    subject, _ = small_game()
    both = score(subject, [LeaveOneOut(), AddOneIn()])
    found = flat(score(subject, Shapley(method="two_sided")))
    assert_close(found, (flat(both[0]) + flat(both[1])) / 2, **EXACT)

    torch.manual_seed(1)
    model = (
        nn.Sequential(hp.MultiHeadAttention(6, 3)).double().eval()
    )  # one layer: its output is linear in the gates
    batch = {"input": torch.randn(3, 4, 6, dtype=torch.float64)}
    one = Subject(subject.layout, model, batch, hp.find_sites(model))

    def quadratic(model: nn.Module, batch: Any) -> Tensor:
        return call(model, batch).square().mean((1, 2))

    exact = games.shapley(games.coalitions(model, batch, quadratic, one.sites)).mean(0)
    assert_close(flat(score(one, Shapley(method="two_sided"), loss=quadratic)), exact, **EXACT)


@pytest.mark.parametrize(
    "scorer",
    [
        *(
            LeaveOneOut(),
            LeaveOneOut(replacement="mean"),
            LeaveOneOut(replacement="resample", pool=3),
            AddOneIn(),
        ),
        *(Shapley(orders=2), Shapley(method="two_sided")),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_scores_do_not_depend_on_batches_or_padding(name: str, scorer: Any) -> None:
    subject = subject_of(name)
    whole = score(subject, scorer)
    largest = max(abs(v) for row in whole.values for v in row)
    padded = {
        k: nn.functional.pad(v, (0, 3)) if v.ndim == 2 else v for k, v in subject.batch.items()
    }
    for batches in (split(subject.batch, 1), split(subject.batch, 2), [padded]):
        found = score(subject, scorer, batches)
        assert_close(flat(found), flat(whole), rtol=0, atol=1e-12 * max(1, largest))
        assert found.n_examples == whole.n_examples


@pytest.mark.parametrize("replacement", ["mean", "resample"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_stands_in_does_not_depend_on_order_or_padding_on_the_left(
    name: str, replacement: str
) -> None:
    subject = subject_of(name)
    scorer = LeaveOneOut(
        replacement=replacement, **({"pool": 2} if replacement == "resample" else {})
    )
    whole = flat(score(subject, scorer))
    turned = {k: v.flip(0) for k, v in subject.batch.items()}
    assert_close(
        flat(score(subject, scorer, [turned])), whole, rtol=0, atol=1e-12 * float(whole.abs().max())
    )
    shifted = {
        k: nn.functional.pad(v, (3, 0)) if v.ndim == 2 else v for k, v in subject.batch.items()
    }
    shifted["position_ids"] = (shifted["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert_close(
        flat(score(subject, scorer, [shifted])),
        whole,
        rtol=0,
        atol=1e-12 * max(1, float(whole.abs().max())),
    )


@pytest.mark.parametrize("scorer", ["leave_one_out", "taylor", "activation_norm"])
def test_a_cache_in_a_batch_is_refused(scorer: str) -> None:
    from transformers import DynamicCache

    subject = subject_of("gpt2")
    with pytest.raises(
        InvalidValue, match=r"past_key_values.*left out, for every pass would add to it"
    ):
        score(subject, scorer, [{**subject.batch, "past_key_values": DynamicCache()}])


def test_resampling_needs_two_unlike_examples() -> None:
    subject = subject_of("bert")
    one = {k: v[:1].repeat(2, *[1] * (v.ndim - 1)) for k, v in subject.batch.items()}
    with pytest.raises(InvalidValue, match="at least two unlike examples"):
        score(subject, LeaveOneOut(replacement="resample"), [one])


def test_means_need_a_token_that_is_no_padding() -> None:
    subject = subject_of("bert")
    blank = {**subject.batch, "attention_mask": torch.zeros_like(subject.batch["attention_mask"])}
    with pytest.raises(
        InvalidValue, match=r"no padding, got only padding at bert\.encoder\.layer\.0\.attention"
    ):
        score(subject, LeaveOneOut(replacement="mean"), [blank])


def test_what_the_numbers_cannot_say_is_said() -> None:
    subject, _ = small_game()
    one = {"input": subject.batch["input"][:1]}
    for scorer in (LeaveOneOut(), AddOneIn(), Shapley(orders=2), Shapley(method="two_sided")):
        assert any("single example" in note for note in score(subject, scorer, [one]).notes), scorer
        same = {"input": one["input"].repeat(4, 1, 1)}
        assert any("same numbers" in note for note in score(subject, scorer, [same]).notes), scorer
    assert any("not over orders" in note for note in score(subject, Shapley(orders=1)).notes)

    def first_layer(model: nn.Module, batch: Any) -> Tensor:
        return model[0](batch["input"]).square().mean((1, 2))  # type: ignore[index]

    notes = score(subject, LeaveOneOut(), loss=first_layer).notes
    assert any("No head of 1 changes any loss" in note for note in notes)
    constant = score(
        subject, LeaveOneOut(), loss=lambda m, b: call(m, b).new_zeros(len(b["input"]))
    )
    assert any("Every score is 0" in note for note in constant.notes)


def test_losses_of_masks_are_those_of_gated_models(subject: Subject) -> None:
    loss, masks = loss_of(subject), [subject.ragged(seed) for seed in range(3)]
    swapped = subject.mask(
        {s.name: [h for u in s.units[1:] for h in u] for s in subject.sites[-1:]}
    )

    def under(mask: hp.HeadMask) -> Tensor:
        with torch.no_grad(), hp.gated(subject.model, mask, subject.sites):
            return loss(subject.model, subject.batch)

    subject.model.eval()
    for base in (None, masks[0]):
        found = hp.scoring.mask_losses(
            *(subject.model, split(subject.batch, 2), [*masks, swapped]),
            base=base,
            loss=loss,
            sites=subject.sites,
            progress=False,
        )
        start = under(base or subject.mask({}))
        assert_close(found, torch.stack([under(m) - start for m in [*masks, swapped]]), **EXACT)


def test_settings_are_checked() -> None:
    for make, where in [
        (lambda: LeaveOneOut(replacement="noise"), "LeaveOneOut.replacement"),
        (lambda: LeaveOneOut(pool=3), "LeaveOneOut.pool"),
        (lambda: LeaveOneOut(max_bytes=0), "LeaveOneOut.max_bytes"),
        (lambda: Shapley(method="exact"), "Shapley.method"),
        (lambda: Shapley(orders=0), "Shapley.orders"),
        (lambda: Shapley(step=0), "Shapley.step"),
        (lambda: Shapley(truncation=1.0), "Shapley.truncation"),
        (lambda: AddOneIn(max_bytes=0), "AddOneIn.max_bytes"),
        (lambda: Shapley(max_bytes=0), "Shapley.max_bytes"),
    ]:
        with pytest.raises(InvalidValue, match=where):
            make()


def test_resampling_needs_examples_on_an_axis_of_their_own() -> None:
    subject = family_subject("swin", "swin")
    with pytest.raises(InvalidValue, match="examples are no rows"):
        hp.score(
            subject.model,
            [subject.batch],
            LeaveOneOut(replacement="resample"),
            sites=subject.sites,
            progress=False,
        )
