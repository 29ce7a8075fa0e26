"""`auto`: each candidate's plan is cut, refitted on other rows and judged; the lowest held-out loss
is taken."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.stats import t as student
from torch import Tensor, nn

import headprune as hp
from headprune.choice import _held_out
from headprune.choice._statistics import ranked
from headprune.choice.auto import Auto
from headprune.core.choice import RANDOM, Candidate, Choice, Refitting
from headprune.core.codec import EMPTY, FrozenDict
from headprune.core.errors import InvalidValue, UnknownName, UnsupportedModel
from headprune.core.heads import AttentionSite
from headprune.core.scores import HeadScores, ModelFingerprint
from headprune.report.explanation import explain
from headprune.scoring._base import Scorer
from tests.laws.support import labelled_subject

CANDIDATES = ("taylor", "obs", "fluctuation")
ROWS = 12


class Stream(nn.Module):
    """Two layers of attention whose outputs are added to a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(hp.MultiHeadAttention(8, 4) for _ in range(2))
        self.read = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        found: Tensor = self.read(x.mean(1))
        return found


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, 0, :3]).square().sum(1)


@pytest.fixture
def model() -> Stream:
    torch.manual_seed(0)
    return Stream()


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(ROWS, 5, 8, generator=torch.Generator().manual_seed(1))


def auto(**changes: Any) -> Auto:
    return Auto(**{"candidates": CANDIDATES, **changes})


def score(model: nn.Module, rows: Tensor, size: int = 5, **changes: Any) -> HeadScores:
    found: HeadScores = hp.score(
        model, list(rows.split(size)), auto(**changes), loss=loss, progress=False
    )
    return found


def by_hand(model: nn.Module, rows: Tensor, plan: Any) -> Tensor:
    """``[rows]``: every row's loss under a plan, cut and refitted on the rows of the other
    parity."""
    found = torch.zeros(len(rows), dtype=torch.float64)
    for fold in (0, 1):
        small = copy.deepcopy(model)
        hp.prune_(small, plan)
        hp.recover_(small, [rows[1 - fold :: 2]], hp.recovery.Lstsq(feed_forward=True), model)
        with torch.no_grad():
            found[fold::2] = loss(small.eval(), rows[fold::2]).double()
    return found


def test_losses_are_those_of_cutting_and_refitting_by_hand(model: Stream, rows: Tensor) -> None:
    choice = score(model, rows).choice
    assert choice is not None
    plans = {
        name: hp.select(hp.score(model, [rows], name, loss=loss), hp.Budget(keep_heads=0.5))
        for name in CANDIDATES
    }
    expected = {name: by_hand(model, rows, plan) for name, plan in plans.items()}
    found = {c.scorer: c.loss for c in choice.candidates}
    assert set(found) == {*CANDIDATES, RANDOM}
    for name in CANDIDATES:
        assert_allclose(found[name], float(expected[name].mean()), rtol=1e-4)
    lowest = min(CANDIDATES, key=lambda name: float(expected[name].mean()))
    within = []
    for name in CANDIDATES:
        difference = expected[name] - expected[lowest]
        error = difference.std() / ROWS**0.5 * 3**0.5
        if difference.mean() <= error:
            within.append(name)
    assert choice.chosen == within[0]
    assert_allclose(choice.whole, float(loss(model, rows).mean().detach()), rtol=1e-5)
    assert choice.n_examples == ROWS


def test_scores_are_those_of_the_chosen_one(model: Stream, rows: Tensor) -> None:
    found = score(model, rows)
    assert found.choice is not None
    alone = hp.score(model, [rows], found.choice.chosen, loss=loss)
    assert (found.scorer, found.settings) == (alone.scorer, alone.settings)
    assert_allclose(np.array(found.values), np.array(alone.values), rtol=1e-5)
    assert "chosen by auto" in found.title
    assert HeadScores.from_json(found.to_json()) == found


@pytest.mark.parametrize("size", [1, 4, ROWS])
def test_the_choice_does_not_depend_on_the_batch_size(
    model: Stream, rows: Tensor, size: int
) -> None:
    one, other = score(model, rows).choice, score(model, rows, size).choice
    assert one is not None
    assert other is not None
    assert (one.chosen, one.n_examples) == (other.chosen, other.n_examples)
    for a, b in zip(one.candidates, other.candidates, strict=True):
        assert a.scorer == b.scorer
        assert_allclose([a.loss, a.low, a.high], [b.loss, b.low, b.high], rtol=1e-3, atol=1e-5)


def test_no_refit_sees_a_row_that_judges_it(
    model: Stream, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[Tensor] = []
    judged: list[Tensor] = []
    refit, losses = Auto.refit_, _held_out._losses

    def seen_by_refit(self: Any, problem: Any, small: Any, batches: Any) -> Any:
        fitted.append(torch.cat(batches))
        return refit(self, problem, small, batches)

    def seen_by_judge(problem: Any, small: Any, batches: Any) -> Tensor:
        if small is not problem.model:
            judged.append(torch.cat(batches))
        return losses(problem, small, batches)

    monkeypatch.setattr(Auto, "refit_", seen_by_refit)
    monkeypatch.setattr(_held_out, "_losses", seen_by_judge)
    score(model, rows)
    *judged_refits, _, _ = judged  # the chosen plan is judged without a refit, too, fold by fold
    assert len(fitted) == len(judged_refits) > 2
    for a, b in zip(fitted, judged_refits, strict=True):
        assert len(a) + len(b) == ROWS
        assert not (a[:, None] == b[None]).flatten(2).all(2).any()


def test_the_model_is_as_it_was(model: Stream, rows: Tensor) -> None:
    before = copy.deepcopy(model.state_dict())
    model.train()
    score(model, rows)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_plans_that_are_the_same_are_judged_once(
    model: Stream, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    plain = _held_out.held_out_losses
    monkeypatch.setattr(
        "headprune.choice.auto.held_out_losses",
        lambda problem, folds, plans, refit: (
            asked.append(len(plans)) or plain(problem, folds, plans, refit)
        ),
    )
    choice = score(
        model, rows, keep=7, random_draws=0, candidates=("taylor", "taylor2", "fisher", "obs")
    ).choice
    assert choice is not None
    same = [c for c in choice.candidates if c.same_as]
    # The chosen plan once more, without a refit.
    assert asked == [len(choice.candidates) - len(same), 1]
    assert same
    for one in same:
        assert one.loss == next(c.loss for c in choice.candidates if c.name == one.same_as)


def test_without_a_refit(model: Stream, rows: Tensor) -> None:
    choice = score(model, rows, refit=None).choice
    assert choice is not None
    assert not choice.refit
    plan = hp.select(hp.score(model, [rows], "obs", loss=loss), hp.Budget(keep_heads=0.5))
    with hp.gated(model, plan), torch.no_grad():
        expected = float(loss(model, rows).mean())
    assert_allclose(
        next(c.loss for c in choice.candidates if c.scorer == "obs"), expected, rtol=1e-5
    )


def test_what_the_refit_is_worth_is_the_difference_to_the_cut_model(
    model: Stream, rows: Tensor
) -> None:
    found = score(model, rows)
    choice = found.choice
    assert choice is not None
    assert choice.refitting is not None
    plan = hp.select(hp.score(model, [rows], choice.chosen, loss=loss), hp.Budget(keep_heads=0.5))
    with hp.gated(model, plan), torch.no_grad():
        alone = loss(model, rows).double()
    difference = (alone - by_hand(model, rows, plan)).numpy()
    n_plans = sum(1 if c.scorer != RANDOM else 2 for c in choice.candidates if not c.same_as)
    quantile = student.ppf(1 - 0.05 / (2 * n_plans), ROWS - 1)
    half = quantile * difference.std(ddof=1) / ROWS**0.5 * 3**0.5
    assert_allclose(choice.refitting.loss, float(alone.mean()), rtol=1e-5)
    assert_allclose(
        [choice.refitting.low, choice.refitting.high],
        difference.mean() + np.array([-half, half]),
        rtol=1e-3,
    )
    assert HeadScores.from_json(found.to_json()) == found
    assert score(model, rows, refit=None).choice.refitting is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-0.3, -0.1, "makes the cut model worse on the others (loss 1.0000 with it, 0.8000"),
        (-0.3, 0.1, "do not show that lstsq helps (loss 1.0000 with it, 0.8000 without)."),
        (0.1, 0.3, ""),
    ],
)
def test_a_refit_that_harms_is_named(low: float, high: float, words: str) -> None:
    choice = replace(choice_of(False), refitting=Refitting(0.8, low, high))
    assert words in choice.refit_doubt
    assert bool(choice.refit_doubt) == bool(words)
    assert "taylor, without lstsq  0.8000" in str(choice)


def test_notes_of_the_scores_name_a_refit_that_harms(
    model: Stream, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(self: Any, problem: Any, small: Any, batches: Any) -> None:
        with torch.no_grad():
            small.read.bias.add_(10.0)

    monkeypatch.setattr(Auto, "refit_", spoil)
    assert any("lstsq makes the cut model worse" in note for note in score(model, rows).notes)


def test_nothing_is_said_of_a_refit_without_which_losses_are_not_finite(
    model: Stream, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _held_out.held_out_losses

    def infinite(problem: Any, folds: Any, plans: Any, refit: Any) -> Tensor:
        found = plain(problem, folds, plans, refit)
        return found if refit else torch.full_like(found, float("inf"))

    monkeypatch.setattr("headprune.choice.auto.held_out_losses", infinite)
    found = score(model, rows)
    assert found.choice is not None
    assert found.choice.refitting is None
    assert not any("lstsq" in note for note in found.notes)


def test_rows_share_no_fit_where_nothing_is_refitted(model: Stream, rows: Tensor) -> None:
    choice = score(model, rows, refit=None).choice
    assert choice is not None
    losses = {}
    for name in CANDIDATES:
        plan = hp.select(hp.score(model, [rows], name, loss=loss), hp.Budget(keep_heads=0.5))
        with hp.gated(model, plan), torch.no_grad():
            losses[name] = loss(model, rows).double().numpy()
    comparisons = len(choice.candidates) - 1
    quantile = student.ppf(1 - 0.05 / (2 * comparisons), ROWS - 1)
    for one in choice.candidates:
        if one.scorer != RANDOM:
            difference = losses[one.scorer] - losses[choice.chosen]
            half = quantile * difference.std(ddof=1) / ROWS**0.5  # not stretched by the folds
            assert_allclose(
                [one.low, one.high], difference.mean() + np.array([-half, half]), atol=1e-5
            )


def test_a_refused_refit_is_a_note_of_the_scores(
    model: Stream, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, problem: Any, small: Any, batches: Any) -> None:
        raise UnsupportedModel("the model", "one that can be refitted", "another", "")

    monkeypatch.setattr(Auto, "refit_", refuse)
    found = score(model, rows)
    assert found.choice is not None
    assert found.choice.refit == ""
    assert found.choice.refitting is None
    assert any("auto: Judged without a refit, which lstsq refuses" in note for note in found.notes)


def test_a_model_that_cannot_be_copied_is_refused_with_a_way_out(rows: Tensor) -> None:
    model = Stream()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UnsupportedModel, match=r"one that can be copied.*name a scorer"):
        score(model, rows)


def test_a_candidate_with_settings(model: Stream, rows: Tensor) -> None:
    found = score(model, rows, candidates=({"taylor": {"reduce": "signed"}},))
    assert found.choice is not None
    assert found.choice.chosen == "taylor (reduce=signed)"
    assert (found.scorer, found.settings["reduce"]) == ("taylor", "signed")
    assert HeadScores.from_json(found.to_json()) == found
    alone = hp.score(model, [rows], hp.scoring.Taylor(reduce="signed"), loss=loss)
    assert_allclose(np.array(found.values), np.array(alone.values), rtol=1e-5)


# ---------------------------------------------------------------- kinds of attention


def test_kinds_are_judged_by_themselves_too() -> None:
    subject = labelled_subject("t5")
    scorer = Auto(candidates=("taylor",), refit=None, random_draws=1)
    found = hp.score(subject.model, [subject.batch] * 2, scorer, progress=False)
    assert found.choice is not None
    names = {c.name for c in found.choice.candidates}
    assert names == {"taylor", "taylor, by kind", RANDOM}


def choice_of(by_kind: bool) -> Choice:
    taken = Candidate("taylor", EMPTY, by_kind, 1.0, 0.0, 0.0, 0.0)
    return Choice((taken,), taken.name, "keep 50 % of the heads", "lstsq", 8, 0.5)


def test_select_meets_the_budget_in_every_kind_where_auto_chose_so() -> None:
    sites = tuple(
        AttentionSite(kind, "own", kind, 4, 4, 8, 8, (0, 1, 2, 3)) for kind in ("self", "cross")
    )
    values = ((0.9, 0.8, 0.7, 0.6), (0.4, 0.3, 0.2, 0.1))
    nothing = ModelFingerprint("s", "w")

    def kept(by_kind: bool, budget: hp.Budget) -> list[int]:
        scores = HeadScores(
            sites, values, None, "taylor", EMPTY, 8, nothing, choice=choice_of(by_kind)
        )
        return [len(row.kept) for row in hp.select(scores, budget).mask.rows]

    assert kept(False, hp.Budget(keep_heads=0.5)) == [3, 1]  # one head per layer always stays
    assert kept(True, hp.Budget(keep_heads=0.5)) == [2, 2]
    assert kept(True, hp.Budget(keep_heads=4)) == [2, 2]


def test_a_plan_says_where_auto_chose_for_another_budget(model: Stream, rows: Tensor) -> None:
    scores = score(model, rows)
    assert scores.choice is not None
    note = f"auto chose {scores.choice.chosen} for another budget: keep 50 % of the heads."
    note += " hp.scoring.Auto(keep=...) chooses for yours."
    assert note not in hp.select(scores, hp.Budget(keep_heads=0.5)).notes
    assert note in hp.select(scores, hp.Budget(keep_heads=0.75)).notes
    assert note in hp.select(scores, {"layers.0": hp.Budget(keep_heads=0.5)}).notes


# ---------------------------------------------------------------- statistics


def test_intervals_are_those_of_paired_differences() -> None:
    rng = np.random.default_rng(0)
    losses = rng.normal(size=(3, 40)) + np.array([[0.0], [0.1], [3.0]])
    asked = [("a", EMPTY, False), ("b", EMPTY, False), (RANDOM, EMPTY, False)]
    found, chosen = ranked(asked, losses, [0, 1, 2], 2, 0.95)
    by_name = {one.scorer: one for one in found}
    other = "b" if chosen == "a" else "a"
    places = {"a": 0, "b": 1}
    difference = losses[places[other]] - losses[places[chosen]]
    half = student.ppf(1 - 0.05 / 4, 39) * difference.std(ddof=1) / 40**0.5 * 3**0.5
    assert_allclose(
        [by_name[other].difference, by_name[other].low, by_name[other].high],
        difference.mean() + np.array([0, -half, half]),
    )
    assert found[-1].scorer == RANDOM
    assert found[-1].low > 0


@pytest.mark.parametrize(("gap", "taken"), [(0.99, "first"), (1.01, "second")])
def test_the_first_candidate_within_one_standard_error_is_taken(gap: float, taken: str) -> None:
    noise = np.random.default_rng(0).normal(size=50)
    noise -= noise.mean()
    error = noise.std(ddof=1) / 50**0.5 * 3**0.5  # two folds
    losses = np.stack([1 + noise + gap * error, np.ones(50), np.full(50, 1.5)])
    asked = [(name, EMPTY, False) for name in ("first", "second", "third")]
    found, chosen = ranked(asked, losses, [0, 1, 2], 2, 0.95)
    assert chosen == taken
    assert [one.scorer for one in found] == ["second", "first", "third"]
    choice = Choice(found, chosen, "half", "lstsq", 50, 1.0)
    assert choice.best.difference == 0
    assert ("comes before second" in choice.preferred) == (taken == "first")
    assert choice.preferred in str(choice)
    # The margin covers the candidate with the lowest loss.
    assert choice.margin >= max(0.0, choice.best.loss - 1)


def test_random_heads_are_never_taken() -> None:
    losses = np.array([[2.0, 2.1, 2.2], [1.0, 1.1, 1.3]])
    asked = [("a", EMPTY, False), (RANDOM, EMPTY, False)]
    found, chosen = ranked(asked, losses, [0, 1], 2, 0.95)
    assert chosen == "a"
    assert [c.scorer for c in found] == [RANDOM, "a"]
    choice = Choice(found, "a", "half", "lstsq", 3, 1.0)
    assert choice.best.scorer == "a"
    assert not choice.beats_random
    assert choice.margin == 0


def test_the_margin_covers_the_best_candidate() -> None:
    """Of many draws of rows, in 95 % the chosen one's true loss is within the margin of the lowest
    true loss."""
    rng, truth = np.random.default_rng(1), np.array([1.0, 1.02, 1.05, 1.3])
    asked = [(str(i), EMPTY, False) for i in range(len(truth))]
    covered = 0
    for _ in range(400):
        shared = rng.exponential(size=64)  # rows are easy or hard for all
        losses = truth[:, None] + shared + rng.normal(0, 0.3, size=(len(truth), 64))
        found, chosen = ranked(asked, losses, list(range(len(truth))), 2, 0.95)
        choice = Choice(found, chosen, "", "", 64, 0.0)
        covered += truth[int(choice.chosen)] - truth.min() <= choice.margin
    assert covered >= 0.95 * 400


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"candidates": ("auto",)}, "auto not among them"),
        ({"candidates": ("random",)}, "random is judged anyway"),
        ({"candidates": ("magnitude",)}, "scorers that read data"),
        ({"candidates": ()}, "one scorer at least"),
        ({"candidates": ({"taylor": {"reduce": "all"}},)}, "one of example"),
        ({"candidates": ({"taylor": {"reduced": "token"}},)}, "settings of taylor, got 'reduced'"),
        ({"candidates": ({"taylor": {}, "obs": {}},)}, "mappings of one name to its settings"),
        ({"folds": 1}, "a count >= 2"),
        ({"random_draws": -1}, "a count >= 0"),
        ({"confidence": 1.0}, "between 0 and 1"),
        ({"keep": 0.0}, "a fraction above 0"),
        ({"refit": "finetune"}, "does not train"),
        (
            {"refit": "mean_fold", "refit_settings": {"ridge": 1.0}},
            "settings of mean_fold, got 'ridge'",
        ),
    ],
)
def test_settings(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidValue, match=match):
        Auto(**settings)


def test_an_unknown_candidate() -> None:
    with pytest.raises(UnknownName, match="taylor"):
        Auto(candidates=("tailor",))


def test_too_few_rows(model: Stream, rows: Tensor) -> None:
    with pytest.raises(InvalidValue, match="at least 4 examples for 2 folds, got 3"):
        score(model, rows[:3])


def test_losses_of_coupled_examples(model: Stream, rows: Tensor) -> None:
    def contrast(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return (out @ out.T).log_softmax(1).diagonal().neg()

    with pytest.raises(InvalidValue, match="auto"):
        hp.score(model, [rows], auto(), loss=contrast, progress=False)


def test_until_is_refused(model: Stream, rows: Tensor) -> None:
    with pytest.raises(InvalidValue, match="depends on the other examples"):
        hp.score(model, [rows, rows], auto(), loss=loss, until=hp.Stable(k=2), progress=False)


def test_it_is_found_by_name(model: Stream, rows: Tensor) -> None:
    assert "auto" in hp.scoring.registry
    assert hp.scoring.Auto is Auto
    assert hp.scoring.registry.resolve(auto(), Scorer, "scorer")[0] == "auto"
    assert "held-out rows" in hp.scoring.registry.summary("auto")


def choice_with(*more: Candidate, refit: str = "lstsq") -> Choice:
    taken = Candidate("taylor", EMPTY, False, 1.0, 0.0, 0.0, 0.0)
    return Choice((taken, *more), "taylor", "keep 50 % of the heads", refit, 8, 0.5)


def test_a_candidate_that_keeps_the_chosen_heads_is_no_tie() -> None:
    same = Candidate("fisher", EMPTY, False, 1.0, 0.0, 0.0, 0.0, same_as="taylor")
    close = Candidate("obs", EMPTY, False, 1.1, 0.1, -0.2, 0.4)
    also = Candidate("wanda", EMPTY, False, 1.1, 0.1, -0.2, 0.4, same_as="obs")
    choice = choice_with(same, close, also)
    assert choice.ties == (close, also)
    assert [choice.mark(c) for c in choice.candidates] == [
        "taken",
        "the heads of taylor",
        "ties",
        "the heads of obs",
    ]


@pytest.mark.parametrize(
    ("refit", "words"), [("lstsq", "than random ones, refitted alike."), ("", "than random ones.")]
)
def test_doubt_says_refitted_only_where_it_was(refit: str, words: str) -> None:
    drawn = Candidate(RANDOM, EMPTY, False, 1.1, 0.1, -0.2, 0.4)
    assert choice_with(drawn, refit=refit).doubt.endswith(words)
    assert not choice_with(replace(drawn, low=0.05), refit=refit).doubt


def test_a_table_is_in_line() -> None:
    lines = str(
        choice_with(
            Candidate("surgeon", FrozenDict({"curvature": "logits"}), True, 2.0, 1.0, 0.5, 1.5)
        )
    )
    losses = [
        line for line in lines.split("\n") if line.startswith(("  whole", "  taylor", "  surgeon"))
    ]
    assert (
        len(
            {
                line.index(loss)
                for line, loss in zip(losses, ("0.5000", "1.0000", "2.0000"), strict=True)
            }
        )
        == 1
    )


def test_explain_says_who_chose(model: Stream, rows: Tensor) -> None:
    scores = score(model, rows)
    assert scores.choice is not None
    plan = hp.select(scores, hp.Budget(keep_heads=0.5))
    notes = explain(plan, scores).notes
    assert notes[0].startswith(f"auto took {scores.choice.chosen} by the loss of {ROWS} rows")
    assert not any(
        "auto" in note for note in explain(plan, replace(scores, choice=None, notes=())).notes
    )


def test_agreement_with_a_scorer_that_was_asked_for(model: Stream, rows: Tensor) -> None:
    found = score(model, rows, candidates=("taylor",))
    alone = hp.score(model, [rows], "taylor", loss=loss)
    agreed = hp.agreement(found, alone, hp.score(model, [rows], "obs", loss=loss))
    assert agreed.names == ("taylor (1)", "taylor (2)", "obs")
    assert agreed.pairs[0].spearman.value == pytest.approx(1.0)


def test_words() -> None:
    text = str(choice_of(False))
    assert (
        "auto took taylor: keep 50 % of the heads, refitted by lstsq, loss of 8 held-out rows"
        in text
    )
    assert "at most 0.0000 below that of taylor (95 % confidence)" in text


# ---------------------------------------------------------------- what other models and batches
# need


class Tagged(Stream):
    """Takes a batch that holds more than the model reads."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["x"] if isinstance(batch, dict) else batch)


def test_lists_and_arrays_of_a_batch_go_to_folds_as_tensors_do(rows: Tensor) -> None:
    torch.manual_seed(0)
    model = Tagged()
    tags, numbers = ["a", "bb", "ccc"] * 4, np.arange(1.0, 13.0, dtype=np.float32)

    def own(model: nn.Module, batch: Any) -> Tensor:
        weights = torch.tensor([float(len(tag)) for tag in batch["tags"]]) * torch.as_tensor(
            batch["numbers"]
        )
        return (model(batch) - batch["x"][:, 0, :3]).square().sum(1) * weights

    batch = {"x": rows, "tags": tags, "numbers": numbers}
    found = hp.score(model, [batch], auto(candidates=("taylor",)), loss=own, progress=False).choice
    assert found is not None
    with torch.no_grad():
        assert_allclose(found.whole, float(own(model, batch).mean()), rtol=1e-5)


def test_a_tuple_with_targets_and_a_loss_of_ones_own(model: Stream, rows: Tensor) -> None:
    def own(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().sum(1)

    found = hp.score(model, [(rows, rows[:, 0, :3])], "auto", loss=own, progress=False).choice
    assert found is not None
    assert {c.scorer for c in found.candidates} == {
        "taylor",
        "surgeon",
        "fluctuation",
        "obs",
        RANDOM,
    }


def test_a_candidate_whose_losses_are_not_finite_is_left_out(
    model: Stream, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _held_out.held_out_losses

    def first_is_lost(*given: Any) -> Tensor:
        losses = plain(*given)
        losses[0, 3] = torch.nan
        return losses

    monkeypatch.setattr("headprune.choice.auto.held_out_losses", first_is_lost)
    choice = score(model, rows, keep=0.6).choice
    assert choice is not None
    assert "taylor" not in {c.scorer for c in choice.candidates}
    assert "NaN or infinite: taylor" in choice.notes[0]
    with pytest.raises(
        InvalidValue, match="losses of cut models: must be finite for one candidate at least"
    ):
        score(model, rows, candidates=("taylor",))


def test_a_model_that_keeps_what_it_computed(rows: Tensor) -> None:
    class Keeping(Stream):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    torch.manual_seed(0)
    assert score(Keeping(), rows, candidates=("obs", "taylor")).choice is not None


def test_under_inference_mode(model: Stream, rows: Tensor) -> None:
    expected = score(model, rows).choice
    with torch.inference_mode():
        found = score(model, rows).choice
    assert found == expected


def test_other_refits_have_settings_of_their_own(model: Stream, rows: Tensor) -> None:
    choice = score(model, rows, refit="mean_fold").choice
    assert choice is not None
    assert choice.refit == "mean_fold"


def test_counts_of_kinds_add_up_and_one_budget_stands_in_where_they_cannot_be() -> None:
    def scores_of(*heads: int) -> HeadScores:
        kinds = ("self", "causal", "cross")
        pairs = zip(kinds, heads, strict=False)
        sites = tuple(
            AttentionSite(kind, "own", kind, n, n, 8, 8, tuple(range(n))) for kind, n in pairs
        )
        values = tuple(tuple(float(i) for i in range(n)) for n in heads)
        nothing = ModelFingerprint("s", "w")
        return HeadScores(sites, values, None, "taylor", EMPTY, 8, nothing, choice=choice_of(True))

    for heads, keep in (((4, 4, 4), 5), ((6, 6), 7), ((12, 12, 12), 35), ((2, 12), 7)):
        plan = hp.select(scores_of(*heads), hp.Budget(keep_heads=keep))
        assert plan.mask.n_kept == keep
    odd = hp.select(scores_of(2, 12), hp.Budget(keep_heads=2))
    assert odd.mask.n_kept == 2
