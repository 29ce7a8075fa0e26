"""The runner: what a run leaves behind, also when it fails, is stopped, or finds a folder in
use."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import headprune as hp
from headprune import layouts
from headprune.core.errors import InvalidValue, UnknownName, VerificationFailed
from headprune.data.datasets import load_rows
from headprune.data.labels import number_labels
from headprune.data.models import (
    build_model,
    load_model,
    longest_input,
    open_model,
    prepare,
    resolve_device,
    resolve_path,
)
from headprune.recipes.schema import Recipe
from headprune.recipes.validate import check_recipe, load_recipe
from headprune.run import runner, stages
from tests.tiny_models import llama

WORDS = [f"w{i}" for i in range(20)]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny BERT body and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    one, two = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(one, two, [("[CLS]", 2), ("[SEP]", 3)])
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 16,
    }
    BertModel(BertConfig(vocab_size=24, max_position_embeddings=32, **sizes)).save_pretrained(
        folder
    )
    return folder


def recipe(bert: Path, folder: Path, task: str = "text_classification", **sections: Any) -> Recipe:
    draw = random.Random(0)
    rows = []
    for i in range(60):
        words = draw.choices(WORDS, k=draw.randint(2, 8))
        label = {"regression": i / 60, "token_classification": [w[-1] for w in words]}.get(
            task, i % 3
        )
        text = words if task == "token_classification" else " ".join(words)
        rows.append({"text": text, "other": words[0], "label": label})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return check_recipe(
        {
            "name": "test",
            "description": "for tests",
            "task": task,
            "device": "cpu",
            "out": str(folder / "out"),
            "model": {"path": str(bert)},
            "data": {"path": str(folder / "rows.jsonl"), "text": "text"},
            "train": {"epochs": 1, "batch_size": 16, "learning_rate": 1e-3},
            "score": {"scorer": "taylor", "random_draws": 2},
            "select": {"keep_heads": 0.5},
            "report": False,
            **sections,
        }
    )


def quiet_run(chosen: Recipe, **settings: Any) -> hp.RunRecord:
    return runner.run_recipe(chosen, say=lambda line: None, **settings)


@pytest.mark.parametrize(
    ("task", "text", "metric"),
    [
        ("text_classification", ["text", "other"], "accuracy"),
        ("regression", "text", "mse"),
        ("token_classification", "text", "accuracy"),
    ],
)
def test_tasks(bert: Path, tmp_path: Path, task: str, text: Any, metric: str) -> None:
    data = {"path": str(tmp_path / "rows.jsonl"), "text": text}
    settings = {"steps": 1, "distill": 0.0 if task == "regression" else 0.5}
    steps = [{"method": "mean_fold"}, {"method": "finetune", "settings": settings}]
    record = quiet_run(recipe(bert, tmp_path, task, data=data, recover=steps))
    assert record.status == "done"
    assert {row.metric for row in record.quality} == {metric}
    rows = {row.name: row for row in record.quality if row.split == "test"}
    assert list(rows) == [
        *("base", "taylor", "magnitude", "random"),
        *("recovered (mean_fold)", "recovered (mean_fold + finetune)"),
    ]
    assert [row.trained for row in rows.values()] == [False] * 5 + [True]
    assert (rows["random"].draws, rows["base"].kept_heads, rows["taylor"].kept_heads) == (2, 8, 4)
    assert rows["random"].value == pytest.approx(sum(record.metrics["random_draws"]) / 2)
    assert {"base", "taylor", *list(rows)[4:]} == {
        row.name for row in record.quality if row.split == "validation"
    }
    assert record.metrics["recovery"]["0"]["rows"] == "calibration"
    assert record.metrics["recovery"]["1"]["rows"] == "train"
    assert [proof.what for proof in record.proofs] == ["outputs", "reload"]
    assert record.versions["torch"] == torch.__version__
    assert record.hardware["device"] == "cpu"


def test_a_run_is_reproducible(bert: Path, tmp_path: Path) -> None:
    first = quiet_run(recipe(bert, tmp_path))
    torch.rand(3)  # the run depends on its seed alone
    second = quiet_run(recipe(bert, tmp_path), overwrite=True)
    assert first.quality == second.quality
    assert first.scores == second.scores
    assert first.plan == second.plan
    assert first.rows == second.rows
    other = quiet_run(recipe(bert, tmp_path, seed=1), overwrite=True)
    assert other.rows["train"]["digest"] != first.rows["train"]["digest"]


def test_a_finished_run_is_not_overwritten_unless_asked(bert: Path, tmp_path: Path) -> None:
    chosen = recipe(bert, tmp_path)
    quiet_run(chosen)
    before = (tmp_path / "out" / "record.json").read_bytes()
    with pytest.raises(InvalidValue, match=r"a finished run.*--overwrite"):
        quiet_run(chosen)
    assert (tmp_path / "out" / "record.json").read_bytes() == before
    quiet_run(chosen, out=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "record.json").is_file()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    quiet_run(chosen, overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_files_that_are_no_runs_are_left_alone(bert: Path, tmp_path: Path) -> None:
    chosen = recipe(bert, tmp_path)
    (tmp_path / "out" / "model").mkdir(parents=True)
    with pytest.raises(InvalidValue, match=r"model and no readable record.json"):
        quiet_run(chosen)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValue, match="must be a folder, got a file"):
        quiet_run(chosen, out=tmp_path / "file")


def failing(error: BaseException) -> Any:
    def stage(*args: Any) -> Any:
        raise error

    return stage


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), "interrupted", "interrupted by the user"),
        (RuntimeError("out of memory"), "failed", "RuntimeError: out of memory"),
        (VerificationFailed("x", "y", "z"), "failed", "x: must be y, got z"),
    ],
)
def test_a_broken_run_says_how_far_it_came(
    bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: str,
    text: str,
) -> None:
    chosen = recipe(bert, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "compare_plans", failing(error))
        with pytest.raises(type(error)):
            quiet_run(chosen)
    record = hp.RunRecord.load(tmp_path / "out" / "record.json")
    assert (record.status, record.stage, record.error) == (status, "compare", text)
    assert record.plan is not None
    assert "compare" not in record.timings
    assert quiet_run(chosen).status == "done"  # and does not stand in the way


def test_nothing_is_written_for_a_recipe_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"score.scorer"):
        runner.run_recipe("digits-vit", ["score.scorer=tailor"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_budget_ends_in_the_record(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(hp.HeadPruneError, match="at least 2"):
        quiet_run(recipe(bert, tmp_path, select={"keep_heads": 1}))
    assert hp.RunRecord.load(tmp_path / "out" / "record.json").status == "failed"


def test_scoring_alone_writes_nothing(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scores = runner.score_recipe(recipe(bert, tmp_path, out=None), say=lambda line: None)
    assert (scores.scorer, scores.n_heads) == ("taylor", 8)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_chosen_baseline_is_not_compared_with_itself(bert: Path, tmp_path: Path) -> None:
    record = quiet_run(recipe(bert, tmp_path, score={"scorer": "magnitude", "random_draws": 0}))
    assert [row.name for row in record.quality if row.split == "test"] == ["base", "magnitude"]


# --- models
# ------------------------------------------------------------------------------------------------------


def test_an_untrained_head_needs_training(bert: Path, tmp_path: Path) -> None:
    chosen = recipe(bert, tmp_path, train=None)
    with pytest.raises(InvalidValue, match=r"lacks classifier.bias.*Add a train section"):
        build_model(chosen, (0, 1, 2))


def test_text_that_is_too_long_is_refused_before_training(bert: Path, tmp_path: Path) -> None:
    chosen = recipe(bert, tmp_path)
    rows = [{"text": " ".join(WORDS * 3), "label": i % 2} for i in range(30)]
    rows = [{**row, "text": f"w{i} {row['text']}"} for i, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InvalidValue, match=r"data.max_length: must be at most 32"):
        quiet_run(chosen)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"class_name": "ViTForImageClasification"}, "Did you mean 'ViTForImageClassification'"),
        ({"class_name": "pipeline"}, "must be a Transformers model class"),
        (
            {"class_name": "BertForSequenceClassification", "config": {"hiden_size": 4}},
            "Did you mean 'hidden_size'",
        ),
        (
            {"class_name": "BertForSequenceClassification", "config": {"hidden_size": 7}},
            "a valid BertConfig",
        ),
    ],
)
def test_bad_fresh_models(bert: Path, tmp_path: Path, model: dict[str, Any], words: str) -> None:
    chosen = recipe(bert, tmp_path, model=model)
    with pytest.raises(hp.HeadPruneError, match=words):
        build_model(chosen, (0, 1))


def test_fresh_models_come_from_the_seed_and_leave_the_random_state(
    bert: Path, tmp_path: Path
) -> None:
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    chosen = recipe(
        bert, tmp_path, model={"class_name": "BertForSequenceClassification", "config": small}
    )
    before = torch.random.get_rng_state()
    one = build_model(chosen, ("a", "b", "c"))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    two = build_model(chosen, ("a", "b", "c"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
    assert one.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_paths(tmp_path: Path) -> None:
    assert resolve_path("someone/model") == "someone/model"
    assert resolve_path(str(tmp_path)) == str(tmp_path)
    assert Path(resolve_path("package:headprune/layouts")).name == "layouts"
    for bad in (
        "package:no_such_package/model",
        "package:headprune/none",
        "package:a b/c",
        "./none",
        "/none",
        "a/b/c",
    ):
        with pytest.raises(InvalidValue, match=r"model.path"):
            resolve_path(bad)


def test_open_model_tells_what_is_wrong(tmp_path: Path, bert: Path) -> None:
    assert type(open_model(str(bert))).__name__ == "BertModel"
    with pytest.raises(InvalidValue, match=r"without config.json"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidValue, match="MODEL: must be a folder from which"):
        open_model(str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_folder_of_adapters_is_opened_with_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidValue, match=r"PEFT adapters\. Install it: pip install peft"):
        open_model(str(tmp_path), "--model")


def test_cuda_without_a_gpu() -> None:
    with pytest.raises(InvalidValue, match="torch sees no GPU"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"


def test_unknown_recipe() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'trec-minilm'"):
        runner.run_recipe("trec-minilmm")


# --- models that were trained or cut before
# --------------------------------------------------------------------------


def trained(bert: Path, folder: Path, names: list[str]) -> Path:
    """A classifier with named classes and the tokenizer of ``bert``."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    config = BertConfig.from_pretrained(
        bert, id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
    )
    BertForSequenceClassification(config).save_pretrained(folder / "trained")
    AutoTokenizer.from_pretrained(bert).save_pretrained(folder / "trained")
    return folder / "trained"


def named(chosen: Recipe, names: list[str]) -> Recipe:
    """The recipe's rows, labelled by name."""
    path = Path(chosen.data.path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "\n".join(json.dumps({**row, "label": names[i % len(names)]}) for i, row in enumerate(rows))
    )
    return chosen


@pytest.mark.parametrize("names", [["pos", "neg"], ["pos", "mixed", "neg"]])
def test_a_trained_model_keeps_its_numbering(bert: Path, tmp_path: Path, names: list[str]) -> None:
    model = trained(bert, tmp_path, names)
    chosen = named(recipe(bert, tmp_path, train=None, model={"path": str(model)}), ["neg", "pos"])
    subject = runner.prepared(chosen, say=lambda line: None)
    assert subject.model.config.id2label == dict(enumerate(names))
    raw = load_rows(chosen)
    assert raw.labels == ("neg", "pos")
    got = [example["labels"] for example in subject.data.examples["test"]]
    assert got == [names.index(label) for label in raw.splits["test"]["label"]]


def test_other_labels_than_the_models_need_training(bert: Path, tmp_path: Path) -> None:
    model = {"path": str(trained(bert, tmp_path, ["negative", "positive"]))}
    chosen = named(recipe(bert, tmp_path, model=model), ["neg", "positive"])
    record = quiet_run(chosen)
    assert [w for w in record.warnings if "lack neg" in w and "trained anew" in w]
    with pytest.raises(
        InvalidValue, match=r"data.label: .*negative, positive, got 'neg'. .*Or add a train section"
    ):
        quiet_run(chosen.model_copy(update={"train": None}), out=tmp_path / "other")


def test_unnamed_classes_are_said(bert: Path, tmp_path: Path) -> None:
    model = {"path": str(trained(bert, tmp_path, ["LABEL_0", "LABEL_1"]))}
    chosen = named(recipe(bert, tmp_path, train=None, model=model), ["b", "a"])
    raw = number_labels(chosen, load_rows(chosen))
    assert raw.labels == ("a", "b")
    assert "does not name its classes" in raw.warnings[0]


@pytest.mark.parametrize("names", [{0: "neg", 2: "pos"}, {0: "neg", 1: "neg"}])
def test_names_that_number_no_classes_are_none(
    bert: Path, tmp_path: Path, names: dict[int, str]
) -> None:
    from transformers import BertConfig

    BertConfig(id2label=names, label2id={n: i for i, n in names.items()}).save_pretrained(
        tmp_path / "model"
    )
    chosen = named(
        recipe(bert, tmp_path, train=None, model={"path": str(tmp_path / "model")}), ["pos", "neg"]
    )
    raw = number_labels(chosen, load_rows(chosen))
    assert (raw.labels, raw.label_ids) == (("neg", "pos"), {"neg": 0, "pos": 1})
    assert (
        "does not name its classes; those of the data were numbered in sorted order"
        in raw.warnings[0]
    )


def test_a_checked_recipe_takes_no_settings(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidValue, match=r"settings: must be left out for a Recipe, which is checked already"
    ):
        runner.prepared(recipe(bert, tmp_path), ["seed=1"])


def test_a_policy_that_the_models_layout_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = dataclasses.replace(layouts.registry.get("llama"), policies=("group",))
    monkeypatch.setitem(layouts.registry._loaded, "llama", alone)
    select = {"keep_heads": 0.5, "policy": "free"}
    raw = {**recipe(tmp_path, tmp_path, "causal_lm").model_dump(), "train": None, "select": select}
    chosen = check_recipe({**raw, "model": {"path": str(llama(tmp_path / "model"))}})
    with pytest.raises(
        InvalidValue, match=r"select\.policy: must be one that model.* has, got 'free'"
    ) as caught:
        runner.prepared(chosen, say=lambda line: None)
    assert "There it must be found with a policy that layout 'llama' allows: group." in str(
        caught.value
    )


@pytest.mark.parametrize(("task", "hint"), [("text_classification", False), ("causal_lm", True)])
def test_text_needs_a_tokenizer(bert: Path, tmp_path: Path, task: str, hint: bool) -> None:
    model = {"class_name": "LlamaForCausalLM", "config": {}}
    with pytest.raises(
        InvalidValue, match=rf"model\.path: must be given, because {task} on text"
    ) as caught:
        prepare(recipe(bert, tmp_path, task, model=model))
    assert ("Or train one: data.tokenizer." in str(caught.value)) == hint


def classed(chosen: Recipe, names: list[str], folder: Path) -> Recipe:
    """The recipe's rows as the hub has them: parquet, with numbers of classes and what they are
    called."""
    from datasets import ClassLabel, Dataset

    rows = Dataset.from_json(chosen.data.path, cache_dir=str(folder / "cache")).remove_columns(
        "label"
    )
    numbers = [i % len(names) for i in range(len(rows))]
    rows.add_column("label", numbers).cast_column("label", ClassLabel(names=names)).to_parquet(
        folder / "rows.parquet"
    )
    data = chosen.data.model_copy(update={"path": str(folder / "rows.parquet")})
    return chosen.model_copy(update={"data": data})


def test_numbers_with_names_are_put_into_the_order_of_the_model(bert: Path, tmp_path: Path) -> None:
    model = trained(bert, tmp_path, ["NEG", "POS", "MIXED"])
    chosen = classed(
        recipe(bert, tmp_path, train=None, model={"path": str(model)}), ["pos", "neg"], tmp_path
    )
    subject = runner.prepared(chosen, say=lambda line: None)
    assert subject.model.config.id2label == {0: "NEG", 1: "POS", 2: "MIXED"}
    given = load_rows(chosen).splits["test"]["label"]
    assert set(given) == {0, 1}
    assert [example["labels"] for example in subject.data.examples["test"]] == [
        1 - label for label in given
    ]


def test_numbers_with_names_that_the_model_lacks_are_taken_as_they_are(
    bert: Path, tmp_path: Path
) -> None:
    model = {"path": str(trained(bert, tmp_path, ["good", "bad"]))}
    chosen = classed(recipe(bert, tmp_path, train=None, model=model), ["pos", "neg"], tmp_path)
    subject = runner.prepared(chosen, say=lambda line: None)
    given = load_rows(chosen).splits["test"]["label"]
    assert [example["labels"] for example in subject.data.examples["test"]] == list(given)
    assert [
        w
        for w in subject.journal.record.warnings
        if "calls its classes good, bad; the data calls them pos" in w
    ]


def test_numbers_without_names_leave_the_model_its_names(bert: Path, tmp_path: Path) -> None:
    model = {"path": str(trained(bert, tmp_path, ["good", "bad", "mixed"]))}
    subject = runner.prepared(
        recipe(bert, tmp_path, train=None, model=model), say=lambda line: None
    )
    assert subject.model.config.id2label == {0: "good", 1: "bad", 2: "mixed"}
    given = load_rows(subject.recipe).splits["test"]["label"]
    assert [example["labels"] for example in subject.data.examples["test"]] == list(given)
    anew = runner.prepared(recipe(bert, tmp_path, model=model), say=lambda line: None)
    assert anew.model.config.id2label == {0: "0", 1: "1", 2: "2"}


def test_a_fresh_head_is_called_as_the_data_calls_its_classes(bert: Path, tmp_path: Path) -> None:
    chosen = classed(recipe(bert, tmp_path), ["b", "a"], tmp_path)
    subject = runner.prepared(chosen, say=lambda line: None)
    assert subject.model.config.id2label == {0: "b", 1: "a"}


def test_a_cut_model_is_cut_further(bert: Path, tmp_path: Path) -> None:
    first = quiet_run(recipe(bert, tmp_path, select={"keep_heads": 5}))
    assert [w for w in first.warnings if "newly initialised" in w and "classifier.weight" in w]
    cut = tmp_path / "out" / "model"
    chosen = recipe(bert, tmp_path, train=None, model={"path": str(cut)}, select={"keep_heads": 3})
    second = quiet_run(chosen, out=tmp_path / "second")
    rows = {(row.name, row.split): row for row in second.quality}
    before = {(row.name, row.split): row for row in first.quality}
    assert (rows["base", "test"].kept_heads, rows["taylor", "test"].kept_heads) == (5, 3)
    assert rows["base", "test"].loss == pytest.approx(before["taylor", "test"].loss, rel=1e-5)
    assert not [w for w in second.warnings if "newly" in w]
    tuned = recipe(bert, tmp_path, model={"path": str(cut)}, select={"keep_heads": 3})
    quiet_run(tuned, out=tmp_path / "third")
    assert (
        sum(len(s.heads) for s in hp.find_sites(open_model(str(tmp_path / "third" / "base")))) == 5
    )
    with pytest.raises(InvalidValue, match=r"as many outputs as the data has labels, 2"):
        build_model(chosen, (0, 1))
    with pytest.raises(InvalidValue, match=r"a model for token_classification"):
        build_model(chosen.model_copy(update={"task": "token_classification"}), (0, 1, 2))


def test_only_a_head_may_be_missing(bert: Path, tmp_path: Path) -> None:
    from transformers import BertModel

    model = BertModel.from_pretrained(bert)
    model.encoder.layer[1].attention.self.query.weight = torch.nn.Parameter(torch.zeros(8, 16))
    model.save_pretrained(tmp_path / "model")
    chosen = recipe(bert, tmp_path, model={"path": str(tmp_path / "model")})
    with pytest.raises(
        InvalidValue,
        match=r"1 are missing or of another shape: bert.encoder.layer.1.attention.self.q",
    ):
        build_model(chosen, (0, 1, 2))
    state = {
        k: v
        for k, v in BertModel.from_pretrained(bert).state_dict().items()
        if "layer.0.output" not in k
    }
    BertModel.from_pretrained(bert).save_pretrained(tmp_path / "model", state_dict=state)
    with pytest.raises(
        InvalidValue, match=r"are missing or of another shape: bert.encoder.layer.0.output"
    ):
        build_model(chosen, (0, 1, 2))
    BertModel.from_pretrained(bert, add_pooling_layer=False).save_pretrained(tmp_path / "model")
    assert "bert.pooler.dense.weight" in load_model(chosen, (0, 1, 2)).warnings[0]


# --- what lies in the folder
# -----------------------------------------------------------------------------------------


def test_tokenizer_and_row_numbers_lie_beside_the_record(bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    record = quiet_run(recipe(bert, tmp_path))
    for folder in ("model", "base"):
        assert AutoTokenizer.from_pretrained(tmp_path / "out" / folder)("w1 w2")["input_ids"] == [
            2,
            5,
            6,
            3,
        ]
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())
    for purpose in ("train", "validation", "test", "calibration"):
        assert rows[purpose]["digest"] == record.rows[purpose]["digest"]
        assert len(rows[purpose]["rows"]) == record.rows[purpose]["rows"]


def test_a_report_that_fails_fails_the_run(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headprune.run import reporting

    chosen = recipe(bert, tmp_path, report=True)
    with monkeypatch.context() as patch:
        patch.setattr(reporting, "write_report", failing(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            quiet_run(chosen)
    record = hp.RunRecord.load(tmp_path / "out" / "record.json")
    assert (record.status, record.stage, record.error) == ("failed", "report", "OSError: disk full")
    record = quiet_run(chosen)
    assert (record.status, record.stage) == ("done", "report")
    assert "running" not in (tmp_path / "out" / "report.md").read_text()
    assert load_recipe(tmp_path / "out" / "recipe.yaml") == chosen


def test_positions_for_padding_are_not_for_tokens() -> None:
    from transformers import RobertaConfig, RobertaModel

    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    model = RobertaModel(
        RobertaConfig(vocab_size=20, max_position_embeddings=12, pad_token_id=1, **small)
    )
    assert longest_input(model) == 10
    model(torch.full((1, 10), 3))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(torch.full((1, 11), 3))


# --- dtypes
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"), [(None, torch.bfloat16), ("float32", torch.float32)]
)
def test_a_checkpoint_keeps_its_dtype_unless_the_recipe_has_another(
    given: str | None, expected: torch.dtype, bert: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer

    half = tmp_path / "half"
    AutoModel.from_pretrained(bert).bfloat16().save_pretrained(half)
    AutoTokenizer.from_pretrained(bert).save_pretrained(half)
    model = {"path": str(half), **({"dtype": given} if given else {})}
    record = quiet_run(recipe(bert, tmp_path, model=model, recover=[{"method": "mean_fold"}]))
    assert record.status == "done"
    name = str(expected).removeprefix("torch.")
    assert {p.dtype for p in record.proofs} == {name}
    for folder in ("base", "model"):
        weights = safetensors.torch.load_file(tmp_path / "out" / folder / "model.safetensors")
        assert {t.dtype for t in weights.values()} == {expected}
    trained = [w for w in record.warnings if "trained in" in w]
    assert trained == (
        []
        if given
        else [
            f"the weights are trained in {name}, where small steps are lost; model.dtype: float32"
            " keeps them"
        ]
    )


def test_pixels_are_of_the_weights_dtype(tmp_path: Path) -> None:
    """Swin, unlike ViT, casts nothing by itself."""
    sizes = {"image_size": 8, "patch_size": 1, "num_channels": 1, "embed_dim": 8, "window_size": 2}
    swin = {**sizes, "depths": [1, 1], "num_heads": [2, 4]}
    raw = {
        "name": "test",
        "description": "for tests",
        "task": "image_classification",
        "device": "cpu",
        "out": str(tmp_path / "out"),
        "model": {"class_name": "SwinForImageClassification", "config": swin, "dtype": "float16"},
        "data": {"path": "sklearn:digits", "holdout": 60, "test_holdout": 1600, "calibration": 8},
        "score": {"scorer": "taylor", "random_draws": 1},
        "select": {"keep_heads": 0.5},
        "report": False,
    }
    assert quiet_run(check_recipe(raw)).status == "done"


def test_the_recipes_seed_is_the_scorers_too(bert: Path, tmp_path: Path) -> None:
    """As in a sweep: what a scorer draws, it draws by the recipe's seed, unless its settings have
    one."""
    seeds = {}
    for seed, settings in ((1, {}), (2, {}), (2, {"seed": 1})):
        score = {"scorer": "random", "settings": settings}
        found = runner.score_recipe(
            recipe(bert, tmp_path, seed=seed, score=score), say=lambda line: None
        )
        seeds[seed, bool(settings)] = found
    assert [found.seed for found in seeds.values()] == [1, 2, 1]
    assert seeds[1, False].values == seeds[2, True].values != seeds[2, False].values
