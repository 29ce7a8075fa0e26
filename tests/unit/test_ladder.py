"""``ladder``: the measured price of every level of a site, and the choice by it."""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import headprune as hp
from headprune.choice import _meter
from headprune.choice._held_out import fold_numbers
from headprune.core.errors import InvalidValue, PlanMismatch, UnsupportedModel
from headprune.core.ladders import SiteLadder
from headprune.model.distributions import Distributions


def _model():
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=50,
        initializer_range=0.3,
    )
    return BertForSequenceClassification(config).eval()


def _batches(n=3):
    torch.manual_seed(1)
    batches = []
    for _ in range(n):
        ids = torch.randint(0, 50, (6, 7))
        mask = torch.ones_like(ids)
        mask[2:, 5:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


@pytest.fixture(scope="module")
def scores():
    model = _model()
    sites = hp.find_sites(model, feed_forward=True)
    return hp.score(model, _batches(), "ladder", sites=sites, progress=False)


def test_prices_fall_to_zero_as_more_is_kept(scores):
    assert [len(ladder.kept) for ladder in scores.ladders] == [5, 13, 5, 13]
    for ladder in scores.ladders:
        assert list(ladder.rises) == sorted(ladder.rises, reverse=True)
        assert ladder.rises[0] > 0
        assert ladder.rises[-1] == 0
    assert hp.HeadScores.from_json(scores.to_json()) == scores
    part = scores.of("feed_forward")
    assert [ladder.site for ladder in part.ladders] == [site.name for site in part.sites]
    other = hp.score(
        _model(), _batches(), "ladder", loss=lambda m, b: m(**b).logits.square().sum(1)
    )
    assert other.ladders[0].rises != scores.ladders[0].rises, "a loss of the user's is priced"


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_price_is_the_divergence_of_the_cut_and_refitted_model(temperature):
    """The ladder's pass from a site on gives what a cut and ``lstsq`` of that site give."""
    model, batches = _model(), _batches()
    scorer = hp.scoring.registry.get("ladder")(temperature=temperature)
    sites = hp.find_sites(model, feed_forward=True)
    scores = hp.score(model, batches, scorer, sites=sites, progress=False)
    place = 2  # attention of the last layer; nothing after it is refitted
    site, ladder = scores.sites[place], scores.ladders[place]
    ranked = sorted(range(4), key=lambda unit: -scores.values[place][unit])
    small = copy.deepcopy(model)
    first = scores.sites[0].name
    keep = {first: range(4), site.name: ranked[:2]}
    hp.prune_(small, hp.HeadMask.from_keep(keep, {first: 4, site.name: 4}))
    hp.recover_(small, batches, hp.recovery.Lstsq(ridge=0.3), teacher=model, progress=False)
    expected = _divergences(model, small, temperature).mean()
    assert ladder.at(2) == pytest.approx(expected, rel=1e-3)


def _divergences(model, small, temperature):
    """Of the half of the rows on which prices are measured."""
    found = []
    folds = fold_numbers(2)
    with torch.no_grad():
        for batch in _batches():
            measured = torch.tensor([next(folds) for _ in batch["input_ids"]]) == 1
            part = {name: value[measured] for name, value in batch.items()}
            p = (model(**part).logits.double() / temperature).log_softmax(-1)
            q = (small(**part).logits.double() / temperature).log_softmax(-1)
            found.append((p.exp() * (p - q)).sum(-1) * temperature**2)
    return torch.cat(found).numpy()


def test_the_memory_for_the_whole_models_logits_is_bounded(monkeypatch):
    """A language model of 500 words: prices come from fewer positions, the same for every batch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    batches = [{"input_ids": torch.randint(0, 500, (4, length))} for length in (30, 20, 25)]
    meters = []
    verify = _meter.Meter._verify_playback
    monkeypatch.setattr(
        _meter.Meter, "_verify_playback", lambda meter: (meters.append(meter), verify(meter))
    )
    full = hp.score(model, batches, "ladder", progress=False)
    room = 6 * 500 * 4 * 10  # ten positions of six examples
    monkeypatch.setattr(_meter, "_ROOM", room)
    thin = hp.score(model, batches, "ladder", progress=False)
    positions = [[whole.logits.shape[1] for whole in meter._whole_outputs] for meter in meters]
    assert positions == [[29, 19, 24], [10, 10, 10]]
    assert sum(whole.logits.nbytes for whole in meters[1]._whole_outputs) == room
    rises = zip(full.ladders[0].rises, thin.ladders[0].rises, strict=True)
    assert all(a == pytest.approx(b, rel=0.5) for a, b in rises)
    assert full.ladders != thin.ladders


def test_thinned_positions_are_spread_over_the_counted_ones():
    logits = torch.arange(2 * 7.0).view(2, 7, 1)
    counted = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 1, 0, 1, 0, 0, 0]], dtype=torch.bool)
    whole = Distributions("regression", logits, counted)
    thin = whole.thinned(3)
    assert thin.logits[0, :, 0].tolist() == [1, 3, 5]
    assert thin.logits[1, :2, 0].tolist() == [8, 10]
    assert thin.counted.tolist() == [[True, True, True], [True, True, False]]
    assert whole.thinned(7) is whole
    assert whole.thinned(1).logits[0, :, 0].tolist() == [3]


def test_the_loss_of_a_mask_is_that_of_the_cut_and_refitted_model():
    model, batches = _model(), _batches()
    loss = hp.scoring.refitted_loss_of(model, batches, temperature=1.0)
    names = [site.name for site in hp.find_sites(model)]
    full = dict.fromkeys(names, 4)
    all_kept = hp.HeadMask.from_keep({name: range(4) for name in names}, full)
    # Attention of the last layer; nothing after it is refitted.
    cut = hp.HeadMask.from_keep({names[0]: range(4), names[1]: [0, 2]}, full)
    small = copy.deepcopy(model)
    hp.prune_(small, cut)
    hp.recover_(small, batches, hp.recovery.Lstsq(ridge=0.3), teacher=model, progress=False)
    found = loss([all_kept, cut])
    assert np.abs(found[0]).max() < 1e-6
    assert found[1] == pytest.approx(_divergences(model, small, 1.0), rel=1e-3, abs=1e-6)


def test_the_first_mask_saves_work_and_changes_no_loss():
    model = _model()
    sites = hp.find_sites(model, feed_forward=True)
    full = {site.name: len(site.heads) for site in sites}
    masks = []
    for cut in range(len(sites)):
        keep = {}
        for number, site in enumerate(sites):
            count = len(site.heads) // (4 if number == cut else 2)
            keep[site.name] = site.heads[:count]
        masks.append(hp.HeadMask.from_keep(keep, full))
    loss = hp.scoring.refitted_loss_of(model, _batches(), sites=sites)
    together = loss(masks)
    for number, mask in enumerate(masks):
        assert loss([mask])[0] == pytest.approx(together[number], rel=1e-5, abs=1e-8)
    assert len(set(together.mean(1).tolist())) == len(masks)


def test_the_knapsack_takes_the_cheapest_levels(scores):
    """No other choice of levels within the budget has a lower sum of prices."""
    budget = hp.Budget(keep_params=0.8)
    plan = hp.select(scores, budget)
    assert plan.selector == "knapsack"
    # The least sum of prices by parameters saved, site by site.
    allowed = scores.costs.total.params * 0.2
    best = {0: 0.0}
    for ladder, costs in zip(scores.ladders, scores.costs.units, strict=True):
        grown = {}
        for saved, price in best.items():
            for kept, rise in zip(ladder.kept[1:], ladder.rises[1:], strict=True):
                total = saved + (ladder.kept[-1] - kept) * costs[0].params
                grown[total] = min(grown.get(total, float("inf")), price + rise)
        best = grown
    least = min(price for saved, price in best.items() if saved >= allowed)
    rows = zip(scores.ladders, plan.mask.rows, strict=True)
    assert sum(ladder.at(len(row.kept)) for ladder, row in rows) == pytest.approx(least)


def test_kinds_may_have_budgets_of_their_own(scores):
    half = hp.Budget(keep_params=0.5)
    plan = hp.select(scores, {"self": hp.Budget(keep_heads=0.5), "feed_forward": half}, "knapsack")
    kept = {row.site: len(row.kept) for row in plan.mask.rows}
    neurons = {site.name for site in scores.sites if site.is_feed_forward}
    assert sum(n for site, n in kept.items() if site not in neurons) == 4
    assert 0 < sum(n for site, n in kept.items() if site in neurons) <= 48


def test_attention_without_an_output_projection_has_no_price():
    model, batch = hp.layouts.registry.get("head_list_bare").tiny(0)
    with pytest.raises(UnsupportedModel, match="one with an output projection"):
        hp.score(model, [batch], "ladder", progress=False)
    with pytest.raises(UnsupportedModel, match="one with an output projection"):
        hp.scoring.refitted_loss_of(model, [batch], progress=False)


def test_a_mask_of_neurons_needs_their_sites():
    """Without them, every neuron would be free."""
    model = _model()
    rise = hp.scoring.refitted_loss_of(model, _batches(), progress=False)
    sites = hp.find_sites(model, feed_forward=True)
    with pytest.raises(PlanMismatch, match="pass the same sites="):
        rise([hp.HeadMask.full(sites)])


def test_what_is_refused():
    wrong = [{"order": "auto"}, {"ridge": 0.0}, {"temperature": 0.0}, {"temperature": math.inf}]
    for settings in (*wrong, {"order_settings": {"nope": 1}}):
        with pytest.raises(InvalidValue):
            hp.scoring.registry.get("ladder")(**settings)
    for settings in (*wrong[1:], {"examples": 0}, {"ridge": None}):
        (name,) = settings
        with pytest.raises(InvalidValue, match=rf"refitted_loss_of\.{name}"):
            hp.scoring.refitted_loss_of(_model(), _batches(), progress=False, **settings)
    ladders = [((), ()), ((2, 1), (0.0, 0.0)), ((0, 1), (0.0,)), ((0,), (math.nan,))]
    for kept, rises in ladders:
        with pytest.raises(InvalidValue):
            SiteLadder("layer", kept, rises)
