"""`auto`: each candidate's plan is cut, refitted on other rows and judged; the lowest held-out loss
is taken."""

import copy
import threading
from dataclasses import replace
from itertools import islice
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.stats import t as student

import headprune as hp
from headprune.choice import _held_out
from headprune.choice._held_out import fold_numbers
from headprune.choice.auto import Auto
from headprune.core.choice import RANDOM
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.core.scores import HeadScores
from tests.laws.support import labelled_subject
from tests.scoring_help import Stack

CANDIDATES = ("taylor", "obs", "fluctuation")
HALF = hp.Budget(keep_heads=0.5)
ROWS = 12


class Stream(Stack):
    def __init__(self):
        super().__init__(8, 4, 3)

    def forward(self, batch):
        return super().forward(batch["x"] if isinstance(batch, dict) else batch)


def loss(model, x):
    return (model(x) - x[:, 0, :3]).square().sum(1)


@pytest.fixture
def model():
    return Stream()


@pytest.fixture
def rows():
    return torch.randn(ROWS, 5, 8, generator=torch.Generator().manual_seed(1))


def auto(**changes):
    return Auto(**{"candidates": CANDIDATES, **changes})


def score(model, rows, size=5, **changes):
    batches = list(rows.split(size))
    return hp.score(model, batches, auto(**changes), loss=loss, progress=False)


def choice_of(model, rows, size=5, **changes):
    return score(model, rows, size, **changes).choice


def plan_of(model, rows, name):
    return hp.select(hp.score(model, [rows], name, loss=loss), HALF)


def losses_when_cut(model, rows, plan):
    with hp.gated(model, plan), torch.no_grad():
        return loss(model, rows).double().numpy()


def folds_of(rows):
    """The fold of each row, of two."""
    return torch.tensor(list(islice(fold_numbers(2), len(rows))))


def losses_by_hand(model, rows, plan):
    """``[rows]``: every row's loss under a plan, cut and refitted on the rows of the other fold."""
    found = torch.zeros(len(rows), dtype=torch.float64)
    folds = folds_of(rows)
    for fold in (0, 1):
        small = copy.deepcopy(model)
        hp.prune_(small, plan)
        others = [rows[folds != fold]]
        hp.recover_(small, others, hp.recovery.Lstsq(feed_forward=True), model)
        with torch.no_grad():
            found[folds == fold] = loss(small.eval(), rows[folds == fold]).double()
    return found.numpy()


def interval(difference, comparisons, stretch):
    quantile = student.ppf(1 - 0.05 / (2 * comparisons), len(difference) - 1)
    half = quantile * difference.std(ddof=1) / len(difference) ** 0.5 * stretch
    return [difference.mean() - half, difference.mean() + half]


# ---------------------------------------------------------------- the numbers


def test_losses_are_those_of_cutting_and_refitting_by_hand(model, rows):
    choice = choice_of(model, rows)
    expected = {
        name: losses_by_hand(model, rows, plan_of(model, rows, name)) for name in CANDIDATES
    }
    found = {c.scorer: c.loss for c in choice.candidates}
    assert set(found) == {*CANDIDATES, RANDOM}
    for name in CANDIDATES:
        assert_allclose(found[name], expected[name].mean(), rtol=1e-4)
    lowest = min(CANDIDATES, key=lambda name: expected[name].mean())
    within = []
    for name in CANDIDATES:
        difference = expected[name] - expected[lowest]
        if difference.mean() <= difference.std(ddof=1) / ROWS**0.5 * 3**0.5:
            within.append(name)
    assert choice.chosen == within[0]
    assert_allclose(choice.whole, float(loss(model, rows).mean().detach()), rtol=1e-5)
    assert choice.n_examples == ROWS


def test_folds_have_rows_of_each_class_where_classes_alternate():
    folds = folds_of(range(200))
    assert int((folds == 0).sum()) == 100
    assert 30 < int((folds[::2] == 0).sum()) < 70
    # Of each two consecutive rows each fold has one, so that folds have rows of like length.
    assert (folds[::2] != folds[1::2]).all()


@pytest.mark.parametrize(("name", "is_text"), [("llama", True), ("bert", False)])
def test_losses_of_a_text_are_shown_as_perplexities(name, is_text):
    subject = labelled_subject(name)
    batches = [subject.batch] * 2
    scorer = auto(candidates=("obs",), refit=None)
    scores = hp.score(subject.model, batches, scorer, sites=subject.sites, progress=False)
    assert scores.choice.is_text == is_text


def test_without_a_refit_rows_share_no_fit(model, rows):
    choice = choice_of(model, rows, refit=None)
    assert not choice.refit
    assert choice.refitting is None
    losses = {name: losses_when_cut(model, rows, plan_of(model, rows, name)) for name in CANDIDATES}
    for one in choice.candidates:
        if one.scorer != RANDOM:
            difference = losses[one.scorer] - losses[choice.chosen]
            assert_allclose(one.loss, losses[one.scorer].mean(), rtol=1e-5)
            expected = interval(difference, len(CANDIDATES) - 1, stretch=1)
            assert_allclose([one.low, one.high], expected, atol=1e-5)


def test_what_the_refit_is_worth_is_the_difference_to_the_cut_model(model, rows):
    found = score(model, rows)
    choice = found.choice
    plan = plan_of(model, rows, choice.chosen)
    alone = losses_when_cut(model, rows, plan)
    difference = alone - losses_by_hand(model, rows, plan)
    assert_allclose(choice.refitting.loss, alone.mean(), rtol=1e-5)
    expected = interval(difference, 1, stretch=3**0.5)
    assert_allclose([choice.refitting.low, choice.refitting.high], expected, rtol=1e-3)
    assert HeadScores.from_json(found.to_json()) == found


def test_scores_are_those_of_the_chosen_candidate_with_its_settings(model, rows):
    found = score(model, rows, candidates=({"taylor": {"reduce": "signed"}},))
    assert found.choice.chosen == "taylor (reduce=signed)"
    assert (found.scorer, found.settings["reduce"]) == ("taylor", "signed")
    assert "chosen by auto" in found.title
    assert HeadScores.from_json(found.to_json()) == found
    alone = hp.score(model, [rows], hp.scoring.Taylor(reduce="signed"), loss=loss)
    assert_allclose(np.array(found.values), np.array(alone.values), rtol=1e-5)


def test_kinds_are_judged_by_themselves_too():
    subject = labelled_subject("t5")
    scorer = Auto(candidates=("taylor",), refit=None, random_draws=1)
    found = hp.score(subject.model, [subject.batch] * 2, scorer, progress=False)
    assert {c.name for c in found.choice.candidates} == {"taylor", "taylor, by kind", RANDOM}


# ---------------------------------------------------------------- how they are found


@pytest.fixture
def held_out(monkeypatch):
    """Replaces the losses that `auto` judges by: ``held_out(change)`` gets plans, refit and them."""
    plain = _held_out.held_out_losses

    def replace_by(change):
        def changed(problem, folds, plans, refit):
            return change(plans, refit, plain(problem, folds, plans, refit))

        monkeypatch.setattr("headprune.choice.auto.held_out_losses", changed)

    return replace_by


def test_plans_that_are_the_same_are_judged_once(model, rows, held_out):
    asked = []
    held_out(lambda plans, refit, losses: (asked.append(len(plans)), losses)[1])
    names = ("taylor", "taylor2", "fisher", "obs")
    choice = choice_of(model, rows, keep=7, random_draws=0, candidates=names)
    same = [c for c in choice.candidates if c.same_as]
    assert same
    assert asked == [len(choice.candidates) - len(same), 1], "the chosen one without a refit, too"
    for one in same:
        assert one.loss == next(c.loss for c in choice.candidates if c.name == one.same_as)


def test_the_model_is_as_it_was(model, rows):
    before = copy.deepcopy(model.state_dict())
    model.train()
    score(model, rows)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# ---------------------------------------------------------------- what goes wrong


def test_a_refit_that_harms_or_is_refused_is_a_note_of_the_scores(model, rows, monkeypatch):
    def spoil(self, problem, small, batches):
        with torch.no_grad():
            small.head.bias.add_(10.0)

    refusal = UnsupportedModel("the model", "one that can be refitted", "another", "")
    monkeypatch.setattr(Auto, "refit_", spoil)
    assert any("lstsq makes the cut model worse" in note for note in score(model, rows).notes)
    monkeypatch.setattr(Auto, "refit_", Mock(side_effect=refusal))
    found = score(model, rows)
    assert (found.choice.refit, found.choice.refitting) == ("", None)
    assert any("auto: Judged without a refit, which lstsq refuses" in note for note in found.notes)


def test_a_candidate_whose_losses_are_not_finite_is_not_taken(model, rows, held_out):
    def first_is_lost(plans, refit, losses):
        losses[0, 3] = torch.nan
        return losses

    held_out(first_is_lost)
    choice = choice_of(model, rows, keep=0.6)
    assert "taylor" not in {c.scorer for c in choice.candidates}
    assert "NaN or infinite: taylor" in choice.notes[0]
    with pytest.raises(InvalidValue, match="must be finite for at least one candidate"):
        score(model, rows, candidates=("taylor",))


def test_what_cannot_be_judged_is_refused(model, rows):
    def contrast(model, x):
        out = model(x)
        return (out @ out.T).log_softmax(1).diagonal().neg()

    with pytest.raises(InvalidValue, match="at least 4 examples for 2 folds, got 3"):
        score(model, rows[:3])
    with pytest.raises(InvalidValue, match="auto"):
        hp.score(model, [rows], auto(), loss=contrast, progress=False)
    with pytest.raises(InvalidValue, match="depends on the other examples"):
        hp.score(model, [rows, rows], auto(), loss=loss, until=hp.Stable(k=2), progress=False)
    model.lock = threading.Lock()
    with pytest.raises(UnsupportedModel, match=r"one that can be copied.*name a scorer"):
        score(model, rows)


WRONG = [
    ({"candidates": ("auto",)}, "auto not among them"),
    ({"candidates": ("random",)}, "random is judged anyway"),
    ({"candidates": ("magnitude",)}, "scorers that read data"),
    ({"candidates": ()}, "at least one scorer"),
    ({"candidates": ({"taylor": {"reduce": "all"}},)}, "one of example"),
    ({"candidates": ({"taylor": {"reduced": "token"}},)}, "settings of taylor, got 'reduced'"),
    ({"candidates": ({"taylor": {}, "obs": {}},)}, "mappings of one name to its settings"),
    ({"candidates": ("tailor",)}, "taylor"),
    ({"candidates": "taylor"}, "a list of scorers, .* got 'taylor'"),
    ({"candidates": [hp.scoring.Taylor()]}, "a list of scorers"),
    ({"candidates": None}, "a list of scorers"),
    ({"candidates": ("taylor", "taylor")}, "different scorers"),
    ({"folds": 1}, "a count >= 2"),
    ({"folds": 2.5}, "a count >= 2"),
    ({"random_draws": -1}, "a count >= 0"),
    ({"seed": "x"}, "a count >= 0"),
    ({"refit": None, "refit_settings": {"ridge": 1.0}}, "left out where refit is None"),
    ({"confidence": 1.0}, "between 0 and 1"),
    ({"confidence": "a"}, "between 0 and 1"),
    ({"refit_settings": [1]}, "a mapping"),
    ({"keep": 0.0}, "a fraction above 0"),
    ({"refit": "finetune"}, "does not train"),
    ({"refit": "mean_fold", "refit_settings": {"ridge": 1.0}}, "settings of mean_fold, got"),
]


def test_settings_are_checked():
    for settings, match in WRONG:
        with pytest.raises((InvalidValue, UnknownName), match=match):
            Auto(**settings)


def test_a_copy_may_do_without_the_refit():
    assert replace(Auto(), refit=None).refit is None


# ---------------------------------------------------------------- other models and batches


def test_lists_and_arrays_of_a_batch_go_to_folds_as_tensors_do(model, rows):
    tags, numbers = ["a", "bb", "ccc"] * 4, np.arange(1.0, 13.0, dtype=np.float32)
    batch = {"x": rows, "tags": tags, "numbers": numbers}

    def own(model, batch):
        weights = torch.tensor([float(len(tag)) for tag in batch["tags"]])
        weights = weights * torch.as_tensor(batch["numbers"])
        return (model(batch) - batch["x"][:, 0, :3]).square().sum(1) * weights

    found = hp.score(model, [batch], auto(candidates=("taylor",)), loss=own, progress=False)
    assert_allclose(found.choice.whole, float(own(model, batch).mean().detach()), rtol=1e-5)


def test_a_tuple_with_targets_and_the_default_candidates(model, rows):
    def own(model, batch):
        x, y = batch
        return (model(x) - y).square().sum(1)

    found = hp.score(model, [(rows, rows[:, 0, :3])], "auto", loss=own, progress=False)
    names = {c.scorer for c in found.choice.candidates}
    assert names == {"taylor", "surgeon", "fluctuation", "obs", RANDOM}


def test_a_model_that_keeps_what_it_computed(rows):
    class Keeping(Stream):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    assert choice_of(Keeping(), rows, candidates=("obs", "taylor"))


def test_under_inference_mode(model, rows):
    expected = choice_of(model, rows)
    with torch.inference_mode():
        assert choice_of(model, rows) == expected


# ---------------------------------------------------------------- what others make of it


def test_a_plan_says_where_auto_chose_for_another_budget(model, rows):
    scores = score(model, rows)

    def told(budget):
        return any("for another budget: keep 50 %" in n for n in hp.select(scores, budget).notes)

    assert not told(HALF)
    heads = sum(len(site.heads) for site in scores.sites)
    assert not told(hp.Budget(keep_heads=heads // 2)), "the same number of heads"
    assert told(hp.Budget(keep_heads=heads // 2 - 1))
    assert told(hp.Budget(keep_heads=0.75))
    assert told({"layers.0": HALF})
