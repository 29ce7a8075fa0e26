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
from headprune.run.runner import prepared
from tests.recipe_fixtures import FIXTURES
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


def test_test_rows_without_labels_give_way_to_those_of_validation(
    contest: Path, tmp_path: Path
) -> None:
    made = tmp_path / "mine.yaml"
    result = call("init", "--model", contest / "model", "--data", contest, "--out", made)
    assert result.exit_code == 0, result.output
    assert "the rows of test have no labels" in result.stderr
    lines = made.read_text().splitlines()
    assert [
        line.partition("#")[2].strip()
        for line in lines
        if "test_split" in line or "holdout" in line
    ] == [
        "the rows of test have no labels",
        "so rows of train are the validation rows",
    ]
    raw = load_rows(load_recipe(made))
    assert (raw.facts["test"]["from"], raw.facts["test"]["rows"]) == ("test", SIZES["validation"])
    assert raw.facts["source"]["splits"] == {"train": "train", "test": "validation"}
    assert raw.parts["validation"].source == "train"
    assert {label for rows in raw.splits.values() for label in rows["label"]} == {0, 1}
    dry = call("run", made, "--dry-run", "--set", "bench=null", "--out", tmp_path / "out")
    assert dry.exit_code == 0, dry.output


def test_a_model_is_cut_on_them_without_a_recipe(contest: Path, tmp_path: Path) -> None:
    quick = (
        "--set",
        "bench=null",
        "--set",
        "score.random_draws=0",
        "--set",
        "report=false",
        "--set",
        "recover=[]",
    )
    where = (
        "--model",
        contest / "model",
        "--data",
        contest,
        "--keep",
        "0.5",
        "--out",
        tmp_path / "small",
    )
    result = call("prune", *where, *quick)
    assert result.exit_code == 0, result.output
    record = RunRecord.load(tmp_path / "small" / "run" / "record.json")
    assert {row.n_examples for row in record.quality if row.split == "test"} == {
        SIZES["validation"]
    }


@pytest.mark.parametrize(
    ("kind", "labels", "expected"),
    [
        (Value("int64"), {}, "validation"),
        (
            Value("float64"),
            {"test": [-1.0] * 16, "train": [0.5] * 60, "validation": [1.5] * 12},
            "validation",
        ),
        (Value("int64"), {"test": [None] * 16}, "validation"),
        (
            Value("int64"),
            {"test": [1] + [-1] * 15},
            None,
        ),  # some have labels: a mistake to be told, not a contest
        (
            Value("float64"),
            {"test": [-1.0] * 16, "train": [-0.5] * 60, "validation": [1.5] * 12},
            None,
        ),
        (Value("int64"), {"validation": [-1] * 12}, None),  # no labels there either
        (Value("string"), {split: ["bad", "good"] * (n // 2) for split, n in SIZES.items()}, None),
    ],
)
def test_only_rows_without_any_label_give_way(
    contest: Path, tmp_path: Path, kind: Any, labels: dict[str, list[Any]], expected: str | None
) -> None:
    write(tmp_path, kind, **labels)
    found = yaml.safe_load(guess(str(contest / "model"), str(tmp_path)).text)["data"]
    assert found.get("test_split") == expected
    assert found.get("holdout") == (0.1 if expected else None)


def test_many_rows_hold_out_a_count(contest: Path, tmp_path: Path) -> None:
    write(tmp_path)
    n = 10_001
    rows = {"idx": list(range(n)), "sentence": ["a b"] * n, "label": [0] * n}
    Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "validation.parquet").rename(tmp_path / "dev.parquet")
    found = yaml.safe_load(guess(str(contest / "model"), str(tmp_path)).text)["data"]
    assert (found["test_split"], found["holdout"]) == ("dev", 1000)


# ---------------------------------------------------------------- task and columns


def configured(folder: Path, kind: str, **settings: Any) -> Path:
    """A folder with nothing but the configuration of a model of this class: no more is looked
    at."""
    (folder / "model").mkdir()
    facts = {"model_type": "bert", "architectures": [kind], **settings}
    (folder / "model" / "config.json").write_text(json.dumps(facts))
    return folder / "model"


def guessed(
    folder: Path, kind: str, row: dict[str, Any], *, task: str | None = None, **settings: Any
) -> Any:
    (folder / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    return guess(str(configured(folder, kind, **settings)), str(folder / "rows.jsonl"), task=task)


PICTURE = [[0.0, 0.5], [1.0, 0.0]]
SOUND = {"array": [0.0, 0.5], "sampling_rate": 8}
PAIR = {"sentence1": "a", "sentence2": "b"}
ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
GRADES = {"problem_type": "regression"}
SQUAD = {"question": "who", "context": "we do", "answers": {"text": ["we"], "answer_start": [0]}}


@pytest.mark.parametrize(
    ("kind", "settings", "row", "task", "columns", "why"),
    [
        *(
            (
                "BertForSequenceClassification",
                grades,
                {**PAIR, "score": 0.5},
                "regression",
                {"text": ["sentence1", "sentence2"], "label": "score"},
                ["the text is in 'sentence1' and 'sentence2'", "the labels are in 'score'"],
            )
            for grades in (ONE_LABEL, GRADES)
        ),
        (
            "BertForSequenceClassification",
            {},
            {"premise": "a", "hypothesis": "b", "verdict": "yes"},
            "text_classification",
            {"text": ["premise", "hypothesis"], "label": "verdict"},
            ["the text is in 'premise' and 'hypothesis'", "the labels are in 'verdict'"],
        ),
        (
            "ViTForImageClassification",
            {},
            {"pixels": PICTURE, "class": 1},
            "image_classification",
            {"image": "pixels", "label": "class"},
            ["image is in 'pixels'", "the labels are in 'class'"],
        ),
        (
            "Wav2Vec2ForSequenceClassification",  # named as those of text are
            {},
            {"clip": SOUND, "intent": "pay"},
            "audio_classification",
            {"audio": "clip", "label": "intent"},
            ["audio is in 'clip'", "the labels are in 'intent'"],
        ),
        (
            "ASTForAudioClassification",
            {},
            {"file": "a.wav", "speaker": 3},
            "audio_classification",
            {"audio": "file", "label": "speaker"},
            ["audio is in 'file'", "the labels are in 'speaker'"],
        ),
        (
            "BertForTokenClassification",
            {},
            {"words": ["we", "do"], "tags": ["A", "B"]},  # words both
            "token_classification",
            {"text": "words", "label": "tags"},
            ["text is in 'words'", "the labels are in 'tags'"],
        ),
        (
            "BertForQuestionAnswering",
            {},
            {"id": "x", **SQUAD},
            "question_answering",
            {"text": ["question", "context"], "label": "answers"},
            ["the columns are those of SQuAD"],
        ),
        (
            "MarianMTModel",
            {},
            {"en": "we", "de": "wir"},
            "translation",
            {"text": "en", "target": "de"},
            ["text is in 'en'", "target is in 'de'"],
        ),
        (
            "LlamaForCausalLM",
            {},
            {"story": "we do"},
            "causal_lm",
            {"text": "story"},
            ["text is in 'story'"],
        ),
        (
            "GPT2LMHeadModel",
            {},
            {"attention_mask": [1, 1], "input_ids": [3, 4]},
            "causal_lm",
            {"tokens": "input_ids"},
            ["the tokens are in 'input_ids'"],
        ),
        (
            "LlamaForCausalLM",
            {},
            {"a": [3, 4]},
            "causal_lm",
            {"tokens": "a"},
            ["the tokens are in 'a'"],
        ),
    ],
)
def test_a_model_with_a_head_and_its_columns(
    tmp_path: Path,
    kind: str,
    settings: dict[str, Any],
    row: dict[str, Any],
    task: str,
    columns: Any,
    why: list[str],
) -> None:
    found = guessed(tmp_path, kind, row, **settings)
    recipe = found.recipe()
    assert (recipe.task, recipe.train) == (task, None)
    assert {name: getattr(recipe.data, name) for name in columns} == columns
    assert found.why == (f"the task is {task}: {kind} is a model for it", *why)
    assert recipe.data.max_length == (
        None if task in ("image_classification", "audio_classification") else 256
    )


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"picture": PICTURE, "label": 1}, "image_classification"),
        ({"clip": SOUND, "label": 1}, "audio_classification"),
        ({"words": ["we"], "tags": [1]}, "token_classification"),
        ({"text": "we", "score": 0.5}, "regression"),
        ({"text": "we", "score": 1}, "text_classification"),
    ],
)
def test_a_model_without_a_head_is_for_what_the_columns_hold(
    tmp_path: Path, row: dict[str, Any], task: str
) -> None:
    found = guessed(tmp_path, "BertModel", row)
    assert found.recipe().task == task
    assert (
        found.why[0] == f"the task is {task}: BertModel has no head for it, so it is trained first"
    )
    assert found.recipe().train is not None


def test_a_text_without_labels_is_for_a_language_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("we do")
    assert (
        guess(str(configured(tmp_path, "LlamaModel")), str(tmp_path / "a.txt")).recipe().task
        == "causal_lm"
    )


@pytest.mark.parametrize(
    ("task", "row", "where", "got"),
    [
        (None, {"text": "we", "more": "do"}, "--task", "none"),
        (None, {"number": 1}, "--task", "none"),
        ("image_classification", {"a": PICTURE, "b": PICTURE, "label": 1}, "data.image", "a, b"),
        ("image_classification", {"a": PICTURE}, "data.label", "none"),
        ("audio_classification", {"sound": "a.wav", "label": 1}, "data.audio", "none"),
        (
            "audio_classification",
            {"audio": "a.wav", "by": "me", "in": "it"},
            "data.label",
            "by, in",
        ),
        ("token_classification", {"text": "we do", "tags": [1]}, "data.text", "none"),
        (
            "question_answering",
            {"question": "who", "context": "we"},
            "data.text",
            "question, context",
        ),
        (
            "translation",
            {"en": "we", "de": "wir", "id": "x"},
            "data.text and data.target",
            "en, de, id",
        ),
        ("causal_lm", {"a": "we", "b": "do"}, "data.text", "a, b"),
        ("text_classification", {"text": "we"}, "data.label", "none"),
        ("text_classification", {"label": 1}, "data.text", "none"),
    ],
)
def test_columns_that_could_be_either_are_asked_for(
    tmp_path: Path, task: str | None, row: dict[str, Any], where: str, got: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        guessed(tmp_path, "BertModel", row, task=task)
    assert (refused.value.where, refused.value.got) == (where, got)


def test_sound_as_the_hub_has_it_is_told_without_what_decodes_it(tmp_path: Path) -> None:
    from datasets import Audio

    write_wav(tmp_path / "a.wav", [0.0, 0.5], 8)
    rows = Dataset.from_dict({"clip": [None, str(tmp_path / "a.wav")], "label": [0, 1]})
    rows.cast_column("clip", Audio()).to_parquet(tmp_path / "rows.parquet")
    found = guess(
        str(configured(tmp_path, "WavLMForSequenceClassification")), str(tmp_path / "rows.parquet")
    ).recipe()
    assert (found.task, found.data.audio, found.data.label) == (
        "audio_classification",
        "clip",
        "label",
    )


@pytest.mark.parametrize(
    "name",
    [
        "beans-vit",
        "minds14-wav2vec2",
        "ner-bert",
        "opus-mt-en-de",
        "smollm-wikitext",
        "squad-distilbert",
        "stsb-minilm",
    ],
)
def test_what_is_guessed_reads_the_data_for_the_model(tmp_path: Path, name: str) -> None:
    """The models and rows of the shipped recipes, whose columns nobody names here."""
    torch.manual_seed(0)
    given = dict(setting.split("=", 1) for setting in FIXTURES[name](tmp_path))
    found = guess(given["model.path"], given["data.path"])
    own = [
        f"{key}={value}"
        for key, value in given.items()
        if key in ("data.seconds", "data.holdout", "data.block")
    ]
    shipped, recipe = load_recipe(name), found.recipe([*own, "device=cpu"])
    assert (recipe.task, recipe.train) == (shipped.task, None)
    assert recipe.data.text_columns == shipped.data.text_columns or recipe.task == "translation"
    subject = prepared(recipe, say=lambda line: None)
    batch = subject.data.batches("test", 4)[0]
    assert bool(torch.isfinite(subject.model(**batch)[0]).all())


@pytest.mark.parametrize(
    "name",
    [
        "a, b",
        "[a",
        "*a",
        "a # b",
        "a: b",
        "\N{GRINNING FACE} # b",
        "a\nb",
        "1",
        "~",
        " a",
        "caf\xe9",
        "a\x85#",
        '"',
        "]",
    ],
)
def test_a_name_is_written_so_that_it_is_read_again(tmp_path: Path, name: str) -> None:
    found = guessed(tmp_path, "BertModel", {name: "we", "other": "do", "label": 1}).recipe()
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
def test_a_name_that_a_recipe_would_fill_in_is_refused(
    tmp_path: Path, column: str, folder: str, file: str, where: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(f"{column},other,label\nwe,us,1\ndo,so,0\n")
    configured(tmp_path, "BertModel").rename(tmp_path / folder)
    with pytest.raises(InvalidValue, match=r"must be without \$\{.*Rename the") as refused:
        guess(str(tmp_path / folder), str(tmp_path / file))
    assert refused.value.where == where


def test_a_column_that_is_not_used_may_have_any_name(tmp_path: Path) -> None:
    row = {"sentence1": "we", "sentence2": "do", "${seed}": "x", "label": 1}
    assert guessed(tmp_path, "BertModel", row).recipe().data.text == ["sentence1", "sentence2"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("mod\xe8le", "mod-le-pruned"),
        ("\xe8", "mine-pruned"),
        ("a b.c", "a-b.c-pruned"),
        ("m" * 120, "m" * 90 + "-pruned"),
    ],
)
def test_a_run_is_named_after_the_models_folder(tmp_path: Path, folder: str, name: str) -> None:
    (tmp_path / "rows.csv").write_text("text,label\nwe,1\ndo,0\n")
    configured(tmp_path, "BertModel").rename(tmp_path / folder)
    assert guess(str(tmp_path / folder), str(tmp_path / "rows.csv")).recipe().name == name


def test_a_class_name_sets_no_keys_of_the_recipe(tmp_path: Path) -> None:
    """It comes out of a model's folder, which may be anybody's, and stands in a comment."""
    found = guessed(tmp_path, "A\nout: /elsewhere # ForCausalLM", {"text": "we do"})
    assert found.recipe().out is None
    assert (
        found.why[0]
        == r"the task is causal_lm: 'A\nout: /elsewhere # ForCausalLM' is a model for it"
    )
