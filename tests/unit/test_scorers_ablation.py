"""leave_one_out, add_one_in and shapley against every coalition written out, and their
identities."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headprune as hp
from headprune.model.double import Doubled
from headprune.scoring import AddOneIn, LeaveOneOut, Shapley
from tests.laws.support import Subject, labelled_subject, picture, subject_of
from tests.reference import games
from tests.reference import scores as reference
from tests.scoring_help import (
    EXACT,
    FAMILIES,
    flat,
    flat_errors,
    loss_of,
    own_loss,
    score,
    split,
    wide,
)

#: Sums of many marginals.
SUMMED = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True)
def _doubled():
    with Doubled():
        yield


@pytest.fixture(params=FAMILIES)
def subject(request):
    return labelled_subject(request.param)


def mask_of(subject, site):
    """Padding of a site's queries."""
    if "valid_lens" in subject.batch:
        return torch.arange(subject.batch["x"].shape[1]) < subject.batch["valid_lens"][:, None]
    decoder = subject.layout.name == "t5" and site.kind != "self"
    return subject.batch.get("decoder_attention_mask" if decoder else "attention_mask")


def replaced(subject, batch, stand_of):
    """``[examples, units]``: by how much losses rise where ``stand_of(site, example)`` takes the
    place of a unit's outputs."""
    model, loss, columns = subject.model, loss_of(subject), []
    ones = split(batch, 1)
    full = [reference.value(model, one, loss) for one in ones]
    for site in subject.sites:
        pairs = [(one, stand_of(site, i)) for i, one in enumerate(ones)]
        columns += [
            [games.in_place_of(model, one, loss, site, unit, stand) for one, stand in pairs]
            for unit in site.units
        ]
    return (wide(columns) - wide(full)).T


# ---------------------------------------------------------------- leave one out


def test_leave_one_out_is_the_loop_over_examples_and_units(subject):
    slow = reference.leave_one_out(subject.model, subject.batch, loss_of(subject), subject.sites)
    values, errors = reference.mean_and_error(slow)
    assert max(map(abs, values)) > 1e-3
    replayed, whole = score(subject, [LeaveOneOut(), LeaveOneOut(replay=False)])
    for found in (replayed, whole):
        assert_close(flat(found), wide(values), **EXACT)
        assert_close(flat_errors(found), wide(errors), **EXACT)
        assert found.notes == ()


def test_leave_one_out_with_means_is_the_loop(subject):
    means = {
        site.name: torch.cat(
            games.contexts(
                subject.model, subject.batch, loss_of(subject), site, mask_of(subject, site)
            )
        ).mean(0)[None]
        for site in subject.sites
    }
    slow = replaced(subject, subject.batch, lambda site, i: means[site.name])
    assert_close(flat(score(subject, LeaveOneOut(replacement="mean"))), slow.mean(0), **EXACT)


def test_leave_one_out_with_other_examples_is_the_loop(subject):
    """With a pool of two, which other example it is does not depend on the draw."""
    batch = split(subject.batch, 2)[0]

    def other(site, i):
        mask = mask_of(subject, site)
        mask = None if mask is None else mask[:2]
        return games.contexts(subject.model, batch, loss_of(subject), site, mask)[1 - i]

    slow = replaced(subject, batch, other).mean(0)
    scorer = LeaveOneOut(replacement="resample", pool=2)
    assert_close(flat(score(subject, scorer, [batch])), slow, **EXACT)
    assert_close(flat(score(subject, scorer, split(batch, 1))), slow, **EXACT)


@pytest.mark.parametrize("removed", [[], [1]])
def test_means_take_the_place_of_heads_that_have_no_output_projection(removed):
    subject = subject_of("head_list_bare")
    mask = subject.without({subject.sites[0].name: removed})
    hp.prune_(subject.model, mask, sites=subject.sites)
    found = score(subject, LeaveOneOut(replacement="mean"))
    whole = own_loss(subject.model, subject.batch)
    for site, row in zip(hp.find_sites(subject.model), found.values, strict=True):
        module, seen = subject.model.get_submodule(site.name), []
        handle = module.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
        own_loss(subject.model, subject.batch)
        handle.remove()
        for head, value in zip(site.heads, row, strict=True):
            at = slice(head * site.value_dim, (head + 1) * site.value_dim)
            mean = seen[0][..., at].flatten(0, -2).mean(0)

            def swap(m, a, out, at=at, mean=mean):
                out = out.clone()
                out[..., at] = mean
                return out

            handle = module.register_forward_hook(swap)
            expected = (own_loss(subject.model, subject.batch) - whole).mean()
            handle.remove()
            assert_close(value, float(expected.detach()), **EXACT)


# ---------------------------------------------------------------- add one in, shapley


def test_add_one_in_is_the_loop(subject):
    loss = loss_of(subject)
    n = len(games.units_of(subject.sites))
    empty, *alone = (
        wide(games.worth(subject.model, subject.batch, loss, subject.sites, opened)).mean()
        for opened in [set(), *({u} for u in range(n))]
    )
    found = score(subject, AddOneIn())
    assert_close(flat(found), torch.stack(alone) - empty, **EXACT)
    assert found.notes == ()


@pytest.fixture(scope="module")
def game():
    """Six units, every coalition of which is run."""
    torch.manual_seed(0)
    model = nn.Sequential(*(hp.MultiHeadAttention(6, 3) for _ in range(2))).double().eval()
    batch = {"input": torch.randn(3, 4, 6, dtype=torch.float64) * 3}
    layout = hp.layouts.registry.get("multi_head_attention")
    subject = Subject(layout, model, batch, hp.find_sites(model))
    return subject, games.coalitions(subject.model, subject.batch, own_loss, subject.sites)


def whole_of(v):
    return wide(v[max(v, key=len)]).mean() - wide(v[frozenset()]).mean()


def test_shapley_shares_add_up_and_come_close_to_the_enumeration(game):
    subject, v = game
    exact = games.shapley(v).mean(0)
    assert_close(exact.sum(), whole_of(v), **EXACT)
    found = score(subject, Shapley(orders=100, truncation=0.0))
    few = flat(score(subject, Shapley(orders=1, truncation=0.0)))
    assert_close(flat(found).sum(), whole_of(v), **SUMMED)
    assert_close(few.sum(), whole_of(v), **SUMMED)
    off = float((flat(found) - exact).abs().max())
    assert off < 0.1 * float(exact.abs().max())
    assert off < float((few - exact).abs().max())
    assert bool((flat_errors(found) > 0).all())


def test_shapley_of_few_orders_says_that_its_intervals_may_be_too_short(game):
    subject, _ = game
    said = [bool(score(subject, Shapley(orders=n)).notes) for n in (3, 8)]
    assert said == [True, False]


def test_shapley_of_one_order_is_its_marginals(game):
    subject, v = game
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3)).tolist()
    expected = torch.zeros(6, dtype=torch.float64)
    for sequence in (order, order[::-1]):
        for place, unit in enumerate(sequence):
            before = frozenset(sequence[:place])
            expected[unit] += (wide(v[before | {unit}]) - wide(v[before])).mean() / 2
    found = score(subject, Shapley(orders=1, truncation=0.0, seed=3, step=2))
    assert_close(flat(found), expected, **EXACT)


def test_truncation_keeps_the_sum_and_runs_less(game):
    subject, v = game
    calls, counts = [], []

    def counted(model, batch):
        calls.append(1)
        return own_loss(model, batch)

    for truncation in (0.0, 0.6):
        calls.clear()
        found = score(subject, Shapley(orders=4, truncation=truncation, step=1), loss=counted)
        assert_close(flat(found).sum(), whole_of(v), **SUMMED)
        counts.append(len(calls))
    assert counts[1] < counts[0]


def test_two_sided_is_half_of_either_end(game):
    subject, _ = game
    left, right, both = score(subject, [LeaveOneOut(), AddOneIn(), Shapley(method="two_sided")])
    assert_close(flat(both), (flat(left) + flat(right)) / 2, **EXACT)


# ---------------------------------------------------------------- losses of masks


def test_losses_of_masks_are_those_of_gated_models(subject):
    loss, masks = loss_of(subject), [subject.ragged(seed) for seed in range(3)]
    last = subject.sites[-1]
    masks.append(subject.mask({last.name: [h for u in last.units[1:] for h in u]}))

    def under(mask):
        with torch.no_grad(), hp.gated(subject.model, mask, subject.sites):
            return loss(subject.model, subject.batch)

    for base in (None, masks[0]):
        found = hp.scoring.mask_losses(
            *(subject.model, split(subject.batch, 2), masks),
            base=base,
            loss=loss,
            sites=subject.sites,
            progress=False,
        )
        start = under(base or subject.mask({}))
        assert_close(found, torch.stack([under(m) - start for m in masks]), **EXACT)
    before, batches = picture(subject.model), iter(split(subject.batch, 2))
    options = {"loss": loss, "sites": subject.sites, "progress": False}
    rise = hp.scoring.loss_of(subject.model, batches, **options)
    for some in (masks, masks[2:0:-1]):
        expected = torch.stack([under(m) - under(subject.mask({})) for m in some])
        assert_close(torch.from_numpy(rise(some)), expected, **EXACT)
    assert picture(subject.model) == before
