"""Questions about a text: SQuAD's metrics, where answers lie among tokens, what is cut off, and a
whole run."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headprune.bench.answers import Question, answer, evaluate_answers
from headprune.core.answers import exact_match, f1
from headprune.core.errors import InvalidValue
from headprune.data import questions
from headprune.data.datasets import encode_rows, load_rows
from headprune.data.models import Preparation
from headprune.data.questions import BEYOND
from headprune.model.losses import default_loss
from headprune.recipes.validate import RecipeError
from headprune.sweep.outcome import ModelOutcome, judge
from tests.small_recipes import checked_recipe, quiet_run, quietly_prepared, write_rows
from tests.tiny_models import WORDS, bert


def test_metrics_are_squads():
    for said, true, exact, overlap in (
        ("The Eiffel Tower", ["eiffel tower!"], 1.0, 1.0),
        ("in the Eiffel Tower", ["Eiffel Tower"], 0.0, 0.8),  # 2 of 3 words, 2 of 2: 2·2/(3+2)
        ("tower tower", ["tower"], 0.0, 2 / 3),  # a word counts as often as it stands there
        ("Paris", ["Rome", "Paris, France"], 0.0, 2 / 3),  # the best of several
        ("Paris", ["Rome"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("Paris", [], 0.0, 0.0),
        ("", ["Paris"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),  # nothing is left of either
    ):
        assert exact_match(said, true) == exact
        assert f1(said, true) == pytest.approx(overlap)


class Pointer(nn.Module):
    def __init__(self, starts: list[list[float]], ends: list[list[float]]) -> None:
        super().__init__()
        self.starts, self.ends = (nn.Parameter(torch.tensor(x).float()) for x in (starts, ends))

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"start_logits": self.starts, "end_logits": self.ends}


SPANS = (None, None, None, (0, 3), (4, 7), (8, 11), None)  # [CLS] question [SEP] one two six [SEP]


@pytest.mark.parametrize(
    ("start", "end", "options", "expected"),
    [
        # The question's own tokens do not count; an end before the start does not.
        ([0, 9, 0, 1, 3, 0, 0], [0, 0, 9, 0, 1, 2, 0], {}, "two six"),
        ([0, 0, 0, 0, 0, 5, 0], [0, 0, 0, 5, 0, 1, 0], {}, "six"),
        ([0, 0, 0, 5, 0, 0, 0], [0, 0, 0, 1, 2, 5, 0], {"longest": 2}, "one two"),
        ([0, 0, 0, 0, 3, 0, 0], [0, 0, 0, 0, 3, 0, 0], {"nothing": 0}, "two"),
        ([4, 0, 0, 0, 3, 0, 0], [4, 0, 0, 0, 3, 0, 0], {"nothing": 0}, ""),
        ([4, 0, 0, 0, 3, 0, 0], [4, 0, 0, 0, 3, 0, 0], {}, "two"),  # it has to answer
    ],
)
def test_the_best_lawful_piece_is_the_answer(start, end, options, expected):
    question = Question("one two six", ("two",), SPANS, options.pop("nothing", None))
    cut_off = Question("one two six", (), (None,) * 7)  # nothing of its context is there
    model, batch = Pointer([start, start], [end, end]), {"input_ids": torch.zeros(2, 7).long()}
    assert answer(model, [batch], [question, cut_off], **options) == [expected, ""]


def rows(count: int, seed: int, silent: bool = False) -> list[dict[str, Any]]:
    """Which word comes after the one that the question names?"""
    draw, found = random.Random(seed), []
    for i in range(count):
        words = draw.sample(WORDS, draw.randint(3, 12))
        place = draw.randrange(len(words) - 1)
        text, true = " ".join(words), words[place + 1]
        start = len(" ".join(words[: place + 1])) + 1
        answers = {"text": [true], "answer_start": [start]}
        if silent and i % 3 == 0:
            answers = {"text": [], "answer_start": []}
        found.append({"question": words[place], "context": text, "answers": answers})
    return found


def recipe(folder: Path, silent: bool = False, **data: Any) -> Any:
    for split, count, seed in (("train", 60, 0), ("validation", 12, 1), ("test", 12, 2)):
        write_rows(folder / f"{split}.jsonl", rows(count, seed, silent))
    if not (folder / "model").is_dir():
        bert(folder / "model", "BertForQuestionAnswering")
    columns = {"text": ["question", "context"], "label": "answers", "calibration": 20}
    section = {"path": str(folder), **columns, **data}
    score = {"scorer": "taylor", "random_draws": 1}
    return checked_recipe("question_answering", folder / "model", section, score=score)


def ready(*arguments: Any, **options: Any) -> Any:
    return quietly_prepared(recipe(*arguments, **options))


def test_answers_are_found_among_the_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "_AT_ONCE", 5)  # rows of several draws
    subject = ready(tmp_path)
    tokenizer, data = subject.preparation.tokenizer, subject.data
    for example, question in zip(data.examples["test"], data.targets["test"], strict=True):
        first, last = example["start_positions"], example["end_positions"]
        assert tokenizer.decode(example["input_ids"][first : last + 1]) == question.answers[0]
        (start, _), (_, end) = question.spans[first], question.spans[last]
        assert question.context[start:end] == question.answers[0]
    batches, asked = data.evaluation("test", 5), data.references("test")
    assert asked != data.targets["test"], "nothing was sorted"
    rows_in_order = [row for batch in batches for row in batch["input_ids"].tolist()]
    for ids, question in zip(rows_in_order, asked, strict=True):
        assert " ".join(question.context.split()) in tokenizer.decode(ids)
    found = evaluate_answers(subject.model, batches, asked)
    assert (found.metric, found.n_examples, len(found.amounts)) == ("f1", 12, 12)
    words = answer(subject.model, batches, asked)
    exact = [exact_match(w, q.answers) for w, q in zip(words, asked, strict=True)]
    assert found.more == {"exact_match": sum(exact) / 12}
    with pytest.raises(InvalidValue, match="must be one for each of 12 examples, got 11"):
        evaluate_answers(subject.model, batches, asked[:-1])


def test_what_is_cut_off_is_said_and_gives_no_loss(tmp_path):
    subject = ready(tmp_path, max_length=8)
    lost = {
        name: [e["start_positions"] == BEYOND for e in found]
        for name, found in subject.data.examples.items()
    }
    assert all(any(rows) and not all(rows) for rows in lost.values())
    said = [n for n in subject.journal.record.warnings if "beyond data.max_length, 8 tokens" in n]
    assert [note.split(" ")[0] for note in said] == [str(sum(rows)) for rows in lost.values()]
    losses = default_loss(subject.model, subject.data.batches("test", 12)[0]).tolist()
    assert [loss == 0 for loss in losses] == lost["test"]
    # Five tokens leave one word, which never is the answer.
    for length, words in ((4, "above 4, for every question"), (5, "long enough for the answer of")):
        with pytest.raises(InvalidValue, match=rf"data\.max_length: must be {words}"):
            ready(tmp_path, max_length=length)


def test_questions_without_an_answer_point_at_cls(tmp_path):
    data = ready(tmp_path, silent=True).data
    silent = [not q.answers for q in data.targets["test"]]
    assert 0 < sum(silent) < len(silent)
    pointed = [e["start_positions"] == e["end_positions"] == 0 for e in data.examples["test"]]
    assert pointed == silent
    assert {q.nothing for q in data.targets["test"]} == {0}
    chosen = recipe(tmp_path, silent=True)
    for has, words in (
        ({"is_fast": False}, r"model\.path: must be a model with a fast tokenizer, .* got Simple"),
        ({"is_fast": True, "cls_token_id": None}, r"questions with an answer: .* no \[CLS\] token"),
    ):
        with pytest.raises(InvalidValue, match=words):
            encode_rows(chosen, load_rows(chosen), Preparation(SimpleNamespace(**has)))


def test_answers_that_are_none(tmp_path):
    for answers, words in (
        ({"text": ["w99"], "answer_start": [0]}, "an answer that stands in column 'context' from"),
        ({"text": ["w1", "w2"], "answer_start": [0]}, "one start per text"),
        ({"text": ["w1"], "answer_start": [-3]}, "the number of its first character"),
        ({"said": ["w1"]}, r"answered with \{text"),
    ):
        chosen = recipe(tmp_path)
        for split in ("validation", "test"):
            (tmp_path / f"{split}.jsonl").unlink()
        write_rows(tmp_path / "train.jsonl", ({**row, "answers": answers} for row in rows(2, 3)))
        with pytest.raises(InvalidValue, match=rf"data: train, row 0: must be .*{words}"):
            quietly_prepared(chosen)


def test_a_question_and_a_context_are_needed(tmp_path):
    with pytest.raises(RecipeError, match="that of the question and that of its context"):
        recipe(tmp_path, text="context")


def test_a_run_and_what_a_sweep_keeps(tmp_path):
    chosen = recipe(tmp_path)
    record = quiet_run(chosen, out=tmp_path / "out")
    assert set(record.metrics["exact_match"]) == {"base", "taylor"}
    subject = quietly_prepared(chosen)
    batches = {split: subject.data.evaluation(split, 16) for split in ("validation", "test")}
    outcome = judge(subject, subject.model, batches)
    assert isinstance(outcome, ModelOutcome)
    assert outcome.answers("test").value == pytest.approx(record.quality[0].value)
