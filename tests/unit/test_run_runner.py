"""The runner: what a run writes, also when it fails or is stopped, and the models that it takes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

import headprune as hp
from headprune import layouts
from headprune.core.changed import ChangedAnswers
from headprune.core.errors import InvalidValue, VerificationFailed
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
from headprune.recipes.validate import load_recipe
from headprune.report.verdict import verdict
from headprune.run import runner, stages
from headprune.run.subject import Subject
from tests.small_recipes import checked_recipe, quiet_run, quietly_prepared, write_rows
from tests.tiny_models import bert as tiny_bert
from tests.tiny_models import llama

WORDS = [f"w{i}" for i in range(20)]
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
RECOVER = [{"method": "mean_fold"}, {"method": "finetune", "settings": {"steps": 1}}]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    return tiny_bert(folder, "BertModel", hidden_size=16, max_position_embeddings=32)


def recipe(model: Any, folder: Path, task: str = "text_classification", **more: Any) -> Recipe:
    draw = random.Random(0)
    rows = []
    for i in range(60):
        words = draw.choices(WORDS, k=draw.randint(2, 8))
        rows.append({"text": " ".join(words), "other": words[0], "label": i % 3})
    data = {"path": str(write_rows(folder / "rows.jsonl", rows)), "text": "text"}
    standard = {
        "out": str(folder / "out"),
        "train": {"epochs": 1, "batch_size": 16, "learning_rate": 1e-3},
        "score": {"scorer": "taylor", "random_draws": 2},
    }
    return checked_recipe(task, model, data, **{**standard, **more})


@pytest.fixture(scope="module")
def finished(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, hp.RunRecord]:
    chosen = recipe(bert, tmp_path_factory.mktemp("finished"), recover=RECOVER)
    return chosen, quiet_run(chosen)


def test_what_a_finished_run_records(finished):
    record = finished[1]
    assert record.status == "done"
    rows = {row.name: row for row in record.quality if row.split == "test"}
    assert list(rows) == [
        *("base", "taylor", "magnitude", "random"),
        *("recovered (mean_fold)", "recovered (mean_fold + finetune)"),
    ]
    assert [row.trained for row in rows.values()] == [False] * 5 + [True]
    assert (rows["random"].draws, rows["base"].kept_heads, rows["taylor"].kept_heads) == (2, 8, 4)
    assert rows["random"].value == pytest.approx(sum(record.metrics["random_draws"]) / 2)
    validated = {row.name for row in record.quality if row.split == "validation"}
    assert validated == {"base", "taylor", *list(rows)[4:]}
    recovery = record.metrics["recovery"]
    assert (recovery["0"]["rows"], recovery["1"]["rows"]) == ("calibration", "train")
    assert [proof.what for proof in record.proofs] == ["outputs", "reload"]
    assert record.versions["torch"] == torch.__version__
    assert record.hardware["device"] == "cpu"


def test_random_draws_that_keep_the_same_count_as_one(bert, tmp_path):
    kept = {f"bert.encoder.layer.{layer}.attention": [0, 1] for layer in range(2)}
    select = {"keep_heads": 0.5, "must_keep": kept}
    chosen = recipe(bert, tmp_path, select=select, recover=RECOVER[:1], report=False)
    record = quiet_run(chosen)
    drawn = [row for row in record.quality if row.name.startswith("random")]
    assert [(row.name, row.draws) for row in drawn] == [
        ("random", 1),
        ("random, recovered (mean_fold)", 1),
    ]
    assert any("All 2 random draws keep the same heads" in text for text in record.warnings)


def test_every_row_is_compared_with_the_uncut_model_on_the_same_rows(finished):
    chosen, record = finished
    for row in record.quality:
        found = record.compared(row.name, "base", row.metric, row.split)
        assert (found is None) == (row.name == "base")
        if found is not None:
            base = next(r for r in record.quality if (r.name, r.split) == ("base", row.split))
            assert found.drop == pytest.approx(base.value - row.value)
            assert found.low <= found.drop <= found.high
        if row.name != "random":
            assert row.low <= row.value <= row.high
    assert record.compared("taylor", "random", "accuracy", "test") is not None
    assert "Removing 4 of 8 heads" in (Path(chosen.folder) / "model" / "README.md").read_text()


def test_what_the_final_model_answers_adds_up_to_its_accuracy(finished):
    chosen, record = finished
    rows = {row.name: row for row in record.quality if row.split == "test"}
    final = rows["recovered (mean_fold + finetune)"]
    assert sum(c.n_examples for c in record.classes) == final.n_examples
    for name, row in (("before", rows["base"]), ("after", final)):
        right = sum(getattr(c, name) for c in record.classes)
        assert right == pytest.approx(row.value * row.n_examples)
    changed = ChangedAnswers.load(Path(chosen.folder) / "answers.json")
    gained = sum(c.after - c.before for c in record.classes)
    assert changed.n_gained - changed.n_lost == gained
    texts = [json.loads(line)["text"] for line in Path(chosen.data.path).read_text().splitlines()]
    numbers = json.loads((Path(chosen.folder) / "rows.json").read_text())["test"]["rows"]
    in_data = [each.row - 1 for each in changed.rows]
    assert set(in_data) <= set(numbers), "numbers of the data, from 1"
    assert [each.text for each in changed.rows] == [texts[row] for row in in_data]


def test_random_heads_get_a_recovery_without_training_too(bert, tmp_path, monkeypatch):
    """And the answers of the last measurement are compared: nothing is measured twice."""
    judged: list[str] = []
    plain = Subject.judge

    def judge(self: Subject, model: Any, split: str) -> Any:
        judged.append(split)
        return plain(self, model, split)

    monkeypatch.setattr(Subject, "judge", judge)
    record = quiet_run(recipe(bert, tmp_path, recover=[{"method": "mean_fold"}]))
    # The plan and its recovery on both splits; on test rows magnitude, and random heads of two
    # draws before and after recovery.
    assert (judged.count("validation"), judged.count("test")) == (2, 2 + 1 + 2 + 2)
    rows = {row.name: row for row in record.quality if row.split == "test"}
    random, final = rows["random, recovered (mean_fold)"], rows["recovered (mean_fold)"]
    assert (random.draws, random.kept_heads) == (2, 4)
    found = record.compared("recovered (mean_fold)", "random", "accuracy", "test")
    assert found.drop == pytest.approx(random.value - final.value)
    assert "2 draws of random heads, cut and recovered alike" in verdict(record).details


def test_tokenizer_and_row_numbers_lie_beside_the_record(finished):
    from transformers import AutoTokenizer

    out, record = Path(finished[0].folder), finished[1]
    for folder in ("model", "base"):
        ids = AutoTokenizer.from_pretrained(out / folder)("w1 w2")["input_ids"]
        assert ids == [2, 5, 6, 3]
    rows = json.loads((out / "rows.json").read_text())
    for purpose in ("train", "validation", "test", "calibration"):
        assert rows[purpose]["digest"] == record.rows[purpose]["digest"]
        assert len(rows[purpose]["rows"]) == record.rows[purpose]["rows"]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), "interrupted", "interrupted by the user"),
        (VerificationFailed("x", "y", "z"), "failed", "x: must be y, got z"),
    ],
)
def test_a_broken_run_says_how_far_it_came(bert, tmp_path, monkeypatch, error, status, text):
    monkeypatch.setattr(stages, "compare_plans", Mock(side_effect=error))
    with pytest.raises(type(error)):
        quiet_run(recipe(bert, tmp_path))
    record = hp.RunRecord.load(tmp_path / "out" / "record.json")
    assert (record.status, record.stage, record.error) == (status, "compare", text)
    assert record.plan is not None
    assert "compare" not in record.timings


def test_a_report_that_fails_fails_the_run(bert, tmp_path, monkeypatch):
    from headprune.run import reporting

    chosen = recipe(bert, tmp_path, report=True)
    with monkeypatch.context() as patch:
        patch.setattr(reporting, "write_report", Mock(side_effect=OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            quiet_run(chosen)
    record = hp.RunRecord.load(tmp_path / "out" / "record.json")
    assert (record.status, record.stage, record.error) == ("failed", "report", "OSError: disk full")
    record = quiet_run(chosen)
    assert (record.status, record.stage) == ("done", "report")
    assert "running" not in (tmp_path / "out" / "report.md").read_text()
    assert load_recipe(tmp_path / "out" / "recipe.yaml") == chosen


def test_a_checked_recipe_takes_no_settings(bert, tmp_path):
    with pytest.raises(InvalidValue, match=r"settings: must be left out for a Recipe"):
        runner.prepared(recipe(bert, tmp_path), ["seed=1"])


def test_scoring_alone_writes_nothing(bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scores = runner.score_recipe(recipe(bert, tmp_path, out=None), say=lambda line: None)
    assert (scores.scorer, scores.n_heads) == ("taylor", 8)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_chosen_baseline_is_not_compared_with_itself(bert, tmp_path):
    record = quiet_run(recipe(bert, tmp_path, score={"scorer": "magnitude", "random_draws": 0}))
    assert [row.name for row in record.quality if row.split == "test"] == ["base", "magnitude"]


def test_the_recipes_seed_is_the_scorers_too(bert, tmp_path):
    found, model = [], trained(bert, tmp_path, ["a", "b", "c"])
    for seed, settings in ((1, {}), (2, {"seed": 1}), (2, {})):
        score = {"scorer": "random", "settings": settings}
        chosen = recipe(model, tmp_path, seed=seed, score=score, train=None)
        found.append(runner.score_recipe(chosen, say=lambda line: None))
    assert [scores.seed for scores in found] == [1, 1, 2]
    assert found[0].values == found[1].values != found[2].values


def test_an_untrained_head_needs_training(bert, tmp_path):
    with pytest.raises(InvalidValue, match=r"lacks classifier.bias.*Add a train section"):
        build_model(recipe(bert, tmp_path, train=None), (0, 1, 2))


def test_a_model_of_other_labels_is_told_from_an_untrained_one(bert, tmp_path):
    model = trained(bert, tmp_path, ["a", "b"])
    words = r"whose classifier.bias, classifier.weight have other sizes.*labels that the model"
    with pytest.raises(InvalidValue, match=words):
        build_model(recipe(model, tmp_path, train=None), (0, 1, 2))


def test_text_that_is_too_long_is_refused_before_training(bert, tmp_path):
    chosen = recipe(bert, tmp_path)
    rows = ({"text": f"w{i} " + " ".join(WORDS * 3), "label": i % 2} for i in range(30))
    write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InvalidValue, match=r"data.max_length: must be at most 32"):
        quiet_run(chosen)


def test_bad_fresh_models(tmp_path):
    bert = "BertForSequenceClassification"
    for name, config, words in (
        ("ViTForImageClasification", {}, "Did you mean 'ViTForImageClassification'"),
        ("pipeline", {}, "must be a Transformers model class"),
        (bert, {"hiden_size": 4}, "Did you mean 'hidden_size'"),
        (bert, {"hidden_size": 7}, "a valid BertConfig"),
    ):
        chosen = recipe({"class_name": name, "config": config}, tmp_path)
        with pytest.raises(hp.HeadPruneError, match=words):
            build_model(chosen, (0, 1))


def test_fresh_models_come_from_the_seed_and_leave_the_random_state(tmp_path):
    chosen = recipe({"class_name": "BertForSequenceClassification", "config": SMALL}, tmp_path)
    before = torch.random.get_rng_state()
    one = build_model(chosen, ("a", "b", "c"))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    two = build_model(chosen, ("a", "b", "c"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
    assert one.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_paths(tmp_path):
    assert resolve_path("someone/model") == "someone/model"
    assert resolve_path(str(tmp_path)) == str(tmp_path)
    assert Path(resolve_path("package:headprune/layouts")).name == "layouts"
    packaged = ("package:no_such_package/model", "package:headprune/none", "package:a b/c")
    for bad in (*packaged, "./none", "/none", "a/b/c"):
        with pytest.raises(InvalidValue, match=r"model.path"):
            resolve_path(bad)


def test_open_model_tells_what_is_wrong(tmp_path, bert, monkeypatch):
    assert type(open_model(str(bert))).__name__ == "BertModel"
    with pytest.raises(InvalidValue, match=r"without config.json"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidValue, match="MODEL: must be a folder from which"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidValue, match=r"PEFT adapters\. Install it: pip install peft"):
        open_model(str(tmp_path), "--model")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(InvalidValue, match="torch sees no GPU"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"


def test_a_policy_that_the_models_layout_lacks(tmp_path, monkeypatch):
    alone = dataclasses.replace(layouts.registry.get("llama"), policies=("group",))
    monkeypatch.setitem(layouts.registry._loaded, "llama", alone)
    select = {"keep_heads": 0.5, "policy": "free"}
    chosen = recipe(llama(tmp_path / "m"), tmp_path, "causal_lm", train=None, select=select)
    with pytest.raises(
        InvalidValue, match=r"select\.policy: .* got 'free'.* layout 'llama' \(group\)"
    ):
        quietly_prepared(chosen)


def test_text_needs_a_tokenizer(tmp_path):
    model = {"class_name": "LlamaForCausalLM", "config": {}}
    for task, hint in (("text_classification", False), ("causal_lm", True)):
        words = rf"model\.path: must be given, because {task}"
        with pytest.raises(InvalidValue, match=words) as caught:
            prepare(recipe(model, tmp_path, task))
        assert ("Or train one: data.tokenizer." in str(caught.value)) == hint


def trained(bert: Path, folder: Path, names: list[str]) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    shutil.copytree(bert, folder / "trained")
    numbers = {n: i for i, n in enumerate(names)}
    config = BertConfig.from_pretrained(bert, id2label=dict(enumerate(names)), label2id=numbers)
    BertForSequenceClassification(config).save_pretrained(folder / "trained")
    return folder / "trained"


def with_labels(chosen: Recipe, names: list[str]) -> Recipe:
    path = Path(chosen.data.path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, ({**row, "label": names[i % len(names)]} for i, row in enumerate(rows)))
    return chosen


@pytest.mark.parametrize(
    ("model_names", "data_names", "train", "expected"),
    [
        (["NEG", "POS", "MIXED"], ["pos", "neg"], False, ["NEG", "POS", "MIXED"]),
        (["good", "bad", "mixed"], [2, 0, 1], True, ["0", "1", "2"]),
        (None, ["b", "a"], True, ["a", "b"]),
    ],
)
def test_classes_are_called_as_the_model_calls_them_or_a_new_head_as_the_data_does(
    bert, tmp_path, model_names, data_names, train, expected
):
    model = trained(bert, tmp_path, model_names) if model_names else bert
    chosen = with_labels(recipe(model, tmp_path), data_names)
    chosen = chosen if train else chosen.model_copy(update={"train": None})
    assert quietly_prepared(chosen).model.config.id2label == dict(enumerate(expected))


def test_other_labels_than_the_models_need_training(bert, tmp_path):
    model = trained(bert, tmp_path, ["negative", "positive"])
    chosen = with_labels(recipe(model, tmp_path), ["neg", "positive"])
    (warning,) = number_labels(chosen, load_rows(chosen)).warnings
    assert "lack neg" in warning
    assert "new head was trained" in warning
    chosen = chosen.model_copy(update={"train": None})
    with pytest.raises(InvalidValue, match=r"data.label: .*got 'neg'. .*Or add a train section"):
        number_labels(chosen, load_rows(chosen))


def test_names_that_number_no_classes_are_none(tmp_path):
    from transformers import BertConfig

    names = {"id2label": {0: "neg", 2: "pos"}, "label2id": {"neg": 0, "pos": 2}}
    BertConfig(**names).save_pretrained(tmp_path / "model")
    chosen = recipe(tmp_path / "model", tmp_path, train=None)
    raw = number_labels(chosen, load_rows(with_labels(chosen, ["pos", "neg"])))
    assert (raw.labels, raw.label_ids) == (("neg", "pos"), {"neg": 0, "pos": 1})
    assert "does not name its classes" in raw.warnings[0]


def test_a_cut_model_is_cut_further(finished, tmp_path):
    chosen, first = finished
    assert [w for w in first.warnings if "newly initialised" in w and "classifier.weight" in w]
    cut = Path(chosen.folder) / "model"
    further = recipe(cut, tmp_path, train=None, select={"keep_heads": 3})
    second = quiet_run(further)
    rows = {row.name: row for row in second.quality if row.split == "test"}
    before = {row.name: row for row in first.quality if row.split == "test"}
    assert (rows["base"].kept_heads, rows["taylor"].kept_heads) == (4, 3)
    last = before["recovered (mean_fold + finetune)"]
    assert rows["base"].loss == pytest.approx(last.loss, rel=1e-5)
    assert not [w for w in second.warnings if "newly" in w]
    tuned = quietly_prepared(recipe(cut, tmp_path)).model
    assert sum(len(site.heads) for site in hp.find_sites(tuned)) == 4
    with pytest.raises(InvalidValue, match=r"as many outputs as the data has labels, 2"):
        build_model(further, (0, 1))
    with pytest.raises(InvalidValue, match=r"a model for token_classification"):
        build_model(further.model_copy(update={"task": "token_classification"}), (0, 1, 2))


def test_only_a_head_may_be_missing(bert, tmp_path):
    from transformers import BertModel

    folder = tmp_path / "model"
    chosen, model = recipe(folder, tmp_path), BertModel.from_pretrained(bert)
    state = {k: t for k, t in model.state_dict().items() if "layer.0.output" not in k}
    model.save_pretrained(folder, state_dict=state)
    with pytest.raises(InvalidValue, match=r"are missing or .*bert.encoder.layer.0.output"):
        build_model(chosen, (0, 1, 2))
    model.encoder.layer[1].attention.self.query.weight = torch.nn.Parameter(torch.zeros(8, 16))
    model.save_pretrained(folder)
    with pytest.raises(InvalidValue, match=r"1 are missing or .*layer.1.attention.self.query"):
        build_model(chosen, (0, 1, 2))
    BertModel.from_pretrained(bert, add_pooling_layer=False).save_pretrained(folder)
    assert "bert.pooler.dense.weight" in load_model(chosen, (0, 1, 2)).warnings[0]


def test_positions_for_padding_are_not_for_tokens():
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(vocab_size=20, max_position_embeddings=12, pad_token_id=1, **SMALL)
    model = RobertaModel(config)
    assert longest_input(model) == 10
    model(torch.full((1, 10), 3))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(torch.full((1, 11), 3))


@pytest.mark.parametrize(("given", "name"), [(None, "bfloat16"), ("float32", "float32")])
def test_a_checkpoint_keeps_its_dtype_unless_the_recipe_has_another(given, name, bert, tmp_path):
    from transformers import AutoModel

    AutoModel.from_pretrained(bert).bfloat16().save_pretrained(
        shutil.copytree(bert, tmp_path / "m")
    )
    score = {"scorer": "magnitude", "random_draws": 0}
    record = quiet_run(recipe({"path": str(tmp_path / "m"), "dtype": given}, tmp_path, score=score))
    assert {p.dtype for p in record.proofs} == {name}
    for folder in ("base", "model"):
        weights = safetensors.torch.load_file(tmp_path / "out" / folder / "model.safetensors")
        assert {t.dtype for t in weights.values()} == {getattr(torch, name)}
    said = [w for w in record.warnings if "the weights are trained in bfloat16" in w]
    assert len(said) == (given is None)


def test_pixels_are_of_the_weights_dtype():
    """Swin, unlike ViT, casts nothing by itself."""
    sizes = {"image_size": 8, "patch_size": 1, "num_channels": 1, "embed_dim": 8, "window_size": 2}
    swin = {**sizes, "depths": [1, 1], "num_heads": [2, 4]}
    model = {"class_name": "SwinForImageClassification", "config": swin, "dtype": "float16"}
    data = {"path": "sklearn:digits", "holdout": 60, "test_holdout": 1600, "calibration": 8}
    score = {"scorer": "taylor", "random_draws": 1}
    chosen = checked_recipe("image_classification", model, data, score=score)
    assert runner.score_recipe(chosen, say=lambda line: None).n_heads == 6
