"""Recipes that nobody wrote: task and columns of every kind of data, and data of a contest, whose
test rows keep their labels to themselves: GLUE's have -1 for every label."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, Features, Value
from typer.testing import CliRunner

from headprune.cli.main import app
from headprune.core.errors import InvalidValue
from headprune.core.record import RunRecord
from headprune.data.datasets import load_rows
from headprune.data.guess import guess
from headprune.recipes.validate import load_recipe
from tests.recipe_fixtures import FIXTURES
from tests.small_recipes import quietly_prepared, write_rows
from tests.tiny_models import WORDS, bert, write_wav

SIZES = {"train": 60, "validation": 12, "test": 16}


def write(folder: Path, label: Any = None, **labels: list[Any]) -> None:
    """Sentences in parquet files; by default with the labels of SST-2 on the hub."""
    draw = random.Random(0)
    for split, n in SIZES.items():
        columns = {
            "idx": list(range(n)),
            "sentence": [" ".join(draw.choices(WORDS, k=6)) for _ in range(n)],
            "label": labels.get(split) or [-1 if split == "test" else i % 2 for i in range(n)],
        }
        kinds = {
            "idx": Value("int32"),
            "sentence": Value("string"),
            "label": label or ClassLabel(names=["bad", "good"]),
        }
        Dataset.from_dict(columns, features=Features(kinds)).to_parquet(folder / f"{split}.parquet")


@pytest.fixture(scope="module")
def contest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contest")
    write(folder)
    torch.manual_seed(0)
    bert(folder / "model", num_labels=2)
    return folder


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_test_rows_without_labels_give_way_to_validation(contest, tmp_path):
    made = tmp_path / "mine.yaml"
    result = call("init", "--model", contest / "model", "--data", contest, "--out", made)
    assert result.exit_code == 0, result.output
    assert "the rows of test have no labels" in result.stderr
    text = made.read_text()
    assert "# the rows of test have no labels" in text
    assert "# so rows of train are the validation rows" in text
    raw = load_rows(load_recipe(made))
    assert (raw.facts["test"]["from"], raw.facts["test"]["rows"]) == ("test", SIZES["validation"])
    assert raw.facts["source"]["splits"] == {"train": "train", "test": "validation"}
    assert raw.parts["validation"].source == "train"
    assert {label for rows in raw.splits.values() for label in rows["label"]} == {0, 1}
    dry = call("run", made, "--dry-run", "--set", "bench=null", "--out", tmp_path / "out")
    assert dry.exit_code == 0, dry.output


def test_a_model_is_cut_on_them_without_a_recipe(contest, tmp_path):
    quick = ("bench=null", "score.random_draws=0", "report=false", "recover=[]")
    settings = [word for setting in quick for word in ("--set", setting)]
    where = ("--model", contest / "model", "--data", contest, "--out", tmp_path / "small")
    result = call("prune", *where, "--keep", "0.5", *settings)
    assert result.exit_code == 0, result.output
    record = RunRecord.load(tmp_path / "small" / "run" / "record.json")
    judged = {row.n_examples for row in record.quality if row.split == "test"}
    assert judged == {SIZES["validation"]}
    # The lines of progress have the plan's notes.
    assert record.plan.notes
    assert all(note in result.stderr for note in record.plan.notes)
    said = set(result.stdout.splitlines())
    assert not {f"note: {note}" for note in record.plan.notes} & said, "said twice"


GRADED: dict[str, list[Any]] = {"train": [0.5] * 60, "validation": [1.5] * 12}


@pytest.mark.parametrize(
    ("kind", "labels", "without"),
    [
        (Value("int64"), {}, True),
        (Value("float64"), {**GRADED, "test": [-1.0] * 16}, True),
        (Value("int64"), {"test": [None] * 16}, True),
        # A mistake to be told, not a contest: some have labels.
        (Value("int64"), {"test": [1] + [-1] * 15}, False),
        (Value("int64"), {"validation": [-1] * 12}, False),
        (Value("float64"), {**GRADED, "train": [-0.5] * 60, "test": [-1.0] * 16}, False),
        (Value("string"), {name: ["bad", "good"] * (n // 2) for name, n in SIZES.items()}, False),
    ],
)
def test_only_rows_without_any_label_give_way(contest, tmp_path, kind, labels, without):
    write(tmp_path, kind, **labels)
    task = "regression" if kind.dtype == "float64" else None
    found = yaml.safe_load(guess(str(contest / "model"), str(tmp_path), task=task).text)["data"]
    asked = (found.get("test_split"), found.get("holdout"))
    assert asked == (("validation", 0.1) if without else (None, None))


def configured(folder: Path, kind: str, **settings: Any) -> Path:
    """A folder with nothing but the configuration of a model of this class: no more is looked
    at."""
    (folder / "model").mkdir()
    facts = {"model_type": "bert", "architectures": [kind], **settings}
    (folder / "model" / "config.json").write_text(json.dumps(facts))
    return folder / "model"


def guessed(
    folder: Path, kind: str, row: Any, task: str | None = None, text: Any = (), **settings: Any
) -> Any:
    """What is guessed from three equal rows; ``text`` names the columns of a pair."""
    write_rows(folder / "rows.jsonl", [row] * 3)
    named = dict(zip(("text", "text_pair"), text, strict=False))
    model = configured(folder, kind, **settings)
    return guess(str(model), str(folder / "rows.jsonl"), task=task, **named)


PICTURE = [[0.0, 0.5], [1.0, 0.0]]
SOUND = {"array": [0.0, 0.5], "sampling_rate": 8}
PAIR = {"sentence1": "a", "sentence2": "b"}
SQUAD = {"question": "who", "context": "we do", "answers": {"text": ["we"], "answer_start": [0]}}
TEXTS, SPEECH = "BertForSequenceClassification", "Wav2Vec2ForSequenceClassification"
KINDS = ("text", "image", "audio", "token")
CLASSES, IMAGES, CLIPS, TAGS = (f"{kind}_classification" for kind in KINDS)


@pytest.mark.parametrize(
    ("kind", "row", "task", "columns"),
    [
        (TEXTS, {"premise": "a", "hypothesis": "b", "is": "x"}, CLASSES, "text text label"),
        ("ViTForImageClassification", {"pixels": PICTURE, "class": 1}, IMAGES, "image label"),
        # Named as those of text are.
        (SPEECH, {"clip": SOUND, "intent": "pay"}, CLIPS, "audio label"),
        ("ASTForAudioClassification", {"file": "a.wav", "speaker": 3}, CLIPS, "audio label"),
        # Words both.
        ("BertForTokenClassification", {"words": ["we"], "tags": ["A"]}, TAGS, "text label"),
        ("BertForQuestionAnswering", SQUAD, "question_answering", "text text label"),
        ("MarianMTModel", {"en": "we", "de": "wir"}, "translation", "text target"),
        ("LlamaForCausalLM", {"story": "we do"}, "causal_lm", "text"),
        ("GPT2LMHeadModel", {"input_ids": [3, 4], "attention_mask": [1]}, "causal_lm", "tokens"),
        ("LlamaForCausalLM", {"a": [3, 4]}, "causal_lm", "tokens"),
        # A model without a head is for what the columns hold.
        ("BertModel", {"picture": PICTURE, "label": 1}, IMAGES, "image label"),
        ("BertModel", {"clip": SOUND, "label": 1}, CLIPS, "audio label"),
        ("BertModel", {"text": "we", "score": 0.5}, "regression", "text label"),
        ("BertModel", {"text": "we", "score": 1}, CLASSES, "text label"),
    ],
)
def test_task_and_columns_follow_from_the_model_and_from_what_the_columns_hold(
    tmp_path, kind, row, task, columns
):
    found = guessed(tmp_path, kind, row)
    recipe = found.recipe()
    assert (recipe.task, recipe.train is None) == (task, kind != "BertModel")
    expected: dict[str, list[str]] = {}
    for name, column in zip(columns.split(), row, strict=False):
        expected.setdefault(name, []).append(column)
    for name, names in expected.items():
        assert getattr(recipe.data, name) in (names[0], names), name
    why = f"{kind} has a head" if recipe.train is None else f"{kind} has no task head for this"
    assert found.why[0].startswith(f"the task is {task}: {why}")
    assert recipe.data.max_length == (None if task in (IMAGES, CLIPS) else 256)


@pytest.mark.parametrize(
    ("text", "rows", "with_neurons"),
    [
        ("word " * 3, 1024, 2048),  # short: the most
        ("word " * 32, 512, 2048),  # 512 of these have 16,384 words
        ("word " * 64, None, 1024),  # the 256 rows that are scored on have as many
        ("字" * 500, None, 790),  # no blanks
        ("word " * 256, None, None),
        ({"body": "word"}, None, None),  # nothing to count
    ],
)
def test_short_texts_are_refitted_on_more_rows(tmp_path, text, rows, with_neurons):
    name = "text" if isinstance(text, str) else "text.body"
    model = configured(tmp_path, TEXTS, num_labels=2)
    path = write_rows(tmp_path / "a.jsonl", ({"text": text, "label": i % 2} for i in range(300)))
    found = guess(str(model), str(path), text=name)
    (step,) = found.recipe().recover
    assert (step.examples, step.rows) == (rows, "train" if rows else None)
    if rows is not None:
        # More calibration rows are more rows for the refit, unless the recovery is set.
        more = ["data.calibration=2000"]
        assert found.recipe(more).recover[0].examples == 2000
        assert found.recipe([*more, "recover.0.examples=300"]).recover[0].examples == 300
    neurons = ["select.feed_forward=true", "select.keep_heads=null", "select.keep_macs=0.5"]
    (step,) = found.recipe(neurons).recover
    assert (step.examples, step.rows) == (with_neurons, "train" if with_neurons else None)
    if with_neurons is not None:
        (step,) = found.recipe([*neurons, "data.calibration=3000"]).recover
        assert step.examples == (3000 if rows else None)
        for setting, examples in (
            ("recover.0.examples=9", 9),
            ("recover.0.settings.ridge=0.1", with_neurons),  # says nothing of rows
            ("recover.0.rows=calibration", rows),
        ):
            (step,) = found.recipe([*neurons, setting]).recover
            assert step.examples == examples, setting
    # So few rows are all scored on.
    write_rows(path, ({"text": text, "label": i % 2} for i in range(200)))
    (few,) = guess(str(model), str(path), text=name).recipe().recover
    assert few.examples is None


@pytest.mark.parametrize("settings", [{"id2label": {"0": "X"}}, {"problem_type": "regression"}])
def test_a_model_of_one_number_grades(tmp_path, settings):
    found = guessed(tmp_path, TEXTS, {**PAIR, "score": 0.5}, **settings)
    assert found.recipe().task == "regression"
    assert found.why[1:] == ("label: score (by its name); text: sentence1 and sentence2",)


def test_a_text_without_labels_is_for_a_language_model(tmp_path):
    (tmp_path / "a.txt").write_text("we do")
    found = guess(str(configured(tmp_path, "LlamaModel")), str(tmp_path / "a.txt"))
    assert found.recipe().task == "causal_lm"


QUESTIONS = {"question": "a", "context": "b"}
THREE = {"a": "b", "c": "d", "e": "f"}


@pytest.mark.parametrize(
    ("task", "row", "where", "got"),
    [
        (None, {"text": "we", "more": "do"}, "--task", "none"),
        (None, {"number": 1}, "--task", "none"),
        (IMAGES, {"a": PICTURE, "b": PICTURE, "label": 1}, "data.image", "a, b"),
        (IMAGES, {"a": PICTURE}, "--label", "none"),
        (CLIPS, {"sound": "a.wav", "label": 1}, "data.audio", "none"),
        (CLIPS, {"audio": "a.wav", "a": "b", "c": "d"}, "--label", "a, c"),
        (TAGS, {"text": "we do", "tags": [1]}, "--text", "none"),
        ("question_answering", QUESTIONS, "data.text", "question, context"),
        ("translation", THREE, "data.text and data.target", "a, c, e"),
        ("causal_lm", {"a": "we", "b": "do"}, "--text", "a, b"),
        (CLASSES, {"text": "we"}, "--label", "none"),
        (CLASSES, {"label": 1}, "--text", "none"),
    ],
)
def test_columns_that_could_be_either_are_asked_for(tmp_path, task, row, where, got):
    with pytest.raises(InvalidValue) as refused:
        guessed(tmp_path, "BertModel", row, task=task)
    assert (refused.value.where, refused.value.got) == (where, got)


def test_sound_as_the_hub_has_it_is_told_without_what_decodes_it(tmp_path):
    from datasets import Audio

    write_wav(tmp_path / "a.wav", [0.0, 0.5], 8)
    rows = Dataset.from_dict({"clip": [None, str(tmp_path / "a.wav")] * 2, "label": [0, 1] * 2})
    rows.cast_column("clip", Audio()).to_parquet(tmp_path / "rows.parquet")
    model = configured(tmp_path, "WavLMForSequenceClassification")
    found = guess(str(model), str(tmp_path / "rows.parquet")).recipe()
    columns = (found.data.audio, found.data.label)
    assert (found.task, *columns) == ("audio_classification", "clip", "label")


@pytest.mark.parametrize("name", ["beans-vit", "minds14-wav2vec2", "ner-bert", "squad-distilbert"])
def test_what_is_guessed_reads_the_data_for_the_model(tmp_path, name):
    """The models and rows of the shipped recipes, whose columns nobody names here."""
    torch.manual_seed(0)
    given = dict(setting.split("=", 1) for setting in FIXTURES[name](tmp_path))
    found = guess(given["model.path"], given["data.path"])
    amounts = ("data.seconds", "data.holdout", "data.block")
    own = [f"{key}={value}" for key, value in given.items() if key in amounts]
    shipped, recipe = load_recipe(name), found.recipe([*own, "device=cpu"])
    assert (recipe.task, recipe.train) == (shipped.task, None)
    assert recipe.data.text_columns == shipped.data.text_columns
    subject = quietly_prepared(recipe)
    batch = subject.data.batches("test", 4)[0]
    assert bool(torch.isfinite(subject.model(**batch)[0]).all())


@pytest.mark.parametrize(
    "name",
    ["a, b", "[a", "*a", "a # b", "a: b", "\N{GRINNING FACE} # b", "a\nb", "1", "~", "a\x85#"],
)
def test_a_name_is_written_so_that_it_is_read_again(tmp_path, name):
    row = {name: "we", "other": "do", "label": 1}
    found = guessed(tmp_path, "BertModel", row, text=(name, "other")).recipe()
    assert (found.data.text, found.data.label) == ([name, "other"], "label")


@pytest.mark.parametrize(
    ("column", "folder", "file", "where"),
    [
        ("a ${seed}", "model", "rows.csv", "data: a column's name"),
        ("text", "model-${seed}", "rows.csv", "--model"),
        ("text", "model", "rows-${ seed }.csv", "--data"),
        ("text", "model", "${name}/rows.csv", "--data"),
    ],
)
def test_a_name_that_a_recipe_would_fill_in_is_refused(tmp_path, column, folder, file, where):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(f"{column},label\nwe,1\ndo,0\n us,0")
    configured(tmp_path, "BertModel").rename(tmp_path / folder)
    with pytest.raises(InvalidValue, match=r"must be without \$\{.*Rename the") as refused:
        guess(str(tmp_path / folder), str(tmp_path / file))
    assert refused.value.where == where


LONG = "m" * 90 + "-pruned"


@pytest.mark.parametrize(
    ("folder", "name"), [("mod\xe8le", "mod-le-pruned"), ("\xe8", "mine-pruned"), ("m" * 120, LONG)]
)
def test_a_run_is_named_after_the_models_folder(tmp_path, folder, name):
    (tmp_path / "rows.csv").write_text("text,label\nwe,1\ndo,0\nus,0\n")
    configured(tmp_path, "BertModel").rename(tmp_path / folder)
    assert guess(str(tmp_path / folder), str(tmp_path / "rows.csv")).recipe().name == name


def test_a_class_name_sets_no_keys_of_the_recipe(tmp_path):
    found = guessed(tmp_path, "A\nout: /elsewhere # ForCausalLM", {"text": "we do"})
    assert found.recipe().out is None
    assert r"causal_lm: 'A\nout: /elsewhere # ForCausalLM' has a head for this task" in found.why[0]


def test_many_rows_hold_out_a_count(contest, tmp_path):
    write(tmp_path)
    n = 10_001
    rows = {"idx": list(range(n)), "sentence": ["a b"] * n, "label": [0] * n}
    Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    found = yaml.safe_load(guess(str(contest / "model"), str(tmp_path)).text)["data"]
    assert (found["test_split"], found["holdout"]) == ("validation", 1000)
