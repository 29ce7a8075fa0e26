"""What `auto` makes of losses: which candidate is chosen, intervals, margins, and what a choice
says."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import t as student

import headprune as hp
from headprune.choice._statistics import interval, ranked
from headprune.core.choice import RANDOM, Candidate, Choice, Refitting
from headprune.core.codec import EMPTY
from headprune.core.heads import AttentionSite
from tests.selection_problems import make, site

TAKEN = Candidate("taylor", EMPTY, False, 1.0, 0.0, 0.0, 0.0)


def choice_of(*more, taken=TAKEN, refit="lstsq"):
    return Choice((taken, *more), taken.name, "keep 50 % of the heads", refit, 8, 0.5)


def scores_of(sites, choice):
    """Scores that `auto` chose: the later a head, the more important."""
    numbers = itertools.count()
    return replace(make(sites, [[next(numbers) for _ in s.units] for s in sites]), choice=choice)


def asked(*names):
    return [(name, EMPTY, False) for name in names]


def test_intervals_are_those_of_paired_differences():
    rng = np.random.default_rng(0)
    losses = rng.normal(size=(3, 40)) + np.array([[0.0], [0.1], [3.0]])
    found, chosen = ranked(asked("a", "b"), losses[:2], [0, 1], 2, 0.95, losses[2:])
    other = "b" if chosen == "a" else "a"
    one = next(c for c in found if c.scorer == other)
    difference = (losses[1] - losses[0]) * (1 if chosen == "a" else -1)
    half = student.ppf(1 - 0.05 / 2, 39) * difference.std(ddof=1) / 40**0.5 * 3**0.5
    expected = difference.mean() + np.array([0, -half, half])
    assert_allclose([one.difference, one.low, one.high], expected)
    assert found[-1].scorer == RANDOM
    assert found[-1].low > 0


def test_random_heads_are_compared_by_their_mean():
    """Of many rows alike, none differs much from chance; their mean does."""
    noise = np.random.default_rng(0).normal(size=(3, 50))
    losses = np.array([[1.0], [2.0], [2.2]]) + noise
    found, chosen = ranked(asked("a"), losses[:1], [0], 2, 0.95, losses[1:])
    low, high = interval(losses[1:].mean(0) - losses[0], 2, 0.95, 1)
    assert (found[-1].low, found[-1].high) == (low, high)
    choice = Choice(found, chosen, "half", "lstsq", 50, 0.5)
    assert choice.beats_random
    assert choice.doubt == ""


def test_without_folds_the_comparison_with_random_heads_allows_for_the_choice():
    noise = np.random.default_rng(0).normal(size=(5, 50))
    losses = np.array([[1.0], [1.2], [1.3], [2.0], [2.2]]) + noise
    found, _ = ranked(asked("a", "b", "c"), losses[:3], [0, 1, 2], None, 0.95, losses[3:])
    drawn = next(one for one in found if one.scorer == RANDOM)
    chosen = losses[0]
    assert (drawn.low, drawn.high) == interval(losses[3:].mean(0) - chosen, None, 0.95, 2)


def test_where_all_plans_are_the_same_there_was_nothing_to_choose():
    same = Candidate("obs", EMPTY, False, 1.0, 0.0, 0.0, 0.0, same_as="taylor")
    drawn = Candidate(RANDOM, EMPTY, False, 1.0, 0.0, 0.0, 0.0)
    words = "There was nothing to choose: every plan keeps the same heads (keep 50 % of the heads)."
    assert choice_of(same, drawn).doubt == words
    assert words in str(choice_of(same, drawn))
    # Equal losses of other heads, or a single candidate, say nothing.
    assert choice_of(replace(same, same_as="")).doubt == ""
    assert choice_of().doubt == ""


def test_a_choice_of_an_older_version_says_its_own_rule():
    lower = Candidate("obs", EMPTY, False, 0.8, -0.2, -0.5, 0.1)
    for loss, rule in ((0.8, "one standard error of"), (0.95, "one standard error and 10 % of")):
        choice = choice_of(replace(lower, loss=loss, difference=loss - 1))
        choice = replace(choice, candidates=choice.candidates[::-1])
        assert f"within {rule} the lowest" in choice.preferred


def test_a_plan_by_another_selector_than_auto_compared_says_so():
    def notes(compared, used):
        scores = scores_of([site("a", 4)], replace(choice_of(), selector=compared))
        return hp.select(scores, hp.Budget(keep_heads=0.5), used).notes

    assert any("of selector 'uniform'; 'global_topk' may" in n for n in notes("uniform", None))
    assert not notes("uniform", "uniform")
    assert not notes("", None)


def notes_of_another_budget(chosen_for, asked, by_kind=False):
    """The notes of a plan where `auto` chose for one budget, in words, and another is asked for."""
    sites = [site(kind, 4, kind=kind) for kind in ("self", "causal")]
    sites.append(AttentionSite("f", "own", "feed_forward", 8, 8, 1, 1, tuple(range(8))))
    choice = replace(choice_of(taken=replace(TAKEN, by_kind=by_kind)), budget=chosen_for)
    scores = scores_of(sites, choice)
    plan = hp.select(scores, asked)
    assert plan.scores == scores.digest
    return [note for note in plan.notes if note.startswith("auto ")]


@pytest.mark.parametrize("words", ["keep 50 % of the heads", "keep 4 heads"])
@pytest.mark.parametrize("amount", [0.5, 4])
def test_a_share_and_its_count_are_one_budget(words, amount):
    assert notes_of_another_budget(words, hp.Budget(keep_heads=amount)) == []


@pytest.mark.parametrize("amount", [8, 1.0])
def test_all_heads_are_a_budget_too(amount):
    assert notes_of_another_budget("keep 8 heads", hp.Budget(keep_heads=amount)) == []


def test_a_plan_says_which_budget_auto_chose_for():
    words = "auto chose taylor for another budget: keep 3 heads. "
    words += "hp.scoring.Auto(keep=...) chooses for yours."
    half = hp.Budget(keep_heads=0.5)
    assert notes_of_another_budget("keep 3 heads", half) == [words]
    assert notes_of_another_budget("keep 3 heads", {"self": half}) == [words]
    (note,) = notes_of_another_budget("keep 3 heads", {"self": half}, by_kind=True)
    assert note == words.replace("taylor", "taylor, by kind")
    assert notes_of_another_budget("keep 3 heads", hp.Budget(keep_heads=12)) == [words]
    # Budgets of a recipe are the words of each site's.
    both = {"self": half, "causal": half}
    given = "self: keep 50 % of the heads, causal: keep 50 % of the heads"
    assert notes_of_another_budget(given, both) == []
    # `auto` made these of one budget of heads; it counts no neurons.
    assert notes_of_another_budget("keep 50 % of the heads", both, by_kind=True) == []


def test_a_loss_far_above_the_lowest_is_not_taken():
    """A few rows with large losses make the standard error large, and one candidate bad."""
    losses = np.full((2, 64), 0.005)
    losses[0, :2] = 1.0
    assert ranked(asked("first", "second"), losses, [0, 1], 2, 0.95)[1] == "second"
    losses = np.full((2, 64), 0.2)
    losses[0, :2] += 0.6
    assert ranked(asked("first", "second"), losses, [0, 1], 2, 0.95)[1] == "first"
    # Of texts, perplexities are compared: 4.2 above 4.0 is 22 % more.
    losses = np.full((2, 64), 4.0)
    losses[0, :2] += 6.4
    assert ranked(asked("first", "second"), losses, [0, 1], 2, 0.95)[1] == "first"
    assert ranked(asked("first", "second"), losses, [0, 1], 2, 0.95, is_text=True)[1] == "second"


@pytest.mark.parametrize(("gap", "taken"), [(0.99, "first"), (1.01, "second")])
def test_the_first_candidate_within_one_standard_error_is_taken(gap, taken):
    noise = np.random.default_rng(0).normal(size=50)
    noise -= noise.mean()
    error = noise.std(ddof=1) / 50**0.5 * 3**0.5  # two folds
    losses = np.stack([9 + noise + gap * error, np.full(50, 9.0), np.full(50, 9.5)])
    found, chosen = ranked(asked("first", "second", "third"), losses, [0, 1, 2], 2, 0.95)
    assert chosen == taken
    assert [one.scorer for one in found] == ["second", "first", "third"]
    choice = Choice(found, chosen, "half", "lstsq", 50, 1.0)
    assert choice.best.difference == 0
    assert ("comes before second" in choice.preferred) == (taken == "first")
    assert choice.preferred in str(choice)
    # The margin covers the candidate with the lowest loss.
    assert choice.margin >= max(0.0, choice.best.loss - 9)


def test_random_heads_must_lose_more_in_every_draw():
    """The mean of two draws loses more than the chosen heads, but one of them does not."""
    noise = np.random.default_rng(0).normal(scale=0.01, size=(3, 50))
    losses = np.array([[1.0], [0.99], [3.0]]) + noise
    found, chosen = ranked(asked("a"), losses[:1], [0], 2, 0.95, losses[1:])
    drawn = found[-1]
    assert drawn.loss == pytest.approx(losses[1:].mean())
    assert_allclose([drawn.low, drawn.high], (losses[1:] - losses[0]).mean(1))
    choice = Choice(found, chosen, "half", "lstsq", 50, 0.5)
    assert not choice.beats_random
    assert not choice.loses_to_random
    assert (choice.best.scorer, choice.margin) == ("a", 0)


def test_the_margin_covers_the_best_candidate():
    """Of many draws of rows, in 95 % the chosen one's true loss is within the margin of the lowest
    true loss."""
    rng, truth = np.random.default_rng(1), np.array([1.0, 1.02, 1.05, 1.3])
    covered = 0
    for _ in range(400):
        shared = rng.exponential(size=64)  # rows are easy or hard for all
        losses = truth[:, None] + shared + rng.normal(0, 0.3, size=(len(truth), 64))
        found, chosen = ranked(asked("0", "1", "2", "3"), losses, [0, 1, 2, 3], 2, 0.95)
        choice = Choice(found, chosen, "", "", 64, 0.0)
        covered += truth[int(choice.chosen)] - truth.min() <= choice.margin
    assert covered >= 0.95 * 400


def test_losses_of_a_text_have_a_perplexity():
    other = Candidate("obs", EMPTY, False, 1.1, 0.1, 0.05, 0.15)
    choice = replace(choice_of(other), is_text=True)
    found = [choice.perplexity(loss) for loss in (0.5, 1.1, 800.0)]
    assert found == ["1.649", "3.004", "over 1e304"]
    lines = str(choice).split("\n")
    assert lines[1].split()[:2] == ["loss", "perplexity"]
    assert lines[4].split()[:3] == ["obs", "1.1000", "3.004"]
    assert lines[1].index("minus") == lines[4].index("+0.1000"), "a table in line"
    assert "perplexity" not in str(choice_of(other))


def test_a_candidate_that_keeps_the_chosen_heads_is_no_tie():
    same = Candidate("fisher", EMPTY, False, 1.0, 0.0, 0.0, 0.0, same_as="taylor")
    close = Candidate("obs", EMPTY, False, 1.1, 0.1, -0.2, 0.4)
    also = Candidate("wanda", EMPTY, False, 1.1, 0.1, -0.2, 0.4, same_as="obs")
    choice = choice_of(same, close, also)
    assert choice.ties == (close, also)
    assert "between taylor and obs, which keep different heads" in choice.tie_note
    marks = [choice.mark(c) for c in choice.candidates]
    assert marks == ["chosen", "the heads of taylor", "ties", "the heads of obs"]


def test_a_refit_that_harms_is_named():
    difference = "0.8000 without, a difference of [-0.3000, +0.1000])."
    for low, high, words in (
        (-0.3, -0.1, "makes the cut model worse on the others (loss 1.0000 with it, 0.8000"),
        (-0.3, 0.1, f"helps (loss 1.0000 with it, {difference}"),
        (0.1, 0.3, ""),
    ):
        choice = replace(choice_of(), refitting=Refitting(0.8, low, high))
        assert words in choice.refit_doubt
        assert bool(choice.refit_doubt) == bool(words)
    assert "taylor, without lstsq  0.8000" in str(choice)


def test_doubt_says_refitted_only_where_it_was():
    drawn = Candidate(RANDOM, EMPTY, False, 1.1, 0.1, -0.2, 0.4)
    assert choice_of(drawn).doubt.endswith("than random ones, refitted alike.")
    assert not choice_of(replace(drawn, low=0.05)).doubt
    better = choice_of(replace(drawn, loss=0.7, difference=-0.3, low=-0.4, high=-0.2))
    assert "random heads, refitted alike, did better than the chosen ones" in better.doubt
    assert better.loses_to_random


def kept(n_heads, by_kind, keep):
    """How many heads of every kind are kept where `auto` chose by kind or not."""
    kinds = zip(("self", "causal", "cross"), n_heads, strict=False)
    sites = [site(kind, n, kind=kind) for kind, n in kinds]
    scores = scores_of(sites, choice_of(taken=replace(TAKEN, by_kind=by_kind)))
    return [len(row.kept) for row in hp.select(scores, hp.Budget(keep_heads=keep)).mask.rows]


def test_select_meets_the_budget_in_every_kind_where_auto_chose_so():
    assert kept((4, 4), False, 0.5) == [1, 3]  # a layer keeps one head at least
    assert kept((4, 4), True, 0.5) == [2, 2]
    assert kept((4, 4), True, 4) == [2, 2]


@pytest.mark.parametrize(
    ("heads", "keep"), [((4, 4, 4), 5), ((6, 6), 7), ((12, 12, 12), 35), ((2, 12), 7), ((2, 12), 2)]
)
def test_counts_of_kinds_add_up(heads, keep):
    """Also where they cannot be met in every kind, and one budget stands in."""
    assert sum(kept(heads, True, keep)) == keep
